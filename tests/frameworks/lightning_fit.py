"""A script for Lightning: the Trainer with a strategy that saves shards, on two CPU processes.

Usage: lightning_fit.py fsdp|model_parallel FOLDER, from the newest checkpoint of the folder on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 1024


class OnCPU(FSDPStrategy):  # type: ignore[misc]  # not followed
    """Lightning refuses its FSDPStrategy without a GPU, and compares types for that."""


class Module(pl.LightningModule):  # type: ignore[misc]  # not followed
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        )

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        else:  # the strategy would leave the choice of the device to torch, which takes no CPU
            self.net = FullyShardedDataParallel(
                self.net, device_id=torch.device("cpu"), use_orig_params=True
            )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)


def main(kind: str, folder: Path) -> None:
    pl.seed_everything(0)
    strategy = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if kind == "model_parallel"
        else OnCPU(state_dict_type="sharded")
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=6,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
    found = sorted(path for path in folder.glob("epoch*.ckpt") if (path / "meta.pt").exists())
    trainer.fit(Module(), data, ckpt_path=found[-1] if found else None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
