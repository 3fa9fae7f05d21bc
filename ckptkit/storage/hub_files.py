"""Reading files of a repository on the Hub, at one commit, through the client's file system."""

from __future__ import annotations

from typing import Any

_KINDS = {"dataset": "datasets/", "space": "spaces/"}


def pinned_root(filesystem: Any, path: str) -> str:
    """Returns a path in a repository with the commit that its revision stands for now.

    A branch may move between two requests; a commit does not.

    Args:
        filesystem: A `huggingface_hub.HfFileSystem`.
        path: Such as `org/name@main/folder`.

    Raises:
        Exception: Whatever the client raises, such as where there is no such repository.
    """
    from huggingface_hub import HfApi

    found = filesystem.resolve_path(path)
    if not hasattr(found, "repo_id"):  # a bucket, which has no commits
        return path.rstrip("/")
    client = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    info = client.repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type)
    root = f"{_KINDS.get(found.repo_type, '')}{found.repo_id}@{info.sha}"
    return f"{root}/{found.path_in_repo}".rstrip("/")


def hub_range(filesystem: Any, path: str, start: int, stop: int, size_bytes: int) -> bytes:
    """Returns the bytes `[start, stop)` of a file with one request, reading nothing ahead."""
    with filesystem.open(path, "rb", cache_type="none", size=size_bytes) as file:
        file.seek(start)
        data: bytes = file.read(stop - start)
    return data
