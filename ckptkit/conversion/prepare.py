"""Everything that happens before the first byte is written.

What `--dtype base`, `--vocab-size` and `--like` make of the tensors that will be written.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.conversion.compare_names import NOTHING, Comparison, Subject, plan_comparison
from ckptkit.conversion.names_on_disk import Named, beside_conversions, left_out, named
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.conversion.source.adapters import adapter_facts, choices, find_peft, step_of_base
from ckptkit.conversion.source.identity import check_reach
from ckptkit.conversion.source.model_folders import dtypes_in, file_map_of, optimizer_output
from ckptkit.conversion.source.open import Opened, PathLike, opened
from ckptkit.conversion.source.side_folders import SideFolders, Ties, absent_twins, find_ties
from ckptkit.conversion.write import Prepared, estimated, settings_for
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.engine.executor import Inputs
from ckptkit.engine.kernels import CastKernel, first_rows, recast
from ckptkit.engine.reader import Origin
from ckptkit.options import ConsolidateRequest, Resources, changed_options, matches
from ckptkit.plan.coverage import error_of, find_problems
from ckptkit.plan.layouts.dcp import layout_dcp
from ckptkit.plan.layouts.hf import layout_hf_files, layout_hf_weights
from ckptkit.plan.layouts.torch import layout_torch_full
from ckptkit.plan.load_report import CONSOLIDATE, Advice
from ckptkit.plan.plan import SOURCE, OutputFile, Plan, Product
from ckptkit.plan.selection import (
    DTypePolicy,
    distribute,
    hint_on_raw,
    make_products,
    model_trees,
    note_of_masters,
    refuse_casting_quantized,
    refuse_packed,
    select_model,
    under_tied_names,
)
from ckptkit.plan.side_files import SideFile, bytes_by_dtype, config_as_written, dense_config
from ckptkit.plan.ties import tied_names_absent, untied_config
from ckptkit.plan.vocabulary import Trim, plan_trim, refuse_cut_tokenizer, tokens_in, trimmed_config

_LISTED = 3


class Shaping:
    """Shapes an output after model folders that were named beside its source.

    All of it looks at the names that are written, which may be others than those at the source.

    Attributes:
        notes: What the user should know, as far as it came up.
    """

    def __init__(self, request: ConsolidateRequest, base: str | None, location: str) -> None:
        """Reads the headers of the folders.

        Args:
            request: What was asked for.
            base: The base model's folder, or None.
            location: The source, for messages.
        """
        self.notes: list[str] = []
        self._request = request
        self._base = base
        self._location = location
        self._trim: Trim | None = None
        self._tokens = 0
        wanted = request.dtype == "base" and base is not None
        self._dtypes = dtypes_in(str(base), option="--base") if wanted else None
        like = request.like
        self._files = None if like is None else file_map_of(like, option="--like")

    @property
    def before_names(self) -> ConsolidateRequest:
        """The request as far as it is met before tensors get the names that are written."""
        request = self._request
        return replace(request, dtype="keep") if request.dtype == "base" else request

    @property
    def facts(self) -> Mapping[str, Any]:
        return {} if self._dtypes is None else {"base": self._base}

    def check_casts(self, entries: Sequence[TensorEntry], config: Mapping[str, Any] | None) -> None:
        """Refuses to cast packed numbers as if they were weights."""
        refuse_casting_quantized(
            entries, self._request, config, location=self._location, base=self._dtypes
        )

    def regard(self, tokenizer: Mapping[str, Any] | None) -> None:
        self._tokens = 0 if tokenizer is None else tokens_in(tokenizer)

    def products(
        self, products: Sequence[Product], config: Mapping[str, Any] | None
    ) -> Sequence[Product]:
        """Returns the tensors with the rows and in the element types that were asked for."""
        if self._request.vocab_size is not None:
            products = self._trimmed(products, self._request.vocab_size, config)
        return self._recast(products) if self._request.dtype == "base" else products

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        return config if self._trim is None else trimmed_config(config, self._trim)

    def files(self, products: Sequence[Product], tied: Collection[Fqn]) -> list[OutputFile] | None:
        """Returns the weight files as another model has them, or None where none was named.

        Args:
            products: What is to be written.
            tied: Names that are not written because another tensor holds their bytes.
        """
        if self._files is None:
            return None
        found = distribute(products, self._files, is_wanted=self._request.wants, tied=tied)
        self.notes += found.notes
        return layout_hf_files(found.groups)

    def _trimmed(
        self, products: Sequence[Product], size: int, config: Mapping[str, Any] | None
    ) -> list[Product]:
        specs = [product.spec for product in products]
        self._trim = trim = plan_trim(specs, size, config, location=self._location)
        refuse_cut_tokenizer(trim, self._tokens, location=self._location)
        if trim.rows == size:
            self.notes.append(f"embeddings and heads have {size:,} rows already: none was cut")
        else:
            listed = ", ".join(sorted(map(repr, trim.names)))
            self.notes.append(f"the rows {size:,} to {trim.rows - 1:,} were cut from {listed}")
        return [first_rows(product, trim.shape(product.spec)) for product in products]

    def _recast(self, products: Sequence[Product]) -> list[Product]:
        policy = DTypePolicy("base", self._request.keep_dtype, self._dtypes)
        made = [recast(product, policy.target(product.spec)) for product in products]
        lacking = [
            product.spec.name
            for product in products
            if product.spec.dtype.kind == "float"
            and product.spec.name not in (self._dtypes or {})
            and not matches(product.spec.name, self._request.keep_dtype)
        ]
        if lacking and len(lacking) == len(products):
            raise RefusedError(
                f"has none of the {len(products):,} tensors that are to be written, such as"
                f" {lacking[0]!r}",
                where=f"--base {self._base}",
                hint="name the folder of the model that the run was started from",
            )
        if lacking:
            listed = ", ".join(map(repr, lacking[:_LISTED]))
            more = f" and {len(lacking) - _LISTED:,} more" if len(lacking) > _LISTED else ""
            self.notes.append(
                f"{self._base} has no tensor {listed}{more}: written in the element type that the"
                " source has"
            )
        return made


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
    """Refuses an adapter, or what has one in it, with what makes something of it."""
    peft = find_peft(checkpoint, folders)
    if peft is None:
        return
    advice = _advice_on_lora(checkpoint, folders, request, typed) if peft.is_of_lora else ""
    if not advice:
        if checkpoint.select is None and len(model_trees(checkpoint.index)) > 1:
            return  # the user first chooses one of them
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
