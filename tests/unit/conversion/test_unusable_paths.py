"""Paths that no system call takes are wrong usage, in every function, and never a bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
import ckptkit.hub
import ckptkit.training
from ckptkit.core.errors import UsageError
from ckptkit.storage.locations import Place, is_url, local_path
from tests.sampled import sampled

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
OUT = "/nowhere/out"
UNUSABLE = ["a\0b", "\ud800", "s3://bucket/\0", "s3://bucket/\udcff", "file:///a\0", "x" * 300]
CALLS: dict[str, Callable[[str], object]] = {
    "open": ckptkit.open,
    "inspect": ckptkit.inspect,
    "inspect also": lambda path: ckptkit.inspect(LLAMA, also=[path]),
    "inspect model_config": lambda path: ckptkit.inspect(LLAMA, model_config=path),
    "verify": ckptkit.verify,
    "diff": lambda path: ckptkit.diff(path, LLAMA),
    "diff other": lambda path: ckptkit.diff(LLAMA, path),
    "consolidate": lambda path: ckptkit.consolidate(path, OUT),
    "consolidate out": lambda path: ckptkit.consolidate(LLAMA, path),
    "consolidate base": lambda path: ckptkit.consolidate(LLAMA, OUT, base=path),
    "consolidate like": lambda path: ckptkit.consolidate(LLAMA, OUT, like=path),
    "consolidate also": lambda path: ckptkit.consolidate(LLAMA, OUT, also=[path]),
    "list_run": ckptkit.list_run,
    "list_run state": lambda path: ckptkit.list_run(LLAMA, state=path),
    "prune": lambda path: ckptkit.prune(path, keep_last=1),
    "extract_adapter": lambda path: ckptkit.extract_adapter(path, OUT),
    "extract_adapter config": lambda path: ckptkit.extract_adapter(LLAMA, OUT, adapter_config=path),
    "merge_adapter": lambda path: ckptkit.merge_adapter(path, OUT),
    "merge_adapter base": lambda path: ckptkit.merge_adapter(LLAMA, OUT, base=path),
    "merge_adapter further": lambda path: ckptkit.merge_adapter(LLAMA, OUT, further=[path]),
    "adapter_from_diff": lambda path: ckptkit.adapter_from_diff(LLAMA, OUT, base=path, rank=2),
    "checkpointer": ckptkit.training.Checkpointer,
    "push": lambda path: ckptkit.hub.push(path, "org/name"),
    "pull": lambda path: ckptkit.hub.pull("org/name", path),
}
NOT_READ = {"inspect model_config", "list_run state", "pull"}  # before something else is refused


@pytest.mark.parametrize("path", sampled(UNUSABLE, UNUSABLE[:3]), ids=ascii)
@pytest.mark.parametrize("call", CALLS)
def test_a_path_that_cannot_be_one_is_wrong_usage(call: str, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        CALLS[call](path)
    str(caught.value).encode()  # so that any stream can show it


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the test run in a directory that was removed."""
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    try:
        (tmp_path / "removed").rmdir()
    except OSError:
        pytest.skip("the system keeps the current directory")


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("call", sorted(CALLS.keys() - NOT_READ))
def test_a_relative_path_in_a_removed_directory_is_wrong_usage(call: str) -> None:
    with pytest.raises(UsageError, match="relative to the current directory, which was removed"):
        CALLS[call]("run")


@pytest.mark.usefixtures("nowhere")
def test_absolute_paths_are_read_and_written_from_a_removed_directory(tmp_path: Path) -> None:
    out, delta = tmp_path / "out", tmp_path / "delta"
    for overwrite in (False, True):
        ckptkit.consolidate(LLAMA, out, names="live", overwrite=overwrite)
    ckptkit.create_delta(out, out, delta, names="live")
    assert [ckptkit.verify(place).ok for place in (out, LLAMA)] == [True, True]
    assert ckptkit.diff(LLAMA, out).same
    assert ckptkit.stats(out).tensors
    assert ckptkit.inspect_delta(delta).version == 1


def test_names_that_are_no_utf_8_and_long_urls_are_paths() -> None:
    assert local_path("a\udcff/b").name == "b"
    assert is_url(f"s3://bucket/{'x' * 300}")
    assert Place("x" * 255) == "x" * 255
