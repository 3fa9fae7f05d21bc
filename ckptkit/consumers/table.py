"""The libraries that load what an output holds, one row each, and what each expects of a folder.

Everything that differs between them is a field of a row: names of files, who writes the
configuration, which tensors stay in float32, how names are compared, and how the folder is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from msgspec import Struct

from ckptkit.consumers.class_facts import (
    find_kept_by_diffusers,
    find_kept_by_transformers,
    find_text_model,
)
from ckptkit.core.model_configs import architecture_of, class_of
from ckptkit.plan.selection import KeptDtypes

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
PIPELINE_INDEX = "model_index.json"
MODULES = "modules.json"
_MODULES_CONFIG = "config_sentence_transformers.json"
_LIGHTNING = "Lightning"
Comparing = Literal["transformers", "diffusers", "headers", "nothing"]


def _keeps_nothing(_config: Mapping[str, Any]) -> KeptDtypes:
    return KeptDtypes()


def fits(path: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a path fits one of some patterns, in which `*` matches no slash."""
    deep = path.count("/")
    return any(deep == pattern.count("/") and fnmatchcase(path, pattern) for pattern in patterns)


class Consumer(Struct, frozen=True, kw_only=True):
    name: str  # for messages
    library: str = ""  # its name on the Hub; empty where cards say nothing
    stem: str = "model"  # what the names of weight files begin with
    is_split: bool = True  # whether it reads weights that are in several files
    # patterns of files besides those of `side_files`, taken from the folder of the configuration or
    # a nearer one
    companions: tuple[str, ...] = ()
    leading: str = ""  # the companion without which the others mean nothing
    names_class: str = CONFIG  # the file that names the class
    # whether keys of `config.json` follow from the weights, so that it is written anew
    owns_config: bool = False
    is_renamed: bool = False  # whether names in files may differ from those of training
    comparing: Comparing = "nothing"  # what names and shapes are compared with
    # what its class of a configuration keeps in float32
    find_kept: Callable[[Mapping[str, Any]], KeptDtypes] = _keeps_nothing
    # what becomes of an output without a configuration
    without_config: str = "without which from_pretrained does not load the output"
    load: str = ""  # Python; `{out}` is the folder's path as a literal, `{name}` a class

    def has_companion(self, path: str) -> bool:
        """Returns whether a file, by its path in the folder, belongs to the model."""
        return fits(path, self.companions)


TRANSFORMERS = Consumer(
    name="Transformers",
    library="transformers",
    owns_config=True,
    is_renamed=True,
    comparing="transformers",
    find_kept=find_kept_by_transformers,
    load="transformers.{name}.from_pretrained({out})",
)
SENTENCE_TRANSFORMERS = Consumer(
    name="sentence-transformers",
    library="sentence-transformers",
    companions=(
        MODULES,
        _MODULES_CONFIG,
        "sentence_*_config.json",
        "router_config.json",
        "[0-9]*_*/*",
        "*_[0-9]*_*/*",  # of a router
    ),
    leading=MODULES,
    owns_config=True,
    is_renamed=True,
    comparing="transformers",
    find_kept=find_kept_by_transformers,
    names_class=_MODULES_CONFIG,
    load="sentence_transformers.{name}({out})",
)
DIFFUSERS = Consumer(
    name="diffusers",
    library="diffusers",
    stem="diffusion_pytorch_model",
    comparing="diffusers",
    find_kept=find_kept_by_diffusers,
    load="diffusers.{name}.from_pretrained({out})",
)
# A folder of several models, which is published as a whole and never written.
PIPELINE = Consumer(
    name="a pipeline of diffusers",
    library="diffusers",
    companions=(PIPELINE_INDEX, "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model"),
    leading=PIPELINE_INDEX,
    load="diffusers.DiffusionPipeline.from_pretrained({out})",
)
# Source: lerobot 0.4, `PreTrainedPolicy._save_pretrained` and `DataProcessorPipeline`.
LEROBOT = Consumer(
    name="LeRobot",
    library="lerobot",
    is_split=False,
    companions=(
        "policy_preprocessor*.json",
        "policy_postprocessor*.json",
        "policy_preprocessor*.safetensors",
        "policy_postprocessor*.safetensors",
        "train_config.json",
    ),
    comparing="headers",
    load="lerobot.policies.factory.get_policy_class({kind}).from_pretrained({out})",
)
PEFT = Consumer(
    name="PEFT",
    library="peft",
    stem="adapter_model",
    is_split=False,
    load="peft.PeftModel.from_pretrained(model, {out})",
)
# The adapters of a pipeline's components.
DIFFUSERS_LORA = Consumer(
    name="a pipeline of diffusers",
    library="diffusers",
    stem="pytorch_lora_weights",
    is_split=False,
    load="pipeline.load_lora_weights({out})",
)
LIGHTNING = Consumer(
    name="Lightning",
    without_config="so that the module that was trained loads the output with load_state_dict",
    load="module.load_state_dict(safetensors.torch.load_file({weights}))",
)
# Also a configuration that no library in this table writes, which is copied as it is.
PLAIN = Consumer(
    name="plain tensors",
    is_renamed=True,
    comparing="headers",
    load="safetensors.torch.load_file({weights})",
)
CONSUMERS = (
    TRANSFORMERS,
    SENTENCE_TRANSFORMERS,
    DIFFUSERS,
    PIPELINE,
    LEROBOT,
    PEFT,
    DIFFUSERS_LORA,
    LIGHTNING,
    PLAIN,
)


def find_consumer(
    config: Mapping[str, Any] | None, files: Collection[str] = (), writer: str = ""
) -> Consumer:
    if ADAPTER_CONFIG in files:
        return PEFT
    if config is None and f"{DIFFUSERS_LORA.stem}.safetensors" in files:
        return DIFFUSERS_LORA
    if config is None and PIPELINE_INDEX in files:
        return PIPELINE
    if config is None and MODULES in files:
        return SENTENCE_TRANSFORMERS
    if config is None:
        return LIGHTNING if _LIGHTNING in writer else PLAIN
    if class_of(config) and "model_type" not in config:
        return DIFFUSERS
    if isinstance(config.get("model_type"), str) or architecture_of(config):
        return SENTENCE_TRANSFORMERS if MODULES in files else TRANSFORMERS
    if isinstance(config.get("type"), str) and {"input_features", "output_features"} <= set(config):
        return LEROBOT
    return PLAIN


def name_model(config: Mapping[str, Any]) -> str:
    """Returns what a configuration calls its kind of model; empty where it names none."""
    consumer = find_consumer(config)
    if consumer is DIFFUSERS:
        return class_of(config)
    value = config.get("type" if consumer is LEROBOT else "model_type")
    return value if isinstance(value, str) else ""


def name_class(consumer: Consumer, document: Mapping[str, Any], *, has_head: bool) -> str:
    if consumer is SENTENCE_TRANSFORMERS:
        kind = document.get("model_type")
        return kind if kind in _OF_SENTENCES else _OF_SENTENCES[0]
    if consumer is DIFFUSERS:
        name = class_of(document)
        return name if name.isidentifier() and name.isascii() else "AutoModel"
    name = architecture_of(document)
    kind = document.get("model_type")
    # Parts of some models have a class with a head that stands in no mapping.
    is_mapped = _AUTO_MAP in document or (isinstance(kind, str) and bool(find_text_model(kind)))
    if (not name and has_head) or (name.endswith(_CAUSAL) and is_mapped):
        return "AutoModelForCausalLM"
    return name if name.isidentifier() and name.isascii() else "AutoModel"


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_AUTO_MAP = "auto_map"
_OF_SENTENCES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
