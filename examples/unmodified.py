"""A script that knows nothing of ckptkit; `ckptkit.run` has its checkpoints go through it.

    torchrun --nproc-per-node=2 -m ckptkit.run examples/unmodified.py runs/unmodified

Without a GPU, `examples/on_cpu.py` goes before `-m`:

    torchrun --nproc-per-node=2 examples/on_cpu.py -m ckptkit.run examples/unmodified.py runs/u

Without `-m ckptkit.run` it trains just the same, and stops for each checkpoint. Kill it at any
time and type the same command again: it goes on from the newest checkpoint, all of which are
whole, and comes to the same final loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import toy


def main() -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=6)
    arguments = parser.parse_args()

    training = TrainingArguments(
        arguments.run,
        max_steps=arguments.steps,
        save_steps=arguments.save_every,
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
    )
    trainer = Trainer(
        toy.model(), training, train_dataset=toy.Windows(), eval_dataset=toy.Windows(16)
    )
    newest = get_last_checkpoint(arguments.run) if Path(arguments.run).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"final loss {loss:.10f}", flush=True)


if __name__ == "__main__":
    main()
