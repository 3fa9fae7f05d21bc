"""`--also`: rank files of one step that lie in several directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.core.errors import (
    FormatError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
)
from tests.command_line import run_command as run
from tests.files import flip_bit

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
LLAMA = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
UNIT = "pytorch_model_fsdp_0"


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Two nodes' directories, each with a run, of which the second one has rank 1's files."""
    first, second = tmp_path / "a/run", tmp_path / "b/run"
    shutil.copytree(LLAMA, first / "checkpoint-7")
    for unit in (UNIT, "optimizer_0"):
        (second / "checkpoint-7" / unit).mkdir(parents=True)
        for file in (first / "checkpoint-7" / unit).glob("__1_*.distcp"):
            file.rename(second / "checkpoint-7" / unit / file.name)
    return first, second


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_consolidate_unites_the_files_of_several_nodes(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    ckptkit.consolidate(LLAMA, tmp_path / "whole")
    united = run("consolidate", nodes[0], tmp_path / "out", "--also", nodes[1])
    assert united.returncode == 0, united.stderr
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert (tmp_path / "out/config.json").read_bytes() == (
        tmp_path / "whole/config.json"
    ).read_bytes()


def test_the_order_does_not_matter_and_the_same_directory_may_be_named_twice(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    ckptkit.consolidate(LLAMA, tmp_path / "whole")
    also = [nodes[0], nodes[1], nodes[0]]
    ckptkit.convert(nodes[1], tmp_path / "out", to="hf", also=also)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert (tmp_path / "out/config.json").exists()


def test_inspect_verify_and_open_read_them_as_one(nodes: tuple[Path, Path]) -> None:
    alone: dict[str, Any] = json.loads(run("inspect", nodes[0], "--json").stdout)
    assert "missing-file" in {problem["code"] for problem in alone["problems"]}
    both = json.loads(run("inspect", nodes[0], "--also", nodes[1], "--json").stdout)
    assert both["problems"] == []
    page = run("inspect", nodes[0], "--also", nodes[1]).stdout
    assert f"--also {nodes[1]}" in " ".join(page.split())  # the command to run next
    assert ckptkit.verify(nodes[0], also=[nodes[1]]).ok
    with (
        ckptkit.open(nodes[0], also=[nodes[1]]) as checkpoint,
        ckptkit.open(LLAMA) as whole,
    ):
        for name in whole.keys():  # noqa: SIM118  not a dict
            left, right = (c.read(name, framework="numpy") for c in (checkpoint, whole))
            assert np.array_equal(np.asarray(left), np.asarray(right))


def test_what_is_still_missing_is_named_with_the_option_that_helps(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    found = run("consolidate", nodes[0], tmp_path / "out")
    assert found.returncode == 3
    assert f"{UNIT}/__1_0.distcp" in found.stderr
    assert "--also" in found.stderr
    assert not (tmp_path / "out").exists()
    for file in nodes[0].rglob("__0_*.distcp"):
        file.unlink()
    with pytest.raises(MissingFileError, match=r"nor are .*__1_0\.distcp"):
        ckptkit.consolidate(nodes[0], tmp_path / "out")
    with pytest.raises(MissingFileError) as caught:  # there is no rank 0 at all
        ckptkit.consolidate(nodes[1], tmp_path / "out")
    assert "--also" in str(caught.value.hint)


def test_files_of_another_save_are_refused(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    metadata = nodes[1] / "checkpoint-7" / UNIT / ".metadata"
    shutil.copy(nodes[0] / "checkpoint-7" / UNIT / ".metadata", metadata)
    flip_bit(metadata, -20)
    found = run("consolidate", nodes[0], tmp_path / "out", "--also", nodes[1])
    assert found.returncode == 3
    assert "one save" in found.stderr  # the hint
    assert not (tmp_path / "out").exists()


def test_a_file_of_two_sizes_is_refused(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    (nodes[1] / "checkpoint-7" / UNIT / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(FormatError, match="against 5"):
        ckptkit.consolidate(nodes[0], tmp_path / "out", also=[nodes[1]])


def test_a_file_of_one_size_and_two_contents_is_refused(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    file = nodes[0] / "checkpoint-7" / UNIT / "__0_0.distcp"
    copy = nodes[1] / "checkpoint-7" / UNIT / file.name
    shutil.copy(file, copy)
    ckptkit.consolidate(nodes[0], tmp_path / "same", also=[nodes[1]])
    flip_bit(copy, copy.stat().st_size // 2)
    with pytest.raises(FormatError, match="other bytes were found"):
        ckptkit.consolidate(nodes[0], tmp_path / "out", also=[nodes[1]])
    assert not (tmp_path / "out").exists()


def test_files_that_nobody_needs_may_differ_from_node_to_node(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    names = (
        "training_args.bin",
        "scheduler.bin",
        "rng_state_0.pth",
        "trainer_state.json",
        "latest",
    )
    for number, node in enumerate(nodes):
        for name in names:
            (node / "checkpoint-7" / name).write_bytes(b"x" * (number + 1))
    ckptkit.consolidate(LLAMA, tmp_path / "whole")
    ckptkit.consolidate(nodes[0], tmp_path / "out", also=[nodes[1]])
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert ckptkit.verify(nodes[0], also=[nodes[1]]).ok


def test_a_directory_with_nothing_of_the_step_is_refused(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.consolidate(nodes[0], tmp_path / "out", also=[nodes[1] / "checkpoint-7"])
    assert "corresponds to SRC" in caught.value.hint
    with pytest.raises(NotACheckpointError, match="no such directory"):
        ckptkit.consolidate(nodes[0], tmp_path / "out", also=[tmp_path / "none"])


def test_the_output_may_lie_in_none_of_the_directories(nodes: tuple[Path, Path]) -> None:
    with pytest.raises(RefusedError, match="inside the source"):
        ckptkit.consolidate(nodes[0], nodes[1] / "out", also=[nodes[1]])


def test_of_steps_on_several_nodes_the_newest_that_is_whole_is_taken(
    nodes: tuple[Path, Path],
) -> None:
    for node in nodes:  # the second one had no time for its files of step 8
        shutil.copytree(node / "checkpoint-7", node / "checkpoint-8")
    for file in (nodes[1] / "checkpoint-8").rglob("*.distcp"):
        file.unlink()
    found = ckptkit.inspect(nodes[0], also=[nodes[1]])
    assert found.step == 7
    assert "checkpoint-8 was passed over" in found.notes[0]
