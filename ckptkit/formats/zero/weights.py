"""The weights of a DeepSpeed checkpoint: the live ones, and the optimizer's master copies.

The live weights are the model. Up to stage 2 they are stored whole; in stage 3 they are rounded
from the optimizer's master copies, as DeepSpeed does after each step. The master copies are tensors
of the index too, so that casts can start from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.core.index import (
    ChunkTable,
    Key,
    KeyPath,
    Master,
    RecordTable,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import quote
from ckptkit.formats.file_sets import MIXED_SAVES, refuse_mixed_sizes
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import Membership, classify
from ckptkit.formats.zero.flat_vectors import (
    FlatParameter,
    find_frozen,
    find_partitioned,
    find_sliced,
    make_chunks,
    read_partition_counts,
)
from ckptkit.formats.zero.states import ZeroStates
from ckptkit.formats.zero.tag_files import (
    MODULE,
    ZeroFile,
    check_ranks,
    check_same_run,
    read_parameter_groups,
    read_shared_parameters,
    refuse_parallelism,
    unsupported_part_error,
)

_MASTERS = "fp32"  # the state dict of the master copies
_STATES = "optimizer_state_dict"
_PARTITIONED_STAGE = 3


@dataclass(slots=True)
class DeepSpeedSave(ABC):
    """The files of one save.

    Attributes:
        models: The files of weights: of each rank in stage 3, else one.
        where: The folder, for messages.
    """

    models: Sequence[ZeroFile]
    where: str

    @abstractmethod
    def masters(self) -> Mapping[str, FlatParameter]:
        """Returns the master copies of trained parameters, by name."""

    @property
    def is_partitioned(self) -> bool:
        """Whether the weights themselves are partitioned, as in stage 3."""
        return self.models[0].info.rank is not None

    @property
    def first(self) -> PickledDict:
        """The contents of the first file of weights."""
        return self.models[0].content

    def groups(self) -> list[dict[str, Shape]]:
        return read_parameter_groups(self.first)

    def frozen(self) -> Mapping[str, FlatParameter]:
        """Returns the frozen parameters that are partitioned, by name."""
        return find_frozen(self.models) if self.is_partitioned else {}

    def run_facts(self, stage: int | None, notes: Sequence[str], tool: str = "") -> RunFacts:
        version = self.first.text("ds_version")
        parts = [f"DeepSpeed {version}".strip()]
        parts += [f"ZeRO stage {stage}"] if stage is not None else []
        return RunFacts(
            world_size=self.first.count("dp_world_size"),
            step=self.first.count("global_steps"),
            writer=", ".join([*parts, *([tool] if tool else [])]),
            version=version,
            notes=tuple(notes),
        )


@dataclass(slots=True)
class ZeroSave(DeepSpeedSave):
    """The files that DeepSpeed itself wrote.

    Attributes:
        ranks: The files of optimizer states, by rank; none if there are none.
    """

    ranks: Sequence[ZeroFile]

    @property
    def states(self) -> list[PickledDict]:
        return [file.content.inner(_STATES) for file in self.ranks]

    def check(self) -> None:
        """Checks that the files of all ranks are there, and that all are of one save."""
        refuse_parallelism(self.models, self.where)
        for file, state in zip(self.ranks, self.states, strict=True):
            if state.values.get("ds_zero_partition_groups"):
                raise unsupported_part_error("expert groups", file.info.path, self.where)
        world_size = self._world_size()
        if self.is_partitioned:
            check_ranks(self.models, world_size, "weights", self.where)
        if self.ranks or self.is_partitioned:
            check_ranks(self.ranks, world_size, "optimizer states", self.where)
        check_same_run(self.models, self.where)
        stages = {state.count("zero_stage") for state in self.states}
        if stages and (len(stages) > 1 or (_PARTITIONED_STAGE in stages) != self.is_partitioned):
            raise FormatError(
                f"optimizer states are of stage {' and '.join(map(str, stages))}, and the weights"
                " of another",
                where=self.where,
                hint=MIXED_SAVES,
            )

    def _world_size(self) -> int:
        counts = {count for state in self.states for count in read_partition_counts(state)}
        recorded = self.first.count("dp_world_size")
        if self.ranks and recorded is not None:
            counts.add(recorded)
        refuse_mixed_sizes(
            counts,
            self.where,
            hint="files of a run of another size, or of expert groups, are among them; take away"
            " those that do not belong here",
        )
        return counts.pop() if counts else recorded or 1

    def facts(self, notes: Sequence[str]) -> RunFacts:
        """Returns what is known of the run, with further notes."""
        notes = [*notes]
        if not self.ranks and self.first.values.get("optimizer"):
            notes.append(
                "without ZeRO, DeepSpeed keeps optimizer states and master copies by number:"
                " nothing proves which parameter has which, and they are left out"
            )
        elif not self.ranks:
            notes.append("there are no optimizer states, and so no master copies")
        return self.run_facts(self.states[0].count("zero_stage") if self.ranks else None, notes)

    def masters(self) -> Mapping[str, FlatParameter]:
        if not self.ranks:
            return {}
        pairs = list(zip(self.ranks, self.states, strict=True))
        find = find_partitioned if self.is_partitioned else find_sliced
        return find(self.groups(), pairs)


class WeightEntries:
    """The weights of a save as entries of an index, with their master copies.

    Args:
        table: The opened files.
        save: Their contents.

    Attributes:
        entries: The live tensors, then the masters.
        values: The values of the module's state dict that are not tensors.
        names: The names of parameters in the index, by their names in the module.
        masters: The master copies of trained parameters, by name.
        aliases: Groups of keys that share one storage.

    Raises:
        FormatError: If the files contradict each other.
        IncompleteCheckpointError: If a weight is in no file.
    """

    def __init__(self, table: ArchiveTable, save: DeepSpeedSave) -> None:
        self._table = table
        self._save = save
        self.masters = save.masters()
        self._frozen = save.frozen()
        self._shared = read_shared_parameters(save.first)
        self.values: dict[KeyPath, Any] = {}
        module = save.first.inner(MODULE)
        names = []
        for name, value in module.values.items():
            if isinstance(value, TensorRef) and isinstance(name, str):
                names.append(name)
            else:
                self.values[MODULE, str(name)] = value
        for name in self.masters:
            if name not in module.values:
                raise module.error(f"holds no {quote(name)}, of which there is a master copy")
        memberships = classify([(MODULE, name) for name in names], where=save.where)
        live, masters = [], []
        for name, membership in zip(names, memberships, strict=True):
            entry, master = self._entry(name, module.tensor(name), membership)
            live.append(entry)
            masters += [] if master is None else [master]
        self.names = {name: m.name for name, m in zip(names, memberships, strict=True)}
        self.entries = (*live, *masters)
        self.aliases = self._aliases()

    def _entry(
        self, name: str, tensor: TensorRef, membership: Membership
    ) -> tuple[TensorEntry, TensorEntry | None]:
        """Returns the live tensor of a name, and its master copy if that has another type."""
        entry = self._live_entry(name, tensor, membership)
        parameter = self.masters.get(self._shared.get(name, name))
        if parameter is None:
            return entry, None
        if parameter.shape != entry.shape:
            raise self._save.first.error(
                f"{quote(name)} has shape {list(entry.shape)}, its master copy"
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
            chunks=make_chunks(self._table, parameter),
            rounded_from=None,
        )
        return replace(entry, master=Master(key, parameter.dtype)), master

    def _live_entry(self, name: str, tensor: TensorRef, membership: Membership) -> TensorEntry:
        """Returns the live tensor; a tensor that stage 3 partitions is stored as an empty one."""
        owner = self._shared.get(name, name)
        parameter = self._frozen.get(owner) or self.masters.get(owner)
        chunk = self._table.chunk(self._save.models[0].archive, tensor, rank=0)
        table = ChunkTable.of([chunk], len(tensor.shape))
        entry = membership.entry((MODULE, name), tensor.dtype, tensor.shape, table)
        if not self._save.is_partitioned or parameter is None:
            buffers = self._save.first.sequence("buffer_names")
            if self._save.is_partitioned and tensor.shape == (0,) and name not in buffers:
                raise IncompleteCheckpointError(
                    f"weight {quote(name)} is empty here, and no rank has a part of it",
                    where=self._save.first.where,
                )
            return entry
        chunks = make_chunks(self._table, parameter)
        if owner in self._frozen or parameter.dtype == tensor.dtype:
            return replace(entry, dtype=parameter.dtype, shape=parameter.shape, chunks=chunks)
        return replace(entry, shape=parameter.shape, chunks=chunks, rounded_from=parameter.dtype)

    def _aliases(self) -> tuple[frozenset[Key], ...]:
        """Groups the keys of tied weights; DeepSpeed does not distinguish empty tensors."""
        filled = {entry.key for entry in self.entries if entry.elements}
        groups: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self._shared.items():
            keys = Key(f"{MODULE}.{name}"), Key(f"{MODULE}.{owner}")
            if all(key in filled for key in keys):
                groups[keys[1]] |= {*keys}
        return tuple(frozenset(keys) for keys in groups.values())


def make_index(
    name: str, table: ArchiveTable, weights: WeightEntries, states: ZeroStates, run: RunFacts
) -> TensorIndex:
    """Returns the index of weights and of their optimizer's states.

    Args:
        name: The format.
        table: The opened files.
        weights: The weights.
        states: The states.
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
