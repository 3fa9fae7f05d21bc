"""Models that `--dtype` packs: the bits are those that the owner of the format rounds to."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import Key, Span
from ckptkit.engine.packing import PackingKernel
from ckptkit.engine.reader import TensorReader
from ckptkit.options import PackedForm
from ckptkit.plan.packed_forms import FORMS
from ckptkit.plan.plan import Reading
from tests.command_line import run_command
from tests.reports.folders import notes_of

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of what they replace
Tensors = dict[str, torch.Tensor]
FIXTURE = (
    Path(__file__).resolve().parents[2] / "fixtures/packed_weights/compressed-tensors.safetensors"
)
CHOICES = get_args(PackedForm)
PROJECTION = "model.layers.0.mlp.up_proj.weight"


def save_model(folder: Path, *, tied: bool = False, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"hidden_size": 256, "intermediate_size": 384, **sizes},
        vocab_size=41,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def change(folder: Path, name: str, value: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: value}, path, metadata={"format": "pt"})


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def pack(folder: Path, dtype: str, **options: Any) -> tuple[Tensors, dict[str, Any]]:
    """Returns the packed tensors, and what the configuration says of them."""
    out = folder.parent / f"{folder.name}-{dtype}"
    ckptkit.consolidate(folder, out, dtype=dtype, **options)
    assert ckptkit.verify(out).ok
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    return load_file(out / "model.safetensors"), config["quantization_config"]


def refusal(folder: Path, dtype: str, **options: Any) -> str:
    """Returns why a model is not packed; nothing is written."""
    out = folder.parent / "refused"
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(folder, out, dtype=dtype, **options)
    assert not out.exists()
    return f"{caught.value}\n{caught.value.hint}"


def quantize(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what Transformers' own rounding makes of whole blocks."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    made = Fp8Quantize(quantizer)._quantize_one("weight", value)
    return made["weight"], made["weight_scale_inv"]


def test_each_choice_of_the_command_has_a_form() -> None:
    assert tuple(FORMS) == CHOICES


def test_fp8_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_model(tmp_path / "plain")
    tensors, said = pack(tmp_path / "plain", "fp8-block")
    assert said == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    packed = 0
    for name, value in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            assert_same_bits(tensors[name], value)
            continue
        numbers, scale = quantize(value)
        assert_same_bits(tensors[name], numbers)
        assert_same_bits(tensors[f"{name}_scale_inv"], scale)
        packed += 1
    assert len(tensors) == len(model.state_dict()) + packed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain-fp8-block", dtype="auto")
    ckptkit.consolidate(tmp_path / "plain-fp8-block", tmp_path / "again", dtype="bfloat16")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, again(tokens).logits)
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=0.1)


def test_fp8_blocks_may_end_short(tmp_path: Path) -> None:
    """As DeepSeek publishes them: the last blocks are rounded as if zeros followed."""
    model = save_model(tmp_path / "plain", intermediate_size=300)
    given = model.state_dict()[PROJECTION]
    tensors, _ = pack(tmp_path / "plain", "fp8-block")
    padded = torch.nn.functional.pad(given, (0, -given.shape[1] % 128, 0, -given.shape[0] % 128))
    numbers, scale = quantize(padded)
    assert_same_bits(tensors[PROJECTION], numbers[: given.shape[0], : given.shape[1]])
    assert_same_bits(tensors[f"{PROJECTION}_scale_inv"], scale)
    notes = notes_of(ckptkit.consolidate, tmp_path / "plain", tmp_path / "noted", dtype="fp8-block")
    assert any("end short in 6 weights, such as" in note for note in notes)


def test_blocks_of_zeros_and_of_tiny_numbers_have_a_scale(tmp_path: Path) -> None:
    """Transformers stores 448 with a scale of 0 for the tiny ones, which stands for 0 as well."""
    save_model(tmp_path / "plain")
    given = torch.zeros(384, 256, dtype=torch.bfloat16)
    given[:128, :128] = 1e-38
    given[200:, :] = torch.randn(184, 256).bfloat16() * 1e30
    change(tmp_path / "plain", PROJECTION, given)
    tensors, _ = pack(tmp_path / "plain", "fp8-block")
    numbers, scale = quantize(given)
    own, found = tensors[PROJECTION], tensors[f"{PROJECTION}_scale_inv"]
    assert_same_bits(own[128:], numbers[128:])
    assert_same_bits(found[1:], scale[1:])
    assert found[0].tolist() == [1, 1]
    assert not own[:128].float().any()


@pytest.mark.parametrize("choice", CHOICES)
def test_numbers_that_would_be_infinite_are_refused(tmp_path: Path, choice: str) -> None:
    """compressed-tensors 0.20.1 packs some as infinity and others as zeros, without an error."""
    save_model(tmp_path / "large")
    most = torch.finfo(torch.bfloat16).max
    given = torch.zeros(384, 256, dtype=torch.bfloat16)
    given[7, 3], given[200, 255] = 2.5e38, -2.5e38
    change(tmp_path / "large", PROJECTION, given)
    pack(tmp_path / "large", choice)
    ckptkit.consolidate(tmp_path / f"large-{choice}", tmp_path / "again", dtype="bfloat16")
    again = load_file(tmp_path / "again" / "model.safetensors")[PROJECTION]
    assert torch.allclose(again, given, rtol=0.1, atol=0)
    save_model(tmp_path / "largest")
    given[200, 255] = -most
    change(tmp_path / "largest", PROJECTION, given)
    if choice == "fp8-block":  # its scales are exact enough
        tensors, _ = pack(tmp_path / "largest", choice)
        numbers, scale = quantize(given)
        assert_same_bits(tensors[PROJECTION], numbers)
        assert_same_bits(tensors[f"{PROJECTION}_scale_inv"], scale)
        return
    said = refusal(tmp_path / "largest", choice)
    assert f"'{PROJECTION}'" in said
    assert "magnitude 3.38953e+38 is too large to be packed" in said


def test_large_weights_are_packed_block_by_block_as_at_once(tmp_path: Path) -> None:
    """Tensors of more than a leaf of digests, whose blocks begin within rows of blocks."""
    torch.manual_seed(0)
    folder = tmp_path / "plain"
    folder.mkdir()
    given = torch.randn(2700, 3328).bfloat16()
    save_file(
        {"a.weight": given, "b.weight": given[:, :128].contiguous()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text('{"model_type": "made_up", "dtype": "bfloat16"}')
    tensors, _ = pack(folder, "fp8-block")
    padded = torch.nn.functional.pad(given, (0, 0, 0, -len(given) % 128))
    numbers, scale = quantize(padded)
    assert_same_bits(tensors["a.weight"], numbers[: len(given)])
    assert_same_bits(tensors["a.weight_scale_inv"], scale)
    for number in range(3):
        options = "--dtype", "fp8-block", "--slice", f"{number}/3"
        assert run_command("consolidate", folder, tmp_path / "sliced", *options).returncode == 0
    for name, value in load_file(tmp_path / "sliced" / "model.safetensors").items():
        assert_same_bits(value, tensors[name])


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "fp8-block"])
def test_weights_are_packed_as_compressed_tensors_does(tmp_path: Path, choice: str) -> None:
    held = load_file(FIXTURE)
    own = {k.removeprefix(f"{choice}/"): v for k, v in held.items() if k.startswith(f"{choice}/")}
    given = own.pop("given")
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({"a.weight": given, "norm.weight": given[0].clone()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "made_up", "dtype": "bfloat16"}')
    tensors, said = pack(folder, choice)
    assert set(tensors) == {"norm.weight", *(f"a.{name}" for name in own)}
    for name, value in own.items():
        assert_same_bits(tensors[f"a.{name}"], value)
    with safe_open(FIXTURE, "pt") as file:
        preset = json.loads(file.metadata()["configs"])[choice]
    (group,) = said["config_groups"].values()
    assert said["quant_method"] == "compressed-tensors"
    assert said["format"] == group["format"]
    for part in ("weights", "input_activations"):
        for key, value in (group[part] or {}).items():
            assert preset[part][key] == value


@pytest.mark.parametrize("choice", CHOICES)
def test_commands_say_how_weights_were_packed(choice: str, tmp_path: Path) -> None:
    save_model(tmp_path / "plain")
    packed = run_command("consolidate", tmp_path / "plain", tmp_path / "out", "--dtype", choice)
    assert "note: 14 weights packed: " in packed.stderr
    plain = run_command("consolidate", tmp_path / "out", tmp_path / "again", "--dtype", "bfloat16")
    assert "note: 14 weights unpacked: " in plain.stderr


@pytest.mark.parametrize("choice", CHOICES)
def test_packed_models_are_unpacked_again(tmp_path: Path, choice: str) -> None:
    model = save_model(tmp_path / "plain", hidden_size=512, intermediate_size=640)
    pack(tmp_path / "plain", choice)
    ckptkit.consolidate(tmp_path / f"plain-{choice}", tmp_path / "again", dtype="float32")
    again = load_file(tmp_path / "again" / "model.safetensors")
    given = model.state_dict()
    assert set(again) == set(given)
    most = {"int4-group": 0.08, "int8-channel": 0.006, "nvfp4": 0.2, "mxfp4": 0.3}.get(choice, 0.07)
    for name, value in again.items():
        distance = (value - given[name].float()).abs().max() / given[name].float().abs().max()
        assert distance <= (most if name.endswith("_proj.weight") else 0)


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "fp8-block"])
def test_packed_models_are_loaded_by_transformers(tmp_path: Path, choice: str) -> None:
    """The tensors are those of compressed-tensors, and so is what it makes of them."""
    model = save_model(tmp_path / "plain", hidden_size=512, intermediate_size=640)
    pack(tmp_path / "plain", choice)
    ckptkit.consolidate(tmp_path / f"plain-{choice}", tmp_path / "again", dtype="bfloat16")
    tokens = torch.arange(20)[None]
    loaded, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")(tokens).logits
        for name in (f"plain-{choice}", "again")
    )
    # Those of channels round activations while they run.
    assert torch.allclose(loaded, again, atol=0.2 if choice.endswith("channel") else 0)
    assert torch.allclose(loaded, model(tokens).logits, atol=0.6)


PRESETS = {
    "fp8-channel": "FP8_DYNAMIC",
    "int8-channel": "W8A8",
    "int4-group": "W4A16",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}


def save_as_the_library_does(plain: Path, choice: str, folder: Path) -> None:
    """Packs a model with the library of a form, which rounds and writes everything itself."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    if choice == "fp8-block":  # Transformers packs none on a CPU but with its own operation
        model.save_pretrained(folder)
        tensors: Tensors = {}
        for name, value in model.state_dict().items():
            tensors[name] = value
            if name.endswith("_proj.weight"):
                tensors[name], tensors[f"{name}_scale_inv"] = quantize(value)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = FineGrainedFP8Config().to_dict()
        config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
        (folder / "config.json").write_text(json.dumps(config))
        return
    form = FORMS[choice].calls
    scheme = preset_name_to_scheme(PRESETS[choice], ["Linear"])
    groups = {"group_0": scheme}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=form)
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        args, value = module.quantization_scheme.weights, module.weight.data
        blocks = value.reshape(len(value), -1, args.group_size or value.shape[1])
        whole = {}
        if args.strategy == "tensor_group":
            whole["global_scale"] = generate_gparam(value.amin(), value.amax())
            module.weight_global_scale.data = whole["global_scale"].reshape(1)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **whole)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).bfloat16()
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize("choice", CHOICES)
def test_packed_models_compute_what_those_of_the_library_do(tmp_path: Path, choice: str) -> None:
    save_model(tmp_path / "plain")
    tensors, _ = pack(tmp_path / "plain", choice)
    save_as_the_library_does(tmp_path / "plain", choice, tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert tensors.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_same_bits(tensors[name], value)
    tokens = torch.arange(20)[None]
    loaded, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")(tokens).logits
        for name in (f"plain-{choice}", "theirs")
    )
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("choice", ["nvfp4", "int4-group"])
def test_models_with_other_names_in_memory_load(tmp_path: Path, choice: str) -> None:
    """Modules to leave alone had their names on disk alone, and heads were made anew."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=41,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    GPTNeoXForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    _, said = pack(tmp_path / "plain", choice)
    assert said["ignore"] == ["embed_out", "lm_head"]
    ckptkit.consolidate(tmp_path / f"plain-{choice}", tmp_path / "again", dtype="bfloat16")
    tokens = torch.arange(20)[None]
    loaded, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")(tokens).logits
        for name in (f"plain-{choice}", "again")
    )
    assert loaded.equal(again)


def save_mixtral(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=41,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize("choice", CHOICES)
def test_experts_that_transformers_reads_wrong_are_told(tmp_path: Path, choice: str) -> None:
    save_mixtral(tmp_path / "plain")
    done = run_command("consolidate", tmp_path / "plain", tmp_path / "out", "--dtype", choice)
    ckptkit.consolidate(tmp_path / "out", tmp_path / "again", dtype="bfloat16")
    tokens = torch.arange(20)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")(tokens).logits
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(tokens).logits
        is_right = torch.allclose(loaded, again, atol=0.2)
    except RuntimeError:
        is_right = False
    assert ("experts are packed: transformers" in done.stderr) != is_right


def test_routers_and_tied_heads_are_kept(tmp_path: Path) -> None:
    save_model(tmp_path / "tied", tied=True)
    tensors, said = pack(tmp_path / "tied", "fp8-block")
    assert said["modules_to_not_convert"] == ["lm_head"]
    assert "lm_head.weight" not in tensors
    save_mixtral(tmp_path / "routed")
    tensors, said = pack(tmp_path / "routed", "fp8-block")
    (gate,) = (name for name in tensors if name.endswith(".gate.weight"))
    assert tensors[gate].dtype == torch.bfloat16
    assert said["modules_to_not_convert"] == ["lm_head", gate.removesuffix(".weight")]
    experts = [n for n in tensors if ".experts." in n and n.endswith(".weight")]
    assert len(experts) == 6
    assert {tensors[name].dtype for name in experts} == {torch.float8_e4m3fn}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "routed-fp8-block", dtype="auto")
    ckptkit.consolidate(tmp_path / "routed-fp8-block", tmp_path / "again", dtype="bfloat16")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, again(tokens).logits)


def test_the_one_scale_of_a_weight_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its numbers, the scales of its blocks, and itself; several threads ask for it."""
    save_model(tmp_path / "plain")
    found, find = [], PackingKernel.find_total

    def note(kernel: PackingKernel, reading: Reading) -> float:
        found.append(kernel.weight.name)
        return find(kernel, reading)

    monkeypatch.setattr(PackingKernel, "find_total", note)
    pack(tmp_path / "plain", "nvfp4")
    assert len(found) == len(set(found)) == 14


def test_what_keep_dtype_names_is_not_packed(tmp_path: Path) -> None:
    model = save_model(tmp_path / "plain")
    tensors, said = pack(tmp_path / "plain", "int8-channel", keep_dtype=[PROJECTION])
    assert_same_bits(tensors[PROJECTION], model.state_dict()[PROJECTION])
    assert said["ignore"] == ["lm_head", PROJECTION.removesuffix(".weight")]


def run(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    logits: torch.Tensor = model(torch.arange(20)[None]).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kept", ["model.layers.0.mlp.*", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("like", [False, True])
def test_a_note_names_what_is_kept_in_types_that_the_fp8_layers_of_transformers_fail_beside(
    tmp_path: Path, dtype: torch.dtype, kept: str, like: bool
) -> None:
    save_model(tmp_path / "plain")
    save_model(tmp_path / "wide").to(dtype).save_pretrained(tmp_path / "wide")
    options: dict[str, Any] = {"dtype": "fp8-block"}
    if like:
        ckptkit.consolidate(
            tmp_path / "plain", tmp_path / "published", keep_dtype=[kept], **options
        )
        options = {"like": tmp_path / "published"}
    options["keep_dtype"] = [kept]
    notes = notes_of(ckptkit.consolidate, tmp_path / "wide", tmp_path / "out", **options)
    (note,) = [note for note in notes if "--keep-dtype keeps" in note]
    assert f"in {str(dtype).removeprefix('torch.')}, such as" in note
    assert "with --dtype bfloat16, then pack that output" in note
    with pytest.raises(RuntimeError, match="same dtype"):
        run(tmp_path / "out")
    ckptkit.consolidate(tmp_path / "wide", tmp_path / "first", dtype="bfloat16")
    notes = notes_of(ckptkit.consolidate, tmp_path / "first", tmp_path / "then", **options)
    assert not any("--keep-dtype keeps" in note for note in notes)
    assert run(tmp_path / "then").isfinite().all()


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "fp8-block"])
def test_the_other_forms_run_beside_any_type(tmp_path: Path, choice: str) -> None:
    save_model(tmp_path / "wide").float().save_pretrained(tmp_path / "wide")
    options: dict[str, Any] = {"dtype": choice, "keep_dtype": ["model.layers.0.mlp.*"]}
    notes = notes_of(ckptkit.consolidate, tmp_path / "wide", tmp_path / "out", **options)
    assert not any("--keep-dtype keeps" in note for note in notes)
    assert run(tmp_path / "out").isfinite().all()


def test_weights_of_float32_are_packed_as_those_of_bfloat16(tmp_path: Path) -> None:
    model = save_model(tmp_path / "plain")
    expected, _ = pack(tmp_path / "plain", "int4-group")
    wide = {name: value.float() for name, value in model.state_dict().items()}
    (tmp_path / "wide").mkdir()
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "wide" / "config.json").write_bytes(
        (tmp_path / "plain" / "config.json").read_bytes()
    )
    tensors, _ = pack(tmp_path / "wide", "int4-group")
    assert set(tensors) == set(expected)
    for name, value in tensors.items():
        assert_same_bits(value, expected[name])


def test_packed_weights_are_unpacked_before_they_are_packed_in_another_form(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "plain")
    pack(tmp_path / "plain", "fp8-block")
    tensors, said = pack(tmp_path / "plain-fp8-block", "int8-channel")
    ckptkit.consolidate(tmp_path / "plain-fp8-block", tmp_path / "again", dtype="bfloat16")
    expected, _ = pack(tmp_path / "again", "int8-channel")
    assert said["quant_method"] == "compressed-tensors"
    assert set(tensors) == set(expected)
    for name, value in tensors.items():
        assert_same_bits(value, expected[name])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_give_a_block_no_scale_are_refused(
    tmp_path: Path, choice: str, value: float
) -> None:
    save_model(tmp_path / "plain")
    given = torch.ones(384, 256, dtype=torch.bfloat16)
    given[300, 17] = value
    change(tmp_path / "plain", PROJECTION, given)
    said = refusal(tmp_path / "plain", choice)
    assert f"tensor '{PROJECTION}'" in said
    assert f"value {value:g} at [300, 17] gives its block no scale" in said
    assert "`ckptkit stats` counts such values" in said
    table = run_command("stats", tmp_path / "plain").stdout.splitlines()
    (row,) = (line.split() for line in table if f" {PROJECTION} " in f" {line}")
    assert row[-2:] == (["0", "1"] if value == torch.inf else ["1", "0"])


def test_groups_that_do_not_divide_are_refused_with_what_keeps_the_tensor(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", intermediate_size=300)
    said = refusal(tmp_path / "plain", "int4-group")
    assert "has 300 columns, which groups of 128 do not divide, nor those of 1 more weight" in said
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    (pattern,) = re.findall(r"--keep-dtype '(.*?)'", said)
    save_model(tmp_path / "odd", hidden_size=192, intermediate_size=320)
    assert "pass --dtype fp8-block or fp8-channel" in refusal(tmp_path / "odd", "int4-group")
    pack(tmp_path / "odd", "fp8-block")
    tensors, _ = pack(tmp_path / "plain", "int4-group", keep_dtype=[pattern])
    assert all(tensors[name].dtype == torch.bfloat16 for name in names)


def test_layers_with_inputs_in_rows_are_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=41, n_embd=128, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    assert "has its inputs in rows" in refusal(tmp_path / "plain", "fp8-block")


def test_a_model_of_nothing_but_embeddings_and_norms_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    tensors = {"wte.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "made_up"}')
    assert "has no weight of a linear layer" in refusal(tmp_path / "plain", "nvfp4")


def test_a_model_that_another_method_packs_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    assert "packed in another form" in refusal(tmp_path / "plain", "fp8-block")


def test_a_source_without_a_configuration_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").unlink()
    assert "needs the config.json of a model of Transformers" in refusal(
        tmp_path / "plain", "fp8-block"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": True}, "--optimizer"),
        ({"names": "live"}, "--names live"),
        ({"like": "."}, "--like"),
    ],
)
def test_what_packed_weights_do_not_go_with_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    save_model(tmp_path / "plain")
    assert f"cannot be combined with {said}" in refusal(tmp_path / "plain", "fp8-block", **options)


def test_an_average_is_packed_in_a_second_step(tmp_path: Path) -> None:
    save_model(tmp_path / "plain")
    save_model(tmp_path / "other")
    sources = [tmp_path / "plain", tmp_path / "other"]
    with pytest.raises(CkptkitError, match="packs weights, and an average") as caught:
        ckptkit.average(sources, tmp_path / "out", dtype="int4-group")
    assert "ckptkit consolidate" in caught.value.hint
    ckptkit.average(sources, tmp_path / "out")
    pack(tmp_path / "out", "int4-group")


@pytest.mark.parametrize("layout", ["dcp", "torch"])
def test_other_layouts_have_no_packed_weights(tmp_path: Path, layout: Any) -> None:
    save_model(tmp_path / "plain")
    with pytest.raises(CkptkitError, match=f"cannot be combined with --to {layout}"):
        ckptkit.convert(tmp_path / "plain", tmp_path / "out", to=layout, dtype="fp8-block")


# --- as a published model has it ---


def publish(folder: Path, dtype: str, **options: Any) -> Path:
    """Packs a model, some of whose projections stay as they are, and a norm in float32."""
    save_model(folder / "trained from")
    change(folder / "trained from", "model.norm.weight", torch.full((256,), 0.1))
    published = folder / "published"
    keep = ["model.layers.0.mlp.*", "model.norm.weight"]
    ckptkit.consolidate(folder / "trained from", published, dtype=dtype, keep_dtype=keep, **options)
    return published


@pytest.mark.parametrize("choice", CHOICES)
def test_a_fine_tune_is_packed_as_the_published_model_is(tmp_path: Path, choice: str) -> None:
    published = publish(tmp_path, choice, max_shard_size=500_000)
    torch.manual_seed(1)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "trained from", dtype="auto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "tuned")
    assert (
        run_command(
            *("consolidate", tmp_path / "tuned", tmp_path / "out", "--like", published)
        ).returncode
        == 0
    )
    assert ckptkit.verify(tmp_path / "out").ok
    says, does = (
        json.loads((folder / "config.json").read_text()) for folder in (published, tmp_path / "out")
    )
    assert does["quantization_config"] == says["quantization_config"]
    assert does["dtype"] == says["dtype"]
    files = sorted(file.name for file in published.glob("*.safetensors"))
    assert len(files) > 1
    ckptkit.consolidate(tmp_path / "tuned", tmp_path / "packed", dtype=choice)
    expected = load_file(tmp_path / "packed" / "model.safetensors")
    for file in files:
        found, there = load_file(tmp_path / "out" / file), load_file(published / file)
        assert set(found) == set(there)
        for name, value in found.items():
            assert (value.dtype, value.shape) == (there[name].dtype, there[name].shape)
            own = model.state_dict().get(name)
            is_kept = own is not None and own.shape == value.shape and value.dtype.itemsize > 1
            assert_same_bits(value, own.to(value.dtype) if is_kept else expected[name])


def test_what_is_packed_as_the_published_model_is_copied(tmp_path: Path) -> None:
    published = publish(tmp_path, "fp8-block")
    ckptkit.consolidate(published, tmp_path / "out", like=published)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in load_file(published / "model.safetensors").items():
        assert_same_bits(found[name], value)
    pack(tmp_path / "trained from", "int4-group")
    said = refusal_as(tmp_path / "trained from-int4-group", published)
    assert "is packed, and not as --like" in said
    assert "`ckptkit consolidate SRC OUT --dtype bfloat16`" in said
    unpacked = tmp_path / "unpacked"
    ckptkit.consolidate(tmp_path / "trained from-int4-group", unpacked, dtype="bfloat16")
    ckptkit.consolidate(unpacked, tmp_path / "again", like=published)


def refusal_as(source: Path, like: Path, **options: Any) -> str:
    """Returns why a model is not packed as another one; nothing is written."""
    out = like.parent / "refused"
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(source, out, like=like, **options)
    assert not out.exists()
    return f"{caught.value}\n{caught.value.hint}"


def test_what_cannot_be_packed_as_the_published_model_is_refused_by_name(tmp_path: Path) -> None:
    published = publish(tmp_path, "fp8-block")
    source, scale = tmp_path / "trained from", "model.layers.1.mlp.up_proj.weight_scale_inv"
    name = scale.removesuffix("_scale_inv")
    said = refusal_as(source, published, keep_dtype=[name])
    assert f"packs '{name}', which --keep-dtype keeps" in said
    assert "cannot be combined with --names live" in refusal_as(source, published, names="live")
    (published / "ckptkit.json").unlink()  # as a model that others published
    change(published, scale, torch.ones(3, 2, dtype=torch.bfloat16))
    said = refusal_as(source, published)
    assert f"weight '{name}' cannot be packed as it is there (fine-grained FP8)" in said
    change(published, scale, torch.ones(3, 2))
    change(published, "model.layers.1.mlp.up_proj.input_scale", torch.ones(1))
    assert "a scale of activations" in refusal_as(source, published)
    ckptkit.consolidate(source, tmp_path / "packed", dtype="fp8-block")


def test_a_fine_tune_of_other_sizes_is_refused(tmp_path: Path) -> None:
    published = publish(tmp_path, "fp8-block")
    save_model(tmp_path / "wider", intermediate_size=512)
    said = refusal_as(tmp_path / "wider", published)
    assert "has shape (256, 512), and there (256, 384)" in said


def places(path: Path) -> list[tuple[int, str, int]]:
    """Returns where each tensor of a file begins, with its name and the size of its elements."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load_file(path)
    return sorted(
        (said["data_offsets"][0], name, tensors[name].element_size())
        for name, said in header.items()
        if name != "__metadata__"
    )


@pytest.mark.parametrize("dtype", CHOICES)
def test_a_weight_is_read_once_for_its_numbers_and_its_scales(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "plain")
    packed = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))
    read, fill = 0, TensorReader.fill

    def count(self: TensorReader, key: Key, span: Span, target: memoryview) -> None:
        nonlocal read
        read += len(target) if key.endswith("_proj.weight") else 0
        fill(self, key, span, target)

    monkeypatch.setattr(TensorReader, "fill", count)
    out = tmp_path / "out"
    ckptkit.consolidate(tmp_path / "plain", out, dtype=dtype, workers=1)
    times = 2 if FORMS[dtype].scheme.total else 1  # all of a weight says its one scale
    assert read == 2 * packed * times
    begin = places(out / "model.safetensors")
    assert all(start % size == 0 for start, _, size in begin)
    names = [name for _, name, _ in begin]
    scale = next(name for name in names if "up_proj.weight_s" in name and "shape" not in name)
    assert PROJECTION in names[names.index(scale) - 1]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("is_named", [True, False])
def test_an_index_alone_does_not_say_how_weights_are_packed(
    tmp_path: Path, choice: str, is_named: bool
) -> None:
    """It was advised to leave scales out of the output, which would not have been packed."""
    published = publish(tmp_path, choice, max_shard_size=500_000)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(published / name, alone)
    like = alone / "model.safetensors.index.json" if is_named else alone
    said = refusal_as(tmp_path / "trained from", like)
    assert "is packed there; how, an index alone does not say" in said
    assert "pass the folder with all of its weights and its config.json" in said
    ckptkit.consolidate(tmp_path / "trained from", tmp_path / "whole", like=published)
    ckptkit.consolidate(published, tmp_path / "copied", like=like)  # as it is packed already
    files = {file.name for file in published.glob("*.safetensors")}
    for folder in ("whole", "copied"):
        assert files == {file.name for file in (tmp_path / folder).glob("*.safetensors")}
