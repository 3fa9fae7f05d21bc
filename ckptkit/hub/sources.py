"""What kind of folder is to be pushed: one that loads, or one that has to be consolidated."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import (
    IncompleteCheckpointError,
    MissingFileError,
    RefusedError,
    SourceChangedError,
    UnsafePathError,
    VerificationError,
)
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest, parse_manifest
from ckptkit.formats.registry import recognise
from ckptkit.formats.weight_map import INDEX_ENDING
from ckptkit.hub.contents import Small
from ckptkit.hub.files import is_weights, named_by_index
from ckptkit.pipeline.steps import file_problems
from ckptkit.storage.base import Folder, Source
from ckptkit.storage.places import PathLike, is_url

_LOADS = frozenset({"safetensors", "torch"})
_DEPTH = 1
_RUN_DEPTH = 2
_WHOLE_DEPTH = 8
_PUSHED = frozenset({"model", "adapter", "torch"})
MAX_FILE_BYTES = 500_000_000_000
"""What the Hub takes as one file."""


def local_folder(place: PathLike) -> Path:
    """Returns the folder to push.

    Raises:
        RefusedError: If it is a URL.
        MissingFileError: If it is no folder.
    """
    where = os.fspath(place)
    if is_url(place):
        raise RefusedError(
            "a push reads a folder of this machine",
            where=where,
            hint="write it to a local folder first: `ckptkit consolidate URL DIR`",
        )
    if not Path(where).is_dir():
        raise MissingFileError(
            "no folder was found where that of a model was expected",
            where=where,
            hint="pass what `ckptkit consolidate` or `ckptkit adapter extract` wrote",
        )
    return Path(where)


def read_manifest(source: Source, paths: Iterable[str]) -> Manifest | None:
    """Returns the manifest of a folder, if there is one.

    Raises:
        RefusedError: If it is that of a step of training.
        FormatError: If it cannot be parsed.
    """  # noqa: DOC501  `parse_manifest` makes the second
    if MANIFEST_NAME not in set(paths):
        return None
    size = source.stat(MANIFEST_NAME).size_bytes
    where = posixpath.join(source.location, MANIFEST_NAME)
    manifest = parse_manifest(source.read(MANIFEST_NAME, 0, size), where=where)
    if manifest.kind == TRAINING:
        raise _to_consolidate(source.location, "is a step of a training run")
    if manifest.kind not in _PUSHED:
        raise _to_consolidate(source.location, f"holds a {manifest.kind!r} output")
    return manifest


def refuse_checkpoints(source: Source, paths: Iterable[str]) -> None:
    """Refuses what no library loads from the Hub.

    Raises:
        RefusedError: If the folder is a sharded checkpoint, or has one right below it.
    """  # noqa: DOC501  `_to_consolidate` makes it
    for candidate in recognise(list(paths)):
        if candidate.format not in _LOADS:
            raise _to_consolidate(source.location, f"is a sharded checkpoint ({candidate.reason})")


def _to_consolidate(location: str, what: str) -> RefusedError:
    return RefusedError(
        f"{what}, which nothing loads from the Hub",
        where=location,
        hint=f"run `ckptkit consolidate {location} OUT` (or `ckptkit adapter extract`, for an"
        " adapter), then push OUT",
    )


def files_below(source: Source) -> list[str]:
    """Lists the files of a folder and of folders right below it."""
    return list(source.walk(_DEPTH))


def files_of_whole(source: Source, whole: str) -> list[str]:
    """Lists the files of a folder that is pushed as it is.

    Args:
        source: What it lies in.
        whole: Its name; empty for none.
    """
    paths = source.walk(_WHOLE_DEPTH) if whole else iter(())
    return [path for path in paths if path.startswith(f"{whole}/")]


def stat_all(source: Source, paths: Iterable[str]) -> dict[str, FileRef]:
    """Looks at the files to push.

    Raises:
        RefusedError: If one is a link that leads out, or larger than the Hub takes.
    """
    found = {}
    for path in paths:
        where = posixpath.join(source.location, path)
        try:
            found[path] = source.stat(path)
        except UnsafePathError as error:
            raise RefusedError(
                "is a link that leads out of the folder",
                where=where,
                hint="put the file itself there, or push the folder that it lies in",
            ) from error
        if found[path].size_bytes > MAX_FILE_BYTES:
            raise RefusedError(
                f"has {found[path].size_bytes:,} bytes, and the Hub takes {MAX_FILE_BYTES:,}",
                where=where,
                hint="write smaller files with `ckptkit consolidate --max-shard-size 5GB`",
            )
    return found


def check_complete(
    source: Source, manifest: Manifest | None, files: Iterable[str], small: Mapping[str, Small]
) -> None:
    """Refuses a model with missing or strange weight files.

    Raises:
        RefusedError: If the folder holds no weights, or is a run with sharded checkpoints in it.
        IncompleteCheckpointError: If an index names files that are not there.
        VerificationError: If the files are not those of the manifest.
    """
    files = list(files)
    weights = [path for path in files if is_weights(path) and not path.endswith(INDEX_ENDING)]
    if not weights:
        refuse_checkpoints(source, source.walk(_RUN_DEPTH))
        raise RefusedError(
            "holds no weights",
            where=source.location,
            hint="pass a folder with model.safetensors or adapter_model.safetensors, such as"
            " `ckptkit consolidate` writes",
        )
    for path, file in small.items():
        if path.endswith(INDEX_ENDING):
            _check_index(posixpath.join(source.location, path), file.document, files)
    if manifest is not None:
        _check_files(source, manifest, weights)


def _check_index(where: str, document: Any, files: list[str]) -> None:
    weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
    missing = named_by_index(weight_map, files) if isinstance(weight_map, Mapping) else ["?"]
    if missing:
        raise IncompleteCheckpointError(
            f"the index names {len(missing):,} files that are not there, such as {missing[0]!r}",
            where=where,
            hint="the folder was not written whole; write it again with `ckptkit consolidate`",
        )


def _check_files(source: Source, manifest: Manifest, weights: Iterable[str]) -> None:
    hint = "see what `ckptkit verify` says; write the folder again with `ckptkit consolidate`"
    for problem in file_problems(source, "", manifest):
        raise VerificationError(problem.message, where=problem.where, hint=hint)
    for path in weights:
        if path not in manifest.files:
            where = posixpath.join(source.location, path)
            raise VerificationError("is not in the manifest", where=where, hint=hint)


def check_unchanged(source: Folder, refs: Iterable[FileRef]) -> None:
    """Refuses to commit what changed while it was sent.

    Raises:
        SourceChangedError: If a file is no longer the one that was read.
    """
    changed = source.changed(list(refs))
    if changed is not None:
        raise SourceChangedError(
            f"{changed.path!r} changed while it was sent",
            where=source.location,
            hint="wait until whoever writes there has finished, then push again",
        )
