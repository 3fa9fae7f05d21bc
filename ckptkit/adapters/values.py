"""The values of an adapter: finite, trained, and how much they change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.lora.accounting import Row
from ckptkit.lora.config import Adapter
from ckptkit.lora.layers import LoraLayer, table_of

_BLOCK_ELEMENTS = 1 << 22
_SINGLE_BYTES = 4  # of smaller floating types, numpy itself cannot tell what is finite


class AdapterValues:
    """Reads the tensors of an adapter, each once, block by block."""

    def __init__(self, origin: Origin, adapter: Adapter) -> None:
        self._reader = TensorReader(origin)
        self._origin = origin
        self._adapter = adapter

    def check(self, rows: Sequence[Row], *, allow_untrained: bool) -> Mapping[str, float]:
        """Refuses numbers that are none, and adapters that change nothing.

        Args:
            rows: What the adapter holds for each module.
            allow_untrained: Whether factors that are all zero are taken all the same.

        Returns:
            By module, the Frobenius norm of what its factors add to the weight.
        """
        table = table_of(self._adapter.tensors)
        by_name = {name: row for row in rows for name in row.names}
        norms: dict[str, float] = {}
        is_trained = is_scaled = not table.layers  # of what replaces the base's, nothing tells
        for layer in table.layers:
            row = by_name[layer.names[0]]
            norm, changes = self._norm(layer, row)
            if math.isfinite(norm):
                norms[row.module] = norm
            is_scaled |= row.scaling != 0
            is_trained |= changes and row.scaling != 0
        for entry in (*table.tokens.values(), *table.whole.values()):
            for block in self._blocks(entry):
                _refuse_wild(block, entry)
        self._origin.checksums.finish()
        if not (is_trained or allow_untrained):
            found = "lora_B" if is_scaled else "scaling"
            raise RefusedError(
                f"every {found} of {len(table.layers):,} modules is zero: the adapter was not"
                " trained, and changes nothing",
                hint="take a later checkpoint, or pass --allow-untrained",
            )
        return norms

    def same(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Tells whether two tensors have the same bytes."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(
            np.array_equal(a.view(np.uint8), b.view(np.uint8))
            for a, b in zip(self._blocks(one), self._blocks(other), strict=True)
        )

    def _norm(self, layer: LoraLayer, row: Row) -> tuple[float, bool]:
        down, up = self._factor(layer.down), self._factor(layer.up)
        changes = bool(up.any() and down.any())  # an embedding's A starts as zero, others' B
        for entry in (layer.up_bias, layer.magnitude):
            if entry is not None:
                values = self._factor(entry)
                changes |= entry is layer.up_bias and bool(values.any())
        if layer.groups > 1:
            total = _grouped_norm(down, up, layer.groups)
            return abs(row.scaling or 0.0) * math.sqrt(max(total, 0.0)), changes
        rank = row.rank or layer.inner
        experts = layer.inner // rank
        left = down.reshape(experts, rank, -1)
        right = up.reshape(up.shape[0], rank, experts)
        total = sum(_product_norm(left[e], right[:, :, e]) for e in range(experts))
        return abs(row.scaling or 0.0) * math.sqrt(max(total, 0.0)), changes

    def _factor(self, entry: TensorEntry) -> NDArray[Any]:
        blocks = []
        for block in self._blocks(entry):
            _refuse_wild(block, entry)
            blocks.append(block.astype(np.float32))
        return np.concatenate(blocks).reshape(entry.shape) if blocks else np.zeros(entry.shape)

    def _blocks(self, entry: TensorEntry) -> Iterator[NDArray[Any]]:
        """Yields the elements of a tensor, in memory of their own."""
        for start in range(0, entry.elements, _BLOCK_ELEMENTS):
            span = Span(start, min(start + _BLOCK_ELEMENTS, entry.elements))
            data = bytearray((span.stop - span.start) * entry.dtype.itemsize)
            self._reader.fill(entry.key, span, memoryview(data))
            yield np.frombuffer(data, numpy_dtype(entry.dtype))


def _product_norm(down: NDArray[Any], up: NDArray[Any]) -> float:
    with np.errstate(all="ignore"):  # too large to be told, which is no norm then
        return float(np.vdot((up.T @ up).astype(np.float64), (down @ down.T).astype(np.float64)))


def _grouped_norm(down: NDArray[Any], up: NDArray[Any], groups: int) -> float:
    """Returns the same of a grouped convolution, as the sum over its groups."""
    left = down.reshape(groups, down.shape[0] // groups, -1)
    right = up.reshape(groups, up.shape[0] // groups, -1)
    return sum(_product_norm(left[group], right[group]) for group in range(groups))


def _refuse_wild(block: NDArray[Any], entry: TensorEntry) -> None:
    if entry.dtype.kind != "float":
        return
    with np.errstate(all="ignore"):
        wild = ~np.isfinite(
            block.astype(np.float32) if entry.dtype.itemsize < _SINGLE_BYTES else block
        )
    if wild.any():
        what = "NaN" if np.isnan(block[wild.argmax()].astype(np.float32)) else "infinity"
        raise AdapterError(
            f"{int(wild.sum()):,} of its numbers are not finite, the first one is {what}",
            where=f"tensor {entry.name!r}",
            hint="training diverged; take an earlier checkpoint",
        )


def tied_tokens(values: AdapterValues, tokens: Mapping[Fqn, TensorEntry]) -> dict[Fqn, Fqn]:
    """Returns token rows that repeat those of another module, with the name that stands for them.

    Of modules that are tied, PEFT keeps the rows under the first name alone.
    """
    kept: list[Fqn] = []
    repeated: dict[Fqn, Fqn] = {}
    for name, entry in tokens.items():
        twin = next((other for other in kept if values.same(tokens[other], entry)), None)
        if twin is None:
            kept.append(name)
        else:
            repeated[name] = twin
    return repeated
