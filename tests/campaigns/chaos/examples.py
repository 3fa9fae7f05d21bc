"""ckpt-chaos over the examples: two ranks, of which one dies at a file event of its own.

Transformers' Trainer that is started again after its last step trains one step more, ckptkit or
not. A run that was killed after its last save is therefore compared with one that was not killed
and started twice.

Source:
    ckpt-chaos: https://pypi.org/project/ckpt-chaos/
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.chaos.example_host import IMPORTED
from tests.fork_host import ForkHost

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")
FAIL_ON = ",".join(VERDICTS[1:])
STEP = r"resumed from step (\d+)"


@dataclass(frozen=True)
class Example:
    """An example, and where it has its checkpoints."""

    arguments: tuple[str, ...]  # what starts it, in front of the folder of its run
    checkpoints: str = "checkpoint-*"  # a pattern below that folder
    steps: int = 4  # how many it trains; it saves every second one

    @property
    def name(self) -> str:
        return self.arguments[-1]

    @property
    def last(self) -> int:
        return self.steps if self.checkpoints == "checkpoint-*" else self.steps // 2 - 1


# accelerate numbers its checkpoints from 0, which ckpt-chaos takes for no checkpoint at all.
EXAMPLES = (
    Example(("fsdp2.py",)),
    Example(("trainer.py",)),
    Example(("accelerate_fsdp.py",), "checkpoints/checkpoint_*", 6),
    Example(("trl_lora.py",)),
    Example(("ckptkit.run", "unmodified.py")),
)


@dataclass
class Verdicts:
    """What came of the kills of one example in one mode."""

    events: int  # the file events of the rank that a kill could take
    kills: int = 0  # how many of them it was killed at
    found: Counter[str] = field(default_factory=Counter)  # how often each verdict was given
    resumed: int = 0  # how many of the runs went on from a checkpoint
    # How many were killed after their last save, and are bit by bit what a run that was not killed
    # becomes when it is started again.
    restarted: int = 0
    # What was not passed, by the folder of the run.
    wrong: dict[str, str] = field(default_factory=dict)


@contextmanager
def example_host() -> Iterator[Path]:
    """Starts the process whose forks the ranks are; yields its socket."""
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # PEFT's configuration has sets
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with ForkHost(*IMPORTED, prepare=None, **settings) as host:
        yield host.place


def run_example(
    example: Example, host: Path, work: Path, *, modes: tuple[str, ...], points: int, rank: int
) -> dict[str, Verdicts]:
    """Kills a rank of an example at its events, and returns what ckpt-chaos found, by mode."""
    run = "{out}/run"
    digest = shlex.join([sys.executable, str(HERE / "show_digest.py"), "{out}"])
    start = [
        *(sys.executable, "-IS", str(HERE / "example_client.py"), str(host)),
        *(*example.arguments, run, "--steps", str(example.steps), "--save-every", "2"),
    ]
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work)),
        *("--checkpoint-glob", f"{run}/{example.checkpoints}", "--step-regex", STEP),
        *("--result-cmd", digest, "--fail-on", FAIL_ON, "--modes", ",".join(modes)),
        *("--ranks", "2", "--crash-rank", str(rank), "--max-points", str(points), "--", *start),
    ]
    # ckpt-chaos 0.1.8 does not say this to its ranks, and without it kills none but rank 0.
    environment = os.environ | {"CKPT_CHAOS_CRASH_RANK": str(rank)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    results = [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]
    if not results:
        raise AssertionError(done.stdout + done.stderr)
    found = judged(work, modes, rank, results)
    if any(one.wrong for one in found.values()):
        excuse(work, found, example, start)
    return found


def excuse(
    work: Path, found: Mapping[str, Verdicts], example: Example, command: Sequence[str]
) -> None:
    """Takes out what is as it is after a restart of a run that has ended."""
    out = work / "twice" / "out"
    for _ in range(2):
        run_ranks([word.replace("{out}", str(out)) for word in command])
    expected = digest_of(out)
    for verdicts in found.values():
        for point, text in [*verdicts.wrong.items()]:
            is_after_last = f"'resumed_from_step': {example.last}," in text
            if is_after_last and digest_of(work / point / "out") == expected:
                del verdicts.wrong[point]
                verdicts.restarted += 1
                verdicts.found["SILENT_DIVERGENCE"] -= 1


def digest_of(out: Path) -> str:
    command = [sys.executable, str(HERE / "show_digest.py"), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_ranks(command: Sequence[str]) -> None:
    """Runs two ranks to their end, as ckpt-chaos does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | job | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in ("0", "1")
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]


def judged(
    work: Path, modes: tuple[str, ...], rank: int, results: list[dict[str, object]]
) -> dict[str, Verdicts]:
    from ckpt_chaos.invariants import ResumeOutcome, classify

    lines = (work / f"reference/events.log.rank{rank}").read_text().splitlines()
    events = {"torn": sum(line.endswith("\t1") for line in lines)}
    found = {mode: Verdicts(events.get(mode, len(lines))) for mode in modes}
    for result in results:
        outcome = result["outcome"]
        assert isinstance(outcome, dict)
        verdict = classify(ResumeOutcome(**outcome))
        point = result.get("point")
        if point is None:  # the run without a kill
            assert verdict == "PASS", result
            continue
        assert isinstance(point, list)
        one = found[point[1]]
        one.kills += bool(result["crashed"])
        one.found[verdict] += 1
        one.resumed += outcome["resumed_from_step"] is not None
        if verdict != "PASS":
            one.wrong[f"pt_{result['order']:03d}"] = f"{result['label']}: {verdict} {outcome}"
    return found
