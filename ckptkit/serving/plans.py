"""Plans what is served: a conversion, or the merge of an adapter into its base."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, Self

import msgspec.structs
from msgspec.structs import replace

from ckptkit.adapters.merge import AdapterChoice, MergeJob, list_adapters
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.source.adapters import describe_adapters
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.engine.outcome import Listener
from ckptkit.formats.discovery import parse_step
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.lora.changes import MergeRequest
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.places import PathLike, is_url, local_path

DEFAULT_BUDGET = "96MB"
"""Memory of the buffers of all clients together."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")

_OF_MERGES = (
    *("adapter", "adapters", "further", "adapter_config", "allow_untrained", "allow_other_base"),
    *("match_peft", "qlora_base", "double_quant", "overrides"),
    *("lora_alpha", "use_rslora", "fan_in_fan_out", "token_indices"),
)
_DEFAULTS: tuple[Any, ...] = (None, False, (), [], {}, "")
_OF_CONVERSIONS = (
    *("include", "exclude", "keep_dtype", "strip_prefix", "vocab_size", "like"),
    *("config", "tokenizer"),
)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is planned for each source.

    Attributes:
        job: The conversion of a source without an adapter.
        adapters: The adapters that are merged; the first one is that of the source.
        options: All options, by their names in `ckptkit.api.Options` and `MergeOptions`.
        merges: Whether an option says that an adapter is merged.
    """

    job: ConversionJob
    adapters: Sequence[AdapterChoice]
    options: Mapping[str, Any] = field(repr=False)
    merges: bool

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any], adapters: Sequence[AdapterChoice] | None = None
    ) -> Self:
        """Reads the options as a user passes them; see `resolve_places`.

        Args:
            options: The options.
            adapters: The adapters that are merged; None for those that the options name.
        """
        if options.get("memory_budget") is None:
            options = {**options, "memory_budget": DEFAULT_BUDGET}
        merges = any(options.get(name) not in _DEFAULTS for name in _OF_MERGES)
        job = ConversionJob.from_options(options, "hf")
        if adapters is None:
            adapters = list_adapters(options, job.resources)
        return cls(job, adapters, options, merges)

    def choose_name(self, name: str | None, *, follow: bool) -> str:
        """Returns the name that is served: the user's, or that of the source and its run."""
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a name of letters, digits, dots, hyphens and underscores",
                where="--name",
                hint="pass a name such as --name llama",
            )
        src = self.job.src
        path = PurePosixPath(str(src) if is_url(src) else local_path(src).absolute().as_posix())
        default = path.name
        if parse_step(default) is not None and not follow and path.parent.name:
            default = f"{path.parent.name}-{default}"  # as its folder alone does not tell its run
        return name or (default if _NAME.fullmatch(default) else "model")

    def of_step(self, place: PathLike) -> ServePlan:
        """Returns the same for another source, a step of the run."""
        src = self.job.src
        adapters = [
            replace(choice, path=place) if choice.path == src else choice
            for choice in self.adapters
        ]
        return dataclasses.replace(
            self, job=msgspec.structs.replace(self.job, src=place), adapters=adapters
        )

    @contextmanager
    def open(self, listener: Listener) -> Iterator[PlannedOutput]:
        """Opens the sources, proves that they are whole and would load, and plans the output.

        Args:
            listener: Receives notes.

        Yields:
            The plan, with its sources open.
        """
        with ExitStack() as stack:
            if self.merges or (self.job.request.names != "live" and self._holds_adapter()):
                planned = self._merge(stack)
            else:
                planned = stack.enter_context(self.job.plan_output())
            if planned.comparison is not None:
                planned.comparison.finish(listener)
                planned.comparison.close()
            yield planned

    def _merge(self, stack: ExitStack) -> PlannedOutput:
        for name in _OF_CONVERSIONS:
            if self.options.get(name):
                raise UsageError(
                    "cannot be combined with an adapter, which is merged into its base",
                    where=f"--{name.replace('_', '-')}",
                    hint="leave it out",
                )
        request = MergeRequest.from_options(self.options)
        job = self.job
        merge = MergeJob(
            adapters=self.adapters,
            destination="",
            request=request,
            base=job.base,
            resources=job.resources,
        )
        return stack.enter_context(merge.plan_output())

    def _holds_adapter(self) -> bool:
        """Returns whether the source is an adapter, or a model with one in it."""
        job = self.job
        with ExitStack() as stack:
            checkpoint = stack.enter_context(
                open_checkpoint(
                    job.src,
                    select=job.request.select,
                    also=job.also,
                    limit_bytes=job.resources.memory_limit_bytes,
                )
            )
            folders = SideFolders(stack, checkpoint, job.base)
            return describe_adapters(checkpoint, folders) is not None


def newest_step(run: WatchedRun) -> RunStep | None:
    """Returns the step of a run that is served: the newest of those that were not abandoned."""
    steps = run.list_steps()
    left = abandoned(steps)
    current = [step for step in steps if step.step not in left]
    return max(current, key=lambda step: (step.save_number, step.step), default=None)


_NEEDED = ("aiohttp", "botocore")


def refuse_missing_libraries() -> None:
    """Refuses to serve where the libraries of the extra are missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"needs {' and '.join(missing)}, which this installation lacks",
            where="serve",
            hint=f"run `pip install {' '.join(missing)}`",
        )
