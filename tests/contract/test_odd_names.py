"""No name is a pattern: what commands do to a place with an odd name is done there alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import ckptkit
from ckptkit.core.errors import UnsafePathError
from ckptkit.storage.places import Place
from ckptkit.storage.remote_store import store_of
from tests.made_up_runs import save_step
from tests.object_store import Bucket, ObjectStore

STEP = Path(__file__).resolve().parents[2] / "fixtures" / "accelerate_fsdp2_tied_with_config"
ODD = [
    "exp[1]",
    "exp*",
    "exp?",
    "exp{1,2}",
    "exp#1",
    "exp%201",
    "exp 1+2",
    "-rf exp",
    "ex'p\"\\1",
    "..exp",
    "exp\u0301",
    "\u1ebcxp\U0001f680",
    "exp?versionId=1",
    "[!a]*",
]
PLAIN = ["exp1", "exp2", "expx", "exp", "exp 1", "exp\u00e9", "expabc"]


@pytest.fixture
def bucket(object_store: ObjectStore) -> Iterator[Bucket]:
    bucket = object_store.bucket("odd-names")
    bucket.clear()
    yield bucket
    bucket.clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    for step in (1, 2):
        save_step(run, step, save_number=step)
    return run


def test_pruning_one_run_on_s3_takes_nothing_from_its_neighbours(bucket: Bucket, run: Path) -> None:
    for name in [*ODD, *PLAIN]:
        bucket.put_tree(run, name)
        bucket.put(f"{name}/checkpoint-1/", b"")  # as consoles and mounts leave for a folder
        bucket.put(f"{name}/checkpoint-1/[c]*/", b"")
    for name in ODD:
        before = set(bucket.keys())
        place = Place(f"{bucket.url}/{name}", bucket.store.options)
        done = ckptkit.prune(place, keep_last=1)
        assert [one.name for one in done.removed] == ["checkpoint-1"], name
        gone = before - set(bucket.keys())
        assert gone == {key for key in before if key.startswith(f"{name}/checkpoint-1/")}, name
        assert [one.name for one in ckptkit.list_run(place).steps] == ["checkpoint-2"], name


def test_a_folder_marker_alone_is_no_step(bucket: Bucket, run: Path) -> None:
    bucket.put_tree(run, "run")
    bucket.put("run/checkpoint-9/", b"")
    bucket.put("run/", b"")
    place = Place(f"{bucket.url}/run", bucket.store.options)
    names = [one.name for one in ckptkit.list_run(place).steps]
    assert names == ["checkpoint-1", "checkpoint-2"]


def test_pruning_in_memory_takes_nothing_from_its_neighbours(run: Path) -> None:
    files = fsspec.filesystem("memory")
    names = [*ODD, "exp\n1"]  # the server of the tests takes no such key
    for name in [*names, *PLAIN]:
        for path in run.rglob("*"):
            if path.is_file():
                inner = path.relative_to(run).as_posix()
                files.pipe_file(f"/odd/{name}/{inner}", path.read_bytes())
    for name in names:
        before = set(files.store)
        done = ckptkit.prune(f"memory://odd/{name}", keep_last=1)
        assert [one.name for one in done.removed] == ["checkpoint-1"], name
        gone = before - set(files.store)
        assert gone == {key for key in before if key.startswith(f"/odd/{name}/checkpoint-1/")}
    files.rm("/odd", recursive=True)


@pytest.mark.parametrize("name", ["exp[1]", "-a*?#%20\n\u0301\U0001f680'\"\\{b}"])
@pytest.mark.parametrize("store", ["s3", "memory", "local"])
def test_every_command_reads_and_writes_a_place_of_an_odd_name(
    bucket: Bucket, tmp_path: Path, name: str, store: str
) -> None:
    if store == "s3":
        name = name.replace("\n", "")  # the server of the tests takes no such key

    def at(path: str) -> Place:
        if store == "s3":
            return Place(f"{bucket.url}/{path}", bucket.store.options)
        return Place(f"memory://every/{path}" if store == "memory" else tmp_path / path)

    source = at(f"{name}/checkpoint-4")
    if store == "s3":
        bucket.put_tree(STEP / "checkpoint", f"{name}/checkpoint-4")
    elif store == "memory":
        fsspec.filesystem("memory").put(str(STEP / "checkpoint"), source, recursive=True)
    else:
        shutil.copytree(STEP / "checkpoint", source)
    found = ckptkit.inspect(source)
    assert found.tensors
    out = at(f"out {name}")
    manifest = ckptkit.consolidate(source, out, names="live")
    assert ckptkit.verify(out).ok
    ckptkit.consolidate(source, out, names="live", overwrite=True)
    ckptkit.convert(source, at(f"{name} torch"), to="torch", names="live")
    assert ckptkit.diff(out, at(f"{name} torch")).equal
    assert ckptkit.verify(source).ok
    with ckptkit.open(out) as opened:
        assert set(opened.keys()) == set(manifest.tensors)
    assert [one.name for one in ckptkit.list_run(at(name)).steps] == ["checkpoint-4"]


def test_nothing_outside_of_the_named_place_is_removed(bucket: Bucket) -> None:
    for key in ("run/a", "run/b/c", "other/a"):
        bucket.put(key, b"1")
    store = store_of(Place(bucket.url, bucket.store.options))
    for names in (["../other/a"], ["a", ""], ["/other/a"], ["b/../../other/a"], ["b//c"]):
        with pytest.raises(UnsafePathError, match="was to be removed"):
            store.delete(f"{bucket.name}/run", names)
    with pytest.raises(UnsafePathError):
        store.delete("", ["run/a"])
    assert bucket.keys() == ["other/a", "run/a", "run/b/c"]
    store.delete(f"{bucket.name}/run", ["*", "b*", "gone"])
    assert bucket.keys() == ["other/a", "run/a", "run/b/c"]
    store.delete(f"{bucket.name}/run", ["b/c"])
    assert bucket.keys() == ["other/a", "run/a"]
