"""The names and shapes of language models by the keys of `config.json`, without transformers.

`model_shapes.jsonl` describes a class by its sizes, its switches, the keys that change nothing, and
those that may only have their default. `fixtures/generators/model_shapes.py` finds them by building
the class. A configuration that says anything else is not described.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.data_rows import read_row
from ckptkit.core.index import Shape
from ckptkit.core.model_configs import architecture_of
from ckptkit.plan.load_report import LoadRequest

DATA = Path(__file__).with_name("model_shapes.jsonl")
LAYER = "{layer}"
_MOST, _MOST_LAYERS = 1 << 40, 10_000  # a configuration may be hostile
_FACTOR = re.compile(r"(^|[*/])([^*/]+)")


class _UndescribedError(Exception):
    """The configuration says what was not tried; this never leaves the module."""


def is_as_described(request: LoadRequest) -> bool:
    """Returns whether tensors are, for certain, those of the class that a configuration names."""
    shapes = None if request.is_packed else lay_out(request.config)
    if shapes is None:
        return False
    given = {n: shape for n, (_, shape) in request.tensors.items() if n not in request.left_out}
    missing = shapes.keys() - given.keys() - find_tied(request.config)
    return not missing and all(shapes.get(name) == shape for name, shape in given.items())


def lay_out(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Returns the shapes of the tensors of a model, by name; None where they are not certain."""
    family = _find_family(config)
    if family is None or architecture_of(config) != family["class"]:
        return None
    try:
        values = _Values(family, config)
        return dict(_expand(family, values))
    except _UndescribedError:
        return None


def find_tied(config: Mapping[str, Any]) -> set[str]:
    """Returns the names that a described model need not have, as it ties them to others."""
    family = _find_family(config)
    if family is None:
        return set()
    return {*family["tied"]} if config.get("tie_word_embeddings", family["ties"]) else set()


def _expand(family: Mapping[str, Any], values: _Values) -> Iterator[tuple[str, Shape]]:
    for condition, rows in family["rows"].items():
        if not all(values.meets(one) for one in condition.split()):
            continue
        for template, terms in rows.items():
            shape = tuple(values.compute(term) for term in terms.split())
            if LAYER in template:
                for layer in range(min(values.compute(family["layers"]), _MOST_LAYERS)):
                    yield template.replace(LAYER, str(layer)), shape
            else:
                yield template, shape


class _Values:
    """What a configuration says, with what its class takes for what it does not."""

    def __init__(self, family: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuses keys and values that were not tried."""
        self._config, self._family = config, family
        free = {*read_row(DATA, "free").split(), *family["free"].split()}
        for key, value in config.items():
            if key in family["sizes"]:
                is_size = type(value) is int and 0 < value <= _MOST
                is_fit = is_size or (value is None and key in family["null"])
            elif key in family["switches"]:
                is_fit = isinstance(value, bool)
            elif key in family["activations"]:
                is_fit = value in read_row(DATA, "activations")
            else:
                is_fit = key in free or family["fixed"].get(key, self) == value
            if not is_fit:
                raise _UndescribedError(key)
        switches = family["switches"]
        changed = [key for key, usual in switches.items() if config.get(key, usual) != usual]
        if family["alone"] and len(changed) > 1:
            raise _UndescribedError(changed)

    def meets(self, condition: str) -> bool:
        """Returns whether a switch, `key` or `!key`, is as a condition has it."""
        key = condition.lstrip("!")
        is_on = bool(self._config.get(key, self._family["switches"][key]))
        return is_on != condition.startswith("!")

    def compute(self, terms: str) -> int:
        """Computes a sum of products and quotients of sizes; each term is a whole number."""
        total = 0
        for term in terms.split("+"):
            value = 1
            for sign, factor in _FACTOR.findall(term):
                number = int(factor) if factor.isdigit() else self._find(factor)
                if sign == "/" and value % number:
                    raise _UndescribedError(terms)
                value = value // number if sign == "/" else value * number
            total += value
        return total

    def _find(self, key: str) -> int:
        value = self._config.get(key)
        usual = str(self._family["sizes"][key])
        if value is None and not usual:
            raise _UndescribedError(key)
        return self.compute(usual) if value is None else int(value)


def _find_family(config: Mapping[str, Any]) -> Any:
    model_type = config.get("model_type")
    return read_row(DATA, "families", model_type) if isinstance(model_type, str) else None
