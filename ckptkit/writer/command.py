"""How a trainer starts the writer process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

NICENESS = 10
# These may be site-packages, so they come last: nothing there may replace a standard module.
_PROGRAM = "import sys; sys.path.extend({!r}); from ckptkit.writer.main import main; main()"


def writer_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests.

    It starts without site-packages and environment variables, since it needs neither; only the
    library that sums up fast is let in, where there is one.

    Args:
        descriptor: Number of the socket that it inherits.
        niceness: By how much its priority is lowered.
    """
    return [
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format(_roots())),
        *(str(descriptor), str(niceness)),
    ]


def _roots() -> list[str]:
    """Returns the folders that hold ckptkit and the library of `ckptkit.core.crc`."""
    root = Path(__file__).resolve().parents[2]
    spec = find_spec("isal")
    found = spec.submodule_search_locations if spec else None
    return [str(root), *(str(Path(folder).parent) for folder in found or ())]
