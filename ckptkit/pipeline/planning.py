"""Everything that happens before the first byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckptkit.core.index import TensorEntry
from ckptkit.execution.executor import Inputs
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.cast_kernel import CastKernel
from ckptkit.layouts.dcp import layout_dcp
from ckptkit.layouts.hf_weights import layout_hf_weights
from ckptkit.layouts.torch_full import layout_torch_full
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.opening import Opened, PathLike, opened
from ckptkit.pipeline.ties_by_bytes import Ties, find_ties
from ckptkit.pipeline.writing import Prepared, estimated, settings_for
from ckptkit.planning.coverage import error_of, find_problems
from ckptkit.planning.plan import SOURCE, Plan
from ckptkit.planning.requests import ConsolidateRequest, Resources, changed_options
from ckptkit.planning.selection import (
    make_products,
    refuse_casting_quantized,
    refuse_what_would_load_as_random,
    select_model,
    under_tied_names,
)
from ckptkit.planning.side_files import (
    bytes_by_dtype,
    config_as_written,
)
from ckptkit.planning.ties import tied_names_absent, untied_config

_KINDS = {"hf": "model", "torch": "torch", "dcp": "dcp"}
_LAYOUTS = {"hf": layout_hf_weights, "torch": layout_torch_full, "dcp": layout_dcp}


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
        files = self._folders.outputs(side, config, allow_code=self._request.allow_code)
        self._note_what_is_absent(config, code)
        plan = Plan((*weights, *files), ties.dropped, tuple(self._notes))
        read = sum(entry.size_bytes for entry in entries if entry.name not in ties.dropped)
        settings = settings_for(self._resources)
        origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
        return Prepared(
            sources=(checkpoint,),
            plan=plan,
            inputs=Inputs({SOURCE: origin}, self._folders.sources),
            settings=settings,
            estimate=estimated(plan, settings, out, bytes_read=read),
            kind=_KINDS[self._request.layout],
            options=changed_options(self._request),
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
