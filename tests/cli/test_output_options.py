"""Options that shape an output after another model, as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.command_line import run_command as run

ROOT = Path(__file__).parents[2]


def test_the_plan_shows_files_rows_and_types_before_anything_is_written(tmp_path: Path) -> None:
    embedding = np.ones((12, 4), np.float32)
    save_file({"embed_tokens.weight": embedding, "b": embedding}, tmp_path / "run.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    save_file({"embed_tokens.weight": embedding.astype(np.float16)}, base / "model-a.safetensors")
    save_file({"b": embedding}, base / "model-b.safetensors")
    index = {"b": "model-b.safetensors", "embed_tokens.weight": "model-a.safetensors"}
    name = "model.safetensors.index.json"
    (base / name).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    options: list[str | Path] = [
        "--dtype",
        "base",
        "--base",
        base,
        "--like",
        base,
        "--vocab-size",
        "10",
    ]
    arguments: list[str | Path] = [tmp_path / "run.safetensors", tmp_path / "out", *options]
    shown = run("consolidate", *arguments, "--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr
    plan = json.loads(shown.stdout)
    assert [(file["path"], file["dtypes"]) for file in plan["files"]] == [
        ("model-a.safetensors", {"float16": 80}),
        ("model-b.safetensors", {"float32": 192}),
        (name, {}),
    ]
    assert "the rows 10 to 11 were cut from 'embed_tokens.weight'" in plan["notes"]
    assert not (tmp_path / "out").exists()
    done = run("convert", *arguments, "--to", "hf", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / name).read_bytes())["weight_map"] == index
    assert json.loads(done.stdout)["options"] == {
        "dtype": "base",
        "like": str(base),
        "vocab_size": 10,
    }


def test_options_that_contradict_each_other_are_wrong_usage(tmp_path: Path) -> None:
    result = run("consolidate", "src", tmp_path, "--like", "a", "--max-shard-size", "5GB")
    assert result.returncode == 2
    assert "which decides which tensor is in which file" in result.stderr
    result = run("consolidate", "src", tmp_path, "--vocab-size", "all")
    assert result.returncode == 2
    assert "'all' is not a positive whole number" in result.stderr


def test_an_adapter_made_of_a_difference_says_how_near_it_comes(tmp_path: Path) -> None:
    shapes = {"layers.0.q_proj.weight": (8, 6), "layers.1.q_proj.weight": (8, 6)}
    for seed, side in enumerate(("base", "tuned")):
        random = np.random.default_rng(seed)
        weights = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
        weights["norm.weight"] = np.full(6, seed, np.float32)
        (tmp_path / side).mkdir()
        save_file(weights, tmp_path / side / "model.safetensors")
    command: list[str | Path] = ["adapter", "from-diff", tmp_path / "tuned"]
    usual = ["--base", str(tmp_path / "base"), "--rank", "2"]
    shown = run(*command, tmp_path / "out", *usual, "--report")
    assert shown.returncode == 0, shown.stderr
    assert "LACKS these changes (norm): 'norm.weight'" in shown.stderr
    assert "pass --full GLOB" in shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    layer = next(row for row in rows if row[0] == "layers.0.q_proj")
    assert layer[1:5] == ["8", "x", "6", "2"]
    done = run(*command, tmp_path / "more", *usual, "--full", "norm*", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = document["difference"]["layers"]["layers.0.q_proj"]
    assert f"{found['error']:.4g}" == layer[6]
    assert list(document["difference"]["whole"]) == ["norm.weight"]
    assert document["difference"]["lost"] == {}
    assert document["options"] == {"rank": 2, "full": ["norm*"]}
    manifest = json.loads((tmp_path / "more" / "ckptkit.json").read_bytes())
    assert (manifest["kind"], manifest["source"]["difference"]) == (
        "adapter",
        document["difference"],
    )
    same = run(*command[:2], tmp_path / "base", tmp_path / "none", *usual)
    assert same.returncode == 4
    assert "the same numbers as the base model" in same.stderr


def test_the_states_of_the_optimizer_are_written_beside_the_model(tmp_path: Path) -> None:
    source = ROOT / "fixtures" / "zero3_adam" / "checkpoint"
    shown = run("consolidate", source, tmp_path / "out", "--optimizer", "--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr
    assert "optimizer.bin" in shown.stdout
    assert "rounded from them, as training does" in shown.stdout
    done = run("convert", source, tmp_path / "out", "--to", "dcp", "--optimizer", "--quiet")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "optimizer_0" / ".metadata").exists()
    without = ROOT / "fixtures" / "hf_tied" / "checkpoint"
    refused = run("consolidate", without, tmp_path / "none", "--optimizer")
    assert refused.returncode == 4
    assert "holds no states of an optimizer" in refused.stderr
