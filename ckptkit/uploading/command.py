"""How a trainer starts the process that uploads."""

from __future__ import annotations

import sys

NICENESS = 19  # it may take its time: the step is safe already
_PROGRAM = "import sys; sys.path.extend({!r}); from ckptkit.uploading.main import main; main()"


def upload_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests to upload.

    Unlike the writer it needs packages: those of the trainer, found where the trainer finds them.
    Nothing of what it is to upload, and with which credentials, shows in the command.

    Args:
        descriptor: Number of the socket that it inherits.
        niceness: By how much its priority is lowered.
    """
    folders = [folder for folder in sys.path if folder]
    return [
        *(sys.executable, "-I", "-c", _PROGRAM.format(folders)),
        *(str(descriptor), str(niceness)),
    ]
