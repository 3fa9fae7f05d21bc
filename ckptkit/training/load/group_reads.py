"""Tensors that several ranks of a group want alike: one of them reads each, and sends it.

    list what each rank wants -> choose who reads -> read -> agree that all have -> send -> compare

All ranks of the group do the same, in this order. The one that reads proves the bytes by what the
checkpoint stores of them; those that are sent them compare their checksum with that of its memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, LoadError, UsageError

_ROUND_BYTES = 256 << 20  # that are sent before the next are
_WANTED = np.dtype([("digest", "V16"), ("size", "<u8")])
T = TypeVar("T")


class _Shared(Struct, frozen=True):
    digest: bytes  # of what it is
    reader: int  # ranks in the group
    ranks: Sequence[int]
    tensor: torch.Tensor  # of this rank


class GroupReads:
    """What this rank reads for others, and what others read for it; made by all ranks at once.

    Attributes:
        is_own: For each tensor, whether this rank has to read it.
    """

    def __init__(
        self, wanted: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None
    ) -> None:
        """Chooses who reads what, so that each rank reads about as much.

        `wanted`: tensors of this rank, each with a text that is the same on another rank if its
        tensor there is to have the same bytes. Each rank reads for itself what is on a device that
        the group does not send from, and without a group everything.

        Raises:
            UsageError: If this process is not in the group.
        """
        self.is_own = [True] * len(wanted)
        self._group = group
        self._shared: list[_Shared] = []
        if group is None:
            return
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise UsageError(
                f"does not have rank {dist.get_rank()}",
                where="group",
                hint="pass each rank the group that it is in, and None where it is in none",
            )
        devices = list_devices(dist.get_backend_config(group))
        numbers = {
            blake2b(text.encode(), digest_size=16).digest(): number
            for number, (text, tensor) in enumerate(wanted)
            if tensor.device.type in devices  # NCCL sends no steps of optimizers, on the CPU
        }
        rows = np.array([(d, wanted[n][1].nbytes) for d, n in numbers.items()], _WANTED)
        ranks: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        for rank, data in enumerate(_gather(rows.tobytes(), group)):
            for digest, size in np.frombuffer(data, _WANTED).tolist():
                ranks[digest, size].append(rank)
        loads = [0] * dist.get_world_size(group)
        for (_, size), own in ranks.items():
            if len(own) == 1:
                loads[own[0]] += size
        # The largest first, which evens out what each of them reads.
        for (digest, size), own in sorted(ranks.items(), key=lambda item: (-item[0][1], item[0])):
            if len(own) == 1 or not size:
                continue
            reader = min(own, key=loads.__getitem__)
            loads[reader] += size
            if self._rank in own:
                number = numbers[digest]
                self.is_own[number] = reader == self._rank
                self._shared.append(_Shared(digest, reader, own, wanted[number][1]))

    def exchange(self) -> int:
        """Sends what this rank has read to those that want it; returns how many bytes it was sent.

        Raises:
            ChecksumError: If other bytes arrived than were sent.
        """
        group = self._group
        if group is None:
            return 0
        for part in self._rounds():
            transfers, arriving = [], list[tuple[torch.Tensor, torch.Tensor]]()
            for shared in part:
                tensor = shared.tensor
                if shared.reader == self._rank:
                    data = _bytes_of(tensor)
                    others = (rank for rank in shared.ranks if rank != self._rank)
                    peers = (dist.get_global_rank(group, rank) for rank in others)
                    transfers += [dist.P2POp(dist.isend, data, peer, group) for peer in peers]
                    continue
                is_dense = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
                memory = (
                    tensor
                    if is_dense
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                )
                peer = dist.get_global_rank(group, shared.reader)
                transfers.append(dist.P2POp(dist.irecv, _bytes_of(memory), peer, group))
                arriving.append((tensor, memory))
            for request in dist.batch_isend_irecv(transfers) if transfers else ():
                request.wait()
            for tensor, memory in arriving:
                if memory is not tensor:
                    tensor.copy_(memory)
        self._compare(group)
        return sum(one.tensor.nbytes for one in self._shared if one.reader != self._rank)

    def _rounds(self) -> Iterator[list[_Shared]]:
        """Yields what is sent together, in an order that is the same for each pair of ranks."""
        part, size_bytes = list[_Shared](), 0
        for shared in self._shared:
            part.append(shared)
            size_bytes += shared.tensor.nbytes
            if size_bytes >= _ROUND_BYTES:
                yield part
                part, size_bytes = [], 0
        if part:
            yield part

    def _compare(self, group: dist.ProcessGroup) -> None:
        sums = {one.digest: crc32(_bytes_of(one.tensor).cpu().numpy().data) for one in self._shared}
        own = {one.digest: sums[one.digest] for one in self._shared if one.reader == self._rank}
        of_readers = _gather(own, group)
        for one in self._shared:
            if of_readers[one.reader][one.digest] != sums[one.digest]:
                raise ChecksumError(
                    f"rank {self._rank} was sent other bytes than rank {one.reader} has read",
                    where="group",
                    hint="load again; if it stays, a network device or a driver is at fault",
                )


def list_devices(backends: str) -> set[str]:
    """Returns the types of devices that a group sends from.

    >>> sorted(list_devices("cpu:gloo,cuda:nccl")), list_devices("cuda:nccl")
    (['cpu', 'cuda'], {'cuda'})
    """
    return {part.partition(":")[0] for part in backends.split(",")}


@contextmanager
def agreeing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Has a part of the work fail on all ranks of a group if it fails on one; see `LoadError`."""
    problem = ""
    try:
        yield
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if group is not None:
            problems = _gather(problem, group)
            failed = next((rank for rank, found in enumerate(problems) if found), None)
            if failed is not None and not problem:
                raise LoadError(
                    f"rank {failed} of the group could not load its part: {problems[failed]}",
                    where="group",
                )


def _gather(value: T, group: dist.ProcessGroup) -> list[T]:
    found: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found  # type: ignore[return-value]  # all are there


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
