"""What an adapter changes in a model's configuration: vocabulary, head, class."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptkit.adapters.names import is_vocabulary
from ckptkit.core.index import Fqn, Shape

_VOCABULARY = "vocab_size"
_NESTING = 4
_HEADS = {  # PEFT's task types that put another head on a model, and what its class is called
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
_CLASSES = re.compile(r"(?:For[A-Z]\w*|LMHeadModel|Model)$")
_LABELLED = ("score", "classifier")  # what Transformers calls heads with one row per label


def has_vocabulary(name: str) -> bool:
    """Tells whether a tensor has a row for each token, by its name."""
    return is_vocabulary(name.rpartition(".")[0])


def model_types(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Returns the model types of a configuration and of those nested in it.

    Nothing where the model's code comes with it: its classes are not those of Transformers.
    """
    if config is None or config.get("auto_map"):
        return frozenset()
    return frozenset(_types(config, _NESTING))


def _types(config: Mapping[str, Any], depth: int) -> set[str]:
    own = config.get("model_type")
    found = {own} if isinstance(own, str) else set()
    for inner in config.values() if depth else ():
        if isinstance(inner, Mapping):
            found |= _types(inner, depth - 1)
    return found


def with_vocabulary(config: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Returns a configuration with another number of tokens, wherever it had the old one."""
    return _with_vocabulary(config, old, new, _NESTING)


def _with_vocabulary(config: Mapping[str, Any], old: int, new: int, depth: int) -> dict[str, Any]:
    changed = {
        key: _with_vocabulary(value, old, new, depth - 1)
        if isinstance(value, Mapping) and depth
        else value
        for key, value in config.items()
    }
    if changed.get(_VOCABULARY) == old:
        changed[_VOCABULARY] = new
    return changed


def vocabularies(config: Mapping[str, Any]) -> frozenset[int]:
    """Returns every number of tokens that a configuration names."""
    return frozenset(_vocabularies(config, _NESTING))


def _vocabularies(config: Mapping[str, Any], depth: int) -> Iterator[int]:
    own = config.get(_VOCABULARY)
    if isinstance(own, int):
        yield own
    for inner in config.values() if depth else ():
        if isinstance(inner, Mapping):
            yield from _vocabularies(inner, depth - 1)


def with_head(
    config: Mapping[str, Any], task_type: str | None, brought: Mapping[Fqn, Shape]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration that fits the head which an adapter brings.

    Args:
        config: Of the base, or of the run; it may be that of a model with another head.
        task_type: PEFT's name for what was trained.
        brought: The tensors that the adapter replaces or adds, whole.

    Returns:
        The configuration, and what was changed, in words.
    """
    changed, told = dict(config), []
    listed = config.get("architectures")
    old = listed[0] if isinstance(listed, list) and listed else None
    head = _HEADS.get(task_type or "")
    if head and isinstance(old, str) and _CLASSES.search(old) and not old.endswith(head):
        new = _CLASSES.sub(head, old)
        changed["architectures"] = [new]
        told.append(f"the adapter has a head of its own: 'architectures' is {new} instead of {old}")
    labels = _labels(brought) if head else None
    if labels is not None and labels != _number_of_labels(config):
        changed["id2label"] = {str(number): f"LABEL_{number}" for number in range(labels)}
        changed["label2id"] = {f"LABEL_{number}": number for number in range(labels)}
        told.append(
            f"the head has {labels} labels, whose names are not recorded: 'id2label' is LABEL_0 to"
            f" LABEL_{labels - 1}"
        )
    return changed, told


def _labels(brought: Mapping[Fqn, Shape]) -> int | None:
    """Returns how many labels a head has, from the last of its weights."""
    rows = [
        shape[0]
        for name, shape in brought.items()
        if len(shape) > 1 and set(name.split(".")) & set(_LABELLED)
    ]
    return rows[-1] if rows else None


def _number_of_labels(config: Mapping[str, Any]) -> int:
    named = config.get("id2label")
    if isinstance(named, Mapping):
        return len(named)
    number = config.get("num_labels", 2)
    return number if isinstance(number, int) else 2


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of weights that are not packed."""
    gone: Collection[str] = {"quantization_config", "_pre_quantization_dtype"}
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in gone
    }
