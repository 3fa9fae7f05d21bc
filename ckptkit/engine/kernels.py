"""Kernels, which compute the elements of output tensors block by block, and their operands.

An operand is a dense tensor whose elements are stored, or computed from stored ones.
`make_products` makes copies and casts of stored tensors, `recast` and `first_rows` change products
that another kernel, or a copy, makes. `Preparations` holds the
kernels that are prepared once per tensor, by the worker that needs one first.

Workers are threads already. numpy's BLAS would start as many threads as there are cores for each
matrix product: it admits one worker at a time then, and its threads compete with the workers for
the cores. So a merge runs with `single_threaded_blas`.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from ckptkit.core.geometry import Part, Tile, clip, flat_offset, row_major_strides, slabs
from ckptkit.core.index import Fqn, Key, Shape, Span, TensorEntry
from ckptkit.engine.casts import Caster
from ckptkit.plan.plan import (
    SOURCE,
    Compute,
    Copy,
    Demand,
    Kernel,
    Product,
    Reading,
    TensorSpec,
)
from ckptkit.plan.selection import DTypePolicy


class ConstantKernel(Kernel, Struct, frozen=True, eq=False):
    """Returns elements that were computed before; the plan names the tensors they come from."""

    elements: NDArray[Any]  # the tensor, one-dimensional, in its element type

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

        `inputs`: one array for each of `demands(span)`.
        """
        ...


class StoredOperand(Struct, frozen=True):
    """Consecutive elements of a tensor as it is stored, all of them unless others are left out."""

    origin: str  # the source of the tensor
    key: Key
    dtype: DType
    start: int = 0  # the first of the elements, counted row-major

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return ((self.origin, self.key),)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        place = Span(self.start + span.start, self.start + span.stop)
        return (Demand(self.origin, self.key, place),)

    def values(self, _span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return inputs[0]

    def put(self, _span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        target[:] = inputs[0]


class WrappingOperand(Struct, frozen=True):
    """An operand whose elements are computed from those of another one, each from one."""

    operand: Operand

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.operand.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.operand.demands(span)


class CastOperand(WrappingOperand, frozen=True):
    """Another tensor in another float type."""

    dtype: DType  # the type that its elements are cast to

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
    """Another tensor, multiplied and with a constant added, in float32 or wider, then rounded."""

    constant: float  # what is added to each element
    factor: float = 1.0  # what each is multiplied by before that
    divisor: float = 1.0  # or divided by, which rounds otherwise than the inverse of a factor

    @property
    def dtype(self) -> DType:
        return self.operand.dtype

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The other one's elements, with the constant."""
        values = self.operand.values(span, inputs)
        wide = values.astype(np.promote_types(values.dtype, np.float32))
        wide *= self.factor
        wide /= self.divisor
        wide += self.constant
        return wide.astype(values.dtype)

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with the elements of a range."""
        target[:] = self.values(span, inputs)


class OperandKernel(Kernel, Struct, frozen=True):
    """Writes the elements of an operand; the output tensor says in which type, and how many."""

    operand: Operand

    def compute(self) -> Compute:
        return Compute(self, self.operand.reads)

    @property
    def is_ready(self) -> bool:
        made = self.operand
        return not isinstance(made, ComputedOperand) or made.kernel.is_ready

    def prepare(self, _out: TensorSpec, reading: Reading) -> Kernel:
        made = self.operand
        if not isinstance(made, ComputedOperand):
            return self
        return replace(self, operand=made.prepare(reading))

    def grain_elements(self, _out: TensorSpec) -> int:
        made = self.operand
        return made.kernel.grain_elements(made.spec) if isinstance(made, ComputedOperand) else 1

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.operand.demands(block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block."""
        made = self.operand
        is_cast = made.dtype != out.dtype
        if isinstance(made, ComputedOperand) and not is_cast:
            made.put(block, inputs, target)  # without memory of its own
            return
        values = made.values(block, inputs)
        if not is_cast:
            target[...] = values
            return
        caster = Caster(made.dtype, out.dtype)
        caster.cast_all(values, target, where=f"tensor {out.name!r}", block_start=block.start)


# Elements between the wanted ones are read with them while all are at most so many times as many:
# fewer reads save more than the bytes cost.
_MOST_READ = 2


def copy_tile(
    tile: Tile, source: NDArray[Any], target: NDArray[Any], strides: Sequence[int]
) -> None:
    """Copies the elements that two tensors share; both arrays begin at the corner of the tile.

    `strides`: of the tensor that `target` is of, in elements. The other tensor is flat.
    """
    sizes = [loop.size for loop in tile.loops]
    walks = [loop.walks for loop in tile.loops]
    steps = [step * strides[axis] * target.itemsize for (axis, step), _ in walks]
    from_steps = [step * source.itemsize for _, (_, step) in walks]
    as_strided = np.lib.stride_tricks.as_strided
    as_strided(target, sizes, steps)[...] = as_strided(source, sizes, from_steps)


class RearrangeKernel(Kernel, Struct, frozen=True):
    """A tensor whose elements come from tiles of others, maybe with their axes exchanged.

    A block reads at most twice its own elements. Where neighbours in the output are far apart in
    the operand, as in a large transposed matrix, each is a read of its own.
    """

    pieces: tuple[Part, ...]  # of the output, which do not overlap
    operands: Mapping[Fqn, Operand]  # their sources, all of the output's element type
    has_padding: bool = False  # whether there are elements in no piece; they are zero

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return tuple(dict.fromkeys(read for one in self.operands.values() for read in one.reads))

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns the operands' elements that the block consists of."""
        return tuple(
            demand
            for operand, span, _ in self._reads(out, block)
            for demand in operand.demands(span)
        )

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Puts the elements of one block where they belong."""
        made, strides = _bits(target), row_major_strides(out.shape)
        if self.has_padding:
            made[:] = 0
        at = 0
        for operand, span, tile in self._reads(out, block):
            count = len(operand.demands(span))
            values = _bits(operand.values(span, inputs[at : at + count]))
            at += count
            first = flat_offset(tile.corners[0], strides) - block.start
            copy_tile(tile, values, made[first:], strides)

    def _reads(self, out: TensorSpec, block: Span) -> Iterator[tuple[Operand, Span, Tile]]:
        """Yields ranges of operands, each with the wanted elements in it."""
        for slab in slabs(block, out.shape):
            for source, piece in self.pieces:
                for inside in clip(piece, slab):
                    for tile, length in _dense(inside):
                        start = tile.corners[1][0]
                        yield self.operands[source], Span(start, start + length), tile


class ComputedOperand(Struct, frozen=True):
    """The output of a kernel, as an operand of another one: all of it, or its first elements.

    Any element may begin the blocks of the kernel, but in an `OperandKernel`.
    """

    kernel: Kernel
    spec: TensorSpec
    reads: tuple[tuple[str, Key], ...]

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.kernel.demands(self.spec, span)

    def prepare(self, reading: Reading) -> ComputedOperand:
        return replace(self, kernel=self.kernel.prepare(self.spec, reading))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        values = np.empty(span.stop - span.start, numpy_dtype(self.spec.dtype))
        self.put(span, inputs, values)
        return values

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        self.kernel.run(self.spec, span, inputs, target)


def _dense(tile: Tile) -> list[tuple[Tile, int]]:
    """Cuts a tile until what has to be read of the source for each part is mostly wanted.

    With each part comes the number of elements of the source from its first to its last.
    """
    extent = 1 + sum((loop.size - 1) * loop.walks[1][1] for loop in tile.loops)
    elements = tile.elements
    if extent <= _MOST_READ * elements:
        return [(tile, extent)] if elements else []
    number = max(range(len(tile.loops)), key=lambda i: tile.loops[i].walks[1][1])
    (axis, step), (_, flat_step) = tile.loops[number].walks
    parts = []
    inner = _dense(tile.take(number, 0, 1))
    for index in range(tile.loops[number].size):
        for part, length in inner:
            corner, (first,) = part.corners
            there = (*corner[:axis], corner[axis] + index * step, *corner[axis + 1 :])
            parts.append((Tile((there, (first + index * flat_step,)), part.loops), length))
    return parts


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    kind = "V" if values.itemsize > np.dtype(np.uint64).itemsize else "u"
    return values.view(f"{kind}{values.itemsize}")


def operand_of(product: Product) -> StoredOperand | ComputedOperand:
    """Returns the elements of a product as an operand."""
    body, spec = product.body, product.spec
    if isinstance(body, Copy):
        return StoredOperand(body.origin, body.key, spec.dtype)
    return ComputedOperand(body.kernel, spec, body.reads)


def make_products(
    entries: Sequence[TensorEntry],
    policy: DTypePolicy,
    dropped: Mapping[Fqn, Fqn],
    origin: str = SOURCE,
) -> list[Product]:
    """Returns how each tensor is produced that is written: copied, or cast."""
    products = []
    for entry in entries:
        if entry.name not in dropped:
            wanted = policy.target(entry)
            key, stored = entry.key, entry.dtype
            if wanted != stored and entry.master is not None:
                key, stored = entry.master.key, entry.master.dtype
            copy = Product(TensorSpec(entry.name, stored, entry.shape), Copy(origin, key))
            products.append(recast(copy, wanted))
    return products


def recast(product: Product, dtype: DType) -> Product:
    """Returns a product whose elements are cast to another float type, if they have another."""
    if product.spec.dtype == dtype:
        return product
    compute = OperandKernel(operand_of(product)).compute()
    return Product(replace(product.spec, dtype=dtype), compute)


def first_rows(product: Product, shape: Shape) -> Product:
    """Returns the part of a product that is written: its first elements, in row-major order.

    `shape` is smaller in its first dimension, or in one behind dimensions of size 1.
    """
    body, spec = product.body, product.spec
    if spec.shape == shape:
        return product
    if not isinstance(body, Copy):  # a copy takes elements from the first on
        body = OperandKernel(operand_of(product)).compute()
    return Product(replace(spec, shape=shape), body)


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

        `most_kernels`: how many are kept where blocks come in any order, the last ones used; None
        for those that have blocks to come, where each block comes once.
        """
        self._lock = threading.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._most_kernels = most_kernels
        self._shared: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()
        self._shared_lock = threading.Lock()
        self._stack = ExitStack()
        self._limited = False
        self._kept: dict[Hashable, _Kept] = {}

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

    def kernel(self, kernel: Kernel, out: TensorSpec, read: Read) -> Kernel:
        """Returns the kernel that computes blocks of `out`.

        `kernel`: what the plan says; its preparation may take long, and others wait for it. `read`:
        reads a part of a source tensor into memory of its own.
        """
        if kernel.is_ready:
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
                shared = partial(self.read_shared, read=read)
                slot.kernel = kernel.prepare(out, Reading(read, shared, self.open_once, self.share))
            return slot.kernel

    def open_once(self, key: Hashable, opened: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Returns an opened resource; the first call opens it, and the end of all closes it."""
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
        with kept.lock:
            if not kept.is_open:
                kept.value, kept.is_open = self._stack.enter_context(opened()), True
            return kept.value

    def read_shared(self, demand: Demand, read: Read) -> NDArray[Any]:
        """Reads a part for one tensor and keeps it for others, read-only."""

        def make() -> NDArray[Any]:
            part = read(demand)
            part.flags.writeable = False
            return part

        return self.share(demand, make)

    def share(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Makes an array for one tensor and keeps it for others, the latest of them."""
        with self._shared_lock:
            part = self._shared.pop(key, None)
            if part is None:
                part = make()
            self._shared[key] = part
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


class _Kept:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_open, self.value = False, None


class _Slot:
    def __init__(self, elements: int) -> None:
        self.lock = threading.Lock()
        self.kernel: Kernel | None = None
        self.left = elements


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
