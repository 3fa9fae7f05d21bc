"""What DeepSpeed wrote, of every stage and of several releases, against its live state.

The optimizer's truth is what `safe_get_full_optimizer_state` gathered; beside it lies what
DeepSpeed's own `zero_to_fp32` made of the same files, or how it failed.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import ChecksumError, RefusedError
from tests.live_truth import FIXTURES, truth_of
from tests.sampled import sampled
from tests.tensor_images import images

STAGES = (
    *("zero1_adam", "zero1_adam_bf16_optimizer", "zero1_adam_one_rank"),
    *("zero1_adam_three_ranks", "zero1_adam_four_ranks", "zero2_adam_one_rank"),
    *("zero3_adam_one_rank", "zero3_adam_float32"),
    *("zero2_adam_float16", "zero2_adam_float32", "zero2_adam_no_frozen"),
    *("zero3_adam", "zero3_adam_float16", "zero3_adam_no_frozen"),
)
UNIVERSAL = (
    *("universal_zero1", "universal_zero2_float32", "universal_zero3"),
    *("universal_small_zero1", "universal_small_zero3"),
)
RELEASES = tuple(sorted(path.name for path in FIXTURES.glob("deepspeed_0_*")))
TRAINED = (*STAGES, *UNIVERSAL, *RELEASES)
WITHOUT_ZERO = ("zero0_bf16", "zero0_float32")
QUICK = (  # without most releases between the oldest and the newest: `make test-slow` has all
    *(*STAGES, *UNIVERSAL, *WITHOUT_ZERO),
    *(name for name in RELEASES if re.search("_14_|_18_|universal", name)),
)
FROZEN = frozenset({"frozen.weight", "frozen.bias"})
WHOLE_NUMBERS = frozenset({"positions", "mask", "bn.num_batches_tracked"})
MIXED_UP = frozenset({"bn.bias", "bn.weight", "embed.weight", "head.weight", "up.weight"})


def states_in(optimizer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"state.{name}.{kind}": value
        for name, kinds in optimizer["state"].items()
        for kind, value in kinds.items()
    }


def groups_in(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"params": sorted(group["params"])} | {key: group[key] for key in ("lr", "weight_decay")}
        for group in groups
    ]


def wide(case: str, out: Path) -> dict[str, torch.Tensor]:
    source = FIXTURES / case / "checkpoint"
    ckptkit.consolidate(source, out, names="live", dtype="float32")
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("case", sampled([*TRAINED, *WITHOUT_ZERO], QUICK))
@pytest.mark.quick(
    "deepspeed_0_14_zero3",
    "universal_zero2_float32",
    "zero0_bf16",
    "zero1_adam_bf16_optimizer",
    "zero3_adam_no_frozen",
)
def test_the_weights_are_the_live_ones(case: str, tmp_path: Path) -> None:
    ckptkit.consolidate(FIXTURES / case / "checkpoint", tmp_path / "out", names="live")
    assert images(load_file(tmp_path / "out" / "model.safetensors")) == truth_of(case, "truth")


@pytest.mark.parametrize("case", sampled(TRAINED, {*QUICK} - {*WITHOUT_ZERO}))
@pytest.mark.quick(
    "deepspeed_0_14_zero1",
    "deepspeed_0_16_universal",
    "universal_zero3",
    "zero1_adam_three_ranks",
    "zero2_adam_float16",
    "zero3_adam",
)
def test_the_states_of_the_optimizer_are_the_live_ones(case: str, tmp_path: Path) -> None:
    source, out = FIXTURES / case / "checkpoint", tmp_path / "out"
    ckptkit.convert(source, out, to="torch", names="live", optimizer=True)
    optimizer = torch.load(out / "optimizer.bin", weights_only=True)  # noqa: TID251 - the oracle
    assert images(states_in(optimizer)) == truth_of(case, "truth_optimizer")
    groups = json.loads((FIXTURES / case / "truth_param_groups.json").read_text(encoding="utf-8"))
    assert groups_in(optimizer["param_groups"]) == groups_in(groups)
    assert {tuple(group["betas"]) for group in optimizer["param_groups"]} == {(0.9, 0.999)}


@pytest.mark.parametrize("case", ["zero1_adam", "zero3_adam", "universal_zero3"])
@pytest.mark.quick("zero1_adam")
def test_torch_and_other_layouts_have_the_same_optimizer(case: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source, out = FIXTURES / case / "checkpoint", tmp_path / "dcp"
    ckptkit.convert(source, out, to="dcp", optimizer=True)
    dcp_to_torch_save(out / "optimizer_0", tmp_path / "merged.pt")
    optimizer = torch.load(  # noqa: TID251 - the oracle
        tmp_path / "merged.pt", weights_only=True
    )["optimizer"]
    assert images(states_in(optimizer)) == truth_of(case, "truth_optimizer")
    assert ckptkit.verify(out).ok
    ckptkit.convert(out, tmp_path / "again", to="torch", optimizer=True)
    again = torch.load(  # noqa: TID251 - the oracle
        tmp_path / "again" / "optimizer.bin", weights_only=True
    )
    assert images(states_in(again)) == images(states_in(optimizer))
    assert again["param_groups"] == optimizer["param_groups"]


@pytest.mark.parametrize(("to", "file"), [("dcp", "optimizer_0/__0_0.distcp"), ("torch", "")])
def test_a_changed_state_or_setting_of_an_output_is_noticed(
    to: Any, file: str, tmp_path: Path
) -> None:
    source, path = FIXTURES / "zero1_adam" / "checkpoint", tmp_path / (file or "optimizer.bin")
    ckptkit.convert(source, tmp_path, to=to, optimizer=True)
    whole = path.read_bytes()
    moments = load_file(FIXTURES / "zero1_adam" / "truth_optimizer.safetensors")
    rate = b"G" + struct.pack(">d", 0.02)
    for part in (moments["state.up.weight.exp_avg"].numpy().tobytes(), rate):
        at = whole.index(part) + len(part) - 1
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not ckptkit.verify(tmp_path).ok
    path.write_bytes(whole)
    assert ckptkit.verify(tmp_path).ok


def test_a_damaged_setting_is_refused_and_not_left_out(tmp_path: Path) -> None:
    source, out = FIXTURES / "zero1_adam" / "checkpoint", tmp_path / "dcp"
    ckptkit.convert(source, out, to="dcp", optimizer=True)
    path = out / "optimizer_0" / "__0_0.distcp"
    whole = path.read_bytes()
    at = whole.index(b"G" + struct.pack(">d", 0.02)) + 8
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ChecksumError):
        ckptkit.convert(out, tmp_path / "again", to="torch", optimizer=True)
    assert not (tmp_path / "again").exists()


def _their_faults(case: str) -> frozenset[str]:
    """Names that DeepSpeed's own tool loses, or gives another element type than training."""
    found: frozenset[str] = frozenset()
    if not any(word in case for word in ("no_frozen", "float32", "small")):
        found |= FROZEN
    if case in RELEASES:
        found |= WHOLE_NUMBERS
    if case in RELEASES and "zero2" in case:
        found |= MIXED_UP
    return found


@pytest.mark.parametrize(
    "case",
    sampled(
        (case for case in TRAINED if "bf16_optimizer" not in case),
        {*QUICK} - {*WITHOUT_ZERO, "zero1_adam_bf16_optimizer"},
    ),
)
@pytest.mark.quick(
    "deepspeed_0_14_zero2",
    "deepspeed_0_16_universal",
    "universal_zero1",
    "zero1_adam_three_ranks",
    "zero3_adam",
)
def test_the_masters_are_the_live_ones_and_those_of_their_tool_but_for_its_faults(
    case: str, tmp_path: Path
) -> None:
    ours = wide(case, tmp_path / "out")
    assert images(ours) == truth_of(case, "truth_fp32")
    theirs = load_file(FIXTURES / case / "zero_to_fp32.safetensors")
    mine, other = images(ours), images(theirs)
    different = {n for n in mine.keys() | other.keys() if mine.get(n) != other.get(n)}
    assert different == _their_faults(case)
    for name in different:
        if name in FROZEN and ("zero1" in case or ("universal" in case and "zero3" not in case)):
            assert name not in theirs  # it loses what is frozen in stage 1
        elif name in FROZEN:
            assert torch.equal(theirs[name].float(), ours[name])  # it leaves that in 16 bits
        elif name in WHOLE_NUMBERS:
            assert theirs[name].dtype == torch.float32  # it cast them
        else:  # with `round_robin_gradients` it cut the vector in the order of another one
            assert theirs[name].shape == ours[name].shape
            assert not torch.equal(theirs[name], ours[name])


@pytest.mark.parametrize("case", ["zero1_adam_bf16_optimizer", *WITHOUT_ZERO])
def test_the_masters_are_the_live_ones_where_their_tool_fails(case: str, tmp_path: Path) -> None:
    assert images(wide(case, tmp_path / "out")) == truth_of(case, "truth_fp32")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("zero1_adam_bf16_optimizer", "is not a zero checkpoint"),
        ("zero0_bf16", "'NoneType' object is not iterable"),
        ("zero0_float32", "'NoneType' object is not iterable"),
    ],
)
def test_what_their_tool_cannot_read_is_read(case: str, message: str) -> None:
    assert message in (FIXTURES / case / "zero_to_fp32.txt").read_text(encoding="utf-8")
    with ckptkit.open(FIXTURES / case / "checkpoint") as checkpoint:
        names = list(checkpoint.keys())
        assert images({n: checkpoint[n] for n in names}) == truth_of(case, "truth")


@pytest.mark.parametrize("case", WITHOUT_ZERO)
def test_states_without_the_names_of_parameters_are_refused(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    with pytest.raises(RefusedError, match="no states of an optimizer"):
        ckptkit.consolidate(source, tmp_path / "out", names="live", optimizer=True)
    assert any("by number" in note for note in ckptkit.inspect(source).notes)


def test_a_dry_run_says_which_of_two_sources_is_read(tmp_path: Path) -> None:
    def told(case: str, **options: Any) -> str:
        notes: list[str] = []

        def listen(event: object) -> None:
            notes.extend(getattr(event, "notes", ()))

        out = tmp_path / f"{case}{len(options)}"
        source = FIXTURES / case / "checkpoint"
        ckptkit.consolidate(source, out, names="live", listener=listen, **options)
        return " ".join(notes)

    assert "as the model has them; --dtype float32 writes the master copies" in told("zero1_adam")
    assert "rounded from them, as training does" in told("zero3_adam")
    assert "made from the master copies" in told("zero1_adam", dtype="float32")
    assert "master copies" not in told("zero2_adam_float32")


def test_only_the_states_of_wanted_parameters_are_written(tmp_path: Path) -> None:
    source, out = FIXTURES / "zero1_adam" / "checkpoint", tmp_path / "out"
    ckptkit.convert(source, out, to="torch", optimizer=True, include=["up.*"])
    optimizer = torch.load(out / "optimizer.bin", weights_only=True)  # noqa: TID251 - the oracle
    assert set(optimizer["state"]) == {"up.weight", "up.bias"}
    assert [group["params"] for group in optimizer["param_groups"]] == [["up.weight"], ["up.bias"]]
    ckptkit.consolidate(source, tmp_path / "folder", optimizer=True)
    assert (tmp_path / "folder" / "optimizer.bin").exists()
    assert ckptkit.verify(tmp_path / "folder").ok
