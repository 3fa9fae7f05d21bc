"""`ckptkit.hub.push`: publishes a model folder as one verified commit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.core.errors import HubError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.engine.outcome import Listener, Planned, Started, ignore
from ckptkit.hub.client import Hub, is_absent, quiet_client
from ckptkit.hub.publish.card import is_ours
from ckptkit.hub.publish.folder_files import (
    CARD,
    Skipped,
    check_unchanged,
    find_stale_files,
    local_folder,
)
from ckptkit.hub.publish.hub_commit import (
    CommitChange,
    ExistingTag,
    Hashes,
    HeadMovedError,
    HubCommit,
    HubCommitter,
    check_landed,
    check_tag,
    commit_of,
    differing,
    find_tag,
    tag_commit,
    tree_of,
)
from ckptkit.hub.publish.large_files import LargeFile, LargeFileUploader, UploadedFile, add_large
from ckptkit.hub.publish.package import Package, PackageOptions, prepare_package
from ckptkit.hub.publish.searching import refuse_secrets
from ckptkit.hub.publish.secrets import find_secrets
from ckptkit.options import check_choice
from ckptkit.runs.run_paths import hold_source
from ckptkit.storage.base import Folder
from ckptkit.storage.places import PathLike, open_source

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


logger = logging.getLogger(__name__)
_MAIN = "main"
_PRIVATE, _PUBLIC = "private", "public"
_RACES = 5  # attempts to commit to a head that other commits keep moving


@dataclass(frozen=True, slots=True)
class Pushed:
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
        return asdict(self)


class PushOptions(TypedDict, total=False):
    """The options of `push`; they are those of the command.

    Attributes:
        private: Whether a new repository is private, which it is if left out. One that exists
            has to be as asked for, if asked for.
        revision: A branch, made where it does not exist; `main` if left out.
        tag: A name for the commit.
        create_pr: Whether to open a pull request instead of committing to the revision.
        message: The commit's; its first line is the title. Names the step if left out.
        token: Left out, that of HF_TOKEN or of the last login is taken.
        endpoint: Left out, HF_ENDPOINT is taken, as it was when `huggingface_hub` was imported.
        include: Patterns of files to push besides those that belong to a model.
        include_optimizer: Whether to push the state of the optimizer and of random numbers too.
        names: "auto", the default, refuses weights that would not load as the model of config.json;
            "live" compares nothing.
        base_model: The repository of the model that was trained, where a path names it here.
        dry_run: Whether to report only what would be done.
        whole: The name of a subfolder that is pushed unchanged, such as a step to resume training
            from. Files of an earlier one are deleted from the repository.
        listener: Receives progress events, from several threads.
    """

    private: bool | None
    revision: str | None
    tag: str | None
    create_pr: bool
    message: str | None
    token: str | None
    endpoint: str | None
    include: Sequence[str]
    include_optimizer: bool
    names: str
    base_model: str | None
    dry_run: bool
    whole: str
    listener: Listener | None


@check_arguments
def push(folder: PathLike, repo_id: str, **options: Unpack[PushOptions]) -> Pushed:
    """Publishes a model folder, or an adapter's, as one commit.

    Every byte is checked against the folder's manifest while it is read for the upload, and the
    Hub's hashes are compared with what was read. Files that belong to no model are left out.
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
    wishes = _package_options(hub, options)
    request = _Request(
        private=options.get("private"),
        revision=options.get("revision") or _MAIN,
        tag=tag,
        create_pr=options.get("create_pr", False),
        message=options.get("message"),
    )
    with quiet_client(), open_source(place) as source, hold_source(source):
        package = prepare_package(source, repo_id, wishes)
        hub.resolve_owner()
        job = _Push(hub, source, package, request, options.get("listener") or ignore)
        return job.dry_run() if options.get("dry_run") else job.run()


def _package_options(hub: Hub, options: PushOptions) -> PackageOptions:
    check_choice("--names", options.get("names", "auto"), ("auto", "live"))
    return PackageOptions(
        optimizer=options.get("include_optimizer", False),
        include=options.get("include", ()),
        base_model=options.get("base_model"),
        secrets=[hub.token or ""],
        whole=options.get("whole", ""),
        names=options.get("names", "auto"),
    )


@dataclass(frozen=True, slots=True)
class _Request:
    private: bool | None
    revision: str
    tag: str | None
    create_pr: bool
    message: str | None


class _Push:
    """One push to a repository."""

    def __init__(
        self, hub: Hub, folder: Folder, package: Package, request: _Request, listener: Listener
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._package = package
        self._request = request
        self._listener = listener
        self._new_repository = ""
        self._contents = dict(package.contents)
        self._small = {path: _hashes(data) for path, data in self._contents.items()}

    def dry_run(self) -> Pushed:
        """Returns what a push would do."""
        try:
            tree = tree_of(self._hub, self._request.revision) if self._exists() else {}
        except HubError as error:
            if not is_absent(error):
                raise
            tree = {}  # the branch does not exist
        self._choose_card(tree)
        changed = differing(tree, self._small)
        large = [file.path for file in self._package.large]
        deleted = find_stale_files(tree, [*self._small, *large], self._package.whole)
        return self._report(HubCommit(""), [*changed, *large], deleted, self._request.tag)

    def run(self) -> Pushed:
        self._make_repository()
        head = commit_of(self._hub, self._request.revision)
        tree = tree_of(self._hub, head)
        tagged = self._find_tag()
        self._choose_card(tree)
        if CARD in self._contents:
            self._hub.check_card(self._contents[CARD].decode(errors="replace"))
        hashes, sent = self._send(tree if tagged is None else tagged.tree)
        expected = self._small | {path: frozenset([sha256]) for path, sha256 in hashes.items()}
        if tagged is not None:
            tagged.check(self._hub, {path: expected[path] for path in expected if path != CARD})
            return self._report(HubCommit(tagged.commit), [], [], self._request.tag)
        landed, uploaded, deleted = self._commit(head, expected, sent)
        check_landed(self._hub, landed.commit, expected)
        if self._request.tag:
            tag_commit(self._hub, self._request.tag, landed.commit)
        return self._report(landed, uploaded, deleted, self._request.tag)

    def _make_repository(self) -> None:
        hub, request = self._hub, self._request
        if not self._exists():
            private = self._visibility == _PRIVATE
            hub.call(hub.api.create_repo, hub.repo_id, private=private, exist_ok=True)
            self._check_visibility(hub.call(hub.api.repo_info, hub.repo_id))
        if request.revision != _MAIN and not request.revision.startswith("refs/"):
            make = hub.api.create_branch
            hub.call(make, hub.repo_id, branch=request.revision, exist_ok=True)

    def _exists(self) -> bool:
        """Returns whether the repository exists, and refuses one with another visibility."""
        try:
            info = self._hub.call(self._hub.api.repo_info, self._hub.repo_id)
        except HubError as error:
            if not is_absent(error):
                raise
            self._new_repository = self._visibility
            return False
        self._check_visibility(info)
        return True

    @property
    def _visibility(self) -> str:
        return _PUBLIC if self._request.private is False else _PRIVATE

    def _find_tag(self) -> ExistingTag | None:
        """Returns the tag if it exists: nothing is committed then, only compared.

        A manifest that differs is refused before anything is uploaded.
        """
        tagged = find_tag(self._hub, self._request.tag) if self._request.tag else None
        if tagged is not None and MANIFEST_NAME in self._small:
            tagged.check(self._hub, {MANIFEST_NAME: self._small[MANIFEST_NAME]})
        return tagged

    def _check_visibility(self, info: Any) -> None:
        actual = info.private
        wanted = self._request.private
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
        if card is None or (
            CARD in tree and not is_ours(self._hub.read(CARD, self._request.revision))
        ):
            return
        self._contents[CARD] = card.encode()
        self._small[CARD] = _hashes(self._contents[CARD])

    def _send(self, tree: Mapping[str, str]) -> tuple[dict[str, str], list[UploadedFile]]:
        """Uploads the large files; those that the Hub seems to have are only hashed."""
        package, request = self._package, self._request
        self._listener(Planned(package.notes))
        self._listener(Started(sum(file.size_bytes for file in package.large)))
        uploader = LargeFileUploader(
            self._hub,
            self._folder,
            revision=request.revision,
            create_pr=request.create_pr,
            listener=self._listener,
            secrets=[self._hub.token or ""],
        )
        hashes = uploader.hash_files(self._find_unchanged(tree))
        unchanged = {path for path, sha256 in hashes.items() if tree.get(path) == sha256}
        sent = uploader.upload([file for file in package.large if file.path not in unchanged])
        check_unchanged(self._folder, package.refs.values())
        return hashes | {file.path: file.sha256 for file in sent}, sent

    def _find_unchanged(self, tree: Mapping[str, str]) -> list[LargeFile]:
        """Returns the files that, by an equal manifest, are unchanged on the Hub."""
        same = tree.get(MANIFEST_NAME, "") in self._small.get(MANIFEST_NAME, ())
        return [file for file in self._package.large if same and file.path in tree]

    def _commit(
        self, head: str, expected: Hashes, sent: Sequence[UploadedFile]
    ) -> tuple[HubCommit, list[str], list[str]]:
        """Commits what differs from the head, again where another commit moved it."""
        request = self._request
        committer = HubCommitter(self._hub, request.revision, create_pr=request.create_pr)
        for _ in range(_RACES):
            tree = tree_of(self._hub, head)
            added = {path: expected[path] for path in differing(tree, expected)}
            deleted = find_stale_files(tree, expected, self._package.whole)
            if not added and not deleted:
                return HubCommit(head), [], []
            title, _, rest = self._message().partition("\n")
            operations = self._operations(added, sent)
            change = CommitChange(title, rest.strip(), operations, added, deleted)
            try:
                return committer.commit(change, head), list(added), deleted
            except HeadMovedError:
                logger.info("%s has a new commit; comparing with it", self._hub.repo_id)
                head = commit_of(self._hub, request.revision)
        raise HubError(
            f"the branch got other commits during {_RACES} attempts to commit",
            where=self._hub.repo_id,
            hint="push again when nothing else is committed there",
        )

    def _operations(self, added: Hashes, sent: Sequence[UploadedFile]) -> list[CommitOperationAdd]:
        from huggingface_hub import CommitOperationAdd

        operations = {file.path: file.operation for file in sent}
        large = {file.path: file for file in self._package.large}
        additions = []
        for path in sorted(added):
            if path in self._contents:
                additions.append(CommitOperationAdd(path, self._contents[path]))
            else:
                # Without an operation the file was at the head when the push began.
                sha256 = next(iter(added[path]))
                operation = operations.get(path) or add_large(self._folder, large[path], sha256)
                additions.append(operation)
        return additions

    def _message(self) -> str:
        step = self._package.step
        if self._request.message and self._request.message.strip():
            return self._request.message.strip()
        return "Push a model with ckptkit" if step is None else f"Push step {step} with ckptkit"

    def _report(
        self, landed: HubCommit, uploaded: Sequence[str], deleted: Sequence[str], tag: str | None
    ) -> Pushed:
        hub, package = self._hub, self._package
        sizes = {path: len(data) for path, data in self._contents.items()}
        sizes |= {file.path: file.size_bytes for file in package.large}
        commit = f"{hub.url}/commit/{landed.commit}" if landed.commit else hub.url
        return Pushed(
            repo_id=hub.repo_id,
            commit=landed.commit,
            url=landed.pull_request or commit,
            tag=tag,
            uploaded=tuple(sorted(uploaded)),
            unchanged=tuple(sorted(sizes.keys() - set(uploaded))),
            skipped=package.skipped,
            deleted=tuple(deleted),
            bytes_uploaded=sum(sizes[path] for path in uploaded),
            new_repository=self._new_repository,
            notes=package.notes,
        )


def _hashes(data: bytes) -> frozenset[str]:
    """Returns the hashes that the Hub may report for a file: its SHA-256, or git's id."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return frozenset([blob.hexdigest(), hashlib.sha256(data).hexdigest()])
