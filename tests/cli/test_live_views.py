"""What a terminal shows while a command works, and how it is left."""

from __future__ import annotations

import fcntl
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

from ckptkit.engine.outcome import BytesWritten, Started, Waiting
from ckptkit_cli._output import Output
from ckptkit_cli.views import progress as progress_view
from ckptkit_cli.views.live_lines import Pace, bar_text, duration_text
from ckptkit_cli.views.progress import Progress

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
MOVE = re.compile(r"\x1b\[(\d*)([AJK])|\x1b\[[\d;]*m")
LIMIT_SECONDS = 30


class Screen:
    """A terminal with a command in it: what it was sent, and what it shows."""

    def __init__(self, columns: int, *words: str | Path) -> None:
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit_cli", *map(str, words)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONPATH": paths},
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
        drawn = [part for part in re.split(r"[\r\n]+", self.sent) if "\x1b[K" in part]
        return max(len(MOVE.sub("", part)) for part in drawn)


@pytest.mark.parametrize("columns", [40, 140])
def test_files_are_shown_while_they_are_written_and_nothing_is_left(
    tmp_path: Path, columns: int
) -> None:
    words = ("--names", "live", "--max-shard-size", "2KB")
    with Screen(columns, "consolidate", LLAMA, tmp_path / "out", *words) as screen:
        assert screen.finish() == 0, screen.sent
    assert re.search(r"consolidate: \d+% of [\d.]+ [KM]?B, [\d.]+ [KMG]?B/s", screen.sent)
    assert re.search(r"0 of \d+ files done", screen.sent)
    assert screen.widest() < columns
    left = "\n".join(screen.shown())
    assert "wrote" in left
    assert "files done" not in left
    assert "B/s, " not in left


def test_an_interrupted_command_leaves_a_clean_terminal(tmp_path: Path) -> None:
    limit = ("--bandwidth", "1KB", "--max-shard-size", "2KB", "--names", "live")
    with Screen(80, "consolidate", LLAMA, tmp_path / "out", *limit) as screen:
        screen.wait_for("files done")
        screen.interrupt()
        assert screen.finish() == 130
    assert screen.shown() == ["interrupted: stopped by SIGINT"]
    assert not (tmp_path / "out").exists()


def test_a_watch_shows_what_it_does_and_what_is_done(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.full(9, step, np.float32)}, folder / "model.safetensors")
        os.utime(folder / "model.safetensors", (1e9, 1e9))  # nothing writes to it any more
    into = ("--into", tmp_path / "versions", "--weights-only", "--interval", "600")
    with Screen(80, "watch", tmp_path / "run", *into) as screen:
        screen.wait_for("2 pushed, the last was step 2")
        screen.interrupt()
        assert screen.finish() == 130
    assert "  now     looking for new steps" in screen.sent
    assert screen.widest() < 80
    left = screen.shown()
    assert left[-1] == "interrupted: stopped by SIGINT"
    assert not [row for row in left if row.startswith(("  now", "  done", "  waiting"))]


def test_a_log_gets_plain_lines_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(output: Output) -> str:
        with Progress(output, "consolidate") as progress:
            progress.listen(Started(1000, (("a", 400), ("b", 600))))
            for _ in range(10):
                progress.listen(BytesWritten(50, "a"))
            progress.listen(Waiting("it is compared"))
        return capsys.readouterr().err

    assert show(Output()) == ""  # it was quick
    monkeypatch.setattr(progress_view, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress_view, "_LOG_SECONDS", 0.0)
    lines = show(Output()).splitlines()
    assert lines[-2].startswith("consolidate: 50% of 1.00 KB, ")
    assert lines[-1] == "consolidate: waiting until it is compared, 0 s"
    assert "\x1b" not in "".join(lines)
    assert show(Output(quiet=True)) == ""
    assert show(Output(as_json=True)) == ""


def test_the_pace_is_that_of_the_last_seconds() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    pace.begin(10_000)
    assert pace.seconds_left is None
    for _ in range(100):
        now += 1
        pace.add(10)
    assert pace.bytes_per_second == pytest.approx(10, rel=0.1)
    for _ in range(20):
        now += 1
        pace.add(100)
    assert pace.bytes_per_second == pytest.approx(100, rel=0.1)
    assert pace.seconds_left == pytest.approx(7000 / 100, rel=0.1)
    now += 60  # nothing moves
    assert pace.bytes_per_second < 25
    assert pace.share == pytest.approx(0.3)


def test_durations_and_bars_read_at_a_glance() -> None:
    assert [duration_text(seconds) for seconds in (0, 59.4, 60, 3599, 3600, 1e6)] == [
        *("0 s", "59 s", "1 min 0 s"),
        *("59 min 59 s", "1 h 0 min", "11 d 13 h"),
    ]
    assert [bar_text(share, 6) for share in (-1, 0.5, 2)] == ["[....]", "[##..]", "[####]"]
