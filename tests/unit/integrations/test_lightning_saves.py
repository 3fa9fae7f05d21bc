"""The saves of one Lightning strategy, in one process: paths, removals and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.errors import OutputExistsError, ResumeError, UsageError
from ckptkit.integrations.lightning import StrategySaves, load
from ckptkit.training import SaveReport
from ckptkit.training.settings import check_options

MODEL = torch.nn.Linear(4, 4)
FILES = {"meta.pt": b"what Lightning keeps beside the shards"}


@pytest.fixture
def saves() -> Iterator[StrategySaves]:
    opened = StrategySaves({})
    yield opened
    opened.close()


def save(saves: StrategySaves, path: Path, step: int | None = None) -> None:
    saves.save(path, {"model": MODEL}, files=FILES, step=step)


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_an_unwanted_checkpoint_stays_until_a_later_one_is_complete(
    saves: StrategySaves, tmp_path: Path
) -> None:
    save(saves, tmp_path / "a.ckpt")
    saves.wait()
    (tmp_path / "b.ckpt" / "in the way").mkdir(parents=True)
    save(saves, tmp_path / "b.ckpt")
    saves.remove(tmp_path / "a.ckpt")
    saves.wait()
    assert there(tmp_path) == ["a.ckpt", "b.ckpt"]  # the save of b has failed
    save(saves, tmp_path / "c.ckpt")
    with pytest.raises(OutputExistsError):
        saves.close()
    assert there(tmp_path) == ["b.ckpt", "c.ckpt"]


def test_a_checkpoint_that_is_saved_again_is_wanted_again(
    saves: StrategySaves, tmp_path: Path
) -> None:
    save(saves, tmp_path / "last.ckpt")
    saves.remove(tmp_path / "gone.ckpt")
    saves.remove(tmp_path / "last.ckpt")
    save(saves, tmp_path / "last.ckpt")
    saves.close()
    assert there(tmp_path) == ["last.ckpt"]


def test_names_that_tell_the_step_are_taken_at_their_word(
    saves: StrategySaves, tmp_path: Path
) -> None:
    reports: list[SaveReport] = []
    saves = StrategySaves({"listener": reports.append})
    save(saves, tmp_path / "checkpoint-7", step=3)
    save(saves, tmp_path / "checkpoint_8", step=3)
    save(saves, tmp_path / "epoch=1.ckpt", step=3)
    save(saves, tmp_path / "checkpoint_010", step=3)  # which no step of a run is called
    save(saves, tmp_path / "else" / "unnumbered")
    saves.close()
    assert [(report.path.name, report.step) for report in reports] == [
        ("checkpoint-7", 7),
        ("checkpoint_8", 8),
        ("epoch=1.ckpt", 3),
        ("checkpoint_010", 3),
        ("unnumbered", 5),
    ]


def test_a_directory_is_loaded_where_nothing_can_be_written(
    saves: StrategySaves, tmp_path: Path
) -> None:
    save(saves, tmp_path / "a.ckpt")
    saves.close()
    before = there(tmp_path), there(tmp_path / "a.ckpt")
    other = torch.nn.Linear(4, 4)
    load({"model": other}, tmp_path / "a.ckpt", check_options({"timeout_seconds": 10}))
    assert torch.equal(other.weight, MODEL.weight)
    assert (there(tmp_path), there(tmp_path / "a.ckpt")) == before


class Shy(torch.optim.SGD):
    """Does not show its state once it is told to hide it."""

    hides = False

    def __getattribute__(self, name: str) -> Any:
        if name == "state" and object.__getattribute__(self, "hides"):
            raise RuntimeError("the state lies on the moon")
        return super().__getattribute__(name)


def test_an_optimizer_that_cannot_go_on_is_reset_as_the_message_says(
    saves: StrategySaves, tmp_path: Path
) -> None:
    shy = Shy(MODEL.parameters(), lr=0.1, momentum=0.9)
    shy.hides = True
    saves.save(tmp_path / "a.ckpt", {"model": MODEL, "optimizer": shy}, files=FILES, step=1)
    saves.close()
    other = torch.nn.Linear(4, 4)
    state = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
    with pytest.raises(ResumeError, match="was not saved with this step") as caught:
        load(state, tmp_path / "a.ckpt", check_options({}))
    option = "unfit_optimizer='reset' in checkpointer={...} of the strategy"
    assert option in caught.value.hint
    load(state, tmp_path / "a.ckpt", check_options({"unfit_optimizer": "reset"}))
    assert torch.equal(other.weight, MODEL.weight)


def test_options_that_lightning_decides_about_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the option 'keep_last' cannot be passed"):
        StrategySaves({"keep_last": 2})
