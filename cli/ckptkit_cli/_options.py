"""The arguments and options that commands share, each declared once.

Those of a single command are declared beside it. Options of the API have the same names in the
`TypedDict`s of `ckptkit.api`; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from msgspec.structs import replace

from ckptkit.core.errors import UsageError
from ckptkit.name_maps.shipped import describe_map_names
from ckptkit.options import (
    BestMode,
    Engine,
    GenerationChoice,
    IfExists,
    Layout,
    NameChoice,
    OutputDType,
    PackedForm,
    Proof,
    Resources,
    Sharing,
    TokenizerOrigin,
    choose_dtype,
    parse_duration,
)
from ckptkit.storage.locations import parse_options, resolve_places
from ckptkit_cli._program import OUTPUT as OUTPUT  # noqa: PLC0414  a group as the others below
from ckptkit_cli._program import Argument, Option

if TYPE_CHECKING:
    from ckptkit.adapters.merge import AdapterChoice
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit_cli._output import Output

T = TypeVar("T")

READ = "What is read"
WRITTEN = "What is written"
NAMED = "Names and types"
LIMITS = "Limits"
MACHINES = "Many machines"
STORAGE = "Storage"
KEPT = "Which steps stay"
HUB = "The repository"

MOST_LISTED = 200
SRC = Argument(
    "src",
    "SRC",
    "A checkpoint, or a folder that contains one. Of a run, the newest complete step is taken.",
)
OUT = Argument(
    "out", "OUT", "A directory that does not exist or is empty, or a URL with nothing below it."
)
RUN = Argument("run", "RUN", "The directory that contains the checkpoint-N folders, or its URL.")
REPO_ID = Argument("repo_id", "REPO_ID", "The repository on the Hub, as OWNER/NAME.")

SELECT = Option(
    "--select",
    READ,
    "Model or checkpoint to take where there are several. `ckptkit inspect` lists them.",
    "NAME",
)
ALSO = Option(
    "--also",
    READ,
    "Directory with further files of the checkpoint, such as the disk of another node. Files have"
    " the same paths as below SRC, and one that exists twice must be the same. Can be repeated.",
    "DIR",
    repeated=True,
)
INCLUDE = Option(
    "--include",
    READ,
    "Take only tensors whose names match. Can be repeated.",
    "GLOB",
    repeated=True,
)
EXCLUDE = Option(
    "--exclude",
    READ,
    "Leave out tensors whose names match. Can be repeated.",
    "GLOB",
    repeated=True,
)
BASE = Option(
    "--base",
    READ,
    "Model with configuration and tokenizer, if the source has none: a folder, a URL, or its id on"
    " the Hub, such as org/name or org/name@revision. A folder of that name goes first.",
    "MODEL",
)
CONFIG = Option(
    "--config",
    READ,
    "Configuration to write instead of that of the source: a folder with a config.json, such a"
    " file, or the id of a model on the Hub.",
    "MODEL|FILE",
)
TOKENIZER = Option(
    "--tokenizer",
    READ,
    "Tokenizer to write instead of that of the source: a folder, a tokenizer.json, or the id of a"
    " model on the Hub.",
    "MODEL|FILE",
)
MODEL_CONFIG = Option(
    "--model-config",
    READ,
    "Folder with the config.json of the model. Checkpoints of FSDP1 with flat parameters"
    " (LOCAL_STATE_DICT) need it: the installed transformers builds the model from it, without"
    " weights, and its parameters show how the flat ones are divided.",
    "DIR",
)
ADAPTER = Option("--adapter", READ, "Adapter to take where there are several.", "NAME")
ADAPTER_CONFIG = Option(
    "--adapter-config",
    READ,
    "The adapter_config.json of the run, if the checkpoint has none or a different one.",
    "FILE",
)

DRY_RUN = Option("--dry-run", WRITTEN, "Show the plan and what it needs; write nothing.")
OVERWRITE = Option("--overwrite", WRITTEN, "Replace OUT if it is not empty.")
MAX_SHARD_SIZE = Option(
    "--max-shard-size", WRITTEN, "Start a new weight file at this size.  [default: 5GB]", "SIZE"
)
CHECK = Option(
    "--check",
    WRITTEN,
    "Refuse an output with NaN ('nan'), or with infinite elements ('inf'), before it is committed."
    " Can be repeated.",
    "nan|inf",
    repeated=True,
)
ALLOW_CODE = Option("--allow-code", WRITTEN, "Copy Python files and 'auto_map' too.")

HTML = Option(
    "--html",
    OUTPUT,
    "Write a page for a browser to FILE: one file, which needs no network.",
    "FILE",
)
OVERWRITE_HTML = replace(
    OVERWRITE, group=OUTPUT, help="Replace the FILE of --html, if it is an earlier page."
)

DTYPE = Option(
    "--dtype",
    NAMED,
    "Element type of floating tensors: float32, bfloat16, float16 (or fp32, bf16, fp16), 'keep', or"
    " 'base' for those of the --base model, tensor by tensor. Or a form in which the weights of"
    f" linear layers are packed: {', '.join(get_args(PackedForm))}; all else is bfloat16 then.",
    metavar="TYPE",
    choices=get_args(OutputDType),
    default="keep",
    parse=partial(choose_dtype, choices=get_args(OutputDType)),
)
CAST_ALL = Option(
    "--cast-all",
    NAMED,
    "With --dtype: cast also what the class of the model, or the base, keeps in float32.",
)
GENERATION_CONFIG = Option(
    "--generation-config",
    WRITTEN,
    "'align' adds the tokens with which the tokenizer ends turns to the eos_token_id of"
    " generation_config.json; 'keep' leaves the file as it is.",
    choices=get_args(GenerationChoice),
    default="align",
)
TOKENIZER_FROM = Option(
    "--tokenizer-from",
    READ,
    "Whose tokenizer to write: that of the step, or of the base. 'auto' takes the files of the base"
    " if the step has the same tokens.",
    choices=get_args(TokenizerOrigin),
    default="auto",
)
FILLING = (
    Option(
        "--fill-from",
        READ,
        "Model to take those tensors from that the source lacks, such as frozen parts.",
        "MODEL",
    ),
    Option("--fill-from-base", READ, "Take those tensors from the --base."),
    Option(
        "--into-base",
        READ,
        "Put the source, a text model, into the multimodal model of --base, and take the other"
        " tensors from there.",
    ),
)

NAMES = Option(
    "--names",
    NAMED,
    "'auto' writes the names of save_pretrained; it asks the installed transformers where they"
    " differ from those in training, and refuses what would load as another model. 'hub' also"
    " refuses if the names cannot be determined. 'live' writes the raw state dict.",
    choices=get_args(NameChoice),
    default="auto",
)
MAP = Option(
    "--map",
    NAMED,
    "Name map that converts the names of another framework, such as Megatron's: its name, or a"
    " TOML file. 'auto' finds it by the names and the configuration, 'none' converts nothing. Maps"
    f" are {describe_map_names()}; `ckptkit inspect --map NAME` shows what becomes what.",
    "NAME|FILE",
    default="auto",
)
COMPARED_NAMES = Option(
    "--names",
    NAMED,
    "'auto' refuses names and shapes that would not load as the model of config.json. 'live'"
    " compares nothing.",
    choices=("auto", "live"),
    default="auto",
)
STRIP_PREFIX = Option(
    "--strip-prefix",
    NAMED,
    "Remove PREFIX from the beginning of names, such as 'net.' of a module that wraps the model."
    " All other options see the names without it. Can be repeated.",
    "PREFIX",
    repeated=True,
)

MEMORY_BUDGET = Option(
    "--memory-budget", LIMITS, "Memory for all buffers together.", "SIZE", default="64MB"
)
MEMORY_LIMIT = Option(
    "--memory-limit", LIMITS, "Memory for the whole process, including the plan.", "SIZE"
)


def _parse_workers(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a whole number", where="--workers", hint="leave it out, or pass 4"
        ) from error


WORKERS = Option(
    "--workers",
    LIMITS,
    "Number of threads; by default, it depends on the cores.",
    "N",
    parse=_parse_workers,
)

SRC_OPTION = Option(
    "--src-option",
    STORAGE,
    "Option of the storage that is read, as fsspec names it, such as key=KEY or"
    " client_kwargs.endpoint_url=URL. Applies to all URLs of the same kind as the first argument,"
    " and is never shown. Can be repeated.",
    "K=V",
    repeated=True,
    parse=partial(parse_options, option="--src-option"),
)
DST_OPTION = Option(
    "--dst-option",
    STORAGE,
    "The same for the storage that is written. Can be repeated.",
    "K=V",
    repeated=True,
    parse=partial(parse_options, option="--dst-option"),
)

JSON = Option("--json", OUTPUT, "Print one JSON document.", keyword="as_json")
JSON_LINES = replace(
    JSON, help="Print one JSON document per event, on one line.", keyword="json_lines"
)
QUIET = Option("--quiet", OUTPUT, "Print nothing but errors.", short="-q")
EVENTS = Option("--events", OUTPUT, "Report progress as JSON lines on stderr, and nothing else.")
SHOWN = (JSON, QUIET, EVENTS)
ALL = Option(
    "--all",
    OUTPUT,
    f"List all tensors; without it, a terminal shows the first {MOST_LISTED} of each state dict.",
)


def limit_list(
    output: Output, items: Sequence[T], *, shows_all: bool
) -> tuple[Sequence[T], list[str]]:
    """Returns what a terminal shows of a list, and the line that says how much it leaves out."""
    more = 0 if shows_all or output.width is None else max(len(items) - MOST_LISTED, 0)
    return items[: len(items) - more], [f"  ... and {more:,} more ({ALL.flag})"] if more else []


SHARE = Option(
    "--share",
    LIMITS,
    "Whether the file system makes blocks of SRC those of OUT, as XFS and btrfs can: 'auto'"
    " where it can, 'always' or else refuse, 'never'.",
    choices=get_args(Sharing),
    default="auto",
)
PROOF = Option(
    "--proof",
    LIMITS,
    "What proves bytes that are shared so: they are 'read' and compared, or 'stored' checksums"
    " of a save of ckptkit are taken as they are.",
    choices=get_args(Proof),
    default="read",
)
CONVERSION = (
    SRC,
    OUT,
    SELECT,
    INCLUDE,
    EXCLUDE,
    ALSO,
    BASE,
    CONFIG,
    TOKENIZER,
    TOKENIZER_FROM,
    *FILLING,
    MODEL_CONFIG,
    Option(
        "--optimizer",
        WRITTEN,
        "Write the states of the optimizer too, under the parameter names of training.",
    ),
    MAX_SHARD_SIZE,
    Option(
        "--like",
        WRITTEN,
        "Model folder, or its index file: write the same files, with the same tensors in each. Of a"
        " packed model, weights are packed as they are there, unless --dtype is passed.",
        "DIR",
    ),
    ALLOW_CODE,
    GENERATION_CONFIG,
    CHECK,
    DRY_RUN,
    OVERWRITE,
    Option(
        "--if-exists",
        WRITTEN,
        "'verify' accepts an OUT that contains this very output, made from the same source with"
        " the same options, after a check of all its digests.",
        choices=get_args(IfExists),
        default="error",
    ),
    Option(
        "--resume",
        WRITTEN,
        "Resume an interrupted run: keep its finished files once they are verified. If this run is"
        " interrupted, what it finished stays.",
    ),
    Option(
        "--delete-source",
        WRITTEN,
        "Remove the files that were read, after all of OUT was read back and has the digests of"
        " its manifest. Refused if they contain data that OUT does not have. --dry-run lists"
        " them.",
    ),
    DTYPE,
    CAST_ALL,
    Option(
        "--keep-dtype",
        NAMED,
        "Keep the stored type of tensors whose names match. Can be repeated.",
        "GLOB",
        repeated=True,
    ),
    NAMES,
    MAP,
    STRIP_PREFIX,
    Option(
        "--vocab-size",
        NAMED,
        "Number of rows to keep of embeddings and heads that training padded.",
        "N",
    ),
    MEMORY_BUDGET,
    MEMORY_LIMIT,
    WORKERS,
    Option(
        "--bandwidth", LIMITS, "Most bytes to read, and most bytes to write, per second.", "SIZE"
    ),
    SHARE,
    PROOF,
    Option(
        "--engine",
        MACHINES,
        "'ray' divides the work among the nodes of a Ray cluster, with one process on each. All of"
        " them need access to SRC and OUT; threads, memory and bandwidth are those of each node.",
        choices=get_args(Engine),
        default="local",
    ),
    Option(
        "--slice",
        MACHINES,
        "Do part I of N, with I from 0 to N - 1, and leave the others to other processes that see"
        " the same OUT. The last one to finish commits the output.",
        "I/N",
    ),
    SRC_OPTION,
    DST_OPTION,
    *SHOWN,
)


_NOT_SLICED = {
    "resume": "--resume: a finished slice is kept anyway, and any other is run again",
    "delete_source": "--delete-source, which needs one process that knows that all is written",
}


def make_job(layout: Layout, values: Mapping[str, Any]) -> ConversionJob:
    """Checks the options of a conversion."""
    from ckptkit.conversion.prepare import ConversionJob

    job = ConversionJob.from_options(values_with_places(values), layout)
    text = values["slice"]
    if text is None:
        return job
    other = next((why for option, why in _NOT_SLICED.items() if values[option]), "")
    if job.resources.engine != "local":
        other = f"--engine {job.resources.engine}, which divides the work by itself"
    if other:
        raise UsageError(
            f"cannot be combined with {other}",
            where=f"--slice {text}",
            hint="leave one of the two out",
        )
    from ckptkit.plan.plan import parse_slice

    return replace(job, share=parse_slice(text))


def _check_time(text: str) -> str:
    parse_duration(text, option="--keep-for")
    return text


STATE = Option(
    "--state", READ, "Directory in which a watch of RUN keeps its state, if not in RUN.", "DIR"
)
RETENTION = (
    Option("--keep-last", KEPT, "The newest N complete steps stay.", "N", count=3),
    Option("--keep-every", KEPT, "Steps divisible by N stay.", "N", count=1000),
    Option(
        "--keep-for",
        KEPT,
        "Steps saved in the last TIME stay, such as 12h or 7d.",
        "TIME",
        parse=_check_time,
    ),
    Option(
        "--keep-best",
        KEPT,
        "The step with the best METRIC stays. `ckptkit ls` lists the metrics.",
        "METRIC",
    ),
    Option(
        "--best-mode",
        KEPT,
        "Whether the smallest or the largest METRIC is best.",
        choices=get_args(BestMode),
        default="min",
    ),
)

PRIVATE = Option(
    "--private/--public",
    HUB,
    "Visibility of a new repository (private by default), and the one that an existing repository"
    " must have.",
)
REVISION = Option(
    "--revision",
    HUB,
    "Branch to commit to; it is created if it does not exist.  [default: main]",
    "R",
)


def parse_number(
    text: str,
    *,
    option: str,
    hint: str = "pass 1e-3",
    expected: str = "a number",
    fits: Callable[[float], bool] = math.isfinite,
) -> float:
    """Reads a number; a finite one, if nothing else is said."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise UsageError(f"{text!r} is not {expected}", where=option, hint=hint)
    return value


_LEAST_SECONDS, _MOST_SECONDS = 0.05, 86_400.0
parse_interval = partial(
    parse_number,
    option="--interval",
    hint="pass --interval 10",
    expected=f"a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,.0f}",
    fits=lambda seconds: _LEAST_SECONDS <= seconds <= _MOST_SECONDS,
)


def _parse_alpha(text: str) -> float:
    value = parse_number(text, option="--lora-alpha", hint="pass 16")
    if value <= 0:
        raise UsageError(
            f"{text!r} would invert the trained change, or remove it",
            where="--lora-alpha",
            hint="pass the alpha of the run, such as 16",
        )
    return int(value) if value == int(value) else value


def _parse_tokens(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and word.isascii() for word in words):
        raise UsageError(
            f"{text!r} is not a list of tokens", where="--token-indices", hint="pass 5,17,1024"
        )
    return [int(word) for word in words]


_UNKNOWN = "Without an adapter_config.json"
ADAPTER_HINTS = (
    Option("--lora-alpha", _UNKNOWN, "The alpha of the run.", "N", parse=_parse_alpha),
    Option("--use-rslora/--no-use-rslora", _UNKNOWN, "Whether the scaling was alpha / sqrt(rank)."),
    Option(
        "--fan-in-fan-out/--no-fan-in-fan-out",
        _UNKNOWN,
        "Whether weights are stored as [in, out], as in GPT-2.",
    ),
    Option(
        "--token-indices",
        _UNKNOWN,
        "The tokens whose rows were trained, in order.",
        "I,J,...",
        parse=_parse_tokens,
    ),
)

ADAPTERS = Option(
    "--adapter",
    READ,
    "Adapter of SRC to merge, where there are several, and the factor of its update. Can be"
    " repeated; adapters are merged in this order.",
    "NAME[=WEIGHT]",
    repeated=True,
)
WITH = Option(
    "--with",
    READ,
    "Further adapter to merge after those of SRC, and the factor of its update. Can be repeated.",
    "PATH[=WEIGHT]",
    repeated=True,
    keyword="further",
)
ALLOW_UNTRAINED = Option(
    "--allow-untrained", READ, "Accept an adapter that changes nothing, or has no tensors."
)
ALLOW_OTHER_BASE = Option(
    "--allow-other-base",
    READ,
    "Accept a base that is proven to differ from the one trained on.",
)
MATCH_PEFT = Option(
    "--match-peft", NAMED, "Round where merge_and_unload of PEFT rounds, not once at the end."
)
QLORA_BASE = Option(
    "--qlora-base",
    NAMED,
    "Weights that an adapter of a 4-bit or 8-bit base is merged onto: 'dequantized' for those"
    " that it was trained on (default), 'original' for those before quantization.",
    choices=("dequantized", "original"),
)
DOUBLE_QUANT = Option(
    "--double-quant/--no-double-quant",
    NAMED,
    "Whether the scales of 4-bit weights were quantized too, if neither the checkpoint nor a"
    " config.json next to it has this; by default it is assumed, with a note.",
)


def values_with_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a command with its paths as places that know their storage options."""
    stores = {"src_options": values["src_option"], "dst_options": values.get("dst_option")}
    return resolve_places(values["src"], values.get("out"), {**values, **stores})


def choose_adapters(values: Mapping[str, Any], resources: Resources) -> list[AdapterChoice]:
    """Returns the adapters that the options of a merge name, in the order of merging."""
    from ckptkit.adapters.merge import list_adapters

    names = [_split_weight(text, "--adapter") for text in values["adapter"]]
    # A path may contain an equals sign itself.
    pairs = [
        (text, 1.0) if text and Path(text).exists() else _split_weight(text, "--with")
        for text in values["further"]
    ]
    return list_adapters({**values, "adapters": names, "further": pairs}, resources)


def _split_weight(text: str, option: str) -> tuple[str, float]:
    """Splits `NAME=WEIGHT`; without a weight it is 1."""
    name, sign, number = text.rpartition("=")
    if not name and (sign or not text):
        raise UsageError(f"{text!r} names no adapter", where=option, hint=f"pass {option} X=0.5")
    if not sign:
        return text, 1.0
    try:
        return name, float(number)
    except ValueError as error:
        raise UsageError(
            f"{number!r} is not a number",
            where=f"{option} {text}",
            hint=f"pass {option} {name}=0.5",
        ) from error
