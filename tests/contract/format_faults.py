"""The checkpoints that are damaged in every way, one row for each format and kind of writer.

A row says what the generic tests of `test_format_faults.py` cannot know: which files are one
rank's, which hold pickles, and what cannot be seen by construction. Everything else holds for all
formats: what is damaged is refused with a proper error and nothing is written, or the damage is
of no matter and the right bytes come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
_DCP_STEPS = (
    "a '.distcp' file names neither its save nor its step: one of equal sizes and whole"
    " archives is as good as the right one"
)
_DCP_STALE = "'.metadata' names the files that it means; what else lies there is left alone"
_WITH_OPTIMIZER = {"to": "torch", "optimizer": True}
_NO_CHECKSUM = "safetensors files have no checksums"


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A checkpoint, and what of it can be damaged.

    All files are named by their paths below the checkpoint's folder; patterns are those of
    `fnmatch`, whose `*` also stands for `/`.
    """

    fixture: str  # its folder in `fixtures/`
    checkpoint: str = "checkpoint"  # the folder below it that is opened
    # Of `ckptkit.convert`, whose `to` is `hf` unless given. Where files also hold the state of an
    # optimizer, it should be asked for: then every byte of them matters.
    options: Mapping[str, Any] = field(default_factory=dict)
    # Patterns of the files without which nothing may come out, besides those that hold elements of
    # the model: those are known from the index.
    needed: tuple[str, ...] = ()
    # Patterns of files beside the model that change what comes out, and how.
    advisory: Mapping[str, str] = field(default_factory=dict)
    # Patterns of the files of one rank each; not one may be lost unnoticed.
    ranks: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()  # patterns of files that are pickles
    # Patterns of files that are archives of `torch.save`, one or several end to end.
    archives: tuple[str, ...] = ()
    # Patterns of files in which a flipped bit cannot always be seen, and why.
    unproven: Mapping[str, str] = field(default_factory=dict)
    # Files that an older run of another world size left: the new name, and which file of the
    # checkpoint is laid there.
    stale: Mapping[str, str] = field(default_factory=dict)
    stale_is_left_alone: str = ""  # why such files are of no matter; empty where they are refused
    # Files that a file of another step is put in place of: the name, and the path of the other in
    # `fixtures/`.
    of_another_step: Mapping[str, str] = field(default_factory=dict)
    step_is_unseen: str = ""  # why that cannot be seen; empty where it is refused

    @property
    def path(self) -> Path:
        return FIXTURES / self.fixture / self.checkpoint


def _accelerate(
    fixture: str, checkpoint: str = "checkpoint", ranks: tuple[str, ...] = (), **further: Any
) -> FaultCase:
    model = "pytorch_model_fsdp_0"
    return FaultCase(
        fixture,
        checkpoint,
        needed=("*.metadata",),
        ranks=ranks or (f"{model}/__*_0.distcp",),
        pickles=("*.metadata",),
        archives=("*.distcp",),
        stale={f"{model}/__2_0.distcp": f"{model}/__1_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
        **further,
    )


def _zero(fixture: str, *, step: int, **further: Any) -> FaultCase:
    folder, last = f"global_step{step}", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    return FaultCase(
        fixture,
        ranks=("*_states.pt",),
        archives=("*_states.pt",),
        stale={f"{folder}/{last.replace('rank_1', 'rank_7')}": f"{folder}/{last}"},
        **further,
    )


def _universal(fixture: str) -> FaultCase:
    return FaultCase(fixture, options=_WITH_OPTIMIZER, ranks=("*.pt",), archives=("*.pt",))


DCP = (
    FaultCase(
        "megatron_tensor_parallel",
        "checkpoint/iter_0000007",
        options={"map": "none"},
        needed=(".metadata",),
        ranks=("__*.distcp",),
        pickles=(".metadata",),
        archives=("*.distcp", "common.pt"),
        stale={"__2_0.distcp": "__1_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
    ),
    FaultCase(
        "fsdp2_hsdp",
        needed=(".metadata",),
        ranks=("__*_0.distcp",),
        pickles=(".metadata",),
        archives=("*.distcp",),
        stale={"__4_0.distcp": "__3_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
    ),
    *(
        FaultCase(
            fixture,
            needed=(".metadata",),
            ranks=("__*_0.distcp",),
            pickles=(".metadata",),
            archives=("*.distcp",),
        )
        for fixture in ("fsdp1_full_shard_flat", "dcp_dtypes_and_layouts", "dtensor_column_split")
    ),
    _accelerate(
        "accelerate_fsdp2_bf16_tied",
        options=_WITH_OPTIMIZER,
        ranks=("*/__*_0.distcp",),
    ),
    _accelerate(
        "trainer_fsdp2",
        "checkpoint/checkpoint-4",
        of_another_step={
            "pytorch_model_fsdp_0/__0_0.distcp": (
                "trainer_fsdp2/checkpoint/checkpoint-2/pytorch_model_fsdp_0/__0_0.distcp"
            )
        },
        step_is_unseen=_DCP_STEPS,
    ),
)
ZERO = (
    _zero("zero1_bf16", step=2),
    _zero("zero2_round_robin", step=2),
    _zero("zero3_bf16", step=2),
    _zero("zero1_adam", step=2, options=_WITH_OPTIMIZER),
    _zero("zero3_adam", step=2, options=_WITH_OPTIMIZER),
    _zero("autotp_zero1", step=2, options=_WITH_OPTIMIZER),
    _zero("experts_zero1", step=2, options=_WITH_OPTIMIZER),
    FaultCase(
        "pipeline_zero1_tied",
        options=_WITH_OPTIMIZER,
        ranks=("*optim_states.pt", "*mp_rank_0?_model_states.pt", "*layer_0[0145]*"),
        advisory={"*layer_03*": "nothing names a layer that is not trained"},
        archives=("*_states.pt",),
    ),
    _universal("universal_small_zero1"),
    _universal("universal_small_zero3"),
)
RANK_FILES = (
    FaultCase(
        "rank_files_torch_2_4",
        ranks=("model_rank*.pt",),
        archives=("*.pt",),
        stale={"model_rank4.pt": "model_rank3.pt"},
    ),
    FaultCase(
        "verl_fsdp1_sharded",
        "checkpoint/global_step_2/actor",
        ranks=("*_rank_?.pt",),
        archives=("*.pt",),
        stale={"model_world_size_4_rank_1.pt": "model_world_size_2_rank_1.pt"},
    ),
    FaultCase(
        "verl_fsdp2",
        "checkpoint/global_step_4/actor",
        options=_WITH_OPTIMIZER,
        ranks=("*_rank_?.pt",),
        archives=("*.pt",),
        stale={"model_world_size_2_rank_2.pt": "model_world_size_2_rank_1.pt"},
        of_another_step={
            "model_world_size_2_rank_1.pt": (
                "verl_fsdp2/checkpoint/global_step_2/actor/model_world_size_2_rank_1.pt"
            )
        },
        step_is_unseen="verl's files of weights do not tell their step",
        advisory={"huggingface/config.json": "it tells which weights are tied"},
    ),
    FaultCase(
        "rank_files_local_orig",
        ranks=("*.bin",),
        archives=("*.bin",),
        stale={"pytorch_model_fsdp_rank2.bin": "pytorch_model_fsdp_rank1.bin"},
    ),
    FaultCase(
        "fairscale_apart",
        ranks=("*.pt",),
        archives=("*.pt",),
        stale={"weights_rank_2.pt": "weights_rank_1.pt"},
    ),
)
TORCH = (
    FaultCase(
        "torch_bin_sharded",
        ranks=("*.bin",),
        archives=("*.bin",),
    ),
    FaultCase("torch_nested", ranks=("last.pt",), archives=("last.pt",)),
    FaultCase("torch_dtypes_and_layouts", ranks=("weights.pt",), archives=("weights.pt",)),
    FaultCase(
        "torch_legacy_training",
        ranks=("*.pth.tar",),
        unproven={"*.pth.tar": "files from before torch 1.6 have no checksums"},
    ),
    FaultCase("accelerate_ddp_bin", ranks=("pytorch_model.bin",), archives=("*.bin",)),
    FaultCase("lightning_hyperparameters", ranks=("last.ckpt",), archives=("last.ckpt",)),
)
SAFETENSORS = (
    FaultCase(
        "hf_sharded",
        ranks=("*.safetensors",),
        unproven={"*.safetensors": _NO_CHECKSUM},
    ),
)
HF_SHARDS = (
    FaultCase(
        "dcp_hf_pretrained",
        ranks=("shard-*.safetensors",),
        stale={
            "shard-00003-model-00001-of-00001.safetensors": (
                "shard-00002-model-00001-of-00001.safetensors"
            )
        },
        unproven={"*.safetensors": _NO_CHECKSUM},
        advisory={"config.json": "shapes are compared with it"},
    ),
    FaultCase(
        "dcp_images_fsdp2",
        needed=(".metadata",),
        ranks=("__*_0.distcp",),
        stale={"__3_0.distcp": "__2_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
        pickles=(".metadata",),
        unproven={"*.distcp": _NO_CHECKSUM},
    ),
    FaultCase(
        "dcp_zstd_fsdp2",
        options=_WITH_OPTIMIZER,
        needed=(".metadata",),
        ranks=("__*_0.distcp",),
        stale={"__3_0.distcp": "__2_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
        pickles=(".metadata",),
    ),
)
_MANIFEST = "the manifest names the files that it means; what else lies there is left alone"
TORCHSNAPSHOT = (
    FaultCase(
        "torchsnapshot_dtensor",
        needed=(".snapshot_metadata",),
        ranks=("batched/*",),
        unproven={"*": "torchsnapshot stores no checksums"},
        stale={"sharded/model/weight_0_0": "batched/e3e70682-c209-4cac-a29f-6fbed82c07cd"},
        stale_is_left_alone=_MANIFEST,
    ),
    FaultCase(
        "torchsnapshot_chunked",
        needed=(".snapshot_metadata",),
        ranks=("batched/*", "replicated/*"),
        archives=("replicated/*",),
        unproven={
            ".snapshot_metadata": "torchsnapshot stores no checksums",
            "batched/*": "torchsnapshot stores no checksums",
        },
    ),
)
_NO_CHECKSUM_OF_CHUNKS = "neither zarr nor OCDBT has checksums of chunks"
ORBAX = (
    FaultCase(
        "orbax_two_hosts",
        "checkpoint/10/state",
        needed=("manifest.ocdbt", "d/*"),
        advisory={"ocdbt.process_*/d/*": "its end may be of a tree that the merged one replaces"},
        unproven={
            "_METADATA": "it names arrays and their paths, and has no checksum",
            "ocdbt.process_*/d/*": _NO_CHECKSUM_OF_CHUNKS,
        },
    ),
    FaultCase(
        "orbax_folders",
        "checkpoint/10/default",
        needed=("*/.zarray",),
        ranks=("params.*/0*",),
        unproven={"*": "zarr has no checksums"},
    ),
)
_LAYER_0 = "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-"
NANOTRON = (
    FaultCase(
        "nanotron_llama_tp2_pp2",
        "checkpoint/7",
        options={"base": str(FIXTURES / "nanotron_llama_tp2_pp2")},
        needed=("checkpoint_metadata.json",),
        ranks=("model/*.safetensors",),
        advisory={
            "model_config.json": "it says which map is the right one",
            "*final_layer_norm*": "only the map knows that there has to be one",
        },
        unproven={"*.safetensors": _NO_CHECKSUM},
        stale={f"{_LAYER_0}2-of-2.safetensors": f"{_LAYER_0}1-of-2.safetensors"},
    ),
)
TORCH_CHECKPOINTING = (
    FaultCase(
        "torch_experimental",
        options=_WITH_OPTIMIZER,
        ranks=("checkpoint_*.pt",),
        archives=("*.pt",),
        stale={"checkpoint_2.pt": "checkpoint_1.pt"},
    ),
    FaultCase(
        "torch_checkpointing",
        options=_WITH_OPTIMIZER,
        ranks=("model_*.pt", "optimizer_*.pt"),
        pickles=("metadata.pkl",),
        archives=("model_*.pt", "optimizer_*.pt"),
        stale={"model_2.pt": "model_1.pt"},
    ),
    FaultCase(
        "torch_checkpointing_safetensors",
        needed=("metadata.pkl",),
        ranks=("model_*.safetensors",),
        pickles=("metadata.pkl",),
        unproven={"model_*": _NO_CHECKSUM, "metadata.pkl": "it has no checksum either"},
        stale={"model_2.safetensors": "model_1.safetensors"},
    ),
)
FRAMEWORKS = (
    FaultCase(
        "torchtitan_steps",
        "checkpoint/step-10",
        options=_WITH_OPTIMIZER,
        needed=(".metadata",),
        ranks=("__*_0.distcp",),
        pickles=(".metadata",),
    ),
    FaultCase(
        "lightning_fabric_sharded",
        options=_WITH_OPTIMIZER,
        needed=("*/.metadata",),
        ranks=("*/__*_0.distcp",),
        pickles=("*/.metadata",),
        archives=("*.distcp",),
    ),
)
MEGATRON = (
    FaultCase(
        "megatron_fsdp_llama_tp2",
        "checkpoint/iter_0000007",
        options={"map": "none"},
        needed=(".metadata",),
        ranks=("__*_0.distcp",),
        pickles=(".metadata",),
        archives=("*.distcp",),
        stale={"__4_0.distcp": "__3_0.distcp"},
        stale_is_left_alone=_DCP_STALE,
    ),
    FaultCase(
        "megatron_ranks_llama_tp2_pp2",
        "checkpoint/iter_0000007",
        options={"map": "none"},
        ranks=("*/model_optim_rng.pt",),
        archives=("*/model_optim_rng.pt",),
        stale={"mp_rank_02_000/model_optim_rng.pt": "mp_rank_01_000/model_optim_rng.pt"},
    ),
    FaultCase(
        "megatron_ranks_qwen2_moe_tp2_ep2",
        "checkpoint/iter_0000007",
        options={"map": "none"},
        ranks=("*/model_optim_rng.pt",),
        archives=("*/model_optim_rng.pt",),
        stale={"mp_rank_00_001/model_optim_rng.pt": "mp_rank_01_001/model_optim_rng.pt"},
    ),
)
META = (
    FaultCase(
        "meta_llama_3",
        options={"map": "none"},
        needed=("params.json",),
        ranks=("consolidated.*.pth",),
        archives=("*.pth",),
        stale={"consolidated.02.pth": "consolidated.01.pth"},
        of_another_step={"consolidated.01.pth": "meta_llama_2/checkpoint/consolidated.01.pth"},
    ),
    FaultCase(
        "meta_llama_1",
        options={"map": "none"},
        needed=("params.json",),
        ranks=("consolidated.*.pth",),
        archives=("*.pth",),
    ),
)
CASES = (
    *DCP,
    *ZERO,
    *RANK_FILES,
    *TORCH,
    *SAFETENSORS,
    *HF_SHARDS,
    *TORCHSNAPSHOT,
    *ORBAX,
    *NANOTRON,
    *TORCH_CHECKPOINTING,
    *FRAMEWORKS,
    *MEGATRON,
    *META,
)
