"""Writes the final model folder from all ranks at once: no gather, collective or second pass.

Every rank plans the whole folder from what it knows of the model, and writes its own bytes at
their final offsets. When they are durable it reports to rank 0, which makes the folder visible once
all ranks have done so. A late rank delays only that commit, in the background.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.source.open import check_path
from ckptkit.core.arguments import refuse_unknown
from ckptkit.core.errors import CkptkitError, PeerError, RefusedError, SaveError, error_from_json
from ckptkit.core.index import Fqn
from ckptkit.options import (
    DEFAULT_MAX_FILE_BYTES,
    ConsolidateRequest,
    DTypeChoice,
    DTypeLike,
    parse_size,
)
from ckptkit.plan.plan import Plan
from ckptkit.storage.base import Row
from ckptkit.storage.local.target import SharedTarget
from ckptkit.storage.locations import current_directory
from ckptkit.storage.manifests import refuse_unnamed_in
from ckptkit.storage.place_identity import find_filesystem_type, why_not_shared
from ckptkit.training.agree.peers import Peers
from ckptkit.training.environment import ranks_of_this_machine
from ckptkit.training.export.output_plan import (
    ExportNames,
    ExportRequest,
    ExportView,
    LiveModel,
    Table,
    adapter_options,
    disk_names,
    is_adapter,
    kept_of,
    merge_tables,
    pack_table,
    parse_config,
    parts_of_model,
    places_of,
    plan_adapter,
    plan_model,
    side_files,
    unpack_table,
    view_model,
)
from ckptkit.training.export.tensor_writes import (
    BoxWrite,
    answer_of,
    commit,
    compare_with_model,
    mark_of,
    part_of,
    write_literals,
    write_parts,
)
from ckptkit.training.handle import ExportHandle, ExportReport, SaveHandle
from ckptkit.training.save.saver import OURS, agree_on_commit, find_committed
from ckptkit.training.state.collect import BoundState
from ckptkit.training.step_names import model_class

logger = logging.getLogger(__name__)
_RANGES = "ranges"
_ONE_WRITER = "one writer: "  # only one machine may write a file, and why
_VISIBLE_SECONDS = 60.0

SaveInstead = Callable[[BoundState, str], SaveHandle]
"""Saves the state sharded, under a name of its own."""


class _Written(Struct, frozen=True):
    plan: Plan
    live: LiveModel
    is_adapter: bool
    answer: Mapping[str, Any]


class ExportAttempt:
    """One try to export, numbered alike on all ranks."""

    def __init__(
        self, peers: Peers, number: int, request: ExportRequest, timeout_seconds: float
    ) -> None:
        self._peers = peers
        self._number = number
        self._name = f"{peers.nonce}/{number}"
        self._request = replace(request, source={**request.source, "attempt": self._name})
        self._timeout_seconds = timeout_seconds
        self._topic = f"export {number}"  # not where to, which may differ by mistake
        self._target: SharedTarget | None = None
        self._written: _Written | None = None
        self._saved: SaveHandle | None = None
        self._next: tuple[Sequence[str], Sequence[str]] = (), ()  # a command and its options

    def begin(
        self,
        find_bound: Callable[[], BoundState],
        sidecar: Mapping[str, object],
        save_instead: SaveInstead,
    ) -> None:
        """Writes this rank's part, durably, or begins to save it sharded."""
        try:
            request = self._request
            nonce = hashlib.sha256(self._name.encode()).hexdigest()[:16]
            target = SharedTarget(
                request.out, nonce, overwrite=request.overwrite, named=request.named
            )
            self._target = target
            how = self._agreed_way(target)
            bound = find_bound()
            if how == _RANGES or (how.startswith(_ONE_WRITER) and is_adapter(bound)):
                self._written = self._write(target, bound, sidecar, by_ranges=how == _RANGES)
            else:
                self._save(how.removeprefix(_ONE_WRITER), bound, save_instead)
        except BaseException as error:
            first = self._share_failure(error)
            self._give_up()
            if first is None:
                raise
            raise first from error

    def finish(self, handle: ExportHandle, began: float, durable: float) -> None:
        """Waits for the other ranks, and completes the handle; for a thread of its own."""
        try:
            report = self._report(began, durable)
        except CkptkitError as error:
            self._fail(handle, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("exporting to %s", self._request.named)
            self._fail(handle, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self._target is not None:
                self._target.leave()
            if self._peers.rank == 0:
                logger.info("%s", report)
            handle.succeed(report)

    def _agreed_way(self, target: SharedTarget) -> str:
        """Returns how the output can be written: the first rank decides for all."""
        reason = ""
        if self._peers.world_size > 1:
            reason = why_not_shared(
                find_filesystem_type(self._request.out),
                is_one_machine=ranks_of_this_machine() == self._peers.world_size,
            )
        choice = f"{_ONE_WRITER}{reason}" if reason else target.why_no_ranges() or _RANGES
        key = f"exports/{self._number}"
        decided = self._peers.store.compare_set(key, b"", choice.encode()).decode()
        if decided == _RANGES and choice != _RANGES:
            raise RefusedError(choice.removeprefix(_ONE_WRITER), where=str(self._request.named))
        return decided

    def _save(self, reason: str, bound: BoundState, save_instead: SaveInstead) -> None:
        options, usual, arguments = self._request.options, ConsolidateRequest(), list[str]()
        if is_adapter(bound):
            if options.dtype != usual.dtype:
                raise RefusedError(
                    f"{reason}; from shards an adapter is taken with the numbers that it has",
                    where=str(self._request.named),
                    hint="leave dtype out, or export the adapter to another place",
                )
            self._next = ("adapter", "extract"), adapter_options(bound)
        else:
            if options.dtype != usual.dtype:
                arguments += ["--dtype", options.dtype]
            if options.names != usual.names:
                arguments += ["--names", options.names]
            if options.max_file_bytes != usual.max_file_bytes:
                arguments += ["--max-shard-size", str(options.max_file_bytes)]
            self._next = ("consolidate",), arguments
        self._give_up()
        if self._peers.rank == 0:
            logger.warning("%s: %s; it is saved sharded instead", self._request.named, reason)
        self._saved = save_instead(bound, f"export_{self._number}_{self._peers.nonce}")

    def _write(
        self,
        target: SharedTarget,
        bound: BoundState,
        sidecar: Mapping[str, object],
        *,
        by_ranges: bool,
    ) -> _Written:
        exported = view_model(bound)
        plan, live = self._plan(exported, bound, side_files(bound, sidecar))
        names = live.names
        parts = [
            BoxWrite(place, exported.table[source].dtype, box, local)
            for name, place in places_of(plan).items()
            for source in names.sources(name)
            for box, local in names.parts(name, source, exported.parts(source))
        ]
        if self._peers.rank == 0:
            target.sweep()
            write_literals(target, plan)
        rows: Sequence[Row] = ()
        if by_ranges or self._peers.rank == 0:
            shares = write_parts(target, plan, parts)
        else:  # a file of its own, from which rank 0 puts the bytes in place
            file = target.part_file(part_of(self._peers.rank))
            try:
                shares = write_parts(file, plan, parts)
                file.finish()
            finally:
                file.close()
            rows = file.rows
        target.finish(mark_of(self._peers.rank))
        size = sum(part.size_bytes for part in parts)
        answer = answer_of(plan, shares, size, out=str(self._request.named), rows=rows)
        return _Written(plan, live, exported.is_adapter, answer)

    def _plan(
        self, exported: ExportView, bound: BoundState, side: Mapping[str, bytes]
    ) -> tuple[Plan, LiveModel]:
        table, options = self._whole(exported), self._request.options
        modules, names = parts_of_model(bound), ExportNames(None)
        own = model_class(modules[0])
        if exported.is_adapter:
            return plan_adapter(table, side, options), LiveModel(own, table, names)
        if options.names != "live":
            names = disk_names(modules, table, parse_config(side))
        self._request = replace(self._request, versions=names.versions)

        def is_tied(name: Fqn, other: Fqn) -> bool:
            same = exported.same(name, other)
            if exported.is_everywhere and same is None:
                return True
            return bool(self._agree(same is not False, all))

        kept, where = kept_of(modules), str(self._request.named)
        plan = plan_model(table, side, options, is_tied, names, kept, where=where)
        for note in (*names.notes, *plan.notes) if self._peers.rank == 0 else ():
            logger.warning("%s: %s", self._request.named, note)
        return plan, LiveModel(own, table, names)

    def _whole(self, exported: ExportView) -> Table:
        """Returns the tensors of the whole model, which ranks of a pipeline have to exchange."""
        if exported.is_everywhere:
            return exported.table

        def decide(tables: Sequence[str]) -> str:
            return pack_table(merge_tables([unpack_table(table) for table in tables]))

        return unpack_table(self._agree(pack_table(exported.table), decide))

    def _commit(self, written: _Written) -> Mapping[str, Any]:
        target = self._target
        assert target is not None  # noqa: S101  begin() returned

        def commit_all(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            if not written.is_adapter:
                compare_with_model(written.plan, self._request, written.live)
            patience = min(_VISIBLE_SECONDS, self._timeout_seconds / 2)
            return commit(
                target,
                written.plan,
                self._request,
                answers,
                is_adapter=written.is_adapter,
                patience_seconds=patience,
            )

        def find() -> Mapping[str, Any] | None:
            places = dict.fromkeys((self._request.out, self._request.named))  # it may be moved
            found = filter(None, (find_committed(place, self._name) for place in places))
            return next(({"size_bytes": manifest.size_bytes} for manifest in found), None)

        agree = partial(self._agree, dict(written.answer))
        return agree_on_commit(agree, commit_all, find, f"the export to {self._request.named}")

    def _agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        # Rank 0 waits for all and then commits, so the others have to wait for both.
        patience = self._timeout_seconds * (2 if self._peers.rank else 1)
        return self._peers.agree(self._topic, value, decide, timeout_seconds=patience)

    def _share_failure(self, error: BaseException) -> CkptkitError | None:
        """Fails the export on all ranks with the error of this one.

        Returns the error of another rank that came before, and led to this one.
        """
        shared: CkptkitError = SaveError(f"{type(error).__name__}: {error}", hint=OURS)
        if isinstance(error, CkptkitError):
            shared = error
        elif not isinstance(error, Exception):
            shared = SaveError("was interrupted")
        if self._peers.world_size > 1:
            shared = shared.located(f"rank {self._peers.rank}")
        own = json.dumps(shared.to_json()).encode()
        try:
            first = self._peers.store.compare_set(f"exports/{self._number}/error", b"", own)
            self._peers.refuse(self._topic, shared, timeout_seconds=self._timeout_seconds)
        except CkptkitError as problem:
            logger.warning("the other ranks could not be informed of %s: %s", error, problem)
            return None
        is_first = first == own or not isinstance(error, Exception)
        return None if is_first else error_from_json(json.loads(first))

    def _fail(self, handle: ExportHandle, error: CkptkitError) -> None:
        if self._target is not None and self._peers.rank and isinstance(error, PeerError):
            self._target.leave()  # rank 0 may be about to commit it; if not, it removes it
            self._target = None
        self._give_up()
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("%s was not exported: %s%s", self._request.named, error, hint)
        handle.fail(error)

    def _give_up(self) -> None:
        if self._target is not None:
            self._target.abandon()
            self._target = None

    def _report(self, began: float, durable: float) -> ExportReport:
        if self._saved is None:
            assert self._written is not None  # noqa: S101  begin() returned
            committed = self._commit(self._written)
            return ExportReport(
                path=self._request.named,
                size_bytes=self._written.answer["size_bytes"],
                total_bytes=committed["size_bytes"],
                durable_seconds=durable - began,
                committed_seconds=time.perf_counter() - began,
            )
        report = self._saved.report()
        name, options = self._next
        command = [
            *("ckptkit", *name, str(report.path), str(self._request.named)),
            *options,
            *(["--overwrite"] if self._request.overwrite else []),
        ]
        return ExportReport(
            path=report.path,
            size_bytes=report.size_bytes,
            total_bytes=report.total_bytes,
            durable_seconds=report.blocked_seconds,
            committed_seconds=time.perf_counter() - began,
            command=shlex.join(command),
        )


__all__ = ["ExportHandle", "ExportOptions", "Exporter", "make_request"]


class ExportOptions(TypedDict, total=False):
    """The options of an export; every rank gives the same.

    Attributes:
        dtype: Of floating tensors: "float32", "bfloat16" or "float16", or "keep" (default) for
            the one that they are trained in. Integers are never cast.
        cast_all: Whether tensors are cast too that the class of the model keeps in float32.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB"; by
            default as `ckptkit consolidate` has it.
        overwrite: Whether an output that holds something is replaced.
        names: "auto" (default) writes the names of `save_pretrained`, and refuses what would not
            load as the model of the configuration; "live" writes those of training, and compares
            nothing.
    """

    dtype: DTypeChoice | DTypeLike
    cast_all: bool
    max_shard_size: int | str
    overwrite: bool
    names: Literal["auto", "live"]


def make_request(
    out: str | PathLike[str], options: ExportOptions, source: Mapping[str, Any]
) -> ExportRequest:
    path = os.fspath(out)
    check_path(path, "out")
    refuse_unknown(options, ExportOptions.__annotations__, where="export")
    target, overwrite = Path(path).resolve(), options.get("overwrite", False)
    used = filter(None, (current_directory(), Path(source["path"]).resolve()))
    for place in used if overwrite else ():
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
        cast_all=options.get("cast_all", False),
        max_file_bytes=parse_size(size, option="max_shard_size"),
    )
    return ExportRequest(Path(path).absolute(), request, overwrite, source)


class Exporter:
    """Runs the exports of a Checkpointer; calls come one at a time, the same on all ranks."""

    def __init__(self, peers: Peers, sidecar: Mapping[str, object], timeout_seconds: float) -> None:
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

        Where ranks hold different tensors, as stages of a pipeline do, it waits for all of them
        first. `save_instead` saves the state sharded, where the output's storage takes no ranges
        from several machines; it is called on all ranks or on none. Returns once this rank's bytes
        are durable.
        """
        began = time.perf_counter()
        self._under_way = [e for e in self._under_way if not e[1].done() or e[1].unheard_error]
        self._count += 1
        attempt = ExportAttempt(self._peers, self._count, request, self._timeout_seconds)
        attempt.begin(find_bound, self._sidecar, save_instead)
        handle = ExportHandle(request.named)
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
        for thread, _ in self._under_way:
            thread.join()
        errors = [error for _, handle in self._under_way if (error := handle.unheard_error)]
        self._under_way.clear()
        if errors:
            raise errors[0]
