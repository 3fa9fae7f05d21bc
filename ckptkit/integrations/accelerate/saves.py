"""The saves and loads of one Accelerator: through a Checkpointer, or by accelerate itself."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptkit.core.errors import (
    CkptkitError,
    OutputExistsError,
    SaveError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.integrations.accelerate import accelerator_state as states
from ckptkit.integrations.accelerate.accelerator_state import (
    AUTOMATIC_PREFIX,
    LoadSource,
    RegisteredObject,
    SaveTarget,
)
from ckptkit.integrations.accelerate.whole_state import whole_state
from ckptkit.integrations.checkpointers import (
    OpenRun,
    WholeCheckpointer,
    export_into,
    naming_options,
)
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.training import step_names
from ckptkit.training.agree.barrier import SharedAnswers
from ckptkit.training.agree.peers import Peers, open_peers
from ckptkit.training.export.export import ExportOptions
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.resume.loaders import describe_restored
from ckptkit.training.resume.resume import resume, resume_from
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.settings import Options, Settings, check_options
from ckptkit.training.state.collect import BoundState, WholeState, bind, split_batches_of
from ckptkit.training.state.objects import flatten, serialise

if TYPE_CHECKING:
    from accelerate import Accelerator


logger = logging.getLogger(__name__)


_TOPIC = "ckptkit.integrations.accelerate"
_TIMEOUT_SECONDS = 600.0


class AcceleratorSaves:
    """The saves and loads of one Accelerator, which it does not keep alive.

    Attributes:
        options: For the Checkpointer, if methods of the accelerator were replaced.
        waits: Whether a replaced method waits for the save.
        folder: The folder of the last save.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self.options: Options = {}
        self.waits = False
        self.folder = Path()
        self._run = OpenRun()
        self._registered: list[RegisteredObject] = []
        self._checked: tuple[list[object], str] = ([], "")
        self._logged: set[str] = set()
        self._count = 0
        self._peers_and_answers: tuple[Peers, SharedAnswers] | None = None
        self._last: SaveHandle | None = None
        self._marked: set[Path] = set()
        # Stock accelerate fails on the folder with the marks, whose name has no number.
        # Checkpointers are opened later, and so closed before this function runs.
        atexit.register(remove_marks, self._marked)

    @property
    def accelerator(self) -> Accelerator:
        found = self._accelerator()
        assert found is not None  # noqa: S101  its methods are called
        return found

    def save(
        self, output_dir: str | os.PathLike[str] | None, options: Options, stock: Mapping[str, Any]
    ) -> SaveHandle:
        """Saves; see `ckptkit.integrations.accelerate.save_state`."""
        accelerator = self.accelerator
        states.check_layout(options)
        target = states.target_of(accelerator, output_dir)
        last = self._last
        if (
            last is not None
            and not self.waits
            and isinstance(last.unheard_error, OutputExistsError)
        ):
            self.waits = True
            self._log(
                f"{self.folder} was created by another program during the save, and the save was"
                " lost: from now on each save is waited for"
            )
        self.folder = target.folder
        self._count += 1
        reason = states.stock_reason(accelerator)
        if states.saves_whole(accelerator) and options.get("staging_limit") is not None:
            reason = reason or "its files are whole, and staging_limit would cut them"
        reason = reason or self._agree_on_stock(target)
        if reason:
            self._log(f"accelerate itself saves: {reason}")
            return self._save_by_stock(output_dir, target, stock)
        if states.saves_whole(accelerator):
            handle = self._save_whole(target, options, stock)
        else:
            handle = self._open(target, options).save(
                target.step, self._state(), name=target.name, files=self._files(target)
            )
            accelerator.project_configuration.iteration += 1
        self._last = handle
        return handle

    def save_model(self, model: torch.nn.Module, out: Path, options: ExportOptions) -> None:
        """Writes a sharded model; see `ckptkit.integrations.accelerate.save_model`."""
        if self._last is not None and self.folder in (out, *out.parents):
            self._last.wait()  # the save needs the folder to be free when it commits
        is_first = bool(self.accelerator.is_main_process)
        checkpointer = self._run.checkpointer
        if checkpointer is not None:
            export_into(checkpointer, out, model, is_first=is_first, **options)
            return
        if is_first:
            self._marked.add(out)
        try:
            checkpointer = self._run.of(out, {**self.options, "local": None})
            export_into(checkpointer, out, model, is_first=is_first, **options)
        finally:
            self._end()

    def whole_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """Returns the result of `get_state_dict`; None if accelerate itself has to gather it."""
        peers, _ = self._meet()
        state = whole_state(model, peers, timeout_seconds=_TIMEOUT_SECONDS)
        if isinstance(state, str):
            self._log(f"accelerate itself gathers the model: {state}")
            return None
        return state

    def load(
        self, input_dir: str | os.PathLike[str] | None, options: Options, stock: Mapping[str, Any]
    ) -> None:
        """Loads; see `ckptkit.integrations.accelerate.load_state`."""
        accelerator = self.accelerator
        states.check_layout(options)
        settings = check_options(options)
        self._end()  # waits for the last save, which may be loaded now
        chosen: LoadSource | str = states.stock_reason(accelerator)
        if not chosen:
            if settings.local is not None:
                target = states.source_of(accelerator, input_dir)
                self._open(target, options)  # copies steps from the nodes' own disks
            chosen = self._meet()[0].agree(
                "what to load",
                self._misfit(),
                lambda reasons: _choose(accelerator, input_dir, reasons),
                timeout_seconds=settings.timeout_seconds,
            )
        if isinstance(chosen, str):
            self._log(f"accelerate itself loads: {chosen}")
            states.stock_method("load_state")(accelerator, input_dir, **stock)
            return
        if states.saves_whole(accelerator):
            states.stock_method("load_state")(accelerator, chosen["folder"], **stock)
            self._note_loaders(Path(chosen["folder"]))
            return
        call = "install(accelerator" if options is self.options else "load_state(accelerator, ..."
        with naming_options(f"{call}, {{name}}={{value}})"):
            folder = self._fill(chosen, settings)
        rank = int(accelerator.process_index)
        _put_back(accelerator, folder, rank, loaders=not chosen["ours"])
        if not chosen["ours"]:
            self._note_loaders(folder)
        states.call_load_hooks(accelerator, folder)

    def close(self) -> None:
        """Waits for the last save; a later one opens a new Checkpointer."""
        self._registered, self._checked = [], ([], "")
        try:
            self._run.close()
        finally:
            remove_marks(self._marked)
            if self._peers_and_answers is not None:
                self._peers_and_answers[0].close()
                self._peers_and_answers = None

    def _open(self, target: SaveTarget, options: Options) -> WholeCheckpointer:
        accelerator = self.accelerator
        if states.is_automatic(accelerator):
            options = states.with_limit(accelerator, options)
            # With `local`, the marks stay: they identify the run to the nodes' own disks.
            if accelerator.is_main_process and options.get("local") is None:
                self._marked.add(target.run)
        prefix = target.prefix if target.name is None else None
        return self._run.of(target.run, options, prefix=prefix)

    def _end(self) -> None:
        self._run.end()
        remove_marks(self._marked)

    def _meet(self) -> tuple[Peers, SharedAnswers]:
        if self._peers_and_answers is None:
            peers = open_peers(_TOPIC, timeout_seconds=_TIMEOUT_SECONDS, is_place=False)
            self._peers_and_answers = peers, SharedAnswers(peers.store)
        return self._peers_and_answers

    def _agree_on_stock(self, target: SaveTarget) -> str:
        """Returns why accelerate itself has to save; the first rank to answer decides."""
        automatic = states.is_automatic(self.accelerator)
        # This save cannot have created it, since it needs this rank's part.
        if automatic and os.path.lexists(target.folder):
            raise OutputExistsError(
                "the folder of this iteration exists already",
                where=str(target.folder),
                hint="set accelerator.project_configuration.iteration to the next one",
            )

        def find() -> str:
            misfit = self._misfit()
            return misfit if misfit or automatic else states.obstacle(target)

        _, answers = self._meet()
        return answers.answer(f"save/{self._count}", find)

    def _misfit(self) -> str:
        """Returns which part of the state only accelerate itself can save; checked once."""
        if states.saves_whole(self.accelerator):
            return ""
        state = self._state()
        objects = [
            entry
            for value in state.values()
            for entry in (value if isinstance(value, list) else [value])
        ]
        checked, reason = self._checked
        if list(map(id, checked)) == list(map(id, objects)):
            return reason
        reason = ""
        try:
            for other in self._bind(state).others:
                leaves = [leaf for _, leaf in flatten(other.state(), other.path)]
                # Tensors can always be saved, and there may be many.
                serialise([x for x in leaves if not isinstance(x, torch.Tensor)], other.key)
        except (UsageError, UnsupportedError, SaveError) as error:
            reason = str(error)
        self._checked = objects, reason
        return reason

    def _bind(self, state: Mapping[str, object]) -> BoundState:
        peers, _ = self._meet()
        return bind(state, layout="accelerate", rank=peers.rank, world_size=peers.world_size)

    def _state(self, *, loaders: bool = True) -> dict[str, object]:
        objects = states.registered_objects(self.accelerator)
        if list(map(id, objects)) != [id(entry.target) for entry in self._registered]:
            self._registered = [RegisteredObject(entry) for entry in objects]
        return states.state_of(self.accelerator, self._registered, loaders=loaders)

    def _files(self, target: SaveTarget) -> dict[str, bytes]:
        files = states.call_save_hooks(self.accelerator, target.folder.name)
        for name in self._of_others(files):
            del files[name]
        return files | states.files_of(self.accelerator, self._meet()[0].rank)

    def _of_others(self, files: Iterable[str]) -> list[str]:
        """Returns the files that another rank keeps: of several ranks, the first to answer."""
        peers, answers = self._meet()
        own = str(peers.rank)
        return [
            name
            for name in files
            if answers.answer(f"file/{self._count}/{name}", lambda: own) != own
        ]

    def _save_whole(
        self, target: SaveTarget, options: Options, stock: Mapping[str, Any]
    ) -> SaveHandle:
        """Saves the files that accelerate itself would write, which it gives here."""
        checkpointer = self._open(target, options)
        with tempfile.TemporaryDirectory(prefix="ckptkit-") as scratch:
            folder = Path(scratch, target.folder.name)

            def find_state() -> WholeState:
                files = states.capture_files(self.accelerator, folder, stock)
                for name in self._of_others(files.paths):
                    files.drop(name)
                return WholeState(states.models_of(self.accelerator), files.holdings())

            return checkpointer.save_whole(target.step, find_state, name=target.name)

    def _save_by_stock(
        self,
        output_dir: str | os.PathLike[str] | None,
        target: SaveTarget,
        stock: Mapping[str, Any],
    ) -> SaveHandle:
        self._end()
        if self.accelerator.is_main_process:  # it would no longer match the files
            (target.folder / MANIFEST_NAME).unlink(missing_ok=True)
        began = time.perf_counter()
        states.stock_method("save_state")(self.accelerator, output_dir, **stock)
        handle = SaveHandle(target.step)
        handle.blocked_seconds = seconds = time.perf_counter() - began
        handle.succeed(
            SaveReport(target.step, target.folder, 0, 0, seconds, 0.0, 0.0, seconds, seconds, 0.0)
        )
        return handle

    def _fill(self, chosen: LoadSource, settings: Settings) -> Path:
        """Loads a folder, or the newest complete one of automatic naming."""
        peers, _ = self._meet()
        bound = self._bind(self._state(loaders=chosen["ours"]))
        bound = bound.resuming(settings.unfit_optimizer, settings.missing_groups)
        timeout = settings.timeout_seconds
        folder = Path(chosen["folder"])
        if not chosen["newest"]:
            resume_from(bound, folder, peers, timeout_seconds=timeout)
            return folder
        run = folder.parent
        step = resume(bound, run, peers, timeout_seconds=timeout, prefix=AUTOMATIC_PREFIX)
        return run / f"{AUTOMATIC_PREFIX}{step}"

    def _note_loaders(self, folder: Path) -> None:
        """Says what ranks repeat or skip that have the state of the first of other ranks."""
        before, now = len([*folder.glob("random_states_*.pkl")]), self._meet()[0].world_size
        if not before or before == now or not self.accelerator.is_main_process:
            return
        with suppress(CkptkitError), StoredStep(folder) as stored:
            for file, loader in states.stateful_loaders(self.accelerator):
                note = ""
                if stored.has_file(file) and not split_batches_of(loader, now):
                    note = describe_restored(stored.file(file), before, now)
                if note:
                    logger.warning("%s: %s", file, note)

    def _log(self, text: str) -> None:
        if self.accelerator.is_main_process and text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)


def _choose(
    accelerator: Accelerator, input_dir: str | os.PathLike[str] | None, reasons: Sequence[str]
) -> LoadSource | str:
    """Decides on rank 0 for all ranks which folder is loaded, or why accelerate loads it."""
    reason = next(filter(None, reasons), "")
    if reason:
        return reason
    source = states.source_of(accelerator, input_dir)
    is_whole = states.saves_whole(accelerator)
    if input_dir is None:
        models, optimizers = ([], []) if is_whole else states.list_prepared(accelerator)
        return states.find_newest_folder(source.run, len(models), len(optimizers))
    if is_whole:
        return LoadSource(folder=str(source.folder), ours=False, newest=False)
    return states.examine_folder(source.folder) or f"{source.folder} holds no sharded model"


def _put_back(accelerator: Accelerator, folder: Path, rank: int, *, loaders: bool) -> None:
    """Loads accelerate's own files, which the engine does not read."""
    with StoredStep(folder) as stored:
        files = (step_names.random_states_file(rank), step_names.random_states_file(0))
        values: Mapping[str, Any] = next(
            (stored.file(file) for file in files if stored.has_file(file)), {}
        )
        if "step" in values:
            accelerator.step = int(values["step"])
        for file, loader in states.stateful_loaders(accelerator) if loaders else ():
            if stored.has_file(file):
                loader.load_state_dict(stored.file(file))


def remove_marks(runs: set[Path]) -> None:
    """Removes the marks of closed Checkpointers from runs, and empties the set."""
    while runs:
        marks = runs.pop() / MARKS_FOLDER
        with suppress(OSError):
            for path in marks.iterdir():
                if path.is_file():
                    path.unlink()
            marks.rmdir()
