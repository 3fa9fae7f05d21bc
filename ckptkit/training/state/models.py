"""What this rank holds of a model, however it is wrapped, found without communicating.

It is looked at outside of the caller's modes of torch: see `plain_torch`.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch._C._dynamo import eval_frame
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _python_dispatch as dispatch

from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.training.state.dtensors import (
    Copies,
    Meshes,
    local_part,
    unwrap_dtensor,
)
from ckptkit.training.state.fsdp import (
    FlatUnit,
    cast_buffers,
    check_registered,
    check_unused,
    flat_shards,
    flat_units,
    layout_facts,
    managed_parameters,
    strategy_of,
)
from ckptkit.training.state.memory_changes import KeptPieces, watched_by
from ckptkit.training.state.objects import flatten, step_of
from ckptkit.training.state.pieces import (
    ObjectValue,
    Piece,
    Replicas,
    ShardLayout,
    Watched,
)
from ckptkit.training.state.quant_states import lasting_scales, lost_scales, packed_weights
from ckptkit.training.state.structures import Collected
from ckptkit.training.step_names import TensorPlaces, clean_fqn, parallel_prefixes, wrapper_names

logger = logging.getLogger(__name__)


class _Structure(Struct, frozen=True):
    """How a model is wrapped; kept as long as its modules stay the same."""

    modules: tuple[nn.Module, ...]  # all of them, those of several names once per name
    names: tuple[str, ...]  # of each module in the one that holds it
    parallel: tuple[str, ...]  # the prefixes of data parallel wrappers
    flat: bool  # whether some are wrapped by FSDP1
    reshards: tuple[Callable[[], None], ...]  # what shards the parameters of FSDP2 again
    places: TensorPlaces  # the keys of the tensors in a step
    world: Copies  # the number of ranks of the job, and this one
    group: Copies | None  # the ranks of the data parallel wrapper, if any
    equal: frozenset[int]  # the identities of the parameters that it keeps equal
    meshes: Meshes  # of the DTensors found so far
    where: str  # the model's path in the user's state, for messages

    @classmethod
    def of(cls, model: nn.Module, places: TensorPlaces, world: Copies, where: str) -> _Structure:
        flat = False
        group: Copies | None = None
        ranks: Sequence[int] = ()
        equal: set[int] = set()
        reshards: list[Callable[[], None]] = []
        for module in model.modules():
            flat = flat or isinstance(module, FullyShardedDataParallel)
            if isinstance(module, DistributedDataParallel):
                ranks = dist.get_process_group_ranks(module.process_group)
                group = Copies(len(ranks), dist.get_rank(module.process_group))
                ignored = module.parameters_to_ignore
                named = module.module.named_parameters()
                equal |= {id(value) for name, value in named if name not in ignored}
            reshard = getattr(module, "reshard", None)  # FSDPModule moved between torch versions
            if callable(reshard) and callable(getattr(module, "unshard", None)):
                reshards.append(reshard)
        return cls(
            *_outline(model),
            parallel_prefixes(model),
            flat,
            tuple(reshards),
            places,
            world,
            group,
            frozenset(equal),
            Meshes(group or Copies(), ranks),
            where,
        )


class ModelWalk:
    """Walks one model, again for each save; what does not change in between is kept."""

    def __init__(
        self, model: nn.Module, places: TensorPlaces, *, world: Copies, where: str = "model"
    ) -> None:
        self._model = model
        self._place = places, world, where
        self._structure = _Structure.of(model, *self._place)
        self._kept: tuple[tuple[object, ...], KeptPieces, ModelView] | None = None
        self._communicates = False  # whether its hooks of state_dict() ask other ranks
        self._tied: list[list[str]] = []  # the names of tied tensors, at the last look

    def look(self, *, keep: bool = False) -> ModelView:
        """Returns what this rank holds of the model now.

        With `keep`, as saves want it, the answer is kept and returned again as long as all modules
        and tensors are the same and stay where they are; it has the scales of packed weights that
        state dicts lack, which need not be loaded; and what a resume would not give back is
        refused.
        """
        modules, member_names = _outline(self._model)
        before = self._structure.modules
        is_same = len(modules) == len(before) and all(map(operator.is_, modules, before))
        if not is_same or member_names != self._structure.names:  # such as of a new head
            self._structure, self._kept = _Structure.of(self._model, *self._place), None
        check_unused(self._structure.modules)
        for reshard in self._structure.reshards:  # evaluations may leave root parameters whole
            reshard()
        check_registered(self._structure.modules)
        kept = self._kept
        if keep and kept is not None:
            names, outline, view = kept
            now, tensors, managed = self._members(view.managed)
            pieces = outline.again(tensors, managed) if now == names else None
            if pieces is not None:
                return view.holding(pieces)
        view, identities = self._fresh(keep=keep)
        start = len(self._structure.places.path)
        self._tied = [
            [".".join(map(str, path[start:])) for path in (piece.key_path, *piece.aliases)]
            for piece in view.pieces
            if piece.aliases
        ]
        self._kept = None
        names, tensors, managed = self._members(view.managed)
        # Hooks may have made values only for this state dict, so that the next one may differ.
        if keep and identities <= {id(tensor) for tensor in tensors}:
            bare = KeptPieces.of(view.pieces, tensors, managed)
            self._kept = None if bare is None else (names, bare, view.holding([]))
        return view

    def _fresh(self, *, keep: bool) -> tuple[ModelView, set[int]]:
        kinds = UninitializedParameter, UninitializedBuffer
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        for name, tensor in named:
            if isinstance(tensor, kinds):
                raise UsageError(
                    "has no shape yet, as it belongs to a lazy module",
                    where=name,
                    hint="call the model once before",
                )
        flat, parallel = self._structure.flat, self._structure.parallel
        units = flat_units(self._model, parallel) if flat else ()
        entries = list(self._named(units))
        if keep and flat:
            entries = self._with_original_buffers(entries)
        packed = packed_weights(self._model, parallel)
        if keep:
            entries += lost_scales(packed, {name for name, _ in entries})
        view = ModelView(
            self._structure,
            units,
            entries,
            lasting_scales(packed),
            _uncompared(self._model, parallel),
            for_save=keep,
        )
        for raw, parameter in self._model.named_parameters():
            if id(parameter) not in view.slots:  # state_dict() lacks it, an optimizer may have it
                fqn = clean_fqn(raw, parallel)
                view.slots[id(parameter)] = (view.slot(fqn, parameter),)
        return view, {id(value) for _, value in entries}

    def _members(
        self, managed: frozenset[int]
    ) -> tuple[tuple[object, ...], list[torch.Tensor], list[torch.Tensor]]:
        """Returns names and flags of all tensors of the model, the tensors, the managed ones."""
        names: list[object] = []
        trained: list[bool] = []
        tensors: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for module in self._structure.modules:
            parameters, buffers, _, unsaved = members_of(module)
            if buffers:
                names.append(frozenset(unsaved))
            for members in (parameters, buffers):
                for name, tensor in members.items():
                    if tensor is None:
                        continue
                    trained.append(tensor.requires_grad)
                    if id(tensor) in managed:
                        others.append(tensor)
                    else:
                        names.append(name)
                        tensors.append(tensor)
        shards, managed_too = flat_shards(self._model) if self._structure.flat else ([], [])
        return (*names, *trained), [*tensors, *shards], [*others, *managed_too]

    def facts(self) -> dict[str, Any]:
        """Describes the last look. Rank 0 asks alone, so nothing of the model is called here."""
        mesh = self._structure.meshes.largest
        units: tuple[FlatUnit, ...] = ()
        if self._structure.flat:
            units = flat_units(self._model, self._structure.parallel)
            strategy = f"fsdp1:{strategy_of(self._model)}"
        elif self._structure.reshards:
            strategy = "fsdp2"
        elif mesh is not None:
            strategy = "dtensor"
        else:
            strategy = "plain" if self._structure.group is None else "ddp"
        return {
            "strategy": strategy,
            "wrappers": wrapper_names(self._model),
            "mesh": None
            if mesh is None
            else {"shape": list(mesh.mesh.shape), "names": list(mesh.mesh_dim_names or ())},
            "tied": self._tied,
            "flat_parameters": layout_facts(units),
        }

    def _named(self, units: tuple[FlatUnit, ...]) -> Iterator[tuple[str, object]]:
        if not self._structure.flat and not self._communicates:
            # The parameters themselves: detaching each DTensor would take most of the time.
            try:
                with _WithoutCollectives():  # type: ignore[no-untyped-call]
                    named = self._model.state_dict(keep_vars=True)
            except CkptkitError:
                raise
            except _CollectiveFoundError as error:
                # This rank may look at another moment than others, which would not take part.
                self._communicates = True
                logger.info(
                    "%s: a hook of its state_dict() calls %s, so hooks are left out, and tensors"
                    " are saved as they say themselves where their parts are",
                    *(self._structure.where, error),
                )
            except Exception as error:
                raise SaveError(
                    f"its state_dict(keep_vars=True) raised {type(error).__name__}: {error}",
                    where=self._structure.where,
                    hint="this is code of the model itself, which has to take these arguments",
                ) from error
            else:
                for name, value in named.items():
                    yield clean_fqn(name, self._structure.parallel), value
                return
        managed = managed_parameters(units)  # FSDP1's own state_dict() would gather these
        # Modules may hold what is left of one under its name, such as bitsandbytes' packed weight
        # on memory that was given back.
        names = {name for unit in units for part in unit.parts for name in part.names}
        for raw, module in self._model.named_modules(remove_duplicate=False):
            own: dict[str, object] = {}
            prefix = clean_fqn(raw, self._structure.parallel)
            # This is what state_dict() calls for each module, without hooks such as FSDP1's.
            try:
                with _WithoutCollectives():  # type: ignore[no-untyped-call]
                    module._save_to_state_dict(own, f"{prefix}." if prefix else "", keep_vars=True)  # noqa: SLF001
            except _CollectiveFoundError as error:
                raise SaveError(
                    f"its state needs the other ranks: {error} was called for it",
                    where=f"{self._structure.where}, module {prefix or type(module).__name__!r}",
                    hint="pass the state dict that all ranks have made together, with"
                    ' layout="dcp", instead of the model',
                ) from error
            for name, value in own.items():
                if id(value) not in managed and name not in names:
                    yield name, value

    def _with_original_buffers(self, entries: list[tuple[str, object]]) -> list[tuple[str, object]]:
        """Returns the entries with buffers in the dtype that they had before FSDP1 cast them."""
        dtypes = cast_buffers(self._model, self._structure.parallel)
        originals: dict[int, torch.Tensor] = {}
        restored: list[tuple[str, object]] = []
        for name, entry in entries:
            value, dtype = entry, dtypes[name][0] if name in dtypes else None
            if isinstance(entry, torch.Tensor) and dtype not in {None, entry.dtype}:
                value = originals.setdefault(id(entry), entry.to(dtype))
            restored.append((name, value))
        return restored


class _CollectiveFoundError(Exception):
    """Names a collective that code of a model was about to issue."""


class _WithoutCollectives(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives of the code that runs in it, before they reach any other rank."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"} and "wait" not in str(func):
            raise _CollectiveFoundError(str(func))
        return func(*args, **kwargs or {})


class ModelView(Collected):
    """What this rank holds of a model at one moment; not changed once a walk has returned it."""

    def __init__(
        self,
        structure: _Structure,
        units: tuple[FlatUnit, ...],
        entries: list[tuple[str, object]],
        scales: frozenset[int],
        uncompared: Container[str],
        *,
        for_save: bool,
    ) -> None:
        super().__init__()
        meshes, group = structure.meshes, structure.group
        meshes.learn(value for _, value in entries)
        extent = units[0].extent if units else meshes.extent() or group or structure.world
        self._structure = structure
        # the same object in views that differ in the tensors of their pieces only
        self.origin = object()
        self._copies = Replicas(*(group or extent))
        # by the identity of the object that an optimizer has as a parameter: the original
        # parameters that it stands for, several for a flat parameter of FSDP1
        self.slots: dict[int, tuple[ShardLayout, ...]] = {}
        self.meshes = meshes  # the device meshes of the model
        # which ranks hold what there is once per model
        self.values = Replicas(*extent, spread=False)
        compared = Replicas(*extent, spread=False, compared=True)
        # the identities of the parameters that flat ones of FSDP1 stand for
        self.managed = managed_parameters(units)
        # Not an attribute, since a view must not keep parameters alive.
        parameters = {fqn: own for unit in units for fqn, own in self._take_unit(unit)}
        parameters |= {n: value for n, value in entries if isinstance(value, nn.Parameter)}
        for names, tensor, tied in _without_ties(entries):
            slot = self.slot(names[0], tensor)
            self.slots[id(tensor)] = (slot,)
            if slot.replicas is self.values and names[0] not in uncompared:
                slot = replace(slot, replicas=compared)
            local = local_part(tensor, names[0])
            # Neither of the two counts the changes that are made through the other one.
            inner = unwrap_dtensor(tensor)
            further = [] if inner is tensor else [inner]
            watched = watched_by(tensor, *further, tied=tied)
            if id(tensor) in scales:  # frozen if the packed weight is
                owner = parameters.get(names[0].rpartition(".")[0])
                watched = () if owner is None else watched_by(owner, tensor)
            self._add(slot, names, local, watched)
        # the names of all other values in its state dict, such as extra states of modules
        self.extra = tuple(
            name
            for name, value in entries
            if not isinstance(value, torch.Tensor) or EXTRA_STATE in name.split(".")
        )
        writes = self.values.own == 0
        for name, value in entries:
            unit, path = structure.places.of(name)
            if isinstance(value, torch.Tensor):
                is_extra = name.rpartition(".")[2] == EXTRA_STATE
                if writes and is_extra and type(value) is nn.Parameter:
                    # It is stored as a tensor; only its structure has that it is a parameter.
                    self.structures.append((unit, path, (("parameter", (), value.requires_grad),)))
            elif for_save:
                where = structure.where + step_of(name)
                self.take(unit, path, value, where, self.slot, writes=writes)
            else:
                self._take_live(unit, path, value)

    def _take_unit(self, unit: FlatUnit) -> Iterator[tuple[str, nn.Parameter]]:
        """Adds a flat parameter, and yields what holds each of its original ones."""
        self.slots[id(unit.parameter)] = tuple(part.in_shard for part in unit.parts)
        for part in unit.parts:
            own = part.assigned if part.assigned is not None else part.parameter
            own = unit.parameter if own is None else own
            watched = watched_by(own, unit.parameter, unit.shard)
            if part.assigned is None or part.on_its_own is None:
                self._add(part.in_shard, part.names, unit.shard, watched)
            else:
                self._add(part.on_its_own, part.names, local_part(part.assigned), watched)
            if part.parameter is not None and part.on_its_own is not None:
                self.slots[id(part.parameter)] = self.slots[id(own)] = (part.on_its_own,)
            yield part.fqn, own

    def _take_live(self, unit: str, start: KeyPath, value: object) -> None:
        """Adds values that a resume replaces, which need not all be fit to be saved."""
        for path, leaf in flatten(value, start):
            if isinstance(leaf, torch.Tensor):
                slot = self.slot(".".join(map(str, path)), leaf)
                self.pieces.extend(slot.pieces(unit, path, local_part(leaf)))
            elif self.values.own == 0:
                self.objects.append(ObjectValue(unit, path, leaf))

    def _add(
        self, slot: ShardLayout, names: Sequence[str], local: torch.Tensor, watched: Watched
    ) -> None:
        paths: dict[str, list[KeyPath]] = {}
        for name in names:
            unit, key_path = self._structure.places.of(name)
            paths.setdefault(unit, []).append(key_path)
        for unit, (path, *aliases) in paths.items():
            self.pieces.extend(slot.pieces(unit, path, local, aliases, watched))

    def holding(self, pieces: list[Piece]) -> ModelView:
        """Returns the same view with other pieces."""
        view = copy.copy(self)
        view.pieces = pieces
        return view

    def slot(self, fqn: str, tensor: torch.Tensor) -> ShardLayout:
        copies = self._copies if id(tensor) in self._structure.equal else self.values
        return self._structure.meshes.slot(fqn, tensor, self.values, copies)


def members_of(
    module: nn.Module,
) -> tuple[
    dict[str, nn.Parameter | None],
    dict[str, torch.Tensor | None],
    dict[str, nn.Module | None],
    set[str],
]:
    """Returns the dictionaries of a module's own parameters, buffers and child modules.

    The last value has the names of buffers that are not saved.

    The public iterators take ten times as long, leave out ties, and give no way to set one.
    """
    return module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set  # noqa: SLF001 - see above


def _outline(model: nn.Module) -> tuple[tuple[nn.Module, ...], tuple[str, ...]]:
    """Returns all modules, and their names in those that hold them, quicker than `modules()`."""
    modules: list[nn.Module] = [model]
    names: list[str] = []
    for module in modules:  # which grows
        for name, child in members_of(module)[2].items():
            if child is not None:
                names.append(name)
                modules.append(child)
    return tuple(modules), tuple(names)


def _without_ties(
    entries: Iterable[tuple[str, object]],
) -> Iterator[tuple[list[str], torch.Tensor, list[torch.Tensor]]]:
    """Yields each tensor once, with all its names, and further objects that are the same."""
    distinct: dict[Hashable, tuple[list[str], torch.Tensor, list[torch.Tensor]]] = {}
    for name, value in entries:
        if isinstance(value, torch.Tensor):
            # A key that two tensors share only if they are one; the same on all ranks.
            key: Hashable = id(value)
            dense = value.layout is torch.strided and value.device.type != "meta"
            if type(value) in {torch.Tensor, nn.Parameter} and dense and value.numel():
                key = value.data_ptr(), value.dtype, value.shape, value.stride(), value.device
                key = (*key, value.is_conj(), value.is_neg())
            names, first, tied = distinct.setdefault(key, ([], value, []))
            names.append(name)
            if value is not first:
                tied.append(value)
    yield from distinct.values()


def _uncompared(model: nn.Module, parallel: Sequence[str]) -> frozenset[str]:
    """Returns the names of buffers that may differ between ranks, and are right all the same.

    DDP gives all ranks those of rank 0 before each forward pass, and training does not read the
    statistics that normalisations keep of each rank's own batches.
    """
    found: set[str] = set()
    for raw, module in model.named_modules(remove_duplicate=False):
        is_broadcast = isinstance(module, DistributedDataParallel) and module.broadcast_buffers
        if is_broadcast or isinstance(module, _NormBase):
            buffers = module.named_buffers(raw, remove_duplicate=False)
            found.update(clean_fqn(name, parallel) for name, _ in buffers)
    return frozenset(found)


_WITHOUT_DATA = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")


@contextmanager
def plain_torch() -> Iterator[str]:
    """Suspends the caller's modes of torch, and disables autograd.

    What lasts from one call to the next must not depend on the modes: a view made under
    `inference_mode` cannot be written to outside of it, and a default device would allocate tensors
    elsewhere. The default dtype and deterministic algorithms belong to the whole process and stay.
    Yields a mode under which the state cannot be read or written; empty for none.
    """
    with ExitStack() as undo:
        active: list[Any] = []
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - disabling them is private, and slow to import
            active = undo.enter_context(dispatch._disable_current_modes()) or []  # noqa: SLF001
        # Inside a function under torch.compile, calls from here must not be compiled.
        undo.callback(eval_frame.set_eval_frame, eval_frame.set_eval_frame(None))
        while torch._C._len_torch_function_stack():  # noqa: SLF001 - such as of torch.set_default_device
            mode = torch._C._pop_torch_function_stack()  # noqa: SLF001 - torch.overrides takes off one only
            undo.callback(torch._C._push_on_torch_function_stack, mode)  # noqa: SLF001
        undo.enter_context(torch._C._DisableAutocast())  # noqa: SLF001 - for all devices
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.no_grad())
        kinds = [kind.__name__ for mode in active for kind in type(mode).__mro__]
        unsuited = next((kind for kind in kinds if kind in _WITHOUT_DATA), "")
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            unsuited = "a transform of torch.func"
        yield unsuited


def check_modes(unsuited: str, where: str) -> None:
    """Refuses a call under such a mode."""
    if unsuited:
        raise UsageError(
            f"{unsuited} is active, under which tensors are not those of the training",
            where=where,
            hint="make the call outside of it",
        )
