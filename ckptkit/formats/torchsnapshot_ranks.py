"""What the ranks of a snapshot list, put together: each tensor once, under one path.

A tensor that is spread over ranks is put together of all that they list of it, one that is the
same on all ranks is listed once. What ranks saved for themselves (the buffers of a model that
FSDP shards, a state of random numbers) is rank 0's where all ranks have the like; else each rank
has a state of its own, as in a pipeline, and its tensors are told apart by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.core.index import KeyPath, Shape
from ckptkit.formats.pickles import shown
from ckptkit.formats.torchsnapshot_manifest import Piece, RankManifest, SavedTensor

_NAMED = 3  # tensors in a note


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A tensor of the whole checkpoint.

    Attributes:
        key: Its path in the manifest, with the rank where it is that rank's alone.
        path: The same as keys.
        shape: Its full shape.
        pieces: Its blocks, each with the rank that lists it; at least one.
    """

    key: str
    path: KeyPath
    shape: Shape
    pieces: Sequence[tuple[int, Piece]]


@dataclass(slots=True)
class Gathered:
    """What all ranks list together.

    Attributes:
        tensors: Every tensor once.
        values: Everything else, by path; what a further rank alone has, below its number.
        unread: Why tensors of a state that is not whole cannot be read, by key.
        notes: What is to be told of the ranks' own tensors.
    """

    tensors: list[GatheredTensor] = field(default_factory=list)
    values: dict[KeyPath, object] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    """What ranks list of one object of the application, such as the model.

    Attributes:
        shared: Tensors that are spread over ranks or the same on all, with who lists them.
        own: By rank, what it saved for itself.
    """

    shared: dict[str, list[tuple[int, SavedTensor]]] = field(default_factory=dict)
    own: dict[int, dict[str, SavedTensor]] = field(default_factory=dict)

    def first_difference(self) -> str:
        """Names a tensor that not all ranks have alike among their own; mostly there is none."""
        first, *others = self.own.values()
        for other in others:
            for key in dict.fromkeys([*first, *other]):
                if key not in first or key not in other or not _alike(first[key], other[key]):
                    return key
        return ""

    def note(self) -> list[str]:
        """Says which tensors are one rank's, though each has them."""
        held = list(self.own[min(self.own)])
        if not held or len(self.own) == 1:
            return []
        named = ", ".join(held[:_NAMED]) + (", …" if len(held) > _NAMED else "")
        what = (
            "1 tensor that each rank saved for itself is"
            if len(held) == 1
            else (f"{len(held)} tensors that each rank saved for itself are")
        )
        return [f"{what} rank 0's: {named}"]


def gather_ranks(ranks: Sequence[RankManifest], where: str) -> Gathered:
    """Puts together what ranks list.

    Args:
        ranks: What each lists, in order.
        where: The snapshot, for messages.

    Raises:
        FormatError: If ranks contradict each other.
        IncompleteCheckpointError: If no rank has a block of a tensor.
    """
    found = Gathered(values=_values(ranks))
    for name, state in _states(ranks).items():
        for key, parts in state.shared.items():
            if any(key in held for held in state.own.values()):
                raise FormatError(f"ranks disagree on whether {shown(key)} is shared", where=where)
            path = ranks[parts[0][0]].key_paths[key]
            found.tensors.append(_joined(key, path, parts, where))
        difference = state.first_difference()
        if difference:
            why = f"is shared by ranks whose own tensors in {name!r} differ, such as {difference!r}"
            found.unread |= dict.fromkeys(state.shared, why)
            found.notes.append(f"each rank saved a {name!r} of its own; the rank stands before it")
        else:
            found.notes += state.note()
        found.tensors += _own_tensors(state, ranks, where, by_rank=bool(difference))
    return found


def _own_tensors(
    state: _State, ranks: Sequence[RankManifest], where: str, *, by_rank: bool
) -> Iterator[GatheredTensor]:
    """Yields what ranks saved for themselves: of each, told apart, or of the first one alone."""
    for rank in state.own if by_rank else [min(state.own)]:
        for key, tensor in state.own[rank].items():
            path = ranks[rank].key_paths[key]
            if by_rank:
                yield _joined(f"{rank}/{key}", (str(rank), *path), [(rank, tensor)], where)
            else:
                yield _joined(key, path, [(rank, tensor)], where)


def _states(ranks: Sequence[RankManifest]) -> dict[str, _State]:
    states: dict[str, _State] = {}
    for rank, listed in enumerate(ranks):
        for key in listed.key_paths:
            states.setdefault(key.partition("/")[0], _State()).own.setdefault(rank, {})
        for key, tensor in listed.tensors.items():
            state = states[key.partition("/")[0]]
            if tensor.share == "own":
                state.own[rank][key] = tensor
            else:
                state.shared.setdefault(key, []).append((rank, tensor))
    return states


def _alike(first: SavedTensor, second: SavedTensor) -> bool:
    types = {piece.dtype for piece in (*first.pieces, *second.pieces)}
    return first.shape == second.shape and len(types) <= 1


def _joined(
    key: str, path: KeyPath, parts: Sequence[tuple[int, SavedTensor]], where: str
) -> GatheredTensor:
    """Puts together what ranks list of a tensor; what is the same on all is listed once."""
    kinds = {tensor.share for _, tensor in parts}
    if len(kinds) > 1 or (kinds != {"sharded"} and any(t != parts[0][1] for _, t in parts)):
        raise FormatError(f"ranks contradict each other about {shown(key)}", where=where)
    listing = parts if kinds == {"sharded"} else parts[:1]
    pieces = [(rank, piece) for rank, tensor in listing for piece in tensor.pieces]
    if not pieces:
        raise IncompleteCheckpointError(f"no rank lists a block of {shown(key)}", where=where)
    shape = parts[0][1].shape
    if shape is None:
        places = [piece.place for _, piece in pieces]
        if len({len(place.sizes) for place in places}) > 1:
            raise FormatError(f"blocks of {shown(key)} differ in dimensions", where=where)
        ends = [map(sum, zip(p.offsets, p.sizes, strict=True)) for p in places]
        shape = tuple(max(along) for along in zip(*ends, strict=True))
    return GatheredTensor(key, path, shape, pieces)


def _values(ranks: Sequence[RankManifest]) -> dict[KeyPath, object]:
    values: dict[KeyPath, object] = {}
    for rank, listed in enumerate(ranks):
        for key, value in listed.values.items():
            path = listed.key_paths[key]
            if values.setdefault(path, value) != value:
                values[str(rank), *path] = value
    return values
