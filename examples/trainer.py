"""The Trainer of Transformers with FSDP: its checkpoints go through ckptkit after one line.

    torchrun --nproc-per-node=2 examples/trainer.py runs/trainer
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/trainer.py runs/trainer

The second line is for machines without a GPU.

Kill it at any time and type the same command again: it goes on from the newest checkpoint, all of
which are whole, and comes to the same final loss. At its end the model is written by all ranks.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import toy
from ckptkit.integrations.transformers import install


def main() -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=6)
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer = Trainer(
        model=toy.model(),
        args=TrainingArguments(
            arguments.run,
            max_steps=arguments.steps,
            save_steps=arguments.save_every,
            save_total_limit=2,
            learning_rate=3e-3,
            per_device_train_batch_size=4,
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
        train_dataset=toy.Windows(),
        eval_dataset=toy.Windows(16),
        processing_class=toy.tokenizer(),
    )
    install(trainer)
    newest = get_last_checkpoint(arguments.run) if Path(arguments.run).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)

    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{arguments.run}-model")
    if trainer.is_world_process_zero():
        print(f"final loss {loss:.10f}", flush=True)


if __name__ == "__main__":
    main()
