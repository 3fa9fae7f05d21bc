"""What can go wrong under the writer ends in one clear error, and the next save works."""

from __future__ import annotations

import ast
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    OutputExistsError,
    SaveError,
    TruncatedFileError,
    UnsafePathError,
)
from ckptkit.storage.local.disk import Disk, OpenFile
from ckptkit.writer.commit import commit
from ckptkit.writer.messages import (
    ByteCounter,
    Commit,
    Discard,
    RecordProof,
    StepCommitted,
)
from ckptkit.writer.persist import STRIDE_BYTES, Persister
from ckptkit.writer.record import parse_record
from tests.crash import writing as writing_module

writing: Any = writing_module
NATIVE = Disk()
persist = writing.persist


def persist_all(save: Any, **further: Any) -> list[RecordProof]:
    proofs = []
    for rank in range(save.world_size):
        units = writing.usual_units(rank, save.world_size)
        proof = persist(*save.persist(rank, units, **further)).proof
        assert proof is not None
        proofs.append(proof)
    return proofs


def committed(request: Commit) -> StepCommitted:
    return commit(request, NATIVE, ByteCounter())


def refused(request: Commit, kind: type[CkptkitError]) -> CkptkitError:
    with pytest.raises(CkptkitError) as caught:
        committed(request)
    assert type(caught.value) is kind, caught.value
    assert caught.value.where
    assert caught.value.hint
    assert not Path(request.final).exists()
    return caught.value


@pytest.fixture
def save(tmp_path: Path) -> Any:
    return writing.Save(tmp_path / "run", world_size=2)


def test_the_manifest_names_every_file_and_keeps_digests(save: Any) -> None:
    request = save.commit(persist_all(save))
    known = {"random_states_0.pkl": {"size_bytes": 1, "digest": "ours"}}
    answer = committed(replace(request, manifest={**request.manifest, "files": known}))
    manifest = json.loads((save.final / "ckptkit.json").read_bytes())
    found = {p.relative_to(save.final).as_posix(): p for p in save.final.rglob("*") if p.is_file()}
    sizes = {path: file.stat().st_size for path, file in found.items()}
    assert answer.size_bytes == sum(sizes.values())
    del sizes["ckptkit.json"]
    assert {p: file["size_bytes"] for p, file in manifest["files"].items()} == sizes
    assert manifest["files"]["random_states_0.pkl"]["digest"] == "ours"
    crc = zlib.crc32(found["random_states_1.pkl"].read_bytes())
    assert manifest["files"]["random_states_1.pkl"]["digest"] == f"crc32:{crc:08x}"


def test_a_blob_larger_than_a_stride_has_the_right_checksum(tmp_path: Path) -> None:
    save = writing.Save(tmp_path)
    shape = (2 * STRIDE_BYTES // 4 + 1000,)
    large = writing.Part(("model", "w"), shape, (0,), shape, os.urandom(4 * shape[0]))
    empty = writing.Part(("model", "e"), (0,), (0,), (0,), b"")
    exact = writing.Part(("model", "x"), (1024,), (0,), (1024,), os.urandom(4096))
    units = {writing.MODEL: [large, empty, exact]}
    proof = persist(*save.persist(0, units)).proof
    committed(save.commit([proof]))
    report = ckptkit.verify(save.final)
    assert report.ok
    assert report.unverified == ()
    assert report.tensors == 3


def test_waves_of_one_attempt_end_in_one_record(tmp_path: Path) -> None:
    save = writing.Save(tmp_path)
    memory, whole = save.persist(0, writing.usual_units(0, 1))
    persister = Persister(NATIVE)
    for image in whole.images:
        buffer = memory.share()
        persister.attach(memory.descriptor, buffer.size_bytes)
        wave = replace(whole, images=(image,), inline=(), record=None)
        assert persister.persist(wave, ByteCounter()).proof is None
    last = persister.persist(replace(whole, images=()), ByteCounter())
    assert last.proof is not None
    committed(save.commit([last.proof]))
    assert ckptkit.verify(save.final).ok


def test_a_request_that_failed_is_repeated_whole(tmp_path: Path) -> None:
    save = writing.Save(tmp_path)
    memory, request = save.persist(0, writing.usual_units(0, 1))
    record = {**(request.record or {}), "replicas": [["", ["w"], [0], True]]}
    request = replace(request, record=record, replicas=((0, 4),))
    size_bytes = memory.share().size_bytes
    persister = Persister(NATIVE)
    persister.attach(memory.descriptor, size_bytes)
    in_the_way = save.folder / request.images[0].path
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    with pytest.raises(FileExistsError):
        persister.persist(request, ByteCounter())
    in_the_way.unlink()
    proof = persister.persist(request, ByteCounter()).proof
    assert proof is not None
    parse_record((save.folder / proof.path).read_bytes(), where=proof.path)


def test_a_step_saved_again_is_replaced_and_retired_steps_go(tmp_path: Path) -> None:
    older = writing.Save(tmp_path, step=400)
    committed(older.commit(persist_all(older)))
    for number, disk in enumerate((NATIVE, NATIVE, dataclasses.replace(NATIVE, exchange=False))):
        save = writing.Save(tmp_path, f"a-{number}")
        gone = (str(older.final), str(save.final), str(tmp_path / "checkpoint-7"))
        answer = commit(save.commit(persist_all(save), remove=gone), disk, ByteCounter())
        assert answer.removed == ((str(older.final),) if number == 0 else ())
        assert answer.notes == ()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-500"]
        assert ckptkit.verify(save.final).ok


def test_files_of_the_folder_beside_are_copied_into_the_step(save: Any, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    (beside / "ckptkit").mkdir(parents=True)
    (beside / "ckptkit/config.json").write_bytes(b"{}")
    answer = committed(save.commit(persist_all(save), beside=str(beside)))
    assert answer.notes == ()
    assert (save.final / "ckptkit/config.json").read_bytes() == b"{}"
    assert "ckptkit/config.json" in json.loads((save.final / "ckptkit.json").read_bytes())["files"]


def test_a_file_of_the_folder_beside_that_vanishes_fails_the_commit(
    save: Any, tmp_path: Path
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").symlink_to(tmp_path / "gone")  # as if removed after it was listed
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        committed(save.commit(persist_all(save), beside=str(beside)))
    assert not save.final.exists()


def test_a_folder_beside_that_is_gone_is_told(save: Any, tmp_path: Path) -> None:
    answer = committed(save.commit(persist_all(save), beside=str(tmp_path / "gone")))
    assert "gone" in answer.notes[0]


def test_nothing_of_another_tool_is_replaced(save: Any) -> None:
    save.final.mkdir(parents=True)
    (save.final / "model.safetensors").write_bytes(b"theirs")
    request = save.commit(persist_all(save))
    with pytest.raises(OutputExistsError, match=r"without a ckptkit\.json") as caught:
        committed(request)
    assert caught.value.hint
    assert (save.final / "model.safetensors").read_bytes() == b"theirs"
    shutil.rmtree(save.final)
    save.final.symlink_to(save.run)
    shutil.rmtree(save.folder)
    with pytest.raises(OutputExistsError):
        committed(save.commit(persist_all(save)))


def test_direct_io_refused_by_the_first_write_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OpenFile.write_at

    def refuse(self: OpenFile, start: int, data: memoryview) -> None:
        flags = __import__("fcntl").fcntl(self._file.fileno(), 3)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        write(self, start, data)

    monkeypatch.setattr(OpenFile, "write_at", refuse)
    save = writing.Save(tmp_path)
    answer = persist(*save.persist(0, writing.usual_units(0, 1)))
    assert answer.notes
    committed(save.commit([answer.proof]))
    assert ckptkit.verify(save.final).ok


def test_files_that_become_visible_late_are_waited_for(save: Any) -> None:
    request = save.commit(persist_all(save), visible_seconds=20.0)
    record = save.folder / ".ranks/1.json"
    shard = save.folder / writing.MODEL / "__1_0.distcp"
    hidden = [(path, path.read_bytes()) for path in (record, shard)]
    record.unlink()
    shard.write_bytes(b"")

    def appear() -> None:
        for path, data in hidden:
            time.sleep(0.3)
            path.write_bytes(data[: len(data) // 2])
            time.sleep(0.1)
            path.write_bytes(data)

    thread = threading.Thread(target=appear)
    thread.start()
    committed(request)
    thread.join()
    assert ckptkit.verify(save.final).ok


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda save: (save.folder / ".ranks/1.json").unlink(), MissingFileError),
        (lambda save: cut(save.folder / ".ranks/1.json"), TruncatedFileError),
        (lambda save: flip(save.folder / ".ranks/1.json"), ChecksumError),
        (lambda save: cut(save.folder / writing.MODEL / "__1_0.distcp"), TruncatedFileError),
        (lambda save: (save.folder / "random_states_0.pkl").unlink(), MissingFileError),
    ],
)
def test_what_is_missing_or_cut_short_is_named(
    save: Any, spoil: Callable[[Any], None], kind: type[CkptkitError]
) -> None:
    request = save.commit(persist_all(save), visible_seconds=0.1)
    spoil(save)
    refused(request, kind)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def test_a_rank_that_is_missing_or_of_another_world_is_named(save: Any) -> None:
    proofs = persist_all(save)
    refused(save.commit(proofs[1:]), FormatError)
    assert "of 1 ranks" in refused(save.commit(proofs[:1]), FormatError).message
    twice = [proofs[0], replace(proofs[0], rank=1)]
    assert "rank 0" in refused(save.commit(twice), FormatError).message


def test_a_tensor_that_all_left_to_others_is_found_out(save: Any) -> None:
    expected = {writing.MODEL: [["model", "left"]]}
    error = refused(save.commit(persist_all(save, expected=expected)), IncompleteCheckpointError)
    assert "model.left" in error.where


def test_requests_that_make_no_sense_are_answered(tmp_path: Path) -> None:
    with writing.Writer() as writer:
        writer.connection.sendall(b"\x02\0\0\0{}" + b"\x04\0\0\0nope")
        for _ in range(2):
            assert isinstance(writer.channel.receive(), writing.Failed)
        save = writing.Save(tmp_path)
        memory, request = save.persist(0, writing.usual_units(0, 1))
        answer = writer.ask(request)
        assert answer.error["code"] == "save-failed"
        assert "no shared buffer" in answer.error["message"]
        answer = writer.ask(Discard("a", str(tmp_path)))
        assert answer.error["code"] == "refused"
        assert tmp_path.is_dir()
        writer.share(memory)
        answer = writer.ask(replace(request, record={"no": "rank"}))
        assert "KeyError" in answer.error["message"]
        writing.save_whole(writing.Save(tmp_path, "a-2"), writer)


def test_images_outside_of_the_buffer_and_paths_outside_of_the_folder_are_refused(
    tmp_path: Path,
) -> None:
    save = writing.Save(tmp_path)
    memory, request = save.persist(0, writing.usual_units(0, 1))
    image = request.images[0]
    blob = image.archives[0]
    for wrong in (
        replace(image, start=image.start + 1),
        replace(image, size_bytes=1 << 30),
        replace(image, archives=(replace(blob, crc_at=(blob.start,)),)),
        replace(image, archives=(image.archives[1], blob)),
        replace(image, archives=(replace(blob, crc_at=(image.size_bytes - 3,)),)),
    ):
        with pytest.raises(SaveError, match="image at"):
            persist(memory, replace(request, images=(wrong,)))
    with pytest.raises(UnsafePathError):
        persist(memory, replace(request, images=(replace(image, path="../x"),)))
    with pytest.raises(UnsafePathError):
        persist(memory, replace(request, record_path="/x"))


def test_the_writer_process_imports_msgspec_and_at_most_isal() -> None:
    command = writing.writer_command(0)
    program = command[4].replace(
        "main()",
        "import ckptkit.writer.commit, ckptkit.writer.sweep;"
        " print({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)",
    )
    done = subprocess.run([*command[:4], program], check=True, capture_output=True, text=True)
    assert ast.literal_eval(done.stdout) - {"isal", "typing_extensions"} == {
        *("__main__", "ckptkit", "msgspec")
    }


def test_the_writer_stays_small(tmp_path: Path) -> None:
    save = writing.Save(tmp_path, world_size=2)
    with writing.Writer() as writer:
        writing.save_whole(save, writer)
        lines = Path(f"/proc/{writer.process.pid}/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    assert private < 30_000  # kilobytes
