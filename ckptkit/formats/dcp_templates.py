"""The opcodes that torch's pickles have for one chunk, and for one entry of `storage_data`.

Both are fixed sequences once the classes and the names of fields are in the memo, apart from a
few holes. Each pattern has one group for every hole whose value is wanted, and a last group for
whatever follows the last match, so that the matches which `findall` returns are contiguous.

Source: `save_reduce`, `save_tuple` and `_batch_setitems` in CPython's Lib/pickle.py, protocols 4
and 5; fields in torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CHUNK_PARTS = ("ChunkStorageMetadata", "Size", "offsets", "sizes")
ENTRY_PARTS = (
    *("MetadataIndex", "fqn", "index", "offset", "Size"),
    *("_StorageInfo", "relative_path", "length"),
)
# Below, `%(x)b` is the GET opcode that fetches x from the memo.
_GET = rb"h.|j.{4}"
_INT = rb"K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_TUPLE = rb"\)|(?:(?:%b){1,3}[\x85-\x87]|\((?:%b){4,64}t)\x94" % (_INT, _INT)
_SIZE_HOLE = rb"(%%(Size)b(?:%b)\x85\x94R\x94|%b)" % (_TUPLE, _GET)
_TEXT_HOLE = rb"(\x8c.[ -~]{0,255}\x94|%b)" % _GET
_NEW = rb"\)\x81\x94\}\x94\("  # an instance without arguments, and a dictionary for its fields
_END = rb"ub"
_REST = rb"|(.+)"
_CHUNK = b"".join(
    [
        *(rb"%(ChunkStorageMetadata)b", _NEW, rb"%(offsets)b", _SIZE_HOLE),
        *(rb"%(sizes)b", _SIZE_HOLE, _END, _REST),
    ]
)
_ENTRY = b"".join(
    [
        *(rb"%(MetadataIndex)b", _NEW, rb"%(fqn)b", _TEXT_HOLE),
        *(rb"%%(index)b(?:%b|N)" % _INT, rb"%(offset)b", _SIZE_HOLE, _END),
        *(rb"%(_StorageInfo)b", _NEW, rb"%(relative_path)b", _TEXT_HOLE),
        *(rb"%%(offset)b(%b)" % _INT, rb"%%(length)b(%b)" % _INT, _END, _REST),
    ]
)


def chunk_pattern(known: Mapping[str, bytes]) -> re.Pattern[bytes] | None:
    """Compiles the pattern of a chunk; its groups are offsets, sizes and the rest.

    Args:
        known: The GET opcodes of `CHUNK_PARTS`.

    Returns:
        The pattern, or None as long as one of the opcodes is missing.
    """
    return _compiled(_CHUNK, CHUNK_PARTS, known)


def entry_pattern(known: Mapping[str, bytes]) -> re.Pattern[bytes] | None:
    """Compiles the pattern of an entry: groups fqn, offset, path, start, length and the rest.

    Args:
        known: The GET opcodes of `ENTRY_PARTS`.

    Returns:
        The pattern, or None as long as one of the opcodes is missing.
    """
    return _compiled(_ENTRY, ENTRY_PARTS, known)


def _compiled(
    template: bytes, parts: tuple[str, ...], known: Mapping[str, bytes]
) -> re.Pattern[bytes] | None:
    if not all(part in known for part in parts):
        return None
    opcodes = {part.encode(): re.escape(known[part]) for part in parts}
    return re.compile(template % opcodes, re.DOTALL)
