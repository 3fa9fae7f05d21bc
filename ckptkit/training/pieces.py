"""What a rank holds of the training state, as plain values: pieces of tensors, objects, files.

A piece says both where its bytes come from in a save and where they go in a resume, so that the
state is walked by one and the same code for both.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

import torch

from ckptkit.core.index import Box, KeyPath, Shape

Watched = tuple[weakref.ref[torch.Tensor], ...]
Entry = tuple[str, KeyPath]
"""The DCP directory of a tensor, and its key path there."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Which ranks hold the same elements.

    Attributes:
        count: How many ranks hold them.
        own: Which of these this rank is, from 0.
        spread: Whether any of them may write, because training keeps them equal; where it does
            not (buffers, values outside any wrapper) the first one, rank 0, always writes.
    """

    count: int = 1
    own: int = 0
    spread: bool = True


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Piece:
    """The part of one tensor that lies on this rank.

    Attributes:
        unit: The DCP directory that it belongs to, relative to the step's; empty for the step's.
        key_path: The path of dictionary keys and list positions, as DCP's `planner_data` has it.
        shape: Of the full tensor, in elements.
        places: Disjoint boxes of the full tensor; `local` holds the elements of the first in
            row-major order, then those of the second, and so on. None where nothing of the
            tensor lies on this rank.
        local: The elements, on any device, with any strides. A single box has its shape; several
            lie one after another in a contiguous tensor of one dimension.
        replicas: Which other ranks hold the same elements.
        aliases: Further key paths in the same unit under which the same tensor is known (ties).
        watched: Of weights that are not trained: the tensors by whose version counters one sees
            that somebody changed the elements all the same. They are not kept alive.
    """

    unit: str
    key_path: KeyPath
    shape: Shape
    places: tuple[Box, ...]
    local: torch.Tensor
    replicas: Replicas = Replicas()
    aliases: tuple[KeyPath, ...] = ()
    watched: Watched = ()

    @property
    def frozen(self) -> bool:
        """Whether training leaves the elements alone."""
        return bool(self.watched)

    @property
    def entry(self) -> Entry:
        """What names the tensor in a step."""
        return self.unit, self.key_path

    @property
    def key(self) -> str:
        """The flat key of DCP."""
        return ".".join(map(str, self.key_path))

    @property
    def elements(self) -> int:
        """How many elements lie on this rank."""
        return sum(math.prod(place.sizes) for place in self.places)

    @property
    def size_bytes(self) -> int:
        """How many bytes they take."""
        return self.elements * self.local.element_size()


@dataclass(frozen=True, slots=True)
class ObjectValue:
    """A value that is no tensor, stored in a DCP directory under a key of its own.

    Attributes:
        unit: The DCP directory.
        key_path: As for a piece.
        value: What `torch.save` will be given.
        archive: What it wrote; empty for plain values, of which it writes the same each time.
    """

    unit: str
    key_path: KeyPath
    value: object
    archive: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file of its own beside the DCP directories.

    Attributes:
        path: Relative to the step's directory, with `/`.
        data: Its bytes.
    """

    path: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Dispensable:
    """An entry of the state without which a step is still worth having: an optimizer.

    Attributes:
        name: What it is called in messages.
        unit: The DCP directory.
        path: What all its key paths begin with.
        problem: Why this rank cannot save it; empty if it can.
    """

    name: str
    unit: str
    path: KeyPath
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        """Returns it as a rank's record has it."""
        path = list(self.path)
        return {"name": self.name, "unit": self.unit, "path": path, "problem": self.problem}


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that one rank holds of the state.

    Attributes:
        pieces: Parts of tensors, replicas included, in an order that is the same on every rank
            that holds the same tensors.
        objects: What this rank has to write as objects into DCP directories.
        files: What this rank has to write as files.
        dispensable: The entries that the step may do without.
    """

    pieces: tuple[Piece, ...]
    objects: tuple[ObjectValue, ...] = ()
    files: tuple[SmallFile, ...] = ()
    dispensable: tuple[Dispensable, ...] = ()
