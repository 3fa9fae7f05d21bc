"""Memory that a thread computes in, block after block: fresh pages cost more than arithmetic."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_thread = threading.local()


def workspace(name: str, elements: int) -> NDArray[np.float32]:
    """Returns uninitialised memory, one-dimensional, until the same thread asks by that name."""
    held: NDArray[np.float32] | None = getattr(_thread, name, None)
    if held is None or held.size < elements:
        held = np.empty(elements, np.float32)
        setattr(_thread, name, held)
    return held[:elements]
