"""The reader of files that each rank saved: DTensors, ShardedTensors and plain tensors.

verl, accelerate with `use_dcp=False` or LOCAL_STATE_DICT, and every program that calls
`torch.save(model.state_dict())` on all ranks write such files. No DTensor is built, so files of any
release of torch can be read without torch. Optimizer states and extra states are read together with
the weights of the same ranks; without the weights such files are refused by name.

In order: files are grouped by name and opened (`rank_files.py`); FairScale's flat shards become
ShardedTensors; the parts that ranks have of each tensor become its chunks, and replicas
are compared by their checksums (`RankAssembly`); flat parameters of FSDP1
in it are replaced by the original ones (`flat.py`).

FSDP1's optimizer works on a rank's part of a flat parameter. Its own `state_dict()` holds plain
tensors of that size, numbered and different on every rank, and nothing shows to which slices of
which flat parameter they belong. Such states are left out.

With FairScale's FSDP each rank has an equal part of each flat parameter. `local_metadata_dict` has
the parameters in it and the number of padded elements at the end of the part. It is in the file of
the state (fairseq's `shard_metadata`, a tuple, or any other key), or in a file of its own.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (`FSDPConfig`) for `fsdp_config.json`,
which verl writes next to the files of ranks;
fairscale/nn/data_parallel/fully_sharded_data_parallel.py (`local_metadata_dict`,
`consolidate_shard_weights`), FairScale 0.4.13.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.geometry import flat_offset
from ckptkit.core.index import (
    Box,
    Chunk,
    KeyPath,
    Problem,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import join_first, quote
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import (
    MIXED_SAVES,
    TWO_SAVES,
    group_by_folder,
    is_count,
    refuse_mixed_sizes,
    stat_or_missing,
)
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.objects import describe_objects, is_holder, is_object
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.dtensor import (
    DTensorRef,
    Mesh,
    Placement,
    ShardedTensorRef,
    ShardRef,
    compute_local_part,
    fields_of,
    find_local_parts,
    fits,
    parse_mesh,
    parse_placements,
    read_integers,
)
from ckptkit.formats.ranks.flat import (
    SLICES,
    FlatMember,
    FlatVector,
    apply_layout_file,
    find_flat_parameters,
    unflatten,
)
from ckptkit.formats.ranks.rank_files import (
    ACCELERATE,
    FAIRSEQ,
    LOCAL,
    VERL,
    Kind,
    RankContents,
    RankFileSet,
    RankParts,
    RankTensor,
    check_counters,
    check_names,
    check_ranks,
    group_rank_files,
    load_rank_file,
    split_off_slices,
    without_copies,
)
from ckptkit.formats.trees import (
    EXTRA_STATE,
    Stored,
    detect_framework,
    find_aliases,
    is_name_of_weight,
    join_path,
    make_entries,
)
from ckptkit.storage.base import Source

_MIN_CHUNKS = 1 << 16  # of one file, for a pickle of any length
_BYTES_OF_A_CHUNK = 8  # of the pickle; a tensor alone has over 70
UNASSIGNED_STATES = (
    "optimizer states are left alone: they belong to slices of flat parameters, and nothing shows"
    " to which"
)


StoredChunk = tuple[Chunk, TensorRef]  # the tensor of a file from which the chunk was made


class AssembledTensor(Struct, frozen=True):
    """A tensor whose parts are in the files of several ranks."""

    dtype: DType
    shape: Shape  # of the whole tensor
    stored: tuple[StoredChunk, ...]  # its chunks, replicas included
    crc32: tuple[int | None, ...]  # of their records
    is_plain: bool  # whether every rank has a plain tensor, without any mark of a distribution

    def find_differing_ranks(self) -> tuple[int, int] | None:
        """Finds two ranks whose values of the same elements have different checksums of records."""
        first: dict[object, tuple[StoredChunk, int | None]] = {}
        for stored, crc in zip(self.stored, self.crc32, strict=True):
            chunk, own = stored
            (other_chunk, other), before = first.setdefault(chunk.place, (stored, crc))
            if crc is None or before is None or crc == before:
                continue
            if other.strides == own.strides and _fills_storage(other) and _fills_storage(own):
                return other_chunk.rank or 0, chunk.rank or 0
        return None

    def find_unproven_ranks(self) -> tuple[int, int] | None:
        """Finds two ranks that nothing proves to hold the same plain tensor.

        The proof is that both have the same view of storages with the same checksum: slices of one
        tensor are saved as different views of the whole tensor.
        """
        if 0 in self.shape:
            return None
        views = [(t.storage.size_bytes, t.storage_offset, t.strides) for _, t in self.stored]
        for (chunk, _), view, crc in zip(self.stored[1:], views[1:], self.crc32[1:], strict=True):
            if crc is None or crc != self.crc32[0] or view != views[0]:
                return self.stored[0][0].rank or 0, chunk.rank or 0
        return None


def _fills_storage(tensor: TensorRef) -> bool:
    return math.prod(tensor.shape) * tensor.dtype.itemsize == tensor.storage.size_bytes


def _describe(tensor: RankTensor) -> str:
    kind = {DTensorRef: "a DTensor", ShardedTensorRef: "a ShardedTensor"}
    return f"{kind.get(type(tensor), 'a tensor')} of {tensor.dtype.name} {list(tensor.shape)}"


def _is_of_optimizer(path: KeyPath) -> bool:
    return any(isinstance(step, str) and "optim" in step.lower() for step in path[:-1])


_UNITS, _BUFFERS = "param_metadata", "buffer_names"
_MODEL: KeyPath = ("model",)


class _FlatShard(Struct, frozen=True):
    """A flat parameter in the metadata of one rank."""

    name: str
    members: tuple[tuple[str, Shape], ...]
    padding: int
    shared: tuple[tuple[str, str], ...]


def find_fairscale_shards(
    contents: Sequence[RankContents], metadata: Sequence[RankContents]
) -> tuple[list[RankContents], list[FlatVector]]:
    """Returns the contents by rank, with the flat shards of FairScale as ShardedTensors.

    With them come the original parameters in each; none if no file has FairScale's metadata.
    """
    by_rank: dict[int, PickledDict] = {}
    for held in (*metadata, *contents):
        # The metadata is the whole of a file, or one of its top values.
        root = held.archive.root
        inside = tuple(root.values()) if isinstance(root, dict) else root
        for value in (root, *(inside if isinstance(inside, tuple) else ())):
            if isinstance(value, dict) and _UNITS in value and _BUFFERS in value:
                where_in = f"{held.archive.where}, metadata of FairScale"
                by_rank[held.file.rank] = PickledDict(value, where_in)
                break
    if not by_rank:
        return list(contents), []
    missing = [held.file.rank for held in contents if held.file.rank not in by_rank]
    if missing:
        raise MissingFileError(f"the metadata of rank {missing[0]} is not there")
    shards = [_parse_metadata(by_rank[held.file.rank]) for held in contents]
    for held, own in zip(contents, shards, strict=True):
        if [(s.name, s.members) for s in own] != [(s.name, s.members) for s in shards[0]]:
            raise FormatError(
                f"has other metadata than rank {contents[0].file.rank}",
                where=held.archive.where,
                hint="files of two saves are in one folder; take away those of one",
            )
    container = _find_container(contents[0], shards[0])
    vectors = [_vector(shard, contents[0], container) for shard in shards[0]]
    return _mark_shards(contents, shards, container), vectors


def _parse_metadata(document: PickledDict) -> list[_FlatShard]:
    shards = []
    for unit in document.inner_list(_UNITS):
        if unit.values.get("no_broadcast_optim_state"):
            raise UnsupportedError(
                "ranks have experts of their own, which is not modelled", where=unit.where
            )
        path = unit.text("fsdp_path")
        prefix = f"{path}." if path else ""
        shared = []
        for pair in unit.sequence("shared_param_info"):
            match pair:
                case (str(source), str(target)) | [str(source), str(target)]:
                    shared.append((prefix + source, prefix + target))
                case _:
                    raise unit.error("'shared_param_info' does not consist of pairs of names")
        parameters = unit.inner("params")
        for name in parameters.values:
            if not isinstance(name, str):
                raise parameters.error("names a parameter by something that is not a text")
            fields = parameters.inner(name)
            names, shapes, counts = (fields.sequence(k) for k in ("names", "shapes", "numels"))
            members = []
            for member, shape, count in zip(names, shapes, counts, strict=False):
                is_shape = isinstance(shape, (tuple, list)) and all(map(is_count, shape))
                if isinstance(member, str) and is_shape and math.prod(shape) == count:
                    members.append((prefix + member, tuple(shape)))
            if not len(names) == len(shapes) == len(counts) == len(members):
                raise fields.error("does not describe the parameters in it")
            padding = fields.count("padding") or 0
            shards.append(_FlatShard(prefix + name, tuple(members), padding, tuple(shared)))
    if len({shard.name for shard in shards}) < len(shards):
        raise document.error("names a flat parameter twice")
    return shards


def _find_container(first: RankContents, shards: Sequence[_FlatShard]) -> KeyPath:
    names = {shard.name for shard in shards}
    held: dict[KeyPath, set[str]] = defaultdict(set)
    for path in first.tensors:
        held[path[:-1]].add(str(path[-1]))
    for container, inside in held.items():
        if names <= inside:
            return container
    fullest = max(held.values(), key=lambda inside: len(names & inside), default=set())
    missing = min(names - fullest)
    raise FormatError(f"has no flat parameter {quote(missing)}", where=first.archive.where)


def _mark_shards(
    contents: Sequence[RankContents], shards: Sequence[Sequence[_FlatShard]], container: KeyPath
) -> list[RankContents]:
    """Replaces flat shards by ShardedTensors, without their padding."""
    lengths: dict[str, int] = defaultdict(int)  # what the ranks so far hold of each
    placed: list[dict[str, ShardRef]] = []
    for held, own in zip(contents, shards, strict=True):
        placed.append({})
        for shard in own:
            tensor, where = held.tensors.get((*container, shard.name)), held.archive.where
            name = quote(shard.name)
            if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.row_major:
                raise FormatError(f"has no flat parameter {name}", where=where)
            count = tensor.shape[0] - shard.padding
            if count < 0:
                raise FormatError(
                    f"{name} has {tensor.shape[0]:,} elements here, {shard.padding:,} of them"
                    " padding",
                    where=where,
                )
            local = replace(tensor, shape=(count,))
            placed[-1][shard.name] = ShardRef(local, (lengths[shard.name],))
            lengths[shard.name] += count
    for shard in shards[0]:
        elements = sum(math.prod(shape) for _, shape in shard.members)
        if lengths[shard.name] != elements:
            raise IncompleteCheckpointError(
                f"{quote(shard.name)} has {elements:,} elements, and the ranks hold"
                f" {lengths[shard.name]:,}: sizes do not add up",
                where=contents[0].archive.where,
                hint="give the directory that holds the files of every rank, and of no other run",
            )
    marked = []
    for held, refs in zip(contents, placed, strict=True):
        views = {ref.tensor.storage.key for ref in refs.values()}
        tensors: dict[KeyPath, RankTensor] = {}
        for path, tensor in held.tensors.items():
            key, ref = str(path[-1]), refs.get(str(path[-1]))
            if path[:-1] != container:
                tensors[path] = tensor
            elif ref is not None:
                parts = (ref,) if ref.tensor.shape[0] else ()
                tensors[*_MODEL, key] = ShardedTensorRef(
                    parts, (lengths[key],), tensor.dtype, held.file.rank, len(contents)
                )
            elif not _is_view(tensor, views):  # a view is a tied parameter, under its other name
                tensors[*_MODEL, key] = tensor
        values = {p: v for p, v in held.values.items() if not {_UNITS, _BUFFERS} & {*p}}
        marked.append(replace(held, tensors=tensors, values=values))
    return marked


def _is_view(tensor: RankTensor, storages: set[str]) -> bool:
    return isinstance(tensor, TensorRef) and tensor.storage.key in storages


def _vector(shard: _FlatShard, first: RankContents, container: KeyPath) -> FlatVector:
    at, members = 0, []
    for name, shape in shard.members:
        others = [target for source, target in shard.shared if source == name]
        if shard.name == name:  # not flattened: its other names are keys of the state dict
            own: Any = first.tensors[(*container, name)]
            others += [
                str(path[-1])
                for path, tensor in first.tensors.items()
                if path[:-1] == container
                and path[-1] != name
                and _is_view(tensor, {own.storage.key})
            ]
        members.append(FlatMember((name, *dict.fromkeys(others)), shape, at))
        at += math.prod(shape)
    return FlatVector(shard.name, at, tuple(members))


_VERL_CONFIG = "fsdp_config.json"
_MAX_CONFIG_BYTES = 1 << 16
_PREFIXES: dict[Kind, KeyPath] = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "extra": (),
    "metadata": (),
}
# Every rank computes these from its own data; frameworks save those of rank 0.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_EXTRA: KeyPath = ("extra_state",)
_TENSORS = (TensorRef, DTensorRef, ShardedTensorRef)
_LISTED_NAMES = 3
_WRITERS = {
    VERL: "verl, one file a rank",
    ACCELERATE: "accelerate, one file a rank",
    FAIRSEQ: "fairseq, one file a rank",
    LOCAL: "nvidia-resiliency-ext, one file a rank",
    "": "torch.save on every rank",
}


class RankFilesReader(FormatReader):
    name = "rank-files"
    order = 60  # before readers that would take a rank's file for a model
    expected = "'model_world_size_2_rank_0.pt', 'pytorch_model_fsdp_0_rank0.bin' or 'rank_0.pt'"
    endings = r"\d(?:_local)?\.(?:pt|pth|bin|ckpt|pth\.tar)"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        return [
            Candidate(
                self.name,
                files.folder,
                tuple(sorted(file.path for file in files.files)),
                f"{len(files.of('model'))} files named after ranks",
            )
            for files in group_rank_files(paths)
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        where = posixpath.join(source.location, candidate.folder)
        (files,) = map(without_copies, group_rank_files(candidate.files))
        check_names(files)
        if files.writer == LOCAL and "/" not in candidate.files[0]:
            raise IncompleteCheckpointError(
                "is the folder of one rank",
                hint=f"pass the one above it, which has those of all ranks:"
                f" {posixpath.dirname(source.location.rstrip('/')) or '.'}",
            )
        table = ArchiveTable()
        contents: dict[Kind, list[RankContents]] = {}
        for kind, prefix in _PREFIXES.items():
            has_prefix = files.writer in {VERL, ACCELERATE} or kind != "model"
            under = prefix if has_prefix else ()
            contents[kind] = [load_rank_file(source, table, file, under) for file in files.of(kind)]
            if kind == "model" and under and have_state_dicts(contents[kind]):
                files = replace(files, writer="")
                contents[kind] = [drop_first_key(held) for held in contents[kind]]
        for of_kind in contents.values():
            check_counters(of_kind)
        contents["model"], vectors = find_fairscale_shards(contents["model"], contents["metadata"])
        index = RankAssembly(source, table, files, contents).index()
        if vectors:
            names = {vector.name for vector in vectors}
            flat = [entry for entry in index.of_part("model") if entry.name in names]
            run = replace(index.run, writer=f"FairScale FSDP, {index.run.writer}")
            return unflatten(replace(index, run=run), flat, vectors, where)
        if files.writer == VERL:
            index = _check_verl_config(index, source, files.folder)
        if find_flat_parameters(index):
            index = apply_layout_file(index, source, files.folder)
        return index


def have_state_dicts(contents: Sequence[RankContents]) -> bool:
    """Returns whether files below `model` have state dicts: `{"model": ..., "optimizer": ...}`.

    A loop may give its own dictionary a name by which a framework writes the weights alone.
    """
    paths = [path[1:] for held in contents for path in held.tensors]
    paths = [path for path in paths if path and not str(path[0]).endswith(EXTRA_STATE)]
    is_bare = any(len(path) == 1 and is_name_of_weight(str(path[0])) for path in paths)
    return not is_bare and any(len(path) > 1 for path in paths)


def drop_first_key(held: RankContents) -> RankContents:
    """Returns contents whose paths begin with the second key, where files have state dicts."""
    return replace(
        held,
        tensors={path[1:]: value for path, value in held.tensors.items()},
        values={path[1:]: value for path, value in held.values.items()},
    )


def _check_verl_config(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Compares an index with verl's configuration, and adds the version of FSDP."""
    path = posixpath.join(folder, _VERL_CONFIG)
    where = posixpath.join(source.location, path)
    file = stat_or_missing(source, path)
    if file.size_bytes < 0:  # verl before 0.4 wrote none
        return index
    try:
        config = json.loads(source.read(path, 0, min(file.size_bytes, _MAX_CONFIG_BYTES)))
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    config = config if isinstance(config, dict) else {}
    size = config.get("world_size")
    if size is not None and size != index.run.world_size:
        raise FormatError(
            f"is of a run with {size!r} ranks, and the files are of {index.run.world_size}",
            where=where,
            hint=MIXED_SAVES,
        )
    version = config.get("FSDP_version")
    fsdp = f", FSDP{version}" if type(version) is int else ""
    run = replace(index.run, writer=f"verl{fsdp}, one file a rank")
    return replace(index, files=(*index.files, file), run=run)


class RankAssembly:
    """Makes the index of files of ranks that were opened."""

    def __init__(
        self,
        source: Source,
        table: ArchiveTable,
        files: RankFileSet,
        contents: Mapping[Kind, Sequence[RankContents]],
    ) -> None:
        self._source = source
        self._table = table
        self._files = files
        self._contents = contents
        self._meshes: dict[tuple[int, int], tuple[InertObject, Mesh]] = {}  # of every file
        self._counts: dict[int, int] = defaultdict(int)  # how many chunks each file has so far

    def index(self) -> TensorIndex:
        weights, slices = split_off_slices(self._contents["model"])
        contents = [*weights, *self._contents["optimizer"]]
        values: dict[KeyPath, Any] = {}  # that are not tensors, of rank 0
        for kind, held in self._contents.items():
            prefix = _EXTRA if kind == "extra" else ()
            for first in held[:1]:
                values |= {(*prefix, *path): value for path, value in first.values.items()}
        values |= {(*SLICES, str(path[-1])): extent for path, extent in slices.items()}
        parts: dict[KeyPath, list[tuple[RankContents, RankTensor]]] = defaultdict(list)
        for one in contents:
            for path, tensor in one.tensors.items():
                parts[path].append((one, tensor))
        notes = self._drop_cut_states(parts)
        tensors = {path: self._assemble(path, own) for path, own in parts.items()}
        world_size = self._world_size(contents)
        check_ranks(self._files, world_size)
        held_tensors: dict[KeyPath, Stored] = {}
        for path, whole in tensors.items():
            chunks = [chunk for chunk, _ in whole.stored]
            # Every rank has the whole of a plain tensor; that of the first is enough.
            held_tensors[path] = whole.dtype, whole.shape, chunks[:1] if whole.is_plain else chunks
        entries = make_entries(held_tensors, values=values)
        problems, drifted = self._compare_ranks(tensors, entries.values())
        if drifted:
            names = join_first(drifted, len(drifted), _LISTED_NAMES)
            notes.append(f"statistics differ between ranks, rank 0's are taken: {names}")
        return self._table.index(
            RankFilesReader.name,
            entries,
            values=values,
            aliases=find_aliases(entries.values()),
            run=self._facts(world_size, values, notes),
            problems=tuple(problems),
        )

    def _drop_cut_states(
        self, parts: dict[KeyPath, list[tuple[RankContents, RankTensor]]]
    ) -> list[str]:
        """Drops all states of an optimizer if some are slices, which cannot be named."""
        states = [path for path in parts if _is_of_optimizer(path)]
        cut = set()
        for path in states:
            own = parts[path]
            if path[:1] not in cut and own[0][1].shape:
                shapes = {tensor.shape for _, tensor in own if isinstance(tensor, TensorRef)}
                whole = None if len(shapes) > 1 else self._assemble(path, own)
                if whole is None or (whole.is_plain and whole.find_unproven_ranks()):
                    cut.add(path[:1])
        dropped = [path for path in states if path[:1] in cut]
        for path in dropped:
            del parts[path]
        return [f"{len(dropped)} {UNASSIGNED_STATES}"] if dropped else []

    def _assemble(self, path: KeyPath, parts: RankParts) -> AssembledTensor:
        first = parts[0][1]
        for contents, tensor in parts:
            if (type(tensor), tensor.dtype, tensor.shape) != (
                type(first),
                first.dtype,
                first.shape,
            ):
                raise FormatError(
                    f"{join_path(path)!r} is {_describe(tensor)} here and {_describe(first)} on"
                    f" rank {parts[0][0].file.rank}",
                    where=contents.archive.where,
                    hint="files of two saves, or slices that are not marked as such, are in one"
                    " folder",
                )
        stored = list(self._place_dtensors(path, parts))
        for contents, tensor in parts:
            if isinstance(tensor, ShardedTensorRef):
                stored += [
                    self._chunk(contents, shard.tensor, Box(shard.offsets, shard.tensor.shape))
                    for shard in tensor.shards
                    if 0 not in shard.tensor.shape
                ]
            elif isinstance(tensor, TensorRef):
                stored.append(self._chunk(contents, tensor))
        crcs = tuple(self._table.records[chunk.record].crc32 for chunk, _ in stored)
        is_plain = isinstance(first, TensorRef)
        return AssembledTensor(first.dtype, first.shape, tuple(stored), crcs, is_plain)

    def _place_dtensors(self, path: KeyPath, parts: RankParts) -> Iterator[StoredChunk]:
        name = repr(join_path(path))
        local = [
            (contents, tensor, *self._parse_spec(contents, tensor))
            for contents, tensor in parts
            if isinstance(tensor, DTensorRef)
        ]
        sizes = sorted({math.prod(mesh.sizes) for _, _, mesh, _ in local})
        if len(sizes) > 1:
            raise FormatError(
                f"{name} is spread over {' and '.join(map(str, sizes))} ranks",
                where=local[0][0].archive.where,
                hint="files of runs of different sizes are in one folder; take away those of one",
            )
        if not local:
            return
        local_parts = find_local_parts(
            [(tensor.local.shape, tensor.shape, mesh, how) for _, tensor, mesh, how in local],
            where=f"{local[0][0].archive.where}: {name}",
        )
        for number, (contents, tensor, mesh, placements) in enumerate(local):
            whole, own = tensor.shape, tensor.local.shape
            if local_parts is None:
                part = compute_local_part(whole, mesh, placements, inner_first=False)
                if part is not None and fits(own, part):
                    continue
                raise FormatError(
                    f"{name} of shape {list(whole)} has a part of shape {list(own)} on rank"
                    f" {contents.file.rank}, where its placements give"
                    f" {'none' if part is None else list(part.shape)}: sizes do not add up",
                    where=contents.archive.where,
                )
            part = local_parts[number]
            for box, offsets in part.blocks if 0 not in part.shape else ():
                skipped = flat_offset(offsets, tensor.local.strides)
                yield self._chunk(contents, tensor.local, box, skipped)

    def _parse_spec(
        self, contents: RankContents, tensor: DTensorRef
    ) -> tuple[Mesh, tuple[Placement, ...]]:
        archive = contents.archive

        def read(ranks: TensorRef) -> list[int]:
            start, stop, _ = archive.archive.extent(ranks.storage)
            return read_integers(ranks, lambda: self._source.read(archive.path, start, stop))

        try:
            fields = fields_of(tensor.spec, "specification of a DTensor")
            placements = parse_placements(fields.get("placements"), len(tensor.shape))
            value = fields.get("mesh")
            if not isinstance(value, InertObject):
                raise FormatError("DTensor has no mesh of devices")
            key = archive.number, id(value)
            if key not in self._meshes:
                self._meshes[key] = value, parse_mesh(value, contents.file.rank, read)
        except CkptkitError as error:
            raise error.located(archive.where) from error
        return self._meshes[key][1], placements

    def _chunk(
        self, contents: RankContents, tensor: TensorRef, box: Box | None = None, skipped: int = 0
    ) -> StoredChunk:
        archive = contents.archive
        # A pickle may name the same parts any number of times, so the chunks are limited.
        self._counts[archive.number] += 1
        if self._counts[archive.number] > _MIN_CHUNKS + archive.pickle_bytes // _BYTES_OF_A_CHUNK:
            raise LimitError(
                "tensors are cut into far more pieces than any real ones", where=archive.where
            )
        return self._table.chunk(archive, tensor, contents.file.rank, box, skipped), tensor

    def _world_size(self, contents: Sequence[RankContents]) -> int:
        """Returns the number of ranks of the run; all sources of it have to agree."""
        sizes = {file.world_size for file in self._files.files if file.world_size is not None}
        for held in contents:
            for tensor in held.tensors.values():
                if not isinstance(tensor, ShardedTensorRef):
                    continue
                if tensor.rank != held.file.rank:
                    raise FormatError(
                        f"file is named after rank {held.file.rank}, and was written by rank"
                        f" {tensor.rank}",
                        where=held.archive.where,
                        hint="give the files of all ranks the names that they were saved under",
                    )
                sizes.add(tensor.world_size)
        refuse_mixed_sizes(sizes)
        reached = [mesh.highest_rank + 1 for _, mesh in self._meshes.values()]
        least = max(reached, default=0) or 1 + max(file.rank for file in self._files.files)
        return next(iter(sizes), least)

    def _compare_ranks(
        self, tensors: Mapping[KeyPath, AssembledTensor], entries: Iterable[TensorEntry]
    ) -> tuple[list[Problem], list[str]]:
        """Compares what ranks have of the same elements.

        Returns problems, and the names of statistics that differ.
        """
        problems: list[Problem] = []
        drifted: list[str] = []
        # Next to tensors that are marked as distributed, plain tensors are equal on all ranks.
        is_marked = not all(tensor.is_plain for tensor in tensors.values())
        for (path, tensor), entry in zip(tensors.items(), entries, strict=True):
            ranks = tensor.find_differing_ranks()
            if ranks is None:
                unproven = None if is_marked else tensor.find_unproven_ranks()
                problems += [_unproven(entry, unproven)] if unproven else []
            elif _is_of_optimizer(path) and not tensor.shape:
                raise FormatError(
                    f"{join_path(path)!r} differs between ranks {ranks[0]} and {ranks[1]}, so that"
                    " they are of different steps",
                    hint=TWO_SAVES,
                )
            elif tensor.is_plain and str(path[-1]).rpartition(".")[2] in _STATISTICS:
                drifted.append(entry.name)
            else:
                problems.append(_differing(entry, tensor, ranks))
        return problems, drifted

    def _facts(
        self, world_size: int, values: Mapping[KeyPath, Any], notes: Sequence[str]
    ) -> RunFacts:
        meshes = [mesh for _, mesh in self._meshes.values()]
        largest = max(meshes, key=lambda mesh: len(mesh.sizes), default=None)
        names = () if largest is None else largest.names or ("",) * len(largest.sizes)
        is_loop = not self._files.writer  # a loop's own dictionary, the same on all ranks
        root = self._contents["model"][0].archive.root if is_loop else None
        framework = detect_framework(root)
        step = values.get(("step",), values.get(("global_step",)))
        return RunFacts(
            world_size=world_size,
            step=step if type(step) is int else framework.step,
            writer=framework.name or _WRITERS[self._files.writer],
            version=framework.version,
            mesh=() if largest is None else tuple(zip(names, largest.sizes, strict=True)),
            notes=tuple(notes),
            warnings=describe_objects(
                {p: v for p, v in values.items() if is_object(v) or is_holder(v, _TENSORS)}
            ),
        )


def _differing(entry: TensorEntry, tensor: AssembledTensor, ranks: tuple[int, int]) -> Problem:
    what = "as a plain tensor" if tensor.is_plain else "of the same elements"
    return Problem(
        FormatError.code,
        entry.key,
        f"ranks {ranks[0]} and {ranks[1]} hold different values {what}, so that they are no"
        " replicas; slices that are not marked as such are not modelled",
    )


def _unproven(entry: TensorEntry, ranks: tuple[int, int]) -> Problem:
    return Problem(
        FormatError.code,
        entry.key,
        f"nothing proves that ranks {ranks[0]} and {ranks[1]} hold the same plain tensor: they are"
        " different views, or have no checksums; if every rank has the whole of it, give the file"
        " of one rank, in a folder of its own",
    )


_WITHOUT_WEIGHTS = re.compile(
    r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt|optimizer(_\d+)?_rank\d+\.bin"
)


class ForeignReader(FormatReader):
    """Recognises and refuses files that ranks wrote next to their weights, without the weights."""

    name = "foreign"
    order = 70  # its files are kept from the others, which would misread them
    endings = r"rank_?\d+\.(?:pt|bin)"

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        own = [path for path in paths if _WITHOUT_WEIGHTS.fullmatch(posixpath.basename(path))]
        reason = "optimizer states and extra states of ranks, without their weights"
        return [
            Candidate(self.name, folder, tuple(files), reason)
            for folder, files in group_by_folder(own).items()
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:  # noqa: ARG002
        raise UnsupportedError(
            f"holds {candidate.reason}",
            hint="copy the ranks' files of weights beside them, such as"
            " 'model_world_size_2_rank_0.pt' or 'pytorch_model_fsdp_0_rank0.bin'",
        )
