"""The states of the optimizer, which ZeRO keeps for the flat vectors that parameters lie in.

The optimizer that DeepSpeed wraps knows the vectors alone: what it keeps of a vector element by
element belongs to the parameters in it, at the same places; a single number belongs to each.

Source: deepspeed/runtime/zero/stage_1_and_2.py (`state_dict`, `_get_base_optimizer_state`),
deepspeed/runtime/zero/stage3.py (`_rigid_state_dict`), deepspeed/runtime/bf16_optimizer.py.

The weights of a DeepSpeed checkpoint: the live ones, and the optimizer's master copies.

The live weights are served as the model: up to stage 2 they are stored whole, in stage 3 they are
rounded from the optimizer's master copy, as DeepSpeed does after each step. The master copies are
served beside them, so that casts can be made from those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, LimitError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    KeyPath,
    Master,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import ArchiveTable, Document, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.zero.files import ZeroFile
from ckptkit.formats.zero.layout import Parameter, Run, chunks_of

OPTIMIZER = "optimizer"
_STATE = "state"
_STEP = "step"
_GROUPS = "param_groups"
_WHOLE = "base_optimizer_state"  # stages 1 and 2
_PARTITIONED = "optimizer_state_dict"  # stage 3
_MAX_KINDS = 64  # of states of one vector; each is met again for every parameter in it
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank's file keeps of the optimizer.

    Attributes:
        file: The file.
        vectors: The states of its vectors, by their position.
        groups: The parameter groups; none where the file does not tell.
    """

    file: ZeroFile
    vectors: Mapping[int, Document]
    groups: Sequence[Document]


def rank_states(file: ZeroFile, state: Document) -> RankStates:
    """Finds the optimizer's states in the file of a rank."""
    found = _rank_states(file, state)
    for vector in found.vectors.values():
        if len(vector.values) > _MAX_KINDS:
            raise LimitError(
                f"keeps {len(vector.values):,} kinds of states of one vector, more than"
                f" {_MAX_KINDS}",
                where=vector.where,
            )
    return found


def _rank_states(file: ZeroFile, state: Document) -> RankStates:
    elastic = state.values.get(_WHOLE)
    if isinstance(elastic, (list, tuple)):  # with `elastic_checkpoint`
        return RankStates(file, dict(enumerate(state.inner_list(_WHOLE))), ())
    base = state.inner(_WHOLE if _WHOLE in state.values else _PARTITIONED)
    held = base.inner(_STATE)
    vectors = {number: held.inner(number) for number in held.values if type(number) is int}
    return RankStates(file, vectors, base.inner_list(_GROUPS))


@dataclass(frozen=True, slots=True)
class States:
    """The optimizer's states as a whole: entries of an index, and what is no tensor."""

    entries: tuple[TensorEntry, ...]
    values: Mapping[KeyPath, Any]
    notes: tuple[str, ...]


def optimizer_states(
    table: ArchiveTable,
    ranks: Sequence[RankStates],
    parameters: Mapping[str, Parameter],
    names: Mapping[str, Fqn],
    groups: Sequence[Sequence[str]],
) -> States:
    """Gathers the states of every trained parameter under its name.

    Args:
        table: The files.
        ranks: What the ranks keep.
        parameters: The master copies of trained parameters, by name.
        names: What parameters are called in the index, by name.
        groups: The names of parameters, vector by vector.
    """
    _check_steps(ranks)
    maker = _Maker(table, {rank.file.name.path: rank for rank in ranks})
    for name, parameter in parameters.items():
        maker.add(names[name], parameter)
    values = dict(maker.values)
    if ranks:
        values |= group_values(ranks[0], [[names[n] for n in group] for group in groups])
    return States(tuple(maker.entries), values, tuple(maker.notes()))


def _check_steps(ranks: Sequence[RankStates]) -> None:
    """Refuses ranks whose vectors were stepped differently often: two saves are mixed.

    A step is a tensor of one number, whose checksum tells it as well as its bytes would.
    """
    seen: dict[int, tuple[object, str]] = {}
    for rank in ranks:
        for number, vector in rank.vectors.items():
            step = step_fingerprint(rank.file.archive, vector.values.get(_STEP))
            if step is None:
                continue
            before = seen.setdefault(number, (step, vector.where))
            if before[0] != step:
                raise FormatError(
                    f"was stepped another number of times than {before[1]}: the files are of two"
                    " saves",
                    where=vector.where,
                    hint="a save was cut short, or went into the folder of another one; take an"
                    " earlier checkpoint",
                )


def step_fingerprint(file: TorchArchive, value: object) -> object:
    """Returns what equal steps have in common, or None where nothing is known."""
    if isinstance(value, TensorRef):
        if value.shape != () or value.storage.elements != 1:
            return None
        crc32 = file.archive.extent(value.storage)[2]
        return None if crc32 is None else (value.dtype.name, crc32)
    return value if isinstance(value, (int, float)) else None


class _Maker:
    """Makes entries and values of one parameter after another.

    Attributes:
        entries: The tensors.
        values: The numbers, by path.
    """

    def __init__(self, table: ArchiveTable, ranks: Mapping[str, RankStates]) -> None:
        self.entries: list[TensorEntry] = []
        self.values: dict[KeyPath, Any] = {}
        self._table = table
        self._ranks = ranks
        self._odd: dict[str, str] = {}  # kinds that are not kept, and an example

    def add(self, name: Fqn, parameter: Parameter) -> None:
        """Adds what is kept of a parameter."""
        states = [self._state(run) for run in parameter.runs]
        kinds = [set(state.values) for state in states]
        if any(found != kinds[0] for found in kinds):
            odd = next(s for s, found in zip(states, kinds, strict=True) if found != kinds[0])
            raise odd.error(f"does not keep of {shown(name)} what other ranks keep")
        for kind in states[0].values if states else ():
            self._add(name, str(kind), parameter, [state.values[kind] for state in states])

    def notes(self) -> Iterator[str]:
        """Tells what could not be given to parameters."""
        for kind, name in self._odd.items():
            yield (
                f"the optimizer keeps {kind!r} of each rank's own part of {name!r} and others,"
                " which means nothing for the whole: it is left out"
            )

    def _state(self, run: Run) -> Document:
        rank = self._ranks[run.file.name.path]
        return rank.vectors.get(run.group) or Document({}, rank.file.content.where)

    def _add(self, name: Fqn, kind: str, parameter: Parameter, found: Sequence[object]) -> None:
        path = (OPTIMIZER, _STATE, name, kind)
        first = found[0]
        if isinstance(first, TensorRef) and first.shape == ():
            self.entries.append(self._number(path, parameter.runs[0].file, first))
        elif all(map(_holds, found, parameter.runs)):
            self.entries.append(self._spread(path, parameter, found))
        elif isinstance(first, _PLAIN):
            self.values[path] = first
        else:
            self._odd.setdefault(kind, name)

    def _number(self, path: KeyPath, file: ZeroFile, tensor: TensorRef) -> TensorEntry:
        at = tensor.storage_offset * tensor.dtype.itemsize
        record = self._table.record(file.archive, tensor)
        chunk = Chunk(Box((), ()), record, byte_offset=at, rank=file.name.rank)
        return state_entry(path, tensor, (), ChunkTable.of([chunk], 0))

    def _spread(self, path: KeyPath, parameter: Parameter, found: Sequence[object]) -> TensorEntry:
        tensors = [tensor for tensor in found if isinstance(tensor, TensorRef)]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            where = parameter.runs[0].file.content.where
            raise FormatError(f"{shown(str(path[-1]))} has several element types", where=where)
        runs = tuple(
            replace(run, tensor=tensor) for run, tensor in zip(parameter.runs, tensors, strict=True)
        )
        whole = replace(parameter, dtype=dtypes.pop(), runs=runs)
        return state_entry(path, tensors[0], parameter.shape, chunks_of(self._table, whole))


def state_entry(path: KeyPath, like: TensorRef, shape: Shape, chunks: ChunkTable) -> TensorEntry:
    """Makes the entry of a tensor that an optimizer keeps.

    Args:
        path: `optimizer`, `state`, the parameter's name, and what is kept.
        like: A tensor of its element type.
        shape: Its whole shape.
        chunks: Where its elements lie.
    """
    return TensorEntry(
        key=Key(".".join(map(str, path))),
        key_path=path,
        name=Fqn(".".join(map(str, path[1:]))),
        tree=OPTIMIZER,
        part="optimizer",
        dtype=like.dtype,
        shape=shape,
        chunks=chunks,
    )


def _holds(tensor: object, run: Run) -> bool:
    """Tells whether a tensor has something for each element of the vector that a run is of."""
    return (
        isinstance(tensor, TensorRef)
        and tensor.dtype.kind
        == "float"  # codes of a quantised state mean nothing without their scales
        and len(tensor.shape) == 1
        and tensor.row_major
        and tensor.shape[0] >= max(run.tensor.shape[0], run.first + run.count)
    )


def group_values(rank: RankStates, groups: Sequence[Sequence[Fqn]]) -> dict[KeyPath, Any]:
    """Returns the settings of groups, with the names of parameters in place of vectors."""
    _check_unfolded(rank)
    values: dict[KeyPath, Any] = {}
    seen: set[int] = set()
    for number, group in enumerate(rank.groups):
        for key, value in group.values.items():
            if key == "params" or not isinstance(key, str):
                continue
            values[OPTIMIZER, _GROUPS, number, key] = value
        members: list[Fqn] = []
        for vector in group.sequence("params"):
            if type(vector) is not int or not 0 <= vector < len(groups):
                continue
            if vector in seen:
                raise group.error(f"has vector {vector}, which is in two groups")
            seen.add(vector)
            members += groups[vector]
        values[OPTIMIZER, _GROUPS, number, "params"] = members
    return values


def _check_unfolded(rank: RankStates) -> None:
    """Refuses groups that are few bytes, shared over and over: none has a setting without one."""
    limit = rank.file.archive.pickle_bytes
    met = 0
    for group in rank.groups:
        met += len(group.values) + len(group.sequence("params"))
        if met > limit:
            raise LimitError(
                f"groups of the optimizer unfold into more than {limit:,} values",
                where=rank.file.archive.where,
            )


MODULE = "module"
_MASTERS = "fp32"  # the state dict of the master copies


class Saved(Protocol):
    """What the files of one save hold."""

    @property
    def models(self) -> Sequence[ZeroFile]:
        """The files of weights: of each rank where weights are spread over ranks, else one."""
        ...

    @property
    def first(self) -> Document:
        """What the first file of weights holds."""
        ...

    @property
    def is_partitioned(self) -> bool:
        """Whether the weights themselves are spread over ranks, as in stage 3."""
        ...

    def masters(self) -> Mapping[str, Parameter]:
        """Returns the master copies of trained parameters, by name."""
        ...

    def frozen(self) -> Mapping[str, Parameter]:
        """Returns the frozen parameters that are spread over ranks, by name."""
        ...

    def shared(self) -> Mapping[str, str]:
        """Returns the names under which others' parameters are known besides, with the others."""
        ...


class Weights:
    """The weights of a save as entries of an index, with their master copies.

    Args:
        table: The opened files.
        contents: What they hold.
        where: Their folder, for messages.

    Attributes:
        entries: The live tensors, then the masters.
        values: What stands among the weights and is no tensor.
        called: What the parameters are called in the index, by the names of their module.
        masters: The master copies of trained parameters, by name.
        aliases: Groups of keys that share one storage.

    Raises:
        FormatError: If the files contradict each other.
        IncompleteCheckpointError: If a weight is nowhere.
    """

    def __init__(self, table: ArchiveTable, contents: Saved, where: str) -> None:
        self._table = table
        self._contents = contents
        self.masters = contents.masters()
        self._frozen = contents.frozen()
        self._shared = contents.shared()
        self.values: dict[KeyPath, Any] = {}
        module = contents.first.inner(MODULE)
        names = []
        for name, value in module.values.items():
            if isinstance(value, TensorRef) and isinstance(name, str):
                names.append(name)
            else:
                self.values[MODULE, str(name)] = value
        for name in self.masters:
            if name not in module.values:
                raise module.error(f"holds no {shown(name)}, of which there is a master copy")
        places = classify([(MODULE, name) for name in names], where=where)
        live, masters = [], []
        for name, place in zip(names, places, strict=True):
            entry, master = self._entry(name, module.tensor(name), place)
            live.append(entry)
            masters += [] if master is None else [master]
        self.called = {name: place.name for name, place in zip(names, places, strict=True)}
        self.entries = (*live, *masters)
        self.aliases = self._aliases()

    def _entry(
        self, name: str, tensor: TensorRef, place: Membership
    ) -> tuple[TensorEntry, TensorEntry | None]:
        """Makes the live tensor of a name, and its master copy if that has another type."""
        entry = self._live(name, tensor, place)
        parameter = self.masters.get(self._shared.get(name, name))
        if parameter is None:
            return entry, None
        if parameter.shape != entry.shape:
            raise self._contents.first.error(
                f"{shown(name)} has shape {list(entry.shape)}, its master copy"
                f" {list(parameter.shape)}"
            )
        if parameter.dtype == entry.dtype:
            return entry, None
        key = Key(f"{_MASTERS}.{name}")
        master = replace(
            entry,
            key=key,
            key_path=(_MASTERS, name),
            tree=_MASTERS,
            part="other",
            dtype=parameter.dtype,
            chunks=chunks_of(self._table, parameter),
            rounded_from=None,
        )
        return replace(entry, master=Master(key, parameter.dtype)), master

    def _live(self, name: str, tensor: TensorRef, place: Membership) -> TensorEntry:
        """Makes the live tensor; in stage 3 one that is spread is stored as an empty one."""
        owner = self._shared.get(name, name)
        parameter = self._frozen.get(owner) or self.masters.get(owner)
        is_spread = self._contents.is_partitioned and parameter is not None
        entry = TensorEntry(
            key=Key(f"{MODULE}.{name}"),
            key_path=(MODULE, name),
            name=place.name,
            tree=place.tree,
            part=place.part,
            dtype=tensor.dtype,
            shape=tensor.shape,
            chunks=self._whole(tensor),
        )
        if not is_spread or parameter is None:
            if self._is_placeholder(name, tensor):
                raise IncompleteCheckpointError(
                    f"weight {shown(name)} is empty here, and no rank has a part of it",
                    where=self._contents.first.where,
                )
            return entry
        chunks = chunks_of(self._table, parameter)
        if owner in self._frozen or parameter.dtype == tensor.dtype:
            return replace(entry, dtype=parameter.dtype, shape=parameter.shape, chunks=chunks)
        return replace(entry, shape=parameter.shape, chunks=chunks, rounded_from=parameter.dtype)

    def _is_placeholder(self, name: str, tensor: TensorRef) -> bool:
        buffers = self._contents.first.sequence("buffer_names")
        return self._contents.is_partitioned and tensor.shape == (0,) and name not in buffers

    def _whole(self, tensor: TensorRef) -> ChunkTable:
        chunk = Chunk(
            Box((0,) * len(tensor.shape), tensor.shape),
            self._table.record(self._contents.models[0].archive, tensor),
            byte_offset=tensor.storage_offset * tensor.dtype.itemsize,
            strides=None if tensor.row_major else tensor.strides,
            rank=0,
        )
        return ChunkTable.of([chunk], len(tensor.shape))

    def _aliases(self) -> tuple[frozenset[Key], ...]:
        """Groups the names of tied weights; empty tensors are not told apart by DeepSpeed."""
        filled = {entry.key for entry in self.entries if entry.elements}
        groups: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self._shared.items():
            keys = Key(f"{MODULE}.{name}"), Key(f"{MODULE}.{owner}")
            if all(key in filled for key in keys):
                groups[keys[1]] |= {*keys}
        return tuple(frozenset(keys) for keys in groups.values())


def index_of(
    name: str, table: ArchiveTable, weights: Weights, states: States, run: RunFacts
) -> TensorIndex:
    """Makes the index of weights and of the states of their optimizer.

    Args:
        name: Of the format.
        table: The opened files.
        weights: The weights.
        states: What the optimizer keeps.
        run: What is known of the run.
    """
    return TensorIndex(
        format=name,
        files=tuple(table.files),
        tensors={entry.key: entry for entry in (*weights.entries, *states.entries)},
        records=RecordTable.of(table.records),
        values={**weights.values, **states.values},
        aliases=weights.aliases,
        run=run,
    )
