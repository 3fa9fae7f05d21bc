"""What cannot be removed is an error of ckptkit, and nothing after it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.conversion.delete_source import remove_files
from ckptkit.core.errors import OutputError
from ckptkit.storage.places import place_of


@pytest.mark.parametrize("name", ["record.new", "a", "record"])
def test_a_file_that_cannot_be_removed_is_named(tmp_path: Path, name: str) -> None:
    for file in ("a", "b", "record"):
        (tmp_path / file).write_text("x")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()  # which the system does not remove as a file
    with pytest.raises(OutputError, match="cannot be removed") as refused:
        remove_files(place_of(tmp_path), ["a", "b"], last="record")
    assert "run the same command again" in refused.value.hint
    assert (tmp_path / "record").exists()
    assert (tmp_path / "b").exists() == (name != "record")
