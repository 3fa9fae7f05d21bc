"""From a URL to what writes an output there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.base import Target
from ckptkit.storage.names import is_work_folder
from ckptkit.storage.output_claim import OutputClaim
from ckptkit.storage.remote_store import store_of
from ckptkit.storage.replacing import refuse_unnamed
from ckptkit.storage.s3_ranges import S3_PROTOCOLS
from ckptkit.storage.s3_sweep import NONCE_BYTES
from ckptkit.storage.s3_target import S3Target
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.storage.store_errors import output_there, writing_to
from ckptkit.storage.stream_target import StreamTarget

if TYPE_CHECKING:
    from ckptkit.storage.places import Place

_BUCKETS = S3_PROTOCOLS | {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss"}


def check_remote_target(place: Place, *, overwrite: bool) -> None:
    """Refuses a place that `open_remote_target` would refuse, and writes nothing.

    Raises:
        OutputExistsError: If something lies there and is not to be replaced.
        OutputError: If the store cannot be reached.
        RefusedError: If a whole bucket would be replaced, or files that are not of an earlier
            output, or if another run is putting its output there.
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
        found = [name for name in store.listing(path) if not is_work_folder(name.split("/")[0])]
        if not overwrite and found:
            raise output_there(place.location)
        claim = OutputClaim(store, path, place.location, writing_to(place.location, store.options))
        left = claim.refuse_taken()
        if found:
            manifest = store.get_small(f"{path}/{MANIFEST_NAME}")
            refuse_unnamed(found, manifest, place.location, left)


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
        root = store.path_of(place.location)
        if not root:
            raise UsageError("names no bucket", where=place.location)
        uploads = S3Uploads(store, root, writer=os.urandom(NONCE_BYTES).hex())
    return S3Target(uploads, uploads.prefix, place.location, writing, overwrite=overwrite)
