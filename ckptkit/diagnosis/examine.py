"""The examination that `ckptkit doctor` makes: facts are gathered at once, then judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, NotACheckpointError, UsageError
from ckptkit.core.threads import WorkerThread
from ckptkit.diagnosis.disk import DiskFacts, gather_disk, judge_disk
from ckptkit.diagnosis.findings import Diagnosis, Finding, SaveDemand
from ckptkit.diagnosis.machine import gather_machine, judge_machine
from ckptkit.diagnosis.store import examine_store, store_problem
from ckptkit.diagnosis.training_arguments import (
    CONFIG_SUFFIXES,
    TrainingArguments,
    read_arguments,
)
from ckptkit.diagnosis.versions import installed_versions, judge_versions
from ckptkit.runs.find_run import find_run
from ckptkit.runs.listing import RunListing, bytes_of, list_run
from ckptkit.runs.retention import trainer_state
from ckptkit.runs.steps import RunStep
from ckptkit.storage.locations import PathLike, Place, is_url, local_path, place_of
from ckptkit.storage.places import open_source

_T = TypeVar("_T")
_DISK_SECONDS = 15.0
_STORE_SECONDS = 20.0
_SAME_SIZE = 1.5  # a step has more than weights and moments
_COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmbt]?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_FEWEST_PARAMETERS = 1_000  # below, a unit was forgotten
_READ_ONLY = frozenset({"hf", "http", "https"})
_ADAPTER_FILE = "adapter_model.safetensors"
_EMPTY_BYTES = 128  # of a safetensors file without tensors, with room for metadata


def examine(
    places: Sequence[PathLike],
    storage_options: Mapping[str, Any] | None,
    *,
    local: Path | None,
    model_size: str | int | None,
    ranks: int | None,
    nodes: int | None,
    keep_last: int | None,
    steps: int | None,
    writes: bool,
) -> Diagnosis:
    """Looks at everything at once, and judges what was found."""
    named, configs = _tell_apart(places, storage_options)
    parameters = None if model_size is None else parse_parameters(model_size)
    said = TrainingArguments()
    for config in configs:
        said = said.joined(read_arguments(config))
    said = said.joined(TrainingArguments(ranks=ranks, nodes=nodes))
    if named is None and said.output_dir:
        named = place_of(said.output_dir)
    run, where = (place_of("."), "this directory") if named is None else (named, named.location)

    listing = _begin(lambda: _examine_run(named, said, steps))
    tier = None if local is None else _begin(lambda: gather_disk(str(local), local, writes=writes))
    folder = Path() if run == "." or is_url(run) else local_path(run)  # which may be gone
    store = disk = None
    if is_url(run):
        store = _begin(lambda: examine_store(run, writes=writes))
    else:
        disk = _begin(lambda: gather_disk(where, folder, writes=writes))

    demand, findings = _wait(listing, _DISK_SECONDS) or (SaveDemand(), [])
    demand = _complete(demand, said, parameters, keep_last)
    if store is not None:
        late = store_problem(where, _late(_STORE_SECONDS), "check the network and the endpoint")
        answer = _wait(store, _STORE_SECONDS)
        findings += answer or [late]
    if disk is not None:
        facts = _wait(disk, _DISK_SECONDS) or DiskFacts(where, folder, problem=_late(_DISK_SECONDS))
        findings += judge_disk(facts, demand)
    if tier is not None and local is not None:
        late_disk = DiskFacts(str(local), local, problem=_late(_DISK_SECONDS))
        findings += judge_disk(_wait(tier, _DISK_SECONDS) or late_disk, demand, is_local_tier=True)
    findings += judge_machine(gather_machine(), demand)
    findings += judge_versions(installed_versions())
    order = ("error", "warning", "ok")
    return Diagnosis(where, tuple(sorted(findings, key=lambda one: order.index(one.severity))))


def _begin(call: Callable[[], _T]) -> Future[_T]:
    """Calls in a thread that nothing waits for at the end: a file system or a client may hang."""
    worker = WorkerThread("ckptkit-doctor")
    future = worker.submit(call)
    worker.stop()
    return future


def _wait(future: Future[_T], seconds: float) -> _T | None:
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # what was called raised it
            raise
        return None


def _late(seconds: float) -> str:
    return f"did not answer within {seconds:.0f} s"


def _tell_apart(
    places: Sequence[PathLike], options: Mapping[str, Any] | None
) -> tuple[Place | None, list[Path]]:
    """Returns the run, if there is one, and the configuration files."""
    runs: list[Place] = []
    configs: list[Path] = []
    for place in (place_of(one, options) for one in places):
        path = None if is_url(place) else local_path(place)
        is_config = path is not None and path.suffix.lower() in CONFIG_SUFFIXES
        if path is not None and (path.is_file() or (is_config and not path.is_dir())):
            configs.append(path)
            continue
        if not place.location or (is_url(place) and place.protocol in _READ_ONLY):
            raise UsageError(
                "runs cannot be saved there"
                if place.location
                else "names no directory and no file",
                where=place.location,
                hint="name a directory or a bucket",
            )
        runs.append(place)
    if len(runs) > 1:
        raise UsageError(
            f"names {len(runs)} runs, where one was expected",
            where=str(runs[1].location),
            hint="pass one run, and any number of configuration files",
        )
    return runs[0] if runs else None, configs


def parse_parameters(text: str | int) -> int:
    """Reads a number of parameters.

    >>> parse_parameters("8B"), parse_parameters("350m"), parse_parameters("1.5T")
    (8000000000, 350000000, 1500000000000)
    """
    match = _COUNT.fullmatch(str(text))
    count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if count < _FEWEST_PARAMETERS:
        raise UsageError(
            f"{str(text)!r} is not a number of parameters"
            + (f": no model has {count:,}" if count else ""),
            where="--model-size",
            hint="pass the parameters of the model with a unit, such as 8B or 350M",
        )
    return count


def _examine_run(
    run: Place | None, said: TrainingArguments, steps: int | None
) -> tuple[SaveDemand, list[Finding]]:
    """Returns what the steps of a run, which may have none yet, say of those to come."""
    nothing = SaveDemand(to_come=steps or _to_come(said, {}))
    if run is None or (not is_url(run) and not local_path(run).is_dir()):
        return nothing, []
    try:
        place = place_of(find_run(run))
        try:
            listing = list_run(place)
        except NotACheckpointError:
            return nothing, []
    except CkptkitError:
        if is_url(run):  # which is judged as a store
            return nothing, []
        raise
    newest = max((s for s in listing.steps if s.complete), key=lambda s: s.step, default=None)
    if newest is None:
        return nothing, []
    with open_source(place) as source:
        try:
            state = trainer_state(source, newest.name)
        except CkptkitError:
            state = {}
    to_come = steps or _to_come(said, {"global_step": newest.step, **state})
    return replace(_demand_of(listing, newest), to_come=to_come), _empty_adapters(newest)


def _demand_of(listing: RunListing, newest: RunStep) -> SaveDemand:
    others = {file.inode for step in listing.steps if step is not newest for file in step.files} - {
        ""
    }
    new = [file for file in newest.files if file.inode not in others]
    steps = sorted(step.step for step in listing.steps if step.complete)
    kept = _kept(steps)
    return SaveDemand(
        step_bytes=bytes_of(new),
        basis=newest.name,
        stored_steps=len(steps),
        keep_last=kept,
        kept_because="as many as the run has now" if kept else "",
        files=len(newest.files),
    )


def _kept(steps: Sequence[int]) -> int | None:
    """Returns how many steps a run seems to keep; None if it seems to keep all.

    >>> _kept([300, 400, 500]), _kept([100, 200, 300]), _kept([100, 250])
    (3, None, None)
    """
    distances = {later - earlier for earlier, later in pairwise(steps)}
    if len(distances) != 1:
        return None
    return len(steps) if steps[0] > distances.pop() else None


def _to_come(said: TrainingArguments, state: Mapping[str, Any]) -> int | None:
    """Returns how many more steps the Trainer will save, by its arguments, else by its state."""
    stated = {"max_steps": said.max_steps, "save_steps": said.save_every}
    known = {**state, **{name: value for name, value in stated.items() if value is not None}}
    most, done, every = (
        value if isinstance(value, int) else 0
        for value in map(known.get, ("max_steps", "global_step", "save_steps"))
    )
    return max(-(-(most - done) // every), 0) if most > 0 and every > 0 else None


def _empty_adapters(step: RunStep) -> list[Finding]:
    return [
        Finding(
            "empty-adapter",
            "error",
            file.path,
            f"an adapter without tensors, {file.size_bytes:,} bytes",
            "the weights of the adapter",
            "its weights are lost: PEFT 0.21 saves none under FSDP1; use FSDP2, PEFT 0.20 or"
            " `install(trainer)` of ckptkit.integrations.transformers",
            "huggingface/peft#3490",
        )
        for file in step.files
        if file.path.endswith(_ADAPTER_FILE) and file.size_bytes < _EMPTY_BYTES
    ]


def _complete(
    demand: SaveDemand, said: TrainingArguments, parameters: int | None, keep_last: int | None
) -> SaveDemand:
    """Adds what the user and the files say: the user first, then the files, then the run."""
    demand = replace(demand, ranks=said.ranks or 1, nodes=said.nodes or 1)
    if parameters is not None:
        size = parameters * said.bytes_per_parameter
        basis = f"--model-size, {said.bytes_per_parameter} bytes a parameter"
        # Steps of a smaller model do not make room for those of this one.
        kept = demand.stored_steps if size < _SAME_SIZE * (demand.step_bytes or 0) else 0
        demand = replace(demand, step_bytes=size, basis=basis, stored_steps=kept)
    if said.keep_last is not None:
        demand = replace(demand, keep_last=said.keep_last, kept_because="save_total_limit")
    if keep_last is not None:
        demand = replace(demand, keep_last=keep_last, kept_because="--keep-last")
    return demand
