"""A pruning that is killed leaves each step whole or gone, and the next one clears up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from tests.crash.forked_commands import ForkedCommands
from tests.crash.removal_kills import die_before
from tests.made_up_runs import save_step


def prune_and_die(run: str, before: int) -> None:
    die_before(before)
    ckptkit.prune(run, keep_last=1)


def seen(run: Path) -> Counter[bool]:
    return Counter(step.complete for step in ckptkit.list_run(run).steps)


# A step loses its name, its five files, its folders, and is gone after nine changes.
@pytest.mark.parametrize(("before", "begun"), [(0, 0), (1, 1), (6, 1), (12, 1)])
@pytest.mark.quick("0-0", "1-1", "6-1")
def test_a_kill_leaves_steps_whole_or_gone(
    tmp_path: Path,
    before: int,
    begun: int,
    forks: ForkedCommands,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("kills", 1)
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    assert forks.host.run(prune_and_die, str(tmp_path), before) == -9
    after = seen(tmp_path)
    assert after[False] == 0
    assert after[True] >= 1
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".checkpoint")]
    assert len(hidden) == begun
    pruned = ckptkit.prune(tmp_path, keep_last=1)
    assert len(pruned.cleared) == len(hidden)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
