"""Which tensors are written, and in which element type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    IncompleteCheckpointError,
    OverflowRefusedError,
    RefusedError,
)
from ckptkit.core.index import (
    ChunkTable,
    Fqn,
    Key,
    Part,
    RecordTable,
    TensorEntry,
    TensorIndex,
)
from ckptkit.engine.kernels import OperandKernel, StoredOperand, make_products
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import SOURCE, Compute, Copy
from ckptkit.plan.selection import (
    DTypePolicy,
    model_trees,
    refuse_casting_quantized,
    select_model,
)
from ckptkit.plan.weight_kinds import looks_packed, refuse_random_weights

EMPTY = np.zeros(0, np.int64)


def entry(
    name: str,
    *,
    tree: str = "",
    part: Part = "model",
    dtype: str = "float32",
    shape: tuple[int, ...] = (2,),
) -> TensorEntry:
    key = Key(f"{tree}.{name}" if tree else name)
    chunks = ChunkTable(EMPTY.reshape(0, 1), EMPTY.reshape(0, 1), EMPTY)
    return TensorEntry(key, (key,), Fqn(name), tree, part, dtype_named(dtype), shape, chunks)


def index_of(*entries: TensorEntry) -> TensorIndex:
    records = RecordTable(EMPTY, EMPTY, EMPTY)
    return TensorIndex("test", [], records, {entry.key: entry for entry in entries})


def selected(index: TensorIndex, **options: Any) -> list[str]:
    return [e.name for e in select_model(index, ConsolidateRequest(**options), location="here")]


def test_optimizers_and_other_trees_are_left_out() -> None:
    index = index_of(
        entry("a"), entry("b", tree="optim", part="optimizer"), entry("c", tree="rng", part="other")
    )
    assert model_trees(index) == [""]
    assert selected(index) == ["a"]


def test_several_models_need_a_selection() -> None:
    index = index_of(entry("a", tree="actor"), entry("b", tree="critic"))
    with pytest.raises(AmbiguousSourceError, match="'actor', 'critic'") as caught:
        selected(index)
    assert caught.value.hint == "choose one with --select actor, or --select critic"
    assert selected(index, select="critic") == ["b"]
    with pytest.raises(CannotPlanError, match="holds no model 'x'; found 'actor', 'critic'"):
        selected(index, select="x")


def test_a_checkpoint_without_model_is_incomplete() -> None:
    with pytest.raises(IncompleteCheckpointError, match="no model tensor among 1 tensors"):
        selected(index_of(entry("a", tree="optim", part="optimizer")))


@pytest.mark.parametrize("options", [{"include": ("x*",)}, {"exclude": ("*",)}])
def test_patterns_that_leave_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CannotPlanError, match="leave none of 2 tensors") as caught:
        selected(index_of(entry("a"), entry("b")), **options)
    assert caught.value.exit_status == 4


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.q_proj.lora_A.default.weight",
        "q_proj.lora_B.weight",
        "q_proj.base_layer.weight",
        "embed.lora_embedding_A.default",
        "q_proj.lora_magnitude_vector.default.weight",
        "prompt_encoder.default.embedding.weight",
        "score.modules_to_save.default.weight",
        "up.weight.quant_state.bitsandbytes__nf4",
        "up.weight.absmax",
        "up.SCB",
    ],
)
def test_what_would_load_as_random_is_refused_by_name(name: str) -> None:
    with pytest.raises(RefusedError, match="random weights") as caught:
        refuse_random_weights([entry("up.weight"), entry(name)], location="here")
    assert repr(name) in caught.value.message
    assert "--names live" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "shape", "is_packed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (512, 1), True),
        ("model.layers.0.mlp.gate_up_proj.weight", (512, 1), True),
        ("transformer.h.0.mlp.dense_h_to_4h.weight", (512, 1), True),
        ("model.layers.0.self_attn.q_proj.weight", (512, 2), False),
        ("in_proj.weight", (512, 1), False),
        ("score.weight", (512, 1), False),
        ("model.layers.0.mlp.up_proj.weight", (1, 1), False),
        ("model.layers.0.mlp.up_proj.bias", (512, 1), False),
    ],
)
def test_weights_of_one_column_are_packed_where_no_layer_has_one_input(
    name: str, shape: tuple[int, ...], is_packed: bool
) -> None:
    assert looks_packed(name, shape) is is_packed


def test_a_matrix_of_bytes_is_a_packed_weight_unless_its_scale_lies_beside_it() -> None:
    packed = entry("fc1.weight", dtype="int8", shape=(8, 8))
    column = entry("fc1.weight", dtype="uint8", shape=(32, 1))
    for one in (packed, column):
        with pytest.raises(RefusedError, match=r"'fc1\.weight' belongs to a packed 4-bit or 8-bit"):
            refuse_random_weights([one], location="here")
    scale = entry("fc1.weight_scale", dtype="float32", shape=(8, 1))
    mask = entry("mask", dtype="int8", shape=(8, 8))
    refuse_random_weights([packed, scale, mask], location="here")


def test_of_an_adapter_that_is_lost_the_hint_tells_why() -> None:
    moment = entry("q_proj.lora_A.default.weight.exp_avg", tree="optimizer", part="optimizer")
    with pytest.raises(IncompleteCheckpointError, match="no model tensor") as caught:
        selected(index_of(moment))
    assert "under FSDP1, PEFT 0.21 finds no weights" in caught.value.hint


@pytest.mark.parametrize("name", ["explora_A.weight", "base_layers.0.weight", "SCB", "colora.bias"])
def test_names_that_only_resemble_adapters_are_taken(name: str) -> None:
    refuse_random_weights([entry(name)], location="here")


@pytest.mark.parametrize(
    ("stored", "choice", "written"),
    [
        ("float32", "keep", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float64", "float16", "float16"),
        ("float8_e4m3fn", "bfloat16", "bfloat16"),
        ("int64", "bfloat16", "int64"),
        ("bool", "float32", "bool"),
        ("uint8", "float16", "uint8"),
        ("complex64", "float32", "complex64"),
    ],
)
def test_only_floating_tensors_are_cast(stored: str, choice: str, written: str) -> None:
    assert DTypePolicy(choice, ()).target(entry("a", dtype=stored)).name == written


def test_a_kept_name_keeps_its_type_whatever_the_rest_becomes() -> None:
    policy = DTypePolicy("bfloat16", ("*.running_*", "head"))
    written = {name: policy.target(entry(name)).name for name in ("bn.running_mean", "head", "up")}
    assert written == {"bn.running_mean": "float32", "head": "float32", "up": "bfloat16"}


def test_products_copy_what_stays_compute_what_changes_and_leave_out_what_is_tied() -> None:
    entries = [entry("a"), entry("b", dtype="int64"), entry("c", dtype="bfloat16"), entry("d")]
    products = make_products(entries, DTypePolicy("bfloat16"), {Fqn("d"): Fqn("a")})
    assert [product.spec.name for product in products] == ["a", "b", "c"]
    assert [type(product.body) for product in products] == [Compute, Copy, Copy]
    assert products[1].body == Copy(SOURCE, Key("b"))
    assert (products[0].spec.dtype.name, products[0].body) == (
        "bfloat16",
        OperandKernel(StoredOperand(SOURCE, Key("a"), dtype_named("float32"))).compute(),
    )


# The same through the whole pipeline


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    values = torch.tensor([1.0, -0.0, 1e-40, 65_504.0, 3.14159265, float("inf"), float("nan")])
    values[6:] = torch.tensor([-0x00300000], dtype=torch.int32).view(torch.float32)  # a NaN's bits
    tensors = {
        "up.weight": values,
        "bn.running_mean": torch.rand(5, generator=torch.Generator().manual_seed(1)),
        "steps": torch.tensor(2**62 + 1),
        "mask": torch.tensor([True, False]),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def bits(tensor: torch.Tensor) -> list[int]:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
    found: list[int] = tensor.view(kinds[tensor.element_size()]).flatten().tolist()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_become_what_torch_makes_of_them_and_nan_one_quiet_nan(
    dtype: Any, source: Path, tmp_path: Path
) -> None:
    ckptkit.consolidate(source, tmp_path / "out", dtype=dtype, keep_dtype=["bn.*"])
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    wanted = before["up.weight"].to(getattr(torch, dtype))
    assert after["up.weight"].dtype == wanted.dtype
    assert bits(after["up.weight"])[:6] == bits(wanted)[:6]
    assert torch.isnan(after["up.weight"][6])
    for name in ("bn.running_mean", "steps", "mask"):
        assert (after[name].dtype, bits(after[name])) == (before[name].dtype, bits(before[name]))


def test_a_finite_number_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    out = tmp_path / "outbox" / "out"
    save_file({"w": torch.tensor([1.0, 70_000.0])}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(OverflowRefusedError) as caught:
        ckptkit.consolidate(tmp_path / "source", out, dtype="float16")
    assert caught.value.exit_status == 4
    assert "'w'" in str(caught.value)
    assert caught.value.hint
    assert not out.parent.exists()  # it was made for the run, and removed again


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ({"l.weight": "float8_e4m3fn", "l.weight_scale_inv": "float32"}, True),
        ({"l.qweight": "int32", "l.scales": "float16"}, True),
        ({"l.weight_packed": "uint8", "l.weight_scale": "uint8"}, True),
        ({"l.weight": "uint8", "l.weight.absmax": "float32"}, True),
        ({"l.weight": "float8_e4m3fn"}, False),
        ({"logit_scale": "float32", "l.weight": "float32"}, False),
    ],
    ids=["fp8", "gptq", "mxfp4, without a float", "bitsandbytes", "bare fp8", "clip"],
)
def test_what_has_a_scale_beside_it_is_not_cast(names: dict[str, str], refused: bool) -> None:
    entries = [entry(name, dtype=dtype) for name, dtype in names.items()]
    policy = DTypePolicy("bfloat16")
    if refused:
        with pytest.raises(RefusedError, match="is quantized") as caught:
            refuse_casting_quantized(entries, None, policy, location="here")
        assert caught.value.exit_status == 4
    else:
        refuse_casting_quantized(entries, None, policy, location="here")
    refuse_casting_quantized(entries, None, DTypePolicy("keep"), location="here")


def test_a_quantized_configuration_forbids_a_cast() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(RefusedError, match="quantization_config"):
        refuse_casting_quantized(
            [entry("l.weight")], config, DTypePolicy("float16"), location="here"
        )
    factor = entry("base_model.model.l.lora_A.default.weight")  # without its packed base
    refuse_casting_quantized([factor], config, DTypePolicy("float16"), location="here")
