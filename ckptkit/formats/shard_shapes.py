"""Whether the last shards are missing, told from the shapes that the others make.

Sharding cuts the rows of all matrices alike and leaves their columns. In a model the rows of one
matrix are the columns of another: where that holds for no matrix, but would for several if there
were more shards, the last ones are missing.

Source: torch.chunk, by which DTensors are split: all pieces have `ceil(rows / shards)` rows but the
last ones, which have fewer or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptkit.core.index import Shape

_MATRIX = 2
_LEAST_EVIDENCE = 2  # different numbers of columns that more shards would explain
_MOST_SHARDS = 1024


def shards_by_shapes(matrices: Iterable[tuple[Shape, int]]) -> int | None:
    """Returns how many shards there must have been, if that is more than there are.

    Args:
        matrices: For each tensor its shape, as far as its pieces reach, and how many pieces
            follow one another along its rows.

    >>> whole = [((8, 6), 2), ((6, 8), 2), ((20, 6), 2)]
    >>> half = [((4, 6), 1), ((3, 8), 1), ((10, 6), 1)]
    >>> shards_by_shapes(whole), shards_by_shapes(half)
    (None, 2)
    """
    known = [(shape, pieces) for shape, pieces in matrices if len(shape) == _MATRIX]
    if not known:
        return None
    ((there, _),) = Counter(pieces for _, pieces in known).most_common(1)
    alike = [shape for shape, pieces in known if pieces == there]
    rows = {shape[0] for shape in alike}
    columns = {shape[1] for shape in alike}
    if rows & columns:
        return None
    for shards in range(there + 1, min(8 * there + 8, _MOST_SHARDS)):
        explained = [n for n in columns if there * -(-n // shards) in rows]
        if len(explained) >= _LEAST_EVIDENCE:
            return shards
    return None
