"""What `export` gives back: the outcome of one export, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.texts import size_text
from ckptkit.training.outcome import Outcome


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What one export cost on this rank.

    Attributes:
        path: The directory that was written.
        size_bytes: Bytes of tensors that this rank wrote.
        total_bytes: Bytes of all files but the manifest.
        durable_seconds: From the call of `export` until this rank's bytes were durable, which is
            how long it blocked.
        committed_seconds: From the call until the directory was there.
        command: Empty where `path` is the model folder. Otherwise its storage does not take
            ranges from several machines: `path` is a sharded checkpoint, and this command makes
            the folder of it.
    """

    path: Path
    size_bytes: int
    total_bytes: int
    durable_seconds: float
    committed_seconds: float
    command: str = ""

    def __str__(self) -> str:
        if self.command:
            return f"exported as shards in {self.path}; to make a folder of them: {self.command}"
        return (
            f"exported to {self.path}: {size_text(self.total_bytes)}"
            f" ({size_text(self.size_bytes)} by this rank), durable after"
            f" {self.durable_seconds:.2f} s, committed after {self.committed_seconds:.2f} s"
        )


class ExportHandle(Outcome[ExportReport]):
    """An export whose own bytes are durable; it may be asked from any thread.

    `result` returns the directory; see `ExportReport.command` for the one exception.

    Attributes:
        out: The directory to be.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(f"the export to {out}")
        self.out = out
