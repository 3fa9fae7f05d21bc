"""The reader of what torch_checkpointing and torch's experimental checkpointer write.

Each rank writes a file for each item of the state (`model_0.pt`), or one for all of them
(`checkpoint_0.pt`). A `metadata.pkl` of dictionaries, lists, texts and numbers may describe how the
tensors are distributed. Torch's own files contain that with their DTensors. Safetensors files hold
local tensors, whose positions only `metadata.pkl` has.

`model_0.pt` may as well be the model of epoch 0, so names alone do not identify numbered files.
They are recognised by `metadata.pkl`, or by their contents: a pickle with torch's distributed
tensors is a rank's.

Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py,
0.1.1; torch/distributed/checkpoint/_experimental/checkpoint_writer.py, torch 2.13.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    FormatError,
    InputError,
    LimitError,
    MissingFileError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import Chunk, Key, KeyPath, Record, Shape, TensorEntry, TensorIndex
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import (
    COPY_BACK,
    MAX_DIMENSIONS,
    MIXED_SAVES,
    FileTable,
    group_by_folder,
    is_count,
    parse_json,
    read_from,
    read_limited,
    refuse_missing_ranks,
    refuse_mixed_sizes,
    refuse_stale_ranks,
    stat_or_missing,
    stays_inside,
)
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.ranks.dtensor import (
    MAX_RANKS,
    Mesh,
    Placement,
    compute_coordinate,
    find_local_parts,
    make_split,
)
from ckptkit.formats.ranks.rank_files import (
    Kind,
    RankContents,
    RankFile,
    RankFileSet,
    check_counters,
    load_rank_file,
)
from ckptkit.formats.ranks.reader import RankAssembly, drop_first_key, have_state_dicts
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.formats.trees import Stored, join_path, make_entries
from ckptkit.storage.base import Source

_METADATA = "metadata.pkl"
_NUMBERED = re.compile(r"(?P<item>[A-Za-z0-9_-]+?)[_-]?(?P<rank>\d{1,7})\.(?P<kind>pt|safetensors)")
_SHARDED_FORMATS = {"dcp", "zero"}
_MARKS = (b"torch.distributed", b"ShardedTensor")
_SINGLE_FILE_FORMATS = {"torch", "torch optimizer", "safetensors"}
_MOST_INSPECTED = 32  # items of the state whose files are opened
_FILES_OF_AN_ITEM = 3  # one of them may be damaged


MAX_METADATA_BYTES = 2**28
_VERSION = "2.0"
_DTENSOR = "DTensorShardingMetadata"
_LAYOUTS = {"TorchSerialization": False, "SafetensorsSerialization": True}
_MAX_SIZE = 2**62 - 1
_ALL_ITEMS = "checkpoint"  # the item under which the experimental checkpointer writes all state
_EXPERIMENTAL = "torch.distributed.checkpoint's experimental checkpointer"


class Sharding(Struct, frozen=True):
    """The distribution of a tensor over a mesh of ranks."""

    shape: Shape  # of the whole tensor
    ranks: tuple[int, ...]  # of the mesh, row-major
    mesh: Shape
    placements: tuple[Placement, ...]  # one for each dimension of the mesh


class ShardedItem(Struct, frozen=True):
    # By rank, the path relative to the checkpoint, and whether it is safetensors.
    files: Mapping[int, tuple[str, bool]]
    tensors: Mapping[KeyPath, Sharding]  # by path of keys


def read_sharding_metadata(source: Source, path: str) -> tuple[int, Mapping[str, ShardedItem]]:
    """Parses a `metadata.pkl`: the number of ranks, and the items that it describes."""
    where = posixpath.join(source.location, path)
    data = read_limited(source, path, MAX_METADATA_BYTES, "metadata")
    root = parse_pickle(data, {}, where=where)
    try:
        return _MetadataParser(len(data)).parse(root)
    except (FormatError, LimitError, UnsupportedError, UnsafePathError) as error:
        raise error.located(where) from None


class _MetadataParser:
    """Checks the value of the pickle; its parts may be shared, so all visits are counted."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._ranks: dict[int, tuple[int, ...]] = {}  # of meshes, by the `id` of the list

    def parse(self, root: object) -> tuple[int, Mapping[str, ShardedItem]]:
        content = _dictionary(root, "metadata")
        version = content.get("version", "1.0")
        if version != _VERSION:
            raise UnsupportedError(
                f"metadata is of version {quote(str(version))}; read is {_VERSION}",
                hint="save the checkpoint again with torch_checkpointing 0.1",
            )
        world_size = content.get("world_size")
        if not is_count(world_size, MAX_RANKS) or not world_size:
            raise FormatError("metadata does not contain the number of ranks")
        items = _dictionary(content.get("metadata"), "items")
        return world_size, {
            str(name): self._item(str(name), item, world_size) for name, item in items.items()
        }

    def _item(self, name: str, value: object, world_size: int) -> ShardedItem:
        content = _dictionary(value, f"item {quote(name)}")
        layouts = _dictionary(content.get("rank_to_layout_info"), f"layout of {quote(name)}")
        tensors = _dictionary(content.get("nested_path_to_metadata"), f"item {quote(name)}")
        visits = sum(len(path) if isinstance(path, str) else 1 for path in tensors)
        self._left -= len(layouts) + visits
        if self._left < 0:
            raise LimitError("unfolds into more values than it has bytes")
        if len(layouts) != world_size or not all(rank in layouts for rank in range(world_size)):
            raise FormatError(f"item {quote(name)} does not name the files of {world_size} ranks")
        files: dict[int, tuple[str, bool]] = {}
        for rank in range(world_size):
            if layouts[rank] is None:
                files[rank] = f"{name}_{rank}.pt", False
                continue
            layout = _dictionary(layouts[rank], "layout")
            path = layout.get("file_path")
            kind = _dictionary(layout.get("serialization_format"), "serialization").get("type")
            if not isinstance(path, str) or not stays_inside(path):
                named = quote(str(path))
                raise UnsafePathError(f"layout names {named}, which may be outside the folder")
            if str(kind) not in _LAYOUTS:  # a damaged pickle has values that have no hash
                raise UnsupportedError(f"tensors of {quote(name)} are stored by {quote(str(kind))}")
            files[rank] = path, _LAYOUTS[str(kind)]
        shardings: dict[KeyPath, Sharding] = {}
        for path, ways in tensors.items():
            keys = parse_json(path.encode(), where="metadata") if isinstance(path, str) else None
            if not isinstance(keys, list) or not all(type(key) in {str, int} for key in keys):
                raise FormatError("metadata names a tensor by something that is no path")
            shardings[tuple(keys)] = self._sharding(str(path), ways, world_size)
        return ShardedItem(files, shardings)

    def _sharding(self, path: str, ways: object, world_size: int) -> Sharding:
        """Returns the sharding of a tensor, which has to be one for all the ranks of its mesh."""
        if not isinstance(ways, list) or len(ways) != 1:
            raise UnsupportedError(f"tensor {quote(path)} is spread by ranks in several ways")
        packed = _dictionary(_dictionary(ways[0], path).get("sharding_metadata"), path)
        if packed.get("type") != _DTENSOR:
            raise UnsupportedError(
                f"tensor {quote(path)} is spread as {quote(str(packed.get('type')))}, where"
                " DTensors are read"
            )
        data = _dictionary(packed.get("data"), path)
        shape = _counts(data.get("global_shape"))
        mesh = _dictionary(data.get("mesh_spec"), path)
        sizes, ranks = _counts(mesh.get("mesh_shape")), self._ranks_of(mesh, world_size)
        if len(ranks) != math.prod(sizes):
            raise FormatError(f"a mesh has other ranks than the run of {world_size}")
        placements = data.get("placements")
        if not isinstance(placements, list) or len(placements) != len(sizes):
            raise FormatError(f"tensor {quote(path)} has not one placement for each dimension")
        parsed = tuple(_parse_placement(placement, len(shape)) for placement in placements)
        return Sharding(shape, ranks, sizes, parsed)

    def _ranks_of(self, mesh: Mapping[Any, Any], world_size: int) -> tuple[int, ...]:
        """Returns the ranks of a mesh, checked once for all meshes that share them."""
        value = mesh.get("mesh_data")
        ranks = self._ranks.get(id(value))
        if ranks is None:
            ranks = _counts(value, MAX_RANKS)
            if not ranks or len(set(ranks)) != len(ranks) or max(ranks) >= world_size:
                raise FormatError(f"a mesh has other ranks than the run of {world_size}")
            self._ranks[id(value)] = ranks
        return ranks


def _parse_placement(value: object, dimensions: int) -> Placement:
    content = _dictionary(value, "placement")
    kind = content.get("type")
    if kind == "Replicate":
        return Placement()
    if str(kind) not in {"Shard", "StridedShard"}:
        raise UnsupportedError(f"tensor is placed as {quote(str(kind))}")
    factor = content.get("split_factor") if kind == "StridedShard" else 1
    return make_split(content.get("dim"), factor, dimensions)


def _dictionary(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a dictionary")
    return value


def _counts(value: object, most: int = MAX_DIMENSIONS) -> Shape:
    numbers = value if isinstance(value, (list, tuple)) and len(value) <= most else (None,)
    if not all(is_count(number, _MAX_SIZE) for number in numbers):
        raise FormatError("a shape, or a list of ranks, is not one of natural numbers")
    return tuple(numbers)


_LocalTensor = tuple[int, HeaderTensor]  # the position of its file, and what the header says
_OfRanks = Mapping[int, Mapping[str, _LocalTensor]]  # by rank and name


def _read_images(
    source: Source,
    table: FileTable,
    item: str,
    sharded: ShardedItem,
    by_rank: Mapping[int, str],
    where: str,
) -> dict[Key, TensorEntry]:
    """Returns the tensors of an item in safetensors; each file holds the local ones of a rank."""
    names = {join_path(path): path for path in sharded.tensors}
    tensors: dict[int, dict[str, _LocalTensor]] = {}
    for rank, path in sorted(by_rank.items()):
        file = stat_or_missing(source, path)
        if file.size_bytes < 0:
            raise MissingFileError(
                f"{posixpath.basename(path)!r}, the file of rank {rank}, is not there",
                hint=COPY_BACK,
            )
        number = table.add_file(file)
        tensors[rank] = {t.name: (number, t) for t in read_header(source, file).tensors}
    for rank, of_rank in tensors.items():
        extra = next((name for name in of_rank if name not in names), None)
        if extra is not None:
            raise FormatError(
                f"{posixpath.basename(by_rank[rank])!r} holds {quote(extra)}, which the"
                " metadata does not describe"
            )
    held: dict[KeyPath, Stored] = {}
    for name, keys in names.items():
        sharding = sharded.tensors[keys]
        chunks = list(_place_images(table, name, sharding, tensors, where))
        dtype = tensors[sharding.ranks[0]][name][1].dtype
        held[item, *keys] = dtype, sharding.shape, chunks
    return make_entries(held)


def _place_images(
    table: FileTable, name: str, sharding: Sharding, tensors: _OfRanks, where: str
) -> Iterator[Chunk]:
    """Yields the blocks of a tensor that ranks have."""
    absent = next((rank for rank in sharding.ranks if name not in tensors.get(rank, {})), None)
    if absent is not None:
        raise FormatError(f"rank {absent} has no part of {quote(name)}")
    local = [tensors[rank][name] for rank in sharding.ranks]
    if len({stored.dtype for _, stored in local}) > 1:
        raise FormatError(f"ranks have {quote(name)} in several types")
    highest = max(sharding.ranks)
    parts = find_local_parts(
        [
            (
                stored.shape,
                sharding.shape,
                Mesh(sharding.mesh, (), compute_coordinate(at, sharding.mesh), highest),
                sharding.placements,
            )
            for at, (_, stored) in enumerate(local)
        ],
        where=f"{where}: {quote(name)}",
    )
    if parts is None:
        raise FormatError(
            f"{quote(name)} of shape {list(sharding.shape)} has parts of other shapes than its"
            " placements give: sizes do not add up"
        )
    for rank, (file, stored), part in zip(sharding.ranks, local, parts, strict=True):
        if 0 in part.shape:
            continue
        strides = row_major_strides(part.shape)
        record = table.add_record(Record(file, stored.start, stored.stop))
        for box, local_offsets in part.blocks:
            yield Chunk(
                box,
                record,
                byte_offset=flat_offset(local_offsets, strides) * stored.dtype.itemsize,
                strides=None if box.sizes == part.shape else strides,
                rank=rank,
            )


class TorchCheckpointingReader(FormatReader):
    """Reads a file of each rank, for each item of the state or for all of it."""

    name = "torch-checkpointing"
    order = 20
    expected = "'model_0.pt' beside 'model_1.pt', or beside 'metadata.pkl'"
    endings = r"metadata\.pkl"
    index_memory = (_METADATA, 12)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a `metadata.pkl`; others are recognised by their contents."""
        homes = {posixpath.dirname(p) for p in paths if posixpath.basename(p) == _METADATA}
        inside = [
            path
            for path in (paths if homes else ())
            if posixpath.dirname(path) in homes
            and (_parse_name(path) or posixpath.basename(path) == _METADATA)
        ]
        reason = f"{_METADATA!r} beside files numbered by rank"
        return [
            Candidate(self.name, folder, tuple(files), reason)
            for folder, files in group_by_folder(inside).items()
            if len(files) > 1
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        path = posixpath.join(candidate.folder, _METADATA)
        has_metadata = path in candidate.files
        recorded, items = read_sharding_metadata(source, path) if has_metadata else (0, {})
        by_archive, by_image = _sort_files(candidate, items)
        table = ArchiveTable()
        index = _read_archives(source, table, candidate.folder, by_archive)
        world_size = recorded or index.run.world_size or 1
        if recorded and index.run.world_size is not None:
            refuse_mixed_sizes({index.run.world_size, world_size})
        for by_rank in (*by_archive.values(), *by_image.values()):
            refuse_stale_ranks(by_rank.items(), world_size)
        images: dict[Key, TensorEntry] = {}
        for item, by_rank in by_image.items():
            if item not in items:
                raise UnsupportedError(
                    f"no {_METADATA!r} describes how the tensors of {quote(item)} are spread,"
                    f" and {posixpath.basename(min(by_rank.values()))!r} does not either",
                    hint="torch_checkpointing describes items that are given a resharder",
                )
            images |= _read_images(source, table, item, items[item], by_rank, where)
        both = next((key for key in images if key in index.tensors), None)
        if both is not None:
            image, archive = table.files[len(index.files)], index.files[0]
            raise FormatError(
                f"{posixpath.basename(image.path)!r} and {posixpath.basename(archive.path)!r} hold"
                f" {quote(both)} both",
                hint="two saves went into one folder; take away the files of one",
            )
        writer = index.run.writer  # any program may number the files of ranks
        if has_metadata:
            writer = "torch_checkpointing"
        elif _ALL_ITEMS in by_archive:
            writer = _EXPERIMENTAL
        return table.index(
            self.name,
            {**images, **index.tensors},
            *([source.stat(path)] if has_metadata else []),
            values=index.values,
            aliases=index.aliases,
            run=replace(index.run, world_size=world_size, writer=writer),
            problems=index.problems,
        )


_Files = Mapping[str, Mapping[int, str]]  # by item and rank


def _sort_files(candidate: Candidate, items: Mapping[str, ShardedItem]) -> tuple[_Files, _Files]:
    """Returns the files of `torch.save`, and those in safetensors.

    The metadata says which they are where it names them, else their names do.
    """
    archives: dict[str, dict[int, str]] = defaultdict(dict)
    images: dict[str, dict[int, str]] = defaultdict(dict)
    listed = set()
    for item, sharded in items.items():
        for rank, (inside, is_safetensors) in sharded.files.items():
            path = posixpath.join(candidate.folder, inside)
            (images if is_safetensors else archives)[item][rank] = path
            listed.add(path)
    for parsed in filter(None, map(_parse_name, candidate.files)):
        if parsed.path not in listed:
            kind = images if parsed.is_safetensors else archives
            kind[parsed.item].setdefault(parsed.rank, parsed.path)
    return archives, images


def _read_archives(source: Source, table: ArchiveTable, folder: str, files: _Files) -> TensorIndex:
    """Returns the index of the files that `torch.save` wrote."""
    contents: list[RankContents] = []  # those of the model first
    distributed: dict[str, set[int]] = {}  # by item the ranks that have parts of its tensors
    for item in sorted(files, key=lambda item: (item != "model", item)):
        prefix = () if item == _ALL_ITEMS else (item,)
        for rank, path in sorted(files[item].items()):
            contents.append(load_rank_file(source, table, RankFile(path, "model", rank), prefix))
            if contents[-1].is_distributed:
                distributed.setdefault(item, set()).add(rank)
    of_model = len(files.get("model", ()))
    if have_state_dicts(contents[:of_model]):
        contents[:of_model] = map(drop_first_key, contents[:of_model])
    if not contents:
        return table.index(TorchCheckpointingReader.name, {})
    if _ALL_ITEMS in distributed and len(distributed) > 1:
        first, second = (min(files[item].values()) for item in [*distributed][:2])
        raise FormatError(
            f"{posixpath.basename(first)!r} and {posixpath.basename(second)!r} are of two"
            " checkpoints",
            hint=MIXED_SAVES,
        )
    check_counters(contents)
    values = {p: v for held in contents if held.file.rank == 0 for p, v in held.values.items()}
    contents[0] = replace(contents[0], values=values)
    owner = next(iter(distributed), next(iter(files)))
    owned = (RankFile(path, "model", rank) for rank, path in files[owner].items())
    file_set = RankFileSet(folder, "", owner, tuple(owned))
    by_kind: dict[Kind, list[RankContents]] = {"model": contents, "optimizer": [], "extra": []}
    index = RankAssembly(source, table, file_set, by_kind).index()
    for item, ranks in distributed.items():
        what = f"files of {quote(item)}"
        refuse_missing_ranks(ranks, index.run.world_size or 1, what)
    return index


class _NumberedFile(Struct, frozen=True):
    """A numbered file, as its name describes it."""

    path: str
    item: str
    rank: int
    is_safetensors: bool  # whether it is a safetensors file, and not torch's


def _parse_name(path: str) -> _NumberedFile | None:
    match = _NUMBERED.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    return _NumberedFile(path, match["item"], int(match["rank"]), match["kind"] == "safetensors")


def add_numbered_ranks(
    source: Source, candidates: Sequence[Candidate], paths: Sequence[str]
) -> list[Candidate]:
    """Groups numbered files that ranks wrote, which only their contents show."""
    taken = {
        path
        for c in candidates
        if c.format not in _SINGLE_FILE_FORMATS or len(c.files) > 1
        for path in c.files
    }
    # Next to a model of these formats, numbered files are something else that its run saved.
    others = {c.folder for c in candidates if c.format in _SHARDED_FORMATS}
    folders: dict[str, list[_NumberedFile]] = defaultdict(list)
    for path in paths:
        file, folder = _parse_name(path), posixpath.dirname(path)
        if file is not None and path not in taken and folder not in others:
            folders[folder].append(file)
    of_ranks = list(_find_of_ranks(source, folders))
    replaced = {path for candidate in of_ranks for path in candidate.files}
    return [c for c in candidates if replaced.isdisjoint(c.files)] + of_ranks


def _find_of_ranks(source: Source, folders: dict[str, list[_NumberedFile]]) -> Iterator[Candidate]:
    inspected = 0
    for folder, files in sorted(folders.items()):
        items: dict[str, list[_NumberedFile]] = defaultdict(list)
        for file in sorted(files, key=lambda file: file.rank):
            items[file.item].append(file)
        inspected += len(items)
        if inspected > _MOST_INSPECTED:
            return
        distributed = []
        for item, held in sorted(items.items()):
            for file in held[:_FILES_OF_AN_ITEM]:
                pickle = b""  # safetensors files do not show it, a file's reader reports its errors
                with suppress(InputError):
                    if not file.is_safetensors:
                        read, size = read_from(source, file.path), source.stat(file.path).size_bytes
                        pickle = open_archive(read, size, where=file.path).pickle()
                if any(mark in pickle for mark in _MARKS):
                    distributed.append(item)
                    break
        if distributed:
            names = " and ".join(map(repr, distributed))
            reason = f"files numbered by rank, and {names} hold distributed tensors"
            yield Candidate(
                TorchCheckpointingReader.name, folder, tuple(sorted(f.path for f in files)), reason
            )
