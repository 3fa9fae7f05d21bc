"""Checkpoints that nanotron itself wrote, beside the weights of all ranks, laid out by hand.

`fixtures/generators/nanotron_models.py` made them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.live_truth import refuse
from tests.tensor_images import same

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OLD = FIXTURES / "nanotron_0_2_tp2"
LLAMA = FIXTURES / "nanotron_llama_tp2_pp2"
TURNED = FIXTURES / "nanotron_llama_interleaved"
EXPERTS = FIXTURES / "nanotron_qwen2_moe"
LAYER = "model/model/decoder/{}/pp_block"
QKV = f"{LAYER.format(0)}/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-{{}}-of-2.safetensors"
NORM = f"{LAYER.format(1)}/input_layernorm/model_weight.safetensors"
WHOLE = "None,None,None|None,None,None"
META, MODEL_CONFIG = "checkpoint_metadata.json", "model_config.json"


def copied(case: Path, to: Path) -> Path:
    """A copy of a run; returns the folder of its step."""
    shutil.copytree(case / "checkpoint", to)
    return to / "7"


def rewrite(file: Path, change: Callable[[torch.Tensor], torch.Tensor], **texts: str) -> None:
    """Writes a file of a parameter again, with another tensor or other texts in its header."""
    with safe_open(file, "pt") as held:
        tensor, metadata = held.get_tensor("data"), held.metadata()
    save_file({"data": change(tensor).contiguous()}, file, metadata={**metadata, **texts})


def set_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_names_are_kept_where_no_map_is_wanted(tmp_path: Path) -> None:
    ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", map="none")
    held = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(LLAMA / "truth.safetensors")
    rows = [truth[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(held["model.decoder.2.pp_block.mlp.gate_up_proj.weight"], torch.cat(rows))


def test_inspect_says_what_wrote_it() -> None:
    found = ckptkit.inspect(LLAMA / "checkpoint")
    assert (found.format, found.writer, found.version) == ("nanotron", "nanotron", "1.5")
    assert (found.step, found.world_size) == (7, 4)
    mesh = {dimension.name: dimension.size for dimension in found.mesh}
    assert mesh == {"tensor": 2, "pipeline": 2, "context": 1, "data": 1, "expert": 1}
    assert [str(group) for group in found.ignored] == ["optimizer/ (5)", "random/"]
    assert not found.problems


def test_the_step_that_latest_names_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    copied(LLAMA, run)
    shutil.copytree(run / "7", run / "9")
    found = ckptkit.inspect(run)
    assert found.path == str(run / "7")
    assert "9 left alone: 'latest.txt' names 7" in " ".join(found.notes)
    (run / "latest.txt").unlink()
    assert ckptkit.inspect(run).path == str(run / "9")


def test_an_interrupted_save_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    copied(LLAMA, run)
    shutil.copytree(run / "7", run / "9")
    (run / "9" / META).unlink()
    (run / "latest.txt").unlink()
    found = ckptkit.inspect(run)
    assert found.path == str(run / "7")
    assert any("9 was passed over" in note and META in note for note in found.notes)
    with pytest.raises(CkptkitError, match=f"no '{META}'"):
        ckptkit.inspect(run / "9")


def test_a_step_without_parameters_is_incomplete(tmp_path: Path) -> None:
    step = copied(LLAMA, tmp_path / "run")
    shutil.rmtree(step / "model")
    with pytest.raises(CkptkitError, match="no file of a parameter below 'model'"):
        ckptkit.inspect(step)


def test_numbered_folders_of_other_programs_are_left_to_other_readers(tmp_path: Path) -> None:
    step = tmp_path / "run" / "100"
    (step / "model").mkdir(parents=True)
    (step / "config.yaml").write_text("general:\n  step: 100\n")
    save_file({"a.weight": torch.zeros(2)}, step / "model" / "model.safetensors")
    (tmp_path / "run" / "latest.txt").write_text("100")
    assert ckptkit.inspect(tmp_path / "run").format == "safetensors"


def test_a_checkpoint_of_version_1_2_is_read(tmp_path: Path) -> None:
    found = ckptkit.inspect(OLD / "checkpoint")
    assert (found.version, found.step) == ("1.2", 7)
    assert any("--map nanotron-llama-interleaved" in note for note in found.notes)
    refuse("does not say rope_interleaved", OLD / "checkpoint", tmp_path / "out", base=OLD)
    map_ = "nanotron-llama-interleaved"
    ckptkit.consolidate(OLD / "checkpoint", tmp_path / "out", base=OLD, map=map_)
    assert same(tmp_path / "out" / "model.safetensors", OLD / "truth.safetensors")


def test_the_doubled_names_of_version_1_3_are_read(tmp_path: Path) -> None:
    step = copied(TURNED, tmp_path / "run")
    set_json(step / META, version="1.3")
    for file in step.glob("model/**/*_tp-rank-*.safetensors"):
        rewrite(file, torch.clone, version="1.3")
        name = file.name.replace("model_weight_pp", "model_model_weight.safetensors_pp")
        file.rename(file.with_name(name))
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=TURNED)
    assert same(tmp_path / "out" / "model.safetensors", TURNED / "truth.safetensors")


def test_slices_across_columns_are_put_in_their_places(tmp_path: Path) -> None:
    step = copied(LLAMA, tmp_path / "run")
    o_proj = step / LAYER.format(0) / "attn/o_proj"
    name = "model_weight_pp-rank-0-of-2_tp-rank-{}-of-2.safetensors"
    files = [o_proj / name.format(rank) for rank in range(2)]
    whole = torch.cat([load_file(file)["data"] for file in files], 1)
    blocks = whole.reshape(16, 4, 4)
    for rank, file in enumerate(files):  # each rank has every other block of four columns
        pairs = ";".join(
            f"None,None,None|{4 * i},{4 * i + 4},None#0,16,None|{8 * i + 4 * rank},"
            f"{8 * i + 4 * rank + 4},1"
            for i in range(2)
        )
        text = {"local_global_slices_pairs": pairs, "unsharded_shape": "(16, 16)", "version": "1.5"}
        save_file({"data": blocks[:, rank::2].reshape(16, 8)}, file, metadata=text)
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=LLAMA)
    assert same(tmp_path / "out" / "model.safetensors", LLAMA / "truth.safetensors")


def spread_experts(step: Path) -> list[Path]:
    """Writes experts as two expert-parallel ranks do; returns the files of the second.

    Named and described as `get_path` and `save_weights` of nanotron/serialize do for parameters
    that are sharded along experts; its own grouped experts are not marked so.
    """
    config = step / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("expert_parallel_size: 1", "expert_parallel_size: 2"))
    found = []
    for file in sorted(step.glob("model/**/model_merged_*_proj.safetensors")):
        whole = load_file(file)["data"]
        file.unlink()
        for rank, part in enumerate(whole.chunk(2)):
            shape = ", ".join(map(str, whole.shape))
            ends = f"{2 * rank},{2 * rank + 2},None|None,None,None|None,None,None"
            described = {
                "version": "1.5",
                "unsharded_shape": f"({shape})",
                "local_global_slices_pairs": f"None,None,None|{WHOLE}#{ends}",
            }
            stem = file.name.removesuffix(".safetensors")
            ranks = f"_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-{rank}-of-2"
            to = file.with_name(f"{stem}{ranks}.safetensors")
            save_file({"data": part.contiguous()}, to, metadata=described)
            found.append(to)
    return found[1::2]


def test_experts_on_several_ranks_are_joined(tmp_path: Path) -> None:
    step = copied(EXPERTS, tmp_path / "run")
    second = spread_experts(step)
    found = ckptkit.inspect(step)
    assert [d.size for d in found.mesh if d.name == "expert"] == [2]
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=EXPERTS)
    assert same(tmp_path / "out" / "model.safetensors", EXPERTS / "truth.safetensors")
    second[0].unlink()
    with pytest.raises(CkptkitError, match="no file is of expert rank 1 of 2"):
        ckptkit.inspect(step)


def drop_rank(step: Path) -> None:
    (step / QKV.format(1)).unlink()


def drop_stage(step: Path) -> None:
    shutil.rmtree(step / LAYER.format(2))


def add_layer(step: Path) -> None:
    shutil.copytree(step / LAYER.format(0), step / LAYER.format(3))


def drop_norm(step: Path) -> None:
    (step / NORM).unlink()


def other_save(step: Path) -> None:
    whole = step / QKV.format(0).replace("rank-0-of-2.", "rank-0-of-1.")
    shutil.copy(step / QKV.format(0), whole)


def other_stage(step: Path) -> None:
    for rank in range(2):
        file = step / QKV.format(rank)
        shutil.copy(file, file.with_name(file.name.replace("pp-rank-0", "pp-rank-1")))


def whole_too(step: Path) -> None:
    file = step / QKV.format(0)
    save_file(load_file(file), file.with_name("model_weight.safetensors"))


def version_of_shard(step: Path) -> None:
    rewrite(step / QKV.format(1), torch.clone, version="1.4")


def texts(**values: str) -> Callable[[Path], None]:
    return lambda step: rewrite(step / QKV.format(1), torch.clone, **values)


def slices(text: str) -> Callable[[Path], None]:
    return texts(local_global_slices_pairs=text)


def rank_0_again(step: Path) -> None:
    (step / QKV.format(1)).write_bytes((step / QKV.format(0)).read_bytes())


def no_texts(step: Path) -> None:
    file = step / QKV.format(1)
    save_file(load_file(file), file)


def two_tensors(step: Path) -> None:
    save_file({"data": torch.zeros(16), "more": torch.zeros(1)}, step / NORM)


def a_shard_without_a_rank(step: Path) -> None:
    (step / NORM).write_bytes((step / QKV.format(0)).read_bytes())


def stray(step: Path) -> None:
    shutil.copy(step / NORM, step / NORM.replace("model_weight", "weight"))


def in_json(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda step: set_json(step / name, **values)


def in_run_config(old: str, new: str) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        path = step / "config.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


DAMAGED: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "a missing rank": (drop_rank, r"qkv_proj.weight.*no file is of tensor rank 1 of 2"),
    "a missing stage": (drop_stage, r"layer 2 is missing; 'model_config.json' has 3"),
    "a layer too many": (add_layer, r"has layer 3; 'model_config.json' has 3"),
    "a missing parameter": (drop_norm, r"layer 1 has no 'pp_block.input_layernorm.weight'"),
    "a file of another parallel size": (other_save, r"tensor rank 0 of 1, in a save with 2"),
    "a parameter on two stages": (other_stage, r"files that contradict each other"),
    "a whole parameter beside shards": (whole_too, r"files that contradict each other"),
    "a shard of another version": (version_of_shard, r"version '1.4', the checkpoint of '1.5'"),
    "a shard in another type": (
        lambda step: rewrite(step / QKV.format(1), torch.Tensor.float),
        r"contradict each other.*float32",
    ),
    "another whole shape": (texts(unsharded_shape="(32, 17)"), r"contradict|wrong|inside"),
    "a shape that is none": (texts(unsharded_shape="(32, x)"), r"'\(32, x\)', not a shape"),
    "a shape of one dimension": (texts(unsharded_shape="(32,)"), r"is \[32\], the tensor has"),
    "the place of another rank": (rank_0_again, r"has elements in 2 of its 2 files, from \[0, 0\]"),
    "a gap in the header": (slices("0,8,None|0,16,1#8,16,1|0,16,1"), r"use the elements.*0 times"),
    "elements that are used twice": (
        slices(f"0,8,1|0,16,1#8,16,1|0,16,1;0,8,1|0,16,1#24,32,1|0,16,1{''}"),
        r"use the elements of shape \[16, 16\] from \[0, 0\] on 2 times",
    ),
    "boxes of other sizes": (slices("0,16,1|0,16,1#8,16,1|0,16,1"), r"box of \[16, 16\]"),
    "a slice outside": (slices("0,16,1|0,16,1#24,40,1|0,16,1"), r"\[24, 40\) is not inside of 32"),
    "a slice backwards": (slices("16,0,1|0,16,1#8,16,1|0,16,1"), r"\[16, 0\) is not inside"),
    "a slice with a step": (slices("0,16,2|0,16,1#8,16,1|0,16,1"), r"a step of 1"),
    "a negative slice": (slices("-16,16,1|0,16,1#8,16,1|0,16,1"), r"a step of 1"),
    "one slice too few": (slices(f"0,16,1#{WHOLE}"), r"not one slice for each of \[16, 16\]"),
    "no places": (no_texts, r"version None"),
    "two tensors in a file": (two_tensors, r"has the tensors 'data', 'more'"),
    "a shard without a rank": (a_shard_without_a_rank, r"slices of a shard, but no rank"),
    "a stray file": (stray, r"'weight.safetensors' is not one of nanotron's"),
    "a newer version": (in_json(META, version="1.6"), r"is '1.6', expected one of 1.2, 1.3"),
    "no version": (in_json(META, version=None), r"is None, expected one of"),
    "another number of ranks": (in_json(META, tp=4), r"'config.yaml' has tensor 2.*has 4"),
    "no number of ranks": (in_json(META, tp="2"), r"expected numbers of ranks"),
    "a configuration of another step": (in_run_config("step: 7", "step: 9"), r"has step 9.*has 7"),
    "a configuration of other stages": (in_run_config("pp: 2", "pp: 1"), r"in a save with 1 pipe"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_contradicts_itself_is_refused_and_nothing_is_written(
    what: str, tmp_path: Path
) -> None:
    damage, message = DAMAGED[what]
    step = copied(LLAMA, tmp_path / "run")
    damage(step)
    refuse(message, step, tmp_path / "out", map="none")


def test_rotary_pairs_that_nothing_says_are_asked_for(tmp_path: Path) -> None:
    step = copied(TURNED, tmp_path / "run")
    settings = json.loads((step / MODEL_CONFIG).read_text())
    del settings["rope_interleaved"]
    (step / MODEL_CONFIG).write_text(json.dumps(settings))
    with pytest.raises(CkptkitError, match="does not say rope_interleaved") as caught:
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=TURNED)
    assert "--map nanotron-llama" in str(caught.value.hint)
    map_ = "nanotron-llama-interleaved"
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=TURNED, map=map_)
    assert same(tmp_path / "out" / "model.safetensors", TURNED / "truth.safetensors")
