"""LoRA adapters of other frameworks, under the names and in the forms of PEFT.

A factor B has the rows of the weight that it changes, so that what the name map of the model does
with the rows of a weight is done with those of B; a factor A goes to each of the weights that the
map makes. Both become tensors that are read out of the stored ones when they are needed.

In Megatron-Core, `linear_qkv` has the rows of each query group together and `linear_fc1` those of
gate and up. mcore-bridge, with which ms-swift trains, stores B of `linear_fc1` as tensor
parallelism splits it: each rank's part of the gate, then its part of up. Megatron-Bridge stores it
as Megatron stores the weight, all of the gate first.

Tinker stacks the factors of experts, `w1` for the gate, `w3` for up and `w2` for down; a factor
that all experts share has one in front. `unembed_tokens` is the head.

Source: torchtune 0.6, `models/convert_weights.py` (whose magnitudes of DoRA keep torchtune's order,
unlike here); torchtitan 0.3, `components/lora.py`; Megatron-Bridge 0.5, `peft/utils.py`
(`ParallelLinearAdapter.sharded_state_dict`), `peft/canonical_lora.py`; mcore-bridge 1.1,
`tuners/lora.py` (`LoraParallelLinear`) and `bridge/gpt_bridge.py`; tinker-cookbook,
`weights/_merge_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptkit.conversion.mapped_names import MappedModel, choose_map, map_names
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.errors import CkptkitError, FormatError, RefusedError
from ckptkit.core.index import ChunkTable, Fqn, Key, TensorEntry
from ckptkit.core.text import quote
from ckptkit.engine.kernels import PartOperand
from ckptkit.engine.reader import Origin
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.dialects import BASE_LAYER, LORA_A, LORA_B
from ckptkit.lora.foreign import OF_TINKER, TINKER, Factor, ForeignAdapter, name_plainly
from ckptkit.name_maps.apply import Extent, apply_map
from ckptkit.name_maps.language import Rule, parse_template
from ckptkit.name_maps.rearrangement import Concat, Made, Only, Reorder, Rows, Split, Step
from ckptkit.name_maps.sizes import Sizes
from ckptkit.plan.plan import SOURCE
from ckptkit.plan.weight_kinds import PEFT

# The parts of a module that have adapters of their own, in the order of what a map makes of it.
_BRANCHES = (("q", "k", "v"), ("gate", "up"))
_EXPERTS = 3
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# What is no linear module of Transformers 5: experts and routers; queries and the like of Qwen3.5.
_WITHOUT_MODULE = re.compile(
    r"\.experts\.\d+\.|\.(?:mlp|block_sparse_moe)\.(?:gate|router)$|\.linear_attn\.in_proj_[qkv]$"
)
_WEIGHT = ".weight"
_FC1 = ".linear_fc1"


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """A checkpoint whose adapter has the names of PEFT.

    Attributes:
        checkpoint: The checkpoint; the tensors that were converted are of no model any more.
        foreign: What the adapter was.
        origins: By the path of each module, the framework's name of the module that it is of.
    """

    checkpoint: OpenedCheckpoint
    foreign: ForeignAdapter
    origins: Mapping[str, str]


def convert_adapter(
    checkpoint: OpenedCheckpoint,
    entries: Sequence[TensorEntry],
    foreign: ForeignAdapter,
    config: Mapping[str, Any] | None,
    extent: Extent,
) -> ConvertedAdapter:
    """Gives an adapter the names of PEFT."""
    where = checkpoint.path
    _refuse_unknown(foreign, where)
    own = {name: replace(entry, name=name) for entry in entries if (name := name_plainly(entry))}
    if len(own) < len(entries):
        raise FormatError(
            f"{len(entries):,} tensors have {len(own):,} names without those of wrappers",
            where=where,
            hint=foreign.own_tool,
        )
    factors = {name: own[name] for name in foreign.factors}
    notes: tuple[str, ...] = ()
    maps: Mapping[str, str] = {}
    if foreign.form == TINKER:
        made = list(_split_experts(foreign, factors, where))
        found = [
            match for f in foreign.factors.values() if (match := OF_TINKER.fullmatch(f.module))
        ]
        said = {
            "layer": "its factors were split by experts",
            "head": "its 'unembed_tokens' is 'lm_head'",
        }
        done = [text for part, text in said.items() if any(match[part] for match in found)]
        notes = (f"the adapter has Tinker's form: {', and '.join(done)}",)
    else:
        mapped = _map_factors(checkpoint, foreign, factors, config, extent)
        made, notes, maps = list(mapped.derive(factors)), mapped.notes, mapped.versions
    origins: dict[str, str] = {}
    for entry in made:
        source = foreign.factors[entry.stored_names[0]]
        origins[entry.name.partition(f".{source.part}.")[0]] = source.module
    if foreign.rest:
        base = {name: own[name] for name in foreign.rest}
        specs = {name: (entry.dtype, entry.shape) for name, entry in base.items()}
        with _hinting(foreign):
            whole = map_names("auto", foreign.framework, config, checkpoint, specs)
        whole.refuse_different(base, Origin(SOURCE, checkpoint.source, checkpoint.index))
        for entry in whole.derive(base):
            module, _, parameter = entry.name.rpartition(".")
            inside = f"{module}.{BASE_LAYER}" if module in origins else module
            made.append(replace(entry, name=Fqn(f"{inside}.{parameter}")))
    held = {entry.key: replace(entry, part="other") for entry in entries}
    for entry in made:
        name = Fqn(PEFT_PREFIX + entry.name)
        key = entry.key if entry.derivation is None else Key(f"{name} of {entry.tree}")
        held[key] = replace(entry, key=key, name=name)
    index = replace(checkpoint.index, tensors={**checkpoint.index.tensors, **held})
    converted = replace(
        checkpoint, index=index, notes=(*checkpoint.notes, *notes), maps={**checkpoint.maps, **maps}
    )
    return ConvertedAdapter(converted, foreign, origins)


def refuse_without_peft_form(converted: ConvertedAdapter) -> None:
    """Refuses an adapter whose files PEFT would load only in part."""
    modules = converted.origins
    lost = next((module for module in modules if _WITHOUT_MODULE.search(module)), "")
    if lost:
        raise RefusedError(
            f"{converted.foreign.title} has factors of {lost!r}, which is no module of Transformers"
            " 5 that PEFT could adapt",
            where=converted.checkpoint.path,
            hint="`ckptkit adapter merge` makes a model of the adapter and its base;"
            f" {converted.foreign.own_tool}",
        )


@contextmanager
def _hinting(foreign: ForeignAdapter) -> Iterator[None]:
    """Replaces hints at options that the commands for adapters do not have."""
    try:
        yield
    except CkptkitError as error:
        raise error.hinted(
            "the adapter is incomplete, or --base is another model than it was trained on;"
            f" {foreign.own_tool}"
        ) from error


def _refuse_unknown(foreign: ForeignAdapter, where: str) -> None:
    unknown = [name for name, factor in foreign.factors.items() if not factor.part]
    if foreign.form == TINKER:
        unknown += foreign.rest
    elif not foreign.framework:
        unknown += foreign.factors
    if unknown:
        raise RefusedError(
            f"tensor {quote(unknown[0])} belongs to {foreign.title}, and there is no rule that"
            " converts it",
            where=where,
            hint=foreign.own_tool,
        )


# --- experts of Tinker ---


def _split_experts(
    foreign: ForeignAdapter, entries: Mapping[Fqn, TensorEntry], where: str
) -> Iterator[TensorEntry]:
    counts: dict[str, int] = {}  # by module, the number of experts; of A and B one may be shared
    for name, factor in foreign.factors.items():
        if len(entries[name].shape) == _EXPERTS:
            counts[factor.module] = max(counts.get(factor.module, 1), entries[name].shape[0])
    for name, factor in foreign.factors.items():
        entry, found = entries[name], OF_TINKER.fullmatch(factor.module)
        if found is None:
            yield replace(entry, name=name, stored_names=(name,))
        elif found["head"] is not None:
            yield replace(entry, name=Fqn(f"lm_head{factor.ending}"), stored_names=(name,))
        elif len(entry.shape) != _EXPERTS or entry.shape[0] not in {1, counts[factor.module]}:
            raise RefusedError(
                f"tensor {name!r} has shape {list(entry.shape)}, expected"
                f" {counts.get(factor.module, 0):,} or 1 and two dimensions more",
                where=where,
                hint=f"the adapter is damaged, or of another form; {foreign.own_tool}",
            )
        elif counts[factor.module] == 1:
            raise RefusedError(
                f"tensor {name!r} is shared by all experts as its other factor is, so that nothing"
                " shows how many there are",
                where=where,
                hint=foreign.own_tool,
            )
        else:
            matrix = _MATRICES.get(found["matrix"], found["matrix"])
            size = entry.elements // entry.shape[0]
            for expert in range(counts[factor.module]):
                start = size * expert if entry.shape[0] > 1 else 0
                yield replace(
                    entry,
                    name=Fqn(f"{found['layer']}.{expert}.{matrix}{factor.ending}"),
                    shape=entry.shape[1:],
                    chunks=ChunkTable.of((), len(entry.shape) - 1),
                    derivation=PartOperand(SOURCE, entry.key, entry.dtype, start),
                    stored_names=(name,),
                )


# --- by a name map ---


@dataclass(frozen=True, slots=True)
class _Repeat:
    """The same tensor several times: a factor A, of each part of a weight."""

    count: int

    def apply(self, tensors: Sequence[Made], _sizes: Sizes) -> list[Made]:
        return [made for made in tensors for _ in range(self.count)]

    def inverse(self) -> Step:
        raise NotImplementedError


def _map_factors(
    checkpoint: OpenedCheckpoint,
    foreign: ForeignAdapter,
    entries: Mapping[Fqn, TensorEntry],
    config: Mapping[str, Any] | None,
    extent: Extent,
) -> MappedModel:
    where = checkpoint.path
    with _hinting(foreign):
        name_map = choose_map("auto", foreign.framework, config, checkpoint)
    ranks = _count_ranks(checkpoint, foreign, entries)
    rules: dict[str, Rule] = {}
    for name, factor in foreign.factors.items():
        weight = Fqn(factor.module + _WEIGHT)
        taking = [r for r in name_map.rules if any(t.match(weight) is not None for t in r.sources)]
        made = [_make_rule(rule, factor, ranks) for rule in taking]
        if len(made) != 1 or made[0] is None:
            raise RefusedError(
                f"tensor {name!r} belongs to {foreign.title}, and map {name_map.name!r} does not"
                " say what becomes of the rows of its weight",
                where=where,
                hint=foreign.own_tool,
            )
        rules[f"{made[0].where}{'' if made[0].drop else factor.ending}"] = made[0]
    of_adapter = replace(name_map, rules=tuple(rules.values()))
    specs = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    with _hinting(foreign):
        names = apply_map(of_adapter, config or {}, specs, where=where, extent=extent)
    return MappedModel(of_adapter, names, specs)


def _make_rule(rule: Rule, factor: Factor, ranks: int) -> Rule | None:
    """Returns the rule for a factor of the weight that a rule takes; None if there can be none."""
    if rule.drop:
        return replace(rule, zeros=(), beside=None)
    texts = [template.text for template in (*rule.sources, *rule.targets)]
    if len(rule.sources) != 1 or not all(text.endswith(_WEIGHT) for text in texts):
        return None
    targets, steps = rule.targets, tuple(_of_ranks(s, factor, ranks) for s in rule.steps)
    if not all(map(_moves_rows, steps)):
        return None
    if factor.branch:
        order = next((o for o in _BRANCHES if factor.branch in o), ())
        if len(order) != len(targets):
            return None
        targets, steps = (targets[order.index(factor.branch)],), ()
    elif factor.part == LORA_A:
        steps = (_Repeat(len(targets)),)
    ending = f".{factor.part}.{factor.adapter}{_WEIGHT}"
    return replace(
        rule,
        sources=(parse_template(texts[0].removesuffix(_WEIGHT) + factor.ending),),
        targets=tuple(parse_template(t.text.removesuffix(_WEIGHT) + ending) for t in targets),
        steps=steps,
    )


def _moves_rows(step: Step) -> bool:
    """Returns whether a step moves whole rows, and so does to B what it does to the weight."""
    if isinstance(step, Only):
        return _moves_rows(step.step)
    return isinstance(step, (Split, Concat, Reorder, Rows)) and step.axis == 0


def _of_ranks(step: Step, factor: Factor, ranks: int) -> Step:
    """Returns the step for rows that each rank of tensor parallelism has apart."""
    if ranks == 1 or not _is_split(factor) or not isinstance(step, Split):
        return step
    return replace(step, parts=tuple(f"({p}) / {ranks}" for p in step.parts), groups=str(ranks))


def _is_split(factor: Factor) -> bool:
    """Returns whether tensor parallelism splits gate and up of a module; of experts it does not."""
    return factor.module.endswith(_FC1) and ".experts." not in factor.module


def _count_ranks(
    checkpoint: OpenedCheckpoint, foreign: ForeignAdapter, entries: Mapping[Fqn, TensorEntry]
) -> int:
    """Returns over how many ranks the rows of gate and up are split one after the other."""
    if foreign.form != PEFT:
        return 1
    for name, factor in foreign.factors.items():
        if factor.part != LORA_B or not _is_split(factor):
            continue
        chunks, rows = entries[name].chunks, len(entries[name].shape) - 2
        count = len(np.unique(chunks.offsets[chunks.elements() > 0][:, rows]))
        known = dict(checkpoint.index.run.mesh).get("tensor", 1)
        if count != known:
            raise RefusedError(
                f"tensor {name!r} is stored in {count} parts, and the arguments of the run say"
                f" {known} ranks of tensor parallelism, so that the order of its rows is not known",
                where=checkpoint.path,
                hint=foreign.own_tool,
            )
        return known
    return 1
