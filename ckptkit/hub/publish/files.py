"""Which files of a folder go to the Hub, and which files there are of an earlier layout."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER
from ckptkit.plan.side_files import is_side_file

CARD = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
NEVER = "training_args.bin"
"""Holds the token of whoever trained, in clear."""
_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model|consolidated)(-\d+-of-\d+|\.\d+(-of-\d+)?)?"
    r"\.(safetensors|bin)(\.index\.json)?"
)
_DOCUMENTS = re.compile(r"(README|MODEL_CARD|LICEN[CS]E|NOTICE|USE_POLICY)(\.\w+)?", re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"(optimizer|scheduler|scaler)(_\d+)?\.(bin|pt)|rng_state(_\d+)?\.pth"
    r"|random_states_\d+\.pkl|trainer_state\.json"
)
_TENSORS = r"(safetensors|bin|pt|pth|pth\.tar|ckpt|pkl)"
_STATES = (  # how the files of a step begin that hold tensors or states
    "adapter|bf16|checkpoint|ckpt|common|consolidated|custom_checkpoint|data|dataloader|dl_state"
    "|ema|embedding|epoch|exp_avg|expert|extra_state|fp16|fp32|last|layer|metadata|meta|model"
    "|mp_rank|optim|optimizer|pytorch_model|random_states|rank|rng_state|sampler|scaler|scheduler"
    "|shard|state|step|train_state|weights|zero_pp_rank|zero"
)
_OF_STEP = re.compile(
    r"\.metadata|\.snapshot_metadata|\w+\.distcp|latest(_universal)?|zero_to_fp32\.py"
    r"|latest_checkpointed_iteration\.txt|trainer_state\.json|fsdp_config\.json"
    r"|(run|flat_parameters|metadata|meta)\.json"
    rf"|({_STATES})([\w.=-]*)\.{_TENSORS}(\.index\.json)?"
)
_SNAPSHOT = ".snapshot_metadata"
_OF_SNAPSHOT = re.compile(r"(\d+|batched|replicated|sharded)/.+")
_DATA = re.compile(rf"[^.].*\.({_TENSORS[1:-1]}|csv|jinja|json|jsonl|model|npy|npz|txt|ya?ml)")
_CODE = "*.py"
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)|adapter_config\.json")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that stays where it is, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files of a folder, sorted into those that go to the Hub and those that do not."""

    files: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def choose_files(
    paths: Iterable[str], *, code: bool, optimizer: bool, include: Sequence[str] = ()
) -> Chosen:
    """Sorts the files of a model folder by name.

    Args:
        paths: All files, relative to the folder.
        code: Whether a configuration names python files, which then go too.
        optimizer: Whether the state of the optimizer, and of random numbers, goes too.
        include: Patterns of further files.
    """
    files, skipped = [], []
    for path in sorted(paths):
        reason = _reason(path, code=code, optimizer=optimizer)
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        if posixpath.basename(path) == NEVER:
            skipped.append(Skipped(path, "it can hold the token that training used"))
        elif reason and not wanted:
            skipped.append(Skipped(path, reason))
        else:
            files.append(path)
    return Chosen(tuple(files), tuple(skipped))


def choose_step_files(
    paths: Iterable[str], recorded: Collection[str], include: Sequence[str] = ()
) -> Chosen:
    """Sorts the files of a step that goes to the Hub as it is.

    Args:
        paths: All files, relative to the step's folder.
        recorded: Those that its manifest names.
        include: Patterns of further files.
    """
    all_paths = sorted(paths)
    is_snapshot = _SNAPSHOT in all_paths
    files, skipped = [], []
    for path in all_paths:
        name = posixpath.basename(path)
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        known = _is_of_step(path, name) or (is_snapshot and _OF_SNAPSHOT.fullmatch(path))
        if path in recorded or path.startswith(f"{SIDE_FOLDER}/"):
            known = known or _DATA.fullmatch(name)
        if name == NEVER:
            skipped.append(Skipped(path, "it can hold the token that training used"))
        elif known or wanted:
            files.append(path)
        else:
            skipped.append(Skipped(path, "not a file that a step is known to be made of"))
    return Chosen(tuple(files), tuple(skipped))


def _is_of_step(path: str, name: str) -> bool:
    if fnmatchcase(name, _CODE):
        return _OF_STEP.fullmatch(name) is not None
    kinds = (_OF_STEP, _WEIGHTS, _DOCUMENTS)
    return (
        name in {MANIFEST_NAME, ADAPTER_CONFIG}
        or any(kind.fullmatch(name) for kind in kinds)
        or is_side_file(name)
        or is_side_file("/".join(path.split("/")[-2:]))  # additional_chat_templates
    )


def is_weights(path: str) -> bool:
    return _WEIGHTS.fullmatch(posixpath.basename(path)) is not None


def stale_files(remote: Iterable[str], local: Iterable[str], whole: str = "") -> list[str]:
    """Returns what has to go from a repository so that it holds one model, the one pushed.

    Loaders would take weight files of another number, or kind, before the new ones, or after
    them; an adapter's configuration beside a model has its base loaded in the model's place.

    Args:
        remote: The files that the repository holds.
        local: Those that are pushed.
        whole: A folder that is pushed as it is: of an earlier one nothing stays.
    """
    new = set(local)
    if not any(is_weights(path) for path in new):
        return []
    has_model = any(is_weights(path) and not _ADAPTER.fullmatch(path) for path in new)
    return sorted(
        path
        for path in set(remote) - new
        if path == MANIFEST_NAME
        or _ADAPTER.fullmatch(path)
        or (has_model and is_weights(path) and "/" not in path)
        or (whole and path.startswith(f"{whole}/"))
    )


def _reason(path: str, *, code: bool, optimizer: bool) -> str:
    folder, name = posixpath.split(path)
    if path == MANIFEST_NAME:
        return ""
    if _OPTIMIZER.fullmatch(name):
        return "" if optimizer and not folder else "state of the optimizer or of random numbers"
    if fnmatchcase(name, _CODE):
        return "" if code else "no configuration names this python file"
    if _belongs(path, folder, name):
        return ""
    return "not a file of a model, its tokenizer or its documents"


def _belongs(path: str, folder: str, name: str) -> bool:
    if is_side_file(path):
        return True
    if folder:  # PEFT keeps every adapter but the default one in a folder of its name
        return "/" not in folder and _ADAPTER.fullmatch(name) is not None
    known = (_WEIGHTS, _DOCUMENTS)
    return name == ADAPTER_CONFIG or any(kind.fullmatch(name) for kind in known)


def named_by_index(weight_map: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """Returns the weight files that an index names and that are not there."""
    return sorted(set(weight_map.values()) - set(files))
