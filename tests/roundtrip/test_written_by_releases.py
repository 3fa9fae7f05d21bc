"""What each release wrote is listed, verified, converted to the same bytes and resumed from.

`fixtures/written_by_X_Y` are kept as they are: a change of a format that fails here fails users.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import ChecksumError
from ckptkit.training import Checkpointer
from tests.live_truth import refuse

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RELEASES = ("0_1", "0_2")


@pytest.fixture(params=RELEASES)
def written(request: pytest.FixtureRequest) -> Path:
    return FIXTURES / f"written_by_{request.param}"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = FIXTURES / "generators" / "written_by_releases.py"
    spec = importlib.util.spec_from_file_location("written_by_releases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_is_listed(written: Path) -> None:
    listed = ckptkit.list_run(written / "run")
    assert [(step.step, step.complete) for step in listed.steps] == [(2, True), (4, True)]
    assert all((step.metrics["loss"] or 0) > 0 for step in listed.steps)


@pytest.mark.parametrize("name", ["run/checkpoint-2", "run/checkpoint-4"])
def test_a_step_is_verified(written: Path, name: str) -> None:
    assert ckptkit.verify(written / name)


@pytest.mark.parametrize("name", ["model", "shards", "adapter", "merged"])
def test_an_output_is_verified(written: Path, name: str) -> None:
    assert ckptkit.verify(written / name)


def test_a_damaged_output_is_not_verified(written: Path, tmp_path: Path) -> None:
    model = shutil.copytree(written / "model", tmp_path / "model")
    file = model / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not ckptkit.verify(model)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"max_shard_size": "10KB"}])
def test_a_damaged_output_is_not_converted(written: Path, tmp_path: Path, options: Any) -> None:
    model = shutil.copytree(written / "model", tmp_path / "model")
    assert not ckptkit.consolidate(model, tmp_path / "well", names="live", **options).unverified
    file = model / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refuse(r"ckptkit\.json", model, tmp_path / "out", kind=ChecksumError, names="live", **options)
    with pytest.raises(ChecksumError):
        read_all(model)


def read_all(model: Path) -> None:
    with ckptkit.open(model) as checkpoint:
        for name in sorted(checkpoint.keys()):
            checkpoint.read(name, framework="numpy")


CACHE, OFF = b'"use_cache": true', b'"use_cache": false'


def same_files(ours: Path, theirs: Path) -> bool:
    """Whether two folders have the same files, apart from the time of day in the manifest.

    Releases before 0.3 left `use_cache` false, as training had set it.
    """
    names = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
    assert {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()} == names
    return all(
        (ours / name).read_bytes().replace(CACHE, OFF)
        == (theirs / name).read_bytes().replace(CACHE, OFF)
        for name in names
        if name.name != "ckptkit.json"
    )


@pytest.mark.quick("0_1")
def test_commands_write_the_bytes_that_releases_wrote(written: Path, tmp_path: Path) -> None:
    ckptkit.consolidate(written / "run", tmp_path / "model", max_shard_size="10KB")
    assert same_files(tmp_path / "model", written / "model")
    ckptkit.convert(written / "run", tmp_path / "shards", to="dcp")
    assert same_files(tmp_path / "shards", written / "shards")
    lora = FIXTURES / "peft_trl_fsdp2_ckptkit" / "checkpoint"
    ckptkit.extract_adapter(lora, tmp_path / "adapter")
    assert same_files(tmp_path / "adapter", written / "adapter")
    ckptkit.merge_adapter(lora, tmp_path / "merged")
    assert same_files(tmp_path / "merged", written / "merged")


def test_a_delta_of_0_2_makes_the_later_step_of_the_earlier(tmp_path: Path) -> None:
    written = FIXTURES / "written_by_0_2"
    assert ckptkit.verify(written / "delta")
    ckptkit.apply_delta(written / "run/checkpoint-2", [written / "delta"], tmp_path / "out")
    assert not ckptkit.diff(tmp_path / "out", written / "run/checkpoint-4").changed
    assert not ckptkit.diff(tmp_path / "out", written / "model").changed


def test_an_output_is_replaced_as_one_of_ours(written: Path, tmp_path: Path) -> None:
    model = shutil.copytree(written / "model", tmp_path / "model")
    ckptkit.consolidate(written / "run", model, dtype="bfloat16", overwrite=True)
    assert ckptkit.verify(model)
    assert not ckptkit.diff(model, written / "shards").equal


def test_a_step_is_resumed_from(written: Path, tmp_path: Path, generator: ModuleType) -> None:
    from transformers import LlamaForCausalLM

    run = shutil.copytree(written / "run", tmp_path / "run")
    torch.manual_seed(1)
    model = LlamaForCausalLM(generator.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    values = generator.Values(None)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "values": values}
    with Checkpointer(run) as checkpointer:
        assert checkpointer.resume(state) == 4
    parameters = load_file(written / "truth.safetensors")
    moments = load_file(written / "moments.safetensors")
    live = dict(model.named_parameters(remove_duplicate=False))
    assert live.keys() == parameters.keys() == moments.keys() | {"lm_head.weight"}
    for name, tensor in live.items():
        assert torch.equal(tensor, parameters[name])
    for name, moment in moments.items():
        assert torch.equal(optimizer.state[live[name]]["exp_avg_sq"], moment)
    assert scheduler.last_epoch == 4
    assert values.kept == {"ids": {3, 5}, "path": Path("data"), (1, 2): [1.5, None, b"x"]}
