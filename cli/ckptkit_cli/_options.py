"""The arguments and options of the commands; values are text, and parsed in one place below us.

What URLs need to be told, and the places that the arguments of a command name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import typer

from ckptkit.options import FACTOR_DTYPES, DTypeChoice, Layout, NameChoice, OutputDType
from ckptkit.storage.locations import Sources, parse_options, place_of

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A path in or above a checkpoint; of a run, the newest complete step is taken.",
        show_default=False,
    ),
]
Tuned = Annotated[
    str,
    typer.Argument(
        metavar="TUNED",
        help="The model after training: a path in or above a checkpoint; of a run, the newest"
        " complete step is taken.",
        show_default=False,
    ),
]
Destination = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A directory that does not exist or is empty, or a URL below which nothing lies.",
        show_default=False,
    ),
]
Selection = Annotated[
    str | None,
    typer.Option(
        "--select",
        metavar="NAME",
        help="Which model or checkpoint to take where there are several; inspect lists them.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", show_default=False)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print nothing but errors.", show_default=False)
]
TensorPattern = Annotated[
    str | None,
    typer.Option(
        "--tensors",
        metavar="GLOB",
        help="List the tensors whose names match, such as '*.mlp.*'.",
        show_default=False,
    ),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(get_args(OutputDType)),
        help="Element type of floating tensors, also as bf16, fp16 or fp32; 'base' takes each one's"
        " from the base's files.",
    ),
]
KeepDType = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-dtype",
        metavar="GLOB",
        help="Names that keep their stored type whatever --dtype says; may be repeated.",
        show_default=False,
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="|".join(get_args(Layout)),
        help="What the output looks like.",
        show_default=False,
    ),
]
Names = Annotated[
    str,
    typer.Option(
        "--names",
        metavar="|".join(get_args(NameChoice)),
        help="'auto' writes what save_pretrained would write, asking the installed transformers"
        " where that differs from what training holds, and refuses what would load as another"
        " model; 'hub' insists on it; 'live' writes the raw state dict.",
    ),
]
ComparedNames = Annotated[
    str,
    typer.Option(
        "--names",
        metavar="auto|live",
        help="'auto' refuses names and shapes that would not load as the model of config.json;"
        " 'live' compares nothing.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="A model folder to take config and tokenizer from where the source has none.",
        show_default=False,
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="DIR",
        help="A model folder, or its index: keep its file names, and in each file its tensors.",
        show_default=False,
    ),
]
VocabSize = Annotated[
    str | None,
    typer.Option(
        "--vocab-size",
        metavar="N",
        help="Rows that embeddings and heads are cut to, where training padded them.",
        show_default=False,
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="DIR",
        help="A directory that holds further files of the checkpoint, such as another node's disk,"
        " with the same paths as below SRC; may be repeated. A file that lies in several must be"
        " the same in all.",
        show_default=False,
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Size at which a new weight file is begun.  [default: 5GB]",
        show_default=False,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Take only names that match; may be repeated.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave out names that match; may be repeated.",
        show_default=False,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME",
        help="Which adapter to take where there are several.",
        show_default=False,
    ),
]
AdapterConfig = Annotated[
    str | None,
    typer.Option(
        "--adapter-config",
        metavar="FILE",
        help="The run's adapter_config.json, where the checkpoint has none or another one.",
        show_default=False,
    ),
]
LoraAlpha = Annotated[
    str | None,
    typer.Option(
        "--lora-alpha",
        metavar="N",
        help="What no tensor tells: the run's alpha, where no adapter_config.json is at hand.",
        show_default=False,
    ),
]
UseRslora = Annotated[
    bool | None,
    typer.Option(
        "--use-rslora/--no-use-rslora",
        help="Likewise: whether the scaling was alpha / sqrt(rank).",
        show_default=False,
    ),
]
FanInFanOut = Annotated[
    bool | None,
    typer.Option(
        "--fan-in-fan-out/--no-fan-in-fan-out",
        help="Likewise: whether the weights are stored as [in, out], as those of GPT-2 are.",
        show_default=False,
    ),
]
TokenIndices = Annotated[
    str | None,
    typer.Option(
        "--token-indices",
        metavar="I,J,...",
        help="Likewise: the tokens whose rows were trained, in order.",
        show_default=False,
    ),
]
MergedAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME[=WEIGHT]",
        help="Which adapter of SRC to merge where there are several, and what to multiply its"
        " update by; may be repeated, and they are merged in this order.",
        show_default=False,
    ),
]
FurtherAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="PATH[=WEIGHT]",
        help="Another adapter to merge after those of SRC, and what to multiply its update by;"
        " may be repeated.",
        show_default=False,
    ),
]
AdapterSource = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER_OR_SRC",
        help="A PEFT folder, or a path in or above a checkpoint with an adapter in it.",
        show_default=False,
    ),
]
MergeBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="The model that the adapter was trained on; may be left out where SRC holds its"
        " weights itself.",
        show_default=False,
    ),
]
AllowOtherBase = Annotated[
    bool,
    typer.Option(
        "--allow-other-base",
        help="Merge onto a base that is proven to be another than the one trained on.",
        show_default=False,
    ),
]
MergeDType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(get_args(DTypeChoice)),
        help="Element type of floating tensors; 'keep' is that of the base.",
    ),
]
MatchPeft = Annotated[
    bool,
    typer.Option(
        "--match-peft",
        help="Round where PEFT's merge_and_unload rounds, instead of once at the end.",
        show_default=False,
    ),
]
QloraBase = Annotated[
    str | None,
    typer.Option(
        "--qlora-base",
        metavar="dequantized|original",
        help="What an adapter of 4-bit or 8-bit weights is merged onto: what they stand for (the"
        " default, and what was trained) or the weights before quantization.",
        show_default=False,
    ),
]
DoubleQuant = Annotated[
    bool | None,
    typer.Option(
        "--double-quant/--no-double-quant",
        help="Whether the scales of 4-bit weights were quantized too, where neither the checkpoint"
        " nor a config.json beside it tells; otherwise it is assumed, and said.",
        show_default=False,
    ),
]
MergeReport = Annotated[
    bool,
    typer.Option(
        "--report",
        help="Show a table of what is done to each weight, and by how much it changes, which takes"
        " reading those weights once more.",
        show_default=False,
    ),
]
AllowUntrained = Annotated[
    bool,
    typer.Option(
        "--allow-untrained",
        help="Take an adapter that changes nothing all the same, also one without any tensor.",
        show_default=False,
    ),
]
TrainedFrom = Annotated[
    str,
    typer.Option("--base", metavar="DIR", help="The model that was trained.", show_default=False),
]
Rank = Annotated[
    str,
    typer.Option(
        "--rank",
        metavar="R",
        help="Rank of the factors; a larger one keeps more of the change.",
        show_default=False,
    ),
]
IncludeMatrix = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Make factors of matching matrices only; may be repeated. All but heads if left out.",
        show_default=False,
    ),
]
ExcludeMatrix = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Make no factors of matching matrices; they may be missing on one side.",
        show_default=False,
    ),
]
Full = Annotated[
    list[str] | None,
    typer.Option(
        "--full",
        metavar="GLOB",
        help="Save matching tensors that changed as they are, with their modules; may be repeated.",
        show_default=False,
    ),
]
FactorDType = Annotated[
    str,
    typer.Option("--dtype", metavar="|".join(FACTOR_DTYPES), help="Element type of the factors."),
]
Report = Annotated[
    bool,
    typer.Option("--report", help="Show a table of the layers.", show_default=False),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Copy Python files and 'auto_map' too.", show_default=False),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show the plan and what it takes; write nothing.", show_default=False
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace an OUT that holds something.", show_default=False),
]
MemoryBudget = Annotated[
    str,
    typer.Option("--memory-budget", metavar="SIZE", help="What all buffers together may take."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="What the whole process may take, the plan included.",
        show_default=False,
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N", help="Threads; chosen by the cores.", show_default=False
    ),
]

_SRC, _DST = "--src-option", "--dst-option"
_SINGLE = ("base", "like", "adapter_config", "model_config")

SrcOption = Annotated[
    list[str] | None,
    typer.Option(
        _SRC,
        metavar="K=V",
        help="What fsspec is told of the storage that is read, such as key=..., or"
        " client_kwargs.endpoint_url=...; may be repeated. It is used for every URL of the kind"
        " that the first argument is, and shown nowhere.",
        show_default=False,
    ),
]
DstOption = Annotated[
    list[str] | None,
    typer.Option(
        _DST,
        metavar="K=V",
        help="The same of the storage that is written to; may be repeated.",
        show_default=False,
    ),
]


def sources_of(first: str, src_option: list[str] | None) -> Sources:
    """Returns the places that a command reads.

    Args:
        first: The one that it is about.
        src_option: The pairs of `--src-option`.
    """
    return Sources(first, parse_options(src_option or (), option=_SRC))


def located(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments and options of a command with places for its paths.

    Args:
        given: By their names; what a command does not have is left out.
    """
    sources = sources_of(given["src"], given["src_option"])
    written = parse_options(given["dst_option"] or (), option=_DST)
    places = {name: sources.optional(given[name]) for name in _SINGLE if name in given}
    return {
        **given,
        **places,
        "src": sources.first,
        "out": place_of(given["out"], written),
        "also": sources.further(given["also"] or ()),
    }
