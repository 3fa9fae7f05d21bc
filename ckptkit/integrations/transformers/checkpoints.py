"""The checkpoints of one Trainer, saved and loaded through a Checkpointer.

The options of the Checkpointer behind a Trainer: the user's, and what its arguments say.

Who looks at the files of a step as soon as the Trainer says that it was saved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HubStrategy, SaveStrategy

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.integrations.open_runs import opened as note_opened
from ckptkit.integrations.patches import saves_whole_models
from ckptkit.integrations.transformers.trainer_state import (
    Reports,
    drop_sentinel,
    has_optimizer,
    holds_shards,
    metrics_of,
    own_state,
    sidecar_of,
    state_in,
    state_of,
    steps_beyond,
)
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.run_folders import RunFolder
from ckptkit.training.settings import Options, check_options
from ckptkit.training.state import objects as rng
from ckptkit.writer.commit import clear

_TOLD_BY_ARGUMENTS = {
    "layout": "it is the Trainer's own",
    "prefix": "it is the Trainer's own",
    "keep_last": "set save_total_limit in the arguments of the Trainer",
    "keep_every": "set save_total_limit in the arguments of the Trainer",
    "keep_best": "set metric_for_best_model in the arguments of the Trainer",
    "best_mode": "set greater_is_better in the arguments of the Trainer",
}


def hub_options(trainer: Any) -> Options:
    """Returns the options that have each sharded step pushed; none where the Trainer pushes.

    The Trainer itself pushes what it has gathered (`FULL_STATE_DICT`), and what somebody calls
    `push_to_hub` for, as with the strategy `end`.

    Source: transformers 5.23, `Trainer.init_hf_repo` and `Trainer._push_from_checkpoint`.
    """
    args = trainer.args
    if not args.push_to_hub or args.hub_strategy == HubStrategy.END or saves_whole_models(trainer):
        return {}
    return {
        "push_to_hub": args.hub_model_id or Path(args.output_dir).absolute().name,
        "hub_strategy": HubStrategy(args.hub_strategy).value,
        "hub_private_repo": args.hub_private_repo,
        "hub_revision": getattr(args, "hub_revision", None),
        "hub_token": args.hub_token,
    }


def checked_options(options: Options) -> Options:
    """Returns the user's options, if they are for the user to choose."""
    taken = sorted(_TOLD_BY_ARGUMENTS.keys() & options.keys())
    if taken:
        raise UsageError(
            f"{taken[0]!r} is no option here", where="install", hint=_TOLD_BY_ARGUMENTS[taken[0]]
        )
    check_options(options)
    return options


# Attributes by which the callbacks of Transformers are told to upload each step, and the values
# that tell them not to. Source: transformers 5.23, `integrations/integration_utils.py`.
_UPLOADS = ("_log_model", "_log_artifacts", "_log_checkpoints", "sync_checkpoints")
_NEVER = frozenset({"", "none", "false", "end"})
# What the Trainer saves by, and what is not called. Source: transformers 5.23, `trainer.py`.
_PASSED_BY = ("_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")


def watcher_of(trainer: Trainer) -> str:
    """Names what may use the files of a step right after its save; empty where nothing does.

    That is a callback with an `on_save`, but for those of Transformers that upload nothing, and
    a subclass that adds something to the saving, but for those of TRL that only write a card.
    """
    return next(_watchers(trainer), "")


def _watchers(trainer: Any) -> Iterator[str]:
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.on_save is not TrainerCallback.on_save and _uses_files(callback):
            yield f"{kind.__name__}.on_save"
    for kind in _own_kinds(trainer):
        if "_save_checkpoint" in vars(kind) and _adds_files(trainer, kind):
            yield f"{kind.__name__}._save_checkpoint"
        if "save_model" in vars(kind):
            yield f"{kind.__name__}.save_model"


def replaces_save_model(trainer: Trainer) -> bool:
    return any("save_model" in vars(kind) for kind in _own_kinds(trainer))


def passed_by(trainer: Trainer) -> tuple[str, ...]:
    """Names what a subclass has of the Trainer's ways to save that is not called any more."""
    return tuple(
        f"{kind.__name__}.{name}"
        for kind in _own_kinds(trainer)
        for name in _PASSED_BY
        if name in vars(kind)
    )


def _own_kinds(trainer: Trainer) -> Iterator[type]:
    """Yields the classes of a trainer that are more than `Trainer`, and not ckptkit's."""
    for kind in type(trainer).__mro__:
        if kind is Trainer:
            return
        if not kind.__module__.startswith("ckptkit."):
            yield kind


def _uses_files(callback: TrainerCallback) -> bool:
    if not type(callback).__module__.startswith("transformers."):
        return True
    values = [getattr(callback, name, None) for name in _UPLOADS]
    return any(str(getattr(value, "value", value)).lower() not in _NEVER for value in values)


def _adds_files(trainer: Any, kind: type) -> bool:
    """Returns whether a class puts files of its own into a step.

    Source: trl 1.16; of its trainers only GRPO's does, with an adaptive entropy.
    """
    is_of_trl = kind.__module__.startswith("trl.")
    return not is_of_trl or bool(getattr(trainer, "use_adaptive_entropy", False))


logger = logging.getLogger(__name__)


class TrainerCheckpoints:
    """The checkpoints of one Trainer.

    Attributes:
        callback: What the Trainer has to call: it makes memory ready when training begins, has
            a step saved that a signal, Slurm or `ckptkit save-now` asks for, and reports saves.
        is_due: Whether somebody but the Trainer has asked for a save that has not begun.
        is_adding: Whether a subclass's `save_model` puts its own part into a complete step.
    """

    def __init__(self, trainer: Trainer, *, wait: bool | None, options: Options) -> None:
        """Takes the trainer, and what `install` was given."""
        self.callback = _Callback(self)
        self._trainer: Any = trainer
        self._wait = wait
        self._options = checked_options(options)
        self._checkpointer: Checkpointer | None = None
        self._run = Path()
        self._loaded: tuple[Path, bool] | None = None  # from where, and whether all of the state
        self._handles: dict[int, SaveHandle] = {}  # by step; those that ended well may be left out
        self._best: dict[int, int | None] = {}  # by step to come: the best one when it was saved
        self._spared: list[int | None] = []  # the best step, where others waited for their push
        self._rotating = threading.Lock()
        self._reports = Reports()
        self._has_told = False
        self.is_due = False
        self.is_adding = False

    @property
    def is_active(self) -> bool:
        """Whether the Trainer shards its model in a way that is saved here."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_xla_enabled:
            return False
        # Older versions cannot shard as they load.
        is_native = getattr(trainer, "is_distributed_loading_by_transformers", False)
        return bool(trainer.is_fsdp_enabled or is_native)

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The Checkpointer while the Trainer trains; None before and after."""
        return self._checkpointer

    @property
    def handles(self) -> Mapping[int, SaveHandle]:
        return self._handles

    def change(self, *, wait: bool | None, options: Options) -> None:
        """Takes other options than before; those that are not given stay."""
        if wait is not None:
            self._wait = wait
        if options and self._checkpointer is not None:
            raise UsageError("options were given while the Trainer trains", where="install")
        self._options = checked_options({**self._options, **options})

    @contextmanager
    def training(self, trial: Any) -> Iterator[Path]:
        """Opens the run for as long as the Trainer trains; saves under way are waited for.

        Yields:
            The directory of the run.
        """
        run = Path(self._trainer._get_output_dir(trial))  # noqa: SLF001  there is no public way
        self._loaded = None
        self._open(run)
        try:
            yield run
        except BaseException:
            with suppress(CkptkitError):  # it was logged, and what ended training says more
                self._close()
            raise
        self._close()

    @contextmanager
    def opened(self) -> Iterator[Checkpointer]:
        """Yields the Checkpointer, which outside of training is there for this only."""
        is_training = self._checkpointer is not None
        try:
            run = self._run if is_training else Path(self._trainer.args.output_dir)
            yield self._open(run, pushes=is_training)
        finally:
            if not is_training:
                self._close()

    def prepare(self) -> None:
        """Makes the first save as quick as the later ones, where saves are to be expected."""
        expected = self._trainer.args.save_strategy != SaveStrategy.NO or self._options.get("every")
        if self._checkpointer is not None and expected:
            self._checkpointer.prepare(state_of(self._trainer))

    def is_asked(self, step: int) -> bool:
        """Returns whether something but the Trainer wants a save, which has not come since."""
        if self._checkpointer is not None and self._checkpointer.should_save(step):
            self.is_due = True
        return self.is_due

    @property
    def is_told_to_stop(self) -> bool:
        """Whether training should end after the save that was asked for."""
        return self._checkpointer is not None and self._checkpointer.stop_requested

    def save(self, trial: Any) -> SaveHandle:
        """Saves a step as the Trainer's own `_save_checkpoint` does, in the background.

        Source: transformers 5.23, `Trainer._save_checkpoint`.
        """
        trainer = self._trainer
        step, run = trainer.state.global_step, Path(trainer._get_output_dir(trial))  # noqa: SLF001
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        checkpointer = self._open(run)
        self._note_best(step)
        if self._options.get("in_flight") == "skip" and self._is_wanted(step):
            for earlier in self._handles.values():
                earlier.wait()  # so that this one is not skipped
        self.is_due = False
        if trainer.is_world_process_zero():
            self._best[step] = trainer.state.best_global_step
        drop_sentinel(self.folder(step))
        handle = checkpointer.save(
            step,
            state_of(trainer),
            metrics=metrics_of(trainer),
            files=own_state(trainer),
        )
        self._handles = {s: h for s, h in self._handles.items() if not h.done() or h.unheard_error}
        self._handles[step] = handle
        if not handle.skipped and self._is_waited_for():
            handle.result()
        return handle

    def load(self, checkpoint: str, *, whole: bool = True) -> bool:
        """Loads a checkpoint.

        Args:
            checkpoint: Its directory.
            whole: Whether into all that the Trainer has, or into the model alone, since the rest
                is yet to be made.

        Returns:
            Whether it could; a checkpoint of another kind is the Trainer's own.
        """
        folder = Path(checkpoint)
        if not holds_shards(folder):
            return False
        state = state_in(self._trainer, folder) if whole else {"model": self._trainer.model}
        self._resume(folder, state)
        self._loaded = folder, "optimizer" in state
        return True

    def load_rest(self, checkpoint: str | None) -> bool:
        """Loads what was not there yet when `load` was called: optimizer, scheduler and scaler.

        Returns:
            Whether they are loaded; if not, the Trainer looks for them itself.
        """
        if checkpoint is None or not has_optimizer(Path(checkpoint)):
            return False
        if self._loaded != (Path(checkpoint), True):
            self.load(checkpoint)
        return self._loaded == (Path(checkpoint), True)

    def load_best(self) -> bool:
        """Loads the best model; returns whether it could."""
        folder = Path(self._trainer.state.best_model_checkpoint)
        if not holds_shards(folder):
            return False
        if self._trainer.is_world_process_zero():
            logger.info("loading the best model from %s", folder)
        self._resume(folder, {"model": self._trainer.model})
        return True

    def finish(self) -> None:
        """Waits for all saves."""
        failed = self._wait_for_all()
        self.tell()
        for step in sorted(self._best.keys() - failed.keys()):
            self._rotate(step)  # or waits for the thread that is about to, or at it
        state, last = self._trainer.state, max(self._handles, default=0)
        lost = failed.get(state.best_global_step)
        if lost is not None:
            state.best_model_checkpoint = None
        error = failed.get(last) or (lost if self._trainer.args.load_best_model_at_end else None)
        if error is not None:
            raise error
        for step in failed:
            logger.error("step %d was not saved, later ones were", step)

    def tell(self) -> None:
        self._reports.tell(self._trainer)

    def folder(self, step: int) -> Path:
        """Returns where a step lies once it is complete."""
        return self._run / f"checkpoint-{step}"

    def _is_waited_for(self) -> bool:
        """Returns whether saves are waited for; says once if it is not the user who wants it."""
        if self._wait is not None:
            return self._wait
        watcher = watcher_of(self._trainer)
        if watcher and not self._has_told:
            self._has_told = True
            if self._trainer.is_world_process_zero():
                logger.warning(
                    "each save is waited for, since %s may use its files; if not, pass wait=False"
                    " to install",
                    watcher,
                )
        return bool(watcher)

    def _wait_for_all(self) -> dict[int, CkptkitError]:
        """Returns what went wrong, by step."""
        ended = {step: handle.exception() for step, handle in self._handles.items()}
        return {
            step: error
            for step, error in ended.items()
            if error is not None and not self._handles[step].skipped
        }

    def _is_wanted(self, step: int) -> bool:
        """Returns whether a step is the last one, the best one, or one that somebody asked for."""
        state, control = self._trainer.state, self._trainer.control
        is_last = step >= state.max_steps or control.should_training_stop
        return bool(is_last or step == state.best_global_step or self.is_due)

    def _note_best(self, step: int) -> None:
        """Notes where the best model lies, if it was saved; its save may be under way."""
        trainer = self._trainer
        best = trainer.state.best_global_step
        if not best or trainer.args.save_strategy == SaveStrategy.NO:
            return
        if best == step or best in self._handles or self.folder(best).exists():
            trainer.state.best_model_checkpoint = str(self.folder(best))

    def _resume(self, folder: Path, state: Mapping[str, object]) -> None:
        """Loads a checkpoint; random numbers are left to the Trainer, which sets them later."""
        states = rng.capture()
        with self.opened() as checkpointer:
            checkpointer.resume(state, folder=folder)
        rng.restore(states)

    def _open(self, run: Path, *, pushes: bool = True) -> Checkpointer:
        if self._checkpointer is None or run != self._run:
            self._close()
            is_first = self._trainer.is_world_process_zero()
            listener = self._options.get("listener")
            options: Options = {
                **(hub_options(self._trainer) if pushes else {}),
                **self._options,
                "layout": "trainer",
                "sidecar": sidecar_of(self._trainer) | dict(self._options.get("sidecar") or {}),
                "listener": self._ended if is_first else listener,
            }
            self._checkpointer = Checkpointer(run, **options)
            note_opened(self._checkpointer)
            self._run = run
        return self._checkpointer

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        self._handles, self._best, self.is_due = {}, {}, False
        if checkpointer is not None:
            checkpointer.close()
        if self._spared:  # what waited for its push is at the Hub now
            self._remove_beyond(self._spared.pop())

    def _ended(self, report: SaveReport) -> None:
        self._rotate(report.step)
        self._reports.take(report)
        listener = self._options.get("listener")
        if listener is not None:
            listener(report)

    def _rotate(self, step: int) -> None:
        """Removes the steps that a durable one leaves no room for, once for each, on rank 0."""
        with self._rotating:
            if step not in self._best:
                return
            self._remove_beyond(self._best.pop(step))

    def _remove_beyond(self, best: int | None) -> None:
        """Removes what `save_total_limit` leaves no room for, but for what is not pushed yet."""
        limit = self._trainer.args.save_total_limit
        if limit is None:
            return
        waiting = self._checkpointer.unpushed if self._checkpointer is not None else ()
        try:
            gone = steps_beyond(RunFolder(self._run).steps(), limit, best)
        except CkptkitError as error:
            logger.warning("no older step goes: %s", error)
            return
        self._spared = [best] if any(old in waiting for old in gone) else []
        _, notes = clear(None, [self.folder(old) for old in gone if old not in waiting])
        for note in notes:
            logger.warning("%s", note)


class _Callback(TrainerCallback):  # type: ignore[misc]  # its module is not followed
    """What the Trainer calls."""

    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._checkpoints.prepare()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._checkpoints.tell()
        control.should_save = self._checkpoints.is_asked(state.global_step) or control.should_save
        if self._checkpoints.is_told_to_stop:
            control.should_training_stop = True
