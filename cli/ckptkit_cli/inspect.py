"""`ckptkit inspect`: what a path contains, from headers alone, and what to run next."""

from __future__ import annotations

import posixpath
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import InputError, RefusedError
from ckptkit.core.text import size_text
from ckptkit.name_maps.shipped import describe_map_names
from ckptkit.options import SOME_MODEL, matches
from ckptkit.storage.locations import Sources
from ckptkit_cli._options import (
    ALL,
    ALSO,
    BASE,
    HTML,
    JSON,
    MAP,
    MODEL_CONFIG,
    OUTPUT,
    OVERWRITE_HTML,
    READ,
    SELECT,
    SRC,
    SRC_OPTION,
    limit_list,
)
from ckptkit_cli._output import (
    Output,
    check_html,
    counted,
    escaped,
    first_of,
    fold_problems,
    table,
    wrapped,
    write_html,
)
from ckptkit_cli._program import Option, command

if TYPE_CHECKING:
    from ckptkit.conversion.inspect import Inspection, TensorLine, TreeLine
    from ckptkit.conversion.mapped_names import MapReport
    from ckptkit.conversion.source.adapters import AdapterFacts
    from ckptkit.conversion.stats import Statistics
    from ckptkit.core.index import Part, Problem
    from ckptkit.deltas.checks import DeltaInspection, DeltaLine
    from ckptkit.runs.listing import RunListing
    from ckptkit.storage.places import Place


_STORED = "stored"
_SORTS: Mapping[str, Callable[[TensorLine], Any]] = {
    "name": lambda line: line.name,
    "size": lambda line: (-line.size_bytes, line.name),
}


@command(
    SRC,
    SELECT,
    ALSO,
    MODEL_CONFIG,
    BASE,
    replace(
        MAP,
        help="Show what a name map makes of each tensor, as `consolidate` would: the name of a map,"
        f" or a TOML file. Maps are {describe_map_names()}. 'auto' finds it by the names"
        " and the configuration, and is the default where it finds one.",
        default=None,
    ),
    SRC_OPTION,
    Option(
        "--tensors",
        OUTPUT,
        "List the tensors whose names match, such as '*.mlp.*'.",
        "GLOB",
    ),
    Option(
        "--sort",
        OUTPUT,
        "List tensors as in the checkpoint, by name, or the largest first.",
        choices=(_STORED, *_SORTS),
        default=_STORED,
    ),
    ALL,
    HTML,
    Option(
        "--stats",
        READ,
        "Read all data of the model, for norms, ranges, NaN and infinities in the page of --html.",
    ),
    OVERWRITE_HTML,
    JSON,
    order=1,
)
def inspect(
    output: Output,
    src: str,
    tensors: str | None,
    select: str | None,
    also: Sequence[str],
    model_config: str | None,
    base: str | None,
    map: str | None,  # noqa: A002
    src_option: Mapping[str, object],
    sort: str,
    all: bool,  # noqa: A002
    **page: Any,
) -> None:
    """Show the contents of a checkpoint.

        ckptkit inspect runs/llama
        ckptkit inspect runs/megatron --base Llama-3.2-1B
        ckptkit inspect runs/llama --tensors '*.mlp.*' --sort size
        ckptkit inspect runs/llama --html report.html --stats

    Tensors, how they are split over ranks, tied weights, problems, and the command to run next;
    of another framework's checkpoint, what its tensors become; of a delta, its versions and what
    changed. Only headers are read, but for --stats.
    """
    from ckptkit.conversion.inspect import run_inspection
    from ckptkit.deltas.form import is_delta

    check_html(**page)
    html = page["html"]
    sources = Sources(src, src_option)
    if is_delta(sources.first):
        if html is not None:
            raise RefusedError("there is no page of a delta", where="--html", hint="leave it out")
        from ckptkit.deltas.checks import inspect_delta

        delta = inspect_delta(sources.first)
        delta = replace(delta, tensors=_choose(delta.tensors, tensors))
        output.document(delta.to_json())
        output.lines(_delta_page(output, delta))
        return
    inspection = run_inspection(
        sources.first,
        select=select,
        also=sources.further(also),
        model_config=sources.optional(model_config),
        base=sources.optional(base),
        choice=map,
        shards=html is not None,
        lists=html is None,
    )
    written = _write_page(output, inspection, sources.first, select, sources.further(also), page)
    listed = tensors or ("*" if all or sort != _STORED else None)
    chosen = _choose(inspection.tensors, tensors)
    chosen = chosen if sort == _STORED else tuple(sorted(chosen, key=_SORTS[sort]))
    inspection = replace(inspection, tensors=chosen)
    typed = InspectArguments(src, select, tuple(also), base, map, model_config)
    output.document(inspection.to_json())
    page_lines = inspection_page(output, inspection, typed, pattern=listed, shows_all=all)
    output.lines([*page_lines, *written])


def _write_page(
    output: Output,
    inspection: Inspection,
    source: Place,
    select: str | None,
    also: Sequence[Place],
    page: Mapping[str, Any],
) -> list[str]:
    """Writes the page of a checkpoint, with the run that it is in, if there is to be one."""
    if page["html"] is None:
        return []
    from ckptkit.report.page import plan_inspection_report

    statistics, remark = None, ""
    if page["stats"]:
        statistics, remark = _measure(output, inspection, source, select, also)
    document = plan_inspection_report(
        inspection,
        statistics=statistics,
        run=_find_run_of(inspection, source),
        remarks=[remark] if remark else [],
    )
    return write_html(document, page["html"], overwrite=page["overwrite"])


def _measure(
    output: Output, inspection: Inspection, source: Place, select: str | None, also: Sequence[Place]
) -> tuple[Statistics | None, str]:
    """Measures the model of a checkpoint, or returns why it cannot be measured.

    A checkpoint that is damaged still gets a page, which shows the damage.
    """
    from ckptkit import api
    from ckptkit_cli._progress import Progress

    if not any(tree.part == "model" for tree in inspection.trees):
        return None, "There are no statistics, since there is no model."
    with Progress(output, "stats") as progress:
        try:
            return api.stats(source, select=select, also=also, listener=progress.listen), ""
        except InputError as error:
            output.warn(f"the page has no statistics: {error}")
            return None, f"There are no statistics: {error}"


def _find_run_of(inspection: Inspection, source: Place) -> RunListing | None:
    """Lists the run that a checkpoint is a step of; None if it is in none."""
    from ckptkit.formats.discovery import parse_step
    from ckptkit.runs.listing import list_run

    folder, name = posixpath.split(inspection.path.rstrip("/"))
    if parse_step(name) is None:
        return None
    try:
        return list_run(source.beside(folder or "."))
    except InputError:
        return None


_LISTED_CHANGES = 20
_CHANGE_HEADER = ("STORED", "CHANGED", "DTYPE", "SHAPE", "NAME")


def _delta_page(output: Output, delta: DeltaInspection) -> Iterator[str]:
    share = delta.changed_share
    yield output.styled(escaped(delta.path), "bold")
    yield (f"  version     {delta.version:,}, to be applied to version {delta.base_version:,}")
    yield f"  encoding    {delta.encoding}, checksums {delta.checksum}"
    yield f"  on disk     {counted(delta.files, 'file')}, {size_text(delta.size_bytes)}"
    if delta.base is not None:
        yield f"  made from   {escaped(delta.base)}"
        yield f"  leads to    {escaped(str(delta.source))}"
    text = counted(len(delta.tensors), "tensor")
    if delta.unchanged is not None and share is not None:
        text += f" of {len(delta.tensors) + delta.unchanged:,}; {share:.3%} of the elements of"
        text += f" {size_text(delta.model_bytes or 0)}"
    yield f"  changed     {text}"
    if not delta.tensors:
        return
    rows: list[tuple[str, ...]] = [_CHANGE_HEADER]
    ordered = sorted(delta.tensors, key=lambda line: -line.stored_bytes)
    for line in ordered[:_LISTED_CHANGES]:
        known = line.changed_elements is not None and line.size_bytes is not None
        rows.append(
            (
                size_text(line.stored_bytes),
                f"{line.changed_elements:,}" if known else "",
                line.dtype or "",
                "" if line.shape is None else str(list(line.shape)),
                escaped(line.name),
            )
        )
    yield ""
    yield from table(rows, width=output.width, right={0, 1})
    if len(ordered) > _LISTED_CHANGES:
        yield f"  and {len(ordered) - _LISTED_CHANGES:,} more; --json lists all of them"
    yield ""
    yield output.styled("Next", "bold")
    step = escaped(f"ckptkit delta apply BASE {delta.path} OUT")
    yield f"  {output.styled(step, 'cyan')}"


_Line = TypeVar("_Line", "TensorLine", "DeltaLine")


def _choose(tensors: Sequence[_Line], pattern: str | None) -> tuple[_Line, ...]:
    """Returns the tensors to be listed, of a checkpoint or a delta: those that match."""
    return tuple(one for one in tensors if pattern is None or matches(one.name, (pattern,)))


class NextStep(Struct, frozen=True):
    """A command to run next, or none, and a remark on it; both are safe to print."""

    command: str
    remark: str = ""


class InspectArguments(Struct, frozen=True):
    """The arguments of an inspection."""

    source: str
    select: str | None = None
    also: tuple[str, ...] = ()
    base: str | None = None
    map: str | None = None
    model_config: str | None = None


def next_step(inspection: Inspection, typed: InspectArguments) -> NextStep:
    """Chooses the command that a user would want to run next."""
    from ckptkit.plan.weight_kinds import explain_lost_adapter

    # Files in several directories have the same paths below each of them.
    path = typed.source if typed.select is not None or typed.also else inspection.path
    models = list(dict.fromkeys(tree.name for tree in inspection.trees if tree.part == "model"))
    command, remark = "", ""
    if inspection.checkpoints:
        whole = [one.select for one in inspection.checkpoints if not one.problem]
        if not whole:
            return NextStep("", "none of them is whole, so that there is nothing to take")
        command = _command("inspect", typed.source, typed=replace(typed, select=whole[0]))
        remark = "" if len(whole) == 1 else f"or another of the {len(whole):,} that are whole"
    elif (
        inspection.problems
        and typed.model_config is None
        and all("--model-config DIR" in str(problem) for problem in inspection.problems)
    ):
        command = _command("consolidate", path, "OUT", "--model-config", "DIR", typed=typed)
        remark = _WITHOUT_NAMES
    elif inspection.problems:
        command = _command("verify", path, typed=typed)
        remark = "reads all data and lists what is damaged; consolidate refuses incomplete data"
    elif not models:
        remark = explain_lost_adapter(line.name for line in inspection.tensors)
        remark = remark or "nothing to consolidate: there is no model here"
    elif inspection.adapter is not None:
        return _of_adapter(inspection.adapter, path, typed)
    elif len(models) > 1:
        return _choice(inspection, models, path, typed)
    elif inspection.peft is not None:
        peft = inspection.peft
        remark = "; ".join(filter(None, [f"this is {peft.title}, not a model", peft.advice]))
        remark = escaped(remark)
    elif inspection.format == "safetensors" and inspection.model_type:
        command = _command("verify", path, typed=typed)
        remark = "reads all data; these weights load as they are"
    elif inspection.framework or inspection.map is not None:
        return _of_framework(inspection, path, typed)
    else:
        return _of_model(inspection, path, typed)
    return NextStep(command, remark)


_WITHOUT_NAMES = (
    "DIR is a folder with the config.json of the model that was trained, which shows what the flat"
    " parameters consist of"
)
_WITHOUT_CONFIG = (
    f"{SOME_MODEL} is the model that was trained: its id on the Hub, or a folder with its"
    " config.json, which the checkpoint lacks"
)


def _of_model(inspection: Inspection, path: str, typed: InspectArguments) -> NextStep:
    """Returns the command that writes a model, with what it needs to load."""
    refusal = next(iter(inspection.refusals.values()), "")
    if refusal:
        command = _command("consolidate", path, "OUT", "--names", "live", typed=typed)
        return NextStep(command, f"writes the raw state dict, since {escaped(refusal)}")
    words = _base_options(inspection, typed)
    command = _command("consolidate", path, "OUT", *words, typed=typed)
    if SOME_MODEL not in words:
        return NextStep(command, "")
    from ckptkit.formats.others.fairseq2 import UNPROVEN_PARTS

    if UNPROVEN_PARTS in inspection.notes:
        return NextStep(command, f"{_WITHOUT_CONFIG}; its shapes prove that no part is missing")
    return NextStep(command, f"{_WITHOUT_CONFIG}; without --base, weights alone are written")


def _base_options(inspection: Inspection, typed: InspectArguments) -> list[str]:
    """Returns the options that name a configuration, with a placeholder if none is known."""
    base = typed.base or (None if inspection.model_type is not None else SOME_MODEL)
    given = {"--base": base, "--model-config": typed.model_config}
    return [word for name, value in given.items() if value is not None for word in (name, value)]


def _of_framework(inspection: Inspection, path: str, typed: InspectArguments) -> NextStep:
    """Returns the command for a checkpoint with the names of another framework."""
    words = [] if typed.map in {None, "auto"} else ["--map", str(typed.map)]
    if typed.base is not None:
        words = ["--base", typed.base, *words]
    refusal = inspection.map_refusal
    if inspection.model_type is None and typed.base is None and typed.map != "none":
        return NextStep(
            _command("consolidate", path, "OUT", "--base", SOME_MODEL, *words, typed=typed),
            f"{SOME_MODEL} is the model that was trained: its id on the Hub, or a folder with its"
            " config.json, whose sizes the conversion of"
            f" {inspection.framework}'s names needs; `ckptkit inspect --base {SOME_MODEL}` shows"
            " what becomes what",
        )
    remark = ""
    if refusal is not None:
        remark = f"is refused: {refusal['where']}: {refusal['message']}; {refusal['hint']}"
    command = _command("consolidate", path, "OUT", *words, typed=typed)
    return NextStep(command, escaped(remark))


def _of_adapter(adapter: AdapterFacts, path: str, typed: InspectArguments) -> NextStep:
    from ckptkit.conversion.source.adapters import build_selection_options

    chosen = build_selection_options(typed.select, typed.also)
    adapter = adapter if typed.base is None else replace(adapter, base=typed.base)
    merge = escaped(adapter.merge(path, chosen=chosen))
    extract = escaped(adapter.extract(path, chosen=chosen))
    remark = f"; {escaped(adapter.remark)}" if adapter.remark else ""
    if adapter.lost:
        text = f"{counted(len(adapter.lost), 'module')}, such as {adapter.lost[0]!r}"
        return NextStep(
            "",
            f"PEFT would leave out {escaped(text)}, which the base does not have: pass the base"
            " that the adapter was trained on with --base",
        )
    if adapter.of_text:
        text = f"{counted(len(adapter.of_text), 'module')}, such as {adapter.of_text[0]!r}"
        return NextStep(
            merge,
            f"PEFT would leave out {escaped(text)}, with this base: they are of its text model"
            f" alone, and it loads as the multimodal one{remark}",
        )
    if not adapter.is_extractable:
        what = f"this is LoRA in {escaped(adapter.form)}'s form, which PEFT does not load"
        return NextStep(merge, f"{what}{remark}")
    if adapter.is_ready:
        return NextStep(merge, f"{_say_who_loads(adapter, path, typed)}{remark}")
    if adapter.holds_base:
        return NextStep(merge, f"or, for the adapter alone, `{extract}`{remark}")
    return NextStep(extract, f"or, for the merged model, `{merge}`{remark}")


def _say_who_loads(adapter: AdapterFacts, path: str, typed: InspectArguments) -> str:
    from ckptkit.plan.weight_kinds import PEFT

    inside = [escaped(posixpath.join(path, folder)) for folder in adapter.folders if folder]
    where = "this folder" if not inside else " and ".join(inside)
    where = f"each of {where}" if len(inside) > 1 else where
    if adapter.is_compared or adapter.library != PEFT:
        return f"{adapter.library} loads {where} as it is"
    said = f"{where} has the names of PEFT's files, which were not compared with those of the base"
    return said if typed.base is not None else f"{said}: --base does"


def _choice(
    inspection: Inspection, models: list[str], path: str, typed: InspectArguments
) -> NextStep:
    taken = [name for name in models if name not in inspection.refusals]
    if not taken:
        return NextStep("", f"nothing to consolidate: {escaped(inspection.refusals[models[0]])}")
    words = _base_options(inspection, typed)
    chosen = replace(typed, select=taken[0])
    command = _command("consolidate", path, "OUT", *words, typed=chosen)
    others = ", ".join(map(escaped, taken[1:]))
    remark = f"or another of the {len(taken)} models: {others}"
    if not others:
        remark = f"the only one of {len(models)} state dicts that can be written as a model"
    without = f"; {_WITHOUT_CONFIG}; without --base, weights alone are written"
    return NextStep(command, f"{remark}{without if SOME_MODEL in words else ''}")


def _command(name: str, *words: str, typed: InspectArguments) -> str:
    from ckptkit.conversion.source.adapters import build_selection_options

    chosen = build_selection_options(typed.select, typed.also)
    return escaped(shlex.join(["ckptkit", name, *words, *chosen]))


_LARGEST = 5
_PROBLEMS = 10
_NAMED_OBJECTS = 4
_LISTED_RANKS = 8
_LISTED_STEPS = 8
_LISTED_TIES = 5
_LABEL = 11
_TENSOR_HEADER = ("SIZE", "DTYPE", "SHAPE", "CHUNKS", "NAME")
_TENSOR_RIGHT = (0, 3)
_PARTS: tuple[Part, ...] = ("model", "average", "optimizer", "other")


def inspection_page(
    output: Output,
    inspection: Inspection,
    typed: InspectArguments,
    *,
    pattern: str | None,
    shows_all: bool = False,
) -> Iterator[str]:
    """Yields the lines of the page."""
    page = _Page(output, inspection)
    yield output.styled(escaped(inspection.path), "bold")
    if inspection.checkpoints:
        yield from page.checkpoints(shows_all=shows_all)
        yield from page.problems()
        yield from page.notes()
        yield from page.next(typed)
        return
    yield from page.facts(typed)
    if pattern is not None:
        yield from page.matches(pattern, shows_all=shows_all)
        return
    yield from page.trees()
    yield from page.splits()
    yield from page.ties()
    yield from page.problems()
    yield from page.notes()
    if inspection.map is not None and typed.map is not None:
        yield from page.rules(inspection.map)
    yield from page.largest()
    yield from page.next(typed)


class _Page:
    """The sections of the page, each with its heading; empty sections are left out."""

    def __init__(self, output: Output, inspection: Inspection) -> None:
        self._output = output
        self._inspection = inspection
        self._width = output.width
        self._trees = sorted(inspection.trees, key=lambda tree: _PARTS.index(tree.part))

    def heading(self, text: str) -> Iterator[str]:
        yield ""
        yield self._output.styled(text, "bold")

    def next(self, typed: InspectArguments) -> Iterator[str]:
        yield from self.heading("Next")
        step = next_step(self._inspection, typed)
        if step.command:
            yield f"  {self._output.styled(step.command, 'cyan')}"
        yield from self.prose([step.remark] if step.remark else [])

    def checkpoints(self, *, shows_all: bool) -> Iterator[str]:
        """Lists what there is where none is chosen."""
        found = self._inspection.checkpoints
        shown, rest = limit_list(self._output, found, shows_all=shows_all)
        rows = [("NAME", "FORMAT", "STEP", "STATE")]
        for one in shown:
            step = "" if one.step is None else f"{one.step:,}"
            state = "not whole" if one.problem else "whole"
            rows.append((escaped(one.select), one.format, step, state))
        yield from self.heading(counted(len(found), "checkpoint"))
        yield from self._table(rows, right=(2,), elastic=())
        yield from rest

    def facts(self, typed: InspectArguments) -> Iterator[str]:
        inspection, metrics = self._inspection, self._inspection.metrics
        size = f"{counted(inspection.files, 'file')}, {size_text(inspection.size_bytes)}"
        model = escaped(inspection.model_type or "")
        if inspection.architectures:
            names = escaped(", ".join(map(str, inspection.architectures)))
            model = f"{model} ({names})" if model else names
        yield from self._fact("format", escaped(inspection.format))
        layout = f", layout {inspection.layout}" if inspection.layout else ""
        writer, version = inspection.writer, inspection.version
        writer = writer if version in writer else f"{writer} {version}"
        yield from self._fact("written by", escaped(f"{writer}{layout}"))
        yield from self._fact("step", "" if inspection.step is None else f"{inspection.step:,}")
        yield from self._fact("saved at", escaped(inspection.saved_at or ""))
        yield from self._fact(
            "metrics", ", ".join(f"{escaped(name)} {value:.6g}" for name, value in metrics.items())
        )
        yield from self._fact(
            "ranks", "" if inspection.world_size is None else f"{inspection.world_size:,}"
        )
        yield from self._fact(
            "mesh",
            escaped(", ".join(f"{axis.name} {axis.size:,}".strip() for axis in inspection.mesh)),
        )
        yield from self._fact("model", model)
        yield from self._fact("names", escaped(self._names(listed=typed.map is not None)))
        if inspection.peft is not None and not inspection.peft.is_of_lora:
            yield from self._fact("adapter", inspection.peft.title)
        yield from self._fact(
            "packed",
            ", ".join(f"{counted(n, 'weight')} as {t}" for t, n in inspection.packing.items()),
        )
        yield from self._fact("on disk", size)
        objects = inspection.objects
        if objects:
            tops = Counter(name.split(".", 1)[0] for name in objects)
            named = ", ".join(name for name, _ in tops.most_common(_NAMED_OBJECTS))
            named += ", ..." if len(tops) > _NAMED_OBJECTS else ""
            text = f"{counted(len(objects), 'value')} besides the tensors ({escaped(named)})"
            yield from self._fact("also", text)
        if inspection.finals:  # else the notes have the steps that were left alone
            steps = first_of([escaped(step) for step in inspection.steps[::-1]], _LISTED_STEPS)
            yield from self._fact("steps", ", ".join(steps))
            models = [
                f"{escaped(label)}{f' (not whole: {escaped(lack)})' if lack else ''}"
                for label, lack in inspection.finals.items()
            ]
            yield from self._fact("beside", f"{', '.join(models)}; --select takes one")
        yield from self._fact("ignored", escaped(", ".join(map(str, inspection.ignored))))
        if inspection.problems:
            text = counted(len(fold_problems(inspection.problems)), "problem")
            yield from self._fact("state", self._output.styled(text, "red"))

    def _names(self, *, listed: bool) -> str:
        """Returns which framework's names these are, and what becomes of them."""
        framework, found = self._inspection.framework, self._inspection.map
        if found is None:
            return f"those of {framework}" if framework else ""
        taken = counted(sum(len(rule.sources) for rule in found.rules), "tensor")
        made = sum(len(rule.targets) for rule in found.rules)
        text = f"those of {found.source}; map {found.name} makes {made:,} of {taken}"
        return text if listed else f"{text} (--map auto shows how)"

    def _fact(self, label: str, text: str) -> list[str]:
        if not text:
            return []
        indent = " " * (_LABEL + 3)
        first = f"  {self._output.styled(f'{label:<{_LABEL}}', 'dim')} "
        lines = wrapped(text, width=self._width, first=indent, rest=indent)
        return [first + lines[0][len(indent) :], *lines[1:]]

    def trees(self) -> Iterator[str]:
        rows = [("NAME", "PART", "TENSORS", "SIZE", "DTYPES")]
        for tree in self._trees:
            sizes = [f"{name} {size_text(size)}" for name, size in tree.dtypes.items()]
            dtypes = next(iter(tree.dtypes)) if len(sizes) == 1 else ", ".join(sizes)
            size = size_text(tree.size_bytes)
            rows.append((escaped(tree.name) or "-", tree.part, f"{tree.tensors:,}", size, dtypes))
        yield from self.heading("State dicts")
        if len(rows) == 1:
            yield "  none"
            return
        yield from self._table(rows, right=(2, 3))

    def splits(self) -> Iterator[str]:
        inspection = self._inspection
        lines = []
        for tree in self._trees:
            if set(tree.split) - {"whole"}:
                ways = ", ".join(
                    f"{count:,} {'by ' if way.startswith('dimension') else ''}{way}"
                    for way, count in tree.split.items()
                )
                lines.append(f"{self._title(tree)}: {ways}")
        if len(inspection.bytes_per_rank) > 1:
            lines.append(_ranks(inspection.bytes_per_rank))
        if not lines:
            return
        yield from self.heading("Split")
        yield from self.prose(lines)

    def _title(self, tree: TreeLine) -> str:
        name = escaped(tree.name) or tree.part
        shared = sum(other.name == tree.name for other in self._trees) > 1
        return f"{name} ({tree.part})" if shared else name

    def ties(self) -> Iterator[str]:
        ties = self._inspection.tied
        if not ties:
            return
        yield from self.heading("Tied weights")
        lines = []
        for tie in ties:
            names = " = ".join(map(escaped, tie.names))
            said = (
                "tied by the configuration" if tie.declared else "not declared by a configuration"
            )
            proof = {True: "same bytes", False: "but the bytes differ", None: "bytes not compared"}
            lines.append(f"{names}  ({said}, {proof[tie.equal]})")
        yield from self.prose(first_of(lines, _LISTED_TIES))

    def problems(self) -> Iterator[str]:
        problems = self._inspection.problems
        if not problems:
            return
        alike: dict[str, list[Problem]] = {}
        for problem in problems:
            alike.setdefault(problem.code, []).append(problem)
        kinds = Counter({code: len(fold_problems(same)) for code, same in alike.items()})
        counts = ", ".join(f"{count:,} {escaped(code)}" for code, count in kinds.most_common())
        yield ""
        title = f"{'Problem' if kinds.total() == 1 else 'Problems'}: {counts}"
        yield self._output.styled(title, "red")
        yield from self.prose(first_of(fold_problems(problems), _PROBLEMS))

    def notes(self) -> Iterator[str]:
        if self._inspection.notes:
            yield from self.heading("Notes")
            yield from self.prose([escaped(note) for note in self._inspection.notes])

    def rules(self, report: MapReport) -> Iterator[str]:
        """Shows what each rule of a name map takes and makes."""
        title = f"Map {report.name}: {report.source} to {report.target}"
        yield from self.heading(escaped(title))
        for rule in report.rules:
            for line in _fold_shapes(rule.sources):
                yield from wrapped(escaped(line), width=self._width, rest="      ")
            made = _fold_shapes(rule.targets)
            if rule.left_out:
                made = [f"left out: {rule.left_out}"]
            for line in made:
                text = escaped(line)
                yield from wrapped(text, width=self._width, first="    -> ", rest="       ")
            padding = dict.fromkeys((rule.padding or {}).values())
            remarks = [f"rows {first:,} to {count - 1:,} are padding" for first, count in padding]
            for line in filter(None, ["; ".join([*rule.steps, *remarks])]):
                text = self._output.styled(escaped(line), "dim")
                yield from wrapped(text, width=self._width, first="       ", rest="       ")

    def largest(self) -> Iterator[str]:
        lines = self._inspection.tensors
        part = next((part for part in _PARTS if any(line.part == part for line in lines)), None)
        if part is None:
            return
        candidates = [line for line in lines if line.part == part]
        chosen = sorted(candidates, key=lambda line: -line.size_bytes)[:_LARGEST]
        yield from self.heading(f"Largest of {counted(len(candidates), f'{part} tensor')}")
        rows = [_TENSOR_HEADER, *map(_tensor_row, chosen)]
        elastic = [len(_TENSOR_HEADER) - 1]
        if len({line.tree for line in chosen}) > 1:
            homes = ["STATE DICT", *(escaped(line.tree) or "-" for line in chosen)]
            rows = [(*row[:-1], home, row[-1]) for row, home in zip(rows, homes, strict=True)]
            elastic.append(len(_TENSOR_HEADER))
        yield from self._table(rows, right=_TENSOR_RIGHT, elastic=elastic)
        if len(lines) > len(chosen):
            yield self._output.styled("  --tensors '*' lists all of them", "dim")

    def matches(self, pattern: str, *, shows_all: bool) -> Iterator[str]:
        """Lists tensors with their full names, however wide that is."""
        if not self._inspection.tensors:
            yield from self.heading(f"No tensor matches {escaped(repr(pattern))}")
        for tree in self._trees:
            lines = [
                line
                for line in self._inspection.tensors
                if (line.tree, line.part) == (tree.name, tree.part)
            ]
            if lines:
                count = f"{len(lines):,} of {counted(tree.tensors, 'tensor')}"
                size = size_text(sum(line.size_bytes for line in lines))
                yield from self.heading(f"{self._title(tree)}: {count}, {size}")
                shown, rest = limit_list(self._output, lines, shows_all=shows_all)
                rows = [_TENSOR_HEADER, *map(_tensor_row, shown)]
                yield from self._table(rows, right=_TENSOR_RIGHT, elastic=())
                yield from rest

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


def _tensor_row(line: TensorLine) -> tuple[str, ...]:
    size = size_text(line.size_bytes)
    return size, line.dtype, str(list(line.shape)), f"{line.chunks:,}", escaped(line.name)


def _ranks(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"each of {len(sizes):,} ranks wrote {size_text(sizes[0])}"
    if len(sizes) <= _LISTED_RANKS:
        each = ", ".join(f"{rank}: {size_text(size)}" for rank, size in enumerate(sizes))
        return f"written per rank: {each}"
    from statistics import median

    low, middle, high = (size_text(int(f(sizes))) for f in (min, median, max))
    return f"{len(sizes):,} ranks wrote {low} to {high} each, half of them at most {middle}"


def _fold_shapes(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns names and shapes, folded: numbers as ranges, siblings as alternatives."""
    from ckptkit.conversion.mapped_names import fold_names  # imported already where there is a map

    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    folded = [(n, list(shape)) for shape, names in by_shape.items() for n in fold_names(names)]
    merged: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, size in folded:
        before, _, last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        rest = name[len(before) + len(last) + bool(before) :]
        merged.setdefault((before, rest), []).append((last, str(size)))
    lines = []
    for (before, rest), siblings in merged.items():
        lasts, sizes = [last for last, _ in siblings], [text for _, text in siblings]
        last = lasts[0] if len(lasts) == 1 else f"({'|'.join(lasts)})"
        listed = sizes[0] if len(set(sizes)) == 1 else ", ".join(sizes)
        lines.append(f"{before}{'.' if before else ''}{last}{rest}  {listed}")
    return lines
