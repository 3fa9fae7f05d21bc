"""`ckptkit adapter extract`: from a checkpoint to a folder that PEFT loads."""

from __future__ import annotations

from ckptkit_cli import _options as options
from ckptkit_cli import _storage_options as storage
from ckptkit_cli._failures import told
from ckptkit_cli._job_options import Events
from ckptkit_cli._known_adapter import known_of_adapter
from ckptkit_cli._output import Output


def extract(
    src: options.Source,
    out: options.Destination,
    adapter: options.Adapter = None,
    adapter_config: options.AdapterConfig = None,
    lora_alpha: options.LoraAlpha = None,
    use_rslora: options.UseRslora = None,
    fan_in_fan_out: options.FanInFanOut = None,
    token_indices: options.TokenIndices = None,
    allow_untrained: options.AllowUntrained = False,
    report: options.Report = False,
    select: options.Selection = None,
    also: options.Also = None,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: Events = False,
) -> None:
    """Take a LoRA adapter out of a checkpoint.

    Writes adapter_model.safetensors and adapter_config.json, which PEFT loads. Only the bytes of
    the adapter are read, and each of its tensors is accounted for. OUT appears when it is complete
    and durable, or not at all.
    """
    output = Output(as_json=as_json, quiet=quiet, events=events)
    given = locals()
    with told(output):
        from ckptkit.pipeline.adapters.sources import AdapterRequest
        from ckptkit_cli._extraction import Extraction

        places = storage.located(given)
        request = AdapterRequest(
            adapter=adapter,
            config=places["adapter_config"],
            overrides=known_of_adapter(lora_alpha, use_rslora, fan_in_fan_out, token_indices),
            select=select,
            also=places["also"],
            allow_untrained=allow_untrained,
        )
        job = Extraction(places["src"], places["out"], request, overwrite=overwrite, report=report)
        (job.show_plan if dry_run else job.run)(output)
