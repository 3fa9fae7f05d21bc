"""The run of `ckptkit adapter extract`, and what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.texts import size_text
from ckptkit.pipeline.adapters.extracting import (
    ExtractedAdapter,
    prepared_extraction,
    run_extraction,
)
from ckptkit.pipeline.adapters.sources import AdapterRequest
from ckptkit.pipeline.destination import check_destination
from ckptkit.planning.requests import Resources
from ckptkit_cli._adapter_table import layer_table, layers_json
from ckptkit_cli._output import Output
from ckptkit_cli._plan_page import plan_json, plan_page
from ckptkit_cli._progress import Progress
from ckptkit_cli._text import counted, escaped

_TITLE = "adapter extract"


@dataclass(frozen=True, slots=True)
class Extraction:
    """What was asked for.

    Attributes:
        src: The checkpoint as the user typed it.
        out: The directory as the user typed it.
        request: Which adapter is meant.
        overwrite: Whether an output that holds something is replaced.
        report: Whether the layers are listed.
    """

    src: str
    out: str
    request: AdapterRequest
    overwrite: bool
    report: bool

    def run(self, output: Output) -> None:
        """Writes the adapter, and tells what was written."""
        began = time.perf_counter()
        with Progress(output, _TITLE) as progress:
            done = run_extraction(
                self.src,
                self.out,
                self.request,
                overwrite=self.overwrite,
                listener=progress.listen,
            )
        seconds = time.perf_counter() - began
        progress.warn(done.notes)
        output.document(self._json(done, seconds))
        output.lines(self._page(output, done, seconds))

    def show_plan(self, output: Output) -> None:
        """Shows what a run would do, and fails where it would fail before its first byte."""
        check_destination(self.src, self.out, overwrite=self.overwrite, also=self.request.also)
        with prepared_extraction(self.src, self.out, self.request, Resources()) as (plan, found):
            layers = layers_json(found.rows, found.norms)
            output.document({**plan_json(plan, self.out), "layers": layers})
            output.lines(plan_page(output, plan, self.out))
            if self.report:
                output.lines(["", *layer_table(output, found.rows, found.norms)])

    def _json(self, done: ExtractedAdapter, seconds: float) -> dict[str, Any]:
        manifest = done.manifest
        return {
            "out": self.out,
            "manifest": str(Path(self.out) / MANIFEST_NAME),
            "kind": manifest.kind,
            "source": dict(manifest.source),
            "options": dict(manifest.options),
            "adapter": done.name,
            "config": done.config_path or None,
            "tensors": len(manifest.tensors),
            "files": [{"path": p, "bytes": f.size_bytes} for p, f in manifest.files.items()],
            "bytes": sum(file.size_bytes for file in manifest.files.values()),
            "seconds": round(seconds, 6),
            "unverified": _unverified(done),
            "layers": layers_json(done.rows, done.norms),
            "notes": list(done.notes),
        }

    def _page(self, output: Output, done: ExtractedAdapter, seconds: float) -> Iterator[str]:
        manifest = done.manifest
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        ranks = sorted({row.rank for row in done.rows if row.rank is not None})
        yield output.styled(escaped(self.out), "bold")
        yield (
            f"  wrote      {counted(len(manifest.tensors), 'tensor')} of adapter"
            f" {escaped(repr(done.name))}, {size_text(size_bytes)}, in {seconds:.2f} s"
        )
        shown = ", ".join(map(str, ranks)) or "none"
        trained = sum(row.kind != "frozen" for row in done.rows)
        yield f"  layers     {counted(trained, 'module')}, rank {shown}"
        yield f"  config     {escaped(done.config_path) or 'inferred from the tensors'}"
        unverified = len(_unverified(done))
        if unverified < len(manifest.tensors):
            proven = counted(len(manifest.tensors) - unverified, "tensor")
            yield output.styled(f"  checked    {proven} proven by CRC-32", "green")
        if unverified:
            text = f"  unchecked  {counted(unverified, 'tensor')} whose source stored no checksum"
            yield output.styled(text, "yellow")
        if self.report:
            yield from layer_table(output, done.rows, done.norms)
        line = f"peft.PeftModel.from_pretrained(model, {self.out!r})"
        yield f"  load it    {output.styled(escaped(line), 'cyan')}"


def _unverified(done: ExtractedAdapter) -> list[str]:
    return [name for name, one in done.manifest.tensors.items() if one.proof == "unverified"]
