"""The files of a folder that is pushed: which go to the Hub, and whether they are complete."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptkit.consumers.side_files import is_side_file
from ckptkit.consumers.table import ADAPTER_CONFIG, CONSUMERS, Consumer
from ckptkit.core.errors import (
    IncompleteCheckpointError,
    MissingFileError,
    RefusedError,
    UnsafePathError,
    VerificationError,
)
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER, TRAINING, Manifest
from ckptkit.formats.parsing import INDEX_ENDING, list_unnamed
from ckptkit.formats.registry import recognise
from ckptkit.runs.run_paths import absent_folder
from ckptkit.runs.step_manifests import file_problems
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url

CARD = "README.md"
NEVER = "training_args.bin"
"""Can hold the token that training used, in plain text."""
_STEMS = "|".join(dict.fromkeys(one.stem for one in CONSUMERS))
_WEIGHTS = re.compile(
    rf"({_STEMS}|pytorch_model|consolidated)(-\d+-of-\d+|\.\d+(-of-\d+)?)?"
    r"\.(safetensors|bin)(\.index\.json)?"
)
_DOCUMENTS = re.compile(r"(README|MODEL_CARD|LICEN[CS]E|NOTICE|USE_POLICY)(\.\w+)?", re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"(optimizer|scheduler|scaler)(_\d+)?\.(bin|pt)|rng_state(_\d+)?\.pth"
    r"|random_states_\d+\.pkl|trainer_state\.json"
)
_TENSORS = r"(safetensors|bin|pt|pth|pth\.tar|ckpt|pkl)"
_STATES = (  # how the files of a step begin that hold tensors or states
    "adapter|bf16|checkpoint|ckpt|common|consolidated|custom_checkpoint|data|dataloader|dl_state|dp"
    "|ema|embedding|epoch|exp_avg|expert|extra_state|fp16|fp32|last|layer|metadata|meta|model"
    "|mp_rank|optim|optimizer|pytorch_model|random_states|rank|rng_state|sampler|scaler|scheduler|sdp"
    "|shard|state|step|train_state|weights|zero_pp_rank|zero"
)
_OF_STEP = re.compile(
    r"\.metadata|\.snapshot_metadata|\w+\.distcp|latest(_universal)?|zero_to_fp32\.py"
    r"|latest_checkpointed_iteration\.txt|trainer_state\.json|fsdp_config\.json"
    r"|(run|flat_parameters|metadata|meta|params|integrity)\.json|run_config\.yaml"
    rf"|({_STATES})([\w.=-]*)\.{_TENSORS}(\.index\.json)?"
)
_SNAPSHOT = ".snapshot_metadata"
_OF_SNAPSHOT = re.compile(r"(\d+|batched|replicated|sharded)/.+")
_NANOTRON = "checkpoint_metadata.json"
_OF_NANOTRON = re.compile(
    r"latest\.txt|config\.yaml|(checkpoint_metadata|model_config|optimizer_config)\.json"
    r"|tp-\d+-of-\d+_[\w-]+\.pt"
)
_DATA = re.compile(rf"[^.].*\.({_TENSORS[1:-1]}|csv|jinja|json|jsonl|model|npy|npz|txt|ya?ml)")
_CODE = "*.py"
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)|adapter_config\.json")


class Skipped(Struct, frozen=True):
    """A file that is not pushed, and why."""

    path: str
    reason: str


class FileSelection(Struct, frozen=True):
    """The files of a folder that are pushed, and those that are not."""

    files: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def choose_files(
    paths: Iterable[str],
    consumer: Consumer,
    *,
    code: bool,
    optimizer: bool,
    include: Sequence[str] = (),
) -> FileSelection:
    """Decides by name which files of a model folder are pushed.

    Args:
        paths: All files, relative to the folder.
        consumer: The library that loads the folder.
        code: Whether a configuration names Python files, which are then pushed too.
        optimizer: Whether the state of the optimizer, and of random numbers, is pushed too.
        include: Patterns of further files.
    """
    files, skipped = [], []
    for path in sorted(paths):
        reason = _reason(path, code=code, optimizer=optimizer)
        reason = "" if consumer.has_companion(path) else reason
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        if posixpath.basename(path) == NEVER:
            skipped.append(Skipped(path, "it can hold the token that training used"))
        elif reason and not wanted:
            skipped.append(Skipped(path, reason))
        else:
            files.append(path)
    return FileSelection(tuple(files), tuple(skipped))


def choose_step_files(
    paths: Iterable[str], recorded: Collection[str], include: Sequence[str] = ()
) -> FileSelection:
    """Decides which files of a step are pushed with it."""
    all_paths = sorted(paths)
    is_snapshot = _SNAPSHOT in all_paths
    is_nanotron = any(posixpath.basename(path) == _NANOTRON for path in all_paths)
    files, skipped = [], []
    for path in all_paths:
        name = posixpath.basename(path)
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        belongs = (
            _is_of_step(path, name)
            or (is_snapshot and _OF_SNAPSHOT.fullmatch(path))
            or (is_nanotron and _OF_NANOTRON.fullmatch(name))
        )
        if path in recorded or path.startswith(f"{SIDE_FOLDER}/"):
            belongs = belongs or _DATA.fullmatch(name)
        if name == NEVER:
            skipped.append(Skipped(path, "it can hold the token that training used"))
        elif belongs or wanted:
            files.append(path)
        else:
            skipped.append(Skipped(path, "not a known file of a step"))
    return FileSelection(tuple(files), tuple(skipped))


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


def find_stale_files(remote: Iterable[str], local: Iterable[str], whole: str = "") -> list[str]:
    """Returns the files to delete from a repository so that it holds only the pushed model.

    Loaders would pick up weight files of another kind or number of shards; with an adapter's
    configuration next to a model, they would load the adapter's base instead of the model.

    Args:
        remote: The files that the repository holds.
        local: Those that are pushed.
        whole: A folder that is pushed as it is; files of an earlier one are deleted.
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
    """Returns why a file of a model folder is not pushed; empty if it is."""
    folder, name = posixpath.split(path)
    if path == MANIFEST_NAME:
        return ""
    if _OPTIMIZER.fullmatch(name):
        return "" if optimizer and not folder else "state of the optimizer or of random numbers"
    if fnmatchcase(name, _CODE):
        return "" if code else "no configuration names this Python file"
    if folder:  # PEFT keeps every adapter but the default one in a folder of its name
        belongs = "/" not in folder and _ADAPTER.fullmatch(name) is not None
    else:
        belongs = name == ADAPTER_CONFIG or any(p.fullmatch(name) for p in (_WEIGHTS, _DOCUMENTS))
    if belongs or is_side_file(path):
        return ""
    return "not a file of a model, its tokenizer or its documents"


_LOADS = frozenset({"safetensors", "torch"})
_RUN_DEPTH = 2
_PUSHED = frozenset({"model", "adapter", "torch"})
MAX_FILE_BYTES = 500_000_000_000
"""The largest file that the Hub takes."""


def local_folder(place: PathLike) -> Path:
    """Returns the folder to push."""
    where = os.fspath(place)
    if is_url(place):
        raise RefusedError(
            "a push reads a folder of this machine",
            where=where,
            hint="write it to a local folder first: `ckptkit consolidate URL DIR`",
        )
    if not Path(where).is_dir():
        meant = "pass what `ckptkit consolidate` or `ckptkit adapter extract` wrote"
        text, hint = absent_folder(place, meant)
        raise MissingFileError(text, where=where, hint=hint)
    return Path(where)


def read_model_manifest(source: Source, paths: Iterable[str]) -> Manifest | None:
    """Returns the manifest of a folder that can be pushed, None if it has none."""
    if MANIFEST_NAME not in set(paths):
        return None
    manifest = read_manifest(source)
    if manifest.kind == TRAINING:
        raise _to_consolidate(source.location, "is a step of a training run")
    if manifest.kind not in _PUSHED:
        raise _to_consolidate(source.location, f"holds a {manifest.kind!r} output")
    return manifest


def refuse_checkpoints(source: Source, paths: Iterable[str]) -> None:
    """Refuses checkpoints that no library loads from the Hub."""
    for candidate in recognise(list(paths)):
        if candidate.format not in _LOADS:
            raise _to_consolidate(source.location, f"is a sharded checkpoint ({candidate.reason})")


def _to_consolidate(location: str, what: str) -> RefusedError:
    return RefusedError(
        f"{what}, which no library loads from the Hub",
        where=location,
        hint=f"run `ckptkit consolidate {location} OUT` (or `ckptkit adapter extract`, for an"
        " adapter), then push OUT",
    )


def stat_all(source: Source, paths: Iterable[str]) -> dict[str, FileRef]:
    """Returns the sizes of the files to push; refuses files that cannot be pushed."""
    files = {}
    for path in paths:
        where = posixpath.join(source.location, path)
        try:
            files[path] = source.stat(path)
        except UnsafePathError as error:
            raise RefusedError(
                "is a link that leads out of the folder",
                where=where,
                hint="copy the file into the folder, or push the folder that contains it",
            ) from error
        size_bytes = files[path].size_bytes
        if size_bytes > MAX_FILE_BYTES:
            raise RefusedError(
                f"has {size_bytes:,} bytes, and the Hub takes at most {MAX_FILE_BYTES:,}",
                where=where,
                hint="write smaller files with `ckptkit consolidate --max-shard-size 5GB`",
            )
    return files


def _first_missing(named: Collection[str], files: Collection[str]) -> str:
    """Returns the first missing file of an index, or of its numbering; empty if none is missing."""
    absent = sorted(set(named).difference(files))
    return absent[0] if absent else next((n for n in list_unnamed(named) if n not in files), "")


def check_complete(
    source: Source, manifest: Manifest | None, files: Iterable[str], documents: Mapping[str, Any]
) -> None:
    """Refuses a model with missing or unexpected weight files."""
    files = list(files)
    weights = [path for path in files if is_weights(path) and not path.endswith(INDEX_ENDING)]
    if not weights:
        refuse_checkpoints(source, source.walk(_RUN_DEPTH))
        raise RefusedError(
            "holds no weights",
            where=source.location,
            hint="pass a folder with model.safetensors or adapter_model.safetensors, such as"
            " `ckptkit consolidate` writes",
        )
    for path, document in documents.items():
        if not path.endswith(INDEX_ENDING):
            continue
        weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
        missing = "?"
        if isinstance(weight_map, Mapping):
            missing = _first_missing(weight_map.values(), files)
        if missing:
            raise IncompleteCheckpointError(
                f"files of the index are missing, such as {missing!r}",
                where=posixpath.join(source.location, path),
                hint="the folder is incomplete; write it again with `ckptkit consolidate`",
            )
    if manifest is None:
        return
    hint = "see what `ckptkit verify` says; write the folder again with `ckptkit consolidate`"
    for problem in file_problems(source, "", manifest):
        raise VerificationError(problem.message, where=problem.where, hint=hint)
    for path in weights:
        if path not in manifest.files:
            where = posixpath.join(source.location, path)
            raise VerificationError("is not in the manifest", where=where, hint=hint)
