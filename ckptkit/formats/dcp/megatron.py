"""What Megatron-Core writes beside the tables and data files of its `torch_dist` checkpoints.

`metadata.json` names the kind of checkpoint. `common.pt` is an archive of `torch.save` with all
that is not sharded: the arguments of the training, the iteration and hyperparameters of the
optimizer; since July 2026 it is the object `common_state` of the checkpoint instead.
`run_config.yaml` is what Megatron-Bridge writes, and `integrity.json` has the SHA-256 of each file.
Weights need none of them.

Megatron-FSDP's `fsdp_dtensor` is what torch itself writes of a dictionary: weights are DTensors
under `model`, everything else is an object of its own. Names are those of single layers and
experts; gate and up of `linear_fc1` are stored apart, with the endings `_w` and `_v`.

In `torch_dist`, keys are flat: those of an optimizer begin with `optimizer.` or
`chained_N.optimizer.`, all others are names in the model. Objects are stored for each part as
`NAME/shard_OFFSETS_SHAPE`.

Source: megatron/core/dist_checkpointing/{core,serialization,validation}.py,
megatron/core/optimizer/optimizer.py (`ChainedOptimizer`),
megatron/core/transformer/fsdp_dtensor_checkpoint.py, megatron/training/checkpointing.py,
Megatron-Core 0.7 to 0.19; megatron/bridge/training/checkpointing.py.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import FormatError, InputError, LimitError, UnsupportedError
from ckptkit.core.frameworks import HYBRID_LAYERS
from ckptkit.core.index import (
    Fqn,
    Key,
    KeyPath,
    Master,
    Problem,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.formats.parsing import (
    Read,
    is_count,
    parse_json,
    read_limited,
    stat_or_missing,
    stays_inside,
)
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.formats.pickle.torch_values import TensorRef, storage_ref
from ckptkit.formats.pickle.torch_zip import ZipArchive, open_archive
from ckptkit.formats.trees import EXTRA_STATE, TRAINING_VALUES
from ckptkit.storage.base import Source

KIND, COMMON, INTEGRITY = "metadata.json", "common.pt", "integrity.json"
RUN_CONFIG = "run_config.yaml"
# Beside the folder of the files, of verl and of NeMo 2: what Megatron-Core was configured with.
_ABOVE = ("transformer_config.json", "context/model.yaml")
COMMON_STATE = "common_state"
COMPANIONS = (KIND, COMMON, INTEGRITY, RUN_CONFIG)
_MAX_BYTES = 16 << 20
_MAX_STEP = 10**15
_READ_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_STATED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
}
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the latter up to 0.16
_ZERO_CENTRED = "layernorm_zero_centered_gamma"
_FLAGS = ("rotary_interleaved", _ZERO_CENTRED)
_CONFIGURED = (*_STATED, *_FLAGS, "kv_channels", "num_query_groups", "multi_latent_attention")
# A pattern of layers in YAML or in indented JSON.
_PATTERN = re.compile(
    rf"""(?m)^[ \t]+"?({"|".join(_PATTERNS)})"?:[ \t]*["']?([MGDE*+\-|/]+)["']?,?\r?$"""
)
_PEFT = re.compile(r"(?m)^peft:[ \t]*\r?\n(?:[ \t-].*\n?|\r?\n)*")  # a section of YAML
_ADAPTER = {"dim": "r", "alpha": "lora_alpha"}
_MAX_SIZE = 1 << 20
_SLIME = re.compile(r"slime\.")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?(optimizer)\.(?:(state)\.(\w+)\.(.+)|(.+))")
# Float32 copies that optimizers work on, among the states of a distributed one and of others.
_MASTERS = ("param", "fp32_param")
# Settings of a group that torch's optimizers have, too.
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "nesterov")
_DEPTH = 3  # at which groups are in the state of an optimizer, or of several
UNNAMED_GROUPS = "Megatron-Core does not store which parameters are in which group"
_DECAYS = (
    f"{UNNAMED_GROUPS}: biases and vectors are in the one without weight decay, as Megatron-LM puts"
    " them by default"
)
_NO_GROUPS = (
    f"{UNNAMED_GROUPS}, and these differ in more than weight decay: groups of the optimizer are"
    " left out"
)
_CONTAINER = re.compile(r"(model\d*|rng_state|opt_param_scheduler|rerun_state_machine)\.(.+)")
_ITERATION = re.compile(r"iter_0*(\d{1,15})")  # a folder of Megatron-LM
_NUMBERED_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d{1,7})((?:_[wv])?)"
)


def split_key(key: str) -> KeyPath:
    """Splits a flat key into its state dict and the rest; a name in the model is left whole.

    Several optimizers, such as that of experts, have states of different parameters.

    >>> split_key("chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight")
    ('optimizer', 'state', 'decoder.final_layernorm.weight', 'exp_avg')
    """
    if found := _OPTIMIZER.fullmatch(key):
        container, state, kind, name, rest = found.groups()
        return (container, rest) if rest else (container, state, name, kind)
    if found := _CONTAINER.fullmatch(key):
        return found[1], found[2]
    return (key,)


class CommonState(Struct, frozen=True):
    """What was found of the run; sizes are by dimension, in ranks.

    The framework is empty where the arguments are those of Megatron-LM, or none are there. The
    settings are those of `RunFacts`.
    """

    step: int | None = None
    sizes: Mapping[str, int] | None = None
    world_size: int | None = None
    framework: str = ""
    settings: tuple[tuple[str, int], ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()  # of the optimizer, without their members
    taken_steps: float | None = None  # what the optimizer counted


def parse_common(read: Read, size_bytes: int, *, where: str) -> CommonState:
    """Parses an archive with the common state; no class of it is imported."""
    root, archive = _open_state(read, size_bytes, where=where)
    if (
        isinstance(root, list) and len(root) == 1
    ):  # an object of a checkpoint is a list of its parts
        (root,) = root
    if not isinstance(root, dict):
        raise FormatError("holds no dictionary", where=where)
    groups, counted = [], []
    for state in _find_states(root.get("optimizer"), _DEPTH):
        own = state.get("param_groups")
        groups += [group for group in own if isinstance(group, dict)] if own else []
        inner = state.get("state")
        counted += [inner.get("common_step")] if isinstance(inner, dict) else []
    counted += [group.get("step") for group in groups]
    steps = {step for value in counted if (step := _read_number(value, archive)) is not None}
    return replace(
        read_common(root),
        groups=tuple(groups),
        taken_steps=steps.pop() if len(steps) == 1 else None,
    )


def _find_states(value: object, depth: int) -> Iterator[dict[Any, Any]]:
    """Yields the states of optimizers that have groups: one, or those of several in it."""
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        yield value
    elif isinstance(value, dict) and depth:
        for inner in value.values():
            yield from _find_states(inner, depth - 1)


def _read_number(value: object, archive: ZipArchive) -> float | None:
    """Returns a number, or that of a tensor with one element."""
    if isinstance(value, TensorRef) and value.shape == () and value.dtype.name == "float32":
        start, _, _ = archive.extent(value.storage)
        at = start + value.storage_offset * value.dtype.itemsize
        (number,) = struct.unpack("<f", archive.read(at, at + value.dtype.itemsize))
        return float(number)
    return float(value) if isinstance(value, int | float) else None


def parse_state(read: Read, size_bytes: int, *, where: str) -> object:
    """Parses an archive with values that are not sharded; no class of it is imported."""
    return _open_state(read, size_bytes, where=where)[0]


def _open_state(read: Read, size_bytes: int, *, where: str) -> tuple[object, ZipArchive]:
    if size_bytes > _MAX_BYTES:
        raise LimitError(f"has {size_bytes:,} bytes, at most {_MAX_BYTES:,} are read", where=where)
    archive = open_archive(read, size_bytes, where=where)
    pickle = archive.pickle()
    root = parse_pickle(pickle, TRAINING_VALUES, where=where, persistent=storage_ref)
    return root, archive


def read_common(root: Mapping[Any, Any]) -> CommonState:
    """Returns what the common state, or the state of one rank, says of the run."""
    fields = find_arguments(root)
    step = root.get("iteration", root.get("global_step"))  # NeMo's name is that of Lightning
    world_size = fields.get("world_size")
    sizes = {kind: fields.get(name) for kind, name in _SIZES.items()}
    return CommonState(
        step=step if is_count(step, _MAX_STEP) else None,
        sizes={kind: size for kind, size in sizes.items() if is_size(size)},
        world_size=world_size if is_size(world_size) else None,
        framework="slime" if _SLIME.match(str(fields.get("rollout_function_path"))) else "",
        settings=_find_settings(fields),
    )


def _find_settings(fields: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Returns what arguments say of the model, under the keys of Transformers' configurations.

    Queries have groups if `group_query_attention` says so; otherwise `num_query_groups` has its
    default. Multi-latent attention uses neither it nor `kv_channels`.
    """
    found = {key: fields.get(name) for name, key in _STATED.items()}
    pattern = next((fields[name] for name in _PATTERNS if isinstance(fields.get(name), str)), "")
    if pattern:  # `num_layers` counts its symbols; two of them can be one layer elsewhere
        layers = pattern.partition("/")[0].replace("|", "")
        found |= {"num_hidden_layers": None, HYBRID_LAYERS: len(layers)}
    if fields.get("multi_latent_attention") is not True:
        found["head_dim"] = fields.get("kv_channels")
        grouped = fields.get("group_query_attention")
        if isinstance(grouped, bool):
            name = "num_query_groups" if grouped else "num_attention_heads"
            found["num_key_value_heads"] = fields.get(name)
    flags = {name: fields.get(name) for name in _FLAGS}
    if "apply_layernorm_1p" in fields:  # Megatron-LM's own name
        flags[_ZERO_CENTRED] = fields["apply_layernorm_1p"]
    return (
        *((key, size) for key, size in found.items() if is_size(size)),
        *((key, flag) for key, flag in flags.items() if isinstance(flag, bool)),
    )


def find_arguments(root: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the arguments of the training in a state; empty without them."""
    args = root.get("args")
    fields = args.state if isinstance(args, InertObject) else args
    return fields if isinstance(fields, dict) else {}


def read_kind(source: Source, path: str, *, is_megatron: bool) -> str | None:
    """Returns the `sharded_backend` of `metadata.json`, or None if another program wrote it."""
    where = posixpath.join(source.location, path)
    try:
        content = parse_json(read_limited(source, path, _MAX_BYTES, KIND), where=where)
    except InputError:
        if is_megatron:
            raise
        return None
    kind = content.get("sharded_backend") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        return None
    if kind == "zarr":
        raise UnsupportedError(
            "a checkpoint of Megatron-Core's backend 'zarr' is not read",
            where=where,
            hint="convert it to 'torch_dist' with Megatron-Core up to 0.11",
        )
    return kind


def name_states(index: TensorIndex, common: CommonState) -> TensorIndex:
    """Adds to the states of an optimizer what is in no tensor: steps, and settings of groups.

    Float32 copies of parameters become master copies of the model's tensors.

    Source: megatron/core/dist_checkpointing/optimizer.py (`optim_state_to_sharding_state`),
    megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_fully_reshardable`) and
    optimizer.py, `_get_param_groups` of optimizer/__init__.py, Megatron-Core 0.16 to 0.19.
    """
    tensors = dict(index.tensors)
    models = {entry.name: entry for entry in tensors.values() if entry.part == "model"}
    vectors: dict[str, bool] = {}
    for entry in list(index.of_part("optimizer")):
        if entry.key_path[1:2] != ("state",):
            continue
        name, kind = Fqn(str(entry.key_path[2])), entry.key_path[3]
        is_stacked = name.startswith("decoder.layers.") and not name.split(".")[2].isdigit()
        vectors[name] = name.endswith(".bias") or len(entry.shape) - is_stacked <= 1
        if kind in _MASTERS:
            tree = f"{entry.tree}.{kind}"
            path = (tree, str(name))
            tensors[entry.key] = replace(entry, name=name, tree=tree, part="other", key_path=path)
            model = models.get(name)
            if model is not None and model.dtype != entry.dtype:
                master = Master(entry.key, entry.dtype)
                tensors[model.key] = replace(model, master=master)
    values = dict(index.values)
    notes: tuple[str, ...] = ()
    if vectors and common.taken_steps is not None:
        values |= {("optimizer", "state", n, "step"): common.taken_steps for n in vectors}
    if vectors and common.groups:
        groups, notes = _make_groups(common.groups, vectors)
        for number, (settings, members) in enumerate(groups):
            for key, value in {**settings, "params": members}.items():
                values["optimizer", "param_groups", number, key] = value
    run = replace(index.run, notes=(*index.run.notes, *notes))
    return replace(index, tensors=tensors, values=values, run=run)


def _make_groups(
    stored: Sequence[Mapping[str, Any]], vectors: Mapping[str, bool]
) -> tuple[list[tuple[dict[str, Any], list[str]]], tuple[str, ...]]:
    """Returns groups with their members, which nothing but the default of Megatron-LM names."""
    found: dict[float, dict[str, Any]] = {}
    for group in stored:
        settings = {key: group[key] for key in _SETTINGS if key in group}
        decay, factor = settings.get("weight_decay", 0.0), group.get("wd_mult", 1.0)
        if not all(isinstance(one, int | float) for one in (decay, factor)):
            return [], (_NO_GROUPS,)
        settings["weight_decay"] = decay * factor
        if found.setdefault(settings["weight_decay"], settings) != settings:
            return [], (_NO_GROUPS,)
    if len(found) == 1:
        return [(next(iter(found.values())), list(vectors))], ()
    rest = [{**own, "weight_decay": None} for own in found.values()]
    if len(found) > 2 or 0.0 not in found or rest[0] != rest[1]:  # noqa: PLR2004  with and without
        return [], (_NO_GROUPS,)
    decaying = next(own for decay, own in found.items() if decay)
    flat = [name for name, is_vector in vectors.items() if is_vector]
    wide = [name for name, is_vector in vectors.items() if not is_vector]
    return [(decaying, wide), (found[0.0], flat)], (_DECAYS,)


def name_experts_apart(entries: Mapping[Key, TensorEntry]) -> dict[Key, TensorEntry]:
    """Gives experts, which Megatron-FSDP numbers at the end of names, their names in `torch_dist`.

    `experts.linear_fc1.weight3_w` becomes `experts.experts.3.linear_fc1.weight_w`.
    """
    renamed = {}
    for key, entry in entries.items():
        found = _NUMBERED_EXPERT.fullmatch(entry.name)
        name = f"{found[1]}experts.{found[3]}.{found[2]}{found[4]}" if found else entry.name
        renamed[key] = replace(entry, name=Fqn(name))
    return renamed


def read_facts(
    source: Source,
    files: Sequence[str],
    common: CommonState,
    run: RunFacts,
    kind: str = "torch_dist",
) -> RunFacts:
    """Adds what Megatron-Core's files say to the facts of a run."""
    sizes, settings = dict(common.sizes or {}), common.settings
    adapter: tuple[tuple[str, int], ...] = ()
    above = posixpath.dirname(posixpath.dirname(min(files, default="")))
    of_run = [path for path in files if posixpath.basename(path) == RUN_CONFIG]
    of_run = of_run or [posixpath.join(above, RUN_CONFIG)]
    for path in (*of_run, *(posixpath.join(above, name) for name in _ABOVE)):
        if stat_or_missing(source, path).size_bytes < 0:
            continue
        text = read_limited(source, path, _MAX_BYTES, "configuration").decode(errors="replace")
        if path in of_run:
            adapter = _find_adapter(text)
            values = {kind: _find_number(text, name) for kind, name in _SIZES.items()}
            sizes = {**{kind: size for kind, size in values.items() if is_size(size)}, **sizes}
        stated: dict[str, Any] = {name: _find_number(text, name) for name in _CONFIGURED}
        stated |= dict(_PATTERN.findall(text))
        # Only Megatron-LM has this argument: without groups, others have no number of them.
        grouped = {"group_query_attention": True} if is_size(stated["num_query_groups"]) else {}
        settings = settings or _find_settings({**stated, **grouped})
    return replace(
        run,
        step=common.step,
        writer=", ".join(filter(None, [common.framework, f"Megatron-Core {kind}", run.writer])),
        mesh=tuple((kind, sizes[kind]) for kind in _SIZES if kind in sizes),
        world_size=common.world_size or run.world_size,
        settings=(*settings, *adapter),
    )


def _find_adapter(text: str) -> tuple[tuple[str, int], ...]:
    """Returns rank and alpha of Megatron-Bridge's LoRA under the keys of PEFT."""
    found = _PEFT.search(text)
    values = {key: _find_number(found[0], name) for name, key in _ADAPTER.items()} if found else {}
    return tuple((key, value) for key, value in values.items() if is_size(value))


def _find_number(text: str, name: str) -> int | None:
    """Returns the number or truth value that a key has on every line of YAML or of indented JSON.

    None is returned where lines differ.
    """
    pattern = rf"""(?m)^[ \t]+"?{name}"?:[ \t]*(\d{{1,7}}|true|false),?[ \t]*\r?$"""
    lines = re.findall(pattern, text)
    if len(set(lines)) != 1:
        return None
    return int(lines[0]) if lines[0].isdigit() else lines[0] == "true"


def compare_iterations(step: int | None, folder: str, file: str) -> Iterator[Problem]:
    """Yields a problem if a file is of another iteration than its folder's name says."""
    name = posixpath.basename(folder.rstrip("/"))
    named = _ITERATION.fullmatch(name)
    if step is not None and named is not None and int(named[1]) != step:
        yield Problem(FormatError.code, file, f"is of iteration {step:,}, in the folder {name!r}")


def describe_ignored(values: Iterable[KeyPath]) -> tuple[str, ...]:
    """Returns a note about objects that hold no weights, if there are any."""
    names = (str(path[-1]).partition("/")[0] for path in values)
    count = sum(1 for name in names if name.endswith(EXTRA_STATE))
    if not count:
        return ()
    return (f"objects '{EXTRA_STATE}' of layers were ignored, they hold no weights: {count:,}",)


def check_integrity(source: Source, files: Sequence[str]) -> tuple[int, list[Problem]]:
    """Compares files with the SHA-256 in `integrity.json`; returns how many match, and problems."""
    expected = {
        posixpath.join(posixpath.dirname(listing), name): digest
        for listing in files
        if posixpath.basename(listing) == INTEGRITY
        for name, digest in _read_listing(source, listing).items()
    }
    found: dict[str, Problem | None] = {}

    def compare(paths: Iterator[str]) -> None:
        for path in paths:
            found[path] = _compare_digest(source, path, expected[path])

    run_crew(min(usable_cores(), len(expected)), iter(expected), compare)
    problems = [problem for path in expected if (problem := found[path]) is not None]
    return len(expected) - len(problems), problems


def _compare_digest(source: Source, path: str, expected: str) -> Problem | None:
    try:
        actual = _digest(source, path)
    except InputError as error:
        return Problem(error.code, path, f"{error.message}; {INTEGRITY} names it")
    if actual == expected:
        return None
    message = f"has SHA-256 {actual[:16]}…, {INTEGRITY} {expected[:16]}…"
    return Problem("digest-mismatch", path, message)


def _read_listing(source: Source, path: str) -> dict[str, str]:
    where = posixpath.join(source.location, path)
    content: Any = parse_json(read_limited(source, path, _MAX_BYTES, INTEGRITY), where=where)
    listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(
        isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in listed.values()
    ):
        raise FormatError("has no 'files' with a SHA-256 for each", where=where)
    algorithm = content.get("algorithm", "sha256")
    if algorithm != "sha256":
        raise UnsupportedError(f"digests are of {algorithm!r}, not of 'sha256'", where=where)
    for name in listed:
        if not stays_inside(name) or "/" in name or "\\" in name:
            raise FormatError(f"file name {name!r} is not one in the same folder", where=where)
    return listed


def _digest(source: Source, path: str) -> str:
    size = source.stat(path).size_bytes
    digest = hashlib.sha256()
    for start in range(0, size, _READ_BYTES):
        digest.update(source.read(path, start, min(start + _READ_BYTES, size)))
    return digest.hexdigest()


def is_size(value: object) -> TypeGuard[int]:
    """Returns whether a value can be a number of ranks, or of parts of a model."""
    return is_count(value, _MAX_SIZE) and value != 0
