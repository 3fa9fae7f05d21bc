"""DeepSpeed's ZeRO checkpoints: real ones against live state, and odd ones made here.

What is made here is laid out as DeepSpeed lays it out, with plain dictionaries for its classes.
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
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    OverflowRefusedError,
    UnsupportedError,
)
from tests.live_truth import FIXTURES, written
from tests.tensor_images import images

NETS = ("zero1_bf16", "zero1_bf16_optimizer", "zero2_round_robin", "zero3_bf16", "zero3_float32")
ADAPTERS = ("peft_zero2", "peft_zero3")
Change = Callable[[dict[str, Any]], None]

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"a.weight": (3, 5), "b.weight": (2, 2)},
    {"b.bias": (1,), "c.bias": (7,)},
]
FROZEN: dict[str, tuple[int, ...]] = {"frozen.weight": (3, 3)}


@pytest.mark.parametrize("case", [*NETS, *ADAPTERS])
@pytest.mark.quick("zero1_bf16_optimizer", "zero2_round_robin", "zero3_float32")
def test_a_real_checkpoint_is_bit_equal_to_the_live_model_and_to_the_masters(
    case: str, tmp_path: Path
) -> None:
    source = FIXTURES / case / "checkpoint"
    live = images(load_file(FIXTURES / case / "truth.safetensors"))
    assert written(source, tmp_path / "live") == live
    masters = images(load_file(FIXTURES / case / "truth_fp32.safetensors"))
    assert written(source, tmp_path / "masters", dtype="float32") == masters
    found = ckptkit.verify(source)
    assert found.ok
    assert not found.unverified
    name = next(iter(live))
    with ckptkit.open(source) as checkpoint:
        assert images({name: checkpoint[name]})[name] == live[name]
    assert ckptkit.diff(source, tmp_path / "live").same
    assert not ckptkit.diff(source, tmp_path / "masters").same or "float32" in case


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_trained_with_zero_is_the_live_one(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = FIXTURES / case / "adapter_config.json"
    ckptkit.extract_adapter(FIXTURES / case / "checkpoint", out, adapter_config=config)
    truth = load_file(FIXTURES / case / "adapter_truth.safetensors")
    assert images(load_file(out / "adapter_model.safetensors")) == images(truth)
    merged = images(load_file(FIXTURES / case / "merged_truth.safetensors"))
    base = FIXTURES / case / "base"
    ckptkit.merge_adapter(out, tmp_path / "merged", base=base)
    ckptkit.merge_adapter(FIXTURES / case / "checkpoint", tmp_path / "whole", adapter_config=config)
    for folder in ("merged", "whole"):
        assert images(load_file(tmp_path / folder / "model.safetensors")) == merged


def test_what_is_found_is_told(tmp_path: Path) -> None:
    found = ckptkit.inspect(FIXTURES / "zero3_bf16" / "checkpoint")
    assert (found.format, found.world_size, found.step) == ("zero", 2, 2)
    assert found.writer == "DeepSpeed 0.19.8, ZeRO stage 3"
    assert {(tree.name, tree.part) for tree in found.trees} == {
        ("module", "model"),
        ("fp32", "other"),
        ("optimizer", "optimizer"),
    }
    manifest = ckptkit.consolidate(
        FIXTURES / "zero1_bf16" / "checkpoint", tmp_path / "out", dtype="float32"
    )
    assert manifest.kind == "model"


class Made:
    """A checkpoint of a few small tensors, spread over ranks as DeepSpeed does it."""

    def __init__(self, stage: int, world: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(world)
        self.stage, self.world, self.dtype = stage, world, dtype
        self.masters = {
            name: torch.randn(shape, generator=generator)
            for group in SHAPES
            for name, shape in group.items()
        }
        self.frozen = {n: torch.randn(s, generator=generator).to(dtype) for n, s in FROZEN.items()}
        self.live = {n: t.to(dtype) for n, t in self.masters.items()} | self.frozen
        self.live["steps"] = torch.tensor(5)
        self.live["tied.weight"] = self.live["a.weight"]

    def models(self) -> dict[str, dict[str, Any]]:
        shared = {
            "buffer_names": ["steps"],
            "param_shapes": [{n: torch.Size(s) for n, s in g.items()} for g in SHAPES],
            "shared_params": {"tied.weight": "a.weight"},
            "global_steps": 4,
            "dp_world_size": self.world,
            "ds_version": "0.19.8",
        }
        if self.stage < 3:
            return {"mp_rank_00_model_states.pt": {"module": dict(self.live), **shared}}
        empty = {n: torch.empty(0, dtype=t.dtype) for n, t in self.live.items()}
        return {
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": {
                "module": empty | {"steps": self.live["steps"]},
                "frozen_param_shapes": {n: torch.Size(s) for n, s in FROZEN.items()},
                "frozen_param_fragments": {
                    n: self.part(t, rank, fill=9) for n, t in self.frozen.items()
                },
                **shared,
            }
            for rank in range(self.world)
        }

    def part(self, tensor: torch.Tensor, rank: int, fill: float = 0) -> torch.Tensor:
        size = -(-tensor.numel() // self.world)
        padded = torch.full((size * self.world,), fill, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.flatten()
        return padded[size * rank : size * (rank + 1)].clone()

    def optimizers(self) -> dict[str, dict[str, Any]]:
        build = self._sliced if self.stage < 3 else self._partitioned
        prefix = "bf16_" if self.dtype == torch.bfloat16 else ""
        return {
            f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": {
                "optimizer_state_dict": {"zero_stage": self.stage, **build(rank)}
            }
            for rank in range(self.world)
        }

    def _partitioned(self, rank: int) -> dict[str, Any]:
        groups = [
            torch.cat([self.part(self.masters[name], rank) for name in group]) for group in SHAPES
        ]
        return {"partition_count": self.world, "fp32_flat_groups": groups}

    def _sliced(self, rank: int) -> dict[str, Any]:
        vectors, mappings = [], []
        for group in SHAPES:
            flat = torch.cat([self.masters[name].flatten() for name in group])
            size = -(-flat.numel() // (2 * self.world)) * 2  # padded to twice the ranks
            low, mapping, at = size * rank, {}, 0
            for name, shape in group.items():
                end = at + torch.Size(shape).numel()
                start, stop = max(at, low), min(end, low + size)
                if stop > start:
                    mapping[name] = {"numel": stop - start, "start": start - low}
                at = end
            vectors.append(flat[low : low + size].clone())
            mappings.append(mapping)
        return {
            "partition_count": [self.world] * len(SHAPES),
            "single_partition_of_fp32_groups": vectors,
            "param_slice_mappings": mappings,
        }

    def write(self, folder: Path, changes: Mapping[str, Change] | None = None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in (self.models() | self.optimizers()).items():
            if changes and name in changes:
                changes[name](document)
            torch.save(document, folder / name)
        return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.quick("1-2", "2-3", "3-1", "3-4")
def test_any_stage_on_any_number_of_ranks(stage: int, world: int, tmp_path: Path) -> None:
    made = Made(stage, world)
    source = made.write(tmp_path / "global_step4")
    assert written(source, tmp_path / "live") == images(made.live)
    wide = {
        n: made.masters.get(n, t.float() if t.is_floating_point() else t)
        for n, t in made.live.items()
    } | {"tied.weight": made.masters["a.weight"]}
    assert written(source, tmp_path / "wide", dtype="float32") == images(wide)


def test_a_float16_model_becomes_bfloat16_from_its_masters(tmp_path: Path) -> None:
    made = Made(3, 2, torch.float16)
    made.masters["b.bias"][0] = 1e5
    made.live["b.bias"] = made.masters["b.bias"].half()
    source = made.write(tmp_path / "tag")
    found = written(source, tmp_path / "out", dtype="bfloat16")
    want = {n: made.masters.get(n, t).to(torch.bfloat16) for n, t in made.live.items()}
    want |= {"steps": made.live["steps"], "tied.weight": want["a.weight"]}
    assert found == images(want)
    with pytest.raises(OverflowRefusedError, match="100,000 at element 0 does not fit float16"):
        written(source, tmp_path / "float16")


def test_weights_whose_optimizer_states_were_deleted_are_read_up_to_stage_2(
    tmp_path: Path,
) -> None:
    made = Made(2, 2)
    source = made.write(tmp_path / "tag")
    for file in source.glob("*optim*"):
        file.unlink()
    assert written(source, tmp_path / "out") == images(made.live)
    assert any("no master copies" in note for note in ckptkit.inspect(source).notes)


OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"
WEIGHTS = "mp_rank_00_model_states.pt"


def _state(**changes: Any) -> Change:
    return lambda document: document["optimizer_state_dict"].update(changes)


def _shorten(key: str, by: int) -> Change:
    def change(document: dict[str, Any]) -> None:
        state = document["optimizer_state_dict"]
        group = state[key][-1]
        state[key][-1] = group[:-by] if by > 0 else torch.cat([group, group[:-by]])

    return change


def _slice(name: str, address: Mapping[str, Any]) -> Change:
    return lambda d: d["optimizer_state_dict"]["param_slice_mappings"][0].update({name: address})


WRONG: dict[str, tuple[int, str, Change, type[CkptkitError], str]] = {
    "another world": (3, OPTIM, _state(partition_count=4), FormatError, "runs with 2 and 4 ranks"),
    "expert groups": (2, OPTIM, _state(partition_count=[2, 1]), FormatError, "with 1 and 2 ranks"),
    "another stage": (3, OPTIM, _state(zero_stage=2), FormatError, "stage 2 and 3|stage 3 and 2"),
    "another step": (3, MODEL, lambda d: d.update(global_steps=6), FormatError, "'global_steps'"),
    "too short": (3, OPTIM, _shorten("fp32_flat_groups", 2), FormatError, "do not add up"),
    "too long": (3, OPTIM, _shorten("fp32_flat_groups", -1), FormatError, "1 elements more"),
    "no vectors": (3, OPTIM, _state(fp32_flat_groups=[]), FormatError, "ends before its part"),
    "frozen part": (
        *(3, MODEL, lambda d: d.update(frozen_param_fragments={"frozen.weight": torch.ones(2)})),
        *(FormatError, "2 elements of the frozen 'frozen.weight'"),
    ),
    "lost slice": (
        *(2, OPTIM, _state(param_slice_mappings=[{}, {}])),
        *(IncompleteCheckpointError, "elements, and the ranks hold"),
    ),
    "no slices": (
        *(2, OPTIM, _state(param_slice_mappings=None)),
        *(UnsupportedError, "has no 'param_slice_mappings'"),
    ),
    "slice outside": (
        *(2, OPTIM, _slice("b.weight", {"numel": 4, "start": 99})),
        *(FormatError, "is outside the 9 elements"),
    ),
    "strange slice": (
        *(2, OPTIM, _slice("z", {"numel": 1, "start": 0})),
        *(FormatError, "slice of 'z', and that group has no shape"),
    ),
    "tensor parallel": (
        *(2, WEIGHTS, lambda d: d.update(mp_world_size=2)),
        *(MissingFileError, "model-parallel weights of rank 1 of 2 are not there"),
    ),
    "pipeline": (
        *(2, WEIGHTS, lambda d: d.update(module=None)),
        *(MissingFileError, "the layers of the pipeline"),
    ),
    "experts": (
        *(2, WEIGHTS, lambda d: d.update(num_experts=[4])),
        *(MissingFileError, "0 of the files of 4 experts"),
    ),
    "not a dictionary": (
        2,
        WEIGHTS,
        lambda d: d.update(module=[1]),
        FormatError,
        "no dictionary|not a dictionary",
    ),
    "another shape": (
        *(2, WEIGHTS, lambda d: d["module"].update({"b.weight": torch.ones(4)})),
        *(FormatError, r"'b.weight' has shape \[4\]"),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_that_contradict_each_other_are_refused(what: str, tmp_path: Path) -> None:
    stage, file, change, error, message = WRONG[what]
    source = Made(stage, 2).write(tmp_path / "tag", {file: change})
    with pytest.raises(error, match=message) as caught:
        written(source, tmp_path / "out")
    assert str(tmp_path / "tag") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_second_name_of_a_module_is_left_out_of_stage_3_with_a_warning(tmp_path: Path) -> None:
    """As DeepSpeed saves a model whose module `again` is its `head`."""
    files = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
    made = Made(3, 2)
    source = made.write(
        tmp_path / "tag",
        dict.fromkeys(files, lambda d: d["module"].update({"again.weight": torch.empty(0)})),
    )
    (warning,) = (n for n in ckptkit.inspect(source).notes if "again" in n)
    assert warning.startswith("'again.weight' left out, as by zero_to_fp32.py")
    assert written(source, tmp_path / "out") == images(made.live)


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", FormatError, "of a rank that a run"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", FormatError, "are of two checkpoints"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", FormatError, "are of two checkpoints"),
        ("mp_rank_01_model_states.pt", FormatError, "have several 'global_steps'"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", FormatError, "a model without experts"),
        ("expert_1_mp_rank_00_model_states.pt", UnsupportedError, "experts in files"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", UnsupportedError, "experts in files"),
        ("layer_01-model_00-model_states.pt", FormatError, "a module beside layers of a pipeline"),
        ("layer_01-x_00-model_states.pt", UnsupportedError, "pipeline with an axis of its own"),
        ("zero/a.weight/fp32.pt", FormatError, "beside the files of a universal checkpoint"),
        ("zero/optimizer_state.pt", FormatError, "beside the files of a universal checkpoint"),
    ],
)
def test_a_file_that_does_not_belong_is_named(
    file: str, error: type[CkptkitError], message: str, tmp_path: Path
) -> None:
    source = Made(2, 2).write(tmp_path / "tag")
    (source / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / OPTIM, source / file)
    with pytest.raises(error, match=message):
        written(source, tmp_path / "out")


def test_the_newest_whole_step_is_taken_and_a_finished_model_is_preferred(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Made(3, 2)
    first.write(run / "checkpoint-4" / "global_step4")
    Made(3, 2).write(run / "checkpoint-8" / "global_step8")
    (run / "checkpoint-8" / "global_step8" / OPTIM).unlink()
    assert written(run, tmp_path / "out") == images(first.live)
    save_file({"x.weight": torch.ones(2)}, run / "checkpoint-4" / "model.safetensors")
    assert written(run / "checkpoint-4", tmp_path / "x").keys() == {"x.weight"}
    below = written(run / "checkpoint-4", tmp_path / "below", select="global_step4")
    assert below == images(first.live)


def test_among_tags_without_a_number_the_file_latest_chooses(tmp_path: Path) -> None:
    best, last = Made(3, 2), Made(3, 3)
    best.write(tmp_path / "run" / "best")
    last.write(tmp_path / "run" / "last")
    with pytest.raises(AmbiguousSourceError, match="'best', 'last'"):
        written(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "latest").write_text("last\n")
    assert written(tmp_path / "run", tmp_path / "out") == images(last.live)
    assert written(tmp_path / "run", tmp_path / "o2", select="best") == images(best.live)


def test_two_models_of_one_step_are_two_models(tmp_path: Path) -> None:
    one, two = Made(3, 2), Made(1, 3)
    one.write(tmp_path / "run" / "pytorch_model")
    two.write(tmp_path / "run" / "pytorch_model_1")
    (tmp_path / "run" / "latest").write_text("pytorch_model_1")
    with pytest.raises(AmbiguousSourceError, match="'pytorch_model', 'pytorch_model_1'"):
        written(tmp_path / "run", tmp_path / "out")
    for select, made in (("pytorch_model", one), ("pytorch_model_1", two)):
        out = tmp_path / select
        found = written(tmp_path / "run", out, select=select, dtype="float32")
        assert found["c.bias"] == images(made.masters)["c.bias"]


def test_ties_that_deepspeed_tells_are_found(tmp_path: Path) -> None:
    source = Made(3, 2).write(tmp_path / "tag")
    (source / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    with ckptkit.open(source) as checkpoint:
        assert torch.equal(checkpoint["tied.weight"], checkpoint["a.weight"])
