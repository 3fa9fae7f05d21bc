"""Meta's own files beside what Transformers' conversion makes of them.

`fixtures/generators/meta_llama.py` made them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from tests.command_line import run_command
from tests.live_truth import refuse
from tests.tensor_images import same

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TWO, THREE, ONE = (FIXTURES / f"meta_llama_{kind}" for kind in ("2", "3", "3_one_file"))
Tensors = dict[str, torch.Tensor]
FIRST, SECOND, PARAMS = "consolidated.00.pth", "consolidated.01.pth", "params.json"


def copied(case: Path, to: Path) -> Path:
    return Path(shutil.copytree(case / "checkpoint", to))


def load(path: Path) -> Tensors:
    held: Tensors = torch.load(path, weights_only=True)  # noqa: TID251  our own files
    return held


def change_params(folder: Path, **changed: Any) -> None:
    path = folder / PARAMS
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_the_command_says_what_it_reads_and_leaves_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_command("consolidate", TWO / "checkpoint", out, "--base", TWO)
    assert result.returncode == 0, result.stderr
    assert "left out: 'rope.freqs'" in " ".join((result.stdout + result.stderr).split())
    said = run_command("inspect", TWO / "checkpoint").stdout
    assert "meta" in said
    assert "tp" in said


def test_a_configuration_beside_the_files_is_enough(tmp_path: Path) -> None:
    source = copied(THREE, tmp_path / "model")
    shutil.copy(THREE / "config.json", source)
    ckptkit.consolidate(source, tmp_path / "out")
    truth = load_file(THREE / "truth.safetensors")
    assert same(tmp_path / "out/model.safetensors", truth)


def test_beside_the_model_of_transformers_metas_files_are_left_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    copied(THREE, model / "original")
    shutil.copy(THREE / "config.json", model)
    truth = load_file(THREE / "truth.safetensors")
    held = {name: tensor + 1 for name, tensor in truth.items()}
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    ckptkit.consolidate(model, tmp_path / "out")
    assert same(tmp_path / "out/model.safetensors", held)
    ckptkit.consolidate(model, tmp_path / "other", select="original")
    assert same(tmp_path / "other/model.safetensors", truth)


def test_in_mistrals_folders_the_model_of_transformers_is_taken(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(load(ONE / "checkpoint" / FIRST), model / "consolidated.safetensors")
    for name in ("config.json", "truth.safetensors"):
        shutil.copy(ONE / name, model / name.replace("truth", "model"))
    manifest = ckptkit.consolidate(model, tmp_path / "out")
    assert not any(name.startswith("map ") for name in manifest.versions)
    ckptkit.consolidate(model, tmp_path / "other", select="consolidated.safetensors")
    truth = load_file(ONE / "truth.safetensors")
    for out in ("out", "other"):
        assert same(tmp_path / out / "model.safetensors", truth)


def test_one_file_of_safetensors_is_converted_as_mistral_publishes_it(tmp_path: Path) -> None:
    source = tmp_path / "consolidated.safetensors"
    save_file(load(ONE / "checkpoint" / FIRST), source)
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((ONE / "config.json").read_text())
    changed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (base / "config.json").write_text(json.dumps(config | changed))
    ckptkit.consolidate(source, tmp_path / "out", base=base)
    truth = load_file(ONE / "truth.safetensors")
    assert same(tmp_path / "out/model.safetensors", truth)


def test_one_file_with_other_contents_is_read_as_any_file_of_torch(tmp_path: Path) -> None:
    """As the files of models that see images, whose names are others."""
    weights = {"vision.0.attention.wq.weight": torch.ones(3, 5), "text.norm.weight": torch.ones(7)}
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"model": weights}, source / FIRST)
    shutil.copy(THREE / "checkpoint" / PARAMS, source)
    ckptkit.consolidate(source, tmp_path / "out")
    assert same(tmp_path / "out/model.safetensors", weights)


def split_over_four(folder: Path) -> Path:
    """More ranks than heads of keys: `reshard_mp` of Meta's gives neighbours the same head."""
    whole, folder = load(ONE / "checkpoint" / FIRST), folder / "four"
    folder.mkdir()
    shutil.copy(ONE / "checkpoint" / PARAMS, folder)
    for rank in range(4):
        held = {}
        for name, tensor in whole.items():
            axis = 1 if ".wo." in name or ".w2." in name else 0
            parts = 2 if ".wk." in name or ".wv." in name else 1 if "norm" in name else 4
            held[name] = tensor.chunk(parts, axis)[rank * parts // 4].clone()
        torch.save(held, folder / f"consolidated.{rank:02d}.pth")
    return folder


def test_more_ranks_than_heads_of_keys_have_them_in_common(tmp_path: Path) -> None:
    source = split_over_four(tmp_path)
    ckptkit.consolidate(source, tmp_path / "out", base=ONE)
    truth = load_file(ONE / "truth.safetensors")
    assert same(tmp_path / "out/model.safetensors", truth)
    third = load(source / "consolidated.03.pth")
    third["layers.1.attention.wk.weight"] += 1
    torch.save(third, source / "consolidated.03.pth")
    refuse(r"wk.weight' differs between ranks 2 and 3", source, tmp_path / "again", base=ONE)


def other_norm(folder: Path) -> None:
    held = load(folder / SECOND)
    held["layers.1.ffn_norm.weight"] += 1
    torch.save(held, folder / SECOND)


def other_norm_in_one_storage(folder: Path) -> None:
    for name in (FIRST, SECOND):
        held = load(folder / name)
        if name == SECOND:
            held["norm.weight"] += 1
        storage = torch.cat([tensor.flatten() for tensor in held.values()])
        views = torch.split(storage, [tensor.numel() for tensor in held.values()])
        shaped = {
            key: view.view(tensor.shape)
            for (key, tensor), view in zip(held.items(), views, strict=True)
        }
        torch.save(shaped, folder / name)


def unknown_tensor(folder: Path) -> None:
    for name in (FIRST, SECOND):
        torch.save(load(folder / name) | {"layers.0.attention.wqkv": torch.ones(2)}, folder / name)


def wider_tensor(folder: Path) -> None:
    held = load(folder / SECOND)
    held["layers.0.feed_forward.w1.weight"] = torch.ones(9, 16).bfloat16()
    torch.save(held, folder / SECOND)


def narrow_tensor(folder: Path) -> None:
    for name in (FIRST, SECOND):
        held = load(folder / name)
        held["layers.0.attention.wo.weight"] = torch.ones(16, 7).bfloat16()
        torch.save(held, folder / name)


def step_beside(folder: Path) -> None:
    torch.save(load(folder / SECOND) | {"step": 7}, folder / SECOND)


DAMAGED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "the last file is missing": (lambda f: (f / SECOND).unlink(), "of 1 files has shape"),
    "the first file is missing": (lambda f: (f / FIRST).unlink(), "rank 0 of 2 are not there"),
    "no sizes": (lambda f: (f / PARAMS).unlink(), "'params.json' is not beside the files"),
    "one file twice": (
        lambda f: shutil.copy(f / FIRST, f / SECOND),
        "the weights of rank 0 once more",
    ),
    "a file too many": (
        lambda f: shutil.copy(TWO / "checkpoint" / SECOND, f / "consolidated.02.pth"),
        "this file has 'rope.freqs'",
    ),
    "two names of one rank": (
        lambda f: shutil.copy(f / SECOND, f / "consolidated.001.pth"),
        "two of the files are of one rank",
    ),
    "a file of another release": (
        lambda f: shutil.copy(TWO / "checkpoint" / SECOND, f / SECOND),
        "this file has 'rope.freqs', unlike that of rank 0",
    ),
    "another norm": (other_norm, "'layers.1.ffn_norm.weight' differs between ranks 0 and 1"),
    "another norm among views": (other_norm_in_one_storage, "'norm.weight' differs between"),
    "a tensor of another architecture": (unknown_tensor, "not known how .*wqkv"),
    "a part of another shape": (wider_tensor, r"is bfloat16 \[9, 16\] here"),
    "parts that do not add up": (narrow_tensor, r"shape \[16, 14\] in all, .* \[16, 16\]"),
    "something that is no tensor": (step_beside, "holds 'step', which is no tensor"),
    "more layers": (lambda f: change_params(f, n_layers=3), "has 2 layers, .* says 3"),
    "fewer layers": (lambda f: change_params(f, n_layers=1), "first that differs is layer 1"),
    "other heads": (lambda f: change_params(f, n_kv_heads=4), r"wk.weight' of 2 files"),
    "another vocabulary": (lambda f: change_params(f, vocab_size=21), r"says \[21, 16\]"),
    "no width": (lambda f: change_params(f, dim="16"), "'dim' is not a size"),
    "no heads": (lambda f: change_params(f, n_heads=0), "'n_heads' is not a size"),
    "a list for sizes": (lambda f: (f / PARAMS).write_text("[]"), "is not a JSON object"),
    "no JSON": (lambda f: (f / PARAMS).write_text("{"), "not JSON"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    damage, message = DAMAGED[what]
    source = copied(THREE, tmp_path / "source")
    damage(source)
    refuse(message, source, tmp_path / "out", base=THREE)


def test_names_are_kept_where_no_map_is_wanted(tmp_path: Path) -> None:
    ckptkit.consolidate(THREE / "checkpoint", tmp_path / "out", map="none")
    parts = [load(THREE / "checkpoint" / name) for name in (FIRST, SECOND)]
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == parts[0].keys()
    wo = "layers.0.attention.wo.weight"
    assert torch.equal(got[wo], torch.cat([part[wo] for part in parts], 1))
