"""Optimizer states that belong to slices of flat parameters, and do not tell to which.

FSDP1's optimizer works on what a rank has of a flat parameter. Its own `state_dict()` holds plain
tensors of that size, numbered, which are different on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptkit.core.index import KeyPath
from ckptkit.formats.rank_tensors import Held, is_cut

NOTE = (
    "optimizer states are left alone: they belong to slices of flat parameters, and nothing tells"
    " to which"
)


def is_of_optimizer(path: KeyPath) -> bool:
    """Tells whether a path leads into an optimizer's state."""
    return any(isinstance(step, str) and "optim" in step.lower() for step in path[:-1])


def without_cut_states(
    held: Mapping[KeyPath, Held], differ: Callable[[KeyPath], bool]
) -> tuple[dict[KeyPath, Held], int]:
    """Leaves out all states of an optimizer of which some are cut.

    Args:
        held: What the ranks have, by path.
        differ: Tells whether ranks hold different values of a plain tensor of equal shapes.

    Returns:
        The rest, and how many states were left out.
    """
    states = {path for path in held if is_of_optimizer(path)}
    cut = {
        path[:1]
        for path in states
        if held[path][0][1].shape and (is_cut(held[path]) or differ(path))
    }
    if not cut:
        return dict(held), 0
    left = {path for path in states if path[:1] in cut}
    return {path: one for path, one in held.items() if path not in left}, len(left)
