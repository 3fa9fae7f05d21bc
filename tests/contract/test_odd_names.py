"""No name is a pattern: what commands do to a place with an odd name is done there alone."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsafePathError
from ckptkit.storage.places import Place, is_url
from ckptkit.storage.remote.store import get_store
from tests.made_up_runs import save_step
from tests.object_store import Bucket, ObjectStore
from tests.sampled import sampled

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config"
SEPARATE = FIXTURES / "accelerate_fsdp2_cpu_offload"
LORA = FIXTURES / "peft_trl_fsdp2_ckptkit"
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
    "exp?key=1&sig=2",
    "[!a]*",
]
NUMBERS = count()
PLAIN = ["exp1", "exp2", "expx", "exp", "exp 1", "exp\u00e9", "expabc"]


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    """A bucket of this test alone: to empty one takes a request for each object."""
    bucket = object_store.bucket(f"odd-names-{next(NUMBERS)}")
    assert bucket.keys() == []
    return bucket


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    for step in (1, 2):
        save_step(run, step, save_number=step)
    return run


@pytest.mark.slow
def test_pruning_one_run_on_s3_takes_nothing_from_its_neighbours(bucket: Bucket, run: Path) -> None:
    for name in [*ODD, *PLAIN]:
        bucket.put_tree(run, name)
        bucket.put(f"{name}/checkpoint-1/", b"")  # as consoles and mounts leave for a folder
        bucket.put(f"{name}/checkpoint-1/[c]*/", b"")
    before = set(bucket.keys())
    for name in ODD:
        place = Place(f"{bucket.url}/{name}", bucket.store.options)
        done = ckptkit.prune(place, keep_last=1)
        assert [one.name for one in done.removed] == ["checkpoint-1"], name
        after = set(bucket.keys())
        gone = {key for key in before if key.startswith(f"{name}/checkpoint-1/")}
        assert gone
        assert before - after == gone, name
        before = after
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


class Places:
    """Places of one store, by their paths in it."""

    def __init__(self, store: str, bucket: Bucket, folder: Path) -> None:
        top = {"s3": bucket.url, "memory": "memory://every", "local": f"{folder}"}
        self._top = top.get(store, f"{store}://{folder}")
        self._options = bucket.store.options if store == "s3" else {}

    def at(self, path: str) -> Place:
        return Place(f"{self._top}/{path}", self._options)

    def put(self, tree: Path, path: str) -> Place:
        place = self.at(path)
        store = get_store(place).filesystem if is_url(place) else fsspec.filesystem("file")
        for file in tree.rglob("*"):
            if file.is_file():
                name = f"{place.inner_path}/{file.relative_to(tree).as_posix()}"
                store.makedirs(str(Path(name).parent), exist_ok=True)
                store.pipe_file(name, file.read_bytes())
        return place


WORST = "-a[1]*?#%20\n\u0301\U0001f680'\"\\{b}+&key=1"


@pytest.fixture(params=["s3", "memory", "local"])
def places(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> Places:
    return Places(request.param, bucket, tmp_path)


def named(name: str, places: Places) -> str:
    # The server of the tests takes no such key.
    return name.replace("\n", "") if places.at("").protocol == "s3" else name


@pytest.mark.parametrize(
    "places", sampled(["s3", "memory", "local"], ["memory", "local"]), indirect=True
)
def test_every_command_reads_and_writes_a_place_of_an_odd_name(places: Places) -> None:
    name = named(WORST, places)
    at = places.at
    source = places.put(STEP / "checkpoint", f"{name}/checkpoint-4")
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


@pytest.fixture(scope="module")
def base_and_tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    base, tuned = folder / "base", folder / "tuned"
    ckptkit.consolidate(STEP / "checkpoint", base, dtype="float32")
    shutil.copytree(base, tuned)
    (tuned / "ckptkit.json").unlink()
    tensors = load_file(tuned / "model.safetensors")
    changed = next(name for name in tensors if "q_proj" in name)
    tensors[changed] = tensors[changed] + np.float32(0.5)
    save_file(tensors, tuned / "model.safetensors", {"format": "pt"})
    return base, tuned


@pytest.mark.parametrize("places", sampled(["s3", "file"], ["file"]), indirect=True)
def test_so_do_the_commands_for_adapters_and_a_removal(
    places: Places, base_and_tuned: tuple[Path, Path]
) -> None:
    name = named(WORST, places)
    at = places.at
    lora = places.put(LORA / "checkpoint" / "checkpoint-2", f"{name}/lora/checkpoint-2")
    adapter = ckptkit.extract_adapter(lora, at(f"{name} adapter"))
    assert adapter.tensors
    ckptkit.merge_adapter(lora, at(f"{name} merged"))
    base, tuned = (places.put(one, f"{name} {one.name}") for one in base_and_tuned)
    ckptkit.adapter_from_diff(tuned, at(f"{name} back"), base=base, rank=2)
    for out in ("adapter", "merged", "back"):
        assert ckptkit.verify(at(f"{name} {out}")).ok
    # A removal takes what lies below the name, and leaves what the name would fit as a pattern.
    source = places.put(SEPARATE / "checkpoint", f"{name}/run")
    other = places.put(SEPARATE / "checkpoint", f"{name.replace('[1]', '1')}/run")
    model: dict[str, Any] = {"names": "live", "select": "pytorch_model_fsdp_0"}
    for _ in range(2):
        ckptkit.consolidate(source, at(f"{name} out"), delete_source=True, **model)
    with pytest.raises(CkptkitError):
        ckptkit.consolidate(source, at(f"{name} again"), **model)
    assert ckptkit.verify(other).ok


def test_nothing_outside_of_the_named_place_is_removed(bucket: Bucket) -> None:
    for key in ("run/a", "run/b/c", "other/a"):
        bucket.put(key, b"1")
    store = get_store(Place(bucket.url, bucket.store.options))
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
