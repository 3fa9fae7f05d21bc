"""What scripts that run under torchrun share: how they start, wrap models, keep silent, and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.crash import troubles

Case = Callable[[Path, str], None]
Tensors = dict[str, torch.Tensor]
FULL = StateDictOptions(full_state_dict=True)


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def end(*, meets: bool = True) -> NoReturn:
    """Ends the process; the teardown of gloo's threads now and then aborts one that is done."""
    if meets:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run_cases(cases: Mapping[str, Case], *, kind: str = "") -> NoReturn:
    """Runs the cases that the arguments name, each in a folder of its own, and ends the process.

    Args:
        cases: By name. An argument is a name, or a name and what kind of it: `name:kind`. Ranks do
            not meet after a case whose name begins with `dies`.
        kind: The kind where the argument has none.
    """
    folder, *names = sys.argv[1:]
    start()
    for case in names:
        name, _, given = case.partition(":")
        place = Path(folder) / case.replace(":", "_")
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        cases[name](place, given or kind)
        if not name.startswith("dies"):
            dist.barrier()
    end(meets=False)


def say(text: str) -> None:
    """Prints a line on rank 0 once all ranks have come so far."""
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def grid() -> DeviceMesh:
    sizes = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def fsdp2(
    model: nn.Module, *parts: nn.Module, mesh: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def fsdp1(model: nn.Module, *parts: str, orig: bool, **further: Any) -> nn.Module:
    settings: dict[str, Any] = {"use_orig_params": orig, "device_id": torch.device("cpu")} | further
    for name in parts:
        part = FullyShardedDataParallel(getattr(model, name), **settings)
        model.register_module(name, part)
    return FullyShardedDataParallel(model, **settings)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp2": lambda model: fsdp2(model, model.up),
    "hsdp": lambda model: fsdp2(model, model.up, mesh=grid()),
    "fsdp1_flat": lambda model: fsdp1(model, "up", orig=False),
    "fsdp1_orig": lambda model: fsdp1(model, "up", orig=True),
    "ddp": DistributedDataParallel,
}
"""Of models that have a part called `up`."""


def in_trouble(seed: int, *sizes: int) -> dict[str, Any]:
    """Returns the state of the tests of faults, sharded, with random numbers of each rank."""
    model: Any = troubles.network(seed, *sizes)
    fsdp2(model, model[0])
    torch.manual_seed(1_000 * seed + dist.get_rank())
    return troubles.state_of(model, seed)


def full(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone().contiguous()


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


_WORDS = (
    *("gather", "reduce", "broadcast", "scatter", "barrier", "send", "recv", "all_to_all"),
    "wait",
)
_STORE = ("set", "get", "add", "wait", "compare_set", "multi_get", "multi_set", "delete_key")


class _NoTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise AssertionError(f"{func} communicates")
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_talks(*, stores: bool = False) -> Iterator[None]:
    """Makes everything that communicates raise, on any group; the store of the ranks on demand."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was issued")

    api: Any = dist  # its stubs name no store
    places: list[Any] = [dist, distributed_c10d, _functional_collectives]
    if stores:
        places += [dist.Work, dist.ProcessGroup, torch.ops._c10d_functional]
    wanted = [
        (place, name)
        for place in places
        for name in dir(place)
        if any(word in name for word in _WORDS if stores or word != "wait")
        and not name.startswith(("__", "is_"))
        and callable(getattr(place, name))
        and not isinstance(getattr(place, name), type)
    ]
    kinds = [api.Store, api.TCPStore, api.PrefixStore] if stores else []
    wanted += [(kind, name) for kind in kinds for name in _STORE if hasattr(kind, name)]
    with _NoTraffic():  # type: ignore[no-untyped-call]
        patches = [mock.patch.object(place, name, refuse) for place, name in wanted]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
