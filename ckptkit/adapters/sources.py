"""From a path to one adapter: its tensors, settings and base; its values are finite and trained."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.consumers.folder_truth import MAX_JSON_BYTES
from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.source.adapters import (
    AdapterRecord,
    Choice,
    choose_adapter,
    find_base,
    find_copies,
    find_record,
    find_values,
    list_recorded,
    list_trees,
    read_config,
    read_record,
    sort_trees,
)
from ckptkit.conversion.source.open import OpenedCheckpoint, open_checkpoint
from ckptkit.conversion.source.paths import find_local, read_config_in
from ckptkit.conversion.source.side_folders import SideFolders
from ckptkit.conversion.unpacking import Unpacked, unpack_checkpoint
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.errors import AdapterError, CkptkitError, InputError, RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.core.model_configs import parse_model_config
from ckptkit.engine.reader import Origin
from ckptkit.lora.accounting import ModuleRow, account, note_old_alphas
from ckptkit.lora.changes import AdapterSource
from ckptkit.lora.config import RSLORA, TASK, Adapter, LoraSettings
from ckptkit.lora.dialects import (
    DEFAULT,
    TOKENS,
    LoraLayer,
    SortedTensors,
    build_table,
    find_second_name,
    find_vocabulary,
    is_input_embedding,
    make_plain_name,
    rename_plainly,
    select_adapter_tensors,
    sort_entries,
)
from ckptkit.lora.foreign import find_foreign
from ckptkit.lora.inference import (
    fits_target,
    infer_config,
    is_of_all_layers,
    move_config,
)
from ckptkit.name_maps.apply import Extent
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.number_formats import UNPACKED_AHEAD
from ckptkit.plan.plan import SOURCE
from ckptkit.plan.weight_kinds import LORA
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.places import PathLike, is_url

if TYPE_CHECKING:
    from ckptkit.conversion.mapped_names import ConvertedAdapter


class AdapterRequest(Struct, frozen=True, kw_only=True):
    """Which adapter is read, and how."""

    adapter: str | None = None  # None for the only one
    config: PathLike | None = None  # instead of the checkpoint's own
    # By the keys of `adapter_config.json`, for checkpoints without one.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    base: PathLike | None = None  # whose configuration converts the names of another framework
    select: str | None = None
    also: Sequence[PathLike] = ()
    allow_untrained: bool = False
    limit_bytes: int | None = None  # memory that the process may use
    # The element type that a packed base is unpacked for; `keep` leaves it as it is.
    unpack: str = "keep"

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        *,
        adapter: str | None = None,
        limit_bytes: int | None = None,
    ) -> Self:
        """Reads the options of an adapter as a user passes them; see `resolve_places`."""
        overrides = dict(options.get("overrides", {}))
        for name in ("lora_alpha", "use_rslora", "fan_in_fan_out"):
            if options.get(name) is not None:
                overrides[name] = options[name]
        if options.get("token_indices") is not None:
            overrides["trainable_token_indices"] = list(options["token_indices"])
        return cls(
            adapter=adapter,
            config=options["adapter_config"],
            overrides=overrides,
            base=options.get("model_config") or options.get("base"),
            select=options.get("select"),
            also=options["also"],
            allow_untrained=options.get("allow_untrained", False),
            limit_bytes=limit_bytes,
        )


_ANY = AdapterRequest()
_OWN_MODULE = re.compile(r"(?<![A-Za-z0-9_])module\\*\.")
_INSIDE = ("module ", "tensor ")  # errors that do not name the checkpoint


class OpenedAdapter(Struct, frozen=True):
    """An adapter that was read and checked."""

    opened: OpenedCheckpoint
    folders: SideFolders
    source: AdapterSource
    origin: Origin  # its checkpoint, opened for reading tensors
    adapter: Adapter
    base: Mapping[Fqn, TensorEntry]  # in the checkpoint, by plain names; may be empty
    config_path: str  # empty where the configuration was inferred
    rows: tuple[ModuleRow, ...]  # every tensor is in one of them
    norms: Mapping[str, float]  # by module, the Frobenius norm of what its factors add
    notes: tuple[str, ...]
    # Second names in PEFT's file, each with the first.
    twice: Mapping[Fqn, Fqn] = field(default_factory=dict)
    converted: ConvertedAdapter | None = None  # None for the names of PEFT
    tree: str = ""  # the state dict that holds it
    weight: float = 1.0  # what a merge multiplies its scaling by
    unpacked: Unpacked | None = None  # the checkpoint, if its base was packed


def open_adapter(
    stack: ExitStack,
    path: PathLike,
    request: AdapterRequest = _ANY,
    *,
    position: int | None = None,
    weight: float = 1.0,
) -> OpenedAdapter:
    """Opens the adapter at or under a path: a PEFT folder, a sharded step, a `.bin` file.

    Every tensor of the adapter is accounted for, and its values are checked. `position` is that of
    several which are merged.
    """
    checkpoint = stack.enter_context(
        open_checkpoint(
            path, select=request.select, also=request.also, limit_bytes=request.limit_bytes
        )
    )
    folders = SideFolders(stack, checkpoint, None)
    name = SOURCE if position is None else f"adapter{position}"
    config = folders.config(folders.choose(allow_code=False)[0])
    unpacked = unpack_checkpoint(checkpoint, config, request.unpack, methods=UNPACKED_AHEAD)
    try:
        found = _read_adapter(unpacked.checkpoint, folders, request, name)
    except CkptkitError as error:
        if error.where and not error.where.startswith(_INSIDE):
            raise
        raise error.located(checkpoint.path) from error
    source = replace(found.source, position=position or 0)
    of_base = unpacked if unpacked.stored else None
    return replace(found, source=source, weight=weight, unpacked=of_base)


def _read_adapter(
    checkpoint: OpenedCheckpoint, folders: SideFolders, request: AdapterRequest, origin_name: str
) -> OpenedAdapter:
    # Names of another framework become those of PEFT.
    converted = _convert_names(checkpoint, folders, request)
    if converted is not None:
        checkpoint = converted.checkpoint
    path = checkpoint.path
    # The adapter is chosen, and its configuration found.
    trees, choice, record, notes = _choose(checkpoint, folders, request)
    foreign = None if converted is None else converted.foreign
    known = find_values(checkpoint, folders, foreign, choice.tree)
    _refuse_contradictions(request, record, known.values, known.path, path)
    record = record or known.record
    if record is not None:
        document = record.document
        if converted is not None:
            document = move_config(document, converted.origins, where=record.path)
        if not document.get(TASK) and TASK in known.values:
            document = {**document, TASK: known.values[TASK]}
        record = replace(record, document=document)
    tree = trees.get(choice.tree)
    base = {} if tree is None else rename_plainly(find_base(choice.tree, trees))
    if record is not None:
        settings = LoraSettings.parse(record.document, where=record.path)
    elif tree is None:
        raise RefusedError(
            "an adapter without tensors does not show how it was configured",
            hint="pass the configuration that the run used with --adapter-config",
        )
    else:
        table = build_table(select_adapter_tensors(tree, choice.name, None))
        values = {**known.values, **request.overrides}
        inferred, assumed = infer_config(table, base, values, where=path)
        notes += assumed
        if known.path and not (known.are_of_peft or RSLORA in request.overrides):
            notes.append(
                f"{known.path} does not say whether the scaling is rsLoRA's: alpha / rank is"
                " assumed"
            )
        stated = known.values if known.are_of_peft else {}
        settings = LoraSettings.parse({**inferred, **stated}, where=path)
    origin = Origin(origin_name, checkpoint.source, checkpoint.index)
    found = OpenedAdapter(
        opened=checkpoint,
        folders=folders,
        source=AdapterSource(0, origin_name, path),
        origin=origin,
        adapter=Adapter(choice.name, settings, {}),
        base=base,
        config_path=known.path if record is None else record.path,
        rows=(),
        norms={},
        notes=checkpoint.notes,
        converted=converted,
        tree=choice.tree,
    )
    if tree is None:
        note = "the adapter has no tensors: the save wrote none, and it changes nothing"
        return replace(found, notes=(*checkpoint.notes, note))
    # Its tensors are selected, and each is accounted for.
    resized = () if tree.stripped else tuple(find_resized_embeddings(settings, base, tree.rest))
    if resized:
        notes.append(
            "the vocabulary has another size than that of the base: the embeddings are"
            " written with the adapter, as PEFT does"
        )
    tensors = select_adapter_tensors(tree, choice.name, settings, embeddings=resized)
    refuse_problems(checkpoint.index, tensors.values(), path)
    reader = ArrayReader(origin)
    tensors, repetitions = _drop_repetitions(tensors, settings, reader)
    notes += repetitions
    adapter = Adapter(choice.name, settings, tensors)
    rows = account(adapter, base, is_own_record=record is not None and record.is_own)
    notes += note_old_alphas(settings, rows)
    # Its values are read, compared with those of copies, and checked.
    twice = _find_second_names(adapter, tree, reader)
    notes += _compare_with_copy(checkpoint, choice, adapter, reader)
    norms = _check_values(adapter, rows, reader, allow_untrained=request.allow_untrained)
    all_notes = (*checkpoint.notes, *notes)
    return replace(found, adapter=adapter, rows=rows, norms=norms, notes=all_notes, twice=twice)


def _convert_names(
    checkpoint: OpenedCheckpoint, folders: SideFolders, request: AdapterRequest
) -> ConvertedAdapter | None:
    """Gives an adapter of another framework the names of PEFT, if it is one."""
    found = [
        (entries, foreign)
        for entries in list_trees(checkpoint).values()
        if (foreign := find_foreign(entries)) is not None
    ]
    if len(found) != 1:
        return None  # of several, the user chooses one first
    entries, foreign = found[0]
    record = None if request.config is None else read_record(request.config)
    record = record or find_record(folders, request.adapter or DEFAULT, is_only_one=True)
    extent: Extent = "layers"
    if record is not None and is_of_all_layers(record.document):
        extent = "modules"
    config: Mapping[str, Any] | None = None  # of the model, which says how names are converted
    if foreign.framework:
        named = None if record is None else record.document.get("base_model_name_or_path")
        config = read_base_config(folders, request.base, named)
        if config is None:
            raise RefusedError(
                f"holds {foreign.title}: its factors are converted by the sizes of the model, and"
                " no configuration has them",
                where=checkpoint.path,
                hint="pass the model that the adapter was trained on with --base;"
                f" {foreign.own_tool}",
            )
    from ckptkit.conversion.mapped_names import convert_adapter  # few adapters need it

    return convert_adapter(checkpoint, entries, foreign, config, extent)


def read_base_config(
    folders: SideFolders, base: PathLike | None, named: object
) -> Mapping[str, Any] | None:
    """Returns the configuration of a base; None where none is at hand.

    It is that of `--base`, or else of the checkpoint, or of the model that an adapter has `named`.
    """
    if base is not None:
        return read_config_in(base, "--base")
    own = read_config(folders)
    if own is not None or not isinstance(named, str) or "\0" in named:
        return own
    place = find_local(named)
    return None if place is None else read_config_in(place, "base_model_name_or_path")


def _refuse_contradictions(
    request: AdapterRequest,
    record: AdapterRecord | None,
    known: Mapping[str, Any],
    known_path: str,
    where: str,
) -> None:
    """Refuses options, and records of the run, that say different things."""
    said = known if record is None else record.document
    for key, value in request.overrides.items():
        # Only a configuration says whether the scaling is rsLoRA's.
        is_said = said.get(key) is not None and key != RSLORA
        if (record is not None or is_said) and said.get(key) != value:
            raise RefusedError(
                f"{key} {value!r} was given against {said.get(key)!r:.200} in"
                f" {known_path if record is None else record.path}",
                where=where,
                hint="leave the option out, or pass another file with --adapter-config",
            )
    if record is None or not known_path:
        return
    for key in ("r", "lora_alpha"):
        if key in known and record.document.get(key) != known[key]:
            raise AdapterError(
                f"{key} is {record.document.get(key)!r:.200} in {record.path}, and"
                f" {known[key]!r} in {known_path}",
                where=where,
                hint="pass the configuration that the run used with --adapter-config",
            )


def _choose(
    checkpoint: OpenedCheckpoint, folders: SideFolders, request: AdapterRequest
) -> tuple[Mapping[str, SortedTensors], Choice, AdapterRecord | None, list[str]]:
    """Finds the adapter and its configuration, with notes.

    `module` in names may be the model's own.
    """
    own = None if request.config is None else read_record(request.config)
    # A configuration is the best sign of other methods than LoRA.
    recorded = list_recorded(folders)
    names = (*recorded, request.adapter or "default")
    records = (find_record(folders, name, is_only_one=True) for name in names)
    sign = own or next(filter(None, records), None)
    if sign is not None and sign.document.get("peft_type", LORA) != LORA:
        LoraSettings.parse(sign.document, where=sign.path)  # refuses it by name
    trees = sort_trees(checkpoint)
    if sign is not None and not any(tree.holds_adapter for tree in trees.values()):
        LoraSettings.parse(sign.document, where=sign.path)
    choice = choose_adapter(
        *(checkpoint, trees, recorded, request.adapter), may_be_empty=request.allow_untrained
    )
    is_only_one = sum(len(tree.live) + bool(tree.stripped) for tree in trees.values()) == 1
    others = {posixpath.basename(tree) for tree in trees if tree != choice.tree}
    record = own or find_record(folders, choice.name, is_only_one=is_only_one, others=others)
    if not trees:
        return trees, choice, record, []
    document = {} if record is None else record.document
    named = [str(document.get(option)) for option in ("target_modules", "modules_to_save")]
    if trees[choice.tree].cut_module and any(map(_OWN_MODULE.search, named)):
        trees = sort_trees(checkpoint, keep_module=True)
    if not trees[choice.tree].cut_module:
        return trees, choice, record, []
    note = "segments 'module' in the names of tensors were removed as those of a wrapper"
    return trees, choice, record, [note]


def _drop_repetitions(
    tensors: dict[Fqn, TensorEntry], settings: LoraSettings, reader: ArrayReader
) -> tuple[dict[Fqn, TensorEntry], list[str]]:
    """Leaves out trained rows that tied embeddings repeat; PEFT writes them under one name."""
    named = settings.trainable_token_indices
    tokens = [pair for pair in tensors.items() if pair[0].endswith(f".{TOKENS}")]

    def rank(pair: tuple[Fqn, TensorEntry]) -> tuple[bool, bool]:
        module = pair[0].rpartition(".token_adapter.")[0]
        is_named = any(name and fits_target(name, module) for name in named)
        return (not is_named, module.endswith("lm_head"))

    kept: dict[Fqn, TensorEntry] = {}
    repeated: dict[Fqn, str] = {}
    for name, entry in sorted(tokens, key=rank):
        twin = next((other for other in kept if reader.are_equal(kept[other], entry)), None)
        if twin is None:
            kept[name] = entry
        else:
            repeated[name] = f"{name} repeats {twin}, and is left out as in PEFT's files"
    if "" in named and len(kept) > 1:
        listed = ", ".join(repr(name) for name, _ in sorted(tokens, key=rank))
        raise AdapterError(
            f"{listed} differ, while the configuration names the rows"
            " of one embedding, which others can only repeat",
            hint="pass the configuration that the run used with --adapter-config",
        )
    left = {name: entry for name, entry in tensors.items() if name not in repeated}
    return left, list(repeated.values())


def _find_second_names(
    adapter: Adapter, tree: SortedTensors, reader: ArrayReader
) -> dict[Fqn, Fqn]:
    """Returns second names that PEFT gives biases of whole modules; see `find_second_name`.

    A file that has one tensor twice, with different values, is refused.
    """
    for name, entry in tree.repeated.items():
        if not reader.are_equal(adapter.tensors[name], entry):
            raise AdapterError(
                f"its values differ from those of {adapter.tensors[name].name!r}, while PEFT writes"
                " one tensor under both names",
                where=f"tensor {entry.name!r}",
                hint="the file was changed after PEFT wrote it; take the original",
            )
    if adapter.settings.bias != "all":
        return {}
    names = {
        name: find_second_name(entry.name, keep_module=not tree.cut_module)
        for name, entry in {**adapter.tensors, **tree.repeated}.items()
    }
    return {second: name for name, second in names.items() if second not in {None, name}}


def _compare_with_copy(
    checkpoint: OpenedCheckpoint,
    choice: Choice,
    adapter: Adapter,
    reader: ArrayReader,
) -> Iterator[str]:
    """Refuses an adapter whose gathered copy in the checkpoint has other factors."""
    label = find_copies(checkpoint).get(choice.tree)
    if label is None:
        return
    entries = [e for e in checkpoint.index.of_part("model") if e.tree == label]
    refuse_problems(checkpoint.index, entries, checkpoint.path)
    own, copy = adapter.tensors, sort_entries(entries).stripped
    differing = next(iter(sorted(own.keys() ^ copy.keys())), None)
    if differing is None:
        unlike = (n for n in copy if not _are_alike(own[n], copy[n], reader))
        differing = next(unlike, None)
    if differing is not None:
        raise AdapterError(
            f"{choice.tree!r} and {label!r} are one adapter, and {differing!r} is not the same"
            " in both",
            where=checkpoint.path,
            hint=f"take one of them with --select {choice.tree}, or --select {label}",
        )
    yield f"{label} has the same factors as {choice.tree}"


def _are_alike(first: TensorEntry, second: TensorEntry, reader: ArrayReader) -> bool:
    """Returns whether two tensors have the same numbers in the smaller of their types."""
    if first.dtype == second.dtype or first.shape != second.shape:
        return reader.are_equal(first, second)
    narrow = numpy_dtype(min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize))
    blocks = (reader.read_blocks(entry, elements=_BLOCK_ELEMENTS) for entry in (first, second))
    return all(
        np.array_equal(a.astype(narrow).view(np.uint8), b.astype(narrow).view(np.uint8))
        for a, b in zip(*blocks, strict=True)
    )


_MATRIX = 2
_BLOCK_ELEMENTS = 1 << 22
_SINGLE_BYTES = 4  # numpy cannot check whether numbers of smaller floating types are finite


def _check_values(
    adapter: Adapter,
    rows: Sequence[ModuleRow],
    reader: ArrayReader,
    *,
    allow_untrained: bool,
) -> Mapping[str, float]:
    """Refuses values that are not finite, and adapters that change nothing; returns norms."""

    def read_factor(entry: TensorEntry) -> NDArray[Any]:
        values = reader.read_whole(entry)
        _refuse_infinite(values.reshape(-1), entry)
        return values.astype(np.float32)

    table = build_table(adapter.tensors)
    by_name = {name: row for row in rows for name in row.names}
    norms: dict[str, float] = {}
    # Tensors that replace those of the base do not show whether they were trained.
    is_trained = is_scaled = not table.layers
    for layer in table.layers:
        row = by_name[layer.names[0]]
        down, up = read_factor(layer.down), read_factor(layer.up)
        # The initial A of an embedding is zero, and the initial B of all others.
        changes = bool(up.any() and down.any())
        if layer.magnitude is not None:
            read_factor(layer.magnitude)
        if layer.up_bias is not None:
            changes |= bool(read_factor(layer.up_bias).any())
        norm = abs(row.scaling or 0.0) * _measure_product(layer, row, down, up)
        if math.isfinite(norm):
            norms[row.module] = norm
        is_scaled |= row.scaling != 0
        is_trained |= changes and row.scaling != 0
    for entry in (*table.tokens.values(), *table.whole.values()):
        for block in reader.read_blocks(entry, elements=_BLOCK_ELEMENTS):
            _refuse_infinite(block, entry)
    reader.finish()
    if not (is_trained or allow_untrained):
        factor = "lora_B" if is_scaled else "scaling"
        raise RefusedError(
            f"every {factor} of {len(table.layers):,} modules is zero: the adapter was not"
            " trained, and changes nothing",
            hint="take a later checkpoint, or pass --allow-untrained",
        )
    return norms


def _measure_product(
    layer: LoraLayer, row: ModuleRow, down: NDArray[Any], up: NDArray[Any]
) -> float:
    """Returns the Frobenius norm of a product of factors, without computing the product."""
    if layer.groups > 1:
        left = down.reshape(layer.groups, down.shape[0] // layer.groups, -1)
        right = up.reshape(layer.groups, up.shape[0] // layer.groups, -1)
        pairs = list(zip(left, right, strict=True))
    else:
        rank = row.rank or layer.inner
        experts = layer.inner // rank
        left = down.reshape(experts, rank, -1)
        right = up.reshape(up.shape[0], rank, experts)
        pairs = [(left[e], right[:, :, e]) for e in range(experts)]
    total = 0.0
    with np.errstate(all="ignore"):  # an overflow is no norm
        for a, b in pairs:
            inner, outer = (a @ a.T).astype(np.float64), (b.T @ b).astype(np.float64)
            total += float(np.vdot(outer, inner))
    return math.sqrt(max(total, 0.0))


def _refuse_infinite(block: NDArray[Any], entry: TensorEntry) -> None:
    if entry.dtype.kind != "float":
        return
    with np.errstate(all="ignore"):
        infinite = ~np.isfinite(
            block.astype(np.float32) if entry.dtype.itemsize < _SINGLE_BYTES else block
        )
    if infinite.any():
        what = "NaN" if np.isnan(block[infinite.argmax()].astype(np.float32)) else "infinity"
        raise AdapterError(
            f"{int(infinite.sum()):,} of its numbers are not finite, the first one is {what}",
            where=f"tensor {entry.name!r}",
            hint="training diverged; take an earlier checkpoint",
        )


def find_resized_embeddings(
    settings: LoraSettings, base: Mapping[Fqn, TensorEntry], rest: Mapping[Fqn, TensorEntry]
) -> Iterator[str]:
    """Yields the embeddings that PEFT saves with an adapter because their size was changed.

    An embedding is resized if the model has another number of tokens than the base it was made
    from. The base that `settings` name has to be a folder on this machine: mostly it is a name on
    the Hub, and recorded names are not looked up over a network. `base` are the tensors of the base
    in the checkpoint, by their plain names; `rest` the same by their names in the PEFT model.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    folder = settings.base_model_name_or_path
    if not folder or "\0" in folder or is_url(folder) or not Path(folder).is_dir():
        return
    try:
        with LocalSource(Path(folder)) as source:
            size_bytes = min(source.stat(CONFIG).size_bytes, MAX_JSON_BYTES)
            document = parse_model_config(source.read(CONFIG, 0, size_bytes), where=CONFIG)
    except InputError:
        return
    tokens = document.get("vocab_size")
    weights = {
        name.rpartition(".")[0]: entry.shape
        for name, entry in base.items()
        if name.endswith(".weight") and len(entry.shape) == _MATRIX
    }
    ends = find_vocabulary(weights)
    sizes = {weights[module][0] for module in ends if is_input_embedding(module)}
    if not isinstance(tokens, int) or not sizes or tokens in sizes:
        return
    for name in rest:
        module = name.rpartition(".")[0]
        own = make_plain_name(module)
        if own in ends and weights[own][0] in sizes:
            yield module
