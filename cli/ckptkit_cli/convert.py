"""`ckptkit convert`: a model in another layout."""

from __future__ import annotations

from typing import cast

from ckptkit.planning.requests import Layout
from ckptkit_cli import _job_options as job_options
from ckptkit_cli import _machine_options as machines
from ckptkit_cli import _options as options
from ckptkit_cli import _part_options as parts
from ckptkit_cli import _storage_options as storage
from ckptkit_cli._conversion import run_command


def convert(
    src: options.Source,
    out: options.Destination,
    to: options.To,
    select: options.Selection = None,
    dtype: options.DType = "keep",
    keep_dtype: options.KeepDType = None,
    names: options.Names = "auto",
    strip_prefix: parts.StripPrefix = None,
    base: options.Base = None,
    also: options.Also = None,
    like: options.Like = None,
    vocab_size: options.VocabSize = None,
    max_shard_size: options.MaxShardSize = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    optimizer: parts.Optimizer = False,
    allow_code: options.AllowCode = False,
    model_config: parts.ModelConfig = None,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    resume: job_options.Resume = False,
    delete_source: job_options.DeleteSource = False,
    if_exists: job_options.IfExists = "error",
    memory_budget: options.MemoryBudget = "64MB",
    memory_limit: options.MemoryLimit = None,
    workers: options.Workers = None,
    bandwidth: machines.Bandwidth = None,
    engine: machines.EngineName = "local",
    slice_: machines.Slice = None,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: job_options.Events = False,
) -> None:
    """Write a model in another layout.

    'hf' is a folder that Transformers loads, 'torch' a pytorch_model.bin, and 'dcp' a sharded
    checkpoint that FSDP training starts from. Checks and options are those of consolidate.
    """
    run_command("convert", cast(Layout, to), locals())
