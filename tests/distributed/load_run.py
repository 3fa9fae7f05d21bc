"""Runs under torchrun: fills live, sharded models by `load_into`, and checks every rank's part.

Usage: load_run.py FOLDER CASE... Each case works in FOLDER/CASE; everything that communicates
raises while a model is filled.
"""

from __future__ import annotations

import os
import shutil
import signal
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, LoadError, PartlyFilledError
from ckptkit.training import Checkpointer, LoadResult, load_into
from ckptkit.training.step_names import clean_fqn
from tests.built_modules import local, module_like, part_of, same_bits
from tests.distributed.cases import FULL, WRAPPERS, fsdp1, nobody_talks, run_cases
from tests.distributed.saving_run import Net, gathered, make, train

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SMALL_BYTES = 32 << 10  # of headers of archives around tensors of some bytes
UNREADABLE = {
    *("rank_files_local_flat", "torchsnapshot_odd_bfloat16", "peft_fsdp1_empty"),
    "autotp_deepspeed_0_18",  # refused: nothing in it shows how tensors are cut
}
ONE = ([Shard(0)], [Shard(1)], [Replicate()])
TWO = (
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
)


def load(model: nn.Module, source: Path, **options: Any) -> LoadResult:
    with nobody_talks():
        return load_into(model, source, **options)


def check(model: nn.Module, truth: Mapping[str, torch.Tensor]) -> None:
    own = model.state_dict()
    for name in truth:
        assert same_bits(local(own[name]), part_of(truth[name], own[name])), name


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Returns a mesh; groups have threads, so that there should not be many."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut_at_random(model: nn.Module) -> None:
    """Shards each tensor in a way that follows from its name."""
    size = dist.get_world_size()
    mesh, ways = (mesh_of(2), ONE) if size == 2 else (mesh_of(2, size // 2), TWO)
    for owner_name, owner in model.named_modules():
        for name, tensor in owner._parameters.items():
            way = ways[zlib.crc32(f"{owner_name}.{name}".encode()) % len(ways)]
            fitting = [
                kind if not isinstance(kind, Shard) or kind.dim < tensor.dim() else Replicate()
                for kind in way
            ]
            cut = distribute_tensor(tensor.data, mesh, fitting, src_data_rank=None)
            owner._parameters[name] = nn.Parameter(cut, requires_grad=False)


def fixtures(_folder: Path, half: str) -> None:
    """Half of all fixtures, each into tensors that are cut in many ways."""
    count = 0
    for path in sorted(FIXTURES.iterdir())[int(half) :: 2]:
        source = path / "checkpoint"
        if not source.exists() or path.name in UNREADABLE:
            continue
        try:
            checkpoint = ckptkit.open(source)
        except AmbiguousSourceError:
            continue
        with checkpoint:
            truth = {str(name): checkpoint[name] for name in checkpoint}
            model = module_like(checkpoint, "meta" if count % 2 else "cpu")
            cut_at_random(model)
            result = load(model, source)
            assert not result.missing_keys, path
            check(model, truth)
        count += 1
    assert count > 50, count


def made(source: Path, kind: str) -> dict[str, torch.Tensor]:
    """Saves a model of `kind`, and returns its values."""
    state = make(kind, 1)
    train(state, 1)
    truth = {
        name.removeprefix("model."): value
        for name, value in gathered(state).items()
        if name.startswith("model.")
    }
    with Checkpointer(source / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
    if dist.get_rank() == 0:
        ckptkit.consolidate(source / "run", source / "hf")
        ckptkit.convert(source / "run", source / "torch", to="torch")
    dist.barrier()
    return truth


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(2)
    if kind in WRAPPERS:
        return WRAPPERS[kind](Net())
    if kind == "one":
        return Net()
    if kind == "compiled":
        model: Any = torch.compile(WRAPPERS["fsdp2"](Net()))
        return cast(nn.Module, model)
    if kind == "checkpointed":
        net: Any = Net()
        net.up = checkpoint_wrapper(net.up)
        return WRAPPERS["fsdp2"](net)
    if kind == "tp":
        return parallel(Net(), dist.get_world_size())
    strategy, _, orig = kind.partition("+")
    settings: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if "HYBRID" in strategy:
        settings["device_mesh"] = mesh_of(2, dist.get_world_size() // 2)
    return fsdp1(Net(), "up", orig=bool(orig), **settings)


def parallel(model: Net, size: int) -> nn.Module:
    """FSDP x TP where there are enough ranks, else TP."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if world > size:
        fully_shard(model.up, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the values of a wrapped model, gathered by torch itself."""
    values: Any = get_model_state_dict(model, options=FULL)
    return {name: value.clone() for name, value in values.items()}


def wrappers(folder: Path, extent: str) -> None:
    """From a step of FSDP2, and from what was made of it, into every wrapper.

    `all` fills each wrapper from each source, `one` from one of them, and `grid` so the ones that
    differ where four ranks are a grid.
    """
    truth = made(folder, "fsdp2")
    on_a_grid = ["tp", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    kinds = ["one", "ddp", "fsdp2", "fsdp1_flat", "fsdp1_orig", "tp", "compiled", "checkpointed"]
    if dist.get_world_size() == 4:
        strategies += on_a_grid[1:]
        kinds.append("hsdp")
    kinds += [f"{name}{end}" for name in strategies for end in ("", "+orig")]
    if extent == "grid":
        kinds = [name for name in kinds if name.removesuffix("+orig") in {*on_a_grid, "hsdp"}]
    sources = ("run", "hf", "torch")
    for number, name in enumerate(kinds):
        for source in sources if extent == "all" else [sources[number % 3]]:
            model = wrapped(name)
            result = load(model, folder / source)
            assert result.bytes_read <= 1.05 * result.bytes_needed + SMALL_BYTES, (
                name,
                source,
                result,
            )
            found = dict(model.state_dict()) if name == "one" else whole_values(model)
            for name_now, value in found.items():
                key = clean_fqn(name_now)
                assert same_bits(value, truth[key]), (name, source, key)


def back(folder: Path, kind: str) -> None:
    """From FSDP1's own steps, whose chunks are other boxes, into FSDP2 on the meta device."""
    truth = made(folder, kind)
    for source in ("run", "hf"):
        with torch.device("meta"):
            model: Any = Net()
        model = WRAPPERS["fsdp2"](model)
        load(model, folder / source)
        check(model, truth)
        assert model.head.weight is model.embed.weight
        model(torch.randint(0, 23, (4, 5))).backward()


def halves(folder: Path, _: str) -> None:
    """Each rank reads only its part of a record, and reports that the record is not proven."""
    torch.manual_seed(5)
    whole = torch.randn(16, 8_192)
    if dist.get_rank() == 0:
        torch.save({"weight": whole}, folder / "model.bin")
    dist.barrier()
    model = nn.Module()
    cut = distribute_tensor(torch.zeros(16, 8_192), mesh_of(dist.get_world_size()), [Shard(1)])
    model.register_parameter("weight", nn.Parameter(cut))
    result = load(model, folder / "model.bin")
    assert result.unproven == ("weight",)
    assert result.bytes_read == result.bytes_needed
    check(model, {"weight": whole})


def stages(folder: Path, _: str) -> None:
    """Every rank holds other layers, as in a pipeline, and leaves those of the others."""
    torch.manual_seed(6)
    rank = dist.get_rank()
    whole = {f"layer{number}.weight": torch.randn(4, 3) for number in range(2)}
    if rank == 0:
        torch.save(whole, folder / "model.bin")
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
    model = nn.Module()
    model.add_module(f"layer{rank}", nn.Linear(3, 4, bias=False))
    fully_shard(model, mesh=mesh["shard"])
    result = load(model, folder / "model.bin")
    assert result.unexpected_keys == (f"layer{1 - rank}.weight",)
    check(model, {f"layer{rank}.weight": whole[f"layer{rank}.weight"]})


def config_of(kind: str) -> Any:
    # Imported by those cases only that have use for it, which the host of their ranks imports.
    import transformers

    few = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    few["num_attention_heads"] = 2
    if kind == "llama":
        return transformers.LlamaConfig(**few, tie_word_embeddings=True)
    if kind == "qwen3_moe":
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        return transformers.Qwen3MoeConfig(**few, **experts, num_key_value_heads=2, head_dim=8)
    if kind == "mixtral":
        return transformers.MixtralConfig(**few, num_key_value_heads=2, num_local_experts=4)
    return transformers.GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=2, n_positions=32)


def sharded(model: Any) -> Any:
    size = dist.get_world_size()
    mesh = mesh_of(2, 2) if size == 4 else mesh_of(size)
    for layer in model.modules():
        if type(layer).__name__.endswith(("DecoderLayer", "GPT2Block")):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def saved_by_transformers(folder: Path, kind: str) -> tuple[Path, Any]:
    """Returns a folder that `save_pretrained` wrote, and the model that it holds."""
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    source = folder / "saved"
    if dist.get_rank() == 0:
        model.save_pretrained(source, max_shard_size="20KB")
    dist.barrier()
    return source, transformers.AutoModelForCausalLM.from_pretrained(source)


def from_pretrained(folder: Path, kind: str) -> None:
    """As `from_pretrained` loads it: fused experts, ties, prefixes, casts; from the meta device."""
    import peft
    import transformers

    source, expected = saved_by_transformers(folder, kind)
    auto, config = transformers.AutoModelForCausalLM, config_of(kind)
    truth = expected.state_dict()
    with torch.device("meta"):
        model = auto.from_config(config)
    model = sharded(model)
    result = load(model, source)
    check(model, truth)
    assert result.bytes_read <= 1.05 * result.bytes_needed + SMALL_BYTES, result
    buffers = zip(model.named_buffers(), expected.named_buffers(), strict=True)
    assert all(same_bits(own, other) for (_, own), (_, other) in buffers)
    rounded = {n: v.to(torch.bfloat16) for n, v in truth.items()}
    with torch.device("meta"):
        model = auto.from_config(config)
    model = sharded(model)
    load(model, source, dtype="bfloat16")
    check(model, rounded)
    model(torch.randint(0, 60, (2, 5)), labels=torch.randint(0, 60, (2, 5))).loss.backward()
    model = sharded(auto.from_config(config).to(torch.bfloat16))
    load(model, source)
    check(model, rounded)
    body = transformers.AutoModel.from_config(config)
    names = [f"{body.base_model_prefix}.{name}" for name in body.state_dict()]
    own = sharded(body)
    load(own, source, strict=False)
    check(own, {name.partition(".")[2]: truth[name] for name in names})
    model = peft.get_peft_model(
        auto.from_config(config), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    model = sharded(model)
    before = {n: local(v).clone() for n, v in model.state_dict().items() if "lora_" in n}
    result = load(model, source)
    assert set(result.left_alone) == before.keys()
    for name, value in model.state_dict().items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        wanted = before[name] if name in before else part_of(truth[plain], value)
        assert same_bits(local(value), wanted), name


def resumed(folder: Path, _: str) -> None:
    """A folder that is no step is loaded by `resume`: the model alone."""
    from transformers import AutoModelForCausalLM

    source, expected = saved_by_transformers(folder, "qwen3_moe")
    truth = expected.state_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    model = sharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "progress": {"tokens": 3}}
    with Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.resume(state, folder=source) == 0
        check(model, truth)
        assert not optimizer.state
        tokens = torch.randint(0, 60, (2, 5))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()  # of the parameters that have memory now
        assert not same_bits(
            local(model.lm_head.weight), part_of(truth["lm_head.weight"], model.lm_head.weight)
        )
        checkpointer.save(1, state).result(60)
        other = {"model": sharded(AutoModelForCausalLM.from_config(config_of("llama")))}
        before = {name: local(value).clone() for name, value in other["model"].state_dict().items()}
        with pytest.raises(LoadError, match="Unexpected key"):
            checkpointer.resume(other, folder=source)
        for name, value in other["model"].state_dict().items():
            assert same_bits(local(value), before[name])


def damaged(folder: Path, _: str) -> None:
    """A bit that is flipped in the bytes of one rank stops that rank, and no other."""
    truth = made(folder, "fsdp2")
    step = next((folder / "run").glob("checkpoint-*"))
    held = WRAPPERS["fsdp2"](Net()).state_dict()["up.weight"]
    if dist.get_rank() == 1:
        (file,) = (step / "pytorch_model_fsdp_0").glob("__1_*.distcp")
        data = bytearray(file.read_bytes())
        own = part_of(truth["up.weight"], held).numpy().tobytes()
        data[data.index(own) + 5] ^= 16
        file.write_bytes(data)
    dist.barrier()
    model = wrapped("fsdp2")
    if dist.get_rank() == 1:
        with pytest.raises(PartlyFilledError, match="filled"):
            load(model, step)
    else:
        load(model, step)
        check(model, truth)
    shared_record(folder / "shared")


def shared_record(folder: Path) -> None:
    """Each rank reads a part of a damaged record: `resume` finds the bit, as ranks communicate."""
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file({"weight": torch.randn(512, 128)}, folder / "weights.safetensors")
        ckptkit.consolidate(folder / "weights.safetensors", folder / "model", names="live")
        shutil.copytree(folder / "model", folder / "flipped")
        file = folder / "flipped/model.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 16
        file.write_bytes(data)
    dist.barrier()
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(512, 128)))
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    assert load(model, folder / "flipped").unproven == ("weight",)
    with Checkpointer(folder / "run") as checkpointer:
        with pytest.raises(PartlyFilledError, match="filled with what was read"):
            checkpointer.resume({"model": model}, folder=folder / "flipped")
        checkpointer.resume({"model": model}, folder=folder / "model")


def dies(folder: Path, _: str) -> None:
    """A rank that is killed is not waited for; that has to be the last case."""
    truth = made(folder, "fsdp2")
    model = wrapped("fsdp2")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others get, as one has failed
    load(model, folder / "hf")
    check(model, truth)
    (folder / f"filled_{dist.get_rank()}").touch()


CASES: dict[str, Callable[[Path, str], None]] = {
    "fixtures": fixtures,
    "wrappers": wrappers,
    "back": back,
    "halves": halves,
    "stages": stages,
    "pretrained": from_pretrained,
    "resumed": resumed,
    "damaged": damaged,
    "dies": dies,
}


if __name__ == "__main__":
    run_cases(CASES)
