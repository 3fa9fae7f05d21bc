"""The command that `ckptkit inspect` proposes works as it is printed."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.command_line import run_command

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
SOURCES = {path.parent.name: path for path in sorted(FIXTURES.glob("*/checkpoint"))}
WITHOUT = {
    *("dcp_hf_consolidated", "peft_fsdp1_empty"),  # refused, and without any weights
    "megatron_tensor_parallel",  # without the configuration that the command needs
    *("zero2_adam_no_frozen", "zero3_adam_no_frozen"),  # without the adapter_config.json, too
    # Flat parameters of a model that has no configuration.
    *("files_torch_2_4", "files_torch_2_6", "files_torch_2_9"),
    "fairseq2_0_8_fsdp2",  # without the model whose shapes prove that no part is missing
    "autotp_deepspeed_0_18",  # refused: nothing in it shows how tensors are cut
    "litgpt_pythia_lora",  # refused: of a matrix in one, only some parts are adapted
    "nanotron_0_2_tp2",  # does not say which of two maps it needs; the refusal names both
}
ONE_OF_EACH = {
    *("accelerate_ddp", "accelerate_fsdp2_two_models", "dcp_zstd_fsdp2", "deepspeed_0_18_zero3"),
    *("fsdp2_plain", "hf_tied", "lightning_trainer_sharded", "megatron_ranks_llama_tp2_pp2"),
    *("peft_fsdp2", "peft_trl_fsdp2", "rank_files_local_flat"),
    *("torch_bin_sharded", "torchsnapshot_ddp"),
}


def typed(page: str, home: Path, out: Path) -> list[str]:
    """Returns the words of the proposed command, with paths in the place of its words."""
    line = page.split("\nNext\n")[1].splitlines()[0].strip()
    words = shlex.split(line)
    assert words.pop(0) == "ckptkit", line
    base = home / "base" if (home / "base").is_dir() else home
    has_config = (base / "config.json").is_file()
    if "ORG/NAME" in words and not has_config:  # then the page says that weights alone are written
        assert "without --base, weights alone are written" in " ".join(page.split())
        at = words.index("ORG/NAME")
        words[at - 1 : at + 1] = []
    put = {
        "DIR": str(home / "config"),
        "OUT": str(out),
        "ORG/NAME": str(base),
        "FILE": str(home / "adapter_config.json"),
        "N": "8",
    }
    return [put.get(word, word) for word in words]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH else pytest.mark.slow)
        for name in SOURCES
        if name not in WITHOUT
    ],
)
def test_the_proposed_command_works(name: str, tmp_path: Path) -> None:
    shown = run_command("inspect", SOURCES[name])
    assert shown.returncode == 0, shown.stderr
    words = typed(shown.stdout, FIXTURES / name, tmp_path / "out")
    done = run_command(*words)
    is_damaged = words[0] == "verify" and "\nProblem" in shown.stdout
    assert done.returncode == (6 if is_damaged else 0), done.stderr
    assert (tmp_path / "out").is_dir() == ("verify" not in words)
    assert "Traceback" not in done.stderr


def test_flat_parameters_are_no_damage_and_need_the_configuration() -> None:
    source = SOURCES["rank_files_local_flat"]
    page = run_command("inspect", source).stdout
    assert f"  ckptkit consolidate {source} OUT --model-config DIR\n" in page
    assert "DIR is a folder with the config.json of the model" in page
    assert "damaged" not in page


def test_the_kinds_that_are_always_tried_exist() -> None:
    assert SOURCES.keys() >= ONE_OF_EACH


def test_a_base_that_was_passed_is_in_the_command(tmp_path: Path) -> None:
    step = SOURCES["fsdp2_llama_flat"]
    base = SOURCES["hf_sharded"]
    shown = run_command("inspect", step, "--base", base)
    words = typed(shown.stdout, tmp_path, tmp_path / "out")
    assert words[-2:] == ["--base", str(base)]
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    assert "AutoModelForCausalLM.from_pretrained" in done.stdout


def test_the_base_that_an_adapter_names_is_in_the_command(tmp_path: Path) -> None:
    step = tmp_path / "step"
    shutil.copytree(SOURCES["peft_trl_fsdp2"] / "checkpoint-2", step)
    home = FIXTURES / "peft_trl_fsdp2"
    config = json.loads((home / "adapter_config.json").read_text())
    for name, shown in (("org/base", "org/base"), ("/no/such/folder", "ORG/NAME")):
        config["base_model_name_or_path"] = name
        (step / "adapter_config.json").write_text(json.dumps(config))
        page = " ".join(run_command("inspect", step).stdout.split())
        assert f"adapter merge {step} OUT --base {shown}`" in page


def test_an_adapter_without_its_configuration_says_how_to_make_it(tmp_path: Path) -> None:
    step = SOURCES["peft_fsdp2"]
    made = 'model.peft_config["default"].save_pretrained(DIR)'
    assert made in " ".join(run_command("inspect", step).stdout.split())
    refused = run_command("adapter", "merge", step, tmp_path / "out")
    assert refused.returncode == 4
    assert made in refused.stderr
    assert "`ckptkit inspect` shows the command" in refused.stderr


@pytest.mark.parametrize("layout", ["hf", "torch", "dcp", "universal"])
def test_without_a_configuration_the_note_fits_the_layout(layout: str, tmp_path: Path) -> None:
    config = SOURCES["accelerate_fsdp2_tied_with_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    source, base = tmp_path / "step.pt", tmp_path / "base"
    model.config.save_pretrained(base)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    done = run_command("convert", source, tmp_path / "out", "--to", layout)
    assert done.returncode == 0, done.stderr
    (note,) = (line for line in done.stderr.splitlines() if "no config.json was found" in line)
    assert ("from_pretrained" in note) == (layout in {"hf", "torch"})
    assert ("were compared with no model" in note) == (layout in {"dcp", "universal"})
    words = shlex.split(note.split("`")[1].replace("ORG/NAME", str(base)))
    again = run_command(*words[1:])
    assert again.returncode == 0, again.stderr
    assert "no config.json was found" not in again.stderr


@pytest.mark.parametrize("case", ["peft_zero2", "peft_fsdp2"])
def test_an_adapter_that_is_trained_further_is_converted_as_the_refusal_says(
    case: str, tmp_path: Path
) -> None:
    """With states of an optimizer, without which a universal checkpoint cannot be made."""
    out = tmp_path / "out"
    refused = run_command("convert", SOURCES[case], out, "--to", "universal")
    assert refused.returncode == 4
    hint = refused.stderr.partition("hint: ")[2]
    has_states = case == "peft_zero2"
    assert hint.startswith("to train the adapter further run `ckptkit convert") == has_states
    if has_states:
        done = run_command(*shlex.split(hint.split("`")[1])[1:])
        assert done.returncode == 0, done.stderr
        assert (out / "latest_universal").exists()
