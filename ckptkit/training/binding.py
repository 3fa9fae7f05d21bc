"""The binding of the user's state, cached for as long as the same objects are passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.core.errors import UsageError
from ckptkit.core.text import a_kind
from ckptkit.training.state.bound import kind_of, leaves
from ckptkit.training.state.collect import BoundState, Layout, bind

_Leaves = tuple[tuple[str, int | None, object], ...]


class Binding:
    """Binds the state of each call; mostly it is the same as in the previous call.

    Objects are compared by identity, and kept alive, since identities are reused. Plain dicts and
    lists may be new ones each time, as in `save(step, {..., "extra": {"epoch": 3}})`.
    """

    def __init__(self, layout: Layout, *, rank: int, world_size: int) -> None:
        self._layout: Layout = layout
        self._rank = rank
        self._world_size = world_size
        self._state: Mapping[str, object] | None = None
        self._leaves: _Leaves = ()
        self._bound: BoundState | None = None

    def of(self, state: Mapping[str, object]) -> BoundState:
        """Returns the state with a place on disk for each of its values."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"expected a mapping, got {a_kind(state)}",
                where="state",
                hint='name the objects, such as {"model": model, "optimizer": optimizer}',
            )
        self._state = state
        new_leaves = leaves(state, self._layout)
        bound, self._bound = self._bound, None
        if bound is None or not _are_alike(self._leaves, new_leaves):
            bound = bind(state, layout=self._layout, rank=self._rank, world_size=self._world_size)
        else:
            bound = _with_values(bound, new_leaves)
        self._leaves, self._bound = new_leaves, bound
        return bound

    def again(self, state: Mapping[str, object] | None) -> BoundState:
        """Returns a state as `of` does; without one, that of the previous call."""
        state = self._state if state is None else state
        if state is None:
            raise UsageError(
                "missing, and no earlier call of save, prepare or resume had one",
                where="state",
                hint='pass state={"model": model}',
            )
        return self.of(state)

    def forget(self) -> None:
        self._leaves, self._bound = (), None


def _are_alike(old: _Leaves, new: _Leaves) -> bool:
    return len(old) == len(new) and all(
        before[:2] == now[:2] and (before[2] is now[2] or (_is_plain(before) and _is_plain(now)))
        for before, now in zip(old, new, strict=True)
    )


def _is_plain(leaf: tuple[str, int | None, object]) -> bool:
    return kind_of(leaf[0], leaf[2]) == "plain"


def _with_values(bound: BoundState, new_leaves: _Leaves) -> BoundState:
    """Returns the same binding with other plain values in it."""
    values = {(key, position): value for key, position, value in new_leaves}
    if all(values[other.key, other.position] is other.target for other in bound.others):
        return bound
    return replace(
        bound,
        others=tuple(
            replace(other, target=values[other.key, other.position]) for other in bound.others
        ),
    )
