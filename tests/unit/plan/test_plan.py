"""Segments, files and tasks of a plan."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Key, Shape
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.plan.layouts.hf import DATA_ALIGNMENT, INDEX_NAME, layout_hf_weights
from ckptkit.plan.plan import (
    SOURCE,
    TASK_BYTES,
    Copy,
    Literal,
    OutputFile,
    Plan,
    Product,
    TensorSpec,
)


def product(name: str, shape: Shape, dtype: str = "float32") -> Product:
    return Product(TensorSpec(Fqn(name), dtype_named(dtype), shape), Copy(SOURCE, Key(name)))


def header_of(file: OutputFile) -> bytes:
    body = file.segments[0].body
    assert isinstance(body, Literal)
    return body.data


def names_of(file: OutputFile) -> list[str]:
    return [segment.spec.name for segment in file.segments if segment.spec is not None]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (4, ["norm", "a", "a_scale", "a_total", "b", "b_scale"]),
        (3, ["a_total", "a_scale", "b_scale", "norm", "a", "b"]),
    ],
    ids=["aligned", "not aligned behind others"],
)
def test_tensors_follow_those_that_they_are_made_with(columns: int, expected: list[str]) -> None:
    def made_with(leader: str, name: str, dtype: str) -> Product:
        return replace(product(name, (1,), dtype), after=Fqn(leader))

    products = [
        *(product(name, (3, columns), "float8_e4m3fn") for name in "ab"),
        product("norm", (2,), "bfloat16"),
        made_with("a", "a_scale", "bfloat16" if columns == 3 else "float32"),
        made_with("a", "a_total", "float32"),
        made_with("b", "b_scale", "bfloat16" if columns == 3 else "float32"),
    ]
    (file,) = layout_hf_weights(products, 1_000)
    assert names_of(file) == expected


def test_tensor_data_begins_on_a_page_and_larger_items_come_first() -> None:
    products = [product("b", (3,), "int8"), product("a", (2,), "float64"), product("c", (5,))]
    (file,) = layout_hf_weights(products, 10**9)
    assert file.path == "model.safetensors"
    assert names_of(file) == ["a", "c", "b"]
    assert file.segments[1].start % DATA_ALIGNMENT == 0
    for segment in file.segments[1:]:
        assert segment.spec is not None
        assert segment.start % segment.spec.dtype.itemsize == 0


def test_files_are_filled_in_order_and_the_index_tells_where() -> None:
    products = [product(name, (100,)) for name in "abcde"]
    *files, index = layout_hf_weights(products, 800)
    assert [file.path for file in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert [names_of(file) for file in files] == [["a", "b"], ["c", "d"], ["e"]]
    assert index.path == INDEX_NAME
    document = json.loads(header_of(index))
    assert document["weight_map"] == {name: f.path for f in files for name in names_of(f)}
    assert document["metadata"] == {"total_parameters": 500, "total_size": 2_000}


def test_a_dtype_that_safetensors_lacks_cannot_be_planned() -> None:
    with pytest.raises(CannotPlanError, match="complex128") as caught:
        layout_hf_weights([product("w", (2,), "complex128")], 10**9)
    assert "--exclude" in caught.value.hint
    assert "'w'" in caught.value.where


def test_a_header_over_the_librarys_limit_cannot_be_planned() -> None:
    products = [product("x" * 10_000_000 + str(i), ()) for i in range(11)]
    with pytest.raises(CannotPlanError, match="header") as caught:
        layout_hf_weights(products, 10**9)
    assert "--max-shard-size" in caught.value.hint


def test_tasks_are_leaves_or_several_small_tensors() -> None:
    elements = 2 * LEAF_BYTES + 4
    (file,) = layout_hf_weights(
        [product("big", (elements,), "int8"), product("small", (7,), "int8")], 10**9
    )
    tasks = list(Plan((file,), {}).tasks())
    assert tasks[0].start == 0
    assert [task.stop for task in tasks][-1] == file.size_bytes
    assert all(task.stop - task.start <= TASK_BYTES for task in tasks)
    leaves = [(p.start, p.stop) for t in tasks for p in t.parts if p.number == 2]  # after the small
    assert leaves == [(0, LEAF_BYTES), (LEAF_BYTES, 2 * LEAF_BYTES), (2 * LEAF_BYTES, elements)]
