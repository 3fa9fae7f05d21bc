"""`ckptkit.open`: the tensors of any checkpoint, assembled when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.core.arguments import check_arguments
from ckptkit.core.closing import Closing
from ckptkit.core.errors import UsageError
from ckptkit.core.index import Fqn, RunFacts, Shape, Span, TensorEntry
from ckptkit.execution.tensors import Origin, TensorReader
from ckptkit.pipeline.opening import PathLike, opened
from ckptkit.planning.coverage import error_of, find_problems
from ckptkit.planning.plan import SOURCE
from ckptkit.planning.requests import ConsolidateRequest
from ckptkit.planning.selection import select_model
from ckptkit.tensors import as_numpy, as_torch

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Framework = Literal["torch", "numpy"]


class Checkpoint(Closing):
    """The model of a checkpoint, read tensor by tensor. Use it as a context manager."""

    def __init__(
        self, path: PathLike, *, select: str | None = None, also: Sequence[PathLike] = ()
    ) -> None:
        """Finds and parses the checkpoint; no tensor data is read.

        Args:
            path: Any path in or above a checkpoint.
            select: The model to take where there are several.
            also: Further directories that hold files of the same checkpoint.

        Raises:
            InputError: If there is none, or if it cannot be parsed.
            AmbiguousSourceError: If there are several models and none was selected.
        """
        with ExitStack() as stack:
            self._opened = stack.enter_context(opened(path, select=select, also=also))
            request = ConsolidateRequest(select=self._opened.select)
            entries = select_model(self._opened.index, request, location=self._opened.path)
            self._entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}
            self._stack = stack.pop_all()

    @property
    def path(self) -> str:
        """The checkpoint that was found, under the path that was given."""
        return self._opened.path

    @property
    def format(self) -> str:
        """The on-disk format."""
        return self._opened.index.format

    @property
    def run(self) -> RunFacts:
        """What is known of the run that wrote it."""
        return self._opened.index.run

    def keys(self) -> tuple[Fqn, ...]:
        """Returns the names of all tensors of the model, in order."""
        return tuple(entry.name for entry in self._entries.values())

    def shape(self, name: str) -> Shape:
        """Returns the full shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Returns torch's name of a tensor's element type, such as `bfloat16`."""
        return self._entry(name).dtype.name

    @check_arguments
    def read(self, name: str, framework: Framework = "torch") -> torch.Tensor | NDArray[Any]:
        """Assembles a tensor, checking every stored checksum.

        Args:
            name: The tensor's own name.
            framework: What to return it as; `numpy` needs no torch.

        Returns:
            The tensor, row-major.

        Raises:
            KeyError: If there is no such tensor.
            InputError: If it is incomplete or damaged.
            UsageError: If the framework is unknown, or not installed.
        """  # noqa: DOC501  `error_of` makes an InputError
        entry = self._entry(name)
        problem = next(find_problems(self._opened.index, [entry]), None)
        if problem is not None:
            raise error_of(problem, self.path)
        data = bytearray(entry.size_bytes)
        origin = Origin(SOURCE, self._opened.source, self._opened.index)
        TensorReader(origin).fill(entry.key, Span(0, entry.elements), memoryview(data))
        origin.ledger.finish()
        if framework == "numpy":
            return as_numpy(data, entry.dtype, entry.shape)
        if framework == "torch":
            return as_torch(data, entry.dtype, entry.shape)
        raise UsageError(f"{framework!r} is not among torch, numpy", where="framework")

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"{self.path} holds no tensor {name!r}") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: Any = self.read(name)
        return tensor  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Fqn]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries)
