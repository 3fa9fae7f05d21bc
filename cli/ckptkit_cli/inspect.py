"""`ckptkit inspect`: what lies at a path, from headers alone.

The page that `ckptkit inspect` shows to people.

What to do after an inspection, as a command to copy.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from statistics import median

from ckptkit.conversion.inspect import Inspection, TensorLine, TieLine, TreeLine
from ckptkit.conversion.source.adapters import AdapterFacts, choices
from ckptkit.core.index import Part, Problem
from ckptkit.core.text import size_text
from ckptkit.options import matches
from ckptkit.plan.selection import lost_adapter
from ckptkit_cli._job_options import ModelConfig
from ckptkit_cli._options import (
    Also,
    AsJson,
    Selection,
    Source,
    SrcOption,
    TensorPattern,
    sources_of,
)
from ckptkit_cli._output import Output, counted, escaped, first_of, table, told, wrapped


def inspect(
    src: Source,
    as_json: AsJson = False,
    tensors: TensorPattern = None,
    select: Selection = None,
    also: Also = None,
    model_config: ModelConfig = None,
    src_option: SrcOption = None,
) -> None:
    """Show what lies in a checkpoint.

    Tensors, how they are split over ranks, tied weights, what is wrong, and what to run next.
    Headers alone are read.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.conversion.inspect import run_inspection

        sources = sources_of(src, src_option)
        inspection = run_inspection(
            sources.first,
            select=select,
            also=sources.further(also or ()),
            model_config=sources.optional(model_config),
        )
        if tensors is not None:
            inspection = matching(inspection, tensors)
        if as_json:
            output.document(inspection.to_json())
            return
        given = Given(src, select, tuple(also or ()))
        page = inspection_page(output, inspection, given, pattern=tensors)
        output.lines(page)


@dataclass(frozen=True, slots=True)
class NextStep:
    """A command, or none, and a remark on it; both are safe to print."""

    command: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """What a user typed to find a checkpoint.

    Attributes:
        source: The path.
        select: What was selected there.
        also: Further directories.
    """

    source: str
    select: str | None = None
    also: tuple[str, ...] = ()


def next_step(inspection: Inspection, given: Given) -> NextStep:
    """Chooses what a user would want to run next.

    Args:
        inspection: What was found.
        given: What the user typed to find it.
    """
    # What lies in several directories has the paths that it has below those that were named.
    path = given.source if given.select is not None or given.also else inspection.path
    models = list(dict.fromkeys(tree.name for tree in inspection.trees if tree.part == "model"))
    if inspection.problems:
        return NextStep(
            _command("verify", path, given=given),
            "reads all data and lists what is damaged; consolidate refuses what is not whole",
        )
    if not models:
        lost = lost_adapter(line.name for line in inspection.tensors)
        return NextStep("", lost or "nothing to consolidate: there is no model here")
    return _of_a_model(inspection, models, path, given)


def _of_a_model(inspection: Inspection, models: list[str], path: str, given: Given) -> NextStep:
    if inspection.adapter is not None:
        return _of_adapter(inspection.adapter, path, given)
    if len(models) > 1:
        return _choice(inspection, models, path, given)
    if inspection.peft is not None:
        peft = inspection.peft
        return NextStep("", escaped(f"this is {peft.title}, and no model; {peft.advice}"))
    if inspection.format == "safetensors" and inspection.model_type:
        return NextStep(
            _command("verify", path, given=given),
            "reads it all; these weights load as they are",
        )
    return _consolidation(inspection, path, given)


def _of_adapter(adapter: AdapterFacts, path: str, given: Given) -> NextStep:
    chosen = choices(given.select, given.also)
    merge = escaped(adapter.merge(path, chosen=chosen))
    extract = escaped(adapter.extract(path, chosen=chosen))
    remark = f"; {escaped(adapter.remark)}" if adapter.remark else ""
    if adapter.is_ready:
        return NextStep(merge, f"PEFT loads this folder as it is{remark}")
    if adapter.holds_base:
        return NextStep(merge, f"or, for the adapter alone, `{extract}`{remark}")
    return NextStep(extract, f"or, for the merged model, `{merge}`{remark}")


def _choice(inspection: Inspection, models: list[str], path: str, given: Given) -> NextStep:
    taken = [name for name in models if name not in inspection.refusals]
    if not taken:
        return NextStep("", f"nothing to consolidate: {escaped(inspection.refusals[models[0]])}")
    command = _command("consolidate", path, "OUT", given=replace(given, select=taken[0]))
    if len(taken) == 1:
        return NextStep(command, f"the only model of {len(models)} that is written as one")
    others = ", ".join(map(escaped, taken[1:]))
    return NextStep(command, f"or another of the {len(taken)} models: {others}")


def _consolidation(inspection: Inspection, path: str, given: Given) -> NextStep:
    told = next(iter(inspection.refusals.values()), "")
    if not told:
        return NextStep(_command("consolidate", path, "OUT", given=given))
    return NextStep(
        _command("consolidate", path, "OUT", "--names", "live", given=given),
        f"writes the raw state dict, since {escaped(told)}",
    )


def _command(name: str, *arguments: str, given: Given) -> str:
    chosen = choices(given.select, given.also)
    return escaped(shlex.join(["ckptkit", name, *arguments, *chosen]))


_LARGEST = 5
_PROBLEMS = 10
_NAMED_OBJECTS = 4
_LISTED_RANKS = 8
_LISTED_TIES = 5
_LABEL = 11
_TENSOR_HEADER = ("SIZE", "DTYPE", "SHAPE", "CHUNKS", "NAME")
_TENSOR_RIGHT = (0, 3)
_PARTS: tuple[Part, ...] = ("model", "optimizer", "other")


def matching(inspection: Inspection, pattern: str) -> Inspection:
    """Returns the report with only the tensors whose names match a pattern."""
    kept = tuple(line for line in inspection.tensors if matches(line.name, (pattern,)))
    return replace(inspection, tensors=kept)


def inspection_page(
    output: Output,
    inspection: Inspection,
    given: Given,
    *,
    pattern: str | None,
) -> Iterator[str]:
    """Yields the lines of the page.

    Args:
        output: Knows the width and the colours.
        inspection: What was found, narrowed to `pattern` if there is one.
        given: What the user typed to find it.
        pattern: Which tensors the user asked to see.
    """
    page = _Page(output, inspection)
    yield output.styled(escaped(inspection.path), "bold")
    yield from page.facts()
    if pattern is not None:
        yield from page.matches(pattern)
        return
    yield from page.trees()
    yield from page.splits()
    yield from page.ties()
    yield from page.problems()
    yield from page.notes()
    yield from page.largest()
    yield from page.heading("Next")
    step = next_step(inspection, given)
    if step.command:
        yield f"  {output.styled(step.command, 'cyan')}"
    yield from page.prose([step.remark] if step.remark else [])


class _Page:
    """The sections, each with its heading, absent where it has nothing to say."""

    def __init__(self, output: Output, found: Inspection) -> None:
        self._output = output
        self._found = found
        self._width = output.width
        self._trees = sorted(found.trees, key=lambda tree: _PARTS.index(tree.part))

    def heading(self, text: str) -> Iterator[str]:
        yield ""
        yield self._output.styled(text, "bold")

    def facts(self) -> Iterator[str]:
        found = self._found
        size = f"{counted(found.files, 'file')}, {size_text(found.size_bytes)}"
        model = escaped(found.model_type or "")
        if found.architectures:
            names = escaped(", ".join(map(str, found.architectures)))
            model = f"{model} ({names})" if model else names
        yield from self._fact("format", escaped(found.format))
        layout = f", layout {found.layout}" if found.layout else ""
        yield from self._fact("written by", escaped(f"{_writer(found)}{layout}"))
        yield from self._fact("step", "" if found.step is None else f"{found.step:,}")
        yield from self._fact("saved at", escaped(found.saved_at or ""))
        yield from self._fact("metrics", ", ".join(starmap(_metric, found.metrics.items())))
        yield from self._fact("ranks", "" if found.world_size is None else f"{found.world_size:,}")
        yield from self._fact("mesh", escaped(_mesh(found)))
        yield from self._fact("model", model)
        if found.peft is not None and not found.peft.is_of_lora:
            yield from self._fact("adapter", found.peft.title)
        yield from self._fact("on disk", size)
        yield from self._fact("also", self._objects())
        yield from self._fact("ignored", escaped(", ".join(map(str, found.ignored))))
        if found.problems:
            text = counted(len(found.problems), "problem")
            yield from self._fact("state", self._output.styled(text, "red"))

    def _fact(self, label: str, text: str) -> list[str]:
        if not text:
            return []
        indent = " " * (_LABEL + 3)
        first = f"  {self._output.styled(f'{label:<{_LABEL}}', 'dim')} "
        lines = wrapped(text, width=self._width, first=indent, rest=indent)
        return [first + lines[0][len(indent) :], *lines[1:]]

    def _objects(self) -> str:
        objects = self._found.objects
        if not objects:
            return ""
        tops = Counter(name.split(".", 1)[0] for name in objects)
        named = ", ".join(name for name, _ in tops.most_common(_NAMED_OBJECTS))
        more = ", ..." if len(tops) > _NAMED_OBJECTS else ""
        return f"{counted(len(objects), 'value')} beside the tensors ({escaped(named)}{more})"

    def trees(self) -> Iterator[str]:
        rows = [("NAME", "PART", "TENSORS", "SIZE", "DTYPES")]
        rows.extend(map(_tree_row, self._trees))
        yield from self.heading("State dicts")
        if len(rows) == 1:
            yield "  none"
            return
        yield from self._table(rows, right=(2, 3))

    def splits(self) -> Iterator[str]:
        found = self._found
        lines = [
            f"{self._title(tree)}: {_ways(tree)}"
            for tree in self._trees
            if set(tree.split) - {"whole"}
        ]
        if len(found.bytes_per_rank) > 1:
            lines.append(_ranks(found.bytes_per_rank))
        if not lines:
            return
        yield from self.heading("Split")
        yield from self.prose(lines)

    def _title(self, tree: TreeLine) -> str:
        name = escaped(tree.name) or tree.part
        shared = sum(other.name == tree.name for other in self._trees) > 1
        return f"{name} ({tree.part})" if shared else name

    def ties(self) -> Iterator[str]:
        ties = self._found.tied
        if not ties:
            return
        yield from self.heading("Tied weights")
        yield from self.prose(first_of([_tie(tie) for tie in ties], _LISTED_TIES))

    def problems(self) -> Iterator[str]:
        problems = self._found.problems
        if not problems:
            return
        kinds = Counter(problem.code for problem in problems)
        counts = ", ".join(f"{count:,} {escaped(code)}" for code, count in kinds.most_common())
        yield ""
        title = f"{'Problem' if len(problems) == 1 else 'Problems'}: {counts}"
        yield self._output.styled(title, "red")
        yield from self.prose(first_of(list(map(_problem, problems)), _PROBLEMS))

    def notes(self) -> Iterator[str]:
        if self._found.notes:
            yield from self.heading("Notes")
            yield from self.prose([escaped(note) for note in self._found.notes])

    def largest(self) -> Iterator[str]:
        lines = self._found.tensors
        part = next((part for part in _PARTS if any(line.part == part for line in lines)), None)
        if part is None:
            return
        candidates = [line for line in lines if line.part == part]
        chosen = sorted(candidates, key=lambda line: -line.size_bytes)[:_LARGEST]
        yield from self.heading(f"Largest of {counted(len(candidates), f'{part} tensor')}")
        yield from self._largest(chosen)
        if len(lines) > len(chosen):
            yield self._output.styled("  --tensors '*' lists all of them", "dim")

    def matches(self, pattern: str) -> Iterator[str]:
        """Lists tensors with their whole names, however wide that is."""
        if not self._found.tensors:
            yield from self.heading(f"No tensor matches {escaped(repr(pattern))}")
        for tree in self._trees:
            lines = [
                line
                for line in self._found.tensors
                if (line.tree, line.part) == (tree.name, tree.part)
            ]
            if lines:
                count = f"{len(lines):,} of {counted(tree.tensors, 'tensor')}"
                size = size_text(sum(line.size_bytes for line in lines))
                yield from self.heading(f"{self._title(tree)}: {count}, {size}")
                rows = [_TENSOR_HEADER, *map(_tensor_row, lines)]
                yield from self._table(rows, right=_TENSOR_RIGHT, elastic=())

    def _largest(self, lines: Sequence[TensorLine]) -> list[str]:
        rows = [_TENSOR_HEADER, *map(_tensor_row, lines)]
        last = len(_TENSOR_HEADER) - 1
        if len({line.tree for line in lines}) == 1:
            return self._table(rows, right=_TENSOR_RIGHT, elastic=(last,))
        homes = ["STATE DICT", *(escaped(line.tree) or "-" for line in lines)]
        wide = [(*row[:-1], home, row[-1]) for row, home in zip(rows, homes, strict=True)]
        return self._table(wide, right=_TENSOR_RIGHT, elastic=(last, last + 1))

    def _table(
        self,
        rows: Sequence[Sequence[str]],
        right: Sequence[int],
        elastic: Sequence[int] = (0,),
    ) -> list[str]:
        lines = table(rows, width=self._width, right=right, elastic=elastic)
        return [self._output.styled(lines[0], "dim"), *lines[1:]]

    def prose(self, texts: Sequence[str]) -> Iterator[str]:
        for text in texts:
            yield from wrapped(text, width=self._width, rest="    ")


def _writer(found: Inspection) -> str:
    """Returns, for example, `ckptkit 0.1.0`; some writers are told with their version."""
    is_told = found.version in found.writer
    return found.writer if is_told else f"{found.writer} {found.version}"


def _mesh(found: Inspection) -> str:
    return ", ".join(f"{axis.name} {axis.size:,}".strip() for axis in found.mesh)


def _metric(name: str, value: float) -> str:
    return f"{escaped(name)} {value:.6g}"


def _tree_row(tree: TreeLine) -> tuple[str, str, str, str, str]:
    name, size = escaped(tree.name) or "-", size_text(tree.size_bytes)
    return name, tree.part, f"{tree.tensors:,}", size, _dtypes(tree)


def _tensor_row(line: TensorLine) -> tuple[str, ...]:
    size = size_text(line.size_bytes)
    return size, line.dtype, str(list(line.shape)), f"{line.chunks:,}", escaped(line.name)


def _dtypes(tree: TreeLine) -> str:
    if len(tree.dtypes) == 1:
        return next(iter(tree.dtypes))
    return ", ".join(f"{name} {size_text(size)}" for name, size in tree.dtypes.items())


def _ways(tree: TreeLine) -> str:
    """Returns, for example, `9 tensors by dimension 0 over 4, 2 whole`."""
    ways = [
        f"{count:,} {'by ' if way.startswith('dimension') else ''}{way}"
        for way, count in tree.split.items()
    ]
    return ", ".join(ways)


def _ranks(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"each of {len(sizes):,} ranks wrote {size_text(sizes[0])}"
    if len(sizes) <= _LISTED_RANKS:
        each = ", ".join(f"{rank}: {size_text(size)}" for rank, size in enumerate(sizes))
        return f"written per rank: {each}"
    low, middle, high = (size_text(int(f(sizes))) for f in (min, median, max))
    return f"{len(sizes):,} ranks wrote {low} to {high} each, half of them at most {middle}"


def _tie(tie: TieLine) -> str:
    names = " = ".join(map(escaped, tie.names))
    said = "tied by the configuration" if tie.declared else "not declared by a configuration"
    proof = {True: "same bytes", False: "but the bytes differ", None: "bytes not compared"}
    return f"{names}  ({said}, {proof[tie.equal]})"


def _problem(problem: Problem) -> str:
    return f"[{escaped(problem.code)}] {escaped(str(problem))}"
