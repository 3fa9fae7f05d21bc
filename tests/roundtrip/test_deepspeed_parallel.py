"""AutoTP, experts and pipelines of DeepSpeed, against the live state of all ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsupportedError,
)
from tests.live_truth import FIXTURES, truth_of
from tests.sampled import sampled
from tests.tensor_images import images

AUTOTP = (
    *("autotp_zero1", "autotp_zero1_bf16_optimizer", "autotp_zero1_three_ranks"),
    *("autotp_zero1_vocabulary", "autotp_zero2_float16", "autotp_zero2_fused"),
    *("autotp_zero3", "autotp_zero3_float16", "autotp_deepspeed_0_19_5"),
    *("autotp_universal_zero1", "autotp_universal_zero3"),
)
EXPERTS = (
    *("experts_zero1", "experts_zero1_bf16_optimizer", "experts_zero1_one_rank"),
    *("experts_zero2_data_first", "experts_zero2_float16", "experts_zero2_pyramid"),
    *("autoep_zero1", "autoep_zero3", "autoep_universal_zero1", "autoep_universal_zero3"),
    *("autoep_qwen2_moe", "autoep_deepseek_v3"),
)
AUTOEP = (*(case for case in EXPERTS if case.startswith("autoep_")), "autoep_zero0")
PIPELINES = (
    *("pipeline_zero0", "pipeline_zero1", "pipeline_zero1_tied", "pipeline_zero1_four"),
    *("pipeline_zero1_float16", "pipeline_one_stage"),
)
WITHOUT_STATES = ("autotp_zero0", "experts_zero0", "autoep_zero0")
TRAINED = (*AUTOTP, *EXPERTS, *PIPELINES)
QUICK = (
    *("autotp_zero1", "autotp_zero2_fused", "autotp_zero3", "autotp_universal_zero3"),
    *("experts_zero1", "experts_zero2_data_first", "experts_zero2_pyramid", "autoep_zero3"),
    *("pipeline_zero0", "pipeline_zero1_tied"),
)
UNTRAINED_LAYERS = frozenset({"1.scale", "4.scale", "3.weight", "3.bias"})
Change = Callable[[dict[str, Any]], None]


def states_in(optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"state.{name}.{kind}": value
        for name, kinds in optimizer["state"].items()
        for kind, value in kinds.items()
    }


def written(source: Path, out: Path, **options: Any) -> dict[str, tuple[Any, ...]]:
    ckptkit.consolidate(source, out, names="live", **options)
    return images(load_file(out / "model.safetensors"))


@pytest.mark.parametrize("case", sampled([*TRAINED, *WITHOUT_STATES], QUICK))
def test_weights_and_masters_are_the_live_ones(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    assert written(source, tmp_path / "live") == truth_of(case, "truth")
    assert written(source, tmp_path / "wide", dtype="float32") == truth_of(case, "truth_fp32")


@pytest.mark.parametrize("case", sampled(TRAINED, QUICK))
def test_the_states_of_the_optimizer_are_the_live_ones(case: str, tmp_path: Path) -> None:
    source, out = FIXTURES / case / "checkpoint", tmp_path / "out"
    ckptkit.convert(source, out, to="torch", names="live", optimizer=True)
    optimizer = torch.load(out / "optimizer.bin", weights_only=True)  # noqa: TID251 - the oracle
    assert images(states_in(optimizer)) == truth_of(case, "truth_optimizer")
    groups = json.loads((FIXTURES / case / "truth_param_groups.json").read_text(encoding="utf-8"))
    found = [
        {"params": sorted(group["params"])} | {key: group[key] for key in ("lr", "weight_decay")}
        for group in optimizer["param_groups"]
    ]
    assert found == [group | {"params": sorted(group["params"])} for group in groups]


def loaded(source: Path, out: Path, base: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptkit.consolidate(source, out, base=base, **options)
    return dict(AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict())


@pytest.mark.parametrize("case", AUTOEP)
def test_experts_of_autoep_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Where nothing was learned the weights are those before AutoEP."""
    folder = FIXTURES / case
    found = loaded(folder / "checkpoint", tmp_path / "out", folder / "base")
    before = folder / "truth_before.safetensors"
    if before.exists():
        expected = load_file(before)
        narrow = {name: value.to(expected[name].dtype) for name, value in found.items()}
        assert images(narrow) == images(expected)
        return
    expected = load_file(folder / "truth.safetensors")
    layer = "model.layers.0.mlp."
    gates, ups = expected.pop(f"{layer}experts.w1"), expected.pop(f"{layer}experts.w3")
    expected[f"{layer}experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
    expected[f"{layer}experts.down_proj"] = expected.pop(f"{layer}experts.w2")
    expected[f"{layer}gate.weight"] = expected.pop(f"{layer}router.gate.weight")
    del expected[f"{layer}gate.gate.weight"]
    assert images(found) == images(expected)


def test_states_of_an_expert_of_autoep_follow_its_weights(tmp_path: Path) -> None:
    folder, out = FIXTURES / "autoep_qwen2_moe", tmp_path / "out"
    ckptkit.convert(folder / "checkpoint", out, to="torch", base=folder / "base", optimizer=True)
    optimizer = torch.load(out / "optimizer.bin", weights_only=True)  # noqa: TID251 - the oracle
    truth = load_file(folder / "truth_optimizer.safetensors")
    layer = "model.layers.0.mlp."
    for kind in ("exp_avg", "exp_avg_sq"):
        for new, old in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            whole = truth[f"state.{layer}experts.{old}.{kind}"]
            for number in range(4):
                name = f"{layer}experts.{number}.{new}_proj.weight"
                assert torch.equal(optimizer["state"][name][kind], whole[number])
        router = truth[f"state.{layer}router.gate.weight.{kind}"]
        assert router.abs().max() > 0
        assert torch.equal(optimizer["state"][f"{layer}gate.weight"][kind], router)


def test_a_universal_pipeline_has_what_is_trained_and_says_what_it_lacks(tmp_path: Path) -> None:
    source = FIXTURES / "pipeline_universal" / "checkpoint"
    for truth, options in (("truth", {}), ("truth_fp32", {"dtype": "float32"})):
        trained = truth_of("pipeline_universal", truth)
        kept = {name: held for name, held in trained.items() if name not in UNTRAINED_LAYERS}
        assert len(kept) == len(trained) - len(UNTRAINED_LAYERS)
        assert written(source, tmp_path / truth, **options) == kept
    ckptkit.convert(source, tmp_path / "out", to="torch", names="live", optimizer=True)
    path = tmp_path / "out" / "optimizer.bin"
    optimizer = torch.load(path, weights_only=True)  # noqa: TID251 - the oracle
    assert images(states_in(optimizer)) == truth_of("pipeline_universal", "truth_optimizer")
    assert any("what is not trained is in no file" in w for w in ckptkit.inspect(source).notes)


def test_ranks_slices_and_stages_are_listed() -> None:
    found = ckptkit.inspect(FIXTURES / "autotp_zero1" / "checkpoint")
    assert (found.format, found.world_size, found.step) == ("zero", 4, 2)
    notes = ckptkit.inspect(FIXTURES / "pipeline_zero1" / "checkpoint").notes
    assert any("no file of layer 2 of the pipeline" in note for note in notes)


def test_a_layer_that_stages_share_is_one_tensor_if_both_wrote_it(tmp_path: Path) -> None:
    """The last stage writes its own file where the layer runs by its `forward`."""
    source = shutil.copytree(FIXTURES / "pipeline_zero1_tied" / "checkpoint", tmp_path / "run")
    step = source / "global_step2"
    shutil.copy(step / "layer_00-model_states.pt", step / "layer_06-model_states.pt")
    assert written(source, tmp_path / "out") == truth_of("pipeline_zero1_tied", "truth")


def changed(case: str, folder: Path, file: str, change: Change) -> Path:
    source = shutil.copytree(FIXTURES / case / "checkpoint", folder / "run")
    path = source / "global_step2" / file
    document = torch.load(path, weights_only=False)  # noqa: TID251 - a file of ours
    change(document)
    torch.save(document, path)
    return source


def changed_maps(case: str, folder: Path, change: Change) -> Path:
    """Changes the maps in the files of both slices alike."""
    source = shutil.copytree(FIXTURES / case / "checkpoint", folder / "run")
    for path in source.glob("global_step2/*model_states.pt"):
        document = torch.load(path, weights_only=False)  # noqa: TID251 - a file of ours
        change(document["universal_checkpoint_info"])
        torch.save(document, path)
    return source


Q, NORM = r"^model\.layers\.0\.self_attn\.q_proj\.weight$", r"^model\.norm\.weight$"


def pieces(info: dict[str, Any], pattern: str, rank: int) -> Any:
    return info["affine_map"]["params"][pattern]["ranks"][rank]["pieces"]


def _move(info: dict[str, Any]) -> None:
    pieces(info, Q, 1)[0]["source"][0] = 64


def _shorten(info: dict[str, Any]) -> None:
    pieces(info, Q, 1)[0]["shape"][0] = 7


def _repeat(info: dict[str, Any]) -> None:
    pieces(info, Q, 1).append(pieces(info, Q, 1)[0])


def _widen(info: dict[str, Any]) -> None:
    entry = info["affine_map"]["params"][Q]
    entry["logical_shape"] = [24, 16]


def _leave_outside(info: dict[str, Any]) -> None:
    pieces(info, Q, 1)[0]["source"][0] = 1 << 40


def _turn(info: dict[str, Any]) -> None:
    pieces(info, Q, 0)[0]["source"][1] = [1, 16]


def _scale(info: dict[str, Any]) -> None:
    pieces(info, NORM, 0)[0]["scale"] = 0.5


def _forget_holder(info: dict[str, Any]) -> None:
    pieces(info, NORM, 0)[0]["locations"] = [0]


def _reshape(info: dict[str, Any]) -> None:
    entry = info["affine_map"]["params"][NORM]
    entry["logical_shape"] = [17]
    for rank in entry["ranks"].values():
        rank["shard_shape"] = rank["pieces"][0]["shape"] = [17]


def _age(info: dict[str, Any]) -> None:
    info["affine_map"]["version"] = 2


def _drop_rank(info: dict[str, Any]) -> None:
    del info["affine_map"]["params"][Q]["ranks"][1]


def _refuse(info: dict[str, Any]) -> None:
    info["autotp_unsupported_parameter_patterns"] = {Q: "blocks are interleaved"}


WRONG_MAPS: dict[str, tuple[Change, type[CkptkitError], str]] = {
    "an overlap": (_move, FormatError, "places twice elements of the parameter"),
    "a hole in a slice": (_shorten, FormatError, "leaves out elements of the slice of rank 1"),
    "a piece twice": (_repeat, FormatError, "places twice elements of the slice of rank 1"),
    "a hole": (_widen, FormatError, r"leaves out elements of the parameter, of shape \[24, 16\]"),
    "outside": (_leave_outside, FormatError, "is outside its source"),
    "other strides": (_turn, UnsupportedError, "no block of its source"),
    "scaled": (_scale, UnsupportedError, "scaled piece"),
    "other holders": (_forget_holder, FormatError, r"ranks \[0\] hold what is held by \[0, 1\]"),
    "other shapes": (_reshape, FormatError, r"slices of 'model.norm.weight' have shapes \[\[17\]"),
    "a later version": (_age, UnsupportedError, "of version 2, read is 1"),
    "a rank less": (_drop_rank, FormatError, "leaves out elements of the parameter"),
    "not described": (_refuse, UnsupportedError, "q_proj.*'blocks are interleaved'"),
}


@pytest.mark.parametrize("what", WRONG_MAPS)
def test_a_map_that_is_not_of_the_slices_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, error, message = WRONG_MAPS[what]
    source = changed_maps("autotp_zero1", tmp_path, change)
    with pytest.raises(error, match=message):
        written(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _no_map(document: dict[str, Any]) -> None:
    del document["universal_checkpoint_info"]


def _other_map(document: dict[str, Any]) -> None:
    pieces(document["universal_checkpoint_info"], Q, 0)[0]["source"][0] = 128
    pieces(document["universal_checkpoint_info"], Q, 1)[0]["source"][0] = 0


def _other_norm(document: dict[str, Any]) -> None:
    document["module"]["model.norm.weight"] += 1


def _other_step(document: dict[str, Any]) -> None:
    document["global_steps"] = 4


def _fewer_experts(document: dict[str, Any]) -> None:
    document["param_shapes"] = [
        {name: shape for name, shape in group.items() if "experts.1." not in name}
        for group in document["param_shapes"]
    ]


def _other_slices(document: dict[str, Any]) -> None:
    document["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 3}


def _other_trainer(document: dict[str, Any]) -> None:
    _no_map(document)
    del document["ds_config"]["tensor_parallel"]


def _no_settings(document: dict[str, Any]) -> None:
    document["ds_config"] = "settings.json"


SLICE, FIRST = "mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"
WRONG_FILES: dict[str, tuple[str, str, Change, type[CkptkitError], str]] = {
    "no map": ("autotp_zero1", SLICE, _no_map, UnsupportedError, "nothing shows how"),
    "no map of others": (
        *("autotp_zero1", FIRST, _other_trainer),
        *(UnsupportedError, r"nothing shows how [^;]*$|nothing shows how [^;]*\n"),
    ),
    "another map": ("autotp_zero1", SLICE, _other_map, FormatError, "another map of '.*q_proj"),
    "another step": ("autotp_zero1", SLICE, _other_step, FormatError, "several 'global_steps'"),
    "other slices": ("autotp_zero1", FIRST, _other_slices, FormatError, "2 model-parallel ranks"),
    "another stage's step": (
        *("pipeline_zero1", SLICE, _other_step),
        *(FormatError, "several 'global_steps'"),
    ),
    "experts of a rank": (
        *("experts_zero1", FIRST, _fewer_experts),
        *(FormatError, "that group has no shape of it"),
    ),
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_files_of_ranks_that_do_not_belong_together_are_refused(what: str, tmp_path: Path) -> None:
    case, file, change, error, message = WRONG_FILES[what]
    source = changed(case, tmp_path, file, change)
    with pytest.raises(error, match=message) as caught:
        written(source, tmp_path / "out")
    assert "damaged" not in str(caught.value) or what in {"experts of a rank", "other slices"}
    assert not (tmp_path / "out").exists()


def test_states_of_experts_are_left_out_where_nothing_shows_whose_they_are(tmp_path: Path) -> None:
    """DeepSpeed before 0.18.9 keeps the path of its settings where it was given one."""
    source = changed("experts_zero1", tmp_path, FIRST, _no_settings)
    assert written(source, tmp_path / "out") == truth_of("experts_zero1", "truth")
    assert any(
        "nothing shows which ranks share experts" in n for n in ckptkit.inspect(source).notes
    )
    with pytest.raises(CkptkitError, match="optimizer"):
        ckptkit.convert(source, tmp_path / "states", to="torch", optimizer=True)
    alone = changed("experts_zero2_float16", tmp_path / "one group", FIRST, _no_settings)
    ckptkit.convert(alone, tmp_path / "all", to="torch", names="live", optimizer=True)
    path = tmp_path / "all" / "optimizer.bin"
    optimizer = torch.load(path, weights_only=True)  # noqa: TID251 - the oracle
    assert images(states_in(optimizer)) == truth_of("experts_zero2_float16", "truth_optimizer")


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    source = changed("autotp_zero1", tmp_path, SLICE, _other_norm)
    with pytest.raises(CkptkitError, match=r"different values of 'model\.norm\.weight'"):
        written(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MISSING = {
    "mp_rank_01_model_states.pt": ("autotp_zero1", "model states|no file of weights"),
    "*mp_rank_01*": ("autotp_zero1", "model-parallel weights of rank 1 of 2 are not there"),
    "*_1_mp_rank_01_optim*": ("autotp_zero1", "optimizer states of rank 1 of 2 are not there"),
    "*mp_rank_01_optim*": ("autotp_zero1", "only some model-parallel ranks have optimizer states"),
    "zero_pp_rank_1_mp_rank_01_model*": ("autotp_zero3", "weights of rank 1 of 2 are not there"),
    "layer_1_expert_2*": ("experts_zero1", "missing are expert 2 of layer 1"),
    "*pp_rank_3*": ("experts_zero1", "optimizer states of rank 3 of 4 are not there"),
    "layer_04*": ("pipeline_zero1", r"the file of the layer with '4\.inner\.\w+' \('layer_04-…'\)"),
    "layer_00*": ("pipeline_zero1_tied", "no file has the layer that is called 'tied_modules.emb"),
    "layer_*": ("pipeline_zero1", "the layers of the pipeline"),
}


@pytest.mark.parametrize("pattern", MISSING)
def test_files_that_are_not_there_are_named(pattern: str, tmp_path: Path) -> None:
    case, message = MISSING[pattern]
    source = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "run")
    for path in source.glob(f"global_step2/{pattern}"):
        path.unlink()
    with pytest.raises((MissingFileError, IncompleteCheckpointError, FormatError), match=message):
        written(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_patterns_that_leave_open_what_is_cut_are_refused() -> None:
    """DeepSpeed 0.18 does not write which parameters every rank holds whole."""
    with pytest.raises(UnsupportedError, match=r"nothing shows how .* is cut") as caught:
        ckptkit.inspect(FIXTURES / "autotp_deepspeed_0_18" / "checkpoint")
    assert "_consolidated_16bit_state_dict()" in caught.value.hint


@pytest.mark.slow
def test_what_is_refused_for_lack_of_a_map_is_read_once_gathered(tmp_path: Path) -> None:
    """The remedy of the message, with the installed release as the one that wrote it."""
    pytest.importorskip("deepspeed")
    source = changed("autotp_zero0", tmp_path, FIRST, _no_map)
    with pytest.raises(UnsupportedError, match="nothing shows how") as caught:
        written(source, tmp_path / "out")
    assert "_consolidated_16bit_state_dict()" in caught.value.hint
    program = Path(__file__).with_name("deepspeed_gathered.py")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    folders = map(str, (FIXTURES / "autotp_zero0" / "base", source, tmp_path / "whole.pt"))
    subprocess.run([*ranks, str(program), *folders], check=True, timeout=300)
    assert written(tmp_path / "whole.pt", tmp_path / "out") == truth_of("autotp_zero0", "truth")


def _only_patterns(info: dict[str, Any], **more: Any) -> None:
    del info["affine_map"]
    info.update(more)


def test_patterns_with_the_widths_of_parts_are_enough(tmp_path: Path) -> None:
    source = changed_maps("autotp_zero2_fused", tmp_path, _only_patterns)
    assert written(source, tmp_path / "out") == truth_of("autotp_zero2_fused", "truth")


def test_parts_without_widths_are_cut_evenly_or_refused(tmp_path: Path) -> None:
    def forget(info: dict[str, Any]) -> None:
        _only_patterns(info, sub_param_shard_widths={})

    source = changed_maps("autotp_zero2_fused", tmp_path / "even", forget)
    assert written(source, tmp_path / "out") == truth_of("autotp_zero2_fused", "truth")

    def spoil(info: dict[str, Any]) -> None:
        _only_patterns(info, sub_param_shard_widths={})
        for entry in info["parameter_with_sub_params"]:
            entry["shape"] = [(15, 9, 8), -1]

    source = changed_maps("autotp_zero2_fused", tmp_path / "odd", spoil)
    with pytest.raises(UnsupportedError, match="nothing shows how the parts of"):
        written(source, tmp_path / "refused")


def test_a_map_may_share_some_blocks_and_cut_others() -> None:
    """As that of GPTBigCode does: queries are cut, keys and values are whole on every rank."""
    from ckptkit.core.geometry import find_defect
    from ckptkit.core.index import Box, Chunk, ChunkTable, Span
    from ckptkit.formats.zero.layouts import Layout, Piece

    both = frozenset({0, 1})
    layout = Layout(
        (6, 4),
        ((4, 4), (4, 4)),
        tuple(
            (
                Piece(Box((2 * rank, 0), (2, 4)), (0, 0), frozenset({rank})),
                Piece(Box((4, 0), (2, 4)), (2, 0), both),
            )
            for rank in range(2)
        ),
    )
    layout.check()
    placed = [
        box
        for rank in range(2)
        for span in (Span(0, 7), Span(7, 16))
        for box, _ in layout.place(rank, span)
    ]
    assert find_defect(ChunkTable.of([Chunk(box, 0) for box in placed], 2), (6, 4)) is None
    assert [*layout.copies()] == [(0, (2, 0), 1, (2, 0), (2, 4))]
