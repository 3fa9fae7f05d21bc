"""The file system of fsspec has the files that the commands write, and raises where it cannot."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.generic import rsync
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file

import ckptkit
from ckptkit.core.errors import ArgumentError, ChecksumError, SourceChangedError, UsageError
from ckptkit.file_system import CheckpointFileSystem
from tests.files import contents, flip_bit
from tests.object_store import Bucket, ObjectStore
from tests.sampled import sampled
from tests.sharded import write_sharded

# The environment of the tests was installed before the entry point was there.
fsspec.register_implementation("ckptkit", CheckpointFileSystem, clobber=True)
ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
PEFT = FIXTURES / "peft_fsdp2"
GUESSED = {"lora_alpha": 16, "use_rslora": False}


@dataclass(frozen=True)
class Case:
    """A source with options, and the function that writes what is read of it."""

    fixture: str
    write: Callable[..., Any]
    options: Mapping[str, Any]

    def source(self, folder: Path) -> Path:
        """Returns the source; where there is no fixture, it is written into a folder."""
        if self.fixture:
            return FIXTURES / self.fixture / "checkpoint"
        return save_odd_tensors(folder)


CASES = {
    "cast": Case("accelerate_fsdp2_bf16_tied", ckptkit.consolidate, {"dtype": "float32"}),
    "several files": Case(
        "accelerate_fsdp2_tied_with_config", ckptkit.consolidate, {"max_shard_size": 4000}
    ),
    "zero": Case("deepspeed_0_18_zero3", ckptkit.consolidate, {"dtype": "bfloat16"}),
    "flat": Case("accelerate_fsdp1_bf16", ckptkit.consolidate, {}),
    "compressed": Case("dcp_zstd_fsdp2", ckptkit.consolidate, {"names": "live"}),
    "odd": Case("", ckptkit.consolidate, {"names": "live"}),
    "odd, cast": Case("", ckptkit.consolidate, {"names": "live", "dtype": "bfloat16"}),
    "merged": Case("peft_fsdp2", ckptkit.merge_adapter, {"overrides": GUESSED, "names": "live"}),
    "merged DoRA": Case("peft_qdora_fsdp2_ckptkit", ckptkit.merge_adapter, {"dtype": "bfloat16"}),
}


def save_odd_tensors(folder: Path) -> Path:
    """Writes tensors of all kinds and sizes, under names of all kinds."""
    torch.manual_seed(0)
    tensors = {
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "int64": torch.arange(5),
        "größe/../x y%2F+": torch.randn(3, 3, dtype=torch.float64),
        # Over a leaf of 8 MiB, and not a multiple of a buffer.
        "large": torch.randn(2_500_001),
        **{f"many.{number}": torch.randn(2) for number in range(400)},
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Returns what the command wrote, without the manifest: its digests are not known yet."""
    return {path: data for path, data in contents(folder).items() if path != "ckptkit.json"}


def same_content(actual: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []


MADE: list[Any] = []


def file_system(src: object, **options: Any) -> Any:
    """Returns a file system that no other test has, and that is closed after this one."""
    MADE.append(fsspec.filesystem("ckptkit", src=src, skip_instance_cache=True, **options))
    return MADE[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    kind = fsspec.get_filesystem_class("ckptkit")  # fsspec keeps those that copies made
    for files in (*MADE, *kind._cache.values()):
        files.invalidate_cache()
    MADE.clear()
    kind.clear_instance_cache()


QUICK = ("several files", "zero", "compressed", "odd", "merged DoRA")


@pytest.fixture(scope="module", params=sampled(CASES, QUICK))
def planned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, dict[str, bytes]]]:
    """A file system, and the content that it is to have."""
    case, out = CASES[request.param], tmp_path_factory.mktemp("written")
    source = case.source(tmp_path_factory.mktemp("source"))
    case.write(source, out, **case.options)
    files = fsspec.filesystem("ckptkit", src=source, skip_instance_cache=True, **case.options)
    yield files, content(out)
    files.invalidate_cache()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written")
    ckptkit.consolidate(STEP, out)
    return out


def test_files_are_those_that_the_command_writes(planned: tuple[Any, dict[str, bytes]]) -> None:
    files, expected = planned
    same_content({name: files.cat_file(name) for name in files.find("")}, expected)
    assert {one["name"]: one["size"] for one in files.ls("")} == {
        name: len(data) for name, data in expected.items()
    }
    for name, data in expected.items():
        with files.open(name, block_size=1 << 16) as opened:
            assert opened.read() == data


@pytest.mark.parametrize(
    "planned", sampled(CASES, ["several files", "zero", "merged DoRA"]), indirect=True
)
@given(data=st.data())
def test_any_range_is_that_of_the_written_file(
    planned: tuple[Any, dict[str, bytes]], data: st.DataObject
) -> None:
    files, expected = planned
    name = data.draw(st.sampled_from(sorted(expected)))
    size = len(expected[name])
    bounds = st.one_of(st.none(), st.integers(-size - 9, size + 9))
    start, end = data.draw(bounds), data.draw(bounds)
    assert files.cat_file(name, start, end) == expected[name][start:end]


def test_a_url_is_opened_with_its_options(written: Path) -> None:
    with fsspec.open("ckptkit://config.json", "r", src=STEP) as text:
        assert json.load(text) == json.loads((written / "config.json").read_text())
    whole = (written / "model.safetensors").read_bytes()
    with fsspec.open("ckptkit://model.safetensors", src=str(STEP)) as opened:
        assert (opened.seek(-9, os.SEEK_END), opened.read()) == (len(whole) - 9, whole[-9:])
        assert (opened.seek(100), opened.read(50)) == (100, whole[100:150])


def test_the_folder_is_seen_as_that_of_other_file_systems() -> None:
    files = file_system(STEP)
    assert (files.exists(""), files.isdir("/"), files.isfile("ckptkit://config.json")) == (
        True,
    ) * 3
    assert (files.exists("no"), files.exists("model"), files.isdir("config.json")) == (False,) * 3
    assert "model.safetensors" in files.ls("ckptkit://", detail=False)
    assert files.glob("*okenizer.json") == ["tokenizer.json"]
    assert files.info("config.json")["ETag"] == files.ukey("config.json")
    assert files.created("config.json") == files.modified("config.json")
    for ask in (files.ls, files.info, files.cat_file, files.open, files.modified):
        with pytest.raises(FileNotFoundError):
            ask("no")


def test_folders_of_the_model_are_folders(tmp_path: Path) -> None:
    case = FIXTURES / "reports" / "21-sentence-transformers"
    ckptkit.consolidate(case / "ckpt", tmp_path / "out", base=case / "base")
    files = file_system(case / "ckpt", base=case / "base")
    assert files.ls("1_Pooling/", detail=False) == ["1_Pooling/config.json"]
    assert files.info("1_Pooling")["type"] == "directory"
    assert "1_Pooling" in files.ls("", detail=False)
    assert "1_Pooling/config.json" not in files.ls("", detail=False)
    files.get("", f"{tmp_path}/got/", recursive=True)
    same_content(content(tmp_path / "got"), content(tmp_path / "out"))


def test_copies_of_fsspec_are_the_written_files(written: Path, tmp_path: Path) -> None:
    files = file_system(STEP)
    files.get("", f"{tmp_path}/got/", recursive=True)
    same_content(content(tmp_path / "got"), content(written))
    options = {"default_method": "options", "storage_options": {"ckptkit": {"src": str(STEP)}}}
    (tmp_path / "synced").mkdir()
    copied = rsync("ckptkit://", f"file://{tmp_path}/synced", inst_kwargs=options)
    assert len(copied) == len(content(written))
    same_content(content(tmp_path / "synced"), content(written))


def test_safetensors_and_transformers_load_what_is_read(written: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    files = file_system(STEP)
    expected = load_file(written / "model.safetensors")
    loaded = load(files.cat_file("model.safetensors"))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    files.get("", f"{tmp_path}/model/", recursive=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    state = model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    return object_store.bucket("planned")


def test_a_source_at_a_url_is_read(bucket: Bucket, written: Path, tmp_path: Path) -> None:
    url = bucket.put_tree(STEP, "run")
    options = {"src": url, "src_options": bucket.store.options}
    files = file_system(**options)
    same_content({name: files.cat_file(name) for name in files.find("")}, content(written))
    # Where the loop of fsspec's own thread is the one that asks.
    options = {"default_method": "options", "storage_options": {"ckptkit": options}}
    (tmp_path / "synced").mkdir()
    rsync("ckptkit://", f"file://{tmp_path}/synced", inst_kwargs=options)
    same_content(content(tmp_path / "synced"), content(written))


def test_many_threads_read_at_a_time(planned: tuple[Any, dict[str, bytes]]) -> None:
    files, expected = planned
    wrong: list[str] = []

    def read() -> None:
        wrong.extend(name for name in expected if files.cat_file(name) != expected[name])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_process_reads_what_it_is_sent(written: Path) -> None:
    program = "import pickle, sys; files = pickle.load(sys.stdin.buffer)\n"
    program += "sys.stdout.buffer.write(files.cat_file('model.safetensors'))"
    sent = pickle.dumps(file_system(str(STEP)))
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, check=False
    )
    assert done.stdout == (written / "model.safetensors").read_bytes(), done.stderr[-2000:]


def test_the_entry_point_is_found_by_fsspec(written: Path, tmp_path: Path) -> None:
    """As an installed distribution has it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = "".join(f"{name} = {place}\n" for name, place in groups["fsspec.specs"].items())
    installed = tmp_path / "installed-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[fsspec.specs]\n{entries}")
    program = "import fsspec, sys\n"
    program += "with fsspec.open('ckptkit://config.json', src=sys.argv[1]) as opened:\n"
    program += "    sys.stdout.buffer.write(opened.read())"
    found = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, str(STEP)],
        env=os.environ | {"PYTHONPATH": found},
        capture_output=True,
        check=False,
    )
    assert done.stdout == (written / "config.json").read_bytes(), done.stderr[-2000:]


# --- versions ---


def version(src: Path, **options: Any) -> tuple[str, bytes]:
    files = file_system(src, **options)
    return files.ukey("model.safetensors"), files.cat_file("model.safetensors")


@pytest.mark.parametrize(
    ("src", "options", "others"),
    [
        (STEP, {}, {"dtype": "float16"}),
        (PEFT / "checkpoint", {"overrides": GUESSED}, {"overrides": GUESSED | {"lora_alpha": 32}}),
        (
            PEFT / "checkpoint",
            {"overrides": GUESSED},
            {"overrides": GUESSED | {"use_rslora": True}},
        ),
        (PEFT / "checkpoint", {"overrides": GUESSED}, {"overrides": GUESSED, "dtype": "float16"}),
    ],
)
def test_other_bytes_are_another_version(
    src: Path, options: dict[str, Any], others: dict[str, Any]
) -> None:
    """A client may keep parts of a file by its version."""
    first, again, other = (version(src, names="live", **one) for one in (options, options, others))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_another_configuration_of_an_adapter_is_another_version(tmp_path: Path) -> None:
    data = (PEFT / "adapter_truth.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    config = json.loads((PEFT / "adapter_config.json").read_bytes())
    versions = set()
    for alpha in (16, 32):
        text = json.dumps(config | {"lora_alpha": alpha})
        (tmp_path / "adapter_config.json").write_text(text)
        versions.add(version(tmp_path, base=PEFT / "base")[0])
    assert len(versions) == 2


# --- what fails ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    state = {"model.large": torch.randn(1 << 13, 2048), "model.small": torch.randn(16)}
    write_sharded(folder, state, 1)
    return folder


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint with a record of 64 MB, and the file that has it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    return folder, max(folder.iterdir(), key=lambda path: path.stat().st_size)


def test_no_byte_of_a_damaged_record_is_read(sharded: tuple[Path, Path], tmp_path: Path) -> None:
    folder, shard = sharded
    flip_bit(shard, shard.stat().st_size // 2, 4)
    files = file_system(folder, names="live")
    assert len(files.cat_file("model.safetensors", 0, 100)) == 100  # the header is in no record
    with pytest.raises(ChecksumError):
        files.cat_file("model.safetensors", -10)
    with files.open("model.safetensors") as opened:
        opened.seek(8192)
        with pytest.raises(ChecksumError):
            opened.read(10)
    copy = tmp_path / "copy"
    with pytest.raises(ChecksumError):
        files.get_file("model.safetensors", str(copy))
    assert not copy.exists()  # a part would be taken for the file


def change_in_place(shard: Path) -> None:
    flip_bit(shard, shard.stat().st_size - 5000, 4)


def replace_by_another(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(shard.read_bytes())
    other.replace(shard)


def cut_short(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


@pytest.mark.parametrize("change", [change_in_place, replace_by_another, cut_short, Path.unlink])
def test_a_source_that_changed_is_refused(
    change: Callable[[Path], None], sharded: tuple[Path, Path]
) -> None:
    folder, shard = sharded
    files = file_system(folder, names="live")
    assert len(files.cat_file("model.safetensors", 0, 5000)) == 5000
    change(shard)
    for _ in range(2):
        with pytest.raises(SourceChangedError, match="changed while it was served"):
            files.cat_file("model.safetensors")


def test_a_source_that_changed_is_planned_again(sharded: tuple[Path, Path]) -> None:
    folder, shard = sharded
    files = file_system(folder, names="live")
    before = files.cat_file("model.safetensors")
    replace_by_another(shard)
    with pytest.raises(SourceChangedError) as raised:
        files.cat_file("model.safetensors")
    assert "`invalidate_cache()`" in raised.value.hint
    with files.open("model.safetensors") as opened:
        files.invalidate_cache()
        assert files.cat_file("model.safetensors") == before
        with pytest.raises(ValueError, match="was opened before"):  # of two plans, maybe
            opened.read(10)


def test_a_changed_side_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STEP, tmp_path / "step")
    files = file_system(tmp_path / "step")
    tokenizer = tmp_path / "step" / "tokenizer.json"
    assert files.cat_file("tokenizer.json") == tokenizer.read_bytes()
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(SourceChangedError):
        files.cat_file("tokenizer.json")


def test_a_configuration_is_read_as_it_was_planned_with(tmp_path: Path) -> None:
    """It was read as a whole; no other bytes can be sent."""
    shutil.copytree(PEFT, tmp_path / "peft")
    base = tmp_path / "peft" / "base"
    options = {"base": base, "allow_other_base": True}
    options["adapter_config"] = tmp_path / "peft" / "adapter_config.json"
    files = file_system(tmp_path / "peft" / "checkpoint", **options)
    expected = (base / "config.json").read_bytes()
    assert files.exists("config.json")
    (base / "config.json").write_bytes(expected.replace(b":", b": ", 1))
    assert files.cat_file("config.json") == expected


def test_a_changed_object_is_refused(sharded: tuple[Path, Path], bucket: Bucket) -> None:
    folder, shard = sharded
    url = bucket.put_tree(folder, "changed")
    files = file_system(url, names="live", src_options=bucket.store.options)
    files.cat_file("model.safetensors", 5000, 6000)
    bucket.put(f"changed/{shard.name}", shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(SourceChangedError):
        files.cat_file("model.safetensors")


def test_memory_does_not_grow_with_the_file(sharded: tuple[Path, Path], tmp_path: Path) -> None:
    files = file_system(sharded[0], names="live")
    size = files.size("model.safetensors")
    tracemalloc.start()
    try:
        files.get_file("model.safetensors", str(tmp_path / "copy"))
        with files.open("model.safetensors") as opened:
            while opened.read(1 << 20):
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "copy").stat().st_size == size
    assert peak < size // 2


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b"])
def test_nothing_can_be_written(mode: str) -> None:
    files = file_system(STEP)
    with pytest.raises(OSError, match="Read-only") as raised:
        files.open("config.json", mode)
    assert raised.value.errno == errno.EROFS
    with pytest.raises(NotImplementedError):
        files.pipe_file("x", b"x")
    with pytest.raises(NotImplementedError):
        files.rm("config.json")


def test_options_are_checked_before_anything_is_read() -> None:
    with pytest.raises(ArgumentError, match="unknown option 'dtpye'; did you mean 'dtype'"):
        file_system("nowhere", dtpye="bfloat16")
    with pytest.raises(UsageError, match="'int8' is not among"):
        file_system("nowhere", dtype="int8")
