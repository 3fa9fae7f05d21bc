"""Plain values as the manifest of a torchsnapshot snapshot writes them down, as texts.

Source: torchsnapshot/manifest.py (`PrimitiveEntry`), 0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct

from ckptkit.core.errors import FormatError
from ckptkit.formats.pickles import shown

PRIMITIVES = frozenset({"int", "str", "bool", "bytes", "float"})
_INTEGER = re.compile(r"-?[0-9]{1,4000}")  # python makes no longer ones from a text
_BOOLS = {"True": True, "False": False}
_DOUBLE = struct.Struct("<d")


def plain_value(kind: str, text: object) -> object:
    """Returns the value that a text of a kind among `PRIMITIVES` stands for.

    >>> plain_value("float", "exSuR+F6hD8="), plain_value("bool", "False")
    (0.01, False)

    Raises:
        FormatError: If it stands for none.
    """
    if not isinstance(text, str):
        raise FormatError(f"value of the kind {shown(kind)} is not a text")
    if kind == "str":
        return text
    if kind == "bool" and text in _BOOLS:
        return _BOOLS[text]
    if kind == "int" and _INTEGER.fullmatch(text):
        return int(text)
    found = _decoded(text) if kind in {"bytes", "float"} else None
    if found is not None and kind == "float":
        found = _DOUBLE.unpack(found)[0] if len(found) == _DOUBLE.size else None
    if found is None:
        raise FormatError(f"text {shown(text)} is no value of the kind {shown(kind)}")
    return found


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
