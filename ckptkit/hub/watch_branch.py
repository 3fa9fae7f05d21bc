"""The branch of a repository that a watch pushes to, through the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import HubError
from ckptkit.execution.events import Listener
from ckptkit.hub.client import Hub
from ckptkit.hub.committing import tag_commit
from ckptkit.hub.pushing import Pushed, push
from ckptkit.hub.retrying import status_of

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
    """See `ckptkit.hub.watch_remote.Branch`."""

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
        """Returns hash and title of each commit, the newest first; none without a repository.

        Raises:
            HubError: If it cannot be asked, or refuses.
        """
        hub, revision = self._hub, self._settings.revision or _MAIN
        try:
            found = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=revision)
        except HubError as error:
            if _is_absence(error):
                return ()
            raise
        return [(commit.commit_id, commit.title) for commit in found]

    def tags(self) -> dict[str, str]:
        """Returns the commit that each tag points to; none without a repository.

        Raises:
            HubError: If it cannot be asked, or refuses.
        """
        try:
            found = self._hub.call(self._hub.api.list_repo_refs, self._hub.repo_id)
        except HubError as error:
            if _is_absence(error):
                return {}
            raise
        return {tag.name: tag.target_commit for tag in found.tags}

    def create_tag(self, tag: str, commit: str) -> None:
        """Makes a tag, which may be there already if it points to the same commit.

        Raises:
            HubError: If it cannot be made, or is of another commit.
        """
        tag_commit(self._hub, tag, commit)

    def delete_tag(self, tag: str) -> None:
        """Removes a tag.

        Raises:
            HubError: If it cannot be removed.
        """
        self._hub.call(self._hub.api.delete_tag, self._hub.repo_id, tag=tag)

    def url_of(self, commit: str) -> str:
        """Returns where people see a commit."""
        return f"{self._hub.url}/commit/{commit}"

    def push(self, folder: Path, message: str, whole: str) -> Pushed:
        """Makes one commit of a folder, with one below it that goes as it is.

        Raises:
            CkptkitError: If that fails.
        """
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
