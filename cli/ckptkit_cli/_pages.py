"""What `ckptkit consolidate` says when it is done.

What `ckptkit consolidate --dry-run` shows.

What a command says of a source that goes once the output is proven.

What a command says that has written one slice of an output.

What `ckptkit watch` shows: a line for each event, and one that says how things stand.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.manifest import BY_STORE, MANIFEST_NAME, Manifest
from ckptkit.core.text import size_text
from ckptkit.engine.outcome import BytesWritten, Event, Started
from ckptkit.engine.prefetch import GAP_BYTES, REQUEST_BYTES
from ckptkit.engine.windows import planned_reads
from ckptkit.hub.watch.events import EventName, WatchEvent, WatchMetrics
from ckptkit.plan.plan import TASK_BYTES, Compute, OutputFile
from ckptkit.plan.selection import what_loads_as_random
from ckptkit.plan.side_files import CONFIG
from ckptkit.storage.places import is_url
from ckptkit_cli._output import (
    Output,
    counted,
    escaped,
    first_of,
    shortened,
    stamped,
    table,
    wrapped,
)

if TYPE_CHECKING:
    from ckptkit.conversion.delete_source import SourceRemoval
    from ckptkit.plan.shares import Share


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_HEAD = "lm_head.weight"  # for configurations that name no architecture
_LISTED_TIES = 5


@dataclass(frozen=True, slots=True)
class Consolidated:
    """A finished consolidation.

    Attributes:
        out: The directory as the user typed it.
        manifest: What was written there.
        seconds: How long it took, planning and syncing included.
        notes: What the user should know.
        kept: Whether it was there already, and was only verified.
    """

    out: str
    manifest: Manifest
    seconds: float
    notes: tuple[str, ...]
    kept: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files.values())

    @property
    def unverified(self) -> list[str]:
        """Names of tensors whose source stored no checksum."""
        return [n for n, t in self.manifest.tensors.items() if t.proof == "unverified"]

    @property
    def copied_by_store(self) -> int:
        """How many tensors have bytes that the store copied, and proved, by itself."""
        return sum(1 for one in self.manifest.tensors.values() if one.proof == BY_STORE)

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain values; all details are in the manifest."""
        unverified = self.unverified
        return {
            "out": self.out,
            "kept": self.kept,
            "manifest": _below(self.out, MANIFEST_NAME),
            "kind": self.manifest.kind,
            "source": dict(self.manifest.source),
            "options": dict(self.manifest.options),
            "tensors": len(self.manifest.tensors),
            "files": [
                {"path": path, "bytes": file.size_bytes}
                for path, file in self.manifest.files.items()
            ],
            "bytes": self.size_bytes,
            "seconds": round(self.seconds, 6),
            "bytes_per_second": round(self.size_bytes / self.seconds),
            "proven": len(self.manifest.tensors) - len(unverified),
            "copied_by_store": self.copied_by_store,
            "unverified": unverified,
            "tied": dict(self.manifest.tied),
            "notes": list(self.notes),
        }


def consolidation_page(output: Output, done: Consolidated) -> Iterator[str]:
    """Yields the lines for people."""
    manifest = done.manifest
    speed = size_text(round(done.size_bytes / done.seconds))
    yield output.styled(escaped(done.out), "bold")
    yield (
        f"  {'kept' if done.kept else 'wrote':<10} {counted(len(manifest.tensors), 'tensor')} in"
        f" {counted(len(manifest.files), 'file')}, {size_text(done.size_bytes)}, in"
        f" {done.seconds:.2f} s ({speed}/s)"
    )
    yield from _proof(output, done)
    ties = [f"{name} = {source}" for name, source in manifest.tied.items()]
    for position, tie in enumerate(first_of(ties, _LISTED_TIES)):
        label = "" if position else "tied"
        yield from wrapped(escaped(tie), width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield f"  load it    {output.styled(escaped(loading_line(done)), 'cyan')}"


def _proof(output: Output, done: Consolidated) -> Iterator[str]:
    unverified = len(done.unverified)
    proven = len(done.manifest.tensors) - unverified
    if proven:
        text = f"  checked    {counted(proven, 'tensor')} proven by CRC-32"
        if done.copied_by_store:
            text += f", {done.copied_by_store:,} of them copied by the store itself"
        yield output.styled(text, "green")
    if unverified:
        text = f"  unchecked  {counted(unverified, 'tensor')} whose source stored no checksum"
        yield output.styled(text, "yellow")


def loading_line(done: Consolidated) -> str:
    """Returns the line of Python that opens the output."""
    path = repr(str(done.out))
    if is_url(done.out):
        return f"ckptkit.open({path})"
    if done.manifest.kind == "dcp":
        return _dcp_line(done)
    tensors = ((name, one.shape, one.dtype) for name, one in done.manifest.tensors.items())
    config = _config_of(done)
    if config is not None and not what_loads_as_random(tensors, config=config):
        return f"transformers.{_model_class(done, config)}.from_pretrained({path})"
    return _weights_line(done)


def _weights_line(done: Consolidated) -> str:
    files = done.manifest.files
    weights = [name for name in files if name.endswith(".safetensors")]
    if len(weights) == 1:
        return f"safetensors.torch.load_file({str(Path(done.out) / weights[0])!r})"
    if "pytorch_model.bin" in files:
        return f"torch.load({str(Path(done.out) / 'pytorch_model.bin')!r}, weights_only=True)"
    return f"ckptkit.open({str(done.out)!r})"


def _dcp_line(done: Consolidated) -> str:
    index = next(name for name in done.manifest.files if Path(name).name == ".metadata")
    folder = str((Path(done.out) / index).parent)
    return f"torch.distributed.checkpoint.load({{'model': model.state_dict()}}, {folder!r})"


def _below(out: str, name: str) -> str:
    return f"{out}/{name}" if is_url(out) else str(Path(out) / name)


def _config_of(done: Consolidated) -> dict[str, Any] | None:
    """Returns the configuration that was written; empty where it cannot be read."""
    if CONFIG not in done.manifest.files:
        return None
    try:
        return dict(json.loads((Path(done.out) / CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _model_class(done: Consolidated, config: dict[str, Any]) -> str:
    manifest = done.manifest
    try:
        name = str(config["architectures"][0])
    except (LookupError, TypeError):
        name = _CAUSAL[0] if _HEAD in manifest.tensors or _HEAD in manifest.tied else "AutoModel"
    if name.endswith(_CAUSAL):
        return "AutoModelForCausalLM"
    return name if name.isidentifier() and name.isascii() else "AutoModel"


def plan_json(prepared: PlannedOutput, out: str) -> dict[str, Any]:
    """Returns the plan as plain values."""
    plan, estimate = prepared.plan, prepared.estimate
    return {
        "dry_run": True,
        "source": prepared.checkpoint.path,
        "format": prepared.checkpoint.index.format,
        "out": out,
        "tensors": sum(1 for _ in plan.specs()),
        "files": [_file_json(file) for file in plan.files],
        "tied": dict(plan.dropped),
        "tasks": sum(1 for _ in plan.tasks()),
        "workers": prepared.settings.workers,
        "bytes_read": estimate.bytes_read,
        "bytes_written": estimate.bytes_written,
        "bytes_free": estimate.bytes_free,
        "peak_bytes": estimate.peak_bytes,
        "notes": list(plan.notes),
        **_requests_json(prepared),
    }


def _requests_json(prepared: PlannedOutput) -> dict[str, Any]:
    reads = planned_reads(prepared.plan, prepared.inputs.origins)
    if reads is None:
        return {}
    sizes = {"bytes": reads.size_bytes, "most_bytes": REQUEST_BYTES, "gap_bytes": GAP_BYTES}
    return {"requests": {"count": reads.requests, **sizes}}


def _file_json(file: OutputFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "bytes": file.size_bytes,
        "tensors": _tensors_in(file),
        "dtypes": dict(_dtypes_in(file)),
    }


def plan_page(output: Output, prepared: PlannedOutput, out: str) -> Iterator[str]:
    """Yields the plan's lines for people."""
    yield output.styled(f"Plan for {escaped(out)}; nothing was written", "bold")
    for label, text in _facts(prepared):
        yield from wrapped(text, width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield ""
    yield from _files(output, prepared.plan.files)
    if prepared.plan.notes:
        yield ""
        yield output.styled("Notes", "bold")
        for note in prepared.plan.notes:
            yield from wrapped(escaped(note), width=output.width, rest="    ")


def _facts(prepared: PlannedOutput) -> Iterator[tuple[str, str]]:
    plan, estimate = prepared.plan, prepared.estimate
    checkpoint = prepared.checkpoint
    dtypes: Counter[str] = Counter()
    for file in plan.files:
        dtypes.update(_dtypes_in(file))
    tasks = sum(1 for _ in plan.tasks())
    yield "source", f"{escaped(checkpoint.path)} ({escaped(checkpoint.index.format)})"
    yield "tensors", f"{sum(1 for _ in plan.specs()):,}: {_in_words(dtypes)}"
    computed = sum(isinstance(segment.body, Compute) for _, segment, _ in plan.specs())
    if computed:
        yield "computed", counted(computed, "tensor")
    ties = [f"{name} = {source}" for name, source in plan.dropped.items()]
    for tie in first_of(ties, _LISTED_TIES):
        yield "tied", escaped(tie)
    yield "reads", size_text(estimate.bytes_read)
    reads = planned_reads(plan, prepared.inputs.origins)
    if reads is not None:
        yield (
            "requests",
            (
                f"about {reads.requests:,} for {size_text(reads.size_bytes)}, of at most"
                f" {size_text(REQUEST_BYTES)} each; gaps of up to {size_text(GAP_BYTES)} are read"
                " with what lies around them"
            ),
        )
    yield (
        "writes",
        (
            f"{size_text(estimate.bytes_written)} in {counted(len(plan.files), 'file')}, by"
            f" {counted(tasks, 'task')} of at most {size_text(TASK_BYTES)}"
        ),
    )
    yield "disk", _room(prepared)
    yield (
        "memory",
        (
            f"about {size_text(estimate.peak_bytes)} at its peak, with"
            f" {counted(prepared.settings.workers, 'thread')}"
        ),
    )


def _room(prepared: PlannedOutput) -> str:
    free, needed = prepared.estimate.bytes_free, prepared.estimate.bytes_written
    if free is None:
        return "free space unknown"
    verdict = "" if needed <= free else ": too little"
    return f"{size_text(free)} free{verdict}"


def _files(output: Output, files: tuple[OutputFile, ...]) -> Iterator[str]:
    rows = [("FILE", "SIZE", "TENSORS", "DTYPES")]
    for file in files:
        tensors = _tensors_in(file)
        rows.append(
            (
                escaped(file.path),
                size_text(file.size_bytes),
                f"{tensors:,}" if tensors else "-",
                ", ".join(_dtypes_in(file)) or "-",
            )
        )
    lines = table(rows, width=output.width, right=(1, 2))
    yield output.styled(lines[0], "dim")
    yield from lines[1:]


def _tensors_in(file: OutputFile) -> int:
    return sum(segment.spec is not None for segment in file.segments)


def _dtypes_in(file: OutputFile) -> Counter[str]:
    """Returns the bytes of each element type."""
    sizes: Counter[str] = Counter()
    for segment in file.segments:
        if segment.spec is not None:
            sizes[segment.spec.dtype.name] += segment.spec.size_bytes
    return sizes


def _in_words(dtypes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in dtypes.items()) or "none"


def removal_json(removal: SourceRemoval | None) -> dict[str, Any]:
    """Returns what `--json` prints of what goes, or went; nothing where the source stays."""
    return {} if removal is None else {"deleted": removal.to_json()}


def planned_page(output: Output, removal: SourceRemoval | None) -> Iterator[str]:
    """Yields the lines of a plan for people: every file that would go."""
    if removal is None:
        return
    yield ""
    yield output.styled(f"Removed from {escaped(removal.root.location)}, when proven", "bold")
    for file in removal.files:
        yield f"  {size_text(file.size_bytes):>10}  {escaped(file.path)}"
    if removal.values:
        text = counted(removal.values, "value")
        yield f"  with {text} that are no tensors, and are in no output"


def removed_page(removal: SourceRemoval | None) -> Iterator[str]:
    """Yields the lines of a result for people."""
    if removal is not None:
        yield (
            f"  removed    {counted(len(removal.files), 'file')} of the source,"
            f" {size_text(removal.size_bytes)}, after the output was read back"
        )


_LISTED = 8


def slice_json(share: Share | None, missing: Sequence[int], out: str) -> dict[str, Any]:
    """Returns the `--json` document of a slice that was not the last."""
    return {"out": out, "slice": str(share), "missing": list(missing)}


def slice_page(share: Share | None, missing: Sequence[int], out: str) -> Iterator[str]:
    """Yields the lines for people."""
    yield f"slice {share} of {escaped(out)} is written"
    if missing:
        listed = ", ".join(first_of([str(number) for number in missing], _LISTED))
        yield f"it appears when these are too: {listed}"
    else:
        yield "another slice puts it in place; where that one was killed, run it again"


_CLEAR = "\r\x1b[K"
_REDRAW_SECONDS = 0.1
_LISTED_STEPS = 20
_BAD = {"failed": "red", "retrying": "yellow", "warning": "yellow", "passed": "yellow"}


class WatchPage:
    """Listens to a watch, from several threads, and writes what it hears.

    Events go to stdout, as text or as JSON lines. The line that says how things stand is drawn on
    stderr, where that is a terminal.
    """

    def __init__(self, output: Output, metrics: WatchMetrics, *, as_json: bool) -> None:
        """Chooses what is shown.

        Args:
            output: Knows whether somebody watches, and colours.
            metrics: What the events add up to.
            as_json: Whether events are written as JSON.
        """
        self._output = output
        self._metrics = metrics
        self._as_json = as_json
        self._lock = threading.RLock()
        self._shows_status = output.shows_progress and not as_json
        self._where = ""
        self._done = self._total = 0
        self._drawn = 0.0

    def listen(self, event: WatchEvent) -> None:
        """Takes notice of an event."""
        self._metrics.listen(event)
        with self._lock:
            if event.name == "started":
                self._where = f"{event.facts['run']} to {event.facts['repo_id']}"
            if event.name in {"building", "pushing"}:
                self._done = self._total = 0
            self._wipe()
            self._write(event)
            if event.name == "stopped":
                self._shows_status = False
            self._draw()

    def progress(self, event: Event) -> None:
        """Takes notice of bytes that were written or uploaded."""
        with self._lock:
            if isinstance(event, Started):
                self._done, self._total = 0, event.total_bytes
            elif isinstance(event, BytesWritten):
                self._done += event.size_bytes
            if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
                self._draw()

    def close(self) -> None:
        """Takes the line away that says how things stand."""
        with self._lock:
            self._wipe()
            self._shows_status = False

    def _write(self, event: WatchEvent) -> None:
        if self._as_json:
            self._output.record(stamped(event.name, event.to_json()))
            return
        at = self._output.styled(time.strftime("%H:%M:%SZ", time.gmtime()), "dim")
        about = "" if event.step is None else f"step {event.step}: "
        text = escaped(f"{about}{_told(event.name, event.facts)}")
        style = _BAD.get(event.name)
        shown = self._output.styled(text, style) if style else text  # type: ignore[arg-type]
        if event.name == "waiting" and "message" in event.facts:
            self._output.warn(text)
            return
        self._output.lines([f"{at} {shown}"])

    def _draw(self) -> None:
        if not self._shows_status:
            return
        self._drawn = time.monotonic()
        width = (self._output.width or 80) - 1
        sys.stderr.write(f"{_CLEAR}{shortened(escaped(self._status()), width)}")
        sys.stderr.flush()

    def _wipe(self) -> None:
        if self._shows_status:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

    def _status(self) -> str:
        totals = self._metrics.totals
        doing = totals.phase if totals.step is None else f"{totals.phase} step {totals.step}"
        if self._total and totals.phase in {"building", "pushing"}:
            doing += f" {min(self._done / self._total, 1):.0%} of {size_text(self._total)}"
        waiting = f", {counted(totals.waiting, 'step')} waiting" if totals.waiting else ""
        failed = sum(totals.failures.values())
        bad = f", {failed} failed" if failed else ""
        return f"{self._where}: {totals.pushed} pushed{bad}{waiting}, {doing}"


def _told(name: EventName, facts: Mapping[str, Any]) -> str:
    return _TEXTS[name](facts)


def _pushed(facts: Mapping[str, Any]) -> str:
    if facts["resumed"]:
        return f"was pushed before, as {facts['tag']} of {facts['repo_id']}: {facts['url']}"
    size = size_text(facts["uploaded_bytes"])
    return f"pushed as {facts['tag']}, {size} in {facts['seconds']:.1f} s: {facts['url']}"


def _stopped(facts: Mapping[str, Any]) -> str:
    if "error" in facts:
        return "stopped by an error"  # which the command tells, as any other does
    if "signal" in facts:
        return f"stopped by {facts['signal']}"
    if "failed" in facts:
        return f"nothing else is left to be done; {_failed(facts['failed'])}"
    return "nothing is left to be done"


def _failed(steps: Sequence[int]) -> str:
    listed = ", ".join(first_of([str(step) for step in steps], _LISTED_STEPS))
    return f"{counted(len(steps), 'step')} could not be pushed: {listed}"


def _error(facts: Mapping[str, Any]) -> str:
    error = facts["error"]
    where = f"{error['where']}: " if error["where"] else ""
    hint = f" ({error['hint']})" if error["hint"] else ""
    return f"{where}{error['message']}{hint}"


_TEXTS: dict[EventName, Callable[[Mapping[str, Any]], str]] = {
    "serving": lambda facts: f"metrics are at {facts['url']}",
    "started": lambda facts: f"watching {facts['run']} for {facts['repo_id']}",
    "waiting": lambda facts: f"waiting: {_error(facts) if 'error' in facts else facts['message']}",
    "seen": lambda _: "is to be pushed",
    "building": lambda _: "building what is pushed",
    "pushing": lambda facts: f"pushing to {facts['repo_id']}",
    "pushed": _pushed,
    "passed": lambda facts: f"is not pushed: {facts['reason']}",
    "failed": lambda facts: f"cannot be pushed: {_error(facts)}",
    "retrying": lambda facts: f"{_error(facts)}; trying again in {facts['seconds']:g} s",
    "pruned": lambda facts: f"removed from the run: {', '.join(map(str, facts['steps']))}",
    "warning": lambda facts: f"warning: {facts['message']}",
    "stopped": _stopped,
}
