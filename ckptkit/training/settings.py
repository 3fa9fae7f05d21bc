"""The options of a Checkpointer, checked once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from os import PathLike
from pathlib import Path
from signal import Signals
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict

from ckptkit.core.arguments import refuse_unknown
from ckptkit.core.errors import UsageError
from ckptkit.core.text import a_kind
from ckptkit.options import RetentionOptions, parse_size
from ckptkit.runs.marks import STEP_PREFIXES
from ckptkit.runs.retention import RETENTION_OPTIONS, Retention
from ckptkit.training.agree.peers import name_ranks
from ckptkit.training.handle import SaveReport
from ckptkit.training.pushing import HubSettings, HubStrategy, check_hub
from ckptkit.training.save.file_layout import MIN_LIMIT_BYTES
from ckptkit.training.sidecar import check_sidecar
from ckptkit.training.signals import signal_names
from ckptkit.training.state.collect import Layout, MissingGroups, Unfit

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TEXT = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")
_HINT = 'pass a number of steps such as 500, or a time such as "30min" or "2h"'


class Interval(Struct, frozen=True):
    """A distance between saves, in steps, in time, or none."""

    steps: int | None = None  # steps that are divisible by this are saved
    seconds: float | None = None  # the time after a save until the next

    @classmethod
    def parse(cls, every: int | str | timedelta | None) -> Interval:
        """Parses steps (`500` or `"500"`), or a time (`"90s"`, `"2h"` or a `timedelta`).

        Raises:
            UsageError: If it is none of these, or not positive.

        >>> Interval.parse("1.5h")
        Interval(steps=None, seconds=5400.0)
        """
        if every is None:
            return cls()
        if isinstance(every, timedelta):
            return cls(seconds=_positive(every.total_seconds(), every))
        if isinstance(every, int) and not isinstance(every, bool):
            return cls(steps=int(_positive(every, every)))
        match = _TEXT.fullmatch(every) if isinstance(every, str) else None
        unit = match[2].lower() if match else ""
        if match is None or (unit and unit not in _SECONDS) or (not unit and "." in match[1]):
            raise UsageError(f"{every!r} is no interval", where="every", hint=_HINT)
        if not unit:
            return cls(steps=int(_positive(int(match[1]), every)))
        return cls(seconds=_positive(float(match[1]) * _SECONDS[unit], every))

    def due_at_step(self, step: int) -> bool:
        """Returns whether a step is divisible by the interval; step 0 never counts."""
        return self.steps is not None and step > 0 and step % self.steps == 0


def _positive(value: float, every: object) -> float:
    if value <= 0:
        raise UsageError(f"{every!r} is not more than 0", where="every", hint=_HINT)
    return value


InFlight = Literal["wait", "skip"]

_CHOICES: dict[str, Sequence[str]] = {
    "layout": get_args(Layout),
    "prefix": STEP_PREFIXES,
    "in_flight": get_args(InFlight),
    "unfit_optimizer": get_args(Unfit),
    "missing_groups": get_args(MissingGroups),
}
_MOST_SECONDS = 1e6  # 11 days; system calls accept timeouts of up to about 24 days
_SIZE_HINT = 'pass staging_limit="16GB"'


class Options(RetentionOptions, total=False):
    """The options of a `Checkpointer`; every rank gives the same.

    Which steps stay: see `RetentionOptions`.

    Attributes:
        layout: "accelerate" (default) writes what `accelerator.save_state` writes; "dcp" writes
            one directory for `dcp.load`, with the caller's own keys.
            "trainer" writes what the Trainer of Transformers writes.
        prefix: Of the names of steps, before the number: "checkpoint-" (default), or "checkpoint_"
            as in accelerate's automatic naming.
        local: A directory on the node's own disk, which ranks of one node share. A step is durable
            there first, and drained to the run's directory from there; a run at a URL requires it.
        storage_options: Options of fsspec for a run at a URL, such as keys and an endpoint; those
            of the environment are used as well. No file, message or argument has them.
        every: When `should_save` returns True: a number of steps, or a time such as "30min".
        in_flight: What `save` does while earlier saves are under way: "wait" (default) for one
            to end, or "skip".
        max_in_flight: How many saves may be under way; each needs a copy of the local state.
        unfit_optimizer: What `resume` does if an optimizer cannot continue from the step, because
            its state belongs to other ranks' parts of the parameters or could not be saved:
            "error" (default), or "reset" to start it from scratch, with a warning.
        missing_groups: What `resume` does if the step has parameter groups that the optimizer does
            not have: "error" (default), or "drop" to leave their state out, with a warning.
        sidecar: Files to store with each step: objects with `save_pretrained` (a tokenizer), paths.
        signals: Signals, by name, after which `should_save` returns True and `stop_requested` is
            set; none by default. Previous handlers are called as well.
        slurm_margin_seconds: How long before the end of a Slurm job it is saved and should stop;
            0 to ignore Slurm.
        staging_limit: Memory for the copy, such as "16GB"; a larger state is staged in waves.
        timeout_seconds: How long to wait for other ranks.
        stall_seconds: How long a writer may send no message before it is killed.
        push_to_hub: A repository, such as "org/name", to which a process of rank 0 pushes the
            model, or the adapter, of each step.
        hub_strategy: "every_save" (default); "checkpoint" and "all_checkpoints" also push the step
            itself, as `last-checkpoint` or under its name; "end" pushes only the last step, once
            the Checkpointer is closed.
        hub_private_repo: Whether the repository is private. A new one is private by default; an
            existing one must match.
        hub_revision: The branch; `main` by default.
        hub_include: Patterns of files to push with the step itself although they are no known part
            of one, such as "notes/*". A file with a secret is never pushed.
        hub_token: By default that of HF_TOKEN or of the last login.
        hub_timeout_seconds: How long the end of the program waits for pushes, on rank 0; 0 by
            default, since the process that pushes outlives the program.
        listener: Called with a `SaveReport` after each successful save, in the thread that writes;
            the next save waits until it returns.
    """

    layout: Layout
    prefix: str
    local: str | PathLike[str] | None
    storage_options: Mapping[str, Any] | None
    every: int | str | None
    in_flight: InFlight
    max_in_flight: int
    unfit_optimizer: Unfit
    missing_groups: MissingGroups
    sidecar: Mapping[str, object] | None
    signals: str | Signals | Sequence[str | Signals | int] | None
    slurm_margin_seconds: float
    staging_limit: int | str | None
    timeout_seconds: float
    stall_seconds: float
    push_to_hub: str | None
    hub_strategy: HubStrategy
    hub_private_repo: bool | None
    hub_revision: str | None
    hub_include: Sequence[str]
    hub_token: str | None
    hub_timeout_seconds: float
    listener: Callable[[SaveReport], None] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked; see `Options`."""

    layout: Layout = "accelerate"
    prefix: str = STEP_PREFIXES[0]
    local: Path | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    interval: Interval = field(default_factory=lambda: Interval.parse(None))
    retention: Retention = field(default_factory=Retention)
    in_flight: InFlight = "wait"
    max_in_flight: int = 1
    unfit_optimizer: Unfit = "error"
    missing_groups: MissingGroups = "error"
    sidecar: Mapping[str, object] = field(default_factory=dict)
    signals: tuple[str, ...] = ()
    slurm_margin_seconds: float = 300.0
    staging_limit_bytes: int | None = None
    timeout_seconds: float = 600.0
    stall_seconds: float = 120.0
    hub: HubSettings | None = None
    listener: Callable[[SaveReport], None] | None = None

    def shared(self) -> dict[str, Any]:
        """Returns the options that must be equal on all ranks, by name, as JSON values."""
        every = self.interval.seconds
        return {
            "layout": self.layout,
            "local": self.local is not None,
            "prefix": self.prefix,
            "every": self.interval.steps if every is None else f"{every:.15g}s",
            **asdict(self.retention),
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "unfit_optimizer": self.unfit_optimizer,
            "missing_groups": self.missing_groups,
            "signals": sorted(self.signals),
            "slurm_margin_seconds": self.slurm_margin_seconds,
        } | (self.hub.shared() if self.hub is not None else {"push_to_hub": None})


def check_shared(of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuses options, `Settings.shared` of each rank, that differ between ranks."""
    for name, expected in of_ranks[0].items():
        other = [rank for rank, options in enumerate(of_ranks) if options[name] != expected]
        if other:
            raise UsageError(
                f"is {of_ranks[other[0]][name]!r} on {name_ranks(other)} and {expected!r} on"
                " rank 0, where the same was expected on all ranks",
                where=name,
                hint="pass the Checkpointer the same options on every rank",
            )


def check_options(options: Options) -> Settings:
    """Returns the options as settings; refuses unknown ones, and those of another form."""
    given: dict[str, Any] = dict(options)
    refuse_unknown(sorted(given), sorted(Options.__annotations__), where="Checkpointer")
    for name, choices in _CHOICES.items():
        check_choice(given, name, choices)
    most = given.get("max_in_flight", 1)
    if type(most) is not int or most < 1:
        raise UsageError(f"expected a whole number above 0, got {most!r}", where="max_in_flight")
    for name in ("timeout_seconds", "stall_seconds", "slurm_margin_seconds"):
        _check_seconds(given, name, may_be_0=name == "slurm_margin_seconds")
    listener = given.get("listener")
    if listener is not None and not callable(listener):
        raise UsageError(
            f"expected a function that takes a SaveReport, got {a_kind(listener)}",
            where="listener",
        )
    retention = {name: given.pop(name) for name in RETENTION_OPTIONS if name in given}
    return Settings(
        local=_folder(given.pop("local", None)),
        storage_options=check_storage_options(given.pop("storage_options", None)),
        interval=Interval.parse(given.pop("every", None)),
        hub=check_hub(given),
        retention=Retention(**retention),
        sidecar=check_sidecar(given.pop("sidecar", None)),
        signals=signal_names(given.pop("signals", None)),
        staging_limit_bytes=_limit_bytes(given.pop("staging_limit", None)),
        **given,
    )


def check_choice(given: Mapping[str, Any], name: str, choices: Sequence[str]) -> None:
    """Refuses a value of an option that is not among the choices, of which the first is usual."""
    value = given.get(name, choices[0])
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{value!r} is not among {', '.join(choices)}", where=name)


def _folder(value: object) -> Path | None:
    if value is None:
        return None
    if isinstance(value, str | PathLike) and os.fspath(value):
        return Path(os.fsdecode(value))
    raise UsageError(f"expected a directory on the node's own disk, got {value!r}", where="local")


def check_storage_options(value: object) -> Mapping[str, Any]:
    """Checks that the options can be sent to the process that uploads; no message shows a value."""
    if value is None:
        return {}
    found = a_kind(value)
    options: dict[str, Any] = {}
    try:
        for name, option in value.items() if isinstance(value, Mapping) else ():
            found = f"{a_kind(option)} for {name!r}"
            options |= json.loads(json.dumps({name: option}))
        if isinstance(value, Mapping):
            return options
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"expected names and plain values of options, got {found}",
        where="storage_options",
        hint='pass such as storage_options={"key": …, "secret": …}, or use the environment',
    )


def _check_seconds(given: Mapping[str, Any], name: str, *, may_be_0: bool) -> None:
    value = given.get(name, 1.0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 <= value <= _MOST_SECONDS and (value or may_be_0):  # NaN is not in between
        return
    least = "of at least 0" if may_be_0 else "above 0"
    raise UsageError(
        f"expected a number of seconds {least} and at most {_MOST_SECONDS:,.0f}, got {value!r}",
        where=name,
    )


def _limit_bytes(limit: object) -> int | None:
    if limit is None:
        return None
    where = "staging_limit"
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise UsageError(f"expected a size, got {a_kind(limit)}", where=where, hint=_SIZE_HINT)
    try:
        size = parse_size(limit, option=where)
    except UsageError as error:
        raise error.hinted(_SIZE_HINT) from error
    if size < MIN_LIMIT_BYTES:
        problem = f"expected at least {MIN_LIMIT_BYTES:,} bytes, got {size:,}"
        raise UsageError(problem, where=where, hint=_SIZE_HINT)
    return size
