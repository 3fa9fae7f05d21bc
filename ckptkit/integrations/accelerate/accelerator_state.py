"""The state that an Accelerator saves, for the Checkpointer, and its folders: to save to, to load.

The attributes with a leading underscore are accelerate's lists of prepared and registered objects,
which have no public access. Only this module reads them.

Source: `accelerate.Accelerator.save_state` and `load_state`, `accelerate.checkpointing`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from msgspec import Struct

from ckptkit.core.arguments import STOCK
from ckptkit.core.errors import CkptkitError, ResumeError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.text import a_kind
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import parse_step
from ckptkit.integrations.accelerate.whole_files import WholeFiles, capturing
from ckptkit.integrations.checkpointers import is_sharded
from ckptkit.runs.marks import STEP_FOLDER
from ckptkit.storage.locations import is_run_in
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training import step_names
from ckptkit.training.run_folders import saved_steps
from ckptkit.training.settings import Options
from ckptkit.training.sidecar import StepFile
from ckptkit.training.state import objects as rng
from ckptkit.training.state.collect import BoundModel, of_the_object
from ckptkit.training.state.objects import torch_archive
from ckptkit.training.step_names import TensorPlaces

if TYPE_CHECKING:
    from accelerate import Accelerator


AUTOMATIC_PREFIX = "checkpoint_"
_USUAL_PREFIX = "checkpoint-"
_UNKNOWN = frozenset({"MEGATRON_LM", "XLA"})  # distributed types that write otherwise
_READ = (  # the attributes of an accelerator that are read here
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
    "distributed_type",
    "is_main_process",
    "process_index",
    "project_configuration",
    "save_iteration",
    "scaler",
    "state",
    "step",
)


class SaveTarget(Struct, frozen=True):
    """The folder of a save."""

    run: Path  # the directory above it
    step: int  # the number of the save, from its name or counted
    prefix: str  # the prefix of the names of steps
    name: str | None = None  # the name of the folder if it is not that of a step; else None

    @property
    def folder(self) -> Path:
        return self.run / (self.name or f"{self.prefix}{self.step}")


class RegisteredObject:
    """An object registered for checkpointing, reduced to its state.

    It hides the type: a registered scheduler has to be saved with registered objects, and not
    with prepared schedulers.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def state_dict(self) -> Any:
        return self.target.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.target.load_state_dict(state)


def is_automatic(accelerator: Accelerator) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def run_of(accelerator: Accelerator) -> Path:
    """Returns the directory in which accelerate chooses the names of folders."""
    if accelerator.project_dir is None:
        raise UsageError(
            "automatic_checkpoint_naming is on, and no project_dir is set",
            where="Accelerator",
            hint="pass project_dir to the Accelerator",
        )
    return Path(os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints")))  # noqa: PTH100, PTH118  as accelerate makes it: without following links


def target_of(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> SaveTarget:
    """Returns where `accelerator.save_state(output_dir)` would save."""
    count = int(accelerator.save_iteration)
    if is_automatic(accelerator):
        return SaveTarget(run_of(accelerator), count, AUTOMATIC_PREFIX)
    if output_dir is None:
        raise UsageError(
            "was not passed, and automatic_checkpoint_naming is off",
            where="output_dir",
            hint="pass a directory",
        )
    return _target_at(Path(os.path.abspath(output_dir)), count)  # noqa: PTH100  links are not followed


def source_of(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> SaveTarget:
    """Returns where `accelerator.load_state(input_dir)` looks."""
    if input_dir is not None:
        return _target_at(Path(input_dir).expanduser().absolute(), 0)
    if is_automatic(accelerator):
        return SaveTarget(run_of(accelerator), 0, AUTOMATIC_PREFIX)
    raise UsageError(
        "was not passed, and automatic_checkpoint_naming is off",
        where="input_dir",
        hint="pass the directory to load",
    )


def _target_at(folder: Path, count: int) -> SaveTarget:
    match = STEP_FOLDER.fullmatch(folder.name)
    if match:
        return SaveTarget(folder.parent, int(match[2]), match[1])
    number = parse_step(folder.name)
    return SaveTarget(
        folder.parent, count if number is None else number, _USUAL_PREFIX, folder.name
    )


class LoadSource(TypedDict):
    """A folder to load, as ranks agree on it."""

    folder: str  # the directory
    ours: bool  # whether ckptkit wrote it
    # Whether it is the newest of a run, so that an older one can be loaded instead
    newest: bool


def obstacle(target: SaveTarget) -> str:
    """Returns why a folder cannot be replaced; empty if it can.

    It can if no other files are lost: if it is missing or empty, or ckptkit wrote all its files.
    """
    folder = target.folder
    if folder.name.startswith(".") or folder == folder.parent:
        return f"{folder} has a name that no step can have"
    if folder.is_symlink() or folder.is_mount():
        return f"{folder} is a link or a mount point"
    if is_run_in(folder):
        return f"{folder} is the directory that this program runs in, which cannot be replaced"
    if not folder.exists():
        return ""
    try:
        below = folder.rglob("*") if folder.is_dir() else [folder]
        paths = [path for path in below if path.is_symlink() or not path.is_dir()]
        files = {path.relative_to(folder).as_posix() for path in paths}
        ours = set(read_local_manifest(folder).files) if MANIFEST_NAME in files else set()
        others = files - ours - {MANIFEST_NAME} if ours else files
        extra = min(others, default="")
    except (OSError, CkptkitError) as error:
        extra = f"a file that cannot be read ({error})"
    return f"{folder} holds {extra}, which ckptkit did not write" if extra else ""


def examine_folder(folder: Path) -> LoadSource | None:
    """Returns a folder that the user has passed; None if it holds no sharded model."""
    if not folder.is_dir():
        raise ResumeError("no such directory", where=str(folder))
    if not (folder / step_names.model_unit(0) / METADATA).is_file():
        return None
    ours = (folder / MANIFEST_NAME).is_file()
    with suppress(OSError, CkptkitError):  # what is wrong with it, the load says
        ours = not read_local_manifest(folder).is_sealed
    return LoadSource(folder=str(folder), ours=ours, newest=False)


def find_newest_folder(run: Path, models: int, optimizers: int) -> LoadSource:
    """Returns the newest complete folder of automatic_checkpoint_naming, by what is sharded.

    A folder of stock accelerate is complete if it has all files up to the random states, which are
    written last.
    """
    units = [step_names.model_unit(i) for i in range(models)]
    units += [step_names.optimizer_unit(i) for i in range(optimizers)]
    needed = [f"{unit}/{METADATA}" for unit in units] + [step_names.random_states_file(0)]
    for step in reversed(saved_steps(run, AUTOMATIC_PREFIX) if run.is_dir() else ()):
        folder = run / step.name
        if step.complete:
            return LoadSource(folder=str(folder), ours=not step.sealed, newest=not step.sealed)
        is_ours = (folder / MANIFEST_NAME).exists()
        if not is_ours and all((folder / name).is_file() for name in needed):
            return LoadSource(folder=str(folder), ours=False, newest=False)
    raise ResumeError(
        "no complete folder of automatic_checkpoint_naming was found",
        where=str(run),
        hint="pass the folder to load",
    )


def check_layout(options: Options) -> None:
    """Refuses a layout that `accelerator.load_state` could not read."""
    if options.get("layout", "accelerate") != "accelerate":
        raise UsageError(
            f"layout={options.get('layout')!r} is not an option for an accelerator",
            where="options",
            hint="leave it out: the folder is what accelerator.save_state writes",
        )


def stock_reason(accelerator: Accelerator) -> str:
    """Returns why accelerate itself has to save; empty if ckptkit can.

    It is the same on all ranks, since they have prepared the same objects.
    """
    missing = [name for name in _READ if not hasattr(accelerator, name)]
    if missing:
        return f"this version of accelerate has no {', '.join(missing)}"
    kind, models = kind_of(accelerator), list_prepared(accelerator)[0]
    if kind in _UNKNOWN:
        return f"its distributed type is {kind}"
    if kind == "FSDP":
        form = accelerator.state.fsdp_plugin.state_dict_type
        if getattr(form, "name", form) != "SHARDED_STATE_DICT":
            return f"its state_dict_type is {getattr(form, 'name', form)}, not SHARDED_STATE_DICT"
    elif kind == "DEEPSPEED":
        engines = {a_kind(getattr(model, "checkpoint_engine", None)) for model in models}
        if engines - {"a TorchCheckpointEngine"}:
            return f"DeepSpeed writes with {', '.join(sorted(engines))}"
        if any(model.zero_nvme_offload_optimizer() for model in models):
            return "DeepSpeed keeps optimizer states on NVMe, whose files it copies itself"
    elif any(map(is_sharded, models)):
        return "its models are sharded without FSDP"
    if getattr(accelerator.project_configuration, "save_on_each_node", False):
        return "save_on_each_node is set, so that the nodes share no file system"
    return "" if models else "no model was prepared"


def kind_of(accelerator: Accelerator) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def saves_whole(accelerator: Accelerator) -> bool:
    """Returns whether its files are those of accelerate itself, or of DeepSpeed."""
    return kind_of(accelerator) != "FSDP"


def with_limit(accelerator: Accelerator, options: Options) -> Options:
    limit = accelerator.project_configuration.total_limit
    return options if limit is None else {"keep_last": max(1, int(limit)), **options}


def state_of(
    accelerator: Accelerator, registered: Iterable[RegisteredObject], *, loaders: bool = True
) -> dict[str, object]:
    models, optimizers = list_prepared(accelerator)
    state: dict[str, object] = {
        "model": models,
        # The wrapped optimizers, whose class is known.
        "optimizer": [getattr(o, "optimizer", o) for o in optimizers],
        "scheduler": list(accelerator._schedulers),  # noqa: SLF001
        "scaler": accelerator.scaler,
        "dataloader": [loader for _, loader in stateful_loaders(accelerator)] if loaders else [],
        "custom": list(registered),
    }
    return {key: value for key, value in state.items() if value is not None and value != []}


def registered_objects(accelerator: Accelerator) -> list[Any]:
    return list(accelerator._custom_objects)  # noqa: SLF001


def list_prepared(accelerator: Accelerator) -> tuple[list[Any], list[Any]]:
    """Returns the prepared models and optimizers, which accelerate keeps in private lists only."""
    return list(accelerator._models), list(accelerator._optimizers)  # noqa: SLF001


def prepared_model(accelerator: Accelerator, model: Any) -> Any:
    """Returns the FSDP1 wrapper of a model that was passed without it, else the model."""
    models, _ = list_prepared(accelerator)
    return next((m for m in models if getattr(m, "module", None) is model), model)


def stateful_loaders(accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    """Yields the dataloaders with a state, each with accelerate's name of its file."""
    for index, loader in enumerate(accelerator._dataloaders):  # noqa: SLF001
        if getattr(loader, "use_stateful_dataloader", False):
            yield f"dl_state_dict_{index}.bin" if index else "dl_state_dict.bin", loader


def files_of(accelerator: Accelerator, rank: int) -> dict[str, bytes]:
    """Returns the further files that stock `load_state` reads.

    The file with the random numbers also has accelerate's count of batches, which it needs for
    the accumulation of gradients.
    """
    states = {"step": int(accelerator.step), **rng.capture()}
    files: dict[str, bytes] = {step_names.random_states_file(rank): StepFile(torch_archive(states))}
    if rank == 0:  # stock accelerate lets all ranks write one file
        for name, loader in stateful_loaders(accelerator):
            files[name] = torch_archive(loader.state_dict())
    return files


def call_save_hooks(accelerator: Accelerator, name: str) -> dict[str, bytes]:
    """Calls the hooks of a save, and returns the files that they write."""
    hooks = list(accelerator._save_model_state_pre_hook.values())  # noqa: SLF001
    if not hooks:
        return {}
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as scratch:
        folder = Path(scratch, name)
        folder.mkdir()
        for hook in hooks:
            # Under FSDP accelerate passes no weights either.
            hook(list_prepared(accelerator)[0], [], str(folder))
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def capture_files(accelerator: Accelerator, folder: Path, options: Mapping[str, Any]) -> WholeFiles:
    """Returns the files of this rank that accelerate's own `save_state` writes.

    `folder`: an empty place of the same name, which hooks get too.
    """
    folder.mkdir()
    config = accelerator.project_configuration
    automatic, count = config.automatic_checkpoint_naming, config.iteration
    config.automatic_checkpoint_naming = False
    with of_the_object("accelerator", "save_state()", UsageError), capturing(folder) as files:
        try:
            stock_method("save_state")(accelerator, str(folder), **options)
        finally:
            config.automatic_checkpoint_naming = automatic
            config.iteration = count + 1  # also where it failed, as on the other ranks
    if not accelerator.is_main_process:  # all ranks write these, and those of the first stay
        for name in (
            step_names.scaler_file(0),
            *(name for name, _ in stateful_loaders(accelerator)),
        ):
            files.drop(name)
    return files


def models_of(accelerator: Accelerator) -> tuple[BoundModel, ...]:
    """Returns the models, for what a step says of them."""
    models, _ = list_prepared(accelerator)
    return tuple(BoundModel("model", n, m, TensorPlaces("", ())) for n, m in enumerate(models))


def stock_method(name: str) -> Callable[..., Any]:
    """Returns a method of Accelerator before its replacement."""
    from accelerate import Accelerator

    method = getattr(Accelerator, name)
    stock: Callable[..., Any] = getattr(method, STOCK, method)
    return stock


def call_load_hooks(accelerator: Accelerator, folder: Path) -> None:
    """Calls the hooks of a load; random numbers that they draw are restored."""
    hooks = list(accelerator._load_model_state_pre_hook.values())  # noqa: SLF001
    states = rng.capture() if hooks else {}
    for hook in hooks:
        hook([], str(folder))  # under FSDP accelerate passes no models either
    rng.restore(states)
