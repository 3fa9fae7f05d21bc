"""Two ranks train, and all of a job is killed at a system call of one of its processes.

Usage: python -m tests.campaigns.chaos.training FOLDER STRIDE FIRST ACTOR... Every start goes on
from what the one before left, compares the state bit by bit with what was saved, and is killed.
Prints a JSON object: of each process its calls, kills, terminations, resumes and losses.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.campaigns.chaos.system_calls import KILL_JOB, TERM_JOB, Fault, calls_of
from tests.crash.forked_ranks import Pair
from tests.crash.training_kills_run import _die_on_nodes, _die_together, warm_up
from tests.crash.training_life import Doom
from tests.crash.writer_programs import writer_running

PROGRAM = """
from ckptkit.writer import process as main
from tests.campaigns.chaos.system_calls import Fault, arm
import ckptkit.writer.commit, ckptkit.writer.drain
requests = 0
do = main.RequestHandler.do
def noted(self, message, tally):
    global requests
    if type(message).__name__ in {kinds}:
        requests += 1
        if requests == {request}:
            arm(Fault(**{fault!r}))
    return do(self, message, tally)
main.RequestHandler.do = noted
main.main()
"""
ENDS = {KILL_JOB: -signal.SIGKILL, TERM_JOB: -signal.SIGTERM}
TERMS_APART = 4  # kills for each termination
ATTEMPTS = 2  # on a busy machine ranks end before they are killed; what is lost is lost in both


@dataclass
class CallDoom(Doom):
    """A command for writers that are armed in the middle of a request."""

    fault: Fault = field(default_factory=lambda: Fault(KILL_JOB, 0, "/", ""))

    def command(self, descriptor: int) -> Sequence[str]:
        program = PROGRAM.format(kinds=self.kinds, request=self.request, fault=vars(self.fault))
        return writer_running(program, descriptor)


@dataclass(frozen=True)
class Actor:
    """A process of the job."""

    name: str  # as the functions of `training_kills_run` call it
    kinds: tuple[str, ...]  # the requests of interest
    on_nodes: bool = False  # whether the nodes' own disks come first


ACTORS = {
    "writer of rank 1": Actor("writer", ("Persist",)),
    "committer": Actor("committer", ("Commit",)),
    "committer, the same step again": Actor("again", ("Commit",)),
    "committer of a node": Actor("keeper", ("Commit",), on_nodes=True),
    "drain of rank 1": Actor("drain", ("Drain",), on_nodes=True),
    "committer of what was drained": Actor("committer", ("Commit",), on_nodes=True),
}


def chain(folder: Path, actor: Actor, stride: int, first: int) -> dict[str, Any]:
    """Kills the job at every so manieth call of a process; returns what was seen."""
    folder.mkdir(parents=True)
    life = _die_on_nodes if actor.on_nodes else _die_together

    def live(act: str, call: int) -> int:
        """Starts the ranks, which are to die at a call; returns how many calls were reached."""
        log = folder.with_name(f"{folder.name}-{act}-{call}.calls")
        fault = Fault(act, call, str(folder), str(log))
        doom = CallDoom(act, call, kinds=actor.kinds, fault=fault)
        ends = (ENDS[act],) * 2 if call else (1, 1)  # they say that they were to be killed
        try:
            Pair(partial(life, folder, actor.name, doom), ends).run()
        except AssertionError as error:
            # Another start may have a call less: nothing was killed then, and nothing is lost.
            reached = len(calls_of(log))
            if reached >= call > 0:
                raise AssertionError(f"{error}; {reached} calls were reached") from error
        return len(calls_of(log))

    calls = live(KILL_JOB, 0)
    found: dict[str, Any] = {"calls": calls, "resumes": 0, "losses": []} | dict.fromkeys(ENDS, 0)
    points = [(KILL_JOB, call) for call in range(first, calls + 1, stride)]
    points += [(TERM_JOB, call) for call in range(first, calls + 1, TERMS_APART * stride)]
    for act, call in points:
        for attempt in range(ATTEMPTS):
            try:
                found[act] += live(act, call) >= call
                found["resumes"] += 2  # by both ranks, before they are killed
                break
            except AssertionError as error:
                if attempt == ATTEMPTS - 1:
                    found["losses"].append(f"{act} at call {call}: {error}")
                    return found
    try:
        Pair(partial(life, folder, actor.name, None)).run()
        found["resumes"] += 2
    except AssertionError as error:
        found["losses"].append(f"at the end: {error}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    place, stride, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chosen = sys.argv[4:] or [*ACTORS]
    found = {
        name: chain(place / str(number), ACTORS[name], stride, first)
        for number, name in enumerate(chosen)
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
