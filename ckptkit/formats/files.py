"""Whether all the files of a checkpoint are there, from headers and sizes alone."""

from __future__ import annotations

import numpy as np

from ckptkit.core.errors import InputError
from ckptkit.core.index import FileRef, TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.registry import read_index
from ckptkit.storage.base import Source


def what_is_missing(source: Source, candidate: Candidate) -> str:
    """Tells what a candidate lacks to be read as a whole; empty where nothing is missing."""
    try:
        return missing_files(read_index(source, candidate))
    except InputError as error:
        return str(error.message)


def missing_files(index: TensorIndex) -> str:
    """Names a file that is absent, or ends before what the index promises; empty if none is."""
    absent = next((file for file in index.files if file.size_bytes < 0), None)
    if absent is not None:
        return f"{absent.path!r} is missing"
    short = _short_file(index)
    return f"{short.path!r} is cut short" if short is not None else ""


def _short_file(index: TensorIndex) -> FileRef | None:
    sizes = np.array([file.size_bytes for file in index.files], np.int64)
    over = np.flatnonzero(index.records.stop > sizes[index.records.file])
    return index.files[int(index.records.file[over[0]])] if len(over) else None
