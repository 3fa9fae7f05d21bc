"""Makes the product of each base tensor from its changes: a copy, a cast or a merge kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.adapters.merge import low_rank
from ckptkit.adapters.merge.fold import NormOf, Rounding
from ckptkit.adapters.merge.kernel import MergeKernel
from ckptkit.adapters.merge.low_rank import Factor
from ckptkit.conversion.names_on_disk import rearrange
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.engine.kernels import CastOperand, Operand, OperandKernel, StoredOperand, recast
from ckptkit.engine.rearranged import ComputedOperand
from ckptkit.hub_names.disk_tensors import HubTensor, Window, find_window
from ckptkit.lora.changes import BiasChange, Change, LowRankChange, Replacement, TokenRowsChange
from ckptkit.plan.plan import Copy, Product, TensorSpec

# PEFT casts adapters to this type when it loads them.
_HELD = dtype_named("float32")
_MATRIX = 2
_EXPERTS = 3


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base model, as it is written.

    Attributes:
        name: Its name in the output.
        live: The live tensors that it is made of.
        shape: Its shape.
        dtype: The element type in which it is written by default.
        operand: Its elements.
        part: How it is made of live tensors; None where it is one of them.
    """

    name: Fqn
    live: tuple[Fqn, ...]
    shape: Shape
    dtype: DType
    operand: Operand
    part: HubTensor | None = None

    @classmethod
    def stored(cls, name: Fqn, live: Fqn, origin: str, entry: TensorEntry) -> BaseTensor:
        operand = StoredOperand(origin, entry.key, entry.dtype)
        return cls(name, (live,), entry.shape, entry.dtype, operand)


@dataclass(frozen=True, slots=True)
class MergeRules:
    """How every tensor is merged and written.

    Attributes:
        dtype: `keep`, or the name of the element type of floating tensors.
        rounding: How often a merge rounds.
        norm_of: The weight whose norms DoRA takes.
    """

    dtype: str
    rounding: Rounding
    norm_of: NormOf

    def target(self, dtype: DType) -> DType:
        """Returns the element type to write; only floating tensors are ever cast."""
        fixed = self.dtype == "keep" or dtype.kind != "float"
        return dtype if fixed else dtype_named(self.dtype)


def join_sources(tensor: HubTensor, sources: Sequence[Operand]) -> Operand:
    """Returns a tensor that is made of others, in the order of `tensor.sources`, as an operand."""
    kernel = rearrange(tensor, sources)
    spec = TensorSpec(tensor.name, sources[0].dtype, tensor.shape)
    return ComputedOperand(kernel, spec, kernel.reads)


def make_product(
    tensor: BaseTensor, changes: Sequence[Change], rules: MergeRules, live: Shape
) -> Product:
    """Returns how a tensor of the merged model is produced.

    Args:
        tensor: The tensor of the base.
        changes: The changes of the live tensor that it is, or is a part of, in order.
        rules: How it is merged and written.
        live: The shape of that live tensor.
    """
    updates = [change for change in changes if not isinstance(change, Replacement)]
    target = rules.target(tensor.dtype)
    for change in changes:
        if isinstance(change, Replacement):
            tensor = _replace(tensor, change, rules)
            live = change.tensor.shape
    spec = TensorSpec(tensor.name, target, tensor.shape)
    if updates:
        _refuse_packed_numbers(tensor, updates[0])
        merged = tuple(_make_update(tensor, change, live) for change in updates)
        kernel = MergeKernel(tensor.operand, merged, rules.rounding, rules.norm_of)
        return Product(spec, kernel.compute())
    operand = tensor.operand
    if isinstance(operand, StoredOperand):
        copy = Copy(operand.origin, operand.key)
        return recast(Product(TensorSpec(spec.name, operand.dtype, spec.shape), copy), target)
    return Product(spec, OperandKernel(operand).compute())


def _replace(tensor: BaseTensor, change: Replacement, rules: MergeRules) -> BaseTensor:
    """Replaces the base's tensor by the adapter's, in the base's element type as PEFT loads it."""
    entry = change.tensor
    if (entry.dtype.kind == "float") != (tensor.dtype.kind == "float"):
        raise RefusedError(
            f"the adapter replaces elements of {tensor.dtype.name} by elements of"
            f" {entry.dtype.name}",
            where=f"tensor {tensor.name!r}",
            hint="pass the base that was trained on with --base",
        )
    if len(tensor.live) > 1:
        raise make_part_error(tensor.name, change)
    shape = entry.shape
    operand: Operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
    if tensor.part is not None:
        shape, operand = tensor.shape, join_sources(tensor.part, [operand])
    is_held = rules.dtype == "keep" or rules.rounding is Rounding.PEFT
    if is_held and entry.dtype != tensor.dtype and entry.dtype.kind == "float":
        operand = CastOperand(operand, tensor.dtype)
    return BaseTensor(tensor.name, tensor.live, shape, tensor.dtype, operand, tensor.part)


def _make_update(tensor: BaseTensor, change: Change, live: Shape) -> low_rank.Update:
    origin = change.source.origin
    window = None
    if tensor.part is not None:
        window = find_window(tensor.part, dict.fromkeys(tensor.live, live))
        if window is None or len(tensor.live) > 1:
            raise make_part_error(tensor.name, change)
    if isinstance(change, LowRankChange):
        update = _make_low_rank_update(change, live)
        return update if window is None else _cut_update(update, window, live, tensor, change)
    if window is not None:
        raise make_part_error(tensor.name, change)
    if isinstance(change, BiasChange):
        return low_rank.BiasUpdate(Factor.whole(origin, change.bias), change.scaling, _HELD)
    if isinstance(change, TokenRowsChange):
        return low_rank.TokenRowsUpdate(Factor.whole(origin, change.rows), change.indices)
    raise AssertionError(f"{change.weight} is replaced after it was changed")


def _make_low_rank_update(change: LowRankChange, shape: Shape) -> low_rank.LowRankUpdate:
    origin = change.source.origin
    down, up = Factor.whole(origin, change.down), Factor.whole(origin, change.up)
    magnitude = None if change.magnitude is None else Factor.whole(origin, change.magnitude)
    if change.form == "embedding":
        return low_rank.embedding_update(down, up, change.scaling, _HELD, magnitude=magnitude)
    if change.form in {"parameter", "experts", "experts_transposed"}:
        count = 1 if change.form == "parameter" else shape[0]
        crossed = change.form == "experts_transposed"
        return low_rank.experts_update(
            down, up, change.scaling, _HELD, count=count, transposed=crossed
        )
    return low_rank.linear_update(
        down,
        up,
        change.scaling,
        _HELD,
        magnitude=magnitude,
        fan_in_fan_out=change.form == "transposed",
    )


def _cut_update(
    update: low_rank.LowRankUpdate, window: Window, live: Shape, tensor: BaseTensor, change: Change
) -> low_rank.LowRankUpdate:
    """Returns the update of a tensor that is a part of a live one."""
    box, axes = window.box, window.axes
    if box.sizes == live and axes == tuple(range(len(live))):
        return update
    if len(live) == _EXPERTS and box.sizes[0] == 1 and len(axes) == _MATRIX:
        if update.experts > 1:
            update = low_rank.select_expert(update, box.offsets[0])
    elif len(live) != _MATRIX:
        raise make_part_error(tensor.name, change)
    rows, columns = (
        None if size == whole else (offset, offset + size)
        for offset, size, whole in zip(
            box.offsets[-_MATRIX:], box.sizes[-_MATRIX:], live[-_MATRIX:], strict=True
        )
    )
    try:
        update = update.window(rows, columns)
    except ValueError as error:
        raise make_part_error(tensor.name, change) from error
    return update.turned if axes[-_MATRIX] > axes[-1] else update


def make_part_error(name: str, change: Change) -> RefusedError:
    """Returns the error for a tensor on disk that cannot be merged without others."""
    return RefusedError(
        f"{change.weight!r} is changed, and {name!r} on disk cannot be merged with a part"
        " of it alone",
        where=change.source.where,
        hint="merge this adapter with PEFT, or into a base that is saved as training holds it",
    )


def _refuse_packed_numbers(tensor: BaseTensor, change: Change) -> None:
    dtype = tensor.operand.dtype
    if dtype.kind != "float" or dtype.itemsize == 1:
        raise RefusedError(
            f"tensor {tensor.name!r} of the base has element type {dtype.name}, to which nothing"
            " can be added",
            where=change.source.where,
            hint="the base is quantized in a way that is not modelled; pass the original model"
            " with --base",
        )
