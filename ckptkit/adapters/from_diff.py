"""`ckptkit.adapter_from_diff`: the change that full training made, as a LoRA adapter.

The changed tensors are sorted into those that a LoRA can hold and those that it cannot.

Source: peft 0.21, `check_target_module_exists` in `tuners/tuners_utils.py` and `_set_trainable` in
`utils/other.py` for how modules are named; `lora/config.py` for the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptkit.adapters.base_identity import read_digests, select_evenly
from ckptkit.adapters.compare_models import (
    Approximation,
    ChangeReader,
    ComparedModels,
    ComparedTensor,
    approximate,
    open_models,
)
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import list_first
from ckptkit.engine.kernels import ConstantKernel
from ckptkit.engine.outcome import Listener, Started, ignore
from ckptkit.engine.reader import Origin
from ckptkit.engine.segment_reader import Inputs
from ckptkit.lora.adapter_files import layout_adapter_files, name_component
from ckptkit.lora.changes import find_model_types
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.inference import is_conv1d, is_saved
from ckptkit.lora.recorded_base import BaseRecord, identify_base
from ckptkit.options import FACTOR_DTYPES, Resources, choose_dtype, matches, positive_number
from ckptkit.plan.plan import (
    SOURCE,
    Compute,
    Copy,
    Plan,
    Product,
    TensorSpec,
)
from ckptkit.plan.vocabulary import is_embedding, is_head
from ckptkit.storage.places import PathLike, open_target

_CONFIG = "adapter_config.json"
_POOR = 0.9  # of the changes' energy: less is noted
_LISTED = 3


def make_diff_request(
    rank: int | str,
    dtype: str = FACTOR_DTYPES[0],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    full: Sequence[str] = (),
    select: str | None = None,
) -> DiffRequest:
    """Checks what was asked for."""
    number = positive_number(rank, option="--rank", example=16)
    dtype = choose_dtype(dtype, FACTOR_DTYPES)
    patterns = DiffPatterns(tuple(include), tuple(exclude), tuple(full))
    return DiffRequest(rank=number or 0, patterns=patterns, dtype=dtype, select=select)


class DiffRequest(Struct, frozen=True, kw_only=True):
    """Options of `adapter from-diff`.

    Attributes:
        rank: The rank of the factors, or the smaller side of a matrix if that is less.
        patterns: Which tensors are approximated, and which are kept whole.
        dtype: Element type of the factors.
        select: Which tuned model to use if there are several, or None.
    """

    rank: int
    patterns: DiffPatterns
    dtype: str
    select: str | None


def run_adapter_from_diff(
    tuned: PathLike,
    out: PathLike,
    request: DiffRequest,
    *,
    base: PathLike,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> Manifest:
    """Writes a LoRA adapter that approximates the change of full training.

    Returns:
        The manifest, with the error of each layer's factors.
    """
    check_destination(tuned, out, overwrite=overwrite, also=(base,))
    with (
        SingleProcess(open_target(out, overwrite=overwrite), listener) as strategy,
        ExitStack() as stack,
    ):
        sides = open_models(stack, tuned, base, request.select, request.patterns.exclude)
        listener(Started(sum(pair.tuned.size_bytes for pair in sides.pairs)))
        changes = _measured(sides, request, listener)
        planned = _Output(sides, changes, request, str(Path(base).absolute())).prepared(out)
        return write_output(planned, strategy, listener)


class _Changes(Struct):
    """The changes of a model.

    Attributes:
        approximated: Approximations by module.
        norms: Norms of other changes, by name of the tensor.
        unchanged: Modules that could be approximated and did not change.
    """

    approximated: dict[str, tuple[ComparedTensor, Approximation]] = field(default_factory=dict)
    norms: dict[Fqn, float] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)


def _measured(sides: ComparedModels, request: DiffRequest, listener: Listener) -> _Changes:
    """Reads both models once, and approximates the changes."""
    reader = ChangeReader(sides.tuned, sides.base, listener)
    types, patterns = find_model_types(sides.config), request.patterns
    dtype = dtype_named(request.dtype)
    changes = _Changes()
    for pair in sides.pairs:
        role = classify_tensor(pair.name, pair.tuned.shape, types)
        if pair.name in sides.parts:
            role = "whole"
        is_kept = matches(pair.name, patterns.full)
        if role == "whole" or is_kept or not patterns.approximates(pair.name):
            if norm := reader.norm(pair):
                changes.norms[pair.name] = norm
            continue
        change = reader.matrix(pair)
        if role == "transposed":
            change = change.T
        factors = approximate(change, request.rank, dtype, where=f"tensor {pair.name!r}")
        if factors is None:
            changes.unchanged.append(module_of(pair.name))
        else:
            changes.approximated[module_of(pair.name)] = pair, factors
    for origin in (sides.tuned, sides.base):
        origin.checksums.finish()
    return changes


class _Output:
    """Plans the files of an adapter, and reports their content."""

    def __init__(
        self, sides: ComparedModels, changes: _Changes, request: DiffRequest, base: str
    ) -> None:
        self._sides = sides
        self._changes = changes
        self._request = request
        self._base = base
        if not changes.approximated and not changes.norms:
            raise RefusedError(
                f"holds the same numbers as the base model in all {len(sides.pairs):,} tensors",
                where=sides.opened[0].path,
                hint="name the model after training, and as --base the one before it",
            )
        if not changes.approximated:
            largest = sorted(changes.norms, key=lambda name: -changes.norms[name])
            raise RefusedError(
                "no matrix of a linear layer that was asked for changed, only"
                f" {list_first(largest, _LISTED)}",
                where=sides.opened[0].path,
                hint="choose others with --include, or publish the model itself",
            )
        ranks = {module: factors.rank for module, (_, factors) in changes.approximated.items()}
        full = [n for n in changes.norms.keys() - sides.parts if matches(n, request.patterns.full)]
        names = [pair.name for pair in sides.pairs]
        self._content = plan_content(ranks, full, names, sides.tied)

    def prepared(self, out: PathLike) -> PlannedOutput:
        sides, opened = self._sides, self._sides.opened
        products, component = [*self._factors(), *self._copies()], name_component(sides.config)
        files = layout_adapter_files(products, self._config(), component)
        plan = Plan(files, {}, tuple(self._notes()))
        settings = choose_settings(Resources(), plan, sources=opened, out=out)
        origins = {}
        for origin in (sides.tuned, sides.base):
            # Opened again, so that copies are verified; chunks without checksums are kept.
            origins[origin.name] = Origin(origin.name, origin.source, origin.index)
            origins[origin.name].unverified |= origin.unverified
        read = sum(pair.tuned.size_bytes + pair.base.size_bytes for pair in sides.pairs)
        # Digests of a few weights of the base, with which a merge checks its base.
        changed = [pair for pair, _ in self._changes.approximated.values()]
        digested = dict(select_evenly({pair.name: pair.base for pair in changed}))
        record = BaseRecord(read_digests(sides.base, digested))
        return PlannedOutput(
            sources=opened,
            plan=plan,
            inputs=Inputs(origins, {}),
            settings=settings,
            estimate=estimate_plan(plan, settings, out, bytes_read=read),
            kind="adapter",
            options=self._options(),
            facts={"base": self._base, "difference": self._report(), **record.facts()},
        )

    def _factors(self) -> Iterator[Product]:
        dtype = dtype_named(self._request.dtype)
        for module, (pair, factors) in self._changes.approximated.items():
            reads = ((SOURCE, pair.tuned.key), (self._sides.base.name, pair.base.key))
            for name, factor in (("lora_A", factors.down), ("lora_B", factors.up)):
                spec = TensorSpec(Fqn(f"{PEFT_PREFIX}{module}.{name}.weight"), dtype, factor.shape)
                yield Product(spec, Compute(ConstantKernel(factor.reshape(-1)), reads))

    def _copies(self) -> Iterator[Product]:
        tensors = {pair.name: pair.tuned for pair in self._sides.pairs}
        tensors |= {t: tensors[s] for t, s in self._sides.tied.items() if t not in tensors}
        for name, entry in tensors.items():
            file_name = self._content.file_name(name)
            if file_name is not None:
                spec = TensorSpec(Fqn(file_name), entry.dtype, entry.shape)
                yield Product(spec, Copy(SOURCE, entry.key))

    def _config(self) -> dict[str, Any]:
        """Returns the content of `adapter_config.json`; every module is scaled by 1."""
        content, config = self._content, self._sides.config
        types = find_model_types(config)
        is_transposed = any(
            classify_tensor(pair.name, pair.tuned.shape, types) == "transposed"
            for pair, _ in self._changes.approximated.values()
        )
        identity = identify_base(self._base, config)
        rank = max(content.ranks.values())
        capped = {module: r for module, r in content.ranks.items() if r != rank}
        patterns: dict[str, int] = {}  # names that match the modules of one rank each
        for own in sorted(set(capped.values())):
            of_rank = {module for module, r in capped.items() if r == own}
            names = find_short_names(of_rank, content.ranks.keys())
            patterns |= dict.fromkeys(map(re.escape, names), own)
        listed = (config or {}).get("architectures")
        name = str(listed[0]) if isinstance(listed, Sequence) and listed else ""
        modules = {module_of(pair.name) for pair in self._sides.pairs}
        # Older versions do not know the option.
        tying = {"ensure_weight_tying": True} if content.is_tied else {}
        return {
            "auto_mapping": None,
            "base_model_name_or_path": identity.repository or self._base,
            "bias": "lora_only" if content.biased else "none",
            "fan_in_fan_out": is_transposed,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "modules_to_save": list(content.whole) or None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": patterns,
            "alpha_pattern": patterns,
            "revision": identity.commit or None,
            "target_modules": find_short_names(content.ranks.keys(), modules),
            "task_type": next((task for end, task in _TASKS.items() if name.endswith(end)), None),
            "use_dora": False,
            "use_rslora": False,
            **tying,
        }

    def _options(self) -> dict[str, Any]:
        request, patterns = self._request, self._request.patterns
        chosen = {
            "include": list(patterns.include),
            "exclude": list(patterns.exclude),
            "full": list(patterns.full),
            "select": request.select,
            "dtype": request.dtype if request.dtype != FACTOR_DTYPES[0] else None,
        }
        return {"rank": request.rank} | {name: value for name, value in chosen.items() if value}

    def _report(self) -> dict[str, Any]:
        approximations = [own for _, own in self._changes.approximated.values()]
        norms = self._changes.norms
        without = [name for name in norms if self._content.file_name(name) is None]
        lost = {name: norms[name] for name in sorted(without, key=lambda name: -norms[name])}
        change = _length(own.change for own in approximations)
        missed = _length(own.missed for own in approximations)
        everything = _length((change, *self._changes.norms.values()))
        return {
            "change": everything,
            "error": missed / change,
            "energy": max(0.0, 1 - (missed / change) ** 2),
            "error_with_lost": _length((missed, *lost.values())) / everything,
            "layers": {
                module: {
                    "shape": list(pair.tuned.shape),
                    "rank": own.rank,
                    "change": own.change,
                    "error": own.error,
                    "energy": own.energy,
                }
                for module, (pair, own) in self._changes.approximated.items()
            },
            "whole": {n: v for n, v in self._changes.norms.items() if n not in lost},
            "lost": lost,
            "unchanged": self._changes.unchanged,
            "left_out": list(self._sides.left_out),
        }

    def _notes(self) -> Iterator[str]:
        report = self._report()
        yield from self._sides.notes
        if self._sides.left_out:
            yield (
                "left out by --exclude and not compared, since one model lacks them or has another"
                f" shape: {list_first(list(self._sides.left_out), _LISTED)}"
            )
        if report["unchanged"]:
            yield (
                f"{len(report['unchanged']):,} of"
                f" {len(report['unchanged']) + len(report['layers']):,} matrices did not change and"
                f" have no factors: {list_first(report['unchanged'], _LISTED)}"
            )
        if report["energy"] < _POOR:
            yield (
                f"rank {self._request.rank} keeps {report['energy']:.1%} of the energy of the"
                f" changes (relative error {report['error']:.3g}); a larger --rank keeps more, and"
                " --report shows each layer"
            )
        if lost := report["lost"]:
            few = [f"{name!r} ({norm:.3g})" for name, norm in list(lost.items())[:_LISTED]]
            more = f" and {len(lost) - _LISTED:,} more" if len(lost) > _LISTED else ""
            yield (
                f"{len(lost):,} tensors changed that a LoRA has no factors for, and the adapter"
                f" LACKS these changes (norm): {', '.join(few)}{more}; pass --full GLOB to save"
                " their modules whole"
            )


def _length(norms: Iterator[float] | Sequence[float] | Any) -> float:
    return math.sqrt(math.fsum(norm * norm for norm in norms))


_MATRIX = 2
_WEIGHT, _BIAS = ".weight", ".bias"
# Modules with a matrix that no product of Linear's is: tables of rows, and routers, which
# Transformers has as classes of their own.
_TABLE = re.compile(
    r"(embed_(?!out$).*|.*embeddings?|.*_embed|wte|wpe|shared|tokens_embed|relative_attention_bias"
    r"|gate|router)"
)
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


class DiffPatterns(Struct, frozen=True):
    """Patterns of tensors by their form in the adapter.

    Attributes:
        include: Matrices to approximate; empty for all but heads.
        exclude: Names to leave out.
        full: Names that are kept whole, with the rest of their modules.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def approximates(self, name: str) -> bool:
        is_included = matches(name, self.include) if self.include else not is_head(name)
        return is_included and not matches(name, self.exclude)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def classify_tensor(name: str, shape: Shape, model_types: frozenset[str]) -> str:
    """Returns `linear` or `transposed` for the weight of a linear layer, else `whole`."""
    module = module_of(name)
    if len(shape) != _MATRIX or not name.endswith(_WEIGHT) or 0 in shape:
        return "whole"
    if is_embedding(name) or _TABLE.fullmatch(module.rpartition(".")[2]):
        return "whole"
    return "transposed" if is_conv1d(module, model_types) else "linear"


class AdapterContent(Struct, frozen=True):
    """The content of an adapter of a fine-tune.

    Attributes:
        ranks: The rank of each module that is approximated.
        biased: Approximated modules whose biases are kept.
        whole: Modules that are kept whole.
        is_tied: Whether some of these are tied to each other.
    """

    ranks: Mapping[str, int]
    biased: frozenset[str] = frozenset()
    whole: tuple[str, ...] = ()
    is_tied: bool = False

    def file_name(self, name: str) -> str | None:
        """Returns the name of a whole tensor in PEFT's files; None if it is not kept."""
        module = module_of(name)
        if any(module == whole or module.startswith(f"{whole}.") for whole in self.whole):
            return PEFT_PREFIX + name
        if module in self.biased and name.endswith(_BIAS):
            return f"{PEFT_PREFIX}{module}.base_layer{_BIAS}"
        return None


def plan_content(
    ranks: Mapping[str, int], full: Iterable[str], tensors: Collection[str], tied: Mapping[Fqn, Fqn]
) -> AdapterContent:
    """Decides how whole tensors are stored in an adapter.

    The bias of an approximated weight is saved as a bias; any other tensor with its module.

    Args:
        ranks: The rank of each module that is approximated.
        full: Names of tensors to keep.
        tensors: Names of all tensors of the model.
        tied: Names of tied tensors, with the names that they are tied to.
    """
    wanted = set(full)
    # A head that is tied to a replaced embedding would keep the old one; it is replaced too.
    ties = {target for target, source in tied.items() if source in wanted}
    wanted |= ties
    biased = {module_of(n) for n in wanted if n.endswith(_BIAS) and module_of(n) in ranks}
    whole = sorted({module_of(name) for name in wanted} - biased)
    for module in whole:
        others = {module_of(name) for name in tensors} - set(whole)
        meant = next((o for o in sorted(others) if is_saved([module], o)), None)
        if meant is not None or not module:
            raise RefusedError(
                f"module {module!r} cannot be saved whole: PEFT, which goes by the ends of names,"
                f" would match {meant!r} too",
                where="--full",
                hint="leave it out of --full, or match both with it",
            )
    return AdapterContent(ranks, frozenset(biased), tuple(whole), bool(ties))


def find_short_names(chosen: Collection[str], modules: Iterable[str]) -> list[str]:
    """Returns the shortest names by which PEFT finds these modules and no others.

    Numbers are not used: modules without tensors, which are unknown here, may have them too.
    `modules` is every module of the model that has a tensor.

    >>> find_short_names({"l.0.q", "l.1.q", "l.0.k"}, {"l.0.q", "l.1.q", "l.0.k", "l.1.k"})
    ['l.0.k', 'q']
    """
    ends: dict[str, set[str]] = {}
    for module in {*modules, *chosen}:
        parts = module.split(".")
        for stop, part in enumerate(parts, 1):
            ends.setdefault(part, set()).add(".".join(parts[:stop]))
    names = []
    for end, meant in ends.items():
        matched = meant & set(chosen)
        names += [end] if matched == meant and not end.isdecimal() else sorted(matched)
    return sorted(names)
