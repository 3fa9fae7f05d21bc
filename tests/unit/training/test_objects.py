"""Python values out of what torch.save wrote, without running its pickles."""

from __future__ import annotations

import argparse
import datetime as dt
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.core.errors import ChecksumError, CkptkitError, FormatError, ResumeError
from ckptkit.storage.local.source import LocalSource
from ckptkit.training.state.objects import object_from_bytes, read_torch_file


def through_disk(value: object) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return object_from_bytes(buffer.getvalue(), where="file")


class Custom:
    """What no checkpoint may make."""


PLAIN = [
    {"a": 1, "b": [1, 2.5, None, True, "x", b"\x00\xff"], 3: (1, (2,))},
    {1, 2},
    frozenset("ab"),
    OrderedDict(x=1, y=2),
    Counter("aab"),
    deque([1, 2], maxlen=5),
    2**120,
    1 + 2j,
    slice(1, 2),
    range(3),
    bytearray(b"ab"),
    dt.datetime(2020, 1, 2, 3, 4),  # noqa: DTZ001 - what people pickle
    dt.timedelta(seconds=5),
    Path("/a/b"),
    argparse.Namespace(lr=1e-3),
    torch.float16,
    torch.device("cpu"),
    np.float32(3),
    np.int64(4),
    random.getstate(),
]


@pytest.mark.parametrize("factory", [int, str, bool, bytes, float, list, OrderedDict, deque, None])
def test_names_of_builtins_below_protocol_3_stand_for_the_same(factory: Any) -> None:
    found = through_disk({"d": defaultdict(factory)})["d"]  # torch.save writes `__builtin__.long`
    assert found.default_factory is factory


def test_what_could_never_be_resumed_is_told_before_it_is_saved() -> None:
    def told(value: object) -> str:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        try:
            object_from_bytes(buffer.getvalue(), contents=False)
        except CkptkitError as error:
            return error.message
        return ""

    for value in [*PLAIN, {"t": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}]:
        assert told(value) == ""
    assert "Custom" in told({"loader": Custom()})
    assert "_pickle" in told(np.random.default_rng(3))
    assert "conj" in told(torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(CkptkitError):
        object_from_bytes(b"nothing", contents=False)


def test_arrays_come_back_with_type_shape_and_order() -> None:
    for array in (
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array(True),
        np.zeros((0, 2)),
    ):
        found = through_disk(array)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        found[...] = 1  # its own memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2])
def test_tensors_come_back_with_strides_and_shared_storage(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (4, 6)).to(dtype)
    found = through_disk({"whole": whole, "part": whole[1:, ::2], "t": whole.t(), "e": whole[:0]})
    assert torch.equal(found["whole"].float(), whole.float())
    assert torch.equal(found["part"].float(), whole[1:, ::2].float())
    assert torch.equal(found["t"].float(), whole.t().float())
    assert found["e"].shape == (0, 6)
    assert found["part"].untyped_storage().data_ptr() == found["t"].untyped_storage().data_ptr()


def test_lists_that_are_shared_or_hold_themselves_stay_so() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    found = through_disk({"a": inner, "b": inner})
    assert found["a"] is found["b"]
    assert found["a"][1] is found["a"]


def test_random_generators_go_on_as_they_were() -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    found = through_disk(states)
    expected = random.random(), np.random.random(), torch.rand(1)  # noqa: S311
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    assert (random.random(), np.random.random(), torch.rand(1)) == expected  # noqa: S311
    assert found["pcg"] == states["pcg"]


def test_a_class_of_the_users_own_is_refused_by_name() -> None:
    with pytest.raises(ResumeError, match="Custom") as caught:
        through_disk({"loader": Custom()})
    assert "state_dict() hold plain values" in caught.value.hint
    with pytest.raises(ResumeError, match="_pickle"):
        through_disk(np.random.default_rng(3))


def test_a_pickle_cannot_ask_for_memory_by_a_number() -> None:
    class Large:
        def __reduce__(self) -> tuple[object, ...]:
            return bytearray, (1 << 40,)

    with pytest.raises(FormatError, match="bytearray"):
        through_disk(Large())


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    torch.save({"t": torch.zeros(1_000)}, tmp_path / "file.bin")
    data = bytearray((tmp_path / "file.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "file.bin").write_bytes(data)
    with LocalSource(tmp_path) as source, pytest.raises(ChecksumError, match=r"file\.bin"):
        read_torch_file(source, "file.bin")
