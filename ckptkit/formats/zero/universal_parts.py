"""What the files of a universal checkpoint hold, proven to be all there and of one save."""

from __future__ import annotations

import math
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import Box, Chunk, ChunkTable, Fqn, KeyPath, RunFacts, Shape, TensorEntry
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import ArchiveTable, Document, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.zero.files import (
    FileName,
    ZeroFile,
    open_zero_archive,
    open_zero_file,
    universal_place,
)
from ckptkit.formats.zero.layout import Parameter, Run, chunks_of, partitioned_frozen
from ckptkit.formats.zero.optimizer import (
    OPTIMIZER,
    RankStates,
    States,
    group_values,
    rank_states,
    state_entry,
    step_fingerprint,
)
from ckptkit.formats.zero.ranks import (
    check_ranks,
    checked_names,
    checked_same,
    parameter_groups,
    refuse_parallelism,
    shared_parameters,
)
from ckptkit.storage.base import Source

_MASTER = "fp32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_COMMON = "optimizer_state"
_TENSOR, _IS_VOCABULARY = "param", "vocab_tensor"
_PARTITIONED = "optimizer_state_dict"  # what only stage 3 leaves in the common states


@dataclass(frozen=True, slots=True)
class Stored:
    """What one file of a parameter holds.

    Attributes:
        file: The file.
        value: A tensor; a number where a step is kept as one.
        is_vocabulary: Whether rows that padded the vocabulary were cut off.
    """

    file: TorchArchive
    value: object
    is_vocabulary: bool = False

    def tensor(self) -> TensorRef:
        """Returns the tensor."""
        if not isinstance(self.value, TensorRef):
            raise FormatError("holds no tensor", where=self.file.where)
        if not self.value.row_major:
            raise UnsupportedError(
                "its elements do not lie one after another",
                where=self.file.where,
                hint="ds_to_universal.py leaves none like that; make the checkpoint anew with it",
            )
        return self.value


@dataclass(slots=True)
class UniversalContents:
    """What the files hold.

    Attributes:
        models: The files of weights: of each rank in stage 3, else one.
        stored: What is stored of each parameter, by its name and by what it is.
        common: The states that all parameters share.
        where: The folder, for messages.
        notes: What `inspect` is to tell.
    """

    models: Sequence[ZeroFile]
    stored: Mapping[str, Mapping[str, Stored]]
    common: ZeroFile
    where: str
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, table: ArchiveTable, source: Source, paths: Sequence[str], where: str) -> Self:
        """Opens the files, and proves that they are of one save of a kind that is modelled."""
        names = checked_names([path for path in paths if universal_place(path) is None], where)
        _refuse_mixture(names["optim"], where)
        models = [open_zero_file(table, source, name) for name in names["model"]]
        refuse_parallelism(models, where)
        stored: dict[str, dict[str, Stored]] = defaultdict(dict)
        common = None
        for path in paths:
            place = universal_place(path)
            if place is None:
                continue
            if not place.parameter:
                common = open_zero_file(table, source, FileName(path, "optim", None, 0))
            else:
                archive = open_zero_archive(table, source, path)
                stored[place.parameter][place.kind] = _stored(archive)
        if common is None:
            raise MissingFileError(
                f"'zero/{_COMMON}.pt' is not there",
                where=where,
                hint="make the checkpoint anew with ds_to_universal.py",
            )
        found = cls(models, stored, common, where)
        found._check()
        return found

    @property
    def is_partitioned(self) -> bool:
        return self.models[0].name.rank is not None

    @property
    def first(self) -> Document:
        """What the first file of weights holds."""
        return self.models[0].content

    def groups(self) -> list[dict[str, Shape]]:
        return parameter_groups(self.first)

    def masters(self) -> Mapping[str, Parameter]:
        """Returns the master copies of trained parameters, by name."""
        found = {}
        for group in self.groups():
            for name, shape in group.items():
                held = self._held(name, _MASTER)
                if self._is_cut(held, shape):
                    self.notes.append(
                        f"the master copy of {name!r} lacks the rows that padded the vocabulary:"
                        " it is made from the weights as the model has them"
                    )
                    continue
                found[name] = _parameter(name, held, shape)
        return found

    def frozen(self) -> Mapping[str, Parameter]:
        return partitioned_frozen(self.models) if self.is_partitioned else {}

    def shared(self) -> Mapping[str, str]:
        return shared_parameters(self.first)

    def states(self, table: ArchiveTable, called: Mapping[str, Fqn]) -> States:
        """Gathers the states of the optimizer.

        Args:
            table: The opened files.
            called: What parameters are called in the index, by name.
        """
        rank = self._common_states()
        groups = self.groups()
        self._check_steps(groups)
        for name in (name for group in groups for name in group if name not in called):
            raise self.first.error(f"holds no {shown(name)}, of which there are states")
        entries: list[TensorEntry] = []
        values: dict[KeyPath, Any] = {}
        for number, group in enumerate(groups):
            for name, shape in group.items():
                path = (OPTIMIZER, "state", called[name])
                entries += self._moments(table, path, name, shape)
                step = self._step(name, rank.vectors.get(number))
                if step is not None and isinstance(step.value, TensorRef):
                    entries.append(_number(table, (*path, _STEP), step))
                elif step is not None:
                    values[*path, _STEP] = step.value
        values |= group_values(rank, [[called[name] for name in group] for group in groups])
        return States(tuple(entries), values, ())

    def facts(self) -> RunFacts:
        """Returns what is known of the run."""
        stage = self.common.content.count("zero_stage")
        told = f", ZeRO stage {stage}" if stage is not None else ""
        return RunFacts(
            world_size=self.first.count("dp_world_size"),
            step=self.first.count("global_steps"),
            writer=f"DeepSpeed {self.first.text('ds_version')}".strip()
            + f"{told}, ds_to_universal.py",
            version=self.first.text("ds_version"),
            notes=tuple(self.notes),
        )

    def _check(self) -> None:
        checked_same(self.models, self.where)
        world = self.first.count("dp_world_size") or 1
        if self.is_partitioned:
            check_ranks([file.name for file in self.models], range(world), self.where)
        is_stage_3 = _PARTITIONED in self.common.content.values
        if is_stage_3 != self.is_partitioned:
            raise FormatError(
                "files of weights of another stage lie beside the files of parameters",
                where=self.where,
                hint="take away the files of one of the two checkpoints",
            )

    def _common_states(self) -> RankStates:
        content = self.common.content
        if _PARTITIONED in content.values:
            return rank_states(self.common, content)
        return RankStates(self.common, {}, content.inner_list("param_groups"))

    def _held(self, name: str, kind: str) -> Stored:
        held = self.stored.get(name, {}).get(kind)
        if held is None:
            raise MissingFileError(
                f"'zero/{name}/{kind}.pt' is not there",
                where=self.where,
                hint="copy the file back, or make the checkpoint anew with ds_to_universal.py",
            )
        return held

    def _is_cut(self, held: Stored, shape: Shape) -> bool:
        """Tells whether a master copy lacks rows that the weights have."""
        found = held.tensor().shape
        return (
            held.is_vocabulary
            and not self.is_partitioned
            and len(found) == len(shape)
            and found[1:] == shape[1:]
            and found[0] < shape[0]
        )

    def _moments(
        self, table: ArchiveTable, path: KeyPath, name: str, shape: Shape
    ) -> Iterator[TensorEntry]:
        there = [kind for kind in _MOMENTS if kind in self.stored[name]]
        for kind in _MOMENTS if there or self.is_partitioned else ():
            held = self._held(name, kind)
            whole = held.tensor().shape if self._is_cut(held, shape) else shape
            parameter = _parameter(name, held, whole)
            yield state_entry(
                (*path, kind), held.tensor(), parameter.shape, chunks_of(table, parameter)
            )

    def _step(self, name: str, vector: Document | None) -> Stored | None:
        """Finds the step of a parameter, in a file of its own or among the common states."""
        own = self.stored[name].get(_STEP)
        if own is not None:
            return own
        value = None if vector is None else vector.values.get(_STEP)
        return None if value is None else Stored(self.common.archive, value)

    def _check_steps(self, groups: Sequence[Mapping[str, Shape]]) -> None:
        """Refuses parameters of one group that were stepped differently often, and lost steps."""
        names = [name for group in groups for name in group]
        if not any(_STEP in self.stored[name] for name in names):
            return
        for group in groups:
            seen: tuple[object, str] | None = None
            for name in group:
                if not any(kind in self.stored[name] for kind in (*_MOMENTS, _STEP)):
                    continue  # a parameter that never had a gradient
                held = self._held(name, _STEP)
                step = step_fingerprint(held.file, held.value)
                if seen is not None and seen[0] != step:
                    raise FormatError(
                        f"was stepped another number of times than {seen[1]}: the files are of two"
                        " checkpoints",
                        where=held.file.where,
                        hint="make the checkpoint anew with ds_to_universal.py",
                    )
                seen = seen or (step, held.file.where)


def _refuse_mixture(optimizers: Sequence[FileName], where: str) -> None:
    if optimizers:
        raise FormatError(
            f"{posixpath.basename(optimizers[0].path)!r}, of a rank's optimizer states, lies beside"
            " the files of a universal checkpoint",
            where=where,
            hint="the one was written into the folder of the other; take away the files of one",
        )


def _stored(archive: TorchArchive) -> Stored:
    """Returns what a file of a parameter holds: a dictionary with a tensor, or one alone."""
    root = archive.root
    if isinstance(root, dict):
        document = archive.document()
        return Stored(archive, document.tensor(_TENSOR), bool(root.get(_IS_VOCABULARY)))
    if isinstance(root, (TensorRef, int, float)):
        return Stored(archive, root)
    raise FormatError("holds neither a tensor nor a number", where=archive.where)


def _parameter(name: str, held: Stored, shape: Shape) -> Parameter:
    """Gives a stored tensor its shape, which in stage 3 it has lost."""
    tensor = held.tensor()
    count = math.prod(shape)
    if tensor.shape not in {shape, (count,)}:
        raise FormatError(
            f"holds {list(tensor.shape)} where {shown(name)} has {list(shape)}: sizes do not add"
            " up",
            where=held.file.where,
        )
    name_of = FileName(held.file.path, "optim", None, 0)
    file = ZeroFile(name_of, Document({}, held.file.where), held.file)
    runs = (Run(file, tensor, 0, 0, 0, count),) if count else ()
    return Parameter(shape, tensor.dtype, runs)


def _number(table: ArchiveTable, path: KeyPath, held: Stored) -> TensorEntry:
    tensor = held.tensor()
    at = tensor.storage_offset * tensor.dtype.itemsize
    place = Box((0,) * len(tensor.shape), tensor.shape)
    chunk = Chunk(place, table.record(held.file, tensor), byte_offset=at)
    return state_entry(path, tensor, tensor.shape, ChunkTable.of([chunk], len(tensor.shape)))
