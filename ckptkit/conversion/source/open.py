"""Opens checkpoints: from a path as the user typed it to an index of the files there."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.source.named_models import describe_hub_name, find_model
from ckptkit.conversion.source.unite import compare_leftovers, join_indexes, unite
from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    FormatError,
    InputError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    UsageError,
)
from ckptkit.core.index import TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.core.model_configs import parse_json_object, parse_model_config
from ckptkit.core.text import Aside, counted
from ckptkit.core.threads import memory_in_use_bytes
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import (
    TRACKERS,
    UNFINISHED,
    CheckpointUnit,
    ResolvedSource,
    RunRecords,
    is_called_last,
    parse_step,
    read_pointer,
    resolve,
    step_of_files,
)
from ckptkit.formats.optimizer_names import name_states
from ckptkit.formats.parsing import is_count, list_first, read_limited
from ckptkit.formats.ranks.flat import (
    SLICES,
    ModelParameter,
    compute_vectors,
    find_flat_parameters,
    is_flat,
    unflatten,
)
from ckptkit.formats.ranks.rank_files import add_numbered_ranks
from ckptkit.formats.registry import (
    describe_missing_files,
    estimate_parsing_bytes,
    list_plug_in_problems,
    recognise,
)
from ckptkit.formats.zero.reader import drop_older_tags, read_tag
from ckptkit.plan.coverage import error_of
from ckptkit.plan.selection import model_trees, plain_trees, propose_trees
from ckptkit.plan.weight_kinds import ADAPTER_OF_TORCHTUNE, MERGED_BESIDE
from ckptkit.runs.run_paths import (
    absent_folder,
    check_closed,
    hint_at_near,
    hold_candidates,
    make_not_found,
    marker,
)
from ckptkit.runs.save_order import left_behind
from ckptkit.runs.step_manifests import StepManifests, list_files, prefetch_headers, step_folder
from ckptkit.runs.steps import RunStep, save_number_of, series_of
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.place_identity import PlaceRelation, find_overlaps
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

_MARKS = {
    "trainer_state.json": "Transformers Trainer",
    "run_config.yaml": "Megatron-Bridge",
    "context/io.json": "NeMo 2",
    "transformer_config.json": "verl",
}
# Of LeRobot and of the Trainer: where a step that is named as the last has its number.
_STEP_IN_FILE = (
    ("training_state/training_step.json", "step"),
    ("trainer_state.json", "global_step"),
)
_UNFINISHED = "-unfinished"  # NeMo's file has the name of the folder with this ending
_ACCELERATE = "pytorch_model_fsdp_"
_ACCELERATE_STATE = "random_states_0.pkl"  # which `save_state` always writes


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint, its files open and their headers parsed.

    Attributes:
        location: The path as the user typed it.
        source: The places that hold the files, read as one.
        folder: The chosen step's folder, relative to the source's root; empty for the root.
        units: The units that the index covers.
        index: The content of the headers, over all units.
        select: The rest of the user's selection: a state dict within the index, or None.
        notes: What was ignored, and why.
        damaged: Steps that were passed over, by their folders: what each lacks.
        steps: All steps of the run, the newest last, relative to the source's root.
        finals: Models beside the steps: what `--select` takes each by, with what it lacks.
        manifest: The manifest of a step that ckptkit saved, else None.
        paths: All files of the source, relative to its root.
        maps: The map that converted the names of the model, if there is one, with its digest.
        rules: Its rules, by the templates of the names that they make.
    """

    location: str
    source: OverlaySource
    folder: str
    units: tuple[CheckpointUnit, ...]
    index: TensorIndex
    select: str | None
    notes: tuple[str, ...]
    damaged: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[str] = ()
    finals: Mapping[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    paths: Sequence[str] = ()
    maps: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return posixpath.join(self.location, self.folder) if self.folder else self.location


@contextmanager
def open_checkpoint(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    limit_bytes: int | None = None,
    model_config: PathLike | None = None,
) -> Iterator[OpenedCheckpoint]:
    """Opens the checkpoint at, or under, a path.

    Args:
        path: Any path in or above a checkpoint.
        select: Which of several checkpoints or models to take.
        also: Further directories, which hold files of the same checkpoint in the same places.
        limit_bytes: Memory that the process may use, or None.
        model_config: A folder with the configuration of the model whose parameters are in flat
            parameters of FSDP1, or None.

    Yields:
        The checkpoint, its files open.
    """
    check_path(path, "SRC")
    location = place_of(path)

    def list_again() -> list[str]:
        with ExitStack() as stack:
            return list_files(OverlaySource(_open_folders(stack, location, also)[0]))

    for tries_left in reversed(range(_TRIES)):
        with ExitStack() as stack:
            folders, only = _open_folders(stack, location, also)
            source = OverlaySource(folders, compared=(METADATA, MANIFEST_NAME))
            search = _Search(source, location, only, limit_bytes)
            try:
                checkpoint = search.run(select)
                candidates = [unit.candidate for unit in checkpoint.units]
                stack.enter_context(hold_candidates(folders, candidates))
            except InputError:
                if not tries_left or not search.has_lost_files(list_again):
                    raise
                continue
            if tries_left and search.has_lost_steps(candidates, list_again):
                continue
            if model_config is not None:
                index = _with_model_config(checkpoint.index, model_config)
                checkpoint = replace(checkpoint, index=index)
            yield checkpoint
            return


def _open_folders(
    stack: ExitStack, location: Place, also: Sequence[PathLike]
) -> tuple[list[Source], str | None]:
    """Opens the directories of a source, and returns the file in them that it is, if it is one."""
    root, only = open_root(stack, location)
    if only is not None and also:
        raise UsageError("cannot be combined with a file as SRC", where="--also")
    return [root, *open_others(stack, location, also)], only


_SHOWN = 3
_TRIES = 5  # a job may remove steps of its run while they are searched


def _with_model_config(index: TensorIndex, folder: PathLike) -> TensorIndex:
    """Replaces flat parameters of FSDP1, if there are any, by those of the model.

    Args:
        index: The index of a checkpoint.
        folder: A folder with the `config.json` of the model.
    """
    flat = find_flat_parameters(index)
    if not flat:
        return index
    # Late, since it is needed with --model-config only.
    from ckptkit.conversion.naming_program import ask_parameters

    config = read_config_in(folder, "--model-config")
    alone = {entry.name for entry in index.of_part("model") if not is_flat(entry)}
    slices = {str(path[-1]): value for path, value in index.values.items() if path[:1] == SLICES}
    parameters = (
        ModelParameter(tuple(parameter["names"]), tuple(parameter["shape"]))
        for parameter in ask_parameters(config, sorted({*alone, *slices}))
    )
    missing = [p for p in parameters if alone.isdisjoint(p.names)]
    lengths = {str(entry.name): entry.elements for entry in flat}
    vectors = compute_vectors(missing, lengths, index.run.world_size or 1, slices)
    return unflatten(index, flat, vectors, f"--model-config {folder}")


def read_config_in(folder: PathLike, option: str) -> dict[str, Any]:
    """Returns the `config.json` of a folder.

    Args:
        folder: The folder.
        option: The option that names it, for messages.
    """
    with ExitStack() as stack:
        source = open_folder(stack, find_model(folder, option).place, option)
        where = posixpath.join(source.location, CONFIG)
        try:
            size = source.stat(CONFIG).size_bytes
        except MissingFileError as error:
            raise NotACheckpointError(
                f"holds no {CONFIG!r}",
                where=f"{option} {folder}",
                hint="name a folder as save_pretrained writes it; its weights may be missing",
            ) from error
        if size > MAX_JSON_BYTES:
            raise FormatError(f"has {size:,} bytes, more than any configuration", where=where)
        return parse_model_config(source.read(CONFIG, 0, size), where=where)


SOURCE_IDENTITY = "identity"
"""In the source of a manifest: changes when a file of the source is replaced or rewritten."""


def describe_sources(sources: Sequence[OpenedCheckpoint]) -> dict[str, Any]:
    """Returns the `source` of a manifest; the output is made from the first of the sources.

    Its identity digests the sizes and times, or ETags, of all files, without their paths: a path
    can name the run or the step in it, and a copy of the same files is the same source.
    """
    digest = xxhash.xxh3_128()
    for source in sources:
        lines = []
        for file in source.index.files:
            identity = file.identity
            if not is_url(source.location):
                # The inode comes first. It differs between copies, and on some file systems
                # between mounts.
                identity = identity.partition("-")[2] or identity
            lines.append(f"{identity} {file.size_bytes}")
        digest.update("".join(f"{line}\n" for line in sorted(lines)).encode())
    checkpoint = sources[0]
    return {
        "path": checkpoint.path,
        "format": checkpoint.index.format,
        "step": checkpoint.index.run.step,
        "world_size": checkpoint.index.run.world_size,
        "writer": checkpoint.index.run.writer,
        SOURCE_IDENTITY: digest.hexdigest(),
    }


class _Search:
    """Finds, chooses and parses; keeps parsed indexes, since choosing may need them."""

    def __init__(
        self, source: OverlaySource, location: str, only: str | None, limit_bytes: int | None
    ) -> None:
        self._source = source
        self._location = location
        self._only = only
        self._limit_bytes = limit_bytes
        self._steps = StepManifests(source, ())
        self._paths: Sequence[str] = ()
        self._indexes: dict[tuple[str, str, tuple[str, ...]], TensorIndex] = {}
        self._listed: frozenset[str] = frozenset()
        self._has_passed_over = False

    def has_lost_files(self, list_again: Callable[[], Sequence[str]]) -> bool:
        """Returns whether files that were listed are gone."""
        try:
            return not self._listed.issubset(list_again())
        except InputError:
            return True

    def has_lost_steps(
        self, chosen: Sequence[Candidate], list_again: Callable[[], Sequence[str]]
    ) -> bool:
        """Returns whether one of these is gone, or may have been chosen because others are."""
        if self._has_passed_over and self.has_lost_files(list_again):
            return True
        locations = [folder.location for folder in self._source.folders]
        if any(map(is_url, locations)):
            return False  # nothing is removed there that is being read
        places = ([Path(location, marker(one)) for location in locations] for one in chosen)
        return not all(any(path.exists() for path in paths) for paths in places)

    def run(self, select: str | None) -> OpenedCheckpoint:
        candidates = self._candidates()
        paths = self._paths if self._only is None else (self._only,)
        left_alone: tuple[str, ...] = ()
        folders = self._source.folders if self._only is None else ()
        if select is None:
            candidates, left_alone = drop_older_tags(self._source, candidates)
        found = resolve(
            self._steps.without_side_folders(candidates),
            location=self._location,
            select=select,
            describe_missing=self._lacks,
            links=self._source.linked_folders() if self._only is None else (),
            not_found=partial(make_not_found, folders, paths, self._location),
            read_step=self._step_inside,
            records=RunRecords(self._left_behind, self._read_tracker),
        )
        if any(folder.closed_folders for folder in folders):
            found = check_closed(found, folders, select, self._read_tracker)
        found = compare_leftovers(
            self._source, self._location, candidates, self._index, found, select
        )
        self._check_parts(found)
        index = join_indexes(found.units, [self._index(unit.candidate) for unit in found.units])
        index, chosen, averaged = _choose_average(index, found.select, self._location)
        found = replace(found, select=chosen, notes=(*found.notes, *averaged))
        index = name_states(index, self._source)
        step = _step_named(found, make_absolute(self._location))
        writer = ", ".join(filter(None, [*self._frameworks(found), index.run.writer]))
        run = replace(index.run, step=step if index.run.step is None else index.run.step)
        is_beside = select is None and 0 < len(plain_trees(index)) < len(model_trees(index))
        if is_beside and any(
            ADAPTER_OF_TORCHTUNE.fullmatch(posixpath.basename(path))
            and posixpath.dirname(path) == found.folder
            for path in self._paths
        ):
            run = replace(run, warnings=(*run.warnings, Aside(MERGED_BESIDE)))
        saved = step_folder(found.units[0].candidate.folder)
        run = self._steps.facts(saved, replace(run, writer=writer))
        problems = (*index.problems, *self._steps.problems(saved))
        return OpenedCheckpoint(
            location=self._location,
            source=self._source,
            folder=found.folder,
            units=found.units,
            index=replace(index, run=run, problems=problems),
            select=found.select,
            notes=(*left_alone, *found.notes, *run.warnings, *list_plug_in_problems()),
            damaged=found.damaged,
            steps=found.steps,
            finals=found.finals,
            manifest=self._steps.manifest(saved),
            paths=paths,
        )

    def _left_behind(self, folders: Sequence[str]) -> frozenset[str]:
        """Returns the steps of one run that training went back from, by their folders."""
        series: dict[str, list[RunStep]] = {}
        for folder in folders:
            step = parse_step(folder)
            if step is None or len(folders) == 1:
                continue
            manifest = self._steps.manifest(folder)
            if manifest is not None:
                saved = RunStep(step, folder, save_number=save_number_of(manifest))
            else:
                names = (path for path in self._paths if posixpath.dirname(path) == folder)
                times = [self._source.stat(path).modified for path in names]
                saved = RunStep(step, folder, has_manifest=False, modified=max(times, default=0.0))
            place = posixpath.dirname(folder), series_of(posixpath.basename(folder))
            series.setdefault("/".join(place), []).append(saved)
        return frozenset[str]().union(*(left_behind(self._source, own) for own in series.values()))

    def _read_tracker(self, run: str) -> tuple[str, str] | None:
        for file in TRACKERS:
            path = posixpath.join(run, file)
            tag = read_tag(self._source, path) if path in self._paths else None
            # Other programs may have a file `latest.txt`, too.
            if tag is not None and (file == TRACKERS[0] or tag.isdigit()):
                return file, tag
        return None

    def _candidates(self) -> list[Candidate]:
        """Recognises checkpoints; steps in parts are replaced by the whole that the parts make."""
        self._paths = list_files(self._source)
        self._listed = frozenset(self._paths)
        candidates = recognise(self._paths)
        folders = self._source.folders
        recognised = [recognise(list_files(folder)) for folder in folders if len(folders) > 1]
        steps = [{step_folder(c.folder) for c in own} for own in recognised]
        for number, own in enumerate(steps):
            others = set().union(*(paths for i, paths in enumerate(steps) if i != number))
            if number and own.isdisjoint(others):
                raise NotACheckpointError(
                    "holds no part of a checkpoint under a path that is also in"
                    f" {folders[0].location}",
                    where=f"--also {folders[number].location}",
                    hint="name the directory that corresponds to SRC: files that belong together"
                    " have the same paths in both",
                )
        folders_of_steps = [step_folder(candidate.folder) for candidate in candidates]
        files, without, problems = unite(self._source, folders_of_steps)
        if files:
            self._source.lay_over(files, without=without)
            self._paths = list_files(self._source)
            candidates = recognise(self._paths)
        candidates = add_numbered_ranks(self._source, candidates, self._paths)
        if self._only is not None:
            candidates = [c for c in candidates if self._only in c.files]
        candidates = [c for c in candidates if not self._is_pointer(c, candidates)]
        self._steps = StepManifests(self._source, candidates, problems)
        return candidates

    def _is_pointer(self, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """Returns whether a candidate is a link to another one, or a text in the place of one."""
        path = candidate.files[0]
        if len(candidate.files) > 1 or not is_called_last(path):
            return False
        beside = (one.files[0] for one in others if one.folder == candidate.folder)
        with suppress(InputError):
            identity = self._source.stat(path).identity
            if any(self._source.stat(p).identity == identity for p in beside if p != path):
                return True
        step = read_pointer(self._source, path)
        if step and self._only is not None:
            raise NotACheckpointError(
                f"is a text that names {step!r}, as a copy of a link is",
                where=self._location,
                hint=f"pass {posixpath.join(posixpath.dirname(self._location), step)}",
            )
        return step is not None

    def _check_parts(self, found: ResolvedSource) -> None:
        """Refuses a step in parts that do not make a whole step."""
        for unit in found.units:
            problem = self._steps.problem(step_folder(unit.candidate.folder))
            if problem is not None and METADATA not in map(
                posixpath.basename, unit.candidate.files
            ):
                raise error_of(problem, self._location)

    def _frameworks(self, found: ResolvedSource) -> Iterator[str]:
        """Yields the frameworks whose files are beside the weights, outermost first."""
        folders = {found.folder, *(unit.candidate.folder for unit in found.units)}
        folders |= {posixpath.dirname(folder) for folder in folders}
        for file, framework in _MARKS.items():
            if any(posixpath.join(folder, file) in self._paths for folder in folders):
                yield framework
        names = [unit.candidate.folder or self._location for unit in found.units]
        is_ours = any(self._steps.is_output(step_folder(folder)) for folder in folders)
        states = (posixpath.join(folder, _ACCELERATE_STATE) for folder in folders)
        is_named = any(_ACCELERATE in name for name in names)
        if not is_ours and (is_named or any(path in self._paths for path in states)):
            yield "accelerate"

    def _index(self, candidate: Candidate) -> TensorIndex:
        key = (candidate.format, candidate.folder, candidate.files)
        if key not in self._indexes:
            needed = memory_in_use_bytes() + estimate_parsing_bytes(self._source, candidate)
            if self._limit_bytes is not None and needed > self._limit_bytes:
                raise NoSpaceError(
                    f"parsing the index takes about {needed:,} bytes against {self._limit_bytes:,}",
                    where="--memory-limit",
                    hint=f"allow at least {needed:,} bytes",
                )
            prefetch_headers(self._source, candidate)
            self._indexes[key] = self._steps.read_index(candidate)
        return self._indexes[key]

    def _step_inside(self, candidate: Candidate) -> int | None:
        try:
            step = self._index(candidate).run.step
        except InputError:
            return None
        above = posixpath.dirname(candidate.folder)
        for folder, (file, key) in product((candidate.folder, above), _STEP_IN_FILE):
            path = posixpath.join(folder, file)
            if step is None and path in self._paths:
                with suppress(InputError):
                    data = read_limited(self._source, path, MAX_JSON_BYTES, "state of a run")
                    number = parse_json_object(data, where=path).get(key)
                    step = number if is_count(number) else None
        return step

    def _lacks(self, candidate: Candidate) -> str:
        missing = self._describe_missing(candidate)
        self._has_passed_over |= bool(missing)
        return missing

    def _describe_missing(self, candidate: Candidate) -> str:
        unfinished = self._steps.lacks(candidate)
        if unfinished:
            return unfinished
        for folder in (candidate.folder, posixpath.dirname(candidate.folder)):
            if f"{folder}{_UNFINISHED}" in self._paths:
                name = f"{posixpath.basename(folder)}{_UNFINISHED}"
                return f"the file '{name}' exists: {UNFINISHED}"
        try:
            return describe_missing_files(self._index(candidate))
        except InputError as error:
            return str(error.message)


# Source: lightning 2.6, `WeightAveraging.on_save_checkpoint`.
_CURRENT, _AVERAGING = "current_model_state", "averaging_state"
_OF_LIGHTNING = {"state_dict", _CURRENT}


def _choose_average(
    index: TensorIndex, select: str | None, location: str
) -> tuple[TensorIndex, str | None, list[str]]:
    """Makes the averages of weights that were selected a model of their own.

    Weights that have no average, such as frozen ones, are taken as training has them.

    Args:
        index: The index of a checkpoint.
        select: The user's selection of a state dict: its name, the first parts of it, or a dot for
            the one at the root.
        location: The checkpoint, for messages.

    Returns:
        The index, the name of the state dict that was selected, and notes.
    """
    models = model_trees(index)
    averages = list(dict.fromkeys(entry.tree for entry in index.of_part("average")))
    if (
        select is None
        and {*models} == _OF_LIGHTNING
        and any(entry.tree == _AVERAGING for entry in index.of_part("other"))
    ):
        note = "'state_dict' has Lightning's average of the weights: --select"
        return index, "state_dict", [Aside(f"{note} {_CURRENT} takes those of training")]
    if select is None:
        note = f"it also has averages of the weights: {propose_trees(averages)} takes those"
        return index, None, [Aside(note)] if averages else []
    if select == "." and "" in models:
        select = ""
    named = [tree for tree in averages if tree.startswith(f"{select}.")] if select else []
    if len(named) > 1 and select not in (*models, *averages):
        raise AmbiguousSourceError(
            f"holds {len(named)} averages {select!r}: {', '.join(named)}",
            where=location,
            hint=f"choose one with {propose_trees(named)}",
        )
    if select not in (*models, *averages) and named:
        select = named[0]
    if select not in averages:
        return index, select, []
    tensors = dict(index.tensors)
    own = {entry.name for entry in index.of_part("average") if entry.tree == select}
    rest: list[str] = []
    for key, entry in index.tensors.items():
        if entry.tree == select:
            tensors[key] = replace(entry, part="model")
        elif entry.part == "model" and models == [entry.tree] and entry.name not in own:
            tensors[key] = replace(entry, tree=select)
            rest.append(entry.name)
    shown = list_first(map(repr, rest), len(rest), _SHOWN)
    note = f"{counted(len(rest), 'tensor')} without an average are as training has them: {shown}"
    return replace(index, tensors=tensors), select, [note] if rest else []


def _step_named(found: ResolvedSource, location: str) -> int | None:
    """Returns the step in the name of the chosen file or folder."""
    name = step_of_files(found.units[0].candidate)
    if name is not None and "epoch" not in name.kind:
        return name.number
    return parse_step(found.folder or location)


_DEEP = 64  # folders below a prefix; more than any path has


def check_path(text: PathLike, what: str) -> None:
    """Refuses paths that no system call would take, before one fails on them."""
    if not os.fspath(text):
        raise UsageError("is empty, where a path was expected", where=what)
    if is_url(text):
        return
    path = local_path(text)
    try:
        path.resolve().is_dir()
    except PermissionError as error:
        raise AccessError(
            "cannot be read: permission denied",
            where=os.fspath(text),
            hint="see who may enter it and the folders above it: `ls -ld`",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        shown = os.fspath(text)[:80]
        raise UsageError(f"is no usable path: {reason}", where=f"{what} {shown!r}") from error


def open_folder(stack: ExitStack, place: PathLike, option: str) -> Source:
    """Opens a directory, or a prefix that holds something.

    Args:
        stack: Closes it.
        place: The place as the user named it.
        option: The option, for messages.
    """
    check_path(place, option)
    if not is_url(place):
        if not local_path(place).is_dir():
            text, hint = absent_folder(place, describe_hub_name(place))
            raise NotACheckpointError(text, where=f"{option} {place}", hint=hint)
        return stack.enter_context(LocalSource(local_path(place)))
    source = stack.enter_context(open_source(place))
    if not _holds_something(source):
        raise NotACheckpointError("nothing is there", where=f"{option} {place}")
    return source


def open_root(stack: ExitStack, place: PathLike) -> tuple[Source, str | None]:
    """Opens the folder to search; returns it with the name of the file if the place is a file."""
    if is_url(place):
        return _open_remote_root(stack, place_of(place))
    path = local_path(place)
    if path.is_dir():
        return stack.enter_context(LocalSource(path)), None
    if path.is_file():
        return stack.enter_context(LocalSource(path.parent)), path.name
    if path.exists():
        raise NotACheckpointError("neither a file nor a directory", where=os.fspath(place))
    hint = hint_at_near(place, describe_hub_name(place))
    raise NotACheckpointError("no such file or directory", where=os.fspath(place), hint=hint)


def _open_remote_root(stack: ExitStack, place: Place) -> tuple[Source, str | None]:
    source = stack.enter_context(open_source(place))
    if _holds_something(source):
        return source, None
    parent, name = posixpath.split(place)
    if not parent.endswith("/"):  # nothing is above `s3://bucket`
        above = stack.enter_context(open_source(place.beside(parent)))
        if is_there(above, name):
            return above, name
    hint = describe_hub_name(place)
    raise NotACheckpointError("there is no object at or below this URL", where=place, hint=hint)


def open_others(stack: ExitStack, first: Place, also: Sequence[PathLike]) -> Iterator[Source]:
    """Opens the further directories of a checkpoint, each place once.

    Places are compared by what they name: a URL may be written with another endpoint or protocol.

    Yields:
        Folders that are neither the first one nor yielded before.
    """
    for place in also:
        check_path(place, "--also")
    pairs = find_overlaps([first, *also]) if also else ()
    repeated = {max(pair) for *pair, how in pairs if how is PlaceRelation.SAME}
    for number, place in enumerate(also, 1):
        if number not in repeated:
            yield open_folder(stack, place, "--also")


def is_folder(place: PathLike) -> bool:
    """Returns whether a place is a directory, or a prefix that holds something."""
    if not is_url(place):
        return local_path(place).is_dir()
    with open_source(place) as source:
        return _holds_something(source)


def is_anything(place: PathLike) -> bool:
    """Returns whether there is a directory or a file."""
    if not is_url(place):
        return local_path(place).exists()
    try:
        with ExitStack() as stack:
            _open_remote_root(stack, place_of(place))
    except NotACheckpointError:
        return False
    return True


def make_absolute(place: PathLike) -> str:
    """Returns a path from the root of its file system on; a URL is absolute."""
    return os.fspath(place) if is_url(place) else str(local_path(place).absolute())


def resolve_path(place: PathLike) -> str:
    """Returns a path with its links followed; object stores have none."""
    return os.fspath(place) if is_url(place) else str(local_path(place).resolve())


def _holds_something(source: Source) -> bool:
    return next(iter(source.walk(_DEEP)), None) is not None or is_there(source, MANIFEST_NAME)
