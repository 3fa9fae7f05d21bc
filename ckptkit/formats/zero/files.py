"""The files of a DeepSpeed checkpoint: their names, and what their pickles hold.

Source: deepspeed/runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`, `_save_checkpoint`),
deepspeed/runtime/pipe/module.py (`ckpt_layer_path`), deepspeed 0.19.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.formats.pickle.pickles import Builder, Global, inert_class
from ckptkit.formats.pickle.torch_archives import ArchiveTable, Document, TorchArchive
from ckptkit.formats.pickle.torch_values import ALLOWED, TensorRef, rebuild_tensor_v2
from ckptkit.storage.base import Source

Kind = Literal["model", "optim"]
_NAME = re.compile(
    r"(bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<slice>\d{1,7})_"
    r"(?P<kind>optim|model)_states\.pt"
)
_NOT_MODELLED = {
    "experts in files of their own": re.compile(r"layer_\d+_expert_\d+_.*\.pt|expp_rank_.*\.pt"),
    "the layers of a pipeline": re.compile(r"layer_\d+-.*model_states\.pt"),
}
_UNIVERSAL = re.compile(
    r"(?:(?P<folder>.*)/)?zero/"
    r"(?:(?P<parameter>[^/]+)/(?P<kind>fp32|exp_avg|exp_avg_sq|step)|optimizer_state)\.pt"
)


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a file tells.

    Attributes:
        path: The file.
        kind: Whether it holds weights or optimizer states.
        rank: The data-parallel rank that wrote it; None for the only file of its kind.
        slice: The slice of tensor parallelism.
    """

    path: str
    kind: Kind
    rank: int | None
    slice: int


def parse_name(path: str) -> FileName | None:
    """Returns what the name of a file tells, or None where DeepSpeed names no file so."""
    match = _NAME.fullmatch(posixpath.basename(path))
    if match is None:
        return None
    kind: Kind = "model" if match["kind"] == "model" else "optim"
    rank = None if match["rank"] is None else int(match["rank"])
    return FileName(path, kind, rank, int(match["slice"]))


def not_modelled(path: str) -> tuple[str, str] | None:
    """Tells which part of a DeepSpeed checkpoint that is not modelled a file belongs to.

    Returns:
        The folder of the checkpoint and what the file holds, or None for any other file.
    """
    name = posixpath.basename(path)
    for what, pattern in _NOT_MODELLED.items():
        if pattern.fullmatch(name):
            return posixpath.dirname(path), what
    return None


@dataclass(frozen=True, slots=True)
class UniversalPlace:
    """Where a file of a universal checkpoint lies.

    Attributes:
        folder: The folder of the checkpoint.
        parameter: The parameter that it is about; empty for the states that all share.
        kind: What it holds of the parameter.
    """

    folder: str
    parameter: str
    kind: str


def universal_place(path: str) -> UniversalPlace | None:
    """Returns what the path of a file tells, or None where universal checkpoints have none so."""
    match = _UNIVERSAL.fullmatch(path)
    if match is None:
        return None
    return UniversalPlace(match["folder"] or "", match["parameter"] or "", match["kind"] or "")


def _stage(*args: object) -> int:
    match args:
        case (int(stage),):
            return stage
    raise FormatError("ZeRO's stage is not a number")


def _rebuild_from_type(*args: object) -> TensorRef:
    # How torch writes a tensor that was given attributes; they do not change its values.
    match args:
        case (
            Global("torch._utils", "_rebuild_tensor_v2"),
            Global("torch", "Tensor"),
            tuple(inner),
            _,
        ):
            return rebuild_tensor_v2(*inner)
    raise UnsupportedError("tensor is of a class that is not modelled")


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_UNIVERSAL_CLASSES = "deepspeed.checkpoint.universal_checkpoint"
_OWN: Mapping[tuple[str, str], Builder | Global] = {
    (_SCALERS, "LossScaler"): inert_class(_SCALERS, "LossScaler"),
    (_SCALERS, "DynamicLossScaler"): inert_class(_SCALERS, "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): inert_class(
        "deepspeed.utils.tensor_fragment", "fragment_address"
    ),
    (_UNIVERSAL_CLASSES, "SubparamShape"): inert_class(_UNIVERSAL_CLASSES, "SubparamShape"),
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Tensor"): Global("torch", "Tensor"),
}
_ALLOWED = {**ALLOWED, **_OWN}


@dataclass(frozen=True, slots=True)
class ZeroFile:
    """An opened file.

    Attributes:
        name: What its name tells.
        content: What its pickle holds.
        archive: The file itself.
    """

    name: FileName
    content: Document
    archive: TorchArchive


def open_zero_file(table: ArchiveTable, source: Source, name: FileName) -> ZeroFile:
    archive = open_zero_archive(table, source, name.path)
    return ZeroFile(name, archive.document(), archive)


def open_zero_archive(table: ArchiveTable, source: Source, path: str) -> TorchArchive:
    """Opens a file of DeepSpeed's that may hold something else than a dictionary."""
    return table.open(source, path, _ALLOWED)
