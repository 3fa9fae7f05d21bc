"""Runs one job under a trace: `python -m tests.traced_runs JOB LINES` from the project's root.

It records which functions and types of ckptkit a process uses. A line is written when a function is
called for the first time, so that a process that is killed or leaves with `os._exit` has its lines
too. The writer's process imports this module, too: it takes nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLAMA = "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"
ADAPTER = "fixtures/peft_trl_fsdp2_ckptkit/checkpoint"


class Tracer:
    """A profile function that appends lines to a file: process, kind, file or module, name."""

    def __init__(self, lines: str, trees: tuple[str, ...]) -> None:
        self.lines = lines
        self.trees = trees
        self.seen: set[tuple[str, str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or self._imports(frame):
            return
        if code.co_filename.startswith(self.trees):
            self._note("function", code.co_filename, code.co_qualname)
        if code.co_name == "__init__":  # of a dataclass it is in no file
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.startswith("ckptkit"):
                self._note("type", kind.__module__, kind.__qualname__)

    def _note(self, kind: str, home: str, name: str) -> None:
        if (kind, home, name) in self.seen:
            return
        self.seen.add((kind, home, name))
        file = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{os.getpid()}\t{kind}\t{home}\t{name}\n".encode())
        os.close(file)

    def _imports(self, frame: FrameType | None) -> bool:
        """Whether a module of ours is being imported by this call or a caller of it."""
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(
                self.trees
            ):
                return True
            frame = frame.f_back
        return False


def start(lines: str, root: str) -> None:
    tracer = Tracer(lines, (f"{root}/ckptkit/", f"{root}/cli/"))
    threading.setprofile(tracer)
    sys.setprofile(tracer)


def command(lines: str, *arguments: str) -> None:
    start(lines, str(ROOT))
    from ckptkit_cli.main import main

    status = main(list(arguments))
    assert status == 0, status


def save(lines: str, run: str) -> None:
    """Traces one save, from `prepare` to the committed step, the writer's process included."""
    from ckptkit.training import Checkpointer
    from ckptkit.training.save import writer_process

    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    program += f"from tests import traced_runs; traced_runs.start({lines!r}, {str(ROOT)!r})\n"
    writer_process._PROGRAM = program + writer_process._PROGRAM
    state = trained_state()
    with Checkpointer(run) as checkpointer:
        start(lines, str(ROOT))
        checkpointer.prepare(state)
        checkpointer.save(5, state).result(timeout=60)
        sys.setprofile(None)


def resume(lines: str, run: str) -> None:
    """Traces one resume, of a step that was saved before."""
    from ckptkit.training import Checkpointer

    with Checkpointer(run) as checkpointer:
        checkpointer.save(5, trained_state()).result(timeout=60)
        start(lines, str(ROOT))
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
    from tests.hub_models import consolidated, running_hub
    from tests.hub_server import TOKEN

    model = consolidated(folder)
    with running_hub() as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        from ckptkit.hub import push as push_folder

        start(lines, str(ROOT))
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
