"""What all sources and all targets do alike, on disk and in memory, native and portable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.errors import (
    MissingFileError,
    OutputError,
    OutputExistsError,
    TruncatedFileError,
    UnsafePathError,
)
from ckptkit.storage.base import Source, Target
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import LocalTarget
from ckptkit.storage.overlay import MemorySource
from ckptkit.storage.places import Place as RemoteLocation
from ckptkit.storage.places import open_target
from ckptkit.storage.remote.source import RemoteSource
from ckptkit.storage.remote.store import get_store
from tests.files import contents
from tests.hub_server import TOKEN, HubServer
from tests.memory_target import MemoryTarget
from tests.object_store import Bucket

DISKS = {"native": Disk(), "portable": Disk.portable()}
FILES = {
    "a.txt": b"first",
    "a/b.bin": bytes(range(256)) * 40,
    "a/c/d.bin": b"deep",
    "a!": b"sorts before the folder a/",
    ".metadata": b"hidden, but ours to read",
    "empty": b"",
}
BUCKET = "org/contract"
OpenSource = Callable[[Mapping[str, bytes]], Source]


class Place:
    """A destination for targets of one kind, and a look at what has become visible there."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._out = folder / "parent" / "out"
        self._files: dict[str, bytes] = {}

    def target(self, *, overwrite: bool = False) -> Target:
        if self._kind == "memory":
            return MemoryTarget(self._files, overwrite=overwrite)
        return LocalTarget(self._out, overwrite=overwrite, disk=DISKS[self._kind])

    def visible(self) -> dict[str, bytes]:
        if self._kind == "memory":
            return dict(self._files)
        return contents(self._out)


class RemotePlace(Place):
    """The same in a store: that of fsspec in memory, a bucket on a real server, or of a Hub."""

    def __init__(
        self,
        location: RemoteLocation,
        bucket: Bucket | None = None,
        hub: HubServer | None = None,
    ) -> None:
        self._location = location
        self._bucket = bucket
        self._hub = hub
        self._store = get_store(location)  # one connection for all targets

    def target(self, *, overwrite: bool = False) -> Target:
        return open_target(self._location, overwrite=overwrite)

    def visible(self) -> dict[str, bytes]:
        if self._bucket is not None:
            found = ((key, self._bucket.get(key)) for key in self._bucket.keys("parent/out/"))
            return {key.removeprefix("parent/out/"): data for key, data in found}
        if self._hub is not None:
            every = sorted(self._hub.put_bucket(BUCKET).files)
            names = [name for name in every if "/.ckptkit-" not in name]  # no reader sees these
            read = ((name, self._hub.read_bucket(BUCKET, name)) for name in names)
            return {name.removeprefix("parent/out/"): data for name, data in read}
        files = fsspec.filesystem("memory")
        found = ((path, files.cat_file(path)) for path in files.find("/parent/out"))
        return {path.removeprefix("/parent/out/"): data for path, data in found}


def remote_place(kind: str, request: pytest.FixtureRequest) -> RemotePlace:
    if kind == "hub":
        hub = request.getfixturevalue("hub")
        hub.put_bucket(BUCKET)
        options = {"endpoint": hub.url, "token": TOKEN}
        url = f"hf://buckets/{BUCKET}/parent/out"
        return RemotePlace(RemoteLocation(url, options), hub=hub)
    if kind == "s3":
        object_store = request.getfixturevalue("object_store")
        bucket = object_store.bucket("contract")
        bucket.clear()
        location = RemoteLocation(f"{bucket.url}/parent/out", object_store.options)
        return RemotePlace(location, bucket)
    files = fsspec.filesystem("memory")
    if files.exists("/parent"):
        files.rm("/parent", recursive=True)
    return RemotePlace(RemoteLocation("memory://parent/out"))


@pytest.fixture(params=["native", "portable", "memory", "s3", "fsspec", "hub"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param in {"s3", "fsspec", "hub"}:
        return remote_place(request.param, request)
    return Place(request.param, tmp_path)


def hub_source(files: Mapping[str, bytes], hub: HubServer) -> RemoteSource:
    hub.put_bucket(BUCKET)
    options = {"endpoint": hub.url, "token": TOKEN}
    store = get_store(RemoteLocation(f"hf://buckets/{BUCKET}", options))
    for path, data in files.items():
        store.put_small(f"{BUCKET}/read/here/{path}", data)
    return RemoteSource(RemoteLocation(f"hf://buckets/{BUCKET}/read/here", options))


def remote_source(files: Mapping[str, bytes], bucket: Bucket | None) -> RemoteSource:
    if bucket is not None:
        bucket.clear()
        for path, data in files.items():
            bucket.put(f"read/here/{path}", data)
        return RemoteSource(RemoteLocation(f"{bucket.url}/read/here", bucket.store.options))
    store = fsspec.filesystem("memory")
    if store.exists("/read"):
        store.rm("/read", recursive=True)
    for path, data in files.items():
        store.pipe_file(f"/read/here/{path}", data)
    return RemoteSource(RemoteLocation("memory://read/here"))


@pytest.fixture(params=["native", "portable", "memory", "s3", "fsspec", "hub"])
def open_source(request: pytest.FixtureRequest, tmp_path: Path) -> OpenSource:
    def open_it(files: Mapping[str, bytes]) -> Source:
        if request.param == "memory":
            return MemorySource(files)
        if request.param == "hub":
            remote = hub_source(files, request.getfixturevalue("hub"))
            request.addfinalizer(remote.close)
            return remote
        if request.param in {"s3", "fsspec"}:
            store = request.getfixturevalue("object_store")
            bucket = store.bucket("contract-reads") if request.param == "s3" else None
            remote = remote_source(files, bucket)
            request.addfinalizer(remote.close)
            return remote
        for path, data in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
        source = LocalSource(tmp_path, disk=DISKS[request.param])
        request.addfinalizer(source.close)
        return source

    return open_it


def put(target: Target, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        target.create(path, len(data))
        target.write(path, 0, memoryview(data))


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, [".metadata", "a!", "a.txt", "empty"]),
        (1, [".metadata", "a!", "a.txt", "a/b.bin", "empty"]),
        (2, [".metadata", "a!", "a.txt", "a/b.bin", "a/c/d.bin", "empty"]),
    ],
)
def test_walk_yields_files_down_to_the_depth_in_sorted_order(
    open_source: OpenSource, depth: int, expected: list[str]
) -> None:
    assert list(open_source(FILES).walk(depth)) == expected == sorted(expected)


def test_read_returns_exactly_the_range(open_source: OpenSource) -> None:
    source = open_source(FILES)
    data = FILES["a/b.bin"]
    assert source.read("a/b.bin", 100, 5000) == data[100:5000]
    assert source.read("a/b.bin", 0, len(data)) == data
    assert source.read("a/b.bin", 7, 7) == b""
    assert source.read("empty", 0, 0) == b""


def test_read_into_fills_the_target(open_source: OpenSource) -> None:
    source = open_source(FILES)
    target = bytearray(300)
    source.read_into("a/b.bin", 50, memoryview(target))
    assert target == FILES["a/b.bin"][50:350]
    source.read_into("empty", 0, memoryview(b""))


def test_a_file_that_ends_too_early_is_named_with_its_numbers(open_source: OpenSource) -> None:
    source = open_source({"x.bin": bytes(1234)})
    expected = (
        f"{source.location}/x.bin: the file ends at byte 1,234 but bytes [1,000, 2,000) "
        "were expected (766 missing)"
    )
    with pytest.raises(TruncatedFileError) as caught:
        source.read("x.bin", 1000, 2000)
    assert str(caught.value) == expected
    with pytest.raises(TruncatedFileError) as caught:
        source.read_into("x.bin", 1000, memoryview(bytearray(1000)))
    assert str(caught.value) == expected


def test_an_absurd_range_is_refused_before_memory_is_taken(open_source: OpenSource) -> None:
    with pytest.raises(TruncatedFileError):
        open_source({"x": b"x"}).read("x", 0, 1 << 62)


def test_a_missing_file_is_named(open_source: OpenSource) -> None:
    source = open_source(FILES)
    for call in (lambda: source.stat("no/such"), lambda: source.read("no/such", 0, 1)):
        with pytest.raises(MissingFileError, match="no/such: nothing was found there"):
            call()


OUTSIDE = ["../x", "/etc/passwd", "a/../../x", "..", "", ".", "a\0b"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_out_of_the_folder_is_not_read(open_source: OpenSource, path: str) -> None:
    source = open_source(FILES)
    with pytest.raises(UnsafePathError):
        source.stat(path)
    with pytest.raises(UnsafePathError):
        source.read(path, 0, 1)


def test_a_path_out_of_the_folder_is_not_written(place: Place) -> None:
    target = place.target()
    for path in OUTSIDE:
        with pytest.raises(UnsafePathError):
            target.create(path, 1)
    target.abandon()


def test_stat_tells_size_and_an_identity_that_follows_the_content(open_source: OpenSource) -> None:
    source = open_source({"x": b"one", "y": b"other"})
    assert (source.stat("x").path, source.stat("x").size_bytes) == ("x", 3)
    assert source.stat("x") == source.stat("x")
    assert source.stat("x").identity != source.stat("y").identity


def test_many_threads_read_through_one_source(open_source: OpenSource) -> None:
    files = {f"{i}.bin": bytes([i]) * 5000 + bytes(range(200)) for i in range(8)}
    source = open_source(files)
    wrong: list[str] = []

    def read(shift: int) -> None:
        for turn in range(20 if isinstance(source, RemoteSource) else 200):
            name = f"{(turn + shift) % 8}.bin"
            target = bytearray(300)
            source.read_into(name, 4800 + shift, memoryview(target))
            if target != files[name][4800 + shift : 5100 + shift]:
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_visible_before_the_commit_and_everything_after(place: Place) -> None:
    target = place.target()
    put(target, FILES)
    assert place.visible() == {}
    target.commit("a.txt")
    assert place.visible() == FILES


def test_a_file_has_its_exact_size_whatever_was_written(place: Place) -> None:
    if isinstance(place, RemotePlace):
        pytest.skip("a store has no files with holes")
    target = place.target()
    target.create("x", 1_000_003)
    target.write("x", 999_999, memoryview(b"tail"))
    target.commit("x")
    assert len(place.visible()["x"]) == 1_000_003
    assert place.visible()["x"][-4:] == b"tail"


def test_abandoning_leaves_nothing(place: Place, tmp_path: Path) -> None:
    target = place.target()
    put(target, {"x": b"x", "folder/y": b"y"})
    target.abandon()
    target.abandon()
    assert place.visible() == {}
    assert list(tmp_path.iterdir()) == []


def test_abandoning_after_a_commit_does_nothing(place: Place) -> None:
    target = place.target()
    put(target, {"x": b"x"})
    target.commit("x")
    target.abandon()
    assert place.visible() == {"x": b"x"}


def test_a_filled_destination_is_refused_before_any_work(place: Place) -> None:
    target = place.target()
    put(target, {"x": b"x"})
    target.commit("x")
    with pytest.raises(OutputExistsError):
        place.target()
    assert place.visible() == {"x": b"x"}


def test_overwriting_replaces_everything(place: Place) -> None:
    target = place.target()
    put(target, {"x": b"x", "old": b"old"})
    target.commit("x")
    again = place.target(overwrite=True)
    put(again, {"x": b"new"})
    assert place.visible() == {"x": b"x", "old": b"old"}
    again.commit("x")
    assert place.visible() == {"x": b"new"}


def test_of_two_targets_exactly_one_commits(place: Place) -> None:
    first, second = place.target(), place.target()
    put(first, {"x": b"first"})
    put(second, {"x": b"second", "y": b"more"})
    second.commit("x")
    with pytest.raises(OutputExistsError):
        first.commit("x")
    first.abandon()
    assert place.visible() == {"x": b"second", "y": b"more"}


def test_a_file_is_created_once(place: Place) -> None:
    target = place.target()
    target.create("x", 1)
    with pytest.raises(OutputError):
        target.create("x", 1)
    target.abandon()


@pytest.mark.parametrize(
    ("path", "start", "count"), [("x", 8, 3), ("x", -1, 1), ("x", 11, 0), ("y", 0, 1)]
)
def test_a_write_outside_what_was_created_is_our_mistake(
    place: Place, path: str, start: int, count: int
) -> None:
    target = place.target()
    target.create("x", 10)
    with pytest.raises(ValueError, match="are not in file"):
        target.write(path, start, memoryview(bytes(count)))
    with pytest.raises(ValueError, match="was not created"):
        target.commit("y")
    target.abandon()


def test_data_of_any_item_type_is_written_as_its_bytes(place: Place) -> None:
    target = place.target()
    target.create("x", 16)
    target.write("x", 8, memoryview(bytes(range(8))).cast("Q"))
    target.write("x", 0, memoryview(bytearray(b"12345678")))
    target.commit("x")
    assert place.visible()["x"] == b"12345678" + bytes(range(8))


SIZE = 1_500_000
PATTERN = bytes((i * 7 + i // 256) % 256 for i in range(65_537)) * (SIZE // 65_537 + 2)


@pytest.mark.parametrize("kind", ["native", "portable", "memory"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(
        st.one_of(st.integers(0, SIZE), st.integers(0, SIZE // 4096).map(lambda n: n * 4096)),
        max_size=6,
    ),
    aligned=st.booleans(),
    reverse=st.booleans(),
)
def test_pieces_in_any_order_and_alignment_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    *,
    cuts: list[int],
    aligned: bool,
    reverse: bool,
) -> None:
    place = Place(kind, tmp_path_factory.mktemp("place"))
    target = place.target()
    target.create("x", SIZE)
    edges = sorted({0, SIZE, *cuts})
    pieces = list(pairwise(edges))
    buffers = [aligned_buffer(SIZE + 1) for _ in pieces]
    threads = []
    for buffer, (start, stop) in zip(buffers, pieces[::-1] if reverse else pieces, strict=True):
        shift = start if aligned else start + 1
        piece = buffer[shift : shift + stop - start]
        piece[:] = PATTERN[start:stop]
        threads.append(threading.Thread(target=target.write, args=("x", start, piece)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target.commit("x")
    assert place.visible()["x"] == PATTERN[:SIZE]
