"""Models that Transformers saved with bitsandbytes' weights, unpacked with `--dtype`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.reports.folders import change_quantization, notes_of

pytestmark = [
    pytest.mark.xdist_group("unpacking_bitsandbytes"),
    pytest.mark.filterwarnings("ignore"),
]
Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
KINDS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 with double quantization": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4 stored as bfloat16": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "8 bits": BitsAndBytesConfig(load_in_8bit=True),
}
TITLES = {kind: f"bitsandbytes, {8 if kind == '8 bits' else 4} bits" for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Keeps bitsandbytes from compiling what these tests call once."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, and one of each kind that Transformers packed and saved."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=64,
        intermediate_size=72,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        up = model.get_parameter(UP)
        up[:3] = 0  # whole blocks and rows
    model.save_pretrained(folder / "plain")
    for kind, quantization in KINDS.items():
        load(folder / "plain", quantization_config=quantization).save_pretrained(folder / kind)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **options})


def edit(models: Path, kind: str, home: Path, **tensors: torch.Tensor | None) -> Path:
    """Copies a model with other tensors of `UP`, by the ends of their names; None for absent."""
    folder = home / "packed"
    shutil.copytree(models / kind, folder)
    held = load_file(folder / "model.safetensors")
    for ending, value in tensors.items():
        name = UP.removesuffix("weight") + ending
        held.pop(name, None)
        if value is not None:
            held[name] = value
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path, **options: Any) -> str:
    """Returns why a model is not unpacked; nothing is written."""
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(folder, folder.parent / "refused", **{"dtype": "bfloat16", **options})
    assert not (folder.parent / "refused").exists()
    return f"{caught.value}\n{caught.value.hint}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_unpacked_as_transformers_does(
    models: Path, kind: str, dtype: str, tmp_path: Path
) -> None:
    ckptkit.consolidate(models / kind, tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = getattr(torch, dtype)
    truth = load(models / kind).dequantize(dtype=wanted)
    for parameter in truth.parameters():
        parameter.data = parameter.data.to(wanted)
    expected = truth.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == wanted
        # Adding zero drops the sign that its kernel for this processor gives fp4's second zero.
        own = expected[name] + 0
        assert torch.equal(value.view(torch.uint8), own.view(torch.uint8))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == dtype
    tokens = torch.arange(20)[None]
    logits = load(tmp_path / "out")(tokens).logits
    assert torch.equal(logits, truth(tokens).logits)
    # bitsandbytes rounds inputs too, in 8 bits.
    assert torch.allclose(logits.float(), load(models / kind)(tokens).logits.float(), atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_see_through_it(models: Path, kind: str, tmp_path: Path) -> None:
    packed = models / kind
    assert ckptkit.inspect(packed).packing == {TITLES[kind]: 7}
    notes = notes_of(ckptkit.consolidate, packed, tmp_path / "wide", dtype="float32")
    assert f"7 weights unpacked: {TITLES[kind]}" in notes
    assert ckptkit.diff(packed, tmp_path / "wide", numeric=True, unpacked=True).same
    expected = {one.name: one.norm for one in ckptkit.stats(tmp_path / "wide").tensors}
    assert expected == {one.name: one.norm for one in ckptkit.stats(packed, unpacked=True).tensors}


def test_it_can_be_packed_in_another_form(models: Path, tmp_path: Path) -> None:
    packed = models / "nf4"
    ckptkit.consolidate(packed, tmp_path / "plain", dtype="bfloat16")
    ckptkit.consolidate(tmp_path / "plain", tmp_path / "expected", dtype="int8-channel")
    ckptkit.consolidate(packed, tmp_path / "found", dtype="int8-channel")
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("found", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert "cannot be packed as it is there (bitsandbytes, 4 bits)" in refusal(
        tmp_path / "plain", dtype="keep", like=packed
    )


def test_configurations_of_older_releases_name_no_method(models: Path, tmp_path: Path) -> None:
    folder = edit(models, "8 bits", tmp_path)
    path = folder / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"] = {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    path.write_text(json.dumps(document))
    ckptkit.consolidate(folder, tmp_path / "out", dtype="bfloat16")
    ckptkit.consolidate(models / "8 bits", tmp_path / "expected", dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert torch.equal(found[UP], expected[UP])


STATE = "quant_state.bitsandbytes__nf4"
NESTED, EIGHT = "nf4 with double quantization", "8 bits"
BYTES = torch.zeros(72, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "ending", "value", "told"),
    [
        ("nf4", "weight.absmax", None, f"'{UP}.absmax' is missing"),
        ("nf4", f"weight.{STATE}", None, f"'{UP}.{STATE}' is missing"),
        ("nf4", "weight", None, f"'{UP}.absmax' belongs to a packed weight"),
        ("nf4", "weight", torch.zeros(72, 128, dtype=torch.uint8), "has 9,216 bytes, but its"),
        ("nf4", "weight.absmax", torch.ones(71), "71 elements, expected 72"),
        ("nf4", "weight.absmax", torch.ones(1, 72), "saved after a forward on a CPU"),
        ("nf4", "weight.absmax", torch.full((72,), torch.nan), "has the scale nan in block 0"),
        ("nf4", "weight.absmax", torch.full((72,), torch.inf), "has the scale inf in block 0"),
        ("nf4", "weight.absmax", BYTES, "uint8, expected scales as floating numbers"),
        (NESTED, "weight.nested_absmax", None, "'nested_absmax' was not stored with it"),
        (NESTED, "weight.nested_quant_map", torch.ones(16), "16 elements, expected 256"),
        (NESTED, "weight.nested_absmax", torch.tensor([torch.inf]), "has the scale"),
        (NESTED, "weight.absmax", torch.ones(72), "float32, expected scales as bytes"),
        (EIGHT, "SCB", None, "up_proj.SCB' is missing"),
        (EIGHT, "SCB", torch.ones(71), "71 elements, expected 72"),
        (EIGHT, "SCB", torch.full((72,), torch.nan), "has the scale nan in block 0"),
        (EIGHT, "SCB", BYTES, "uint8, expected scales as floating numbers"),
        (EIGHT, "weight", None, "up_proj.SCB' belongs to a packed weight"),
        (EIGHT, "weight", torch.zeros(72, dtype=torch.int8), "shape (72,), expected a matrix"),
        (EIGHT, "weight_format", torch.ones((), dtype=torch.uint8), "weight_format' is not 0"),
    ],
)
def test_numbers_without_a_meaning_are_refused(
    models: Path, kind: str, ending: str, value: torch.Tensor | None, told: str, tmp_path: Path
) -> None:
    folder = edit(models, kind, tmp_path, **{ending: value})
    assert told in refusal(folder)


@pytest.mark.parametrize("kind", ["nf4", EIGHT])
def test_a_configuration_of_another_size_is_refused(
    models: Path, kind: str, tmp_path: Path
) -> None:
    folder = edit(models, kind, tmp_path)
    change_quantization(folder, load_in_4bit=kind == EIGHT, load_in_8bit=kind != EIGHT)
    told = refusal(folder)
    assert f"has 'load_in_{4 if kind == EIGHT else 8}bit' for" in told
    assert f"whose tensors are those of {TITLES[kind]}" in told


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("nf4", "bnb_4bit_quant_type", "xyz", "'nf4'"),
        ("nf4", "bnb_4bit_quant_type", "fp4", "'nf4'"),
        ("nf4", "bnb_4bit_quant_type", ["nf4"], "'nf4'"),
        ("nf4", "bnb_4bit_quant_storage", "bfloat16", "'uint8'"),
        ("fp4 stored as bfloat16", "bnb_4bit_quant_storage", "uint8", "'bfloat16'"),
        ("nf4", "bnb_4bit_use_double_quant", True, "False"),
        (NESTED, "bnb_4bit_use_double_quant", "no", "True"),
        ("nf4", "load_in_4bit", "true", "True"),
        ("nf4", "load_in_8bit", True, "False"),
        (EIGHT, "load_in_8bit", 2, "True"),
    ],
)
def test_a_configuration_of_other_values_is_refused(
    models: Path, kind: str, key: str, value: Any, expected: str, tmp_path: Path
) -> None:
    folder = edit(models, kind, tmp_path)
    change_quantization(folder, **{key: value})
    told = refusal(folder)
    assert f"has {value!r} for {key!r}, expected {expected}: 'model.layers.0" in told
    change_quantization(folder, **{key: None if key.startswith("bnb") else expected == "True"})
    ckptkit.consolidate(folder, tmp_path / "out", dtype="bfloat16")
    published: dict[str, Any] = {"config": models / kind, "dtype": "bfloat16"}
    change_quantization(folder, **{key: value})
    ckptkit.consolidate(folder, tmp_path / "again", **published)
    assert ckptkit.diff(tmp_path / "out", tmp_path / "again").same


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("nf4", "quant_type", "xyz"),
        ("nf4", "blocksize", 48),
        ("nf4", "blocksize", True),
        ("nf4", "dtype", "float64"),
        (NESTED, "nested_blocksize", 100),
        (NESTED, "nested_blocksize", 1 << 40),
    ],
)
def test_a_state_of_other_values_is_refused(
    models: Path, kind: str, key: str, value: Any, tmp_path: Path
) -> None:
    state = load_file(models / kind / "model.safetensors")[f"{UP}.{STATE}"]
    document = {**json.loads(bytes(state.tolist())), key: value}
    changed = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)
    folder = edit(models, kind, tmp_path, **{f"weight.{STATE}": changed})
    told = refusal(folder)
    assert f"tensor '{UP}.{STATE}': has {value!r} for {key!r}, expected one of" in told


@pytest.mark.parametrize("kind", ["nf4", EIGHT])
def test_layers_that_were_turned_over_before_are_refused(kind: str, tmp_path: Path) -> None:
    """Transformers packs GPT-2's with their outputs in rows, and loads none that are plain so."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=41, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=KINDS[kind])
    home = tmp_path / "home"
    model.save_pretrained(home / "packed")
    assert "was turned over before it was packed" in refusal(home / "packed")


def test_a_merge_still_compares_such_a_base_with_the_original(models: Path, tmp_path: Path) -> None:
    """It takes them itself, whatever `--dtype` says."""
    packed = models / "nf4"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {
        f"base_model.model.{UP.removesuffix('.weight')}.lora_{part}.weight": torch.zeros(shape)
        for part, shape in {"A": (2, 64), "B": (72, 2)}.items()
    }
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    options = "--dtype", "bfloat16", "--allow-untrained"
    done = run_command("adapter", "merge", adapter, out, "--base", packed, *options)
    assert done.returncode == 0, done.stderr
    assert "7 packed weights (nf4 in blocks of 64 of bfloat16) are dequantized" in done.stderr
    ckptkit.consolidate(packed, tmp_path / "unpacked", dtype="bfloat16")
    expected = load_file(tmp_path / "unpacked" / "model.safetensors")
    for name, value in load_file(out / "model.safetensors").items():
        assert torch.equal(value, expected[name])
