"""Refuses tests that would run packages of another checkout, and judge the code of that one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def refuse_others() -> None:
    """Ends this process where a package is found neither in this checkout nor in its environments.

    An environment of this checkout, such as `.venv-lowest`, may have them installed.
    """
    for package in ("ckptkit", "ckptkit_cli"):
        spec = find_spec(package)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else _ROOT
        if not found.is_relative_to(_ROOT):
            sys.exit(
                f"these are tests of {_ROOT}, and {package} is imported from {found.parents[1]};"
                f" set PYTHONPATH={_ROOT}:{_ROOT / 'cli'}"
            )
