"""Runs under torchrun: accelerate with DeepSpeed, its files saved by ckptkit.

Usage: accelerate_zero_run.py FOLDER STAGE. Each line that it prints on rank 0 is one thing that was
compared.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import accelerate.state
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration

from ckptkit.integrations.accelerate import close, install
from ckptkit.training.state.objects import torch_archive
from tests.distributed.accelerate_run import WIDTH, Counter
from tests.distributed.accelerate_whole_run import Wide, contents, say
from tests.distributed.pretending.sitecustomize import pretend


class Training:
    """All that a script with DeepSpeed has."""

    def __init__(self, folder: Path, stage: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            project_config=ProjectConfiguration(project_dir=str(folder), total_limit=1),
        )
        torch.manual_seed(3)
        model = Wide()
        del model.tied  # whose names ZeRO-3 leaves empty
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, batches: int) -> None:
        for _ in range(batches):
            loss = self.model(torch.rand(2, WIDTH, dtype=torch.bfloat16))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.batches += 1


def check(folder: Path, truth: Path, what: str) -> None:
    """Compares the files of two saves."""
    found, expected = contents(folder), contents(truth)
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    wrong = [n for n in expected if torch_archive(found[n]) != torch_archive(expected[n])]
    assert not wrong, f"{what}: {wrong}"
    say(what)


def main() -> None:
    folder, stage = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    known = deepspeed.ops.__compatible_ops__  # no compiler is needed: gloo does what they do
    known.update(dict.fromkeys(known, False))
    pretend(accelerate.state)
    training = Training(folder, stage)
    accelerator = training.accelerator
    install(accelerator)
    training.train(3)
    stock, ours = folder / "stock", folder / "ours"
    Accelerator.save_state(accelerator, str(stock))
    assert accelerator.save_state(str(ours)) == ours
    training.train(2)  # which the save must not see
    close(accelerator)
    check(ours, stock, "the files are those of DeepSpeed")
    Accelerator.load_state(accelerator, str(ours))
    Accelerator.save_state(accelerator, str(folder / "after_ours"))
    check(folder / "after_ours", stock, "DeepSpeed resumed from what ckptkit wrote")
    training.train(1)
    accelerator.load_state(str(stock))
    Accelerator.save_state(accelerator, str(folder / "after_stock"))
    check(folder / "after_stock", stock, "what DeepSpeed wrote was loaded")
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
