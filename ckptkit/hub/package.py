"""What a push publishes: chosen, checked, cleaned of local paths, and searched for secrets."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptkit.consumers.folder_truth import TELLING, parse_texts, tell_truth
from ckptkit.consumers.side_files import has_auto_map, is_side_file
from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG, CONSUMERS, Consumer, find_consumer
from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.conversion.source.model_folders import read_pretrained_index
from ckptkit.conversion.verify import run_verification
from ckptkit.core.checksums import digest_as
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import (
    AccessError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    RefusedError,
    UnsafePathError,
    VerificationError,
)
from ckptkit.core.index import FileRef, Shape
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER, TRAINING, Manifest
from ckptkit.formats.discovery import ITSELF
from ckptkit.formats.parsing import INDEX_ENDING, list_unnamed
from ckptkit.formats.registry import recognise
from ckptkit.hub.contents import (
    CARD,
    ModelFacts,
    base_model_of,
    check_contents,
    clean_contents,
    write_card,
)
from ckptkit.hub.large_files import LargeFile, large_file
from ckptkit.hub.secrets import MAX_SMALL_BYTES, refuse_secrets, secrets_in
from ckptkit.options import ProgressOptions
from ckptkit.plan.load_report import PUSH
from ckptkit.runs.find_run import ENTER_HINT, absent_folder
from ckptkit.runs.step_manifests import file_problems
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url

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
    r"|ema|embedding|ep\d+-ba|epoch|exp_avg|expert|expp_rank|extra_state|fp16|fp32|iter|last|latest"
    "|layer|lit_model|metadata|meta|model|mp_rank|optim|optimizer|pytorch_model|pytorch_optim"
    "|random_states|rank|recipe_state|rng_state|sampler|scaler|scheduler|sdp|shard|state|step"
    "|train_state|weights|zero_pp_rank|zero"
)
_OF_STEP = re.compile(
    r"\.metadata(\.json)?|\.snapshot_metadata|\w+\.distcp|latest(_universal)?|zero_to_fp32\.py"
    r"|(latest_checkpointed_iteration|dlrover_latest)\.txt|trainer_state\.json|fsdp_config\.json"
    r"|(run|flat_parameters|metadata|meta|params|integrity|running_states|lora_train_meta)\.json"
    r"|lr_scheduler"
    r"|(run_config|model_config|hyperparameters)\.yaml"
    rf"|({_STATES})([\w.=-]*)\.({_TENSORS[1:-1]}|pth\.lora)(\.index\.json)?"
)
# Of Orbax: the tree, arrays of zarr by their keys, and OCDBT's files of values.
_ORBAX = frozenset({"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"})
_OF_ORBAX = re.compile(
    r"(.*/)?(_METADATA|_sharding|_strings\.json|_CHECKPOINT_METADATA|commit_success\.txt|metadata"
    r"|array_metadatas/process_\d+|manifest\.ocdbt|d/[0-9a-f]+|\.zarray|zarr\.json|\d+(\.\d+)*"
    r"|c(/\d+)*)"
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
_LOADS = frozenset({"safetensors", "torch"})  # formats
_PUSHED = frozenset({"model", "adapter", "torch"})  # kinds of outputs
_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")
_DEPTH, _RUN_DEPTH, _WHOLE_DEPTH = 1, 2, 8  # of folders that are listed
MAX_FILE_BYTES = 500_000_000_000
"""The largest file that the Hub takes."""


class Skipped(Struct, frozen=True):
    """A file that is not pushed, and why."""

    path: str
    reason: str


def choose_files(
    paths: Iterable[str],
    consumer: Consumer,
    *,
    code: bool,
    optimizer: bool,
    include: Sequence[str] = (),
) -> tuple[list[str], list[Skipped]]:
    """Decides by name which files of a model folder are pushed.

    With `code`, Python files are, too; with `optimizer`, its states and those of random numbers.
    """
    reasons = {
        path: "" if consumer.has_companion(path) else _reason(path, code=code, optimizer=optimizer)
        for path in paths
    }
    return _divide(reasons, include)


def choose_step_files(
    paths: Iterable[str], recorded: Collection[str], include: Sequence[str] = ()
) -> tuple[list[str], list[Skipped]]:
    """Decides which files of a step are pushed with it."""
    paths = list(paths)
    is_snapshot = _SNAPSHOT in paths
    names = set(map(posixpath.basename, paths))
    is_nanotron, is_orbax = _NANOTRON in names, not _ORBAX.isdisjoint(names)
    reasons = {}
    for path in paths:
        name = posixpath.basename(path)
        is_recorded = path in recorded or path.startswith(f"{SIDE_FOLDER}/")
        belongs = (
            _is_of_step(path, name)
            or (is_snapshot and _OF_SNAPSHOT.fullmatch(path))
            or (is_nanotron and _OF_NANOTRON.fullmatch(name))
            or (is_orbax and _OF_ORBAX.fullmatch(path))
            or (is_recorded and _DATA.fullmatch(name))
        )
        reasons[path] = "" if belongs else "not a known file of a step"
    return _divide(reasons, include)


def _divide(reasons: Mapping[str, str], include: Sequence[str]) -> tuple[list[str], list[Skipped]]:
    """Returns the files to push, and those that are not for a reason, unless they are asked for."""
    files: list[str] = []
    skipped: list[Skipped] = []
    for path, reason in sorted(reasons.items()):
        if posixpath.basename(path) == NEVER:
            skipped.append(Skipped(path, "it can hold the token that training used"))
        elif reason and not any(fnmatchcase(path, pattern) for pattern in include):
            skipped.append(Skipped(path, reason))
        else:
            files.append(path)
    return files, skipped


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
    configuration next to a model, they would load the adapter's base instead of the model. Of
    `whole`, a folder that is pushed as it is, files of an earlier one are deleted.
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


class PushOptions(ProgressOptions, total=False):
    """The options of `push`; they are those of the command.

    Attributes:
        private: Whether a new repository is private, which it is if left out. One that exists
            has to be as asked for, if asked for.
        revision: A branch, made where it does not exist; `main` if left out.
        tag: A name for the commit.
        create_pr: Whether to open a pull request instead of committing to the revision.
        message: The commit's; its first line is the title. Names the step if left out.
        token: Left out, that of HF_TOKEN or of the last login is taken.
        endpoint: Left out, HF_ENDPOINT is taken, as it was when `huggingface_hub` was imported.
        include: Patterns of files to push besides those that belong to a model.
        include_optimizer: Whether to push the state of the optimizer and of random numbers too.
        names: "auto", the default, refuses weights that would not load as the model of config.json;
            "live" compares nothing.
        base_model: The repository of the model that was trained, where a path names it here.
        dry_run: Whether to report only what would be done.
        whole: The name of a subfolder that is pushed unchanged, such as a step to resume training
            from. Files of an earlier one are deleted from the repository.
    """

    private: bool | None
    revision: str | None
    tag: str | None
    create_pr: bool
    message: str | None
    token: str | None
    endpoint: str | None
    include: Sequence[str]
    include_optimizer: bool
    names: str
    base_model: str | None
    dry_run: bool
    whole: str


class Package(Struct, frozen=True):
    """What is to be published."""

    contents: Mapping[str, bytes]  # of small files, as they are published
    large: tuple[LargeFile, ...]
    refs: Mapping[str, FileRef]  # all files as they were when they were examined
    skipped: tuple[Skipped, ...]
    card: str | None  # for a repository without one; None if the folder has one
    step: int | None
    notes: tuple[str, ...]
    whole: str = ""  # the subfolder that is pushed unchanged


def prepare_package(
    folder: Source, repo_id: str, options: PushOptions, secrets: Sequence[str]
) -> Package:
    """Decides what is published, and refuses what must not be, such as `secrets` in use."""
    whole = options.get("whole", "")
    step_files, skipped_of_step = _choose_of_step(folder, whole, options)
    paths = sorted(p for p in folder.walk(_DEPTH) if not (whole and p.startswith(f"{whole}/")))
    closed = tuple(
        Skipped(f"{path}/", "may not be entered")
        for path in sorted(folder.closed_folders)
        if not (whole and f"{path}/".startswith(f"{whole}/"))
    )
    manifest = read_model_manifest(folder, paths)
    refuse_checkpoints(folder, paths)
    configs = [path for path in paths if path.endswith("config.json") and "/" not in path]
    known = _parse(_read(folder, stat_all(folder, configs)), folder.location)
    consumer = find_consumer(_mapping(known.get(CONFIG)), paths)
    chosen, skipped = choose_files(
        paths,
        consumer,
        code=any(
            isinstance(document, dict) and has_auto_map(document) for document in known.values()
        ),
        optimizer=options.get("include_optimizer", False),
        include=options.get("include", ()),
    )
    refs = stat_all(folder, [*chosen, *step_files])
    small = _read(folder, [path for path in chosen if _is_small(refs[path])])
    documents = _parse(small, folder.location)
    large_paths = [path for path in chosen if path not in small]
    check_complete(folder, manifest, chosen, documents)
    if manifest is not None:
        _check_digests(small, manifest, folder.location)
    config, adapter = _mapping(documents.get(CONFIG)), _mapping(documents.get(ADAPTER_CONFIG))
    base_model = base_model_of(config or {}, adapter, options.get("base_model"))
    contents = clean_contents(small, large_paths, base_model)
    large = _large(folder, large_paths, manifest)
    words = {file.path: file.words for file in large}
    texts = _read_texts(folder, [refs[path] for path in step_files])
    where, names, tensors = folder.location, options.get("names", "auto"), dict[str, Any]()
    if adapter is None:
        tensors |= _list_tensors(folder, manifest)
    compared = _compare_names(where, config, adapter, manifest, tensors, names, consumer)
    if consumer.owns_config:
        telling = parse_texts({path: data for path, data in small.items() if path in TELLING})
        compared += tell_truth(telling, None, tensors, writes=False).notes
    streamed = [path for path in step_files if path not in texts]
    texts = clean_contents(texts, streamed, base_model, whole)
    check_contents(contents | words | texts, folder.location, secrets, [*large_paths, *streamed])
    _search_unusual_files(folder, consumer, refs, [*large_paths, *streamed], whole, secrets)
    title = repo_id.rsplit("/", 1)[-1]
    facts = ModelFacts(title, base_model, adapter, config or {}, manifest, consumer.library)
    return Package(
        contents=contents | texts,
        large=large + tuple(LargeFile(path, refs[path].size_bytes, ()) for path in streamed),
        refs=refs,
        skipped=(*skipped, *skipped_of_step, *closed),
        card=None if CARD in contents else write_card(facts),
        step=facts.step,
        notes=(*_notes(small, contents), *compared),
        whole=whole,
    )


def _choose_of_step(
    folder: Source, whole: str, options: PushOptions
) -> tuple[list[str], list[Skipped]]:
    """Selects the files of the step that is pushed unchanged; paths are those in the repository."""
    if not whole:
        return [], []
    inside = [path for path in folder.walk(_WHOLE_DEPTH) if path.startswith(f"{whole}/")]
    closed = [path for path in folder.closed_folders if f"{path}/".startswith(f"{whole}/")]
    if closed:
        raise AccessError(
            "cannot be read: permission denied, and the step is pushed as a whole",
            where=posixpath.join(folder.location, min(closed)),
            hint=ENTER_HINT,
        )
    paths = [path.removeprefix(f"{whole}/") for path in inside]
    recorded: Mapping[str, object] = {}
    if MANIFEST_NAME in paths:
        recorded = read_manifest(folder, whole).files
    patterns = [pattern.removeprefix(f"{whole}/") for pattern in options.get("include", ())]
    files, skipped = choose_step_files(paths, recorded.keys(), patterns)
    skipped = [Skipped(f"{whole}/{skip.path}", skip.reason) for skip in skipped]
    return [f"{whole}/{path}" for path in files], skipped


def _search_unusual_files(
    folder: Source,
    consumer: Consumer,
    refs: Mapping[str, FileRef],
    paths: Sequence[str],
    whole: str,
    secrets: Sequence[str],
) -> None:
    """Searches files that only `include` selects before anything is uploaded, whatever their size.

    The other files are searched while they are uploaded.
    """
    usual, _ = choose_files(paths, consumer, code=True, optimizer=True)
    step = [path.removeprefix(f"{whole}/") for path in paths if path not in usual]
    usual += [f"{whole}/{path}" for path in choose_step_files(step, ())[0]]
    found: list[str] = []
    for path in paths:
        if path not in usual:
            size = refs[path].size_bytes
            starts = range(0, size, MAX_SMALL_BYTES)
            blocks = (folder.read(path, at, min(at + MAX_SMALL_BYTES, size)) for at in starts)
            found += [f"{kind} in {path}" for kind in secrets_in(blocks, secrets)]
    refuse_secrets(found, folder.location)


def _compare_names(
    where: str,
    config: Mapping[str, Any] | None,
    adapter: Mapping[str, Any] | None,
    manifest: Manifest | None,
    tensors: Mapping[str, tuple[DType, Shape]],
    names: str,
    consumer: Consumer,
) -> tuple[str, ...]:
    """Refuses weights that would not load as the model of config.json; returns notes."""
    options = {} if manifest is None else manifest.options
    chosen = [f"--{key}" for key in ("names", "include", "exclude") if key in options]
    if config is None or adapter is not None or (manifest and manifest.kind == "adapter"):
        return ()
    if names == "live" or chosen:
        said = "--names live" if names == "live" else f"the folder was written with {chosen[0]}"
        return (f"names and shapes are not compared with the model of config.json: {said}",)
    if not tensors:
        return ()
    subject = Subject(config, tensors, frozenset(), where, consumer=consumer, advice=PUSH)
    return compare_now(subject)


def _list_tensors(folder: Source, manifest: Manifest | None) -> Mapping[str, tuple[DType, Shape]]:
    """Returns the element types and shapes of the model, by name."""
    if manifest is not None:
        return {n: (dtype_named(t.dtype), t.shape) for n, t in manifest.tensors.items()}
    index = read_pretrained_index(folder)
    entries = () if index is None else index.of_part("model")
    return {str(entry.name): (entry.dtype, entry.shape) for entry in entries}


def _read_texts(folder: Source, files: Iterable[FileRef]) -> dict[str, bytes]:
    """Reads the texts of a step, which may hold a secret, and empty files.

    The Hub's store of large files takes no empty ones.
    """
    return {
        file.path: folder.read(file.path, 0, file.size_bytes)
        for file in files
        if not file.size_bytes or (file.path.endswith(_TEXTS) and file.size_bytes < MAX_SMALL_BYTES)
    }


def _is_small(file: FileRef) -> bool:
    if file.path.endswith(INDEX_ENDING):
        return True
    return file.size_bytes < MAX_SMALL_BYTES and not is_weights(file.path)


def _large(
    folder: Source, paths: Sequence[str], manifest: Manifest | None
) -> tuple[LargeFile, ...]:
    """Returns the large files; outputs whose bytes are not in order are verified as a whole."""
    in_order = manifest is None or manifest.kind != "torch"
    if not in_order:
        for problem in run_verification(folder.location, select=ITSELF).problems:
            hint = "write the folder again, then push it"
            raise VerificationError(problem.message, where=problem.where, hint=hint)
    return tuple(large_file(folder, path, manifest, check=in_order) for path in paths)


def _read(source: Source, paths: Iterable[str]) -> dict[str, bytes]:
    return {path: source.read(path, 0, source.stat(path).size_bytes) for path in paths}


def _parse(files: Mapping[str, bytes], location: str) -> dict[str, Any]:
    """Returns the documents of a model among files; refuses those that are not JSON."""
    documents = {}
    for path, data in files.items():
        if path.endswith(("config.json", INDEX_ENDING, MANIFEST_NAME)):
            try:
                documents[path] = json.loads(data)
            except (ValueError, RecursionError) as error:
                where = posixpath.join(location, path)
                raise FormatError(f"is not JSON: {error}", where=where) from error
    return documents


def _mapping(document: object) -> Mapping[str, Any] | None:
    return document if isinstance(document, Mapping) else None


def _check_digests(files: Mapping[str, bytes], manifest: Manifest, location: str) -> None:
    for path, data in files.items():
        record = manifest.files.get(path)
        if record is None or not record.digest:
            continue
        if digest_as(record.digest, memoryview(data)) != record.digest:
            raise VerificationError(
                "has another digest than the manifest",
                where=posixpath.join(location, path),
                hint="restore the file, or write the folder again; if you changed it on purpose,"
                " delete ckptkit.json, and the push verifies nothing",
            )


def _notes(small: Mapping[str, bytes], contents: Mapping[str, bytes]) -> list[str]:
    changed = [
        path for path, data in small.items() if contents[path] != data and path != MANIFEST_NAME
    ]
    notes = [f"{path} is published without the paths of this machine in it" for path in changed]
    if ADAPTER_CONFIG in changed:
        notes.append("the adapter names its base by a path; pass its repository with --base-model")
    return notes
