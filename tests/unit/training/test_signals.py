"""Signals are noted, earlier handlers are called, and put back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.training.signals import SignalWatch, signal_names

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    names = (signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(name) for name in names]
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


def test_each_arrival_is_told_once() -> None:
    watch = SignalWatch(("SIGTERM", "SIGUSR2"))
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


def in_a_thread(names: tuple[str, ...]) -> list[BaseException]:
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


def test_outside_the_main_thread_named_signals_are_an_error() -> None:
    [error] = in_a_thread(("SIGTERM",))
    assert "only the main thread" in str(error)
    assert not in_a_thread(())


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("TERM", 'pass "SIGTERM"'),
        (("SIGTERMM",), 'pass "SIGTERM"'),
        (9999, "pass names"),
        (True, "pass names"),
        ((None,), "pass names"),
        (1.5, "pass names"),
        (b"SIGTERM", "pass names"),
    ],
)
def test_a_name_that_is_wrong_is_told_with_what_is_right(given: object, hint: str) -> None:
    with pytest.raises(UsageError, match="signals: ") as caught:
        signal_names(given)
    assert caught.value.hint.startswith(hint)


FORK = multiprocessing.get_context("fork")


def test_a_forked_child_can_be_ended() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = SignalWatch(("SIGTERM",))
    children = [FORK.Process(target=time.sleep, args=(30,)) for _ in range(4)]
    try:
        for child in children:
            child.start()
            child.terminate()  # before, while or after it gets the earlier handlers
        for child in children:
            child.join(10)
        assert [child.exitcode for child in children] == [-signal.SIGTERM] * 4
        with FORK.Pool(1) as pool:
            assert pool.apply(signal_names, ("SIGTERM",)) == ("SIGTERM",)
        signal.raise_signal(signal.SIGTERM)
        assert watch.take() == "SIGTERM"
    finally:
        for child in children:
            child.kill()
        watch.close()


def test_in_a_forked_child_the_earlier_handler_is_called() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(7))
    watch = SignalWatch(("SIGUSR2",))
    child = FORK.Process(target=signal.raise_signal, args=(signal.SIGUSR2,))
    child.start()
    child.join(10)
    watch.close()
    assert child.exitcode == 7


def test_a_signal_that_meets_our_handler_in_another_process_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: calls.append(number))
    watch = SignalWatch(("SIGUSR2",))
    monkeypatch.setattr(watch, "_pid", -1)
    signal.raise_signal(signal.SIGUSR2)
    assert calls == [signal.SIGUSR2]
    assert watch.take() is None
    watch.close()


def test_a_child_may_watch_signals_of_its_own() -> None:
    watch = SignalWatch(("SIGTERM",))
    child = FORK.Process(target=_watch_in_a_child)
    child.start()
    child.join(10)
    watch.close()
    assert child.exitcode == 0


def _watch_in_a_child() -> None:
    watch = SignalWatch(("SIGTERM",))
    signal.raise_signal(signal.SIGTERM)
    os._exit(watch.take() != "SIGTERM")
