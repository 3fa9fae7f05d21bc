"""Makes one commit on the Hub exactly once, although answers may get lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import HubError, UsageError
from ckptkit.hub.client import Hub, is_conflict, is_lost, pause_before, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


Tree = Mapping[str, str]
"""Files of a commit: the SHA-256 of large ones and git's id of others, by path."""
Hashes = Mapping[str, frozenset[str]]
"""The hashes that the Hub may report for each file: it decides which files are large."""
_NO_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^@$|^[/.-]|/\.|[/.]$|\.lock(/|$)")
_MOST_COMMITS = 50  # to look through for a commit whose answer was lost


@dataclass(frozen=True, slots=True)
class CommitChange:
    """The changes of one commit.

    Attributes:
        revision: The branch.
        create_pr: Whether a pull request to the branch holds the commit.
        message: Its title.
        description: What follows the title; may be empty.
        operations: Files to add.
        added: Their hashes.
        deleted: Files to remove.
    """

    revision: str
    create_pr: bool
    message: str
    description: str
    operations: Sequence[CommitOperationAdd]
    added: Hashes
    deleted: Sequence[str]

    def is_in(self, tree: Tree) -> bool:
        here = not differing(tree, self.added)
        return here and not any(path in tree for path in self.deleted)


@dataclass(frozen=True, slots=True)
class HubCommit:
    """A commit on the Hub, and the pull request that holds it."""

    commit: str
    pull_request: str = ""


def differing(tree: Tree, expected: Hashes) -> list[str]:
    """Returns the files that a tree does not hold as they are expected."""
    return [path for path, hashes in expected.items() if tree.get(path) not in hashes]


class HeadMovedError(Exception):
    """Another commit was made to the revision meanwhile."""


def list_files(hub: Hub, revision: str) -> list[Any]:
    """Returns the files of a commit as the client has them; their folders are left out."""
    list_tree = hub.api.list_repo_tree
    entries = hub.call(
        lambda: list(list_tree(hub.repo_id, recursive=True, revision=revision))  # asks page by page
    )
    return [entry for entry in entries if hasattr(entry, "blob_id")]


def tree_of(hub: Hub, revision: str) -> dict[str, str]:
    return {
        file.path: file.lfs.sha256 if file.lfs else file.blob_id
        for file in list_files(hub, revision)
    }


def commit_of(hub: Hub, revision: str) -> str:
    return str(hub.call(hub.api.repo_info, hub.repo_id, revision=revision).sha)


def make_commit(hub: Hub, change: CommitChange, parent: str) -> HubCommit:
    """Makes a commit on top of `parent`, exactly once.

    Returns:
        Where it is.
    """
    from huggingface_hub import CommitOperationDelete

    deletions = [CommitOperationDelete(path, is_folder=False) for path in change.deleted]
    requests = _pull_requests(hub) if change.create_pr else {}
    attempt = 0
    while True:
        attempt += 1
        try:
            commit = hub.api.create_commit(
                hub.repo_id,
                operations=[*change.operations, *deletions],
                commit_message=change.message,
                commit_description=change.description,
                revision=change.revision,
                parent_commit=parent,
                create_pr=change.create_pr,
            )
            return HubCommit(str(commit.oid), str(commit.pr_url or ""))
        except Exception as error:
            # Also where the client stumbles over an answer, as old ones do away from the Hub.
            unknown = is_lost(error) or is_conflict(error) or status_of(error) is None
            landed = _look(hub, change, parent, requests) if unknown else None
            if landed is not None:
                return landed
            if is_conflict(error):
                raise HeadMovedError from error
            pause = pause_before(error, attempt)
            if pause is None:
                raise hub.translate_error(error) from error
        time.sleep(pause)


def _look(
    hub: Hub, change: CommitChange, parent: str, requests: Mapping[str, str]
) -> HubCommit | None:
    """Returns the commit if it was made although its answer got lost."""
    if change.create_pr:
        for ref, target in _pull_requests(hub).items():
            if ref not in requests and change.is_in(tree_of(hub, target)):
                number = ref.rsplit("/", 1)[-1]
                return HubCommit(target, f"{hub.url}/discussions/{number}")
        return None
    if commit_of(hub, change.revision) == parent:
        return None
    commits = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=change.revision)
    for commit in commits[:_MOST_COMMITS]:
        if commit.commit_id == parent:
            return None
        if commit.title == change.message and change.is_in(tree_of(hub, commit.commit_id)):
            return HubCommit(commit.commit_id)
    return None


def _pull_requests(hub: Hub) -> dict[str, str]:
    list_refs: Callable[..., Any] = hub.api.list_repo_refs
    refs = hub.call(list_refs, hub.repo_id, include_pull_requests=True)
    return {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}


@dataclass(frozen=True, slots=True)
class ExistingTag:
    """A tag that the repository has already."""

    name: str
    commit: str
    tree: Tree

    def check(self, hub: Hub, expected: Hashes) -> None:
        """Refuses a tag whose files differ from those that are pushed."""
        for path in differing(self.tree, expected):
            raise HubError(
                f"the tag {self.name!r} exists already with other files, such as {path}",
                where=hub.repo_id,
                hint="delete the tag on the Hub, or choose another name",
            )


def find_tag(hub: Hub, name: str) -> ExistingTag | None:
    """Looks for a tag."""
    refs = hub.call(hub.api.list_repo_refs, hub.repo_id)
    if all(tag.name != name for tag in refs.tags):
        return None
    commit = commit_of(hub, name)
    return ExistingTag(name, commit, tree_of(hub, commit))


def check_tag(tag: str) -> None:
    """Refuses invalid names of tags before anything is uploaded.

    Source: git-check-ref-format(1).
    """
    if not tag or _NO_NAME.search(tag):
        raise UsageError(
            f"{tag!r:.200} is not a valid name of a tag",
            hint="write it with letters, digits, '-', '_' and '.', such as step-500",
        )


def tag_commit(hub: Hub, tag: str, commit: str) -> None:
    """Tags a commit; the tag may exist already if it points to the same commit."""
    try:
        hub.call(hub.api.create_tag, hub.repo_id, tag=tag, revision=commit)
    except HubError as error:
        cause = error.__cause__
        if cause is None or status_of(cause) != 409:  # noqa: PLR2004  it exists
            raise
        other = commit_of(hub, tag)
        if other != commit:
            raise HubError(
                f"the tag {tag!r} points to commit {other[:10]} and not to {commit[:10]}",
                where=hub.repo_id,
                hint="delete the tag on the Hub, or choose another name",
            ) from error
