"""Ten thousand single flipped bits: each is refused, or changes nothing in the output."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.numpy

from ckptkit.core.errors import CkptkitError
from ckptkit.engine.executor import ExecutionSettings, Executor
from ckptkit.engine.kernels import make_products
from ckptkit.engine.outcome import ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.formats.registry import find_candidates, read_index
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import error_of, find_problems
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.plan import SOURCE, Plan
from ckptkit.plan.selection import DTypePolicy, select_model
from ckptkit.storage.overlay import MemorySource
from tests.memory_target import MemoryTarget

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
WEIGHTS = "model.safetensors"
SLOWEST_SECONDS = 20  # one takes milliseconds; the rest is for busy machines
# Of each checkpoint, how many flips anywhere in it, and how many in its `.metadata` alone.
CASES = {
    "fsdp2_hsdp": (1_000, 2_500),  # 4 ranks, 2 replicas; 0-d, int64 and bool buffers
    "dcp_dtypes_and_layouts": (700, 1_000),  # every dtype, strided and empty tensors
    "dtensor_column_split": (1_300, 1_000),  # 4 ranks, columns and blocks
    "fsdp1_full_shard_flat": (1_500, 1_000),
}
Files = Mapping[str, bytes]


def files_of(name: str) -> dict[str, bytes]:
    folder = FIXTURES / name / "checkpoint"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def consolidated(files: Files) -> bytes:
    """Runs the stages of `ckptkit.consolidate` in memory: header and bytes of all tensors."""
    source, request = MemorySource(files), ConsolidateRequest()
    (candidate,) = find_candidates(source)
    index = read_index(source, candidate)
    entries = select_model(index, request, location=source.location)
    for problem in find_problems(index, entries):
        raise error_of(problem, source.location)
    products = make_products(entries, DTypePolicy(request.dtype), {})
    plan = Plan(tuple(layout_hf_weights(products, request.max_file_bytes)), {})
    inputs = Inputs({SOURCE: Origin(SOURCE, source, index)}, {})
    target = MemoryTarget()
    Executor(plan, inputs, target, ExecutionSettings(workers=1), ignore).run()
    target.commit(WEIGHTS)
    return target.files[WEIGHTS]


def flipped(files: Files, name: str, bit: int) -> dict[str, bytes]:
    data = bytearray(files[name])
    data[bit // 8] ^= 1 << bit % 8
    return {**files, name: bytes(data)}


def outcome(files: Files, truth: bytes) -> str:
    started = time.monotonic()
    try:
        found = "equal" if consolidated(files) == truth else "DIFFERENT"
    except CkptkitError as error:
        found = error.code
    took = time.monotonic() - started
    return found if took < SLOWEST_SECONDS else f"SLOW: {took:.0f} seconds"


def bits_of(files: Files, name: str) -> list[tuple[str, int]]:
    return [(name, bit) for bit in range(8 * len(files[name]))]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["anywhere", "metadata"])
@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_is_refused_or_changes_nothing(case: str, part: str) -> None:
    files = files_of(case)
    truth = consolidated(files)
    names = sorted(files) if part == "anywhere" else [".metadata"]
    count = CASES[case][part == "metadata"]
    everywhere = [spot for name in names for spot in bits_of(files, name)]
    outcomes: Counter[str] = Counter()
    wrong = []
    for name, bit in random.Random(f"{case} {part}").sample(everywhere, count):  # noqa: S311
        found = outcome(flipped(files, name, bit), truth)
        outcomes[found] += 1
        if found[0].isupper():
            wrong.append(f"{name}, byte {bit // 8}, bit {bit % 8}: {found}")
    assert not wrong, wrong
    assert outcomes["equal"] < count
    assert len(outcomes) > 4  # flips reached different checks


def test_ten_thousand_flips_are_tried() -> None:
    assert sum(anywhere + metadata for anywhere, metadata in CASES.values()) == 10_000


def test_every_bit_of_a_row_of_weights_is_under_its_checksum() -> None:
    files = files_of("fsdp2_hsdp")
    truth = consolidated(files)
    row = safetensors.numpy.load(truth)["up.weight"][0].tobytes()
    (name,) = (name for name, data in files.items() if row in data)
    first = 8 * files[name].index(row)
    for bit in range(first, first + 8 * len(row), 3):
        assert outcome(flipped(files, name, bit), truth) == "checksum-mismatch"


@pytest.mark.parametrize("word", [b"planner_data", b"storage_data", b"state_dict_metadata"])
def test_every_bit_in_the_name_of_a_table_matters(word: bytes) -> None:
    files = files_of("fsdp2_hsdp")
    truth = consolidated(files)
    first = 8 * files[".metadata"].index(word)
    for bit in range(first, first + 8 * len(word)):
        assert outcome(flipped(files, ".metadata", bit), truth) not in {"equal", "DIFFERENT"}


def test_the_shape_of_a_tensor_without_elements_matters_too() -> None:
    files = files_of("dcp_dtypes_and_layouts")
    truth = consolidated(files)
    shape = files[".metadata"].index(b"K\x00K\x05\x86")  # (0, 5), that of the tensor itself
    for bit in range(8 * (shape + 3), 8 * (shape + 4)):
        assert outcome(flipped(files, ".metadata", bit), truth) == "bad-format"
