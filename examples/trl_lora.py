"""TRL's SFTTrainer, LoRA and FSDP: its checkpoints go through ckptkit after one line.

    torchrun --nproc-per-node=2 examples/trl_lora.py runs/lora
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/trl_lora.py runs/lora

The second line is for machines without a GPU.

The frozen base model is written once and linked from then on, so that a checkpoint costs what the
adapter does. Kill it at any time and type the same command again: it goes on from the newest
checkpoint, all of which are whole, and comes to the same final loss.

Every checkpoint tells what it is, so that no option is needed, nor PEFT, nor a GPU, to make of it

    ckptkit adapter extract runs/lora runs/adapter  # a folder that PEFT loads
    ckptkit adapter merge runs/lora runs/merged     # a whole model, with the adapter in it
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import toy
from ckptkit.integrations.transformers import install


def main() -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    texts = Dataset.from_dict({"text": toy.TEXTS * 8})
    trainer = SFTTrainer(
        model=toy.model(),
        args=SFTConfig(
            arguments.run,
            max_steps=arguments.steps,
            save_steps=arguments.save_every,
            save_total_limit=2,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            max_length=toy.WINDOW,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=20,
            report_to="none",
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
                "cpu_ram_efficient_loading": False,
            },
        ),
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
