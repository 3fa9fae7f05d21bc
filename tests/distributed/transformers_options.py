"""What `transformers_run.py` checks of options of the Trainer, and of its last save."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.utils import hub

from ckptkit.core.errors import OutputExistsError, RefusedError, UnsupportedError, UsageError
from ckptkit.hub.secrets import MAX_SMALL_BYTES, secrets_in
from ckptkit.integrations.transformers import install
from ckptkit.training import Checkpointer
from tests.distributed.tiny_trainers import (
    HALF,
    LAST,
    Killing,
    Tensors,
    expect,
    expect_equal,
    expect_error,
    local_part,
    model,
    only_model,
    steps_in,
    trained,
    trainer,
)
from tests.hub_models import running_hub
from tests.hub_server import TOKEN, HubServer, Repo
from tests.planted_secrets import SECRETS

HIDDEN = "hf_not_for_others"


class Scored(Trainer):  # type: ignore[misc]
    """Finds the scores that it is given, by step."""

    scores: Mapping[int, float] = {2: 0.3, 4: 0.1, 6: 0.2}

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        found: dict[str, float] = super().evaluate(*arguments, **options)
        score = {"eval_score": self.scores[self.state.global_step]}
        self.log(dict(score))
        return found | score


class Watching(TrainerCallback):  # type: ignore[misc]
    """Keeps the model after each step, and what lies there when a step was saved."""

    def __init__(self) -> None:
        self.models: dict[int, Tensors] = {}

    def on_step_end(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
        named = given["model"].named_parameters()
        self.models[state.global_step] = {name: local_part(value) for name, value in named}


class Adding(Trainer):  # type: ignore[misc]
    """Puts a file of its own into each step."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "added").touch()


class Looking(TrainerCallback):  # type: ignore[misc]
    """Has a look at each step as soon as it was saved."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.found.append((folder / "trainer_state.json").is_file())


def check_keeping(check: str, folder: Path) -> None:
    """What stays and what is loaded at the end."""
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": False,
        "made_by": Scored,
    }
    for kind, limit in (("fsdp2", 2), ("fsdp1", 1)):
        run, watching = folder / f"{check}-{limit}", Watching()
        made = trainer(kind, run, **best, save_total_limit=limit, callbacks=[watching])
        install(made)
        made.train()
        now = {name: local_part(value) for name, value in made.model.named_parameters()}
        expect(steps_in(run), [4, 6] if limit == 2 else [4])  # the best and the newest
        expect_equal(now, watching.models[HALF])
        state = json.loads((run / f"checkpoint-{HALF}/trainer_state.json").read_text())
        best_step = Path(state["best_model_checkpoint"]).name, state["best_metric"]
        expect(best_step, ("checkpoint-4", 0.1))
        metrics = json.loads((run / f"checkpoint-{HALF}/ckptkit.json").read_text())["source"]
        assert "eval_score" in metrics["metrics"]
    run, looking = folder / f"{check}-when-best", Looking()
    made = trainer("fsdp2", run, **best | {"save_strategy": "best"}, callbacks=[looking])
    install(made)
    made.train()
    expect((steps_in(run), looking.found), ([2, 4], [True, True]))
    run = folder / f"{check}-epochs"
    changes: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
    }
    made = trainer("fsdp2", run, save_strategy="epoch", made_by=Adding, **changes)
    install(made)
    made.train()
    expect(steps_in(run), [3, 6])
    expect([(run / f"checkpoint-{n}/added").exists() for n in (3, 6)], [True, True])


def check_only_model(check: str, folder: Path) -> None:
    """`save_only_model`, and going on from what it leaves."""
    full = {"save_only_model": True, "state_dict_type": "FULL_STATE_DICT"}
    made = trainer("fsdp2", folder / check, **full)
    install(made)
    truth = trained(made)
    files = sorted(entry.name for entry in (folder / check / f"checkpoint-{LAST}").iterdir())
    expect(files, ["ckptkit", "ckptkit.json", "pytorch_model_fsdp_0", "trainer_state.json"])
    again = trainer("fsdp2", folder / check, max_steps=LAST)
    install(again)
    found = trained(again, True)
    expect_equal(only_model(found), only_model(truth))


class SavingItself(TrainerCallback):  # type: ignore[misc]
    """Saves to the run of a Trainer that does so too."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.checkpointer = Checkpointer(self.run, layout="trainer")

    def on_save(self, _args: Any, state: Any, *_: Any, **given: Any) -> None:
        self.checkpointer.save(state.global_step, {"model": given["model"]})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.checkpointer.close()


def check_failing(check: str, folder: Path) -> None:
    """Steps that cannot be saved, in between and at the end."""
    for name, step in (("between", HALF), ("end", LAST)):
        run = folder / f"{check}-{name}"
        made = trainer("fsdp2", run)
        if dist.get_rank() == 0:
            (run / f"checkpoint-{step}").mkdir(parents=True)
            (run / f"checkpoint-{step}/mine.txt").write_text("mine")
        dist.barrier()
        install(made)
        if name == "end":
            expect_error(OutputExistsError, "", made.train)
        else:  # training outlives it
            made.train()
        complete = sorted(
            int(path.parent.name[11:]) for path in run.glob("checkpoint-*/ckptkit.json")
        )
        assert made.state.global_step == LAST
        expect(complete, [2, 6] if name == "between" else [2, 4])
    run = folder
    for name, is_installed in (("beside install", True), ("beside stock", False)):
        run = folder / f"{check}-{name.replace(' ', '-')}"
        made = trainer("fsdp2", run, max_steps=2, callbacks=[SavingItself(run)])
        if is_installed:
            install(made)
        expect_error(RefusedError if is_installed else OutputExistsError, "", made.train)
        assert made.state.global_step == (0 if is_installed else 2)
    expect((run / "checkpoint-2/trainer_state.json").is_file(), True)


class Asking(TrainerCallback):  # type: ignore[misc]
    """Asks the Trainer's own callback for a save, as a signal does some seconds later."""

    of: list[Any]

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.of[0].jit_manager.is_checkpoint_requested = state.global_step == 2


def check_signals(check: str, folder: Path) -> None:
    """A signal to one rank: all of them save and stop."""
    run = folder / check
    many = 100 * LAST  # how many steps it takes to agree depends on how fast they are
    killing = [Killing(1, signal.SIGUSR1)]
    made = trainer("fsdp2", run, save_strategy="no", max_steps=many, callbacks=killing)
    checkpoints = install(made)
    install(made, signals="SIGUSR1")
    assert checkpoints.checkpointer is None
    made.train()
    expect(steps_in(run), [made.state.global_step])
    assert made.state.global_step < many
    run = folder / f"{check}-own"
    asking = Asking()
    made = trainer("fsdp2", run, save_strategy="no", enable_jit_checkpoint=True, callbacks=[asking])
    install(made)
    asking.of = [one for one in made.callback_handler.callbacks if hasattr(one, "jit_manager")]
    made.train()
    expect(steps_in(run), [2])
    expect(list(run.glob("checkpoint-2/*.txt")), [])


def check_nothing(check: str, folder: Path) -> None:
    """Without shards nothing changes."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which arguments of before have set
    made = trainer("fsdp2", folder / check, fsdp=None, fsdp_config=None)
    install(made)
    assert type(made) is Trainer
    with pytest.MonkeyPatch.context() as patch:  # as of versions that cannot shard as they load
        patch.delattr(made, "is_distributed_loading_by_transformers")
        install(made)
    made = trainer("fsdp2", folder / check)
    with pytest.raises(UsageError, match="keep_last") as refused:
        install(made, keep_last=2)
    assert refused.value.hint == "set save_total_limit in the arguments of the Trainer"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_finalize_training", lambda *_: None)
        with pytest.raises(UnsupportedError, match="_finalize_training"):
            install(made)
    assert type(made) is Trainer


def wait_for_commits(hub: HubServer, count: int) -> Repo:
    """Waits for the process that pushes, as training does not."""
    until = time.monotonic() + 120
    while not hub.has("org/tiny") or len(hub.repo("org/tiny").tags) < count:
        assert time.monotonic() < until
        time.sleep(0.1)
    return hub.repo("org/tiny")


class Planting(Trainer):  # type: ignore[misc]
    """Puts files with secrets beside each model, as scripts that copy their folder do."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if dist.get_rank() == 0:
            plant(Path(output_dir or self.args.output_dir))


def plant(folder: Path) -> None:
    """Plants a secret in files of several kinds; of those that searches once passed by too."""
    own, other = f"export HF_TOKEN={TOKEN}", SECRETS["github classic"]
    weights = b"\x80\x02" + bytes(99) + TOKEN.encode()
    logs = folder / "more/logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "train.log").write_bytes(b"step 1\n" * 9 + other.encode())
    (folder / ".env").write_text(own)
    (folder / "train.sh").write_text(own)
    (folder / "id.pem").write_text(SECRETS["rsa"])
    (folder / "notes.bin").write_bytes(weights)
    if not folder.name.startswith("checkpoint-"):  # where it would make another model of the step
        (folder / "pytorch_model-00001-of-00002.bin").write_bytes(weights)
    with (folder / "all.log").open("wb") as file:  # too large to be held in memory
        file.truncate(MAX_SMALL_BYTES)
        file.seek(MAX_SMALL_BYTES // 2)
        file.write(other.encode())
    (folder / "notes.txt").write_text("nothing to hide")


def check_secrets(check: str, folder: Path) -> None:
    """Whichever way a run is pushed, by the Checkpointer or the Trainer, no secret goes along."""
    ways = [("SHARDED_STATE_DICT", "checkpoint")]  # others are tried with the Checkpointer alone
    strategies = ("checkpoint", "all_checkpoints", "every_save", "end")
    ways += [("FULL_STATE_DICT", strategy) for strategy in strategies]
    with running_hub(xet=False) as server, pytest.MonkeyPatch.context() as patch:
        settings = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setattr(hub.hf_api(), "endpoint", server.url)
        for form, strategy in ways:
            server.clear()
            run = folder / f"{check}-{form}-{strategy}"
            changes = {"hub_strategy": strategy, "hub_model_id": "org/tiny", "hub_token": TOKEN}
            made = trainer(
                "fsdp2", run, state_dict_type=form, made_by=Planting, max_steps=2, **changes
            )
            made.args.push_to_hub = True
            if form == "FULL_STATE_DICT":
                made.init_hf_repo()
            if dist.get_rank() == 0:
                plant(run)
            dist.barrier()
            install(made)
            made.train()
            if strategy == "end":
                made.push_to_hub()
            made._finish_current_push()
            if dist.get_rank() == 0:
                repo = wait_for_commits(server, form != "FULL_STATE_DICT")
                there = {path: server.read("org/tiny", path) for path in repo.files()}
                leaked = sorted(p for p, data in there.items() if secrets_in([data], [TOKEN]))
                assert not leaked, (form, strategy)
                assert "model.safetensors" in there
            dist.barrier()


def check_native(check: str, folder: Path) -> None:
    """A model that Transformers itself sharded as it loaded it."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which arguments of before have set
    if dist.get_rank() == 0:
        model().save_pretrained(folder / f"{check}-base")
    dist.barrier()

    def made() -> Trainer:
        return trainer(
            "fsdp2",
            folder / check,
            fsdp=None,
            fsdp_config=None,
            save_only_model=True,  # or the Trainer refuses to be built
            model=LlamaForCausalLM.from_pretrained(
                folder / f"{check}-base",
                distributed_config=DistributedConfig(fsdp_size=2),
                attn_implementation="eager",
            ),
        )

    def installed() -> Trainer:
        new = made()
        new.args.save_only_model = False
        install(new)
        return new

    first, half = installed(), folder / f"{check}/checkpoint-{HALF}"
    truth = trained(first)
    expect(steps_in(folder / check), [2, 4, 6])
    expect_equal(trained(installed(), half), truth)
    rates = [row.get("learning_rate") for row in first.state.log_history]
    expect_equal(trained(first, half), truth)
    assert rates == [row.get("learning_rate") for row in first.state.log_history]


def check_model(check: str, folder: Path) -> None:
    """What `save_model` leaves, with the ending that FSDP's documentation asks for."""
    for kind in ("fsdp2", "fsdp1", "lora2", "lora1"):
        run = folder / f"{check}-{kind}"
        made = trainer(kind, run, save_strategy="no", max_steps=2, hub_token=HIDDEN)
        install(made)
        found = trained(made)
        made.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        made.save_model()
        made.save_model(str(run / "final"))
        dist.barrier()
        files = ["ckptkit.json", "tokenizer.json", "tokenizer_config.json", "training_args.bin"]
        if kind.startswith("lora"):
            files += ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        else:
            files += ["config.json", "generation_config.json", "model.safetensors"]
        names = sorted(entry.name for entry in run.iterdir() if entry.name != "final")
        expect(names, sorted([*files, ".ckptkit"]))
        (weights,) = (run / "final").glob("*.safetensors")
        written = load_file(weights)
        wrong = [name for name, part in only_model(found).items() if _lacks(written, name, part)]
        expect((wrong, len(written)), ([], 8 if kind.startswith("lora") else 21))
        assert HIDDEN.encode() not in (run / "training_args.bin").read_bytes()
        expect(sorted(entry.name for entry in (run / "final").iterdir()), sorted(files))


def _lacks(written: Tensors, name: str, part: torch.Tensor) -> bool:
    """Tells whether a trained tensor is not in a file, as far as this rank can tell."""
    name = name.replace("_fsdp_wrapped_module.", "")
    if "lora_" not in name and any("lora_" in one for one in written):
        return name in written
    whole = written[name.replace(".default", "")]
    flat, here = whole.flatten().tolist(), part.flatten().tolist()
    return bool(here) and not any(
        flat[start : start + len(here)] == here for start in range(len(flat) - len(here) + 1)
    )
