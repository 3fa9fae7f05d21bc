"""Opening a path or a URL: for reading, for writing, or for several writing processes."""

from __future__ import annotations

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.base import Folder, Target
from ckptkit.storage.local.shared_target import SharedTarget
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import LocalTarget
from ckptkit.storage.locations import PathLike, Place, Sources, is_url, local_path, place_of
from ckptkit.storage.manifests import manifest_digest
from ckptkit.storage.remote.s3 import S3_PROTOCOLS
from ckptkit.storage.remote.s3_shared import S3SharedTarget
from ckptkit.storage.remote.s3_target import open_s3_prefix
from ckptkit.storage.shared import Cut, OutputAttempt, SharedOutput

__all__ = [
    "PathLike",
    "Place",
    "Sources",
    "is_url",
    "local_path",
    "open_source",
    "open_target",
    "place_of",
]


def open_source(place: PathLike) -> Folder:
    """Opens a directory, or a prefix of an object store, for reading."""
    if is_url(place):
        from ckptkit.storage.remote.source import RemoteSource  # late: it imports fsspec

        return RemoteSource(place_of(place))
    return LocalSource(local_path(place))


def open_target(place: PathLike, *, overwrite: bool) -> Target:
    """Prepares a place for an output, which appears there when it is committed."""
    if is_url(place):
        from ckptkit.storage.remote.stream_target import (
            open_remote_target,  # late: it imports fsspec
        )

        return open_remote_target(place_of(place), overwrite=overwrite)
    return LocalTarget(local_path(place), overwrite=overwrite)


class SharedPlace:
    """A directory that all processes see, or a prefix on S3, connected to once."""

    def __init__(self, out: PathLike, option: str) -> None:
        """Connects to the output; `option` is the option that asked for several processes."""
        self.place = place_of(out)
        self._prefix = None
        if is_url(self.place):
            if self.place.protocol not in S3_PROTOCOLS:
                raise RefusedError(
                    f"a URL was found where {option} needs a directory that all processes see, or"
                    " a place on S3",
                    where=self.place.location,
                    hint="write to a shared disk and copy the finished output, or leave the option"
                    " out: one process writes to such a URL without a local disk",
                )
            self._prefix = open_s3_prefix(self.place)

    def seen(self) -> str:
        """Returns what identifies the manifest that is there; empty where there is none."""
        if self._prefix is None:
            return manifest_digest(local_path(self.place))
        with self._prefix.translate_errors():
            key = self._prefix.store.prefix + MANIFEST_NAME
            return self._prefix.store.list_objects(key).get(key, "")

    @property
    def takes_parts(self) -> bool:
        return self._prefix is not None

    def open(self, attempt: OutputAttempt, cut: Cut) -> SharedOutput:
        """Returns a view of the output; `cut` cuts a file into parts, alike in all processes."""
        if self._prefix is None:
            folder = local_path(self.place)
            return SharedTarget(
                folder, attempt.nonce, overwrite=attempt.overwrite, seen=attempt.seen
            )
        return S3SharedTarget(self._prefix, attempt, cut)
