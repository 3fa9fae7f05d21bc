"""Which step of a run training would resume from, and the call that does so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptkit.runs.listing import RunListing
from ckptkit.runs.marks import STEP_PREFIXES
from ckptkit.runs.save_order import TRAINER_STATE
from ckptkit.runs.steps import RunStep, abandoned

_CALLS = {
    "Transformers Trainer": "trainer.train(resume_from_checkpoint={path!r})",
    "accelerate": "accelerator.load_state({path!r})",
    "Lightning": "trainer.fit(model, ckpt_path={path!r})",
    "DeepSpeed": "engine.load_checkpoint({run!r}, tag={name!r})",
    "ckptkit": "Checkpointer({run!r}).resume(state)",
}
"""By the framework that saved a step."""


@dataclass(frozen=True, slots=True)
class ResumeAdvice:
    """The step to resume from.

    Attributes:
        step: The newest complete one that training did not go back from, or the one that the
            tracker of the run names.
        call: The line of Python that resumes; empty where the framework is unknown.
    """

    step: RunStep
    call: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step.step, "path": self.step.path, "call": self.call}


def advise_on_resume(listing: RunListing) -> ResumeAdvice | None:
    """Returns the step to resume from; None if no step is complete."""
    complete = [step for step in listing.steps if step.complete]
    left = {
        (series, number)
        for series in {step.series for step in complete}
        for number in abandoned(step for step in complete if step.series == series)
    }
    current = [step for step in complete if (step.series, step.step) not in left]
    tracked = [step for step in current if step.name in listing.tracked]
    step = max(tracked or current, key=_order, default=None)
    if step is None:
        return None
    is_trainers = any(file.path == f"{step.name}/{TRAINER_STATE}" for file in step.files)
    # accelerate's automatic names, under which its integration of ckptkit saves as well.
    is_accelerates = step.name.startswith(STEP_PREFIXES[1])
    writer = "accelerate" if is_accelerates else step.writer
    call = _CALLS.get("Transformers Trainer" if is_trainers else writer, "")
    text = call.format(path=step.path, run=listing.location, name=step.name)
    return ResumeAdvice(step, text)


def _order(step: RunStep) -> tuple[int, int, float]:
    return step.save_number, step.step, step.modified
