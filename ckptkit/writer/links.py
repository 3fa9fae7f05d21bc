"""Files that several steps have in common: kept under another name, and linked from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.core.errors import SaveError
from ckptkit.storage.syscalls import Capabilities, link_file
from ckptkit.writer.failures import naming
from ckptkit.writer.messages import Link


class Links:
    """The links of one attempt's folder."""

    def __init__(self, folder: Path, capabilities: Capabilities) -> None:
        """Takes the folder, whose own folders are there."""
        self._folder = folder
        self._capabilities = capabilities

    def take(self, links: Sequence[Link]) -> None:
        """Gives files that are kept their names in the folder.

        Raises:
            SaveError: If one of them does not have its size any more.
            OSError: If it cannot be done.
        """
        for link in links:
            path = self._folder / link.path
            with naming(path):
                link_file(Path(link.kept), path, self._capabilities)
                size_bytes = path.stat().st_size
            if size_bytes != link.size_bytes:
                raise SaveError(
                    f"{size_bytes:,} bytes were found where an earlier save wrote"
                    f" {link.size_bytes:,}",
                    where=link.kept,
                    hint="leave the files of a running job alone; the next save writes it anew",
                )

    def keep(self, links: Sequence[Link]) -> str:
        """Gives durable files in the folder the names under which they are kept.

        Returns:
            Why not all of them have them now; empty where they have.
        """
        try:
            for link in links:
                kept = Path(link.kept)
                kept.parent.mkdir(parents=True, exist_ok=True)
                link_file(self._folder / link.path, kept, self._capabilities)
        except OSError as error:
            return (
                f"hard links were refused ({error.strerror or error}): frozen weights are written"
                " again with every save"
            )
        return ""
