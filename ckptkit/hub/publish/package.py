"""What a push publishes: decided, cleaned of local paths and searched before the Hub is asked."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.conversion.source.model_folders import read_pretrained_index
from ckptkit.conversion.verify import run_verification
from ckptkit.core.checksums import digest_as
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import FormatError, VerificationError
from ckptkit.core.index import FileRef, Shape
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest, parse_manifest
from ckptkit.formats.file_sets import INDEX_ENDING
from ckptkit.hub.publish.card import ModelFacts, base_model_of, write_card
from ckptkit.hub.publish.folder_files import (
    ADAPTER_CONFIG,
    CARD,
    FileSelection,
    Skipped,
    check_complete,
    choose_files,
    choose_step_files,
    files_below,
    files_of_whole,
    is_weights,
    read_model_manifest,
    refuse_checkpoints,
    stat_all,
)
from ckptkit.hub.publish.large_files import LargeFile, large_file
from ckptkit.hub.publish.searching import MAX_SMALL_BYTES, refuse_secrets, secrets_in
from ckptkit.hub.publish.secrets import find_secrets, scrub_content
from ckptkit.plan.load_report import PUSH
from ckptkit.plan.side_files import CONFIG, has_auto_map
from ckptkit.storage.base import Folder, Source
from ckptkit.storage.manifests import read_manifest

_PARSED = ("config.json", INDEX_ENDING, MANIFEST_NAME)
_OF_STEPS = ("config.json", MANIFEST_NAME, "run.json", "trainer_state.json")
_HINT = (
    "restore the file, or write the folder again; if you changed it on purpose, delete"
    " ckptkit.json, and the push verifies nothing"
)


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file of the folder in memory, parsed where it is JSON."""

    path: str
    data: bytes
    document: Any


def read_small(source: Source, paths: Iterable[str]) -> dict[str, LoadedFile]:
    return {path: _read(source, path) for path in paths}


def _read(source: Source, path: str) -> LoadedFile:
    data = source.read(path, 0, source.stat(path).size_bytes)
    document = None
    if path.endswith(_PARSED):
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            where = posixpath.join(source.location, path)
            raise FormatError(f"is not JSON: {error}", where=where) from error
    return LoadedFile(path, data, document)


def check_against_manifest(files: Iterable[LoadedFile], manifest: Manifest, where: str) -> None:
    """Compares small files with the digests in the manifest."""
    for file in files:
        record = manifest.files.get(file.path)
        if record is None or not record.digest:
            continue
        if digest_as(record.digest, memoryview(file.data)) != record.digest:
            raise VerificationError(
                "has another digest than the manifest",
                where=posixpath.join(where, file.path),
                hint=_HINT,
            )


def clean_contents(
    files: Mapping[str, LoadedFile], base_model: str | None, large: Iterable[str]
) -> dict[str, bytes]:
    """Returns files without paths of this machine, with a manifest that matches them."""
    contents = {
        path: scrub_content(path, file.data, file.document, base_model)
        for path, file in files.items()
    }
    if MANIFEST_NAME in contents:
        manifest = parse_manifest(contents[MANIFEST_NAME], where=MANIFEST_NAME)
        contents[MANIFEST_NAME] = _fit_manifest(manifest, contents, set(large)).to_json()
    return contents


def clean_step_contents(
    texts: Mapping[str, bytes], others: Iterable[str], folder: str, base_model: str | None
) -> dict[str, bytes]:
    """Returns the texts of a step that is pushed with a model, without paths of this machine.

    Its manifest is made to match them, so that a run elsewhere can verify what it resumes from.
    """
    contents = dict(texts)
    for path in texts:
        if path.endswith(_OF_STEPS):
            document = _parse(texts[path])
            contents[path] = scrub_content(path, texts[path], document, base_model)
    own = f"{folder}/{MANIFEST_NAME}"
    if own in contents:
        manifest = parse_manifest(contents[own], where=own)
        inside = {f"{folder}/{path}": path for path in manifest.files}
        small = {inside[path]: contents[path] for path in inside.keys() & contents.keys()}
        large = {path.removeprefix(f"{folder}/") for path in others}
        contents[own] = _fit_manifest(manifest, small, large).to_json()
    return contents


def _parse(data: bytes) -> Any:
    """Returns a JSON document; None for other texts, which are published unchanged."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _fit_manifest(manifest: Manifest, contents: Mapping[str, bytes], large: set[str]) -> Manifest:
    """Gives the manifest the sizes and digests of the published files, and of no others."""
    names = large | contents.keys()
    records = {path: record for path, record in manifest.files.items() if path in names}
    tensors = {name: t for name, t in manifest.tensors.items() if t.file in names}
    for path, data in contents.items():
        if path in records and records[path].digest:
            digest = digest_as(records[path].digest, memoryview(data))
            records[path] = FileRecord(len(data), digest)
    return replace(manifest, files=records, tensors=tensors)


def check_contents(
    contents: Mapping[str, bytes], where: str, known: Sequence[str], others: Iterable[str] = ()
) -> None:
    """Refuses to publish keys and tokens.

    Args:
        contents: The content of files, by path.
        where: The folder of the files.
        known: Secrets that are in use.
        others: Further files that are published; only their names are searched.
    """
    paths = "\n".join([*contents, *others])
    secrets = [f"{kind} in the name of a file" for kind in find_secrets(paths.encode(), known)]
    if not secrets:
        secrets = [
            f"{kind} in {path}"
            for path, data in sorted(contents.items())
            for kind in secrets_in([data], known)
        ]
    refuse_secrets(secrets, where)


_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class PackageOptions:
    """The options that decide what is published.

    Attributes:
        optimizer: Whether the state of the optimizer is published too.
        include: Patterns of further files, also of the folder `whole`.
        base_model: The base's repository, where the folder names it by a path.
        secrets: What must not be in any file; the token in use.
        names: `live` if names and shapes are not compared with the model of config.json.
        whole: A subfolder that is pushed unchanged, such as a step to resume from; empty for none.
    """

    optimizer: bool = False
    include: Sequence[str] = ()
    base_model: str | None = None
    secrets: Sequence[str] = ()
    whole: str = ""
    names: str = "auto"


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


def prepare_package(folder: Folder, repo_id: str, options: PackageOptions) -> Package:
    """Decides what is published, and refuses what must not be."""
    step = _step_files(folder, options)
    paths = sorted(
        path
        for path in files_below(folder)
        if not options.whole or not path.startswith(f"{options.whole}/")
    )
    manifest = read_model_manifest(folder, paths)
    refuse_checkpoints(folder, paths)
    chosen = choose_files(
        paths, code=_names_code(folder, paths), optimizer=options.optimizer, include=options.include
    )
    refs = stat_all(folder, [*chosen.files, *step.files])
    small_paths = [path for path in chosen.files if _is_small(path, refs[path].size_bytes)]
    small = read_small(folder, small_paths)
    large_paths = [path for path in chosen.files if path not in small]
    documents = {path: file.document for path, file in small.items()}
    check_complete(folder, manifest, chosen.files, documents)
    if manifest is not None:
        check_against_manifest(small.values(), manifest, folder.location)
    base_model, facts = _facts(small, manifest, repo_id, options.base_model)
    contents = clean_contents(small, base_model, large_paths)
    large = _large(folder, large_paths, manifest)
    words = {file.path: file.words for file in large}
    texts = _texts(folder, step.files, refs)
    compared = _compared(folder, small, manifest, options.names)
    streamed = [path for path in step.files if path not in texts]
    texts = clean_step_contents(texts, streamed, options.whole, base_model)
    check_contents(
        contents | words | texts, folder.location, options.secrets, [*large_paths, *streamed]
    )
    _search_unusual_files(folder, refs, [*large_paths, *streamed], options)
    return Package(
        contents=contents | texts,
        large=large + tuple(LargeFile(path, refs[path].size_bytes, ()) for path in streamed),
        refs=refs,
        skipped=chosen.skipped + step.skipped,
        card=None if CARD in contents else write_card(facts),
        step=facts.step,
        notes=(*_notes(small, contents), *compared),
        whole=options.whole,
    )


def _step_files(folder: Folder, options: PackageOptions) -> FileSelection:
    """Selects the files of the step that is pushed unchanged; paths are those in the repository."""
    whole = options.whole
    if not whole:
        return FileSelection((), ())
    paths = [path.removeprefix(f"{whole}/") for path in files_of_whole(folder, whole)]
    recorded: Mapping[str, object] = {}
    if MANIFEST_NAME in paths:
        recorded = read_manifest(folder, whole).files
    patterns = [pattern.removeprefix(f"{whole}/") for pattern in options.include]
    chosen = choose_step_files(paths, recorded.keys(), patterns)
    return FileSelection(
        tuple(f"{whole}/{path}" for path in chosen.files),
        tuple(Skipped(f"{whole}/{skip.path}", skip.reason) for skip in chosen.skipped),
    )


def _search_unusual_files(
    folder: Folder, refs: Mapping[str, FileRef], paths: Sequence[str], options: PackageOptions
) -> None:
    """Searches files that only `include` selects before anything is uploaded, whatever their size.

    The other files are searched while they are uploaded.
    """
    usual = choose_files(paths, code=True, optimizer=True).files
    step = [path.removeprefix(f"{options.whole}/") for path in paths if path not in usual]
    usual += tuple(f"{options.whole}/{path}" for path in choose_step_files(step, ()).files)
    secrets: list[str] = []
    for path in paths:
        if path not in usual:
            size = refs[path].size_bytes
            starts = range(0, size, MAX_SMALL_BYTES)
            blocks = (folder.read(path, at, min(at + MAX_SMALL_BYTES, size)) for at in starts)
            secrets += [f"{kind} in {path}" for kind in secrets_in(blocks, options.secrets)]
    refuse_secrets(secrets, folder.location)


def _compared(
    folder: Folder, small: Mapping[str, LoadedFile], manifest: Manifest | None, names: str
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
    tensors = _tensors_of(folder, manifest)
    if not tensors:
        return ()
    subject = Subject(config, tensors, frozenset(), folder.location, advice=PUSH)
    return compare_now(subject)


def _tensors_of(folder: Folder, manifest: Manifest | None) -> dict[str, tuple[DType, Shape]]:
    """Returns element types and shapes of what is pushed; the manifest has them, or the headers."""
    if manifest is not None:
        return {n: (dtype_named(t.dtype), t.shape) for n, t in manifest.tensors.items()}
    index = read_pretrained_index(folder)
    entries = () if index is None else index.of_part("model")
    return {str(entry.name): (entry.dtype, entry.shape) for entry in entries}


def _texts(folder: Folder, paths: Sequence[str], refs: Mapping[str, FileRef]) -> dict[str, bytes]:
    """Reads the texts among files, which may hold a secret, and empty files.

    The Hub's store of large files takes no empty ones.
    """
    sizes = {path: refs[path].size_bytes for path in paths}
    return {
        path: folder.read(path, 0, size)
        for path, size in sizes.items()
        if not size or (path.endswith(_TEXTS) and size < MAX_SMALL_BYTES)
    }


def _is_small(path: str, size_bytes: int) -> bool:
    is_index = path.endswith(INDEX_ENDING)
    return is_index or (size_bytes < MAX_SMALL_BYTES and not is_weights(path))


def _names_code(folder: Folder, paths: Sequence[str]) -> bool:
    configs = [path for path in paths if path.endswith("config.json") and "/" not in path]
    documents = (file.document for file in read_small(folder, stat_all(folder, configs)).values())
    return any(isinstance(d, dict) and has_auto_map(d) for d in documents)


def _large(
    folder: Folder, paths: Sequence[str], manifest: Manifest | None
) -> tuple[LargeFile, ...]:
    """Returns the large files; outputs whose bytes are not in order are verified as a whole."""
    in_order = manifest is None or manifest.kind != "torch"
    if not in_order:
        _verify(folder)
    return tuple(large_file(folder, path, manifest, check=in_order) for path in paths)


def _verify(folder: Folder) -> None:
    report = run_verification(folder.location)
    for problem in report.problems:
        raise VerificationError(
            problem.message, where=problem.where, hint="write the folder again, then push it"
        )


def _facts(
    small: Mapping[str, LoadedFile], manifest: Manifest | None, repo_id: str, base_model: str | None
) -> tuple[str | None, ModelFacts]:
    config = _document(small, CONFIG) or {}
    adapter = _document(small, ADAPTER_CONFIG)
    base = base_model_of(config, adapter, base_model)
    title = repo_id.rsplit("/", 1)[-1]
    return base, ModelFacts(title, base, adapter, config, manifest)


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
