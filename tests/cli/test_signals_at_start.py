"""Signals while the command starts: one line, and the exit status that a shell expects."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
# What a console script does, and what `python -m` does. The pipe tells when the first import begins
# that takes time; what ends the interpreter before is told by the interpreter.
ANNOUNCED = """
import os, sys
def watch(event, arguments):
    if event == "import" and arguments[0] == "ckptkit_cli._program":
        os.write(1, b"x")
sys.addaudithook(watch)
"""
SCRIPT = f"{ANNOUNCED}\nfrom ckptkit_cli.main import main; sys.exit(main())"
MODULE = f"{ANNOUNCED}\nimport runpy; runpy.run_module('ckptkit_cli', run_name='__main__')"
TOLD = {
    signal.SIGINT: (130, "interrupted: stopped by SIGINT\n"),
    signal.SIGTERM: (143, "terminated: stopped by SIGTERM\n"),
    signal.SIGHUP: (129, "terminated: stopped by SIGHUP\n"),
}
# Milliseconds from the first instruction on, up to well into the command.
DELAYS = [0, 1, 2, 4, 7, 10, 15, 20, 30, 40, 55, 70, 90, 120, 150, 190, 240, 300, 400]


def signalled(program: str, number: signal.Signals, delay: float) -> tuple[int, str, str]:
    """Returns the status, what was written to stdout, and to stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "inspect", str(LLAMA)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == "x"
    time.sleep(delay)
    process.send_signal(number)
    output, told = process.communicate(timeout=60)
    return process.returncode, output, told


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True)


@cache
def whole_output() -> str:
    command = [sys.executable, "-m", "ckptkit_cli", "inspect", str(LLAMA)]
    return subprocess.run(
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("program", [SCRIPT, MODULE], ids=["script", "module"])
@pytest.mark.parametrize("number", TOLD, ids=lambda number: number.name)
@pytest.mark.quick("SIGTERM-script", "SIGHUP-module")
def test_a_signal_at_any_time_of_the_start_is_told_in_one_line(
    number: signal.Signals, program: str
) -> None:
    ended = set()
    delays = DELAYS if (number, program) == (signal.SIGINT, SCRIPT) else DELAYS[::5]
    for delay in delays:
        status, output, told = signalled(program, number, delay / 1000)
        ended.add(status)
        if status == -number:  # the command had ended; Python handles no signals while it ends
            assert (output, told) == (whole_output(), ""), f"after {delay} ms"
        elif status:
            assert (status, told) == TOLD[number], f"after {delay} ms"
    assert TOLD[number][0] in ended


def test_a_signal_while_a_class_is_made_is_shown_as_any_other() -> None:
    """Python 3.11 makes a `RuntimeError` of what `__set_name__` raises."""
    done = run_program("""
import os, signal, sys
from ckptkit_cli import _program
class Field:
    def __set_name__(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)
def make():
    class Made:
        field = Field()
_program.Program = make
sys.exit(_program.run_application(["inspect"]))
""")
    status, message = TOLD[signal.SIGTERM]
    assert done.returncode == status
    assert done.stderr == message


@pytest.mark.parametrize("start", ["script", "module"])
@pytest.mark.quick("script")
def test_an_interrupt_from_the_first_moment_on_shows_no_line_of_ours(start: str) -> None:
    """Until our first instruction Python itself ends, with what it says of its own imports."""
    script = [str(Path(sys.executable).with_name("ckptkit"))]
    command = script if start == "script" else [sys.executable, "-m", "ckptkit_cli"]
    ended = set()
    for delay in (5, 15, 25, 35, 50, 80, 150, 300):
        process = subprocess.Popen(
            [*command, "inspect", str(LLAMA)],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(delay / 1000)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        ended.add(process.returncode)
        assert not re.search(r"ckptkit_cli\W_[a-z]|ckptkit\Wcore", told), f"{delay} ms: {told}"
        if process.returncode not in {-signal.SIGINT, 1}:  # Python's own ends
            assert (process.returncode, told) in {TOLD[signal.SIGINT], (0, "")}, f"{delay} ms"
    assert 130 in ended


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    program = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SCRIPT}"
    assert signalled(program, signal.SIGINT, 0.02)[0] == 0


def test_the_first_module_imports_next_to_nothing() -> None:
    done = run_program(
        "import sys; before = set(sys.modules); import ckptkit_cli.main;"
        "print(*sorted(set(sys.modules) - before))"
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"__future__", "ckptkit_cli", "ckptkit_cli.main"}
