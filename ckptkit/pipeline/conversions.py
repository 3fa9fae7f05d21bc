"""Groups of tensors that transformers converts as a whole, since it computes with them.

Most conversions move elements, and what they make streams. Where one computes, its tensors are
gathered in files of a temporary folder, one group at a time, and transformers converts them
there in a process of its own.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.errors import CkptkitError, NoSpaceError, RefusedError, error_from_json
from ckptkit.core.index import Key, Span
from ckptkit.execution.budget import WORKER_BYTES
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.given import Given
from ckptkit.kernels.operands import Operand
from ckptkit.pipeline.naming_program import program_command
from ckptkit.planning.hub_names_wire import NamingRequest
from ckptkit.planning.plan import Reading, TensorSpec
from ckptkit.planning.requests import Resources
from ckptkit.storage.machine import memory_in_use_bytes

_LOG = logging.getLogger(__name__)
_BLOCK = 1 << 20  # elements that are gathered at once
_LIVE = "pass --names live to write the names that training holds"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A group of tensors that one conversion is given, and what it makes of them.

    Attributes:
        model: What transformers is told of the model.
        inputs: The live tensors, as they would be saved.
        operands: Where their elements come from.
        outputs: The tensors on disk.
    """

    model: NamingRequest
    inputs: tuple[TensorSpec, ...]
    operands: tuple[Operand, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def size_bytes(self) -> int:
        """What the group takes while it is converted: what goes in, and what comes out."""
        return sum(spec.size_bytes for spec in (*self.inputs, *self.outputs))

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The source tensors that it looks at."""
        return tuple(dict.fromkeys(read for operand in self.operands for read in operand.reads))


@dataclass(frozen=True, slots=True)
class Converted:
    """One of the tensors that a conversion makes; it has to be prepared with the others.

    Attributes:
        group: The conversion.
        spec: The tensor.
    """

    group: Conversion
    spec: TensorSpec

    def prepared(self, _out: TensorSpec, reading: Reading) -> Given:
        """Returns a kernel that has the elements, converting the group if nobody has yet.

        Raises:
            RefusedError: If transformers fails.
            NoSpaceError: If the temporary folder is full.
        """
        model = self.group.model
        converter = reading.kept(("conversions", id(model)), partial(Converter, model))
        return Given(converter.take(self.group, self.spec, reading))


def beside_conversions(resources: Resources, size_bytes: int) -> Resources:
    """Returns what is left for everything else while the largest group is converted.

    Args:
        resources: What the user allows.
        size_bytes: What the group takes.

    Raises:
        NoSpaceError: If it does not fit.
    """
    limit = resources.memory_limit_bytes
    if limit is None or not size_bytes:
        return resources
    used = memory_in_use_bytes() + WORKER_BYTES
    if limit - used < size_bytes:
        raise NoSpaceError(
            f"a group of tensors that transformers converts as a whole takes {size_bytes:,} bytes"
            f" and {limit:,} leave {max(0, limit - used):,}",
            where="--memory-limit",
            hint=f"allow at least {used + size_bytes:,} bytes, or {_LIVE}",
        )
    return replace(resources, memory_limit_bytes=limit - size_bytes)


class Converter:
    """The program that converts, and the folder that tensors go through; a context.

    One group is converted at a time. What comes out lies in files until it is written.
    """

    def __init__(self, model: NamingRequest) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._finished: dict[TensorSpec, Path] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._home = tempfile.TemporaryDirectory(prefix="ckptkit-")
        self._folder = Path(self._home.name)

    def __enter__(self) -> Self:
        """Begins; the program starts with the first group."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Ends the program and removes the files."""
        process = self._process
        if process is not None:
            process.kill()
            with process:
                process.wait()
        self._home.cleanup()

    def take(self, group: Conversion, spec: TensorSpec, reading: Reading) -> NDArray[Any]:
        """Returns the elements of one tensor, which lie in a file that has no name any more.

        Args:
            group: The conversion that makes it.
            spec: The tensor.
            reading: Reads what the conversion is given.

        Raises:
            RefusedError: If transformers fails, or makes something else.
            NoSpaceError: If the temporary folder is full.
        """
        with self._lock:
            if spec not in self._finished:
                self._finished |= self._converted(group, reading)
            path = self._finished.pop(spec)
        kind = numpy_dtype(spec.dtype)
        if not spec.elements:
            return np.empty(0, kind)
        held = np.memmap(path, np.uint8, mode="r", shape=(spec.size_bytes,))
        path.unlink()
        return held.view(kind)

    def _converted(self, group: Conversion, reading: Reading) -> dict[TensorSpec, Path]:
        try:
            gathered = [
                self._gathered(spec, operand, reading)
                for spec, operand in zip(group.inputs, group.operands, strict=True)
            ]
        except OSError as error:
            raise NoSpaceError(
                f"gathering {group.size_bytes:,} bytes for a conversion failed: {error}",
                where=self._home.name,
                hint="set TMPDIR to a folder with more room",
            ) from error
        made = {spec: self._new_path() for spec in group.outputs}
        answer = self._asked(group, gathered, made)
        for path in gathered:
            path.unlink()
        self._check(group, answer)
        return made

    def _gathered(self, spec: TensorSpec, operand: Operand, reading: Reading) -> Path:
        """Writes a tensor into a file, block by block."""
        path = self._new_path()
        with path.open("wb") as file:
            for start in range(0, spec.elements, _BLOCK):
                span = Span(start, min(start + _BLOCK, spec.elements))
                inputs = [reading.own(demand) for demand in operand.demands(span)]
                file.write(operand.values(span, inputs).view(np.uint8).data)
        return path

    def _new_path(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _asked(
        self, group: Conversion, gathered: Sequence[Path], made: dict[TensorSpec, Path]
    ) -> dict[str, Any]:
        request = {
            "inputs": [
                [spec.name, spec.dtype.name, spec.shape, str(path)]
                for spec, path in zip(group.inputs, gathered, strict=True)
            ],
            "outputs": [[spec.name, str(path)] for spec, path in made.items()],
        }
        process = self._process or self._started()
        try:
            _say(process, json.dumps(request).encode())
            answer: dict[str, Any] = json.loads(_heard(process))
        except (OSError, ValueError) as error:
            raise self._ended(process, group) from error
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603
                program_command("convert"), stdin=pipe, stdout=pipe, stderr=log
            )
        _say(self._process, self._model.to_json())
        return self._process

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _ended(self, process: subprocess.Popen[bytes], group: Conversion) -> RefusedError:
        status = process.wait()
        log = self._log.read_text(errors="replace").strip()
        _LOG.debug("the program that converts tensors said: %s", log)
        last = log.splitlines()[-1] if log else f"it ended with status {status}"
        return RefusedError(
            f"transformers could not convert a group of {group.size_bytes:,} bytes: {last}",
            where=f"tensor {group.outputs[0].name!r}",
            hint=_LIVE,
        )

    def _check(self, group: Conversion, answer: dict[str, Any]) -> None:
        """Refuses what is not what was planned."""
        where = f"tensor {group.outputs[0].name!r}"
        if "error" in answer:
            error: CkptkitError = error_from_json(answer["error"])
            raise error.located(where)
        found = {name: (dtype, tuple(shape)) for name, dtype, shape in answer["outputs"]}
        expected = {str(spec.name): (spec.dtype.name, spec.shape) for spec in group.outputs}
        if found != expected:
            raise RefusedError(
                f"transformers made {found} of a group, against {expected} that it announced",
                where=where,
                hint=_LIVE,
            )


def _say(process: subprocess.Popen[bytes], line: bytes) -> None:
    if process.stdin is not None:
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def _heard(process: subprocess.Popen[bytes]) -> bytes:
    return b"" if process.stdout is None else process.stdout.readline()
