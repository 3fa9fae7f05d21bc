"""Refusals around adapters lead somewhere: each hint names what makes sense of that very path."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptkit_cli.main import main
from tests.command_line import run_command

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASE = FIXTURES / "peft_fsdp2"
RUN = FIXTURES / "peft_trl_fsdp2_ckptkit" / "checkpoint"
STEP = RUN / "checkpoint-2"
DIFF = f"adapter from-diff {RUN} OUT --rank 2"
TWO = FIXTURES / "peft_fsdp2_two_adapters"


@pytest.mark.parametrize(
    ("command", "status", "said", "unsaid"),
    [
        (f"adapter merge {RUN} OUT --with {RUN}", 2, "a weight of 2", "--select"),
        (f"adapter merge {RUN} OUT --base {RUN}", 4, "without --base", "--select"),
        (f"{DIFF} --base {CASE / 'base'}", 4, "adapter extract", "base_model_0"),
        (f"consolidate {RUN} OUT --names live", 4, "adapter merge", "--select base_model_0"),
        (f"adapter extract {RUN} OUT --select optimizer_0", 3, "the whole step", "FSDP1"),
        (f"adapter extract {STEP / 'optimizer_0'} OUT", 3, "state of an optimizer", "FSDP1"),
        (f"adapter extract {TWO} OUT", 4, "holds 2 adapters: 'default', 'second', in", "holds 6"),
    ],
)
def test_a_refusal_says_what_to_do_with_this_path(
    command: str,
    status: int,
    said: str,
    unsaid: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in shlex.split(command)]
    assert main(words) == status
    told = " ".join(capfd.readouterr().err.split())
    assert said in told
    assert unsaid not in told.partition("hint:")[2]


def test_the_base_that_a_step_keeps_apart_names_the_merge_of_the_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["consolidate", str(STEP / "base_model_0"), out]) == 4
    told = " ".join(capfd.readouterr().err.split())
    assert main(shlex.split(told.partition("`ckptkit ")[2].partition("`")[0])) == 0
    assert main(["verify", out]) == 0


def test_the_base_that_a_step_keeps_apart_is_a_base(tmp_path: Path) -> None:
    adapter, whole, apart = (tmp_path / name for name in ("adapter", "whole", "apart"))
    assert main(["adapter", "merge", str(STEP), str(whole)]) == 0
    assert main(["adapter", "extract", str(STEP), str(adapter)]) == 0
    base = str(STEP / "base_model_0")
    assert main(["adapter", "merge", str(adapter), str(apart), "--base", base]) == 0
    expected, found = (load_file(path / "model.safetensors") for path in (whole, apart))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    # That the base has no cache is its own statement, where it is named as a base.
    configs = [json.loads((path / "config.json").read_text()) for path in (whole, apart)]
    assert [config.pop("use_cache") for config in configs] == [True, False]
    assert configs[0] == configs[1]


def test_a_choice_that_has_nothing_to_do_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["adapter", "merge", str(STEP), str(tmp_path / "out"), "--json"]
    assert main([*arguments, "--qlora-base", "original"]) == 0
    notes = json.loads(capfd.readouterr().out)["notes"]
    assert any("--qlora-base original changes nothing here" in note for note in notes)


def test_an_output_inside_the_base_is_told_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CASE / "base", tmp_path / "base")
    out, base = str(tmp_path / "base" / "out"), str(tmp_path / "base")
    assert main(["adapter", "merge", str(STEP), out, "--base", base]) == 4
    assert "inside the base" in capfd.readouterr().err


REPORTS = FIXTURES / "reports"
CASES = {
    **{
        name: ("ckpt", name) for name in ("04-bridge-lora", "17-swift-lora", "25-torchtune-adapter")
    },
    **dict.fromkeys(("05-verl-lora", "05-verl-lora-dir"), ("ckpt", "05-verl-lora-only")),
    "05-verl-lora-only": ("ckpt", "05-verl-lora-only"),
    **{
        name: ("adapter", name)
        for name in ("06-eos-merge", "11-qwen35-text", "12-mtp-adapter", "15-tinker-moe")
    },
}
ASKED = ("inspect", "consolidate", "adapter extract", "adapter merge")


def proposed(shown: str) -> list[str]:
    """Returns the commands that an output proposes, on a line of their own or in a text."""
    listed = [line.strip() for line in shown.splitlines() if line.startswith("  ckptkit ")]
    return listed + re.findall("`(ckptkit [^`]+)`", " ".join(shown.split()))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(
    "04-bridge-lora-consolidate",
    "05-verl-lora-adapter merge",
    "06-eos-merge-inspect",
    "12-mtp-adapter-adapter extract",
    "15-tinker-moe-adapter merge",
    "25-torchtune-adapter-consolidate",
)
def test_every_command_that_is_proposed_for_an_adapter_works(
    name: str, asked: str, tmp_path: Path
) -> None:
    folder, base = CASES[name]
    source = REPORTS / name / folder
    out = [] if asked == "inspect" else [tmp_path / "first"]
    first = run_command(*asked.split(), source, *out)
    assert "Traceback" not in first.stderr
    commands = proposed(first.stdout + first.stderr)
    if asked in {"inspect", "consolidate"}:
        assert commands, first.stderr
    put = {"ORG/NAME": str(REPORTS / base / "base"), "N": "8"}
    for number, command in enumerate(commands):
        place = str(tmp_path / f"out{number}")
        put |= {"OUT": place, str(tmp_path / "first"): place}
        words = [put.get(word, word) for word in shlex.split(command)[1:]]
        if words == ["adapter", "merge"]:
            continue  # the name of the command, in a text
        done = run_command(*words)
        assert done.returncode == 0, (command, done.stderr)
        assert Path(place).is_dir(), command
