"""Findings of `ckptkit doctor`, and what a run needs that they are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.text import counted, size_text

Severity = Literal["ok", "warning", "error"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "ok")


class Finding(Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        id: Stable, kebab-case name of what was looked at.
        severity: `error` if the run will fail, or lose what it saves; `warning` if it will be
            slower, or at risk; `ok` otherwise.
        where: The path, package, limit or setting.
        found: What was found.
        expected: What would be well; empty if it is.
        advice: What to do; empty if nothing is to be done.
        source: Where the fault is described, if it is one of another library.
    """

    id: str
    severity: Severity
    where: str
    found: str
    expected: str = ""
    advice: str = ""
    source: str = ""


class Diagnosis(Displayed, Struct, frozen=True):
    """All findings, errors first.

    Attributes:
        where: What was looked at.
        findings: The findings.
    """

    where: str
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "diagnosis.errors, or `finding.severity` of one of them")

    @classmethod
    def of(cls, where: str, findings: Sequence[Finding]) -> Diagnosis:
        """Sorts findings by their severity."""
        ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.severity))
        return cls(where, tuple(ordered))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self._of("warning")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def _facts(self) -> Facts:
        counts = [counted(len(self.errors), "error"), counted(len(self.warnings), "warning")]
        hurting = [finding for finding in self.findings if finding.severity != "ok"]
        rows = [(f.severity, f.where, f.found, f.advice) for f in hurting]
        return Facts(
            self.where, [("result", ", ".join(counts))], ("severity", "where", "found", "do"), rows
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the findings as plain values."""
        return {
            "where": self.where,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "findings": [plain_fields(finding) for finding in self.findings],
        }


class SaveDemand(Struct, frozen=True):
    """What the steps of a run need.

    Attributes:
        step_bytes: Of one more step, without files that it shares with earlier ones; None if
            that is unknown.
        basis: What the size is known from, for people.
        stored_steps: How many complete steps there are already.
        keep_last: How many steps stay; None if all do, or if that is unknown.
        kept_because: What that number is known from.
        to_come: How many more steps will be saved, None if that is unknown.
        files: How many files a step has.
        ranks: Of the job.
        nodes: That share its ranks evenly.
        in_flight: How many saves may be under way at once.
    """

    step_bytes: int | None = None
    basis: str = ""
    stored_steps: int = 0
    keep_last: int | None = None
    kept_because: str = ""
    to_come: int | None = None
    files: int = 0
    ranks: int = 1
    nodes: int = 1
    in_flight: int = 1

    @property
    def more_steps(self) -> int | None:
        """How many more steps the run needs room for, while a new one is written; None if unknown.

        A step is removed only after the next one is complete.
        """
        if self.keep_last is None:
            return self.to_come
        more = max(self.keep_last + 1 - self.stored_steps, 1)
        return more if self.to_come is None else min(more, self.to_come)

    @property
    def node_bytes(self) -> int | None:
        """The part of a step that is on one node."""
        return None if self.step_bytes is None else -(-self.step_bytes // max(self.nodes, 1))

    @property
    def rank_bytes(self) -> int | None:
        """The part of a step that one rank writes."""
        return None if self.step_bytes is None else -(-self.step_bytes // max(self.ranks, 1))

    @property
    def staging_bytes(self) -> int | None:
        """The memory of one node for the copies of saves that are under way."""
        return None if self.node_bytes is None else self.node_bytes * self.in_flight

    def describe(self) -> str:
        """Says how large a step is, and where that is known from."""
        return "" if self.step_bytes is None else f"{size_text(self.step_bytes)} ({self.basis})"
