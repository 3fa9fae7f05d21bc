"""Runs under torchrun: the Trainer and TRL's SFTTrainer, stock and with `install`.

Usage: transformers_run.py FOLDER CHECK…

The checks `fsdp1`, `fsdp2`, `lora1` and `lora2` train 6 steps without a break, by the stock
Trainer and with ckptkit, and resume from step 4 in every combination.
"""

from __future__ import annotations

import gc
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

import ckptkit
from ckptkit.core.errors import CkptkitError, ResumeError
from ckptkit.integrations.transformers import install
from tests.distributed.cases import end
from tests.distributed.tiny_trainers import (
    HALF,
    LAST,
    Tensors,
    expect,
    expect_equal,
    expect_error,
    model,
    run_checks,
    steps_in,
    trained,
    trainer,
)
from tests.distributed.transformers_edges import (
    check_adapters,
    check_adding,
    check_asked,
    check_hints,
    check_skipping,
    check_uploading,
)
from tests.distributed.transformers_options import (
    check_failing,
    check_keeping,
    check_model,
    check_native,
    check_nothing,
    check_only_model,
    check_secrets,
    check_signals,
)


def check_resuming(kind: str, folder: Path) -> None:
    """Trains without a break and resumes, stock and with ckptkit."""
    stock, ours = folder / f"{kind}-stock", folder / f"{kind}-ours"
    truth = trained(trainer(kind, stock))
    made = trainer(kind, ours)
    assert install(made) is install(made)
    expect_equal(trained(made), truth)
    expect(steps_in(ours), [2, 4, 6])
    half = f"checkpoint-{HALF}"
    is_lora = kind.startswith("lora")
    base = ["base_model_0"] if is_lora else []
    files = [*base, "ckptkit", "ckptkit.json", "optimizer_0", "pytorch_model_fsdp_0"]
    files += ["rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"]
    expect(sorted(entry.name for entry in (ours / half).iterdir()), files)
    shared = {  # the frozen base is linked into later steps
        file.name
        for file in (ours / half).glob("base_model_0/*.distcp")
        if file.samefile(ours / f"checkpoint-{LAST}" / "base_model_0" / file.name)
    }
    expect(len(shared), 2 if is_lora else 0)
    states = [(run / half / "trainer_state.json").read_text() for run in (stock, ours)]
    expect(states[1], states[0])
    losses = [row.get("loss") for row in made.state.log_history]
    go_on(ours, trainer(kind, ours), truth, losses)
    again = trainer(kind, folder / "other")
    install(again)
    if kind == "lora1":  # of which the stock Trainer saves and loads an empty adapter
        pattern = "8 of 8 tensors are not in the checkpoint.*lora_A"
        expect_error(CkptkitError, pattern, lambda: trained(again, stock / half))
        return
    expect_equal(trained(again, stock / half), truth)
    expected = truth
    if kind == "fsdp1":  # where the stock Trainer loses the optimizer's state
        expected = trained(trainer(kind, folder / "other"), stock / half)
    from_ours = trained(trainer(kind, folder / "other"), ours / half)
    expect_equal(from_ours, expected)
    if dist.get_rank() == 0:
        ckptkit.prune(ours, drop_optimizer_older_than=1)
    dist.barrier()
    again = trainer(kind, folder / "other")
    install(again)
    expect_error(ResumeError, "has lost its optimizer", lambda: trained(again, ours / half))
    expect(again.state.global_step, 0)


def go_on(run: Path, again: Trainer, truth: Tensors, losses: list[Any]) -> None:
    """Resumes from the newest complete step."""
    if dist.get_rank() == 0:
        shutil.rmtree(run / f"checkpoint-{LAST}")
        (run / "checkpoint-9/optimizer_0").mkdir(parents=True)  # of a stock save that was killed
    dist.barrier()
    install(again)
    expect_equal(trained(again, True), truth)
    expect([row.get("loss") for row in again.state.log_history], losses)


def check_narrow(check: str, folder: Path) -> None:
    """A model in bfloat16 that is trained in mixed precision, so that accelerate widens it."""

    def make(out: str) -> Trainer:
        return trainer("fsdp1", folder / out, model=model().to(torch.bfloat16), bf16=True)

    truth = trained(make("narrow-stock"))
    made = make(check)
    install(made)
    expect_equal(trained(made), truth)
    losses = [row.get("loss") for row in made.state.log_history]
    go_on(folder / check, make(check), truth, losses)


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "fsdp1": check_resuming,
    "fsdp2": check_resuming,
    "lora1": check_resuming,
    "lora2": check_resuming,
    "narrow": check_narrow,
    "keeping": check_keeping,
    "only_model": check_only_model,
    "failing": check_failing,
    "signals": check_signals,
    "nothing": check_nothing,
    "native": check_native,
    "secrets": check_secrets,
    "model": check_model,
    "asked": check_asked,
    "hints": check_hints,
    "skipping": check_skipping,
    "adding": check_adding,
    "uploading": check_uploading,
    "adapters": check_adapters,
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ckptkit").setLevel(logging.INFO)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    gc.freeze()  # the Trainer collects garbage each time; what libraries hold is not looked through
    folder = Path(sys.argv[1])
    run_checks(lambda name: CHECKS[name](name, folder), sys.argv[2:])
    end()


if __name__ == "__main__":
    main()
