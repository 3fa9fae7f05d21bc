"""Writes sharded models into folders that may hold other files, without a gather."""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Unpack

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptkit.core.errors import CkptkitError, OutputError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.local.workdir import is_empty
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.export.export import ExportOptions
from ckptkit.training.handle import ExportReport

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_PARTS = "model-?????-of-?????.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_HIDDEN = ".ckptkit-model"  # the model is complete here before its files are moved


def is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether a model is sharded over ranks, by FSDP or as DTensors."""
    return any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def export_into(
    checkpointer: Checkpointer,
    out: Path,
    model: torch.nn.Module,
    *,
    is_first: bool,
    **options: Unpack[ExportOptions],
) -> None:
    """Writes a model, or the adapter of a PEFT model, from all ranks at once, and waits for it.

    Other files in the folder stay, except for the weights of an earlier model. The files are
    complete once the first rank has returned.

    Args:
        checkpointer: Of any run.
        out: The folder; created if it does not exist.
        model: A sharded model.
        is_first: Whether this is rank 0.
        **options: As for `Checkpointer.export`.
    """
    options = {**options, "overwrite": True}  # replaces an export that a kill interrupted
    handle = checkpointer.export(out / _HIDDEN, state={"model": model}, **options)
    report = handle.report()
    if not is_first:
        return
    if report.command:
        logger.warning("%s: the model was written in shards; run %s", out, _command(report, out))
    else:
        try:
            _move_into(out)
        except OSError as error:
            raise OutputError(
                f"the model is complete in {_HIDDEN!r} and could not be moved:"
                f" {error.strerror or error}",
                where=str(out),
                hint="free some space and move its files, or save it to another folder",
            ) from error
        logger.info("moved to %s", out)


def _command(report: ExportReport, out: Path) -> str:
    """Returns the command that writes the folder, or a new one if it holds other files."""
    is_free = not out.exists() or is_empty(out)
    target = out if is_free else out.with_name(f"{out.name}-model")
    words = [word for word in shlex.split(report.command) if word != "--overwrite"]
    return shlex.join(str(target) if word == str(out / _HIDDEN) else word for word in words)


def _move_into(out: Path) -> None:
    """Moves the files of a model into the folder, and removes an earlier model.

    The manifest of a step that training resumes from stays where it is.
    """
    hidden = out / _HIDDEN
    names = [path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file()]
    if _is_step(out):
        names = [name for name in names if str(name) != MANIFEST_NAME]
    is_whole_model = any(str(name) in {_WEIGHTS, _INDEX} for name in names)
    if is_whole_model:  # the old index would combine old and new shards
        (out / _INDEX).unlink(missing_ok=True)
    for name in _weights_first(names):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).replace(out / name)
    for old in (out / _WEIGHTS, *out.glob(_PARTS)) if is_whole_model else ():
        if old.relative_to(out) not in names:
            old.unlink(missing_ok=True)
    shutil.rmtree(hidden)


def _is_step(folder: Path) -> bool:
    try:
        return read_local_manifest(folder).kind == "training"
    except (OSError, CkptkitError):
        return False


def _weights_first(names: Iterable[Path]) -> list[Path]:
    """Returns the names in an order in which the folder looks complete only at the end."""
    last = (_INDEX, MANIFEST_NAME)
    return sorted(
        names,
        key=lambda name: (
            last.index(str(name)) + 1 if str(name) in last else 0,
            name.suffix != ".safetensors",
            name,
        ),
    )
