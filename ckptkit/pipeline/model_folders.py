"""Model folders that an output is modelled on: their headers and indexes, never their weights."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from contextlib import ExitStack

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError, NotACheckpointError
from ckptkit.core.index import Fqn, Shape, TensorEntry, TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.registry import read_index, recognise
from ckptkit.formats.weight_map import read_weight_map
from ckptkit.layouts.hf_weights import INDEX_NAME, SINGLE_NAME
from ckptkit.pipeline.opening import PathLike, opened
from ckptkit.pipeline.source_places import open_folder
from ckptkit.planning.like import FileMap
from ckptkit.storage.base import Source
from ckptkit.storage.places import open_source

# What `from_pretrained` looks for, first things first. Other weights may lie beside them, such as
# `consolidated.safetensors` in Mistral's repositories, or both kinds of one model.
_WEIGHTS = (SINGLE_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")


def dtypes_in(folder: PathLike, *, option: str) -> Mapping[Fqn, DType]:
    """Returns the element type of every tensor of a model, as its files' headers tell it.

    Args:
        folder: A model folder, or any checkpoint.
        option: What named it, for messages.

    Raises:
        InputError: If there is no model, or if a header is damaged.
        AmbiguousSourceError: If there are several.
    """
    return {entry.name: entry.dtype for entry in _model_of(folder, option)}


def shapes_in(folder: PathLike, *, option: str) -> Mapping[str, Shape]:
    """Returns the shape of every tensor of a model; see `dtypes_in`."""
    return {str(entry.name): entry.shape for entry in _model_of(folder, option)}


def shapes_there(folder: PathLike) -> Mapping[str, Shape]:
    """Returns the shapes of a model's tensors by their headers; none where it has no weights.

    Raises:
        InputError: If a header is damaged, or a file is missing.
    """
    with open_source(folder) as source:
        index = pretrained_index(source)
    return {} if index is None else {str(e.name): e.shape for e in index.of_part("model")}


def _model_of(folder: PathLike, option: str) -> list[TensorEntry]:
    with ExitStack() as stack:
        source = open_folder(stack, folder, option)
        index = pretrained_index(source)
        if index is not None:
            return list(index.of_part("model"))
    with opened(folder) as checkpoint:
        return list(checkpoint.index.of_part("model"))


def file_map_of(folder: PathLike, *, option: str) -> FileMap:
    """Returns which of a model's safetensors files holds which tensor.

    The index alone is enough: the weights that it names need not be there.

    Raises:
        NotACheckpointError: If the folder has neither an index nor `model.safetensors`.
        FormatError: If the index is damaged.
    """
    where = f"{option} {folder}"
    with ExitStack() as stack:
        source = open_folder(stack, folder, option)
        names = set(source.walk(0))
        if SINGLE_NAME in names:
            index = read_index(source, Candidate("safetensors", "", (SINGLE_NAME,), SINGLE_NAME))
            files = dict.fromkeys(map(str, index.tensors), SINGLE_NAME)
        elif INDEX_NAME in names:
            files = read_weight_map(source, INDEX_NAME)
        else:
            raise NotACheckpointError(
                f"neither {SINGLE_NAME!r} nor {INDEX_NAME!r} lies there",
                where=where,
                hint="name a folder as save_pretrained writes it, or download the index of it",
            )
    strange = next((file for file in files.values() if not file.endswith(".safetensors")), None)
    if strange is not None or not files:
        found = "no tensor" if strange is None else f"the file {strange!r}"
        raise FormatError(f"the index names {found}, against safetensors files", where=where)
    return FileMap(str(folder), {Fqn(name): file for name, file in files.items()})


def names_in(folder: PathLike) -> tuple[Fqn, ...]:
    """Returns the names of the tensors in a model folder; none where it has no weights.

    An index alone is enough here too.

    Raises:
        InputError: If a header or the index is damaged.
    """
    with open_source(folder) as source:
        there = set(source.walk(0))
        first = next((file for file in _WEIGHTS if file in there), "")
        if first.endswith(".index.json"):
            return tuple(map(Fqn, read_weight_map(source, first)))
        index = pretrained_index(source) if first else None
    return () if index is None else tuple(entry.name for entry in index.of_part("model"))


def pretrained_index(source: Source) -> TensorIndex | None:
    """Reads the headers of the weights that `from_pretrained` would load from a folder.

    Returns:
        The index, or None where the folder holds no such weights.

    Raises:
        InputError: If a header is damaged, or a file is missing.
    """
    names = list(source.walk(0))
    candidates = recognise(names)
    for wanted in _WEIGHTS:
        for candidate in candidates:
            if wanted in map(posixpath.basename, candidate.files):
                return read_index(source, candidate)
    return None
