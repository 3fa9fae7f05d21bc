"""FairScale's FSDP: flat shards, and the `local_metadata_dict` with the parameters in them.

Each rank has an equal part of each flat parameter; the metadata has the number of padded elements
at the end of the part. The metadata is in the file of the state (fairseq's `shard_metadata`, a
tuple, or any other key), or in a file of its own.

Source: fairscale/nn/data_parallel/fully_sharded_data_parallel.py (`local_metadata_dict`,
`consolidate_shard_weights`), FairScale 0.4.13.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import KeyPath, Shape, TensorIndex
from ckptkit.core.text import quote
from ckptkit.formats.parsing import is_count
from ckptkit.formats.pickle.torch_archives import PickledDict
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.flat import FlatMember, FlatVector, unflatten
from ckptkit.formats.ranks.rank_files import RankContents, RankTensor
from ckptkit.formats.ranks.sharded_values import ShardedTensorRef, ShardRef

_UNITS, _BUFFERS = "param_metadata", "buffer_names"
_MODEL: KeyPath = ("model",)


class FairscaleShards(Struct, frozen=True):
    """The contents of the ranks' files, with flat shards as ShardedTensors."""

    contents: list[RankContents]
    vectors: tuple[FlatVector, ...]

    def unflatten(self, index: TensorIndex, where: str) -> TensorIndex:
        """Replaces the flat parameters in the index of the contents by the original ones."""
        names = {vector.name for vector in self.vectors}
        flat = [entry for entry in index.of_part("model") if entry.name in names]
        run = replace(index.run, writer=f"FairScale FSDP, {index.run.writer}")
        return unflatten(replace(index, run=run), flat, self.vectors, where)


class _FlatShard(Struct, frozen=True):
    """A flat parameter in the metadata of one rank."""

    name: str
    members: tuple[tuple[str, Shape], ...]
    padding: int
    shared: tuple[tuple[str, str], ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.members)


def find_fairscale_shards(
    contents: Sequence[RankContents], metadata: Sequence[RankContents], where: str
) -> FairscaleShards | None:
    """Finds the flat shards of FairScale in the files of ranks."""
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
        return None
    missing = [held.file.rank for held in contents if held.file.rank not in by_rank]
    if missing:
        raise MissingFileError(f"the metadata of rank {missing[0]} is not there", where=where)
    shards = [_parse_metadata(by_rank[held.file.rank]) for held in contents]
    for held, own in zip(contents, shards, strict=True):
        if [(s.name, s.members) for s in own] != [(s.name, s.members) for s in shards[0]]:
            raise FormatError(
                f"has other metadata than rank {contents[0].file.rank}",
                where=held.archive.where,
                hint="files of two saves are in one folder; take away those of one",
            )
    container = _find_container(contents[0], shards[0])
    marked = _mark_shards(contents, shards, container)
    vectors = tuple(_vector(shard, contents[0], container) for shard in shards[0])
    return FairscaleShards(marked, vectors)


def _parse_metadata(document: PickledDict) -> list[_FlatShard]:
    shards = []
    for unit in document.inner_list(_UNITS):
        if unit.values.get("no_broadcast_optim_state"):
            raise UnsupportedError(
                "ranks have experts of their own, which is not modelled", where=unit.where
            )
        path = unit.text("fsdp_path")
        shared = []
        for pair in unit.sequence("shared_param_info"):
            match pair:
                case (str(source), str(target)) | [str(source), str(target)]:
                    shared.append((_below(path, source), _below(path, target)))
                case _:
                    raise unit.error("'shared_param_info' does not consist of pairs of names")
        parameters = unit.inner("params")
        for name in parameters.values:
            if not isinstance(name, str):
                raise parameters.error("names a parameter by something that is not a text")
            shards.append(_parse_shard(parameters.inner(name), path, name, tuple(shared)))
    if len({shard.name for shard in shards}) < len(shards):
        raise document.error("names a flat parameter twice")
    return shards


def _parse_shard(
    fields: PickledDict, path: str, name: str, shared: tuple[tuple[str, str], ...]
) -> _FlatShard:
    names, shapes, numels = (fields.sequence(key) for key in ("names", "shapes", "numels"))
    padding = fields.count("padding") or 0
    members = []
    for member, shape, numel in zip(names, shapes, numels, strict=False):
        whole = isinstance(shape, (tuple, list)) and all(map(is_count, shape))
        if not isinstance(member, str) or not whole or math.prod(shape) != numel:
            raise fields.error("does not describe the parameters in it")
        members.append((_below(path, member), tuple(shape)))
    if not len(names) == len(shapes) == len(numels):
        raise fields.error("does not describe the parameters in it")
    return _FlatShard(_below(path, name), tuple(members), padding, shared)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _find_container(first: RankContents, shards: Sequence[_FlatShard]) -> KeyPath:
    """Returns the path of the state dict with the flat parameters."""
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
    starts: dict[str, int] = defaultdict(int)
    refs: list[dict[str, ShardRef]] = []
    for held, own in zip(contents, shards, strict=True):
        refs.append({})
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
            refs[-1][shard.name] = ShardRef(local, (starts[shard.name],))
            starts[shard.name] += count
    for shard in shards[0]:
        if starts[shard.name] != shard.elements:
            raise IncompleteCheckpointError(
                f"{quote(shard.name)} has {shard.elements:,} elements, and the ranks hold"
                f" {starts[shard.name]:,}: sizes do not add up",
                where=contents[0].archive.where,
                hint="give the directory that holds the files of every rank, and of no other run",
            )
    return [
        replace(
            held,
            tensors=dict(_tensors(held, own, starts, container, len(contents))),
            values={p: v for p, v in held.values.items() if not {_UNITS, _BUFFERS} & {*p}},
        )
        for held, own in zip(contents, refs, strict=True)
    ]


def _tensors(
    contents: RankContents,
    shards: Mapping[str, ShardRef],
    lengths: Mapping[str, int],
    container: KeyPath,
    world_size: int,
) -> Iterator[tuple[KeyPath, RankTensor]]:
    views = {shard.tensor.storage.key for shard in shards.values()}
    for path, tensor in contents.tensors.items():
        if path[:-1] != container:
            yield path, tensor
            continue
        name = str(path[-1])
        shard = shards.get(name)
        if shard is not None:
            shape = (lengths[name],)
            held = (shard,) if shard.tensor.shape[0] else ()
            dtype = shard.tensor.dtype
            yield (
                (*_MODEL, name),
                ShardedTensorRef(held, shape, dtype, contents.file.rank, world_size),
            )
        elif not _is_view(tensor, views):  # a view is a tied parameter, under its other name
            yield (*_MODEL, name), tensor


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
