"""Everything about a push that is decided before the Hub is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import VerificationError
from ckptkit.core.index import FileRef
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.formats.weight_map import INDEX_ENDING
from ckptkit.hub.card import ModelFacts, base_model_of, write_card
from ckptkit.hub.contents import (
    MAX_SMALL_BYTES,
    Small,
    check_against_manifest,
    published,
    published_step,
    read_small,
    refuse_secrets,
)
from ckptkit.hub.files import ADAPTER_CONFIG, CARD, Skipped, choose_files, is_weights
from ckptkit.hub.reading import LargeFile, large_file
from ckptkit.hub.sources import (
    check_complete,
    files_below,
    files_of_whole,
    read_manifest,
    refuse_checkpoints,
    stat_all,
)
from ckptkit.pipeline.verifying import run_verification
from ckptkit.planning.side_files import CONFIG, has_auto_map
from ckptkit.storage.base import Folder

_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wants to be published.

    Attributes:
        optimizer: Whether the state of the optimizer goes too.
        include: Patterns of further files.
        base_model: The base's repository, where the folder names it by a path.
        secrets: What must not be in any file; the token in use.
        whole: A folder below that goes as a whole, such as a step to resume from; empty for none.
    """

    optimizer: bool = False
    include: Sequence[str] = ()
    base_model: str | None = None
    secrets: Sequence[str] = ()
    whole: str = ""


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
    """Decides what is published, and refuses what must not be.

    Raises:
        RefusedError: If the folder is not one that loads, or holds a secret.
        InputError: If it is damaged or incomplete.
        VerificationError: If it is not what its manifest says.
    """
    whole = files_of_whole(folder, wishes.whole)
    paths = sorted(set(files_below(folder)) - set(whole))
    manifest = read_manifest(folder, paths)
    refuse_checkpoints(folder, paths)
    chosen = choose_files(
        paths, code=_names_code(folder, paths), optimizer=wishes.optimizer, include=wishes.include
    )
    refs = stat_all(folder, [*chosen.files, *whole])
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
    texts = published_step(_texts(folder, whole, refs), wishes.whole, base_model)
    refuse_secrets(contents | words | texts, folder.location, wishes.secrets)
    streamed = [path for path in whole if path not in texts]
    return Package(
        contents=contents | texts,
        large=large + tuple(LargeFile(path, refs[path].size_bytes, ()) for path in streamed),
        refs=refs,
        skipped=chosen.skipped,
        card=None if CARD in contents else write_card(facts),
        step=facts.step,
        notes=tuple(_notes(small, contents)),
        whole=wishes.whole,
    )


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
