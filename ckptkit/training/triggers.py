"""When a run is saved without anybody asking: every so many steps, or every so often."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from ckptkit.core.errors import UsageError

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TEXT = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")
_HINT = 'pass a number of steps such as 500, or a time such as "30min" or "2h"'


@dataclass(frozen=True, slots=True)
class Interval:
    """A distance between saves, in steps, in time, or none.

    Attributes:
        steps: Steps that are divisible by this are saved.
        seconds: The time after a save until the next.
    """

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, every: int | str | timedelta | None) -> Interval:
        """Reads an interval as users write it.

        Args:
            every: Steps (`500` or `"500"`), a time (`"90s"`, `"30min"`, `"2h"`, `"1d"` or a
                `timedelta`), or None for no interval.

        Returns:
            The interval.

        Raises:
            UsageError: If it is none of these, or not positive.

        >>> Interval.parse("1.5h")
        Interval(steps=None, seconds=5400.0)
        """
        if every is None:
            return cls()
        if isinstance(every, timedelta):
            return cls(seconds=_positive(every.total_seconds(), every))
        if isinstance(every, int) and not isinstance(every, bool):
            return cls(steps=int(_positive(every, every)))
        return cls._parse_text(every)

    @classmethod
    def _parse_text(cls, every: object) -> Interval:
        match = _TEXT.fullmatch(every) if isinstance(every, str) else None
        unit = match[2].lower() if match else ""
        if match is None or (unit and unit not in _SECONDS) or (not unit and "." in match[1]):
            raise UsageError(f"{every!r} is no interval", where="every", hint=_HINT)
        if not unit:
            return cls(steps=int(_positive(int(match[1]), every)))
        return cls(seconds=_positive(float(match[1]) * _SECONDS[unit], every))

    def due_at_step(self, step: int) -> bool:
        """Tells whether the step is one that is always saved; step 0 never is."""
        return self.steps is not None and step > 0 and step % self.steps == 0


def _positive(value: float, every: object) -> float:
    if value <= 0:
        raise UsageError(f"{every!r} is not more than 0", where="every", hint=_HINT)
    return value
