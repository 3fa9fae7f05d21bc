"""What loading an output would miss, or not use: a question, its answer, and the words for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Shape
from ckptkit.plan.vocabulary import is_embedding, is_head

Specs = Mapping[str, tuple[DType, Shape]]
_LISTED = 3
_MOST_COMPARED = 2_000  # names among which the nearest is looked for
_SHAPE = re.compile(r"\[(\d+)(?:, \d+)*\]")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Tensors, and the configuration of the model that they are to be loaded into.

    Attributes:
        config: A parsed `config.json`.
        tensors: Element types and shapes by name, also of tensors that the user left out.
        left_out: Names of `tensors` that are not written; the model is not missing those.
        is_packed: Whether weights are packed by a quantization method, so that names alone count.
    """

    config: Mapping[str, Any]
    tensors: Specs
    left_out: frozenset[str] = frozenset()
    is_packed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values, in an order of their own."""
        return {
            "config": self.config,
            "tensors": [[n, d.name, list(s)] for n, (d, s) in sorted(self.tensors.items())],
            "left_out": sorted(self.left_out),
            "is_packed": self.is_packed,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Returns the request that plain values hold."""
        tensors = {n: (dtype_named(d), tuple(s)) for n, d, s in document["tensors"]}
        left_out = frozenset(document["left_out"])
        return cls(document["config"], tensors, left_out, document["is_packed"])


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A parameter of another shape.

    Attributes:
        name: Of the parameter.
        found: The shape that the tensors have, or what was wrong with converting them.
        expected: The shape that the model has; empty where conversion failed.
    """

    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        """Names both shapes."""
        against = f" against {self.expected}" if self.expected else ""
        return f"{self.name!r}: {self.found}{against}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading would report.

    Attributes:
        model: What was compared with, in words.
        given: How many tensors the output has.
        missing: Parameters that would be made at random.
        unexpected: Tensors that would not be used.
        mismatched: Parameters of other shapes.
        prefix: What may be stripped from the names so that they fit; empty if nothing.
        fitting: Another class of transformers that all names fit; empty if there is none.
    """

    model: str
    given: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    prefix: str = ""
    fitting: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        return {
            "model": self.model,
            "given": self.given,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "mismatched": [[one.name, one.found, one.expected] for one in self.mismatched],
            "prefix": self.prefix,
            "fitting": self.fitting,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Returns the report that plain values hold."""
        mismatched = [_texts(row) for row in document["mismatched"]]
        return cls(
            model=_text(document["model"]),
            given=int(document["given"]),
            missing=_texts(document["missing"]),
            unexpected=_texts(document["unexpected"]),
            mismatched=tuple(Mismatch(name, found, wanted) for name, found, wanted in mismatched),
            prefix=_text(document["prefix"]),
            fitting=_text(document["fitting"]),
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"found {type(value).__name__} against a text")
    return value


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(_text(value) for value in values)


# --- words ---


@dataclass(frozen=True, slots=True)
class Advice:
    """The options by which a command does what the user may have meant.

    Attributes:
        anyway: What writes, or publishes, the tensors all the same.
        strip: What takes `{prefix}` from the names; `{module}` is the same without its last dot.
        config: Where another configuration is given.
        shapes: Whether the command takes `--vocab-size` and `--exclude`.
    """

    anyway: str = "pass --names live to write the tensors as they are"
    strip: str = "pass --strip-prefix {prefix} to write the names without it"
    config: str = (
        "use the config.json of the model that was trained, beside the source or with --base"
    )
    shapes: bool = True


_AGAIN = "write {what} again with `ckptkit consolidate {source} OUT --strip-prefix {{prefix}}`"
CONSOLIDATE = Advice()
MERGE = Advice(
    strip=f"{_AGAIN.format(what='the base', source='BASE')} and pass that with --base",
    config="pass the model that the adapter was trained on, with its own config.json, with --base",
    shapes=False,
)
PUSH = Advice(
    anyway="pass --names live to publish the tensors as they are",
    strip=f"{_AGAIN.format(what='the folder', source='FOLDER')} and push that",
    config="put the config.json of the model that was trained into the folder",
    shapes=False,
)
WATCH = Advice(
    anyway="pass --names live to push the tensors of each step as they are",
    strip="pass --strip-prefix {prefix} to push the names without it",
    config="use the config.json of the model that was trained, in the step or with --base",
    shapes=False,
)
PUSH_OF_TRAINING = Advice(
    anyway="push the steps with `ckptkit watch RUN --push REPO --names live`, which pushes the"
    " tensors as they are",
    strip="push the steps with `ckptkit watch RUN --push REPO --strip-prefix {prefix}`, or save"
    ' the module inside: state={{"model": model.{module}}}',
    config="save each step with the config.json of the model that was trained, or push the steps"
    " with `ckptkit watch RUN --push REPO --base DIR_OR_REPO`",
    shapes=False,
)
EXPORT = Advice(
    anyway='pass names="live" to write the tensors as training holds them',
    strip='pass state={{"model": model.{module}}} to export the module inside',
    config='pass sidecar={"config.json": …} with the configuration of the model that is trained',
    shapes=False,
)


def refusal(
    report: LoadReport, names: Collection[str], where: str, advice: Advice = CONSOLIDATE
) -> RefusedError:
    """Returns the error that refuses an output which would not load as the model it is to be.

    Args:
        report: What loading would report.
        names: Of all tensors that would be written.
        where: The source, for messages.
        advice: What the command offers.
    """
    found = "; ".join(_findings(report))
    hints = [*_hints(report, names, advice), advice.anyway]
    joined = "; or ".join(hints)
    return RefusedError(
        f"the output would not load as {report.model}: {found}", where=where, hint=joined
    )


def _findings(report: LoadReport) -> Iterator[str]:
    if report.prefix:
        count = sum(name.startswith(report.prefix) for name in report.unexpected)
        yield (
            f"{count:,} of {report.given:,} names begin with {report.prefix!r}, which those of the"
            " model do not"
        )
    if report.missing:
        parameters = _counted(len(report.missing), "parameter")
        yield f"{parameters} would be missing and made at random, {_some(report.missing)}"
    if report.unexpected and not report.prefix:
        tensors = _counted(len(report.unexpected), "tensor")
        nearest = _nearest(report.unexpected[0], report.missing)
        yield f"{tensors} would not be used, {_some(report.unexpected)}{nearest}"
    if report.mismatched:
        parameters = _counted(len(report.mismatched), "parameter")
        shapes = "another shape" if len(report.mismatched) == 1 else "other shapes"
        verb = "has" if len(report.mismatched) == 1 else "have"
        listed = "; ".join(map(str, report.mismatched[:_LISTED]))
        yield f"{parameters} {verb} {shapes} than the model, such as {listed}"


def _hints(report: LoadReport, names: Collection[str], advice: Advice) -> Iterator[str]:
    if report.prefix:
        yield advice.strip.format(prefix=report.prefix, module=report.prefix.rstrip("."))
        return
    rows = _padded_rows(report)
    if rows and advice.shapes:
        yield (
            f"pass --vocab-size {rows} if training padded the vocabulary, or take the configuration"
            " of the model that was trained"
        )
        return
    if report.fitting:
        yield (
            f"all names fit {report.fitting}: name it in 'architectures' of config.json if that is"
            " the model that was trained"
        )
        return
    pattern = _pattern(report.unexpected, names)
    if pattern and advice.shapes and not (report.missing or report.mismatched):
        yield f"leave what the model has not out with --exclude {pattern!r}"
    yield advice.config


def _padded_rows(report: LoadReport) -> int:
    """Returns how many rows the model has where only embeddings and heads have more; else 0."""
    rows = set()
    for one in report.mismatched:
        found, expected = _SHAPE.fullmatch(one.found), _SHAPE.fullmatch(one.expected)
        name = one.name
        if not (found and expected and (is_embedding(name) or is_head(name))):
            return 0
        if (
            int(found[1]) <= int(expected[1])
            or one.found.split(",")[1:] != one.expected.split(",")[1:]
        ):
            return 0
        rows.add(int(expected[1]))
    return rows.pop() if len(rows) == 1 and not (report.missing or report.unexpected) else 0


def _pattern(unexpected: Sequence[str], names: Collection[str]) -> str:
    """Returns the pattern of a module that the model lacks as a whole; empty if there is none."""
    first = {name.split(".")[0] for name in unexpected}
    if len(first) != 1 or not all("." in name for name in unexpected):
        return ""
    prefix = f"{first.pop()}."
    return f"{prefix}*" if sum(n.startswith(prefix) for n in names) == len(unexpected) else ""


def _nearest(name: str, missing: Sequence[str]) -> str:
    found = get_close_matches(name, missing[:_MOST_COMPARED], n=1)
    return f" (nearest to {name!r}, the model has {found[0]!r})" if found else ""


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_LISTED]))
    rest = len(names) - _LISTED
    return f"{listed} and {rest:,} more" if rest > 0 else listed
