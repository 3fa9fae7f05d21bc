"""Mutations that keep the outer form of an input, so that it gets past the first check.

Each takes a valid file to pieces (records of an archive, opcodes of a pickle, values of a
document), changes a few of them and puts it together again with right lengths and checksums.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import zstandard

Mutator = Callable[[Random, bytes], bytes]
_MOST_BYTES = 1 << 16
_NUMBERS = (0, 1, -1, 2, 7, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32)
_HUGE = (2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**40, 10**400)
_TEXTS = (
    *("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:\\x", "\0", "\n", "\x1b[31m", "é"),
    *("e\u0301", "\u202etxt", "\ud800", "x" * 300, "weight", "model.weight", "F32", "float32"),
    *("None", "nan", "-1", "1e999", "9" * 30, "0" * 5000, "²", "{0}", "%s", "*", "(a+)+$"),
)
_TOKENS = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"/",
    b"=",
    b"..",
)


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Changes, removes, repeats or inserts a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 32))
        match rng.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                changed[at : at + length] = rng.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                source = rng.randrange(len(changed) + 1)
                changed[at:at] = changed[source : source + 4 * length]
            case 4:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice((*_NUMBERS, *_HUGE[:5])) % (1 << 8 * width)
                changed[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 5:
                changed[at:at] = rng.choice(_TOKENS)
            case _:
                del changed[at:]
    return bytes(changed[:_MOST_BYTES])


def _scalar(rng: Random) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice((*_NUMBERS, *_HUGE)) * rng.choice((1, 1, -1))
    if kind < 6:
        return rng.choice(_TEXTS)
    return rng.choice((None, True, False, 0.5, -0.0, 1e308, float("inf"), float("nan"), [], {}))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns containers with the keys of all values in them, the outermost first."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 3000:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                waiting.append(inner[key])
    return found


def _change_value(rng: Random, places: list[tuple[Any, Any]]) -> None:
    holder, key = rng.choice(places)
    if not _is_there(holder, key):
        return  # an earlier change has removed it
    other, inner = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if _is_there(other, inner):
            holder[key] = json.loads(json.dumps(other[inner]))
        case 2:
            _repeat(rng, holder, key)
        case 3 if isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = holder.pop(key)
        case 4:
            holder[key] = _altered(rng, holder[key])
        case _:
            holder[key] = _scalar(rng)


def _is_there(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _repeat(rng: Random, holder: Any, key: Any) -> None:
    value = json.loads(json.dumps(holder[key]))
    if isinstance(holder, dict):
        holder[rng.choice((f"{key}2", *_TEXTS))] = value
    else:
        holder.insert(key, value)


def _altered(rng: Random, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value + rng.choice((-1, 1, 2, 7, 256))
    if isinstance(value, str):
        text = mutate_bytes(rng, value.encode("utf-8", "surrogatepass"))
        return text.decode("utf-8", "replace")
    return rng.choice(([value], {"a": value}, [value] * 3))


_RAW = (
    *('"a":1,"a":2', "NaN", "-Infinity", "1e400", "-0", "1" * 4400, '"\\ud800"', '"\\u0000"'),
    *("[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500, "null", "{}", "[]", "0.1E1"),
)


def mutate_json(rng: Random, data: bytes) -> bytes:
    """Changes values of a JSON document, or puts odd JSON in the place of one."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data)
    places = _places(document) if isinstance(document, (dict, list)) else []
    if not places:
        return json.dumps(_scalar(rng)).encode()
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        try:
            _change_value(rng, places)
        except RecursionError:
            return mutate_bytes(rng, data)
    try:
        text = json.dumps(document)
    except (ValueError, RecursionError):  # the document contains itself, or a number is too long
        return mutate_bytes(rng, data)
    if rng.random() < 0.1:
        numbers = list(re.finditer(r"(?<=[:\[, ])-?\d+", text))
        if numbers:
            spot = rng.choice(numbers)
            text = text[: spot.start()] + rng.choice(_RAW) + text[spot.end() :]
    return text.encode()


def mutate_toml(rng: Random, data: bytes) -> bytes:
    """Changes lines of a TOML document, or the values in them."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        key, equals, value = lines[at].partition("=")
        match rng.randrange(6):
            case 0:
                del lines[at : at + rng.choice((1, 1, 3))]
            case 1:
                lines.insert(rng.randrange(len(lines) + 1), lines[at])
            case 2 if equals:
                lines[at] = f"{key}= {_toml_value(rng)}"
            case 3 if equals:
                other = rng.choice(lines).partition("=")[2] or value
                lines[at] = f"{key}={other}"
            case 4 if equals:
                changed = mutate_bytes(rng, value.encode()).decode("utf-8", "replace")
                lines[at] = f"{key}={changed}"
            case _:
                lines[at] = mutate_bytes(rng, lines[at].encode()).decode("utf-8", "replace")
        if not lines:
            return b""
    changed = "\n".join(lines)
    if rng.random() < 0.3:  # text that is no TOML shows little
        try:
            tomllib.loads(changed)
        except (ValueError, RecursionError):
            return data
    return changed.encode("utf-8", "replace")


def _toml_value(rng: Random) -> str:
    nested = "[" * rng.choice((1, 30, 900))
    value = _scalar(rng)
    if isinstance(value, (bool, type(None))):
        return str(bool(value)).lower()
    if isinstance(value, str):
        return json.dumps(value.encode("utf-8", "replace").decode())
    return rng.choice((str(value), f"[{value}]", nested + nested.replace("[", "]"), "{ a = 1 }"))


_FRAGMENTS = (
    *(
        b"(",
        b")",
        b"]",
        b"}",
        b"N",
        b"0",
        b"1",
        b"2",
        b".",
        b"t",
        b"u",
        b"s",
        b"a",
        b"e",
        b"d",
        b"l",
    ),
    *(
        b"R",
        b"b",
        b"o",
        b"Q",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x88",
        b"\x89",
        b"\x94",
        b"\x93",
    ),
    *(b"\x92", b"\x8f", b"\x90", b"\x91", b"K\x01", b"M\x00\x01", b"J\xff\xff\xff\xff", b"h\x00"),
    *(b"\x8a\x00", b"\x8a\x08" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f", b"I99999999999999999999\n"),
    *(b"r\xff\xff\xff\x7f", b"j\x00\x00\x00\x00", b"p0\n", b"g0\n", b"g-1\n", b"I01\n", b"Fnan\n"),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94"),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n)R",
        b"\x82\x01",
        b"ix\ny\n",
    ),
    *(
        b"\x95" + bytes(8),
        b"\x95" + b"\xff" * 8,
        b"X\x01\x00\x00\x00a",
        b"\x8c\x02a\n",
        b"C\x01\xff",
    ),
    *(
        b"\x96" + struct.pack("<Q", 2**40),
        b"\x8d" + struct.pack("<Q", 3) + b"abc",
        b"S'a'\n",
        b"\x97",
    ),
)


@lru_cache(512)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    """Returns a pickle cut after each opcode, and what cannot be read as the last piece."""
    starts = []
    try:
        for _, _, position in pickletools.genops(data):
            starts.append(position or 0)
            if len(starts) > 4000:
                break
    except Exception:  # noqa: BLE001, S110  the rest is one piece
        pass
    starts.append(len(data))
    pieces = (data[start:stop] for start, stop in zip([0, *starts[1:]], starts[1:], strict=False))
    return tuple(pieces) or (data,)


def mutate_pickle(rng: Random, data: bytes) -> bytes:
    """Removes, repeats, moves and inserts opcodes, or changes their arguments."""
    pieces = list(_opcodes(data))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(pieces))
        match rng.randrange(6):
            case 0 if len(pieces) > 1:
                del pieces[at : at + rng.choice((1, 1, 2, 5))]
            case 1:
                first = rng.randrange(len(pieces))
                pieces[at:at] = pieces[first : first + rng.choice((1, 2, 5, 20))]
            case 2 | 3:
                pieces.insert(at, rng.choice(_FRAGMENTS))
            case 4 if len(pieces[at]) > 1:
                pieces[at] = pieces[at][:1] + mutate_bytes(rng, pieces[at][1:])
            case _:
                pieces[at] = rng.choice(pieces)
        if not pieces:
            return b"."
    return b"".join(pieces)[:_MOST_BYTES]


def mutate_archive(rng: Random, data: bytes) -> bytes:
    """Changes a record of an archive of torch, mostly its pickle; the directory fits again."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    records = list(_records(data))
    if not records:
        return mutate_bytes(rng, data)
    pickles = [n for n, (name, _) in enumerate(records) if name.endswith("data.pkl")]
    at = rng.choice(pickles) if pickles and rng.random() < 0.7 else rng.randrange(len(records))
    name, content = records[at]
    match rng.randrange(12):
        case 0:
            del records[at]
        case 1:
            records.insert(rng.randrange(len(records) + 1), (name, content))
        case 2:
            records[at] = rng.choice(_TEXTS[1:]).encode("utf-8", "replace").decode() or "a", content
        case 3:
            rng.shuffle(records)
        case _:
            mutate = mutate_pickle if name.endswith(".pkl") else mutate_bytes
            records[at] = name, mutate(rng, content)
    return pack_archive(records)


@lru_cache(512)
def _records(data: bytes) -> tuple[tuple[str, bytes], ...]:
    """Returns names and contents of the records of an archive; none of a damaged one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            return tuple((info.filename, opened.read(info)) for info in opened.infolist())
    except Exception:  # noqa: BLE001  whatever it is, an earlier change has damaged it
        return ()


def pack_archive(records: Sequence[tuple[str, bytes]]) -> bytes:
    body, directory = bytearray(), bytearray()
    for name, content in records:
        raw = name.encode("utf-8", "replace")[:2000]
        facts = struct.pack("<IIIHH", zlib.crc32(content), len(content), len(content), len(raw), 0)
        flags = 0 if raw.isascii() else 0x800
        directory += b"PK\1\2" + struct.pack("<HHHHHH", 20, 20, flags, 0, 0, 0x21) + facts
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + raw
        body += b"PK\3\4" + struct.pack("<HHHHH", 20, flags, 0, 0, 0x21) + facts + raw + content
    count = len(records)
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + b"PK\5\6" + end)


def mutate_safetensors(rng: Random, data: bytes) -> bytes:
    """Changes the header; its length fits again."""
    if len(data) < 8 or rng.random() < 0.2:
        return mutate_bytes(rng, data)
    length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = mutate_json(rng, header)
    if rng.random() < 0.1:
        rest = mutate_bytes(rng, rest)
    return struct.pack("<Q", len(header)) + header + rest


_TAG = re.compile(rb"(<[^>]*>)")
_XML = (
    *(b"<Key>../../x</Key>", b"<Size>-1</Size>", b"<Size>99999999999999999999</Size>", b"<Key/>"),
    *(b"<Contents/>", b"<IsTruncated>true</IsTruncated>", b"&#0;", b"&a;", b"<!DOCTYPE a [", b"]>"),
    *(b"<LastModified>x</LastModified>", b"<ETag/>", b"<Size/>", b"<Size>1.5</Size>", b"]]>"),
)


def mutate_xml(rng: Random, data: bytes) -> bytes:
    """Removes, repeats and changes elements and texts of an XML document."""
    pieces = [piece for piece in _TAG.split(data) if piece] or [b"<a/>"]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(pieces))
        match rng.randrange(5):
            case 0 if len(pieces) > 1:
                del pieces[at : at + rng.choice((1, 3))]
            case 1:
                first = rng.randrange(len(pieces))
                pieces[at:at] = pieces[first : first + rng.choice((1, 3, 9))]
            case 2:
                pieces.insert(at, rng.choice(_XML))
            case 3:
                pieces[at] = rng.choice(_TEXTS).encode("utf-8", "replace")
            case _:
                pieces[at] = mutate_bytes(rng, pieces[at])
        if not pieces:
            return b""
    return b"".join(pieces)[:_MOST_BYTES]


def mutate_zstd(rng: Random, data: bytes) -> bytes:
    """Changes what a zstd frame contains, and compresses it again."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    try:
        content = zstandard.ZstdDecompressor().stream_reader(data).read(_MOST_BYTES)
    except zstandard.ZstdError:
        return mutate_bytes(rng, data)
    return zstandard.ZstdCompressor(level=1).compress(mutate_bytes(rng, content))


def by_name(path: str) -> Mutator:
    name = path.rpartition("/")[2]
    if name.endswith((".metadata", ".pkl")) and name != ".snapshot_metadata":
        return mutate_pickle
    if name.endswith((".pt", ".pth", ".bin", ".ckpt", ".tar", ".distcp")):
        return mutate_archive
    if name.endswith(".safetensors"):
        return mutate_safetensors
    return mutate_json if name.endswith((".json", ".snapshot_metadata")) else mutate_bytes
