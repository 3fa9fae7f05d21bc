"""Settings of the client, of which a process has one: changed for a while, then put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NO_XET = "HF_HUB_DISABLE_XET"


def uses_xet() -> bool:
    """Tells whether the client may send large files to a Xet store."""
    from huggingface_hub import constants

    return not getattr(constants, _NO_XET, False)


def forgo_xet() -> None:
    """Has the client send large files the older way, until `quiet_client` ends."""
    from huggingface_hub import constants

    setattr(constants, _NO_XET, True)


@contextmanager
def quiet_client() -> Iterator[None]:
    """Keeps the client's own bars and warnings off the terminal: the latter hold signed URLs.

    What else is set in the client meanwhile is as it was, afterwards.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    client = logging.getLogger("huggingface_hub")
    level, hidden = client.level, are_progress_bars_disabled()
    plain = getattr(constants, _NO_XET, False)
    client.setLevel(logging.ERROR)
    if not hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        client.setLevel(level)
        setattr(constants, _NO_XET, plain)
        if not hidden:
            enable_progress_bars()
