"""Each rank decides alone what it writes, and together they write everything once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.index import Box
from ckptkit.training.state.pieces import Piece, Replicas, select_owned


def piece(name: str, elements: int, replicas: Replicas) -> Piece:
    box = Box((0,), (elements,))
    return Piece("", (name,), (elements,), (box,), torch.empty(elements), replicas)


@given(
    replicas=st.integers(1, 5),
    groups=st.lists(st.lists(st.integers(1, 300), max_size=12), min_size=1, max_size=3),
    spread=st.booleans(),
)
def test_each_piece_has_one_owner_and_the_loads_are_even(
    replicas: int, groups: list[list[int]], spread: bool
) -> None:
    owners = []
    for rank in range(replicas):
        mine = [Replicas(replicas, rank, spread) for _ in groups]
        pieces = [
            piece(f"{g}.{i}", size, mine[g])
            for g, sizes in enumerate(groups)
            for i, size in enumerate(sizes)
        ]
        owners.append(select_owned(pieces))
    assert all(sum(answers) == 1 for answers in zip(*owners, strict=True))
    for sizes, at in _slices(groups):
        loads = [
            sum(size for size, here in zip(sizes, answers[at], strict=True) if here)
            for answers in owners
        ]
        if spread and sizes:
            assert max(loads) - min(loads) <= max(sizes)
        elif not spread:
            assert not any(loads[1:])


def _slices(groups: list[list[int]]) -> list[tuple[list[int], slice]]:
    found, at = [], 0
    for sizes in groups:
        found.append((sizes, slice(at, at + len(sizes))))
        at += len(sizes)
    return found


@given(sizes=st.lists(st.integers(1, 50), max_size=8), other=st.lists(st.integers(1, 50)))
def test_what_other_groups_hold_does_not_change_who_owns_a_piece(
    sizes: list[int], other: list[int]
) -> None:
    """Ranks of one group may hold different things in another, as in two-dimensional meshes."""
    answers = []
    for own, more in ((0, other), (1, [])):
        first, second = Replicas(2, own), Replicas(2, 1 - own)
        pieces = [piece(f"o{i}", size, second) for i, size in enumerate(more)]
        pieces += [piece(f"s{i}", size, first) for i, size in enumerate(sizes)]
        answers.append(select_owned(pieces)[len(more) :])
    assert all(one != two for one, two in zip(*answers, strict=True))


def test_a_piece_without_elements_is_nobodys() -> None:
    empty = Piece("", ("a",), (4,), (), torch.empty(0), Replicas(1, 0))
    assert select_owned([empty]) == (False,)
