"""`pytorch_model_fsdp_0/`: a model as torch.distributed.checkpoint and accelerate write it.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py of 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptkit.core.index import Shape
from ckptkit.layouts.torch_full import archive_of_one
from ckptkit.layouts.torch_pickles import (
    call,
    global_name,
    integer,
    mapping,
    numbers,
    pickled,
    sequence,
    text,
)
from ckptkit.layouts.zip_parts import Row
from ckptkit.planning.files import split_by_size
from ckptkit.planning.plan import Literal, OutputFile, Product, TensorSpec, contiguous

FOLDER = "pytorch_model_fsdp_0"
CONTAINER = "model"
_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
_EMPTY, _NEW_OBJECT, _BUILD = b")", b"\x81", b"b"


@dataclass(frozen=True, slots=True)
class _Blob:
    """Where the archive of one tensor lies."""

    spec: TensorSpec
    file: str
    start: int
    size_bytes: int


def layout_dcp(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out so that `dcp.load` and `accelerator.load_state` read them.

    Keys are `model.` and the name; every tensor is one chunk, which any number of ranks may
    load their parts of.

    Returns:
        The data files, and `.metadata`.
    """
    files, blobs = [], []
    for number, group in enumerate(split_by_size(products, max_file_bytes)):
        name = f"__0_{number}.distcp"
        rows: list[Row] = []
        at = 0
        for product in group:
            parts = archive_of_one(product, len(rows))
            blobs.append(_Blob(product.spec, name, at, parts.size_bytes))
            rows += parts.rows
            at += parts.size_bytes
        files.append(contiguous(f"{FOLDER}/{name}", rows))
    metadata = _metadata_pickle(blobs)
    files.append(contiguous(f"{FOLDER}/.metadata", [(len(metadata), Literal(metadata), None)]))
    return files


def _metadata_pickle(blobs: Sequence[_Blob]) -> bytes:
    fields = {
        "state_dict_metadata": mapping((_key(b), _tensor_metadata(b.spec)) for b in blobs),
        "planner_data": mapping(
            (_key(b), sequence([text(CONTAINER), text(b.spec.name)])) for b in blobs
        ),
        "storage_data": mapping((_index(b), _storage(b)) for b in blobs),
        "storage_meta": b"N",
        "version": text(_VERSION),
    }
    return pickled(_object(_METADATA, "Metadata", fields))


def _key(blob: _Blob) -> bytes:
    return text(f"{CONTAINER}.{blob.spec.name}")


def _tensor_metadata(spec: TensorSpec) -> bytes:
    chunk = _object(
        _METADATA,
        "ChunkStorageMetadata",
        {"offsets": _size((0,) * len(spec.shape)), "sizes": _size(spec.shape)},
    )
    fields = {
        "properties": _properties(spec),
        "size": _size(spec.shape),
        "chunks": b"](" + chunk + b"e",
    }
    return _object(_METADATA, "TensorStorageMetadata", fields)


def _properties(spec: TensorSpec) -> bytes:
    layout = call(
        global_name("torch.serialization", "_get_layout"), sequence([text("torch.strided")])
    )
    contiguous_format = call(global_name(_METADATA, "_MEM_FORMAT_ENCODING"), sequence([integer(0)]))
    state = [global_name("torch", spec.dtype.name), layout, b"\x89", contiguous_format, b"\x89"]
    kind = global_name(_METADATA, "TensorProperties")
    return kind + _EMPTY + _NEW_OBJECT + sequence(state) + _BUILD


def _index(blob: _Blob) -> bytes:
    fields = {
        "fqn": _key(blob),
        "offset": _size((0,) * len(blob.spec.shape)),
        "index": integer(0),
    }
    return _object(_METADATA, "MetadataIndex", fields)


def _storage(blob: _Blob) -> bytes:
    fields = {
        "relative_path": text(blob.file),
        "offset": integer(blob.start),
        "length": integer(blob.size_bytes),
    }
    return _object("torch.distributed.checkpoint.filesystem", "_StorageInfo", fields)


def _size(shape: Shape) -> bytes:
    return call(global_name("torch", "Size"), sequence([numbers(shape)]))


def _object(module: str, name: str, fields: dict[str, bytes]) -> bytes:
    """Pushes an instance of a dataclass with the given fields."""
    items: Iterable[tuple[bytes, bytes]] = ((text(k), v) for k, v in fields.items())
    return global_name(module, name) + _EMPTY + _NEW_OBJECT + mapping(items) + _BUILD
