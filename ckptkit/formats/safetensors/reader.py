"""The reader of safetensors files, single or in numbered sets with an index.

Torch writes shards of tensors as safetensors, too. The metadata of such a header has the texts
`DCP_SHARDING_INFO`, JSON with the offsets of each shard in its tensor, and `DCP_VERSION`. It does
not have the shapes of the whole tensors.

Source: https://github.com/huggingface/safetensors, README "Format", and `Metadata::validate` in
safetensors/src/tensor.rs; torch/distributed/checkpoint/{filesystem,_hf_utils}.py and
hf_storage.py (`HuggingFaceStorageWriter.finish`), torch 2.8 to 2.13.
"""

from __future__ import annotations

import math
import posixpath
import re
import struct
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.dtypes import BY_SAFETENSORS, DType
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    InputError,
    LimitError,
    TruncatedFileError,
    UnsupportedError,
)
from ckptkit.core.index import ChunkTable, FileRef, KeyPath, Record, RunFacts, Shape, TensorIndex
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.parsing import (
    INDEX_ENDING,
    MAX_BYTES,
    MAX_DIMENSIONS,
    FileTable,
    check_weight_map,
    find_data_files,
    group_model_files,
    is_count,
    overflows,
    parse_json,
    read_index_document,
)
from ckptkit.formats.trees import Stored, make_entries
from ckptkit.lora.pipeline_names import WRITER, is_pipeline_lora, split_names
from ckptkit.storage.base import Source

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference reader
_INFO = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_KNOWN_VERSIONS = {"1.0"}
_OFFSETS = "saved_offsets"
_SAVE_APART = (
    "save again with `HuggingFaceStorageWriter(path, save_distributed=True)`, which keeps a file"
    " for each rank; the parts of the others are lost here"
)
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


class HeaderTensor(Struct, frozen=True):
    """A tensor of one file, as its header describes it."""

    name: str
    dtype: DType
    shape: Shape  # sizes, in elements
    start: int  # first byte, from the start of the file
    stop: int


class Header(Struct, frozen=True):
    """A checked header: tensors in the order of their bytes, and texts by name."""

    tensors: tuple[HeaderTensor, ...]
    metadata: dict[str, str]


def parse_header(raw: bytes, size_bytes: int, *, where: str) -> Header:
    """Parses a header without its length, with all checks of the reference reader."""
    with errors_at(where):
        if not raw.startswith(b"{"):
            raise FormatError(f"header starts with {raw[:1]!r}, not with b'{{'")
        content = parse_json(raw, where=where)
        if not isinstance(content, dict):
            raise FormatError("header is not a JSON object")
        metadata = content.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise FormatError(f"{_METADATA!r} is not a map of strings")
        data_start = _LENGTH.size + len(raw)
        tensors = []
        for name, fields in content.items():
            try:
                tensors.append(_parse_tensor(name, fields, data_start))
            except InputError as error:
                raise error.located(f"{where}: tensor {name!r}") from error
        tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
        expected = data_start
        for tensor in tensors:
            if tensor.start != expected:
                raise FormatError(
                    f"tensor {tensor.name!r} starts at byte {tensor.start:,} but the one before"
                    f" ends at byte {expected:,}"
                )
            expected = tensor.stop
        if expected > size_bytes:
            raise TruncatedFileError(
                f"header declares data through byte {expected:,} but the file ends at byte "
                f"{size_bytes:,} ({expected - size_bytes:,} missing)",
                hint="the copy was cut short; compare its size with the source's",
            )
        if expected < size_bytes:
            raise FormatError(
                f"{size_bytes - expected:,} bytes after byte {expected:,} belong to no tensor",
                hint=f"several ranks may have written it at once: {_SAVE_APART}"
                if _INFO in metadata
                else "",
            )
        return Header(tuple(tensors), metadata)


def read_header(source: Source, file: FileRef, start: int = 0) -> Header:
    """Returns the checked header of a file, or of an image from byte `start` to the file's end.

    Positions of tensors are counted from the start of the file.
    """
    where = posixpath.join(source.location, file.path)
    with errors_at(where):
        size_bytes = file.size_bytes - start
        if size_bytes < _LENGTH.size:
            raise TruncatedFileError(
                f"file has {max(size_bytes, 0):,} bytes"
                f"{f' from byte {start:,} on' if start else ''}, fewer than the {_LENGTH.size} of"
                " a header length"
            )
        (length,) = _LENGTH.unpack(source.read(file.path, start, start + _LENGTH.size))
        if length > MAX_HEADER_BYTES:
            raise LimitError(
                f"header claims {length:,} bytes, at most {MAX_HEADER_BYTES:,} are allowed",
                hint="the file is damaged, or it is no safetensors file",
            )
        stop = start + _LENGTH.size + length
        if stop > file.size_bytes:
            raise TruncatedFileError(
                f"header reaches byte {stop:,} but the file ends at byte {file.size_bytes:,}",
                hint="the copy was cut short; compare its size with the source's",
            )
        raw = source.read(file.path, start + _LENGTH.size, stop)
        header = parse_header(raw, size_bytes, where=where)
        if not start:
            return header
        tensors = (replace(t, start=t.start + start, stop=t.stop + start) for t in header.tensors)
        return replace(header, tensors=tuple(tensors))


def read_shard_offsets(header: Header, *, where: str) -> Mapping[str, Shape]:
    with errors_at(where):
        text = header.metadata.get(_INFO)
        if text is None:
            raise UnsupportedError(
                f"header has no {_INFO!r}, which has the offsets of each shard in its tensor",
                hint="save again with torch 2.8 or later, which writes them",
            )
        version = header.metadata.get(_VERSION)
        if version not in _KNOWN_VERSIONS:
            raise UnsupportedError(
                f"{_VERSION!r} is {version!r}, expected one of"
                f" {', '.join(sorted(_KNOWN_VERSIONS))}",
                hint="a newer torch wrote it: look for a newer ckptkit",
            )
        info = parse_json(text.encode(), where=f"{where}: {_INFO}")
        if not isinstance(info, dict):
            raise FormatError(f"{_INFO!r} is not a JSON object")
        names = {tensor.name for tensor in header.tensors}
        if names != info.keys():
            name = min(names ^ info.keys())
            holder = "only the header has it" if name in names else f"only {_INFO!r} has it"
            raise FormatError(f"{_INFO!r} and the header disagree on {name!r}: {holder}")
        offsets_by_name: dict[str, Shape] = {}
        for tensor in header.tensors:
            fields, place = info[tensor.name], f"{where}: tensor {tensor.name!r}"
            offsets = fields.get(_OFFSETS) if isinstance(fields, dict) else None
            if not isinstance(offsets, list) or len(offsets) != len(tensor.shape):
                raise FormatError(
                    f"{_OFFSETS!r} is not a list of {len(tensor.shape)} numbers, as its shape"
                    f" {list(tensor.shape)} is",
                    where=place,
                )
            for offset, size in zip(offsets, tensor.shape, strict=True):
                if not is_count(offset, MAX_BYTES - size):
                    raise FormatError(
                        f"{_OFFSETS!r} are {offsets}, expected natural numbers below 2**63",
                        where=place,
                    )
            offsets_by_name[tensor.name] = tuple(offsets)
        return offsets_by_name


UNPROVEN_WHOLE = (
    "nothing proves that the tensors are whole: torch.distributed.checkpoint wrote the file, of"
    " which one rank's parts are left where several ranks saved without `save_distributed=True`;"
    " put the index that was written with it beside the file, or name the model that was trained"
    " with --base, to have them compared"
)


def check_size(held_bytes: int, index: Mapping[str, object]) -> bool:
    """Compares tensors that torch.distributed.checkpoint wrote with what its index says of them.

    Returns whether that proves that no part is missing.
    """
    total = index.get("total_size")
    if not is_count(total):
        return False
    if held_bytes < total:
        raise IncompleteCheckpointError(
            f"the files hold {held_bytes:,} bytes of tensors against {total:,} by the index:"
            " several ranks wrote the same file, and the parts of one are left",
            hint=_SAVE_APART,
        )
    return held_bytes == total


def check_whole(header: Header, *, where: str) -> None:
    """Refuses a file of shards that would be read as whole tensors.

    In files of whole tensors torch writes offsets of 0. Metadata that cannot be parsed is ignored,
    since it names no shard.
    """
    if _INFO not in header.metadata:
        return
    try:
        shards = read_shard_offsets(header, where=where)
    except InputError:
        return
    for name, offsets in shards.items():
        if any(offsets):
            raise UnsupportedError(
                f"holds the shard of tensor {name!r} from {list(offsets)} on, not the whole tensor",
                where=where,
                hint="it is the shard of one rank under another name: give the directory that"
                " holds the shards of all ranks, named as torch named them; if all ranks wrote"
                f" this file, {_SAVE_APART}",
            )


_OF_STEP = re.compile(r"(?P<pipeline>.+?)_step_\d{1,4}(_\w+)?\.safetensors")


def _is_of_processor(path: str, there: Collection[str]) -> bool:
    """Returns whether a file is the state of a step of a processor, which LeRobot has in JSON.

    Source: lerobot/processor/pipeline.py (`DataProcessorPipeline._save_pretrained`), lerobot 0.4:
    `NAME.json` beside `NAME_step_3_normalizer_processor.safetensors`.
    """
    match = _OF_STEP.fullmatch(path)
    return match is not None and f"{match['pipeline']}.json" in there


class SafetensorsReader(FormatReader):
    name = "safetensors"
    order = 120
    expected = "'*.safetensors'"
    endings = r"\.safetensors(?:\.index\.json)?"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        there = set(paths)
        own = [path for path in paths if not _is_of_processor(path, there)]
        return group_model_files(own, (".safetensors",), self.name)

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        paths, weight_map = find_data_files(source, candidate)
        table = FileTable()
        headers: list[Header] = []
        files_by_name: dict[str, str] = {}
        for file in map(source.stat, paths):
            table.add_file(file)
            headers.append(read_header(source, file))
            check_whole(headers[-1], where=posixpath.join(source.location, file.path))
            for tensor in headers[-1].tensors:
                before = files_by_name.setdefault(tensor.name, file.path)
                if before != file.path:
                    raise FormatError(
                        f"tensor {tensor.name!r} is in {posixpath.basename(before)!r} and in "
                        f"{posixpath.basename(file.path)!r}"
                    )
        indices = [path for path in candidate.files if path.endswith(INDEX_ENDING)]
        notes: tuple[str, ...] = ()
        if any(_INFO in header.metadata for header in headers):
            held_bytes = sum(t.stop - t.start for header in headers for t in header.tensors)
            metadata = read_index_document(source, indices[0])[0] if indices else {}
            if not check_size(held_bytes, metadata):
                notes = (UNPROVEN_WHOLE,)
        if weight_map is not None:
            check_weight_map(weight_map, files_by_name)
        is_lora = len(headers) == 1 and is_pipeline_lora(paths[0], headers[0].metadata)
        names = list(files_by_name)
        paths_by_name = split_names(names) if is_lora else {name: (name,) for name in names}
        held: dict[KeyPath, Stored] = {}
        for number, header in enumerate(headers):
            for tensor in header.tensors:
                record = table.add_record(Record(number, tensor.start, tensor.stop), tensor.name)
                sizes = np.array([tensor.shape], np.int64).reshape(1, len(tensor.shape))
                chunks = ChunkTable(np.zeros_like(sizes), sizes, np.array([record]), byte_offset=0)
                held[paths_by_name[tensor.name]] = tensor.dtype, tensor.shape, chunks
        return table.index(
            self.name,
            make_entries(held, keys=names),
            *map(source.stat, indices),
            # Where the texts of files differ, that of the first file counts.
            values={
                (_METADATA, name): text
                for header in reversed(headers)
                for name, text in header.metadata.items()
            },
            run=RunFacts(writer=WRITER if is_lora else self.name, notes=notes),
        )


def _parse_tensor(name: str, fields: object, data_start: int) -> HeaderTensor:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise FormatError("entry has other fields than 'dtype', 'shape', 'data_offsets'")
    dtype = BY_SAFETENSORS.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise UnsupportedError(
            f"dtype {fields['dtype']!r} is not modelled; known are {', '.join(BY_SAFETENSORS)}"
        )
    shape, extent = _counts(fields["shape"]), _counts(fields["data_offsets"])
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"{len(shape):,} dimensions are more than {MAX_DIMENSIONS}")
    if overflows(shape, dtype):
        raise FormatError(f"size of shape {list(shape)} overflows")
    needed = math.prod(shape) * dtype.itemsize
    if len(extent) != 2 or extent[1] - extent[0] != needed:  # noqa: PLR2004, start and stop
        raise FormatError(
            f"{dtype.name} of shape {list(shape)} needs {needed:,} bytes, the range is "
            f"{list(extent)}"
        )
    return HeaderTensor(name, dtype, shape, data_start + extent[0], data_start + extent[1])


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_count, value)):
        raise FormatError("shape or range is not a list of natural numbers")
    return tuple(value)
