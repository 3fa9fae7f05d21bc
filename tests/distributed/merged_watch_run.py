"""Runs under torchrun: TRL trains LoRA under FSDP, saves steps, and leaves its final model.

    torchrun ... merged_watch_run.py FOLDER [STATE_DICT_TYPE]

FOLDER gets `base`, the model before, and `run`, as the last lines of a guide's script leave it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.tiny_trainers import model, tokenizer, trainer

if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    if int(os.environ["RANK"]) == 0:
        model().save_pretrained(folder / "base")
        tokenizer().save_pretrained(folder / "base")
    made = trainer("lora2", folder / "run", max_steps=4, save_steps=2, state_dict_type=kind)
    made.train()
    made.save_model()
    dist.barrier()
    dist.destroy_process_group()
