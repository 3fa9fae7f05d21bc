"""Saves tensors split at random over ranks, through torch's own DCP: `... FOLDER SEED`.

One process imports torch and forks the ranks of every world from itself.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DTensor asks for it, in every fork that has it not
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

SEED = 20240713
# How many tensors the checkpoints of a world of each size hold, and in how many checkpoints.
WORLDS = {1: (12, 1), 2: (38, 1), 3: (40, 1), 4: (60, 2), 8: (50, 1)}
MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (1, 3), (3, 1)],
    4: [(4,), (2, 2), (2, 1, 2), (4, 1)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
LIMIT_SECONDS = 60  # of one rank's life; one that hangs dies of SIGALRM


@dataclass(frozen=True)
class Case:
    """A tensor and how it is split; made from its number and the seed alone.

    Attributes:
        number: Which of all; also its name.
        seed: What all is drawn from.
        mesh: The ranks, nested in lists.
        placements: How it is split over each dimension of the mesh.
        full: The tensor itself.
    """

    number: int
    seed: int
    mesh: torch.Tensor
    placements: tuple[Placement, ...]
    full: torch.Tensor

    @property
    def name(self) -> str:
        return f"tensor_{self.number}"

    def __str__(self) -> str:
        shape, placed = list(self.full.shape), list(self.placements)
        return (
            f"seed {self.seed} {self.name}: {self.full.dtype} {shape} {placed} {self.mesh.tolist()}"
        )


def case(number: int, world: int, seed: int) -> Case:
    chance = random.Random(seed + number)  # noqa: S311
    size = chance.choice([n for n in MESHES if n <= world] + [world] * 3)
    ranks = chance.sample(range(world), size)
    mesh = torch.tensor(ranks).reshape(chance.choice(MESHES[size]))
    shape = [chance.choice(SIZES) for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3, 4)))]
    full = _tensor(chance, shape, chance.choice(DTYPES))
    return Case(number, seed, mesh, _placements(chance, mesh.shape, len(shape)), full)


def _placements(
    chance: random.Random, mesh: Sequence[int], dimensions: int
) -> tuple[Placement, ...]:
    if not dimensions:
        return (Replicate(),) * len(mesh)
    axes = [chance.choice((None, *range(dimensions), 0)) for _ in mesh]
    found: list[Placement] = [Replicate() if axis is None else Shard(axis) for axis in axes]
    for at, axis in enumerate(axes[:-1]):
        # As under FSDP2 and tensor parallelism: the later dimension of the mesh splits first.
        if axis is not None and axes[at + 1 :].count(axis) == 1 and chance.random() < 0.7:
            later = axes.index(axis, at + 1)
            found[at] = _StridedShard(axis, split_factor=mesh[later])
    return tuple(found)


def _tensor(chance: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, so that NaN payloads and all the rest occur; now and then transposed."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    count = dtype.itemsize
    for length in shape:
        count *= length
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    flat = (bits & 1 if dtype is torch.bool else bits).view(dtype)
    if chance.random() < 0.2:
        return flat.reshape(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
    return flat.reshape(shape)


def checkpoints(seed: int = SEED) -> dict[str, list[Case]]:
    """All cases by the folder that they are saved in."""
    found: dict[str, list[Case]] = {}
    number = 0
    for world, (count, folders) in WORLDS.items():
        for _ in range(count):
            folder = f"world_{world}_{number % folders}"
            found.setdefault(folder, []).append(case(number, world, seed))
            number += 1
    return found


def save(folder: str, cases: Sequence[Case]) -> None:
    state = {
        one.name: distribute_tensor(
            one.full,
            DeviceMesh("cpu", one.mesh, _init_backend=False),
            one.placements,
            src_data_rank=None,
        )
        for one in cases
    }
    writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=1)
    dcp.save({"model": state}, storage_writer=writer)


def live(rank: int, world: int, listener: socket.socket, home: Path, seed: int) -> None:
    store = TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for folder, cases in checkpoints(seed).items():
        if folder.startswith(f"world_{world}_"):
            save(str(home / folder), cases)
    dist.barrier()


def fork(rank: int, world: int, listener: socket.socket, home: Path, seed: int) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_SECONDS)
    try:
        live(rank, world, listener, home, seed)
    except BaseException:  # noqa: BLE001  the child must not go on as its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    home, seed = Path(sys.argv[1]), int(sys.argv[2])
    for world in WORLDS:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            children = [fork(rank, world, listener, home, seed) for rank in range(world)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends == [0] * world, f"the ranks of a world of {world} ended with {ends}"


if __name__ == "__main__":
    main()
