"""The small files of a push: read into memory, cleaned of local paths, searched for secrets."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.checksums import digest_as
from ckptkit.core.errors import FormatError, VerificationError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest, parse_manifest
from ckptkit.formats.torch_files.reader import INDEX_ENDING
from ckptkit.hub.publish.searching import refuse_found, secrets_in
from ckptkit.hub.publish.secrets import find_secrets, scrubbed_content
from ckptkit.storage.base import Source

MAX_SMALL_BYTES = 64_000_000
"""Larger files than any text of a model, which tokenizers of 33 MB are, are not held in memory."""
_PARSED = ("config.json", INDEX_ENDING, MANIFEST_NAME)
_OF_STEPS = ("config.json", MANIFEST_NAME, "run.json", "trainer_state.json")
_HINT = (
    "put the file back, or write the folder again; if you changed it on purpose, delete"
    " ckptkit.json, and the push will prove nothing"
)


@dataclass(frozen=True, slots=True)
class Small:
    """A file as it lies in the folder, and as it is published."""

    path: str
    data: bytes
    document: Any


def read_small(source: Source, paths: Iterable[str]) -> dict[str, Small]:
    return {path: _read(source, path) for path in paths}


def _read(source: Source, path: str) -> Small:
    data = source.read(path, 0, source.stat(path).size_bytes)
    document = None
    if path.endswith(_PARSED):
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            where = posixpath.join(source.location, path)
            raise FormatError(f"is not JSON: {error}", where=where) from error
    return Small(path, data, document)


def check_against_manifest(files: Iterable[Small], manifest: Manifest, where: str) -> None:
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


def published(
    files: Mapping[str, Small], base_model: str | None, large: Iterable[str]
) -> dict[str, bytes]:
    """Returns the content of files without paths of this machine, the manifest fitted to it.

    Args:
        files: The small files that are pushed.
        base_model: The base's repository, where it is known.
        large: The other files that are pushed.
    """
    contents = {
        path: scrubbed_content(path, file.data, file.document, base_model)
        for path, file in files.items()
    }
    if MANIFEST_NAME in contents:
        scrubbed = parse_manifest(contents[MANIFEST_NAME], where=MANIFEST_NAME)
        contents[MANIFEST_NAME] = _fitted(scrubbed, contents, set(large)).to_json()
    return contents


def published_step(
    texts: Mapping[str, bytes], others: Iterable[str], folder: str, base_model: str | None
) -> dict[str, bytes]:
    """Returns the texts of a step that is pushed beside a model, without paths of this machine.

    Its manifest is fitted to them, so that it proves what a run resumes from elsewhere.

    Args:
        texts: The content of its files, by path.
        others: Its other files that are pushed.
        folder: The step's name; the paths begin with it.
        base_model: The base's repository, where it is known.
    """
    contents = dict(texts)
    for path in texts:
        if path.endswith(_OF_STEPS):
            document = _parsed(texts[path])
            contents[path] = scrubbed_content(path, texts[path], document, base_model)
    own = f"{folder}/{MANIFEST_NAME}"
    if own in contents:
        manifest = parse_manifest(contents[own], where=own)
        inside = {f"{folder}/{path}": path for path in manifest.files}
        small = {inside[path]: contents[path] for path in inside.keys() & contents.keys()}
        large = {path.removeprefix(f"{folder}/") for path in others}
        contents[own] = _fitted(manifest, small, large).to_json()
    return contents


def _parsed(data: bytes) -> Any:
    """Returns a JSON document; None for what is none, which is then published as it is."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _fitted(manifest: Manifest, contents: Mapping[str, bytes], large: set[str]) -> Manifest:
    """Gives the manifest the sizes and digests of files as they are published, and of no others."""
    there = large | contents.keys()
    records = {path: record for path, record in manifest.files.items() if path in there}
    tensors = {name: t for name, t in manifest.tensors.items() if t.file in there}
    for path, data in contents.items():
        if path in records and records[path].digest:
            digest = digest_as(records[path].digest, memoryview(data))
            records[path] = FileRecord(len(data), digest)
    return replace(manifest, files=records, tensors=tensors)


def refuse_secrets(
    contents: Mapping[str, bytes], where: str, known: Sequence[str], others: Iterable[str] = ()
) -> None:
    """Refuses to publish keys and tokens.

    Args:
        contents: The content of files, by path.
        where: The folder that the files lie in.
        known: Secrets that are in use.
        others: Further files that are published, whose names alone are searched.
    """
    paths = "\n".join([*contents, *others])
    found = [f"{kind} in the name of a file" for kind in find_secrets(paths.encode(), known)]
    if not found:
        found = [
            f"{kind} in {path}"
            for path, data in sorted(contents.items())
            for kind in secrets_in([data], known)
        ]
    refuse_found(found, where)
