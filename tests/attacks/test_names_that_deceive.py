"""Names that look like others, or that a terminal obeys: kept exactly, and printed as they are."""

from __future__ import annotations

import json
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.formats.safetensors.reader import parse_header
from tests.command_line import run_command
from tests.sampled import sampled

COMPOSED = "caf\u00e9.weight"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
ODD = {
    "escape sequences": "model.\x1b[2J\x1b]0;owned\x07weight",
    "a carriage return": "model.good\rmodel.evil",
    "a newline": "model.weight\nerror: all is well",
    "right to left": "model.\u202egnp.weight",
    "zero width": "model\u200b.weight",
    "a homoglyph": "m\u043edel.weight",
    "an emoji": "model.\U0001f4a9",
    "combining marks": "z\u0351\u036b\u0343" * 20,
    "a format specifier": "{0.__class__}%s%n$(id)`id`",
    "markup": "[bold red]model[/] <b>x</b>",
    "a path": "../../../etc/passwd",
    "nothing but spaces": "   ",
    "a very long name": "x" * 20_000,
}


def model_with(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate(names)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_name_is_kept_to_the_character(kind: str, tmp_path: Path, out: Path) -> None:
    source = model_with(tmp_path / "source", [ODD[kind], "model.weight.2"])
    ckptkit.consolidate(source, out)
    found = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert found == {ODD[kind], "model.weight.2"}
    assert {path.parent for path in tmp_path.rglob("*.safetensors")} == {source, out}


@pytest.mark.parametrize(
    "kind", sampled(ODD, ["escape sequences", "a newline", "zero width", "a format specifier"])
)
def test_no_command_prints_a_name_that_a_terminal_obeys(kind: str, tmp_path: Path) -> None:
    source = model_with(tmp_path / "source", [ODD[kind], "model.weight.2"])
    for command in (["inspect", "--tensors"], ["stats"], ["verify"]):
        done = run_command(command[0], source, *command[1:])
        for text in (done.stdout, done.stderr):
            odd = {c for c in text if not c.isprintable()} - {"\n"}
            assert not odd, (command, odd)


def test_names_that_differ_in_their_normal_form_are_two_tensors(tmp_path: Path, out: Path) -> None:
    source = model_with(tmp_path / "source", [COMPOSED, DECOMPOSED])
    manifest = ckptkit.consolidate(source, out)
    assert set(manifest.tensors) == {COMPOSED, DECOMPOSED}
    found: dict[str, Any] = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert [found[name][0] for name in (COMPOSED, DECOMPOSED)] == [0, 1]


@pytest.mark.parametrize("name", ["\\ud800", "a\\udfff", "\\udc00\\ud800"])
def test_half_of_a_surrogate_pair_is_no_name(name: str) -> None:
    text = f'{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
    with pytest.raises(InputError) as caught:
        parse_header(text, len(text) + 12, where="x")
    str(caught.value).encode()


def test_a_null_in_a_name_is_kept_or_refused(source: Path, out: Path) -> None:
    raw = json.dumps({"a\0b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    try:
        assert list(ckptkit.consolidate(source, out).tensors) == ["a\0b"]
    except CkptkitError:
        assert not out.exists()


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\u202eb", "a\rb", "[red]x"])
def test_no_error_prints_a_folder_that_a_terminal_obeys(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\1\2")
    done = run_command("inspect", folder)
    assert done.returncode != 0
    assert not {c for c in done.stdout + done.stderr if not c.isprintable()} - {"\n"}


Command = Callable[..., Any]
