"""The reader of what torch_checkpointing and torch's experimental checkpointer write.

Each rank writes a file for each item of the state (`model_0.pt`), or one for all of them
(`checkpoint_0.pt`). A `metadata.pkl` of dictionaries, lists, texts and numbers may describe how the
tensors are distributed. Torch's own files contain that with their DTensors. Safetensors files hold
local tensors, whose positions only `metadata.pkl` has.

Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py,
0.1.1.
"""

from __future__ import annotations

import math
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    FormatError,
    LimitError,
    MissingFileError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.geometry import flat_offset, row_major_strides
from ckptkit.core.index import (
    Chunk,
    FileRef,
    Key,
    KeyPath,
    Record,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import (
    COPY_BACK,
    MAX_DIMENSIONS,
    MIXED_SAVES,
    is_count,
    parse_json,
    read_limited,
    refuse_missing_ranks,
    refuse_mixed_sizes,
    refuse_stale_ranks,
    stat_or_missing,
    stays_inside,
)
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.formats.ranks.dtensor import (
    MAX_RANKS,
    Mesh,
    Placement,
    compute_coordinate,
    find_local_parts,
    make_split,
)
from ckptkit.formats.ranks.rank_files import (
    FORMAT,
    METADATA_PICKLE,
    Kind,
    RankContents,
    RankFile,
    RankFileLoader,
    RankFileSet,
    check_counters,
    find_with_metadata,
    parse_numbered_name,
)
from ckptkit.formats.ranks.reader import RankAssembly, drop_first_key, have_state_dicts
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.formats.trees import Stored, join_path, make_entries
from ckptkit.storage.base import Source

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
        self._meshes: dict[int, tuple[Shape, tuple[int, ...]]] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}

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
        sizes, ranks = self._mesh(_dictionary(data.get("mesh_spec"), path), world_size)
        placements = data.get("placements")
        if not isinstance(placements, list) or len(placements) != len(sizes):
            raise FormatError(f"tensor {quote(path)} has not one placement for each dimension")
        parsed = tuple(_parse_placement(placement, len(shape)) for placement in placements)
        return Sharding(shape, ranks, sizes, parsed)

    def _mesh(self, mesh: Mapping[Any, Any], world_size: int) -> tuple[Shape, tuple[int, ...]]:
        parsed = self._meshes.get(id(mesh))
        if parsed is None:
            sizes = _counts(mesh.get("mesh_shape"))
            ranks = self._ranks_of(mesh.get("mesh_data"), world_size)
            if len(ranks) != math.prod(sizes):
                raise FormatError(f"a mesh has other ranks than the run of {world_size}")
            parsed = self._meshes[id(mesh)] = sizes, ranks
        return parsed

    def _ranks_of(self, value: object, world_size: int) -> tuple[int, ...]:
        """Returns the ranks of a mesh, checked once for all meshes that share them."""
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


class LocalImages:
    """Assembles the tensors of safetensors files; each file holds the local ones of a rank."""

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self.where = where
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self.entries: dict[Key, TensorEntry] = {}

    def add(self, item: str, sharded: ShardedItem, by_rank: Mapping[int, str]) -> None:
        tensors = {rank: self._open(rank, path) for rank, path in sorted(by_rank.items())}
        names = {join_path(path): path for path in sharded.tensors}
        for rank, of_rank in tensors.items():
            extra = next((name for name in of_rank if name not in names), None)
            if extra is not None:
                raise FormatError(
                    f"{posixpath.basename(by_rank[rank])!r} holds {quote(extra)}, which the"
                    " metadata does not describe",
                    where=self.where,
                )
        held: dict[KeyPath, Stored] = {}
        for name, path in names.items():
            sharding = sharded.tensors[path]
            chunks = list(self._chunks(name, sharding, tensors))
            dtype = tensors[sharding.ranks[0]][name][1].dtype
            held[item, *path] = dtype, sharding.shape, chunks
        self.entries |= make_entries(held, where=self.where)

    def _open(self, rank: int, path: str) -> Mapping[str, _LocalTensor]:
        file = stat_or_missing(self._source, path)
        if file.size_bytes < 0:
            raise MissingFileError(
                f"{posixpath.basename(path)!r}, the file of rank {rank}, is not there",
                where=self.where,
                hint=COPY_BACK,
            )
        self.files.append(file)
        header = read_header(self._source, file)
        return {t.name: (len(self.files) - 1, t) for t in header.tensors}

    def _chunks(
        self, name: str, sharding: Sharding, tensors: Mapping[int, Mapping[str, _LocalTensor]]
    ) -> Iterator[Chunk]:
        """Yields the blocks of a tensor that ranks have."""
        absent = next((rank for rank in sharding.ranks if name not in tensors.get(rank, {})), None)
        if absent is not None:
            raise FormatError(f"rank {absent} has no part of {quote(name)}", where=self.where)
        local = [tensors[rank][name] for rank in sharding.ranks]
        if len({stored.dtype for _, stored in local}) > 1:
            raise FormatError(f"ranks have {quote(name)} in several types", where=self.where)
        highest = max(sharding.ranks)
        meshes = (
            Mesh(sharding.mesh, (), compute_coordinate(at, sharding.mesh), highest)
            for at in range(len(local))
        )
        parts = find_local_parts(
            [
                (stored.shape, sharding.shape, mesh, sharding.placements)
                for (_, stored), mesh in zip(local, meshes, strict=True)
            ],
            where=f"{self.where}: {quote(name)}",
        )
        if parts is None:
            raise FormatError(
                f"{quote(name)} of shape {list(sharding.shape)} has parts of other shapes than its"
                " placements give: sizes do not add up",
                where=self.where,
            )
        for rank, (file, stored), part in zip(sharding.ranks, local, parts, strict=True):
            if 0 in part.shape:
                continue
            strides = row_major_strides(part.shape)
            self.records.append(Record(file, stored.start, stored.stop))
            for box, local_offsets in part.blocks:
                yield Chunk(
                    box,
                    len(self.records) - 1,
                    byte_offset=flat_offset(local_offsets, strides) * stored.dtype.itemsize,
                    strides=None if box.sizes == part.shape else strides,
                    rank=rank,
                )


class TorchCheckpointingReader(FormatReader):
    """Reads a file of each rank, for each item of the state or for all of it."""

    name = FORMAT
    order = 20
    expected = "'model_0.pt' beside 'model_1.pt', or beside 'metadata.pkl'"
    endings = r"metadata\.pkl"
    index_memory = (METADATA_PICKLE, 12)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a `metadata.pkl`; others are recognised by their contents."""
        return find_with_metadata(paths)

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        path = posixpath.join(candidate.folder, METADATA_PICKLE)
        has_metadata = path in candidate.files
        recorded, items = read_sharding_metadata(source, path) if has_metadata else (0, {})
        by_archive, by_image = _sort_files(candidate, items)
        index = _torch_index(source, candidate.folder, by_archive, where)
        world_size = recorded or index.run.world_size or 1
        if recorded and index.run.world_size is not None:
            refuse_mixed_sizes({index.run.world_size, world_size}, where)
        for by_rank in (*by_archive.values(), *by_image.values()):
            refuse_stale_ranks(by_rank.items(), world_size, where)
        images = LocalImages(source, where)
        for item, by_rank in by_image.items():
            if item not in items:
                raise UnsupportedError(
                    f"no {METADATA_PICKLE!r} describes how the tensors of {quote(item)} are spread,"
                    f" and {posixpath.basename(min(by_rank.values()))!r} does not either",
                    where=where,
                    hint="torch_checkpointing describes items that are given a resharder",
                )
            images.add(item, items[item], by_rank)
        joined = _join(index, images)
        writer = joined.run.writer  # any program may number the files of ranks
        if has_metadata:
            writer = "torch_checkpointing"
            joined = replace(joined, files=(*joined.files, source.stat(path)))
        elif _ALL_ITEMS in by_archive:
            writer = _EXPERIMENTAL
        return replace(joined, run=replace(joined.run, world_size=world_size, writer=writer))


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
    for parsed in filter(None, map(parse_numbered_name, candidate.files)):
        if parsed.path not in listed:
            kind = images if parsed.is_safetensors else archives
            kind[parsed.item].setdefault(parsed.rank, parsed.path)
    return archives, images


def _torch_index(source: Source, folder: str, files: _Files, where: str) -> TensorIndex:
    """Returns the index of the files that `torch.save` wrote."""
    loader = RankFileLoader(source)
    contents: list[RankContents] = []  # those of the model first
    distributed: dict[str, set[int]] = {}  # by item the ranks that have parts of its tensors
    for item in sorted(files, key=lambda item: (item != "model", item)):
        prefix = () if item == _ALL_ITEMS else (item,)
        for rank, path in sorted(files[item].items()):
            contents.append(loader.load(RankFile(path, "model", rank), prefix))
            if contents[-1].is_distributed:
                distributed.setdefault(item, set()).add(rank)
    of_model = len(files.get("model", ()))
    if have_state_dicts(contents[:of_model]):
        contents[:of_model] = map(drop_first_key, contents[:of_model])
    if not contents:
        return TensorIndex(FORMAT, (), RecordTable.of([]), {}, run=RunFacts())
    if _ALL_ITEMS in distributed and len(distributed) > 1:
        first, second = (min(files[item].values()) for item in [*distributed][:2])
        raise FormatError(
            f"{posixpath.basename(first)!r} and {posixpath.basename(second)!r} are of two"
            " checkpoints",
            where=where,
            hint=MIXED_SAVES,
        )
    check_counters(contents)
    values = {p: v for held in contents if held.file.rank == 0 for p, v in held.values.items()}
    contents[0] = replace(contents[0], values=values)
    owner = next(iter(distributed), next(iter(files)))
    owned = (RankFile(path, "model", rank) for rank, path in files[owner].items())
    file_set = RankFileSet(folder, "", owner, tuple(owned))
    by_kind: dict[Kind, list[RankContents]] = {"model": contents, "optimizer": [], "extra": []}
    index = replace(RankAssembly(loader, file_set, by_kind, where).index(), format=FORMAT)
    for item, ranks in distributed.items():
        what = f"files of {quote(item)}"
        refuse_missing_ranks(ranks, index.run.world_size or 1, what, where)
    return index


def _join(index: TensorIndex, images: LocalImages) -> TensorIndex:
    """Adds the tensors of safetensors files to the index of the others."""
    if not images.files:
        return index
    records = [
        *index.records,
        *(replace(record, file=record.file + len(index.files)) for record in images.records),
    ]
    shifted = {
        key: replace(entry, chunks=entry.chunks.shifted(len(index.records)))
        for key, entry in images.entries.items()
    }
    both = next((key for key in shifted if key in index.tensors), None)
    if both is not None:
        raise FormatError(
            f"{posixpath.basename(images.files[0].path)!r} and"
            f" {posixpath.basename(index.files[0].path)!r} hold {quote(both)} both",
            where=images.where,
            hint="two saves went into one folder; take away the files of one",
        )
    return replace(
        index,
        files=(*index.files, *images.files),
        records=RecordTable.of(records),
        tensors={**shifted, **index.tensors},
    )
