"""A sample of the campaign of bit rot: in what ckptkit writes, every fault is found or harmless."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from tests.campaigns.bit_rot.__main__ import FOUND, HARMLESS, MISSED, OUTCOMES, run_case
from tests.campaigns.bit_rot.cases import CASES, FIXTURES
from tests.campaigns.bit_rot.damage import classify, draw_faults
from tests.sampled import sampled

SAMPLE = (
    "ckptkit: step, accelerate's layout",
    "ckptkit: output, safetensors",
    "ckptkit: adapter",
    "ckptkit: delta",
    "DCP",
)


@pytest.mark.parametrize("name", sampled(SAMPLE, SAMPLE[1:-1]))
def test_no_fault_passes_in_silence(name: str, tmp_path: Path) -> None:
    count = run_case(name, tmp_path / "trial", seed=3, flips=12)
    assert count.missed == []
    assert count.wrong == []
    assert count.outcomes[FOUND] > 4
    assert count.outcomes.total() >= 12
    assert set(count.outcomes) <= set(OUTCOMES)


def test_faults_that_no_checksum_covers_are_counted_as_such(tmp_path: Path) -> None:
    """The judge is no yes-man: bytes of foreign safetensors files have no checksum."""
    count = run_case("safetensors, HF folder", tmp_path / "trial", seed=3, flips=12)
    assert count.outcomes[MISSED] > 0
    assert count.wrong == []


def test_every_class_of_bytes_is_found_in_the_containers() -> None:
    archive = (FIXTURES / "fsdp2_hsdp" / "checkpoint" / "__0_0.distcp").read_bytes()
    classes = classify("__0_0.distcp", archive)
    assert {"header", "directory", "checksum", "padding", "pickle", "data"} <= classes.keys()
    other = safetensors()
    for found, data in ((classes, archive), (classify("a.safetensors", other), other)):
        spans = sorted(span for spans in found.values() for span in spans)
        assert (spans[0][0], spans[-1][1]) == (0, len(data))
        assert all(one[1] == two[0] for one, two in pairwise(spans))


def safetensors() -> bytes:
    return (FIXTURES / "hf_sharded/checkpoint/model-00001-of-00004.safetensors").read_bytes()


def test_faults_are_repeated_by_their_seed() -> None:
    files = {"a.safetensors": safetensors(), "config.json": b"{}" * 40}
    drawn = [
        [(str(fault), zlib.crc32(fault.data)) for fault in draw_faults(files, 40, seed)]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    kinds = {fault.kind for fault in draw_faults(files, 80, "1")}
    assert kinds == {"flip", "swap", "truncate", "zero"}
    assert all(fault.data != files[fault.path] for fault in draw_faults(files, 80, "1"))
    assert set(CASES) >= set(SAMPLE)
    assert HARMLESS in OUTCOMES
