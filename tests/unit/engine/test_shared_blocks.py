"""Which blocks of a source an output may have, found without a disk."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    FileRange,
    Fqn,
    Key,
    Record,
    RecordTable,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.object_parts import SharedRange
from ckptkit.engine.executor import ExecutionSettings, Executor
from ckptkit.engine.kernels import make_products
from ckptkit.engine.outcome import ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.engine.shared_blocks import _joined, _whole_blocks, with_shared_blocks
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.plan import SOURCE, Copy, OutputFile, Plan, copied_ranges, cut_into_tasks
from ckptkit.plan.selection import DTypePolicy
from ckptkit.storage.base import Source
from ckptkit.storage.overlay import MemorySource
from tests.memory_target import MemoryTarget
from tests.property.examples import examples

BLOCK, LEAST = 4096, 64 << 10
OFFSETS = st.integers(0, 1 << 20)


def shares(_source: Source, _path: str) -> str:
    return ""


def run_of(start: int, stored_start: int, size: int, path: str = "x") -> SharedRange:
    return SharedRange(SOURCE, FileRange(path, stored_start, stored_start + size), start)


@settings(max_examples=examples(200))
@given(OFFSETS, OFFSETS, st.integers(0, 300_000), st.booleans())
def test_whole_blocks_are_all_of_a_run_but_less_than_a_block_at_each_end(
    start: int, stored: int, size: int, is_congruent: bool
) -> None:
    if is_congruent:
        stored = stored // BLOCK * BLOCK + start % BLOCK
    parts = list(_whole_blocks(run_of(start, stored, size)))
    if (stored - start) % BLOCK:
        assert parts == []
        return
    if size >= LEAST:
        assert parts
    for part in parts:
        assert part.start % BLOCK == part.stored.start % BLOCK == part.stop % BLOCK == 0
        assert 0 <= part.start - start < BLOCK
        assert 0 <= start + size - part.stop < BLOCK
        assert part.start - start == part.stored.start - stored


@settings(max_examples=examples(100))
@given(
    OFFSETS, OFFSETS, st.lists(st.tuples(st.integers(1, 9), st.sampled_from("jfsp")), max_size=9)
)
def test_only_runs_that_follow_each_other_in_both_files_are_joined(
    start: int, stored: int, steps: list[tuple[int, str]]
) -> None:
    runs, joined, path = [run_of(start, stored, 5)], 1, "x"
    for size, kind in steps:  # (j)oins; a gap in the (f)ile, in what is (s)tored; another (p)ath
        last = runs[-1]
        path += "x" * (kind == "p")
        following = last.stop + (kind == "f"), last.stored.stop + (kind == "s")
        runs.append(run_of(*following, size, path))
        joined += kind != "j"
    found = list(_joined(iter(runs)))
    assert len(found) == joined
    assert sum(run.stored.size_bytes for run in found) == 5 + sum(size for size, _ in steps)
    assert (found[0].start, found[-1].stop) == (start, runs[-1].stop)
    assert list(_joined(iter([]))) == []


class Stored:
    """Tensors of bytes, cut into pieces that lie somewhere in one file."""

    def __init__(self) -> None:
        self.data = bytearray(17)
        self.records: list[Record] = []
        self.tensors: dict[Key, TensorEntry] = {}

    def add(self, name: str, array: NDArray[np.uint8], pieces: list[tuple[int, int]]) -> None:
        """`pieces`: how large each is, and where it begins modulo a block."""
        chunks, at = [], 0
        for size, residue in pieces:
            self.data += bytes((residue - len(self.data)) % BLOCK)
            start, part = len(self.data), array[at : at + size].tobytes()
            self.data += part
            self.records.append(Record(0, start, start + size, "raw", zlib.crc32(part)))
            chunks.append(Chunk(Span(at, at + size), len(self.records) - 1, 0))
            at += size
        self.tensors[Key(name)] = TensorEntry(
            *(Key(name), (name,), Fqn(name), "", "model", dtype_named("uint8"), array.shape),
            ChunkTable.of(chunks, 1),
        )

    def origins(self) -> dict[str, Origin]:
        source = MemorySource({"shard": bytes(self.data)})
        index = TensorIndex(
            "test", [source.stat("shard")], RecordTable.of(self.records), self.tensors
        )
        return {SOURCE: Origin(SOURCE, source, index)}

    def plan(self) -> Plan:
        policy = DTypePolicy("keep", ())
        products = make_products(list(self.tensors.values()), policy, {})
        return Plan(tuple(layout_hf_weights(products, 1 << 40)), {})

    def copied(self, origins: dict[str, Origin]) -> dict[str, bytes]:
        target, plan = MemoryTarget(), self.plan()
        Executor(plan, Inputs(origins, {}), target, ExecutionSettings(1), ignore).run()
        target.commit(plan.files[-1].path)
        return target.files


def starts_in(file: OutputFile) -> dict[str, int]:
    return {s.spec.name: s.start for s in file.segments if s.spec is not None}


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[Stored, int]:
    """Returns tensors, and how many of their bytes can be shared at least."""
    arrays = {
        f"t{number}": np.random.default_rng(number).integers(
            0, 256, draw(st.integers(1, 400_000)), np.uint8
        )
        for number in range(draw(st.integers(1, 3)))
    }
    shape = Stored()
    for name, array in arrays.items():
        shape.add(name, array, [(len(array), 0)])
    starts, stored, least = starts_in(shape.plan().files[0]), Stored(), 0
    for name, array in arrays.items():
        edges = sorted({0, len(array), *draw(st.lists(st.integers(0, len(array)), max_size=3))})
        pieces = []
        for low, high in pairwise(edges):
            shift = draw(st.sampled_from([0, 0, 64, 4095]))
            pieces.append((high - low, (starts[name] + low + shift) % BLOCK))
            if shift == 0 and high - low >= LEAST:
                least += high - low - 2 * BLOCK
        stored.add(name, array, pieces)
    return stored, least


@settings(max_examples=examples(60), deadline=None)
@given(stored_tensors())
def test_shared_blocks_are_the_bytes_of_the_output_and_as_many_as_can_be(
    case: tuple[Stored, int],
) -> None:
    stored, least = case
    origins = stored.origins()
    (file,) = with_shared_blocks(stored.plan(), origins, shares, "auto").files
    written, at = stored.copied(origins)[file.path], 0
    for part in file.shared:
        assert part.start % BLOCK == part.stored.start % BLOCK == 0
        assert part.start >= at
        at = part.stop
        source = stored.data[part.stored.start : part.stored.stop]
        assert source == written[part.start : part.stop]
    assert sum(part.stored.size_bytes for part in file.shared) >= least


@settings(max_examples=examples(60), deadline=None)
@given(stored_tensors())
def test_where_the_word_is_taken_each_byte_is_read_or_has_a_stored_checksum(
    case: tuple[Stored, int],
) -> None:
    stored, _ = case
    origins = stored.origins()
    plan = with_shared_blocks(stored.plan(), origins, shares, "auto", origins)
    written = stored.copied(origins)[plan.files[0].path]
    covered = np.zeros(len(written), np.uint8)
    for task in cut_into_tasks(0, plan.files[0]):
        covered[task.start : task.stop] += 1
    for segment in plan.files[0].segments:
        for copied in copied_ranges(segment):
            covered[copied.start : copied.stop] += 1
            assert zlib.crc32(written[copied.start : copied.stop]) == copied.crc32
    assert (covered == 1).all()
    assert bool(plan.files[0].shared) == any(
        isinstance(s.body, Copy) and s.body.copied for s in plan.files[0].segments
    )


def test_what_does_not_fit_is_refused_where_it_has_to_be_shared() -> None:
    stored = Stored()
    stored.add("w", np.zeros(200_000, np.uint8), [(200_000, 1)])
    plan, origins = stored.plan(), stored.origins()
    assert with_shared_blocks(plan, origins, shares, "auto").files[0].shared == ()
    with pytest.raises(RefusedError, match="no tensor is stored at an offset that fits"):
        with_shared_blocks(plan, origins, shares, "always")
    stored = Stored()
    stored.add("w", np.zeros(200_000, np.uint8), [(200_000, 0)])
    plan, origins = stored.plan(), stored.origins()
    assert with_shared_blocks(plan, origins, shares, "never") is plan
    refused = with_shared_blocks(plan, origins, lambda *_: "no", "auto")
    assert refused.files[0].shared == ()
    with pytest.raises(RefusedError, match="source: no"):
        with_shared_blocks(plan, origins, lambda *_: "no", "always")
    assert with_shared_blocks(plan, origins, shares, "auto").files[0].shared
    small: Any = Stored()
    small.add("w", np.zeros(LEAST - 1, np.uint8), [(LEAST - 1, 0)])
    assert with_shared_blocks(small.plan(), small.origins(), shares, "auto").files[0].shared == ()
