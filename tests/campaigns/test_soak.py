"""A sample of the soak, and what its judgements find."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.training import Checkpointer
from tests.campaigns.soak.__main__ import soak
from tests.campaigns.soak.ledger import Ledger, Saved
from tests.campaigns.soak.leftovers import stray_files
from tests.campaigns.soak.models import Shadow, build, make_state, stamp, train
from tests.campaigns.soak.plan import Scope, draw_chapter
from tests.campaigns.soak.services import can_mount
from tests.campaigns.soak.steps import compare_step, difference

SEED = 3115
LIMIT_SECONDS = 600.0
NODES = frozenset({0, 1})


@pytest.mark.distributed
@pytest.mark.slow
def test_a_short_soak_loses_nothing() -> None:
    scope = Scope(("plain",), ("dir", "tiers"), most_lives=3, most_steps=3, mounts=can_mount())
    count, _ = soak(SEED, LIMIT_SECONDS, scope, only=0)
    assert count.problems == []
    assert count.lives == 4
    assert count.steps > 1
    assert count.faults
    assert count.actions["resumes compared"] > 0


def test_a_seed_draws_the_same_plan_each_time() -> None:
    first, again, other = (draw_chapter(seed, 3, Scope()).lines() for seed in (1, 1, 2))
    assert first == again != other


def ledger(*saved: Saved, **rules: int) -> Ledger:
    return Ledger(**rules, present=NODES, saves={one.serial: one for one in saved})  # type: ignore[arg-type]


def save(serial: int, step: int, *, local: bool = False, durable: bool = True) -> Saved:
    return Saved(serial, step, "", 2, NODES, is_local=local, is_durable=durable)


def test_an_older_resume_than_what_is_durable_is_found() -> None:
    kept = ledger(save(1, 1), save(2, 2), save(3, 3, durable=False))
    assert kept.judge_resume(2, [2.0], None) == ""
    assert kept.judge_resume(3, [3.0], None) == ""  # committed, and not reported any more
    assert "though" in kept.judge_resume(1, [1.0], None)
    assert "though" in kept.judge_resume(None, (), None)
    assert "mixed" in kept.judge_resume(2, [1.0, 2.0], None)
    assert "instead of" in kept.judge_resume(2, [2.0], 1)
    kept.saves[3].is_local = True
    assert "though" in kept.judge_resume(2, [2.0], None)
    kept.lose_node(1)
    assert kept.judge_resume(2, [2.0], None) == ""


def test_a_durable_step_may_only_be_gone_by_a_rule() -> None:
    saved = [save(1, 1), save(2, 2), save(3, 3)]
    without_first = {"checkpoint-2": 2, "checkpoint-3": 3}
    assert ledger(*saved).judge_contents({"checkpoint-1": 1, **without_first}) == []
    assert len(ledger(*saved).judge_contents(without_first)) == 1
    assert ledger(*saved, keep_last=2).judge_contents(without_first) == []
    assert len(ledger(*saved, keep_last=3).judge_contents(without_first)) == 1
    assert len(ledger(*saved, keep_last=1, keep_every=1).judge_contents(without_first)) == 1
    assert len(ledger(*saved).judge_contents({"checkpoint-1": 2, **without_first})) == 1


def test_a_step_of_which_a_byte_is_another_is_found(tmp_path: Path) -> None:
    shadow, state = Shadow("plain", 1), make_state(build("plain", 1))
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            train(state, step, 0)
            stamp(state, step)
            checkpointer.save(step, state).result(60)
    good = compare_step(tmp_path / "run/checkpoint-2", shadow)
    assert (good.serials, good.wrong) == ((2,), "")
    assert good.size_bytes > 0
    manifest = tmp_path / "run/checkpoint-1/ckptkit.json"
    document = json.loads(manifest.read_text().replace('"step": 1', '"step": 2'))
    del document["checksum"]  # ckptkit 0.1 wrote none
    manifest.write_text(json.dumps(document))
    assert "differs" in compare_step(tmp_path / "run/checkpoint-1", shadow).wrong
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "run/.checkpoint-3.ckptkit-0-1")
    assert stray_files(tmp_path / "run", ["checkpoint-1", "checkpoint-2"])


def test_tensors_are_compared_by_their_bits(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([0.0, 1.0])}, tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert difference(found, {"a": torch.tensor([0.0, 1.0])}) == ""
    assert difference(found, {"a": torch.tensor([-0.0, 1.0])}) == "a differs"
    assert "other names" in difference(found, {"b": torch.tensor([0.0, 1.0])})
