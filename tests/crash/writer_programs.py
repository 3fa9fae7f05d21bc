"""Writers whose program does something else besides."""

from __future__ import annotations

from ckptkit.training.save.writer_process import writer_command


def writer_running(program: str, descriptor: int) -> list[str]:
    """Returns the command of a writer whose program is another; it finds the same modules."""
    command = writer_command(descriptor, 0)
    at = command.index("-c") + 1
    command[at] = command[at].partition("from ckptkit")[0] + "\n" + program
    return command
