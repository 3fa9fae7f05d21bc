"""Plans a merge: the tensors of the merged model, how each is produced, its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from ckptkit.adapters.base_identity import BaseChecks, refuse_rewritten_bases
from ckptkit.adapters.merge.base_model import (
    Alignment,
    BaseSource,
    align,
    find_folder,
    find_live_shapes,
    list_modules,
    make_base_tensors,
    take_plain_weights,
)
from ckptkit.adapters.merge.kernel import NormOf, Rounding
from ckptkit.adapters.merge.merged_tensors import (
    BaseTensor,
    MergedTies,
    MergeRules,
    TieJudge,
    describe_ties,
    plan_products,
    refuse_differing_bases,
)
from ckptkit.adapters.merge.report import (
    MergedLayer,
    SourceAdapter,
    collect_source_facts,
    report_layers,
)
from ckptkit.adapters.quantized.bases import ModelWeights, QuantizedBase, plan_quantized
from ckptkit.adapters.quantized.requantize import requantize
from ckptkit.consumers.class_facts import find_left_out
from ckptkit.consumers.side_files import sum_bytes_by_dtype, update_config
from ckptkit.conversion.compare_names import LIVE_NAMES, Comparison, Subject, plan_comparison
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.conversion.source.adapters import read_record_of_base
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders
from ckptkit.conversion.write import PlannedOutput, choose_settings, estimate_plan
from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.text import counted
from ckptkit.engine.segment_reader import Inputs
from ckptkit.hub_names.known_models import is_made_by_model
from ckptkit.lora.accounting import refuse_targets_without_tensors
from ckptkit.lora.changes import (
    Change,
    Changes,
    LowRankChange,
    MergeRequest,
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
    resize_vocabulary,
    share_changes,
)
from ckptkit.lora.layers import build_table, find_linear_shapes
from ckptkit.lora.pairing import BaseShapes, Renaming, find_changes
from ckptkit.lora.quantized import Packing
from ckptkit.options import Resources
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.load_report import MERGE
from ckptkit.plan.plan import Plan, Product, TensorSpec
from ckptkit.plan.selection import (
    DTypePolicy,
    KeptDtypes,
    describe_kept,
    find_float32_among_halves,
)
from ckptkit.plan.ties import untie_config
from ckptkit.plan.vocabulary import is_head
from ckptkit.storage.places import PathLike

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
    """Plans a merge."""

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
        """Plans the output."""
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
        changes = self._find_changes(alignment, shapes, pairs)
        config = self._adapt_head(changes)
        by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
        judge = TieJudge(self._origins, by_live)
        refuse_differing_bases(judge, changes)
        ties = judge.judge(config, _find_pairs(config, tensors), changes)
        self._notes += describe_ties(config, ties)
        versions = [source.found.adapter.settings.peft_version for source in self._adapters]
        norm_of, note = choose_norms(versions, changes)
        self._notes += filter(None, [note])
        rounding = Rounding.PEFT if self._request.match_peft else Rounding.ONCE
        dtypes = DTypePolicy(self._request.dtype, kept=self._find_kept(tensors))
        rules = MergeRules(dtypes, rounding, NormOf(norm_of))
        specs = [TensorSpec(t.live[0], t.dtype, t.shape) for t in tensors]
        self._notes += describe_kept(dtypes, specs)
        products = list(plan_products(tensors, changes, ties, shapes, rules, alignment.called))
        layers = report_layers(
            self._adapters, tensors, changes, quantized, self._request, self._origins
        )
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
        base = BaseShapes(renaming.to_adapter(shapes), find_model_types(self._config))
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
                changes = find_changes(adapter, base, source.source, weight=source.weight)
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
