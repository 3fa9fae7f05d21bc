"""Paths as users type them: the model that one names, and the folder to read.

Ids and pages of the Hub become places with a commit. A folder of the same name goes first.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import CONFIG
from ckptkit.core.errors import (
    AccessError,
    FormatError,
    HubError,
    HubUnavailableError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.model_configs import parse_model_config
from ckptkit.core.text import Aside
from ckptkit.runs.find_run import absent_folder, suggest_path
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.place_identity import PlaceRelation, find_overlaps
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of

# As the Hub has it: no name ends with a dot or a dash, has two of them side by side, or ends with
# `.git`.
_NAME = (
    r"(?![^/@]*(?:--|\.\.|\.git(?:[/@]|$)))"
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
)
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}"
_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_OF_HUB = re.compile(rf"hf://(?!buckets/)(?:{_ID.pattern})/?")
_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>{_NAME}/{_NAME})"
    rf"(?:/tree/(?P<revision>{_REVISION}))?/?"
)
# Of a model from the first years of the Hub, which had no owner; or of the Hub itself.
_OLD_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
    rf"(?!(?:datasets|docs|join|login|models|new|papers|settings|spaces)/?$)(?P<name>{_NAME})/?"
)
_COMMIT_DIGITS = 10


def find_model(path: PathLike, option: str) -> tuple[Place, tuple[str, ...]]:
    """Returns the place of a model; asks the Hub if the name may be that of a model there.

    A folder with the name goes first. If the Hub is not reached, the cache of `huggingface_hub` is
    searched.

    Returns:
        A folder or a URL, on the Hub with the commit that the name stands for now, and notes on
        which of several places it is.
    """
    place = place_of(path)
    named = _ID.fullmatch(place) is not None
    if named and local_path(place).is_file():
        return place, ()
    if named and local_path(place).exists():
        text = f"{option} {place}: the folder of this name is used; hf://{place} is the model of"
        return place, (Aside(f"{text} this name on the Hub"),)
    match = _ID.fullmatch(place) or _OF_HUB.fullmatch(place) or _PAGE.fullmatch(place)
    if match is None or ".." in place:
        return place, ()
    repo, revision = match["repo"], match["revision"]
    at_hub = place.beside(f"hf://{repo}" + (f"@{revision}" if revision else ""))
    try:
        pinned = place.beside(f"hf://{_pin(at_hub)}")
    except InputError as error:
        is_unreached = isinstance(error, StorageError) or _is_offline(error)
        cached = _find_cached(repo, revision) if is_unreached else ""
        if cached:
            text = f"{option} {place}: the Hub was not reached; its copy in {cached} is used"
            return Place(cached), (Aside(text),)
        _refuse(error, place, option, repo, is_folder_missing=named)
    commit = pinned.rpartition("@")[2][:_COMMIT_DIGITS]
    if revision is not None and commit == revision[:_COMMIT_DIGITS]:
        return pinned, ()
    return pinned, (Aside(f"{option} {place}: {repo} on the Hub, commit {commit}"),)


def names_model(text: str) -> bool:
    """Returns whether a text is a folder that is there, or may be the id of a model on the Hub."""
    is_id = _ID.fullmatch(text) is not None and ".." not in text
    return is_id or (bool(text) and not is_url(text) and local_path(text).is_dir())


def find_local(name: str) -> Place | None:
    """Returns the folder of a model on this machine: one of this name, or the cache's; or None."""
    place = place_of(name)
    if is_url(place):
        return None
    if local_path(place).is_dir():
        return place
    match = _ID.fullmatch(place)
    cached = _find_cached(match["repo"], match["revision"]) if match is not None else ""
    return Place(cached) if cached else None


def describe_hub_name(place: PathLike) -> str:
    """Returns the hint for a place that is not there and may name a model on the Hub; or empty."""
    location = os.fspath(place)
    old = _OLD_PAGE.fullmatch(location)
    if old is not None:  # the client of the Hub takes no id without an owner any more
        return f"a model on the Hub is written hf://OWNER/{old['name']}; its page shows the owner"
    match = (_PAGE if is_url(location) else _ID).fullmatch(location)
    if match is None:
        return ""
    revision = f"@{match['revision']}" if match["revision"] else ""
    return f"a model on the Hub is written hf://{match['repo']}{revision}"


def _pin(place: Place) -> str:
    """Returns `org/name@commit`."""
    from ckptkit.storage.remote.errors import as_input_error  # imports of stores are late
    from ckptkit.storage.remote.store import get_store

    store = get_store(place)
    try:
        return store.path_of(place.location).rstrip("/")
    except Exception as error:
        attempts = store.retry_policy.attempts
        raise as_input_error(
            error, where=place.location, options=place.options, attempts=attempts
        ) from error


def _is_offline(error: InputError) -> bool:
    return type(error.__cause__).__name__ == "OfflineModeIsEnabled"


def _find_cached(repo: str, revision: str | None) -> str:
    """Returns the folder of a model in the cache of `huggingface_hub`; empty if there is none."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision, local_files_only=True)
    except Exception:  # noqa: BLE001  which of its errors says so differs between versions
        return ""
    return os.fspath(folder)


def _refuse(
    error: InputError, place: Place, option: str, repo: str, *, is_folder_missing: bool
) -> NoReturn:
    where = f"{option} {place}"
    here = "there is no such folder here, and " if is_folder_missing else ""
    if isinstance(error, StorageError) or _is_offline(error):
        off = "HF_HUB_OFFLINE is set" if _is_offline(error) else "the Hub was not reached"
        raise HubUnavailableError(
            f"{here}{off}",
            where=where,
            hint="pass a folder with the config.json of the model; on a machine with a network,"
            f" `hf download {repo} --exclude '*.safetensors' --local-dir DIR` makes one",
        ) from error
    if isinstance(error, AccessError):
        raise HubError(
            f"{here}the Hub does not give access to {repo}",
            where=where,
            hint="accept the terms on its page, and log in with `hf auth login`, or set HF_TOKEN",
        ) from error
    if isinstance(error, SourceChangedError):
        raise error
    raise NotACheckpointError(
        f"{here}there is no such model, or no such revision of it, on the Hub",
        where=where,
        hint="check the spelling; a private model needs `hf auth login`, or HF_TOKEN",
    ) from error


_DEEP = 64  # folders below a prefix; more than any path has


def check_path(text: PathLike, what: str) -> None:
    """Refuses paths that no system call would take, before one fails on them."""
    if not os.fspath(text):
        raise UsageError("is empty, where a path was expected", where=what)
    if is_url(text):
        return
    path = local_path(text)
    try:
        path.resolve().is_dir()
    except PermissionError as error:
        raise AccessError(
            "cannot be read: permission denied",
            where=os.fspath(text),
            hint="see who may enter it and the folders above it: `ls -ld`",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        shown = os.fspath(text)[:80]
        raise UsageError(f"is no usable path: {reason}", where=f"{what} {shown!r}") from error


def open_folder(stack: ExitStack, place: PathLike, option: str) -> Source:
    """Opens a directory, or a prefix that holds something."""
    check_path(place, option)
    if not is_url(place):
        if not local_path(place).is_dir():
            text, hint = absent_folder(place, describe_hub_name(place))
            raise NotACheckpointError(text, where=f"{option} {place}", hint=hint)
        return stack.enter_context(LocalSource(local_path(place)))
    source = stack.enter_context(open_source(place))
    if not _holds_something(source):
        raise NotACheckpointError("nothing is there", where=f"{option} {place}")
    return source


def open_root(stack: ExitStack, place: PathLike) -> tuple[Source, str | None]:
    """Opens the folder to search; returns it with the name of the file if the place is a file."""
    if is_url(place):
        url = place_of(place)
        source = stack.enter_context(open_source(url))
        if _holds_something(source):
            return source, None
        parent, name = posixpath.split(url)
        if not parent.endswith("/"):  # nothing is above `s3://bucket`
            above = stack.enter_context(open_source(url.beside(parent)))
            if is_there(above, name):
                return above, name
        text, hint = "there is no object at or below this URL", describe_hub_name(url)
        raise NotACheckpointError(text, where=url, hint=hint)
    path = local_path(place)
    if path.is_dir():
        return stack.enter_context(LocalSource(path)), None
    if path.is_file():
        return stack.enter_context(LocalSource(path.parent)), path.name
    if path.exists():
        raise NotACheckpointError("neither a file nor a directory", where=os.fspath(place))
    hint = suggest_path(place, describe_hub_name(place))
    raise NotACheckpointError("no such file or directory", where=os.fspath(place), hint=hint)


def open_others(stack: ExitStack, first: Place, also: Sequence[PathLike]) -> Iterator[Source]:
    """Opens the further directories of a checkpoint, each place once.

    Places are compared by what they name: a URL may be written with another endpoint or protocol.
    """
    for place in also:
        check_path(place, "--also")
    pairs = find_overlaps([first, *also]) if also else ()
    repeated = {max(pair) for *pair, how in pairs if how is PlaceRelation.SAME}
    for number, place in enumerate(also, 1):
        if number not in repeated:
            yield open_folder(stack, place, "--also")


def is_folder(place: PathLike) -> bool:
    """Returns whether a place is a directory, or a prefix that holds something."""
    if not is_url(place):
        return local_path(place).is_dir()
    with open_source(place) as source:
        return _holds_something(source)


def is_anything(place: PathLike) -> bool:
    """Returns whether there is a directory or a file."""
    if not is_url(place):
        return local_path(place).exists()
    try:
        with ExitStack() as stack:
            open_root(stack, place)
    except NotACheckpointError:
        return False
    return True


def make_absolute(place: PathLike) -> str:
    """Returns a path from the root of its file system on; a URL is absolute."""
    return os.fspath(place) if is_url(place) else str(local_path(place).absolute())


def resolve_path(place: PathLike) -> str:
    """Returns a path with its links followed; object stores have none."""
    return os.fspath(place) if is_url(place) else str(local_path(place).resolve())


def _holds_something(source: Source) -> bool:
    return next(iter(source.walk(_DEEP)), None) is not None or is_there(source, MANIFEST_NAME)


def read_config_in(folder: PathLike, option: str) -> dict[str, Any]:
    """Returns the `config.json` of a folder."""
    with ExitStack() as stack:
        source = open_folder(stack, find_model(folder, option)[0], option)
        where = posixpath.join(source.location, CONFIG)
        try:
            size = source.stat(CONFIG).size_bytes
        except MissingFileError as error:
            raise NotACheckpointError(
                f"holds no {CONFIG!r}",
                where=f"{option} {folder}",
                hint="name a folder as save_pretrained writes it; its weights may be missing",
            ) from error
        if size > MAX_JSON_BYTES:
            raise FormatError(f"has {size:,} bytes, more than any configuration", where=where)
        return parse_model_config(source.read(CONFIG, 0, size), where=where)
