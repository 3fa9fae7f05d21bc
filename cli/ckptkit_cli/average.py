"""`ckptkit average`: the weights of several steps become one model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckptkit.storage.locations import Sources
from ckptkit_cli._options import CONVERSION, READ, make_job, parse_number
from ckptkit_cli._output import Output
from ckptkit_cli._program import Argument, Option, command
from ckptkit_cli.consolidate import run_conversion

_AVERAGED = "What is averaged"


def _parse_weights(text: str) -> list[float]:
    """Reads numbers with commas between them."""
    words = text.replace(",", " ").split()
    return [parse_number(word, option="--weights", hint="pass 0.5,0.3,0.2") for word in words]


_NOT_AVERAGED = {"src", "also", "optimizer", "delete_source", "share", "proof"}
_OPTIONS = (
    Argument(
        "sources",
        "SRC...",
        "Steps, folders or URLs, the oldest first; with --last, one run.",
        repeated=True,
    ),
    *(entry for entry in CONVERSION if entry.name not in _NOT_AVERAGED),
    Option("--last", READ, "Average the newest K complete steps of the run SRC.", "K", count=5),
    Option(
        "--weights",
        _AVERAGED,
        "How much each source counts, such as 0.5,0.3,0.2; they are divided by their sum. By"
        " default, all count the same.",
        "W,W,...",
        parse=_parse_weights,
    ),
    Option(
        "--ema",
        _AVERAGED,
        "Average exponentially: begin with the oldest source x, and for each newer one take DECAY"
        " times the average plus (1 - DECAY) times x.",
        "DECAY",
        parse=partial(parse_number, option="--ema", hint="pass 0.9"),
    ),
    Option(
        "--take-last",
        _AVERAGED,
        "Take tensors whose names match from the last source. Integers need it where they differ."
        " Can be repeated.",
        "GLOB",
        repeated=True,
    ),
)


@command(*_OPTIONS, order=4)
def average(output: Output, sources: Sequence[str], **values: Any) -> None:
    """Average the weights of several steps.

        ckptkit average runs/llama models/soup --last 5
        ckptkit average runs/a/checkpoint-900 runs/a/checkpoint-1000 models/soup --weights 1,3

    Floats are averaged in float32, float64 in float64, and rounded once. All sources need the same
    tensors. Configuration and tokenizer are those of the last source. Checks are those of
    consolidate.
    """
    from ckptkit.conversion.average import AverageJob, Weighting

    places = Sources(sources[0], values["src_option"])
    left_out = {"src": sources[-1], "also": (), "optimizer": False, "delete_source": False}
    job = AverageJob.of(
        make_job("hf", {**values, **left_out}),
        [places.first, *places.further(sources[1:])],
        Weighting.from_options(values["weights"], values["ema"]),
        last=values["last"],
        take_last=values["take_last"],
    )
    run_conversion(output, "average", job, values)
