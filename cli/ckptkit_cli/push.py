"""`ckptkit push`: a folder that loads becomes one commit on the Hub.

`ckptkit pull`: from a repository on the Hub to a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.core.text import size_text
from ckptkit_cli import _job_options as options
from ckptkit_cli._options import AsJson, ComparedNames, Quiet
from ckptkit_cli._output import Output, counted, escaped, first_of, told
from ckptkit_cli._progress import Progress

if TYPE_CHECKING:
    from ckptkit.hub.download import Pulled
    from ckptkit.hub.publish.publish import Pushed


_LISTED = 20


def push(
    folder: options.Folder,
    repo_id: options.RepoId,
    private: options.Private = None,
    revision: options.Revision = None,
    tag: options.Tag = None,
    create_pr: options.CreatePr = False,
    message: options.Message = None,
    base_model: options.BaseModel = None,
    include: options.Include = None,
    names: ComparedNames = "auto",
    include_optimizer: options.IncludeOptimizer = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what would be uploaded, skipped and deleted; change nothing.",
            show_default=False,
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Publish a model folder on the Hub, in one commit.

    Every byte is checked against the folder's manifest on the way, and the Hub's hashes are
    compared with what was read. A file that holds a key or a token stops the push. Run again,
    a push that was interrupted goes on, and one that was done changes nothing. The token is
    that of HF_TOKEN or of `hf auth login`.
    """
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    output = Output(as_json=given.pop("as_json"), quiet=given.pop("quiet"))
    folder, repo_id = given.pop("folder"), given.pop("repo_id")
    given["include"] = given["include"] or ()
    with told(output):
        from ckptkit.hub.publish.publish import push as push_folder

        with Progress(output, "push") as progress:
            pushed = push_folder(folder, repo_id, **given, listener=progress.listen)
        for note in pushed.notes:
            output.warn(note)
        dry_run = given["dry_run"]
        output.document(pushed.to_json() | {"dry_run": dry_run})
        output.lines(_page(output, pushed, dry_run=dry_run))


def _page(output: Output, pushed: Pushed, *, dry_run: bool) -> Iterator[str]:
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


def pull(
    repo_id: options.RepoId,
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A directory that does not exist, or is empty.", show_default=False
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="R",
            help="A branch, tag or commit; main if left out.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Bring a model from the Hub to a folder, whole or not at all.

    Every file is compared with the Hub's hash, and what ckptkit pushed with the digests of its
    manifest too. A pull that was interrupted goes on where it stopped. The folder is a SRC for
    the other commands: `convert --to dcp` makes shards of it that training starts from.
    """
    output = Output(as_json=as_json, quiet=quiet)
    with told(output):
        from ckptkit.hub.download import pull as pull_repository

        with Progress(output, "pull") as progress:
            pulled = pull_repository(repo_id, folder, revision=revision, listener=progress.listen)
        for note in pulled.notes:
            output.warn(note)
        output.document(pulled.to_json())
        output.lines(_pull_page(output, pulled))


def _pull_page(output: Output, pulled: Pulled) -> Iterator[str]:
    yield output.styled(escaped(pulled.path), "bold")
    size = size_text(pulled.size_bytes)
    yield f"  {'pulled':<12} {counted(len(pulled.files), 'file')}, {size}"
    yield f"  {'commit':<12} {escaped(pulled.repo_id)} at {escaped(pulled.commit)}"
    yield f"  {'checked':<12} the Hub's hash of every file"
    if pulled.tensors:
        count = counted(pulled.tensors, "tensor")
        yield f"  {'':<12} {count} against the digests of the manifest"
