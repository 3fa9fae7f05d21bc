"""Events as lines: progress once a second, whatever the number of blocks, and at each end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptkit.engine.outcome import (
    BytesWritten,
    OutputCommitted,
    OutputKept,
    Planned,
    Started,
    Waiting,
)
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress
from ckptkit_cli.ls import age_text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def events_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Returns the events of stderr without their times."""
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


def test_progress_is_told_once_a_second_and_when_a_stage_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Progress(Output(events=True), "label", clock) as progress:
        progress.listen(Planned(("a note",)))
        progress.listen(Started(1000))
        for _ in range(100):
            clock.now += 0.0625
            progress.listen(BytesWritten(10))
        progress.listen(Waiting("it is compared"))
        progress.listen(OutputCommitted("out"))
    planned, started, *counts, waiting, committed = events_of(capsys)
    assert planned == {"event": "planned", "notes": ["a note"]}
    assert started == {"event": "started", "total_bytes": 1000}
    assert [event["done_bytes"] for event in counts] == [160, 320, 480, 640, 800, 960, 1000]
    assert waiting == {"event": "waiting", "message": "it is compared"}
    assert committed == {"event": "committed", "path": "out"}


@pytest.mark.parametrize(
    ("events", "lines"),
    [(True, ["planned", "warning"]), (False, ["warning: a note", "warning: another"])],
)
def test_a_note_is_told_once(
    capsys: pytest.CaptureFixture[str], *, events: bool, lines: list[str]
) -> None:
    with Progress(Output(events=events), "label") as progress:
        progress.listen(Planned(("a note",)))
    progress.warn(["a note", "another"])
    written = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] if events else line for line in written] == lines


def test_stages_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(Output(events=True), "label") as progress:
        for total in (7, 9):
            progress.listen(Started(total))
            progress.listen(BytesWritten(total))
        progress.listen(OutputKept("out"))
    assert progress.kept
    assert [(event["event"], event.get("done_bytes")) for event in events_of(capsys)] == [
        *[("started", None), ("progress", 7)],
        *[("started", None), ("progress", 9)],
        ("kept", None),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (1e6, "11 d")],
)
def test_an_age_reads_at_a_glance(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
