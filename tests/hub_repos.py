"""What a stand-in Hub keeps: repositories, their commits and refs, and the content of files."""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LFS_BYTES = 10_000_000
_LFS_SUFFIX = re.compile(r"\.(safetensors|bin|pt|pth|distcp|h5|msgpack|onnx|model)$")
_HAS_VERIFICATION = 0x80000000
_HAS_METADATA = 0x40000000
_ENTRY_BYTES = 48


def git_blob_id(data: bytes) -> str:
    """What git calls a file of that content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Blob:
    """A file of a commit: a regular one, or one that lies in the store of large files."""

    oid: str
    """git's id of a regular file, SHA-256 of a large one."""
    size: int
    is_large: bool


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    message: str
    description: str
    files: dict[str, Blob]
    changed: tuple[str, ...] = ()
    """Paths that were added or replaced by it."""
    deleted: tuple[str, ...] = ()


@dataclass
class Repo:
    id: str
    private: bool
    commits_by_oid: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[str, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, tag, pull request or (short) id names."""
        for refs in (self.branches, self.tags, self.pull_requests):
            if revision in refs:
                return refs[revision]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            return next((oid for oid in self.commits_by_oid if oid.startswith(revision)), None)
        return None

    def head(self, revision: str = "main") -> Commit:
        oid = self.resolve(revision)
        assert oid is not None, f"there is no {revision!r} in {self.id}"
        return self.commits_by_oid[oid]

    def history(self, revision: str = "main") -> Iterator[Commit]:
        """The commits of a revision, newest first."""
        oid = self.resolve(revision)
        while oid is not None:
            yield self.commits_by_oid[oid]
            oid = self.commits_by_oid[oid].parent

    @property
    def commits(self) -> list[Commit]:
        """Those of `main` that somebody pushed, oldest first: without the one that made it."""
        return list(self.history())[-2::-1]

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.head(revision).files

    def add(self, ref: str, commit: Commit) -> None:
        self.commits_by_oid[commit.oid] = commit
        refs = self.pull_requests if ref.startswith("refs/pr/") else self.branches
        refs[ref] = commit.oid


def initial_repo(repo_id: str, *, private: bool) -> Repo:
    repo = Repo(repo_id, private)
    oid = hashlib.sha1(repo_id.encode(), usedforsecurity=False).hexdigest()
    repo.add("main", Commit(oid, None, "initial commit", "", {}))
    return repo


def goes_to_large_files(path: str, size: int) -> bool:
    return size > LFS_BYTES or (size > 0 and _LFS_SUFFIX.search(path) is not None)


def _hash_text(raw: bytes) -> str:
    """How Xet writes a hash: as four little-endian numbers."""
    return b"".join(raw[at : at + 8][::-1] for at in range(0, 32, 8)).hex()


@dataclass(frozen=True)
class XetFile:
    hash: str
    size: int


def xet_files(folder: Path) -> dict[str, XetFile]:
    """What the shards in a local Xet store tell of the files in it, by SHA-256.

    Source: the Xet protocol's shard format (file info section, 48-byte entries).
    """
    found: dict[str, XetFile] = {}
    for shard in sorted(folder.glob("xet/xorbs/shards/*.mdb")):
        data = shard.read_bytes()
        at = _ENTRY_BYTES  # behind the header
        while data[at : at + 32] != b"\xff" * 32:
            name = _hash_text(data[at : at + 32])
            flags, count = struct.unpack_from("<II", data, at + 32)
            at += _ENTRY_BYTES
            size = sum(
                struct.unpack_from("<I", data, at + _ENTRY_BYTES * n + 36)[0] for n in range(count)
            )
            at += _ENTRY_BYTES * count * (2 if flags & _HAS_VERIFICATION else 1)
            if flags & _HAS_METADATA:
                found[_hash_text(data[at : at + 32])] = XetFile(name, size)
                at += _ENTRY_BYTES
    return found


def xorb_bytes(folder: Path) -> int:
    """How many bytes of content were sent to a local Xet store."""
    return sum(path.stat().st_size for path in folder.glob("xet/xorbs/xorbs/default.*"))
