"""LoRA of diffusers: its files are read and written, and merged into the component they change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, RefusedError
from ckptkit_cli.main import main
from tests.reports.folders import REPORTS, save, tensors_of
from tests.reports.test_diffusers import MODELS, UNET, built, names

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]  # diffusers takes 4 s to import
CASE = REPORTS / "diffusers-lora"
FILE = "pytorch_lora_weights.safetensors"
TARGETS = ["to_q", "to_v", "to_out.0"]


def trained(name: str = UNET, *, targets: Any = TARGETS, **values: Any) -> Any:
    """Returns a model of diffusers with a LoRA adapter, none of whose factors is zero."""
    from peft import LoraConfig

    torch.manual_seed(0)
    model = built(name, **MODELS[name])
    options = {"r": 2, "lora_alpha": 6, "target_modules": targets, **values}
    model.add_adapter(LoraConfig(**options))
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if "lora_" in own:
                parameter.copy_(torch.randn_like(parameter) / 4)
    return model.eval()


@pytest.mark.parametrize("name", [UNET, "WanTransformer3DModel"])
def test_an_inferred_configuration_names_layers_that_peft_finds(name: str, tmp_path: Path) -> None:
    """Containers and modules without tensors end in numbers too, as `to_out.0` does."""
    from peft import PeftModel

    model = trained(name)
    step = save(model.state_dict(), tmp_path / "step")
    out = tmp_path / "out"
    ckptkit.extract_adapter(step, out, lora_alpha=6, use_rslora=False)
    loaded = PeftModel.from_pretrained(built(name, **MODELS[name]), str(out))
    factors = {n: t for n, t in model.state_dict().items() if "lora_" in n}
    found = {n: t for n, t in loaded.state_dict().items() if "lora_" in n}
    assert len(found) == len(factors)
    assert all(torch.equal(found[f"base_model.model.{n}"], t) for n, t in factors.items())


def pipeline_file(model: Any, folder: Path, *, component: str = "unet", told: bool = True) -> Path:
    """Writes an adapter as the training scripts of diffusers do."""
    from diffusers import StableDiffusionPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    layers = {component: get_peft_model_state_dict(model)}
    told_of = _collate_lora_metadata({component: model}) if told else {}
    StableDiffusionPipeline.save_lora_weights(
        folder, **{f"{part}_lora_layers": layer for part, layer in layers.items()}, **told_of
    )
    return folder


def fused(model: Any) -> dict[str, torch.Tensor]:
    model.fuse_lora(safe_fusing=False)
    state = model.state_dict()
    kept = {n: t for n, t in state.items() if "lora_" not in n}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in kept.items()}


def base_of(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    built(name, **MODELS[name]).save_pretrained(folder)
    return folder


def merged(src: Path, out: Path, base: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptkit.merge_adapter(src, out, base=base, **options)
    return tensors_of(out)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_report_whose_header_has_the_alpha(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["inspect", str(CASE / "ckpt")]) == 0
    assert "diffusers loads this folder as it is" in capfd.readouterr().out
    assert main(["adapter", "extract", str(CASE / "ckpt"), str(out)]) == 0
    assert f"pipeline.load_lora_weights('{out}')" in capfd.readouterr().out
    truth = load_file(CASE / "ckpt" / FILE)
    ours = load_file(out / FILE)
    assert ours.keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in ours.items())
    with safe_open(out / FILE, "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
    assert said["transformer.lora_alpha"] == 8
    assert said["transformer.r"] == 4


def test_a_file_of_a_training_script_merges_as_diffusers_fuses_it(tmp_path: Path) -> None:
    model = trained(use_rslora=True, rank_pattern={"to_v": 4}, alpha_pattern={"to_q": 3})
    file, base = pipeline_file(model, tmp_path / "lora"), base_of(UNET, tmp_path / "base")
    ours = merged(file, tmp_path / "out", base)
    assert_close(ours, fused(model))
    assert names(tmp_path / "out") >= {"config.json", "diffusion_pytorch_model.safetensors"}


def test_a_file_without_settings_is_scaled_as_diffusers_loads_it(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    model = trained(rank_pattern={"to_v": 4})  # its alpha is lost
    file = pipeline_file(model, tmp_path / "lora", told=False)
    base = base_of(UNET, tmp_path / "base")
    loaded = UNet2DConditionModel.from_pretrained(base)
    loaded.load_lora_adapter(file, prefix="unet", use_safetensors=True)
    assert_close(merged(file, tmp_path / "out", base), fused(loaded))
    assert_close(merged(file, tmp_path / "given", base, overrides={"lora_alpha": 6}), fused(model))


@pytest.mark.parametrize("down", ["lora.down", "lora_linear_layer.down"])
def test_names_from_before_peft_are_read(down: str, tmp_path: Path) -> None:
    model = trained()
    file, base = pipeline_file(model, tmp_path / "lora") / FILE, base_of(UNET, tmp_path / "base")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    up = down.replace("down", "up")
    old = {
        name.replace("lora_A", down).replace("lora_B", up): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(old, file, metadata)
    assert_close(merged(file.parent, tmp_path / "out", base), fused(model))


def test_a_model_writes_its_own_file_without_a_component(tmp_path: Path) -> None:
    model, base = trained(), base_of(UNET, tmp_path / "base")
    model.save_lora_adapter(tmp_path / "lora")
    assert_close(merged(tmp_path / "lora", tmp_path / "out", base), fused(model))


def test_the_component_of_a_pipeline_is_the_base(tmp_path: Path) -> None:
    model, pipeline = trained(), tmp_path / "pipeline"
    base_of(UNET, pipeline / "unet")
    base_of("AutoencoderKL", pipeline / "vae")
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    file = pipeline_file(model, tmp_path / "lora")
    assert_close(merged(file, tmp_path / "out", pipeline), fused(model))


@pytest.mark.parametrize("config", ["beside", "base"])
def test_an_adapter_in_a_step_becomes_the_file_that_diffusers_loads(
    config: str, tmp_path: Path
) -> None:
    from diffusers import UNet2DConditionModel

    model, base = trained(), base_of(UNET, tmp_path / "base")
    step = save(model.state_dict(), tmp_path / "step")
    model.peft_config["default"].save_pretrained(step)
    if config == "beside":
        shutil.copy(base / "config.json", step)
    ckptkit.extract_adapter(step, tmp_path / "out", base=base if config == "base" else None)
    assert names(tmp_path / "out") == {FILE, "ckptkit.json"}
    loaded = UNet2DConditionModel.from_pretrained(base)
    loaded.load_lora_adapter(tmp_path / "out", prefix="unet", use_safetensors=True)
    theirs = fused(model)
    assert_close(fused(loaded), theirs)


def test_one_of_several_components_is_chosen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffusers import StableDiffusionPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig, get_peft_model_state_dict
    from transformers import CLIPTextConfig, CLIPTextModel

    unet, pipeline = trained(), tmp_path / "pipeline"
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    encoder = CLIPTextModel(CLIPTextConfig(**sizes, num_attention_heads=2))
    encoder.save_pretrained(pipeline / "text_encoder")
    encoder.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora",
        unet_lora_layers=get_peft_model_state_dict(unet),
        text_encoder_lora_layers=get_peft_model_state_dict(encoder),
        **_collate_lora_metadata({"unet": unet, "text_encoder": encoder}),
    )
    base_of(UNET, pipeline / "unet")
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(AmbiguousSourceError, match="holds 2 adapters") as caught:
        ckptkit.merge_adapter(tmp_path / "lora", tmp_path / "out", base=pipeline)
    assert "--adapter text_encoder" in caught.value.hint
    folder = str(tmp_path / "lora")
    assert main(["inspect", folder, "--base", str(pipeline)]) == 0
    command = capfd.readouterr().out.partition("Next\n")[2].splitlines()[0].split()
    command[command.index("OUT")] = str(tmp_path / "out")
    assert main(command[1:]) == 0
    assert "transformers.CLIPTextModel.from_pretrained" in capfd.readouterr().out
    ours, weight = tensors_of(tmp_path / "out"), "encoder.layers.0.self_attn.q_proj"
    (layer,) = (m for n, m in encoder.named_modules() if n.endswith(weight))
    (name,) = (name for name in ours if name.endswith(f"{weight}.weight"))
    expected = layer.get_delta_weight("default") + layer.base_layer.weight
    torch.testing.assert_close(ours[name], expected)
    out = merged(tmp_path / "lora", tmp_path / "unet", pipeline, adapters=["unet"])
    assert_close(out, fused(unet))


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"targets": ["to_q", "conv1", "conv_shortcut"]},
        {"targets": ["to_out.0"], "lora_bias": True},
    ],
    ids=["dora", "convolutions", "bias"],
)
def test_variants_are_read_and_written(options: dict[str, Any], tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    model = trained(**options)
    file, base = pipeline_file(model, tmp_path / "lora"), base_of(UNET, tmp_path / "base")
    step = save(model.state_dict(), tmp_path / "step")
    model.peft_config["default"].save_pretrained(step)
    ckptkit.extract_adapter(step, tmp_path / "own", base=base)
    loaded = UNet2DConditionModel.from_pretrained(base)
    loaded.load_lora_adapter(tmp_path / "own", prefix="unet", use_safetensors=True)
    theirs = fused(model)
    assert_close(fused(loaded), theirs)
    assert_close(merged(file, tmp_path / "out", base), theirs)


def test_scalings_of_single_modules_are_refused(tmp_path: Path) -> None:
    model = trained()
    file = pipeline_file(model, tmp_path / "lora") / FILE
    tensors = load_file(file)
    module = next(iter(tensors)).partition(".lora_")[0]
    save_file(tensors | {f"{module}.alpha": torch.tensor(3.0)}, file)
    with pytest.raises(RefusedError, match="alpha"):
        ckptkit.extract_adapter(file.parent, tmp_path / "out")


def test_a_push_takes_the_file_and_names_the_library(tmp_path: Path) -> None:
    from ckptkit.consumers.table import DIFFUSERS_LORA, find_consumer
    from ckptkit.hub.package import choose_files

    model = trained()
    pipeline_file(model, tmp_path / "lora")
    ckptkit.extract_adapter(tmp_path / "lora", tmp_path / "out")
    files = names(tmp_path / "out")
    consumer = find_consumer(None, files)
    assert consumer is DIFFUSERS_LORA
    assert set(choose_files(files, consumer, code=False, optimizer=False)[0]) == files
