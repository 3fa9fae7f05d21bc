"""A part is not taken for a whole, nothing is not verified, and what is printed works."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import (
    CannotPlanError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
    UnsupportedError,
)
from tests.command_line import run_command
from tests.reports.folders import assert_same, notes_of, save, tensors_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
Tensors = dict[str, torch.Tensor]
SMALL = {
    "vocab_size": 25,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def small_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


# fairseq2's files, a part of each tensor in each


def write_parts(step: Path, stages: list[Tensors], ranks: int) -> Path:
    """Writes what fairseq2's ranks write: `torch.chunk` of each tensor, later ones may be empty."""
    for stage, tensors in enumerate(stages):
        folder = step / "model" / f"pp_{stage:02d}" / "tp_00"
        folder.mkdir(parents=True)
        for rank in range(ranks):
            state = {}
            for name, tensor in tensors.items():
                pieces = torch.chunk(tensor, ranks, 0)
                state[name] = (pieces[rank] if rank < len(pieces) else tensor[:0]).clone()
            torch.save(state, folder / f"sdp_{rank:02d}.pt")
    for number in range(len(stages) * ranks):
        for path in (f"trainer/rank_{number:02d}.pt", f"data_reader/dp_{number:02d}.pt"):
            (step / path).parent.mkdir(exist_ok=True)
            torch.save({"step_nr": 5}, step / path)
    return step


def split_by_layer(tensors: Tensors) -> list[Tensors]:
    later = {
        name: tensor for name, tensor in tensors.items() if re.search(r"layers\.1|norm$", name)
    }
    return [{n: t for n, t in tensors.items() if n not in later}, later]


def written_as(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("ranks", "is_piped"), [(2, False), (3, False), (2, True)])
@pytest.mark.quick("2-True")
def test_parts_of_fairseq2_are_joined_where_shapes_are_known(
    ranks: int, is_piped: bool, tmp_path: Path
) -> None:
    truth = dict(small_llama().state_dict())
    stages = split_by_layer(truth) if is_piped else [truth]
    step = write_parts(tmp_path / "run" / "ws_4" / "checkpoints" / "step_5", stages, ranks)
    like = written_as(tmp_path / "like", truth)
    for number, source in enumerate((tmp_path / "run", step, step / "model")):
        ckptkit.consolidate(source, tmp_path / f"out{number}", like=like)
        assert_same(tensors_of(tmp_path / f"out{number}"), truth)
        with pytest.raises(IncompleteCheckpointError, match="no other model says") as caught:
            ckptkit.consolidate(source, tmp_path / "none")
        assert "--like" in caught.value.hint
    assert {line.name for line in ckptkit.inspect(step).tensors} == truth.keys()
    assert ckptkit.verify(step).tensors == len(truth)


def test_what_fairseq2_wrote_is_its_model(tmp_path: Path) -> None:
    case = FIXTURES / "fairseq2_0_8_fsdp2"
    truth = load_file(case / "truth.safetensors")
    like = written_as(tmp_path / "like", truth)
    ckptkit.consolidate(case / "checkpoint", tmp_path / "out", like=like)
    assert_same(tensors_of(tmp_path / "out"), truth)


@pytest.mark.slow
def test_a_configuration_alone_gives_the_shapes_of_parts(tmp_path: Path) -> None:
    model = small_llama()
    step = write_parts(tmp_path / "step_5", [dict(model.state_dict())], 2)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base")
    assert_same(tensors_of(tmp_path / "out"), dict(model.state_dict()))


def test_a_part_of_fairseq2_alone_is_refused(tmp_path: Path) -> None:
    truth = dict(small_llama().state_dict())
    step = write_parts(tmp_path / "step_5", [truth], 3)
    like = written_as(tmp_path / "like", truth)
    part = step / "model" / "pp_00" / "tp_00" / "sdp_00.pt"
    for source in (part, part.parent, part.parents[1]):
        with pytest.raises(IncompleteCheckpointError) as caught:
            ckptkit.consolidate(source, tmp_path / "out", like=like)
        (named,) = re.findall(r"folder of all parts: (.+)", caught.value.hint)
        ckptkit.consolidate(named, tmp_path / "out", like=like, overwrite=True)
        assert_same(tensors_of(tmp_path / "out"), truth)
        shutil.rmtree(tmp_path / "out")
    (part.parent / "sdp_02.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="a part is missing"):
        ckptkit.consolidate(step, tmp_path / "out", like=like)
    (part.parent / "sdp_01.pt").unlink()
    for known in (None, like):
        with pytest.raises(IncompleteCheckpointError):
            ckptkit.consolidate(step, tmp_path / "out", like=known)
    part.rename(part.parent / "sdp_01.pt")
    with pytest.raises(MissingFileError):
        ckptkit.consolidate(step, tmp_path / "out", like=like)


def test_tensor_parallel_parts_and_stages_that_share_a_name_are_refused(tmp_path: Path) -> None:
    truth = dict(small_llama().state_dict())
    like = written_as(tmp_path / "like", truth)
    step = write_parts(tmp_path / "tp" / "step_5", [truth], 2)
    shutil.copytree(step / "model/pp_00/tp_00", step / "model/pp_00/tp_01")
    with pytest.raises(UnsupportedError, match="2 tensor parallel ranks"):
        ckptkit.consolidate(step, tmp_path / "out", like=like)
    step = write_parts(tmp_path / "pp" / "step_5", [truth, truth], 2)
    with pytest.raises(FormatError, match="two pipeline stages have"):
        ckptkit.consolidate(step, tmp_path / "out", like=like)


def test_one_process_of_fairseq2_has_whole_tensors(tmp_path: Path) -> None:
    truth = dict(small_llama().state_dict())
    step = write_parts(tmp_path / "step_5", [truth], 1)
    ckptkit.consolidate(step, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), truth)


@given(st.binary(max_size=200), st.integers(0, 8000))
@pytest.mark.slow
def test_any_bytes_in_a_part_end_in_an_error_or_are_seen(junk: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        step = write_parts(Path(folder) / "step_5", [{"a.weight": torch.ones(4, 2)}], 2)
        path = step / "model" / "pp_00" / "tp_00" / "sdp_01.pt"
        stored = path.read_bytes()
        path.write_bytes(stored[:at] + junk + stored[at + len(junk) :])
        with suppress(CkptkitError):
            ckptkit.inspect(step)
            ckptkit.verify(step)


# Safetensors that torch's writer made without an index


@pytest.mark.parametrize("is_half", [True, False])
def test_safetensors_of_torch_without_their_index_are_compared_with_the_base(
    is_half: bool, tmp_path: Path
) -> None:
    truth = dict(small_llama().state_dict())
    base = tmp_path / "base"
    small_llama().save_pretrained(base)
    held = {n: (t[: len(t) // 2] if is_half else t).clone() for n, t in truth.items()}
    info = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in held.items()}
    marks = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info), "format": "pt"}
    (tmp_path / "run").mkdir()
    save_file(held, tmp_path / "run" / "model-00001-of-00001.safetensors", marks)
    if is_half:
        with pytest.raises(CkptkitError):
            ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=base)
    else:
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=base)
        assert_same(tensors_of(tmp_path / "out"), truth)
    notes = notes_of(ckptkit.consolidate, tmp_path / "run", tmp_path / "unproven")
    assert any("nothing proves that the tensors are whole" in note for note in notes)


# What verify says


def test_verify_never_says_ok_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    (tmp_path / "trainer").mkdir()
    for rank in range(2):
        torch.save({"step_nr": 5}, tmp_path / "trainer" / f"rank_{rank:02d}.pt")
    torch.save({"epoch": 3}, tmp_path / "last.pt")
    for source in (tmp_path / "empty", tmp_path / "trainer", tmp_path / "last.pt"):
        with pytest.raises(NotACheckpointError, match="nothing was verified") as caught:
            ckptkit.verify(source)
        command = re.findall("`ckptkit ([^`]+)`", caught.value.hint)[0].split()
        assert run_command(*command).returncode == 0
        done = run_command("verify", source)
        assert done.returncode != 0
        assert "ok" not in done.stdout


def test_verify_refuses_a_selection_that_names_nothing(tmp_path: Path) -> None:
    source = save({"model": {"a.weight": torch.ones(2)}, "note": "x"}, tmp_path / "run")
    with pytest.raises(CannotPlanError, match="no state dict 'modle'") as caught:
        ckptkit.verify(source, select="modle")
    (named,) = re.findall(r"--select (\S+)", caught.value.hint)
    assert ckptkit.verify(source, select=named).tensors == 1


# The line that loads an output


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 4},
        {"architectures": ["MyModel"]},
        {"model_type": "my_own"},
        {"model_type": "my_own", "architectures": ["MyOwnForCausalLM"]},
    ],
)
def test_the_line_that_loads_a_model_that_transformers_lacks_works(
    config: dict[str, Any], tmp_path: Path
) -> None:
    source = save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "run")
    (source / "config.json").write_text(json.dumps(config))
    shown = run_command("consolidate", source, tmp_path / "out").stdout
    (line,) = re.findall("load it +(.+)", shown)
    names = {"safetensors": __import__("safetensors.torch"), "transformers": transformers}
    loaded = eval(line, names)  # noqa: S307 - the line that is shown
    assert torch.equal(loaded["a.weight"], torch.ones(2))


@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_scale"])
def test_weights_in_eight_bits_are_refused_without_what_the_scales_mean(
    ending: str, tmp_path: Path
) -> None:
    model = small_llama()
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        if "proj" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[name.replace("weight", ending)] = torch.ones(1, 1)
        else:
            tensors[name] = tensor
    source = written_as(tmp_path / "fp8", tensors)
    model.config.save_pretrained(source)
    with pytest.raises(RefusedError, match="would not be used"):
        ckptkit.consolidate(source, tmp_path / "out")
    assert load_file(source / "model.safetensors").keys() == tensors.keys()
