"""`ckptkit pull`: a model comes from the Hub, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptkit.core.text import size_text
from ckptkit_cli._options import JSON, QUIET, READ, REPO_ID
from ckptkit_cli._output import Output, counted, escaped
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.hub.download import Pulled


@command(
    REPO_ID,
    Argument("folder", "DIR", "A directory that does not exist or is empty."),
    Option("--revision", READ, "Branch, tag or commit.  [default: main]", "R"),
    JSON,
    QUIET,
    order=14,
)
def pull(output: Output, repo_id: str, folder: str, revision: str | None) -> None:
    """Download a model from the Hub, completely or not at all.

        ckptkit pull org/llama models/llama

    Every file is compared with the Hub's hash, and what ckptkit pushed with the digests of its
    manifest too. To resume an interrupted pull, run it again. Other commands accept the folder as
    SRC: `ckptkit convert --to dcp` makes shards of it that training starts from.
    """
    from ckptkit.hub.download import pull as pull_repository
    from ckptkit_cli._progress import Progress

    with Progress(output, "pull") as progress:
        pulled = pull_repository(repo_id, folder, revision=revision, listener=progress.listen)
    progress.warn(pulled.notes)
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
