"""`ckptkit adapter`: the commands for adapters of PEFT.

`ckptkit adapter extract`: from a checkpoint to a folder that PEFT loads.

`ckptkit adapter from-diff`: a full fine-tune as a LoRA adapter.

`ckptkit adapter merge`: adapters and a base become one model.

The run of `ckptkit adapter merge`, and what it shows.

The run of `ckptkit adapter extract`, and what it shows.

The table of an adapter's layers, for people and as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ckptkit.adapters.extract import ExtractedAdapter, prepared_extraction, run_extraction
from ckptkit.adapters.merge.report import MergedLayer
from ckptkit.adapters.merge.run import (
    AdapterChoice,
    MergedModel,
    check_apart,
    choices_of,
    prepared_merge,
    run_merge,
)
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.conversion.write import check_destination
from ckptkit.core.errors import UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import size_text
from ckptkit.lora.accounting import Row
from ckptkit.lora.changes import MergeRequest
from ckptkit.options import Resources, make_resources, parse_size
from ckptkit_cli import _options as options
from ckptkit_cli import _options as storage
from ckptkit_cli._application import PlainCommand, PlainGroup
from ckptkit_cli._job_options import Events, known_of_adapter
from ckptkit_cli._options import sources_of
from ckptkit_cli._output import Output, counted, escaped, table, told
from ckptkit_cli._pages import Consolidated, consolidation_page, plan_json, plan_page
from ckptkit_cli._progress import Progress
from ckptkit_cli.consolidate import worker_count


def extract(
    src: options.Source,
    out: options.Destination,
    adapter: options.Adapter = None,
    adapter_config: options.AdapterConfig = None,
    lora_alpha: options.LoraAlpha = None,
    use_rslora: options.UseRslora = None,
    fan_in_fan_out: options.FanInFanOut = None,
    token_indices: options.TokenIndices = None,
    allow_untrained: options.AllowUntrained = False,
    report: options.Report = False,
    select: options.Selection = None,
    also: options.Also = None,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Take a LoRA adapter out of a checkpoint.

    Writes adapter_model.safetensors and adapter_config.json, which PEFT loads. Only the bytes of
    the adapter are read, and each of its tensors is accounted for. OUT appears when it is complete
    and durable, or not at all.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = locals()
    with told(output):
        from ckptkit.adapters.sources import AdapterRequest

        places = storage.located(given)
        request = AdapterRequest(
            adapter=adapter,
            config=places["adapter_config"],
            overrides=known_of_adapter(lora_alpha, use_rslora, fan_in_fan_out, token_indices),
            select=select,
            also=places["also"],
            allow_untrained=allow_untrained,
        )
        job = Extraction(places["src"], places["out"], request, overwrite=overwrite, report=report)
        (job.show_plan if dry_run else job.run)(output)


def from_diff(
    tuned: options.Tuned,
    out: options.Destination,
    base: options.TrainedFrom,
    rank: options.Rank,
    include: options.IncludeMatrix = None,
    exclude: options.ExcludeMatrix = None,
    full: options.Full = None,
    dtype: options.FactorDType = "float32",
    select: options.Selection = None,
    report: options.Report = False,
    overwrite: options.Overwrite = False,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Make a LoRA adapter of what full training changed.

    Each linear layer's change is approximated by the nearest product of two factors. What the
    factors miss is measured layer by layer, and what changed besides is named: norms, biases and
    embeddings have no factors.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = {**locals(), "src": tuned, "also": None}
    with told(output):
        from ckptkit.adapters.from_diff import make_diff_request
        from ckptkit_cli.verify import DiffJob

        request = make_diff_request(
            rank,
            dtype,
            include=include or (),
            exclude=exclude or (),
            full=full or (),
            select=select,
        )
        places = storage.located(given)
        job = DiffJob(
            *(places["src"], places["out"], places["base"]),
            request,
            overwrite=overwrite,
            report=report,
        )
        job.run(output)


def merge(
    src: options.AdapterSource,
    out: options.Destination,
    base: options.MergeBase = None,
    adapter: options.MergedAdapters = None,
    also_adapters: options.FurtherAdapters = None,
    adapter_config: options.AdapterConfig = None,
    lora_alpha: options.LoraAlpha = None,
    use_rslora: options.UseRslora = None,
    fan_in_fan_out: options.FanInFanOut = None,
    token_indices: options.TokenIndices = None,
    match_peft: options.MatchPeft = False,
    qlora_base: options.QloraBase = None,
    double_quant: options.DoubleQuant = None,
    dtype: options.MergeDType = "keep",
    allow_untrained: options.AllowUntrained = False,
    allow_other_base: options.AllowOtherBase = False,
    names: options.ComparedNames = "auto",
    report: options.MergeReport = False,
    select: options.Selection = None,
    also: options.Also = None,
    max_shard_size: options.MaxShardSize = "5GB",
    allow_code: options.AllowCode = False,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    memory_budget: options.MemoryBudget = "64MB",
    memory_limit: options.MemoryLimit = None,
    workers: options.Workers = None,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Merge LoRA adapters into their base model.

    Writes a model folder that loads without PEFT, weight by weight: the model is never in memory.
    Each tensor of the adapters is used exactly once, and each of the base is written exactly once.
    OUT appears when it is complete and durable, or not at all.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = locals()
    with told(output):
        known = known_of_adapter(lora_alpha, use_rslora, fan_in_fan_out, token_indices)
        job = Merging.of(storage.located(given), known)
        (job.show_plan if dry_run else job.run)(output)


def adapter_group() -> typer.Typer:
    """Returns the commands that stand behind `ckptkit adapter`."""
    group = typer.Typer(
        name="adapter",
        cls=PlainGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Take LoRA adapters out of checkpoints, and merge them.",
    )
    group.callback()(_behind)
    for command in (extract, merge, from_diff):
        group.command(cls=PlainCommand)(command)
    return group


def _behind() -> None:
    """Take LoRA adapters out of checkpoints, and merge them."""


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
        """Reads the options, by the names that they have in the command."""
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


_LAYER_HEADER = ("module", "kind", "rank", "scaling", "changes", "norm of the change")


def adapter_layers_json(rows: Sequence[Row], norms: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the rows as plain values."""
    return [
        {
            "module": row.module,
            "kind": row.kind,
            "rank": row.rank,
            "scaling": row.scaling,
            "dora": row.is_dora,
            "shape": list(row.shape),
            "norm": norms.get(row.module),
            "tensors": list(row.names),
        }
        for row in rows
    ]


def adapter_layer_table(
    output: Output, rows: Sequence[Row], norms: Mapping[str, float]
) -> list[str]:
    cells = [_LAYER_HEADER, *(_layer_cells(row, norms.get(row.module)) for row in rows)]
    return table(cells, width=output.width, right={2, 3, 5})


def _layer_cells(row: Row, norm: float | None) -> tuple[str, ...]:
    return (
        escaped(row.module),
        f"{row.kind}, DoRA" if row.is_dora else row.kind,
        "" if row.rank is None else str(row.rank),
        "" if row.scaling is None else f"{row.scaling:.6g}",
        " x ".join(map(str, row.shape)),
        "" if norm is None else f"{norm:.4g}",
    )


_EXTRACTION_TITLE = "adapter extract"


@dataclass(frozen=True, slots=True)
class Extraction:
    """What was asked for.

    Attributes:
        src: The checkpoint as the user typed it.
        out: The directory as the user typed it.
        request: Which adapter is meant.
        overwrite: Whether an output that holds something is replaced.
        report: Whether the layers are listed.
    """

    src: str
    out: str
    request: AdapterRequest
    overwrite: bool
    report: bool

    def run(self, output: Output) -> None:
        """Writes the adapter, and tells what was written."""
        began = time.perf_counter()
        with Progress(output, _EXTRACTION_TITLE) as progress:
            done = run_extraction(
                self.src,
                self.out,
                self.request,
                overwrite=self.overwrite,
                listener=progress.listen,
            )
        seconds = time.perf_counter() - began
        progress.warn(done.notes)
        output.document(self._json(done, seconds))
        output.lines(self._page(output, done, seconds))

    def show_plan(self, output: Output) -> None:
        """Shows what a run would do, and fails where it would fail before its first byte."""
        check_destination(self.src, self.out, overwrite=self.overwrite, also=self.request.also)
        with prepared_extraction(self.src, self.out, self.request, Resources()) as (plan, found):
            layers = adapter_layers_json(found.rows, found.norms)
            output.document({**plan_json(plan, self.out), "layers": layers})
            output.lines(plan_page(output, plan, self.out))
            if self.report:
                output.lines(["", *adapter_layer_table(output, found.rows, found.norms)])

    def _json(self, done: ExtractedAdapter, seconds: float) -> dict[str, Any]:
        manifest = done.manifest
        return {
            "out": self.out,
            "manifest": str(Path(self.out) / MANIFEST_NAME),
            "kind": manifest.kind,
            "source": dict(manifest.source),
            "options": dict(manifest.options),
            "adapter": done.name,
            "config": done.config_path or None,
            "tensors": len(manifest.tensors),
            "files": [{"path": p, "bytes": f.size_bytes} for p, f in manifest.files.items()],
            "bytes": sum(file.size_bytes for file in manifest.files.values()),
            "seconds": round(seconds, 6),
            "unverified": _unverified(done),
            "layers": adapter_layers_json(done.rows, done.norms),
            "notes": list(done.notes),
        }

    def _page(self, output: Output, done: ExtractedAdapter, seconds: float) -> Iterator[str]:
        manifest = done.manifest
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        ranks = sorted({row.rank for row in done.rows if row.rank is not None})
        yield output.styled(escaped(self.out), "bold")
        yield (
            f"  wrote      {counted(len(manifest.tensors), 'tensor')} of adapter"
            f" {escaped(repr(done.name))}, {size_text(size_bytes)}, in {seconds:.2f} s"
        )
        shown = ", ".join(map(str, ranks)) or "none"
        trained = sum(row.kind != "frozen" for row in done.rows)
        yield f"  layers     {counted(trained, 'module')}, rank {shown}"
        yield f"  config     {escaped(done.config_path) or 'inferred from the tensors'}"
        unverified = len(_unverified(done))
        if unverified < len(manifest.tensors):
            proven = counted(len(manifest.tensors) - unverified, "tensor")
            yield output.styled(f"  checked    {proven} proven by CRC-32", "green")
        if unverified:
            text = f"  unchecked  {counted(unverified, 'tensor')} whose source stored no checksum"
            yield output.styled(text, "yellow")
        if self.report:
            yield from adapter_layer_table(output, done.rows, done.norms)
        line = f"peft.PeftModel.from_pretrained(model, {self.out!r})"
        yield f"  load it    {output.styled(escaped(line), 'cyan')}"


def _unverified(done: ExtractedAdapter) -> list[str]:
    return [name for name, one in done.manifest.tensors.items() if one.proof == "unverified"]
