"""The checkpoints of one Trainer, saved and loaded through a Checkpointer, and its state in them.

Source: transformers 5.23, `Trainer._save_checkpoint` and what it calls.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from msgspec.structs import replace
from torch import distributed
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, SaveStrategy

from ckptkit.core.errors import CkptkitError, ResumeError, UsageError, error_from_json
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.integrations.checkpointers import naming_options, register
from ckptkit.integrations.patches import saves_whole_models
from ckptkit.integrations.scalars import values_of
from ckptkit.runs.retention import RETENTION_OPTIONS, Retention, steps_to_remove
from ckptkit.runs.steps import RunStep, abandoned, step_of_source
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training import step_names
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.pushing import without_hub
from ckptkit.training.resume.stored_step import lost_optimizer
from ckptkit.training.run_folders import RunFolder, saved_steps
from ckptkit.training.settings import Options, check_options
from ckptkit.training.state import objects as rng
from ckptkit.writer.commit import remove_steps

logger = logging.getLogger(__name__)


# The files as which the Trainer saves a whole model, or an adapter.
_WHOLE_MODELS = (
    "pytorch_model_fsdp.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_SENTINEL = "checkpoint-is-incomplete.txt"
"""The file in a step that the Trainer saves when a signal ends training.

Source: transformers 5.23, `trainer_jit_checkpoint.py`.
"""


def find_newest_checkpoint(run: Path) -> Path:
    """Returns the newest complete checkpoint of a run, of ckptkit or of the Trainer.

    The Trainer itself takes the one with the highest number.
    """
    for step in reversed(saved_steps(run)):
        folder = run / step.name
        # The Trainer writes its own state last.
        is_whole_stock = (
            (folder / step_names.TRAINER_STATE).is_file()
            and not (folder / MANIFEST_NAME).exists()
            and not (folder / _SENTINEL).exists()
            and (holds_shards(folder) or any((folder / name).is_file() for name in _WHOLE_MODELS))
        )
        if step.complete or is_whole_stock:
            return folder
        logger.warning("%s is skipped: %s", folder, step.problem)
    raise ResumeError(
        "no complete checkpoint was found",
        where=str(run),
        hint="leave resume_from_checkpoint out to train from the start",
    )


def agree_on_newest(run: Path) -> Path:
    """Returns the newest checkpoint as rank 0 sees it; all ranks have to call this.

    Other ranks may still see an older state of a shared file system.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return find_newest_checkpoint(run)
    box: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            box = [find_newest_checkpoint(run)]
        except CkptkitError as error:
            box = [error.to_json()]
    distributed.broadcast_object_list(box)
    if isinstance(box[0], dict):
        raise error_from_json(box[0])
    newest: Path = box[0]
    return newest


def holds_shards(folder: Path) -> bool:
    return (folder / step_names.model_unit(0) / METADATA).is_file()


def has_optimizer(folder: Path) -> bool:
    """Returns whether a checkpoint has the optimizer, or lost it when it was saved."""
    if (folder / step_names.optimizer_unit(0) / METADATA).is_file():
        return True
    with suppress(OSError, CkptkitError):  # the Trainer itself writes no manifest
        return bool(read_local_manifest(folder).source.get("lost"))
    return False


def refuse_thinned(folder: Path) -> None:
    """Raises if a pruning has removed the optimizer, which the Trainer would begin anew."""
    try:
        source = read_local_manifest(folder).source
    except (OSError, CkptkitError):
        return  # the Trainer itself writes none; what is wrong with one, the load says
    for path in step_of_source(0, "", source).thinned[:1]:
        raise lost_optimizer(str(folder), path)


def remove_sentinel(folder: Path) -> None:
    """Removes the Trainer's mark of an unfinished step.

    The complete step is renamed to that path, which has to be free then.
    """
    (folder / _SENTINEL).unlink(missing_ok=True)


def steps_beyond(steps: Sequence[RunStep], limit: int | None, best: int | None) -> tuple[int, ...]:
    """Returns the complete steps beyond `save_total_limit`.

    The newest stays, and so does the best, which counts. Incomplete steps stay and do not count.

    Source: transformers 5.23, `trainer_utils.rotate_checkpoints`.

    >>> every = [RunStep(step) for step in (2, 4, 6, 8)]
    >>> steps_beyond(every, 2, best=4), steps_beyond(every, 2, best=8), steps_beyond(every, 1, 2)
    ((2, 6), (2, 4), (4, 6))
    """
    if limit is None or limit < 1:
        return ()
    left = abandoned(steps)
    current = sorted(step.step for step in steps if step.complete and step.step not in left)
    has_best = any(step.complete and step.step == best for step in steps)
    room = limit - 1 if has_best and best not in current[-limit:] else limit
    protected = [replace(step, protected=step.protected or step.step == best) for step in steps]
    return steps_to_remove(protected, Retention(keep_last=max(room, 1)))


def state_of(trainer: Any, *, only_model: bool = False) -> dict[str, object]:
    """Returns the model, and with it the optimizer, scheduler and scaler that there are."""
    state: dict[str, object] = {"model": trainer.model}
    if only_model or trainer.optimizer is None:  # it is created later
        return state
    optimizer = trainer.optimizer
    is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
    state["optimizer"] = optimizer.optimizer if is_wrapped else optimizer
    state["scheduler"] = trainer.lr_scheduler
    scaler = getattr(trainer.accelerator, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


def state_in(trainer: Any, folder: Path) -> dict[str, object]:
    """Returns the part of the Trainer's state that a checkpoint holds, at least the model."""
    stored = {"model"}
    if has_optimizer(folder) and (folder / step_names.trainer_scheduler_file(0)).is_file():
        stored |= {"optimizer", "scheduler"}
        stored |= {"scaler"} if (folder / step_names.scaler_file(0)).is_file() else set()
    return {key: value for key, value in state_of(trainer).items() if key in stored}


def own_state(trainer: Any) -> dict[str, bytes] | None:
    """Returns the file with the Trainer's own state; None on other ranks than 0."""
    states = trainer.state.stateful_callbacks
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    for entry in callbacks if trainer.args.should_save else ():
        if isinstance(entry, ExportableState):
            name = type(entry).__name__
            if isinstance(states.get(name), list):
                states[name].append(entry.state())
            else:
                states[name] = entry.state()
    if not trainer.is_world_process_zero():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / step_names.TRAINER_STATE
        trainer.state.save_to_json(str(path))
        return {step_names.TRAINER_STATE: path.read_bytes()}


def metrics_of(trainer: Any) -> dict[str, float]:
    """Returns the metrics of the evaluation at this step, if there was one."""
    metrics: dict[str, Any] = {}
    for entry in reversed(trainer.state.log_history):
        if entry.get("step") != trainer.state.global_step:
            break
        metrics |= {name: value for name, value in entry.items() if name.startswith("eval_")}
    return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}


def sidecar_of(trainer: Any) -> dict[str, object]:
    """Returns the tokenizer or processor that the Trainer saves with a model."""
    processor = trainer.processing_class
    if processor is None:
        processor = getattr(trainer.data_collator, "tokenizer", None)
    return {} if processor is None else {"processing_class": processor}


_REPORTERS = "transformers.integrations."
_COUNTING = frozenset({"DVCLiveCallback"})  # these count each call as a training step


def _log_report(trainer: Any, report: SaveReport) -> None:
    """Logs a report at the step that was saved, as `train/ckptkit/…`."""
    state = copy.copy(trainer.state)
    state.global_step = report.step
    values = {f"ckptkit/{name}": value for name, value in values_of(report).items()}
    for callback in trainer.callback_handler.callbacks:
        kinds = type(callback).__mro__  # the callbacks of `report_to` may be subclassed
        reports = any(kind.__module__.startswith(_REPORTERS) for kind in kinds)
        if reports and _COUNTING.isdisjoint(kind.__name__ for kind in kinds):
            callback.on_log(
                trainer.args, state, trainer.control, model=trainer.model, logs=dict(values)
            )


_SET_BY_ARGUMENTS = {
    "layout": "it is the Trainer's own",
    "prefix": "it is the Trainer's own",
    **dict.fromkeys(RETENTION_OPTIONS, "set save_total_limit in the arguments of the Trainer"),
    "keep_best": "set metric_for_best_model in the arguments of the Trainer",
    "best_mode": "set greater_is_better in the arguments of the Trainer",
}


def hub_options(trainer: Any) -> Options:
    """Returns the options to push each sharded step; none if the Trainer pushes.

    The Trainer itself pushes gathered models (`FULL_STATE_DICT`), and calls of `push_to_hub`, such
    as those of the strategy `end`.

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


def check_user_options(trainer: Any, options: Options) -> Options:
    """Returns the user's options; refuses those that the Trainer's arguments set."""
    taken = sorted(_SET_BY_ARGUMENTS.keys() & options.keys())
    if taken:
        raise UsageError(
            f"{taken[0]!r} is not an option for a Trainer",
            where="install",
            hint=_SET_BY_ARGUMENTS[taken[0]],
        )
    check_options({**hub_options(trainer), **options})
    return options


# Attributes with which callbacks of Transformers upload each step, and the values that disable it.
# Source: transformers 5.23, `integrations/integration_utils.py`.
_UPLOADS = ("_log_model", "_log_artifacts", "_log_checkpoints", "sync_checkpoints")
_NEVER = frozenset({"", "none", "false", "end"})
# Methods of the Trainer that save, and that ckptkit does not call.
# Source: transformers 5.23, `trainer.py`.
_UNCALLED = ("_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")


def _watchers(trainer: Any) -> Iterator[str]:
    """Yields the methods that may use the files of a step right after its save.

    That is `on_save` of a callback, except callbacks of Transformers that upload nothing, or a
    method of a subclass that adds to the saving, except those of TRL that only write a card.
    """
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.on_save is not TrainerCallback.on_save and _uses_files(callback):
            yield f"{kind.__name__}.on_save"
    # Source: trl 1.16; of its trainers only GRPO's adds files, with an adaptive entropy.
    trl_adds_files = bool(getattr(trainer, "use_adaptive_entropy", False))
    for kind in _own_kinds(trainer):
        adds_files = trl_adds_files or not kind.__module__.startswith("trl.")
        if "_save_checkpoint" in vars(kind) and adds_files:
            yield f"{kind.__name__}._save_checkpoint"
        if "save_model" in vars(kind):
            yield f"{kind.__name__}.save_model"


def replaces_save_model(trainer: Trainer) -> bool:
    return any("save_model" in vars(kind) for kind in _own_kinds(trainer))


def find_uncalled(trainer: Trainer) -> tuple[str, ...]:
    """Returns the methods of subclasses that replace the Trainer's saving and are not called."""
    return tuple(
        f"{kind.__name__}.{name}"
        for kind in _own_kinds(trainer)
        for name in _UNCALLED
        if name in vars(kind)
    )


def _own_kinds(trainer: Trainer) -> Iterator[type]:
    """Yields the classes of a trainer below `Trainer`, except those of ckptkit."""
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


class TrainerCheckpoints:
    """The checkpoints of one Trainer.

    Attributes:
        callback: The callback for the Trainer: it allocates memory when training begins, saves
            when a signal, Slurm or `ckptkit save-now` requests it, and reports saves.
        checkpointer: The Checkpointer while the Trainer trains; None before and after.
        handles: Those of saves, by step; finished ones may be missing.
        is_due: Whether such a requested save has not begun yet.
        is_adding: Whether a subclass's `save_model` adds files to a complete step.
    """

    def __init__(self, trainer: Trainer, *, wait: bool | None, options: Options) -> None:
        """Takes the trainer, and the arguments of `install`."""
        self.callback = _Callback(self)
        self._trainer: Any = trainer
        self._wait = wait
        self._options = check_user_options(trainer, options)
        self.checkpointer: Checkpointer | None = None
        self._run = Path()
        self._loaded: tuple[Path, bool] | None = None  # the folder, and whether all was loaded
        self.handles: dict[int, SaveHandle] = {}
        self._best: dict[int, int | None] = {}  # by step under way: the best step when it was saved
        self._spared: list[int | None] = []  # the best step, if others waited for their push
        self._rotating = threading.Lock()
        # From the thread that writes to the one that trains, which alone may call callbacks.
        self._reports: deque[SaveReport] = deque()
        self._has_warned = False
        self.is_due = False
        self.is_adding = False

    @property
    def is_active(self) -> bool:
        """Whether the Trainer shards its model with FSDP."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_xla_enabled:
            return False
        # Older versions have no such attribute.
        is_native = getattr(trainer, "is_distributed_loading_by_transformers", False)
        return bool(trainer.is_fsdp_enabled or is_native)

    def change(self, *, wait: bool | None, options: Options) -> None:
        """Changes the options; those that are not passed stay."""
        if wait is not None:
            self._wait = wait
        if options and self.checkpointer is not None:
            raise UsageError("options cannot be changed while the Trainer trains", where="install")
        self._options = check_user_options(self._trainer, {**self._options, **options})

    @contextmanager
    def training(self, run: Path) -> Iterator[None]:
        """Keeps the run open while the Trainer trains; waits for its saves at the end.

        Pushes go on by themselves.
        """
        self._loaded = None
        self._open(run)
        try:
            yield
        except BaseException:
            with suppress(CkptkitError):  # it was logged; the error that ended training is raised
                self._close()
            raise
        self._close()

    @contextmanager
    def open(self) -> Iterator[Checkpointer]:
        """Yields the Checkpointer; outside of training it is open for this block only."""
        is_training = self.checkpointer is not None
        try:
            run = self._run if is_training else Path(self._trainer.args.output_dir)
            yield self._open(run, pushes=is_training)
        finally:
            if not is_training:
                self._close()

    def prepare(self) -> None:
        """Prepares the first save, if saves are expected, so that it is as fast as later ones."""
        expected = self._trainer.args.save_strategy != SaveStrategy.NO or self._options.get("every")
        if self.checkpointer is not None and expected:
            self.checkpointer.prepare(self._saved_state())

    def is_asked(self, step: int) -> bool:
        """Returns whether a save was requested that has not begun yet."""
        if self.checkpointer is not None and self.checkpointer.should_save(step):
            self.is_due = True
        return self.is_due

    @property
    def should_stop(self) -> bool:
        """Whether training should end after the requested save."""
        return self.checkpointer is not None and self.checkpointer.stop_requested

    def save(self, run: Path) -> SaveHandle:
        """Saves a step as the Trainer's own `_save_checkpoint` does, in the background.

        Source: transformers 5.23, `Trainer._save_checkpoint`.
        """
        trainer, state = self._trainer, self._trainer.state
        step, best = state.global_step, state.best_global_step
        checkpointer = self._open(run)
        # The best model may be in a step whose save is under way.
        if best and trainer.args.save_strategy != SaveStrategy.NO:
            folder = self.folder(best)
            if best == step or best in self.handles or folder.exists():
                state.best_model_checkpoint = str(folder)
        is_last = step >= state.max_steps or trainer.control.should_training_stop
        if self._options.get("in_flight") == "skip" and (is_last or step == best or self.is_due):
            for earlier in self.handles.values():
                earlier.wait()  # so that this one is not skipped
        self.is_due = False
        if trainer.is_world_process_zero():
            self._best[step] = best
        remove_sentinel(self.folder(step))
        handle = checkpointer.save(
            step, self._saved_state(), metrics=metrics_of(trainer), files=own_state(trainer)
        )
        self.handles = {s: h for s, h in self.handles.items() if not h.done() or h.unheard_error}
        self.handles[step] = handle
        if not handle.skipped and self._is_waited_for():
            handle.result()
        return handle

    def load(self, checkpoint: str, *, whole: bool = True) -> bool:
        """Loads a checkpoint, or without `whole` its model only, as the rest is created later.

        Returns whether it was loaded; the Trainer itself loads checkpoints of another kind.
        """
        folder = Path(checkpoint)
        if not holds_shards(folder):
            return False
        state = state_in(self._trainer, folder) if whole else {"model": self._trainer.model}
        self._resume(folder, state)
        self._loaded = folder, "optimizer" in state
        return True

    def has_whole_model(self, checkpoint: object) -> bool:
        """Whether `load` reads all weights from a checkpoint; of a PEFT model it may not."""
        if not isinstance(checkpoint, str | Path) or not holds_shards(Path(checkpoint)):
            return False
        return not hasattr(self._trainer.model, "peft_config")

    def load_rest(self, checkpoint: str | None) -> bool:
        """Loads the optimizer, scheduler and scaler, which did not exist yet in `load`.

        Returns whether they are loaded; if not, the Trainer loads them itself.
        """
        if checkpoint is None or not has_optimizer(Path(checkpoint)):
            return False
        if self._loaded != (Path(checkpoint), True):
            self.load(checkpoint)
        return self._loaded == (Path(checkpoint), True)

    def load_best(self) -> bool:
        """Loads the best model; returns whether it was loaded."""
        folder = Path(self._trainer.state.best_model_checkpoint)
        if not holds_shards(folder):
            return False
        if self._trainer.is_world_process_zero():
            logger.info("loading the best model from %s", folder)
        self._resume(folder, {"model": self._trainer.model})
        return True

    def finish(self) -> None:
        ended = {step: handle.exception() for step, handle in self.handles.items()}
        failed = {
            step: error
            for step, error in ended.items()
            if error is not None and not self.handles[step].skipped
        }
        self.write_reports()
        for step in sorted(self._best.keys() - failed.keys()):
            self._rotate(step)  # or waits for the thread that does
        state, last = self._trainer.state, max(self.handles, default=0)
        lost = failed.get(state.best_global_step)
        if lost is not None:
            state.best_model_checkpoint = None
        error = failed.get(last) or (lost if self._trainer.args.load_best_model_at_end else None)
        if error is not None:
            raise error
        for step in failed:
            logger.error("step %d was not saved; later steps were", step)

    def write_reports(self) -> None:
        while self._reports:
            _log_report(self._trainer, self._reports.popleft())

    def folder(self, step: int) -> Path:
        return self._run / f"checkpoint-{step}"

    def _saved_state(self) -> dict[str, object]:
        return state_of(self._trainer, only_model=self._trainer.args.save_only_model)

    def _is_waited_for(self) -> bool:
        """Returns whether to wait for saves; logs once if the user has not asked for it."""
        if self._wait is not None:
            return self._wait
        watcher = next(_watchers(self._trainer), "")
        if watcher and not self._has_warned:
            self._has_warned = True
            if self._trainer.is_world_process_zero():
                logger.warning(
                    "each save is waited for, since %s may use its files; if it does not, pass"
                    " wait=False to install",
                    watcher,
                )
        return bool(watcher)

    def _resume(self, folder: Path, state: Mapping[str, object]) -> None:
        """Loads a checkpoint without random numbers, which the Trainer sets later."""
        states = rng.capture()
        with naming_options("install(trainer, {name}={value})"), self.open() as checkpointer:
            checkpointer.resume(state, folder=folder)
        rng.restore(states)

    def _open(self, run: Path, *, pushes: bool = True) -> Checkpointer:
        if self.checkpointer is None or run != self._run:
            self._close()
            is_first = self._trainer.is_world_process_zero()
            listener = self._options.get("listener")
            options: Options = {
                **(hub_options(self._trainer) if pushes else {}),
                **(self._options if pushes else without_hub(self._options)),
                "layout": "trainer",
                "sidecar": sidecar_of(self._trainer) | dict(self._options.get("sidecar") or {}),
                "listener": self._on_saved if is_first else listener,
            }
            self.checkpointer = Checkpointer(run, **options)
            register(self.checkpointer)
            self._run = run
        return self.checkpointer

    def _close(self) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        self.handles, self._best, self.is_due = {}, {}, False
        if checkpointer is not None:
            checkpointer.close()
        if checkpointer is not None and self._spared:  # some of them may be on the Hub now
            self._remove_beyond(self._spared.pop(), checkpointer.unpushed)
        self._spared = []  # what still waits is unknown to a Checkpointer that does not push

    def _on_saved(self, report: SaveReport) -> None:
        self._rotate(report.step)
        self._reports.append(report)
        listener = self._options.get("listener")
        if listener is not None:
            listener(report)

    def _rotate(self, step: int) -> None:
        """Removes steps beyond the limit after a durable one, once for each, on rank 0."""
        with self._rotating:
            if step not in self._best:
                return
            self._remove_beyond(self._best.pop(step), self.unpushed)

    @property
    def unpushed(self) -> Collection[int]:
        """The steps that wait for their push, on rank 0; whatever limits say, they stay."""
        return () if self.checkpointer is None else self.checkpointer.unpushed

    def _remove_beyond(self, best: int | None, waiting: Collection[int]) -> None:
        """Removes steps beyond `save_total_limit`, except those that wait for their push.

        The first save of a later training removes these.
        """
        limit = self._trainer.args.save_total_limit
        if limit is None:
            return
        try:
            gone = steps_beyond(RunFolder(self._run).steps(), limit, best)
        except CkptkitError as error:
            logger.warning("no older step is removed: %s", error)
            return
        self._spared = [best] if any(old in waiting for old in gone) else []
        _, notes = remove_steps([self.folder(old) for old in gone if old not in waiting])
        for note in notes:
            logger.warning("%s", note)


class _Callback(TrainerCallback):  # type: ignore[misc]  # its module is not followed
    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._checkpoints.prepare()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._checkpoints.write_reports()
        control.should_save = self._checkpoints.is_asked(state.global_step) or control.should_save
        if self._checkpoints.should_stop:
            control.should_training_stop = True
