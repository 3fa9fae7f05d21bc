"""Opens checkpoints: from a path as the user typed it to an index of the files there.

open folders (`paths.py`) → find the checkpoint (`search.py`) → compare it with the shards that it
was made from → parse its headers, join the indexes of its units → choose weights or their average →
name the states of optimizers → add what is known of the run

Torch's consolidation leaves the shards beside the model. It writes headers first and data later,
drops tensors that its mapping does not name, and writes 0 for tensors without dimensions. So its
model is taken only where it is complete and equals the shards; else the user chooses.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.source.paths import (
    check_path,
    make_absolute,
    open_others,
    open_root,
    read_config_in,
)
from ckptkit.conversion.source.search import (
    CheckpointUnit,
    FoundCheckpoint,
    ResolvedSource,
    Search,
    is_leftover,
)
from ckptkit.core import olmo_core
from ckptkit.core.errors import (
    AmbiguousSourceError,
    ChecksumError,
    InputError,
    MissingFileError,
    UsageError,
)
from ckptkit.core.frameworks import MARKS, OLMO_CORE, OPTIONS, is_merged_beside
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
    CRC32_SCHEME,
    MANIFEST_NAME,
    TRAINING,
    Manifest,
    TensorRecord,
)
from ckptkit.core.model_configs import parse_json_object
from ckptkit.core.text import Aside, counted, join_first
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import ITSELF, parse_step, step_of_files
from ckptkit.formats.optimizer_names import name_states
from ckptkit.formats.ranks.flat import (
    SLICES,
    ModelParameter,
    compute_vectors,
    find_flat_parameters,
    is_flat,
    unflatten,
)
from ckptkit.formats.registry import list_plug_in_problems
from ckptkit.plan.coverage import error_of
from ckptkit.plan.selection import model_trees, plain_trees, propose_trees
from ckptkit.plan.weight_kinds import MERGED_BESIDE
from ckptkit.runs.local_run import hold_candidates, marker
from ckptkit.runs.step_manifests import list_files, step_folder
from ckptkit.storage.locations import relative_path
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.places import PathLike, Place, is_url, place_of

if TYPE_CHECKING:
    from ckptkit.conversion.mapped_names import MappedModel

_TRIES = 5  # a job may remove steps of its run while they are searched
_ACCELERATE = "pytorch_model_fsdp_"
_ACCELERATE_STATE = "random_states_0.pkl"  # which `save_state` always writes
_SHOWN = 3


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
        mapped: What the map makes of the model.
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
    mapped: MappedModel | None = None

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
    for tries_left in reversed(range(_TRIES)):
        with ExitStack() as stack:
            source, only = _open_source(stack, location, also)
            search = Search(source, location, only, limit_bytes)
            try:
                checkpoint = _parse(search, search.find(select), select)
                candidates = [unit.candidate for unit in checkpoint.units]
                stack.enter_context(hold_candidates(source.folders, candidates))
            except InputError:
                if not tries_left or not _has_lost_files(search, location, also):
                    raise
                continue
            # A chosen step may be gone, or may have been chosen because another was.
            is_local = not any(is_url(folder.location) for folder in source.folders)
            if tries_left and (
                (search.has_passed_over and _has_lost_files(search, location, also))
                or (is_local and not all(_is_there(source, one) for one in candidates))
            ):
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
        source, only = _open_source(stack, location, also)
        return tuple(Search(source, location).list_all()) if only is None else ()


def _open_source(
    stack: ExitStack, location: Place, also: Sequence[PathLike]
) -> tuple[OverlaySource, str | None]:
    """Opens the directories of a source, and returns the file in them that it is, if it is one."""
    root, only = open_root(stack, location)
    if only is not None and also:
        raise UsageError("cannot be combined with a file as SRC", where="--also")
    folders = [root, *open_others(stack, location, also)]
    return OverlaySource(folders, compared=(METADATA, MANIFEST_NAME)), only


def _has_lost_files(search: Search, location: Place, also: Sequence[PathLike]) -> bool:
    """Returns whether files that were listed are gone."""
    try:
        with ExitStack() as stack:
            return not search.listed.issubset(list_files(_open_source(stack, location, also)[0]))
    except InputError:
        return True


def _is_there(source: OverlaySource, candidate: Candidate) -> bool:
    return any(Path(one.location, marker(candidate)).exists() for one in source.folders)


def _parse(search: Search, found: ResolvedSource, select: str | None) -> OpenedCheckpoint:
    """Parses the headers of the checkpoint that was found; `select` is what the user selected."""
    found = _compare_leftovers(search, found, select)
    steps = search.steps
    for candidate in (unit.candidate for unit in found.units):
        problem = steps.problem(step_folder(candidate.folder))
        has_index = METADATA in map(posixpath.basename, candidate.files)
        if problem is not None and not has_index:  # parts that do not make a whole step
            raise error_of(problem, search.location)
    index = join_indexes(found.units, [search.index(unit.candidate) for unit in found.units])
    index, chosen, notes = _choose_average(index, found.select, search.location)
    index = name_states(index, search.source)
    step, name = index.run.step, step_of_files(found.units[0].candidate)
    if step is None and name is not None and "epoch" not in name[0]:
        step = name[1]
    elif step is None:
        step = parse_step(found.folder or make_absolute(search.location))
    # What a selection names before a state dict: of a run, the step that was taken.
    selected = ""
    if select not in {None, ITSELF} and chosen is None:
        is_inside = not found.folder or f"{select}/".startswith(f"{found.folder}/")
        selected = str(select) if is_inside else found.folder
    has_merged = (
        select is None
        and 0 < len(plain_trees(index)) < len(model_trees(index))
        and any(
            is_merged_beside(posixpath.basename(path)) and posixpath.dirname(path) == found.folder
            for path in search.paths
        )
    )
    saved = step_folder(found.units[0].candidate.folder)
    run = steps.facts(
        saved,
        replace(
            index.run,
            step=step,
            selected=selected,
            warnings=(*index.run.warnings, *([Aside(MERGED_BESIDE)] if has_merged else [])),
            writer=", ".join(filter(None, [*_find_frameworks(search, found), index.run.writer])),
            settings=(*index.run.settings, *_read_options(search, found, index.run.writer)),
        ),
    )
    problems = (*index.problems, *steps.problems(saved))
    return OpenedCheckpoint(
        location=search.location,
        source=search.source,
        folder=found.folder,
        units=found.units,
        index=replace(index, run=run, problems=problems),
        select=chosen,
        notes=(*found.notes, *notes, *run.warnings, *list_plug_in_problems()),
        damaged=found.damaged,
        steps=found.steps,
        finals=found.finals,
        manifest=steps.manifest(saved),
        paths=search.paths if search.only is None else (search.only,),
    )


def _find_frameworks(search: Search, found: ResolvedSource) -> Iterator[str]:
    """Yields the frameworks whose files are beside the weights, outermost first."""
    folders = {found.folder, *(unit.candidate.folder for unit in found.units)}
    folders |= {posixpath.dirname(folder) for folder in folders}
    for file, framework in MARKS.items():
        if any(posixpath.join(folder, file) in search.paths for folder in folders):
            yield framework
    is_named = any(_ACCELERATE in (u.candidate.folder or search.location) for u in found.units)
    states = (posixpath.join(folder, _ACCELERATE_STATE) for folder in folders)
    is_ours = any(search.steps.is_output(step_folder(folder)) for folder in folders)
    if not is_ours and (is_named or any(path in search.paths for path in states)):
        yield "accelerate"


_OPTION = re.compile(r"(?m)^(\w+):[ \t]*(\d{1,9}|true|false)[ \t]*\r?$")
_MOST_OPTIONS_BYTES = 1 << 20


def _read_options(search: Search, found: ResolvedSource, writer: str) -> Iterator[tuple[str, int]]:
    """Yields what files of frameworks beside the weights, or in the step, say of them."""

    def read(path: str) -> bytes:
        size = search.source.stat(path).size_bytes
        return search.source.read(path, 0, min(size, _MOST_OPTIONS_BYTES))

    for folder in dict.fromkeys(unit.candidate.folder for unit in found.units):
        for file, keys in OPTIONS.items():
            path = posixpath.join(folder, file)
            if path in search.paths:
                for key, value in _OPTION.findall(read(path).decode(errors="replace")):
                    if key in keys:
                        yield keys[key], int(value) if value.isdigit() else value == "true"
        path = posixpath.join(posixpath.dirname(folder), CONFIG)
        if writer.startswith(OLMO_CORE) and path in search.paths:
            document = parse_json_object(read(path), where=posixpath.join(search.location, path))
            yield from olmo_core.read_settings(document).items()


def _compare_leftovers(search: Search, found: ResolvedSource, select: str | None) -> ResolvedSource:
    """Compares the model of a step with the shards that it was made from."""
    notes = list(found.notes)
    for unit in found.units:
        is_named = select is not None and f"/{select}".endswith(f"/{unit.label}")
        if unit.candidate.format != "safetensors" or is_named:
            continue
        for shards in search.candidates:
            if not is_leftover(shards, {unit.candidate.folder}):
                continue
            # As `--select` names them.
            name = relative_path(shards.folder, found.folder)
            name = posixpath.basename(shards.files[0]) if name == "." else name
            try:
                reason = _find_difference(search, unit.candidate, shards)
            except InputError as error:
                reason = f"it is not whole ({error.message})"
            if reason:
                raise AmbiguousSourceError(
                    f"holds the model {unit.label!r} and the shards in {name!r} that it was made"
                    f" from, and {reason}",
                    where=posixpath.join(search.location, found.folder),
                    hint=f"pass --select {name} to have the model made anew, or"
                    f" --select {unit.label} to take it as it is",
                )
            notes.append(f"{name!r} holds the shards of the same model: left alone")
    return replace(found, notes=tuple(notes))


def _find_difference(search: Search, model: Candidate, shards: Candidate) -> str:
    """Returns the first difference between a model and the shards of it; empty if they agree."""
    whole = search.index(model)
    try:
        parts = search.index(shards)
    except InputError:
        return ""  # some shards are missing, and the model is complete without them
    for key in [*parts.tensors, *whole.tensors]:
        mine, other = whole.tensors.get(key), parts.tensors.get(key)
        if mine is None or other is None:
            return f"it {'lacks' if mine is None else 'alone has'} tensor {key!r}"
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            return (
                f"has tensor {key!r} as {mine.dtype.name} {list(mine.shape)} against"
                f" {other.dtype.name} {list(other.shape)}"
            )
        if not mine.shape:
            numbers = []  # the bytes of tensors without dimensions
            for index, entry in ((whole, mine), (parts, other)):
                record = index.records[int(entry.chunks.record[0])]
                path = index.files[record.file].path
                numbers.append(search.source.read(path, record.start, record.stop))
            if numbers[0] != numbers[1]:
                return f"has another number in {key!r}, as torch's consolidation writes 0 there"
    return ""


def join_indexes(units: Sequence[CheckpointUnit], indexes: Sequence[TensorIndex]) -> TensorIndex:
    """Joins the indexes of units; trees are named by unit where several units hold models."""
    if len(indexes) == 1:
        return indexes[0]
    several = sum(1 for unit in units if not unit.is_optimizer) > 1
    tensors: dict[Key, TensorEntry] = {}
    problems: list[Problem] = []
    aliases: list[frozenset[Key]] = []
    values: dict[KeyPath, Any] = {}
    digests: dict[int, str] = {}
    files_of_records: list[np.ndarray[Any, Any]] = []
    first_file = first_record = 0
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
        problems += [
            replace(problem, where=keys.get(Key(problem.where), problem.where))
            for problem in index.problems
        ]
        aliases += [frozenset(keys[key] for key in group) for group in index.aliases]
        for path, value in index.values.items():  # two optimizers have equal keys
            values[path if path not in values else (unit.label, *path)] = value
        digests |= {first_record + at: digest for at, digest in index.records.digests.items()}
        files_of_records.append(index.records.file + first_file)
        first_file += len(index.files)
        first_record += len(index.records)
    tables = [index.records for index in indexes]
    records = RecordTable(
        np.concatenate(files_of_records),
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.stop for table in tables]),
        np.concatenate([table.container for table in tables]),
    ).with_sums(np.concatenate([table.crc32 for table in tables]), digests)
    pairs = zip(units, indexes, strict=True)
    formats = [index.format for unit, index in pairs if not unit.is_optimizer]
    # Files of ranks without tensors, such as the state of a trainer, say least.
    runs = [index.run for index in sorted(indexes, key=lambda index: not index.tensors)]
    sizes = [run.world_size for run in runs if run.world_size is not None]
    return TensorIndex(
        format=" + ".join(dict.fromkeys(formats or [index.format for index in indexes])),
        files=tuple(file for index in indexes for file in index.files),
        records=records,
        tensors=tensors,
        values=values,
        aliases=tuple(aliases),
        run=RunFacts(
            world_size=max(sizes, default=None),
            step=next((run.step for run in runs if run.step is not None), None),
            writer=next((run.writer for run in runs if run.writer), ""),
            version=next((run.version for run in runs if run.version), ""),
            mesh=next((run.mesh for run in runs if run.mesh), ()),
            notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
            settings=next((run.settings for run in runs if run.settings), ()),
            warnings=tuple(dict.fromkeys(warning for run in runs for warning in run.warnings)),
        ),
        problems=tuple(problems),
    )


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
    shown = join_first(map(repr, rest), len(rest), _SHOWN)
    note = f"{counted(len(rest), 'tensor')} without an average are as training has them: {shown}"
    return replace(index, tensors=tensors), select, [note] if rest else []


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


class StoredDigest(Struct, frozen=True):
    """What the manifest of a folder says of a tensor."""

    name: str
    record: TensorRecord
    location: str

    def compare(self, found: str) -> None:
        """Compares the digest of what was read, or the CRC-32 of what was not."""
        expected = self.record.digest
        if found.startswith(CRC32_SCHEME) and self.record.crc32 is not None:
            expected = f"{CRC32_SCHEME}:{self.record.crc32:08x}"
        if found != expected:
            raise ChecksumError(
                f"has digest {found} against {expected} in {MANIFEST_NAME}",
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
