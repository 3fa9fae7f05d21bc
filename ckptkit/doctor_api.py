"""The function that users call before a run starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.options import CountLike, positive_number
from ckptkit.storage.locations import local_path, place_of

if TYPE_CHECKING:
    from ckptkit.diagnosis.findings import Diagnosis
    from ckptkit.storage.places import PathLike


class DoctorOptions(TypedDict, total=False):
    """The options of `doctor`; they are those of the command.

    Attributes:
        local: A node's own disk, as `Checkpointer(..., local=...)` takes it.
        model_size: Parameters of the model, such as `"8B"`, if the run has no step to go by.
        ranks: Of the job; by default those of the configuration.
        nodes: Of the job; by default those of the configuration, or 1.
        keep_last: How many steps stay.
        steps: How many more steps will be saved.
        push: A repository on the Hub: asks whether the token may push to it.
        probe: Whether the probe is written; it is by default.
        src_options: Options of the storage, as fsspec names them.
    """

    local: PathLike | None
    model_size: CountLike | None
    ranks: CountLike | None
    nodes: CountLike | None
    keep_last: CountLike | None
    steps: CountLike | None
    push: str | None
    probe: bool
    src_options: Mapping[str, Any] | None


_COUNTS = ("ranks", "nodes", "keep_last", "steps")


@check_arguments
def doctor(
    places: PathLike | Sequence[PathLike] = (), **options: Unpack[DoctorOptions]
) -> Diagnosis:
    """Looks for what will hurt a run, before it starts.

    Disk, memory, limits of this process, installed versions, configurations, the Hub and the store
    are looked at. Nothing is written but a probe, which is removed again: a file without a name of
    at most 256 MB, or three small objects of a store.

    Args:
        places: The run, or where it will be: a directory or a URL; and configuration files of
            accelerate, DeepSpeed or the Trainer (YAML or JSON). By default the current directory.
        **options: See `DoctorOptions`.

    Returns:
        The findings, errors first.

    Raises:
        InputError: If a configuration, or the run, cannot be read.
        UsageError: If an option has no valid value, or several runs are named.
    """
    from ckptkit.diagnosis.examine import Examination, examine, parse_parameters

    named = [places] if isinstance(places, (str, os.PathLike)) else list(places)
    local, size = options.get("local"), options.get("model_size")
    given: Mapping[str, Any] = options
    counts = {
        name: positive_number(given.get(name), option=f"--{name.replace('_', '-')}", example=4)
        for name in _COUNTS
    }
    examination = Examination.of(
        named,
        options.get("src_options"),
        local=None if local is None else local_path(place_of(local)),
        parameters=None if size is None else parse_parameters(size),
        push=options.get("push") or "",
        writes=bool(options.get("probe", True)),
        **counts,
    )
    return examine(examination)
