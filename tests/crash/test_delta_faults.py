"""Deltas that are damaged, hostile, missing or for another model: a clear error, nothing left."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    NoSpaceError,
    RefusedError,
    SourceChangedError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.deltas.create import DeltaRequest, PublishedBase, create_delta, make_job
from ckptkit.engine.outcome import BytesWritten, Event
from tests.files import flip_bit
from tests.small_deltas import (
    LEAF,
    Model,
    bytes_of,
    change_model,
    make_model,
    model_bytes,
    write_model,
    write_steps,
)

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"
DATA = "model-00000-of-00001.safetensors"


@pytest.fixture
def models(tmp_path: Path) -> list[Model]:
    """Four small models in a row in s0 to s3, and the deltas between them in d1 to d3."""
    models = write_steps(tmp_path, make_model(large=2000), 3)
    for number in (1, 2, 3):
        sides = tmp_path / f"s{number - 1}", tmp_path / f"s{number}"
        ckptkit.create_delta(*sides, tmp_path / f"d{number}", version=number)
    return models


def refuse(kind: type[CkptkitError], text: str, base: Path, *deltas: Path) -> None:
    """Applies deltas, which has to fail with an error that helps, and to leave nothing."""
    out = base.parent / "made" / "out"
    with pytest.raises(kind, match=text) as caught:
        ckptkit.apply_delta(base, deltas, out)
    assert caught.value.where
    assert caught.value.hint
    assert not out.parent.exists()


def without_manifest(delta: Path) -> Path:
    (delta / "ckptkit.json").unlink()
    return delta


def test_a_delta_for_another_base_is_refused(tmp_path: Path, models: list[Model]) -> None:
    # Nothing says what a folder of safetensors holds: what comes out has another checksum.
    refuse(ChecksumError, "after the change against", tmp_path / "s2", tmp_path / "d1")
    # With digests of the base, nothing is read for it.
    ckptkit.consolidate(tmp_path / "s2", tmp_path / "base")
    refuse(RefusedError, "was made from tensor", tmp_path / "base", tmp_path / "d1")
    refuse(ChecksumError, "after the change", tmp_path / "base", without_manifest(tmp_path / "d1"))
    assert models


def test_a_base_that_is_not_what_was_published_is_refused(
    tmp_path: Path, models: list[Model]
) -> None:
    """Engines have what was published, whatever the same checkpoint would give now."""
    published = PublishedBase(1, ckptkit.consolidate(tmp_path / "s1", tmp_path / "published"))

    def create(base: Path, out: Path) -> None:
        jobs = [make_job(side, out, {}) for side in (base, tmp_path / "s3")]
        create_delta(jobs[0], jobs[1], DeltaRequest(version=2), published=published)

    create(tmp_path / "s1", tmp_path / "right")
    with pytest.raises(RefusedError, match=r"was published with digest .* and has"):
        create(tmp_path / "s2", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    assert models


def test_a_base_that_differs_in_an_unchanged_tensor_is_refused(
    tmp_path: Path, models: list[Model]
) -> None:
    other = {**models[0], "mask": np.logical_not(models[0]["mask"])}  # which no delta changes
    write_model(tmp_path / "other", other)
    refuse(ChecksumError, "tensor 'mask' came out", tmp_path / "other", tmp_path / "d1")


def test_a_flipped_bit_in_a_base_with_a_manifest_is_found_without_one_in_the_delta(
    tmp_path: Path, models: list[Model]
) -> None:
    """Also in a tensor that no delta changes; the checksums of a delta are of changed ones."""
    ckptkit.consolidate(tmp_path / "s0", tmp_path / "base")
    deltas = [without_manifest(tmp_path / name) for name in ("d1", "d2")]
    file = tmp_path / "base" / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    entries = json.loads(file.read_bytes()[8 : 8 + size])
    for name, place in entries.items():
        if name == "__metadata__" or not models[0][name].size:
            continue
        at = 8 + size + place["data_offsets"][0]
        flip_bit(file, at)
        refuse(ChecksumError, name, tmp_path / "base", *deltas)
        flip_bit(file, at)
    ckptkit.apply_delta(tmp_path / "base", deltas, tmp_path / "out")
    assert model_bytes(tmp_path / "out") == bytes_of(models[2])


def test_a_chain_with_a_gap_is_refused(tmp_path: Path, models: list[Model]) -> None:
    deltas = [tmp_path / f"d{number}" for number in (1, 2, 3)]
    gap = "leads from version 2 to 3, and the delta before it"
    refuse(RefusedError, gap, tmp_path / "s0", deltas[0], deltas[2])
    refuse(RefusedError, "leads from version", tmp_path / "s0", deltas[1], deltas[0])
    # A base that was made by deltas knows its version.
    ckptkit.apply_delta(tmp_path / "s0", deltas[:1], tmp_path / "v1")
    refuse(RefusedError, "is made for version 2, and BASE is version 1", tmp_path / "v1", deltas[2])
    assert models


def test_deltas_of_two_runs_do_not_make_a_chain(tmp_path: Path, models: list[Model]) -> None:
    ckptkit.create_delta(tmp_path / "s2", tmp_path / "s3", tmp_path / "other", version=2)
    chain = tmp_path / "d1", tmp_path / "other"
    refuse(RefusedError, "was made from tensor", tmp_path / "s0", *chain)
    assert models


@pytest.mark.parametrize(
    ("has_manifest", "encoding"),
    [
        pytest.param(True, "overwrite", id="manifest-overwrite"),
        pytest.param(False, "xor", id="bare-xor"),
        pytest.param(True, "xor", id="manifest-xor", marks=pytest.mark.slow),
        pytest.param(False, "overwrite", id="bare-overwrite", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick("manifest-overwrite")
def test_no_flipped_bit_of_a_delta_leads_to_another_model(
    encoding: Any, has_manifest: bool, tmp_path: Path
) -> None:
    models = write_steps(tmp_path, make_model(large=100), 1)
    delta = tmp_path / "delta"
    ckptkit.create_delta(tmp_path / "s0", tmp_path / "s1", delta, encoding=encoding)
    if not has_manifest:
        without_manifest(delta)
    random = np.random.default_rng(0)
    refused = 0
    for name in (DATA, INDEX):
        size = (delta / name).stat().st_size
        for at in random.choice(size, 60, replace=False).tolist():
            bit = int(random.integers(8))
            flip_bit(delta / name, at, 1 << bit)
            out = tmp_path / "out"
            with suppress(InputError, RefusedError):
                ckptkit.apply_delta(tmp_path / "s0", [delta], out)
            if out.exists():  # a space of a header was flipped, or a version
                assert not has_manifest
                assert model_bytes(out) == bytes_of(models[1])
                shutil.rmtree(out)
            else:
                refused += 1
            if has_manifest:
                assert not _verified(delta)
            flip_bit(delta / name, at, 1 << bit)
    assert refused == 120 if has_manifest else refused > 80
    assert ckptkit.verify(delta)


def _verified(delta: Path) -> bool:
    try:
        return ckptkit.verify(delta).ok
    except CkptkitError:
        return False


def test_damaged_files_are_named(tmp_path: Path, models: list[Model]) -> None:
    delta = tmp_path / "d1"
    whole = (delta / DATA).read_bytes()
    (delta / DATA).write_bytes(whole[:-5])
    refuse(InputError, DATA, tmp_path / "s0", delta)
    (delta / DATA).unlink()
    refuse(InputError, DATA, tmp_path / "s0", delta)
    (delta / DATA).write_bytes(whole)
    (delta / "model-00001-of-00002.safetensors").write_bytes(whole)
    report = ckptkit.verify(delta)
    assert [problem.code for problem in report.problems] == ["stray-file"]
    assert models


# Deltas that no one should trust


def write_delta(
    folder: Path, tensors: dict[str, tuple[bytes, str]], weight_map: Any = None, **metadata: Any
) -> Path:
    """Writes a delta by hand: by name what is stored, and the checksum."""
    folder.mkdir()
    header: dict[str, Any] = {"__metadata__": {name: text for name, (_, text) in tensors.items()}}
    data = b""
    for name, (stored, _) in tensors.items():
        place = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": "U8", "shape": [len(stored)], "data_offsets": place}
        data += stored
    text = json.dumps(header).encode()
    (folder / DATA).write_bytes(struct.pack("<Q", len(text)) + text + data)
    known = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {
        "metadata": known | metadata,
        "weight_map": dict.fromkeys(tensors, DATA) if weight_map is None else weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def overwriting(positions: list[int], values: bytes, count: int | None = None) -> bytes:
    count = len(positions) if count is None else count
    return struct.pack(f"<I{len(positions)}I", count, *positions) + values


RIGHT = "0" * 32
WIDE = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=25)
)


@pytest.mark.parametrize(
    ("content", "encoding", "kind", "text"),
    [
        (bytes(63), "xor", FormatError, "the change ends"),
        (bytes(65), "xor", FormatError, "goes on after the tensor's end"),
        (bytes(64), "xor", ChecksumError, "has checksum"),
        (overwriting([3, 2], b"ab"), "overwrite", FormatError, "do not ascend"),
        (overwriting([2, 2], b"ab"), "overwrite", FormatError, "do not ascend"),
        (overwriting([64], b"a"), "overwrite", FormatError, "after the tensor's last"),
        (overwriting([1, 2], b"a"), "overwrite", FormatError, "the change ends"),
        (overwriting([1], b"ab"), "overwrite", FormatError, "goes on after"),
        (overwriting([], b"", 1 << 31), "overwrite", FormatError, "bytes are overwritten"),
        (b"ab", "overwrite", FormatError, "the change ends"),
    ],
)
def test_changes_that_do_not_fit_the_tensor_are_refused(
    content: bytes, encoding: str, kind: type[CkptkitError], text: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "base", {"w": np.arange(16, dtype=np.float32)})
    stored = zstandard.ZstdCompressor(level=1).compress(content)
    delta = write_delta(tmp_path / "delta", {"w": (stored, RIGHT)}, delta_encoding=encoding)
    refuse(kind, text, tmp_path / "base", delta)


def test_streams_that_are_no_streams_or_want_memory_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "base", {"w": np.zeros(16 << 20, np.uint8)})
    for number, (stored, kind, text) in enumerate(
        [
            (b"no stream at all", FormatError, "no zstd stream begins here"),
            (b"", FormatError, "no zstd stream begins here"),
            (WIDE.compress(bytes(16 << 20))[:-3], InputError, "window|damaged|ends"),
        ]
    ):
        delta = write_delta(tmp_path / f"delta{number}", {"w": (stored, RIGHT)})
        refuse(kind, text, tmp_path / "base", delta)
        assert ckptkit.verify(delta).problems
    big = zstandard.ZstdCompressionParameters(window_log=26, write_content_size=False)
    object_ = zstandard.ZstdCompressor(compression_params=big).compressobj()
    stored = object_.compress(bytes(1000)) + object_.flush()
    refuse(
        LimitError, "window", tmp_path / "base", write_delta(tmp_path / "w", {"w": (stored, RIGHT)})
    )


def _stored() -> tuple[bytes, str]:
    after = bytes([1] * 64)
    return zstandard.ZstdCompressor(level=1).compress(after), xxhash.xxh3_128(after).hexdigest()


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"version": "one"}, FormatError, "'version' is 'one'"),
        ({"version": None}, FormatError, "'version' is None"),
        ({"base_version": -1}, FormatError, "'base_version' is -1"),
        ({"version": True}, FormatError, "'version' is True"),
        ({"delta_encoding": "diff"}, UnsupportedError, "known are xor, overwrite"),
        ({"compression_format": "lz4"}, UnsupportedError, "'lz4' was found against 'zstd'"),
        ({"checksum_format": "md5"}, UnsupportedError, "known are xxh3-128, blake3, adler32"),
        ({"checksum_format": ["md5"]}, UnsupportedError, "known are"),
        ({"weight_map": {"w": f"../{DATA}"}}, UnsafePathError, "leads out of the folder"),
        ({"weight_map": {"v": DATA}}, FormatError, "tensor 'v'"),
        ({"weight_map": {}}, FormatError, None),
        ({"weight_map": {"w": "absent.safetensors"}}, InputError, "absent"),
    ],
)
def test_an_index_that_is_not_right_is_refused(
    changes: dict[str, Any], kind: type[CkptkitError], text: str | None, tmp_path: Path
) -> None:
    write_model(tmp_path / "base", {"w": np.zeros(16, np.float32)})
    delta = write_delta(tmp_path / "delta", {"w": _stored()}, **changes)
    if text is None:  # a file that the index does not name belongs to no delta
        assert ckptkit.verify(delta).problems[0].code == "stray-file"
    else:
        refuse(kind, text, tmp_path / "base", delta)


def test_headers_that_are_not_right_are_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", {"w": np.zeros(16, np.float32)})
    stored, checksum = _stored()
    refuse(FormatError, "no checksum", base, write_delta(tmp_path / "none", {"w": (stored, "")}))
    other = write_delta(tmp_path / "other", {"w": (stored, checksum), "v": (stored, checksum)})
    refuse(RefusedError, "changes tensor 'v', which .*base lacks", base, other)
    wide = write_delta(tmp_path / "wide", {"w": (stored, checksum)})
    data = (wide / DATA).read_bytes().replace(b'"U8"', b'"I8"')
    (wide / DATA).write_bytes(data)
    refuse(FormatError, r"is int8 \[\d+\] where a vector of uint8", base, wide)
    right = write_delta(tmp_path / "right", {"w": (stored, checksum)})
    ckptkit.apply_delta(base, right, tmp_path / "out")
    assert model_bytes(tmp_path / "out")["w"][:2] == ("F32", (16,))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """An engine would change it twice."""
    base = write_model(tmp_path / "base", {name: np.zeros(16, np.float32) for name in "vw"})
    delta = write_delta(tmp_path / "delta", {"v": _stored(), "w": _stored()})
    other = write_delta(tmp_path / "other", {"w": _stored()})
    (delta / "other.safetensors").write_bytes((other / DATA).read_bytes())
    for file in (DATA, "other.safetensors"):
        index = json.loads((delta / INDEX).read_bytes())
        index["weight_map"] = {"v": DATA, "w": file}
        (delta / INDEX).write_text(json.dumps(index))
        if file == DATA:
            assert [one.code for one in ckptkit.verify(delta).problems] == ["stray-file"]
        else:
            refuse(FormatError, f"tensor 'w' is in '{DATA}' and in 'other", base, delta)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_frames_that_an_engine_would_not_read_whole_are_found(
    encoding: str, tmp_path: Path
) -> None:
    compress = zstandard.ZstdCompressor(level=1).compress
    random = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8).tobytes()
    content = random if encoding == "xor" else overwriting(list(range(80_000)), random[:80_000])
    whole = compress(content)
    for name, stored, problem in (
        ("whole", whole, None),
        ("short", whole[: len(whole) // 2], "bytes"),
        ("two", compress(content[:200_000]) + compress(content[200_000:]), "200,000 bytes"),
    ):
        tensors = {"w": (stored, RIGHT)}
        delta = write_delta(tmp_path / name, tensors, delta_encoding=encoding)
        problems = ckptkit.verify(delta).problems
        assert len(problems) == (problem is not None)
        assert all(problem in one.message for one in problems if problem is not None)


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        {"base_digests": 3, "changed_elements": [], "base": {}},
        {"base_digests": {"mask": None}, "changed_elements": {"count": "many"}},
        {"base_digests": {"mask": "xxh3"}, "changed_elements": {"count": -1}},
    ],
)
def test_a_manifest_that_says_other_things_is_no_crash(
    facts: Any, tmp_path: Path, models: list[Model]
) -> None:
    path = tmp_path / "d1" / "ckptkit.json"
    manifest = json.loads(path.read_bytes())
    manifest["source"] |= {"delta": facts, "path": 3}
    manifest.pop("checksum", None)
    path.write_text(json.dumps(manifest))
    assert ckptkit.inspect_delta(tmp_path / "d1").changed_share is None
    assert ckptkit.verify(tmp_path / "d1")
    out = tmp_path / "out"
    with suppress(RefusedError):
        ckptkit.apply_delta(tmp_path / "s0", tmp_path / "d1", out)
        assert model_bytes(out) == bytes_of(models[1])


@pytest.mark.slow
def test_random_bytes_are_never_a_crash(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", {"w": np.zeros(16, np.float32)})
    random = np.random.default_rng(1)
    for number in range(60):
        encoding = ("xor", "overwrite")[number % 2]
        content = random.integers(0, 4, int(random.integers(1, 80)), dtype=np.uint8).tobytes()
        stored = zstandard.ZstdCompressor().compress(content) if number % 3 else content
        delta = write_delta(
            tmp_path / f"d{number}", {"w": (stored, RIGHT)}, delta_encoding=encoding
        )
        with pytest.raises(InputError):
            ckptkit.apply_delta(base, delta, tmp_path / "out")
        ckptkit.verify(delta)
    assert not (tmp_path / "out").exists()


# What goes on meanwhile


class At:
    """A listener that calls a function once, when the first bytes were read."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._is_done = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, BytesWritten) and not self._is_done:
                self._is_done = True
                self._call()


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, models: list[Model]) -> None:
    for side in ("s0", "s1"):
        file = tmp_path / side / "model.safetensors"
        content = file.read_bytes()

        def change(file: Path = file, content: bytes = content) -> None:
            file.unlink()
            file.write_bytes(content)

        with pytest.raises(SourceChangedError, match="changed while it was read"):
            ckptkit.create_delta(
                tmp_path / "s0", tmp_path / "s1", tmp_path / "new", listener=At(change)
            )
        assert not (tmp_path / "new").exists()
    assert models


def test_a_delta_that_is_replaced_meanwhile_is_refused(tmp_path: Path, models: list[Model]) -> None:
    file = tmp_path / "d1" / DATA
    content = file.read_bytes()

    def replace() -> None:
        file.unlink()
        file.write_bytes(content)

    with pytest.raises(InputError, match="changed while it was read"):
        ckptkit.apply_delta(
            tmp_path / "s0", tmp_path / "d1", tmp_path / "out", listener=At(replace)
        )
    assert not (tmp_path / "out").exists()
    assert models


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("size", [1_500_000, 3_000_000])
def test_a_full_disk_leaves_nothing(
    encoding: Any, size: int, tiny_disk: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for name in ("a", "b"):  # whose difference cannot be compressed
        content = random.integers(0, 256, size, dtype=np.uint8)
        write_model(tmp_path / name, {"w": content})
    with pytest.raises(NoSpaceError):
        ckptkit.create_delta(tmp_path / "a", tmp_path / "b", tiny_disk / "out", encoding=encoding)
    assert list(tiny_disk.iterdir()) == []


PROGRAM = """
import ckptkit, os, signal, sys, time
from ckptkit.engine.outcome import BytesWritten
from ckptkit_cli._output import Stopped, raise_on_signals

def listener(event):
    if isinstance(event, BytesWritten):
        os.write(1, b"written\\n")  # at once: several threads call it
        time.sleep(0.5)

signal.signal(signal.SIGINT, signal.default_int_handler)
raise_on_signals()
name, first, second, out = sys.argv[1:]
try:
    getattr(ckptkit, name)(first, second, out, listener=listener)
except Stopped as stop:
    sys.exit(stop.exit_status)
"""


@contextmanager
def running(name: str, first: Path, second: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A command in another process that is in the middle of its work."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, str(first), str(second), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of several leaves in a and b, and what leads from one to the other in delta."""
    folder = tmp_path_factory.mktemp("large")
    model = make_model(large=3 * LEAF)
    write_model(folder / "a", model)
    write_model(folder / "b", change_model(model, 4))
    ckptkit.create_delta(folder / "a", folder / "b", folder / "delta")
    return folder


@pytest.mark.parametrize("name", ["create_delta", "apply_delta"])
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
@pytest.mark.quick("9-apply_delta")
def test_a_run_that_is_stopped_leaves_no_output_and_does_not_disturb_the_next(
    name: str, number: signal.Signals, large: Path, tmp_path: Path
) -> None:
    second = large / ("b" if name == "create_delta" else "delta")
    out = tmp_path / "made" / "out"
    with running(name, large / "a", second, out) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -9), errors
    assert not out.exists()
    if number == signal.SIGINT:
        assert not out.parent.exists()
    getattr(ckptkit, name)(large / "a", second, out)
    assert list(out.parent.iterdir()) == [out]
    assert ckptkit.verify(out)
