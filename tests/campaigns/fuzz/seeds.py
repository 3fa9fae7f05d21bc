"""Valid inputs to begin with, from the fixtures."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tests.campaigns.fuzz.mutation import Mutator

if TYPE_CHECKING:  # else it would be imported before it is instrumented
    from ckptkit.formats.parsing import Read

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
CORPUS = Path(__file__).resolve().parent / "corpus"
FINDINGS = Path(__file__).resolve().parent / "findings"


@cache
def files_of(name: str, folder: str = "checkpoint") -> dict[str, bytes]:
    """Returns the files of a fixture by their paths below its checkpoint."""
    root = FIXTURES / name / folder
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def fixture(name: str, pattern: str) -> bytes:
    """Returns the smallest file of a fixture whose path fits a pattern."""
    return min((d for p, d in files_of(name).items() if fnmatch(p, pattern)), key=len)


def found_in_fixtures(pattern: str, most: int = 12, longest: int = 6000) -> list[bytes]:
    """Returns the smallest files of all fixtures, no two of equal content."""
    found = {path.read_bytes() for path in sorted(FIXTURES.glob(pattern))}
    return sorted((data for data in found if len(data) <= longest), key=lambda d: (len(d), d))[
        :most
    ]


def strict(data: bytes) -> Read:
    """Reads as a file does that refuses to be read outside itself."""

    def read(start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= len(data):
            raise IndexError(f"bytes [{start:,}, {stop:,}) of {len(data):,} were asked for")
        return data[start:stop]

    return read


def prefixed(mutate: Mutator, length: int) -> Mutator:
    """Returns a mutation that mostly leaves the first bytes, which say how the rest is parsed."""

    def mutate_rest(rng: Random, data: bytes) -> bytes:
        head = data[:length].ljust(length, b"\0")
        if rng.random() < 0.05:
            head = rng.randbytes(length)
        return head + mutate(rng, data[length:])

    return mutate_rest


def stored_inputs(folder: Path, target: str) -> list[bytes]:
    """Returns the inputs of a target that are kept in a folder, in the order of their names."""
    return [path.read_bytes() for path in sorted((folder / target).glob("*"))]
