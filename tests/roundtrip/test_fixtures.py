"""Every real checkpoint under `fixtures/` is consolidated and compared, byte by byte, with truth.

The truth is the live model's gathered state dict, written beside each checkpoint when it was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckptkit
from tests.tensor_images import Image, image_of, images

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint, or one part of one, and its truth.

    Attributes:
        folder: The fixture.
        inner: The path to give, below `checkpoint/`.
        select: Which of several state dicts to take.
        truth: The file that holds the truth.
        absent: Names of the truth that the output rightly lacks.
    """

    folder: str
    inner: str = ""
    select: str | None = None
    truth: str = "truth.safetensors"
    absent: frozenset[str] = frozenset()

    @property
    def source(self) -> Path:
        return FIXTURES / self.folder / "checkpoint" / self.inner

    def __str__(self) -> str:
        return "-".join(filter(None, (self.folder, self.inner.replace("/", "_"), self.select)))


STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
RELEASES = ("2_1", "2_2", "2_3", "2_4", "2_6", "2_9", "2_14", "2_15")
TIED = frozenset({HEAD})
CASES = (
    Case("fsdp2_plain"),
    Case("fsdp2_llama_flat"),
    Case("fsdp2_hsdp"),
    Case("fsdp2_tensor_parallel"),
    Case("dtensor_column_split"),
    *(Case(f"fsdp1_{key}_{kind}") for key in STRATEGIES for kind in ("orig", "flat")),
    Case("accelerate_fsdp1_bf16"),
    Case("accelerate_fsdp1_flat"),
    Case("accelerate_fsdp2_bf16_tied"),
    Case("accelerate_fsdp2_bf16_tied", "pytorch_model_fsdp_0"),
    Case("accelerate_fsdp2_cpu_offload"),
    Case("accelerate_fsdp2_tied_with_config", absent=TIED),
    Case("accelerate_fsdp2_two_models", select="pytorch_model_fsdp_0"),
    Case("accelerate_fsdp2_two_models", select="pytorch_model_fsdp_1", truth="truth_1.safetensors"),
    Case("accelerate_fsdp2_two_models", "pytorch_model_fsdp_1", truth="truth_1.safetensors"),
    Case("trainer_fsdp1"),
    Case("trainer_fsdp2"),
    Case("trainer_fsdp2", "checkpoint-2", truth="truth_step_2.safetensors"),
    Case("trainer_fsdp2", "checkpoint-4"),
    Case("fsdp2_model_and_ema", select="model"),
    Case("fsdp2_model_and_ema", select="ema", truth="truth_ema.safetensors"),
    Case("fsdp2_actor_and_critic", select="actor", truth="truth_actor.safetensors"),
    Case("fsdp2_actor_and_critic", "critic", truth="truth_critic.safetensors"),
    Case("fsdp2_extra_state"),
    Case("fsdp2_without_checksums"),
    Case("dcp_dtypes_and_layouts"),
    Case("hf_tied", absent=TIED),
    Case("hf_sharded"),
    Case("torch_bin_tied", absent=TIED),
    Case("torch_bin_sharded"),
    Case("torch_nested"),
    Case("torch_dtypes_and_layouts"),
    *(Case(f"dcp_torch_{r}", "fsdp1", truth="truth_fsdp1.safetensors") for r in RELEASES),
    *(Case(f"dcp_torch_{r}", "dtensor", truth="truth_dtensor.safetensors") for r in RELEASES),
)
LLAMAS = (
    "fsdp2_llama_flat",
    "accelerate_fsdp1_bf16",
    "accelerate_fsdp2_bf16_tied",
    "accelerate_fsdp2_tied_with_config",
    "trainer_fsdp2",
    "hf_tied",
    "torch_bin_sharded",
)
OPTIMIZERS = (
    "fsdp2_plain",
    "fsdp2_tensor_parallel",
    "accelerate_fsdp1_bf16",
    "accelerate_fsdp2_bf16_tied",
)


def tensors_in(*files: Path) -> dict[str, torch.Tensor]:
    """Reads safetensors files with the safetensors library; no name may appear twice."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def truth_of(case: Case) -> dict[str, torch.Tensor]:
    return tensors_in(FIXTURES / case.folder / case.truth)


def expected(case: Case) -> dict[str, Image]:
    kept = {name: t for name, t in truth_of(case).items() if name not in case.absent}
    return images(kept)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.quick(
    "accelerate_fsdp1_flat",
    "accelerate_fsdp2_tied_with_config",
    "accelerate_fsdp2_two_models-pytorch_model_fsdp_1_0",
    "dcp_dtypes_and_layouts",
    "dcp_torch_2_1-fsdp1",
    "dcp_torch_2_15-dtensor",
    "dtensor_column_split",
    "fsdp1_hybrid_shard_orig",
    "fsdp1_shard_grad_op_flat",
    "fsdp2_actor_and_critic-critic",
    "fsdp2_extra_state",
    "fsdp2_hsdp",
    "fsdp2_tensor_parallel",
    "fsdp2_without_checksums",
    "hf_tied",
    "torch_bin_sharded",
    "torch_dtypes_and_layouts",
    "trainer_fsdp2-checkpoint-2",
)
def test_consolidate_is_bit_equal_to_the_live_model(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(case.source, out, select=case.select)
    assert images(tensors_in(*out.glob("*.safetensors"))) == expected(case)


@pytest.mark.parametrize("folder", ["fsdp2_plain", "fsdp1_full_shard_orig", "hf_sharded"])
def test_small_output_files_hold_the_same_and_the_index_tells_where(
    folder: str, tmp_path: Path
) -> None:
    case, out = Case(folder), tmp_path / "out"
    ckptkit.consolidate(case.source, out, max_shard_size=1_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert images(tensors_in(*files)) == expected(case)
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"] == {name: file.name for file in files for name in tensors_in(file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in truth_of(case).values())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.quick(
    "accelerate_fsdp1_flat",
    "accelerate_fsdp2_two_models-pytorch_model_fsdp_1_0",
    "dcp_dtypes_and_layouts",
    "dcp_torch_2_1-fsdp1",
    "fsdp1_hybrid_shard_orig",
    "fsdp2_tensor_parallel",
    "hf_sharded",
    "hf_tied",
    "torch_bin_sharded",
    "torch_nested",
)
def test_a_single_tensor_read_through_open_is_bit_equal(case: Case) -> None:
    truth = truth_of(case)
    with ckptkit.open(case.source, select=case.select) as checkpoint:
        names = set(checkpoint.keys())
        assert names >= truth.keys() - case.absent
        for name in truth.keys() & names:
            assert image_of(checkpoint[name]) == image_of(truth[name]), name


@pytest.mark.parametrize("folder", ["fsdp2_plain", "fsdp1_hybrid_shard_flat"])
def test_torchs_own_converter_agrees(folder: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    merged = tmp_path / "merged.pt"
    dcp_to_torch_save(Case(folder).source, merged)
    theirs = torch.load(merged, weights_only=True)["model"]  # noqa: TID251 - the oracle
    ckptkit.consolidate(Case(folder).source, tmp_path / "out")
    assert images(tensors_in(tmp_path / "out" / "model.safetensors")) == images(theirs)


def test_extra_state_is_listed_apart_from_the_model_and_left_out() -> None:
    inspection = ckptkit.inspect(Case("fsdp2_extra_state").source)
    parts = {tensor["name"]: tensor["part"] for tensor in inspection.to_json()["tensors"]}
    assert parts["0._extra_state.history"] == "other"
    assert parts["0.first.weight"] == "model"


@pytest.mark.parametrize("folder", OPTIMIZERS)
def test_optimizer_state_is_listed_apart_from_the_model(folder: str) -> None:
    case = Case(folder)
    inspection = ckptkit.inspect(case.source)
    listed = {t["name"]: t for t in inspection.to_json()["tensors"] if t["part"] == "optimizer"}
    truth = tensors_in(FIXTURES / case.folder / "truth_optimizer.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in truth.items()}
    assert {name: listed[name]["shape"] for name in shapes} == shapes


@pytest.mark.parametrize(
    ("folder", "written_twice"),
    [("accelerate_fsdp2_tied_with_config", False), ("accelerate_fsdp2_bf16_tied", True)],
)
def test_tied_tensors_are_written_once_where_a_config_says_so(
    folder: str, written_twice: bool, tmp_path: Path
) -> None:
    ckptkit.consolidate(Case(folder).source, tmp_path / "out")
    assert (HEAD in tensors_in(tmp_path / "out" / "model.safetensors")) == written_twice


def test_config_and_tokenizer_beside_the_shards_are_copied(tmp_path: Path) -> None:
    ckptkit.consolidate(Case("accelerate_fsdp2_tied_with_config").source, tmp_path / "out")
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folder", LLAMAS)
@pytest.mark.quick("accelerate_fsdp2_bf16_tied", "fsdp2_llama_flat")
def test_transformers_loads_the_output_and_computes_the_same_logits(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    truth, out = truth_of(Case(folder)), tmp_path / "out"
    config = _config_of(truth)
    base = tmp_path / "base"
    config.save_pretrained(base)
    ckptkit.consolidate(Case(folder).source, out, base=base)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    live = LlamaForCausalLM(config)
    live.load_state_dict(truth, strict=True)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, live.eval()(tokens).logits)


def _config_of(truth: Mapping[str, torch.Tensor]) -> Any:
    """The config of the fixtures' Llama, tied where the two matrices are equal."""
    from transformers import LlamaConfig

    embedding = truth["model.embed_tokens.weight"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=embedding.shape[0],
        hidden_size=embedding.shape[1],
        intermediate_size=truth["model.layers.0.mlp.up_proj.weight"].shape[0],
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        tie_word_embeddings=torch.equal(embedding, truth[HEAD]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
