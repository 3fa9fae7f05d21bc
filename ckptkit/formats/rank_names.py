"""The names of files that each rank wrote for itself, and what belongs together.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; accelerate/utils/fsdp_utils.py
(`save_fsdp_model`, `save_fsdp_optimizer`), 1.15. Others put the rank at the end of any name.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "optimizer", "extra", "metadata"]
_VERL = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<size>\d{1,7})_rank_(?P<rank>\d{1,7})\.pt"
)
_ACCELERATE = re.compile(
    r"(?P<kind>pytorch_model_fsdp|optimizer)(?:_(?P<number>\d{1,7}))?_rank(?P<rank>\d{1,7})\.bin"
)
# fairseq and metaseq; the parts of a model-parallel run are not those of one model.
_FAIRSEQ = re.compile(r"(?P<stem>(?!.*model_part-[1-9]).*)-shard(?P<rank>\d{1,7})\.pt")
_OTHER = re.compile(r"(?P<stem>.*?)[-_.]?rank[-_.]?(?P<rank>\d{1,7})\.(?:pt|pth|bin|ckpt)")
_OPTIMIZER = re.compile(r".*optim.*", re.IGNORECASE)
_METADATA = re.compile(r".*meta.*", re.IGNORECASE)  # which users of FairScale save beside
# What others save for each rank and what is no state of a model.
_NEITHER = re.compile(
    r".*(rng|random|extra|sched|scaler|sampler|loader|dl_state|train_state|args|grad|log).*",
    re.IGNORECASE,
)
# `lora_rank8.pt` tells the rank of matrices; processes are counted from 0.
_LOW_RANK = re.compile(r".*(lora|dora|adapter).*", re.IGNORECASE)
_KINDS: Mapping[str, Kind] = {"model": "model", "optim": "optimizer", "extra_state": "extra"}
VERL, ACCELERATE, FAIRSEQ = "verl", "accelerate", "fairseq"


@dataclass(frozen=True, slots=True)
class RankFile:
    """What the name of a file tells.

    Attributes:
        path: The file.
        kind: What it holds.
        rank: The rank that wrote it.
        world_size: The number of ranks, where the name tells it.
    """

    path: str
    kind: Kind
    rank: int
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Files that were written together.

    Attributes:
        folder: Where they lie.
        writer: Whose names they have; empty for those of others.
        stem: What their names have in common: a model's number, or the text before the rank.
        files: By kind and rank.
    """

    folder: str
    writer: str
    stem: str
    files: tuple[RankFile, ...]

    def of(self, kind: Kind) -> list[RankFile]:
        """Returns the files of one kind, by rank."""
        return [file for file in self.files if file.kind == kind]


_Place = tuple[str, str, str]  # folder, writer and stem


def families(paths: Sequence[str]) -> list[Family]:
    """Groups files by what they are part of.

    Args:
        paths: All files that may be among them.

    Returns:
        Families that have a model's files; the optimizer's go to the only model beside them.
    """
    found: dict[_Place, list[RankFile]] = defaultdict(list)
    for path in paths:
        parsed = _parsed(path)
        if parsed is not None:
            place, file = parsed
            found[place].append(file)
    models = {place for place, files in found.items() if _is_of_a_model(place[2], files)}
    groups = {place: list(found[place]) for place in sorted(models)}
    for place, files in sorted(found.items()):
        homes = [model for model in models if model[:2] == place[:2]]
        if place not in models and len(homes) == 1 and not place[1]:
            groups[homes[0]] += files
    return [Family(*place, tuple(sorted(files, key=_order))) for place, files in groups.items()]


def _is_of_a_model(stem: str, files: Sequence[RankFile]) -> bool:
    ranks = {file.rank for file in files if file.kind == "model"}
    return bool(ranks) and (0 in ranks or not _LOW_RANK.fullmatch(stem))


def _order(file: RankFile) -> tuple[str, int, int, str]:
    return file.kind, file.world_size or 0, file.rank, file.path


def _parsed(path: str) -> tuple[_Place, RankFile] | None:
    folder, name = posixpath.split(path)
    if match := _VERL.fullmatch(name):
        file = RankFile(path, _KINDS[match["kind"]], int(match["rank"]), int(match["size"]))
        return (folder, VERL, ""), file
    if match := _ACCELERATE.fullmatch(name):
        kind: Kind = "optimizer" if match["kind"] == "optimizer" else "model"
        file = RankFile(path, kind, int(match["rank"]))
        return (folder, ACCELERATE, match["number"] or "0"), file
    if match := _FAIRSEQ.fullmatch(name):
        return (folder, FAIRSEQ, match["stem"]), RankFile(path, "model", int(match["rank"]))
    match = _OTHER.fullmatch(name)
    if match is None or _NEITHER.fullmatch(match["stem"]):
        return None
    file = RankFile(path, _kind_of(match["stem"]), int(match["rank"]))
    return (folder, "", match["stem"]), file


def _kind_of(stem: str) -> Kind:
    if _OPTIMIZER.fullmatch(stem):
        return "optimizer"
    return "metadata" if _METADATA.fullmatch(stem) else "model"
