"""The parts that wrappers of modules add to the names of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptkit.core.index import MOST_WRAPPERS

COMPILED = "_orig_mod"
MODULE = "module"
"""Where DDP, DataParallel and averages keep the model; models have modules of that name too."""

WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", COMPILED}
)
"""Where FSDP1, activation checkpointing, Lightning Fabric and `torch.compile` keep a module."""


def without_wrappers(name: str) -> str:
    """Returns a name without the parts that only wrappers have.

    >>> without_wrappers("_orig_mod.0._fsdp_wrapped_module.module.weight")
    '0.module.weight'
    >>> without_wrappers("_forward_module.0.weight")
    '0.weight'
    """
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def list_wrappers(names: Collection[str]) -> Iterator[str]:
    """Yields what all names begin with that wrappers of a model may have put there.

    >>> list(list_wrappers(["model.model.norm.weight", "model.lm_head.weight"]))
    ['model.']
    """
    first = next(iter(names), "").split(".")[:-1]
    for count in range(1, min(len(first), MOST_WRAPPERS) + 1):
        prefix = "".join(f"{part}." for part in first[:count])
        if not all(name.startswith(prefix) for name in names):
            return
        yield prefix
