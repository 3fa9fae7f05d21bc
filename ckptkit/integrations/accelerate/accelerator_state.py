"""What an Accelerator saves, as a state for the Checkpointer, and where it saves it.

The attributes whose names begin with an underscore are accelerate's lists of what was prepared
and registered; there is no public way to them. They are read here and nowhere else.

Source: `accelerate.Accelerator.save_state` and `load_state`, `accelerate.checkpointing`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import UsageError
from ckptkit.formats.discovery import parse_step
from ckptkit.training import step_names
from ckptkit.training.settings import Options
from ckptkit.training.sidecar import StepFile
from ckptkit.training.state import objects as rng
from ckptkit.training.state.objects import torch_archive

if TYPE_CHECKING:
    from accelerate import Accelerator


AUTOMATIC_PREFIX = "checkpoint_"
_USUAL_PREFIX = "checkpoint-"
_STEP_FOLDER = re.compile(r"(checkpoint[-_])(0|[1-9]\d{0,17})")
_READ = (  # what of an accelerator is looked at here
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
    "distributed_type",
    "is_main_process",
    "process_index",
    "project_configuration",
    "save_iteration",
    "scaler",
    "state",
    "step",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a save goes.

    Attributes:
        run: The directory above it.
        step: The number of the save, in its name or counted.
        prefix: What comes before the number in the names of steps.
        name: The name of the folder where that is no step's; else None.
    """

    run: Path
    step: int
    prefix: str
    name: str | None = None

    @property
    def folder(self) -> Path:
        return self.run / (self.name or f"{self.prefix}{self.step}")


class Registered:
    """An object registered for checkpointing, known by nothing but its state.

    A learning rate scheduler that was registered has to go where registered objects go, and not
    where prepared schedulers do.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def state_dict(self) -> Any:
        return self.target.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.target.load_state_dict(state)


def is_automatic(accelerator: Accelerator) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def run_of(accelerator: Accelerator) -> Path:
    """Returns the directory in which accelerate names the folders by itself."""
    if accelerator.project_dir is None:
        raise UsageError(
            "automatic_checkpoint_naming was found without a directory for the project",
            where="Accelerator",
            hint="give the Accelerator a project_dir",
        )
    return Path(os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints")))  # noqa: PTH100, PTH118  as accelerate makes it: without following links


def target_of(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Target:
    """Returns where `accelerator.save_state(output_dir)` would save."""
    count = int(accelerator.save_iteration)
    if is_automatic(accelerator):
        return Target(run_of(accelerator), count, AUTOMATIC_PREFIX)
    if output_dir is None:
        raise UsageError(
            "was not given, and automatic_checkpoint_naming is off",
            where="output_dir",
            hint="name a directory",
        )
    return _target_at(Path(os.path.abspath(output_dir)), count)  # noqa: PTH100  links are not followed


def source_of(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Target:
    """Returns where `accelerator.load_state(input_dir)` looks."""
    if input_dir is not None:
        return _target_at(given_path(input_dir), 0)
    if is_automatic(accelerator):
        return Target(run_of(accelerator), 0, AUTOMATIC_PREFIX)
    raise UsageError(
        "was not given, and automatic_checkpoint_naming is off",
        where="input_dir",
        hint="name the directory to load",
    )


def given_path(input_dir: str | os.PathLike[str]) -> Path:
    return Path(input_dir).expanduser().absolute()


def _target_at(folder: Path, count: int) -> Target:
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match:
        return Target(folder.parent, int(match[2]), match[1])
    found = parse_step(folder.name)
    return Target(folder.parent, count if found is None else found, _USUAL_PREFIX, folder.name)


def why_stock(accelerator: Accelerator) -> str:
    """Returns why only accelerate itself can save this; empty where ckptkit can.

    It is the same on all ranks, which have prepared the same objects.
    """
    missing = [name for name in _READ if not hasattr(accelerator, name)]
    if missing:
        return f"this version of accelerate has no {', '.join(missing)}"
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind != "FSDP":
        return f"its distributed type is {kind}, not FSDP"
    form = accelerator.state.fsdp_plugin.state_dict_type
    if getattr(form, "name", form) != "SHARDED_STATE_DICT":
        return f"its state_dict_type is {getattr(form, 'name', form)}, not SHARDED_STATE_DICT"
    if getattr(accelerator.project_configuration, "save_on_each_node", False):
        return "save_on_each_node is set, so that the nodes share no file system"
    return "" if accelerator._models else "no model was prepared"  # noqa: SLF001


def with_limit(accelerator: Accelerator, options: Options) -> Options:
    limit = accelerator.project_configuration.total_limit
    return options if limit is None else {"keep_last": max(1, int(limit)), **options}


def state_of(
    accelerator: Accelerator, registered: Iterable[Registered], *, loaders: bool = True
) -> dict[str, object]:
    """Returns what `save_state` saves, under keys of ours.

    Args:
        accelerator: Whose state.
        registered: The objects that were registered for checkpointing.
        loaders: Whether dataloaders belong to it.
    """
    state: dict[str, object] = {
        "model": list(accelerator._models),  # noqa: SLF001
        # The optimizers inside accelerate's, whose class says more.
        "optimizer": [getattr(one, "optimizer", one) for one in accelerator._optimizers],  # noqa: SLF001
        "scheduler": list(accelerator._schedulers),  # noqa: SLF001
        "scaler": accelerator.scaler,
        "dataloader": [loader for _, loader in stateful_loaders(accelerator)] if loaders else [],
        "custom": list(registered),
    }
    return {key: value for key, value in state.items() if value is not None and value != []}


def registered_objects(accelerator: Accelerator) -> list[Any]:
    return list(accelerator._custom_objects)  # noqa: SLF001


def counts_of(accelerator: Accelerator) -> tuple[int, int]:
    return len(accelerator._models), len(accelerator._optimizers)  # noqa: SLF001


def prepared_model(accelerator: Accelerator, model: Any) -> Any:
    """Returns a model with the wrapper of FSDP1, which has parts of it, where it comes without."""
    wrappers = (one for one in accelerator._models if getattr(one, "module", None) is model)  # noqa: SLF001
    return next(wrappers, model)


def stateful_loaders(accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    """Yields the dataloaders that have a state, each with the file that accelerate gives it."""
    for index, loader in enumerate(accelerator._dataloaders):  # noqa: SLF001
        if getattr(loader, "use_stateful_dataloader", False):
            yield f"dl_state_dict_{index}.bin" if index else "dl_state_dict.bin", loader


def files_of(accelerator: Accelerator, rank: int) -> dict[str, bytes]:
    """Returns what stock `load_state` reads beside all that a step holds anyway.

    The file with the random numbers also has accelerate's own count of batches, by which it
    knows where it is in an accumulation of gradients.
    """
    states = {"step": int(accelerator.step), **rng.capture()}
    files: dict[str, bytes] = {step_names.random_states_file(rank): StepFile(torch_archive(states))}
    if rank == 0:  # stock accelerate lets all ranks write one file
        for name, loader in stateful_loaders(accelerator):
            files[name] = torch_archive(loader.state_dict())
    return files


def files_of_hooks(accelerator: Accelerator, name: str) -> dict[str, bytes]:
    """Calls the hooks that are called before a save, and returns the files that they write.

    Args:
        accelerator: Where they are registered.
        name: The name of the folder that they are given.
    """
    hooks = list(accelerator._save_model_state_pre_hook.values())  # noqa: SLF001
    if not hooks:
        return {}
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as scratch:
        folder = Path(scratch, name)
        folder.mkdir()
        for hook in hooks:
            # Under FSDP the second one, for the weights, is empty in accelerate as well.
            hook(accelerator._models, [], str(folder))  # noqa: SLF001
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def call_load_hooks(accelerator: Accelerator, folder: Path) -> None:
    """Calls the hooks that are called by a load, which may draw random numbers in vain."""
    hooks = list(accelerator._load_model_state_pre_hook.values())  # noqa: SLF001
    states = rng.capture() if hooks else {}
    for hook in hooks:
        hook([], str(folder))  # under FSDP without models in accelerate as well
    rng.restore(states)


def set_count(accelerator: Accelerator, states: Mapping[str, Any]) -> None:
    if "step" in states:
        accelerator.step = int(states["step"])
