"""Keeping the file map of another model: the same names of files, the same tensors in each.

What is uploaded once more then has the same files as before, and of a file that changed only the
changed parts travel. Inside a file tensors lie as in all our outputs, which is also the order
of the safetensors library: larger item sizes first, then by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn
from ckptkit.planning.files import name_order
from ckptkit.planning.plan import Product

_LISTED = 3


@dataclass(frozen=True, slots=True)
class FileMap:
    """Which file of a model holds which tensor.

    Attributes:
        location: The model's folder, for messages.
        files: The file's name by the name of the tensor.
    """

    location: str
    files: Mapping[Fqn, str]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tensors of each file to be written, and what the user should know of it."""

    groups: tuple[tuple[str, tuple[Product, ...]], ...]
    notes: tuple[str, ...]


def distribute(
    products: Sequence[Product],
    file_map: FileMap,
    *,
    is_wanted: Callable[[str], bool],
    tied: Collection[Fqn],
) -> Distribution:
    """Puts each tensor into the file that it has in another model.

    A tensor that the other model has not, such as a head that is no longer tied, goes to the
    file of the tensor before it in the order of the names, so that no file is new.

    Args:
        products: What is to be written.
        file_map: The other model's files.
        is_wanted: Tells whether the user left a name in.
        tied: Names that are not written because another tensor holds their bytes.

    Returns:
        The files that hold something, by name.

    Raises:
        RefusedError: If the output would lack a tensor that the other model has.
    """  # noqa: DOC501  `_lacks` makes it
    written = {product.spec.name for product in products}
    lacking = [
        name
        for name in file_map.files
        if name not in written and name not in tied and is_wanted(name)
    ]
    if lacking:
        raise _lacks(lacking, file_map, shared=len(file_map.files) - len(lacking))
    groups: dict[str, list[Product]] = {}
    added: dict[str, str] = {}
    ordered = sorted(products, key=lambda product: name_order(product.spec.name))
    known = [file for p in ordered if (file := file_map.files.get(p.spec.name)) is not None]
    file = known[0] if known else min(file_map.files.values())
    for product in ordered:
        name = product.spec.name
        file = file_map.files.get(name, file)
        if name not in file_map.files:
            added[name] = file
        groups.setdefault(file, []).append(product)
    named = tuple((name, tuple(groups[name])) for name in sorted(groups))
    return Distribution(named, tuple(_notes(added, file_map, groups)))


def _lacks(lacking: Sequence[Fqn], file_map: FileMap, *, shared: int) -> RefusedError:
    more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
    if not shared:
        hint = "name the model that the run was started from; see --names for names on the Hub"
    else:
        pattern = re.sub(r"\.\d+\.", ".*.", lacking[0])
        hint = f"pass --exclude '{pattern}' if the output is to lack it"
    return RefusedError(
        f"holds tensor {lacking[0]!r}{more}, which the output would lack",
        where=f"--like {file_map.location}",
        hint=hint,
    )


def _notes(added: Mapping[str, str], file_map: FileMap, written: Collection[str]) -> Sequence[str]:
    notes = []
    for name, file in list(added.items())[:_LISTED]:
        notes.append(f"{file_map.location} has no tensor {name!r}: it lies in {file!r}")
    if len(added) > _LISTED:
        notes.append(
            f"{len(added) - _LISTED:,} more tensors that {file_map.location} has not lie beside"
            " the tensors before them"
        )
    left = sorted(set(file_map.files.values()) - set(written))
    if left:
        notes.append(
            f"files of {file_map.location} that would hold nothing are not written:"
            f" {', '.join(left)}"
        )
    return notes
