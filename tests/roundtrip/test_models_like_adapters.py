"""Models that have names, or files, like those of adapters are written as what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import RefusedError
from ckptkit_cli.inspect import InspectArguments, next_step
from tests.live_truth import refuse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import SamConfig, SamModel  # noqa: E402

from ckptkit.training import Checkpointer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*process group.*", "ignore:.*single process.*", "ignore:.*TypedStorage.*"
)
TIED = {"prompt_encoder.shared_embedding.positional_embedding"}
FACTORS = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def sam() -> Any:
    torch.manual_seed(0)
    config = SamConfig(
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_dim": 32,
            "image_size": 64,
            "patch_size": 16,
            "output_channels": 16,
            "global_attn_indexes": [0],
            "window_size": 2,
        },
        prompt_encoder_config={
            "hidden_size": 16,
            "image_size": 64,
            "patch_size": 16,
            "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_dim": 32,
            "iou_head_hidden_dim": 16,
        },
    )
    return SamModel(config).eval()


def put(sam: Any, form: str, home: Path) -> None:
    home.mkdir()
    sam.config.save_pretrained(home)
    state = {name: tensor.detach().clone() for name, tensor in sam.state_dict().items()}
    if form == "save_pretrained":
        sam.save_pretrained(home)
    elif form == "dcp":
        dcp.save({"model": state}, checkpoint_id=home, no_dist=True)
    elif form == "torch":
        torch.save(state, home / "sam.pt")
    else:
        with Checkpointer(home) as checkpointer:
            checkpointer.save(1, {"model": sam}).result(60)


@pytest.mark.parametrize("form", ["save_pretrained", "dcp", "torch", "step"])
@pytest.mark.quick("torch")
def test_a_module_called_prompt_encoder_is_a_part_of_sam(
    form: str, sam: Any, tmp_path: Path
) -> None:
    put(sam, form, tmp_path / "source")
    assert ckptkit.inspect(tmp_path / "source").peft is None
    ckptkit.consolidate(tmp_path / "source", tmp_path / "out")
    sam.save_pretrained(tmp_path / "truth")
    found, truth = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "truth"))
    assert truth.keys() <= found.keys() <= truth.keys() | TIED  # which may be there twice
    assert all(torch.equal(tensor, sam.state_dict()[name]) for name, tensor in found.items())


def test_the_change_of_sam_becomes_a_lora(sam: Any, tmp_path: Path) -> None:
    put(sam, "save_pretrained", tmp_path / "base")
    state = load_file(tmp_path / "base" / "model.safetensors")
    name = next(name for name in state if name.endswith("attn.qkv.weight"))
    rows, columns = state[name].shape
    state[name] = state[name] + torch.outer(torch.ones(rows), torch.ones(columns))
    put(sam, "save_pretrained", tmp_path / "tuned")
    save_file(state, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    ckptkit.adapter_from_diff(tmp_path / "tuned", tmp_path / "out", base=tmp_path / "base", rank=1)
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2


def phi(own: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], **own}


def tensors(*names: str) -> dict[str, Any]:
    return {name: torch.randn(4, 4) for name in names}


def test_adapters_that_the_configuration_declares_are_parts_of_the_model(tmp_path: Path) -> None:
    """As in Phi-4-multimodal by its own code: LoRA for speech and vision in each layer."""
    source, own = tmp_path / "source", {"speech_lora": {"r": 4}, "vision_lora": {"r": 4}}
    source.mkdir()
    names = [f"{FACTORS}.lora_{f}.{one}.weight" for f in "AB" for one in ("speech", "vision")]
    held = tensors(f"{FACTORS}.base_layer.weight", *names)
    torch.save(held, source / "model.pt")
    (source / "config.json").write_text(json.dumps(phi({})))
    refuse("an adapter of PEFT", source, tmp_path / "out", kind=RefusedError)
    (source / "config.json").write_text(json.dumps(phi(own)))
    inspection = ckptkit.inspect(source)
    assert inspection.adapter is None
    step = next_step(inspection, InspectArguments(str(source)))
    assert step.command == f"ckptkit consolidate {source} OUT"
    ckptkit.consolidate(source, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == held.keys()


def test_a_model_that_has_an_adapter_in_its_folder_is_written_without_it(tmp_path: Path) -> None:
    """As Granite's speech models lie on the Hub."""
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors(f"{FACTORS}.weight"), source / "model.safetensors")
    own = tensors(*(f"base_model.model.{FACTORS}.lora_{factor}.weight" for factor in "AB"))
    save_file(own, source / "adapter_model.safetensors")
    (source / "config.json").write_text('{"model_type": "made_up"}')
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    step = next_step(ckptkit.inspect(source), InspectArguments(str(source)))
    assert step.command == f"ckptkit consolidate {source} OUT --select model.safetensors"
    ckptkit.consolidate(source, tmp_path / "out", select="model.safetensors")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == [f"{FACTORS}.weight"]
    with pytest.raises(RefusedError, match="belongs to an adapter of PEFT"):
        ckptkit.consolidate(source, tmp_path / "adapter", select="adapter_model.safetensors")
