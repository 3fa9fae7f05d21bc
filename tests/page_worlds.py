"""Folders in which the commands of pages run: small runs under the names that the pages use."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptkit.training import Checkpointer
from tests.compared_models import model_of

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CONFIGURATION = ("*.json", "*.jinja")


def make_home(home: Path) -> None:
    """Makes everything that any page uses; a page gets a copy."""
    llama = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
    for run in ("llama", "trainer", "accelerate", "old"):
        save_run(home / "runs" / run, layout="trainer" if run == "trainer" else "accelerate")
    copy(llama, home / "runs/stock/checkpoint_0", without=CONFIGURATION)
    copy(llama, home / "base", without=("*_0", "*.pkl"))
    for node, ranks in (("node0", "__1_*"), ("node1", "__0_*")):
        files = ("optimizer_0", *CONFIGURATION, "random_states_*", ranks)
        copy(llama, home / node / "runs/a", without=files)
    (home / "node1/runs/a/pytorch_model_fsdp_0/.metadata").unlink()
    shutil.copytree(home / "runs/llama", home / "runs/a")
    shutil.copytree(home / "runs/a/checkpoint-300", home / "runs/a/checkpoint-400")
    (home / "runs/a/checkpoint-400/ckptkit.json").unlink()


def make_adapters(home: Path, kind: str) -> None:
    """Makes the runs of the pages about adapters; each run has its own base."""
    if kind == "lora":
        copy(FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint", home / "runs/lora")
        copy(FIXTURES / "peft_trl_fsdp2_ckptkit/base", home / "base")
        copy(FIXTURES / "peft_trl_fsdp2/checkpoint", home / "runs/stock-lora")
    else:
        copy(FIXTURES / "peft_qlora_fsdp2/checkpoint", home / "runs/stock-qlora")
        copy(FIXTURES / "peft_qlora_fsdp2/base", home / "base")
        copy(
            FIXTURES / "peft_qlora_fsdp2/adapter_config.json",
            home / "runs/stock-qlora/adapter_config.json",
        )


def copy(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy(source, target)
        return
    ignored = shutil.ignore_patterns(*without) if without else None
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)


def save_run(run: Path, *, layout: Any) -> None:
    """Saves three steps of a small Llama, each with other weights, with a metric.

    Weights and gradients are drawn from whole numbers: those of torch and of a loss differ from
    one processor to another, and with them what pages show.
    """
    model = model_of()
    drawn = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_odd_numbers(drawn, parameter.shape) / 2**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(run, layout=layout, every=100) as checkpointer:
        for step, loss in ((100, 2.0141), (200, 1.8772), (300, 1.7203)):
            for parameter in model.parameters():
                parameter.grad = _odd_numbers(drawn, parameter.shape) / 2**14
            optimizer.step()
            checkpointer.save(step, state, metrics={"eval_loss": loss})


def _odd_numbers(drawn: np.random.Generator, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(drawn.integers(-256, 256, shape) * 2 + 1).float()
