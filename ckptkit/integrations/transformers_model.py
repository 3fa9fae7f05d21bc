"""`Trainer.save_model` of a sharded model, without gathering it on one rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME

from ckptkit.core.errors import OutputError
from ckptkit.integrations.model_folders import export_into, is_sharded
from ckptkit.integrations.transformers_checkpoints import TrainerCheckpoints

_SECRETS = ("hub_token", "push_to_hub_token")


def save_model(trainer: Any, checkpoints: TrainerCheckpoints, output_dir: str | None) -> bool:
    """Writes the whole model, or the adapter of a PEFT model, from all ranks at once.

    Beside it lies what the Trainer puts there: configurations, tokenizer, and its arguments, but
    for tokens among these. The folder may hold other things, as the run's own does, which stay.

    Args:
        trainer: Whose model.
        checkpoints: Of the trainer.
        output_dir: Where to; left out, the directory of the run.

    Returns:
        Whether it did; a model that is not sharded is left to the Trainer.

    Raises:
        CkptkitError: What went wrong, on every rank.
        OutputError: On rank 0, if what lies beside the model could not be written.
    """
    if not is_sharded(trainer.model):
        return False
    out = Path(output_dir or trainer.args.output_dir)
    is_first = trainer.is_world_process_zero()
    with checkpoints.opened() as checkpointer:
        export_into(checkpointer, out, trainer.model, is_first=is_first)
    if is_first:
        try:
            _put_beside(trainer, out)
        except (OSError, RuntimeError) as error:  # torch tells of a full disk by the second
            raise OutputError(
                f"the model is there, and what the Trainer puts beside it is not: {error}",
                where=str(out),
            ) from error
    return True


def _put_beside(trainer: Any, out: Path) -> None:
    """Writes what the Trainer, and PEFT, write beside a model."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = copy.copy(trainer.args)
    for name in _SECRETS:
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, None)
    torch.save(arguments, out / TRAINING_ARGS_NAME)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    write_card = getattr(model, "create_or_update_model_card", None)
    if write_card is not None:
        write_card(str(out))
