"""The tensors of a model before and after, in pairs; refuses models that make no delta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.checksums import DIGEST_SCHEME
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.manifest import Manifest
from ckptkit.deltas.form import name_version
from ckptkit.plan.plan import Segment, TensorSpec, name_order

_LISTED = 3
_OTHER_OPTIONS = "publish the new model as a whole, or make it with the options of that version"


class TensorPair(Struct, frozen=True):
    """A tensor before and after."""

    spec: TensorSpec  # its name, element type and shape, which are the same
    before: tuple[int, Segment]  # where it is planned for the first model
    after: tuple[int, Segment]  # the same of the second


def pair_tensors(before: PlannedOutput, after: PlannedOutput) -> tuple[TensorPair, ...]:
    """Pairs the tensors of two plans, and refuses those that are not of one model."""
    first, second = _segments(before), _segments(after)
    names = (before.checkpoint.path, after.checkpoint.path)
    for one, other, location, of in (
        (first, second, names[1], names[0]),
        (second, first, names[0], names[1]),
    ):
        lacking = sorted(one.keys() - other.keys(), key=name_order)
        if lacking:
            more = f" and {len(lacking) - _LISTED:,} more" if len(lacking) > _LISTED else ""
            listed = ", ".join(map(repr, lacking[:_LISTED]))
            raise RefusedError(
                f"lacks {listed}{more}, which {of} has; a delta needs the same tensors",
                where=location,
                hint="leave tensors out with --exclude, or publish the new model as a whole",
            )
    pairs = []
    for name, (number, segment, spec) in second.items():
        number_before, segment_before, spec_before = first[name]
        if (spec.dtype, spec.shape) != (spec_before.dtype, spec_before.shape):
            raise RefusedError(
                f"tensor {name!r} is {spec.dtype.name} {list(spec.shape)}, and in {names[0]}"
                f" {spec_before.dtype.name} {list(spec_before.shape)}",
                where=names[1],
                hint="a delta needs the same types and shapes; --dtype casts both",
            )
        pairs.append(TensorPair(spec, (number_before, segment_before), (number, segment)))
    return tuple(pairs)


def _segments(planned: PlannedOutput) -> dict[str, tuple[int, Segment, TensorSpec]]:
    return {
        str(segment.spec.name): (number, segment, segment.spec)
        for file in planned.plan.files
        for number, segment in enumerate(file.segments)
        if segment.spec is not None
    }


class PublishedBase(Struct, frozen=True):
    """The version that a delta will be applied to, as it was published.

    It was made of the same checkpoint as the base of the delta, maybe with other options.
    """

    version: int  # its number
    manifest: Manifest  # its manifest

    def refuse_other_tensors(self, specs: Iterable[TensorSpec]) -> None:
        """Refuses a base with other names, element types or shapes."""
        records = self.manifest.tensors
        expected = {str(name): (record.dtype, record.shape) for name, record in records.items()}
        found = {str(spec.name): (spec.dtype.name, spec.shape) for spec in specs}
        for name in sorted(expected.keys() | found.keys(), key=name_order):
            if expected.get(name) != found.get(name):
                before, now = _describe(expected.get(name)), _describe(found.get(name))
                raise self._refused(f"tensor {name!r} was published as {before}, and is {now} now")

    def refuse_other_bytes(self, digests: Mapping[str, str]) -> None:
        """Refuses a base with other bytes; `digests` has those of all its tensors."""
        for name, found in digests.items():
            expected = self.manifest.tensors[Fqn(name)].digest
            if expected.startswith(DIGEST_SCHEME) and found != expected:
                raise self._refused(
                    f"tensor {name!r} was published with digest {expected}, and has {found} now"
                )

    def _refused(self, message: str) -> RefusedError:
        return RefusedError(message, where=name_version(self.version), hint=_OTHER_OPTIONS)


def _describe(found: tuple[str, Shape] | None) -> str:
    return "absent" if found is None else f"{found[0]} {list(found[1])}"
