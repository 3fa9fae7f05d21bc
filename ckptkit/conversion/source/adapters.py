"""What of PEFT lies in a checkpoint, and which commands make something of it.

Which of the adapters in a checkpoint is meant.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.conversion.source.adapter_records import ADAPTER_CONFIG, AdapterRecords
from ckptkit.conversion.source.open import OpenedCheckpoint, PathLike
from ckptkit.conversion.source.places import absolute, is_folder
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    RefusedError,
)
from ckptkit.core.index import Fqn, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.discovery import is_optimizer_folder, is_unit_folder
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.dialects import BASE_LAYER, DEFAULT, SortedTensors, sort_entries
from ckptkit.lora.quantized import Quantization
from ckptkit.lora.recorded_base import BaseRecord, parse_base_record
from ckptkit.plan.packed_weights import random_weights_message
from ckptkit.plan.peft_names import LORA, advice_on, find_adapter, own_adapters, title_of
from ckptkit.plan.selection import model_trees
from ckptkit.storage.base import is_there
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import Place, place_of

_FACTOR = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B)\.")
_BASE_UNIT = "base_model_"  # where the layout of the Trainer keeps the base of a PEFT model


@dataclass(frozen=True, slots=True)
class Choice:
    """One adapter of a checkpoint.

    Attributes:
        name: What the run called it; "default" where nothing tells.
        tree: The state dict that holds it.
        is_named: Whether the name is known and not taken for granted.
    """

    name: str
    tree: str
    is_named: bool


def sort_trees(
    checkpoint: OpenedCheckpoint, *, keep_module: bool = False
) -> dict[str, SortedTensors]:
    """Tells adapters from bases in every model of a checkpoint."""
    index = checkpoint.index
    trees = model_trees(index)
    if checkpoint.select is not None:
        if checkpoint.select not in trees:
            raise CannotPlanError(
                f"holds no model {checkpoint.select!r}; found {', '.join(map(repr, trees))}",
                where=checkpoint.path,
                hint="leave --select out, or see `ckptkit inspect` for the names",
            )
        trees = [checkpoint.select]
    by_tree: dict[str, list[TensorEntry]] = {tree: [] for tree in trees}
    for entry in index.of_part("model"):
        if entry.tree in by_tree:
            by_tree[entry.tree].append(entry)
    return {tree: _sorted(entries, keep_module=keep_module) for tree, entries in by_tree.items()}


def _sorted(entries: Sequence[TensorEntry], *, keep_module: bool) -> SortedTensors:
    """Sorts tensors; a `module` that PEFT wrote, or that tells two of them apart, is no wrapper."""
    try:
        found = sort_entries(entries, keep_module=keep_module)
    except FormatError:
        if keep_module:
            raise
        return sort_entries(entries, keep_module=True)
    is_file = not found.live and all(PEFT_PREFIX in entry.name for entry in entries)
    return sort_entries(entries, keep_module=True) if found.cut_module and is_file else found


def choose_adapter(
    checkpoint: OpenedCheckpoint,
    trees: Mapping[str, SortedTensors],
    recorded: Sequence[str],
    wanted: str | None,
    *,
    may_be_empty: bool = False,
) -> Choice:
    """Returns the adapter that is meant.

    Args:
        checkpoint: The checkpoint.
        trees: Its models, as `sort_trees` returns them.
        recorded: Names of adapters that the run recorded.
        wanted: The name that the user gave, or None.
        may_be_empty: Whether an adapter that was saved without a tensor is taken for one.

    """
    found = list(adapters_in(trees, recorded))
    if not found and may_be_empty and was_saved_empty(checkpoint):
        return Choice(wanted or next(iter(recorded), DEFAULT), "", is_named=False)
    if not found:
        raise _nothing_found(checkpoint)
    if wanted is not None:
        named = [one for one in found if one.name == wanted]
        if not named and len(found) == 1 and not found[0].is_named:
            return Choice(wanted, found[0].tree, is_named=False)
        found = named or found
        if not named:
            raise CannotPlanError(
                f"holds no adapter {wanted!r}; found {_listed(found)}",
                where=checkpoint.path,
                hint=f"pass --adapter {found[0].name}",
            )
    if len(found) == 1:
        return found[0]
    raise _several(found, checkpoint)


def _several(found: Sequence[Choice], checkpoint: OpenedCheckpoint) -> AmbiguousSourceError:
    if len({one.name for one in found}) == 1:
        return AmbiguousSourceError(
            f"{len(found)} models have an adapter: {', '.join(repr(one.tree) for one in found)}",
            where=checkpoint.path,
            hint=f"choose one with --select {found[0].tree}",
        )
    holders = list(dict.fromkeys(one.tree for one in found))
    several = len(holders) > 1
    within = f", in {len(holders)} models: {', '.join(map(repr, holders))}" if several else ""
    selected = f" and --select {found[0].tree}" if several else ""
    return AmbiguousSourceError(
        f"holds {len({one.name for one in found})} adapters: {_listed(found)}{within}",
        where=checkpoint.path,
        hint=f"choose one with --adapter {found[0].name}{selected}",
    )


def base_of(tree: str, trees: Mapping[str, SortedTensors]) -> Mapping[Fqn, TensorEntry]:
    """Returns what a checkpoint has of the base of a tree's adapter, names as they are."""
    number = tree.rstrip("/").rpartition("_")[2]
    others = [
        found.rest
        for other, found in trees.items()
        if other != tree and posixpath.basename(other) == f"{_BASE_UNIT}{number}"
    ]
    return others[0] if others else trees[tree].rest


def adapters_in(trees: Mapping[str, SortedTensors], recorded: Sequence[str]) -> list[Choice]:
    """Returns all adapters of a checkpoint; arguments as for `choose_adapter`."""
    live = [Choice(name, tree, is_named=True) for tree, one in trees.items() for name in one.live]
    taken = {one.name for one in live}
    found = [
        choice
        for tree, one in trees.items()
        if one.stripped
        for choice in _unnamed(tree, [name for name in recorded if name not in taken])
    ]
    return [*found, *live]


def _unnamed(tree: str, left: Sequence[str]) -> list[Choice]:
    """Returns what an adapter may be called whose tensors do not tell: one name at best.

    Args:
        tree: Its state dict; a folder of PEFT's has the name of its adapter.
        left: Names that the run recorded, and that no other tensors have.
    """
    folder = posixpath.basename(tree)
    if folder and "." not in folder and not is_unit_folder(folder):
        return [Choice(folder, tree, is_named=True)]
    if left:
        return [Choice(name, tree, is_named=True) for name in left]
    return [Choice(DEFAULT, tree, is_named=False)]


def _listed(choices: Sequence[Choice]) -> str:
    return ", ".join(dict.fromkeys(repr(one.name) for one in choices))


def was_saved_empty(checkpoint: OpenedCheckpoint) -> bool:
    """Tells whether an adapter may have been saved there that had no tensor."""
    holds_model = next(iter(checkpoint.index.of_part("model")), None) is not None
    return not holds_model and not all(map(is_optimizer_folder, _folders(checkpoint)))


def _nothing_found(checkpoint: OpenedCheckpoint) -> RefusedError | IncompleteCheckpointError:
    index = checkpoint.index
    moments = _moments(index)
    count = sum(1 for _ in index.of_part("model"))
    if not count and all(map(is_optimizer_folder, _folders(checkpoint))):
        return IncompleteCheckpointError(
            "holds the state of an optimizer alone, which does not tell the values of an adapter",
            where=checkpoint.path,
            hint="pass the folder of the whole step, without --select; if nothing else lies there,"
            " take another checkpoint",
        )
    if moments and not count:
        return IncompleteCheckpointError(
            "the adapter was saved without a single tensor; only the optimizer's moments of"
            f" {moments:,} of its tensors are left, which do not tell their values",
            where=checkpoint.path,
            hint="PEFT 0.21 saves empty adapters under FSDP1: train with FSDP2, with PEFT 0.20,"
            " or with ckptkit's hooks, and take a checkpoint from there; --allow-untrained takes it"
            " as an adapter that changes nothing",
        )
    if not count:
        return IncompleteCheckpointError(
            "holds no model tensor at all, and so no adapter",
            where=checkpoint.path,
            hint="the save wrote an empty adapter; take another checkpoint, or pass"
            " --allow-untrained to take it as an adapter that changes nothing",
        )
    return RefusedError(
        f"holds nothing that PEFT trained: none of {count:,} tensors is an adapter's",
        where=checkpoint.path,
        hint="`ckptkit consolidate` writes whole models",
    )


def _folders(checkpoint: OpenedCheckpoint) -> list[str]:
    """Returns the names of the folders that a checkpoint was read from."""
    root = absolute(checkpoint.location)
    paths = (posixpath.join(root, unit.candidate.folder) for unit in checkpoint.units)
    return [posixpath.basename(path.rstrip("/")) for path in paths]


def _moments(index: TensorIndex) -> int:
    """Counts the factors that an optimizer has moments of."""
    named = {
        (match.string[: match.start()], match[2])
        for entry in index.of_part("optimizer")
        if (match := _FACTOR.search(entry.key)) is not None
    }
    return len(named)


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
        return self.method in {"", LORA}

    @property
    def title(self) -> str:
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
            return random_weights_message(self.tensor, self.title)
        return f"{ADAPTER_CONFIG} says that its weights are {self.title}, and no model"


def find_peft(
    checkpoint: OpenedCheckpoint, folders: SideFolders, wants: Callable[[str], bool] | None = None
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


def _folder_of_peft(checkpoint: OpenedCheckpoint) -> str:
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


def adapter_facts(checkpoint: OpenedCheckpoint, folders: SideFolders) -> AdapterFacts | None:
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


def read_record_of_base(checkpoint: OpenedCheckpoint) -> BaseRecord:
    """Reads what the manifest of an extracted adapter records of its base, if there is one."""
    if not is_there(checkpoint.source, posixpath.join(checkpoint.folder, MANIFEST_NAME)):
        return BaseRecord()
    manifest = read_manifest(checkpoint.source, checkpoint.folder)
    return parse_base_record(manifest, posixpath.join(checkpoint.path, MANIFEST_NAME))


def step_of_base(checkpoint: OpenedCheckpoint) -> str:
    """Returns the step whose frozen base was opened without its adapter; else an empty text."""
    for folder in (one.candidate.folder for one in checkpoint.units):
        place = absolute(checkpoint.source.folders[0].location)
        step, name = posixpath.split(posixpath.join(place, folder).rstrip("/"))
        adapter = name.replace(_BASE, _MODEL, 1)
        if name.startswith(_BASE) and is_folder(_beside(checkpoint, posixpath.join(step, adapter))):
            return step
    return ""


def _beside(checkpoint: OpenedCheckpoint, location: str) -> Place:
    return place_of(checkpoint.location).beside(location)


def choices(select: str | None, also: Sequence[PathLike]) -> list[str]:
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
