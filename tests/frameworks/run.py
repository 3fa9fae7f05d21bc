"""Trains with unmodified frameworks under `ckptkit.run`, and kills and resumes that training.

    PYTHONPATH=fixtures python -m tests.frameworks.run NAME...|all

`make test-frameworks FRAMEWORK=NAME` runs it. A framework is a file `NAME.toml` beside this:

title, tried:  what docs/reference/integrations.md says
python, requirements:  the environment, as in fixtures/environments.toml
prepare:       a command that writes what training reads into {inputs}; may be left out
settings:      environment variables; may be left out
[cases.CASE]
command:       the framework's own, which trains from the newest step on if there is one. It has
               {run} before the script, or before its `-m`: nothing, or `-m ckptkit.run`. {here} is
               this folder, {folder} the one of the run, {inputs} what was prepared
steps:         a pattern of the folders of steps, below {folder}

Each case trains to its end without ckptkit; again through ckptkit, where all its processes are
killed in a save; and once more the same command, to the end. Every step of ckptkit passes `verify`,
torch itself loads the last one, and its tensors equal those of the run without ckptkit.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments import build
from generate import SETTINGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 900
TRIES = 5  # to kill in a save, which may be over before it is seen
MARK = "TESTED_BY"
STAGED = ".*.ckptkit-*"
MANIFEST = "ckptkit.json"
TELLS = "go through ckptkit"


class FailedError(Exception):
    """What is not as it should be."""


class Job:
    """The commands of one framework, in its environment."""

    def __init__(self, programs: Path, row: dict[str, Any], inputs: Path) -> None:
        self._programs = programs
        self._names = {"here": HERE, "inputs": inputs}
        self.mark = uuid.uuid4().hex
        self._environment = {
            **os.environ,
            **SETTINGS,
            **{n: v.format(**self._names) for n, v in row.get("settings", {}).items()},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
            "PYTHONDONTWRITEBYTECODE": "",
            MARK: self.mark,
        }

    def start(self, command: str, log: Path, **names: object) -> subprocess.Popen[str]:
        words = shlex.split(command.format(**self._names, **names))
        words[0] = str(self._programs / words[0])
        with log.open("a") as output:
            return subprocess.Popen(
                words,
                cwd=log.parent,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, command: str, log: Path, **names: object) -> str:
        """Returns what a command, which has to succeed, has written to a log."""
        process = self.start(command, log, **names)
        try:
            status: int | str = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            status = f"no end within {LIMIT_SECONDS} s"
        text = log.read_text()
        if status:
            raise FailedError(
                f"{command.format(**self._names, **names)}: {status}\n{text[-6_000:]}"
            )
        return text

    def kill(self) -> None:
        """Kills all processes of the job at once, ranks that have a session of their own too."""
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
            except (PermissionError, ProcessLookupError, FileNotFoundError):
                continue  # of another user, or it has ended


def killed_in_a_save(job: Job, case: dict[str, Any], folder: Path, log: Path) -> list[Path]:
    """Kills training in a save after the first; returns the steps, or none if it was too late."""
    process = job.start(case["command"], log, run="-m ckptkit.run", folder=folder)
    until = time.monotonic() + LIMIT_SECONDS
    try:
        while process.poll() is None and time.monotonic() < until:
            complete = steps(folder, case)
            staged = [path for path in below(folder, STAGED) if not of_a_step(path, complete)]
            if complete and staged:
                job.kill()
                process.wait()
                in_a_save = staged[0].exists() and steps(folder, case) == complete
                return complete if in_a_save else []
            time.sleep(0.001)
    finally:
        job.kill()
    if process.wait():
        raise FailedError(f"training ended by itself, or did not end\n{tail(log)}")
    return []


def below(folder: Path, pattern: str) -> Iterator[Path]:
    """As `Path.rglob`, which raises where a folder is renamed meanwhile; not in staged folders."""
    for at, folders, files in os.walk(folder):
        yield from (Path(at, name) for name in fnmatch.filter([*folders, *files], pattern))
        folders[:] = [name for name in folders if not fnmatch.fnmatch(name, STAGED)]


def of_a_step(staged: Path, complete: list[Path]) -> bool:
    """Whether it is of a step that torch has found complete: it gets its manifest last."""
    final = staged.with_name(staged.name[1:].partition(STAGED[2:-1])[0])
    return not {*complete}.isdisjoint((final, *final.parents))


def steps(folder: Path, case: dict[str, Any]) -> list[Path]:
    """Returns the steps, in the order in which they were saved."""
    found = {step: parts(step) for step in folder.glob(case["steps"])}
    return sorted(
        (step for step in found if found[step]),
        key=lambda step: max((part / ".metadata").stat().st_mtime_ns for part in found[step]),
    )


def parts(step: Path) -> list[Path]:
    """Returns the folders of a step that were saved each by one call."""
    return [path.parent for path in below(step, ".metadata")]


def tail(log: Path) -> str:
    return log.read_text()[-6_000:]


def try_out(job: Job, case: dict[str, Any], work: Path) -> str:
    """Returns what was shown; raises `FailedError`."""
    (plain := work / "plain").mkdir(parents=True)
    job.run(case["command"], work / "plain.log", run="", folder=plain)
    folder, log = plain, work / "killed.log"
    kept: list[Path] = []
    for number in range(TRIES):
        if not kept:
            (folder := work / f"killed-{number}").mkdir()
            kept = killed_in_a_save(job, case, folder, log)
    if not kept:
        raise FailedError(f"no save was seen in {TRIES} runs\n{tail(log)}")
    saved = {part / MANIFEST: (part / MANIFEST).stat().st_ino for s in kept for part in parts(s)}
    listing = "python -m ckptkit_cli ls {parent}"
    job.run(listing, work / "ls.log", parent=kept[0].parent)
    log = work / "resumed.log"
    if job.run(case["command"], log, run="-m ckptkit.run", folder=folder).count(TELLS) != 1:
        raise FailedError(f"the log does not say once that saves {TELLS}\n{tail(log)}")
    for path, inode in saved.items():
        if path.exists() and path.stat().st_ino != inode:
            raise FailedError(f"{path} was saved again: training began anew\n{tail(log)}")
    for step in steps(folder, case):
        if left := [*step.parent.glob(f".{step.name}{STAGED[2:]}")]:
            raise FailedError(f"{left[0]} is left of the kill, where {step} was saved since")
        for part in parts(step):
            if not (part / MANIFEST).exists():
                raise FailedError(f"torch itself saved {part}\n{tail(log)}")
            job.run("python -m ckptkit_cli verify {part}", work / "verify.log", part=part)
    job.run(listing, work / "ls.log", parent=kept[0].parent)
    ours, stock = steps(folder, case)[-1], steps(plain, case)[-1]
    if ours.name != stock.name:
        raise FailedError(f"the last step is {ours.name}, without ckptkit {stock.name}")
    equal = job.run("python {here}/equal.py {ours} {stock}", log, ours=ours, stock=stock)
    return f"killed after {kept[-1].name}, resumed to {ours.name}, {equal.splitlines()[-1]}"


def main(arguments: list[str]) -> int:
    """Returns 0 if all that was asked for has passed."""
    rows = {path.stem: tomllib.loads(path.read_text()) for path in sorted(HERE.glob("*.toml"))}
    if unknown := {*arguments} - {*rows, "all"}:
        print(f"no framework is called {', '.join(sorted(unknown))}: there are {', '.join(rows)}")
        return 2
    ended: dict[str, str] = {}
    for name in rows if "all" in arguments else arguments:
        row = rows[name]
        # ckptkit itself is taken from this checkout, and what it needs goes in with the framework.
        needed = [*row["requirements"], "--requirement", str(ROOT / "pyproject.toml")]
        programs = build(name, row | {"requirements": needed})
        with tempfile.TemporaryDirectory(prefix="ckptkit-frameworks-") as text:
            work = Path(text)
            (inputs := work / "inputs").mkdir()
            job = Job(programs, row, inputs)
            for case, commands in row["cases"].items():
                try:
                    if "prepare" in row and not [*inputs.iterdir()]:
                        job.run(row["prepare"], work / "prepare.log")
                    ended[f"{name} {case}"] = try_out(job, commands, work / case)
                except FailedError as failed:
                    ended[f"{name} {case}"] = f"FAILED: {failed}"
                print(f"{name} {case}: {ended[f'{name} {case}']}", flush=True)
    return 1 if any(text.startswith("FAILED") for text in ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
