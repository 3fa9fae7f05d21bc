"""Planning a conversion: everything that happens before the first byte is written."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from typing import Any, Self

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.consumers.class_facts import (
    adapt_kept,
    find_text_config,
    place_in_whole,
    take_from_whole,
)
from ckptkit.consumers.folder_truth import describe_lacking
from ckptkit.consumers.sentence_modules import (
    ROUTER_CONFIG,
    find_lacking_modules,
    has_config,
    has_router,
    split_modules,
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
    is_whole_model,
    plan_comparison,
    propose_parts,
)
from ckptkit.conversion.names_on_disk import (
    NamedProducts,
    find_disk_names,
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
    read_entries,
    read_entries_if_any,
    read_file_map,
)
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.paths import read_config_in
from ckptkit.conversion.source.read import Ties, find_absent_twins, find_ties
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders
from ckptkit.conversion.unpacking import (
    StoredForm,
    Unpacked,
    name_packing,
    unpack_checkpoint,
)
from ckptkit.conversion.write import (
    PlannedOutput,
    check_destination,
    choose_settings,
    estimate_plan,
)
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    InputError,
    MissingFileError,
    NotACheckpointError,
    RefusedError,
    UsageError,
)
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.text import Aside, counted, list_first
from ckptkit.core.wrapper_names import list_wrappers
from ckptkit.engine.kernels import Preparations, first_rows, make_products, recast
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.engine.shared_blocks import align_headers
from ckptkit.hub_names.known_models import determine_need
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
from ckptkit.plan.layouts.hf import FileMap, distribute, layout_hf_files, layout_hf_weights
from ckptkit.plan.load_report import CONSOLIDATE, Advice, MisfitError
from ckptkit.plan.optimizer_states import OptimizerStates
from ckptkit.plan.packed_forms import UNPACKED, list_kept
from ckptkit.plan.packing_settings import drop_quantization, restore_quantization
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
from ckptkit.plan.vocabulary import Trim, choose_trim, trim_config
from ckptkit.plan.weight_kinds import (
    find_dense_name,
    hint_at_raw_names,
    is_quantized,
    refuse_packed,
)
from ckptkit.storage.places import PathLike

_LISTED = 3
_TIE = "tie_word_embeddings"  # that of a whole model decides for its text model too
_MOST_MODULE_BYTES = 1 << 28
_TORCH_LAYOUTS = ("torch", "dcp", "universal")


class ConversionJob(Struct, frozen=True):
    """A conversion as values, which can be sent to another process."""

    src: PathLike
    out: PathLike | None  # None if it is only planned
    request: ConsolidateRequest  # what the output holds
    base: PathLike | None = None  # a model folder for what the source lacks
    # Where configuration and tokenizer come from before all other folders.
    side: SideChoice = field(default_factory=SideChoice)
    also: tuple[PathLike, ...] = ()  # further directories of the source
    resources: Resources = field(default_factory=Resources)  # what the execution may use
    overwrite: bool = False  # whether to replace an output that holds something
    if_exists: IfExists = "error"  # `verify` accepts an output that equals the one asked for
    resume: bool = False  # whether to resume an interrupted run
    delete_source: bool = False  # whether what was read is removed once the output is verified
    share: Share | None = None  # the slice to write, or None for all of the output
    advice: Advice = CONSOLIDATE  # what messages propose where the output would not load
    # Whether tensors are the master copies that an optimizer works on, where there are some;
    # `--dtype keep` otherwise takes what the model has.
    from_masters: bool = False
    # What the plan calls the source, and the model that fills what it lacks.
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
        found = "no config.json was found"
        if unusable:
            found = f"no config.json can be used ({unusable})"
        reason = consumer.without_config
        if self.request.layout not in {"hf", "torch"}:  # whose readers ask for none
            reason = "so names and shapes were compared with no model"
        text = f"{found}, {reason}"
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
            planned, prefix = None, ""
            try:
                planned = _plan(stack, self, [])
            except _WrappedNames as found:
                (prefix,) = found.args
                stack.close()
            if planned is None:
                note = (
                    f"all names begin with {prefix!r}, which those of the model of config.json do"
                    " not: written without it"
                )
                job = replace(self, request=replace(self.request, strip_prefix=(prefix,)))
                planned = _plan(stack, job, [Aside(note)])
            yield planned


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
        hint = hint_at_raw_names(advice)
        if request.layout == "universal" and any(checkpoint.index.of_part("optimizer")):
            live = job.command("--names", "live")
            hint = f"to train the adapter further run `{live}`; {advice}" if advice else hint
        raise RefusedError(peft.refusal, where=checkpoint.path, hint=hint)


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


class _WrappedNames(Exception):  # noqa: N818  no failure: the model is planned again
    """All names begin with what a wrapper of the model put there, which is its argument."""


class _PackedModel(Struct, frozen=True):
    """The model of `--like`, whose weights are packed."""

    unpacked: Unpacked
    config: Mapping[str, Any]
    where: str  # for messages

    @property
    def dtypes(self) -> dict[Fqn, DType]:
        """The element type of each tensor, packed ones before they are packed."""
        entries, stored = self.unpacked.checkpoint.index.of_part("model"), self.unpacked.stored
        return {e.name: BY_NAME[UNPACKED] if e.key in stored else e.dtype for e in entries}

    @property
    def stored(self) -> dict[str, StoredForm]:
        return {one.group.name: one for one in self.unpacked.stored.values()}


class _Draft(Struct):
    """What is decided of an output; the functions of `_plan` take one decision each."""

    job: ConversionJob
    request: ConsolidateRequest  # without `--strip-prefix` once names are those of the output
    checkpoint: OpenedCheckpoint
    folders: SideFolders
    program: NamingProgram
    filling: Filling | None
    notes: list[str]
    option_notes: list[str] = field(default_factory=list)  # which follow those on names
    packed: _PackedModel | None = None  # as which weights are packed
    needs_config: bool = True  # not the first modules of some sentence-transformers
    is_text: bool = False  # whether it is the text model of a multimodal configuration
    text: Mapping[str, Any] | None = None  # the configuration of one that is put into a whole
    placed: Mapping[str, str] = {}  # its names, and those in the whole

    def select(self, *, everything: bool = False) -> list[TensorEntry]:
        """Returns the tensors that the options name, with the names that they get."""
        request = replace(self.request, select=self.checkpoint.select)
        where = self.checkpoint.path
        return select_model(self.checkpoint.index, request, location=where, everything=everything)

    def unwrap(self, names: Sequence[str], fits: Callable[[str], bool]) -> None:
        """Plans anew without what all names begin with, if the rest fits what it should be."""
        for prefix in list_wrappers(names) if self.may_be_wrapped else ():
            if fits(prefix):
                raise _WrappedNames(prefix)

    @property
    def may_be_wrapped(self) -> bool:
        """Whether what all names begin with is taken off where that makes a model of them."""
        request = self.job.request
        return not (request.strip_prefix or request.optimizer or request.layout in _TORCH_LAYOUTS)

    def rename(self, names: Mapping[str, str], *, leave: Collection[str] = ()) -> None:
        """Gives tensors other names than `--strip-prefix` does; patterns fit the old ones, too."""
        index = self.checkpoint.index
        tensors = dict(index.tensors)
        for entry in self.select(everything=True):
            old = index.tensors[entry.key]
            name = Fqn(names.get(entry.name, entry.name))
            stored = (*old.stored_names, *([old.name] if old.name != name else []))
            part = "other" if entry.name in leave else entry.part
            tensors[entry.key] = replace(entry, name=name, stored_names=stored, part=part)
        self.checkpoint = replace(self.checkpoint, index=replace(index, tensors=tensors))
        self.request = replace(self.request, strip_prefix=())


def _plan(stack: ExitStack, job: ConversionJob, notes: Sequence[str]) -> PlannedOutput:
    """Plans one output.

    open → choose side files → convert names → select → cast and name → cut → fill → compare → lay
    out → tell the truth. `--dtype base`, `--vocab-size` and `--like` apply to the names that are
    written, which can differ from those of the source.
    """
    request = job.request
    checkpoint = stack.enter_context(
        open_checkpoint(
            job.src,
            select=request.select,
            also=job.also,
            limit_bytes=job.resources.memory_limit_bytes,
            model_config=request.model_config,
        )
    )
    folders = SideFolders(stack, checkpoint, job.base, job.side, request)
    if request.names != "live":
        _refuse_adapters(job, checkpoint, folders)
    like = None if request.like is None else read_file_map(request.like, option="--like")
    program = stack.enter_context(NamingProgram())
    filling = _open_filling(stack, request, folders.base)
    draft = _Draft(job, request, checkpoint, folders, program, filling, list(checkpoint.notes))
    draft.notes += [*folders.notes, *notes]
    for problem in checkpoint.index.problems:
        if problem.where not in checkpoint.index.tensors:  # such as that a step has no manifest
            draft.notes.append(f"{problem.where} {problem.message}")

    side, side_notes = folders.choose(allow_code=request.allow_code)
    config = _settle_packing(stack, draft, side)
    base_dtypes = _read_dtypes(draft)
    _convert_names(draft, config)
    side, modules = _settle_modules(draft, side, config)
    config, side = _settle_text_model(draft, config, side)

    checkpoint, entries = draft.checkpoint, draft.select()
    if job.from_masters:
        chosen = replace(draft.request, select=checkpoint.select)
        entries = take_masters(entries, checkpoint.index, chosen)
    if request.names != "live":
        refuse_packed(entries, location=checkpoint.path)
    refuse_problems(checkpoint.index, entries, checkpoint.path)
    models = {"--base": folders.base, "--like": request.like}
    draft.notes += check_reach(checkpoint, entries, models)
    # An origin of its own: what is compared is read, and verified, again when it is written.
    origin = Origin(SOURCE, checkpoint.source, checkpoint.index)
    if draft.request.layout in {"dcp", "torchtitan"}:
        # Training loads every name of a tied weight, so that a checkpoint for it drops none.
        ties = Ties({}, {})
        absent, note = find_absent_twins(config, {entry.name for entry in entries})
        entries = add_tied_names(entries, absent)
        draft.notes += filter(None, [note])
    else:
        ties = _find_ties(draft, config, entries, origin)

    names, policy = _name_and_cast(draft, entries, config, ties, base_dtypes)
    texts = folders.texts(side)
    products, trim = _apply_options(draft, names.products, config, texts.tokenizer, base_dtypes)
    if filling is not None:
        products = _fill(draft, filling, products, names, config, policy)
    config = _config_to_write(draft, config, products, ties, trim)
    comparison, is_complete, lacking = _compare_names(draft, config, side, products, names)
    products, config = _pack(draft, products, config, names)
    states, states_bytes, state_notes = _find_states(draft, config, entries, ties, origin)
    copies = _list_copies(draft, entries, config, ties)
    weights, names = _lay_out(draft, products, config, names, like, states, origin, copies)

    # What the base has besides was said already.
    said = [*(str(product.spec.name) for product in products), *lacking]
    keep = request.generation_config == "keep"
    truth = folders.tell_truth(texts, config, said, keep_generation=keep)
    module_files: dict[str, bytes] = {}
    if modules:  # in a form that goes behind safetensors
        module_files = _write_modules(draft, modules, origin, policy)
        old = {f"{posixpath.dirname(path)}/pytorch_model.bin" for path in module_files}
        side = [file for file in side if file.name not in old]
    changed = {**truth.changed, **module_files}
    files = folders.outputs(side, changed, allow_code=request.allow_code)
    draft.notes += (*(*side_notes, *names.notes, *draft.option_notes, *truth.notes, *state_notes),)
    sources, of_source = [checkpoint], job.origins[0]
    origins = {of_source: Origin(of_source, checkpoint.source, checkpoint.index)}
    bytes_read = states_bytes + sum(e.size_bytes for e in entries if e.name not in ties.dropped)
    facts: dict[str, Any] = {
        **({"complete": True} if is_complete else {}),
        **({"modules": list(modules)} if modules else {}),
        **({"base": folders.base} if request.dtype == "base" else {}),
    }
    if filling is not None:
        opened, taken = filling.opened, filling.taken
        sources.append(opened)
        bytes_read += sum(entry.size_bytes for entry in taken)
        if taken:
            origins[job.origins[1]] = Origin(job.origins[1], opened.source, opened.index)
            names_filled = [str(entry.name) for entry in taken]
            facts["filled"] = {"path": opened.path, "tensors": names_filled}
    aligned = align_headers(weights, origins)
    plan = Plan((*aligned, *files), names.dropped, tuple(draft.notes))
    resources = reserve_for_conversions(job.resources, names.conversion_bytes)
    settings = choose_settings(resources, plan, sources=sources, out=job.out)
    settings = replace(settings, check=request.check)
    return PlannedOutput(
        sources=tuple(sources),
        plan=plan,
        inputs=Inputs(origins, folders.sources),
        settings=settings,
        estimate=estimate_plan(
            *(plan, settings, job.out),
            bytes_read=bytes_read,
            besides_bytes=names.conversion_bytes,
        ),
        kind="model" if request.layout == "hf" else request.layout,
        options=changed_options(draft.request),
        facts=facts,
        versions=names.versions,
        comparison=comparison,
    )


def _open_filling(
    stack: ExitStack, request: ConsolidateRequest, base: str | None
) -> Filling | None:
    if request.fill_from is not None:
        return _open_unpacked(stack, request, request.fill_from, "--fill-from")
    if not (request.fill_from_base or request.into_base):
        return None
    option = "--into-base" if request.into_base else "--fill-from-base"
    if base is None:
        raise UsageError(
            "takes tensors from the --base, and none was named",
            where=option,
            hint="name the model that the run was started from with --base",
        )
    return _open_unpacked(stack, request, base, option)


def _open_unpacked(
    stack: ExitStack, request: ConsolidateRequest, path: PathLike, option: str
) -> Filling:
    """Opens a model that completes an output; its weights are unpacked as those of the source."""
    filling = open_filling(stack, path, option)
    entries = list(filling.opened.index.of_part("model"))
    names = {entry.name: entry.dtype for entry in entries}
    if any(e.dtype.itemsize == 1 or is_quantized(e.name, e.shape, names) for e in entries):
        config = read_config_in(path, option)
        filling.opened = unpack_checkpoint(filling.opened, config, request.element_type).checkpoint
    return filling


def _open_packed(stack: ExitStack, request: ConsolidateRequest, like: str) -> _PackedModel | None:
    """Opens the model of `--like` if its weights are packed."""
    where = f"--like {like}"
    if not _has_packed(like):
        return None
    with suppress(NotACheckpointError, MissingFileError):  # an index alone
        config = read_config_in(like, "--like")
        opened = open_filling(stack, like, "--like").opened
        unpacked = unpack_checkpoint(opened, config, UNPACKED)
        if not unpacked.stored:
            return None
        packed = _PackedModel(unpacked, config, where)
        kept = next((name for name in packed.stored if matches(name, request.keep_dtype)), None)
        problem = ""
        if kept is not None:
            problem = f"packs {kept!r}, which --keep-dtype keeps"
        elif request.optimizer or request.names == "live":
            option = "--optimizer" if request.optimizer else "--names live"
            problem = f"packs weights, and cannot be combined with {option}"
        elif unpacked.unused:
            problem = (
                f"has {unpacked.unused[0].name!r}, a scale of activations, which only data to"
                " calibrate with gives"
            )
        if problem:
            raise RefusedError(problem, where=where, hint=_WITHOUT_LIKE)
        return packed
    return None


def _has_packed(like: str) -> bool:
    names = read_file_map(like, option="--like").files
    return any(find_dense_name(name) != name for name in names)


def _refuse_unknown_packing(draft: _Draft, like: str) -> None:
    """Refuses a packed model that does not say how it is packed, for weights that are not."""
    own = {entry.name for entry in draft.select(everything=True)}
    for name in read_file_map(like, option="--like").files:
        weight = Fqn(find_dense_name(name))
        if name not in own and weight in own:
            raise RefusedError(
                f"has {name!r}, so {weight!r} is packed there; how, an index alone does not say",
                where=f"--like {like}",
                hint="pass the folder with all of its weights and its config.json; or"
                f" {_WITHOUT_LIKE}",
            )


_WITHOUT_LIKE = "leave --like out, and pass the form of packed weights with --dtype, or bfloat16"


def _read_dtypes(draft: _Draft) -> dict[Fqn, DType] | None:
    """Returns the element types that another model gives to the tensors; None without one."""
    if draft.packed is not None:
        return draft.packed.dtypes
    base = draft.folders.base
    if draft.request.dtype != "base" or base is None:
        return None
    return {entry.name: entry.dtype for entry in read_entries(base, option="--base")}


def _settle_packing(
    stack: ExitStack, draft: _Draft, side: Sequence[SideFile]
) -> Mapping[str, Any] | None:
    """Unpacks packed weights where another type is asked for; returns the configuration then."""
    stored, request = draft.folders.config(side), draft.request
    if request.like is not None and request.dtype == "keep":
        draft.packed = _open_packed(stack, request, request.like)
        if not _has_packed(request.like) and name_packing(
            draft.checkpoint, stored, draft.select(everything=True)
        ):
            raise RefusedError(
                f"is packed, and --like {request.like} is not",
                where=draft.checkpoint.path,
                hint="pass --dtype bfloat16, which unpacks it",
            )
        if draft.packed is None:
            _refuse_unknown_packing(draft, request.like)
    if draft.packed is not None:
        entries = draft.select(everything=True)
        if not name_packing(draft.checkpoint, stored, entries):
            return None if stored is None else drop_quantization(stored)
        own = {e.name: (e.dtype, e.shape) for e in entries}
        there = [e for one in draft.packed.stored.values() for e in one.group.entries]
        wrong = next((e for e in there if own.get(e.name) != (e.dtype, e.shape)), None)
        if wrong is not None:
            raise RefusedError(
                f"is packed, and not as {draft.packed.where}, which has {wrong.name!r} as"
                f" {wrong.dtype.name} {list(wrong.shape)}",
                where=draft.checkpoint.path,
                hint="unpack it first, with `ckptkit consolidate SRC OUT --dtype bfloat16`",
            )
        draft.packed = None  # it is copied as it is
    config = drop_stale_quantization(stored, draft.checkpoint.index.of_part("model"))
    if config != stored:
        draft.notes.append(
            "config.json has a quantization_config, which is left out: the weights of the"
            " source are not packed"
        )
    asked = draft.request.element_type
    # Scales without any packed weight are refused by what the configuration says.
    unpacked = unpack_checkpoint(draft.checkpoint, stored, asked)
    draft.checkpoint = unpacked.checkpoint
    draft.notes += unpacked.notes
    return unpacked.config if unpacked.stored else config


def _convert_names(draft: _Draft, config: Mapping[str, Any] | None) -> None:
    """Converts the names if they are those of another framework, or if a map is named.

    All options see the names that are written.
    """
    request, before = draft.request, draft.checkpoint
    if request.layout in FRAMEWORKS_BY_LAYOUT:
        request = replace(request, map="auto")  # the option names the map of the output
    if request.names == "live" or request.map == "none":
        return
    names = (entry.name for entry in before.index.of_part("model"))
    if request.map == "auto" and not recognise_by_tensors(names):
        return
    from ckptkit.conversion.mapped_names import convert_checkpoint  # few models need it

    draft.checkpoint = convert_checkpoint(before, request, config)
    if draft.checkpoint.maps:
        draft.notes += draft.checkpoint.notes[len(before.notes) :]
        draft.request = replace(draft.request, strip_prefix=())


def _settle_modules(
    draft: _Draft, side: list[SideFile], config: Mapping[str, Any] | None
) -> tuple[list[SideFile], Mapping[str, Sequence[TensorEntry]]]:
    """Takes the tensors of modules beside the model out of it, by their folders.

    Leaves out the files of modules where what is written is not their model.
    """
    folders, checkpoint, request = draft.folders, draft.checkpoint, draft.request
    consumer, base = folders.consumer, folders.base or ""
    listed = folders.read_json(side, MODULES)
    is_one_encoder = bool(request.strip_prefix) and has_router(listed)
    if is_one_encoder:
        draft.notes.append(f"the output is one encoder, without the router of {MODULES}")
    if is_one_encoder or (config is None and has_config(listed) and not has_router(listed)):
        return [file for file in side if not consumer.has_companion(file.name)], {}
    draft.needs_config = listed is None or has_config(listed)
    if listed is None or consumer.leading != MODULES:
        return side, {}
    split, taken, prefix = split_modules(
        listed,
        [e for e in checkpoint.index.of_part("model") if request.select in {None, e.tree}],
        where=checkpoint.path,
        base=base,
        router=folders.read_json(side, ROUTER_CONFIG),
        stripped=request.strip_prefix,
        exclude=request.exclude,
    )
    if split:
        tensors = {**checkpoint.index.tensors, **split}
        draft.checkpoint = replace(checkpoint, index=replace(checkpoint.index, tensors=tensors))
        draft.request = replace(request, strip_prefix=())
        note = f"names are written without {prefix!r}, as sentence-transformers has them"
        draft.notes.append(Aside(note))
    files = [file.name for file in side if base and file.origin.startswith(str(base))]
    lacking = find_lacking_modules(listed, taken, files)
    if lacking:
        of = ", ".join(map(repr, lacking))
        text = f"the tensors of {of} are those of {base}: none is taken from the source"
        draft.notes.append(text)
    return side, taken


def _settle_text_model(
    draft: _Draft, config: Mapping[str, Any] | None, side: list[SideFile]
) -> tuple[Mapping[str, Any] | None, list[SideFile]]:
    """Makes a text model of what fits the text part of a configuration, or puts it into it."""
    into_base = draft.request.into_base
    refusal = RefusedError(
        "the source is no text model of the configuration of the base",
        where=draft.checkpoint.path,
        hint="leave --into-base out, or pass the multimodal model with --base",
    )
    if config is None or draft.request.names == "live":
        if into_base:
            raise refusal
        return config, side
    names = [str(entry.name) for entry in draft.select()]
    base: list[str] | None = None
    if draft.filling is not None and into_base:
        base = [str(entry.name) for entry in draft.filling.opened.index.of_part("model")]

    def is_text_model(prefix: str) -> bool:
        inner = [name.removeprefix(prefix) for name in names]
        is_placed = base is None or place_in_whole(inner, base) is not None
        return is_placed and find_text_config(config, inner) is not None

    draft.unwrap(names, is_text_model)
    text = find_text_config(config, names)
    if base is not None:
        placed = place_in_whole(names, base)
        if text is None or placed is None:
            raise refusal
        draft.placed = placed
        draft.rename(placed)
        draft.text = {**text, **({_TIE: config[_TIE]} if _TIE in config else {})}
    elif text is not None:
        draft.is_text = True
        draft.notes.append(
            "the tensors are those of the text model: it is written as"
            f" {text['architectures'][0]}; --into-base puts it into the multimodal model of --base"
        )
        return text, [file for file in side if not is_of_processor(file.name)]
    else:
        taken = take_from_whole(config, names)
        if taken is not None:
            left = [name for name in names if name not in taken]
            draft.rename(taken, leave=left)
            rest = f", and not {counted(len(left), 'other')}, such as {left[0]!r}" if left else ""
            draft.notes.append(
                "the tensors are those of a multimodal model, and the configuration is that of its"
                f" text model: {counted(len(taken), 'tensor')} of it are written{rest}"
            )
    return config, side


def _find_ties(
    draft: _Draft,
    config: Mapping[str, Any] | None,
    entries: Sequence[TensorEntry],
    origin: Origin,
) -> Ties:
    """Finds tied weights; those of a text model in a whole one by the names that it has alone."""
    if draft.text is None:
        return find_ties(config, entries, origin)
    alone = {whole: name for name, whole in draft.placed.items()}
    own = [replace(e, name=Fqn(alone.get(e.name, e.name))) for e in entries]
    ties = find_ties(draft.text, own, origin)
    called = {Fqn(name): Fqn(whole) for name, whole in draft.placed.items()}
    return Ties(
        {called.get(t, t): called.get(s, s) for t, s in ties.dropped.items()},
        {called.get(t, t): called.get(s, s) for t, s in ties.broken.items()},
    )


def _name_and_cast(
    draft: _Draft,
    entries: Sequence[TensorEntry],
    config: Mapping[str, Any] | None,
    ties: Ties,
    base_dtypes: Mapping[Fqn, DType] | None,
) -> tuple[NamedProducts, DTypePolicy]:
    """Gives tensors their element types and names; what stays in float32 follows from both.

    The shipped lists of a class are replaced by those of the installed library where that is asked
    for names anyway.
    """
    request, folders, checkpoint = draft.request, draft.folders, draft.checkpoint
    known: KeptDtypes | None = None  # what stays in float32; None where all is cast
    if not request.cast_all and request.element_type in {"float16", "bfloat16"}:
        known = KeptDtypes()
        if config is not None:
            known = folders.consumer.find_kept(config)
            if determine_need(config, has_base=False).kind == "unknown":
                known = ask_kept(config, draft.program) or known
        with suppress(InputError):  # weights of the base may be damaged or missing
            if folders.base is not None:
                names_kept = find_float32_among_halves(read_entries_if_any(folders.base))
                known = replace(known, names=names_kept)
    # What is not written is named too: it may be needed to load the output.
    held = {e.name: (e.dtype, e.shape) for e in draft.select(everything=True)}
    # `--dtype base` applies to the names that are written.
    choice = "keep" if request.dtype == "base" else request.element_type
    while True:
        policy = DTypePolicy(choice, request.keep_dtype, kept=known or KeptDtypes())
        live = make_products(entries, policy, ties.dropped, origin=draft.job.origins[0])
        tensors = held | {p.spec.name: (p.spec.dtype, p.spec.shape) for p in live}
        # Training loads the names that it holds; a map has given those on disk.
        is_on_disk = checkpoint.maps or not folders.consumer.is_renamed
        if request.layout in _TORCH_LAYOUTS or is_on_disk:
            rest = find_left_out(live, ties.dropped, tensors)
            names = NamedProducts(live, ties.dropped, versions=checkpoint.maps, left_out=rest)
        else:
            names = name_on_disk(
                *(live, ties.dropped, tensors, config),
                choice=request.names,
                base=folders.base,
                program=draft.program,
            )
        if known is None or names.hub is None or known == adapt_kept(known, names.hub):
            break
        known = adapt_kept(known, names.hub)
    asked = policy
    if request.dtype == "base" or base_dtypes is not None:
        asked = DTypePolicy("base", request.keep_dtype, base_dtypes)
    refuse_casting_quantized(entries, config, asked, location=checkpoint.path)
    draft.notes += filter(None, [describe_masters(entries, live)])
    draft.option_notes += describe_kept(policy, entries)
    return names, policy


def _list_copies(
    draft: _Draft, entries: Sequence[TensorEntry], config: Mapping[str, Any] | None, ties: Ties
) -> Sequence[Product]:
    """Returns the weights in float32 where the optimizer of an output has them, too."""
    if draft.request.layout != "megatron" or not draft.request.optimizer:
        return ()
    exact = replace(draft.request, dtype="float32", keep_dtype=())
    own = replace(draft, request=exact, notes=[], option_notes=[])
    return _name_and_cast(own, entries, config, ties, None)[0].products


def _apply_options(
    draft: _Draft,
    products: Sequence[Product],
    config: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
    base_dtypes: Mapping[Fqn, DType] | None,
) -> tuple[Sequence[Product], Trim | None]:
    """Returns the tensors with the rows and the element types that were asked for."""
    request, base = draft.request, draft.folders.base
    specs, where = [product.spec for product in products], draft.checkpoint.path
    trim, notes = choose_trim(specs, request.vocab_size, config, tokenizer, location=where)
    draft.option_notes += notes
    if trim is not None:
        products = [first_rows(product, trim.shape(product.spec)) for product in products]
    if request.dtype != "base" and base_dtypes is None:
        return products, trim
    model = f"--base {base}" if draft.packed is None else draft.packed.where
    policy = DTypePolicy("base", request.keep_dtype, base_dtypes)
    cast = [recast(product, policy.target(product.spec)) for product in products]
    lacking = [
        product.spec.name
        for product in products
        if product.spec.dtype.kind == "float"
        and product.spec.name not in (base_dtypes or {})
        and not matches(product.spec.name, request.keep_dtype)
    ]
    if lacking and len(lacking) == len(products):
        raise RefusedError(
            f"has none of the {len(products):,} tensors that are to be written, such as"
            f" {lacking[0]!r}",
            where=model,
            hint="name the folder of the model that the run was started from",
        )
    if lacking:
        listed = list_first(lacking, _LISTED)
        draft.option_notes.append(
            f"{model.partition(' ')[2]} has no tensor {listed}: written in the element type that"
            " the source has"
        )
    return cast, trim


def _fill(
    draft: _Draft,
    filling: Filling,
    products: Sequence[Product],
    names: NamedProducts,
    config: Mapping[str, Any] | None,
    policy: DTypePolicy,
) -> Sequence[Product]:
    """Adds the tensors that another model has and the output lacks, if that was asked for."""
    written = {product.spec.name for product in products}
    written |= {*names.dropped, *names.left_out, *find_absent_tied_names(config, written)}
    known = {entry.name for entry in filling.opened.index.of_part("model")}
    if known.isdisjoint(written):
        draft.unwrap(sorted(written), lambda p: any(n.removeprefix(p) in known for n in written))
    # What fills the source is included as if it was in it.
    prefixes = draft.job.request.strip_prefix or ("",)
    entries = [
        entry
        for entry in filling.lacking(written)
        if any(draft.request.wants(entry.name, before=f"{p}{entry.name}") for p in prefixes)
    ]
    refuse_packed(entries, location=filling.opened.path)
    refuse_casting_quantized(entries, None, policy, location=filling.opened.path)
    refuse_problems(filling.opened.index, entries, filling.opened.path)
    filling.taken = entries
    if not entries:
        return products
    draft.option_notes += [Aside(filling.describe()), *describe_kept(policy, entries)]
    return [*products, *make_products(entries, policy, {}, origin=draft.job.origins[1])]


def _config_to_write(
    draft: _Draft,
    config: Mapping[str, Any] | None,
    products: Sequence[Product],
    ties: Ties,
    trim: Trim | None,
) -> dict[str, Any] | None:
    folders = draft.folders
    if config is None:
        if draft.needs_config:
            unusable = folders.describe_unusable_config()
            draft.notes.append(draft.job.advise_on_config(folders.consumer, unusable))
        return None
    if not folders.consumer.owns_config:
        return dict(config)
    sizes = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
    config = update_config(config, sizes, allow_code=draft.request.allow_code)
    untied = dict(untie_config(config)) if ties.broken else config
    consequence = ", and tie_word_embeddings is set to false" if untied != config else ""
    for target, source in ties.broken.items():
        draft.notes.append(
            f"the configuration ties {target!r} to {source!r}, but they differ: both are"
            f" written{consequence}"
        )
    return untied if trim is None else trim_config(untied, trim)


def _compare_names(
    draft: _Draft,
    config: Mapping[str, Any] | None,
    side: Sequence[SideFile],
    products: Sequence[Product],
    names: NamedProducts,
) -> tuple[Comparison | None, bool, tuple[str, ...]]:
    """Compares names and shapes with the model that the configuration describes.

    Returns the rest of the comparison, whether a part that was chosen is a whole model, and the
    tensors that the base has and the output lacks.
    """
    job, request, folders, program = draft.job, draft.request, draft.folders, draft.program
    if config is None and draft.needs_config:
        return None, False, ()
    if request.names == "live":
        draft.notes.append(LIVE_NAMES)
        return None, False, ()
    advice, mapped = job.advice, draft.checkpoint.mapped
    rules = {} if mapped is None else mapped.rules
    if request.layout in FRAMEWORKS_BY_LAYOUT:  # whose names cannot stay
        advice = replace(advice, anyway="")
    if request.optimizer:  # whose states keep their names
        advice = replace(advice, strip="leave out --optimizer to have the weights alone")
    specs = {str(p.spec.name): (p.spec.dtype, p.spec.shape) for p in products}
    left_out = {str(name): spec for name, spec in names.left_out.items()}
    base = None if draft.is_text else folders.base_of_config(side)
    subject = Subject(
        config=None if config is None else {**config, **folders.code_of(side)},
        tensors={**left_out, **specs},
        left_out=frozenset(left_out),
        where=draft.checkpoint.path,
        base=folders.base if config is None else base,
        filling=None if draft.filling is not None else folders.base,
        is_live=request.layout in _TORCH_LAYOUTS,
        consumer=folders.consumer,
        advice=replace(advice, rules=rules) if rules else advice,
    )
    is_chosen = bool(request.include or request.exclude)
    written = replace(subject, tensors=specs, left_out=frozenset())
    is_complete = is_chosen and is_whole_model(written, program)
    if left_out:
        count = f"{len(left_out):,} of {len(subject.tensors):,} tensors"
        text = f"left out by --include or --exclude: {count}; the model of config.json"
        draft.notes.append(
            Aside(f"{text} needs none of them") if is_complete else f"{text} may need them"
        )
    try:
        comparison, notes = plan_comparison(subject, program)
    except MisfitError as error:
        if not draft.may_be_wrapped:
            raise
        draft.unwrap(
            subject.written, lambda prefix: is_whole_model(subject.within(prefix), program)
        )
        if job.advice is not CONSOLIDATE:
            raise
        kept = {"base": job.base, "config": job.side.config, "tokenizer": job.side.tokenizer}
        kept["dtype"] = None if request.dtype == "keep" else request.dtype
        given = [w for n, v in kept.items() if v is not None for w in (f"--{n}", os.fspath(v))]
        raise propose_parts(subject, error, program, job.command(*given)) from None
    draft.notes += notes
    lacking: tuple[str, ...] = ()
    if draft.filling is None and subject.base is not None and config is not None:
        lacking, made = find_lacking(subject)
        shown = str(folders.base)
        if lacking:
            option = "--fill-from-base"
            draft.notes.append(describe_lacking(shown, lacking, config, option=option))
        if made:
            text = f"{counted(len(made), 'buffer')} that models make themselves"
            draft.notes.append(Aside(f"{shown} has {text}, such as {made[0]!r}: not written"))
    return comparison, is_complete, lacking


def _pack(
    draft: _Draft,
    products: Sequence[Product],
    config: dict[str, Any] | None,
    names: NamedProducts,
) -> tuple[Sequence[Product], dict[str, Any] | None]:
    """Packs weights where that was asked for, once they were compared with those of the model."""
    request = draft.request
    if not request.is_packed and draft.packed is None:
        return products, config
    # Few outputs are packed.
    from ckptkit.conversion.packing import describe_kept_types, pack_as, pack_products
    from ckptkit.plan.packed_forms import FORMS

    if draft.packed is not None:
        if config is None or not draft.folders.consumer.owns_config:
            raise RefusedError(
                f"no config.json says how weights are packed as {draft.packed.where}",
                where=draft.checkpoint.path,
                hint="pass the model that was trained with --base, or its configuration with"
                " --config",
            )
        made, stored = [], draft.packed.stored
        for product in products:
            one = stored.get(product.spec.name)
            where = draft.packed.where
            made += [product] if one is None else pack_as(one, product, where, _WITHOUT_LIKE)
        count = counted(len(stored), "weight")
        draft.option_notes.append(Aside(f"{count} packed as {draft.packed.where}"))
        scheme = next(iter(stored.values())).group.scheme
        specs = [product.spec for product in products]
        draft.option_notes += describe_kept_types(specs, request.keep_dtype, scheme)
        known = draft.packed.dtypes
        new = list_kept((p.spec for p in products if p.spec.name not in known), ())
        return made, restore_quantization(config, draft.packed.config, new)

    written = {product.spec.name for product in products}
    hub = None
    if FORMS[request.dtype].needs_live_names and draft.folders.consumer.is_renamed:
        hub = find_disk_names(config, None).names
    packed = pack_products(
        products,
        config if draft.folders.consumer.owns_config else None,
        request.dtype,
        keep=request.keep_dtype,
        tied={*names.dropped, *find_absent_tied_names(config, written)},
        where=draft.checkpoint.path,
        hub=hub,
    )
    draft.option_notes += packed.notes
    return packed.products, packed.config


def _find_states(
    draft: _Draft,
    config: Mapping[str, Any] | None,
    entries: Sequence[TensorEntry],
    ties: Ties,
    origin: Origin,
) -> tuple[OptimizerStates | None, int, list[str]]:
    """Returns the states of the optimizer, the bytes that they are made from, and notes."""
    if not draft.request.optimizer:
        return None, 0, []
    from ckptkit.conversion.optimizer_files import find_states  # few outputs have one

    # A tied weight has its state by one of its names, which options may leave out.
    written = {entry.name for entry in entries} - ties.dropped.keys()
    all_ties = ties.dropped
    if draft.request.include or draft.request.exclude:
        all_ties = _find_ties(draft, config, draft.select(everything=True), origin).dropped
    pairs = [pair for target, source in all_ties.items() for pair in permutations((target, source))]
    twins = {str(one): str(other) for one, other in pairs if {one, other} & written == {other}}
    try:
        return find_states(draft.checkpoint, draft.request, entries, config, twins)
    except RefusedError as error:
        if draft.request.layout == "universal":  # which has states without the option
            hint = "a universal checkpoint needs them; for the weights alone, use --to dcp"
            raise error.hinted(hint) from None
        raise


def _lay_out(
    draft: _Draft,
    products: Sequence[Product],
    config: Mapping[str, Any] | None,
    names: NamedProducts,
    like: FileMap | None,
    states: OptimizerStates | None,
    origin: Origin,
    copies: Sequence[Product],
) -> tuple[list[OutputFile], NamedProducts]:
    """Returns the files of weights and of the optimizer, and the names with what converted them.

    `copies`: the weights in float32, where the optimizer has them too.
    """
    request, consumer, limit = draft.request, draft.folders.consumer, draft.request.max_file_bytes
    framework = FRAMEWORKS_BY_LAYOUT.get(request.layout)
    if framework is not None:
        # Few outputs need these. A source with names of a framework was converted by its own map.
        from ckptkit.conversion.mapped_names import map_for_framework
        from ckptkit.plan.layouts.frameworks import MIN_LR, layout_megatron, layout_torchtitan

        where = draft.checkpoint.path
        mapped = map_for_framework(framework, request.map, config, products, where=where)
        named, parts = mapped.convert(products), mapped.names.parts
        if states is not None:
            from ckptkit.conversion.optimizer_files import fuse_qkv, map_states

            states = map_states(states, mapped, origin, where=where)
            if request.layout == "torchtitan":
                states = fuse_qkv(states, config, origin, where=where)
        if request.layout == "torchtitan":
            files = layout_torchtitan(named.products, parts, limit, states)
        elif states is None:
            files = layout_megatron(named.products, parts, limit, config)
        else:
            from ckptkit.conversion.optimizer_files import prepare_for_megatron

            exact = mapped.convert(copies).products
            ready = prepare_for_megatron(states, exact, parts, origin, where=where)
            step = draft.checkpoint.index.run.step
            files = layout_megatron(named.products, parts, limit, config, ready, step)
            draft.option_notes.append(
                "Megatron-Core's distributed optimizer loads the states, from version 0.17 on with"
                f" --lr {ready.lr:g} --min-lr {MIN_LR:g} alone; with models of experts at expert"
                " parallel size 1 alone"
            )
        notes, versions = (*names.notes, *named.notes), {**names.versions, **named.versions}
        return files, replace(names, notes=notes, versions=versions)
    if states is not None and request.layout == "universal":
        from ckptkit.conversion.optimizer_files import read_steps
        from ckptkit.plan.layouts.universal import layout_universal
        from ckptkit.plan.optimizer_states import STEP, list_groups

        if len(list_groups(states)) > 1:
            draft.option_notes.append(
                "ZeRO 3 of DeepSpeed gives all groups the settings of the first, and counts a step"
                " of torch's optimizers once for each group; stages 1 and 2 do not"
            )
        if not any(path[-1] == STEP for path, _ in states.tensors):
            draft.option_notes.append(
                "the optimizer counts no steps in tensors: ZeRO 3 of DeepSpeed does not load its"
                " states into an optimizer of torch; stages 1 and 2 do"
            )
        step, where = draft.checkpoint.index.run.step, draft.checkpoint.path
        taken = read_steps(states, origin)
        return layout_universal(products, states, step, taken, where=where), names
    of_optimizer: list[OutputFile] = []
    if states is not None:  # few outputs have one
        from ckptkit.plan.layouts.torch import layout_optimizer_file, layout_optimizer_folder

        is_dcp = request.layout == "dcp"
        of_optimizer = (
            layout_optimizer_folder(states, limit) if is_dcp else [layout_optimizer_file(states)]
        )
    if like is not None:
        written = {product.spec.name for product in products}
        tied = {*names.dropped, *find_absent_tied_names(config, written)}
        groups, notes_of_map = distribute(products, like, is_wanted=request.wants, tied=tied)
        draft.option_notes += notes_of_map
        return layout_hf_files(groups, consumer.stem) + of_optimizer, names
    if request.layout != "hf":
        from ckptkit.plan.layouts.torch import layout_dcp, layout_torch_full

        lay_out = layout_dcp if request.layout == "dcp" else layout_torch_full
        return lay_out(products, limit) + of_optimizer, names
    if not consumer.is_split:
        size = sum(product.spec.size_bytes for product in products)
        if size > limit:
            note = f"{consumer.name} reads one file: all tensors are written into it"
            draft.option_notes.append(note)
        limit = max(limit, size)
    return layout_hf_weights(products, limit, consumer.stem) + of_optimizer, names


def _write_modules(
    draft: _Draft,
    modules: Mapping[str, Sequence[TensorEntry]],
    origin: Origin,
    policy: DTypePolicy,
) -> dict[str, bytes]:
    """Returns the weight files of modules beside an encoder, by their paths."""
    written, where = {}, draft.checkpoint.path
    for folder, entries in modules.items():
        refuse_problems(origin.index, entries, where)
        products = make_products(entries, policy, {})
        (file,) = layout_hf_weights(products, _MOST_MODULE_BYTES)
        if file.size_bytes > _MOST_MODULE_BYTES:
            raise RefusedError(
                f"{folder!r} has {file.size_bytes:,} bytes of weights, more than the"
                f" {_MOST_MODULE_BYTES:,} that a module beside an encoder may have",
                where=where,
                hint="leave its tensors out with --exclude, and copy its folder yourself",
            )
        data = bytearray(file.size_bytes)
        with Preparations() as preparations:
            reader = SegmentReader(Inputs({SOURCE: origin}, {}), preparations)
            reader.fill_range(file, 0, file.size_bytes, memoryview(data))
        written[posixpath.join(folder, file.path)] = bytes(data)
    return written
