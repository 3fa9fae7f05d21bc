"""A stand-in Hub: what the unmodified `huggingface_hub` client talks to, over HTTP.

It keeps repositories in memory and large files in a folder, knows who may write where, and
misbehaves on request. Large files go the Xet way (the client writes into a local store whose
address it is given) or, with `xet=False`, the older way of one PUT each.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_repos import (
    Blob,
    Commit,
    Repo,
    XetFile,
    git_blob_id,
    goes_to_large_files,
    initial_repo,
    xet_files,
    xorb_bytes,
)

Fault = int | Literal["drop", "lost"]
"""A status to answer with; or to hang up at once; or to do what was asked and then hang up."""
TOKEN = "hf_" + "Aa1" * 12
"""Of the user `me`, who is also in the organisation `org`."""
_MODEL = r"/api/models/(?P<repo>[^/]+/[^/]+)"


@dataclass(frozen=True)
class Seen:
    """A request that was answered."""

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
    """What a route is given."""

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
        self.log: list[Seen] = []
        self.before: list[tuple[re.Pattern[str], Callable[[], None]]] = []
        """What is called before a request of a pattern is answered: for tests that kill there."""
        self._repos: dict[str, Repo] = {}
        self._regular: dict[str, bytes] = {}
        self._faults: list[_Faults] = []
        self._lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="hub-")
        self.store = Path(self._folder.name)
        (self.store / "lfs").mkdir()
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
            self._faults.clear()
            self.log.clear()
            self.before.clear()
            self.gated.clear()

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
        import hf_xet

        info = hf_xet.XetFileInfo(self.xet_file(blob.oid).hash, blob.size)
        with hf_xet.XetSession().new_download_stream_group(endpoint=self.cas_url) as group:
            return b"".join(group.download_stream(info))

    @property
    def cas_url(self) -> str:
        return f"local://{self.store / 'cas'}"

    def xet_file(self, sha256: str) -> XetFile:
        return xet_files(self.store / "cas")[sha256]

    def is_in_xet(self, sha256: str) -> bool:
        return sha256 in xet_files(self.store / "cas")

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
        from tests.hub_routes import ROUTES

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


def expires_in(seconds: int) -> int:
    """A time to come, in seconds since the epoch."""
    return int(time.time()) + seconds


def model_route(rest: str) -> str:
    """The pattern of a path below a model's."""
    return _MODEL + rest
