"""The examination that `ckptkit doctor` makes: facts are gathered at once, then judged.

Of configurations of accelerate and arguments of the Trainer, the scalars at the top are read, as
text, that say how many steps of what size are to come: nothing is expanded, and no tag is obeyed.

Source: accelerate 1.15, `commands/config/config_args.py`; transformers 5.23, `training_args.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import yaml
from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    NotACheckpointError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.text import quote
from ckptkit.core.threads import WorkerThread
from ckptkit.diagnosis.findings import Diagnosis, Finding, SaveDemand
from ckptkit.diagnosis.machine import (
    gather_machine,
    installed_versions,
    judge_machine,
    judge_versions,
)
from ckptkit.diagnosis.place import DiskFacts, examine_store, gather_disk, judge_disk, store_problem
from ckptkit.runs.find_run import find_run
from ckptkit.runs.listing import RunListing, list_run
from ckptkit.runs.retention import trainer_state
from ckptkit.runs.steps import RunStep, bytes_of
from ckptkit.storage.locations import (
    PathLike,
    Place,
    is_read_only,
    is_url,
    local_path,
    place_of,
)
from ckptkit.storage.places import open_source

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20
_MOST_NUMBER = 10**9
_SAVE_STEPS = "500"  # of the Trainer, where no file says it
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_TRUE = frozenset({"1", "on", "true", "y", "yes"})
_ACCELERATE = frozenset({"compute_environment", "distributed_type"})
_TRAINER = frozenset({"output_dir", "per_device_train_batch_size", "save_strategy", "save_steps"})
_8_BIT = re.compile(r"8bit|8_bit")


class TrainingArguments(Struct, frozen=True):
    """What files say of a job; None or empty where they say nothing."""

    ranks: int | None = None
    nodes: int | None = None
    optimizer: str = ""
    only_model: bool = False  # the Trainer saves no optimizer
    keep_last: int | None = None
    output_dir: str = ""
    max_steps: int | None = None
    save_every: int | None = None  # steps; 0 if saves are not counted in steps

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a saved step: weights in float32, and two moments of Adam."""
        if self.only_model:
            return 4
        return 4 + (2 if _8_BIT.search(self.optimizer) else 8)

    def joined(self, other: TrainingArguments) -> TrainingArguments:
        """Returns what both say; the other one wins."""
        unsaid = asdict(TrainingArguments())
        said = {name: value for name, value in asdict(other).items() if value != unsaid[name]}
        return TrainingArguments(**{**asdict(self), **said})


def read_arguments(path: Path) -> TrainingArguments:
    texts = _read_scalars(path)
    if not texts.keys() & (_ACCELERATE | _TRAINER):
        listed = ", ".join(sorted(name[:40] for name in texts)[:5])
        raise UnsupportedError(
            "expected a configuration of accelerate, or arguments of the Trainer;"
            f" found the names {listed or 'of nothing'}",
            where=str(path),
            hint="pass the file that `accelerate launch --config_file` or HfArgumentParser takes",
        )
    output_dir = texts.get("output_dir", "")
    try:
        if output_dir:
            place_of(output_dir)
    except UsageError as error:
        raise InputError(
            f"output_dir is {quote(output_dir)}, where a path or a URL was expected",
            where=str(path),
        ) from error
    return TrainingArguments(
        ranks=_count(texts, "num_processes"),
        nodes=_count(texts, "num_machines"),
        optimizer=texts.get("optim", "").lower(),
        only_model=texts.get("save_only_model", "").lower() in _TRUE,
        keep_last=_count(texts, "save_total_limit"),
        output_dir=output_dir,
        max_steps=_count(texts, "max_steps"),
        save_every=_save_every(texts) if texts.keys() & _TRAINER else None,
    )


def _number(text: str) -> float | None:
    """Returns a number of a sensible size that is above 0."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < _MOST_NUMBER else None


def _count(texts: Mapping[str, str], name: str) -> int | None:
    number = _number(texts.get(name, ""))
    return int(number) if number is not None and number.is_integer() else None


def _save_every(texts: Mapping[str, str]) -> int | None:
    """Returns the steps between saves; None if they are a share of an unknown number of steps."""
    if texts.get("save_strategy", "steps").lower() != "steps":
        return 0
    number, most = _number(texts.get("save_steps", _SAVE_STEPS)), _count(texts, "max_steps")
    if number is None or number >= 1:
        return int(number) if number is not None and number.is_integer() else None
    return None if most is None else ceil(most * number)


def _read_scalars(path: Path) -> dict[str, str]:
    """Reads the texts at the top of a YAML or JSON file, JSON as YAML with spaces for tabs."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError for a NUL in the path
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"cannot be read: {reason}", where=str(path)) from error
    if len(data) > _MOST_BYTES:
        raise FormatError(f"has more than {_MOST_BYTES:,} bytes", where=str(path))
    try:
        root = yaml.compose(data.replace(b"\t", b" "), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ArithmeticError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f" at line {line + 1}"
        raise FormatError(
            f"is neither YAML nor JSON{at}",
            where=str(path),
            hint="see whether it is the file that the launcher takes",
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise FormatError("has no names at its top", where=str(path))
    if any(key.tag == _MERGE for key, _ in root.value):
        raise FormatError(
            "merges settings with '<<' at its top",
            where=str(path),
            hint="write the settings without '<<'",
        )
    return {
        key.value: value.value.strip() if isinstance(value, yaml.ScalarNode) else ""
        for key, value in root.value
        if isinstance(key, yaml.ScalarNode) and value.tag != _NULL
    }


_T = TypeVar("_T")
_DISK_SECONDS = 15.0
_STORE_SECONDS = 20.0
_SAME_SIZE = 1.5  # a step has more than weights and moments
_COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmbt]?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_FEWEST_PARAMETERS = 1_000  # below, a unit was forgotten
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
        if not place.location or is_read_only(place):
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
