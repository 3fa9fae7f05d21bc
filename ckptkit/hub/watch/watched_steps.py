"""The steps of a watched run: as they are in the run, and as commits in a branch on the Hub.

A digest identifies a step: that of its manifest, or of its files' sizes and times. The title of a
step's commit holds the step's number and digest, so that a watch that was killed between a commit
and its journal entry finds the commit again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    HubError,
    IncompleteCheckpointError,
    InputError,
    NoSpaceError,
    NotACheckpointError,
    OutputError,
    RefusedError,
    StorageError,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import join_first
from ckptkit.engine.outcome import Listener
from ckptkit.formats.discovery import parse_step
from ckptkit.hub.client import MAIN, NOT_FOUND, Hub, status_of, tag_commit
from ckptkit.hub.package import NEVER
from ckptkit.hub.publish import push as push_folder
from ckptkit.hub.secrets import redact_secrets
from ckptkit.hub.watch.build import BuildSettings
from ckptkit.runs.listing import list_run
from ckptkit.runs.local_run import open_run
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.steps import RunStep, digest_files, short_digest
from ckptkit.storage.places import PathLike, Place, is_url, open_source

OF_NO_STEP = (AccessError, NoSpaceError, OutputError, StorageError)
"""Errors of the place that steps go to, or of the storage; they say nothing about a step."""
TAG_PREFIX = "step-"
PUBLISHED = "published"
"""In the source of the manifest of what is not pushed: the run and the step it was made from."""
_QUIET_SECONDS = 60.0  # after which a step without manifest counts as finished
_LISTED = 5


def default_poll_seconds(run: PathLike) -> float:
    """Returns the time between two looks at a run; each costs requests in a store."""
    return 30.0 if is_url(run) else 5.0


class WatchedRun:
    """Lists a run repeatedly, and reads no manifest twice."""

    def __init__(self, run: PathLike, state: Path | None) -> None:
        self._run = run
        self._state = state
        self._digests: dict[str, tuple[str, str]] = {}  # by folder: identity, and digest
        # Steps without a manifest, with their digests, and those that the last listing returned.
        self._unsettled: dict[str, str] = {}
        self._taken: set[str] = set()
        self.absence: InputError | None = None  # why the last listing had no complete step

    def list_steps(self) -> tuple[RunStep, ...]:
        """Returns the complete steps, the lowest number first; none if the run does not exist yet.

        A step without a manifest is included once it has not changed for a while.
        """
        try:
            listing = list_run(self._run, state=self._state)
        except NotACheckpointError as error:
            self._unsettled, self._taken, self.absence = {}, set(), error
            return ()
        steps = [step for step in listing.steps if parse_step(step.name) is not None]
        self.absence = None
        if steps and not any(step.complete for step in steps):
            problems = "; ".join(f"{step.name}: {step.problem}" for step in steps[-_LISTED:])
            self.absence = IncompleteCheckpointError(
                f"no step is complete; {problems}",
                where=listing.location,
                hint="run it again once a step has been saved; `ckptkit ls` shows all of them",
            )
        before, self._unsettled = self._unsettled, {}
        self._taken = set()
        seen: dict[int, RunStep] = {}
        for step in steps:
            digest = self._digest(step, before) if step.complete else ""
            if digest:
                seen[step.step] = replace(step, digest=digest)
        return tuple(seen.values())

    @property
    def unsettled(self) -> Mapping[str, str]:
        """Steps without a manifest that may still be written to, with their digests."""
        return {n: digest for n, digest in self._unsettled.items() if n not in self._taken}

    def hold(self, step: RunStep) -> AbstractContextManager[object]:
        """Returns a context manager that protects a step from pruning."""
        return open_run(self._run).hold(step.name, step.markers)

    def is_there(self, step: RunStep) -> bool:
        """Returns whether a step is still in the run, and was not replaced."""
        try:
            return any(
                now.digest == step.digest for now in self.list_steps() if now.step == step.step
            )
        except InputError:
            return True  # the run cannot be listed now

    def place_of(self, step: RunStep) -> PathLike:
        """Returns the path or URL of a step, with the options of its storage."""
        location = f"{os.fspath(self._run).rstrip('/')}/{step.name}"
        if isinstance(self._run, Place):
            return self._run.beside(location)
        return location if is_url(location) else str(Path(self._run) / step.name)

    def _digest(self, step: RunStep, before: Mapping[str, str]) -> str:
        """Returns the digest of a step; empty if it may not be finished yet."""
        path = f"{step.name}/{MANIFEST_NAME}"
        manifest = next((file for file in step.files if file.path == path), None)
        if step.digest:  # as it was before it lost its optimizer
            return step.digest
        if manifest is not None and not step.sealed:
            identity, digest = self._digests.get(step.name, ("", ""))
            if identity != manifest.identity:
                with open_source(self._run) as source:
                    digest = short_digest(source.read(path, 0, manifest.size_bytes))
                self._digests[step.name] = manifest.identity, digest
            return digest
        digest = digest_files(step)
        self._unsettled[step.name] = digest
        is_quiet = step.modified > 0 and time.time() - step.modified > _QUIET_SECONDS
        if is_quiet or before.get(step.name) == digest:
            self._taken.add(step.name)
            return digest
        return ""


class StepCommit(Struct, frozen=True):
    """What was made of a step: a commit, or a version."""

    commit: str  # its hash, or the name of the version
    url: str  # of its page, or its place
    uploaded_bytes: int = 0  # by this watch
    is_new: bool = True  # this watch has made it
    notes: tuple[str, ...] = ()


def describe_published(identity: str, step: RunStep) -> dict[str, Any]:
    """Returns what a manifest says of the run with that identity, and of its step."""
    return {PUBLISHED: {"run": identity, "step": step.step, "digest": step.digest}}


class PushedSteps:
    """The pushed steps of a run in one branch; sends as few requests as possible."""

    takes_folders = True

    def __init__(
        self,
        hub: Hub,
        *,
        private: bool | None,
        revision: str | None,
        include: Sequence[str],
        build: BuildSettings,
        listener: Listener,
    ) -> None:
        self._hub = hub
        self._private = private
        self._revision = revision or MAIN
        self._include = include
        self._build = build
        self._listener = listener
        self._commits: dict[str, str] | None = None  # by title
        self._tags: dict[str, str] = {}

    def check(self) -> None:
        """Sends the first requests, which fail with a wrong token."""
        self._list_commits()

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns what an earlier watch made of a step, None if nothing."""
        commit = self._list_commits().get(_title_of(push))
        tagged = self._tags.get(push.tag)
        if tagged is not None and tagged not in {commit, push.replaces}:
            raise RefusedError(
                f"the tag {push.tag!r} exists already for another commit: {tagged[:12]}",
                where=push.repo_id,
                hint="push each run to a repository of its own, or choose another --tag-prefix",
            )
        if commit is None:
            return None
        return StepCommit(commit, f"{self._hub.url}/commit/{commit}", is_new=False)

    def publish(self, step: RunStep, push: StepPush, folder: Path) -> StepCommit:
        """Makes the commit of a step from the folder that was built of it."""
        title, whole = _title_of(push), self._build.whole_folder(step.step)
        commits, self._commits = self._list_commits(), None  # unknown until the push has succeeded
        pushed = push_folder(
            folder,
            self._hub.repo_id,
            private=self._private,
            revision=self._revision,
            message=title,
            token=self._hub.token,
            endpoint=self._hub.api.endpoint,
            whole=whole,
            include=self._include if whole else (),
            listener=self._listener,
        )
        self._commits = {**commits, title: pushed.commit}
        left = [skip.path.removeprefix(f"{whole}/") for skip in pushed.skipped]
        left = [path for path in left if PurePosixPath(path).name != NEVER]
        notes = []
        if left:
            names = redact_secrets(join_first(left, len(left), _LISTED))
            text = f"not pushed with the step: {names}"
            notes.append(f"{text}; --include GLOB adds files without secrets")
        return StepCommit(pushed.commit, pushed.url, pushed.bytes_uploaded, notes=tuple(notes))

    def tag(self, push: StepPush, commit: StepCommit) -> str:
        """Makes the step's tag point to its commit, and returns its name."""
        self._list_commits()
        if self._tags.get(push.tag) == commit.commit:
            return push.tag
        hub = self._hub
        try:
            if push.tag in self._tags:  # an earlier save of the step, see `find`
                hub.call(hub.api.delete_tag, hub.repo_id, tag=push.tag)
                del self._tags[push.tag]
            tag_commit(hub, push.tag, commit.commit)
        except CkptkitError:
            self._commits = None
            raise
        self._tags[push.tag] = commit.commit
        return push.tag

    def _list_commits(self) -> dict[str, str]:
        """Returns the commits by title; asks the Hub if they may have changed."""
        if self._commits is not None:
            return self._commits
        hub = self._hub
        try:
            # Tags first: the client tries that request once, and pages of commits for minutes.
            tags = hub.call(hub.api.list_repo_refs, hub.repo_id).tags
        except HubError as error:
            _raise_unless_absent(error)
            tags = []
        self._tags = {tag.name: tag.target_commit for tag in tags}
        try:
            commits = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=self._revision)
        except HubError as error:
            _raise_unless_absent(error)
            commits = []
        # The newest comes first; of two commits with one title it is the one that counts.
        self._commits = {commit.title: commit.commit_id for commit in reversed(commits)}
        return self._commits


def _title_of(push: StepPush) -> str:
    """Returns the title of a step's commit.

    >>> _title_of(StepPush(500, "1f2e3d4c5b6a7988", "pushing", "org/name"))
    'Step 500 (ckptkit 1f2e3d4c5b6a7988)'
    """
    return f"Step {push.step} (ckptkit {push.digest})"


def _raise_unless_absent(error: HubError) -> None:
    """Raises an error unless it says that the repository or the branch does not exist."""
    cause = error.__cause__
    absent = type(cause).__name__ in {"RepositoryNotFoundError", "RevisionNotFoundError"}
    if cause is None or not absent or status_of(cause) != NOT_FOUND:
        raise error
