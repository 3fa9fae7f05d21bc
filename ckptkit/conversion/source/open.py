"""Opens checkpoints: from a path as the user typed it to an index of the files there.

In order: models that options name, opening and searching, paths, then steps in several parts.

A node's copy of a step has a manifest that names the ranks that wrote it, and their records. From
the records of all copies the index of every part of the step is merged, as a commit does.

Torch's consolidation leaves the shards beside the model. It writes headers first and data later,
drops tensors that its mapping does not name, and writes 0 for tensors without dimensions. So its
model is taken only where it is complete and equals the shards; else the user chooses.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import CONFIG
from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    ChecksumError,
    CkptkitError,
    FormatError,
    HubError,
    HubUnavailableError,
    InputError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.core.index import (
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    NODE_RANKS,
    TRAINING,
    FileRecord,
    Manifest,
    TensorRecord,
    source_of_all,
)
from ckptkit.core.model_configs import parse_json_object, parse_model_config
from ckptkit.core.text import Aside, counted
from ckptkit.core.threads import memory_in_use_bytes
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import (
    ITSELF,
    TRACKERS,
    UNFINISHED,
    CandidateChooser,
    CheckpointUnit,
    FoundCheckpoint,
    ResolvedSource,
    is_called_last,
    is_leftover,
    parse_step,
    read_pointer,
    step_of_files,
)
from ckptkit.formats.optimizer_names import name_states
from ckptkit.formats.others.torch_checkpointing import add_numbered_ranks
from ckptkit.formats.parsing import is_count, list_first, read_limited
from ckptkit.formats.ranks.flat import (
    SLICES,
    ModelParameter,
    compute_vectors,
    find_flat_parameters,
    is_flat,
    unflatten,
)
from ckptkit.formats.registry import (
    describe_missing_files,
    estimate_parsing_bytes,
    list_plug_in_problems,
    recognise,
)
from ckptkit.formats.torch_files import drop_lone_optimizers
from ckptkit.formats.zero.reader import drop_older_tags, read_tag
from ckptkit.plan.coverage import error_of
from ckptkit.plan.selection import model_trees, plain_trees, propose_trees
from ckptkit.plan.weight_kinds import ADAPTER_OF_TORCHTUNE, MERGED_BESIDE
from ckptkit.runs.find_run import absent_folder, check_closed, make_not_found, suggest_path
from ckptkit.runs.local_run import hold_candidates, marker
from ckptkit.runs.retention import abandoned_folders
from ckptkit.runs.step_manifests import StepManifests, list_files, prefetch_headers, step_folder
from ckptkit.runs.steps import RunStep, save_number_of, series_of
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.locations import relative_path
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.place_identity import PlaceRelation, find_overlaps
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

if TYPE_CHECKING:
    from ckptkit.writer.merge import Merged

# As the Hub has it: no name ends with a dot or a dash, has two of them side by side, or ends with
# `.git`.
_NAME = (
    r"(?![^/@]*(?:--|\.\.|\.git(?:[/@]|$)))"
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
)
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}"
_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_OF_HUB = re.compile(rf"hf://(?:{_ID.pattern})/?")
_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>{_NAME}/{_NAME})"
    rf"(?:/tree/(?P<revision>{_REVISION}))?/?"
)
# Of a model from the first years of the Hub, which had no owner; or of the Hub itself.
_OLD_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
    rf"(?!(?:datasets|docs|join|login|models|new|papers|settings|spaces)/?$)(?P<name>{_NAME})/?"
)
_COMMIT_DIGITS = 10


class NamedModel(Struct, frozen=True):
    """The place of a model.

    Attributes:
        place: A folder, or a URL; on the Hub with the commit that the name stands for now.
        notes: Which of several places it is.
    """

    place: Place
    notes: tuple[str, ...] = ()


def find_model(path: PathLike, option: str) -> NamedModel:
    """Returns the place of a model; asks the Hub if the name may be that of a model there.

    A folder with the name goes first. If the Hub is not reached, the cache of `huggingface_hub` is
    searched.
    """
    place = place_of(path)
    named = _ID.fullmatch(place) is not None
    if named and local_path(place).is_file():
        return NamedModel(place)
    if named and local_path(place).exists():
        text = f"{option} {place}: the folder of this name is used; hf://{place} is the model of"
        return NamedModel(place, (Aside(f"{text} this name on the Hub"),))
    match = _ID.fullmatch(place) or _OF_HUB.fullmatch(place) or _PAGE.fullmatch(place)
    if match is None or ".." in place:
        return NamedModel(place)
    repo, revision = match["repo"], match["revision"]
    at_hub = place.beside(f"hf://{repo}" + (f"@{revision}" if revision else ""))
    try:
        pinned = place.beside(f"hf://{_pin(at_hub)}")
    except InputError as error:
        is_unreached = isinstance(error, StorageError) or _is_offline(error)
        cached = _find_cached(repo, revision) if is_unreached else ""
        if cached:
            text = f"{option} {place}: the Hub was not reached; its copy in {cached} is used"
            return NamedModel(Place(cached), (Aside(text),))
        _refuse(error, place, option, repo, is_folder_missing=named)
    commit = pinned.rpartition("@")[2][:_COMMIT_DIGITS]
    if revision is not None and commit == revision[:_COMMIT_DIGITS]:
        return NamedModel(pinned)
    return NamedModel(pinned, (Aside(f"{option} {place}: {repo} on the Hub, commit {commit}"),))


def names_model(text: str) -> bool:
    """Returns whether a text is a folder that is there, or may be the id of a model on the Hub."""
    is_id = _ID.fullmatch(text) is not None and ".." not in text
    return is_id or (bool(text) and not is_url(text) and local_path(text).is_dir())


def find_local(name: str) -> Place | None:
    """Returns the folder of a model on this machine: one of this name, or the cache's; or None."""
    place = place_of(name)
    if is_url(place):
        return None
    if local_path(place).is_dir():
        return place
    match = _ID.fullmatch(place)
    cached = _find_cached(match["repo"], match["revision"]) if match is not None else ""
    return Place(cached) if cached else None


def describe_hub_name(place: PathLike) -> str:
    """Returns the hint for a place that is not there and may name a model on the Hub; or empty."""
    location = os.fspath(place)
    old = _OLD_PAGE.fullmatch(location)
    if old is not None:  # the client of the Hub takes no id without an owner any more
        return f"a model on the Hub is written hf://OWNER/{old['name']}; its page shows the owner"
    match = (_PAGE if is_url(location) else _ID).fullmatch(location)
    if match is None:
        return ""
    revision = f"@{match['revision']}" if match["revision"] else ""
    return f"a model on the Hub is written hf://{match['repo']}{revision}"


def _pin(place: Place) -> str:
    """Returns `org/name@commit`."""
    from ckptkit.storage.remote.errors import as_input_error  # imports of stores are late
    from ckptkit.storage.remote.store import get_store

    store = get_store(place)
    try:
        return store.path_of(place.location).rstrip("/")
    except Exception as error:
        attempts = store.retry_policy.attempts
        raise as_input_error(
            error, where=place.location, options=place.options, attempts=attempts
        ) from error


def _is_offline(error: InputError) -> bool:
    return type(error.__cause__).__name__ == "OfflineModeIsEnabled"


def _find_cached(repo: str, revision: str | None) -> str:
    """Returns the folder of a model in the cache of `huggingface_hub`; empty if there is none."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision, local_files_only=True)
    except Exception:  # noqa: BLE001  which of its errors says so differs between versions
        return ""
    return os.fspath(folder)


def _refuse(
    error: InputError, place: Place, option: str, repo: str, *, is_folder_missing: bool
) -> NoReturn:
    where = f"{option} {place}"
    here = "there is no such folder here, and " if is_folder_missing else ""
    if isinstance(error, StorageError) or _is_offline(error):
        off = "HF_HUB_OFFLINE is set" if _is_offline(error) else "the Hub was not reached"
        raise HubUnavailableError(
            f"{here}{off}",
            where=where,
            hint="pass a folder with the config.json of the model; on a machine with a network,"
            f" `hf download {repo} --exclude '*.safetensors' --local-dir DIR` makes one",
        ) from error
    if isinstance(error, AccessError):
        raise HubError(
            f"{here}the Hub does not give access to {repo}",
            where=where,
            hint="accept the terms on its page, and log in with `hf auth login`, or set HF_TOKEN",
        ) from error
    if isinstance(error, SourceChangedError):
        raise error
    raise NotACheckpointError(
        f"{here}there is no such model, or no such revision of it, on the Hub",
        where=where,
        hint="check the spelling; a private model needs `hf auth login`, or HF_TOKEN",
    ) from error


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


class OpenedCheckpoint(Struct, frozen=True):
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
    """Opens the checkpoint at, or under, a path."""
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


def list_checkpoints(path: PathLike, also: Sequence[PathLike] = ()) -> tuple[FoundCheckpoint, ...]:
    """Returns all checkpoints below a directory; nothing for a file.

    Args:
        path: The directory or prefix.
        also: Further directories, as `open_checkpoint` takes them.
    """
    location = place_of(path)
    with ExitStack() as stack:
        folders, only = _open_folders(stack, location, also)
        source = OverlaySource(folders, compared=(METADATA, MANIFEST_NAME))
        return _Search(source, location, None, None).list_checkpoints() if only is None else ()


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
    """Replaces flat parameters of FSDP1, if there are any, by those of the model."""
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
    """Returns the `config.json` of a folder."""
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


class _Search(CandidateChooser):
    """Finds, chooses and parses; keeps parsed indexes, since choosing may need them."""

    def __init__(
        self, source: OverlaySource, location: str, only: str | None, limit_bytes: int | None
    ) -> None:
        super().__init__(location)
        self._source = source
        self._only = only
        self._limit_bytes = limit_bytes
        self._steps = StepManifests(source, ())
        self._paths: Sequence[str] = ()
        self._indexes: dict[tuple[str, str, tuple[str, ...]], TensorIndex] = {}
        self._listed: frozenset[str] = frozenset()
        self._has_passed_over = False
        self._is_listing = False  # all are looked at: one index is kept at a time

    def list_checkpoints(self) -> tuple[FoundCheckpoint, ...]:
        self._is_listing = True
        candidates = self._steps_of_run(self._candidates())
        return tuple(self.list_all(candidates))

    def _steps_of_run(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return drop_lone_optimizers(self._steps.without_side_folders(candidates))

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
        older_tags: tuple[str, ...] = ()
        folders = self._source.folders if self._only is None else ()
        if select is None:
            candidates, older_tags = drop_older_tags(self._source, candidates)
        among = self._steps_of_run(candidates)
        if not among:
            raise make_not_found(folders, paths, self.location, "")
        links = self._source.linked_folders() if self._only is None else ()
        found = self.resolve(among, select, links)
        if any(folder.closed_folders for folder in folders):
            found = check_closed(found, folders, select, self.read_tracker)
        found = compare_leftovers(
            self._source, self.location, candidates, self._index, found, select
        )
        for unit in found.units:
            problem = self._steps.problem(step_folder(unit.candidate.folder))
            has_index = METADATA in map(posixpath.basename, unit.candidate.files)
            if problem is not None and not has_index:  # parts that do not make a whole step
                raise error_of(problem, self.location)
        index = join_indexes(found.units, [self._index(unit.candidate) for unit in found.units])
        index, chosen, averaged = _choose_average(index, found.select, self.location)
        found = replace(found, select=chosen, notes=(*found.notes, *averaged))
        index = name_states(index, self._source)
        step, name = index.run.step, step_of_files(found.units[0].candidate)
        if step is None and name is not None and "epoch" not in name.kind:
            step = name.number
        elif step is None:
            step = parse_step(found.folder or make_absolute(self.location))
        writer = ", ".join(filter(None, [*self._frameworks(found), index.run.writer]))
        run = replace(
            index.run,
            step=step,
            selected=_name_selected(found, select),
        )
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
            location=self.location,
            source=self._source,
            folder=found.folder,
            units=found.units,
            index=replace(index, run=run, problems=problems),
            select=found.select,
            notes=(*older_tags, *found.notes, *run.warnings, *list_plug_in_problems()),
            damaged=found.damaged,
            steps=found.steps,
            finals=found.finals,
            manifest=self._steps.manifest(saved),
            paths=paths,
        )

    def find_rolled_back(self, steps: Sequence[str]) -> frozenset[str]:
        series: dict[str, list[RunStep]] = {}
        for folder in steps:
            step = parse_step(folder)
            if step is None or len(steps) == 1:
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
        return frozenset[str]().union(
            *(abandoned_folders(self._source, own) for own in series.values())
        )

    def read_tracker(self, run: str) -> tuple[str, str] | None:
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
                where=self.location,
                hint=f"pass {posixpath.join(posixpath.dirname(self.location), step)}",
            )
        return step is not None

    def _frameworks(self, found: ResolvedSource) -> Iterator[str]:
        """Yields the frameworks whose files are beside the weights, outermost first."""
        folders = {found.folder, *(unit.candidate.folder for unit in found.units)}
        folders |= {posixpath.dirname(folder) for folder in folders}
        for file, framework in _MARKS.items():
            if any(posixpath.join(folder, file) in self._paths for folder in folders):
                yield framework
        names = [unit.candidate.folder or self.location for unit in found.units]
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

    def read_step(self, candidate: Candidate) -> int | None:
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

    def describe_missing(self, candidate: Candidate) -> str:
        missing = self._steps.lacks(candidate)
        for folder in (candidate.folder, posixpath.dirname(candidate.folder)):
            if not missing and f"{folder}{_UNFINISHED}" in self._paths:
                name = f"{posixpath.basename(folder)}{_UNFINISHED}"
                missing = f"the file '{name}' exists: {UNFINISHED}"
        if not missing:
            try:
                missing = describe_missing_files(self._index(candidate))
            except InputError as error:
                missing = str(error.message)
        self._has_passed_over |= bool(missing)
        if self._is_listing:
            self._indexes.clear()
        return missing


# Source: lightning 2.6, `WeightAveraging.on_save_checkpoint`.
_CURRENT, _AVERAGING = "current_model_state", "averaging_state"
_OF_LIGHTNING = {"state_dict", _CURRENT}


def _choose_average(
    index: TensorIndex, select: str | None, location: str
) -> tuple[TensorIndex, str | None, list[str]]:
    """Makes the averages of weights that were selected a model of their own.

    Weights that have no average, such as frozen ones, are taken as training has them.

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
    if select == ITSELF and "" in models:
        select = "" if models[1:] or averages else None
    elif select == ITSELF and not models[1:]:
        select = None  # the only one, whatever its name is
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


def _name_selected(found: ResolvedSource, select: str | None) -> str:
    """Returns what a selection names before a state dict: of a run, the step that was taken."""
    if select in {None, ITSELF} or found.select is not None:
        return ""
    is_inside = not found.folder or f"{select}/".startswith(f"{found.folder}/")
    return str(select) if is_inside else found.folder


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
    """Opens a directory, or a prefix that holds something."""
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
    hint = suggest_path(place, describe_hub_name(place))
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


_NAMED = 8


class _Copy(Struct, frozen=True):
    """One directory's manifest of a step."""

    source: Source
    manifest: Manifest

    @property
    def ranks(self) -> frozenset[int] | None:
        """The ranks whose files it has; None where it is a whole step."""
        ranks = self.manifest.source.get(NODE_RANKS)
        if not isinstance(ranks, list):
            return None
        return frozenset(rank for rank in ranks if isinstance(rank, int))


def unite(
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
        copies = list(_copies(source.folders, step))
        if all(copy.ranks is None for copy in copies):
            continue
        try:
            merged, empty = _Step(step, copies, source).merge()
            files |= merged
            without += empty
        except InputError as error:
            path = posixpath.join(step, MANIFEST_NAME)
            at = f", at {error.where}" if error.where else ""
            problems[step] = Problem(error.code, path, f"{error.message}{at}")
    return files, without, problems


def _copies(folders: Sequence[Source], step: str) -> Iterable[_Copy]:
    for folder in folders:
        try:
            manifest = read_manifest(folder, step)
        except CkptkitError:
            continue  # reported when the step is read as a whole
        if manifest.kind == TRAINING:
            yield _Copy(folder, manifest)


class _Step:
    """One step, and the copies of it."""

    def __init__(self, folder: str, copies: Sequence[_Copy], source: OverlaySource) -> None:
        self._folder = folder
        self._copies = copies
        self._source = source

    def merge(self) -> tuple[dict[str, bytes], list[str]]:
        """Returns the files of the whole step, and the folders that it does not have."""
        first = self._copies[0]
        for copy in self._copies[1:]:
            saves = [str(c.manifest.source.get("attempt")) for c in (first, copy)]
            if saves[0] != saves[1]:
                raise FormatError(
                    f"is of save {saves[0]!r} in {first.source.location} and of {saves[1]!r} in"
                    f" {copy.source.location}, where copies of one save were expected"
                )
        path = posixpath.join(self._folder, MANIFEST_NAME)
        whole = next((copy for copy in self._copies if copy.ranks is None), None)
        if whole is not None:
            return {path: whole.manifest.to_json()}, []
        from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, make_metadata

        merged = self._merged(self._world_size())
        indexes = {
            posixpath.join(name, METADATA_NAME): make_metadata(unit.tensors, unit.objects)
            for name, unit in merged.units.items()
        }
        manifest = self._manifest(merged, indexes)
        below = {posixpath.join(self._folder, name): data for name, data in indexes.items()}
        empty = [posixpath.join(self._folder, name) for name in merged.empty]
        return {path: manifest.to_json(), **below}, empty

    def _manifest(self, merged: Merged, indexes: Mapping[str, bytes]) -> Manifest:
        """Returns the manifest that a commit of the whole step would have written."""
        from ckptkit.writer.merge import with_findings

        gone = tuple(f"{name}/" for name in merged.empty)
        files = {
            name: record
            for copy in self._copies
            for name, record in copy.manifest.files.items()
            if not name.startswith(gone)
        }
        files |= {name: FileRecord(len(data)) for name, data in indexes.items()}
        # Some entries are known to rank 0 only.
        first = next(copy for copy in self._copies if 0 in (copy.ranks or ()))
        source = with_findings(source_of_all(first.manifest.source), merged.lost, merged.notes)
        return replace(first.manifest, source=source, files=files)

    def _world_size(self) -> int:
        world_size = self._copies[0].manifest.source.get("world_size")
        if not isinstance(world_size, int) or world_size < 1:
            raise FormatError("does not say how many ranks there were")
        here = frozenset[int]().union(*(copy.ranks or () for copy in self._copies))
        missing = world_size - len(here.intersection(range(world_size)))
        if missing:
            first = islice((rank for rank in range(world_size) if rank not in here), _NAMED)
            named = ", ".join(map(str, first))
            more = f" and {missing - _NAMED:,} more" if missing > _NAMED else ""
            looked = ", ".join(folder.location for folder in self._source.folders)
            raise MissingFileError(
                f"says that this is a node's copy, and the files of rank{'s'[: missing > 1]}"
                f" {named}{more} of {world_size} are not in {looked}; name the copies of the other"
                " nodes with --also"
            )
        return world_size

    def _merged(self, world_size: int) -> Merged:
        from ckptkit.writer.merge import Merger
        from ckptkit.writer.record import RECORDS_FOLDER, parse_record

        merger = Merger(world_size)
        for rank in range(world_size):
            path = posixpath.join(self._folder, RECORDS_FOLDER, f"{rank}.json")
            where = posixpath.join(self._source.location, path)
            size = self._source.stat(path).size_bytes
            merger.add(parse_record(self._source.read(path, 0, size), where=where), where=where)
        return merger.result()


Read = Callable[[Candidate], TensorIndex]


def compare_leftovers(
    source: Source,
    location: str,
    candidates: Sequence[Candidate],
    read: Read,
    found: ResolvedSource,
    select: str | None,
) -> ResolvedSource:
    """Compares the model of a step with the shards that it was made from."""
    notes = list(found.notes)
    for unit in found.units:
        is_named = select is not None and f"/{select}".endswith(f"/{unit.label}")
        if unit.candidate.format != "safetensors" or is_named:
            continue
        for shards in candidates:
            if not is_leftover(shards, {unit.candidate.folder}):
                continue
            # As `--select` names them.
            name = relative_path(shards.folder, found.folder)
            name = posixpath.basename(shards.files[0]) if name == "." else name
            try:
                reason = next(_differences(source, read(unit.candidate), read, shards), "")
            except InputError as error:
                reason = f"it is not whole ({error.message})"
            if reason:
                raise AmbiguousSourceError(
                    f"holds the model {unit.label!r} and the shards in {name!r} that it was made"
                    f" from, and {reason}",
                    where=posixpath.join(location, found.folder),
                    hint=f"pass --select {name} to have the model made anew, or"
                    f" --select {unit.label} to take it as it is",
                )
            notes.append(f"{name!r} holds the shards of the same model: left alone")
    return replace(found, notes=tuple(notes))


def _differences(
    source: Source, whole: TensorIndex, read: Read, shards: Candidate
) -> Iterator[str]:
    try:
        parts = read(shards)
    except InputError:
        return  # some shards are missing, and the model is complete without them
    for key in [*parts.tensors, *whole.tensors]:
        mine, other = whole.tensors.get(key), parts.tensors.get(key)
        if mine is None or other is None:
            yield f"it {'lacks' if mine is None else 'alone has'} tensor {key!r}"
        elif (mine.dtype, mine.shape) != (other.dtype, other.shape):
            yield (
                f"has tensor {key!r} as {mine.dtype.name} {list(mine.shape)} against"
                f" {other.dtype.name} {list(other.shape)}"
            )
        elif not mine.shape:
            numbers = []  # the bytes of tensors without dimensions
            for index, entry in ((whole, mine), (parts, other)):
                record = index.records[int(entry.chunks.record[0])]
                path = index.files[record.file].path
                numbers.append(source.read(path, record.start, record.stop))
            if numbers[0] != numbers[1]:
                yield f"has another number in {key!r}, as torch's consolidation writes 0 there"


def join_indexes(units: Sequence[CheckpointUnit], indexes: Sequence[TensorIndex]) -> TensorIndex:
    """Joins the indexes of units; trees are named by unit where several units hold models."""
    if len(indexes) == 1:
        return indexes[0]
    several = sum(1 for unit in units if not unit.is_optimizer) > 1
    tensors: dict[Key, TensorEntry] = {}
    problems: list[Problem] = []
    aliases: list[frozenset[Key]] = []
    values: dict[KeyPath, Any] = {}
    first_record = 0
    for unit, index in zip(units, indexes, strict=True):
        trees = {entry.tree for entry in index.of_part("model")}
        taken = tensors.keys() & index.tensors.keys()
        keys = {key: Key(f"{unit.label}/{key}") if taken else key for key in index.tensors}
        for key, entry in index.tensors.items():
            label, master = entry.tree, entry.master
            if master is not None:
                master = replace(master, key=keys[master.key])
            if several:
                label = f"{unit.label}/{entry.tree}" if len(trees) > 1 else unit.label
            chunks = entry.chunks.shifted(first_record)
            tensors[keys[key]] = replace(
                entry, key=keys[key], tree=label, chunks=chunks, master=master
            )
        first_record += len(index.records)
        problems += [
            replace(problem, where=keys.get(Key(problem.where), problem.where))
            for problem in index.problems
        ]
        aliases += [frozenset(keys[key] for key in group) for group in index.aliases]
        for path, value in index.values.items():  # two optimizers have equal keys
            values[path if path not in values else (unit.label, *path)] = value
    pairs = zip(units, indexes, strict=True)
    formats = [index.format for unit, index in pairs if not unit.is_optimizer]
    return TensorIndex(
        format=" + ".join(dict.fromkeys(formats or [index.format for index in indexes])),
        files=tuple(file for index in indexes for file in index.files),
        records=_join_records(indexes),
        tensors=tensors,
        values=values,
        aliases=tuple(aliases),
        # Files of ranks without tensors, such as the state of a trainer, say least.
        run=_join_facts([i.run for i in sorted(indexes, key=lambda i: not i.tensors)]),
        problems=tuple(problems),
    )


def _join_records(indexes: Sequence[TensorIndex]) -> RecordTable:
    first_file = np.cumsum([0, *(len(index.files) for index in indexes)])
    tables = [index.records for index in indexes]
    first_record = np.cumsum([0, *map(len, tables)]).tolist()
    joined = RecordTable(
        np.concatenate([t.file + first for t, first in zip(tables, first_file, strict=False)]),
        np.concatenate([t.start for t in tables]),
        np.concatenate([t.stop for t in tables]),
        np.concatenate([t.container for t in tables]),
    )
    digests = {
        first + number: digest
        for first, table in zip(first_record, tables, strict=False)
        for number, digest in table.digests.items()
    }
    return joined.with_sums(np.concatenate([t.crc32 for t in tables]), digests)


def _join_facts(runs: Sequence[RunFacts]) -> RunFacts:
    sizes = [run.world_size for run in runs if run.world_size is not None]
    return RunFacts(
        world_size=max(sizes, default=None),
        step=next((run.step for run in runs if run.step is not None), None),
        writer=next((run.writer for run in runs if run.writer), ""),
        version=next((run.version for run in runs if run.version), ""),
        mesh=next((run.mesh for run in runs if run.mesh), ()),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        settings=next((run.settings for run in runs if run.settings), ()),
        warnings=tuple(dict.fromkeys(warning for run in runs for warning in run.warnings)),
    )


class StoredDigest(Struct, frozen=True):
    """What the manifest of a folder says of a tensor."""

    name: str
    record: TensorRecord
    location: str

    def compare(self, found: str) -> None:
        """Compares the digest of what was read."""
        if found != self.record.digest:
            raise ChecksumError(
                f"has digest {found} against {self.record.digest} in {MANIFEST_NAME}",
                where=f"{self.location}, tensor {self.name!r}",
                hint="the file was damaged or changed after it was written; write it again, or"
                f" remove {MANIFEST_NAME} if the change is meant",
            )


def read_stored_digests(
    checkpoint: OpenedCheckpoint, *, without_crc32: bool = False
) -> dict[str, StoredDigest]:
    """Returns the digests of tensors by their names on disk; none where ckptkit wrote none."""
    manifest = read_model_manifest(checkpoint)
    if manifest is None:
        return {}
    records = manifest.tensors.items()
    return {
        name: StoredDigest(name, record, checkpoint.path)
        for name, record in records
        if not without_crc32 or record.crc32 is None
    }


def read_model_manifest(checkpoint: OpenedCheckpoint) -> Manifest | None:
    """Returns the manifest of a folder that ckptkit wrote as a whole; None for others."""
    units = checkpoint.units  # an adapter has none
    folder = units[0].candidate.folder if units else checkpoint.folder
    paths = checkpoint.paths
    # A source of one file does not list the manifest of its folder.
    if len(paths) > 1 and posixpath.join(folder, MANIFEST_NAME) not in paths:
        return None
    with suppress(MissingFileError):
        manifest = read_manifest(checkpoint.source, folder)
        return None if manifest.kind == TRAINING else manifest
    return None
