"""What of PEFT lies in a checkpoint, and which commands make something of it."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.adapters.dialects import BASE_LAYER, DEFAULT
from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.pipeline.adapters.choice import Choice, adapters_in, sort_trees
from ckptkit.pipeline.adapters.records import ADAPTER_CONFIG, AdapterRecords
from ckptkit.pipeline.folders import SideFolders
from ckptkit.pipeline.opening import Opened, PathLike
from ckptkit.pipeline.source_places import absolute, is_folder
from ckptkit.planning.peft_names import LORA, advice_on, find_adapter, own_adapters, title_of
from ckptkit.planning.selection import as_random
from ckptkit.storage.places import Place, place_of

if TYPE_CHECKING:
    from ckptkit.pipeline.adapters.base_records import Quantization

_SCALES = ".absmax"
_MODEL = "pytorch_model_fsdp_"
_BASE = "base_model_"
_OF_PEFT = re.compile(r"adapter_model\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The adapters of one model in a checkpoint.

    Attributes:
        names: Their names, the one that PEFT gives by itself first.
        holds_base: Whether the weights that they were trained on lie there too, and can be read
            without others.
        configured: Whether the configuration of the first adapter was found.
        is_ready: Whether it is a folder that PEFT loads as it is.
        packing: How its base was packed in training, where a folder of the adapter alone tells.
    """

    names: tuple[str, ...]
    holds_base: bool
    configured: bool
    is_ready: bool = False
    packing: Quantization | None = None

    def extract(self, source: str, out: str = "OUT", *, chosen: Sequence[str] = ()) -> str:
        """Returns the command that takes the first adapter out.

        Args:
            source: The checkpoint, as the user would type it.
            out: The folder to make.
            chosen: Options with which the user chose the checkpoint.
        """
        return shlex.join(["ckptkit", "adapter", "extract", source, out, *self._options(chosen)])

    def merge(self, source: str, out: str = "OUT", *, chosen: Sequence[str] = ()) -> str:
        """Returns the command that merges the first adapter; arguments as for `extract`."""
        base = [] if self.holds_base else ["--base", "DIR"]
        if self.packing is not None and not self.packing.can_be_repeated:
            base += ["--qlora-base", "original"]
        elif self.packing is not None and self.packing.leaves_scales_open:
            base.append("--double-quant")
        options = [*base, *self._options(chosen)]
        return shlex.join(["ckptkit", "adapter", "merge", source, out, *options])

    @property
    def remark(self) -> str:
        """What to put in the place of the words in the commands; mostly empty."""
        missing = []
        if not self.holds_base:
            missing.append("DIR is the model that the adapter was trained on")
        if self.packing is not None and not self.packing.can_be_repeated:
            where = f", which lie in {self.packing.checkpoint}" if self.packing.weights else ""
            missing.append(f"the adapter was trained on packed weights{where}")
        elif self.packing is not None and self.packing.leaves_scales_open:
            missing.append("--no-double-quant where the run did not set bnb_4bit_use_double_quant")
        if not self.configured:
            missing.append(
                f"FILE is its {ADAPTER_CONFIG}, which the checkpoint lacks; --lora-alpha N may do"
            )
        if len(self.names) > 1:
            missing.append(f"the adapters are {', '.join(self.names)}")
        return "; ".join(missing)

    def _options(self, chosen: Sequence[str]) -> list[str]:
        name = ["--adapter", self.names[0]] if len(self.names) > 1 else []
        config = [] if self.configured else ["--adapter-config", "FILE"]
        return [*name, *config, *chosen]


@dataclass(frozen=True, slots=True)
class PeftFinding:
    """An adapter of PEFT, of any method, or a model that PEFT wraps.

    Attributes:
        method: Its `peft_type`; empty where nothing tells it.
        tensor: The tensor that shows it; empty where PEFT's files alone do.
        folder: PEFT's folder of it; empty for other checkpoints.
    """

    method: str
    tensor: str
    folder: str

    @property
    def is_of_lora(self) -> bool:
        """Whether `ckptkit adapter` may handle it."""
        return self.method in {"", LORA}

    @property
    def title(self) -> str:
        """What it is, such as `an IA3 adapter of PEFT`."""
        return title_of(self.method)

    @property
    def advice(self) -> str:
        """What to do with it, where `ckptkit adapter` does not handle it; empty where it does."""
        if self.method == LORA:
            return ""
        return f"`ckptkit adapter` handles LoRA alone: {advice_on(self.method, self.folder)}"

    @property
    def refusal(self) -> str:
        """Why it is not written as a model."""
        if self.tensor:
            return as_random(self.tensor, self.title)
        return f"{ADAPTER_CONFIG} says that its weights are {self.title}, and no model"


def find_peft(
    checkpoint: Opened, folders: SideFolders, wants: Callable[[str], bool] | None = None
) -> PeftFinding | None:
    """Finds out whether PEFT trained what would be consolidated.

    Evidence are the names of the tensors, and PEFT's own files: `adapter_model.*` with an
    `adapter_config.json` in the same folder.

    Args:
        checkpoint: Whatever was opened.
        folders: Those that may hold its side files.
        wants: Tells which tensors are taken; None takes all.
    """
    select = checkpoint.select
    model = [e.name for e in checkpoint.index.of_part("model") if select in {None, e.tree}]
    names = [name for name in model if wants is None or wants(name)]
    folder = _folder_of_peft(checkpoint)
    sign = find_adapter(names)
    if sign is None and not folder:
        return None
    recorded, is_beside = _recorded_method(folders, folder)
    sign = sign and find_adapter(names, own_adapters(config_of(folders)))
    if sign is None and not is_beside:
        return None
    told = "" if sign is None else sign.method
    return PeftFinding(
        told if told not in {"", LORA} else recorded or told,
        "" if sign is None else sign.name,
        folder if is_beside else "",
    )


def config_of(folders: SideFolders) -> Mapping[str, Any] | None:
    """Returns the model's configuration; None where there is none, or none that can be read."""
    try:
        return folders.config(folders.choose(allow_code=False)[0])
    except CkptkitError:
        return None


def _folder_of_peft(checkpoint: Opened) -> str:
    """Returns the folder of a checkpoint whose only weights have the name of PEFT's file."""
    files = {file for unit in checkpoint.units for file in unit.candidate.files}
    if not files or not all(_OF_PEFT.fullmatch(posixpath.basename(file)) for file in files):
        return ""
    folders = {unit.candidate.folder for unit in checkpoint.units}
    root = checkpoint.source.folders[0].location
    return posixpath.join(root, *folders).rstrip("/") if len(folders) == 1 else ""


def _recorded_method(folders: SideFolders, folder: str) -> tuple[str, bool]:
    """Returns the method that the nearest configuration names, and whether it lies in a folder."""
    try:
        record = AdapterRecords(folders).find(DEFAULT, is_only_one=True)
    except CkptkitError:
        return "", False
    if record is None:
        return "", False
    method = record.document.get("peft_type")
    is_beside = bool(folder) and posixpath.dirname(record.path) == folder
    return method if isinstance(method, str) else "", is_beside


def adapter_facts(checkpoint: Opened, folders: SideFolders) -> AdapterFacts | None:
    """Tells what of PEFT lies in a checkpoint; None where nothing does, or nothing modelled.

    Args:
        checkpoint: Whatever was opened.
        folders: Those that may hold its side files.
    """
    peft = find_peft(checkpoint, folders)
    if peft is None or not peft.is_of_lora:
        return None
    try:
        trees = sort_trees(checkpoint)
        records = AdapterRecords(folders)
        found = adapters_in(trees, records.names())
        names = sorted({one.name for one in found}, key=lambda name: (name != DEFAULT, name))
        if not names or len(names) < len(found) or _others(trees, found):
            return None
        record = records.find(names[0], is_only_one=len(names) == 1)
        # With what unpacks weights behind it: most checkpoints that are inspected need none.
        from ckptkit.pipeline.adapters.base_records import read_record_of_base

        packing = read_record_of_base(checkpoint).quantization
    except CkptkitError:
        return None  # the commands say what is wrong with it
    units = [posixpath.basename(unit.candidate.files[0]) for unit in checkpoint.units]
    return AdapterFacts(
        tuple(names),
        holds_base=_holds_base([tree.rest for tree in trees.values()]),
        configured=record is not None,
        is_ready=record is not None and all(map(_OF_PEFT.fullmatch, units)),
        packing=packing,
    )


def step_of_base(checkpoint: Opened) -> str:
    """Returns the step whose frozen base was opened without its adapter; else an empty text."""
    for folder in (one.candidate.folder for one in checkpoint.units):
        place = absolute(checkpoint.source.folders[0].location)
        step, name = posixpath.split(posixpath.join(place, folder).rstrip("/"))
        adapter = name.replace(_BASE, _MODEL, 1)
        if name.startswith(_BASE) and is_folder(_beside(checkpoint, posixpath.join(step, adapter))):
            return step
    return ""


def _beside(checkpoint: Opened, location: str) -> Place:
    return place_of(checkpoint.location).beside(location)


def choices(select: str | None, also: Sequence[PathLike]) -> list[str]:
    """Returns the options with which a user chose a checkpoint, as they are typed."""
    chosen = [] if select is None else ["--select", select]
    return [*chosen, *(text for folder in also for text in ("--also", os.fspath(folder)))]


def _others(trees: Iterable[str], found: Iterable[Choice]) -> list[str]:
    """Returns the models that neither have an adapter, nor are the base of one beside them."""
    holders = {adapter.tree for adapter in found}
    beside = {tree.replace(_MODEL, _BASE, 1) for tree in holders if tree.startswith(_MODEL)}
    return [tree for tree in trees if tree not in holders | beside]


def _holds_base(parts: Iterable[Mapping[Fqn, TensorEntry]]) -> bool:
    """Tells whether the weights of the base are there, and not packed without their scales."""
    rest = {name: entry for part in parts for name, entry in part.items()}
    weights = [entry for name, entry in rest.items() if name.endswith(f"{BASE_LAYER}.weight")]
    packed = any(entry.shape[1:] == (1,) for entry in weights)
    scales = any(name.endswith(_SCALES) for name in rest)
    return bool(rest) and (scales or not packed)
