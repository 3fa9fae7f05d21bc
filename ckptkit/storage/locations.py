"""Paths and URLs as the user gives them, the options of their storage, and names below them.

Options are `key=value` pairs on the command line, and nested values in Python. Names are judged
without looking at a disk, but for whether the current directory is there.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Self

from ckptkit.core.errors import UnsafePathError, UsageError

PathLike = str | os.PathLike[str]
_MOST_NAME_BYTES = 255  # of Linux and macOS
_MOST_PATH_BYTES = 4095
_FILE = re.compile(r"(?:file|local)://(?:localhost(?=/|$))?", re.IGNORECASE)
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_WEB = frozenset({"http", "https"})
S3_PROTOCOLS = frozenset({"s3", "s3a"})
# A user with a password, where a host or a bucket begins; the keys of S3 may hold slashes. Neither
# the name of an access point is one, nor is a port.
_USER = re.compile(r"(?!arn:)[^/@]*:(?!\d+/)[^@]*@")
WORK_INFIX = ".ckptkit-"
"""In the names of the hidden folders in which outputs are staged."""
STAGED_FILES = "files"
"""In such a folder: what will have the name, where some tool would take it for that already."""
BESIDE_FILES = ".ckptkit-model"
"""Where integrations write a model for a folder that keeps its other files, before they move it."""
MARKS_FOLDER = ".ckptkit"
"""In the folder of a run: what the processes that use it leave for one another."""


class Place(str):
    """A location with the options of its storage, such as an endpoint and its keys.

    It is a `str`, and is accepted wherever a path is. Joining or slicing it returns a plain `str`;
    `beside` returns a place.

    Attributes:
        options: For fsspec. They may be secrets, so no message and no `repr` shows them.
    """

    __slots__ = ("options",)

    options: Mapping[str, Any]

    def __new__(cls, location: PathLike, options: Mapping[str, Any] | None = None) -> Self:
        place = super().__new__(cls, _normalize(os.fspath(location)))
        place.options = dict(options or {})
        return place

    @property
    def location(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        """Returns a URL as a place, with its options, and a path as a plain `str`.

        Code that calls `str` on its arguments keeps the options so; `pathlib` takes a plain `str`.
        """
        return self if is_url(self) else self.location

    @property
    def protocol(self) -> str:
        match = _URL.fullmatch(self)
        return match[1] if match else ""

    @property
    def inner_path(self) -> str:
        """The rest of a URL: bucket and key, or whatever its storage makes of it."""
        match = _URL.fullmatch(self)
        return match[2].strip("/") if match else self.location

    def beside(self, location: str) -> Place:
        return Place(location, self.options)

    def __reduce__(self) -> tuple[type[Place], tuple[str, Mapping[str, Any]]]:
        """For pickles: the engine that runs on other machines needs the options there."""
        return Place, (self.location, self.options)


def place_of(path: PathLike, options: Mapping[str, Any] | None = None) -> Place:
    if isinstance(path, Place) and (path.options or not options):
        return path
    place = Place(path)
    return Place(place, options) if is_url(place) else place


class Sources:
    """All places that a command reads, and the options for them; it is about the first one."""

    def __init__(self, first: PathLike, options: Mapping[str, Any] | None) -> None:
        self.first = place_of(first, options)
        self._options = options

    def place(self, path: PathLike) -> Place:
        """Returns a further place, with the options if they fit it.

        They fit where both are URLs of one protocol, or where the first one is a path, which needs
        none. A store of another kind does not know them, and must not see their secrets.
        """
        kinds = {store_kind(place.protocol) for place in (self.first, Place(path))}
        fits = not is_url(self.first) or len(kinds) == 1
        return place_of(path, self._options if fits else None)

    def optional(self, path: PathLike | None) -> Place | None:
        return None if path is None else self.place(path)

    def further(self, paths: Iterable[PathLike]) -> tuple[Place, ...]:
        return tuple(self.place(path) for path in paths)


def resolve_places(
    src: PathLike, out: PathLike | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    sources = Sources(src, options.get("src_options"))
    named = ("base", "like", "adapter_config", "model_config", "config", "tokenizer", "fill_from")
    return {
        **options,
        **{name: sources.optional(options.get(name)) for name in named},
        "src": sources.first,
        "out": None if out is None else place_of(out, options.get("dst_options")),
        "also": sources.further(options.get("also", ())),
    }


def is_url(place: PathLike) -> bool:
    return _URL.fullmatch(_normalize(os.fspath(place))) is not None


_NOT_WRITTEN = frozenset({"hf", "http", "https", "ftp"})


def is_hub_bucket(place: PathLike) -> bool:
    """Says whether a URL names a bucket of the Hub, or means to; the others are repositories."""
    return f"{os.fspath(place)}/".lower().startswith("hf://buckets/")


def is_read_only(place: Place) -> bool:
    """Says whether ckptkit cannot write to a URL, with any permission."""
    return place.protocol in _NOT_WRITTEN and not is_hub_bucket(place)


def local_path(place: PathLike) -> Path:
    """Returns the path of a place on this machine, which a `file://` URL is too."""
    path = Path(_normalize(os.fspath(place)))
    try:
        path.absolute()
    except OSError as error:
        raise UsageError(
            "is relative to the current directory, which was removed",
            where=os.fspath(place),
            hint="change to a directory that exists, or name an absolute path",
        ) from error
    return path


def current_directory() -> Path | None:
    with suppress(OSError):
        return Path.cwd()
    return None


def is_run_in(folder: Path) -> bool:
    """Returns whether this process runs in a directory, or below it."""
    here = current_directory()
    return here is not None and here.is_relative_to(folder.resolve())


def store_kind(protocol: str) -> str:
    return _ALIASES.get(protocol, protocol)


def _check_usable(location: str) -> None:
    """Refuses a location that no system call and no store accepts.

    Bytes of a name that are no UTF-8 are surrogates here, which paths may hold and URLs may not.
    """
    is_remote = "://" in location
    try:
        data = location.encode(errors="strict" if is_remote else "surrogateescape")
    except UnicodeEncodeError:
        data = b"\0"
    too_long = len(data) > _MOST_PATH_BYTES or max(map(len, data.split(b"/"))) > _MOST_NAME_BYTES
    if b"\0" in data or (too_long and not is_remote):
        what = "holds a character that no path has" if b"\0" in data else "is too long for a path"
        raise UsageError(f"{ascii(location)[:80]} {what}", hint="see where the path comes from")


def _normalize(location: str) -> str:
    """Returns a path for a `file://` URL, and other URLs as stores and fsspec expect them.

    fsspec knows its protocols in small letters only.
    """
    _check_usable(location)
    local = _FILE.match(location)
    if local is not None:
        return location[local.end() :] or "/"
    match = _URL.fullmatch(location)
    if match is None:
        return location
    scheme, rest = match[1].lower(), match[2]
    if _USER.match(rest):
        raise UsageError(
            "holds a password, which would end up in messages and manifests",
            where=f"{scheme}://…{rest.rpartition('@')[2]}",
            hint="pass it with --src-option or --dst-option, or in the environment",
        )
    if scheme in _WEB and "?" in rest:
        raise UsageError(
            "has a query, as signed URLs do, with which the server is asked for one file alone",
            where=f"{scheme}://{rest.partition('?')[0]}?…",
            hint="name the folder or the file without a query, or download it first; an object of"
            " a bucket is named as s3://bucket/key, with its keys in --src-option",
        )
    return f"{scheme}://{rest.rstrip('/')}"


_SECRETS = ("key", "secret", "token", "password", "sas", "credential", "credentials")
_SHORTEST_SECRET = 4
_HIDDEN = "***"


def parse_options(pairs: Sequence[str], *, option: str) -> dict[str, Any]:
    """Reads `K=V` pairs; dots in a name make nested options, and values may be JSON.

    What is named like a secret stays the text that it is, even if it looks like a number.

    >>> parse_options(["anon=true", "client_kwargs.region_name=eu-1"], option="--src-option")
    {'anon': True, 'client_kwargs': {'region_name': 'eu-1'}}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        path = name.strip().split(".")
        if not equals or not all(path):
            raise UsageError(
                "no pair of a name and a value was found",
                where=option,
                hint=f"pass {option} NAME=VALUE, such as {option}"
                " client_kwargs.endpoint_url=http://localhost:9000",
            )
        value: Any = text
        if path[-1].lower().rpartition("_")[2] not in _SECRETS:
            with suppress(ValueError, RecursionError):  # then it is no JSON, and stays a text
                value = json.loads(text)
        _put(options, path, value, option)
    return options


def _put(options: dict[str, Any], path: Sequence[str], value: Any, option: str) -> None:
    inner: Any = options
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            break
    if not isinstance(inner, dict) or path[-1] in inner:
        raise UsageError(f"{'.'.join(path)!r} is given twice", where=option)
    inner[path[-1]] = value


def hide_values(text: str, options: Mapping[str, Any]) -> str:
    for value in sorted(_iterate_texts(options), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    return text


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _iterate_texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _iterate_texts(inner)
    elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET:
        yield value


def is_work_folder(name: str) -> bool:
    return name.startswith(".") and WORK_INFIX in name


def hidden_name(name: str, mark: str) -> str:
    """Returns the name of a hidden folder in which the folder `name` is staged or removed.

    >>> hidden_name("checkpoint-5", "0123abcd-1")
    '.checkpoint-5.ckptkit-0123abcd-1'
    """
    return f".{name}{WORK_INFIX}{mark}"


_STAGED = re.compile(
    rf"(?:(?P<folder>[^/]+)/)?\.(?P<name>[^/]+?){re.escape(WORK_INFIX)}[0-9a-f]{{8,}}(?:-\d+)?"
    rf"(?:/{STAGED_FILES})?(?![^/])"
)


def unstaged_path(path: str) -> str:
    """Returns a path as the user knows it: where what is staged in a hidden folder will be.

    >>> unstaged_path("runs/.checkpoint-5.ckptkit-0123abcd-1/rng.bin")
    'runs/checkpoint-5/rng.bin'
    >>> unstaged_path("out/.out.ckptkit-0123456789abcdef/files/model.safetensors")
    'out/model.safetensors'
    """

    def replace(found: re.Match[str]) -> str:
        folder, name = found["folder"], found["name"]
        return name if folder in {None, name} else f"{folder}/{name}"

    return _STAGED.sub(replace, path).replace(f"/{BESIDE_FILES}", "")


def check_relative(path: str, where: str) -> None:
    """Refuses a path that would lead out of the folder it is relative to."""
    pure = PurePath(path)
    if pure.anchor or ".." in pure.parts or not pure.parts or "\0" in path:
        raise UnsafePathError(
            f"the file name {path!r} was found where a path inside the folder was expected",
            where=where,
        )


def relative_path(path: str, folder: str) -> str:
    """Returns how a path of a source is written from a folder of it; both are below its root.

    >>> relative_path("run/step/model", "run"), relative_path("run", "run"), relative_path("a", "")
    ('step/model', '.', 'a')
    """
    # With a root, since `relpath` looks for the current directory without one.
    return posixpath.relpath(f"/{path}", f"/{folder}")


def path_within(path: str, folder: str) -> str | None:
    """Returns the part of a path after a folder, which is empty for the folder; None elsewhere."""
    if path == folder:
        return ""
    return path.removeprefix(f"{folder}/") if path.startswith(f"{folder}/") else None


def check_below(name: str, place: str) -> None:
    """Refuses to remove an object whose relative name does not lead below a place of a store."""
    parts = name.removesuffix("/").split("/")
    if not place.strip("/") or not set(parts).isdisjoint({"", ".", ".."}):
        raise UnsafePathError(
            f"{name!r} was to be removed, which is no name below the place",
            where=place,
            hint="nothing was removed; remove it by hand if it is not needed",
        )
