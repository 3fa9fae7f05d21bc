"""What `transformers_run.py` checks where options, subclasses and adapters meet."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PromptTuningConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer
from transformers.integrations import TensorBoardCallback
from transformers.utils import hub

from ckptkit.core.errors import RefusedError, ResumeError
from ckptkit.integrations.transformers import install
from tests.distributed.tiny_trainers import (
    WORDS,
    Killing,
    expect,
    expect_equal,
    local_part,
    model,
    only_model,
    steps_in,
    trained,
    trainer,
)
from tests.distributed.transformers_options import Looking, Scored, Watching

EVERY_STEP: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "metric_for_best_model": "score",
    "greater_is_better": False,
}


class Falling(Scored):
    """Is best after its first step."""

    scores = {1: 0.1} | dict.fromkeys(range(2, 101), 0.5)


class Late(Scored):
    """Is best after its third step."""

    scores = dict.fromkeys(range(1, 9), 0.5) | {3: 0.1}


class Writer:
    """Stands in for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int]] = set()

    def add_scalar(self, name: str, _value: float, step: int) -> None:
        self.found.add((name, step))

    def add_text(self, *_: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Own(Trainer):  # type: ignore[misc]
    """Puts a file of its own beside each model, and has a `_save` that is called no more."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir or self.args.output_dir, "head.txt").touch()

    def _save(self, *_: Any, **__: Any) -> None: ...


def check_asked(check: str, folder: Path) -> None:
    """A signal after a step that is not the best one, which alone is to be saved; and reports."""
    run, writer, looking = folder / check, Writer(), Looking()
    made = trainer(
        "fsdp2",
        run,
        **EVERY_STEP | {"save_strategy": "best", "made_by": Falling, "max_steps": 100},
        callbacks=[Killing(2, signal.SIGUSR1), TensorBoardCallback(writer), looking],
    )
    install(made, signals="SIGUSR1")
    made.train()
    stopped = made.state.global_step
    expect((steps_in(run), looking.found), ([1, stopped], [True, True]))
    assert stopped < made.state.max_steps
    durable = {step for name, step in writer.found if name == "train/ckptkit/durable_s"}
    expect(durable, {1, stopped})


def check_skipping(check: str, folder: Path) -> None:
    """Steps that may be skipped: not the best one, nor the last."""
    run, watching = folder / check, Watching()
    changes = EVERY_STEP | {"load_best_model_at_end": True, "made_by": Late, "max_steps": 5}
    made = trainer("fsdp2", run, **changes, callbacks=[watching])
    install(made, in_flight="skip")
    made.train()
    now = {name: local_part(value) for name, value in made.model.named_parameters()}
    expect({3, 5} - set(steps_in(run)), set())
    expect_equal(now, watching.models[3])


class Shy(torch.optim.AdamW):
    """Does not show its state while it is saved."""

    def __getattribute__(self, name: str) -> Any:
        if name == "state" and object.__getattribute__(self, "param_groups")[0].get("hides"):
            raise RuntimeError("the state lies on the moon")
        return super().__getattribute__(name)


def check_hints(check: str, folder: Path) -> None:
    """What a user of `install` reads who has no Checkpointer, and an export of a new process."""
    run = folder / check

    def make(**options: Any) -> Trainer:
        made = trainer("fsdp2", run, max_steps=2)
        install(made, **options)
        return made

    first = make()

    def create(*arguments: Any) -> Any:
        optimizer = type(first).create_optimizer(first, *arguments)
        optimizer.__class__ = Shy
        return optimizer

    first.create_optimizer = create
    first._save_checkpoint = partial(_hiding, first, first._save_checkpoint)
    first.train()
    with pytest.raises(ResumeError) as caught:
        make().train(resume_from_checkpoint=True)
    assert "install(trainer, unfit_optimizer='reset')" in caught.value.hint
    again = make(unfit_optimizer="reset")
    again.args.max_steps = 3
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    again.save_model(str(run / "final"))
    # No process of Transformers was started.
    expect(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), before)


def _hiding(made: Trainer, save: Callable[..., None], *arguments: Any) -> None:
    made.optimizer.optimizer.param_groups[0]["hides"] = True
    save(*arguments)
    made.optimizer.optimizer.param_groups[0]["hides"] = False


def check_adding(check: str, folder: Path) -> None:
    """A subclass with a `save_model` of its own."""
    run = folder / check
    made = trainer("fsdp2", run, max_steps=2, made_by=Own)
    install(made)
    made.train()
    made.save_model(str(run / "final"))
    dist.barrier()
    heads = [path.parent.name for path in sorted(run.glob("*/head.txt"))]
    expect(heads, ["checkpoint-2", "final"])
    expect([path.parent.name for path in sorted(run.glob("*/*.safetensors"))], ["final"])


def check_uploading(check: str, folder: Path) -> None:
    """Pushes while training, of the whole model where the Trainer itself would have it."""
    run = folder / check
    made = trainer("fsdp1", run, state_dict_type="FULL_STATE_DICT", max_steps=4)
    made.args.push_to_hub, made.hub_model_id, made.push_in_progress = True, "mine/tiny", None
    found: list[tuple[bool, list[str]]] = []

    def upload_folder(folder_path: str, ignore_patterns: list[str], **_: Any) -> Future[None]:
        found.append((Path(folder_path, "model.safetensors").is_file(), ignore_patterns))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.hf_api(), "upload_folder", upload_folder, raising=False)
        install(made)
        made.train()
    expect([whole for whole, _ in found], [True, True])
    patterns = sorted({pattern for _, patterns in found for pattern in patterns})
    expect(patterns, [".checkpoint-*", ".ckptkit*", "_*", "checkpoint-*"])


def check_adapters(check: str, folder: Path) -> None:
    """Adapters with more in their files than they train, and one that is no modules."""
    if dist.get_rank() == 0:
        model().save_pretrained(folder / f"{check}-base")
    dist.barrier()

    def resized() -> LlamaForCausalLM:
        net = LlamaForCausalLM.from_pretrained(folder / f"{check}-base")
        net.resize_token_embeddings(WORDS + 8, mean_resizing=False)
        return net

    made = _saved_and_loaded(
        f"{check} resized", lambda run: trainer("lora2", run, model=resized(), max_steps=2), folder
    )
    made.save_model(str(folder / "adapter"))
    dist.barrier()
    written = load_file(folder / "adapter/adapter_model.safetensors")
    expected = get_peft_model_state_dict(made.model)
    expect((written.keys(), len(written)), (expected.keys(), 10))
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    made = _saved_and_loaded(
        f"{check} prompt",
        lambda run: trainer("lora2", run, peft_config=prompt, max_steps=2),
        folder,
    )
    with pytest.raises(RefusedError, match="prompt_encoder"):
        made.save_model(str(folder / "no-adapter"))


def _saved_and_loaded(check: str, make: Callable[[Path], Trainer], folder: Path) -> Trainer:
    run = folder / check.replace(" ", "-")
    made = make(run)
    install(made)
    truth = trained(made)
    again = make(run)
    install(again)
    expect_equal(only_model(trained(again, True)), only_model(truth))
    return again
