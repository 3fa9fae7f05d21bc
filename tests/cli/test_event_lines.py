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
from ckptkit_cli._progress import EventLines, Progress
from ckptkit_cli.ls import age_text


class Heard:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.events = EventLines(self.emit, lambda: self.now)

    def emit(self, name: str, /, **facts: Any) -> None:
        self.lines.append((name, facts))

    def progress(self) -> list[int]:
        return [facts["done_bytes"] for name, facts in self.lines if name == "progress"]


def test_progress_is_told_once_a_second_and_when_a_stage_ends() -> None:
    heard = Heard()
    heard.events.listen(Planned(("a note",)))
    heard.events.listen(Started(1000))
    for _ in range(100):
        heard.now += 0.0625
        heard.events.listen(BytesWritten(10))
    assert heard.progress() == [160, 320, 480, 640, 800, 960]
    heard.events.listen(Waiting("it is compared"))
    assert heard.progress()[-1] == 1000
    assert heard.lines[-1] == ("waiting", {"message": "it is compared"})
    heard.events.listen(OutputCommitted("out"))
    assert heard.lines[0] == ("planned", {"notes": ["a note"]})
    assert heard.lines[-1] == ("committed", {"path": "out"})


@pytest.mark.parametrize(
    ("events", "told"),
    [(True, ["planned", "warning"]), (False, ["warning: a note", "warning: another"])],
)
def test_a_note_is_told_once(
    capsys: pytest.CaptureFixture[str], *, events: bool, told: list[str]
) -> None:
    with Progress(Output(events=events), "label") as progress:
        progress.listen(Planned(("a note",)))
    progress.warn(["a note", "another"])
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] if events else line for line in lines] == told


def test_stages_are_counted_apart() -> None:
    heard = Heard()
    for total in (7, 9):
        heard.events.listen(Started(total))
        heard.events.listen(BytesWritten(total))
    heard.events.listen(OutputKept("out"))
    told = [(name, facts.get("done_bytes")) for name, facts in heard.lines]
    assert told == [
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
