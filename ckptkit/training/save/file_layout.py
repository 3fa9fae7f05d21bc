"""The layout of a rank's part of the state in files of torch.distributed.checkpoint.

Every file is an image in one buffer: consecutive archives of single tensors, whose headers are
known beforehand and whose data is copied between them. The CRC-32 of each archive depends on the
data, and is filled in by the process that writes the image.

Source: torch/distributed/checkpoint/filesystem.py of 2.13 for names and the content of a file;
readers take each archive's place from the metadata, so they allow bytes between archives.

The data of weights is placed as in the model folder that `consolidate` writes with its defaults: at
an offset that is congruent modulo a block. A file system that shares blocks then needs no copy of
them. What the offset there is depends on all names, types and shapes, which every rank knows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, compress, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.geometry import (
    flat_offset,
    is_contiguous_in,
    row_major_strides,
    slab_spans,
    slabs,
)
from ckptkit.core.index import Box, Fqn, Key, KeyPath, Shape, Span
from ckptkit.options import DEFAULT_MAX_FILE_BYTES
from ckptkit.plan.layouts.hf import METADATA_KEY, layout_hf_weights
from ckptkit.plan.layouts.torch import ALIGNMENT, Residue, build_tensor_archive
from ckptkit.plan.plan import Copy, Literal, OutputFile, Product, TensorSpec, Trailer
from ckptkit.plan.ties import find_tie_candidates
from ckptkit.training.state.dtensors import has_data
from ckptkit.training.state.pieces import Entry, Piece, sampled_replicas, select_owned
from ckptkit.writer.messages import ArchiveData, Fixed, Image

_PARTS = 100  # of a frozen weight; each save checks one
_PART_BYTES = 4096  # at least, except for smaller weights


class CopyStep(Struct, frozen=True):
    """One copy from a piece into the buffer."""

    piece: int  # index among the pieces that were planned
    first: int  # first element, in the row-major order of the piece's `local`
    stop: int  # first element after it
    start: int  # first byte in the buffer; the elements are stored in row-major order
    dtype: torch.dtype  # of the elements
    shape: Shape  # of the elements, as a part of `local`
    whole: bool  # whether these are all elements of `local`
    # Whether training may change them at any time, as a forward pass changes buffers, instead of
    # only in an optimizer step
    prompt: bool

    @property
    def end(self) -> int:
        """The first byte after the last one in the buffer."""
        return self.start + (self.stop - self.first) * self.dtype.itemsize


class Sample(Struct, frozen=True):
    """The elements of a frozen weight in one wave, cut into about a hundred parts."""

    step: CopyStep  # the copy of all of them
    # The start of each part, in elements of the step, and the end of the last one
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, number: int) -> CopyStep:
        """Returns the copy of one part, to its place in the whole."""
        if len(self) == 1:
            return self.step
        first, stop = self.bounds[number], self.bounds[number + 1]
        (slab,) = slabs(Span(first, stop), self.step.shape)
        return replace(
            self.step,
            first=self.step.first + first,
            stop=self.step.first + stop,
            start=self.step.start + first * self.step.dtype.itemsize,
            shape=slab.sizes,
            whole=False,
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yields start and stop of each part, in bytes of the buffer."""
        places = [self.step.start + at * self.step.dtype.itemsize for at in self.bounds]
        return pairwise(places)


class ReplicaSample(NamedTuple):
    """The first elements of a tensor that several ranks hold; one of them writes all of it."""

    unit: str  # the DCP directory of the tensor
    path: KeyPath  # its key path
    offsets: tuple[int, ...]  # of the first place that the rank has of it
    start: int  # first byte in the buffer, while the first wave is there
    stop: int  # first byte after the last one


def sample_of(step: CopyStep) -> Sample:
    """Cuts a copy into parts."""
    elements, itemsize = step.stop - step.first, step.dtype.itemsize
    most = max(-(-elements // _PARTS), _PART_BYTES // itemsize)
    if elements <= most:
        return Sample(step, (0, elements))
    return Sample(step, (0, *(span.stop for span in slab_spans(step.shape, most))))


IMAGE_ALIGNMENT = 4096
"""Images start at multiples of this, for direct I/O."""

MIN_LIMIT_BYTES = 1 << 20
_MIN_SHARED_BYTES = 64 << 10  # of data that is placed as in the model folder
_REPLICA_ELEMENTS = 256  # of each sample
_WHOLE_ROOM_BYTES = 1 << 20
_ARCHIVE_ROOM_BYTES = 16 << 10  # more than the headers of any archive
_SAVE_HINT = "convert it to a dense tensor, or leave it out of the state"


class SavePlan(Struct, frozen=True):
    """The layout of a rank's files; valid as long as `signature_of` the pieces is equal.

    A state that does not fit into the allowed memory is written in waves, each from the start of
    the same buffer; otherwise there is one wave. Frozen weights are in files of their own, after
    all others.
    """

    images: tuple[tuple[Image, ...], ...]  # the files of each wave
    # The bytes of each wave other than tensor data, each with its offset in the buffer
    literals: tuple[tuple[tuple[int, bytes], ...], ...]
    copies: tuple[tuple[CopyStep, ...], ...]  # the copies of tensor data of each wave
    # The files of each wave without those of frozen weights; waves without other files are left
    # out, except the first one
    trained: tuple[tuple[Image, ...], ...]
    samples: tuple[tuple[Sample, ...], ...]  # the frozen weights of each wave
    # Start and stop of the parts of these, in bytes of the buffer
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    buffer_bytes: int  # required size of the buffer, a multiple of 4096
    data_bytes: int  # bytes of tensor data that this rank copies and writes
    frozen_bytes: int  # how many of these belong to frozen weights
    # The `units` of the rank's record, without objects
    record_units: Mapping[str, Mapping[str, Any]]
    # Copied with the first wave. The commit compares their checksums between ranks.
    replica_samples: tuple[ReplicaSample, ...]
    of_rank_0: frozenset[Entry]  # those among the samples' tensors that rank 0 writes for all ranks
    devices: tuple[torch.device, ...]  # the devices of the tensors, each once
    signature: Signature  # of the pieces
    # Everything that the files of frozen weights depend on except the content of the weights;
    # compared with `==`
    frozen: tuple[object, ...]


def plan_save(
    pieces: Sequence[Piece],
    owned: Sequence[bool],
    *,
    rank: int,
    limit_bytes: int | None = None,
    changing: Collection[Entry] = (),
    models: Mapping[Entry, Mapping[str, Any] | None] = MappingProxyType({}),
) -> SavePlan:
    """Lays out the pieces that this rank writes: those of all its pieces that are `owned`.

    A state that is larger than the limit of the buffer is cut into waves. `changing` are frozen
    weights that change nevertheless, and are written like trained ones. `models`: where the weights
    of models are, by what their key paths begin with, with their configurations.
    """
    frozen = [piece.frozen and piece.entry not in changing for piece in pieces]
    starts = _starts_in_folders(pieces, models)
    layout = _Layout(rank, limit_bytes, {piece.unit: _Unit() for piece in pieces}, starts)
    for number in sampled_replicas(pieces):
        layout.add_replica_sample(pieces[number], number)
    # Unit by unit, so that each file of a unit is one image; frozen weights after all others.
    numbers: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
    for number, (piece, is_frozen) in enumerate(zip(pieces, frozen, strict=True)):
        numbers[is_frozen].setdefault(piece.unit, []).append(number)
    for members in numbers[False].values():
        for number in members:
            layout.add(pieces[number], number, own=owned[number])
    trained_bytes = layout.data_bytes
    trained = [(len(wave.images), len(wave.copies)) for wave in layout.waves]
    for name, members in numbers[True].items():
        unit = layout.units[name]
        unit.image, unit.frozen_from = None, len(unit.files)
        for number in members:
            layout.add(pieces[number], number, own=owned[number])
    waves, signature = layout.waves, signature_of(pieces, owned)
    images = [
        tuple(Image(i.path, i.start, i.stop - i.start, tuple(i.archives)) for i in wave.images)
        for wave in waves
    ]
    counts = [*trained, *[(0, 0)] * (len(waves) - len(trained))]
    samples = tuple(
        tuple(map(sample_of, wave.copies[count:]))
        for wave, (_, count) in zip(waves, counts, strict=True)
    )
    frozen_images = [i for wave, (n, _) in zip(images, counts, strict=True) for i in wave[n:]]
    places = [pieces[step.piece].local.device for wave in waves for step in wave.copies]
    return SavePlan(
        images=tuple(map(Fixed, images)),
        literals=tuple(tuple(wave.literals) for wave in waves),
        copies=tuple(tuple(wave.copies) for wave in waves),
        trained=tuple(
            Fixed(wave[:count]) for wave, (count, _) in zip(images, trained, strict=False)
        ),
        samples=samples,
        ranges=tuple(
            Fixed(chain.from_iterable(sample.ranges() for sample in wave)) for wave in samples
        ),
        frozen_bytes=layout.data_bytes - trained_bytes,
        buffer_bytes=_aligned(layout.largest),
        data_bytes=layout.data_bytes,
        record_units={name: unit.record() for name, unit in layout.units.items()},
        replica_samples=tuple(layout.replica_samples),
        of_rank_0=frozenset(p.entry for p in pieces if p.replicas.compared),
        devices=tuple(dict.fromkeys(places)),
        signature=signature,
        frozen=(
            *compress(signature, frozen),
            *((image.path, image.size_bytes) for image in frozen_images),
            *(sample.bounds for wave in samples for sample in wave),
        ),
    )


def plan_whole(files: Sequence[OutputFile], pieces: Sequence[Piece]) -> SavePlan:
    """Lays out files in the form of another saver; their `Copy` segments are the pieces, in order.

    Unlike `plan_save`, it depends on the content: pickles are among the literals.
    """
    images: list[Image] = []
    literals: list[tuple[int, bytes]] = []
    copies: list[CopyStep] = []
    end = 0
    for file in files:
        start = _aligned(end)
        crc_at: dict[int, list[int]] = {}
        for segment in file.segments:
            at, body = start + segment.start, segment.body
            if isinstance(body, Copy):
                piece, number = pieces[len(copies)], len(copies)
                local = piece.local
                check_storable(local, piece.key)
                copies.append(
                    CopyStep(
                        piece=number,
                        first=0,
                        stop=local.numel(),
                        start=at,
                        dtype=local.dtype,
                        shape=tuple(local.shape),
                        whole=True,
                        prompt=True,
                    )
                )
                continue
            assert isinstance(body, Literal | Trailer)  # noqa: S101  the others compute
            literals.append((at, body.data if isinstance(body, Literal) else body.template))
            for position, of in body.fields if isinstance(body, Trailer) else ():
                crc_at.setdefault(of, []).append(at + position)
        archives = tuple(
            ArchiveData(start + file.segments[n].start, start + file.segments[n].stop, tuple(at))
            for n, at in crc_at.items()
        )
        end = start + file.size_bytes
        images.append(Image(file.path, start, file.size_bytes, archives, summed=True))
    data_bytes = sum(step.end - step.start for step in copies)
    return SavePlan(
        images=(tuple(images),),
        literals=(tuple(literals),),
        copies=(tuple(copies),),
        trained=(tuple(images),),
        samples=((),),
        ranges=((),),
        # Pickles differ in length from save to save, for which the buffer need not grow.
        buffer_bytes=-(-end // _WHOLE_ROOM_BYTES) * _WHOLE_ROOM_BYTES,
        data_bytes=data_bytes,
        frozen_bytes=0,
        record_units={},
        replica_samples=(),
        of_rank_0=frozenset(),
        devices=tuple(dict.fromkeys(piece.local.device for piece in pieces)),
        signature=(),
        frozen=(),
    )


def _starts_in_folders(
    pieces: Sequence[Piece], models: Mapping[Entry, Mapping[str, Any] | None]
) -> Mapping[Entry, int]:
    """Returns where each weight begins in its file of the model folder that is made of them."""
    starts: dict[Entry, int] = {}
    for (unit, path), config in models.items():
        specs: dict[Fqn, TensorSpec] = {}
        names: dict[Entry, list[Fqn]] = {}
        for piece in pieces:
            if piece.unit != unit or piece.key_path[: len(path)] != path:
                continue
            with suppress(UnsupportedError):  # which is raised where the piece is added
                dtype = dtype_named(str(piece.local.dtype))
                if dtype.safetensors is None:
                    continue
                tied = (piece.key_path, *piece.aliases)
                names[piece.entry] = [Fqn(".".join(map(str, one[len(path) :]))) for one in tied]
                specs |= {name: TensorSpec(name, dtype, piece.shape) for name in names[piece.entry]}
        specs.pop(Fqn(METADATA_KEY), None)
        left_out = find_tie_candidates(config, {n: (s.dtype, s.shape) for n, s in specs.items()})
        written = [spec for name, spec in specs.items() if name not in left_out]
        products = [Product(spec, Copy("", Key(""))) for spec in written]
        in_folder = {
            segment.spec.name: segment.start
            for file in layout_hf_weights(products, DEFAULT_MAX_FILE_BYTES)
            for segment in file.segments
            if segment.spec is not None
        }
        for entry, tied_names in names.items():
            kept = [in_folder[name] for name in tied_names if name in in_folder]
            if kept:
                starts[entry] = kept[0]
    return starts


class _OpenImage(Struct):
    """An image that grows."""

    path: str
    start: int
    stop: int
    archives: list[ArchiveData]


class _Wave(Struct):
    images: list[_OpenImage] = field(default_factory=list)
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    copies: list[CopyStep] = field(default_factory=list)


class _Unit(Struct):
    """The part of the plan for one DCP directory."""

    image: _OpenImage | None = None  # that grows; None to start a new one with the next archive
    files: list[str] = field(default_factory=list)  # their names
    frozen_from: int | None = None  # the index of the first file of frozen weights
    numbers: dict[KeyPath, int] = field(default_factory=dict)  # of the tensors, by key path
    tensors: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[list[Any]] = field(default_factory=list)
    left_to_others: dict[KeyPath, None] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Returns the directory's entry of the rank's record."""
        expected = [list(path) for path in self.left_to_others if path not in self.numbers]
        return {
            "tensors": Fixed(self.tensors),
            "chunks": Fixed(self.chunks),
            "objects": [],
            "data_files": self.files,
            "expected": Fixed(expected),
        }


class _Layout:
    """Puts archives one after another into images, and images into the buffer."""

    def __init__(
        self,
        rank: int,
        limit_bytes: int | None,
        units: dict[str, _Unit],
        starts: Mapping[Entry, int],
    ) -> None:
        self.units = units
        self._starts = starts
        self.waves = [_Wave()]
        self.replica_samples: list[ReplicaSample] = []
        self.data_bytes = 0
        self.largest = 0  # wave, in bytes
        self._end = 0  # of what is in the buffer, in the last wave
        self._rank = rank
        self._limit_bytes = limit_bytes

    def add_replica_sample(self, piece: Piece, number: int) -> None:
        """Copies the first elements of a contiguous piece, before any image is added."""
        check_storable(piece.local, piece.key)
        if not piece.local.is_contiguous():  # the first elements may be far apart in memory
            return
        place, itemsize = piece.places[0], piece.local.element_size()
        span = next(slab_spans(place.sizes, _REPLICA_ELEMENTS))
        (slab,) = slabs(span, place.sizes)
        start = -(-self._end // itemsize) * itemsize
        self._end = self.largest = start + span.stop * itemsize
        self._copy(piece, number, span, start, slab.sizes)
        sample = ReplicaSample(*piece.entry, place.offsets, start, self._end)
        self.replica_samples.append(sample)

    def add(self, piece: Piece, number: int, *, own: bool) -> None:
        """Adds a piece, or records that another rank writes it."""
        dtype, unit = check_storable(piece.local, piece.key), self.units[piece.unit]
        # No rank may own a tensor without elements; it has to be listed nevertheless, and several
        # ranks may do so.
        nothing = 0 in piece.shape
        own = own or (nothing and piece.replicas.own == 0)
        if not own or not (piece.elements or nothing):
            unit.left_to_others[piece.key_path] = None
            return
        tensor = unit.numbers.setdefault(piece.key_path, len(unit.tensors))
        if tensor == len(unit.tensors):
            aliases = [list(alias) for alias in piece.aliases]
            shape, path = list(piece.shape), list(piece.key_path)
            unit.tensors.append(
                {"path": path, "dtype": dtype.name, "shape": shape, "aliases": aliases}
            )
        if nothing:
            whole = Box((0,) * len(piece.shape), piece.shape)
            self._add_archive(piece.unit, tensor, whole, dtype)
            return
        first, in_folder = 0, self._starts.get(piece.entry)
        for place in piece.places:
            for span, box in self._cut(place, dtype):
                at = None
                is_large = (span.stop - span.start) * dtype.itemsize >= _MIN_SHARED_BYTES
                if in_folder is not None and is_large and is_contiguous_in(box.sizes, piece.shape):
                    offset = flat_offset(box.offsets, row_major_strides(piece.shape))
                    at = in_folder + offset * dtype.itemsize
                start = self._add_archive(piece.unit, tensor, box, dtype, at)
                sizes = box.sizes if len(piece.places) == 1 else (span.stop - span.start,)
                self._copy(piece, number, Span(first + span.start, first + span.stop), start, sizes)
            first += math.prod(place.sizes)

    def _copy(self, piece: Piece, number: int, span: Span, start: int, shape: Shape) -> None:
        """Has elements of a piece copied to a place in the buffer."""
        step = CopyStep(
            piece=number,
            first=span.start,
            stop=span.stop,
            start=start,
            dtype=piece.local.dtype,
            shape=shape,
            whole=span.stop - span.start == piece.elements,
            prompt=not piece.replicas.spread,
        )
        self.waves[-1].copies.append(step)

    def _cut(self, place: Box, dtype: DType) -> Iterator[tuple[Span, Box]]:
        """Yields parts of a box that fit into a wave, with their elements in the box."""
        elements, limit = math.prod(place.sizes), self._limit_bytes
        most = elements if limit is None else (limit - _ARCHIVE_ROOM_BYTES) // dtype.itemsize
        if elements <= most:
            if elements:
                yield Span(0, elements), place
            return
        for span in slab_spans(place.sizes, most):
            (slab,) = slabs(span, place.sizes)
            offsets = tuple(a + b for a, b in zip(place.offsets, slab.offsets, strict=True))
            yield span, Box(offsets, slab.sizes)

    def _add_archive(
        self, name: str, tensor: int, box: Box, dtype: DType, in_folder: int | None = None
    ) -> int:
        """Appends an archive to a directory's file, and returns the start of its data.

        `in_folder`: where the data starts in the model folder, where it is placed alike.
        """
        unit, limit = self.units[name], self._limit_bytes
        image = unit.image
        while True:
            start = self._end if image is not None else _aligned(self._end)
            in_file = 0 if image is None else start - image.start
            place = (0, DATA_ALIGNMENT)
            if in_folder is not None:
                place = ((in_folder - in_file) % IMAGE_ALIGNMENT, IMAGE_ALIGNMENT)
            archive = archive_of_tensor(dtype, box.sizes, place)
            size_bytes = len(archive.head) + archive.data_bytes + len(archive.tail)
            if limit is None or start + size_bytes <= limit - limit % IMAGE_ALIGNMENT or not start:
                break
            self.waves.append(_Wave())
            self._end, image = 0, None
        self._end = start + size_bytes
        self.largest = max(self.largest, self._end)
        if image is None:
            number, first = len(unit.files), unit.frozen_from
            # Files of frozen weights are shared by steps, so their names differ from torch's, which
            # other programs may overwrite.
            end = str(number) if first is None else f"frozen_{number - first}"
            file = f"__{self._rank}_{end}.distcp"
            path = f"{name}/{file}" if name else file
            unit.image = image = _OpenImage(path, start, start, [])
            unit.files.append(file)
            self.waves[-1].images.append(image)
        data = start + len(archive.head)
        stop = data + archive.data_bytes
        if archive.data_bytes:  # without data the checksum is 0, as in the literals
            image.archives.append(
                ArchiveData(data, stop, tuple(start + at for at in archive.crc_at))
            )
        image.stop = start + size_bytes
        self.waves[-1].literals += [(start, archive.head), (stop, archive.tail)]
        self.data_bytes += archive.data_bytes
        bounds = [list(box.offsets), list(box.sizes)]
        extent = [len(unit.files) - 1, start - image.start, archive.size_bytes]
        unit.chunks.append([tensor, *bounds, *extent])
        return data


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT


def check_storable(tensor: torch.Tensor, where: str) -> DType:
    """Returns the type of a tensor's elements."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not has_data(tensor):
        kind = "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise UnsupportedError(
            "expected a dense tensor, found"
            f" {kind + ' tensor' if has_data(tensor) else 'a tensor without data'}",
            where=where,
            hint=_SAVE_HINT,
        )
    try:
        return dtype_named(str(tensor.dtype))
    except UnsupportedError as error:
        raise UnsupportedError(error.message, where=where, hint=_SAVE_HINT) from error


Signature = tuple[object, ...]


def signature_of(pieces: Sequence[Piece], owned: Sequence[bool]) -> Signature:
    """Returns what a plan depends on: a row of plain values for each piece."""
    return tuple(
        (
            piece.unit,
            piece.key_path,
            piece.shape,
            piece.places,
            piece.aliases,
            piece.replicas.spread,
            piece.replicas.compared,
            piece.frozen,
            own,
            piece.local.dtype,
            piece.local.device,
            piece.local.shape,
            piece.local.stride() if piece.local.layout is torch.strided else piece.local.layout,
        )
        for piece, own in zip(pieces, owned, strict=True)
    )


class Signatures:
    """Caches the signature of the last pieces, without keeping their tensors alive."""

    def __init__(self) -> None:
        self._origins: list[object] = []
        self._owned: tuple[bool, ...] = ()
        self._signature: Signature = ()

    def of(self, pieces: Sequence[Piece]) -> tuple[tuple[bool, ...], Signature]:
        """Returns which of the pieces this rank writes, and their signature."""
        known, origins = self._origins, [piece.origin for piece in pieces]
        if len(known) == len(pieces) and all(map(operator.is_, origins, known)):
            return self._owned, self._signature
        owners = select_owned(pieces)
        if len(known) != len(pieces):
            self._signature = signature_of(pieces, owners)
        else:
            before = zip(known, self._owned, self._signature, strict=True)
            self._signature = tuple(
                row if piece.origin is old and own == owner else signature_of([piece], [owner])[0]
                for piece, owner, (old, own, row) in zip(pieces, owners, before, strict=True)
            )
        self._origins, self._owned = origins, owners
        return owners, self._signature


DATA_ALIGNMENT = ALIGNMENT
"""Tensor data starts at multiples of this if the archive does."""

_ARCHIVES = 4096


class TensorArchive(Struct, frozen=True):
    """The archive of one tensor without its data."""

    head: bytes  # the bytes before the data
    data_bytes: int  # length of the data
    # The bytes after it, with zeros up to the start of the next archive. The fields of the data's
    # checksum are 0, which is the checksum of no data.
    tail: bytes
    size_bytes: int  # length of the archive, without this padding
    crc_at: tuple[int, ...]  # offsets in the archive of the fields for the data's CRC-32


@lru_cache(_ARCHIVES)
def archive_of_tensor(
    dtype: DType, shape: Shape, place: Residue = (0, DATA_ALIGNMENT)
) -> TensorArchive:
    """Returns the archive that stock torch opens as a row-major tensor.

    `place`: where in it the data starts.
    """
    spec = TensorSpec(Fqn(""), dtype, shape)
    parts = build_tensor_archive(Product(spec, Copy("", Key(""))), 0, place)
    before: list[bytes] = []
    after: list[bytes] = []
    crc_at: list[int] = []
    side, at = before, 0
    for size, body, row_spec in parts.rows:
        if row_spec is not None:
            side = after
        elif isinstance(body, Literal):
            side.append(body.data)
        else:
            assert isinstance(body, Trailer)  # noqa: S101  nothing else has no spec
            side.append(body.template)
            crc_at += [at + position for position, _ in body.fields]
        at += size
    after.append(bytes(-at % DATA_ALIGNMENT))
    return TensorArchive(
        head=b"".join(before),
        data_bytes=spec.size_bytes,
        tail=b"".join(after),
        size_bytes=at,
        crc_at=tuple(crc_at),
    )
