"""`Trainer.save_model` of a sharded model, without gathering it on one rank."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINING_ARGS_NAME

from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.integrations.transformers_checkpoints import TrainerCheckpoints

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_PARTS = "model-?????-of-?????.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_HIDDEN = ".ckptkit-model"  # where the model is whole before its files go to their place
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
    """
    if not _is_sharded(trainer.model):
        return False
    out = Path(output_dir or trainer.args.output_dir)
    with checkpoints.opened() as checkpointer:
        state = {"model": trainer.model}
        handle = checkpointer.export(out / _HIDDEN, state=state, overwrite=True)
        report = handle.report()
    if trainer.is_world_process_zero():
        if report.command:
            logger.warning("%s: the model is there in shards; run %s", out, report.command)
        else:
            _move_into(out)
        _put_beside(trainer, out)
    return True


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def _move_into(out: Path) -> None:
    """Moves a model to where it belongs, in place of an earlier one."""
    hidden = out / _HIDDEN
    names = [path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file()]
    if {_WEIGHTS, _INDEX} & {str(name) for name in names}:
        for old in (out / _INDEX, out / _WEIGHTS, *out.glob(_PARTS)):
            old.unlink(missing_ok=True)
    for name in _weights_first(names):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).replace(out / name)
    shutil.rmtree(hidden)


def _weights_first(names: Iterable[Path]) -> list[Path]:
    """Returns the names in an order in which nothing looks whole before it is."""
    last = (_INDEX, MANIFEST_NAME)
    return sorted(
        names,
        key=lambda name: (
            last.index(str(name)) + 1 if str(name) in last else 0,
            name.suffix != ".safetensors",
            name,
        ),
    )


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
