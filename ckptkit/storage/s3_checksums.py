"""By which checksums S3 knows an object, and what they have to be.

An object that was sent in parts has one checksum of all its bytes, or one of the checksums of its
parts. The second is the older one, which more stores know, and it costs a store next to nothing
when the upload is completed; either proves every byte.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.crc import crc32, crc32_combine

CHECKSUM = "ChecksumCRC32"
WHOLE = "FULL_OBJECT"
OF_PARTS = "COMPOSITE"
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class ObjectSums:
    """The checksums of an object that is sent in parts.

    Attributes:
        whole: The CRC-32 of all its bytes.
        of_parts: The CRC-32 of those of its parts, one after the other, the high byte first; None
            where one of them is not known.
        parts: How many there are.
    """

    whole: int
    of_parts: int | None
    parts: int

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> ObjectSums:
        """Joins those of all parts.

        Args:
            parts: CRC-32 and size of each, in their order.
        """
        whole = of_parts = count = 0
        for checksum, size_bytes in parts:
            whole = crc32_combine(whole, checksum, size_bytes)
            of_parts = crc32(checksum.to_bytes(_CRC_BYTES, "big"), of_parts)
            count += 1
        return cls(whole, of_parts, count)

    def agree_with(self, told: ToldSum) -> bool:
        """Tells whether a store means the same object; it may leave open which sum it tells."""
        if told.parts is not None and told.parts != self.parts:
            return False
        if told.kind == WHOLE:
            return told.crc32 == self.whole
        if told.kind == OF_PARTS:
            return told.crc32 == self.of_parts
        return told.crc32 in {self.whole, self.of_parts}


@dataclass(frozen=True, slots=True)
class ToldSum:
    """What a store says of an object's bytes.

    Attributes:
        crc32: The checksum.
        kind: Of what it is, `WHOLE` or `OF_PARTS`; empty where the store does not say.
        parts: Of how many parts, where the store says so.
    """

    crc32: int
    kind: str = ""
    parts: int | None = None

    @classmethod
    def in_answer(cls, answer: Mapping[str, Any]) -> ToldSum | None:
        """Returns the sum that an answer tells, None if it tells none."""
        text = answer.get(CHECKSUM)
        if not text:
            return None
        encoded, _, parts = str(text).partition("-")
        kind = OF_PARTS if parts else str(answer.get("ChecksumType", ""))
        return cls(decoded(encoded), kind, int(parts) if parts else None)


def encoded(crc32: int) -> str:
    """Returns a checksum as requests hold it."""
    return base64.b64encode(crc32.to_bytes(_CRC_BYTES, "big")).decode("ascii")


def decoded(text: str) -> int:
    """Reads a checksum."""
    return int.from_bytes(base64.b64decode(text), "big")
