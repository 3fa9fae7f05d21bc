"""From a step of a run to the folder that is pushed: a model, or the adapter that was trained.

Which steps of a run are to be pushed, and in which order.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ckptkit.adapters.extract import run_extraction
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.conversion.job import run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.adapters import adapter_facts
from ckptkit.conversion.source.open import PathLike, open_checkpoint
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.verify import Verification, run_verification
from ckptkit.core.errors import InputError, OutputError, RefusedError, UsageError, VerificationError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Event, Listener, Planned, ignore
from ckptkit.options import ConsolidateRequest, Resources
from ckptkit.plan.load_report import WATCH, Advice
from ckptkit.plan.side_files import CONFIG
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.save_order import BestMode
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.places import is_url, open_source

PushKind = Literal["auto", "model", "adapter"]
"""What is made of a step: `auto` takes the adapter where PEFT trained one, else the model."""


@dataclass(frozen=True, slots=True)
class PushChoice:
    """Which steps are pushed; without a rule, all of them.

    Attributes:
        every: Only steps that are divisible by this.
        best: Only a step that is better by this metric than all that are known.
        best_mode: Whether the smallest or the largest value is best.
        last_only: Of several that wait, only the one that was saved last.
    """

    every: int | None = None
    best: str | None = None
    best_mode: BestMode = "min"
    last_only: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise UsageError(
                f"is {self.every}, where a whole number of at least 1 was expected",
                where="--every",
                hint="leave it out to push every step",
            )
        if self.best_mode not in get_args(BestMode):
            raise UsageError(f"{self.best_mode!r} is not among min, max", where="--best-mode")


def choose_steps(
    steps: Sequence[RunStep],
    digests: Mapping[int, str],
    earlier: Mapping[int, StepPush],
    choice: PushChoice,
) -> tuple[int, ...]:
    """Chooses the steps that are to be pushed, in the order in which they were saved.

    A step that was saved before one that is pushed already is passed over: the branch's head
    would go back to it. So is one that training went back from, see `abandoned`.

    Args:
        steps: What lies in the run; only complete steps are chosen.
        digests: Of the complete steps' manifests.
        earlier: What was pushed before, by step.
        choice: The rules.

    Returns:
        The numbers of the steps.

    >>> steps = [RunStep(step) for step in (100, 200, 300)]
    >>> digests = {100: "a", 200: "b", 300: "c"}
    >>> choose_steps(steps, digests, {100: StepPush(100, "a", "pushed", "org/name")}, PushChoice())
    (200, 300)
    """
    complete = [facts for facts in steps if facts.complete and facts.step in digests]
    left = abandoned(complete)
    latest = max(((e.save_number, step) for step, e in earlier.items()), default=(-1, -1))
    highest = max(earlier, default=-1)  # for a step of which only its number tells the order
    waiting = [
        facts
        for facts in complete
        if facts.step not in left
        and not _is_pushed(facts.step, digests, earlier)
        and (_saved(facts) >= latest if facts.save_number else facts.step >= highest)
        and (choice.every is None or facts.step % choice.every == 0)
    ]
    if choice.best is not None:
        live = [facts for facts in complete if facts.step not in left]
        waiting = _best_of(waiting, live, earlier, choice)
    waiting.sort(key=_saved)
    return tuple(facts.step for facts in (waiting[-1:] if choice.last_only else waiting))


def _saved(facts: RunStep) -> tuple[int, int]:
    return facts.save_number, facts.step


def _is_pushed(step: int, digests: Mapping[int, str], earlier: Mapping[int, StepPush]) -> bool:
    return step in earlier and earlier[step].digest == digests[step]


def _best_of(
    waiting: Sequence[RunStep],
    complete: Sequence[RunStep],
    earlier: Mapping[int, StepPush],
    choice: PushChoice,
) -> list[RunStep]:
    """Returns the one step that waits and is the best known, if it is."""
    sign = 1 if choice.best_mode == "min" else -1

    def value(metrics: Mapping[str, float | None]) -> float:
        found = metrics.get(choice.best or "")
        return sign * found if found is not None and math.isfinite(found) else math.inf

    pushed = [value(one.metrics) for one in earlier.values()]
    best = min([*map(value, (facts.metrics for facts in complete)), *pushed], default=math.inf)
    equal = [facts for facts in waiting if value(facts.metrics) == best]
    if best == math.inf or best in pushed or not equal:
        return []
    return [max(equal, key=_saved)]


_DEPTH = 8
_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How a step becomes what is pushed.

    Attributes:
        kind: `auto` takes the adapter where PEFT trained one, else the whole model.
        request: Of a model.
        adapter: Of an adapter.
        base: A model folder to take what the step lacks from, or None.
        resources: Threads and memory.
        needs_config: Whether a model without a configuration, which does not load, is refused.
        state_folder: Where the step itself goes in the folder, with optimizer and all, so that
            training can be resumed from it; `{step}` stands for its number. Empty for nowhere.
        advice: What the user of this watch can do about a model that would not load.
    """

    kind: PushKind = "auto"
    request: ConsolidateRequest = field(default_factory=ConsolidateRequest)
    adapter: AdapterRequest = field(default_factory=AdapterRequest)
    base: str | None = None
    resources: Resources = field(default_factory=Resources)
    needs_config: bool = False
    state_folder: str = ""
    advice: Advice = WATCH

    def whole_folder(self, step: int) -> str:
        """Returns the name of the folder that a step goes into as it is; empty for none."""
        return self.state_folder.replace("{step}", str(step))


@dataclass(frozen=True, slots=True)
class Made:
    """A folder that was made of a step, and verified.

    Attributes:
        manifest: Of the folder.
        notes: What the user should know.
    """

    manifest: Manifest
    notes: tuple[str, ...]


def build_folder(
    src: PathLike, out: Path, step: int, making: BuildSettings, listener: Listener | None = None
) -> Made:
    """Makes the folder that is pushed of a step, and reads all of it back.

    Args:
        src: The step's folder.
        out: What is made; a folder that a kill left half-made there is replaced.
        step: Its number.
        making: How.
        listener: Receives progress events.

    Returns:
        What was made.
    """
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Planned):
            notes.extend(event.notes)
        (listener or ignore)(event)

    shutil.rmtree(out, ignore_errors=True)
    manifest = _make(src, out, making, listen)
    if making.needs_config and manifest.kind == "model" and not (out / CONFIG).is_file():
        raise RefusedError(
            "neither the step nor a base has a config.json, without which the model does not load",
            where=os.fspath(src),
            hint="pass --base DIR_OR_REPO of the model that was trained, or --weights-only",
        )
    _check(run_verification(out, listener=listener), VerificationError)
    if making.state_folder:
        _check(run_verification(src, listener=listener), InputError)
        _put_state(src, out / making.whole_folder(step))
    return Made(manifest, tuple(dict.fromkeys(notes)))


def _make(src: PathLike, out: Path, making: BuildSettings, listener: Listener) -> Manifest:
    if making.kind == "adapter" or (making.kind == "auto" and _holds_adapter(src)):
        return run_extraction(
            src, out, making.adapter, resources=making.resources, listener=listener
        ).manifest
    job = ConversionJob(
        src, out, making.request, making.base, resources=making.resources, advice=making.advice
    )
    return run_job(job, listener).whole


def _holds_adapter(src: PathLike) -> bool:
    """Returns whether PEFT trained what lies there; what is wrong with it is said later."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(src))
        return adapter_facts(checkpoint, SideFolders(stack, checkpoint, None)) is not None


def _check(found: Verification, kind: type[VerificationError | InputError]) -> None:
    if not found.ok:
        more = f", and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        raise kind(f"{found.problems[0]}{more}", where=found.path)


def _put_state(src: PathLike, out: Path) -> None:
    """Gives the files of a step a second name in the folder; copies them where that cannot be."""
    folder = Path(src)
    try:
        if is_url(src):
            _download(src, out)
            return
        for path in _files_below(folder):
            name = out / path.relative_to(folder)
            name.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, name)
    except FileNotFoundError as error:
        raise InputError("the step was removed while it was read", where=str(src)) from error
    except OSError as error:
        raise OutputError(
            f"the step cannot be put there: {error.strerror or error}", where=str(out)
        ) from error


def _download(src: PathLike, out: Path) -> None:
    with open_source(src) as source:
        for path in source.walk(_DEPTH):
            size_bytes, name = source.stat(path).size_bytes, out / path
            name.parent.mkdir(parents=True, exist_ok=True)
            with name.open("wb") as file:
                for start in range(0, size_bytes, _READ_BYTES):
                    file.write(source.read(path, start, min(start + _READ_BYTES, size_bytes)))


def _files_below(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _link_or_copy(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without such names
        shutil.copyfile(path, name)
