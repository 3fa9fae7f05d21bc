"""Everything that happens before the first byte is written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.execution.executor import Inputs
from ckptkit.execution.tensors import Origin
from ckptkit.kernels.cast_kernel import CastKernel
from ckptkit.layouts.dcp import layout_dcp
from ckptkit.layouts.hf_weights import layout_hf_weights
from ckptkit.layouts.torch_full import layout_torch_full
from ckptkit.pipeline.adapters.facts import adapter_facts, choices, find_peft, step_of_base
from ckptkit.pipeline.comparing import NOTHING, Comparison, Subject, plan_comparison
from ckptkit.pipeline.conversions import beside_conversions
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.naming import Named, left_out, named
from ckptkit.pipeline.naming_program import NamingProgram
from ckptkit.pipeline.opening import Opened, PathLike, opened
from ckptkit.pipeline.optimizer_output import optimizer_output
from ckptkit.pipeline.reach import check_reach
from ckptkit.pipeline.shaping import Shaping
from ckptkit.pipeline.ties_by_bytes import Ties, absent_twins, find_ties
from ckptkit.pipeline.writing import Prepared, estimated, settings_for
from ckptkit.planning.coverage import error_of, find_problems
from ckptkit.planning.load_report import CONSOLIDATE, Advice
from ckptkit.planning.plan import SOURCE, OutputFile, Plan, Product
from ckptkit.planning.requests import ConsolidateRequest, Resources, changed_options
from ckptkit.planning.selection import (
    hint_on_raw,
    make_products,
    model_trees,
    note_of_masters,
    refuse_packed,
    select_model,
    under_tied_names,
)
from ckptkit.planning.side_files import (
    SideFile,
    bytes_by_dtype,
    config_as_written,
    dense_config,
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
    advice: Advice = CONSOLIDATE,
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
            opened(
                src,
                select=request.select,
                also=also,
                limit_bytes=limit,
                model_config=request.model_config,
            )
        )
        folders = SideFolders(stack, checkpoint, base)
        if request.names != "live":
            _refuse_adapters(checkpoint, folders, request, _Typed(src, out, also))
        shaping = Shaping(request, base, checkpoint.path)
        program = stack.enter_context(NamingProgram())
        asking = _Asking(program, advice)
        yield _Preparation(checkpoint, folders, request, resources, shaping, asking).run(out)


@dataclass(frozen=True, slots=True)
class _Typed:
    """What a user named, for commands that are proposed."""

    src: PathLike
    out: PathLike
    also: Sequence[PathLike]


def _refuse_adapters(
    checkpoint: Opened, folders: SideFolders, request: ConsolidateRequest, typed: _Typed
) -> None:
    """Refuses an adapter, or what has one in it, with what makes something of it.

    Raises:
        RefusedError: If there is one.
    """
    peft = find_peft(checkpoint, folders)
    if peft is None:
        return
    advice = _advice_on_lora(checkpoint, folders, request, typed) if peft.is_of_lora else ""
    if not advice:
        if checkpoint.select is None and len(model_trees(checkpoint.index)) > 1:
            return  # which of them is meant has to be told first
        peft = find_peft(checkpoint, folders, request.wants)
        advice = "" if peft is None else peft.advice
    if peft is not None:
        raise RefusedError(peft.refusal, where=checkpoint.path, hint=hint_on_raw(advice))


def _advice_on_lora(
    checkpoint: Opened, folders: SideFolders, request: ConsolidateRequest, typed: _Typed
) -> str:
    """Returns the commands that make something of LoRA; empty where none does."""
    facts = adapter_facts(checkpoint, folders)
    out = os.fspath(typed.out)
    if facts is None:
        step = step_of_base(checkpoint)
        merge = shlex.join(["ckptkit", "adapter", "merge", step, out])
        of_base = "this is the base that training left as it was; for the trained model run"
        return f"{of_base} `{merge}`" if step else ""
    chosen = choices(request.select, typed.also)
    source = os.fspath(typed.src) if chosen else checkpoint.path
    extract = facts.extract(source, out, chosen=chosen)
    alone = "" if facts.is_ready else f", for the adapter alone `{extract}`"
    remark = f" ({facts.remark})" if facts.remark else ""
    return f"for the merged model run `{facts.merge(source, out, chosen=chosen)}`{alone}{remark}"


@dataclass(frozen=True, slots=True)
class _Asking:
    """What answers for transformers, and what is advised where an output would not load."""

    program: NamingProgram
    advice: Advice


class _Preparation:
    def __init__(
        self,
        checkpoint: Opened,
        folders: SideFolders,
        request: ConsolidateRequest,
        resources: Resources,
        shaping: Shaping,
        asking: _Asking,
    ) -> None:
        self._program = asking.program
        self._advice = asking.advice
        self._shaping = shaping
        self._checkpoint = checkpoint
        self._folders = folders
        self._request = request
        self._resources = resources
        self._notes = list(checkpoint.notes)

    def run(self, out: PathLike) -> Prepared:
        checkpoint = self._checkpoint
        entries = self._entries()
        side, code = self._folders.choose(allow_code=self._request.allow_code)
        config = self._config(side)
        self._shaping.check_casts(entries, config)
        if self._request.vocab_size is not None:
            self._shaping.regard(self._folders.tokenizer(side))
        ties = self._ties(config, entries)
        if self._request.layout == "dcp":
            absent, note = absent_twins(config, {entry.name for entry in entries})
            entries = under_tied_names(entries, absent)
            self._notes += filter(None, [note])
        before = self._shaping.before_names
        made = make_products(entries, before, ties.dropped, CastKernel)
        self._notes += filter(None, [note_of_masters(entries, made)])
        given = self._named(made, config, ties)
        products = self._shaping.products(given.products, config)
        weights = self._weights(products, config, given.dropped)
        config = self._written_config(config, products, ties)
        files = self._folders.outputs(side, config, allow_code=self._request.allow_code)
        self._note_what_is_absent(config, code)
        comparison = self._comparison(config, side, products, given)
        states = optimizer_output(checkpoint, self._request, entries)
        self._notes += (*given.notes, *self._shaping.notes, *states.notes)
        plan = Plan((*weights, *states.files, *files), given.dropped, tuple(self._notes))
        read = sum(entry.size_bytes for entry in entries if entry.name not in ties.dropped)
        settings = settings_for(
            beside_conversions(self._resources, given.conversion_bytes),
            plan,
            sources=(checkpoint,),
            out=out,
        )
        origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
        return Prepared(
            sources=(checkpoint,),
            plan=plan,
            inputs=Inputs({SOURCE: origin}, self._folders.sources),
            settings=settings,
            estimate=estimated(
                *(plan, settings, out),
                bytes_read=read + states.bytes_read,
                besides_bytes=given.conversion_bytes,
            ),
            kind=_KINDS[self._request.layout],
            options=changed_options(self._request),
            facts=self._shaping.facts,
            versions=given.versions,
            comparison=comparison,
        )

    def _comparison(
        self,
        config: Mapping[str, Any] | None,
        side: Sequence[SideFile],
        products: Sequence[Product],
        given: Named,
    ) -> Comparison:
        """Compares names and shapes with the model that the configuration describes."""
        if config is None:
            return NOTHING
        if self._request.names == "live":
            self._notes.append(
                "names and shapes are not compared with the model of config.json: --names live"
            )
            return NOTHING
        specs = {p.spec.name: (p.spec.dtype, p.spec.shape) for p in products}
        if given.left_out:
            self._notes.append(
                f"left out by --include or --exclude: {len(given.left_out):,} of"
                f" {len(given.left_out) + len(specs):,} tensors; the model of config.json may need"
                " them"
            )
        subject = Subject(
            config={**config, **self._folders.code_of(side)},
            tensors={str(name): spec for name, spec in {**given.left_out, **specs}.items()},
            left_out=frozenset(map(str, given.left_out)),
            where=self._checkpoint.path,
            base=self._folders.base_of_config(side),
            is_live=self._request.layout != "hf",
            advice=self._advice,
        )
        comparison, notes = plan_comparison(subject, self._program)
        self._notes += notes
        return comparison

    def _entries(self) -> Sequence[TensorEntry]:
        checkpoint = self._checkpoint
        request = self._request
        if checkpoint.select != request.select:
            request = request.selecting(checkpoint.select)
        entries = select_model(checkpoint.index, request, location=checkpoint.path)
        if request.names != "live":
            refuse_packed(entries, location=checkpoint.path)
        problem = next(find_problems(checkpoint.index, entries), None)
        if problem is not None:
            raise error_of(problem, checkpoint.path)
        models = {"--base": self._folders.base, "--like": request.like}
        self._notes += check_reach(checkpoint, entries, models)
        return entries

    def _config(self, side: Sequence[SideFile]) -> Mapping[str, Any] | None:
        found = self._folders.config(side)
        config = dense_config(found, self._checkpoint.index.of_part("model"))
        if config != found:
            self._notes.append(
                "config.json has a quantization_config, which is left out: the weights of the"
                " source are not packed"
            )
        return config

    def _written_config(
        self, config: Mapping[str, Any] | None, products: Sequence[Product], ties: Ties
    ) -> dict[str, Any] | None:
        if config is None:
            return None
        written = bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        made = config_as_written(config, written, allow_code=self._request.allow_code)
        return self._shaping.config(self._untied(made, ties))

    def _ties(self, config: Mapping[str, Any] | None, entries: Sequence[TensorEntry]) -> Ties:
        if self._request.layout == "dcp":  # training loads every name of a tied weight
            return Ties({}, {})
        checkpoint = self._checkpoint
        # An origin of its own: what was compared is read, and proven, once more when written.
        return find_ties(config, entries, Origin(SOURCE, checkpoint.source, checkpoint.index))

    def _named(
        self, products: Sequence[Product], config: Mapping[str, Any] | None, ties: Ties
    ) -> Named:
        """Gives tensors the names on disk; only model folders are loaded by those."""
        request, checkpoint = self._request, self._checkpoint
        whole = replace(request, select=checkpoint.select, include=(), exclude=())
        entries = select_model(checkpoint.index, whole, location=checkpoint.path)
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        tensors |= {p.spec.name: (p.spec.dtype, p.spec.shape) for p in products}
        if request.layout != "hf":
            rest = left_out(products, ties.dropped, tensors)
            return Named(products, ties.dropped, left_out=rest)
        return named(
            *(products, ties.dropped, tensors, config),
            choice=request.names,
            base=self._folders.base,
            program=self._program,
        )

    def _weights(
        self,
        products: Sequence[Product],
        config: Mapping[str, Any] | None,
        dropped: Mapping[Fqn, Fqn],
    ) -> list[OutputFile]:
        names = {product.spec.name for product in products}
        tied = {*dropped, *tied_names_absent(config, names)}
        files = self._shaping.files(products, tied)
        if files is None:
            files = _LAYOUTS[self._request.layout](products, self._request.max_file_bytes)
        return files

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
