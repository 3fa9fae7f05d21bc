"""What a merge does to each tensor, for `--report`; and its sources, for the manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.merge.base_model import BaseSource
from ckptkit.adapters.merge.merged_tensors import BaseTensor
from ckptkit.adapters.quantized.bases import QuantizedBase, measure_quantization
from ckptkit.adapters.sources import OpenedAdapter
from ckptkit.conversion.source.open import resolve_path
from ckptkit.core.checksums import digest_of, join_leaves, leaf_digest
from ckptkit.core.index import Span
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import (
    AdapterSource,
    Change,
    Changes,
    LowRankChange,
    MergeRequest,
    Replacement,
    TokenRowsChange,
)
from ckptkit.lora.recorded_base import identify_base
from ckptkit.storage.base import is_there
from ckptkit.storage.manifests import read_manifest


class SourceAdapter(Struct, frozen=True):
    """An adapter to be merged.

    Attributes:
        found: The opened adapter.
        source: The source of its changes.
        origin: Its checkpoint, opened for reading tensors.
        weight: The factor of its scaling.
    """

    found: OpenedAdapter
    source: AdapterSource
    origin: Origin
    weight: float


def collect_source_facts(
    adapters: Sequence[SourceAdapter], base: BaseSource, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the facts on the adapters and the base for the manifest.

    `quantization` has those on packed weights.
    """
    facts = {
        "adapters": [
            {
                "path": adapter.found.opened.path,
                "name": adapter.found.adapter.name,
                "weight": adapter.weight,
                "config": adapter.found.config_path,
                "settings": _digest_settings(adapter),
                "digest": _digest_adapter(adapter),
            }
            for adapter in adapters
        ],
        "base": _collect_base_facts(base),
    }
    return facts | ({"quantization": dict(quantization)} if quantization else {})


def _digest_settings(adapter: SourceAdapter) -> str:
    """Digests the configuration that the adapter is merged with, read or inferred."""
    document = adapter.found.adapter.settings.document
    return digest_of(memoryview(json.dumps(document, sort_keys=True).encode()))


def _digest_adapter(adapter: SourceAdapter) -> str:
    """Digests an adapter: names, element types, shapes and bytes of its tensors."""
    reader = ArrayReader(adapter.origin)
    lines = []
    for name, entry in sorted(adapter.found.adapter.tensors.items()):
        step = LEAF_BYTES // entry.dtype.itemsize
        blocks = enumerate(reader.read_blocks(adapter.origin.name, entry, step))
        digest = join_leaves(
            {leaf: leaf_digest(block.view(np.uint8).data) for leaf, block in blocks}
        )
        lines.append(f"{name} {entry.dtype.name} {list(entry.shape)} {digest}\n")
    return digest_of(memoryview("".join(lines).encode()))


def _collect_base_facts(base: BaseSource) -> dict[str, Any]:
    identity = identify_base(resolve_path(base.opened.path), base.config)
    manifest, source = base.opened.manifest, base.opened.source
    if manifest is None and is_there(source, MANIFEST_NAME):
        manifest = read_manifest(source)
    facts = {
        "path": base.opened.path,
        "format": base.opened.index.format,
        "repository": identity.repository,
        "commit": identity.commit,
        "files": {
            file.path: file.size_bytes for file in base.opened.index.files if file.size_bytes >= 0
        },
    }
    if manifest is not None:
        lines = sorted(f"{name} {t.digest}\n" for name, t in manifest.tensors.items())
        facts["digest"] = digest_of(memoryview("".join(lines).encode()))
    return {key: value for key, value in facts.items() if value}


_STEP = 1 << 20


class MergedLayer(Struct, frozen=True):
    """The change of one adapter to one tensor.

    Attributes:
        tensor: The tensor of the live model.
        adapter: The adapter's checkpoint, with its name where several of one are merged.
        kind: `linear`, `embedding`, … for low-rank updates, `bias`, `tokens`, `whole`, or
            `frozen` for a tensor of the base that is saved with the adapter.
        rank: Of low-rank updates, else None.
        scaling: The factor of the product of the factors, or of the bias, else None.
        is_dora: Whether the rows have magnitudes.
        base: `kept`, `dequantized` or `original` for the weight that is changed; `replaced` where
            the adapter's own tensor replaces it, `none` where the base has none.
        change: Norm of the scaled product over the norm of the base's weight; None where it was
            not measured.
        quantization: Norm of the error of quantization over the norm of the scaled product, which
            shows the effect of `--qlora-base`; None where the weight is not packed, has no
            original, or was not measured.
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


def measure_weights(
    tensors: Iterable[BaseTensor], origins: Mapping[str, Origin]
) -> dict[str, float]:
    """Measures the Frobenius norms of live weights, reading each once."""
    reader = ArrayReader(*origins.values())
    squares: dict[str, float] = {}
    for tensor in tensors:
        elements, total = math.prod(tensor.shape), squares.get(tensor.live[0], 0.0)
        for start in range(0, elements, _STEP):
            span = Span(start, min(start + _STEP, elements))
            values = reader.compute(tensor.operand, span).astype(np.float32)
            total += float(np.dot(values.astype(np.float64), values))
        squares[tensor.live[0]] = total
    return {name: math.sqrt(value) for name, value in squares.items()}


def report_layers(
    adapters: Sequence[SourceAdapter],
    tensors: Sequence[BaseTensor],
    changes: Changes,
    quantized: QuantizedBase,
    request: MergeRequest,
    origins: Mapping[str, Origin],
) -> list[MergedLayer]:
    """Describes the changes of each tensor; norms are measured only for `--report`."""
    present = {live for tensor in tensors for live in tensor.live}
    paths = [adapter.found.opened.path for adapter in adapters]
    layers: list[MergedLayer] = []
    norms: dict[tuple[str, str], float] = {}
    for weight, own in changes.items():
        kind = "kept" if weight in present else "none"
        if weight in quantized.operands:
            kind = request.qlora_base or "dequantized"
        for change in own:
            adapter = adapters[change.source.position]
            label = paths[change.source.position]
            if paths.count(label) > 1:
                label = f"{label} ({adapter.found.adapter.name})"
            is_whole = isinstance(change, Replacement) and kind != "none"
            layers.append(describe_change(change, label, "replaced" if is_whole else kind))
            norm = adapter.found.norms.get(change.module)
            if norm is not None and isinstance(change, LowRankChange):
                norms[label, weight] = norm * abs(adapter.weight)
    if not request.report:
        return layers
    touched = [tensor for tensor in tensors if any(live in changes for live in tensor.live)]
    weights = measure_weights(touched, origins)
    quantization = measure_quantization(quantized, changes, origins)
    for number, layer in enumerate(layers):
        scaled, unchanged = norms.get((layer.adapter, layer.tensor)), weights.get(layer.tensor)
        lost = quantization.get(layer.tensor)
        layers[number] = replace(
            layer,
            change=scaled / unchanged if scaled is not None and unchanged else None,
            quantization=lost / scaled if lost is not None and scaled else None,
        )
    return layers
