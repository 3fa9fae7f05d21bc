"""The reader of nanotron's checkpoints: a safetensors file for each parameter and rank.

The folder of a step is named by its number, and `latest.txt` beside the steps names the last one:

    7/checkpoint_metadata.json             version of the format, parallel sizes, last step
    7/config.yaml, 7/model_config.json     the configurations of the run and of the model
    7/model/model/decoder/0/pp_block/attn/qkv_proj/
        model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
    7/model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
    7/optimizer, 7/lr_scheduler, 7/random  archives of `torch.save`, for each rank

The folders below `model` are the parts of a parameter's name, and the file's name has the last one.
Each file has one tensor, `data`. A file without ranks in its name has the whole tensor; parameters
that are tied are stored once, under one of their names. The header of a shard has texts:
`unsharded_shape`, such as "(np.int64(64), 32)", and `local_global_slices_pairs`, such as
"0,16,None|None,None,None#32,48,None|None,None,None". Each pair is the slices of the stored tensor,
and those of the whole one, along each dimension; pairs are separated by ";".

Source: nanotron/serialize/main.py, weights.py, metadata.py (`TensorMetadata`) and utils.py
(`get_path`), nanotron/parallel/parameters.py (`SlicesPair`), nanotron/trainer.py
(`save_checkpoint`) and scripts/fix_checkpoint_bad_naming.py, nanotron 0.1 to 0.4 and commit
2411b022: versions 1.2 to 1.5 of the format.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.geometry import Defect, find_defect, flat_offset, row_major_strides
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    KeyPath,
    Record,
    RunFacts,
    Shape,
    Span,
    TensorIndex,
)
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.dcp.megatron import is_size
from ckptkit.formats.parsing import (
    COPY_BACK,
    MIXED_SAVES,
    FileTable,
    is_count,
    overflows,
    read_json_object,
    read_limited,
)
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.formats.trees import Stored, make_entries
from ckptkit.storage.base import Source

METADATA, MODEL_CONFIG, RUN_CONFIG = "checkpoint_metadata.json", "model_config.json", "config.yaml"
_VERSIONS = ("1.2", "1.3", "1.4", "1.5")
_MODEL = "model"
_MAX_BYTES = 16 << 20
_MAX_SIZE = 1 << 20
_MAX_STEP = 10**15
_STATES = re.compile(r"(optimizer|lr_scheduler|random)/[^/]+\.(pt|json)")
_PARAMETER = re.compile(
    r"(?:(?:^|/)pp_block/(?:[^/]+/)*model_[^/]+"
    r"|model_[^/]+_pp-rank-\d+-of-\d+_tp-rank-\d+-of-\d+[^/]*)\.safetensors$"
)
# A save that was interrupted has no metadata, but its folder has a number and the configuration.
_STEP_FILE = re.compile(r"(?:^|/)(?:checkpoint_metadata\.json|\d+/config\.yaml)$")
_LAYER = re.compile(r"(?:^|.*\.)decoder\.(?P<number>\d{1,6})\.(?P<rest>.+)")
# Keys of the configuration of a model, and the same in those of Transformers.
_SETTINGS = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",  # of Starcoder2
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
}
_ROTARY = "rope_interleaved"
_SILENT = (
    f"{MODEL_CONFIG!r} does not have {_ROTARY!r}: nanotron up to 0.4 turned neighbours in rotary"
    " embeddings, for which there is --map nanotron-llama-interleaved"
)


def _step_of(path: str) -> str:
    """Returns the folder of a step in the path of a parameter: what is above `model`."""
    parts = path.split("/")
    return "/".join(parts[: parts.index(_MODEL)]) if _MODEL in parts else posixpath.dirname(path)


class NanotronReader(FormatReader):
    """Reads the parameters that nanotron's `save_weights` writes."""

    name = "nanotron"
    order = 10  # its files are safetensors and archives, which are models to others
    expected = "'checkpoint_metadata.json' beside a folder 'model' with a file per parameter"
    endings = r"checkpoint_metadata\.json|/config\.yaml|model_[^/\n]+\.safetensors"

    def find_deep_folders(self, paths: Sequence[str]) -> Collection[str]:
        steps = {posixpath.dirname(path) for path in paths if _STEP_FILE.search(path)}
        return sorted(steps | {_step_of(path) for path in paths if _PARAMETER.search(path)})

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises steps by their metadata, or by parameters that are named by ranks."""
        found: dict[str, list[str]] = {folder: [] for folder in self.find_deep_folders(paths)}
        known = set(paths) if found else set()
        for path in paths if found else ():
            parts = path.split("/")
            depths = range(len(parts) - 1, -1, -1)
            depth = next((d for d in depths if "/".join(parts[:d]) in found), None)
            if depth is None:
                continue
            above, inside = "/".join(parts[:depth]), "/".join(parts[depth:])
            # Other programs may have numbered folders with a configuration and a model, too.
            is_step = posixpath.join(above, METADATA) in known
            is_inside = inside.startswith(f"{_MODEL}/") and inside.endswith(".safetensors")
            is_beside = inside in {METADATA, MODEL_CONFIG, RUN_CONFIG} or _STATES.fullmatch(inside)
            if is_beside or (is_step and is_inside) or _PARAMETER.search(inside):
                found[above].append(path)
        reason = f"files of parameters below {_MODEL!r}, beside {METADATA!r}"
        return [
            Candidate(self.name, folder, tuple(sorted(files)), reason)
            for folder, files in found.items()
            if any(map(_PARAMETER.search, files))
            or {METADATA, MODEL_CONFIG} <= {path[len(folder) :].lstrip("/") for path in files}
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        folder = candidate.folder
        if posixpath.join(folder, METADATA) not in candidate.files:
            raise IncompleteCheckpointError(
                f"has files of nanotron's parameters, but no {METADATA!r}, which is written last",
                hint="the save was interrupted: take an earlier step. If this is a folder inside a"
                " checkpoint, give the folder of the step",
            )
        facts = _StepFacts.read(source, candidate)
        files = [path for path in candidate.files if path.endswith(".safetensors")]
        if not files:
            raise IncompleteCheckpointError(
                f"has {METADATA!r}, but no file of a parameter below {_MODEL!r}", hint=COPY_BACK
            )
        table = FileTable()
        sizes: dict[str, int] = {}  # numbers of ranks, by kind, as the names of files have them
        shards: dict[str, list[_Shard]] = defaultdict(list)
        for path in files:
            with errors_at(posixpath.join(source.location, path)):
                name, ranks = _parse_path(path[len(folder) :].lstrip("/"))
                shards[name].append(_read_shard(source, table, path, ranks, facts, sizes))
        held: dict[KeyPath, Stored] = {}
        for name, own in shards.items():
            with errors_at(posixpath.join(source.location, posixpath.dirname(own[0].path))):
                held[name,] = _join_shards(name, own)
        entries = make_entries(held)
        facts.check_layers(entry.name for entry in entries.values())
        beside = [posixpath.join(folder, name) for name in (METADATA, RUN_CONFIG, MODEL_CONFIG)]
        refs = [source.stat(path) for path in beside if path in candidate.files]
        return table.index(self.name, entries, *refs, run=facts.describe(sizes))


class _StepFacts(Struct, frozen=True):
    version: str
    sizes: Mapping[str, int]  # ranks along each dimension; some may be unknown
    step: int | None  # the last training step
    model: Mapping[str, Any]  # its configuration; empty if it is not there

    @classmethod
    def read(cls, source: Source, candidate: Candidate) -> _StepFacts:
        path = posixpath.join(candidate.folder, METADATA)
        metadata = read_json_object(source, path, _MAX_BYTES, "JSON")
        version = metadata.get("version")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"version of nanotron's format is {version!r}, expected one of"
                f" {', '.join(_VERSIONS)}",
                where=posixpath.join(source.location, path),
                hint="look for a newer ckptkit",
            )
        named = {"tensor": "tp", "data": "dp", "context": "cp"}
        sizes = {kind: metadata[key] for kind, key in named.items() if key in metadata}
        metas = metadata.get("metas")
        step = metas.get("last_train_step") if isinstance(metas, dict) else None
        if "tensor" not in sizes or not all(map(is_size, sizes.values())):
            raise FormatError(
                f"'tp', 'dp' and 'cp' are {list(sizes.values())}, expected numbers of ranks",
                where=posixpath.join(source.location, path),
            )
        run_config = posixpath.join(candidate.folder, RUN_CONFIG)
        if run_config in candidate.files:
            text = read_limited(source, run_config, _MAX_BYTES, RUN_CONFIG)
            stored = _parse_run_config(text.decode(errors="replace"))
            for kind, size in stored.items():
                found = step if kind == "step" else sizes.get(kind, size)
                if found is not None and found != size:
                    raise FormatError(
                        f"{RUN_CONFIG!r} has {kind} {size:,}, {METADATA!r} has {found!r:.40}",
                        hint=MIXED_SAVES,
                    )
            sizes |= {kind: size for kind, size in stored.items() if kind != "step"}
        model_config = posixpath.join(candidate.folder, MODEL_CONFIG)
        model = {}
        if model_config in candidate.files:
            model = read_json_object(source, model_config, _MAX_BYTES, "JSON")
        return cls(version, sizes, step if is_count(step, _MAX_STEP) else None, model)

    def check_layers(self, names: Iterable[str]) -> None:
        """Refuses layers that lack a parameter, and more or fewer than the configuration has.

        Layers with and without experts have different parameters, but all of one kind are equal.
        """
        layers: dict[int, set[str]] = defaultdict(set)
        for name in names:
            if match := _LAYER.fullmatch(name):
                layers[int(match["number"])].add(match["rest"])
        kinds = {frozenset(held): number for number, held in layers.items()}
        for number, held in layers.items():
            fuller = next((kind for kind in kinds if held < kind), None)
            if fuller is not None:
                raise IncompleteCheckpointError(
                    f"layer {number} has no {min(fuller - held)!r}, as layer {kinds[fuller]} has",
                    hint=COPY_BACK,
                )
        count = self.model.get("num_hidden_layers")
        if not is_size(count) or not layers:
            return
        missing = next((layer for layer in range(count) if layer not in layers), None)
        if missing is not None:
            raise IncompleteCheckpointError(
                f"layer {missing} is missing; {MODEL_CONFIG!r} has {count:,} layers", hint=COPY_BACK
            )
        if max(layers) >= count:
            raise FormatError(
                f"has layer {max(layers)}; {MODEL_CONFIG!r} has {count:,} layers", hint=MIXED_SAVES
            )

    def describe(self, found: Mapping[str, int]) -> RunFacts:
        sizes = {**self.sizes, **found}
        kinds = ("tensor", "pipeline", "context", "data", "expert")
        world_size = None
        if {"tensor", "pipeline", "data"} <= sizes.keys():
            ranks = (sizes.get(kind, 1) for kind in kinds if kind != "expert")
            world_size = prod(ranks)
        settings = [(key, self.model.get(own)) for own, key in _SETTINGS.items()]
        rotary = self.model.get(_ROTARY)
        is_silent = self.model.get("is_llama_config") is True and _ROTARY not in self.model
        return RunFacts(
            world_size=world_size if is_count(world_size, _MAX_SIZE) else None,
            step=self.step,
            writer="nanotron",
            version=self.version,
            mesh=tuple((kind, sizes[kind]) for kind in kinds if kind in sizes),
            notes=(_SILENT,) if is_silent else (),
            settings=(
                *((key, size) for key, size in settings if is_size(size)),
                *(((_ROTARY, rotary),) if isinstance(rotary, bool) else ()),
            ),
        )


def _parse_run_config(text: str) -> dict[str, int]:
    """Returns the parallel sizes and the step of `config.yaml`, those that are plain numbers."""
    keys = {
        "parallelism": {
            "tp": "tensor",
            "pp": "pipeline",
            "dp": "data",
            "context_parallel_size": "context",
            "expert_parallel_size": "expert",
        },
        "general": {"step": "step"},
    }
    found: dict[str, int] = {}
    for block, names in keys.items():
        inside = re.search(rf"(?m)^{block}:[ \t]*\r?\n((?:[ \t]+\S.*(?:\r?\n|\Z))+)", text)
        if inside is None:
            continue
        for key, kind in names.items():
            held = re.findall(rf"(?m)^[ \t]+{key}:[ \t]*(\d{{1,15}})[ \t]*\r?$", inside[1])
            if len(held) == 1 and (kind == "step" or is_size(int(held[0]))):
                found[kind] = int(held[0])
    return found


_TENSOR = "data"
_SLICES = "local_global_slices_pairs"
_MAX_SLICES = 1 << 20  # characters of a header's slices
_FILE = re.compile(
    r"model_(?P<name>[^/]+?)(?:_pp-rank-(?P<pp>\d{1,7})-of-(?P<pps>\d{1,7})"
    r"_tp-rank-(?P<tp>\d{1,7})-of-(?P<tps>\d{1,7})"
    r"(?:_exp-rank-(?P<exp>\d{1,7})-of-(?P<exps>\d{1,7}))?)?\.safetensors"
)
_DOUBLED = re.compile(r"model_(?P<name>.+)\.safetensors")  # in the names of version 1.3
_KINDS = {"pipeline": "pp", "tensor": "tp", "expert": "exp"}
_SLICE = re.compile(r"(None|\d{1,18}),(None|\d{1,18}),(?:None|1)")
_SIZE = re.compile(r"(?:np\.int\d+\((\d{1,18})\)|(\d{1,18}))")


class _Shard(Struct, frozen=True):
    path: str
    record: int
    stored: HeaderTensor
    # by kind of rank, the rank and their number; empty for a whole parameter
    ranks: Mapping[str, tuple[int, int]]
    shape: Shape  # of the whole parameter
    # boxes of the stored tensor, and those of the whole one that they are
    pairs: tuple[tuple[Box, Box], ...]


def _read_shard(
    source: Source,
    table: FileTable,
    path: str,
    ranks: Mapping[str, tuple[int, int]],
    facts: _StepFacts,
    sizes: dict[str, int],
) -> _Shard:
    """Reads the header of a file; the numbers of ranks in its name are added to `sizes`."""
    for kind, (rank, size) in ranks.items():
        expected = sizes.setdefault(kind, facts.sizes.get(kind, size))
        if size != expected or rank >= size:
            raise FormatError(
                f"is of {kind} rank {rank} of {size}, in a save with {expected} {kind} ranks",
                hint=MIXED_SAVES,
            )
    file = source.stat(path)
    header = read_header(source, file)
    if [tensor.name for tensor in header.tensors] != [_TENSOR]:
        names = ", ".join(quote(tensor.name) for tensor in header.tensors[:3]) or "none"
        raise FormatError(f"has the tensors {names}, expected {_TENSOR!r} alone")
    (stored,) = header.tensors
    if ranks:
        version = header.metadata.get("version")
        if version != facts.version:
            raise FormatError(
                f"is of version {version!r}, the checkpoint of {facts.version!r}", hint=MIXED_SAVES
            )
        shape, pairs = _parse_slices(header.metadata, stored.shape)
    else:
        if _SLICES in header.metadata:
            raise FormatError(
                "has the slices of a shard, but no rank in its name",
                hint="give the file the name under which nanotron saved it",
            )
        shape, whole = stored.shape, Box((0,) * len(stored.shape), stored.shape)
        pairs = ((whole, whole),)
    if overflows(shape, stored.dtype):
        raise FormatError(f"size of shape {list(shape)} overflows")
    record = table.add_record(Record(table.add_file(file), stored.start, stored.stop))
    return _Shard(path, record, stored, ranks, shape, pairs)


def _join_shards(name: str, shards: Sequence[_Shard]) -> Stored:
    """Returns a parameter, each of whose elements has to be in one file."""
    first = shards[0]
    for other in shards[1:]:
        facts = [
            (s.ranks.get("pipeline"), s.ranks.keys(), s.shape, s.stored.dtype)
            for s in (first, other)
        ]
        if facts[0] != facts[1]:
            shown = (
                f"{posixpath.basename(s.path)!r} ({s.stored.dtype.name} {list(s.shape)})"
                for s in (first, other)
            )
            raise FormatError(
                f"{quote(name)} is in files that contradict each other: {', '.join(shown)}",
                hint=MIXED_SAVES,
            )
    chunks = []
    for shard in shards:
        strides = row_major_strides(shard.stored.shape)
        for local, whole in shard.pairs:
            is_part = local.sizes[1:] != shard.stored.shape[1:]
            chunks.append(
                Chunk(
                    whole,
                    shard.record,
                    byte_offset=flat_offset(local.offsets, strides) * shard.stored.dtype.itemsize,
                    strides=strides if is_part else None,
                    rank=shard.ranks.get("tensor", (0, 1))[0],
                )
            )
    shape, defect = first.shape, _find_defect(chunks, first.shape)
    if defect is not None and defect.copies:
        raise FormatError(
            f"{quote(name)} of shape {list(shape)} has elements in {defect.copies} of its"
            f" {len(shards):,} files, from {_first_of(defect.place)} on",
            hint="the slices in a header are wrong, or a file is of another rank",
        )
    if defect is not None:
        absent = (
            f"; no file is of {kind} rank {rank} of {size}"
            for kind, (_, size) in first.ranks.items()
            for rank in range(size)
            if kind != "pipeline" and all(shard.ranks[kind][0] != rank for shard in shards)
        )
        raise MissingFileError(
            f"{quote(name)} of shape {list(shape)} has no file for the elements from"
            f" {_first_of(defect.place)} on{next(absent, '')}",
            hint=COPY_BACK,
        )
    return first.stored.dtype, shape, chunks


def _find_defect(chunks: Sequence[Chunk], shape: Shape) -> Defect | None:
    table = ChunkTable.of(chunks, len(shape))
    return find_defect(table.take(np.flatnonzero(table.elements() > 0)), shape)


def _first_of(place: Box | Span) -> str:
    return str(list(place.offsets)) if isinstance(place, Box) else f"{place.start:,}"


def _parse_path(inside: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Returns the parameter of a file, and its ranks.

    Folders below `model` are of the name.
    """
    _, *folders, file = inside.split("/")
    match = _FILE.fullmatch(file)
    if match is None:
        raise FormatError(
            f"file name {file!r} is not one of nanotron's: 'model_NAME.safetensors', or"
            " 'model_NAME_pp-rank-P-of-N_tp-rank-R-of-N.safetensors'",
            hint="take the file away",
        )
    name = match["name"]
    doubled = _DOUBLED.fullmatch(name)
    ranks = {
        kind: (int(match[key]), int(match[f"{key}s"]))
        for kind, key in _KINDS.items()
        if match[key] is not None
    }
    return ".".join([*folders, doubled["name"] if doubled and ranks else name]), ranks


def _parse_slices(
    metadata: Mapping[str, str], stored: Shape
) -> tuple[Shape, tuple[tuple[Box, Box], ...]]:
    """Returns the whole shape, and which boxes of a stored tensor are which of the whole one."""
    whole_shape, slices = (metadata.get(key) for key in ("unsharded_shape", _SLICES))
    if whole_shape is None or slices is None:
        raise UnsupportedError(
            f"header has no 'unsharded_shape' and {_SLICES!r}, which place a shard",
            hint="load the checkpoint with nanotron and save it again, which writes them",
        )
    if max(len(whole_shape), len(slices)) > _MAX_SLICES:
        raise LimitError(f"slices have more than {_MAX_SLICES:,} characters")
    shape = _parse_shape(whole_shape)
    if len(shape) != len(stored):
        raise FormatError(
            f"'unsharded_shape' is {list(shape)}, the tensor has shape {list(stored)}"
        )
    pairs = []
    for text in slices.split(";"):
        local, _, whole = text.partition("#")
        boxes = _parse_box(local, stored), _parse_box(whole, shape)
        if boxes[0].sizes != boxes[1].sizes:
            raise FormatError(
                f"slices {text[:80]!r} put a box of {list(boxes[0].sizes)} in one of"
                f" {list(boxes[1].sizes)}"
            )
        pairs.append(boxes)
    defect = _find_defect([Chunk(local, 0) for local, _ in pairs], stored)
    if defect is not None:
        raise FormatError(
            f"slices use the elements of shape {list(stored)} from {_first_of(defect.place)} on"
            f" {defect.copies} times, expected once",
            hint="the header is damaged, or was made by another program; take another copy",
        )
    return shape, tuple(pairs)


def _parse_shape(text: str) -> Shape:
    inside = text.removeprefix("(").removesuffix(")").rstrip(",")
    sizes = [_SIZE.fullmatch(part.strip()) for part in inside.split(",")] if inside else []
    if not text.startswith("(") or not text.endswith(")") or None in sizes:
        raise FormatError(f"'unsharded_shape' is {text[:80]!r}, not a shape")
    return tuple(int(size[1] or size[2]) for size in sizes if size is not None)


def _parse_box(text: str, shape: Shape) -> Box:
    bounds = []
    for part in text.split("|") if shape or text else []:
        match = _SLICE.fullmatch(part)
        if match is None:
            raise FormatError(f"{part[:80]!r} is not a slice with a step of 1")
        bounds.append((match[1], match[2]))
    if len(bounds) != len(shape):
        raise FormatError(f"{text[:80]!r} has not one slice for each of {list(shape)}")
    offsets, sizes = [], []
    for (start, stop), size in zip(bounds, shape, strict=True):
        low, high = 0 if start == "None" else int(start), size if stop == "None" else int(stop)
        if not low <= high <= size:
            raise FormatError(f"slice [{low:,}, {high:,}) is not inside of {size:,}")
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))
