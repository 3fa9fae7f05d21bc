"""Which checkpoints of a Trainer's run can be resumed from, and which of them may go."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import distributed

from ckptkit.core.errors import CkptkitError, ResumeError, error_from_json
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp import METADATA
from ckptkit.planning.retention import Retention, StepFacts, abandoned, steps_to_remove
from ckptkit.training import names
from ckptkit.training.run_folder import saved_steps

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

    Raises:
        ResumeError: If there is none.
    """
    for saved in reversed(saved_steps(run)):
        if saved.complete or _is_whole_stock(saved.path):
            return saved.path
        logger.warning("%s is passed over: %s", saved.path, saved.problem)
    raise ResumeError(
        "no complete checkpoint was found",
        where=str(run),
        hint="leave resume_from_checkpoint out to train from the start",
    )


def newest_of_all(run: Path) -> Path:
    """Returns the newest checkpoint as rank 0 finds it, on all ranks; they all have to call this.

    Others may still see an older state of a shared file system.

    Raises:
        ResumeError: If there is none.
    """  # noqa: DOC501  made from what rank 0 sent
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
    """Tells whether a checkpoint holds a model in shards, written by ckptkit or the Trainer."""
    return (folder / names.model_unit(0) / METADATA).is_file()


def has_optimizer(folder: Path) -> bool:
    """Tells whether a checkpoint holds the state of an optimizer, in shards."""
    return (folder / names.optimizer_unit(0) / METADATA).is_file()


def drop_sentinel(folder: Path) -> None:
    """Removes the Trainer's mark of a step under way, which is no longer needed.

    The step gets its name when it is complete, and something else must not have it by then.
    """
    (folder / _SENTINEL).unlink(missing_ok=True)


def steps_beyond(
    steps: Sequence[StepFacts], limit: int | None, best: int | None
) -> tuple[int, ...]:
    """Returns the complete steps that `save_total_limit` leaves no room for.

    The newest stays and so does the best, which counts among those that stay. What is not
    complete neither counts nor goes.

    Args:
        steps: All steps of the run.
        limit: `save_total_limit`: how many may stay; all for None or 0.
        best: The step with the best metric, None where there is none.

    Source: transformers 5.23, `trainer_utils.rotate_checkpoints`.

    >>> every = [StepFacts(step) for step in (2, 4, 6, 8)]
    >>> steps_beyond(every, 2, best=4), steps_beyond(every, 2, best=8), steps_beyond(every, 1, 2)
    ((2, 6), (2, 4), (4, 6))
    """
    if limit is None or limit < 1:
        return ()
    left = abandoned(steps)
    line = sorted(facts.step for facts in steps if facts.complete and facts.step not in left)
    there = any(facts.complete and facts.step == best for facts in steps)
    room = limit - 1 if there and best not in line[-limit:] else limit
    protected = [replace(facts, protected=facts.protected or facts.step == best) for facts in steps]
    return steps_to_remove(protected, Retention(keep_last=max(room, 1)))


def _is_whole_stock(folder: Path) -> bool:
    """Tells whether the Trainer has finished a checkpoint; it writes its own state last."""
    if not (folder / names.TRAINER_STATE).is_file():
        return False
    if (folder / MANIFEST_NAME).exists() or (folder / _SENTINEL).exists():
        return False
    return holds_shards(folder) or any((folder / name).is_file() for name in _WHOLE_MODELS)
