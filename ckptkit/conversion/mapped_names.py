"""The tensors of another framework under the names, and in the forms, of Transformers."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.names_on_disk import (
    NamedProducts,
    Specs,
    join_sources,
    make_disk_products,
    operand_of,
)
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError, FormatError, RefusedError, UsageError
from ckptkit.core.frameworks import BY_NAME, HYBRID_LAYERS, OPTIONS_OF, recognise_by_tensors
from ckptkit.core.index import ChunkTable, Fqn, Key, Shape, TensorEntry
from ckptkit.core.manifest import MAP_VERSION
from ckptkit.core.text import Aside, join_first, quote
from ckptkit.engine.kernels import (
    AddedOperand,
    ComputedOperand,
    OperandKernel,
    RearrangeKernel,
    StoredOperand,
)
from ckptkit.engine.reader import Origin, TensorReader, same_values
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    NamingRequest,
    find_run,
    find_whole,
)
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.dialects import BASE_LAYER, LORA_A, LORA_B
from ckptkit.lora.foreign import OF_TINKER, TINKER, Factor, ForeignAdapter, name_plainly
from ckptkit.name_maps.apply import Extent, MappedNames, apply_map, sizes_of
from ckptkit.name_maps.language import (
    NameMap,
    Rule,
    find_map,
    invert,
    load_map,
    parse_template,
    refuse_contradiction,
)
from ckptkit.name_maps.rule_steps import Step
from ckptkit.options import ConsolidateRequest, matches
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.plan import SOURCE, Compute, Product, TensorSpec
from ckptkit.plan.selection import select_model
from ckptkit.plan.weight_kinds import PEFT

_SHOWN = 3


class MappedModel(Struct, frozen=True):
    """A model whose names a map converts."""

    name_map: NameMap
    names: MappedNames  # what it makes of the model
    live: Specs  # element types and shapes of the source's tensors, by their names
    wrapper: str = ""  # what all names of the source begin with, which those of `live` do not

    @property
    def versions(self) -> Mapping[str, str]:
        """The map with its digest, as a manifest has it."""
        return {f"{MAP_VERSION}{self.name_map.name}": self.name_map.digest}

    @property
    def rules(self) -> Mapping[str, str]:
        """Where the rules of the map stand, by the templates of the names that they make."""
        return {name.text: rule.where for rule in self.name_map.rules for name in rule.targets}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user is to know of the conversion."""
        notes: list[str] = [Aside(f"names were converted by map {self.name_map.name!r}")]
        if self.wrapper:
            notes.append(Aside(f"all names begin with {self.wrapper!r}: written without it"))
        for name, (first, count) in self.names.padding.items():
            notes.append(f"rows {first:,} to {count - 1:,} of {quote(name)} are padding: left out")
        by_reason: dict[str, list[Fqn]] = {}
        for name, reason in self.names.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, left in by_reason.items():
            listed = join_first(map(quote, left), len(left), _SHOWN)
            notes.append(f"left out: {listed}: {reason}")
        return tuple(notes)

    def refuse_different(self, entries: Mapping[Fqn, TensorEntry], origin: Origin) -> None:
        """Refuses names that stand for one tensor of the source and have other bytes."""
        reader = TensorReader(origin)
        for second, first in self.names.same.items():
            one, other = entries[first], entries[second]
            is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
            if not is_alike or not same_values(reader, one, other):
                raise FormatError(
                    f"{quote(first)} and {quote(second)} are names of one tensor, and differ",
                    where=origin.source.location,
                    hint="leave the wrong one out with --exclude",
                )

    def convert(self, products: Sequence[Product]) -> NamedProducts:
        """Returns the tensors to be written."""
        names = HubNames("", {n: s for n, (_, s) in self.live.items()}, self.names.tensors)
        live = {product.spec.name: product for product in products}
        made, _ = make_disk_products(names, NamingRequest({}, None), live)
        for at, product in enumerate(made):
            change = self.names.changed.get(product.spec.name)
            if change is not None:
                operand = AddedOperand(operand_of(product), *change)
                made[at] = replace(product, body=OperandKernel(operand).compute())
        for name, shape in self.names.zeros.items():
            kernel = RearrangeKernel((), {}, has_padding=True)
            spec = TensorSpec(name, dtype_named("float32"), shape)
            made.append(Product(spec, Compute(kernel, ())))
        return NamedProducts(made, {}, self.notes, self.versions)

    def derive(self, entries: Mapping[Fqn, TensorEntry]) -> Iterator[TensorEntry]:
        """Yields the tensors of the target, made of those of the source; keys are their names.

        One that is a tensor of the source element for element keeps its key.
        """
        live = {name: shape for name, (_, shape) in self.live.items()}
        uses = Counter(
            source for tensor in self.names.tensors.values() for source in tensor.sources
        )
        for name, tensor in self.names.tensors.items():
            sources = [entries[source] for source in tensor.sources]
            first, change = sources[0], self.names.changed.get(name)
            is_alone = uses[first.name] == len(sources) and change is None
            if is_alone and find_whole(tensor, live) and first.shape == tensor.shape:
                yield replace(first, name=name, stored_names=(first.name,))
                continue
            run = find_run(tensor)
            made: StoredOperand | ComputedOperand
            if run is not None:
                made = StoredOperand(SOURCE, first.key, first.dtype, run[1])
            else:
                stored = [StoredOperand(SOURCE, entry.key, first.dtype) for entry in sources]
                made = join_sources(tensor, stored)
            yield TensorEntry(
                key=Key(name),
                key_path=(name,),
                name=name,
                tree=first.tree,
                part="model",
                dtype=first.dtype,
                shape=tensor.shape,
                chunks=ChunkTable.of((), len(tensor.shape)),
                derivation=made if change is None else AddedOperand(made, *change),
                stored_names=tensor.sources,
            )


def convert_checkpoint(
    checkpoint: OpenedCheckpoint, request: ConsolidateRequest, config: Mapping[str, Any] | None
) -> OpenedCheckpoint:
    """Returns a checkpoint whose model has the tensors that a map makes.

    Its index has the tensors of the target, each made of those of the source when it is read, and
    those of the source as tensors that belong to no model.
    """
    index, where, choice = checkpoint.index, checkpoint.path, request.map
    whole = replace(request, select=checkpoint.select)
    selected = select_model(index, whole, location=where, everything=True)
    entries = {entry.name: entry for entry in selected}
    framework = recognise_by_tensors(entries)
    if choice == "none" or (choice == "auto" and not framework):
        return checkpoint
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    is_filled = request.fill_from_base or request.fill_from is not None
    extent: Extent = "part" if is_filled else "model"
    mapped = map_names(choice, framework, config, checkpoint, tensors, request.exclude, extent)
    entries = {
        name: replace(entry, name=name)
        for entry in entries.values()
        for name in [Fqn(entry.name.removeprefix(mapped.wrapper))]
    }
    if mapped.names.same:
        same = {name for pair in mapped.names.same.items() for name in pair}
        refuse_problems(index, [entries[name] for name in same], where)
        origin = Origin(SOURCE, checkpoint.source, index)
        mapped.refuse_different(entries, origin)
    held = {entry.key: replace(entry, part="other") for entry in entries.values()}
    for entry in mapped.derive(entries):
        left = [name for name in entry.stored_names if matches(name, request.exclude)]
        rest = [name for name in entry.stored_names if name not in left]
        if left and rest:
            raise RefusedError(
                f"tensor {entry.name!r} is made of {rest[0]!r} and {left[0]!r}, and one of them is"
                " left out",
                where="--exclude",
                hint="leave both in or both out",
            )
        is_taken = entry.derivation is not None and entry.key in index.tensors
        key = Key(f"{entry.key} by --map") if is_taken else entry.key
        held[key] = replace(entry, key=key)
    return replace(
        checkpoint,
        index=replace(index, tensors={**index.tensors, **held}),
        notes=(*checkpoint.notes, *mapped.notes),
        maps=mapped.versions,
        mapped=mapped,
    )


def map_names(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    checkpoint: OpenedCheckpoint,
    tensors: Specs,
    exclude: tuple[str, ...] = (),
    extent: Extent = "model",
) -> MappedModel:
    """Converts the names of a model."""
    where, name_map = checkpoint.path, choose_map(choice, framework, config, checkpoint)
    wrapper = name_map.find_wrapper(tensors)
    tensors = {Fqn(name.removeprefix(wrapper)): spec for name, spec in tensors.items()}
    left = {
        name
        for name in tensors
        if matches(name, exclude) and (name_map.is_further(name) or not name_map.takes_any([name]))
    }
    kept = {name: spec for name, spec in tensors.items() if name not in left}
    known = {**dict(checkpoint.index.run.settings), **(config or {})}
    names = apply_map(name_map, known, kept, where=where, extent=extent)
    further = {name for pair in names.same.items() for name in pair if matches(name, exclude)}
    if further:
        kept = {name: spec for name, spec in kept.items() if name not in further}
        names = apply_map(name_map, known, kept, where=where, extent=extent)
    return MappedModel(name_map, names, tensors, wrapper)


def choose_map(
    choice: str, framework: str, config: Mapping[str, Any] | None, checkpoint: OpenedCheckpoint
) -> NameMap:
    """Returns the map for a model; arguments and errors as for `map_names`."""
    where, settings = checkpoint.path, dict(checkpoint.index.run.settings)
    name_map = (
        find_map(framework, config, where=where, settings=settings)
        if choice == "auto"
        else load_map(choice)
    )
    refuse_contradiction(name_map, settings, where=where)
    # Shapes would often fit a configuration of another model all the same, as with half as many
    # heads of twice the size.
    stated = dict(config or {})
    text = stated.get("text_config")
    stated |= text if isinstance(text, dict) else {}
    halved = settings.pop(HYBRID_LAYERS, None)
    if halved is not None:
        settings["num_hidden_layers"] = (halved + 1) // 2 if name_map.halves else halved
    for key, value in settings.items():
        other = stated.get(key)
        if other is not None and other != value:
            raise RefusedError(
                f"{key} is {value} in the checkpoint's own settings, {other!r} in the"
                " configuration",
                where=where,
                hint="name the folder of the model that was trained with --base",
            )
    return name_map


def map_for_framework(
    framework: str,
    choice: str,
    config: Mapping[str, Any] | None,
    products: Sequence[Product],
    *,
    where: str,
) -> MappedModel:
    """Maps tensors of Transformers to those of a framework, where stacked ones are in parts."""
    is_auto = choice == "auto"
    name_map = find_map(framework, config, where=where) if is_auto else load_map(choice)
    if name_map.source != framework:
        raise UsageError(
            f"has names of {name_map.source}; expected those of {framework}",
            where=f"--map {choice}",
            hint="name a map of the framework that --to names, or leave --map out",
        )
    inverse = invert(name_map)
    specs = {product.spec.name: (product.spec.dtype, product.spec.shape) for product in products}
    names = apply_map(inverse, config or {}, specs, where=where, in_parts=True)
    return MappedModel(inverse, names, specs)


_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_Parts = tuple[str | frozenset[int], ...]


class AppliedRule(Struct, frozen=True):
    """What one rule makes.

    Attributes:
        rule: The map and the position of the rule in it; empty for tensors that are left out.
        sources: Shapes of the tensors that it takes, by name; with padding.
        targets: Shapes of those that it makes, by name; none where the sources are left out.
        steps: What is done in between, in words.
        padding: Rows that are left out as padding, by the name of the source: the first of them,
            and the number of rows with them.
        left_out: Why the sources are left out; empty if they are not.
    """

    rule: str
    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]
    steps: tuple[str, ...] = ()
    padding: Mapping[str, tuple[int, int]] | None = None
    left_out: str = ""


class MapReport(Struct, frozen=True):
    """What a map makes of a checkpoint.

    Attributes:
        name: The map.
        digest: The start of the SHA-256 of its text, in hexadecimal.
        source: The framework whose names are converted.
        target: The framework whose names they get.
        rules: What each rule makes; rules that take nothing are left out.
    """

    name: str
    digest: str
    source: str
    target: str
    rules: tuple[AppliedRule, ...]


def report_map(
    choice: str,
    framework: str,
    config: Mapping[str, Any] | None,
    checkpoint: OpenedCheckpoint,
    tensors: Specs,
) -> MapReport:
    """Applies a map to the tensors of a checkpoint; see `map_names`."""
    mapped = map_names(choice, framework, config, checkpoint, tensors)
    name_map, names, live = mapped.name_map, mapped.names, mapped.live
    targets: dict[str, dict[Fqn, Shape]] = {}  # by the place of their rule
    for name, rule in names.made_by.items():
        targets.setdefault(rule.where, {})[name] = names.tensors[name].shape
    by_place = {rule.where: rule for rule in names.made_by.values()}
    rules = []
    for where, made in targets.items():
        sources = {source: None for name in made for source in names.tensors[name].sources}
        rules.append(
            AppliedRule(
                rule=where,
                sources={str(name): live[name][1] for name in sources},
                targets={str(name): shape for name, shape in made.items()},
                steps=tuple(step.describe() for step in by_place[where].steps),
                padding={str(n): rows for n, rows in names.padding.items() if n in sources},
            )
        )
    reasons: dict[str, dict[str, Shape]] = {}
    for name, reason in names.dropped.items():
        reasons.setdefault(reason, {})[str(name)] = live[name][1]
    rules += [AppliedRule("", left, {}, left_out=reason) for reason, left in reasons.items()]
    own = name_map.name, name_map.digest, name_map.source, name_map.target
    return MapReport(*own, tuple(rules))


def fold_names(names: Iterable[str]) -> list[str]:
    """Returns names that differ in numbers as one.

    >>> fold_names(["layers.0.w1", "layers.1.w1", "layers.2.w1", "norm"])
    ['layers.{0..2}.w1', 'norm']
    """
    rows: list[_Parts] = [
        tuple(frozenset({int(p)}) if i % 2 else p for i, p in enumerate(_NUMBER.split(name)))
        for name in names
    ]
    # From the last number to the first: what is not the same for all stays apart.
    for at in reversed(range(1, max(map(len, rows), default=0), 2)):
        found: dict[_Parts, set[int]] = {}
        for row in rows:
            part = row[at] if at < len(row) else frozenset()
            numbers = part if isinstance(part, frozenset) else frozenset()
            found.setdefault((*row[:at], "", *row[at + 1 :]) if numbers else row, set()).update(
                numbers
            )
        rows = [
            (*row[:at], frozenset(numbers), *row[at + 1 :]) if numbers else row
            for row, numbers in found.items()
        ]
    return ["".join(p if isinstance(p, str) else _range_text(sorted(p)) for p in r) for r in rows]


def _range_text(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text: one as it is, several as `{0..3}` or `{0,2..5}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    stops = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = [f"{a}" if a == b else f"{a}..{b}" for a, b in zip(starts, stops, strict=True)]
    return "{" + ",".join(runs) + "}"


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


class ConvertedAdapter(Struct, frozen=True):
    """A checkpoint whose adapter has the names of PEFT."""

    checkpoint: OpenedCheckpoint  # the tensors that were converted are of no model any more
    foreign: ForeignAdapter  # what the adapter was
    # By the path of each module, the framework's name of the module that it is of.
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
        with _hinting(foreign):
            name_map = choose_map("auto", foreign.framework, config, checkpoint)
        foreign, factors = _separate(checkpoint, foreign, factors, name_map, config)
        mapped = _map_factors(checkpoint, foreign, factors, name_map, config, extent)
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
        path = shlex.quote(converted.checkpoint.path)
        convert = (
            f" `ckptkit adapter convert {path} OUT --to peft --base ORG/NAME` writes factors for"
            " the parameters of all experts;"
        )
        raise RefusedError(
            f"{converted.foreign.title} has factors of {lost!r}, which is no module of Transformers"
            " 5 that PEFT could adapt",
            where=converted.checkpoint.path,
            hint="`ckptkit adapter merge` makes a model of the adapter and its base;"
            f"{convert if '.experts.' in lost else ''} {converted.foreign.own_tool}",
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
                    derivation=StoredOperand(SOURCE, entry.key, entry.dtype, start),
                    stored_names=(name,),
                )


# --- by a name map ---


def _map_factors(
    checkpoint: OpenedCheckpoint,
    foreign: ForeignAdapter,
    entries: Mapping[Fqn, TensorEntry],
    name_map: NameMap,
    config: Mapping[str, Any] | None,
    extent: Extent,
) -> MappedModel:
    where = checkpoint.path
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


def _separate(
    checkpoint: OpenedCheckpoint,
    foreign: ForeignAdapter,
    entries: dict[Fqn, TensorEntry],
    name_map: NameMap,
    config: Mapping[str, Any] | None,
) -> tuple[ForeignAdapter, dict[Fqn, TensorEntry]]:
    """Separates factors of several matrices; those that training left out have no part.

    Of A, the rank's rows of each matrix follow one another, of B the rows of the matrices.

    Source: `LoRAQKVLinear` in litgpt/lora.py, LitGPT 0.5.
    """
    joined = BY_NAME[foreign.framework].joined if foreign.framework in BY_NAME else {}
    factors, made = dict(foreign.factors), dict(entries)
    sizes, stated = sizes_of(name_map, config or {}), dict(checkpoint.index.run.settings)
    for name, factor in foreign.factors.items():
        options = next((o for module, o in joined.items() if factor.module.endswith(module)), ())
        other = Fqn(f"{factor.module}.{LORA_B if factor.part == LORA_A else LORA_A}")
        if not options or other not in entries:
            continue
        pair = entries[name], entries[other]
        a, b = pair if factor.part == LORA_A else pair[::-1]
        weight = Fqn(factor.module + _WEIGHT)
        split = next(
            (
                rule.steps[0]
                for rule in name_map.rules
                if rule.steps and any(t.match(weight) is not None for t in rule.sources)
                if len(rule.targets) == len(options)
            ),
            None,
        )
        rows = [] if split is None else [sizes.of(f"({p}) * {split.groups}") for p in split.parts]
        fits = [
            chosen
            for count in range(1, len(rows) + 1)
            for chosen in combinations(range(len(rows)), count)
            if [count * b.shape[-1], sum(rows[at] for at in chosen)] == [a.shape[0], b.shape[0]]
        ]
        if len(fits) > 1:
            fits = [
                c for c in fits if all(stated.get(o) == (i in c) for i, o in enumerate(options))
            ]
        if len(fits) != 1:
            raise RefusedError(
                f"tensor {quote(name)} has factors of some of {len(options)} matrices, and nothing"
                f" says which these are: not the shapes, and not {', '.join(options)} of the run"
                if rows
                else f"tensor {quote(name)} has factors of some of {len(options)} matrices, which"
                f" Transformers has in one that map {name_map.name!r} makes",
                where=checkpoint.path,
                hint=f"copy {OPTIONS_OF[foreign.framework]!r} of the run beside the adapter"
                if rows
                else foreign.own_tool,
            )
        entry, start = made.pop(name), 0
        del factors[name]
        for at in fits[0]:
            size = b.shape[-1] if factor.part == LORA_A else rows[at]
            part = _BRANCHES[0][at]
            own = Fqn(f"{name}.{part}")
            made[own] = replace(
                entry,
                name=own,
                shape=(size, *entry.shape[1:]),
                chunks=ChunkTable.of((), len(entry.shape)),
                derivation=StoredOperand(SOURCE, entry.key, entry.dtype, start),
                stored_names=(name,),
            )
            factors[own] = replace(factor, branch=part, ending=f"{factor.ending}.{part}")
            start += size * entry.shape[1]
    return replace(foreign, factors=factors), made


def _make_rule(rule: Rule, factor: Factor, ranks: int) -> Rule | None:
    """Returns the rule for a factor of the weight that a rule takes; None if there can be none."""
    if rule.drop:
        return replace(rule, zeros=(), beside=None)
    texts = [template.text for template in (*rule.sources, *rule.targets)]
    if len(rule.sources) != 1 or not all(text.endswith(_WEIGHT) for text in texts):
        return None
    targets, steps = rule.targets, rule.steps
    if ranks > 1 and _is_split(factor):  # each rank of tensor parallelism has its rows apart
        steps = tuple(
            replace(step, parts=tuple(f"({p}) / {ranks}" for p in step.parts), groups=str(ranks))
            if step.kind == "split"
            else step
            for step in steps
        )
    if not all(step.moves_rows for step in steps):
        return None
    if factor.branch:
        order = next((o for o in _BRANCHES if factor.branch in o), ())
        if len(order) != len(targets):
            return None
        targets, steps = (targets[order.index(factor.branch)],), ()
    elif factor.part == LORA_A:
        steps = (Step("repeat", rule.where, groups=str(len(targets))),)
    ending = f".{factor.part}.{factor.adapter}{_WEIGHT}"
    return replace(
        rule,
        sources=(parse_template(texts[0].removesuffix(_WEIGHT) + factor.ending),),
        targets=tuple(parse_template(t.text.removesuffix(_WEIGHT) + ending) for t in targets),
        steps=steps,
    )


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
