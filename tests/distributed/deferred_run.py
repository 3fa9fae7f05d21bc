"""Runs under torchrun: models of `defer_weights` beside those that are loaded as usual.

Usage: deferred_run.py FOLDER KIND CHECK… Everything that communicates raises while a model is
filled.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)

from ckptkit.core.errors import CkptkitError, LoadError, SourceChangedError, UnsupportedError
from ckptkit.integrations.accelerate import install as install_accelerator
from ckptkit.integrations.transformers import defer_weights, install
from ckptkit.training import load_into
from ckptkit.training.load.load_into import ModelLoad
from tests.distributed.cases import end, nobody_talks
from tests.distributed.pretending.sitecustomize import pretend
from tests.distributed.tiny_trainers import (
    WORDS,
    Tensors,
    expect_equal,
    expect_error,
    local_part,
    rows,
    run_checks,
    trained,
    trainer,
)

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SHORT: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
STARTED = {"fills": 0}


def base(folder: Path, kind: str = "plain") -> Path:
    """Returns the folder of a saved model, which rank 0 writes."""
    made = folder / f"base-{kind}"
    if dist.get_rank() == 0 and not made.exists():
        torch.manual_seed(3)
        if kind == "experts":
            experts = MixtralConfig(**SIZES, num_local_experts=4)
            MixtralForCausalLM(experts).save_pretrained(made)
        else:
            config = LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")
            LlamaForCausalLM(config).save_pretrained(made, max_shard_size="20KB")
    dist.barrier()
    return made


def load(source: Path, *, deferred: bool, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    torch.manual_seed(options.pop("seed", 11))
    with defer_weights() if deferred else nullcontext():
        return auto.from_pretrained(source, **options)


class Looking(TrainerCallback):  # type: ignore[misc]
    """Keeps what a model is before the first step."""

    def __init__(self) -> None:
        self.found: Tensors = {}

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.found[f"first/{name}"] = local_part(tensor)


def compare(kind: str, source: Path, folder: Path, **options: Any) -> None:
    """Trains by the stock Trainer, and with deferred weights."""
    loads = {key: options.pop(key) for key in ("dtype",) if key in options}
    found = []
    for deferred in (False, True):
        is_efficient = options.get("fsdp_config", {}).get("cpu_ram_efficient_loading", False)
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(is_efficient).lower()
        model = load(source, deferred=deferred, **loads)
        looking = Looking()
        made = trainer(kind, folder / "out", model=model, callbacks=[looking], **SHORT | options)
        before, plugin = STARTED["fills"], made.accelerator.state.fsdp_plugin
        if deferred:
            install(made)
            assert all(tensor.is_meta for tensor in model.parameters())
            assert not any(buffer.is_meta for buffer in model.buffers())
        found.append(trained(made) | looking.found)
        assert STARTED["fills"] - before == int(deferred)
        assert "prepare" not in vars(made.accelerator)
        assert plugin.cpu_ram_efficient_loading == is_efficient
    expect_equal(found[1], found[0], least=11)


def check_models(kind: str, folder: Path) -> None:
    """Weights are those of the stock way, and so is what is trained from them."""
    plain = base(folder)
    compare(kind, plain, folder)
    compare(kind, base(folder, "tied"), folder)
    compare(kind, plain, folder, dtype=torch.bfloat16, bf16=True)
    wrapped = {"transformer_layer_cls_to_wrap": ["MixtralDecoderLayer"]}
    compare(kind, base(folder, "experts"), folder, fsdp_config=wrapped)
    if kind == "fsdp1":
        compare(kind, plain, folder, optim="adamw_torch_fused")
    else:
        compare(kind, plain, folder, dtype=torch.bfloat16)
        # With FSDP1 it needs an accelerator.
        efficient = {"cpu_ram_efficient_loading": True}
        compare(kind, plain, folder, fsdp_config=efficient)


def check_heads(kind: str, folder: Path) -> None:
    """A new head is that of the stock way, and that of rank 0 where ranks drew others."""
    source = base(folder)

    def make(deferred: bool, **options: Any) -> Any:
        auto = AutoModelForSequenceClassification
        return load(source, deferred=deferred, auto=auto, num_labels=3, **options)

    whole = make(False)
    own = make(True)
    assert not own.score.weight.is_meta
    assert torch.equal(whole.score.weight, own.score.weight)
    assert own.model.embed_tokens.weight.is_meta
    truth = prepared(kind, whole)
    expect_equal(prepared(kind, own), truth, least=11)
    other = make(True, seed=11 + dist.get_rank())
    expect_equal(prepared(kind, other), truth)
    sizes = {"num_labels": 3, "ignore_mismatched_sizes": True, "vocab_size": WORDS + 8}
    larger = [load(source, deferred=d, **sizes) for d in (False, True)]
    assert not larger[1].lm_head.weight.is_meta
    truth, ours = (prepared(kind, model) for model in larger)
    expect_equal(ours, truth)


def prepared(kind: str, model: nn.Module) -> Tensors:
    """Returns this rank's part of a model that accelerate has prepared, with `install`."""
    accelerator, made, _ = prepare(kind, model)
    found = {name: local_part(tensor) for name, tensor in made.named_parameters()}
    accelerator.free_memory()
    return found


def prepare(kind: str, model: nn.Module, **settings: Any) -> tuple[Accelerator, Any, Any]:
    version = int(kind[-1])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        **({"use_orig_params": settings.pop("orig", True)} if version == 1 else {}),
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **settings)
    install_accelerator(accelerator)
    if version == 1:
        made = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(made.parameters(), 1e-2))
    else:
        made, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    return accelerator, made, optimizer


def check_accelerate(kind: str, folder: Path) -> None:
    """The optimizer has the parameters of the model, in its order."""
    source = base(folder)
    found = []
    for deferred in (False, True):
        accelerator, made, optimizer = prepare(kind, load(source, deferred=deferred))
        own = {id(parameter) for parameter in made.parameters()}
        assert own == {id(p) for group in optimizer.param_groups for p in group["params"]}
        for step in range(2):
            torch.manual_seed(step)
            ids = torch.randint(3, WORDS, (2, 8))
            accelerator.backward(made(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: local_part(tensor) for name, tensor in made.named_parameters()})
        accelerator.free_memory()
    expect_equal(found[1], found[0], least=4)
    if kind == "fsdp1":
        models = [load(source, deferred=deferred) for deferred in (False, True)]
        flat = []
        for model in models:
            accelerator, made, _ = prepare(kind, model, orig=False)
            flat.append({name: local_part(tensor) for name, tensor in made.named_parameters()})
            accelerator.free_memory()
        expect_equal(flat[1], flat[0])


def check_adapters(kind: str, folder: Path) -> None:
    """Adapters begin as without deferring, and so does their base; a step of both is resumed."""
    source, found = base(folder), []
    lora = f"lora{kind[-1]}"
    for deferred in (False, True):
        looking = Looking()
        with defer_weights() if deferred else nullcontext():
            torch.manual_seed(4)
            model = AutoModelForCausalLM.from_pretrained(source)
            options = {"model": model, "callbacks": [looking], "max_steps": 4, "save_steps": 2}
            made = trainer(lora, folder / f"{lora}-{deferred}", **options)
        if deferred:
            install(made)
            assert {name for name, p in made.model.named_parameters() if not p.is_meta} == {
                name for name, _ in made.model.named_parameters() if "lora_" in name
            }
        found.append(trained(made) | looking.found)
    expect_equal(found[1], found[0], least=31)
    with defer_weights():
        model = AutoModelForCausalLM.from_pretrained(source)
        again = trainer(lora, folder / f"{lora}-True", model=model, max_steps=4, save_steps=2)
    install(again)
    last = folder / f"{lora}-True" / "checkpoint-4"
    if dist.get_rank() == 0:
        shutil.rmtree(last)
    dist.barrier()
    resumed, truth = trained(again, True), found[1]
    expect_equal(resumed, {name: truth[name] for name in resumed})


REFUSED: tuple[dict[str, Any], ...] = (
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"use_dora": True},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [1, 2]},
)


def check_methods(kind: str, folder: Path) -> None:
    """Adapters whose values are parameters of their own, and those that need the weights."""
    source = base(folder)
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}
    for config in (LoraConfig(**settings), LoHaConfig(r=4)):
        found = []
        for deferred in (False, True):
            torch.manual_seed(4)
            with defer_weights() if deferred else nullcontext():
                model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), config)
            made = trainer(kind, folder / "out", model=model, **SHORT)
            if deferred:
                install(made)
            found.append(trained(made))
        expect_equal(found[1], found[0], least=11)
    for options in REFUSED:
        with defer_weights():
            model = AutoModelForCausalLM.from_pretrained(source)
            config = LoraConfig(target_modules=["q_proj"], **options)
            add = partial(get_peft_model, model, config)
            expect_error(UnsupportedError, "from weights that are deferred", add)


def check_evaluating(kind: str, folder: Path) -> None:
    """Evaluating before training, which FSDP2 of accelerate needs an optimizer for."""
    source, found = base(folder), list[Any]()
    for deferred in (False, True):
        made = trainer(kind, folder / "out", model=load(source, deferred=deferred), **SHORT)
        if deferred:
            install(made)
        try:
            found += [made.evaluate()["eval_loss"], made.predict(rows()).metrics["test_loss"]]
        except ValueError as error:
            found.append(str(error))
    half = 2 if kind == "fsdp1" else 1
    assert found[:half] == found[half:]
    model: Any = load(source, deferred=True)
    load_into(model, source)  # by hand
    truth = load(source, deferred=False).state_dict()
    expect_equal(model.state_dict(), truth)
    wrap = partial(FullyShardedDataParallel, load(source, deferred=True))
    cpu = torch.device("cpu")
    expect_error(UnsupportedError, "memory on cpu", lambda: wrap(device_id=cpu))


def check_page(kind: str, folder: Path) -> None:
    """The example of the documentation runs."""
    page = (Path(__file__).parents[2] / "docs/reference/loading.md").read_text()
    _, example, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    source, ready = base(folder), folder / "page"
    if dist.get_rank() == 0:
        shutil.copytree(source, ready / "base")
    dist.barrier()
    made = trainer(kind, ready, **SHORT)
    names: dict[str, Any] = {"arguments": made.args, "texts": rows()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ready)
        before = STARTED["fills"]
        exec(example, names)  # noqa: S102  our own page
    assert (STARTED["fills"] - before, names["trainer"].state.global_step) == (1, 2)


def check_resuming(kind: str, folder: Path) -> None:
    """A step is resumed without the base, which is not there any more."""
    source = base(folder)
    out = folder / f"{kind}-resumed"
    made = trainer(kind, out, model=load(source, deferred=True), save_steps=2, max_steps=4)
    install(made)
    truth = trained(made)
    copy = folder / f"copy-{kind}"
    if dist.get_rank() == 0:
        shutil.copytree(source, copy)
        shutil.rmtree(out / "checkpoint-4")
    dist.barrier()
    model = load(copy, deferred=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(copy)
    dist.barrier()
    before = STARTED["fills"]
    again = trainer(kind, out, model=model, save_steps=2, max_steps=4)
    install(again)
    expect_equal(trained(again, True), truth)
    assert STARTED["fills"] == before


def refuses(kind: str, model: Any, folder: Path, error: type[CkptkitError], text: str) -> None:
    made = trainer(kind, folder / "refused", model=model, **SHORT)
    install(made)
    expect_error(error, text, made.train)
    assert "prepare" not in vars(made.accelerator)


def add_words(model: Any) -> None:
    model.get_input_embeddings().weight.data[-4:] = 0.5


def void(_: object) -> None: ...


def merge(model: Any) -> Any:
    with defer_weights():
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    return adapted.merge_and_unload()


CHANGES: tuple[Callable[[Any], Any], ...] = (
    add_words,
    merge,
    lambda model: void(nn.init.normal_(model.lm_head.weight)),
    lambda model: void(model.model.norm.weight.detach().mul_(2)),
    lambda model: model.to(torch.bfloat16),
    lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(torch.empty(WORDS, 24, device="meta"))
    ),
)


def check_refusing(kind: str, folder: Path) -> None:
    """What does not fit is refused on all ranks, before the model is sharded."""
    source = base(folder)
    model = load(source, deferred=True)
    model.resize_token_embeddings(WORDS + 8, mean_resizing=False)
    refuses(kind, model, folder, LoadError, "were changed.*embed_tokens.weight")
    model = get_peft_model(load(source, deferred=True), LoraConfig(target_modules=["q_proj"]))
    refuses(kind, model, folder, LoadError, "lora_A")
    for change in CHANGES:
        model = load(source, deferred=True)
        with torch.no_grad():
            model = change(model) or model
        refuses(kind, model, folder, LoadError, "parameters were changed while their weights")
    copy = folder / f"changed-{kind}-{dist.get_rank()}"
    shutil.copytree(source, copy)
    model = load(copy, deferred=True)
    if dist.get_rank() == 1:
        file = min(copy.glob("*.safetensors"))
        tensors = load_file(file)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    text = "changed after from_pretrained"
    refuses(kind, model, folder, SourceChangedError, text)
    dist.barrier()


def check_leaving(kind: str, folder: Path) -> None:
    """What cannot be deferred is loaded as usual."""
    source = base(folder)
    stock = AutoModelForCausalLM.from_pretrained
    other = folder / f"bin-{kind}"
    two = folder / f"two-{kind}"
    if dist.get_rank() == 0:
        other.mkdir()
        shutil.copy(source / "config.json", other)
        torch.save(stock(source).state_dict(), other / "pytorch_model.bin")
        shutil.copytree(source, two)
        stock(source, dtype=torch.bfloat16).save_pretrained(two, variant="half")
    dist.barrier()
    renamed = {"key_mapping": {"^nothing": "other"}}
    for path, options in (
        (other, {}),
        (two, {"variant": "half"}),
        (source, renamed),
        (source, {"device_map": "cpu"}),
    ):
        model = load(path, deferred=True, **options)
        truth = load(path, deferred=False, **options)
        expect_equal(model.state_dict(), truth.state_dict())
    dist.barrier()
    model = load(source, deferred=dist.get_rank() == 1)
    refuses(kind, model, folder, LoadError, "a rank has no model on the meta device")
    bare = load(source, deferred=False, device_map="meta")
    with suppress(Exception):  # of torch
        prepared(kind, bare)
    assert load(source, deferred=False).lm_head.weight.is_cpu


def silence_fills() -> None:
    """Makes everything that communicates raise while a model is filled, and counts fills."""
    stock = ModelLoad.fill

    def fill(self: ModelLoad, *arguments: Any, **options: Any) -> Any:
        STARTED["fills"] = STARTED["fills"] + 1
        with nobody_talks():
            return stock(self, *arguments, **options)

    ModelLoad.fill = fill  # type: ignore[method-assign]


CHECKS = {
    "models": check_models,
    "heads": check_heads,
    "accelerate": check_accelerate,
    "adapters": check_adapters,
    "methods": check_methods,
    "evaluating": check_evaluating,
    "page": check_page,
    "resuming": check_resuming,
    "refusing": check_refusing,
    "leaving": check_leaving,
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ckptkit").setLevel(logging.INFO)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    pretend(accelerate.state)
    silence_fills()
    gc.freeze()  # the Trainer collects garbage each time; what libraries hold is not looked through

    def run(name: str) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # which a check may have set
        CHECKS[name](sys.argv[2], Path(sys.argv[1]))

    run_checks(run, sys.argv[3:])
    end()


if __name__ == "__main__":
    main()
