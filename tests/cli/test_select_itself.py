"""`--select .` is the model in the folder itself for each command, and never a step below it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit_cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
_STEP = FIXTURES / "peft_fsdp2/checkpoint"  # of accelerate
_BASE = FIXTURES / "peft_fsdp2/base"
_CONFIG = FIXTURES / "peft_fsdp2/adapter_config.json"
_COMMANDS = [
    "inspect RUN",
    "stats RUN",
    "verify RUN",
    "diff RUN RUN",
    "average RUN RUN OUT",
    "consolidate RUN OUT",
    "convert RUN OUT --to dcp",
    "adapter extract RUN OUT",
    "adapter merge RUN OUT --base BASE",
    "delta create RUN RUN OUT",
]


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("beside", ["last", "final", ""])
@pytest.mark.quick(
    "-consolidate RUN OUT",
    "-verify RUN",
    "final-adapter extract RUN OUT",
    "final-diff RUN RUN",
    "last-adapter merge RUN OUT --base BASE",
    "last-inspect RUN",
)
def test_a_run_whose_folder_holds_no_model_is_refused_with_what_there_is(
    command: str, beside: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, names = tmp_path / "run", ["checkpoint_1", "checkpoint_0", *filter(None, [beside])]
    for name in names:
        shutil.copytree(_STEP, run / name)
    paths = {"RUN": str(run), "OUT": str(tmp_path / "out"), "BASE": str(_BASE)}
    words = [paths.get(word, word) for word in command.split()]
    assert main([*words, "--select", "."]) == 4
    said = capfd.readouterr().err
    assert "holds no model in the folder itself; found " in said
    assert all(repr(name) in said for name in names)
    assert "--select checkpoint_1" in said
    assert not (tmp_path / "out").exists()


def test_a_difference_never_takes_the_newest_step_for_the_folder_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = FIXTURES / "hf_tied/checkpoint"
    shutil.copytree(model, tmp_path / "run/checkpoint-5")
    assert main(["diff", str(tmp_path / "run"), str(model), "--select", "."]) == 4
    assert "holds no model in the folder itself" in capfd.readouterr().err
    assert main(["diff", str(model), str(model), "--select", "."]) == 0


def test_the_final_adapter_beside_steps_and_a_last_state_is_taken_by_a_dot(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for name in ("checkpoint_0", "checkpoint_1", "last"):
        shutil.copytree(_STEP, run / name)
    final = {
        n: t + 1 for n, t in load_file(FIXTURES / "peft_fsdp2/adapter_truth.safetensors").items()
    }
    save_file(final, run / "adapter_model.safetensors")
    shutil.copy(_CONFIG, run / "adapter_config.json")
    assert main(["adapter", "extract", str(run), str(out), "--select", "."]) == 0
    written = load_file(out / "adapter_model.safetensors")
    assert written.keys() == final.keys()
    assert all(written[name].equal(tensor) for name, tensor in final.items())


def test_a_state_in_a_folder_is_selected_by_the_name_of_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(FIXTURES / "trainer_fsdp2/checkpoint" / name, run / name)
    (run / "checkpoint-4").rename(run / "last")
    whole = ckptkit.inspect(run / "last")
    for select in ("last", "last/."):
        found = ckptkit.inspect(run, select=select)
        assert (found.files, found.tensors) == (whole.files, whole.tensors)  # its optimizer too
        assert ckptkit.diff(run, run / "last", select=[select, "."]).same
