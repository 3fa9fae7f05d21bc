"""`ckptkit inspect --map`: what would become what, before a byte of a weight is read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import ckptkit
from ckptkit.conversion.mapped_names import fold_names
from ckptkit.core.errors import RefusedError
from ckptkit.name_maps.rule_steps import parse_step
from tests.command_line import run_command

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("megatron_model_*/config.json"))
LLAMA = FIXTURES / "megatron_model_llama_tp2_pp2"
EXPERTS = FIXTURES / "megatron_model_qwen2_moe_tp2_ep2"


def shapes_of_truth(case: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(case / "truth.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("megatron_model_deepseek_v3_pp2_ep2")
def test_each_rule_says_what_it_takes_and_what_it_makes(model: str) -> None:
    case = FIXTURES / model
    plain = ckptkit.inspect(case / "checkpoint")
    found = ckptkit.inspect(case / "checkpoint", map="auto", base=case).map
    assert found is not None
    made = {name: shape for rule in found.rules for name, shape in rule.targets.items()}
    taken = {name: shape for rule in found.rules for name, shape in rule.sources.items()}
    assert made == shapes_of_truth(case)
    assert taken == {line.name: line.shape for line in plain.tensors if line.part == "model"}


def test_no_weight_is_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for path in sorted((LLAMA / "checkpoint").rglob("*")):
        if path.is_file():
            out = copy / path.relative_to(LLAMA / "checkpoint")
            out.parent.mkdir(parents=True, exist_ok=True)
            size = path.stat().st_size
            out.write_bytes(bytes(size) if path.suffix == ".distcp" else path.read_bytes())
    found = ckptkit.inspect(copy, map="auto", base=LLAMA).map
    assert found == ckptkit.inspect(LLAMA / "checkpoint", map="auto", base=LLAMA).map


def test_rules_are_folded_over_layers_and_experts() -> None:
    result = run_command("inspect", EXPERTS / "checkpoint", "--map", "auto", "--base", EXPERTS)
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    at = lines.index("Map megatron-qwen2-moe: Megatron-Core to Transformers")
    page = lines[at : lines.index("", at)]
    assert len(page) < 60
    qkv = next(i for i, line in enumerate(page) if "linear_qkv.weight" in line)
    assert page[qkv + 1].startswith(
        "-> model.layers.{0..1}.self_attn.(q_proj|k_proj|v_proj).weight  ["
    )
    assert "split axis 0 into query | head_dim | head_dim" in page[qkv + 2]
    assert any(".mlp.experts.{0..3}.(gate_proj|up_proj).weight" in line for line in page)
    assert any("rows 30 to 31 are padding" in line for line in page)


def test_the_command_that_it_proposes_works(tmp_path: Path) -> None:
    for given in ([], ["--base", LLAMA], ["--base", LLAMA, "--map", "megatron-llama"]):
        result = run_command("inspect", LLAMA / "checkpoint", *given)
        assert result.returncode == 0, result.stderr
        commands = [shlex.split(line) for line in result.stdout.splitlines() if " OUT" in line]
        assert len(commands) == 1
        out = tmp_path / f"out{len(given)}"
        names = {"OUT": str(out), "ORG/NAME": str(LLAMA)}
        done = run_command(*(names.get(word, word) for word in commands[0][1:]))
        assert done.returncode == 0, done.stderr
        assert ckptkit.diff(out, LLAMA / "truth.safetensors").same


def test_a_map_that_is_named_is_refused_as_in_a_conversion() -> None:
    checkpoint = LLAMA / "checkpoint"
    with pytest.raises(RefusedError, match="no configuration"):
        ckptkit.inspect(checkpoint, map="auto")
    for given in (["--map", "megatron-deepseek", "--base", LLAMA], ["--map", "megatron-lama"]):
        shown = run_command("inspect", checkpoint, *given)
        converted = run_command("consolidate", checkpoint, "/nowhere/out", *given)
        assert shown.returncode == converted.returncode != 0
        assert shown.stderr == converted.stderr


def test_without_a_map_a_refusal_is_shown_and_nothing_else_is_lost() -> None:
    report = ckptkit.inspect(LLAMA / "checkpoint", base=EXPERTS)
    assert report.framework == "Megatron-Core"
    assert report.map is None
    assert report.map_refusal is not None
    assert report.map_refusal["code"] in {"cannot-plan", "bad-format"}
    result = run_command("inspect", LLAMA / "checkpoint", "--base", EXPERTS)
    assert result.returncode == 0
    assert "is refused: " in result.stdout
    document = json.loads(run_command("inspect", LLAMA / "checkpoint", "--json").stdout)
    assert document["map"] is None
    assert "no configuration" in document["map_refusal"]["message"]


def test_help_lists_the_maps() -> None:
    for command in ("inspect", "consolidate", "diff"):
        page = " ".join(run_command(command, "--help").stdout.split())
        listed = re.search(r"megatron-\(([^)]*)\)", page)
        assert listed is not None
        assert {"llama", "mixtral", "qwen2-moe"} <= set(listed[1].split(", "))


STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "padding that is cut": ({"rows": "vocab"}, "keep the first vocab indices of axis 0"),
    "padding": ({"pad": 64, "rows": "vocab"}, "pad axis 0 with zeros to a multiple of 64"),
    "axes that are made": (
        {"unflatten": ["c", "h"], "axis": 1},
        "split axis 1 into the axes c x h",
    ),
    "axes that are joined": ({"flatten": ["c", "h"], "axis": 1}, "join 2 axes from 1 on"),
    "one of several": ({"add": 1, "only": [0]}, "add 1, of tensors 0 only"),
}


@pytest.mark.parametrize("what", STEPS)
def test_every_step_is_said_in_words(what: str) -> None:
    step, words = STEPS[what]
    assert parse_step(step, "own.toml").describe() == words


def test_only_numbers_that_all_names_share_become_ranges() -> None:
    assert fold_names(f"a.{i}.b.{j}" for i in range(3) for j in range(2)) == ["a.{0..2}.b.{0..1}"]
    assert fold_names(["a.0.b.0", "a.0.b.1", "a.1.b.0"]) == ["a.0.b.{0..1}", "a.1.b.0"]
    assert fold_names(["x.weight7", "x.weight9", "x.weight10"]) == ["x.weight{7,9..10}"]
    assert fold_names(["x.007", "x.008", "y"]) == ["x.007", "x.008", "y"]
    assert fold_names([]) == []
