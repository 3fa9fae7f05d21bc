"""What running a part of a plan leaves to know: plain values that processes hand on and join."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.execution.ledger import OpenRecord
from ckptkit.execution.seals import Slot
from ckptkit.kernels.checksums import ChecksumPiece, join_leaves
from ckptkit.kernels.shares import CRC32_SCHEME
from ckptkit.storage.shared_output import SentRows

Leaves = dict[str, dict[int, bytes]]
Sealed = tuple[int, int, int]


def _no_leaves() -> Leaves:
    return defaultdict(dict)


@dataclass(slots=True)
class Digests:
    """Leaves of digests, by tensor name and by path of side file.

    `crc32s` are the checksums of tensors that nobody has seen all of, since a store copied parts.
    """

    tensors: Leaves = field(default_factory=_no_leaves)
    files: Leaves = field(default_factory=_no_leaves)
    crc32s: dict[str, int] = field(default_factory=dict)

    def of_tensor(self, name: str) -> str:
        """Returns the digest of a tensor's bytes; an empty tensor has no leaves."""
        if name in self.crc32s:
            return f"{CRC32_SCHEME}:{self.crc32s[name]:08x}"
        return join_leaves(self.tensors.get(name, {}))

    def of_file(self, path: str) -> str:
        """Returns the digest of a side file's bytes."""
        return join_leaves(self.files.get(path, {}))

    def first_gap(self, sizes: Iterable[tuple[str, int]]) -> str | None:
        """Returns the first tensor of which a leaf is missing, or None.

        Args:
            sizes: Of all tensors, in bytes, by name.
        """
        for name, size_bytes in sizes:
            if len(self.tensors.get(name, {})) != -(-size_bytes // LEAF_BYTES):
                return name
        return None

    def first_difference(self, other: Digests) -> str | None:
        """Returns the first tensor or side file of which a leaf in `other` is another one here."""
        for mine, theirs in ((self.tensors, other.tensors), (self.files, other.files)):
            for name, leaves in theirs.items():
                if not leaves.items() <= mine.get(name, {}).items():
                    return name
        return None

    def update(self, other: Digests) -> None:
        """Adds the leaves of another part."""
        for mine, theirs in ((self.tensors, other.tensors), (self.files, other.files)):
            for name, leaves in theirs.items():
                mine[name].update(leaves)


@dataclass(slots=True)
class Outcome:
    """What some of a plan's tasks have found out.

    Attributes:
        digests: Of what was written.
        pieces: The checksums that trailers wait for, by file and segment.
        open_records: By origin, the source records of which other tasks read the rest.
        unverified: By origin, the tensors of which some bytes had no stored checksum.
        sealed: The trailers that are written already: file, segment, and first byte in it.
        sent: What a store has told of the parts that it took, by file; see `SharedOutput`.
    """

    digests: Digests = field(default_factory=Digests)
    pieces: dict[Slot, Sequence[ChecksumPiece]] = field(default_factory=dict)
    open_records: dict[str, dict[int, OpenRecord]] = field(default_factory=dict)
    unverified: dict[str, set[str]] = field(default_factory=dict)
    sealed: set[Sealed] = field(default_factory=set)
    sent: SentRows = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable[Outcome]) -> Outcome:
        """Joins the outcomes of parts that have no task in common."""
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    def add(self, part: Outcome) -> None:
        """Adds the outcome of a part that has no task in common with this.

        Raises:
            ChecksumError: If the two found different data in one file of the source.
        """
        self.digests.update(part.digests)
        for slot, pieces in part.pieces.items():
            self.pieces[slot] = [*self.pieces.get(slot, ()), *pieces]
        for origin, records in part.open_records.items():
            mine = self.open_records.setdefault(origin, {})
            for number, record in records.items():
                mine[number] = record.joined(mine[number]) if number in mine else record
        for origin, keys in part.unverified.items():
            self.unverified.setdefault(origin, set()).update(keys)
        self.sealed |= part.sealed
        for path, rows in part.sent.items():
            self.sent.setdefault(path, []).extend(rows)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; names are sorted, so that equal outcomes give equal text."""
        return {
            "tensors": _leaves_to_json(self.digests.tensors),
            "files": _leaves_to_json(self.digests.files),
            "pieces": [
                [file, segment, *map(list, pieces)]
                for (file, segment), pieces in sorted(self.pieces.items())
            ],
            "open_records": {
                origin: [[number, *record.to_json()] for number, record in sorted(records.items())]
                for origin, records in sorted(self.open_records.items())
            },
            "unverified": {o: sorted(keys) for o, keys in sorted(self.unverified.items())},
            "sealed": sorted(self.sealed),
            "sent": {path: sorted(rows) for path, rows in sorted(self.sent.items())},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """Reads what `to_json` gave."""
        return cls(
            digests=Digests(_leaves_of(values["tensors"]), _leaves_of(values["files"])),
            pieces={
                (file, segment): [(start, length, crc) for start, length, crc in pieces]
                for file, segment, *pieces in values["pieces"]
            },
            open_records={
                origin: {number: OpenRecord.from_json(rest) for number, *rest in records}
                for origin, records in values["open_records"].items()
            },
            unverified={origin: set(keys) for origin, keys in values["unverified"].items()},
            sealed={(file, segment, start) for file, segment, start in values["sealed"]},
            sent={path: list(rows) for path, rows in values["sent"].items()},
        )


def _leaves_to_json(book: Leaves) -> dict[str, dict[str, str]]:
    return {
        name: {str(number): leaf.hex() for number, leaf in sorted(leaves.items())}
        for name, leaves in sorted(book.items())
    }


def _leaves_of(values: Mapping[str, Mapping[str, str]]) -> Leaves:
    book = _no_leaves()
    for name, leaves in values.items():
        book[name] = {int(number): bytes.fromhex(leaf) for number, leaf in leaves.items()}
    return book
