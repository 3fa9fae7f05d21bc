"""Taking paths of this machine out of what is published."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.model_configs import model_config_to_json, to_json
from ckptkit.hub.files import ADAPTER_CONFIG, CARD
from ckptkit.planning.side_files import CONFIG

_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/]|~|\.{1,2}(?:[\\/]|$)|[A-Za-z][A-Za-z0-9+.-]*://")
_REPO = re.compile(r"[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
_PATH_KEYS = frozenset({"also", "base", "config", "like", "path"})  # of a manifest
_BASE_KEY = "base_model_name_or_path"  # of an adapter
_NAME_KEYS = frozenset({"_name_or_path", "name_or_path", "id"})  # the last one is of a base model
_BEST = "best_model_checkpoint"  # a path, also where it looks like none of this machine
_PLACES = ("_file", "_path", "_dir", "_folder")  # endings of other keys that name places
_FRONT = re.compile(r"\A(---[ \t]*\r?\n)(.*?)(^---[ \t]*\r?$)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*[\"']?([^\"'\n]*)")  # of the outermost mapping
_ITEM = re.compile(r"\s*-\s+[\"']?([^\"'\n]*)")
_BASE_MODEL = "base_model"
_BASE_TAG = re.compile(r"^base_model:(?:\w+:)?(?!//)")


def is_local(text: str) -> bool:
    """Tells whether a text names a place of this machine, or of a store that it has keys to.

    >>> is_local("/data/llama"), is_local("s3://bucket/run"), is_local("meta-llama/Llama-3.1-8B")
    (True, True, False)
    """
    return _PATH.match(text) is not None


def is_repo_id(text: str) -> bool:
    """Tells whether a text can be the id of a repository."""
    return (
        _REPO.fullmatch(text) is not None
        and not is_local(text)
        and ".." not in text
        and "--" not in text
        and not text.endswith((".git", "-", "."))
    )


def scrubbed(path: str, document: Any, base_model: str | None) -> Any:
    """Returns a JSON document without paths of this machine.

    Args:
        path: The file that it is the content of.
        document: The content.
        base_model: The base's repository, where it is known; it takes the place of its path.
    """
    name = posixpath.basename(path)
    if not isinstance(document, Mapping):
        return document
    if name == MANIFEST_NAME:
        return _manifest(document)
    return {
        key: _without_places(key, value, base_model if name == ADAPTER_CONFIG else None)
        for key, value in document.items()
    }


def _without_places(key: str, value: Any, base_model: str | None) -> Any:
    """Empties names that are paths, and forgets files and folders of this machine.

    Configurations lie inside one another where a model has several parts.
    """
    if isinstance(value, Mapping):
        return {name: _without_places(name, inner, base_model) for name, inner in value.items()}
    if isinstance(value, str) and key == _BEST:
        return None
    if not isinstance(value, str) or not is_local(value):
        return value
    if key == _BASE_KEY:
        return base_model
    return "" if key in _NAME_KEYS else None if key.endswith(_PLACES) else value


def _manifest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the last part of paths, which often names the step, and nothing before it."""
    changed = dict(document)
    for part in ("source", "options"):
        if part in changed:
            changed[part] = _without_folders(changed[part])
    return changed


def _without_folders(value: Any, key: str = "") -> Any:
    if isinstance(value, str) and (key in _PATH_KEYS or is_local(value)):
        return value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lstrip("~")
    if isinstance(value, Mapping):
        return {name: _without_folders(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, key) for inner in value]
    return value


def scrubbed_card(text: str) -> str:
    """Returns a model card whose metadata names no local base, which the Hub would refuse."""
    found = _FRONT.match(text)
    if found is None:
        return text
    kept = _without_local_bases(found[2].splitlines(keepends=True))
    return f"{found[1]}{''.join(kept)}{found[3]}{text[found.end() :]}"


def _without_local_bases(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a card's metadata without local places under `base_model`.

    Libraries write these. All other keys are the author's, whatever they hold.
    """
    below = ""
    for line in lines:
        key, item = _KEY.match(line), _ITEM.match(line)
        below = key[1] if key is not None else below
        told = key[2] if key is not None else item[1] if item is not None else ""
        place = _BASE_TAG.sub("", told.strip())
        is_of_base = below == _BASE_MODEL or place != told.strip()
        if not (is_of_base and is_local(place)):
            yield line


def scrubbed_content(path: str, data: bytes, document: Any, base_model: str | None) -> bytes:
    """Returns a file's content as it is published; the same bytes where nothing is taken out.

    Args:
        path: The file.
        data: Its content.
        document: The content parsed, where it is JSON.
        base_model: The base's repository, where it is known.
    """
    if path == CARD:
        changed = scrubbed_card(data.decode(errors="surrogateescape"))
        return changed.encode(errors="surrogateescape")
    new = scrubbed(path, document, base_model)
    if new == document:
        return data
    return model_config_to_json(new) if posixpath.basename(path) == CONFIG else to_json(new)
