"""Models that were changed since a step was saved: more rows, further parts, other names.

    compare names and shapes -> refuse what no option names -> clip pieces to what the step has

Before, `Renaming` has given the step the names of the live model, if the user has passed some.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.core.geometry import intersect, slices_of
from ckptkit.core.index import Box, Shape, TensorIndex
from ckptkit.core.text import counted, join_first, list_first
from ckptkit.options import find_patterns, matches
from ckptkit.training.load.load_pieces import names_of, unexpected_keys, unlike
from ckptkit.training.resume.restore import is_extra
from ckptkit.training.resume.stored_step import Renaming, begins
from ckptkit.training.state.collect import BoundModel
from ckptkit.training.state.models import ModelView
from ckptkit.training.state.pieces import Entry, Piece
from ckptkit.training.state.quant_states import is_scale, packed_weights, scale_names
from ckptkit.training.step_names import parallel_prefixes

logger = logging.getLogger(__name__)

_MOST_LISTED = 50  # in a log line
_MOST_PROPOSED = 8
_MOST_PAIRS = 1 << 20  # of names, to look for parts that were renamed
_BUILD = "build the model that was saved"


class Comparison(Struct, frozen=True):
    """How a model differs from a step, by the names of the model's tensors."""

    key: str  # of the model in the user's state
    names: Mapping[str, Sequence[str]]  # of each tensor the first, and with it all that it has
    # what the step has of it, by the names in the step
    stored: Mapping[str, Shape]
    # of tensors with more rows, the shapes in the step and in the model
    grown: Mapping[str, tuple[Shape, Shape]]
    new: Mapping[str, Shape]
    extra: Mapping[str, Shape]  # in the step only, by the names there
    misfit: ResumeError | None  # of a tensor of any other shape
    on_meta: Sequence[str]  # what is grown or new, and has no memory yet
    grown_entries: frozenset[Entry]
    new_entries: frozenset[Entry]

    @property
    def fits(self) -> bool:
        return not (self.grown or self.new or self.extra or self.misfit)

    def lacks_what(self, before: Comparison) -> bool:
        """Whether this step lacks elements that another step has, which may have been loaded."""
        for name in (*self.new, *self.grown):
            own, whole = self.grown.get(name, (None, self.new.get(name)))
            then = None if name in before.new else before.grown.get(name, (whole,))[0]
            if then is not None and (own is None or not (then == own or is_part(then, own))):
                return True
        return False

    def others(self, names: Iterable[str], grow: Sequence[str]) -> list[str]:
        """Returns those of some tensors that no pattern fits by any of their names."""
        patterns = tuple(grow)
        return [n for n in names if not any(matches(own, patterns) for own in self.names[n])]


def compare(
    model: BoundModel,
    view: ModelView,
    index_of: Callable[[str], TensorIndex],
    absent: Collection[str],
    *,
    is_stage: bool,
) -> Comparison:
    """Compares what this rank holds of a model, of which the directories `absent` do not matter.

    Tensors that a pipeline's stage does not have are those of other stages.
    """
    names: dict[str, list[str]] = {}
    grown: dict[str, tuple[Shape, Shape]] = {}
    new: dict[str, Shape] = {}
    entries: tuple[set[Entry], set[Entry]] = set(), set()
    on_meta: list[str] = []
    misfit: ResumeError | None = None
    depth = len(model.path)
    fqns = {model.places.of(s.fqn): s.fqn for slots in view.slots.values() for s in slots}
    packed = packed_weights(model.module, parallel_prefixes(model.module))
    scales = {model.places.of(f"{weight}.{key}") for weight, key in scale_names(packed)}
    for piece in view.pieces:
        apart = piece.unit in absent or piece.entry in scales
        if apart or is_extra(piece.key_path, model.path):
            continue
        tensors = index_of(piece.unit).tensors
        paths = piece.key_path, *piece.aliases
        first, *aliases = (".".join(map(str, path[depth:])) for path in paths)
        name = fqns.get(piece.entry, first)
        names[name] = [name, *aliases]
        entry = next((tensors[key] for key in names_of(piece) if key in tensors), None)
        if entry is None:
            new[name] = piece.shape
        elif is_part(entry.shape, piece.shape):
            grown[name] = entry.shape, piece.shape
        else:
            if entry.shape != piece.shape and misfit is None:
                misfit = unlike(piece, entry)
            continue
        entries[entry is None].add(piece.entry)
        on_meta += [name] if piece.local.is_meta else []
    stored: dict[str, Shape] = {}
    extra: dict[str, Shape] = {}
    for unit in model.places.units:
        if unit in absent:
            continue
        index = index_of(unit)
        own = [piece for piece in view.pieces if piece.unit == unit]
        unexpected = () if is_stage else frozenset(unexpected_keys(index, own))
        for key, entry in index.tensors.items():
            path = entry.key_path
            if path[:depth] == model.path and not is_extra(path, model.path):
                name = (*entry.stored_names, ".".join(map(str, path[depth:])))[0]
                stored[name] = entry.shape
                # A model that was wrapped before has the scales of its packed weights elsewhere.
                if key in unexpected and not is_scale(key, index.tensors):
                    extra[name] = entry.shape
    return Comparison(
        *(model.key, names, stored, grown, new, extra, misfit, on_meta),
        *map(frozenset, entries),
    )


def is_part(shape: Shape, of: Shape) -> bool:
    """Whether a shape has as many dimensions as another one and is larger in none."""
    smaller = all(size <= other for size, other in zip(shape, of, strict=False))
    return len(shape) == len(of) and shape != of and smaller


class Survey(Struct, frozen=True):
    """What a rank finds of the options; see `judge_options`."""

    fits: bool  # whether the models fit the step as it is
    unused: tuple[str, ...]  # patterns that fit no name of a model
    unknown: tuple[str, ...]  # names that nothing in the step has, nor begins with
    example: str  # a name of a model

    @classmethod
    def of(
        cls, found: Sequence[Comparison], grow: Sequence[str], renamed: Collection[str]
    ) -> Survey:
        names = [name for one in found for own in one.names.values() for name in own]
        stored = [name for one in found for name in one.stored]
        return cls(
            all(one.fits for one in found),
            tuple(p for p in grow if not any(matches(name, (p,)) for name in names)),
            tuple(old for old in renamed if not any(begins(name, old) for name in stored)),
            next(iter(names), ""),
        )


def judge_options(surveys: Sequence[Survey]) -> bool:
    """Returns whether the step gets other names; refuses options that nothing fits on any rank.

    A step that fits the models as it is was saved after they were changed, and is loaded as it is,
    so that the same script resumes from it too.
    """
    first = surveys[0]
    unused = [p for p in first.unused if all(p in other.unused for other in surveys)]
    if unused:
        raise UsageError(
            f"no tensor of the model has a name that fits {list_first(unused)}",
            where="grow",
            hint=f"pass patterns of its names, which are such as {first.example!r}",
        )
    if all(survey.fits for survey in surveys):
        return False
    if first.unknown:
        raise UsageError(
            f"nothing of the step is called, or begins with, {list_first(first.unknown)}",
            where="renamed",
            hint="pass names of the step without those of the wrappers; `ckptkit inspect` lists"
            " them",
        )
    return True


def refuse_others(
    found: Sequence[Comparison], grow: tuple[str, ...], renamed: Mapping[str, str | None]
) -> None:
    """Refuses what differs and no option names, and proposes the options that would take it."""
    misfit = next((one.misfit for one in found if one.misfit), None)
    if misfit is not None:
        raise misfit
    for one in found:
        grown, new = one.others(one.grown, grow), one.others(one.new, grow)
        problems: list[str] = []
        where = one.key
        if grown:
            before, now = one.grown[grown[0]]
            where = f"{one.key}, {grown[0]}"
            more = f", and {counted(len(grown) - 1, 'tensor')} more" if len(grown) > 1 else ""
            problems.append(
                f"shape {list(before)} was found in the checkpoint against {list(now)} in the"
                f" model{more}"
            )
        if new:
            problems.append(
                f"{len(new):,} of {len(one.names):,} tensors are not in the checkpoint:"
                f" {list_first(new)}"
            )
        if one.extra:
            problems.append(
                f"{len(one.extra):,} tensors of the checkpoint are not in the model:"
                f" {list_first(sorted(one.extra))}"
            )
        if problems:
            hint = f"{_BUILD}; {_propose(found, grow, renamed)}"
            raise ResumeError("; ".join(problems), where=where, hint=hint)
        if one.on_meta:
            raise ResumeError(
                f"the step lacks {list_first(one.on_meta)}, or rows of it, and the model, on the"
                " meta device, has no values for them",
                where=one.key,
                hint="give the model memory and its first values before the resume, such as with"
                " model.to_empty(device=…) and what initialises it",
            )


def _propose(
    found: Sequence[Comparison], grow: tuple[str, ...], renamed: Mapping[str, str | None]
) -> str:
    """Returns options with which the models of this rank are resumed, those given included."""
    further: dict[str, str | None] = {}
    needed: dict[str, None] = {}
    for one in found:
        new = dict(one.new)
        further.update(_find_renames(one.extra, one.stored, new))
        left = {n for n in one.extra if not any(begins(n, old) for old in further)}
        kept = {head for name in one.stored.keys() - left for head in _heads(name)}
        further |= {next(h for h in _heads(n) if h not in kept): None for n in sorted(left)}
        needed |= dict.fromkeys(one.others((*one.grown, *new), grow))
    others = {name for one in found for name in one.names} - needed.keys()
    patterns = [*grow, *find_patterns(needed, others)]
    names = {**renamed, **further}
    if max(len(patterns), len(names)) > _MOST_PROPOSED:
        return (
            "if it was changed since, Checkpointer.resume(…, grow=[…], renamed={…}) takes patterns"
            " of what grew or is new, and names of the step with those of the model, or None"
        )
    options = [f"grow={patterns!r}"] if patterns else []
    options += [f"renamed={names!r}"] if names else []
    return f"if it was changed since, Checkpointer.resume(…, {', '.join(options)}) takes it"


def _find_renames(
    extra: Mapping[str, Shape], stored: Mapping[str, Shape], new: dict[str, Shape]
) -> Iterator[tuple[str, str]]:
    """Yields what names begin with in a step and in a model, where all tensors below have partners.

    They are taken out of `new`.
    """
    left = dict(extra)
    for old in extra if len(extra) * len(new) <= _MOST_PAIRS else ():
        if old not in left:
            continue
        for candidate in new:
            before, after = _different_parts(old, candidate)
            if before == old:
                continue
            below = [name for name in stored if begins(name, before)]
            pairs = {n: f"{after}.{n.removeprefix(before).strip('.')}".strip(".") for n in below}
            if all(n in left and new.get(name) == left[n] for n, name in pairs.items()):
                for name, partner in pairs.items():
                    del left[name], new[partner]
                yield before, after
                break


def _different_parts(first: str, second: str) -> tuple[str, str]:
    """Returns two names without the parts that they end with alike.

    >>> _different_parts("model.old.0.weight", "model.new.0.weight")
    ('model.old', 'model.new')
    """
    parts = first.split("."), second.split(".")
    while parts[0] and parts[1] and parts[0][-1] == parts[1][-1]:
        parts[0].pop()
        parts[1].pop()
    return ".".join(parts[0]), ".".join(parts[1])


def _heads(name: str) -> list[str]:
    """Returns the modules that a tensor is in, the outermost first, and its own name."""
    return [name[:at] for at, letter in enumerate(name) if letter == "."] + [name]


def clip(piece: Piece, shape: Shape) -> Iterator[Piece]:
    """Yields the parts of a piece that a tensor of fewer rows has, each in one place."""
    whole, empty = Box((0,) * len(shape), shape), True
    for place, elements in piece.boxes():
        shared = intersect(place, whole)
        if shared is not None:
            at = tuple(o - p for o, p in zip(shared.offsets, place.offsets, strict=True))
            local = elements.detach().view(place.sizes)[slices_of(Box(at, shared.sizes))]
            yield dataclasses.replace(piece, shape=shape, places=(shared,), local=local)
            empty = False
    if empty:
        local = piece.local.new_empty(0)
        yield dataclasses.replace(piece, shape=shape, places=(), local=local)


def report_changes(
    found: Sequence[Comparison], dropped: Sequence[str], renaming: Renaming | None
) -> dict[str, list[str]]:
    """Returns what the options have done, by the line of the log that lists it."""
    grown = [
        f"{name!r} {list(before)} -> {list(now)}"
        for one in found
        for name, (before, now) in one.grown.items()
    ]
    names = renaming.names if renaming else {}
    return {
        "more rows than the step has, of which the others stay as the model made them": grown,
        "not in the step, and as the model made it": [repr(n) for one in found for n in one.new],
        "dropped of the step": list(map(repr, dropped)),
        "renamed": [f"{o!r} -> {n!r}" for o, n in names.items() if n is not None],
    }


def log_changes(reports: Iterable[Mapping[str, Sequence[str]]]) -> None:
    """Logs what the ranks report, each part once."""
    lines: dict[str, dict[str, None]] = {}
    for report in reports:
        for line, parts in report.items():
            lines.setdefault(line, {}).update(dict.fromkeys(parts))
    for line, found in lines.items():
        if found:
            logger.info("%s: %s", line, join_first(found, len(found), _MOST_LISTED))
