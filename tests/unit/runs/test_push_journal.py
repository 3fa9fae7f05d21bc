"""The journal of what was pushed, and its lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptkit.core.errors import RefusedError
from ckptkit.runs.push_journal import (
    StepPush,
    journal_path,
    open_journal,
    read_journals,
    take_watch_lock,
    watch_identity,
)
from ckptkit.storage.local.disk import Disk

PUSH = StepPush(5, "d", "pushed", "org/name", commit="c", tag="step-5", metrics={"loss": 1.0})


def test_a_journal_is_read_back_and_is_that_of_its_run_and_repository(tmp_path: Path) -> None:
    journal, note = open_journal(tmp_path, "org/name", "run")
    assert not note
    journal.note(PUSH)
    journal.note(StepPush(6, "e", "pushing", "org/name"))
    assert open_journal(tmp_path, "org/name", "run")[0].pushes == journal.pushes
    assert [push.step for push in read_journals(tmp_path)] == [5, 6]
    journal.forget(6)
    assert read_journals(tmp_path) == (PUSH,)
    assert not open_journal(tmp_path, "org/other", "run")[0].pushes
    known, note = open_journal(tmp_path, "org/name", "its name now", ["run"])
    assert (known.pushes, note) == ({5: PUSH}, "")
    other, note = open_journal(tmp_path, "org/name", "another run")
    assert not other.pushes
    assert "is of another run" in note


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ckptkit_pushes": 9}', '{"ckptkit_pushes": 1}'])
def test_a_damaged_journal_is_put_aside(text: str, tmp_path: Path) -> None:
    path = journal_path(tmp_path, "org/name")
    path.write_text(text)
    journal, note = open_journal(tmp_path, "org/name", "run")
    assert not journal.pushes
    assert "is no journal" in note
    assert read_journals(tmp_path) == ()
    journal.note(PUSH)
    assert json.loads(path.read_text())["steps"]["5"]["commit"] == "c"


def test_one_process_at_a_time_has_the_lock_of_a_run_wherever_its_state_is(tmp_path: Path) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    lock = take_watch_lock(run, run)
    with pytest.raises(RefusedError, match=r"another watch is running: process \d+"):
        take_watch_lock(state, run)
    lock.close()
    identity = watch_identity(run)
    assert identity
    assert watch_identity(run) == identity
    take_watch_lock(state, run).close()
    take_watch_lock(state, None, Disk.portable()).close()
