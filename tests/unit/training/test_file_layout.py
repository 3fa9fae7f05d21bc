"""Laying a rank's pieces out as files."""

from __future__ import annotations

import dataclasses
import json
import time
import weakref
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ckptkit.core.errors import SaveError, UnsupportedError
from ckptkit.core.index import Box
from ckptkit.training.save.file_layout import SavePlan, Signatures, plan_save, signature_of
from ckptkit.training.save.saver import objects_file, record_of
from ckptkit.training.save.staging import SharedBuffer, Stager
from ckptkit.training.state.pieces import Holdings, ObjectValue, Piece, Replicas, select_owned
from ckptkit.writer.messages import Fixed
from tests.unit.training.builders import stock_load
from tests.unit.training.builders import whole_piece as piece


def test_each_unit_has_one_file_at_an_aligned_place() -> None:
    pieces = [
        piece("a", torch.ones(3)),
        piece("m", torch.ones(5), unit="optimizer_0"),
        piece("b", torch.ones(4)),
        piece("c", torch.ones(4), unit=""),
    ]
    plan = plan_save(pieces, [True] * 4, rank=3)
    (images,) = plan.images
    assert [image.path for image in images] == [
        "model_0/__3_0.distcp", "optimizer_0/__3_0.distcp", "__3_0.distcp",
    ]  # fmt: skip
    assert [len(image.archives) for image in images] == [2, 1, 1]
    assert all(image.start % 4096 == 0 for image in images)
    assert plan.buffer_bytes % 4096 == 0
    assert plan.buffer_bytes >= images[-1].start + images[-1].size_bytes
    assert plan.data_bytes == 4 * (3 + 5 + 4 + 4)
    assert plan.devices == (torch.device("cpu"),)


def test_samples_of_replicas_are_their_first_elements_before_all_files() -> None:
    both, alone = Replicas(2, 1), Replicas()
    wide = torch.arange(3000.0).view(3, 1000)
    pieces = [
        piece("wide", wide, replicas=both),
        piece("step", torch.tensor(5.0), replicas=both),
        piece("columns", wide.t(), replicas=both),
        piece("none", torch.ones(0, 4), replicas=both),
        piece("alone", wide, replicas=alone),
        piece("buffer", wide, replicas=replace(both, spread=False)),
        *(piece(f"layer{n}", torch.ones(9, dtype=torch.int8), replicas=both) for n in range(10)),
    ]
    plan = plan_save(pieces, [False] * len(pieces), rank=1)
    samples = plan.replica_samples
    assert samples[0] == ("model_0", ("model", "wide"), (0, 0), 0, 1024)
    assert samples[1] == ("model_0", ("model", "step"), (), 1024, 1028)
    layers = [("model", f"layer{n}") for n in range(10)]
    assert [sample.path for sample in samples[2:]] == layers
    assert plan.images == ((),)
    assert plan.buffer_bytes == 4096
    job = SharedBuffer()
    job.reserve(plan.buffer_bytes)
    stager = Stager(job)
    stager.stage(plan, pieces).wait()
    assert bytes(job.memory[:1024]) == wide.view(-1)[:256].numpy().tobytes()
    stager.close()
    job.close()
    many = [piece(f"layer{n}", torch.ones(9), replicas=both) for n in range(1000)]
    assert 8 <= len(plan_save(many, [False] * 1000, rank=1).replica_samples) <= 16
    sparse = piece("sparse", torch.eye(2).to_sparse(), replicas=both)
    with pytest.raises(UnsupportedError, match="expected a dense tensor"):
        plan_save([sparse], [False], rank=1)


def test_the_record_names_tensors_aliases_and_what_others_write() -> None:
    rows = torch.ones(2, 3)
    pieces = [
        Piece("u", ("w",), (4, 3), (Box((2, 0), (2, 3)),), rows, aliases=(("tied",),)),
        Piece("u", ("replica", 0), (2, 3), (Box((0, 0), (2, 3)),), rows),
        Piece("u", ("elsewhere",), (1, 3), (), torch.empty(0, 3)),
        Piece("u", ("none",), (0, 4), (), torch.empty(0, 4, dtype=torch.bfloat16)),
        Piece("u", ("scalar",), (), (Box((), ()),), torch.tensor(7)),
    ]
    plan = plan_save(pieces, [True, False, True, False, True], rank=1)
    unit = plan.record_units["u"]
    assert list(unit["tensors"]) == [
        {"path": ["w"], "dtype": "float32", "shape": [4, 3], "aliases": [["tied"]]},
        {"path": ["none"], "dtype": "bfloat16", "shape": [0, 4], "aliases": []},
        {"path": ["scalar"], "dtype": "int64", "shape": [], "aliases": []},
    ]
    assert [chunk[:4] for chunk in unit["chunks"]] == [
        [0, [2, 0], [2, 3], 0], [1, [0, 0], [0, 4], 0], [2, [], [], 0],
    ]  # fmt: skip
    assert list(unit["expected"]) == [["replica", 0], ["elsewhere"]]
    assert unit["data_files"] == ["__1_0.distcp"]
    assert json.loads(json.dumps(unit)) == {
        name: list(value) if isinstance(value, Fixed) else value for name, value in unit.items()
    }


def test_objects_lie_in_a_file_after_those_of_the_tensors() -> None:
    plan = plan_save([piece("w", torch.ones(2), unit="u")], [True], rank=2)
    values = [1, True, 1.0, -0.0, 0.0, None, "x", ["a", "b"], (1, 2), {"k": torch.ones(2)}]
    objects = [ObjectValue("u", ("o", i), value) for i, value in enumerate(values)]
    objects.append(ObjectValue("", ("rng", "2"), {"state": b"abc"}))
    record, files = record_of(
        plan, Holdings((), tuple(objects)), rank=2, world_size=4, attempt="n-1", step=500
    )
    head = {name: record[name] for name in ("rank", "world_size", "attempt", "step")}
    assert head == {"rank": 2, "world_size": 4, "attempt": "n-1", "step": 500}
    assert [file.path for file in files] == ["u/__2_1.distcp", "__2_0.distcp"]
    unit = record["units"]["u"]
    assert unit["data_files"] == ["__2_0.distcp", "__2_1.distcp"]
    assert plan.record_units["u"]["data_files"] == ["__2_0.distcp"]
    assert record["units"][""]["data_files"] == ["__2_0.distcp"]
    found = []
    for path, file, start, length in unit["objects"]:
        assert (path[0], file) == ("o", 1)
        data = files[0].data[start : start + length]
        found.append(stock_load(data))
    assert [repr(value) for value in found] == [repr(value) for value in values]


def test_a_list_that_changed_is_not_taken_for_the_one_before() -> None:
    names = ["a"]
    first, _ = objects_file([ObjectValue("u", ("n",), names)], 0, 0)
    names.append("b")
    second, _ = objects_file([ObjectValue("u", ("n",), names)], 0, 0)
    assert stock_load(first.data) == ["a"]
    assert stock_load(second.data) == ["a", "b"]


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SaveError, match=r"^sched\.fn: a function cannot be pickled: "):
        objects_file([ObjectValue("u", ("sched", "fn"), lambda: None)], 0, 0)


DENSE = "expected a dense tensor, found "


@pytest.mark.filterwarnings("ignore")  # torch warns that quantized tensors will go
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), DENSE + "a torch.sparse_coo"),
        (
            lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
            DENSE + "a quantized",
        ),
        (lambda: torch.empty(3, 3, device="meta"), DENSE + "a tensor without data"),
        (lambda: torch.empty(3, 3, dtype=torch.bits8), "dtype 'torch.bits8' is not modelled"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_by_name(make: Any, kind: str) -> None:
    pieces = [piece("w", make())]
    with pytest.raises(UnsupportedError, match=rf"^model\.w: {kind}"):
        plan_save(pieces, [True], rank=0)
    assert signature_of(pieces, [True])


def test_signatures_are_worked_out_again_only_for_pieces_that_are_new() -> None:
    group = Replicas(2, 0)
    pieces = [piece(name, torch.ones(2), replicas=group) for name in "abc"]
    signatures = Signatures()
    owners, before = signatures.of(pieces)
    assert owners == select_owned(pieces)
    assert before == signature_of(pieces, owners)
    again = signatures.of(list(pieces))
    assert again[0] is owners
    assert again[1] is before
    pieces[1] = piece("b", torch.ones(9), replicas=group)
    owners, after = signatures.of(pieces)
    assert owners == select_owned(pieces) == (False, True, False)  # the largest is dealt out first
    assert after == signature_of(pieces, owners) != before
    assert signatures.of(pieces[:2]) == (
        select_owned(pieces[:2]),
        signature_of(pieces[:2], (False, True)),
    )


def test_signatures_do_not_keep_pieces_alive() -> None:
    pieces = [piece("a", torch.ones(2))]
    signatures = Signatures()
    signatures.of(pieces)
    gone = weakref.ref(pieces[0].local)
    pieces[0] = piece("a", torch.ones(3))
    assert gone() is None
    assert signatures.of(pieces)[1] == signature_of(pieces, [True])


def test_the_signature_changes_with_all_that_the_plan_depends_on() -> None:
    local = torch.ones(4, 4)
    base = piece("w", local)
    others = [
        dataclasses.replace(base, unit="v"),
        dataclasses.replace(base, key_path=("w",)),
        dataclasses.replace(base, shape=(8, 4)),
        dataclasses.replace(base, places=(Box((4, 0), (4, 4)),)),
        dataclasses.replace(base, aliases=(("tied",),)),
        dataclasses.replace(base, replicas=Replicas(spread=False)),
        dataclasses.replace(base, local=local.bfloat16()),
        dataclasses.replace(base, local=local.t()),
        dataclasses.replace(base, local=torch.ones(4, 4, device="meta")),
    ]
    own = signature_of([base], [True])
    assert own == signature_of([dataclasses.replace(base, local=torch.zeros(4, 4))], [True])
    assert len({own, signature_of([base], [False])}) == 2
    assert own not in [signature_of([other], [True]) for other in others]
    assert hash(own) == hash(plan_save([base], [True], rank=0).signature)


def test_planning_hundreds_of_pieces_takes_milliseconds() -> None:
    pieces = [piece(f"layers.{i}.w", torch.zeros(1).expand(100 + i, 768)) for i in range(672)]
    owned = [True] * len(pieces)
    began = time.perf_counter()
    plan = plan_save(pieces, owned, rank=0)
    planned = time.perf_counter()
    assert plan.signature == signature_of(pieces, owned)
    assert planned - began < 0.6  # a tenth of it on an idle machine, all shapes different
    assert time.perf_counter() - planned < 0.03


def data_starts(plan: SavePlan) -> list[tuple[list[int], int]]:
    """Of each chunk its offsets, and where its data begins in its file."""
    (image,) = plan.images[0]
    starts = [archive.start - image.start for archive in image.archives]
    chunks = plan.record_units["model_0"]["chunks"]
    return [(chunk[1], start) for chunk, start in zip(chunks, starts, strict=True)]


def sharded(name: str, shape: tuple[int, int], offsets: tuple[int, int], *sizes: int) -> Piece:
    return Piece("model_0", ("model", name), shape, (Box(offsets, sizes),), torch.ones(sizes))


NO_MODEL: Any = {}
MODEL: Any = {("model_0", ("model",)): None}


def test_a_step_grows_by_less_than_a_block_a_piece_where_weights_are_placed() -> None:
    pieces = [
        *(sharded(f"w{i}", (4 * 333, 257), (333 * 2, 0), 333, 257) for i in range(9)),
        *(piece(f"bias{i}", torch.ones(257)) for i in range(9)),
        piece("half", torch.ones(77_777, dtype=torch.bfloat16)),
        piece("m", torch.ones(333, 257), unit="optimizer_0"),
    ]
    owned = [True] * len(pieces)
    before = plan_save(pieces, owned, rank=0)
    after = plan_save(pieces, owned, rank=0, models=MODEL)
    sizes = [sum(image.size_bytes for image in plan.images[0]) for plan in (before, after)]
    placed = 9 + 1
    assert 0 < sizes[1] - sizes[0] < placed * 4096
    assert before.images[0][1].size_bytes == after.images[0][1].size_bytes, "no model's"
    assert before.data_bytes == after.data_bytes


def test_only_large_pieces_that_are_one_run_in_the_folder_are_placed() -> None:
    columns = [sharded("w", (512, 512), (0, 256), 512, 256)]
    small = [sharded("w", (512, 16), (256, 0), 256, 16)]
    unknown = [
        Piece("model_0", ("other", "w"), (999, 999), (Box((0, 0), (9, 999)),), torch.ones(9, 999))
    ]
    for pieces in (columns, small, unknown):
        plans = [plan_save(pieces, [True], rank=0, models=models) for models in (NO_MODEL, MODEL)]
        assert data_starts(plans[0]) == data_starts(plans[1])
        assert plans[0].images == plans[1].images
    rows = plan_save([sharded("w", (515, 513), (103, 0), 103, 513)], [True], rank=0, models=MODEL)
    assert [(at, start % 4096) for at, start in data_starts(rows)] == [
        ([103, 0], 103 * 513 * 4 % 4096)
    ]


def test_pieces_that_are_cut_into_waves_are_placed_each() -> None:
    weight = torch.ones(1040, 1023)
    plan = plan_save([piece("w", weight)], [True], rank=0, limit_bytes=1 << 20, models=MODEL)
    assert len(plan.images) == 5
    for images, copies in zip(plan.images, plan.copies, strict=True):
        assert plan.buffer_bytes <= 1 << 20
        (image,), (step,) = images, copies
        in_file = image.archives[0].start - image.start
        assert image.archives[0].start == step.start
        assert (in_file - step.first * 4) % 4096 == 0


def test_a_tied_weight_is_placed_under_the_name_that_the_folder_has() -> None:
    aliases = (("model", "model.embed_tokens.weight"),)
    tied = piece("lm_head.weight", torch.ones(1001, 99), aliases=aliases)
    other = piece("model.a.weight", torch.ones(999, 99))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    }
    starts = {}
    for name, given in {"tied": config, "untied": {**config, "tie_word_embeddings": False}}.items():
        models: Any = {("model_0", ("model",)): given}
        plan = plan_save([tied, other], [True] * 2, rank=0, models=models)
        starts[name] = [start % 4096 for _, start in data_starts(plan)]
    sizes = 1001 * 99 * 4, 999 * 99 * 4
    assert starts["tied"] == [sizes[1] % 4096, 0]
    assert starts["untied"] == [0, sizes[0] % 4096]
