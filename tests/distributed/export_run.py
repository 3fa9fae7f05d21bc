"""Runs under torchrun: exports through the Checkpointer and checks on every rank what came of it.

Usage: export_run.py FOLDER CASE... Each case works in FOLDER/CASE; `dies…` has to be the last.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, cast
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckptkit.core.errors import NoSpaceError, OutputExistsError, SaveError
from ckptkit.integrations.checkpointers import export_into
from ckptkit.storage.local import target as staged_files
from ckptkit.training import Checkpointer
from ckptkit.training.agree.peers import Peers
from ckptkit.training.export import export as export_attempt
from tests.distributed.cases import nobody_talks, run_cases
from tests.distributed.saving_run import make, sleep_for, train

STOPPED_SECONDS = {0: 2.0, 1: 60.0}  # by rank


def tiny_llama() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapter() -> Any:
    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], use_dora=True)
    settings.modules_to_save = ["norm"]
    model = peft.get_peft_model(tiny_llama(), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def sharded(model: Any) -> Any:
    for layer in model.modules():
        if type(layer).__name__.endswith("DecoderLayer"):
            fully_shard(layer)
    return fully_shard(model)


def by_columns() -> Any:
    """Tensor parallelism, whose parts are no stretches of the files, and a transposed value."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(11, 7), nn.Linear(7, 5))
    model.register_parameter("turned", nn.Parameter(torch.randn(6, 4).t()))
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def saved_and_exported(folder: Path, kind: str) -> None:
    """What the test compares with a consolidation; everything that communicates raises."""
    if kind == "llama":
        state = {"model": sharded(tiny_llama())}
    elif kind == "tp":
        state = {"model": by_columns()}
    else:
        state = make(kind, 1)
        train(state, 2)
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(2, state).result(60)
        with nobody_talks():
            whole = checkpointer.export(folder / "keep", state=state)
            parts = checkpointer.export(
                folder / "bfloat16", dtype="bfloat16", max_shard_size="600B"
            )
            report = whole.report(60)
            assert parts.result(60) == folder / "bfloat16"
        assert report.path == folder / "keep"
        assert not report.command


def adapter(folder: Path, _: str) -> None:
    model = with_adapter()
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "expected")
    state = {"model": sharded(model)}
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.export(folder / "out", state=state).result(60)
        with mock.patch.object(export_attempt, "find_filesystem_type", return_value="fuse.s3fs"):
            handle = checkpointer.export(folder / "by_one", state=state)
        assert handle.result(60) == folder / "by_one"


def stopped(folder: Path, kind: str) -> None:
    """One rank is stopped before its export; `export` returns on the others all the same."""
    state = make("fsdp2", 1)
    is_stopped, seconds = dist.get_rank() == int(kind), STOPPED_SECONDS[int(kind)]
    with Checkpointer(folder / "run") as checkpointer:
        dist.barrier()
        if is_stopped:
            sleep_for(seconds)
        began = time.monotonic()
        handle = checkpointer.export(folder / "out", state=state)
        assert time.monotonic() - began < seconds / 2
        assert is_stopped or not handle.done()
        assert is_stopped or not (folder / "out").exists()
        handle.result(100)
        checkpointer.save(1, state).result(60)


def there_already(folder: Path, _: str) -> None:
    state, out = make("fsdp2", 1), folder / "out"
    if dist.get_rank() == 0:
        out.mkdir()
        (out / "kept").write_text("theirs")
    dist.barrier()
    with Checkpointer(folder / "run") as checkpointer:
        with pytest.raises(OutputExistsError, match="holds files"):
            checkpointer.export(out, state=state)
        assert [path.name for path in out.iterdir()] == ["kept"]
        dist.barrier()
        checkpointer.export(out, state=state, overwrite=True).result(60)
        assert {path.name for path in out.iterdir()} == {"ckptkit.json", "model.safetensors"}


def different(folder: Path, _: str) -> None:
    """Ranks that do not ask for the same are told so, and leave nothing."""
    state, rank = make("fsdp2", 1), dist.get_rank()
    with Checkpointer(folder / "run") as checkpointer:
        handle = checkpointer.export(
            folder / "out", state=state, dtype="float32" if rank else "bfloat16"
        )
        error = handle.exception(60)
        assert isinstance(error, SaveError), error
        assert "rank 1 planned other files than rank 0" in str(error)
        error = checkpointer.export(folder / f"out{rank}", state=state).exception(60)
        assert f"rank 0 does not see what rank 1 wrote, to '{folder}/out1'" in str(error), error
    assert_nothing(folder)


def full(folder: Path, _: str) -> None:
    """The disk is too small for both parts, though not for either."""
    model = fully_shard(nn.Linear(1_000, 1_000, bias=False))
    if dist.get_rank() == 0:
        (folder / "disk").mkdir()
        options = "size=2500k"  # each rank has 2 MB to write
        mount = ["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder / "disk")]
        subprocess.run(mount, check=True)
    dist.barrier()
    try:
        with Checkpointer(folder / "run") as checkpointer:
            error: Any = None
            try:
                error = checkpointer.export(folder / "disk/out", state={"model": model})
                error = error.exception(60)
            except NoSpaceError as problem:
                error = problem
            assert isinstance(error, NoSpaceError), error
        assert_nothing(folder / "disk")
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["/bin/umount", str(folder / "disk")], check=True)


def stages(folder: Path, _: str) -> None:
    """Every rank holds other layers, as in a pipeline; one rank those of two stages."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
    models = []
    for number in (0, 2) if dist.get_rank() == 0 else (1,):
        torch.manual_seed(number)
        model = nn.Module()
        model.add_module(f"layer{number}", nn.Linear(3 + number, 2))
        models.append(fully_shard(model, mesh=mesh["shard"]))
    state = {"model": models}
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.export(folder / "keep", state=state).result(60)


def on_a_network(folder: Path, _: str) -> None:
    """Where ranges cannot be written, the model is saved sharded, with the command to go on."""
    state = make("fsdp2", 1)
    with Checkpointer(folder / "run") as checkpointer:
        with mock.patch.object(export_attempt, "find_filesystem_type", return_value="fuse.s3fs"):
            handle = checkpointer.export(folder / "out", state=state, dtype="bfloat16")
        report = handle.report(60)
        expected = f"ckptkit consolidate {report.path} {folder / 'out'} --dtype bfloat16"
        assert report.command == expected
        assert report.path.parent == folder / "run"
        if dist.get_rank() == 0:
            (folder / "command").write_text(report.command)
        checkpointer.export(folder / "keep", state=state).result(60)


@contextmanager
def death_while_writing() -> Iterator[None]:
    """Ends the process, as a kill would, when it has written half of a file."""

    def die(self: Any, start: int, data: memoryview) -> None:
        self._buffered.write_at(start, data[: len(data) // 2])
        os._exit(0)  # of any other status the launcher would end all ranks

    with mock.patch.object(staged_files.StagedFile, "write_at", die):
        yield


def dies(folder: Path, kind: str) -> None:
    """One rank dies half-way: the other one is told in time, and nothing is left."""
    state = make("fsdp2", 1)
    checkpointer = Checkpointer(folder / "run", timeout_seconds=2)
    dist.barrier()
    if dist.get_rank() == int(kind):
        with death_while_writing():
            checkpointer.export(folder / "out", state=state)
    began = time.monotonic()
    error = checkpointer.export(folder / "out", state=state).exception(60)
    assert time.monotonic() - began < 30
    assert "rank 1 did not answer within 2 s" in str(error), error
    assert_nothing(folder)


def dies_after_commit(folder: Path, kind: str) -> None:
    """Rank 0 ends, or goes on to its end, and the others never hear of its commit."""
    state, is_first = make("fsdp2", 1), dist.get_rank() == 0
    checkpointer = Checkpointer(folder / "run", timeout_seconds=5)
    log, report = BufferingHandler(1_000), cast("Any", None)
    logging.getLogger("ckptkit").addHandler(log)
    logging.getLogger("ckptkit").setLevel(logging.INFO)
    dist.barrier()
    publish = (lambda *_: None) if kind == "model" else (lambda *_: os._exit(0))
    with mock.patch.object(Peers, "_publish", publish) if is_first else nullcontext():
        if kind == "model":
            export_into(checkpointer, folder / "out", state["model"], is_first=is_first)
            if is_first:
                os._exit(0)
        elif kind == "export":
            report = checkpointer.export(folder / "out", state=state).report(60)
        else:
            report = checkpointer.save(1, state).report(60)
    told = [record.getMessage() for record in log.buffer]
    assert len(told) == 1, told
    assert "was committed, after which rank 0 did not decide" in told[0]
    out = folder / "out" if kind != "save" else folder / "run/checkpoint-1"
    if report is not None:
        files = [path for path in out.rglob("*") if path.is_file() and path.name != "ckptkit.json"]
        assert report.path == out
        assert report.total_bytes == sum(path.stat().st_size for path in files)


def assert_nothing(folder: Path) -> None:
    """No output, and nothing that was to become one, is left; other ranks may be removing it."""
    until = time.monotonic() + 20
    while True:
        left = [path.name for path in folder.iterdir() if "out" in path.name]
        if not left:
            return
        assert time.monotonic() < until, left
        time.sleep(0.05)


CASES: dict[str, Callable[[Path, str], None]] = {
    "equal": saved_and_exported,
    "adapter": adapter,
    "stopped": stopped,
    "there": there_already,
    "different": different,
    "full": full,
    "stages": stages,
    "network": on_a_network,
    "dies": dies,
    "dies_after_commit": dies_after_commit,
}


if __name__ == "__main__":
    run_cases(CASES)
