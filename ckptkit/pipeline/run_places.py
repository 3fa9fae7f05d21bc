"""From the path or URL of a run to what lists and prunes it."""

from __future__ import annotations

from pathlib import Path

from ckptkit.formats.discovery import step_of
from ckptkit.storage.local_run import LocalRun
from ckptkit.storage.places import PathLike, is_url, local_path
from ckptkit.storage.push_journal import WATCH_FOLDER, StepPush, pushes_in
from ckptkit.storage.run_store import RunStore


def open_run(run: PathLike) -> RunStore:
    """Returns the store of a run.

    Raises:
        NotACheckpointError: If there is no such directory.
    """
    if is_url(run):
        from ckptkit.storage.remote_run import RemoteRun

        return RemoteRun(run, is_step_name)
    return LocalRun(local_path(run), is_step_name)


def is_step_name(name: str) -> bool:
    """Tells whether a folder of that name holds a step, as all tools name theirs."""
    return step_of(name) is not None


def recorded_pushes(run: PathLike, state: PathLike | None) -> tuple[StepPush, ...]:
    """Returns what a watch has written down of a run.

    Args:
        run: The run.
        state: Where the watch keeps its state; in the run itself if left out.
    """
    if state is not None:
        return pushes_in(Path(state))
    return () if is_url(run) else pushes_in(local_path(run) / WATCH_FOLDER)
