"""Which steps of a Trainer's run go, and from which it resumes."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import ResumeError
from ckptkit.core.manifest import Manifest
from ckptkit.integrations.transformers.checkpoints import (
    find_newest_checkpoint,
    refuse_thinned,
    remove_sentinel,
    steps_beyond,
)
from ckptkit.runs.steps import RunStep
from tests.crash.test_seal import put as put_stock
from tests.files import age

LIMITS = (None, 0, 1, 2, 3)
SENTINEL = "checkpoint-is-incomplete.txt"


def put(run: Path, step: int, *files: str) -> Path:
    folder = run / f"checkpoint-{step}"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def put_ours(run: Path, step: int) -> Path:
    folder = put(run, step, "trainer_state.json", "pytorch_model_fsdp_0/.metadata")
    source = {"step": step, "world_size": 2}
    manifest = Manifest("training", source, options={}, versions={}, tensors={})
    (folder / "ckptkit.json").write_bytes(manifest.to_json())
    return folder


def test_steps_go_as_the_trainer_rotates_them(tmp_path: Path) -> None:
    from transformers.trainer_utils import rotate_checkpoints

    chosen = [some for many in range(1, 5) for some in combinations((3, 7, 20, 100), many)]
    cases = [(some, limit, best) for some in chosen for limit in LIMITS for best in (None, *some)]
    for case, (steps, limit, best) in enumerate(cases):
        run = tmp_path / str(case)
        for step in steps:
            (run / f"checkpoint-{step}").mkdir(parents=True)
        path = None if best is None else str(run / f"checkpoint-{best}")
        rotate_checkpoints(str(run), save_total_limit=limit, best_model_checkpoint=path)
        stay = {int(entry.name.split("-")[1]) for entry in run.iterdir()}
        facts = [RunStep(step, save_number=number) for number, step in enumerate(steps, 1)]
        assert set(steps) - set(steps_beyond(facts, limit, best)) == stay, (steps, limit, best)


def test_only_complete_steps_count_and_go() -> None:
    steps = [RunStep(2), RunStep(4), RunStep(6), RunStep(8, complete=False)]
    assert steps_beyond(steps, 2, None) == (2,)
    assert steps_beyond(steps, 2, 8) == (2,)
    assert steps_beyond([RunStep(2), RunStep(4, complete=False)], 1, None) == ()


def test_the_best_step_is_lost_to_no_limit() -> None:
    steps = [RunStep(step) for step in (2, 4, 6)]
    assert steps_beyond(steps, 1, 2) == (4,)
    assert steps_beyond(steps, 1, 3) == (2, 4)  # the best one was never saved


def test_the_newest_complete_step_is_resumed_from_whoever_wrote_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ResumeError, match="no complete checkpoint"):
        find_newest_checkpoint(tmp_path)
    for step, model in enumerate(("model.safetensors", "pytorch_model_fsdp.bin")):
        full = put(tmp_path, step, "trainer_state.json", model)
        assert find_newest_checkpoint(tmp_path) == full
    assert find_newest_checkpoint(put_ours(tmp_path, 2).parent).name == "checkpoint-2"
    stock = put(tmp_path, 10, "trainer_state.json", "pytorch_model_fsdp_0/.metadata")
    put(tmp_path, 11, "pytorch_model_fsdp_0/.metadata")  # stock, killed
    put(tmp_path, 12, "trainer_state.json", "optimizer_0/.metadata")
    damaged = put_ours(tmp_path, 13) / "ckptkit.json"
    document = json.loads(damaged.read_text())
    document["files"] = {"gone": {"size_bytes": 1, "digest": ""}}
    document.pop("checksum", None)
    damaged.write_text(json.dumps(document))
    put(tmp_path, 14, "trainer_state.json", "pytorch_model_fsdp_0/.metadata", SENTINEL)
    caplog.clear()
    assert find_newest_checkpoint(tmp_path) == stock
    assert [
        f"checkpoint-{step}" in record.message
        for step, record in zip((14, 13, 12, 11), caplog.records, strict=True)
    ] == [True] * 4


@pytest.mark.parametrize("kind", ["trainer", "hf"])
def test_a_step_that_lost_its_optimizer_is_not_resumed_from(kind: str, tmp_path: Path) -> None:
    for step in (10, 20):
        folder = put_stock(tmp_path, kind, step)
        if kind == "hf":  # the whole model
            torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
            age(folder)
        refuse_thinned(folder)
    ckptkit.seal(tmp_path)
    ckptkit.prune(tmp_path, drop_optimizer_older_than=1)
    refuse_thinned(tmp_path / "checkpoint-20")
    with pytest.raises(ResumeError, match=r"has lost its optimizer: .* removed 'optimizer"):
        refuse_thinned(tmp_path / "checkpoint-10")


def test_the_mark_of_a_step_under_way_goes(tmp_path: Path) -> None:
    folder = put(tmp_path, 3, SENTINEL)
    remove_sentinel(folder)
    assert list(folder.iterdir()) == []
    remove_sentinel(folder)
