"""Outputs of ckptkit as sources: digests prove what the format has no checksum for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError
from safetensors.torch import load_file

import ckptkit
import ckptkit.training
from ckptkit.core.errors import ChecksumError, CkptkitError
from tests.command_line import run_command
from tests.live_truth import refuse
from tests.s3_client import client_of

FOUND = r"CRC-32 .* stored"
LAST = "model.norm.weight"

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
    with pytest.raises(ChecksumError, match=FOUND) as caught:
        WRITERS[writer](damaged, tmp_path / "again")
    assert str(damaged) in caught.value.where
    assert "remove its ckptkit.json" in caught.value.hint
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("place", ["damaged", "damaged/model.safetensors", "."])
def test_digests_are_found_however_a_source_is_named(
    place: str, damaged: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChecksumError, match=FOUND):
        ckptkit.consolidate(damaged.parent / place, tmp_path.parent / f"{tmp_path.name}-out")


def test_slices_compare_what_they_read(output: Path, damaged: Path, tmp_path: Path) -> None:
    def consolidate(source: Path, out: Path) -> list[Any]:
        command = "consolidate", source, out, "--slice"
        return [run_command(*command, f"{number}/2") for number in range(2)]

    assert [one.returncode for one in consolidate(output, tmp_path / "again")] == [0, 0]
    assert ckptkit.verify(tmp_path / "again").unverified == ()
    runs = consolidate(damaged, tmp_path / "other")
    failed = [run for run in runs if run.returncode]
    assert [run.returncode for run in failed] == [3]
    assert "CRC-32" in failed[0].stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("side", ["base", "new"])
def test_no_delta_is_made_of_a_damaged_model(
    side: str, output: Path, damaged: Path, tmp_path: Path
) -> None:
    sources = {"base": (damaged, LLAMA), "new": (LLAMA, damaged)}
    with pytest.raises(ChecksumError, match=FOUND):
        ckptkit.create_delta(*sources[side], tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    manifest = ckptkit.create_delta(LLAMA, output, tmp_path / "delta")
    assert manifest.unverified == []


def serve(source: Path, _out: Path) -> None:
    with ckptkit.serve(source, name="m", names="live") as serving:
        client_of(serving.environment).get_object(Bucket="ckptkit", Key="m/model.safetensors")[
            "Body"
        ].read()


def load(source: Path, _out: Path) -> None:
    truth = load_file(source / "model.safetensors")
    model = torch.nn.Module()
    for name, tensor in truth.items():
        at = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_buffer(last, torch.zeros_like(tensor, dtype=torch.float32))
    ckptkit.training.load_into(model, source)


def read_one(source: Path, _out: Path) -> None:
    with ckptkit.open(source) as checkpoint:
        checkpoint.read(LAST, framework="numpy")


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "cast": lambda source, out: ckptkit.consolidate(source, out, dtype="bfloat16"),
    "part": lambda source, out: ckptkit.consolidate(source, out, vocab_size=30),
    "average": lambda source, out: ckptkit.average([source, LLAMA], out),
    "numbers": lambda source, _: ckptkit.stats(source),
    "comparison": lambda source, _: ckptkit.diff(source, LLAMA),
    "numeric": lambda source, _: ckptkit.diff(source, LLAMA, numeric=True),
    "open": read_one,
    "serve": serve,
    "load": load,
}


@pytest.mark.parametrize("reader", READERS)
def test_no_path_uses_bytes_that_were_not_compared(
    reader: str, output: Path, damaged: Path, tmp_path: Path
) -> None:
    READERS[reader](output, tmp_path / "well")
    errors = (CkptkitError, ResponseStreamingError, IncompleteReadError, ClientError)
    with pytest.raises(errors) as caught:
        READERS[reader](damaged, tmp_path / "again")
    assert reader == "serve" or "CRC-32" in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_what_is_cast_is_proven_too(output: Path, tmp_path: Path) -> None:
    manifest = ckptkit.consolidate(output, tmp_path / "again", dtype="bfloat16")
    assert manifest.unverified == []
    assert {record.proof for record in manifest.tensors.values()} == {"crc32"}


HEADERS: dict[str, tuple[bytes, bytes]] = {
    "name": (b"model.norm.weight", b"model.norn.weight"),
    "dtype": (b'"F32"', b'"I32"'),
    "shape": (b'"shape":[16]', b'"shape":[16]'[:-1] + b",1]"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_says_something_else_is_found(
    kind: str, output: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(output, tmp_path / "other"))
    file, (before, after) = folder / "model.safetensors", HEADERS[kind]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(before, after, 1).rstrip(b" ")
    assert before in data
    file.write_bytes(data[:8] + header.ljust(length) + data[8 + length :])
    with pytest.raises(ChecksumError, match=r"against .* in ckptkit.json") as caught:
        ckptkit.consolidate(folder, tmp_path / "again", dtype="bfloat16")
    assert "remove ckptkit.json" in caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "ckptkit.json"])
def test_a_side_file_that_was_changed_is_found(name: str, output: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(output, tmp_path / "other"))
    file = folder / name
    assert b"0" in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(b"0", b"1", 1))
    refuse(r"digest than|has checksum", folder, tmp_path / "again", kind=ChecksumError)
    (folder / "ckptkit.json").unlink()
    ckptkit.consolidate(folder, tmp_path / "again")


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
