"""What was found out about the user's state, kept for as long as the same objects come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.core.errors import UsageError
from ckptkit.core.text import a_kind
from ckptkit.training.state.bound import kind_of, leaves
from ckptkit.training.state.collect import BoundState, Layout, bind

_Leaves = tuple[tuple[str, int | None, object], ...]


class Binding:
    """Binds the state of each call, which mostly is the one of the call before.

    Objects are compared by identity, and held on to, since identities are used again. Plain dicts
    and lists may be new ones each time, as in `save(step, {..., "extra": {"epoch": 3}})`.
    """

    def __init__(self, layout: Layout, *, rank: int, world_size: int) -> None:
        """Takes what is the same for every state."""
        self._layout: Layout = layout
        self._rank = rank
        self._world_size = world_size
        self._given: Mapping[str, object] | None = None
        self._leaves: _Leaves = ()
        self._bound: BoundState | None = None

    def of(self, state: Mapping[str, object]) -> BoundState:
        """Returns the state with a place on disk for everything in it."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{a_kind(state)} was found where a mapping was expected",
                where="state",
                hint='give the objects names, such as {"model": model, "optimizer": optimizer}',
            )
        self._given = state
        found = leaves(state, self._layout)
        bound, self._bound = self._bound, None
        if bound is None or not _are_alike(self._leaves, found):
            bound = bind(state, layout=self._layout, rank=self._rank, world_size=self._world_size)
        else:
            bound = _aimed_at(bound, found)
        self._leaves, self._bound = found, bound
        return bound

    def again(self, state: Mapping[str, object] | None) -> BoundState:
        """Returns a state as `of` does, that of the call before where none is given."""
        state = self._given if state is None else state
        if state is None:
            raise UsageError(
                "none was given, and no save, prepare or resume came before",
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


def _aimed_at(bound: BoundState, found: _Leaves) -> BoundState:
    """Returns the same binding with other plain values in it."""
    values = {(key, position): value for key, position, value in found}
    if all(values[other.key, other.position] is other.target for other in bound.others):
        return bound
    return replace(
        bound,
        others=tuple(
            replace(other, target=values[other.key, other.position]) for other in bound.others
        ),
    )
