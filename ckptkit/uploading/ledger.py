"""What of a step was uploaded already: a list beside its files on the node's own disk.

It only saves work: an entry counts where the store still has the very object.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.uploading.store import Entry
from ckptkit.writer.record import FOLDER

_SUFFIX = ".uploaded"
_DAMAGED = (OSError, ValueError, LookupError, TypeError)


@dataclass(slots=True)
class Ledger:
    """The list of one process; it reads those of others, too.

    Attributes:
        path: The file.
        entries: What was uploaded, by URL.
    """

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, record: str) -> Ledger:
        """Opens the list of a node's copy of a step.

        Args:
            folder: The copy.
            record: The path, in it, of the first record that the process uploads.
        """
        ledger = cls(folder / f"{record}{_SUFFIX}")
        for path in sorted((folder / FOLDER).glob(f"*{_SUFFIX}")):
            with suppress(*_DAMAGED):  # a kill may have cut the last line
                for line in path.read_text(encoding="utf-8").splitlines():
                    url, size_bytes, identity = json.loads(line)
                    ledger.entries[str(url)] = Entry(int(size_bytes), str(identity))
        return ledger

    def add(self, url: str, entry: Entry) -> None:
        """Notes that an object is there as it should be."""
        self.entries[url] = entry
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([url, *entry]) + "\n")
