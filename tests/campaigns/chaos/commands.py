"""Commands that write: a folder appears whole or not at all, and the same command completes it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME
from tests.campaigns.chaos.scenes import contents, require
from tests.campaigns.chaos.system_calls import ERRORS, KILL, TERM, Fault, Reached, arm, struck
from tests.campaigns.chaos.writers import check_reported
from tests.command_line import import_commands_and_hub
from tests.fork_host import Child, ForkHost
from tests.made_up_runs import save_step

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "fixtures"
OUTPUT_EXISTS = 5
KILLED, TERMINATED = -signal.SIGKILL, 128 + signal.SIGTERM
LIMIT_SECONDS = 120


def command(fault: dict[str, Any], arguments: list[str]) -> int:
    from ckptkit_cli.main import main

    arm(Fault(**fault))
    return main(arguments)


class CommandHost:
    """Commands as forks of one process, each with a fault in the middle of it."""

    def __init__(self, forks: ForkHost) -> None:
        self._forks = forks
        self.output = forks.folder / "output"

    def start(self, function: Callable[..., object], fault: Fault, *arguments: object) -> Child:
        self.output.write_text("")
        return self._forks.start(function, vars(fault), *arguments, log=self.output)

    def run(self, fault: Fault, arguments: Sequence[object]) -> int:
        status = self.start(command, fault, [str(word) for word in arguments]).wait()
        assert status is not None
        return status


@contextmanager
def command_host(**environment: str) -> Iterator[CommandHost]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        homes = {"HF_HOME": f"{scratch}/hf", "XDG_CACHE_HOME": f"{scratch}/cache"}
        settings = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        settings |= {"PYTHONWARNINGS": "ignore"} | environment | homes
        with ForkHost(prepare=import_commands_and_hub, **settings) as forks:
            yield CommandHost(forks)


def undisturbed(fault: Fault) -> Fault:
    """Returns a fault that never happens, and is not logged where the other one is."""
    return Fault(KILL, 0, fault.folder, f"{fault.log}-again", sends=False)


def check_status(status: int, fault: Fault, reached: Sequence[Reached], beside: str = "") -> None:
    """A process that was killed is dead, and what failed or was ended does not say that it is well.

    A signal may come when all is done.
    """
    if struck(fault, reached) is None:
        assert status == 0, f"status {status} without a fault"
    elif fault.act == KILL:
        assert status == KILLED, f"status {status}"
    elif fault.act == TERM:
        assert status in {0, TERMINATED}, f"status {status}"
    elif status == 0:
        check_reported(fault, reached, beside)
    else:
        assert status > 1, f"status {status}, a bug"


@dataclass
class Producing:
    """A command that makes a folder of others."""

    host: CommandHost
    work: str  # what it does, for the table
    inputs: Callable[[Path], None]  # makes what it reads, in a folder
    # Of the command, for the folder of the inputs and its output.
    arguments: Callable[[Path, Path], Sequence[object]]
    has_before: bool = False  # whether there is an output that it replaces
    keeps: bool = False  # whether it keeps after an error what it goes on with
    process: str = "command"
    sends: bool = False
    status: int = 0
    expected: dict[str, bytes] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        self.inputs(folder / "inputs")
        (folder / "outbox").mkdir()
        if self.has_before:
            shutil.copytree(_earlier_output(self.host.output.parent), folder / "outbox" / "out")

    def play(self, folder: Path, fault: Fault) -> None:
        self.status = self._run(folder, fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        check_status(self.status, fault, reached)
        out, before = folder / "outbox" / "out", _earlier_output(self.host.output.parent)
        found = self._weights(out)
        if not self.expected:
            self.expected = found
        is_new = found == self.expected
        is_old = found == (self._weights(before) if self.has_before else {})
        require(that=is_new or is_old, otherwise=f"neither the old output nor the new: {[*found]}")
        require(that=is_new or self.status != 0, otherwise="done, and no output is there")
        if fault.act in ERRORS and not self.keeps:
            left = [path.name for path in out.parent.iterdir() if path != out]
            require(that=not left, otherwise=f"{left} is left after an error")
        status = self._run(folder, undisturbed(fault))
        taken = is_new and not self.has_before
        require(
            that=status == (OUTPUT_EXISTS if taken else 0),
            otherwise=f"again: status {status}, {self.host.output.read_text()[-500:]}",
        )
        require(that=self._weights(out) == self.expected, otherwise="again: another output")
        require(that=ckptkit.verify(out).ok, otherwise="again: the output is not proven")
        left = [path.name for path in out.parent.iterdir() if path != out]
        require(that=not left, otherwise=f"again: {left} is left")
        return 1 + is_new

    def _run(self, folder: Path, fault: Fault) -> int:
        arguments = self.arguments(folder / "inputs", folder / "outbox" / "out")
        return self.host.run(fault, arguments)

    def _weights(self, out: Path) -> dict[str, bytes]:
        found = contents(out) if out.is_dir() else {}
        return {path: data for path, data in found.items() if path != MANIFEST_NAME}


@dataclass
class Pruning:
    """`prune`, which leaves each step whole or gone."""

    host: CommandHost
    process: str = "command"
    work: str = "prune: three of four steps of a run"
    sends: bool = False
    status: int = 0

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        for step in range(1, 5):
            save_step(folder, step)

    def play(self, folder: Path, fault: Fault) -> None:
        self.status = self.host.run(fault, ["prune", folder, "--keep-last", 1])

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        check_status(self.status, fault, reached)
        steps = ckptkit.list_run(folder).steps
        require(that=all(step.complete for step in steps), otherwise="half of a step is visible")
        newest = folder / "checkpoint-4"
        whole = ckptkit.verify(newest).ok
        require(that=whole, otherwise="the newest step is not whole")
        status = self.host.run(undisturbed(fault), ["prune", folder, "--keep-last", 1])
        require(that=status == 0, otherwise=f"again: {self.host.output.read_text()[-500:]}")
        left = [path.name for path in folder.iterdir() if path.name != ".ckptkit"]
        require(that=left == ["checkpoint-4"], otherwise=f"again: {left} is left")
        return len(steps) + 1


@dataclass
class Moving:
    """`--delete-source`: the source goes once its output is proven, and nothing else."""

    host: CommandHost
    process: str = "command"
    work: str = "consolidate --delete-source"
    sends: bool = False
    status: int = 0
    every: set[str] = field(default_factory=set)
    stays: set[str] = field(default_factory=set)
    expected: bytes = b""

    def prepare(self, folder: Path) -> None:
        source = FIXTURES / "accelerate_fsdp2_cpu_offload" / "checkpoint"
        optimizer = shutil.ignore_patterns("optimizer_0")  # with it, the model would not be removed
        shutil.copytree(source, folder / "run", ignore=optimizer)
        self.every = set(contents(folder / "run"))

    def play(self, folder: Path, fault: Fault) -> None:
        self.status = self._run(folder, fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        # Where the source cannot be opened for writing, it is locked for reading only.
        check_status(self.status, fault, reached, beside=str(folder / "run"))
        out, source = folder / "out", set(contents(folder / "run"))
        if not self.expected:
            self.expected, self.stays = (out / "model.safetensors").read_bytes(), source
        if not out.exists():
            require(
                that=source >= self.every, otherwise="the source lacks files, and nothing is there"
            )
        for _ in range(2):
            status = self._run(folder, undisturbed(fault))
            require(that=status == 0, otherwise=f"again: {self.host.output.read_text()[-500:]}")
            found = set(contents(folder / "run"))
            require(that=found == self.stays, otherwise=f"again: {found ^ self.stays}")
        weights = (out / "model.safetensors").read_bytes()
        require(that=weights == self.expected, otherwise="again: another output")
        require(that=ckptkit.verify(out).ok, otherwise="again: the output is not proven")
        return 1

    def _run(self, folder: Path, fault: Fault) -> int:
        arguments = ["consolidate", folder / "run", folder / "out", "--names", "live"]
        return self.host.run(fault, [*arguments, "--delete-source"])


@cache
def _earlier_output(scratch: Path) -> Path:
    ckptkit.consolidate(FIXTURES / "hf_tied" / "checkpoint", scratch / "earlier", names="live")
    return scratch / "earlier"


def _copied(**fixtures: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name, fixture in fixtures.items():
            shutil.copytree(FIXTURES / fixture / "checkpoint", folder / name)

    return make


def _two_models(folder: Path) -> None:
    _copied(base="hf_tied", new="hf_tied")(folder)
    weights = next((folder / "new").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-8:] = bytes(8)
    weights.write_bytes(data)


def _delta(folder: Path) -> None:
    _two_models(folder)
    ckptkit.create_delta(folder / "base", folder / "new", folder / "delta", version=1)


def commands(host: CommandHost) -> list[Producing | Pruning | Moving]:
    sharded = _copied(run="accelerate_fsdp2_cpu_offload")

    def consolidate(*options: object) -> Callable[[Path, Path], Sequence[object]]:
        return lambda inputs, out: [
            *("consolidate", inputs / "run", out, "--names", "live", *options)
        ]

    return [
        Producing(host, "consolidate", sharded, consolidate()),
        Producing(
            host,
            "consolidate --overwrite --resume, in several files",
            sharded,
            consolidate("--overwrite", "--resume", "--max-shard-size", "8KB"),
            has_before=True,
            keeps=True,
        ),
        Producing(
            host,
            "convert --to dcp",
            sharded,
            lambda inputs, out: [
                *("convert", inputs / "run", out, "--to", "dcp", "--names", "live")
            ],
        ),
        Producing(
            host,
            "delta create",
            _two_models,
            lambda inputs, out: [
                *("delta", "create", inputs / "base", inputs / "new", out, "--version", 1)
            ],
        ),
        Producing(
            host,
            "delta apply",
            _delta,
            lambda inputs, out: ["delta", "apply", inputs / "base", inputs / "delta", out],
        ),
        Pruning(host),
        Moving(host),
    ]
