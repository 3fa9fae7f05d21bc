"""The functions that users call, and their options; a function imports what it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptkit.core.arguments import check_arguments
from ckptkit.core.errors import ArgumentError, UsageError
from ckptkit.core.text import a_kind
from ckptkit.options import (
    AdapterLayout,
    ChecksumFormat,
    CountLike,
    DTypeChoice,
    DTypeLike,
    Encoding,
    Engine,
    GenerationChoice,
    IfExists,
    Layout,
    NameChoice,
    NotFinite,
    OutputDType,
    ProgressOptions,
    Proof,
    Resources,
    RetentionOptions,
    Sharing,
    TokenizerOrigin,
    positive_number,
)
from ckptkit.storage.locations import Sources, local_path, place_of, resolve_places

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference
    from ckptkit.conversion.inspect import Inspection
    from ckptkit.conversion.seal import Sealing
    from ckptkit.conversion.source.read import Checkpoint
    from ckptkit.conversion.stats import Statistics
    from ckptkit.conversion.verify import Verification
    from ckptkit.core.manifest import Manifest
    from ckptkit.deltas.checks import DeltaInspection
    from ckptkit.diagnosis.findings import Diagnosis
    from ckptkit.engine.outcome import Listener
    from ckptkit.lora.changes import MergeDType, MergeNames, QloraBase
    from ckptkit.runs.listing import RunListing
    from ckptkit.runs.pruning import Pruned
    from ckptkit.serving.serving import ServeListener, Serving
    from ckptkit.storage.locations import PathLike


class SourceOptions(TypedDict, total=False):
    """The options of all functions that make a model of a checkpoint.

    Attributes:
        select: Which model to take where there are several.
        include: Patterns of names to take; all when empty.
        exclude: Patterns of names to leave out.
        keep_dtype: Patterns of names that keep their stored type.
        names: "auto", the default, writes the names of `save_pretrained`, asking the installed
            transformers where they differ from those in training; "hub" insists on them. "live"
            writes what training holds, adapters and packed weights too, which would load as
            something else.
        map: The name map that converts the names of another framework: "auto", the default, finds
            it by the tensors' names and the configuration; "none" converts nothing; or the name of
            a map, or the path of a TOML file.
        base: A model to take configuration and tokenizer from where the source has none: a
            folder, a URL, or its id on the Hub, such as "org/name" or "org/name@revision". A
            folder of that name goes first.
        cast_all: Whether `dtype` also casts what the class of the model, or the base, keeps in
            float32.
        fill_from: A model to take those tensors from that the source lacks, such as frozen parts.
        fill_from_base: Whether they are taken from `base`.
        into_base: Whether the source, a text model, is put into the multimodal model of `base`,
            from which all other tensors are taken.
        strip_prefix: What is taken from the beginning of names, or several such texts: "net." where
            training wrapped the model. All other options see the names without it.
        vocab_size: How many rows of embeddings and heads are written, where training padded them.
        model_config: A folder with the `config.json` of the model, whose parameters show what
            the flat parameters of FSDP1's LOCAL_STATE_DICT contain.
        src_options: Options of the storage that is read, as fsspec names them: keys, or an
            endpoint. They are used for other places too if their URLs are of the same kind.
        workers: Threads; chosen by the number of cores when left out.
        memory_budget: What buffers may take together, in bytes or such as "64MB".
        memory_limit: What the whole process may take.
        bandwidth: Bytes per second that are read at most, and written at most.
    """

    select: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    keep_dtype: Sequence[str]
    names: NameChoice
    map: PathLike
    base: PathLike | None
    cast_all: bool
    fill_from: PathLike | None
    fill_from_base: bool
    into_base: bool
    strip_prefix: str | Sequence[str]
    vocab_size: CountLike | None
    model_config: PathLike | None
    src_options: Mapping[str, Any] | None
    workers: int | None
    memory_budget: int | str | None
    memory_limit: int | str | None
    bandwidth: int | str | None


class SharingOptions(TypedDict, total=False):
    """The options of functions that may share blocks with what they read.

    Attributes:
        share: Whether the file system makes blocks of the sources those of the output: "auto", the
            default, where it can; "always", or else refused; "never".
        proof: What proves bytes that are shared so: they are "read" and compared, or, much faster,
            the "stored" checksums of a save of ckptkit are taken as they are.
    """

    share: Sharing
    proof: Proof


class OutputOptions(SourceOptions, ProgressOptions, total=False):
    """The options of all functions that write a model of whole checkpoints.

    Attributes:
        dtype: Element type of floating tensors, "keep" by default; integers are never cast. An
            alias such as "bf16", or a dtype of torch or numpy, is understood too. "fp8-block" and
            the like pack the weights of linear layers, and write all else in bfloat16.
            "base" takes the type of each tensor from the files of `base`.
        config: The configuration that is written instead of that of the source: a folder with a
            `config.json`, such a file, or the id of a model on the Hub.
        tokenizer: The tokenizer that is written instead of that of the source: a folder, a
            `tokenizer.json`, or the id of a model on the Hub.
        generation_config: "align", the default, adds the tokens with which the tokenizer ends turns
            to `eos_token_id`; "keep" leaves `generation_config.json` as it is.
        tokenizer_from: Whose tokenizer is written: "step", "base", or "auto", the default, which
            takes the files of the base if the step has the same tokens.
        like: A model folder, or one with its index alone, whose file names and distribution of
            tensors over files are kept; it takes the place of `max_shard_size`. Without `dtype`,
            weights are packed as those of a packed model are.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB", which
            is the default.
        allow_code: Whether python files and `auto_map` are copied.
        check: A list with "nan", "inf" or both: refuses an output with such elements before it is
            committed.
        dst_options: Options of the storage that is written.
        overwrite: Whether an `out` that holds something is replaced.
        resume: Whether to resume an interrupted run: its finished files are kept where they are
            proven to be as it wrote them, and those of this run stay if it is interrupted.
        if_exists: "verify" returns the manifest of an `out` that holds this very output already,
            made from the same source in the same way, once all its digests are proven; "error",
            the default, refuses it.
        engine: "local", the default, or "ray" for the nodes of a Ray cluster, which all need to
            see `src` and `out`; the limits are then those of each node.
    """

    dtype: OutputDType | DTypeLike
    config: PathLike | None
    tokenizer: PathLike | None
    generation_config: GenerationChoice
    tokenizer_from: TokenizerOrigin
    like: PathLike | None
    max_shard_size: int | str
    allow_code: bool
    check: Sequence[NotFinite]
    dst_options: Mapping[str, Any] | None
    overwrite: bool
    resume: bool
    if_exists: IfExists
    engine: Engine


class Options(OutputOptions, SharingOptions, total=False):
    """The options of `consolidate` and `convert`; they are those of the commands.

    Attributes:
        also: Further directories that hold files of the same checkpoint, such as each node's
            copy of its ranks' files; a file has the same path in each of them as below `src`.
        optimizer: Whether the states of the optimizer are written too, under the names of the
            parameters in training: as `optimizer.bin`, with `to="dcp"` in `optimizer_0`, for
            other frameworks beside the weights.
        delete_source: Whether the files that were read are removed once all of the output was read
            back and has the digests of its manifest. They stay if something in them, such as the
            state of an optimizer, is not in the output, which is refused beforehand.
    """

    also: Sequence[PathLike]
    optimizer: bool
    delete_source: bool


@check_arguments
def open(  # noqa: A001
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    map: PathLike = "none",  # noqa: A002
    base: PathLike | None = None,
    src_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens the checkpoint at or under a path, for reading single tensors.

    Args:
        path: Any path in or above a checkpoint; of a run, the newest complete step is taken.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        map: The name map that converts the names of another framework, see `Options`; "none", the
            default, keeps names as they are stored. A tensor is converted when it is read.
        base: A model folder with the configuration, if the checkpoint has none.
        src_options: Options of the storage, see `Options`.

    Returns:
        The checkpoint; close it, or use it as a context manager.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If there are several and none was selected.
    """
    from ckptkit.conversion.source.read import Checkpoint

    sources = Sources(path, src_options)
    return Checkpoint(
        sources.first,
        select=select,
        also=sources.further(also),
        choice=os.fspath(map),
        base=sources.optional(base),
    )


@check_arguments
def inspect(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    src_options: Mapping[str, Any] | None = None,
    model_config: PathLike | None = None,
    base: PathLike | None = None,
    map: PathLike | None = None,  # noqa: A002
    shards: bool = False,
) -> Inspection:
    """Describes the checkpoint at or under a path, reading headers only.

    Args:
        path: Any path in or above a checkpoint; of a run, the newest complete step is taken.
        select: Which model to take where there are several.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        src_options: Options of the storage, see `Options`.
        model_config: A folder with the configuration of a model in flat parameters.
        base: A model folder with the configuration, if the checkpoint has none.
        map: The name map, see `Options`; the `map` of the result shows what becomes what. None
            takes that of a conversion without this option; where it would be refused, the result
            has a `map_refusal`.
        shards: Whether to describe which ranks and files each tensor is in, for `write_report`.

    Returns:
        What was found.

    Raises:
        InputError: If there is none, or if it cannot be parsed.
        AmbiguousSourceError: If there are several runs and none was selected.
    """
    from ckptkit.conversion.inspect import run_inspection

    sources = Sources(path, src_options)
    return run_inspection(
        sources.first,
        select=select,
        also=sources.further(also),
        model_config=sources.optional(model_config),
        base=sources.optional(base),
        choice=None if map is None else os.fspath(map),
        shards=shards,
    )


@check_arguments
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


@check_arguments
def convert(src: PathLike, out: PathLike, *, to: Layout, **options: Unpack[Options]) -> Manifest:
    """Writes the model of a checkpoint in another layout.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        to: `hf` for safetensors, `torch` for `pytorch_model.bin`, `dcp` for a sharded checkpoint
            that FSDP training loads, `megatron` for one that Megatron-LM starts from at any
            parallel size, `torchtitan` for one that torchtitan starts from, `universal` for one
            that DeepSpeed loads with `load_universal`.
        **options: See `Options`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is not empty.
        VerificationError: If it is the output asked for, and damaged; then no source is removed.
    """
    from ckptkit.conversion.job import run_job
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.engine.progress import report_to

    job = ConversionJob.from_options(resolve_places(src, out, options), to)
    with report_to("consolidate" if to == "hf" else "convert", options) as listener:
        return run_job(job, listener).whole


class AverageOptions(OutputOptions, total=False):
    """The options of `average`; they are those of `ckptkit average`.

    Attributes:
        last: Averages so many of the newest complete steps of a run.
        weights: How much each source counts; they are divided by their sum. Without them all count
            alike: the sum of all, in order, is divided by their number.
        ema: The decay of an exponential moving average: it begins with the oldest source, and for
            each newer one `x` becomes `ema * average + (1 - ema) * x`.
        take_last: Patterns of tensors that are taken from the last source as they are.
    """

    last: CountLike | None
    weights: Sequence[float] | None
    ema: float | None
    take_last: Sequence[str]


@check_arguments
def average(
    sources: PathLike | Sequence[PathLike], out: PathLike, **options: Unpack[AverageOptions]
) -> Manifest:
    """Averages the weights of several steps into a folder that Transformers loads.

    Floats are averaged in float32, those of float64 in float64, and rounded once to the type that
    is written. Integers and other tensors have to be the same in all sources. Configuration and
    tokenizer are those of the last source.

    Args:
        sources: Steps, folders or URLs, the oldest first; with `last`, a run.
        out: A directory that does not exist, or is empty.
        **options: See `AverageOptions`.

    Returns:
        The manifest that was written; `source["average"]` of it names the sources and how much each
        counts.

    Raises:
        InputError: If a source is damaged or incomplete; nothing is left behind.
        RefusedError: If the sources do not have the same tensors, or the request cannot be met.
        OutputExistsError: If `out` is not empty.
        UsageError: If there are too few sources, or an option has no valid value.
        ArgumentError: If an option is none of an average.
    """
    from ckptkit.conversion.average import AverageJob, Weighting
    from ckptkit.conversion.job import run_job
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.engine.progress import report_to

    listed = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not listed:
        raise UsageError("no source was named", where="SRC", hint="name the steps, or a run")
    places = Sources(listed[0], options.get("src_options"))
    job = AverageJob.of(
        ConversionJob.from_options(resolve_places(listed[-1], out, options), "hf"),
        [places.first, *places.further(listed[1:])],
        Weighting.from_options(options.get("weights"), options.get("ema")),
        last=positive_number(options.get("last"), option="--last", example=5),
        take_last=options.get("take_last", ()),
    )
    with report_to("average", options) as listener:
        return run_job(job, listener).whole


@check_arguments
def verify(
    path: PathLike,
    *,
    select: str | None = None,
    also: Sequence[PathLike] = (),
    src_options: Mapping[str, Any] | None = None,
    repair: bool = False,
    copies: Sequence[PathLike] = (),
    listener: Listener | None = None,
    progress: bool = False,
) -> Verification:
    """Reads a checkpoint, a delta, or an output of ours, and checks every stored checksum.

    With `repair`, damaged files are replaced by those of `copies` if the whole is proven with them.

    Returns:
        What was checked, and what is wrong; with `repair`, what is wrong still, and in `mended` the
        files that were replaced.

    Raises:
        InputError: If what is there cannot be parsed at all.
        RefusedError: If nothing can be mended at the place.
        OutputError: If mended files cannot be written; no damaged one is lost.
        UsageError: If options do not fit together.
    """
    from ckptkit.conversion.verify import run_repair, run_verification
    from ckptkit.deltas.checks import verify_delta
    from ckptkit.deltas.form import is_delta
    from ckptkit.engine.progress import report_to

    sources = Sources(path, src_options)
    if repair and (select is not None or also):
        raise UsageError("cannot be combined with --select or --also", where="--repair")
    if copies and not repair:
        raise UsageError("names copies to mend from, and needs --repair", where="--from")
    with report_to("verify", {"listener": listener, "progress": progress}) as listen:
        if repair:
            return run_repair(sources.first, sources.further(copies), listener=listen)
        if is_delta(sources.first):
            return verify_delta(sources.first, listen)
        return run_verification(
            sources.first, select=select, also=sources.further(also), listener=listen
        )


class Tolerances(TypedDict, total=False):
    """How far values may be apart in a comparison of numbers.

    As for `numpy.allclose`, values are the same where `|a - b| <= atol + rtol * |b|`. Two NaN are
    the same.

    Attributes:
        rtol: The part of the value in `b`; 0 by default.
        atol: What is allowed in addition; 0 by default.
    """

    rtol: float | None
    atol: float | None


@check_arguments
def diff(
    a: PathLike,
    b: PathLike,
    *,
    map: PathLike = "auto",  # noqa: A002
    base: PathLike | None = None,
    select: str | Sequence[str] = (),
    numeric: bool = False,
    unpacked: bool = False,
    src_options: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    progress: bool = False,
    **tolerance: Unpack[Tolerances],
) -> Difference:
    """Compares the models of two checkpoints across formats, bit by bit or by their numbers.

    Args:
        a: The first one.
        b: The second one.
        map: The name map, see `Options`; it converts the names of each side that it is for.
        base: A folder with the configuration of the model. A side without one takes this, or else
            that of the other side.
        select: Which model or checkpoint to take where there are several: of each side that has
            it, or a list with that of `a` and that of `b`. Of an adapter and its base, both are
            compared.
        numeric: Whether values are compared, whatever their types, instead of bits; `numeric` of
            the result then has the largest absolute and relative difference, the cosine and the
            norms of each tensor.
        unpacked: Whether packed weights are compared by the numbers that they stand for; with
            `numeric`.
        src_options: Options of the storage, see `Options`.
        listener: Receives progress events, from several threads.
        progress: Whether progress is shown, see `Options`.
        **tolerance: See `Tolerances`.

    Returns:
        How they differ.

    Raises:
        InputError: If one of them cannot be read whole.
        UsageError: If a tolerance is negative, or one, or `unpacked`, is without `numeric`.
    """
    from ckptkit.conversion.diff import make_tolerance, run_diff
    from ckptkit.engine.progress import report_to

    sources = Sources(a, src_options)
    with report_to("diff", {"listener": listener, "progress": progress}) as listen:
        return run_diff(
            sources.first,
            sources.place(b),
            choice=os.fspath(map),
            base=sources.optional(base),
            select=[select] if isinstance(select, str) else select,
            tolerance=make_tolerance(
                numeric=numeric, rtol=tolerance.get("rtol"), atol=tolerance.get("atol")
            ),
            unpacked=unpacked,
            listener=listen,
        )


class StatsOptions(ProgressOptions, total=False):
    """The options of `stats`; they are those of `ckptkit stats`.

    Attributes:
        select: Which model to take where there are several.
        include: Patterns of names to measure; all when empty.
        exclude: Patterns of names to leave out.
        also: Further directories that hold files of the same checkpoint, see `Options`.
        base: A model folder with the configuration, if the checkpoint has none; for `map` and
            `unpacked`.
        optimizer: Whether the states of the optimizer are measured too; their names begin with
            `optimizer.`.
        unpacked: Whether packed weights are measured by the numbers that they stand for.
        map: The name map that converts the names of another framework, see `Options`; "none", the
            default, keeps names as they are stored.
        src_options: Options of the storage, see `Options`.
    """

    select: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    also: Sequence[PathLike]
    base: PathLike | None
    optimizer: bool
    unpacked: bool
    map: PathLike
    src_options: Mapping[str, Any] | None


@check_arguments
def stats(path: PathLike, **options: Unpack[StatsOptions]) -> Statistics:
    """Measures every tensor of a checkpoint: norm, minimum, maximum, mean, zeros, NaN, infinities.

    Args:
        path: Any path in or above a checkpoint; of a run, the newest complete step is taken.
        **options: See `StatsOptions`.

    Returns:
        The numbers of each tensor, and of all together. `find_refusal("nan")` of it returns the
        error that names the tensors with NaN.

    Raises:
        InputError: If the checkpoint is damaged or incomplete.
    """
    from ckptkit.conversion.stats import run_stats
    from ckptkit.engine.progress import report_to
    from ckptkit.options import ConsolidateRequest

    sources = Sources(path, options.get("src_options"))
    with report_to("stats", options) as listener:
        return run_stats(
            sources.first,
            ConsolidateRequest.from_options({"map": "none", **options}),
            also=sources.further(options.get("also", ())),
            base=sources.optional(options.get("base")),
            unpacked=options.get("unpacked", False),
            listener=listener,
        )


@check_arguments
def list_run(run: PathLike, *, state: PathLike | None = None) -> RunListing:
    """Lists the steps of a run; headers alone are read.

    Args:
        run: The directory that holds the `checkpoint-N` folders, one above it that holds no other
            run, or a URL.
        state: Where a watch of the run keeps its state, if not in the run itself.

    Returns:
        Each step: whether it is complete, its size, age and metrics, and where it was pushed.

    Raises:
        InputError: If there is no such run, or if it cannot be listed.
    """
    from ckptkit.runs import listing
    from ckptkit.runs.find_run import find_run

    return listing.list_run(
        find_run(place_of(run)), state=None if state is None else place_of(state)
    )


@check_arguments
def seal(
    path: PathLike,
    *,
    src_options: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    progress: bool = False,
) -> Sealing:
    """Writes the manifest, with digests, beside steps that another saver wrote.

    All of a step is read, and compared with the checksums that its format stores. A step is
    complete with its manifest as one that ckptkit saved is, and `verify` finds what changes in any
    of its files. A step that has a manifest is left as it is.

    Args:
        path: A step, or a run, whose complete steps are all sealed.
        src_options: Options of the storage, see `Options`.
        listener: Receives progress events; their bytes are those that are read.
        progress: Whether progress is shown, see `Options`.

    Returns:
        What became of each step. Of a run, those that are damaged are in `failed`.

    Raises:
        VerificationError: If the step that was passed is damaged; nothing is written.
        InputError: If it is not complete, changes meanwhile, or cannot be read.
        RefusedError: If it has no folder for a manifest, or the storage is read-only.
        OutputError: If the manifest cannot be written.
    """
    from ckptkit.conversion.seal import run_seal
    from ckptkit.engine.progress import report_to

    with report_to("seal", {"listener": listener, "progress": progress}) as listen:
        return run_seal(place_of(path, src_options), listener=listen)


@check_arguments
def prune(
    run: PathLike,
    *,
    incomplete: bool = False,
    max_total_size: int | str | None = None,
    drop_optimizer_older_than: int | None = None,
    dry_run: bool = False,
    listener: Listener | None = None,
    progress: bool = False,
    **rules: Unpack[RetentionOptions],
) -> Pruned:
    """Removes the steps of a run that no rule keeps; the rules are those of a `Checkpointer`.

    Some steps stay whatever the rules are: the newest complete step, incomplete steps unless
    `incomplete` is set, steps that another process reads or pushes, and the step that the Trainer
    calls its best.

    Args:
        run: The directory that holds the `checkpoint-N` folders, or its URL.
        incomplete: Whether incomplete steps are removed too, if a complete one exists and nothing
            was written to them in the last 10 minutes.
        max_total_size: What all steps may take together, in bytes or such as "500GB": the oldest
            are removed until they fit, though a rule other than `keep_best` keeps them.
        drop_optimizer_older_than: How many of the newest steps keep their optimizer; the others
            lose it, where it is in files of its own and the step has a manifest.
        dry_run: Whether to say only what would be done.
        listener: Receives progress events; their bytes are those that are removed.
        progress: Whether progress is shown, see `Options`.
        **rules: See `RetentionOptions`.

    Returns:
        What became of each step, and what that freed.

    Raises:
        UsageError: If there is no rule, or one has no valid value.
        RefusedError: If the best step is to stay, and no step has the metric.
        InputError: If there is no such run, or if it cannot be listed.
    """
    from ckptkit.engine.progress import report_to
    from ckptkit.options import parse_total
    from ckptkit.runs.pruning import prune_run
    from ckptkit.runs.retention import Retention

    size = max_total_size
    total = None if size is None else parse_total(size, option="--max-total-size")
    whole = positive_number(
        drop_optimizer_older_than, option="--drop-optimizer-older-than", example=3
    )
    with report_to("prune", {"listener": listener, "progress": progress}) as listen:
        return prune_run(
            run,
            Retention(**rules),
            dry_run=dry_run,
            incomplete=incomplete,
            whole_steps=whole,
            most_bytes=total,
            listener=listen,
        )


class AdapterOptions(ProgressOptions, total=False):
    """The options of `extract_adapter` and `convert_adapter`, and of their commands.

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
        )[0]


@check_arguments
def convert_adapter(
    src: PathLike, out: PathLike, *, to: AdapterLayout, **options: Unpack[AdapterOptions]
) -> Manifest:
    """Writes a LoRA of a mixture-of-experts model in the layout of another library.

    Each product of factors stays what it is. `base` names the model, whose configuration says how
    it has its experts, unless the configuration of the adapter names a folder on this machine.

    Args:
        src: Any path in or above a checkpoint.
        out: A directory that does not exist, or is empty.
        to: "peft", for `target_parameters`, or "vllm", for what vLLM and SGLang load.
        **options: See `AdapterOptions`.

    Returns:
        The manifest that was written.

    Raises:
        InputError: If the source is damaged or incomplete, or does not fit its base; nothing is
            left behind.
        RefusedError: If the layout cannot hold what the adapter has.
        OutputExistsError: If `out` is not empty.
    """
    from ckptkit.adapters.convert import run_conversion
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.engine.progress import report_to

    values = resolve_places(src, out, options)
    with report_to("convert_adapter", options) as listener:
        return run_conversion(
            values["src"],
            values["out"],
            AdapterRequest.from_options(values, adapter=options.get("adapter")),
            to=to,
            overwrite=options.get("overwrite", False),
            listener=listener,
        )[0]


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
    from ckptkit.adapters.from_diff import DiffRequest, run_adapter_from_diff
    from ckptkit.engine.progress import report_to

    request = DiffRequest(
        rank=rank,
        dtype=options.get("dtype", "float32"),
        include=tuple(options.get("include", ())),
        exclude=tuple(options.get("exclude", ())),
        full=tuple(options.get("full", ())),
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


class MergeOptions(ProgressOptions, SharingOptions, total=False):
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
        dtype: Element type of floating tensors, "keep" by default, which leaves a packed base
            packed; any other unpacks it.
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
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB"; None
            for the files of the base.
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
    from ckptkit.adapters.merge import MergeJob, list_adapters, run_merge
    from ckptkit.engine.progress import report_to
    from ckptkit.lora.changes import MergeRequest

    values = resolve_places(src, out, options)
    resources = Resources.from_options(options)
    with report_to("merge_adapter", options) as listener:
        job = MergeJob(
            adapters=list_adapters(values, resources),
            destination=values["out"],
            request=MergeRequest.from_options(values),
            base=values["base"],
            overwrite=options.get("overwrite", False),
            resources=resources,
        )
        return run_merge(job, listener).manifest


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


class ApplicationOptions(SideOptions, SharingOptions, total=False):
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


@check_arguments
def write_report(
    result: Inspection | Difference,
    out: PathLike,
    *,
    statistics: Statistics | None = None,
    run: RunListing | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes one HTML file that shows a checkpoint, or how two models differ.

    The page needs no network, and contains its style and its script. It appears by a rename, whole.

    Args:
        result: What `inspect` or `diff` returned. `inspect(path, shards=True)` adds the map of
            ranks and files, `diff(a, b, numeric=True)` adds how far each tensor has changed.
        out: The file; its directory exists.
        statistics: With an inspection: what `stats` returned for the same checkpoint.
        run: With an inspection: what `list_run` returned for the run that it is a step of.
        overwrite: Whether an earlier page is replaced. Other files never are.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: If `result` is neither, or something does not belong to a difference.
        OutputExistsError: If the file exists.
        OutputError: If it cannot be written there.
        NoSpaceError: If the disk is full; nothing is left behind.
    """
    from ckptkit.conversion.diff import Difference
    from ckptkit.conversion.inspect import Inspection
    from ckptkit.conversion.stats import Statistics
    from ckptkit.report.page import plan_difference_report, plan_inspection_report, write_page
    from ckptkit.runs.listing import RunListing

    if isinstance(result, Difference):
        if statistics is not None or run is not None:
            where = "write_report: statistics, run"
            raise ArgumentError("belongs to an inspection", where=where)
        return write_page(plan_difference_report(result), out, overwrite=overwrite)
    _check_result(result, Inspection, "result", "inspect or diff")
    if statistics is not None:
        _check_result(statistics, Statistics, "statistics", "stats")
    if run is not None:
        _check_result(run, RunListing, "run", "list_run")
    document = plan_inspection_report(result, statistics=statistics, run=run)
    return write_page(document, out, overwrite=overwrite)


def _check_result(value: object, kind: type, name: str, source: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(
            f"is {a_kind(value)}, where the result of {source} was expected",
            where=f"write_report: {name}",
            hint=f"pass ckptkit.{source.partition(' ')[0]}(...)",
        )


class DoctorOptions(TypedDict, total=False):
    """The options of `doctor`; they are those of the command.

    Attributes:
        local: A node's own disk, as `Checkpointer(..., local=...)` takes it.
        model_size: Parameters of the model, such as `"8B"`, if the run has no step to go by.
        ranks: Of the job; by default those of the configuration.
        nodes: Of the job; by default those of the configuration, or 1.
        keep_last: How many steps stay.
        steps: How many more steps will be saved.
        probe: Whether the probe is written; it is by default.
        src_options: Options of the storage, as fsspec names them.
    """

    local: PathLike | None
    model_size: CountLike | None
    ranks: CountLike | None
    nodes: CountLike | None
    keep_last: CountLike | None
    steps: CountLike | None
    probe: bool
    src_options: Mapping[str, Any] | None


_DOCTOR_NUMBERS = ("ranks", "nodes", "keep_last", "steps")


@check_arguments
def doctor(
    places: PathLike | Sequence[PathLike] = (), **options: Unpack[DoctorOptions]
) -> Diagnosis:
    """Looks for what will hurt a run, before it starts.

    Disk or store, memory, limits of this process and installed versions are looked at. Nothing is
    written but a probe, which is removed again: a file without a name of at most 256 MB, or three
    small objects of a store.

    Args:
        places: The run, or where it will be: a directory or a URL; and configuration files of
            accelerate or the Trainer (YAML or JSON). By default the current directory.
        **options: See `DoctorOptions`.

    Returns:
        The findings, errors first.

    Raises:
        InputError: If a configuration, or the run, cannot be read.
        UsageError: If an option has no valid value, or several runs are named.
    """
    from ckptkit.diagnosis.examine import examine

    named = [places] if isinstance(places, (str, os.PathLike)) else list(places)
    local = options.get("local")
    given: Mapping[str, Any] = options
    counts = {
        name: positive_number(given.get(name), option=f"--{name.replace('_', '-')}", example=4)
        for name in _DOCTOR_NUMBERS
    }
    return examine(
        named,
        options.get("src_options"),
        local=None if local is None else local_path(place_of(local)),
        model_size=options.get("model_size"),
        writes=bool(options.get("probe", True)),
        **counts,
    )


class ServeOptions(SourceOptions, total=False):
    """The options of `serve` that decide what is served; see `Options` and `MergeOptions`.

    Attributes:
        memory_budget: What the buffers of all clients may take together; 96 MB by default.
    """

    config: PathLike | None
    tokenizer: PathLike | None
    generation_config: GenerationChoice
    tokenizer_from: TokenizerOrigin
    dtype: OutputDType | DTypeLike
    also: Sequence[PathLike]
    like: PathLike | None
    max_shard_size: int | str
    allow_code: bool
    adapters: Sequence[str | tuple[str, float]]
    further: Sequence[PathLike | tuple[PathLike, float]]
    adapter_config: PathLike | None
    overrides: Mapping[str, Any]
    allow_untrained: bool
    allow_other_base: bool
    match_peft: bool
    qlora_base: str | None
    double_quant: bool | None


@check_arguments
def serve(
    src: PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str | None = None,
    auth: bool | tuple[str, str] = True,
    follow: bool = False,
    listener: ServeListener | None = None,
    **options: Unpack[ServeOptions],
) -> Serving:
    """Serves the model of a checkpoint as objects of S3, without writing it.

    The objects are the files that `consolidate` writes, or `merge_adapter` where `src` is an
    adapter or holds one. They are made when they are read, and only proven bytes are sent.

    Args:
        src: Any path in or above a checkpoint, or an adapter.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        name: The prefix of all keys; by default the name of `src`.
        auth: The access key and the secret key that requests are signed with; True makes random
            ones. False takes requests without a signature, at an address of this machine only.
        follow: Whether `src` is a run whose newest step is served, and each newer one later.
        listener: Receives events, from several threads.
        **options: See `ServeOptions`.

    Returns:
        The server, which runs until it is closed; use it as a context manager. Its `environment`
        has the variables by which clients of S3 find it.

    Raises:
        InputError: If the source is damaged or incomplete.
        RefusedError: If the request cannot be met, or the extra `serve` is not installed.
        OutputError: If the port is taken.
    """
    from ckptkit.serving.plans import ServePlan, refuse_missing_libraries

    refuse_missing_libraries()
    from ckptkit.serving.serving import Serving, choose_keys

    keys = choose_keys(host, auth)
    plan = ServePlan.from_options(resolve_places(src, None, options))
    return Serving(plan, listener, host=host, port=port, keys=keys, name=name, follow=follow)
