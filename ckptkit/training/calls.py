"""Calls of a Checkpointer: one at a time, apart from the caller's modes of torch, and counted."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch as dispatch

from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.training.handle import SaveHandle

_MANY_FAILURES = 3  # in a row: one or two may be a file system that was away for a while
_WITHOUT_DATA = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")


def first_of(errors: Sequence[CkptkitError | None]) -> CkptkitError | None:
    """Returns the first error, which says how many more there are."""
    found = [error for error in errors if error is not None]
    more = len(found) - 1
    if more < 1:
        return found[0] if found else None
    first = found[0]
    return type(first)(
        f"{first.message}; {more} later save{'s' if more > 1 else ''} failed as well",
        where=first.where,
        hint=first.hint,
    )


class OneCall:
    """Refuses a call while another thread is in one, and keeps the caller's modes away from it."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock = lock
        self._what = what
        self._undo = ExitStack()
        self._unsuited = ""

    def check_modes(self) -> None:
        """Refuses modes of the caller under which the state cannot be read or written.

        Raises:
            UsageError: If there is one.
        """
        if self._unsuited:
            raise UsageError(
                f"{self._unsuited} is active, under which tensors are not those that training"
                " works on",
                where=f"Checkpointer.{self._what}",
                hint="make the call outside of it",
            )

    def __enter__(self) -> Self:
        if not self._lock.acquire(blocking=False):
            raise SaveError(
                "another thread is saving or resuming at this moment",
                where=f"Checkpointer.{self._what}",
                hint="call the Checkpointer from one thread, in the same order on every rank",
            )
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            self._unsuited = undo.enter_context(plain_torch())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


@contextmanager
def plain_torch() -> Iterator[str]:
    """Runs torch as it is in a new thread, but without autograd, whatever modes the caller is in.

    What lasts from one call to the next must not depend on them: a view that is made under
    `inference_mode` cannot be written to outside of it, and a default device would take tensors
    that belong into memory of ours. The default dtype and deterministic algorithms belong to the
    whole process and stay.

    Yields:
        A mode that the state cannot be read or written under; empty without such a one.
    """
    with ExitStack() as undo:
        active: list[Any] = []
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - disabling them is private, and slow to import
            active = undo.enter_context(dispatch._disable_current_modes()) or []  # noqa: SLF001
        # Of a function that torch.compile runs, what is called from here is not to be compiled.
        undo.callback(eval_frame.set_eval_frame, eval_frame.set_eval_frame(None))
        undo.enter_context(_no_function_modes())
        undo.enter_context(torch._C._DisableAutocast())  # noqa: SLF001 - for all devices
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.no_grad())
        kinds = [kind.__name__ for mode in active for kind in type(mode).__mro__]
        unsuited = next((kind for kind in kinds if kind in _WITHOUT_DATA), "")
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            unsuited = "a transform of torch.func"
        yield unsuited


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """Takes modes such as that of `torch.set_default_device` off the stack of this thread."""
    modes = [
        torch._C._pop_torch_function_stack()  # noqa: SLF001 - torch.overrides takes off one only
        for _ in range(torch._C._len_torch_function_stack())  # noqa: SLF001
    ]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)  # noqa: SLF001


def _callers_level() -> int:
    """Returns the level of the stack, as seen by the calling function, that is not ckptkit's."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - documented, and quicker than inspect
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ckptkit."):
        level, frame = level + 1, frame.f_back
    return level


class FailedSaves:
    """Counts the saves that failed in a row, so that training hears of it."""

    def __init__(self) -> None:
        self._open: deque[SaveHandle] = deque()
        self._count = 0
        self._last: CkptkitError | None = None

    def follow(self, handle: SaveHandle) -> None:
        """Counts a save that has begun, once it has ended."""
        self._open.append(handle)

    def warn(self) -> None:
        """Warns the caller of the Checkpointer's method if many saves have failed in a row."""
        error = self.error()
        if error is not None:
            warnings.warn(str(error), RuntimeWarning, stacklevel=_callers_level())

    def error(self) -> SaveError | None:
        """Returns what many failures in a row come to, None if there were fewer."""
        while self._open and self._open[0].done():
            ended = self._open.popleft()
            if not ended.skipped:
                self._last = ended.error
                self._count = 0 if self._last is None else self._count + 1
        if self._last is None or self._count < _MANY_FAILURES:
            return None
        return SaveError(
            f"the last {self._count} saves failed, and nothing was saved since: {self._last}",
            hint=self._last.hint,
        )
