"""`ckptkit.hub.push`: publishes a model folder as one verified commit."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import Struct

from ckptkit.core.arguments import check_arguments
from ckptkit.core.display import plain_fields
from ckptkit.core.errors import HubError, RefusedError, SourceChangedError, VerificationError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import size_text
from ckptkit.engine.outcome import Listener, Planned, Started, Waiting
from ckptkit.engine.progress import report_to
from ckptkit.hub.client import (
    MAIN,
    Hub,
    check_tag,
    commit_of,
    is_absent,
    is_conflict,
    is_lost,
    pause_before,
    quiet_client,
    status_of,
    tag_commit,
    tree_of,
)
from ckptkit.hub.contents import CARD, is_ours
from ckptkit.hub.large_files import git_hash, hash_files
from ckptkit.hub.package import (
    Package,
    PushOptions,
    Skipped,
    find_stale_files,
    local_folder,
    prepare_package,
)
from ckptkit.hub.secrets import find_secrets, refuse_secrets
from ckptkit.options import check_choice
from ckptkit.runs.local_run import hold_source
from ckptkit.storage.base import Source
from ckptkit.storage.places import PathLike, open_source

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


logger = logging.getLogger(__name__)
_PRIVATE, _PUBLIC = "private", "public"
_RACES = 5  # attempts to commit to a head that other commits keep moving
_MOST_COMMITS = 50  # to look through for a commit whose answer was lost
Tree = Mapping[str, str]
"""Files of a commit: the SHA-256 of large ones and git's id of others, by path."""
Hashes = Mapping[str, frozenset[str]]
"""The hashes that the Hub may report for each file: it decides which files are large."""


def _differing(tree: Tree, expected: Hashes) -> list[str]:
    """Returns the files that a tree does not hold as they are expected."""
    return [path for path, hashes in expected.items() if tree.get(path) not in hashes]


class Pushed(Struct, frozen=True):
    """What a push did, or would do.

    Attributes:
        repo_id: `owner/name`.
        commit: The commit that holds the model; empty of a dry run.
        url: Of the commit, or of the pull request.
        tag: The tag that names the commit, or None.
        uploaded: Files that the commit added or changed.
        unchanged: Files that the repository held already.
        skipped: Files that stayed here, and why.
        deleted: Files of an earlier layout that the commit removed.
        bytes_uploaded: Sizes of the files that were uploaded, together.
        new_repository: The visibility of a created repository, `private` or `public`; empty if it
            existed.
        notes: What the user should know.
    """

    repo_id: str
    commit: str
    url: str
    tag: str | None
    uploaded: tuple[str, ...]
    unchanged: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    deleted: tuple[str, ...]
    bytes_uploaded: int
    new_repository: str
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Returns whether the Hub holds the model; false for a dry run."""
        return bool(self.commit)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return plain_fields(self)


@check_arguments
def push(folder: PathLike, repo_id: str, **options: Unpack[PushOptions]) -> Pushed:
    """Publishes a model folder, or an adapter's, as one commit.

    Every byte is checked against the folder's manifest before the upload, and the Hub's hashes are
    compared with what was read. Files that belong to no model are left out.
    Doing it again continues where it stopped, and makes no second commit.

    Args:
        folder: What `consolidate` or `extract_adapter` wrote, or any other folder that loads.
        repo_id: `owner/name`; created if it does not exist.
        **options: See `PushOptions`.

    Returns:
        What was done.

    Raises:
        UsageError: If the repository's id or the tag is invalid.
        RefusedError: If no library loads the folder, or it holds a secret.
        InputError: If it is damaged or incomplete.
        VerificationError: If it does not match its manifest, or the Hub holds other bytes.
        HubError: If the Hub refuses, or is not reached.
    """
    place = local_folder(folder)
    tag = options.get("tag")
    if tag is not None:
        check_tag(tag)
    words = "\n".join([options.get("message") or "", tag or "", options.get("revision") or ""])
    kinds = find_secrets(words.encode(errors="replace"))
    refuse_secrets([f"{kind} in the message or tag of the commit" for kind in kinds], repo_id)
    hub = Hub(repo_id, token=options.get("token"), endpoint=options.get("endpoint"))
    check_choice("--names", options.get("names", "auto"), ("auto", "live"))
    with (
        quiet_client(),
        open_source(place) as source,
        hold_source(source),
        report_to("push", options) as listener,
    ):
        package = prepare_package(source, repo_id, options, [hub.token or ""])
        hub.resolve_owner()
        job = _Push(hub, source, package, options, listener)
        return job.dry_run() if options.get("dry_run") else job.run()


class _Push:
    """One push to a repository."""

    def __init__(
        self, hub: Hub, folder: Source, package: Package, options: PushOptions, listener: Listener
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._package = package
        self._options = options
        self._revision = options.get("revision") or MAIN
        self._create_pr = options.get("create_pr", False)
        self._tag = options.get("tag")
        self._listener = listener
        self._new_repository = ""
        self._contents = dict(package.contents)
        self._expected = {path: _hashes_of(data) for path, data in self._contents.items()}

    def dry_run(self) -> Pushed:
        """Returns what a push would do."""
        try:
            tree = tree_of(self._hub, self._revision) if self._exists() else {}
        except HubError as error:
            if not is_absent(error):
                raise
            tree = {}  # the branch does not exist
        self._choose_card(tree)
        changed = _differing(tree, self._expected)
        large = [file.path for file in self._package.large]
        deleted = find_stale_files(tree, [*self._expected, *large], self._package.whole)
        return self._report("", "", [*changed, *large], deleted)

    def run(self) -> Pushed:
        # All files are read, checked and searched before the first byte is sent. Then the client
        # uploads the large ones, and what it has sent is compared with what was read; one commit
        # follows, whose files are compared once more.
        hub, revision, package = self._hub, self._revision, self._package
        if not self._exists():
            private = self._new_repository == _PRIVATE
            hub.call(hub.api.create_repo, hub.repo_id, private=private, exist_ok=True)
            self._check_visibility(hub.call(hub.api.repo_info, hub.repo_id))
        if revision != MAIN and not revision.startswith("refs/"):
            hub.call(hub.api.create_branch, hub.repo_id, branch=revision, exist_ok=True)
        head = commit_of(hub, revision)
        # Where the tag exists, nothing is committed, only compared; a manifest that differs is
        # refused before anything is read.
        tags = hub.call(hub.api.list_repo_refs, hub.repo_id).tags if self._tag else ()
        tagged = commit_of(hub, self._tag or "") if self._tag in {t.name for t in tags} else ""
        tagged_tree = tree_of(hub, tagged) if tagged else {}
        if tagged and MANIFEST_NAME in self._expected:
            self._check_tagged(tagged_tree, {MANIFEST_NAME: self._expected[MANIFEST_NAME]})
        self._choose_card(tree_of(hub, head))
        if CARD in self._contents:
            hub.check_card(self._contents[CARD].decode(errors="replace"))
        self._listener(Planned(package.notes))
        files = tuple((file.path, file.size_bytes) for file in package.large)
        self._listener(Started(sum(size for _, size in files), files))
        secrets = [hub.token or ""]
        self._expected |= hash_files(self._folder, package.large, self._listener, secrets)
        if tagged:
            own = {path: hashes for path, hashes in self._expected.items() if path != CARD}
            self._check_tagged(tagged_tree, own)
            return self._report(tagged, "", [], [])
        commit, url, uploaded, deleted = self._commit(head)
        tree = tree_of(hub, commit)
        for path in _differing(tree, self._expected):
            state = "has another hash on the Hub than here"
            raise VerificationError(
                f"{path} {state if path in tree else 'is missing on the Hub'}",
                where=f"{hub.repo_id}@{commit[:10]}",
                hint="push again; do not use that commit",
            )
        if self._tag:
            tag_commit(hub, self._tag, commit)
        return self._report(commit, url, uploaded, deleted)

    def _exists(self) -> bool:
        """Returns whether the repository exists, and refuses one with another visibility."""
        try:
            info = self._hub.call(self._hub.api.repo_info, self._hub.repo_id)
        except HubError as error:
            if not is_absent(error):
                raise
            self._new_repository = _PUBLIC if self._options.get("private") is False else _PRIVATE
            return False
        self._check_visibility(info)
        return True

    def _check_tagged(self, tree: Tree, expected: Hashes) -> None:
        """Refuses a tag that exists if its files differ from those that are pushed."""
        for path in _differing(tree, expected):
            raise HubError(
                f"the tag {self._tag!r} exists already with other files, such as {path}",
                where=self._hub.repo_id,
                hint="delete the tag on the Hub, or choose another name",
            )

    def _check_visibility(self, info: Any) -> None:
        actual = info.private
        wanted = self._options.get("private")
        if wanted is not None and actual is not None and wanted is not actual:
            words = {True: _PRIVATE, False: _PUBLIC}
            raise RefusedError(
                f"the repository is {words[actual]}, not {words[wanted]}",
                where=self._hub.repo_id,
                hint="change it on its settings page, or leave the option out",
            )

    def _choose_card(self, tree: Mapping[str, str]) -> None:
        """Adds the generated card, unless the repository has one that ckptkit did not write."""
        card = self._package.card
        if card is None or (CARD in tree and not is_ours(self._hub.read(CARD, self._revision))):
            return
        self._contents[CARD] = card.encode()
        self._expected[CARD] = _hashes_of(self._contents[CARD])

    def _commit(self, head: str) -> tuple[str, str, list[str], list[str]]:
        """Uploads and commits what differs from the head, again where another commit moved it.

        Returns:
            The commit; the address of its pull request or ""; the paths that it added and deleted.

        Raises:
            HubError: If other commits keep coming first.
        """
        from huggingface_hub import CommitOperationAdd

        operations: dict[str, CommitOperationAdd] = {}
        for _ in range(_RACES):
            tree = tree_of(self._hub, head)
            added = sorted(_differing(tree, self._expected))
            deleted = find_stale_files(tree, self._expected, self._package.whole)
            if not added and not deleted:
                return head, "", [], []
            contents: dict[str, bytes | Path] = {
                path: Path(self._folder.location, path).resolve() for path in added
            }
            contents |= self._contents
            new = {
                path: CommitOperationAdd(path, contents[path])
                for path in added
                if path not in operations
            }
            operations |= new
            self._upload(
                [operation for path, operation in new.items() if path not in self._contents]
            )
            landed = self._commit_once(head, [operations[path] for path in added], deleted)
            if landed is not None:
                return *landed, added, deleted
            logger.info("%s has a new commit; comparing with it", self._hub.repo_id)
            head = commit_of(self._hub, self._revision)
        raise HubError(
            f"the branch got other commits during {_RACES} attempts to commit",
            where=self._hub.repo_id,
            hint="push again when nothing else is committed there",
        )

    def _upload(self, operations: Sequence[CommitOperationAdd]) -> None:
        """Uploads large files, and makes sure that the bytes that were read are those sent."""
        if operations:
            hub = self._hub
            hub.forgo_absent_xet(self._revision, create_pr=self._create_pr)
            size = size_text(sum(operation.upload_info.size for operation in operations))
            self._listener(Waiting(f"the Hub has taken {size}"))
            hub.call(
                hub.api.preupload_lfs_files,
                hub.repo_id,
                additions=operations,
                revision=self._revision,
                create_pr=self._create_pr,
                free_memory=False,
            )
        files = self._folder.changed(list(self._package.refs.values()))
        changed = [] if files is None else [files.path]
        # Of what was sent, the client knows the SHA-256, or it computes it now.
        changed += [
            operation.path_in_repo
            for operation in operations
            if operation.upload_info.sha256.hex() not in self._expected[operation.path_in_repo]
        ]
        if changed:
            raise SourceChangedError(
                f"{changed[0]!r} changed while it was uploaded",
                where=self._folder.location,
                hint="wait until the folder is no longer written to, then push again",
            )

    def _commit_once(
        self, parent: str, additions: Sequence[CommitOperationAdd], deleted: Sequence[str]
    ) -> tuple[str, str] | None:
        """Makes a commit on top of `parent`, exactly once, although answers may get lost.

        Returns:
            The commit, and the address of its pull request; None if another commit came first.
        """
        from huggingface_hub import CommitOperationDelete

        hub = self._hub
        step = "a model" if self._package.step is None else f"step {self._package.step}"
        message = (self._options.get("message") or "").strip() or f"Push {step} with ckptkit"
        title, _, rest = message.partition("\n")
        deletions = [CommitOperationDelete(path, is_folder=False) for path in deleted]
        requests = self._pull_requests() if self._create_pr else {}
        attempt = 0
        while True:
            attempt += 1
            try:
                commit = hub.api.create_commit(
                    hub.repo_id,
                    operations=[*additions, *deletions],
                    commit_message=title,
                    commit_description=rest.strip(),
                    revision=self._revision,
                    parent_commit=parent,
                    create_pr=self._create_pr,
                )
                return str(commit.oid), str(commit.pr_url or "")
            except Exception as error:
                # Also where the client stumbles over an answer, as old ones do away from the Hub.
                if is_lost(error) or is_conflict(error) or status_of(error) is None:
                    added = [operation.path_in_repo for operation in additions]
                    landed = self._find_commit(parent, title, added, deleted, requests)
                    if landed is not None:
                        return landed
                if is_conflict(error):
                    return None
                pause = pause_before(error, attempt)
                if pause is None:
                    raise hub.translate_error(error) from error
            time.sleep(pause)

    def _find_commit(
        self,
        parent: str,
        title: str,
        added: Sequence[str],
        deleted: Sequence[str],
        requests: Mapping[str, str],
    ) -> tuple[str, str] | None:
        """Returns the commit, and its pull request, if it was made although its answer got lost."""
        hub, expected = self._hub, {path: self._expected[path] for path in added}

        def is_ours(commit: str) -> bool:
            tree = tree_of(hub, commit)
            return not _differing(tree, expected) and not any(path in tree for path in deleted)

        if self._create_pr:
            for ref, commit in self._pull_requests().items():
                if ref not in requests and is_ours(commit):
                    return commit, f"{hub.url}/discussions/{ref.rsplit('/', 1)[-1]}"
            return None
        if commit_of(hub, self._revision) == parent:
            return None
        commits = hub.call(hub.api.list_repo_commits, hub.repo_id, revision=self._revision)
        for made in commits[:_MOST_COMMITS]:
            if made.commit_id == parent:
                break
            if made.title == title and is_ours(made.commit_id):
                return made.commit_id, ""
        return None

    def _pull_requests(self) -> dict[str, str]:
        list_refs: Callable[..., Any] = self._hub.api.list_repo_refs
        refs = self._hub.call(list_refs, self._hub.repo_id, include_pull_requests=True)
        return {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}

    def _report(
        self, commit: str, url: str, uploaded: Sequence[str], deleted: Sequence[str]
    ) -> Pushed:
        hub, package = self._hub, self._package
        sizes = {path: len(data) for path, data in self._contents.items()}
        sizes |= {file.path: file.size_bytes for file in package.large}
        return Pushed(
            repo_id=hub.repo_id,
            commit=commit,
            url=url or (f"{hub.url}/commit/{commit}" if commit else hub.url),
            tag=self._tag,
            uploaded=tuple(sorted(uploaded)),
            unchanged=tuple(sorted(sizes.keys() - set(uploaded))),
            skipped=package.skipped,
            deleted=tuple(deleted),
            bytes_uploaded=sum(sizes[path] for path in uploaded),
            new_repository=self._new_repository,
            notes=package.notes,
        )


def _hashes_of(data: bytes) -> frozenset[str]:
    """Returns the hashes that the Hub may report for a file: its SHA-256, or git's id."""
    blob = git_hash(len(data))
    blob.update(data)
    return frozenset([blob.hexdigest(), hashlib.sha256(data).hexdigest()])
