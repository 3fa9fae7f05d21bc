"""Reads tensors of a checkpoint: single ones (`ckptkit.open`), all in parallel, or tied pairs.

Ties that the configuration declares are used only where the bytes are equal. torch is imported only
when a torch.Tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.conversion.naming_program import ask_parameters
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.arguments import check_arguments
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import InputError, RefusedError, UsageError
from ckptkit.core.index import Fqn, Key, RunFacts, Shape, Span, TensorEntry
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.core.text import Aside, Closing, counted, size_text
from ckptkit.core.threads import run_crew
from ckptkit.engine.outcome import BytesWritten, Listener, Planned, Started
from ckptkit.engine.reader import Origin, TensorReader, read_span, same_values
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import SOURCE
from ckptkit.plan.selection import select_model
from ckptkit.plan.ties import (
    choose_ties_to_drop,
    find_absent_tied_names,
    find_class_without_targets,
    find_tie_candidates,
    find_tie_conflicts,
)
from ckptkit.storage.places import PathLike

if TYPE_CHECKING:
    import torch


def as_numpy(data: bytearray, dtype: DType, shape: Shape) -> NDArray[Any]:
    """Returns row-major bytes as an array; types that numpy lacks are those of ml_dtypes."""
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)


def as_torch(data: bytearray, dtype: DType, shape: Shape) -> torch.Tensor:
    """Returns row-major bytes as a tensor that shares their memory."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            "torch is not installed",
            where="framework='torch'",
            hint="run `pip install torch`, or read with framework='numpy'",
        ) from error
    kind = getattr(torch, dtype.name)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


Framework = Literal["torch", "numpy"]
_NEAR = 3  # names that an unknown one may be meant as


def _read_rows(opened: OpenedCheckpoint, entry: TensorEntry, span: Span) -> bytearray:
    refuse_problems(opened.index, [entry], opened.path)
    return read_span(Origin(SOURCE, opened.source, opened.index), entry, span)


def _is_row(at: Any, rows: int) -> bool:
    is_number = isinstance(at, int | np.integer) and not isinstance(at, bool)
    return is_number and -rows <= int(at) < rows


class TensorSlice(Displayed):
    """A tensor whose parts are read when they are asked for, as `tensor_slice[2:4, 0]`.

    It has the methods of the slices of safetensors. Of the first dimension, only the rows between
    the first and the last one that are asked for are read.
    """

    def __init__(self, opened: OpenedCheckpoint, entry: TensorEntry) -> None:
        self._opened = opened
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Returns the element type as safetensors calls it, such as `BF16`."""
        return self._entry.dtype.safetensors or self._entry.dtype.name

    def __getitem__(self, at: Any) -> torch.Tensor:
        entry, keys = self._entry, at if isinstance(at, tuple) else (at,)
        first: Any = keys[0] if keys else slice(None)
        rows = entry.shape[0] if entry.shape else 1
        if entry.shape and _is_row(first, rows):
            start = int(first) % rows
            stop, first = start + 1, 0
        elif entry.shape and isinstance(first, slice) and (first.step or 1) > 0:
            start, stop, step = first.indices(rows)
            stop, first = max(start, stop), slice(None, None, step)
        else:  # an index that torch itself refuses, or resolves
            start, stop = 0, rows
        width = entry.elements // rows if rows else 0
        data = _read_rows(self._opened, entry, Span(start * width, stop * width))
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        part = as_torch(data, entry.dtype, shape)
        return part[(first, *keys[1:])] if entry.shape else part[at]

    def _facts(self) -> Facts:
        shape = str(list(self._entry.shape))
        return Facts(self._entry.name, [("dtype", self._entry.dtype.name), ("shape", shape)])


def open_with_names(
    stack: ExitStack,
    path: PathLike,
    *,
    select: str | None,
    also: Sequence[PathLike],
    choice: str,
    base: PathLike | None,
) -> OpenedCheckpoint:
    """Opens a checkpoint, its names converted by a map unless `choice` is `none`."""
    opened = stack.enter_context(open_checkpoint(path, select=select, also=also))
    if choice == "none":
        return opened
    from ckptkit.conversion.mapped_names import convert_checkpoint

    folders = SideFolders(stack, opened, base)
    config = folders.config(folders.choose(allow_code=False)[0])
    return convert_checkpoint(opened, ConsolidateRequest(map=choice), config)


def report_notes(opened: OpenedCheckpoint, listener: Listener) -> None:
    """Reports what was passed over, and what else an opened checkpoint warns of."""
    notes = tuple(note for note in opened.notes if not isinstance(note, Aside))
    if notes:
        listener(Planned(notes))


class Checkpoint(Closing, Displayed):
    """The model of a checkpoint, read tensor by tensor. Use it as a context manager.

    It has the methods of a mapping, and those of safetensors' `safe_open`.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        select: str | None = None,
        also: Sequence[PathLike] = (),
        choice: str = "none",
        base: PathLike | None = None,
    ) -> None:
        """Finds and parses the checkpoint; no tensor data is read.

        Args:
            path: Any path in or above a checkpoint.
            select: The model to take where there are several.
            also: Further directories that hold files of the same checkpoint.
            choice: The map of names.
            base: A model folder with the configuration, if the checkpoint has none.
        """
        with ExitStack() as stack:
            self._opened = open_with_names(
                stack, path, select=select, also=also, choice=choice, base=base
            )
            request = ConsolidateRequest(select=self._opened.select)
            entries = select_model(self._opened.index, request, location=self._opened.path)
            self._entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}
            self._stack = stack.pop_all()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an open checkpoint cannot be pickled or copied: pass its path, and call ckptkit.open"
            " in the process that reads"
        )

    @property
    def path(self) -> str:
        return self._opened.path

    @property
    def format(self) -> str:
        return self._opened.index.format

    @property
    def run(self) -> RunFacts:
        return self._opened.index.run

    def keys(self) -> tuple[Fqn, ...]:
        return tuple(entry.name for entry in self._entries.values())

    def shape(self, name: str) -> Shape:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype.name

    @check_arguments
    def read(self, name: str, framework: Framework = "torch") -> torch.Tensor | NDArray[Any]:
        """Assembles a tensor, checking every stored checksum.

        Args:
            name: The tensor's own name.
            framework: What to return it as; `numpy` needs no torch.

        Returns:
            The tensor, row-major.

        """
        entry = self._entry(name)
        data = _read_rows(self._opened, entry, Span(0, entry.elements))
        if framework == "numpy":
            return as_numpy(data, entry.dtype, entry.shape)
        if framework == "torch":
            return as_torch(data, entry.dtype, entry.shape)
        raise UsageError(f"{framework!r} is not among torch, numpy", where="framework")

    def get_tensor(self, name: str) -> torch.Tensor:
        """Assembles a tensor; the same as `checkpoint[name]`."""
        return self[name]

    def get_slice(self, name: str) -> TensorSlice:
        """Returns a tensor that is read in parts, by indexing, as that of `safe_open`."""
        return TensorSlice(self._opened, self._entry(name))

    def items(self) -> Iterator[tuple[Fqn, torch.Tensor]]:
        """Yields names and tensors; each tensor is read when it is reached."""
        for name in self:
            yield name, self[name]

    def values(self) -> Iterator[torch.Tensor]:
        """Yields tensors; each is read when it is reached."""
        for name in self:
            yield self[name]

    def close(self) -> None:
        self._stack.close()

    def _facts(self) -> Facts:
        entries = self._entries.values()
        step = "" if self.run.step is None else f"step {self.run.step:,}"
        size = size_text(sum(entry.size_bytes for entry in entries))
        lines = [("format", self.format), ("step", step)]
        lines.append(("holds", f"{counted(len(entries), 'tensor')}, {size}"))
        rows = [(entry.name, entry.dtype.name, str(list(entry.shape))) for entry in entries]
        return Facts(self.path, lines, ("tensor", "dtype", "shape"), rows)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            near = get_close_matches(str(name), self._entries, _NEAR)
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise KeyError(f"{self.path} holds no tensor {name!r}{meant}") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: Any = self.read(name)
        return tensor  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Fqn]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries)


Item = tuple[TensorEntry, int]  # a tensor and the number of one of its leaves


def leaf_span(entry: TensorEntry, leaf: int) -> Span:
    step = LEAF_BYTES // entry.dtype.itemsize
    return Span(leaf * step, min((leaf + 1) * step, entry.elements))


def scan(
    origin: Origin,
    entries: Sequence[TensorEntry],
    visit: Callable[[TensorEntry, int, memoryview], None],
    *,
    workers: int,
    listener: Listener,
) -> dict[Key, InputError]:
    """Reads tensors leaf by leaf and passes each leaf to `visit`, from several threads."""
    failures: dict[Key, InputError] = {}
    listener(Started(sum(entry.size_bytes for entry in entries)))

    def work(items: Iterator[Item]) -> None:
        reader = TensorReader(origin)
        buffer = memoryview(bytearray(LEAF_BYTES))
        for entry, leaf in items:
            span = leaf_span(entry, leaf)
            view = buffer[: (span.stop - span.start) * entry.dtype.itemsize]
            try:
                reader.fill(entry.key, span, view)
            except InputError as error:
                failures.setdefault(entry.key, error)
                continue
            visit(entry, leaf, view)
            listener(BytesWritten(len(view)))

    leaves = ((e, leaf) for e in entries for leaf in range(-(-e.size_bytes // LEAF_BYTES)))
    run_crew(workers, leaves, work)
    while True:  # each call closes one of the records that are still open
        try:
            origin.checksums.finish()
        except InputError as error:
            failures.setdefault(Key(error.where), error)
        else:
            return failures


class Ties(Struct, frozen=True):
    """Declared ties, by whether the bytes are equal.

    Attributes:
        dropped: From targets to sources that have the same bytes.
        broken: From targets to sources that have other bytes.
    """

    dropped: Mapping[Fqn, Fqn]
    broken: Mapping[Fqn, Fqn]


def find_ties(
    config: Mapping[str, Any] | None, entries: Sequence[TensorEntry], origin: Origin
) -> Ties:
    """Compares the bytes of every pair that the configuration declares tied."""
    by_name = {entry.name: entry for entry in entries}
    extents = {name: (entry.dtype, entry.shape) for name, entry in by_name.items()}
    pairs = find_tie_candidates(config, extents)
    reader = TensorReader(origin)
    same: dict[Fqn, Fqn] = {}
    broken = dict(find_tie_conflicts(config, extents))
    for target, source in pairs.items():
        equal = same_values(reader, by_name[target], by_name[source])
        (same if equal else broken)[target] = source
    return Ties(choose_ties_to_drop(config, same, broken), broken)


def find_absent_twins(
    config: Mapping[str, Any] | None, names: Collection[Fqn]
) -> tuple[Mapping[Fqn, Fqn], str]:
    """Finds names of tied weights that a live model has and a checkpoint lacks.

    Returns:
        From each absent name to the one in `names` that has its bytes, and a note for the user
        or nothing.
    """
    absent = dict(find_absent_tied_names(config, names))
    model_class = find_class_without_targets(config, {*names, *absent})
    if config is None or model_class is None:
        return absent, ""
    try:
        groups = ask_parameters(config, [])
    except RefusedError as error:
        return absent, (
            f"{model_class} ties further names, which are not written, as they are not known"
            f" ({error.message}); training that loads every name will miss them"
        )
    for group in groups:
        present = [name for name in group["names"] if name in names]
        if present:
            absent |= {Fqn(n): Fqn(present[0]) for n in group["names"] if n not in names}
    return absent, ""
