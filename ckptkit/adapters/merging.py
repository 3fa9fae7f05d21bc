"""Several adapters, one base: what is asked for, and what the changes of all of them come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ckptkit.adapters.changes import Change, LowRank, Replaced, Rows, Shift, is_frozen, tensors_of
from ckptkit.adapters.generations import NORM_OF_UNMERGED, version_of
from ckptkit.core.errors import AdapterError, RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.planning.requests import DEFAULT_MAX_FILE_BYTES, check_choice, choose_dtype

MergeDType = Literal["keep", "float32", "bfloat16", "float16"]
QloraBase = Literal["dequantized", "original"]
MergeNames = Literal["auto", "live"]
NormOf = Literal["base", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRequest:
    """What a merged model should hold.

    Attributes:
        dtype: The element type of floating tensors, or `keep` for that of the base.
        max_file_bytes: Bytes of tensor data after which a new weight file is begun.
        match_peft: Whether to round where PEFT's `merge_and_unload` rounds, instead of once.
        qlora_base: What an adapter of a packed base is merged onto; None where nobody said.
        double_quant: Whether the scales of packed weights were quantized too, where nothing
            beside the weights tells; None where nobody said.
        allow_other_base: Whether a base that is not the recorded one is taken all the same.
        allow_code: Whether `*.py` files and `auto_map` entries are copied.
        names: `auto` refuses what would not load as the model of the configuration; `live`
            compares nothing.
        report: Whether norms are measured, which reads the changed weights once more.
    """

    dtype: MergeDType = "keep"
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    match_peft: bool = False
    qlora_base: QloraBase | None = None
    double_quant: bool | None = None
    allow_other_base: bool = False
    allow_code: bool = False
    names: MergeNames = "auto"
    report: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", choose_dtype(self.dtype, get_args(MergeDType)))
        check_choice("--names", self.names, get_args(MergeNames))
        if self.qlora_base is not None:
            check_choice("--qlora-base", self.qlora_base, get_args(QloraBase))

    def changed(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, as JSON values."""
        default = MergeRequest()
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(default, field.name)
        }


def combine(
    adapters: Sequence[Sequence[Change]], weights: Sequence[float]
) -> dict[Fqn, list[Change]]:
    """Puts the changes of all adapters together, in order.

    Args:
        adapters: The changes of each adapter.
        weights: What each adapter's low-rank updates were multiplied by.

    Returns:
        The changes of every tensor that changes.

    Raises:
        RefusedError: If two changes of one tensor have no defined sum.
    """
    combined: dict[Fqn, list[Change]] = {}
    for changes, weight in zip(adapters, weights, strict=True):
        for change in changes:
            if weight != 1 and isinstance(change, (Rows, Replaced)) and not is_frozen(change):
                raise RefusedError(
                    f"the adapter replaces {change.weight!r}, which a weight of {weight:g} does"
                    " not apply to",
                    where=change.source.where,
                    hint="give adapters that train whole modules or tokens the weight 1",
                )
            combined.setdefault(change.weight, []).append(change)
    for found in combined.values():
        _refuse_undefined(found)
        # What a LoRA was trained upon comes first, whichever adapter brought it.
        found.sort(key=lambda change: not is_frozen(change))
    return combined


def _is_bias_of_one_adapter(whole: Replaced, others: Sequence[Change]) -> bool:
    """Tells whether a trained bias is replaced, and LoRA's own bias of that adapter added."""
    return all(isinstance(c, Shift) and c.source == whole.source for c in others)


def _refuse_undefined(changes: Sequence[Change]) -> None:
    whole = [c for c in changes if isinstance(c, Replaced) and not c.frozen]
    rows = [c for c in changes if isinstance(c, Rows)]
    others = [c for c in changes if isinstance(c, (LowRank, Shift))]
    if len(whole) == 1 and not rows and _is_bias_of_one_adapter(whole[0], others):
        return
    if whole and (len(whole) > 1 or rows or others):
        other = next(c for c in changes if c is not whole[0])
        raise RefusedError(
            f"{whole[0].weight!r} is replaced by {whole[0].source.where} and changed by"
            f" {other.source.where} too, so one of them would be lost",
            where=f"tensor {whole[0].weight!r}",
            hint="merge only one adapter that trains this module",
        )
    if rows and others:
        raise RefusedError(
            f"{rows[0].weight!r} has trained tokens and a LoRA, of which PEFT defines no sum",
            where=rows[0].source.where,
            hint="merge the adapters with PEFT",
        )
    seen: set[int] = set()
    for change in rows:
        if seen & set(change.indices):
            raise RefusedError(
                f"two adapters train the row {min(seen & set(change.indices))} of"
                f" {change.weight!r}, so one of them would be lost",
                where=change.source.where,
                hint="merge only one adapter that trains this token",
            )
        seen |= set(change.indices)


def check_used_once(
    tensors: Mapping[Fqn, TensorEntry], changes: Iterable[Change], *, where: str
) -> None:
    """Checks that every tensor of an adapter is used by exactly one of its changes.

    Raises:
        AdapterError: If one is not used, or twice.
    """
    uses = dict.fromkeys((entry.key for entry in tensors.values()), 0)
    for change in changes:
        for entry in tensors_of(change):
            uses[entry.key] = uses.get(entry.key, 0) + 1
    wrong = next((name for name, entry in tensors.items() if uses[entry.key] != 1), None)
    if wrong is not None:
        count = uses[tensors[wrong].key]
        raise AdapterError(
            f"tensor {wrong!r} of the adapter is used by {count} layers against 1",
            where=where,
            hint="the adapter was written by an unknown version of PEFT; merge it there",
        )


def norms_of(
    versions: Sequence[str | None], changes: Mapping[Fqn, Sequence[Change]]
) -> tuple[NormOf, str]:
    """Chooses of which weight DoRA takes norms where several adapters change one weight.

    Args:
        versions: Of the PEFT that wrote each adapter; None where its file does not say.
        changes: Of every tensor.

    Returns:
        `base` for the unmerged weight, as PEFT does from 0.21 on, `running` for the one that
        has the earlier adapters in it, as it did before; and what to tell the user, if it matters.
    """
    mattering = [
        found
        for updates in changes.values()
        if len(found := [change for change in updates if isinstance(change, LowRank)]) > 1
        and any(change.magnitude for change in found[1:])
    ]
    involved = {change.source.position for found in mattering for change in found}
    numbers = [version_of(versions[position]) for position in sorted(involved)]
    choice: NormOf = "base" if all(number >= NORM_OF_UNMERGED for number in numbers) else "running"
    if not mattering:
        return choice, ""
    rule = {
        "base": "of the unmerged weights, as PEFT does from 0.21 on",
        "running": "of the weights with the earlier adapters merged, as PEFT did before 0.21",
    }[choice]
    told = ", ".join(str(versions[position] or "no version") for position in sorted(involved))
    return choice, f"norms of DoRA are taken {rule}: the adapters were written by PEFT {told}"
