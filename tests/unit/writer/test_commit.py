"""Steps that go are removed whole, and nothing else with them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.writer.commit import remove_steps


def test_of_a_retired_link_the_link_alone_goes(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (elsewhere / "data").write_bytes(b"1")
    link, broken = run / "checkpoint-1", run / "checkpoint-2"
    link.symlink_to(elsewhere)
    broken.symlink_to(run / "nothing")
    assert remove_steps([link, broken]) == ([link, broken], [])
    assert not list(run.iterdir())
    assert (elsewhere / "data").read_bytes() == b"1"


def test_a_directory_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-1"
    (step / "unit").mkdir(parents=True)
    (step / "unit" / "data").write_bytes(b"1")
    assert remove_steps([step, tmp_path / "checkpoint-2"]) == ([step], [])
    assert not list(tmp_path.iterdir())
