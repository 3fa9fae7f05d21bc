"""Files that each rank of a real Megatron-Core model wrote, beside the weights of all ranks."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.live_truth import refuse
from tests.tensor_images import same

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DENSE, MOE = "megatron_ranks_llama_tp2_pp2", "megatron_ranks_qwen2_moe_tp2_ep2"
VIRTUAL = "megatron_ranks_qwen2_pp2_vp2"
SIZES = {
    DENSE: {"tensor": 2, "pipeline": 2, "expert": 1},
    MOE: {"tensor": 2, "pipeline": 1, "expert": 2},
    VIRTUAL: {"tensor": 1, "pipeline": 2, "expert": 1},
}
FC1, NORM = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.input_layernorm.weight"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
State = dict[str, Any]


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint" / "iter_0000007", tmp_path / "iter"))


def change(step: Path, rank: str, edit: Callable[[State], object]) -> None:
    """Writes a rank's file again, as Megatron-LM would have with another state."""
    path = step / f"mp_rank_{rank}" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)  # noqa: TID251  a test changes what is stored
    edit(state)
    torch.save(state, path)


def change_all(step: Path, edit: Callable[[State], object]) -> None:
    for folder in sorted(step.iterdir()):
        change(step, folder.name.removeprefix("mp_rank_"), edit)


def is_truth(out: Path, name: str) -> bool:
    return same(out / "model.safetensors", truth_of(name))


def truth_of(name: str) -> Path:
    return FIXTURES / name / "truth.safetensors"


@pytest.mark.parametrize("name", SIZES)
def test_a_run_says_who_wrote_it_and_on_how_many_ranks(name: str) -> None:
    found = ckptkit.inspect(FIXTURES / name / "checkpoint")
    assert (found.format, found.writer) == ("megatron", "Megatron-LM, one file a rank")
    assert (found.step, found.problems) == (7, ())
    assert {dimension.name: dimension.size for dimension in found.mesh} == SIZES[name]
    assert found.world_size == len(list((FIXTURES / name).rglob("model_optim_rng.pt")))


def test_names_are_those_of_the_whole_model(tmp_path: Path) -> None:
    ckptkit.consolidate(FIXTURES / VIRTUAL / "checkpoint", tmp_path / "out", map="none")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {name.split(".")[2] for name in names if name.startswith("decoder.layers")} == set(
        "0123"
    )
    ckptkit.consolidate(FIXTURES / MOE / "checkpoint", tmp_path / "moe", map="none")
    names = load_file(tmp_path / "moe" / "model.safetensors").keys()
    for expert in range(4):
        assert f"decoder.layers.1.mlp.experts.experts.{expert}.linear_fc1.weight" in names


def share_storage(state: State) -> None:
    """Makes tensors views of one storage, as Megatron's buffers of parameters do."""
    held = {n: t for n, t in state["model"].items() if torch.is_tensor(t)}
    for dtype in {tensor.dtype for tensor in held.values()}:
        own = [name for name, tensor in held.items() if tensor.dtype == dtype]
        buffer = torch.cat([held[name].flatten() for name in own])
        at = 0
        for name in own:
            part = buffer[at : at + held[name].numel()]
            state["model"][name] = part.view(held[name].shape)
            at += part.numel()


def test_tensors_may_share_a_storage(tmp_path: Path) -> None:
    step = copy_of(DENSE, tmp_path)
    change_all(step, share_storage)
    ckptkit.consolidate(step, tmp_path / "out", base=FIXTURES / DENSE)
    assert is_truth(tmp_path / "out", DENSE)

    def drift(state: State) -> None:
        state["model"][NORM] = state["model"][NORM] + 1
        share_storage(state)

    change(step, "01_000", drift)
    with pytest.raises(CkptkitError, match=r"different values of 'decoder.layers.0.input"):
        ckptkit.consolidate(step, tmp_path / "other", base=FIXTURES / DENSE)
    assert not (tmp_path / "other").exists()


def test_down_projections_may_be_whole_on_every_rank(tmp_path: Path) -> None:
    """Transformer Engine's are, and its grouped experts have their number at the end."""
    out = tmp_path / "out"
    folder = tmp_path / "run" / "iter_0000001"
    attention, experts = "decoder.layers.0.self_attention.", "decoder.layers.0.mlp.experts."
    whole = {f"{attention}linear_q_down_proj.weight": torch.randn(6, 8)}
    whole[f"{attention}linear_kv_down_proj.weight"] = torch.randn(12, 8)
    cut = {f"{attention}linear_q_up_proj.weight": torch.randn(16, 6)}
    cut[f"{attention}linear_kv_up_proj.weight"] = torch.randn(16, 4)
    for expert in range(2):
        cut[f"{experts}linear_fc1.weight{expert}"] = torch.randn(16, 8)
    for rank in range(2):
        model = {**whole, **{name: tensor.chunk(2)[rank] for name, tensor in cut.items()}}
        for expert in range(2):
            fc1 = cut[f"{experts}linear_fc1.weight{expert}"].view(2, 2, 4, 8)
            model[f"{experts}linear_fc1.weight{expert}"] = fc1[:, rank].reshape(8, 8)
            fc2 = f"{experts}linear_fc2.weight{expert}"
            cut_fc2 = torch.arange(64.0).view(8, 8) + expert
            model[fc2] = cut_fc2.chunk(2, dim=1)[rank].clone()
        args = argparse.Namespace(tensor_model_parallel_size=2, qk_pos_emb_head_dim=8, num_layers=1)
        path = folder / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        model = {name: tensor.clone() for name, tensor in model.items()}
        torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, path)
    ckptkit.consolidate(folder, out, map="none")
    got = load_file(out / "model.safetensors")
    for name, tensor in {**whole, **cut}.items():
        is_expert = name.startswith(experts)
        given = f"{experts}experts.{name[-1]}.linear_fc1.weight" if is_expert else name
        assert torch.equal(got.pop(given), tensor), name
    for expert in range(2):
        stored = got.pop(f"{experts}experts.{expert}.linear_fc2.weight")
        assert torch.equal(stored, torch.arange(64.0).view(8, 8) + expert)
    assert not got


def set_args(**values: Any) -> Callable[[State], object]:
    return lambda state: state["args"].__dict__.update(values)


def put(name: str, value: Any, model: str = "model") -> Callable[[State], object]:
    return lambda state: state[model].__setitem__(name, value)


def drop(ending: str) -> Callable[[State], object]:
    def edit(state: State) -> None:
        for name in [name for name in state["model"] if ending in name]:
            del state["model"][name]

    return edit


def add(name: str) -> Callable[[State], object]:
    return lambda state: put(name, state["model"][name] + 1)(state)


class Float8Tensor:
    """A class of a package that ckptkit does not know."""

    def __init__(self) -> None:
        self.data = 3


Change = tuple[str, Callable[[State], object], str]
ALL = "all"
REFUSED: dict[str, Change] = {
    "another iteration": ("01_000", lambda s: s.update(iteration=8), "is of iteration 8, and"),
    "other sizes": (
        "01_000",
        set_args(tensor_model_parallel_size=4),
        "_size 4, and 'mp_rank_00",
    ),
    "other layers": ("01_000", set_args(num_layers=3), "with num_layers 3, and"),
    "a norm that differs": ("01_000", add(NORM), "different values of 'decoder.layers.0.input"),
    "a tied copy that differs": ("00_001", add(HEAD), "'embedding.*' and 'output_layer.weight'"),
    "another shape": ("01_000", put(FC1, torch.ones(50, 32).bfloat16()), r"\[50, 32\] here, and"),
    "another dtype": ("01_000", put(NORM, torch.ones(32).half()), "is float16 .* and float32"),
    "rows that do not fit": (ALL, put(FC1, torch.ones(50, 32)), "does not fit '.*fc2.weight'"),
    "a tensor that one rank lacks": ("01_001", drop("linear_proj.weight"), "has other tensors"),
    "a layer less": (ALL, set_args(num_layers=3), "have 2 layers, the arguments .* say 3"),
    "a layer that is missing": (
        ALL,
        lambda s: [
            s["model"].__setitem__(name.replace("layers.0", "layers.1"), s["model"].pop(name))
            for name in list(s["model"])
            if "layers.0" in name
        ],
        "of stage 0, number 0 is missing, 1 is there",
    ),
    "an unknown name": (ALL, put("decoder.other.weight", torch.ones(2, 2)), "nothing shows how"),
    "a name twice": (ALL, put(f"module.{NORM}", torch.ones(32)), "two tensors are"),
    "a subclass": (ALL, put(NORM, Float8Tensor()), "is held as '.*Float8Tensor'"),
    "experts in one matrix": (
        ALL,
        put("decoder.layers.0.mlp.experts.weight1", torch.ones(2, 2)),
        "one matrix of experts",
    ),
    "a model of before Megatron-Core": (ALL, put("language_model", {}), "before Megatron-Core"),
    "an old version": (ALL, lambda s: s.update(checkpoint_version=1.0), "version 1.0 is not"),
    "no model": (ALL, lambda s: s.pop("model"), "has the state dicts none"),
    "no arguments": (ALL, lambda s: s.pop("args"), "without the arguments of the training"),
    "experts in more parts": (ALL, set_args(expert_tensor_parallel_size=4), "cut into 4 parts"),
    "more stages": (
        ALL,
        set_args(pipeline_model_parallel_size=3),
        "missing are mp_rank_00_002",
    ),
    "far more stages": (ALL, set_args(pipeline_model_parallel_size=10**6), "of 2,000,000 ranks"),
    "no stages": (ALL, set_args(pipeline_model_parallel_size=1), "folder has 2 numbers"),
    "a function": (ALL, lambda s: s.update(rng_state=Gadget()), "os.system|posix.system"),
}


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rank, edit, message = REFUSED[what]
    step = copy_of(DENSE, tmp_path)
    if rank == ALL:
        change_all(step, edit)
    else:
        change(step, rank, edit)
    refuse(message, step, tmp_path / "out", base=FIXTURES / DENSE)
    assert not (tmp_path / "executed").exists()


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    change_all(step, drop("local_experts.0."))
    refuse(r"experts.*number 0 is missing, 1 is there", step, tmp_path / "out", base=FIXTURES / MOE)


def test_a_rank_that_the_run_did_not_have_is_refused(tmp_path: Path) -> None:
    step = copy_of(DENSE, tmp_path)
    shutil.copytree(step / "mp_rank_01_001", step / "mp_rank_02_001")
    with pytest.raises(CkptkitError, match="a run with 4 such files does not have"):
        ckptkit.inspect(step)
    shutil.move(step / "mp_rank_02_001", step / "mp_rank_02")
    with pytest.raises(CkptkitError, match="different counts of numbers"):
        ckptkit.inspect(step)


def test_files_of_one_stage_need_no_arguments(tmp_path: Path) -> None:
    step = copy_of(VIRTUAL, tmp_path)
    shutil.rmtree(step / "mp_rank_00_001")
    shutil.move(step / "mp_rank_00_000", step / "mp_rank_00")
    change(step, "00", lambda state: state.pop("args"))
    found = ckptkit.inspect(step)
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 1), ("pipeline", 1), ("expert", 1)]
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((FIXTURES / VIRTUAL / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(CkptkitError):  # the other stage's layers are missing
        ckptkit.consolidate(step, tmp_path / "out", base=base)


def test_the_file_of_one_of_several_ranks_is_not_the_model(tmp_path: Path) -> None:
    folder = copy_of(DENSE, tmp_path) / "mp_rank_00_000"
    for path in (folder, folder / "model_optim_rng.pt"):
        refuse("is the file of one rank of 4", path, tmp_path / "out", map="none")


def test_the_file_of_an_only_rank_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    args = argparse.Namespace(tensor_model_parallel_size=1, num_layers=1)
    model = {NORM: torch.ones(8), FC1: torch.ones(16, 8)}
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": model}, path)
    found = ckptkit.inspect(path)
    assert (found.format, found.step, len(found.tensors)) == ("megatron", 3, 2)


RANKS = {
    "megatron_ranks_llama_tp2_pp2": {"00_000": 0, "01_000": 1, "00_001": 2, "01_001": 3},
    "megatron_ranks_qwen2_moe_tp2_ep2": {"00_000": 0, "01_001": 1},
    "megatron_ranks_qwen2_pp2_vp2": {"00_000": 0, "00_001": 1},
}


@pytest.mark.parametrize("name", RANKS)
def test_files_of_ranks_that_were_exchanged_are_refused(name: str, tmp_path: Path) -> None:
    step = copy_of(name, tmp_path)
    for folder, rank in RANKS[name].items():
        change(step, folder, set_args(rank=rank))
    ckptkit.consolidate(step, tmp_path / "whole", base=truth_of(name).parent)
    assert is_truth(tmp_path / "whole", name)
    first, *_, last = (step / f"mp_rank_{folder}" for folder in RANKS[name])
    first.rename(tmp_path / "kept")
    last.rename(first)
    (tmp_path / "kept").rename(last)
    with pytest.raises(
        CkptkitError, match=r"was written by rank \d of \d, whose folder is 'mp_rank_"
    ):
        ckptkit.consolidate(step, tmp_path / "out", base=truth_of(name).parent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (0, 2), (3, 0)])
def test_stages_may_have_different_counts_of_layers(
    counts: tuple[int, int], tmp_path: Path
) -> None:
    norm = "decoder.layers.{}.input_layernorm.weight"
    whole = {norm.format(number): torch.rand(8) for number in range(sum(counts))}
    names = iter(whole)
    for stage, count in enumerate(counts):
        args = argparse.Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=2, num_layers=sum(counts)
        )
        own = {norm.format(number): whole[next(names)] for number in range(count)}
        path = tmp_path / "iter_0000001" / f"mp_rank_00_00{stage}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "model": own}, path)
    ckptkit.consolidate(tmp_path / "iter_0000001", tmp_path / "out", map="none")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == whole.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in whole.items())


def test_ranks_of_another_iteration_than_their_folder_are_a_problem(tmp_path: Path) -> None:
    step = copy_of(DENSE, tmp_path)
    moved = step.rename(tmp_path / "iter_0000009")
    (problem,) = ckptkit.inspect(moved).problems
    assert problem.message == "is of iteration 7, in the folder 'iter_0000009'"
