"""`help`, `inspect.signature` and notebooks show the options of every public function by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import ArgumentError
from tests.contract.test_public_surface import _functions, functions

FUNCTIONS = dict(_functions())
WORKS_ON_DATA = (
    *("adapter_from_diff", "apply_delta", "average", "consolidate", "convert", "create_delta"),
    *(
        "convert_adapter",
        "diff",
        "extract_adapter",
        "merge_adapter",
        "prune",
        "seal",
        "stats",
        "verify",
    ),
    *("hub.pull", "hub.push", "training.load_into"),
)


def accepted(name: str) -> set[str]:
    """Returns the names of what a function takes, with the options that its type declares."""
    return {text.rpartition(" ")[2] for text in functions()[name]}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_has_what_a_function_takes(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    assert set(signature.parameters) == accepted(name)
    kinds = {one.kind for one in signature.parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert not [
        one.name
        for one in signature.parameters.values()
        if one.annotation is one.empty and one.name != "self"
    ]


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name.startswith("ckptkit.") and name.count(".") == 1]
)
def test_a_name_that_is_not_shown_is_refused(name: str) -> None:
    function: Any = FUNCTIONS[name]
    needed = [
        "x"
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind is not one.KEYWORD_ONLY
    ]
    with pytest.raises(ArgumentError, match="unknown option 'not_an_option'"):
        function(*needed, not_an_option=1)


@pytest.mark.parametrize("name", WORKS_ON_DATA)
def test_a_function_that_works_on_data_shows_progress(name: str) -> None:
    assert {"progress", "listener"} <= set(
        inspect.signature(FUNCTIONS[f"ckptkit.{name}"]).parameters
    )


def test_a_class_shows_the_options_of_its_instances() -> None:
    from ckptkit.training import Checkpointer

    shown = inspect.signature(Checkpointer).parameters
    assert "self" not in shown
    assert shown["keep_last"].kind is inspect.Parameter.KEYWORD_ONLY
    assert str(shown["keep_last"]) == "keep_last: int | None = ..."


def test_an_option_reads_as_in_a_file_of_types() -> None:
    text = str(inspect.signature(ckptkit.average))
    assert text.startswith("(sources: PathLike | Sequence[PathLike], out: PathLike, *, ")
    assert ", ema: float | None = ...," in text
    assert text.endswith(") -> Manifest")
    assert not {"also", "optimizer", "delete_source"} & set(
        inspect.signature(ckptkit.average).parameters
    )
