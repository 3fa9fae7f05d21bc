"""Runs as scripts leave them: steps, and the model that the last line of the script saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import ckptkit
from ckptkit.core.errors import CannotPlanError
from ckptkit.training import load_into
from ckptkit_cli.main import main
from tests.distributed.tiny_trainers import model, rows, tokenizer
from tests.object_store import ObjectStore
from tests.tensor_images import same, tensors_in

FIXTURES = Path(__file__).parents[2] / "fixtures"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a script of the Trainer leaves; the final model has other weights than all steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2}
    made = Trainer(
        model(),
        TrainingArguments(str(folder), **settings, **options),
        train_dataset=rows(),
        processing_class=tokenizer(),
    )
    made.train()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.25)
    made.save_model()
    made.save_state()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_commands_take_the_newest_step_and_the_final_model_where_it_is_selected(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", str(run), str(tmp_path / "newest")]) == 0
    said = capfd.readouterr().err
    assert "note: checkpoint-4 was taken; left alone: the final model" in said
    assert "(--select . takes it)" in said
    assert main(["consolidate", str(run), str(tmp_path / "final"), "--select", "."]) == 0
    assert same(tensors_in(tmp_path / "newest"), tensors_in(run / "checkpoint-4"))
    assert same(tensors_in(tmp_path / "final"), tensors_in(run))
    assert not same(tensors_in(run), tensors_in(run / "checkpoint-4"))
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not any(name.startswith("checkpoint") for name in names)
    with pytest.raises(CannotPlanError, match="holds no model 'nowhere'"):
        ckptkit.consolidate(run, tmp_path / "none", select="nowhere")


def test_readers_and_reports_take_the_newest_step(run: Path, tmp_path: Path) -> None:
    found = ckptkit.inspect(run)
    assert (found.step, found.steps) == (4, ("checkpoint-2", "checkpoint-4"))
    assert found.finals == {".": ""}
    assert ckptkit.inspect(run, select=".").steps == found.steps
    assert ckptkit.stats(run).step == 4
    with ckptkit.open(run) as opened:
        assert opened.path.endswith("checkpoint-4")
    assert ckptkit.diff(run, run / "checkpoint-4").same
    assert ckptkit.diff(run, run / "checkpoint-4", select=[".", "."]).equal == 0
    assert main(["average", str(run), str(tmp_path / "mean"), "--last", "2"]) == 0
    live: torch.nn.Module = model()
    load_into(live, run)
    newest = tensors_in(run / "checkpoint-4")
    assert all(tensor.equal(newest[name]) for name, tensor in live.state_dict().items())


def test_inspect_lists_the_steps_and_the_models_beside_them(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, run / "best", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert main(["inspect", str(run)]) == 0
    page = capfd.readouterr().out
    assert "steps       checkpoint-4, checkpoint-2" in page
    assert "., best; --select takes one" in page


def test_a_sharded_final_model_is_taken_whole(run: Path, tmp_path: Path) -> None:
    whole = tensors_in(run)
    (run / "model.safetensors").unlink()
    made = model()
    made.load_state_dict(whole)
    made.save_pretrained(run, max_shard_size="8KB")
    assert len(list(run.glob("model-*.safetensors"))) > 1
    ckptkit.consolidate(run, tmp_path / "newest")
    ckptkit.consolidate(run, tmp_path / "final", select=".")
    assert same(tensors_in(tmp_path / "newest"), tensors_in(run / "checkpoint-4"))
    assert same(tensors_in(tmp_path / "final"), tensors_in(run))
    next(run.glob("model-*.safetensors")).unlink()
    assert any("'.' beside the steps is not whole" in note for note in ckptkit.inspect(run).notes)
    assert not ckptkit.verify(run).ok


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_verify_says_which_models_it_verified(run: Path) -> None:
    found = ckptkit.verify(run)
    assert found.ok
    assert found.path.endswith("checkpoint-4")
    one = ckptkit.verify(run / "checkpoint-4")
    assert found.tensors == one.tensors + ckptkit.verify(run, select=".").tensors
    assert found.proven[-2:] == (
        "verified with the step: the model beside the steps (.)",
        "not verified: 1 other step",
    )


def test_a_run_in_a_store_is_its_steps_too(run: Path, object_store: ObjectStore) -> None:
    url = object_store.bucket("finals").put_tree(run, "run")
    options = object_store.options
    found = ckptkit.inspect(url, src_options=options)
    assert (found.step, found.finals) == (4, {".": ""})
    assert ckptkit.verify(url, src_options=options).tensors == ckptkit.verify(run).tensors


@pytest.mark.parametrize("damaged", ["step", "final"])
def test_verify_finds_damage_in_the_step_and_in_a_final_model_that_ckptkit_wrote(
    run: Path, tmp_path: Path, damaged: str
) -> None:
    """The manifest in the run's own folder does not hide the steps."""
    out = tmp_path / "out"
    ckptkit.consolidate(run, out, select=".")
    for file in out.iterdir():
        shutil.copy(file, run / file.name)
    ckptkit.consolidate(run / "checkpoint-4", tmp_path / "step")
    shutil.rmtree(run / "checkpoint-4")
    shutil.copytree(tmp_path / "step", run / "checkpoint-4")
    assert ckptkit.verify(run).ok
    _flip(run / ("checkpoint-4" if damaged == "step" else ".") / "model.safetensors")
    assert not ckptkit.verify(run).ok
    assert ckptkit.verify(run, select=".").ok is (damaged == "step")


def test_a_final_model_that_ckptkit_wrote_into_a_folder_of_the_run_is_verified(
    run: Path, tmp_path: Path
) -> None:
    ckptkit.consolidate(run, tmp_path / "final", select=".")
    (tmp_path / "final").rename(run / "final")
    (run / "model.safetensors").unlink()
    assert ckptkit.verify(run).ok
    _flip(run / "final/model.safetensors")
    assert next(problem.where for problem in ckptkit.verify(run).problems).startswith("final: ")


@pytest.mark.parametrize("case", ["peft_checkpointer", "peft_trl_fsdp2_ckptkit", "peft_trl_fsdp2"])
@pytest.mark.parametrize("place", [".", "final"])
def test_an_adapter_saved_beside_the_steps_is_named_and_the_step_is_taken(
    case: str, place: str, tmp_path: Path
) -> None:
    run = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "run")
    config = next(iter((FIXTURES / case).glob("adapter_config*.json")))
    step = next(run.glob("checkpoint-*"))
    words = ["--adapter-config", str(config)]
    words += ["--adapter", "default"] if case == "peft_checkpointer" else []
    ours = tmp_path / "ours"
    assert main(["adapter", "extract", str(step), str(ours), *words]) == 0
    home = run / place
    home.mkdir(exist_ok=True)
    final = load_file(ours / "adapter_model.safetensors")
    save = {name: tensor + 1 for name, tensor in final.items()}
    save_file(save, home / "adapter_model.safetensors")
    shutil.copy(ours / "adapter_config.json", home)
    assert list(ckptkit.inspect(run).finals) == [place]
    assert main(["adapter", "extract", str(run), str(tmp_path / "of-step"), *words]) == 0
    assert same(tensors_in(tmp_path / "of-step"), tensors_in(ours))
    chosen = ["adapter", "extract", str(run), str(tmp_path / "of-final"), "--select", place]
    assert main(chosen) == 0
    assert same(tensors_in(tmp_path / "of-final"), tensors_in(home))
    assert ckptkit.verify(run).problems == ()
