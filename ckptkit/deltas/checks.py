"""What is in a delta, from headers alone; and the proof of all of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ckptkit.conversion.verify import Verification
from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts, plain_fields
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CkptkitError, FormatError
from ckptkit.core.index import Fqn, Problem, Shape
from ckptkit.core.manifest import TensorRecord
from ckptkit.core.text import counted, size_text
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.deltas.encoding import HINT
from ckptkit.deltas.form import DeltaTensor, OpenedDelta, open_delta
from ckptkit.deltas.patching import find_file_problems
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.plan.plan import TensorSpec, name_order
from ckptkit.storage.places import PathLike


class DeltaLine(Struct, frozen=True):
    """A tensor that changed. What only a manifest says is None without one.

    Attributes:
        name: The tensor.
        stored_bytes: Size of the compressed change.
        dtype: torch's name of the element type, or None.
        shape: In elements, or None.
        size_bytes: Of the tensor, or None.
        changed_elements: How many elements have other bits, or None.
    """

    name: str
    stored_bytes: int
    dtype: str | None = None
    shape: Shape | None = None
    size_bytes: int | None = None
    changed_elements: int | None = None


class DeltaInspection(Displayed, Struct, frozen=True):
    """What a delta holds.

    Attributes:
        path: The place.
        version: The version that it leads to.
        base_version: The version that it has to be applied to.
        encoding: `xor` or `overwrite`.
        checksum: The kind of the tensors' checksums.
        files: How many files it has, the index included.
        size_bytes: Their sizes together.
        base: The model that it was made from, as far as the manifest says.
        source: The model that it leads to, likewise.
        tensors: The changed tensors, by name.
        unchanged: How many tensors of the model did not change, or None.
        model_bytes: Size of all tensors of the model, or None.
        changed_elements: How many elements changed in all tensors, or None.
        elements: How many elements the model has, or None.
    """

    path: str
    version: int
    base_version: int
    encoding: str
    checksum: str
    files: int
    size_bytes: int
    base: str | None
    source: str | None
    tensors: tuple[DeltaLine, ...]
    unchanged: int | None = None
    model_bytes: int | None = None
    changed_elements: int | None = None
    elements: int | None = None

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "`inspection.tensors`, or ckptkit.verify")

    @property
    def changed_share(self) -> float | None:
        """The share of the model's elements that changed, from 0 to 1."""
        if self.changed_elements is None or self.elements is None:
            return None
        return self.changed_elements / max(self.elements, 1)

    def _facts(self) -> Facts:
        size = f"{counted(len(self.tensors), 'changed tensor')}, {size_text(self.size_bytes)}"
        versions = f"version {self.base_version:,} to {self.version:,}"
        rows = [(line.name, size_text(line.stored_bytes)) for line in self.tensors]
        lines = [("versions", versions), ("encoding", self.encoding), ("holds", size)]
        return Facts(self.path, lines, ("tensor", "stored"), rows)

    def to_json(self) -> dict[str, Any]:
        return {"format": "delta", **plain_fields(self), "changed_share": self.changed_share}


def inspect_delta(place: PathLike) -> DeltaInspection:
    """Describes a delta; reads its index, its manifest and the headers of its files."""
    with open_delta(place) as delta:
        head, manifest = delta.head, delta.manifest
        counts, specs, lines = delta.changed_elements, _specs(delta), []
        for name in sorted(delta.tensors, key=name_order):
            line = DeltaLine(name, delta.tensors[name].size_bytes)
            if (spec := specs.get(name)) is not None:
                about = (spec.dtype.name, spec.shape, spec.size_bytes, counts.get(name))
                line = DeltaLine(name, line.stored_bytes, *about)
            lines.append(line)
        known = manifest is not None and all(line.changed_elements is not None for line in lines)
        return DeltaInspection(
            path=delta.location,
            version=head.version,
            base_version=head.base_version,
            encoding=head.encoding,
            checksum=head.checksum,
            files=len(delta.files),
            size_bytes=sum(file.size_bytes for file in delta.files),
            base=_text(delta.facts.get("base")),
            source=None if manifest is None else _text(manifest.source.get("path")),
            tensors=tuple(lines),
            unchanged=len(specs.keys() - delta.tensors.keys()) if known else None,
            model_bytes=sum(spec.size_bytes for spec in specs.values()) if known else None,
            changed_elements=sum(line.changed_elements or 0 for line in lines) if known else None,
            elements=sum(spec.elements for spec in specs.values()) if known else None,
        )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _specs(delta: OpenedDelta) -> dict[str, TensorSpec]:
    """Returns the tensors of the model, as far as the manifest describes them."""
    records = {} if delta.manifest is None else delta.manifest.tensors
    return {
        name: TensorSpec(Fqn(name), BY_NAME[record.dtype], record.shape)
        for name, record in records.items()
        if record.dtype in BY_NAME
    }


def verify_delta(place: PathLike, listener: Listener = ignore) -> Verification:
    """Reads a delta and checks all that can be checked without the model.

    That is the index against the headers, the digests and sizes of the files if ckptkit wrote the
    delta, and that each change can be decompressed and is for as many bytes as the tensor has.
    Whether it leads to the right model, its checksums prove when it is applied.
    """
    with open_delta(place) as delta:
        problems = [_problem(error) for error in find_file_problems(delta)]
        problems += _find_problems(delta)
        specs = _specs(delta)
        listener(Started(sum(tensor.size_bytes for tensor in delta.tensors.values())))
        found: dict[str, Problem] = {}
        lock = threading.Lock()

        def work(tensors: Iterator[DeltaTensor]) -> None:
            for tensor in tensors:
                try:
                    _check_tensor(delta, tensor, specs.get(tensor.name))
                except CkptkitError as error:
                    with lock:
                        found[tensor.name] = _problem(error)
                listener(BytesWritten(tensor.size_bytes))

        run_crew(usable_cores(), iter(delta.tensors.values()), work)
        problems += [found[name] for name in delta.tensors if name in found]
        proven = [] if delta.manifest is None else ["the digests of all files"]
        return Verification(
            path=delta.location,
            kind="delta",
            problems=tuple(problems),
            tensors=len(delta.tensors),
            size_bytes=sum(file.size_bytes for file in delta.files),
            unverified=(),
            proven=tuple(proven if not problems else ()),
        )


def _problem(error: CkptkitError) -> Problem:
    return Problem(error.code, error.where, error.message)


def _find_problems(delta: OpenedDelta) -> Iterator[Problem]:
    """Yields stray files, and tensors that are not where the manifest says."""
    known = {file.path for file in delta.files}
    for path in delta.source.walk(0):
        if path.endswith(".safetensors") and path not in known:
            yield Problem("stray-file", path, "is not in the index; engines may read it")
    if delta.manifest is None:
        return
    records: Mapping[str, TensorRecord] = delta.manifest.tensors
    for name in sorted({*records, *delta.tensors}):
        listed = records[name].file if name in records else ""
        actual = delta.tensors[name].path if name in delta.tensors else ""
        if listed != actual:
            text = f"is in {actual or 'no file'!r} against {listed or 'no file'!r} in the manifest"
            yield Problem("other-tensor", f"tensor {name!r}", text)


def _check_tensor(delta: OpenedDelta, tensor: DeltaTensor, spec: TensorSpec | None) -> None:
    size_bytes = 1 << 62 if spec is None else spec.size_bytes
    found = delta.open_change(tensor.name, size_bytes).skim()
    if spec is None or found == spec.size_bytes:
        return
    if delta.head.encoding == "xor" or found > spec.size_bytes:
        raise FormatError(
            f"the change is for {found:,} bytes, and the tensor has {spec.size_bytes:,}",
            where=delta.locate(tensor.name),
            hint=HINT,
        )
