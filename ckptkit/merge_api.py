"""`ckptkit.merge_adapter`, a thin face of the pipeline like those in `ckptkit.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.planning.requests import DEFAULT_MAX_FILE_BYTES, DTypeLike, make_resources, parse_size
from ckptkit.storage.locations import Sources, place_of

if TYPE_CHECKING:
    from ckptkit.adapters.merging import MergeDType, MergeNames, MergeRequest, QloraBase
    from ckptkit.core.manifest import Manifest
    from ckptkit.execution.events import Listener
    from ckptkit.pipeline.opening import PathLike


class MergeOptions(TypedDict, total=False):
    """The options of `merge_adapter`; they are those of `ckptkit adapter merge`.

    Attributes:
        base: The model that was trained on; left out where `src` holds its weights itself.
        adapters: Which adapters of `src` to merge, in this order: names, or pairs of a name and
            what its update is multiplied by.
        further: Adapters to merge after those: paths, or pairs of a path and a number.
        adapter_config: The run's `adapter_config.json`, where the checkpoint has none.
        overrides: What no tensor tells, by the keys of `adapter_config.json`.
        match_peft: Whether to round where PEFT's `merge_and_unload` does, instead of once.
        qlora_base: "dequantized" or "original": what adapters of packed weights are merged onto.
        double_quant: Whether the scales of 4-bit weights were quantized too, where nothing beside
            the checkpoint tells; assumed when left out.
        dtype: Element type of floating tensors, "keep" by default.
        allow_untrained: Whether an adapter that changes nothing is merged all the same.
        allow_other_base: Whether a base that is proven to be another is taken all the same.
        names: "auto", the default, refuses what would not load as the model of the configuration;
            "live" compares nothing.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB".
        allow_code: Whether python files and `auto_map` are copied.
        src_options: What the storage that is read has to be told, see `Options`.
        dst_options: What the storage that is written to has to be told.
        overwrite: Whether an `out` that holds something is replaced.
        workers: Threads; chosen by the number of cores when left out.
        memory_budget: What buffers may take together, in bytes or such as "64MB".
        memory_limit: What the whole process may take.
        listener: Is told of progress, from several threads.
    """

    base: PathLike | None
    adapters: Sequence[str | tuple[str, float]]
    further: Sequence[PathLike | tuple[PathLike, float]]
    adapter_config: PathLike | None
    overrides: Mapping[str, Any]
    match_peft: bool
    qlora_base: QloraBase | None
    double_quant: bool | None
    dtype: MergeDType | DTypeLike
    allow_untrained: bool
    allow_other_base: bool
    names: MergeNames
    select: str | None
    also: Sequence[PathLike]
    max_shard_size: int | str
    allow_code: bool
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None
    overwrite: bool
    workers: int | None
    memory_budget: int | str | None
    memory_limit: int | str | None
    listener: Listener | None


@check_arguments
def merge_adapter(src: PathLike, out: PathLike, **options: Unpack[MergeOptions]) -> Manifest:
    """Merges LoRA adapters into their base, into a folder that Transformers loads without PEFT.

    Args:
        src: A PEFT folder, or any path in or above a checkpoint with an adapter in it.
        out: A directory that does not exist, or is empty.
        **options: See `MergeOptions`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If a source is damaged or incomplete, or does not fit its configuration;
            nothing is left behind.
        RefusedError: If the adapter does not fit the base, or if the request cannot be met.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.pipeline.adapters.merging import choices_of, run_merge
    from ckptkit.pipeline.adapters.sources import AdapterRequest

    resources = make_resources(
        options.get("workers"), options.get("memory_budget"), options.get("memory_limit")
    )
    sources = Sources(src, options.get("src_options"))
    first = AdapterRequest(
        config=sources.optional(options.get("adapter_config")),
        overrides=options.get("overrides", {}),
        select=options.get("select"),
        also=sources.further(options.get("also", ())),
        allow_untrained=options.get("allow_untrained", False),
        limit_bytes=resources.memory_limit_bytes,
    )
    merged = run_merge(
        choices_of(sources.first, first, options.get("adapters", ()), _further(sources, options)),
        place_of(out, options.get("dst_options")),
        _request(options),
        base=sources.optional(options.get("base")),
        overwrite=options.get("overwrite", False),
        resources=resources,
        listener=options.get("listener"),
    )
    return merged.manifest


def _further(sources: Sources, options: MergeOptions) -> list[PathLike | tuple[PathLike, float]]:
    return [
        (sources.place(one[0]), one[1]) if isinstance(one, tuple) else sources.place(one)
        for one in options.get("further", ())
    ]


def _request(options: MergeOptions) -> MergeRequest:
    from ckptkit.adapters.merging import MergeRequest

    return MergeRequest(
        dtype=options.get("dtype", "keep"),
        max_file_bytes=parse_size(
            options.get("max_shard_size", DEFAULT_MAX_FILE_BYTES), option="--max-shard-size"
        ),
        match_peft=options.get("match_peft", False),
        qlora_base=options.get("qlora_base"),
        double_quant=options.get("double_quant"),
        allow_other_base=options.get("allow_other_base", False),
        names=options.get("names", "auto"),
        allow_code=options.get("allow_code", False),
    )
