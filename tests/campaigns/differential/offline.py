"""Reads what was saved without ranks: by ckptkit's commands, by torch and by safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptkit
from tests.campaigns.differential.draws import Draw
from tests.campaigns.differential.live_models import EXPONENTS, Truth
from tests.campaigns.differential.readers import (
    WITH_ALL,
    Check,
    Compared,
    UnequalError,
    compare,
    compare_one,
    equal,
    folders_of,
)

Tensors = Mapping[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


class Commands:
    """What one process reads for one draw, from the folder of its saves.

    Element types that safetensors has no name for are left out of what becomes safetensors, and
    read one by one.
    """

    def __init__(self, draw: Draw, folder: Path, truths: Mapping[int, Truth]) -> None:
        self.draw = draw
        self.folder = folder
        self.truths = truths
        self.model: Tensors = truths[2]["model"]
        self.wide = [n for n, t in self.model.items() if t.dtype == torch.complex128]
        self.step = Path((folder / "step_2").read_text())
        self.stock = folder / "stock"

    def checks(self) -> Iterator[Check]:
        own, saver, output = "Checkpointer", self.draw.stock, self.draw.output
        yield own, "consolidate", lambda: self.consolidate(self.step, "own_hf")
        yield saver, "consolidate", lambda: self.consolidate(self.stock, "stock_hf")
        for name, source in ((own, self.step), (saver, self.stock)):
            yield name, "ckptkit.open", partial(self.open, source)
            yield name, "verify", partial(self.verify, source)
            yield name, "convert to torch", partial(self.to_torch, source, name)
            yield name, "convert to dcp", partial(self.to_dcp, source, name)
            if output["dtype"] != "keep":
                yield name, "consolidate --dtype", partial(self.cast, source, name)
            if output["only"]:
                yield name, "consolidate --include", partial(self.some, source, name)
        if saver not in ("hf_writer", "safetensors") or not self.wide:
            yield f"{saver} and {own}", "diff", self.diff
        yield own, "export", self.export
        yield own, "average", self.average
        yield own, "delta", self.delta
        yield (
            own,
            "dcp_to_torch_save",
            lambda: self.stock_file(folders_of(self.step, self.draw.own_options["layout"])[0]),
        )
        if saver in WITH_ALL and self.draw.stock_options["form"] != "safetensors":
            layout = "accelerate" if saver == "accelerate_form" else "dcp"
            yield (
                saver,
                "dcp_to_torch_save",
                lambda: self.stock_file(folders_of(self.stock, layout)[0]),
            )
        if saver == "hf_writer":
            yield saver, "HuggingFaceStorageReader", lambda: self.hf_reader(self.stock)
        yield (
            "consolidate",
            "HuggingFaceStorageReader",
            lambda: self.hf_reader(self.folder / "own_hf"),
        )
        if self.truths[2]["optimizer"] and output["optimizer"]:
            yield own, "convert --optimizer", lambda: self.optimizer(self.step, "own")
            if saver in (*WITH_ALL, "torch_full"):
                yield saver, "convert --optimizer", lambda: self.optimizer(self.stock, "stock")

    def narrow(self, tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if name not in self.wide}

    def options(self, source: Path) -> dict[str, Any]:
        found: dict[str, Any] = {
            "names": "live",
            "max_shard_size": self.draw.output["max_shard_size"],
            "workers": self.draw.output["workers"],
            "exclude": list(self.wide),
        }
        if source == self.stock and self.draw.stock == "torch_full":
            found["select"] = "model"
        if self.consolidated_too(source):
            found["select"] = "sharded"
        return found

    def consolidated_too(self, source: Path) -> bool:
        """Whether torch has made a model of its own shards beside them."""
        return source == self.stock and bool(self.draw.stock_options.get("enable_consolidation"))

    def expected(self, source: Path) -> Tensors:
        """What a source holds; some savers have left out what safetensors cannot hold."""
        if source == self.stock and self.draw.stock in ("hf_writer", "safetensors"):
            return self.narrow(self.model)
        return self.model

    def consolidate(self, source: Path, name: str) -> Compared:
        out = self.folder / name
        manifest = ckptkit.consolidate(source, out, **self.options(source))
        found = load_folder(out)
        equal(manifest.tensors.keys() - found.keys(), set(), "names of the manifest")
        counted = compare(found, self.narrow(self.model), "consolidated")
        verified = ckptkit.verify(out)
        equal(verified.problems, (), "problems")
        for path in out.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  it is no mapping
                    if (shape := file.get_slice(key).get_shape()) and shape[0] > 1:
                        part = file.get_slice(key)[1:]
                        compare_one(part, self.model[key][1:], f"slice of {key}")
        return counted

    def open(self, source: Path) -> Compared:
        select = self.options(source).get("select")
        with ckptkit.open(source, select=select) as checkpoint:
            found = {str(name): checkpoint[name] for name in checkpoint}
            for name in checkpoint:
                equal(tuple(checkpoint.read(name, "numpy").shape), checkpoint.shape(name), name)
        return compare(found, self.expected(source), "opened")

    def verify(self, source: Path) -> Compared:
        select = None if source == self.step else self.options(source).get("select")
        found = ckptkit.verify(source, select=select)
        equal(found.problems, (), "problems")
        return found.tensors, 0

    def to_torch(self, source: Path, name: str) -> Compared:
        out = self.folder / f"{name}_torch"
        options = self.options(source) | {"exclude": []}
        ckptkit.convert(source, out, to="torch", **options)
        found: dict[str, torch.Tensor] = {}
        for path in out.glob("pytorch_model*.bin"):
            found |= torch.load(path, weights_only=True)  # noqa: TID251  torch is the oracle
        return compare(found, self.expected(source), "in pytorch_model.bin")

    def to_dcp(self, source: Path, name: str) -> Compared:
        out = self.folder / f"{name}_dcp"
        options = self.options(source) | {"exclude": []}
        ckptkit.convert(source, out, to="dcp", **options)
        (folder,) = (path.parent for path in out.rglob(".metadata"))
        return self.stock_file(folder, self.expected(source))

    def stock_file(self, folder: Path, expected: Tensors | None = None) -> Compared:
        path = self.folder / "whole.pt"
        dcp_to_torch_save(folder, path)
        found = torch.load(path, weights_only=False)  # noqa: TID251  we made it
        found = found.get("model", found)
        tensors = {k: v for k, v in _flat(found).items() if isinstance(v, torch.Tensor)}
        return compare(tensors, expected or self.model, "in torch's own file")

    def cast(self, source: Path, name: str) -> Compared:
        wanted = DTYPES[self.draw.output["dtype"]]
        out = self.folder / f"{name}_cast"
        kept = [n for n, t in self.model.items() if t.dtype not in EXPONENTS]
        overflow = {
            n
            for n, t in self.model.items()
            if t.dtype in EXPONENTS and bool((t.isfinite() & ~t.to(wanted).isfinite()).any())
        }
        ckptkit.consolidate(
            source,
            out,
            dtype=self.draw.output["dtype"],
            keep_dtype=[*overflow, *(n for n in kept if n not in self.wide)],
            **self.options(source),
        )
        truth = {
            n: t if n in overflow or n in kept else t.to(wanted)
            for n, t in self.narrow(self.model).items()
        }
        return compare_numbers(load_folder(out), truth)

    def some(self, source: Path, name: str) -> Compared:
        listed = sorted(self.narrow(self.model))
        chosen, out = listed[::2], self.folder / f"{name}_some"
        options = self.options(source)
        if self.draw.output["only"] == "include":
            options["include"] = chosen
        else:
            options["exclude"] = [*options["exclude"], *listed[1::2]]
        ckptkit.consolidate(source, out, **options)
        return compare(load_folder(out), {n: self.model[n] for n in chosen}, "chosen")

    def diff(self) -> Compared:
        found = ckptkit.diff(self.step, self.stock)
        if not found.same:
            raise UnequalError(f"diff: {found}")
        return len(self.model), 0

    def export(self) -> Compared:
        """The files that all ranks wrote are those that one process makes of the step."""
        out, exported = self.folder / "made", self.folder / "export"
        if not exported.exists():
            return 0, 0
        ckptkit.consolidate(self.step, out, names="live", max_shard_size="2KB")
        names = {path.name for path in out.iterdir()} - {"ckptkit.json"}
        equal({path.name for path in exported.iterdir()} - {"ckptkit.json"}, names, "files")
        size = 0
        for name in sorted(names):
            data = (exported / name).read_bytes()
            if data != (out / name).read_bytes():
                raise UnequalError(f"export: {name} has other bytes than that of consolidate")
            size += len(data)
        return len(self.model), size

    def average(self) -> Compared:
        """The mean of two steps is what torch computes; that of one step twice is that step."""
        before, after = self.truths[1]["model"], self.model
        floats = [n for n, t in after.items() if t.dtype in EXPONENTS]
        others = [n for n in after if n not in floats]
        sources = [Path((self.folder / "step_1").read_text()), self.step]
        out, weights = self.folder / "averaged", self.draw.output["weights"]
        options = self.options(self.step)
        if weights:
            options["weights"] = list(weights)
        ckptkit.average(
            sources, out, take_last=[n for n in others if n not in self.wide], **options
        )
        shares = [w / sum(weights) for w in weights] if weights else None
        truth = {}
        for name, value in self.narrow(after).items():
            if name not in floats:
                truth[name] = value
                continue
            kind = torch.float64 if value.dtype == torch.float64 else torch.float32
            one, other = before[name].to(kind), value.to(kind)
            mean = (one + other) / 2 if shares is None else one * shares[0] + other * shares[1]
            truth[name] = mean.to(value.dtype)
        return compare_numbers(load_folder(out), truth)

    def delta(self) -> Compared:
        """A delta from the first step to the second one makes the second of the first."""
        first, output = Path((self.folder / "step_1").read_text()), self.draw.output
        options: Any = {"names": "live", "exclude": list(self.wide)}
        made = self.folder / "weight_v000001"
        ckptkit.create_delta(
            first,
            self.step,
            made,
            encoding=output["encoding"],
            checksum=output["checksum"],
            **options,
        )
        out = self.folder / "patched"
        ckptkit.apply_delta(first, made, out, **options)
        equal(ckptkit.verify(made).problems, (), "problems of the delta")
        return compare(load_folder(out), self.narrow(self.model), "patched")

    def hf_reader(self, source: Path) -> Compared:
        truth = self.narrow(self.model)
        if self.consolidated_too(source):
            source = source / "sharded"
        state = {name: torch.empty_like(value) for name, value in truth.items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(source)))
        return compare(state, truth, "by torch's reader")

    def optimizer(self, source: Path, name: str) -> Compared:
        out = self.folder / f"{name}_optimizer"
        options = self.options(source) | {"exclude": []}
        ckptkit.convert(source, out, to="torch", optimizer=True, **options)
        file = out / "optimizer.bin"
        content = torch.load(file, weights_only=True)  # noqa: TID251  torch is the oracle
        found = {
            f"{name}/{key}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
            for name, values in content["state"].items()
            for key, value in values.items()
        }
        return compare(found, self.truths[2]["optimizer"], "in optimizer.bin")


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def compare_numbers(found: Tensors, truth: Tensors) -> Compared:
    """Compares bit by bit what was computed; the payload of a NaN is not part of a number."""
    quiet = {
        name: value.masked_fill(value.isnan(), 0.5) if value.dtype in EXPONENTS else value
        for name, value in truth.items()
    }
    own = {}
    for name, value in found.items():
        if value.dtype in EXPONENTS and name in truth and value.shape == truth[name].shape:
            equal(bool((value.isnan() == truth[name].isnan()).all()), True, f"NaN of {name}")
            own[name] = value.masked_fill(value.isnan(), 0.5)
        else:
            own[name] = value
    return compare(own, quiet, "computed")


def read_truths(folder: Path) -> dict[int, Truth]:
    found: dict[int, Truth] = {}
    for step in (1, 2):
        path = folder / f"truth_{step}.pt"
        found[step] = torch.load(path, weights_only=False)  # noqa: TID251  we made it
    return found
