"""Who reads a step says so, and whoever prunes the run leaves it there."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import is_unit_folder, step_of
from ckptkit.formats.registry import find_candidates
from ckptkit.runs.marks import StepMark, hold
from ckptkit.storage.base import Source
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.places import PathLike, Place, is_url, local_path, place_of


def marker(candidate: Candidate) -> str:
    """Returns the file of a checkpoint that stands for all of it: its reader opens it first."""
    index = posixpath.join(candidate.folder, ".metadata")
    return index if index in candidate.files else min(candidate.files)


def hold_candidates(folders: Sequence[Source], candidates: Sequence[Candidate]) -> StepMark:
    """Marks checkpoints as being read, until the result is closed.

    Args:
        folders: The places that hold them; those that are no directories are passed over.
        candidates: What is read, relative to each of the places.
    """
    roots = [Path(folder.location) for folder in folders if not is_url(folder.location)]
    paths = (root / marker(candidate) for root in roots for candidate in candidates)
    return hold(path for path in paths if path.exists())


def hold_source(source: Source) -> StepMark:
    """Marks what lies in a source as being read, until the result is closed."""
    return hold_candidates([source], find_candidates(source))


@contextmanager
def step_in_use(step: PathLike) -> Iterator[None]:
    """Keeps a step of a run from being pruned, for as long as a block of code runs.

    Args:
        step: The step's own folder. At a URL, a mark is left in the run where that is allowed.

    Yields:
        Nothing.
    """
    if is_url(step):
        with _held_at_store(place_of(step)):
            yield
        return
    with (
        LocalSource(local_path(step)) as source,
        hold_source(source),
    ):
        yield


@contextmanager
def read_at_store(steps: Sequence[PathLike]) -> Iterator[None]:
    """Marks those of some steps as being read that lie on an object store, in a run.

    Args:
        steps: Folders of steps, or of parts of them.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        for place in dict.fromkeys(place_of(step) for step in steps if is_url(step)):
            run, _, name = place.rpartition("/")
            while is_unit_folder(name) and step_of(name) is None and "/" in run:
                run, _, name = run.rpartition("/")
            if step_of(name) is not None:
                stack.enter_context(_held_at_store(place.beside(f"{run}/{name}")))
        yield


@contextmanager
def _held_at_store(step: Place) -> Iterator[None]:
    from ckptkit.runs.places import open_run
    from ckptkit.runs.remote import run_and_step

    run, name = run_and_step(step)
    with open_run(run).hold(name, ()):
        yield
