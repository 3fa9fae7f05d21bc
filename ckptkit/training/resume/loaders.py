"""Dataloaders that other numbers of ranks resume.

A loader may have `merge_states(states)`, which returns one state for those of all ranks, and
`split_state(state, rank, world_size)`, which returns that of one rank. Those of torchdata and of
accelerate get them where ranks take turns in one order, so that all that is known is a count.

Source: `torchdata.stateful_dataloader.stateful_dataloader` of torchdata 0.11;
torch/utils/data/distributed.py; `accelerate.data_loader.BatchSamplerShard` of 1.15.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import DistributedSampler, IterableDataset

from ckptkit.core.text import counted
from ckptkit.training.state.collect import split_batches_of

logger = logging.getLogger(__name__)

_BATCHES, _SAMPLER, _SAMPLES = "_num_yielded", "_sampler_iter_state", "samples_yielded"
_SAMPLER_BATCHES = "_sampler_iter_yielded"


class Mergeable(Protocol):
    """What a loader offers whose ranks may be others."""

    def merge_states(self, states: Sequence[Any]) -> Any: ...
    def split_state(self, state: Any, rank: int, world_size: int) -> Any: ...


def mergeable(loader: Any, world_size: int, *, was_split: bool | None) -> Mergeable | None:
    """Returns what merges and splits the states of a loader; None where nothing does.

    `was_split` is what `split_batches_of` was of the saved loader; False of one rank.
    """
    if all(callable(getattr(loader, name, None)) for name in ("merge_states", "split_state")):
        found: Mergeable = loader
        return found
    is_split = split_batches_of(loader, world_size)
    if is_split is None and world_size == 1 and _is_of_accelerate(loader):
        is_split = was_split  # of one rank, where it makes no difference
    elif is_split is None and _has_distributed_sampler(loader, world_size):
        is_split = False
    if is_split is None or (is_split and was_split is None):
        return None
    return SharedOrder(is_split=is_split, was_split=bool(was_split))


class SharedOrder:
    """States of a loader of torchdata whose ranks share one order of the data.

    Ranks take turns with batches; or, where batches are split, all have a part of each.
    """

    def __init__(self, *, is_split: bool, was_split: bool) -> None:
        self._is_split, self._was_split = is_split, was_split

    def merge_states(self, states: Sequence[Any]) -> Any:
        """Returns one state; None where they are more than one count."""
        if not all(map(_is_count, states)) or states.count(states[0]) < len(states):
            return None
        return {"state": states[0], "ranks": len(states)}

    def split_state(self, state: Any, rank: int, world_size: int) -> Any:
        """Returns the state of a rank that goes on where all of them were together."""
        old, ranks = state["state"], state["ranks"]
        total = old[_BATCHES] * (1 if self._was_split else ranks)
        had, left = divmod(total, 1 if self._is_split else world_size)
        if left and rank == 0:
            logger.warning(
                "dataloader: %s had taken %d batches in all, no multiple of %d: the last %s",
                *(counted(ranks, "rank"), total, world_size),
                "batch is repeated" if left == 1 else f"{left} batches are repeated",
            )
        new = {**old, _BATCHES: had, _SAMPLER_BATCHES: had}
        sampler = old[_SAMPLER]
        if sampler is not None:
            samples = sampler[_SAMPLES] // old[_BATCHES] * had if old[_BATCHES] else 0
            inner = {key: {"yielded": samples} for key in sampler if key != _SAMPLES}
            new[_SAMPLER] = {_SAMPLES: samples, **inner}
        return new


def _is_count(state: Any) -> bool:
    """Returns whether a state of torchdata has nothing but how many batches were taken."""
    if not isinstance(state, Mapping) or state.get("_iterator_finished", True):
        return False
    batches, sampler = state.get(_BATCHES), state.get(_SAMPLER)
    if type(batches) is not int or state.get(_SAMPLER_BATCHES) != batches:
        return False
    if any(state.get(k) is not None for k in ("fetcher_state", "dataset_state")):
        return False
    if sampler is None:
        return True
    samples = sampler.get(_SAMPLES)
    rest = [item for key, item in sampler.items() if key != _SAMPLES]
    if type(samples) is not int or any(item != {"yielded": samples} for item in rest):
        return False
    return samples == 0 if not batches else samples % batches == 0


def _is_of_accelerate(loader: Any) -> bool:
    """Returns whether accelerate has prepared a loader whose order is one of batches alone.

    A sampler of torchdata has a state of its own, which is not known from a count.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    has_state = hasattr(batches, "state_dict") or type(batches).__module__.startswith("torchdata")
    is_indexed = not isinstance(getattr(loader, "dataset", None), IterableDataset)
    return type(loader).__name__ == "DataLoaderShard" and is_indexed and not has_state


def _has_distributed_sampler(loader: Any, world_size: int) -> bool:
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas == world_size


def batches_of(state: Any) -> int | None:
    """Returns how many batches a rank had taken, None where its state does not say so."""
    if not isinstance(state, Mapping):
        return None
    snapshot = state.get("_snapshot")
    parts = (
        (state.get(_BATCHES),)
        if snapshot is None
        else (snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot"))
    )
    return sum(parts) if all(type(part) is int for part in parts) else None


def describe_restored(state: Any, before: int, now: int) -> str:
    """Returns what is repeated or skipped if all ranks go on at one place that others had."""
    batches = batches_of(state)
    if not batches or before == now or state.get("_iterator_finished"):
        return ""
    what = "repeated" if now < before else "skipped"
    return (
        f"{counted(before, 'rank')} had taken {batches:,} batches each, and each of {now} goes on"
        f" after as many: if ranks share the data, {abs(before - now) * batches:,} batches are"
        f" {what}"
    )


def describe_afresh(states: Sequence[Any]) -> str:
    """Returns what is repeated if a loader starts from the beginning."""
    counts = [batches_of(state) for state in states]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or not sum(known):
        return ""
    return f", and the {sum(known):,} batches that they had taken in all are repeated"
