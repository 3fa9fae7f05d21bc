"""Reports of campaigns: tables in Markdown, printed and kept with the command that repeats them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

WORK = Path(__file__).resolve().parent / "work"


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    title: str  # what was counted, as a heading
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]  # a row for each kind of fault, format or drawn configuration

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", _line(self.columns), _line(":--" for _ in self.columns)]
        return "\n".join([*lines, *(_line(row) for row in self.rows), ""])


def write_report(campaign: str, command: str, tables: Sequence[Table]) -> Path:
    """Prints the tables, writes them to `tests/campaigns/work/CAMPAIGN.md`, returns its path."""
    day = datetime.now(UTC).date().isoformat()
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    head = f"# {campaign}\n\n`{command}`, {day}, {machine}\n"
    text = "\n".join([head, *(table.markdown() for table in tables)])
    print(text)
    WORK.mkdir(exist_ok=True)
    path = WORK / f"{campaign}.md"
    path.write_text(text)
    return path


def _line(cells: Iterable[object]) -> str:
    return (
        "| "
        + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
        + " |"
    )
