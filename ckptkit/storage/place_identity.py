"""Whether two places are the same or overlap, and which file system holds a path.

Two paths are one place if they lead to the same device and inode. Two URLs are one place if they
are the same after normalising: kind of store, endpoint, bucket and names. Where an endpoint is not
known, or an address and a host name may be one machine, they count as one: the caller refuses, and
the user names another place.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property
from ipaddress import ip_address
from itertools import permutations
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from ckptkit.storage.locations import PathLike, Place, is_url, local_path, place_of, store_kind

_ENDPOINTS = ("endpoint_url", "account_host", "account_name", "host")
_CONTAINER = re.compile(r"([^/@]+)@([^/.]+)[^/]*")  # of Azure: container and account
_ACCESS_POINT = re.compile(
    r"(arn:[^/]*(?::accesspoint[/:][^/]+)|[^/]+-s3alias)(?:/(.*))?", re.DOTALL
)
_AMAZON = re.compile(r"(?:.*\.)?amazonaws\.com(\.cn)?")
_THIS_MACHINE = "localhost"
_MOUNTS = Path("/proc/self/mountinfo")
# Their clients each keep whole pages of a file, and write back what they did not change.
_SEPARATE_CACHES = frozenset({"9p", "afs", "cifs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"})
_OTHER_FUSE = ("fuse.ceph-fuse", "fuse.fuse-overlayfs", "fuse.lxcfs")
_Names = tuple[str, ...]


class PlaceRelation(Enum):
    """How a first place is related to a second one."""

    NONE = "none"
    SAME = "same"
    INSIDE = "inside"
    """The first is inside the second."""
    AROUND = "around"
    """The second is inside the first."""


class PlaceIdentity:
    """What a place is, however it is written."""

    def __init__(self, place: PathLike) -> None:
        self._place = place_of(place)
        self._is_remote = is_url(self._place)
        self._kind = store_kind(self._place.protocol) if self._is_remote else "file"

    def compare(self, other: PlaceIdentity) -> PlaceRelation:
        """Returns how this place is related to another one."""
        if self._kind != other._kind:
            return PlaceRelation.NONE
        if not self._is_remote:
            try:
                (mine, my_rest), (theirs, their_rest) = self._inodes, other._inodes
            except OSError:
                return PlaceRelation.NONE
            if mine[-1] == theirs[-1]:
                return _compare_names(my_rest, their_rest)
            if not their_rest and theirs[-1] in mine:
                return PlaceRelation.INSIDE
            is_around = not my_rest and mine[-1] in theirs
            return PlaceRelation.AROUND if is_around else PlaceRelation.NONE
        first, second = self._names, other._names
        if any(_ACCESS_POINT.fullmatch(names[0]) for names in (first, second)):
            first, second = first[1:], second[1:]  # an access point is an alias of a bucket
        relation = _compare_names(first, second)
        is_one = relation is not PlaceRelation.NONE and (
            (self._place.protocol, self._place.options)
            == (other._place.protocol, other._place.options)
            or _may_be_one(self._endpoint, other._endpoint)
        )
        return relation if is_one else PlaceRelation.NONE

    @cached_property
    def name(self) -> str:
        """A text that all spellings of a URL have in common.

        Journals of watches are named after it. It holds the address of the store where that is
        known, of Amazon's the partition alone.
        """
        return f"{self._kind}://{self._endpoint}/{'/'.join(self._names)}"

    @cached_property
    def _names(self) -> _Names:
        """Bucket and folders of a URL."""
        inner = self._place.inner_path
        if self._kind == "az":
            inner = _CONTAINER.sub(r"\1", inner, count=1)
        access_point = _ACCESS_POINT.fullmatch(inner)
        bucket, key = (
            inner.partition("/")[::2] if access_point is None else access_point.group(1, 2)
        )
        # What some clients make of `..` and of double slashes on the way.
        plain = posixpath.normpath(key).strip("/") if key else ""
        return (bucket, *(plain.split("/") if plain not in {"", "."} else ()))

    @cached_property
    def _endpoint(self) -> str:
        """The address of the store, normalised; empty where it is not known."""
        if self._kind == "memory":
            return ""
        if self._kind == "s3":
            return _normalize_endpoint(_find_s3_endpoint(self._place))
        inner = self._place.options.get("client_kwargs")
        options = {**(inner if isinstance(inner, Mapping) else {}), **self._place.options}
        named = [str(options[name]) for name in _ENDPOINTS if options.get(name)]
        container = _CONTAINER.match(self._place.inner_path)
        named += [container[2]] if container else []
        return _normalize_endpoint(named[0]) if named else ""

    @cached_property
    def _inodes(self) -> tuple[tuple[tuple[int, int], ...], _Names]:
        """Device and inode of the folders above a path and of itself; names that are missing."""
        path = local_path(self._place).resolve()
        missing: list[str] = []
        while not path.exists() and path != path.parent:
            missing.append(path.name)
            path = path.parent
        stats = [folder.stat() for folder in (*reversed(path.parents), path)]
        return tuple((stat.st_dev, stat.st_ino) for stat in stats), tuple(reversed(missing))


def find_overlap(first: PathLike, second: PathLike) -> PlaceRelation:
    """Returns how the first of two places is related to the second."""
    return PlaceIdentity(first).compare(PlaceIdentity(second))


def find_overlaps(places: Sequence[PathLike]) -> Iterator[tuple[int, int, PlaceRelation]]:
    """Yields pairs of places that are the same, once, or where the first is inside the second.

    A pair is the indexes of both, and how the first is related to the second.
    """
    identities = [PlaceIdentity(place) for place in places]
    for first, second in permutations(range(len(identities)), 2):
        relation = identities[first].compare(identities[second])
        is_same = relation is PlaceRelation.SAME and first > second
        if is_same or relation is PlaceRelation.INSIDE:
            yield first, second, relation


def _compare_names(first: Sequence[str], second: Sequence[str]) -> PlaceRelation:
    if first == second:
        return PlaceRelation.SAME
    if first[: len(second)] == second:
        return PlaceRelation.INSIDE
    return PlaceRelation.AROUND if second[: len(first)] == first else PlaceRelation.NONE


def _find_s3_endpoint(place: Place) -> str:
    """Returns the URL that the client would ask, from options, environment or its own files."""
    from ckptkit.storage.remote.store import get_store  # late: it imports fsspec

    try:
        filesystem = get_store(place).filesystem
        filesystem.connect()
        return str(filesystem.s3.meta.endpoint_url)
    except Exception:  # noqa: BLE001  what cannot be opened is refused by who opens it
        return ""


def _normalize_endpoint(endpoint: str) -> str:
    """Returns one text for all spellings of an endpoint; `http` counts as `https`."""
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        host, port = (parts.hostname or "").rstrip("."), parts.port or 443
    except ValueError:
        return endpoint
    amazon = _AMAZON.fullmatch(host)
    if amazon or not host:
        return f"amazon{amazon[1] or ''}" if amazon else ""
    with suppress(ValueError):  # a name
        address = ip_address(host.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        is_here = address.is_loopback or address.is_unspecified
        host = _THIS_MACHINE if is_here else str(address)
    return f"{host}:{443 if port == 80 else port}"  # noqa: PLR2004  the port of `http`


def _may_be_one(first: str, second: str) -> bool:
    """Says whether two endpoints may be those of one store: an address may be that of a name."""
    if first == second or not (first and second):
        return True
    (host, port), (other, other_port) = map(_split_port, (first, second))
    return port == other_port and _is_address(host) != _is_address(other)


def _split_port(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.rpartition(":")
    return (host, port) if host else (endpoint, "443")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


class Mount(Struct, frozen=True):
    """A file system, or a folder of one, that is mounted somewhere."""

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
    try:
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ()
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

    On one machine all share one page cache, but what a program behind FUSE does with their writes
    is not known even then.
    """
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in _OTHER_FUSE)
    if is_fuse or (kind in _SEPARATE_CACHES and not is_one_machine):
        return f"its file system, {kind}, does not take ranges of one file from several machines"
    return ""


def _unescaped(name: str) -> str:
    for character in " \t\n\\":
        name = name.replace(f"\\{ord(character):03o}", character)
    return name
