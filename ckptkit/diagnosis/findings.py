"""Findings of `ckptkit doctor`, and what a run needs that they are judged by."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.text import counted

Severity = Literal["ok", "warning", "error"]


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


def judged(
    name: str, severity: Severity, where: str, found: str, expected: str, advice: str
) -> Finding:
    """Returns a finding; one that is well expects nothing, and advises nothing."""
    if severity == "ok":
        return Finding(name, "ok", where, found)
    return Finding(name, severity, where, found, expected, advice)


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

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def _facts(self) -> Facts:
        counts = [counted(len(self.errors), "error"), counted(len(self.warnings), "warning")]
        hurting = [finding for finding in self.findings if finding.severity != "ok"]
        rows = [(f.severity, f.where, f.found, f.advice) for f in hurting]
        return Facts(
            self.where, [("result", ", ".join(counts))], ("severity", "where", "found", "do"), rows
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "findings": [plain_fields(finding) for finding in self.findings],
        }


class SaveDemand(Struct, frozen=True):
    """What the steps of a run need; None where it is unknown."""

    step_bytes: int | None = None  # of one more, without files that it shares with earlier ones
    basis: str = ""  # what the size is known from, for people
    stored_steps: int = 0  # complete ones that are there already
    keep_last: int | None = None  # None also if all stay
    kept_because: str = ""
    to_come: int | None = None
    files: int = 0  # of a step
    ranks: int = 1
    nodes: int = 1  # that share the ranks evenly

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
