"""`ckptkit.merge_adapter`: adapters and a base become a model folder, tensor by tensor.

Base and adapters are opened, the changes of the adapters are planned by name, and each tensor of
the merged model becomes a product: a copy, or a kernel. Tied tensors are compared by their bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
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
    MergeKernel,
    Rounding,
    TokenRowsUpdate,
    Update,
    make_low_rank,
)
from ckptkit.adapters.packed_bases import (
    ModelWeights,
    QuantizedBase,
    measure_quantization,
    plan_quantized,
    requantize,
)
from ckptkit.adapters.sources import AdapterRequest, OpenedAdapter, open_adapter
from ckptkit.consumers.class_facts import find_left_out
from ckptkit.consumers.side_files import sum_bytes_by_dtype, update_config
from ckptkit.conversion.compare_names import LIVE_NAMES, Comparison, Subject, plan_comparison
from ckptkit.conversion.names_on_disk import join_sources
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.conversion.packing import describe_losses, pack_as
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.paths import find_model, is_folder, resolve_path
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders, find_component
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    build_manifest,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.checksums import digest_of, join_leaves, leaf_digest
from ckptkit.core.errors import AdapterError, AmbiguousSourceError, RefusedError, UsageError
from ckptkit.core.frameworks import is_merged_beside
from ckptkit.core.index import Fqn, Shape, Span, TensorEntry
from ckptkit.core.manifest import LEAF_BYTES, MANIFEST_NAME, Manifest
from ckptkit.core.text import Aside, counted, list_first
from ckptkit.engine.kernels import CastOperand, OperandKernel, StoredOperand, recast
from ckptkit.engine.outcome import Digests, Listener, Planned, ignore
from ckptkit.engine.packing import PackingLoss
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.engine.shared_blocks import align_headers
from ckptkit.hub_names.disk_tensors import find_window
from ckptkit.hub_names.known_models import is_made_by_model
from ckptkit.lora.accounting import refuse_targets_without_tensors
from ckptkit.lora.changes import (
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
from ckptkit.options import DEFAULT_MAX_FILE_BYTES, Resources
from ckptkit.plan.layouts.hf import FileMap, distribute, layout_hf_files, layout_hf_weights
from ckptkit.plan.load_report import MERGE
from ckptkit.plan.packed_forms import UNPACKED, list_kept
from ckptkit.plan.packing_settings import find_quantization, restore_quantization
from ckptkit.plan.plan import Copy, OutputFile, Plan, Product, TensorSpec, name_shards
from ckptkit.plan.selection import (
    DTypePolicy,
    KeptDtypes,
    describe_kept,
    find_float32_among_halves,
)
from ckptkit.plan.ties import choose_ties_to_drop, untie_config
from ckptkit.plan.vocabulary import is_head
from ckptkit.storage.base import is_there
from ckptkit.storage.locations import Sources
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, open_source, open_target

_MOST_GROWTH = 1.25  # how much larger an output may be than a base that lends it its files


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
            adapters: list[OpenedAdapter] = []
            seen = set()
            for number in range(len(self.adapters)):
                adapter = self._open(stack, number)
                adapters.append(adapter)
                keys = frozenset(entry.key for entry in adapter.adapter.tensors.values())
                identity = resolve_path(adapter.opened.path), keys
                if identity in seen:
                    raise UsageError(
                        "the same adapter is named twice",
                        where=f"adapter {adapter.opened.path}",
                        hint="name it once; a weight of 2 doubles what it adds",
                    )
                seen.add(identity)
            given = None
            if self.base is not None:
                names = NamesOfBase(request.map, request.model_config, unpack=self._unpack)
                place = find_component(
                    find_model(self.base, "--base")[0], adapters[0].adapter.shapes
                )
                given = open_base(stack, place, self.resources.memory_limit_bytes, names)
                _refuse_merged(given, adapters)
            planning = _Planning(stack, adapters, given, request, self.resources)
            yield planning.run(self.destination or None)

    @property
    def _unpack(self) -> str:
        """What packed weights are unpacked for; those that change are packed again from there."""
        return UNPACKED if self.request.dtype == "keep" else self.request.dtype

    def _open(self, stack: ExitStack, number: int) -> OpenedAdapter:
        """Opens an adapter; only in the first checkpoint do options choose among several."""
        choice, first = self.adapters[number], self.adapters[0]
        request = replace(choice.request, unpack=self._unpack)
        try:
            return open_adapter(
                *(stack, choice.path, request), position=number, weight=choice.weight
            )
        except AmbiguousSourceError as error:
            if choice is first:
                raise
            hint = (
                f"make a folder of one: `ckptkit adapter extract {choice.path} FOLDER`, with"
                " --adapter or --select, and pass that"
            )
            if choice.path == first.path:
                hint = "name them with --adapter, each maybe with a weight, instead of --with"
            raise error.hinted(hint) from error


def run_merge(job: MergeJob, listener: Listener = ignore) -> MergedModel:
    """Writes a base with adapters merged into it, whole or not at all."""
    job.check_places()
    target = open_target(job.destination, overwrite=job.overwrite)
    with SingleProcess(target, listener) as strategy, job.plan() as (planned, layers):
        measured: list[str] = []

        def describe(planned: PlannedOutput, digests: Digests) -> Manifest:
            """Returns the manifest, with what packing changed in weights that it packed again."""
            losses = describe_losses(planned.plan)
            if not losses:
                return build_manifest(planned, digests)
            worst = max(losses, key=losses.__getitem__)
            measured.append(
                f"packing again changed numbers by up to {losses[worst]:.2g} of the largest number"
                f" of their weight, most in {worst!r}"
            )
            listener(Planned(tuple(measured)))
            facts = {**planned.facts, "packed_again": losses}
            return build_manifest(replace(planned, facts=facts), digests)

        strategy.make_manifest = describe
        manifest = write_output(planned, strategy, listener)
        return MergedModel(manifest, layers, (*planned.plan.notes, *measured))


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


def _refuse_merged(base: BaseSource, adapters: Sequence[OpenedAdapter]) -> None:
    """Refuses a model beside an adapter that has it merged already."""
    folder = find_folder(base)
    own = (resolve_path(adapter.opened.path) for adapter in adapters)
    if resolve_path(folder) not in own or not is_folder(folder):
        return
    with open_source(folder) as source:
        if any(map(is_merged_beside, source.walk(0))):
            raise RefusedError(
                "the model beside the adapter has it merged already: its framework writes both",
                where=f"--base {folder}",
                hint="take that model as it is, or pass the one that training began from as --base",
            )


_MATRIX = 2
_LISTED = 3
_EXPERT = re.compile(r"\.experts\.\d+\.")  # disk names of experts that are fused in memory


class _Planning:
    """A merge while it is planned."""

    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[OpenedAdapter],
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
        self._folders = SideFolders(stack, first.opened, folder, choice)
        self._side, self._side_notes = self._folders.choose(allow_code=request.allow_code)
        stored_config = self._folders.config(self._side)
        self._config: Mapping[str, Any] | None = stored_config
        unpacked = first.unpacked if given is None else given.unpacked
        if unpacked is not None and stored_config is not None:
            self._config = drop_quantization(stored_config)
        if given is None and not first.base:
            raise RefusedError(
                "the checkpoint holds the adapter alone, and no base to merge it into",
                where=first.opened.path,
                hint="pass the model that the adapter was trained on with --base",
            )
        self._base = given or BaseSource(
            *(first.opened, first.origin, first.base, self._config),
            is_live=True,
            unpacked=unpacked,
            packed_config=stored_config,
        )
        self._origins = {o.name: o for o in (*(a.origin for a in adapters), self._base.origin)}
        self._notes = [note for adapter in adapters for note in adapter.notes]

    def run(self, out: PathLike | None) -> tuple[PlannedOutput, list[MergedLayer]]:
        request, adapters = self._request, self._adapters
        # The base is known: names are paired.
        self._checks.check_identity()
        listed = [list_modules(adapter.adapter) for adapter in adapters]
        modules, saved = (list(dict.fromkeys(chain(*each))) for each in zip(*listed, strict=True))
        folder = self._folders.base
        alignment = align(self._base, modules, self._config, folder=folder, saved=saved)
        quantized = self._plan_quantized(alignment)
        if self._given is not None:
            given = take_plain_weights(self._given, alignment)
            self._checks.compare(given, self._take_trained(), quantized, request.qlora_base)
        tensors = make_base_tensors(self._base, alignment, quantized)
        shapes = find_live_shapes(self._base, alignment, quantized)
        pairs = _find_pairs(self._config, tensors)
        shapes |= {tie.target: shapes[tie.source] for tie in pairs if not tie.is_present}
        self._note_outside(alignment.renaming, shapes)
        # Names are paired: changes are planned, and which ties they leave.
        changes = self._find_changes(alignment, shapes, pairs)
        config = self._config
        for adapter in adapters:
            brought = {
                change.weight: change.tensor.shape
                for own in changes.values()
                for change in own
                if isinstance(change, Replacement) and change.source == adapter.source
            }
            if config is not None:
                config, notes = adapt_head(config, adapter.adapter.settings.task_type, brought)
                self._notes += notes
        by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
        reader = ArrayReader(*self._origins.values())
        _refuse_differing_bases(changes, reader)
        ties = _judge_ties(
            config, _find_pairs(config, tensors), changes, by_live, self._origins, reader
        )
        self._notes += _describe_ties(config, ties)
        norm_of, note = choose_norms([a.adapter.settings.peft_version for a in adapters], changes)
        self._notes += filter(None, [note])
        # Changes are planned: each tensor becomes a product, a copy or a kernel.
        kept = KeptDtypes()
        if not request.cast_all and self._config is not None:
            # What the class keeps in float32, and what the base has so.
            packed = {} if self._base.unpacked is None else self._base.unpacked.stored
            stored = (e for e in self._base.entries.values() if e.key not in packed)
            halves = find_float32_among_halves(stored)
            names = frozenset(str(t.live[0]) for t in tensors if t.name in halves)
            kept = replace(self._folders.consumer.find_kept(self._config), names=names)
        dtypes = DTypePolicy(request.dtype, kept=kept)
        tensors = [self._round_unpacked(tensor, kept) for tensor in tensors]
        specs = [TensorSpec(t.live[0], t.dtype, t.shape) for t in tensors]
        self._notes += describe_kept(dtypes, specs)
        make = partial(
            _make_product,
            dtypes=dtypes,
            rounding="peft" if request.match_peft else "once",
            norm_of=norm_of,
        )
        products = list(_plan_products(tensors, changes, ties, shapes, alignment.called, make))
        of_packed = () if self._base.unpacked is None else self._base.unpacked.stored
        unpacked = {
            live
            for tensor in tensors
            if any(key in of_packed for _, key in tensor.operand.reads)
            for live in tensor.live
        }
        layers = _report_layers(adapters, tensors, changes, quantized, unpacked, request, reader)
        # Products are planned: the files around them.
        config = self._write_config(config, products, changes, shapes, ties)
        self._notes += [*alignment.notes, *self._checks.notes(quantized)]
        if self._base.opened.maps:
            self._notes += self._base.opened.notes
        comparison = self._compare_names(products, config)
        products, config = self._pack_again(products, config)
        names_written = {live: tensor.name for live, tensor in by_live.items()}
        dropped = {
            names_written.get(t, t): names_written.get(s, s) for t, s in ties.dropped.items()
        }
        folders = self._folders
        weights = align_headers(self._lay_out(products), self._origins)
        truth = folders.tell_truth(
            *(folders.texts(self._side), config, [str(p.spec.name) for p in products]),
            keep_generation=request.generation_config == "keep",
        )
        self._notes += (*self._side_notes, *truth.notes)
        files = folders.outputs(self._side, truth.changed, allow_code=request.allow_code)
        plan = Plan((*weights, *files), dropped, tuple(dict.fromkeys(self._notes)))
        opened = [adapter.opened for adapter in adapters]
        opened += [] if self._given is None else [self._given.opened]
        settings = choose_settings(self._resources, plan, sources=opened, out=out)
        settings = replace(settings, check=request.check)
        read = sum(spec.size_bytes for _, _, spec in plan.specs())
        planned = PlannedOutput(
            sources=tuple(opened),
            plan=plan,
            inputs=Inputs(self._origins, folders.sources),
            settings=settings,
            estimate=estimate_plan(plan, settings, out, bytes_read=read),
            kind="model",
            options=request.changed(),
            facts=_collect_facts(adapters, self._base, quantized.facts),
            versions={**self._base.opened.maps, **(alignment.versions or {})},
            comparison=comparison,
        )
        return planned, layers

    def _lay_out(self, products: Sequence[Product]) -> list[OutputFile]:
        """Puts weights into the files of the base, with which unchanged ones can share blocks."""
        limit, stem = self._request.max_file_bytes, self._folders.consumer.stem
        files, held_bytes = _find_files(self._base) if limit is None else ({}, 0)
        # Files of unpacked or wider weights would be too large.
        if sum(product.spec.size_bytes for product in products) > _MOST_GROWTH * held_bytes:
            return layout_hf_weights(products, limit or DEFAULT_MAX_FILE_BYTES, stem)
        as_base = FileMap(self._base.opened.path, files)
        groups, _ = distribute(products, as_base, is_wanted=lambda _: False, tied=())
        names = name_shards(stem, "safetensors", len(groups))
        return layout_hf_files([(n, g) for n, (_, g) in zip(names, groups, strict=True)], stem)

    def _note_outside(self, renaming: Renaming, shapes: Mapping[Fqn, Shape]) -> None:
        """Notes tensors of the checkpoint that the model of `--base` does not have."""
        held = [name for adapter in self._adapters for name in adapter.base]
        absent = (n for n in held if not is_made_by_model(n) and renaming.to_base(n) not in shapes)
        outside = sorted(dict.fromkeys(absent))
        if self._given is not None and outside:
            count, verb = counted(len(outside), "tensor"), "is" if len(outside) == 1 else "are"
            self._notes.append(
                f"{count} of the checkpoint, such as {outside[0]!r}, {verb} not written: the model"
                " of --base has none of that name"
            )

    def _plan_quantized(self, alignment: Alignment) -> QuantizedBase:
        shapes: dict[str, Shape] = {
            alignment.renaming.to_base(name): shape
            for adapter in self._adapters
            for name, shape in find_linear_shapes(adapter.adapter).items()
        }
        given = None if self._given is None else take_plain_weights(self._given, alignment)
        choice, nested = self._request.qlora_base, self._request.double_quant
        # How the base of extracted adapters was packed, if all of them agree.
        packings: Sequence[Packing] = ()
        if given is not None and choice != "original" and not any(a.base for a in self._adapters):
            records = [read_record_of_base(a.opened).quantization for a in self._adapters]
            found = [record.packings for record in records if record is not None]
            packings = found[0] if found and all(other == found[0] for other in found) else ()
        workers = choose_settings(self._resources).workers
        is_unpacked = choice == "dequantized" and self._base.unpacked is not None
        quantized = plan_quantized(
            *(self._take_trained(), given),
            shapes=shapes,
            choice=None if packings or is_unpacked else choice,
            nested=nested,
            workers=workers,
        )
        if given is None or not packings or quantized.operands:
            return quantized
        where = self._adapters[0].source.where
        return requantize(packings, given, nested=nested, where=where, workers=workers)

    def _take_trained(self) -> ModelWeights | None:
        """Returns the base in the first adapter's checkpoint, if it has one."""
        first = self._adapters[0]
        if not first.base:
            return None
        config = first.folders.config(first.folders.choose(allow_code=False)[0])
        if config is not None and first.unpacked is not None:
            config = drop_quantization(config)
        entries = {str(name): entry for name, entry in first.base.items()}
        return ModelWeights(first.origin, entries, config, first.opened.path)

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
        for opened in self._adapters:
            adapter, where = opened.adapter, opened.source.where
            try:
                changes = find_changes(
                    *(adapter, own, opened.source), model_types=types, weight=opened.weight
                )
            except RefusedError as error:
                if opened.converted is None:
                    raise
                own_tool = opened.converted.foreign.own_tool
                raise error.hinted(f"{error.hint}; {own_tool}") from None
            check_used_once(adapter.tensors, changes, where=where)
            if self._given is not None and adapter.tensors:  # without tensors it changes nothing
                try:
                    refuse_targets_without_tensors(
                        build_table(adapter.tensors), adapter.settings, entries, is_own_record=True
                    )
                except AdapterError as error:
                    raise error.located(where) from error
            all_changes.append([replace(c, weight=renaming.to_base(c.weight)) for c in changes])
        combined = combine_changes(all_changes, [adapter.weight for adapter in self._adapters])
        tying = {
            adapter.source.position
            for adapter in self._adapters
            if adapter.adapter.settings.shares_with_tied
        }
        shared = share_changes(combined, pairs, tying)
        if self._request.match_peft:
            _refuse_what_peft_loses(combined, shared, pairs)
        return shared

    def _write_config(
        self,
        config: dict[str, Any] | Mapping[str, Any] | None,
        products: Sequence[Product],
        changes: Changes,
        shapes: Mapping[Fqn, Shape],
        ties: _Ties,
    ) -> dict[str, Any] | None:
        if config is None:
            self._notes.append(
                "neither the adapter nor its base has a config.json, which Transformers needs to"
                " load the output"
            )
            return None
        if not self._folders.consumer.owns_config:
            return dict(config)
        resized, notes = _resize_config(
            config, changes, shapes, products, is_live=self._base.is_live
        )
        self._notes += notes
        written = sum_bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        updated = update_config(resized, written, allow_code=self._request.allow_code)
        return drop_quantization(untie_config(updated) if ties.untied or ties.broken else updated)

    def _round_unpacked(self, tensor: BaseTensor, kept: KeptDtypes) -> BaseTensor:
        """Rounds an unpacked weight to the type that the model has it in, before the merge."""
        packed, operand = self._base.unpacked, tensor.operand
        if packed is None or not any(key in packed.stored for _, key in operand.reads):
            return tensor
        policy = DTypePolicy(packed.asked, kept=kept)
        wanted = policy.target(TensorSpec(tensor.live[0], operand.dtype, tensor.shape))
        if wanted == operand.dtype:
            return tensor
        return replace(tensor, operand=CastOperand(operand, wanted), dtype=wanted)

    def _pack_again(
        self, products: list[Product], config: dict[str, Any] | None
    ) -> tuple[list[Product], dict[str, Any] | None]:
        """Leaves packed weights of the base as they are stored, and packs those that changed."""
        base = self._base
        if base.unpacked is None:
            return products, config
        if self._request.dtype != "keep":
            self._notes += base.unpacked.notes
            return products, config
        where, origin = base.opened.path, base.origin
        hint = "pass --dtype bfloat16, which unpacks the whole model"
        packed_config = base.packed_config or {}
        stored = {
            str(base.opened.index.tensors[key].name): (key, one)
            for key, one in base.unpacked.stored.items()
        }
        names = {str(product.spec.name) for product in products}
        lost = next((n for n, (_, one) in stored.items() if {n, one.group.name} - names), None)
        if lost is not None or config is None or find_quantization(packed_config) is None:
            what = (
                "no config.json says how its weights are packed"
                if lost is None
                else f"packed weight {stored[lost][1].group.name!r} is written under another name"
            )
            raise RefusedError(what, where=where, hint=hint)
        made, again = [], []
        for product in products:
            name, body = str(product.spec.name), product.body
            reads = ((body.origin, body.key),) if isinstance(body, Copy) else body.reads
            key, one = stored.get(name, (None, None))
            if one is None:
                made.append(product)
            elif reads == ((origin.name, key),):
                made += [_copy(entry, origin.name) for entry in one.group.entries]
            else:
                again.append(name)
                made += pack_as(one, product, where, hint, PackingLoss())
        made += [_copy(entry, origin.name) for entry in base.unpacked.unused]
        note = f"{counted(len(stored) - len(again), 'packed weight')} of the base left as stored"
        if again:
            more = f"{counted(len(again), 'weight')} packed again, which rounds a second time"
            self._notes.append(f"{note}, {more}: {list_first(again, _LISTED)}")
        else:
            self._notes.append(Aside(note))
        held = {str(name) for name in base.entries}
        new = list_kept((p.spec for p in products if str(p.spec.name) not in held), ())
        return made, restore_quantization(config, packed_config, new)

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


def _copy(entry: TensorEntry, origin: str) -> Product:
    return Product(TensorSpec(entry.name, entry.dtype, entry.shape), Copy(origin, entry.key))


def _resize_config(
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


def _find_files(base: BaseSource) -> tuple[dict[Fqn, str], int]:
    """Returns the files of the tensors of a base, and their size; none of other formats."""
    index = base.opened.index
    stored = {entry.name: entry for entry in index.tensors.values() if len(entry.chunks)}
    files = {
        name: index.files[index.records[int(entry.chunks.record[0])].file].path
        for name, entry in stored.items()
    }
    if not all(path.endswith(".safetensors") for path in files.values()):
        return {}, 0
    return files, sum(entry.size_bytes for entry in stored.values())


def _find_pairs(config: Mapping[str, Any] | None, tensors: Sequence[BaseTensor]) -> list[TiedPair]:
    specs = {t.live[0]: (t.dtype, t.shape) for t in tensors if t.part is None}
    return find_tied_pairs(config, specs)


def _refuse_what_peft_loses(changes: Changes, shared: Changes, pairs: Sequence[TiedPair]) -> None:
    """Refuses a LoRA that `merge_and_unload` of PEFT leaves out, or adds to a tied tensor.

    It adds the LoRA or the tokens of one of two tied modules to the tensor of both. `shared` has
    the changes of tied modules too.

    Source: peft 0.21, tuners/lora/layer.py (`merge`, which changes the parameter in place) and
    tuners/tuners_utils.py: with `ensure_weight_tying` both layers have the update, and add it.
    """
    for weight, own in shared.items():
        low_rank = next((c for c in own if isinstance(c, LowRankChange)), None)
        if low_rank is not None and any(isinstance(c, TokenRowsChange) for c in own):
            raise RefusedError(
                f"the LoRA of {weight!r} is added to the trained tokens of a tied embedding, and"
                " PEFT's merge_and_unload leaves this LoRA out",
                where=low_rank.source.where,
                hint=_WITHOUT_PEFT,
            )
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
                    hint=_WITHOUT_PEFT,
                )


_WITHOUT_PEFT = "merge without --match-peft, which writes what was trained"
_EXPERTS = 3


def _make_product(
    tensor: BaseTensor,
    changes: Sequence[Change],
    live: Shape,
    *,
    dtypes: DTypePolicy,
    rounding: Rounding,
    norm_of: NormOf,
) -> Product:
    """Returns how a tensor of the merged model is produced.

    `changes` and the shape `live` are those of the live tensor that it is, or is a part of.
    """
    target = dtypes.target(TensorSpec(tensor.live[0], tensor.dtype, tensor.shape))
    shape, operand, part = tensor.shape, tensor.operand, tensor.part
    for change in changes:
        if not isinstance(change, Replacement):
            continue
        # The adapter's tensor, in the base's element type as PEFT loads it.
        entry = change.tensor
        if (entry.dtype.kind == "float") != (tensor.dtype.kind == "float"):
            raise RefusedError(
                f"the adapter replaces elements of {tensor.dtype.name} by elements of"
                f" {entry.dtype.name}",
                where=f"tensor {tensor.name!r}",
                hint="pass the base that was trained on with --base",
            )
        if len(tensor.live) > 1:
            raise _make_part_error(tensor.name, change)
        shape = live = entry.shape
        operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
        if part is not None:
            shape, operand = tensor.shape, join_sources(part, [operand])
        is_held = dtypes.choice == "keep" or rounding == "peft"
        if is_held and entry.dtype != tensor.dtype and entry.dtype.kind == "float":
            operand = CastOperand(operand, tensor.dtype)
    spec = TensorSpec(tensor.name, target, shape)
    updates = [change for change in changes if not isinstance(change, Replacement)]
    if updates:
        dtype = operand.dtype
        if dtype.kind != "float" or dtype.itemsize == 1:
            raise RefusedError(
                f"tensor {tensor.name!r} of the base has element type {dtype.name}, to which"
                " nothing can be added",
                where=updates[0].source.where,
                hint="the base is quantized in a way that is not modelled; pass the original model"
                " with --base",
            )
        merged = tuple(_make_update(tensor, change, live) for change in updates)
        return Product(spec, MergeKernel(operand, merged, rounding, norm_of).compute())
    if isinstance(operand, StoredOperand) and not operand.start:
        copy = Copy(operand.origin, operand.key)
        return recast(Product(TensorSpec(spec.name, operand.dtype, spec.shape), copy), target)
    return Product(spec, OperandKernel(operand).compute())


def _make_update(
    tensor: BaseTensor, change: LowRankChange | BiasChange | TokenRowsChange, live: Shape
) -> Update:
    """Returns a change as the kernel applies it to a tensor that is a live one, or a part of it."""
    take = partial(Factor.whole, change.source.origin)
    window = None
    if tensor.part is not None:
        window = find_window(tensor.part, dict.fromkeys(tensor.live, live))
        if window is None or len(tensor.live) > 1 or not isinstance(change, LowRankChange):
            raise _make_part_error(tensor.name, change)
    if isinstance(change, BiasChange):
        return BiasUpdate(take(change.bias), change.scaling)
    if isinstance(change, TokenRowsChange):
        return TokenRowsUpdate(take(change.rows), change.indices)
    update = make_low_rank(
        *(take(change.down), take(change.up), change.scaling, change.form),
        magnitude=None if change.magnitude is None else take(change.magnitude),
        experts=live[0] if change.form.startswith("experts") else 1,
    )
    if window is None:
        return update
    box, axes = window.box, window.axes
    if box.sizes == live and axes == tuple(range(len(live))):
        return update
    if len(live) == _EXPERTS and box.sizes[0] == 1 and len(axes) == _MATRIX:
        if update.experts > 1:
            update = update.expert(box.offsets[0])
    elif len(live) != _MATRIX:
        raise _make_part_error(tensor.name, change)
    rows, columns = (
        None if size == whole else (offset, offset + size)
        for offset, size, whole in zip(
            box.offsets[-_MATRIX:], box.sizes[-_MATRIX:], live[-_MATRIX:], strict=True
        )
    )
    try:
        update = update.window(rows, columns)
    except ValueError as error:
        raise _make_part_error(tensor.name, change) from error
    return update.turned if axes[-_MATRIX] > axes[-1] else update


def _make_part_error(name: str, change: Change) -> RefusedError:
    """Returns the error for a tensor on disk that cannot be merged without others."""
    return RefusedError(
        f"{change.weight!r} is changed, and {name!r} on disk cannot be merged with a part"
        " of it alone",
        where=change.source.where,
        hint="merge this adapter with PEFT, or into a base that is saved as training holds it",
    )


def _plan_products(
    tensors: Sequence[BaseTensor],
    changes: Changes,
    ties: _Ties,
    shapes: Mapping[Fqn, Shape],
    called: Mapping[Fqn, Fqn],
    make: Callable[[BaseTensor, Sequence[Change], Shape], Product],
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
            raise _make_part_error(tensor.name, changes[touched[0]][0])
        own = changes.get(first, ())
        if not any(isinstance(change, Replacement) for change in own):
            # A frozen tensor of another size comes from a name that it was tied to.
            others = [pair for pair in ties.untied.items() if first in pair]
            frozen = [
                change
                for target, source in others
                for change in list_frozen(changes.get(target if source == first else source, ()))
            ]
            own = [*(c for c in frozen[:1] if c.tensor.shape != shapes[first]), *own]
        yield make(tensor, own, shapes[first])
    by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
    for target, source in ties.written.items():
        tensor = replace(by_live[source], name=called.get(target, target), live=(target,))
        updates = [*list_frozen(changes.get(source, ())), *changes.get(target, ())]
        yield make(tensor, updates, shapes[source])
    present = {live for tensor in tensors for live in tensor.live}
    for name, brought in changes.items():
        change = brought[0]
        is_tied = name in ties.written or name in ties.dropped
        if name in present or is_tied:
            continue
        if not isinstance(change, Replacement):
            raise RefusedError(
                f"{name!r} is changed, and no tensor of the base is, or is a part of, this one",
                where=change.source.where,
                hint="pass the model that the adapter was trained on with --base",
            )
        entry = change.tensor
        operand = StoredOperand(change.source.origin, entry.key, entry.dtype)
        output = called.get(name, name)
        tensor = BaseTensor(output, (name,), entry.shape, entry.dtype, operand)
        yield make(tensor, (), entry.shape)


class _Ties(Struct, frozen=True):
    """The names that the configuration ties, after a merge."""

    dropped: Mapping[Fqn, Fqn]  # not written, with the name that replaces each
    written: Mapping[Fqn, Fqn]  # absent so far, with the one whose base they share
    untied: Mapping[Fqn, Fqn]  # differ after the merge
    broken: Mapping[Fqn, Fqn]  # differ in the base already


def _judge_ties(
    config: Mapping[str, Any] | None,
    pairs: Sequence[TiedPair],
    changes: Changes,
    base: Mapping[Fqn, BaseTensor],
    origins: Mapping[str, Origin],
    reader: ArrayReader,
) -> _Ties:
    """Decides which ties hold after the merge.

    `changes` include those that PEFT shares between tied modules.
    """

    def agrees(pair: TiedPair) -> bool:
        """Compares the two tensors of the base."""
        if not (pair.is_present and pair.may_agree):
            return not pair.is_present
        stored = []
        for name in (pair.target, pair.source):
            operand = base[name].operand
            if not isinstance(operand, StoredOperand):
                return False
            stored.append((origins[operand.origin].index.tensors[operand.key], operand.origin))
        (first, first_origin), (second, second_origin) = stored
        return reader.are_equal(first, second, (first_origin, second_origin))

    same: dict[Fqn, Fqn] = {}
    untied: dict[Fqn, Fqn] = {}
    broken: dict[Fqn, Fqn] = {}
    for pair in pairs:
        ours, theirs = changes.get(pair.target, ()), changes.get(pair.source, ())
        if not (ours or theirs):
            (same if agrees(pair) else broken)[pair.target] = pair.source
        elif are_changed_alike(ours, theirs, reader) and (
            (ours and isinstance(ours[0], Replacement)) or agrees(pair)
        ):
            same[pair.target] = pair.source
        else:
            untied[pair.target] = pair.source
    absent = {pair.target: pair.source for pair in pairs if not pair.is_present}
    dropped = choose_ties_to_drop(config, same, [*untied, *broken])
    written = {t: s for t, s in absent.items() if t in untied}
    if untie_config(config or {}) != config and (untied or broken):
        written = absent
    kept = {t: s for t, s in dropped.items() if t not in absent or t in changes}
    return _Ties(kept, written, untied, broken)


def are_changed_alike(
    ours: Sequence[Change], theirs: Sequence[Change], reader: ArrayReader
) -> bool:
    """Returns whether the changes of two tied names make the same of one tensor."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(_make_the_same(*pair, reader) for pair in pairs)


def _make_the_same(ours: Change, theirs: Change, reader: ArrayReader) -> bool:
    if ours == replace(theirs, weight=ours.weight):
        return True
    compare = partial(reader.are_equal, origins=(ours.source.origin, theirs.source.origin))
    if isinstance(ours, TokenRowsChange) and isinstance(theirs, TokenRowsChange):
        return ours.indices == theirs.indices and compare(ours.rows, theirs.rows)
    if isinstance(ours, Replacement) and isinstance(theirs, Replacement):
        return compare(ours.tensor, theirs.tensor)
    if not isinstance(ours, LowRankChange) or not isinstance(theirs, LowRankChange):
        return False
    if ours.magnitude or theirs.magnitude or ours.scaling != theirs.scaling:
        return False
    if ours.form == theirs.form:
        return compare(ours.down, theirs.down) and compare(ours.up, theirs.up)
    if {ours.form, theirs.form} != {"embedding", "linear"}:
        return False
    # The factors of a tied head are those of the embedding, transposed.
    pairs = ((ours.down, theirs.up), (ours.up, theirs.down))
    return all(compare(*pair, transposed=True) for pair in pairs)


def _refuse_differing_bases(changes: Changes, reader: ArrayReader) -> None:
    """Refuses adapters whose updates of one tensor have different frozen bases."""
    for name, own in changes.items():
        frozen = list_frozen(own)
        for other in frozen[1:]:
            origins = frozen[0].source.origin, other.source.origin
            if not reader.are_equal(frozen[0].tensor, other.tensor, origins):
                raise RefusedError(
                    f"two adapters have different frozen weights of {name!r}",
                    where=other.source.where,
                    hint="merge adapters that were trained on one base model",
                )


def _describe_ties(config: Mapping[str, Any] | None, ties: _Ties) -> Iterator[str]:
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


def _collect_facts(
    adapters: Sequence[OpenedAdapter], base: BaseSource, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the facts on the adapters and the base for the manifest.

    `quantization` has those on packed weights.
    """
    facts: dict[str, Any] = {"adapters": []}
    for opened in adapters:
        # Names, element types, shapes and bytes of its tensors.
        reader, lines = ArrayReader(opened.origin), []
        for name, entry in sorted(opened.adapter.tensors.items()):
            blocks = reader.read_blocks(entry, elements=LEAF_BYTES // entry.dtype.itemsize)
            leaves = {n: leaf_digest(b.view(np.uint8).data) for n, b in enumerate(blocks)}
            lines.append(f"{name} {entry.dtype.name} {list(entry.shape)} {join_leaves(leaves)}\n")
        settings = json.dumps(opened.adapter.settings.document, sort_keys=True)
        facts["adapters"].append(
            {
                "path": opened.opened.path,
                "name": opened.adapter.name,
                "weight": opened.weight,
                "config": opened.config_path,
                "settings": digest_of(memoryview(settings.encode())),  # read or inferred
                "digest": digest_of(memoryview("".join(lines).encode())),
            }
        )
    path, index = base.opened.path, base.opened.index
    identity = identify_base(resolve_path(path), base.config)
    manifest, source = base.opened.manifest, base.opened.source
    if manifest is None and is_there(source, MANIFEST_NAME):
        manifest = read_manifest(source)
    about = {
        "path": path,
        "format": index.format,
        "repository": identity.repository,
        "commit": identity.commit,
        "files": {file.path: file.size_bytes for file in index.files if file.size_bytes >= 0},
    }
    if manifest is not None:
        listed = sorted(f"{name} {t.digest}\n" for name, t in manifest.tensors.items())
        about["digest"] = digest_of(memoryview("".join(listed).encode()))
    facts["base"] = {key: value for key, value in about.items() if value}
    return facts | ({"quantization": dict(quantization)} if quantization else {})


_STEP = 1 << 20


class MergedLayer(Struct, frozen=True):
    """The change of one adapter to one tensor."""

    tensor: str  # of the live model
    adapter: str  # its checkpoint, with its name where several of one are merged
    kind: str  # linear, embedding, ... for low-rank updates; bias, tokens, whole, frozen
    rank: int | None
    scaling: float | None
    is_dora: bool
    # kept, dequantized, packed again, original; replaced by a tensor of the adapter; none
    base: str
    change: float | None = None  # norm of the scaled product over that of the base's weight
    # Norm of the error of quantization over that of the scaled product.
    quantization: float | None = None


def _report_layers(
    adapters: Sequence[OpenedAdapter],
    tensors: Sequence[BaseTensor],
    changes: Changes,
    quantized: QuantizedBase,
    unpacked: Collection[Fqn],
    request: MergeRequest,
    reader: ArrayReader,
) -> list[MergedLayer]:
    """Describes the changes of each tensor; norms are measured only for `--report`."""
    present = {live for tensor in tensors for live in tensor.live}
    paths = [adapter.opened.path for adapter in adapters]
    squares: dict[str, float] = {}  # of norms, by live weight; a weight is read once
    lost: dict[str, float] = {}
    if request.report:
        for tensor in (t for t in tensors if any(live in changes for live in t.live)):
            elements, total = math.prod(tensor.shape), squares.get(tensor.live[0], 0.0)
            for start in range(0, elements, _STEP):
                span = Span(start, min(start + _STEP, elements))
                values = reader.compute(tensor.operand, span).astype(np.float32)
                total += float(np.dot(values.astype(np.float64), values))
            squares[tensor.live[0]] = total
        lost = measure_quantization(quantized, changes, reader)
    layers: list[MergedLayer] = []
    for weight, own in changes.items():
        base = "kept" if weight in present else "none"
        if weight in unpacked:
            base = "packed again" if request.dtype == "keep" else "dequantized"
        elif weight in quantized.operands:
            base = request.qlora_base or "dequantized"
        scaled = {
            change.source.position: norm * abs(adapters[change.source.position].weight)
            for change in own
            if isinstance(change, LowRankChange)
            and (norm := adapters[change.source.position].norms.get(change.module)) is not None
        }
        for change in own:
            adapter = adapters[change.source.position]
            label = adapter.opened.path
            if paths.count(label) > 1:
                label = f"{label} ({adapter.adapter.name})"
            norm, error = scaled.get(change.source.position), lost.get(weight)
            whole = math.sqrt(squares.get(weight, 0.0))
            layer = MergedLayer(
                *(weight, label, "tokens", None, None, False, base),
                change=norm / whole if norm is not None and whole else None,
                quantization=error / norm if error is not None and norm else None,
            )
            if isinstance(change, BiasChange):
                layer = replace(layer, kind="bias", scaling=change.scaling)
            elif isinstance(change, Replacement):
                replaced = base if base == "none" else "replaced"
                layer = replace(layer, kind="frozen" if change.frozen else "whole", base=replaced)
            elif isinstance(change, LowRankChange):
                kind = "linear" if change.form == "transposed" else change.form.partition("_")[0]
                is_dora = change.magnitude is not None
                layer = replace(
                    layer, kind=kind, rank=change.rank, scaling=change.scaling, is_dora=is_dora
                )
            layers.append(layer)
    return layers
