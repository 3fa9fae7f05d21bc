"""The model card: written for a repository that has none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.manifest import Manifest
from ckptkit.hub.publish.secrets import is_repo_id
from ckptkit.version import __version__

MARK = "<!-- written by ckptkit push; delete this line to keep your changes -->"
_CAUSAL = "ForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a card says.

    Attributes:
        title: The name of the repository, without its owner.
        base_model: The repository of the base, or None.
        adapter: `adapter_config.json`, where an adapter is pushed.
        config: `config.json`; empty where there is none.
        manifest: Of the folder; None where it has none.
    """

    title: str
    base_model: str | None
    adapter: Mapping[str, Any] | None
    config: Mapping[str, Any]
    manifest: Manifest | None

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
    return "\n".join([*_front(facts), "", MARK, "", *_body(facts), ""])


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
    elif facts.config.get("model_type"):
        yield "library_name: transformers"
    architectures = facts.config.get("architectures") or [""]
    if str(architectures[0]).endswith(_CAUSAL):
        yield "pipeline_tag: text-generation"
    yield "tags:"
    yield from (f"- {tag}" for tag in _tags(facts))
    yield "---"


def _tags(facts: ModelFacts) -> Iterator[str]:
    yield "ckptkit"
    kind = (facts.adapter or {}).get("peft_type")
    if isinstance(kind, str) and kind.isalnum():
        yield kind.lower()


def _body(facts: ModelFacts) -> Iterator[str]:
    yield f"# {facts.title}"
    yield ""
    what = "An adapter" if facts.adapter is not None else "A model"
    trained = f" trained from `{facts.base_model}`" if facts.base_model else ""
    yield f"{what}{trained}, written by ckptkit {__version__}."
    rows = list(_rows(facts))
    if rows:
        yield ""
        yield "| | |"
        yield "|---|---|"
        yield from (f"| {name} | {value} |" for name, value in rows)


def _rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.step is not None:
        yield "Step", f"{facts.step:,}"
    if facts.dtype:
        yield "Element type", f"`{facts.dtype}`"
    if facts.adapter is not None:
        yield from _adapter_rows(facts.adapter)
    if facts.manifest is not None:
        yield from _origin_rows(facts.manifest)


def _adapter_rows(adapter: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = {"peft_type": "Adapter", "r": "Rank", "lora_alpha": "Alpha"}
    for key, name in names.items():
        if isinstance(adapter.get(key), (str, int, float)):
            yield name, f"`{adapter[key]}`".replace("|", "")


def _origin_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    form, ranks = manifest.source.get("format"), manifest.source.get("world_size")
    if isinstance(form, str) and form.replace("_", "").isalnum():
        of = f", of {ranks:,} ranks" if isinstance(ranks, int) else ""
        yield "Made from", f"a `{form}` checkpoint{of}"
    yield "Tensors", f"{len(manifest.tensors):,}, each with its digest in `ckptkit.json`"
