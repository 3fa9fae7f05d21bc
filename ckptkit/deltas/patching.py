"""Applies deltas to a model: a plan of the model whose tensors are changed as they are written.

The changes of all deltas to a block are joined before the block is read, so a chain of deltas costs
one pass over the model. What comes out is proven by the checksums of the deltas, and by the digests
of all tensors if ckptkit made the last one.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.open import read_model_manifest
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    build_manifest,
    check_destination,
    find_stored_digests,
    write_output,
)
from ckptkit.core.checksums import DIGEST_SCHEME, leaf_digest, leaf_ranges, tree_digest
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    InputError,
    RefusedError,
    UsageError,
)
from ckptkit.core.index import Span
from ckptkit.core.manifest import BY_MANIFEST, LEAF_BYTES, UNVERIFIED, Manifest
from ckptkit.deltas.encoding import HINT, ChangeStream
from ckptkit.deltas.form import (
    DELTA,
    ChecksumFormat,
    OpenedDelta,
    new_hasher,
    open_delta,
)
from ckptkit.engine.kernels import OperandKernel, StoredOperand
from ckptkit.engine.outcome import Digests, Listener, Planned, ignore
from ckptkit.plan.load_report import DELTA_APPLY
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Demand,
    Kernel,
    Reading,
    Segment,
    TensorSpec,
)
from ckptkit.storage.places import PathLike, open_target

_WRONG_BASE = (
    "the delta was made from another model, or one of the two is damaged; `ckptkit verify` reads"
    " them"
)
_STREAM_BYTES = 2 << 20
"""What a worker's decoder of one delta takes: its window, and what is read for it."""


class ExpectedChecksum:
    """Compares the checksum of a tensor whose blocks come from several threads in any order."""

    def __init__(
        self, checksum: ChecksumFormat, expected: str, size_bytes: int, where: str
    ) -> None:
        self._hasher = new_hasher(checksum)
        self._expected = expected
        self._size_bytes = size_bytes
        self._where = where
        self._lock = threading.Lock()
        self._position = 0
        self._early: dict[int, bytes] = {}

    def add(self, start: int, data: NDArray[np.uint8]) -> None:
        """Adds a block; the last one raises an error if the checksum is another."""
        with self._lock:
            if start != self._position:
                self._early[start] = data.tobytes()
                return
            block: Any = data
            while block is not None:
                self._hasher.update(block)
                self._position += len(block)
                block = self._early.pop(self._position, None)
            if self._position == self._size_bytes:
                self.compare()

    def compare(self) -> None:
        """Raises an error if the checksum of what was added is another than that expected."""
        found = self._hasher.hexdigest()
        if found != self._expected:
            raise ChecksumError(
                f"has checksum {found} after the change against {self._expected} in the delta",
                where=self._where,
                hint=_WRONG_BASE,
            )


class PatchKernel(Kernel, Struct, frozen=True, eq=False):
    """Computes a tensor as another kernel does, and changes it."""

    inner: Kernel  # the other kernel
    changes: ChangeStream  # of all deltas
    checksum: ExpectedChecksum  # what has to come out

    @property
    def is_ready(self) -> bool:
        return self.inner.is_ready

    def prepare(self, out: TensorSpec, reading: Reading) -> Kernel:
        return replace(self, inner=self.inner.prepare(out, reading))

    def grain_elements(self, out: TensorSpec) -> int:
        return self.inner.grain_elements(out)

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return self.inner.demands(out, block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Computes one block, then changes its bytes."""
        self.inner.run(out, block, inputs, target)
        data, start = target.view(np.uint8), block.start * out.dtype.itemsize
        self.changes.apply(start, data)
        self.checksum.add(start, data)


def _open_chain(stack: ExitStack, places: Sequence[PathLike]) -> list[OpenedDelta]:
    """Opens deltas in their order. Each begins with the version that the one before leads to.

    The files of those with a manifest are proven.
    """
    if not places:
        raise UsageError("at least one delta is needed", where="DELTA")
    deltas = [stack.enter_context(open_delta(place)) for place in places]
    for one, following in pairwise(deltas):
        if following.head.base_version != one.head.version:
            raise RefusedError(
                f"leads from version {following.head.base_version} to {following.head.version}, and"
                f" the delta before it, {one.location}, to version {one.head.version}",
                where=following.location,
                hint="name all deltas between the two models, in their order",
            )
    for delta in deltas:
        for problem in find_file_problems(delta):
            raise problem
    return deltas


def find_file_problems(delta: OpenedDelta) -> Iterator[InputError]:
    """Yields an error for each file that is not as the manifest says; none without a manifest."""
    if delta.manifest is None:
        return
    sizes = {file.path: file.size_bytes for file in delta.files}
    for path in sorted(sizes.keys() - delta.manifest.files.keys()):
        where = posixpath.join(delta.location, path)
        yield FormatError("is not in the manifest", where=where, hint=HINT)
    for path, record in delta.manifest.files.items():
        where = posixpath.join(delta.location, path)
        if sizes.get(path) != record.size_bytes:
            found = f"{sizes[path]:,} bytes" if path in sizes else "nothing"
            text = f"{found} found against {record.size_bytes:,} bytes in the manifest"
            yield FormatError(text, where=where, hint=HINT)
            continue
        leaves = [
            leaf_digest(memoryview(delta.source.read(path, start, stop)))
            for start, stop in leaf_ranges(record.size_bytes)
        ]
        found = tree_digest(leaves)
        if found != record.digest:
            yield ChecksumError(
                f"digest {found} was found against {record.digest} in the manifest", where=where
            )


class _PatchedOutput(SingleProcess):
    """Writes a model with changes, and proves all of it before it is visible."""

    def __init__(
        self, out: PathLike, deltas: Sequence[OpenedDelta], listener: Listener, *, overwrite: bool
    ) -> None:
        super().__init__(open_target(out, overwrite=overwrite), listener)
        self.make_manifest = self._describe
        self._deltas = deltas
        # The digests that tensors have to come out with, each with the location of its manifest:
        # that of the last delta that has one; for tensors that no delta changes after that, and
        # without such a delta, that of the base.
        self._expected: dict[str, tuple[str, str]] = {}

    def patch(self, planned: PlannedOutput) -> PlannedOutput:
        """Returns the plan with every tensor that a delta changes as it is after all of them."""
        deltas, base = self._deltas, read_model_manifest(planned.checkpoint)
        first = deltas[0].head.base_version
        # A model that was published, or made by applying deltas, has a version.
        facts = {} if base is None else base.source.get(DELTA)
        version = facts.get("version") if isinstance(facts, dict) else None
        if type(version) is int and version != first:
            raise RefusedError(
                f"is made for version {first}, and BASE is version {version}",
                where=deltas[0].location,
                hint="name all deltas between the two, in their order",
            )
        specs = {str(spec.name): spec for _, _, spec in planned.plan.specs()}
        for delta in deltas:
            for misfit in _list_misfits(delta, specs, planned.checkpoint.path):
                raise RefusedError(
                    misfit,
                    where=delta.location,
                    hint="name the model that the delta was made from, with the same options",
                )
        self._compare_digests(planned)
        files = tuple(
            replace(file, segments=tuple(map(self._patch_segment, file.segments)))
            for file in planned.plan.files
        )
        made = {"version": deltas[-1].head.version, "deltas": [d.location for d in deltas]}
        return replace(
            planned,
            plan=replace(planned.plan, files=files),
            settings=planned.settings.with_more(2 * LEAF_BYTES + len(deltas) * _STREAM_BYTES),
            facts={**planned.facts, DELTA: made},
        )

    def _compare_digests(self, planned: PlannedOutput) -> None:
        """Compares the digests before each delta with those that led to it, where both are known.

        Nothing is read for it: a wrong base is found before the first byte is written.
        """
        known = {
            name: (stored.record.digest, stored.location)
            for name, stored in find_stored_digests(planned).items()
        }
        for delta in self._deltas:
            for name, digest in delta.base_digests.items():
                before, _ = known.get(name, (digest, ""))
                if before.startswith(DIGEST_SCHEME) and before != digest:
                    raise RefusedError(
                        f"was made from tensor {name!r} with digest {digest}; in the model that it"
                        f" is to change, the digest is {before}",
                        where=delta.location,
                        hint=_WRONG_BASE,
                    )
            if delta.manifest is not None:
                records = delta.manifest.tensors
                known = {name: (r.digest, delta.location) for name, r in records.items()}
            else:
                known = {name: known[name] for name in known.keys() - delta.tensors.keys()}
        self._expected = {n: one for n, one in known.items() if one[0].startswith(DIGEST_SCHEME)}

    def _patch_segment(self, segment: Segment) -> Segment:
        spec, body = segment.spec, segment.body
        if spec is None:
            return segment
        changing = [delta for delta in self._deltas if str(spec.name) in delta.tensors]
        if not changing:
            return segment
        tensor, last = changing[-1].tensors[str(spec.name)], changing[-1]
        checksum = ExpectedChecksum(
            last.head.checksum,
            tensor.checksum,
            spec.size_bytes,
            f"{last.location}, tensor {tensor.name!r}",
        )
        if not spec.size_bytes:
            checksum.compare()
            return segment
        changes = ChangeStream(
            lambda: [delta.open_change(str(spec.name), spec.size_bytes) for delta in changing],
            spec.size_bytes,
        )
        if isinstance(body, Copy):
            body = OperandKernel(StoredOperand(body.origin, body.key, spec.dtype)).compute()
        if not isinstance(body, Compute):
            raise NotImplementedError(f"{type(body).__name__} segments cannot be changed")
        changed = PatchKernel(body.kernel, changes, checksum)
        return replace(segment, body=Compute(changed, body.reads))

    def start(self, planned: PlannedOutput) -> None:
        """Begins; no bytes are copied by a store, since all of them are digested here."""
        self._planned = self._with_shared_blocks(planned)
        self._listener(Planned(planned.plan.notes))

    def execute(self) -> None:
        super().execute()
        for delta in self._deltas:
            changed = delta.source.changed(delta.files)
            if changed is not None:
                raise InputError(
                    f"{changed.path!r} changed while it was read",
                    where=delta.location,
                    hint="wait until it is written, then run again",
                )
        # Tensors whose stored checksum is taken as it is have no digest.
        for name in sorted(self._expected.keys() - self._digests.crc32s.keys()):
            expected, where = self._expected[name]
            found = self._digests.of_tensor(name)
            if found != expected:
                raise ChecksumError(
                    f"tensor {name!r} came out with digest {found} against {expected} in the"
                    " manifest",
                    where=where,
                    hint=_WRONG_BASE,
                )

    def _describe(self, planned: PlannedOutput, digests: Digests) -> Manifest:
        """Returns the manifest of a model whose tensors were compared."""
        manifest = build_manifest(planned, digests)
        proven = set(self._expected).union(*(delta.tensors for delta in self._deltas))
        tensors = {
            name: replace(record, proof=BY_MANIFEST)
            if record.proof == UNVERIFIED and name in proven
            else record
            for name, record in manifest.tensors.items()
        }
        return replace(manifest, tensors=tensors)


def _list_misfits(delta: OpenedDelta, specs: Mapping[str, TensorSpec], base: str) -> Iterator[str]:
    """Yields which tensors of a delta, or of its model, the base does not have so."""
    for name in delta.tensors:
        if name not in specs:
            yield f"changes tensor {name!r}, which {base} lacks"
    if delta.manifest is None:
        return
    records = delta.manifest.tensors
    for name in specs:
        if name not in records:
            yield f"is for models without tensor {name!r}, which {base} has"
    for name, record in records.items():
        spec = specs.get(name)
        found = "none" if spec is None else f"{spec.dtype.name} {list(spec.shape)}"
        wanted = f"{record.dtype} {list(record.shape)}"
        if found != wanted:
            yield f"is for tensor {name!r} of {wanted}, and {base} has {found}"


def apply_deltas(
    job: ConversionJob, deltas: Sequence[PathLike], listener: Listener = ignore
) -> Manifest:
    """Writes the model that deltas lead to."""
    job.check_places()
    for delta in deltas:
        check_destination(delta, job.destination, overwrite=job.overwrite)
    with ExitStack() as stack:
        opened = _open_chain(stack, deltas)
        strategy = stack.enter_context(
            _PatchedOutput(job.destination, opened, listener, overwrite=job.overwrite)
        )
        planned = stack.enter_context(replace(job, advice=DELTA_APPLY).plan_output())
        return write_output(strategy.patch(planned), strategy, listener)
