"""Who looks at the files of a step as soon as the Trainer says that it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerCallback

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
    """Tells whether a subclass has a `save_model` of its own, which every step is given to."""
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
    """Tells whether a class puts files of its own into a step.

    Source: trl 1.16; of its trainers only GRPO's does, with an adaptive entropy.
    """
    is_of_trl = kind.__module__.startswith("trl.")
    return not is_of_trl or bool(getattr(trainer, "use_adaptive_entropy", False))
