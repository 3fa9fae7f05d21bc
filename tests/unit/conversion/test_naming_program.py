"""Asking transformers in a process of its own: what can go wrong with that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.conversion import naming_program
from ckptkit.conversion.naming_program import ask_transformers
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import RefusedError
from ckptkit.core.geometry import Loop, Tile
from ckptkit.core.index import Fqn
from ckptkit.hub_names.disk_tensors import (
    HubNames,
    HubTensor,
    NamingRequest,
    names_from_json,
    names_to_json,
)
from ckptkit.hub_names.transformers.program import main

REQUEST = NamingRequest({"model_type": "mixtral"}, None)
Program = Callable[[str], None]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Replaces the program that is started."""

    def replace(code: str) -> None:
        monkeypatch.setattr(naming_program, "_PROGRAM", "roots = {!r}; " + code)

    return replace


def test_a_failure_is_told_by_the_last_line_of_the_log(program: Program) -> None:
    program("import sys; sys.exit('first line\\nValueError: no such layer')")
    with pytest.raises(RefusedError, match="ValueError: no such layer") as caught:
        ask_transformers(REQUEST)
    assert "first line" not in caught.value.message
    assert "--names live" in caught.value.hint


def test_a_silent_failure_is_told_by_its_status(program: Program) -> None:
    program("import os; os._exit(9)")
    with pytest.raises(RefusedError, match="status 9"):
        ask_transformers(REQUEST)


def test_an_answer_that_is_none_is_refused(program: Program) -> None:
    program("import sys; sys.stdout.write('Hello')")
    with pytest.raises(RefusedError, match="no answer"):
        ask_transformers(REQUEST)


def test_it_does_not_wait_for_ever(
    program: Program, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("import time; time.sleep(60)")
    monkeypatch.setattr(naming_program, "_SECONDS", 0.3)
    with pytest.raises(RefusedError, match=r"within 0\.3 s"):
        ask_transformers(REQUEST)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_it_ends_with_the_command(program: Program, started: list[subprocess.Popen[bytes]]) -> None:
    program("import time; time.sleep(60)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # others may have set theirs
    stop = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_transformers(REQUEST)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_a_missing_library_is_told_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def find_spec(name: str) -> str | None:
        return None if name == missing else name

    monkeypatch.setattr(naming_program, "find_spec", find_spec)
    with pytest.raises(RefusedError, match="'mixtral'") as caught:
        ask_transformers(REQUEST)
    assert f"pip install {missing}" in caught.value.hint
    assert "--names live" in caught.value.hint
    assert caught.value.exit_status == 4


def test_a_transformers_without_conversions_is_too_old(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    old = tmp_path_factory.mktemp("old")
    (old / "transformers").mkdir()
    (old / "transformers" / "__init__.py").write_text("__version__ = '4.57.0'")
    code = (
        f"import sys; sys.path.insert(0, {str(old)!r}); from {main.__module__} import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=REQUEST.to_json(), capture_output=True, check=True
    )
    assert b"transformers 4.57.0" in done.stdout
    assert b"5 or newer" in done.stdout


def test_python_files_beside_a_model_do_not_pass_for_libraries(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise SystemExit('was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    finding = "importlib.util.find_spec('transformers').origin"
    program(f"import sys, importlib.util; sys.path[:] = roots; sys.exit({finding})")
    with pytest.raises(RefusedError) as caught:
        ask_transformers(REQUEST)
    assert str(tmp_path) not in caught.value.message


def test_questions_and_answers_survive_the_way() -> None:
    tensors = {Fqn("a"): (BY_NAME["bfloat16"], (2, 3)), Fqn("b"): (BY_NAME["int64"], ())}
    request = NamingRequest({"model_type": "mixtral"}, tensors, (Fqn("x"),))
    assert NamingRequest.from_json(request.to_json()) == request
    assert NamingRequest.from_json(REQUEST.to_json()) == REQUEST
    piece = Fqn("a"), Tile(((0, 0), (0,)), (Loop(3, ((0, 1), (0, 1))), Loop(2, ((1, 1), (0, 3)))))
    names = HubNames(
        "5.23.0",
        {Fqn("b"): (), Fqn("a"): (2, 3)},
        {Fqn("x"): HubTensor(Fqn("x"), (3, 2), (piece,))},
        unsaved=(Fqn("c"),),
        unknown=(Fqn("b"),),
    )
    assert names_from_json(names_to_json(names)) == names
