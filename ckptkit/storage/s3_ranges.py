"""What S3 can do that fsspec has no words for: reads that depend on the object being the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

S3_PROTOCOLS = frozenset({"s3", "s3a"})
_BLOCK = 256 << 10


def s3_options(options: Mapping[str, Any], *, connections: int) -> dict[str, Any]:
    """Returns options for s3fs with which the client leaves asking again to us.

    Args:
        options: The user's, which win.
        connections: How many may be open at once.
    """
    config = dict(options.get("config_kwargs") or {})
    config.setdefault("retries", {"total_max_attempts": 1})
    config.setdefault("max_pool_connections", connections)
    return {**options, "config_kwargs": config}


def s3_range(filesystem: Any, path: str, start: int, target: memoryview, etag: str) -> None:
    """Fills `target` from byte `start` of an object on, straight from the connection.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        path: Bucket and key.
        start: First byte.
        target: Where the bytes go; it has their number.
        etag: What the object has to have still; empty where that does not matter.

    Raises:
        EOFError: If the object ended earlier.
        Exception: Whatever the client raises; status 412 where the object is another one.

    Source:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
    """
    from fsspec.asyn import sync

    sync(filesystem.loop, _fill, filesystem, path, start, target, etag)


def s3_head(filesystem: Any, path: str) -> Mapping[str, Any]:
    """Returns what is known of an object, asked for by its name: listings may lag, this does not.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        path: Bucket and key.

    Returns:
        The same names as in a listing of fsspec's.

    Raises:
        FileNotFoundError: If there is none.
        Exception: Whatever else the client raises.
    """
    bucket, key, version = filesystem.split_path(path)
    given = {"VersionId": version} if version else {}
    found = filesystem.call_s3("head_object", Bucket=bucket, Key=key, **given)
    facts = {name: found[name] for name in ("ETag", "LastModified") if name in found}
    return {**facts, "size": found["ContentLength"], "type": "file"}


async def _fill(filesystem: Any, path: str, start: int, target: memoryview, etag: str) -> None:
    bucket, key, version = filesystem.split_path(path)
    given = {"Range": f"bytes={start}-{start + len(target) - 1}"}
    if etag:
        given["IfMatch"] = etag
    if version:
        given["VersionId"] = version
    answer = await filesystem._call_s3(  # noqa: SLF001  s3fs offers no other way to name the ETag
        "get_object", Bucket=bucket, Key=key, **given
    )
    done, body = 0, answer["Body"]
    try:
        while block := await body.read(_BLOCK):
            if done + len(block) > len(target):
                raise EOFError("more bytes came than were asked for")
            target[done : done + len(block)] = block
            done += len(block)
    finally:
        body.close()
    if done < len(target):
        raise EOFError(f"{done:,} bytes came, {len(target):,} were asked for")
