"""The examination that `ckptkit doctor` makes: facts are gathered at once, then judged."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, NotACheckpointError, UsageError
from ckptkit.diagnosis.config_checks import (
    CONFIG_SUFFIXES,
    TrainingSetup,
    join_setups,
    judge_setup,
    read_setup,
)
from ckptkit.diagnosis.disk_checks import DiskFacts, gather_disk, judge_disk
from ckptkit.diagnosis.findings import Diagnosis, Finding, SaveDemand
from ckptkit.diagnosis.machine_checks import gather_machine, judge_machine
from ckptkit.diagnosis.service_checks import (
    HubFacts,
    StoreFacts,
    gather_hub,
    gather_store,
    judge_hub,
    judge_store,
)
from ckptkit.diagnosis.version_checks import installed_versions, judge_versions
from ckptkit.runs.listing import RunListing, bytes_of, list_run
from ckptkit.runs.run_paths import find_run
from ckptkit.runs.save_order import trainer_state
from ckptkit.runs.steps import RunStep
from ckptkit.storage.locations import PathLike, Place, is_url, local_path, place_of
from ckptkit.storage.places import open_source

_T = TypeVar("_T")
_DISK_SECONDS = 15.0
_NETWORK_SECONDS = 10.0
_SAME_SIZE = 1.5  # a step has more than weights and moments
_COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmbt]?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_FEWEST_PARAMETERS = 1_000  # below, a unit was forgotten
_READ_ONLY = frozenset({"hf", "http", "https"})
_ADAPTER_FILE = "adapter_model.safetensors"
_EMPTY_BYTES = 128  # of a safetensors file without tensors, with room for metadata


class Examination(Struct, frozen=True, kw_only=True):
    """What is to be looked at.

    Attributes:
        run: The run, or where one will be; None for none.
        configs: Configuration files.
        local: A node's own disk, for steps before they are drained.
        parameters: Of the model.
        ranks: Of the job.
        nodes: Of the job.
        keep_last: How many steps will stay.
        steps: How many more will be saved.
        push: The repository that is pushed to; empty for none.
        writes: Whether a probe is written.
    """

    run: Place | None = None
    configs: tuple[Path, ...] = ()
    local: Path | None = None
    parameters: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    keep_last: int | None = None
    steps: int | None = None
    push: str = ""
    writes: bool = True

    @classmethod
    def of(
        cls, places: Sequence[PathLike], options: Mapping[str, Any] | None, **given: Any
    ) -> Examination:
        """Tells runs from configuration files.

        Args:
            places: Paths and URLs of both.
            options: Of the storage.
            **given: The other attributes.
        """
        runs: list[Place] = []
        configs: list[Path] = []
        for place in (place_of(one, options) for one in places):
            path = None if is_url(place) else local_path(place)
            is_config = path is not None and path.suffix.lower() in CONFIG_SUFFIXES
            if path is not None and (path.is_file() or (is_config and not path.is_dir())):
                configs.append(path)
            else:
                runs.append(place)
        for run in runs:
            _check_run(run)
        if len(runs) > 1:
            raise UsageError(
                f"names {len(runs)} runs, where one was expected",
                where=str(runs[1].location),
                hint="pass one run, and any number of configuration files",
            )
        return cls(run=runs[0] if runs else None, configs=tuple(configs), **given)


def _check_run(run: Place) -> None:
    if not run.location or (is_url(run) and run.protocol in _READ_ONLY):
        raise UsageError(
            "runs cannot be saved there" if run.location else "names no directory and no file",
            where=run.location,
            hint="name a directory or a bucket; --push OWNER/NAME looks at the Hub",
        )


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


class _RunFacts(Struct, frozen=True):
    """What the steps of a run show; the state is that of the Trainer."""

    demand: SaveDemand = field(default_factory=SaveDemand)
    findings: tuple[Finding, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)


def examine(examination: Examination) -> Diagnosis:
    """Looks at everything at once, and judges what was found.

    Raises:
        InputError: If a configuration cannot be read.
    """
    said = TrainingSetup(ranks=examination.ranks, nodes=examination.nodes)
    setup = join_setups([*map(read_setup, examination.configs), said])
    # With a token in its arguments, the Trainer does not use the one of this environment.
    push = examination.push or ("" if setup.has_token else setup.pushes_to)
    named = examination.run or (place_of(setup.output_dir) if setup.output_dir else None)
    run, where = (place_of("."), "this directory") if named is None else (named, named.location)
    steps = _Waiting(lambda: _gather_run(named), _DISK_SECONDS)
    asked = _Waiting(lambda: gather_hub(push), _NETWORK_SECONDS)
    judge_place = _begin_place(run, where, examination)
    listed, hub = steps.wait() or _RunFacts(), asked.wait()
    demand = _demand(examination, setup, listed)
    findings = [*listed.findings, *judge_place(demand)]
    tier = examination.local
    if tier is not None:
        judge_tier = _begin_disk(str(tier), tier, examination, is_local_tier=True)
        findings += judge_tier(demand)
    machine = gather_machine()
    findings += judge_machine(machine, demand)
    findings += judge_versions(installed_versions(), setup)
    findings += judge_setup(setup, demand, machine.available_bytes)
    findings += judge_hub(
        hub or HubFacts(repo_id=push, has_token=True, problem=_late(_NETWORK_SECONDS))
    )
    return Diagnosis.of(where, findings)


_Judge = Callable[[SaveDemand], list[Finding]]


def _begin_place(run: Place, where: str, examination: Examination) -> _Judge:
    """Begins to look at the place of a run; returns what waits for that, and judges it."""
    if not is_url(run):
        # If the current directory was removed, that is a finding.
        return _begin_disk(where, Path() if run == "." else local_path(run), examination)
    seconds = 2 * _NETWORK_SECONDS
    store = _Waiting(lambda: gather_store(run, writes=examination.writes), seconds)
    late = StoreFacts(where, problem=_late(seconds), advice="check the network and the endpoint")
    return lambda _demand: judge_store(store.wait() or late)


def _begin_disk(
    where: str, folder: Path, examination: Examination, *, is_local_tier: bool = False
) -> _Judge:
    disk = _Waiting(lambda: gather_disk(where, folder, writes=examination.writes), _DISK_SECONDS)
    late = DiskFacts(where, folder, problem=_late(_DISK_SECONDS))
    return lambda demand: judge_disk(disk.wait() or late, demand, is_local_tier=is_local_tier)


def _late(seconds: float) -> str:
    return f"did not answer within {seconds:.0f} s"


class _Waiting(Generic[_T]):
    """A function that runs in a thread, which nothing waits for at the end of the process.

    Calls of a file system or of a client may hang, and cannot be stopped then.
    """

    def __init__(self, gather: Callable[[], _T], seconds: float) -> None:
        self._gather = gather
        self._seconds = seconds
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ckptkit-doctor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._gather()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._error = error

    def wait(self) -> _T | None:
        """Returns the result, or None if it has not come in time."""
        self._thread.join(self._seconds)
        if self._error is not None:
            raise self._error
        return self._result


def _gather_run(run: Place | None) -> _RunFacts:
    """Lists the steps of a run; there may be none yet."""
    if run is None or (not is_url(run) and not local_path(run).is_dir()):
        return _RunFacts()
    try:
        place = place_of(find_run(run))
        try:
            listing = list_run(place)
        except NotACheckpointError:
            return _RunFacts()
    except CkptkitError:
        if is_url(run):  # which is judged as a store
            return _RunFacts()
        raise
    newest = max((s for s in listing.steps if s.complete), key=lambda s: s.step, default=None)
    if newest is None:
        return _RunFacts()
    with open_source(place) as source:
        try:
            state = trainer_state(source, newest.name)
        except CkptkitError:
            state = {}
    state = {"global_step": newest.step, **state}
    return _RunFacts(_demand_of(listing, newest), tuple(_empty_adapters(newest)), state)


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


def _to_come(setup: TrainingSetup, state: Mapping[str, Any]) -> int | None:
    """Returns how many more steps the Trainer will save, by its arguments, else by its state."""
    said = {"max_steps": setup.max_steps, "save_steps": setup.save_every}
    known = {**state, **{name: value for name, value in said.items() if value is not None}}
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


def _demand(examination: Examination, setup: TrainingSetup, listed: _RunFacts) -> SaveDemand:
    """Returns what the steps need: what the user says, else the files, else the run."""
    demand = replace(
        listed.demand,
        ranks=setup.ranks or 1,
        nodes=setup.nodes or 1,
        to_come=examination.steps or _to_come(setup, listed.state),
    )
    if examination.parameters is not None:
        size = examination.parameters * setup.state_bytes_per_parameter
        basis = f"--model-size, {setup.state_bytes_per_parameter} bytes a parameter"
        # Steps of a smaller model do not make room for those of this one.
        kept = demand.stored_steps if size < _SAME_SIZE * (demand.step_bytes or 0) else 0
        demand = replace(demand, step_bytes=size, basis=basis, stored_steps=kept)
    if setup.keep_last is not None:
        demand = replace(demand, keep_last=setup.keep_last, kept_because="save_total_limit")
    if examination.keep_last is not None:
        demand = replace(demand, keep_last=examination.keep_last, kept_because="--keep-last")
    return demand
