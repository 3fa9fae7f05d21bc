"""`ckptkit push`: a model folder goes to the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit_cli._options import (
    COMPARED_NAMES,
    HUB,
    JSON,
    NAMED,
    PRIVATE,
    QUIET,
    REPO_ID,
    REVISION,
)
from ckptkit_cli._output import Output, counted, escaped, first_of
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.hub.publish import Pushed


_LISTED = 20
_UPLOADED = "What is uploaded"


@command(
    Argument(
        "folder",
        "DIR",
        "A folder that loads, such as consolidate and adapter extract write.",
    ),
    REPO_ID,
    Option(
        "--include",
        _UPLOADED,
        "Upload matching files too that are not part of a model. Can be repeated.",
        "GLOB",
        repeated=True,
    ),
    Option(
        "--include-optimizer",
        _UPLOADED,
        "Upload the states of the optimizer and of random number generators too.",
    ),
    Option(
        "--dry-run", _UPLOADED, "Show what would be uploaded, skipped and deleted; change nothing."
    ),
    Option("--message", HUB, "Message of the commit. By default, it names the step.", "TEXT"),
    Option("--tag", HUB, "Tag for the commit, such as step-500.", "T"),
    Option("--create-pr", HUB, "Open a pull request instead of a commit."),
    PRIVATE,
    REVISION,
    COMPARED_NAMES,
    Option(
        "--base-model",
        NAMED,
        "The model that was trained, for a folder that names it by a path.",
        "REPO_ID",
    ),
    JSON,
    QUIET,
    order=13,
)
def push(output: Output, folder: str, repo_id: str, dry_run: bool, **options: Any) -> None:
    """Publish a model folder on the Hub, in one commit.

        ckptkit push models/llama org/llama --tag step-500

    Every byte is checked against the manifest of the folder, and the Hub's hashes are compared
    with what was read. A file that contains a key or a token stops the push. To resume an
    interrupted push, run it again; if it was complete, nothing changes. The token is that of
    HF_TOKEN or of `hf auth login`.
    """
    from ckptkit.hub.publish import push as push_folder
    from ckptkit_cli._progress import Progress

    with Progress(output, "push") as progress:
        pushed = push_folder(folder, repo_id, dry_run=dry_run, **options, listener=progress.listen)
    progress.warn(pushed.notes)
    output.document(pushed.to_json() | {"dry_run": dry_run})
    output.lines(_push_page(output, pushed, dry_run=dry_run))


def _push_page(output: Output, pushed: Pushed, *, dry_run: bool) -> Iterator[str]:
    yield output.styled(escaped(pushed.url), "bold")
    if pushed.new_repository:
        makes = "would make" if dry_run else "made"
        yield f"  {makes:<12} the repository, {pushed.new_repository}"
    done = "would upload" if dry_run else "uploaded"
    if pushed.uploaded:
        count = counted(len(pushed.uploaded), "file")
        yield f"  {done:<12} {count}, {size_text(pushed.bytes_uploaded)}"
        yield from _listed(pushed.uploaded)
    else:
        yield "  nothing new: the repository holds the same files"
    if pushed.unchanged:
        yield f"  {'unchanged':<12} {counted(len(pushed.unchanged), 'file')}"
    if pushed.deleted:
        yield f"  {'would delete' if dry_run else 'deleted':<12} of an earlier layout"
        yield from _listed(pushed.deleted)
    if pushed.skipped:
        yield f"  {'skipped':<12} {counted(len(pushed.skipped), 'file')}"
        yield from _listed([f"{one.path}: {one.reason}" for one in pushed.skipped])
    if pushed.tag and not dry_run:
        yield f"  {'tagged':<12} {escaped(pushed.tag)}"
    if not dry_run:
        yield f"  {'checked':<12} the Hub's hashes are those of the files here"


def _listed(lines: tuple[str, ...] | list[str]) -> Iterator[str]:
    for line in first_of([escaped(line) for line in lines], _LISTED):
        yield f"    {line}"
