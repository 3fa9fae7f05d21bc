"""Whether tensors are still the ones that were looked at, in the same memory."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.training.dtensors import local_part, lying


@dataclass(frozen=True, slots=True)
class Stamp:
    """Some tensors, which are not kept alive, and how their elements lay in memory.

    Attributes:
        tensors: Whoever keeps the stamp is told when one of them is gone.
        places: Address, shape, strides and type of this rank's elements.
    """

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    places: tuple[tuple[Any, ...] | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, forget: Callable[[], object]) -> Stamp:
        """Returns the stamp of tensors as they are now.

        Args:
            tensors: Those of training.
            forget: A method, itself not kept alive, that is called once any of them is gone:
                what was made of them holds on to their memory, and has to be let go.
        """
        method = weakref.WeakMethod(forget)

        def gone(_: weakref.ref[torch.Tensor]) -> None:
            living = method()
            if living is not None:
                living()

        return cls(
            tuple(weakref.ref(tensor, gone) for tensor in tensors), tuple(map(lying, tensors))
        )

    def still_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether these are the same tensors in the same memory."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, [known() for known in self.tensors]))
            and all(map(operator.eq, map(lying, tensors), self.places))
        )


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part as an object of its own, so that one can see the tensor go.

    Its shape and strides stay what they are, whatever is done to the tensor in place.
    """
    local = local_part(tensor)
    return local.detach() if local is tensor else local
