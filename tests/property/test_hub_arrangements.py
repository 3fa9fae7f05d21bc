"""Rearranging in thought is rearranging: arrangements, traced tensors and the kernel agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.geometry import Arrangement, join
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.engine.kernels import RearrangeKernel, StoredOperand
from ckptkit.hub_names.disk_tensors import HubTensor, find_run, find_whole, find_window
from ckptkit.plan.plan import TensorSpec
from tests.property.examples import examples
from tests.property.tiles import positions

Array = NDArray[np.int64]
Live = dict[Fqn, Array]
INT64 = BY_NAME["int64"]


def live_tensors(*shapes: Shape) -> Live:
    """Tensors whose elements are all different."""
    return {
        Fqn(f"live.{i}"): np.arange(math.prod(shape)).reshape(shape) + 10_000 * i
        for i, shape in enumerate(shapes)
    }


def realised(tensor: HubTensor, live: Live) -> Array:
    """Puts a described tensor together, element by element."""
    made = np.full(tensor.shape, -1, np.int64)
    for source, tile in tensor.pieces:
        flat = live[source].reshape(-1)
        for there, here in zip(*positions(tile), strict=True):
            assert made[there] == -1, "an element is described twice"
            made[there] = flat[here]
    return made


def computed(tensor: HubTensor, live: Live, block: int) -> Array:
    """Puts a described tensor together as an execution does, block by block."""
    operands = {name: StoredOperand("source", Key(name), INT64) for name in live}
    kernel = RearrangeKernel(tensor.pieces, operands)
    spec = TensorSpec(tensor.name, INT64, tensor.shape)
    made = np.full(spec.elements, -1, np.int64)
    for start in range(0, spec.elements, block):
        span = Span(start, min(start + block, spec.elements))
        demands = kernel.demands(spec, span)
        read = sum(demand.place.stop - demand.place.start for demand in demands)
        assert read <= 2 * (span.stop - span.start)
        inputs = [
            live[Fqn(demand.key)].reshape(-1)[demand.place.start : demand.place.stop]
            for demand in demands
        ]
        kernel.run(spec, span, inputs, made[span.start : span.stop])
    return made.reshape(tensor.shape)


class Program:
    """A tensor, in numpy and in thought, that goes through the same operations."""

    def __init__(self, draw: Callable[[Any], Any], shape: Shape, name: Fqn) -> None:
        self.draw = draw
        self.live = {name: live_tensors(shape)[Fqn("live.0")]}
        self.array = self.live[name]
        self.thought = Arrangement.of(name, shape)

    def step(self) -> None:
        moves = [self.unsqueeze, self.view]
        if self.array.ndim:
            moves += [self.permute, self.cut, self.rotate, self.select]
        self.draw(st.sampled_from(moves))()

    def _dim(self) -> int:
        dim: int = self.draw(st.integers(0, self.array.ndim - 1))
        return dim

    def permute(self) -> None:
        order = self.draw(st.permutations(range(self.array.ndim)))
        self.array, self.thought = self.array.transpose(order), self.thought.permuted(order)

    def cut(self) -> None:
        dim = self._dim()
        low = self.draw(st.integers(0, self.array.shape[dim] - 1))
        high = self.draw(st.integers(low + 1, self.array.shape[dim]))
        self.array = np.take(self.array, range(low, high), dim)
        self.thought = self.thought.sliced(dim, low, high)

    def rotate(self) -> None:
        dim = self._dim()
        size = self.array.shape[dim]
        at = self.draw(st.integers(0, size - 1))
        self.array = np.roll(self.array, -at, dim)
        parts = [self.thought.sliced(dim, at, size), self.thought.sliced(dim, 0, at)]
        self.thought = join(parts, dim)

    def select(self) -> None:
        dim = self._dim()
        index = self.draw(st.integers(0, self.array.shape[dim] - 1))
        self.array = np.take(self.array, index, dim)
        self.thought = self.thought.selected(dim, index)

    def unsqueeze(self) -> None:
        dim = self.draw(st.integers(0, self.array.ndim))
        self.array = np.expand_dims(self.array, dim)
        self.thought = self.thought.unsqueezed(dim)

    def view(self) -> None:
        shape, left = [], self.array.size
        while left > 1:
            shape.append(
                self.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
            )
            left //= shape[-1]
            assume(len(shape) < 6)
        self.array = self.array.reshape(shape)
        self.thought = self.thought.viewed(tuple(shape))


@given(st.data(), st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4), st.integers(1, 40))
@settings(max_examples=examples(150))
def test_any_series_of_moves_is_followed_exactly_or_refused(
    data: st.DataObject, shape: list[int], block: int
) -> None:
    name = Fqn("live")
    program = Program(data.draw, tuple(shape), name)
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            program.step()
        tensor = HubTensor.of(Fqn("disk"), program.thought)
    except CannotPlanError:
        assume(False)
        raise
    assert tensor.shape == program.array.shape
    assert np.array_equal(realised(tensor, program.live), program.array)
    assert np.array_equal(computed(tensor, program.live, block), program.array)
    shapes = {name: tuple(shape)}
    window = find_window(tensor, shapes)
    if window is not None:
        box = program.live[name][
            tuple(
                slice(o, o + n) for o, n in zip(window.box.offsets, window.box.sizes, strict=True)
            )
        ]
        rest = [axis for axis in range(box.ndim) if axis not in window.axes]
        assert all(box.shape[axis] == 1 for axis in rest)
        seen = box.transpose([*rest, *window.axes]).reshape(tensor.shape)
        assert np.array_equal(seen, program.array)
    if find_whole(tensor, shapes) is not None:
        assert np.array_equal(program.live[name].reshape(-1), program.array.reshape(-1))
    if find_run(tensor) is not None:
        flat = program.array.reshape(-1)
        assert np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size))


def _chunk_expert(a: Any) -> Any:
    return a[2].chunk(2, 0)[1].contiguous()


def _rotary(a: Any) -> Any:
    return a.view(3, 2, 4, 5).transpose(1, 2).reshape(24, 5)


MOVES: dict[str, tuple[Callable[..., Any], list[Shape]]] = {
    "one expert's second half": (_chunk_expert, [(4, 6, 5)]),
    "transposed": (lambda a: a.transpose(1, 2).contiguous(), [(4, 6, 5)]),
    "t": (lambda a: a.t(), [(6, 5)]),
    "permuted": (lambda a: a.permute(2, 0, 1).clone(), [(2, 3, 4)]),
    "rotary": (_rotary, [(24, 5)]),
    "split unevenly": (lambda a: a.split([1, 3, 2], 0)[1], [(6, 2)]),
    "unbound": (lambda a: a.unbind(1)[2], [(2, 3, 4)]),
    "squeezed": (lambda a: a.chunk(3, 0)[1].squeeze(0), [(3, 1, 4)]),
    "squeezed everywhere": (lambda a: a.squeeze(), [(1, 3, 1, 4)]),
    "flattened": (lambda a: a.reshape(5, -1), [(5, 3, 2, 2)]),
    "unfolded": (lambda a: a.reshape(5, 3, 2, 2, 2), [(5, 24)]),
    "nothing in it": (lambda a: a, [(0, 4)]),
}


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("move", MOVES)
def test_what_torch_does_to_one_tensor_is_traced(torch: Any, move: str) -> None:
    function, shapes = MOVES[move]
    _compare(torch, function, live_tensors(*shapes))


@pytest.mark.parametrize("move", ["cat", "stack", "rotary and joined", "interleaved"])
def test_what_torch_makes_of_several_tensors_is_traced(torch: Any, move: str) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "cat": lambda *given: torch.cat(given, 1),
        "stack": lambda *given: torch.stack(given, 1),
        "rotary and joined": lambda a, b: torch.cat([_rotary(a), _rotary(b)]),
        "interleaved": lambda a, b: torch.stack([a, b], 1).flatten(),
    }
    _compare(torch, functions[move], live_tensors((24, 5), (24, 5)))


@pytest.mark.parametrize("what", ["added", "cast", "gathered", "every second", "two types"])
def test_what_computes_or_cannot_be_followed_is_refused(torch: Any, what: str) -> None:
    functions: dict[str, Callable[[Any], Any]] = {
        "added": lambda a: a + 1,
        "cast": lambda a: a.to(torch.float32),
        "gathered": lambda a: a[torch.tensor([0, 2])],
        "every second": lambda a: a[::2],
        "two types": lambda a: torch.cat([a, _traced(torch, live_tensors((4, 4)), "int32")[0]]),
    }
    from ckptkit.hub_names.transformers.answers import ComputesError

    (tensor,) = _traced(torch, live_tensors((4, 4)))
    with pytest.raises(CannotPlanError if what == "two types" else ComputesError):
        functions[what](tensor)


def _traced(torch: Any, live: Live, dtype: str = "int64") -> list[Any]:
    from ckptkit.hub_names.transformers.answers import TracedTensor

    return [TracedTensor.of_live(n, v.shape, getattr(torch, dtype)) for n, v in live.items()]


def _compare(torch: Any, function: Callable[..., Any], live: Live) -> None:
    real = function(*[torch.from_numpy(value.copy()) for value in live.values()])
    traced = function(*_traced(torch, live))
    tensor = HubTensor.of(Fqn("disk"), traced.arrangement)
    assert tensor.shape == tuple(real.shape) == tuple(traced.shape)
    assert np.array_equal(realised(tensor, live), real.numpy())
    for block in (1, 7, 1000):
        assert np.array_equal(computed(tensor, live, block), real.numpy())


def test_zeros_beside_nothing_have_no_source() -> None:
    nothing = Arrangement.of(Fqn("live.0"), (0, 3))
    assert nothing.padded(0, 0).parts == nothing.parts
    assert nothing.padded(0, 4).viewed((2, 6)).parts == ()
    assert nothing.padded(0, 1).selected(0, 0) == Arrangement((3,), ())
