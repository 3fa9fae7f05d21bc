"""The files of one tag, proven to be all there, of one save, and of a kind that is modelled."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import FormatError, MissingFileError, UnsupportedError
from ckptkit.core.index import RunFacts, Shape
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import Document
from ckptkit.formats.zero.files import FileName, Kind, ZeroFile, not_modelled, parse_name
from ckptkit.formats.zero.layout import (
    Parameter,
    partition_counts,
    partitioned_frozen,
    partitioned_parameters,
    sliced_parameters,
)
from ckptkit.formats.zero.optimizer import MODULE, RankStates, rank_states

_STATES = "optimizer_state_dict"
_PARTITIONED_STAGE = 3
_NAMED = 7  # missing files
# What a file of weights has beside them where a part of the model is not in it.
_NOT_HERE = {
    "num_experts": "experts in files of their own",
    "autoep_layers": "experts in files of their own",
    "ds_autoep_layers": "experts in files of their own",
}


def checked_names(paths: Sequence[str], where: str) -> Mapping[Kind, list[FileName]]:
    """Sorts the files of a folder into those of weights and of optimizer states, by rank.

    Args:
        paths: The files of one tag.
        where: Its folder, for messages.

    """
    for path in paths:
        other = not_modelled(path)
        if other is not None:
            raise _unsupported(other[1], path, where)
    names = [name for name in map(parse_name, paths) if name is not None]
    sliced = next((name for name in names if name.slice), None)
    if sliced is not None:
        raise _unsupported("slices of tensor parallelism", sliced.path, where)
    found: dict[Kind, list[FileName]] = {"model": [], "optim": []}
    for name in sorted(names, key=lambda name: -1 if name.rank is None else name.rank):
        before = found[name.kind][-1:]
        if before and (before[0].rank is None or before[0].rank == name.rank):
            raise FormatError(
                f"{posixpath.basename(before[0].path)!r} and {posixpath.basename(name.path)!r}"
                " are of two checkpoints",
                where=where,
                hint="a save went into the folder of another one; take away the files of one",
            )
        found[name.kind].append(name)
    if not found["model"]:
        raise MissingFileError(
            "no file of weights ('…model_states.pt') lies beside the optimizer states",
            where=where,
            hint="give the directory that holds the files of every rank",
        )
    return found


def _unsupported(what: str, path: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"holds {what} ({posixpath.basename(path)!r}), which this version does not read",
        where=where,
        hint="load it where it was trained, and save the gathered state dict of the whole model"
        " with `torch.save`, or use the converter of what trained it; read are ZeRO 1 to 3 without"
        " pipeline, tensor and expert parallelism",
    )


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files of one tag hold, by rank.

    Attributes:
        models: The files of weights: of each rank in stage 3, else one.
        ranks: The files of optimizer states, none where there are none.
        where: The folder, for messages.
    """

    models: Sequence[ZeroFile]
    ranks: Sequence[ZeroFile]
    where: str

    @property
    def is_partitioned(self) -> bool:
        return self.models[0].name.rank is not None

    @property
    def first(self) -> Document:
        """What the first file of weights holds."""
        return self.models[0].content

    @property
    def states(self) -> list[Document]:
        return [file.content.inner(_STATES) for file in self.ranks]

    @property
    def stage(self) -> int | None:
        return self.states[0].count("zero_stage") if self.ranks else None

    def check(self) -> None:
        """Proves that every rank's file is there, and that all are of one save."""
        refuse_parallelism(self.models, self.where)
        self._refuse_expert_groups()
        world = self._world_size()
        expected = range(world)
        if self.is_partitioned:
            check_ranks([f.name for f in self.models], expected, self.where)
        if self.ranks or self.is_partitioned:
            check_ranks([f.name for f in self.ranks], expected, self.where)
        checked_same(self.models, self.where)
        stages = {state.count("zero_stage") for state in self.states}
        if stages and (len(stages) > 1 or (_PARTITIONED_STAGE in stages) != self.is_partitioned):
            named = " and ".join(str(stage) for stage in stages)
            raise FormatError(
                f"optimizer states of stage {named} lie beside weights of another",
                where=self.where,
                hint="a save went into the folder of another one; take away the files of one",
            )

    def _refuse_expert_groups(self) -> None:
        for file, state in zip(self.ranks, self.states, strict=True):
            if state.values.get("ds_zero_partition_groups"):
                raise _unsupported("expert groups", file.name.path, self.where)

    def _world_size(self) -> int:
        counts = {count for state in self.states for count in partition_counts(state)}
        recorded = self.first.count("dp_world_size")
        if self.ranks and recorded is not None:
            counts.add(recorded)
        if len(counts) > 1:
            raise FormatError(
                f"the files are of runs with {' and '.join(map(str, sorted(counts)))} ranks",
                where=self.where,
                hint="files of a run of another size, or of expert groups, lie among them; take"
                " away those that do not belong here",
            )
        return counts.pop() if counts else recorded or 1

    def facts(self, more: Sequence[str] = ()) -> RunFacts:
        """Returns what is known of the run, with further notes."""
        version = self.first.text("ds_version")
        stage = f", ZeRO stage {self.stage}" if self.stage is not None else ""
        notes = [*more]
        if not self.ranks and self.first.values.get("optimizer"):
            notes.append(
                "without ZeRO, DeepSpeed keeps optimizer states and master copies by number:"
                " nothing proves which parameter has which, and they are left out"
            )
        elif not self.ranks:
            notes.append("no optimizer states lie beside the weights, and so no master copies")
        return RunFacts(
            world_size=self.first.count("dp_world_size"),
            step=self.first.count("global_steps"),
            writer=f"DeepSpeed {version}".strip() + stage,
            version=version,
            notes=tuple(notes),
        )

    def groups(self) -> list[dict[str, Shape]]:
        return parameter_groups(self.first)

    def masters(self) -> Mapping[str, Parameter]:
        """Returns the master copies of trained parameters, by name."""
        if not self.ranks:
            return {}
        pairs = list(zip(self.ranks, self.states, strict=True))
        find = partitioned_parameters if self.is_partitioned else sliced_parameters
        return find(self.groups(), pairs)

    def kept(self) -> list[RankStates]:
        return [rank_states(*pair) for pair in zip(self.ranks, self.states, strict=True)]

    def frozen(self) -> Mapping[str, Parameter]:
        return partitioned_frozen(self.models) if self.is_partitioned else {}

    def shared(self) -> Mapping[str, str]:
        return shared_parameters(self.first)


def check_ranks(names: Sequence[FileName], expected: range, where: str) -> None:
    """Refuses files that are missing, and files of ranks that the run did not have."""
    found = {name.rank for name in names}
    missing = [rank for rank in expected if rank not in found]
    if missing:
        kind = "weights" if names and names[0].kind == "model" else "optimizer states"
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        listed = ", ".join(map(str, missing[:_NAMED])) + more
        raise MissingFileError(
            f"the {kind} of rank {listed} of {len(expected)} are not there",
            where=where,
            hint="copy the files back, name where other nodes keep theirs with --also, or take an"
            " earlier checkpoint",
        )
    stale = [name.path for name in names if name.rank not in expected]
    if stale:
        raise FormatError(
            f"{posixpath.basename(stale[0])!r} is of a rank that a run with {len(expected)} ranks"
            " does not have",
            where=where,
            hint="an earlier save of a larger run left it; take it away",
        )


def refuse_parallelism(models: Sequence[ZeroFile], where: str) -> None:
    """Refuses files of weights that hold only a part of the model, where others are elsewhere."""
    for file in models:
        content = file.content
        degrees = content.inner("checkpoint_parallel_dimensions")
        sizes = {content.count("mp_world_size"), *map(degrees.count, degrees.values)}
        if sizes - {None, 1}:
            raise _unsupported("slices of a model-parallel run", file.name.path, where)
        for key, what in _NOT_HERE.items():
            if content.values.get(key):
                raise _unsupported(what, file.name.path, where)
        if content.values.get(MODULE) is None:
            raise _unsupported("the layers of a pipeline", file.name.path, where)


def checked_same(models: Sequence[ZeroFile], where: str) -> None:
    """Refuses files of weights of several steps, or of several runs."""
    for key in ("global_steps", "dp_world_size"):
        if len({file.content.count(key) for file in models}) > 1:
            raise FormatError(f"the files of ranks have several {key!r}", where=where)


def parameter_groups(model: Document) -> list[dict[str, Shape]]:
    """Returns the shapes of trained parameters, by name, for each vector of the ranks."""
    groups: list[dict[str, Shape]] = []
    seen: set[str] = set()
    for document in model.inner_list("param_shapes"):
        group = document.shapes()
        twice = next((name for name in group if name in seen), None)
        if twice is not None:
            raise document.error(f"has {shown(twice)} in two groups")
        seen.update(group)
        groups.append(group)
    return groups


def shared_parameters(model: Document) -> Mapping[str, str]:
    """Returns the names under which others' parameters are known besides, with the others."""
    found = model.inner("shared_params").values
    if not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise model.error("'shared_params' names something that is not a text")
    return found
