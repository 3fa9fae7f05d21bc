"""`ckptkit.seal`: writes the manifest of a step that another saver wrote.

Every byte is read twice: by the verification, which compares what the format of the step stores,
and for the digests, with the CRC-32 of every record of files that are archives by themselves. The
manifest is written if nothing has changed meanwhile, and appears as a whole.
"""

from __future__ import annotations

import hashlib
import posixpath
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ckptkit.conversion.verify import run_verification
from ckptkit.core.checksums import crc32_of_pieces
from ckptkit.core.crc import crc32
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    NotACheckpointError,
    RefusedError,
    SourceChangedError,
    UnsupportedError,
    VerificationError,
)
from ckptkit.core.manifest import (
    CRC32_SCHEME,
    LEAF_BYTES,
    MANIFEST_NAME,
    SEALED,
    TRAINING,
    FileRecord,
    Manifest,
)
from ckptkit.core.text import counted, size_text
from ckptkit.core.threads import run_crew, usable_cores
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.formats.discovery import parse_step
from ckptkit.formats.parsing import read_from
from ckptkit.formats.pickle.torch_zip import LOCAL_SIGNATURE, data_start, read_directory
from ckptkit.formats.registry import recognise
from ckptkit.runs.find_run import find_run
from ckptkit.runs.listing import RunListing, list_run
from ckptkit.runs.local_run import RunStore, check_unchanged, open_run
from ckptkit.runs.remote_run import run_and_step
from ckptkit.runs.step_manifests import OF_UNKNOWN, is_data_file, step_folder
from ckptkit.runs.steps import TIME_FORMAT, RunStep
from ckptkit.storage.base import Source
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of
from ckptkit.version import __version__

Action = Literal["sealed", "kept", "left", "failed"]
_QUIET_SECONDS = 60.0  # after which nothing writes to a step any more
_LOOK_SECONDS = 5.0  # or if nothing has changed for so long, as in a watch
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")  # one archive each, as `torch.save` writes


class SealedStep(Struct, frozen=True):
    """What became of a step.

    Attributes:
        step: The step, as it was listed.
        action: `sealed` if its manifest was written, `kept` if it had one, `left` if it is not
            finished, `failed` if it cannot be sealed.
        why: The reason, as a text; empty for a sealed step.
        unverified: How many tensors of it had no stored checksum.
        error: Why it cannot be sealed, or is left.
    """

    step: RunStep
    action: Action
    why: str = ""
    unverified: int = 0
    error: CkptkitError | None = None


class Sealing(Displayed, Struct, frozen=True):
    """What `ckptkit seal` did with each step.

    Attributes:
        location: The run.
        steps: The steps, the lowest number first.
    """

    location: str
    steps: tuple[SealedStep, ...]

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether no step failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[SealedStep, ...]:
        return tuple(one for one in self.steps if one.action == "failed")

    def _facts(self) -> Facts:
        sealed = [one.step for one in self.steps if one.action == "sealed"]
        size = size_text(sum(step.size_bytes for step in sealed))
        lines = [("result", f"{counted(len(sealed), 'step')} sealed, {size}")]
        rows = [(one.step.name, one.action, one.why) for one in self.steps]
        return Facts(self.location, lines, ("step", "action", "why"), rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.location,
            "ok": self.ok,
            "steps": [
                {
                    "step": one.step.step,
                    "name": one.step.name,
                    "path": one.step.path,
                    "action": one.action,
                    "why": one.why,
                    "bytes": one.step.size_bytes,
                    "unverified": one.unverified,
                    "error": None if one.error is None else one.error.to_json(),
                }
                for one in self.steps
            ],
        }


def run_seal(path: PathLike, *, listener: Listener = ignore) -> Sealing:
    """Seals a step, or each complete step of a run that has no manifest.

    A step that is named and cannot be sealed is an error; of a run, it is one of the results.
    """
    run, name, listing = _find_steps(place_of(path))
    store = open_run(run)
    chosen = [step for step in listing.steps if name in {"", step.name}]
    now = time.time()
    young = [step for step in chosen if now - step.modified < _QUIET_SECONDS]
    if any(_why_not(step) is None for step in young):
        time.sleep(_LOOK_SECONDS)  # whether files have changed meanwhile, each step is asked first
    results = []
    for step in chosen:
        try:
            if step.complete and step.has_manifest:
                result = SealedStep(
                    step, "kept", f"it has its {MANIFEST_NAME}, see `ckptkit verify`"
                )
            else:
                unverified = seal_step(run, store, step, listener=listener)
                result = SealedStep(step, "sealed", unverified=unverified)
        except CkptkitError as error:
            if name:
                raise
            unfinished = IncompleteCheckpointError, SourceChangedError
            action: Action = "left" if isinstance(error, unfinished) else "failed"
            result = SealedStep(step, action, error.message, error=error)
        results.append(result)
    return Sealing(listing.location, tuple(results))


def _find_steps(place: Place) -> tuple[PathLike, str, RunListing]:
    """Returns the run, the name of the step that was passed, or none, and the steps."""
    path = Path() if is_url(place) else local_path(place)
    if path.name in {"", ".."} or path.is_symlink():
        path = path.resolve()
    run, name = (
        run_and_step(place) if is_url(place) else (place.beside(str(path.parent)), path.name)
    )
    if parse_step(name) is not None and (is_url(place) or path.is_dir()):
        with suppress(NotACheckpointError):
            listing = list_run(run)
            step = next((step for step in listing.steps if step.name == name), None)
            if step is not None and not _find_home(step):  # else it may be a run of that name
                return run, name, listing
    whole = find_run(place)
    return whole, "", list_run(whole)


def _why_not(step: RunStep) -> CkptkitError | None:
    """Returns the error for a step that cannot be sealed; None for one that is worth a try."""
    if any(file.path == _manifest_path(step) for file in step.files):
        hint = "take the step from a copy; or, if it was saved again, remove its manifest first:"
        return VerificationError(
            f"has a {MANIFEST_NAME} that does not fit: {step.problem or 'it is of an output'}",
            where=step.path,
            hint=f"{hint} {shlex.join(['rm', f'{step.path}/{MANIFEST_NAME}'])}",
        )
    if not step.complete and step.problem != OF_UNKNOWN:
        return IncompleteCheckpointError(
            f"is not complete: {step.problem}",
            where=step.path,
            hint="seal it once its save has finished",
        )
    if any(file.path == step.name for file in step.files):
        return RefusedError(
            "is a file, and a manifest belongs into the folder of a step",
            where=step.path,
            hint="save each step into a folder of its own",
        )
    if home := _find_home(step):
        return UnsupportedError(
            f"has its checkpoint in {home!r}, where its manifest would not be found",
            where=step.path,
            hint="seal that folder instead",
        )
    return None


def _find_home(step: RunStep) -> str:
    """Returns the folder below a step that counts as the step; empty where it is the step."""
    candidates = recognise([file.path for file in step.files])
    homes = {step_folder(candidate.folder) for candidate in candidates}
    return "" if step.name in homes else min(homes, default="")


def seal_step(run: PathLike, store: RunStore, step: RunStep, *, listener: Listener = ignore) -> int:
    """Writes the manifest of a complete step; returns how many tensors had no stored checksum."""
    error = _why_not(step)
    if error is not None:
        raise error
    with store.hold(step.name, step.markers), open_source(run) as source:
        check_unchanged(store, step, "is still written to, and was not sealed")
        try:
            report = run_verification(place_of(run).beside(step.path), listener=listener)
            if report.problems:
                more = len(report.problems) - 1
                raise VerificationError(
                    f"is damaged, and was not sealed: {report.problems[0]}"
                    + (f", and {counted(more, 'further problem')}" if more else ""),
                    where=step.path,
                    hint=f"see all: {shlex.join(['ckptkit', 'verify', step.path])}",
                )
            records = _digest_files(source, [file.path for file in step.files], listener)
        except (ChecksumError, FormatError) as damage:
            text = f"is damaged, and was not sealed: {damage}"
            raise VerificationError(text, where=step.path, hint=damage.hint) from damage
        check_unchanged(store, step, "changed while it was read, and was not sealed")
        store.put(_manifest_path(step), _make_manifest(step, records).to_json())
    return len(report.unverified)


def _manifest_path(step: RunStep) -> str:
    return f"{step.name}/{MANIFEST_NAME}"


def _make_manifest(step: RunStep, records: Mapping[str, FileRecord]) -> Manifest:
    inside = {path.removeprefix(f"{step.name}/"): records[path] for path in sorted(records)}
    content = "".join(f"{path}\0{r.size_bytes}\0{r.digest}\n" for path, r in inside.items())
    data = {path: record.digest for path, record in inside.items() if is_data_file(path)}
    return Manifest(
        TRAINING,
        source={
            "step": step.step,
            # The same for copies of a step that are sealed apart.
            "attempt": hashlib.sha256(content.encode()).hexdigest()[:16],
            "saved_at": time.strftime(TIME_FORMAT, time.gmtime(step.modified)),
            "metrics": dict(step.metrics),
            SEALED: data,
        },
        options={},
        versions={"ckptkit": __version__},
        tensors={},
        files={
            path: FileRecord(record.size_bytes, "" if path in data else record.digest)
            for path, record in inside.items()
        },
    )


def _digest_files(
    source: Source, paths: Sequence[str], listener: Listener
) -> dict[str, FileRecord]:
    sizes = {path: source.stat(path).size_bytes for path in paths}
    records: dict[str, FileRecord] = {}
    listener(Started(sum(sizes.values())))

    def work(taken: Iterator[str]) -> None:
        for path in taken:
            crc = _read_file(source, path, sizes[path], listener)
            records[path] = FileRecord(sizes[path], f"{CRC32_SCHEME}:{crc:08x}")

    largest_first = sorted(paths, key=lambda path: -sizes[path])
    run_crew(min(usable_cores() + 1, len(paths)), iter(largest_first), work)
    return records


def _read_file(source: Source, path: str, size_bytes: int, listener: Listener) -> int:
    """Returns the CRC-32 of a file; compares that of each record if the file is an archive."""
    where = posixpath.join(source.location, path)
    pieces: list[tuple[int, int, int]] = []
    at = crc = 0
    ranges = [*_records(source, path, size_bytes, where), (size_bytes, size_bytes, "", None)]
    for start, stop, name, expected in ranges:
        for first, last in ((at, start), (start, stop)):
            crc = 0
            for begin in range(first, last, LEAF_BYTES):
                end = min(begin + LEAF_BYTES, last)
                crc = crc32(source.read(path, begin, end), crc)
                listener(BytesWritten(end - begin))
            pieces.append((first, last - first, crc))
        at = stop
        if expected is not None and crc != expected:
            raise ChecksumError(
                f"{name!r} has CRC-32 {crc:#010x}, {expected:#010x} was stored", where=where
            )
    return crc32_of_pieces(pieces, size_bytes)


def _records(
    source: Source, path: str, size_bytes: int, where: str
) -> Iterator[tuple[int, int, str, int | None]]:
    """Yields the records of an archive of torch: where the bytes are, the name, and the CRC-32."""
    if not path.endswith(_OF_TORCH) or source.read(path, 0, min(4, size_bytes)) != LOCAL_SIGNATURE:
        return
    read = read_from(source, path)
    for entry in read_directory(read, size_bytes, where=where).values():
        start = data_start(read, entry, where=where)
        yield start, start + entry.size_bytes, entry.name, entry.crc32
