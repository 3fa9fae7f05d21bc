"""What `consolidate` writes is what `save_pretrained` writes: names, types, shapes and bytes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion import names_on_disk as naming
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CannotPlanError, RefusedError
from ckptkit.core.index import Box, Fqn
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    NamingRequest,
    names_from_json,
    names_to_json,
)
from ckptkit.options import NameChoice
from tests.live_truth import refuse
from tests.tensor_images import images

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from ckptkit.hub_names.transformers.answers import answer_names  # noqa: E402
from ckptkit.training import Checkpointer  # noqa: E402
from ckptkit.training.export.output_plan import ExportNames  # noqa: E402
from tests.sampled import sampled  # noqa: E402

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "fsdp2_mixtral"
pytestmark = pytest.mark.filterwarnings("ignore:.*process group.*", "ignore:.*single process.*")

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
QWEN_TEXT = TEXT | {
    "model_type": "qwen2_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 8}
LATENT = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
MAMBA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
NEMOTRON_H = TEXT | {
    "layers_block_type": ["mamba", "moe", "attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
}
GRANITE_HYBRID = (
    {key: value for key, value in TEXT.items() if key != "head_dim"}
    | EXPERTS
    | {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 8,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
    }
)
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}


@dataclass(frozen=True)
class Case:
    """A model class with its small configuration.

    Attributes:
        differs: Whether disk and memory hold other tensors.
        dtype: What the model is trained in.
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    differs: bool = False
    dtype: str = "float32"

    def build(self) -> Any:
        torch.manual_seed(3)
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).to(getattr(torch, self.dtype))


CASES = [
    Case("LlamaForCausalLM", "LlamaConfig", TEXT),
    Case("Qwen2ForCausalLM", "Qwen2Config", TEXT | {"tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "Qwen3Config", TEXT, dtype="bfloat16"),
    Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        TEXT | {"num_experts": 3, "moe_intermediate_size": 8, "tie_word_embeddings": True},
        differs=True,
        dtype="bfloat16",
    ),
    Case("MixtralForCausalLM", "MixtralConfig", TEXT | EXPERTS, differs=True),
    Case("DeepseekV3ForCausalLM", "DeepseekV3Config", TEXT | LATENT, differs=True),
    Case("GptOssForCausalLM", "GptOssConfig", TEXT | EXPERTS),
    Case("Llama4ForCausalLM", "Llama4TextConfig", TEXT | {"num_local_experts": 2}),
    Case("Phi3ForCausalLM", "Phi3Config", TEXT | {"pad_token_id": 0}),
    Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": TEXT | {"model_type": "gemma3_text"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
        differs=True,
        dtype="bfloat16",
    ),
    Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
        differs=True,
    ),
    Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
        differs=True,
    ),
    Case(
        "BertForSequenceClassification",
        "BertConfig",
        {key: value for key, value in TEXT.items() if key != "head_dim"},
    ),
    Case("GPT2LMHeadModel", "GPT2Config", GPT2),
    # Their configurations hold an infinity, which JSON has not.
    Case("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_H, differs=True),
    Case("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_HYBRID, differs=True),
    Case("Mamba2ForCausalLM", "Mamba2Config", MAMBA | {"tie_word_embeddings": True}),
    Case("T5ForConditionalGeneration", "T5Config", T5),
    # Joins two tensors into one on the way to disk.
    Case("Dinov2Model", "Dinov2Config", VISION | {"use_swiglu_ffn": True}, differs=True),
    # Computes with transposed experts, and keeps them so.
    Case(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": QWEN_TEXT
            | {"model_type": "qwen3_vl_moe_text", "num_experts": 2, "moe_intermediate_size": 8},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
]
BY_MODEL = {case.model: case for case in CASES}
QUICK = (  # families of each kind, the others are in `make test-slow`
    *("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
    *("Qwen2VLForConditionalGeneration", "BertForSequenceClassification"),
    *("Mamba2ForCausalLM", "Dinov2Model", "NemotronHForCausalLM"),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[NamingRequest]:
    """Asks transformers in this process, which saves its import; returns what was asked."""
    requests: list[NamingRequest] = []

    def ask(request: NamingRequest, _program: object = None) -> HubNames:
        requests.append(NamingRequest.from_json(request.to_json()))
        found = answer_names(requests[-1])
        return names_from_json(json.loads(json.dumps(names_to_json(found))))

    monkeypatch.setattr(naming, "ask_transformers", ask)
    return requests


def trained(model: Any, folder: Path) -> Path:
    """Saves what training holds, with the configuration beside it."""
    dcp.save(dict(model.state_dict()), checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)
    return folder


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Any, Path, Path]]:
    """Makes a model, what `save_pretrained` writes of it, and a checkpoint, once for all tests."""

    @functools.cache
    def make(case: str) -> tuple[Any, Path, Path]:
        model, folder = BY_MODEL[case].build(), tmp_path_factory.mktemp("made")
        return model, saved(model, folder / "reference"), trained(model, folder / "source")

    return lambda case: make(case.model)


def assert_same_model(out: Path, reference: Path) -> None:
    assert images(out / "model.safetensors") == images(reference / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


@pytest.mark.parametrize(
    "case", sampled(CASES, QUICK, lambda case: case.model), ids=lambda case: case.model
)
@pytest.mark.quick("Dinov2Model", "LlamaForCausalLM", "MixtralForCausalLM", "Mamba2ForCausalLM")
def test_a_model_is_written_as_save_pretrained_writes_it(
    case: Case,
    made: Callable[[Case], tuple[Any, Path, Path]],
    tmp_path: Path,
    asked: list[NamingRequest],
) -> None:
    model, reference, source = made(case)

    manifest = ckptkit.consolidate(source, tmp_path / "out")

    assert_same_model(tmp_path / "out", reference)
    assert config_of(tmp_path / "out") == config_of(reference)
    live = model.state_dict().keys() - model.all_tied_weights_keys.keys()
    assert case.differs == (live != manifest.tensors.keys())
    assert case.differs <= bool(asked)
    assert ("transformers" in manifest.versions) == bool(asked)
    assert ckptkit.verify(tmp_path / "out").problems == ()
    _, loading = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading


@pytest.mark.parametrize(
    "model",
    sampled((case.model for case in CASES if case.differs), ["MixtralForCausalLM", "Dinov2Model"]),
)
def test_a_configuration_without_a_class_leads_to_the_same_names(
    model: str,
    made: Callable[[Case], tuple[Any, Path, Path]],
    tmp_path: Path,
    asked: list[NamingRequest],
) -> None:
    _, reference, whole = made(BY_MODEL[model])
    source = Path(shutil.copytree(whole, tmp_path / "source"))
    config = config_of(source) | {"architectures": None}
    (source / "config.json").write_text(json.dumps(config))
    ckptkit.consolidate(source, tmp_path / "out")
    assert_same_model(tmp_path / "out", reference)
    assert len(asked) == 1


@pytest.mark.parametrize("limit", [{"__float__": "Infinite"}, {"__float__": 1}, "Infinity"])
def test_a_field_that_transformers_refuses_is_named(limit: Any) -> None:
    config = {"model_type": "nemotron_h", "time_step_limit": [0.0, limit]}
    with pytest.raises(CannotPlanError, match=r"refuses config\.json.*time_step_limit"):
        answer_names(NamingRequest(config, None))


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[Any, Path]:
    """A mixture of experts, and what training left of it."""
    model = BY_MODEL["MixtralForCausalLM"].build()
    return model, trained(model, tmp_path / "source")


def test_types_and_files_are_chosen_for_the_tensors_on_disk(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    model.to(torch.bfloat16).save_pretrained(tmp_path / "reference")
    out, half = tmp_path / "out", torch.bfloat16
    ckptkit.consolidate(source, out, dtype="bfloat16", max_shard_size="6KB")
    found = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[k], v) and found[k].dtype == half for k, v in reference.items())
    assert len(list(out.glob("*.safetensors"))) > 2
    assert len(asked) == 1


def test_types_files_and_rows_are_those_of_a_base_with_the_names_of_disk(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    base = tmp_path / "base"
    model.to(torch.bfloat16).resize_token_embeddings(30)
    model.save_pretrained(base, max_shard_size="3KB")
    ckptkit.consolidate(source, tmp_path / "out", base=base, like=base, dtype="base", vocab_size=30)
    files = sorted(file.name for file in base.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == files
    for file in files:
        ours, theirs = load_file(tmp_path / "out" / file), load_file(base / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], v) and ours[k].dtype == v.dtype for k, v in theirs.items())
    assert config_of(tmp_path / "out")["vocab_size"] == 30
    assert len(asked) == 1


def test_live_names_need_no_one_to_be_asked(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    ckptkit.consolidate(source, tmp_path / "out", names="live")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()
    ckptkit.convert(source, tmp_path / "torch", to="torch")
    ckptkit.convert(source, tmp_path / "dcp", to="dcp")
    assert not asked


def test_a_folder_with_the_names_of_disk_keeps_them(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    reference = saved(mixtral[0], tmp_path / "reference")
    ckptkit.consolidate(reference, tmp_path / "out", names="hub")
    assert_same_model(tmp_path / "out", reference)
    assert len(asked) == 1


@pytest.mark.parametrize("model", ["MixtralForCausalLM", "LlavaForConditionalGeneration"])
@pytest.mark.quick("MixtralForCausalLM")
def test_a_base_that_has_live_names_is_followed(
    model: str, tmp_path: Path, asked: list[NamingRequest]
) -> None:
    built = BY_MODEL[model].build()
    base = tmp_path / "base"
    built.save_pretrained(base, save_original_format=False)
    resumed = type(built).from_pretrained(base)
    source = trained(resumed, tmp_path / "source")
    ckptkit.consolidate(source, tmp_path / "out", base=base)
    assert_same_model(tmp_path / "out", saved(resumed, tmp_path / "reference"))
    assert asked[0].base


def test_a_prefix_of_the_base_is_kept(tmp_path: Path, asked: list[NamingRequest]) -> None:
    config = transformers.CLIPTextConfig(**{k: TEXT[k] for k in list(TEXT)[:5]})
    built = transformers.CLIPTextModel(config)
    base = saved(built, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    prefixed = {f"text_model.{name.removeprefix('text_model.')}": v for name, v in weights.items()}
    plain = {name.removeprefix("text_model."): v for name, v in weights.items()}
    forms = []
    for number, form in enumerate((prefixed, plain)):
        save_file(form, base / "model.safetensors", metadata={"format": "pt"})
        resumed = transformers.CLIPTextModel.from_pretrained(base)
        source = trained(resumed, tmp_path / f"source-{number}")
        reference = saved(resumed, tmp_path / f"reference-{number}")
        ckptkit.consolidate(source, tmp_path / f"out-{number}", base=base)
        assert_same_model(tmp_path / f"out-{number}", reference)
        forms.append(load_file(reference / "model.safetensors").keys())
    assert forms[0] != forms[1]
    assert len(asked) == 2


def indexed(model: Any, folder: Path) -> Path:
    """Leaves of a model folder what is there before the weights are downloaded."""
    model.save_pretrained(folder, max_shard_size="6KB")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_tied_head_is_no_difference_from_the_base(
    dtype: Any, tmp_path: Path, asked: list[NamingRequest]
) -> None:
    config = transformers.MixtralConfig(**TEXT, **EXPERTS, tie_word_embeddings=True)
    model = transformers.MixtralForCausalLM(config)
    base = saved(model, tmp_path / "base")
    source = trained(model, tmp_path / "source")
    assert notes_of(source, tmp_path, base=base, dtype=dtype) == []
    assert asked[0].base


def test_the_index_of_a_base_is_enough(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    base = indexed(model, tmp_path / "base")
    ckptkit.consolidate(source, tmp_path / "out", base=base)
    assert_same_model(tmp_path / "out", saved(model, tmp_path / "reference"))
    assert set(asked[0].base) == load_file(tmp_path / "reference" / "model.safetensors").keys()


def test_where_names_do_not_differ_nobody_is_asked_and_no_weights_of_the_base_are_needed(
    tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model = BY_MODEL["LlamaForCausalLM"].build()
    source, base = trained(model, tmp_path / "source"), indexed(model, tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"cut")
    choices: tuple[NameChoice, ...] = ("auto", "hub")
    for names in choices:
        out = tmp_path / names
        ckptkit.consolidate(source, out, base=base, names=names)
        assert_same_model(out, saved(model, tmp_path / "reference"))
    assert not asked


def test_a_transformers_that_does_not_tell_what_was_used_saves_as_of_a_new_model(
    mixtral: tuple[Any, Path],
    tmp_path: Path,
    asked: list[NamingRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.core_model_loading import WeightTransform

    model, source = mixtral
    reference = saved(model, tmp_path / "reference")
    monkeypatch.delattr(WeightTransform, "was_used")  # 5.0 has none
    ckptkit.consolidate(source, tmp_path / "out", base=reference)
    assert_same_model(tmp_path / "out", reference)
    assert asked[0].base


def test_names_that_the_base_has_not_are_told(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    base = saved(model, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    notes = notes_of(source, tmp_path, base=base)
    assert any("lm_head.weight" in note and "base" in note for note in notes)
    assert asked


def notes_of(source: Path, tmp_path: Path, **options: Any) -> list[str]:
    """Consolidates, and returns what was said."""
    notes: list[str] = []

    def listen(event: Any) -> None:
        notes.extend(getattr(event, "notes", ()))

    ckptkit.consolidate(source, tmp_path / "out", listener=listen, **options)
    return notes


def edit_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | values))


def test_code_beside_the_configuration_is_no_obstacle_for_transformers_own_model(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    edit_config(source, auto_map={"AutoModel": "own.OwnModel"})
    (source / "own.py").write_text("raise SystemExit('was run')")
    ckptkit.consolidate(source, tmp_path / "out")
    assert_same_model(tmp_path / "out", saved(model, tmp_path / "reference"))
    assert "auto_map" not in asked[0].config


def test_a_model_with_code_of_its_own_keeps_its_names(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, _ = mixtral
    state = {f"own.{name}": value for name, value in model.state_dict().items()}
    source = tmp_path / "own"
    dcp.save(state, checkpoint_id=source, no_dist=True)
    model.config.save_pretrained(source)
    edit_config(source, auto_map={"AutoModel": "own.OwnModel"})
    notes = notes_of(source, tmp_path)
    assert any("as training holds them" in note and "'own." in note for note in notes)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()
    refuse("code beside config", source, tmp_path / "hub", kind=RefusedError, names="hub")
    assert asked


def test_tensors_that_the_class_has_not_are_refused_unless_they_are_left_out(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, _ = mixtral
    head = {"v_head.summary.weight": torch.ones(1, 16), "v_head.nothing": torch.ones(0, 16)}
    source = tmp_path / "with a head"
    dcp.save(model.state_dict() | head, checkpoint_id=source, no_dist=True)
    model.config.save_pretrained(source)
    with pytest.raises(RefusedError, match=r"2 tensors would not be used, 'v_head.*") as caught:
        ckptkit.consolidate(source, tmp_path / "out")
    assert "--exclude 'v_head.*'" in caught.value.hint
    assert not (tmp_path / "out").exists()
    ckptkit.consolidate(source, tmp_path / "out", exclude=["v_head.*"])
    assert_same_model(tmp_path / "out", saved(model, tmp_path / "reference"))
    assert asked


def test_what_save_pretrained_leaves_out_is_told(
    tmp_path: Path, asked: list[NamingRequest]
) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
    ids = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    config = transformers.MarianConfig(**sizes, **ids, decoder_start_token_id=0)
    model = transformers.MarianMTModel(config)
    notes = notes_of(trained(model, tmp_path / "source"), tmp_path)
    written = load_file(tmp_path / "out" / "model.safetensors").keys()
    unsaved = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    assert written == model.state_dict().keys() - {*unsaved, "lm_head.weight"}
    assert not set(unsaved) & load_file(saved(model, tmp_path / "ref") / "model.safetensors").keys()
    told = [note for note in notes if "names no class" not in note]
    assert [note.split("'")[1] for note in told] == unsaved
    assert all("makes it anew" in note for note in told)
    assert asked


def test_patterns_choose_by_live_names(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    _, source = mixtral
    manifest = ckptkit.consolidate(source, tmp_path / "out", include=["*.down_proj"])
    expected = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"
        for layer in range(2)
        for expert in range(3)
    }
    assert manifest.tensors.keys() == expected
    assert asked


def test_half_of_a_joined_tensor_is_refused(tmp_path: Path, asked: list[NamingRequest]) -> None:
    model = BY_MODEL["Dinov2Model"].build()
    source = trained(model, tmp_path / "source")
    half = next(name for name in model.state_dict() if name.endswith("gate_proj.weight"))
    refuse("left out", source, tmp_path / "out", kind=RefusedError, exclude=[half])
    with pytest.raises(RefusedError, match="bfloat16 and float32"):
        ckptkit.consolidate(source, tmp_path / "out", dtype="bfloat16", keep_dtype=[half])
    assert asked


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "not_there_yet"}, "'not_there_yet'"),
        ({"model_type": None}, "names no model type"),
    ],
)
def test_an_unknown_model_type_is_told_and_its_names_are_left(
    mixtral: tuple[Any, Path],
    tmp_path: Path,
    asked: list[NamingRequest],
    values: dict[str, Any],
    message: str,
) -> None:
    model, source = mixtral
    edit_config(source, **values)
    assert any(message in note for note in notes_of(source, tmp_path))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()
    refuse(message, source, tmp_path / "hub", kind=RefusedError, names="hub")
    assert not asked


def test_without_a_configuration_hub_names_are_refused(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    _, source = mixtral
    (source / "config.json").unlink()
    refuse(r"no config\.json", source, tmp_path / "out", kind=RefusedError, names="hub")
    ckptkit.consolidate(source, tmp_path / "out")
    assert not asked


def test_eight_bit_weights_keep_their_live_names(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, _ = mixtral
    state = {name: value.to(torch.float8_e4m3fn) for name, value in model.state_dict().items()}
    source = tmp_path / "packed"
    dcp.save(state, checkpoint_id=source, no_dist=True)
    model.config.save_pretrained(source)
    assert any("8 bits" in note for note in notes_of(source, tmp_path))
    assert not asked


def test_a_configuration_from_a_packed_base_does_not_call_dense_weights_packed(
    mixtral: tuple[Any, Path], tmp_path: Path, asked: list[NamingRequest]
) -> None:
    model, source = mixtral
    base = saved(model.to(torch.bfloat16), tmp_path / "base")
    expected = config_of(base)
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if "proj" in name or "experts" in name]:
        weights[f"{name}_scale_inv"] = torch.ones(1, 1)
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    edit_config(base, quantization_config={"quant_method": "fp8"})
    (source / "config.json").unlink()
    notes = notes_of(source, tmp_path, base=base, dtype="bfloat16")
    assert any("quantization_config, which is left out" in note for note in notes)
    assert config_of(tmp_path / "out") == expected
    assert_same_model(tmp_path / "out", saved(model, tmp_path / "reference"))
    with pytest.raises(RefusedError, match="float8_e4m3fn in the base model"):
        ckptkit.consolidate(source, tmp_path / "packed", base=base, dtype="base")
    again = ckptkit.consolidate(base, tmp_path / "again")  # packed weights stay what they are
    assert config_of(tmp_path / "again")["quantization_config"] == {"quant_method": "fp8"}
    assert again.tensors.keys() == weights.keys()
    assert asked


def test_no_conversion_of_transformers_computes() -> None:
    """All of them are made of these operations, which move, so that what they make streams."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    moving = {"Chunk", "Concatenate", "Interleave", "MergeModulelist", "PermuteForRope", "Split"}
    moving |= {"ErnieFuseAndSplitTextVisionExperts", "Transpose"}
    listed = conversion_mapping._build_checkpoint_conversion_mapping()
    used = {
        type(operation).__name__
        for entries in listed.values()
        for entry in entries
        if isinstance(entry, WeightConverter)
        for operation in entry.operations
    }
    assert used <= moving


@pytest.mark.parametrize(
    "model",
    sampled(
        ["LlamaForCausalLM", *(case.model for case in CASES if case.differs)],
        ["LlamaForCausalLM", "MixtralForCausalLM", "Dinov2Model"],
    ),
)
def test_an_export_has_the_names_of_save_pretrained_too(model: str, tmp_path: Path) -> None:
    built = BY_MODEL[model].build()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.export(tmp_path / "out", state={"model": built}).result(60)
    assert_same_model(tmp_path / "out", saved(built, tmp_path / "reference"))
    manifest = json.loads((tmp_path / "out" / "ckptkit.json").read_bytes())
    assert ("transformers" in manifest["versions"]) == BY_MODEL[model].differs


def test_an_export_goes_on_under_live_names_where_transformers_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: Any) -> None:
        raise KeyError("no such layer")

    monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", fail)
    model = BY_MODEL["MixtralForCausalLM"].build()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.export(tmp_path / "out", state={"model": model}).result(60)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()
    assert "no such layer" in caplog.text


def in_two(tensor: Any, axis: int) -> Iterator[tuple[Box, Any]]:
    """Cuts a tensor in two boxes across an axis."""
    axis = min(axis, tensor.dim() - 1)
    half = (tensor.shape[axis] + 1) // 2
    for low, part in zip((0, half), tensor.split(half, axis), strict=False):
        offsets = [0] * tensor.dim()
        offsets[axis] = low
        yield Box(tuple(offsets), tuple(part.shape)), part


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("model", ["MixtralForCausalLM", "Dinov2Model"])
def test_shards_of_live_tensors_become_parts_of_those_on_disk(model: str, axis: int) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    built = BY_MODEL[model].build()
    live = dict(built.state_dict())
    tensors = {Fqn(k): (dtype_named(str(v.dtype)), tuple(v.shape)) for k, v in live.items()}
    config = built.config.to_dict() | {"architectures": [model]}
    names = answer_names(NamingRequest(config, tensors))
    disk = ExportNames(names)
    for name, expected in revert_weight_conversion(built, live).items():
        made, written = torch.zeros_like(expected), torch.zeros_like(expected)
        for source in disk.sources(name):
            for box, part in disk.parts(name, source, in_two(live[source], axis)):
                at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                made[at] = part
                written[at] += 1
        assert torch.equal(made, expected)
        assert bool((written == 1).all())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes of real shards, asking transformers in a process of its own."""
    out = tmp_path_factory.mktemp("mixtral") / "out"
    ckptkit.consolidate(FIXTURE / "checkpoint", out, base=FIXTURE / "saved_pretrained", names="hub")
    return out


def test_real_shards_become_what_save_pretrained_wrote(real: Path) -> None:
    assert_same_model(real, FIXTURE / "saved_pretrained")
    assert config_of(real) == config_of(FIXTURE / "saved_pretrained")
    manifest = json.loads((real / "ckptkit.json").read_bytes())
    assert manifest["versions"]["transformers"] == transformers.__version__
    assert manifest["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
