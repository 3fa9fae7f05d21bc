"""Finds the checkpoint that a path stands for, among all that are in its folders.

list → recognise → unite → choose. Readers recognise candidates by names of files. A step of a run
is a folder, or a file such as `epoch=0-step=500.ckpt` and `iter_2000.pth`. The newest complete one
is taken, or that which Megatron-LM's file `latest_checkpointed_iteration.txt` names; verl, slime
and Megatron-Bridge write this file too. nanotron's file is `latest.txt`. One that is named as the
last counts by the step in its contents. All other candidates in one folder are returned together;
`--select` chooses one of them. Indexes are kept once they are parsed, since choosing may need them.

A node's copy of a step has a manifest that names the ranks that wrote it, and their records. From
the records of all copies the index of every part of the step is merged, as a commit does.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    CannotPlanError,
    CkptkitError,
    FormatError,
    InputError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
)
from ckptkit.core.frameworks import (
    COPIES,
    COUNTERS,
    MEGATRON_OF_VERL,
    is_optimizer_folder,
    is_unit_folder,
)
from ckptkit.core.index import Problem, TensorIndex
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    NODE_RANKS,
    TRAINING,
    FileRecord,
    Manifest,
    source_of_all,
)
from ckptkit.core.model_configs import parse_json_object
from ckptkit.core.text import Aside, counted, list_first, quote
from ckptkit.core.threads import memory_in_use_bytes
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import (
    ITSELF,
    RELEASE,
    TRACKERS,
    UNFINISHED,
    find_step,
    find_step_files,
    is_called_last,
    names_step,
    parse_step,
    parse_step_name,
    read_tag,
    step_of_files,
)
from ckptkit.formats.others.torch_checkpointing import add_numbered_ranks
from ckptkit.formats.parsing import is_count, read_limited
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.registry import (
    describe_missing_files,
    estimate_parsing_bytes,
    find_unread,
    is_certain,
    is_model,
    main_file,
    main_path,
    recognise,
)
from ckptkit.formats.safetensors.hf_shards import (
    CONSOLIDATED_FOLDER,
    SHARDED_FOLDER,
    HfShardsReader,
)
from ckptkit.formats.torch_files import TorchOptimizerReader
from ckptkit.formats.zero.reader import UniversalReader, ZeroReader
from ckptkit.plan.selection import find_number
from ckptkit.runs.find_run import (
    ENTER_HINT,
    find_steps_without_weights,
    list_closed,
    make_not_found,
)
from ckptkit.runs.retention import abandoned_folders
from ckptkit.runs.step_manifests import StepManifests, list_files, prefetch_headers, step_folder
from ckptkit.runs.steps import RunStep, series_of, step_of_source
from ckptkit.storage.base import Source
from ckptkit.storage.locations import path_within, relative_path
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.overlay import OverlaySource

_SECONDARY = {ForeignReader.name, ZeroReader.name, UniversalReader.name}  # ignored next to a model
_SHARDS = HfShardsReader.name  # noted where they are compared with the model next to them
_OF_RANKS = RankFilesReader.name
_OF_OPTIMIZER = TorchOptimizerReader.name
_MODEL_FORMATS = {"safetensors", "torch", _SHARDS}  # which `save_model` of a framework writes
_FINAL = re.compile(r"final", re.IGNORECASE)
# Of Trainer and accelerate.
_SHARDED_MODEL = re.compile(r"pytorch_model_fsdp_\d+|pytorch_model(_\d+)?")
# Folders in that of a run, in which its steps are: of accelerate, Lightning, NeMo and others.
_IN_A_RUN = re.compile(r"checkpoints?|ckpts?|weights|lightning_logs|version_\d+")
_OF_STATES = re.compile(
    r"(^|[-_])(optim|sched|scheduler|lr|rng|random|scaler|sampler|state)", re.IGNORECASE
)
# The states of optimizers and generators, as LeRobot saves them.
_STATE_FILE = re.compile(
    r"(optim\w*|(lr_)?scheduler|rng|random|scaler|sampler)(_states?)?\.safetensors"
)
# Meta's and Mistral's files that a model was made of, in its folder on the Hub or below it.
_ORIGINAL, _CONSOLIDATED, _TRANSFORMERS = "original", "consolidated", "model"
_LATEST = {ZeroReader.name: "latest", UniversalReader.name: "latest_universal"}
TAG_FILES = frozenset(_LATEST.values())
"""Files that name a tag, in the folder of the tags' folders."""
_CONVERTED = re.compile(r"(.+?)[-_.]?(?:universal|ucp|uni)", re.IGNORECASE)
_NEMO_UNFINISHED = "-unfinished"  # its file has the name of the folder with this ending
_LOST = "lost+found"  # of ext4, which root alone may enter
_MOST_POINTER_BYTES = 4096
_NAMED_RANKS = 8
_LISTED = 7  # checkpoints that a message still lists in full


class CheckpointUnit(Struct, frozen=True):
    """One or several state dicts that were written together."""

    label: str  # its name for `--select`: its folder under the step, or its main file
    candidate: Candidate
    is_optimizer: bool  # whether the folder is named as that of a model's optimizer


class FoundCheckpoint(Struct, frozen=True):
    """A checkpoint under a path where none is chosen."""

    select: str
    format: str  # its format, or those of its parts
    step: int | None  # the number of the step that it is; None for others
    problem: str = ""  # what it lacks; empty if it is whole


class ResolvedSource(Struct, frozen=True):
    """The checkpoint that a path stands for."""

    folder: str  # the step's folder relative to the source's root; empty for the root
    units: tuple[CheckpointUnit, ...]
    # the rest of the selection, for a state dict inside the units, or None
    select: str | None = None
    notes: tuple[str, ...] = ()  # what was passed over, and why
    # steps that were passed over though their saves had ended: what each lacks
    damaged: Mapping[str, str] = field(default_factory=dict)
    # all steps of the run, the newest last; relative to the source's root
    steps: tuple[str, ...] = ()
    # models that are beside the steps and no part of one: what `--select` takes each by, with
    # what it lacks, which is empty if it is whole
    finals: Mapping[str, str] = field(default_factory=dict)


_Steps = dict[str, list[Candidate]]


class Search:
    """The candidates in the folders of a source, and the choice among them.

    Attributes:
        source: The folders, read as one.
        location: Their path as the user typed it.
        only: The file in them that the path is; None for a folder.
        paths: Their files, once they are listed, and what was made of several.
        listed: Those that are on a disk or in a store.
        has_passed_over: Whether a step was looked at that lacks something.
        candidates: The checkpoints among them.
        steps: The manifests of steps that ckptkit saved.
    """

    def __init__(
        self,
        source: OverlaySource,
        location: str,
        only: str | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.source = source
        self.location = location
        self.only = only
        self.paths: Sequence[str] = ()
        self.listed: frozenset[str] = frozenset()
        self.candidates: list[Candidate] = []
        self.steps = StepManifests(source, ())
        self.has_passed_over = False
        self._known: frozenset[str] = frozenset()  # the same as `paths`
        self._recognised: frozenset[str] = frozenset()  # the files of all models among them
        self._limit_bytes = limit_bytes
        self._indexes: dict[tuple[str, str, tuple[str, ...]], TensorIndex] = {}
        self._numbers: dict[str, int] = {}  # of steps that are files, or named as the last

    def list_candidates(self) -> list[Candidate]:
        """Recognises checkpoints; steps in parts are replaced by the whole that the parts make."""
        self.paths = list_files(self.source)
        self.listed = frozenset(self.paths)
        candidates = recognise(self.paths)
        folders = self.source.folders
        if len(folders) > 1:
            recognised = [recognise(list_files(folder)) for folder in folders]
            steps = [{step_folder(c.folder) for c in own} for own in recognised]
            for number, own in enumerate(steps[1:], 1):
                if own.isdisjoint(set().union(*steps[:number], *steps[number + 1 :])):
                    raise NotACheckpointError(
                        "holds no part of a checkpoint under a path that is also in"
                        f" {folders[0].location}",
                        where=f"--also {folders[number].location}",
                        hint="name the directory that corresponds to SRC: files that belong"
                        " together have the same paths in both",
                    )
        files, without, problems = _unite(self.source, [step_folder(c.folder) for c in candidates])
        if files:
            self.source.lay_over(files, without=without)
            self.paths = list_files(self.source)
            candidates = recognise(self.paths)
        self._known = frozenset(self.paths)
        candidates = add_numbered_ranks(self.source, candidates, self.paths)
        models = (c for c in candidates if c.format != _OF_OPTIMIZER)
        self._recognised = frozenset(path for model in models for path in model.files)
        if self.only is not None:
            candidates = [c for c in candidates if self.only in c.files]
        self.candidates = [c for c in candidates if not self._is_pointer(c, candidates)]
        self.steps = StepManifests(self.source, self.candidates, problems)
        return self.candidates

    def list_all(self) -> Iterator[FoundCheckpoint]:
        """Yields all checkpoints: steps, run by run and the newest first, and others."""
        for found in self._list_in(self._drop_parts_of_steps(self.list_candidates()), ""):
            yield found
            self._indexes.clear()  # all are looked at: few are kept at a time

    def find(self, select: str | None) -> ResolvedSource:
        """Finds the checkpoint that the path and a selection stand for."""
        candidates, older_tags = self.list_candidates(), tuple[str, ...]()
        folders = self.source.folders if self.only is None else ()
        if select is None:
            candidates, older_tags = _drop_older_tags(self.source, candidates)
        self.candidates = candidates
        among = self._drop_parts_of_steps(candidates)
        if not among:
            paths = self.paths if self.only is None else (self.only,)
            unread = find_unread(self.source, paths)
            raise unread or make_not_found(folders, paths, self.location)
        links = self.source.linked_folders() if self.only is None else ()
        found = self.resolve(among, select, links)
        closed = list_closed(folders) if any(folder.closed_folders for folder in folders) else {}
        if closed:
            found = self._check_closed(found, closed, select)
        return replace(found, notes=(*older_tags, *found.notes))

    def _drop_parts_of_steps(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Drops what is in the side folders of steps, and files of optimizers without a model."""
        among = self.steps.without_side_files(candidates)
        folders = {one.folder for one in among if one.format != _OF_OPTIMIZER}
        return [one for one in among if one.format != _OF_OPTIMIZER or one.folder in folders]

    def index(self, candidate: Candidate) -> TensorIndex:
        """Parses the headers of a candidate, once."""
        key = (candidate.format, candidate.folder, candidate.files)
        if key not in self._indexes:
            needed = memory_in_use_bytes() + estimate_parsing_bytes(self.source, candidate)
            if self._limit_bytes is not None and needed > self._limit_bytes:
                raise NoSpaceError(
                    f"parsing the index takes about {needed:,} bytes against {self._limit_bytes:,}",
                    where="--memory-limit",
                    hint=f"allow at least {needed:,} bytes",
                )
            prefetch_headers(self.source, candidate)
            self._indexes[key] = self.steps.read_index(candidate)
        return self._indexes[key]

    def describe_missing(self, candidate: Candidate) -> str:
        """Says what a candidate lacks; empty if it is whole."""
        missing = self.steps.lacks(candidate)
        for folder in (candidate.folder, posixpath.dirname(candidate.folder)):
            if not missing and f"{folder}{_NEMO_UNFINISHED}" in self._known:
                name = f"{posixpath.basename(folder)}{_NEMO_UNFINISHED}"
                missing = f"the file '{name}' exists: {UNFINISHED}"
        if not missing:
            try:
                missing = describe_missing_files(self.index(candidate))
            except InputError as error:
                missing = str(error.message)
        self.has_passed_over |= bool(missing)
        return missing

    def read_step(self, candidate: Candidate) -> int | None:
        """Returns the step in a candidate's contents, or None."""
        try:
            step = self.index(candidate).run.step
        except InputError:
            return None
        above = posixpath.dirname(candidate.folder)
        for folder, (file, key) in product((candidate.folder, above), COUNTERS):
            path = posixpath.join(folder, file)
            if step is None and path in self._known:
                with suppress(InputError):
                    data = read_limited(self.source, path, MAX_JSON_BYTES, "state of a run")
                    number = parse_json_object(data, where=path).get(key)
                    step = number if is_count(number) else None
        return step

    def read_tracker(self, run: str) -> tuple[str, str] | None:
        """Returns which of `TRACKERS` a folder has, and what it says, such as `release`."""
        for file in TRACKERS:
            path = posixpath.join(run, file)
            tag = read_tag(self.source, path) if path in self._known else None
            # Other programs may have a file `latest.txt`, too.
            if tag is not None and (file == TRACKERS[0] or tag.isdigit()):
                return file, tag
        return None

    def find_rolled_back(self, steps: Sequence[str]) -> frozenset[str]:
        """Returns those of some steps that training went back from, by their folders."""
        series: dict[tuple[str, str], list[RunStep]] = {}
        for folder in steps if len(steps) > 1 else ():
            step = parse_step(folder)
            if step is None:
                continue
            manifest = self.steps.manifest(folder)
            if manifest is not None:
                saved = step_of_source(step, folder, manifest.source)
            else:
                names = (path for path in self.paths if posixpath.dirname(path) == folder)
                times = [self.source.stat(path).modified for path in names]
                saved = RunStep(step, folder, has_manifest=False, modified=max(times, default=0.0))
            place = posixpath.dirname(folder), series_of(posixpath.basename(folder))
            series.setdefault(place, []).append(saved)
        return frozenset[str]().union(
            *(abandoned_folders(self.source, own) for own in series.values())
        )

    def _is_pointer(self, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """Returns whether a candidate is a link to another one, or a text in the place of one."""
        path = candidate.files[0]
        if len(candidate.files) > 1 or not is_called_last(path):
            return False
        beside = (one.files[0] for one in others if one.folder == candidate.folder)
        with suppress(InputError):
            identity = self.source.stat(path).identity
            if any(self.source.stat(p).identity == identity for p in beside if p != path):
                return True
        try:  # a copy of a link is a text; a link to what is no longer there cannot be read
            size = self.source.stat(path).size_bytes
            data = self.source.read(path, 0, size) if size <= _MOST_POINTER_BYTES else b""
            step = posixpath.basename(data.decode().strip())
        except MissingFileError:
            return True
        except (InputError, UnicodeDecodeError):
            return False
        if parse_step(step) is None:
            return False
        if self.only is not None:
            raise NotACheckpointError(
                f"is a text that names {step!r}, as a copy of a link is",
                where=self.location,
                hint=f"pass {posixpath.join(posixpath.dirname(self.location), step)}",
            )
        return True

    def resolve(
        self, candidates: Sequence[Candidate], select: str | None, links: Sequence[str] = ()
    ) -> ResolvedSource:
        """Decides which candidates, of which there is one at least, the path stands for.

        Folders that are links were not searched: one that is a newer step is refused.
        """
        found = self._choose(candidates, "", select)
        chosen = parse_step(found.folder) if found.folder else None
        newer = [link for link in links if chosen is not None and (parse_step(link) or 0) > chosen]
        if newer and select is None and not self.read_tracker(posixpath.dirname(found.folder)):
            raise AmbiguousSourceError(
                f"{newer[-1]!r} is newer than {found.folder!r}, but a link, which is not followed",
                where=self.location,
                hint=f"give its own path: {posixpath.join(self.location, newer[-1])}",
            )
        return found

    def _choose(
        self, candidates: Sequence[Candidate], base: str, select: str | None
    ) -> ResolvedSource:
        """Decides among candidates that are all in the folder `base`, or are that file."""
        if len(candidates) == 1 and base in candidates[0].files:
            folder = candidates[0].folder
            return ResolvedSource(folder, _units(candidates, folder), select)
        all_steps, others = self._split_steps(candidates, base)
        kept = drop_companions(others)
        units, steps = _units(kept, base), all_steps
        if any(_is_primary(one) and one.folder == base for one in kept):
            # What is named like a step of DeepSpeed is a part of the step that holds a model.
            # Several are a run, beside whose steps a model was saved, unless this is a step.
            parts = {f for f, own in steps.items() if {one.format for one in own} <= _SECONDARY}
            if self._is_within_step(base) or len(parts) <= 1:
                steps = {f: own for f, own in steps.items() if f not in parts}
        finals = self._find_finals(steps, units, base)
        if select is not None:
            chosen = self._select(all_steps, _units(others, base), base, select)
            if chosen is not None and finals:
                ordered = tuple(sorted(steps, key=self._sort_key))
                return replace(chosen, steps=ordered, finals=finals)
            if chosen is not None:
                return chosen
            is_itself = posixpath.basename(select) == ITSELF
            if (is_itself and candidates) or (steps and find_step(select) == select):
                home = posixpath.dirname(select)
                folder = posixpath.join(base, select)
                held = [path for path in self.paths if _is_below(path, folder)]
                unread = None if is_itself else find_unread(self.source, held, folder)
                if unread is not None:
                    raise unread
                itself = f"{home!r} itself" if home else "the folder itself"
                text = f"no model in {itself}" if is_itself else f"no step {select!r}"
                newest_first = sorted(all_steps, key=self._sort_key, reverse=True)
                names = [relative_path(step, base) for step in newest_first]
                names += _name_models(units, base)
                found = self._list_in(candidates, base)
                whole = [one.select for one in islice((o for o in found if not o.problem), 1)]
                raise CannotPlanError(
                    f"holds {text}; found {list_first(names)}",
                    where=self.location,
                    hint=self._propose(whole),
                )
        if finals:  # a selection may name a part of the newest step
            return self._choose_newest(steps, select, finals)
        runs = {relative_path(posixpath.dirname(folder), base) for folder in steps}
        if len(runs) + bool(units) > 1:
            models = _name_models(units, base)
            labels = []
            for label, own in models.items():
                # `.` says nothing without the files that it stands for.
                inside = relative_path(own[0].folder, base)
                files = main_file(own[0]) if inside == ITSELF else inside
                labels.append(f"{label!r} ({files})" if label == ITSELF else repr(label))
            whole = [n for n, own in models.items() if not any(map(self.describe_missing, own))]
            for run in sorted(runs):
                label, is_whole = self._describe_run(steps, run, base)
                labels.append(repr(label))
                whole += [label] if is_whole else []
            listed, hint = ", ".join(labels), self._propose(whole, ", or give its path")
            if len(labels) > _LISTED:
                command = shlex.join(["ckptkit", "inspect", self.location])
                hint = f"{hint}; `{command}` lists them"
            if select is None:
                text = f"holds several checkpoints: {listed}"
                raise AmbiguousSourceError(text, where=self.location, hint=hint)
            text = f"holds no {select!r}; found {listed}"
            raise CannotPlanError(text, where=self.location, hint=hint)
        if steps:
            return self._choose_newest(steps, select)
        passed = [c for folder in all_steps for c in all_steps[folder]]
        ignored = [
            c for c in (*others, *passed) if not (c in kept or c.format == _SHARDS or _is_state(c))
        ]
        listed = ", ".join(candidate.files[0] for candidate in ignored)
        notes = (f"left alone beside the model: {listed}",) if ignored else ()
        return ResolvedSource(base, units, select, notes)

    def _propose(self, whole: Sequence[str], more: str = "") -> str:
        """Returns the hint for several checkpoints; what is not whole is not proposed."""
        if not whole:
            return f"none of them is whole: see `ckptkit inspect {self.location}`"
        last = f", or --select {whole[-1]}" if whole[1:] else ""
        return f"choose one with --select {whole[0]}{last}{more}"

    def _list_in(self, candidates: Sequence[Candidate], base: str) -> Iterator[FoundCheckpoint]:
        """Yields the checkpoints in a folder; a step that holds several is listed as these."""
        steps, others = self._split_steps(candidates, base)
        newest_first = sorted(steps, key=self._sort_key, reverse=True)
        for folder in sorted(newest_first, key=posixpath.dirname):
            try:
                _, problem = self._resolve_step(steps[folder], folder, None)
            except AmbiguousSourceError:
                yield from self._list_in(steps[folder], folder)
                continue
            formats = dict.fromkeys(candidate.format for candidate in steps[folder])
            yield FoundCheckpoint(folder, " + ".join(formats), self._sort_key(folder)[0], problem)
        kept = drop_companions(others)
        units = _units([c for c in others if c in kept or c.format == _SHARDS], base)
        for label, inside in _name_models(units, base).items():
            problem = next(filter(None, map(self.describe_missing, inside)), "")
            formats = dict.fromkeys(candidate.format for candidate in inside)
            yield FoundCheckpoint(posixpath.join(base, label), " + ".join(formats), None, problem)

    def _select(
        self, steps: _Steps, units: Sequence[CheckpointUnit], base: str, select: str
    ) -> ResolvedSource | None:
        """Follows a selection of the folder itself, a step, a run or a unit; None for others."""
        if posixpath.basename(select) == ITSELF:
            # Of several state dicts in the folder, that without a name is meant.
            home = posixpath.join(base, posixpath.dirname(select)).rstrip("/")
            kept = drop_companions([unit.candidate for unit in units])
            own = [u for u in units if u.candidate in kept and _is_in_run(u.candidate, home)]
            own = [unit for unit in own if _is_final(unit.candidate, home)] or own
            if not all(unit.is_optimizer for unit in own):
                own += [
                    unit
                    for unit in units
                    if unit.is_optimizer and posixpath.dirname(unit.candidate.folder) == home
                ]
                return ResolvedSource(base, tuple(dict.fromkeys(own)), ITSELF)
        for folder, inside in steps.items():
            rest = path_within(select, relative_path(folder, base))
            if rest is not None:
                return self._choose(inside, folder, rest or None)
        if select != ITSELF:
            run = {f for f in steps if relative_path(posixpath.dirname(f), base) == select}
            if run:
                return self._choose_newest({f: steps[f] for f in steps if f in run}, None)
        # A folder of a unit can be in that of another one.
        for unit in sorted(units, key=lambda unit: -len(unit.label)):
            rest = path_within(select, unit.label)
            if rest is None:
                continue
            # The optimizer's file in the folder of a model, with its number, belongs to it.
            number = find_number(main_file(unit.candidate))
            optimizers = (
                other
                for other in units
                if other.candidate.format == _OF_OPTIMIZER
                and other is not unit
                and other.candidate.folder == unit.candidate.folder
                and find_number(other.candidate.files[0]) == number
            )
            return ResolvedSource(base, (unit, *optimizers), rest or None)
        folder = posixpath.join(base, select)
        below = [u.candidate for u in units if _is_below(u.candidate.folder, folder)]
        return self._choose(below, folder, None) if below and select else None

    def _split_steps(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Splits candidates into steps, which are folders and files, and others."""
        folders: _Steps = {}
        others: list[Candidate] = []
        for candidate in candidates:
            for folder in _folders_to(candidate.folder, base):
                above, name = posixpath.split(folder)
                if (
                    self.read_tracker(above) is not None
                    if name == RELEASE
                    else parse_step_name(name) is not None
                ):
                    folders.setdefault(folder, []).append(candidate)
                    break
            else:
                others.append(candidate)
        named = find_step_files(others)
        numbers = {path: number for path, (number, _) in named.items()}
        files = {path: [candidate] for path, (_, candidate) in named.items()}
        lasts: _Steps = {}
        rest = []
        for candidate in others:
            # The file, or the folder, that is named as the last.
            home = ""
            if folders or files:
                home = next(filter(is_called_last, _folders_to(candidate.folder, base)), "")
                if step_of_files(candidate) is None and is_called_last(candidate.files[0]):
                    home = candidate.files[0]
            if home:
                lasts.setdefault(home, []).append(candidate)
            elif [candidate] not in files.values():
                rest.append(candidate)
        for home, inside in lasts.items():
            number = next(filter(None, map(self.read_step, inside)), None)
            if number is None:
                rest += inside
            else:
                numbers[home], files[home] = number, inside
        # Beside the model in a step, files with its number are parts of the step; a lone file with
        # a number is what the model was made of, but for those of Lightning.
        is_part = (
            self._is_within_step(base)
            or any(_OF_STATES.search(posixpath.basename(path)) for path in files)
            or (len(files) == 1 and not min(files).endswith(".ckpt"))
        )
        if is_part and any(map(_is_primary, rest)):
            return folders, others
        self._numbers |= numbers
        return folders | files, rest

    def _is_within_step(self, base: str) -> bool:
        """Returns whether a folder, or the location itself, is a step or in one."""
        name = posixpath.basename(self.location.rstrip("/"))
        return bool(base) or (parse_step(name) is not None and not name.isdigit())

    def _find_finals(
        self, steps: _Steps, units: Sequence[CheckpointUnit], base: str
    ) -> dict[str, str]:
        """Returns the models that training left beside the steps of one run, with what they lack.

        Nothing is returned where the units may be another run, or a step without a number.
        """
        runs = {posixpath.dirname(folder) for folder in steps}
        if len(runs) != 1 or not units or self._is_within_step(base):
            return {}
        (run,) = homes = list(runs)
        while _IN_A_RUN.fullmatch(posixpath.basename(homes[-1])):
            homes.append(posixpath.dirname(homes[-1]))
        finals: dict[str, str] = {}
        for unit in units:
            folder = unit.candidate.folder
            is_beside = any(_is_below(folder, home) for home in homes) or _is_below(run, folder)
            if not is_beside or not any(_is_final(unit.candidate, home) for home in (base, run)):
                return {}
            label = next(
                (
                    posixpath.join(home.removeprefix(base).strip("/"), ITSELF)
                    for home in (base, run)
                    if _is_in_run(unit.candidate, home)
                ),
                unit.label,
            )
            finals[label] = finals.get(label) or self.describe_missing(unit.candidate)
        return finals

    def _sort_key(self, step: str) -> tuple[int, bool, str]:
        """Returns the sort key of a step; one that is named as the last precedes its equal."""
        number = self._numbers.get(step, parse_step(step) or 0)
        return number, not is_called_last(step), step

    def _choose_newest(
        self, steps: _Steps, select: str | None, finals: Mapping[str, str] = MappingProxyType({})
    ) -> ResolvedSource:
        """Takes the newest step that is whole, or that which the run's tracker names."""
        rolled_back: Collection[str] = frozenset()  # only complete steps count
        if self.find_rolled_back(list(steps)):
            inside = {folder: self._resolve_step(steps[folder], folder, select) for folder in steps}
            complete = [f for f, (resolved, missing) in inside.items() if resolved and not missing]
            rolled_back = self.find_rolled_back(complete)
        passed: list[str] = []
        named: list[str] = []
        tracker, tag = self.read_tracker(posixpath.dirname(next(iter(steps)))) or ("", "")
        if tracker:
            named = [step for step in steps if names_step(tag, posixpath.basename(step))]
            passed = [] if named else [f"{tracker!r} names {quote(tag)}, which is not there"]
        ordered = sorted(
            steps, key=lambda s: (s in named, s not in rolled_back, self._sort_key(s))
        )[::-1]
        damaged: dict[str, str] = {}
        for at, folder in enumerate(ordered):
            resolved, missing = self._resolve_step(steps[folder], folder, select)
            # The reader's own error is more precise, so that of an only step is left to it.
            if resolved is not None and (not missing or (len(ordered) == 1 and not finals)):
                passed[:0] = self._describe_without_weights(folder)
                if folder in self._numbers and len(ordered) > 1:
                    passed.insert(0, Aside(f"{folder} was taken"))
                chosen_by = tracker if folder in named else ""
                passed += self._describe_rest(folder, ordered[at + 1 :], rolled_back, chosen_by)
                passed += _describe_finals(folder, finals)
                return replace(
                    resolved,
                    notes=(*passed, *resolved.notes),
                    damaged=damaged,
                    steps=tuple(sorted(steps, key=self._sort_key)),
                    finals=finals,
                )
            if UNFINISHED not in missing:
                damaged[folder] = missing
            passed.append(f"{folder} was passed over: {missing}")
        passed[:0] = self._describe_without_weights(ordered[0])
        whole = next((label for label, lack in finals.items() if not lack), "")
        take = f"take the model beside the steps with --select {whole}; " if whole else ""
        raise NotACheckpointError(
            f"none of {len(ordered)} steps is complete; {passed[0]}",
            where=self.location,
            hint=f"{take}see `ckptkit inspect {self.location}`",
        )

    def _describe_without_weights(self, taken: str) -> list[str]:
        """Returns notes about newer steps of a run in which there is nothing that is read."""
        run, name = posixpath.split(taken)
        above = f"{run}/" if run else ""
        inside = (path for path in self._recognised if path.startswith(above))
        held = {path[len(above) :].split("/", 1)[0] for path in inside}
        number = self._sort_key(taken)[0]
        paths = self.paths
        return list(find_steps_without_weights(self.source, paths, run, held, name, number))

    def _describe_rest(
        self, taken: str, others: Sequence[str], rolled_back: Collection[str], tracker: str
    ) -> Iterator[str]:
        """Yields notes about steps that are left alone; `tracker` names the one that is taken."""
        rest = sorted(others, key=self._sort_key)
        back = [step for step in rest if step in rolled_back]
        if back:
            yield Aside(f"{', '.join(back)} left alone: training went back from it")
        number = self._sort_key(taken)[0]
        rest = [
            step
            for step in rest
            if step not in back and not (is_called_last(step) and self._sort_key(step)[0] == number)
        ]
        newer = [s for s in rest if tracker and self._sort_key(s) > self._sort_key(taken)]
        if newer:
            yield f"{', '.join(newer)} left alone: {tracker!r} names {taken}"
        older = len(rest) - len(newer)
        if older:
            steps = counted(older, "older step")
            yield Aside(f"{posixpath.basename(taken)} is used; {steps} left alone")

    def _resolve_step(
        self, candidates: Sequence[Candidate], folder: str, select: str | None
    ) -> tuple[ResolvedSource | None, str]:
        """Returns the contents of a step, and what it lacks."""
        try:
            resolved = self._choose(candidates, folder, select)
        except NotACheckpointError as error:
            return None, error.message
        except AmbiguousSourceError:
            lacking = list(map(self.describe_missing, candidates))
            if not all(lacking):
                raise
            return None, lacking[0]
        missing = (self.describe_missing(unit.candidate) for unit in resolved.units)
        return resolved, next(filter(None, missing), "")

    def _describe_run(self, steps: _Steps, run: str, base: str) -> tuple[str, bool]:
        """Returns what `--select` takes a run by, and whether a step to take is in it.

        It is its folder; for the run in the folder `base` itself, the newest of its steps that is
        whole, or else the newest.
        """
        own = [folder for folder in steps if relative_path(posixpath.dirname(folder), base) == run]
        own.sort(key=self._sort_key, reverse=True)
        whole = None
        with suppress(AmbiguousSourceError):
            whole = next((f for f in own if not self._resolve_step(steps[f], f, None)[1]), None)
        label = relative_path(whole or own[0], base) if run == ITSELF else run
        return label, whole is not None

    def _check_closed(
        self, found: ResolvedSource, closed: Mapping[str, str], select: str | None
    ) -> ResolvedSource:
        """Refuses a choice that a folder which may not be entered could change.

        It may be a newer step, or hold a part of the chosen checkpoint. Others, such as
        `lost+found` and those of other users, do not matter.
        """
        labels = {found.folder, *(posixpath.join(found.folder, unit.label) for unit in found.units)}
        called = f"{select or ''}/"
        named = max((n for n in labels if n and called.startswith(f"{n}/")), key=len, default="")

        def is_tracked(step: str) -> bool:
            run, name = posixpath.split(step)
            tracked = self.read_tracker(run)
            return tracked is not None and names_step(tracked[1], name)

        others = []
        for path, location in closed.items():
            named_like_steps = (
                f
                for f in _folders_to(path, "")
                if parse_step(posixpath.basename(f)) is not None or is_tracked(f)
            )
            step = next(named_like_steps, "")
            is_other = bool(step) and not f"{found.folder}/".startswith(f"{step}/")
            run = posixpath.dirname(found.folder)
            if named:
                matters = path.startswith(f"{named}/")
            elif is_other and found.folder and posixpath.dirname(step) == run:
                matters = not is_tracked(found.folder)
            elif is_other:  # a number alone names a step only beside others
                matters = not posixpath.basename(step).isdigit()
            else:
                matters = bool(step) or _is_part(path, found, location)
            if matters:
                whole = "the step to take" if is_other else "the checkpoint"
                what = whole if is_other and path == step else f"a part of {whole}"
                more = "; to take another step, pass its own path" if is_other else ""
                raise AccessError(
                    f"cannot be read: permission denied; it may be {what}",
                    where=posixpath.join(location, path),
                    hint=f"{ENTER_HINT}{more}",
                )
            if posixpath.basename(path) != _LOST:
                others.append(path)
        notes = [Aside(f"left alone, since they may not be entered: {', '.join(others)}")]
        return replace(found, notes=(*found.notes, *notes)) if others else found


def _is_part(path: str, found: ResolvedSource, location: str) -> bool:
    """Returns whether a closed folder in no step may belong to a checkpoint."""
    if is_unit_folder(posixpath.basename(path)):
        return True
    if not found.folder and parse_step(Path(location).absolute().name) is not None:
        return True
    for candidate in (unit.candidate for unit in found.units):
        inside = f"{candidate.folder}/".lstrip("/")
        if path.startswith(inside) and any("/" in f.removeprefix(inside) for f in candidate.files):
            return True
    return False


def drop_companions(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops the companions of a readable model.

    These are single `.pt` files, formats that are not read, and the same model in another form,
    such as the `.bin` files of a model in safetensors.
    """
    safe = {c.folder for c in candidates if c.format == "safetensors" and is_model(c)}
    leftover = [c for c in candidates if is_leftover(c, safe)]
    has_model = bool(safe) or any(
        c.format in {"dcp", _SHARDS} or (c.format == "torch" and is_model(c)) for c in candidates
    )
    of_ranks = {c.folder for c in candidates if c.format == _OF_RANKS}
    by_transformers = {c.folder for c in candidates if main_file(c).startswith(_TRANSFORMERS)}

    def is_kept(candidate: Candidate) -> bool:
        above, name = posixpath.split(candidate.folder)
        original = COPIES.get(name)
        if any(
            candidate.format != one.format
            and _is_below(one.folder, above)
            and _is_of(one, original)
            for one in candidates
        ):
            return False
        if _is_state(candidate):
            return all(map(_is_state, candidates))
        place = above if name == _ORIGINAL else candidate.folder
        is_original = main_file(candidate).startswith(_CONSOLIDATED)
        if is_original and place in safe and place in by_transformers:
            return False
        if candidate.format in _SECONDARY or candidate in leftover:
            return not has_model
        if candidate.format != "torch":
            return True
        has_better = has_model or bool(of_ranks)
        return candidate.folder not in safe if is_model(candidate) else not has_better

    return [candidate for candidate in candidates if is_kept(candidate)]


def _drop_older_tags(
    source: Source, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Drops all tags but the one that `latest` names, where tags are not numbered by step.

    Universal checkpoints next to the tags from which they were made are dropped too.
    """
    zero = {candidate.folder for candidate in candidates if candidate.format == ZeroReader.name}
    dropped = [
        candidate
        for candidate in candidates
        if candidate.format == UniversalReader.name
        and (match := _CONVERTED.fullmatch(candidate.folder)) is not None
        and match[1] in zero
    ]
    notes = [f"{c.folder!r} was made of a checkpoint beside it, and left alone" for c in dropped]
    runs: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.format in _LATEST and candidate.folder and candidate not in dropped:
            runs[posixpath.dirname(candidate.folder), candidate.format].append(candidate)
    for (run, name), tags in runs.items():
        file = _LATEST[name]
        names = [posixpath.basename(tag.folder) for tag in tags]
        # Tags may be named after steps, or after one of a step's models.
        are_numbered = all(parse_step(tag) is not None or is_unit_folder(tag) for tag in names)
        has_other_names = len(tags) > 1 and not are_numbered
        latest = read_tag(source, posixpath.join(run, file)) if has_other_names else None
        others = [tag for tag in tags if posixpath.basename(tag.folder) != latest]
        if len(others) == len(tags) - 1:
            dropped += others
            folders = ", ".join(repr(tag.folder) for tag in others)
            notes.append(f"'{file}' names {latest!r}; left alone: {folders}")
    return [candidate for candidate in candidates if candidate not in dropped], tuple(notes)


def is_leftover(candidate: Candidate, models: Collection[str]) -> bool:
    """Returns whether a candidate is the shards of a model in safetensors in these folders."""
    if candidate.format != _SHARDS:
        return False
    above, name = posixpath.split(candidate.folder)
    whole = posixpath.join(candidate.folder, CONSOLIDATED_FOLDER)
    return not {candidate.folder, whole}.isdisjoint(models) or (
        name == SHARDED_FOLDER and above in models
    )


def _is_primary(candidate: Candidate) -> bool:
    return is_certain(candidate) and candidate.format not in _SECONDARY


def _is_of(candidate: Candidate, original: str | None) -> bool:
    """Returns whether a candidate has a format, or a file of a name."""
    return original in {candidate.format, *map(posixpath.basename, candidate.files)}


def _is_below(folder: str, above: str) -> bool:
    return posixpath.join("/", folder, "").startswith(posixpath.join("/", above, ""))


def _is_state(candidate: Candidate) -> bool:
    is_single = candidate.format == "safetensors" and len(candidate.files) == 1
    return is_single and _STATE_FILE.fullmatch(main_file(candidate)) is not None


def _is_final(candidate: Candidate, base: str) -> bool:
    """Returns whether a candidate beside steps is a model, and not the state of a training.

    Such a state, as `best` or `last` without a number, may be newer than all steps. FSDP's
    `save_model` writes its shards into the folder of a unit.
    """
    name = posixpath.basename(candidate.folder)
    if any(map(is_called_last, (candidate.files[0], *filter(None, [name])))):
        return False
    if candidate.format in _MODEL_FORMATS:
        return candidate.format != "torch" or is_model(candidate)
    return _is_in_run(candidate, base) or _FINAL.match(name) is not None


def _is_in_run(candidate: Candidate, base: str) -> bool:
    above, name = posixpath.split(candidate.folder)
    return candidate.folder == base or (
        above == base and _SHARDED_MODEL.fullmatch(name) is not None
    )


def _describe_finals(taken: str, finals: Mapping[str, str]) -> Iterator[str]:
    whole = [label for label, lack in finals.items() if not lack]
    if whole:
        names = ", ".join("that of the run's own folder" if n == ITSELF else repr(n) for n in whole)
        models = f"the final {'model' if len(whole) == 1 else 'models'}, {names}"
        takes = f"--select {whole[0]} takes {'it' if len(whole) == 1 else 'the first'}"
        yield Aside(f"{taken} was taken; left alone: {models} ({takes})")
    yield from (f"{label!r} beside the steps is not whole: {k}" for label, k in finals.items() if k)


def _folders_to(folder: str, base: str) -> list[str]:
    """Returns the folders below `base` that lead to a folder, the outermost first, and itself."""
    inside = folder.removeprefix(base).strip("/")
    parts = inside.split("/") if inside else []
    return [posixpath.join(base, *parts[: at + 1]) for at in range(len(parts))]


def _name_models(units: Sequence[CheckpointUnit], base: str) -> dict[str, list[Candidate]]:
    """Returns the models among units, by what `--select` takes each by, below a folder."""
    models = [unit for unit in units if not unit.is_optimizer]
    own = [unit for unit in models if _is_in_run(unit.candidate, base)]
    named: dict[str, list[Candidate]] = {}
    for unit in models:
        above, name = posixpath.split(unit.label)
        label = above if above and _SHARDED_MODEL.fullmatch(name) else unit.label
        if own == [unit] and _is_final(unit.candidate, base):
            label = ITSELF
        named.setdefault(label, []).append(unit.candidate)
    return named


def _units(candidates: Sequence[Candidate], base: str) -> tuple[CheckpointUnit, ...]:
    folders = [one.folder for one in candidates if one.format != _OF_OPTIMIZER]
    units = []
    for candidate in candidates:
        above, name = posixpath.split(candidate.folder)
        home = (
            above
            if name == MEGATRON_OF_VERL and above not in (*folders, base)
            else candidate.folder
        )
        relative = relative_path(home, base)
        is_optimizer = candidate.format == _OF_OPTIMIZER
        label = "" if relative == ITSELF else relative
        if not label or is_optimizer or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, relative_path(main_path(candidate), candidate.folder))
        is_optimizer = is_optimizer or is_optimizer_folder(name)
        units.append(CheckpointUnit(label, candidate, is_optimizer))
    return tuple(units)


def _unite(
    source: OverlaySource, steps: Iterable[str]
) -> tuple[dict[str, bytes], list[str], dict[str, Problem]]:
    """Merges steps that exist only as copies on the disks of nodes.

    Returns:
        Files of the whole steps (manifests, and the index of every unit), folders that the whole
        steps do not have, and why a step cannot be merged, by its folder.
    """
    files: dict[str, bytes] = {}
    without: list[str] = []
    problems: dict[str, Problem] = {}
    for step in dict.fromkeys(steps):
        copies = []
        for folder in source.folders:
            with suppress(CkptkitError):  # reported when the step is read as a whole
                manifest = read_manifest(folder, step)
                if manifest.kind == TRAINING:
                    copies.append((folder, manifest))
        if all(_ranks_of(manifest) is None for _, manifest in copies):
            continue
        try:
            merged, empty = _merge_copies(step, copies, source)
            files |= merged
            without += empty
        except InputError as error:
            path = posixpath.join(step, MANIFEST_NAME)
            at = f", at {error.where}" if error.where else ""
            problems[step] = Problem(error.code, path, f"{error.message}{at}")
    return files, without, problems


def _ranks_of(manifest: Manifest) -> frozenset[int] | None:
    """Returns the ranks whose files a copy has; None where it is a whole step."""
    ranks = manifest.source.get(NODE_RANKS)
    return frozenset(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else None


def _merge_copies(
    step: str, copies: Sequence[tuple[Source, Manifest]], source: OverlaySource
) -> tuple[dict[str, bytes], list[str]]:
    """Returns the files of the whole step, and the folders that it does not have."""
    place, first = copies[0]
    for folder, manifest in copies[1:]:
        saves = [str(one.source.get("attempt")) for one in (first, manifest)]
        if saves[0] != saves[1]:
            raise FormatError(
                f"is of save {saves[0]!r} in {place.location} and of {saves[1]!r} in"
                f" {folder.location}, where copies of one save were expected"
            )
    path = posixpath.join(step, MANIFEST_NAME)
    whole = next((manifest for _, manifest in copies if _ranks_of(manifest) is None), None)
    if whole is not None:
        return {path: whole.to_json()}, []
    # Which ranks there were, and whether the files of all are here.
    world_size = first.source.get("world_size")
    if not isinstance(world_size, int) or world_size < 1:
        raise FormatError("does not say how many ranks there were")
    here = frozenset[int]().union(*(_ranks_of(manifest) or () for _, manifest in copies))
    missing = world_size - len(here.intersection(range(world_size)))
    if missing:
        absent = islice((rank for rank in range(world_size) if rank not in here), _NAMED_RANKS)
        named = ", ".join(map(str, absent))
        more = f" and {missing - _NAMED_RANKS:,} more" if missing > _NAMED_RANKS else ""
        looked = ", ".join(folder.location for folder in source.folders)
        raise MissingFileError(
            f"says that this is a node's copy, and the files of rank{'s'[: missing > 1]}"
            f" {named}{more} of {world_size} are not in {looked}; name the copies of the other"
            " nodes with --also"
        )
    # The index of each unit, as a commit of the whole step would have written it.
    from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, make_metadata
    from ckptkit.writer.merge import Merger, with_findings
    from ckptkit.writer.record import RECORDS_FOLDER, parse_record

    merger = Merger(world_size)
    for rank in range(world_size):
        record = posixpath.join(step, RECORDS_FOLDER, f"{rank}.json")
        where = posixpath.join(source.location, record)
        size = source.stat(record).size_bytes
        merger.add(parse_record(source.read(record, 0, size), where=where), where=where)
    merged = merger.result()
    indexes = {
        posixpath.join(name, METADATA_NAME): make_metadata(unit.tensors, unit.objects)
        for name, unit in merged.units.items()
    }
    # Its manifest. Some entries are known to rank 0 only.
    gone = tuple(f"{name}/" for name in merged.empty)
    records = {
        name: record
        for _, manifest in copies
        for name, record in manifest.files.items()
        if not name.startswith(gone)
    }
    records |= {name: FileRecord(len(data)) for name, data in indexes.items()}
    first = next(manifest for _, manifest in copies if 0 in (_ranks_of(manifest) or ()))
    facts = with_findings(source_of_all(first.source), merged.lost, merged.notes)
    manifest = replace(first, source=facts, files=records)
    below = {posixpath.join(step, name): data for name, data in indexes.items()}
    return {path: manifest.to_json(), **below}, [posixpath.join(step, n) for n in merged.empty]
