"""What saves cost, written where people look: TensorBoard, wandb and others of their kind."""

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
    """Returns a listener for a `Checkpointer` that writes what every save cost.

    Written are `blocked_ms`, `durable_s`, `committed_s`, `copy_GB_per_s`, `write_GB_per_s` (of
    this rank) and `size_GB` (of the whole step), at the training step that was saved. A save is
    reported when it is committed, some steps after it began.

        checkpointer = Checkpointer("runs/a", listener=scalars(SummaryWriter("logs")))

    Args:
        writer: Something with `add_scalar(name, value, step)`, as TensorBoard's SummaryWriter
            has; with `log_metrics(values, step)`, as loggers of Lightning and mlflow have; or
            with `log(values, step)`, as wandb, accelerate and others have. None writes
            nothing, on the ranks that have no writer.
        prefix: What the names begin with.

    Returns:
        The listener, None where there is no writer.

    Raises:
        UsageError: If the writer has none of these.
    """
    if writer is None:
        return None
    write = _write_of(writer, prefix)

    def listen(report: SaveReport) -> None:
        write({prefix + name: value for name, value in values_of(report).items()}, report.step)

    return listen


def values_of(report: SaveReport) -> dict[str, float]:
    """Returns the numbers of a report that are worth a curve, by names that tell the unit."""
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
            f"{a_kind(writer)} was found where something with add_scalar(), or with log_metrics()"
            " or log() that take a step, was expected",
            where="scalars",
            hint="pass a SummaryWriter, a wandb run, or a logger of Lightning",
        )
    return lambda values, step: log(values, step=step)


def _takes_step(log: Callable[..., object]) -> bool:
    """Returns whether a step can be given by name, which the Trainer's `log`, for one, has not."""
    try:
        parameters = inspect.signature(log).parameters
    except ValueError:  # it is not written in Python
        return True
    return "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _wandb(run: Any, prefix: str) -> _Write:
    """Gives the scalars a step axis of their own.

    A save ends some steps after it began, and wandb drops what is logged for a step that has
    passed. `commit=False` adds the values to the row that the training loop is about to write: to
    end that row here would cost the loop what it has yet to log at the same step. Of two saves
    that end within one row the later one is seen.
    """
    axis = f"{prefix}step"
    run.define_metric(axis, hidden=True)
    run.define_metric(f"{prefix}*", step_metric=axis)
    return lambda values, step: run.log({**values, axis: step}, commit=False)
