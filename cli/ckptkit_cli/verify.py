"""`ckptkit verify`: every stored checksum of a source, or of an output of ours.

`ckptkit diff`: two checkpoints, tensor by tensor.

The run of `ckptkit adapter from-diff`, and what it shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.adapters.from_diff import DiffRequest, run_adapter_from_diff
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.core.text import size_text
from ckptkit_cli._options import Also, AsJson, Quiet, Selection, SrcOption, sources_of
from ckptkit_cli._output import (
    Output,
    counted,
    escaped,
    exit_unless,
    first_of,
    table,
    told,
    wrapped,
)
from ckptkit_cli._progress import Progress

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference, TensorDifference
    from ckptkit.conversion.verify import Verification


_LISTED = 20


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A path in or above a checkpoint, or an output of ckptkit.",
            show_default=False,
        ),
    ],
    select: Selection = None,
    also: Also = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check all data against its checksums.

    Of an output of ckptkit every digest is checked, of anything else the checksums that its
    format stores, and that no part of a tensor is missing. Exits 6 when something is wrong.
    """
    output = Output(as_json=as_json, quiet=quiet)
    with told(output):
        from ckptkit.conversion.verify import run_verification

        with Progress(output, "verify") as progress:
            sources = sources_of(path, src_option)
            further = sources.further(also or ())
            report = run_verification(
                sources.first, select=select, also=further, listener=progress.listen
            )
        output.document(report.to_json())
        output.lines(_page(output, report))
        if quiet and not as_json:
            _tell_problems(output, report)
        exit_unless(report.ok)


def _tell_problems(output: Output, report: Verification) -> None:
    for problem in report.problems[:_LISTED]:
        output.fail(f"problem[{problem.code}]", str(problem))


def _page(output: Output, report: Verification) -> Iterator[str]:
    verdict = output.styled("ok", "green") if report.ok else output.styled("damaged", "red")
    what = "an output of ckptkit" if report.kind == "output" else "a checkpoint"
    read = f"{counted(report.tensors, 'tensor')} read, {size_text(report.size_bytes)}"
    yield f"{verdict}: {escaped(report.path)}, {what}: {read}"
    for line in report.proven:
        yield f"  {line}"
    if report.unverified:
        count = counted(len(report.unverified), "tensor")
        if report.kind == "output":
            yield f"  the source had no checksum for {count}; the digests are of what was written"
        else:
            yield f"  {count} read whole, but no checksum was stored to compare with"
    problems = [f"[{escaped(p.code)}] {escaped(str(p))}" for p in report.problems]
    if problems:
        yield output.styled(f"  {counted(len(problems), 'problem')}:", "red")
    for line in first_of(problems, _LISTED):
        yield from wrapped(line, width=output.width, first="    ", rest="      ")
    if len(problems) > _LISTED:
        yield "    --json lists all of them"


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A path in or above a checkpoint.", show_default=False),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another one, of any format.", show_default=False)
    ],
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models bit by bit.

    Tensor by tensor, whatever the two formats. Exits 6 when they differ.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.conversion.diff import run_diff

        with Progress(output, "diff") as progress:
            sources = sources_of(a, src_option)
            found = run_diff(sources.first, sources.place(b), listener=progress.listen)
        output.document(found.to_json())
        output.lines(_diff_page(output, found))
        exit_unless(found.same)


def _diff_page(output: Output, found: Difference) -> Iterator[str]:
    paths = f"{escaped(found.a)} and {escaped(found.b)}"
    equal = f"{counted(found.equal, 'tensor')} equal bit by bit"
    if found.same:
        yield f"{output.styled('same', 'green')}: {paths}: {equal}"
        return
    yield f"{output.styled('different', 'red')}: {paths}: {equal}"
    yield from _group(output, f"only in {escaped(found.a)}", found.only_in_a)
    yield from _group(output, f"only in {escaped(found.b)}", found.only_in_b)
    reshaped = [f"{name}: {a} against {b}" for name, (a, b) in found.reshaped.items()]
    yield from _group(output, "of another dtype or shape", reshaped)
    yield from _group(output, "with other values", list(map(_change, found.changed)))
    if found.note:
        yield from wrapped(f"note: {found.note}", width=output.width, first="  ", rest="    ")


def _group(output: Output, title: str, items: Sequence[str]) -> Iterator[str]:
    if not items:
        return
    yield f"  {counted(len(items), 'tensor')} {title}:"
    for item in first_of(items, _LISTED):
        yield from wrapped(escaped(item), width=output.width, first="    ", rest="      ")


def _change(change: TensorDifference) -> str:
    text = f"{change.name}: {counted(change.elements, 'element')}"
    if change.largest is None:
        return f"{text}, none of them a difference of two finite numbers"
    return f"{text}, largest difference {change.largest:.3g}"


_TITLE = "adapter from-diff"
_HEADER = ("module", "shape", "rank", "norm of the change", "relative error", "energy kept")


@dataclass(frozen=True, slots=True)
class DiffJob:
    """What was asked for.

    Attributes:
        tuned: The trained model as the user typed it.
        out: The directory as the user typed it.
        base: The model that was trained.
        request: What is to be made of the difference.
        overwrite: Whether an output that holds something is replaced.
        report: Whether the layers are listed.
    """

    tuned: str
    out: str
    base: str
    request: DiffRequest
    overwrite: bool
    report: bool

    def run(self, output: Output) -> None:
        """Writes the adapter, and tells how near it comes."""
        began = time.perf_counter()
        with Progress(output, _TITLE) as progress:
            manifest = run_adapter_from_diff(
                self.tuned,
                self.out,
                self.request,
                base=self.base,
                overwrite=self.overwrite,
                listener=progress.listen,
            )
        seconds = time.perf_counter() - began
        progress.warn(progress.notes)
        output.document(self._json(manifest, seconds, progress.notes))
        output.lines(self._page(output, manifest, seconds))

    def _json(self, manifest: Manifest, seconds: float, notes: Sequence[str]) -> dict[str, Any]:
        return {
            "out": self.out,
            "manifest": str(Path(self.out) / MANIFEST_NAME),
            "kind": manifest.kind,
            "source": {k: v for k, v in manifest.source.items() if k != "difference"},
            "options": dict(manifest.options),
            "tensors": len(manifest.tensors),
            "files": [{"path": p, "bytes": f.size_bytes} for p, f in manifest.files.items()],
            "bytes": sum(file.size_bytes for file in manifest.files.values()),
            "seconds": round(seconds, 6),
            "difference": manifest.source["difference"],
            "notes": list(notes),
        }

    def _page(self, output: Output, manifest: Manifest, seconds: float) -> Iterator[str]:
        found = manifest.source["difference"]
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        yield output.styled(escaped(self.out), "bold")
        yield (
            f"  wrote      {counted(len(manifest.tensors), 'tensor')}, {size_text(size_bytes)}, in"
            f" {seconds:.2f} s"
        )
        yield f"  layers     {counted(len(found['layers']), 'module')}, rank {self.request.rank}"
        yield (
            f"  quality    {found['energy']:.2%} of the energy of their changes is kept, relative"
            f" error {found['error']:.3g}"
        )
        if found["lost"]:
            text = (
                f"  lost       {counted(len(found['lost']), 'changed tensor')} without factors;"
                f" with them the relative error is {found['error_with_lost']:.3g}"
            )
            yield output.styled(text, "yellow")
        if self.report:
            yield from _table(output, found)
        line = f"peft.PeftModel.from_pretrained(model, {self.out!r})"
        yield f"  load it    {output.styled(escaped(line), 'cyan')}"


def _table(output: Output, found: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEADER]
    for module, layer in found["layers"].items():
        shape = " x ".join(map(str, layer["shape"]))
        numbers = (f"{layer['change']:.4g}", f"{layer['error']:.4g}", f"{layer['energy']:.2%}")
        rows.append((escaped(module), shape, str(layer["rank"]), *numbers))
    for kind in ("whole", "lost"):
        said = {"whole": ("saved whole", "0"), "lost": ("LACKING", "1")}[kind]
        for name, norm in found[kind].items():
            kept = "100%" if kind == "whole" else "0%"
            rows.append((escaped(name), said[0], "", f"{norm:.4g}", said[1], kept))
    return table(rows, width=output.width, right={2, 3, 4, 5})
