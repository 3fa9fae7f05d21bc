"""Compares names and shapes of an output with the model of its configuration.

The installed transformers reports what loading would report, in a process of its own while tensors
are copied. Without it, the headers of the base model or the counts in the configuration are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.class_facts import find_left_out, find_text_config
from ckptkit.consumers.table import TRANSFORMERS, Consumer, name_model
from ckptkit.conversion.naming_program import (
    AnswerCache,
    NamingProgram,
    find_transformers_version,
    list_missing_libraries,
)
from ckptkit.conversion.source.model_folders import (
    read_entries_if_any,
    read_names,
    read_shapes_if_any,
)
from ckptkit.core.errors import CkptkitError, InputError, RefusedError, error_from_json
from ckptkit.core.index import Shape, is_named_as_copy
from ckptkit.core.text import without_url_secrets
from ckptkit.engine.outcome import Listener, Planned, Waiting
from ckptkit.hub_names.known_models import (
    BASE_PREFIXES,
    compare_packed_parts,
    compare_with_base,
    compare_with_counts,
    determine_need,
    is_as_described,
    is_counted_beyond_layers,
    is_made_by_model,
    lay_out,
)
from ckptkit.plan.load_report import (
    CONSOLIDATE,
    Advice,
    LoadReport,
    LoadRequest,
    MisfitError,
    find_copies,
    make_refusal,
    take_prefix,
)

LIVE_NAMES = "names and shapes are not compared with the model of config.json: --names live"
_DTYPES = ("dtype", "torch_dtype")  # no name or shape depends on these
_OLDEST = 5  # the first transformers whose loading can be asked
_TIMEOUT_SECONDS = 120  # after all is copied
_SILENT_SECONDS = 1.0  # before `Waiting` is reported


class Subject(Struct, frozen=True):
    """What is compared."""

    config: Mapping[str, Any] | None  # as it is written, with its `auto_map`
    tensors: Mapping[str, tuple[Any, Shape]]  # those that are written or left out
    left_out: frozenset[str]  # the names that the user left out
    where: str  # the source, for messages
    base: str | None = None  # the model that the configuration is from, which has to be matched
    filling: str | None = None  # the model of `--base`, which may have what the output lacks
    is_live: bool = False  # whether names are those of training, which can differ on disk
    consumer: Consumer = TRANSFORMERS  # the library that loads the output
    advice: Advice = CONSOLIDATE  # the options that messages propose

    @property
    def request(self) -> LoadRequest:
        """The question to transformers."""
        config = {key: value for key, value in (self.config or {}).items() if key != "auto_map"}
        return LoadRequest(
            config, self.tensors, self.left_out, is_packed=bool(config.get("quantization_config"))
        )

    @property
    def library(self) -> dict[str, str]:
        """The library that is asked, if it is not transformers, as a part of the question."""
        return {} if self.consumer.owns_config else {"library": self.consumer.library}

    @property
    def written(self) -> list[str]:
        return [name for name in self.tensors if name not in self.left_out]

    def within(self, prefix: str, rest: Collection[str] = ()) -> Subject:
        """Returns the tensors with a prefix, without it and without some others."""
        inner = [name for name in self.tensors if name.startswith(prefix) and name not in rest]
        tensors = {name.removeprefix(prefix): self.tensors[name] for name in inner}
        left_out = {n.removeprefix(prefix) for n in self.left_out if n.startswith(prefix)}
        return replace(self, tensors=tensors, left_out=frozenset(left_out))

    @property
    def has_code(self) -> bool:
        return bool((self.config or {}).get("auto_map"))


class Comparison:
    """A comparison with what transformers reports, which answers during other work."""

    def __init__(self, subject: Subject, program: NamingProgram) -> None:
        """Takes what is compared, and the process that answers."""
        request = subject.request
        config = {key: value for key, value in request.config.items() if key not in _DTYPES}
        question = {**request.to_json(), "config": config}
        self._question = json.dumps({"loading": question, **subject.library}).encode()
        self._cache = AnswerCache(request.config)
        self._subject = subject
        self._program = program
        self._answer: Future[bytes] | None = None

    def read_cached(self) -> LoadReport | None:
        """Returns the cached answer, or None."""
        cached = self._cache.read(self._question)
        with suppress(LookupError, TypeError, ValueError):  # else it is asked for again
            return None if cached is None else LoadReport.from_json(cached)
        return None

    def begin(self) -> Future[bytes]:
        """Asks transformers unless that was done; does not wait."""
        if self._answer is None:
            self._answer = self._program.ask(self._question)
        return self._answer

    def finish(self, listener: Listener) -> None:
        """Waits for the answer, and refuses an output that would not load."""
        if not wait([self.begin()], _SILENT_SECONDS).done:
            library = self._subject.library.get("library", "transformers")
            listener(Waiting(f"{library} has compared the names with the model"))
        notes = self.judge_answer()
        if notes:
            listener(Planned(notes))

    def close(self) -> None:
        """Ends the process that answers, where the plan is kept for longer than the answer."""
        self._program.close()

    def judge_answer(self) -> tuple[str, ...]:
        """Waits for the answer; refuses an output that would not load, or returns notes."""
        try:
            document = self._program.wait(self.begin(), "", _TIMEOUT_SECONDS)
            if "error" in document:
                raise error_from_json(document["error"])
            report = LoadReport.from_json(document)
        except CkptkitError as error:
            return _judge_without_asking(self._subject, error.message)
        except (LookupError, TypeError, ValueError):
            reason = "the program that asks transformers gave no answer"
            return _judge_without_asking(self._subject, reason)
        self._cache.keep(self._question, document)
        return judge(self._subject, report)


def plan_comparison(
    subject: Subject, program: NamingProgram
) -> tuple[Comparison | None, tuple[str, ...]]:
    """Compares what can be compared without waiting, and prepares the rest.

    Returns:
        The rest, if there is any, and notes for the user.
    """
    if subject.config is None:
        return None, _judge_without_asking(subject, "") if _shapes_of_base(subject) else ()
    why, installed = "", find_transformers_version()
    missing = list_missing_libraries(subject.consumer.library)
    digits = re.match(r"\d+", installed[0]) if installed is not None else None
    if missing:
        why = f"{' and '.join(missing)} cannot be imported"
    elif subject.consumer.comparing == "diffusers":
        pass  # its configuration names a class
    elif subject.consumer.comparing in {"headers", "nothing"} or not isinstance(
        subject.config.get("model_type"), str
    ):
        why = "config.json names no model type"
        if name_model(subject.config):
            why = f"a model of {subject.consumer.name} is compared with that of --base alone"
    elif installed is not None and digits is not None and int(digits[0]) < _OLDEST:
        why = f"transformers {installed[0]} is too old"
    is_tried = digits is None or digits[0] == str(_OLDEST)
    is_asked = subject.consumer.comparing == "transformers"
    if is_asked and is_tried and is_as_described(subject.request):
        return None, ()
    if why:
        return None, _judge_without_asking(subject, why)
    comparison = Comparison(subject, program)
    report = comparison.read_cached()
    if report is not None:
        return None, judge(subject, report)
    if _looks_wrong(subject):
        return None, comparison.judge_answer()  # it is awaited before anything is written
    return comparison, ()


def is_whole_model(subject: Subject, program: NamingProgram) -> bool:
    """Returns whether names and shapes were compared with the model, and are all of it."""
    try:
        comparison, notes = plan_comparison(subject, program)
        return not (notes or (comparison is not None and comparison.judge_answer()))
    except RefusedError:
        return False


def propose_parts(
    subject: Subject, error: MisfitError, program: NamingProgram, command: str
) -> MisfitError:
    """Returns the error with whole commands for the tensors of one prefix, such as a copy."""
    report, advice = error.report, CONSOLIDATE
    if report is None or not report.prefix:
        return error
    hints = []
    copies = find_copies(report.prefix, subject.written)
    others = tuple(copy for copy in copies if copy)
    for prefix in copies or [report.prefix]:
        rest = {
            name
            for name in subject.tensors
            if not prefix and (name in report.unexpected or name.startswith(others))
        }
        more = _complete(subject.within(prefix, rest), program)
        if more is None:
            continue
        options = f"{take_prefix(prefix, report, subject.written)} {more}".strip()
        kind = "the copy" if copies else "the tensors"
        what = f"{kind} {prefix!r}" if prefix else f"{kind} without a prefix"
        hints.append(f"for {what} run `{command} {options}`")
    return error.hinted("; or ".join(filter(None, [*(hints or [advice.config]), advice.anyway])))


def _complete(subject: Subject, program: NamingProgram) -> str | None:
    """Returns the options with which tensors are written that would load; None for none.

    Tensors are written as they are only where no parameter would be missing, or where most have the
    names of other code than the model's.
    """
    text = find_text_config(subject.config or {}, subject.written)
    if is_whole_model(subject, program):
        return ""
    if text is not None and is_whole_model(replace(subject, config=text, base=None), program):
        return ""
    report: LoadReport | None = None  # of what loading would find, where that is not nothing
    try:
        comparison, _ = plan_comparison(subject, program)
        if comparison is not None:
            comparison.judge_answer()
    except MisfitError as error:
        report = error.report
    except RefusedError:
        pass
    if report is None or len(report.unexpected) > len(subject.written) / 2:
        return "--names live"
    if report.missing:
        if subject.filling is None:
            return None
        added: dict[str, Any] = {}
        with suppress(InputError):  # weights of the base may be damaged or missing
            entries = read_entries_if_any(subject.filling)
            added = {str(e.name): (e.dtype, e.shape) for e in entries}
        filled = replace(subject, tensors={**added, **subject.tensors})
        return "--fill-from-base" if is_whole_model(filled, program) else None
    own = [name for name in subject.written if name not in report.unexpected]
    rest = replace(subject, tensors={name: subject.tensors[name] for name in own})
    if report.unexpected and is_whole_model(rest, program):
        return take_prefix("", report, subject.written)
    return "--names live"


def _looks_wrong(subject: Subject) -> bool:
    if _may_be_wrapped(subject) or any(map(is_named_as_copy, subject.written)):
        return True  # messages propose what of it is a model
    if not subject.is_live and lay_out(subject.request.config) is not None:
        return not is_as_described(subject.request)
    return any(not report.is_clean for report in _compare_without_asking(subject))


def _may_be_wrapped(subject: Subject) -> bool:
    """Returns whether all names may begin with what a wrapper of the model put there."""
    names = [name.partition(".") for name in subject.written]
    if subject.is_live or len({first for first, _, _ in names}) != 1:
        return False
    base = _shapes_of_base(subject)
    if base:
        return any(rest in base for _, _, rest in names)
    return any(rest.partition(".")[0] in BASE_PREFIXES for _, _, rest in names)


def find_lacking(subject: Subject) -> tuple[tuple[str, ...], list[str]]:
    """Returns what the base has on disk and the output lacks, though it loads.

    Returns:
        The names of tensors, and those of buffers that models make themselves.
    """
    shapes = _shapes_of_base(subject)
    if not shapes:
        return (), []
    made = sorted(name for name in shapes if is_made_by_model(name) and name not in subject.tensors)
    return compare_with_base(subject.request, shapes, "").missing, made


def compare_now(subject: Subject, doubt: str = "") -> tuple[str, ...]:
    """Compares, waits for the answer, and returns notes for the user."""
    if doubt:
        return _judge_without_asking(subject, doubt)
    with NamingProgram() as program:
        comparison, notes = plan_comparison(subject, program)
        return notes if comparison is None else comparison.judge_answer()


def judge(subject: Subject, report: LoadReport) -> tuple[str, ...]:
    """Refuses an output that would not load by a report; returns notes for the user."""
    config = subject.request.config
    unused = (name for name in report.unexpected if not is_counted_beyond_layers(name, config))
    report = replace(report, unexpected=tuple(unused))
    is_clean = report.is_clean or (subject.is_live and report.is_loaded)  # as training has names
    if is_clean and subject.request.is_packed:
        # Transformers was asked for weights; the base also has what a method packs with them.
        base = _shapes_of_base(subject)
        if base:
            report = compare_packed_parts(subject.request, base, _describe_base(subject.base))
            if not report.is_clean:
                raise _refuse(subject, report)
    if is_clean:
        return ()
    if subject.has_code:
        return _judge_without_asking(subject, "the model has code of its own beside config.json")
    raise _refuse(subject, report)


def _refuse(subject: Subject, report: LoadReport) -> MisfitError:
    filling = "--fill-from MODEL" if subject.advice.fills and report.missing else ""
    if filling and subject.filling is not None:
        with suppress(InputError):  # weights of the base may be damaged or missing
            names = set(read_names(subject.filling)).difference(subject.written)
            filling = "--fill-from-base" if len(names) >= len(report.missing) else filling
    return make_refusal(report, subject.written, subject.where, subject.advice, filling)


def _judge_without_asking(subject: Subject, why: str) -> tuple[str, ...]:
    """Compares without transformers where that is possible; returns notes for the user."""
    reports = _compare_without_asking(subject)
    for report in reports:
        if not (report.is_clean or (subject.is_live and report.is_loaded)):
            raise _refuse(subject, report)
    if reports:
        return ()
    return (f"names and shapes were not compared with the model of config.json: {why}",)


def _compare_without_asking(subject: Subject) -> list[LoadReport]:
    """Returns the reports that need no transformers, the most certain first."""
    request, reports = subject.request, list[LoadReport]()
    counts = None if subject.has_code else compare_with_counts(request)
    base = _shapes_of_base(subject)
    if base:
        report = compare_with_base(request, base, _describe_base(subject.base))
        left_out = find_left_out(report.missing, request.config)
        missing = tuple(name for name in report.missing if name not in left_out)
        reports.append(replace(report, missing=missing))
    if counts is not None:
        reports.append(counts)
    return reports


def _shapes_of_base(subject: Subject) -> Mapping[str, Shape | None]:
    """Returns the shapes of the base by names on disk; nothing where its names may differ."""
    need = determine_need(subject.config, has_base=True)
    if subject.base is None or (subject.is_live and need.kind == "ask"):
        return {}
    with suppress(InputError):  # weights of the base that are not needed may be damaged
        shapes = read_shapes_if_any(subject.base)
        if shapes:
            return shapes
    with suppress(InputError):  # there may be an index without its files
        return dict.fromkeys(map(str, read_names(subject.base)))
    return {}


def _describe_base(base: str | None) -> str:
    return f"the model in {without_url_secrets(str(base))}"
