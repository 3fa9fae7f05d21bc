"""What a plan depends on, worked out anew only for pieces that are new."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch

from ckptkit.training.state.pieces import Piece, select_owned

Signature = tuple[object, ...]


def signature_of(pieces: Sequence[Piece], owned: Sequence[bool]) -> Signature:
    return tuple(map(_row, pieces, owned))


class Signatures:
    """Remembers the pieces of the last time, most of which come again, without holding them."""

    def __init__(self) -> None:
        self._pieces: list[weakref.ref[Piece]] = []
        self._owned: tuple[bool, ...] = ()
        self._signature: Signature = ()

    def of(self, pieces: Sequence[Piece]) -> tuple[tuple[bool, ...], Signature]:
        """Returns which of the pieces this rank writes, and their signature.

        Args:
            pieces: All that lie on this rank; see `ownership.owned`.
        """
        known = [piece() for piece in self._pieces]
        if len(known) == len(pieces) and all(map(operator.is_, pieces, known)):
            return self._owned, self._signature
        owners = select_owned(pieces)
        if len(known) != len(pieces):
            self._signature = signature_of(pieces, owners)
        else:
            before = zip(known, self._owned, self._signature, strict=True)
            self._signature = tuple(
                row if piece is old and own == owner else _row(piece, owner)
                for piece, owner, (old, own, row) in zip(pieces, owners, before, strict=True)
            )
        self._pieces, self._owned = [weakref.ref(piece) for piece in pieces], owners
        return owners, self._signature


def _row(piece: Piece, own: bool) -> object:  # noqa: FBT001  one of two columns
    local = piece.local
    return (
        piece.unit,
        piece.key_path,
        piece.shape,
        piece.places,
        piece.aliases,
        piece.replicas.spread,
        piece.frozen,
        own,
        local.dtype,
        local.device,
        local.shape,
        local.stride() if local.layout is torch.strided else local.layout,
    )
