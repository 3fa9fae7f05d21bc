"""Runs under torchrun: Lightning's Fabric and Trainer save and load through ckptkit.

Usage: lightning_run.py FOLDER CHECK…
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as StockFabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy as StockTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from ckptkit.core.errors import OutputExistsError, ResumeError
from ckptkit.integrations.lightning import (
    FabricModelParallelStrategy,
    TrainerModelParallelStrategy,
)
from ckptkit.training import SaveReport
from tests.distributed.cases import FULL, end, names, same

STEPS = 6


class Net(nn.Sequential):
    """Has a size that two ranks do not divide, a buffer, and something to draw at random."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Dropout(0.3), nn.Linear(13, 1))


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states: Any = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    tensors: dict[str, Any] = dict(get_model_state_dict(model, options=FULL)) | {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Job:
    """A model and its optimizer in Fabric, with one of the strategies."""

    def __init__(self, strategy: Any, seed: int) -> None:
        self.strategy = strategy
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(seed)
        self.model = self.fabric.setup_module(Net())
        bare = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = self.fabric.setup_optimizers(bare)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": 0,
            "notes": {"seen": [1, 2]},
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.fabric.backward(self.model(torch.randn(4, 8)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1

    def whole(self) -> dict[str, Any]:
        return whole(self.model.module, self.optimizer.optimizer)


def ours(**options: Any) -> FabricModelParallelStrategy:
    return FabricModelParallelStrategy(
        parallelize, data_parallel_size=2, tensor_parallel_size=1, **options
    )


def stock() -> StockFabric:
    return StockFabric(parallelize, data_parallel_size=2, tensor_parallel_size=1)


def fabric_reads_what_ours_wrote(folder: Path) -> None:
    reports: list[SaveReport] = []
    job = Job(ours(checkpointer={"listener": reports.append}), seed=1)
    job.train(3)
    job.fabric.save(folder / "a.ckpt", job.state)
    truth = job.whole()
    job.train(1)  # while it is being written
    job.strategy.finish_saves()
    dist.barrier()
    manifest = json.loads((folder / "a.ckpt" / "ckptkit.json").read_text())
    assert manifest["source"]["step"] == 3
    assert [(r.step, r.path.name) for r in reports] == [(3, "a.ckpt")]
    other = Job(stock(), seed=2)
    rest = other.fabric.load(folder / "a.ckpt", other.state)
    assert rest == {}
    assert (other.state["step"], other.state["notes"]) == (3, {"seen": [1, 2]})
    same(other.whole(), truth)


def fabric_of_ours_reads_what_stock_wrote(folder: Path) -> None:
    job = Job(stock(), seed=3)
    job.train(2)
    job.fabric.save(folder / "stock.ckpt", {**job.state, "extra": 5})
    other = Job(ours(), seed=4)
    rest = other.fabric.load(folder / "stock.ckpt", other.state)
    assert rest == {"extra": 5}
    assert other.state["step"] == 2
    same(other.whole(), job.whole())
    with pytest.raises(ResumeError, match=r"'lost' is not in the checkpoint"):
        other.fabric.load(folder / "stock.ckpt", {**other.state, "lost": 1})
    other.fabric.load(folder / "stock.ckpt", {**other.state, "lost": 1}, strict=False)


def fabric_replaces_what_stock_wrote_as_stock_does(folder: Path) -> None:
    job = Job(stock(), seed=3)
    job.fabric.save(folder / "last.ckpt", job.state)
    if dist.get_rank() == 0:
        (folder / "whole.ckpt").write_text("all in one file, by another strategy")
    dist.barrier()
    other = Job(ours(), seed=4)
    for name in ("last.ckpt", "whole.ckpt"):
        other.train(1)
        other.fabric.save(folder / name, other.state)
        assert not (folder / name / "ckptkit.json").exists()
        again = Job(ours(), seed=5)
        again.fabric.load(folder / name, again.state)
        same(again.whole(), other.whole())
    other.strategy.finish_saves()


def a_resumed_fabric_job_draws_the_same_numbers(folder: Path) -> None:
    job = Job(ours(), seed=5)
    job.train(2)
    for name in ("checkpoint_2", "again"):  # a name that tells the step, and one that does not
        job.fabric.save(folder / name, job.state)
    job.train(2)
    other = Job(ours(), seed=6)
    job.strategy.wait_for_saves()
    dist.barrier()
    for name in ("checkpoint_2", "again"):
        other.fabric.load(folder / name, other.state)
        other.train(2)
        assert other.state["step"] == 4
        same(other.whole(), job.whole())
    job.strategy.finish_saves()


class Sums(Dataset[torch.Tensor]):
    """Eight numbers each, in an order that is always the same; two batches are an epoch."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Module(pl.LightningModule):  # type: ignore[misc]  # its module is not followed
    """The model in a LightningModule, whose weights a hook may change on their way to disk."""

    def __init__(self, *, averaged: bool = False, fails_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        self.averaged = averaged
        self.fails_at = fails_at

    def configure_model(self) -> None:
        if not isinstance(next(self.net.parameters()), torch.distributed.tensor.DTensor):
            parallelize(self.net, self.device_mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("what ended training")
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.averaged:
            states = checkpoint["state_dict"]
            weight = "net.0.weight"
            checkpoint["state_dict"] = {**states, weight: states[weight] * 0.5}


def fit(
    folder: Path, steps: int, *, resume: Path | None = None, strategy: Any = None, **options: Any
) -> tuple[pl.Trainer, Module]:
    torch.manual_seed(0 if resume is None else 1)
    module = Module(**options)
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=1,
        enable_version_counter=False,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy or trainers_ours(),
        callbacks=[keep],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Else it would draw from the numbers of dropout, once more often after a resume.
    loader = DataLoader(Sums(), batch_size=4, generator=torch.Generator())
    trainer.fit(module, loader, ckpt_path=resume)
    dist.barrier()  # rank 0 removes what is not wanted any more
    return trainer, module


def trainers_ours(**options: Any) -> TrainerModelParallelStrategy:
    return TrainerModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **options)


def trainers_stock() -> StockTrainer:
    return StockTrainer(data_parallel_size=2, tensor_parallel_size=1)


def of_trainer(trainer: pl.Trainer, module: Module) -> dict[str, Any]:
    return whole(module, trainer.optimizers[0])


def the_trainer_goes_on_where_it_was(folder: Path) -> None:
    straight = of_trainer(*fit(folder / "straight", STEPS))
    assert names(folder / "straight") == ["step=6.ckpt"]
    fit(folder / "broken", 4)
    last = folder / "broken" / "step=4.ckpt"
    assert json.loads((last / "ckptkit.json").read_text())["source"]["step"] == 4
    for strategy in (trainers_ours(), trainers_stock()):
        into = folder / type(strategy).__name__
        trainer, module = fit(into, STEPS, resume=last, strategy=strategy)
        assert trainer.global_step == STEPS
        if isinstance(strategy, TrainerModelParallelStrategy):
            found = of_trainer(trainer, module)
            if dist.get_rank() == 0:  # whose running mean all ranks get
                same(found, straight)


def the_trainer_of_ours_reads_what_stock_wrote(folder: Path) -> None:
    fit(folder / "stock", 4, strategy=trainers_stock())
    trainer, _ = fit(folder / "ours", STEPS, resume=folder / "stock" / "step=4.ckpt")
    assert trainer.global_step == STEPS
    assert (folder / "ours" / "step=6.ckpt" / "ckptkit.json").exists()
    fit(folder / "stock", STEPS)  # over step=4.ckpt
    assert not (folder / "stock" / "step=4.ckpt").exists()  # since a later one is complete
    assert (folder / "stock" / "step=6.ckpt" / "ckptkit.json").exists()


def a_failed_save_costs_no_checkpoint(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "step=4.ckpt").mkdir(parents=True)
        (folder / "step=4.ckpt" / "mine.txt").write_text("in the way of the save")
    dist.barrier()
    with pytest.raises(OutputExistsError, match="something without"):
        fit(folder, 4)
    dist.barrier()
    assert (folder / "step=2.ckpt" / "ckptkit.json").exists()
    with pytest.raises(RuntimeError, match="what ended training"):  # not what became of the save
        fit(folder, STEPS, fails_at=5)


def weights_that_a_hook_has_changed_are_saved_by_lightning(folder: Path) -> None:
    _, module = fit(folder, 2, averaged=True)
    assert (folder / "step=2.ckpt" / "meta.pt").exists()
    assert not (folder / "step=2.ckpt" / "ckptkit.json").exists()
    trained: dict[str, Any] = dict(get_model_state_dict(module, options=FULL))
    _, other = fit(folder / "again", 2, resume=folder / "step=2.ckpt")  # nothing left to do
    found: dict[str, Any] = dict(get_model_state_dict(other, options=FULL))
    assert torch.equal(found["net.0.weight"], trained["net.0.weight"] * 0.5)


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        fabric_reads_what_ours_wrote,
        fabric_of_ours_reads_what_stock_wrote,
        fabric_replaces_what_stock_wrote_as_stock_does,
        a_resumed_fabric_job_draws_the_same_numbers,
        the_trainer_goes_on_where_it_was,
        the_trainer_of_ours_reads_what_stock_wrote,
        a_failed_save_costs_no_checkpoint,
        weights_that_a_hook_has_changed_are_saved_by_lightning,
    )
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or CHECKS:
        CHECKS[name](folder / name)
        dist.barrier()
        if dist.get_rank() == 0:
            sys.stdout.write(f"passed {name}\n")
    end()


if __name__ == "__main__":
    main()
