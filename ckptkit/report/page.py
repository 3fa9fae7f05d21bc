"""What a page shows, as plain values, and the one file that shows it without a network.

Everything that there is one of for each tensor is in columns, aligned with the names, and values
that repeat are numbers of entries in a list. All texts are printable.

The page has one script and one style, which its Content-Security-Policy names by their digests:
nothing else runs, and nothing is loaded. Its content is JSON in a block that no browser executes.

Source: https://www.w3.org/TR/CSP3/ (hashes); https://html.spec.whatwg.org/multipage/scripting.html
(data blocks, and what ends a script element).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.core.text import make_printable, size_text, without_url_secrets
from ckptkit.plan.weight_kinds import describe_stored
from ckptkit.runs.steps import RunStep
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import new_hidden_path, put_file
from ckptkit.storage.local.target import translate_errors
from ckptkit.storage.places import PathLike, is_url, local_path
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference, NumericDifference
    from ckptkit.conversion.inspect import Inspection, TensorLine
    from ckptkit.conversion.stats import Statistics
    from ckptkit.core.index import Problem
    from ckptkit.plan.coverage import Shares
    from ckptkit.runs.listing import RunListing

MOST_TENSORS = 200_000
"""A page lists the largest ones of a checkpoint with more."""

_MOST_CHARACTERS = 500  # of one text; more would hide what it is about
_MOST_PROBLEMS, _MOST_NOTES, _MOST_STEPS, _MOST_METRICS, _MOST_TIES = 500, 100, 2000, 40, 200
_DIGITS = 6
_RANK_FILE = re.compile(r"(?:^|/)(?:__|random_states_|rng_state_)(\d+)[._]")
_STATES = ("equal", "changed", "only in A", "only in B", "another shape or dtype")
_EQUAL, _CHANGED, _ONLY_A, _ONLY_B, _RESHAPED = range(len(_STATES))

Fact = tuple[str, str]


class ReportDocument(Struct, frozen=True):
    """The content of one page."""

    kind: str  # which of the two pages it is
    title: str  # what it is about; printable
    content: Mapping[str, Any]  # JSON values; the keys are those that `assets/data.js` reads

    def to_json(self) -> dict[str, Any]:
        by = f"ckptkit {__version__}"
        return {"kind": self.kind, "title": self.title, "by": by, **self.content}


def plan_inspection_report(
    inspection: Inspection,
    *,
    statistics: Statistics | None = None,
    run: RunListing | None = None,
    remarks: Sequence[str] = (),
) -> ReportDocument:
    """Plans the page of a checkpoint."""
    order = _choose_tensors([line.size_bytes for line in inspection.tensors])
    lines = [inspection.tensors[number] for number in order]
    trees = _Numbered((line.tree, line.part) for line in lines)
    dtypes = _Numbered(line.dtype for line in lines)
    shapes = _Numbered(line.shape for line in lines)
    notes = [*remarks, *inspection.notes]
    if len(order) < len(inspection.tensors):
        notes.insert(0, f"Only the {len(order):,} largest of {len(inspection.tensors):,} tensors.")
    content: dict[str, Any] = {
        "facts": list(_facts(inspection)),
        "problems": _join_problems(inspection.problems)[:_MOST_PROBLEMS],
        "problem_count": len(inspection.problems),
        "notes": [shown(note) for note in notes[:_MOST_NOTES]],
        "ties": [
            {"names": [shown(name) for name in tie.names], "equal": tie.equal}
            for tie in inspection.tied[:_MOST_TIES]
        ],
        "names": pack_names([shown(line.name) for line in lines]),
        "trees": [[shown(tree), part] for tree, part in trees.values],
        "tree": trees.numbers,
        "dtypes": dtypes.values,
        "dtype": dtypes.numbers,
        "shapes": shapes.values,
        "shape": shapes.numbers,
        "bytes": [line.size_bytes for line in lines],
        "chunks": [line.chunks for line in lines],
        **_label(inspection, order),
        "ranks": list(inspection.bytes_per_rank),
    }
    if inspection.shards is not None:
        content |= _place(inspection, order)
    if statistics is not None:
        from ckptkit.engine.values import TITLES  # imported already where there are numbers

        content["stats"] = _measure(inspection, order, statistics)
        content["titles"] = dict(TITLES)
    if run is not None:
        content["run"] = _describe_run(run, inspection)
    return ReportDocument("inspection", shown(inspection.path), content)


def plan_difference_report(difference: Difference) -> ReportDocument:
    """Plans the page of two models.

    Without the numbers of a comparison with `numeric`, it lists the tensors that differ alone.
    """
    rows = _difference_rows(difference)
    order = _choose_tensors([row.elements for row in rows])
    chosen = [rows[number] for number in order]
    gaps = [row.gaps for row in chosen]
    dtypes = _Numbered(() if gap is None else tuple(dict.fromkeys(gap.dtypes)) for gap in gaps)
    notes = [difference.note] if difference.note else []
    if len(chosen) < len(rows):
        notes.append(f"Only {len(chosen):,} of {len(rows):,} tensors.")
    content = {
        "facts": [(label, shown(text)) for label, text in _difference_facts(difference)],
        "same": difference.same,
        "measured": bool(difference.numeric),
        "notes": [shown(note) for note in notes],
        "names": pack_names([shown(row.name) for row in chosen]),
        "states": list(_STATES),
        "state": [row.state for row in chosen],
        "dtypes": dtypes.values,
        "dtype": dtypes.numbers,
        "reshaped": {n: row.extents for n, row in enumerate(chosen) if row.extents},
        "elements": [row.elements for row in chosen],
        "stats": _difference_columns(chosen),
    }
    title = f"{shown(difference.a)} and {shown(difference.b)}"
    return ReportDocument("difference", title, content)


class _Row(Struct, frozen=True):
    """A tensor of either model; `found` has the elements that differ, and by how much at most."""

    name: str
    state: int
    gaps: NumericDifference | None = None
    extents: tuple[str, str] | None = None
    found: tuple[int, float | None] | None = None

    @property
    def elements(self) -> int:
        return self.gaps.elements if self.gaps is not None else 0


def _difference_facts(difference: Difference) -> Iterable[Fact]:
    tolerance, how = difference.tolerance, "bits"
    if tolerance is not None:
        how = f"values, within {tolerance.atol:g} + {tolerance.rtol:g} x |B|"
    yield "A", difference.a
    yield "B", difference.b
    yield "compared", how
    yield "equal", f"{difference.equal:,}"
    yield "changed", f"{len(difference.changed):,}"
    yield "only in A", f"{len(difference.only_in_a):,}"
    yield "only in B", f"{len(difference.only_in_b):,}"
    yield "another shape or dtype", f"{len(difference.reshaped):,}"


def _difference_columns(rows: Sequence[_Row]) -> dict[str, list[float | None]]:
    gaps = [row.gaps for row in rows]
    columns: dict[str, list[float | None]] = {
        name: [None if gap is None else rounded(getattr(gap, name)) for gap in gaps]
        for name in ("change", "largest", "relative", "unequal", "beyond", "lone")
    }
    for number, row in enumerate(rows):
        if row.found is not None:
            columns["unequal"][number], columns["largest"][number] = row.found
    cosines = [None if gap is None else gap.cosine for gap in gaps]
    norms = [(None, None) if gap is None else gap.norms for gap in gaps]
    return columns | {
        # A cosine of two models that are close differs from 1 in the ninth digit.
        "cosine": [None if cosine is None else round(cosine, 12) for cosine in cosines],
        "norm_a": [rounded(norm) for norm, _ in norms],
        "norm_b": [rounded(norm) for _, norm in norms],
    }


def shown(text: str) -> str:
    """Returns a text as a page shows it: printable, without secrets of URLs, and cut if long."""
    text = make_printable(without_url_secrets(text))
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"


def pack_names(names: Sequence[str]) -> list[Any]:
    """Packs names: how much of its beginning each has in common with the last, and the rest.

    >>> pack_names(["a.b.0", "a.b.1", "c"])
    [[0, 4, 0], ['a.b.0', '1', 'c']]
    """
    shared, rest, last = [], [], ""
    for name in names:
        most = min(len(name), len(last))
        count = next((i for i in range(most) if name[i] != last[i]), most)
        shared.append(count)
        rest.append(name[count:])
        last = name
    return [shared, rest]


def rounded(value: float | None) -> float | None:
    """Returns a float with six digits, as short as JSON can have it; None if it is not finite."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**_DIGITS else short


class _Numbered:
    """Values that repeat: each one once, and the number of that for every place.

    Attributes:
        values: The values that differ, in order of appearance.
        numbers: For each place, the position of its value.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        known: dict[Any, int] = {}
        self.numbers = [known.setdefault(value, len(known)) for value in values]
        self.values = list(known)


def _choose_tensors(weights: Sequence[int]) -> list[int]:
    """Returns the positions of the tensors that are listed, in their order."""
    if len(weights) <= MOST_TENSORS:
        return list(range(len(weights)))
    largest = sorted(range(len(weights)), key=lambda number: -weights[number])
    return sorted(largest[:MOST_TENSORS])


def _facts(inspection: Inspection) -> Iterable[Fact]:
    writer = inspection.writer
    if inspection.version not in writer:
        writer = f"{writer} {inspection.version}"
    if inspection.layout:
        writer = f"{writer}, layout {inspection.layout}"
    names = ", ".join(map(str, inspection.architectures))
    parts = {line.part for line in inspection.trees}
    mesh = ", ".join(f"{axis.name} {axis.size:,}".strip() for axis in inspection.mesh)
    found: dict[str, str] = {
        "format": inspection.format,
        "written by": writer,
        "step": "" if inspection.step is None else f"{inspection.step:,}",
        "saved at": inspection.saved_at or "",
        "ranks": "" if inspection.world_size is None else f"{inspection.world_size:,}",
        "mesh": mesh,
        "model": " ".join(filter(None, (inspection.model_type, f"({names})" if names else ""))),
        "names of": inspection.framework,
        "on disk": f"{size_text(inspection.size_bytes)} in {inspection.files:,} file"
        f"{'' if inspection.files == 1 else 's'}",
        "holds": ", ".join(
            part for part in ("model", "average", "optimizer", "other") if part in parts
        ),
        "values": f"{len(inspection.objects):,}" if inspection.objects else "",
        "metrics": ", ".join(
            f"{name} {value:.6g}" for name, value in islice(inspection.metrics.items(), 8)
        ),
    }
    return ((label, shown(text)) for label, text in found.items() if text.strip())


def _join_problems(problems: Sequence[Problem]) -> list[tuple[str, str, str, int]]:
    """Returns the first problem of each kind in each place, and how many there are of these.

    A missing file is the problem of each tensor in it.
    """
    first: dict[tuple[str, str], Problem] = {}
    counts = Counter((problem.code, problem.where) for problem in problems)
    for problem in problems:
        first.setdefault((problem.code, problem.where), problem)
    return [
        (code, shown(where), shown(first[code, where].message), count)
        for (code, where), count in counts.items()
    ]


def _place(inspection: Inspection, order: Sequence[int]) -> dict[str, Any]:
    shards = inspection.shards
    assert shards is not None  # noqa: S101  the caller has looked
    rows = (shards.by_rank[number] for number in order)
    ranks = _Numbered(_flat(shares) for shares in rows)
    files = _Numbered(_flat(shards.by_file[number]) for number in order)
    positions = {number: position for position, number in enumerate(order)}
    return {
        "files": [[shown(path), *sizes] for path, *sizes in shards.files],
        "on_ranks": ranks.values,
        "on_rank": ranks.numbers,
        "in_files": files.values,
        "in_file": files.numbers,
        "unreadable": [positions[n] for n in shards.unreadable if n in positions],
    }


def _flat(shares: Shares) -> tuple[int, ...]:
    return tuple(number for share in shares for number in share)


def _measure(
    inspection: Inspection, order: Sequence[int], statistics: Statistics
) -> dict[str, list[Any]]:
    """Returns the numbers of the tensors of the model; None for all others."""
    from ckptkit.engine.values import STATISTICS  # imported already where there are numbers

    by_name = {tensor.name: tensor for tensor in statistics.tensors}
    lines = [inspection.tensors[number] for number in order]
    found = [by_name.get(line.name) if line.part == "model" else None for line in lines]
    return {
        name: [None if t is None else rounded(getattr(t, name)) for t in found]
        for name in STATISTICS
    }


def _label(inspection: Inspection, order: Sequence[int]) -> dict[str, Any]:
    """Returns what tensors are, and how many parameters they hold, by their positions."""
    is_apart = len({line.role for line in inspection.tensors if line.role}) > 1
    trees: dict[str, list[TensorLine]] = {}
    for line in inspection.tensors:
        if line.part == "model":
            trees.setdefault(line.tree, []).append(line)
    stored = {
        tree: describe_stored((line.name, line.shape, line.dtype) for line in own)
        for tree, own in trees.items()
    }
    labels: dict[int, str] = {}
    parameters: dict[int, int] = {}
    for position, number in enumerate(order):
        line = inspection.tensors[number]
        if line.part != "model":
            continue
        found = stored[line.tree][line.name]
        if found.parameters != math.prod(line.shape):
            parameters[position] = found.parameters
        label = ", ".join(filter(None, [line.role if is_apart else "", found.label]))
        if label:
            labels[position] = label
    return {"labels": labels, "parameters": parameters}


def _describe_run(run: RunListing, inspection: Inspection) -> dict[str, Any]:
    steps = run.steps[-_MOST_STEPS:]
    metrics = dict.fromkeys(name for step in steps for name in step.metrics)
    names = list(metrics)[:_MOST_METRICS]
    return {
        "location": shown(run.location),
        "left_out": len(run.steps) - len(steps),
        "bytes": run.size_bytes,
        "metrics": [shown(name) for name in names],
        "steps": [
            {
                "name": shown(step.name),
                "step": step.step,
                "complete": step.complete,
                "problem": shown(step.problem),
                "bytes": step.size_bytes,
                "ranks": _count_ranks(step),
                "at": _time_text(step.modified),
                "shown": step.path == inspection.path or step.step == inspection.step,
                "best": step.name in run.best,
                "pushed": any(push.state == "pushed" for push in step.pushes),
                "metrics": [rounded(step.metrics.get(name)) for name in names],
            }
            for step in steps
        ],
        "notes": [shown(note) for note in run.notes[:_MOST_NOTES]],
    }


def _count_ranks(step: RunStep) -> int | None:
    """Returns how many ranks saved a step: by its manifest, or by the files that each has."""
    if step.world_size is not None:
        return step.world_size
    found = {match[1] for file in step.files if (match := _RANK_FILE.search(file.path))}
    return len(found) or None


def _time_text(seconds: float) -> str:
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")[:16]


def _difference_rows(difference: Difference) -> list[_Row]:
    gaps = {gap.name: gap for gap in difference.numeric}
    changed = {change.name: change for change in difference.changed}
    names = dict.fromkeys([*gaps, *changed, *difference.reshaped])
    rows = []
    for name in names:
        gap, change = gaps.get(name), changed.get(name)
        extents = difference.reshaped.get(name)
        state = _EQUAL if change is None else _CHANGED
        state = state if extents is None else _RESHAPED
        found = None
        if change is not None and not difference.tolerance:
            found = change.elements, change.largest
        rows.append(_Row(name, state, gap, extents, found))
    rows += [_Row(name, _ONLY_A) for name in difference.only_in_a]
    rows += [_Row(name, _ONLY_B) for name in difference.only_in_b]
    return rows


# In the order in which the page runs them.
_SCRIPTS = (
    *("data.js", "widgets.js", "treemap.js", "layers.js", "placement.js", "timeline.js"),
    *("table.js", "main.js"),
)
_DRAFT = "page"
_BEGINNING = b"<!doctype html>\n<!-- ckptkit report -->"
_HINT = "name another file, or have this one replaced: --overwrite, overwrite=True"


def render_page(document: ReportDocument) -> bytes:
    """Returns the page, in UTF-8."""
    template, style, script = _assets()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)};"
        " base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": escape(document.title),
        "style": style,
        "data": _data_block(document),
        "script": script,
    }
    done, rest = "", template
    for name, value in values.items():  # in the order of the template; values stay as they are
        before, mark, rest = rest.partition(f"{{{{{name}}}}}")
        assert mark, name  # noqa: S101  of the package's own template
        done += before + value
    return (done + rest).encode()


def write_page(document: ReportDocument, out: PathLike, *, overwrite: bool) -> Path:
    """Writes the page of a document: all of it, or nothing."""
    path = check_page_path(out, overwrite=overwrite)
    data = render_page(document)
    draft = new_hidden_path(path, _DRAFT)
    with translate_errors(path, len(data)):
        try:
            put_file(draft, data)
            if overwrite:
                draft.replace(path)
            else:
                _give_new_name(draft, path)
            LOCAL_DISK.sync_directory(path.parent)
        finally:
            draft.unlink(missing_ok=True)
    return path


def check_page_path(out: PathLike, *, overwrite: bool) -> Path:
    """Refuses a path at which no page can be written, or where something else is."""
    named = os.fspath(out)
    if is_url(out) or named in {"", "-"}:
        raise OutputError(
            "a page is written to a file of this machine",
            where=f"--html {named}",
            hint="pass a path such as report.html",
        )
    path = local_path(out)
    if path.is_dir():
        raise OutputError(
            "is a directory", where=named, hint=f"pass a file in it, such as {path}/report.html"
        )
    if not path.parent.is_dir():
        raise OutputError(
            "its directory does not exist", where=named, hint=f"create {path.parent} first"
        )
    if os.path.lexists(path):
        if not overwrite:
            raise OutputExistsError("the file exists", where=named, hint=_HINT)
        if not _is_page(path):
            raise OutputExistsError(
                "the file is not a page of ckptkit, and is not replaced",
                where=named,
                hint="name another file",
            )
    return path


def _is_page(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
    return False


def _give_new_name(draft: Path, path: Path) -> None:
    """Renames a file unless the new name is taken, by then too."""
    try:
        os.link(draft, path)  # which, unlike a rename, never replaces a file
    except FileExistsError:
        raise OutputExistsError("the file exists", where=str(path), hint=_HINT) from None
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise OutputExistsError("the file exists", where=str(path), hint=_HINT) from None
        draft.rename(path)


@cache
def _assets() -> tuple[str, str, str]:
    """Returns the template, the style and the script of all pages."""
    folder = files("ckptkit.report") / "assets"
    template, style, *scripts = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *_SCRIPTS)
    )
    return template, style, '"use strict";\n{\n' + "".join(scripts) + "}\n"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_block(document: ReportDocument) -> str:
    """Returns JSON in ASCII in which nothing can end the element that it is in."""
    text = json.dumps(document.to_json(), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
