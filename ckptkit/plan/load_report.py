"""What loading an output would miss, or not use: the request, the report, and its messages."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Self

from msgspec import Struct, convert, field, to_builtins

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import COPY, Shape
from ckptkit.core.text import counted, list_first
from ckptkit.options import find_patterns
from ckptkit.plan.vocabulary import is_embedding, is_head

Specs = Mapping[str, tuple[DType, Shape]]
_LISTED = 3
_MOST_COMPARED = 2_000  # names among which the nearest is searched
_SHAPE = re.compile(r"\[(\d+)(?:, \d+)*\]")


class LoadRequest(Struct, frozen=True):
    """Tensors, and the configuration of the model that would load them."""

    config: Mapping[str, Any]
    tensors: Specs  # element types and shapes by name, also of tensors that the user left out
    # Names of `tensors` that are not written; the model is not missing those.
    left_out: frozenset[str] = frozenset()
    # Whether a quantization method packed weights, so that only names are compared.
    is_packed: bool = False

    @property
    def written(self) -> list[str]:
        return [name for name in self.tensors if name not in self.left_out]

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "tensors": [[n, d.name, list(s)] for n, (d, s) in sorted(self.tensors.items())],
            "left_out": sorted(self.left_out),
            "is_packed": self.is_packed,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        tensors = {n: (dtype_named(d), tuple(s)) for n, d, s in document["tensors"]}
        left_out = frozenset(document["left_out"])
        return cls(document["config"], tensors, left_out, document["is_packed"])


class Mismatch(Struct, frozen=True, array_like=True):
    """A parameter of another shape."""

    name: str
    found: str  # the shape of the tensors, or why they cannot be converted
    expected: str  # the shape in the model; empty where conversion failed

    def __str__(self) -> str:
        against = f" against {self.expected}" if self.expected else ""
        return f"{self.name!r}: {self.found}{against}"


class LoadReport(Struct, frozen=True):
    """What loading would report."""

    model: str  # the model that was compared with, for messages
    given: int  # how many tensors the output has
    missing: tuple[str, ...] = ()  # parameters that would be initialized at random
    unexpected: tuple[str, ...] = ()  # tensors that would not be used
    mismatched: tuple[Mismatch, ...] = ()  # parameters of other shapes
    # The prefix without which the names fit; empty if there is none. Where nothing else is
    # reported, the library that was asked takes it away, and others do not.
    prefix: str = ""
    fitting: str = ""  # another class of transformers that all names fit; empty if there is none

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.prefix)

    @property
    def is_loaded(self) -> bool:
        """Whether the library that was asked takes all tensors, by whatever names."""
        return not (self.missing or self.unexpected or self.mismatched)

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = to_builtins(self)
        return values

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        return convert(document, cls)


# --- messages ---


class Advice(Struct, frozen=True):
    """Hints with which a command helps to load the output."""

    # How to write, or publish, the tensors as they are; empty where they cannot be.
    anyway: str = "pass --names live to write the tensors as they are"
    # How to remove `{prefix}` from the names; `{module}` is the same without its last dot.
    strip: str = "pass --strip-prefix {prefix} to write the names without it"
    # How to pass another configuration.
    config: str = (
        "use the config.json of the model that was trained, beside the source or with --base"
    )
    shapes: bool = True  # whether the command takes `--vocab-size` and `--exclude`
    # The rules of the name map that made the names, by the templates of these.
    rules: Mapping[str, str] = field(default_factory=dict)
    # The command that is run again with a configuration, if it is not `consolidate`.
    again: str = ""
    fills: bool = True  # whether the command takes tensors that are missing from another model
    # How to have the merged model of an adapter; empty for `ckptkit adapter merge`.
    merged: str = ""


_AGAIN = "write {what} again with `ckptkit consolidate {source} OUT --strip-prefix {{prefix}}`"
_PUSH_PART = (
    "write the step with `ckptkit consolidate STEP OUT --strip-prefix {prefix}` and push that"
)
CONSOLIDATE = Advice()
AVERAGE = Advice(again="ckptkit average")
DELTA_CREATE = Advice(again="ckptkit delta create")
DELTA_APPLY = Advice(again="ckptkit delta apply")
MERGE = Advice(
    strip=f"{_AGAIN.format(what='the base', source='BASE')} and pass that with --base",
    config="pass the model that the adapter was trained on, with its own config.json, with --base",
    shapes=False,
    fills=False,
)
PUSH = Advice(
    anyway="pass --names live to publish the tensors as they are",
    strip=f"{_AGAIN.format(what='the folder', source='FOLDER')} and push that",
    config="put the config.json of the model that was trained into the folder",
    shapes=False,
    fills=False,
)
WATCH = Advice(
    anyway="pass --names live to push the tensors of each step as they are",
    strip="pass --strip-prefix {prefix} to push the names without it",
    config="use the config.json of the model that was trained, in the step or with --base",
    shapes=False,
    merged="pass --as merged for the model that `ckptkit adapter merge` makes of each step, with"
    " --base MODEL unless the steps hold the base too",
)
PUSH_OF_TRAINING = Advice(
    anyway="push the steps with `ckptkit watch RUN --push REPO --names live`, which pushes the"
    " tensors as they are",
    strip="push the steps with `ckptkit watch RUN --push REPO --strip-prefix {prefix}`, or save"
    ' the module inside: state={{"model": model.{module}}}',
    config="save each step with the config.json of the model that was trained, or push the steps"
    " with `ckptkit watch RUN --push REPO --base DIR_OR_REPO`",
    shapes=False,
    fills=False,
    merged="push merged models with `ckptkit watch RUN --push REPO --as merged --base MODEL`",
)
EXPORT = Advice(
    anyway='pass names="live" to write the tensors as training holds them',
    strip='pass state={{"model": model.{module}}} to export the module inside',
    config='pass sidecar={"config.json": …} with the configuration of the model that is trained',
    shapes=False,
    fills=False,
)


class MisfitError(RefusedError):
    """The output would not load as the model of its configuration."""

    # What loading would report, if it was compared in this process.
    report: LoadReport | None = None


def make_refusal(
    report: LoadReport, names: Collection[str], where: str, advice: Advice, filling: str = ""
) -> MisfitError:
    """Returns the error for an output that would not load as the model of its configuration.

    `report`: what loading would report. `names`: of all tensors that would be written. `advice`:
    the options that hints propose. `filling`: the option that would take what is missing from
    another model; empty for none.
    """
    copies = find_copies(report.prefix, names)
    differences = "; ".join(_describe_copies(copies) or _list_differences(report, names))
    wrong = (*report.missing, *report.unexpected)
    if wrong and advice.rules:
        nearest = get_close_matches(wrong[0], advice.rules, n=1, cutoff=0.0)[0]
        rule = f"{advice.rules[nearest]}, which makes {nearest!r}"
        differences += f"; the rule nearest to {wrong[0]!r} is {rule}"
    hints = "; or ".join(
        filter(None, [*_list_hints(report, names, advice, filling), advice.anyway])
    )
    error = MisfitError(
        f"the output would not load as {report.model}: {differences}", where=where, hint=hints
    )
    error.report = report
    return error


def find_copies(prefix: str, names: Collection[str]) -> list[str]:
    """Returns what the names of each copy of the model begin with, those that are published first.

    There is none where only the names with one prefix fit the model.
    """
    own = [name.removeprefix(prefix) for name in names if prefix and name.startswith(prefix)]
    there, longest = set(names), max(own, key=len, default="")
    begins = {name.removesuffix(longest) for name in names if name.endswith(f".{longest}")}
    begins |= {""} if longest in there else set()
    copies = [begin for begin in begins if all(begin + name in there for name in own)]
    return sorted(copies, key=order_of_copy) if len(copies) > 1 else []


def order_of_copy(prefix: str) -> tuple[int, str]:
    """Returns the sort key of a copy of a model by its name; what is published comes first."""
    found = COPY.search(prefix)
    rank = _RANKS.get(found[1].lower(), 1) if found is not None else 2
    return rank, prefix


# Teachers and averages are what is published; the weights of training and students follow.
_RANKS = {"teacher": 0, "online": 2, "student": 3}


def _describe_copies(copies: Sequence[str]) -> list[str]:
    named = [f"those that begin with {copy!r}" if copy else "those without one" for copy in copies]
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if copies else ""
    return [f"its tensors are {len(copies)} copies of the model: {listed}"] if copies else []


def _list_differences(report: LoadReport, names: Collection[str]) -> Iterator[str]:
    if report.prefix:
        count = sum(name.startswith(report.prefix) for name in names)
        yield (
            f"{count:,} of {report.given:,} names begin with {report.prefix!r}, which those of the"
            " model do not"
        )
    if report.missing:
        parameters = counted(len(report.missing), "parameter")
        named = list_first(report.missing, _LISTED)
        yield f"{parameters} would be missing and made at random, {named}"
    unexpected = [
        n for n in report.unexpected if not (report.prefix and n.startswith(report.prefix))
    ]
    if unexpected:
        tensors = counted(len(unexpected), "tensor")
        name = unexpected[0]
        nearest = get_close_matches(name, report.missing[:_MOST_COMPARED], n=1)
        has = f" (nearest to {name!r}, the model has {nearest[0]!r})" if nearest else ""
        yield f"{tensors} would not be used, {list_first(unexpected, _LISTED)}{has}"
    if report.mismatched:
        parameters = counted(len(report.mismatched), "parameter")
        shapes = "another shape" if len(report.mismatched) == 1 else "other shapes"
        verb = "has" if len(report.mismatched) == 1 else "have"
        listed = "; ".join(map(str, report.mismatched[:_LISTED]))
        yield f"{parameters} {verb} {shapes} than the model, such as {listed}"


def _list_hints(
    report: LoadReport, names: Collection[str], advice: Advice, filling: str
) -> Iterator[str]:
    if report.prefix:
        for prefix in find_copies(report.prefix, names) or [report.prefix]:
            options = take_prefix(prefix, report, names).removeprefix("--strip-prefix ")
            takes_parts = advice.shapes or "consolidate" in advice.strip
            if " " in options and "{prefix}" in advice.strip and not takes_parts:
                yield _PUSH_PART.format(prefix=options)
            elif prefix:
                yield advice.strip.format(prefix=options, module=prefix.rstrip("."))
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
    if filling and not (report.unexpected or report.mismatched):
        yield f"pass {filling} to take what is missing from there, as where parts were frozen"
        return
    # What is no part of any module of the model can be left out by patterns.
    strange = set(report.unexpected)
    modules = {name.partition(".")[0] for name in strange}
    is_apart = all(name in strange for name in names if name.partition(".")[0] in modules)
    # A number is that of one of the modules that are run one after the other.
    is_part = any(module.isdigit() for module in modules) or report.missing or report.mismatched
    if strange and is_apart and not is_part and advice.shapes:
        options = take_prefix("", report, names)
        yield f"leave what the model has not out with {options}"
    yield advice.config


def take_only(prefix: str) -> str:
    """Returns the options that write what a prefix begins, without it, and nothing else."""
    return shlex.join(["--strip-prefix", prefix, "--include", f"{glob.escape(prefix)}*"])


def take_prefix(prefix: str, report: LoadReport, names: Collection[str]) -> str:
    """Returns the options that write what a prefix begins, without it, and what the model has.

    `prefix`: the prefix; empty for the names as they are. `report`: what loading all would report.
    `names`: the names of all tensors.
    """
    copies = [copy for copy in find_copies(report.prefix, names) if copy != prefix]
    outside = [name for name in names if not (prefix and name.startswith(prefix))]
    strange = {name for name in outside if name in report.unexpected}
    strange |= {name for name in outside if any(map(name.startswith, copies))}
    strip = f"--strip-prefix {shlex.quote(prefix)}" if prefix else ""
    if prefix and (copies or (strange and len(strange) == len(outside))):
        return take_only(prefix)
    patterns = find_patterns(sorted(strange), [name for name in names if name not in strange])
    left = " ".join(f"--exclude {shlex.quote(pattern)}" for pattern in patterns)
    return f"{strip} {left}".strip()


def _padded_rows(report: LoadReport) -> int:
    """Returns how many rows the model has where only embeddings and heads have more; else 0."""
    rows = set()
    for row in report.mismatched:
        shape, expected = _SHAPE.fullmatch(row.found), _SHAPE.fullmatch(row.expected)
        if not (shape and expected and (is_embedding(row.name) or is_head(row.name))):
            return 0
        is_longer = int(shape[1]) > int(expected[1])
        if not is_longer or row.found.split(",")[1:] != row.expected.split(",")[1:]:
            return 0
        rows.add(int(expected[1]))
    return rows.pop() if len(rows) == 1 and not (report.missing or report.unexpected) else 0
