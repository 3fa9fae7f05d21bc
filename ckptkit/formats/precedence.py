"""Which of the candidates in one place are the model, and which only accompany it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence

from ckptkit.formats.base import Candidate
from ckptkit.formats.foreign import ForeignReader
from ckptkit.formats.hf_shards import SHARDED_FOLDER, HfShardsReader
from ckptkit.formats.rank_files import RankFilesReader
from ckptkit.formats.torch_optimizer import TorchOptimizerReader

_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
# Formats that yield to a model beside them: what is only refused, and what a model was made from.
_LESSER = {ForeignReader.name, "zero", "universal"}
_SHARDS = HfShardsReader.name  # told of where they are compared with the model beside them
_BESIDE = {ForeignReader.name, TorchOptimizerReader.name}  # what is no checkpoint by itself
_OF_RANKS = RankFilesReader.name
_COPY_OF_RANKS = "huggingface"  # where verl puts the same weights again, gathered


def is_certain(candidate: Candidate) -> bool:
    """Tells whether names alone leave no doubt that a candidate is a checkpoint that we read.

    Files that are only refused, and `.pt` files of any name, may be part of what others read.
    """
    return candidate.format not in _BESIDE and (candidate.format != "torch" or _is_model(candidate))


def yields(candidate: Candidate) -> bool:
    """Tells whether a candidate's format makes it yield to a model beside it."""
    return candidate.format in _LESSER


def is_chosen_first(candidate: Candidate) -> bool:
    """Tells whether a candidate is certain to be a checkpoint, and yields to no other."""
    return is_certain(candidate) and not yields(candidate)


def main_file(candidate: Candidate) -> str:
    """Returns the name of a candidate's index, or of its first file."""
    names = [posixpath.basename(path) for path in candidate.files]
    return next((name for name in names if name.endswith(".index.json")), names[0])


def worth_reading(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops what accompanies a model, or is the same model in a lesser format.

    Beside a readable model these are loose `.pt` files, formats that are not read, and the
    `.bin` form of a model in safetensors.
    """
    safe = {c.folder for c in candidates if c.format == "safetensors" and _is_model(c)}
    left = [c for c in candidates if is_left_of(c, safe)]
    has_model = bool(safe) or any(
        c.format in {"dcp", _SHARDS} or (c.format == "torch" and _is_model(c)) for c in candidates
    )
    of_ranks = {c.folder for c in candidates if c.format == _OF_RANKS}

    def is_kept(candidate: Candidate) -> bool:
        if _is_copy(candidate, of_ranks):
            return False
        if yields(candidate) or candidate in left:
            return not has_model
        if candidate.format != "torch":
            return True
        has_better = has_model or bool(of_ranks)
        return candidate.folder not in safe if _is_model(candidate) else not has_better

    return [candidate for candidate in candidates if is_kept(candidate)]


def _is_copy(candidate: Candidate, of_ranks: Collection[str]) -> bool:
    """Tells whether a candidate is what verl gathered of the files of ranks beside it."""
    above, name = posixpath.split(candidate.folder)
    return name == _COPY_OF_RANKS and above in of_ranks


def is_left_of(candidate: Candidate, models: Collection[str]) -> bool:
    """Tells whether a candidate is the shards that one of the models was consolidated from.

    Args:
        candidate: What was recognised.
        models: Folders that hold models in safetensors.
    """
    if candidate.format != _SHARDS:
        return False
    above, name = posixpath.split(candidate.folder)
    return candidate.folder in models or (name == SHARDED_FOLDER and above in models)


def note_of_ignored(candidates: Sequence[Candidate], kept: Sequence[Candidate]) -> tuple[str, ...]:
    """Names the files of what is left alone beside a model; nothing where all is kept."""
    dropped = [c for c in candidates if c not in kept and c.format != _SHARDS]
    names = [c.files[0] for c in dropped]
    return (f"left alone beside the model: {', '.join(names)}",) if names else ()


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(main_file(candidate)) is not None
