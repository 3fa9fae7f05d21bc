"""The reader of torch.distributed.checkpoint: `.metadata` and `.distcp` files.

In order: `.metadata` is parsed and joined (`metadata.py`), `_make_index` looks up files, archives
and names, and the files of Megatron-Core or Lightning beside it add facts of the run.

With `SerializationFormat.SAFETENSORS` a data file holds Python objects first, then one safetensors
image of all its tensors. `.metadata` has every tensor begin where the image does, so that torch
itself cannot read one back; the header of the image has the positions.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, torch 2.1 to 2.14;
filesystem.py (`_write_files_from_queue`) for images, torch 2.8 to 2.13.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import (
    CONTAINERS,
    ChunkTable,
    FileRange,
    FileRef,
    Ints,
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.dcp.compression import decompress, is_zstd
from ckptkit.formats.dcp.megatron import (
    COMMON,
    COMMON_STATE,
    COMPANIONS,
    KIND,
    RUN_CONFIG,
    CommonState,
    compare_iterations,
    describe_ignored,
    name_experts_apart,
    name_states,
    parse_common,
    parse_state,
    read_common,
    read_facts,
    read_kind,
    split_key,
)
from ckptkit.formats.dcp.metadata import LEAST_ARCHIVE_BYTES, DcpMetadata, DcpTensor, parse_metadata
from ckptkit.formats.parsing import Read, group_by_folder, read_from, stat_or_missing
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.pickle.objects import describe_objects, find_unread, is_holder, is_object
from ckptkit.formats.pickle.pickles import walk_values
from ckptkit.formats.pickle.torch_values import UnreadTensor, explain_value, parse_values
from ckptkit.formats.pickle.torch_zip import MAX_TENSOR_PICKLE_BYTES, open_archive
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header, read_shard_offsets
from ckptkit.formats.trees import (
    LIGHTNING_META,
    classify,
    detect_framework_by_paths,
    problem_of,
    read_lightning_meta,
)
from ckptkit.storage.base import Source

_Image = Mapping[str, tuple[HeaderTensor, Shape]]  # by name the tensor and its offsets


def locate_in_images(
    source: Source, files: Sequence[FileRef], tensors: Sequence[DcpTensor]
) -> tuple[RecordTable, list[Problem]]:
    """Looks chunks up in the safetensors images of data files; some may be in no image.

    The records of a file that is missing, whose size is negative, have the positions in
    `.metadata`.
    """
    # Each header may cost a round trip, so that their reads are announced.
    starts = {
        file: start
        for tensor in tensors
        for file, start in zip(tensor.file.tolist(), tensor.start.tolist(), strict=True)
        if start < files[file].size_bytes
    }
    source.prefetch([FileRange(files[n].path, at, at + 1) for n, at in starts.items()])
    images: dict[int, _Image] = {}
    rows: list[tuple[int, int, int]] = []
    problems: list[Problem] = []
    for tensor in tensors:
        columns = tensor.file, tensor.start, tensor.length, tensor.offsets, tensor.sizes
        chunks = zip(*(column.tolist() for column in columns), strict=True)
        for number, start, length, offsets, sizes in chunks:
            file = files[number]
            if file.size_bytes < 0:
                rows.append((number, start, start + length))
                continue
            where = posixpath.join(source.location, file.path)
            if number not in images:
                header = read_header(source, file, start)
                offsets_of = read_shard_offsets(header, where=where)
                images[number] = {t.name: (t, offsets_of[t.name]) for t in header.tensors}
            stored, stored_offsets = images[number].get(tensor.key, (None, ()))
            if stored is None or list(stored_offsets) != offsets:
                # Torch keeps one shard of each name in an image: of two on one rank, the last.
                other = f", in its place is that from {list(stored_offsets)} on" if stored else ""
                message = f"the piece from {offsets} on is not in {file.path!r}{other}"
                problems.append(Problem(IncompleteCheckpointError.code, tensor.key, message))
                rows.append((number, start, start))
                continue
            if (stored.dtype, list(stored.shape)) != (tensor.dtype, sizes):
                raise FormatError(
                    f"holds {stored.dtype.name} {list(stored.shape)} against {tensor.dtype.name}"
                    f" {sizes} in '.metadata'",
                    where=f"{where}: tensor {tensor.key!r}",
                    hint="the file belongs to another save, or was damaged",
                )
            rows.append((number, stored.start, stored.stop))
    records = np.array(rows, np.int64).reshape(len(rows), 3)
    return RecordTable(records[:, 0], records[:, 1], records[:, 2]), problems


METADATA = ".metadata"
_DATA = re.compile(r"__(\d{1,7})_(?:frozen_)?\d+\.distcp")  # 'frozen' files are ckptkit's
_OF_MEGATRON_FSDP: set[KeyPath] = {("checkpoint_version",), ("iteration",)}
_OF_RANK = re.compile(r"__\d{1,7}\.metadata")
_RAW, _TORCH_ZIP = CONTAINERS.index("raw"), CONTAINERS.index("torch_zip")
_ZSTD = CONTAINERS.index("zstd_torch_zip")
_MOST_DECOMPRESSED_BYTES = 64 << 20  # of one compressed object
_MOST_OBJECTS, _MOST_OBJECT_BYTES = 64, 64 << 10  # whose pickles are read for a note on them


class BlobRef(Struct, frozen=True):
    """A pickled Python object of the checkpoint, which is read only when it is needed."""

    path: str
    start: int
    stop: int
    is_compressed: bool = False  # whether the archive is a zstd stream


def open_blob(source: Source, blob: BlobRef, *, where: str) -> tuple[Read, int]:
    """Returns a function that reads the archive of an object, and the archive's length."""
    read = read_from(source, blob.path, blob.start)
    size = blob.stop - blob.start
    if not blob.is_compressed:
        return read, size
    content = decompress(read, size, most_bytes=_MOST_DECOMPRESSED_BYTES, where=where)
    return lambda start, stop: content[start:stop], len(content)


class DcpReader(FormatReader):
    """Reads what `torch.distributed.checkpoint.save` writes."""

    name = "dcp"
    order = 100
    expected = "'.metadata' beside '__0_0.distcp'"
    index_memory = (METADATA, 3)  # 900 MB for 350 MB, the file itself included

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with `.metadata` or `.distcp` files."""
        own = [
            path
            for path in paths
            if _is_data(path)
            or (name := posixpath.basename(path)) in {METADATA, LIGHTNING_META}
            or _OF_RANK.fullmatch(name)
        ]
        candidates, known = [], set(paths)
        for folder, files in _with_data_below(group_by_folder(own)).items():
            if all(posixpath.basename(path) == LIGHTNING_META for path in files):
                continue
            count = sum(map(_is_data, files))
            there = "'.metadata'" if posixpath.join(folder, METADATA) in files else "no '.metadata'"
            reason = f"{there} beside {count} '.distcp' file{'' if count == 1 else 's'}"
            beside = [
                path for name in COMPANIONS if (path := posixpath.join(folder, name)) in known
            ]
            if there != "'.metadata'" or posixpath.join(folder, KIND) not in known:
                beside = []  # of another program
            candidates.append(Candidate(self.name, folder, (*files, *beside), reason))
        return candidates

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses `.metadata`; of data files only sizes and headers of images are read.

        Files that are missing or too short are left for the plan to refuse.
        """
        path = posixpath.join(candidate.folder, METADATA)
        where = posixpath.join(source.location, path)
        if path not in candidate.files:
            if any(_OF_RANK.fullmatch(posixpath.basename(other)) for other in candidate.files):
                raise UnsupportedError(
                    "each rank wrote a '.metadata' of its own: `dcp.save(use_collectives=False)`"
                    " is not read",
                    where=posixpath.join(source.location, candidate.folder),
                    hint="load it with the same ranks, and save it with use_collectives=True",
                )
            raise MissingFileError(
                f"{candidate.reason}: the save did not finish, or the file was not copied",
                where=where,
                hint="'.metadata' is written last, by rank 0: name its node's copy with --also, or"
                " take an earlier checkpoint",
            )
        stat = source.stat(path)
        metadata = parse_metadata(source.read(path, 0, stat.size_bytes), where=where)
        kind_path = posixpath.join(candidate.folder, KIND)
        if kind_path in candidate.files:
            kind = read_kind(source, kind_path, is_megatron=metadata.is_megatron)
            metadata = replace(metadata, is_megatron=metadata.is_megatron or kind is not None)
        index = _make_index(source, candidate.folder, stat, metadata, where)
        if metadata.is_megatron:
            return _with_facts_of_megatron(source, candidate, index)
        if index.values.keys() >= _OF_MEGATRON_FSDP:
            return _with_facts_of_megatron_fsdp(source, candidate, index)
        meta = posixpath.join(candidate.folder, LIGHTNING_META)
        if meta in candidate.files:
            framework = read_lightning_meta(source, meta)
            index = replace(index, files=(*index.files, stat_or_missing(source, meta)))
        else:
            paths = [*(entry.key_path for entry in index.tensors.values()), *index.values]
            framework = detect_framework_by_paths(paths)
        objects = _read_objects(source, index)
        index, others = _with_parts_in_objects(index, objects, where)
        run = replace(
            index.run,
            step=framework.step,
            writer=", ".join(filter(None, [index.run.writer, framework.name])),
            version=framework.version,
            notes=(*index.run.notes, *framework.notes),
            warnings=(*framework.warnings, *describe_objects(others)),
        )
        return replace(index, run=run, problems=(*index.problems, *framework.problems))


_Objects = dict[KeyPath, InertObject | UnreadTensor | Global]


def _read_objects(source: Source, index: TensorIndex) -> _Objects:
    """Returns objects of other code and tensors that are in values; not all values are read.

    The settings of an optimizer's groups are many, and plain.
    """
    some = [
        (path, value)
        for path, value in index.values.items()
        if isinstance(value, BlobRef)
        and (not value.is_compressed or value.stop - value.start <= _MOST_OBJECT_BYTES)
        and "param_groups" not in ".".join(map(str, path))
    ]
    some = sorted(some, key=lambda item: len(item[0]))[:_MOST_OBJECTS]
    source.prefetch([FileRange(blob.path, blob.start, blob.stop) for _, blob in some])
    found: _Objects = {}
    for path, blob in some:
        where = f"{posixpath.join(source.location, blob.path)}, object {path!r}"
        with suppress(CkptkitError):  # whoever needs it, and `verify`, report it
            archive = open_archive(*open_blob(source, blob, where=where), where=where)
            value = parse_values(archive.pickle(max_bytes=_MOST_OBJECT_BYTES), where=where)
            for below, part in walk_values(value, limit=_MOST_OBJECT_BYTES, where=where):
                unread = find_unread(part)
                if unread is not None:
                    found[(*path, *below)] = unread
                elif is_object(part) or is_holder(part):
                    found[(*path, *below)] = part
    return found


def _with_parts_in_objects(
    index: TensorIndex, objects: _Objects, where: str
) -> tuple[TensorIndex, _Objects]:
    """Adds tensors that are pickled in objects, such as DTensors in a tuple.

    One rank writes an object, with its own part of each tensor in it: what belongs to a model or
    an optimizer is a problem there, as it is incomplete.

    Source: torch/distributed/checkpoint/_traverse.py (`traverse_state_dict`), torch 2.13, which
    goes into dictionaries and lists.
    """
    tensors = {path: value for path, value in objects.items() if isinstance(value, UnreadTensor)}
    if not tensors:
        return index, objects
    known = [entry.key_path for entry in index.tensors.values()]
    found = classify([*known, *tensors], where=where, values=index.values)[len(known) :]
    entries, problems = dict(index.tensors), []
    others = dict(objects)
    for (path, tensor), member in zip(tensors.items(), found, strict=True):
        if member.part == "other" or tensor.dtype is None:
            if "DTensor" in tensor.kind:
                others[path] = replace(tensor, kind=f"one rank's part of {tensor.kind}")
            continue
        chunks = ChunkTable.of([], len(tensor.shape))
        entry = member.entry(path, tensor.dtype, tensor.shape, chunks)
        entries.setdefault(entry.key, entry)
        message = f"is in an object, of which one rank wrote its own part: {tensor.error().message}"
        problems.append(problem_of(entry, UnsupportedError(message, hint=tensor.hint)))
        del others[path]
    return replace(index, tensors=entries, problems=(*index.problems, *problems)), others


def _with_data_below(folders: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Joins data in folders of their own with the `.metadata` above that has none beside it.

    Amazon's connector spreads the files of one checkpoint over prefixes of a bucket.

    Source: s3torchconnector/dcp/s3_prefix_strategy.py, s3torchconnector 1.5: files
    `<prefix>/__<rank>_0.distcp` and `<prefix>/epoch_<number>/__<rank>_0.distcp`, where a prefix is
    a number or a name of the user's.
    """
    joined = {folder: list(files) for folder, files in folders.items()}
    homes = {folder for folder, files in folders.items() if not any(map(_is_data, files))}
    for folder, files in folders.items():
        home = folder
        while home and home not in homes:
            home = posixpath.dirname(home)
        is_spread = home != folder and posixpath.join(home, METADATA) in joined.get(home, ())
        if is_spread and all(map(_is_data, files)):
            joined[home] = sorted([*joined[home], *joined.pop(folder)])
    return joined


def _is_data(path: str) -> bool:
    return path.endswith(".distcp")


def _with_facts_of_megatron(
    source: Source, candidate: Candidate, index: TensorIndex
) -> TensorIndex:
    common = CommonState()
    for path in candidate.files:
        if posixpath.basename(path) == COMMON:
            where, size = posixpath.join(source.location, path), source.stat(path).size_bytes
            common = parse_common(read_from(source, path), size, where=where)
    for key, value in index.values.items():
        if str(key[0]).startswith(f"{COMMON_STATE}/") and isinstance(value, BlobRef):
            where = f"{posixpath.join(source.location, value.path)}, object {COMMON_STATE!r}"
            common = parse_common(*open_blob(source, value, where=where), where=where)
    index = name_states(index, common)
    run = read_facts(source, candidate.files, common, index.run)
    notes = (*run.notes, *describe_ignored(index.values))
    beside = [path for path in candidate.files if posixpath.basename(path) in COMPANIONS]
    files = (*index.files, *(source.stat(path) for path in beside))
    folder = posixpath.join(source.location, candidate.folder)
    problems = (*index.problems, *compare_iterations(common.step, folder, COMMON))
    return replace(index, files=files, run=replace(run, notes=notes), problems=problems)


def _with_facts_of_megatron_fsdp(
    source: Source, candidate: Candidate, index: TensorIndex
) -> TensorIndex:
    root = {}
    for name in ("args", "iteration"):
        value = index.values.get((name,))
        if isinstance(value, BlobRef):
            where = f"{posixpath.join(source.location, value.path)}, object {name!r}"
            root[name] = parse_state(*open_blob(source, value, where=where), where=where)
    config = stat_or_missing(source, posixpath.join(candidate.folder, RUN_CONFIG))
    beside = () if config.size_bytes < 0 else (config,)
    paths = [file.path for file in beside]
    run = read_facts(source, paths, read_common(root), index.run, kind="fsdp_dtensor")
    folder = posixpath.join(source.location, candidate.folder)
    return replace(
        index,
        files=(*index.files, *beside),
        tensors=name_experts_apart(index.tensors),
        run=run,
        problems=(*index.problems, *compare_iterations(run.step, folder, METADATA)),
    )


def _make_index(
    source: Source, folder: str, stat: FileRef, metadata: DcpMetadata, where: str
) -> TensorIndex:
    """Makes the index of parsed metadata: storage map, then records in archives, then tensors."""
    # Storage map: the data files, of which missing ones have a negative size, and their ranks.
    paths = [posixpath.join(folder, path) for path in metadata.paths]
    files = [*(stat_or_missing(source, path) for path in paths), stat]
    for number, end in metadata.tied_files.items():
        file = files[number]
        if file.size_bytes - end >= LEAST_ARCHIVE_BYTES:
            raise FormatError(
                f"the last {file.size_bytes - end:,} bytes of {file.path!r} belong to nothing,"
                " while others belong to two tensors",
                where=where,
            )
    names = [_DATA.fullmatch(posixpath.basename(path)) for path in metadata.paths]
    rank_of_file = np.array([int(name[1]) if name else -1 for name in names], np.int64)
    # Ranks wrote tensors in an order of their own; paths are in that of the state dict.
    stored, order = metadata.tensors, metadata.planner_data or ()
    tensors = list({key: stored[key] for key in (*order, *stored) if key in stored}.values())
    problems = [
        Problem(
            "unsupported",
            tensor.key,
            f"stored through {', '.join(sorted(set(sum(tensor.transforms, ()))))}, which is"
            " not modelled",
        )
        for tensor in stored.values()
        if tensor.transforms and (metadata.has_images or not all(map(is_zstd, tensor.transforms)))
    ]
    # Archives: the record of each chunk, or its place in an image.
    if metadata.has_images:
        records, missing = locate_in_images(source, files, tensors)
    else:
        records, missing = _list_archives(tensors, is_raw=metadata.is_raw), []

    # Index: which state dict each tensor is in, and the rows of its chunks.
    def key_path(key: str) -> KeyPath:
        if metadata.planner_data:
            return tuple(metadata.planner_data[key])
        return split_key(key) if metadata.is_megatron else (key,)

    memberships = classify(
        [key_path(t.key) for t in tensors], where=where, values=map(key_path, metadata.blobs)
    )
    entries, first = {}, 0
    for tensor, membership in zip(tensors, memberships, strict=True):
        rank = rank_of_file[tensor.file] if len(rank_of_file) else -1
        rows = np.arange(first, first + len(tensor.file))
        chunks = ChunkTable(tensor.offsets, tensor.sizes, rows, rank=rank)
        path = key_path(tensor.key)
        entry = membership.entry(path, tensor.dtype, tensor.shape, chunks, key=tensor.key)
        entries[entry.key] = entry
        first += len(rows)
    problems += [*_explain_short(source, files, metadata, entries, where), *missing]
    encoding = ", SerializationFormat.SAFETENSORS" if metadata.has_images else ""
    if any(any(map(is_zstd, tensor.transforms)) for tensor in tensors):
        encoding += ", compressed with zstd"
    writer = f"torch.distributed.checkpoint of {metadata.writer}{encoding}"
    writers = [metadata.library, "" if metadata.is_raw else writer]  # raw: wrote it by itself
    ranks = rank_of_file[rank_of_file >= 0]
    return TensorIndex(
        format=DcpReader.name,
        files=tuple(files),
        records=records,
        tensors=entries,
        values={
            key_path(blob.key): BlobRef(
                paths[blob.file],
                blob.start,
                blob.start + blob.length,
                any(map(is_zstd, blob.transforms)),
            )
            for blob in metadata.blobs.values()
        },
        run=RunFacts(
            world_size=int(ranks.max()) + 1 if len(ranks) else None,
            writer=", ".join(filter(None, writers)),
        ),
        problems=tuple(problems),
    )


def _list_archives(tensors: Sequence[DcpTensor], *, is_raw: bool) -> RecordTable:
    empty = np.zeros(0, np.int64)
    start = np.concatenate([empty, *(t.start for t in tensors)])
    length = np.concatenate([empty, *(t.length for t in tensors)])
    file = np.concatenate([empty, *(t.file for t in tensors)])
    container: Ints | int = _RAW if is_raw else _TORCH_ZIP  # a single number takes no memory
    if any(tensor.transforms for tensor in tensors):
        kinds = [_ZSTD if tensor.transforms else _TORCH_ZIP for tensor in tensors]
        container = np.repeat(kinds, [len(tensor.file) for tensor in tensors])
    return RecordTable(file, start, start + length, container=container)


def _explain_short(
    source: Source,
    files: Sequence[FileRef],
    metadata: DcpMetadata,
    entries: Mapping[Key, TensorEntry],
    where: str,
) -> Iterator[Problem]:
    """Yields why chunks have fewer bytes than their elements: they are objects that pack them.

    One chunk of each state dict is looked at; nothing is said where its file is missing.
    """
    found: dict[str, CkptkitError | None] = {}
    for key in sorted(metadata.short):
        entry, tensor = entries[Key(key)], metadata.tensors[key]
        if entry.tree not in found:
            row = int(np.argmax(tensor.length < tensor.sizes.prod(axis=1) * tensor.dtype.itemsize))
            file = files[int(tensor.file[row])]
            found[entry.tree] = None
            if file.size_bytes >= 0:
                start = int(tensor.start[row])
                within = f"{posixpath.join(source.location, file.path)}, {quote(key)}"
                value: object = None
                with suppress(FormatError):
                    read = read_from(source, file.path, start)
                    archive = open_archive(read, int(tensor.length[row]), where=within)
                    pickled = archive.pickle(max_bytes=MAX_TENSOR_PICKLE_BYTES)
                    value = parse_values(pickled, where=within)
                if not isinstance(value, InertObject | UnreadTensor):
                    raise FormatError(
                        "a chunk is stored in fewer bytes than its elements have",
                        where=f"{where}, key {quote(key)}",
                        hint="the file is damaged; take another copy of it",
                    )
                found[entry.tree] = explain_value(value, "")
        error = found[entry.tree]
        if error is not None:
            yield problem_of(entry, error)
