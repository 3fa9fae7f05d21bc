"""`pytorch_model.bin`: a full state dict as `torch.save` writes it.

Source: torch.save of 2.13 for the records; Transformers for the names of sharded files.

The pickles of `torch.save`, written opcode by opcode so that torch is not needed.

Sources: torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3` and torch/serialization.py
`persistent_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.geometry import row_major_strides
from ckptkit.plan.layouts.hf import index_file
from ckptkit.plan.layouts.opcodes import (
    call,
    global_name,
    integer,
    items,
    mapping,
    numbers,
    pickled,
    scalar,
    sequence,
    text,
)
from ckptkit.plan.layouts.zip import ZipParts
from ckptkit.plan.plan import OutputFile, Product, TensorSpec, contiguous, numbered, split_by_size


def tensor(spec: TensorSpec, storage: str) -> bytes:
    """Pushes a dense tensor that fills the storage record `data/{storage}`."""
    dtype = spec.dtype
    name = dtype.storage or "UntypedStorage"
    module = "torch" if dtype.storage else "torch.storage"
    length = spec.elements if dtype.storage else spec.size_bytes
    identity = sequence(
        [text("storage"), global_name(module, name), text(storage), text("cpu"), integer(length)]
    )
    arguments = [
        identity + b"Q",
        integer(0),
        numbers(spec.shape),
        numbers(row_major_strides(spec.shape)),
        b"\x89",
        call(global_name("collections", "OrderedDict"), b")"),
    ]
    if dtype.storage:
        return call(global_name("torch._utils", "_rebuild_tensor_v2"), sequence(arguments))
    arguments.append(global_name("torch", dtype.name))
    return call(global_name("torch._utils", "_rebuild_tensor_v3"), sequence(arguments))


def state_dict_pickle(specs: Sequence[TensorSpec]) -> bytes:
    items = [(text(spec.name), tensor(spec, str(i))) for i, spec in enumerate(specs)]
    return pickled(mapping(items))


def tensor_pickle(spec: TensorSpec) -> bytes:
    return pickled(tensor(spec, "0"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor among plain values, which fills the storage record `data/{storage}`."""

    spec: TensorSpec
    storage: str


def value_opcodes(value: Any) -> bytes:
    """Pushes a plain value: numbers, texts, None, and tuples, lists and dictionaries of them.

    Args:
        value: `Stored` tensors may be in it.
    """
    if isinstance(value, Stored):
        return tensor(value.spec, value.storage)
    if isinstance(value, dict):
        return mapping([(scalar(key), value_opcodes(inner)) for key, inner in value.items()])
    if isinstance(value, list):
        return items(map(value_opcodes, value))
    if isinstance(value, tuple):
        return sequence(map(value_opcodes, value))
    return scalar(value)


INDEX_NAME = "pytorch_model.bin.index.json"


def layout_torch_full(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out as `pytorch_model.bin`, or as several files with an index.

    `torch.load(weights_only=True)` opens each file as a dictionary of tensors.

    Returns:
        The weight files, and their index where there are several.
    """
    groups = split_by_size(products, max_file_bytes)
    names = numbered("pytorch_model", "bin", len(groups))
    files = [
        contiguous(name, archive_of(group, prefix=name.rpartition(".")[0]).rows)
        for name, group in zip(names, groups, strict=True)
    ]
    if len(files) > 1:
        files.append(index_file(INDEX_NAME, names, groups))
    return files


def archive_of(products: Sequence[Product], *, prefix: str) -> ZipParts:
    """Returns the archive of a state dict."""
    parts = ZipParts(prefix)
    parts.add_bytes("data.pkl", state_dict_pickle([product.spec for product in products]))
    _add_all(parts, products)
    return parts


def archive_of_one(product: Product, first_segment: int) -> ZipParts:
    """Returns the archive of a single tensor, as it lies in a `.distcp` file."""
    parts = ZipParts("archive", first_segment)
    parts.add_bytes("data.pkl", tensor_pickle(product.spec))
    _add_all(parts, [product])
    return parts


def _add_all(parts: ZipParts, products: Sequence[Product]) -> None:
    parts.add_bytes("byteorder", b"little")
    for number, product in enumerate(products):
        parts.add_tensor(f"data/{number}", product.spec, product.body)
    parts.add_bytes("version", b"3\n")
    parts.finish()
