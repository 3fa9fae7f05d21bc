"""Outputs of ckptkit as sources: digests prove what the format has no checksum for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import ChecksumError
from tests.command_line import run_command

LLAMA = Path(__file__).parents[2] / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("output") / "out"
    ckptkit.consolidate(LLAMA, out)
    return out


@pytest.fixture
def damaged(output: Path, tmp_path: Path) -> Path:
    """The output with one bit flipped in the elements of its last tensor."""
    folder = Path(shutil.copytree(output, tmp_path / "damaged"))
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 8
    file.write_bytes(data)
    return folder


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "consolidate": ckptkit.consolidate,
    "resumed": lambda source, out: ckptkit.consolidate(source, out, resume=True),
    "torch": lambda source, out: ckptkit.convert(source, out, to="torch"),
    "dcp": lambda source, out: ckptkit.convert(source, out, to="dcp"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_that_are_copied_are_proven_by_their_digests(
    writer: str, output: Path, tmp_path: Path
) -> None:
    WRITERS[writer](output, tmp_path / "again")
    assert ckptkit.verify(tmp_path / "again").unverified == ()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_flipped_bit_is_found_before_an_output_appears(
    writer: str, damaged: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChecksumError, match=r"digest .* in ckptkit.json") as caught:
        WRITERS[writer](damaged, tmp_path / "again")
    assert str(damaged) in caught.value.where
    assert "remove ckptkit.json" in caught.value.hint
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("place", ["damaged", "damaged/model.safetensors", "."])
def test_digests_are_found_however_a_source_is_named(
    place: str, damaged: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChecksumError, match=r"digest .* in ckptkit.json"):
        ckptkit.consolidate(damaged.parent / place, tmp_path.parent / f"{tmp_path.name}-out")


def test_slices_compare_digests_when_they_are_joined(
    output: Path, damaged: Path, tmp_path: Path
) -> None:
    def consolidate(source: Path, out: Path) -> list[Any]:
        command = "consolidate", source, out, "--slice"
        return [run_command(*command, f"{number}/2") for number in range(2)]

    assert [one.returncode for one in consolidate(output, tmp_path / "again")] == [0, 0]
    assert ckptkit.verify(tmp_path / "again").unverified == ()
    last = consolidate(damaged, tmp_path / "other")[-1]
    assert last.returncode == 3, last.stderr
    assert "in ckptkit.json" in last.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("side", ["base", "new"])
def test_no_delta_is_made_of_a_damaged_model(
    side: str, output: Path, damaged: Path, tmp_path: Path
) -> None:
    sources = {"base": (damaged, LLAMA), "new": (LLAMA, damaged)}
    with pytest.raises(ChecksumError, match="digest"):
        ckptkit.create_delta(*sources[side], tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    manifest = ckptkit.create_delta(LLAMA, output, tmp_path / "delta")
    assert manifest.unverified == []


def test_what_is_cast_has_no_digest_to_be_compared_with(damaged: Path, tmp_path: Path) -> None:
    """Only the bytes as they are written have one; `verify` of the source finds it."""
    ckptkit.consolidate(damaged, tmp_path / "again", dtype="bfloat16")
    assert ckptkit.verify(tmp_path / "again").unverified
    assert not ckptkit.verify(damaged).ok


def test_a_change_that_is_meant_needs_no_manifest(damaged: Path, tmp_path: Path) -> None:
    (damaged / "ckptkit.json").unlink()
    ckptkit.consolidate(damaged, tmp_path / "again")
    assert ckptkit.verify(tmp_path / "again").unverified


def test_the_command_says_by_what_tensors_were_proven(output: Path, tmp_path: Path) -> None:
    shown = run_command("consolidate", output, tmp_path / "again").stdout
    assert "11 tensors proven by digests of ckptkit" in shown
    assert "unchecked" not in shown
    ckptkit.create_delta(output, output, tmp_path / "delta")
    shown = run_command("delta", "apply", output, tmp_path / "delta", tmp_path / "new").stdout
    assert "11 tensors proven by digests of ckptkit" in shown
