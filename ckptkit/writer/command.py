"""How a trainer starts the writer process."""

from __future__ import annotations

import sys
from pathlib import Path

NICENESS = 10
_ROOT = str(Path(__file__).resolve().parents[2])
# The folder may be site-packages, so it comes last: nothing in it may replace a standard module.
_PROGRAM = "import sys; sys.path.append({!r}); from ckptkit.writer.main import main; main()"


def writer_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests.

    It starts without site-packages and environment variables, since it needs neither.

    Args:
        descriptor: Number of the socket that it inherits.
        niceness: By how much its priority is lowered.
    """
    return [
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format(_ROOT)),
        *(str(descriptor), str(niceness)),
    ]
