"""A recipe of nemo-automodel with FSDP2, on two CPU processes.

Its own recipes build models for CUDA only; what they save with, and resume from, is all here.

Usage: automodel_recipe.py FOLDER, from the newest checkpoint of the folder on.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.distributed.init_utils import initialize_distributed
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
from nemo_automodel.components.training.rng import StatefulRNG
from nemo_automodel.components.training.step_scheduler import StepScheduler
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Recipe(BaseRecipe):  # type: ignore[misc]  # not followed
    def __init__(self, folder: str) -> None:
        self.cfg = ConfigNode({"seed": 0})
        self.peft_config = None
        self.dist_env = initialize_distributed("gloo")
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        for layer in [*model.model.layers, model]:
            fully_shard(layer)
        self.model_parts: list[nn.Module] = [model]
        self.optimizer = [torch.optim.AdamW(model.parameters(), lr=1e-3)]
        self.lr_scheduler = [
            OptimizerParamScheduler(
                self.optimizer[0],
                init_lr=0.0,
                max_lr=1e-3,
                min_lr=1e-4,
                lr_warmup_steps=2,
                lr_decay_steps=12,
                lr_decay_style="cosine",
                start_wd=0.0,
                end_wd=0.0,
                wd_incr_steps=12,
                wd_incr_style="constant",
            )
        ]
        self.rng = StatefulRNG(seed=0, ranked=True)
        data = TensorDataset(torch.randint(0, 300, (32, 16)))
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=0)
        self.dataloader = StatefulDataLoader(data, batch_size=2, sampler=sampler)
        self.step_scheduler = StepScheduler(
            global_batch_size=4,
            local_batch_size=2,
            dp_size=2,
            dataloader=self.dataloader,
            ckpt_every_steps=2,
            max_steps=8,
        )
        config = CheckpointingConfig(
            checkpoint_dir=folder, model_save_format="torch_save", save_consolidated=False
        )
        self.checkpointer = config.build(self.dist_env.rank, 0, 0)
        self.load_checkpoint()

    def train(self) -> None:
        for epoch in self.step_scheduler.epochs:
            self.step_scheduler.set_epoch(epoch)
            for batches in self.step_scheduler:
                (tokens,) = batches[0]
                loss = self.model_parts[0](input_ids=tokens, labels=tokens).loss
                loss.backward()
                self.optimizer[0].step()
                self.optimizer[0].zero_grad()
                self.lr_scheduler[0].step(1)
                if self.step_scheduler.is_ckpt_step:
                    self.save_checkpoint(epoch, self.step_scheduler.step, loss.item())
        self._finalize_and_close_checkpointer()


if __name__ == "__main__":
    Recipe(sys.argv[1]).train()
