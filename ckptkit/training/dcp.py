"""`save`, `async_save` and `load` of torch.distributed.checkpoint, through the saver of ckptkit.

    import ckptkit.training.dcp as dcp  # instead of torch.distributed.checkpoint

The arguments are those of torch 2.6 to 2.15, and so are the files. No collective is issued: ranks
agree through the store of torch.distributed, at the call on who holds what, and at the end on the
commit. What cannot be honoured (a planner or a writer of one's own, a group that is smaller than
the world, tensors that are no plain memory) goes to torch, with one line in the log.

Source: torch/distributed/checkpoint/state_dict_saver.py, state_dict_loader.py and
default_planner.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import operator
import os
import posixpath
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import checkpoint as torch_dcp
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from ckptkit.core.arguments import STOCK
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    ResumeError,
    SaveError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.index import Box, Key, KeyPath, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.core.text import a_kind
from ckptkit.core.threads import WorkerThread, call_at_exit, few_collections
from ckptkit.engine.box_reads import plan_chunk_reads, read_chunks
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.engine.reader import Origin
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import parse_step
from ckptkit.storage.locations import (
    STAGED_FILES,
    hidden_name,
    is_hub_bucket,
    is_read_only,
    local_path,
)
from ckptkit.storage.places import Place, is_url
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers, check_same_place, open_peers, place_facts
from ckptkit.training.handle import SaveHandle
from ckptkit.training.load.load_pieces import (
    MOST_PARTS,
    Packed,
    memory_of,
    pack,
    prove_together,
)
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.save.file_layout import check_storable
from ckptkit.training.save.frozen import FrozenFiles
from ckptkit.training.save.saver import Save, SaveCommitter, SaveSlot
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.training.settings import Settings, check_storage_options
from ckptkit.training.state.dtensors import Copies, DTensor, Meshes, local_part
from ckptkit.training.state.memory_changes import count_changes
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.state.objects import is_plain, torch_archive
from ckptkit.training.state.pieces import Holdings, ObjectValue, Piece, Replicas
from ckptkit.training.tiers.url_run import check_place
from ckptkit.training.tiers.url_step import UrlCommitter
from ckptkit.version import __version__
from ckptkit.writer.messages import Remote
from ckptkit.writer.upload.run_store import RunStore

__all__ = ["async_save", "load", "save"]
logger = logging.getLogger(__name__)

_SETTINGS = Settings(layout="dcp")
_TIMEOUT_SECONDS = _SETTINGS.timeout_seconds
_TOPIC = "ckptkit.training.dcp"
BEGIN, _KEYS, _LOAD = f"{_TOPIC}.save", f"the keys of {_TOPIC}.save", f"{_TOPIC}.load"
_STAGERS = frozenset({"BlockingAsyncStager", "DefaultStager"})
_FIELDS = frozenset(field.name for field in fields(Metadata))
_HASH_BYTES = 6  # of a key among those of one entry
_OVERLAPS = 1  # some elements of a tensor are one in memory, as those that `expand` makes
_LOCK = threading.RLock()  # a state_dict() may save something itself
_SESSIONS: dict[tuple[bool, int], tuple[_Session, Any]] = {}
_LOGGED: set[str] = set()
Ranks = tuple[int, ...]


def __getattr__(name: str) -> Any:
    return getattr(torch_dcp, name)


def save(
    state_dict: Mapping[str, Any],
    storage_writer: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves as `torch.distributed.checkpoint.save`, and returns once the folder is complete.

    Returns:
        The metadata, which is read from the folder when it is looked at.

    Raises:
        CkptkitError: If the save failed on any rank; it is raised on all.
    """
    saved = _save(
        state_dict,
        checkpoint_id,
        storage_writer,
        planner,
        _options(process_group, no_dist=no_dist, use_collectives=use_collectives),
    )
    return saved.result() if isinstance(saved, SaveFuture) else saved("save")


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves as `torch.distributed.checkpoint.async_save`, and returns once the state is copied.

    A process of ckptkit writes, whatever `async_checkpointer_type` is. torch's own stagers are not
    needed; with one that stages in a thread, the answer is an `AsyncSaveResponse`, as torch's is.

    Returns:
        The future of what `save` returns or raises.
    """
    options = _options(process_group, no_dist=no_dist, use_collectives=use_collectives)
    for name, value in (
        ("async_checkpointer_type", async_checkpointer_type),
        ("async_stager", async_stager),
    ):
        if value is not None:  # older versions lack some
            options[name] = value
    saved = _save(state_dict, checkpoint_id, storage_writer, planner, options)
    if not isinstance(saved, SaveFuture):
        return saved("async_save")
    if not getattr(getattr(async_stager, "_config", None), "use_async_staging", False):
        return saved
    staged: Future[None] = Future()
    staged.set_result(None)  # the streams of the training wait for what devices still copy
    return state_dict_saver.AsyncSaveResponse(staged, saved)


def load(
    state_dict: dict[str, Any],
    storage_reader: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads as `torch.distributed.checkpoint.load`, once saves under way have ended.

    Each rank plans and reads for itself, without a collective. Checksums are compared.

    Raises:
        CkptkitError: If another rank failed, or bytes have another checksum than was stored, which
            no rank could see alone; a rank that fails raises torch's error.
    """
    stock = partial(stock_function("load"), state_dict, planner=planner)
    as_it_is = partial(
        stock,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        **_options(process_group, no_dist=no_dist),
    )
    reason = _why_not(planner, process_group)
    alone = {"no_dist": True}
    if "no_dist" not in inspect.signature(stock_function("load")).parameters:
        alone = {}
        if _world_size() > 1:
            reason = reason or f"torch {torch.__version__} loads with all ranks only"
    if type(storage_reader) not in {type(None), torch_dcp.FileSystemReader, FsspecReader}:
        reason = reason or f"{a_kind(storage_reader)} reads in its own way"
    place, why = _place_of(storage_reader, checkpoint_id)
    if reason or place is None:  # without a place, torch raises
        _log_stock(reason or why)
        with _LOCK:
            for begun, _ in _SESSIONS.values():
                begun.wait()
        as_it_is()
        return
    with _LOCK, ExitStack() as opened:
        session = _session(alone=no_dist)
        session.wait()
        try:
            ours = opened.enter_context(closing(_CheckingReader(place, storage_reader)))
            is_divided = ours.reads_its_own_metadata()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                if not is_divided:
                    stock(storage_reader=ours, **alone)
        except BaseException as error:  # torch's own, which is no `Exception`
            session.agreement.refuse(_LOAD, error)
            raise
        if is_divided:
            _log_stock("each rank has metadata of its own")
            as_it_is()
            return
        session.agreement.prove(ours)


def close_all() -> list[CkptkitError]:
    """Waits for all saves and ends their processes; returns errors that no caller has asked for."""
    failures: list[CkptkitError] = []
    while _SESSIONS:
        (_, pid), (session, _) = _SESSIONS.popitem()
        if pid != os.getpid():  # in a forked child, to which nothing of it belongs
            continue
        session.close()
        failures += [h.unheard_error for h in session.handles if h.unheard_error is not None]
    return failures


def stock_function(name: str) -> Callable[..., Any]:
    """Returns one of torch's functions, not what replaces it."""
    function = getattr(state_dict_loader if name == "load" else state_dict_saver, name)
    stock: Callable[..., Any] = getattr(function, STOCK, function)
    return stock


class SaveFuture(Future[Any]):
    """The future of a save, with what torch's has: the metadata, or the error."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self.handle = handle
        handle.call_at_end(self._end)

    def result(self, timeout: float | None = None) -> Any:
        self.handle.mark_known()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.handle.mark_known()
        return super().exception(timeout)

    def _end(self) -> None:
        error = self.handle.error
        if error is None:
            self.set_result(_MetadataOf(self.handle.report().path))
        else:
            self.set_exception(error)


class _MetadataOf(Metadata):
    """The metadata of a folder, which is read when it is looked at: few callers do."""

    def __init__(self, place: Path | Place) -> None:
        self._place = place

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in _FIELDS and name not in own:
            own |= vars(_reader_of(own["_place"]).read_metadata())
        return object.__getattribute__(self, name)


def _reader_of(place: Path | Place) -> torch_dcp.FileSystemReader:
    if isinstance(place, Path):
        return torch_dcp.FileSystemReader(place)
    reader: Any = FsspecReader(place.location, **place.options)
    reader.fs.fs.invalidate_cache()  # of listings, which another process may have changed since
    return reader  # type: ignore[no-any-return]


class _CheckingReader(torch_dcp.FileSystemReader):
    """Reads tensors straight into their memory, and compares checksums; the rest as torch."""

    def __init__(self, place: Path | Place, given: torch_dcp.FileSystemReader | None) -> None:
        own = _reader_of(place)
        vars(self).update(vars(own))
        if given is not None:  # what it was made with
            vars(self).update(vars(given), fs=own.fs, path=own.path)
        self.place = place
        self.step: StoredStep | None = None
        self.partial: tuple[NumberedRecord, ...] = ()  # records that this rank has read in part

    def reads_its_own_metadata(self) -> bool:
        """Whether ranks saved with `use_collectives=False`."""
        rank = dist.get_rank() if _world_size() > 1 else 0
        own = f"__{rank}{METADATA}"
        has, at = self.fs.exists, partial(self.fs.concat_path, self.path)
        return not has(at(METADATA)) and has(at(own))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        others = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
        try:
            with plain_torch():
                self.step = StoredStep.open(self.place)
                index = self.step.index("")
                targets = [local_part(planner.resolve_tensor(item)) for item in tensors]
                read = [_memory(index, *pair) for pair in zip(tensors, targets, strict=True)]
                wanted = (
                    (index.tensors[Key(item.storage_index.fqn)], box, memory_of(elements))
                    for item, (box, elements) in zip(tensors, read, strict=True)
                    if elements.numel()
                )
                reads = plan_chunk_reads(wanted)
            self.step.prove_values("", {item.storage_index.fqn for item in others})
        except (UnsupportedError, FormatError, UnsafePickleError, ResumeError) as error:
            _log_stock(f"without checksums, since {error}")
            self.close()
            return super().read_data(plan, planner)
        done = super().read_data(replace(plan, items=others), planner)
        origin = Origin("step", self.step.source, index, most_pieces=MOST_PARTS)
        with plain_torch():
            try:
                _, self.partial = read_chunks(origin, reads)
            except UnsupportedError as error:  # of an archive, which says more than the index
                _log_stock(f"without checksums, since {error}")
                self.close()
                return super().read_data(replace(plan, items=tensors), planner)
            finally:
                count_changes(target for target in targets if not target.is_inference())
            for item, target, (_, elements) in zip(tensors, targets, read, strict=True):
                if elements is not target:
                    target.copy_(elements)
                planner.commit_tensor(item, target)
        return done

    def close(self) -> None:
        if self.step is not None:
            self.step.close()
        self.step = None

    def tables(self, world_size: int) -> Packed:
        """Returns what the ranks that read this step prove together."""
        return pack({self._scope: self.partial}, world_size=world_size)

    def check(self, tables: Sequence[Packed]) -> None:
        """Compares what no rank could alone; for rank 0."""
        if self.step is None:
            return
        step = self.step
        step.check_digests()

        def name(scope: str, number: int) -> str:
            file = step.index("").path_of(number) if scope == self._scope else ""
            return posixpath.join(scope.partition("\n")[0], file)

        if left := prove_together(tables, name):
            logger.info("%d records were read in part by all ranks, and not checked", left)

    @property
    def _scope(self) -> str:
        """Names a step; ranks of several machines may have others at the same path."""
        attempt = "" if self.step is None else self.step.attempt
        return f"{self.place}\n{attempt or place_facts(self.place)['machine']}"


def _memory(index: TensorIndex, item: ReadItem, target: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """Returns a part of a stored tensor, and memory for it: the target if that fits."""
    entry = index.tensors.get(Key(item.storage_index.fqn))
    if entry is None or target.shape != item.lengths:
        raise UnsupportedError("is read by torch only", where=item.storage_index.fqn)
    corner = item.storage_index.offset or (0,) * len(entry.shape)
    offsets = tuple(map(operator.add, corner, item.storage_offsets))
    dtype = getattr(torch, entry.dtype.name)
    overlaps = torch._debug_has_internal_overlap(target) == _OVERLAPS  # noqa: SLF001
    is_fit = target.dtype == dtype and not overlaps
    elements = target if is_fit else torch.empty(item.lengths, dtype=dtype)
    return Box(offsets, tuple(item.lengths)), elements


class _TorchsPlanner(torch_dcp.DefaultSavePlanner):
    """The planner of saves that torch makes, by a thread that calls the replaced `save`."""


def _options(group: Any, *, no_dist: bool, use_collectives: bool = True) -> dict[str, Any]:
    """Returns the options that torch is called with; older versions lack some."""
    options: dict[str, Any] = {"process_group": group}
    options |= {"no_dist": True} if no_dist else {}
    return options if use_collectives else options | {"use_collectives": False}


def _save(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: Any,
    planner: Any,
    options: Mapping[str, Any],
) -> SaveFuture | Callable[[str], Any]:
    """Returns the future of a save, or what has torch save with the function of a name."""

    def stock(name: str) -> Any:
        if _overwrites(writer) and place is not None:
            _forget_manifest(place)
        return stock_function(name)(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=_TorchsPlanner() if planner is None else planner,
            **options,
        )

    place, nowhere = _place_of(writer, checkpoint_id)
    stager = options.get("async_stager")
    reason = _why_not(planner, options["process_group"])
    if writer is not None:
        reason = reason or _why_not_as(writer)
    if "use_collectives" in options:
        reason = reason or "use_collectives is False, so that each rank writes metadata of its own"
    if stager is not None and stager is not writer and type(stager).__name__ not in _STAGERS:
        reason = reason or f"{a_kind(stager)} stages in its own way"
    if isinstance(place, Place):
        reason = reason or _why_not_to(place)
    if reason or place is None:  # without a place, torch raises
        _log_stock(reason or nowhere)
        return stock
    if writer is not None and checkpoint_id is not None:
        if isinstance(place, Path):
            writer.reset(checkpoint_id)
        else:  # `reset` would drop the options that the writer was made with
            writer.path = checkpoint_id
    with _LOCK, few_collections(), plain_torch() as unsuited:
        session = _session(alone="no_dist" in options)
        check = partial(check_modes, unsuited, "async_save")
        saved = session.save(state_dict, place, check)
    if isinstance(saved, SaveHandle):
        return SaveFuture(saved)
    _log_stock(saved)
    return stock


def _place_of(storage: Any, named: Any) -> tuple[Path | Place | None, str]:
    """Returns where a checkpoint is; None, and why, where only torch gets there.

    A URL has the options that its writer or reader was made with.
    """
    named = getattr(storage, "path", None) if named is None else named
    if not named:
        return None, ""
    filesystem: Any = getattr(getattr(storage, "fs", None), "fs", None)
    known = getattr(filesystem, "protocol", ())
    try:
        place = Place(named)
        if place.protocol in ((known,) if isinstance(known, str) else known):
            place = Place(named, filesystem.storage_options)
    except UsageError as error:
        return None, f"the place of the checkpoint {error.message}"
    if not is_url(place):
        if all(mark in place for mark in ("::", "://")):
            return None, "a URL of several file systems"
        return local_path(named).absolute(), ""
    if type(storage) in {torch_dcp.FileSystemReader, torch_dcp.FileSystemWriter}:
        return None, f"{a_kind(storage)} takes no URL"
    return place, ""


def _why_not_to(place: Place) -> str:
    """Returns why only torch can save to a URL; empty if it does not have to."""
    try:
        check_place(place)
        check_storage_options(place.options)
    except UsageError as error:
        return str(error.message)
    parts = place.inner_path.split("/")
    is_named = len(parts) > (3 if is_hub_bucket(place) else 1) and parts[-1] not in {".", ".."}
    return "" if is_named else "a URL that does not end in the name of a step"


def _forget_manifest(place: Path | Place) -> None:
    """Removes the manifest of a step that another saver replaces."""
    if isinstance(place, Path):
        (place / MANIFEST_NAME).unlink(missing_ok=True)
    elif not is_read_only(place):
        with suppress(CkptkitError):
            RunStore(Remote(place.location, place.options)).remove(MANIFEST_NAME)


def _why_not(planner: Any, group: Any) -> str:
    """Returns why torch has to plan; empty if it does not."""
    if isinstance(planner, _TorchsPlanner):
        return " "
    if planner is not None and not _plans_as_torch(type(planner)):
        return f"{a_kind(planner)} plans in its own way"
    if planner is not None and not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return "the planner does not flatten"
    if group is not None and dist.is_initialized() and dist.get_world_size(group) < _world_size():
        return "the process group is smaller than the world"
    return ""


def _plans_as_torch(kind: type) -> bool:
    """Whether it is torch's own planner, or a subclass that only sets it up, as Automodel's do."""
    known = (torch_dcp.DefaultSavePlanner, torch_dcp.DefaultLoadPlanner)
    own = (vars(base).items() for base in takewhile(lambda b: b not in known, kind.__mro__))
    methods = [n for n, value in chain.from_iterable(own) if hasattr(value, "__get__")]
    return issubclass(kind, known) and all(name.startswith("__") for name in methods)


def _why_not_as(writer: Any) -> str:
    """Returns why only that writer can write; empty if its files are those of ckptkit."""
    if type(writer) not in {torch_dcp.FileSystemWriter, FsspecWriter}:
        return f"{a_kind(writer)} writes in its own way"
    if getattr(getattr(writer, "transforms", None), "extensions", ()):
        return "the writer has extensions"
    kind = getattr(writer, "serialization_format", None)
    if getattr(kind, "name", "TORCH_SAVE") != "TORCH_SAVE":
        return f"the writer writes {kind}"
    return "" if getattr(writer, "overwrite", True) else "the writer must not overwrite"


def _overwrites(writer: Any) -> bool:
    """Whether torch replaces the files of a step, so that its manifest would be wrong."""
    is_known = writer is None or isinstance(writer, torch_dcp.FileSystemWriter)
    return is_known and getattr(writer, "overwrite", True)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _log_stock(reason: str) -> None:
    """Logs once, on the first rank, why torch saves or loads."""
    if reason.strip() and reason not in _LOGGED:
        _LOGGED.add(reason)
        if _world_size() == 1 or dist.get_rank() == 0:
            logger.warning("torch.distributed.checkpoint itself saves or loads: %s", reason)


class _Session:
    """What saves for one process group: buffers, processes and threads, from the first save on."""

    def __init__(self, *, alone: bool) -> None:
        """Waits for the other ranks to open it too, unless this rank saves `alone`."""
        if alone:
            self.peers = Peers(0, 1, LocalKeyValueStore(), os.urandom(4).hex())
        else:
            self.peers = open_peers(_TOPIC, timeout_seconds=_TIMEOUT_SECONDS, is_place=False)
        self.agreement = Agreement(self.peers)
        rank, nonce = self.peers.rank, self.peers.nonce
        timeouts = WriterTimeouts(_SETTINGS.stall_seconds, _TIMEOUT_SECONDS)
        barrier = SaveBarrier(self.peers, _TOPIC)
        self._process = WriterProcess(timeouts, name=f"committer of rank {rank}")
        self._uploads = UrlCommitter(barrier, timeouts, timeout_seconds=_TIMEOUT_SECONDS)
        self._committer = SaveCommitter(
            barrier,
            self._process if rank == 0 else None,
            retire=lambda *_: (),
            timeout_seconds=_TIMEOUT_SECONDS,
            listener=None,
        )
        frozen = FrozenFiles(nonce, rank, 1)
        self._slot = SaveSlot(self.peers, _SETTINGS, self._end, frozen)
        self._asker = WorkerThread("ckptkit-agree")
        self.handles: list[SaveHandle] = []  # of saves under way, and of errors not heard yet

    def save(
        self, state_dict: Mapping[str, Any], path: Path | Place, check: Callable[[], None]
    ) -> SaveHandle | str:
        """Has a state written to a folder; returns the reason if only torch can do that.

        What is wrong on this rank is raised here; on the others the save fails.
        """
        began = time.perf_counter()
        try:
            check()
            flat = FlatState(state_dict)
        except BaseException as error:
            self.agreement.refuse(BEGIN, error)
            raise
        self.handles = [h for h in self.handles if not h.done() or h.unheard_error]
        handle, after = SaveHandle(parse_step(str(path)) or 0), next(reversed(self.handles), None)
        expected = self.agreement.expected(flat)
        asked = self._asker.submit(self.agreement.question(flat, path, expected))
        copied, wrong = None, None
        try:  # meanwhile; where the ranks agree on anything else, it is copied again
            if expected is not None and self._slot.idle:
                copied = self._slot.copy_ahead(expected)
        except BaseException as error:  # noqa: BLE001  raised below, where the others hear of it
            wrong = error
        try:
            number, reason, held = self.agreement.answer(flat, asked.result(), expected)
        except CkptkitError as error:
            return self._failed(handle, path, error)
        if reason:
            return reason
        self.handles.append(handle)
        save = self._named(number, path, handle)
        save.began, save.after = began, after
        with self._slot.hand_over(save):
            if wrong is not None:
                raise wrong
            if isinstance(path, Place):
                self._uploads.place(save)
            self._slot.stage(save, held, copied=copied if held is expected else None)
        self._slot.join()
        return handle

    def _end(self, save: Save) -> None:
        (self._uploads if isinstance(save.final, Place) else self._committer).end(save)

    def _failed(self, handle: SaveHandle, path: Path | Place, error: CkptkitError) -> SaveHandle:
        logger.error("%s was not saved: %s", path, error)
        handle.fail(error)
        self.handles.append(handle)
        return handle

    def wait(self, seconds: float | None = None) -> None:
        """Waits for saves under way to end or fail."""
        until = None if seconds is None else time.monotonic() + seconds
        for handle in self.handles:
            handle.wait(None if until is None else max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Waits for saves under way, and ends threads and processes."""
        self.wait(_TIMEOUT_SECONDS)
        if not all(handle.done() for handle in self.handles):
            logger.error("the program ends before a save; call result() of its future first")
            self._process.kill()
            self._uploads.kill()
            self._slot.kill()
        self._asker.stop()
        with suppress(CkptkitError):
            self._slot.close()
            self._committer.close()
            self._uploads.close()
        self._process.close()
        self.peers.close()

    def _named(self, number: int, path: Path | Place, handle: SaveHandle) -> Save:
        """Returns a save with what names it on all ranks."""
        attempt = f"{self.peers.nonce}-{number}"
        # torchtitan takes each folder for a step that has its name anywhere in its own, and an
        # index right in it, also after a kill.
        folder = Path(hidden_name(Path(path).name, attempt), STAGED_FILES)
        manifest = Manifest(
            kind="training",
            source={
                "step": handle.step,
                "world_size": self.peers.world_size,
                "layout": _SETTINGS.layout,
                "attempt": attempt,
                "save_number": number,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            options={},
            versions={"ckptkit": __version__, "torch": torch.__version__},
            tensors={},
        )
        return Save(
            number=number,
            name=attempt,
            step=handle.step,
            folder=path.parent / folder if isinstance(path, Path) else folder,
            final=path,
            manifest=manifest.to_document(),
            handle=handle,
            retires=False,
            shares=True,
        )


class _Agreed(Struct, frozen=True):
    """What a rank holds of a state by an agreement, without its tensors."""

    form: tuple[object, ...] = ()  # of the state
    own: Mapping[str, str] = {}  # this rank's digests
    digests: Mapping[str, Any] = {}  # those on which the ranks agreed
    pieces: tuple[tuple[str, Piece], ...] = ()
    objects: tuple[str, ...] = ()

    @classmethod
    def of(cls, flat: FlatState, digests: Mapping[str, Any], held: Holdings) -> _Agreed:
        keys = {path: key for key, path in flat.paths.items()}
        nothing = torch.empty(0, device="cpu")
        pieces = tuple((keys[p.key_path], p.holding(nothing)) for p in held.pieces)
        objects = tuple(keys[value.key_path] for value in held.objects)
        return cls(flat.form, flat.digests, digests, pieces, objects)


class Agreement:
    """What ranks agree on at the call of a save: who saves, its number, and who holds what."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._count = 0
        # The ranks that hold each key of an entry that is not alike on all, by their digests.
        self._holders: dict[str, tuple[tuple[str, ...], dict[str, Ranks]]] = {}
        self._last = _Agreed()

    def refuse(self, topic: str, error: BaseException) -> None:
        """Tells the other ranks of an error, without waiting for them."""
        failures = getattr(error, "failures", None)  # of torch's `CheckpointException`, by rank
        found = next(iter(failures.values()))[0] if failures else error
        told = found if isinstance(found, Exception) else SaveError(type(found).__name__)
        self.peers.refuse(topic, told, timeout_seconds=_TIMEOUT_SECONDS)

    def prove(self, reader: _CheckingReader | None) -> None:
        """Raises the error of any rank in a load, or what the ranks prove together to be wrong."""
        nothing = Packed(tables={}, left_out=0)
        own = nothing if reader is None else reader.tables(self.peers.world_size)
        check = (lambda _: None) if reader is None else reader.check
        self.peers.agree(_LOAD, own, check, timeout_seconds=_TIMEOUT_SECONDS)

    def expected(self, flat: FlatState) -> Holdings | None:
        """Returns what this rank holds, unless it or what the other ranks hold has changed."""
        last = self._last
        if not flat.form or flat.form != last.form:
            return None
        return Holdings(
            tuple(piece.holding(flat.locals[key]) for key, piece in last.pieces),
            tuple(flat.object(key) for key in last.objects),
        )

    def question(
        self, flat: FlatState, path: Path | Place, expected: Holdings | None
    ) -> Callable[[], Mapping[str, Any]]:
        """Returns what asks the other ranks, in any thread, about a state that is saved."""
        self._count += 1
        value = {
            "number": self._count,
            "place": place_facts(path),
            "stock": flat.reason,
            "digests": flat.digests if expected is None else self._last.own,
        }
        return partial(self.peers.agree, BEGIN, value, _decide, timeout_seconds=_TIMEOUT_SECONDS)

    def answer(
        self, flat: FlatState, agreed: Mapping[str, Any], expected: Holdings | None
    ) -> tuple[int, str, Holdings]:
        """Returns the number, why only torch can save it, and what this rank holds.

        That is what was `expected`, if the other ranks hold what they held.
        """
        number, reason, digests = int(agreed["number"]), str(agreed["stock"]), agreed["digests"]
        if reason:
            return number, reason, Holdings(())
        if expected is not None and self._last.digests == digests:
            return number, "", expected
        held = self._held(flat, digests)
        self._last = _Agreed.of(flat, digests, held)
        return number, "", held

    def _held(self, flat: FlatState, digests: Mapping[str, Any]) -> Holdings:
        """Returns what this rank holds, once it knows which ranks hold the same."""
        ranks = range(self.peers.world_size)
        unlike = {name: tuple(of_ranks) for name, of_ranks in digests.items() if of_ranks}
        asked = [n for n, of_ranks in unlike.items() if self._holders.get(n, ((),))[0] != of_ranks]
        if asked:
            # The first rank of those with the same keys names them.
            firsts = {
                name: {digest: rank for rank, digest in reversed([*enumerate(unlike[name])])}
                for name in asked
            }
            own = {
                name: flat.hashes(name)
                for name, first in firsts.items()
                if first[unlike[name][self.peers.rank]] == self.peers.rank
            }
            found = self.peers.agree(_KEYS, own, list, timeout_seconds=_TIMEOUT_SECONDS)
            for name in asked:
                holders: dict[str, list[int]] = {}
                for rank, digest in enumerate(unlike[name]):
                    for key in found[firsts[name][digest]].get(name, ()):
                        holders.setdefault(key, []).append(rank)
                self._holders[name] = unlike[name], {k: tuple(r) for k, r in holders.items()}
        groups: dict[Ranks, list[str]] = {}
        for key in sorted(flat.values):
            name = flat.entry(key)
            holders_of = self._holders[name][1][_hash(flat.text(key))] if name in unlike else ranks
            groups.setdefault(tuple(holders_of), []).append(key)
        pieces: list[Piece] = []
        objects: list[ObjectValue] = []
        for holding, keys in groups.items():
            own_number = holding.index(self.peers.rank)
            flat.take(keys, Copies(len(holding), own_number), holding, pieces, objects)
        return Holdings(tuple(pieces), tuple(objects))


def _decide(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Decides on rank 0 who saves, and which entries are not alike on all ranks."""
    check_same_place([value["place"] for value in values], "the directory of the checkpoint")
    names = sorted({name for value in values for name in value["digests"]})
    digests = {name: [value["digests"].get(name, "") for value in values] for name in names}
    reasons = (value["stock"] for value in values)
    return {
        "number": values[0]["number"],
        "stock": next(filter(None, reasons), "" if names else "the state is empty"),
        "digests": {name: [] if len(set(of)) == 1 else of for name, of in digests.items()},
    }


class FlatState:
    """A state dict on this rank, flattened as torch does it."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        planner = torch_dcp.DefaultSavePlanner()
        states = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in state_dict.items()
        }
        planner.set_up_planner(states, None, is_coordinator=False)
        self.values: dict[str, Any] = dict(planner.state_dict)
        self.paths: Mapping[str, KeyPath] = planner.mappings
        self.locals: dict[str, torch.Tensor] = {}  # this rank's parts, except of `ShardedTensor`
        self.reason = ""  # why only torch can save it
        self._archives: dict[str, bytes] = {}
        forms: dict[str, object] = {}
        for key, value in self.values.items():
            if not isinstance(value, torch.Tensor | ShardedTensor):
                if not is_plain(value):
                    self._archives[key] = torch_archive(value)  # as it is now
                forms[key] = None
                continue
            try:
                parts = [local_part(shard, key) for _, shard in _shards(value)]
                for local in parts:
                    check_storable(local, key)
            except UnsupportedError as error:
                self.reason = self.reason or str(error.message)
                continue
            if not isinstance(value, ShardedTensor):
                self.locals[key] = local = parts[0]
                # One that says itself where it is may move.
                if not hasattr(getattr(value, "_local_tensor", value), "__create_chunk_list__"):
                    forms[key] = _form(value, local)
        # Equal for states with the same keys, types, shapes and places; empty where some of these
        # are not known.
        known = len(forms) == len(self.values)
        self.form: tuple[object, ...] = (self.paths, forms) if known else ()

    def entry(self, key: str) -> str:
        path = self.paths[key]
        return str(path[0]) if len(path) > 1 else ""

    def text(self, key: str) -> str:
        """Returns what is the same on ranks that hold a value, or parts of a tensor."""
        value = self.values[key]
        is_tensor = isinstance(value, torch.Tensor | ShardedTensor)
        return f"{key} {list(value.size())}" if is_tensor else key

    def hashes(self, entry: str) -> list[str]:
        return [_hash(self.text(key)) for key in self.values if self.entry(key) == entry]

    def object(self, key: str) -> ObjectValue:
        return ObjectValue("", self.paths[key], self.values[key], self._archives.get(key, b""))

    @cached_property
    def digests(self) -> dict[str, str]:
        """Returns a digest of the keys of each entry."""
        texts: dict[str, list[str]] = {}
        for key in sorted(self.values):
            texts.setdefault(self.entry(key), []).append(self.text(key))
        return {entry: _hash("\n".join(keys)) for entry, keys in texts.items()}

    def take(
        self,
        keys: Sequence[str],
        copies: Copies,
        ranks: Ranks,
        pieces: list[Piece],
        objects: list[ObjectValue],
    ) -> None:
        """Adds what the same ranks hold, of which this one is one."""
        replicas, meshes = Replicas(*copies), Meshes(copies, ranks)
        meshes.learn(self.values[key] for key in keys)
        for key in keys:
            value, path = self.values[key], self.paths[key]
            if isinstance(value, ShardedTensor):
                shape = tuple(value.size())
                pieces += [Piece("", path, shape, (b,), local) for b, local in _shards(value) if b]
            elif isinstance(value, torch.Tensor):
                slot = meshes.slot(key, value, replicas)
                pieces += slot.pieces("", path, self.locals[key])
            elif copies.own == 0:
                objects.append(self.object(key))


def _form(value: torch.Tensor, local: torch.Tensor) -> object:
    spec = value._spec if isinstance(value, DTensor) else None  # noqa: SLF001  see `memory_changes`
    return spec, type(value), local.shape, local.stride(), local.dtype, local.device


def _shards(value: Any) -> list[tuple[Box | None, torch.Tensor]]:
    """Returns the parts of a tensor on this rank, with their places if it is a `ShardedTensor`."""
    if not isinstance(value, ShardedTensor):
        return [(None, value)]
    return [
        (Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach())
        for s in value.local_shards()
        if s.tensor.numel()
    ]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).hexdigest()


def _session(*, alone: bool) -> _Session:
    """Returns what saves for the process group that there is now."""
    group = None if alone or _world_size() == 1 else dist.group.WORLD
    key = group is None, os.getpid()
    session, of_group = _SESSIONS.get(key, (None, None))
    if session is None or of_group is not group:
        if session is not None:
            session.close()
        session = _Session(alone=alone)
        if not any(pid == os.getpid() for _, pid in _SESSIONS):
            call_at_exit(close_all)
        _SESSIONS[key] = session, group
    return session
