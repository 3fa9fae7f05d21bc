"""A sample of the differential campaign: a few draws, and those that have once failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.campaigns.differential.campaign import Campaign
from tests.campaigns.differential.draws import USUAL, Draw, Mesh, Spec, Unit, make_draw, simpler
from tests.ranks import RunRanks

SEED = 18
NUMBERS = (2, 7)  # tensor parallelism, and flat parameters
# FSDP1 turns HYBRID_SHARD over groups of one rank to NO_SHARD; every rank wrote what all hold.
GROUPS_OF_ONE = Draw(
    seed=SEED,
    number=1_000,
    units=(Unit("0", (Spec("weight", (7,), "bfloat16"), Spec("bias", (5,), "bfloat16"))),),
    optimizer="SGD",
    settings={"lr": 0.1, "momentum": 0.9},
    scheduler="",
    steps=1,
    real=False,
    first=Mesh(2, "fsdp1", (2, 1), "HYBRID_SHARD", device_mesh=True),
    second=Mesh(1, "plain", (1,)),
    stock="safetensors",
    own_options=USUAL["own_options"],
    output=USUAL["output"],
)

# A rank that holds nothing of a flat parameter but padding has a state of the optimizer for it.
PADDING_ALONE = dataclasses.replace(
    GROUPS_OF_ONE,
    number=1_001,
    units=(Unit("0", (Spec("weight", (1,), "float32"),)),),
    first=Mesh(2, "fsdp1", (2,), original=False),
    second=Mesh(2, "fsdp1", (2,), original=False),
)
FOUND = (GROUPS_OF_ONE, PADDING_ALONE)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "draws",
    [
        pytest.param(FOUND, id="found"),
        pytest.param([make_draw(SEED, number) for number in NUMBERS], id="drawn"),
    ],
)
def test_what_is_read_is_what_was_alive(
    draws: Sequence[Draw], tmp_path: Path, run_ranks: RunRanks
) -> None:
    found = Campaign(tmp_path, partial(run_ranks, status=None)).run(draws)
    assert [(one.draw.number, one.saver, one.reader, one.error) for one in found if one.error] == []
    assert {one.draw.number for one in found} == {draw.number for draw in draws}
    assert sum(one.size_bytes > 0 for one in found) > 10 * len(draws)


def test_a_draw_follows_from_its_number_and_survives_json() -> None:
    for number in range(200):
        draw = make_draw(SEED, number)
        assert Draw.from_json(draw.to_json()) == draw == make_draw(SEED, number)
        assert all(other != draw for other in simpler(draw))
