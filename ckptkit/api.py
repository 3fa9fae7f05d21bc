"""The functions that users call; each is a thin face of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from ckptkit.planning.requests import (
    ConsolidateRequest,
    Layout,
    NameChoice,
    OutputDType,
    file_limit,
    make_resources,
    vocabulary_size,
)

if TYPE_CHECKING:
    from ckptkit.core.manifest import Manifest
    from ckptkit.execution.events import Listener
    from ckptkit.pipeline.diffing import Difference
    from ckptkit.pipeline.inspecting import Inspection
    from ckptkit.pipeline.opening import PathLike
    from ckptkit.pipeline.reading import Checkpoint
    from ckptkit.pipeline.verifying import Verification


class Options(TypedDict, total=False):
    """The options of `consolidate` and `convert`; they are those of the commands.

    Attributes:
        select: Which model to take where there are several.
        dtype: Element type of floating tensors, "keep" by default; integers are never cast.
            "base" takes the type of each tensor from the files of `base`.
        keep_dtype: Patterns of names that keep their stored type.
        names: "auto", the default, writes the names of `save_pretrained`, asking the installed
            transformers where they differ from those in training; "hub" insists on them. "live"
            writes what training holds, adapters and packed weights too, which would load as
            something else.
        base: A model folder to take configuration and tokenizer from where the source has none.
        also: Further directories that hold files of the same checkpoint, such as each node's
            copy of its ranks' files; a file has the same path in each of them as below `src`.
        like: A model folder, or one with its index alone, whose file names and distribution of
            tensors over files are kept; it takes the place of `max_shard_size`.
        vocab_size: How many rows of embeddings and heads are written, where training padded them.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB", which
            is the default.
        include: Patterns of names to take; all when empty.
        exclude: Patterns of names to leave out.
        allow_code: Whether python files and `auto_map` are copied.
        overwrite: Whether an `out` that holds something is replaced.
        workers: Threads; chosen by the number of cores when left out.
        memory_budget: What buffers may take together, in bytes or such as "64MB".
        memory_limit: What the whole process may take.
        listener: Is told of progress, from several threads.
    """

    select: str | None
    dtype: OutputDType
    keep_dtype: Sequence[str]
    names: NameChoice
    base: PathLike | None
    also: Sequence[PathLike]
    like: PathLike | None
    vocab_size: int | None
    max_shard_size: int | str
    include: Sequence[str]
    exclude: Sequence[str]
    allow_code: bool
    overwrite: bool
    workers: int | None
    memory_budget: int | str | None
    memory_limit: int | str | None
    listener: Listener | None


def open(  # noqa: A001
    path: PathLike, *, select: str | None = None, also: Sequence[PathLike] = ()
) -> Checkpoint:
    """Opens the checkpoint at or under a path, for reading single tensors.

    Args:
        path: Any path in or above a checkpoint; of a run, the newest complete step is taken.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.

    Returns:
        The checkpoint; close it, or use it as a context manager.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If there are several and none was selected.
    """
    from ckptkit.pipeline.reading import Checkpoint

    return Checkpoint(path, select=select, also=also)


def inspect(
    path: PathLike, *, select: str | None = None, also: Sequence[PathLike] = ()
) -> Inspection:
    """Describes the checkpoint at or under a path, reading headers only.

    Returns:
        What was found.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If several runs lie there and none was selected.
    """
    from ckptkit.pipeline.inspecting import run_inspection

    return run_inspection(path, select=select, also=also)


def consolidate(src: PathLike, out: PathLike, **options: Unpack[Options]) -> Manifest:
    """Merges the shards of a checkpoint into a folder that Transformers loads.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        **options: See `Options`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is not empty.
    """
    return convert(src, out, to="hf", **options)


def convert(src: PathLike, out: PathLike, *, to: Layout, **options: Unpack[Options]) -> Manifest:
    """Writes the model of a checkpoint in another layout.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        to: `hf` for safetensors, `torch` for `pytorch_model.bin`, `dcp` for a sharded checkpoint
            that FSDP training loads.
        **options: See `Options`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.pipeline.consolidating import run_consolidation

    base = options.get("base")
    return run_consolidation(
        src,
        out,
        make_request(to, options),
        base=None if base is None else str(base),
        overwrite=options.get("overwrite", False),
        resources=make_resources(
            options.get("workers"), options.get("memory_budget"), options.get("memory_limit")
        ),
        listener=options.get("listener"),
        also=options.get("also", ()),
    )


def make_request(to: Layout, options: Options) -> ConsolidateRequest:
    """Checks options and turns them into a request.

    Returns:
        The request.

    Raises:
        UsageError: If one has no valid value.
    """
    like = options.get("like")
    like = None if like is None else str(like)
    return ConsolidateRequest(
        dtype=options.get("dtype", "keep"),
        keep_dtype=tuple(options.get("keep_dtype", ())),
        include=tuple(options.get("include", ())),
        exclude=tuple(options.get("exclude", ())),
        select=options.get("select"),
        max_file_bytes=file_limit(options.get("max_shard_size"), like=like),
        names=options.get("names", "auto"),
        allow_code=options.get("allow_code", False),
        layout=to,
        like=like,
        vocab_size=vocabulary_size(options.get("vocab_size")),
    )


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
    listener: Listener | None


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

    tokens = options.get("token_indices")
    known = {
        "lora_alpha": options.get("lora_alpha"),
        "use_rslora": options.get("use_rslora"),
        "fan_in_fan_out": options.get("fan_in_fan_out"),
        "trainable_token_indices": None if tokens is None else list(tokens),
    }
    request = AdapterRequest(
        adapter=options.get("adapter"),
        config=options.get("adapter_config"),
        overrides={key: value for key, value in known.items() if value is not None},
        select=options.get("select"),
        also=options.get("also", ()),
        allow_untrained=options.get("allow_untrained", False),
    )
    return run_extraction(
        src,
        out,
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
        listener: Is told of progress.
    """

    include: Sequence[str]
    exclude: Sequence[str]
    full: Sequence[str]
    dtype: str
    select: str | None
    overwrite: bool
    listener: Listener | None


def adapter_from_diff(
    tuned: PathLike, out: PathLike, *, base: PathLike, rank: int, **options: Unpack[DiffOptions]
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
    return run_adapter_from_diff(
        tuned,
        out,
        request,
        base=base,
        overwrite=options.get("overwrite", False),
        listener=options.get("listener") or ignore,
    )


def verify(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    listener: Listener | None = None,
) -> Verification:
    """Reads a checkpoint, or an output of ours, and checks every stored checksum.

    Returns:
        What was checked, and what is wrong.

    Raises:
        InputError: If what is there cannot be parsed at all.
    """
    from ckptkit.pipeline.verifying import run_verification

    return run_verification(path, select=select, also=also, listener=listener)


def diff(a: PathLike, b: PathLike, *, listener: Listener | None = None) -> Difference:
    """Compares the models of two checkpoints bit by bit, across formats.

    Returns:
        How they differ.

    Raises:
        InputError: If one of them cannot be read whole.
    """
    from ckptkit.pipeline.diffing import run_diff

    return run_diff(a, b, listener=listener)
