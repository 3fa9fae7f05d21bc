"""Public functions refuse options that they do not have, and values of another kind."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

import ckptkit
import ckptkit.hub
import ckptkit.training
from ckptkit.conversion.diff import Difference, TensorDifference
from ckptkit.conversion.inspect import Inspection
from ckptkit.conversion.seal import Sealing
from ckptkit.conversion.stats import Statistics
from ckptkit.conversion.verify import Verification
from ckptkit.core.arguments import check_arguments, check_names
from ckptkit.core.errors import ArgumentError, CkptkitError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.deltas.checks import DeltaInspection
from ckptkit.diagnosis.findings import Diagnosis
from ckptkit.hub import Pushed
from ckptkit.options import choose_dtype
from ckptkit.runs.listing import RunListing
from ckptkit.runs.pruning import Pruned

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields all functions that users call, and methods of the objects that these return."""
    for name in ("ckptkit", "ckptkit.hub", "ckptkit.training", "ckptkit.readers"):
        module = importlib.import_module(name)
        for public in module.__all__:
            if isinstance(getattr(module, public), FunctionType):
                yield f"{name}.{public}", getattr(module, public)
    for name in ("accelerate", "transformers", "scalars"):
        module = importlib.import_module(f"ckptkit.integrations.{name}")
        for function in documented_functions(module.__name__):
            yield f"{module.__name__}.{function}", getattr(module, function)
    yield "ckptkit.training.Checkpointer", ckptkit.training.Checkpointer.__init__
    yield from public_methods()


def public_methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for kind in (ckptkit.training.Checkpointer, ckptkit.training.SaveHandle):
        for method, function in inspect.getmembers(kind, inspect.isfunction):
            if not method.startswith("_") and takes_options(function):
                yield f"{kind.__name__}.{method}", function


def documented_functions(module: str) -> list[str]:
    """Returns the names that the documentation imports from a module, in one order in every run."""
    text = "".join(path.read_text() for path in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md"))
    found = {
        name.strip()
        for line in text.splitlines()
        if line.startswith(f"from {module} import ")
        for name in line.partition(" import ")[2].split(",")
    }
    assert found
    return sorted(found)


def takes_options(function: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return any(one.default is not one.empty or one.kind > one.VAR_POSITIONAL for one in parameters)


PUBLIC = dict(public_functions())


def test_all_that_users_call_is_looked_at() -> None:
    assert {
        "ckptkit.consolidate",
        "ckptkit.convert",
        "ckptkit.merge_adapter",
        "ckptkit.extract_adapter",
        "ckptkit.adapter_from_diff",
        "ckptkit.hub.push",
        "ckptkit.hub.pull",
        "ckptkit.training.Checkpointer",
        "Checkpointer.export",
        "SaveHandle.result",
        "ckptkit.integrations.accelerate.install",
        "ckptkit.integrations.transformers.install",
        "ckptkit.readers.dtype_named",
    } <= PUBLIC.keys()


def nearly(name: str) -> str:
    """Returns a name with two letters exchanged."""
    return name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + "x"


@pytest.mark.parametrize("name", PUBLIC)
def test_an_unknown_option_is_refused_with_the_nearest_one(name: str) -> None:
    function = PUBLIC[name]
    count = len(
        [
            one
            for one in inspect.signature(function).parameters.values()
            if one.kind == one.POSITIONAL_OR_KEYWORD and one.default is one.empty
        ]
    )
    for option in options_of(function):
        with pytest.raises(ArgumentError) as caught:
            function(*[None] * count, **{nearly(option): None})
        assert f"unknown option {nearly(option)!r}; did you mean '" in caught.value.message
        assert isinstance(caught.value, (TypeError, CkptkitError, UsageError))
    with pytest.raises(ArgumentError, match="unknown option 'zzzzzz'") as caught:
        function(*[None] * count, zzzzzz=1)
    assert caught.value.hint.startswith("known are ")


def options_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names that can be given by keyword, those of a TypedDict among them."""
    unwrapped = inspect.unwrap(function)
    found = []
    for name, one in inspect.signature(unwrapped).parameters.items():
        if one.kind == one.VAR_KEYWORD:
            kind = str(one.annotation).removeprefix("Unpack[").removesuffix("]")
            found += list(unwrapped.__globals__[kind].__annotations__)
        elif one.kind == one.KEYWORD_ONLY or one.default is not one.empty:
            found.append(name)
    return found


def test_the_nearest_option_is_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        ckptkit.consolidate(LLAMA, tmp_path / "out", dtpye="bfloat16")  # type: ignore[call-arg]
    assert str(caught.value) == "consolidate: unknown option 'dtpye'; did you mean 'dtype'?"
    with pytest.raises(CkptkitError, match="did you mean 'match_peft'"):
        ckptkit.merge_adapter(LLAMA, tmp_path / "out", match_pft=True)  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "abc"}, "include: is a str, where a list of texts was expected"),
        ({"include": b"abc"}, "include: is a bytes, where a list of texts was expected"),
        ({"exclude": ["a", 1]}, "exclude: is a list with an int in it, where a list of texts"),
        ({"also": Path("x")}, "also: is a PosixPath, where a list of paths was expected"),
        ({"keep_dtype": {"a": 1}}, "keep_dtype: is a dict, where a list of texts was expected"),
        ({"workers": "2"}, "workers: is a str, where a whole number or None was expected"),
        ({"workers": True}, "workers: is a bool, where a whole number or None was expected"),
        ({"workers": -1}, "--workers: -1 is not at least 1"),
        ({"vocab_size": 2.5}, "--vocab-size: 2.5 is not a positive whole number"),
        ({"vocab_size": -1}, "--vocab-size: -1 is not a positive whole number"),
        ({"overwrite": "no"}, "overwrite: is a str, where True or False was expected"),
        ({"delete_source": None}, "delete_source: is None, where True or False was expected"),
        ({"memory_budget": 1.5}, "memory_budget: is a float, where a whole number or a text"),
        ({"memory_budget": -5}, "--memory-budget: -5 is not a size"),
        ({"src_options": "key=x"}, "src_options: is a str, where a dict or None was expected"),
        ({"listener": "print"}, "listener: is a str, where a function or None was expected"),
        ({"base": b"base"}, "base: is a bytes, where a path or None was expected"),
        ({"dtype": 5}, "--dtype: is an int, where a text was expected"),
        ({"names": 5}, "--names: is an int, where a text was expected"),
        ({"if_exists": ["verify"]}, "--if-exists: is a list, where a text was expected"),
        ({"engine": None}, "--engine: is None, where a text was expected"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ckptkit.consolidate(LLAMA, tmp_path / "out", **options)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_path_of_another_kind_is_refused_and_no_value_is_shown(tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: ckptkit.verify(cast(Any, None)),
        lambda: ckptkit.consolidate(LLAMA, cast(Any, 5)),
        lambda: ckptkit.list_run(cast(Any, [tmp_path])),
        lambda: ckptkit.open(cast(Any, b"run")),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="where a path was expected"):
            call()
    with pytest.raises(ArgumentError) as caught:
        ckptkit.hub.push(tmp_path, "org/name", token=cast(Any, ["hf_secret"]))
    assert "hf_secret" not in str(caught.value)


def test_values_that_are_alike_are_taken() -> None:
    @check_arguments
    def take(
        *, workers: int | None = None, overwrite: bool = False, include: Any = (), rate: float = 1
    ) -> list[Any]:
        return [workers, overwrite, include, rate]

    assert take(workers=cast(Any, np.int64(2)), overwrite=cast(Any, np.True_), rate=3)[0] == 2
    assert take(overwrite=cast(Any, 1), rate=cast(Any, np.float32(2)))[1] == 1


def test_names_alone_are_checked_where_ranks_have_to_agree_on_values() -> None:
    @check_names
    def take(*, step: int = 0) -> int:
        return step

    assert take(step=cast(Any, "x")) == cast(Any, "x")
    with pytest.raises(ArgumentError, match="did you mean 'step'"):
        take(stpe=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("torch.bfloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ],
)
def test_an_element_type_has_several_names(given: object, expected: str) -> None:
    assert choose_dtype(given, ("keep", "float32", "bfloat16", "float16")) == expected


@pytest.mark.parametrize("given", [torch.int8, torch.float8_e4m3fn, np.float64, "double", "auto"])
def test_an_element_type_that_is_not_written_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="is not among keep, float32"):
        choose_dtype(given, ("keep", "float32"))


def test_functions_with_an_element_type_take_those_of_torch(tmp_path: Path) -> None:
    manifest = ckptkit.consolidate(LLAMA, tmp_path / "out", dtype=torch.bfloat16)
    assert manifest.options["dtype"] == "bfloat16"
    assert {one.dtype for one in manifest.tensors.values()} == {"bfloat16"}


def difference(*changed: TensorDifference) -> Difference:
    return Difference("a", "b", 1, (), (), {}, changed)


def test_a_result_is_as_true_as_its_name_says(tmp_path: Path) -> None:
    ckptkit.consolidate(LLAMA, tmp_path / "a")
    ckptkit.consolidate(LLAMA, tmp_path / "b", dtype="bf16")
    assert ckptkit.verify(tmp_path / "a")
    assert ckptkit.diff(tmp_path / "a", tmp_path / "a")
    assert not ckptkit.diff(tmp_path / "a", tmp_path / "b")
    weights = tmp_path / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert not ckptkit.verify(tmp_path / "a")


def test_a_result_that_could_mean_several_things_has_no_truth_value(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-4"
    step.mkdir(parents=True)
    for path in LLAMA.rglob("*"):
        if path.is_file():
            copy = step / path.relative_to(LLAMA)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    delta = tmp_path / "delta"
    ckptkit.create_delta(step, step, delta)
    results: list[tuple[object, str]] = [
        (ckptkit.inspect(step), "inspection.problems"),
        (ckptkit.list_run(tmp_path / "run"), "listing.steps"),
        (ckptkit.stats(step), "statistics.nan"),
        (ckptkit.prune(tmp_path / "run", keep_last=1, dry_run=True), "pruned.removed"),
        (ckptkit.inspect_delta(delta), "inspection.tensors"),
    ]
    for result, instead in results:
        with pytest.raises(TypeError, match="truth value") as caught:
            bool(result)
        assert instead in cast(CkptkitError, caught.value).hint


def pushed(commit: str) -> Pushed:
    return Pushed("org/name", commit, "", None, (), (), (), (), 0, "")


def test_a_push_is_true_once_the_hub_holds_it() -> None:
    assert pushed("0" * 40)
    assert not pushed("")


def test_every_result_of_a_public_function_was_decided_about() -> None:
    """Those that are true whenever they exist stand here: what failed was raised instead."""
    decided = {Verification, Difference, Inspection, RunListing, Pruned, Pushed, Statistics}
    decided |= {DeltaInspection, Diagnosis, Sealing}
    assert all("__bool__" in vars(kind) for kind in decided)
    always_true = {"Manifest", "Pulled", "Checkpoint", "Serving", "Path"}
    assert not hasattr(Manifest, "__bool__")
    returned = {
        name
        for function in PUBLIC.values()
        if function.__module__.startswith(("ckptkit.api", "ckptkit.hub", "ckptkit.api"))
        or function.__module__.endswith("_api")
        for name in names_in(function.__annotations__["return"])
    }
    assert returned == {kind.__name__ for kind in decided} | always_true


def names_in(annotation: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}


def test_a_report_of_a_path_in_place_of_a_result_is_refused(tmp_path: Path) -> None:
    fixtures = Path(__file__).resolve().parents[3] / "fixtures"
    inspection = ckptkit.inspect(fixtures / "fsdp2_plain" / "checkpoint")
    for name, source in (("run", "list_run"), ("statistics", "stats")):
        given: dict[str, Any] = {name: str(tmp_path)}
        with pytest.raises(ArgumentError, match=f"where the result of {source} was expected"):
            ckptkit.write_report(inspection, tmp_path / "r.html", **given)
    assert list(tmp_path.iterdir()) == []
