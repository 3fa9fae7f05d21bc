"""Resuming on other numbers of ranks and other strategies, and from damaged steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.core.index import Key
from ckptkit.formats.registry import find_candidates, read_index
from ckptkit.storage.local.source import LocalSource

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("resume_run.py")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def launch(run_ranks: Callable[..., object]) -> Run:
    def run(processes: int, *arguments: object) -> str:
        done = run_ranks(SCRIPT, processes, *arguments)
        return f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]

    return run


@pytest.fixture(scope="module")
def saved(launch: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of FSDP2 saved after three steps."""
    run = tmp_path_factory.mktemp("run")
    launch(2, run, "save", "fsdp2")
    return run


@pytest.mark.slow
def test_fsdp2_resumes_bit_for_bit_on_other_ranks_and_strategies(launch: Run, saved: Path) -> None:
    output = launch(3, saved, "resume", "fsdp2", "fsdp2_meta", "fsdp1_orig", "plain")
    assert output.count("RESUMED") == 12
    assert "saved by 2 ranks and 3 resume: random numbers are seeded anew" in output
    output = launch(2, saved, "resume", "fsdp2_meta", "fsdp1_orig")
    assert "seeded anew" not in output


@pytest.mark.slow
def test_fsdp1_resumes_on_fsdp2_and_back(launch: Run, tmp_path: Path) -> None:
    launch(3, tmp_path, "save", "fsdp1_flat")
    launch(2, tmp_path, "resume", "fsdp2_one", "fsdp1_flat", "fsdp1_orig_one", "plain_one")


@pytest.mark.slow
def test_hsdp_resumes_on_fewer_ranks(launch: Run, tmp_path: Path) -> None:
    launch(4, tmp_path, "save", "hsdp")
    launch(3, tmp_path, "resume", "fsdp2_meta", "fsdp1_orig")


def _copy(saved: Path, run: Path, step: int) -> Path:
    """Copies the step under another number."""
    shutil.copytree(saved / "checkpoint-3", run / f"checkpoint-{step}")
    path = run / f"checkpoint-{step}/ckptkit.json"
    document = json.loads(path.read_text())
    document["source"]["step"] = step
    del document["checksum"]  # ckptkit 0.1 wrote none
    path.write_text(json.dumps(document))
    return run / f"checkpoint-{step}"


def _flip(step: Path, unit: str, key: str) -> str:
    """Flips a bit in the data of the first chunk of a tensor, and returns its file's name."""
    with LocalSource(step) as source:
        (candidate,) = (c for c in find_candidates(source) if c.folder == unit)
        index = read_index(source, candidate)
    record = index.records[int(index.tensors[Key(key)].chunks.record[0])]
    path = step / index.files[record.file].path
    data = bytearray(path.read_bytes())
    data[record.start + 710] ^= 4
    path.write_bytes(data)
    return path.name


def test_damaged_steps_are_passed_over_on_every_rank(
    launch: Run, saved: Path, tmp_path: Path
) -> None:
    for name in ("truth.safetensors", "lr.json"):
        shutil.copy(saved / name, tmp_path)
    _copy(saved, tmp_path, 3)
    shared = _flip(_copy(saved, tmp_path, 4), "pytorch_model_fsdp_0", "model.embed.weight")
    (_copy(saved, tmp_path, 5) / "optimizer_0/__1_0.distcp").unlink()
    (_copy(saved, tmp_path, 6) / "ckptkit.json").write_text("{")
    (_copy(saved, tmp_path, 7) / "ckptkit.json").unlink()
    _flip(_copy(saved, tmp_path, 8), "optimizer_0", "optimizer.state.conv.weight.exp_avg")
    output = launch(3, tmp_path, "resume", "fsdp2", "fsdp1_orig")
    assert output.count("RESUMED") == 6
    for step, reason in (
        (8, "tensor 'optimizer.state.conv.weight.exp_avg': bytes ["),
        (6, "not a ckptkit manifest"),
        (5, "'optimizer_0/__1_0.distcp' is missing"),
        (4, shared),
    ):
        lines = [line for line in output.splitlines() if f"step {step} is skipped" in line]
        assert len(lines) == 2, output
        assert all(reason in line for line in lines), lines
    assert "step 7 is skipped" not in output


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_is_passed_over(
    launch: Run, saved: Path
) -> None:
    output = launch(2, saved, "refuse", "fsdp2")
    for rank in (0, 1):
        assert f"ERROR {rank} ResumeError model: 1 of" in output
    assert "not in the checkpoint: 'extra'" in output


@pytest.mark.slow
def test_a_run_of_damaged_steps_only_is_an_error_and_an_empty_run_is_none(
    launch: Run, saved: Path, tmp_path: Path
) -> None:
    assert "RESUMED 1 plain None" in launch(2, tmp_path, "look", "plain")
    (_copy(saved, tmp_path, 9) / "optimizer_0/__1_0.distcp").unlink()
    output = launch(2, tmp_path, "look", "plain")
    assert "ERROR 1 ResumeError" in output
    assert "every step that was found is damaged" in output
