"""Whether tensors of training are still the same ones, in the same memory, with the same elements.

Nothing here keeps a tensor of training alive. Weak references are held to the plain tensors inside
composed ones only: see `living_part`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.training.state.dtensors import living_part, local_part, memory_layout
from ckptkit.training.state.pieces import Watched, WatchedTensor


@dataclass(frozen=True, slots=True)
class Stamp:
    """Some tensors, which are not kept alive, and the memory of their elements.

    Attributes:
        alive: References that call back when a tensor is gone.
        identities: Of the tensors.
        places: Address, shape, strides and type of this rank's elements.
    """

    alive: tuple[weakref.ref[torch.Tensor], ...]
    identities: tuple[int, ...]
    places: tuple[tuple[Any, ...] | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, forget: Callable[[], object]) -> Stamp:
        """Returns the stamp of tensors as they are now.

        Args:
            tensors: Those of training.
            forget: A method, itself not kept alive, that is called once any of them is gone: it
                has to drop the pieces of them, which keep their memory alive.
        """
        method = weakref.WeakMethod(forget)

        def gone(_: weakref.ref[torch.Tensor]) -> None:
            living = method()
            if living is not None:
                living()

        return cls(
            tuple(weakref.ref(living_part(tensor), gone) for tensor in tensors),
            tuple(map(id, tensors)),
            tuple(map(memory_layout, tensors)),
        )

    def still_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors in the same memory."""
        return (
            self.identities == tuple(map(id, tensors))
            and all(map(operator.is_, map(living_part, tensors), [ref() for ref in self.alive]))
            and all(map(operator.eq, map(memory_layout, tensors), self.places))
        )


def detach_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part as an object of its own, so that one can see the tensor go.

    Its shape and strides stay what they are, whatever is done to the tensor in place.
    """
    return local_part(tensor).detach()


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
    return tuple(map(_watch, (parameter, *others)))


def _watch(tensor: torch.Tensor) -> WatchedTensor:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - a subclass may copy more
        alias = torch.Tensor.detach(tensor)
    return WatchedTensor(alias, weakref.ref(living_part(tensor)), id(tensor))
