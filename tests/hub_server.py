"""A stand-in Hub: what the unmodified `huggingface_hub` client talks to, over HTTP.

It keeps repositories and buckets in memory and large files in a folder, knows who may write where,
and misbehaves on request. Large files go the Xet way (the client writes into a local store whose
address it is given) or, with `xet=False`, the older way of one PUT each; files of buckets always go
the Xet way.

Source: what `huggingface_hub` 2.4 sends and expects, seen on the wire.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 10_000_000
_LFS_SUFFIX = re.compile(r"\.(safetensors|bin|pt|pth|distcp|h5|msgpack|onnx|model)$")
_HAS_VERIFICATION = 0x80000000
_HAS_METADATA = 0x40000000
_ENTRY_BYTES = 48
_READ_TRIES = 50


def git_blob_id(data: bytes) -> str:
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


@dataclass(frozen=True)
class BucketEntry:
    """A file of a bucket, whose content is in the Xet store; buckets keep no earlier ones."""

    xet_hash: str
    size: int
    uploaded: float


@dataclass
class Bucket:
    id: str
    private: bool = False
    files: dict[str, BucketEntry] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


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
    sha256: str = ""
    """Of those that a client sent with it, as it does for repositories."""


def xet_files(folder: Path) -> list[XetFile]:
    """What the shards in a local Xet store tell of the files in it.

    Source: the Xet protocol's shard format (file info section, 48-byte entries).
    """
    found: list[XetFile] = []
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
            sha256 = ""
            if flags & _HAS_METADATA:
                sha256 = _hash_text(data[at : at + 32])
                at += _ENTRY_BYTES
            found.append(XetFile(name, size, sha256))
    return found


def xorb_bytes(folder: Path) -> int:
    """How many bytes of content were sent to a local Xet store."""
    return sum(path.stat().st_size for path in folder.glob("xet/xorbs/xorbs/default.*"))


Fault = int | Literal["drop", "lost"]
"""A status to answer with; or to hang up at once; or to do what was asked and then hang up."""
TOKEN = "hf_" + "Aa1" * 12
"""Of the user `me`, who is also in the organisation `org`."""


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    body_bytes: int
    authorization: str
    status: int | str


@dataclass
class Answer:
    status: int
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None


class HubRefusalError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        told = message.encode("ascii", "replace").decode()
        headers = {"X-Error-Message": told} | ({"X-Error-Code": code} if code else {})
        self.answer = Answer(status, {"error": message}, headers)


@dataclass
class _Faults:
    pattern: re.Pattern[str]
    left: list[Fault]
    headers: Mapping[str, str]


@dataclass
class Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    body: bytes
    headers: Mapping[str, str]
    user: str | None
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class HubServer:
    """A Hub in a thread of this process, for the time of a `with` block."""

    def __init__(self, *, xet: bool = True, max_file_bytes: int = 500_000_000_000) -> None:
        self.xet = xet
        self.max_file_bytes = max_file_bytes
        self.users: dict[str, tuple[str, tuple[str, ...]]] = {TOKEN: ("me", ("org",))}
        """Name and organisations, by token."""
        self.roles: dict[str, str] = {}
        """The roles of tokens, by name of their users; `write` if it has none."""
        self.gated: set[str] = set()
        self.refused_paths: set[str] = set()
        """Files of buckets that are not written; the answer lists them, and its status is 200."""
        self.log: list[Seen] = []
        self.before: list[tuple[re.Pattern[str], Callable[[], None]]] = []
        """What is called before a request of a pattern is answered: for tests that kill there."""
        self._repos: dict[str, Repo] = {}
        self._buckets: dict[str, Bucket] = {}
        self._regular: dict[str, bytes] = {}
        self._faults: list[_Faults] = []
        self._lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="hub-")
        self.store = Path(self._folder.name)
        (self.store / "lfs").mkdir()
        (self.store / "read").mkdir()
        self._reading = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._folder.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}

    def fail(
        self, pattern: str, faults: Sequence[Fault], headers: Mapping[str, str] | None = None
    ) -> None:
        """The next requests whose `METHOD /path` has the pattern in it meet these, in order."""
        with self._lock:
            self._faults.append(_Faults(re.compile(pattern), list(faults), headers or {}))

    def clear(self) -> None:
        """Forgets repositories, faults and the log; for tests that share a server."""
        with self._lock:
            self._repos.clear()
            self._buckets.clear()
            self._faults.clear()
            self.log.clear()
            self.before.clear()
            self.gated.clear()
            self.refused_paths.clear()

    def repo(self, repo_id: str) -> Repo:
        return self._repos[repo_id]

    def has(self, repo_id: str) -> bool:
        return repo_id in self._repos

    def put(
        self, repo_id: str, files: Mapping[str, bytes] | None = None, *, private: bool = False
    ) -> Repo:
        """Makes a repository, or a commit in it, past the API."""
        repo = self._repos.setdefault(repo_id, initial_repo(repo_id, private=private))
        added = {path: self._keep(path, data) for path, data in (files or {}).items()}
        if added:
            self._commit(repo, "main", ("put there", ""), added, ())
        return repo

    def read(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        """The content of a file, wherever it lies."""
        return self.content(self.repo(repo_id).files(revision)[path])

    def put_bucket(self, bucket_id: str, *, private: bool = False) -> Bucket:
        """Makes a bucket past the API, as its page on the Hub does."""
        return self._buckets.setdefault(bucket_id, Bucket(bucket_id, private))

    def read_bucket(self, bucket_id: str, path: str) -> bytes:
        entry = self._buckets[bucket_id].files[path]
        return self._read_xet(XetFile(entry.xet_hash, entry.size))

    def requests(self, pattern: str) -> list[Seen]:
        found = re.compile(pattern)
        return [seen for seen in list(self.log) if found.search(f"{seen.method} {seen.path}")]

    def sent_bytes(self) -> int:
        """Bytes of large files that arrived, whether committed or not."""
        put = sum(path.stat().st_size for path in (self.store / "lfs").iterdir())
        return put + xorb_bytes(self.store / "cas")

    # What routes need

    def content(self, blob: Blob) -> bytes:
        if not blob.is_large:
            return self._regular[blob.oid]
        path = self.store / "lfs" / blob.oid
        return path.read_bytes() if path.exists() else self._from_xet(blob)

    def _from_xet(self, blob: Blob) -> bytes:
        return self._read_xet(self.xet_file(blob.oid))

    def _read_xet(self, file: XetFile) -> bytes:
        """Reads from a copy of the store, which one process at a time may open: clients need it."""
        import hf_xet

        kept = self.store / "read" / file.hash
        with self._reading:
            for _ in range(_READ_TRIES):
                if kept.exists() or not file.size:
                    break
                with tempfile.TemporaryDirectory(dir=self.store) as copy, suppress(Exception):
                    shutil.copytree(self.store / "cas", copy, dirs_exist_ok=True)
                    info = hf_xet.XetFileInfo(file.hash, file.size)
                    session = hf_xet.XetSession()
                    with session.new_download_stream_group(endpoint=f"local://{copy}") as group:
                        data = b"".join(group.download_stream(info))
                    if len(data) == file.size:  # else a client was writing when it was copied
                        kept.write_bytes(data)
                time.sleep(0.0 if kept.exists() else 0.05)
            return kept.read_bytes() if file.size else b""

    @property
    def cas_url(self) -> str:
        return f"local://{self.store / 'cas'}"

    def xet_file(self, sha256: str) -> XetFile:
        return next(file for file in xet_files(self.store / "cas") if file.sha256 == sha256)

    def is_in_xet(self, sha256: str) -> bool:
        return any(file.sha256 == sha256 for file in xet_files(self.store / "cas"))

    def xet_sizes(self) -> dict[str, int]:
        """The sizes of the files in the Xet store, by its hash."""
        return {file.hash: file.size for file in xet_files(self.store / "cas")}

    def has_large(self, sha256: str) -> bool:
        return (self.store / "lfs" / sha256).exists() or self.is_in_xet(sha256)

    def _keep(self, path: str, data: bytes) -> Blob:
        if goes_to_large_files(path, len(data)):
            oid = hashlib.sha256(data).hexdigest()
            (self.store / "lfs" / oid).write_bytes(data)
            return Blob(oid, len(data), is_large=True)
        return self.keep_regular(data)

    def keep_regular(self, data: bytes) -> Blob:
        oid = git_blob_id(data)
        self._regular[oid] = data
        return Blob(oid, len(data), is_large=False)

    def _commit(
        self,
        repo: Repo,
        ref: str,
        words: tuple[str, str],
        added: Mapping[str, Blob],
        deleted: Sequence[str],
        parent: Commit | None = None,
    ) -> Commit:
        parent = parent or repo.head(ref)
        files = {path: blob for path, blob in parent.files.items() if path not in deleted}
        files |= added
        seed = f"{parent.oid} {words} {sorted(added.items())} {sorted(deleted)} {ref}"
        oid = hashlib.sha1(seed.encode(), usedforsecurity=False).hexdigest()
        commit = Commit(oid, parent.oid, *words, files, tuple(sorted(added)), tuple(deleted))
        repo.add(ref, commit)
        return commit

    def commit(self, repo: Repo, revision: str, request: Request) -> tuple[Commit, str]:
        """Does what a commit request asks for; returns the commit and where it went."""
        lines = [json.loads(line) for line in request.body.splitlines()]
        header = lines[0]["value"]
        with repo.lock:
            parent = repo.head(revision)
            if header.get("parentCommit", parent.oid) != parent.oid:
                raise HubRefusalError(
                    412, "A commit has happened since. Please refresh and try again"
                )
            added: dict[str, Blob] = {}
            deleted: list[str] = []
            for line in lines[1:]:
                self._operation(line["key"], line["value"], parent, (added, deleted))
            if request.query.get("create_pr"):
                revision = f"refs/pr/{len(repo.pull_requests) + 1}"
            words = (header["summary"], header.get("description", ""))
            return self._commit(repo, revision, words, added, deleted, parent), revision

    def _operation(
        self,
        key: str,
        value: dict[str, Any],
        parent: Commit,
        into: tuple[dict[str, Blob], list[str]],
    ) -> None:
        added, deleted = into
        path = value["path"]
        if key == "file":
            added[path] = self.keep_regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["size"] > self.max_file_bytes:
                raise HubRefusalError(413, f"{path} is larger than the Hub takes")
            if not self.has_large(value["oid"]):
                raise HubRefusalError(400, f"LFS pointer to a file that is not there: {path}")
            added[path] = Blob(value["oid"], value["size"], is_large=True)
        elif key == "deletedFile":
            if path not in parent.files:
                raise HubRefusalError(404, "A file with this name doesn't exist", "EntryNotFound")
            deleted.append(path)
        elif key == "deletedFolder":
            deleted += [name for name in parent.files if name.startswith(path)]

    def may_write(self, request: Request, owner: str) -> bool:
        orgs = dict(self.users.values())
        return request.user is not None and owner in {request.user, *orgs[request.user]}

    def find(self, request: Request, *, write: bool = False) -> Repo:
        repo_id = request.groups["repo"]
        repo = self._repos.get(repo_id)
        allowed = self.may_write(request, repo_id.split("/", 1)[0])
        if repo is None or (repo.private and not allowed):
            status = 404 if request.user else 401
            raise HubRefusalError(status, "Repository not found", "RepoNotFound")
        if repo_id in self.gated and not allowed:
            raise HubRefusalError(403, "Access to this model is restricted", "GatedRepo")
        if write and not allowed:
            raise HubRefusalError(403, "You don't have the required permissions")
        return repo

    def find_bucket(self, request: Request, *, write: bool = False) -> Bucket:
        bucket = self._buckets.get(request.groups["bucket"])
        allowed = self.may_write(request, request.groups["bucket"].split("/", 1)[0])
        if bucket is None or (bucket.private and not allowed):
            status = 404 if request.user else 401
            raise HubRefusalError(status, "Bucket not found", "RepoNotFound")
        role = self.roles.get(request.user or "", "write")
        if write and not (allowed and role == "write"):
            raise HubRefusalError(403, "You don't have the required permissions")
        return bucket

    def make_repo(self, repo_id: str, *, private: bool) -> None:
        with self._lock:
            if repo_id in self._repos:
                raise HubRefusalError(409, "You already created this model repo")
            self._repos[repo_id] = initial_repo(repo_id, private=private)

    def fault_for(self, words: str) -> tuple[Fault, Mapping[str, str]] | None:
        for pattern, call in list(self.before):
            if pattern.search(words):
                call()
        with self._lock:
            for faults in self._faults:
                if faults.left and faults.pattern.search(words):
                    return faults.left.pop(0), faults.headers
        return None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed in some tests; nobody needs to read of it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client's acknowledgement
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name in the base
        pass

    def _answer_request(self) -> None:
        hub, body = self.server.hub, self._body()
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        found = hub.fault_for(f"{self.command} {path}")
        fault, more = found or (None, {})
        if isinstance(fault, int):
            answer = Answer(fault, {"error": "injected"}, dict(more))
        elif fault == "drop":
            answer = Answer(0)
        else:
            query = parse_qs(parts.query)
            user = self._user()
            request = Request(self.command, path, query, body, dict(self.headers), user)
            answer = self._routed(request)
        seen = fault if isinstance(fault, str) else answer.status
        authorization = self.headers.get("Authorization", "")
        hub.log.append(Seen(self.command, path, len(body), authorization, seen))
        if isinstance(fault, str):
            self.close_connection = True
            return
        self._send(answer)

    def _routed(self, request: Request) -> Answer:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token and request.user is None:
            message = "Invalid credentials in Authorization header"
            return Answer(401, {"error": message}, {"X-Error-Message": message})
        try:
            for method, pattern, route in ROUTES:
                match = pattern.fullmatch(request.path)
                if match and request.method in method:
                    request.groups = match.groupdict()
                    return route(self.server.hub, request)
        except HubRefusalError as refused:
            return refused.answer
        return Answer(404, {"error": f"no such route: {request.method} {request.path}"})

    def _user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self.server.hub.users.get(token, (None, ()))[0]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().strip(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, answer: Answer) -> None:
        data = answer.raw if answer.raw is not None else json.dumps(answer.document).encode()
        self.send_response(answer.status)
        kind = "application/octet-stream" if answer.raw is not None else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(data))} | answer.headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _answer_request  # noqa: N815  the base's names


_MODEL = r"/api/models/(?P<repo>[^/]+/[^/]+)"
_BUCKET = r"/api/buckets/(?P<bucket>[^/]+/[^/]+)"
_DATE = "2026-01-01T00:00:00.000Z"
_LOCAL = re.compile(
    r"^\s*(?:base_model:|-)\s*[\"']?(?:base_model:\w+:)?(?:/|\./|\.\./|~)", re.MULTILINE
)


def who_am_i(hub: HubServer, request: Request) -> Answer:
    if request.user is None:
        raise HubRefusalError(401, "Invalid username or password.")
    orgs = next(orgs for name, orgs in hub.users.values() if name == request.user)
    token = {"role": hub.roles.get(request.user, "write"), "displayName": "t"}
    named = [{"name": org} for org in orgs]
    document = {"type": "user", "name": request.user, "orgs": named}
    return Answer(200, document | {"auth": {"accessToken": token}})


def create_repo(hub: HubServer, request: Request) -> Answer:
    asked = request.document
    if request.user is None:
        raise HubRefusalError(401, "Invalid username or password.")
    owner = asked.get("organization") or request.user
    repo_id = f"{owner}/{asked['name']}"
    if hub.has(repo_id):
        return Answer(409, {"error": "You already created it", "url": f"{hub.url}/{repo_id}"})
    if not hub.may_write(request, owner):
        message = f'You don\'t have the rights to create a model under the namespace "{owner}"'
        raise HubRefusalError(403, message)
    private = bool(asked.get("private")) or asked.get("visibility") == "private"
    hub.make_repo(repo_id, private=private)
    return Answer(200, {"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": "x"})


def validate_yaml(_hub: HubServer, request: Request) -> Answer:
    content = request.document["content"]
    front = content.split("---", 2)[1] if content.startswith("---") else ""
    if _LOCAL.search(front):
        message = '"base_model" with value is not valid. Use a model id from https://hf.co/models.'
        return Answer(400, {"errors": [{"message": message}], "warnings": []})
    return Answer(200, {"errors": [], "warnings": []})


def preupload(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request, write=not request.query.get("create_pr"))
    head = _commit_of(repo, request.groups["rev"])
    files = []
    for file in request.document["files"]:
        known = head.files.get(file["path"])
        mode = "lfs" if goes_to_large_files(file["path"], file["size"]) else "regular"
        entry = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        files.append(entry | ({"oid": known.oid} if known else {}))
    return Answer(200, {"files": files})


def commit(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request, write=not request.query.get("create_pr"))
    _commit_of(repo, request.groups["rev"])
    made, ref = hub.commit(repo, request.groups["rev"], request)
    document = {"commitOid": made.oid, "commitUrl": f"{hub.url}/{repo.id}/commit/{made.oid}"}
    if request.query.get("create_pr"):
        number = ref.rsplit("/", 1)[-1]
        document["pullRequestUrl"] = f"{hub.url}/{repo.id}/discussions/{number}"
    return Answer(200, {"success": True, "hookOutput": ""} | document)


def lfs_batch(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request)
    objects = []
    for wanted in request.document["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        entry: dict[str, Any] = {"oid": oid, "size": size}
        if size > hub.max_file_bytes:
            entry["error"] = {"code": 422, "message": "You need to configure your repository"}
        elif not hub.has_large(oid):
            upload = {"href": f"{hub.url}/lfs/{repo.id}/{oid}", "header": {}}
            entry["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/verify/{oid}"}}
        objects.append(entry)
    return Answer(200, {"transfer": "basic", "objects": objects})


def lfs_put(hub: HubServer, request: Request) -> Answer:
    oid = request.groups["oid"]
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise HubRefusalError(400, "The content has another SHA-256")
    (hub.store / "lfs" / oid).write_bytes(request.body)
    return Answer(200, {})


def lfs_verify(hub: HubServer, request: Request) -> Answer:
    there = (hub.store / "lfs" / request.groups["oid"]).exists()
    return Answer(200 if there else 404, {})


def xet_token(hub: HubServer, request: Request) -> Answer:
    write = request.groups["kind"] == "write"
    hub.find(request, write=write and request.groups["rev"] != "None")
    if not hub.xet:
        raise HubRefusalError(404, "This repository has no Xet storage")
    return _xet_access(hub)


def _xet_access(hub: HubServer) -> Answer:
    until = int(time.time()) + 3600
    document = {"accessToken": "xet", "exp": until, "casUrl": hub.cas_url}
    headers = {"X-Xet-Cas-Url": hub.cas_url, "X-Xet-Access-Token": "xet"}
    return Answer(200, document, headers | {"X-Xet-Token-Expiration": str(until)})


def info(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request)
    head = _commit_of(repo, request.groups.get("rev") or "main")
    siblings = [
        {"rfilename": path, "size": blob.size, "blobId": _blob_id(blob)} | _lfs(blob)
        for path, blob in head.files.items()
    ]
    document = {"_id": "1", "id": repo.id, "modelId": repo.id, "sha": head.oid, "tags": []}
    document |= {"private": repo.private, "disabled": False, "gated": repo.id in hub.gated}
    document |= {"downloads": 0, "likes": 0, "lastModified": _DATE, "createdAt": _DATE}
    return Answer(200, document | {"siblings": siblings})


def tree(hub: HubServer, request: Request) -> Answer:
    head = _commit_of(hub.find(request), request.groups["rev"])
    below = f"{request.groups['path']}/" if request.groups.get("path") else ""
    entries = [
        {"type": "file", "path": path, "size": blob.size, "oid": _blob_id(blob)} | _lfs(blob)
        for path, blob in sorted(head.files.items())
        if path.startswith(below)
    ]
    if below and not entries:
        raise HubRefusalError(404, "The path does not exist", "EntryNotFound")
    return Answer(200, entries)


def paths_info(hub: HubServer, request: Request) -> Answer:
    head = _commit_of(hub.find(request), request.groups["rev"])
    entries = [
        {"type": "file", "path": path, "size": blob.size, "oid": _blob_id(blob)} | _lfs(blob)
        for path, blob in head.files.items()
        if path in request.document["paths"]
    ]
    return Answer(200, entries)


def commits(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request)
    _commit_of(repo, request.groups["rev"])
    return Answer(
        200,
        [
            {"id": made.oid, "title": made.message, "message": made.description}
            | {"authors": [{"user": "me"}], "date": _DATE}
            for made in repo.history(request.groups["rev"])
        ],
    )


def refs(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request)

    def told(names: dict[str, str], prefix: str) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in names.items()
        ]

    document = {"branches": told(repo.branches, "refs/heads/"), "converts": []}
    document["tags"] = told(repo.tags, "refs/tags/")
    if request.query.get("include_prs"):
        document["pullRequests"] = told(repo.pull_requests, "")
    return Answer(200, document)


def create_tag(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request, write=True)
    made = _commit_of(repo, request.groups["rev"])
    with repo.lock:
        if request.document["tag"] in repo.tags:
            raise HubRefusalError(409, "Tag reference exists already")
        repo.tags[request.document["tag"]] = made.oid
    return Answer(200, {})


def delete_tag(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request, write=True)
    if repo.tags.pop(request.groups["rev"], None) is None:
        raise HubRefusalError(404, "Tag not found", "RevisionNotFound")
    return Answer(200, {})


def create_branch(hub: HubServer, request: Request) -> Answer:
    repo = hub.find(request, write=True)
    name = request.groups["rev"]
    if name in repo.branches:
        raise HubRefusalError(409, "Reference already exists")
    start = (request.document if request.body else {}).get("startingPoint") or "main"
    repo.branches[name] = _commit_of(repo, start).oid
    return Answer(200, {})


def resolve(hub: HubServer, request: Request) -> Answer:
    head = _commit_of(hub.find(request), request.groups["rev"])
    blob = head.files.get(request.groups["path"])
    if blob is None:
        refused = HubRefusalError(404, "Entry not found", "EntryNotFound")
        refused.answer.headers["X-Repo-Commit"] = head.oid
        raise refused
    headers = {"ETag": f'"{blob.oid}"', "X-Repo-Commit": head.oid, "Accept-Ranges": "bytes"}
    if blob.is_large:
        headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
    if blob.is_large and hub.xet and hub.is_in_xet(blob.oid):
        headers["X-Xet-Hash"] = hub.xet_file(blob.oid).hash
        route = f"{hub.url}/api/models/{request.groups['repo']}/xet-read-token/{head.oid}"
        headers["X-Xet-Refresh-Route"] = route
    if request.method == "HEAD":
        return Answer(200, headers=headers | {"Content-Length": str(blob.size)}, raw=b"")
    wanted = next((v for name, v in request.headers.items() if name.lower() == "range"), "")
    return _ranged(hub.content(blob), wanted, headers)


def bucket_info(hub: HubServer, request: Request) -> Answer:
    bucket = hub.find_bucket(request)
    sizes = [entry.size for entry in bucket.files.values()]
    document = {"id": bucket.id, "private": bucket.private, "createdAt": _DATE}
    return Answer(200, document | {"size": sum(sizes), "totalFiles": len(sizes)})


def bucket_token(hub: HubServer, request: Request) -> Answer:
    hub.find_bucket(request, write=request.groups["kind"] == "write")
    return _xet_access(hub)


def bucket_tree(hub: HubServer, request: Request) -> Answer:
    """Files whose path begins as asked for, be that a folder or not; without `recursive` folders
    stand for what is in them."""
    bucket, prefix = hub.find_bucket(request), request.groups.get("path") or ""
    deep = request.query.get("recursive", ["false"])[0].lower() == "true"
    depth = prefix.count("/") + (1 if prefix else 0)
    found: dict[str, dict[str, Any]] = {}
    for path, entry in sorted(bucket.files.items()):
        if not path.startswith(prefix):
            continue
        parts = path.split("/")
        if deep or len(parts) <= depth + 1:
            found[path] = _bucket_file(path, entry)
        else:
            folder = "/".join(parts[: depth + 1])
            found[folder] = {"type": "directory", "path": folder, "uploadedAt": _DATE}
    return Answer(200, list(found.values()))


def bucket_paths(hub: HubServer, request: Request) -> Answer:
    files, asked = hub.find_bucket(request).files, request.document["paths"]
    return Answer(200, [_bucket_file(path, files[path]) for path in asked if path in files])


def bucket_batch(hub: HubServer, request: Request) -> Answer:
    """Does one operation after another, and lists those that failed."""
    bucket, sizes = hub.find_bucket(request, write=True), hub.xet_sizes()
    operations = [json.loads(line) for line in request.body.splitlines()]
    failed = []
    with bucket.lock:
        for one in operations:
            path, xet_hash = one["path"], one.get("xetHash")
            if one["type"] == "deleteFile":
                if bucket.files.pop(path, None) is None:
                    failed.append({"path": path, "error": "File not found"})
            elif path in hub.refused_paths:
                failed.append({"path": path, "error": "Internal error"})
            elif xet_hash not in sizes:
                failed.append({"path": path, "error": f"Unknown xet hash {xet_hash}"})
            else:
                bucket.files[path] = BucketEntry(xet_hash, sizes[xet_hash], time.time())
    status = 422 if failed and len(failed) == len(operations) else 200
    done = len(operations) - len(failed)
    return Answer(status, {"success": not failed, "processed": done, "failed": failed})


def bucket_resolve(hub: HubServer, request: Request) -> Answer:
    bucket = hub.find_bucket(request)
    entry = bucket.files.get(request.groups["path"])
    if entry is None:
        raise HubRefusalError(404, "Entry not found", "EntryNotFound")
    headers = {"ETag": f'"{entry.xet_hash}"', "X-Xet-Hash": entry.xet_hash}
    headers |= {"Accept-Ranges": "bytes", "X-Linked-Size": str(entry.size)}
    headers["X-Xet-Refresh-Route"] = f"{hub.url}/api/buckets/{bucket.id}/xet-read-token"
    if request.method == "HEAD":
        return Answer(200, headers=headers | {"Content-Length": str(entry.size)}, raw=b"")
    wanted = next((v for name, v in request.headers.items() if name.lower() == "range"), "")
    return _ranged(hub.read_bucket(bucket.id, request.groups["path"]), wanted, headers)


def _bucket_file(path: str, entry: BucketEntry) -> dict[str, Any]:
    written = datetime.fromtimestamp(entry.uploaded, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
    names = {"type": "file", "path": path, "size": entry.size, "xetHash": entry.xet_hash}
    return names | {"mtime": f"{written}Z", "uploadedAt": f"{written}Z"}


def _ranged(data: bytes, wanted: str, headers: dict[str, str]) -> Answer:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
    if not match:
        return Answer(200, headers=headers, raw=data)
    start, last = int(match[1]), int(match[2]) if match[2] else len(data) - 1
    if start >= len(data):
        return Answer(416, headers=headers | {"Content-Range": f"bytes */{len(data)}"}, raw=b"")
    part = data[start : last + 1]
    told = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
    return Answer(206, headers=headers | {"Content-Range": told}, raw=part)


def _commit_of(repo: Repo, revision: str) -> Any:
    oid = repo.resolve(revision)
    if oid is None:
        raise HubRefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return repo.commits_by_oid[oid]


def _blob_id(blob: Blob) -> str:
    """git's id; of a large file, that of the pointer that git keeps for it."""
    if not blob.is_large:
        return blob.oid
    return hashlib.sha1(blob.oid.encode(), usedforsecurity=False).hexdigest()


def _lfs(blob: Blob) -> dict[str, Any]:
    if not blob.is_large:
        return {}
    names = {"oid": blob.oid, "sha256": blob.oid}
    return {"lfs": names | {"size": blob.size, "pointerSize": 134}}


Route = Callable[[HubServer, Request], Answer]
_TABLE: list[tuple[str, str, Route]] = [
    ("GET", "/api/whoami-v2", who_am_i),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", _MODEL + "/preupload/(?P<rev>.+)", preupload),
    ("POST", _MODEL + "/commit/(?P<rev>.+)", commit),
    ("GET", _MODEL + "/xet-(?P<kind>write|read)-token/(?P<rev>.+)", xet_token),
    ("GET", _MODEL + "/revision/(?P<rev>.+)", info),
    ("GET", _MODEL + r"/tree/(?P<rev>refs/pr/\d+|[^/]+)(?:/(?P<path>.+))?", tree),
    ("POST", _MODEL + "/paths-info/(?P<rev>.+)", paths_info),
    ("GET", _MODEL + "/commits/(?P<rev>.+)", commits),
    ("GET", _MODEL + "/refs", refs),
    ("POST", _MODEL + "/tag/(?P<rev>.+)", create_tag),
    ("DELETE", _MODEL + "/tag/(?P<rev>.+)", delete_tag),
    ("POST", _MODEL + "/branch/(?P<rev>.+)", create_branch),
    ("GET", _MODEL + "", info),
    ("GET", _BUCKET + "/xet-(?P<kind>write|read)-token", bucket_token),
    ("GET", _BUCKET + "/tree(?:/(?P<path>.+))?", bucket_tree),
    ("POST", _BUCKET + "/paths-info", bucket_paths),
    ("POST", _BUCKET + "/batch", bucket_batch),
    ("GET", _BUCKET, bucket_info),
    ("GET HEAD", r"/buckets/(?P<bucket>[^/]+/[^/]+)/resolve/(?P<path>.+)", bucket_resolve),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", r"/lfs/[^/]+/[^/]+/(?P<oid>[0-9a-f]{64})", lfs_put),
    ("POST", r"/verify/(?P<oid>[0-9a-f]{64})", lfs_verify),
    (
        "GET HEAD",
        r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>refs/pr/\d+|[^/]+)/(?P<path>.+)",
        resolve,
    ),
]
ROUTES = [(method, re.compile(pattern), route) for method, pattern, route in _TABLE]
