"""Reads name maps: TOML files that relate the tensors of one framework to those of another.

    name = "megatron-qwen2"            # how --map calls it
    source = "Megatron-Core"           # the framework whose names are in `from`
    target = "Transformers"            # the framework whose names are in `to`
    model_types = ["qwen2"]            # of config.json

    [sizes]
    layer = "num_hidden_layers"        # a size with the name of a capture is its count
    heads = "num_attention_heads"

    [when]
    rotary_interleaved = false         # what the checkpoint says, where it says it

    [[rule]]
    from = "decoder.layers.{layer?}.mlp.linear_fc1.weight"
    to = ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]
    steps = [{ split = ["ffn", "ffn"] }]

A rule takes the tensors whose names fit `from`, and makes those of `to`. If a capture of `to` is
not in the name of the source, the first axis of the source, or that which `axis` names, is
unstacked and gives its numbers; the inverse of a map has no rule with `axis`. A capture that `to`
does not have is stacked. `steps` apply in between, to the tensors of one set of numbers. `joined =
"expert"` is for a first axis that has the numbers of this capture one below the other; the inverse
of a map does not write it. `numbers = { layer = ["turn", 6] }` is for names or an axis that count
every sixth layer: the first has the number of the capture `turn`, which only `from` has, or that of
a size; the inverse of a map has no such rule. In a name, `{layer?}` is a capture that may be absent
together with its dot, as where layers are stacked, and `(mlp|ffn)` are alternatives. `optional =
true` lets a rule match nothing, `partial = "layer"` lets numbers of that capture be missing where
other rules have them. `inverse = false` is for a further form of the source, which the inverse does
not write; `inverse = "all"` has it write the same tensor under each of the alternatives. `drop =
"reason"` takes tensors that are left out; only there a name may end with `*`, for any rest; with
`zeros = { shape = ["experts"], beside = "layers.{layer}.router" }` the inverse writes zeros for
them. The inverse of a map leaves `{layer?}` out, and stacks, where all layers have the same
tensors; `unstacked = ["layer"]` keeps it in the names. `others = "keep"` is for a source whose
other names are those of the target.

    [halves]                           # each a layer of its own in some models, in this order
    layer = { "*" = "decoder.layers.{layer}.attention.*", "-" = "decoder.layers.{layer}.mlp.*" }

    [further.mtp]                      # layers that a checkpoint may have besides, or lack
    after = "layer"                    # a size: numbers in `to` go on from there
    count = "num_nextn_predict_layers" # the key that counts them, where a configuration has it
    rules = { "decoder.layers.{layer?}." = "mtp.layers.{mtp}.", "model.layers." = "model.layers." }

Where each number of `layer` has tensors of one half only, two numbers are one layer. Rules whose
names all begin as in `rules` hold a second time, with these beginnings replaced.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.core.wrapper_names import list_wrappers
from ckptkit.name_maps.rule_steps import Step, parse_step
from ckptkit.name_maps.shipped import describe_map_names, list_map_names, read_map_text

_KEYS = (
    *("name", "source", "target", "model_types", "extends", "unstacked", "others", "sizes", "when"),
    *("halves", "further", "rule"),
)
_RULE_KEYS = (
    *("from", "to", "steps", "optional", "partial", "joined", "inverse", "drop", "zeros", "axis"),
    "numbers",
)
_MOST_BYTES = 1 << 20
_MOST_FORMS = 256
_MOST_AXES = 64


_TOKEN = re.compile(
    r"\{(?P<capture>[a-z][a-z0-9_]*)(?P<optional>\?)?\}|(?P<rest>\*$)"
    r"|\((?P<alternatives>[\w.\-|]+)\)|(?P<text>[\w.\-]+)|(?P<wrong>.)"
)
_NUMBER = r"(?P<{}>0|[1-9][0-9]{{0,5}})"


class NameTemplate(Struct, frozen=True):
    """A template of names."""

    text: str  # as it is written
    captures: tuple[str, ...]  # the names of its captures, in order
    optional: frozenset[str]  # those that may be absent

    def match(self, name: str) -> Mapping[str, int | None] | None:
        """Returns the numbers of a name, None for an absent one; None if the name does not fit.

        >>> parse_template("layers.{layer?}.(up|w1)").match("layers.7.w1")
        {'layer': 7}
        """
        found = _pattern(self.text).fullmatch(name)
        if found is None:
            return None
        return {key: int(n) if n is not None else None for key, n in found.groupdict().items()}

    def forms(self) -> Sequence[NameTemplate]:
        """Returns the templates with one of each set of alternatives.

        >>> [form.text for form in parse_template("layers.{layer?}.(up|w1)").forms()]
        ['layers.{layer?}.up', 'layers.{layer?}.w1']
        """
        choices = [
            token["alternatives"].split("|") if token["alternatives"] else [token[0]]
            for token in _TOKEN.finditer(self.text)
        ]
        return [replace(self, text="".join(parts)) for parts in product(*choices)]

    def render(self, numbers: Mapping[str, int]) -> str:
        """Returns the name with these numbers, and with the first of each set of alternatives.

        >>> parse_template("layers.{layer?}.(up|w1)").render({})
        'layers.up'
        """
        parts: list[str] = []
        for token in _TOKEN.finditer(self.text):
            if token["capture"]:
                number = numbers.get(token["capture"])
                parts.append("" if number is None else str(number))
            elif token["alternatives"]:
                parts.append(token["alternatives"].partition("|")[0])
            else:
                is_joined = parts[-1:] == [""] and token[0].startswith(".")
                parts.append(token[0][1:] if is_joined else token[0])
        return "".join(parts)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    parts: list[str] = []
    is_absent = False  # whether the dot before this text is part of an optional capture
    for token in _TOKEN.finditer(text):
        if token["capture"]:
            number = _NUMBER.format(token["capture"])
            parts.append(rf"(?:{number}\.)?" if token["optional"] else number)
        elif token["rest"]:
            parts.append(".*")
        elif token["alternatives"]:
            parts.append(f"(?:{'|'.join(map(re.escape, token['alternatives'].split('|')))})")
        else:
            parts.append(re.escape(token["text"][1:] if is_absent else token["text"]))
        is_absent = bool(token["optional"])
    return re.compile("".join(parts), re.ASCII)


def parse_template(text: Any, *, where: str = "") -> NameTemplate:
    if not isinstance(text, str) or not text:
        raise UsageError(f"{text!r} is not a name", where=where, hint=_HINT)
    tokens = list(_TOKEN.finditer(text))
    if prod((token["alternatives"] or "").count("|") + 1 for token in tokens) > _MOST_FORMS:
        raise UsageError(
            f"{text[:100]!r} stands for more than {_MOST_FORMS} names",
            where=where,
            hint="write a rule for some of the alternatives, and another one for the others",
        )
    captures: list[str] = []
    wrong = ""
    for token in tokens:
        capture = token["capture"]
        if token["wrong"]:
            wrong = f"{token['wrong']!r} at character {token.start() + 1}, which no name has"
        elif capture in captures:
            wrong = f"the capture {capture!r} twice"
        elif token["optional"] and text[token.end() : token.end() + 1] != ".":
            wrong = f"no dot after the optional capture {capture!r}"
        if wrong:
            raise UsageError(f"{text!r} has {wrong}", where=where, hint=_HINT)
        captures += [capture] if capture else []
    optional = frozenset(token["capture"] for token in tokens if token["optional"])
    return NameTemplate(text, tuple(captures), optional)


_HINT = (
    "a name consists of letters, digits, '_', '-', dots, captures such as {layer} or {layer?}, and"
    " alternatives such as (up|w1)"
)


class Rule(Struct, frozen=True):
    """How some tensors of the target are made."""

    where: str
    sources: tuple[NameTemplate, ...]  # templates of the source's names
    # Templates of the target's names; none where the sources are left out.
    targets: tuple[NameTemplate, ...]
    steps: tuple[Step, ...] = ()  # what is done to one set of sources, in order
    is_optional: bool = False  # whether the source may have no tensor for it
    with_further: str = ""  # if so only where it has none of these further layers
    partial: tuple[str, ...] = ()  # the captures whose numbers need not all be there
    # Captures whose tensors are one below the other along the first axis of the source, and have no
    # axis of their own.
    joined: tuple[str, ...] = ()
    # Whether the inverse of the map contains it; not where another rule makes the same tensors from
    # another form of the source.
    has_inverse: bool = True
    # Whether the inverse writes a tensor under all alternatives of its name, and the source may
    # have them all.
    in_all_forms: bool = False
    drop: str = ""  # why the sources are left out; empty if they are not
    # The sizes of a tensor of float32 zeros that the inverse writes for what is left out.
    zeros: tuple[str, ...] = ()
    axis: int = 0  # that which is unstacked
    # For captures that take only some numbers: what has the first number, and the distance to the
    # next one.
    numbers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # The source's name of a tensor beside which it does so; None if it does not.
    beside: NameTemplate | None = None

    def list_captures(self) -> list[str]:
        """Returns what numbers its tensors, those of the target first."""
        named = (c for side in (self.targets, self.sources) for t in side[:1] for c in t.captures)
        firsts = {first for first, _ in self.numbers.values()}
        return [capture for capture in dict.fromkeys(named) if capture not in firsts]


class Further(Struct, frozen=True):
    """Layers that a checkpoint may have besides, or lack."""

    after: str = "0"  # an expression: the number of the first of them in names of Transformers
    count: str = ""  # the key of the configuration that counts them


class NameMap(Struct, frozen=True):
    """A map between the names of two frameworks."""

    name: str
    source: str  # the framework whose names the rules take
    target: str  # the framework whose names they make
    model_types: tuple[str, ...]  # the `model_type` of the configurations that it is for
    # Expressions by the name of a size; see `ckptkit.name_maps.rule_steps`.
    sizes: Mapping[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    # Optional captures that stay in the names of the source when the inverse of the map writes
    # them; others are left out where all layers have the same tensors.
    unstacked: tuple[str, ...]
    # The start of the SHA-256 of its text and of the map that it extends, in hexadecimal.
    digest: str
    # What the checkpoint says of its model, by key, if it says it at all.
    when: Mapping[str, int] = field(default_factory=dict)
    keeps_others: bool = False  # whether tensors that no rule takes keep their names
    # Templates of two halves of a layer, by the capture that may number halves; with their symbols.
    halves: Mapping[str, Mapping[str, NameTemplate]] = field(default_factory=dict)
    further: Mapping[str, Further] = field(default_factory=dict)
    is_inverse: bool = False

    def takes_any(self, names: Iterable[str]) -> bool:
        """Returns whether a rule takes one of the names."""
        templates = [template for rule in self.rules for template in rule.sources]
        return any(template.match(name) is not None for name in names for template in templates)

    def is_further(self, name: str) -> bool:
        """Returns whether a tensor of the source is of layers that a checkpoint may lack."""
        templates = [
            t for rule in self.rules for t in rule.sources if {*t.captures} & {*self.further}
        ]
        return any(template.match(name) is not None for template in templates)

    def find_wrapper(self, names: Collection[str]) -> str:
        """Returns what a wrapper put before all names, without which rules take some of them."""
        for prefix in ("", *list_wrappers(names)):
            if self.takes_any(name.removeprefix(prefix) for name in names):
                return prefix
        return ""

    def keep(self, name: str) -> Rule:
        """Returns the rule of a tensor that keeps its name."""
        template = NameTemplate(name, (), frozenset())
        return Rule(f"map {self.name}, others", (template,), (template,), is_optional=True)


def parse_map(text: str, *, where: str, parent: NameMap | None = None) -> NameMap:
    """Parses a map.

    `parent`: the map that `extends` names, if there is one: its sizes and rules come after those of
    this one, but for rules that take the same names.
    """
    document = read_document(text, where=where)
    _check_keys(document, _KEYS, where)
    rules, sizes = document.get("rule", []), document.get("sizes", {})
    if not isinstance(rules, list) or not (rules or parent):
        hint = "see docs/reference/name-maps.md for the form"
        raise UsageError("has no [[rule]]", where=where, hint=hint)
    own = [_parse_rule(rule, f"{where}, rule {n}") for n, rule in enumerate(rules, 1)]
    if not isinstance(sizes, dict):
        raise UsageError("'sizes' is not a table", where=where, hint="write [sizes]")
    expressions = {
        name: tuple(_texts(str(value) if type(value) is int else value, f"{where}, size {name!r}"))
        for name, value in sizes.items()
    }
    when = document.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(value, int) for value in when.values()):
        raise UsageError(
            f"'when' is {when!r}, expected a table of truth values and whole numbers", where=where
        )
    inherited: dict[str, Any] = {}
    digest = text
    if parent is not None:
        when = {**parent.when, **when}
        replaced = {form for rule in own for form in _list_forms(rule)}
        own += [r for r in parent.rules if replaced.isdisjoint(_list_forms(r))]
        expressions = {**parent.sizes, **expressions}
        inherited = {"source": parent.source, "target": parent.target}
        inherited |= {"others": "keep" if parent.keeps_others else "refuse"}
        inherited |= {"unstacked": list(parent.unstacked)}
        digest += parent.digest
    halves = dict(parent.halves) if parent else {}
    for capture, both in _tables(document, "halves", where, dict):
        texts = _tables({capture: both}, capture, where, str)
        halves[capture] = {symbol: parse_template(text, where=where) for symbol, text in texts}
        is_known = all(t.captures == (capture,) for t in halves[capture].values())
        if [len(symbol) for symbol in both] != [1, 1] or not is_known:
            raise UsageError(
                f"'halves' has {both!r}; expected two names with {{{capture}}} by one character",
                where=where,
            )
    further = dict(parent.further) if parent else {}
    for capture, table in _tables(document, "further", where, dict):
        _check_keys(table, ("after", "count", "rules"), where)
        further[capture] = Further(str(table.get("after", "0")), str(table.get("count", "")))
        own = _repeat_rules(own, capture, dict(_tables(table, "rules", where, str)), where)
    for rule in own:
        if rule.with_further and rule.with_further not in further:
            raise UsageError(
                f"'optional' is {rule.with_further!r}; expected 'optional' true or false, or a key"
                " of [further]",
                where=rule.where,
            )
    document = inherited | document
    others = document.get("others", "refuse")
    if others not in ("keep", "refuse"):
        raise UsageError(
            f"'others' is {others!r}", where=where, hint='write others = "keep", or leave it out'
        )
    for key in ("name", "source", "target"):
        if not isinstance(document.get(key), str) or not document[key]:
            raise UsageError(f"has no text {key!r}", where=where, hint=f'write {key} = "..."')
    return NameMap(
        name=document["name"],
        source=document["source"],
        target=document["target"],
        model_types=tuple(_texts(document.get("model_types", []), f"{where}, model_types")),
        sizes=expressions,
        rules=tuple(own),
        unstacked=tuple(_texts(document.get("unstacked", []), f"{where}, unstacked")),
        when=when,
        keeps_others=others == "keep",
        halves=halves,
        further=further,
        digest=sha256(digest.encode()).hexdigest()[:16],
    )


def _list_forms(rule: Rule) -> list[str]:
    return [form.text for template in rule.sources for form in template.forms()]


def _tables(
    document: Mapping[str, Any], key: str, where: str, kind: type
) -> Iterable[tuple[str, Any]]:
    """Returns the entries of a table, which have values of one kind."""
    table = document.get(key, {})
    if not isinstance(table, dict) or not all(isinstance(v, kind) and v for v in table.values()):
        raise UsageError(
            f"{key!r} is {table!r}",
            where=where,
            hint="see [halves] and [further] in docs/reference/name-maps.md",
        )
    return table.items()


def _repeat_rules(
    rules: Sequence[Rule], capture: str, swaps: Mapping[str, str], where: str
) -> list[Rule]:
    """Adds rules for further layers, and takes out a rule that leaves these layers out."""

    def swap(template: NameTemplate) -> NameTemplate:
        start = next((s for s in swaps if template.text.startswith(s)), "")
        return parse_template(swaps.get(start, "") + template.text.removeprefix(start), where=where)

    taken, more = {t.text for rule in rules for t in (*rule.sources, *rule.targets)}, []
    for rule in rules:
        sources, targets = tuple(map(swap, rule.sources)), tuple(map(swap, rule.targets))
        if taken.isdisjoint(template.text for template in (*sources, *targets)):
            partial = tuple(capture if c not in sources[0].captures else c for c in rule.partial)
            again = replace(rule, sources=sources, targets=targets, partial=partial)
            more.append(replace(again, where=f"{rule.where}, {capture}"))
    made = [t.render(dict.fromkeys(t.captures, 0)) for rule in more for t in rule.sources]
    left_out = [
        r
        for r in rules
        if r.drop and any(t.match(name) is not None for t in r.sources for name in made)
    ]
    return [*(rule for rule in rules if rule not in left_out), *more]


def read_document(text: str, *, where: str) -> dict[str, Any]:
    """Returns the document of a map as plain values."""
    if len(text) > _MOST_BYTES:
        raise UsageError(
            f"has {len(text):,} characters; a map has at most {_MOST_BYTES:,}", where=where
        )
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", where=where, hint="mend the file") from error


def _parse_rule(rule: Any, where: str) -> Rule:
    if not isinstance(rule, dict):
        raise UsageError("is not a table", where=where, hint="write [[rule]]")
    _check_keys(rule, _RULE_KEYS, where)
    sources, targets = (
        tuple(parse_template(text, where=where) for text in _texts(rule.get(key, []), where))
        for key in ("from", "to")
    )
    drop, steps, inverse = rule.get("drop", ""), rule.get("steps", []), rule.get("inverse", True)
    optional, partial = rule.get("optional", False), tuple(_texts(rule.get("partial", []), where))
    joined = tuple(_texts(rule.get("joined", []), where))
    axis, numbers = rule.get("axis", 0), _parse_numbers(rule.get("numbers", {}), where)
    captures = {capture for name in (*sources, *targets) for capture in name.captures}
    made = [name.render(dict.fromkeys(name.captures, 0)) for name in targets]
    twice = next((name for name in made if made.count(name) > 1), None)
    unlike = next(
        (s for s in (sources, targets) if len({frozenset(n.captures) for n in s}) > 1), ()
    )
    wrong = hint = ""
    if not drop and any(name.text.endswith("*") for name in (*sources, *targets)):
        wrong = "only a rule that drops tensors may have a name with '*'"
        hint = "write the whole name, with captures such as {layer}"
    elif not sources or bool(targets) == bool(drop):
        wrong = "needs 'from', and either 'to' or the reason for which it drops the tensors"
        hint = 'write to = "NAME", or drop = "REASON"'
    elif inverse not in (True, False, "all"):
        wrong, hint = f"'inverse' is {inverse!r}", 'write true, false or "all"'
    elif type(axis) is not int or not 0 <= axis < _MOST_AXES:
        wrong, hint = f"'axis' is {axis!r}", "write the number of an axis, counted from 0"
    elif (
        not isinstance(steps, list)
        or not isinstance(drop, str)
        or type(optional) not in {bool, str}
    ):
        wrong = "'steps' is a list of tables, 'drop' a text, 'optional' true, false or a capture"
    elif not captures.issuperset(partial := (*partial, *numbers)):
        known = ", ".join(sorted(captures)) or "none"
        wrong = f"'partial' is {', '.join(partial)}; captures of the rule are {known}"
        hint = "write the name of a capture, without braces"
    elif joined and not (targets and {*targets[0].captures} - {*sources[0].captures} == {*joined}):
        wrong = f"'joined' is {', '.join(joined)}, expected the capture that only 'to' has"
        hint = "write the name of that capture, without braces"
    elif unlike:
        wrong = f"{unlike[0].text!r} and {unlike[-1].text!r} do not have the same captures"
        hint = "the names of one side of a rule stand for one set of tensors each"
    elif twice is not None:
        wrong, hint = f"makes {twice!r} twice", "give each result a name of its own"
    if wrong:
        raise UsageError(wrong, where=where, hint=hint)
    zeros, beside = _parse_zeros(rule.get("zeros"), sources, drop, where)
    return Rule(
        where=where,
        sources=sources,
        targets=targets,
        steps=tuple(parse_step(step, f"{where}, step {n}") for n, step in enumerate(steps, 1)),
        is_optional=optional is not False,
        with_further=optional if isinstance(optional, str) else "",
        partial=partial,
        joined=joined,
        has_inverse=inverse is not False and not joined and not axis and not numbers,
        in_all_forms=inverse == "all",
        drop=drop,
        zeros=zeros,
        axis=axis,
        numbers=numbers,
        beside=beside,
    )


def _parse_numbers(value: Any, where: str) -> Mapping[str, tuple[str, int]]:
    pairs = value.values() if isinstance(value, dict) else [value]
    for pair in pairs:
        kinds = [*map(type, pair)] if isinstance(pair, list) else []
        if kinds not in ([str, int], [int, int]) or pair[1] < 1:
            hint = 'write numbers = { CAPTURE = ["FIRST", 2] }'
            raise UsageError(f"'numbers' is {value!r}", where=where, hint=hint)
    return {capture: (str(first), step) for capture, (first, step) in value.items()}


def _parse_zeros(
    value: Any, sources: Sequence[NameTemplate], drop: str, where: str
) -> tuple[tuple[str, ...], NameTemplate | None]:
    if value is None:
        return (), None
    table = value if isinstance(value, dict) else {}
    if not drop or table.keys() != {"shape", "beside"} or not table["shape"]:
        raise UsageError(
            f"'zeros' is {value!r}",
            where=where,
            hint='write zeros = { shape = ["SIZE"], beside = "NAME" } in a rule that drops tensors',
        )
    beside = parse_template(table["beside"], where=where)
    if set(beside.captures) != set(sources[0].captures) or sources[0].text.endswith("*"):
        raise UsageError(
            f"{beside.text!r} and {sources[0].text!r} do not have the same captures", where=where
        )
    shape = table["shape"] if isinstance(table["shape"], list) else [table["shape"]]
    return tuple(_texts([str(size) for size in shape], where)), beside


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            nearest = get_close_matches(key[:100], known, n=1, cutoff=0.0)
            raise UsageError(
                f"has the key {key!r}; known are {', '.join(known)}",
                where=where,
                hint=f"did you mean {nearest[0]!r}?",
            )


def _texts(value: Any, where: str) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in listed):
        raise UsageError(f"{value!r} is not a text or a list of texts", where=where)
    return listed


def invert(map_: NameMap) -> NameMap:
    """Returns the map from the target's names to the source's."""
    rules = tuple(
        replace(
            rule,
            where=f"{rule.where}, inverted",
            sources=rule.targets,
            targets=rule.sources,
            steps=tuple(step.inverse() for step in reversed(rule.steps)),
        )
        for rule in map_.rules
        if rule.has_inverse and not rule.drop
    )
    zeros = tuple(replace(r, sources=(), targets=r.sources[:1]) for r in map_.rules if r.zeros)
    return replace(
        map_,
        source=map_.target,
        target=map_.source,
        rules=(*rules, *zeros),
        halves={},
        is_inverse=not map_.is_inverse,
    )


# --- the map for a checkpoint: a file, one that comes with ckptkit by its name, or by itself ---


@cache
def load_own_map(name: str) -> NameMap:
    """Returns a map that comes with ckptkit."""
    return _parse(read_map_text(name), f"map {name}")


def load_map(choice: str) -> NameMap:
    """Returns the map of a name, or of a file."""
    if choice in list_map_names():
        return load_own_map(choice)
    path = Path(choice)
    if path.suffix != ".toml" and not path.is_file():
        nearest = get_close_matches(choice, list_map_names(), n=1, cutoff=0.0)
        raise UsageError(
            f"{choice!r} is neither a file nor a map; maps are {describe_map_names()}",
            where="--map",
            hint=f"pass --map {nearest[0]}, or the path of a .toml file",
        )
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"could not be read: {error}", where=f"--map {choice}", hint="see if the path is right"
        ) from error


def _parse(text: str, where: str) -> NameMap:
    parent = read_document(text, where=where).get("extends")
    if parent is None:
        return parse_map(text, where=where)
    if not isinstance(parent, str) or parent not in list_map_names():
        raise UsageError(
            f"extends {parent!r}, which is no map; maps are {describe_map_names()}",
            where=where,
        )
    return parse_map(text, where=where, parent=load_own_map(parent))


def find_map(
    framework: str,
    config: Mapping[str, Any] | None,
    *,
    where: str,
    settings: Mapping[str, int] | None = None,
) -> NameMap:
    """Finds the map between a framework's names and those of Transformers.

    `config`: the configuration of the model, or None. `settings`: what the checkpoint says of its
    model.
    """
    settings = settings or {}
    if config is None:
        raise RefusedError(
            f"names of {framework} are converted by the sizes of the model, and no configuration"
            " has them",
            where=where,
            hint="pass the folder of the model with --base, or keep the names with --map none",
        )
    kind = config.get("model_type")
    # Parsing all maps takes longer than the rest of a plan, so others are not parsed.
    likely = [load_own_map(name) for name in list_map_names() if str(kind) in read_map_text(name)]
    of_model = [one for one in likely if one.source == framework and kind in one.model_types]
    left = [one for one in of_model if not find_contradiction(one, settings)]
    if len(left) == 1:
        return left[0]
    if left:
        said = {key for one in left for key in one.when}
        keys = sorted(key for key in said if len({one.when.get(key) for one in left}) > 1)
        raise RefusedError(
            f"the checkpoint does not say {', '.join(keys)}, by which the maps"
            f" {' and '.join(one.name for one in left)} differ",
            where=where,
            hint=f"pass --map {left[0].name}, or the other one",
        )
    if of_model:
        refuse_contradiction(of_model[0], settings, where=where)
    own = [load_own_map(name) for name in list_map_names()]
    known = sorted({kind for one in own if one.source == framework for kind in one.model_types})
    raise RefusedError(
        f"no map has names of {framework} for the model type {kind!r}; there are maps for"
        f" {', '.join(known)}",
        where=where,
        hint="write a map (see docs/reference/name-maps.md) and pass it with --map FILE, or keep"
        " the names with --map none",
    )


def find_contradiction(name_map: NameMap, settings: Mapping[str, int]) -> str:
    """Returns the key of `when` for which the checkpoint says something else; usually empty."""
    wrong = (key for key, value in name_map.when.items() if settings.get(key, value) != value)
    return next(wrong, "")


def refuse_contradiction(name_map: NameMap, settings: Mapping[str, int], *, where: str) -> None:
    """Refuses a map for models that are laid out otherwise than the checkpoint says."""
    key = find_contradiction(name_map, settings)
    if key:
        raise RefusedError(
            f"map {name_map.name!r} is for {key} = {name_map.when[key]}, and the checkpoint says"
            f" {settings[key]}",
            where=where,
            hint="name another map with --map, or let --map auto choose it",
        )
