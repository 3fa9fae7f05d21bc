"""What training frameworks leave behind, as data: a profile of each.

Readers know how bytes are stored (DCP, torch files, files of ranks, safetensors, ZeRO), and no
framework. What differs between frameworks is here: how folders and tensors are called, which files
show who wrote them, which folders hold a copy of the model, where the configuration is. A framework
that stores its weights in a known form costs one profile, a fixture, and a name map if its names
are its own. Formats that are known and not read
are in `ckptkit.core.unread_formats`.

Patterns are regular expressions: those of folders and files for a whole name, those of tensors and
modules for a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

PLAIN_FOLDERS = frozenset({"model", "actor", "critic", "policy", "value", "ckpt", "weights"})
"""Folders of weights that any program may have called so."""
OLMO_CORE = "OLMo-core"
MEGATRON_OF_VERL = "dist_ckpt"
"""The folder in which verl has Megatron-Core save; `--select` names the one above."""

HYBRID_LAYERS = "hybrid_layers"
"""Of a checkpoint's settings: how many layers a pattern of Megatron-Core's HybridModel has."""
ROW_MAJOR = "row-major"


class Profile(Struct, frozen=True):
    """How a framework calls what it writes.

    Attributes:
        name: The framework, as its users write it.
        source: Where the facts are from: files or functions of it, and versions.
        fixtures: Folders of `fixtures/` that it wrote.
        package: The package of the classes that only its own files name.
        bare: Of its own writer of DCP, which stores elements without a container: the table of
            the metadata that has their order, or `row-major`.
        mark: A file beside the weights, or in the folder above, that no other framework writes.
        tensors: A part of a name that only its own models have.
        beside: The same, where only models that have both are its own.
        modules: The same for a module that is adapted; models of users may have such names, too.
        weights: Folders below a step that hold a state dict.
        copies: Folders of the same model in another form, below the weights or their step. Each
            has the format of the weights, or a file that is one of theirs.
        settings: Folders with configuration and tokenizer, below the weights or the step.
        counters: Files below a step with its number, each with the key of that.
        beside_run: The name of the folder with the steps, and that of the configuration's folder.
        options: Files of plain YAML beside the weights with what decided their form, and what each
            of their keys is called here: by Transformers, by PEFT, or by `joined`.
        merged: Files of adapters. The model in the same folder has the adapter merged already.
        joined: Modules of several matrices whose adapter has a part for each that is adapted: how
            `options` name these.
        own_tool: What else makes a model of an adapter, as a sentence.
        wrapper: A class that a whole state dict is in, and the attribute that has it.
    """

    name: str
    source: str = ""
    fixtures: tuple[str, ...] = ()
    package: str = ""
    bare: str = ""
    mark: str = ""
    tensors: str = ""
    beside: str = ""
    modules: str = ""
    weights: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    counters: tuple[tuple[str, str], ...] = ()
    beside_run: tuple[str, str] | tuple[()] = ()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    merged: str = ""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_tool: str = ""
    wrapper: tuple[str, str] | tuple[()] = ()


_OF_LITGPT = ("lora_query", "lora_key", "lora_value")

# A name or a file that fits several profiles is of the first of them.
PROFILES = (
    Profile(
        "Transformers Trainer",
        "transformers/trainer.py, transformers 4.36 and 5.23",
        ("trainer_fsdp1", "trainer_fsdp2", "trainer_4_36_fsdp1"),
        mark="trainer_state.json",
        counters=(("trainer_state.json", "global_step"),),
    ),
    Profile(
        "accelerate",
        "accelerate/utils/fsdp_utils.py (`save_fsdp_model`), accelerate 0.26 to 1.15",
        ("accelerate_0_26_fsdp1", "accelerate_fsdp1_flat", "accelerate_fsdp2_tied_with_config"),
        weights=(r"pytorch_model_fsdp_\d+", r"pytorch_model(_\d+)?"),  # the latter for DeepSpeed
    ),
    Profile(
        "DeepSpeed",
        "deepspeed/runtime/engine.py (`save_checkpoint`), DeepSpeed 0.14 to 0.19",
        ("zero1_adam", "autotp_zero1", "experts_zero1", "pipeline_zero1"),
    ),
    Profile(
        "Megatron-Bridge",
        "megatron/bridge/training/checkpointing.py, Megatron-Bridge 0.5",
        mark="run_config.yaml",
        copies={"hf": "run_config.yaml"},
        settings=("hf", "tokenizer"),
    ),
    Profile(
        "NeMo 2",
        "nemo/lightning/pytorch/callbacks/model_checkpoint.py, NeMo 2",
        mark="context/io.json",
        settings=("context/artifacts", "context/nemo_tokenizer"),
    ),
    Profile(
        "verl",
        "verl/utils/checkpoint/fsdp_checkpoint_manager.py, verl 0.5 to 0.9",
        ("verl_fsdp2", "verl_fsdp1", "verl_hsdp", "verl_0_9_fsdp2"),
        mark="transformer_config.json",
        weights=(MEGATRON_OF_VERL,),
        copies={"huggingface": "rank-files"},
        settings=("huggingface",),
    ),
    Profile(
        "NeMo-RL",
        "nemo_rl/utils/checkpoint.py",
        settings=("tokenizer",),
    ),
    Profile(
        "NeMo Automodel",
        "nemo_automodel/components/checkpoint/addons.py, Automodel 0.3",
        weights=("consolidated",),
        settings=(".hf_metadata",),
    ),
    Profile(
        "VeOmni",
        "veomni/checkpoint, VeOmni 0.1.12",
        weights=("hf_ckpt",),
        copies={"hf_ckpt": "dcp"},
        settings=("hf_ckpt",),
        beside_run=("checkpoints", "model_assets"),
    ),
    Profile(
        "LeRobot",
        "lerobot/utils/train_utils.py, lerobot 0.4",
        weights=("pretrained_model",),
        counters=(("training_state/training_step.json", "step"),),
    ),
    Profile(
        OLMO_CORE,
        "olmo_core/distributed/checkpoint, olmo_core/nn/transformer/config.py, OLMo-core 3",
        ("olmo_core_olmo2", "olmo_core_olmo3", "olmo_core_flex_olmo"),
        package="olmo_core",
        tensors=r"(?:^|\.)blocks\.\d+\.attention\.w_out\.weight$",
    ),
    Profile(
        "ByteCheckpoint",
        "bytecheckpoint 0.0.2",
        package="bytecheckpoint",
        bare="all_tensor_metadata",
    ),
    Profile(
        "DLRover",
        "dlrover/trainer/torch/flash_checkpoint/fsdp_engine.py, DLRover 0.6",
        ("dlrover_fsdp",),
        package="dlrover",
        bare=ROW_MAJOR,  # it copies each tensor into shared memory
    ),
    Profile(
        "Megatron-Core",
        "megatron/core/dist_checkpointing, Megatron-Core 0.12 to 0.19",
        (
            *("megatron_model_llama_tp2_pp2", "megatron_model_gemma3"),
            *("megatron_hybrid_nemotron_h_pp2", "megatron_mtp_qwen3_next"),
        ),
        tensors=r"(?:^|\.)decoder\.layers\.(?:.*self_attention\.linear_|mixer\.in_proj\.)",
        modules=r"^decoder\.layers\.(?:\d+\.)?(?:self_attention|mlp)\.",
    ),
    Profile(
        "LitGPT",
        "litgpt/model.py, litgpt/config.py, litgpt/lora.py, litgpt/finetune/lora.py, LitGPT 0.5",
        ("litgpt_llama", "litgpt_llama_old", "litgpt_llama_pretrain", "litgpt_llama_lora"),
        tensors=r"(?:^|\.)transformer\.h\.\d+\.attn\.(?:qkv|attn)\.weight$",
        modules=r"^transformer\.h\.\d+\.(?:attn|mlp)\.(?:experts\.\d+\.)?"
        r"(?:qkv|attn|proj|fc|fc_[12]|gate)$",
        options={
            "model_config.yaml": {
                "n_layer": "num_hidden_layers",
                "n_embd": "hidden_size",
                "n_head": "num_attention_heads",
                "n_query_groups": "num_key_value_heads",
                "head_size": "head_dim",
                "intermediate_size": "intermediate_size",
                "padded_vocab_size": "padded_vocab_size",
                "n_expert": "num_experts",
            },
            "hyperparameters.yaml": {
                "lora_r": "r",
                "lora_alpha": "lora_alpha",
                **{key: key for key in _OF_LITGPT},
            },
        },
        merged=r"lit_model\.pth\.lora",
        joined={"attn.qkv": _OF_LITGPT, "attn.attn": _OF_LITGPT},
        own_tool="`litgpt merge_lora` makes a `lit_model.pth` of it, which `ckptkit consolidate`"
        " reads",
    ),
    Profile(
        "nanotron",
        "nanotron/serialize, nanotron 0.2 and 0.4",
        ("nanotron_llama_tp2_pp2", "nanotron_qwen2_moe"),
        tensors=r"(?:^|\.)decoder\.\d+\.pp_block\.",
    ),
    Profile(
        "torchtitan",  # Meta's own Llama, whose names it took over, is recognised by them too
        "torchtitan/components/checkpoint.py, torchtitan 0.2 and 0.3",
        ("torchtitan_steps", "torchtitan_0_3_steps", "torchtitan_family_llama"),
        tensors=r"^layers\.\d+\.att(?:entio)?n\.(?:(?:qkv_linear\.)?w[qkv]|wkv_[ab])\.(?:weight|bias)$",
        modules=r"^layers\.\d+\.(?:attention|feed_forward|moe)\.",
    ),
    Profile(  # whose experts have the names of prime-rl's
        "DeepSpeed AutoEP",
        "deepspeed/module_inject/auto_ep_layer.py, DeepSpeed 0.19.8",
        ("autoep_zero1", "autoep_qwen2_moe", "autoep_deepseek_v3"),
        tensors=r"(?:^|\.)layers\.\d+\.mlp\."
        r"(?:gate\.gate\.weight|router\.e_score_correction_bias)$",
        beside=r"\.mlp\.experts\.w1$",
    ),
    Profile(
        "prime-rl",
        "src/prime_rl/trainer/models of PrimeIntellect-ai/prime-rl at commit 2965fdfc",
        tensors=r"(?:^|\.)layers\.\d+\.mlp\.experts\.w1$",
    ),
    Profile(
        "nvidia-resiliency-ext",
        "checkpointing/local/basic_state_dict.py, nvidia-resiliency-ext 0.4",
        ("nvrx_local_fsdp2",),
        wrapper=(
            "nvidia_resiliency_ext.checkpointing.local.basic_state_dict.BasicTensorAwareStateDict",
            "state_dict",
        ),
    ),
    Profile(
        "TorchRec",
        "torchrec/distributed/embeddingbag.py, TorchRec 1.9: ShardedTensors in DCP",
        ("torchrec_tables",),
    ),
    Profile(
        "Composer",
        "composer/core/state.py, Composer 0.32",
        ("composer_monolithic",),
    ),
    Profile(
        "ColossalAI",
        "colossalai/checkpoint_io/hybrid_parallel_checkpoint_io.py, ColossalAI 0.5",
        ("colossalai_stages",),
        weights=("modeling",),
    ),
    Profile(
        "Orbax",  # of Flax, MaxText and others
        "orbax/checkpoint/checkpoint_manager.py (`DEFAULT_ITEM_NAME`), orbax-checkpoint 0.12;"
        " MaxText/checkpointing.py (`items`)",
        ("orbax_manager", "orbax_zarr3_chunks", "orbax_folders", "orbax_two_hosts"),
        weights=("default", "items", "state", "params"),
    ),
    Profile(
        "MaxText",
        "maxtext/checkpoint_conversion/utils/param_mapping.py, MaxText of August 2026",
        ("maxtext_qwen3_scanned", "maxtext_llama_layers", "maxtext_gemma3_scanned"),
        tensors=r"^params\.(?:params\.)?decoder\.layers(?:_\d+|_remainder)?\.(?:layers_\d+\.)?"
        r"(?:self_attention|mlp)(?:_local|_global)?\.",
    ),
    # VeOmni's models of Transformers 4; Transformers itself stacks gate and up into one.
    Profile("stacked experts", tensors=r"(?:^|\.)experts\.gate_proj$"),
    Profile(
        "torchtune",
        "torchtune/training/checkpointing, torchtune 0.6",
        ("torchtune_qwen2_lora", "torchtune_llama_dora", "torchtune_family_llama"),
        tensors=r"^layers\.\d+\.sa_norm\.scale$",
        modules=r"^layers\.\d+\.(?:attn\.(?:[qkv]|output)_proj|mlp\.w[123])$",
        merged=r"adapter_(?:model|\d+)\.pt",
    ),
)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(dict.fromkeys(patterns)))


# Units of steps of any framework, with numbers where there are several models.
_WEIGHTS = _any_of(
    [
        *(r"(model|base_model)_\d+", r"state\.ckpt", *sorted(PLAIN_FOLDERS)),
        *(pattern for profile in PROFILES for pattern in (*profile.weights, *profile.copies)),
    ]
)
_OPTIMIZERS = re.compile(r"optim(izer)?s?(_\d+)?")
_MERGED = _any_of(profile.merged for profile in PROFILES if profile.merged)


def is_unit_folder(name: str) -> bool:
    """Returns whether a folder below a step is called as those with a state dict are."""
    return _WEIGHTS.fullmatch(name) is not None or is_optimizer_folder(name)


def is_merged_beside(file: str) -> bool:
    """Returns whether a file is an adapter, and the model in its folder has it merged already."""
    return _MERGED.fullmatch(file) is not None


def is_optimizer_folder(name: str) -> bool:
    return _OPTIMIZERS.fullmatch(name) is not None


PACKAGES = {profile.package: profile.name for profile in PROFILES if profile.package}
BARE = {profile.name: profile.bare for profile in PROFILES if profile.bare}
MARKS = {profile.mark: profile.name for profile in PROFILES if profile.mark}
"""Frameworks by a file that they alone write."""
COPIES = {folder: original for p in PROFILES for folder, original in p.copies.items()}
OPTIONS = {file: keys for p in PROFILES for file, keys in p.options.items()}
OPTIONS_OF = {
    p.name: file for p in PROFILES for file, keys in p.options.items() if "r" in keys.values()
}
"""The file with the options of an adapter, by the framework."""
BY_NAME = {profile.name: profile for profile in PROFILES}
BESIDE_RUNS = dict(profile.beside_run for profile in PROFILES if profile.beside_run)
WRAPPERS = dict(profile.wrapper for profile in PROFILES if profile.wrapper)
COUNTERS = tuple(counter for profile in PROFILES for counter in profile.counters)
SETTINGS = tuple(dict.fromkeys(folder for p in PROFILES for folder in p.settings))
"""Folders with configuration and tokenizer, and no model of their own but for copies."""


def recognise_by_tensors(names: Iterable[str]) -> str:
    """Returns the framework whose models have tensors of these names; empty for others."""
    listed = list(names)
    own = (p for p in PROFILES if p.tensors and _has(p.tensors, listed))
    return next((p.name for p in own if _has(p.beside, listed)), "")


def recognise_by_modules(names: Iterable[str]) -> str:
    """Returns the framework that calls the modules of an adapter so; empty for others."""
    listed = list(names)
    return next((p.name for p in PROFILES if p.modules and _has(p.modules, listed)), "")


def _has(pattern: str, names: Iterable[str]) -> bool:
    return any(map(re.compile(pattern).search, names))
