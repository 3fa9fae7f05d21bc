"""Decides which steps of a run are pushed, and writes the folders: a model or an adapter."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.extract import ExtractionJob
from ckptkit.adapters.merge import AdapterChoice, MergeJob
from ckptkit.adapters.sources import AdapterRequest
from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.adapters import describe_adapters
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.source.side_folders import SideChoice, SideFolders
from ckptkit.conversion.verify import Verification, run_verification
from ckptkit.conversion.write import SingleProcess, write_output
from ckptkit.core.errors import InputError, OutputError, RefusedError, VerificationError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Event, Listener, Planned
from ckptkit.lora.changes import MergeRequest
from ckptkit.options import ConsolidateRequest, PushKind, Resources
from ckptkit.plan.load_report import WATCH, Advice
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.retention import BestMode
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.places import PathLike, is_url, open_source, open_target


class PushChoice(Struct, frozen=True):
    """Which steps are pushed; without a rule, all of them."""

    every: int | None = None  # steps that are divisible by this
    best: str | None = None  # a step that is better by this metric than all, pushed ones included
    best_mode: BestMode = "min"
    last_only: bool = False  # if several wait, the one that was saved last


def choose_steps(
    steps: Sequence[RunStep],
    digests: Mapping[int, str],
    earlier: Mapping[int, StepPush],
    choice: PushChoice,
) -> tuple[int, ...]:
    """Chooses the steps to push, in the order in which they were saved.

    A step that was saved before a pushed one is left out, since it would become the head of the
    branch. So is a step that training went back from, see `abandoned`. `digests` are those of the
    complete steps by their numbers, which are returned.

    >>> steps = [RunStep(step) for step in (100, 200, 300)]
    >>> digests = {100: "a", 200: "b", 300: "c"}
    >>> choose_steps(steps, digests, {100: StepPush(100, "a", "pushed", "org/name")}, PushChoice())
    (200, 300)
    """
    complete = [step for step in steps if step.complete and step.step in digests]
    left = abandoned(complete)
    current = [step for step in complete if step.step not in left]
    latest = max(((push.save_number, step) for step, push in earlier.items()), default=(-1, -1))
    highest = max(earlier, default=-1)  # for steps whose order is known by their numbers only
    waiting = [
        step
        for step in current
        if (step.step not in earlier or earlier[step.step].digest != digests[step.step])
        and (_save_order(step) >= latest if step.save_number else step.step >= highest)
        and (choice.every is None or step.step % choice.every == 0)
    ]
    if choice.best is not None:
        waiting = _best_of(waiting, current, earlier, choice)
    waiting.sort(key=_save_order)
    return tuple(step.step for step in (waiting[-1:] if choice.last_only else waiting))


def _save_order(step: RunStep) -> tuple[int, int]:
    return step.save_number, step.step


def _best_of(
    waiting: Sequence[RunStep],
    current: Sequence[RunStep],
    earlier: Mapping[int, StepPush],
    choice: PushChoice,
) -> list[RunStep]:
    """Returns the waiting step that is better than all others, if there is one."""
    sign = 1 if choice.best_mode == "min" else -1

    def value(entry: RunStep | StepPush) -> float:
        number = entry.metrics.get(choice.best or "")
        return sign * number if number is not None and math.isfinite(number) else math.inf

    pushed = [value(push) for push in earlier.values()]
    best = min([*map(value, current), *pushed], default=math.inf)
    equal = [step for step in waiting if value(step) == best]
    if best == math.inf or best in pushed or not equal:
        return []
    return [max(equal, key=_save_order)]


_DEPTH = 8
_READ_BYTES = 8 << 20


Job = ConversionJob | MergeJob | ExtractionJob


class BuildSettings(Struct, frozen=True):
    """How the folder that is pushed is built from a step."""

    kind: PushKind = "auto"
    request: ConsolidateRequest = field(default_factory=ConsolidateRequest)
    adapter: AdapterRequest = field(default_factory=AdapterRequest)
    merge: MergeRequest = field(default_factory=MergeRequest)
    base: str | None = None  # a model folder with the files that the step lacks
    side: SideChoice = field(default_factory=SideChoice)
    resources: Resources = field(default_factory=Resources)
    needs_config: bool = False  # a model without config.json does not load
    # The subfolder for the step itself, to resume training from; `{step}` stands for its number.
    state_folder: str = ""
    advice: Advice = WATCH  # hints of errors about a model that would not load

    def whole_folder(self, step: int) -> str:
        """Returns the name of the subfolder for the step itself; empty for none."""
        return self.state_folder.replace("{step}", str(step))

    def make_any_job(self, src: PathLike, out: PathLike, *, overwrite: bool = False) -> Job:
        """Returns what writes the model of a step, or its adapter where it has one to take."""
        kind = self.kind
        if kind == "auto":  # problems of an adapter are reported when it is extracted
            with ExitStack() as stack:
                checkpoint = stack.enter_context(open_checkpoint(src))
                adapter = describe_adapters(checkpoint, SideFolders(stack, checkpoint, None))
            kind = "model" if adapter is None else "adapter"
        if kind != "adapter":
            return self.make_job(src, out, overwrite=overwrite)
        return ExtractionJob(
            src=src,
            destination=out,
            request=replace(self.adapter, base=self.base),
            overwrite=overwrite,
            resources=self.resources,
        )

    def make_job(
        self, src: PathLike, out: PathLike, *, overwrite: bool = False
    ) -> ConversionJob | MergeJob:
        """Returns what writes the model of a step: a conversion, or the merge of its adapter."""
        if self.kind == "merged":
            choice = AdapterChoice(path=src, request=replace(self.adapter, base=self.base))
            return MergeJob(
                adapters=(choice,),
                destination=out,
                request=self.merge,
                base=self.base,
                overwrite=overwrite,
                resources=self.resources,
            )
        return ConversionJob(
            src,
            out,
            self.request,
            self.base,
            self.side,
            overwrite=overwrite,
            resources=self.resources,
            advice=self.advice,
        )


def write_model(
    job: Job,
    settings: BuildSettings,
    listener: Listener,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Manifest, tuple[str, ...]]:
    """Writes what a job makes of a step, whole or not at all; returns notes for the user too.

    `facts` go into the `source` of its manifest.
    """
    notes: dict[str, None] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Planned):
            notes.update(dict.fromkeys(event.notes))
        listener(event)

    job.check_places()
    target = open_target(job.destination, overwrite=job.overwrite)
    with SingleProcess(target, listen) as strategy, job.plan_output() as planned:
        has_config = CONFIG in {file.path for file in planned.plan.files}
        if settings.needs_config and planned.kind == "model" and not has_config:
            raise RefusedError(
                "neither the step nor a base has a config.json, without which the model does not"
                " load",
                where=os.fspath(job.src),
                hint="pass --base DIR_OR_REPO of the model that was trained, or --weights-only",
            )
        own = {**planned.facts, **facts}
        return write_output(replace(planned, facts=own), strategy, listen), tuple(notes)


def build_folder(
    src: PathLike, out: Path, step: int, settings: BuildSettings, listener: Listener
) -> tuple[str, ...]:
    """Builds the folder that is pushed from a step, and verifies it; returns notes for the user."""
    shutil.rmtree(out, ignore_errors=True)
    _, notes = write_model(settings.make_any_job(src, out), settings, listener)
    _check(run_verification(out, listener=listener), VerificationError)
    if settings.state_folder:
        _check(run_verification(src, listener=listener), InputError)
        _put_state(src, out / settings.whole_folder(step))
    return notes


def _check(result: Verification, kind: type[VerificationError | InputError]) -> None:
    if not result.ok:
        more = f", and {len(result.problems) - 1} more" if len(result.problems) > 1 else ""
        raise kind(f"{result.problems[0]}{more}", where=result.path)


def _put_state(src: PathLike, out: Path) -> None:
    """Links the files of a step into the folder; copies them where links are not possible."""
    folder = Path(src)
    try:
        if is_url(src):
            _download(src, out)
            return
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            name = out / path.relative_to(folder)
            name.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, name)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(path, name)
    except FileNotFoundError as error:
        raise InputError("the step was removed while it was read", where=str(src)) from error
    except OSError as error:
        raise OutputError(
            f"the step cannot be written: {error.strerror or error}", where=str(out)
        ) from error


def _download(src: PathLike, out: Path) -> None:
    with open_source(src) as source:
        for path in source.walk(_DEPTH):
            size_bytes, name = source.stat(path).size_bytes, out / path
            name.parent.mkdir(parents=True, exist_ok=True)
            with name.open("wb") as file:
                for start in range(0, size_bytes, _READ_BYTES):
                    file.write(source.read(path, start, min(start + _READ_BYTES, size_bytes)))
