"""Which rank writes what several ranks hold, decided on each of them without talk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ckptkit.training.pieces import Piece, Replicas


def owned(pieces: Sequence[Piece]) -> tuple[bool, ...]:
    """Tells for each piece whether this rank writes it.

    Pieces that may be spread are dealt out by size, the largest first, each to the replica with
    the fewest bytes so far. All ranks come to the same answer, because only pieces that share
    one `Replicas` object are dealt out together: whoever makes the pieces gives those, and only
    those, that lie on the same group of ranks the same object. A piece with an object of its own
    goes to the first replica. Frozen weights are dealt out apart from the others, because most
    saves write only the others.

    Args:
        pieces: What this rank holds, in the same order on all ranks of a group.
    """
    mine = [bool(piece.places) and piece.replicas.own == 0 for piece in pieces]
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.replicas.spread and piece.replicas.count > 1 and piece.places:
            groups[id(piece.replicas), piece.frozen].append(index)
    for indices in groups.values():
        sizes = [pieces[index].size_bytes for index in indices]
        replicas = pieces[indices[0]].replicas
        for index, owner in zip(indices, _dealt(sizes, replicas), strict=True):
            mine[index] = owner == replicas.own
    return tuple(mine)


def _dealt(sizes: Sequence[int], replicas: Replicas) -> list[int]:
    loads = [0] * replicas.count
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(replicas.count), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
