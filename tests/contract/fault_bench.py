"""A copy of a real checkpoint that is damaged, consolidated, and made whole again."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import CannotPlanError, CkptkitError
from ckptkit.core.index import ChunkTable
from ckptkit.engine.locate import Locator
from tests.contract.format_faults import FIXTURES, FaultCase
from tests.files import contents

SAME = "the right bytes"
DIFFERENT = "OTHER BYTES"
TAKES_MEMORY = "takes gigabytes"
_WEIGHTS = (".safetensors", ".bin", ".distcp")
_REFUSALS = {3, 6}  # damaged input, and a check that failed
_END_OF_ZIP = 22  # bytes of the last record of an archive without a comment


class Bench:
    """One checkpoint, on which one thing after another is broken."""

    def __init__(self, case: FaultCase, folder: Path) -> None:
        self.case = case
        self.folder = folder / "run" / "checkpoint"
        shutil.copytree(case.path, self.folder)
        self.files = contents(self.folder)
        self._outbox = folder / "outbox"
        self._outbox.mkdir()
        self.truth = self._consolidated()
        self.holders = self._found_holders()

    def chances(self, purpose: str) -> random.Random:
        """Returns the same random numbers for the same case and purpose, every time."""
        return random.Random(f"{self.case.fixture} {purpose}")  # noqa: S311

    def outcome(self, changes: Mapping[str, bytes | None]) -> str:
        """Puts files in place of others (None: takes them away) and tells what comes of it."""
        try:
            for path, content in changes.items():
                self._put(path, content)
            return self._run()
        finally:
            for path in changes:
                self._put(path, self.files.get(path))

    def _put(self, path: str, content: bytes | None) -> None:
        file = self.folder / path
        file.unlink(missing_ok=True)
        if content is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def _run(self) -> str:
        try:
            return SAME if self._consolidated() == self.truth else DIFFERENT
        except CkptkitError as error:
            refusal = error
        assert refusal.where, refusal
        assert not refusal.message.endswith("."), refusal
        assert list(self._outbox.iterdir()) == [], "something was left behind"
        if refusal.exit_status in _REFUSALS:
            return refusal.code
        if "the output would not load as" in refusal.message:  # config.json means another model
            return refusal.code
        is_gone = "select" in self.case.options and isinstance(refusal, CannotPlanError)
        return refusal.code if is_gone else f"EXIT {refusal.exit_status}, {refusal}"

    def _consolidated(self) -> dict[str, bytes]:
        out = self._outbox / "out"
        try:
            return consolidated(self.folder, out, self.case.options)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _found_holders(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        with open_checkpoint(self.folder, select=self.case.options.get("select")) as checkpoint:
            locator = Locator(checkpoint.source, checkpoint.index)
            for entry in checkpoint.index.of_part("model"):
                for row in _stored_once(entry.chunks):
                    at = locator.locate(entry, entry.chunks, row)
                    if at.path in self.files:  # and was not made of other files
                        found.setdefault(at.path, []).append((at.start, at.stop))
        return found

    def archives_of(self, path: str) -> list[tuple[int, int]]:
        """Where torch's archives in a file are: those with elements of the model, if any has."""
        every = list(archives_in(self.files[path]))
        held = self.holders.get(path, [])
        return [
            (start, stop) for start, stop in every if any(start <= at < stop for at, _ in held)
        ] or every

    def needed(self) -> set[str]:
        """The files without which nothing may come out."""
        named = {path for path in self.files if _fits(path, self.case.needed)}
        return named | self.holders.keys()

    def matching(self, patterns: tuple[str, ...]) -> list[str]:
        """The files whose paths fit a pattern; each pattern has to fit some."""
        for pattern in patterns:
            assert any(fnmatch(path, pattern) for path in self.files), pattern
        return sorted(path for path in self.files if _fits(path, patterns))

    def is_unproven(self, path: str) -> bool:
        """Tells whether a flipped bit in a file may, for a reason given, go unseen."""
        return _fits(path, (*self.case.unproven, *self.case.advisory))

    def is_advisory(self, path: str) -> bool:
        """Tells whether a file beside the model may, for a reason given, change the output."""
        return _fits(path, tuple(self.case.advisory))


def _stored_once(chunks: ChunkTable) -> list[int]:
    """The rows of a table of chunks that hold elements and have no equal: no replicas."""
    places = [row.tobytes() for row in np.hstack([chunks.offsets, chunks.sizes])]
    times = Counter(places)
    held = np.flatnonzero(chunks.elements() > 0).tolist()
    return [row for row in held if times[places[row]] == 1]


def consolidated(checkpoint: Path, out: Path, options: Mapping[str, Any]) -> dict[str, bytes]:
    """Writes the model of a checkpoint anew, and returns the weights as they were written."""
    given: dict[str, Any] = {"to": "hf", "workers": 1, **options}
    ckptkit.convert(checkpoint, out, **given)
    return weights_in(out)


def weights_in(folder: Path) -> dict[str, bytes]:
    """What the files of weights below a folder hold, by their paths."""
    return {name: data for name, data in contents(folder).items() if name.endswith(_WEIGHTS)}


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def step_files(case: FaultCase) -> dict[str, bytes]:
    """The files of another step under the names that they replace."""
    return {name: (FIXTURES / path).read_bytes() for name, path in case.of_another_step.items()}


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# Hostile pickles


def _calling(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n(X".encode() + _text(argument) + b"tR."


def _text(value: str) -> bytes:
    return len(value).to_bytes(4, "little") + value.encode()


def hostile_pickles(trace: str, room: int) -> dict[str, bytes]:
    """Pickles that run a program, take memory, or lead a reader astray, by what they do."""
    depth = min((room - 4) // 2, 20_000)
    return {
        "runs a program": _calling("os", "system", f"touch {trace}"),
        "runs Python": _calling("builtins", "eval", f"open('{trace}','w')"),
        TAKES_MEMORY: b"\x80\x02Nr\xff\xff\xff\x7f.",
        "nests deeply": b"\x80\x02" + b"]" * (depth + 1) + b"a" * depth + b".",
        "names what is not known": b"\x80\x02cfractions\nFraction\n.",
    }


def archives_in(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields where torch's archives, one or several end to end, begin and end."""
    start = 0
    while (end := data.find(b"PK\5\6", start)) >= 0:
        yield start, end + _END_OF_ZIP
        start = end + _END_OF_ZIP


def with_pickle(archive: bytes, pickled: bytes) -> bytes:
    """The same archive with another pickle, which has its checksum.

    One that is no longer than the original takes its place, byte by byte, and what is left of the
    room is filled behind its end, where no reader looks; so the archive's length is what it was.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        records = {name: found.read(name) for name in found.namelist()}
    (name,) = (name for name in records if name.endswith("/data.pkl"))
    original = records[name]
    if len(pickled) > len(original):
        return _archive_of({**records, name: pickled})
    replaced = pickled.ljust(len(original), b"\0")
    at = archive.index(original)
    swapped = archive[:at] + replaced + archive[at + len(original) :]
    old, new = (zlib.crc32(content).to_bytes(4, "little") for content in (original, replaced))
    return swapped.replace(old, new)


def _archive_of(records: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def room_for_pickle(archive: bytes, whole: bytes) -> int:
    """How long another pickle may be: any, but where other archives follow in the file."""
    if len(archive) == len(whole):
        return 1 << 20
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        return next(i.file_size for i in found.infolist() if i.filename.endswith("/data.pkl"))
