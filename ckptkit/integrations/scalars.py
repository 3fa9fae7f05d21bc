"""Writes the cost of saves to TensorBoard, wandb and similar loggers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import UsageError
from ckptkit.core.text import a_kind
from ckptkit.training.handle import SaveReport

_GB = 1e9  # bytes
_Write = Callable[[Mapping[str, float], int], object]


@check_names
def scalars(writer: Any, *, prefix: str = "ckptkit/") -> Callable[[SaveReport], None] | None:
    """Returns a listener for a `Checkpointer` that writes the cost of every save.

    It writes `blocked_ms`, `durable_s`, `committed_s`, `copy_GB_per_s`, `write_GB_per_s` (of
    this rank) and `size_GB` (of the whole step), at the training step that was saved. A save is
    reported when it is committed, some steps after it began.

        checkpointer = Checkpointer("runs/a", listener=scalars(SummaryWriter("logs")))

    Args:
        writer: An object with `add_scalar(name, value, step)`, such as TensorBoard's
            SummaryWriter; with `log_metrics(values, step)`, such as loggers of Lightning and
            mlflow; or with `log(values, step)`, such as wandb and accelerate. None writes
            nothing, for ranks without a writer.
        prefix: The prefix of the names.

    Returns:
        The listener, None without a writer.

    Raises:
        UsageError: If the writer has none of these methods.
    """
    if writer is None:
        return None
    write = _write_of(writer, prefix)

    def listen(report: SaveReport) -> None:
        write({prefix + name: value for name, value in values_of(report).items()}, report.step)

    return listen


def values_of(report: SaveReport) -> dict[str, float]:
    """Returns the numbers of a report by names that include the unit."""
    durable = report.durable_seconds
    return {
        "blocked_ms": report.blocked_seconds * 1e3,
        "durable_s": durable,
        "committed_s": report.committed_seconds,
        "copy_GB_per_s": report.bytes_per_second / _GB,
        "write_GB_per_s": report.size_bytes / durable / _GB if durable > 0 else 0.0,
        "size_GB": report.total_bytes / _GB,
    }


def _write_of(writer: Any, prefix: str) -> _Write:
    if callable(getattr(writer, "add_scalar", None)):

        def add(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return add
    if callable(getattr(writer, "define_metric", None)):
        return _wandb(writer, prefix)
    log = getattr(writer, "log_metrics", None) or getattr(writer, "log", None)
    if not callable(log) or not _takes_step(log):
        raise UsageError(
            f"found {a_kind(writer)}, expected an object with add_scalar(), or with log_metrics()"
            " or log() that take a step",
            where="scalars",
            hint="pass a SummaryWriter, a wandb run, or a logger of Lightning",
        )
    return lambda values, step: log(values, step=step)


def _takes_step(log: Callable[..., object]) -> bool:
    """Returns whether a function has an argument `step`, which the Trainer's `log` lacks."""
    try:
        parameters = inspect.signature(log).parameters
    except ValueError:  # a builtin without signature
        return True
    return "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _wandb(run: Any, prefix: str) -> _Write:
    """Gives the scalars a step axis of their own.

    A save ends some steps after it began, and wandb drops values of past steps. `commit=False` adds
    the values to the row that the training loop writes next; committing the row here would drop
    what the loop logs later at the same step. Of two saves that end within one row, the later one
    is shown.
    """
    axis = f"{prefix}step"
    run.define_metric(axis, hidden=True)
    run.define_metric(f"{prefix}*", step_metric=axis)
    return lambda values, step: run.log({**values, axis: step}, commit=False)
