"""Frozen weights are linked as long as nothing speaks against it, and written again otherwise."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit.storage.local.disk import Disk
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save.file_layout import SavePlan, plan_save
from ckptkit.training.save.frozen import FrozenFiles, WaveFiles
from ckptkit.training.save.saver import Save
from ckptkit.training.save.staging import SharedBuffer, Stager
from ckptkit.training.state.memory_changes import watched_by
from ckptkit.training.state.pieces import Piece
from ckptkit.writer.messages import ByteCounter, Persist, Written
from ckptkit.writer.persist import Persister
from tests.unit.training.builders import whole_piece

NATIVE = Disk()
UNIT = "pytorch_model_fsdp_0"
FROZEN = f"{UNIT}/__0_frozen_0.distcp"


def frozen_piece(name: str, parameter: torch.Tensor) -> Piece:
    return whole_piece(name, parameter.detach(), UNIT, watched=watched_by(parameter))


class Job:
    """One rank that saves a base and an adapter, its writer in the same process."""

    def __init__(self, run: Path, *, in_flight: int = 1, limit_bytes: int | None = None) -> None:
        torch.manual_seed(0)
        self.run = run
        self.base = nn.Parameter(torch.randn(256, 512), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(300, 200).T, requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(256, 8))
        self.files = FrozenFiles("0123abcd", 0, in_flight)
        self.disk = NATIVE
        self.replaced: torch.Tensor | None = None
        self.notes: tuple[str, ...] = ()
        self.further: dict[str, torch.Tensor] = {}  # that is trained
        self._limit_bytes = limit_bytes
        self._buffer = SharedBuffer()
        self.stager = Stager(self._buffer)
        self._count = 0

    def close(self) -> None:
        self.stager.close()
        self._buffer.close()

    def pieces(self) -> list[Piece]:
        named = {**self.further, "base": self.base, "turned": self.turned, "adapter": self.adapter}
        return [frozen_piece(name, parameter) for name, parameter in named.items()]

    def planned(self, pieces: list[Piece]) -> SavePlan:
        return plan_save(
            pieces,
            [True] * len(pieces),
            rank=0,
            limit_bytes=self._limit_bytes,
            changing=self.files.changing,
        )

    def begin(self) -> tuple[Save, SavePlan, list[Piece], list[WaveFiles], bool]:
        self._count += 1
        name = f"0123abcd-{self._count}-1"
        folder = self.run / f".checkpoint-{self._count}.ckptkit-0123abcd-1"
        save = Save(self._count, name, self._count, folder, folder, {}, SaveHandle(self._count))
        pieces = self.pieces()
        plan = self.planned(pieces)
        return save, plan, pieces, *self.files.files_for(plan, pieces, self.stager, save)

    def save(self) -> Path:
        save, plan, pieces, waves, with_frozen = self.begin()
        self.answers: list[Written] = []
        for number, wave in enumerate(waves):
            self.stager.stage(plan, pieces, number, frozen=with_frozen).wait()
            persister = Persister(self.disk)
            persister.attach(os.dup(self._buffer.descriptor), self._buffer.size_bytes)
            answer = persister.persist(
                Persist(
                    save.name,
                    str(save.folder),
                    wave.images,
                    links=wave.links,
                    keeps=wave.keeps,
                    ranges=wave.ranges,
                ),
                ByteCounter(),
            )
            self.answers.append(answer)
            self.files.take_answer(wave, save, answer)
        self.notes = tuple(note for answer in self.answers for note in answer.notes)
        return save.folder

    def begins_linked(self) -> bool:
        """Begins a save whose writer answers at once, and tells whether frozen files are linked."""
        save, _, _, waves, with_frozen = self.begin()
        self.files.take_answer(waves[-1], save, Written("", 0, 0.0, 0.0))
        return not with_frozen

    def linked(self) -> bool:
        """Saves, and tells whether the frozen files were linked."""
        folder = self.save()
        linked = sum(answer.linked_bytes for answer in self.answers)
        assert bool(linked) == (sum(answer.size_bytes for answer in self.answers) < 100_000)
        files = {image.path for wave in self.planned(self.pieces()).images for image in wave}
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.distcp")} == files
        return bool(linked)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_the_second_save_links_the_frozen_file_and_writes_only_the_rest(job: Job) -> None:
    first = job.save()
    with torch.no_grad():
        job.adapter.add_(1)
    second = job.save()
    (answer,) = job.answers
    assert (first / FROZEN).samefile(second / FROZEN)
    assert answer.linked_bytes == (second / FROZEN).stat().st_size
    assert answer.size_bytes == (second / UNIT / "__0_0.distcp").stat().st_size
    assert job.adapter.detach().numpy().tobytes() in (second / UNIT / "__0_0.distcp").read_bytes()


def test_a_change_that_torch_counts_has_all_written_again_once(job: Job) -> None:
    assert [job.linked(), job.linked()] == [False, True]
    with torch.no_grad():
        job.turned[3, 4] += 1
    folder = job.save()
    data = (folder / FROZEN).read_bytes()
    assert job.turned.detach().contiguous().numpy().tobytes() in data
    assert job.linked()


def test_what_is_trained_may_come_and_grow_meanwhile(job: Job) -> None:
    job.save()
    job.further["moment"] = torch.zeros(100, 8)  # as optimizers have it from the first step on
    assert job.linked()
    job.further["moment"] = torch.zeros(1000, 8)
    assert job.linked()


def test_another_frozen_weight_has_all_written_again(job: Job) -> None:
    job.save()
    job.further["more"] = nn.Parameter(torch.zeros(300, 200), requires_grad=False)
    assert [job.linked(), job.linked()] == [False, True]
    job.further["same size"] = job.further.pop("more")
    assert [job.linked(), job.linked()] == [False, True]


def changed_data(job: Job) -> None:
    job.base.data = job.base.data.clone()


def other_parameter(job: Job) -> None:
    job.replaced = job.base  # and still there
    job.base = nn.Parameter(job.base.data, requires_grad=False)


def trained_from_now_on(job: Job) -> None:
    job.base.requires_grad_(True)


def inference_mode(job: Job) -> None:
    with torch.inference_mode():
        made = nn.Parameter(torch.zeros(256, 512), requires_grad=False)
    job.base = made


def behind_the_back(job: Job) -> None:
    job.turned.data *= 1.5


def kept_files(job: Job) -> list[Path]:
    return sorted((job.run / ".ckptkit").rglob("*.distcp"))


def file_gone(job: Job) -> None:
    (path,) = kept_files(job)
    path.unlink()


def other_file(job: Job) -> None:
    (path,) = kept_files(job)
    status, data = path.stat(), path.read_bytes()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def file_changed(job: Job) -> None:
    step = job.run / ".checkpoint-1.ckptkit-0123abcd-1"
    status = (step / FROZEN).stat()
    with (step / FROZEN).open("r+b") as file:
        file.write(b"\0")
    os.utime(step / FROZEN, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def as_many_links_as_may_be(job: Job) -> None:
    (path,) = kept_files(job)
    for number in range(1000):
        os.link(path, job.run / f"{number}.link")


@pytest.mark.parametrize(
    "change",
    [
        changed_data,
        other_parameter,
        trained_from_now_on,
        inference_mode,
        behind_the_back,
        file_gone,
        other_file,
        file_changed,
        as_many_links_as_may_be,
        lambda job: job.files.forget(),
    ],
)
def test_in_doubt_everything_is_written(job: Job, change: Callable[[Job], None]) -> None:
    assert [job.linked(), job.linked()] == [False, True]
    change(job)
    folder = job.save()
    assert not job.answers[0].linked_bytes
    written = b"".join(path.read_bytes() for path in folder.rglob("*.distcp"))
    for parameter in (job.base, job.turned, job.adapter):
        assert parameter.detach().contiguous().numpy().tobytes() in written


def test_a_change_of_a_single_row_that_torch_does_not_count_is_found_in_time(job: Job) -> None:
    job.save()
    job.base.data[200].add_(1)
    saves = 0
    while job.begins_linked():
        saves += 1
        assert saves <= 128
    assert saves > 0  # it was not by chance in the first part that was looked at


def test_one_hundredth_of_the_bytes_is_looked_at_in_each_save(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save()
    fetched: list[int] = []

    def fetch(
        *arguments: object, call: Callable[..., list[memoryview]] = job.stager.fetch
    ) -> object:
        found = call(*arguments)
        fetched.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(job.stager, "fetch", fetch)
    for _ in range(128):
        job.begins_linked()
    size = 4 * (job.base.numel() + job.turned.numel())
    assert size <= sum(fetched) <= 3 * size  # small weights are cut into pages
    assert max(fetched) < size / 40


def test_frozen_weights_in_waves_are_linked_as_well(tmp_path: Path) -> None:
    job = Job(tmp_path, limit_bytes=1 << 20)
    job.base = nn.Parameter(torch.randn(1024, 512), requires_grad=False)
    assert not job.linked()
    assert len(job.answers) == 3
    assert job.linked()
    assert len(job.answers) == 1
    # What was fetched to be looked at lies where another wave has its headers.
    one, two, three = (tmp_path / f".checkpoint-{n}.ckptkit-0123abcd-1" for n in (1, 2, 3))
    with torch.no_grad():
        job.base.mul_(1)
    assert not job.linked()
    for path in one.rglob("*.distcp"):
        name = path.relative_to(one)
        assert path.read_bytes() == (two / name).read_bytes() == (three / name).read_bytes()
    job.close()


def test_where_links_are_refused_it_is_said_once_and_all_is_always_written(job: Job) -> None:
    job.disk = dataclasses.replace(NATIVE, hard_links=False)
    assert not job.linked()
    assert [note for note in job.notes if "hard links were refused" in note]
    assert not job.linked()
    assert not [note for note in job.notes if "hard links" in note]
    assert kept_files(job) == []


def test_after_a_save_that_did_not_come_to_link_all_is_written(job: Job) -> None:
    job.save()
    *_, with_frozen = job.begin()
    assert not with_frozen
    assert not job.linked()
    assert job.linked()


def test_two_saves_in_flight_may_link_the_same_file(tmp_path: Path) -> None:
    job = Job(tmp_path, in_flight=2)
    job.save()
    *_, with_frozen = job.begin()
    assert not with_frozen
    assert job.linked()
    job.close()


def test_what_no_save_will_link_any_more_is_removed(job: Job) -> None:
    job.save()
    (first,) = kept_files(job)
    with torch.no_grad():
        job.base.add_(1)
    job.save()
    (second,) = kept_files(job)
    assert second != first
    job.files.close()
    assert not (job.run / ".ckptkit" / "0123abcd").exists()
    assert (job.run / ".checkpoint-2.ckptkit-0123abcd-1" / FROZEN).is_file()


def test_what_was_kept_is_removed_once_nothing_is_frozen_any_more(job: Job) -> None:
    job.save()
    assert kept_files(job)
    job.base.requires_grad_(True)
    job.turned.requires_grad_(True)
    job.save()
    assert kept_files(job) == []


@pytest.mark.parametrize("counted", [True, False])
def test_a_weight_that_changes_from_save_to_save_does_not_keep_the_rest_from_being_linked(
    counted: bool, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ckptkit")
    average = nn.Parameter(torch.randn(40, 50), requires_grad=False)
    job.further["average"] = average

    def saved() -> bool:
        with torch.no_grad():
            (average if counted else average.data).mul_(0.9)
        folder = job.save()
        written = b"".join(path.read_bytes() for path in folder.rglob("*.distcp"))
        for parameter in (average, job.base, job.turned):
            assert parameter.detach().contiguous().numpy().tobytes() in written
        return bool(sum(answer.linked_bytes for answer in job.answers))

    assert [saved() for _ in range(6)] == [False, False, False, False, True, True]
    assert "1 of them change from save to save" in caplog.text
    # Where it changes now and then only, it is written then.
    job.base.data.mul_(0.5)
    assert [saved() for _ in range(3)] == [False, True, True]
    job.base.data.mul_(0.5)
    assert [saved() for _ in range(2)] == [False, True]
    assert len(kept_files(job)) == 1


@pytest.mark.slow
def test_weights_that_are_gone_are_not_kept_in_memory(job: Job) -> None:
    job.save()
    storage = weakref.ref(job.base.untyped_storage())
    held = weakref.ref(job.base)
    job.base = nn.Parameter(torch.zeros(2), requires_grad=False)
    gc.collect()
    assert held() is None
    assert storage() is None
    assert not job.begin()[3][0].links


def test_the_log_says_why_frozen_weights_are_written_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ckptkit")
    job.save()
    behind_the_back(job)
    job.save()
    assert (
        "step 2: frozen weights are written again: model.turned changed without a new"
        " version counter" in caplog.text
    )
    job.files.forget()
    job.save()
    assert "step 3: frozen weights are written again: a state was loaded" in caplog.text
