"""TRL's SFTTrainer, QLoRA and FSDP: its checkpoints go through ckptkit after one line.

    torchrun --nproc-per-node=2 examples/trl_qlora.py runs/qlora
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/trl_qlora.py runs/qlora

The second line is for machines without a GPU.

The base model is packed into 4-bit weights when it is loaded. FSDP leaves their scales out of its
state dict. ckptkit saves them too, so a checkpoint holds the whole model. The base is written once;
later checkpoints link to it. Kill the training at any time and run the same command again: it
resumes from the newest checkpoint, and reaches the same final loss.

These commands need no option, no bitsandbytes and no GPU:

    ckptkit adapter extract runs/qlora runs/adapter  # a folder that PEFT loads
    ckptkit adapter merge runs/qlora runs/merged     # a whole model in bfloat16, the adapter in it
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import toy
from ckptkit.integrations.transformers import install


def make_base(folder: Path, settings: SFTConfig) -> None:
    """Makes a model to start from, on one rank; in its place stands one of the Hub."""
    with settings.main_process_first(local=False):  # the others come when it is there
        if not folder.exists():
            part = folder.with_name(f"{folder.name}.part")
            base = toy.model(hidden_size=64, intermediate_size=128)  # rows of whole blocks
            base.to(torch.bfloat16).save_pretrained(part)
            part.rename(folder)


def packed_base(folder: Path) -> Any:
    """Loads the base, and packs its matrices into 4 bits."""
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # FSDP shards floats only, and all of one dtype
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=packing
    )


def main() -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = SFTConfig(
        arguments.run,
        max_steps=arguments.steps,
        save_steps=arguments.save_every,
        save_total_limit=2,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_length=toy.WINDOW,
        bf16=True,
        gradient_checkpointing=False,  # FSDP's below takes its place
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
            "cpu_ram_efficient_loading": False,
        },
    )
    base = Path(f"{arguments.run}-base")
    make_base(base, settings)
    texts = Dataset.from_dict({"text": toy.TEXTS * 8})
    trainer = SFTTrainer(
        model=packed_base(base),
        args=settings,
        train_dataset=texts,
        eval_dataset=texts.select(range(8)),
        processing_class=toy.tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    install(trainer)
    newest = get_last_checkpoint(arguments.run) if Path(arguments.run).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)

    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{arguments.run}-adapter")  # as PEFT writes it, without a gather
    if trainer.is_world_process_zero():
        print(f"final loss {loss:.10f}", flush=True)


if __name__ == "__main__":
    main()
