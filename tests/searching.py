"""Candidates without files, and a search among them."""

from __future__ import annotations

from ckptkit.conversion.source.search import Search
from ckptkit.formats.base import Candidate
from ckptkit.storage.overlay import MemorySource, OverlaySource


def dcp(folder: str) -> Candidate:
    path = f"{folder}/.metadata" if folder else ".metadata"
    return Candidate("dcp", folder, (path,), "'.metadata'")


class Chooser(Search):
    """Knows which folders or files are broken, and why; there are none but in the candidates."""

    def __init__(
        self, broken: tuple[str, ...] = (), reason: str = "a file", location: str = "here"
    ) -> None:
        super().__init__(OverlaySource([MemorySource({})]), location)
        self._broken, self._reason = broken, reason

    def describe_missing(self, candidate: Candidate) -> str:
        is_broken = {candidate.folder, *candidate.files}.intersection(self._broken)
        return self._reason if is_broken else ""

    def read_step(self, candidate: Candidate) -> int | None:
        return 9 if "last" in candidate.files[0] else None
