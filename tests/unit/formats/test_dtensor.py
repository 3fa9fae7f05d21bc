"""Where the parts of DTensors lie, against torch's own rules and against what FSDP2 does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ckptkit.core.errors import FormatError, LimitError, UnsupportedError
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.ranks.dtensor import (
    LocalPart,
    Mesh,
    Placement,
    compute_local_part,
    make_split,
    parse_mesh,
    parse_placements,
)
from tests.sampled import sampled

PLACES = "torch.distributed.tensor.placement_types"


def inert(name: str, state: object) -> InertObject:
    return InertObject(Global(PLACES, name), (), state)


def part(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Sequence[Placement],
    *,
    inner_first: bool = False,
) -> LocalPart | None:
    mesh = Mesh(sizes, (), coordinate, 0)
    return compute_local_part(shape, mesh, placements, inner_first=inner_first)


def filled(whole: torch.Tensor, found: LocalPart) -> torch.Tensor:
    """Builds a local tensor out of the whole one, piece by piece."""
    local = torch.full(found.shape, -1)
    for box, offsets in found.blocks:
        there = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))
        here = tuple(slice(at, at + n) for at, n in zip(offsets, box.sizes, strict=True))
        local[here] = whole[there]
    return local


def as_torch(placement: Placement) -> Replicate | Shard | _StridedShard:
    if placement.dim is None:
        return Replicate()
    if placement.factor > 1:
        return _StridedShard(placement.dim, split_factor=placement.factor)
    return Shard(placement.dim)


@pytest.mark.parametrize("seed", sampled(range(40), range(10)))
def test_parts_have_the_shape_and_the_first_element_that_torch_gives_them(seed: int) -> None:
    chances = random.Random(seed)  # noqa: S311
    shape = tuple(chances.randint(1, 13) for _ in range(chances.randint(1, 3)))
    sizes = tuple(chances.randint(1, 4) for _ in range(chances.randint(1, 3)))
    placements = [
        chances.choice(
            [Placement(), Placement(d), Placement(d), Placement(d, chances.randint(2, 4))]
        )
        for _ in sizes
        for d in [chances.randrange(len(shape))]
    ]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for coordinate in itertools.product(*map(range, sizes)):
        found = part(shape, sizes, coordinate, placements)
        expected, offset = _compute_local_shape_and_global_offset(
            shape, sizes, list(coordinate), [as_torch(p) for p in placements]
        )
        assert found is not None
        assert found.shape == tuple(expected)
        local = filled(whole, found)
        assert int(local.min() if local.numel() else 0) >= 0
        if local.numel():
            assert int(local.flatten()[0]) == int(whole[offset])


@pytest.mark.parametrize("rows", sampled(range(1, 20), [1, 5, 12, 19]))
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 2), (3, 4), (2, 3)])
def test_what_fsdp2_cuts_of_a_tensor_parallel_part_is_found_for_all_sizes(
    rows: int, data: int, tensor: int
) -> None:
    def chunk(held: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        chunks = held.chunk(parts)
        return chunks[index] if index < len(chunks) else held[:0]

    whole = torch.arange(rows)
    placements = [Placement(0, tensor), Placement(0)]
    for at in itertools.product(range(data), range(tensor)):
        found = part((rows,), (data, tensor), at, placements, inner_first=True)
        assert found is not None
        live = chunk(chunk(whole, tensor, at[1]), data, at[0])
        assert torch.equal(filled(whole, found), live)


def test_a_strided_split_alone_cannot_have_come_after_others() -> None:
    assert part((8,), (4,), (0,), [Placement(0, 2)], inner_first=True) is None
    found = part((8,), (4,), (1,), [Placement(0, 2)])
    assert found is not None
    assert [(box.offsets, box.sizes, local) for box, local in found.blocks] == [
        ((1,), (1,), (0,)),
        ((5,), (1,), (1,)),
    ]


def test_a_scalar_is_one_piece() -> None:
    found = part((), (4,), (3,), [Placement()])
    assert found is not None
    assert [(box.offsets, box.sizes) for box, _ in found.blocks] == [((), ())]


def test_placements_that_are_no_part_of_the_values_are_refused_by_name() -> None:
    for name in ("Partial", "_Partial", "_MaskPartial"):
        with pytest.raises(UnsupportedError, match=name.lstrip("_")):
            parse_placements((inert(name, {}),), 2)
    for state in ({"dim": 2}, {"dim": -3}, {"dim": "0"}, {}):
        with pytest.raises(FormatError, match="split along"):
            parse_placements((inert("Shard", state),), 2)
    with pytest.raises(FormatError, match="split factor"):
        parse_placements((inert("_StridedShard", {"dim": 0, "split_factor": 0}),), 2)
    assert parse_placements((inert("Shard", {"dim": -1}),), 2) == (Placement(1),)


def test_splits_that_would_exhaust_memory_are_refused() -> None:
    with pytest.raises(LimitError):
        part((1 << 40,), (2,), (0,), [Placement(0, 1 << 39)])
    with pytest.raises(FormatError, match="2 placements on a mesh of 1"):
        part((4,), (2,), (0,), [Placement(0), Placement()])


def layout(shape: object, stride: object) -> InertObject:
    return InertObject(
        Global("torch.distributed._mesh_layout", "_MeshLayout"),
        (),
        {"shape": shape, "stride": stride},
    )


def mesh(**state: object) -> InertObject:
    return InertObject(Global("torch.distributed.device_mesh", "DeviceMesh"), (), state)


def no_tensors(_: object) -> list[int]:
    raise AssertionError


def test_a_part_of_a_mesh_tells_where_a_rank_is() -> None:
    ranks = tuple(range(8))
    whole = mesh(
        _layout=layout((2, 4), (4, 1)), _flatten_rank_map=ranks, _mesh_dim_names=("a", "b")
    )
    found = parse_mesh(whole, 6, no_tensors)
    assert (found.sizes, found.coordinate, found.names) == ((2, 4), (1, 2), ("a", "b"))
    outer = mesh(_layout=layout((2,), (4,)), _flatten_rank_map=ranks)
    assert parse_mesh(outer, 6, no_tensors).coordinate == (1,)
    joined = mesh(_layout=layout(((2, 2), 2), ((4, 1), 2)), _flatten_rank_map=ranks)
    assert parse_mesh(joined, 5, no_tensors).sizes == (4, 2)
    assert parse_mesh(joined, 5, no_tensors).coordinate == (3, 0)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"_flatten_rank_map": (0, 1)}, "no rank 3"),
        ({"_flatten_rank_map": (0, 0, 3, 3)}, "twice"),
        ({"_flatten_rank_map": (0, 1, 2, 3), "_rank": 2}, "written by another"),
        ({"_flatten_rank_map": (0, 1, 2, 3), "_coordinate_on_dim": (0, 1)}, "written by another"),
        ({"_flatten_rank_map": (3, 1)}, "beyond"),
        ({"_layout": layout((2, 2), (2,))}, "do not belong together"),
        ({"_layout": layout((2, -2), (2, 1))}, "do not belong together"),
        ({}, "does not contain its ranks"),
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(state: dict[str, object], text: str) -> None:
    whole = {"_layout": layout((2, 2), (2, 1)), **state}
    with pytest.raises(FormatError, match=text):
        parse_mesh(mesh(**whole), 3, no_tensors)


def test_a_split_factor_that_is_too_large_is_a_limit() -> None:
    with pytest.raises(LimitError, match="split factor of 1,048,577"):
        make_split(0, (1 << 20) + 1, 1)
