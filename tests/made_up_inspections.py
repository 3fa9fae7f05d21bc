"""Inspections of checkpoints that are nowhere: as large as wanted, with any names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.conversion.inspect import Inspection, TensorLine, TreeLine
from ckptkit.conversion.stats import Statistics, TensorStatistics
from ckptkit.plan.coverage import ShardMap

Tensor = tuple[str, str, tuple[int, ...]]
_BYTES = {"bfloat16": 2, "float32": 4}


def mixture_tensors(layers: int, experts: int) -> Iterator[Tensor]:
    """Yields the tensors of a model with a mixture of experts, as Transformers names them."""
    yield "model.embed_tokens.weight", "bfloat16", (129_280, 7168)
    for layer in range(layers):
        for name in ("q_a", "q_b", "kv_a", "kv_b", "o"):
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", "bfloat16", (1536, 7168)
        for expert in range(experts):
            for name in ("gate", "up", "down"):
                path = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                yield path, "bfloat16", (2048, 7168)
        yield f"model.layers.{layer}.input_layernorm.weight", "float32", (7168,)
    yield "lm_head.weight", "bfloat16", (129_280, 7168)


def inspection_of(tensors: Sequence[Tensor], *, ranks: int, path: str = "runs/large") -> Inspection:
    """Returns the inspection of a checkpoint whose ranks have an equal share of each tensor."""
    lines = tuple(
        TensorLine(name, "", "model", dtype, shape, ranks, _size_bytes(dtype, shape))
        for name, dtype, shape in tensors
    )
    size = sum(line.size_bytes for line in lines)
    shares = tuple(((0, ranks, line.size_bytes // ranks),) for line in lines)
    return Inspection(
        path=path,
        format="dcp",
        reasons=(),
        writer="accelerate",
        world_size=ranks,
        step=500,
        files=ranks,
        size_bytes=size,
        bytes_per_rank=(size // ranks,) * ranks,
        model_type="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        trees=(TreeLine("", "model", len(lines), size, {"bfloat16": size}, {}),),
        tensors=lines,
        objects=(),
        tied=(),
        problems=(),
        notes=(),
        shards=ShardMap(
            tuple((f"__{rank}_0.distcp", size // ranks, size // ranks) for rank in range(ranks)),
            shares,
            shares,
            (),
        ),
    )


def statistics_of(inspection: Inspection) -> Statistics:
    """Returns numbers with as many digits as those of a real model, different for each tensor."""
    return Statistics(
        path=inspection.path,
        format=inspection.format,
        step=inspection.step,
        tensors=tuple(
            TensorStatistics(
                name=line.name,
                dtype=line.dtype,
                shape=line.shape,
                elements=line.size_bytes // 2,
                norm=100 / (number + 3),
                minimum=-1 / (number + 7),
                maximum=1 / (number + 11),
                mean=1e-5 / (number + 13),
                zeros=number % 1000,
                nan=0,
                infinite=0,
            )
            for number, line in enumerate(inspection.tensors)
        ),
        norm=1.0,
    )


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = _BYTES[dtype]
    for length in shape:
        size *= length
    return size
