"""Ties that classes of Transformers give as patterns, as modules or by their layers."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion import naming_program
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import Fqn
from ckptkit.core.model_configs import parse_model_config
from ckptkit.plan.ties import find_tie_candidates, find_tie_conflicts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: E402

from tests.sampled import sampled  # noqa: E402
from tests.small_models import class_named, on_meta, small_model_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of models, about their own defaults
TIED_BY_PATTERNS: dict[str, list[dict[str, Any]]] = {
    "CsmForConditionalGeneration": [],
    "DFineForObjectDetection": [],
    "DabDetrForObjectDetection": [],
    "DeformableDetrForObjectDetection": [
        {"with_box_refine": True},
        {"with_box_refine": True, "two_stage": True},
    ],
    "Deimv2ForObjectDetection": [],
    "DiffusionGemmaForBlockDiffusion": [{"tie_word_embeddings": False}],
    "GroundingDinoForObjectDetection": [{"decoder_bbox_embed_share": False}],
    "MMGroundingDinoForObjectDetection": [
        {"decoder_bbox_embed_share": False},
        {"decoder_cls_embed_share": False},
    ],
    "PPDocLayoutV3ForObjectDetection": [],
    "RTDetrV2ForObjectDetection": [],
    "SamModel": [],
    "UdopEncoderModel": [],
    "Zamba2ForCausalLM": [{"num_mem_blocks": 2}, {"tie_word_embeddings": False}],
    "Zamba2Model": [],
    "ZambaForCausalLM": [{"tie_word_embeddings": False}],
}

QUICK = (  # ties by patterns, by modules and by layers; the others are in `make test-slow`
    *("DabDetrForObjectDetection", "DeformableDetrForObjectDetection", "SamModel"),
    *("UdopEncoderModel", "Zamba2Model", "ZambaForCausalLM", "DiffusionGemmaForBlockDiffusion"),
)


@functools.cache
def found_config(name: str) -> Any:
    """A configuration that is to be copied: to find one that is small takes long."""
    return small_model_config(class_named(name))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, fields, marks=() if name in QUICK else pytest.mark.slow)
        for name, more in TIED_BY_PATTERNS.items()
        for fields in [{}, *more]
    ],
)
@pytest.mark.quick(
    "DeformableDetrForObjectDetection-fields4",
    "DiffusionGemmaForBlockDiffusion-fields8",
    "ZambaForCausalLM-fields23",
)
def test_names_that_save_pretrained_leaves_out_are_known_without_it(
    name: str, fields: dict[str, Any]
) -> None:
    config = copy.deepcopy(found_config(name))
    for field, value in fields.items():
        setattr(config, field, value)
    model = on_meta(class_named(name), config)
    state = model.state_dict()
    kept = remove_tied_weights_from_state_dict(dict(state), model)
    specs = {Fqn(n): (dtype_named(str(t.dtype)), tuple(t.shape)) for n, t in state.items()}
    told = parse_model_config(model.config.to_json_string().encode(), where=name)
    told["architectures"] = [name]
    assert set(find_tie_candidates(told, specs)) == state.keys() - kept.keys()
    assert not find_tie_conflicts(told, specs)
    if not fields:
        assert kept.keys() < state.keys()


@pytest.mark.parametrize(
    "name",
    sampled(
        ["GroundingDinoForObjectDetection", "SamModel", "Zamba2ForCausalLM"],
        ["SamModel", "Zamba2ForCausalLM"],
    ),
)
@pytest.mark.quick("Zamba2ForCausalLM")
def test_a_sharded_checkpoint_holds_every_tied_name(name: str, tmp_path: Path) -> None:
    model_class = class_named(name)
    model = model_class(copy.deepcopy(found_config(name)))
    model.save_pretrained(tmp_path / "hub")
    ckptkit.convert(tmp_path / "hub", tmp_path / "out", to="dcp")
    state, tied = model.state_dict(), model.all_tied_weights_keys
    found = {n: torch.zeros_like(state[n]) for n in {*tied, *tied.values()}}
    assert found
    dcp.load({"model": found}, checkpoint_id=tmp_path / "out/pytorch_model_fsdp_0", no_dist=True)
    assert not [n for n, tensor in found.items() if not torch.equal(tensor, state[n])]


def test_tied_names_that_cannot_be_told_are_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "RTDetrV2ForObjectDetection"
    config = {"architectures": [name], "model_type": "rt_detr_v2"}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text(json.dumps(config))
    tensors = {"model.decoder.bbox_embed.0.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "hub/model.safetensors")
    monkeypatch.setattr(naming_program, "_NEEDED", ("no_such_library",))
    notes: list[str] = []
    ckptkit.convert(
        *(tmp_path / "hub", tmp_path / "out"),
        to="dcp",
        listener=lambda event: notes.extend(getattr(event, "notes", ())),
    )
    assert any(f"{name} ties further names, which are not written" in note for note in notes)


def test_a_class_with_code_of_its_own_is_tied_by_no_pattern() -> None:
    names = {Fqn(f"class_embed.{i}.weight"): (dtype_named("float32"), (2, 2)) for i in range(3)}
    names |= {Fqn(f"model.decoder.{name}"): spec for name, spec in names.items()}
    config: dict[str, Any] = {
        "architectures": ["GroundingDinoForObjectDetection"],
        "model_type": "grounding-dino",
        "auto_map": {"AutoModel": "own.Own"},
    }
    assert not find_tie_candidates(config, names)


def test_a_pattern_that_does_not_fit_the_names_ties_nothing() -> None:
    config = {"architectures": ["RTDetrV2ForObjectDetection"], "model_type": "rt_detr_v2"}
    names = {Fqn("bbox_embed.1.weight"): (dtype_named("float32"), (2, 2))}
    assert not find_tie_candidates(config, names)
