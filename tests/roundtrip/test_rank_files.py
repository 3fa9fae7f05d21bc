"""What each rank saved for itself: real files against live state, and ones damaged here."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    InputError,
    LimitError,
    MissingFileError,
    NotACheckpointError,
    UnsupportedError,
)
from ckptkit.formats.ranks import reader
from tests.live_truth import FIXTURES, copied, truth_of, written
from tests.sampled import sampled
from tests.tensor_images import images

CASES = (
    *("verl_fsdp1", "verl_fsdp1_sharded", "verl_one_rank", "verl_hsdp"),
    *("rank_files_tensor_parallel", "rank_files_placements"),
    *("rank_files_accelerate_fsdp2", "rank_files_accelerate_fsdp1", "rank_files_local_orig"),
    *("rank_files_torch_2_1", "rank_files_torch_2_4", "rank_files_torch_2_6"),
    "rank_files_torch_2_9",
    *("fairscale_fairseq", "fairscale_pair", "fairscale_apart"),
    "verl_0_9_lora",
)
QUICK = (  # of each kind; the others are in `make test-slow`
    *("verl_fsdp1_sharded", "verl_one_rank", "rank_files_tensor_parallel", "rank_files_placements"),
    *("rank_files_accelerate_fsdp2", "rank_files_local_orig", "rank_files_torch_2_1"),
    *("rank_files_torch_2_9", "fairscale_fairseq", "fairscale_apart", "verl_0_9_lora"),
)


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # noqa: TID251  torch is the oracle


def rank_files(folder: Path, kind: str = "") -> list[Path]:
    files = [*folder.rglob("*.pt"), *folder.rglob("*.bin")]
    return sorted(path for path in files if path.name.startswith(kind) and path.name != "data.pt")


@pytest.mark.parametrize("case", sampled(CASES, QUICK))
@pytest.mark.quick(
    "fairscale_fairseq",
    "rank_files_local_orig",
    "rank_files_tensor_parallel",
    "rank_files_torch_2_1",
    "verl_one_rank",
)
def test_the_files_of_all_ranks_are_bit_equal_to_the_live_model(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    live = truth_of(case)
    assert written(source, tmp_path / "out") == live
    found = ckptkit.verify(source)
    assert found.ok
    assert not found.unverified
    with ckptkit.open(source) as checkpoint:
        name = checkpoint.keys()[0]
        assert images({name: checkpoint[name]})[name] == live[name]
    assert ckptkit.diff(source, tmp_path / "out").same
    assert not ckptkit.inspect(source).problems


@pytest.mark.parametrize("case", ["rank_files_placements", "rank_files_local_orig"])
def test_other_layouts_hold_the_same_bits(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    ckptkit.convert(source, tmp_path / "torch", to="torch", names="live")
    found = loaded(tmp_path / "torch" / "pytorch_model.bin")
    assert images(found) == truth_of(case)
    ckptkit.convert(source, tmp_path / "dcp", to="dcp", names="live")
    assert written(tmp_path / "dcp", tmp_path / "again") == truth_of(case)


def test_of_a_run_of_verl_the_newest_actor_comes_with_its_configuration(tmp_path: Path) -> None:
    source = FIXTURES / "verl_fsdp2" / "checkpoint"
    found = written(source, tmp_path / "actor", select="actor")
    live = truth_of("verl_fsdp2", "truth_actor_4")
    del live["lm_head.weight"]  # tied by the configuration in `huggingface/`
    assert found == live
    side = {path.name for path in (tmp_path / "actor").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= side
    assert written(source, tmp_path / "critic", select="critic") == truth_of(
        "verl_fsdp2", "truth_critic"
    )
    step = source / "global_step_2"
    older = truth_of("verl_fsdp2", "truth_actor_2")
    assert written(step, tmp_path / "older")["model.norm.weight"] == older["model.norm.weight"]


def test_weights_that_verl_gathered_beside_the_shards_are_named_and_left(tmp_path: Path) -> None:
    actor = copied("verl_fsdp2", tmp_path / "copy") / "global_step_4" / "actor"
    torch.save({"model.norm.weight": torch.ones(16)}, actor / "huggingface" / "pytorch_model.bin")
    report = ckptkit.inspect(actor)
    assert report.format == "rank-files"
    assert any("huggingface/pytorch_model.bin" in note for note in report.notes)


def test_inspect_tells_writer_step_ranks_and_mesh() -> None:
    report = ckptkit.inspect(FIXTURES / "verl_hsdp" / "checkpoint")
    assert report.writer == "verl, FSDP2, one file a rank"
    assert (report.step, report.world_size) == (2, 4)
    assert [(d.name, d.size) for d in report.mesh] == [("ddp", 2), ("fsdp", 2)]
    assert any("bn.running_mean" in note and "rank 0" in note for note in report.notes)
    plain = ckptkit.inspect(FIXTURES / "rank_files_placements" / "checkpoint")
    assert (plain.step, plain.world_size) == (7, 4)


@pytest.mark.parametrize(
    ("case", "select"),
    [
        ("verl_fsdp2", "actor"),
        ("verl_hsdp", None),
        ("rank_files_accelerate_fsdp1", None),
        ("rank_files_accelerate_fsdp2", None),
    ],
)
@pytest.mark.quick("rank_files_accelerate_fsdp2-None", "verl_hsdp-None")
def test_optimizer_states_have_the_names_and_values_of_the_live_ones(
    case: str, select: str | None, tmp_path: Path
) -> None:
    source = FIXTURES / case / "checkpoint"
    with open_checkpoint(source, select=select) as checkpoint:
        names = {str(entry.name) for entry in checkpoint.index.of_part("optimizer")}
    assert names == set(truth_of(case, "truth_optimizer"))
    out = tmp_path / "out"
    ckptkit.convert(source, out, to="torch", names="live", select=select, optimizer=True)
    optimizer = loaded(out / "optimizer.bin")
    found = optimizer["state"]
    flat = {f"state.{n}.{kind}": value for n, held in found.items() for kind, value in held.items()}
    assert images(flat) == truth_of(case, "truth_optimizer")
    members = [name for group in optimizer["param_groups"] for name in group["params"]]
    assert set(members) == set(found)


@pytest.mark.parametrize("case", ["verl_fsdp1", "verl_fsdp1_sharded"])
def test_states_of_flat_parameters_are_told_of_and_keep_nothing_from_being_read(case: str) -> None:
    report = ckptkit.inspect(FIXTURES / case / "checkpoint")
    assert not any(tree.part == "optimizer" for tree in report.trees)
    assert any("optimizer states are left alone" in note for note in report.notes)


def test_a_rank_renamed_to_another_is_refused(tmp_path: Path) -> None:
    for case in ("verl_hsdp", "rank_files_accelerate_fsdp1", "rank_files_torch_2_1"):
        source = copied(case, tmp_path / case)
        first, second = rank_files(source, "model" if "acc" not in case else "py")[:2]
        first.rename(first.with_suffix(".other"))
        second.rename(first)
        first.with_suffix(".other").rename(second)
        with pytest.raises(FormatError, match=r"named after rank|was written by"):
            ckptkit.inspect(source)


def test_a_configuration_of_another_world_size_is_refused(tmp_path: Path) -> None:
    source = copied("verl_hsdp", tmp_path / "copy")
    config = source / "global_step_2" / "actor" / "fsdp_config.json"
    config.write_text('{"FSDP_version": 2, "world_size": 8}')
    with pytest.raises(FormatError, match="8 ranks"):
        ckptkit.inspect(source)


def test_a_configuration_that_tells_no_number_is_refused(tmp_path: Path) -> None:
    source = copied("verl_fsdp2", tmp_path / "copy") / "global_step_2" / "actor"
    (source / "fsdp_config.json").write_text('{"world_size": [2]}')
    with pytest.raises(FormatError, match=r"a run with \[2\] ranks"):
        ckptkit.inspect(source)


def saved(folder: Path, states: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_rank{rank}.pt")
    return folder


def test_optimizer_counters_that_differ_mean_different_steps(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {
            "model": {"a.weight": torch.ones(3)},
            "optimizer": {"state": {0: {"step": torch.tensor(float(n))}}},
        }
        for n in (2, 3)
    ]
    with pytest.raises(FormatError, match="different steps"):
        ckptkit.inspect(saved(tmp_path / "ranks", states))


def test_plain_tensors_are_taken_once_and_must_be_equal(tmp_path: Path) -> None:
    equal = [{"a.weight": torch.arange(6.0).view(2, 3)} for _ in range(3)]
    source = saved(tmp_path / "equal", equal)
    assert written(source, tmp_path / "out") == images(equal[0])
    states = [{"a.weight": torch.full((2, 3), float(n)), "b.bias": torch.ones(2)} for n in (0, 1)]
    source = saved(tmp_path / "differ", states)
    report = ckptkit.inspect(source)
    assert [p.where for p in report.problems] == ["a.weight"]
    with pytest.raises(InputError, match=r"ranks 0 and 1 hold different values"):
        ckptkit.consolidate(source, tmp_path / "no", names="live")
    found = written(source, tmp_path / "part", exclude=["a.weight"])
    assert set(found) == {"b.bias"}
    other = [{"a.weight": torch.ones(2, 3)}, {"a.weight": torch.ones(3, 3)}]
    with pytest.raises(FormatError, match="on rank 0"):
        ckptkit.inspect(saved(tmp_path / "shapes", other))


@pytest.mark.parametrize("how", ["views of the whole", "without checksums", "legacy"])
def test_slices_of_equal_shape_are_not_taken_for_replicas(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(8.0)
    slices = list(whole.chunk(2))
    if how != "views of the whole":
        slices = [part.clone() for part in slices]
    save = torch.save
    if how == "legacy":
        old = {"_use_new_zipfile_serialization": False}
        monkeypatch.setattr(torch, "save", lambda held, path: save(held, path, **old))
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(how != "without checksums")
    try:
        source = saved(tmp_path / "ranks", [{"a.weight": part} for part in slices])
    finally:
        torch.serialization.set_crc32_options(with_checksums)
    with pytest.raises(InputError, match="nothing proves that ranks 0 and 1 hold the same"):
        ckptkit.consolidate(source, tmp_path / "no", names="live")
    (source / "model_rank1.pt").unlink()
    assert written(source, tmp_path / "one") == images({"a.weight": slices[0]})


def test_equal_views_on_all_ranks_are_replicas(tmp_path: Path) -> None:
    states = [{"a.weight": torch.arange(8.0)[2:6]} for _ in range(2)]
    source = saved(tmp_path / "ranks", states)
    assert written(source, tmp_path / "out") == images(states[0])


def test_the_rank_of_an_adapter_is_not_that_of_a_process(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(3)}
    torch.save(state, tmp_path / "lora_rank8.pt")
    assert written(tmp_path / "lora_rank8.pt", tmp_path / "out") == images(state)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        torch.save(state, ranks / f"lora_rank{rank}.pt")
    report = ckptkit.inspect(ranks)
    assert (report.format, report.world_size) == ("rank-files", 2)


@pytest.mark.parametrize(
    "form",
    [
        "step_{step}.rank{rank}.of4.pt",
        "step_{step}_shard_000{rank}_of_0004.bin",
        "checkpoint-{step}-rank{rank}of4.pth.tar",
    ],
)
def test_ranks_of_all_are_one_step_of_a_run_and_each_is_needed(form: str, tmp_path: Path) -> None:
    case, run = "rank_files_torch_2_9", tmp_path / "run"
    run.mkdir()
    for step in (100, 200):
        for rank in range(4):
            own = FIXTURES / case / "checkpoint" / f"model_rank{rank}.pt"
            shutil.copy(own, run / form.format(step=step, rank=rank))
    steps = ckptkit.list_run(run).steps
    assert [(one.step, one.complete, len(one.files)) for one in steps] == [
        (100, True, 4),
        (200, True, 4),
    ]
    report = ckptkit.inspect(run)
    assert (report.format, report.world_size) == ("rank-files", 4)
    assert written(run, tmp_path / "out") == truth_of(case)
    (run / form.format(step=200, rank=0)).unlink()
    steps = ckptkit.list_run(run).steps
    assert [(one.step, one.complete, one.name) for one in steps] == [
        (100, True, form.format(step=100, rank=0)),
        (200, False, form.format(step=200, rank=0)),
    ]
    (run / form.format(step=100, rank=3)).unlink()
    with pytest.raises(MissingFileError, match="rank 0 of 4 are not there"):
        ckptkit.inspect(run / form.format(step=200, rank=1))


def test_a_name_may_tell_of_any_number_of_ranks(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(3)}, tmp_path / "model_world_size_9999999_rank_1.pt")
    text = r"rank 0, 2, 3, 4, 5, 6, 7 and 9,999,991 more of 9999999 are not there"
    with allocating(10_000_000), pytest.raises(MissingFileError, match=text):
        ckptkit.inspect(tmp_path)


@pytest.mark.parametrize(
    "case", ["rank_files_placements", "verl_fsdp1_sharded", "rank_files_torch_2_4"]
)
def test_more_parts_than_a_pickle_can_describe_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MIN_CHUNKS", 1)
    ckptkit.inspect(FIXTURES / case / "checkpoint")
    monkeypatch.setattr(reader, "_BYTES_OF_A_CHUNK", 1 << 20)
    with pytest.raises(LimitError, match="more pieces than any real ones"):
        ckptkit.inspect(FIXTURES / case / "checkpoint")


@contextmanager
def allocating(most_bytes: int) -> Iterator[None]:
    """Fails if more memory than that is ever held inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


def test_flat_parameters_without_a_layout_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    source = FIXTURES / "rank_files_local_flat" / "checkpoint"
    with pytest.raises(UnsupportedError, match=r"--model-config DIR.*write_flat_layout"):
        ckptkit.consolidate(source, tmp_path / "out", names="live")
    assert [p.code for p in ckptkit.inspect(source).problems] == ["unsupported"] * 2


def test_flat_parameters_are_taken_apart_by_the_model_of_a_configuration(tmp_path: Path) -> None:
    case = FIXTURES / "rank_files_local_flat"
    found = written(case / "checkpoint", tmp_path / "out", model_config=case / "config")
    assert found == truth_of("rank_files_local_flat")


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    source = FIXTURES / "rank_files_local_flat" / "checkpoint"
    with pytest.raises(NotACheckpointError, match=r"--model-config .*no 'config.json'"):
        ckptkit.inspect(source, model_config=tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda d: d["flat_parameters"][0].update(size=10), FormatError, "outside its vector"),
        (lambda d: d["flat_parameters"][0].update(size=9999), FormatError, "do not add up"),
        (lambda d: d["flat_parameters"][0]["starts"].reverse(), FormatError, "overlaps another"),
        (lambda d: d["flat_parameters"].pop(), FormatError, "does not describe"),
        (lambda d: d["flat_parameters"][1].update(path="down"), FormatError, "does not describe"),
        (lambda d: d["flat_parameters"][0].update(names=[1]), FormatError, "does not describe"),
        (lambda d: d["flat_parameters"][0]["axes"].append([1, 0]), UnsupportedError, "row by row"),
        (lambda d: d.update(layout_version=2), UnsupportedError, "layout version 2"),
        (lambda d: d.update(crc32=[]), ChecksumError, "[] was stored"),
        (lambda d: d.update(flat_parameters=["up"]), FormatError, "does not describe"),
        (lambda d: d["flat_parameters"][0].update(aliases=[1]), FormatError, "does not describe"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    change: Any, error: type[CkptkitError], text: str, tmp_path: Path
) -> None:
    source = copied("rank_files_local_orig", tmp_path / "copy")
    layout = source / "ckptkit" / "flat_parameters.json"
    document = json.loads(layout.read_text())
    del document["crc32"]
    change(document)
    layout.write_text(json.dumps(document))
    with pytest.raises(error, match=re.escape(text)):
        ckptkit.inspect(source)


def test_a_layout_is_compared_with_where_the_slices_of_the_ranks_lie(tmp_path: Path) -> None:
    source = copied("rank_files_local_orig", tmp_path / "copy")
    layout = source / "ckptkit" / "flat_parameters.json"
    document = json.loads(layout.read_text())
    names = document["flat_parameters"][0]["names"]
    at, to = names.index("bn.weight"), names.index("bn.bias")  # of one shape
    names[at], names[to] = names[to], names[at]
    layout.write_text(json.dumps(document))
    with pytest.raises(ChecksumError):
        ckptkit.inspect(source)
    del document["crc32"]
    layout.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"puts 'bn\.(weight|bias)' at"):
        ckptkit.inspect(source)


def test_shards_of_fairscale_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    source = copied("fairscale_fairseq", tmp_path / "copy")
    path = source / "checkpoint_last-shard1.pt"
    held = loaded(path)
    held["model"]["up.flat_param_0"] = torch.zeros(7)
    torch.save(held, path)
    with pytest.raises(IncompleteCheckpointError, match=r"'up.flat_param_0' has 88 elements"):
        ckptkit.inspect(source)
    held["shard_metadata"]["param_metadata"][1]["no_broadcast_optim_state"] = True
    torch.save(held, path)
    with pytest.raises(UnsupportedError, match="experts"):
        ckptkit.inspect(source)


def test_metadata_of_one_rank_of_fairscale_must_be_that_of_all(tmp_path: Path) -> None:
    source = copied("fairscale_apart", tmp_path / "copy")
    path = source / "metadata_rank_1.pt"
    held = loaded(path)
    held["param_metadata"][0]["params"]["flat_param_0"]["names"][0] = "long"
    torch.save(held, path)
    with pytest.raises(FormatError, match="other metadata"):
        ckptkit.inspect(source)


def test_flat_parameters_of_fairscale_in_two_state_dicts_are_refused(tmp_path: Path) -> None:
    source = copied("fairscale_fairseq", tmp_path / "copy")
    for path in source.glob("*.pt"):
        held = loaded(path)
        held["other"] = {"up.flat_param_0": held["model"].pop("up.flat_param_0")}
        torch.save(held, path)
    with pytest.raises(FormatError, match=r"has no flat parameter 'up.flat_param_0'"):
        ckptkit.inspect(source)
