"""Merging onto 4-bit and 8-bit bases, against bitsandbytes, PEFT and what the run computed."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import ckptkit
from ckptkit.adapters.base_model import (
    BASE,
    Alignment,
    BaseSource,
    PlacedTensor,
    make_base_tensors,
)
from ckptkit.adapters.merge import AdapterChoice, MergedModel, MergeJob, run_merge
from ckptkit.adapters.packed_bases import ModelWeights, QuantizedBase, plan_quantized
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import CkptkitError, FormatError, RefusedError, UnsupportedError
from ckptkit.core.geometry import whole_tile
from ckptkit.core.index import Fqn
from ckptkit.engine.reader import Origin
from ckptkit.hub_names.disk_tensors import HubTensor
from ckptkit.lora.changes import MergeRequest
from ckptkit.lora.dialects import rename_plainly, sort_entries
from tests.small_adapters import Tensors, assert_same

pytestmark = [
    pytest.mark.xdist_group("quantized_bases"),
    pytest.mark.filterwarnings("ignore"),
]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PREFIX = "base_model.model."
SAME_BASE = "the base is the one that the adapter was trained on, proven by"
RANK, SCALING = 4, 2.0
TARGETS = ["q_proj", "down_proj"]
PACKED_WITHOUT_LORA = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Keeps bitsandbytes from compiling what these tests call once."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def merged(
    source: Path, out: Path, *, base: Path | None = None, config: Path | None = None, **options: Any
) -> tuple[Tensors, MergedModel]:
    """Merges one adapter."""
    choice = AdapterChoice(path=source, request=AdapterRequest(config=config))
    job = MergeJob(adapters=[choice], destination=out, request=MergeRequest(**options), base=base)
    report = run_merge(job)
    return load_file(out / "model.safetensors"), report


# --- real runs ---


@pytest.mark.parametrize(
    ("case", "with_base"),
    [
        ("peft_qlora_fsdp2", True),
        ("peft_qlora_fsdp1_flat", True),
        ("peft_qlora_fsdp2_float32", True),
        ("peft_qlora_fsdp2_uint8", True),
        ("peft_qlora_fsdp2_uint8", False),
        ("peft_qdora_fsdp2_ckptkit", True),
        ("peft_qdora_fsdp2_ckptkit", False),
    ],
)
@pytest.mark.quick("peft_qdora_fsdp2_ckptkit-True", "peft_qlora_fsdp2_uint8-False")
def test_a_run_on_packed_weights_is_merged_into_what_it_trained(
    case: str, with_base: bool, tmp_path: Path
) -> None:
    home = FIXTURES / case
    config = None if case.endswith("_ckptkit") else home / "adapter_config.json"
    base = home / "base" if with_base else None
    found, report = merged(home / "checkpoint", tmp_path / "out", base=base, config=config)
    truth = load_file(home / "merged_truth.safetensors")
    if not with_base:  # then the weights keep what they were when they were packed
        truth = {name: tensor.to(found[name].dtype) for name, tensor in truth.items()}
    assert_same(found, truth)
    facts = report.manifest.source["quantization"]
    assert (facts["weights"], facts["differing"]) == (7, 0)
    assert (facts["compared"] > 0) == with_base


@pytest.mark.parametrize("case", ["peft_qlora_fsdp2", "peft_qlora_fsdp2_uint8"])
def test_a_base_that_was_not_quantized_for_the_run_is_refused_by_its_bytes(
    case: str, tmp_path: Path
) -> None:
    home = FIXTURES / case
    base = shutil.copytree(home / "base", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] *= 1 + 0.2 * torch.rand_like(weights[name])
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"not the model that was quantized: .*up_proj"):
        merged(
            home / "checkpoint", tmp_path / "out", base=base, config=home / "adapter_config.json"
        )
    assert not (tmp_path / "out").exists()


def test_a_base_of_other_shapes_or_without_the_weight_is_refused(
    trained: Trained, tmp_path: Path
) -> None:
    model = packed_model(trained, four_bits(), torch.bfloat16)
    whole = write_live(tmp_path / "whole", model.state_dict())
    alone = write_live(tmp_path / "alone", packed_alone(model))
    transposed = {name: tensor.T.contiguous() for name, tensor in trained.weights.items()}
    for weights, told in (
        (transposed, r"down_proj.weight' has shape \(128, 64\), expected \(64, 128\)"),
        ({"lm_head.weight": transposed["lm_head.weight"]}, "nor is the weight in"),
    ):
        base = tmp_path / f"base{len(weights)}"
        base.mkdir()
        save_file(weights, base / "model.safetensors")
        shapes = {n: tuple(t.shape) for n, t in trained.weights.items() if "_proj" in n}
        with pytest.raises(RefusedError, match=told):
            planned(alone, base, shapes=shapes)
    with pytest.raises(RefusedError, match="expected"):
        planned(whole, tmp_path / f"base{len(transposed)}")


def test_packed_weights_without_scales_need_the_original(tmp_path: Path) -> None:
    home = FIXTURES / "peft_qlora_fsdp2"
    with pytest.raises(RefusedError, match="without its quantization state") as caught:
        merged(home / "checkpoint", tmp_path / "out", config=home / "adapter_config.json")
    assert "--base" in caught.value.hint


# --- adapters that have left their packed base behind ---


@pytest.mark.parametrize(
    ("case", "double_quant"),
    [
        ("peft_qlora_fsdp2", True),  # checksums of packed bytes settle what no state tells
        ("peft_qlora_fsdp1_flat", True),
        ("peft_qlora_fsdp2_float32", True),
        ("peft_qlora_fsdp2_uint8", None),  # states lie beside the weights
        ("peft_qdora_fsdp2_ckptkit", None),
    ],
)
@pytest.mark.quick("peft_qdora_fsdp2_ckptkit-None", "peft_qlora_fsdp2-True")
def test_an_extracted_adapter_is_merged_as_from_the_checkpoint(
    case: str, double_quant: bool | None, tmp_path: Path
) -> None:
    home = FIXTURES / case
    config = None if case.endswith("_ckptkit") else home / "adapter_config.json"
    ckptkit.extract_adapter(home / "checkpoint", tmp_path / "adapter", adapter_config=config)
    found, report = merged(
        tmp_path / "adapter", tmp_path / "out", base=home / "base", double_quant=double_quant
    )
    assert_same(found, load_file(home / "merged_truth.safetensors"))
    assert report.manifest.source["quantization"]["proven"] == 7
    assert {layer.base for layer in report.layers} == {"dequantized"}


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_extracted_adapter_knows_its_packed_base_again(is_packed: bool, tmp_path: Path) -> None:
    home = FIXTURES / "peft_qlora_fsdp2_uint8"
    adapter, config = tmp_path / "adapter", home / "adapter_config.json"
    ckptkit.extract_adapter(home / "checkpoint", adapter, adapter_config=config)
    _, report = merged(adapter, tmp_path / "right", base=home / "base")
    assert f"{SAME_BASE} 5 of its weights" in report.notes
    assert not any("nothing proves" in note for note in report.notes)
    base = shutil.copytree(home / "base", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    other = {n: -w if ("_proj" in n) == is_packed else w for n, w in weights.items()}
    save_file(other, base / "model.safetensors", metadata={"format": "pt"})
    if is_packed:  # a GPU may have packed them, and so this alone is no contradiction
        _, report = merged(adapter, tmp_path / "out", base=base)
        assert any("7 of 7 weights have other packed bytes" in note for note in report.notes)
        assert not any(note.startswith(SAME_BASE) for note in report.notes)
        return
    with pytest.raises(RefusedError, match="5 of 5 weights have other checksums"):
        merged(adapter, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_what_the_record_of_an_extracted_adapter_leaves_open_is_asked_for(
    tmp_path: Path,
) -> None:
    home = FIXTURES / "peft_qlora_fsdp2"
    adapter, config = tmp_path / "adapter", home / "adapter_config.json"
    ckptkit.extract_adapter(home / "checkpoint", adapter, adapter_config=config)
    with pytest.raises(RefusedError, match="does not say whether the scales") as caught:
        merged(adapter, tmp_path / "no", base=home / "base")
    assert "--double-quant or --no-double-quant" in caught.value.hint
    base = shutil.copytree(home / "base", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    other = {name: weight * 1.25 + 0.01 for name, weight in weights.items()}
    save_file(other, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="type, block size, dtype of its packed base") as caught:
        merged(adapter, tmp_path / "no", base=base, double_quant=True)
    assert "--qlora-base original" in caught.value.hint
    manifest = adapter / "ckptkit.json"
    document = json.loads(manifest.read_bytes())
    del document["checksum"]  # ckptkit 0.1 wrote none
    (packing,) = document["source"]["base_quantization"]["packings"]
    packing |= {"weights": {name: row[:2] for name, row in packing["weights"].items()}}
    manifest.write_text(json.dumps(document))
    with pytest.raises(RefusedError, match="no checksum of packed bytes agrees"):
        merged(adapter, tmp_path / "no", base=home / "base", double_quant=True)
    packing |= {"blocksize": 63}
    manifest.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="base is damaged"):
        merged(adapter, tmp_path / "no", base=home / "base", double_quant=True)
    assert not (tmp_path / "no").exists()


# --- one model, packed in many ways ---


@dataclass(frozen=True)
class Trained:
    """A model on disk, and an adapter for it.

    Attributes:
        home: Holds `base`, `adapter` and `dora`.
        weights: Of the base, bfloat16.
    """

    home: Path
    weights: Tensors

    def delta(self, name: str, adapter: str = "adapter") -> torch.Tensor | None:
        """What the adapter adds to a weight, in float32."""
        tensors = load_file(self.home / adapter / "adapter_model.safetensors")
        module = PREFIX + name.removesuffix(".weight")
        down, up = (tensors.get(f"{module}.lora_{part}.weight") for part in "AB")
        return None if down is None or up is None else SCALING * (up.float() @ down.float())

    def expected(self, dequantized: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Tensors:
        """The base as dequantized, the adapter added in float32 and rounded once."""
        found = {}
        for name, weight in (self.weights | dict(dequantized)).items():
            delta = self.delta(name)
            whole = weight.float() if delta is None else weight.float() + delta
            found[name] = whole.to(dtype)
        return found


def four_bits(**options: Any) -> BitsAndBytesConfig:
    """How a base is packed in four bits."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.float32,
        **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | options,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A tiny Llama whose rows are whole blocks, and a LoRA and a DoRA that change it."""
    home = tmp_path_factory.mktemp("trained")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(home / "base")
    for name, use_dora in (("adapter", False), ("dora", True)):
        settings = LoraConfig(
            r=RANK,
            lora_alpha=int(RANK * SCALING),
            target_modules=TARGETS,
            use_dora=use_dora,
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(copy.deepcopy(model), settings)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(home / name)
    return Trained(home, load_file(home / "base" / "model.safetensors"))


def packed_model(trained: Trained, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> Any:
    """The base, packed by bitsandbytes as `from_pretrained` does it."""
    return AutoModelForCausalLM.from_pretrained(
        trained.home / "base", quantization_config=quantization, dtype=dtype, device_map="cpu"
    )


def dequantized(model: Any) -> Tensors:
    """What bitsandbytes makes of the packed weights of a model."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")  # it has no types
    found: Tensors = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            unpacked = bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            unpacked = bitsandbytes.functional.int8_vectorwise_dequant(weight, weight.SCB)
        else:
            continue
        found[f"{name}.weight"] = unpacked
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def packed_base(trained: Trained) -> tuple[Path, Tensors]:
    """The base as a folder of packed weights, and what they stand for."""
    model = packed_model(trained, four_bits(), torch.bfloat16)
    truth = dequantized(model)
    model.save_pretrained(trained.home / "base-bnb-4bit")
    return trained.home / "base-bnb-4bit", truth


def test_an_adapter_is_merged_onto_a_folder_of_packed_weights(
    trained: Trained, packed_base: tuple[Path, Tensors], tmp_path: Path
) -> None:
    base, truth = packed_base
    found, report = merged(trained.home / "adapter", tmp_path / "out", base=base)
    assert len(truth) == 7
    assert_same(found, trained.expected(truth, torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert {layer.base for layer in report.layers} == {"dequantized"}
    with pytest.raises(RefusedError, match="original of the packed weight"):
        merged(trained.home / "adapter", tmp_path / "no", base=base, qlora_base="original")


def test_an_8_bit_base_is_dequantized_for_lora_and_for_dora(
    trained: Trained, tmp_path: Path
) -> None:
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    model = packed_model(trained, quantization, torch.bfloat16)
    truth = dequantized(model)
    assert len(truth) == 7
    model.save_pretrained(tmp_path / "base")
    found, report = merged(trained.home / "adapter", tmp_path / "lora", base=tmp_path / "base")
    assert any("8-bit layers also round their inputs" in note for note in report.notes)
    assert_same(found, trained.expected(truth, torch.bfloat16))
    found, report = merged(trained.home / "dora", tmp_path / "dora", base=tmp_path / "base")
    assert any("DoRA's norms of the packed weights" in note for note in report.notes)
    magnitudes = load_file(trained.home / "dora" / "adapter_model.safetensors")
    for name, weight in truth.items():
        delta = trained.delta(name, "dora")
        if delta is not None:
            whole = weight + delta
            module = PREFIX + name.removesuffix(".weight")
            magnitude = magnitudes[f"{module}.lora_magnitude_vector"]
            truth[name] = (magnitude / whole.norm(dim=1))[:, None] * whole
        torch.testing.assert_close(found[name], truth[name].bfloat16(), rtol=2**-7, atol=1e-6)


def test_the_merged_model_computes_what_training_computed(trained: Trained, tmp_path: Path) -> None:
    quantized = packed_model(trained, four_bits(), torch.float32)
    quantized.save_pretrained(tmp_path / "packed")
    model = PeftModel.from_pretrained(quantized, trained.home / "adapter").train()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        truth = model(input_ids=tokens).logits
        errors = {}
        for kind, base, choice in (
            ("dequantized", tmp_path / "packed", "dequantized"),
            ("original", trained.home / "base", None),
        ):
            out = tmp_path / kind
            merged(trained.home / "adapter", out, base=base, qlora_base=choice, dtype="float32")
            logits = AutoModelForCausalLM.from_pretrained(out)(input_ids=tokens).logits
            errors[kind] = float((logits - truth).norm() / truth.norm())
    assert errors["dequantized"] < 1e-5
    assert errors["original"] > 0.01


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({}, "nf4"),
        ({"bnb_4bit_use_double_quant": False}, "nf4"),
        ({"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}, "fp4"),
        (None, "int8"),
    ],
)
@pytest.mark.quick("None-int8", "quantization0-nf4")
def test_what_was_packed_is_packed_again_from_the_plain_base(
    trained: Trained, tmp_path: Path, quantization: dict[str, Any] | None, kind: str
) -> None:
    eight = BitsAndBytesConfig(load_in_8bit=True)
    packing = eight if quantization is None else four_bits(**quantization)
    model = packed_model(trained, packing, torch.bfloat16)
    truth = dequantized(model)
    checkpoint = write_live(tmp_path / "checkpoint", model.state_dict(), model.config.to_dict())
    adapter = load_file(trained.home / "adapter" / "adapter_model.safetensors")
    held = load_file(checkpoint / "model.safetensors")
    live = {name.replace(".weight", ".default.weight"): value for name, value in adapter.items()}
    save_file(held | live, checkpoint / "model.safetensors")
    shutil.copy(trained.home / "adapter" / "adapter_config.json", checkpoint)
    base = trained.home / "base"
    from_checkpoint, _ = merged(checkpoint, tmp_path / "first", base=base)
    manifest = ckptkit.extract_adapter(checkpoint, tmp_path / "adapter")
    found, report = merged(tmp_path / "adapter", tmp_path / "second", base=base)
    assert_same(found, from_checkpoint)
    assert_same(found, trained.expected(truth, torch.bfloat16))
    assert manifest.source["base_quantization"]["kinds"] == [kind]
    assert any("packed and dequantized again" in note for note in report.notes)
    other = base.with_name("other")
    if not other.exists():
        shutil.copytree(base, other)
        fewer = trained.weights.copy()
        del fewer[PACKED_WITHOUT_LORA]
        save_file(fewer, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"k_proj.*is not in it as a plain weight"):
        merged(tmp_path / "adapter", tmp_path / "no", base=other)


# --- what the checkpoint of a run may hold of its base ---


def write_live(folder: Path, state: Mapping[str, torch.Tensor], config: object = None) -> Path:
    """Writes the base of a live PEFT model, as it lies in a checkpoint."""
    folder.mkdir()
    live = {
        f"{PREFIX}{name}".replace(".weight", ".base_layer.weight", 1) if "_proj" in name
        else f"{PREFIX}{name}": tensor.contiguous()
        for name, tensor in state.items()
    }  # fmt: skip
    save_file(live, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(
    checkpoint: Path, base: Path | None, *, config: Mapping[str, Any] | None = None, **options: Any
) -> QuantizedBase:
    """Plans the packed weights of a checkpoint."""
    with ExitStack() as stack:
        sides: list[ModelWeights | None] = []
        for name, path in (("source", checkpoint), ("base", base)):
            if path is None:
                sides.append(None)
                continue
            found = stack.enter_context(open_checkpoint(path))
            entries = {
                str(k): v
                for k, v in rename_plainly(sort_entries(found.index.of_part("model")).rest).items()
            }
            origin = Origin(name, found.source, found.index)
            told = config if name == "source" else None
            sides.append(ModelWeights(origin, entries, told, str(path)))
        return plan_quantized(sides[0], sides[1], **{"shapes": {}} | options)


def packed_alone(model: Any) -> Tensors:
    """The weights of a packed model without what lies beside them, as FSDP2 saves them."""
    state: Tensors = model.state_dict()
    kept = {name: tensor for name, tensor in state.items() if ".weight." not in name}
    return {name: tensor for name, tensor in kept.items() if not name.endswith(("SCB", "_format"))}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_how_weights_were_packed_is_found_out_from_their_bytes(
    trained: Trained, tmp_path: Path, quant_type: str, nested: bool
) -> None:
    quantization = four_bits(
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=torch.float16,
    )
    model = packed_model(trained, quantization, torch.float16)
    checkpoint = write_live(tmp_path / "checkpoint", packed_alone(model))
    told = {"quantization_config": {"bnb_4bit_use_double_quant": nested}}
    found = planned(checkpoint, trained.home / "base", config=told, workers=3)
    ending = " with double quantization" if nested else ""
    assert found.facts["kinds"] == [f"{quant_type} in blocks of 64 of float16{ending}"]
    assert (found.facts["derived"], found.facts["differing"]) == (7, 0)
    assert {dtype.name for dtype in found.dtypes.values()} == {"bfloat16"}
    assert not any("assumed" in note for note in found.notes)
    said = planned(checkpoint, trained.home / "base", nested=nested)
    assert (said.facts, said.notes) == (found.facts, found.notes)
    untold = planned(checkpoint, trained.home / "base")
    assert any("double quantization was assumed" in note for note in untold.notes)


def test_8_bit_weights_without_scales_are_proven_and_unpacked_by_the_original(
    trained: Trained, tmp_path: Path
) -> None:
    model = packed_model(trained, BitsAndBytesConfig(load_in_8bit=True), torch.bfloat16)
    checkpoint = write_live(tmp_path / "checkpoint", packed_alone(model))
    found = planned(checkpoint, trained.home / "base")
    assert (found.facts["kinds"], found.facts["derived"]) == (["8 bits"], 7)
    assert found.facts["differing"] == 0
    wrong = shutil.copytree(trained.home / "base", tmp_path / "wrong")
    weights = {name: tensor.roll(1, 0).contiguous() for name, tensor in trained.weights.items()}
    save_file(weights, wrong / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="not the model that was quantized"):
        planned(checkpoint, wrong)


def test_the_states_of_a_packed_base_serve_a_run_that_lost_them(
    trained: Trained, packed_base: tuple[Path, Tensors], tmp_path: Path
) -> None:
    model = packed_model(trained, four_bits(), torch.bfloat16)
    checkpoint = write_live(tmp_path / "checkpoint", packed_alone(model))
    found = planned(checkpoint, packed_base[0])
    assert (found.facts["weights"], found.facts["derived"]) == (7, 0)
    state = packed_alone(model)
    state[PACKED_WITHOUT_LORA][0] ^= 0xFF
    other = write_live(tmp_path / "other", state)
    with pytest.raises(RefusedError, match="not the model that was quantized"):
        planned(other, packed_base[0])


def test_a_few_values_that_a_gpu_rounded_otherwise_are_counted_and_more_are_refused(
    trained: Trained, tmp_path: Path
) -> None:
    state = packed_alone(packed_model(trained, four_bits(), torch.bfloat16))
    name = "model.layers.0.mlp.up_proj.weight"
    for count, at in ((4, range(0, 4000, 1000)), (40, range(0, 4000, 100)), (16, range(16))):
        changed = dict(state)
        changed[name] = state[name].clone()
        for position in at:
            changed[name][position] ^= 0x10
        checkpoint = write_live(tmp_path / f"{count}", changed)
        if count == 4:
            found = planned(checkpoint, trained.home / "base")
            assert found.facts["differing"] == count
            assert any(f"{count} of " in note for note in found.notes)
        else:
            with pytest.raises(RefusedError, match=rf"{count} of 8,192 packed values of '{name}'"):
                planned(checkpoint, trained.home / "base")


def test_only_what_was_quantized_is_dequantized(trained: Trained, tmp_path: Path) -> None:
    model = packed_model(trained, four_bits(), torch.bfloat16)
    checkpoint = write_live(tmp_path / "checkpoint", model.state_dict())
    found = planned(checkpoint, None)
    assert found.operands.keys() == dequantized(model).keys()
    assert found.hidden > found.operands.keys()
    assert {name for name in model.state_dict() if name not in found.hidden} == {
        name for name in trained.weights if name not in found.operands
    }
    (tmp_path / "plain").mkdir()
    integers = trained.weights | {
        "model.mask": torch.ones(4, 4, dtype=torch.int8),
        "model.score.weight": torch.ones(5, 1),
        "prompt_encoder.weight": torch.ones(5),
    }
    save_file(integers, tmp_path / "plain" / "model.safetensors")
    assert planned(tmp_path / "plain", tmp_path / "plain") == QuantizedBase()


@pytest.mark.parametrize("bits", [4, 8])
def test_linear_layers_that_were_left_out_of_quantizing_are_merged_as_they_are(
    trained: Trained, tmp_path: Path, bits: int
) -> None:
    left_out = ["lm_head", "down_proj", "k_proj"]  # one of them has a LoRA
    eight = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=left_out)
    quantization = four_bits(llm_int8_skip_modules=left_out) if bits == 4 else eight
    model = packed_model(trained, quantization, torch.bfloat16)
    truth = dequantized(model)
    assert len(truth) == 5
    checkpoint = write_live(tmp_path / "checkpoint", packed_alone(model))
    assert planned(checkpoint, trained.home / "base").operands.keys() == truth.keys()
    model.save_pretrained(tmp_path / "base")
    found, _ = merged(trained.home / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_same(found, trained.expected(truth, torch.bfloat16))


def test_what_looks_packed_is_never_written_as_a_weight(trained: Trained, tmp_path: Path) -> None:
    model = packed_model(trained, four_bits(bnb_4bit_quant_storage=torch.bfloat16), torch.bfloat16)
    checkpoint = write_live(tmp_path / "checkpoint", packed_alone(model))
    with pytest.raises(RefusedError, match="looks like a part of a packed weight") as caught:
        planned(checkpoint, None)  # nothing tells a shape: the adapter is one of other modules
    assert "--base" in caught.value.hint


def test_a_packed_part_of_a_fused_weight_is_not_written_as_one(tmp_path: Path) -> None:
    name = Fqn("model.layers.0.mlp.experts.0.down_proj.weight")
    save_file({name: torch.zeros(32, 1, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    live = (Fqn("model.layers.0.mlp.experts.down_proj"),)
    piece = HubTensor(name, (8, 8), ((live[0], whole_tile((8, 8))),))
    with open_checkpoint(tmp_path) as found:
        entries = rename_plainly(sort_entries(found.index.of_part("model")).rest)
        base = BaseSource(found, Origin(BASE, found.source, found.index), entries, None, False)
        alignment = Alignment([PlacedTensor(name, live, (name,), piece)], {})
        with pytest.raises(
            RefusedError, match=f"'{name}' of shape .* is a packed weight, and part"
        ):
            make_base_tensors(base, alignment, QuantizedBase())


def test_the_original_may_be_chosen_and_the_report_says_what_it_changes(
    tmp_path: Path,
) -> None:
    home = FIXTURES / "peft_qlora_fsdp2"
    found, report = merged(
        home / "checkpoint",
        tmp_path / "out",
        base=home / "base",
        config=home / "adapter_config.json",
        qlora_base="original",
        report=True,
    )
    original = load_file(home / "base" / "model.safetensors")
    unpacked = load_file(home / "dequantized_truth.safetensors")
    adapter = load_file(home / "adapter_truth.safetensors")
    for layer in report.layers:
        module = PREFIX + layer.tensor.removesuffix(".weight")
        up, down = (adapter[f"{module}.lora_{part}.weight"].float() for part in "BA")
        update = (layer.scaling or 0) * (up @ down)
        weight = original[layer.tensor].float()
        assert torch.equal(found[layer.tensor], (weight + update).bfloat16())
        lost = (unpacked[layer.tensor].float() - weight).norm() / update.norm()
        assert layer.quantization == pytest.approx(float(lost), rel=1e-4)
        assert layer.base == "original"


@pytest.mark.parametrize(
    ("config", "extra", "told"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "fp8"),
        ({}, {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, dtype=torch.int32)}, "qweight"),
        ({}, {"model.x.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "model.x.weight"),
    ],
)
def test_a_base_in_a_quantization_that_is_not_modelled_is_refused_by_name(
    trained: Trained, tmp_path: Path, config: dict[str, Any], extra: Tensors, told: str
) -> None:
    base = shutil.copytree(trained.home / "base", tmp_path / "base")
    whole = json.loads((base / "config.json").read_text()) | config
    (base / "config.json").write_text(json.dumps(whole))
    save_file(trained.weights | extra, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=told) as caught:
        merged(trained.home / "adapter", tmp_path / "out", base=base)
    assert "bitsandbytes" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "tensor", "told"),
    [
        ("quant_state.bitsandbytes__nf4", torch.tensor(list(b"{"), dtype=torch.uint8), "not JSON"),
        ("quant_state.bitsandbytes__nf4", torch.tensor(list(b"{}"), dtype=torch.uint8), "None for"),
        ("absmax", torch.zeros(5, dtype=torch.uint8), "5 elements, expected 32"),
        ("absmax", torch.zeros(32), "float32, expected scales as bytes"),
        ("nested_quant_map", torch.zeros(16), "16 elements, expected 256"),
    ],
)
def test_a_damaged_quantization_state_is_named(
    trained: Trained,
    packed_base: tuple[Path, Tensors],
    tmp_path: Path,
    kind: str,
    tensor: torch.Tensor,
    told: str,
) -> None:
    base = shutil.copytree(packed_base[0], tmp_path / "base")
    tensors = load_file(base / "model.safetensors") | {f"{PACKED_WITHOUT_LORA}.{kind}": tensor}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=told):
        merged(trained.home / "adapter", tmp_path / "out", base=base)


def test_scales_that_are_bytes_without_their_own_scales_are_no_numbers(
    trained: Trained, packed_base: tuple[Path, Tensors], tmp_path: Path
) -> None:
    base = shutil.copytree(packed_base[0], tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    state = f"{PACKED_WITHOUT_LORA}.quant_state.bitsandbytes__nf4"
    told = json.loads(bytes(tensors[state].tolist()))
    plain = {key: value for key, value in told.items() if not key.startswith("nested")}
    tensors[state] = torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match="uint8, expected scales as floating numbers"):
        merged(trained.home / "adapter", tmp_path / "out", base=base)


def test_a_state_that_lacks_a_part_is_named(
    trained: Trained, packed_base: tuple[Path, Tensors], tmp_path: Path
) -> None:
    base = shutil.copytree(packed_base[0], tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors[f"{PACKED_WITHOUT_LORA}.nested_absmax"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"k_proj.*'nested_absmax' was not stored with it"):
        merged(trained.home / "adapter", tmp_path / "out", base=base)


def test_nothing_packed_leaves_nothing_to_dequantize(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="no weight is packed"):
        merged(
            trained.home / "adapter",
            tmp_path / "out",
            base=trained.home / "base",
            qlora_base="dequantized",
        )
