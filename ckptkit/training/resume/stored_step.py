"""One step on disk, opened for resuming: its manifest, its DCP directories, its small files.

`bind_to_step` finds the entries of the user's mapping in it, by the names they were saved under.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import ChecksumError, FormatError, MissingFileError, ResumeError
from ckptkit.core.index import KeyPath, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, Manifest, check_manifest_size
from ckptkit.core.text import Closing, list_first
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA, DcpReader
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
from ckptkit.training.state.optimizers import OptimizerWalk
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


class StoredStep(Closing):
    """A step's directory; also one that accelerate or `dcp.save` wrote, without a manifest."""

    def __init__(self, place: Path | Place, manifest: Manifest | None = None) -> None:
        self.manifest = manifest  # its manifest, None where it has none
        self.source: Source = open_source(place)
        self._indexes: dict[str, TensorIndex] = {}

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

        Without a manifest it follows from names that only one tool uses.
        """
        if self.manifest is not None:
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

    def structure(self, unit: str, path: KeyPath) -> Nodes | None:
        return self._structures.get((unit, path))

    @cached_property
    def _structures(self) -> dict[tuple[str, KeyPath], Nodes]:
        files = self.manifest.files if self.has_structures and self.manifest else ()
        return {
            (unit, path): nodes
            for file in files
            if file.startswith(step_names.VALUES_FILES)
            for unit, path, nodes in parse_structures(
                self.file(file), where=posixpath.join(self.source.location, file)
            )
        }

    def entry(self, key: str, position: int | None) -> SavedEntry | None:
        entries = (e for e in self.entries or () if (e.key, e.position) == (key, position))
        return next(entries, None)

    def index(self, unit: str) -> TensorIndex:
        if unit not in self._indexes:
            path = posixpath.join(unit, METADATA)
            self._require(path)
            candidate = Candidate(DcpReader.name, unit, (path,), "")
            self._indexes[unit] = DcpReader().read_index(self.source, candidate)
        return self._indexes[unit]

    def has_value(self, unit: str, path: KeyPath) -> bool:
        """Whether there is a value that is no tensor under a key."""
        return path in self.index(unit).values

    def value(self, unit: str, path: KeyPath) -> Any:
        blob = self.index(unit).values[path]
        return read_object(self.source, blob, where=repr(".".join(map(str, path))))

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
                raise ResumeError(
                    "has lost its optimizer: `ckptkit prune --drop-optimizer-older-than` removed"
                    f" {posixpath.dirname(path) or path!r}",
                    where=self.source.location,
                    hint="resume from a newer step, or without the optimizer",
                )
            raise ResumeError(
                f"{path!r} was not saved with this step",
                where=self.source.location,
                hint="resume with the models, optimizers and objects that were saved",
            )
