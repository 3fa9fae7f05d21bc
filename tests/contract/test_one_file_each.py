"""A reader, a name map, a command and a store cost one file each: a copy of ckptkit gets one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptkit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = (ROOT / "examples" / "reader_plugin" / "npy_rows.py").read_text(encoding="utf-8")
READER = """
from ckptkit.formats.base import FormatReader
class OwnReader(NpyRowsReader, FormatReader):
    expected = "'*.npy'"
"""
MAP = """
name = "own-tiny"
source = "own names"
target = "Transformers"
others = "keep"
model_types = ["own-tiny"]

[[rule]]
from = "first.weight"
to = "model.first.weight"
"""
COMMAND = '''
from ckptkit_cli._output import Output
from ckptkit_cli._program import Argument, command

@command(Argument("src", "SRC", "A checkpoint."), order=99)
def steps(output: Output, src: str) -> None:
    """Show the step of a checkpoint."""
    import ckptkit
    output.lines([f"step {ckptkit.inspect(src).step}"])
'''
STORE = '''
"""Objects are files, each of which appears as a whole; there are no folders."""
import os
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

class Object(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        with open(self.fs.file_of(self.path), "rb") as file:
            file.seek(start)
            return file.read(end - start)
    def _initiate_upload(self):
        self.parts = []
    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True
    def commit(self):
        self.fs.pipe_file(self.path, b"".join(self.parts))
    def discard(self):
        self.parts = []

class Shelf(AbstractFileSystem):
    protocol = "shelf"
    def file_of(self, path):
        name = self._strip_protocol(path).replace("/", "%")
        return os.path.join(os.environ["SHELF"], name)
    def ls(self, path, detail=True, **_):
        prefix = self._strip_protocol(path).strip("/")
        found = {}
        for name in sorted(os.listdir(os.environ["SHELF"])):
            key, size = name.replace("%", "/"), os.path.getsize(self.file_of(name))
            if key == prefix:
                found[key] = {"name": key, "size": size, "type": "file"}
            elif not prefix or key.startswith(prefix + "/"):
                below = "/".join(key.split("/")[: prefix.count("/") + 1 + bool(prefix)])
                kind = "file" if below == key else "directory"
                found[below] = {"name": below, "size": size if below == key else 0, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)
    def _open(self, path, mode="rb", **options):
        return Object(self, path, mode, **options)
    def pipe_file(self, path, value, **_):
        with open(self.file_of("." + path), "wb") as file:
            file.write(value)
        os.replace(file.name, self.file_of(path))
    def _rm(self, path):
        os.remove(self.file_of(path))
    def mkdir(self, path, **_):
        pass
'''
DECLARED = "[fsspec.specs]\nshelf = shelf_store:Shelf\n"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, where Python finds them before the installed ones."""
    folder = tmp_path_factory.mktemp("copied")
    for package in ("ckptkit", "cli/ckptkit_cli"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=ignored)
    return folder


def run(copied: Path, *words: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(copied), "SHELF": str(copied / "shelf")}
    command = [sys.executable, "-m", "ckptkit_cli", *map(str, words)]
    done = subprocess.run(
        command, cwd=copied, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NESTED = ROOT / "fixtures" / "torch_nested"


@pytest.mark.slow
def test_a_reader_is_one_module(copied: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    np.save(rows / "up.weight.0-of-2.npy", np.arange(6, dtype="float32").reshape(2, 3))
    np.save(rows / "up.weight.1-of-2.npy", np.full((1, 3), 7, "float32"))
    (copied / "ckptkit/formats/others/rows_of_npy.py").write_text(EXAMPLE + READER)
    assert json.loads(run(copied, "inspect", rows, "--json"))["format"] == "npy-rows"
    run(copied, "consolidate", rows, tmp_path / "out", "--names", "live")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["up.weight"].tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7]]


@pytest.mark.slow
def test_a_name_map_is_one_file(copied: Path, tmp_path: Path) -> None:
    (copied / "ckptkit/name_maps/families/own-tiny.toml").write_text(MAP)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "own-tiny"}')
    words = ("consolidate", NESTED / "checkpoint", tmp_path / "out", "--base", base)
    run(copied, *words, "--map", "own-tiny")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {"model.first.weight", "second.weight", "first.bias"} <= names


def test_a_command_is_one_module(copied: Path) -> None:
    (copied / "ckptkit_cli/steps.py").write_text(COMMAND)
    assert "Show the step of a checkpoint." in run(copied, "--help")
    assert run(copied, "steps", NESTED / "checkpoint") == "step 3\n"


@pytest.mark.slow
def test_a_store_is_one_module_of_fsspec(copied: Path, tmp_path: Path) -> None:
    (copied / "shelf_store.py").write_text(STORE)
    facts = copied / "shelf_store-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: shelf-store\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(DECLARED)
    (copied / "shelf").mkdir()
    shutil.copy(NESTED / "checkpoint/last.pt", copied / "shelf" / "run%last.pt")
    for source, target in (("run", "shelf://out"), ("out", str(tmp_path / "out"))):
        run(copied, "consolidate", f"shelf://{source}", target, "--names", "live")
    run(copied, "verify", "shelf://out")
    assert ckptkit.diff(tmp_path / "out", NESTED / "checkpoint").same
