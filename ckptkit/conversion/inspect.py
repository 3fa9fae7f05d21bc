"""`ckptkit.inspect`: describes a checkpoint and its configuration files; it reads headers only."""

from __future__ import annotations

import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.side_files import is_side_file
from ckptkit.consumers.table import find_consumer, name_model
from ckptkit.conversion.source.adapters import (
    AdapterFacts,
    PeftFinding,
    Role,
    describe_adapters,
    find_peft,
    find_roles,
    read_config,
)
from ckptkit.conversion.source.open import OpenedCheckpoint, list_checkpoints, open_checkpoint
from ckptkit.conversion.source.paths import make_absolute
from ckptkit.conversion.source.search import TAG_FILES, FoundCheckpoint
from ckptkit.conversion.source.side_folders import SIDE_FOLDERS, SideFolders
from ckptkit.conversion.unpacking import name_packing
from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    CkptkitError,
    IncompleteCheckpointError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
)
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.geometry import distinct
from ckptkit.core.index import Fqn, Part, Problem, Shape, TensorEntry
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS
from ckptkit.core.text import counted, size_text
from ckptkit.engine.locate import Locator
from ckptkit.formats.discovery import TRACKERS, parse_step
from ckptkit.formats.registry import FileGroup, group_files
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import find_problems_by_key
from ckptkit.plan.selection import model_trees, select_model
from ckptkit.plan.ties import find_tie_candidates
from ckptkit.plan.weight_kinds import explain_random_weights
from ckptkit.runs.step_manifests import step_folder
from ckptkit.runs.steps import parse_metrics
from ckptkit.storage.locations import relative_path
from ckptkit.storage.places import PathLike, place_of

if TYPE_CHECKING:
    from ckptkit.conversion.mapped_names import MapReport
    from ckptkit.plan.coverage import ShardMap

_TIE_CHUNKS = 4096  # looking at more blobs than this would make inspect slow
_ASSUME_TIED = {"tie_word_embeddings": True}


class TensorLine(Struct, frozen=True):
    """A tensor in a report; sizes are of the full tensor, in its stored dtype."""

    name: str
    tree: str
    part: Part
    dtype: str
    shape: Shape
    chunks: int
    size_bytes: int
    role: Role = ""


class TreeLine(Struct, frozen=True):
    """A state dict in a report.

    Attributes:
        name: What `--select` calls it.
        part: Its kind.
        tensors: How many tensors it has.
        size_bytes: Of all of them.
        dtypes: Bytes per element type, largest first.
        split: Tensors per way of being split, in words, most frequent first.
    """

    name: str
    part: Part
    tensors: int
    size_bytes: int
    dtypes: Mapping[str, int]
    split: Mapping[str, int]


class TieLine(Struct, frozen=True):
    """Names that hold the same weights, or are declared to.

    Attributes:
        names: The name that stays first, then those tied to it.
        equal: Whether the stored checksums, and the parts of the checksummed bytes that the
            names stand for, agree; None where there are none to compare.
        declared: Whether the configuration says that they are tied.
    """

    names: tuple[str, ...]
    equal: bool | None
    declared: bool


class MeshDimension(Struct, frozen=True):
    """A dimension of the mesh of devices, its name empty where it has none."""

    name: str
    size: int


class Inspection(Displayed, Struct, frozen=True):
    """Everything that `ckptkit inspect` shows.

    The layout, the metrics and the time are those in the manifest of a step that ckptkit saved;
    `adapter` is None where the one model has none. The mesh has the name and the size of each
    dimension. Ignored files are in the folder of the step, without any part of the model or of the
    optimizer. `peft` is set for adapters of every method, and `refusals` has the reason why a state
    dict is not consolidated. `framework` is the one whose names the model has, empty for those of
    Transformers; `map` is what a name map makes of them, and `map_refusal` the error where a
    conversion would have none, as `--json` shows errors. `shards` is set where it was asked for.
    `steps` are the steps of the run, the newest last. `finals` maps the selection of each final
    model to what that model lacks. `checkpoints` is set where no checkpoint can be chosen: it lists
    all of them, and `problems` has what some of them lack. `packing` has how many weights are
    packed, by the scheme.
    """

    path: str
    format: str
    reasons: tuple[str, ...] = ()
    writer: str = ""
    world_size: int | None = None
    step: int | None = None
    files: int = 0
    size_bytes: int = 0
    bytes_per_rank: tuple[int, ...] = ()
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    trees: tuple[TreeLine, ...] = ()
    tensors: tuple[TensorLine, ...] = ()
    objects: tuple[str, ...] = ()
    tied: tuple[TieLine, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    layout: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at: str | None = None
    adapter: AdapterFacts | None = None
    version: str = ""
    mesh: tuple[MeshDimension, ...] = ()
    ignored: tuple[FileGroup, ...] = ()
    peft: PeftFinding | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)
    framework: str = ""
    map: MapReport | None = None
    map_refusal: Mapping[str, Any] | None = None
    shards: ShardMap | None = None
    steps: tuple[str, ...] = ()
    finals: Mapping[str, str] = field(default_factory=dict)
    checkpoints: tuple[FoundCheckpoint, ...] = ()
    packing: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "`not inspection.problems`, or ckptkit.verify")

    def _facts(self) -> Facts:
        step = "" if self.step is None else f"step {self.step:,}"
        tensors = f"{counted(len(self.tensors), 'tensor')}, {size_text(self.size_bytes)}"
        wrong = counted(len(self.problems), "problem") if self.problems else "no problems"
        lines = [("format", self.format), ("step", step), ("model", self.model_type or "")]
        rows = [
            (tree.name, tree.part, f"{tree.tensors:,}", size_text(tree.size_bytes))
            for tree in self.trees
        ]
        header = ("state dict", "part", "tensors", "size")
        return Facts(self.path, [*lines, ("holds", tensors), ("state", wrong)], header, rows)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as the contract of `inspect --json` has it."""
        peft = None if self.peft is None else replace(self.peft, foreign=None)
        plain = plain_fields(replace(self, shards=None, tensors=(), peft=peft))
        if peft is not None:  # `adapter` has what there is to know of it
            del plain["peft"]["foreign"]
        document = {n: value for n, value in plain.items() if n not in {"shards", "tensors"}}
        document["tensors"] = []
        for line in self.tensors:
            tensor = plain_fields(line) | {"shape": list(line.shape)}
            role, tensor["bytes"] = tensor.pop("role"), tensor.pop("size_bytes")
            document["tensors"].append(tensor | ({"role": role} if role else {}))
        return document


def run_inspection(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    model_config: PathLike | None = None,
    base: PathLike | None = None,
    choice: str | None = None,
    shards: bool = False,
    lists: bool = False,
) -> Inspection:
    """Describes the checkpoint at or under a path; reads headers, never tensor data."""
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(
                open_checkpoint(path, select=select, also=also, model_config=model_config)
            )
        except (AmbiguousSourceError, InputError) as error:
            found = _find_instead(path, select, also, error) if lists else ()
            if not found:
                raise
            lacking = (one for one in found if one.problem)
            code = IncompleteCheckpointError.code
            return Inspection(
                path=os.fspath(path),
                format=" + ".join(dict.fromkeys(one.format for one in found)),
                problems=tuple(Problem(code, one.select, one.problem) for one in lacking),
                notes=(error.message,),
                checkpoints=found,
            )
        folders = SideFolders(stack, checkpoint, base)
        config = read_config(folders)
        report = _report(checkpoint, config or {}, _ties(checkpoint, config), shards=shards)
        peft = find_peft(checkpoint, folders)
        if peft is None or peft.foreign is None:
            report = _add_map(report, checkpoint, config, choice)
        else:  # a map of the model converts adapters otherwise than models
            report = replace(report, framework=peft.foreign.framework)
        return replace(
            report,
            adapter=describe_adapters(checkpoint, folders),
            mesh=_read_mesh(checkpoint),
            peft=peft,
            notes=(*report.notes, *folders.notes),
            refusals=_refusals(report.tensors, peft, config),
        )


def _find_instead(
    path: PathLike, select: str | None, also: Sequence[PathLike], error: CkptkitError
) -> tuple[FoundCheckpoint, ...]:
    """Returns what there is where no checkpoint was opened: several, or a run without a whole step.

    Nothing is returned where what was opened is one checkpoint, which is damaged.
    """
    is_choice = isinstance(error, AmbiguousSourceError)
    name = posixpath.basename(make_absolute(place_of(path)))
    is_step = parse_step(name) is not None and not name.isdigit()
    if isinstance(error, AccessError) or (is_step and not is_choice):
        return ()
    found = tuple(
        one
        for one in list_checkpoints(path, also)
        if select is None or one.select.startswith(f"{select}/")
    )
    steps = [one for one in found if one.step is not None]
    is_shown = is_choice or (steps and all(one.problem for one in steps))
    return found if is_shown and (len(found) > 1 or isinstance(error, _OF_UNFINISHED)) else ()


# What is said of the only step of a run whose save has not finished.
_OF_UNFINISHED = (NotACheckpointError, MissingFileError, IncompleteCheckpointError)


def _add_map(
    report: Inspection,
    checkpoint: OpenedCheckpoint,
    config: Mapping[str, Any] | None,
    choice: str | None,
) -> Inspection:
    """Adds what a map makes of the model, if one is named or the names are another framework's."""
    is_named = choice not in {None, "none"}
    trees = model_trees(checkpoint.index)
    if not is_named and checkpoint.select not in trees and len(trees) != 1:
        return report
    request = ConsolidateRequest(select=checkpoint.select)
    entries = select_model(checkpoint.index, request, location=checkpoint.path)
    tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    framework = recognise_by_tensors(tensors)
    report = replace(report, framework=framework)
    if choice == "none" or not (framework or choice not in {None, "auto"}):
        return report
    from ckptkit.conversion.mapped_names import report_map  # few checkpoints need it

    try:
        found = report_map(choice or "auto", framework, config, checkpoint, tensors)
    except CkptkitError as error:
        if choice is not None:
            raise
        return replace(report, map_refusal=error.to_json())
    return replace(report, map=found)


def _refusals(
    tensors: Sequence[TensorLine], peft: PeftFinding | None, config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Returns why state dicts are not consolidated, by their names."""
    trees: dict[str, list[tuple[str, Shape, str]]] = {}
    for line in tensors:
        if line.part == "model":
            trees.setdefault(line.tree, []).append((line.name, line.shape, line.dtype))
    if peft is not None and len(trees) == 1:
        return dict.fromkeys(trees, peft.refusal)
    reasons = {tree: explain_random_weights(held, config=config) for tree, held in trees.items()}
    return {tree: reason for tree, reason in reasons.items() if reason}


def _report(
    checkpoint: OpenedCheckpoint,
    config: Mapping[str, Any],
    tied: tuple[TieLine, ...],
    *,
    shards: bool,
) -> Inspection:
    index, base = checkpoint.index, checkpoint.folder
    saved = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    entries = list(index.tensors.values())
    if checkpoint.select is not None:
        entries = [entry for entry in entries if entry.tree == checkpoint.select]
    roles = find_roles(checkpoint)
    totals: Counter[int] = Counter()  # bytes by the rank that wrote them
    for entry in entries:
        sizes = entry.chunks.elements() * entry.stored_dtype.itemsize
        for rank in distinct(entry.chunks.rank).tolist():
            totals[rank] += int(sizes[entry.chunks.rank == rank].sum())
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(n, str) for n in architectures):
        architectures = []
    metrics = parse_metrics(saved.get("metrics"))
    keys, read = {entry.key for entry in entries}, {file.path for file in index.files}
    problems = list(find_problems_by_key(index, entries))
    inside = [path for path in checkpoint.paths if not base or path.startswith(f"{base}/")]
    others = [step for step in checkpoint.steps if step != base]
    consumer = find_consumer(config or None, [path.removeprefix(f"{base}/") for path in inside])
    ignored = [
        path
        for path in inside
        if path not in read
        and not any(path == step or path.startswith(f"{step}/") for step in others)
        and not is_side_file(posixpath.basename(path))
        and posixpath.basename(path) not in {MANIFEST_NAME, *TRACKERS, *TAG_FILES}
        and {"context", *SIDE_FOLDERS}.isdisjoint(relative_path(path, base).split("/")[:-1])
        and not consumer.has_companion(path.removeprefix(f"{base}/"))
    ]
    shard_map = None
    if shards:
        from ckptkit.plan.coverage import map_shards  # for reports alone

        shard_map = map_shards(index, entries, frozenset(key for key, _ in problems))
    packing: dict[str, int] = {}
    wrong: tuple[str, ...] = ()
    try:
        packing = name_packing(checkpoint, config, entries)
    except RefusedError as error:  # they cannot be unpacked
        wrong = (error.message,)
    return Inspection(
        path=checkpoint.path,
        format=index.format,
        reasons=tuple(unit.candidate.reason for unit in checkpoint.units),
        writer=index.run.writer,
        world_size=index.run.world_size,
        step=index.run.step,
        files=len(read),
        size_bytes=sum(max(file.size_bytes, 0) for file in index.files),
        bytes_per_rank=tuple(totals[rank] for rank in range(max(totals, default=-1) + 1)),
        model_type=name_model(config) or None,
        architectures=tuple(architectures),
        trees=tuple(_trees(entries)),
        tensors=tuple(
            TensorLine(
                name=entry.name,
                tree=entry.tree,
                part=entry.part,
                dtype=entry.dtype.name,
                shape=entry.shape,
                chunks=len(entry.chunks),
                size_bytes=entry.size_bytes,
                role=roles.get(entry.key, ""),
            )
            for entry in entries
        ),
        objects=tuple(".".join(map(str, path)) for path in index.values),
        tied=tied,
        problems=(
            *(problem for _, problem in problems),
            *(problem for problem in index.problems if problem.where not in keys),
        ),
        notes=(*checkpoint.notes, *index.run.notes, *wrong),
        layout=_text(saved.get("layout")),
        metrics={name: value for name, value in metrics.items() if value is not None},
        saved_at=_text(saved.get("saved_at")),
        version=index.run.version,
        ignored=group_files(ignored, base=base, recognised=read),
        shards=shard_map,
        steps=tuple(checkpoint.steps),
        finals=dict(checkpoint.finals),
        packing=packing,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _trees(entries: Sequence[TensorEntry]) -> Iterator[TreeLine]:
    groups: dict[tuple[str, Part], list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.tree, entry.part), []).append(entry)
    for (name, part), group in groups.items():
        dtypes: Counter[str] = Counter()
        for entry in group:
            dtypes[entry.dtype.name] += entry.size_bytes
        yield TreeLine(
            name=name,
            part=part,
            tensors=len(group),
            size_bytes=sum(entry.size_bytes for entry in group),
            dtypes=dict(dtypes.most_common()),
            split=dict(Counter(_split(entry) for entry in group).most_common()),
        )


def _split(entry: TensorEntry) -> str:
    """Returns in words how a tensor is split, such as `dimension 0 over 4`."""
    full = entry.chunks.elements() > 0
    count = int(np.count_nonzero(full))
    if count <= 1:
        return "whole"
    if entry.chunks.flat:
        return f"flat over {count}"
    sizes = entry.chunks.sizes[full]
    ways = []
    for axis, size in enumerate(entry.shape):
        if bool(np.any(sizes[:, axis] != size)):
            parts = len(distinct(entry.chunks.offsets[full][:, axis]))
            ways.append(f"dimension {axis} over {parts}")
    return " and ".join(ways) or "whole"


def _ties(checkpoint: OpenedCheckpoint, config: Mapping[str, Any] | None) -> tuple[TieLine, ...]:
    index = checkpoint.index
    lines = []
    locator = Locator(checkpoint.source, index)
    for tree in dict.fromkeys(entry.tree for entry in index.of_part("model")):
        entries = {entry.name: entry for entry in index.of_part("model") if entry.tree == tree}
        extents = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
        declared = find_tie_candidates(config, extents)
        pairs = declared or find_tie_candidates(_ASSUME_TIED, extents)
        sources: dict[Fqn, list[Fqn]] = {}
        for target, source in pairs.items():
            sources.setdefault(source, []).append(target)
        for source, targets in sources.items():
            group = [entries[name] for name in entries if name in (source, *targets)]
            equal = _equal_checksums(locator, group)
            if declared or equal:
                lines.append(TieLine((source, *targets), equal, bool(declared)))
    return tuple(lines)


def _equal_checksums(locator: Locator, entries: Sequence[TensorEntry]) -> bool | None:
    if any(len(entry.chunks) > _TIE_CHUNKS for entry in entries):
        return None
    try:
        chunks = [_contents(locator, entry) for entry in entries]
    except CkptkitError:
        return None  # reported as a problem already, or found when it is read
    if any(crc32 is None for contents in chunks for crc32, _, _ in contents.values()):
        return None
    return all(contents == chunks[0] for contents in chunks)


def _contents(
    locator: Locator, entry: TensorEntry
) -> dict[bytes, tuple[int | None, int, Shape | None]]:
    """Returns the content of each chunk by its box.

    It is the CRC-32 of the whole record that the chunk is a view of, the chunk's first byte in the
    record's data, and the strides of the view.
    """
    boxes = np.hstack([entry.chunks.offsets, entry.chunks.sizes])
    contents = {}
    for row in np.flatnonzero(entry.chunks.elements() > 0).tolist():
        at = locator.locate(entry, entry.chunks, row)
        contents[boxes[row].tobytes()] = (at.crc32, at.origin - at.start, at.strides)
    return contents


def _read_mesh(checkpoint: OpenedCheckpoint) -> tuple[MeshDimension, ...]:
    """Returns the mesh: of a step that ckptkit saved, that of its first model; empty if unknown."""
    if checkpoint.index.run.mesh:
        return tuple(MeshDimension(name, size) for name, size in checkpoint.index.run.mesh)
    if checkpoint.manifest is None:
        return ()
    path = posixpath.join(step_folder(checkpoint.units[0].candidate.folder), RUN_FACTS)
    try:
        size = checkpoint.source.stat(path).size_bytes
        facts = json.loads(checkpoint.source.read(path, 0, min(size, MAX_JSON_BYTES)))
    except (InputError, ValueError, RecursionError):
        return ()
    models = facts.get("models") if isinstance(facts, Mapping) else None
    first = next(iter(models.values()), None) if isinstance(models, Mapping) else None
    match first:
        case {"mesh": {"names": [*names], "shape": [*shape]}}:
            if all(type(size) is int and size > 0 for size in shape):
                padded = [*map(str, names), *[""] * len(shape)]
                return tuple(map(MeshDimension, padded, shape))
    return ()
