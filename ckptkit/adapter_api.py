"""The functions that users call for adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.options import (
    DTypeLike,
    GenerationChoice,
    NotFinite,
    ProgressOptions,
    Resources,
    TokenizerOrigin,
)
from ckptkit.storage.locations import Sources, place_of, resolve_places

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit.lora.changes import MergeDType, MergeNames, QloraBase
    from ckptkit.storage.places import PathLike


class AdapterOptions(ProgressOptions, total=False):
    """The options of `extract_adapter`; they are those of `ckptkit adapter extract`.

    Attributes:
        adapter: Its name, where there are several.
        adapter_config: The run's `adapter_config.json`, where the checkpoint has none.
        base: The model that was trained on, whose configuration converts the names of another
            framework, such as Megatron-Core or torchtune.
        lora_alpha: The run's alpha, where no configuration is at hand.
        use_rslora: Whether the scaling was alpha / sqrt(rank), where none is at hand.
        fan_in_fan_out: Whether weights are stored as [in, out], where none is at hand.
        token_indices: The tokens whose rows were trained, where none is at hand.
        allow_untrained: Whether an adapter that changes nothing is taken all the same.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        overwrite: Whether an `out` that holds something is replaced.
        src_options: Options of the storage that is read, see `Options`.
        dst_options: Options of the storage that is written.
    """

    adapter: str | None
    adapter_config: PathLike | None
    base: PathLike | None
    lora_alpha: float | None
    use_rslora: bool | None
    fan_in_fan_out: bool | None
    token_indices: Sequence[int] | None
    allow_untrained: bool
    select: str | None
    also: Sequence[PathLike]
    overwrite: bool
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None


@check_arguments
def extract_adapter(src: PathLike, out: PathLike, **options: Unpack[AdapterOptions]) -> Manifest:
    """Takes a LoRA adapter out of a checkpoint, into a folder that PEFT loads.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        **options: See `AdapterOptions`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete, or does not fit its configuration;
            nothing is left behind.
        RefusedError: If there is no adapter, or several and none was named, or if it is
            untrained.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.adapters.extract import run_extraction
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.engine.progress import report_to

    values = resolve_places(src, out, options)
    with report_to("extract_adapter", options) as listener:
        return run_extraction(
            values["src"],
            values["out"],
            AdapterRequest.from_options(values, adapter=options.get("adapter")),
            overwrite=options.get("overwrite", False),
            listener=listener,
        ).manifest


class DiffOptions(ProgressOptions, total=False):
    """The options of `adapter_from_diff`; they are those of `ckptkit adapter from-diff`.

    Attributes:
        include: Patterns of the matrices to make factors for; all but heads when empty.
        exclude: Patterns of matrices to leave out.
        full: Patterns of changed tensors to save as they are, with their modules.
        dtype: Element type of the factors: "float32" (default), "bfloat16" or "float16".
        select: Which model of `tuned` to take where there are several.
        overwrite: Whether an `out` that holds something is replaced.
        src_options: Options of the storage that is read, see `Options`.
        dst_options: Options of the storage that is written.
    """

    include: Sequence[str]
    exclude: Sequence[str]
    full: Sequence[str]
    dtype: str | DTypeLike
    select: str | None
    overwrite: bool
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None


@check_arguments
def adapter_from_diff(
    tuned: PathLike,
    out: PathLike,
    *,
    base: PathLike,
    rank: int | str,
    **options: Unpack[DiffOptions],
) -> Manifest:
    """Makes a LoRA adapter of what full training changed in a model.

    The weight of each linear layer is approximated by the nearest product of two factors; one
    float32 matrix and its factors are in memory at a time, and all factors that were made.

    Args:
        tuned: The model after training: any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        base: The model before training.
        rank: Of the factors; a matrix with a smaller side gets the length of that.
        **options: See `DiffOptions`.

    Returns:
        The manifest that was written. Its `source["difference"]` has, for each layer, the norm
        of the change, and what the factors miss as a part of it (`error`); `lost` names what
        changed and is not in the adapter.

    Raises:
        InputError: If a side is damaged or incomplete; nothing is left behind.
        RefusedError: If the two are not one model, or if nothing changed.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.adapters.from_diff import make_diff_request, run_adapter_from_diff
    from ckptkit.engine.progress import report_to

    request = make_diff_request(
        rank,
        options.get("dtype", "float32"),
        include=options.get("include", ()),
        exclude=options.get("exclude", ()),
        full=options.get("full", ()),
        select=options.get("select"),
    )
    sources = Sources(tuned, options.get("src_options"))
    with report_to("adapter_from_diff", options) as listener:
        return run_adapter_from_diff(
            sources.first,
            place_of(out, options.get("dst_options")),
            request,
            base=sources.place(base),
            overwrite=options.get("overwrite", False),
            listener=listener,
        )


class MergeOptions(ProgressOptions, total=False):
    """The options of `merge_adapter`; they are those of `ckptkit adapter merge`.

    Attributes:
        base: The model that was trained on; left out where `src` holds its weights itself.
        adapters: Which adapters of `src` to merge, in this order: names, or pairs of a name and
            what its update is multiplied by.
        further: Adapters to merge after those: paths, or pairs of a path and a number.
        adapter_config: The run's `adapter_config.json`, where the checkpoint has none.
        overrides: Settings that no tensor shows, by the keys of `adapter_config.json`.
        match_peft: Whether to round where PEFT's `merge_and_unload` does, instead of once.
        qlora_base: "dequantized" or "original": what adapters of packed weights are merged onto.
        double_quant: Whether the scales of 4-bit weights were quantized too, where no file of
            the checkpoint says so; assumed when left out.
        dtype: Element type of floating tensors, "keep" by default.
        cast_all: Whether `dtype` also casts what the class of the model, or the base, keeps in
            float32.
        generation_config: "align" or "keep"; see `ckptkit.api.Options`.
        tokenizer_from: "auto", "step" or "base"; see `ckptkit.api.Options`.
        allow_untrained: Whether an adapter that changes nothing is merged all the same.
        allow_other_base: Whether a base that is proven to be another is taken all the same.
        names: "auto", the default, refuses what would not load as the model of the configuration;
            "live" compares nothing.
        map: The name map that converts the names of the base, see `Options`.
        model_config: A model folder with configuration and tokenizer, where neither the adapter
            nor the base has them; a base with the names of Megatron-Core needs one.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB".
        allow_code: Whether python files and `auto_map` are copied.
        check: A list with "nan", "inf" or both, see `Options`.
        src_options: Options of the storage that is read, see `Options`.
        dst_options: Options of the storage that is written.
        overwrite: Whether an `out` that holds something is replaced.
        workers: Threads; chosen by the number of cores when left out.
        memory_budget: What buffers may take together, in bytes or such as "64MB".
        memory_limit: What the whole process may take.
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
    cast_all: bool
    generation_config: GenerationChoice
    tokenizer_from: TokenizerOrigin
    allow_untrained: bool
    allow_other_base: bool
    names: MergeNames
    map: PathLike
    model_config: PathLike | None
    select: str | None
    also: Sequence[PathLike]
    max_shard_size: int | str
    allow_code: bool
    check: Sequence[NotFinite]
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None
    overwrite: bool
    workers: int | None
    memory_budget: int | str | None
    memory_limit: int | str | None


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
    from ckptkit.adapters.merge.merge_adapters import list_choices, run_merge
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.engine.progress import report_to
    from ckptkit.lora.changes import MergeRequest

    values = resolve_places(src, out, options)
    resources = Resources.from_options(options)
    sources = Sources(src, options.get("src_options"))
    first = AdapterRequest.from_options(values, limit_bytes=resources.memory_limit_bytes)
    further = [
        (sources.place(one[0]), one[1]) if isinstance(one, tuple) else sources.place(one)
        for one in options.get("further", ())
    ]
    with report_to("merge_adapter", options) as listener:
        merged = run_merge(
            list_choices(sources.first, first, options.get("adapters", ()), further),
            values["out"],
            MergeRequest.from_options(values),
            base=values["base"],
            overwrite=options.get("overwrite", False),
            resources=resources,
            listener=listener,
        )
    return merged.manifest
