"""Model folders that an output takes types, names or files from, and the optimizer's states.

Of model folders, headers and indexes are read, never weights.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from msgspec import Struct

from ckptkit.consumers.table import CONSUMERS
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.paths import find_model, open_folder, read_config_in
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    InputError,
    NotACheckpointError,
    RefusedError,
)
from ckptkit.core.index import Fqn, Shape, TensorEntry, TensorIndex
from ckptkit.core.text import counted, join_first
from ckptkit.formats.base import Candidate
from ckptkit.formats.others.fairseq2 import HINT_AT_PARTS, UNPROVEN_PARTS
from ckptkit.formats.parsing import read_weight_map
from ckptkit.formats.registry import read_index, recognise
from ckptkit.formats.safetensors.hf_shards import UNPROVEN, HfShardsReader
from ckptkit.formats.safetensors.reader import UNPROVEN_WHOLE
from ckptkit.hub_names.known_models import BASE_PREFIXES, is_made_by_model
from ckptkit.plan.layouts.hf import INDEX_NAME, SINGLE_NAME, FileMap
from ckptkit.plan.load_report import take_only
from ckptkit.plan.vocabulary import is_embedding, is_head
from ckptkit.runs.step_manifests import StepManifests
from ckptkit.storage.base import Source
from ckptkit.storage.overlay import OverlaySource
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source

# What `from_pretrained` looks for, in its order. A folder can have other weights, such as
# `consolidated.safetensors` in Mistral's repositories, or a model in both formats.
_SINGLE = tuple(dict.fromkeys(f"{one.stem}.safetensors" for one in CONSUMERS if one.is_split))
_INDEX = tuple(f"{name}.index.json" for name in _SINGLE)
_WEIGHTS = (
    *(name for pair in zip(_SINGLE, _INDEX, strict=True) for name in pair),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin"),
)
# `save_pretrained(variant="fp16")`; Hub repositories of pipelines have such files alone.
_VARIANT = re.compile(
    rf"(?:{'|'.join(name.removesuffix('.safetensors') for name in _SINGLE)})"
    r"\.\w+(?:-\d{5}-of-\d{5})?\.safetensors"
)


def read_shapes_if_any(folder: PathLike) -> Mapping[str, Shape]:
    """Returns the shapes of a model's tensors by its headers; none where it has no weights."""
    return {str(entry.name): entry.shape for entry in read_entries_if_any(folder)}


def read_entries_if_any(folder: PathLike) -> list[TensorEntry]:
    """Returns the tensors of a model folder by its headers; none where it has no weights."""
    with open_source(folder) as source:
        index = read_pretrained_index(source)
    return [] if index is None else list(index.of_part("model"))


def read_entries(folder: PathLike, *, option: str) -> list[TensorEntry]:
    """Returns the tensors of a model by the headers of its files."""
    with ExitStack() as stack:
        folder, _ = _find_folder(folder, option)
        source = open_folder(stack, folder, option)
        index = read_pretrained_index(source)
        if index is not None:
            return list(index.of_part("model"))
    with open_checkpoint(folder) as checkpoint:
        return list(checkpoint.index.of_part("model"))


def read_file_map(folder: PathLike, *, option: str) -> FileMap:
    """Returns which of a model's safetensors files holds which tensor.

    The index alone is enough; the weights may be missing. It may be named instead of its folder.
    """
    where = f"{option} {folder}"
    with ExitStack() as stack:
        place, is_index = _find_folder(folder, option)
        if not is_url(place) and local_path(place).is_file():
            raise NotACheckpointError(
                f"is a file, where a model folder or its {INDEX_NAME!r} was expected",
                where=where,
                hint=f"pass its folder: {local_path(place).parent}",
            )
        source = open_folder(stack, place, option)
        names = set(source.walk(0))
        single = next((name for name in _SINGLE if name in names and not is_index), "")
        listing = next((name for name in _INDEX if name in names), "")
        if single:
            index = read_index(source, Candidate("safetensors", "", (single,), single))
            files = dict.fromkeys(map(str, index.tensors), single)
        elif listing:
            files = read_weight_map(source, listing)
        else:
            raise NotACheckpointError(
                f"neither {SINGLE_NAME!r} nor {INDEX_NAME!r} is there",
                where=where,
                hint="name a folder as save_pretrained writes it, or download the index of it",
            )
    strange = next((file for file in files.values() if not file.endswith(".safetensors")), None)
    if strange is not None or not files:
        named = "no tensor" if strange is None else f"the file {strange!r}"
        raise FormatError(f"the index names {named}, against safetensors files", where=where)
    return FileMap(str(folder), {Fqn(name): file for name, file in files.items()})


def _find_folder(path: PathLike, option: str) -> tuple[Place, bool]:
    """Returns the folder of a model, and whether the index in it was named."""
    place = find_model(path, option)[0]
    above, name = posixpath.split(place)
    is_index = name in _INDEX
    return (place.beside(above or ".") if is_index else place), is_index


def read_names(folder: PathLike) -> tuple[Fqn, ...]:
    """Returns the names of the tensors in a model folder; none where it has no weights.

    An index alone is enough here too.
    """
    with open_source(folder) as source:
        there = set(source.walk(0))
        first = next((file for file in _WEIGHTS if file in there), "")
        if first.endswith(".index.json"):
            return tuple(map(Fqn, read_weight_map(source, first)))
        index = read_pretrained_index(source) if first else None
    return () if index is None else tuple(entry.name for entry in index.of_part("model"))


def read_pretrained_index(source: Source) -> TensorIndex | None:
    """Reads the headers of the weights that `from_pretrained` would load from a folder.

    Of a folder that has one variant of the weights and no others, these are read.
    """
    names = list(source.walk(0))
    candidates = recognise(names)
    for wanted in _WEIGHTS:
        for candidate in candidates:
            if wanted in map(posixpath.basename, candidate.files):
                return StepManifests(source, [candidate]).read_index(candidate)
    variants = [c for c in candidates if any(map(_VARIANT.fullmatch, c.files))]
    return StepManifests(source, variants).read_index(*variants) if len(variants) == 1 else None


def check_reach(
    checkpoint: OpenedCheckpoint, entries: Sequence[TensorEntry], models: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Compares shapes that are known only from shards with those of another model.

    Returns:
        Notes for the user where there is no model to compare with.
    """
    if UNPROVEN_PARTS in checkpoint.index.run.notes:
        _prove_parts(checkpoint, entries, models)
        return ()
    notes = [n for n in checkpoint.index.run.notes if n in {UNPROVEN, UNPROVEN_WHOLE}]
    is_of_shards = any(unit.candidate.format == HfShardsReader.name for unit in checkpoint.units)
    if not is_of_shards and not notes:
        return ()
    for option, folder in models.items():
        shapes = {}
        try:
            stored = [] if folder is None else read_entries(folder, option=option)
            shapes = {entry.name: entry.shape for entry in stored}
        except InputError:  # of --like there may be an index without its files
            if option == "--base":
                raise
        shared = [entry for entry in entries if entry.name in shapes]
        for entry in shared:
            expected = shapes[entry.name]
            # The vocabulary may differ if a configuration has its size.
            may_differ = not notes and (is_embedding(entry.name) or is_head(entry.name))
            if may_differ or len(expected) != len(entry.shape):
                continue
            if any(size < other for size, other in zip(entry.shape, expected, strict=True)):
                raise IncompleteCheckpointError(
                    f"the shards of {entry.name!r} reach to {list(entry.shape)}, there it has"
                    f" {list(expected)}: a shard after the last one is missing",
                    where=f"{option} {folder}",
                    hint="give the directory that holds the shards of every rank, or name the"
                    " model that the run was started from",
                )
        notes = [] if shared else notes
    return tuple(notes)


def _hint_at_prefix(written: AbstractSet[Fqn], known: AbstractSet[Fqn]) -> str:
    """Proposes to take off what stands before names that another model has."""
    for name in sorted(written):
        parts = name.split(".")
        for at in range(1, len(parts)):
            if Fqn(".".join(parts[at:])) in known:
                return f"pass {take_only('.'.join([*parts[:at], '']))} as well"
    return "name the model that the run was started from"


def _prove_parts(
    checkpoint: OpenedCheckpoint, entries: Sequence[TensorEntry], models: Mapping[str, str | None]
) -> None:
    """Refuses tensors that were put together from parts, and whose shapes no model proves."""
    shapes: dict[str, Shape] = {}
    for option, folder in models.items():
        if folder is None:
            continue
        try:
            shapes |= {e.name: e.shape for e in read_entries(folder, option=option)}
        except InputError:  # a folder with a configuration alone
            if option != "--base":
                continue
            # Late, since it is needed here only.
            from ckptkit.conversion.naming_program import ask_parameters

            config = read_config_in(folder, option)
            for parameter in ask_parameters(config, [entry.name for entry in entries]):
                shapes |= dict.fromkeys(parameter["names"], tuple(parameter["shape"]))
    for entry in entries:
        found = shapes.get(entry.name)
        if found == entry.shape:
            continue
        raise IncompleteCheckpointError(
            f"{entry.name!r} is put together from the parts of ranks to {list(entry.shape)}, and"
            + (
                " no other model says that this is its shape"
                if found is None
                else f" has {list(found)} in the model to compare with: a part is missing, or each"
                " rank has the whole of it"
            ),
            where=checkpoint.path,
            hint=HINT_AT_PARTS,
        )


_LISTED = 5


class Filling(Struct):
    """A model that an output takes tensors from which the source lacks."""

    opened: OpenedCheckpoint
    option: str
    taken: Sequence[TensorEntry] = ()  # known once the tensors of the output are

    def lacking(self, written: AbstractSet[Fqn]) -> list[TensorEntry]:
        """Returns the tensors that an output lacks."""
        entries = list(self.opened.index.of_part("model"))
        where, known = f"{self.option} {self.opened.path}", {entry.name for entry in entries}
        if known.isdisjoint(written):
            raise RefusedError(
                f"has none of the {len(written):,} tensors of the source, such as"
                f" {min(written, default='')!r}; the first there is {min(known, default='')!r}",
                where=where,
                hint=_hint_at_prefix(written, known),
            )
        lacking = [entry for entry in entries if entry.name not in written]
        for name in (entry.name for entry in lacking):
            for prefix in BASE_PREFIXES:
                if {f"{prefix}.{name}", name.removeprefix(f"{prefix}.")} & (written - {name}):
                    raise RefusedError(
                        f"has tensor {name!r}, which the source has with or without the prefix"
                        f" '{prefix}.'",
                        where=where,
                        hint="write the source alone, and pass a model whose names begin alike",
                    )
        packed = next(
            (e for e in lacking if e.dtype.kind == "float" and e.dtype.itemsize == 1), None
        )
        if packed is not None:
            raise RefusedError(
                f"has tensor {packed.name!r} in {packed.dtype.name}, the packed form of a weight",
                where=where,
                hint="pass the model with unpacked weights, as it was before it was quantized",
            )
        return [entry for entry in lacking if not is_made_by_model(entry.name)]

    def describe(self) -> str:
        """Returns a note on the tensors that are taken."""
        names = [repr(str(entry.name)) for entry in self.taken]
        listed = join_first(names, len(names), _LISTED)
        return f"{counted(len(names), 'tensor')} taken from {self.opened.path}: {listed}"


def open_filling(stack: ExitStack, path: PathLike, option: str) -> Filling:
    """Opens the model whose tensors complete an output."""
    place = find_model(path, option)[0]
    folder = open_folder(stack, place, option)
    index = read_pretrained_index(folder)
    if index is None:
        raise NotACheckpointError(
            "holds no weights to take tensors from",
            where=f"{option} {place}",
            hint="name a folder with the weights of the model, or its id on the Hub",
        )
    opened = OpenedCheckpoint(place, OverlaySource([folder]), "", (), index, None, ())
    return Filling(opened, option)
