"""The save plans that Megatron-Core adds to `.metadata` are compared with its tables."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptkit.core.errors import FormatError, InputError, TruncatedFileError, UnsafePickleError
from ckptkit.formats.dcp.metadata import ALLOWED, DcpMetadata, parse_metadata
from ckptkit.formats.dcp.shortcuts import FastMachine, PlanRun

RANKS, TENSORS = 3, 240
MANY = 700  # their items fill more than one batch of a pickled list


def piece(rank: int, number: int) -> WriteItem:
    box = torch.Size([rank * 2, 0])
    written = TensorWriteData(
        ChunkStorageMetadata(box, torch.Size([2, 300])),
        TensorProperties(dtype=torch.bfloat16),
        torch.Size([2 * RANKS, 300]),
    )
    index = MetadataIndex(f"decoder.{number}.weight", torch.Size([rank * 2, 0]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=written)


def extra_state(rank: int, number: int) -> WriteItem:
    index = MetadataIndex(f"decoder.{number}._extra_state/shard_{rank}_{RANKS}")
    return WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(64))


def as_received(plan: SavePlan) -> SavePlan:
    """Copies a plan as a gather does, without objects in common with the plan of rank 0."""
    items = copy.deepcopy(plan.items)
    for item in items:
        object.__setattr__(item.index, "fqn", (item.index.fqn + " ")[:-1])
    return SavePlan(items, planner_data={})


def with_plans(*, objects: bool = False, tensors: int = TENSORS) -> Metadata:
    """Makes what rank 0 writes, with the plans of the other ranks as they arrive there."""
    plans = []
    for rank in range(RANKS):
        items = []
        for number in range(tensors):
            items.append(piece(rank, number))
            if objects and number % 3:
                items.append(extra_state(rank, number))
        plan = SavePlan(items, planner_data={})
        plans.append(as_received(plan) if rank else plan)
    _, metadata = create_default_global_save_plan(plans)
    metadata.storage_data = {}
    for rank, plan in enumerate(plans):
        for at, item in enumerate(plan.items):
            info = _StorageInfo(f"__{rank}_0.distcp", 3000 * at, 3000)
            index = MetadataIndex(item.index.fqn, item.index.offset)
            metadata.storage_data[index] = info
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    return metadata


def parse(value: Metadata | bytes, *, shortcuts: bool = True) -> DcpMetadata:
    data = value if isinstance(value, bytes) else pickle.dumps(value, 4)
    return parse_metadata(data, where=".metadata", shortcuts=shortcuts)


def tables(parsed: DcpMetadata) -> Any:
    tensors = {
        key: (found.shape, found.dtype, found.offsets.tolist(), found.start.tolist())
        for key, found in parsed.tensors.items()
    }
    return tensors, parsed.blobs, parsed.paths


@pytest.mark.parametrize(("objects", "tensors"), [(False, TENSORS), (True, MANY)])
def test_nearly_all_items_are_skipped_and_the_tables_are_those_without_plans(
    tensors: int, *, objects: bool
) -> None:
    metadata = with_plans(objects=objects, tensors=tensors)
    data = pickle.dumps(metadata, 4)
    machine = FastMachine(data, ALLOWED, where="")
    root: Any = machine.run()
    items = [item for plan in root.state["all_local_plans"] for item in plan.state["items"]]
    runs = [item for item in items if isinstance(item, PlanRun)]
    assert sum(len(run.fqn) for run in runs) + len(items) - len(runs) >= RANKS * tensors
    assert len(items) < RANKS * tensors / 10
    found = parse(data)
    assert found.is_megatron
    assert tables(found) == tables(parse(data, shortcuts=False))
    del metadata.all_local_plans  # type: ignore[attr-defined]
    without = parse(metadata)
    assert tables(found) == tables(without)
    assert not without.is_megatron


@pytest.mark.parametrize("shortcuts", [True, False])
def test_plans_that_lack_a_piece_are_refused_with_both_numbers(*, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    del plans[1].items[200]
    with pytest.raises(FormatError, match=r"have 719 pieces of tensors, the tables 720") as got:
        parse(metadata, shortcuts=shortcuts)
    assert "the piece at [2, 0] is in the tables only" in got.value.message
    assert "decoder.200.weight" in str(got.value.where)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_plans_with_a_piece_elsewhere_are_refused(*, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[2].items[133].index, "offset", torch.Size([3, 0]))
    with pytest.raises(FormatError, match=r"have 720 pieces of tensors, the tables 720"):
        parse(metadata, shortcuts=shortcuts)


@pytest.mark.parametrize("shortcuts", [True, False])
@pytest.mark.parametrize("number", [1, 133])
def test_plans_with_an_unknown_tensor_are_refused(number: int, *, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[2].items[number].index, "fqn", "nowhere")
    with pytest.raises(FormatError, match="the index does not name it") as got:
        parse(metadata, shortcuts=shortcuts)
    assert "nowhere" in str(got.value.where)


def test_a_piece_that_two_ranks_planned_is_stored_once() -> None:
    metadata = with_plans(tensors=20)
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    plans[1].items.append(plans[0].items[5])
    assert tables(parse(metadata)) == tables(parse(with_plans(tensors=20)))


@pytest.mark.parametrize("plans", [None, [], {}, [1], [[]], [WriteItemType.SHARD], "plans"])
def test_what_is_no_list_of_plans_is_refused(plans: object) -> None:
    metadata = with_plans(tensors=20)
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    if plans is None:  # as if there were none
        assert parse(metadata).is_megatron
        return
    for shortcuts in (True, False):
        with pytest.raises(InputError):
            parse(metadata, shortcuts=shortcuts)


def test_a_list_of_items_in_two_plans_is_refused() -> None:
    metadata = with_plans(tensors=20)
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    plans[1] = SavePlan(plans[0].items)
    with pytest.raises(FormatError, match="that only this save plan has"):
        parse(metadata)


class Gadget:
    """A class that would run a command where a pickle is executed."""

    def __reduce__(self) -> Any:
        return (exec, ("print('executed')",))


@pytest.mark.parametrize("at", [0, 200, -1])
def test_a_class_that_no_plan_has_is_refused_anywhere(
    at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[1].items[at], "bytes_io_data", Gadget())
    with pytest.raises(UnsafePickleError, match=r"builtins.exec"):
        parse(metadata)
    assert capsys.readouterr().out == ""


def test_a_tail_that_changes_the_tables_is_read_as_every_reader_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plans are interpreted like all else, so that nothing after them goes unseen."""
    metadata = with_plans(tensors=20)
    data = pickle.dumps(metadata, 4)
    assert data.endswith(b"eub.")
    name = b"decoder.3.weight"
    key = b"\x8c" + bytes([len(name)]) + name
    # After the plans, before the fields are set: a second table of stored items.
    for tail in (b"\x8c\x0cstorage_data}ub.", b"\x8c\x0cplanner_data}" + key + b"Nsub."):
        hostile = data[:-3] + tail
        outcomes = []
        for shortcuts in (True, False):
            with pytest.raises(InputError) as got:
                parse(hostile, shortcuts=shortcuts)
            outcomes.append(got.value.message)
        assert outcomes == ["pickle gives a dictionary the same key twice"] * 2
    assert capsys.readouterr().out == ""


def test_plans_that_are_cut_short_are_refused_at_every_length() -> None:
    data = pickle.dumps(with_plans(tensors=40), 4)
    start = data.index(b"all_local_plans")
    for length in range(start, len(data), 97):
        for shortcuts in (True, False):
            with pytest.raises((TruncatedFileError, FormatError)):
                parse(data[:length], shortcuts=shortcuts)
