"""`--to megatron` and `--to torchtitan`: from Transformers' names to those of a framework."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.sampled import sampled
from tests.tensor_images import stored_in_dcp

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = sorted(path.name for path in FIXTURES.glob("megatron_model_*"))
LLAMA = "megatron_model_llama_tp2_pp2"
TITAN = sorted(path.name for path in FIXTURES.glob("torchtitan_family_*"))
TITAN_QUICK = (
    *("torchtitan_family_llama", "torchtitan_family_llama_tied", "torchtitan_family_gpt_oss"),
    *("torchtitan_family_deepseek_v3_small", "torchtitan_family_qwen3_moe"),
)
QWEN2_MOE = "megatron_model_qwen2_moe_tp2_ep2"
QKV = "decoder.layers.self_attention.linear_qkv.weight"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def hub_folder(case: str, place: Path) -> Path:
    place.mkdir(parents=True)
    shutil.copy(FIXTURES / case / "truth.safetensors", place / "model.safetensors")
    shutil.copy(FIXTURES / case / "config.json", place)
    return place


@pytest.mark.parametrize("case", sampled(MODELS, ["megatron_model_gemma3", LLAMA, QWEN2_MOE]))
@pytest.mark.quick("megatron_model_gemma3")
def test_the_way_back_gives_the_same_model(case: str, tmp_path: Path) -> None:
    model = hub_folder(case, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "there", to="megatron")
    ckptkit.consolidate(tmp_path / "there", tmp_path / "back")
    truth, back = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert back.keys() == truth.keys()
    assert all(torch.equal(back[name], truth[name]) for name in truth)


@pytest.mark.parametrize("case", [LLAMA, QWEN2_MOE])
def test_tensors_are_those_that_megatron_core_stored(case: str, tmp_path: Path) -> None:
    model = hub_folder(case, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "out", to="megatron")
    theirs = stored_in_dcp(next((FIXTURES / case / "checkpoint").glob("iter_*")))
    ours = stored_in_dcp(tmp_path / "out" / "release")
    assert theirs.keys() <= ours.keys()
    for name, tensor in theirs.items():
        rows = slice(0, len(ours[name]))  # without the padding of vocabularies
        assert torch.equal(ours[name], tensor[rows]), name
    further = ours.keys() - theirs.keys()
    assert further <= {"decoder.layers.pre_mlp_layernorm.weight"}


@pytest.mark.parametrize("case", sampled(TITAN, TITAN_QUICK))
@pytest.mark.quick("torchtitan_family_llama_tied", "torchtitan_family_qwen3_moe")
def test_tensors_are_those_that_torchtitan_stored(case: str, tmp_path: Path) -> None:
    model, out = hub_folder(case, tmp_path / "model"), tmp_path / "out"
    ckptkit.convert(model, out, to="torchtitan")
    theirs = stored_in_dcp(next((FIXTURES / case).rglob(".metadata")).parent)
    ours = stored_in_dcp(out)
    # Transformers' routers have no such bias: a run starts from zeros.
    made = {name for name in ours if "expert_bias" in name and not ours[name].any()}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() - made)
    assert all(ours[name].shape == theirs[name].shape for name in made)
    assert ours.keys() == theirs.keys()
    assert ckptkit.verify(out).ok
    ckptkit.consolidate(out, tmp_path / "back")
    truth = load_file(model / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == truth.keys()
    assert all(torch.equal(back[name], truth[name]) for name in truth)


def test_stacked_tensors_have_a_chunk_for_each_layer_and_expert(tmp_path: Path) -> None:
    model = hub_folder(QWEN2_MOE, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "out", to="megatron", max_shard_size="20KB")
    metadata = FileSystemReader(tmp_path / "out" / "release").read_metadata().state_dict_metadata
    experts = metadata["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert isinstance(experts, dcp.metadata.TensorStorageMetadata)
    layers, count = experts.size[:2]
    assert len(experts.chunks) == layers * count
    assert {tuple(chunk.sizes[:2]) for chunk in experts.chunks} == {(1, 1)}
    assert len(list((tmp_path / "out" / "release").glob("*.distcp"))) > 1


def test_a_map_of_ones_own_keeps_layers_apart(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\nextends = "megatron-llama"\nunstacked = ["layer"]\n')
    model = hub_folder(LLAMA, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "out", to="megatron", map=own)
    names = stored_in_dcp(tmp_path / "out" / "release")
    assert QKV.replace("layers.", "layers.1.") in names
    assert QKV not in names
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)  # noqa: TID251
    assert common["content_metadata"]["non_homogeneous_layers"] is True


def test_a_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\nextends = "megatron-llama"\n[[rule]]\nto = "model.embed_tokens.weight"\n'
        'from = "embedding.word_embeddings.weight"\nsteps = [{ rows = "vocab", multiple = 64 }]\n'
    )
    model = hub_folder(LLAMA, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "out", to="megatron", map=own)
    padded = stored_in_dcp(tmp_path / "out" / "release")["embedding.word_embeddings.weight"]
    rows = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert padded.shape == (64, rows.shape[1])
    assert torch.equal(padded[: len(rows)], rows)
    assert not padded[len(rows) :].any()
    ckptkit.consolidate(tmp_path / "out", tmp_path / "back", map=own)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["model.embed_tokens.weight"], rows)


def test_a_checkpoint_of_megatron_core_is_written_anew(tmp_path: Path) -> None:
    case = FIXTURES / LLAMA
    ckptkit.convert(case / "checkpoint", tmp_path / "out", to="megatron", base=case)
    theirs = stored_in_dcp(next((case / "checkpoint").glob("iter_*")))
    ours = stored_in_dcp(tmp_path / "out" / "release")
    assert torch.equal(ours[QKV], theirs[QKV])


def test_the_output_is_resumed_verified_and_found_damaged(tmp_path: Path) -> None:
    model, out = hub_folder(LLAMA, tmp_path / "model"), tmp_path / "out"
    for number in ("0/2", "1/2"):
        done = run_command("convert", model, out, "--to", "megatron", "--slice", number)
        assert done.returncode == 0, done.stderr
    assert ckptkit.verify(out).ok
    ckptkit.convert(model, out, to="megatron", if_exists="verify")
    data = out / "release" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert not ckptkit.verify(out).ok


def change_config(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


def change_tensors(model: Path, leave_out: str) -> None:
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if leave_out not in name}
    save_file(kept, model / "model.safetensors")


REFUSED = {
    "no configuration": (["--to", "megatron"], "no configuration has them"),
    "another family": (["--to", "megatron"], "no map has names of Megatron-Core"),
    "no map": (["--to", "megatron", "--map", "none"], "cannot be combined with --to megatron"),
    "names of training": (["--to", "megatron", "--names", "live"], "cannot be combined"),
    "an optimizer": (["--to", "megatron", "--optimizer"], "holds no states of an optimizer"),
    "a missing layer": (["--to", "megatron"], "layers.1."),
    "a missing tensor": (["--to", "megatron"], "up_proj"),
    "sizes of another model": (["--to", "megatron"], "4 parameters have other shapes"),
    "sizes that no rank holds": (["--to", "megatron"], "4 and 3 do not divide"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(
    what: str, tmp_path: Path
) -> None:
    options, expected = REFUSED[what]
    model = hub_folder(LLAMA, tmp_path / "model")
    if what == "no configuration":
        (model / "config.json").unlink()
    elif what == "another family":
        change_config(model, model_type="bloom")
    elif what == "a missing layer":
        change_tensors(model, "layers.1.")
    elif what == "a missing tensor":
        change_tensors(model, "layers.1.mlp.up_proj")
    elif what.startswith("sizes"):
        change_config(model, num_key_value_heads=3)
        if what == "sizes that no rank holds":
            tensors = load_file(model / "model.safetensors")
            for name in filter(re.compile(r"[kv]_proj").search, tensors):
                rows = len(tensors[name]) // 2  # of one of two heads
                tensors[name] = torch.cat([tensors[name], tensors[name][:rows]])
            save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = run_command("convert", model, tmp_path / "out", *options)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "pass --names live" not in done.stderr  # that cannot be combined with these
    assert not (tmp_path / "out").exists()


def test_names_of_one_tensor_that_differ_are_refused(tmp_path: Path) -> None:
    model = hub_folder(QWEN2_MOE, tmp_path / "model")
    ckptkit.convert(model, tmp_path / "there", to="megatron")
    state = stored_in_dcp(tmp_path / "there" / "release")
    state["decoder.layers.pre_mlp_layernorm.weight"][0, 0] += 1
    dcp.save(state, checkpoint_id=tmp_path / "changed", no_dist=True)
    with pytest.raises(CkptkitError, match="are names of one tensor, and differ"):
        ckptkit.consolidate(tmp_path / "changed", tmp_path / "out", base=model)
