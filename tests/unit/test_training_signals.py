"""Signals are noted, earlier handlers are called, and put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.training.signals import SignalWatch


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    names = (signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(name) for name in names]
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


def test_each_arrival_is_told_once() -> None:
    watch = SignalWatch()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR2)
    assert [watch.take(), watch.take(), watch.take()] == ["SIGTERM", "SIGUSR2", None]
    watch.close()


def test_an_earlier_handler_is_called_and_put_back() -> None:
    calls: list[int] = []

    def earlier(number: int, _frame: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGUSR2, earlier)
    watch = SignalWatch(("SIGUSR2",))
    signal.raise_signal(signal.SIGUSR2)
    assert calls == [signal.SIGUSR2]
    assert watch.take() == "SIGUSR2"
    watch.close()
    assert signal.getsignal(signal.SIGUSR2) is earlier


def test_the_default_action_is_not_taken_and_comes_back() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = SignalWatch(("SIGTERM",))
    signal.raise_signal(signal.SIGTERM)
    assert watch.take() == "SIGTERM"
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_was_put_over_ours_stays() -> None:
    watch = SignalWatch(("SIGUSR2",))
    ours = signal.getsignal(signal.SIGUSR2)
    assert callable(ours)

    def later(number: int, frame: FrameType | None) -> None:
        ours(number, frame)

    signal.signal(signal.SIGUSR2, later)
    watch.close()
    assert signal.getsignal(signal.SIGUSR2) is later
    signal.raise_signal(signal.SIGUSR2)
    assert watch.take() is None


@pytest.mark.parametrize("name", ["SIGNOPE", "TERM", "SIG_DFL", "SIGKILL", "15"])
def test_what_is_no_signal_to_handle_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="signals: "):
        SignalWatch(("SIGUSR2", name))
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def in_a_thread(names: tuple[str, ...] | None) -> list[BaseException]:
    errors: list[BaseException] = []

    def make() -> None:
        try:
            SignalWatch(names).close()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return errors


def test_outside_the_main_thread_named_signals_are_an_error_and_the_default_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [error] = in_a_thread(("SIGTERM",))
    assert "only the main thread" in str(error)
    assert not in_a_thread(())
    assert not caplog.text
    assert not in_a_thread(None)
    assert "signals are not handled" in caplog.text
