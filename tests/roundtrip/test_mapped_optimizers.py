"""`--optimizer` where a map converts the names: states go where their weights go.

The states are made of the weights, so that a state in a wrong place differs from its weight.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.sampled import sampled
from tests.tensor_images import stored_in_dcp

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TITAN = sorted(path.parent.name for path in FIXTURES.glob("torchtitan_family_*/config.json"))
MEGATRON = sorted(path.name for path in FIXTURES.glob("megatron_model_*"))
LLAMA, MOE = "torchtitan_family_llama", "torchtitan_family_qwen3_moe"
MEGATRON_LLAMA, GEMMA = "megatron_model_llama_tp2_pp2", "megatron_model_gemma3"
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def weights_of(case: str) -> Tensors:
    return stored_in_dcp(next((FIXTURES / case).rglob(".metadata")).parent)


def trained(case: str, weights: Tensors) -> Tensors:
    """The parameters: torchtitan 0.3 splits queries, keys and values where it stores weights."""
    made, config = dict(weights), json.loads((FIXTURES / case / "config.json").read_text())
    for name in [n for n in weights if ".qkv_linear.wq." in n and "muse_glimmer" not in case]:
        parts = [made.pop(name.replace(".wq.", f".{part}.")) for part in ("wq", "wk", "wv")]
        groups = config["num_key_value_heads"]
        split = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
        made[name.replace(".wq.", ".wqkv.")] = torch.cat(split, 1).reshape(-1, *parts[0].shape[1:])
    return made


def states_of(weights: Tensors) -> dict[str, Any]:
    """AdamW's states of all parameters, in two groups as is usual: norms do not decay."""
    weights = {n: t for n, t in weights.items() if "expert_bias" not in n}  # which are buffers
    state = {
        name: {
            "step": torch.tensor(7.0),
            "exp_avg": tensor.float() * 2,
            "exp_avg_sq": tensor.float() ** 2,
        }
        for name, tensor in weights.items()
    }
    norms = [name for name in weights if "norm" in name]
    others = [name for name in weights if "norm" not in name]
    groups = [
        {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "params": members}
        for decay, members in ((0.1, others), (0.0, norms))
    ]
    return {"state": state, "param_groups": groups}


def saved(
    weights: Tensors, optimizer: dict[str, Any], place: Path, *, is_flat: bool = False
) -> Path:
    if is_flat:  # as torchtitan has torch flatten it
        flat = {
            f"state.{name}.{kind}": value
            for name, own in optimizer["state"].items()
            for kind, value in own.items()
        }
        for group in optimizer["param_groups"]:
            for name in group["params"]:
                settings = {key: value for key, value in group.items() if key != "params"}
                flat |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
        optimizer = flat
    dcp.save({**weights, "optimizer": optimizer}, checkpoint_id=place, no_dist=True)
    return place


def refusal(source: Path, case: str, out: Path) -> str:
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(source, out, base=FIXTURES / case, optimizer=True)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("case", sampled([*TITAN, *MEGATRON], [LLAMA, MOE, MEGATRON_LLAMA, GEMMA]))
def test_states_are_rearranged_as_their_weights(case: str, tmp_path: Path) -> None:
    weights = weights_of(case)
    states = states_of(trained(case, weights))
    source, out = saved(weights, states, tmp_path / "run"), tmp_path / "out"
    ckptkit.consolidate(source, out, base=FIXTURES / case, optimizer=True)
    model = load_file(out / "model.safetensors")
    optimizer = torch.load(out / "optimizer.bin")  # noqa: TID251
    # Maps add constants to some norms, such as Gemma's; moments have none of them.
    truth = load_file(FIXTURES / case / "truth.safetensors")
    added = {name for name in model if "norm" in name and "gemma" in case}
    state = optimizer["state"]
    buffers = {name for name in model if name.endswith("e_score_correction_bias")}
    tied = {"lm_head.weight"} - model.keys()
    assert state.keys() - tied == model.keys() - buffers
    for name in state.keys() - added - tied:
        assert torch.equal(state[name]["exp_avg"], model[name].float() * 2), name
        assert torch.equal(state[name]["exp_avg_sq"], truth[name].float() ** 2), name
        assert state[name]["step"] == 7
    decaying, norms = optimizer["param_groups"]
    assert (decaying["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert sorted([*decaying["params"], *norms["params"]]) == sorted(state)


@pytest.mark.parametrize("case", sampled(TITAN, [LLAMA, MOE]))
def test_torchtitan_gets_back_what_it_saved(case: str, tmp_path: Path) -> None:
    weights = weights_of(case)
    source = saved(weights, states_of(trained(case, weights)), tmp_path / "run", is_flat=True)
    ckptkit.convert(source, tmp_path / "out", to="torchtitan", base=FIXTURES / case, optimizer=True)
    ours, theirs = stored_in_dcp(tmp_path / "out"), stored_in_dcp(source)
    # Models can be told to train queries, keys and values apart, too.
    apart = {
        name for name in ours if name.startswith("optimizer.") and re.search(r"\.w[qkv]\.", name)
    }
    assert ours.keys() - apart == theirs.keys() - apart
    made = {name for name in ours if "expert_bias" in name and not ours[name].any()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.keys() - made)
    read = [dcp.FileSystemReader(place).read_metadata() for place in (source, tmp_path / "out")]
    before, after = (
        {key for key in one.state_dict_metadata if ".param_groups." in key} for one in read
    )
    assert before <= after
    assert before != set()
    # It goes on from what ckptkit wrote, which has them in both forms, too.
    again = tmp_path / "again"
    ckptkit.convert(tmp_path / "out", again, to="torchtitan", optimizer=True)
    assert ours.keys() == stored_in_dcp(again).keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in stored_in_dcp(again).items())


def test_a_run_of_megatron_goes_on_in_torchtitan(tmp_path: Path) -> None:
    """Both keep Llama in other forms; the way is by the names of Transformers."""
    weights = weights_of(MEGATRON_LLAMA)
    source = saved(weights, states_of(weights), tmp_path / "run")
    base = FIXTURES / MEGATRON_LLAMA
    ckptkit.convert(source, tmp_path / "out", to="torchtitan", base=base, optimizer=True)
    ours = stored_in_dcp(tmp_path / "out")
    moments = {name for name in ours if name.endswith(".exp_avg")}
    assert len(moments) > 8
    weights = {n: t for n, t in ours.items() if not n.startswith("optimizer.")}
    weights |= trained(MEGATRON_LLAMA, weights)
    assert any(".wqkv." in name for name in moments)
    for name in moments:
        weight = weights[name.removeprefix("optimizer.state.").removesuffix(".exp_avg")]
        assert torch.equal(ours[name], weight.float() * 2), name


@pytest.mark.parametrize("case", ["megatron_optimizer_llama", "megatron_optimizer_distributed"])
def test_what_megatron_core_trained_is_there_by_name(case: str, tmp_path: Path) -> None:
    place, live = FIXTURES / case, FIXTURES / "megatron_optimizer_llama"
    out = tmp_path / "out"
    report = run_command("consolidate", place / "checkpoint", out, "--base", place, "--optimizer")
    assert report.returncode == 0
    assert "does not store which parameters are in which group: biases and" in report.stderr
    weights, truth = load_file(out / "model.safetensors"), load_file(place / "truth.safetensors")
    assert weights.keys() == truth.keys()
    assert all(torch.equal(weights[name], truth[name]) for name in truth)
    optimizer = torch.load(out / "optimizer.bin")  # noqa: TID251
    moments = load_file(live / "truth_optimizer.safetensors")
    found = {
        f"{name}.{kind}": value
        for name, own in optimizer["state"].items()
        for kind, value in own.items()
        if kind != "step"
    }
    assert found.keys() == moments.keys()
    assert all(torch.equal(found[name], moments[name]) for name in moments)
    assert {own["step"] for own in optimizer["state"].values()} == {3}
    decaying, others = optimizer["param_groups"]
    assert sorted(decaying["params"]) == json.loads((live / "truth_decaying.json").read_text())
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decaying["lr"] == others["lr"] == 0.01


def test_torch_goes_on_from_a_run_of_megatron_core(tmp_path: Path) -> None:
    """What torchtitan asks for is there: each state and setting of each parameter."""
    place = FIXTURES / "megatron_optimizer_distributed"
    out = tmp_path / "out"
    ckptkit.convert(place / "checkpoint", out, to="torchtitan", base=place, optimizer=True)
    names = dcp.FileSystemReader(out).read_metadata().state_dict_metadata.keys()
    weights = [name for name in names if not name.startswith("optimizer.")]
    assert len(weights) > 15
    for name in weights:
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert f"optimizer.state.{name}.{kind}" in names
    asked = {*torch.optim.AdamW([torch.ones(1)]).param_groups[0], "initial_lr"} - {"params"}
    for name in [
        name.replace(".wq.", ".wqkv.") for name in weights if not re.search(r"\.w[kv]\.", name)
    ]:
        for setting in asked:
            assert f"optimizer.param_groups.{name}.{setting}" in names


def test_options_see_the_names_that_are_written(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    source, out = (
        saved(weights, states_of(trained(LLAMA, weights)), tmp_path / "run"),
        tmp_path / "out",
    )
    only = "model.layers.0.*"
    ckptkit.consolidate(source, out, base=FIXTURES / LLAMA, optimizer=True, include=[only])
    optimizer = torch.load(out / "optimizer.bin")  # noqa: TID251
    assert optimizer["state"].keys() == load_file(out / "model.safetensors").keys()
    members = [name for group in optimizer["param_groups"] for name in group["params"]]
    assert sorted(members) == sorted(optimizer["state"])


@pytest.mark.parametrize("case", [LLAMA, MEGATRON_LLAMA])
def test_options_see_the_names_of_the_checkpoint_too(case: str, tmp_path: Path) -> None:
    weights = weights_of(case)
    source, out = saved(weights, states_of(weights), tmp_path / "run"), tmp_path / "out"
    left_out = "layers.0.*" if case == LLAMA else "decoder.layers.*"
    ckptkit.consolidate(
        source, out, base=FIXTURES / case, optimizer=True, exclude=[left_out], names="auto"
    )
    optimizer = torch.load(out / "optimizer.bin")  # noqa: TID251
    written = load_file(out / "model.safetensors").keys()
    assert optimizer["state"].keys() - {"lm_head.weight"} == written - {"lm_head.weight"}
    members = [name for group in optimizer["param_groups"] for name in group["params"]]
    assert sorted(members) == sorted(optimizer["state"])


class TestRefused:
    @pytest.fixture
    def weights(self) -> Tensors:
        return weights_of(MEGATRON_LLAMA)

    def test_states_of_another_shape(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer = states_of(weights)
        for own in optimizer["state"].values():  # as Adafactor keeps them
            if own["exp_avg"].ndim > 1:
                own["exp_avg_sq_row"] = own.pop("exp_avg_sq").mean(-1)
        source = saved(weights, optimizer, tmp_path / "run")
        text = refusal(source, MEGATRON_LLAMA, tmp_path / "out")
        assert "'exp_avg_sq_row'" in text
        assert "the parameter's own shape" in text

    def test_a_state_that_one_expert_lacks(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        shutil.copytree(FIXTURES / MOE, model, ignore=shutil.ignore_patterns("checkpoint"))
        (model / "truth.safetensors").rename(model / "model.safetensors")
        names = load_file(model / "model.safetensors")
        optimizer = states_of(dict(names))
        dropped = next(name for name in names if ".experts.1.gate_proj" in name)
        del optimizer["state"][dropped]
        source = tmp_path / "run"
        dcp.save({"model": names, "optimizer": optimizer}, checkpoint_id=source, no_dist=True)
        with pytest.raises(CkptkitError, match=r"has no state '(step|exp_avg)', as a frozen one"):
            ckptkit.convert(source, tmp_path / "out", to="torchtitan", base=model, optimizer=True)
        assert not (tmp_path / "out").exists()

    def test_states_of_no_parameter(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer = states_of(weights)
        optimizer["state"]["other.weight"] = {"exp_avg": torch.ones(3)}
        source = saved(weights, optimizer, tmp_path / "run")
        text = refusal(source, MEGATRON_LLAMA, tmp_path / "out")
        assert "'other.weight', which is no tensor of the model" in text


def test_under_a_map_the_state_of_a_tied_weight_follows_the_name_that_is_written(
    tmp_path: Path,
) -> None:
    case, head = "torchtitan_family_llama_tied", "lm_head.weight"
    weights = weights_of(case)
    states = states_of(
        {name: weight for name, weight in weights.items() if name != "output.weight"}
    )
    source = saved(weights, states, tmp_path / "run")
    options: dict[str, Any] = {"base": FIXTURES / case, "optimizer": True}
    ckptkit.consolidate(source, tmp_path / "all", **options)
    ckptkit.consolidate(source, tmp_path / "out", **options, exclude=["*embed_tokens*"])
    assert head in load_file(tmp_path / "out" / "model.safetensors")
    whole, found = (torch.load(tmp_path / n / "optimizer.bin") for n in ("all", "out"))  # noqa: TID251
    expected = whole["state"]["model.embed_tokens.weight"]["exp_avg"]
    assert torch.equal(found["state"][head]["exp_avg"], expected)
    assert sorted(n for g in found["param_groups"] for n in g["params"]) == sorted(found["state"])


class TestMegatron:
    """`--to megatron --optimizer`."""

    @pytest.fixture
    def weights(self) -> Tensors:
        return weights_of(MEGATRON_LLAMA)

    @pytest.mark.parametrize("dtype", ["keep", "float32"])
    def test_it_gets_back_what_it_saved(self, dtype: str, weights: Tensors, tmp_path: Path) -> None:
        source, out = saved(weights, states_of(weights), tmp_path / "run"), tmp_path / "out"
        ckptkit.convert(
            *(source, out),
            to="megatron",
            base=FIXTURES / MEGATRON_LLAMA,
            optimizer=True,
            dtype=dtype,
        )
        assert (out / "latest_checkpointed_iteration.txt").read_text() == "7"
        ours, theirs = stored_in_dcp(out / "iter_0000007"), stored_in_dcp(source)
        for name, weight in weights.items():
            rows = slice(0, len(ours[name]))  # without the padding of vocabularies
            for kind in ("exp_avg", "exp_avg_sq"):
                state = ours[f"optimizer.state.{kind}.{name}"]
                assert torch.equal(state, theirs[f"optimizer.state.{name}.{kind}"][rows])
            assert torch.equal(ours[f"optimizer.state.param.{name}"], weight[rows].float())
        path = out / "iter_0000007" / "common.pt"
        common = torch.load(path, weights_only=False)  # noqa: TID251
        decaying, flat = common["optimizer"]["optimizer"]["param_groups"]
        assert (decaying["weight_decay"], decaying["wd_mult"]) == (0.1, 1.0)
        assert (flat["weight_decay"], flat["wd_mult"]) == (0.0, 0.0)
        assert (flat["betas"], flat["step"]) == ((0.9, 0.95), 7)

    def refusal(self, weights: Tensors, optimizer: dict[str, Any], place: Path) -> str:
        source, out = saved(weights, optimizer, place / "run"), place / "out"
        base = FIXTURES / MEGATRON_LLAMA
        done = run_command(
            "convert", source, out, "--to", "megatron", "--base", base, "--optimizer"
        )
        assert done.returncode != 0
        assert not out.exists()
        for target in (["megatron"], ["dcp", "--optimizer"]):  # what the message proposes
            options = ["--base", base, "--to", *target]
            assert run_command("convert", source, place / target[0], *options).returncode == 0
        assert "leave --optimizer out, or go on with --to dcp" in done.stderr.replace("\n  ", " ")
        return done.stderr

    def test_states_of_another_optimizer(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer = states_of(weights)
        for own in optimizer["state"].values():
            own["momentum_buffer"] = own.pop("exp_avg")
        text = self.refusal(weights, optimizer, tmp_path)
        assert "'momentum_buffer'" in text
        assert "the states of Adam alone" in text

    def test_a_parameter_without_states(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer, name = states_of(weights), "decoder.final_layernorm.weight"
        del optimizer["state"][name]
        text = self.refusal(weights, optimizer, tmp_path)
        assert f"parameter {name!r} has no state 'exp_avg'" in text

    def test_states_of_another_shape(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer, name = states_of(weights), "decoder.final_layernorm.weight"
        optimizer["state"][name]["exp_avg_sq"] = torch.ones(3)
        text = self.refusal(weights, optimizer, tmp_path)
        assert f"state 'exp_avg_sq' of {name!r} is [3]" in text

    def test_parameters_that_count_other_steps(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer, name = states_of(weights), "decoder.final_layernorm.weight"
        optimizer["state"][name]["step"] = torch.tensor(6.0)
        text = self.refusal(weights, optimizer, tmp_path)
        assert f"counts 6 steps of {name!r} and 7 of" in text

    def test_groups_that_it_does_not_have(self, weights: Tensors, tmp_path: Path) -> None:
        optimizer, name = states_of(weights), "embedding.word_embeddings.weight"
        optimizer["param_groups"][0]["params"].remove(name)
        own = {**optimizer["param_groups"][0], "lr": 0.5, "params": [name]}
        optimizer["param_groups"].append(own)
        text = self.refusal(weights, optimizer, tmp_path)
        assert "have different settings" in text
