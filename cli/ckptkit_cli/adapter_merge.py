"""`ckptkit adapter merge`: adapters and a base become one model."""

from __future__ import annotations

from ckptkit_cli import _options as options
from ckptkit_cli import _storage_options as storage
from ckptkit_cli._failures import told
from ckptkit_cli._job_options import Events
from ckptkit_cli._known_adapter import known_of_adapter
from ckptkit_cli._output import Output


def merge(
    src: options.AdapterSource,
    out: options.Destination,
    base: options.MergeBase = None,
    adapter: options.MergedAdapters = None,
    also_adapters: options.FurtherAdapters = None,
    adapter_config: options.AdapterConfig = None,
    lora_alpha: options.LoraAlpha = None,
    use_rslora: options.UseRslora = None,
    fan_in_fan_out: options.FanInFanOut = None,
    token_indices: options.TokenIndices = None,
    match_peft: options.MatchPeft = False,
    qlora_base: options.QloraBase = None,
    double_quant: options.DoubleQuant = None,
    dtype: options.MergeDType = "keep",
    allow_untrained: options.AllowUntrained = False,
    allow_other_base: options.AllowOtherBase = False,
    names: options.ComparedNames = "auto",
    report: options.MergeReport = False,
    select: options.Selection = None,
    also: options.Also = None,
    max_shard_size: options.MaxShardSize = "5GB",
    allow_code: options.AllowCode = False,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    memory_budget: options.MemoryBudget = "64MB",
    memory_limit: options.MemoryLimit = None,
    workers: options.Workers = None,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Merge LoRA adapters into their base model.

    Writes a model folder that loads without PEFT, weight by weight: the model is never in memory.
    Each tensor of the adapters is used exactly once, and each of the base is written exactly once.
    OUT appears when it is complete and durable, or not at all.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = locals()
    with told(output):
        from ckptkit_cli._merging import Merging

        known = known_of_adapter(lora_alpha, use_rslora, fan_in_fan_out, token_indices)
        job = Merging.of(storage.located(given), known)
        (job.show_plan if dry_run else job.run)(output)
