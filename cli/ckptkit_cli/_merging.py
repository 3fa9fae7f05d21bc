"""The run of `ckptkit adapter merge`, and what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptkit.adapters.merging import MergeRequest
from ckptkit.core.errors import UsageError
from ckptkit.pipeline.adapters.merge_report import MergedLayer
from ckptkit.pipeline.adapters.merging import (
    AdapterChoice,
    MergedModel,
    check_apart,
    choices_of,
    prepared_merge,
    run_merge,
)
from ckptkit.pipeline.adapters.sources import AdapterRequest
from ckptkit.planning.requests import Resources, make_resources, parse_size
from ckptkit_cli._consolidation_page import Consolidated, consolidation_page
from ckptkit_cli._conversion import worker_count
from ckptkit_cli._output import Output
from ckptkit_cli._plan_page import plan_json, plan_page
from ckptkit_cli._progress import Progress
from ckptkit_cli._storage_options import sources_of
from ckptkit_cli._text import counted, escaped, table

_TITLE = "adapter merge"
_HEADER = ("tensor", "kind", "rank", "scaling", "changes by", "base", "packing/update", "adapter")


@dataclass(frozen=True, slots=True)
class Merging:
    """What was asked for.

    Attributes:
        adapters: The adapters, in the order of merging.
        out: The directory as the user typed it.
        base: The base as the user typed it, or None.
        request: What the output should hold.
        resources: What the execution may use.
        overwrite: Whether an output that holds something is replaced.
    """

    adapters: Sequence[AdapterChoice]
    out: str
    base: str | None
    request: MergeRequest
    resources: Resources
    overwrite: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], known: Mapping[str, Any]) -> Merging:
        """Reads the options, by the names that they have in the command.

        Raises:
            UsageError: If one has not the form that it needs.
        """
        request = MergeRequest(
            dtype=given["dtype"],
            max_file_bytes=parse_size(given["max_shard_size"], option="--max-shard-size"),
            match_peft=given["match_peft"],
            qlora_base=given["qlora_base"],
            double_quant=given["double_quant"],
            allow_other_base=given["allow_other_base"],
            names=given["names"],
            allow_code=given["allow_code"],
            report=given["report"],
        )
        resources = make_resources(
            worker_count(given["workers"]), given["memory_budget"], given["memory_limit"]
        )
        return cls(
            adapters=_adapters(given, known, resources),
            out=given["out"],
            base=given["base"],
            request=request,
            resources=resources,
            overwrite=given["overwrite"],
        )

    def run(self, output: Output) -> None:
        """Writes the model, and tells what was written."""
        began = time.perf_counter()
        with Progress(output, _TITLE) as progress:
            merged = run_merge(
                self.adapters,
                self.out,
                self.request,
                base=self.base,
                overwrite=self.overwrite,
                resources=self.resources,
                listener=progress.listen,
            )
        seconds = time.perf_counter() - began
        done = Consolidated(self.out, merged.manifest, seconds, merged.notes)
        progress.warn(merged.notes)
        output.document({**done.to_json(), "layers": layers_json(merged.layers)})
        output.lines(self._page(output, done, merged))

    def show_plan(self, output: Output) -> None:
        """Shows what a run would do, and fails where it would fail before its first byte."""
        check_apart(self.adapters, self.out, self.base, overwrite=self.overwrite)
        with prepared_merge(
            self.adapters, self.out, self.request, base=self.base, resources=self.resources
        ) as merge:
            plan = plan_json(merge.prepared, self.out)
            output.document({**plan, "layers": layers_json(merge.layers)})
            output.lines(plan_page(output, merge.prepared, self.out))
            if self.request.report:
                output.lines(["", *layer_table(output, merge.layers)])

    def _page(self, output: Output, done: Consolidated, merged: MergedModel) -> Iterator[str]:
        lines = list(consolidation_page(output, done))
        changed = len({layer.tensor for layer in merged.layers})
        yield from lines[:-1]
        yield f"  merged     {counted(changed, 'tensor')} changed"
        if self.request.report:
            yield from layer_table(output, merged.layers)
        yield lines[-1]


def _adapters(
    given: Mapping[str, Any], known: Mapping[str, Any], resources: Resources
) -> list[AdapterChoice]:
    first = AdapterRequest(
        config=given["adapter_config"],
        overrides=known,
        select=given["select"],
        also=given["also"],
        allow_untrained=given["allow_untrained"],
        limit_bytes=resources.memory_limit_bytes,
    )
    names = [_weighted(text, "--adapter") for text in given["adapter"] or ()]
    # A path may have an equals sign itself.
    sources = sources_of(given["src"], given["src_option"])
    pairs = [
        (text, 1.0) if text and Path(text).exists() else _weighted(text, "--with")
        for text in given["also_adapters"] or ()
    ]
    further = [(sources.place(text), weight) for text, weight in pairs]
    return choices_of(given["src"], first, names, further)


def _weighted(text: str, option: str) -> tuple[str, float]:
    """Cuts `NAME=WEIGHT` in two; without a weight it is 1."""
    name, sign, number = text.rpartition("=")
    if not name and (sign or not text):
        raise UsageError(f"{text!r} names no adapter", where=option, hint=f"pass {option} X=0.5")
    if not sign:
        return text, 1.0
    try:
        return name, float(number)
    except ValueError as error:
        raise UsageError(
            f"{number!r} is no number", where=f"{option} {text}", hint=f"pass {option} {name}=0.5"
        ) from error


def layers_json(layers: Sequence[MergedLayer]) -> list[dict[str, Any]]:
    """Returns what is done to each tensor as plain values."""
    return [asdict(layer) for layer in layers]


def layer_table(output: Output, layers: Sequence[MergedLayer]) -> list[str]:
    """Returns the lines of the table of what is done to each tensor."""
    several = len({layer.adapter for layer in layers}) > 1
    packed = any(layer.quantization is not None for layer in layers)
    rows = [_HEADER, *map(_cells, layers)]
    shown = [(*row[:6], *row[6:7] * packed, *row[7:] * several) for row in rows]
    return table(shown, width=output.width, right={2, 3, 4} | ({6} if packed else set()))


def _cells(layer: MergedLayer) -> tuple[str, ...]:
    return (
        escaped(layer.tensor),
        f"{layer.kind}, DoRA" if layer.is_dora else layer.kind,
        "" if layer.rank is None else str(layer.rank),
        "" if layer.scaling is None else f"{layer.scaling:.6g}",
        "" if layer.change is None else f"{layer.change:.3%}",
        layer.base,
        "" if layer.quantization is None else f"{layer.quantization:.3f}",
        escaped(layer.adapter),
    )
