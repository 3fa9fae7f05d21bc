"""Reads what was saved into live models on other meshes, by torch and by ckptkit, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptkit.training import Checkpointer, load_into
from tests.campaigns.differential.draws import Draw
from tests.campaigns.differential.live_models import (
    Training,
    Truth,
    gather,
    gather_model,
    make_model,
    make_training,
)
from tests.campaigns.differential.savers import SECONDS

Compared = tuple[int, int]  # tensors or values, and bytes
Check = tuple[str, str, Callable[[], Compared]]  # the saver, the reader, what compares
SEED_OF_READERS = 1 << 20
WITH_ALL = ("dcp", "dcp_full", "dcp_async", "accelerate_form")


class UnequalError(AssertionError):
    """Two sides that have to be equal and are not."""


def compare(found: Mapping[str, Any], truth: Mapping[str, Any], what: str = "") -> Compared:
    """Compares tensors bit by bit."""
    if found.keys() != truth.keys():
        more, fewer = found.keys() - truth.keys(), truth.keys() - found.keys()
        raise UnequalError(f"{what}: {sorted(more)[:5]} more, {sorted(fewer)[:5]} fewer names")
    size = 0
    for name, expected in truth.items():
        size += compare_one(found[name], expected, f"{what} {name}")
    return len(truth), size


def compare_one(found: torch.Tensor, expected: torch.Tensor, what: str) -> int:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise UnequalError(
            f"{what}: {found.dtype} {tuple(found.shape)}, expected {expected.dtype}"
            f" {tuple(expected.shape)}"
        )
    one, other = (
        side.detach().contiguous().flatten().view(torch.uint8) for side in (found, expected)
    )
    if not torch.equal(one, other):
        at = int((one != other).nonzero()[0]) // max(1, found.element_size())
        values = found.flatten()[at].item(), expected.flatten()[at].item()
        raise UnequalError(f"{what}: element {at} is {values[0]}, expected {values[1]}")
    return expected.nbytes


def compare_states(
    found: Truth,
    truth: Truth,
    kinds: Sequence[str] = ("extra", "scheduler", "progress", "groups", "lr"),
) -> Compared:
    """Compares models and optimizers bit by bit, and Python values of the given kinds."""
    count, size = compare(found["model"], truth["model"], "model")
    if truth["optimizer"]:
        more = compare(found["optimizer"], truth["optimizer"], "optimizer")
        count, size = count + more[0], size + more[1]
    for kind in kinds:
        equal(found[kind], truth[kind], kind)
    return count + len(kinds), size


def equal(found: Any, expected: Any, what: str) -> None:
    if repr(found) != repr(expected):
        raise UnequalError(f"{what}: {found!r}, expected {expected!r}")


class Reading:
    """What the ranks of the second mesh read for one draw, from the folder of its saves."""

    def __init__(self, draw: Draw, folder: Path, truth: Truth) -> None:
        self.draw = draw
        self.mesh = draw.second
        self.folder = folder
        self.truth = truth
        self.step = Path((folder / "step_2").read_text())
        self.stock = folder / "stock"

    def checks(self) -> Iterator[Check]:
        layout, saver = self.draw.own_options["layout"], self.draw.stock
        own = "Checkpointer"
        yield own, "Checkpointer.resume", lambda: self.resume_own(layout)
        yield own, "load_into", lambda: self.load(self.step)
        yield own, "dcp.load", lambda: self.load_stock(folders_of(self.step, layout))
        yield saver, "load_into", lambda: self.load(self.stock)
        if saver in WITH_ALL:
            layout = "accelerate" if saver == "accelerate_form" else "dcp"
            if self.truth["optimizer"]:
                yield saver, "Checkpointer.resume", lambda: self.resume_stock(layout)
            if self.draw.stock_options["form"] != "safetensors":  # which torch cannot read back
                yield saver, "dcp.load", lambda: self.load_stock(folders_of(self.stock, layout))

    def fresh(self) -> Training:
        return make_training(self.draw, self.mesh, SEED_OF_READERS)

    def resume_own(self, layout: Any) -> Compared:
        """Resumes from the run, or from the step with a name of its own, whose state is all."""
        chosen, training = self.draw.own_options, self.fresh()
        options: Any = {"prefix": chosen["prefix"], "layout": layout}
        if chosen["local"]:
            options["local"] = self.folder / "node"
        with Checkpointer(self.folder / "run", timeout_seconds=SECONDS, **options) as checkpointer:
            found = checkpointer.resume(
                training.state(), folder=self.step if chosen["name"] else None
            )
        equal(found, 2, "step")
        return compare_states(gather(training), self.truth)

    def resume_stock(self, layout: Any) -> Compared:
        training, run = self.fresh(), self.folder / "other_run"
        state = training.state()
        del state["progress"]
        if layout == "dcp":
            state.pop("scheduler", None)
        with Checkpointer(run, layout=layout, timeout_seconds=SECONDS) as checkpointer:
            checkpointer.resume(state, folder=self.stock)
        kinds = ("scheduler", "groups", "lr") if layout == "accelerate" else ("groups", "lr")
        return compare_states(gather(training), self.truth, kinds)

    def load(self, source: Path) -> Compared:
        model = make_model(self.draw, self.mesh, SEED_OF_READERS)
        result = load_into(model, source)
        equal(result.missing_keys, (), "missing keys")
        return compare(gather_model(model, self.mesh)[0], self.truth["model"], "model")

    def load_stock(self, folders: tuple[Path, Path]) -> Compared:
        """What a script with `dcp.load` does."""
        training = self.fresh()
        model: Any = {"model": get_model_state_dict(training.model)}
        optimizer: Any = {}
        if self.truth["optimizer"]:  # whose first states are made by a step
            states = get_optimizer_state_dict(training.model, training.optimizer)
            # Where a rank holds nothing of a parameter of FSDP1, `dcp.load` takes the checkpoint
            # for one of torch 2.3, which has other keys.
            keys = sorted(flatten_state_dict(_flatten_sharded_tensors(states))[0])
            optimizer = {"optimizer": states} if alike(keys) else {}
        dcp.load(model, checkpoint_id=folders[0])
        if self.mesh.strategy != "ddp":  # under which it fails with tied weights
            set_model_state_dict(training.model, model["model"])
        if optimizer:
            dcp.load(optimizer, checkpoint_id=folders[1])
            set_optimizer_state_dict(
                training.model, training.optimizer, optim_state_dict=optimizer["optimizer"]
            )
        if not optimizer:
            found = gather_model(training.model, self.mesh)[0]
            return compare(found, self.truth["model"], "model")
        state = _without_numbers(gather(training))
        return compare_states(state, _without_numbers(self.truth), ())


def _without_numbers(state: Truth) -> Truth:
    """Leaves out what `Optimizer.load_state_dict` rounds to the type of the parameter."""
    kept = {
        name: value
        for name, value in state["optimizer"].items()
        if value.dim() or name.endswith("/step")
    }
    return state | {"optimizer": kept}


def alike(value: object) -> bool:
    """Returns whether all ranks have the same value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == value for one in values)


def folders_of(step: Path, layout: str) -> tuple[Path, Path]:
    """Returns where DCP finds the model, and where the optimizer."""
    if layout == "dcp":
        return step, step
    return step / "pytorch_model_fsdp_0", step / "optimizer_0"
