"""What tests of reports share: a state dict as a checkpoint, and the notes of a conversion."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from ckptkit.engine.outcome import Event, Planned
from ckptkit.storage.places import PathLike

REPORTS = Path(__file__).resolve().parents[2] / "fixtures" / "reports"


def save(state: Mapping[str, Any], folder: Path) -> Path:
    """Saves a state dict as one rank does; returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def change_quantization(folder: Path, **values: Any) -> None:
    """Changes what the configuration of a model says of how it is packed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


def notes_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Returns the notes of a conversion."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        notes.extend(event.notes if isinstance(event, Planned) else ())

    call(*arguments, listener=listen, **options)
    return notes


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a model folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def converted(
    src: PathLike, out: Path, **options: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the tensors of the output, and the notes."""
    notes = notes_of(ckptkit.consolidate, src, out, **options)
    return tensors_of(out), notes


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name
