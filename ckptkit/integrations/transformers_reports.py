"""What saves cost, told to the Trainer's callbacks that draw curves: TensorBoard and others."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from ckptkit.integrations.scalars import values_of
from ckptkit.training.handle import SaveReport

_REPORTERS = "transformers.integrations."
_COUNTING = frozenset({"DVCLiveCallback"})  # which take each call for a step of training


class Reports:
    """Reports of saves, on their way from the thread that writes to the one that trains.

    Callbacks are made to be called by the latter alone.
    """

    def __init__(self) -> None:
        self._waiting: deque[SaveReport] = deque()

    def take(self, report: SaveReport) -> None:
        """Keeps a report until somebody calls `tell`; may be called in any thread."""
        self._waiting.append(report)

    def tell(self, trainer: Any) -> None:
        """Has what is kept written at the steps that were saved, as `train/ckptkit/…`."""
        while self._waiting:
            report = self._waiting.popleft()
            state = copy.copy(trainer.state)
            state.global_step = report.step
            values = {f"ckptkit/{name}": value for name, value in values_of(report).items()}
            for callback in _reporters(trainer):
                callback.on_log(
                    trainer.args, state, trainer.control, model=trainer.model, logs=dict(values)
                )


def _reporters(trainer: Any) -> Iterator[Any]:
    """Yields what `report_to` names, and what was made from it."""
    for callback in trainer.callback_handler.callbacks:
        kinds = type(callback).__mro__
        is_one = any(kind.__module__.startswith(_REPORTERS) for kind in kinds)
        if is_one and _COUNTING.isdisjoint(kind.__name__ for kind in kinds):
            yield callback
