"""Everything about a push that is decided before the Hub is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.conversion.source.model_folders import pretrained_index
from ckptkit.conversion.verify import run_verification
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import VerificationError
from ckptkit.core.index import FileRef, Shape
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.formats.torch_files.reader import INDEX_ENDING
from ckptkit.hub.publish.card import ModelFacts, base_model_of, write_card
from ckptkit.hub.publish.contents import (
    MAX_SMALL_BYTES,
    Small,
    check_against_manifest,
    published,
    published_step,
    read_small,
    refuse_secrets,
)
from ckptkit.hub.publish.files import (
    ADAPTER_CONFIG,
    CARD,
    Chosen,
    Skipped,
    choose_files,
    choose_step_files,
    is_weights,
)
from ckptkit.hub.publish.searching import refuse_found, secrets_in
from ckptkit.hub.publish.source import (
    LargeFile,
    check_complete,
    files_below,
    files_of_whole,
    large_file,
    read_model_manifest,
    refuse_checkpoints,
    stat_all,
)
from ckptkit.plan.load_report import PUSH
from ckptkit.plan.side_files import CONFIG, has_auto_map
from ckptkit.storage.base import Folder
from ckptkit.storage.manifests import read_manifest

_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wants to be published.

    Attributes:
        optimizer: Whether the state of the optimizer goes too.
        include: Patterns of further files, also of the folder that goes as a whole.
        base_model: The base's repository, where the folder names it by a path.
        secrets: What must not be in any file; the token in use.
        names: `live` where names and shapes are not compared with the model of config.json.
        whole: A folder below that goes as a whole, such as a step to resume from; empty for none.
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
        refs: The files as they were looked at.
        skipped: What stays, and why.
        card: The model card to write where there is none.
        step: The step of training, where it is known.
        notes: What was changed on the way, for the user.
        whole: The folder that goes as it is; empty for none.
    """

    contents: Mapping[str, bytes]
    large: tuple[LargeFile, ...]
    refs: Mapping[str, FileRef]
    skipped: tuple[Skipped, ...]
    card: str | None
    step: int | None
    notes: tuple[str, ...]
    whole: str = ""


def prepare(folder: Folder, repo_id: str, wishes: Wishes) -> Package:
    """Decides what is published, and refuses what must not be."""
    step = _step_files(folder, wishes)
    paths = sorted(path for path in files_below(folder) if not _is_below(path, wishes.whole))
    manifest = read_model_manifest(folder, paths)
    refuse_checkpoints(folder, paths)
    chosen = choose_files(
        paths, code=_names_code(folder, paths), optimizer=wishes.optimizer, include=wishes.include
    )
    refs = stat_all(folder, [*chosen.files, *step.files])
    small_paths = [path for path in chosen.files if _is_small(path, refs[path].size_bytes)]
    small = read_small(folder, small_paths)
    large_paths = [path for path in chosen.files if path not in small]
    check_complete(folder, manifest, chosen.files, small)
    if manifest is not None:
        check_against_manifest(small.values(), manifest, folder.location)
    base_model, facts = _facts(small, manifest, repo_id, wishes.base_model)
    contents = published(small, base_model, large_paths)
    large = _large(folder, large_paths, manifest)
    words = {file.path: file.words for file in large}
    texts = _texts(folder, step.files, refs)
    compared = _compared(folder, small, manifest, wishes.names)
    streamed = [path for path in step.files if path not in texts]
    texts = published_step(texts, streamed, wishes.whole, base_model)
    found = contents | words | texts
    refuse_secrets(found, folder.location, wishes.secrets, [*large_paths, *streamed])
    _refuse_in_strangers(folder, refs, [*large_paths, *streamed], wishes)
    return Package(
        contents=contents | texts,
        large=large + tuple(LargeFile(path, refs[path].size_bytes, ()) for path in streamed),
        refs=refs,
        skipped=chosen.skipped + step.skipped,
        card=None if CARD in contents else write_card(facts),
        step=facts.step,
        notes=(*_notes(small, contents), *compared),
        whole=wishes.whole,
    )


def _is_below(path: str, whole: str) -> bool:
    return bool(whole) and path.startswith(f"{whole}/")


def _step_files(folder: Folder, wishes: Wishes) -> Chosen:
    """Sorts the files of the step that goes as it is; the paths are those in the repository."""
    whole = wishes.whole
    if not whole:
        return Chosen((), ())
    paths = [path.removeprefix(f"{whole}/") for path in files_of_whole(folder, whole)]
    recorded: Mapping[str, object] = {}
    if MANIFEST_NAME in paths:
        recorded = read_manifest(folder, whole).files
    patterns = [pattern.removeprefix(f"{whole}/") for pattern in wishes.include]
    chosen = choose_step_files(paths, recorded.keys(), patterns)
    return Chosen(
        tuple(f"{whole}/{path}" for path in chosen.files),
        tuple(Skipped(f"{whole}/{one.path}", one.reason) for one in chosen.skipped),
    )


def _refuse_in_strangers(
    folder: Folder, refs: Mapping[str, FileRef], paths: Sequence[str], wishes: Wishes
) -> None:
    """Searches files that `include` alone names before anything is sent, whatever their size.

    The others are searched on their way to the Hub.
    """
    known = choose_files(paths, code=True, optimizer=True).files
    step = [path.removeprefix(f"{wishes.whole}/") for path in paths if path not in known]
    known += tuple(f"{wishes.whole}/{path}" for path in choose_step_files(step, ()).files)
    found: list[str] = []
    for path in paths:
        if path not in known:
            size = refs[path].size_bytes
            starts = range(0, size, MAX_SMALL_BYTES)
            blocks = (folder.read(path, at, min(at + MAX_SMALL_BYTES, size)) for at in starts)
            found += [f"{kind} in {path}" for kind in secrets_in(blocks, wishes.secrets)]
    refuse_found(found, folder.location)


def _compared(
    folder: Folder, small: Mapping[str, Small], manifest: Manifest | None, names: str
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
    index = pretrained_index(folder)
    entries = () if index is None else index.of_part("model")
    return {str(one.name): (one.dtype, one.shape) for one in entries}


def _texts(folder: Folder, paths: Sequence[str], refs: Mapping[str, FileRef]) -> dict[str, bytes]:
    """Reads the texts among files, which may hold a secret, and files without a byte.

    The Hub keeps neither of them with the large files, whose store takes no empty ones.
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
    found = read_small(folder, stat_all(folder, configs)).values()
    return any(isinstance(f.document, dict) and has_auto_map(f.document) for f in found)


def _large(
    folder: Folder, paths: Sequence[str], manifest: Manifest | None
) -> tuple[LargeFile, ...]:
    """Looks at the large files; those of kinds whose bytes are not in order are read for that."""
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
    small: Mapping[str, Small], manifest: Manifest | None, repo_id: str, given: str | None
) -> tuple[str | None, ModelFacts]:
    config = _document(small, CONFIG) or {}
    adapter = _document(small, ADAPTER_CONFIG)
    base = base_model_of(config, adapter, given)
    title = repo_id.rsplit("/", 1)[-1]
    return base, ModelFacts(title, base, adapter, config, manifest)


def _document(small: Mapping[str, Small], path: str) -> Mapping[str, Any] | None:
    found = small[path].document if path in small else None
    return found if isinstance(found, Mapping) else None


def _notes(small: Mapping[str, Small], contents: Mapping[str, bytes]) -> list[str]:
    changed = [
        path
        for path, file in small.items()
        if contents[path] != file.data and path != MANIFEST_NAME
    ]
    notes = [f"{path} is published without the paths of this machine in it" for path in changed]
    if ADAPTER_CONFIG in changed:
        notes.append("the adapter's base was named by a path; name its repository: --base-model")
    return notes
