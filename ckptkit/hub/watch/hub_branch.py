"""What of a run is at the Hub already: the commits of its steps, and their tags.

A step's commit is known by its title, which holds the step's number and the digest of its
manifest. So whoever was killed between a commit and its own notes finds it again.

The branch of a repository that a watch pushes to, through the client.
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
        url: Where people see it.
        uploaded_bytes: What was uploaded for it just now.
        is_new: Whether it was made just now.
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
        """Makes a tag, which may be there already if it points to the same commit."""
        ...

    def delete_tag(self, tag: str) -> None:
        """Removes a tag."""
        ...

    def url_of(self, commit: str) -> str:
        """Returns where people see a commit."""
        ...

    def push(self, folder: Path, message: str, whole: str) -> Pushed:
        """Makes one commit of a folder, with one below it that goes as it is."""
        ...


class PushedSteps:
    """The steps of a run in one branch of a repository; asks the Hub as rarely as it can."""

    def __init__(self, branch: Branch, tag_prefix: str = TAG_PREFIX) -> None:
        """Asks nothing yet.

        Args:
            branch: Where steps are pushed.
            tag_prefix: What comes before the number in the names of tags.
        """
        self._branch = branch
        self._tag_prefix = tag_prefix
        self._commits: dict[str, str] | None = None  # by title
        self._tags: dict[str, str] = {}

    def tag_of(self, step: int) -> str:
        return f"{self._tag_prefix}{step}"

    def check(self) -> None:
        """Asks the Hub for the first time."""
        self._known()

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns the commit of a step, None where there is none."""
        commits, title = self._known(), title_of(push)
        commit = commits.get(title)
        tagged = self._tags.get(push.tag)
        if tagged is not None and tagged not in {commit, push.replaces}:
            raise RefusedError(
                f"the tag {push.tag!r} is there already, of another commit: {tagged[:12]}",
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
            folder: What is pushed.
            push: The step.
            whole: A folder below that goes as it is; empty for none.
        """
        title = title_of(push)
        commits, self._commits = self._known(), None  # nobody knows, until it is done
        done = self._branch.push(folder, title, whole)
        self._commits = {**commits, title: done.commit}
        return StepCommit(done.commit, done.url, done.bytes_uploaded, skipped=done.skipped)

    def tag(self, push: StepPush, found: StepCommit) -> None:
        """Has the step's tag point to its commit."""
        self._known()
        if self._tags.get(push.tag) == found.commit:
            return
        try:
            if push.tag in self._tags:  # an earlier save of the step, see `find`
                self._branch.delete_tag(push.tag)
                del self._tags[push.tag]
            self._branch.create_tag(push.tag, found.commit)
        except CkptkitError:
            self._commits = None
            raise
        self._tags[push.tag] = found.commit

    def _known(self) -> dict[str, str]:
        """Returns the commits by their titles; asks where something may have changed."""
        if self._commits is None:
            # Tags first: for these the client tries once, and for pages of commits for minutes.
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
    """Where steps go.

    Attributes:
        private: Whether a repository that is made is private; None for the Hub's default.
        revision: The branch; `main` when None.
        include: Patterns of files of a step that go with it, besides those that it is made of.
    """

    private: bool | None = None
    revision: str | None = None
    include: Sequence[str] = ()


class HubBranch:
    """See `ckptkit.hub.watch.hub_branch.Branch`."""

    def __init__(
        self, hub: Hub, settings: BranchSettings, listener: Listener | None = None
    ) -> None:
        """Asks nothing yet.

        Args:
            hub: The repository, as the holder of a token sees it.
            settings: Where in it.
            listener: Is told of the bytes that are uploaded.
        """
        self._hub = hub
        self._settings = settings
        self._listener = listener

    def commits(self) -> Sequence[tuple[str, str]]:
        """Returns hash and title of each commit, the newest first; none without a repository."""
        hub, revision = self._hub, self._settings.revision or _MAIN
        try:
            found = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=revision)
        except HubError as error:
            if _is_absence(error):
                return ()
            raise
        return [(commit.commit_id, commit.title) for commit in found]

    def tags(self) -> dict[str, str]:
        """Returns the commit that each tag points to; none without a repository."""
        try:
            found = self._hub.call(self._hub.api.list_repo_refs, self._hub.repo_id)
        except HubError as error:
            if _is_absence(error):
                return {}
            raise
        return {tag.name: tag.target_commit for tag in found.tags}

    def create_tag(self, tag: str, commit: str) -> None:
        tag_commit(self._hub, tag, commit)

    def delete_tag(self, tag: str) -> None:
        self._hub.call(self._hub.api.delete_tag, self._hub.repo_id, tag=tag)

    def url_of(self, commit: str) -> str:
        return f"{self._hub.url}/commit/{commit}"

    def push(self, folder: Path, message: str, whole: str) -> Pushed:
        """Makes one commit of a folder, with one below it that goes as it is."""
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
    """Tells that there is no such repository, or no such branch in it, as far as anybody sees."""
    cause = error.__cause__
    absent = type(cause).__name__ in {"RepositoryNotFoundError", "RevisionNotFoundError"}
    return cause is not None and absent and status_of(cause) == _NOT_FOUND
