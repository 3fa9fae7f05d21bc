"""Starts a watch: its lock, its journal, its run and its repository."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckptkit.core.errors import NotACheckpointError, OutputError, RefusedError
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, quiet_client
from ckptkit.hub.publish.hub_commit import check_tag
from ckptkit.hub.watch.events import WatchEvent, WatchListener
from ckptkit.hub.watch.hub_branch import TAG_PREFIX, BranchSettings, PushedSteps
from ckptkit.hub.watch.watch import Pauses, Watch, WatchSettings
from ckptkit.hub.watch.watched_run import WatchedRun
from ckptkit.runs.marks import FileLocks
from ckptkit.runs.pruning import prune_run
from ckptkit.runs.push_journal import (
    WATCH_FOLDER,
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
    """A run to watch, and the repository to push to.

    Attributes:
        run: The directory or URL that steps are saved in.
        repo_id: The repository.
        state: The folder of journal and lock; by default inside a local run.
        settings: Which steps are pushed, and how.
        branch: The branch of the repository.
        tag_prefix: What comes before the number in the names of tags.
        retention: Which steps stay in the run after a push; all without a rule.
        token: Of the Hub; that of the environment or of the last login by default.
        endpoint: Of the Hub; that of the environment by default.
        waits_for_lock: Whether to wait for another watch of the run to end, instead of refusing.
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
    """Watches a run until the end is requested and no step waits.

    Args:
        request: What to watch.
        pauses: Waits between two listings, and requests the end.
        listener: Receives all events.
        progress: Receives progress events of builds and uploads.

    Returns:
        The watch; its `failures` are the steps that could not be pushed.
    """
    check_tag(f"{request.tag_prefix}1")
    state = state_folder(request)
    with ExitStack() as stack:
        stack.enter_context(_take_lock(request, state, pauses, listener))
        stack.enter_context(quiet_client())
        hub = Hub(request.repo_id, token=request.token, endpoint=request.endpoint)
        hub.resolve_owner()
        identity, *former = _identities(request.run)
        journal, note = open_journal(state, hub.repo_id, identity, former)
        started = {"run": os.fspath(request.run), "repo_id": hub.repo_id, "state": str(state)}
        listener(WatchEvent("started", None, started))
        if note:
            listener(WatchEvent("warning", None, {"message": note}))
        branch = PushedSteps(hub, request.branch, request.tag_prefix, progress)
        run = WatchedRun(request.run, state)
        prune = None if request.retention.keeps_all else partial(_prune, request, state)
        watch = Watch(run, journal, branch, request.settings, listener, prune)
        stack.callback(watch.close)
        watch.run(pauses, progress)
    return watch


def state_folder(request: WatchRequest) -> Path:
    """Returns the folder for the state of a watch."""
    if request.state is not None:
        return request.state
    location = os.fspath(request.run)
    if is_url(request.run):
        raise RefusedError(
            "is a URL, where the state of the watch cannot be kept",
            where=location,
            hint="pass a local directory with --state",
        )
    if not local_path(location).is_dir():
        raise NotACheckpointError(
            "is not a directory",
            where=location,
            hint="pass the directory that the training saves to",
        )
    return local_path(location) / WATCH_FOLDER


def _identities(run: PathLike) -> list[str]:
    """Returns identities that distinguish a run from an earlier one at its path.

    For a URL the identity does not depend on its spelling; the identity of older versions follows.
    """
    own = "" if is_url(run) else watch_identity(local_path(run) / WATCH_FOLDER)
    named = os.fspath(run).rstrip("/")
    texts = [identify_place(run).name, named] if is_url(run) else [named]
    return [own] if own else [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def _prune(request: WatchRequest, state: Path) -> Sequence[int]:
    result = prune_run(request.run, request.retention, state=state)
    if result.failed:
        first = result.failed[0]
        raise OutputError(first.why, where=first.step.name)
    return [step.step for step in result.removed]


def _take_lock(
    request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener
) -> FileLocks:
    own = None if is_url(request.run) else local_path(request.run) / WATCH_FOLDER
    has_reported = False
    while True:
        try:
            return take_watch_lock(state, own)
        except RefusedError as error:
            if isinstance(error, OutputError) or not request.waits_for_lock:
                raise
            if not has_reported:
                listener(WatchEvent("waiting", None, {"error": error.to_json()}))
                has_reported = True
        pauses.wait(_LOCK_POLL_SECONDS)
