"""`ckptkit.merge_adapter`: adapters and a base become a model folder, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.merge.base_model import (
    BaseSource,
    NamesOfBase,
    find_folder,
    open_base,
)
from ckptkit.adapters.merge.plan_merge import MergePreparation
from ckptkit.adapters.merge.report import MergedLayer, SourceAdapter
from ckptkit.adapters.sources import AdapterRequest, OpenedAdapter, open_adapter
from ckptkit.conversion.source.open import find_model, is_folder, resolve_path
from ckptkit.conversion.source.side_folders import find_component
from ckptkit.conversion.write import PlannedOutput, SingleProcess, check_destination, write_output
from ckptkit.core.errors import AmbiguousSourceError, RefusedError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.reader import Origin
from ckptkit.lora.changes import AdapterSource, MergeRequest
from ckptkit.options import Resources
from ckptkit.plan.weight_kinds import ADAPTER_OF_TORCHTUNE
from ckptkit.storage.places import PathLike, open_source, open_target


class AdapterChoice(Struct, frozen=True, kw_only=True):
    """One of the adapters that are merged.

    Attributes:
        path: Any path in or above its checkpoint.
        request: Which adapter of the checkpoint, and how it is read.
        weight: The factor of its scaling.
    """

    path: PathLike
    request: AdapterRequest = AdapterRequest()
    weight: float = 1.0


class MergedModel(Struct, frozen=True):
    """A merged model that was written.

    Attributes:
        manifest: The manifest in the output.
        layers: The changes of each tensor.
        notes: Messages for the user.
    """

    manifest: Manifest
    layers: Sequence[MergedLayer]
    notes: tuple[str, ...]


class PlannedMerge(Struct, frozen=True):
    """A merge before its first byte is written.

    Attributes:
        prepared: The plan, with its sources open.
        layers: The changes of each tensor.
    """

    prepared: PlannedOutput
    layers: Sequence[MergedLayer]


def run_merge(
    adapters: Sequence[AdapterChoice],
    out: PathLike,
    request: MergeRequest,
    *,
    base: PathLike | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
    listener: Listener | None = None,
) -> MergedModel:
    """Writes a base with adapters merged into it into the directory `out`, whole or not at all.

    Args:
        adapters: The adapters, in the order in which they are merged.
        out: A directory that does not exist, or is empty.
        request: The options of the merge.
        base: The base model; None where the first adapter's checkpoint holds it.
        overwrite: Whether an `out` with content is replaced.
        resources: Limits of the execution.
        listener: Receives progress events, from several threads.

    Returns:
        What was written.
    """
    check_merge_destination(adapters, out, base, overwrite=overwrite)
    resources, listener = resources or Resources(), listener or ignore
    with (
        SingleProcess(open_target(out, overwrite=overwrite), listener) as strategy,
        prepare_merge(adapters, out, request, base=base, resources=resources) as merge,
    ):
        manifest = write_output(merge.prepared, strategy, listener)
        return MergedModel(manifest, merge.layers, merge.prepared.plan.notes)


class MergeJob(Struct, frozen=True, kw_only=True):
    """A merge as values, which is planned where a `ConversionJob` is.

    Attributes:
        adapters: The adapters, in the order in which they are merged.
        destination: The place of the output.
        request: The options of the merge.
        base: The base model; None where the first adapter's checkpoint holds it.
        overwrite: Whether to replace an output that holds something.
        resources: Limits of the execution.
    """

    adapters: Sequence[AdapterChoice]
    destination: PathLike
    request: MergeRequest = MergeRequest()
    base: PathLike | None = None
    overwrite: bool = False
    resources: Resources = field(default_factory=Resources)

    @property
    def src(self) -> PathLike:
        return self.adapters[0].path

    def check_places(self) -> None:
        """Refuses an output that could not be written, before any work is done."""
        check_merge_destination(
            self.adapters, self.destination, self.base, overwrite=self.overwrite
        )

    @contextmanager
    def plan_output(self) -> Iterator[PlannedOutput]:
        """Plans the output; see `prepare_merge`."""
        with prepare_merge(
            self.adapters,
            self.destination,
            self.request,
            base=self.base,
            resources=self.resources,
        ) as merge:
            yield merge.prepared


def list_choices(
    src: PathLike,
    first: AdapterRequest,
    names: Sequence[str | tuple[str, float]],
    further: Sequence[PathLike | tuple[PathLike, float]],
) -> list[AdapterChoice]:
    """Returns the chosen adapters, in the order of merging.

    Args:
        src: The checkpoint that is merged first.
        first: How its adapters are read.
        names: Its adapters, each with an optional weight; empty for its only one.
        further: Other checkpoints with one adapter each, likewise.
    """
    named = [name if isinstance(name, tuple) else (name, 1.0) for name in names]
    others_with_weights = [path if isinstance(path, tuple) else (path, 1.0) for path in further]
    chosen = [
        AdapterChoice(path=src, request=replace(first, adapter=name), weight=weight)
        for name, weight in named
    ]
    others = AdapterRequest(
        base=first.base, allow_untrained=first.allow_untrained, limit_bytes=first.limit_bytes
    )
    return [
        *(chosen or [AdapterChoice(path=src, request=first)]),
        *(
            AdapterChoice(path=path, request=others, weight=weight)
            for path, weight in others_with_weights
        ),
    ]


def check_merge_destination(
    adapters: Sequence[AdapterChoice], out: PathLike, base: PathLike | None, *, overwrite: bool
) -> None:
    """Refuses an output that would overwrite a source of the merge."""
    also = adapters[0].request.also
    for adapter in adapters:
        check_destination(adapter.path, out, overwrite=overwrite, also=also, base=base)


@contextmanager
def prepare_merge(
    adapters: Sequence[AdapterChoice],
    out: PathLike | None,
    request: MergeRequest,
    *,
    base: PathLike | None,
    resources: Resources,
) -> Iterator[PlannedMerge]:
    """Opens adapters and base, proves that they fit, and plans the output; writes nothing.

    Yields:
        The plan.
    """
    for choice in adapters:
        if not math.isfinite(choice.weight) or choice.weight == 0:
            raise UsageError(
                f"{choice.weight} is no weight that changes anything",
                where=f"adapter {choice.path}",
                hint="leave the adapter out, or give it a weight such as 0.5",
            )
    with ExitStack() as stack:
        opened = []
        for number, choice in enumerate(adapters):
            found = _open(stack, choice, adapters[0])
            origin = Origin(f"adapter{number}", found.opened.source, found.opened.index)
            source = AdapterSource(number, origin.name, found.opened.path)
            opened.append(SourceAdapter(found, source, origin, choice.weight))
        seen = set()
        for adapter in opened:
            path, tensors = adapter.found.opened.path, adapter.found.adapter.tensors
            identity = resolve_path(path), frozenset(entry.key for entry in tensors.values())
            if identity in seen:
                raise UsageError(
                    "the same adapter is named twice",
                    where=f"adapter {path}",
                    hint="name it once; a weight of 2 doubles what it adds",
                )
            seen.add(identity)
        limit = resources.memory_limit_bytes
        given = None
        if base is not None:
            names = NamesOfBase(request.map, request.model_config)
            own = opened[0].found.adapter.shapes
            place = find_component(find_model(base, "--base").place, own)
            given = open_base(stack, place, limit, names)
            _refuse_merged(given, opened)
        preparation = MergePreparation(stack, opened, given, request, resources)
        prepared, layers = preparation.run(out)
        yield PlannedMerge(prepared, layers)


def _refuse_merged(base: BaseSource, adapters: Sequence[SourceAdapter]) -> None:
    """Refuses the model that torchtune writes beside an adapter, which has it merged already."""
    folder = find_folder(base)
    own = (adapter.found.opened.path for adapter in adapters)
    if all(resolve_path(path) != resolve_path(folder) for path in own) or not is_folder(folder):
        return
    with open_source(folder) as source:
        if any(map(ADAPTER_OF_TORCHTUNE.fullmatch, source.walk(0))):
            raise RefusedError(
                "the model beside the adapter has it merged already: torchtune writes both",
                where=f"--base {folder}",
                hint="take that model as it is, or pass the one that training began from as --base",
            )


def _open(stack: ExitStack, choice: AdapterChoice, first: AdapterChoice) -> OpenedAdapter:
    """Opens an adapter; only in the first checkpoint do options choose among several."""
    try:
        return open_adapter(stack, choice.path, choice.request)
    except AmbiguousSourceError as error:
        if choice.path == first.path and choice is not first:
            hint = "name them with --adapter, each maybe with a weight, instead of --with"
        elif choice is not first:
            hint = (
                f"make a folder of one: `ckptkit adapter extract {choice.path} FOLDER`, with"
                " --adapter or --select, and pass that"
            )
        else:
            raise
        raise error.hinted(hint) from error
