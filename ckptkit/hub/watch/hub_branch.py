"""The branch that a watch pushes to: the commits of pushed steps, and their tags.

The title of a step's commit holds the step's number and the digest of its manifest, so that a watch
that was killed between a commit and its journal entry finds the commit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptkit.core.errors import CkptkitError, HubError, RefusedError
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, status_of
from ckptkit.hub.publish.folder_files import Skipped
from ckptkit.hub.publish.hub_commit import tag_commit
from ckptkit.hub.publish.publish import Pushed, push
from ckptkit.runs.push_journal import StepPush

TAG_PREFIX = "step-"


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


class Branch(Protocol):
    """One branch of one repository, and the repository's tags."""

    def commits(self) -> Sequence[tuple[str, str]]:
        """Returns hash and title of each commit, the newest first; none without a repository."""
        ...

    def tags(self) -> dict[str, str]:
        """Returns the commit that each tag points to; none without a repository."""
        ...

    def create_tag(self, tag: str, commit: str) -> None:
        """Creates a tag; it may exist already if it points to the same commit."""
        ...

    def delete_tag(self, tag: str) -> None:
        """Removes a tag."""
        ...

    def url_of(self, commit: str) -> str:
        """Returns the page of a commit."""
        ...

    def push(self, folder: Path, message: str, whole: str) -> Pushed:
        """Pushes a folder as one commit; its subfolder `whole` is pushed unchanged."""
        ...


class PushedSteps:
    """The pushed steps of a run in one branch; sends as few requests as possible."""

    def __init__(self, branch: Branch, tag_prefix: str = TAG_PREFIX) -> None:
        """Sends no request yet.

        Args:
            branch: The branch.
            tag_prefix: What comes before the number in the names of tags.
        """
        self._branch = branch
        self._tag_prefix = tag_prefix
        self._commits: dict[str, str] | None = None  # by title
        self._tags: dict[str, str] = {}

    def tag_of(self, step: int) -> str:
        return f"{self._tag_prefix}{step}"

    def check(self) -> None:
        """Sends the first requests, which fail with a wrong token."""
        self._list_commits()

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns the commit of a step, None if it has none."""
        commits, title = self._list_commits(), title_of(push)
        commit = commits.get(title)
        tagged = self._tags.get(push.tag)
        if tagged is not None and tagged not in {commit, push.replaces}:
            raise RefusedError(
                f"the tag {push.tag!r} exists already for another commit: {tagged[:12]}",
                where=push.repo_id,
                hint="push each run to a repository of its own, or choose another --tag-prefix",
            )
        return (
            None
            if commit is None
            else StepCommit(commit, self._branch.url_of(commit), is_new=False)
        )

    def push(self, folder: Path, push: StepPush, whole: str = "") -> StepCommit:
        """Makes the commit of a step.

        Args:
            folder: The folder to push.
            push: The step.
            whole: A subfolder that is pushed unchanged; empty for none.
        """
        title = title_of(push)
        commits, self._commits = self._list_commits(), None  # unknown until the push has succeeded
        pushed = self._branch.push(folder, title, whole)
        self._commits = {**commits, title: pushed.commit}
        return StepCommit(pushed.commit, pushed.url, pushed.bytes_uploaded, skipped=pushed.skipped)

    def tag(self, push: StepPush, commit: StepCommit) -> None:
        """Makes the step's tag point to its commit."""
        self._list_commits()
        if self._tags.get(push.tag) == commit.commit:
            return
        try:
            if push.tag in self._tags:  # an earlier save of the step, see `find`
                self._branch.delete_tag(push.tag)
                del self._tags[push.tag]
            self._branch.create_tag(push.tag, commit.commit)
        except CkptkitError:
            self._commits = None
            raise
        self._tags[push.tag] = commit.commit

    def _list_commits(self) -> dict[str, str]:
        """Returns the commits by title; asks the Hub if they may have changed."""
        if self._commits is None:
            # Tags first: the client tries that request once, and pages of commits for minutes.
            self._tags = self._branch.tags()
            commits = dict(reversed([(title, commit) for commit, title in self._branch.commits()]))
            self._commits = commits
        return self._commits


def title_of(push: StepPush) -> str:
    """Returns the title of a step's commit.

    >>> title_of(StepPush(500, "1f2e3d4c5b6a7988", "pushing", "org/name"))
    'Step 500 (ckptkit 1f2e3d4c5b6a7988)'
    """
    return f"Step {push.step} (ckptkit {push.digest})"


_MAIN = "main"
_NOT_FOUND = 404


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


class HubBranch:
    """See `ckptkit.hub.watch.hub_branch.Branch`."""

    def __init__(
        self, hub: Hub, settings: BranchSettings, listener: Listener | None = None
    ) -> None:
        """Sends no request yet.

        Args:
            hub: The repository.
            settings: The branch.
            listener: Receives progress events of uploads.
        """
        self._hub = hub
        self._settings = settings
        self._listener = listener

    def commits(self) -> Sequence[tuple[str, str]]:
        """Returns hash and title of each commit, the newest first; none without a repository."""
        hub, revision = self._hub, self._settings.revision or _MAIN
        try:
            commits = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=revision)
        except HubError as error:
            if _is_absence(error):
                return ()
            raise
        return [(commit.commit_id, commit.title) for commit in commits]

    def tags(self) -> dict[str, str]:
        """Returns the commit that each tag points to; none without a repository."""
        try:
            refs = self._hub.call(self._hub.api.list_repo_refs, self._hub.repo_id)
        except HubError as error:
            if _is_absence(error):
                return {}
            raise
        return {tag.name: tag.target_commit for tag in refs.tags}

    def create_tag(self, tag: str, commit: str) -> None:
        tag_commit(self._hub, tag, commit)

    def delete_tag(self, tag: str) -> None:
        self._hub.call(self._hub.api.delete_tag, self._hub.repo_id, tag=tag)

    def url_of(self, commit: str) -> str:
        return f"{self._hub.url}/commit/{commit}"

    def push(self, folder: Path, message: str, whole: str) -> Pushed:
        """Pushes a folder as one commit; its subfolder `whole` is pushed unchanged."""
        return push(
            folder,
            self._hub.repo_id,
            private=self._settings.private,
            revision=self._settings.revision,
            message=message,
            token=self._hub.token,
            endpoint=self._hub.api.endpoint,
            whole=whole,
            include=self._settings.include if whole else (),
            listener=self._listener,
        )


def _is_absence(error: HubError) -> bool:
    """Returns whether an error says that the repository or the branch does not exist."""
    cause = error.__cause__
    absent = type(cause).__name__ in {"RepositoryNotFoundError", "RevisionNotFoundError"}
    return cause is not None and absent and status_of(cause) == _NOT_FOUND
