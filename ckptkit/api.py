"""The functions that users call; each is a thin face of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from ckptkit.planning.requests import (
    DEFAULT_MAX_FILE_BYTES,
    ConsolidateRequest,
    DTypeChoice,
    Layout,
    NameChoice,
    make_resources,
    parse_size,
)

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit.execution.events import Listener
    from ckptkit.pipeline.diffing import Difference
    from ckptkit.pipeline.inspecting import Inspection
    from ckptkit.pipeline.opening import PathLike
    from ckptkit.pipeline.reading import Checkpoint
    from ckptkit.pipeline.verifying import Verification


class Options(TypedDict, total=False):
    """The options of `consolidate` and `convert`; they are those of the commands.

    Attributes:
        select: Which model to take where there are several.
        dtype: Element type of floating tensors, "keep" by default; integers are never cast.
        keep_dtype: Patterns of names that keep their stored type.
        names: "live" writes adapters and packed weights too, which would load as something else.
        base: A model folder to take configuration and tokenizer from where the source has none.
        also: Further directories that hold files of the same checkpoint, such as each node's
            copy of its ranks' files; a file has the same path in each of them as below `src`.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB".
        include: Patterns of names to take; all when empty.
        exclude: Patterns of names to leave out.
        allow_code: Whether python files and `auto_map` are copied.
        overwrite: Whether an `out` that holds something is replaced.
        workers: Threads; chosen by the number of cores when left out.
        memory_budget: What buffers may take together, in bytes or such as "64MB".
        memory_limit: What the whole process may take.
        listener: Is told of progress, from several threads.
    """

    select: str | None
    dtype: DTypeChoice
    keep_dtype: Sequence[str]
    names: NameChoice
    base: PathLike | None
    also: Sequence[PathLike]
    max_shard_size: int | str
    include: Sequence[str]
    exclude: Sequence[str]
    allow_code: bool
    overwrite: bool
    workers: int | None
    memory_budget: int | str | None
    memory_limit: int | str | None
    listener: Listener | None


def open(  # noqa: A001
    path: PathLike, *, select: str | None = None, also: Sequence[PathLike] = ()
) -> Checkpoint:
    """Opens the checkpoint at or under a path, for reading single tensors.

    Args:
        path: Any path in or above a checkpoint; of a run, the newest complete step is taken.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.

    Returns:
        The checkpoint; close it, or use it as a context manager.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If there are several and none was selected.
    """
    from ckptkit.pipeline.reading import Checkpoint

    return Checkpoint(path, select=select, also=also)


def inspect(
    path: PathLike, *, select: str | None = None, also: Sequence[PathLike] = ()
) -> Inspection:
    """Describes the checkpoint at or under a path, reading headers only.

    Returns:
        What was found.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If several runs lie there and none was selected.
    """
    from ckptkit.pipeline.inspecting import run_inspection

    return run_inspection(path, select=select, also=also)


def consolidate(src: PathLike, out: PathLike, **options: Unpack[Options]) -> Manifest:
    """Merges the shards of a checkpoint into a folder that Transformers loads.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        **options: See `Options`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is not empty.
    """
    return convert(src, out, to="hf", **options)


def convert(src: PathLike, out: PathLike, *, to: Layout, **options: Unpack[Options]) -> Manifest:
    """Writes the model of a checkpoint in another layout.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        to: `hf` for safetensors, `torch` for `pytorch_model.bin`, `dcp` for a sharded checkpoint
            that FSDP training loads.
        **options: See `Options`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.pipeline.consolidating import run_consolidation

    base = options.get("base")
    return run_consolidation(
        src,
        out,
        make_request(to, options),
        base=None if base is None else str(base),
        overwrite=options.get("overwrite", False),
        resources=make_resources(
            options.get("workers"), options.get("memory_budget"), options.get("memory_limit")
        ),
        listener=options.get("listener"),
        also=options.get("also", ()),
    )


def make_request(to: Layout, options: Options) -> ConsolidateRequest:
    """Checks options and turns them into a request.

    Returns:
        The request.

    Raises:
        UsageError: If one has no valid value.
    """
    return ConsolidateRequest(
        dtype=options.get("dtype", "keep"),
        keep_dtype=tuple(options.get("keep_dtype", ())),
        include=tuple(options.get("include", ())),
        exclude=tuple(options.get("exclude", ())),
        select=options.get("select"),
        max_file_bytes=parse_size(
            options.get("max_shard_size", DEFAULT_MAX_FILE_BYTES), option="--max-shard-size"
        ),
        names=options.get("names", "auto"),
        allow_code=options.get("allow_code", False),
        layout=to,
    )


def verify(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    listener: Listener | None = None,
) -> Verification:
    """Reads a checkpoint, or an output of ours, and checks every stored checksum.

    Returns:
        What was checked, and what is wrong.

    Raises:
        InputError: If what is there cannot be parsed at all.
    """
    from ckptkit.pipeline.verifying import run_verification

    return run_verification(path, select=select, also=also, listener=listener)


def diff(a: PathLike, b: PathLike, *, listener: Listener | None = None) -> Difference:
    """Compares the models of two checkpoints bit by bit, across formats.

    Returns:
        How they differ.

    Raises:
        InputError: If one of them cannot be read whole.
    """
    from ckptkit.pipeline.diffing import run_diff

    return run_diff(a, b, listener=listener)
