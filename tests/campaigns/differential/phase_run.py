"""Runs on ranks: one phase of many draws, one after another, in one process group.

Usage: phase_run.py PHASE FOLDER NUMBER... `FOLDER/NUMBER/draw.json` holds a draw; what was
compared is appended to `FOLDER/NUMBER/PHASE.jsonl`, one line a comparison.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.training import Checkpointer
from tests.campaigns.differential.draws import Draw
from tests.campaigns.differential.live_models import Training, gather, make_training, train
from tests.campaigns.differential.offline import Commands, read_truths
from tests.campaigns.differential.readers import Check, Compared, Reading
from tests.campaigns.differential.savers import open_checkpointer, save_own, save_stock

COLLECTIVE_SECONDS = 60


# By a part of its message: a refusal that docs/reference/formats.md describes, and its name.
DOCUMENTED = {
    "but no matrix has as many rows as another": "refused, as nothing proves the last rank"
}


class FailedError(Exception):
    """A comparison failed on a rank; what follows in this process group is not to be relied on."""


def save(draw: Draw, folder: Path) -> Iterable[Check]:
    """Trains and saves twice by a Checkpointer, at the end by a stock tool too."""
    kept: dict[str, Any] = {}

    def live() -> Compared:
        kept["training"] = make_training(draw, draw.first, draw.seed + draw.number)
        train(kept["training"], draw.steps)
        keep_truth(kept["training"], folder / "truth_1.pt")
        return 0, 0

    def own() -> Compared:
        training = kept["training"]
        with open_checkpointer(training, folder) as checkpointer:
            if draw.own_options["prepare"]:
                checkpointer.prepare(training.state())
            save_own(checkpointer, training, 1, folder, last=False)
            train(training, 1 if draw.steps else 0)
            keep_truth(training, folder / "truth_2.pt")
            save_own(checkpointer, training, 2, folder, last=True)
            export(checkpointer, training, folder)
        return 0, 0

    def stock() -> Compared:
        save_stock(kept["training"], folder)
        return 0, 0

    yield "torch", "live state", live
    yield "Checkpointer", "save", own
    yield draw.stock, "save", stock


def export(checkpointer: Checkpointer, training: Training, folder: Path) -> None:
    dtypes = {t.dtype for t in training.model.state_dict().values() if isinstance(t, torch.Tensor)}
    if torch.complex128 not in dtypes:
        checkpointer.export(
            folder / "export", state=training.state(), names="live", max_shard_size="2KB"
        ).result(60)


def keep_truth(training: Training, path: Path) -> None:
    truth = gather(training)
    if dist.get_rank() == 0:
        torch.save(truth, path)


def load(draw: Draw, folder: Path) -> Iterable[Check]:
    return Reading(draw, folder, read_truths(folder)[2]).checks()


def read(draw: Draw, folder: Path) -> Iterable[Check]:
    return Commands(draw, folder, read_truths(folder)).checks()


PHASES = {"save": save, "load": load, "read": read}


def run(phase: str, folder: Path) -> None:
    """Runs a phase of one draw; every rank learns of a failure of any."""
    draw = Draw.from_json((folder / "draw.json").read_text())
    for saver, reader, compare in PHASES[phase](draw, folder):
        began, error, counted, shown = time.monotonic(), "", (0, 0), reader
        try:
            counted = compare()
        except BaseException as failure:  # noqa: BLE001  DCP's own is no Exception
            documented = [words for part, words in DOCUMENTED.items() if part in str(failure)]
            shown = f"{reader} ({documented[0]})" if documented else reader
            error = "" if documented else "".join(traceback.format_exception(failure)[-4:])
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if dist.get_rank() == 0:
            took = round(time.monotonic() - began, 3)
            line = [saver, shown, *counted, took, "\n".join(failed)]
            with (folder / f"{phase}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if failed:
            raise FailedError(failed[0])


def main() -> None:
    phase, folder, *numbers = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    status = 0
    for number in numbers:
        place = Path(folder, number)
        try:
            run(phase, place)
        except FailedError:
            status = 1
            break
        if dist.get_rank() == 0:
            (place / f"{phase}.done").touch()
            if phase == "read":
                for kept in ("export", "own_hf", "stock_hf", "made", "averaged"):
                    shutil.rmtree(place / kept, ignore_errors=True)
        gc.collect()
        dist.barrier()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
