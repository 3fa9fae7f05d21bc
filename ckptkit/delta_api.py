"""The functions that users call for deltas between models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ckptkit.api import SourceOptions
from ckptkit.core.arguments import check_arguments
from ckptkit.options import DTypeChoice, DTypeLike, ProgressOptions
from ckptkit.storage.locations import Sources, place_of

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit.deltas.checks import DeltaInspection
    from ckptkit.deltas.form import ChecksumFormat, Encoding
    from ckptkit.storage.places import PathLike


class SideOptions(SourceOptions, ProgressOptions, total=False):
    """What the two functions for deltas have in common.

    `names` is "auto" by default, which takes the names of `save_pretrained`, as engines have them.

    Attributes:
        dtype: Element type of floating tensors, "keep" by default.
        dst_options: Options of the storage that is written.
        overwrite: Whether an `out` that holds something is replaced.
    """

    dtype: DTypeChoice | DTypeLike
    dst_options: Mapping[str, Any] | None
    overwrite: bool


class CreationOptions(SideOptions, total=False):
    """The options of `create_delta`; they are those of `ckptkit delta create`.

    Attributes:
        version: The number of the version that the delta leads to. By default it is in the name of
            an output such as `weight_v000002`, and 1 for other names.
        encoding: "xor", the default, or "overwrite", which is larger, and can be applied again.
        checksum: "xxh3-128", the default, "blake3" or "adler32": what proves a changed tensor.
    """

    version: int | None
    encoding: Encoding
    checksum: ChecksumFormat


class ApplicationOptions(SideOptions, total=False):
    """The options of `apply_delta`; they are those of `ckptkit delta apply`.

    Attributes:
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB".
        allow_code: Whether python files and `auto_map` are copied.
    """

    max_shard_size: int | str
    allow_code: bool


@check_arguments
def create_delta(
    before: PathLike, after: PathLike, out: PathLike, **options: Unpack[CreationOptions]
) -> Manifest:
    """Writes what changed between two models, in the form that slime writes and SGLang pulls.

    Each model is read from whatever it is stored in, as `consolidate` would write it: two sharded
    steps make a delta without a model between.

    Args:
        before: The model before: any path in or above a checkpoint.
        after: The model after, likewise.
        out: A directory that does not exist, or is empty.
        **options: See `SideOptions` and `CreationOptions`; they hold for both models.

    Returns:
        The manifest of the delta.

    Raises:
        InputError: If a model is damaged or incomplete; nothing is left behind.
        RefusedError: If the two have other names, types or shapes.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.deltas.create import DeltaRequest, make_job
    from ckptkit.deltas.create import create_delta as create
    from ckptkit.engine.progress import report_to

    sources = Sources(before, options.get("src_options"))
    place = place_of(out, options.get("dst_options"))
    request = DeltaRequest.from_options(options)
    jobs = [make_job(side, place, options) for side in (sources.first, sources.place(after))]
    with report_to("create_delta", options) as listener:
        return create(jobs[0], jobs[1], request, listener)


@check_arguments
def apply_delta(
    before: PathLike,
    deltas: PathLike | Sequence[PathLike],
    out: PathLike,
    **options: Unpack[ApplicationOptions],
) -> Manifest:
    """Writes the model that deltas lead to, in one pass over the model that they begin with.

    Every changed tensor is compared with the checksum in the deltas, and every tensor with the
    digest in the manifest of the last one, if it has one, before the output is visible.

    Args:
        before: The model that the first delta was made from: any path in or above a checkpoint.
        deltas: The deltas, in their order, or one of them.
        out: A directory that does not exist, or is empty.
        **options: See `SideOptions` and `ApplicationOptions`.

    Returns:
        The manifest of the model.

    Raises:
        InputError: If a delta or the model is damaged, or if the two do not belong together;
            nothing is left behind.
        RefusedError: If a delta is missing in between, or is for another model.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.deltas.create import make_job
    from ckptkit.deltas.patching import apply_deltas
    from ckptkit.engine.progress import report_to

    sources = Sources(before, options.get("src_options"))
    listed = [deltas] if isinstance(deltas, str) or hasattr(deltas, "__fspath__") else list(deltas)
    job = make_job(sources.first, place_of(out, options.get("dst_options")), options)
    with report_to("apply_delta", options) as listener:
        return apply_deltas(job, sources.further(listed), listener)


@check_arguments
def inspect_delta(
    path: PathLike, *, src_options: Mapping[str, Any] | None = None
) -> DeltaInspection:
    """Describes a delta, reading headers only.

    Args:
        path: The folder of the delta.
        src_options: Options of the storage, see `Options`.

    Returns:
        Its versions and encoding, and what changed.

    Raises:
        InputError: If it is no delta, or if it cannot be parsed.
    """
    from ckptkit.deltas.checks import inspect_delta as inspect

    return inspect(Sources(path, src_options).first)
