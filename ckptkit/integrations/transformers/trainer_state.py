"""What a step of a Trainer consists of.

Source: transformers 5.23, `Trainer._save_checkpoint` and what it calls.

Which checkpoints of a Trainer's run can be resumed from, and which of them may go.

What saves cost, told to the Trainer's callbacks that draw curves: TensorBoard and others.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import distributed
from transformers.trainer_callback import ExportableState

from ckptkit.core.errors import CkptkitError, ResumeError, error_from_json
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.integrations.scalars import values_of
from ckptkit.runs.save_order import Retention, steps_to_remove
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.training import step_names
from ckptkit.training.handle import SaveReport
from ckptkit.training.run_folders import saved_steps

logger = logging.getLogger(__name__)

# What the Trainer saves a whole model as, or an adapter.
_WHOLE_MODELS = (
    "pytorch_model_fsdp.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_SENTINEL = "checkpoint-is-incomplete.txt"
"""What the Trainer puts into a step that it saves when it is told to end.

Source: transformers 5.23, `trainer_jit_checkpoint.py`.
"""


def newest_checkpoint(run: Path) -> Path:
    """Returns the newest checkpoint of a run that is complete, whoever wrote it.

    The Trainer itself takes the one with the highest number.
    """
    for step in reversed(saved_steps(run)):
        folder = run / step.name
        if step.complete or _is_whole_stock(folder):
            return folder
        logger.warning("%s is passed over: %s", folder, step.problem)
    raise ResumeError(
        "no complete checkpoint was found",
        where=str(run),
        hint="leave resume_from_checkpoint out to train from the start",
    )


def newest_of_all(run: Path) -> Path:
    """Returns the newest checkpoint as rank 0 finds it, on all ranks; they all have to call this.

    Others may still see an older state of a shared file system.

    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return newest_checkpoint(run)
    found: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            found = [newest_checkpoint(run)]
        except CkptkitError as error:
            found = [error.to_json()]
    distributed.broadcast_object_list(found)
    if isinstance(found[0], dict):
        raise error_from_json(found[0])
    newest: Path = found[0]
    return newest


def holds_shards(folder: Path) -> bool:
    return (folder / step_names.model_unit(0) / METADATA).is_file()


def has_optimizer(folder: Path) -> bool:
    return (folder / step_names.optimizer_unit(0) / METADATA).is_file()


def drop_sentinel(folder: Path) -> None:
    """Removes the Trainer's mark of a step under way, which is no longer needed.

    The step gets its name when it is complete, and something else must not have it by then.
    """
    (folder / _SENTINEL).unlink(missing_ok=True)


def steps_beyond(steps: Sequence[RunStep], limit: int | None, best: int | None) -> tuple[int, ...]:
    """Returns the complete steps that `save_total_limit` leaves no room for.

    The newest stays and so does the best, which counts among those that stay. What is not
    complete neither counts nor goes.

    Args:
        steps: All steps of the run.
        limit: `save_total_limit`: how many may stay; all for None or 0.
        best: The step with the best metric, None where there is none.

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


def _is_whole_stock(folder: Path) -> bool:
    """Returns whether the Trainer has finished a checkpoint; it writes its own state last."""
    if not (folder / step_names.TRAINER_STATE).is_file():
        return False
    if (folder / MANIFEST_NAME).exists() or (folder / _SENTINEL).exists():
        return False
    return holds_shards(folder) or any((folder / name).is_file() for name in _WHOLE_MODELS)


def state_of(trainer: Any) -> dict[str, object]:
    """Returns what the Trainer saves: its model, optimizer, scheduler and scaler."""
    return {"model": trainer.model} if trainer.args.save_only_model else _all_of(trainer)


def state_in(trainer: Any, folder: Path) -> dict[str, object]:
    """Returns what of the Trainer's state a checkpoint holds, which may be the model alone."""
    there = {"model"}
    if has_optimizer(folder) and (folder / step_names.trainer_scheduler_file(0)).is_file():
        there |= {"optimizer", "scheduler"}
        there |= {"scaler"} if (folder / step_names.scaler_file(0)).is_file() else set()
    return {key: value for key, value in _all_of(trainer).items() if key in there}


def own_state(trainer: Any) -> dict[str, bytes] | None:
    """Returns the file with the Trainer's own state, on rank 0."""
    if trainer.args.should_save:
        _note_callbacks(trainer)
    if not trainer.is_world_process_zero():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / step_names.TRAINER_STATE
        trainer.state.save_to_json(str(path))
        return {step_names.TRAINER_STATE: path.read_bytes()}


def metrics_of(trainer: Any) -> dict[str, float]:
    """Returns what the evaluation at this step has found, if there was one."""
    found: dict[str, Any] = {}
    for entry in reversed(trainer.state.log_history):
        if entry.get("step") != trainer.state.global_step:
            break
        found |= {name: value for name, value in entry.items() if name.startswith("eval_")}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def sidecar_of(trainer: Any) -> dict[str, object]:
    """Returns what the Trainer saves beside a model: a tokenizer or processor."""
    found = trainer.processing_class
    if found is None:
        found = getattr(trainer.data_collator, "tokenizer", None)
    return {} if found is None else {"processing_class": found}


def _note_callbacks(trainer: Any) -> None:
    """Takes the states of callbacks into the Trainer's own, as they are now."""
    kept = trainer.state.stateful_callbacks
    for entry in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(entry, ExportableState):
            name = type(entry).__name__
            if isinstance(kept.get(name), list):
                kept[name].append(entry.state())
            else:
                kept[name] = entry.state()


def _all_of(trainer: Any) -> dict[str, object]:
    state: dict[str, object] = {"model": trainer.model}
    if trainer.optimizer is None:  # it is made later
        return state
    optimizer = trainer.optimizer
    is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
    state["optimizer"] = optimizer.optimizer if is_wrapped else optimizer
    state["scheduler"] = trainer.lr_scheduler
    scaler = getattr(trainer.accelerator, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


_REPORTERS = "transformers.integrations."
_COUNTING = frozenset({"DVCLiveCallback"})  # which take each call for a step of training


class Reports:
    """Reports of saves, on their way from the thread that writes to the one that trains.

    Callbacks are made to be called by the latter alone.
    """

    def __init__(self) -> None:
        self._waiting: deque[SaveReport] = deque()

    def take(self, report: SaveReport) -> None:
        """Keeps a report until somebody calls `tell`; may be called in any thread."""
        self._waiting.append(report)

    def tell(self, trainer: Any) -> None:
        """Has what is kept written at the steps that were saved, as `train/ckptkit/…`."""
        while self._waiting:
            report = self._waiting.popleft()
            state = copy.copy(trainer.state)
            state.global_step = report.step
            values = {f"ckptkit/{name}": value for name, value in values_of(report).items()}
            for callback in _reporters(trainer):
                callback.on_log(
                    trainer.args, state, trainer.control, model=trainer.model, logs=dict(values)
                )


def _reporters(trainer: Any) -> Iterator[Any]:
    """Yields what `report_to` names, and what was made from it."""
    for callback in trainer.callback_handler.callbacks:
        kinds = type(callback).__mro__
        is_one = any(kind.__module__.startswith(_REPORTERS) for kind in kinds)
        if is_one and _COUNTING.isdisjoint(kind.__name__ for kind in kinds):
            yield callback
