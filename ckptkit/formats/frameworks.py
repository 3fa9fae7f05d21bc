"""Which framework wrote a checkpoint whose format is torch's own, told from what lies in it.

Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (`dump_checkpoint`),
lightning/fabric/strategies/model_parallel.py (`_save_checkpoint`), lightning 2.6;
torchtitan/components/checkpoint.py (`CheckpointManager`), torchtitan 0.2.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import InputError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import KeyPath, Problem
from ckptkit.formats.torch_archives import ArchiveTable
from ckptkit.formats.training_values import TRAINING_VALUES
from ckptkit.storage.base import Source

LIGHTNING_META = "meta.pt"
_LIGHTNING_VERSION = "pytorch-lightning_version"
_STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "num_updates", "iter")
_TITAN = frozenset({"train_state", "lr_scheduler", "optimizer"})
_MAX_STEP = 10**15


@dataclass(frozen=True, slots=True)
class Framework:
    """What a checkpoint tells of the framework that wrote it.

    Attributes:
        name: Its name; empty where nothing tells.
        version: Its version; empty where nothing tells.
        step: The training step, or None.
        notes: What could not be read, and is not needed.
        problems: What is damaged, and not needed.
    """

    name: str = ""
    version: str = ""
    step: int | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def framework_of_values(root: object) -> Framework:
    """Tells who wrote a dictionary, from the keys that a training loop gave it."""
    if not isinstance(root, dict):
        return Framework()
    version = root.get(_LIGHTNING_VERSION)
    return Framework(
        name="Lightning Trainer" if version is not None else "",
        version=version if isinstance(version, str) else "",
        step=_step_in(root),
    )


def _step_in(root: Mapping[Any, Any]) -> int | None:
    found = (root.get(key) for key in _STEP_KEYS)
    return next((n for n in found if type(n) is int and 0 <= n <= _MAX_STEP), None)


def framework_of_meta(source: Source, path: str) -> Framework:
    """Tells what Lightning's `meta.pt`, beside shards, says; the weights do not need it."""
    try:
        file = ArchiveTable().open(source, path, TRAINING_VALUES)
    except (UnsafePickleError, UnsupportedError) as error:
        note = f"{posixpath.basename(path)} was left unread: {error.message}"
        return Framework("Lightning", notes=(note,))
    except InputError as error:
        return Framework("Lightning", problems=(Problem(error.code, path, error.message),))
    found = framework_of_values(file.root)
    return Framework(found.name or "Lightning Fabric", found.version, found.step)


def framework_of_keys(paths: Iterable[KeyPath]) -> Framework:
    """Tells who wrote shards, from the paths of what they hold."""
    heads = {path[0] for path in paths if path}
    return Framework("torchtitan") if heads >= _TITAN else Framework()
