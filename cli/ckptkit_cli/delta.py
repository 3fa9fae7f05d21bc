"""`ckptkit delta`: what changed between two models, made and applied."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from ckptkit.core.text import size_text
from ckptkit.options import ChecksumFormat, DTypeChoice, Encoding, choose_dtype
from ckptkit_cli import _options as options
from ckptkit_cli._options import CONVERSION, WRITTEN
from ckptkit_cli._output import Output, counted, escaped
from ckptkit_cli._program import Argument, Option, command, make_group

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit_cli._progress import Progress

DELTA = make_group(
    "delta",
    """Write what changed between two models, and apply it.

        ckptkit delta create runs/rl/checkpoint-100 runs/rl/checkpoint-101 deltas/weight_v000001
        ckptkit delta apply models/base deltas/weight_v000001 models/new

    `ckptkit inspect` shows what is in a delta, `ckptkit verify` reads all of it.
    """,
    order=19,
)
_OF_CONVERSION = {option.name: option for option in CONVERSION}
_BEFORE = Argument(
    "before", "BASE", "The model before: a checkpoint, or a folder that contains one."
)
_DTYPES = get_args(DTypeChoice)
_SIDE = (
    options.SELECT,
    _OF_CONVERSION["include"],
    _OF_CONVERSION["exclude"],
    replace(
        options.BASE,
        help="Model folder with configuration and tokenizer, if the checkpoints have none.",
    ),
    *options.FILLING,
    options.MODEL_CONFIG,
    options.OVERWRITE,
    replace(
        options.DTYPE,
        help="Element type of floating tensors; bf16, fp16 and fp32 are accepted too.",
        choices=_DTYPES,
        parse=partial(choose_dtype, choices=_DTYPES),
    ),
    options.CAST_ALL,
    _OF_CONVERSION["keep_dtype"],
    options.NAMES,
    options.MAP,
    options.STRIP_PREFIX,
    _OF_CONVERSION["vocab_size"],
    options.MEMORY_BUDGET,
    options.MEMORY_LIMIT,
    options.WORKERS,
    _OF_CONVERSION["bandwidth"],
    options.SRC_OPTION,
    options.DST_OPTION,
    *options.SHOWN,
)


@command(
    _BEFORE,
    Argument("after", "NEW", "The model after, of any format."),
    options.OUT,
    Option(
        "--version",
        WRITTEN,
        "Number of the version that the delta leads to; it is made for the version before. By"
        " default it is taken from an OUT such as weight_v000002, else it is 1.",
        "N",
        count=1,
    ),
    Option(
        "--encoding",
        WRITTEN,
        "'xor' is smaller, and has to be applied once. 'overwrite' has positions and new values.",
        choices=get_args(Encoding),
        default="xor",
    ),
    Option(
        "--checksum",
        WRITTEN,
        "Kind of the checksums that prove each changed tensor; blake3 needs the extra 'blake3'.",
        choices=get_args(ChecksumFormat),
        default="xxh3-128",
    ),
    *_SIDE,
    of=DELTA,
)
def create(output: Output, before: str, after: str, out: str, **values: Any) -> None:
    """Write what changed between two models.

        ckptkit delta create runs/rl/checkpoint-100 runs/rl/checkpoint-101 deltas/weight_v000001

    The models are read from their shards, as `consolidate` would write them. The form is the one
    that slime writes and SGLang's /pull_weights receives. OUT appears when it is complete and
    durable, or not at all.
    """
    from ckptkit import api
    from ckptkit_cli._pages import show_output
    from ckptkit_cli._progress import Progress

    with Progress(output, "delta create") as progress:
        manifest = api.create_delta(before, after, out, **_for_api(values, progress))
    show_output(output, progress, out, manifest, {})
    output.lines(_creation_page(output, manifest, out, progress.seconds))


@command(
    _BEFORE,
    Argument("deltas", "DELTA...", "One delta or several, in their order.", repeated=True),
    options.OUT,
    options.MAX_SHARD_SIZE,
    options.ALLOW_CODE,
    *_SIDE,
    options.SHARE,
    options.PROOF,
    of=DELTA,
)
def apply(output: Output, before: str, deltas: list[str], out: str, **values: Any) -> None:
    """Write the model that deltas lead to.

        ckptkit delta apply models/base deltas/weight_v000001 deltas/weight_v000002 models/new

    BASE is read once, however many deltas there are. Every changed tensor is proven by the
    checksum in its delta. OUT appears when it is complete and durable, or not at all.
    """
    from ckptkit import api
    from ckptkit_cli._pages import Consolidated, consolidation_page
    from ckptkit_cli._progress import Progress

    with Progress(output, "delta apply") as progress:
        manifest = api.apply_delta(before, deltas, out, **_for_api(values, progress))
    done = Consolidated(
        out, manifest, progress.seconds, progress.notes, shared_bytes=progress.shared_bytes
    )
    progress.warn(done.notes)
    output.document(done.to_json())
    output.lines(consolidation_page(output, done))


def _for_api(values: dict[str, Any], progress: Progress) -> Any:
    stores = {f"{side}_options": values.pop(f"{side}_option") for side in ("src", "dst")}
    given = {name: value for name, value in values.items() if value is not None}
    return {**given, **stores, "listener": progress.listen}


def _creation_page(output: Output, manifest: Manifest, out: str, seconds: float) -> Iterator[str]:
    from ckptkit_cli._pages import proof_lines

    facts = manifest.source["delta"]
    changed = facts["changed_elements"]
    yield output.styled(escaped(out), "bold")
    yield (
        f"  wrote      version {facts['version']:,}, to be applied to version"
        f" {facts['base_version']:,}, {size_text(manifest.size_bytes)}, in {seconds:.2f} s"
    )
    yield (
        f"  changed    {counted(len(changed), 'tensor')} of {len(manifest.tensors):,},"
        f" {counted(sum(changed.values()), 'element')}"
    )
    yield from proof_lines(output, manifest)
