"""Progress as the library shows it: lines of a log, a terminal, and every call with `progress`."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
import ckptkit.training
from ckptkit.engine.outcome import BytesWritten, Event, Started, Waiting
from ckptkit.engine.progress import ProgressBar, ProgressLog, Stage
from tests.sampled import sampled

ROOT = Path(__file__).parents[3]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
ADAPTER = ROOT / "fixtures" / "peft_fsdp2" / "checkpoint"
LIMIT_SECONDS = 60


def test_lines_say_what_how_much_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    log, stage = ProgressLog(), Stage("verify", 10_000)
    told = {}
    for second in range(1, 35):
        now = 1e9 + second
        stage.add(100 if second < 14 else 50)
        if line := log.line(stage):
            told[second] = line
    assert told == {
        2: "verify: 200B of 10.0kB (2%), 100B/s, 01:38 left",
        12: "verify: 1.20kB of 10.0kB (12%), 100B/s, 01:28 left",
        22: "verify: 1.75kB of 10.0kB (18%), 55.0B/s, 02:30 left",
        32: "verify: 2.25kB of 10.0kB (22%), 50.0B/s, 02:35 left",
    }
    now += 10
    assert log.line(Stage("verify: waiting until it is compared", None)) == (
        "verify: waiting until it is compared, 00:00"
    )


def test_a_text_from_outside_cannot_change_the_terminal() -> None:
    assert Stage("verify \x1b[2J\n", 1).text == r"verify \x1b[2J\n"


def test_files_are_counted_when_they_are_complete() -> None:
    stage = Stage("push", 30, [("a", 10), ("b", 20)])
    stage.add(10, "b")
    assert stage.remark == "0 of 2 files"
    stage.add(10, "a")
    assert stage.remark == "1 of 2 files"
    stage.add(10, "b")
    assert (stage.remark, stage.done_bytes) == ("2 of 2 files", 30)


def test_a_bar_that_is_closed_stays_closed(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("job") as bar:
        bar.listen(Started(10))
        bar.listen(BytesWritten(5))
    bar.listen(Waiting("it is compared"))
    names = {thread.name for thread in threading.enumerate()}
    assert "ckptkit-progress" not in names
    assert capsys.readouterr().err == ""


def run_script(text: str, *, errors: int) -> None:
    """Runs a script whose stderr is a file that is open."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": paths, "TERM": "xterm", "LC_ALL": "C.UTF-8"},
        stderr=errors,
        timeout=LIMIT_SECONDS,
        check=True,
    )


SLOW_CALL = "import ckptkit; ckptkit.consolidate({!r}, {!r}, names='live', bandwidth='{}', **{})"


def test_a_call_shows_a_bar_in_a_terminal_and_takes_it_off(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    text = SLOW_CALL.format(str(LLAMA), str(tmp_path / "out"), "12KB", {"progress": True})
    run_script(text, errors=theirs)
    os.set_blocking(ours, False)
    sent = os.read(ours, 65536).decode()
    os.close(theirs)
    os.close(ours)
    assert re.search(r"\rconsolidate: +\d+%\|.*\| [\d.]+k/16\.\dk \[", sent)
    assert re.search(r"\r +\r$", sent)


@pytest.mark.parametrize("progress", sampled([True, False], [True]))
def test_a_call_writes_lines_into_a_log_if_it_is_asked_to(tmp_path: Path, progress: bool) -> None:
    text = SLOW_CALL.format(str(LLAMA), str(tmp_path / "out"), "12KB", {"progress": progress})
    with (tmp_path / "log").open("w") as log:
        run_script(text, errors=log.fileno())
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == progress
    assert not progress or re.match(r"consolidate: [\d.]+kB of 16\.\dkB \(\d+%\), ", lines[0])


class Heard:
    """A listener of a user, which notes whether progress is shown beside it."""

    def __init__(self) -> None:
        self.sizes = [0, 0]
        self.shown: set[bool] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self.sizes[0] += event.total_bytes
        if isinstance(event, BytesWritten):
            self.sizes[1] += event.size_bytes
            names = {thread.name for thread in threading.enumerate()}
            self.shown.add("ckptkit-progress" in names)


def _load_into(out: Path, **options: Any) -> None:
    model = torch.nn.Linear(4, 3)
    torch.save(model.state_dict(), out.with_suffix(".pt"))
    ckptkit.training.load_into(torch.nn.Linear(4, 3), out.with_suffix(".pt"), **options)


def _apply_delta(out: Path, **options: Any) -> None:
    ckptkit.consolidate(LLAMA, out / "a", names="live", dtype="float32")
    ckptkit.create_delta(LLAMA, LLAMA, out / "d", names="live")
    ckptkit.apply_delta(LLAMA, out / "d", out / "b", names="live", **options)


def _average(out: Path, **options: Any) -> None:
    ckptkit.consolidate(LLAMA, out / "a", names="live")
    ckptkit.average([LLAMA, out / "a"], out / "b", names="live", **options)


def _prune(out: Path, **options: Any) -> None:
    for step in (1, 2):
        shutil.copytree(LLAMA, out / f"checkpoint-{step}")
    assert len(ckptkit.prune(out, keep_last=1, **options).removed) == 1


CALLS: dict[str, Callable[..., object]] = {
    "consolidate": lambda out, **how: ckptkit.consolidate(LLAMA, out, names="live", **how),
    "convert": lambda out, **how: ckptkit.convert(LLAMA, out, to="dcp", names="live", **how),
    "verify": lambda _, **how: ckptkit.verify(LLAMA, **how),
    "diff": lambda _, **how: ckptkit.diff(LLAMA, LLAMA, **how),
    "stats": lambda _, **how: ckptkit.stats(LLAMA, **how),
    "average": _average,
    "create_delta": lambda out, **how: ckptkit.create_delta(LLAMA, LLAMA, out, names="live", **how),
    "apply_delta": _apply_delta,
    "extract_adapter": lambda out, **how: ckptkit.extract_adapter(
        ADAPTER, out, lora_alpha=16, use_rslora=False, **how
    ),
    "load_into": _load_into,
    "prune": _prune,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("progress", sampled([True, False], [True]))
def test_a_call_shows_progress_beside_the_listener_of_its_user(
    tmp_path: Path, name: str, progress: bool
) -> None:
    heard = Heard()
    CALLS[name](tmp_path / "out", listener=heard, progress=progress)
    assert heard.shown == {progress}
    assert heard.sizes[0] == heard.sizes[1] > 0
    assert "ckptkit-progress" not in {thread.name for thread in threading.enumerate()}
