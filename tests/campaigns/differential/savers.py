"""Saves the live state of a draw as stock tools do, and by a Checkpointer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from ckptkit.training import Checkpointer, write_flat_layout
from tests.campaigns.differential.live_models import Training, gather_tensors

SECONDS = 90.0
SHARDED = StateDictOptions()
FULL = StateDictOptions(full_state_dict=True)


def save_stock(training: Training, folder: Path) -> None:
    """Saves to `folder/stock` what the draw says."""
    draw = training.draw
    SAVERS[draw.stock](training, folder / "stock", dict(draw.stock_options))


def states(training: Training, options: StateDictOptions = SHARDED) -> tuple[Any, Any]:
    model = get_model_state_dict(training.model, options=options)
    if not training.optimizer.state:
        return model, None
    return model, get_optimizer_state_dict(training.model, training.optimizer, options=options)


def _writer(folder: Path, options: dict[str, Any]) -> Any:
    form = options.pop("form")
    if form == "safetensors":
        options["serialization_format"] = SerializationFormat.SAFETENSORS
    elif form == "zstd":
        options["_extensions"] = [ZStandard()]
    return dcp.FileSystemWriter(folder, **options)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the options of the writer, and the planner."""
    planner = dcp.DefaultSavePlanner(
        dedup_save_to_lowest_rank=options.pop("dedup_save_to_lowest_rank"),
        enable_plan_caching=options.pop("enable_plan_caching"),
    )
    return options, planner


def _dcp(training: Training, folder: Path, options: dict[str, Any]) -> None:
    _dcp_of(states(training), folder, options)


def _dcp_of(of: tuple[Any, Any], folder: Path, options: dict[str, Any]) -> None:
    model, optimizer = of
    content = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    settings, planner = _split(options)
    dcp.save(content, storage_writer=_writer(folder, settings), planner=planner)


def _dcp_full(training: Training, folder: Path, options: dict[str, Any]) -> None:
    _dcp_of(states(training, FULL), folder, options)


def _dcp_async(training: Training, folder: Path, options: dict[str, Any]) -> None:
    model, optimizer = states(training)
    content = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    settings, planner = _split(options)
    found: Any = dcp.async_save(content, storage_writer=_writer(folder, settings), planner=planner)
    found.result(SECONDS)


def _accelerate_form(training: Training, folder: Path, options: dict[str, Any]) -> None:
    """The calls and files of `accelerator.save_state` with SHARDED_STATE_DICT."""
    model, optimizer = states(training)
    parts = {"pytorch_model_fsdp_0": {"model": model}}
    if optimizer is not None:
        parts["optimizer_0"] = {"optimizer": optimizer}
    for name, content in parts.items():
        settings, planner = _split(dict(options))
        writer = _writer(folder / name, settings)
        dcp.save(content, storage_writer=writer, planner=planner)
    if dist.get_rank() == 0 and training.scheduler is not None:
        torch.save(training.scheduler.state_dict(), folder / "scheduler.bin")


def _torch_full(training: Training, folder: Path, options: dict[str, Any]) -> None:
    model, optimizer = states(training, FULL)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        content = {"model": model, "optimizer": optimizer, "step": 3}
        _torch_save(content, folder / "full.pt", options)


def _torch_ranks(training: Training, folder: Path, options: dict[str, Any]) -> None:
    """A file for each rank, as verl's."""
    folder.mkdir(parents=True, exist_ok=True)
    with _state_dict_type(training, StateDictType.SHARDED_STATE_DICT):
        weights = training.model.state_dict()
    name = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    _torch_save(weights, folder / name, options)


def _torch_local(training: Training, folder: Path, options: dict[str, Any]) -> None:
    """Flat parameters, with the file that says what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    with _state_dict_type(training, StateDictType.LOCAL_STATE_DICT):
        weights = training.model.state_dict()
    _torch_save(weights, folder / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin", options)
    write_flat_layout(training.model, folder)


def _state_dict_type(training: Training, kind: StateDictType) -> Any:
    if training.mesh.strategy != "fsdp1":
        return contextlib.nullcontext()
    return FullyShardedDataParallel.state_dict_type(training.model, kind)


def _torch_save(content: Any, path: Path, options: dict[str, Any]) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=options["zip"])


def _hf_writer(training: Training, folder: Path, options: dict[str, Any]) -> None:
    model, _ = states(training)
    tensors = {
        name: value
        for name, value in model.items()
        if isinstance(value, torch.Tensor) and value.dtype != torch.complex128
    }
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), **options))


def _safetensors(training: Training, folder: Path, _options: dict[str, Any]) -> None:
    tensors = gather_tensors(states(training, _full_where_needed(training))[0])
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        kept = {k: v for k, v in tensors.items() if v.dtype != torch.complex128}
        save_file(kept, folder / "model.safetensors")


def _full_where_needed(training: Training) -> StateDictOptions:
    return FULL if training.mesh.strategy == "fsdp1" else SHARDED


SAVERS: dict[str, Callable[[Training, Path, dict[str, Any]], None]] = {
    "dcp": _dcp,
    "dcp_full": _dcp_full,
    "dcp_async": _dcp_async,
    "accelerate_form": _accelerate_form,
    "torch_full": _torch_full,
    "torch_ranks": _torch_ranks,
    "torch_local": _torch_local,
    "hf_writer": _hf_writer,
    "safetensors": _safetensors,
}


def open_checkpointer(training: Training, folder: Path) -> Checkpointer:
    chosen = training.draw.own_options
    options: Any = {name: chosen[name] for name in ("layout", "max_in_flight", "prefix")}
    if chosen["local"]:
        options["local"] = folder / "node"
    if chosen["staging_limit"]:
        options["staging_limit"] = chosen["staging_limit"]
    return Checkpointer(folder / "run", timeout_seconds=SECONDS, **options)


def save_own(
    checkpointer: Checkpointer, training: Training, step: int, folder: Path, *, last: bool
) -> None:
    """Saves a step, and writes down where it is; the last one may have a name and files."""
    options: dict[str, Any] = {"metrics": {"loss": 1.0 / step}}
    chosen = training.draw.own_options
    if last and chosen["name"]:
        options["name"] = chosen["name"]
    if last and chosen["files"]:
        rank = dist.get_rank()
        options["files"] = {f"notes_{rank}.json": json.dumps(rank).encode()}
    report = checkpointer.save(step, training.state(), **options).report(SECONDS)
    assert not report.lost, report.lost
    if dist.get_rank() == 0:
        (folder / f"step_{step}").write_text(str(report.path))
