"""`ckptkit doctor`: what will hurt a run, before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import counted
from ckptkit_cli._options import JSON, KEPT, LIMITS, OUTPUT, READ, SRC_OPTION
from ckptkit_cli._output import Output, Style, escaped, exit_unless, wrapped
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.diagnosis.findings import Diagnosis, Finding, Severity

_STYLES: Mapping[Severity, Style] = {"error": "red", "warning": "yellow", "ok": "green"}


@command(
    Argument(
        "places",
        "[RUN|CONFIG]...",
        "The run, or where it will be, as a directory or a URL; and configuration files of"
        " accelerate or the Trainer (YAML or JSON). By default this directory.",
        repeated=True,
        optional=True,
    ),
    Option(
        "--model-size",
        LIMITS,
        "Parameters of the model, if the run has no step to go by: 8B, 350M. A step takes 12 bytes"
        " for each: weights in float32, and two moments of Adam.",
        "N",
    ),
    Option("--ranks", LIMITS, "Ranks of the job; by default those of CONFIG.", "N", count=4),
    Option("--nodes", LIMITS, "Nodes of the job; by default those of CONFIG, or 1.", "N", count=4),
    Option("--keep-last", KEPT, "How many steps will stay.", "N", count=4),
    Option("--steps", LIMITS, "How many more steps will be saved.", "N", count=4),
    Option(
        "--local", READ, "The directory on the node's own disk where steps are saved first.", "DIR"
    ),
    Option("--no-probe", OUTPUT, "Write nothing; locks and speed are not tried then."),
    SRC_OPTION,
    JSON,
    order=17,
)
def doctor(
    output: Output,
    places: Sequence[str],
    *,
    no_probe: bool,
    src_option: Mapping[str, Any],
    **options: Any,
) -> None:
    """Look for what will hurt a run, before it starts.

        ckptkit doctor runs/llama accelerate.yaml --keep-last 3

    Room for the steps to come, memory, /dev/shm, limits of processes and files, the file system and
    its speed, installed versions with known faults, and conditions and checksums of S3. Run it on
    the node, and in the environment, of the training.

    Writes nothing but a probe: a file without a name of at most 256 MB for about a second, or three
    small objects in a store, which it removes. Exits with 6 if there is an error.
    """
    from ckptkit.api import doctor as examine

    diagnosis = examine(places, probe=not no_probe, src_options=src_option, **options)
    output.document(diagnosis.to_json())
    output.lines(diagnosis_page(output, diagnosis))
    exit_unless(not diagnosis.errors)


def diagnosis_page(output: Output, diagnosis: Diagnosis) -> Iterator[str]:
    """Yields the findings, a paragraph for each that hurts and a line for each other one."""
    for finding in diagnosis.findings:
        if finding.severity == "ok":
            yield from _line(output, finding)
        else:
            yield from _paragraph(output, finding)
    counts = Counter(finding.severity for finding in diagnosis.findings)
    yield (
        f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')},"
        f" {counts['ok']:,} ok"
    )


def _paragraph(output: Output, finding: Finding) -> Iterator[str]:
    label = output.styled(finding.severity, _STYLES[finding.severity])
    yield f"{label} {output.styled(escaped(f'{finding.where}'), 'bold')}: {finding.id}"
    texts = {"found": finding.found, "wanted": finding.expected, "do": finding.advice}
    texts["source"] = finding.source
    for name, text in texts.items():
        if text:
            yield from wrapped(
                escaped(text), width=output.width, first=f"  {name:<7} ", rest=" " * 10
            )
    yield ""


def _line(output: Output, finding: Finding) -> Iterator[str]:
    text = f"{finding.id}  {finding.where}: {finding.found}"
    text += f"; {finding.advice}" if finding.advice else ""
    lines = wrapped(escaped(text), width=output.width, first="ok ", rest="   ")
    label = output.styled("ok", "green")
    yield from (f"{label}{line[2:]}" if not at else line for at, line in enumerate(lines))
