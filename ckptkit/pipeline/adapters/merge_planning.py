"""Everything that happens before the first byte of a merged model is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ckptkit.adapters.adapter import Adapter
from ckptkit.adapters.base_names import modules_of, with_prefix
from ckptkit.adapters.changes import Change, Replaced
from ckptkit.adapters.layers import table_of
from ckptkit.adapters.merged_config import model_types, with_head, without_quantization
from ckptkit.adapters.merging import MergeRequest, check_used_once, combine, norms_of
from ckptkit.adapters.pairing import Base, pair
from ckptkit.adapters.target_coverage import refuse_targets_without_tensors
from ckptkit.adapters.tying import Pair, shared_changes, tied_pairs
from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.execution.executor import Inputs
from ckptkit.kernels.merge_steps import NormOf, Rounding
from ckptkit.layouts.hf_weights import layout_hf_weights
from ckptkit.pipeline.adapters.base_checks import BaseChecks, refuse_rewritten_bases
from ckptkit.pipeline.adapters.base_records import read_record_of_base
from ckptkit.pipeline.adapters.dequantizing import QuantizedBase, Weights, plan_quantized
from ckptkit.pipeline.adapters.merge_base import (
    Alignment,
    BaseSource,
    align,
    base_tensors,
    folder_of,
    live_shapes,
    plain_weights,
)
from ckptkit.pipeline.adapters.merge_facts import SourceAdapter, source_facts
from ckptkit.pipeline.adapters.merge_outputs import (
    added_products,
    merged_products,
    resized_config,
    written_ties,
)
from ckptkit.pipeline.adapters.merge_products import BaseTensor, MergeRules
from ckptkit.pipeline.adapters.merge_report import MergedLayer, reported
from ckptkit.pipeline.adapters.packing_records import Packing
from ckptkit.pipeline.adapters.requantizing import requantized
from ckptkit.pipeline.adapters.tied_changes import (
    MergedTies,
    TieJudge,
    refuse_differing_bases,
    ties_in_words,
)
from ckptkit.pipeline.comparing import NOTHING, Comparison, Subject, plan_comparison
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.naming_program import NamingProgram
from ckptkit.pipeline.writing import Prepared, estimated, settings_for
from ckptkit.planning.load_report import MERGE
from ckptkit.planning.plan import Plan, Product
from ckptkit.planning.requests import Resources
from ckptkit.planning.side_files import bytes_by_dtype, config_as_written
from ckptkit.planning.ties import untied_config
from ckptkit.planning.vocabulary import is_head
from ckptkit.storage.places import PathLike

_EXPERT = re.compile(r"\.experts\.\d+\.")  # disk names of what training holds fused
_NO_BASE = "pass the model that the adapter was trained on with --base"


class MergePreparation:
    """Plans a merge; each step needs the ones before it."""

    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[SourceAdapter],
        given: BaseSource | None,
        request: MergeRequest,
        resources: Resources,
    ) -> None:
        """Takes what was opened.

        Args:
            stack: Closes the folders of side files, and of bases that are compared.
            adapters: The adapters, in the order of merging.
            given: The base that was given, or None.
            request: What the output should hold.
            resources: What the execution may use.

        Raises:
            RefusedError: If there is no base, or if an adapter needs another one.
        """
        self._program = stack.enter_context(NamingProgram())
        self._adapters = adapters
        self._given = given
        self._request = request
        self._resources = resources
        self._checks = BaseChecks(stack, adapters, given, allowed=request.allow_other_base)
        refuse_rewritten_bases(adapters, given)
        first = adapters[0]
        folder = None if given is None else folder_of(given)
        self._folders = SideFolders(stack, first.found.opened, folder)
        self._side, self._code = self._folders.choose(allow_code=request.allow_code)
        self._config = self._folders.config(self._side)
        self._base = given or self._own_base(first)
        self._origins = {adapter.origin.name: adapter.origin for adapter in adapters}
        self._origins[self._base.origin.name] = self._base.origin
        self._notes = [note for adapter in adapters for note in adapter.found.notes]

    def run(self, out: PathLike) -> tuple[Prepared, list[MergedLayer]]:
        """Plans the output.

        Raises:
            InputError: If a source is damaged or incomplete.
            RefusedError: If the request cannot be met.
        """
        self._checks.check_identity()
        modules = [module for one in self._adapters for module in modules_of(one.found.adapter)]
        modules = list(dict.fromkeys(modules))
        alignment = align(self._base, modules, self._config, folder=self._folders.base)
        quantized = self._quantized(alignment)
        if self._given is not None:
            given = plain_weights(self._given, alignment)
            self._checks.compare(given, self._trained(), quantized, self._request.qlora_base)
        tensors = base_tensors(self._base, alignment, quantized)
        shapes = live_shapes(self._base, alignment, quantized)
        pairs = self._pairs(self._config, tensors)
        shapes |= {pair.target: shapes[pair.source] for pair in pairs if not pair.is_present}
        changes = self._changes(alignment, shapes, pairs)
        config = self._headed(changes)
        ties = self._ties(config, tensors, changes)
        rules = self._rules(changes)
        products = [
            *merged_products(tensors, changes, ties, shapes, rules),
            *added_products(tensors, changes, ties, shapes, rules, alignment.called),
        ]
        layers = reported(self._adapters, tensors, changes, quantized, self._request, self._origins)
        config = self._configured(config, products, changes, shapes, ties)
        self._notes += [*alignment.notes, *self._checks.notes(quantized)]
        comparison = self._comparison(products, config)
        plan = self._plan(products, config, written_ties(ties, tensors))
        prepared = self._prepared(out, plan, alignment, quantized)
        return replace(prepared, comparison=comparison), layers

    # --- the base ---

    def _own_base(self, adapter: SourceAdapter) -> BaseSource:
        found = adapter.found
        if not found.base:
            raise RefusedError(
                "the checkpoint holds the adapter alone, and no base to merge it into",
                where=found.opened.path,
                hint=_NO_BASE,
            )
        return BaseSource(found.opened, adapter.origin, found.base, self._config, is_live=True)

    def _quantized(self, alignment: Alignment) -> QuantizedBase:
        trained = self._trained()
        shapes: dict[str, Shape] = {}
        for adapter in self._adapters:
            for layer in table_of(adapter.found.adapter.tensors).layers:
                if not (layer.is_embedding or layer.is_convolution or layer.level):
                    shapes[f"{layer.module}.weight"] = layer.shape
        given = None if self._given is None else plain_weights(self._given, alignment)
        record = None if given is None else self._packings()
        choice = self._request.qlora_base
        is_default = record is not None and choice != "original"
        nested, workers = self._request.double_quant, settings_for(self._resources).workers
        found = plan_quantized(
            *(trained, given),
            shapes=shapes,
            choice=None if is_default else choice,
            nested=nested,
            workers=workers,
        )
        if record is None or given is None or not is_default or found.operands:
            return found
        where = self._adapters[0].source.where
        return requantized(record, given, nested=nested, where=where, workers=workers)

    def _packings(self) -> Sequence[Packing] | None:
        """Returns how the base of extracted adapters was packed, as far as all of them agree."""
        alone = [one.found.opened for one in self._adapters if not one.found.base]
        records = [read_record_of_base(opened).quantization for opened in alone]
        found = [record.packings for record in records if record is not None]
        if (
            len(alone) < len(self._adapters)
            or not found
            or not all(one == found[0] for one in found)
        ):
            return None
        return found[0] or None

    def _trained(self) -> Weights | None:
        """Returns what the first adapter's checkpoint holds of its base."""
        first = self._adapters[0]
        if not first.found.base:
            return None
        folders = first.found.folders
        config = folders.config(folders.choose(allow_code=False)[0])
        entries = {str(name): entry for name, entry in first.found.base.items()}
        return Weights(first.origin, entries, config, first.found.opened.path)

    # --- what changes ---

    def _pairs(self, config: Mapping[str, Any] | None, tensors: Sequence[BaseTensor]) -> list[Pair]:
        specs = {t.live[0]: (t.dtype, t.shape) for t in tensors if t.part is None}
        return tied_pairs(config, specs)

    def _changes(
        self, alignment: Alignment, shapes: Mapping[Fqn, Shape], pairs: Sequence[Pair]
    ) -> dict[Fqn, list[Change]]:
        base = Base(shapes, model_types(self._config))
        found = []
        for one in self._adapters:
            adapter = with_prefix(one.found.adapter, alignment.adapter_prefix)
            changes = pair(adapter, base, one.source, weight=one.weight)
            check_used_once(adapter.tensors, changes, where=one.source.where)
            if self._given is not None and adapter.tensors:  # one without any changes nothing
                self._refuse_bare_targets(adapter, one, alignment)
            found.append(changes)
        combined = combine(found, [one.weight for one in self._adapters])
        tying = {
            one.source.position
            for one in self._adapters
            if one.found.adapter.settings.ensure_weight_tying
        }
        return shared_changes(combined, pairs, tying)

    def _refuse_bare_targets(
        self, adapter: Adapter, one: SourceAdapter, alignment: Alignment
    ) -> None:
        """Refuses an adapter that lacks tensors for what its configuration targets in the base."""
        entries = {
            placed.live[0]: self._base.entries[placed.stored[0]]
            for placed in alignment.placed
            if placed.part is None and not _EXPERT.search(placed.live[0])
        }
        try:
            refuse_targets_without_tensors(
                table_of(adapter.tensors), adapter.settings, entries, is_own_record=True
            )
        except AdapterError as error:
            raise error.located(one.source.where) from error

    def _rules(self, changes: Mapping[Fqn, Sequence[Change]]) -> MergeRules:
        versions = [one.found.adapter.settings.peft_version for one in self._adapters]
        norm_of, note = norms_of(versions, changes)
        self._notes += filter(None, [note])
        rounding = Rounding.PEFT if self._request.match_peft else Rounding.ONCE
        return MergeRules(self._request.dtype, rounding, NormOf(norm_of))

    def _ties(
        self,
        config: Mapping[str, Any] | None,
        tensors: Sequence[BaseTensor],
        changes: Mapping[Fqn, Sequence[Change]],
    ) -> MergedTies:
        by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
        judge = TieJudge(self._origins, by_live)
        refuse_differing_bases(judge, changes)
        ties = judge.judge(config, self._pairs(config, tensors), changes)
        self._notes += ties_in_words(config, ties)
        return ties

    # --- what is written ---

    def _headed(self, changes: Mapping[Fqn, Sequence[Change]]) -> dict[str, Any] | None:
        if self._config is None:
            return None
        config = self._config
        for one in self._adapters:
            brought = {
                change.weight: change.tensor.shape
                for found in changes.values()
                for change in found
                if isinstance(change, Replaced) and change.source.position == one.source.position
            }
            config, told = with_head(config, one.found.adapter.settings.task_type, brought)
            self._notes += told
        return config

    def _configured(
        self,
        config: dict[str, Any] | None,
        products: Sequence[Product],
        changes: Mapping[Fqn, Sequence[Change]],
        shapes: Mapping[Fqn, Shape],
        ties: MergedTies,
    ) -> dict[str, Any] | None:
        if config is None:
            self._notes.append(
                "no config.json was found beside the adapter or its base: Transformers needs one to"
                " load the output"
            )
            return None
        resized, notes = resized_config(
            config, changes, shapes, products, is_live=self._base.is_live
        )
        self._notes += notes
        written = bytes_by_dtype((p.spec.dtype, p.spec.size_bytes) for p in products)
        allow_code = self._request.allow_code
        made = config_as_written(resized, written, allow_code=allow_code)
        if ties.untied or ties.broken:
            made = untied_config(made)
        return without_quantization(made)

    def _comparison(
        self, products: Sequence[Product], config: Mapping[str, Any] | None
    ) -> Comparison:
        """Compares names and shapes with the model that the configuration describes."""
        if config is None:
            return NOTHING
        if self._request.names == "live":
            self._notes.append(
                "names and shapes are not compared with the model of config.json: --names live"
            )
            return NOTHING
        # Where an adapter brought another head, that of the base stays in the output, unused.
        is_headed = config.get("architectures") != (self._config or {}).get("architectures")
        heads = {str(p.spec.name) for p in products if is_headed and is_head(p.spec.name)}
        subject = Subject(
            config={**config, **self._folders.code_of(self._side)},
            tensors={str(p.spec.name): (p.spec.dtype, p.spec.shape) for p in products},
            left_out=frozenset(heads),
            where=self._base.opened.path,
            is_live=self._base.is_live,
            advice=MERGE,
        )
        comparison, notes = plan_comparison(subject, self._program)
        self._notes += notes
        return comparison

    def _plan(
        self,
        products: Sequence[Product],
        config: dict[str, Any] | None,
        dropped: Mapping[Fqn, Fqn],
    ) -> Plan:
        if self._code:
            self._notes.append(
                f"python files were left out: {', '.join(self._code)}; pass --allow-code to copy"
                " them"
            )
        weights = layout_hf_weights(products, self._request.max_file_bytes)
        files = self._folders.outputs(self._side, config, allow_code=self._request.allow_code)
        return Plan((*weights, *files), dropped, tuple(dict.fromkeys(self._notes)))

    def _prepared(
        self, out: PathLike, plan: Plan, alignment: Alignment, quantized: QuantizedBase
    ) -> Prepared:
        opened = [one.found.opened for one in self._adapters]
        opened += [] if self._given is None else [self._given.opened]
        settings = settings_for(self._resources, plan, sources=opened, out=out)
        read = sum(spec.size_bytes for _, _, spec in plan.specs())
        return Prepared(
            sources=tuple(opened),
            plan=plan,
            inputs=Inputs(self._origins, self._folders.sources),
            settings=settings,
            estimate=estimated(plan, settings, out, bytes_read=read),
            kind="model",
            options=self._request.changed(),
            facts=source_facts(self._adapters, self._base, quantized.facts),
            versions=dict(alignment.versions or {}),
        )
