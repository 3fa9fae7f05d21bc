"""What is published of a push's small files: without paths of this machine, and with a model card.

Manifests are made to match what is published, so that it can be verified where it is downloaded.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG
from ckptkit.core.checksums import digest_as
from ckptkit.core.manifest import CHECKSUM, MANIFEST_NAME, FileRecord, Manifest, parse_manifest
from ckptkit.core.model_configs import architecture_of, model_config_to_json, to_json
from ckptkit.formats.parsing import INDEX_ENDING
from ckptkit.hub.client import is_local, is_repo_id
from ckptkit.hub.secrets import find_secrets, refuse_secrets, secrets_in
from ckptkit.version import __version__

CARD = "README.md"
_SCRUBBED = ("config.json", INDEX_ENDING, MANIFEST_NAME, "run.json", "trainer_state.json")


def clean_contents(
    files: Mapping[str, bytes], others: Iterable[str], base_model: str | None, folder: str = ""
) -> dict[str, bytes]:
    """Returns small files without paths of this machine, with a manifest that matches them.

    `base_model` takes the place of a path of the base; the manifest is in `folder`, and lists
    `others` too.
    """
    contents = {path: scrub_content(path, data, base_model) for path, data in files.items()}
    front = f"{folder}/" if folder else ""
    own = f"{front}{MANIFEST_NAME}"
    if own not in contents:
        return contents
    manifest = parse_manifest(contents[own], where=own)
    names = {path.removeprefix(front) for path in [*contents, *others]}
    records = {path: record for path, record in manifest.files.items() if path in names}
    for path, record in records.items():
        data = contents.get(f"{front}{path}")
        if data is not None and record.digest:
            records[path] = FileRecord(len(data), digest_as(record.digest, memoryview(data)))
    tensors = {name: t for name, t in manifest.tensors.items() if t.file in names}
    contents[own] = replace(manifest, files=records, tensors=tensors).to_json()
    return contents


def check_contents(
    contents: Mapping[str, bytes], where: str, known: Sequence[str], others: Iterable[str] = ()
) -> None:
    """Refuses to publish keys and tokens; of `others`, names are searched only."""
    paths = "\n".join([*contents, *others])
    secrets = [f"{kind} in the name of a file" for kind in find_secrets(paths.encode(), known)]
    if not secrets:
        secrets = [
            f"{kind} in {path}"
            for path, data in sorted(contents.items())
            for kind in secrets_in([data], known)
        ]
    refuse_secrets(secrets, where)


_PATH_KEYS = frozenset({"also", "base", "config", "like", "path"})  # of a manifest
_BASE_KEY = "base_model_name_or_path"  # of an adapter
_NAME_KEYS = frozenset({"_name_or_path", "name_or_path", "id"})  # the last one is of a base model
_BEST = "best_model_checkpoint"  # a path, also where it looks like none of this machine
_PLACES = ("_file", "_path", "_dir", "_folder")  # endings of other keys that hold paths
_FRONT = re.compile(r"\A(---[ \t]*\r?\n)(.*?)(^---[ \t]*\r?$)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*[\"']?([^\"'\n]*)")  # of the outermost mapping
_ITEM = re.compile(r"\s*-\s+[\"']?([^\"'\n]*)")
_BASE_MODEL = "base_model"
_BASE_TAG = re.compile(r"^base_model:(?:\w+:)?(?!//)")


def scrub(path: str, document: Any, base_model: str | None) -> Any:
    """Returns a JSON document without paths of this machine.

    Paths in a manifest keep their last part, which often names the step.
    """
    name = posixpath.basename(path)
    if not isinstance(document, Mapping):
        return document
    if name == MANIFEST_NAME:
        parts = ("source", "options")
        return {
            key: _without_folders(value) if key in parts else value
            for key, value in document.items()
            if key != CHECKSUM  # of the content with its paths
        }
    return {
        key: _without_places(key, value, base_model if name == ADAPTER_CONFIG else None)
        for key, value in document.items()
    }


def _without_places(key: str, value: Any, base_model: str | None) -> Any:
    """Empties names that are paths, and removes files and folders of this machine.

    Configurations of models with several parts are nested.
    """
    if isinstance(value, Mapping):
        return {name: _without_places(name, inner, base_model) for name, inner in value.items()}
    if isinstance(value, str) and key == _BEST:
        return None
    if not isinstance(value, str) or not is_local(value):
        return value
    if key == _BASE_KEY:
        return base_model
    return "" if key in _NAME_KEYS else None if key.endswith(_PLACES) else value


def _without_folders(value: Any, key: str = "") -> Any:
    if isinstance(value, str) and (key in _PATH_KEYS or is_local(value)):
        return value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lstrip("~")
    if isinstance(value, Mapping):
        return {name: _without_folders(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, key) for inner in value]
    return value


def scrub_card(text: str) -> str:
    """Returns a model card whose metadata has no local path under `base_model`.

    Libraries write these, and the Hub would refuse them. All other keys are the author's own.
    """
    front = _FRONT.match(text)
    if front is None:
        return text
    lines = []
    below = ""
    for line in front[2].splitlines(keepends=True):
        key, item = _KEY.match(line), _ITEM.match(line)
        below = key[1] if key is not None else below
        value = (key[2] if key is not None else item[1] if item is not None else "").strip()
        base = _BASE_TAG.sub("", value)
        is_of_base = below == _BASE_MODEL or base != value
        if not (is_of_base and is_local(base)):
            lines.append(line)
    return f"{front[1]}{''.join(lines)}{front[3]}{text[front.end() :]}"


def scrub_content(path: str, data: bytes, base_model: str | None) -> bytes:
    """Returns a file's content as it is published; the same bytes where nothing is taken out."""
    if path == CARD:
        changed = scrub_card(data.decode(errors="surrogateescape"))
        return changed.encode(errors="surrogateescape")
    if not path.endswith(_SCRUBBED):
        return data
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):  # other texts are published unchanged
        return data
    new = scrub(path, document, base_model)
    if new == document:
        return data
    return model_config_to_json(new) if posixpath.basename(path) == CONFIG else to_json(new)


MARK = "<!-- written by ckptkit push; delete this line to keep your changes -->"
_CAUSAL = "ForCausalLM"
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


class ModelFacts(Struct, frozen=True):
    """What a card says."""

    title: str  # the name of the repository, without its owner
    base_model: str | None  # the repository of the base
    adapter: Mapping[str, Any] | None  # adapter_config.json, where an adapter is pushed
    config: Mapping[str, Any]  # config.json; empty where there is none
    manifest: Manifest | None
    library: str = ""  # that loads it, as the Hub calls it

    @property
    def step(self) -> int | None:
        step = self.manifest.source.get("step") if self.manifest is not None else None
        return step if isinstance(step, int) else None

    @property
    def dtype(self) -> str:
        """The element type of most parameters; empty where it is unknown."""
        elements: dict[str, int] = {}
        for tensor in self.manifest.tensors.values() if self.manifest is not None else ():
            size = 1
            for length in tensor.shape:
                size *= length
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + size
        configured = self.config.get("dtype") or self.config.get("torch_dtype") or ""
        return max(elements, key=lambda name: elements[name]) if elements else str(configured)


def base_model_of(
    config: Mapping[str, Any], adapter: Mapping[str, Any] | None, base_model: str | None
) -> str | None:
    """Returns the repository of the model that was trained, where known."""
    named = base_model or (
        adapter.get("base_model_name_or_path") if adapter else config.get("_name_or_path")
    )
    is_repository = isinstance(named, str) and "/" in named and is_repo_id(named)
    return str(named) if is_repository else base_model


def write_card(facts: ModelFacts) -> str:
    """Returns the card: metadata for the Hub, and a few lines for people."""
    what = "An adapter" if facts.adapter is not None else "A model"
    trained = f" trained from `{facts.base_model}`" if facts.base_model else ""
    about = f"{what}{trained}, written by ckptkit {__version__}."
    lines = [*_front(facts), "", MARK, "", f"# {facts.title}", "", about]
    rows = [f"| {name} | {value} |" for name, value in _rows(facts)]
    if rows:
        lines += ["", "| | |", "|---|---|", *rows]
    return "\n".join([*lines, ""])


def is_ours(card: bytes) -> bool:
    """Returns whether a card was written by ckptkit, and not edited since."""
    return MARK.encode() in card


def _front(facts: ModelFacts) -> Iterator[str]:
    yield "---"
    if facts.base_model:
        yield f"base_model: {json.dumps(facts.base_model)}"
        relation = "adapter" if facts.adapter is not None else "finetune"
        yield f"base_model_relation: {relation}"
    if facts.adapter is not None:
        yield "library_name: peft"
    elif facts.library:
        yield f"library_name: {facts.library}"
    if architecture_of(facts.config).endswith(_CAUSAL):
        yield "pipeline_tag: text-generation"
    yield "tags:"
    yield "- ckptkit"
    kind = (facts.adapter or {}).get("peft_type")
    if isinstance(kind, str) and kind.isalnum():
        yield f"- {kind.lower()}"
    yield "---"


def _rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.step is not None:
        yield "Step", f"{facts.step:,}"
    adapter = facts.adapter or {}
    stated = [("Element type", facts.dtype)]
    keys = (("peft_type", "Adapter"), ("r", "Rank"), ("lora_alpha", "Alpha"))
    stated += [(name, str(adapter.get(key, ""))) for key, name in keys]
    for name, value in stated:
        if _PLAIN.fullmatch(value):  # any other text of a file could be markup
            yield name, f"`{value}`"
    if facts.manifest is not None:
        origin = facts.manifest.source
        form, ranks = origin.get("format"), origin.get("world_size")
        if isinstance(form, str) and form.replace("_", "").isalnum():
            of = f", of {ranks:,} ranks" if isinstance(ranks, int) else ""
            yield "Made from", f"a `{form}` checkpoint{of}"
        yield "Tensors", f"{len(facts.manifest.tensors):,}, each with its digest in `ckptkit.json`"
