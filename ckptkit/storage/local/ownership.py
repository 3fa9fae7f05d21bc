"""Which existing folders may be written to, where other users of the machine can make some too.

In a directory such as `/tmp` anybody may make a folder of a name that another user is about to
use. Its owner can put links into it, and replace its files at any later time.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import OutputError

_OWNER_ONLY = 0o700


def make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Makes a folder that no other user can look into; an existing one stays as it is.

    One of another user is refused.
    """
    try:
        folder.mkdir(mode=_OWNER_ONLY)
    except FileExistsError:
        if not exist_ok:
            raise
        if not is_own(folder):
            raise _foreign(folder) from None


def is_own(folder: Path) -> bool:
    """Returns whether a folder, and not a link to one, was made by this user."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and _is_owner(status.st_uid, folder.parent)


def is_planted(path: Path) -> bool:
    """Returns whether a path may be there only for this user to write into it.

    This is so if another user made it, in a folder with the sticky bit in which everybody may make
    files. What belongs to the owner of that folder is trusted.

    Source:
        `fs.protected_symlinks` and `fs.protected_regular` in proc_sys_fs(5), whose rule this is.
    """
    try:
        status, around = path.lstat(), path.parent.stat()
    except OSError:  # it is not there
        return False
    everybody = stat.S_ISVTX | stat.S_IWOTH
    if around.st_mode & everybody != everybody or status.st_uid == around.st_uid:
        return False
    return not _is_owner(status.st_uid, path.parent)


def refuse_planted(path: Path) -> None:
    """Refuses to write into a folder, or through a link, for which `is_planted` is true."""
    if is_planted(path):
        raise _foreign(path)


def copy_owner(path: Path, new: Path) -> bool:
    """Copies owner and group, or the group alone; returns whether the new path has both."""
    was = path.stat()
    with suppress(OSError):  # not permitted, or numbers that the file system does not know
        _set_owner(new, was.st_uid, was.st_gid)
        return True
    with suppress(OSError):
        _set_owner(new, new.stat().st_uid, was.st_gid)
    return False


def inherit_group(parent: Path, folder: Path) -> None:
    """Copies the set-group-ID bit of a directory, and its group with it, if it has the bit."""
    with suppress(OSError):  # removed meanwhile, or not permitted
        was = parent.stat()
        if was.st_mode & stat.S_ISGID:
            _set_owner(folder, folder.stat().st_uid, was.st_gid)
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID)


def _set_owner(path: Path, user: int, group: int) -> None:
    status = path.stat()
    if (status.st_uid, status.st_gid) != (user, group):
        os.chown(path, user, group)


def _is_owner(user: int, parent: Path) -> bool:
    """Returns whether files of a user in a folder are those of this process.

    Its own number is not enough: NFS stores what root makes under another one, and a mount of
    another kind all files as those of one user.
    """
    if not hasattr(os, "geteuid") or user == os.geteuid():
        return True
    with suppress(OSError):
        probe = Path(tempfile.mkdtemp(prefix=".ckptkit-owner-", dir=parent))
        try:
            return probe.stat().st_uid == user
        finally:
            probe.rmdir()
    return False


def _foreign(path: Path) -> OutputError:
    return OutputError(
        "belongs to another user, who could change what is written there",
        where=str(path),
        hint="name another directory, best one in a folder that only you can write to",
    )
