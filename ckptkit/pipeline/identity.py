"""What a manifest says of the source of an output, and by what the source is known again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from ckptkit.core.index import FileRef
from ckptkit.pipeline.opening import Opened
from ckptkit.storage.places import is_url

IDENTITY = "identity"
"""In the source of a manifest: changes when a file of the source is replaced or rewritten."""


def source_facts(sources: Sequence[Opened]) -> dict[str, Any]:
    """Returns what a manifest says of the sources, the first of which the output is made from."""
    checkpoint = sources[0]
    return {
        "path": checkpoint.path,
        "format": checkpoint.index.format,
        "step": checkpoint.index.run.step,
        "world_size": checkpoint.index.run.world_size,
        IDENTITY: _identity(sources),
    }


def _identity(sources: Sequence[Opened]) -> str:
    """Returns a digest of sizes and times, or ETags, of all files; paths are left out of it.

    A path may name the run, or the step in it, and a copy of the same files is the same source.
    """
    digest = xxhash.xxh3_128()
    for source in sources:
        found = sorted(_identities(source.index.files, local=not is_url(source.location)))
        digest.update("".join(f"{one}\n" for one in found).encode())
    return digest.hexdigest()


def _identities(files: Sequence[FileRef], *, local: bool) -> Iterator[str]:
    for file in files:
        # Inodes come first: they differ between copies, and on some file systems between mounts.
        kept = file.identity.partition("-")[2] if local else file.identity
        yield f"{kept or file.identity} {file.size_bytes}"
