"""Data that is shipped beside the code, as JSON that programs in `fixtures/generators/` write.

A table is one document, read whole. Rows are `[KEY, ..., VALUE]`, each on a line of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_Table = TypeVar("_Table")


def read_table(module_file: str, name: str, kind: type[_Table]) -> _Table:
    """Reads the table `name` that lies beside a module, named by its `__file__`."""
    return msgspec.json.decode(Path(module_file).with_name(name).read_bytes(), type=kind)


def table_to_text(table: Mapping[str, Any]) -> str:
    """Returns the content of a table's file; sets are sorted."""
    return json.dumps(msgspec.to_builtins(table, order="deterministic"), indent=1) + "\n"


@cache
def read_row(path: Path, *key: str) -> Any:
    """Returns the value of a row, None where there is none.

    No other row is parsed: a conversion would hold what it never needs.
    """
    start = json.dumps(key)[:-1] + ", "
    with path.open(encoding="utf-8") as lines:
        return next((json.loads(line)[-1] for line in lines if line.startswith(start)), None)


def rows_to_text(rows: Iterable[tuple[Any, ...]]) -> str:
    """Returns the content of a file of rows."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)
