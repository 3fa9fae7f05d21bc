"""The branch that a watch pushes to: the commits of pushed steps, and their tags.

The title of a step's commit holds the step's number and the digest of its manifest, so that a watch
that was killed between a commit and its journal entry finds the commit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError, HubError, RefusedError
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import NOT_FOUND, Hub, status_of
from ckptkit.hub.publish.folder_files import Skipped
from ckptkit.hub.publish.hub_commit import tag_commit
from ckptkit.hub.publish.publish import push as push_folder
from ckptkit.runs.push_journal import StepPush

TAG_PREFIX = "step-"
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class StepCommit:
    """A step's commit.

    Attributes:
        commit: Its hash.
        url: Of its page.
        uploaded_bytes: Bytes that this watch uploaded for it.
        is_new: Whether this watch made it.
        skipped: Files of the step that were not pushed with it, and why.
    """

    commit: str
    url: str
    uploaded_bytes: int = 0
    is_new: bool = True
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchSettings:
    """The branch of a repository, and what is pushed with a step.

    Attributes:
        private: Whether a new repository is private; None for the Hub's default.
        revision: The branch; `main` when None.
        include: Patterns of further files of a step that are pushed with it.
    """

    private: bool | None = None
    revision: str | None = None
    include: Sequence[str] = ()


class PushedSteps:
    """The pushed steps of a run in one branch; sends as few requests as possible."""

    def __init__(
        self, hub: Hub, settings: BranchSettings, tag_prefix: str, listener: Listener | None = None
    ) -> None:
        self._hub = hub
        self._settings = settings
        self._tag_prefix = tag_prefix
        self._listener = listener
        self._commits: dict[str, str] | None = None  # by title
        self._tags: dict[str, str] = {}

    def tag_of(self, step: int) -> str:
        return f"{self._tag_prefix}{step}"

    def check(self) -> None:
        """Sends the first requests, which fail with a wrong token."""
        self._list_commits()

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns the commit of a step, None if it has none."""
        commit = self._list_commits().get(title_of(push))
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

    def push(self, folder: Path, push: StepPush, whole: str = "") -> StepCommit:
        """Makes the commit of a step."""
        title = title_of(push)
        commits, self._commits = self._list_commits(), None  # unknown until the push has succeeded
        pushed = push_folder(
            folder,
            self._hub.repo_id,
            private=self._settings.private,
            revision=self._settings.revision,
            message=title,
            token=self._hub.token,
            endpoint=self._hub.api.endpoint,
            whole=whole,
            include=self._settings.include if whole else (),
            listener=self._listener,
        )
        self._commits = {**commits, title: pushed.commit}
        return StepCommit(pushed.commit, pushed.url, pushed.bytes_uploaded, skipped=pushed.skipped)

    def tag(self, push: StepPush, commit: StepCommit) -> None:
        """Makes the step's tag point to its commit."""
        self._list_commits()
        if self._tags.get(push.tag) == commit.commit:
            return
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

    def _list_commits(self) -> dict[str, str]:
        """Returns the commits by title; asks the Hub if they may have changed."""
        if self._commits is not None:
            return self._commits
        hub, revision = self._hub, self._settings.revision or _MAIN
        try:
            # Tags first: the client tries that request once, and pages of commits for minutes.
            tags = hub.call(hub.api.list_repo_refs, hub.repo_id).tags
        except HubError as error:
            _raise_unless_absent(error)
            tags = []
        self._tags = {tag.name: tag.target_commit for tag in tags}
        try:
            commits = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=revision)
        except HubError as error:
            _raise_unless_absent(error)
            commits = []
        # The newest comes first; of two commits with one title it is the one that counts.
        self._commits = {commit.title: commit.commit_id for commit in reversed(commits)}
        return self._commits


def title_of(push: StepPush) -> str:
    """Returns the title of a step's commit.

    >>> title_of(StepPush(500, "1f2e3d4c5b6a7988", "pushing", "org/name"))
    'Step 500 (ckptkit 1f2e3d4c5b6a7988)'
    """
    return f"Step {push.step} (ckptkit {push.digest})"


def _raise_unless_absent(error: HubError) -> None:
    """Raises an error unless it says that the repository or the branch does not exist."""
    cause = error.__cause__
    absent = type(cause).__name__ in {"RepositoryNotFoundError", "RevisionNotFoundError"}
    if cause is None or not absent or status_of(cause) != NOT_FOUND:
        raise error
