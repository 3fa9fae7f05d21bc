"""What tests of reports share: a state dict as a checkpoint, and the notes of a conversion."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckptkit.engine.outcome import Event, Planned

REPORTS = Path(__file__).resolve().parents[2] / "fixtures" / "reports"


def save(state: Mapping[str, Any], folder: Path) -> Path:
    """Saves a state dict as one rank does; returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def notes_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Returns the notes of a conversion."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        notes.extend(event.notes if isinstance(event, Planned) else ())

    call(*arguments, listener=listen, **options)
    return notes


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a model folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same names, element types and bytes."""
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
        for name in theirs
    )
