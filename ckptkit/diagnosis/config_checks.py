"""Configurations of accelerate, DeepSpeed and the Trainer: what of them hurts a save.

Source: accelerate 1.15, `commands/config/config_args.py`, `utils/launch.py` and
`utils/fsdp_utils.py`; transformers 5.23, `training_args.py`; DeepSpeed 0.19, `runtime/constants.py`
and `runtime/zero/config.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptkit.core.errors import InputError, UnsupportedError, UsageError
from ckptkit.core.text import a_kind, quote, size_text
from ckptkit.diagnosis.config_files import load_config
from ckptkit.diagnosis.findings import Finding, SaveDemand, Severity
from ckptkit.hub.client import is_repo_id
from ckptkit.storage.locations import place_of

Strategy = Literal["", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "other"]
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_MANY_RANKS = 8
_TRUE = frozenset({"1", "on", "true", "y", "yes"})
_ACCELERATE = frozenset({"compute_environment", "distributed_type"})
_DEEPSPEED = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"})
_ALSO_DEEPSPEED = frozenset(
    {
        *("activation_checkpointing", "aio", "bf16", "checkpoint", "communication_data_type"),
        *("fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler"),
        *("steps_per_print", "tensor_parallel", "wall_clock_breakdown"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    }
)
_TRAINER = frozenset({"output_dir", "per_device_train_batch_size", "save_strategy", "save_steps"})
_TOKENS = ("hub_token", "push_to_hub_token", "token")
_OUTPUT_DIR, _SAVE_STEPS = "trainer_output", 500  # of the Trainer, where no file says them
_8_BIT = re.compile(r"8bit|8_bit")
_FLAGS = _TRUE | {"0", "off", "false", "n", "no"}
_STATE_DICTS = frozenset({"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"})
_ZERO_STAGES = frozenset("0123")
_KINDS = frozenset(
    {
        *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON"),
        *("MULTI_NPU", "MULTI_SDAA", "MULTI_XPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "TPU", "XLA"),
    }
)
# Values that launchers take of the settings that are read; a whole number where it is None.
_ACCELERATE_VALUES = {
    "distributed_type": _KINDS,
    "num_processes": None,
    "num_machines": None,
    "fsdp_config": {
        "fsdp_version": frozenset("12"),
        "fsdp_state_dict_type": _STATE_DICTS,
        "fsdp_cpu_ram_efficient_loading": _FLAGS,
        "fsdp_sync_module_states": _FLAGS,
    },
    "deepspeed_config": {"zero_stage": _ZERO_STAGES, "zero3_save_16bit_model": _FLAGS},
}
_DEEPSPEED_VALUES = {
    "zero_optimization": {
        "stage": _ZERO_STAGES,
        "stage3_gather_16bit_weights_on_model_save": _FLAGS,
        "round_robin_gradients": _FLAGS,
    },
    "checkpoint": {"use_node_local_storage": _FLAGS},
}
_TRAINER_VALUES = {
    "save_strategy": frozenset({"best", "epoch", "no", "steps"}),
    "save_total_limit": None,
    "max_steps": None,
    "save_only_model": _FLAGS,
    "push_to_hub": _FLAGS,
    "fsdp_config": {
        f"{prefix}{name}": values
        for prefix in ("", "fsdp_")
        for name, values in (("version", frozenset("12")), ("state_dict_type", _STATE_DICTS))
    },
}


class TrainingSetup(Struct, frozen=True):
    """What configurations say of a job; None or empty where they say nothing.

    Attributes:
        where: The files, for messages.
        strategy: How the state is sharded; `other` for DDP, or one process.
        state_dict: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT of FSDP.
        state_dict_default: Whether that is a default, and no file says so.
        ranks: Of the job.
        nodes: Of the job.
        efficient_loading: Whether one rank alone loads the weights (`cpu_ram_efficient_loading`).
        sync_module_states: The setting of FSDP1.
        fp8_backend: Of accelerate.
        gathers_weights: Whether ZeRO-3 gathers the weights on one rank for a save.
        node_local: Whether DeepSpeed saves each node's part on its own disk.
        optimizer: The name of the Trainer's.
        trains_adapter: Whether an adapter is trained.
        keep_last: How many checkpoints stay.
        only_model: Whether the Trainer saves no optimizer.
        output_dir: Of the Trainer.
        signal_saves: Whether the Trainer saves at SIGTERM by itself (`enable_jit_checkpoint`).
        has_token: Whether a file has a token in it.
        pushes_to: The repository that the Trainer pushes to; empty if it does not push.
        max_steps: Of the Trainer.
        save_every: Steps of the Trainer from one save to the next; 0 if it does not count steps.
        round_robin: Whether ZeRO deals out gradients (`round_robin_gradients`).
        refused: Settings with values that the launcher refuses: what was found, and expected.
    """

    where: str = ""
    strategy: Strategy = ""
    state_dict: str = ""
    state_dict_default: bool = False
    ranks: int | None = None
    nodes: int | None = None
    efficient_loading: bool | None = None
    sync_module_states: bool | None = None
    fp8_backend: str = ""
    gathers_weights: bool | None = None
    node_local: bool = False
    optimizer: str = ""
    trains_adapter: bool | None = None
    keep_last: int | None = None
    only_model: bool = False
    output_dir: str = ""
    signal_saves: bool = False
    has_token: bool = False
    pushes_to: str = ""
    max_steps: int | None = None
    save_every: int | None = None
    round_robin: bool = False
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def is_fsdp(self) -> bool:
        return self.strategy in {"fsdp1", "fsdp2"}

    @property
    def state_bytes_per_parameter(self) -> int:
        """Bytes of a step for each parameter: weights in float32, and two moments of Adam."""
        moments = 2 if _8_BIT.search(self.optimizer) else 8
        return 4 if self.only_model else 4 + moments

    def joined(self, other: TrainingSetup) -> TrainingSetup:
        """Returns what both say; the other one wins."""
        said = {
            name: value
            for name, value in asdict(other).items()
            if value != getattr(TrainingSetup(), name)
        }
        said["where"] = " and ".join(filter(None, (self.where, other.where)))
        said["refused"] = self.refused + other.refused
        return replace(self, **said)


def read_setup(path: Path) -> TrainingSetup:
    """Reads a configuration file.

    Raises:
        InputError: If it cannot be read.
        FormatError: If it is neither JSON nor YAML.
        UnsupportedError: If it is a configuration of something else.
    """
    document = load_config(path)
    names = document.keys()
    if names & _ACCELERATE:
        return _of_accelerate(str(path), document)
    if names & _DEEPSPEED:
        return _of_deepspeed(str(path), document)
    if names & _TRAINER:
        return _of_trainer(str(path), document)
    listed = ", ".join(sorted(str(name)[:40] for name in names)[:5])
    raise UnsupportedError(
        "expected a configuration of accelerate, of DeepSpeed, or arguments of the Trainer;"
        f" found the names {listed or 'of nothing'}",
        where=str(path),
        hint="pass the file that `accelerate launch --config_file`, `deepspeed_config` or"
        " HfArgumentParser takes",
    )


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}


def _word(value: object) -> str:
    """Returns a scalar as text; a table, which may stand for gigabytes of text, as none."""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def _flag(value: object) -> bool | None:
    """Reads a yes or no as accelerate writes it: YAML's, or a word."""
    return None if value is None else _word(value).lower() in _TRUE


def _number(value: object) -> int | None:
    text = _word(value)
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) else None  # noqa: PLR2004


def _find_refused(
    document: Mapping[str, Any], settings: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields settings whose values the launcher does not take, and what it takes."""
    for name, values in settings.items():
        value = document.get(name)
        value = "no" if value is False else value  # as YAML reads an unquoted NO
        if value is None or value == "auto":
            continue
        found = f"{above}{name}: {_word(value)[:40] or a_kind(value)}"
        if isinstance(values, dict):
            if isinstance(value, Mapping):
                yield from _find_refused(value, values, f"{above}{name}.")
            elif not isinstance(value, str):  # or the name of a file
                yield found, "a table of settings"
        elif values is None:
            if not re.fullmatch(r"-?[0-9]+(\.0)?", _word(value)):
                yield found, "a whole number"
        elif _word(value).lower() not in map(str.lower, values):
            yield (
                found,
                "true or false" if values is _FLAGS else f"one of {', '.join(sorted(values))}",
            )


def _of_accelerate(where: str, document: Mapping[str, Any]) -> TrainingSetup:
    kind = _word(document.get("distributed_type")).upper()
    fsdp = _table(document, "fsdp_config")
    zero = _table(document, "deepspeed_config")
    strategy: Strategy = "other"
    gathers = None
    if kind == "FSDP":
        strategy = "fsdp2" if _word(fsdp.get("fsdp_version")) == "2" else "fsdp1"
    elif kind == "DEEPSPEED":
        strategy = _zero(zero.get("zero_stage"))
        gathers = _flag(zero.get("zero3_save_16bit_model"))
    stated = _word(fsdp.get("fsdp_state_dict_type")).upper()
    default = "" if strategy not in {"fsdp1", "fsdp2"} else "FULL_STATE_DICT"
    default = "SHARDED_STATE_DICT" if strategy == "fsdp2" else default
    setup = TrainingSetup(
        where=where,
        strategy=strategy,
        state_dict=stated or default,
        state_dict_default=bool(default) and not stated,
        ranks=_number(document.get("num_processes")),
        nodes=_number(document.get("num_machines")),
        efficient_loading=_flag(fsdp.get("fsdp_cpu_ram_efficient_loading")),
        sync_module_states=_flag(fsdp.get("fsdp_sync_module_states")),
        fp8_backend=_word(_table(document, "fp8_config").get("backend")).upper(),
        refused=tuple(_find_refused(document, _ACCELERATE_VALUES)),
        gathers_weights=gathers if strategy == "zero3" else None,
    )
    further = zero.get("deepspeed_config_file")
    if isinstance(further, str) and further:
        return _with_deepspeed(setup, "deepspeed_config.deepspeed_config_file", further)
    return setup


def _with_deepspeed(setup: TrainingSetup, setting: str, further: str) -> TrainingSetup:
    """Adds what the file of DeepSpeed says that a setting names; another file is refused."""
    path = Path(setup.where).parent / further
    path = path if os.path.exists(path) else Path(further)  # noqa: PTH110  no name is too long
    try:
        document = load_config(path)
    except InputError as error:
        problem = error.message
    else:
        names = document.keys()
        is_another = bool(names & (_ACCELERATE | _TRAINER))
        if names & _DEEPSPEED or (names & _ALSO_DEEPSPEED and not is_another):
            return setup.joined(_of_deepspeed(str(path), document))
        problem = "is no configuration of DeepSpeed"
    found = f"{setting}: {quote(further)}, which {problem}", "a configuration of DeepSpeed"
    return replace(setup, refused=(*setup.refused, found))


def _zero(stage: object) -> Strategy:
    stages: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}
    return stages.get(_word(stage), "other")


def _of_deepspeed(where: str, document: Mapping[str, Any]) -> TrainingSetup:
    zero = _table(document, "zero_optimization")
    strategy = _zero(zero.get("stage"))
    gathers = zero.get("stage3_gather_16bit_weights_on_model_save")
    gathers = zero.get("stage3_gather_fp16_weights_on_model_save") if gathers is None else gathers
    return TrainingSetup(
        where=where,
        strategy=strategy,
        gathers_weights=bool(_flag(gathers)) if strategy == "zero3" else None,
        node_local=bool(_flag(_table(document, "checkpoint").get("use_node_local_storage"))),
        optimizer=_word(_table(document, "optimizer").get("type")).lower(),
        round_robin=bool(_flag(zero.get("round_robin_gradients"))),
        refused=tuple(_find_refused(document, _DEEPSPEED_VALUES)),
    )


def _of_trainer(where: str, document: Mapping[str, Any]) -> TrainingSetup:
    impossible = _find_impossible(document)
    fsdp = _table(document, "fsdp_config")
    uses_fsdp = bool(document.get("fsdp")) or bool(fsdp)
    setting = {str(name).removeprefix("fsdp_"): value for name, value in fsdp.items()}
    stated = _word(setting.get("state_dict_type")).upper()
    is_first = _word(setting.get("version")) == "1"
    setup = TrainingSetup(
        where=where,
        strategy=("fsdp1" if is_first else "fsdp2") if uses_fsdp else "",
        state_dict=(stated or "FULL_STATE_DICT") if uses_fsdp else "",
        state_dict_default=uses_fsdp and not stated,
        efficient_loading=_flag(setting.get("cpu_ram_efficient_loading")),
        sync_module_states=_flag(setting.get("sync_module_states")),
        optimizer=_word(document.get("optim")).lower(),
        trains_adapter=_flag(document.get("use_peft")),
        keep_last=_number(document.get("save_total_limit")),
        only_model=bool(_flag(document.get("save_only_model"))),
        output_dir="" if "output_dir" in impossible else _word(document.get("output_dir")),
        signal_saves=bool(_flag(document.get("enable_jit_checkpoint"))),
        has_token=any(isinstance(document.get(name), str) for name in _TOKENS),
        pushes_to="" if impossible else _pushes_to(document),
        max_steps=_number(document.get("max_steps")),
        save_every=_save_every(document),
        refused=(*_find_refused(document, _TRAINER_VALUES), *impossible.values()),
    )
    further = document.get("deepspeed")
    if isinstance(further, Mapping):
        return setup.joined(_of_deepspeed("", further))
    if isinstance(further, str) and further:
        return _with_deepspeed(setup, "deepspeed", further)
    return setup


def _find_impossible(document: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Finds names that no folder and no repository can have, by their settings."""
    impossible = {}
    folder = _word(document.get("output_dir")) or _OUTPUT_DIR
    try:
        place_of(folder)
    except UsageError:
        impossible["output_dir"] = f"output_dir: {quote(folder)}", "a path or a URL"
    else:
        repo_id = _pushes_to(document)
        if repo_id and not is_repo_id(repo_id):
            expected = "OWNER/NAME, with letters, digits, '-', '_' and '.'"
            impossible["hub_model_id"] = f"hub_model_id: {quote(repo_id)}", expected
    return impossible


def _pushes_to(document: Mapping[str, Any]) -> str:
    """Returns the repository of the Trainer: the one that is named, or that of its directory."""
    if not _flag(document.get("push_to_hub")):
        return ""
    named = _word(document.get("hub_model_id"))
    return named or Path(_word(document.get("output_dir")) or _OUTPUT_DIR).absolute().name


def _save_every(document: Mapping[str, Any]) -> int | None:
    """Returns the steps between saves; None if they are a share of an unknown number of steps."""
    if _word(document.get("save_strategy", "steps")).lower() != "steps":
        return 0
    every, most = document.get("save_steps", _SAVE_STEPS), _number(document.get("max_steps"))
    try:
        share = float(_word(every))
    except ValueError:
        return None
    if not 0 < share < 1:
        return _number(int(share)) if share.is_integer() else None
    return None if most is None else ceil(most * share)


def judge_setup(
    setup: TrainingSetup, demand: SaveDemand, memory_bytes: int | None
) -> list[Finding]:
    """Judges what configurations say.

    Args:
        setup: What they say.
        demand: What a step needs.
        memory_bytes: That one node has available.
    """
    if not setup.where:
        return []
    found = [
        *_refused(setup),
        *_state_dicts(setup, demand, memory_bytes),
        *_gathered_weights(setup),
        *_optimizers(setup),
        *_trainer(setup),
    ]
    return found or [Finding("configuration", "ok", setup.where, "no setting that hurts")]


def _finding(setup: TrainingSetup, name: str, severity: Severity, *texts: str) -> Finding:
    return Finding(name, severity, setup.where, *texts)


def _refused(setup: TrainingSetup) -> Iterator[Finding]:
    """Yields what is refused at the launch."""
    for found, expected in setup.refused:
        advice = "correct it: the launcher refuses this value, or uses another one"
        yield _finding(setup, "setting", "error", found, expected, advice)
    if setup.is_fsdp and setup.efficient_loading and setup.sync_module_states is False:
        yield _finding(
            setup,
            "efficient-loading",
            "error",
            "cpu_ram_efficient_loading is true and sync_module_states is false",
            "both true: the weights of rank 0 are sent to the others",
            "set sync_module_states to true; accelerate launch refuses this",
        )
    if setup.strategy == "fsdp2" and setup.state_dict == "LOCAL_STATE_DICT":
        yield _finding(
            setup,
            "state-dict-type",
            "error",
            "LOCAL_STATE_DICT with FSDP2",
            "SHARDED_STATE_DICT",
            "set fsdp_state_dict_type to SHARDED_STATE_DICT; accelerate refuses this",
        )
    if setup.efficient_loading and setup.fp8_backend in {"AO", "TORCHAO"}:
        yield _finding(
            setup,
            "efficient-loading",
            "error",
            "cpu_ram_efficient_loading with torchao's fp8",
            "one of the two",
            "set cpu_ram_efficient_loading to false; accelerate refuses this",
        )


def _state_dicts(
    setup: TrainingSetup, demand: SaveDemand, memory_bytes: int | None
) -> Iterator[Finding]:
    if setup.state_dict == "LOCAL_STATE_DICT" and setup.strategy == "fsdp1":
        yield _finding(
            setup,
            "state-dict-type",
            "warning",
            "LOCAL_STATE_DICT: a checkpoint fits the same number of ranks only",
            "SHARDED_STATE_DICT",
            "set fsdp_state_dict_type to SHARDED_STATE_DICT; ckptkit reads the files there are"
            " with --model-config",
        )
    if setup.state_dict != "FULL_STATE_DICT" or not setup.is_fsdp or setup.ranks == 1:
        return
    # Arguments of the Trainer do not say how many ranks there are.
    ranks = setup.ranks or 0
    default = ", the default" if setup.state_dict_default else ""
    many = f" of {ranks} ranks" if ranks > 1 else ""
    found = f"FULL_STATE_DICT{default}: each save gathers the whole state{many} on rank 0"
    severity: Severity = "warning"
    if demand.step_bytes is not None:
        found += f", {size_text(demand.step_bytes)}"
        is_too_large = memory_bytes is not None and demand.step_bytes > memory_bytes
        severity = "error" if is_too_large else severity
        found += f", where {size_text(memory_bytes or 0)} are available" if is_too_large else ""
    why = "the other ranks wait, and NCCL ends the job after 10 minutes (30 with the Trainer)"
    why = why if ranks > _MANY_RANKS else "all ranks wait until one has written everything"
    yield _finding(
        setup,
        "state-dict-type",
        severity,
        found,
        f"SHARDED_STATE_DICT: {why}",
        "set fsdp_state_dict_type (state_dict_type in fsdp_config of the Trainer) to"
        " SHARDED_STATE_DICT, and make the model with `ckptkit consolidate RUN OUT`"
        + ("" if ranks else "; pass --ranks, which no file says"),
    )


def _gathered_weights(setup: TrainingSetup) -> Iterator[Finding]:
    if setup.gathers_weights:
        yield _finding(
            setup,
            "gathered-weights",
            "warning",
            "stage3_gather_16bit_weights_on_model_save (zero3_save_16bit_model) is true: each save"
            " of the model gathers all weights on rank 0",
            "false",
            "set it to false, and make the model with `ckptkit consolidate RUN OUT`, which reads"
            " the shards",
        )
    if setup.gathers_weights is False:
        yield _finding(
            setup,
            "gathered-weights",
            "ok",
            "stage3_gather_16bit_weights_on_model_save is false: save_model writes shards",
            "",
            "make the model with `ckptkit consolidate RUN OUT`; accelerator.get_state_dict raises",
        )
    if setup.node_local:
        yield _finding(
            setup,
            "node-local-storage",
            "warning",
            "use_node_local_storage is true: each node has only its own ranks' files",
            "a shared file system",
            "save to shared storage, or read all copies with"
            " `ckptkit consolidate RUN OUT --also COPY`",
        )


def _optimizers(setup: TrainingSetup) -> Iterator[Finding]:
    is_8_bit = bool(_8_BIT.search(setup.optimizer))
    if "paged" in setup.optimizer:
        size = "2" if is_8_bit else "8"
        yield _finding(
            setup,
            "paged-optimizer",
            "warning",
            f"{setup.optimizer}: its state is in unified memory, which moves to the host when the"
            " GPU is full",
            f"{size} bytes of host memory for each parameter, in addition to the copy of a save",
            "count them in the memory of the job; a save brings all pages to the host once",
        )
    if is_8_bit and (setup.is_fsdp or not setup.strategy):
        yield _finding(
            setup,
            "8-bit-optimizer",
            "warning",
            f"{setup.optimizer}: its state is quantized in blocks of each rank's part",
            "the same number of ranks in every job, if FSDP shards the model",
            'keep the number of ranks, or pass unfit_optimizer="reset" to the Checkpointer, which'
            " starts the optimizer from scratch",
        )


def _trainer(setup: TrainingSetup) -> Iterator[Finding]:
    if setup.only_model:
        yield _finding(
            setup,
            "save-only-model",
            "warning",
            "save_only_model is true: steps have no optimizer, and training cannot go on from them",
            "false",
            "set it to false if the job may be interrupted",
        )
    if setup.signal_saves:
        yield _finding(
            setup,
            "jit-checkpoint",
            "warning",
            "enable_jit_checkpoint is true: ranks do not agree on the step that they save",
            "one step on all ranks",
            "call `install(trainer)` of ckptkit.integrations.transformers, with which they agree,"
            " or set it to false",
        )
    if setup.has_token:
        yield _finding(
            setup,
            "token-in-file",
            "warning",
            "a token of the Hub is in the file; the Trainer also stores it in training_args.bin",
            "no secret in files",
            "remove it, and set HF_TOKEN or run `hf auth login`; replace the token if the file or"
            " a training_args.bin was published",
        )


def join_setups(setups: Sequence[TrainingSetup]) -> TrainingSetup:
    """Returns what several configurations say together, the last one first."""
    whole = TrainingSetup()
    for setup in setups:
        whole = whole.joined(setup)
    return whole
