"""Commands that read a run beside the job that writes to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptkit
from ckptkit.conversion.source import open as opening
from ckptkit.conversion.source.search import Search
from ckptkit.core.errors import MissingFileError, NotACheckpointError
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from tests.object_store import ObjectStore

LIMIT_SECONDS = 60.0


def partly_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    model[0].requires_grad_(False)
    return model


def test_files_that_a_job_keeps_for_its_next_save_are_no_checkpoints(tmp_path: Path) -> None:
    model = partly_frozen()
    with Checkpointer(tmp_path / "run", layout="dcp") as checkpointer:
        checkpointer.save(1, {"model": model}).result(LIMIT_SECONDS)
        nn.init.ones_(model.get_parameter("1.weight"))
        report = checkpointer.save(2, {"model": model}).report(LIMIT_SECONDS)
        assert report.linked_bytes  # so that files are kept beside the steps
        assert list((tmp_path / "run/.ckptkit").rglob("*.distcp"))
        assert ckptkit.verify(tmp_path / "run").ok
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out")
        [listed] = [s for s in ckptkit.list_run(tmp_path / "run").steps if s.step == 2]
    found = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert listed.complete


def test_what_a_watch_that_was_killed_has_built_is_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": partly_frozen()}).result(LIMIT_SECONDS)
    built = run / ".ckptkit/watch/0123456789abcdef.build"
    ckptkit.consolidate(run, tmp_path / "built")
    shutil.copytree(tmp_path / "built", built)
    ckptkit.consolidate(run, tmp_path / "out")
    assert ckptkit.verify(built).ok  # which names it itself
    (run / "checkpoint-1").rename(tmp_path / "elsewhere")
    with pytest.raises(NotACheckpointError):
        ckptkit.consolidate(run, tmp_path / "none")


@pytest.mark.parametrize(
    "listed",
    [
        ("checkpoint-1",),
        pytest.param(("checkpoint-0", "checkpoint-1"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("home", "moment"), [(Search, "list_candidates"), (opening, "_parse")], ids=["listed", "opened"]
)
def test_steps_that_a_job_removes_while_they_are_searched_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...], home: Any, moment: str
) -> None:
    run, later = tmp_path / "run", tmp_path / "later"
    models = [nn.Linear(3, 2) for _ in range(3)]
    with Checkpointer(run) as checkpointer:
        for step, model in enumerate(models):
            checkpointer.save(step, {"model": model}).result(LIMIT_SECONDS)
    (run / "checkpoint-2").rename(later)
    for name in {"checkpoint-0", "checkpoint-1"}.difference(listed):
        shutil.rmtree(run / name)
    look, moments = getattr(home, moment), iter([True])

    def overtaken(*arguments: Any) -> Any:
        found = look(*arguments)
        if next(moments, False):
            later.rename(run / "checkpoint-2")
            shutil.rmtree(run / "checkpoint-1")
        return found

    monkeypatch.setattr(home, moment, overtaken)
    ckptkit.consolidate(run, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["weight"], models[2].weight)


def test_a_file_that_was_never_there_is_missing_at_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        step = checkpointer.save(1, {"model": nn.Linear(3, 2)}).result(LIMIT_SECONDS)
    next(step.rglob("*.distcp")).unlink()
    with pytest.raises(MissingFileError, match="distcp"):
        ckptkit.consolidate(step, tmp_path / "out")


@pytest.mark.slow
def test_a_step_that_is_removed_from_a_bucket_while_it_is_searched_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, object_store: ObjectStore
) -> None:
    bucket, models = object_store.bucket("beside"), [nn.Linear(3, 2) for _ in range(2)]
    with Checkpointer(tmp_path / "run") as checkpointer:
        steps = [
            checkpointer.save(step, {"model": model}).result(LIMIT_SECONDS)
            for step, model in enumerate(models)
        ]
    bucket.put_tree(steps[0], "run/checkpoint-0")
    look, moments = Search.list_candidates, iter([True])

    def overtaken(search: Search) -> Any:
        found = look(search)
        if next(moments, False):
            bucket.clear()
            bucket.put_tree(steps[1], "run/checkpoint-1")
        return found

    monkeypatch.setattr(Search, "list_candidates", overtaken)
    ckptkit.consolidate(Place(f"{bucket.url}/run", object_store.options), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["weight"], models[1].weight)
