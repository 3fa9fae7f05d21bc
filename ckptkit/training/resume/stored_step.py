"""One step on disk, opened for resuming: its manifest, its DCP directories, its small files.

`bind_to_step` finds the entries of the user's mapping in it, by the names they were saved under.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    ResumeError,
    UsageError,
)
from ckptkit.core.index import Fqn, Key, KeyPath, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, Manifest, check_manifest_size
from ckptkit.core.text import Closing, list_first
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA, BlobRef, DcpReader, open_blob
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.runs.step_manifests import Findings, digest_problems, read_findings
from ckptkit.runs.steps import step_of_source
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import Place, open_source
from ckptkit.training import step_names
from ckptkit.training.state.collect import (
    PER_RANK,
    BoundModel,
    BoundObject,
    BoundOptimizer,
    BoundState,
    Layout,
    index_of,
    shown_name,
)
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.objects import read_object, read_torch_file
from ckptkit.training.state.optimizers import (
    COMPOSED,
    GROUPS,
    PARAMS,
    RANK_STATES,
    STATE,
    OptimizerWalk,
)
from ckptkit.training.state.structures import Nodes, parse_structures
from ckptkit.training.step_names import TensorPlaces, adapter_names
from ckptkit.training.tiers.url_run import NearPlace, with_near_files

logger = logging.getLogger(__name__)

Bound = BoundModel | BoundOptimizer | BoundObject
_APART = PER_RANK | {"model", "optimizer"}  # all others have a file alike


class SavedEntry(Struct, frozen=True):
    key: str
    position: int | None  # in the list under that key; None without a list
    kind: str
    unit: str  # the DCP directory of what it holds in one; see `BoundModel` and the others
    file: str  # the file of its state, empty where it has none; that of rank 0 where each has one
    # the class of an optimizer, empty where that is not known
    made_by: str | None = msgspec.field(default=None, name="class")
    # of a model whose adapter was saved apart, the directory of all other tensors
    base_unit: str | None = None
    stages: bool = False  # whether it is all stages of a pipeline together, which a list held
    split_batches: bool | None = None  # of a dataloader; see `split_batches_of`

    @property
    def name(self) -> str:
        return shown_name(self.key, self.position)


class _Facts(Struct, frozen=True):
    entries: tuple[SavedEntry, ...] | None = None
    structures: Any = False


def parse_facts(data: bytes, *, where: str) -> tuple[tuple[SavedEntry, ...] | None, bool]:
    """Returns the entries of the mapping that a step was saved from, None in older steps.

    Also whether it has the structures of nested values.
    """
    try:
        facts = msgspec.json.decode(data, type=_Facts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("does not name what the step holds", where=where) from error
    return facts.entries, bool(facts.structures)


def bind_to_step(bound: BoundState, entries: Sequence[SavedEntry], *, where: str) -> BoundState:
    """Returns the same state with the places that its entries have in a step."""
    saved = {(entry.key, entry.position): entry for entry in entries}
    mine: list[Bound] = [*bound.models, *bound.optimizers, *bound.others]
    found = {_name(entry): _find(entry, saved) for entry in mine}
    missing = [name for name, as_saved in found.items() if as_saved is None]
    if missing:
        raise ResumeError(
            f"{list_first(missing)} was not saved with this step, which holds"
            f" {_listed(entry.name for entry in entries)}",
            where=where,
            hint="resume with the names that the state was saved under",
        )
    places = {name: other for name, other in found.items() if other is not None}
    left = [entry.name for entry in entries if entry not in places.values()]
    if left and bound.rank == 0:
        is_meant = all(isinstance(entry, BoundModel) for entry in mine)  # a model loaded alone
        level = logging.INFO if is_meant else logging.WARNING
        logger.log(level, "the step also holds %s, which the state does not have", _listed(left))
    for entry in mine:
        kind = "model" if isinstance(entry, BoundModel) else "optimizer"
        kind = entry.kind if isinstance(entry, BoundObject) else kind
        as_kind = places[_name(entry)].kind
        if kind != as_kind and {kind, as_kind} & _APART:
            raise ResumeError(
                f"a {as_kind} was saved under this name, and the state has a {kind} there",
                where=_name(entry),
                hint="resume with the names that the state was saved under",
            )
    world = Copies(bound.world_size, bound.rank)
    models: list[BoundModel] = []
    for model in bound.models:  # whose tensors a step has in one directory, or in two
        as_saved = places[_name(model)]
        adapter = adapter_names(model.module) if as_saved.base_unit else None
        base_unit = (as_saved.base_unit or "") if adapter else ""
        at = TensorPlaces(as_saved.unit, _path(model, as_saved), adapter, base_unit)
        models.append(replace(model, places=at))
    optimizers = [
        replace(o, unit=places[_name(o)].unit, path=_path(o, places[_name(o)]))
        for o in bound.optimizers
    ]
    others = [
        replace(other, unit=places[_name(other)].unit, file=places[_name(other)].file)
        for other in bound.others
    ]
    return replace(
        bound,
        models=tuple(models),
        optimizers=tuple(optimizers),
        others=tuple(others),
        _walks=tuple(ModelWalk(m.module, m.places, world=world) for m in models),
        _optimizer_walks=tuple(
            OptimizerWalk(o.optimizer, o.unit, o.path, world=world) for o in optimizers
        ),
    )


def _find(entry: Bound, saved: Mapping[tuple[str, int | None], SavedEntry]) -> SavedEntry | None:
    together = saved.get((entry.key, None))
    if together is not None and together.stages:
        return together
    return saved.get(entry.saved_as) or saved.get((entry.key, entry.position))


def _name(entry: Bound) -> str:
    return shown_name(entry.key, entry.position)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names))) or "nothing"


def _path(entry: BoundModel | BoundOptimizer, saved: SavedEntry) -> KeyPath:
    """Returns the start of key paths: the saved name where one directory holds all."""
    return entry.path if saved.unit else (saved.key, *index_of(saved.position))


T = TypeVar("T")


class Renaming(Struct, frozen=True):
    """Gives what a step holds of models and optimizers the names that the live models have.

    `names` has whole names of tensors, or what they begin with, each with its successor, None where
    a part was dropped; the longest that fits a name counts. `models` and `optimizers` have the DCP
    directory of each, and what its key paths begin with there.
    """

    names: Mapping[str, str | None]
    models: Sequence[tuple[str, KeyPath]] = ()
    optimizers: Sequence[tuple[str, KeyPath]] = ()

    def name(self, name: str) -> str | None:
        """Returns the name that a tensor has now, None if it was dropped.

        >>> renaming = Renaming({"old": "new", "old.head": None, "": "model"})
        >>> [renaming.name(name) for name in ("old.weight", "old.head.bias", "norm.weight")]
        ['new.weight', None, 'model.norm.weight']
        """
        prefix = max((key for key in self.names if begins(name, key)), key=len, default=None)
        if prefix is None:
            return name
        new, rest = self.names[prefix], name.removeprefix(prefix).strip(".")
        return None if new is None else f"{new}.{rest}".strip(".")

    def path(self, unit: str, path: KeyPath) -> KeyPath | None:
        found = self._find(unit, path)
        if found is None:
            return path
        at, begin, before = found
        new = self.name(before)
        if new is None or new == before:
            return None if new is None else path
        element = str(path[at])
        return (*path[:at], element[:begin] + new + element[begin + len(before) :], *path[at + 1 :])

    def _find(self, unit: str, path: KeyPath) -> tuple[int, int, str] | None:
        """Returns where in a key path a name is: the position, the first character, the name."""
        for own, start in self.models:
            if own == unit and path[: len(start)] == start and len(path) > len(start):
                return len(start), 0, str(path[len(start)])
        for own, start in self.optimizers:
            depth = len(start)
            if own != unit or path[:depth] != start or len(path) <= depth:
                continue
            part = str(path[depth])
            at = depth + (2 if part == RANK_STATES else 1)
            if part in {STATE, COMPOSED, GROUPS, RANK_STATES} and len(path) > at:
                return None if isinstance(path[at], int) else (at, 0, str(path[at]))
            head, _, flat = part.partition(".")  # as of a flattened state
            if head in {STATE, GROUPS} and flat:
                return depth, len(head) + 1, flat.rpartition(".")[0]
        return None

    def groups(self, groups: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields an optimizer's groups with the new names, without those that were dropped."""
        for group in groups:
            names = [self.name(name) for name in group[PARAMS]]
            kept = [name for name in names if name is not None]
            if kept or not names:
                yield {**group, PARAMS: kept}

    def index(self, unit: str, index: TensorIndex) -> TensorIndex:
        """Returns an index with the new names; `stored_names` has those that changed."""
        tensors: list[tuple[KeyPath | None, TensorEntry]] = []
        for entry in index.tensors.values():
            path, before = self.path(unit, entry.key_path), self._find(unit, entry.key_path)
            if path and before and path != entry.key_path:
                key, names = Key(".".join(map(str, path))), (Fqn(before[2]),)
                tensors.append((path, replace(entry, key=key, key_path=path, stored_names=names)))
            else:
                tensors.append((path, entry))
        values = ((self.path(unit, path), value) for path, value in index.values.items())
        by_key = {entry.key: entry for entry in _distinct(tensors).values()}
        return replace(index, tensors=by_key, values=_distinct(values))


def _distinct(items: Iterable[tuple[KeyPath | None, T]]) -> dict[KeyPath, T]:
    found: dict[KeyPath, T] = {}
    for path, value in items:
        if path in found:
            raise UsageError(
                f"gives two parts of the step the name {'.'.join(map(str, path))!r}",
                where="renamed",
                hint="rename the one that is there to None, or to another name",
            )
        if path is not None:
            found[path] = value
    return found


def begins(name: str, prefix: str) -> bool:
    """Returns whether a name is another one, or is below the module of that name."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


class StoredStep(Closing):
    """A step's directory; also one that accelerate or `dcp.save` wrote, without a manifest."""

    def __init__(self, place: Path | Place, manifest: Manifest | None = None) -> None:
        self.manifest = manifest  # its manifest, None where it has none
        self.source: Source = open_source(place)
        self._indexes: dict[str, TensorIndex] = {}
        self._renaming: Renaming | None = None

    @classmethod
    def open(cls, place: Path | Place) -> Self:
        """Opens a step with the manifest in it, if there is one."""
        stored = cls(place)
        try:
            if stored.has_file(MANIFEST_NAME):
                stored.manifest = read_manifest(stored.source)
                if isinstance(place, NearPlace):
                    stored.source = with_near_files(stored.source, place.near, stored.manifest)
        except BaseException:
            stored.close()
            raise
        return stored

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, None where that is not known."""
        count = self.manifest.source.get("world_size") if self.manifest else None
        return count if isinstance(count, int) else None

    @property
    def layout(self) -> Layout | None:
        """How its directory is laid out; None where that is not known.

        Where another saver wrote it, it follows from names that only one tool uses.
        """
        if self.manifest is not None and not self.manifest.is_sealed:
            layout = self.manifest.source.get("layout")
            return cast(Layout, layout) if layout in get_args(Layout) else None
        if self.has_file(METADATA):
            return "dcp"
        if self.has_file(step_names.TRAINER_STATE) or self.has_file(
            step_names.trainer_scheduler_file(0)
        ):
            return "trainer"
        return "accelerate"

    @property
    def attempt(self) -> str:
        """Names the save that wrote it; empty where that is not known."""
        return str(self.manifest.source.get("attempt", "")) if self.manifest else ""

    @property
    def findings(self) -> Findings:
        return Findings() if self.manifest is None else read_findings(self.manifest)

    @property
    def entries(self) -> tuple[SavedEntry, ...] | None:
        return self._facts[0]

    @property
    def has_structures(self) -> bool:
        return self._facts[1]

    @cached_property
    def _facts(self) -> tuple[tuple[SavedEntry, ...] | None, bool]:
        if not self.has_file(RUN_FACTS):
            return None, False
        size = self.source.stat(RUN_FACTS).size_bytes
        check_manifest_size(size, where=RUN_FACTS)
        data = self.source.read(RUN_FACTS, 0, size)
        return parse_facts(data, where=posixpath.join(self.source.location, RUN_FACTS))

    @property
    def renaming(self) -> Renaming | None:
        """What gives it other names than it was written with."""
        return self._renaming

    @renaming.setter
    def renaming(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._indexes.clear()

    def structure(self, unit: str, path: KeyPath) -> Nodes | None:
        return self._structures.get((unit, path))

    @cached_property
    def _structures(self) -> dict[tuple[str, KeyPath], Nodes]:
        files = self.manifest.files if self.has_structures and self.manifest else ()
        renaming = self._renaming
        return {
            (unit, path): nodes
            for file in files
            if file.startswith(step_names.VALUES_FILES)
            for unit, stored, nodes in parse_structures(
                self.file(file), where=posixpath.join(self.source.location, file)
            )
            if (path := stored if renaming is None else renaming.path(unit, stored)) is not None
        }

    def entry(self, key: str, position: int | None) -> SavedEntry | None:
        entries = (e for e in self.entries or () if (e.key, e.position) == (key, position))
        return next(entries, None)

    def index(self, unit: str) -> TensorIndex:
        if unit not in self._indexes:
            path = posixpath.join(unit, METADATA)
            self._require(path)
            candidate = Candidate(DcpReader.name, unit, (path,), "")
            index = DcpReader().read_index(self.source, candidate)
            renaming = self._renaming
            self._indexes[unit] = index if renaming is None else renaming.index(unit, index)
        return self._indexes[unit]

    def has_value(self, unit: str, path: KeyPath) -> bool:
        """Whether there is a value that is no tensor under a key."""
        return path in self.index(unit).values

    def value(self, unit: str, path: KeyPath) -> Any:
        blob = self.index(unit).values[path]
        return read_object(self.source, blob, where=repr(".".join(map(str, path))))

    def prove_values(self, unit: str, keys: Container[str]) -> None:
        """Compares values with the checksums in them, unless the manifest has one of their file."""
        for path, blob in self.index(unit).values.items():
            where = ".".join(map(str, path))
            if where in keys and isinstance(blob, BlobRef) and self.digest(blob.path) is None:
                read, size = open_blob(self.source, blob, where=where)
                open_archive(read, size, where=f"{blob.path}, {where!r}").prove()

    def file(self, path: str) -> Any:
        self._require(path)
        return read_torch_file(self.source, path)

    def has_file(self, path: str) -> bool:
        if self.manifest is not None:
            return path in self.manifest.files
        try:
            self.source.stat(path)
        except MissingFileError:
            return False
        return True

    def digest(self, path: str) -> str | None:
        record = self.manifest.files.get(path) if self.manifest is not None else None
        return record.digest or None if record is not None else None

    def check_digests(self) -> None:
        """Reads all small files whose checksum the manifest has, and compares them."""
        if self.manifest is not None:
            for problem in digest_problems(self.source, "", self.manifest, leaving_out=()):
                where = posixpath.join(self.source.location, problem.where)
                raise ChecksumError(problem.message, where=where)

    def close(self) -> None:
        self.source.close()

    def _require(self, path: str) -> None:
        if not self.has_file(path):
            source = self.manifest.source if self.manifest is not None else {}
            if path in step_of_source(0, "", source).thinned:
                raise lost_optimizer(self.source.location, path)
            raise ResumeError(
                f"{path!r} was not saved with this step",
                where=self.source.location,
                hint="resume with the models, optimizers and objects that were saved",
            )


def lost_optimizer(location: str, path: str) -> ResumeError:
    """Returns the error for a thinned step; `path` is a file of its optimizer."""
    return ResumeError(
        "has lost its optimizer: `ckptkit prune --drop-optimizer-older-than` removed"
        f" {posixpath.dirname(path) or path!r}",
        where=location,
        hint="resume from a newer step, or without the optimizer",
    )
