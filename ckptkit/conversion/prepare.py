"""Planning a conversion: everything that happens before the first byte is written."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.class_facts import (
    adapt_kept,
    find_text_config,
    place_in_whole,
    take_from_whole,
)
from ckptkit.consumers.folder_truth import FolderTexts, describe_lacking
from ckptkit.consumers.sentence_modules import (
    ROUTER_CONFIG,
    SentenceModule,
    find_lacking_modules,
    find_modules,
    find_wrapper,
    has_config,
    has_router,
)
from ckptkit.consumers.side_files import (
    SideFile,
    drop_stale_quantization,
    is_of_processor,
    sum_bytes_by_dtype,
    update_config,
)
from ckptkit.consumers.table import MODULES, PLAIN, Consumer
from ckptkit.conversion.compare_names import (
    LIVE_NAMES,
    Comparison,
    Subject,
    find_lacking,
    plan_comparison,
)
from ckptkit.conversion.names_on_disk import (
    NamedProducts,
    find_left_out,
    name_on_disk,
    reserve_for_conversions,
)
from ckptkit.conversion.naming_program import NamingProgram, ask_kept
from ckptkit.conversion.source.adapters import (
    build_selection_options,
    describe_adapters,
    find_peft,
    find_step_of_base,
)
from ckptkit.conversion.source.model_folders import (
    Filling,
    check_reach,
    open_filling,
    plan_optimizer_files,
    read_entries,
    read_entries_if_any,
    read_file_map,
)
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.read import Ties, find_absent_twins, find_ties
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders
from ckptkit.conversion.write import (
    PlannedOutput,
    check_destination,
    choose_settings,
    estimate_plan,
)
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import InputError, RefusedError, UsageError
from ckptkit.core.index import MOST_WRAPPERS, Fqn, TensorEntry
from ckptkit.core.text import Aside, counted
from ckptkit.engine.kernels import Preparations, first_rows, make_products, recast
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.formats.parsing import list_first
from ckptkit.hub_names.known_models import determine_need, recognise_framework
from ckptkit.options import (
    FRAMEWORKS_BY_LAYOUT,
    ConsolidateRequest,
    IfExists,
    Layout,
    Resources,
    changed_options,
    check_if_exists,
    matches,
)
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.layouts.hf import distribute, layout_hf_files, layout_hf_weights
from ckptkit.plan.load_report import (
    CONSOLIDATE,
    Advice,
    LoadReport,
    MisfitError,
    find_copies,
    take_prefix,
)
from ckptkit.plan.plan import FILLING, SOURCE, OutputFile, Plan, Product, Share
from ckptkit.plan.selection import (
    DTypePolicy,
    KeptDtypes,
    add_tied_names,
    describe_kept,
    describe_masters,
    find_float32_among_halves,
    model_trees,
    refuse_casting_quantized,
    select_model,
    take_masters,
)
from ckptkit.plan.ties import find_absent_tied_names, untie_config
from ckptkit.plan.vocabulary import (
    Trim,
    count_tokens,
    describe_lacking_rows,
    find_grown_rows,
    plan_trim,
    refuse_cut_tokenizer,
    trim_config,
)
from ckptkit.plan.weight_kinds import hint_at_raw_names, refuse_packed
from ckptkit.storage.places import PathLike

_LISTED = 3
_TIE = "tie_word_embeddings"  # that of a whole model decides for its text model too
_MOST_MODULE_BYTES = 1 << 28
_TORCH_LAYOUTS = ("torch", "dcp")


class ConversionJob(Struct, frozen=True):
    """A conversion as values, which can be sent to another process.

    Attributes:
        src: The source.
        out: The output; None if it is only planned.
        request: What the output holds.
        base: A model folder for what the source lacks, or None.
        side: Where configuration and tokenizer come from before all other folders.
        also: Further directories of the source.
        resources: What the execution may use.
        overwrite: Whether to replace an output that holds something.
        if_exists: `verify` accepts an existing output that equals the one asked for.
        resume: Whether to resume an interrupted run.
        delete_source: Whether to remove the files that were read once the output is verified.
        share: The slice to write, or None for all of the output.
        advice: The options that messages propose where the output would not load.
        from_masters: Whether tensors are the master copies that an optimizer works on, where there
            are some; `--dtype keep` otherwise takes what the model has.
        origins: What the plan calls the source, and the model that fills what it lacks.
    """

    src: PathLike
    out: PathLike | None
    request: ConsolidateRequest
    base: PathLike | None = None
    side: SideChoice = field(default_factory=SideChoice)
    also: tuple[PathLike, ...] = ()
    resources: Resources = field(default_factory=Resources)
    overwrite: bool = False
    if_exists: IfExists = "error"
    resume: bool = False
    delete_source: bool = False
    share: Share | None = None
    advice: Advice = CONSOLIDATE
    from_masters: bool = False
    origins: tuple[str, str] = (SOURCE, FILLING)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], layout: Layout) -> Self:
        """Reads the options of a conversion as a user passes them; see `resolve_places`."""
        request = ConsolidateRequest.from_options(options, layout)
        resources = Resources.from_options(options)
        overwrite, if_exists = options.get("overwrite", False), options.get("if_exists", "error")
        check_if_exists(if_exists, overwrite=overwrite)
        return cls(
            options["src"],
            options.get("out"),
            request,
            base=options["base"],
            side=SideChoice(
                options.get("config"),
                options.get("tokenizer"),
                options.get("tokenizer_from", "auto"),
            ),
            also=options["also"],
            resources=resources,
            overwrite=overwrite,
            if_exists=if_exists,
            resume=options.get("resume", False),
            delete_source=options.get("delete_source", False),
        )

    def advise_on_config(self, consumer: Consumer = PLAIN, unusable: str = "") -> str:
        """Returns what to do where no configuration was found, but perhaps something unusable."""
        text = f"no config.json was found, {consumer.without_config}"
        if unusable:
            text = f"{unusable}; without a config.json from_pretrained does not load the output"
        which = "with the model that was trained: its id on the Hub, or a folder"
        if self.advice.again:
            options = "--base ORG/NAME --overwrite"
            return f"{text}; run the same `{self.advice.again}` with `{options}` added, {which}"
        if self.out is None or self.advice is not CONSOLIDATE:
            return f"{text}; pass --base ORG/NAME {which}"
        return f"{text}; run `{self.command('--base', 'ORG/NAME', '--overwrite')}` {which}"

    def command(self, *more: str) -> str:
        """Returns the command of the job, with further options."""
        name, *layout = ["consolidate"]
        if self.request.layout != "hf":
            name, *layout = ["convert", "--to", self.request.layout]
        paths = os.fspath(self.src), "OUT" if self.out is None else os.fspath(self.out)
        chosen = build_selection_options(self.request.select, self.also)
        return shlex.join(["ckptkit", name, *paths, *layout, *chosen, *more])

    @property
    def destination(self) -> PathLike:
        """The place of an output that is written."""
        assert self.out is not None  # noqa: S101  only what is never written has none
        return self.out

    def check_places(self) -> None:
        """Refuses an output that could not be written, before any work is done."""
        check_destination(
            self.src,
            self.out or "",  # which is refused as an empty path
            overwrite=self.overwrite,
            also=self.also,
            base=self.base,
            like=self.request.like,
        )

    @contextmanager
    def plan_output(self) -> Iterator[PlannedOutput]:
        """Opens the source, proves that it is whole, and plans the output; writes nothing."""
        with ExitStack() as stack:
            planned: PlannedOutput | None = None
            job, notes = self, list[str]()
            while planned is None:
                try:
                    planned = _Planner(stack, job, *notes).plan()
                except _WrappedNames as found:
                    request = replace(self.request, strip_prefix=(found.prefix,))
                    job, notes = replace(self, request=request), [found.note]
                    stack.close()
            yield planned


class _WrappedNames(Exception):  # noqa: N818  no failure: the model is planned again
    """All names begin with what a wrapper of the model put there."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.prefix = prefix
        self.note: str = Aside(
            f"all names begin with {prefix!r}, which those of the model of config.json do not:"
            " written without it"
        )


def _refuse_adapters(
    job: ConversionJob, checkpoint: OpenedCheckpoint, folders: SideFolders
) -> None:
    """Refuses an adapter, or a model with one in it, and proposes the command that takes it."""
    request = job.request
    peft = find_peft(checkpoint, folders)
    if peft is None:
        return
    advice = _advise_on_lora(job, checkpoint, folders) if peft.is_of_lora else ""
    if not advice:
        if checkpoint.select is None and len(model_trees(checkpoint.index)) > 1:
            return  # the user first chooses one of them
        peft = find_peft(checkpoint, folders, request.wants)
        advice = "" if peft is None else peft.advice
    if peft is not None:
        raise RefusedError(peft.refusal, where=checkpoint.path, hint=hint_at_raw_names(advice))


def _advise_on_lora(job: ConversionJob, checkpoint: OpenedCheckpoint, folders: SideFolders) -> str:
    """Returns the commands that take an adapter of LoRA; empty where none does."""
    facts = describe_adapters(checkpoint, folders)
    is_hidden = job.out is None or bool(job.advice.merged)  # of a watch, which makes and removes it
    out = "OUT" if is_hidden else os.fspath(job.destination)
    if facts is None:
        step = find_step_of_base(checkpoint)
        merge = shlex.join(["ckptkit", "adapter", "merge", step, out])
        of_base = "this is the base that training left as it was; for the trained model run"
        return f"{of_base} `{merge}`" if step else ""
    if job.advice.merged:
        return job.advice.merged
    chosen = build_selection_options(job.request.select, job.also)
    source = os.fspath(job.src) if chosen else checkpoint.path
    extract = facts.extract(source, out, chosen=chosen)
    is_alone = facts.is_ready or not facts.is_extractable
    alone = "" if is_alone else f", for the adapter alone `{extract}`"
    remark = f" ({facts.remark})" if facts.remark else ""
    return f"for the merged model run `{facts.merge(source, out, chosen=chosen)}`{alone}{remark}"


class _Planner:
    """Plans one output.

    `--dtype base`, `--vocab-size` and `--like` apply to the names that are written, which can
    differ from those of the source.
    """

    def __init__(self, stack: ExitStack, job: ConversionJob, *notes: str) -> None:
        """Opens the source, and reads the headers of the model folders that the options name."""
        request = job.request
        self._job = job
        self._request = request
        self._checkpoint = stack.enter_context(
            open_checkpoint(
                job.src,
                select=request.select,
                also=job.also,
                limit_bytes=job.resources.memory_limit_bytes,
                model_config=request.model_config,
            )
        )
        self._folders = SideFolders(stack, self._checkpoint, job.base, job.side, request)
        if request.names != "live":
            _refuse_adapters(job, self._checkpoint, self._folders)
        self._dtypes: dict[Fqn, DType] | None = None
        if request.dtype == "base" and self._folders.base is not None:
            entries = read_entries(self._folders.base, option="--base")
            self._dtypes = {entry.name: entry.dtype for entry in entries}
        like = request.like
        self._files = None if like is None else read_file_map(like, option="--like")
        self._program = stack.enter_context(NamingProgram())
        self._filling = self._open_filling(stack)
        self._policy = DTypePolicy("keep")
        self._trim: Trim | None = None
        self._lacking: tuple[str, ...] = ()
        self._is_text = False  # the text model of a multimodal configuration
        self._text: Mapping[str, Any] | None = None  # the configuration of one put into a whole
        self._placed: Mapping[str, str] = {}  # its names, and those in the whole
        self._needs_config = True  # not the first modules of some sentence-transformers
        self._notes = [*self._checkpoint.notes, *self._folders.notes, *notes]
        index = self._checkpoint.index
        for problem in index.problems:
            if problem.where not in index.tensors:  # of the step, such as that it has no manifest
                self._notes.append(f"{problem.where} {problem.message}")
        self._option_notes: list[str] = []
        self._facts: dict[str, Any] = {}

    def _open_filling(self, stack: ExitStack) -> Filling | None:
        request = self._request
        if request.fill_from is not None:
            return open_filling(stack, request.fill_from, "--fill-from")
        if not (request.fill_from_base or request.into_base):
            return None
        option = "--into-base" if request.into_base else "--fill-from-base"
        if self._folders.base is None:
            raise UsageError(
                "takes tensors from the --base, and none was named",
                where=option,
                hint="name the model that the run was started from with --base",
            )
        return open_filling(stack, self._folders.base, option)

    def plan(self) -> PlannedOutput:
        """Plans the output: source, names, element types, what it lacks, files, and its truth."""
        request = self._request
        side, side_notes = self._folders.choose(allow_code=request.allow_code)
        config = self._read_config(side)
        self._convert_names(config)
        side = self._leave_modules(side, config)
        modules = self._take_modules(side)
        config, side = self._settle_text_model(config, side)
        checkpoint, entries = self._checkpoint, self._select_entries()
        # An origin of its own: what is compared is read, and verified, again when it is written.
        origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
        absent: Mapping[Fqn, Fqn] = {}
        # Training loads every name of a tied weight, so that a checkpoint for it drops none.
        has_all_names = request.layout in {"dcp", "torchtitan"}
        ties = Ties({}, {}) if has_all_names else self._find_ties(config, entries, origin)
        if has_all_names:
            absent, note = find_absent_twins(config, {entry.name for entry in entries})
            entries = add_tied_names(entries, absent)
            self._notes += filter(None, [note])
        names = self._name_and_cast(entries, config, ties)
        texts = self._folders.texts(side)
        products = self._apply_options(names.products, config, texts)
        products = self._fill(products, names, config)
        config = self._config_to_write(config, products, ties)
        comparison = self._compare_names(config, side, products, names)
        weights, names = self._lay_out(products, config, names)
        self._notes += side_notes
        # What the base has besides was said already.
        said = [*(str(product.spec.name) for product in products), *self._lacking]
        keep = request.generation_config == "keep"
        truth = self._folders.tell_truth(texts, config, said, keep_generation=keep)
        changed = {**truth.changed, **self._write_modules(modules, origin)}
        if modules:  # in a form that goes behind safetensors
            old = {f"{posixpath.dirname(path)}/pytorch_model.bin" for path in changed}
            side = [file for file in side if file.name not in old]
        files = self._folders.outputs(side, changed, allow_code=request.allow_code)
        states, states_bytes, state_notes = plan_optimizer_files(checkpoint, request, entries)
        self._notes += (*names.notes, *self._option_notes, *truth.notes, *state_notes)
        plan = Plan((*weights, *states, *files), names.dropped, tuple(self._notes))
        read = sum(entry.size_bytes for entry in entries if entry.name not in ties.dropped)
        taken = () if self._filling is None else self._filling.taken
        read += sum(entry.size_bytes for entry in taken)
        self._facts |= {"modules": list(modules)} if modules else {}
        return self._planned(plan, names, comparison, read + states_bytes)

    def _name_and_cast(
        self, entries: Sequence[TensorEntry], config: Mapping[str, Any] | None, ties: Ties
    ) -> NamedProducts:
        """Gives tensors their element types and names; what stays in float32 follows from both.

        The shipped lists of a class are replaced by those of the installed library where that is
        asked for names anyway.
        """
        request, location = self._request, self._checkpoint.path
        # `--dtype base` applies to the names that are written.
        choice = "keep" if request.dtype == "base" else request.dtype
        known = self._find_kept(config)
        while True:
            policy = DTypePolicy(choice, request.keep_dtype, kept=known or KeptDtypes())
            of_source = self._job.origins[0]
            live = make_products(entries, policy, ties.dropped, origin=of_source)
            names = self._name_on_disk(live, config, ties)
            if known is None or names.hub is None or known == adapt_kept(known, names.hub):
                break
            known = adapt_kept(known, names.hub)
        if request.names != "live":
            base = DTypePolicy("base", request.keep_dtype, self._dtypes)
            asked = base if request.dtype == "base" else policy
            refuse_casting_quantized(entries, config, asked, location=location)
        self._policy = policy
        self._notes += filter(None, [describe_masters(entries, live)])
        self._option_notes += describe_kept(policy, entries)
        return names

    def _find_kept(self, config: Mapping[str, Any] | None) -> KeptDtypes | None:
        """Returns what stays in float32 as far as that is known; None where all is cast."""
        request = self._request
        if request.cast_all or request.dtype not in {"float16", "bfloat16"}:
            return None
        kept = KeptDtypes()
        if config is not None:
            kept = self._folders.consumer.find_kept(config)
            if determine_need(config, has_base=False).kind == "unknown":
                kept = ask_kept(config, self._program) or kept
        if self._folders.base is None:
            return kept
        with suppress(InputError):  # weights of the base may be damaged or missing
            names = find_float32_among_halves(read_entries_if_any(self._folders.base))
            kept = replace(kept, names=names)
        return kept

    def _planned(
        self,
        plan: Plan,
        names: NamedProducts,
        comparison: Comparison | None,
        bytes_read: int,
    ) -> PlannedOutput:
        checkpoint, out, filling = self._checkpoint, self._job.out, self._filling
        sources = (checkpoint,) if filling is None else (checkpoint, filling.opened)
        resources = reserve_for_conversions(self._job.resources, names.conversion_bytes)
        settings = choose_settings(resources, plan, sources=sources, out=out)
        settings = replace(settings, check=self._request.check)
        of_source, of_filling = self._job.origins
        origins = {of_source: Origin(of_source, checkpoint.source, checkpoint.index)}
        facts = dict(self._facts)
        facts |= {} if self._dtypes is None else {"base": self._folders.base}
        if filling is not None and filling.taken:
            opened = filling.opened
            origins[of_filling] = Origin(of_filling, opened.source, opened.index)
            names_filled = [str(entry.name) for entry in filling.taken]
            facts["filled"] = {"path": filling.opened.path, "tensors": names_filled}
        return PlannedOutput(
            sources=sources,
            plan=plan,
            inputs=Inputs(origins, self._folders.sources),
            settings=settings,
            estimate=estimate_plan(
                plan, settings, out, bytes_read=bytes_read, besides_bytes=names.conversion_bytes
            ),
            kind="model" if self._request.layout == "hf" else self._request.layout,
            options=changed_options(self._request),
            facts=facts,
            versions=names.versions,
            comparison=comparison,
        )

    def _select_entries(self) -> Sequence[TensorEntry]:
        checkpoint = self._checkpoint
        request = replace(self._request, select=checkpoint.select)
        entries = select_model(checkpoint.index, request, location=checkpoint.path)
        if self._job.from_masters:
            entries = take_masters(entries, checkpoint.index, request)
        if request.names != "live":
            refuse_packed(entries, location=checkpoint.path)
        refuse_problems(checkpoint.index, entries, checkpoint.path)
        models = {"--base": self._folders.base, "--like": request.like}
        self._notes += check_reach(checkpoint, entries, models)
        return entries

    def _read_config(self, side: Sequence[SideFile]) -> Mapping[str, Any] | None:
        stored = self._folders.config(side)
        config = drop_stale_quantization(stored, self._checkpoint.index.of_part("model"))
        if config != stored:
            self._notes.append(
                "config.json has a quantization_config, which is left out: the weights of the"
                " source are not packed"
            )
        return config

    def _convert_names(self, config: Mapping[str, Any] | None) -> None:
        """Converts the names if they are those of another framework, or if a map is named.

        All options see the names that are written.
        """
        request, before = self._request, self._checkpoint
        if request.layout in FRAMEWORKS_BY_LAYOUT:
            request = replace(request, map="auto")  # the option names the map of the output
        if request.names == "live" or request.map == "none":
            return
        names = (entry.name for entry in before.index.of_part("model"))
        if request.map == "auto" and not recognise_framework(names):
            return
        from ckptkit.conversion.mapped_names import convert_checkpoint  # few models need it

        self._checkpoint = convert_checkpoint(before, request, config)
        if self._checkpoint.maps:
            if request.optimizer:
                raise RefusedError(
                    "states of an optimizer have the names of training, and a map gives the"
                    " weights others",
                    where="--optimizer",
                    hint="leave it out, or keep all names with --names live",
                )
            self._notes += self._checkpoint.notes[len(before.notes) :]
            self._request = replace(self._request, strip_prefix=())

    def _leave_modules(
        self, side: list[SideFile], config: Mapping[str, Any] | None
    ) -> list[SideFile]:
        """Leaves out the files of modules where what is written is not their model."""
        listed = self._folders.read_json(side, MODULES)
        if self._request.strip_prefix and has_router(listed):
            self._notes.append(f"the output is one encoder, without the router of {MODULES}")
        elif config is not None or has_router(listed) or not has_config(listed):
            self._needs_config = listed is None or has_config(listed)
            return side
        return [file for file in side if not self._folders.consumer.has_companion(file.name)]

    def _take_modules(self, side: Sequence[SideFile]) -> Mapping[str, Sequence[TensorEntry]]:
        """Takes the tensors of modules beside the model out of it, by their folders."""
        checkpoint, listed = self._checkpoint, self._folders.read_json(side, MODULES)
        index, select = checkpoint.index, self._request.select
        if listed is None or self._folders.consumer.leading != MODULES:
            return {}
        entries = [entry for entry in index.of_part("model") if select in {None, entry.tree}]
        request = self._request
        wrapper = find_wrapper(listed, [str(e.name) for e in entries], request.strip_prefix)
        names = {e.key: e.name.removeprefix(wrapper or "") for e in entries}
        router = self._folders.read_json(side, ROUTER_CONFIG)
        base = self._folders.base or ""
        found: Sequence[SentenceModule] = ()
        if wrapper is not None:
            own = list(names.values())
            found = find_modules(listed, own, checkpoint.path, base=base, router=router)
        taken: dict[str, list[TensorEntry]] = {}
        tensors = dict(index.tensors)
        for entry in entries if found else ():
            name = names[entry.key]
            module = next((m for m in found if name.startswith(m.prefix)), None)
            # Patterns may be of the names before.
            stored = (*entry.stored_names, entry.name)
            is_left = any(matches(one, request.exclude) for one in (name, *stored))
            if module is not None and (module.is_model or not is_left):
                name = name.removeprefix(module.prefix)
            renamed = replace(entry, name=Fqn(name), stored_names=stored)
            if module is not None and not (module.is_model or is_left):
                taken.setdefault(module.folder, []).append(renamed)
                renamed = replace(renamed, part="other")
            tensors[entry.key] = renamed
        if found:
            self._checkpoint = replace(checkpoint, index=replace(index, tensors=tensors))
            self._request = replace(request, strip_prefix=())
            prefix = f"{wrapper}{next(module.prefix for module in found if module.is_model)}"
            note = f"names are written without {prefix!r}, as sentence-transformers has them"
            self._notes.append(Aside(note))
        files = [file.name for file in side if base and file.origin.startswith(str(base))]
        lacking = find_lacking_modules(listed, taken, files)
        if lacking:
            folders = ", ".join(map(repr, lacking))
            text = f"the tensors of {folders} are those of {base}: none is taken from the source"
            self._notes.append(text)
        return taken

    def _write_modules(
        self, modules: Mapping[str, Sequence[TensorEntry]], origin: Origin
    ) -> dict[str, bytes]:
        """Returns the weight files of modules beside an encoder, by their paths."""
        written = {}
        for folder, entries in modules.items():
            refuse_problems(origin.index, entries, self._checkpoint.path)
            products = make_products(entries, self._policy, {})
            (file,) = layout_hf_weights(products, _MOST_MODULE_BYTES)
            if file.size_bytes > _MOST_MODULE_BYTES:
                raise RefusedError(
                    f"{folder!r} has {file.size_bytes:,} bytes of weights, more than the"
                    f" {_MOST_MODULE_BYTES:,} that a module beside an encoder may have",
                    where=self._checkpoint.path,
                    hint="leave its tensors out with --exclude, and copy its folder yourself",
                )
            data = bytearray(file.size_bytes)
            with Preparations() as preparations:
                reader = SegmentReader(Inputs({SOURCE: origin}, {}), preparations)
                reader.fill_range(file, 0, file.size_bytes, memoryview(data))
            written[posixpath.join(folder, file.path)] = bytes(data)
        return written

    def _settle_text_model(
        self, config: Mapping[str, Any] | None, side: list[SideFile]
    ) -> tuple[Mapping[str, Any] | None, list[SideFile]]:
        """Makes a text model of what fits the text part of a configuration, or puts it into it."""
        request, checkpoint = self._request, self._checkpoint
        if config is None or request.names == "live":
            if request.into_base:
                raise self._no_text_model()
            return config, side
        whole, where = replace(request, select=checkpoint.select), checkpoint.path
        names = [str(e.name) for e in select_model(checkpoint.index, whole, location=where)]
        base: list[str] | None = None
        if self._filling is not None and request.into_base:
            base = [str(e.name) for e in self._filling.opened.index.of_part("model")]

        def is_text_model(prefix: str) -> bool:
            inner = [name.removeprefix(prefix) for name in names]
            is_placed = base is None or place_in_whole(inner, base) is not None
            return is_placed and find_text_config(config, inner) is not None

        self._unwrap(names, is_text_model)
        text = find_text_config(config, names)
        if base is not None:
            placed = place_in_whole(names, base)
            if text is None or placed is None:
                raise self._no_text_model()
            self._placed = placed
            self._rename(placed)
            of_whole = {_TIE: config[_TIE]} if _TIE in config else {}
            self._text = {**text, **of_whole}
            return config, side
        if text is None:
            self._take_text(names, take_from_whole(config, names))
            return config, side
        note = (
            f"the tensors are those of the text model: it is written as {text['architectures'][0]}"
        )
        self._notes.append(f"{note}; --into-base puts it into the multimodal model of --base")
        self._is_text = True
        return text, [file for file in side if not is_of_processor(file.name)]

    def _no_text_model(self) -> RefusedError:
        return RefusedError(
            "the source is no text model of the configuration of the base",
            where=self._checkpoint.path,
            hint="leave --into-base out, or pass the multimodal model with --base",
        )

    @property
    def _may_be_wrapped(self) -> bool:
        """Whether what all names begin with is taken off where that makes a model of them."""
        request = self._job.request
        return not (request.strip_prefix or request.optimizer or request.layout in _TORCH_LAYOUTS)

    def _unwrap(self, names: Sequence[str], fits: Callable[[str], bool]) -> None:
        """Plans anew without what all names begin with, if the rest fits what it should be."""
        for prefix in _list_wrappers(names) if self._may_be_wrapped else ():
            if fits(prefix):
                raise _WrappedNames(prefix)

    def _rename(self, names: Mapping[str, str], *, leave: Collection[str] = ()) -> None:
        """Gives tensors other names than `--strip-prefix` does; patterns fit the old ones, too."""
        index, where = self._checkpoint.index, self._checkpoint.path
        request = replace(self._request, select=self._checkpoint.select)
        tensors = dict(index.tensors)
        for entry in select_model(index, request, location=where, everything=True):
            old = index.tensors[entry.key]
            name = Fqn(names.get(entry.name, entry.name))
            stored = (*old.stored_names, *([old.name] if old.name != name else []))
            part = "other" if entry.name in leave else entry.part
            tensors[entry.key] = replace(entry, name=name, stored_names=stored, part=part)
        self._checkpoint = replace(self._checkpoint, index=replace(index, tensors=tensors))
        self._request = replace(self._request, strip_prefix=())

    def _take_text(self, names: Sequence[str], taken: Mapping[str, str] | None) -> None:
        """Takes the text model out of a multimodal one, if the configuration is that of its own."""
        if taken is None:
            return
        left = [name for name in names if name not in taken]
        self._rename(taken, leave=left)
        note = (
            "the tensors are those of a multimodal model, and the configuration is that of its text"
            f" model: {counted(len(taken), 'tensor')} of it are written"
        )
        if left:
            note += f", and not {counted(len(left), 'other')}, such as {left[0]!r}"
        self._notes.append(note)

    def _find_ties(
        self, config: Mapping[str, Any] | None, entries: Sequence[TensorEntry], origin: Origin
    ) -> Ties:
        """Finds tied weights; of a text model in a whole one, by the names that it has alone."""
        if self._text is None:
            return find_ties(config, entries, origin)
        alone = {placed: name for name, placed in self._placed.items()}
        own = [replace(e, name=Fqn(alone.get(e.name, e.name))) for e in entries]
        ties = find_ties(self._text, own, origin)
        called = {Fqn(name): Fqn(placed) for name, placed in self._placed.items()}
        return Ties(
            {called.get(t, t): called.get(s, s) for t, s in ties.dropped.items()},
            {called.get(t, t): called.get(s, s) for t, s in ties.broken.items()},
        )

    def _name_on_disk(
        self,
        products: Sequence[Product],
        config: Mapping[str, Any] | None,
        ties: Ties,
    ) -> NamedProducts:
        """Gives tensors the names on disk; only model folders are loaded by those."""
        request, checkpoint = self._request, self._checkpoint
        whole, where = replace(request, select=checkpoint.select), checkpoint.path
        entries = select_model(checkpoint.index, whole, location=where, everything=True)
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        tensors |= {p.spec.name: (p.spec.dtype, p.spec.shape) for p in products}
        # Training loads the names that it holds; a map has given those on disk.
        is_renamed = self._folders.consumer.is_renamed
        if request.layout in {"torch", "dcp"} or checkpoint.maps or not is_renamed:
            rest = find_left_out(products, ties.dropped, tensors)
            return NamedProducts(products, ties.dropped, versions=checkpoint.maps, left_out=rest)
        return name_on_disk(
            *(products, ties.dropped, tensors, config),
            choice=request.names,
            base=self._folders.base,
            program=self._program,
        )

    def _apply_options(
        self,
        products: Sequence[Product],
        config: Mapping[str, Any] | None,
        texts: FolderTexts,
    ) -> Sequence[Product]:
        """Returns the tensors with the rows and the element types that were asked for."""
        size, location = self._request.vocab_size, self._checkpoint.path
        tokens = 0 if texts.tokenizer is None else count_tokens(texts.tokenizer)
        specs = [product.spec for product in products]
        grown = None
        if size is None and config is not None and config.get("vocab_size") != tokens:
            size = grown = find_grown_rows(specs, tokens, config)
            self._option_notes += [] if grown else describe_lacking_rows(tokens, config)
        if size is not None:
            self._trim = trim = plan_trim(specs, size, config, location=location)
            refuse_cut_tokenizer(trim, tokens, location=location)
            listed = ", ".join(sorted(map(repr, trim.names)))
            self._option_notes.append(
                f"'vocab_size' of config.json is set to {size:,}, which are the rows of embeddings"
                f" and heads: the tokenizer has {tokens:,} tokens"
                if grown
                else f"embeddings and heads have {size:,} rows already: none was cut"
                if trim.rows == size
                else f"the rows {size:,} to {trim.rows - 1:,} were cut from {listed}"
            )
            products = [first_rows(product, trim.shape(product.spec)) for product in products]
        return self._cast_to_base(products) if self._request.dtype == "base" else products

    def _cast_to_base(self, products: Sequence[Product]) -> list[Product]:
        policy = DTypePolicy("base", self._request.keep_dtype, self._dtypes)
        cast = [recast(product, policy.target(product.spec)) for product in products]
        lacking = [
            product.spec.name
            for product in products
            if product.spec.dtype.kind == "float"
            and product.spec.name not in (self._dtypes or {})
            and not matches(product.spec.name, self._request.keep_dtype)
        ]
        base = self._folders.base
        if lacking and len(lacking) == len(products):
            raise RefusedError(
                f"has none of the {len(products):,} tensors that are to be written, such as"
                f" {lacking[0]!r}",
                where=f"--base {base}",
                hint="name the folder of the model that the run was started from",
            )
        if lacking:
            listed = list_first(map(repr, lacking), len(lacking), _LISTED)
            self._option_notes.append(
                f"{base} has no tensor {listed}: written in the element type that the source has"
            )
        return cast

    def _fill(
        self, products: Sequence[Product], names: NamedProducts, config: Mapping[str, Any] | None
    ) -> Sequence[Product]:
        """Adds the tensors that another model has and the output lacks, if that was asked for."""
        if self._filling is None:
            return products
        written = {product.spec.name for product in products}
        written |= {*names.dropped, *names.left_out, *find_absent_tied_names(config, written)}
        known = {entry.name for entry in self._filling.opened.index.of_part("model")}
        if known.isdisjoint(written):
            self._unwrap(
                sorted(written), lambda p: any(n.removeprefix(p) in known for n in written)
            )
        # What fills the source is included as if it was in it.
        prefixes = self._job.request.strip_prefix or ("",)
        entries = [
            entry
            for entry in self._filling.lacking(written)
            if any(self._request.wants(entry.name, before=f"{p}{entry.name}") for p in prefixes)
        ]
        refuse_packed(entries, location=self._filling.opened.path)
        refuse_problems(self._filling.opened.index, entries, self._filling.opened.path)
        self._filling.taken = entries
        if not entries:
            return products
        self._option_notes += [
            Aside(self._filling.describe()),
            *describe_kept(self._policy, entries),
        ]
        added = make_products(entries, self._policy, {}, origin=self._job.origins[1])
        return [*products, *added]

    def _lay_out(
        self,
        products: Sequence[Product],
        config: Mapping[str, Any] | None,
        names: NamedProducts,
    ) -> tuple[list[OutputFile], NamedProducts]:
        """Returns the weight files, and the names with what converted them for these files."""
        request = self._request
        framework = FRAMEWORKS_BY_LAYOUT.get(request.layout)
        if framework is not None:
            return self._lay_out_for(framework, products, config, names)
        if self._files is None and request.layout == "hf":
            consumer, limit = self._folders.consumer, request.max_file_bytes
            if not consumer.is_split:
                size = sum(product.spec.size_bytes for product in products)
                if size > limit:
                    note = f"{consumer.name} reads one file: all tensors are written into it"
                    self._option_notes.append(note)
                limit = max(limit, size)
            return layout_hf_weights(products, limit, consumer.stem), names
        if self._files is None:
            from ckptkit.plan.layouts.torch import layout_dcp, layout_torch_full  # few need it

            lay_out = layout_dcp if request.layout == "dcp" else layout_torch_full
            return lay_out(products, request.max_file_bytes), names
        written = {product.spec.name for product in products}
        tied = {*names.dropped, *find_absent_tied_names(config, written)}
        files, notes = distribute(products, self._files, is_wanted=request.wants, tied=tied)
        self._option_notes += notes
        return layout_hf_files(files, self._folders.consumer.stem), names

    def _lay_out_for(
        self,
        framework: str,
        products: Sequence[Product],
        config: Mapping[str, Any] | None,
        names: NamedProducts,
    ) -> tuple[list[OutputFile], NamedProducts]:
        from ckptkit.conversion.mapped_names import name_for_framework  # few outputs need it
        from ckptkit.plan.layouts.torch import layout_megatron, layout_torchtitan

        # Where the source has names of a framework, its own map has converted them.
        choice, where = self._request.map, self._checkpoint.path
        named, parts = name_for_framework(framework, choice, config, products, where=where)
        limit = self._request.max_file_bytes
        files = (
            layout_megatron(named.products, parts, limit, config)
            if self._request.layout == "megatron"
            else layout_torchtitan(named.products, parts, limit)
        )
        notes, versions = (*names.notes, *named.notes), {**names.versions, **named.versions}
        return files, replace(names, notes=notes, versions=versions)

    def _config_to_write(
        self, config: Mapping[str, Any] | None, products: Sequence[Product], ties: Ties
    ) -> dict[str, Any] | None:
        if config is None:
            if not self._needs_config:
                return None
            consumer, unusable = self._folders.consumer, self._folders.describe_unusable_config()
            self._notes.append(self._job.advise_on_config(consumer, unusable))
            return None
        if not self._folders.consumer.owns_config:
            return dict(config)
        sizes = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        config = update_config(config, sizes, allow_code=self._request.allow_code)
        untied = dict(untie_config(config)) if ties.broken else config
        consequence = ", and tie_word_embeddings is set to false" if untied != config else ""
        for target, source in ties.broken.items():
            self._notes.append(
                f"the configuration ties {target!r} to {source!r}, but they differ: both are"
                f" written{consequence}"
            )
        return untied if self._trim is None else trim_config(untied, self._trim)

    def _compare_names(
        self,
        config: Mapping[str, Any] | None,
        side: Sequence[SideFile],
        products: Sequence[Product],
        names: NamedProducts,
    ) -> Comparison | None:
        """Compares names and shapes with the model that the configuration describes."""
        if config is None and self._needs_config:
            return None
        if self._request.names == "live":
            self._notes.append(LIVE_NAMES)
            return None
        specs = {str(p.spec.name): (p.spec.dtype, p.spec.shape) for p in products}
        left_out = {str(name): spec for name, spec in names.left_out.items()}
        advice, rules = self._job.advice, self._checkpoint.rules
        if self._request.layout in FRAMEWORKS_BY_LAYOUT:  # whose names cannot stay
            advice = replace(advice, anyway="")
        base = None if self._is_text else self._folders.base_of_config(side)
        subject = Subject(
            config=None if config is None else {**config, **self._folders.code_of(side)},
            tensors={**left_out, **specs},
            left_out=frozenset(left_out),
            where=self._checkpoint.path,
            base=self._folders.base if config is None else base,
            filling=None if self._filling is not None else self._folders.base,
            is_live=self._request.layout in _TORCH_LAYOUTS,
            consumer=self._folders.consumer,
            advice=replace(advice, rules=rules) if rules else advice,
        )
        is_chosen = bool(self._request.include or self._request.exclude)
        written = replace(subject, tensors=specs, left_out=frozenset())
        is_complete = is_chosen and self._is_model(written)
        self._facts |= {"complete": True} if is_complete else {}
        if left_out:
            count = f"{len(left_out):,} of {len(subject.tensors):,} tensors"
            said = f"left out by --include or --exclude: {count}; the model of config.json"
            self._notes.append(
                Aside(f"{said} needs none of them") if is_complete else f"{said} may need them"
            )
        try:
            comparison, notes = plan_comparison(subject, self._program)
        except MisfitError as error:
            if not self._may_be_wrapped:
                raise
            self._unwrap(subject.written, lambda prefix: self._is_model(_part_of(subject, prefix)))
            raise self._propose_prefixes(subject, error) from None
        self._notes += notes
        if self._filling is None and subject.base is not None and config is not None:
            self._lacking, made = find_lacking(subject)
            base, option = str(self._folders.base), "--fill-from-base"
            if self._lacking:
                self._notes.append(describe_lacking(base, self._lacking, config, option=option))
            if made:
                text = f"{counted(len(made), 'buffer')} that models make themselves"
                self._notes.append(Aside(f"{base} has {text}, such as {made[0]!r}: not written"))
        return comparison

    def _propose_prefixes(self, subject: Subject, error: MisfitError) -> MisfitError:
        """Returns the error with whole commands for the tensors of one prefix, such as a copy."""
        report, job = error.report, self._job
        if report is None or not report.prefix or job.advice is not CONSOLIDATE:
            return error
        kept = {"base": job.base, "config": job.side.config, "tokenizer": job.side.tokenizer}
        kept["dtype"] = None if self._request.dtype == "keep" else self._request.dtype
        given = [w for n, v in kept.items() if v is not None for w in (f"--{n}", os.fspath(v))]
        hints = []
        copies = find_copies(report.prefix, subject.written)
        others = tuple(copy for copy in copies if copy)
        for prefix in copies or [report.prefix]:
            options = take_prefix(prefix, report, subject.written)
            rest = {
                name
                for name in subject.tensors
                if not prefix and (name in report.unexpected or name.startswith(others))
            }
            more = self._complete(_part_of(subject, prefix, rest))
            if more is None:
                continue
            options = f"{options} {more}".strip()
            kind = "the copy" if copies else "the tensors"
            what = f"{kind} {prefix!r}" if prefix else f"{kind} without a prefix"
            hints.append(f"for {what} run `{job.command(*given)} {options}`")
        hints = hints or [job.advice.config]
        return error.hinted("; or ".join(filter(None, [*hints, job.advice.anyway])))

    def _complete(self, subject: Subject) -> str | None:
        """Returns the options with which tensors are written that would load; None for none.

        Tensors are written as they are only where no parameter would be missing, or where most
        have the names of other code than the model's.
        """
        text = find_text_config(subject.config or {}, subject.written)
        as_text = replace(subject, config=text, base=None)
        if self._is_model(subject) or (text is not None and self._is_model(as_text)):
            return ""
        report = self._report(subject)
        if report is None or len(report.unexpected) > len(subject.written) / 2:
            return "--names live"
        if report.missing:
            is_filled = self._filling is None and self._is_model(self._filled(subject))
            return "--fill-from-base" if is_filled else None
        own = [name for name in subject.written if name not in report.unexpected]
        rest = replace(subject, tensors={name: subject.tensors[name] for name in own})
        if report.unexpected and self._is_model(rest):
            return take_prefix("", report, subject.written)
        return "--names live"

    def _filled(self, subject: Subject) -> Subject:
        """Returns the tensors, and those of the base that they lack."""
        base = self._folders.base
        added: dict[str, Any] = {}
        with suppress(InputError):  # weights of the base may be damaged or missing
            entries = [] if base is None else read_entries_if_any(base)
            added = {str(e.name): (e.dtype, e.shape) for e in entries}
        return replace(subject, tensors={**added, **subject.tensors})

    def _report(self, subject: Subject) -> LoadReport | None:
        """Returns what loading would report where that is not nothing, if it was compared."""
        try:
            comparison, _ = plan_comparison(subject, self._program)
            if comparison is not None:
                comparison.judge_answer()
        except MisfitError as error:
            return error.report
        except RefusedError:
            return None
        return None

    def _is_model(self, subject: Subject) -> bool:
        """Returns whether names and shapes were compared with the model, and are all of it."""
        try:
            comparison, notes = plan_comparison(subject, self._program)
            return not (notes or (comparison is not None and comparison.judge_answer()))
        except RefusedError:
            return False


def _list_wrappers(names: Sequence[str]) -> Iterator[str]:
    """Yields what all names begin with that wrappers of a model may have put there."""
    first = names[0].split(".")[:-1] if names else []
    for count in range(1, min(len(first), MOST_WRAPPERS) + 1):
        prefix = ".".join(first[:count]) + "."
        if not all(name.startswith(prefix) for name in names):
            return
        yield prefix


def _part_of(subject: Subject, prefix: str, rest: Collection[str] = ()) -> Subject:
    """Returns the tensors with a prefix, without it and without some others."""
    inner = [name for name in subject.tensors if name.startswith(prefix) and name not in rest]
    tensors = {name.removeprefix(prefix): subject.tensors[name] for name in inner}
    left_out = {n.removeprefix(prefix) for n in subject.left_out if n.startswith(prefix)}
    return replace(subject, tensors=tensors, left_out=frozenset(left_out))
