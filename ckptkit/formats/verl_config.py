"""`fsdp_config.json`, which verl writes beside the files of ranks.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (`FSDPConfig`).
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import replace

from ckptkit.core.errors import FormatError, MissingFileError
from ckptkit.core.index import TensorIndex
from ckptkit.storage.base import Source

_NAME = "fsdp_config.json"
_MAX_BYTES = 1 << 16


def with_verl_config(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Compares what was found with what verl says of the run, and adds what it tells besides.

    Args:
        index: Of the files of ranks.
        source: Where they lie.
        folder: Of the files.

    Raises:
        FormatError: If the file is damaged, or is of a run of another size.
    """
    path = posixpath.join(folder, _NAME)
    where = posixpath.join(source.location, path)
    try:
        file = source.stat(path)
    except MissingFileError:  # verl before 0.4 wrote none
        return index
    try:
        told = json.loads(source.read(path, 0, min(file.size_bytes, _MAX_BYTES)))
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    size = told.get("world_size") if isinstance(told, dict) else None
    if size is not None and size != index.run.world_size:
        raise FormatError(
            f"tells of a run with {size!r} ranks, and the files are of {index.run.world_size}",
            where=where,
            hint="a save went into the folder of another one; take away the files of one",
        )
    version = told.get("FSDP_version") if isinstance(told, dict) else None
    known = f", FSDP{version}" if type(version) is int else ""
    run = replace(index.run, writer=f"verl{known}, one file a rank")
    return replace(index, files=(*index.files, file), run=run)
