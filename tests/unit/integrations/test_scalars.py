"""What saves cost, as loggers of several kinds are given it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ckptkit.core.errors import UsageError
from ckptkit.integrations.scalars import scalars
from ckptkit.training import Checkpointer
from ckptkit.training.handle import SaveReport

NAMES = ["blocked_ms", "committed_s", "copy_GB_per_s", "durable_s", "size_GB", "write_GB_per_s"]
REPORT = SaveReport(
    step=7,
    path=Path("runs/a/checkpoint-7"),
    size_bytes=1_000_000_000,
    total_bytes=2_000_000_000,
    blocked_seconds=0.25,
    bytes_per_second=4e9,
    copy_limit_share=0.5,
    durable_seconds=2.0,
    committed_seconds=2.5,
    writer_cpu_seconds=0.1,
)
VALUES = {
    "ckptkit/blocked_ms": 250.0,
    "ckptkit/committed_s": 2.5,
    "ckptkit/copy_GB_per_s": 4.0,
    "ckptkit/durable_s": 2.0,
    "ckptkit/size_GB": 2.0,
    "ckptkit/write_GB_per_s": 0.5,
}


class Logger:
    """Keeps what it is given, as loggers with `log` do."""

    def __init__(self) -> None:
        self.logged: list[tuple[Mapping[str, float], dict[str, Any]]] = []

    def log(self, values: Mapping[str, float], **options: Any) -> None:
        self.logged.append((values, options))


class WandbRun(Logger):
    """Knows metrics with an axis of their own, as a run of wandb does."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, str | None] = {}

    def define_metric(
        self, name: str, *, step_metric: str | None = None, hidden: bool = False
    ) -> None:
        assert hidden == (step_metric is None)
        self.axes[name] = step_metric


class LightningLogger:
    """Has `log_metrics`, as loggers of Lightning do."""

    def __init__(self) -> None:
        self.logged: list[tuple[Mapping[str, float], int]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((metrics, step))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SummaryWriter]:
    with SummaryWriter(str(tmp_path / "logs")) as opened:
        yield opened


def test_every_save_of_a_checkpointer_is_found_in_the_event_files_of_tensorboard(
    tmp_path: Path, writer: SummaryWriter
) -> None:
    model = torch.nn.Linear(64, 64)
    with Checkpointer(tmp_path / "run", listener=scalars(writer)) as checkpointer:
        reports = [checkpointer.save(step, {"model": model}).report(60) for step in (10, 20)]
    writer.close()
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert sorted(events.Tags()["scalars"]) == [f"ckptkit/{name}" for name in NAMES]
    expected = {
        "blocked_ms": [report.blocked_seconds * 1e3 for report in reports],
        "committed_s": [report.committed_seconds for report in reports],
        "size_GB": [report.total_bytes / 1e9 for report in reports],
    }
    for name, values in expected.items():
        found = events.Scalars(f"ckptkit/{name}")
        assert [event.step for event in found] == [10, 20]
        assert [event.value for event in found] == pytest.approx(values, rel=1e-6)


def test_numbers_are_in_the_units_that_their_names_tell() -> None:
    logger = Logger()
    listen = scalars(logger)
    assert listen is not None
    listen(REPORT)
    assert logger.logged == [(VALUES, {"step": 7})]


def test_loggers_of_lightning_are_given_the_step_too() -> None:
    logger = LightningLogger()
    listen = scalars(logger)
    assert listen is not None
    listen(REPORT)
    assert logger.logged == [(VALUES, 7)]


def test_wandb_gets_an_axis_of_its_own_since_it_drops_steps_that_have_passed() -> None:
    run = WandbRun()
    listen = scalars(run, prefix="saves/")
    assert listen is not None
    listen(REPORT)
    assert run.axes == {"saves/step": None, "saves/*": "saves/step"}
    ((values, options),) = run.logged
    assert options == {"commit": False}
    assert values["saves/step"] == 7
    assert values["saves/blocked_ms"] == 250.0


def test_a_rank_without_a_writer_has_no_listener() -> None:
    assert scalars(None) is None


class Trainer:
    """Has a `log` that takes no step, as the Trainer of Transformers does."""

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        raise AssertionError(logs, start_time)


@pytest.mark.parametrize(("writer", "kind"), [("logs", "a str"), (Trainer(), "a Trainer")])
def test_what_cannot_log_at_a_step_is_refused_by_its_kind(writer: object, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"found {kind}, expected an object with add_scalar"):
        scalars(writer)
