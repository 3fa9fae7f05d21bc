"""What commands that write a model show: the plan, the result, a slice, and removed files."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptkit.consumers.table import (
    CONFIG,
    LIGHTNING,
    PLAIN,
    TRANSFORMERS,
    find_consumer,
    name_class,
)
from ckptkit.conversion.naming_program import find_transformers_version
from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.manifest import BY_MANIFEST, BY_SOURCE, BY_STORE, MANIFEST_NAME, Manifest
from ckptkit.core.text import size_text
from ckptkit.engine.locate import GAP_BYTES, REQUEST_BYTES
from ckptkit.engine.remote_reads import estimate_reads
from ckptkit.hub_names.known_models import KNOWN_TYPES
from ckptkit.plan.plan import TASK_BYTES, Compute, OutputFile
from ckptkit.plan.weight_kinds import explain_random_weights
from ckptkit.storage.places import is_url
from ckptkit_cli._output import Output, counted, escaped, first_of, table, wrapped

if TYPE_CHECKING:
    from ckptkit_cli._progress import Progress

_HEAD = "lm_head.weight"  # for configurations that name no architecture
_EMBEDDING = "model.embed_tokens.weight"  # of a model whose head is tied to it, and is not written
_PARTIAL = {"include", "exclude"}
_LISTED_TIES = 5


class Consolidated(Struct, frozen=True):
    """The result of a command that writes a model.

    Attributes:
        out: The directory as the user typed it.
        manifest: The manifest of the output.
        seconds: The duration, including planning and syncing.
        notes: Notes for the user.
        kept: Whether the output existed, and was only verified.
        shared_bytes: How many of its bytes are blocks of the sources.
    """

    out: str
    manifest: Manifest
    seconds: float
    notes: tuple[str, ...]
    kept: bool = False
    shared_bytes: int = 0

    @property
    def copied_by_store(self) -> int:
        """How many tensors have bytes that the store copied, and verified, by itself."""
        return sum(tensor.proof == BY_STORE for tensor in self.manifest.tensors.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain values; all details are in the manifest."""
        manifest = self.manifest
        return {
            **manifest_json(self.out, manifest, self.seconds),
            "kept": self.kept,
            "shared_bytes": self.shared_bytes,
            "bytes_per_second": round(manifest.size_bytes / self.seconds),
            "proven": len(manifest.tensors) - len(manifest.unverified),
            "copied_by_store": self.copied_by_store,
            "unverified": manifest.unverified,
            "tied": dict(manifest.tied),
            "notes": list(self.notes),
        }


def manifest_json(out: str, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """Returns what the result of every command that writes an output has in common."""
    return {
        "out": out,
        "manifest": f"{out}/{MANIFEST_NAME}" if is_url(out) else str(Path(out) / MANIFEST_NAME),
        "kind": manifest.kind,
        "source": dict(manifest.source),
        "options": dict(manifest.options),
        "tensors": len(manifest.tensors),
        "files": [{"path": path, "bytes": f.size_bytes} for path, f in manifest.files.items()],
        "bytes": manifest.size_bytes,
        "seconds": round(seconds, 6),
    }


def show_output(
    output: Output,
    progress: Progress,
    out: str,
    manifest: Manifest,
    facts: Mapping[str, Any],
    notes: Iterable[str] | None = None,
) -> None:
    """Shows the notes of a command that wrote an output, and its JSON document."""
    notes = list(progress.notes if notes is None else notes)
    progress.warn(notes)
    output.document({**manifest_json(out, manifest, progress.seconds), **facts, "notes": notes})


def consolidation_page(output: Output, done: Consolidated) -> Iterator[str]:
    """Yields the lines for people."""
    manifest = done.manifest
    speed = size_text(round(manifest.size_bytes / done.seconds))
    yield output.styled(escaped(done.out), "bold")
    yield (
        f"  {'kept' if done.kept else 'wrote':<10} {counted(len(manifest.tensors), 'tensor')} in"
        f" {counted(len(manifest.files), 'file')}, {size_text(manifest.size_bytes)}, in"
        f" {done.seconds:.2f} s ({speed}/s)"
    )
    if done.shared_bytes:
        written = size_text(manifest.size_bytes - done.shared_bytes)
        yield f"  shared     {size_text(done.shared_bytes)} with the source, {written} written"
    yield from proof_lines(output, manifest, done.copied_by_store)
    ties = [f"{name} = {source}" for name, source in manifest.tied.items()]
    for position, tie in enumerate(first_of(ties, _LISTED_TIES)):
        label = "" if position else "tied"
        yield from wrapped(escaped(tie), width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield f"  load it    {output.styled(escaped(loading_line(done)), 'cyan')}"


def proof_lines(output: Output, manifest: Manifest, copied_by_store: int = 0) -> Iterator[str]:
    """Yields how many tensors of an output were proven, and how many were not."""
    unverified = len(manifest.unverified)
    proven = len(manifest.tensors) - unverified
    compared = sum(record.proof == BY_MANIFEST for record in manifest.tensors.values())
    unread = sum(record.proof == BY_SOURCE for record in manifest.tensors.values())
    if compared:
        text = f"  checked    {counted(compared, 'tensor')} proven by digests of ckptkit"
        yield output.styled(text, "green")
    if proven > compared:
        text = f"  checked    {counted(proven - compared, 'tensor')} proven by CRC-32"
        if copied_by_store:
            text += f", {copied_by_store:,} of them copied by the store itself"
        if unread:
            text += f", {unread:,} of them by the word of the source"
        yield output.styled(text, "green")
    if unverified:
        text = f"  unchecked  {counted(unverified, 'tensor')} whose source stored no checksum"
        yield output.styled(text, "yellow")


_STARTS = {
    "megatron": "pretrain_gpt.py --finetune --load",
    "torchtitan": "torchtitan.train --checkpoint.initial-load-path",
}
"""The commands of other frameworks that start from an output, by its kind."""
_WITH_OPTIMIZER = {
    "megatron": "pretrain_gpt.py --override-opt_param-scheduler --load",
    "torchtitan": (
        "torchtitan.train --checkpoint.no-initial-load-model-only"
        " --checkpoint.exclude-from-loading lr_scheduler,dataloader,train_state"
        " --checkpoint.initial-load-path"
    ),
}
"""The same, where the states of the optimizer are loaded too."""


def loading_line(done: Consolidated) -> str:
    """Returns the line of Python that opens the output, or the command that starts from it."""
    files, folder = done.manifest.files, Path(done.out)
    by_ckptkit = f"ckptkit.open({str(done.out)!r})"
    if done.manifest.kind in _STARTS:
        place = done.out if is_url(done.out) else str(folder.absolute())
        options = _WITH_OPTIMIZER if done.manifest.options.get("optimizer") else _STARTS
        return f"{options[done.manifest.kind]} {shlex.quote(place)}"
    if is_url(done.out):
        return by_ckptkit
    if done.manifest.kind == "universal":
        return (
            f"engine.load_checkpoint({str(done.out)!r}, load_lr_scheduler_states=False), with"
            ' {"checkpoint": {"load_universal": True}} in the configuration of DeepSpeed'
        )
    if done.manifest.kind == "dcp":
        index = next(name for name in files if Path(name).name == ".metadata")
        shards = str((folder / index).parent)
        return f"torch.distributed.checkpoint.load({{'model': model.state_dict()}}, {shards!r})"
    tensors = ((name, t.shape, t.dtype) for name, t in done.manifest.tensors.items())
    config = _read_document(done, CONFIG)
    consumer = find_consumer(config, files, str(done.manifest.source.get("writer", "")))
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    is_whole = _PARTIAL.isdisjoint(done.manifest.options) or "complete" in done.manifest.source
    is_random = bool(explain_random_weights(tensors, config=config))
    of_class = config
    if consumer.names_class != CONFIG:
        of_class = _read_document(done, consumer.names_class) or {}
    if consumer is TRANSFORMERS and not _has_model(config or {}):
        consumer = PLAIN
    if is_whole and of_class is not None and not is_random and consumer is not PLAIN:
        name = name_class(consumer, of_class, has_head=_has_head(done.manifest, of_class))
        return consumer.load.format(
            out=repr(str(done.out)), name=name, kind=repr(of_class.get("type"))
        )
    if len(weights) == 1:
        row = LIGHTNING if consumer is LIGHTNING and is_whole else PLAIN
        return row.load.format(weights=repr(str(folder / weights[0])))
    whole = f"torch.load({str(folder / 'pytorch_model.bin')!r}, weights_only=True)"
    return whole if "pytorch_model.bin" in files else by_ckptkit


def _has_model(config: Mapping[str, Any]) -> bool:
    """Returns whether Transformers has the model of a configuration, or loads its code from it."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return False
    installed = find_transformers_version()
    folder = re.sub(r"\W", "_", kind)
    is_installed = installed is not None and (installed[1] / "models" / folder).is_dir()
    return "auto_map" in config or kind in KNOWN_TYPES or is_installed


def _read_document(done: Consolidated, name: str) -> dict[str, Any] | None:
    """Returns a configuration that was written, empty if it cannot be read, or None."""
    if name not in done.manifest.files:
        return None
    try:
        return dict(json.loads((Path(done.out) / name).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _has_head(manifest: Manifest, config: dict[str, Any]) -> bool:
    """Returns whether the weights hold, or tie, the head of a language model."""
    is_tied = config.get("tie_word_embeddings") is True and _EMBEDDING in manifest.tensors
    return is_tied or _HEAD in manifest.tensors or _HEAD in manifest.tied


def plan_json(planned: PlannedOutput, out: str) -> dict[str, Any]:
    """Returns the plan as plain values."""
    plan, estimate = planned.plan, planned.estimate
    document = {
        "dry_run": True,
        "source": planned.checkpoint.path,
        "format": planned.checkpoint.index.format,
        "out": out,
        "tensors": sum(1 for _ in plan.specs()),
        "files": [
            {
                "path": file.path,
                "bytes": file.size_bytes,
                "tensors": _tensors_in(file),
                "dtypes": dict(_dtypes_in(file)),
            }
            for file in plan.files
        ],
        "tied": dict(plan.dropped),
        "tasks": sum(1 for _ in plan.tasks()),
        "workers": planned.settings.workers,
        "bytes_read": estimate.bytes_read,
        "bytes_written": estimate.bytes_written,
        "shared_bytes": plan.shared_bytes,
        "bytes_free": estimate.bytes_free,
        "peak_bytes": estimate.peak_bytes,
        "notes": list(plan.notes),
    }
    reads = estimate_reads(plan, planned.inputs.origins)
    if reads is not None:
        document["requests"] = {
            "count": reads[0],
            "bytes": reads[1],
            "most_bytes": REQUEST_BYTES,
            "gap_bytes": GAP_BYTES,
        }
    return document


def plan_page(output: Output, planned: PlannedOutput, out: str) -> Iterator[str]:
    """Yields the plan's lines for people."""
    yield output.styled(f"Plan for {escaped(out)}; nothing was written", "bold")
    for label, text in _facts(planned):
        yield from wrapped(text, width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield ""
    rows = [("FILE", "SIZE", "TENSORS", "DTYPES")]
    for file in planned.plan.files:
        tensors = _tensors_in(file)
        rows.append(
            (
                escaped(file.path),
                size_text(file.size_bytes),
                f"{tensors:,}" if tensors else "-",
                ", ".join(_dtypes_in(file)) or "-",
            )
        )
    header, *lines = table(rows, width=output.width, right=(1, 2))
    yield output.styled(header, "dim")
    yield from lines
    if planned.plan.notes:
        yield ""
        yield output.styled("Notes", "bold")
        for note in planned.plan.notes:
            yield from wrapped(escaped(note), width=output.width, rest="    ")


def _facts(planned: PlannedOutput) -> Iterator[tuple[str, str]]:
    plan, estimate = planned.plan, planned.estimate
    checkpoint = planned.checkpoint
    dtypes: Counter[str] = Counter()
    for file in plan.files:
        dtypes.update(_dtypes_in(file))
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in dtypes.items())
    tasks = sum(1 for _ in plan.tasks())
    yield "source", f"{escaped(checkpoint.path)} ({escaped(checkpoint.index.format)})"
    yield "tensors", f"{sum(1 for _ in plan.specs()):,}: {sizes or 'none'}"
    computed = sum(isinstance(segment.body, Compute) for _, segment, _ in plan.specs())
    if computed:
        yield "computed", counted(computed, "tensor")
    ties = [f"{name} = {source}" for name, source in plan.dropped.items()]
    for tie in first_of(ties, _LISTED_TIES):
        yield "tied", escaped(tie)
    yield "reads", size_text(estimate.bytes_read)
    reads = estimate_reads(plan, planned.inputs.origins)
    if reads is not None:
        yield (
            "requests",
            (
                f"about {reads[0]:,} for {size_text(reads[1])}, of at most"
                f" {size_text(REQUEST_BYTES)} each; gaps of up to {size_text(GAP_BYTES)} are read"
                " too"
            ),
        )
    yield (
        "writes",
        (
            f"{size_text(estimate.bytes_written)} in {counted(len(plan.files), 'file')}, by"
            f" {counted(tasks, 'task')} of at most {size_text(TASK_BYTES)}"
        ),
    )
    if plan.shared_bytes:
        yield "shares", f"{size_text(plan.shared_bytes)} of it with the source"
    free = estimate.bytes_free
    if free is None:
        yield "disk", "free space unknown"
    else:
        verdict = "" if estimate.bytes_written - plan.shared_bytes <= free else ": too little"
        yield "disk", f"{size_text(free)} free{verdict}"
    yield (
        "memory",
        (
            f"about {size_text(estimate.peak_bytes)} at its peak, with"
            f" {counted(planned.settings.workers, 'thread')}"
        ),
    )


def _tensors_in(file: OutputFile) -> int:
    return sum(segment.spec is not None for segment in file.segments)


def _dtypes_in(file: OutputFile) -> Counter[str]:
    """Returns the bytes of each element type."""
    sizes: Counter[str] = Counter()
    for segment in file.segments:
        if segment.spec is not None:
            sizes[segment.spec.dtype.name] += segment.spec.size_bytes
    return sizes
