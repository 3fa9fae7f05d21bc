"""Files that several steps have in common: kept, linked, listed, and never half a step."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch import nn

import ckptkit
from ckptkit.core.crc import crc32
from ckptkit.core.errors import SaveError, UnsafePathError, WriterError
from ckptkit.storage.local.disk import Disk
from ckptkit.training import Checkpointer
from ckptkit.training.save import saver as saves
from ckptkit.training.save.writer_process import WriterTimeouts
from ckptkit.writer.commit import commit
from ckptkit.writer.messages import ByteCounter, Link, Persist, Written
from tests.crash import writing
from tests.crash.writer_programs import writer_running

NATIVE = Disk()
persist = writing.persist
ROOT = Path(__file__).resolve().parents[2]
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILE = f"{writing.MODEL}/__0_0.distcp"


def keeping(run: Path, disk: Any = NATIVE) -> tuple[Link, Written]:
    """Has the model's file of a first step written and kept."""
    save = writing.Save(run, "a-1", 1, 400)
    memory, request = save.persist(0, writing.usual_units(0, 1))
    image = next(image for image in memory.images if image.path == FILE)
    link = Link(FILE, str(run / ".ckptkit" / "a" / "kept" / FILE), image.size_bytes)
    ranges = ((image.archives[0].start, image.archives[0].stop), (image.start, image.start + 7))
    answer = persist(memory, replace(request, keeps=(link,), ranges=ranges), disk)
    assert answer.proof is not None
    commit(save.commit([answer.proof]), NATIVE, ByteCounter())
    return link, answer


def linking(run: Path, link: Link) -> tuple[Any, Any, Persist]:
    """Returns a second step that takes the model's file from the first one."""
    save = writing.Save(run, "a-2", 1)
    memory, request = save.persist(0, writing.usual_units(0, 1))
    images = tuple(image for image in memory.images if image.path != link.path)
    return save, memory, replace(request, images=images, links=(link,))


def test_a_linked_file_is_listed_and_proved_like_one_that_was_written(tmp_path: Path) -> None:
    link, first = keeping(tmp_path)
    assert first.kept
    assert len(first.sums) == 2
    assert first.sums[1] == crc32(Path(link.kept).read_bytes()[:7])
    save, memory, request = linking(tmp_path, link)
    answer = persist(memory, request)
    assert answer.proof is not None
    assert answer.linked_bytes == link.size_bytes
    assert answer.size_bytes + link.size_bytes == first.size_bytes
    committed = commit(save.commit([answer.proof]), NATIVE, ByteCounter())
    assert (save.final / FILE).samefile(Path(link.kept))
    manifest = json.loads((save.final / "ckptkit.json").read_text())
    assert manifest["files"][FILE]["size_bytes"] == link.size_bytes
    assert committed.size_bytes > link.size_bytes
    shutil.rmtree(tmp_path / "checkpoint-400")
    assert ckptkit.verify(save.final).ok


def test_a_linked_file_whose_bytes_changed_is_found_by_verify(tmp_path: Path) -> None:
    link, _ = keeping(tmp_path)
    save, memory, request = linking(tmp_path, link)
    proof = persist(memory, request).proof
    commit(save.commit([proof]), NATIVE, ByteCounter())
    with (tmp_path / "checkpoint-400" / FILE).open("r+b") as file:
        file.seek(link.size_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert not ckptkit.verify(save.final).ok


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSPC]
)
def test_a_link_that_is_refused_costs_no_save(number: int, tmp_path: Path) -> None:
    class Refusing(Disk):
        def link_file(self, _path: Path, _name: Path) -> None:
            raise OSError(number, os.strerror(number))

    _, answer = keeping(tmp_path, Refusing())
    assert not answer.kept
    assert answer.sums == ()
    (note,) = (note for note in answer.notes if "links" in note)
    assert os.strerror(number) in note
    assert ckptkit.verify(tmp_path / "checkpoint-400").ok


def test_without_hard_links_on_the_platform_nothing_is_kept(tmp_path: Path) -> None:
    link, answer = keeping(tmp_path, dataclasses.replace(NATIVE, hard_links=False))
    assert not answer.kept
    assert not Path(link.kept).exists()


def test_a_kept_file_that_is_gone_or_short_is_an_error_and_no_step(tmp_path: Path) -> None:
    link, _ = keeping(tmp_path)
    _, memory, request = linking(tmp_path, link)
    with Path(link.kept).open("r+b") as file:
        file.truncate(10)
    with pytest.raises(SaveError, match="bytes of an earlier save, found 10"):
        persist(memory, request)
    Path(link.kept).unlink()
    shutil.rmtree(request.folder)
    with pytest.raises(FileNotFoundError):
        persist(memory, request)


def test_a_link_leads_nowhere_outside_of_the_folder(tmp_path: Path) -> None:
    link, _ = keeping(tmp_path)
    _, memory, request = linking(tmp_path, link)
    with pytest.raises(UnsafePathError):
        persist(memory, replace(request, links=(replace(link, path="../x"),)))


KILLED = """
import os, signal
from ckptkit.writer import process as main
from ckptkit.writer import persist
def take(links, *arguments, call=persist.link_kept):
    call(links, *arguments)
    if links and os.path.exists({file!r}):
        os.unlink({file!r})
        os.kill(os.getpid(), signal.SIGKILL)
persist.link_kept = take
main.main()
"""


def test_a_writer_that_is_killed_between_link_and_record_costs_that_save_only(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "kill"
    command = partial(writer_running, KILLED.format(file=str(mark)))
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 2))
    model[0].requires_grad_(False)
    run, state = tmp_path / "run", {"model": model}
    with (
        mock.patch.object(saves, "WriterTimeouts", partial(WriterTimeouts, command=command)),
        Checkpointer(run) as saver,
    ):
        reports = [saver.save(step, state).report(60) for step in (1, 2)]
        assert [bool(report.linked_bytes) for report in reports] == [False, True]
        mark.touch()
        error = saver.save(3, state).exception(60)
        assert isinstance(error, WriterError), error
        assert "SIGKILL" in str(error)
        reports = [saver.save(step, state).report(60) for step in (4, 5)]
        assert [bool(report.linked_bytes) for report in reports] == [False, True]
        assert "linked" in str(reports[1])
        shutil.rmtree(run / "checkpoint-4")
        other = {"model": nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 2))}
        assert saver.resume(other) == 5
        assert torch.equal(other["model"].state_dict()["0.weight"], model.state_dict()["0.weight"])
        assert not saver.save(6, state).report(60).linked_bytes  # in doubt after a resume
    left = {path.name for path in run.iterdir()}
    assert left == {".ckptkit", *(f"checkpoint-{step}" for step in (1, 2, 5, 6))}
    assert [path.name for path in (run / ".ckptkit").iterdir()] == ["lock"]
    assert ckptkit.verify(run / "checkpoint-5").ok


@pytest.mark.slow
def test_two_saves_in_flight_and_a_loaded_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 2))
    model[0].requires_grad_(False)
    state = {"model": model}
    with Checkpointer(tmp_path, max_in_flight=2, keep_last=1) as saver:
        saver.save(1, state).result(60)
        handles = [saver.save(step, state) for step in range(2, 8)]
        assert all(handle.report(60).linked_bytes for handle in handles)
        model.load_state_dict({}, strict=False)  # whatever it brought
        assert not saver.save(8, state).report(60).linked_bytes
        model[0].requires_grad_(True)
        assert not saver.save(9, state).report(60).linked_bytes
    step = tmp_path / "checkpoint-9"
    assert ckptkit.verify(step).ok
    assert len(list(step.rglob("*.distcp"))) == 1  # nothing is frozen any more


@ALONE
def test_a_weight_that_is_trained_under_another_name_is_never_linked(tmp_path: Path) -> None:
    again, trained, frozen = (nn.Linear(300, 300, bias=False) for _ in range(3))
    model = nn.Sequential(again, trained, frozen.requires_grad_(False))
    # The same elements under a parameter of its own, whose version counter stands still.
    again.weight = nn.Parameter(trained.weight.data, requires_grad=False)
    reports = []
    with Checkpointer(tmp_path) as saver:
        for step in (1, 2):
            with torch.no_grad():
                trained.weight[7] += 1
            reports.append(saver.save(step, {"model": model}).report(60))
    assert 300 * 300 * 4 < reports[1].linked_bytes < 2 * 300 * 300 * 4
    assert read_by_torch(tmp_path / "checkpoint-2", model) == []


@ALONE
def test_an_average_beside_a_frozen_base_is_written_with_each_save(tmp_path: Path) -> None:
    base, average = nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 2)
    model = nn.Sequential(base, average.requires_grad_(False))
    reports = []
    with Checkpointer(tmp_path, keep_last=1) as saver:
        for step in range(6):
            average.weight.data.mul_(0.9)
            reports.append(saver.save(step, {"model": model}).report(60))
    assert [bool(report.linked_bytes) for report in reports] == [False] * 4 + [True] * 2
    assert read_by_torch(tmp_path / "checkpoint-5", model) == []


@ALONE
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_step_that_another_tool_writes_over_leaves_those_that_share_its_files_whole(
    tmp_path: Path,
) -> None:
    model = nn.Linear(300, 300).requires_grad_(False)
    with Checkpointer(tmp_path) as saver:
        reports = [saver.save(step, {"model": model}).report(60) for step in (1, 2)]
        assert reports[1].linked_bytes
    other = {"model": nn.Linear(300, 300).state_dict()}
    unit = tmp_path / "checkpoint-1" / writing.MODEL
    dcp.save(other, checkpoint_id=unit, no_dist=True)
    assert ckptkit.verify(tmp_path / "checkpoint-2").ok
    assert read_by_torch(tmp_path / "checkpoint-2", model) == []


def read_by_torch(step: Path, model: nn.Module) -> list[str]:
    """Returns the names of the tensors that stock torch finds other than they are."""
    live = model.state_dict()
    like = {name: torch.zeros_like(value) for name, value in live.items()}
    dcp.load({"model": like}, checkpoint_id=step / writing.MODEL, no_dist=True)
    return [name for name, value in live.items() if not torch.equal(like[name], value)]
