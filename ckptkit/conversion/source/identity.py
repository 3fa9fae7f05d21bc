"""What a manifest says of the source of an output, and by what the source is known again.

Whether tensors reach as far as they should, in formats that do not store full shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash

from ckptkit.conversion.source.model_folders import shapes_in
from ckptkit.conversion.source.open import Opened
from ckptkit.core.errors import IncompleteCheckpointError, InputError
from ckptkit.core.index import FileRef, Shape, TensorEntry
from ckptkit.formats.safetensors.hf_shards import UNPROVEN, HfShardsReader
from ckptkit.plan.vocabulary import is_embedding, is_head
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


def check_reach(
    checkpoint: Opened, entries: Sequence[TensorEntry], models: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Compares shapes that are only what pieces reach to with those of another model.

    Args:
        checkpoint: What was opened.
        entries: Its tensors that are to be written.
        models: Folders of models of the same architecture, by the option that named them.

    Returns:
        What the user should know: that nothing was there to compare with.
    """
    if all(unit.candidate.format != HfShardsReader.name for unit in checkpoint.units):
        return ()
    notes = [note for note in checkpoint.index.run.notes if note == UNPROVEN]
    for option, folder in models.items():
        shapes = {} if folder is None else _shapes(folder, option)
        shared = [entry for entry in entries if entry.name in shapes]
        for entry in shared:
            _check(entry, shapes[entry.name], f"{option} {folder}", is_sized=not notes)
        notes = [] if shared else notes
    return tuple(notes)


def _shapes(folder: str, option: str) -> Mapping[str, Shape]:
    try:
        return shapes_in(folder, option=option)
    except InputError:
        if option == "--base":
            raise
        return {}  # of this one the index may be there alone


def _check(entry: TensorEntry, expected: Shape, where: str, *, is_sized: bool) -> None:
    """Refuses a tensor that is shorter; a vocabulary may be, if a configuration says so."""
    may_differ = is_sized and (is_embedding(entry.name) or is_head(entry.name))
    if may_differ or len(expected) != len(entry.shape):
        return
    if any(size < other for size, other in zip(entry.shape, expected, strict=True)):
        raise IncompleteCheckpointError(
            f"the shards of {entry.name!r} reach to {list(entry.shape)}, there it has"
            f" {list(expected)}: a shard after the last one is missing",
            where=where,
            hint="give the directory that holds the shards of every rank, or name the model that"
            " the run was started from",
        )
