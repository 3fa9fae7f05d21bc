"""`ckptkit watch`: a sidecar that pushes each committed step of a run to the Hub."""

from __future__ import annotations

from ckptkit_cli import _hub_options as hub_options
from ckptkit_cli import _options as options
from ckptkit_cli import _part_options as parts
from ckptkit_cli import _run_options as run_options
from ckptkit_cli import _watch_options as watch_options
from ckptkit_cli._failures import told
from ckptkit_cli._output import Output
from ckptkit_cli._storage_options import SrcOption


def watch(
    run: run_options.Run,
    push: watch_options.Repository,
    every: watch_options.Every = None,
    best: watch_options.Best = None,
    best_mode: run_options.BestModeChoice = "min",
    last_only: watch_options.LastOnly = False,
    once: watch_options.Once = False,
    until_eof: watch_options.UntilEof = False,
    at_end: watch_options.AtEnd = False,
    wait_for_lock: watch_options.WaitForLock = False,
    private: hub_options.Private = None,
    revision: hub_options.Revision = None,
    tag_prefix: watch_options.TagPrefix = "step-",
    make: watch_options.As = "auto",
    whole_step: watch_options.WholeStep = None,
    include: watch_options.Include = None,
    adapter: options.Adapter = None,
    adapter_config: options.AdapterConfig = None,
    dtype: options.DType = "keep",
    base: options.Base = None,
    names: options.Names = "auto",
    strip_prefix: parts.StripPrefix = None,
    weights_only: watch_options.WeightsOnly = False,
    max_shard_size: options.MaxShardSize = None,
    keep_last: run_options.KeepLast = None,
    keep_every: run_options.KeepEvery = None,
    keep_best: run_options.KeepBest = None,
    state: watch_options.State = None,
    interval: watch_options.Interval = None,
    src_option: SrcOption = None,
    src_options_from: watch_options.SourceOptionsFrom = None,
    workers: options.Workers = None,
    memory_budget: options.MemoryBudget = "64MB",
    metrics_port: watch_options.MetricsPort = None,
    metrics_host: watch_options.MetricsHost = "127.0.0.1",
    as_json: watch_options.JsonLines = False,
    quiet: options.Quiet = False,
) -> None:
    """Push each step of a run to the Hub as it is committed.

    Each step becomes a verified model folder or adapter, and one commit with one tag; a kill
    neither loses nor repeats it. With --keep-last and others, prune then removes steps of RUN.
    """
    given = dict(locals())
    output = Output(quiet=quiet or as_json)
    with told(output):
        from ckptkit_cli._watching import watch_run

        watch_run(output, given)
