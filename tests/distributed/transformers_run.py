"""Runs under torchrun: the Trainer and TRL's SFTTrainer, stock and with `install`.

Usage: transformers_run.py FOLDER CHECK…

The checks `fsdp1`, `fsdp2`, `lora1` and `lora2` train 6 steps without a break, by the stock
Trainer and with ckptkit, and resume from step 4 in every combination. Each line that rank 0
prints is one thing that was found.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from ckptkit.core.errors import CkptkitError
from ckptkit.integrations.transformers import install
from tests.distributed.tiny_trainers import (
    HALF,
    LAST,
    Tensors,
    differing,
    model,
    say,
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
    check_pushing,
    check_secrets,
    check_signals,
)


def check_resuming(kind: str, folder: Path) -> None:
    """Trains without a break and resumes, stock and with ckptkit."""
    stock, ours = folder / f"{kind}-stock", folder / f"{kind}-ours"
    truth = trained(trainer(kind, stock))
    made = trainer(kind, ours)
    assert install(made) is install(made)
    say(kind, "undisturbed", differing(trained(made), truth))
    say(kind, "steps", steps_in(ours))
    half = f"checkpoint-{HALF}"
    say(kind, "files", sorted(entry.name for entry in (ours / half).iterdir()))
    shared = {
        file.name
        for file in (ours / half).glob("base_model_0/*.distcp")
        if file.samefile(ours / f"checkpoint-{LAST}" / "base_model_0" / file.name)
    }
    say(kind, "linked", len(shared))
    states = [(run / half / "trainer_state.json").read_text() for run in (stock, ours)]
    say(kind, "own state as stock's", states[0] == states[1])
    losses = [row.get("loss") for row in made.state.log_history]
    go_on(kind, ours, trainer(kind, ours), truth, losses)
    again = trainer(kind, folder / "other")
    install(again)
    try:
        say(kind, "ours from stock", differing(trained(again, stock / half), truth))
    except CkptkitError as error:
        say(kind, "ours from stock", error)
    if kind == "lora1":
        return  # of which the stock Trainer saves and loads an empty adapter
    expected = truth
    if kind == "fsdp1":  # where the stock Trainer loses the optimizer's state
        expected = trained(trainer(kind, folder / "other"), stock / half)
    from_ours = trained(trainer(kind, folder / "other"), ours / half)
    say(kind, "stock from ours", differing(from_ours, expected))


def go_on(kind: str, run: Path, again: Trainer, truth: Tensors, losses: list[Any]) -> None:
    """Resumes from the newest complete step."""
    if dist.get_rank() == 0:
        shutil.rmtree(run / f"checkpoint-{LAST}")
        (run / "checkpoint-9/optimizer_0").mkdir(parents=True)  # of a stock save that was killed
    dist.barrier()
    install(again)
    say(kind, "ours from ours", differing(trained(again, True), truth))
    say(kind, "losses", [row.get("loss") for row in again.state.log_history] == losses)


def check_narrow(check: str, folder: Path) -> None:
    """A model in bfloat16 that is trained in mixed precision, so that accelerate widens it."""

    def make(out: str) -> Trainer:
        return trainer("fsdp1", folder / out, model=model().to(torch.bfloat16), bf16=True)

    truth = trained(make("narrow-stock"))
    made = make(check)
    install(made)
    say(check, "undisturbed", differing(trained(made), truth))
    losses = [row.get("loss") for row in made.state.log_history]
    go_on(check, folder / check, make(check), truth, losses)


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
    "pushing": check_pushing,
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
    for check in sys.argv[2:]:
        CHECKS[check](check, Path(sys.argv[1]))
        say(check, "done")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
