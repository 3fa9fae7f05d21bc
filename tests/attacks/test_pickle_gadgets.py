"""Pickles that call something, in every kind of file that holds pickles: nothing is called.

Names that only an attack has a use for are refused; of others the name is kept, as of any object.
"""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.formats.registry import read_index, recognise
from ckptkit.storage.overlay import MemorySource
from ckptkit.training.state.objects import object_from_bytes
from tests.attacks.archives import WITNESS, archive_with

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
Blobs = Callable[[bytes], list[tuple[int, int]]]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SHARDED = "fsdp2_hsdp"  # four ranks, two replicas


def op(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n(".encode() + text(argument) + b"tR."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def hostile_pickles(trace: Path) -> dict[str, bytes]:
    touch = f"touch {trace}"
    create = f'open(r"{trace}", "w")'
    return {
        "os.system": op("os", "system", touch),
        "posix.system": op("posix", "system", touch),
        "builtins.eval": op("builtins", "eval", create),
        "builtins.exec": op("builtins", "exec", create),
        "builtins.__import__": op("builtins", "__import__", WITNESS),
        "torch.load": op("torch", "load", str(trace)),
        "subprocess.Popen": op("subprocess", "Popen", touch),
        WITNESS: op(WITNESS, "call", "x"),
        "torch.Size": op("torch", "Size", touch),
        "_get_layout": op("torch.serialization", "_get_layout", touch),
        "importlib.import_module": op("importlib", "import_module", WITNESS),
        "runpy.run_path": op("runpy", "run_path", str(trace)),
        "pickle.loads": op("pickle", "loads", "cos\nsystem\n."),
        "numpy.load": op("numpy", "load", str(trace)),
        "numpy.testing.exec": op("numpy.testing._private.utils", "runstring", create),
        "torch.hub.load": op("torch.hub", "load", str(trace)),
        "torch.jit.load": op("torch.jit", "load", str(trace)),
        "ctypes.CDLL": op("ctypes", "CDLL", str(trace)),
        "sys.exit": op("sys", "exit", "0"),
        "code.interact": op("code", "interact", "x"),
        "webbrowser.open": op("webbrowser", "open", "file:///x"),
        "pydoc.pipepager": op("pydoc", "pipepager", touch),
        # Else it would be repeated a million times.
        "timeit.timeit": op("timeit", "timeit", f"{create}; raise SystemExit"),
        "bdb.Bdb.run": op("bdb", "Bdb.run", create),
        "shutil.rmtree": op("shutil", "rmtree", str(trace.parent)),
        "functools.partial": partial_of(touch),
        "getattr": chain_of_getattr(touch),
        "INST": b"(" + text(touch) + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + text(touch) + b"o.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\n" + text(touch) + b"\x85}\x92.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text(touch) + b"\x85R.",
        "NEWOBJ": b"\x80\x02cos\nsystem\n" + text(touch) + b"\x85R0N.",
        "nested": b"\x80\x03cpickle\nloads\n(" + nested(touch) + b"tR.",
        "BUILD": b"\x80\x02ccollections\nOrderedDict\n)R}" + SETSTATE + b"cos\nsystem\nsb.",
        "EXT1": b"\x80\x02\x82\x01)R.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00)R.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02" + text(touch) + b"Q.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x0eos.sys.modules\x93.",
        "an attribute of an allowed name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93)R.",
    }


SETSTATE = text("__setstate__")


def nested(touch: str) -> bytes:
    """A pickle inside a pickle, as bytes."""
    inner = op("os", "system", touch)
    return b"B" + struct.pack("<I", len(inner)) + inner


def partial_of(touch: str) -> bytes:
    """A partial call of os.system, that is called in turn."""
    return b"\x80\x02cfunctools\npartial\n(cos\nsystem\n" + text(touch) + b"tR)R."


def chain_of_getattr(touch: str) -> bytes:
    """Finds os.system step by step, beginning with something harmless."""
    opening = b"\x80\x02cbuiltins\ngetattr\n(c__builtin__\n__import__\n(" + text("os") + b"tR"
    return opening + text("system") + b"tR(" + text(touch) + b"tR."


KINDS = list(hostile_pickles(Path("trace")))
INERT = (WITNESS, "EXT1", "EXT4", "an attribute of an allowed name")  # names of anything
# What Python's own unpickler would have run; the others need a library, or name nothing that is.
EXECUTED = (
    *("os.system", "posix.system", "builtins.eval", "builtins.exec", "functools.partial"),
    *("getattr", "INST", "OBJ", "NEWOBJ", "STACK_GLOBAL", "timeit.timeit", "nested"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXECUTED)
def test_the_attack_works_against_the_stock_unpickler(kind: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    data = hostile_pickles(trace)[kind]
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", code], input=data, check=False, capture_output=True)
    assert trace.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_in_metadata_it_is_refused(
    kind: str, copied: Copied, refusal: Refusal, witness: Path
) -> None:
    checkpoint = copied(SHARDED)
    (checkpoint / ".metadata").write_bytes(hostile_pickles(witness)[kind])
    expected = UnsupportedError if kind in INERT else UnsafePickleError
    is_of_torch = kind in {"torch.Size", "_get_layout"}
    error = refusal(checkpoint, FormatError if is_of_torch else expected)
    assert ".metadata" in error.where


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "_get_layout"])
def test_in_a_torch_file_it_is_refused(
    kind: str, source: Path, refusal: Refusal, witness: Path
) -> None:
    (source / "pytorch_model.bin").write_bytes(archive_with(hostile_pickles(witness)[kind]))
    is_of_torch = kind in {"torch.Size", "BINPERSID"}
    error = refusal(source, FormatError if is_of_torch else UnsafePickleError)
    assert "pytorch_model.bin" in error.where


# A file of each format that holds pickles, and what is put in its place: an archive, or the pickle.
PLACES = {
    "torch_nested": ("*.pt", True),
    "torch_legacy": ("*.pt", False),
    "rank_files_torch_2_9": ("*model*.pt", True),
    "fairscale_pair": ("*.pt", True),
    "zero1_bf16": ("*optim_states.pt", True),
    "universal_small_zero1": ("*fp32.pt", True),
    "torch_checkpointing": ("*metadata.pkl", False),
    "megatron_model_gemma3": ("*common.pt", True),
    "megatron_ranks_llama_tp2_pp2": ("*.pt", True),
    "meta_llama_3_one_file": ("*.pth", True),
    "torchsnapshot_rank_models": ("*batched/*", True),
}


@pytest.mark.parametrize("fixture", PLACES)
def test_in_every_format_it_is_refused_or_not_looked_at(fixture: str, witness: Path) -> None:
    pattern, is_archive = PLACES[fixture]
    root = FIXTURES / fixture / "checkpoint"
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    target = next(path for path in sorted(files) if Path(f"/{path}").match(pattern))
    refused = 0
    for data in hostile_pickles(witness).values():
        changed = {**files, target: archive_with(data) if is_archive else data}
        source = MemorySource(changed)
        for candidate in recognise(sorted(changed)):
            try:
                read_index(source, candidate)
            except InputError:
                refused += 1
    if fixture != "torchsnapshot_rank_models":  # whose tensors are raw bytes
        assert refused >= len(KINDS) - 2


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_value_of_a_resume_it_is_refused(kind: str, witness: Path) -> None:
    with pytest.raises(CkptkitError):
        object_from_bytes(archive_with(hostile_pickles(witness)[kind]), where="x")


def test_a_hostile_pickle_inside_a_chunk_is_refused(
    copied: Copied, refusal: Refusal, witness: Path, blobs: Blobs
) -> None:
    checkpoint = copied(SHARDED)
    file = checkpoint / "__0_0.distcp"
    whole = file.read_bytes()
    start, stop = blobs(whole)[0]
    archive = whole[start:stop]
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        original = opened.read("archive/data.pkl")
    hostile = hostile_pickles(witness)["os.system"][:-1].ljust(len(original) - 1, b"N") + b"."
    swapped = archive.replace(original, hostile)
    for content in (original, hostile):
        assert len(content) == len(original)
    before, after = (zlib.crc32(content).to_bytes(4, "little") for content in (original, hostile))
    swapped = swapped.replace(before, after)
    file.write_bytes(whole[:start] + swapped + whole[stop:])
    error = refusal(checkpoint, UnsafePickleError)
    assert file.name in error.where
    assert "system" in error.message


class _Call:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


@pytest.mark.parametrize(
    "arguments",
    [
        ("storage", 0, (2**62, 2**62), (1, 1), False, {}),
        (None, 0, (2,), (1,), False, {}),
        ("storage", -1, (2,), (1,), False, {}),
        ("storage", 0, (2,), (-1,), False, {}),
        (),
    ],
    ids=["overflow", "no_storage", "negative_offset", "negative_stride", "none"],
)
def test_an_allowed_name_with_hostile_arguments_is_refused(
    arguments: tuple[Any, ...], source: Path, out: Path
) -> None:
    rebuild = torch._utils._rebuild_tensor_v2
    pickled = pickle.dumps({"weight": _Call(rebuild, *arguments)}, protocol=2)
    (source / "pytorch_model.bin").write_bytes(archive_with(pickled))
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(source, out)
    assert caught.value.exit_status == 3
    assert list(out.parent.iterdir()) == []
