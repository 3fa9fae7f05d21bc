"""The place of a run: room, inodes, file system, locks, shared blocks and speed; and of a store.

`gather_disk` writes to files without a name, which disappear with their descriptors however the
process ends. `examine_store` writes three small objects, and removes them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import size_text
from ckptkit.diagnosis.findings import Finding, SaveDemand, Severity, judged
from ckptkit.storage.local.disk import BLOCK_BYTES, LOCAL_DISK, is_out_of_space, is_refused
from ckptkit.storage.local.ownership import is_planted
from ckptkit.storage.place_identity import find_mount, read_mounts, why_not_shared
from ckptkit.storage.places import Place

if TYPE_CHECKING:
    from ckptkit.storage.remote.s3 import S3Uploads

_PREFIX = ".ckptkit-doctor-"
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 256 << 20
_MOST_SECONDS = 1.5
_MOST_AT_ONCE = 32  # blocks between two syncs
_SHARE_OF_FREE = 20  # the probe fills no more than this part of what is free
_STEPS_AHEAD = 3  # that should fit where nothing is known of the steps to come
_SLOW_SECONDS = 600.0  # in which a step should be on the disk: NCCL's timeout
_FILES_OF_A_RANK = 6
_SPARE_FILES = 1000


class DiskFacts(Struct, frozen=True):
    """What is known of the place of a run; None where it is not, or nothing was written."""

    where: str  # as the user named it
    folder: Path  # it, or the folder above it that exists
    kind: str = ""  # the type of its file system
    mount_source: str = ""
    mount_options: frozenset[str] = frozenset()
    free_bytes: int | None = None  # for this user
    free_files: int | None = None  # that can be made; None also where there is no limit
    problem: str = ""  # why nothing can be written there
    is_planted: bool = False  # another user may have put it there
    written_bytes: int = 0  # and synced, by one process alone
    seconds: float = 0.0
    has_locks: bool | None = None  # a lock keeps other descriptors out
    shares_blocks: bool | None = None  # between files


def gather_disk(where: str, path: Path, *, writes: bool) -> DiskFacts:
    """Looks at a place, and writes to it for about a second if `writes`."""
    try:
        folder = path.absolute()
    except FileNotFoundError:
        return DiskFacts(where, path, problem="the current directory was removed")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return DiskFacts(where, folder, problem=f"{folder} is a file")
    mount = find_mount(folder.resolve(), read_mounts())
    free_bytes, free_files = _free(folder)
    trial: tuple[int, float, bool | None, bool | None] = 0, 0.0, None, None
    problem = ""
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} cannot be written by this user"
    elif writes:
        try:
            trial = _try_writing(folder, free_bytes)
        except OSError as error:
            problem = f"a file in {folder} cannot be written: {error.strerror or error}"
    return DiskFacts(
        where,
        folder,
        kind=mount.kind if mount else "",
        mount_source=mount.source if mount else "",
        mount_options=mount.options if mount else frozenset(),
        free_bytes=free_bytes,
        free_files=free_files,
        problem=problem,
        is_planted=is_planted(path),
        written_bytes=trial[0],
        seconds=trial[1],
        has_locks=trial[2],
        shares_blocks=trial[3],
    )


def _free(folder: Path) -> tuple[int | None, int | None]:
    """Returns free bytes and free inodes; file systems without such a number report 0 of 0."""
    if not hasattr(os, "statvfs"):
        return None, None
    status = os.statvfs(folder)
    return (
        status.f_bavail * status.f_frsize if status.f_blocks else None,
        status.f_favail if status.f_files else None,
    )


def _try_writing(
    folder: Path, free_bytes: int | None
) -> tuple[int, float, bool | None, bool | None]:
    """Returns bytes written, seconds, whether locks work, and whether blocks can be shared."""
    most_bytes = _MOST_BYTES
    if free_bytes is not None:
        most_bytes = min(most_bytes, free_bytes // _SHARE_OF_FREE)
    block = os.urandom(_BLOCK_BYTES)  # that no file system compresses
    with tempfile.TemporaryFile(dir=folder, prefix=_PREFIX, buffering=0) as file:
        file.write(block[: max(min(most_bytes, _BLOCK_BYTES), 1)])
        os.fsync(file.fileno())
        began = time.monotonic()
        written, blocks, seconds = 0, 1, 0.0
        while seconds < _MOST_SECONDS and written + blocks * _BLOCK_BYTES <= most_bytes:
            for _ in range(blocks):
                file.write(block)
            os.fsync(file.fileno())
            written += blocks * _BLOCK_BYTES
            earlier, seconds = seconds, time.monotonic() - began
            if seconds - earlier < _MOST_SECONDS / 8:
                blocks = min(2 * blocks, _MOST_AT_ONCE)
        return written, seconds, _has_locks(file.fileno()), _shares_blocks(file.fileno(), folder)


def _has_locks(descriptor: int) -> bool | None:
    """Tries whether a lock of one descriptor refuses it to another one of the same file."""
    path = Path(f"/proc/self/fd/{descriptor}")
    try:
        with (
            closing(LOCAL_DISK.open(path, os.O_RDWR)) as first,
            closing(LOCAL_DISK.open(path, os.O_RDWR)) as other,
        ):
            return first.lock() and not other.lock()
    except OSError as error:  # also where there is no /proc
        return False if is_refused(error) else None


def _shares_blocks(descriptor: int, folder: Path) -> bool | None:
    """Tries to make the first block of an open file that of another one."""
    if not LOCAL_DISK.sharing:
        return None
    with ExitStack() as stack:
        other = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix=_PREFIX))
        files = []
        for number in (descriptor, other.fileno()):
            try:
                file = LOCAL_DISK.open(Path(f"/proc/self/fd/{number}"), os.O_RDWR)
            except OSError:  # no /proc here
                return None
            files.append(stack.enter_context(closing(file)))
        try:
            files[1].share_blocks(files[0], 0, BLOCK_BYTES, 0)
        except OSError as error:
            return None if is_out_of_space(error) else False
    return True


def judge_disk(
    facts: DiskFacts, demand: SaveDemand, *, is_local_tier: bool = False
) -> list[Finding]:
    """Judges the place of a run, or a node's own disk for steps before they are drained."""
    if facts.problem:
        advice = "name another directory, or change its owner or the mount"
        problem, expected = facts.problem, "a writable folder"
        return [Finding("disk-writable", "error", facts.where, problem, expected, advice)]
    findings = [_room(facts, demand, is_local_tier=is_local_tier), *_inodes(facts, demand)]
    findings += [*_kind(facts, demand, is_local_tier=is_local_tier), *_speed(facts, demand)]
    if facts.shares_blocks is not None and not is_local_tier:
        findings.append(_sharing(facts))
    if facts.is_planted:
        found = "another user made it in a folder where everybody may make files"
        advice = "that user can replace steps: name a directory that you have made"
        expected = "a folder of this user"
        findings.append(Finding("disk-owner", "warning", facts.where, found, expected, advice))
    return findings


def _room(facts: DiskFacts, demand: SaveDemand, *, is_local_tier: bool) -> Finding:
    """Compares free space with the steps to come."""
    free, size = facts.free_bytes, demand.node_bytes if is_local_tier else demand.step_bytes
    if free is None:
        return Finding("disk-space", "ok", facts.where, "the file system reports no free space")
    if not size:
        found = f"{size_text(free)} free; the size of a step is not known"
        advice = "pass the run, or --model-size 8B, to compare it with the steps to come"
        return Finding("disk-space", "ok", facts.where, found, advice=advice)
    steps, why = _steps_needed(demand, is_local_tier=is_local_tier)
    fit = free // size
    found = f"{size_text(free)} free, room for {fit:,} more of {size_text(size)} ({demand.basis})"
    severity: Severity = "ok" if fit >= steps else "warning"
    if fit < min(steps, 1) or (fit < steps and (is_local_tier or demand.more_steps is not None)):
        severity = "error"
    return judged(
        "disk-space",
        severity,
        facts.where,
        f"{found}; {why}" if severity == "ok" else found,
        f"{size_text(steps * size)}: {why}",
        "make room (`ckptkit prune RUN --keep-last 3 --dry-run`), save to another disk, or keep"
        " fewer steps",
    )


def _steps_needed(demand: SaveDemand, *, is_local_tier: bool) -> tuple[int, str]:
    """Returns for how many more steps there has to be room, and why."""
    if demand.to_come == 0:
        return 0, "no more steps are to come"
    if is_local_tier:
        return _STEPS_AHEAD, "a node keeps two steps of its share, and writes a third"
    more = demand.more_steps
    if more is None:
        return _STEPS_AHEAD, "all steps stay, and it is not known how many are to come"
    if demand.keep_last is None:
        return more, f"{more:,} steps are to come, and all stay"
    kept = f"{demand.keep_last:,} stay ({demand.kept_because})"
    return more, f"{kept}, and one more is written before the oldest is removed"


def _inodes(facts: DiskFacts, demand: SaveDemand) -> Iterator[Finding]:
    if facts.free_files is None:
        return
    files = max(demand.files, _FILES_OF_A_RANK * demand.ranks)
    needed = files * (_STEPS_AHEAD if demand.more_steps is None else demand.more_steps)
    severity: Severity = "error" if facts.free_files < needed else "warning"
    yield judged(
        "disk-inodes",
        "ok" if facts.free_files >= needed + _SPARE_FILES else severity,
        facts.where,
        f"{facts.free_files:,} more files can be made",
        f"{needed + _SPARE_FILES:,}: a step has about {files:,}",
        "remove small files (caches, datasets, logs), or use another file system",
    )


_IN_MEMORY = frozenset({"ramfs", "tmpfs"})
_OF_A_CONTAINER = frozenset({"aufs", "overlay"})
_OF_A_STORE = ("blobfuse", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "s3fs", "s3backer")
_WITHOUT_LINKS = frozenset({"exfat", "msdos", "vfat"})
_NFS = frozenset({"nfs", "nfs4"})
_NODE_LOCKS = frozenset({"local_lock=all", "local_lock=flock", "localflock", "nolock"})
_QUOTA = {
    "lustre": "`lfs quota -h -u $USER DIR` shows it",
    "gpfs": "`mmlsquota --block-size auto` shows it",
    "beegfs": "`beegfs-ctl --getquota --uid $USER` shows it",
    "nfs": "`quota -s` shows it",
    "nfs4": "`quota -s` shows it",
}


def _kind(facts: DiskFacts, demand: SaveDemand, *, is_local_tier: bool) -> Iterator[Finding]:
    """Judges the kind of file system, and its locks."""
    store = next((name for name in _OF_A_STORE if name in f"{facts.kind} {facts.mount_source}"), "")
    kind = facts.kind or "an unknown kind"
    if facts.kind in _IN_MEMORY:
        found, expected = f"{kind}: files are in memory", "a disk"
        advice = "steps are gone after a reboot, and count as memory: name a directory on a disk"
    elif facts.kind in _OF_A_CONTAINER:
        found, expected = f"{kind}: the layer of a container", "a volume"
        advice = "steps are gone with the container: mount a volume there"
    elif facts.kind.startswith("fuse") and store:
        found, expected = f"an object store through {store}", "a file system, or the store's URL"
        advice = "renames copy objects one by one there: save to its URL with `local=`, which"
        advice += " commits as a whole"
    elif facts.kind in _WITHOUT_LINKS:
        found, expected = f"{kind}: no hard links, no owners", "a file system of this system"
        advice = "frozen weights are written at every save; vfat takes no file over 4 GB"
    else:
        yield _plain_kind(facts, demand)
        yield from _locks(facts, is_local_tier=is_local_tier)
        return
    yield Finding("file-system", "warning", facts.where, found, expected, advice)


def _plain_kind(facts: DiskFacts, demand: SaveDemand) -> Finding:
    found = facts.kind or "of an unknown kind"
    if demand.nodes > 1 and why_not_shared(facts.kind):
        found += "; takes no ranges of one file from several machines, so an export saves shards"
    quota = _QUOTA.get(facts.kind, "")
    advice = f"a quota is not seen here: {quota}" if quota else ""
    return Finding("file-system", "ok", facts.where, found, advice=advice)


def _locks(facts: DiskFacts, *, is_local_tier: bool) -> Iterator[Finding]:
    of_node = sorted(_NODE_LOCKS & facts.mount_options)
    if facts.has_locks is False:
        found = f"{facts.kind or 'it'} has no locks"
    elif of_node and not is_local_tier:
        found = f"mounted with {of_node[0]}: a lock is not seen by other nodes"
    else:
        if facts.has_locks:
            yield Finding("file-locks", "ok", facts.where, "a lock keeps a second job out")
        return
    advice = "start one job for a run at a time, and prune while none reads; "
    advice += "mount Lustre with `flock`, NFS without `nolock` and `local_lock`"
    expected = "locks that all nodes see"
    yield Finding("file-locks", "warning", facts.where, found, expected, advice)


def _speed(facts: DiskFacts, demand: SaveDemand) -> Iterator[Finding]:
    if not facts.written_bytes or not facts.seconds:
        return
    rate = facts.written_bytes / facts.seconds
    # Ranks of a node share its disk or its link; more nodes bring more links.
    seconds = (demand.node_bytes or 0) / rate
    found = f"{size_text(rate)}/s written and synced by one process"
    if demand.step_bytes:
        about = "" if seconds < 1 else "about "
        found += f"; {about}{_duration(seconds)} for a node's part of a step"
    yield judged(
        "disk-speed",
        "warning" if seconds > _SLOW_SECONDS else "ok",
        facts.where,
        found,
        f"less than {_duration(_SLOW_SECONDS)}",
        "save to the node's own disk first with `Checkpointer(..., local=DIR)`, or less often; a"
        " save that waits for the disk as a whole runs into NCCL's timeout",
    )


def _sharing(facts: DiskFacts) -> Finding:
    """Says whether models made of the steps need room of their own."""
    if facts.shares_blocks:
        found = "files share blocks: a model of a step that ckptkit 0.3 saved takes no room here"
        return Finding("shared-blocks", "ok", facts.where, found)
    found = f"{facts.kind or 'it'} does not share blocks between files: a model takes its size"
    advice = "save runs to XFS with reflinks or to btrfs, and write models there, to save that"
    return Finding("shared-blocks", "ok", facts.where, found, advice=advice)


def _duration(seconds: float) -> str:
    """Returns a time in words.

    >>> _duration(0.4), _duration(75), _duration(4000)
    ('less than 1 s', '1 min', '67 min')
    """
    if seconds < 1:
        return "less than 1 s"
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"  # noqa: PLR2004


_FOLDER = ".ckptkit-doctor"
_COUNTED = 1000
_LIFECYCLE_RULE = (
    "give the bucket a lifecycle rule that removes them after two days"
    " (AbortIncompleteMultipartUpload)"
)


def examine_store(place: Place, *, writes: bool) -> list[Finding]:
    """Lists a place in a store and, if `writes`, writes and removes three small objects there."""
    from ckptkit.storage.remote.errors import error_translator
    from ckptkit.storage.remote.s3 import S3Uploads
    from ckptkit.storage.remote.s3_target import S3Notes
    from ckptkit.storage.remote.store import get_store

    listed = Finding("store", "ok", place.location, "can be listed; nothing was written")
    try:
        store = get_store(place)
        translate_errors = error_translator(place.location, place.options)
        with translate_errors():
            root = store.path_of(place.location)
            if not store.is_s3 or not writes:
                store.list_folders(root, ())
            if not store.is_s3:
                return [listed]
            uploads = S3Uploads(store, root)
            unfinished = _count(islice(uploads.list_uploads(uploads.prefix), _COUNTED))
            findings = [] if writes else [listed]
            if writes:
                prefix = f"{uploads.prefix}{_FOLDER}/"
                notes = S3Notes(uploads, prefix, translate_errors)
                problem, keeps = notes.why_no_conditions(), _keeps_checksum(uploads, prefix)
                findings = judge_trial(place.location, problem, keeps_checksum=keeps)
    except CkptkitError as error:
        return [store_problem(place.location, error.message, error.hint)]
    if unfinished:
        count = f"{unfinished:,}" if unfinished < _COUNTED else f"{_COUNTED:,} or more"
        found = f"{count} unfinished uploads, which cost storage and are in no listing"
        findings.append(
            Finding("store-uploads", "warning", place.location, found, "none", _LIFECYCLE_RULE)
        )
    return findings


def _count(uploads: Iterator[object]) -> int | None:
    try:
        return sum(1 for _ in uploads)
    except OSError:  # the right to list uploads is apart from others
        return None


def _keeps_checksum(uploads: S3Uploads, prefix: str) -> bool | None:
    """Sends an object in parts, as weights are sent, and asks for its checksum."""
    from ckptkit.storage.remote.s3 import ObjectSums

    if not uploads.has_checksums:
        return None
    key, data = f"{prefix}checksum-{os.urandom(8).hex()}", b"checksum"
    upload = uploads.begin(key)
    try:
        part = uploads.send(key, upload, 1, BytesIO(data), crc32(data))
        uploads.complete(key, upload, [part])
        stored = uploads.head(key).checksum
    except OSError:
        uploads.abort(key, upload)
        raise
    finally:
        uploads.delete([key])
    return stored is not None and ObjectSums.of([(crc32(data), len(data))]).matches(stored)


def store_problem(where: str, problem: str, advice: str) -> Finding:
    expected = "a place that can be listed, written and removed"
    return Finding("store", "error", where, problem, expected, advice)


def judge_trial(where: str, no_conditions: str, *, keeps_checksum: bool | None) -> list[Finding]:
    """Judges what writing has shown."""
    findings = [
        judged(
            "store-conditions",
            "warning" if no_conditions else "ok",
            where,
            no_conditions or "If-None-Match is obeyed",
            "If-None-Match is obeyed",
            "start one job for a place at a time, and do not use --slice with it",
        )
    ]
    if keeps_checksum is not None:
        findings.append(
            judged(
                "store-checksums",
                "ok" if keeps_checksum else "warning",
                where,
                "the CRC-32 of an object is kept"
                if keeps_checksum
                else "the store keeps no CRC-32 of objects",
                "the checksum that was sent",
                "what arrives is not proven: run `ckptkit verify URL` after an upload",
            )
        )
    return findings
