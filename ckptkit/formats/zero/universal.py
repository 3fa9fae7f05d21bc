"""The contents of a universal checkpoint, checked to be complete and of one save."""

from __future__ import annotations

import math
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import ChunkTable, Fqn, KeyPath, RunFacts, Shape, TensorEntry
from ckptkit.core.text import quote
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.zero.flat_vectors import (
    FlatParameter,
    VectorSlice,
    make_chunks,
)
from ckptkit.formats.zero.states import (
    OPTIMIZER,
    RankStates,
    ZeroStates,
    collect_group_values,
    find_rank_states,
    fingerprint_step,
    make_state_entry,
)
from ckptkit.formats.zero.tag_files import (
    TagFile,
    ZeroFile,
    check_ranks,
    check_same_run,
    open_zero_archive,
    open_zero_file,
    parse_universal_path,
    refuse_parallelism,
    sort_tag_files,
)
from ckptkit.formats.zero.weights import DeepSpeedSave
from ckptkit.storage.base import Source

_MASTER = "fp32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_COMMON = "optimizer_state"
_TENSOR, _IS_VOCABULARY = "param", "vocab_tensor"
_PARTITIONED = "optimizer_state_dict"  # only stage 3 leaves this key in the common states


@dataclass(frozen=True, slots=True)
class ParameterFile:
    """The value in a file of a parameter.

    Attributes:
        file: The file.
        value: A tensor, or a number for a step that is stored as one.
        is_vocabulary: Whether rows that padded the vocabulary were removed.
    """

    file: TorchArchive
    value: object
    is_vocabulary: bool = False

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
    """The files of a universal checkpoint.

    Attributes:
        files: The files of each parameter, by its name and by their kind.
        common: The states that all parameters share.
        notes: Notes for `inspect`.
    """

    files: Mapping[str, Mapping[str, ParameterFile]]
    common: ZeroFile
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
        """Collects the states of the optimizer.

        Args:
            table: The opened files.
            names: The names of parameters in the index, by name in the files.
        """
        content = self.common.content
        if _PARTITIONED in content.values:
            common = find_rank_states(self.common, content)
        else:
            common = RankStates(self.common, {}, content.inner_list("param_groups"))
        groups = self.groups()
        self._check_steps(groups)
        for name in (name for group in groups for name in group if name not in names):
            raise self.first.error(f"holds no {quote(name)}, of which there are states")
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
