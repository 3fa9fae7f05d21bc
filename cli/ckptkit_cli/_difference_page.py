"""The run of `ckptkit adapter from-diff`, and what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.core.texts import size_text
from ckptkit.pipeline.adapters.from_diff import DiffRequest, run_adapter_from_diff
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress
from ckptkit_cli._text import counted, escaped, table

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
