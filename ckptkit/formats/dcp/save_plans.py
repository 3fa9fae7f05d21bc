"""The save plans of all ranks, which Megatron-Core adds to `.metadata`, against its tables.

Each rank plans items, one for each piece of a tensor that it stores, and one for each Python
object. Rank 0 makes the tables from all plans and keeps the plans, so that a later save can use
them again. A piece that several ranks plan is stored once. Objects, and the sizes of pieces, are
not compared.

Source: megatron/core/dist_checkpointing/strategies/state_dict_saver.py (`all_local_plans`),
strategies/torch.py (`MCoreSavePlan`, up to core 0.15), Megatron-Core 0.8 to 0.16;
torch/distributed/checkpoint/planner.py, torch 2.1 to 2.14.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

import numpy as np

from ckptkit.core.errors import FormatError
from ckptkit.core.geometry import distinct
from ckptkit.formats.dcp.join import Location, TensorRows, fields_of
from ckptkit.formats.dcp.shortcuts import (
    INDEX,
    ITEM,
    PLANNER,
    Ints,
    PlanRun,
    RunValues,
    is_size,
)
from ckptkit.formats.pickle.machine import Global, InertObject

PLANS = (
    Global(PLANNER, "SavePlan"),
    Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
)
_UNKNOWN = -1
_HINT = "'.metadata' was changed, or put together from two saves; take another copy of it"


class SavePlans:
    """Compares plans with the chunks of the tables; both are taken as sets of pieces."""

    def __init__(self, values: RunValues, numbers: dict[str, int], where: Location) -> None:
        self.values = values
        self.numbers = numbers
        self.where = where
        self.name, self.offset = array("q"), array("q")

    def compare(self, plans: object, rows: TensorRows) -> None:
        """Refuses plans that have another piece than the tables, or lack one of theirs."""
        self._read(plans)
        places: dict[tuple[int, ...], int] = {}
        place = np.array(
            [places.setdefault(size, len(places)) for size in self.values.sizes], np.int64
        )
        keys = np.repeat(np.array(rows.numbers, np.int64), np.array(rows.counts, np.int64))
        stored = distinct(keys * len(places) + place[np.frombuffer(rows.offset, np.int32)])
        offsets = np.frombuffer(self.offset, np.int64)
        planned = distinct(self._planned_keys() * len(places) + place[offsets])
        differing = np.setxor1d(planned, stored, assume_unique=True)
        if len(differing):
            raise self._error(int(differing[0]), planned, stored, list(places))

    def _error(
        self, piece: int, planned: Ints, stored: Ints, places: list[tuple[int, ...]]
    ) -> FormatError:
        number, at = divmod(piece, len(places))
        there = "the plans only" if np.isin(piece, planned) else "the tables only"
        return FormatError(
            f"the save plans of the ranks have {len(planned):,} pieces of tensors, the tables"
            f" {len(stored):,}; the piece at {list(places[at])} is in {there}",
            where=self.where.tensor(list(self.numbers)[number]).text,
            hint=_HINT,
        )

    def _planned_keys(self) -> Ints:
        """Returns the number of the tensor of each planned piece."""
        texts = self.values.texts
        number = np.array([self.numbers.get(text, _UNKNOWN) for text in texts], np.int64)
        names = np.frombuffer(self.name, np.int64)
        keys = number[names]
        if (keys == _UNKNOWN).any():
            name = texts[names[np.argmax(keys == _UNKNOWN)]]
            raise self.where.tensor(name).error(
                "a save plan has it, but the index does not name it"
            )
        return keys

    def _read(self, plans: object) -> None:
        if not isinstance(plans, list):
            raise self.where.error("'all_local_plans' is not a list")
        seen: set[int] = set()
        for plan in plans:
            is_plan = isinstance(plan, InertObject) and plan.cls.name in {p.name for p in PLANS}
            cls = plan.cls if is_plan else PLANS[0]
            items = fields_of(plan, cls, self.where).get("items")
            # A list that two plans shared would be walked once for each of them.
            if not isinstance(items, list) or id(items) in seen:
                raise self.where.error("items are not a list that only this save plan has")
            seen.add(id(items))
            for item in items:
                if isinstance(item, PlanRun):
                    self.name.frombytes(item.fqn.tobytes())
                    self.offset.frombytes(item.offset.tobytes())
                else:
                    self._add(fields_of(item, ITEM, self.where))
            items.clear()

    def _add(self, item: dict[str, Any]) -> None:
        if item.get("tensor_data") is None:
            return
        index = fields_of(item.get("index"), INDEX, self.where)
        name, offset = index.get("fqn"), index.get("offset")
        if not isinstance(name, str):
            raise self.where.error("name of a planned piece is not a string")
        if not is_size(offset):
            raise self.where.error("offset of a planned piece is not a short tuple of integers")
        self.name.append(len(self.values.texts))
        self.values.texts.append(name)
        self.offset.append(len(self.values.sizes))
        self.values.sizes.append(cast("tuple[int, ...]", offset))
