"""From what a user asks for to a watch that runs: lock, journal, run and repository."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import NotACheckpointError, OutputError, RefusedError
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, quiet_client
from ckptkit.hub.publish.hub_commit import check_tag
from ckptkit.hub.watch.events import WatchEvent, WatchListener
from ckptkit.hub.watch.hub_branch import TAG_PREFIX, BranchSettings, HubBranch, PushedSteps
from ckptkit.hub.watch.watch import Pauses, Watch, WatchSettings
from ckptkit.hub.watch.watched_run import WatchedRun
from ckptkit.runs.pruning import prune_run
from ckptkit.runs.push_journal import (
    WATCH_FOLDER,
    WatchLock,
    open_journal,
    take_watch_lock,
    watch_identity,
)
from ckptkit.runs.save_order import Retention
from ckptkit.storage.place_identity import identify_place
from ckptkit.storage.places import PathLike, is_url, local_path

_LOCK_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """What is to be watched, and where it goes.

    Attributes:
        run: The directory or URL that steps are saved in.
        repo_id: The repository.
        state: The folder of journal and lock; that of a local run lies in it by default.
        settings: Which steps, and what of them.
        branch: Where in the repository.
        tag_prefix: What comes before the number in the names of tags.
        retention: Which steps of the run stay once they are pushed; all where it has no rule.
        token: Of the Hub; that of the environment or of the last login by default.
        endpoint: Of the Hub; that of the environment by default.
        waits_for_lock: Whether another watch of the run is waited for, instead of refused.
    """

    run: PathLike
    repo_id: str
    state: Path | None = None
    settings: WatchSettings = field(default_factory=WatchSettings)
    branch: BranchSettings = field(default_factory=BranchSettings)
    tag_prefix: str = TAG_PREFIX
    retention: Retention = field(default_factory=Retention)
    token: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    waits_for_lock: bool = False


def run_watch(
    request: WatchRequest, pauses: Pauses, listener: WatchListener, progress: Listener
) -> Watch:
    """Watches a run until it is to end, and nothing waits to be pushed any more.

    Args:
        request: What to watch.
        pauses: Where it waits, and when it is to end.
        listener: Is told of everything that happens.
        progress: Is told of the bytes of what is made and pushed.

    Returns:
        The watch; its `failures` tell which steps could not be pushed as they are.
    """
    check_tag(f"{request.tag_prefix}1")
    state = state_folder(request)
    with ExitStack() as stack:
        stack.enter_context(_locked(request, state, pauses, listener))
        stack.enter_context(quiet_client())
        hub = Hub(request.repo_id, token=request.token, endpoint=request.endpoint)
        hub.resolve_owner()
        identity, *former = _identities(request.run)
        journal, note = open_journal(state, hub.repo_id, identity, former)
        started = {"run": os.fspath(request.run), "repo_id": hub.repo_id, "state": str(state)}
        listener(WatchEvent("started", None, started))
        if note:
            listener(WatchEvent("warning", None, {"message": note}))
        branch = PushedSteps(HubBranch(hub, request.branch, progress), request.tag_prefix)
        watch = Watch(WatchedRun(request.run, state), journal, branch, request.settings, listener)
        stack.callback(watch.close)
        if not request.retention.keeps_all:
            watch.pruning(lambda: _pruned(request, state))
        watch.run(pauses, progress)
    return watch


def state_folder(request: WatchRequest) -> Path:
    """Returns where the state of a watch lies."""
    if request.state is not None:
        return request.state
    location = os.fspath(request.run)
    if is_url(request.run):
        raise RefusedError(
            "is not on a disk, so the state of the watch has no place beside it",
            where=location,
            hint="name a directory with --state",
        )
    if not local_path(location).is_dir():
        raise NotACheckpointError(
            "no directory was found where that of a run was expected",
            where=location,
            hint="pass the directory that the training saves to",
        )
    return local_path(location) / WATCH_FOLDER


def _identities(run: PathLike) -> list[str]:
    """Returns what tells a run from an earlier one of its place, where the run has such a mark.

    A run at a URL is known by what its place is, however it is written; after that comes what
    older versions knew it by.
    """
    own = "" if is_url(run) else watch_identity(local_path(run) / WATCH_FOLDER)
    named = os.fspath(run).rstrip("/")
    texts = [identify_place(run).name, named] if is_url(run) else [named]
    return [own] if own else [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def _pruned(request: WatchRequest, state: Path) -> Sequence[int]:
    done = prune_run(request.run, request.retention, state=state)
    if done.failed:
        first = done.failed[0]
        raise OutputError(first.why, where=first.step.name)
    return [step.step for step in done.removed]


@contextmanager
def _locked(
    request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener
) -> Iterator[None]:
    lock = _taken(request, state, pauses, listener)
    try:
        yield
    finally:
        lock.close()


def _taken(
    request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener
) -> WatchLock:
    own = None if is_url(request.run) else local_path(request.run) / WATCH_FOLDER
    has_told = False
    while True:
        try:
            return take_watch_lock(state, own)
        except RefusedError as error:
            if isinstance(error, OutputError) or not request.waits_for_lock:
                raise
            if not has_told:
                listener(WatchEvent("waiting", None, {"error": error.to_json()}))
                has_told = True
        pauses.wait(_LOCK_POLL_SECONDS)
