"""Small saves without torch: shared memory as a trainer fills it, and a writer process to ask."""

from __future__ import annotations

import math
import mmap
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import Manifest
from ckptkit.plan.layouts.torch import build_tensor_archive
from ckptkit.plan.plan import Copy, Literal, Product, TensorSpec, Trailer
from ckptkit.storage.local.disk import LOCAL_DISK, Disk
from ckptkit.training.save.writer_process import writer_command
from ckptkit.writer.messages import (
    ArchiveData,
    Buffer,
    ByteCounter,
    Channel,
    Commit,
    Failed,
    Image,
    Inline,
    Persist,
    RecordProof,
    Request,
    StepCommitted,
    WriteProgress,
    Written,
)
from ckptkit.writer.persist import Persister
from tests.crash.writer_programs import writer_running

PAGE = 4096
STEP = 500
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


@dataclass(frozen=True)
class Part:
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: bytes
    dtype: str = "float32"
    aliases: tuple[tuple[str | int, ...], ...] = ()


@dataclass
class Memory:
    content: bytearray = field(default_factory=bytearray)
    images: list[Image] = field(default_factory=list)
    descriptor: int = -1

    def add(self, path: str, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Lays out a data file; returns start and length of every archive."""
        start = len(self.content)
        blobs: list[ArchiveData] = []
        extents = []
        for part in parts:
            at = len(self.content)
            self._add_archive(part, blobs)
            extents.append((at - start, len(self.content) - at))
        self.images.append(Image(path, start, len(self.content) - start, tuple(blobs)))
        self.content += bytes(-len(self.content) % PAGE)
        return extents

    def _add_archive(self, part: Part, blobs: list[ArchiveData]) -> None:
        spec = TensorSpec(Fqn(""), dtype_named(part.dtype), part.sizes)
        product = Product(spec, Copy("", b""))  # type: ignore[arg-type]
        archive = build_tensor_archive(product, 0)
        places: list[int] = []
        data = (0, 0)
        for size, body, tensor in archive.rows:
            at = len(self.content)
            if tensor is not None:
                data = (at, at + size)
                self.content += part.data
            elif isinstance(body, Trailer):
                places += [at + place for place, _ in body.fields]
                self.content += body.template
            else:
                assert isinstance(body, Literal)
                self.content += body.data
        blobs.append(ArchiveData(*data, tuple(places)))

    def share(self) -> Buffer:
        self.content = self.content or bytearray(PAGE)
        self.descriptor = os.memfd_create("save")
        os.truncate(self.descriptor, len(self.content))
        with mmap.mmap(self.descriptor, len(self.content)) as shared:
            shared[:] = bytes(self.content)
        return Buffer(len(self.content))


@dataclass
class Save:
    run: Path
    attempt: str = "0123abcd-1"
    world_size: int = 1
    step: int = STEP

    @property
    def folder(self) -> Path:
        return self.run / f".checkpoint-{self.step}.ckptkit-{self.attempt}"

    @property
    def final(self) -> Path:
        return self.run / f"checkpoint-{self.step}"

    def persist(
        self,
        rank: int,
        units: Mapping[str, Sequence[Part]],
        *,
        expected: Mapping[str, Any] | None = None,
        objects: Mapping[str, Any] | None = None,
    ) -> tuple[Memory, Persist]:
        """Returns the memory of a rank, and what to ask its writer."""
        memory = Memory()
        described = {}
        for unit, parts in units.items():
            name = f"__{rank}_0.distcp"
            extents = memory.add(f"{unit}/{name}" if unit else name, parts)
            described[unit] = {
                "tensors": [
                    {"path": p.path, "dtype": p.dtype, "shape": p.shape, "aliases": p.aliases}
                    for p in parts
                ],
                "chunks": [
                    [number, part.offsets, part.sizes, 0, *extent]
                    for number, (part, extent) in enumerate(zip(parts, extents, strict=True))
                ],
                "objects": (objects or {}).get(unit, []),
                "data_files": [name],
                "expected": (expected or {}).get(unit, []),
            }
        record = {
            "rank": rank,
            "world_size": self.world_size,
            "attempt": self.attempt,
            "step": self.step,
            "units": described,
        }
        return memory, Persist(
            attempt=self.attempt,
            folder=str(self.folder),
            images=tuple(memory.images),
            inline=(Inline(f"random_states_{rank}.pkl", b"state of %d" % rank),),
            record=record,
            record_path=f".ranks/{rank}.json",
        )

    def commit(self, proofs: Sequence[RecordProof], **further: Any) -> Commit:
        manifest = Manifest("training", {"step": self.step}, {}, {}, {})
        return Commit(
            attempt=self.attempt,
            folder=str(self.folder),
            final=str(self.final),
            proofs=tuple(proofs),
            manifest=manifest.to_document(),
            **{"visible_seconds": 1.0} | further,
        )


class Writer:
    """A writer process, and this end of its connection."""

    def __init__(self, program: str | None = None, descriptor: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        end = theirs.fileno()
        command = writer_command(end, 0) if program is None else writer_running(program, end)
        kept = (theirs.fileno(),) if descriptor is None else (theirs.fileno(), descriptor)
        self.process = subprocess.Popen(command, pass_fds=kept)
        theirs.close()
        ours.settimeout(60)
        self.connection = ours
        self.channel = Channel(ours)
        self.heard: list[WriteProgress] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.connection.close()
        self.process.wait(30)

    def share(self, memory: Memory) -> None:
        buffer = memory.share()
        self.channel.send(buffer, (memory.descriptor,))
        os.close(memory.descriptor)

    def ask(self, request: Request) -> Written | StepCommitted | Failed | None:
        """Has a request done; None when the process is gone."""
        try:
            self.channel.send(request)
            while isinstance(answer := self.channel.receive(), WriteProgress):
                self.heard.append(answer)
        except ConnectionError:
            return None
        assert answer is None or isinstance(answer, Written | StepCommitted | Failed)
        return answer

    def written(self, memory: Memory, request: Persist) -> Written:
        self.share(memory)
        answer = self.ask(request)
        assert isinstance(answer, Written), answer
        return answer


def rows_of(
    key: tuple[str | int, ...], rank: int, ranks: int, columns: int = 3, *, salt: int = 0
) -> Part:
    """Returns rank's rows of a tensor of `2 * ranks` rows, its content made from the key."""
    shape = (2 * ranks, columns)
    sizes = (2, columns)
    first = sum(map(ord, "".join(map(str, key)))) + 7 * rank + salt
    data = bytes((first + i) % 100 for i in range(4 * math.prod(sizes)))
    return Part(key, shape, (2 * rank, 0), sizes, data)


def usual_units(rank: int, ranks: int, *, salt: int = 0) -> dict[str, list[Part]]:
    """Returns a model of two tensors and a state of its optimizer."""
    return {
        MODEL: [
            rows_of(("model", "a.weight"), rank, ranks, salt=salt),
            rows_of(("model", "b.weight"), rank, ranks, 2000, salt=salt),
        ],
        OPTIMIZER: [rows_of(("optimizer", "state", "a.weight", "exp_avg"), rank, ranks, salt=salt)],
    }


def persist(memory: Memory, request: Persist, disk: Disk = LOCAL_DISK) -> Written:
    persister = Persister(disk)
    size_bytes = memory.share().size_bytes
    persister.attach(memory.descriptor, size_bytes)
    return persister.persist(request, ByteCounter())


def save_whole(save: Save, writer: Writer, *, salt: int = 0, **further: Any) -> StepCommitted:
    proofs = []
    for rank in range(save.world_size):
        written = writer.written(*save.persist(rank, usual_units(rank, save.world_size, salt=salt)))
        assert written.proof is not None
        proofs.append(written.proof)
    answer = writer.ask(save.commit(proofs, **further))
    assert isinstance(answer, StepCommitted), answer
    return answer
