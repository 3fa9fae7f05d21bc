"""What the merge kernel refuses, and how the executor prepares kernels that read factors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters import merge_kernel
from ckptkit.adapters.merge_kernel import (
    BiasUpdate,
    Factor,
    LoraStep,
    LowRankUpdate,
    MergeKernel,
    Rounding,
    TokenRowsUpdate,
    Update,
    make_low_rank,
)
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AdapterError, OverflowRefusedError, UnsupportedError
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.engine import kernels as preparing
from ckptkit.engine.executor import ExecutionSettings, Executor
from ckptkit.engine.kernels import CastOperand, Preparations, StoredOperand, single_threaded_blas
from ckptkit.engine.outcome import ignore
from ckptkit.engine.segment_reader import Inputs
from ckptkit.lora.changes import NormOf
from ckptkit.plan.plan import (
    Compute,
    Demand,
    Kernel,
    Plan,
    Reading,
    TensorSpec,
    lay_out_file,
)
from tests.adapter_tensors import make_origin
from tests.memory_target import MemoryTarget
from tests.sampled import sampled

Array = NDArray[Any]
FLOAT32 = BY_NAME["float32"]
BASE, ADAPTER = "base", "adapter"
ROWS, COLUMNS, RANK = 24, 40, 4
BASES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def normal(shape: Shape, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Tensors:
    """Tensors in memory, as a kernel reads them and as an origin holds them."""

    arrays: dict[str, Array]

    def read(self, demand: Demand) -> Array:
        flat = self.arrays[demand.key].reshape(-1)
        return flat[demand.place.start : demand.place.stop].copy()

    @property
    def reading(self) -> Reading:
        return Reading(
            self.read,
            self.read,
            lambda *_: pytest.fail("opens nothing"),
            lambda *_: pytest.fail("keeps nothing"),
        )

    def factor(self, name: str) -> Factor:
        array = self.arrays[name]
        rows, columns = array.shape if array.ndim > 1 else (1, array.size)
        dtype = BY_NAME[array.dtype.name]
        return Factor(ADAPTER, Key(name), dtype, columns, range(rows), range(columns))

    def stored(self, name: str) -> StoredOperand:
        return StoredOperand(ADAPTER, Key(name), BY_NAME[self.arrays[name].dtype.name])


def tensors(base: Array | None = None) -> Tensors:
    weight = normal((ROWS, COLUMNS)) if base is None else base
    rows, columns = weight.shape
    return Tensors(
        {
            "weight": weight,
            "a": normal((RANK, columns), 1),
            "b": normal((rows, RANK), 2),
            "magnitude": np.abs(normal((rows,), 3)) + 1,
            "bias": normal((rows,), 4),
            "shift": normal((rows,), 5),
        }
    )


def lora(held: Tensors, scaling: float = 0.5, *, dora: bool = False) -> LowRankUpdate:
    magnitude = held.factor("magnitude") if dora else None
    return make_low_rank(held.factor("a"), held.factor("b"), scaling, magnitude=magnitude)


def merged(held: Tensors, kernel: MergeKernel, dtype: str | None = None) -> Array:
    base = held.arrays[kernel.base.reads[0][1]]
    spec = TensorSpec(Fqn("out"), BY_NAME[dtype or base.dtype.name], base.shape)
    ready = kernel.prepare(spec, held.reading)
    out = np.empty(base.size, getattr(ml_dtypes, spec.dtype.name, None) or spec.dtype.name)
    block = Span(0, base.size)
    ready.run(spec, block, [held.read(demand) for demand in ready.demands(spec, block)], out)
    return out.reshape(base.shape)


def test_a_16_bit_weight_is_rounded_once_by_default() -> None:
    held = tensors(normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16))
    kernel = MergeKernel(held.stored("weight"), (lora(held), lora(held, -0.25)))
    exact = held.arrays["weight"].astype(np.float64)
    exact += 0.25 * held.arrays["b"].astype(np.float64) @ held.arrays["a"].astype(np.float64)
    wide = merged(held, kernel, "float32")
    np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-5)
    assert (merged(held, kernel) == wide.astype(ml_dtypes.bfloat16)).all()
    twice = merged(held, replace(kernel, rounding="peft"))
    assert (twice != merged(held, kernel)).any()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b", "magnitude"])
def test_a_factor_that_holds_no_number_is_refused(name: str, broken: float) -> None:
    held = tensors()
    held.arrays[name].reshape(-1)[3] = broken
    with pytest.raises(AdapterError, match=r"1 of .* elements are NaN or infinite") as caught:
        merged(held, MergeKernel(held.stored("weight"), (lora(held, dora=True),)))
    assert repr(name) in caught.value.where
    assert caught.value.hint


def test_a_shift_that_holds_no_number_is_refused() -> None:
    held = tensors()
    held.arrays["shift"][0] = np.nan
    with pytest.raises(AdapterError, match="NaN"):
        merged(held, MergeKernel(held.stored("bias"), (BiasUpdate(held.factor("shift"), 1),)))


@pytest.mark.parametrize(
    ("rows", "rank", "columns"),
    [
        *((3, 2, 40), (8, 2, 8), (40, 16, 8), (8, 16, 40), (64, 64, 64), (256, 192, 256)),
        *((256, 200, 256), (64, 256, 64), (300, 384, 512), (300, 385, 40), (300, 600, 64)),
    ],
)
def test_products_of_any_size_are_those_of_torch(rows: int, rank: int, columns: int) -> None:
    if rank > merge_kernel._TERMS and not merge_kernel.mkl_has_avx512():
        pytest.skip("how many terms MKL adds up at a time was tried with AVX-512 of Intel")
    held = Tensors({"a": normal((rank, columns), 1), "b": normal((rows, rank), 2)})
    found = np.empty((rows, columns), np.float32)
    LoraStep(lora(held, 1.0), held.reading, None).delta(0, rows, found)
    expected = torch.mm(*(torch.from_numpy(held.arrays[name]) for name in "ba"))
    assert (found == expected.numpy()).all()


def test_rows_multiplied_in_pairs_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tensors(normal((ROWS + 1, COLUMNS)))
    kernel = MergeKernel(held.stored("weight"), (lora(held),))
    found = []
    for pairs in (False, True):
        monkeypatch.setattr(merge_kernel, "_needs_pairs", lambda pairs=pairs: pairs)
        found.append(merged(held, kernel))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-6)


def test_a_nan_of_the_base_stays_one_and_touches_nothing_else() -> None:
    held = tensors()
    whole = merged(held, MergeKernel(held.stored("weight"), (lora(held),)))
    held.arrays["weight"][5, 7] = np.nan
    found = merged(held, MergeKernel(held.stored("weight"), (lora(held),)))
    assert np.isnan(found[5, 7])
    found[5, 7] = whole[5, 7]
    assert (found == whole).all()


@pytest.mark.parametrize("rounding", get_args(Rounding))
@pytest.mark.parametrize("count", [1, 2])
def test_a_sum_too_large_for_float16_is_refused(rounding: Rounding, count: int) -> None:
    held = tensors(np.full((ROWS, COLUMNS), 65_000, np.float16))
    held.arrays["a"][:] = held.arrays["b"][:] = 0
    held.arrays["a"][0, 7] = held.arrays["b"][3, 0] = 100
    kernel = MergeKernel(held.stored("weight"), (lora(held),) * count, rounding)
    with pytest.raises(OverflowRefusedError, match="at element 127 does not fit float16"):
        merged(held, kernel)


def spoiling(held: Tensors, kind: str) -> tuple[Update, ...]:
    """Updates of finite numbers, the sum of which is not."""
    a, b = held.factor("a"), held.factor("b")
    if kind == "scaling":
        return (lora(held, 1e308),)
    if kind == "magnitudes":
        held.arrays["magnitude"][6] = 3e38
        held.arrays["weight"][6] = held.arrays["weight"].dtype.type(0.01)
        held.arrays["b"][6] = 0
        return (lora(held, dora=True),)
    held.arrays["a"][2, 7] = held.arrays["b"][5, 2] = 3e38
    made: dict[str, tuple[Update, ...]] = {
        "linear": (lora(held),),
        "transposed": (make_low_rank(b.t, a.t, 0.5, "transposed"),),
        "embedding": (make_low_rank(b.t, a.t, 0.5, "embedding"),),
        "dora": (lora(held, dora=True),),
        "columns": (
            make_low_rank(b.t, a.t, 0.5, "embedding", magnitude=held.factor("per_column")),
        ),
        "both signs": (lora(held), lora(held, -0.5)),
        "then dora": (lora(held), lora(held, dora=True)),
        "experts": (make_low_rank(a, b, 0.5, "parameter"),),
    }
    return made[kind]


@pytest.mark.parametrize("rounding", get_args(Rounding))
@pytest.mark.parametrize("norm_of", sampled(get_args(NormOf), get_args(NormOf)[:1]))
@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16", "float16"], ["float16"]))
@pytest.mark.parametrize(
    "kind",
    [
        *("linear", "transposed", "embedding", "experts", "dora", "columns"),
        *("scaling", "magnitudes", "both signs", "then dora"),
    ],
)
def test_finite_numbers_that_merge_to_none_are_refused(
    kind: str, dtype: str, norm_of: NormOf, rounding: Rounding
) -> None:
    held = tensors(normal((ROWS, COLUMNS)).astype(BASES[dtype]))
    held.arrays["per_column"] = np.abs(normal((COLUMNS,), 6)) + 1
    kernel = MergeKernel(held.stored("weight"), spoiling(held, kind), rounding, norm_of)
    with pytest.raises((OverflowRefusedError, AdapterError), match=r"does not fit|is infinite"):
        merged(held, kernel)


def test_a_bias_that_becomes_infinite_is_refused() -> None:
    held = tensors()
    kernel = MergeKernel(held.stored("bias"), (BiasUpdate(held.factor("shift"), 1e308),))
    with pytest.raises(OverflowRefusedError, match="does not fit float32, where the base has"):
        merged(held, kernel)


def test_a_finite_sum_that_bfloat16_rounds_to_infinity_is_refused() -> None:
    held = tensors(np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16))
    held.arrays["a"][:] = held.arrays["b"][:] = 0
    held.arrays["a"][1, 7], held.arrays["b"][3, 1] = -1, 3.4e38
    kernel = MergeKernel(held.stored("weight"), (lora(held, 1.0),))
    with pytest.raises(OverflowRefusedError, match="at element 127 does not fit bfloat16"):
        merged(held, kernel)
    assert merged(held, kernel, "float32")[3, 7] == np.float32(-3.4e38)
    held.arrays["b"][3, 1] = 3.38e38
    assert np.isfinite(merged(held, kernel).astype(np.float32)).all()


def test_a_token_too_large_for_its_base_is_refused() -> None:
    held = tensors(normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16))
    held.arrays["rows"] = np.full((1, COLUMNS), 3.4e38, np.float32)
    kernel = MergeKernel(held.stored("weight"), (TokenRowsUpdate(held.factor("rows"), (5,)),))
    with pytest.raises(OverflowRefusedError, match="at element 200 does not fit bfloat16"):
        merged(held, kernel)


@pytest.mark.parametrize("wild", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_in_the_base_is_nobodys_fault(wild: float) -> None:
    held = tensors()
    held.arrays["weight"][5, 7] = wild
    found = merged(held, MergeKernel(held.stored("weight"), (lora(held),)))
    np.testing.assert_array_equal(found[5, 7], np.float32(wild))


@pytest.mark.parametrize("norm_of", get_args(NormOf))
def test_a_row_without_a_norm_is_refused(norm_of: NormOf) -> None:
    held = tensors()
    held.arrays["weight"][6] = held.arrays["b"][6] = 0
    kernel = MergeKernel(held.stored("weight"), (lora(held, dora=True),), norm_of=norm_of)
    with pytest.raises(AdapterError, match="the norm of row 6 of the weight, which is zero") as e:
        merged(held, kernel)
    assert "'out'" in e.value.where


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("at_once", [2 * COLUMNS, ROWS * COLUMNS])
def test_a_norm_too_large_for_float32_is_refused(
    turned: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dividing by it makes zeros, in which nothing is seen any more."""
    monkeypatch.setattr(merge_kernel, "_AT_ONCE_WITH_NORMS", at_once)
    held = tensors()
    held.arrays["b"][7] = 1e25
    update = lora(held, dora=True)
    if turned:
        held.arrays["weight"] = np.ascontiguousarray(held.arrays["weight"].T)
        update = update.turned
    kernel = MergeKernel(held.stored("weight"), (update,))
    found = r"norm of (row|column) 7 of the weight, which is infinite"
    with pytest.raises(AdapterError, match=found):
        merged(held, kernel)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_a_base_of_another_kind_of_number_is_refused(dtype: str) -> None:
    held = tensors(np.ones((ROWS, COLUMNS), dtype))
    with pytest.raises(UnsupportedError, match=f"no merge into {dtype}"):
        merged(held, MergeKernel(held.stored("weight"), (lora(held),)))


def test_a_window_that_norms_would_need_more_of_is_refused() -> None:
    held = tensors()
    update = lora(held, dora=True)
    assert update.window(rows=(3, 9)).magnitude is not None
    with pytest.raises(ValueError, match="norms of rows need all of the matrix"):
        update.window(columns=(0, 8))
    with pytest.raises(ValueError, match="norms of columns need all of the matrix"):
        update.turned.window(rows=(0, 8))
    stacked = make_low_rank(held.factor("a"), held.factor("b"), 1.0, "experts", experts=2)
    with pytest.raises(ValueError, match="several experts"):
        stacked.window(rows=(0, 8))


# --- with the executor ---


def executed(held: Tensors, products: Sequence[tuple[TensorSpec, Compute]], workers: int) -> bytes:
    file = lay_out_file("out", [(spec.size_bytes, body, spec) for spec, body in products])
    target = MemoryTarget()
    inputs = Inputs({ADAPTER: make_origin(ADAPTER, held.arrays)}, {})
    plan = Plan((file,), {})
    Executor(plan, inputs, target, ExecutionSettings(workers), ignore).run()
    target.commit("out")
    return target.files["out"]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_of_a_large_tensor_agree_with_the_whole(dora: bool, turned: bool) -> None:
    rows = LEAF_BYTES // 4 // COLUMNS + 777  # leaves are cut within rows
    held = tensors(normal((rows, COLUMNS)))
    update = lora(held, dora=dora)
    if turned:
        held.arrays["weight"] = np.ascontiguousarray(held.arrays["weight"].T)
        update = update.turned
    kernel = MergeKernel(held.stored("weight"), (update,))
    spec = TensorSpec(Fqn("out"), FLOAT32, held.arrays["weight"].shape)
    found = executed(held, [(spec, kernel.compute())], workers=3)
    assert found == merged(held, kernel).tobytes()


@dataclass(frozen=True)
class Counting(Kernel):
    """A kernel that notes when it is prepared."""

    calls: list[str]

    is_ready = False

    def prepare(self, out: TensorSpec, reading: Reading) -> Kernel:
        self.calls.append(out.name)
        reading.read_shared(Demand(ADAPTER, Key("a"), Span(0, 8)))
        return Zeros()


class Zeros(Kernel):
    def demands(self, _out: TensorSpec, _block: Span) -> tuple[Demand, ...]:
        return ()

    def run(self, _out: TensorSpec, _block: Span, _inputs: Sequence[Array], target: Array) -> None:
        target[...] = 0


def test_a_kernel_is_prepared_once_per_tensor_and_shared_parts_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, calls, reads = tensors(), list[str](), list[Demand]()
    kernel = Counting(calls)
    large = (3 * LEAF_BYTES // 4,)
    specs = [TensorSpec(Fqn(name), FLOAT32, large) for name in ("one", "two")]

    original = preparing.Preparations.read_shared

    def counted(self: Any, demand: Demand, read: Any) -> Array:
        def noted(demand: Demand) -> Array:
            reads.append(demand)
            found: Array = read(demand)
            return found

        return original(self, demand, noted)

    monkeypatch.setattr(preparing.Preparations, "read_shared", counted)
    executed(held, [(spec, Compute(kernel, ())) for spec in specs], workers=3)
    assert sorted(calls) == ["one", "two"]
    assert len(reads) == 1


def test_a_preparation_that_fails_is_the_error_of_all_who_wait_for_it() -> None:
    waiting = threading.Barrier(2)
    errors: list[BaseException] = []

    class Broken(Kernel):
        is_ready = False

        def prepare(self, _out: TensorSpec, _reading: Reading) -> Kernel:
            raise AdapterError("no")

    def ask(preparations: Preparations) -> None:
        waiting.wait(5)
        with pytest.raises(AdapterError) as found:
            preparations.kernel(Broken(), TensorSpec(Fqn("one"), FLOAT32, (8,)), no_read)
        errors.append(found.value)

    def no_read(_demand: Demand) -> Array:
        raise AssertionError

    with Preparations() as preparations:
        threads = [threading.Thread(target=ask, args=(preparations,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 2


def test_a_prepared_kernel_is_let_go_after_the_last_block_and_parts_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    spec = TensorSpec(Fqn("one"), FLOAT32, (8,))
    data = np.zeros(8, np.float32)
    monkeypatch.setattr(preparing, "SHARED_BYTES", data.nbytes)
    with Preparations() as preparations:
        for _ in range(2):
            preparations.kernel(Counting(calls), spec, lambda _: data.copy())
        preparations.settle(spec, 5)
        preparations.kernel(Counting(calls), spec, lambda _: data.copy())
        assert calls == ["one"]
        preparations.settle(spec, 3)
        preparations.kernel(Counting(calls), spec, lambda _: data.copy())
        assert calls == ["one", "one"]
        shared = preparations.read_shared
        first = shared(Demand("x", Key("a"), Span(0, 8)), lambda _: data.copy())
        assert shared(Demand("x", Key("a"), Span(0, 8)), lambda _: data.copy()) is first
        shared(Demand("x", Key("b"), Span(0, 8)), lambda _: data.copy())
        assert shared(Demand("x", Key("a"), Span(0, 8)), lambda _: data.copy()) is not first
        assert not first.flags.writeable


def test_an_experts_tensor_is_merged_from_a_part_of_the_shared_factors() -> None:
    count, rows, columns = 3, 8, 16
    held = Tensors(
        {
            "a": normal((count * RANK, columns), 1),
            "b": normal((rows, RANK * count), 2),
            **{f"w{number}": normal((rows, columns), 7 + number) for number in range(count)},
        }
    )
    whole = make_low_rank(held.factor("a"), held.factor("b"), 2.0, "experts", experts=count)
    products = [
        (
            TensorSpec(Fqn(f"w{number}"), FLOAT32, (rows, columns)),
            MergeKernel(held.stored(f"w{number}"), (whole.expert(number),)).compute(),
        )
        for number in range(count)
    ]
    found = np.frombuffer(executed(held, products, workers=2), np.float32)
    a = held.arrays["a"].reshape(count, RANK, columns)
    b = held.arrays["b"].reshape(rows, RANK, count)
    truth = [held.arrays[f"w{e}"] + 2 * b[:, :, e] @ a[e] for e in range(count)]
    np.testing.assert_allclose(found.reshape(count, rows, columns), truth, atol=1e-5)


def test_the_number_of_threads_of_the_library_is_put_back() -> None:
    from ckptkit.engine import kernels as blas

    found = blas._blas_threads()
    if found is None:
        pytest.skip("numpy has another library here")
    get, limit = found
    before = get()
    limit(2)
    try:
        with single_threaded_blas():
            assert get() == 1
            with single_threaded_blas():
                assert get() == 1
            assert get() == 1
        assert get() == 2
    finally:
        limit(before)


def test_a_replacement_that_bfloat16_rounds_to_infinity_is_refused() -> None:
    numbers = np.array([1, np.inf, -3.4e38], np.float32)
    cast = CastOperand(StoredOperand(ADAPTER, Key("whole"), FLOAT32), BY_NAME["bfloat16"])
    with pytest.raises(OverflowRefusedError, match="at element 12 does not fit bfloat16"):
        cast.values(Span(10, 13), [numbers])
    found = cast.values(Span(10, 12), [numbers[:2]])
    np.testing.assert_array_equal(found.astype(np.float32), numbers[:2])
