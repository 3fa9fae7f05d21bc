"""The interface for readers of other distributions, and the types that a reader uses.

A distribution that declares an entry point in the group `ckptkit.readers` adds a format to every
command: `consolidate`, `convert`, `verify`, `diff`, `inspect`, and `ckptkit.open`. The
entry point names a `CheckpointReader`, or a class that makes one when called without arguments.
`docs/reference/formats.md` describes when it is used; `examples/reader_plugin` is an example.
"""

from __future__ import annotations

from ckptkit.core import dtypes
from ckptkit.core.arguments import check_arguments
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    InputError,
    LimitError,
    MissingFileError,
    TruncatedFileError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRef,
    Fqn,
    Key,
    Part,
    Problem,
    Record,
    RecordTable,
    RunFacts,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.formats.base import Candidate, CheckpointReader
from ckptkit.formats.registry import GROUP
from ckptkit.storage.base import Source

dtype_named = check_arguments(dtypes.dtype_named)

__all__ = [
    "GROUP",
    "Box",
    "Candidate",
    "CheckpointReader",
    "Chunk",
    "ChunkTable",
    "CkptkitError",
    "DType",
    "FileRef",
    "FormatError",
    "Fqn",
    "IncompleteCheckpointError",
    "InputError",
    "Key",
    "LimitError",
    "MissingFileError",
    "Part",
    "Problem",
    "Record",
    "RecordTable",
    "RunFacts",
    "Shape",
    "Source",
    "Span",
    "TensorEntry",
    "TensorIndex",
    "TruncatedFileError",
    "UnsafePickleError",
    "UnsupportedError",
    "dtype_named",
]
