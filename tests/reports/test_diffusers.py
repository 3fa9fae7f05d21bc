"""Models of diffusers are written as diffusers loads them, their configuration unchanged."""

from __future__ import annotations

import filecmp
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, RefusedError
from ckptkit_cli.main import main
from tests.reports.folders import REPORTS, assert_same, notes_of, save, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]  # diffusers takes 4 s to import
CASE = REPORTS / "01-diffusers-flux"
STEM = "diffusion_pytorch_model"
UNET = "UNet2DConditionModel"


@pytest.mark.parametrize("base", ["base/transformer", "base"])
def test_a_report_of_a_folder_that_diffusers_did_not_load(
    base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import diffusers

    out = tmp_path / "out"
    assert main(["consolidate", str(CASE / "ckpt"), str(out), "--base", str(CASE / base)]) == 0
    assert f"diffusers.FluxTransformer2DModel.from_pretrained('{out}')" in capfd.readouterr().out
    assert filecmp.cmp(out / "config.json", CASE / "base/transformer/config.json", shallow=False)
    assert sorted(names(out)) == ["ckptkit.json", "config.json", f"{STEM}.safetensors"]
    assert_same(tensors_of(out), load_file(CASE / "truth.safetensors"))
    model = diffusers.FluxTransformer2DModel.from_pretrained(out)
    truth = load_file(CASE / "truth.safetensors")
    assert all(torch.equal(t, truth[n]) for n, t in model.state_dict().items())


def test_files_of_a_size_have_the_index_that_diffusers_reads(tmp_path: Path) -> None:
    import diffusers

    out = tmp_path / "out"
    ckptkit.consolidate(CASE / "ckpt", out, base=CASE / "base", max_shard_size=4000)
    assert (out / f"{STEM}.safetensors.index.json").exists()
    model = diffusers.FluxTransformer2DModel.from_pretrained(out)
    truth = load_file(CASE / "truth.safetensors")
    assert all(torch.equal(t, truth[n]) for n, t in model.state_dict().items())
    ckptkit.consolidate(CASE / "ckpt", tmp_path / "like", base=out, like=out)
    assert names(tmp_path / "like") == names(out)


def test_inspect_knows_the_folder_and_verify_reads_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(CASE / "base" / "transformer")]) == 0
    said = capfd.readouterr().out
    assert "FluxTransformer2DModel" in said
    assert "these weights load as they are" in said


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def built(name: str, **values: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(**values)


MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "sample_size": 8,
        "block_out_channels": (4, 8),
        "norm_num_groups": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "layers_per_block": 1,
    },
    "AutoencoderKL": {"block_out_channels": (4,), "norm_num_groups": 2, "latent_channels": 2},
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 1,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 8,
        "freq_dim": 8,
        "ffn_dim": 8,
        "num_layers": 1,
    },
    "ControlNetModel": {
        "block_out_channels": (4,),
        "down_block_types": ("DownBlock2D",),
        "norm_num_groups": 2,
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "layers_per_block": 1,
        "conditioning_embedding_out_channels": (4, 8),
    },
}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_what_save_pretrained_of_diffusers_writes(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model = built(name, **MODELS[name])
    model.save_pretrained(tmp_path / "base")
    step = save(model.state_dict(), tmp_path / "step")
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base", dtype=dtype)
    if dtype != "keep":
        model = type(model).from_pretrained(tmp_path / "base", torch_dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "theirs"))
    assert names(tmp_path / "out") - {"ckptkit.json"} == names(tmp_path / "theirs")
    assert type(model).from_pretrained(tmp_path / "out") is not None


def test_names_are_compared_with_the_class(tmp_path: Path) -> None:
    model = built("AutoencoderKL", **MODELS["AutoencoderKL"])
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / f"{STEM}.safetensors").unlink()
    state = dict(model.state_dict())
    first = next(iter(state))
    without = save({n: t for n, t in state.items() if n != first}, tmp_path / "without")
    with pytest.raises(RefusedError, match=f"1 parameter would be missing.*{first}"):
        ckptkit.consolidate(without, tmp_path / "out", base=tmp_path / "base")
    inside = {f"net.{n}": t for n, t in state.items()}
    wrapped = save(inside, tmp_path / "wrapped")
    ckptkit.consolidate(wrapped, tmp_path / "out", base=tmp_path / "base")
    assert_same(tensors_of(tmp_path / "out"), state)
    beside = save({**inside, "loss.weight": torch.ones(3)}, tmp_path / "beside")
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(beside, tmp_path / "part", base=tmp_path / "base")
    assert "--strip-prefix net. --include 'net.*'" in caught.value.hint
    options: dict[str, Any] = {"strip_prefix": "net.", "include": ["net.*"]}
    ckptkit.consolidate(beside, tmp_path / "part", base=tmp_path / "base", **options)
    assert_same(tensors_of(tmp_path / "part"), state)
    shaped = save({**state, first: torch.zeros(3)}, tmp_path / "shaped")
    with pytest.raises(RefusedError, match="another shape"):
        ckptkit.consolidate(shaped, tmp_path / "other", base=tmp_path / "base")


def test_frozen_parts_of_a_model_of_diffusers_are_filled(tmp_path: Path) -> None:
    state = load_file(CASE / "truth.safetensors")
    half = {n: t for n, t in state.items() if "transformer_blocks" in n}
    step = save(half, tmp_path / "step")
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(step, tmp_path / "out", base=CASE / "base")
    assert "--fill-from-base" in caught.value.hint
    ckptkit.consolidate(step, tmp_path / "out", base=CASE / "base", fill_from_base=True)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], half[name]) for name in half)


@pytest.mark.parametrize("size", ["10GB", "20KB"])
def test_frozen_parts_are_filled_from_the_one_variant_that_a_base_has(
    size: str, tmp_path: Path
) -> None:
    base = built(UNET, **MODELS[UNET]).half()
    base.save_pretrained(tmp_path / "base", variant="fp16", max_shard_size=size)
    files = list((tmp_path / "base").glob("*.fp16*.safetensors"))
    assert (len(files) > 1) == (size == "20KB")
    state = base.state_dict()
    half = {n: t + 1 for n, t in state.items() if "attn2" in n}
    step = save(half, tmp_path / "step")
    ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base", fill_from_base=True)
    assert_same(tensors_of(tmp_path / "out"), {**state, **half})


def test_a_pipeline_without_the_trained_model_asks_for_a_component(tmp_path: Path) -> None:
    step = save({"a.weight": torch.zeros(3)}, tmp_path / "step")
    with pytest.raises(AmbiguousSourceError) as caught:
        ckptkit.consolidate(step, tmp_path / "out", base=CASE / "base")
    assert "transformer" in caught.value.message
    named = caught.value.hint.rpartition(" ")[2]
    assert (Path(named) / "config.json").exists()


def add_component(pipeline: Path, name: str, model: Any) -> None:
    """Adds a model to a pipeline, and to its index."""
    model.save_pretrained(pipeline / name)
    index = json.loads((pipeline / "model_index.json").read_text())
    index[name] = [type(model).__module__.split(".")[0], type(model).__name__]
    (pipeline / "model_index.json").write_text(json.dumps(index))


def text_encoder(layers: int = 1, hidden: int = 8) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=24,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
    )
    return transformers.CLIPTextModel(config)


def pipeline_of_two(folder: Path) -> dict[str, Any]:
    """Writes a pipeline; returns its models as trained."""
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    models = {"unet": built(UNET, **MODELS[UNET]), "text_encoder": text_encoder()}
    for component, model in models.items():
        add_component(folder, component, model)
    with torch.no_grad():
        for model in models.values():
            for parameter in model.parameters():
                parameter.add_(1)
    return models


@pytest.mark.parametrize(
    ("component", "prefix", "further", "options"),
    [
        ("unet", "unet.", False, []),
        ("text_encoder", "model.text_encoder.", False, []),
        ("unet", "unet.", True, ["--include", "unet.*", "--strip-prefix", "unet."]),
        ("text_encoder", "net.", True, ["--include", "net.*", "--strip-prefix", "net."]),
        ("text_encoder", "net.", True, ["--exclude", "unet.*", "--strip-prefix", "net."]),
    ],
)
def test_the_component_is_that_of_the_written_names(
    component: str, prefix: str, further: bool, options: list[str], tmp_path: Path
) -> None:
    pipeline, out = tmp_path / "pipeline", tmp_path / "out"
    models = pipeline_of_two(pipeline)
    trained = models[component].state_dict()
    state = {f"{prefix}{name}": tensor for name, tensor in trained.items()}
    if further:
        state |= {f"unet.{n}": t for n, t in models["unet"].state_dict().items()}
    step = save(state, tmp_path / "step")
    assert main(["consolidate", str(step), str(out), "--base", str(pipeline), *options]) == 0
    loaded = type(models[component]).from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())


def test_two_trained_components_are_refused_with_a_command_that_works(tmp_path: Path) -> None:
    pipeline, out = tmp_path / "pipeline", tmp_path / "out"
    models = pipeline_of_two(pipeline)
    state = {f"{c}.{n}": t for c, model in models.items() for n, t in model.state_dict().items()}
    step = save(state, tmp_path / "step")
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(step, out, base=pipeline)
    command = caught.value.hint.split("`")[1]
    assert "--include 'unet.*'" in command
    assert main(shlex.split(command)[1:]) == 0
    trained = models["unet"].state_dict()
    loaded = type(models["unet"]).from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())


def test_of_two_components_with_the_same_tensors_one_is_named(tmp_path: Path) -> None:
    """Pipelines of Wan 2.2 have two transformers of one configuration."""
    pipeline, name = tmp_path / "pipeline", "WanTransformer3DModel"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text("{}")
    models = [built(name, **MODELS[name]) for _ in range(2)]
    add_component(pipeline, "transformer", models[0])
    add_component(pipeline, "transformer_2", models[1])
    half = {n: t for n, t in models[1].state_dict().items() if "attn1" in n}
    step = save(half, tmp_path / "step")
    with pytest.raises(AmbiguousSourceError, match=r"2 of them.*: transformer, transformer_2") as e:
        ckptkit.consolidate(step, tmp_path / "out", base=pipeline, fill_from_base=True)
    named = Path(e.value.hint.rpartition(" ")[2])
    assert named == pipeline / "transformer"
    for component, model in zip(("transformer", "transformer_2"), models, strict=True):
        base, out = named.parent / component, tmp_path / component
        ckptkit.consolidate(step, out, base=base, fill_from_base=True)
        assert_same(tensors_of(out), {**model.state_dict(), **half})


@pytest.mark.parametrize(("layers", "hidden"), [(2, 8), (1, 16)])
def test_a_component_is_told_from_one_that_has_its_names(
    layers: int, hidden: int, tmp_path: Path
) -> None:
    """The two text encoders of Stable Diffusion XL differ in numbers of layers and in sizes."""
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text("{}")
    models = {"text_encoder": text_encoder(layers, hidden), "text_encoder_2": text_encoder()}
    for component, model in models.items():
        add_component(pipeline, component, model)
    for component, model in models.items():
        step = save(model.state_dict(), tmp_path / "steps" / component)
        out = tmp_path / component
        notes = notes_of(ckptkit.consolidate, step, out, base=pipeline)
        assert any(f"{component!r} is used" in note for note in notes)
        assert type(model).from_pretrained(out) is not None


def test_the_component_is_that_of_the_selected_tensors(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(CASE / "base", pipeline)
    model = text_encoder()
    add_component(pipeline, "text_encoder", model)
    state = {"transformer": load_file(CASE / "truth.safetensors")}
    step = save({**state, "text_encoder": model.state_dict()}, tmp_path / "step")
    for select in ("transformer", "text_encoder"):
        out = tmp_path / select
        ckptkit.consolidate(step, out, base=pipeline, select=select)
        config = json.loads((pipeline / select / "config.json").read_text())
        assert json.loads((out / "config.json").read_text()).keys() >= config.keys()
    assert type(model).from_pretrained(tmp_path / "text_encoder") is not None


def test_a_text_encoder_of_a_pipeline_is_a_model_of_transformers(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(CASE / "base", pipeline)
    model = text_encoder()
    add_component(pipeline, "text_encoder", model)
    step = save(model.state_dict(), tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=pipeline)
    assert any("'text_encoder'" in note for note in notes)
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())


@pytest.mark.parametrize("how", ["run", "base"])
def test_a_class_that_fully_shard_renamed_has_its_own_name(how: str, tmp_path: Path) -> None:
    """diffusers itself records `FSDPAutoencoderKL`, which its `AutoModel` does not find."""
    import diffusers
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ckptkit.training import Checkpointer

    model = built("AutoencoderKL", **MODELS["AutoencoderKL"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.save_config(tmp_path / "base")
        if how == "run":
            with Checkpointer(tmp_path / "run", every=1) as checkpointer:
                checkpointer.save(1, {"model": model})
    finally:
        dist.destroy_process_group()
    recorded = json.loads((tmp_path / "base" / "config.json").read_text())
    assert recorded["_class_name"] == "FSDPAutoencoderKL"
    if how == "run":
        notes = notes_of(ckptkit.consolidate, tmp_path / "run", tmp_path / "out")
    else:
        step = save(state, tmp_path / "step")
        notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=tmp_path / "base")
    assert any("fully_shard had renamed" in note for note in notes) == (how == "base")
    loaded = diffusers.AutoModel.from_pretrained(str(tmp_path / "out"))
    assert type(loaded) is diffusers.AutoencoderKL
    assert all(torch.equal(t, state[n]) for n, t in loaded.state_dict().items())
