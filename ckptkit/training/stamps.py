"""Whether tensors are still the ones that were looked at, in the same memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckptkit.training.dtensors import address


@dataclass(frozen=True, slots=True)
class Stamp:
    """Some tensors, and where their elements lay.

    Attributes:
        tensors: They are kept alive, so that their identities mean something.
        addresses: In memory, of this rank's elements.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Stamp:
        """Returns the stamp of tensors as they are now."""
        return cls(tuple(tensors), tuple(map(address, tensors)))

    def still_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether these are the same tensors in the same memory."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and all(map(operator.eq, map(address, tensors), self.addresses))
        )
