"""What a merge does to each tensor, for `--report`.

What the manifest of a merged model says of where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptkit.adapters.merge.base_model import BaseSource
from ckptkit.adapters.merge.base_tensors import BaseTensor
from ckptkit.adapters.quantized.bases import QuantizedBase, measure_quantization
from ckptkit.adapters.sources import OpenedAdapter
from ckptkit.conversion.source.places import resolve_path
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.checksums import digest_of, join_leaves, leaf_digest
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME, Manifest
from ckptkit.engine.kernels import Operand
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.lora.changes import (
    AdapterSource,
    Change,
    LowRankChange,
    MergeRequest,
    Replacement,
    TokenRowsChange,
)
from ckptkit.lora.recorded_base import identify_base
from ckptkit.storage.base import is_there
from ckptkit.storage.manifests import read_manifest


@dataclass(frozen=True, slots=True)
class SourceAdapter:
    """An adapter to be merged.

    Attributes:
        found: The adapter, opened.
        source: Who its changes stem from.
        origin: Its checkpoint, opened for reading tensors.
        weight: What its scaling is multiplied by.
    """

    found: OpenedAdapter
    source: AdapterSource
    origin: Origin
    weight: float

    @classmethod
    def of(cls, found: OpenedAdapter, position: int, weight: float) -> SourceAdapter:
        """Takes an opened adapter as the one at a position."""
        name = f"adapter{position}"
        opened = found.opened
        origin = Origin(name, opened.source, opened.index)
        return cls(found, AdapterSource(position, name, opened.path), origin, weight)


def collect_source_facts(
    adapters: Sequence[SourceAdapter], base: BaseSource, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what the manifest says of the adapters and the base.

    Args:
        adapters: The adapters, in the order of merging.
        base: The base.
        quantization: What is known of packed weights; empty where none were.
    """
    facts = {
        "adapters": [
            {
                "path": one.found.opened.path,
                "name": one.found.adapter.name,
                "weight": one.weight,
                "config": one.found.config_path,
                "digest": _digest_of(one),
            }
            for one in adapters
        ],
        "base": _base_facts(base),
    }
    return facts | ({"quantization": dict(quantization)} if quantization else {})


def _digest_of(adapter: SourceAdapter) -> str:
    """Digests an adapter: names, element types, shapes and bytes of its tensors."""
    origin = adapter.origin
    reader = TensorReader(Origin(origin.name, origin.source, origin.index))
    lines = [
        f"{name} {entry.dtype.name} {list(entry.shape)} {_tensor_digest(reader, entry)}\n"
        for name, entry in sorted(adapter.found.adapter.tensors.items())
    ]
    return digest_of(memoryview("".join(lines).encode()))


def _tensor_digest(reader: TensorReader, entry: TensorEntry) -> str:
    step = LEAF_BYTES // entry.dtype.itemsize
    leaves = {}
    for leaf, start in enumerate(range(0, entry.elements, step)):
        stop = min(start + step, entry.elements)
        data = memoryview(bytearray((stop - start) * entry.dtype.itemsize))
        reader.fill(entry.key, Span(start, stop), data)
        leaves[leaf] = leaf_digest(data)
    return join_leaves(leaves)


def _base_facts(base: BaseSource) -> dict[str, Any]:
    found = identify_base(resolve_path(base.opened.path), base.config)
    manifest = _manifest_of(base)
    told = {
        "path": base.opened.path,
        "format": base.opened.index.format,
        "repository": found.repository,
        "commit": found.commit,
        "files": {
            file.path: file.size_bytes for file in base.opened.index.files if file.size_bytes >= 0
        },
    }
    if manifest is not None:
        lines = sorted(f"{name} {t.digest}\n" for name, t in manifest.tensors.items())
        told["digest"] = digest_of(memoryview("".join(lines).encode()))
    return {key: value for key, value in told.items() if value}


def _manifest_of(base: BaseSource) -> Manifest | None:
    """Returns the manifest of a base that ckptkit wrote."""
    if base.opened.manifest is not None:
        return base.opened.manifest
    source = base.opened.source
    return read_manifest(source) if is_there(source, MANIFEST_NAME) else None


_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class MergedLayer:
    """What one adapter does to one tensor.

    Attributes:
        tensor: The tensor of the live model.
        adapter: The adapter's checkpoint, with its name where several of one are merged.
        kind: `linear`, `embedding`, … for low-rank updates, `bias`, `tokens`, `whole`, or
            `frozen` for what was trained upon.
        rank: Of low-rank updates, else None.
        scaling: What the product of the factors, or the bias, is multiplied by, else None.
        is_dora: Whether the rows are brought to magnitudes of their own.
        base: `kept`, `dequantized` or `original` for what it is added to; `replaced` where the
            adapter's own tensor stands in its place, `none` where the base has none.
        change: Norm of the scaled product over the norm of the base's weight; None where it was
            not measured.
        quantization: Norm of what quantizing changed in the weight over the norm of the scaled
            product, which is what the choice between dequantized and original base weighs; None
            where the weight is not packed, its original is not there, or it was not measured.
    """

    tensor: str
    adapter: str
    kind: str
    rank: int | None
    scaling: float | None
    is_dora: bool
    base: str
    change: float | None = None
    quantization: float | None = None


def describe_change(change: Change, adapter: str, base: str) -> MergedLayer:
    """Returns what a change does, in words and numbers."""
    rank = scaling = None
    is_dora = False
    if isinstance(change, LowRankChange):
        kind, rank, scaling = change.form.partition("_")[0], change.rank, change.scaling
        kind = "linear" if kind == "transposed" else kind
        is_dora = change.magnitude is not None
    elif isinstance(change, Replacement):
        kind = "frozen" if change.frozen else "whole"
    elif isinstance(change, TokenRowsChange):
        kind = "tokens"
    else:
        kind, scaling = "bias", change.scaling
    return MergedLayer(change.weight, adapter, kind, rank, scaling, is_dora, base)


def measure_layers(
    layers: Sequence[MergedLayer],
    norms: Mapping[tuple[str, str], float],
    weights: Mapping[str, float],
    quantized: Mapping[str, float],
) -> list[MergedLayer]:
    """Adds how much each layer changes its weight.

    Args:
        layers: The layers.
        norms: Of scaled products, by adapter and tensor.
        weights: Norms of the base's weights, by tensor.
        quantized: Norms of what quantizing changed in them, by tensor.
    """
    made = []
    for layer in layers:
        norm, weight = norms.get((layer.adapter, layer.tensor)), weights.get(layer.tensor)
        change = None if norm is None or not weight else norm / weight
        lost = quantized.get(layer.tensor)
        share = None if lost is None or not norm else lost / norm
        made.append(replace(layer, change=change, quantization=share))
    return made


def measure_weights(
    tensors: Iterable[BaseTensor], origins: Mapping[str, Origin]
) -> dict[str, float]:
    """Measures the Frobenius norms of weights, reading each once.

    Args:
        tensors: The tensors; those that are parts of one live tensor are taken together.
        origins: The opened sources, by name.
    """
    readers = {
        name: TensorReader(Origin(origin.name, origin.source, origin.index))
        for name, origin in origins.items()
    }
    squares: dict[str, float] = {}
    for tensor in tensors:
        found = _squares(tensor.operand, math.prod(tensor.shape), readers, origins)
        squares[tensor.live[0]] = squares.get(tensor.live[0], 0.0) + found
    return {name: math.sqrt(value) for name, value in squares.items()}


def _squares(
    operand: Operand,
    elements: int,
    readers: Mapping[str, TensorReader],
    origins: Mapping[str, Origin],
) -> float:
    total = 0.0
    for start in range(0, elements, _STEP):
        span = Span(start, min(start + _STEP, elements))
        inputs = []
        for demand in operand.demands(span):
            entry = origins[demand.origin].index.tensors[demand.key]
            place = demand.place
            data = bytearray((place.stop - place.start) * entry.dtype.itemsize)
            readers[demand.origin].fill(demand.key, place, memoryview(data))
            inputs.append(np.frombuffer(data, numpy_dtype(entry.dtype)))
        values = operand.values(span, inputs).astype(np.float32)
        total += float(np.dot(values.astype(np.float64), values))
    return total


def report_layers(
    adapters: Sequence[SourceAdapter],
    tensors: Sequence[BaseTensor],
    changes: Mapping[Fqn, Sequence[Change]],
    quantized: QuantizedBase,
    request: MergeRequest,
    origins: Mapping[str, Origin],
) -> list[MergedLayer]:
    """Returns what is done to each changed tensor; norms of weights only where asked for.

    Args:
        adapters: The adapters.
        tensors: The tensors of the base.
        changes: Of live tensors.
        quantized: What of the base is packed.
        request: Whether norms are wanted, and what is merged onto.
        origins: The opened sources, by name.
    """
    held = {live for tensor in tensors for live in tensor.live}
    labels = _labels(adapters)
    layers: list[MergedLayer] = []
    norms: dict[tuple[str, str], float] = {}
    for weight, found in changes.items():
        kind = "kept" if weight in held else "none"
        if weight in quantized.operands:
            kind = request.qlora_base or "dequantized"
        for change in found:
            one = adapters[change.source.position]
            label = labels[change.source.position]
            is_whole = isinstance(change, Replacement) and kind != "none"
            layers.append(describe_change(change, label, "replaced" if is_whole else kind))
            norm = one.found.norms.get(change.module)
            if norm is not None and isinstance(change, LowRankChange):
                norms[label, weight] = norm * abs(one.weight)
    if not request.report:
        return layers
    touched = [tensor for tensor in tensors if any(live in changes for live in tensor.live)]
    lost = measure_quantization(quantized, changes, origins)
    return measure_layers(layers, norms, measure_weights(touched, origins), lost)


def _labels(adapters: Sequence[SourceAdapter]) -> list[str]:
    paths = [one.found.opened.path for one in adapters]
    return [
        path if paths.count(path) == 1 else f"{path} ({one.found.adapter.name})"
        for path, one in zip(paths, adapters, strict=True)
    ]
