"""Runs one job under a trace: `python -m tests.traced_runs JOB LINES` from the project's root."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import tracing

ROOT = Path(__file__).resolve().parents[1]
LLAMA = "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"
ADAPTER = "fixtures/peft_trl_fsdp2_ckptkit/checkpoint"


def command(lines: str, *arguments: str) -> None:
    tracing.start(lines, str(ROOT))
    from ckptkit_cli.main import main

    status = main(list(arguments))
    assert status == 0, status


def save(lines: str, run: str) -> None:
    """Traces one save, from `prepare` to the committed step, the writer's process included."""
    from ckptkit.training import Checkpointer
    from ckptkit.writer import process

    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    program += f"from tests import tracing; tracing.start({lines!r}, {str(ROOT)!r})\n"
    process._PROGRAM = program + process._PROGRAM
    state = trained_state()
    with Checkpointer(run) as checkpointer:
        tracing.start(lines, str(ROOT))
        checkpointer.prepare(state)
        checkpointer.save(5, state).result(timeout=60)
        sys.setprofile(None)


def resume(lines: str, run: str) -> None:
    """Traces one resume, of a step that was saved before."""
    from ckptkit.training import Checkpointer

    with Checkpointer(run) as checkpointer:
        checkpointer.save(5, trained_state()).result(timeout=60)
        tracing.start(lines, str(ROOT))
        assert checkpointer.resume(trained_state()) == 5
        sys.setprofile(None)


def trained_state() -> dict[str, Any]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def push(lines: str, folder: Path) -> None:
    import os

    from tests.hub_models import consolidated, running_hub
    from tests.hub_server import TOKEN

    model = consolidated(folder)
    with running_hub() as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        from ckptkit.hub import push as push_folder

        tracing.start(lines, str(ROOT))
        push_folder(model, "me/model", token=TOKEN, endpoint=hub.url)
        sys.setprofile(None)


def main(job: str, lines: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if job == "consolidate":
            command(lines, "consolidate", LLAMA, f"{folder}/out", "--quiet")
        elif job == "adapter merge":
            command(lines, "adapter", "merge", ADAPTER, f"{folder}/out", "--quiet")
        elif job == "save":
            save(lines, f"{folder}/run")
        elif job == "resume":
            resume(lines, f"{folder}/run")
        else:
            push(lines, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
