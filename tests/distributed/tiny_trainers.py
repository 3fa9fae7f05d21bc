"""Tiny trainers for the scripts that run under torchrun, and how their outcomes are compared."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

LAST = 6
HALF = 4
WORDS = 64
Tensors = dict[str, torch.Tensor]


def expect(found: object, wanted: object) -> None:
    """Compares what rank 0 has found; the others may see files earlier, or later."""
    if int(os.environ["RANK"]) == 0:
        assert found == wanted, f"{found} was found where {wanted} was expected"


def expect_error(kind: type[Exception], pattern: str, call: Callable[..., object]) -> None:
    try:
        call()
    except kind as error:
        text = f"{error}".replace("\n", " ")
        assert re.search(pattern, text), text
    else:
        raise AssertionError(f"no {kind.__name__} was raised: {pattern}")


def run_checks(run: Callable[[str], None], names: Sequence[str]) -> None:
    """Runs checks, and says on rank 0 which have passed."""
    for name in names:
        run(name)
        if int(os.environ["RANK"]) == 0:
            sys.stdout.write(f"PASSED {name}\n")
            sys.stdout.flush()


def tokenizer() -> PreTrainedTokenizerFast:
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = {name: number for number, name in enumerate(names.values())}
    words |= {f"w{number}": number for number in range(len(words), WORDS)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), **names)


def model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=32, attention_dropout=0.1, **sizes, **heads, **ids
    )
    return LlamaForCausalLM(config)


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, WORDS, (24, 9), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def trainer(kind: str, out: Path, **changes: Any) -> Trainer:
    version = int(kind[-1])
    fsdp = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": changes.pop("state_dict_type", "SHARDED_STATE_DICT"),
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
        "use_orig_params": True,
    }
    changed = changes.pop("fsdp_config", {})
    callbacks = changes.pop("callbacks", [])
    made_by = changes.pop("made_by", Trainer)
    net = changes.pop("model", None) or model()
    given: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": LAST,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "fsdp": True,
        "fsdp_config": None if changed is None else fsdp | changed,
    } | changes
    if kind.startswith("lora"):
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        lora = given.pop("peft_config", lora)
        own = {"max_length": 16, "bf16": False, "gradient_checkpointing": False}
        return SFTTrainer(
            net,
            SFTConfig(**{**own, **given}),
            train_dataset=rows().remove_columns("labels"),
            eval_dataset=rows().remove_columns("labels").select(range(4)),
            processing_class=tokenizer(),
            peft_config=lora,
            callbacks=callbacks,
        )
    return made_by(
        net,
        TrainingArguments(**given),
        train_dataset=rows(),
        eval_dataset=rows().select(range(4)),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def live(made: Any) -> Tensors:
    """Returns this rank's part of the model and of the optimizer's state."""
    found: Tensors = {}
    for name, parameter in made.model.named_parameters():
        found[name] = local_part(parameter)
        for key, value in made.optimizer.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = local_part(value)
    return found


def local_part(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names the tensors that differ on any rank."""
    here = {
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    }
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return sorted(set().union(*everywhere))


def expect_equal(one: Tensors, other: Tensors, *, least: int = 1) -> None:
    """Compares tensors on all ranks, of which there are so many at least."""
    names = differing(one, other)
    assert not names, names
    assert len(other) >= least


def only_model(found: Tensors) -> Tensors:
    return {name: value for name, value in found.items() if "/" not in name}


def trained(made: Trainer, start: Path | bool | None = None) -> Tensors:
    made.train(resume_from_checkpoint=str(start) if isinstance(start, Path) else start)
    return live(made)


def steps_in(run: Path) -> list[int]:
    return sorted(int(entry.name.split("-")[1]) for entry in run.glob("checkpoint-*"))


class Killing(TrainerCallback):  # type: ignore[misc]
    """Sends a signal to one rank."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step and dist.get_rank() == 1:
            os.kill(os.getpid(), self.number)
