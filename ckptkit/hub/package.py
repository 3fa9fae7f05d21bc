"""What a push publishes: decided, cleaned of local paths and searched before the Hub is asked."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.consumers.folder_truth import TELLING, parse_texts, tell_truth
from ckptkit.consumers.side_files import has_auto_map
from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG, Consumer, find_consumer
from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.conversion.source.model_folders import read_pretrained_index
from ckptkit.conversion.verify import run_verification
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import AccessError, VerificationError
from ckptkit.core.index import FileRef, Shape
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.formats.discovery import ITSELF
from ckptkit.formats.parsing import INDEX_ENDING
from ckptkit.hub.contents import (
    LoadedFile,
    ModelFacts,
    base_model_of,
    check_against_manifest,
    check_contents,
    clean_contents,
    clean_step_contents,
    read_small,
    write_card,
)
from ckptkit.hub.folder_files import (
    CARD,
    FileSelection,
    Skipped,
    check_complete,
    choose_files,
    choose_step_files,
    is_weights,
    read_model_manifest,
    refuse_checkpoints,
    stat_all,
)
from ckptkit.hub.large_files import LargeFile, large_file
from ckptkit.hub.secrets import MAX_SMALL_BYTES, refuse_secrets, secrets_in
from ckptkit.options import ProgressOptions
from ckptkit.plan.load_report import PUSH
from ckptkit.runs.run_paths import ENTER_HINT
from ckptkit.storage.base import Source
from ckptkit.storage.manifests import read_manifest

_DEPTH = 1
_WHOLE_DEPTH = 8
_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")


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


@dataclass(frozen=True, slots=True)
class Package:
    """What is to be published.

    Attributes:
        contents: Small files by path, as they are published.
        large: Files that are streamed.
        refs: Sizes and times of the files when they were examined.
        skipped: Files that are not published, and why.
        card: The model card for a repository without one; None if the folder has one.
        step: The step of training, where known.
        notes: Messages for the user.
        whole: The subfolder that is pushed unchanged; empty for none.
    """

    contents: Mapping[str, bytes]
    large: tuple[LargeFile, ...]
    refs: Mapping[str, FileRef]
    skipped: tuple[Skipped, ...]
    card: str | None
    step: int | None
    notes: tuple[str, ...]
    whole: str = ""


def prepare_package(
    folder: Source, repo_id: str, options: PushOptions, secrets: Sequence[str]
) -> Package:
    """Decides what is published, and refuses what must not be, such as `secrets` in use."""
    whole = options.get("whole", "")
    step = _step_files(folder, whole, options)
    paths = sorted(p for p in folder.walk(_DEPTH) if not (whole and p.startswith(f"{whole}/")))
    closed = tuple(
        Skipped(f"{path}/", "may not be entered")
        for path in sorted(folder.closed_folders)
        if not (whole and f"{path}/".startswith(f"{whole}/"))
    )
    manifest = read_model_manifest(folder, paths)
    refuse_checkpoints(folder, paths)
    configs = [path for path in paths if path.endswith("config.json") and "/" not in path]
    known = read_small(folder, stat_all(folder, configs))
    documents = [file.document for file in known.values()]
    consumer = find_consumer(_document(known, CONFIG), paths)
    chosen = choose_files(
        paths,
        consumer,
        code=any(isinstance(document, dict) and has_auto_map(document) for document in documents),
        optimizer=options.get("include_optimizer", False),
        include=options.get("include", ()),
    )
    refs = stat_all(folder, [*chosen.files, *step.files])
    small = read_small(folder, [path for path in chosen.files if _is_small(refs[path])])
    large_paths = [path for path in chosen.files if path not in small]
    check_complete(folder, manifest, chosen.files, {p: file.document for p, file in small.items()})
    if manifest is not None:
        check_against_manifest(small.values(), manifest, folder.location)
    config, adapter = _document(small, CONFIG) or {}, _document(small, ADAPTER_CONFIG)
    base_model = base_model_of(config, adapter, options.get("base_model"))
    contents = clean_contents(small, base_model, large_paths)
    large = _large(folder, large_paths, manifest)
    words = {file.path: file.words for file in large}
    texts = _read_texts(folder, [refs[path] for path in step.files])
    where, names, tensors = folder.location, options.get("names", "auto"), dict[str, Any]()
    if adapter is None:
        tensors |= _list_tensors(folder, manifest)
    compared = _compare_names(where, small, manifest, tensors, names, consumer)
    compared += _find_untruths(small, tensors, consumer)
    streamed = [path for path in step.files if path not in texts]
    texts = clean_step_contents(texts, streamed, whole, base_model)
    check_contents(contents | words | texts, folder.location, secrets, [*large_paths, *streamed])
    _search_unusual_files(folder, consumer, refs, [*large_paths, *streamed], whole, secrets)
    title = repo_id.rsplit("/", 1)[-1]
    facts = ModelFacts(title, base_model, adapter, config, manifest, consumer.library)
    return Package(
        contents=contents | texts,
        large=large + tuple(LargeFile(path, refs[path].size_bytes, ()) for path in streamed),
        refs=refs,
        skipped=chosen.skipped + step.skipped + closed,
        card=None if CARD in contents else write_card(facts),
        step=facts.step,
        notes=(*_notes(small, contents), *compared),
        whole=whole,
    )


def _step_files(folder: Source, whole: str, options: PushOptions) -> FileSelection:
    """Selects the files of the step that is pushed unchanged; paths are those in the repository."""
    if not whole:
        return FileSelection((), ())
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
    chosen = choose_step_files(paths, recorded.keys(), patterns)
    return FileSelection(
        tuple(f"{whole}/{path}" for path in chosen.files),
        tuple(Skipped(f"{whole}/{skip.path}", skip.reason) for skip in chosen.skipped),
    )


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
    usual = choose_files(paths, consumer, code=True, optimizer=True).files
    step = [path.removeprefix(f"{whole}/") for path in paths if path not in usual]
    usual += tuple(f"{whole}/{path}" for path in choose_step_files(step, ()).files)
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
    small: Mapping[str, LoadedFile],
    manifest: Manifest | None,
    tensors: Mapping[str, tuple[DType, Shape]],
    names: str,
    consumer: Consumer,
) -> tuple[str, ...]:
    """Refuses weights that would not load as the model of config.json; returns notes."""
    config = _document(small, CONFIG)
    options = {} if manifest is None else manifest.options
    chosen = [f"--{key}" for key in ("names", "include", "exclude") if key in options]
    if config is None or ADAPTER_CONFIG in small or (manifest and manifest.kind == "adapter"):
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


def _find_untruths(
    small: Mapping[str, LoadedFile], tensors: Iterable[str], consumer: Consumer
) -> tuple[str, ...]:
    """Returns notes where the files of a folder say something else than its model is."""
    if not consumer.owns_config:
        return ()
    texts = parse_texts({path: file.data for path, file in small.items() if path in TELLING})
    return tell_truth(texts, None, tensors, writes=False).notes


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


def _document(small: Mapping[str, LoadedFile], path: str) -> Mapping[str, Any] | None:
    document = small[path].document if path in small else None
    return document if isinstance(document, Mapping) else None


def _notes(small: Mapping[str, LoadedFile], contents: Mapping[str, bytes]) -> list[str]:
    changed = [
        path
        for path, file in small.items()
        if contents[path] != file.data and path != MANIFEST_NAME
    ]
    notes = [f"{path} is published without the paths of this machine in it" for path in changed]
    if ADAPTER_CONFIG in changed:
        notes.append("the adapter names its base by a path; pass its repository with --base-model")
    return notes
