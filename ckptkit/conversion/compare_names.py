"""Whether an output would load as the model of its configuration: names and shapes are compared.

The installed transformers knows best, and answers in a process of its own while tensors are
copied; where it cannot, the headers of the base model do, or the counts in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.conversion.naming_program import (
    LoadQuestion,
    NamingProgram,
    transformers_version,
    what_is_not_installed,
)
from ckptkit.conversion.source.model_folders import names_in, shapes_there
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.index import Shape
from ckptkit.core.text import without_url_secrets
from ckptkit.engine.outcome import Event, Listener, Planned, Waiting
from ckptkit.hub_names.known_models import (
    compare_packed_parts,
    compare_with_base,
    compare_with_counts,
    determine_need,
)
from ckptkit.plan.load_report import CONSOLIDATE, Advice, LoadReport, LoadRequest, make_refusal

_OLDEST = 5  # the first transformers whose loading can be asked
_PATIENCE_SECONDS = 120  # after all is copied
_SILENT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared.

    Attributes:
        config: The configuration as it is written, or None; with `auto_map` if it had one.
        tensors: Element types and shapes of what is written and of what the user left out.
        left_out: The names that the user left out.
        where: The source, for messages.
        base: A folder of a model that the output should equal, or None. It is one only where the
            configuration is that folder's.
        is_live: Whether names are those of training, which differ from those on disk.
        advice: What the command offers.
    """

    config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[Any, Shape]]
    left_out: frozenset[str]
    where: str
    base: str | None = None
    is_live: bool = False
    advice: Advice = CONSOLIDATE

    @property
    def request(self) -> LoadRequest:
        """What transformers is asked."""
        config = {key: value for key, value in (self.config or {}).items() if key != "auto_map"}
        return LoadRequest(
            config, self.tensors, self.left_out, is_packed=bool(config.get("quantization_config"))
        )

    @property
    def written(self) -> list[str]:
        return [name for name in self.tensors if name not in self.left_out]

    @property
    def has_code(self) -> bool:
        return bool((self.config or {}).get("auto_map"))


class Comparison:
    """A comparison of which the answer may still be outstanding."""

    def __init__(
        self, subject: Subject | None = None, question: LoadQuestion | None = None
    ) -> None:
        """Takes what is compared, and what transformers is to be asked; None if nothing is."""
        self._subject = subject
        self._question = question

    def begin(self) -> None:
        """Starts what takes time; returns at once."""
        if self._question is not None:
            self._question.begin()

    def finish(self, listener: Listener) -> None:
        """Waits for the outcome; called before an output becomes visible.

        Args:
            listener: Is told that an answer is waited for, and given a note if there is none.
        """
        if self._subject is None or self._question is None:
            return
        question, self._question = self._question, None
        if not question.is_answered(_SILENT_SECONDS):
            listener(Waiting("transformers has compared the names with the model"))
        notes = _asked(self._subject, question)
        if notes:
            listener(Planned(notes))


NOTHING = Comparison()


def plan_comparison(subject: Subject, program: NamingProgram) -> tuple[Comparison, tuple[str, ...]]:
    """Compares what can be compared at once, and prepares the rest.

    Args:
        subject: What is compared.
        program: Answers later.

    Returns:
        What is still to be done, and what the user should know.
    """
    if subject.config is None:
        return NOTHING, ()
    why = _why_not_asked(subject)
    if why:
        return NOTHING, _compared_otherwise(subject, why)
    question = LoadQuestion(subject.request, program)
    report = question.known()
    if report is not None:
        return NOTHING, judge(subject, report)
    if _looks_wrong(subject):  # then nothing is written before it is known
        return NOTHING, _asked(subject, question)
    return Comparison(subject, question), ()


def compare_now(subject: Subject) -> tuple[str, ...]:
    """Compares, and waits for the outcome; returns what the user should know."""
    late: list[str] = []

    def listen(event: Event) -> None:
        late.extend(event.notes if isinstance(event, Planned) else ())

    with NamingProgram() as program:
        comparison, notes = plan_comparison(subject, program)
        comparison.finish(listen)
    return (*notes, *late)


def _why_not_asked(subject: Subject) -> str:
    """Says why transformers cannot be asked; empty where it can."""
    missing = what_is_not_installed()
    if missing:
        return f"{' and '.join(missing)} cannot be imported"
    if not isinstance((subject.config or {}).get("model_type"), str):
        return "config.json names no model type"
    found = transformers_version()
    digits = re.match(r"\d+", found[0]) if found is not None else None
    if found is not None and digits is not None and int(digits[0]) < _OLDEST:
        return f"transformers {found[0]} is too old"
    return ""


def _asked(subject: Subject, question: LoadQuestion) -> tuple[str, ...]:
    try:
        report = question.finish(_PATIENCE_SECONDS)
    except CkptkitError as error:
        return _compared_otherwise(subject, error.message)
    return judge(subject, report)


def judge(subject: Subject, report: LoadReport) -> tuple[str, ...]:
    """Refuses what a report says would not load; returns what the user should know."""
    if report.is_clean and subject.request.is_packed:
        # Transformers was asked for weights; what a method packs beside them, the base has.
        return _compared_with_base(subject)
    if report.is_clean:
        return ()
    if subject.has_code:
        return _compared_otherwise(subject, "the model has code of its own beside config.json")
    raise make_refusal(report, subject.written, subject.where, subject.advice)


def _compared_with_base(subject: Subject) -> tuple[str, ...]:
    base = _base_of(subject)
    if base:
        report = compare_packed_parts(subject.request, base, _words_for(subject.base))
        if not report.is_clean:
            raise make_refusal(report, subject.written, subject.where, subject.advice)
    return ()


def _looks_wrong(subject: Subject) -> bool:
    return any(not report.is_clean for report in _otherwise(subject))


def _compared_otherwise(subject: Subject, why: str) -> tuple[str, ...]:
    """Compares without transformers, as far as that can be done."""
    reports = _otherwise(subject)
    for report in reports:
        if not report.is_clean:
            raise make_refusal(report, subject.written, subject.where, subject.advice)
    if reports:
        return ()
    return (f"names and shapes were not compared with the model of config.json: {why}",)


def _otherwise(subject: Subject) -> list[LoadReport]:
    """Returns what can be said without transformers, the most certain first."""
    request, found = subject.request, list[LoadReport]()
    counts = None if subject.has_code else compare_with_counts(request)
    base = _base_of(subject)
    if base:
        found.append(compare_with_base(request, base, _words_for(subject.base)))
    if counts is not None:
        found.append(counts)
    return found


def _base_of(subject: Subject) -> Mapping[str, Shape | None]:
    """Returns what a base holds by the names that are written; nothing where they may differ."""
    need = determine_need(subject.config, has_base=True)
    if subject.base is None or (subject.is_live and need.kind == "ask"):
        return {}
    for look in (shapes_there, _names_there):  # an index may be there without its files
        with suppress(InputError):  # weights of the base that are not needed may be damaged
            found = look(subject.base)
            if found:
                return found
    return {}


def _words_for(base: str | None) -> str:
    return f"the model in {without_url_secrets(str(base))}"


def _names_there(folder: str) -> Mapping[str, Shape | None]:
    return dict.fromkeys(map(str, names_in(folder)))
