"""What lies in a source: its listing, and what manifests name that a listing does not show yet."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from ckptkit.core.errors import InputError
from ckptkit.core.index import FileRange
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    RUN_FACTS,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.registry import SEARCH_DEPTH, recognise
from ckptkit.runs.steps import step_folder
from ckptkit.storage.base import Source, distant, is_there, prefetch
from ckptkit.storage.manifests import read_manifest

_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = ".safetensors"
_NO_HEADERS = ".distcp"
_OF_STEPS = (MANIFEST_NAME, RUN_FACTS)  # the manifest first


def listed_files(source: Source) -> list[str]:
    """Returns the paths of all files at the depth at which checkpoints are looked for.

    An object store may list what was written a moment ago only later. The manifest of a step is
    written last, so what it names is there, and is found by its name.
    """
    paths = list(source.walk(SEARCH_DEPTH))
    if distant(source) is None:
        return paths
    known = set(paths)
    steps = dict.fromkeys(step_folder(one.folder) for one in recognise(paths)) or [""]
    expected = [posixpath.join(step, name) for step in steps for name in _OF_STEPS]
    prefetch(source, [FileRange(path, 0, 0) for path in expected if path not in known])
    manifests = [path for path in paths if posixpath.basename(path) == MANIFEST_NAME]
    manifests += [path for path in expected[:: len(_OF_STEPS)] if path not in known]
    prefetch(source, list(_extents(source, manifests)))
    for path in manifests:
        named = (one for one in _named(source, path) if one not in known)
        known.update(one for one in named if is_there(source, one))
    return sorted(known)


def foresee_headers(source: Source, candidate: Candidate) -> None:
    """Has the headers of all files of a checkpoint read at once, where each costs a round trip."""
    if distant(source) is not None:
        prefetch(source, list(_headers(source, candidate)))


def _headers(source: Source, candidate: Candidate) -> Iterator[FileRange]:
    """Yields where readers look first: any such range brings what lies around it."""
    for path in candidate.files:
        if path.endswith(_NO_HEADERS) or not is_there(source, path):
            continue
        size = source.stat(path).size_bytes
        if path.endswith(_ARCHIVES):
            yield FileRange(path, max(size - 1, 0), size)
        elif path.endswith(_WEIGHTS):
            yield FileRange(path, 0, min(1, size))
        else:
            yield FileRange(path, 0, size)


def _extents(source: Source, manifests: Sequence[str]) -> Iterator[FileRange]:
    for path in manifests:
        if is_there(source, path):
            yield FileRange(path, 0, source.stat(path).size_bytes)


def _named(source: Source, path: str) -> Iterator[str]:
    folder = posixpath.dirname(path)
    try:
        manifest = read_manifest(source, folder)
    except InputError:
        return  # reported when the step is listed
    yield path
    yield from (posixpath.join(folder, name) for name in manifest.files)
