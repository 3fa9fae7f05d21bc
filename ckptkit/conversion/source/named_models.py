"""A model that an option names: a folder, a URL, or a model on the Hub by its id.

Of a model on the Hub, files are read when they are needed: configuration and tokenizer, headers of
weights where shapes or element types are compared, and weights only where an adapter is merged.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NoReturn

from ckptkit.core.errors import (
    AccessError,
    HubError,
    HubUnavailableError,
    InputError,
    NotACheckpointError,
    SourceChangedError,
    StorageError,
)
from ckptkit.core.text import Aside
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of

# As the Hub has it: no name ends with a dot or a dash, has two of them side by side, or ends with
# `.git`.
_NAME = (
    r"(?![^/@]*(?:--|\.\.|\.git(?:[/@]|$)))"
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
)
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}"
_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_OF_HUB = re.compile(rf"hf://(?:{_ID.pattern})/?")
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


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The place of a model.

    Attributes:
        place: A folder, or a URL; on the Hub with the commit that the name stands for now.
        notes: Which of several places it is.
    """

    place: Place
    notes: tuple[str, ...] = ()


def find_model(path: PathLike, option: str) -> NamedModel:
    """Returns the place of a model; asks the Hub if the name may be that of a model there.

    A folder with the name goes first. If the Hub is not reached, the cache of `huggingface_hub` is
    searched.
    """
    place = place_of(path)
    named = _ID.fullmatch(place) is not None
    if named and local_path(place).is_file():
        return NamedModel(place)
    if named and local_path(place).exists():
        text = f"{option} {place}: the folder of this name is used; hf://{place} is the model of"
        return NamedModel(place, (Aside(f"{text} this name on the Hub"),))
    match = _ID.fullmatch(place) or _OF_HUB.fullmatch(place) or _PAGE.fullmatch(place)
    if match is None or ".." in place:
        return NamedModel(place)
    repo, revision = match["repo"], match["revision"]
    at_hub = place.beside(f"hf://{repo}" + (f"@{revision}" if revision else ""))
    try:
        pinned = place.beside(f"hf://{_pin(at_hub)}")
    except InputError as error:
        is_unreached = isinstance(error, StorageError) or _is_offline(error)
        cached = _find_cached(repo, revision) if is_unreached else ""
        if cached:
            text = f"{option} {place}: the Hub was not reached; its copy in {cached} is used"
            return NamedModel(Place(cached), (Aside(text),))
        _refuse(error, place, option, repo, is_folder_missing=named)
    commit = pinned.rpartition("@")[2][:_COMMIT_DIGITS]
    if revision is not None and commit == revision[:_COMMIT_DIGITS]:
        return NamedModel(pinned)
    return NamedModel(pinned, (Aside(f"{option} {place}: {repo} on the Hub, commit {commit}"),))


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
