"""The keys under which a checkpoint holds an optimizer: as nested values, and flattened.

Nested, as torch's `get_optimizer_state_dict` returns it:

    (…, "state", "layers.0.weight", "exp_avg"), (…, "param_groups", 0, "lr")

Flattened, as it does with `flatten_optimizer_state_dict=True`, and as torchtitan saves it, every
parameter has hyperparameters of its own, so that the stages of a pipeline write different keys:

    (…, "state.layers.0.weight.exp_avg"), (…, "param_groups.layers.0.weight.lr")

ckptkit writes the same flat keys, as paths: (…, "param_groups", "layers.0.weight", "lr").

Source: `torch.distributed.checkpoint.state_dict._flatten_optim_state_dict` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptkit.core.index import KeyPath

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"


def below(paths: Iterable[KeyPath], start: KeyPath, part: str) -> Iterator[tuple[KeyPath, KeyPath]]:
    """Yields the key paths of one part of an optimizer, in front of each what follows the part.

    Args:
        paths: Of everything in a DCP directory.
        start: What comes before `state` and `param_groups`.
        part: One of these.

    >>> paths = [("o", "state", "a.b", "step"), ("o", "state.a.b.step"), ("o", "states", "c")]
    >>> [rest for rest, _ in below(paths, ("o",), "state")]
    [('a.b', 'step'), ('a.b', 'step')]
    """
    depth = len(start)
    for path in paths:
        if len(path) <= depth or path[:depth] != start:
            continue
        first = path[depth]
        if first == part:
            yield path[depth + 1 :], path
        elif isinstance(first, str) and first.startswith(f"{part}."):
            name, _, last = first[len(part) + 1 :].rpartition(".")
            yield (name, last, *path[depth + 1 :]), path
