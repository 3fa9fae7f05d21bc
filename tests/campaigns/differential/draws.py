"""What a run of the campaign draws: a model, its training, two meshes, a saver and its options.

A draw follows from the seed and its number alone. It is a value that becomes JSON and back, so
that a failure can be repeated, and made smaller, without the seed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FSDP1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("fsdp2", "hsdp", "fsdp1", "ddp", "tp", "fsdp2_tp", "plain")
# What a parameter that is trained may be, what a frozen one may be besides, and a buffer.
TRAINED = ("float32", "bfloat16", "float16", "float64")
FROZEN = (*TRAINED, "int64", "int32", "int8", "uint8", "bool", "complex64", "float8_e4m3fn")
BUFFERS = (*FROZEN, "int16", "float8_e5m2", "complex128", "uint16", "uint32", "uint64")
OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False},
        {"lr": 0.1, "momentum": 0.5, "fused": True},
    ),
    "Adam": ({"lr": 0.01}, {"lr": 0.01, "foreach": True}, {"lr": 0.01, "fused": True}),
    "AdamW": (
        {"lr": 0.01},
        {"lr": 0.01, "amsgrad": True},
        {"lr": 0.01, "foreach": False, "weight_decay": 0.2},
        {"lr": 0.01, "fused": True, "amsgrad": True},
    ),
    "Adagrad": ({"lr": 0.1}, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": ({"lr": 0.01}, {"lr": 0.01, "centered": True, "momentum": 0.3}),
    "Adadelta": ({"lr": 1.0},),
    "Adamax": ({"lr": 0.01},),
    "NAdam": ({"lr": 0.01},),
    "RAdam": ({"lr": 0.01},),
    "ASGD": ({"lr": 0.01},),
    "Rprop": ({"lr": 0.01},),
}
OPTIMIZER_WEIGHTS = (3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1)
SCHEDULERS = ("", "StepLR", "MultiStepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR")
SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 23)
STOCK = {
    # How often each is drawn.
    "dcp": 6,
    "dcp_full": 2,
    "dcp_async": 1,
    "accelerate_form": 3,
    "torch_full": 2,
    "torch_ranks": 2,
    "hf_writer": 2,
    "safetensors": 1,
}


@dataclass(frozen=True)
class Spec:
    """A tensor of a unit: `role` is parameter, buffer or transient (a buffer that is not saved)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "parameter"


@dataclass(frozen=True)
class Unit:
    """A module, which may lie in another one."""

    path: str  # where it is, by dots; numbers and names
    tensors: tuple[Spec, ...]  # what it holds
    tied: str = ""  # a further name for its first parameter; empty without one
    frozen: bool = False  # whether its parameters are not trained
    wrapped: bool = True  # whether it is sharded by itself, not with what it lies in
    ignored: bool = False  # whether FSDP leaves it alone
    group: int = 0  # the number of the parameter group in its optimizer
    extra: bool = False  # whether it has an extra state


@dataclass(frozen=True)
class Mesh:
    """Ranks, and how the model is spread over them."""

    world: int
    strategy: str
    shape: tuple[int, ...] = ()
    fsdp1: str = "FULL_SHARD"
    original: bool = True  # parameters of FSDP1
    device_mesh: bool = False  # of FSDP1, whose state dicts then have DTensors
    reshard: bool | None = None
    offload: bool = False
    largest: bool = False  # FSDP2 cuts the largest dimension where it divides
    meta: bool = False  # a model without memory is loaded into

    def __str__(self) -> str:
        if self.strategy != "fsdp1":
            return self.strategy
        return f"fsdp1 {self.fsdp1} {'original' if self.original else 'flat'}"


@dataclass(frozen=True)
class Draw:
    seed: int
    number: int
    units: tuple[Unit, ...]
    optimizer: str
    settings: dict[str, Any]
    scheduler: str
    steps: int
    real: bool  # whether there are forward and backward passes, else gradients are made up
    first: Mesh
    second: Mesh
    stock: str
    stock_options: dict[str, Any] = field(default_factory=dict)
    own_options: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Draw:
        fields = json.loads(text)
        fields["units"] = tuple(
            Unit(
                **one
                | {
                    "tensors": tuple(
                        Spec(**tensor | {"shape": tuple(tensor["shape"])})
                        for tensor in one["tensors"]
                    )
                }
            )
            for one in fields["units"]
        )
        for name in ("first", "second"):
            fields[name] = Mesh(**fields[name] | {"shape": tuple(fields[name]["shape"])})
        return cls(**fields)


def make_draw(seed: int, number: int) -> Draw:
    chance = random.Random(f"{seed} {number}")
    first, second = _mesh(chance), _mesh(chance)
    sharded = {"fsdp1", "fsdp2", "hsdp", "fsdp2_tp"} & {first.strategy, second.strategy}
    units = _units(chance, sharded)
    optimizer = chance.choices(list(OPTIMIZERS), OPTIMIZER_WEIGHTS)[0]
    if optimizer == "Rprop" and not {first.strategy, second.strategy} <= {"fsdp1", "ddp", "plain"}:
        optimizer = "SGD"  # torch's Rprop takes no DTensors
    options = dict(chance.choice(OPTIMIZERS[optimizer]))
    if not {first.strategy, second.strategy} <= {"fsdp1", "ddp", "plain"}:
        options.pop("fused", None)  # torch has it for few kinds of DTensors
    stock = chance.choices(list(STOCK), list(STOCK.values()))[0]
    specs = [spec for unit in units for spec in unit.tensors]
    if stock in ("hf_writer", "safetensors") and any(s.dtype == "complex128" for s in specs):
        stock = "dcp"  # as safetensors has no such type
    if stock == "hf_writer" and any(unit.tied for unit in units):
        stock = "dcp_async"  # as safetensors refuses shared memory
    if stock in ("torch_full", "torch_ranks") and first.strategy == "fsdp1":
        # With a device mesh, FSDP1 has no LOCAL_STATE_DICT.
        stock = stock if first.device_mesh else "torch_local"
    return Draw(
        seed,
        number,
        units,
        optimizer,
        options,
        chance.choice(SCHEDULERS),
        chance.choice((0, 1, 1, 2, 3)),
        chance.random() < 0.5,
        first,
        second,
        stock,
        _stock_options(
            chance,
            stock,
            units,
            separate=first.strategy in ("plain", "ddp") and not any(u.tied for u in units),
        ),
        _own_options(chance),
        _output(chance),
    )


def _mesh(chance: random.Random) -> Mesh:
    strategy = chance.choices(STRATEGIES, (6, 3, 8, 2, 2, 3, 1))[0]
    world = 1 if strategy == "plain" else chance.choice((1, 2, 2, 3, 4, 4))
    fsdp1 = chance.choice(FSDP1)
    shape = (world,)
    if strategy in ("hsdp", "fsdp2_tp") or (strategy == "fsdp1" and "HYBRID" in fsdp1):
        shapes = [(a, world // a) for a in range(1, world + 1) if world % a == 0]
        shape = chance.choice([*shapes, *([(2, 2)] * 3 if world == 4 else ())])
    hybrid = "HYBRID" in fsdp1
    return Mesh(
        world,
        strategy,
        shape,
        fsdp1,
        # FSDP1 gathers no flat parameters of HYBRID_SHARD over groups of one rank.
        original=chance.random() < 0.6 or (hybrid and shape[-1] == 1),
        device_mesh=hybrid or chance.random() < 0.3,
        reshard=chance.choice((None, True, False)),
        # FSDP1 would pin the memory, for which it needs an accelerator.
        offload=chance.random() < 0.15 and strategy != "fsdp1",
        largest=chance.random() < 0.3,
        meta=strategy not in ("fsdp1", "ddp") and chance.random() < 0.4,
    )


def _units(chance: random.Random, sharded: set[str]) -> tuple[Unit, ...]:
    """Draws what torch can hold: FSDP takes no scalars, and FSDP1 floats of two bytes and more."""
    main = chance.choices(TRAINED, (5, 4, 2, 1))[0]
    found: list[Unit] = []
    for number in range(chance.choice((1, 2, 3, 3, 4, 5, 8))):
        parents = [one.path for one in found if not one.ignored]
        parent = chance.choice([*parents, "", "", ""])
        path = ".".join(filter(None, (parent, chance.choice((f"block_{number}", str(number))))))
        frozen = bool(found) and chance.random() < 0.25
        ignored = bool(found) and bool(sharded) and chance.random() < 0.1
        wrapped = chance.random() < 0.7 or "fsdp1" in sharded
        dtype = main
        if wrapped and not ignored:
            kinds = TRAINED if "fsdp1" in sharded or not frozen else FROZEN
            dtype = chance.choice((main, main, *kinds))
        # FSDP1 gathers no optimizer states of parameters without elements.
        tensors = _tensors(
            chance,
            dtype,
            scalars=ignored or not sharded,
            empty=bool(found) and "fsdp1" not in sharded,
        )
        tied = "again" if chance.random() < 0.2 else ""
        # `get_model_state_dict` fails with modules of FSDP1 that have an extra state.
        extra = chance.random() < 0.15 and "fsdp1" not in sharded
        group = chance.choice((0, 0, 1))
        found.append(
            Unit(path, tensors, tied, frozen, wrapped, ignored, 0 if frozen else group, extra)
        )
    return tuple(found)


def _tensors(chance: random.Random, dtype: str, *, scalars: bool, empty: bool) -> tuple[Spec, ...]:
    found = []
    for name in chance.sample(("weight", "bias", "gate", "größe", "w_1"), chance.choice((1, 2, 3))):
        dimensions = chance.choice((1, 1, 2, 2, 2, 3, 4))
        shape = tuple(chance.choice(SIZES) for _ in range(dimensions))
        if dimensions == 4:
            shape = tuple(min(size, 5) for size in shape)
        if empty and chance.random() < 0.1:
            shape = (0, *shape[1:])
        if scalars and chance.random() < 0.3:
            shape = ()
        if chance.random() < 0.04:
            shape = (chance.choice((1000, 4097)), chance.choice((33, 70)))
        found.append(Spec(name, shape, dtype))
    for number in range(chance.choice((0, 0, 0, 1, 2))):
        role = chance.choice(("buffer", "buffer", "buffer", "transient"))
        shape = tuple(chance.choice((0, *SIZES)) for _ in range(chance.choice((0, 1, 2))))
        found.append(Spec(f"buffer_{number}", shape, chance.choice(BUFFERS), role))
    return tuple(found)


def _stock_options(
    chance: random.Random, stock: str, units: Sequence[Unit], *, separate: bool
) -> dict[str, Any]:
    """Draws options; `separate` says that no two tensors share memory."""
    if stock == "hf_writer":
        # torch's own consolidation takes floats with dimensions.
        fits = all(spec.shape and spec.dtype in TRAINED for unit in units for spec in unit.tensors)
        return {
            "thread_count": chance.choice((1, 2)),
            "save_distributed": True,
            "enable_consolidation": fits and chance.random() < 0.5,
        }
    if stock in ("torch_ranks", "torch_local"):
        return {"zip": True}  # else nothing proves that copies of ranks are equal
    if stock == "torch_full":
        return {"zip": chance.random() < 0.7}
    if stock == "safetensors":
        return {}
    form = chance.choices(("torch", "safetensors", "zstd"), (8, 1, 1))[0]
    if form == "safetensors" and not separate:
        form = "zstd"  # safetensors refuses shared memory, and torch loses errors of threads
    return {
        "single_file_per_rank": chance.random() < 0.6,
        "thread_count": 1 if form == "safetensors" else chance.choice((1, 1, 2, 3)),
        "sync_files": chance.random() < 0.3,
        "per_thread_copy_ahead": chance.choice((0, 10_000_000)),
        # For which `async_save` would pin memory, which needs an accelerator.
        "cache_staged_state_dict": stock != "dcp_async" and chance.random() < 0.2,
        "form": form,
        "dedup_save_to_lowest_rank": chance.random() < 0.3,
        "enable_plan_caching": chance.random() < 0.2,
    }


def _own_options(chance: random.Random) -> dict[str, Any]:
    return {
        "layout": chance.choice(("accelerate", "accelerate", "dcp", "trainer")),
        "local": chance.random() < 0.2,
        "staging_limit": chance.choice((None, None, None, "1MiB")),
        "max_in_flight": chance.choice((1, 1, 2)),
        "prefix": chance.choice(("checkpoint-", "checkpoint-", "checkpoint_")),
        "prepare": chance.random() < 0.5,
        "name": chance.choice((None, None, None, "epoch_0")),
        "files": chance.random() < 0.2,
    }


def _output(chance: random.Random) -> dict[str, Any]:
    return {
        "dtype": chance.choice(("keep", "keep", "float32", "bfloat16", "float16")),
        "max_shard_size": chance.choice(("5GB", "5GB", "300B", "2KB", "100KB")),
        "only": chance.choice(("", "", "include", "exclude")),
        "optimizer": chance.random() < 0.4,
        "workers": chance.choice((None, 1, 3)),
        "weights": chance.choice((None, [0.25, 0.75], [3.0, -1.0])),
        "encoding": chance.choice(("xor", "overwrite")),
        "checksum": chance.choice(("xxh3-128", "adler32")),
    }


def simpler(draw: Draw) -> Iterator[Draw]:
    """Yields draws that are each a little smaller than the one given."""
    for at, one in enumerate(draw.units):
        rest = [u for u in draw.units if u is not one and not u.path.startswith(f"{one.path}.")]
        if any(not u.frozen for u in rest):
            yield dataclasses.replace(draw, units=tuple(rest))
        for unit in _simpler_units(one):
            yield dataclasses.replace(draw, units=(*draw.units[:at], unit, *draw.units[at + 1 :]))
    yield from _simpler_meshes(draw)
    for name, usual in USUAL.items():
        own = getattr(draw, name)
        for key, value in usual.items():
            if own.get(key, value) != value:
                yield _changed(draw, name, own | {key: value})


def _changed(one: Any, name: str, value: object) -> Any:
    return dataclasses.replace(one, **{name: value})


def _simpler_units(unit: Unit) -> Iterator[Unit]:
    for spec in unit.tensors[::-1]:
        if len(unit.tensors) > 1:
            yield dataclasses.replace(unit, tensors=tuple(s for s in unit.tensors if s is not spec))
    for name, plain in (("tied", ""), ("extra", False), ("group", 0), ("frozen", False)):
        if getattr(unit, name) != plain:
            yield _changed(unit, name, plain)


def _simpler_meshes(draw: Draw) -> Iterator[Draw]:
    for name, mesh in (("first", draw.first), ("second", draw.second)):
        for part in ("reshard", "offload", "largest", "meta", "device_mesh"):
            if getattr(mesh, part):
                yield _changed(draw, name, _changed(mesh, part, False))
    if draw.second != draw.first:
        yield dataclasses.replace(draw, second=draw.first)
    for name, plain in (("scheduler", ""), ("real", False)):
        if getattr(draw, name) != plain:
            yield _changed(draw, name, plain)
    if draw.steps > 1:
        yield dataclasses.replace(draw, steps=1)
    if draw.optimizer != "SGD":
        yield dataclasses.replace(draw, optimizer="SGD", settings={"lr": 0.1, "momentum": 0.9})


USUAL: dict[str, dict[str, Any]] = {
    "stock_options": {
        "single_file_per_rank": True,
        "thread_count": 1,
        "sync_files": False,
        "per_thread_copy_ahead": 10_000_000,
        "cache_staged_state_dict": False,
        "form": "torch",
        "dedup_save_to_lowest_rank": False,
        "enable_plan_caching": False,
        "zip": True,
        "enable_consolidation": False,
    },
    "own_options": {
        "layout": "accelerate",
        "local": False,
        "staging_limit": None,
        "max_in_flight": 1,
        "prefix": "checkpoint-",
        "prepare": False,
        "name": None,
        "files": False,
    },
    "output": {
        "dtype": "keep",
        "max_shard_size": "5GB",
        "only": "",
        "optimizer": False,
        "workers": None,
        "weights": None,
        "encoding": "xor",
        "checksum": "xxh3-128",
    },
}
