"""Data that is shipped as rows, each `[KEY, ..., VALUE]` in JSON on a line of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_row(path: Path, *key: str) -> Any:
    """Returns the value of a row, None where there is none.

    No other row is parsed: a conversion would hold what it never needs.
    """
    start = json.dumps(key)[:-1] + ", "
    with path.open(encoding="utf-8") as lines:
        return next((json.loads(line)[-1] for line in lines if line.startswith(start)), None)


def rows_to_text(rows: Iterable[tuple[Any, ...]]) -> str:
    """Returns the content of such a file."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)
