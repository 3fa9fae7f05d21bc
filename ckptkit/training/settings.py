"""What a Checkpointer is told: options as users write them, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from ckptkit.core.errors import UsageError
from ckptkit.planning.requests import parse_size
from ckptkit.planning.retention import BestMode, Retention
from ckptkit.training.handle import SaveReport
from ckptkit.training.state import Layout
from ckptkit.training.triggers import Interval

InFlight = Literal["wait", "skip"]


class Options(TypedDict, total=False):
    """The options of a `Checkpointer`; every rank gives the same.

    Attributes:
        layout: "accelerate" (default) writes what `accelerator.save_state` writes; "dcp" writes
            one directory for `dcp.load`, with the caller's own keys.
        every: When `should_save` says yes: a number of steps, or a time such as "30min".
        keep_last: How many of the newest steps stay; all when left out.
        keep_every: Steps divisible by this stay.
        keep_best: The metric by which the best step stays; given to `save(…, metrics=…)`.
        best_mode: Whether the smallest ("min", default) or the largest ("max") is best.
        in_flight: What `save` does while earlier saves are under way: "wait" (default) for one
            to end, or "skip".
        max_in_flight: How many saves may be under way; each has a copy of the local state.
        sidecar: What lies beside the shards: objects with `save_pretrained` (a tokenizer), paths.
        signals: Names of signals after which `should_save` says yes and `stop_requested` is set;
            none by default. Earlier handlers are called as well.
        slurm_margin_seconds: How long before Slurm ends the job it is saved, and told to stop;
            0 to ignore Slurm.
        staging_limit: Memory for the copy, such as "16GB"; a larger state is staged in waves.
        timeout_seconds: How long other ranks are waited for, by anything that waits for them.
        stall_seconds: How long a writer may give no sign of life before it is killed.
        listener: Is called with a `SaveReport` after each save, from a thread.
    """

    layout: Layout
    every: int | str | None
    keep_last: int | None
    keep_every: int | None
    keep_best: str | None
    best_mode: BestMode
    in_flight: InFlight
    max_in_flight: int
    sidecar: Mapping[str, object] | None
    signals: Sequence[str]
    slurm_margin_seconds: float
    staging_limit: int | str | None
    timeout_seconds: float
    stall_seconds: float
    listener: Callable[[SaveReport], None] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked; see `Options`."""

    layout: Layout = "accelerate"
    interval: Interval = field(default_factory=lambda: Interval.parse(None))
    retention: Retention = field(default_factory=Retention)
    in_flight: InFlight = "wait"
    max_in_flight: int = 1
    sidecar: Mapping[str, object] = field(default_factory=dict)
    signals: tuple[str, ...] = ()
    slurm_margin_seconds: float = 300.0
    staging_limit_bytes: int | None = None
    timeout_seconds: float = 600.0
    stall_seconds: float = 120.0
    listener: Callable[[SaveReport], None] | None = None


def check_options(options: Options) -> Settings:
    """Returns the options as settings.

    Raises:
        UsageError: If one of them is unknown, or does not have the form that it needs.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise UsageError(
            f"unknown option {min(unknown)!r}; known are"
            f" {', '.join(sorted(Options.__annotations__))}",
            where="Checkpointer",
        )
    given: dict[str, Any] = dict(options)
    _check_choice(given, "layout", get_args(Layout))
    _check_choice(given, "in_flight", get_args(InFlight))
    for name in ("max_in_flight", "timeout_seconds", "stall_seconds"):
        if given.get(name, 1) <= 0:
            raise UsageError(f"is {given[name]!r}, where more than 0 was expected", where=name)
    limit = given.pop("staging_limit", None)
    retention = {
        name: given.pop(name)
        for name in ("keep_last", "keep_every", "keep_best", "best_mode")
        if name in given
    }
    return Settings(
        interval=Interval.parse(given.pop("every", None)),
        retention=Retention(**retention),
        sidecar=given.pop("sidecar", None) or {},
        signals=tuple(given.pop("signals", ())),
        staging_limit_bytes=None if limit is None else parse_size(limit, option="staging_limit"),
        **given,
    )


def _check_choice(given: Mapping[str, Any], name: str, choices: Sequence[str]) -> None:
    if given.get(name, choices[0]) not in choices:
        raise UsageError(f"{given[name]!r} is not among {', '.join(choices)}", where=name)
