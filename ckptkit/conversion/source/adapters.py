"""Finds adapters of PEFT in a checkpoint, chooses one, and proposes commands for it."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import ADAPTER_CONFIG
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.paths import (
    check_path,
    find_local,
    is_folder,
    make_absolute,
    names_model,
    read_config_in,
)
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    InputError,
    MissingFileError,
    RefusedError,
)
from ckptkit.core.frameworks import OPTIONS_OF, is_optimizer_folder, is_unit_folder
from ckptkit.core.index import Fqn, Key, TensorEntry
from ckptkit.core.manifest import MANIFEST_NAME, SIDE_FOLDER
from ckptkit.core.model_configs import parse_json_object
from ckptkit.lora.config import (
    ALPHA,
    MAKE_CONFIG,
    PEFT_PREFIX,
    RANK,
    RSLORA,
    TASK,
    is_dimension,
    is_finite,
)
from ckptkit.lora.dialects import (
    BASE_LAYER,
    DEFAULT,
    SortedTensors,
    build_table,
    sort_entries,
)
from ckptkit.lora.foreign import ForeignAdapter, find_foreign
from ckptkit.lora.pipeline_names import SETTINGS, WRITER
from ckptkit.options import SOME_MODEL, ConsolidateRequest
from ckptkit.plan.selection import model_trees, select_model
from ckptkit.plan.weight_kinds import (
    LORA,
    PEFT,
    AdapterSign,
    advice_on,
    find_adapter,
    own_adapters,
    random_weights_message,
)
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, open_source, place_of

if TYPE_CHECKING:
    from ckptkit.lora.quantized import BaseRecord, Quantization


_FACTOR = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B)\.")
_BASE_UNIT = "base_model_"  # the base of a PEFT model in the layout of the Trainer


class Choice(Struct, frozen=True):
    name: str
    tree: str
    is_named: bool


def sort_trees(
    checkpoint: OpenedCheckpoint, *, keep_module: bool = False
) -> dict[str, SortedTensors]:
    """Separates adapters from bases in every model of a checkpoint, but for copies of adapters.

    A `module` in names is kept where PEFT wrote it, or two names need it.
    """
    by_tree = list_trees(checkpoint)
    for first, copy in find_copies(checkpoint).items():
        if first in by_tree:
            by_tree.pop(copy, None)
    found = {}
    for tree, entries in by_tree.items():
        try:
            found[tree] = sort_entries(entries, keep_module=keep_module)
        except FormatError:
            if keep_module:
                raise
            found[tree] = sort_entries(entries, keep_module=True)
        is_file = not found[tree].live and all(PEFT_PREFIX in entry.name for entry in entries)
        if found[tree].cut_module and is_file:
            found[tree] = sort_entries(entries, keep_module=True)
    return found


def list_trees(checkpoint: OpenedCheckpoint) -> dict[str, list[TensorEntry]]:
    """Returns the tensors of the models of a checkpoint, or of the selected one, by model."""
    by_tree: dict[str, list[TensorEntry]] = {}
    for entry in checkpoint.index.of_part("model"):
        by_tree.setdefault(entry.tree, []).append(entry)
    if checkpoint.select is not None:
        if checkpoint.select not in by_tree:
            raise CannotPlanError(
                f"holds no model {checkpoint.select!r}; found {', '.join(map(repr, by_tree))}",
                where=checkpoint.path,
                hint="leave --select out, or see `ckptkit inspect` for the names",
            )
        by_tree = {checkpoint.select: by_tree[checkpoint.select]}
    return by_tree


Role = Literal["", "adapter", "base"]
"""What a tensor of a model that PEFT trained belongs to; empty in other models."""
ROLES: tuple[Role, ...] = ("adapter", "base")


def find_roles(checkpoint: OpenedCheckpoint) -> dict[Key, Role]:
    """Returns which tensors are an adapter's, and which its base's; none where PEFT is not known.

    Nothing is returned where one of the models is neither of an adapter nor the base of one, as
    where a framework writes the merged model beside the adapter.
    """
    if find_adapter(str(entry.name) for entry in checkpoint.index.of_part("model")) is None:
        return {}
    try:
        trees = sort_trees(checkpoint)
    except CkptkitError:  # a method of PEFT that is not modelled
        return {}
    holders = {tree for tree, tensors in trees.items() if tensors.holds_adapter}
    bases = {tree.replace(_MODEL, _BASE_UNIT, 1) for tree in holders if tree.startswith(_MODEL)}
    if not holders or not (holders | bases).issuperset(trees):
        return {}
    copies = set(find_copies(checkpoint).values())
    rest = {entry.key for tensors in trees.values() for entry in tensors.rest.values()}
    return {
        entry.key: "base" if entry.key in rest else "adapter"
        for tree, entries in list_trees(checkpoint).items()
        for entry in entries
        if tree not in copies
    }


def select_with_base(
    checkpoint: OpenedCheckpoint, request: ConsolidateRequest
) -> tuple[dict[str, TensorEntry], dict[str, Role]]:
    """Returns the tensors of the selected model; of an adapter with its base, those of both.

    With them comes what each belongs to, if PEFT trained the model. A name that is in several state
    dicts begins with that of its own.
    """
    chosen = replace(request, select=checkpoint.select)
    roles = find_roles(checkpoint)
    trees = model_trees(checkpoint.index) if checkpoint.select is None and roles else []
    both = [
        entry
        for tree in trees
        for entry in select_model(
            checkpoint.index,
            replace(chosen, select=tree),
            location=checkpoint.path,
            everything=True,
        )
        if entry.key in roles and request.wants(entry.name, *entry.stored_names)
    ]
    # Of one state dict, and where patterns leave nothing, as of any model.
    is_pair = len(trees) > 1 and both
    entries = both if is_pair else select_model(checkpoint.index, chosen, location=checkpoint.path)
    counts = Counter(str(entry.name) for entry in entries)
    named = {str(e.name) if counts[str(e.name)] == 1 else f"{e.tree}/{e.name}": e for e in entries}
    return named, {n: roles[e.key] for n, e in named.items() if e.key in roles}


_GATHERED = "lora_adapter"


def find_copies(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """Returns the models whose adapter is stored a second time, with the model that is the copy.

    Source: verl up to 0.5, `FSDPCheckpointManager`, and its model merger: `lora_adapter` beside the
    files of the ranks has the adapter of these, gathered, in PEFT's form.
    """
    folders = {u.candidate.folder: u.label for u in checkpoint.units if not u.is_optimizer}
    trees = {entry.tree for entry in checkpoint.index.of_part("model")}
    pairs = {
        label: folders[gathered]
        for folder, label in folders.items()
        if (gathered := posixpath.join(folder, _GATHERED)) in folders
    }
    return {first: copy for first, copy in pairs.items() if {first, copy} <= trees}


def choose_adapter(
    checkpoint: OpenedCheckpoint,
    trees: Mapping[str, SortedTensors],
    recorded: Sequence[str],
    wanted: str | None,
    *,
    may_be_empty: bool = False,
) -> Choice:
    adapters = list_adapters(trees, recorded)
    if not adapters and may_be_empty:
        holds_model = next(iter(checkpoint.index.of_part("model")), None) is not None
        if not holds_model and not all(map(is_optimizer_folder, _folders(checkpoint))):
            return Choice(wanted or next(iter(recorded), DEFAULT), "", is_named=False)
    if not adapters:
        raise _no_adapter_error(checkpoint)
    if wanted is not None:
        named = [adapter for adapter in adapters if adapter.name == wanted]
        if not named and len(adapters) == 1 and not adapters[0].is_named:
            return Choice(wanted, adapters[0].tree, is_named=False)
        if not named:
            raise CannotPlanError(
                f"holds no adapter {wanted!r}; found {_listed(adapters)}",
                where=checkpoint.path,
                hint=f"pass --adapter {adapters[0].name}",
            )
        adapters = named
    if len(adapters) == 1:
        return adapters[0]
    holders = list(dict.fromkeys(adapter.tree for adapter in adapters))
    names, models = len({a.name for a in adapters}), ", ".join(map(repr, holders))
    if names == 1:
        raise AmbiguousSourceError(
            f"{len(adapters)} models have an adapter: {models}",
            where=checkpoint.path,
            hint=f"choose one with --select {holders[0]}",
        )
    within = f", in {len(holders)} models: {models}" if holders[1:] else ""
    selected = f" and --select {holders[0]}" if holders[1:] else ""
    raise AmbiguousSourceError(
        f"holds {names} adapters: {_listed(adapters)}{within}",
        where=checkpoint.path,
        hint=f"choose one with --adapter {adapters[0].name}{selected}",
    )


def find_base(tree: str, trees: Mapping[str, SortedTensors]) -> Mapping[Fqn, TensorEntry]:
    """Returns the tensors of the base of a tree's adapter, by their names in the checkpoint."""
    number = tree.rstrip("/").rpartition("_")[2]
    others = [
        contents.rest
        for other, contents in trees.items()
        if other != tree and posixpath.basename(other) == f"{_BASE_UNIT}{number}"
    ]
    return others[0] if others else trees[tree].rest


def list_adapters(trees: Mapping[str, SortedTensors], recorded: Sequence[str]) -> list[Choice]:
    """Returns all adapters of a checkpoint; arguments as for `choose_adapter`."""
    live = [Choice(name, tree, is_named=True) for tree in trees for name in trees[tree].live]
    left = [name for name in recorded if name not in {choice.name for choice in live}]
    unnamed: list[Choice] = []
    for tree, contents in trees.items():
        folder = posixpath.basename(tree)
        if not contents.stripped:
            continue
        if folder and "." not in folder and not is_unit_folder(folder):
            # PEFT names the folder of an adapter by the adapter.
            unnamed.append(Choice(folder, tree, is_named=True))
        elif left:
            unnamed += (Choice(name, tree, is_named=True) for name in left)
        else:
            unnamed.append(Choice(DEFAULT, tree, is_named=False))
    return [*unnamed, *live]


def _listed(choices: Sequence[Choice]) -> str:
    return ", ".join(dict.fromkeys(repr(choice.name) for choice in choices))


def _no_adapter_error(checkpoint: OpenedCheckpoint) -> RefusedError | IncompleteCheckpointError:
    index = checkpoint.index
    moments = {
        (match.string[: match.start()], match[2])
        for entry in index.of_part("optimizer")
        if (match := _FACTOR.search(entry.key)) is not None
    }
    count = sum(1 for _ in index.of_part("model"))
    if not count and all(map(is_optimizer_folder, _folders(checkpoint))):
        return IncompleteCheckpointError(
            "holds the state of an optimizer alone, which has no values of an adapter",
            where=checkpoint.path,
            hint="pass the folder of the whole step, without --select; if it holds nothing else,"
            " take another checkpoint",
        )
    if moments and not count:
        return IncompleteCheckpointError(
            "the adapter was saved without a single tensor; only the optimizer's moments of"
            f" {len(moments):,} of its tensors are left, which do not have their values",
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
    root = make_absolute(checkpoint.location)
    paths = (posixpath.join(root, unit.candidate.folder) for unit in checkpoint.units)
    return [posixpath.basename(path.rstrip("/")) for path in paths]


_SCALES = ".absmax"
_MODEL = "pytorch_model_fsdp_"
_OF_PEFT = re.compile(r"adapter_model\.(safetensors|bin)")


class AdapterFacts(Struct, frozen=True):
    """The adapters of one model in a checkpoint."""

    names: tuple[str, ...]  # PEFT's default name first
    holds_base: bool  # with all that is needed to read it
    configured: bool  # there is a configuration of the first adapter
    is_ready: bool = False  # its files have the names of the library that loads it
    is_compared: bool = False  # its modules were compared with those of the base
    folders: tuple[str, ...] = ()  # of its files, and of the others, in the checkpoint
    library: str = PEFT
    packing: Quantization | None = None  # how the base was packed in training, if that is recorded
    base: str = ""  # as the configuration names it: a folder that is there, or an id
    form: str = PEFT  # whose form the factors have; see `ForeignAdapter`
    framework: str = ""  # whose names the modules have; empty for those of Transformers
    is_extractable: bool = True  # PEFT has a form of it
    lost: tuple[str, ...] = ()  # modules that the base lacks, which PEFT leaves out
    # Modules that only the text model of the base has under these names.
    of_text: tuple[str, ...] = ()

    def extract(self, source: str, out: str = "OUT", *, chosen: Sequence[str] = ()) -> str:
        """Returns the command that takes the first adapter out."""
        base = ["--base", self.base or SOME_MODEL] if self.framework else []
        options = [*base, *self._options(chosen)]
        return shlex.join(["ckptkit", "adapter", "extract", source, out, *options])

    def merge(self, source: str, out: str = "OUT", *, chosen: Sequence[str] = ()) -> str:
        """Returns the command that merges the first adapter; arguments as for `extract`."""
        base = [] if self.holds_base else ["--base", self.base or SOME_MODEL]
        if self.holds_base and self.framework:
            base = ["--model-config", self.base or SOME_MODEL]
        if self.packing is not None and not self.packing.can_be_repeated:
            base += ["--qlora-base", "original"]
        elif self.packing is not None and self.packing.leaves_scales_open:
            base.append("--double-quant")
        options = [*base, *self._options(chosen)]
        return shlex.join(["ckptkit", "adapter", "merge", source, out, *options])

    @property
    def remark(self) -> str:
        """An explanation of the placeholders in the commands, or nothing."""
        missing = []
        if self.framework and not self.base:
            missing.append(
                f"{SOME_MODEL} is the model that the adapter was trained on: its id on the Hub, or"
                f" a folder, whose sizes the conversion of {self.framework}'s names needs"
            )
        elif not (self.holds_base or self.base):
            missing.append(
                f"{SOME_MODEL} is the model that the adapter was trained on: its id on the Hub, or"
                " a folder"
            )
        if self.packing is not None and not self.packing.can_be_repeated:
            where = f", which are in {self.packing.checkpoint}" if self.packing.weights else ""
            missing.append(f"the adapter was trained on packed weights{where}")
        elif self.packing is not None and self.packing.leaves_scales_open:
            missing.append("--no-double-quant where the run did not set bnb_4bit_use_double_quant")
        if not self.configured and self.form != PEFT:
            missing.append("N is the alpha of the run, which the checkpoint lacks")
        elif not self.configured:
            missing.append(
                f"FILE is its {ADAPTER_CONFIG}, which the checkpoint lacks ({MAKE_CONFIG});"
                " --lora-alpha N may do"
            )
        if len(self.names) > 1:
            missing.append(f"the adapters are {', '.join(self.names)}")
        return "; ".join(missing)

    def _options(self, chosen: Sequence[str]) -> list[str]:
        name = ["--adapter", self.names[0]] if len(self.names) > 1 else []
        config: list[str] = []
        if not self.configured:
            config = ["--adapter-config", "FILE"] if self.form == PEFT else ["--lora-alpha", "N"]
        return [*name, *config, *chosen]


class PeftFinding(Struct, frozen=True):
    """An adapter of PEFT, of any method, or a model that PEFT wraps."""

    method: str  # its `peft_type`; empty where it is not known
    tensor: str  # empty where only PEFT's files show it
    folder: str  # that PEFT wrote; empty for other checkpoints
    foreign: ForeignAdapter | None = None  # what is not PEFT's about its names

    @property
    def is_of_lora(self) -> bool:
        return self.method in {"", LORA}

    @property
    def title(self) -> str:
        if self.foreign is not None:
            return self.foreign.title
        return AdapterSign(self.tensor, self.method).title

    @property
    def advice(self) -> str:
        """What to do with it, where `ckptkit adapter` does not handle it; empty where it does."""
        if self.foreign is not None and not self.foreign.is_handled:
            return f"`ckptkit adapter` does not handle this form: {self.foreign.own_tool}"
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
    """Finds out whether PEFT trained the model of a checkpoint.

    Evidence are the names of the tensors, and PEFT's own files: `adapter_model.*` with an
    `adapter_config.json` in the same folder.
    """
    select = checkpoint.select
    model = [e.name for e in checkpoint.index.of_part("model") if select in {None, e.tree}]
    names = [name for name in model if wants is None or wants(name)]
    folder = ""  # the only one, if it holds nothing but PEFT's files
    files = {file for unit in checkpoint.units for file in unit.candidate.files}
    homes = {unit.candidate.folder for unit in checkpoint.units}
    is_peft = all(_OF_PEFT.fullmatch(posixpath.basename(file)) for file in files)
    if files and is_peft and len(homes) == 1:
        root = checkpoint.source.folders[0].location
        folder = posixpath.join(root, *homes).rstrip("/")
    sign = find_adapter(names)
    if sign is None and not folder:
        return None
    recorded, is_beside = "", False
    with suppress(CkptkitError):
        record = find_record(folders, DEFAULT, is_only_one=True)
        if record is not None:
            is_beside = bool(folder) and posixpath.dirname(record.path) == folder
            method = record.document.get("peft_type")
            recorded = method if isinstance(method, str) else ""
    sign = sign and find_adapter(names, own_adapters(read_config(folders)))
    if sign is None and not is_beside:
        return None
    method = "" if sign is None else sign.method
    own = (e for e in checkpoint.index.of_part("model") if select in {None, e.tree})
    foreign = find_foreign(list(own)) if method == LORA else None
    is_peft_sign = sign is None or sign.form == PEFT
    return PeftFinding(
        method if method not in {"", LORA} or not is_peft_sign else recorded or method,
        "" if sign is None else sign.name,
        folder if is_beside else "",
        foreign,
    )


def read_config(folders: SideFolders) -> Mapping[str, Any] | None:
    """Returns the model's configuration; None where there is none, or it cannot be read."""
    try:
        return folders.find_config()
    except CkptkitError:
        return None


def describe_adapters(checkpoint: OpenedCheckpoint, folders: SideFolders) -> AdapterFacts | None:
    """Describes the adapters of a checkpoint; None where there is none that ckptkit handles."""
    peft = find_peft(checkpoint, folders)
    if peft is None or not peft.is_of_lora or peft.advice:
        return None
    try:
        if peft.foreign is not None:
            return _describe_foreign(checkpoint, folders, peft.foreign)
        return _describe_own(checkpoint, folders)
    except CkptkitError:
        return None  # the commands report the error


def _describe_foreign(
    checkpoint: OpenedCheckpoint, folders: SideFolders, foreign: ForeignAdapter
) -> AdapterFacts | None:
    if len(list_trees(checkpoint)) > 1:
        return None
    names = sorted(foreign.adapters, key=lambda name: (name != DEFAULT, name))
    record = find_record(folders, names[0], is_only_one=len(names) == 1)
    values = find_values(checkpoint, folders, foreign).values
    return AdapterFacts(
        tuple(names),
        holds_base=bool(foreign.rest),
        configured=record is not None or values.keys() >= {ALPHA, RSLORA},
        base=_named_base(record),
        form=foreign.form,
        framework=foreign.framework,
        is_extractable=foreign.has_peft_form,
    )


def _describe_own(checkpoint: OpenedCheckpoint, folders: SideFolders) -> AdapterFacts | None:
    trees = sort_trees(checkpoint)
    adapters = list_adapters(trees, list_recorded(folders))
    names = sorted({choice.name for choice in adapters}, key=lambda n: (n != DEFAULT, n))
    holders = {adapter.tree for adapter in adapters}
    own = {tree.replace(_MODEL, _BASE_UNIT, 1) for tree in holders if tree.startswith(_MODEL)}
    # A model that neither has an adapter nor is the base of one is not handled.
    if not names or len(names) < len(adapters) or not (holders | own).issuperset(trees):
        return None
    record = find_record(folders, names[0], is_only_one=len(names) == 1)
    known = find_values(checkpoint, folders, None, adapters[0].tree if adapters else "")
    values, record = known.values, record or known.record
    base = _named_base(record)
    rest = {name: entry for tree in trees.values() for name, entry in tree.rest.items()}
    weights = [entry for name, entry in rest.items() if name.endswith(f"{BASE_LAYER}.weight")]
    packed = any(entry.shape[1:] == (1,) for entry in weights)
    scales = any(name.endswith(_SCALES) for name in rest)
    units = [posixpath.basename(unit.candidate.files[0]) for unit in checkpoint.units]
    is_ready = is_of_pipeline(checkpoint)
    if not is_ready and record is not None and all(map(_OF_PEFT.fullmatch, units)):
        # Whether tensors have the names that PEFT reads in a file, and its forms.
        is_ready = all(
            not contents.live and all(n == entry.name for n, entry in contents.stripped.items())
            for contents in trees.values()
        )
    modules = [module for tree in trees.values() for module in build_table(tree.stripped).modules]
    homes = (
        posixpath.relpath(unit.candidate.folder or ".", checkpoint.folder or ".")
        for unit in checkpoint.units
    )
    is_of_one = not is_of_pipeline(checkpoint) or len(trees) == 1  # else each has its own base
    place = folders.base or (find_local(base) if base else None)
    lost: Sequence[str] | None = None
    of_text: Sequence[str] = ()
    if is_ready and is_of_one and place is not None:
        # Imported late: few commands need them, and `inspect` has to start fast.
        from ckptkit.conversion.source.model_folders import read_names
        from ckptkit.lora.pairing import find_lost, find_of_text

        with suppress(CkptkitError):  # then it cannot be compared
            in_base, config = read_names(place), read_config_in(place, "--base")
            lost = find_lost(modules, in_base, config)
            of_text = () if lost else find_of_text(modules, in_base, config)
    return AdapterFacts(
        tuple(names),
        holds_base=bool(rest) and (scales or not packed),
        configured=record is not None or values.keys() >= {ALPHA, RSLORA},
        is_ready=is_ready,
        is_compared=lost is not None,
        folders=tuple("" if home == "." else home for home in homes),
        library=checkpoint.index.run.writer if is_of_pipeline(checkpoint) else PEFT,
        packing=read_record_of_base(checkpoint).quantization,
        base=base,
        lost=tuple(lost or ()),
        of_text=tuple(of_text),
    )


def _named_base(record: AdapterRecord | None) -> str:
    """Returns the base that a configuration names, if it can be passed as `--base`."""
    name = None if record is None else record.document.get("base_model_name_or_path")
    return name if isinstance(name, str) and names_model(name) else ""


def read_record_of_base(checkpoint: OpenedCheckpoint) -> BaseRecord:
    """Reads what the manifest of an extracted adapter records of its base, if there is one."""
    # Imported late: only a source with an adapter needs it, and `inspect` has to start fast.
    from ckptkit.lora.quantized import BaseRecord, parse_base_record

    if not is_there(checkpoint.source, posixpath.join(checkpoint.folder, MANIFEST_NAME)):
        return BaseRecord()
    manifest = read_manifest(checkpoint.source, checkpoint.folder)
    return parse_base_record(manifest, posixpath.join(checkpoint.path, MANIFEST_NAME))


def find_step_of_base(checkpoint: OpenedCheckpoint) -> str:
    """Returns the step whose frozen base was opened without its adapter; else an empty text."""
    for folder in (unit.candidate.folder for unit in checkpoint.units):
        place = make_absolute(checkpoint.source.folders[0].location)
        step, name = posixpath.split(posixpath.join(place, folder).rstrip("/"))
        adapter = name.replace(_BASE_UNIT, _MODEL, 1)
        neighbour = place_of(checkpoint.location).beside(posixpath.join(step, adapter))
        if name.startswith(_BASE_UNIT) and is_folder(neighbour):
            return step
    return ""


def build_selection_options(select: str | None, also: Sequence[PathLike]) -> list[str]:
    chosen = [] if select is None else ["--select", select]
    return [*chosen, *(text for folder in also for text in ("--also", os.fspath(folder)))]


_NAMED = "adapters"  # where the training hooks keep those of adapters that have a name
_OPTION = "--adapter-config"


class AdapterRecord(Struct, frozen=True):
    document: Mapping[str, Any]
    path: str
    is_own: bool = False  # the run wrote it into the step itself, with the weights


def find_record(
    folders: SideFolders, adapter: str, *, is_only_one: bool, others: Container[str] = ()
) -> AdapterRecord | None:
    """Returns the configuration of one adapter in side folders; None where there is none."""
    unnamed = [ADAPTER_CONFIG] if is_only_one or adapter == DEFAULT else []
    unnamed += [f"{_GATHERED}/{name}" for name in unnamed]
    named = [f"{_NAMED}/{adapter}/{ADAPTER_CONFIG}", f"{adapter}/{ADAPTER_CONFIG}"]
    for location, source in folders.sources.items():
        own = [ADAPTER_CONFIG] if Path(location).name == adapter else []
        own += [] if Path(location).name in others else unnamed
        for path in dict.fromkeys([*named, *own]):
            document = _read(source, path)
            if document is not None:
                folders.prove(location, path)
                is_own = Path(location).name == SIDE_FOLDER
                return AdapterRecord(document, posixpath.join(location, path), is_own)
    return None


class RecordedValues(Struct, frozen=True):
    """What files other than `adapter_config.json` record of an adapter."""

    values: Mapping[str, Any]  # by the keys of `adapter_config.json`
    path: str = ""  # empty where the framework itself implies them
    are_of_peft: bool = False  # options of PEFT, which has its defaults where one is missing

    @property
    def record(self) -> AdapterRecord | None:
        """The configuration that the values are; None where some are missing."""
        is_whole = self.are_of_peft and "target_modules" in self.values
        return AdapterRecord(self.values, self.path) if is_whole else None


_VERL = "lora_train_meta.json"


def find_values(
    checkpoint: OpenedCheckpoint,
    folders: SideFolders,
    foreign: ForeignAdapter | None,
    tree: str = "",
) -> RecordedValues:
    """Returns what is recorded of an adapter besides PEFT's configuration.

    `tree` is the state dict that holds it. Megatron-Bridge has rank and alpha in `run_config.yaml`.
    verl writes them, with the type of the task, into `lora_train_meta.json`; an alpha of 0 stands
    for one that was not set. Both scale by alpha / rank, and so do torchtune and torchtitan. A
    LoRA file of diffusers has PEFT's options in its header.

    Source: verl 0.6, `_get_lora_train_meta` of `FSDPCheckpointManager` and of `SFTTrainer`.
    """
    scaling = {RSLORA: False}
    options = OPTIONS_OF.get(foreign.framework) if foreign is not None else None
    if foreign is not None and (foreign.form != PEFT or options):
        stated = dict(checkpoint.index.run.settings)
        own = {key: stated[key] for key in (RANK, ALPHA) if key in stated}
        folder = posixpath.join(checkpoint.location, checkpoint.units[0].candidate.folder)
        path = posixpath.join(folder, options or "run_config.yaml") if own else ""
        return RecordedValues({**own, **scaling}, path)
    if is_of_pipeline(checkpoint):
        return _read_header(checkpoint, tree)
    for location, source in folders.sources.items():
        document = _read(source, _VERL)
        if document is None:
            continue
        path = posixpath.join(location, _VERL)
        rank, alpha, task = (document.get(key) for key in (RANK, ALPHA, TASK))
        fits = is_dimension(rank) and is_finite(alpha) and isinstance(task, str | None)
        if not fits:
            raise FormatError(
                f"has {RANK} {rank!r:.50}, {ALPHA} {alpha!r:.50} and {TASK} {task!r:.50}, expected"
                " a positive whole number, a number and a text",
                where=path,
                hint="pass the configuration that the run used with --adapter-config",
            )
        known = {ALPHA: alpha} if alpha else {}
        return RecordedValues({RANK: rank, TASK: task, **known, **scaling}, path)
    return RecordedValues({})


_DEFAULT_ALPHA = 8  # of LoraConfig


def is_of_pipeline(checkpoint: OpenedCheckpoint) -> bool:
    """Returns whether a checkpoint is a LoRA file of diffusers."""
    return checkpoint.index.run.writer == WRITER


def _read_header(checkpoint: OpenedCheckpoint, tree: str) -> RecordedValues:
    """Returns the options in the header of a LoRA file of diffusers.

    Without any, diffusers scales by 1, whatever the ranks are.

    Source: diffusers 0.42, `_create_lora_config` and `get_peft_kwargs` in `utils/peft_utils.py`.
    """
    names = (e.name for e in checkpoint.index.of_part("model") if e.tree == tree)
    scaled = next((name for name in names if name.endswith(".alpha")), None)
    if scaled is not None:
        raise RefusedError(
            f"tensor {scaled!r} scales one module, and kohya's scripts write such files",
            where=checkpoint.path,
            hint="write the file anew in Python: pipeline.load_lora_weights(FOLDER), then"
            " pipeline.save_lora_weights",
        )
    text = checkpoint.index.values.get(("__metadata__", SETTINGS))
    (file,) = checkpoint.units[0].candidate.files
    where = f"{posixpath.join(checkpoint.location, file)}: {SETTINGS}"
    if not isinstance(text, str):
        return RecordedValues({ALPHA: None, RSLORA: False})
    document = parse_json_object(text.encode(), where=where)
    prefix = f"{tree}." if tree else ""
    own = {key[len(prefix) :]: v for key, v in document.items() if key.startswith(prefix)}
    if not own:
        return RecordedValues({ALPHA: None, RSLORA: False})
    values = {ALPHA: _DEFAULT_ALPHA, RSLORA: False, **own}
    return RecordedValues(values, where, are_of_peft=True)


def list_recorded(folders: SideFolders) -> list[str]:
    """Returns the names of the adapters that the run recorded, the default one first."""
    names: set[str] = set()
    for location, source in folders.sources.items():
        for path in source.walk(2) if Path(location).name == SIDE_FOLDER else ():
            folder, _, name = path.rpartition("/")
            if name == ADAPTER_CONFIG and not folder:
                names.add(DEFAULT)
            elif name == ADAPTER_CONFIG and posixpath.dirname(folder) == _NAMED:
                names.add(posixpath.basename(folder))
    return sorted(names, key=lambda name: (name != DEFAULT, name))


def read_record(path: PathLike) -> AdapterRecord:
    """Returns the configuration that the user named: a file, or the folder that holds it."""
    check_path(path, _OPTION)
    place = place_of(path)
    name = ADAPTER_CONFIG
    if not is_folder(place):
        folder, name = posixpath.split(place)
        place = place.beside(folder or ".")
    text, document = f"{_OPTION} {path}", None
    if is_folder(place):
        with open_source(place) as source:
            if not is_there(source, name):
                raise MissingFileError(
                    "no such file", where=text, hint="name the run's adapter_config.json"
                )
            document = _read(source, name)
    if document is None:
        raise MissingFileError("cannot be read", where=text)
    return AdapterRecord(document, posixpath.join(place, name))


def _read(source: Source, path: str) -> dict[str, Any] | None:
    try:
        size_bytes = source.stat(path).size_bytes
    except InputError:
        return None
    where = posixpath.join(source.location, path)
    if size_bytes > MAX_JSON_BYTES:
        raise InputError(f"{size_bytes:,} bytes are no configuration of an adapter", where=where)
    return parse_json_object(source.read(path, 0, size_bytes), where=where)
