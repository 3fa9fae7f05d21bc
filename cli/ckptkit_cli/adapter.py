"""`ckptkit adapter`: the commands for adapters of PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from ckptkit.core.display import plain_fields
from ckptkit.core.text import size_text
from ckptkit.options import FACTOR_DTYPES, AdapterLayout, DTypeChoice, Resources, choose_dtype
from ckptkit_cli import _options as options
from ckptkit_cli._options import NAMED, OUTPUT, READ, WRITTEN, values_with_places
from ckptkit_cli._output import Output, counted, escaped, table
from ckptkit_cli._program import Argument, Option, command, make_group

if TYPE_CHECKING:
    from ckptkit.adapters.merge import MergedLayer, MergedModel
    from ckptkit.adapters.sources import OpenedAdapter
    from ckptkit.core.manifest import Manifest
    from ckptkit.lora.accounting import ModuleRow
    from ckptkit_cli._pages import Consolidated

ADAPTER = make_group(
    "adapter",
    """Extract, convert and merge LoRA adapters.

        ckptkit adapter extract runs/llama adapters/llama
        ckptkit adapter merge adapters/llama models/merged --base Llama-3.2-1B

    `ckptkit inspect` shows whether a checkpoint contains an adapter, and the command to run.
    """,
    order=18,
)
_REPORT = Option("--report", OUTPUT, "Show a table of the layers.")


def _base(use: str) -> Option:
    """Returns the option for the model of an adapter, whose text ends with what it is used for."""
    text = "The model that the adapter was trained on: a folder, a URL, or its id on the Hub."
    return Option("--base", READ, f"{text} {use}", "MODEL")


def _of_one_adapter(use_of_base: str) -> tuple[Option, ...]:
    """Returns the options of commands that take an adapter and write one."""
    return (
        options.SELECT,
        options.ALSO,
        options.ADAPTER,
        options.ADAPTER_CONFIG,
        _base(use_of_base),
        options.ALLOW_UNTRAINED,
        *options.ADAPTER_HINTS,
        options.DRY_RUN,
        options.OVERWRITE,
        options.SRC_OPTION,
        options.DST_OPTION,
    )


@command(
    options.SRC,
    options.OUT,
    *_of_one_adapter("Its configuration converts the names of another framework."),
    _REPORT,
    *options.SHOWN,
    of=ADAPTER,
)
def extract(output: Output, **values: Any) -> None:
    """Extract a LoRA adapter from a checkpoint.

        ckptkit adapter extract runs/llama adapters/llama

    Writes adapter_model.safetensors and adapter_config.json, which PEFT loads; for a model of
    diffusers pytorch_lora_weights.safetensors, which its pipelines load. Only the bytes of the
    adapter are read, and every tensor of it is used. OUT appears when it is complete and durable,
    or not at all.
    """
    from ckptkit.adapters.extract import prepare_extraction, run_extraction
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.conversion.write import check_destination
    from ckptkit_cli._pages import plan_json, plan_page, show_output
    from ckptkit_cli._progress import Progress

    values = values_with_places(values)
    src, out, overwrite = values["src"], values["out"], values["overwrite"]
    request = AdapterRequest.from_options(values, adapter=values["adapter"])
    if values["dry_run"]:
        check_destination(src, out, overwrite=overwrite, also=request.also)
        with prepare_extraction(src, out, request, Resources()) as (plan, adapter):
            layers = _adapter_layers(adapter.rows, adapter.norms)
            output.document({**plan_json(plan, out), "layers": layers})
            output.lines(plan_page(output, plan, out))
            if values["report"]:
                output.lines(["", *_adapter_table(output, adapter.rows, adapter.norms)])
        return
    with Progress(output, "adapter extract") as progress:
        manifest, found = run_extraction(
            src, out, request, overwrite=overwrite, listener=progress.listen
        )
    facts = {
        "adapter": found.adapter.name,
        "config": found.config_path or None,
        "unverified": manifest.unverified,
        "layers": _adapter_layers(found.rows, found.norms),
    }
    show_output(output, progress, out, manifest, facts, found.notes)
    output.lines(_extraction_page(output, manifest, found, out, progress.seconds))
    if values["report"]:
        output.lines(_adapter_table(output, found.rows, found.norms))
    output.lines(_loading_line(output, manifest, out))


def _extraction_page(
    output: Output, manifest: Manifest, found: OpenedAdapter, out: str, seconds: float
) -> Iterator[str]:
    from ckptkit_cli._pages import proof_lines

    ranks = sorted({row.rank for row in found.rows if row.rank is not None})
    name = f" of adapter {escaped(repr(found.adapter.name))}"
    yield from _written_lines(output, manifest, out, seconds, name)
    trained = sum(row.kind != "frozen" for row in found.rows)
    yield f"  layers     {counted(trained, 'module')}, rank {', '.join(map(str, ranks)) or 'none'}"
    yield f"  config     {escaped(found.config_path) or 'inferred from the tensors'}"
    yield from proof_lines(output, manifest)


def _loading_line(output: Output, manifest: Manifest, out: str) -> list[str]:
    from ckptkit.consumers.table import find_consumer

    line = escaped(find_consumer(None, manifest.files).load.format(out=repr(out)))
    return [f"  load it    {output.styled(line, 'cyan')}"]


_ADAPTER_HEADER = ("module", "kind", "rank", "scaling", "changes", "norm of the change")


def _adapter_layers(rows: Sequence[ModuleRow], norms: Mapping[str, float]) -> list[dict[str, Any]]:
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


def _adapter_table(
    output: Output, rows: Sequence[ModuleRow], norms: Mapping[str, float]
) -> list[str]:
    cells = [
        (
            escaped(row.module),
            f"{row.kind}, DoRA" if row.is_dora else row.kind,
            "" if row.rank is None else str(row.rank),
            "" if row.scaling is None else f"{row.scaling:.6g}",
            " x ".join(map(str, row.shape)),
            f"{norms[row.module]:.4g}" if row.module in norms else "",
        )
        for row in rows
    ]
    return table([_ADAPTER_HEADER, *cells], width=output.width, right={2, 3, 5})


@command(
    options.SRC,
    options.OUT,
    Option(
        "--to",
        WRITTEN,
        "The library whose layout is written: 'peft' has target_parameters; 'vllm' one module for"
        " each matrix of an expert, or for some models all experts in one, and SGLang loads it.",
        choices=get_args(AdapterLayout),
        required=True,
    ),
    *_of_one_adapter("Its configuration says how it has its experts."),
    *options.SHOWN,
    of=ADAPTER,
)
def convert(output: Output, **values: Any) -> None:
    """Write a LoRA of experts in the layout of another library.

        ckptkit adapter convert adapters/qwen3-moe adapters/for-vllm --to vllm --base Qwen3-30B-A3B

    Each product of factors stays what it is: no number is rounded. What a layout cannot hold is
    refused. OUT appears when it is complete and durable, or not at all.
    """
    from ckptkit.adapters.convert import prepare_conversion, run_conversion
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.conversion.write import check_destination
    from ckptkit_cli._pages import plan_json, plan_page, proof_lines, show_output
    from ckptkit_cli._progress import Progress

    values = values_with_places(values)
    src, out, overwrite = values["src"], values["out"], values["overwrite"]
    request = AdapterRequest.from_options(values, adapter=values["adapter"])
    if values["dry_run"]:
        check_destination(src, out, overwrite=overwrite, also=request.also)
        with prepare_conversion(src, out, request, values["to"], Resources()) as (plan, _):
            output.document(plan_json(plan, out))
            output.lines(plan_page(output, plan, out))
        return
    with Progress(output, "adapter convert") as progress:
        manifest, found = run_conversion(
            src, out, request, to=values["to"], overwrite=overwrite, listener=progress.listen
        )
    facts = {"adapter": found.adapter.name, "unverified": manifest.unverified}
    show_output(output, progress, out, manifest, facts, found.notes)
    output.lines(_written_lines(output, manifest, out, progress.seconds))
    output.lines(proof_lines(output, manifest))
    if values["to"] == "peft":
        output.lines(_loading_line(output, manifest, out))


def _written_lines(
    output: Output, manifest: Manifest, out: str, seconds: float, name: str = ""
) -> list[str]:
    tensors = counted(len(manifest.tensors), "tensor") + name
    size = size_text(manifest.size_bytes)
    return [
        output.styled(escaped(out), "bold"),
        f"  wrote      {tensors}, {size}, in {seconds:.2f} s",
    ]


@command(
    Argument(
        "src",
        "ADAPTER_OR_SRC",
        "A PEFT folder, a checkpoint with an adapter in it, or a folder that contains one.",
    ),
    options.OUT,
    _base("Can be left out if SRC contains its weights."),
    options.ADAPTERS,
    options.WITH,
    options.SELECT,
    options.ALSO,
    options.ADAPTER_CONFIG,
    options.ALLOW_UNTRAINED,
    options.ALLOW_OTHER_BASE,
    replace(
        options.MODEL_CONFIG,
        help="Model folder with configuration and tokenizer, if neither the adapter nor --base has"
        " them; a base of Megatron needs one.",
    ),
    *options.ADAPTER_HINTS,
    replace(
        options.MAX_SHARD_SIZE,
        help="Start a new weight file at this size.  [default: the files of the base, or 5GB]",
    ),
    options.ALLOW_CODE,
    options.GENERATION_CONFIG,
    options.TOKENIZER_FROM,
    options.CAST_ALL,
    options.CHECK,
    options.DRY_RUN,
    options.OVERWRITE,
    options.MATCH_PEFT,
    options.QLORA_BASE,
    options.DOUBLE_QUANT,
    Option(
        "--dtype",
        NAMED,
        "Element type of floating tensors. 'keep' takes that of the base, and leaves a packed base"
        " packed; any other unpacks it.",
        choices=get_args(DTypeChoice),
        default="keep",
        parse=lambda text: choose_dtype(text, get_args(DTypeChoice)),
    ),
    options.COMPARED_NAMES,
    replace(options.MAP, help="Name map that converts the names of --base, as for `consolidate`."),
    options.MEMORY_BUDGET,
    options.SHARE,
    options.PROOF,
    options.MEMORY_LIMIT,
    options.WORKERS,
    options.SRC_OPTION,
    options.DST_OPTION,
    Option(
        "--report",
        OUTPUT,
        "Show a table of what is done to each weight, and how much it changes; reads these"
        " weights once more.",
    ),
    *options.SHOWN,
    of=ADAPTER,
)
def merge(output: Output, **values: Any) -> None:
    """Merge LoRA adapters into their base model.

        ckptkit adapter merge adapters/llama models/merged --base Llama-3.2-1B

    Writes a model folder that loads without PEFT, weight by weight: the model is never in memory
    as a whole. Each tensor of the adapters is used exactly once, and each of the base is written
    exactly once. OUT appears when it is complete and durable, or not at all.
    """
    from ckptkit.adapters.merge import MergeJob, run_merge
    from ckptkit.conversion.write import with_expected_sharing
    from ckptkit.lora.changes import MergeRequest
    from ckptkit_cli._pages import Consolidated, plan_json, plan_page
    from ckptkit_cli._progress import Progress

    values = values_with_places(values)
    out, request = values["out"], MergeRequest.from_options(values)
    resources = Resources.from_options(values)
    job = MergeJob(
        adapters=options.choose_adapters(values, resources),
        destination=out,
        request=request,
        base=values["base"],
        overwrite=values["overwrite"],
        resources=resources,
    )
    if values["dry_run"]:
        job.check_places()
        with job.plan() as (plan, layers):
            planned = with_expected_sharing(plan, out)
            rows = list(map(plain_fields, layers))
            output.document({**plan_json(planned, out), "layers": rows})
            output.lines(plan_page(output, planned, out))
            if request.report:
                output.lines(["", *_merge_table(output, layers)])
        return
    with Progress(output, "adapter merge") as progress:
        merged = run_merge(job, progress.listen)
    done = Consolidated(
        out, merged.manifest, progress.seconds, merged.notes, shared_bytes=progress.shared_bytes
    )
    progress.warn(merged.notes)
    output.document({**done.to_json(), "layers": list(map(plain_fields, merged.layers))})
    output.lines(_merge_page(output, done, merged, shows_layers=request.report))


_MERGE_HEADER = (
    *("tensor", "kind", "rank", "scaling", "changes by", "base", "packing/update", "adapter"),
)


def _merge_page(
    output: Output, done: Consolidated, merged: MergedModel, *, shows_layers: bool
) -> Iterator[str]:
    from ckptkit_cli._pages import consolidation_page

    *lines, loading = consolidation_page(output, done)
    yield from lines
    changed = len({layer.tensor for layer in merged.layers})
    yield f"  merged     {counted(changed, 'tensor')} changed"
    if shows_layers:
        yield from _merge_table(output, merged.layers)
    yield loading


def _merge_table(output: Output, layers: Sequence[MergedLayer]) -> list[str]:
    """Returns a table of what is done to each tensor."""
    has_several = len({layer.adapter for layer in layers}) > 1
    is_packed = any(layer.quantization is not None for layer in layers)
    cells: list[tuple[str, ...]] = [_MERGE_HEADER]
    cells += [
        (
            escaped(layer.tensor),
            f"{layer.kind}, DoRA" if layer.is_dora else layer.kind,
            "" if layer.rank is None else str(layer.rank),
            "" if layer.scaling is None else f"{layer.scaling:.6g}",
            "" if layer.change is None else f"{layer.change:.3%}",
            layer.base,
            "" if layer.quantization is None else f"{layer.quantization:.3f}",
            escaped(layer.adapter),
        )
        for layer in layers
    ]
    rows = [(*row[:6], *row[6:7] * is_packed, *row[7:] * has_several) for row in cells]
    return table(rows, width=output.width, right={2, 3, 4} | ({6} if is_packed else set()))


@command(
    Argument(
        "tuned",
        "TUNED",
        "The model after training: a checkpoint, or a folder that contains one. Of a run, the"
        " newest complete step is taken.",
    ),
    options.OUT,
    Option(
        "--base",
        READ,
        "The model before training: a folder, a URL, or its id on the Hub.",
        "MODEL",
        required=True,
    ),
    options.SELECT,
    Option(
        "--rank",
        WRITTEN,
        "Rank of the factors; a larger one keeps more of the change.",
        "R",
        required=True,
    ),
    Option(
        "--include",
        WRITTEN,
        "Make factors only for matrices whose names match; by default, for all but heads. Can be"
        " repeated.",
        "GLOB",
        repeated=True,
    ),
    Option(
        "--exclude",
        WRITTEN,
        "Make no factors for matrices whose names match; they may be missing in one model.",
        "GLOB",
        repeated=True,
    ),
    Option(
        "--full",
        WRITTEN,
        "Save changed tensors whose names match as they are, with their modules. Can be repeated.",
        "GLOB",
        repeated=True,
    ),
    Option(
        "--dtype",
        WRITTEN,
        "Element type of the factors.",
        choices=FACTOR_DTYPES,
        default="float32",
        parse=lambda text: choose_dtype(text, FACTOR_DTYPES),
    ),
    options.OVERWRITE,
    options.SRC_OPTION,
    options.DST_OPTION,
    _REPORT,
    *options.SHOWN,
    of=ADAPTER,
)
def from_diff(
    output: Output,
    tuned: str,
    out: str,
    report: bool,
    src_option: Mapping[str, Any],
    dst_option: Mapping[str, Any],
    **values: Any,
) -> None:
    """Make a LoRA adapter of the change that full training made.

        ckptkit adapter from-diff runs/llama adapters/llama --base Llama-3.2-1B --rank 64

    The change of each linear layer is approximated by the nearest product of two factors. What
    the factors miss is measured layer by layer. Changes of norms, biases and embeddings, which
    have no factors, are listed.
    """
    from ckptkit import api
    from ckptkit_cli._pages import show_output
    from ckptkit_cli._progress import Progress

    with Progress(output, "adapter from-diff") as progress:
        manifest = api.adapter_from_diff(
            tuned,
            out,
            src_options=src_option,
            dst_options=dst_option,
            listener=progress.listen,
            **values,
        )
    difference = manifest.source["difference"]
    source = {k: v for k, v in manifest.source.items() if k != "difference"}
    facts = {"source": source, "difference": difference}
    show_output(output, progress, out, manifest, facts)
    output.lines(_difference_page(output, manifest, out, progress.seconds))
    if report:
        output.lines(_difference_table(output, difference))
    output.lines(_loading_line(output, manifest, out))


_DIFFERENCE_HEADER = (
    *("module", "shape", "rank", "norm of the change", "relative error", "energy kept"),
)


def _difference_page(output: Output, manifest: Manifest, out: str, seconds: float) -> Iterator[str]:
    difference, rank = manifest.source["difference"], manifest.options["rank"]
    yield from _written_lines(output, manifest, out, seconds)
    yield f"  layers     {counted(len(difference['layers']), 'module')}, rank {rank}"
    yield (
        f"  quality    {difference['energy']:.2%} of the energy of their changes is kept, relative"
        f" error {difference['error']:.3g}"
    )
    if difference["lost"]:
        text = (
            f"  lost       {counted(len(difference['lost']), 'changed tensor')} without factors;"
            f" with them the relative error is {difference['error_with_lost']:.3g}"
        )
        yield output.styled(text, "yellow")


def _difference_table(output: Output, difference: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [_DIFFERENCE_HEADER]
    for module, layer in difference["layers"].items():
        shape = " x ".join(map(str, layer["shape"]))
        numbers = (f"{layer['change']:.4g}", f"{layer['error']:.4g}", f"{layer['energy']:.2%}")
        rows.append((escaped(module), shape, str(layer["rank"]), *numbers))
    for name, norm in difference["whole"].items():
        rows.append((escaped(name), "saved whole", "", f"{norm:.4g}", "0", "100%"))
    for name, norm in difference["lost"].items():
        rows.append((escaped(name), "LACKING", "", f"{norm:.4g}", "1", "0%"))
    return table(rows, width=output.width, right={2, 3, 4, 5})
