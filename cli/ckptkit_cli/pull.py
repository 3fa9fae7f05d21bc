"""`ckptkit pull`: from a repository on the Hub to a folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.core.texts import size_text
from ckptkit_cli import _hub_options as options
from ckptkit_cli._failures import told
from ckptkit_cli._options import AsJson, Quiet
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress
from ckptkit_cli._text import counted, escaped

if TYPE_CHECKING:
    from ckptkit.hub.pulling import Pulled


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
        from ckptkit.hub.pulling import pull as pull_repository

        with Progress(output, "pull") as progress:
            pulled = pull_repository(repo_id, folder, revision=revision, listener=progress.listen)
        for note in pulled.notes:
            output.warn(note)
        output.document(pulled.to_json())
        output.lines(_page(output, pulled))


def _page(output: Output, pulled: Pulled) -> Iterator[str]:
    yield output.styled(escaped(pulled.path), "bold")
    size = size_text(pulled.size_bytes)
    yield f"  {'pulled':<12} {counted(len(pulled.files), 'file')}, {size}"
    yield f"  {'commit':<12} {escaped(pulled.repo_id)} at {escaped(pulled.commit)}"
    yield f"  {'checked':<12} the Hub's hash of every file"
    if pulled.tensors:
        count = counted(pulled.tensors, "tensor")
        yield f"  {'':<12} {count} against the digests of the manifest"
