"""Which of the adapters in a checkpoint is meant."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.adapters.config import PEFT_PREFIX
from ckptkit.adapters.dialects import DEFAULT, Sorted, sort_entries
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    FormatError,
    IncompleteCheckpointError,
    RefusedError,
)
from ckptkit.core.index import Fqn, TensorEntry, TensorIndex
from ckptkit.formats.discovery import is_optimizer_folder, is_unit_folder
from ckptkit.pipeline.opening import Opened
from ckptkit.pipeline.source_places import absolute
from ckptkit.planning.selection import model_trees

_FACTOR = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B)\.")
_BASE_UNIT = "base_model_"  # where the layout of the Trainer keeps the base of a PEFT model


@dataclass(frozen=True, slots=True)
class Choice:
    """One adapter of a checkpoint.

    Attributes:
        name: What the run called it; "default" where nothing tells.
        tree: The state dict that holds it.
        is_named: Whether the name is known and not taken for granted.
    """

    name: str
    tree: str
    is_named: bool


def sort_trees(checkpoint: Opened, *, keep_module: bool = False) -> dict[str, Sorted]:
    """Tells adapters from bases in every model of a checkpoint.

    Raises:
        CannotPlanError: If there is no model of the name that was selected.
        FormatError: If two tensors have one name when wrappers are cut out.
        UnsupportedError: If an adapter is of a method that is not modelled.
    """
    index = checkpoint.index
    trees = model_trees(index)
    if checkpoint.select is not None:
        if checkpoint.select not in trees:
            raise CannotPlanError(
                f"holds no model {checkpoint.select!r}; found {', '.join(map(repr, trees))}",
                where=checkpoint.path,
                hint="leave --select out, or see `ckptkit inspect` for the names",
            )
        trees = [checkpoint.select]
    by_tree: dict[str, list[TensorEntry]] = {tree: [] for tree in trees}
    for entry in index.of_part("model"):
        if entry.tree in by_tree:
            by_tree[entry.tree].append(entry)
    return {tree: _sorted(entries, keep_module=keep_module) for tree, entries in by_tree.items()}


def _sorted(entries: Sequence[TensorEntry], *, keep_module: bool) -> Sorted:
    """Sorts tensors; a `module` that PEFT wrote, or that tells two of them apart, is no wrapper."""
    try:
        found = sort_entries(entries, keep_module=keep_module)
    except FormatError:
        if keep_module:
            raise
        return sort_entries(entries, keep_module=True)
    is_file = not found.live and all(PEFT_PREFIX in entry.name for entry in entries)
    return sort_entries(entries, keep_module=True) if found.cut_module and is_file else found


def choose_adapter(
    checkpoint: Opened,
    trees: Mapping[str, Sorted],
    recorded: Sequence[str],
    wanted: str | None,
    *,
    may_be_empty: bool = False,
) -> Choice:
    """Returns the adapter that is meant.

    Args:
        checkpoint: The checkpoint.
        trees: Its models, as `sort_trees` returns them.
        recorded: Names of adapters that the run recorded.
        wanted: The name that the user gave, or None.
        may_be_empty: Whether an adapter that was saved without a tensor is taken for one.

    Raises:
        AmbiguousSourceError: If there are several and none was named.
        CannotPlanError: If there is none of that name.
        IncompleteCheckpointError: If an adapter was to be saved, and none was.
        RefusedError: If nothing in the checkpoint was trained with PEFT.
    """  # noqa: DOC501  private functions raise some of them
    found = list(adapters_in(trees, recorded))
    if not found and may_be_empty and was_saved_empty(checkpoint):
        return Choice(wanted or next(iter(recorded), DEFAULT), "", is_named=False)
    if not found:
        raise _nothing_found(checkpoint)
    if wanted is not None:
        named = [one for one in found if one.name == wanted]
        if not named and len(found) == 1 and not found[0].is_named:
            return Choice(wanted, found[0].tree, is_named=False)
        found = named or found
        if not named:
            raise CannotPlanError(
                f"holds no adapter {wanted!r}; found {_listed(found)}",
                where=checkpoint.path,
                hint=f"pass --adapter {found[0].name}",
            )
    if len(found) == 1:
        return found[0]
    raise _several(found, checkpoint)


def _several(found: Sequence[Choice], checkpoint: Opened) -> AmbiguousSourceError:
    if len({one.name for one in found}) == 1:
        return AmbiguousSourceError(
            f"{len(found)} models have an adapter: {', '.join(repr(one.tree) for one in found)}",
            where=checkpoint.path,
            hint=f"choose one with --select {found[0].tree}",
        )
    holders = list(dict.fromkeys(one.tree for one in found))
    several = len(holders) > 1
    within = f", in {len(holders)} models: {', '.join(map(repr, holders))}" if several else ""
    selected = f" and --select {found[0].tree}" if several else ""
    return AmbiguousSourceError(
        f"holds {len({one.name for one in found})} adapters: {_listed(found)}{within}",
        where=checkpoint.path,
        hint=f"choose one with --adapter {found[0].name}{selected}",
    )


def base_of(tree: str, trees: Mapping[str, Sorted]) -> Mapping[Fqn, TensorEntry]:
    """Returns what a checkpoint has of the base of a tree's adapter, names as they are."""
    number = tree.rstrip("/").rpartition("_")[2]
    others = [
        found.rest
        for other, found in trees.items()
        if other != tree and posixpath.basename(other) == f"{_BASE_UNIT}{number}"
    ]
    return others[0] if others else trees[tree].rest


def adapters_in(trees: Mapping[str, Sorted], recorded: Sequence[str]) -> list[Choice]:
    """Returns all adapters of a checkpoint; arguments as for `choose_adapter`."""
    live = [Choice(name, tree, is_named=True) for tree, one in trees.items() for name in one.live]
    taken = {one.name for one in live}
    found = [
        choice
        for tree, one in trees.items()
        if one.stripped
        for choice in _unnamed(tree, [name for name in recorded if name not in taken])
    ]
    return [*found, *live]


def _unnamed(tree: str, left: Sequence[str]) -> list[Choice]:
    """Returns what an adapter may be called whose tensors do not tell: one name at best.

    Args:
        tree: Its state dict; a folder of PEFT's has the name of its adapter.
        left: Names that the run recorded, and that no other tensors have.
    """
    folder = posixpath.basename(tree)
    if folder and "." not in folder and not is_unit_folder(folder):
        return [Choice(folder, tree, is_named=True)]
    if left:
        return [Choice(name, tree, is_named=True) for name in left]
    return [Choice(DEFAULT, tree, is_named=False)]


def _listed(choices: Sequence[Choice]) -> str:
    return ", ".join(dict.fromkeys(repr(one.name) for one in choices))


def was_saved_empty(checkpoint: Opened) -> bool:
    """Tells whether an adapter may have been saved there that had no tensor."""
    holds_model = next(iter(checkpoint.index.of_part("model")), None) is not None
    return not holds_model and not all(map(is_optimizer_folder, _folders(checkpoint)))


def _nothing_found(checkpoint: Opened) -> RefusedError | IncompleteCheckpointError:
    index = checkpoint.index
    moments = _moments(index)
    count = sum(1 for _ in index.of_part("model"))
    if not count and all(map(is_optimizer_folder, _folders(checkpoint))):
        return IncompleteCheckpointError(
            "holds the state of an optimizer alone, which does not tell the values of an adapter",
            where=checkpoint.path,
            hint="pass the folder of the whole step, without --select; if nothing else lies there,"
            " take another checkpoint",
        )
    if moments and not count:
        return IncompleteCheckpointError(
            "the adapter was saved without a single tensor; only the optimizer's moments of"
            f" {moments:,} of its tensors are left, which do not tell their values",
            where=checkpoint.path,
            hint="PEFT 0.21 saves empty adapters under FSDP1: train with FSDP2, with PEFT 0.20,"
            " or with ckptkit's hooks, and take a checkpoint from there; --allow-untrained takes it"
            " as an adapter that changes nothing",
        )
    if not count:
        return IncompleteCheckpointError(
            "holds no model tensor at all, and so no adapter",
            where=checkpoint.path,
            hint="the save wrote an empty adapter; take another checkpoint, or pass"
            " --allow-untrained to take it as an adapter that changes nothing",
        )
    return RefusedError(
        f"holds nothing that PEFT trained: none of {count:,} tensors is an adapter's",
        where=checkpoint.path,
        hint="`ckptkit consolidate` writes whole models",
    )


def _folders(checkpoint: Opened) -> list[str]:
    """Returns the names of the folders that a checkpoint was read from."""
    root = absolute(checkpoint.location)
    paths = (posixpath.join(root, unit.candidate.folder) for unit in checkpoint.units)
    return [posixpath.basename(path.rstrip("/")) for path in paths]


def _moments(index: TensorIndex) -> int:
    """Counts the factors that an optimizer has moments of."""
    named = {
        (match.string[: match.start()], match[2])
        for entry in index.of_part("optimizer")
        if (match := _FACTOR.search(entry.key)) is not None
    }
    return len(named)
