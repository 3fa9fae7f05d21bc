"""The reader of nanotron's checkpoints: a safetensors file for each parameter and rank.

The folder of a step is named by its number, and `latest.txt` beside the steps names the last one:

    7/checkpoint_metadata.json             version of the format, parallel sizes, last step
    7/config.yaml, 7/model_config.json     the configurations of the run and of the model
    7/model/model/decoder/0/pp_block/attn/qkv_proj/
        model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
    7/model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors
    7/optimizer, 7/lr_scheduler, 7/random  archives of `torch.save`, for each rank

The folders below `model` are the parts of a parameter's name, and the file's name has the last one.
Each file has one tensor, `data`. A shard's header says which slices of it are which of the whole,
and the whole shape. A file without ranks in its name has the whole tensor; parameters that are tied
are stored once, under one of their names.

Source: nanotron/serialize/{main,metadata,utils,weights}.py, nanotron/parallel/parameters.py
(`SlicesPair`), nanotron/trainer.py (`save_checkpoint`) and scripts/fix_checkpoint_bad_naming.py,
nanotron 0.1 to 0.4 and commit 2411b022: versions 1.2 to 1.5 of the format.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

from msgspec import Struct

from ckptkit.core.errors import FormatError, IncompleteCheckpointError, UnsupportedError
from ckptkit.core.index import RecordTable, RunFacts, TensorIndex
from ckptkit.formats.base import Candidate, FormatReader
from ckptkit.formats.parsing import COPY_BACK, MIXED_SAVES, is_count, parse_json, read_limited
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


def find_deep_folders(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the folders whose parameters are deeper than checkpoints are searched for."""
    steps = {posixpath.dirname(path) for path in paths if _STEP_FILE.search(path)}
    steps |= {_step_of(path) for path in paths if _PARAMETER.search(path)}
    return tuple(sorted(steps))


def _step_of(path: str) -> str:
    """Returns the folder of a step in the path of a parameter: what is above `model`."""
    parts = path.split("/")
    return "/".join(parts[: parts.index(_MODEL)]) if _MODEL in parts else posixpath.dirname(path)


class NanotronReader(FormatReader):
    """Reads the parameters that nanotron's `save_weights` writes."""

    name = "nanotron"
    order = 10  # its files are safetensors and archives, which are models to others
    expected = "'checkpoint_metadata.json' beside a folder 'model' with a file per parameter"

    def find_deep_folders(self, paths: Sequence[str]) -> Collection[str]:
        return find_deep_folders(paths)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises steps by their metadata, or by parameters that are named by ranks."""
        found: dict[str, list[str]] = {folder: [] for folder in find_deep_folders(paths)}
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

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses the metadata, the configurations and the header of every parameter's file."""
        # Imported late: every source is searched for this format, and few are of it.
        from ckptkit.formats.others.nanotron_shards import ShardTable

        folder = candidate.folder
        where = posixpath.join(source.location, folder).rstrip("/")
        if posixpath.join(folder, METADATA) not in candidate.files:
            raise IncompleteCheckpointError(
                f"has files of nanotron's parameters, but no {METADATA!r}, which is written last",
                where=where,
                hint="the save was interrupted: take an earlier step. If this is a folder inside a"
                " checkpoint, give the folder of the step",
            )
        facts = _StepFacts.read(source, candidate)
        files = [path for path in candidate.files if path.endswith(".safetensors")]
        if not files:
            raise IncompleteCheckpointError(
                f"has {METADATA!r}, but no file of a parameter below {_MODEL!r}",
                where=where,
                hint=COPY_BACK,
            )
        shards = ShardTable(source, facts.version, facts.sizes)
        for path in files:
            shards.add(path, path[len(folder) :].lstrip("/"))
        entries = shards.entries(where)
        facts.check_layers(entry.name for entry in entries.values())
        beside = [posixpath.join(folder, name) for name in (METADATA, RUN_CONFIG, MODEL_CONFIG)]
        refs = [source.stat(path) for path in beside if path in candidate.files]
        return TensorIndex(
            format=self.name,
            files=(*shards.files, *refs),
            records=RecordTable.of(shards.records),
            tensors=entries,
            run=facts.describe(shards.sizes),
        )


class _StepFacts(Struct, frozen=True):
    """What the files beside the parameters say.

    Attributes:
        where: The folder of the step, for messages.
        version: Version of the format.
        sizes: Ranks along each dimension; some may be unknown.
        step: The last training step, or None.
        model: The configuration of the model; empty if it is not there.
    """

    where: str
    version: str
    sizes: Mapping[str, int]
    step: int | None
    model: Mapping[str, Any]

    @classmethod
    def read(cls, source: Source, candidate: Candidate) -> _StepFacts:
        """Reads the metadata and, if they are there, the configurations."""
        where = posixpath.join(source.location, candidate.folder).rstrip("/")
        metadata = _read_object(source, posixpath.join(candidate.folder, METADATA))
        version = metadata.get("version")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"version of nanotron's format is {version!r}, expected one of"
                f" {', '.join(_VERSIONS)}",
                where=posixpath.join(where, METADATA),
                hint="look for a newer ckptkit",
            )
        named = {"tensor": "tp", "data": "dp", "context": "cp"}
        sizes = {kind: metadata[key] for kind, key in named.items() if key in metadata}
        metas = metadata.get("metas")
        step = metas.get("last_train_step") if isinstance(metas, dict) else None
        if "tensor" not in sizes or not all(map(_is_size, sizes.values())):
            raise FormatError(
                f"'tp', 'dp' and 'cp' are {list(sizes.values())}, expected numbers of ranks",
                where=posixpath.join(where, METADATA),
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
                        where=where,
                        hint=MIXED_SAVES,
                    )
            sizes |= {kind: size for kind, size in stored.items() if kind != "step"}
        model_config = posixpath.join(candidate.folder, MODEL_CONFIG)
        has_config = model_config in candidate.files
        return cls(
            where=where,
            version=version,
            sizes=sizes,
            step=step if is_count(step, _MAX_STEP) else None,
            model=_read_object(source, model_config) if has_config else {},
        )

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
                    where=self.where,
                    hint=COPY_BACK,
                )
        count = self.model.get("num_hidden_layers")
        if not _is_size(count) or not layers:
            return
        missing = next((layer for layer in range(count) if layer not in layers), None)
        if missing is not None:
            raise IncompleteCheckpointError(
                f"layer {missing} is missing; {MODEL_CONFIG!r} has {count:,} layers",
                where=self.where,
                hint=COPY_BACK,
            )
        if max(layers) >= count:
            raise FormatError(
                f"has layer {max(layers)}; {MODEL_CONFIG!r} has {count:,} layers",
                where=self.where,
                hint=MIXED_SAVES,
            )

    def describe(self, found: Mapping[str, int]) -> RunFacts:
        """Returns the facts of the run."""
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
                *((key, size) for key, size in settings if _is_size(size)),
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
            if len(held) == 1 and (kind == "step" or _is_size(int(held[0]))):
                found[kind] = int(held[0])
    return found


def _read_object(source: Source, path: str) -> dict[str, Any]:
    where = posixpath.join(source.location, path)
    content = parse_json(read_limited(source, path, _MAX_BYTES, "JSON"), where=where)
    if not isinstance(content, dict):
        raise FormatError("is not a JSON object", where=where)
    return content


def _is_size(value: object) -> TypeGuard[int]:
    return is_count(value, _MAX_SIZE) and value != 0
