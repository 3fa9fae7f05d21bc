"""From a URL to what writes an output there."""

from __future__ import annotations

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.storage.base import Target
from ckptkit.storage.names import is_work_folder
from ckptkit.storage.places import Place
from ckptkit.storage.remote_store import store_of
from ckptkit.storage.s3_ranges import S3_PROTOCOLS
from ckptkit.storage.s3_target import S3Target
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.storage.store_errors import output_there, writing_to
from ckptkit.storage.stream_target import StreamTarget

_BUCKETS = S3_PROTOCOLS | {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss"}


def check_remote_target(place: Place, *, overwrite: bool) -> None:
    """Refuses a place that `open_remote_target` would refuse, and writes nothing.

    Raises:
        OutputExistsError: If something lies there and is not to be replaced.
        OutputError: If the store cannot be reached.
        RefusedError: If a whole bucket would be replaced.
        UsageError: If the URL or an option is of no use.
    """  # noqa: DOC501  the store makes the second
    store = store_of(place)
    with writing_to(place.location, store.options)():
        path = store.path_of(place.location)
        if not path.strip("/"):
            raise UsageError("names no place in the store", where=place.location)
        if overwrite and place.protocol in _BUCKETS and "/" not in path.strip("/"):
            raise RefusedError(
                "the output would replace a whole bucket",
                where=place.location,
                hint="name a prefix in it",
            )
        if not overwrite and any(not is_work_folder(name) for name in store.listing(path)):
            raise output_there(place.location)


def open_remote_target(place: Place, *, overwrite: bool) -> Target:
    """Prepares a place in a store for an output.

    Args:
        place: A URL with its options.
        overwrite: Whether what lies there is replaced by the commit.

    Raises:
        OutputExistsError: If something lies there and is not to be replaced.
        OutputError: If the store cannot be reached, or refuses.
        UsageError: If the URL or an option is of no use.
    """
    if place.protocol not in S3_PROTOCOLS:
        return StreamTarget(place, overwrite=overwrite)
    store = store_of(place)
    writing = writing_to(place.location, store.options)
    with writing():
        bucket, _, prefix = store.path_of(place.location).partition("/")
        if not bucket:
            raise UsageError("names no bucket", where=place.location)
        uploads = S3Uploads(store, bucket)
    prefix = f"{prefix}/" if prefix else ""
    return S3Target(uploads, prefix, place.location, writing, overwrite=overwrite)
