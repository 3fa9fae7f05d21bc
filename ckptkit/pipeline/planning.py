"""Everything that happens before the first byte is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.execution.budget import WORKER_BYTES, ExecutionSettings, settle_workers
from ckptkit.execution.executor import Inputs
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.cast_kernel import CastKernel
from ckptkit.layouts.dcp import layout_dcp
from ckptkit.layouts.hf_weights import layout_hf_weights
from ckptkit.layouts.torch_full import layout_torch_full
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.opening import Opened, PathLike, opened
from ckptkit.pipeline.ties_by_bytes import Ties, find_ties
from ckptkit.planning.coverage import error_of, find_problems
from ckptkit.planning.plan import SOURCE, Body, Literal, OutputFile, Plan, RawCopy, contiguous
from ckptkit.planning.requests import ConsolidateRequest, Resources
from ckptkit.planning.selection import (
    make_products,
    refuse_casting_quantized,
    refuse_what_would_load_as_random,
    select_model,
    under_tied_names,
)
from ckptkit.planning.side_files import (
    SideFile,
    bytes_by_dtype,
    config_as_written,
    content_as_written,
)
from ckptkit.planning.ties import tied_names_absent, untied_config
from ckptkit.storage.machine import memory_in_use_bytes, usable_cores

_LAYOUTS = {"hf": layout_hf_weights, "torch": layout_torch_full, "dcp": layout_dcp}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an execution will take.

    Attributes:
        bytes_read: Tensor bytes read from the source.
        bytes_written: Size of the output.
        bytes_free: Room at the destination, or None where that is unknown.
        peak_bytes: Memory of the whole process at its peak.
    """

    bytes_read: int
    bytes_written: int
    bytes_free: int | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan with everything that is needed to execute it."""

    checkpoint: Opened
    plan: Plan
    inputs: Inputs
    settings: ExecutionSettings
    estimate: Estimate
    entries: Mapping[Fqn, TensorEntry]


@contextmanager
def prepared(
    src: PathLike,
    out: PathLike,
    request: ConsolidateRequest,
    *,
    base: str | None,
    resources: Resources,
    also: Sequence[PathLike] = (),
) -> Iterator[Prepared]:
    """Opens a source, proves that it is whole, and plans the output; writes nothing.

    Yields:
        The plan, with its sources open.

    Raises:
        InputError: If the source is damaged or incomplete.
        RefusedError: If the request cannot be met.
    """
    with ExitStack() as stack:
        limit = resources.memory_limit_bytes
        checkpoint = stack.enter_context(
            opened(src, select=request.select, also=also, limit_bytes=limit)
        )
        folders = SideFolders(stack, checkpoint, base)
        yield _Preparation(checkpoint, folders, request, resources).run(Path(out))


class _Preparation:
    def __init__(
        self,
        checkpoint: Opened,
        folders: SideFolders,
        request: ConsolidateRequest,
        resources: Resources,
    ) -> None:
        self._checkpoint = checkpoint
        self._folders = folders
        self._request = request
        self._resources = resources
        self._notes = list(checkpoint.notes)

    def run(self, out: Path) -> Prepared:
        checkpoint = self._checkpoint
        entries = self._entries()
        side, code = self._folders.choose(allow_code=self._request.allow_code)
        config = self._folders.config(side)
        refuse_casting_quantized(entries, self._request, config, location=checkpoint.path)
        ties = self._ties(config, entries)
        if self._request.layout == "dcp":
            absent = tied_names_absent(config, {entry.name for entry in entries})
            entries = under_tied_names(entries, absent)
        products = make_products(entries, self._request, ties.dropped, CastKernel)
        weights = _LAYOUTS[self._request.layout](products, self._request.max_file_bytes)
        written = bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        if config is not None:
            config = config_as_written(config, written, allow_code=self._request.allow_code)
            config = self._untied(config, ties)
        files = [self._side_file(file, config) for file in side]
        self._note_what_is_absent(config, code)
        plan = Plan((*weights, *files), ties.dropped, tuple(self._notes))
        read = sum(entry.size_bytes for entry in entries if entry.name not in ties.dropped)
        settings = self._settings()
        return Prepared(
            checkpoint=checkpoint,
            plan=plan,
            inputs=Inputs(
                {SOURCE: Origin(SOURCE, checkpoint.source, checkpoint.index)},
                self._folders.sources,
            ),
            settings=settings,
            estimate=Estimate(
                bytes_read=read,
                bytes_written=plan.bytes_written,
                bytes_free=_free_bytes(out),
                peak_bytes=memory_in_use_bytes() + settings.workers * WORKER_BYTES,
            ),
            entries={entry.name: entry for entry in entries},
        )

    def _entries(self) -> Sequence[TensorEntry]:
        checkpoint = self._checkpoint
        request = self._request
        if checkpoint.select != request.select:
            request = request.selecting(checkpoint.select)
        entries = select_model(checkpoint.index, request, location=checkpoint.path)
        if request.names == "auto":
            refuse_what_would_load_as_random(entries, location=checkpoint.path)
        problem = next(find_problems(checkpoint.index, entries), None)
        if problem is not None:
            raise error_of(problem, checkpoint.path)
        return entries

    def _ties(self, config: Mapping[str, Any] | None, entries: Sequence[TensorEntry]) -> Ties:
        if self._request.layout == "dcp":  # training loads every name of a tied weight
            return Ties({}, {})
        checkpoint = self._checkpoint
        # An origin of its own: what was compared is read, and proven, once more when written.
        return find_ties(config, entries, Origin(SOURCE, checkpoint.source, checkpoint.index))

    def _untied(self, config: dict[str, Any], ties: Ties) -> dict[str, Any]:
        if not ties.broken:
            return config
        untied = dict(untied_config(config))
        consequence = ", and tie_word_embeddings is set to false" if untied != config else ""
        for target, source in ties.broken.items():
            self._notes.append(
                f"the configuration ties {target!r} to {source!r}, but they differ: both are"
                f" written{consequence}"
            )
        return untied

    def _side_file(self, file: SideFile, config: Mapping[str, Any] | None) -> OutputFile:
        body: Body = RawCopy(file.origin, file.path)
        size = file.size_bytes
        data = content_as_written(
            file.name,
            file.size_bytes,
            lambda: self._folders.read(file),
            config,
            allow_code=self._request.allow_code,
        )
        if data is not None:
            body, size = Literal(data), len(data)
        return contiguous(file.name, [(size, body, None)])

    def _note_what_is_absent(self, config: Mapping[str, Any] | None, code: Sequence[str]) -> None:
        if config is None:
            self._notes.append(
                "no config.json was found beside the source: Transformers needs one to load the"
                " output; pass --base DIR to take it, and the tokenizer, from there"
            )
        if code:
            self._notes.append(
                f"python files were left out: {', '.join(code)}; pass --allow-code to copy them"
            )

    def _settings(self) -> ExecutionSettings:
        resources = self._resources
        workers = settle_workers(
            resources.workers,
            cores=usable_cores(),
            budget_bytes=resources.memory_budget_bytes,
            limit_bytes=resources.memory_limit_bytes,
            used_bytes=memory_in_use_bytes(),
        )
        return ExecutionSettings(workers)


def _free_bytes(out: Path) -> int | None:
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
