"""From a path or a URL to what several processes fill there together."""

from __future__ import annotations

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of
from ckptkit.storage.remote_store import store_of
from ckptkit.storage.replacing import manifest_digest
from ckptkit.storage.s3_ranges import S3_PROTOCOLS
from ckptkit.storage.s3_shared_target import Prefix, S3SharedTarget
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.storage.shared_output import Attempt, Cut, SharedOutput
from ckptkit.storage.shared_target import SharedTarget
from ckptkit.storage.store_errors import writing_to


class SharedPlace:
    """A directory that all processes see, or a prefix on S3, connected to once."""

    def __init__(self, out: PathLike, option: str) -> None:
        """Connects to it.

        Args:
            out: The output.
            option: By which several processes were asked for.

        Raises:
            RefusedError: If it lies in a store to which one process has to write alone.
            UsageError: If the URL is of no use.
        """
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
            self._prefix = _connected(self.place)

    def seen(self) -> str:
        """Returns what identifies the manifest that is there; empty where there is none."""
        if self._prefix is None:
            return manifest_digest(local_path(self.place))
        with self._prefix.writing():
            key = self._prefix.key + MANIFEST_NAME
            return self._prefix.store.objects(key).get(key, "")

    @property
    def takes_parts(self) -> bool:
        """Whether what is written is taken in parts of objects."""
        return self._prefix is not None

    def open(self, attempt: Attempt, cut: Cut) -> SharedOutput:
        """Returns a view of the output.

        Args:
            attempt: What all processes have in common.
            cut: Returns the parts of a file, as all processes cut it.

        Raises:
            OutputExistsError: If something lies there and is not to be overwritten.
            OutputError: If nothing can be written there.
        """
        if self._prefix is None:
            folder = local_path(self.place)
            return SharedTarget(
                folder, attempt.nonce, overwrite=attempt.overwrite, seen=attempt.seen
            )
        return S3SharedTarget(self._prefix, attempt, cut)


def _connected(place: Place) -> Prefix:
    store = store_of(place)
    writing = writing_to(place.location, store.options)
    with writing():
        root = store.path_of(place.location)
        if not root:
            raise UsageError("names no bucket", where=place.location)
        uploads = S3Uploads(store, root)
        return Prefix(uploads, uploads.prefix, place.location, writing)
