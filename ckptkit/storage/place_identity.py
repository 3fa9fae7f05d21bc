"""What a place is: its file system or store, and whether two places are the same or overlap.

Places are compared by what they are, however they are written.
"""

from __future__ import annotations

import posixpath
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from ckptkit.storage.locations import PathLike, Place, is_url, local_path, place_of, store_kind

_LOCAL = "file"
_S3 = "s3"
_IN_MEMORY = "memory"
_ENDPOINTS = ("endpoint_url", "account_host", "account_name", "host")
_ACCOUNT = re.compile(r"AccountName=([^;]+)", re.IGNORECASE)
_CONTAINER = re.compile(r"([^/@]+)@([^/]+)")  # of Azure: container and account
_ACCESS_POINT = re.compile(r"arn:[^/]*(?::accesspoint[/:][^/]+)|[^/]+-s3alias")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AMAZON = re.compile(r"(?:.*\.)?amazonaws\.com(\.cn)?")
_THIS_MACHINE = "localhost"
_MOUNTS = Path("/proc/self/mountinfo")
# Their clients each keep whole pages of a file, and write back what they did not change.
_SEPARATE_CACHES = frozenset({"9p", "afs", "cifs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"})
_OTHER_FUSE = ("fuse.ceph-fuse", "fuse.fuse-overlayfs", "fuse.lxcfs")


class PlaceRelation(Enum):
    """How a first place is related to a second one."""

    NONE = "none"
    SAME = "same"
    INSIDE = "inside"
    """The first is inside the second."""
    AROUND = "around"
    """The second is inside the first."""


class PlaceIdentity:
    """What a place is: a kind of store, names from its top to the place, and the way to it.

    Attributes:
        place: The place.
        kind: Of its store; `s3a` is `s3`.
        names: Of bucket and folders, or of the file system and its folders.
    """

    def __init__(self, place: PathLike) -> None:
        self.place = place_of(place)
        self.kind = store_kind(self.place.protocol) if is_url(self.place) else _LOCAL
        self.names: tuple[str, ...]
        if self.kind != _LOCAL:
            self.names = _remote_names(self.place, self.kind)
            return
        real = local_path(self.place).resolve()
        mount = find_mount(real, read_mounts())
        # From the top of the file system on, since a path may be mounted twice.
        self.names = (
            ("", *real.parts)
            if mount is None
            else (mount.device, *mount.root.parts, *real.relative_to(mount.place).parts)
        )

    def overlap(self, other: PlaceIdentity) -> PlaceRelation:
        """Returns how this place is related to another one.

        Without a sign that the stores differ, they count as one.
        """
        if self.kind != other.kind:
            return PlaceRelation.NONE
        if self.kind == _LOCAL:
            named = _compare_names(self.names, other.names)
            return self._compare_files(other) if named is PlaceRelation.NONE else named
        first, second = self.names, other.names
        if _ACCESS_POINT.fullmatch(first[0]) or _ACCESS_POINT.fullmatch(second[0]):
            first, second = first[1:], second[1:]  # an access point is an alias of a bucket
        relation = _compare_names(first, second)
        mine, theirs = self.place, other.place
        are_alike = mine.protocol == theirs.protocol and mine.options == theirs.options
        if relation is PlaceRelation.NONE or self.kind == _IN_MEMORY or are_alike:
            return relation
        ends = self._endpoint, other._endpoint
        return PlaceRelation.NONE if all(ends) and not _may_be_one(*ends) else relation

    @cached_property
    def name(self) -> str:
        """A text that places which are written in different ways have in common.

        It holds the address of the store where that is known, of Amazon's the partition alone.
        """
        end = "" if self.kind in {_LOCAL, _IN_MEMORY} else _store_name(self._endpoint)
        return f"{self.kind}://{end}/{'/'.join(self.names)}"

    @cached_property
    def _endpoint(self) -> str:
        """The address of the store; empty where that is not known."""
        if self.kind == _S3:
            return _find_s3_endpoint(self.place)
        inner = self.place.options.get("client_kwargs")
        options = {**(inner if isinstance(inner, Mapping) else {}), **self.place.options}
        container = _CONTAINER.match(self.place.inner_path)
        account = _ACCOUNT.search(str(options.get("connection_string", "")))
        named = [str(options[name]) for name in _ENDPOINTS if options.get(name)]
        named += [container[2].partition(".")[0]] if container else []
        return next(iter(named), account[1] if account else "")

    @cached_property
    def _files(self) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
        """The numbers of the folders above the path and of itself, and what is not there yet."""
        path = local_path(self.place).resolve()
        missing: list[str] = []
        while not path.exists() and path != path.parent:
            missing.append(path.name)
            path = path.parent
        stats = [folder.stat() for folder in (path, *path.parents)]
        numbers = tuple((stat.st_dev, stat.st_ino) for stat in reversed(stats))
        return numbers, tuple(reversed(missing))

    def _compare_files(self, other: PlaceIdentity) -> PlaceRelation:
        """Compares by the numbers of folders: file systems may take names of other case for one."""
        try:
            (mine, my_rest), (theirs, their_rest) = self._files, other._files
        except OSError:
            return PlaceRelation.NONE
        if mine[-1] == theirs[-1]:
            return _compare_names(my_rest, their_rest)
        if not their_rest and theirs[-1] in mine:
            return PlaceRelation.INSIDE
        return PlaceRelation.AROUND if not my_rest and mine[-1] in theirs else PlaceRelation.NONE


def find_overlap(first: PathLike, second: PathLike) -> PlaceRelation:
    """Returns how the first of two places is related to the second.

    Places are compared by what they are: links and mounts are followed, `file://` is a path,
    `s3a://` is `s3://`, and an endpoint is that which the client uses, wherever it is configured.
    Where nothing shows that two endpoints are different stores, they count as one.
    """
    return PlaceIdentity(first).overlap(PlaceIdentity(second))


def find_overlaps(places: Sequence[PathLike]) -> Iterator[tuple[int, int, PlaceRelation]]:
    """Yields pairs of places that are the same, or where the first is inside the second.

    Many places take little time: each is compared with those alone whose names it begins with.

    Yields:
        The indexes of both, and how the first is related to the second.
    """
    identities = [PlaceIdentity(place) for place in places]
    # Names of other case may be one file.
    names = [tuple(name.casefold() for name in identity.names) for identity in identities]
    order = sorted(range(len(identities)), key=lambda index: (identities[index].kind, names[index]))
    around: list[int] = []
    for index in order:
        identity = identities[index]
        around = [
            other
            for other in around
            if identities[other].kind == identity.kind
            and names[other] == names[index][: len(names[other])]
        ]
        for other in around:
            relation = identity.overlap(identities[other])
            if relation is not PlaceRelation.NONE:
                yield index, other, relation
        around.append(index)


def _compare_names(first: Sequence[str], second: Sequence[str]) -> PlaceRelation:
    if first == second:
        return PlaceRelation.SAME
    if first[: len(second)] == second:
        return PlaceRelation.INSIDE
    return PlaceRelation.AROUND if second[: len(first)] == first else PlaceRelation.NONE


def _remote_names(place: Place, kind: str) -> tuple[str, ...]:
    inner = place.inner_path
    if kind == "az":
        inner = _CONTAINER.sub(r"\1", inner, count=1)
    bucket, _, key = inner.partition("/")
    access_point = _ACCESS_POINT.match(inner)
    if access_point is not None:
        bucket, key = access_point[0], inner[access_point.end() :].lstrip("/")
    # What some clients make of `..` and of double slashes on the way.
    plain = posixpath.normpath(key).strip("/") if key else ""
    return (bucket, *(plain.split("/") if plain not in {"", "."} else ()))


def _find_s3_endpoint(place: Place) -> str:
    """Returns the URL that the client would ask, from options, environment or its own files."""
    from ckptkit.storage.remote.store import get_store  # late: it imports fsspec

    try:
        filesystem = get_store(place).filesystem
        filesystem.connect()
        return str(filesystem.s3.meta.endpoint_url)
    except Exception:  # noqa: BLE001  what cannot be opened is refused by who opens it
        return ""


def _may_be_one(first: str, second: str) -> bool:
    """Says whether two endpoints may be those of one store."""
    try:
        (host, port), (other, other_port) = _split_endpoint(first), _split_endpoint(second)
    except ValueError:
        return True
    amazon = _AMAZON.fullmatch(host), _AMAZON.fullmatch(other)
    if amazon[0] and amazon[1]:  # names of buckets are unique in all regions
        return amazon[0][1] == amazon[1][1]
    if port != other_port:
        return False
    return host == other or bool(_resolve_host(host) & _resolve_host(other))


def _store_name(endpoint: str) -> str:
    """Returns one name for all spellings of an endpoint that need no lookup."""
    try:
        host, port = _split_endpoint(endpoint)
    except ValueError:
        return endpoint
    amazon = _AMAZON.fullmatch(host)
    if amazon or not host:
        return f"amazon{amazon[1] or ''}" if amazon else ""
    try:
        is_here = host == _THIS_MACHINE or _normalize_address(host) == _THIS_MACHINE
    except ValueError:  # a name
        is_here = False
    return f"{_THIS_MACHINE if is_here else host}:{port}"


def _split_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns host and port; the port of `http` counts as that of `https`."""
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 443)
    return host, 443 if port in _DEFAULT_PORTS.values() else port


def _resolve_host(host: str) -> frozenset[str]:
    """Returns the addresses of a host, all those of this machine by one name."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(_normalize_address(entry) for entry in addresses)


def _normalize_address(text: str) -> str:
    address = ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    is_here = mapped.is_loopback or mapped.is_unspecified
    return _THIS_MACHINE if is_here else str(mapped)


class Mount(Struct, frozen=True):
    """A file system, or a folder of one, that is mounted somewhere.

    Attributes:
        device: The numbers of the file system.
        root: The folder of it that is mounted.
        place: Where.
        kind: Its type.
        source: What is mounted there, such as a device or a server.
        options: Of the mount and of the file system.
    """

    device: str
    root: Path
    place: Path
    kind: str
    source: str = ""
    options: frozenset[str] = frozenset()


def read_mounts(mounts: Path = _MOUNTS) -> tuple[Mount, ...]:
    """Returns what is mounted, in its order; nothing where the system does not report it.

    Source:
        https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    with suppress(OSError):
        return _parse_mounts(mounts.read_text(encoding="utf-8", errors="surrogateescape"))
    return ()


@lru_cache(maxsize=2)  # a batch compares thousands of places, and mounts seldom change meanwhile
def _parse_mounts(text: str) -> tuple[Mount, ...]:
    entries = []
    # The kernel escapes spaces and newlines, but not all at which `splitlines` and `split()` cut.
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        _, _, device, root, place, own = left.split(" ")[:6]
        kind, source, *further = right.split(" ")
        options = frozenset(",".join([own, *further]).split(","))
        if "\\" in line:
            root, place, source = _unescaped(root), _unescaped(place), _unescaped(source)
        entries.append(Mount(device, Path(root), Path(place), kind, source, options))
    return tuple(entries)


def find_mount(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Returns the mount that holds a path, links followed; None where that is not known."""
    best = None
    for mount in mounts:
        is_deeper = best is None or len(mount.place.parts) >= len(best.place.parts)
        if is_deeper and path.is_relative_to(mount.place):
            best = mount  # later ones cover earlier ones
    return best


def find_filesystem_type(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that holds a path, or will; empty where unknown."""
    with suppress(OSError):
        mount = find_mount(path.resolve(), read_mounts(mounts))
        return "" if mount is None else mount.kind
    return ""


def why_not_shared(kind: str, *, is_one_machine: bool = False) -> str:
    """Returns why several processes cannot write one file at once; empty if they can.

    Args:
        kind: As `find_filesystem_type` returns it.
        is_one_machine: Whether all of them share one kernel, and so its one page cache; what a
            program behind FUSE does with their writes is not known even then.
    """
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in _OTHER_FUSE)
    if is_fuse or (kind in _SEPARATE_CACHES and not is_one_machine):
        return f"its file system, {kind}, does not take ranges of one file from several machines"
    return ""


def _unescaped(name: str) -> str:
    for character in " \t\n\\":
        name = name.replace(f"\\{ord(character):03o}", character)
    return name
