"""The final model folder, written by all ranks at once: no gather, no collective, no second pass.

Every rank plans the whole folder from what it knows of the model, and writes its own bytes at
their final offsets. When they are durable it tells rank 0, which makes the folder visible once
all ranks have done so. A rank that is late keeps nobody waiting but that commit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from ckptkit.core.arguments import refuse_unknown
from ckptkit.core.errors import RefusedError
from ckptkit.pipeline.source_places import check_path
from ckptkit.planning.requests import (
    DEFAULT_MAX_FILE_BYTES,
    ConsolidateRequest,
    DTypeChoice,
    DTypeLike,
    parse_size,
)
from ckptkit.storage.replacing import refuse_unnamed_in
from ckptkit.training.export_attempt import Attempt, SaveInstead
from ckptkit.training.export_handle import ExportHandle
from ckptkit.training.export_plan import ExportRequest
from ckptkit.training.peers import Peers
from ckptkit.training.state import BoundState

__all__ = ["ExportHandle", "ExportOptions", "Exporter", "make_request"]


class ExportOptions(TypedDict, total=False):
    """The options of an export; every rank gives the same.

    Attributes:
        dtype: Of floating tensors: "float32", "bfloat16" or "float16", or "keep" (default) for
            the one that they are trained in. Integers are never cast.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB"; by
            default as `ckptkit consolidate` has it.
        overwrite: Whether an output that holds something is replaced.
        names: "auto" (default) writes the names of `save_pretrained`, and refuses what would not
            load as the model of the configuration; "live" writes those of training, and compares
            nothing.
    """

    dtype: DTypeChoice | DTypeLike
    max_shard_size: int | str
    overwrite: bool
    names: Literal["auto", "live"]


def make_request(
    out: str | PathLike[str], options: ExportOptions, source: Mapping[str, Any]
) -> ExportRequest:
    """Checks what the user asks of an export.

    Args:
        out: The directory to be.
        options: How to write it.
        source: What the manifest says of the origin; what lies at its `path` is not replaced.

    Raises:
        UsageError: If something does not have the form that it needs.
        RefusedError: If the run, the current directory, or files that are not of an earlier
            output would be replaced.
    """
    path = os.fspath(out)
    check_path(path, "out")
    refuse_unknown(options, ExportOptions.__annotations__, where="export")
    target, overwrite = Path(path).resolve(), options.get("overwrite", False)
    for place in (Path.cwd(), Path(source["path"]).resolve()) if overwrite else ():
        if target == place or target in place.parents:
            raise RefusedError(
                f"would replace {str(place)!r}, which is in use",
                where=path,
                hint="name a directory below it",
            )
    if overwrite and target.is_dir():
        refuse_unnamed_in(target, path)
    size = options.get("max_shard_size", DEFAULT_MAX_FILE_BYTES)
    request = ConsolidateRequest(
        dtype=options.get("dtype", "keep"),
        names=options.get("names", "auto"),
        max_file_bytes=parse_size(size, option="max_shard_size"),
    )
    return ExportRequest(Path(path).absolute(), request, overwrite, source)


class Exporter:
    """Runs the exports of a Checkpointer; calls come one at a time, the same on all ranks."""

    def __init__(self, peers: Peers, sidecar: Mapping[str, object], timeout_seconds: float) -> None:
        """Takes what all exports have in common.

        Args:
            peers: The ranks.
            sidecar: What the user adds beside the weights.
            timeout_seconds: How long other ranks are waited for.
        """
        self._peers = peers
        self._sidecar = sidecar
        self._timeout_seconds = timeout_seconds
        self._count = 0
        self._under_way: list[tuple[threading.Thread, ExportHandle]] = []

    def export(
        self,
        find_bound: Callable[[], BoundState],
        request: ExportRequest,
        save_instead: SaveInstead,
    ) -> ExportHandle:
        """Writes this rank's part, and leaves the rest to the background.

        Where ranks hold different tensors, as stages of a pipeline do, all of them are waited for
        before.

        Args:
            find_bound: Returns the state, with one model; what it raises is told to all ranks.
            request: What to write.
            save_instead: Saves the state sharded, where the output's storage does not take
                ranges from several machines; called on all ranks or on none.

        Returns:
            The handle of the export, once this rank's bytes are durable.

        Raises:
            CkptkitError: What went wrong on this rank; the others are told.
        """
        began = time.perf_counter()
        self._under_way = [e for e in self._under_way if not e[1].done() or e[1].unheard_error]
        self._count += 1
        attempt = Attempt(self._peers, self._count, request, self._timeout_seconds)
        attempt.begin(find_bound, self._sidecar, save_instead)
        handle = ExportHandle(request.out)
        durable = time.perf_counter()
        thread = threading.Thread(
            target=lambda: attempt.finish(handle, began, durable),
            name="ckptkit-export",
            daemon=True,
        )
        self._under_way.append((thread, handle))
        thread.start()
        return handle

    def close(self) -> None:
        """Waits for all exports to end.

        Raises:
            CkptkitError: If one failed, and nobody has asked for its result.
        """
        for thread, _ in self._under_way:
            thread.join()
        errors = [error for _, handle in self._under_way if (error := handle.unheard_error)]
        self._under_way.clear()
        if errors:
            raise errors[0]
