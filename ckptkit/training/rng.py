"""The states of the random number generators, under the keys of accelerate and of the Trainer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators.

    Those of all CUDA devices are among them if the process uses CUDA. They live in host memory,
    so that nothing waits for a device.

    Numpy's numbers come as a list, which numpy takes as well, so that whoever reads them with
    `torch.load` needs no exception for arrays.

    Source: `accelerate.checkpointing.save_accelerator_state`.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": (kind, np.asarray(keys).tolist(), *rest),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states


_TRAINERS = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}


def under_trainer_keys(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns captured states under the keys that the Trainer gives them.

    Source: `transformers.Trainer._save_rng_state`.
    """
    return {_TRAINERS[key]: value for key, value in states.items()}


def restore(states: Mapping[str, Any]) -> None:
    """Puts the generators back to captured states; those without one stay as they are.

    Args:
        states: What `capture` returned, here or in a process with other devices: the states of
            the devices that this one has too are taken. Keys may be those of the Trainer.
    """
    states = {key: states[alias] for key, alias in _TRAINERS.items() if alias in states} | {
        key: states[key] for key in _TRAINERS if key in states
    }
    if "random_state" in states:
        version, internal, gauss = states["random_state"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        saved = states.get("torch_cuda_manual_seed", ())
        for device, state in zip(devices, saved, strict=False):
            torch.cuda.set_rng_state(state, device)
