"""What a terminal shows while a command works, and how it is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.engine.outcome import BytesWritten, Started
from ckptkit.hub.watch.watch import WatchEvent
from ckptkit_cli._output import Output
from ckptkit_cli.watch import WatchPage

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
MOVE = re.compile(r"\x1b\[(\d*)([AJK])|\x1b\[[\d;]*m")
LIMIT_SECONDS = 60
SLOWLY = ("--names", "live", "--max-shard-size", "2KB", "--bandwidth", "20KB")


class Screen:
    """A terminal with a command in it: what it was sent, and what it shows."""

    def __init__(self, columns: int, *words: str | Path, env: dict[str, str] | None = None) -> None:
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit_cli", *map(str, words)],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "LC_ALL": "C.UTF-8"}
            | (env or {}),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        self.sent = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()  # nothing, once it has ended
        self._process.wait(LIMIT_SECONDS)
        self._reading.join(LIMIT_SECONDS)
        os.close(self._terminal)

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 65536):
                self.sent += data.decode(errors="replace")
        except OSError:  # the command has ended
            pass

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while text not in self.sent:
            assert time.monotonic() < end, self.sent
            time.sleep(0.02)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        status = self._process.wait(LIMIT_SECONDS)
        self._reading.join(LIMIT_SECONDS)
        return status

    def shown(self) -> list[str]:
        """Returns the rows that are left, as a terminal would have them."""
        rows, y, x, at = [""], 0, 0, 0
        while at < len(self.sent):
            move = MOVE.match(self.sent, at)
            if move is not None:
                at = move.end()
                count = int(move[1] or 1) if move[2] else 0
                y -= count if move[2] == "A" else 0
                if move[2] in {"J", "K"}:
                    rows[y] = rows[y][:x]
                if move[2] == "J":
                    del rows[y + 1 :]
                continue
            character = self.sent[at]
            at += 1
            if character == "\r":
                x = 0
            elif character == "\n":
                y += 1
                rows += [""] * (y + 1 - len(rows))
            else:
                rows[y] = rows[y][:x].ljust(x) + character + rows[y][x + 1 :]
                x += 1
        return [row.rstrip() for row in rows if row.strip()]

    def widest(self) -> int:
        """Returns the width of the widest line that was drawn again and again."""
        drawn = re.findall(r"\r([^\r\n]+)(?=\r(?!\n))", self.sent)
        return max(len(MOVE.sub("", part)) for part in drawn)


@pytest.mark.parametrize("columns", [40, 140])
@pytest.mark.quick("40")
def test_a_bar_of_tqdm_is_shown_and_nothing_of_it_is_left(tmp_path: Path, columns: int) -> None:
    with Screen(columns, "consolidate", LLAMA, tmp_path / "out", *SLOWLY) as screen:
        assert screen.finish() == 0, screen.sent
    rate = r"consolidate: +\d+%\|.*\| [\d.]+k/37\.6k \["
    assert re.search(rate, screen.sent)
    assert bool(re.search(r"[\d.]+[kM]?B/s, \d+ of 12 files\]", screen.sent)) is (columns == 140)
    assert screen.widest() < columns
    left = screen.shown()
    assert left[0].startswith("warning: names and shapes are not compared")
    assert "wrote" in "\n".join(left)
    assert "B/s, " not in "\n".join(left)


@pytest.mark.slow
def test_a_terminal_that_cannot_draw_gets_lines_as_a_log_does(tmp_path: Path) -> None:
    words = ("consolidate", LLAMA, tmp_path / "out", *SLOWLY[:-1], "12KB")
    with Screen(80, *words, env={"TERM": "dumb"}) as screen:
        assert screen.finish() == 0
    assert re.search(r"^consolidate: [\d.]+kB of 37\.6kB", screen.sent, re.MULTILINE)
    assert "\x1b" not in screen.sent
    assert "|" not in screen.sent


@pytest.mark.parametrize("more", [(), ("--resume",)])
@pytest.mark.quick("more1")
def test_an_interrupted_command_leaves_a_clean_terminal(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """With `--resume`, a warning says in the middle of the end which files stay."""
    words = (*SLOWLY[:-1], "1KB", *more)
    with Screen(100, "consolidate", LLAMA, tmp_path / "out", *words) as screen:
        screen.wait_for("of 12 files")
        screen.interrupt()
        assert screen.finish() == 130
    *warnings, last = screen.shown()
    assert last == "interrupted: stopped by SIGINT"
    assert all(row.startswith("warning: ") for row in warnings), warnings
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_watch_shows_what_it_does_and_what_is_done(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.full(9, step, np.float32)}, folder / "model.safetensors")
        os.utime(folder / "model.safetensors", (1e9, 1e9))  # nothing writes to it any more
    into = ("--into", tmp_path / "versions", "--weights-only", "--interval", "600")
    with Screen(80, "watch", tmp_path / "run", *into) as screen:
        screen.wait_for("looking for new steps; 2 pushed, the last was step 2, 00:0")
        screen.interrupt()
        assert screen.finish() == 130
    assert screen.widest() < 80
    left = screen.shown()
    assert left[-1] == "interrupted: stopped by SIGINT"
    assert not [row for row in left if "looking for" in row]
    assert [row for row in left if "step 2: pushed as" in row]


def test_a_watch_says_in_a_log_and_to_programs_how_far_a_build_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages = [WatchPage(Output(), as_json=as_json) for as_json in (False, True)]
    quiet = WatchPage(Output(quiet=True), as_json=False)
    for page in (*pages, quiet):
        page.listen(WatchEvent("building", 5, {"waiting": 3}))
        page.progress(Started(1000))
        page.progress(BytesWritten(250))
    time.sleep(2.6)
    for page in (*pages, quiet):
        page.listen(WatchEvent("stopped"))
    printed = capsys.readouterr()
    line = r"building step 5, 2 steps waiting: 250B of 1\.00kB \(25%\), [\d.]+B/s, \d\d:\d\d left"
    assert re.fullmatch(line + r"\n", printed.err)
    events = [json.loads(text) for text in printed.out.splitlines() if text.startswith("{")]
    assert [event["event"] for event in events] == ["building", "progress", "stopped"]
    assert events[1]["step"] == 5
    assert re.fullmatch(line, events[1]["message"])


def log_of(folder: Path, *words: str | Path) -> list[tuple[float, str]]:
    """Returns the lines that a command writes to its log, each with its second."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ckptkit_cli", *map(str, words)]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stderr is not None
        lines = [(time.monotonic() - began, line.rstrip("\n")) for line in process.stderr]
    assert process.returncode == 0, lines
    return [(second, line) for second, line in lines if not line.startswith(("warning", "note"))]


@pytest.mark.slow
def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten(tmp_path: Path) -> None:
    words = ("consolidate", LLAMA, tmp_path / "out", *SLOWLY[:-1], "2.5KB")
    lines = log_of(tmp_path, *words)
    assert len(lines) >= 2
    for _, line in lines:
        assert re.fullmatch(
            r"consolidate: [\d.]+k?B of 37\.6kB \(\d+%\), [\d.]+k?B/s, \d\d:\d\d left", line
        ), line
    assert 2 <= lines[0][0] < 8  # with the start of Python
    assert lines[1][0] - lines[0][0] == pytest.approx(10, abs=1.5)


@pytest.mark.parametrize("option", [(), ("--quiet",), ("--json",)])
@pytest.mark.quick(1)
def test_a_log_of_a_quick_or_quiet_command_has_no_progress(
    tmp_path: Path, option: tuple[str, ...]
) -> None:
    slowly = SLOWLY[:-1] if option else SLOWLY[:2]
    words = [*slowly, "12KB"] if option else [*slowly]
    assert not log_of(tmp_path, "consolidate", LLAMA, tmp_path / "out", *words, *option)
