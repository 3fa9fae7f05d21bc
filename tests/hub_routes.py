"""The routes of the stand-in Hub, as far as `huggingface_hub` asks for them.

Source: what `huggingface_hub` 2.4 sends and expects, seen on the wire.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from tests.hub_repos import Blob, Repo, goes_to_large_files
from tests.hub_server import Answer, HubRefusalError, HubServer, Request, expires_in, model_route

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
    until = expires_in(3600)
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
    ("POST", model_route("/preupload/(?P<rev>.+)"), preupload),
    ("POST", model_route("/commit/(?P<rev>.+)"), commit),
    ("GET", model_route("/xet-(?P<kind>write|read)-token/(?P<rev>.+)"), xet_token),
    ("GET", model_route("/revision/(?P<rev>.+)"), info),
    ("GET", model_route(r"/tree/(?P<rev>refs/pr/\d+|[^/]+)(?:/(?P<path>.+))?"), tree),
    ("POST", model_route("/paths-info/(?P<rev>.+)"), paths_info),
    ("GET", model_route("/commits/(?P<rev>.+)"), commits),
    ("GET", model_route("/refs"), refs),
    ("POST", model_route("/tag/(?P<rev>.+)"), create_tag),
    ("DELETE", model_route("/tag/(?P<rev>.+)"), delete_tag),
    ("POST", model_route("/branch/(?P<rev>.+)"), create_branch),
    ("GET", model_route(""), info),
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
