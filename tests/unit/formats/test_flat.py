"""What flat parameters are made of, worked out from the parameters of a model."""

from __future__ import annotations

import pytest

from ckptkit.core.errors import CannotPlanError
from ckptkit.formats.ranks.flat import ModelParameter, compute_vectors

MODEL = [
    ModelParameter(("embed.weight", "head.weight"), (5, 3)),
    ModelParameter(("layers.0.weight",), (3, 3)),
    ModelParameter(("layers.0.bias",), (3,)),
    ModelParameter(("norm.weight",), (3,)),
]


def starts(flat: dict[str, int], **options: object) -> dict[str, list[tuple[str, int]]]:
    found = compute_vectors(MODEL, flat, 2, options.get("slices", {}))  # type: ignore[arg-type]
    return {v.name: [(m.names[0], m.start) for m in v.members] for v in found}


def test_without_padding_parameters_follow_one_another_by_wrapped_module() -> None:
    found = starts({"_flat_param": 18, "layers.0._flat_param": 12})
    assert found == {
        "_flat_param": [("embed.weight", 0), ("norm.weight", 15)],
        "layers.0._flat_param": [("layers.0.weight", 0), ("layers.0.bias", 9)],
    }


def test_with_original_parameters_each_begins_at_sixteen_bytes_and_the_end_is_padded() -> None:
    found = starts({"_flat_param": 20, "layers.0._flat_param": 16})  # 16 + 3 and 12 + 3, in fours
    assert found["_flat_param"] == [("embed.weight", 0), ("norm.weight", 16)]
    assert found["layers.0._flat_param"] == [("layers.0.weight", 0), ("layers.0.bias", 12)]


@pytest.mark.parametrize(
    "flat", [{"_flat_param": 19, "layers.0._flat_param": 12}, {"_flat_param": 31}]
)
def test_lengths_that_do_not_add_up_are_refused(flat: dict[str, int]) -> None:
    with pytest.raises(CannotPlanError, match="do not add up"):
        starts(flat)


def test_a_parameter_in_no_flat_one_is_named() -> None:
    with pytest.raises(CannotPlanError, match=r"'embed.weight' of the model is in none of 1"):
        starts({"layers.0._flat_param": 12})


def test_two_ways_of_lying_are_refused_unless_the_checkpoint_tells_which() -> None:
    parameters = [ModelParameter(("a",), (6,)), ModelParameter(("b",), (3,))]
    flat = {"_flat_param": 12}  # 6 + 3 in twos is 9, in fours 11: padded to 12 over three or four
    with pytest.raises(CannotPlanError, match="2 ways"):
        compute_vectors(parameters, flat, 12, {})
    (found,) = compute_vectors(parameters, flat, 12, {"b": (8, 11)})
    assert [m.start for m in found.members] == [0, 8]
