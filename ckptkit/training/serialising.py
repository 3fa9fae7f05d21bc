"""Values that are no tensors as bytes, of which a resume can make the same values again."""

from __future__ import annotations

import io

import torch

from ckptkit.core.errors import SaveError, UsageError
from ckptkit.core.texts import a_kind
from ckptkit.training.objects_on_disk import is_readable

_SCALARS = (bool, float, int, str, type(None))


def saved(value: object) -> bytes:
    """Returns what `torch.save` writes for a value."""
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


def serialised(value: object, key: str) -> bytes:
    """Returns a user's value as `torch.save` writes it, and sees that it could be read again.

    Resuming runs no pickle, so that it knows plain values, tensors and arrays only.

    Args:
        value: What to save.
        key: Its name in the state, for messages.

    Raises:
        SaveError: If it cannot be pickled.
        UsageError: If it could never be resumed from.
    """
    try:
        data = saved(value)
    except Exception as error:  # whatever a user's `__reduce__` raises
        raise SaveError(
            f"{a_kind(value)} cannot be pickled: {error}",
            where=key,
            hint="leave it out of the state, or give it a form that can be pickled",
        ) from error
    reason = is_readable(data)
    if reason:
        raise UsageError(
            f"could be saved, but not resumed from: {reason}",
            where=key,
            hint="let its state_dict() return plain values, tensors and arrays",
        )
    return data


def is_plain(value: object) -> bool:
    """Tells whether a value is a number, a text or None, or a list or tuple of such."""
    if type(value) in {list, tuple}:
        return all(map(is_plain, value))  # type: ignore[call-overload]  # it is iterable
    return type(value) in _SCALARS
