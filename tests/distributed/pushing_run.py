"""A training with the Trainer that pushes its steps, whatever the Hub does.

Usage: pushing_run.py OUT JSON, by each rank. Each rank writes how its training ended into
`OUT/rank-N.json`, and its log into `OUT/rank-N.log`. The JSON has arguments of the Trainer;
`install`, options of `install`; `pause`, seconds before the last step; `end`, a statement that ends
the script; and `pushes_model`, whether the Trainer itself pushes the final model too.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ckptkit.integrations.transformers import install
from tests.distributed.tiny_trainers import trainer

RANK = os.environ["RANK"]


class Pausing(TrainerCallback):  # type: ignore[misc]
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == state.max_steps - 1:
            time.sleep(self.seconds)


def train(out: Path, given: dict[str, Any]) -> None:
    options, pushes_model = given.pop("install", {}), given.pop("pushes_model", False)
    given["callbacks"] = [Pausing(given.pop("pause", 0))]
    made = trainer("fsdp2", out / "run", **{"hub_model_id": "org/tiny", "max_steps": 4} | given)
    made.args.push_to_hub, made.hub_model_id = True, None  # the Hub may be away from the beginning
    install(made, **options)
    made.train(resume_from_checkpoint=any(out.glob("run/checkpoint-*")) or None)
    returned = time.time()
    last = out / "run" / f"checkpoint-{made.state.global_step}" / "ckptkit.json"
    found: dict[str, Any] = {"train": returned - last.stat().st_mtime}
    made.args.push_to_hub = pushes_model
    made.save_model(None if pushes_model else str(out / "final"))
    found["save_model"] = time.time() - returned
    total = torch.tensor([1])
    dist.all_reduce(total)
    found["sum"] = int(total)
    (out / f"rank-{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    out, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    logging.basicConfig(filename=out / f"rank-{RANK}.log", level=logging.INFO)
    end = given.pop("end", "")
    # A handler that runs after those of ckptkit, and a file that nothing closes.
    atexit.register((out / f"rank-{RANK}.end").touch)
    sys.modules[__name__].__dict__["LEFT_OPEN"] = (out / f"rank-{RANK}.txt").open("w")
    sys.modules[__name__].__dict__["LEFT_OPEN"].write("written at the end")
    dist.init_process_group("gloo")
    train(out, given)
    exec(end)  # noqa: S102  of the test


if __name__ == "__main__":
    main()
