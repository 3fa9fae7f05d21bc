"""Detects whether frozen tensors, and the files that hold them, changed since a save."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptkit.training.state.dtensors import memory_layout
from ckptkit.training.state.pieces import Piece, Watched

_MOST_LINKS = 1000  # fewer than any file system allows that has hard links at all


@dataclass(frozen=True, slots=True)
class VersionWatch:
    """The state of a frozen weight at a save.

    Attributes:
        key: Its name, for messages.
        local: Its elements, kept alive so that no other tensor gets their address.
        tensors: Those whose version counters are compared.
        versions: How often each of them was changed in place; None where torch does not count.
    """

    key: str
    local: torch.Tensor
    tensors: Watched
    versions: tuple[int, ...] | None

    @classmethod
    def of(cls, piece: Piece, *, forget: Callable[[], object]) -> VersionWatch:
        """Records the versions of a piece as they are now.

        Args:
            piece: A frozen one.
            forget: Called once one of the tensors is gone; has to drop this record.
        """

        def gone(_: weakref.ref[torch.Tensor]) -> None:
            forget()

        living = [tensor for ref in piece.watched if (tensor := ref()) is not None]
        refs = tuple(weakref.ref(tensor, gone) for tensor in living)
        return cls(piece.key, piece.local, refs, _versions(piece))

    def still_holds(self, piece: Piece) -> bool:
        """Whether a piece has the same elements in the same memory, not changed by torch."""
        return (
            self.versions is not None
            and self.versions == _versions(piece)
            and all(a() is b() for a, b in zip(self.tensors, piece.watched, strict=True))
            and memory_layout(self.local) == memory_layout(piece.local)
        )


@dataclass(frozen=True, slots=True)
class FileMark:
    """The identity of a file at a save."""

    path: Path
    status: tuple[int, ...]

    @classmethod
    def of(cls, path: Path) -> FileMark:
        return cls(path, _status(path.stat()))

    def still_holds(self) -> bool:
        """Whether the file is unchanged, and may be linked once more."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return _status(status) == self.status and status.st_nlink < _MOST_LINKS


def watched_by(
    parameter: torch.Tensor, *further: torch.Tensor, tied: Sequence[torch.Tensor] = ()
) -> Watched:
    """Returns the tensors that show changes of a frozen parameter; none if it is trained.

    Args:
        parameter: The parameter, or any other tensor of a model.
        further: Others through which its elements may be changed, or that are frozen if it is, such
            as the scales of a packed weight.
        tied: Others of the model that are the same tensor: where one is trained, all are.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        return ()
    if any(tensor.requires_grad for tensor in (parameter, *tied)):
        return ()
    others = [tensor for tensor in (*tied, *further) if tensor is not parameter]
    return tuple(map(weakref.ref, (parameter, *others)))


def _status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _versions(piece: Piece) -> tuple[int, ...] | None:
    """Returns the version counters, None where they are not known; the parameter comes first."""
    tensors = [ref() for ref in piece.watched]
    if tensors[0] is None or tensors[0].requires_grad:
        return None
    try:
        return tuple(-1 if tensor is None else tensor._version for tensor in tensors)  # noqa: SLF001 - there is no public way
    except RuntimeError:  # made in inference mode, where nothing is counted
        return None
