"""Runs under torchrun: saves and loads with accelerate and with ckptkit's look-alikes.

Usage: accelerate_run.py FOLDER VERSION, the latter of FSDP. Each line that it prints on rank 0
is one thing that was compared.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

import ckptkit
from ckptkit.core.errors import OutputExistsError
from ckptkit.integrations.accelerate import close, install, load_state, save_model, save_state
from ckptkit.writer.record import RECORDS_FOLDER
from tests.distributed import cases
from tests.distributed.cases import end, nobody_talks, say
from tests.distributed.pretending.sitecustomize import pretend

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.blocks(x)).square().mean()
        return loss


class Averaging(Net):
    """Keeps an average in a buffer, which mixed precision casts in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: Any = self.mean
        mean.mul_(0.9).add_(0.01)
        return super().forward(x + mean)


class Narrow(Net):
    """In bfloat16 before it is prepared, as `from_pretrained` loads most models."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Counter:
    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Odd(Counter):
    """What only a pickle can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": Counter()}


class Training:
    """All that an accelerate script has."""

    def __init__(self, folder: Path, version: int, kind: type[Net] = Net, **options: Any) -> None:
        plugin: dict[str, Any] = {
            "fsdp_version": version,
            "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"],
            "cpu_ram_efficient_loading": False,
        }
        if version == 1:
            plugin |= {"sync_module_states": False, "use_orig_params": True}
        self.accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(
                project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
            ),
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
            **options,
        )
        torch.manual_seed(3)
        model: Any = kind()
        if version == 1:  # whose parameters are others once they are sharded
            model = self.accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rows = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].repeat(1, WIDTH) / 64)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        parts = (
            [optimizer, scheduler, loader]
            if version == 1
            else [model, optimizer, scheduler, loader]
        )
        *sharded, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(*parts)
        self.model = sharded[0] if sharded else model
        self.counter = Counter()
        self.other_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self.accelerator.register_for_checkpointing(self.counter, self.other_scheduler)

    def train(self, batches: int) -> None:
        for _, (rows,) in zip(range(batches), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(rows + torch.rand(1)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.batches += 1
            self.other_scheduler.last_epoch += 2

    def snapshot(self) -> dict[str, Any]:
        states = {
            f"state.{i}.{name}": value
            for i, p in enumerate(self.model.parameters())
            for name, value in self.optimizer.state.get(p, {}).items()
        }
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers()) | states
        return {
            "tensors": {name: _local(value).clone() for name, value in tensors.items()},
            "scheduler": self.scheduler.state_dict(),
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
            ],
            "counter": self.counter.batches,
            "other": self.other_scheduler.last_epoch,
            "step": self.accelerator.step,
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
            "python": random.getstate(),
        }

    def wipe(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                _local(parameter).fill_(0.125)
            for state in self.optimizer.state.values():
                for value in state.values():
                    _local(value).zero_()
        for group in self.optimizer.param_groups:
            group["lr"] = 5.0
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), "last_epoch": 77})
        self.counter.batches = self.other_scheduler.last_epoch = -1
        self.accelerator.step = 99
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)

    def check_next(self, batch: int) -> None:
        """Sees that the dataloader goes on with this batch of its rank, and begins it anew."""
        (rows,) = next(iter(self.loader))
        assert rows[0, 0] * 64 == 2 * (2 * batch + dist.get_rank()), rows


def _local(value: Any) -> torch.Tensor:
    value = getattr(value, "_local_tensor", value)
    data: torch.Tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return data


def compare(training: Training, truth: dict[str, Any], what: str) -> None:
    found = training.snapshot()
    wrong = [k for k, v in truth["tensors"].items() if not torch.equal(v, found["tensors"][k])]
    wrong += [k for k in truth if k not in {"tensors", "torch"} and truth[k] != found[k]]
    if not torch.equal(truth["torch"], found["torch"]):
        wrong.append("torch")
    assert not wrong, f"rank {dist.get_rank()}, {what}: {wrong}"
    say(what)


def names(folder: Path) -> list[str]:
    dist.barrier()
    return cases.names(folder)


def automatic_names(training: Training, run: Path) -> None:
    training.train(3)
    assert save_state(training.accelerator).result() == run / "checkpoint_0"
    training.train(2)
    save_state(training.accelerator)
    training.train(2)
    last = training.snapshot()
    handle = save_state(training.accelerator)  # while the one before may be under way
    training.train(1)  # which the save must not see
    load_state(training.accelerator)  # which waits for it
    assert handle.done()
    compare(training, last, "the newest was loaded after its save")
    training.check_next(2)
    assert names(run) == ["checkpoint_1", "checkpoint_2"], names(run)
    say("the oldest went")
    training.wipe()
    training.accelerator.load_state(str(run / "checkpoint_2"))
    compare(training, last, "accelerate loaded what ckptkit wrote")
    training.check_next(2)
    close(training.accelerator)
    training.wipe()
    training.accelerator.load_state()
    compare(training, last, "accelerate found the newest by itself")
    training.accelerator.project_configuration.iteration = 2
    try:
        save_state(training.accelerator)
    except OutputExistsError:
        say("an iteration that is there was refused")


def given_names(training: Training, folder: Path) -> None:
    accelerator = training.accelerator
    accelerator.project_configuration.automatic_checkpoint_naming = False
    training.train(3)
    truth = training.snapshot()
    accelerator.save_state(str(folder / "by_stock"))
    training.wipe()
    load_state(accelerator, folder / "by_stock")
    compare(training, truth, "ckptkit loaded what accelerate wrote")
    training.check_next(5)  # 2 when the last load was done, and 3 since
    truth = training.snapshot()  # as a new iterator draws a seed
    written: list[str] = []

    def write(models: list[Any], weights: list[Any], place: str) -> None:
        assert models == accelerator._models
        assert weights == []
        Path(place, "extra").mkdir(exist_ok=True)
        Path(place, "extra", "note.txt").write_text("from a hook", encoding="utf-8")
        written.append(Path(place).name)

    accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(lambda _, place: written.append(str(place)))
    for _ in range(2):
        save_state(accelerator, folder / "epoch_1")
    save_state(accelerator, str(folder / "checkpoint-5"), keep_last=1).result()
    save_state(accelerator, str(folder / "checkpoint-6"), keep_last=1).result()
    training.wipe()
    load_state(accelerator, folder / "epoch_1")
    compare(training, truth, "a folder with a name of its own was loaded")
    assert written == [
        "epoch_1",
        "epoch_1",
        "checkpoint-5",
        "checkpoint-6",
        str(folder / "epoch_1"),
    ]
    assert (folder / "epoch_1/extra/note.txt").read_text() == "from a hook"
    manifest = json.loads((folder / "epoch_1/ckptkit.json").read_text())
    assert "extra/note.txt" in manifest["files"], manifest["files"]
    assert "checkpoint-5" not in names(folder)


def by_accelerate(training: Training, folder: Path) -> None:
    """What ckptkit leaves to accelerate itself."""
    accelerator, place = training.accelerator, folder / "of_the_user"
    if dist.get_rank() == 0:
        place.mkdir()
        (place / "notes.txt").write_text("mine", encoding="utf-8")
    dist.barrier()
    assert save_state(accelerator, place).result() == place
    dist.barrier()
    assert (place / "notes.txt").exists()
    assert not (place / "ckptkit.json").exists()
    accelerator.register_for_checkpointing(Odd())
    save_state(accelerator, folder / "epoch_1").result()
    dist.barrier()
    assert not (folder / "epoch_1/ckptkit.json").exists()
    accelerator._custom_objects.pop()
    say("what ckptkit cannot save was saved by accelerate")


def installed(training: Training, folder: Path) -> None:
    accelerator = training.accelerator
    install(accelerator, wait=True)
    truth = training.snapshot()
    assert accelerator.save_state(str(folder / "installed")) == folder / "installed"
    assert (folder / "installed/ckptkit.json").exists()
    training.wipe()
    accelerator.load_state(str(folder / "installed"))
    compare(training, truth, "the accelerator's own methods go through ckptkit")
    install(accelerator)
    last, final = folder / "last", folder / "final"
    accelerator.save_state(str(last))
    accelerator.save_model(accelerator.unwrap_model(training.model), str(last))
    close(accelerator)
    save_model(accelerator, training.model, final, max_shard_size="1KB")
    assert names(final)[-1] == "model.safetensors.index.json"
    accelerator.save_model(training.model, final)
    if dist.get_rank() == 0:
        assert [path.name for path in sorted(final.iterdir())] == [
            "ckptkit.json",
            "model.safetensors",
        ]
        assert (final / "model.safetensors").read_bytes() == (
            last / "model.safetensors"
        ).read_bytes()
        assert ckptkit.verify(final).ok
        assert ckptkit.verify(last).ok  # as a step, which it still is
        written = load_file(final / "model.safetensors")
        with ckptkit.open(last / "pytorch_model_fsdp_0") as step:
            assert sorted(written) == sorted(Net().state_dict())
            assert all(torch.equal(step[name], value) for name, value in written.items())
    training.wipe()
    accelerator.load_state(str(last))
    compare(training, truth, "the model was written without a gather, beside a step and alone")


def gathered(training: Training) -> dict[str, torch.Tensor]:
    """What stock returns; on the CPU, FSDP1 dies where it is to offload to the CPU."""
    model = training.model
    if not isinstance(model, FullyShardedDataParallel):
        found: dict[str, torch.Tensor] = Accelerator.get_state_dict(training.accelerator, model)
        return found
    whole = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
    return {name: value.clone() for name, value in state.items()} if dist.get_rank() == 0 else {}


def whole_state(training: Training) -> None:
    """What stock gathers, without a collective, and as it was at that moment."""
    accelerator, model = training.accelerator, training.model
    stock = gathered(training)
    with nobody_talks():
        ours = accelerator.get_state_dict(model)
        again = accelerator.get_state_dict(accelerator.unwrap_model(model))
    truth = training.snapshot()
    training.wipe()
    assert list(ours) == list(stock) == list(again)
    assert bool(ours) == (dist.get_rank() == 0)
    for name, value in stock.items():
        assert type(ours[name]) is torch.Tensor
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name], value), name
        assert torch.equal(again[name], value), name
    with torch.no_grad():
        for (name, parameter), value in zip(
            training.model.named_parameters(), model.parameters(), strict=True
        ):
            _local(value).copy_(truth["tensors"][name])
            assert parameter is value
    say("the whole state was put together without a gather")


def two_tiers(training: Training, folder: Path) -> None:
    """A step that was not drained before the job ended is loaded from the node's own disk."""
    accelerator, step = training.accelerator, folder / "shared/checkpoint-90"
    truth = training.snapshot()
    install(accelerator, local=folder / "node")
    accelerator.save_state(str(step))
    close(accelerator)
    dist.barrier()
    if dist.get_rank() == 0:  # as a kill would leave it
        shutil.rmtree(step)
        (folder / "node/checkpoint-90" / RECORDS_FOLDER / "drained").unlink()
    dist.barrier()
    training.wipe()
    accelerator.load_state(str(step))
    compare(training, truth, "a step was loaded that only the node's own disk had")
    install(accelerator)


def in_low_precision(folder: Path, version: int) -> None:
    """A job in bfloat16 is started again, and loads before it has run a forward pass."""

    def started() -> Training:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Training(folder, version, Averaging, mixed_precision="bf16")

    def buffer(training: Training, name: str) -> torch.Tensor:
        buffers: Any = training.model.named_buffers()  # below FSDP1's names of its wrappers
        found: torch.Tensor = next(value for path, value in buffers if path.endswith(name))
        return found.float()

    first = started()
    first.accelerator.project_configuration.automatic_checkpoint_naming = False
    first.train(3)
    mean = buffer(first, "mean")
    assert not torch.equal(mean, torch.full((WIDTH,), 0.3))
    save_state(first.accelerator, folder / "low").result()
    first.accelerator.save_state(str(folder / "low_stock"))
    close(first.accelerator)
    dist.barrier()
    for name in ("low", "low_stock"):
        with ckptkit.open(folder / name / "pytorch_model_fsdp_0") as step:
            assert step["mean"].dtype == torch.float32
            assert torch.equal(step["mean"], mean)
        again = started()
        load_state(again.accelerator, folder / name)
        assert torch.equal(buffer(again, "mean"), mean)
        assert buffer(again, "seen").item() == 7
        again.train(2)
    again = started()
    again.accelerator.load_state(str(folder / "low"))
    assert torch.equal(buffer(again, "mean"), mean)
    AcceleratorState._reset_state(reset_partial_state=True)
    say("a job in bfloat16 was loaded before its first forward pass")


def in_narrow_weights(folder: Path, version: int) -> None:
    """accelerate widens weights in bfloat16, with FSDP1 in the memory of the flat ones alone."""

    def started() -> Training:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Training(folder, version, Narrow, mixed_precision="bf16")

    first = started()
    first.accelerator.project_configuration.automatic_checkpoint_naming = False
    save_state(first.accelerator, folder / "untrained").result()
    with ckptkit.open(folder / "untrained" / "pytorch_model_fsdp_0") as step:
        torch.manual_seed(3)
        for name, value in Narrow().state_dict().items():
            assert torch.equal(step[name], value.to(step[name].dtype)), name
    first.train(3)
    save_state(first.accelerator, folder / "trained").result()
    truth = first.snapshot()
    close(first.accelerator)
    again = started()
    load_state(again.accelerator, folder / "trained")
    compare(again, truth, "weights that accelerate has widened were loaded")
    again.model.eval()
    with torch.no_grad():
        again.model(torch.zeros(2, WIDTH))
    if version == 2:  # whose root module stays whole
        again.model.reshard()
    compare(again, truth, "the first forward pass left them as they were")
    AcceleratorState._reset_state(reset_partial_state=True)


def failing(training: Training, folder: Path) -> None:
    """A save that fails in the background costs no other one, and the end of training tells it."""
    accelerator, run, rank = training.accelerator, folder / "checkpoints", dist.get_rank()
    config = accelerator.project_configuration
    config.automatic_checkpoint_naming, config.total_limit, config.iteration = True, 1, 7
    strangers = run / "checkpoint_7/notes.txt"

    def come_between(*_: object) -> None:
        dist.barrier()  # all ranks have seen that the folder is not there
        strangers.parent.mkdir(exist_ok=True)
        strangers.touch()

    hook = accelerator.register_save_state_pre_hook(come_between)
    save_state(accelerator).wait()
    hook.remove()
    assert names(run) == ["checkpoint_1", "checkpoint_2", "checkpoint_7"], names(run)
    config.automatic_checkpoint_naming = False
    assert Path(accelerator.save_state(str(folder / "after"))).is_dir()  # so it was waited for
    try:
        accelerator.end_training()
    except OutputExistsError:
        assert strangers.exists()
        sys.stdout.write("the end of the training told of a failure\n" * (rank == 0))
    else:
        raise AssertionError("nothing was told")
    assert not dist.is_initialized()


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    pretend(accelerate.state)
    in_low_precision(folder / "bf16", int(sys.argv[2]))
    in_narrow_weights(folder / "narrow", int(sys.argv[2]))
    training = Training(folder, int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    automatic_names(training, folder / "checkpoints")
    given_names(training, folder)
    by_accelerate(training, folder)
    installed(training, folder)
    whole_state(training)
    two_tiers(training, folder)
    failing(training, folder)
    end(meets=False)


if __name__ == "__main__":
    main()
