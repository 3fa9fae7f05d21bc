"""Whatever is to be written: files are covered exactly, and leaves are never split."""

from __future__ import annotations

import json
from collections import defaultdict
from unittest import mock

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.index import Fqn, Key
from ckptkit.plan import plan as plan_module
from ckptkit.plan.layouts.hf import DATA_ALIGNMENT, INDEX_NAME, layout_hf_weights
from ckptkit.plan.layouts.torch import layout_dcp, layout_torch_full
from ckptkit.plan.plan import (
    SOURCE,
    Copy,
    Literal,
    OutputFile,
    Plan,
    Product,
    TensorSpec,
    Trailer,
)
from tests.property.examples import examples

LEAF = 64  # in place of 8 MiB, so that small tensors have several leaves
DTYPES = st.sampled_from([dtype for dtype in BY_NAME.values() if dtype.safetensors])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
NAMES = st.text("abcé.\n\"'_0", min_size=1, max_size=6)


@st.composite
def products(draw: st.DrawFn) -> list[Product]:
    names = draw(st.lists(NAMES, unique=True, max_size=8))
    return [
        Product(TensorSpec(Fqn(name), draw(DTYPES), draw(SHAPES)), Copy(SOURCE, Key(name)))
        for name in names
    ]


LAYOUTS = st.sampled_from([layout_hf_weights, layout_torch_full, layout_dcp])


def literal(file: OutputFile, number: int = 0) -> bytes:
    body = file.segments[number].body
    assert isinstance(body, Literal)
    return body.data


@settings(max_examples=examples(80))
@given(products(), LAYOUTS, st.integers(1, 500))
def test_segments_are_contiguous_and_every_tensor_is_written_once(
    wanted: list[Product], layout: object, max_file_bytes: int
) -> None:
    assert callable(layout)
    files: list[OutputFile] = layout(wanted, max_file_bytes)
    assert len({file.path for file in files}) == len(files)
    for file in files:
        at = 0
        for segment in file.segments:
            assert segment.start == at
            at = segment.stop
            if isinstance(segment.body, Literal):
                assert len(segment.body.data) == segment.stop - segment.start
            if isinstance(segment.body, Trailer):
                assert len(segment.body.template) == segment.stop - segment.start
            if segment.spec is not None:
                assert segment.stop - segment.start == segment.spec.size_bytes
        assert at == file.size_bytes
    specs = [spec for _, _, spec in Plan(tuple(files), {}).specs()]
    assert sorted(specs, key=lambda s: s.name) == sorted(
        (product.spec for product in wanted), key=lambda s: s.name
    )


@settings(max_examples=examples(80))
@given(products(), LAYOUTS, st.integers(1, 500), st.integers(1, 3))
def test_tasks_cover_each_file_exactly_once_and_split_no_leaf(
    wanted: list[Product], layout: object, max_file_bytes: int, leaves_per_task: int
) -> None:
    assert callable(layout)
    task_bytes = LEAF * leaves_per_task
    plan = Plan(tuple(layout(wanted, max_file_bytes)), {})
    with (
        mock.patch.object(plan_module, "LEAF_BYTES", LEAF),
        mock.patch.object(plan_module, "TASK_BYTES", task_bytes),
    ):
        tasks = list(plan.tasks())
    reached: dict[int, int] = defaultdict(int)
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for task in tasks:
        assert task.start == reached[task.file]
        assert 0 < task.stop - task.start <= task_bytes
        assert task.stop - task.start == sum(part.stop - part.start for part in task.parts)
        at = task.start
        for part in task.parts:
            assert part.segment is plan.files[task.file].segments[part.number]
            assert part.segment.start + part.start == at
            at += part.stop - part.start
            pieces[task.file, part.number].append((part.start, part.stop))
        reached[task.file] = task.stop
    for number, file in enumerate(plan.files):
        assert reached[number] == file.size_bytes
        for position, segment in enumerate(file.segments):
            length = segment.stop - segment.start
            assert pieces[number, position] == [
                (low, min(low + LEAF, length)) for low in range(0, length, LEAF)
            ]


@settings(max_examples=examples(80))
@given(products(), st.integers(1, 500))
def test_no_file_holds_more_than_was_asked_for_unless_it_is_one_tensor(
    wanted: list[Product], max_file_bytes: int
) -> None:
    files = layout_hf_weights(wanted, max_file_bytes)
    weights = [file for file in files if file.path != INDEX_NAME]
    assert len(files) == len(weights) + (len(weights) > 1)
    names = [file.path for file in weights]
    if len(names) == 1:
        assert names == ["model.safetensors"]
    else:
        count = len(names)
        assert names == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file in weights:
        sizes = [s.spec.size_bytes for s in file.segments if s.spec is not None]
        assert sum(sizes) <= max_file_bytes or len([size for size in sizes if size]) == 1


@settings(max_examples=examples(80))
@given(products(), st.integers(1, 500))
def test_the_safetensors_library_reads_every_header_and_the_index_agrees(
    wanted: list[Product], max_file_bytes: int
) -> None:
    files = layout_hf_weights(wanted, max_file_bytes)
    homes: dict[str, str] = {}
    for file in files:
        if file.path == INDEX_NAME:
            continue
        header = literal(file)
        assert len(header) % DATA_ALIGNMENT == 0
        content = safetensors.deserialize(header + bytes(file.size_bytes - len(header)))  # type: ignore[no-untyped-call]
        found = {name: (info["dtype"], tuple(info["shape"])) for name, info in content}
        specs = [s.spec for s in file.segments if s.spec is not None]
        assert found == {spec.name: (spec.dtype.safetensors, spec.shape) for spec in specs}
        homes |= dict.fromkeys(found, file.path)
    if len(files) > 1:
        assert json.loads(literal(files[-1]))["weight_map"] == homes
