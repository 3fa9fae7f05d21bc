"""What errors say in a traceback."""

from __future__ import annotations

import traceback

from ckptkit.core.errors import MissingFileError, error_from_json


def test_a_traceback_shows_what_to_do() -> None:
    error = MissingFileError("'a' is not there", where="runs/a")
    assert "hint: copy the file back" in "".join(traceback.format_exception(error))


def test_the_hint_comes_once_after_another_process_told_of_the_error() -> None:
    error = error_from_json(MissingFileError("'a' is not there").located("rank 1").to_json())
    assert "".join(traceback.format_exception(error)).count("hint:") == 1
