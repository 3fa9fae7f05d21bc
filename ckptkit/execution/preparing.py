"""Kernels that prepare themselves: once per tensor, by whichever worker needs it first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from ckptkit.execution.blas import single_threaded_blas
from ckptkit.planning.plan import Demand, Kept, Kernel, Preparable, TensorSpec

# The two factors that hold all experts of a layer of a middle-sized model, which every expert's
# tensor asks for again.
SHARED_BYTES = 40 << 20

Read = Callable[[Demand], NDArray[Any]]


class Preparations:
    """The kernels of those tensors of which blocks are still to come.

    A context: in it, and from the first preparation on, every worker multiplies matrices in
    its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._shared = _Shared()
        self._stack = ExitStack()
        self._limited = False
        self._kept: dict[Hashable, Any] = {}

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Ends; nothing may be prepared any more."""
        self._stack.close()

    def kernel(self, kernel: Kernel | Preparable, out: TensorSpec, read: Read) -> Kernel:
        """Returns the kernel that computes blocks of `out`.

        Args:
            kernel: What the plan says; its preparation may take long, and others wait for it.
            out: The output tensor.
            read: Reads a part of a source tensor into memory of its own.
        """
        if not isinstance(kernel, Preparable):
            return kernel
        with self._lock:
            if not self._limited:
                self._stack.enter_context(single_threaded_blas())
                self._limited = True
            slot = self._slots.setdefault(out.name, _Slot(out.elements))
        with slot.lock:
            if slot.kernel is None:
                slot.kernel = kernel.prepared(out, _Reading(read, self._shared, self.kept))
            return slot.kernel

    def kept(self, key: Hashable, opened: Callable[[], AbstractContextManager[Kept]]) -> Kept:
        """Returns what is opened by whoever needs it first, and closed with the preparations."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._stack.enter_context(opened())
            found: Kept = self._kept[key]
            return found

    def settle(self, out: TensorSpec, elements: int) -> None:
        """Takes note that so many elements are computed; after the last, the kernel is let go."""
        with self._lock:
            slot = self._slots.get(out.name)
            if slot is not None:
                slot.left -= elements
                if slot.left <= 0:
                    del self._slots[out.name]


class _Slot:
    def __init__(self, elements: int) -> None:
        self.lock = threading.Lock()
        self.kernel: Kernel | None = None
        self.left = elements


class _Shared:
    """Parts that were read for one tensor and are kept for others, the latest of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: OrderedDict[Demand, NDArray[Any]] = OrderedDict()

    def get(self, demand: Demand, read: Read) -> NDArray[Any]:
        with self._lock:
            found = self._parts.pop(demand, None)
            if found is None:
                found = read(demand)
                found.flags.writeable = False
            self._parts[demand] = found
            while sum(part.nbytes for part in self._parts.values()) > SHARED_BYTES:
                self._parts.popitem(last=False)
            return found


class _Reading:
    """What a kernel is given to read with."""

    def __init__(self, read: Read, shared: _Shared, kept: Callable[..., Any]) -> None:
        self._read = read
        self._shared = shared
        self._kept = kept

    def own(self, demand: Demand) -> NDArray[Any]:
        return self._read(demand)

    def shared(self, demand: Demand) -> NDArray[Any]:
        return self._shared.get(demand, self._read)

    def kept(self, key: Hashable, opened: Callable[[], AbstractContextManager[Kept]]) -> Kept:
        found: Kept = self._kept(key, opened)
        return found
