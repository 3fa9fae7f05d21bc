"""The state of a Trainer in its checkpoints: which are complete, which are removed, what they hold.

Source: transformers 5.23, `Trainer._save_checkpoint` and what it calls.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from msgspec.structs import replace
from torch import distributed
from transformers.trainer_callback import ExportableState

from ckptkit.core.errors import CkptkitError, ResumeError, error_from_json
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.integrations.scalars import values_of
from ckptkit.runs.retention import Retention, steps_to_remove
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training import step_names
from ckptkit.training.handle import SaveReport
from ckptkit.training.run_folders import saved_steps

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


def state_of(trainer: Any) -> dict[str, object]:
    """Returns the model, optimizer, scheduler and scaler, or the model with save_only_model."""
    return {"model": trainer.model} if trainer.args.save_only_model else _all_of(trainer)


def state_in(trainer: Any, folder: Path) -> dict[str, object]:
    """Returns the part of the Trainer's state that a checkpoint holds, at least the model."""
    stored = {"model"}
    if has_optimizer(folder) and (folder / step_names.trainer_scheduler_file(0)).is_file():
        stored |= {"optimizer", "scheduler"}
        stored |= {"scaler"} if (folder / step_names.scaler_file(0)).is_file() else set()
    return {key: value for key, value in _all_of(trainer).items() if key in stored}


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


def _all_of(trainer: Any) -> dict[str, object]:
    state: dict[str, object] = {"model": trainer.model}
    if trainer.optimizer is None:  # it is created later
        return state
    optimizer = trainer.optimizer
    is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
    state["optimizer"] = optimizer.optimizer if is_wrapped else optimizer
    state["scheduler"] = trainer.lr_scheduler
    scaler = getattr(trainer.accelerator, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


_REPORTERS = "transformers.integrations."
_COUNTING = frozenset({"DVCLiveCallback"})  # these count each call as a training step


class ReportQueue:
    """Passes reports of saves from the thread that writes to the thread that trains.

    Callbacks of the Trainer expect to be called by the latter only.
    """

    def __init__(self) -> None:
        self._waiting: deque[SaveReport] = deque()

    def put(self, report: SaveReport) -> None:
        """Keeps a report until `write_to`; can be called in any thread."""
        self._waiting.append(report)

    def write_to(self, trainer: Any) -> None:
        """Logs the reports at the steps that were saved, as `train/ckptkit/…`."""
        while self._waiting:
            report = self._waiting.popleft()
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
