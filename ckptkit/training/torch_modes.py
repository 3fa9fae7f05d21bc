"""Calls of a training loop run outside of its modes of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch as dispatch

from ckptkit.core.errors import UsageError

_WITHOUT_DATA = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")


@contextmanager
def plain_torch() -> Iterator[str]:
    """Suspends the caller's modes of torch, and disables autograd.

    What lasts from one call to the next must not depend on the modes: a view made under
    `inference_mode` cannot be written to outside of it, and a default device would allocate tensors
    elsewhere. The default dtype and deterministic algorithms belong to the whole process and stay.

    Yields:
        A mode under which the state cannot be read or written; empty for none.
    """
    with ExitStack() as undo:
        active: list[Any] = []
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - disabling them is private, and slow to import
            active = undo.enter_context(dispatch._disable_current_modes()) or []  # noqa: SLF001
        # Inside a function under torch.compile, calls from here must not be compiled.
        undo.callback(eval_frame.set_eval_frame, eval_frame.set_eval_frame(None))
        while torch._C._len_torch_function_stack():  # noqa: SLF001 - such as of torch.set_default_device
            mode = torch._C._pop_torch_function_stack()  # noqa: SLF001 - torch.overrides takes off one only
            undo.callback(torch._C._push_on_torch_function_stack, mode)  # noqa: SLF001
        undo.enter_context(torch._C._DisableAutocast())  # noqa: SLF001 - for all devices
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.no_grad())
        kinds = [kind.__name__ for mode in active for kind in type(mode).__mro__]
        unsuited = next((kind for kind in kinds if kind in _WITHOUT_DATA), "")
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            unsuited = "a transform of torch.func"
        yield unsuited


def check_modes(unsuited: str, where: str) -> None:
    """Refuses a call under such a mode."""
    if unsuited:
        raise UsageError(
            f"{unsuited} is active, under which tensors are not those of the training",
            where=where,
            hint="make the call outside of it",
        )
