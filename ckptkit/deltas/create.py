"""Makes a delta from two models, each read from whatever it is stored in.

Several threads read tensors leaf by leaf. Each thread takes whole tensors, since the change of a
tensor is one zstd frame. The frames go to a nameless file on the disk first: the header of a data
file has the compressed sizes of all its tensors, and is written before them. The files are the same
for any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, starmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    build_manifest,
    find_stored_digests,
    refuse_changed_sources,
    write_output,
)
from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.checksums import (
    DIGEST_SCHEME,
    join_leaves,
    join_sums,
    leaf_digest,
    leaf_ranges,
    tree_digest,
)
from ckptkit.core.crc import crc32
from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import LEAF_BYTES, FileRecord, Manifest
from ckptkit.core.text import list_first
from ckptkit.core.threads import Throttle, run_crew
from ckptkit.deltas.encoding import MOST_OVERWRITTEN_BYTES, open_encoder
from ckptkit.deltas.form import (
    DELTA,
    INDEX_PATH,
    ChecksumFormat,
    DeltaHead,
    Encoding,
    make_header,
    name_files,
    name_version,
    new_hasher,
    version_of_folder,
)
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.outcome import BytesWritten, Digests, Listener, Planned, Started, ignore
from ckptkit.engine.reader import RUN_BYTES, same_bytes
from ckptkit.engine.segment_reader import SegmentReader
from ckptkit.options import DEFAULT_MAX_FILE_BYTES, check_choice
from ckptkit.plan.load_report import DELTA_CREATE
from ckptkit.plan.plan import Segment, SegmentRange, TensorSpec, name_order
from ckptkit.plan.weight_kinds import find_dense_name
from ckptkit.storage.base import Target
from ckptkit.storage.local.target import LocalTarget, translate_errors
from ckptkit.storage.locations import resolve_places
from ckptkit.storage.places import PathLike, open_target

if TYPE_CHECKING:
    from ckptkit.adapters.merge import MergeJob

_LISTED = 3
_OTHER_OPTIONS = "publish the new model as a whole, or make it with the options of that version"


class TensorPair(Struct, frozen=True):
    """A tensor before and after."""

    spec: TensorSpec  # its name, element type and shape, which are the same
    before: tuple[int, Segment]  # where it is planned for the first model
    after: tuple[int, Segment]  # the same of the second


def pair_tensors(before: PlannedOutput, after: PlannedOutput) -> tuple[TensorPair, ...]:
    """Pairs the tensors of two plans, and refuses those that are not of one model."""
    first, second = (
        {
            str(segment.spec.name): (number, segment, segment.spec)
            for file in planned.plan.files
            for number, segment in enumerate(file.segments)
            if segment.spec is not None
        }
        for planned in (before, after)
    )
    names = (before.checkpoint.path, after.checkpoint.path)
    for one, other, location, of in (
        (first, second, names[1], names[0]),
        (second, first, names[0], names[1]),
    ):
        lacking = sorted(one.keys() - other.keys(), key=name_order)
        if lacking:
            hint = "leave tensors out with --exclude, or publish the new model as a whole"
            if any(find_dense_name(name) != name for name in lacking):
                hint = "one of the two is packed: pass --dtype bfloat16, which unpacks it"
            raise RefusedError(
                f"lacks {list_first(lacking, _LISTED)}, which {of} has; a delta needs the same"
                " tensors",
                where=location,
                hint=hint,
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
                before, now = (
                    "absent" if one is None else f"{one[0]} {list(one[1])}"
                    for one in (expected.get(name), found.get(name))
                )
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


_MOST_VERSION = 999_999_999
_READ_BYTES = LEAF_BYTES // 2
"""Of each model at a time; both together are as much as an execution has in memory. From a store,
where each read costs a round trip, a leaf is read at a time."""
_FAR_BYTES = LEAF_BYTES + RUN_BYTES
"""What a worker takes for that in addition."""
_STEP_BYTES = 512 << 10
"""What is digested, compared and compressed at a time, so that it stays in a core's cache."""


class DeltaRequest(Struct, frozen=True):
    """What a delta is like."""

    # The version that it leads to, from the one before; None for the number in the name of an
    # output such as `weight_v000002`, and 1 for other names
    version: int | None = None
    encoding: Encoding = "xor"  # how changes are written
    checksum: ChecksumFormat = "xxh3-128"  # the kind of the tensors' checksums
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES  # size at which a new file is begun

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Reads the options as a user passes them, by their names in `ckptkit.api`."""
        encoding = options.get("encoding", "xor")
        checksum = options.get("checksum", "xxh3-128")
        check_choice("--encoding", encoding, get_args(Encoding))
        check_choice("--checksum", checksum, get_args(ChecksumFormat))
        return cls(options.get("version"), encoding, checksum)

    def head_for(self, out: PathLike) -> DeltaHead:
        """Returns the head of the delta at a place."""
        named = version_of_folder(out)
        version = named if self.version is None else self.version
        version = 1 if version is None else version
        if not 1 <= version <= _MOST_VERSION:
            raise UsageError(
                f"is {version}, where a number from 1 to {_MOST_VERSION:,} was expected",
                where="--version",
                hint="version 0 is the model that the first delta is applied to",
            )
        if named is not None and named != version:
            raise UsageError(
                f"is {version}, and the name of OUT has {named}, by which engines look for it",
                where="--version",
                hint=f"name OUT {name_version(version)}, or leave --version out",
            )
        return DeltaHead(version, version - 1, self.encoding, self.checksum)


class EncodedTensor(Struct, frozen=True):
    """What was found of a tensor."""

    name: str  # the tensor
    # Where its change is in the spool, as `(start, size in bytes)`; none if it did not change
    extents: tuple[tuple[int, int], ...]
    checksum: str  # of its bytes after the change, in the form of the delta
    digest_before: str  # their digest before the change
    changed_elements: int  # how many elements changed

    @property
    def stored_bytes(self) -> int:
        return sum(size for _, size in self.extents)


def make_job(src: PathLike, out: PathLike, options: Mapping[str, Any]) -> ConversionJob:
    """Returns the job that plans a model on one side of a delta."""
    values = {"base": None, **options, "also": (), "resume": False}
    job = ConversionJob.from_options(resolve_places(src, out, values), "hf")
    return replace(job, advice=DELTA_CREATE)


def create_delta(
    base: ConversionJob | MergeJob,
    new: ConversionJob | MergeJob,
    request: DeltaRequest,
    listener: Listener = ignore,
    facts: Mapping[str, Any] | None = None,
    *,
    published: PublishedBase | None = None,
) -> Manifest:
    """Writes what changed between two models; both are planned as they would be written.

    With the manifest of a `published` version, a base that is not that very model is refused.
    """
    head = request.head_for(new.destination)
    for job in (base, new):
        job.check_places()
    new_hasher(head.checksum)  # refuses one that is not installed
    target = open_target(new.destination, overwrite=new.overwrite)
    with (
        _DeltaStrategy(target, head, request.max_file_bytes, listener) as strategy,
        base.plan_output() as before,
        new.plan_output() as after,
    ):
        strategy.take(before, after, published)
        planned = replace(
            after,
            kind=DELTA,
            sources=(*after.sources, *before.sources),
            facts={**after.facts, **(facts or {})},
        )
        return write_output(planned, strategy, listener)


class Spool:
    """Bytes that several threads append, in a file without a name."""

    def __init__(self, folder: Path | None) -> None:
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed by `close`
        self._lock = threading.Lock()
        self._end = 0

    def append(self, data: bytes) -> tuple[int, int]:
        """Returns where the bytes are, as `(start, size in bytes)`."""
        with self._lock:
            start = self._end
            self._end += len(data)
            self._file.seek(start)
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        return start, len(data)

    def read(self, start: int, size_bytes: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size_bytes)

    def close(self) -> None:
        self._file.close()


class _DeltaStrategy(SingleProcess):
    """Writes a delta; a run that fails leaves nothing."""

    def __init__(
        self, target: Target, head: DeltaHead, max_file_bytes: int, listener: Listener
    ) -> None:
        super().__init__(target, listener)
        self.make_manifest = self._describe
        self._head = head
        self._max_file_bytes = max_file_bytes
        self._folder = target.folder if isinstance(target, LocalTarget) else None
        self._tensors: list[EncodedTensor] = []
        self._files: dict[str, FileRecord] = {}
        self._paths: dict[str, str] = {}
        self._digests = Digests()
        self._lock = threading.Lock()

    def take(
        self, before: PlannedOutput, after: PlannedOutput, published: PublishedBase | None
    ) -> None:
        """Takes the two models; refuses them if they do not have the same tensors."""
        self._before, self._after, self._published = before, after, published
        self._pairs = pair_tensors(before, after)
        if published is not None:
            published.refuse_other_tensors(pair.spec for pair in self._pairs)
        largest = max(self._pairs, key=lambda pair: pair.spec.size_bytes, default=None)
        if (
            self._head.encoding == "overwrite"
            and largest is not None
            and largest.spec.size_bytes > MOST_OVERWRITTEN_BYTES
        ):
            raise RefusedError(
                f"tensor {str(largest.spec.name)!r} has {largest.spec.size_bytes:,} bytes, and"
                f" positions in at most {MOST_OVERWRITTEN_BYTES:,} can be written",
                where="--encoding overwrite",
                hint="pass --encoding xor",
            )

    def start(self, planned: PlannedOutput) -> None:
        self._planned = planned
        notes = (*self._before.checkpoint.notes, *self._after.checkpoint.notes)
        self._listener(Planned(tuple(dict.fromkeys(notes))))

    def execute(self) -> None:
        with translate_errors(Path(self._target.location)), closing(Spool(self._folder)) as spool:
            self._encode_all(spool)
            digests = {one.name: one.digest_before for one in self._tensors}
            for name, stored in find_stored_digests(self._before).items():
                stored.compare(digests[name])
            if self._published is not None:
                self._published.refuse_other_bytes(digests)
            for planned in (self._before, self._after):
                for origin in planned.inputs.origins.values():
                    origin.checksums.finish()
            refuse_changed_sources(self._planned)
            self._write_files(spool)

    def _describe(self, planned: PlannedOutput, digests: Digests) -> Manifest:
        changed = [tensor for tensor in self._tensors if tensor.extents]
        facts = {
            "version": self._head.version,
            "base_version": self._head.base_version,
            "encoding": self._head.encoding,
            "checksum": self._head.checksum,
            "base": self._before.checkpoint.path,
            "base_step": self._before.checkpoint.index.run.step,
            "base_digests": {tensor.name: tensor.digest_before for tensor in changed},
            "changed_elements": {tensor.name: tensor.changed_elements for tensor in changed},
        }
        manifest = build_manifest(replace(planned, facts={**planned.facts, DELTA: facts}), digests)
        tensors = {
            name: replace(record, file=self._paths.get(name, ""))
            for name, record in manifest.tensors.items()
        }
        return replace(manifest, tensors=tensors, files=self._files)

    def _encode_all(self, spool: Spool) -> None:
        settings, block_bytes = self._after.settings, _READ_BYTES
        if any(source.source.is_remote for source in self._planned.sources):
            settings, block_bytes = settings.with_more(_FAR_BYTES), LEAF_BYTES
        throttle = Throttle(settings.bytes_per_second)
        self._listener(Started(sum(pair.spec.size_bytes for pair in self._pairs)))
        with Preparations() as first, Preparations() as second:

            def work(pairs: Iterator[TensorPair]) -> None:
                readers = (
                    SegmentReader(self._before.inputs, first),
                    SegmentReader(self._after.inputs, second),
                )
                blocks = aligned_buffer(block_bytes), aligned_buffer(block_bytes)
                for pair in pairs:
                    self._encode(pair, readers, blocks, spool, throttle)

            run_crew(settings.workers, iter(self._pairs), work, throttle.stopped)
        self._tensors.sort(key=lambda tensor: name_order(tensor.name))

    def _encode(
        self,
        pair: TensorPair,
        readers: tuple[SegmentReader, SegmentReader],
        blocks: tuple[memoryview, memoryview],
        spool: Spool,
        throttle: Throttle,
    ) -> None:
        """Encodes one tensor, and digests its leaves before and after the change."""
        size, kind = pair.spec.size_bytes, np.dtype(f"u{pair.spec.dtype.itemsize}")
        extents: list[tuple[int, int]] = []
        leaves_before: list[bytes] = []
        leaves_after: dict[int, bytes] = {}  # each with the CRC-32 of the leaf
        changed_elements, hasher = 0, new_hasher(self._head.checksum)

        def put(data: bytes) -> None:
            extents.append(spool.append(data))

        with closing(open_encoder(self._head.encoding, size, put, self._folder)) as encoder:
            for leaf, (leaf_start, leaf_stop) in enumerate(leaf_ranges(size)):
                crc, first, second = 0, xxhash.xxh3_128(), xxhash.xxh3_128()
                for start in range(leaf_start, leaf_stop, len(blocks[0])):
                    stop = min(start + len(blocks[0]), leaf_stop)
                    for reader, place, block in zip(
                        readers, (pair.before, pair.after), blocks, strict=True
                    ):
                        reader.fill(SegmentRange(*place, start, stop), block[: stop - start])
                        reader.clear()
                    for at in range(0, stop - start, _STEP_BYTES):
                        step = slice(at, min(at + _STEP_BYTES, stop - start))
                        before, after = blocks[0][step], blocks[1][step]
                        hasher.update(after)
                        first.update(before)
                        second.update(after)
                        crc = crc32(after, crc)
                        if not same_bytes(before, after):
                            unequal = np.frombuffer(before, kind) != np.frombuffer(after, kind)
                            changed_elements += int(np.count_nonzero(unequal))
                        encoder.add(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8))
                    self._listener(BytesWritten(stop - start))
                    throttle.take(sum(reader.take_bytes_read() for reader in readers))
                leaves_before.append(first.digest())
                leaves_after[leaf] = join_sums(second.digest(), crc)
            if changed_elements:
                encoder.finish()
        tensor = EncodedTensor(
            str(pair.spec.name),
            tuple(extents) if changed_elements else (),
            hasher.hexdigest(),
            tree_digest(leaves_before),
            changed_elements,
        )
        with self._lock:
            self._tensors.append(tensor)
            self._digests.tensors[tensor.name] = leaves_after

    def _write_files(self, spool: Spool) -> None:
        groups: list[list[EncodedTensor]] = []
        room = 0
        for tensor in self._tensors:
            if not tensor.extents:
                continue
            if not groups or tensor.stored_bytes > room:
                groups.append([])
                room = self._max_file_bytes
            groups[-1].append(tensor)
            room -= tensor.stored_bytes
        for path, group in zip(name_files(len(groups)), groups, strict=True):
            sizes = [(tensor.name, tensor.stored_bytes) for tensor in group]
            header = make_header(sizes, {tensor.name: tensor.checksum for tensor in group})
            size = len(header) + sum(size for _, size in sizes)
            extents = (extent for tensor in group for extent in tensor.extents)
            self._write(path, size, chain([header], starmap(spool.read, extents)))
            self._paths |= {tensor.name: path for tensor in group}
        index = self._head.to_index(self._paths)
        self._write(INDEX_PATH, len(index), iter([index]))

    def _write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        """Writes a file in the ranges in which an execution would."""
        self._target.create(path, size_bytes)
        block = bytearray()
        leaves: dict[int, bytes] = {}
        for leaf, (start, stop) in enumerate(leaf_ranges(size_bytes)):
            while len(block) < stop - start:
                block += next(pieces)
            data = memoryview(bytes(block[: stop - start]))
            del block[: stop - start]
            leaves[leaf] = leaf_digest(data)
            self._target.write(path, start, data)
        self._files[path] = FileRecord(size_bytes, join_leaves(leaves))
