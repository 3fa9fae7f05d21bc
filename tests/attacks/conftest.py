"""What every attack needs: a checkpoint to change, a place for the output, and a witness."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attacks.archives import WITNESS
from tests.damaged_checkpoints import blobs, change_metadata, copied, out, refusal

__all__ = ["blobs", "change_metadata", "copied", "out", "refusal"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for what an attacker has written."""
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that comes into being when the witness module is imported, or a command runs.

    At the end of the test it must not be there.
    """
    folder = tmp_path / "importable"
    folder.mkdir()
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w').close()\ndef call(*_): pass\n"
    (folder / f"{WITNESS}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    yield trace
    assert not trace.exists(), "something of the attacker's was run"
    assert WITNESS not in sys.modules


@pytest.fixture
def bounded() -> Callable[..., object]:
    @contextmanager
    def limit(*, seconds: float, most_bytes: int) -> Iterator[None]:
        tracemalloc.start()
        began = time.process_time()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert time.process_time() - began < seconds
        assert peak < most_bytes, f"{peak:,} bytes were taken"

    return limit
