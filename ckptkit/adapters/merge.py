"""`ckptkit.merge_adapter`: adapters and a base become a model folder, tensor by tensor.

Base and adapters are opened, the changes of the adapters are planned by name, and each tensor of
the merged model becomes a product: a copy, or a kernel. Tied tensors are compared by their bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.base_identity import BaseChecks, refuse_rewritten_bases
from ckptkit.adapters.base_model import (
    Alignment,
    BaseSource,
    BaseTensor,
    NamesOfBase,
    align,
    find_folder,
    find_live_shapes,
    list_modules,
    make_base_tensors,
    open_base,
    take_plain_weights,
)
from ckptkit.adapters.merge_kernel import (
    BiasUpdate,
    Factor,
    LowRankUpdate,
    MergeKernel,
    Rounding,
    TokenRowsUpdate,
    Update,
    embedding_update,
    experts_update,
    linear_update,
    select_expert,
)
from ckptkit.adapters.packed_bases import (
    ModelWeights,
    QuantizedBase,
    measure_quantization,
    plan_quantized,
    requantize,
)
from ckptkit.adapters.sources import AdapterRequest, OpenedAdapter, SourceAdapter, open_adapter
from ckptkit.consumers.class_facts import find_left_out
from ckptkit.consumers.side_files import sum_bytes_by_dtype, update_config
from ckptkit.conversion.compare_names import LIVE_NAMES, Comparison, Subject, plan_comparison
from ckptkit.conversion.names_on_disk import join_sources
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.paths import find_model, is_folder, resolve_path
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders, find_component
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.checksums import digest_of, join_leaves, leaf_digest
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import AdapterError, AmbiguousSourceError, RefusedError, UsageError
from ckptkit.core.index import Fqn, Shape, Span
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME, Manifest
from ckptkit.core.text import counted
from ckptkit.engine.kernels import CastOperand, Operand, OperandKernel, StoredOperand, recast
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.hub_names.disk_tensors import Window, find_window
from ckptkit.hub_names.known_models import is_made_by_model
from ckptkit.lora.accounting import refuse_targets_without_tensors
from ckptkit.lora.changes import (
    AdapterSource,
    BiasChange,
    Change,
    Changes,
    LowRankChange,
    MergeRequest,
    NormOf,
    Replacement,
    TiedPair,
    TokenRowsChange,
    adapt_head,
    check_used_once,
    choose_norms,
    combine_changes,
    drop_quantization,
    find_equalities,
    find_model_types,
    find_tied_pairs,
    find_vocabulary_sizes,
    has_vocabulary,
    list_frozen,
    resize_vocabulary,
    share_changes,
)
from ckptkit.lora.dialects import build_table, find_linear_shapes
from ckptkit.lora.pairing import Renaming, find_changes
from ckptkit.lora.quantized import Packing, identify_base
from ckptkit.options import Resources
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.load_report import MERGE
from ckptkit.plan.plan import Copy, Plan, Product, TensorSpec
from ckptkit.plan.selection import (
    DTypePolicy,
    KeptDtypes,
    describe_kept,
    find_float32_among_halves,
)
from ckptkit.plan.ties import choose_ties_to_drop, untie_config
from ckptkit.plan.vocabulary import is_head
from ckptkit.plan.weight_kinds import ADAPTER_OF_TORCHTUNE
from ckptkit.storage.base import is_there
from ckptkit.storage.locations import Sources
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, open_source, open_target


class AdapterChoice(Struct, frozen=True, kw_only=True):
    path: PathLike  # any path in or above its checkpoint
    request: AdapterRequest = AdapterRequest()
    weight: float = 1.0  # the factor of its scaling


class MergedModel(Struct, frozen=True):
    manifest: Manifest
    layers: Sequence[MergedLayer]
    notes: tuple[str, ...]


class MergeJob(Struct, frozen=True, kw_only=True):
    """A merge as values, which is planned where a `ConversionJob` is."""

    adapters: Sequence[AdapterChoice]  # in the order of merging
    destination: PathLike  # empty where the output is only planned
    request: MergeRequest = MergeRequest()
    base: PathLike | None = None  # None where the first adapter's checkpoint holds it
    overwrite: bool = False
    resources: Resources = field(default_factory=Resources)

    @property
    def src(self) -> PathLike:
        return self.adapters[0].path

    def check_places(self) -> None:
        """Refuses an output that would overwrite a source of the merge, before any work is done."""
        also = self.adapters[0].request.also
        for adapter in self.adapters:
            check_destination(
                *(adapter.path, self.destination),
                overwrite=self.overwrite,
                also=also,
                base=self.base,
            )

    @contextmanager
    def plan_output(self) -> Iterator[PlannedOutput]:
        with self.plan() as (planned, _):
            yield planned

    @contextmanager
    def plan(self) -> Iterator[tuple[PlannedOutput, list[MergedLayer]]]:
        """Opens adapters and base, proves that they fit, and plans the output; writes nothing."""
        for choice in self.adapters:
            if not math.isfinite(choice.weight) or choice.weight == 0:
                raise UsageError(
                    f"{choice.weight} is no weight that changes anything",
                    where=f"adapter {choice.path}",
                    hint="leave the adapter out, or give it a weight such as 0.5",
                )
        request = self.request
        with ExitStack() as stack:
            opened: list[SourceAdapter] = []
            seen = set()
            for number, choice in enumerate(self.adapters):
                found = _open(stack, choice, self.adapters[0])
                path, origin = (
                    found.opened.path,
                    Origin(f"adapter{number}", found.opened.source, found.opened.index),
                )
                source = AdapterSource(number, origin.name, path)
                opened.append(SourceAdapter(found, source, origin, choice.weight))
                keys = frozenset(entry.key for entry in found.adapter.tensors.values())
                identity = resolve_path(path), keys
                if identity in seen:
                    raise UsageError(
                        "the same adapter is named twice",
                        where=f"adapter {path}",
                        hint="name it once; a weight of 2 doubles what it adds",
                    )
                seen.add(identity)
            given = None
            if self.base is not None:
                names = NamesOfBase(request.map, request.model_config)
                shapes = opened[0].found.adapter.shapes
                place = find_component(find_model(self.base, "--base")[0], shapes)
                given = open_base(stack, place, self.resources.memory_limit_bytes, names)
                _refuse_merged(given, opened)
            preparation = MergePreparation(stack, opened, given, request, self.resources)
            yield preparation.run(self.destination or None)


def run_merge(job: MergeJob, listener: Listener = ignore) -> MergedModel:
    """Writes a base with adapters merged into it, whole or not at all."""
    job.check_places()
    target = open_target(job.destination, overwrite=job.overwrite)
    with SingleProcess(target, listener) as strategy, job.plan() as (planned, layers):
        manifest = write_output(planned, strategy, listener)
        return MergedModel(manifest, layers, planned.plan.notes)


def list_adapters(options: Mapping[str, Any], resources: Resources) -> list[AdapterChoice]:
    """Returns the adapters that the options of a merge name, in the order of merging.

    `options` are those of `ckptkit.api.MergeOptions`; see `resolve_places`.
    """
    src, sources = options["src"], Sources(options["src"], options.get("src_options"))
    first = AdapterRequest.from_options(options, limit_bytes=resources.memory_limit_bytes)
    others = AdapterRequest(
        base=first.base, allow_untrained=first.allow_untrained, limit_bytes=first.limit_bytes
    )
    own = [
        AdapterChoice(path=src, request=replace(first, adapter=name), weight=weight)
        for name, weight in map(_split_weight, options.get("adapters", ()))
    ]
    further = [
        AdapterChoice(path=sources.place(path), request=others, weight=weight)
        for path, weight in map(_split_weight, options.get("further", ()))
    ]
    return [*(own or [AdapterChoice(path=src, request=first)]), *further]


def _split_weight(named: Any) -> tuple[Any, float]:
    return named if isinstance(named, tuple) else (named, 1.0)


def _refuse_merged(base: BaseSource, adapters: Sequence[SourceAdapter]) -> None:
    """Refuses the model that torchtune writes beside an adapter, which has it merged already."""
    folder = find_folder(base)
    own = (adapter.found.opened.path for adapter in adapters)
    if all(resolve_path(path) != resolve_path(folder) for path in own) or not is_folder(folder):
        return
    with open_source(folder) as source:
        if any(map(ADAPTER_OF_TORCHTUNE.fullmatch, source.walk(0))):
            raise RefusedError(
                "the model beside the adapter has it merged already: torchtune writes both",
                where=f"--base {folder}",
                hint="take that model as it is, or pass the one that training began from as --base",
            )


def _open(stack: ExitStack, choice: AdapterChoice, first: AdapterChoice) -> OpenedAdapter:
    """Opens an adapter; only in the first checkpoint do options choose among several."""
    try:
        return open_adapter(stack, choice.path, choice.request)
    except AmbiguousSourceError as error:
        if choice.path == first.path and choice is not first:
            hint = "name them with --adapter, each maybe with a weight, instead of --with"
        elif choice is not first:
            hint = (
                f"make a folder of one: `ckptkit adapter extract {choice.path} FOLDER`, with"
                " --adapter or --select, and pass that"
            )
        else:
            raise
        raise error.hinted(hint) from error


_MATRIX = 2


def resize_config(
    config: Mapping[str, Any],
    changes: Changes,
    shapes: Mapping[Fqn, Shape],
    products: Sequence[Product],
    *,
    is_live: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration with the written number of tokens, and notes on the change.

    `is_live` says that the weights are a run's own, whose configuration may be older than a resize
    of its vocabulary. Nothing is changed where the weights, or the configuration, have several such
    numbers.
    """
    specs = [product.spec for product in products if has_vocabulary(product.spec.name)]
    for name, own in changes.items():
        last = next((c for c in reversed(own) if isinstance(c, Replacement)), None)
        if name not in shapes or not has_vocabulary(name) or last is None:
            continue
        old, new = shapes[name][0], last.tensor.shape[0]
        if last.tensor.shape == shapes[name]:
            continue
        other = next((spec for spec in specs if spec.shape[:1] == (old,)), None)
        if other is not None:
            raise RefusedError(
                f"{last.weight!r} has {new:,} rows in the adapter, and {other.name!r}, which the"
                f" adapter does not replace, has {old:,}",
                where=last.source.where,
                hint="pass the model with the larger vocabulary, as it was before training, as"
                " --base",
            )
        resized = resize_vocabulary(config, old, new)
        effect = ", and 'vocab_size' is set to it" if resized != config else ""
        return resized, [f"the vocabulary has {new:,} tokens against {old:,} in the base{effect}"]
    rows = {spec.shape[0] for spec in specs if len(spec.shape) == _MATRIX}
    sizes = find_vocabulary_sizes(config)
    if not is_live or len(rows) != 1 or len(sizes) != 1 or rows == sizes:
        return dict(config), []
    (new,), (old,) = rows, sizes
    note = (
        f"the vocabulary has {new:,} tokens against {old:,} in config.json, and 'vocab_size' is"
        " set to it"
    )
    return resize_vocabulary(config, old, new), [note]


_EXPERT = re.compile(r"\.experts\.\d+\.")  # disk names of experts that are fused in memory


class MergePreparation:
    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[SourceAdapter],
        given: BaseSource | None,
        request: MergeRequest,
        resources: Resources,
    ) -> None:
        """Takes adapters in the order of merging, and the base that was given, if any.

        `stack` closes the folders of side files, and of bases that are compared.
        """
        self._program = stack.enter_context(NamingProgram())
        self._adapters = adapters
        self._given = given
        self._request = request
        self._resources = resources
        self._checks = BaseChecks(stack, adapters, given, allowed=request.allow_other_base)
        refuse_rewritten_bases(adapters, given)
        first = adapters[0]
        # A base in the adapter's own checkpoint has the names of a framework, and no configuration.
        folder = request.model_config if given is None else find_folder(given)
        choice = SideChoice(tokenizer_from=request.tokenizer_from)
        self._folders = SideFolders(stack, first.found.opened, folder, choice)
        self._side, self._side_notes = self._folders.choose(allow_code=request.allow_code)
        self._config = self._folders.config(self._side)
        if given is None and not first.found.base:
            raise RefusedError(
                "the checkpoint holds the adapter alone, and no base to merge it into",
                where=first.found.opened.path,
                hint="pass the model that the adapter was trained on with --base",
            )
        self._base = given or BaseSource(
            first.found.opened, first.origin, first.found.base, self._config, is_live=True
        )
        self._origins = {adapter.origin.name: adapter.origin for adapter in adapters}
        self._origins[self._base.origin.name] = self._base.origin
        self._notes = [note for adapter in adapters for note in adapter.found.notes]

    def run(self, out: PathLike | None) -> tuple[PlannedOutput, list[MergedLayer]]:
        # The base is known: names are paired.
        self._checks.check_identity()
        listed = (list_modules(source.found.adapter) for source in self._adapters)
        modules = list(dict.fromkeys(module for modules in listed for module in modules))
        alignment = align(self._base, modules, self._config, folder=self._folders.base)
        quantized = self._plan_quantized(alignment)
        if self._given is not None:
            given = take_plain_weights(self._given, alignment)
            self._checks.compare(given, self._take_trained(), quantized, self._request.qlora_base)
        tensors = make_base_tensors(self._base, alignment, quantized)
        shapes = find_live_shapes(self._base, alignment, quantized)
        pairs = _find_pairs(self._config, tensors)
        shapes |= {tie.target: shapes[tie.source] for tie in pairs if not tie.is_present}
        self._notes += self._describe_outside(alignment.renaming, shapes)
        # Names are paired: changes are planned, and which ties they leave.
        changes = self._find_changes(alignment, shapes, pairs)
        config = self._adapt_head(changes)
        by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
        judge = TieJudge(self._origins, by_live)
        judge.refuse_differing_bases(changes)
        ties = judge.judge(config, _find_pairs(config, tensors), changes)
        self._notes += describe_ties(config, ties)
        versions = [source.found.adapter.settings.peft_version for source in self._adapters]
        norm_of, note = choose_norms(versions, changes)
        self._notes += filter(None, [note])
        # Changes are planned: each tensor becomes a product, a copy or a kernel.
        rounding: Rounding = "peft" if self._request.match_peft else "once"
        dtypes = DTypePolicy(self._request.dtype, kept=self._find_kept(tensors))
        rules = MergeRules(dtypes, rounding, norm_of)
        specs = [TensorSpec(t.live[0], t.dtype, t.shape) for t in tensors]
        self._notes += describe_kept(dtypes, specs)
        products = list(plan_products(tensors, changes, ties, shapes, rules, alignment.called))
        layers = report_layers(
            self._adapters, tensors, changes, quantized, self._request, self._origins
        )
        # Products are planned: the files around them.
        config = self._write_config(config, products, changes, shapes, ties)
        self._notes += [*alignment.notes, *self._checks.notes(quantized)]
        if self._base.opened.maps:
            self._notes += self._base.opened.notes
        comparison = self._compare_names(products, config)
        names = {live: tensor.name for live, tensor in by_live.items()}
        dropped = {names.get(t, t): names.get(s, s) for t, s in ties.dropped.items()}
        prepared = self._prepare(out, products, config, dropped, alignment, quantized)
        return replace(prepared, comparison=comparison), layers

    def _describe_outside(self, renaming: Renaming, shapes: Mapping[Fqn, Shape]) -> list[str]:
        """Returns a note on tensors of the checkpoint that the model of `--base` does not have."""
        if self._given is None:
            return []
        held = [name for source in self._adapters for name in source.found.base]
        absent = (n for n in held if not is_made_by_model(n) and renaming.to_base(n) not in shapes)
        outside = sorted(dict.fromkeys(absent))
        if not outside:
            return []
        count, verb = counted(len(outside), "tensor"), "is" if len(outside) == 1 else "are"
        said = f"{count} of the checkpoint, such as {outside[0]!r}, {verb} not written"
        return [f"{said}: the model of --base has none of that name"]

    def _find_kept(self, tensors: Sequence[BaseTensor]) -> KeptDtypes:
        """Returns what stays in float32: what the class keeps, and what the base has so."""
        if self._request.cast_all or self._config is None:
            return KeptDtypes()
        kept = self._folders.consumer.find_kept(self._config)
        halves = find_float32_among_halves(self._base.entries.values())
        names = frozenset(str(t.live[0]) for t in tensors if t.name in halves)
        return replace(kept, names=names)

    # --- the base ---

    def _plan_quantized(self, alignment: Alignment) -> QuantizedBase:
        shapes: dict[str, Shape] = {}
        for source in self._adapters:
            for name, shape in find_linear_shapes(source.found.adapter).items():
                shapes[alignment.renaming.to_base(name)] = shape
        given = None if self._given is None else take_plain_weights(self._given, alignment)
        record = None if given is None else self._find_packings()
        choice = self._request.qlora_base
        is_default = record is not None and choice != "original"
        nested, workers = self._request.double_quant, choose_settings(self._resources).workers
        quantized = plan_quantized(
            *(self._take_trained(), given),
            shapes=shapes,
            choice=None if is_default else choice,
            nested=nested,
            workers=workers,
        )
        if record is None or given is None or not is_default or quantized.operands:
            return quantized
        where = self._adapters[0].source.where
        return requantize(record, given, nested=nested, where=where, workers=workers)

    def _find_packings(self) -> Sequence[Packing] | None:
        """Returns how the base of extracted adapters was packed, if all of them agree."""
        if any(source.found.base for source in self._adapters):
            return None
        records = [read_record_of_base(s.found.opened).quantization for s in self._adapters]
        packings = [record.packings for record in records if record is not None]
        is_same = bool(packings) and all(other == packings[0] for other in packings)
        return (packings[0] or None) if is_same else None

    def _take_trained(self) -> ModelWeights | None:
        """Returns the base in the first adapter's checkpoint, if it has one."""
        first = self._adapters[0]
        if not first.found.base:
            return None
        folders = first.found.folders
        config = folders.config(folders.choose(allow_code=False)[0])
        entries = {str(name): entry for name, entry in first.found.base.items()}
        return ModelWeights(first.origin, entries, config, first.found.opened.path)

    # --- what changes ---

    def _find_changes(
        self, alignment: Alignment, shapes: Mapping[Fqn, Shape], pairs: Sequence[TiedPair]
    ) -> dict[Fqn, list[Change]]:
        renaming = alignment.renaming
        own, types = renaming.to_adapter(shapes), find_model_types(self._config)
        entries = {
            placed.live[0]: self._base.entries[placed.stored[0]]
            for placed in alignment.placed
            if placed.part is None and not _EXPERT.search(placed.live[0])
        }
        left_out = find_left_out(entries, self._config or {})
        entries = renaming.to_adapter(
            {  # which the model that was trained has
                name: entry
                for name, entry in entries.items()
                if name not in left_out and renaming.is_of_adapted(name)
            }
        )
        all_changes = []
        for source in self._adapters:
            adapter, where = source.found.adapter, source.source.where
            try:
                changes = find_changes(
                    *(adapter, own, source.source), model_types=types, weight=source.weight
                )
            except RefusedError as error:
                if source.found.converted is None:
                    raise
                raise error.hinted(
                    f"{error.hint}; {source.found.converted.foreign.own_tool}"
                ) from None
            check_used_once(adapter.tensors, changes, where=where)
            if self._given is not None and adapter.tensors:  # without tensors it changes nothing
                try:
                    refuse_targets_without_tensors(
                        build_table(adapter.tensors), adapter.settings, entries, is_own_record=True
                    )
                except AdapterError as error:
                    raise error.located(where) from error
            changes = [replace(c, weight=renaming.to_base(c.weight)) for c in changes]
            all_changes.append(changes)
        combined = combine_changes(all_changes, [source.weight for source in self._adapters])
        tying = {
            source.source.position
            for source in self._adapters
            if source.found.adapter.settings.shares_with_tied
        }
        shared = share_changes(combined, pairs, tying)
        if self._request.match_peft:
            _refuse_lost_in_peft(shared)
            _refuse_tied_in_peft(combined, shared, pairs)
        return shared

    # --- what is written ---

    def _adapt_head(self, changes: Changes) -> dict[str, Any] | None:
        if self._config is None:
            return None
        config = self._config
        for source in self._adapters:
            brought = {
                change.weight: change.tensor.shape
                for own in changes.values()
                for change in own
                if isinstance(change, Replacement) and change.source == source.source
            }
            config, notes = adapt_head(config, source.found.adapter.settings.task_type, brought)
            self._notes += notes
        return config

    def _write_config(
        self,
        config: dict[str, Any] | None,
        products: Sequence[Product],
        changes: Changes,
        shapes: Mapping[Fqn, Shape],
        ties: MergedTies,
    ) -> dict[str, Any] | None:
        if config is None:
            self._notes.append(
                "neither the adapter nor its base has a config.json, which Transformers needs to"
                " load the output"
            )
            return None
        if not self._folders.consumer.owns_config:
            return config
        resized, notes = resize_config(
            config, changes, shapes, products, is_live=self._base.is_live
        )
        self._notes += notes
        written = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        allow_code = self._request.allow_code
        updated = update_config(resized, written, allow_code=allow_code)
        if ties.untied or ties.broken:
            updated = untie_config(updated)
        return drop_quantization(updated)

    def _compare_names(
        self, products: Sequence[Product], config: Mapping[str, Any] | None
    ) -> Comparison | None:
        """Compares names and shapes with the model that the configuration describes."""
        if config is None:
            return None
        if self._request.names == "live":
            self._notes.append(LIVE_NAMES)
            return None
        # If an adapter has another head, that of the base is in the output too, and is not used.
        is_headed = config.get("architectures") != (self._config or {}).get("architectures")
        heads = {str(p.spec.name) for p in products if is_headed and is_head(p.spec.name)}
        subject = Subject(
            config={**config, **self._folders.code_of(self._side)},
            tensors={str(p.spec.name): (p.spec.dtype, p.spec.shape) for p in products},
            left_out=frozenset(heads),
            where=self._base.opened.path,
            is_live=self._base.is_live,
            consumer=self._folders.consumer,
            advice=MERGE,
        )
        comparison, notes = plan_comparison(subject, self._program)
        self._notes += notes
        return comparison

    def _prepare(
        self,
        out: PathLike | None,
        products: Sequence[Product],
        config: dict[str, Any] | None,
        dropped: Mapping[Fqn, Fqn],
        alignment: Alignment,
        quantized: QuantizedBase,
    ) -> PlannedOutput:
        request, folders = self._request, self._folders
        weights = layout_hf_weights(products, request.max_file_bytes, folders.consumer.stem)
        truth = folders.tell_truth(
            *(folders.texts(self._side), config, [str(p.spec.name) for p in products]),
            keep_generation=request.generation_config == "keep",
        )
        self._notes += (*self._side_notes, *truth.notes)
        files = folders.outputs(self._side, truth.changed, allow_code=request.allow_code)
        plan = Plan((*weights, *files), dropped, tuple(dict.fromkeys(self._notes)))
        opened = [source.found.opened for source in self._adapters]
        opened += [] if self._given is None else [self._given.opened]
        settings = choose_settings(self._resources, plan, sources=opened, out=out)
        settings = replace(settings, check=self._request.check)
        read = sum(spec.size_bytes for _, _, spec in plan.specs())
        return PlannedOutput(
            sources=tuple(opened),
            plan=plan,
            inputs=Inputs(self._origins, self._folders.sources),
            settings=settings,
            estimate=estimate_plan(plan, settings, out, bytes_read=read),
            kind="model",
            options=self._request.changed(),
            facts=collect_source_facts(self._adapters, self._base, quantized.facts),
            versions={**self._base.opened.maps, **(alignment.versions or {})},
        )


def _find_pairs(config: Mapping[str, Any] | None, tensors: Sequence[BaseTensor]) -> list[TiedPair]:
    specs = {t.live[0]: (t.dtype, t.shape) for t in tensors if t.part is None}
    return find_tied_pairs(config, specs)


def _refuse_tied_in_peft(changes: Changes, shared: Changes, pairs: Sequence[TiedPair]) -> None:
    """Refuses a LoRA or tokens of one of two tied modules, whose tensor PEFT changes for both.

    Source: peft 0.21, tuners/lora/layer.py (`merge`, which changes the parameter in place) and
    tuners/tuners_utils.py: with `ensure_weight_tying` both layers have the update, and add it.
    """
    for pair in pairs:
        both = [shared.get(name, ()) for name in (pair.source, pair.target)]
        rows = [any(isinstance(c, TokenRowsChange) for c in own) for own in both]
        kinds = (LowRankChange,) if rows[0] == rows[1] else (LowRankChange, TokenRowsChange)
        for name in (pair.source, pair.target):
            found = next((c for c in changes.get(name, ()) if isinstance(c, kinds)), None)
            if found is not None:
                raise RefusedError(
                    f"{name!r} is tied, and PEFT's merge_and_unload changes the tensor of both"
                    " layers, or changes it twice",
                    where=found.source.where,
                    hint="merge without --match-peft, which writes what was trained",
                )


def _refuse_lost_in_peft(changes: Changes) -> None:
    """Refuses a LoRA that `merge_and_unload` of PEFT leaves out."""
    for weight, own in changes.items():
        low_rank = next((c for c in own if isinstance(c, LowRankChange)), None)
        if low_rank is not None and any(isinstance(c, TokenRowsChange) for c in own):
            raise RefusedError(
                f"the LoRA of {weight!r} is added to the trained tokens of a tied embedding, and"
                " PEFT's merge_and_unload leaves this LoRA out",
                where=low_rank.source.where,
                hint="merge without --match-peft, which writes what was trained",
            )


# PEFT casts adapters to this type when it loads them.
_HELD = dtype_named("float32")
_EXPERTS = 3


class MergeRules(Struct, frozen=True):
    dtypes: DTypePolicy
    rounding: Rounding
    norm_of: NormOf


def make_product(
    tensor: BaseTensor, changes: Sequence[Change], rules: MergeRules, live: Shape
) -> Product:
    """Returns how a tensor of the merged model is produced.

    `changes` and the shape `live` are those of the live tensor that it is, or is a part of.
    """
    updates = [change for change in changes if not isinstance(change, Replacement)]
    target = rules.dtypes.target(TensorSpec(tensor.live[0], tensor.dtype, tensor.shape))
    for change in changes:
        if isinstance(change, Replacement):
            tensor = _replace(tensor, change, rules)
            live = change.tensor.shape
    spec = TensorSpec(tensor.name, target, tensor.shape)
    if updates:
        dtype = tensor.operand.dtype
        if dtype.kind != "float" or dtype.itemsize == 1:
            raise RefusedError(
                f"tensor {tensor.name!r} of the base has element type {dtype.name}, to which"
                " nothing can be added",
                where=updates[0].source.where,
                hint="the base is quantized in a way that is not modelled; pass the original model"
                " with --base",
            )
        merged = tuple(_make_update(tensor, change, live) for change in updates)
        kernel = MergeKernel(tensor.operand, merged, rules.rounding, rules.norm_of)
        return Product(spec, kernel.compute())
    operand = tensor.operand
    if isinstance(operand, StoredOperand) and not operand.start:
        copy = Copy(operand.origin, operand.key)
        return recast(Product(TensorSpec(spec.name, operand.dtype, spec.shape), copy), target)
    return Product(spec, OperandKernel(operand).compute())


def _replace(tensor: BaseTensor, change: Replacement, rules: MergeRules) -> BaseTensor:
    """Replaces the base's tensor by the adapter's, in the base's element type as PEFT loads it."""
    entry = change.tensor
    if (entry.dtype.kind == "float") != (tensor.dtype.kind == "float"):
        raise RefusedError(
            f"the adapter replaces elements of {tensor.dtype.name} by elements of"
            f" {entry.dtype.name}",
            where=f"tensor {tensor.name!r}",
            hint="pass the base that was trained on with --base",
        )
    if len(tensor.live) > 1:
        raise make_part_error(tensor.name, change)
    shape = entry.shape
    operand: Operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
    if tensor.part is not None:
        shape, operand = tensor.shape, join_sources(tensor.part, [operand])
    is_held = rules.dtypes.choice == "keep" or rules.rounding == "peft"
    if is_held and entry.dtype != tensor.dtype and entry.dtype.kind == "float":
        operand = CastOperand(operand, tensor.dtype)
    return BaseTensor(tensor.name, tensor.live, shape, tensor.dtype, operand, tensor.part)


def _make_update(tensor: BaseTensor, change: Change, live: Shape) -> Update:
    origin = change.source.origin
    window = None
    if tensor.part is not None:
        window = find_window(tensor.part, dict.fromkeys(tensor.live, live))
        if window is None or len(tensor.live) > 1:
            raise make_part_error(tensor.name, change)
    if not isinstance(change, LowRankChange):
        if window is not None:
            raise make_part_error(tensor.name, change)
        if isinstance(change, BiasChange):
            return BiasUpdate(Factor.whole(origin, change.bias), change.scaling, _HELD)
        if isinstance(change, TokenRowsChange):
            return TokenRowsUpdate(Factor.whole(origin, change.rows), change.indices)
        raise AssertionError(f"{change.weight} is replaced after it was changed")
    down, up = Factor.whole(origin, change.down), Factor.whole(origin, change.up)
    magnitude = None if change.magnitude is None else Factor.whole(origin, change.magnitude)
    scaling, form = change.scaling, change.form
    if form == "embedding":
        update = embedding_update(down, up, scaling, _HELD, magnitude=magnitude)
    elif form in {"parameter", "experts", "experts_transposed"}:
        count = 1 if form == "parameter" else live[0]
        is_crossed = form == "experts_transposed"
        update = experts_update(down, up, scaling, _HELD, count=count, transposed=is_crossed)
    else:
        is_turned = form == "transposed"
        update = linear_update(
            down, up, scaling, _HELD, magnitude=magnitude, fan_in_fan_out=is_turned
        )
    return update if window is None else _cut_update(update, window, live, tensor, change)


def _cut_update(
    update: LowRankUpdate, window: Window, live: Shape, tensor: BaseTensor, change: Change
) -> LowRankUpdate:
    """Returns the update of a tensor that is a part of a live one."""
    box, axes = window.box, window.axes
    if box.sizes == live and axes == tuple(range(len(live))):
        return update
    if len(live) == _EXPERTS and box.sizes[0] == 1 and len(axes) == _MATRIX:
        if update.experts > 1:
            update = select_expert(update, box.offsets[0])
    elif len(live) != _MATRIX:
        raise make_part_error(tensor.name, change)
    rows, columns = (
        None if size == whole else (offset, offset + size)
        for offset, size, whole in zip(
            box.offsets[-_MATRIX:], box.sizes[-_MATRIX:], live[-_MATRIX:], strict=True
        )
    )
    try:
        update = update.window(rows, columns)
    except ValueError as error:
        raise make_part_error(tensor.name, change) from error
    return update.turned if axes[-_MATRIX] > axes[-1] else update


def make_part_error(name: str, change: Change) -> RefusedError:
    """Returns the error for a tensor on disk that cannot be merged without others."""
    return RefusedError(
        f"{change.weight!r} is changed, and {name!r} on disk cannot be merged with a part"
        " of it alone",
        where=change.source.where,
        hint="merge this adapter with PEFT, or into a base that is saved as training holds it",
    )


def plan_products(
    tensors: Sequence[BaseTensor],
    changes: Changes,
    ties: MergedTies,
    shapes: Mapping[Fqn, Shape],
    rules: MergeRules,
    called: Mapping[Fqn, Fqn],
) -> Iterator[Product]:
    """Yields every tensor of the base with the changes of the adapters, and those that it lacks.

    The base lacks new heads, and names that are no longer tied.
    """
    for tensor in tensors:
        first = tensor.live[0]
        if tensor.part is None and first in ties.dropped:
            continue
        touched = [live for live in tensor.live if live in changes]
        if touched and len(tensor.live) > 1:
            raise make_part_error(tensor.name, changes[touched[0]][0])
        own = [*_inherit(first, changes, ties, shapes), *changes.get(first, ())]
        yield make_product(tensor, own, rules, shapes[first])
    by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
    for target, source in ties.written.items():
        tensor = replace(by_live[source], name=called.get(target, target), live=(target,))
        updates = [*list_frozen(changes.get(source, ())), *changes.get(target, ())]
        yield make_product(tensor, updates, rules, shapes[source])
    present = {live for tensor in tensors for live in tensor.live}
    for name, brought in changes.items():
        change = brought[0]
        is_tied = name in ties.written or name in ties.dropped
        if name not in present and not is_tied and isinstance(change, Replacement):
            entry = change.tensor
            operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
            output = called.get(name, name)
            tensor = BaseTensor(output, (name,), entry.shape, entry.dtype, operand)
            yield make_product(tensor, (), rules, entry.shape)


def _inherit(
    name: Fqn, changes: Changes, ties: MergedTies, shapes: Mapping[Fqn, Shape]
) -> list[Change]:
    """Returns the frozen tensor of another size that a name takes from one it was tied to."""
    if any(isinstance(change, Replacement) for change in changes.get(name, ())):
        return []
    others = [
        other
        for tied in ties.untied.items()
        for other in (tied[0] if tied[1] == name else tied[1],)
        if name in tied
    ]
    frozen = [change for other in others for change in list_frozen(changes.get(other, ()))]
    return [change for change in frozen[:1] if change.tensor.shape != shapes[name]]


class MergedTies(Struct, frozen=True):
    """The names that the configuration ties, after a merge."""

    # Not written, with the name that replaces each.
    dropped: Mapping[Fqn, Fqn] = field(default_factory=dict)
    # Absent so far, with the one whose base they share.
    written: Mapping[Fqn, Fqn] = field(default_factory=dict)
    untied: Mapping[Fqn, Fqn] = field(default_factory=dict)  # differ after the merge
    broken: Mapping[Fqn, Fqn] = field(default_factory=dict)  # differ in the base already


class TieJudge:
    def __init__(self, origins: Mapping[str, Origin], base: Mapping[Fqn, BaseTensor]) -> None:
        self._base = base
        self._reader = ArrayReader(*origins.values())
        self._indexes = {name: origin.index for name, origin in origins.items()}

    def judge(
        self, config: Mapping[str, Any] | None, pairs: Sequence[TiedPair], changes: Changes
    ) -> MergedTies:
        """Decides which ties hold after the merge.

        `changes` include those that PEFT shares between tied modules.
        """
        same: dict[Fqn, Fqn] = {}
        untied: dict[Fqn, Fqn] = {}
        broken: dict[Fqn, Fqn] = {}
        for pair in pairs:
            ours, theirs = changes.get(pair.target, ()), changes.get(pair.source, ())
            if not (ours or theirs):
                (same if self._base_agrees(pair) else broken)[pair.target] = pair.source
            elif self._are_changed_alike(ours, theirs) and (
                (ours and isinstance(ours[0], Replacement)) or self._base_agrees(pair)
            ):
                same[pair.target] = pair.source
            else:
                untied[pair.target] = pair.source
        absent = {pair.target: pair.source for pair in pairs if not pair.is_present}
        dropped = choose_ties_to_drop(config, same, [*untied, *broken])
        written = {t: s for t, s in absent.items() if t in untied}
        if untie_config(config or {}) != config and (untied or broken):
            written = absent
        return MergedTies(
            {t: s for t, s in dropped.items() if t not in absent or t in changes},
            written,
            untied,
            broken,
        )

    def refuse_differing_bases(self, changes: Changes) -> None:
        """Refuses adapters whose updates of one tensor have different frozen bases."""
        for name, own in changes.items():
            frozen = [(change.source.origin, change.tensor) for change in list_frozen(own)]
            for other in frozen[1:]:
                if not self._reader.are_equal(frozen[0], other):
                    where = next(c.source.where for c in own if c.source.origin == other[0])
                    raise RefusedError(
                        f"two adapters have different frozen weights of {name!r}",
                        where=where,
                        hint="merge adapters that were trained on one base model",
                    )

    def _base_agrees(self, pair: TiedPair) -> bool:
        if not pair.is_present:
            return True
        if not pair.may_agree:
            return False
        stored = []
        for name in (pair.target, pair.source):
            operand = self._base[name].operand
            if not isinstance(operand, StoredOperand):
                return False
            entry = self._indexes[operand.origin].tensors[operand.key]
            stored.append((operand.origin, entry))
        return self._reader.are_equal(*stored)

    def _are_changed_alike(self, ours: Sequence[Change], theirs: Sequence[Change]) -> bool:
        needed = find_equalities(ours, theirs)
        for equality in needed or ():
            if not equality.is_transposed:
                if not self._reader.are_equal(equality.first, equality.second):
                    return False
                continue
            bits = f"u{equality.first[1].dtype.itemsize}"
            first, second = (
                self._reader.read_whole(*tensor).view(bits).reshape(tensor[1].shape)
                for tensor in (equality.first, equality.second)
            )
            if not np.array_equal(first, second.T):
                return False
        return needed is not None


def describe_ties(config: Mapping[str, Any] | None, ties: MergedTies) -> Iterator[str]:
    """Yields notes on names that are written although the configuration ties them."""
    changed = untie_config(config or {}) != config
    consequence = (
        "both are written, and tie_word_embeddings is set to false"
        if changed
        else "both are written; Transformers 5 keeps them apart, older versions tie this model type"
        " whatever its configuration says"
    )
    for target, source in ties.untied.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, and the adapter changes them"
            f" differently: {consequence}"
        )
    for target, source in ties.broken.items():
        yield (
            f"the configuration ties {target!r} to {source!r}, but they differ in the base:"
            f" {consequence}"
        )


def collect_source_facts(
    adapters: Sequence[SourceAdapter], base: BaseSource, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the facts on the adapters and the base for the manifest.

    `quantization` has those on packed weights.
    """
    facts = {
        "adapters": [
            {
                "path": adapter.found.opened.path,
                "name": adapter.found.adapter.name,
                "weight": adapter.weight,
                "config": adapter.found.config_path,
                "settings": digest_of(
                    memoryview(
                        json.dumps(adapter.found.adapter.settings.document, sort_keys=True).encode()
                    )
                ),  # which were read or inferred
                "digest": _digest_adapter(adapter),
            }
            for adapter in adapters
        ],
        "base": _collect_base_facts(base),
    }
    return facts | ({"quantization": dict(quantization)} if quantization else {})


def _digest_adapter(adapter: SourceAdapter) -> str:
    """Digests an adapter: names, element types, shapes and bytes of its tensors."""
    reader = ArrayReader(adapter.origin)
    lines = []
    for name, entry in sorted(adapter.found.adapter.tensors.items()):
        step = LEAF_BYTES // entry.dtype.itemsize
        blocks = enumerate(reader.read_blocks(adapter.origin.name, entry, step))
        digest = join_leaves(
            {leaf: leaf_digest(block.view(np.uint8).data) for leaf, block in blocks}
        )
        lines.append(f"{name} {entry.dtype.name} {list(entry.shape)} {digest}\n")
    return digest_of(memoryview("".join(lines).encode()))


def _collect_base_facts(base: BaseSource) -> dict[str, Any]:
    identity = identify_base(resolve_path(base.opened.path), base.config)
    manifest, source = base.opened.manifest, base.opened.source
    if manifest is None and is_there(source, MANIFEST_NAME):
        manifest = read_manifest(source)
    facts = {
        "path": base.opened.path,
        "format": base.opened.index.format,
        "repository": identity.repository,
        "commit": identity.commit,
        "files": {
            file.path: file.size_bytes for file in base.opened.index.files if file.size_bytes >= 0
        },
    }
    if manifest is not None:
        lines = sorted(f"{name} {t.digest}\n" for name, t in manifest.tensors.items())
        facts["digest"] = digest_of(memoryview("".join(lines).encode()))
    return {key: value for key, value in facts.items() if value}


_STEP = 1 << 20


class MergedLayer(Struct, frozen=True):
    """The change of one adapter to one tensor."""

    tensor: str  # of the live model
    adapter: str  # its checkpoint, with its name where several of one are merged
    kind: str  # linear, embedding, ... for low-rank updates; bias, tokens, whole, frozen
    rank: int | None
    scaling: float | None
    is_dora: bool
    base: str  # kept, dequantized, original; replaced by a tensor of the adapter; none
    change: float | None = None  # norm of the scaled product over that of the base's weight
    # Norm of the error of quantization over that of the scaled product.
    quantization: float | None = None


def describe_change(change: Change, adapter: str, base: str) -> MergedLayer:
    rank = scaling = None
    is_dora = False
    if isinstance(change, LowRankChange):
        kind, rank, scaling = change.form.partition("_")[0], change.rank, change.scaling
        kind = "linear" if kind == "transposed" else kind
        is_dora = change.magnitude is not None
    elif isinstance(change, Replacement):
        kind = "frozen" if change.frozen else "whole"
    elif isinstance(change, TokenRowsChange):
        kind = "tokens"
    else:
        kind, scaling = "bias", change.scaling
    return MergedLayer(change.weight, adapter, kind, rank, scaling, is_dora, base)


def measure_weights(
    tensors: Iterable[BaseTensor], origins: Mapping[str, Origin]
) -> dict[str, float]:
    """Measures the Frobenius norms of live weights, reading each once."""
    reader = ArrayReader(*origins.values())
    squares: dict[str, float] = {}
    for tensor in tensors:
        elements, total = math.prod(tensor.shape), squares.get(tensor.live[0], 0.0)
        for start in range(0, elements, _STEP):
            span = Span(start, min(start + _STEP, elements))
            values = reader.compute(tensor.operand, span).astype(np.float32)
            total += float(np.dot(values.astype(np.float64), values))
        squares[tensor.live[0]] = total
    return {name: math.sqrt(value) for name, value in squares.items()}


def report_layers(
    adapters: Sequence[SourceAdapter],
    tensors: Sequence[BaseTensor],
    changes: Changes,
    quantized: QuantizedBase,
    request: MergeRequest,
    origins: Mapping[str, Origin],
) -> list[MergedLayer]:
    """Describes the changes of each tensor; norms are measured only for `--report`."""
    present = {live for tensor in tensors for live in tensor.live}
    paths = [adapter.found.opened.path for adapter in adapters]
    layers: list[MergedLayer] = []
    norms: dict[tuple[str, str], float] = {}
    for weight, own in changes.items():
        kind = "kept" if weight in present else "none"
        if weight in quantized.operands:
            kind = request.qlora_base or "dequantized"
        for change in own:
            adapter = adapters[change.source.position]
            label = paths[change.source.position]
            if paths.count(label) > 1:
                label = f"{label} ({adapter.found.adapter.name})"
            is_whole = isinstance(change, Replacement) and kind != "none"
            layers.append(describe_change(change, label, "replaced" if is_whole else kind))
            norm = adapter.found.norms.get(change.module)
            if norm is not None and isinstance(change, LowRankChange):
                norms[label, weight] = norm * abs(adapter.weight)
    if not request.report:
        return layers
    touched = [tensor for tensor in tensors if any(live in changes for live in tensor.live)]
    weights = measure_weights(touched, origins)
    quantization = measure_quantization(quantized, changes, origins)
    for number, layer in enumerate(layers):
        scaled, unchanged = norms.get((layer.adapter, layer.tensor)), weights.get(layer.tensor)
        lost = quantization.get(layer.tensor)
        layers[number] = replace(
            layer,
            change=scaled / unchanged if scaled is not None and unchanged else None,
            quantization=lost / scaled if lost is not None and scaled else None,
        )
    return layers
