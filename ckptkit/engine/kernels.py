"""Kernels, which compute the elements of output tensors block by block, and their operands.

An operand is a dense tensor whose elements are stored, or computed from stored ones. `recast` and
`first_rows` change products that another kernel, or a copy, makes. `Preparations` holds the
kernels that are prepared once per tensor, by the worker that needs one first.

Workers are threads already. numpy's BLAS would start as many threads as there are cores for each
matrix product: it admits one worker at a time then, and its threads compete with the workers for
the cores. So a merge runs with `single_threaded_blas`.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import OverflowRefusedError
from ckptkit.core.index import Key, Shape, Span
from ckptkit.engine.casts import Caster
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Demand,
    Kernel,
    Opened,
    Preparable,
    Product,
    TensorSpec,
    wrap_kernel,
)


class ElementKernel:
    """A kernel whose blocks may begin at any element."""

    __slots__ = ()

    def grain_elements(self, _out: TensorSpec) -> int:
        return 1


class CastKernel(ElementKernel, Struct, frozen=True):
    """Casts a source tensor, block by block.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        source: Its element type.
        target: The element type to write.
    """

    origin: str
    key: Key
    source: DType
    target: DType

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return (Demand(self.origin, self.key, block),)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Casts one block."""
        caster = Caster(self.source, self.target)
        caster.cast_all(inputs[0], target, where=f"tensor {out.name!r}", block_start=block.start)


class ConstantKernel(ElementKernel, Struct, frozen=True, eq=False):
    """Returns elements that were computed before; the plan names the tensors they come from.

    Attributes:
        elements: The tensor, one-dimensional, in its element type.
    """

    elements: NDArray[Any]

    def demands(self, _out: TensorSpec, _block: Span) -> tuple[Demand, ...]:
        return ()

    def run(
        self, _out: TensorSpec, block: Span, _inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        target[:] = self.elements[block.start : block.stop]


_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80  # bits of bfloat16


class Operand(Protocol):
    """The elements of one dense tensor, stored or computed.

    An operand is a frozen value: it says what has to be read for a range of elements, and turns
    what was read into them. So a kernel merges into a stored weight and into a packed one alike.
    """

    @property
    def dtype(self) -> DType:
        """The element type of `values`."""
        ...

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The source tensors that any part of it may read, as `(origin, key)`."""
        ...

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """Returns what the elements of a row-major range are made from."""
        ...

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Returns the elements of the range, one-dimensional; maybe one of the inputs itself.

        Args:
            span: The range.
            inputs: One array for each of `demands(span)`.
        """
        ...


class StoredOperand(Struct, frozen=True):
    """A tensor as it is stored.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        dtype: Its element type.
    """

    origin: str
    key: Key
    dtype: DType

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return ((self.origin, self.key),)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return (Demand(self.origin, self.key, span),)

    def values(self, _span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return inputs[0]


class PartOperand(Struct, frozen=True):
    """Consecutive elements of a stored tensor.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        dtype: Its element type.
        start: The first of the elements, counted row-major.
    """

    origin: str
    key: Key
    dtype: DType
    start: int

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return ((self.origin, self.key),)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return (
            Demand(self.origin, self.key, Span(self.start + span.start, self.start + span.stop)),
        )

    def values(self, _span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return inputs[0]

    def put(self, _span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with the elements of a range."""
        target[:] = inputs[0]


class WrappingOperand(Struct, frozen=True):
    """An operand whose elements are computed from those of another one, each from one.

    Attributes:
        operand: The other one.
    """

    operand: Operand

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.operand.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.operand.demands(span)


class CastOperand(WrappingOperand, frozen=True):
    """Another tensor in another float type.

    Attributes:
        dtype: The type that its elements are cast to.
    """

    dtype: DType

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The other one's elements, cast."""
        values = self.operand.values(span, inputs)
        target = np.empty(values.size, numpy_dtype(self.dtype))
        caster = Caster(self.operand.dtype, self.dtype)
        where = f"tensor {self.reads[0][1]!r}"
        caster.cast_all(values, target, where=where, block_start=span.start)
        if self.dtype != BY_NAME["bfloat16"]:
            return target
        # Values that bfloat16 rounds to infinity, which casts of whole models accept.
        infinite = target.view(np.uint16) & _MAGNITUDE == _INFINITE
        if infinite.any():
            infinite &= np.isfinite(values)
            first = int(infinite.argmax())
            if infinite[first]:
                raise OverflowRefusedError(
                    f"value {float(values[first]):g} at element {span.start + first:,} does not fit"
                    f" {self.dtype.name}",
                    where=where,
                    hint="pass --dtype float32, or take an earlier checkpoint if training diverged",
                )
        return target


class AddedOperand(WrappingOperand, frozen=True):
    """Another tensor with a constant added, computed in float32 or wider, rounded to its type.

    Attributes:
        constant: What is added to each element.
    """

    constant: float

    @property
    def dtype(self) -> DType:
        return self.operand.dtype

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The other one's elements, with the constant."""
        values = self.operand.values(span, inputs)
        wide = values.astype(np.promote_types(values.dtype, np.float32))
        wide += self.constant
        return wide.astype(values.dtype)

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with the elements of a range."""
        target[:] = self.values(span, inputs)


class OperandKernel(ElementKernel, Struct, frozen=True):
    """Writes the elements of an operand; the output tensor says in which type.

    Attributes:
        operand: The elements.
    """

    operand: Operand

    def compute(self) -> Compute:
        return Compute(self, self.operand.reads)

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.operand.demands(block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block."""
        values = self.operand.values(block, inputs)
        if self.operand.dtype == out.dtype:
            target[...] = values
            return
        caster = Caster(self.operand.dtype, out.dtype)
        caster.cast_all(values, target, where=f"tensor {out.name!r}", block_start=block.start)


def recast(product: Product, dtype: DType) -> Product:
    """Returns a product whose elements are cast to another float type, if they have another."""
    body, spec = product.body, product.spec
    if spec.dtype == dtype:
        return product
    if isinstance(body, Copy):
        kernel: Kernel = CastKernel(body.origin, body.key, spec.dtype, dtype)
        compute = Compute(kernel, ((body.origin, body.key),))
    else:
        around = partial(RecastKernel, source=spec.dtype, target=dtype)
        compute = Compute(wrap_kernel(body.kernel, spec, around), body.reads)
    return Product(replace(spec, dtype=dtype), compute)


def first_rows(product: Product, shape: Shape) -> Product:
    """Returns the part of a product that is written: its first elements, in row-major order.

    Args:
        product: The whole.
        shape: What is left of its shape: smaller in its first dimension, or in one behind
            dimensions of size 1.
    """
    body, spec = product.body, product.spec
    if spec.shape == shape:
        return product
    cut = replace(spec, shape=shape)
    if isinstance(body, Copy):  # a copy takes elements from the first on
        return Product(cut, body)
    around = partial(PrefixKernel, whole=spec)
    return Product(cut, Compute(wrap_kernel(body.kernel, spec, around), body.reads))


class RecastKernel(Struct, frozen=True):
    """Casts what another kernel makes, block by block.

    Attributes:
        kernel: The other kernel.
        source: The element type that it makes.
        target: The element type to write.
    """

    kernel: Kernel
    source: DType
    target: DType

    def grain_elements(self, out: TensorSpec) -> int:
        return self.kernel.grain_elements(self._made(out))

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.kernel.demands(self._made(out), block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block and casts it."""
        values = np.empty(target.size, numpy_dtype(self.source))
        self.kernel.run(self._made(out), block, inputs, values)
        caster = Caster(self.source, self.target)
        caster.cast_all(values, target, where=f"tensor {out.name!r}", block_start=block.start)

    def _made(self, out: TensorSpec) -> TensorSpec:
        return replace(out, dtype=self.source)


class PrefixKernel(Struct, frozen=True):
    """Makes the first elements of what another kernel would make.

    Attributes:
        kernel: The other kernel.
        whole: What it makes.
    """

    kernel: Kernel
    whole: TensorSpec

    def grain_elements(self, _out: TensorSpec) -> int:
        return self.kernel.grain_elements(self.whole)

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.kernel.demands(self.whole, block)

    def run(
        self, _out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block: elements of a prefix have the same numbers as in the whole."""
        self.kernel.run(self.whole, block, inputs, target)


# The two factors that hold all experts of a layer of a middle-sized model, which every expert's
# tensor needs again.
SHARED_BYTES = 40 << 20

Read = Callable[[Demand], NDArray[Any]]


class Preparations:
    """The kernels of those tensors that still have blocks to come.

    A context: in it, and from the first preparation on, every worker multiplies matrices in
    its own thread.
    """

    def __init__(self, *, most_kernels: int | None = None) -> None:
        """Starts without a kernel.

        Args:
            most_kernels: How many are kept where blocks come in any order, the last ones used;
                None for those that have blocks to come, where each block comes once.
        """
        self._lock = threading.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._most_kernels = most_kernels
        self._shared: OrderedDict[Demand, NDArray[Any]] = OrderedDict()
        self._shared_lock = threading.Lock()
        self._stack = ExitStack()
        self._limited = False
        self._kept: dict[Hashable, Any] = {}

    def __enter__(self) -> Self:
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
            self._slots.move_to_end(out.name)
            if self._most_kernels is not None and len(self._slots) > self._most_kernels:
                self._slots.popitem(last=False)
        with slot.lock:
            if slot.kernel is None:
                slot.kernel = kernel.prepare(out, _Reading(read, self))
            return slot.kernel

    def open_once(
        self, key: Hashable, opened: Callable[[], AbstractContextManager[Opened]]
    ) -> Opened:
        """Returns an opened resource; the first call opens it, and the end of all closes it."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._stack.enter_context(opened())
            resource: Opened = self._kept[key]
            return resource

    def read_shared(self, demand: Demand, read: Read) -> NDArray[Any]:
        """Reads a part for one tensor and keeps it for others, the latest parts of them."""
        with self._shared_lock:
            part = self._shared.pop(demand, None)
            if part is None:
                part = read(demand)
                part.flags.writeable = False
            self._shared[demand] = part
            while sum(part.nbytes for part in self._shared.values()) > SHARED_BYTES:
                self._shared.popitem(last=False)
            return part

    def settle(self, out: TensorSpec, elements: int) -> None:
        """Counts computed elements; after the last, the kernel is dropped."""
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


class _Reading:
    """Reads source tensors for a kernel that is prepared."""

    def __init__(self, read: Read, preparations: Preparations) -> None:
        self._read = read
        self._preparations = preparations

    def read(self, demand: Demand) -> NDArray[Any]:
        return self._read(demand)

    def read_shared(self, demand: Demand) -> NDArray[Any]:
        return self._preparations.read_shared(demand, self._read)

    def open_once(
        self, key: Hashable, opened: Callable[[], AbstractContextManager[Opened]]
    ) -> Opened:
        return self._preparations.open_once(key, opened)


# As OpenBLAS is named in numpy's wheels, in those with 64-bit integers, and where a system or
# conda provides it. Other libraries (Accelerate, MKL, BLIS) are left as they are.
_OPENBLAS_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
_blas_lock = threading.Lock()
_blas_users: list[int] = []  # the number of threads to return to, once for every user


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Runs every matrix product of this process in the calling thread."""
    functions = _blas_threads()
    if functions is None:
        yield
        return
    get, limit = functions
    with _blas_lock:
        _blas_users.append(_blas_users[-1] if _blas_users else get())
        limit(1)
    try:
        yield
    finally:
        with _blas_lock:
            before = _blas_users.pop()
            if not _blas_users:
                limit(before)


@cache
def _blas_threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Finds the functions that say and set how many threads OpenBLAS uses."""
    import ctypes  # only a merge of adapters pays for it

    # Symbols of the libraries that an extension was linked with are found through its handle.
    try:
        library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    except (ImportError, OSError):
        return None
    for name in _OPENBLAS_NAMES:
        get = getattr(library, name.format("get_num_threads"), None)
        limit = getattr(library, name.format("set_num_threads"), None)
        if get is not None and limit is not None:
            get.argtypes, get.restype = (), ctypes.c_int
            limit.argtypes, limit.restype = (ctypes.c_int,), None
            return get, limit
    return None
