"""Megatron-Core's checkpoints: what lies beside the tables is read, and none of it is executed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptkit
from ckptkit.core.errors import CkptkitError, FormatError, UnsupportedError
from ckptkit.formats.dcp.megatron import parse_common, split_key
from ckptkit.formats.pickle.torch_zip import TensorCache

FIXTURE = Path(__file__).resolve().parents[3] / "fixtures" / "megatron_tensor_parallel"
STEP = "iter_0000007"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE / "checkpoint", tmp_path / "run"))


def write_integrity(step: Path, **changed: Any) -> None:
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(step.iterdir())
    }
    text = json.dumps({"algorithm": "sha256", "files": files, **changed}, indent=2)
    (step / "integrity.json").write_text(text)


def test_a_run_says_who_wrote_it_and_on_how_many_ranks(run: Path) -> None:
    found = ckptkit.inspect(run)
    assert found.path == str(run / STEP)
    assert found.writer.startswith("Megatron-Core torch_dist")
    assert (found.step, found.world_size) == (7, 2)
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 2), ("pipeline", 1), ("expert", 1)]
    assert {(tree.name, tree.part) for tree in found.trees} == {
        ("", "model"),
        ("optimizer", "optimizer"),
    }
    assert any("'_extra_state'" in note for note in found.notes)
    assert found.problems == ()
    assert {group.name for group in found.ignored} <= {"latest_checkpointed_iteration.txt"}


def test_the_newest_of_two_steps_is_taken(run: Path) -> None:
    newer = run / "iter_0000012"
    shutil.copytree(run / STEP, newer)
    torch.save({"iteration": 12}, newer / "common.pt")
    (run / "latest_checkpointed_iteration.txt").unlink()
    found = ckptkit.inspect(run)
    assert (found.path, found.step) == (str(newer), 12)


def test_weights_are_those_of_the_live_ranks(run: Path, tmp_path: Path) -> None:
    ckptkit.consolidate(run, tmp_path / "out", names="live")
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(FIXTURE / "truth.safetensors")
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name


def test_sizes_are_read_from_a_run_configuration(run: Path) -> None:
    step = run / STEP
    torch.save({"iteration": 7}, step / "common.pt")
    lines = ("model:", "  tensor_model_parallel_size: 2", "  pipeline_model_parallel_size: 4")
    (step / "run_config.yaml").write_text("\n".join(lines))
    assert [(d.name, d.size) for d in ckptkit.inspect(run).mesh] == [("tensor", 2), ("pipeline", 4)]
    (step / "run_config.yaml").write_text("\n".join([*lines, "  tensor_model_parallel_size: 8"]))
    assert [(d.name, d.size) for d in ckptkit.inspect(run).mesh] == [("pipeline", 4)]


class Setting:
    """A class of a package that ckptkit does not know."""

    def __init__(self) -> None:
        self.size = 3


@pytest.mark.parametrize(
    "value", [Setting(), signal.SIGTERM, SimpleNamespace(a=1), UUID(int=1), io.BytesIO(b"state")]
)
def test_an_unknown_class_in_the_common_state_stays_inert(value: object, run: Path) -> None:
    arguments = argparse.Namespace(setting=value, tensor_model_parallel_size=2)
    torch.save({"iteration": 9, "args": arguments}, run / STEP / "common.pt")
    found = ckptkit.inspect(run)
    assert found.step == 9
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 2)]


@pytest.mark.parametrize("state", [[1], 5, {"iteration": -1}, {"iteration": "7"}, {"args": 3}])
def test_a_common_state_of_another_form_is_refused_or_ignored(state: object, run: Path) -> None:
    torch.save(state, run / STEP / "common.pt")
    if isinstance(state, dict):
        assert ckptkit.inspect(run).step == 7  # as the folder is named
    else:
        with pytest.raises(FormatError, match="holds no dictionary"):
            ckptkit.inspect(run)


@pytest.mark.parametrize("is_in_list", [True, False])  # Megatron-Core puts objects in lists
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_common_state_that_is_an_object_of_the_checkpoint_is_read(
    is_in_list: bool, tmp_path: Path
) -> None:
    arguments = argparse.Namespace(tensor_model_parallel_size=4, world_size=8)
    values = {"iteration": 11, "args": arguments}
    state = [values] if is_in_list else values
    folder = tmp_path / "step"
    dcp.save(
        {"decoder.weight": torch.ones(2, 2), "common_state/shard_0_1": state},
        checkpoint_id=folder,
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found = ckptkit.inspect(folder)
    assert (found.step, found.world_size) == (11, 8)
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 4)]


@given(st.binary(max_size=300))
def test_any_bytes_as_common_state_end_in_a_result_or_a_refusal(data: bytes) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("common/data.pkl", data)
        archive.writestr("common/version", "3")
    for content in (buffer.getvalue(), data):

        def read(start: int, stop: int, content: bytes = content) -> bytes:
            return content[start:stop]

        with contextlib.suppress(CkptkitError):
            parse_common(read, len(content), where="x")


def test_integrity_is_verified(run: Path) -> None:
    step = run / STEP
    write_integrity(step)
    verified = ckptkit.verify(run)
    assert verified.ok
    assert "files that have their SHA-256 of 'integrity.json': 7" in verified.proven
    # A shard's last bytes are the directory's, whose comment no CRC-32 covers.
    torch.save({"iteration": 7, "changed": True}, step / "common.pt")
    verified = ckptkit.verify(run)
    assert [(p.code, p.where) for p in verified.problems] == [
        ("digest-mismatch", f"{STEP}/common.pt")
    ]


def test_common_state_of_another_iteration_is_a_problem(run: Path) -> None:
    torch.save({"iteration": 9}, run / STEP / "common.pt")
    message = f"is of iteration 9, in the folder '{STEP}'"
    for place in (run, run / STEP):
        (problem,) = ckptkit.inspect(place).problems
        assert (problem.where, problem.message) == ("common.pt", message)
    assert not ckptkit.verify(run).ok


def test_a_file_that_integrity_names_and_that_is_gone_is_a_problem(run: Path) -> None:
    write_integrity(run / STEP)
    (run / STEP / "common.pt").unlink()
    (problem,) = ckptkit.verify(run).problems
    assert problem.where == f"{STEP}/common.pt"
    assert "integrity.json names it" in problem.message


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"algorithm": "md5"}, UnsupportedError),
        ({"files": {"../common.pt": "0" * 64}}, FormatError),
        ({"files": {"common.pt": "0"}}, FormatError),
        ({"files": []}, FormatError),
    ],
)
def test_an_integrity_of_another_form_is_refused(changed: Any, error: Any, run: Path) -> None:
    write_integrity(run / STEP, **changed)
    with pytest.raises(error):
        ckptkit.verify(run)


@pytest.mark.parametrize("text", ["{", '{"sharded_backend": 1, "sharded_backend": 2}'])
def test_a_damaged_kind_is_refused(text: str, run: Path) -> None:
    (run / STEP / "metadata.json").write_text(text)
    with pytest.raises(FormatError):
        ckptkit.inspect(run)


def test_another_backend_is_refused_by_name(run: Path) -> None:
    (run / STEP / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedError, match="'zarr'"):
        ckptkit.inspect(run)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", ("decoder.layers.mlp.linear_fc1.weight",)),
        ("module.decoder.final_layernorm.weight", ("module.decoder.final_layernorm.weight",)),
        ("model.decoder.final_layernorm.weight", ("model", "decoder.final_layernorm.weight")),
        ("optimizer.state.exp_avg.a.weight", ("optimizer", "state", "a.weight", "exp_avg")),
        ("chained_3.optimizer.state.a", ("optimizer", "state.a")),
        ("rng_state/shard_0_1", ("rng_state/shard_0_1",)),
    ],
)
def test_a_flat_key_is_split_into_state_dict_and_name(key: str, path: tuple[str, ...]) -> None:
    assert split_key(key) == path


def test_weights_in_eight_bits_are_refused_by_name() -> None:
    data = (
        b"\x80\x02c__builtin__\ngetattr\n(ctransformer_engine.pytorch.tensor.float8_tensor\n"
        b"Float8Tensor\nX\x12\x00\x00\x00_make_in_reduce_extR(K\x01tR."
    )
    with pytest.raises(UnsupportedError, match=r"'transformer_engine.*\.Float8Tensor'") as caught:
        TensorCache().tensor(data, where="x")
    assert "--fp8-param-gather" in caught.value.hint
