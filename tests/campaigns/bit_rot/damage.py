"""What can happen to the bytes of a file, and which class of bytes it happens to.

The classes are found by parsing each container again, with nothing of ckptkit: a zip archive has
headers, directories, checksums, padding, pickles and data, a safetensors file a header, padding
and data. All other files belong to one class, by their names.
"""

from __future__ import annotations

import posixpath
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
PAGE_BYTES = 4096
BLOCK_BYTES = 512

_MANIFEST = "ckptkit.json"
_INDEXES = (
    *(".metadata", ".snapshot_metadata", "metadata.json", "metadata.pkl", "mcore_data"),
    *("checkpoint_metadata.json", "latest", "latest.txt", "latest_checkpointed_iteration.txt"),
)
_CONFIGURATIONS = (
    *("config.json", "generation_config.json", "adapter_config.json", "params.json"),
    *("config.yaml", "run_config.yaml", "model_config.json"),
)
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCAL_BYTES, _CENTRAL_BYTES, _END_BYTES = 30, 46, 22
_DESCRIPTOR, _DESCRIPTOR_BYTES = b"PK\x07\x08", 24


@dataclass(frozen=True)
class Fault:
    """One fault of one file."""

    path: str
    kind: str  # `flip`, `swap`, `truncate` or `zero`
    byte_class: str  # the class of the first byte that it changes
    data: bytes  # the file afterwards
    at: int  # the first byte that it may change

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.at:,} of {self.path} ({self.byte_class})"


def classify(path: str, data: bytes) -> dict[str, list[Range]]:
    """Returns the byte ranges of each class of a file; together they are the file."""
    name = posixpath.basename(path)
    if name.endswith(".safetensors"):
        return _classify_safetensors(data)
    archives = _find_archives(data)
    if archives:
        return _classify_archives(data, archives)
    return {_classify_name(name): [(0, len(data))]}


def _classify_name(name: str) -> str:
    if name == _MANIFEST:
        return "manifest"
    if name in _INDEXES or name.endswith(".index.json"):
        return "index"
    if name in _CONFIGURATIONS:
        return "configuration"
    if name.endswith((".pt", ".bin", ".pth", ".pkl", ".ckpt")):
        return "legacy file"
    return "sidecar" if name.endswith((".json", ".jinja", ".txt", ".yaml", ".md")) else "data"


def _classify_safetensors(data: bytes) -> dict[str, list[Range]]:
    length = int.from_bytes(data[:8], "little")
    end = 8 + len(data[8 : 8 + length].rstrip(b" "))
    data_start = 8 + length
    spans = {"header": (0, end), "padding": (end, data_start), "data": (data_start, len(data))}
    return {name: [span] for name, span in spans.items() if span[0] < span[1]}


def _find_archives(data: bytes) -> list[tuple[int, int, int]]:
    """Returns the start, the first byte of the directory, and the end of each zip archive."""
    found, at = [], data.find(_END)
    while at >= 0:
        _, offset = struct.unpack_from("<II", data, at + 12)
        first = data.rfind(_CENTRAL, 0, at)
        while first >= 0:  # back to the first entry of this directory
            before = data.rfind(_CENTRAL, 0, first)
            if before < 0 or before + _entry_bytes(data, before) != first:
                break
            first = before
        if first >= 0 and first >= offset:
            found.append((first - offset, first, at + _END_BYTES))
        at = data.find(_END, at + 1)
    return found


def _entry_bytes(data: bytes, at: int) -> int:
    return _CENTRAL_BYTES + int(sum(struct.unpack_from("<HHH", data, at + 28)))


def _classify_archives(
    data: bytes, archives: Sequence[tuple[int, int, int]]
) -> dict[str, list[Range]]:
    marks = ["other"] * len(data)

    def mark(name: str, start: int, stop: int) -> None:
        marks[start:stop] = [name] * (stop - start)

    for start, first, end in archives:
        mark("directory", first, end)
        at = first
        while data[at : at + 4] == _CENTRAL:
            size = struct.unpack_from("<I", data, at + 24)[0]
            local = start + struct.unpack_from("<I", data, at + 42)[0]
            name_bytes, extra_bytes = struct.unpack_from("<HH", data, local + 26)
            name = data[local + _LOCAL_BYTES : local + _LOCAL_BYTES + name_bytes].decode()
            begin = local + _LOCAL_BYTES + name_bytes
            mark("header", local, begin)
            mark("checksum", at + 16, at + 20)
            mark("padding", begin, begin + extra_bytes)
            begin += extra_bytes
            is_data = "/data/" in name or name.startswith("data/")
            mark("data" if is_data else "pickle", begin, begin + size)
            if data[begin + size : begin + size + 4] == _DESCRIPTOR:
                mark("checksum", begin + size, begin + size + _DESCRIPTOR_BYTES)
            at += _entry_bytes(data, at)
    found: dict[str, list[Range]] = {}
    begin = 0
    for at in range(1, len(marks) + 1):
        if at == len(marks) or marks[at] != marks[begin]:
            found.setdefault(marks[begin], []).append((begin, at))
            begin = at
    return found


def draw_faults(files: Mapping[str, bytes], flips: int, seed: str) -> Iterator[Fault]:
    """Yields faults: as many flips, spread over the classes, and fewer of the other kinds."""
    chance = random.Random(seed)
    ranges: dict[str, list[tuple[str, int, int]]] = {}
    for path, data in sorted(files.items()):
        for name, of_class in classify(path, data).items():
            ranges.setdefault(name, []).extend((path, start, stop) for start, stop in of_class)
    classes = sorted(name for name, of_class in ranges.items() if of_class)
    for number in range(flips):
        name = classes[number % len(classes)]
        path, at = _choose_byte(chance, ranges[name])
        yield Fault(path, "flip", name, _flip(files[path], 8 * at + chance.randrange(8)), at)
        if number % 8 == 0:
            kind = list(_OTHERS)[number // 8 % len(_OTHERS)]
            name = chance.choice(classes)
            path, at = _choose_byte(chance, ranges[name])
            changed = _OTHERS[kind](chance, files[path], at)
            if changed != files[path]:
                yield Fault(path, kind, name, changed, at)


def _choose_byte(chance: random.Random, ranges: Sequence[tuple[str, int, int]]) -> tuple[str, int]:
    """Chooses a file first, so that small ones are chosen as often as large ones."""
    path = chance.choice(sorted({path for path, _, _ in ranges}))
    own = [(start, stop) for other, start, stop in ranges if other == path]
    position = chance.randrange(sum(stop - start for start, stop in own))
    for start, stop in own:
        if position < stop - start:
            return path, start + position
        position -= stop - start
    raise AssertionError("the position is within the ranges")


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _swap(chance: random.Random, data: bytes, at: int) -> bytes:
    size = min(BLOCK_BYTES, len(data) // 4)
    first = at // max(size, 1) * size
    other = chance.randrange(max(len(data) // max(size, 1), 1)) * size
    low, high = sorted((first, other))
    if high + size > len(data) or low + size > high:
        return data
    changed = bytearray(data)
    changed[low : low + size], changed[high : high + size] = (
        data[high : high + size],
        data[low : low + size],
    )
    return bytes(changed)


def _truncate(_chance: random.Random, data: bytes, at: int) -> bytes:
    return data[:at]


def _zero(_chance: random.Random, data: bytes, at: int) -> bytes:
    start = at // PAGE_BYTES * PAGE_BYTES
    stop = min(start + PAGE_BYTES, len(data))
    return data[:start] + bytes(stop - start) + data[stop:]


_OTHERS: dict[str, Callable[[random.Random, bytes, int], bytes]] = {
    "swap": _swap,
    "truncate": _truncate,
    "zero": _zero,
}
