"""The tensors of a merged model: what is made of those of the base, and which ties still hold.

Tied tensors are compared by their bytes after the merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.merge import low_rank
from ckptkit.adapters.merge.kernel import MergeKernel, NormOf, Rounding
from ckptkit.adapters.merge.low_rank import Factor
from ckptkit.conversion.names_on_disk import join_sources
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.engine.kernels import CastOperand, Operand, OperandKernel, StoredOperand, recast
from ckptkit.engine.reader import Origin, same_bytes
from ckptkit.hub_names.disk_tensors import HubTensor, Window, find_window
from ckptkit.lora.changes import (
    BiasChange,
    Change,
    Changes,
    LowRankChange,
    Replacement,
    TiedPair,
    TokenRowsChange,
    find_equalities,
    list_frozen,
)
from ckptkit.plan.plan import Copy, Product, TensorSpec
from ckptkit.plan.selection import DTypePolicy
from ckptkit.plan.ties import choose_ties_to_drop, untie_config

# PEFT casts adapters to this type when it loads them.
_HELD = dtype_named("float32")
_MATRIX = 2
_EXPERTS = 3


class BaseTensor(Struct, frozen=True):
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


class MergeRules(Struct, frozen=True):
    """How every tensor is merged and written.

    Attributes:
        dtypes: The element types that are written.
        rounding: How often a merge rounds.
        norm_of: The weight whose norms DoRA takes.
    """

    dtypes: DTypePolicy
    rounding: Rounding
    norm_of: NormOf


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
    target = rules.dtypes.target(TensorSpec(tensor.live[0], tensor.dtype, tensor.shape))
    for change in changes:
        if isinstance(change, Replacement):
            tensor = _replace(tensor, change, rules)
            live = change.tensor.shape
    spec = TensorSpec(tensor.name, target, tensor.shape)
    if updates:
        dtype = tensor.operand.dtype
        if dtype.kind != "float" or dtype.itemsize == 1:
            raise RefusedError(
                f"tensor {tensor.name!r} of the base has element type {dtype.name}, to which"
                " nothing can be added",
                where=updates[0].source.where,
                hint="the base is quantized in a way that is not modelled; pass the original model"
                " with --base",
            )
        merged = tuple(_make_update(tensor, change, live) for change in updates)
        kernel = MergeKernel(tensor.operand, merged, rules.rounding, rules.norm_of)
        return Product(spec, kernel.compute())
    operand = tensor.operand
    if isinstance(operand, StoredOperand) and not operand.start:
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
    is_held = rules.dtypes.choice == "keep" or rules.rounding is Rounding.PEFT
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
    if not isinstance(change, LowRankChange):
        if window is not None:
            raise make_part_error(tensor.name, change)
        if isinstance(change, BiasChange):
            return low_rank.BiasUpdate(Factor.whole(origin, change.bias), change.scaling, _HELD)
        if isinstance(change, TokenRowsChange):
            return low_rank.TokenRowsUpdate(Factor.whole(origin, change.rows), change.indices)
        raise AssertionError(f"{change.weight} is replaced after it was changed")
    down, up = Factor.whole(origin, change.down), Factor.whole(origin, change.up)
    magnitude = None if change.magnitude is None else Factor.whole(origin, change.magnitude)
    scaling, form = change.scaling, change.form
    if form == "embedding":
        update = low_rank.embedding_update(down, up, scaling, _HELD, magnitude=magnitude)
    elif form in {"parameter", "experts", "experts_transposed"}:
        count = 1 if form == "parameter" else live[0]
        is_crossed = form == "experts_transposed"
        update = low_rank.experts_update(
            down, up, scaling, _HELD, count=count, transposed=is_crossed
        )
    else:
        is_turned = form == "transposed"
        update = low_rank.linear_update(
            down, up, scaling, _HELD, magnitude=magnitude, fan_in_fan_out=is_turned
        )
    return update if window is None else _cut_update(update, window, live, tensor, change)


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


def plan_products(
    tensors: Sequence[BaseTensor],
    changes: Changes,
    ties: MergedTies,
    shapes: Mapping[Fqn, Shape],
    rules: MergeRules,
    called: Mapping[Fqn, Fqn],
) -> Iterator[Product]:
    """Yields every tensor of the base with the changes of the adapters, and those that it lacks.

    The base lacks new heads, and names that are no longer tied.

    Args:
        tensors: The tensors of the base, as they are written.
        changes: The changes of live tensors.
        ties: Tied names after the merge.
        shapes: The shapes of live tensors in the base.
        rules: How everything is merged and written.
        called: Names in the output that differ from those of the live model.
    """
    for tensor in tensors:
        first = tensor.live[0]
        if tensor.part is None and first in ties.dropped:
            continue
        touched = [live for live in tensor.live if live in changes]
        if touched and len(tensor.live) > 1:
            raise make_part_error(tensor.name, changes[touched[0]][0])
        own = [*_inherit(first, changes, ties, shapes), *changes.get(first, ())]
        yield make_product(tensor, own, rules, shapes[first])
    by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
    for target, source in ties.written.items():
        tensor = replace(by_live[source], name=called.get(target, target), live=(target,))
        updates = [*list_frozen(changes.get(source, ())), *changes.get(target, ())]
        yield make_product(tensor, updates, rules, shapes[source])
    present = {live for tensor in tensors for live in tensor.live}
    for name, brought in changes.items():
        change = brought[0]
        is_tied = name in ties.written or name in ties.dropped
        if name not in present and not is_tied and isinstance(change, Replacement):
            entry = change.tensor
            operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
            output = called.get(name, name)
            tensor = BaseTensor(output, (name,), entry.shape, entry.dtype, operand)
            yield make_product(tensor, (), rules, entry.shape)


def _inherit(
    name: Fqn, changes: Changes, ties: MergedTies, shapes: Mapping[Fqn, Shape]
) -> list[Change]:
    """Returns the frozen tensor of another size that a name takes from one it was tied to."""
    if any(isinstance(change, Replacement) for change in changes.get(name, ())):
        return []
    others = [
        other
        for tied in ties.untied.items()
        for other in (tied[0] if tied[1] == name else tied[1],)
        if name in tied
    ]
    frozen = [change for other in others for change in list_frozen(changes.get(other, ()))]
    return [change for change in frozen[:1] if change.tensor.shape != shapes[name]]


class MergedTies(Struct, frozen=True):
    """The names that the configuration ties, after a merge.

    Attributes:
        dropped: Names that are not written, with the name that replaces each.
        written: Absent names that have to be written now, with the one whose base they share.
        untied: Pairs that differ after the merge.
        broken: Pairs that differ in the base already.
    """

    dropped: Mapping[Fqn, Fqn] = field(default_factory=dict)
    written: Mapping[Fqn, Fqn] = field(default_factory=dict)
    untied: Mapping[Fqn, Fqn] = field(default_factory=dict)
    broken: Mapping[Fqn, Fqn] = field(default_factory=dict)


class TieJudge:
    """Compares the tensors of tied names."""

    def __init__(self, origins: Mapping[str, Origin], base: Mapping[Fqn, BaseTensor]) -> None:
        self._base = base
        self._reader = ArrayReader(*origins.values())
        self._indexes = {name: origin.index for name, origin in origins.items()}

    def judge(
        self, config: Mapping[str, Any] | None, pairs: Sequence[TiedPair], changes: Changes
    ) -> MergedTies:
        """Decides which ties hold after the merge.

        `changes` include those that PEFT shares between tied modules.
        """
        same: dict[Fqn, Fqn] = {}
        untied: dict[Fqn, Fqn] = {}
        broken: dict[Fqn, Fqn] = {}
        for pair in pairs:
            ours, theirs = changes.get(pair.target, ()), changes.get(pair.source, ())
            if not (ours or theirs):
                (same if self._base_agrees(pair) else broken)[pair.target] = pair.source
            elif self._are_changed_alike(ours, theirs) and (
                (ours and isinstance(ours[0], Replacement)) or self._base_agrees(pair)
            ):
                same[pair.target] = pair.source
            else:
                untied[pair.target] = pair.source
        absent = {pair.target: pair.source for pair in pairs if not pair.is_present}
        dropped = choose_ties_to_drop(config, same, [*untied, *broken])
        written = {t: s for t, s in absent.items() if t in untied}
        if untie_config(config or {}) != config and (untied or broken):
            written = absent
        return MergedTies(
            {t: s for t, s in dropped.items() if t not in absent or t in changes},
            written,
            untied,
            broken,
        )

    def same_tensors(self, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]) -> bool:
        """Compares two stored tensors of one element type and shape."""
        blocks = zip(
            self._reader.read_blocks(*first), self._reader.read_blocks(*second), strict=True
        )
        return all(same_bytes(a.view(np.uint8).data, b.view(np.uint8).data) for a, b in blocks)

    def _base_agrees(self, pair: TiedPair) -> bool:
        if not pair.is_present:
            return True
        if not pair.may_agree:
            return False
        stored = []
        for name in (pair.target, pair.source):
            operand = self._base[name].operand
            if not isinstance(operand, StoredOperand):
                return False
            entry = self._indexes[operand.origin].tensors[operand.key]
            stored.append((operand.origin, entry))
        return self.same_tensors(*stored)

    def _are_changed_alike(self, ours: Sequence[Change], theirs: Sequence[Change]) -> bool:
        needed = find_equalities(ours, theirs)
        for equality in needed or ():
            if not equality.is_transposed:
                if not self.same_tensors(equality.first, equality.second):
                    return False
                continue
            bits = f"u{equality.first[1].dtype.itemsize}"
            first, second = (
                self._reader.read_whole(*tensor).view(bits).reshape(tensor[1].shape)
                for tensor in (equality.first, equality.second)
            )
            if not np.array_equal(first, second.T):
                return False
        return needed is not None


def refuse_differing_bases(judge: TieJudge, changes: Changes) -> None:
    """Refuses adapters whose updates of one tensor have different frozen bases."""
    for name, own in changes.items():
        frozen = list_frozen(own)
        for other in frozen[1:]:
            first, second = frozen[0].tensor, other.tensor
            is_same = (first.dtype, first.shape) == (second.dtype, second.shape)
            origins = (frozen[0].source.origin, other.source.origin)
            if not is_same or not judge.same_tensors((origins[0], first), (origins[1], second)):
                raise RefusedError(
                    f"two adapters have different frozen weights of {name!r}",
                    where=other.source.where,
                    hint="merge adapters that were trained on one base model",
                )


def describe_ties(config: Mapping[str, Any] | None, ties: MergedTies) -> Iterator[str]:
    """Yields notes on names that are written although the configuration ties them."""
    changed = untie_config(config or {}) != config
    consequence = (
        "both are written, and tie_word_embeddings is set to false"
        if changed
        else "both are written; Transformers 5 keeps them apart, older versions tie this model type"
        " whatever its configuration says"
    )
    for target, source in ties.untied.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, and the adapter changes them"
            f" differently: {consequence}"
        )
    for target, source in ties.broken.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, but they differ in the base:"
            f" {consequence}"
        )
