"""What a step of a Trainer consists of.

Source: transformers 5.23, `Trainer._save_checkpoint` and what it calls.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_callback import ExportableState

from ckptkit.integrations.transformers_steps import has_optimizer
from ckptkit.training import names


def state_of(trainer: Any) -> dict[str, object]:
    """Returns what the Trainer saves: its model, optimizer, scheduler and scaler."""
    return {"model": trainer.model} if trainer.args.save_only_model else _all_of(trainer)


def state_in(trainer: Any, folder: Path) -> dict[str, object]:
    """Returns what of the Trainer's state a checkpoint holds, which may be the model alone."""
    there = {"model"}
    if has_optimizer(folder) and (folder / names.trainer_scheduler_file(0)).is_file():
        there |= {"optimizer", "scheduler"}
        there |= {"scaler"} if (folder / names.scaler_file(0)).is_file() else set()
    return {key: value for key, value in _all_of(trainer).items() if key in there}


def own_state(trainer: Any) -> dict[str, bytes] | None:
    """Returns the file with the Trainer's own state, on rank 0."""
    if trainer.args.should_save:
        _note_callbacks(trainer)
    if not trainer.is_world_process_zero():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / names.TRAINER_STATE
        trainer.state.save_to_json(str(path))
        return {names.TRAINER_STATE: path.read_bytes()}


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
