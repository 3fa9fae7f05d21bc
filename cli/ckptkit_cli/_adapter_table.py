"""The table of an adapter's layers, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.adapters.accounting import Row
from ckptkit_cli._output import Output
from ckptkit_cli._text import escaped, table

_HEADER = ("module", "kind", "rank", "scaling", "changes", "norm of the change")


def layers_json(rows: Sequence[Row], norms: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the rows as plain values."""
    return [
        {
            "module": row.module,
            "kind": row.kind,
            "rank": row.rank,
            "scaling": row.scaling,
            "dora": row.is_dora,
            "shape": list(row.shape),
            "norm": norms.get(row.module),
            "tensors": list(row.names),
        }
        for row in rows
    ]


def layer_table(output: Output, rows: Sequence[Row], norms: Mapping[str, float]) -> list[str]:
    """Returns the lines of the table."""
    cells = [_HEADER, *(_cells(row, norms.get(row.module)) for row in rows)]
    return table(cells, width=output.width, right={2, 3, 5})


def _cells(row: Row, norm: float | None) -> tuple[str, ...]:
    return (
        escaped(row.module),
        f"{row.kind}, DoRA" if row.is_dora else row.kind,
        "" if row.rank is None else str(row.rank),
        "" if row.scaling is None else f"{row.scaling:.6g}",
        " x ".join(map(str, row.shape)),
        "" if norm is None else f"{norm:.4g}",
    )
