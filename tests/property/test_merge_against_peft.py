"""Merged weights, compared bit by bit with what PEFT makes of the same layers in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import nn

from ckptkit.adapters.merge_kernel import (
    BiasUpdate,
    Factor,
    LowRankUpdate,
    MergeKernel,
    Rounding,
    TokenRowsUpdate,
    Update,
    make_low_rank,
    matrix_shape,
)
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.index import Fqn, Key, Span
from ckptkit.engine.kernels import StoredOperand
from ckptkit.lora.changes import Form
from ckptkit.plan.plan import Demand, Reading, TensorSpec
from tests.property.examples import examples

Array = NDArray[Any]
RANK, ALPHA = 4, 7
EXACT = ("linear", "gpt", "embed", "pointwise")
CONVOLUTIONS = ("conv1", "conv2", "conv3")
LAYERS = (*EXACT, *CONVOLUTIONS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sums_in_order() -> bool:
    """Says whether torch and numpy add up as they did where the orders were measured.

    On other processors either may take another; then results agree but for the last bits.
    """
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(n).astype(np.float32) for n in ((16, 40), (24, 16)))
    fused, lanes, total = (np.zeros(n, np.float32) for n in ((24, 40), (24, 8), 24))
    for term in range(16):
        fused = (b[:, term : term + 1].astype(np.float64) * a[term] + fused).astype(np.float32)
    for start in range(0, 40, 8):
        lanes += fused[:, start : start + 8] ** 2
    for lane in range(8):
        total += lanes[:, lane]
    product = torch.from_numpy(b) @ torch.from_numpy(a)
    norms = torch.linalg.norm(torch.from_numpy(fused), dim=1)
    ours = np.concatenate([np.asfortranarray(b[row : row + 2]) @ a for row in range(0, 24, 2)])
    return bool(
        (array_of(product) == fused).all()
        and (ours == fused).all()
        and (array_of(norms) == np.sqrt(total)).all()
    )


def assert_equal(found: Array, truth: Array, name: str = "") -> None:
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)
    if IN_ORDER:
        assert found.tobytes() == truth.tobytes(), name
        return
    last_bits = 4 * torch.finfo(getattr(torch, found.dtype.name)).eps
    given, wanted = found.astype(np.float64), truth.astype(np.float64)
    assert np.abs(given - wanted).max() <= last_bits * np.abs(wanted).max(), name


def array_of(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().contiguous()
    bfloat16 = tensor.dtype == torch.bfloat16
    array: Array = (tensor.view(torch.int16) if bfloat16 else tensor).numpy().copy()
    return array.view(ml_dtypes.bfloat16) if bfloat16 else array


IN_ORDER = sums_in_order()


def dtype_of(tensor: torch.Tensor | torch.dtype) -> DType:
    dtype = tensor if isinstance(tensor, torch.dtype) else tensor.dtype
    return BY_NAME[str(dtype).removeprefix("torch.")]


@dataclass
class Shelf:
    """Tensors by name, and what a kernel that prepares itself reads them with."""

    tensors: dict[str, Array] = field(default_factory=dict)

    def read(self, demand: Demand) -> Array:
        return self.tensors[demand.key].reshape(-1)[demand.place.start : demand.place.stop].copy()

    @property
    def reading(self) -> Reading:
        return Reading(
            self.read,
            self.read,
            lambda *_: pytest.fail("opens nothing"),
            lambda *_: pytest.fail("keeps nothing"),
        )

    def factor(self, name: str, tensor: torch.Tensor) -> Factor:
        self.tensors[name] = array_of(tensor)
        height, width = matrix_shape(tensor.shape)
        return Factor("a", Key(name), dtype_of(tensor), width, range(height), range(width))

    def base(self, name: str, array: Array) -> StoredOperand:
        self.tensors[name] = array
        return StoredOperand("b", Key(name), BY_NAME[array.dtype.name])

    def merged(self, kernel: MergeKernel, shape: tuple[int, ...], cuts: int = 3) -> Array:
        """Runs a kernel over blocks that begin anywhere."""
        spec = TensorSpec(Fqn("out"), kernel.base.dtype, shape)
        ready = kernel.prepare(spec, self.reading)
        out = np.empty(spec.elements, self.tensors["base"].dtype)
        edges = np.random.default_rng(spec.elements).integers(0, out.size, cuts)
        for low, high in zip([0, *sorted(edges)], [*sorted(edges), out.size], strict=True):
            if low < high:
                block = Span(int(low), int(high))
                inputs = [self.read(demand) for demand in ready.demands(spec, block)]
                ready.run(spec, block, inputs, out[low:high])
        return out.reshape(shape)


class Layers(nn.Module):
    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.linear = nn.Linear(48, 33)
        self.gpt = Conv1D(24, 40)
        self.embed = nn.Embedding(90, 32)
        self.pointwise = nn.Conv2d(16, 24, 1)
        self.conv1 = nn.Conv1d(8, 16, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.conv3 = nn.Conv3d(4, 8, (1, 2, 3))


@dataclass
class Case:
    dtype: torch.dtype = torch.float32
    dora: bool = False
    adapters: int = 1
    rank: int = RANK
    rslora: bool = False


def trained(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def update_of(shelf: Shelf, layer: Any, adapter: str, name: str) -> LowRankUpdate:
    if name == "embed":
        down, up = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a, b = shelf.factor(f"{adapter}.a", down), shelf.factor(f"{adapter}.b", up)
    magnitude = None
    if adapter in (layer.lora_magnitude_vector or ()):
        vector = layer.lora_magnitude_vector[adapter].weight
        magnitude = shelf.factor(f"{adapter}.m", vector.reshape(1, -1))
    form: Form = "transposed" if name == "gpt" else "embedding" if name == "embed" else "linear"
    return make_low_rank(a, b, layer.scaling[adapter], form, magnitude=magnitude)


def both(case: Case, rounding: Rounding) -> Mapping[str, tuple[Array, Array]]:
    """Merges every layer, with ckptkit and with PEFT."""
    torch.manual_seed(0)
    model = Layers().to(case.dtype)
    bases = {name: array_of(getattr(model, name).weight) for name in LAYERS}
    adapters = ["default", "second", "third"][: case.adapters]
    peft: Any = None
    for number, adapter in enumerate(adapters):
        config = LoraConfig(
            r=case.rank + number,
            lora_alpha=ALPHA,
            target_modules=list(LAYERS),
            use_dora=case.dora,
            use_rslora=case.rslora,
            fan_in_fan_out=False,
        )
        if peft is None:
            peft = get_peft_model(model, config)
        else:
            peft.add_adapter(adapter, config)
    trained(peft)
    found = {}
    for name in LAYERS:
        shelf = Shelf()
        layer = getattr(peft.base_model.model, name)
        updates = tuple(update_of(shelf, layer, adapter, name) for adapter in adapters)
        kernel = MergeKernel(shelf.base("base", bases[name]), updates, rounding)
        found[name] = shelf.merged(kernel, bases[name].shape)
    merged = peft.merge_and_unload(adapter_names=adapters)
    return {name: (found[name], array_of(getattr(merged, name).weight)) for name in LAYERS}


def assert_same(pairs: Mapping[str, tuple[Array, Array]], names: tuple[str, ...] = LAYERS) -> None:
    for name in names:
        found, truth = pairs[name]
        assert_equal(found, truth, name)
    for name in set(LAYERS).difference(names):
        found, truth = (values.astype(np.float64) for values in pairs[name])
        eps = torch.finfo(getattr(torch, pairs[name][0].dtype.name)).eps
        assert np.abs(found - truth).max() <= 4 * eps * np.abs(truth).max(), name


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(rank=16, rslora=True),
        Case(rank=200),
        Case(rank=256),
        Case(rank=1),
        Case(adapters=3),
        Case(dora=True),
        Case(dora=True, rank=16, rslora=True),
    ],
    ids=str,
)
def test_float32_weights_are_merged_to_the_bits_of_peft(case: Case) -> None:
    assert_same(both(case, "once"), EXACT)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("adapters", [1, 2])
def test_16_bit_weights_are_merged_with_the_rounding_of_peft(
    dtype: torch.dtype, dora: bool, adapters: int
) -> None:
    assert_same(both(Case(dtype, dora, adapters), "peft"), EXACT)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
def test_several_dora_adapters_on_float32_are_merged_as_peft_merges_and_unmerges_them() -> None:
    assert_same(both(Case(dora=True, adapters=3), "peft"), EXACT)


class Experts(nn.Module):
    def __init__(self, shape: tuple[int, ...], *, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.is_transposed = transposed


class Mixture(nn.Module):
    def __init__(self, shape: tuple[int, ...], *, transposed: bool) -> None:
        super().__init__()
        self.experts = Experts(shape, transposed=transposed)


@dataclass
class Fused:
    """A parameter with LoRA on it, before and after PEFT merged."""

    shelf: Shelf
    base: Array
    update: LowRankUpdate
    truth: Array

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Fused:
        torch.manual_seed(0)
        model = Mixture(shape, transposed=transposed).to(dtype)
        shelf, base = Shelf(), array_of(model.experts.weight)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_parameters=["experts.weight"])
        peft: Any = get_peft_model(model, config)
        trained(peft)
        layer = peft.base_model.model.experts
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        update = make_low_rank(
            shelf.factor("a", a),
            shelf.factor("b", b),
            layer.scaling["default"],
            "experts_transposed" if transposed else "experts",
            experts=shape[0],
        )
        truth = array_of(peft.merge_and_unload().experts.weight)
        return cls(shelf, base, update, truth)

    def merged(self, base: Array, update: Update, rounding: Rounding = "peft") -> Array:
        kernel = MergeKernel(self.shelf.base("base", base), (update,), rounding)
        return self.shelf.merged(kernel, base.shape, cuts=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_merged_to_the_bits_of_peft(dtype: torch.dtype, transposed: bool) -> None:
    case = Fused.of((3, 24, 40), dtype, transposed=transposed)
    assert_equal(case.merged(case.base, case.update), case.truth)


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_fused_experts_that_are_tensors_on_disk_get_their_part_of_the_update(
    transposed: bool,
) -> None:
    case = Fused.of((3, 24, 40), torch.float32, transposed=transposed)
    for number, (rows, columns) in enumerate(
        [((0, 12), None), ((12, 24), (16, 40)), (None, (0, 20))]
    ):
        part = case.update.expert(number).window(rows, columns)
        cut = np.s_[number, slice(*(rows or (24,))), slice(*(columns or (40,)))]
        found = case.merged(np.ascontiguousarray(case.base[cut]), part)
        assert_equal(found, case.truth[cut])
        found = case.merged(np.ascontiguousarray(case.base[cut].T), part.turned)
        assert_equal(found, case.truth[cut].T)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trained_tokens_replace_their_rows(dtype: torch.dtype) -> None:
    tokens = [49, 3, 0, 17]
    config = LoraConfig(target_modules=["head"], trainable_token_indices={"embed": tokens})
    model = Words().to(dtype)
    shelf, base = Shelf(), array_of(model.embed.weight)
    peft: Any = get_peft_model(model, config)
    rows = peft.base_model.model.embed.token_adapter.trainable_tokens_delta["default"]
    with torch.no_grad():
        rows.copy_(torch.randn(rows.shape))
    update = TokenRowsUpdate(shelf.factor("rows", rows), tuple(tokens))
    found = shelf.merged(MergeKernel(shelf.base("base", base), (update,)), base.shape, cuts=6)
    assert found.tobytes() == array_of(peft.merge_and_unload().embed.weight).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases_of_an_adapter_are_added_as_peft_adds_them(dtype: torch.dtype) -> None:
    model = Words().to(dtype)
    shelf, base = Shelf(), array_of(model.head.bias)
    config = LoraConfig(target_modules=["head"], lora_bias=True, r=3, lora_alpha=ALPHA)
    peft: Any = get_peft_model(model, config)
    trained(peft)
    layer = peft.base_model.model.head
    bias = layer.lora_B["default"].bias
    update = BiasUpdate(shelf.factor("bias", bias), layer.scaling["default"])
    kernel = MergeKernel(shelf.base("base", base), (update,), "peft")
    found = shelf.merged(kernel, base.shape, cuts=2)
    assert found.tobytes() == array_of(peft.merge_and_unload().head.bias).tobytes()


@settings(max_examples=examples(60))
@given(
    out=st.integers(1, 70),
    inputs=st.integers(1, 70),
    rank=st.integers(1, 40),
    cuts=st.integers(0, 6),
    fan_in_fan_out=st.booleans(),
)
def test_any_shape_comes_close_and_those_of_real_layers_to_the_bit(
    out: int, inputs: int, rank: int, cuts: int, fan_in_fan_out: bool
) -> None:
    generator = torch.Generator().manual_seed(out + 71 * inputs)
    a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (out, rank)))
    scaling = ALPHA / math.sqrt(rank)
    delta = b @ a * scaling
    base = torch.randn((inputs, out) if fan_in_fan_out else (out, inputs), generator=generator)
    truth = array_of(base + (delta.T if fan_in_fan_out else delta))
    shelf = Shelf()
    form: Form = "transposed" if fan_in_fan_out else "linear"
    update = make_low_rank(shelf.factor("a", a), shelf.factor("b", b), scaling, form)
    kernel = MergeKernel(shelf.base("base", array_of(base)), (update,))
    found = shelf.merged(kernel, truth.shape, cuts=cuts)
    if out > 3 and inputs > 11:
        assert_equal(found, truth)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)


def test_before_peft_0_21_norms_were_those_of_the_running_weight() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(20, 32, generator=generator)
    shelf, updates, truth = Shelf(), [], weight.clone()
    base = shelf.base("base", array_of(weight))
    for name in ("first", "second"):
        a, b = (torch.randn(n, generator=generator) * 0.3 for n in ((RANK, 32), (20, RANK)))
        magnitude = torch.rand(20, generator=generator) + 0.5
        total = truth + b @ a * 2.0
        truth = (magnitude / torch.linalg.norm(total, dim=1)).view(-1, 1) * total
        down, up = shelf.factor(f"{name}.a", a), shelf.factor(f"{name}.b", b)
        vector = shelf.factor(f"{name}.m", magnitude)
        updates.append(make_low_rank(down, up, 2.0, magnitude=vector))
    kernel = MergeKernel(base, tuple(updates), norm_of="running")
    assert_equal(shelf.merged(kernel, (20, 32)), array_of(truth))
    other = shelf.merged(MergeKernel(base, tuple(updates)), (20, 32))
    turned = shelf.merged(MergeKernel(base, tuple(updates[::-1])), (20, 32))
    assert np.abs(other - array_of(truth)).max() > 1e-2
    assert np.abs(other - turned).max() > 1e-2
