"""What torch writes into the header of a safetensors file that holds pieces of tensors.

The texts of a header are `DCP_SHARDING_INFO`, JSON with the place of each piece in its tensor, and
`DCP_VERSION`. How large the whole tensor is, nothing says.

Source: torch/distributed/checkpoint/{filesystem,_hf_utils}.py, torch 2.8 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptkit.core.errors import FormatError, InputError, UnsupportedError
from ckptkit.core.index import Shape
from ckptkit.formats.weight_map import loads_strictly

if TYPE_CHECKING:
    from ckptkit.formats.safetensors import Header

_INFO = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_KNOWN_VERSIONS = {"1.0"}
_OFFSETS = "saved_offsets"
_MOST = 2**63 - 1


def saved_offsets(header: Header, *, where: str) -> Mapping[str, Shape]:
    """Returns where each tensor of a file begins in the tensor that it is a piece of.

    Args:
        header: The header of the file.
        where: The file, for messages.

    Returns:
        For each name one number for each dimension, in elements.

    Raises:
        UnsupportedError: If the header does not tell, or if its version is not known.
        FormatError: If what it tells does not fit its tensors.
    """
    text = header.metadata.get(_INFO)
    if text is None:
        raise UnsupportedError(
            f"header has no {_INFO!r}, so that nothing says which part of its tensor each piece is",
            where=where,
            hint="save again with torch 2.8 or later: what wrote this kept no places",
        )
    version = header.metadata.get(_VERSION)
    if version not in _KNOWN_VERSIONS:
        raise UnsupportedError(
            f"{_VERSION!r} is {version!r} against {', '.join(sorted(_KNOWN_VERSIONS))}, which are"
            " the layouts that are read",
            where=where,
            hint="it was written by a newer torch: look for a newer ckptkit",
        )
    return _checked(loads_strictly(text.encode(), where=f"{where}: {_INFO}"), header, where)


def check_whole(header: Header, *, where: str) -> None:
    """Refuses a file that holds pieces, where it is about to be taken for whole tensors.

    Files that torch wrote whole say that each tensor begins at its begin. What cannot be
    understood is let pass: it tells of no piece.

    Raises:
        UnsupportedError: If the header says that a tensor begins elsewhere.
    """
    if _INFO not in header.metadata:
        return
    try:
        found = saved_offsets(header, where=where)
    except InputError:
        return
    for name, offsets in found.items():
        if any(offsets):
            raise UnsupportedError(
                f"holds of tensor {name!r} the piece from {list(offsets)} on, and no whole tensor",
                where=where,
                hint="it is the shard of one rank under another name: give the directory that"
                " holds the shards of all ranks, named as torch named them",
            )


def _checked(found: object, header: Header, where: str) -> Mapping[str, Shape]:
    if not isinstance(found, dict):
        raise FormatError(f"{_INFO!r} is not a JSON object", where=where)
    names = {tensor.name for tensor in header.tensors}
    if names != found.keys():
        name = min(names ^ found.keys())
        held = "the header has, it has not" if name in names else "it has, the header has not"
        raise FormatError(f"{_INFO!r} and the header disagree on {name!r}: {held}", where=where)
    return {
        tensor.name: _offsets(found[tensor.name], tensor.shape, f"{where}: tensor {tensor.name!r}")
        for tensor in header.tensors
    }


def _offsets(fields: object, shape: Shape, where: str) -> Shape:
    offsets = fields.get(_OFFSETS) if isinstance(fields, dict) else None
    if not isinstance(offsets, list) or len(offsets) != len(shape):
        raise FormatError(
            f"{_OFFSETS!r} is not a list of {len(shape)} numbers, as its shape {list(shape)} is",
            where=where,
        )
    for offset, size in zip(offsets, shape, strict=True):
        if type(offset) is not int or not 0 <= offset <= _MOST - size:
            raise FormatError(
                f"{_OFFSETS!r} are {offsets} against natural numbers below 2**63", where=where
            )
    return tuple(offsets)
