"""What things are called: files and folders of a committed step, and names without wrappers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

RNG = "rng"
"""Under this key the random number generators lie with the layout `dcp`."""

VALUES_FILES = "ckptkit/values_rank_"
"""What the names of these files begin with; see `ckptkit.training.structures`."""

TRAINER_STATE = "trainer_state.json"
"""The file in which the Trainer keeps its own state."""

_COMPILED = "_orig_mod"
_RUNNERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", _COMPILED})
"""Where FSDP1, activation checkpointing and `torch.compile` keep the module that they wrap."""


def model_unit(index: int) -> str:
    """Returns the DCP directory of the model at `index`, as accelerate names it."""
    return f"pytorch_model_fsdp_{index}"


def optimizer_unit(index: int) -> str:
    """Returns the DCP directory of the optimizer at `index`, as accelerate names it."""
    return f"optimizer_{index}"


def scheduler_file(index: int) -> str:
    """Returns the file of the learning rate scheduler at `index`.

    >>> scheduler_file(0), scheduler_file(1)
    ('scheduler.bin', 'scheduler_1.bin')
    """
    return f"scheduler_{index}.bin" if index else "scheduler.bin"


def scaler_file(index: int) -> str:
    """Returns the file of the gradient scaler at `index`."""
    return f"scaler_{index}.pt" if index else "scaler.pt"


def base_unit(index: int) -> str:
    """Returns the DCP directory of what a PEFT model's adapter was put into."""
    return f"base_model_{index}"


def random_states_file(rank: int) -> str:
    """Returns the file with a rank's states of the random number generators."""
    return f"random_states_{rank}.pkl"


def trainer_scheduler_file(index: int) -> str:
    """Returns the file of the scheduler at `index`, as the Trainer calls it."""
    return f"scheduler_{index}.pt" if index else "scheduler.pt"


def random_states_files(rank: int, world_size: int) -> tuple[str, ...]:
    """Returns the files that may hold a rank's random number generators."""
    return random_states_file(rank), trainer_random_states_file(rank, world_size)


def trainer_random_states_file(rank: int, world_size: int) -> str:
    """Returns the file with a rank's random number generators, as the Trainer calls it."""
    return f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"


def custom_file(index: int) -> str:
    """Returns the file of the object at `index` that is of no kind known."""
    return f"custom_checkpoint_{index}.pkl"


def dataloader_file(index: int, rank: int) -> str:
    """Returns the file with the state of a rank's dataloader at `index`."""
    return f"ckptkit/dataloader_{index}_rank_{rank}.bin"


def values_file(rank: int) -> str:
    """Returns the file in which a rank says how nested values are put together."""
    return f"{VALUES_FILES}{rank}.bin"


def clean_fqn(name: str, parallel: Sequence[str] = ()) -> str:
    """Returns a parameter's or module's name without what wrappers put in.

    Args:
        name: As `named_parameters`, `named_modules` or a state dict has it.
        parallel: What `parallel_prefixes` returned for the model.

    >>> clean_fqn("_orig_mod.0._fsdp_wrapped_module.module.weight")
    '0.module.weight'
    >>> clean_fqn("module.module.weight", ("",))
    'module.weight'
    """
    clean = _without_wrappers(name)
    for prefix in parallel:
        if clean == f"{prefix}module":
            return prefix.removesuffix(".")
        if clean.startswith(f"{prefix}module."):
            clean = prefix + clean[len(prefix) + len("module.") :]
    return clean


def parallel_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns the names, with a dot, of the modules that keep another one under `module`.

    A module of the user's own may be called `module` too, so that the name alone does not tell.

    Returns:
        The innermost first; empty for most models.
    """
    found = [
        _without_wrappers(name) for name, module in model.named_modules() if _is_parallel(module)
    ]
    return tuple(sorted((f"{name}." if name else "" for name in found), key=len, reverse=True))


def wrapper_names(model: nn.Module) -> list[str]:
    """Returns which wrappers were found in a model, each class once, in order of appearance."""
    kinds = [
        type(module).__name__
        for module in model.modules()
        if _is_parallel(module) or not _WRAPPERS.isdisjoint(dict(module.named_children()))
    ]
    return list(dict.fromkeys(kinds))


def innermost(model: nn.Module) -> nn.Module:
    """Returns the model inside whatever runs it."""
    while True:
        is_wrapped = isinstance(model, _RUNNERS)
        inner = model.module if is_wrapped else dict(model.named_children()).get(_COMPILED)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _without_wrappers(name: str) -> str:
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel | DataParallel)
