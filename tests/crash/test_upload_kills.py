"""A kill before any single request to the store: steps are whole, or do not look whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError, OutputError, SaveError
from ckptkit.core.manifest import MANIFEST_NAME, parse_manifest
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.remote.errors import RetryPolicy, as_upload_error
from ckptkit.storage.remote.store import ObjectInfo
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.training.tiers.url_run import UploadProcess
from ckptkit.writer.messages import (
    ByteCounter,
    Commit,
    Discard,
    Drain,
    FinishUpload,
    RecordProof,
    Remote,
    Request,
    UploadFiles,
    Written,
)
from ckptkit.writer.upload import run_store as places
from ckptkit.writer.upload.run_store import RunStore, UploadedFiles, finish, send_file
from ckptkit.writer.upload.uploader import Uploader
from tests.crash import writing
from tests.hub_server import TOKEN

NATIVE = Disk()
JOB = "0123abcd"
CHANGES = {
    "memory://": ("pipe_file", "open", "rm_file", "cp_file"),
    "hf://buckets/org/": ("_batch",),  # which all other calls come to
}


class KilledError(BaseException):
    """Stands for the end of the process."""


@dataclass
class Step:
    """A step of two ranks that is durable on their nodes."""

    saves: list[Any]
    proofs: list[RecordProof]

    @classmethod
    def kept(cls, folder: Path, *, step: int = 500, salt: int = 0) -> Step:
        saves, proofs = [], []
        for rank in (0, 1):
            save = writing.Save(folder / f"node{rank}", world_size=2, step=step)
            memory, request = save.persist(rank, writing.usual_units(rank, 2, salt=salt))
            proof = writing.persist(memory, request).proof
            assert proof is not None
            saves.append(save)
            proofs.append(proof)
        return cls(saves, proofs)

    def upload(self, store: RunStore, **further: Any) -> None:
        name, remote = self.saves[0].final.name, Remote(store.location)
        for rank, save in enumerate(self.saves):
            records = (f".ranks/{rank}.json",)
            request = UploadFiles(save.attempt, remote, name, JOB, str(save.folder), records)
            Uploader(NATIVE).upload(request, store, ByteCounter())
        whole = self.saves[0].commit(self.proofs)
        made = FinishUpload(
            whole.attempt, remote, name, JOB, whole.proofs, whole.manifest, visible_seconds=0.1
        )
        finish(
            made if not further else FinishUpload(**_fields(made) | further), store, ByteCounter()
        )

    def files(self) -> dict[str, bytes]:
        name = self.saves[0].final.name
        return {
            f"{name}/{path.relative_to(save.folder).as_posix()}": path.read_bytes()
            for save in self.saves
            for path in save.folder.rglob("*")
            if path.is_file() and ".ranks" not in path.parts
        }


def _fields(made: FinishUpload) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__struct_fields__}


def opened(name: str, root: str = "memory://", **options: str) -> RunStore:
    remote = Remote(f"{root}{name}", options)
    return RunStore(remote, RetryPolicy(attempts=2, first_wait_seconds=0.0))


def killed_before(store: RunStore, number: int, root: str) -> None:
    """Has the process end before one of its requests that change something."""
    left = iter(range(number, -1, -1))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if next(left, 0) == 0:
                raise KilledError
            return call(*arguments, **named)

        return run

    for name in CHANGES[root]:
        setattr(store.filesystem, name, counted(getattr(store.filesystem, name)))


def whole_steps(store: RunStore) -> Iterator[str]:
    """Yields the steps that look whole, and sees that they are."""
    entries = store.entries()
    for path in [path for path in entries if path.endswith(f"/{MANIFEST_NAME}")]:
        step = path.partition("/")[0]
        data = store.get(path)
        assert data is not None
        for name, record in parse_manifest(data, where=path).files.items():
            assert entries[f"{step}/{name}"].size_bytes == record.size_bytes
        yield step


@pytest.mark.quick("memory://")
@pytest.mark.parametrize("root", CHANGES)
def test_a_kill_before_any_request_leaves_whole_steps_or_none_that_look_whole(
    root: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    options = {}
    if root != "memory://":
        hub = request.getfixturevalue("hub")
        hub.put_bucket("org/kills")
        options = {"endpoint": hub.url, "token": TOKEN}
    old, new, retired = (
        Step.kept(tmp_path / str(salt), salt=salt, step=400 if salt == 2 else 500)
        for salt in range(3)
    )
    seen, number, died = set[tuple[bool, bool]](), 0, True
    while died:
        url = f"kills/{number}"
        store = opened(url, root, **options)
        places.take_run(store, JOB)
        retired.upload(store)
        old.upload(store)
        dying = opened(url, root, **options)
        killed_before(dying, number, root)
        try:
            new.upload(dying, remove=("checkpoint-400",))
            died = False
        except KilledError:
            pass
        there = set(whole_steps(store))
        seen.add(("checkpoint-400" in there, "checkpoint-500" in there))
        if "checkpoint-500" in there:
            # All of it is the old one's, or all of it the new one's.
            data = {path: store.get(path) for path in new.files() if "distcp" in path}
            assert data.items() <= new.files().items() or data.items() <= old.files().items()
        new.upload(opened(url, root, **options))
        assert "checkpoint-500" in set(whole_steps(store))
        assert all(store.get(path) == data for path, data in new.files().items())
        assert not any("/.ranks/" in path for path in store.entries("checkpoint-500"))
        number += 1
    record_property("kills", number - 1)
    assert number > 12
    # The old one retires the other only once the new one is whole.
    assert seen == {(True, True), (True, False), (False, True)}


def test_what_is_left_of_a_save_is_known_by_its_mark_and_nothing_else_is_removed() -> None:
    store = opened("leftovers")
    store.put("checkpoint-1/.ranks/uploading", b"x")
    store.put("checkpoint-1/file", b"x")
    store.put("checkpoint-2/file", b"somebody's")
    store.put("checkpoint-3/.ranks/uploading", b"x")
    store.put(f"checkpoint-3/{MANIFEST_NAME}", b"{}")
    assert places.unfinished_steps(store.entries().keys()) == ["checkpoint-1"]
    for step in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        places.remove_unfinished(store, step)
    assert sorted(store.entries()) == [
        "checkpoint-2/file",
        "checkpoint-3/.ranks/uploading",
        f"checkpoint-3/{MANIFEST_NAME}",
    ]
    assert places.run_identity(store) == places.run_identity(store) != ""


def test_a_file_that_is_cut_short_while_it_is_sent_is_no_object(tmp_path: Path) -> None:
    def read(start: int, count: int) -> bytes:
        return b"x" * (count if start == 0 else count - 1)

    store = opened("short")
    with pytest.raises(CkptkitError, match="cut short"):
        send_file(store, ByteCounter(), read, 20 << 20, "file")
    assert store.entries() == {}
    (tmp_path / ".ranks").mkdir()
    ledger = UploadedFiles.of(tmp_path, ".ranks/0.json")
    ledger.add("s3://b/one", ObjectInfo(1, "e"))
    with ledger.path.open("a") as file:
        file.write('["s3://b/two", 2')  # as a kill leaves it
    assert UploadedFiles.of(tmp_path, ".ranks/1.json").identities == {"s3://b/one": "e"}


def test_requests_to_drain_and_commit_become_uploads_that_clear_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def request(_: WriterProcess, message: Request, _stage: object = None) -> Written:
        asked.append(message)
        return Written("a", 0, 0.0, 0.0)

    monkeypatch.setattr(WriterProcess, "request", request)
    remote = Remote("s3://bucket/run", {"secret": "hidden"})
    process = UploadProcess(Any, "uploader", remote, (JOB, "/node"))  # type: ignore[arg-type]
    process.request(Drain("a", "/node/checkpoint-5", "/x", ("r",), ("f",), "s3://b/checkpoint-4"))
    process.request(Discard("a-5-1", "/node/.checkpoint-5.ckptkit-0123abcd-1"))
    for step in ("checkpoint-5", "best", "checkpoint-7"):
        process.request(Commit("a", "/x", f"s3://bucket/run/{step}", (), {}))
        process.request(Discard("a-5-1", "/node/.checkpoint-5.ckptkit-0123abcd-1"))
    upload, *finished = asked
    assert (upload.step, upload.earlier, upload.further) == ("checkpoint-5", "checkpoint-4", ("f",))
    assert [(one.step, one.given_up) for one in finished] == [
        ("checkpoint-5", ()),
        ("best", ()),
        ("checkpoint-7", ()),
    ]
    process.request(Discard("a-8-1", "/node/.best.ckptkit-0123abcd-1"))
    process.request(Commit("a", "/x", "s3://bucket/run/checkpoint-9", (), {}))
    assert asked[-1].given_up == ("best",)
    assert "hidden" not in repr(asked)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (PermissionError("no hidden-key here"), OutputError, "refused access"),
        (FileNotFoundError("bucket"), OutputError, "no such bucket"),
        (TypeError("unexpected option"), OutputError, "cannot be written"),
        (OSError("hidden-key was reset"), SaveError, "the store failed"),
    ],
)
def test_what_a_client_raises_is_told_without_secrets(
    raised: Exception, kind: type[CkptkitError], text: str
) -> None:
    options = {"client_kwargs": {"key": "hidden-key"}}
    error = as_upload_error(raised, where="s3://bucket/run", options=options)
    assert type(error) is kind
    assert text in error.message
    assert error.hint
    assert "hidden-key" not in str(error)
