"""Packed models, unpacked with `--dtype`: the bits are those that the owner of the format has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.unpacking import unpack_checkpoint
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Span
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.plan.plan import SOURCE

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of what they replace
Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
PROJECTION = "model.layers.0.mlp.up_proj.weight"
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "number_formats"
FLOAT8 = torch.float8_e4m3fn


def save_packed(folder: Path, pack: Pack, quantization: Mapping[str, Any]) -> Tensors:
    """Writes a small model whose projections are packed, and returns its tensors.

    `pack` gives the tensors of a weight by what stands for `.weight` in their names.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = pack(value.float())
            tensors |= {name.removesuffix(".weight") + part: held for part, held in parts.items()}
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(document))
    return tensors


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Changes tensors of a packed projection by what stands behind its name, or drops them."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for ending, value in tensors.items():
        name = PROJECTION.removesuffix(".weight") + "." + ending
        held.pop(name, None)
        if value is not None:
            held[name] = value
    save_file(held, path, metadata={"format": "pt"})


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.view(torch.uint8), expected.contiguous().view(torch.uint8))


def unpack(folder: Path, dtype: str = "bfloat16") -> Tensors:
    out = folder.parent / f"{folder.name}-{dtype}"
    ckptkit.consolidate(folder, out, dtype=dtype)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == dtype
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    return load_file(out / "model.safetensors")


def refusal(folder: Path) -> str:
    """Returns why a model is not unpacked; nothing is written."""
    out = folder.parent / "refused"
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(folder, out, dtype="bfloat16")
    assert not out.exists()
    assert list(folder.parent.iterdir()) == [folder]
    return str(caught.value)


def quantize_float8(
    weight: torch.Tensor, high: int, wide: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FP8 numbers, and the scale of each block of so many rows and columns."""
    rows, columns = weight.shape
    grid = -(-rows // high), -(-columns // wide)
    scale = torch.empty(grid)
    made = torch.empty_like(weight)
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale[i, j] = weight[place].abs().max() / 448
            made[place] = weight[place] / scale[i, j]
    return made.to(FLOAT8), scale


# --- fine-grained FP8 ---


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, dtype)
    return made


def pack_blocks(high: int, wide: int, scales: torch.dtype = torch.float32) -> Pack:
    def pack(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        numbers, scale = quantize_float8(weight, high, wide)
        if scales == torch.float8_e8m0fnu:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return {".weight": numbers, ".weight_scale_inv": scale.to(scales)}

    return pack


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_fp8_blocks_are_unpacked_as_transformers_does(
    tmp_path: Path, scales: torch.dtype, dtype: str
) -> None:
    folder = tmp_path / "packed"
    options = {**FP8, "weight_block_size": [16, 8]}
    tensors = save_packed(folder, pack_blocks(16, 8, scales), options)
    made = unpack(folder, dtype)
    assert set(made) == {name for name in tensors if not name.endswith("_scale_inv")}
    wanted = getattr(torch, dtype)
    for name, value in made.items():
        scale = tensors.get(f"{name}_scale_inv")
        stored = tensors[name]
        expected = stored.to(wanted) if scale is None else dequantize(stored, scale, wanted)
        assert_same_bits(value, expected)


def test_fp8_blocks_may_end_short(tmp_path: Path) -> None:
    """As DeepSeek publishes them; Transformers refuses such shapes."""
    folder = tmp_path / "packed"
    high, wide = 28, 36
    tensors = save_packed(
        folder, pack_blocks(high, wide), {**FP8, "weight_block_size": [high, wide]}
    )
    made = unpack(folder)
    numbers, scale = tensors[PROJECTION], tensors[f"{PROJECTION}_scale_inv"]
    rows, columns = numbers.shape
    assert rows % high
    assert columns % wide
    whole = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    assert_same_bits(made[PROJECTION], (numbers.float() * whole).bfloat16())


@pytest.mark.parametrize("per", ["tensor", "channel", "column of channels"])
def test_fp8_without_blocks_has_a_scale_per_tensor_or_row(tmp_path: Path, per: str) -> None:
    def pack(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        rows, columns = weight.shape
        numbers, scale = quantize_float8(weight, rows if per == "tensor" else 1, columns)
        shape = {"tensor": (), "channel": (rows,), "column of channels": (rows, 1)}[per]
        static = {".activation_scale": torch.ones(())} if per == "tensor" else {}
        return {".weight": numbers, ".weight_scale_inv": scale.reshape(shape), **static}

    folder = tmp_path / "packed"
    tensors = save_packed(folder, pack, {**FP8, "weight_block_size": None})
    made = unpack(folder)
    numbers, scale = tensors[PROJECTION], tensors[f"{PROJECTION}_scale_inv"].reshape(-1, 1)
    assert_same_bits(made[PROJECTION], dequantize(numbers, scale, torch.bfloat16))
    assert not any("scale" in name for name in made)


def test_packed_tensors_are_kept_as_they_are_unless_another_type_is_asked_for(
    tmp_path: Path,
) -> None:
    folder, out = tmp_path / "packed", tmp_path / "out"
    options = {**FP8, "weight_block_size": [16, 16]}
    tensors = save_packed(folder, pack_blocks(16, 16), options)
    ckptkit.consolidate(folder, out)
    for name, value in load_file(out / "model.safetensors").items():
        assert_same_bits(value, tensors[name])
    assert json.loads((out / "config.json").read_text())["quantization_config"] == options


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "'model.layers.0.mlp.up_proj.weight_scale_inv' is missing"),
        (torch.ones(6, 3), "has shape (6, 3), expected (6, 4)"),
        (torch.zeros(6, 4), "has the scale 0 at [0, 0]"),
        (torch.full((6, 4), torch.nan), "has the scale nan at [0, 0]"),
        (torch.full((6, 4), torch.inf), "has the scale inf at [0, 0]"),
        (torch.ones(6, 4).to(torch.int32), "is int32, which is no type of scales"),
    ],
)
def test_scales_that_give_numbers_no_meaning_are_refused(
    tmp_path: Path, value: torch.Tensor | None, said: str
) -> None:
    folder = tmp_path / "packed"
    save_packed(folder, pack_blocks(16, 16), {**FP8, "weight_block_size": [16, 16]})
    change(folder, weight_scale_inv=value)
    assert said in refusal(folder)


def test_a_scale_without_its_weight_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    save_packed(folder, pack_blocks(16, 16), {**FP8, "weight_block_size": [16, 16]})
    change(folder, weight=torch.zeros(96, 64, dtype=torch.bfloat16))
    assert f"{PROJECTION}_scale_inv' belongs to a packed weight" in refusal(folder)


@pytest.mark.parametrize("size", [[16, 32], None, [0, 16], "many"])
def test_a_configuration_that_contradicts_the_files_is_refused(tmp_path: Path, size: Any) -> None:
    folder = tmp_path / "packed"
    save_packed(folder, pack_blocks(16, 16), {**FP8, "weight_block_size": size})
    said = refusal(folder)
    assert "_scale_inv' has shape" in said or "does not say how" in said


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8, torch.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp4_experts_are_unpacked_as_transformers_does(
    tmp_path: Path, scales: torch.dtype, dtype: str
) -> None:
    folder, out = tmp_path / "packed", tmp_path / "out"
    folder.mkdir()
    torch.manual_seed(0)
    expert, (numbers, _) = "mlp.experts.0.up_proj", quantize_float8(torch.randn(32, 48), 16, 16)
    scale = torch.randint(100, 140, (24, 3), dtype=torch.uint8)
    packed = torch.randint(-128, 128, (24, 48), dtype=torch.int8)
    made_of = {torch.uint8: scale, torch.float32: torch.exp2(scale.float() - 127)}
    scale = made_of.get(scales, scale.view(torch.float8_e8m0fnu))
    tensors = {
        f"{expert}.weight": packed,
        f"{expert}.weight_scale_inv": scale,
        "mlp.shared.weight": numbers,
        "mlp.shared.weight_scale_inv": torch.ones(2, 3),
    }
    save_file(tensors, folder / "model.safetensors")
    options = {**FP8, "weight_block_size": [16, 16], "expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    ckptkit.consolidate(folder, out, dtype=dtype)
    made = load_file(out / "model.safetensors")
    assert set(made) == {f"{expert}.weight", "mlp.shared.weight"}
    expected = dequantize(packed, scale, getattr(torch, dtype))
    assert_same_bits(made[f"{expert}.weight"], expected)


# --- MXFP4 ---


def save_gpt_oss(folder: Path) -> Tensors:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=41,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_scaling=None,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            scales = torch.randint(100, 140, blocks.shape[:3], dtype=torch.uint8)
            scales.view(-1)[:3] = torch.tensor([0, 1, 254])
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(document))
    return tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_is_unpacked_as_transformers_does(tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "packed"
    tensors = save_gpt_oss(folder)
    made = unpack(folder, dtype)
    packed = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    assert len(packed) == 2
    for name in packed:
        expected = convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=getattr(torch, dtype)
        )
        assert_same_bits(made[name], expected)


def test_what_several_blocks_are_made_from_is_read_once(tmp_path: Path) -> None:
    """A row of the weight is a column of the packed tensor, for which whole rows are read."""
    folder = tmp_path / "packed"
    save_gpt_oss(folder)
    config = json.loads((folder / "config.json").read_text())
    with open_checkpoint(folder) as opened:
        unpacked = unpack_checkpoint(opened, config, "bfloat16").checkpoint
        reader = TensorReader(Origin(SOURCE, unpacked.source, unpacked.index))
        name = "model.layers.0.mlp.experts.down_proj"
        entry = next(e for e in unpacked.index.of_part("model") if e.name == name)
        row = entry.shape[-1]
        target = memoryview(bytearray(row * entry.dtype.itemsize))
        reader.fill(entry.key, Span(0, row), target)
        read_bytes = reader.cache.bytes_read
        assert read_bytes > 0
        reader.fill(entry.key, Span(row, 2 * row), target)
        assert reader.cache.bytes_read == read_bytes
        reader.fill(entry.key, Span(row * entry.shape[1], row * (entry.shape[1] + 1)), target)
        assert reader.cache.bytes_read == 2 * read_bytes


def test_the_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    tensors = save_gpt_oss(folder)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "has the scale nan at" in refusal(folder)


# --- what other libraries packed, and unpacked again ---


@cache
def read_cases(library: str) -> tuple[dict[str, Any], Tensors]:
    path = FIXTURES / f"{library}.safetensors"
    with safe_open(path, "pt") as file:
        configs = json.loads(file.metadata()["configs"])
    return configs, load_file(path)


def list_cases(library: str) -> list[Any]:
    return [pytest.param(library, name, id=f"{library}-{name}") for name in read_cases(library)[0]]


def save_case(library: str, name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a packed weight `layer.weight` and its configuration.

    Returns what it stands for, in the type that its library has for it and in float32.
    """
    configs, tensors = read_cases(library)
    own = {
        key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")
    }
    unpacked = own.pop("unpacked")
    wide = own.pop("unpacked_float32", unpacked.float())
    folder.mkdir()
    held = {f"layer.{part}": value for part, value in own.items()}
    save_file(held | {"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": configs[name]}))
    return unpacked, wide


@pytest.mark.parametrize("dtype", ["own", "float32"])
@pytest.mark.parametrize(
    ("library", "name"),
    [case for path in sorted(FIXTURES.glob("*.safetensors")) for case in list_cases(path.stem)],
)
def test_weights_are_unpacked_as_the_owner_of_the_format_does(
    tmp_path: Path, library: str, name: str, dtype: str
) -> None:
    folder, out = tmp_path / "packed", tmp_path / "out"
    own, wide = save_case(library, name, folder)
    expected = own if dtype == "own" else wide
    ckptkit.consolidate(folder, out, dtype=str(expected.dtype).removeprefix("torch."))
    made = load_file(out / "model.safetensors")
    assert set(made) == {"layer.weight", "norm.weight"}
    assert_same_bits(made["layer.weight"], expected)


@pytest.mark.parametrize("config", ["int8", "int8 in groups", "float8", "float8 of the whole"])
def test_files_of_torchao_are_unpacked_as_it_does(tmp_path: Path, config: str) -> None:
    made = {
        "int8": Int8WeightOnlyConfig(),
        "int8 in groups": Int8WeightOnlyConfig(granularity=PerGroup(8)),
        "float8": Float8WeightOnlyConfig(),
        "float8 of the whole": Float8WeightOnlyConfig(granularity=PerTensor()),
    }[config]
    torch.manual_seed(0)
    folder, out = tmp_path / "packed", tmp_path / "out"
    model = torch.nn.Sequential(torch.nn.Linear(40, 24, bias=False).bfloat16())
    quantize_(model, made)
    tensors, header = flatten_tensor_state_dict(model.state_dict())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata=header)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    ckptkit.consolidate(folder, out, dtype="bfloat16")
    written = load_file(out / "model.safetensors")
    assert set(written) == {"0.weight"}
    packed: Any = model[0].weight
    assert_same_bits(written["0.weight"], packed.dequantize())


def test_a_tensor_of_torchao_that_its_header_does_not_describe_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(40, 24, bias=False).bfloat16())
    quantize_(model, Int8WeightOnlyConfig())
    tensors, header = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    assert "does not say how '0._weight_qdata' is packed" in refusal(folder)
    kind = {"0.weight": header["0.weight"].replace("Int8Tensor", "Int4Tensor")}
    save_file(tensors, folder / "model.safetensors", metadata={**header, **kind})
    assert "has 'Int4Tensor' for '0.weight'" in refusal(folder)


# --- where else packed weights are ---


def test_experts_that_one_tensor_holds_have_blocks_of_their_own(tmp_path: Path) -> None:
    folder, out = tmp_path / "packed", tmp_path / "out"
    folder.mkdir()
    torch.manual_seed(0)
    packed = [quantize_float8(torch.randn(20, 36), 8, 16) for _ in range(3)]
    weight, scale = (torch.stack(parts) for parts in zip(*packed, strict=True))
    tensors = {"experts.gate_up_proj": weight, "experts.gate_up_proj_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    options = {**FP8, "weight_block_size": [8, 16]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    ckptkit.consolidate(folder, out, dtype="bfloat16")
    made = load_file(out / "model.safetensors")
    whole = scale.repeat_interleave(8, 1).repeat_interleave(16, 2)[:, :20, :36]
    assert_same_bits(made["experts.gate_up_proj"], (weight.float() * whole).bfloat16())


def test_what_modelopt_says_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    folder, out = tmp_path / "packed", tmp_path / "out"
    expected, _ = save_case("modelopt", "nvfp4", folder)
    (folder / "config.json").unlink()
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    ckptkit.consolidate(folder, out, dtype="bfloat16")
    assert_same_bits(load_file(out / "model.safetensors")["layer.weight"], expected)
    assert not (out / "hf_quant_config.json").exists()


def test_a_packed_base_completes_an_output_unpacked(tmp_path: Path) -> None:
    base, trained, out = tmp_path / "base", tmp_path / "trained", tmp_path / "out"
    tensors = save_packed(base, pack_blocks(16, 16), {**FP8, "weight_block_size": [16, 16]})
    trained.mkdir()
    own = {name: t + 1 for name, t in tensors.items() if "norm" in name or "embed" in name}
    save_file(own, trained / "model.safetensors")
    ckptkit.consolidate(trained, out, base=base, fill_from_base=True, dtype="bfloat16")
    made = load_file(out / "model.safetensors")
    scale = tensors[f"{PROJECTION}_scale_inv"]
    assert_same_bits(made[PROJECTION], dequantize(tensors[PROJECTION], scale, torch.bfloat16))
    assert torch.equal(made["model.norm.weight"], own["model.norm.weight"])


def test_packed_shards_are_refused(tmp_path: Path) -> None:
    """As torch saves them; each rank counted its blocks from its own first row, or did not."""
    folder = tmp_path / "packed"
    folder.mkdir()
    numbers, scale = quantize_float8(torch.randn(48, 32), 16, 16)
    for rank, (rows, blocks) in enumerate(
        [(slice(0, 24), slice(0, 2)), (slice(24, 48), slice(2, 3))], 1
    ):
        held = {"q.weight": numbers[rows].clone(), "q.weight_scale_inv": scale[blocks].clone()}
        places = {
            "q.weight": {"saved_offsets": [rows.start, 0]},
            "q.weight_scale_inv": {"saved_offsets": [blocks.start, 0]},
        }
        header = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        save_file(held, folder / f"shard-0000{rank}-model-00001-of-00001.safetensors", header)
    options = {**FP8, "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    assert "'q.weight' is packed and split over 2 pieces" in refusal(folder)


@pytest.mark.parametrize(
    ("library", "name", "options", "said"),
    [
        ("gptqmodel", "gptq_4_32", {"group_size": 64}, "has shape (3, 64), expected (2, 64)"),
        ("gptqmodel", "gptq_4_32", {"bits": 8}, "has shape (3, 64), expected (2, 64)"),
        ("gptqmodel", "gptq_4_32", {"bits": 3}, "has numbers of 3 bits"),
        ("gptqmodel", "gptq_4_32", {"checkpoint_format": "marlin"}, "has 'marlin'"),
        ("autoawq", "gemm", {"version": "gemv"}, "has 'gemv'"),
        ("autoawq", "gemm", {"group_size": 36}, "which blocks of 36 do not divide"),
        ("modelopt", "nvfp4", {"quant_algo": "FP8"}, "has 'FP8' for 'layer.weight'"),
        ("modelopt", "fp8", {"quant_algo": "FP8_PB_WO"}, "has 'FP8_PB_WO' for 'layer.weight'"),
        ("compressed-tensors", "int4_group", {"format": "marlin-24"}, "has 'marlin-24'"),
        ("compressed-tensors", "int4_group", {"config_groups": {}}, "has 'nothing' for"),
        (
            *("compressed-tensors", "int4_group"),
            {"transform_config": {"config_groups": {"u": {}}}},
            "has 'a transform_config'",
        ),
        (
            *("compressed-tensors", "int4_channel"),
            {"config_groups": {"g": {"weights": {"num_bits": 4, "symmetric": False}}}},
            "has 'symmetric: false, without a zero point' for 'layer.weight'",
        ),
    ],
)
def test_what_is_packed_in_another_way_than_the_configuration_says_is_refused(
    tmp_path: Path, library: str, name: str, options: Mapping[str, Any], said: str
) -> None:
    folder = tmp_path / "packed"
    save_case(library, name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= options
    (folder / "config.json").write_text(json.dumps(config))
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("library", "name", "changed", "said"),
    [
        (
            "gptqmodel",
            "gptq_8_shuffled",
            {"g_idx": 3},
            "'layer.g_idx' names block 3, and there are 3",
        ),
        ("gptqmodel", "gptq_4_32", {"qzeros": None}, "'layer.qzeros' is missing"),
        ("modelopt", "nvfp4", {"weight_scale_2": torch.zeros(())}, "has the scale 0 at"),
        ("modelopt", "nvfp4", {"weight_scale_2": None}, "'layer.weight_scale_2' is missing"),
        ("modelopt", "fp8", {"pre_quant_scale": torch.ones(40)}, "'layer.pre_quant_scale' belongs"),
        (
            "compressed-tensors",
            "int4_channel",
            {"weight_shape": None},
            "'layer.weight_shape' is missing",
        ),
        (
            *("compressed-tensors", "int4_channel"),
            {"weight_shape": torch.tensor([9, 37])},
            "'layer.weight_shape' says (9, 37)",
        ),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    tmp_path: Path, library: str, name: str, changed: Mapping[str, Any], said: str
) -> None:
    folder = tmp_path / "packed"
    save_case(library, name, folder)
    held = load_file(folder / "model.safetensors")
    for part, value in changed.items():
        key = f"layer.{part}"
        if value is None:
            del held[key]
        elif isinstance(value, int):
            held[key][-1] = value
        else:
            held[key] = value
    save_file(held, folder / "model.safetensors")
    assert said in refusal(folder)


def test_inspect_names_how_weights_are_packed(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    save_packed(folder, pack_blocks(16, 16), {**FP8, "weight_block_size": [16, 16]})
    assert ckptkit.inspect(folder).packing == {"fine-grained FP8": 14}
    change(folder, weight_scale_inv=None)
    report = ckptkit.inspect(folder)
    assert not report.packing
    assert any(f"{PROJECTION}_scale_inv' is missing" in note for note in report.notes)


# --- bad input, of each family of schemes ---

SCALES = (
    *("weight_scale", "scales", "weight_scale_inv", "weight_scales", "_weight_scale"),
    "weight_global_scale",
    "weight_scale_2",
)


def hold_case(library: str, name: str) -> tuple[Tensors, dict[str, Any], dict[str, str]]:
    """Returns the tensors of a packed weight, what the configuration says, and a header."""
    if library == "transformers":
        numbers, scale = quantize_float8(torch.randn(48, 32), 16, 16)
        if name == "fp8":
            options = {**FP8, "weight_block_size": [16, 16]}
            return {"weight": numbers, "weight_scale_inv": scale}, options, {}
        blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
        scales = torch.full((2, 6, 3), 120, dtype=torch.uint8)
        options = {"quant_method": "mxfp4"}
        return {"weight_blocks": blocks, "weight_scales": scales}, options, {}
    if library == "torchao":
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(40, 24, bias=False).bfloat16()})
        quantize_(model, Int8WeightOnlyConfig())
        tensors, header = flatten_tensor_state_dict(model.state_dict())
        own = {key.removeprefix("layer."): value for key, value in tensors.items()}
        return own, {"quant_method": "torchao"}, header
    configs, tensors = read_cases(library)
    own = {
        key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")
    }
    own = {part: value for part, value in own.items() if not part.startswith("unpacked")}
    return own, configs[name], {}


FAMILIES = [
    *(("transformers", "fp8"), ("transformers", "mxfp4"), ("torchao", "int8")),
    *(("modelopt", "fp8"), ("modelopt", "nvfp4"), ("gptqmodel", "gptq_4_32"), ("autoawq", "gemm")),
    *(("compressed-tensors", name) for name in ("float_block", "int_channel", "int4_group")),
    *(("compressed-tensors", name) for name in ("nvfp4", "mxfp4", "mxfp8")),
    ("compressed-tensors-0.12", "int4_shuffled"),
]


@pytest.mark.parametrize("damage", ["missing", "longer", "zero", "nan", "inf", "left over"])
@pytest.mark.parametrize(("library", "name"), FAMILIES)
def test_scales_that_fit_no_numbers_are_refused_in_each_family(
    tmp_path: Path, library: str, name: str, damage: str
) -> None:
    own, options, header = hold_case(library, name)
    for scale in own.keys() & set(SCALES):
        folder = tmp_path / f"packed {scale}" / "model"
        folder.mkdir(parents=True)
        held, value = dict(own), own[scale].clone()
        packed = next(
            part for part in own if part.endswith(("weight", "_packed", "_blocks", "data"))
        )
        if damage == "missing":
            del held[scale]
        elif damage == "left over":
            del held[packed]
        elif damage == "longer":
            held[scale] = torch.cat([value.reshape(-1, *value.shape[1:])] * 3)
        elif value.dtype == torch.uint8:  # powers of two have one value that is no number
            held[scale] = torch.full_like(value, 255)
        else:
            number = {"zero": 0.0, "nan": torch.nan, "inf": torch.inf}[damage]
            if value.dtype == FLOAT8 and damage == "inf":
                number = torch.nan  # the type has no infinity
            held[scale] = torch.full(value.shape, number).to(value.dtype)
        tensors = {f"layer.{part}": value for part, value in held.items()}
        save_file(tensors, folder / "model.safetensors", metadata=header or None)
        (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
        said = refusal(folder)
        assert "tensor 'layer." in said
        expected = {
            "missing": ("is missing", "belongs to a packed weight"),
            "left over": ("belongs to a packed weight", "is missing"),
            "longer": ("has shape", "has more than one element"),
        }
        assert any(part in said for part in expected.get(damage, ("has the scale",)))


@pytest.mark.parametrize(("library", "name"), FAMILIES)
def test_packed_shards_are_refused_in_each_family(tmp_path: Path, library: str, name: str) -> None:
    own, options, header = hold_case(library, name)
    folder = tmp_path / "packed"
    folder.mkdir()
    for rank in range(2):
        held, places = {}, {}
        for part, value in own.items():
            half = len(value) // 2 if value.dim() else 0
            if half:
                rows = slice(0, half) if rank == 0 else slice(half, None)
                held[f"layer.{part}"] = value[rows].clone()
                places[f"layer.{part}"] = {"saved_offsets": [rank * half] + [0] * (value.dim() - 1)}
            elif rank == 0:
                held[f"layer.{part}"] = value
                places[f"layer.{part}"] = {"saved_offsets": [0] * value.dim()}
        said = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        path = folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file(held, path, {**header, **said})
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    assert "is packed and split over 2 pieces" in refusal(folder)


@pytest.mark.parametrize(
    "method", ["fp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq", "torchao"]
)
@pytest.mark.parametrize(("library", "name"), FAMILIES)
def test_a_configuration_of_another_method_is_refused_in_each_family(
    tmp_path: Path, library: str, name: str, method: str
) -> None:
    own, options, header = hold_case(library, name)
    if options["quant_method"] == method:
        return
    folder = tmp_path / "packed"
    folder.mkdir()
    tensors = {f"layer.{part}": value for part, value in own.items()}
    tensors["norm.weight"] = torch.ones(4)  # which --dtype changes
    save_file(tensors, folder / "model.safetensors", metadata=header or None)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    said: dict[str, dict[str, Any]] = {
        "fp8": {"weight_block_size": [16, 16]},
        "gptq": {"bits": 4, "group_size": 32},
        "awq": {"bits": 4, "group_size": 32},
        "modelopt": {"quant_algo": "FP8"},
        "compressed-tensors": {
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": weights}},
        },
    }
    other = {"quant_method": method, **said.get(method, {})}
    (folder / "config.json").write_text(json.dumps({"quantization_config": other}))
    found = refusal(folder)
    assert "tensor 'layer." in found or f"has a 'quantization_config' of {method!r}" in found
