"""A save of DeepSpeed, by DeepSpeed itself or converted to a universal checkpoint: checks, weights.

The live weights are the model. Up to stage 2 they are stored whole; in stage 3 they are rounded
from the optimizer's master copies, as DeepSpeed does after each step. The master copies are tensors
of the index too, so that casts can start from them.
"""

from __future__ import annotations

import math
import posixpath
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import (
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
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MIXED_SAVES, refuse_mixed_sizes
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.objects import find_unread, whole_object_error
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import Membership, classify, describe_objects_in
from ckptkit.formats.zero.flat_vectors import (
    OPTIMIZER,
    FlatParameter,
    RankStates,
    VectorSlice,
    ZeroStates,
    collect_group_values,
    find_frozen,
    find_partitioned,
    find_rank_states,
    find_sliced,
    fingerprint_step,
    make_chunks,
    make_state_entry,
    read_partition_counts,
)
from ckptkit.formats.zero.tag_files import (
    MODULE,
    TagFile,
    ZeroFile,
    check_experts,
    check_ranks,
    check_same_run,
    open_zero_archive,
    open_zero_file,
    parse_universal_path,
    read_parameter_groups,
    read_shared_parameters,
    refuse_parallelism,
    sort_tag_files,
    unsupported_part_error,
)
from ckptkit.storage.base import Source

_MASTERS = "fp32"  # the state dict of the master copies
_STATES = "optimizer_state_dict"
_PARTITIONED_STAGE = 3


@dataclass(slots=True)
class DeepSpeedSave(ABC):
    """The files of one save."""

    models: Sequence[ZeroFile]  # of each rank in stage 3, else one
    where: str
    experts: Sequence[ZeroFile] = field(default=(), kw_only=True)  # all of the model's

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
            warnings=describe_objects_in(self.models[0].archive),
        )


@dataclass(slots=True)
class ZeroSave(DeepSpeedSave):
    """The files that DeepSpeed itself wrote."""

    ranks: Sequence[ZeroFile]  # the files of optimizer states, by rank

    @property
    def states(self) -> list[PickledDict]:
        return [file.content.inner(_STATES) for file in self.ranks]

    def check(self) -> None:
        """Checks that the files of all ranks are there, and that all are of one save."""
        refuse_parallelism(self.models, self.where)
        check_experts(self.first, [file.info for file in self.experts], self.where)
        if self.experts and self.is_partitioned:
            raise unsupported_part_error(
                "experts beside weights of ZeRO 3", self.experts[0].info.path, self.where
            )
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
        if self.experts:
            notes.append(
                "optimizer states are left alone, and so are master copies: those of experts are in"
                " groups of ranks, under numbers of each group"
            )
        elif not self.ranks and self.first.values.get("optimizer"):
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
    """The weights of a save as entries of an index, with their master copies."""

    def __init__(self, table: ArchiveTable, save: DeepSpeedSave) -> None:
        self._table = table
        self._save = save
        self.masters = save.masters()
        self._frozen = save.frozen()
        self._shared = read_shared_parameters(save.first)
        self.values: dict[KeyPath, Any] = {}  # of the module's state dict that are not tensors
        module = save.first.inner(MODULE)
        whole = save.first.values.get(MODULE)
        if isinstance(whole, InertObject):
            raise whole_object_error(whole, module.where)
        stored: dict[str, tuple[ZeroFile, TensorRef]] = {}
        for name, value in module.values.items():
            if isinstance(value, TensorRef) and isinstance(name, str):
                stored[name] = save.models[0], value
            elif (unread := find_unread(value)) is not None:
                raise unread.error(f"{module.where}, {quote(str(name))}")
            else:
                self.values[MODULE, str(name)] = value
        layers: dict[int, dict[str, Shape]] = {}
        for file in save.experts:
            tensors = _find_expert(file, stored, layers)
            stored |= {name: (file, tensor) for name, tensor in tensors.items()}
        names = list(stored)
        for name in self.masters:
            if name not in module.values:
                raise module.error(f"holds a master copy of {quote(name)} but not the parameter")
        for group in read_parameter_groups(save.first):
            for name in group:
                if name not in stored and not _EXPERT.fullmatch(name):
                    raise module.error(f"trains {quote(name)}, which is in no file")
        memberships = classify([(MODULE, name) for name in names], where=save.where)
        live, masters = [], []
        for name, membership in zip(names, memberships, strict=True):
            entry, master = self._entry(name, *stored[name], membership)
            live.append(entry)
            masters += [] if master is None else [master]
        # in the index, by the names in the module
        self.names = {name: m.name for name, m in zip(names, memberships, strict=True)}
        self.entries = (*live, *masters)
        # DeepSpeed does not distinguish empty tensors, so that they are not known to be tied.
        filled = {entry.key for entry in self.entries if entry.elements}
        groups: dict[Key, set[Key]] = defaultdict(set)
        for name, owner in self._shared.items():
            keys = Key(f"{MODULE}.{name}"), Key(f"{MODULE}.{owner}")
            if filled.issuperset(keys):
                groups[keys[1]] |= {*keys}
        self.aliases = tuple(frozenset(keys) for keys in groups.values())

    def _entry(
        self, name: str, file: ZeroFile, tensor: TensorRef, membership: Membership
    ) -> tuple[TensorEntry, TensorEntry | None]:
        """Returns the live tensor of a name, and its master copy if that has another type."""
        entry = self._live_entry(name, file, tensor, membership)
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

    def _live_entry(
        self, name: str, file: ZeroFile, tensor: TensorRef, membership: Membership
    ) -> TensorEntry:
        """Returns the live tensor; a tensor that stage 3 partitions is stored as an empty one."""
        owner = self._shared.get(name, name)
        parameter = self._frozen.get(owner) or self.masters.get(owner)
        rank = 0 if file.info.expert is None else None
        chunk = self._table.chunk(file.archive, tensor, rank)
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


_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,7})\.(.+)")


def _find_expert(
    file: ZeroFile, known: Mapping[str, object], layers: dict[int, dict[str, Shape]]
) -> dict[str, TensorRef]:
    """Returns the tensors of an expert, whose names have its number among all of its layer.

    `layers` has the shapes of an expert of each layer, by names without the number; it is filled.
    """
    layer, number = file.info.expert or (0, 0)
    tensors, shapes = {}, {}
    for name, value in file.content.values.items():
        match = _EXPERT.fullmatch(name) if isinstance(name, str) else None
        if match is None or int(match[2]) != number or not isinstance(value, TensorRef):
            unread = find_unread(value)
            if unread is not None:
                raise unread.error(f"{file.content.where}, {quote(str(name))}")
            raise file.content.error(
                f"holds {quote(str(name))}, which is no tensor of expert {number}"
            )
        if name in known:
            raise file.content.error(f"holds {quote(name)}, which another file holds too")
        tensors[name] = value
        shapes[f"{match[1]}.{match[3]}"] = value.shape
    if layers.setdefault(layer, shapes) != shapes:
        raise file.content.error(f"has other tensors than the other experts of layer {layer}")
    return tensors


def make_index(
    name: str, table: ArchiveTable, weights: WeightEntries, states: ZeroStates, run: RunFacts
) -> TensorIndex:
    """Returns the index of weights and of their optimizer's states."""
    return TensorIndex(
        format=name,
        files=tuple(table.files),
        tensors={entry.key: entry for entry in (*weights.entries, *states.entries)},
        records=RecordTable.of(table.records),
        values={**weights.values, **states.values},
        aliases=weights.aliases,
        run=run,
    )


_MASTER = "fp32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_COMMON = "optimizer_state"
_TENSOR, _IS_VOCABULARY = "param", "vocab_tensor"
_PARTITIONED = "optimizer_state_dict"  # only stage 3 leaves this key in the common states


class ParameterFile(Struct, frozen=True):
    """The value in a file of a parameter."""

    file: TorchArchive
    value: object  # a tensor, or a number for a step that is stored as one
    is_vocabulary: bool = False  # whether rows that padded the vocabulary were removed

    def tensor(self) -> TensorRef:
        if not isinstance(self.value, TensorRef):
            raise FormatError("holds no tensor", where=self.file.where)
        if not self.value.row_major:
            raise UnsupportedError(
                "its elements are not stored contiguously",
                where=self.file.where,
                hint="ds_to_universal.py writes none like that; make the checkpoint anew with it",
            )
        return self.value


@dataclass(slots=True)
class UniversalSave(DeepSpeedSave):
    """The files of a universal checkpoint."""

    files: Mapping[str, Mapping[str, ParameterFile]]  # by parameter and kind
    common: ZeroFile  # the states that all parameters share
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, table: ArchiveTable, source: Source, paths: Sequence[str], where: str) -> Self:
        """Opens the files, and checks that they are of one save that is supported."""
        tag = sort_tag_files([p for p in paths if parse_universal_path(p) is None], where)
        if tag["optim"]:
            raise FormatError(
                f"{posixpath.basename(tag['optim'][0].path)!r}, of a rank's optimizer states, is"
                " beside the files of a universal checkpoint",
                where=where,
                hint="one was written into the folder of the other; take away the files of one",
            )
        models = [open_zero_file(table, source, file) for file in tag["model"]]
        refuse_parallelism(models, where)
        for file in tag["expert"]:
            raise unsupported_part_error("experts in files of their own", file.path, where)
        files: dict[str, dict[str, ParameterFile]] = defaultdict(dict)
        common = None
        for path in paths:
            parsed = parse_universal_path(path)
            if parsed is None:
                continue
            if not parsed.parameter:
                common = open_zero_file(table, source, TagFile(path, "optim", None, 0))
            else:
                archive = open_zero_archive(table, source, path)
                files[parsed.parameter][parsed.kind] = _parse_file(archive)
        if common is None:
            raise MissingFileError(
                f"'zero/{_COMMON}.pt' is not there",
                where=where,
                hint="make the checkpoint anew with ds_to_universal.py",
            )
        save = cls(models, where, files, common)
        save._check()
        return save

    def masters(self) -> Mapping[str, FlatParameter]:
        masters = {}
        for group in self.groups():
            for name, shape in group.items():
                file = self._file(name, _MASTER)
                if self._lacks_rows(file, shape):
                    self.notes.append(
                        f"the master copy of {name!r} lacks the rows that padded the vocabulary:"
                        " it is made from the weights as the model has them"
                    )
                    continue
                masters[name] = _to_parameter(name, file, shape)
        return masters

    def states(self, table: ArchiveTable, names: Mapping[str, Fqn]) -> ZeroStates:
        """Collects the states of the optimizer."""
        content = self.common.content
        if _PARTITIONED in content.values:
            common = find_rank_states(self.common, content)
        else:
            common = RankStates(self.common, {}, content.inner_list("param_groups"))
        groups = self.groups()
        self._check_steps(groups)
        for name in (name for group in groups for name in group if name not in names):
            raise self.first.error(f"holds optimizer states of {quote(name)} but not the parameter")
        entries: list[TensorEntry] = []
        values: dict[KeyPath, Any] = {}
        for number, group in enumerate(groups):
            for name, shape in group.items():
                path = (OPTIMIZER, "state", names[name])
                entries += self._moments(table, path, name, shape)
                step = self.files[name].get(_STEP)
                vector = common.vectors.get(number)
                if step is None and vector is not None and vector.values.get(_STEP) is not None:
                    step = ParameterFile(self.common.archive, vector.values[_STEP])
                if step is not None and isinstance(step.value, TensorRef):
                    tensor = step.tensor()
                    chunks = ChunkTable.of([table.chunk(step.file, tensor)], len(tensor.shape))
                    entries.append(make_state_entry((*path, _STEP), tensor, tensor.shape, chunks))
                elif step is not None:
                    values[*path, _STEP] = step.value
        values |= collect_group_values(
            common, [[names[name] for name in group] for group in groups]
        )
        return ZeroStates(tuple(entries), values, ())

    def facts(self) -> RunFacts:
        stage = self.common.content.count("zero_stage")
        return self.run_facts(stage, self.notes, "ds_to_universal.py")

    def _check(self) -> None:
        check_same_run(self.models, self.where)
        if self.is_partitioned:
            world_size = self.first.count("dp_world_size") or 1
            check_ranks(self.models, world_size, "weights", self.where)
        is_stage_3 = _PARTITIONED in self.common.content.values
        if is_stage_3 != self.is_partitioned:
            raise FormatError(
                "files of weights and files of parameters are of different stages",
                where=self.where,
                hint="take away the files of one of the two checkpoints",
            )

    def _file(self, name: str, kind: str) -> ParameterFile:
        file = self.files.get(name, {}).get(kind)
        if file is None:
            raise MissingFileError(
                f"'zero/{name}/{kind}.pt' is not there",
                where=self.where,
                hint="copy the file back, or make the checkpoint anew with ds_to_universal.py",
            )
        return file

    def _lacks_rows(self, file: ParameterFile, shape: Shape) -> bool:
        """Returns whether a tensor lacks padding rows of the vocabulary that the weights have."""
        stored = file.tensor().shape
        return (
            file.is_vocabulary
            and not self.is_partitioned
            and len(stored) == len(shape)
            and stored[1:] == shape[1:]
            and stored[0] < shape[0]
        )

    def _moments(
        self, table: ArchiveTable, path: KeyPath, name: str, shape: Shape
    ) -> Iterator[TensorEntry]:
        has_moments = any(kind in self.files[name] for kind in _MOMENTS)
        for kind in _MOMENTS if has_moments or self.is_partitioned else ():
            file = self._file(name, kind)
            whole = file.tensor().shape if self._lacks_rows(file, shape) else shape
            chunks = make_chunks(table, _to_parameter(name, file, whole))
            yield make_state_entry((*path, kind), file.tensor(), whole, chunks)

    def _check_steps(self, groups: Sequence[Mapping[str, Shape]]) -> None:
        """Refuses parameters of one group with different numbers of steps, and lost steps."""
        names = [name for group in groups for name in group]
        if not any(_STEP in self.files[name] for name in names):
            return
        for group in groups:
            first: tuple[object, str] | None = None
            for name in group:
                if not any(kind in self.files[name] for kind in (*_MOMENTS, _STEP)):
                    continue  # a parameter that never had a gradient
                file = self._file(name, _STEP)
                step = fingerprint_step(file.file, file.value)
                if first is not None and first[0] != step:
                    raise FormatError(
                        f"was stepped another number of times than {first[1]}: the files are of two"
                        " checkpoints",
                        where=file.file.where,
                        hint="make the checkpoint anew with ds_to_universal.py",
                    )
                first = first or (step, file.file.where)


def _parse_file(archive: TorchArchive) -> ParameterFile:
    """Returns the value in a file of a parameter: in a dictionary, or by itself."""
    root = archive.root
    if isinstance(root, dict):
        tensor = archive.dictionary().tensor(_TENSOR)
        return ParameterFile(archive, tensor, bool(root.get(_IS_VOCABULARY)))
    if isinstance(root, (TensorRef, int, float)):
        return ParameterFile(archive, root)
    raise FormatError("holds neither a tensor nor a number", where=archive.where)


def _to_parameter(name: str, file: ParameterFile, shape: Shape) -> FlatParameter:
    """Returns a stored tensor as a parameter of its shape, which stage 3 does not store."""
    tensor = file.tensor()
    count = math.prod(shape)
    if tensor.shape not in {shape, (count,)}:
        raise FormatError(
            f"holds {list(tensor.shape)} where {quote(name)} has {list(shape)}: sizes do not add"
            " up",
            where=file.file.where,
        )
    info = TagFile(file.file.path, "optim", None, 0)
    zero_file = ZeroFile(info, PickledDict({}, file.file.where), file.file)
    slices = (VectorSlice(zero_file, tensor, 0, 0, 0, count),) if count else ()
    return FlatParameter(shape, tensor.dtype, slices)
