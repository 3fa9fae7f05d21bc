"""Files that torch loads: `pytorch_model.bin`, `optimizer.bin`, and the folders of DCP.

An archive is a zip whose headers are known beforehand and whose checksums are filled in after its
tensors were written. Its pickle is written opcode by opcode, so that torch is not needed.
torch.distributed.checkpoint and accelerate load folders of such archives: a model's, and an
optimizer's.

Sources: the ZIP application note (APPNOTE 6.3.9, sections 4.3 and 4.5) for the structures;
torch/csrc/jit `PyTorchStreamWriter` for names, order, flags and the padding of records; torch.save
of 2.13 for the records, torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3` and
torch/serialization.py `persistent_id` for the pickles; Transformers for the names of sharded files;
torch/distributed/checkpoint/_traverse.py for the paths of values; accelerate/utils/fsdp_utils.py
(`save_fsdp_optimizer`, `save_fsdp_model`) for `optimizer.bin` and the names with
SHARDED_STATE_DICT.
"""

from __future__ import annotations

import posixpath
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.geometry import row_major_strides
from ckptkit.core.index import Fqn, KeyPath, Shape
from ckptkit.plan.layouts.dcp_metadata import (
    METADATA_NAME,
    DcpObject,
    DcpTensor,
    Place,
    make_metadata,
    make_pickle,
    push_call,
    push_dict,
    push_global,
    push_int,
    push_list,
    push_scalar,
    push_text,
    push_tuple,
)
from ckptkit.plan.layouts.hf import make_index_file
from ckptkit.plan.optimizer_states import OPTIMIZER, OptimizerStates
from ckptkit.plan.plan import (
    Body,
    Literal,
    OutputFile,
    Product,
    StackedPart,
    TensorSpec,
    Trailer,
    lay_out_file,
    literal_file,
    name_shards,
    split_by_size,
)

ALIGNMENT = 64  # torch pads every record's data to this, counted from the archive's start
_FLAGS = 0x0808  # sizes and checksum follow the data; names are UTF-8
_LOCAL, _DESCRIPTOR, _CENTRAL, _END = b"PK\3\4", b"PK\7\x08", b"PK\1\2", b"PK\5\6"
_END64, _LOCATOR64 = b"PK\6\6", b"PK\6\7"
_ZIP64_LIMIT = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF
_VERSION, _VERSION64 = 20, 45
_DOS_DATE = 0x0021  # 1 January 1980, so that equal content gives equal bytes

Row = tuple[int, Body, TensorSpec | None]
Residue = tuple[int, int]
"""An offset in bytes, and the number that it is congruent modulo; at most 32 KiB."""


class _Entry(Struct, frozen=True):
    name: bytes
    header_start: int
    size_bytes: int
    crc32: int | None
    segment: int


class ZipParts:
    """Collects the rows of one archive, in order.

    `prefix`: what every record name starts with, without `/`. `first_segment`: how many segments
    the file has before this archive.
    """

    def __init__(self, prefix: str, first_segment: int = 0) -> None:
        self.rows: list[Row] = []
        self.size_bytes = 0
        self._prefix = prefix
        self._first = first_segment
        self._entries: list[_Entry] = []

    def add(
        self,
        name: str,
        size: int,
        body: Body,
        *,
        crc: int | None = None,
        spec: TensorSpec | None = None,
        place: Residue = (0, ALIGNMENT),
    ) -> None:
        """Adds a record: its header, its bytes, and the descriptor that follows them.

        `size`: length of its bytes. `crc`: their CRC-32, None where it is known once they are
        written. `spec`: the tensor that they are, if they are one. `place`: where in the archive
        the bytes may start.
        """
        start = self.size_bytes
        full = f"{self._prefix}/{name}".encode()
        fixed = start + 30 + len(full)
        at, modulus = place
        padding = (at - fixed - 4) % modulus
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        header = _LOCAL + struct.pack(
            "<5H3I2H", _VERSION, _FLAGS, 0, 0, _DOS_DATE, 0, 0, 0, len(full), len(extra)
        )
        self._put(fixed + len(extra) - start, Literal(header + full + extra))
        segment = self._put(size, body, spec)
        self._entries.append(_Entry(full, start, size, crc, segment))
        sizes = struct.pack("<2Q" if size > _ZIP64_LIMIT else "<2I", size, size)
        template = _DESCRIPTOR + struct.pack("<I", crc or 0) + sizes
        fields = () if crc is not None else ((4, segment),)
        self._put(len(template), Trailer(template, fields) if fields else Literal(template))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Adds a record whose content is known."""
        self.add(name, len(data), Literal(data), crc=crc32(data))

    def finish(self) -> None:
        """Adds the central directory."""
        start = self.size_bytes
        template, fields = bytearray(), []
        for entry in self._entries:
            record, at = _central(entry)
            if entry.crc32 is None:
                fields.append((len(template) + at, entry.segment))
            template += record
        template += _end(len(self._entries), start, len(template))
        self._put(len(template), Trailer(bytes(template), tuple(fields)))

    def _put(self, size: int, body: Body, spec: TensorSpec | None = None) -> int:
        self.rows.append((size, body, spec))
        self.size_bytes += size
        return self._first + len(self.rows) - 1


def _central(entry: _Entry) -> tuple[bytes, int]:
    """Returns a directory record, and where its checksum lies in it."""
    large = [n for n in (entry.size_bytes, entry.size_bytes) if n >= _ZIP64_LIMIT]
    far = entry.header_start >= _ZIP64_LIMIT
    wide = large + ([entry.header_start] if far else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = _ZIP64_LIMIT if large else entry.size_bytes
    version = _VERSION64 if wide else _VERSION
    sizes = entry.crc32 or 0, size, size, len(entry.name), len(extra)
    start = _ZIP64_LIMIT if far else entry.header_start
    fields = version, version, _FLAGS, 0, 0, _DOS_DATE, *sizes, 0, 0, 0, 0, start
    return _CENTRAL + struct.pack("<6H3I5H2I", *fields) + entry.name + extra, 16


def _end(count: int, start: int, size: int) -> bytes:
    wide = count >= _ZIP64_COUNT or start >= _ZIP64_LIMIT or size >= _ZIP64_LIMIT
    end = b""
    if wide:
        end = _END64 + struct.pack(
            "<Q2H2I4Q", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start
        )
        end += _LOCATOR64 + struct.pack("<IQI", 0, start + size, 1)
    short = min(count, _ZIP64_COUNT)
    size, start = min(size, _ZIP64_LIMIT), min(start, _ZIP64_LIMIT)
    return end + _END + struct.pack("<4H2IH", 0, 0, short, short, size, start, 0)


def push_tensor(spec: TensorSpec, storage: str) -> bytes:
    """Pushes a dense tensor that fills the storage record `data/{storage}`."""
    dtype = spec.dtype
    name = dtype.storage or "UntypedStorage"
    module = "torch" if dtype.storage else "torch.storage"
    length = spec.elements if dtype.storage else spec.size_bytes
    kind = push_text("storage"), push_global(module, name)
    identity = push_tuple([*kind, push_text(storage), push_text("cpu"), push_int(length)])
    arguments = [
        identity + b"Q",
        push_int(0),
        push_tuple(map(push_int, spec.shape)),
        push_tuple(map(push_int, row_major_strides(spec.shape))),
        b"\x89",
        push_call(push_global("collections", "OrderedDict"), b")"),
    ]
    if dtype.storage:
        return push_call(push_global("torch._utils", "_rebuild_tensor_v2"), push_tuple(arguments))
    arguments.append(push_global("torch", dtype.name))
    return push_call(push_global("torch._utils", "_rebuild_tensor_v3"), push_tuple(arguments))


class TensorRecord(Struct, frozen=True):
    """A tensor among plain values, which fills the storage record `data/{storage}`."""

    spec: TensorSpec
    storage: str


def push_value(value: Any) -> bytes:
    """Pushes a plain value: numbers, texts, None, and tuples, lists and dictionaries of them.

    `value`: `TensorRecord` tensors may be in it.
    """
    if isinstance(value, TensorRecord):
        return push_tensor(value.spec, value.storage)
    if isinstance(value, dict):
        return push_dict([(push_scalar(key), push_value(inner)) for key, inner in value.items()])
    if isinstance(value, list):
        return push_list(map(push_value, value))
    if isinstance(value, tuple):
        return push_tuple(map(push_value, value))
    return push_scalar(value)


def build_tensor_archive(
    product: Product, first_segment: int, place: Residue = (0, ALIGNMENT)
) -> ZipParts:
    """Builds the archive of a single tensor, as a `.distcp` file holds it.

    `place`: where in the archive its data may start.
    """
    parts = ZipParts("archive", first_segment)
    return _build(parts, push_tensor(product.spec, "0"), [product], place=place)


def _build(
    parts: ZipParts,
    content: bytes,
    products: Sequence[Product],
    storages: Mapping[str, bytes] | None = None,
    *,
    place: Residue = (0, ALIGNMENT),
) -> ZipParts:
    parts.add_bytes("data.pkl", make_pickle(content))
    parts.add_bytes("byteorder", b"little")
    for number, product in enumerate(products):
        spec = product.spec
        parts.add(f"data/{number}", spec.size_bytes, product.body, spec=spec, place=place)
    for storage, data in (storages or {}).items():
        parts.add_bytes(f"data/{storage}", data)
    parts.add_bytes("version", b"3\n")
    parts.finish()
    return parts


def build_archive(
    name: str,
    content: bytes,
    products: Sequence[Product] = (),
    storages: Mapping[str, bytes] | None = None,
) -> Sequence[Row]:
    """Builds the archive of plain values, and of the tensors in them.

    `products`: in the order of their storages, which are numbered. `storages`: the bytes of others,
    by name.
    """
    return _build(ZipParts(name), content, products, storages).rows


INDEX_NAME = "pytorch_model.bin.index.json"


def layout_torch_full(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out as `pytorch_model.bin`, or as several files with an index.

    `torch.load(weights_only=True)` opens each file as a dictionary of tensors.

    Returns the weight files, and their index where there are several.
    """
    groups = split_by_size(products, max_file_bytes)
    names = name_shards("pytorch_model", "bin", len(groups))
    files = []
    for name, group in zip(names, groups, strict=True):
        entries = [
            (push_text(product.spec.name), push_tensor(product.spec, str(number)))
            for number, product in enumerate(group)
        ]
        parts = ZipParts(name.rpartition(".")[0])
        files.append(lay_out_file(name, _build(parts, push_dict(entries), group).rows))
    if len(files) > 1:
        files.append(make_index_file(INDEX_NAME, names, groups))
    return files


OPTIMIZER_FILE = "optimizer.bin"
_LISTS = ("param_groups",)  # where keys that are numbers are positions


def layout_optimizer_file(states: OptimizerStates) -> OutputFile:
    """Lays the states of an optimizer out as one file that `torch.load(weights_only=True)` opens.

    It is the FULL state dict of FSDP: `state` by the names of parameters, and `param_groups`.
    """
    tree: dict[Any, Any] = {}
    for number, (path, product) in enumerate(states.tensors):
        _put(tree, path, TensorRecord(product.spec, str(number)))
    for path, value in states.values.items():
        _put(tree, path, value)
    for key in _LISTS:
        inside = tree.get(key)
        if isinstance(inside, dict) and set(inside) == set(range(len(inside))):
            tree[key] = [inside[position] for position in range(len(inside))]
    products = [product for _, product in states.tensors]
    return lay_out_file(OPTIMIZER_FILE, build_archive("optimizer", push_value(tree), products))


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


MODEL_FOLDER = "pytorch_model_fsdp_0"
CONTAINER = "model"
OPTIMIZER_FOLDER = "optimizer_0"


def layout_dcp(products: Sequence[Product], max_file_bytes: int) -> list[OutputFile]:
    """Lays tensors out so that `dcp.load` and `accelerator.load_state` read them.

    Keys are `model.` and the name; every tensor is one chunk, which any number of ranks may
    load their parts of.

    Returns the data files, and `.metadata`.
    """
    tensors = [((CONTAINER, product.spec.name), product) for product in products]
    return lay_out_dcp(MODEL_FOLDER, tensors, max_file_bytes)


def layout_optimizer_folder(states: OptimizerStates, max_file_bytes: int) -> list[OutputFile]:
    """Lays the states of an optimizer out so that `dcp.load` and `load_state` read them.

    Returns the data files, and `.metadata`.
    """
    tensors = [((OPTIMIZER, *path), product) for path, product in states.tensors]
    values = {(OPTIMIZER, *path): value for path, value in states.values.items()}
    return lay_out_dcp(OPTIMIZER_FOLDER, tensors, max_file_bytes, values=values)


def lay_out_dcp(
    folder: str,
    tensors: Sequence[tuple[KeyPath, Product]],
    max_file_bytes: int,
    *,
    values: Mapping[KeyPath, Any] | None = None,
    parts: Mapping[Fqn, StackedPart] | None = None,
) -> list[OutputFile]:
    """Fills data files with tensors, puts the values into the first, and adds `.metadata`.

    `folder`: the folder of the files; empty for the output itself. `tensors`: with the path of keys
    for each. `max_file_bytes`: the most bytes of tensors in a file. `values`: what is not a tensor,
    by path. `parts`: the tensors that are parts of larger ones, by name; such a part is a chunk.
    """
    paths = {product.spec.name: path for path, product in tensors}
    files: list[OutputFile] = []
    specs: dict[KeyPath, tuple[str, Shape]] = {}
    places: dict[KeyPath, list[Place]] = defaultdict(list)
    objects: list[DcpObject] = []
    groups = split_by_size([product for _, product in tensors], max_file_bytes)
    for number, group in enumerate(groups):
        name = f"__0_{number}.distcp"
        rows: list[Row] = []
        at = 0
        for product in group:
            archive = build_tensor_archive(product, len(rows))
            spec = product.spec
            part = (parts or {}).get(spec.name) or StackedPart(spec.name, (), ())
            inner = spec.shape[len(part.index) :]
            offsets = (*part.index, *(0 for _ in inner))
            path = paths[spec.name]
            specs[path] = (spec.dtype.name, (*part.counts, *inner))
            places[path].append((offsets, spec.shape, name, at, archive.size_bytes))
            rows += archive.rows
            at += archive.size_bytes
        for key, value in (values or {}).items() if number == 0 else ():
            archive = _build(ZipParts("archive", len(rows)), push_value(value), [])
            objects.append(DcpObject(key, name, at, archive.size_bytes))
            rows += archive.rows
            at += archive.size_bytes
        files.append(lay_out_file(posixpath.join(folder, name), rows))
    stored = [DcpTensor(path, *specs[path], places[path]) for path in specs]
    metadata = make_metadata(stored, objects)
    return [*files, literal_file(posixpath.join(folder, METADATA_NAME), metadata)]
