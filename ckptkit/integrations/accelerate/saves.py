"""The saves and loads of one Accelerator: through a Checkpointer, or by accelerate itself.

Folders of accelerate's: which may be replaced as a whole, and which is the newest to load.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptkit.core.errors import (
    CkptkitError,
    OutputExistsError,
    ResumeError,
    SaveError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.integrations.accelerate import accelerator_state as states
from ckptkit.integrations.accelerate.accelerator_state import AUTOMATIC_PREFIX, Registered, Target
from ckptkit.integrations.accelerate.whole_state import whole_state
from ckptkit.integrations.model_export import export_into
from ckptkit.integrations.open_runs import OpenRun
from ckptkit.integrations.patches import STOCK
from ckptkit.runs.marks import MARKS_FOLDER
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training import step_names
from ckptkit.training.agree.barrier import SharedAnswers
from ckptkit.training.agree.peers import Peers, open_peers
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.export.export import ExportOptions
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.resume.resume import resume, resume_from
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.run_folders import saved_steps
from ckptkit.training.settings import Options, Settings, check_options
from ckptkit.training.state.collect import BoundState, bind
from ckptkit.training.state.objects import flatten, serialise

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be loaded.

    Attributes:
        folder: The directory.
        ours: Whether ckptkit wrote it.
        newest: Whether it was chosen as the newest of a run, so that an older one may serve.
    """

    folder: Path
    ours: bool
    newest: bool = False


def obstacle(target: Target) -> str:
    """Returns why a folder cannot be replaced as a whole; empty where it can.

    It can if nothing is lost: if it is not there or empty, or holds what ckptkit wrote and
    nothing else.
    """
    folder = target.folder
    if folder.name.startswith(".") or folder == folder.parent:
        return f"{folder} has a name that is none for a step"
    if folder.is_symlink() or folder.is_mount():
        return f"{folder} is a link or a mount point"
    if not folder.exists():
        return ""
    extra = _not_ours(folder)
    return f"{folder} holds {extra}, which ckptkit did not write" if extra else ""


def _not_ours(folder: Path) -> str:
    """Returns the name of something in a folder that is no part of a save of ours."""
    try:
        there = {path.relative_to(folder).as_posix() for path in _files_below(folder)}
        ours = set(read_local_manifest(folder).files) if MANIFEST_NAME in there else set()
    except (OSError, CkptkitError) as error:
        return f"what cannot be read ({error})"
    return min(there - ours - {MANIFEST_NAME}, default="") if ours else min(there, default="")


def _files_below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return [folder]
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def given_folder(folder: Path) -> Chosen | None:
    """Returns what lies in a folder that the user has named; None if no sharded model does."""
    if not folder.is_dir():
        raise ResumeError("no such directory was found", where=str(folder))
    if not (folder / step_names.model_unit(0) / METADATA).is_file():
        return None
    return Chosen(folder, ours=(folder / MANIFEST_NAME).is_file())


def newest_folder(run: Path, models: int, optimizers: int) -> Chosen:
    """Returns the newest complete folder among those that accelerate has named by itself.

    One that stock accelerate wrote counts as complete if all is there that it writes before the
    random states, which come last.

    Args:
        run: The directory above them.
        models: How many models there are.
        optimizers: How many optimizers there are.
    """
    units = [step_names.model_unit(i) for i in range(models)]
    units += [step_names.optimizer_unit(i) for i in range(optimizers)]
    needed = [f"{unit}/{METADATA}" for unit in units] + [step_names.random_states_file(0)]
    for step in reversed(saved_steps(run, AUTOMATIC_PREFIX) if run.is_dir() else ()):
        folder = run / step.name
        if step.complete:
            return Chosen(folder, ours=True, newest=True)
        is_ours = (folder / MANIFEST_NAME).exists()
        if not is_ours and all((folder / name).is_file() for name in needed):
            return Chosen(folder, ours=False)
    raise ResumeError(
        "no complete folder of automatic_checkpoint_naming was found",
        where=str(run),
        hint="name the folder to load",
    )


def remove_marks(runs: set[Path]) -> None:
    """Removes what a Checkpointer leaves beside the folders of runs, and forgets the runs.

    Args:
        runs: The directories of runs in which no Checkpointer is open any more.
    """
    while runs:
        marks = runs.pop() / MARKS_FOLDER
        with suppress(OSError):
            for path in marks.iterdir():
                if path.is_file():
                    path.unlink()
            marks.rmdir()


logger = logging.getLogger(__name__)

_TOPIC = "ckptkit.integrations.accelerate"
_PATIENCE_SECONDS = 600.0


class AcceleratorSaves:
    """The saves and loads of one Accelerator, which is given to each call.

    Attributes:
        options: For the Checkpointer, where a method of the accelerator was replaced.
        waits: Whether a replaced method waits for the save.
        folder: Where the last save went.
    """

    def __init__(self) -> None:
        self.options: Options = {}
        self.waits = False
        self.folder = Path()
        self._run = OpenRun()
        self._registered: list[Registered] = []
        self._checked: tuple[list[object], str] = ([], "")
        self._told: set[str] = set()
        self._count = 0
        self._met: tuple[Peers, SharedAnswers] | None = None
        self._last: SaveHandle | None = None
        self._marked: set[Path] = set()
        # Stock accelerate finds no number in the name of the folder with the marks, and fails.
        # Checkpointers are opened later, and so closed before.
        atexit.register(remove_marks, self._marked)

    def save(
        self,
        accelerator: Accelerator,
        output_dir: str | os.PathLike[str] | None,
        options: Options,
        stock: Mapping[str, Any],
    ) -> SaveHandle:
        """Saves; see `ckptkit.integrations.accelerate.save_state`.

        Args:
            accelerator: Whose state.
            output_dir: The folder; None for automatic naming.
            options: For the Checkpointer.
            stock: Arguments for accelerate's own method, should it have to save.
        """
        target = states.target_of(accelerator, output_dir)
        self._learn(accelerator)
        self.folder = target.folder
        self._count += 1
        reason = states.why_stock(accelerator) or self._voted(accelerator, target)
        if reason:
            self._tell(accelerator, f"accelerate itself saves: {reason}")
            return self._save_by_stock(accelerator, output_dir, target, stock)
        handle = self._open(accelerator, target, options).save(
            target.step,
            self._state(accelerator),
            name=target.name,
            files=self._files(accelerator, target),
        )
        accelerator.project_configuration.iteration += 1
        self._last = handle
        return handle

    def save_model(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        out: Path,
        options: ExportOptions,
    ) -> None:
        """Writes a sharded model; see `ckptkit.integrations.accelerate.save_model`."""
        if self._last is not None and self.folder in (out, *out.parents):
            self._last.wait()  # or the folder would be taken when it is to appear
        is_first = bool(accelerator.is_main_process)
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

    def whole_state(
        self, accelerator: Accelerator, model: torch.nn.Module
    ) -> dict[str, torch.Tensor] | None:
        """Returns what `get_state_dict` returns; None where accelerate itself has to gather it."""
        peers, _ = self._meet()
        found = whole_state(model, peers, timeout_seconds=_PATIENCE_SECONDS)
        if isinstance(found, str):
            self._tell(accelerator, f"accelerate itself gathers the model: {found}")
            return None
        return found

    def load(
        self,
        accelerator: Accelerator,
        input_dir: str | os.PathLike[str] | None,
        options: Options,
        stock: Mapping[str, Any],
    ) -> None:
        """Loads; see `ckptkit.integrations.accelerate.load_state`.

        Args:
            accelerator: Whose state.
            input_dir: The folder; None for automatic naming.
            options: As for `save`.
            stock: Arguments for accelerate's own method, should it have to load.
        """
        settings = check_options(options)
        self._end()  # after its save, which may be what is to be loaded
        reason = states.why_stock(accelerator)
        if settings.local is not None and not reason:
            target = states.source_of(accelerator, input_dir)
            self._open(accelerator, target, options)  # brings what lies on the nodes' own disks
        chosen = reason or self._chosen(accelerator, input_dir, settings)
        if isinstance(chosen, str):
            self._tell(accelerator, f"accelerate itself loads: {chosen}")
            stock_method("load_state")(accelerator, input_dir, **stock)
            return
        folder = self._fill(chosen, accelerator, settings)
        rank = int(accelerator.process_index)
        _put_back(accelerator, folder, rank, loaders=not chosen.ours)
        states.call_load_hooks(accelerator, folder)

    def close(self) -> None:
        """Waits for the last save; a later one opens a Checkpointer anew."""
        self._registered, self._checked = [], ([], "")
        try:
            self._run.close()
        finally:
            remove_marks(self._marked)
            if self._met is not None:
                self._met[0].close()
                self._met = None

    def _open(self, accelerator: Accelerator, target: Target, options: Options) -> Checkpointer:
        if states.is_automatic(accelerator):
            options = states.with_limit(accelerator, options)
            # By the marks the nodes' own disks know the run; a step may not have been drained.
            if accelerator.is_main_process and options.get("local") is None:
                self._marked.add(target.run)
        prefix = target.prefix if target.name is None else None
        return self._run.of(target.run, options, prefix=prefix)

    def _learn(self, accelerator: Accelerator) -> None:
        """Has saves waited for, once a script has put something where one was to appear."""
        if self._last is None or self.waits:
            return
        if isinstance(self._last.unheard_error, OutputExistsError):
            self.waits = True
            self._tell(
                accelerator,
                f"{self.folder} was made by somebody else while it was saved, and the save was"
                " lost: from now on each one is waited for",
            )

    def _end(self) -> None:
        self._run.end()
        remove_marks(self._marked)

    def _meet(self) -> tuple[Peers, SharedAnswers]:
        if self._met is None:
            peers = open_peers(_TOPIC, timeout_seconds=_PATIENCE_SECONDS, is_place=False)
            self._met = peers, SharedAnswers(peers.store)
        return self._met

    def _voted(self, accelerator: Accelerator, target: Target) -> str:
        """Returns why accelerate itself has to save, as whichever rank comes first finds."""
        automatic = states.is_automatic(accelerator)
        # It cannot be the one of this save: that one needs this rank's part.
        if automatic and os.path.lexists(target.folder):
            raise OutputExistsError(
                "the folder of this iteration is there already",
                where=str(target.folder),
                hint="set accelerator.project_configuration.iteration to the next one",
            )

        def find() -> str:
            misfit = self._misfit(accelerator)
            return misfit if misfit or automatic else obstacle(target)

        _, votes = self._meet()
        return votes.answer(f"save/{self._count}", find)

    def _misfit(self, accelerator: Accelerator) -> str:
        """Returns what of the state only accelerate itself can save; looked for once."""
        state = self._state(accelerator)
        objects = [one for value in state.values() for one in _listed(value)]
        known, reason = self._checked
        if list(map(id, known)) != list(map(id, objects)):
            reason = _misfit(lambda: self._bind(state))
            self._checked = objects, reason
        return reason

    def _bind(self, state: Mapping[str, object]) -> BoundState:
        peers, _ = self._meet()
        return bind(state, layout="accelerate", rank=peers.rank, world_size=peers.world_size)

    def _state(self, accelerator: Accelerator, *, loaders: bool = True) -> dict[str, object]:
        objects = states.registered_objects(accelerator)
        if list(map(id, objects)) != [id(one.target) for one in self._registered]:
            self._registered = [Registered(one) for one in objects]
        return states.state_of(accelerator, self._registered, loaders=loaders)

    def _files(self, accelerator: Accelerator, target: Target) -> dict[str, bytes]:
        peers, votes = self._meet()
        own = str(peers.rank)
        files = states.files_of_hooks(accelerator, target.folder.name)
        for name in list(files):  # which several ranks may have written, as they see fit
            if votes.answer(f"file/{self._count}/{name}", lambda: own) != own:
                del files[name]
        return files | states.files_of(accelerator, peers.rank)

    def _save_by_stock(
        self,
        accelerator: Accelerator,
        output_dir: str | os.PathLike[str] | None,
        target: Target,
        stock: Mapping[str, Any],
    ) -> SaveHandle:
        self._end()
        if accelerator.is_main_process:  # it would no longer tell the truth
            (target.folder / MANIFEST_NAME).unlink(missing_ok=True)
        began = time.perf_counter()
        stock_method("save_state")(accelerator, output_dir, **stock)
        handle = SaveHandle(target.step)
        handle.blocked_seconds = seconds = time.perf_counter() - began
        handle.succeed(
            SaveReport(target.step, target.folder, 0, 0, seconds, 0.0, 0.0, seconds, seconds, 0.0)
        )
        return handle

    def _chosen(
        self,
        accelerator: Accelerator,
        input_dir: str | os.PathLike[str] | None,
        settings: Settings,
    ) -> Chosen | str:
        """Returns what is to be loaded, or why accelerate itself has to load."""
        peers, _ = self._meet()
        choice: dict[str, Any] = peers.agree(
            "what to load",
            self._misfit(accelerator),
            lambda reasons: _choice(accelerator, input_dir, reasons),
            timeout_seconds=settings.timeout_seconds,
        )
        if "stock" in choice:
            return str(choice["stock"])
        return Chosen(Path(choice["folder"]), choice["ours"], choice["newest"])

    def _fill(self, chosen: Chosen, accelerator: Accelerator, settings: Settings) -> Path:
        """Loads a folder, or of those that accelerate names the newest that is whole."""
        peers, _ = self._meet()
        bound = self._bind(self._state(accelerator, loaders=chosen.ours))
        bound = bound.resuming(settings.unfit_optimizer)
        patience = settings.timeout_seconds
        if not chosen.newest:
            resume_from(bound, chosen.folder, peers, timeout_seconds=patience)
            return chosen.folder
        run = chosen.folder.parent
        step = resume(bound, run, peers, timeout_seconds=patience, prefix=AUTOMATIC_PREFIX)
        return run / f"{AUTOMATIC_PREFIX}{step}"

    def _tell(self, accelerator: Accelerator, text: str) -> None:
        if accelerator.is_main_process and text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


def stock_method(name: str) -> Callable[..., Any]:
    """Returns a method of accelerate's Accelerator that may have been replaced."""
    from accelerate import Accelerator

    method = getattr(Accelerator, name)
    found: Callable[..., Any] = getattr(method, STOCK, method)
    return found


def _choice(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None,
    reasons: Sequence[str],
) -> dict[str, Any]:
    """Decides for all ranks, on rank 0, what is loaded, and by whom."""
    reason = next(filter(None, reasons), "")
    if reason:
        return {"stock": reason}
    source = states.source_of(accelerator, input_dir)
    if input_dir is None:
        chosen = newest_folder(source.run, *states.counts_of(accelerator))
    else:
        found = given_folder(source.folder)
        if found is None:
            return {"stock": f"{source.folder} holds no sharded model"}
        chosen = found
    return {"folder": str(chosen.folder), "ours": chosen.ours, "newest": chosen.newest}


def _put_back(accelerator: Accelerator, folder: Path, rank: int, *, loaders: bool) -> None:
    """Puts back what accelerate keeps in files that the engine does not look into."""
    with StoredStep(folder) as stored:
        for file in (step_names.random_states_file(rank), step_names.random_states_file(0)):
            if stored.has_file(file):
                states.set_count(accelerator, stored.file(file))
                break
        for file, loader in states.stateful_loaders(accelerator) if loaders else ():
            if stored.has_file(file):
                loader.load_state_dict(stored.file(file))


def _misfit(bound: Callable[[], BoundState]) -> str:
    """Returns what of a state ckptkit cannot save, or could not load again."""
    try:
        for other in bound().others:
            leaves = [leaf for _, leaf in flatten(other.state(), other.path)]
            # Tensors are always fine, and may be many.
            serialise([x for x in leaves if not isinstance(x, torch.Tensor)], other.key)
    except (UsageError, UnsupportedError, SaveError) as error:
        return str(error)
    return ""


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]
