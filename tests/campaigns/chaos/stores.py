"""What goes to stores and the Hub: uploads of steps, a model written to S3, push, watch, pull."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME, parse_manifest
from ckptkit.storage.places import Place
from ckptkit.writer.messages import (
    Channel,
    Failed,
    FinishUpload,
    Remote,
    StepCommitted,
    UploadFiles,
    WriteProgress,
    Written,
)
from ckptkit.writer.upload.run_store import (
    RunStore,
    remove_unfinished,
    run_identity,
    take_run,
    unfinished_steps,
)
from tests.campaigns.chaos.commands import ROOT, CommandHost, check_status, undisturbed
from tests.campaigns.chaos.scenes import LossError, require
from tests.campaigns.chaos.system_calls import ERRORS, KILL, Fault, Reached, arm
from tests.campaigns.chaos.writers import (
    BEFORE,
    RANKS,
    STEP,
    Dead,
    check_reported,
    data_of,
    model_of,
    node_steps,
    part_of,
)
from tests.hub_server import TOKEN, HubServer
from tests.object_store import Bucket
from tests.sharded import write_sharded

JOB = "0123abcd"
PULLED = "me/pulled"
WATCHED = ROOT / "fixtures/peft_checkpointer/checkpoint/checkpoint-2"


def settings_for(hub: HubServer) -> dict[str, str]:
    """Returns the environment of the host of commands that talk to it."""
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


OLD_STEP, NEW_STEP = f"checkpoint-{BEFORE}", f"checkpoint-{STEP}"


def upload(fault: dict[str, Any], place: str) -> None:
    """Is the process that uploads."""
    from ckptkit.writer.upload.uploader import main

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    sys.argv = ["uploader", str(connection.detach()), "0"]
    arm(Fault(**fault))
    main()


class Connection:
    """The trainer's end of the connection to a process that uploads."""

    def __init__(self, host: CommandHost, fault: Fault, scratch: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            place = scratch.with_suffix(".socket")
            place.unlink(missing_ok=True)
            listener.bind(str(place))
            listener.listen()
            self._child = host.start(upload, fault, str(place))
            self._socket, _ = listener.accept()
            place.unlink()
        self._socket.settimeout(120)
        self._channel = Channel(self._socket)

    def ask(self, request: UploadFiles | FinishUpload) -> Written | StepCommitted | Failed:
        try:
            self._channel.send(request)
            while isinstance(answer := self._channel.receive(), WriteProgress):
                pass
        except ConnectionError:
            answer = None
        if answer is None:
            raise Dead
        assert isinstance(answer, Written | StepCommitted | Failed)
        return answer

    def close(self) -> None:
        self._socket.close()
        self._child.wait()


@contextmanager
def uploader(host: CommandHost, fault: Fault, scratch: Path) -> Iterator[Connection]:
    connection = Connection(host, fault, scratch)
    try:
        yield connection
    finally:
        connection.close()


@dataclass
class Uploading:
    """The process that uploads a step of two nodes, commits it in the store, and retires one."""

    host: CommandHost
    bucket: Bucket
    place: Path
    process: str = "uploader"
    work: str = "a step of two nodes to S3 over an earlier one, its commit, a step retired"
    sends: bool = True
    committed: bool = False

    @property
    def remote(self) -> Remote:
        return Remote(f"{self.bucket.url}/run", self.bucket.store.options)

    def prepare(self, folder: Path) -> None:
        shutil.copytree(node_steps(str(self.place))[0], folder)
        self.bucket.clear()
        self.bucket.put_tree(model_of(str(self.place.with_name("model")))[0], "run")
        store = RunStore(self.remote)
        take_run(store, JOB)
        run_identity(store)

    def play(self, folder: Path, fault: Fault) -> None:
        with uploader(self.host, fault, folder) as process:
            try:
                self.committed = False
                self.committed = self._upload(process, folder, "0123abcd-1", fault)
            except Dead:
                assert fault.act == KILL, "the process is gone"

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        whole = node_steps(str(self.place))[2]
        old = model_of(str(self.place.with_name("model")))[1][0]
        seen = self._whole_steps()
        require(that=bool(seen), otherwise="no step is left")
        for name, data in seen.items():
            fits = name == OLD_STEP or data in (whole, old)
            require(that=fits, otherwise=f"{name} has neither the old bytes nor the new")
        is_new = seen.get(NEW_STEP) == whole
        require(that=OLD_STEP in seen or is_new, otherwise="retired before its successor was whole")
        if self.committed:
            require(that=is_new, otherwise="the step was reported, and is not there")
            check_reported(fault, reached, beside=str(folder))
        for rank in range(RANKS):
            name = part_of(folder / str(rank)).final.name
            expected = _parts(data_of(node_steps(str(self.place))[0] / str(rank) / name))
            there = _parts(data_of(folder / str(rank) / name))
            require(that=there == expected, otherwise=f"the part of node {rank} changed")
        self._start_again()
        with uploader(self.host, undisturbed(fault), folder) as process:
            assert self._upload(process, folder, "0123abcd-1", undisturbed(fault))
        seen = self._whole_steps()
        require(that=seen == {NEW_STEP: whole}, otherwise=f"again: {[*seen]}")
        left = [key for key in self.bucket.keys("run/checkpoint") if "/.ranks/" in key]
        require(that=not left, otherwise=f"again: {left} is left")
        unfinished = self.bucket.unfinished_uploads()
        require(that=not unfinished, otherwise=f"again: uploads of {unfinished} are unfinished")
        return len(seen) + RANKS + 1

    def _start_again(self) -> None:
        """Does what the next job does when it opens the run."""
        store = RunStore(self.remote)
        take_run(store, JOB)
        store.abort_unfinished()
        for step in unfinished_steps(store.entries().keys()):
            remove_unfinished(store, step)

    def _upload(self, process: Connection, folder: Path, attempt: str, fault: Fault) -> bool:
        for rank in range(RANKS):
            source = str(part_of(folder / str(rank)).final)
            records = (f".ranks/{rank}.json",)
            request = UploadFiles(attempt, self.remote, NEW_STEP, JOB, source, records)
            if isinstance(process.ask(request), Failed):
                assert fault.act in ERRORS
                return False
        whole = part_of(folder / "0").commit(node_steps(str(self.place))[1])
        finish = FinishUpload(
            *(attempt, self.remote, NEW_STEP, JOB, whole.proofs, whole.manifest),
            remove=(OLD_STEP,),
            visible_seconds=1.0,
        )
        return isinstance(process.ask(finish), StepCommitted)

    def _whole_steps(self) -> dict[str, dict[str, bytes]]:
        """Returns the files of the steps that look whole, after a check that they are."""
        keys, found = self.bucket.keys("run/"), {}
        for key in keys:
            if key.endswith(f"/{MANIFEST_NAME}"):
                step = key.split("/")[1]
                manifest = parse_manifest(self.bucket.get(key), where=key)
                files = {path: f"run/{step}/{path}" for path in manifest.files}
                require(that=set(files.values()) <= {*keys}, otherwise=f"{step} lacks files")
                found[step] = {path: self.bucket.get(key) for path, key in files.items()}
        return found


def _parts(data: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: found for path, found in data.items() if not path.endswith(".uploaded")}


@cache
def sharded_at(place: str) -> Path:
    """Returns a checkpoint with a tensor that takes two parts of an upload."""
    import torch

    torch.manual_seed(7)
    tensors = {"layers.0.weight": torch.randn(1600, 1024), "layers.0.norm": torch.randn(1024)}
    folder = Path(place) / "sharded"
    write_sharded(folder, tensors, ranks=2)
    return folder


@dataclass
class WritingToStore:
    """`consolidate` to a URL."""

    host: CommandHost
    bucket: Bucket
    place: Path
    process: str = "command"
    work: str = "consolidate to S3"
    sends: bool = True
    status: int = 0
    expected: dict[str, bytes] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        self.bucket.clear()

    def play(self, folder: Path, fault: Fault) -> None:  # noqa: ARG002
        self.status = self._run(fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:  # noqa: ARG002
        check_status(self.status, fault, reached)
        found = self._visible()
        self.expected = self.expected or found
        require(that=found in ({}, self.expected), otherwise=f"half an output: {[*found]}")
        require(that=bool(found) or self.status != 0, otherwise="done, and nothing is there")
        status = self._run(undisturbed(fault))
        require(that=status in {0, 5}, otherwise=f"again: {self.host.output.read_text()[-500:]}")
        if status and not found:  # objects of the output are there, and its manifest is not
            status = self._run(undisturbed(fault), "--overwrite")
        found = self._visible()
        differ = [
            key for key in {*found, *self.expected} if found.get(key) != self.expected.get(key)
        ]
        require(that=not differ, otherwise=f"again: other {differ}, status {status}")
        out = Place(f"{self.bucket.url}/out", self.bucket.store.options)
        require(that=ckptkit.verify(out).ok, otherwise="again: the output is not proven")
        if status == 0:
            hidden = [key for key in self.bucket.keys("out/") if "/.ckptkit-" in key]
            left = hidden + self.bucket.unfinished_uploads()
            require(that=not left, otherwise=f"again: {left} is left")
        return 1

    def _run(self, fault: Fault, *options: str) -> int:
        source = sharded_at(str(self.place))
        arguments = ["consolidate", source, f"{self.bucket.url}/out", "--names", "live", *options]
        return self.host.run(fault, [*arguments, *self.bucket.store.arguments("--dst-option")])

    def _visible(self) -> dict[str, bytes]:
        """Returns the files of the output, nothing where it has no manifest."""
        keys = self.bucket.keys("out/")
        if f"out/{MANIFEST_NAME}" not in keys:
            return {}
        return {
            key: self.bucket.get(key)
            for key in keys
            if "/.ckptkit-" not in key and not key.endswith(MANIFEST_NAME)
        }


@dataclass
class Pushing:
    """`push`: one commit and one tag, however often it is killed."""

    host: CommandHost
    hub: HubServer
    place: Path
    process: str = "command"
    work: str = "push of a model, with a tag"
    sends: bool = True
    status: int = 0

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        self.hub.clear()

    def play(self, folder: Path, fault: Fault) -> None:  # noqa: ARG002
        self.status = self._run(fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:  # noqa: ARG002
        check_status(self.status, fault, reached)
        made = _commits(self.hub, "me/model")
        require(that=len(made) <= 1, otherwise=f"{len(made)} commits")
        status = self._run(undisturbed(fault))
        require(that=status == 0, otherwise=f"again: {self.host.output.read_text()[-500:]}")
        made = _commits(self.hub, "me/model")
        require(that=len(made) == 1, otherwise=f"again: {len(made)} commits")
        repo = self.hub.repo("me/model")
        require(that=repo.tags == {"step-30": made[0]}, otherwise=f"again: tags {repo.tags}")
        weights = _model(str(self.place)) / "model.safetensors"
        there = self.hub.read("me/model", weights.name)
        require(that=there == weights.read_bytes(), otherwise="again: other weights")
        return 1

    def _run(self, fault: Fault) -> int:
        arguments = ["push", _model(str(self.place)), "me/model", "--tag", "step-30"]
        return self.host.run(fault, [*arguments, "--names", "live"])


def _commits(hub: HubServer, repo: str) -> list[str]:
    if not hub.has(repo):
        return []
    titled = [commit for commit in hub.repo(repo).commits if commit.files]
    return [commit.oid for commit in titled if "model.safetensors" in commit.files]


@cache
def _model(place: str) -> Path:
    from tests.hub_models import consolidated

    return consolidated(Path(place), seed=1)


@dataclass
class Pulling:
    """`pull`: a folder that is there whole or not at all."""

    host: CommandHost
    hub: HubServer
    place: Path
    process: str = "command"
    work: str = "pull of a model"
    sends: bool = True
    status: int = 0

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        if not self.hub.has(PULLED):
            model = _model(str(self.place)).iterdir()
            self.hub.put(PULLED, {path.name: path.read_bytes() for path in model})

    def play(self, folder: Path, fault: Fault) -> None:
        self.status = self._run(folder, fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        notes_of_client = folder / ".out.ckptkit-pull/files/.cache"
        check_status(self.status, fault, reached, beside=str(notes_of_client))
        out = folder / "out"
        found = out.is_dir()
        if found:
            self._compare(out)
        require(that=found or self.status != 0, otherwise="done, and nothing is there")
        status = self._run(folder, undisturbed(fault))
        require(
            that=status == (5 if found else 0),
            otherwise=f"again: {status} {self.host.output.read_text()[-500:]}",
        )
        self._compare(out)
        left = [path.name for path in folder.iterdir() if path != out]
        require(that=not left, otherwise=f"again: {left} is left")
        return 1 + found

    def _compare(self, out: Path) -> None:
        for path in _model(str(self.place)).iterdir():
            if not (out / path.name).is_file():
                raise LossError(f"{path.name} is missing")
            same = (out / path.name).read_bytes() == path.read_bytes()
            require(that=same, otherwise=f"{path.name} differs")

    def _run(self, folder: Path, fault: Fault) -> int:
        return self.host.run(fault, ["pull", PULLED, folder / "out"])


@dataclass
class Watching:
    """`watch --once` of a run with two steps: one commit and one tag each."""

    host: CommandHost
    hub: HubServer
    process: str = "command"
    work: str = "watch of a run: two steps, a commit and a tag each"
    sends: bool = True
    status: int = 0

    def prepare(self, folder: Path) -> None:
        from tests.hub_models import add_step

        folder.mkdir()
        self.hub.clear()
        for step in (1, 2):
            add_step(folder, step, WATCHED)

    def play(self, folder: Path, fault: Fault) -> None:
        self.status = self._run(folder, fault)

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        check_status(self.status, fault, reached, beside=str(folder / ".ckptkit"))
        require(that=set(self._pushed().values()) <= {1}, otherwise=f"pushed {self._pushed()}")
        status = self._run(folder, undisturbed(fault))
        require(that=status == 0, otherwise=f"again: {self.host.output.read_text()[-500:]}")
        expected = Counter({1: 1, 2: 1})
        require(that=self._pushed() == expected, otherwise=f"again: pushed {self._pushed()}")
        repo = self.hub.repo("org/run")
        by_commit = {commit.oid: commit.message for commit in repo.commits}
        tags = {tag: by_commit[oid].split(" (")[0] for tag, oid in repo.tags.items()}
        require(
            that=tags == {f"step-{n}": f"Step {n}" for n in (1, 2)}, otherwise=f"again: tags {tags}"
        )
        return 2

    def _pushed(self) -> Counter[int]:
        if not self.hub.has("org/run"):
            return Counter()
        titles = [re.match(r"Step (\d+) ", one.message) for one in self.hub.repo("org/run").commits]
        return Counter(int(title[1]) for title in titles if title)

    def _run(self, folder: Path, fault: Fault) -> int:
        arguments = ["watch", folder, "--push", "org/run", "--once", "--adapter", "default"]
        return self.host.run(fault, arguments)
