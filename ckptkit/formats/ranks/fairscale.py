"""FairScale's FSDP: flat shards, and the `local_metadata_dict` that tells what they are made of.

Each rank has an equal part of each flat parameter, of which the metadata of the last ranks counts
padding at its end. The metadata lies beside the state in one file (fairseq's `shard_metadata`, a
tuple, or any other key), or in a file of its own.

Source: fairscale/nn/data_parallel/fully_sharded_data_parallel.py (`local_metadata_dict`,
`consolidate_shard_weights`), FairScale 0.4.13.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import KeyPath, Shape, TensorIndex
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import Document
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.ranks.contents import RankContents, Tensor
from ckptkit.formats.ranks.flat import FlatMember, FlatVector, unflattened
from ckptkit.formats.ranks.sharded_values import ShardedTensorRef, ShardRef, is_count

_UNITS, _BUFFERS = "param_metadata", "buffer_names"
_MODEL: KeyPath = ("model",)


@dataclass(frozen=True, slots=True)
class FairscaleShards:
    """What the ranks hold, with flat shards marked as what they are.

    Attributes:
        contents: Of the ranks.
        vectors: What the flat parameters are made of.
    """

    contents: list[RankContents]
    vectors: tuple[FlatVector, ...]

    def unflattened(self, index: TensorIndex, where: str) -> TensorIndex:
        """Puts the original parameters in the place of flat ones.

        Args:
            index: Made from the contents.
            where: The checkpoint, for messages.
        """
        names = {vector.name for vector in self.vectors}
        flat = [entry for entry in index.of_part("model") if entry.name in names]
        run = replace(index.run, writer=f"FairScale FSDP, {index.run.writer}")
        return unflattened(replace(index, run=run), flat, self.vectors, where)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A flat parameter as the metadata of one rank has it."""

    name: str
    members: tuple[tuple[str, Shape], ...]
    padding: int
    shared: tuple[tuple[str, str], ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.members)


def fairscale_shards(
    contents: Sequence[RankContents], beside: Sequence[RankContents], where: str
) -> FairscaleShards | None:
    """Finds the flat shards of FairScale among what the ranks hold.

    Args:
        contents: The files with tensors, by rank.
        beside: Files with metadata alone, by rank.
        where: The checkpoint, for messages.

    Returns:
        The shards, or None where no file has FairScale's metadata.
    """
    documents = {one.file.rank: found for one in beside if (found := _metadata(one))}
    documents |= {one.file.rank: found for one in contents if (found := _metadata(one))}
    if not documents:
        return None
    missing = [one.file.rank for one in contents if one.file.rank not in documents]
    if missing:
        raise MissingFileError(f"the metadata of rank {missing[0]} is not there", where=where)
    flats = [_flats(documents[one.file.rank]) for one in contents]
    for one, own in zip(contents, flats, strict=True):
        if [(f.name, f.members) for f in own] != [(f.name, f.members) for f in flats[0]]:
            raise FormatError(
                f"has other metadata than rank {contents[0].file.rank}",
                where=one.archive.where,
                hint="files of two saves lie together; take away those of one",
            )
    container = _container(contents[0], flats[0])
    marked = _marked(contents, flats, container)
    vectors = tuple(_vector(flat, contents[0], container) for flat in flats[0])
    return FairscaleShards(marked, vectors)


def _metadata(one: RankContents) -> Document | None:
    """Finds the metadata in a file: the file itself, or what lies at its top."""
    root = one.archive.root
    inside = root.values() if isinstance(root, dict) else root if isinstance(root, tuple) else ()
    for value in (root, *inside):
        if isinstance(value, dict) and _UNITS in value and _BUFFERS in value:
            return Document(value, f"{one.archive.where}, metadata of FairScale")
    return None


def _flats(document: Document) -> list[_Flat]:
    found = []
    for unit in document.inner_list(_UNITS):
        if unit.values.get("no_broadcast_optim_state"):
            raise UnsupportedError(
                "ranks have experts of their own, which is not modelled", where=unit.where
            )
        path = unit.text("fsdp_path")
        shared = tuple(_pair(unit, path, pair) for pair in unit.sequence("shared_param_info"))
        parameters = unit.inner("params")
        for name in parameters.values:
            if not isinstance(name, str):
                raise parameters.error("names a parameter by something that is not a text")
            found.append(_flat(parameters.inner(name), path, name, shared))
    if len({flat.name for flat in found}) < len(found):
        raise document.error("names a flat parameter twice")
    return found


def _pair(unit: Document, path: str, pair: object) -> tuple[str, str]:
    match pair:
        case (str(source), str(target)) | [str(source), str(target)]:
            return _below(path, source), _below(path, target)
    raise unit.error("'shared_param_info' is not made of pairs of names")


def _flat(held: Document, path: str, name: str, shared: tuple[tuple[str, str], ...]) -> _Flat:
    names, shapes, numels = (held.sequence(key) for key in ("names", "shapes", "numels"))
    padding = held.count("padding") or 0
    members = []
    for member, shape, numel in zip(names, shapes, numels, strict=False):
        whole = isinstance(shape, (tuple, list)) and all(map(is_count, shape))
        if not isinstance(member, str) or not whole or math.prod(shape) != numel:
            raise held.error("does not describe the parameters in it")
        members.append((_below(path, member), tuple(shape)))
    if not len(names) == len(shapes) == len(numels):
        raise held.error("does not describe the parameters in it")
    return _Flat(_below(path, name), tuple(members), padding, shared)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _container(first: RankContents, flats: Sequence[_Flat]) -> KeyPath:
    """Finds the state dict that has the flat parameters: the keys that lead to it."""
    names = {flat.name for flat in flats}
    held: dict[KeyPath, set[str]] = defaultdict(set)
    for path in first.tensors:
        held[path[:-1]].add(str(path[-1]))
    for container, inside in held.items():
        if names <= inside:
            return container
    fullest = max(held.values(), key=lambda inside: len(names & inside), default=set())
    missing = min(names - fullest)
    raise FormatError(f"has no flat parameter {shown(missing)}", where=first.archive.where)


def _marked(
    contents: Sequence[RankContents], flats: Sequence[Sequence[_Flat]], container: KeyPath
) -> list[RankContents]:
    """Says of each flat shard where it begins, and leaves its padding out."""
    starts: dict[str, int] = defaultdict(int)
    shards: list[dict[str, ShardRef]] = []
    for one, found in zip(contents, flats, strict=True):
        shards.append({})
        for flat in found:
            local = _local(one, (*container, flat.name), flat.padding)
            shards[-1][flat.name] = ShardRef(local, (starts[flat.name],))
            starts[flat.name] += local.shape[0]
    for flat in flats[0]:
        if starts[flat.name] != flat.elements:
            raise IncompleteCheckpointError(
                f"{shown(flat.name)} has {flat.elements:,} elements, of which the ranks hold"
                f" {starts[flat.name]:,}: sizes do not add up",
                where=contents[0].archive.where,
                hint="give the directory that holds the files of every rank, and of no other run",
            )
    return [
        replace(
            one,
            tensors=dict(_tensors(one, held, starts, container, len(contents))),
            values={p: v for p, v in one.values.items() if not {_UNITS, _BUFFERS} & {*p}},
        )
        for one, held in zip(contents, shards, strict=True)
    ]


def _local(one: RankContents, path: KeyPath, padding: int) -> TensorRef:
    tensor = one.tensors.get(path)
    name = shown(str(path[-1]))
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.row_major:
        raise FormatError(f"has no flat parameter {name}", where=one.archive.where)
    if padding > tensor.shape[0]:
        raise FormatError(
            f"{name} has {tensor.shape[0]:,} elements here, {padding:,} of them padding",
            where=one.archive.where,
        )
    return replace(tensor, shape=(tensor.shape[0] - padding,))


def _tensors(
    one: RankContents,
    shards: Mapping[str, ShardRef],
    lengths: Mapping[str, int],
    container: KeyPath,
    world_size: int,
) -> Iterator[tuple[KeyPath, Tensor]]:
    views = {shard.tensor.storage.key for shard in shards.values()}
    for path, tensor in one.tensors.items():
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
                ShardedTensorRef(held, shape, dtype, one.file.rank, world_size),
            )
        elif not _is_view(tensor, views):  # a view is a tied parameter, under its other name
            yield (*_MODEL, name), tensor


def _is_view(tensor: Tensor, storages: set[str]) -> bool:
    return isinstance(tensor, TensorRef) and tensor.storage.key in storages


def _vector(flat: _Flat, first: RankContents, container: KeyPath) -> FlatVector:
    at, members = 0, []
    for name, shape in flat.members:
        others = [target for source, target in flat.shared if source == name]
        if flat.name == name:  # not flattened: other names stand in the state dict themselves
            others += _tied(flat.name, first, container)
        members.append(FlatMember((name, *dict.fromkeys(others)), shape, at))
        at += math.prod(shape)
    return FlatVector(flat.name, at, tuple(members))


def _tied(name: str, first: RankContents, container: KeyPath) -> list[str]:
    own: Any = first.tensors[(*container, name)]
    return [
        str(path[-1])
        for path, tensor in first.tensors.items()
        if path[:-1] == container and path[-1] != name and _is_view(tensor, {own.storage.key})
    ]
