"""Functions on adapters that users call, thin faces of the pipeline like those in `ckptkit.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.storage.locations import Sources, place_of

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit.execution.events import Listener
    from ckptkit.pipeline.opening import PathLike
    from ckptkit.planning.requests import DTypeLike


class AdapterOptions(TypedDict, total=False):
    """The options of `extract_adapter`; they are those of `ckptkit adapter extract`.

    Attributes:
        adapter: Its name, where there are several.
        adapter_config: The run's `adapter_config.json`, where the checkpoint has none.
        lora_alpha: The run's alpha, where no configuration is at hand.
        use_rslora: Whether the scaling was alpha / sqrt(rank), where none is at hand.
        fan_in_fan_out: Whether weights are stored as [in, out], where none is at hand.
        token_indices: The tokens whose rows were trained, where none is at hand.
        allow_untrained: Whether an adapter that changes nothing is taken all the same.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        overwrite: Whether an `out` that holds something is replaced.
        src_options: What the storage that is read has to be told, see `Options`.
        dst_options: What the storage that is written to has to be told.
        listener: Is told of progress, from several threads.
    """

    adapter: str | None
    adapter_config: PathLike | None
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
    listener: Listener | None


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
    from ckptkit.pipeline.adapters.extracting import run_extraction
    from ckptkit.pipeline.adapters.sources import AdapterRequest

    sources = Sources(src, options.get("src_options"))
    tokens = options.get("token_indices")
    known = {
        "lora_alpha": options.get("lora_alpha"),
        "use_rslora": options.get("use_rslora"),
        "fan_in_fan_out": options.get("fan_in_fan_out"),
        "trainable_token_indices": None if tokens is None else list(tokens),
    }
    request = AdapterRequest(
        adapter=options.get("adapter"),
        config=sources.optional(options.get("adapter_config")),
        overrides={key: value for key, value in known.items() if value is not None},
        select=options.get("select"),
        also=sources.further(options.get("also", ())),
        allow_untrained=options.get("allow_untrained", False),
    )
    return run_extraction(
        sources.first,
        place_of(out, options.get("dst_options")),
        request,
        overwrite=options.get("overwrite", False),
        listener=options.get("listener"),
    ).manifest


class DiffOptions(TypedDict, total=False):
    """The options of `adapter_from_diff`; they are those of `ckptkit adapter from-diff`.

    Attributes:
        include: Patterns of the matrices to make factors for; all but heads when empty.
        exclude: Patterns of matrices to leave out.
        full: Patterns of changed tensors to save as they are, with their modules.
        dtype: Element type of the factors: "float32" (default), "bfloat16" or "float16".
        select: Which model of `tuned` to take where there are several.
        overwrite: Whether an `out` that holds something is replaced.
        src_options: What the storage that is read has to be told, see `Options`.
        dst_options: What the storage that is written to has to be told.
        listener: Is told of progress.
    """

    include: Sequence[str]
    exclude: Sequence[str]
    full: Sequence[str]
    dtype: str | DTypeLike
    select: str | None
    overwrite: bool
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None
    listener: Listener | None


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
    from ckptkit.execution.events import ignore
    from ckptkit.pipeline.adapters.from_diff import make_diff_request, run_adapter_from_diff

    request = make_diff_request(
        rank,
        options.get("dtype", "float32"),
        include=options.get("include", ()),
        exclude=options.get("exclude", ()),
        full=options.get("full", ()),
        select=options.get("select"),
    )
    sources = Sources(tuned, options.get("src_options"))
    return run_adapter_from_diff(
        sources.first,
        place_of(out, options.get("dst_options")),
        request,
        base=sources.place(base),
        overwrite=options.get("overwrite", False),
        listener=options.get("listener") or ignore,
    )
