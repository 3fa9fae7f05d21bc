"""How training frameworks nest their state: state dicts, the classes beside them, and their marks.

Which state dict a tensor belongs to follows from the path of keys to it. Keys that only one
framework writes identify it.

Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (`dump_checkpoint`),
lightning/fabric/strategies/model_parallel.py (`_save_checkpoint`),
lightning/fabric/utilities/data.py (`AttributeDict`), lightning 2.6;
torchtitan/components/checkpoint.py (`CheckpointManager`), torchtitan 0.2, and
components/optim/ema.py (`EMA.state_dict`) of its main branch; composer/core/state.py
(`State.state_dict`), composer 0.32.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    KeyPath,
    Part,
    Problem,
    Shape,
    TensorEntry,
)
from ckptkit.core.wrapper_names import MODULE, without_wrappers
from ckptkit.formats.parsing import is_count
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.pickle.objects import describe_objects, is_object
from ckptkit.formats.pickle.pickles import ordered_dict, walk_values
from ckptkit.formats.pickle.torch_archives import ArchiveTable, TorchArchive
from ckptkit.formats.pickle.torch_values import ALLOWED
from ckptkit.storage.base import Source

# Dictionary keys of an optimizer, of a model, and of what is neither.
_OPTIMIZER = re.compile(r"(\w+_)?optim(izer)?s?(_?\w+)?")
_STATE_DICT = r"(\w+_)?state_dict(_ema)?"
_MODEL = re.compile(
    r"(model|module|network|net|policy|generator|discriminator|encoder|decoder|transformer|unet"
    r"|backbone|student|teacher|actor|critic)s?(_?\d+)?|(net|gen|dis)_?[gd]"
    rf"|(model_|params_|weights_)?ema(_model|_params|_weights)?|(swa|avg)_model|{_STATE_DICT}",
    re.IGNORECASE,
)
_STATE_DICT_ONLY = re.compile(_STATE_DICT)
_NEITHER = re.compile(
    r"extra.*|.*rng.*|random_states?|\w*schedulers?(_\w+)?|\w*scaler(_\w+)?|data_?loaders?"
    r"|train_state|sampler|meta(data)?|client_state|args|config|callbacks|loops"
    r"|(datamodule_)?hyper_parameters|averaging_state"
)
_DDP_PREFIX = f"{MODULE}."
_MAX_DDP = 4  # DataParallel in DistributedDataParallel in AveragedModel, and one more
_EMA_COUNT = "n_averaged"  # a key of torch.optim.swa_utils.AveragedModel, next to `module.`
_PARAMETER_ENDINGS = (".weight", ".bias", "_proj", ".running_mean")
# How torchtitan keeps averages of weights, one for each decay; before 0.4, one without a name.
_AVERAGE = re.compile(r"(?P<tree>(?:.+\.)?ema)\.state\.(?P<name>.+)\.ema_params(?:\.(?P<key>\w+))?")
_GROUPS, _STATE = "param_groups", "state"  # keys of `Optimizer.state_dict`
EXTRA_STATE = "_extra_state"


class Membership(Struct, frozen=True):
    """The state dict of a tensor: its name and kind, and the tensor's name in it."""

    tree: str
    part: Part
    name: Fqn

    def entry(
        self, path: KeyPath, dtype: DType, shape: Shape, chunks: ChunkTable, key: str | None = None
    ) -> TensorEntry:
        """Returns the entry of the tensor; its key is the dotted path unless `key` is given."""
        return TensorEntry(
            key=Key(join_path(path) if key is None else key),
            key_path=path,
            name=self.name,
            tree=self.tree,
            part=self.part,
            dtype=dtype,
            shape=shape,
            chunks=chunks,
        )


def classify(
    paths: Sequence[KeyPath], *, where: str = "", values: Iterable[KeyPath] = ()
) -> list[Membership]:
    """Assigns tensors to models, optimizers and other state dicts.

    A dictionary key that names an optimizer or a model classifies everything below it, and so do
    the `param_groups` that every optimizer has, under any key. The key of a model below which an
    optimizer is holds both: `student.model` beside `student.optimizer`. Any other container is a
    model if its tensors are named like parameters, or if no other container could be one. Wrapper
    segments are removed from names of models. `values` are the paths of all values that are not
    tensors.
    """
    optimizers: set[KeyPath] = set()
    for path in (*paths, *values):
        for depth, step in enumerate(map(str, path)):
            if step == _GROUPS or step.startswith(f"{_GROUPS}."):
                optimizers.add(path[:depth])
                break
            if depth and path[depth + 1 : depth + 2] == (_STATE,) and _OPTIMIZER.fullmatch(step):
                optimizers.add(path[: depth + 1])  # saved without its groups
                break
    holders = {path[:depth] for path in optimizers for depth in range(1, len(path))}
    split = [_split(path, optimizers, holders) for path in paths]
    names = defaultdict(list)
    for container, name, part in split:
        if part is None:
            names[container].append(name)
    likely = {c for c, held in names.items() if any(map(is_name_of_weight, held))}
    certain = {c for c, _, part in split if part == "model"}
    models = certain | likely or set(names)
    memberships = [
        _find_average(path)
        or Membership(join_path(c), part or ("model" if c in models else "other"), Fqn(name))
        for path, (c, name, part) in zip(paths, split, strict=True)
    ]
    memberships = _without_wrappers(memberships)
    seen: dict[tuple[str, str], KeyPath] = {}
    for member, path in zip(memberships, paths, strict=True):
        before = seen.setdefault((member.tree, member.name), path)
        if before is not path and member.part == "model":
            raise FormatError(
                f"{join_path(before)!r} and {join_path(path)!r} are both named {member.name!r}",
                where=where,
                hint="names must stay distinct when wrapper segments are removed",
            )
    return memberships


Stored = tuple[DType, Shape, Sequence[Chunk]]
"""The element type of a tensor, its whole shape, and its chunks."""


def make_entries(
    tensors: Mapping[KeyPath, Stored],
    *,
    values: Iterable[KeyPath] = (),
    keys: Sequence[str] | None = None,
) -> dict[Key, TensorEntry]:
    """Returns the entries of tensors by their keys: the dotted paths unless `keys` are given."""
    entries: dict[Key, TensorEntry] = {}
    memberships = classify(list(tensors), values=values)
    for number, (path, (dtype, shape, chunks)) in enumerate(tensors.items()):
        table = chunks if isinstance(chunks, ChunkTable) else ChunkTable.of(chunks, len(shape))
        key = keys[number] if keys else None
        entry = memberships[number].entry(path, dtype, shape, table, key)
        if entries.setdefault(entry.key, entry) is not entry:
            raise FormatError(f"two tensors are called {entry.key!r}")
    return entries


def find_aliases(entries: Iterable[TensorEntry]) -> tuple[frozenset[Key], ...]:
    """Returns the keys of tensors that are the same view of the same bytes."""
    views: dict[object, set[Key]] = defaultdict(set)
    for entry in entries:
        table = entry.chunks
        if entry.elements and len(table):
            columns = (table.offsets, table.sizes, table.record, table.byte_offset)
            view = (*(column.tobytes() for column in columns), *table.strides.items())
            views[entry.dtype, entry.shape, view].add(entry.key)
    return tuple(frozenset(keys) for keys in views.values() if len(keys) > 1)


def _split(
    path: KeyPath, optimizers: AbstractSet[KeyPath], holders: AbstractSet[KeyPath]
) -> tuple[KeyPath, str, Part | None]:
    """Splits a path into container and name; the part is None if the keys do not determine it."""
    if () in optimizers and str(path[0]).partition(".")[0] in {_GROUPS, _STATE}:
        return (), join_path(path), "optimizer"
    for depth, step in enumerate(path[:-1]):
        if path[: depth + 1] in optimizers:
            return path[: depth + 1], join_path(path[depth + 1 :]), "optimizer"
        part = _part_of_key(str(step))
        if part == "model" and path[: depth + 1] in holders:
            continue
        if part is not None:
            cut = depth + 1
            while part != "other" and cut < len(path) - 1:
                # A step leads into an item of a list of containers, or a state dict in one.
                inner = path[cut]
                is_named = part == "model" and _STATE_DICT_ONLY.fullmatch(str(inner)) is not None
                if not isinstance(inner, int) and not is_named:
                    break
                cut += 1
            return path[:cut], join_path(path[cut:]), part
    return path[:-1], str(path[-1]), None


def is_name_of_weight(name: str) -> bool:
    return name.endswith(_PARAMETER_ENDINGS)


def is_weight(path: KeyPath, member: Membership) -> bool:
    """Returns whether a tensor is certainly of a model, by its name or by the key of that."""
    is_named = is_name_of_weight(member.name) or part_of_path(path[:-1]) == "model"
    return member.part == "model" and is_named


def _find_average(path: KeyPath) -> Membership | None:
    """Returns the membership of the average of a weight, which is stored like an optimizer's."""
    match = _AVERAGE.fullmatch(join_path(path))
    if match is None:
        return None
    tree = f"{match['tree']}.{match['key']}" if match["key"] else match["tree"]
    return Membership(tree, "average", Fqn(match["name"]))


def _part_of_key(key: str) -> Part | None:
    if _OPTIMIZER.fullmatch(key):
        return "optimizer"
    if _NEITHER.fullmatch(key):
        return "other"
    return "model" if _MODEL.fullmatch(key) else None


def part_of_path(path: KeyPath) -> Part | None:
    """Returns the part that keys on the path of a container determine; None if they do not."""
    return next(filter(None, (_part_of_key(str(step)) for step in path)), None)


def join_path(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _without_wrappers(memberships: Iterable[Membership]) -> list[Membership]:
    """Removes wrapper segments, and `module.` as often as all names of a model begin with it.

    AveragedModel's count of updates, which is no weight, is taken from the models that it wrapped.
    """
    cleaned = []
    for member in memberships:
        is_model = member.part in {"model", "average"}
        name = without_wrappers(member.name) if is_model else member.name
        part: Part = "other" if EXTRA_STATE in name.split(".") else member.part
        cleaned.append(Membership(member.tree, part, Fqn(name)))
    averaged: set[str] = set()
    for _ in range(_MAX_DDP):
        models = [m for m in cleaned if m.part == "model"]
        plain = {
            m.tree
            for m in models
            if m.name == _DDP_PREFIX
            or (m.name != _EMA_COUNT and not m.name.startswith(_DDP_PREFIX))
        }
        wrapped = {m.tree for m in models} - plain
        if not wrapped:
            break
        averaged |= {m.tree for m in models if m.tree in wrapped and m.name != _EMA_COUNT}
        cleaned = [
            Membership(m.tree, m.part, Fqn(m.name.removeprefix(_DDP_PREFIX)))
            if m.part == "model" and m.tree in wrapped
            else m
            for m in cleaned
        ]
    return [
        replace(m, part="other") if m.name == _EMA_COUNT and m.tree in averaged else m
        for m in cleaned
    ]


_ATTRIBUTES = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)
TRAINING_VALUES: Mapping[tuple[str, str], object] = {
    **ALLOWED,
    **{(module, "AttributeDict"): ordered_dict for module in _ATTRIBUTES},
}
"""`ALLOWED`, and a dictionary of Lightning's."""

LIGHTNING_META = "meta.pt"
_LIGHTNING_VERSION = "pytorch-lightning_version"
_COMPOSER_TIME = "timestamp"
_STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "num_updates", "iter")
_TITAN = frozenset({"train_state", "lr_scheduler", "optimizer"})
_MAX_STEP = 10**15


class Framework(Struct, frozen=True):
    """The framework that wrote a checkpoint."""

    name: str = ""
    version: str = ""
    step: int | None = None
    notes: tuple[str, ...] = ()  # files that could not be read and are not needed
    warnings: tuple[str, ...] = ()  # the note on objects of other code
    problems: tuple[Problem, ...] = ()  # files that are damaged and not needed


def detect_framework(root: object) -> Framework:
    """Returns the framework whose training loop wrote a dictionary, by its keys."""
    if not isinstance(root, dict):
        return Framework()
    state = root.get("state")
    if isinstance(state, dict) and isinstance(state.get(_COMPOSER_TIME), dict):
        return _describe_composer(state)
    version = root.get(_LIGHTNING_VERSION)
    steps = (root.get(key) for key in _STEP_KEYS)
    return Framework(
        name="Lightning Trainer" if version is not None else "",
        version=version if isinstance(version, str) else "",
        step=next((step for step in steps if is_count(step, _MAX_STEP)), None),
    )


def _describe_composer(state: Mapping[str, object]) -> Framework:
    """Returns what Composer's state says; its batches are counted over all epochs."""
    time: object = state[_COMPOSER_TIME]
    time = time.get("Timestamp", time) if isinstance(time, dict) else time
    batch = time.get("batch") if isinstance(time, dict) else None
    metadata = state.get("metadata")
    info = metadata.get("composer_env_info", metadata) if isinstance(metadata, dict) else None
    version = info.get("composer_version") if isinstance(info, dict) else None
    return Framework(
        name="Composer" if isinstance(version, str) else "",
        version=version if isinstance(version, str) else "",
        step=batch if is_count(batch, _MAX_STEP) else None,
    )


def read_lightning_meta(source: Source, path: str) -> Framework:
    """Returns the contents of Lightning's `meta.pt`, which the weights do not need."""
    try:
        file = ArchiveTable().open(source, path, TRAINING_VALUES)
    except (UnsafePickleError, UnsupportedError) as error:
        note = f"{posixpath.basename(path)} was left unread: {error.message}"
        return Framework("Lightning", notes=(note,))
    except InputError as error:
        return Framework("Lightning", problems=(Problem(error.code, path, error.message),))
    framework = detect_framework(file.root)
    warnings = describe_objects_in(file)
    return replace(framework, name=framework.name or "Lightning Fabric", warnings=warnings)


def problem_of(entry: TensorEntry, error: CkptkitError) -> Problem:
    """Returns the problem of a tensor that is in the index and cannot be read."""
    hint = error.hint if entry.part == "model" else "weights are written without --optimizer"
    return Problem(error.code, entry.key, error.message, hint)


def describe_objects_in(file: TorchArchive) -> tuple[str, ...]:
    """Returns a note on the objects of other code in a file; none if it has none."""
    found: dict[KeyPath, InertObject | Global] = {}
    values = walk_values(file.root, limit=file.most_values, where=file.where)
    with suppress(FormatError, LimitError):  # of values that nobody needs
        found.update((path, value) for path, value in values if is_object(value))
    return describe_objects(found)


def detect_framework_by_paths(paths: Iterable[KeyPath]) -> Framework:
    top_keys = {path[0] for path in paths if path}
    return Framework("torchtitan") if top_keys >= _TITAN else Framework()
