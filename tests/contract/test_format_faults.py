"""Every format, damaged in every way: refused with a proper error, or of no matter; never else."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.numpy

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.registry import recognise
from tests.contract.fault_bench import (
    DIFFERENT,
    SAME,
    TAKES_MEMORY,
    Bench,
    consolidated,
    flipped,
    hostile_pickles,
    room_for_pickle,
    step_files,
    with_pickle,
)
from tests.contract.format_faults import CASES, FaultCase
from tests.files import contents
from tests.sampled import sampled

_FLIPS_ELSEWHERE = 6  # per checkpoint; one more for each of its files
_THOROUGH = 2  # files in which everything is tried, where trying it in all would take long
_MOST_FILES = 8  # Each is cut in all ways, and one bit of its weights is flipped.
_MOST_MEMORY_BYTES = 48 << 20
_CUTS = ((0.5, 0), (1, 1), (0, 0))  # the part of a file that is left, and how many bytes less
_MEMORY = Path("/dev/shm")  # noqa: S108  names in it are made by tempfile
_TRACE = "trace"
_SAMPLE = (  # of each format and kind of file one; all others are in `make test-slow`
    *("fsdp2_hsdp", "dcp_hf_pretrained", "dcp_images_fsdp2", "torchtitan_steps"),
    *("zero1_bf16", "universal_small_zero3", "rank_files_torch_2_4", "fairscale_apart"),
    *("torch_bin_sharded", "torch_nested", "torch_legacy_training", "hf_sharded"),
    *("torchsnapshot_dtensor", "torch_experimental", "torch_checkpointing_safetensors"),
    *("megatron_ranks_qwen2_moe_tp2_ep2", "meta_llama_3"),
)
_LONG = (  # tests that take long, of which a format has other quick ones
    "test_a_flipped_bit_anywhere_is_refused_or_changes_nothing",
    "test_a_hostile_pickle_is_refused_and_nothing_of_it_happens",
    "test_beside_another_format_the_right_one_is_read_and_the_other_named",
)
_SHORT_SAMPLE = (  # of each kind of container one
    *("fsdp2_hsdp", "zero1_bf16", "torch_nested", "hf_sharded", "torchsnapshot_dtensor"),
    *("torch_legacy_training", "meta_llama_3"),
)


def _name(case: FaultCase) -> str:
    return f"of {case.fixture}"


def _place() -> Path | None:
    return _MEMORY if _MEMORY.is_dir() else None


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A checkpoint in memory, where there is a place for it: thousands of outputs are synced."""
    with TemporaryDirectory(prefix="ckptkit-faults-", dir=_place()) as folder:
        yield Bench(request.param, Path(folder))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tries each test on the sample of `make test`, and on all other checkpoints when slow."""
    if "bench" not in metafunc.fixturenames:
        return
    quick = _SHORT_SAMPLE if metafunc.function.__name__ in _LONG else _SAMPLE
    cases = sampled(CASES, quick, lambda case: case.fixture)
    metafunc.parametrize("bench", cases, ids=_name, indirect=True, scope="module")


def _is_refused(outcome: str) -> bool:
    return not outcome[0].isupper() and outcome != SAME


def _wrong(bench: Bench, outcomes: dict[str, str], *, needed: set[str]) -> dict[str, str]:
    """What did not come out as it has to, by the path of the damaged file."""
    return {
        path: outcome
        for path, outcome in outcomes.items()
        if not _is_refused(outcome)
        and (path in needed or outcome != SAME)
        and not bench.is_advisory(path)
    }


def test_a_lost_file_is_noticed_or_of_no_matter(bench: Bench) -> None:
    needed = bench.needed() | set(bench.matching(bench.case.ranks))
    outcomes = {path: bench.outcome({path: None}) for path in bench.files}
    assert not _wrong(bench, outcomes, needed=needed)


def test_a_file_cut_short_is_noticed_or_of_no_matter(bench: Bench) -> None:
    needed = bench.needed() | set(bench.matching(bench.case.ranks))
    files = [path for path, data in bench.files.items() if data]
    for turn, (part, less) in enumerate(_CUTS):
        outcomes = {
            path: bench.outcome({path: data[: int(part * len(data)) - less]})
            for number, path in enumerate(files)
            if len(files) <= _MOST_FILES or number % len(_CUTS) == turn
            for data in [bench.files[path]]
        }
        assert not _wrong(bench, outcomes, needed=needed)


def test_a_flipped_bit_among_the_weights_is_seen_but_where_nothing_can_prove_them(
    bench: Bench,
) -> None:
    unseen, chances = [], bench.chances("weights")
    held = list(bench.holders.items())
    for path, extents in held if len(held) <= _MOST_FILES else chances.sample(held, _MOST_FILES):
        start, stop = chances.choice(extents)
        bit = chances.randrange(8 * start, 8 * stop)
        outcome = bench.outcome({path: flipped(bench.files[path], bit)})
        assert outcome != SAME or bench.is_unproven(path), (path, bit)
        if not _is_refused(outcome):
            unseen.append(path)
            assert bench.is_unproven(path), (path, bit, outcome)
    assert bool(unseen) == bool(bench.case.unproven), "what is said to be unproven is proven"


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(bench: Bench) -> None:
    everywhere = [path for path, data in bench.files.items() if data]
    chances = bench.chances("anywhere")
    paths = (
        everywhere if len(everywhere) <= _MOST_FILES else chances.sample(everywhere, _MOST_FILES)
    )
    for path in paths + chances.choices(everywhere, k=_FLIPS_ELSEWHERE):
        bit = chances.randrange(8 * len(bench.files[path]))
        outcome = bench.outcome({path: flipped(bench.files[path], bit)})
        fine = outcome == SAME or _is_refused(outcome)
        assert fine or (outcome == DIFFERENT and bench.is_unproven(path)), (path, bit, outcome)


def _with_hostile_pickles(bench: Bench) -> Iterator[tuple[str, str, bytes]]:
    """Yields files that hold a hostile pickle: their paths, what it does, and their content.

    The first files of a checkpoint get all kinds, each other one gets the next kind in turn.
    """
    for number, path in enumerate(bench.matching(bench.case.pickles)):
        for kind, pickled in _in_turn(hostile_pickles(_TRACE, 1 << 20), number):
            yield path, kind, pickled
    chances = bench.chances("archives")
    for number, path in enumerate(bench.matching(bench.case.archives)):
        whole = bench.files[path]
        start, stop = chances.choice(bench.archives_of(path))
        archive = whole[start:stop]
        kinds = hostile_pickles(_TRACE, room_for_pickle(archive, whole))
        for kind, pickled in _in_turn(kinds, number):
            yield path, kind, whole[:start] + with_pickle(archive, pickled) + whole[stop:]


def _in_turn(kinds: dict[str, bytes], number: int) -> list[tuple[str, bytes]]:
    every = list(kinds.items())
    return every if number < _THOROUGH else [every[number % len(every)]]


def test_a_hostile_pickle_is_refused_and_nothing_of_it_happens(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = bench.needed() | set(bench.matching(bench.case.ranks))
    wrong = []
    for path, kind, content in _with_hostile_pickles(bench):
        outcome = bench.outcome({path: content})
        if not _is_refused(outcome) and (path in needed or outcome != SAME):
            wrong.append((path, kind, outcome))
        if kind.startswith("runs") and path in needed and outcome != "unsafe-pickle":
            wrong.append((path, kind, outcome))
    assert not wrong
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_pickle_takes_no_memory(bench: Bench) -> None:
    tried: set[str] = set()
    for path, kind, content in _with_hostile_pickles(bench):
        ending = path.rpartition(".")[2]
        if kind != TAKES_MEMORY or ending in tried:
            continue
        tried.add(ending)
        tracemalloc.start()
        try:
            assert bench.outcome({path: content}) != DIFFERENT
            assert tracemalloc.get_traced_memory()[1] < _MOST_MEMORY_BYTES, (path, kind)
        finally:
            tracemalloc.stop()


def test_a_stale_file_of_another_world_size_is_refused_or_left_alone(bench: Bench) -> None:
    stale = {name: bench.files[path] for name, path in bench.case.stale.items()}
    if not stale:
        return
    outcome = bench.outcome(stale)
    assert outcome == SAME if bench.case.stale_is_left_alone else _is_refused(outcome), outcome


def test_a_file_of_another_step_is_refused_where_the_format_can_tell(bench: Bench) -> None:
    for name, content in step_files(bench.case).items():
        assert content != bench.files[name], "the files of both steps are equal"
        outcome = bench.outcome({name: content})
        unseen = bool(bench.case.step_is_unseen)
        assert outcome == DIFFERENT if unseen else _is_refused(outcome), (name, outcome)


# Every bit of what matters most, in two checkpoints of DCP


@contextmanager
def bench_of(fixture: str) -> Iterator[Bench]:
    (case,) = (case for case in CASES if case.fixture == fixture)
    with TemporaryDirectory(prefix="ckptkit-faults-", dir=_place()) as folder:
        yield Bench(case, Path(folder))


def _flip(bench: Bench, path: str, bit: int) -> str:
    return bench.outcome({path: flipped(bench.files[path], bit)})


@pytest.mark.slow
def test_every_bit_of_a_row_of_weights_is_under_its_checksum() -> None:
    with bench_of("fsdp2_hsdp") as bench:
        (weights,) = bench.truth.values()
        row = safetensors.numpy.load(weights)["up.weight"][0].tobytes()
        (path,) = (path for path, data in bench.files.items() if row in data)
        first = 8 * bench.files[path].index(row)
        for bit in range(first, first + 8 * len(row), 3):
            assert _flip(bench, path, bit) == "checksum-mismatch"


@pytest.mark.slow
@pytest.mark.parametrize("word", [b"planner_data", b"storage_data", b"state_dict_metadata"])
def test_every_bit_in_the_name_of_a_table_matters(word: bytes) -> None:
    with bench_of("fsdp2_hsdp") as bench:
        first = 8 * bench.files[".metadata"].index(word)
        for bit in range(first, first + 8 * len(word)):
            assert _is_refused(_flip(bench, ".metadata", bit))


def test_the_shape_of_a_tensor_without_elements_matters_too() -> None:
    with bench_of("dcp_dtypes_and_layouts") as bench:
        # (0, 5), that of the tensor itself
        shape = bench.files[".metadata"].index(b"K\x00K\x05\x86")
        for bit in range(8 * (shape + 3), 8 * (shape + 4)):
            assert _flip(bench, ".metadata", bit) == "bad-format"


# Two formats in one directory


def _formats(case: FaultCase) -> set[str]:
    return {candidate.format for candidate in recognise(list(contents(case.path)))}


def _guests(host: FaultCase) -> list[FaultCase]:
    """Two cases of other formats: which, goes round, so that in the end each meets each."""
    at = CASES.index(host)
    others = [case for case in (*CASES[at + 1 :], *CASES[:at]) if case.checkpoint == "checkpoint"]
    fit = [case for case in others if not _formats(host) & _formats(case)]
    return fit[:: max(len(fit) - 1, 1)]


def _names(case: FaultCase) -> set[str]:
    """What a message may call a checkpoint: files and folders of it, `.` for one in the folder."""
    paths = [path for path in contents(case.path) if not path.endswith("config.json")]
    itself = {"'.'"} if any("/" not in path for path in paths) else set()
    return {*paths, *(path.split("/")[0] for path in paths), *itself}


def _says(text: str, case: FaultCase) -> bool:
    return any(name in text for name in _names(case))


def test_beside_another_format_the_right_one_is_read_and_the_other_named(
    bench: Bench, tmp_path: Path
) -> None:
    host, alone = bench.case, _result(bench.folder, tmp_path / "alone", bench.case)[0]
    for number, guest in enumerate(_guests(host)):
        folder = tmp_path / f"mixture_{number}"
        shutil.copytree(guest.path, folder)
        shutil.copytree(bench.folder, folder, dirs_exist_ok=True)
        found, refusal = _result(folder, tmp_path / f"out_{number}", host)
        if refusal is not None:
            assert refusal.exit_status in {3, 4}, refusal
            assert _says(str(refusal), host), refusal
            assert _says(str(refusal), guest), refusal
            continue
        other, _ = _result(guest.path, tmp_path / f"other_{number}", guest)
        assert found in (alone, other), guest
        notes = " ".join(ckptkit.inspect(folder, select=host.options.get("select")).notes)
        is_named = "select" in host.options or _says(notes, host if found == other else guest)
        assert is_named or "older step" in notes, notes


def _result(
    folder: Path, out: Path, case: FaultCase
) -> tuple[dict[str, bytes], CkptkitError | None]:
    """Consolidates the model alone: of the guest's optimizer the host may have no equal."""
    options = {name: value for name, value in case.options.items() if name in {"select", "map"}}
    try:
        return consolidated(folder, out, options), None
    except CkptkitError as error:
        return {}, error
