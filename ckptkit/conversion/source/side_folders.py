"""The configuration, tokenizer and other side files of a checkpoint."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.consumers.folder_truth import (
    MAX_JSON_BYTES,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    TELLING,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FolderTexts,
    Truth,
    parse_texts,
    tell_class,
    tell_truth,
)
from ckptkit.consumers.sentence_modules import find_first_folder, move_first
from ckptkit.consumers.side_files import (
    Listed,
    SideFile,
    choose_companions,
    choose_side_files,
    has_auto_map,
    is_of_tokenizer,
    is_side_file,
    is_tokenizer_file,
    rewrite_side_file,
)
from ckptkit.consumers.table import (
    CONFIG,
    CONSUMERS,
    DIFFUSERS,
    GENERATION,
    MODULES,
    PIPELINE_INDEX,
    PLAIN,
    find_consumer,
)
from ckptkit.consumers.tokenizer_files import (
    OLD_FILES,
    TokenizerChange,
    change_settings,
    compare_tokenizers,
    list_forms_of_5,
    read_old_files,
)
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.conversion.source.paths import (
    check_path,
    find_model,
    make_absolute,
    open_folder,
    open_root,
)
from ckptkit.core import olmo_core
from ckptkit.core.errors import (
    AmbiguousSourceError,
    FormatError,
    InputError,
    LimitError,
    MissingFileError,
    NotACheckpointError,
    UsageError,
)
from ckptkit.core.frameworks import (
    BESIDE_RUNS,
    COPIES,
    OLMO_CORE,
    PLAIN_FOLDERS,
    SETTINGS,
    is_unit_folder,
)
from ckptkit.core.index import MOST_WRAPPERS, KeyPath, Shape
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, SIDE_FOLDER, Manifest
from ckptkit.core.model_configs import parse_json_object, parse_model_config, to_json
from ckptkit.core.text import Aside, join_first
from ckptkit.formats.dcp.reader import BlobRef, DcpReader, open_blob
from ckptkit.formats.discovery import RELEASE, find_step, parse_step
from ckptkit.formats.parsing import parse_json
from ckptkit.formats.pickle.torch_values import parse_values
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.options import ConsolidateRequest, TokenizerOrigin, check_choice
from ckptkit.plan.plan import OutputFile, literal_file
from ckptkit.runs.step_manifests import check_file, step_folder
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.locations import path_within
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.overlay import MemorySource
from ckptkit.storage.places import PathLike, Place, is_url

if TYPE_CHECKING:
    from ckptkit.storage.remote.source import RemoteSource

_SHARDED_FORMATS = {"dcp", "dcp-hf", "megatron"}
SIDE_FOLDERS = (SIDE_FOLDER, *SETTINGS, *BESIDE_RUNS.values())
"""Folders that hold configurations and tokenizers, and no model of their own."""
_SHALLOW = (*SIDE_FOLDERS, "additional_chat_templates")
_HUB, _BUCKET = "hf://", "buckets/"
_AUTO_MAP = "auto_map"
# Units of steps, and names of any folder.
_ANY_MODEL = {*PLAIN_FOLDERS, *COPIES, "pretrained_model", "consolidated"}
# Files and folders of a training step, which a model folder does not have.
_OF_STEPS = (
    *("trainer_state.json", "random_states_0.pkl", "optimizer.pt", "optimizer.bin", RUN_FACTS),
    *("optimizer", "optim", "optimizer_0", "context"),
)
_NAMED = 3


class SideChoice(Struct, frozen=True):
    """Where a user wants side files to come from, before all other folders.

    Attributes:
        config: A folder with a `config.json`, or such a file by any name.
        tokenizer: A folder with a tokenizer, or a file of one.
        tokenizer_from: Whose tokenizer is written: that of the step, or of the base. `auto` takes
            the base's files if the step has the same tokens.
    """

    config: PathLike | None = None
    tokenizer: PathLike | None = None
    tokenizer_from: TokenizerOrigin = "auto"


class SideFolders:
    """The folders that can hold side files, nearest to the weights first.

    Attributes:
        base: The model folder of `--base`, or None.
        sources: The folders, by their paths.
        notes: Which model `--base` and the like name.
        consumer: The library that loads the output; known once files are chosen.
    """

    def __init__(
        self,
        stack: ExitStack,
        checkpoint: OpenedCheckpoint,
        base: PathLike | None,
        choice: SideChoice = SideChoice(),
        request: ConsolidateRequest | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.consumer = PLAIN
        self._modules: Any = None
        self._writer = checkpoint.index.run.writer
        check_choice("--tokenizer-from", choice.tokenizer_from, get_args(TokenizerOrigin))
        self._tokenizer_from = choice.tokenizer_from
        self._replaced: dict[str, bytes] = {}
        self._first = ""  # the folder of the first module in that of a base, if it has one
        self.base = None if base is None else self._find(base, "--base")
        self.sources: dict[str, Source] = {}
        self._noted: dict[str, str] = {}  # folders that are not those of the weights, and where
        self._proofs: dict[str, tuple[Manifest, str] | None] = {}  # and what names begin with
        base_folders: list[Source] = []
        asked = request or ConsolidateRequest()
        if self.base is not None:
            base_folders = self._open_base(stack, self.base, checkpoint, asked)
        # What the state dict itself holds comes first, then what is beside the weights.
        formats = {unit.candidate.format for unit in checkpoint.units}
        # Others, such as the pipelines of diffusers, have folders of these names as well.
        is_sharded = not formats.isdisjoint(_SHARDED_FORMATS)
        of_models = [name for name in SETTINGS if name in COPIES or name.startswith(".")]
        names = (SIDE_FOLDER, *(SETTINGS if is_sharded else of_models), "")
        models = [unit.candidate.folder for unit in checkpoint.units if not unit.is_optimizer]
        for place, files in _list_embedded(checkpoint):
            self.sources[place] = MemorySource(files, place)
            self._noted[place] = ""
        for root in checkpoint.source.folders:
            above: dict[str, RemoteSource | None] = {}
            if checkpoint.manifest is not None:
                saved = _in(root.location, step_folder(checkpoint.units[0].candidate.folder))
                self._proofs[_in(saved, SIDE_FOLDER)] = checkpoint.manifest, f"{SIDE_FOLDER}/"
            homes, top = [], make_absolute(root.location)
            for folder in dict.fromkeys([*models, checkpoint.folder]):
                home = _in(root.location, folder)
                homes += [home, *_above(home, top, partial(_is_model_folder, checkpoint, folder))]
            paths = [(_in(home, name), name) for home in homes for name in names]
            paths += [
                (_in(_parent(home), name), "assets")
                for home in homes
                if (name := BESIDE_RUNS.get(posixpath.basename(home))) is not None
            ]
            for path, name in dict(paths).items():
                if path not in self.sources:
                    source = _open_if_there(stack, root, path, above)
                    if source is not None:
                        self.sources[path] = source
                        if not f"{make_absolute(path)}/".startswith(f"{top}/"):
                            self._noted[path] = ", above the source"
                        elif name not in {"", SIDE_FOLDER}:
                            self._noted[path] = ""
        keeps_names = asked.map == "none" or asked.names == "live"
        is_described = self._writer.startswith(OLMO_CORE) and not base_folders and not keeps_names
        for location, source in list(self.sources.items()) if is_described else ():
            made = _make_config(source)
            if made is not None:
                place = f"{_in(location, CONFIG)}: model"
                self.sources[place] = MemorySource({CONFIG: to_json(made)}, place)
                self._noted[place] = ""
                self.notes.append(f"config.json was made from OLMo-core's own in {location}")
        # The base is asked last; what options name is taken before all of these.
        self._base_location = base_folders[-1].location if base_folders else None
        for base_folder in base_folders:
            self.sources.setdefault(base_folder.location, base_folder)
        self._searched = tuple(self.sources)
        self._lone_config = ""
        self._config: list[Listed] = []
        self._tokenizer: list[Listed] = []
        if choice.config is not None:
            self._config = [self._list_config(stack, choice.config)]
        if choice.tokenizer is not None:
            self._tokenizer = [self._list_tokenizer(stack, choice.tokenizer)]
            if choice.tokenizer_from != "auto":
                raise UsageError(
                    f"cannot be combined with --tokenizer-from {choice.tokenizer_from}",
                    where=f"--tokenizer {choice.tokenizer}",
                    hint="leave one of the two out",
                )

    def _open_base(
        self,
        stack: ExitStack,
        place: Place,
        checkpoint: OpenedCheckpoint,
        request: ConsolidateRequest,
    ) -> list[Source]:
        """Opens the folder of the base; the last one of the result has its configuration.

        Of a pipeline of diffusers, it is the component whose tensors are to be written; of
        sentence-transformers, the first module may have a folder of its own.
        """
        folder = open_folder(stack, place, "--base")
        paths = set(folder.walk(1))
        if CONFIG in paths:
            return [folder]
        if PIPELINE_INDEX in paths:
            from ckptkit.plan.selection import select_model  # few bases are a pipeline

            select, model = checkpoint.select, checkpoint.index.of_part("model")
            entries = [e for e in model if select in {None, e.tree}]
            if request.strip_prefix or request.include or request.exclude:
                request = replace(request, select=select)
                entries = select_model(checkpoint.index, request, location=checkpoint.path)
            self.base = find_component(place, {str(e.name): e.shape for e in entries})
            component = posixpath.basename(self.base)
            self.notes.append(Aside(f"--base {place}: its component {component!r} is used"))
            return [open_folder(stack, self.base, "--base")]
        if MODULES in paths:
            size = folder.stat(MODULES).size_bytes
            self._modules = parse_json(folder.read(MODULES, 0, size), where=MODULES)
            first = find_first_folder(self._modules)
            if any(path.startswith(f"{first}/") for path in paths):
                self._first = first
                self.base = place.beside(posixpath.join(place, first))
                return [folder, open_folder(stack, self.base, "--base")]
        return [folder]

    def _find(self, path: PathLike, option: str) -> Place:
        place, notes = find_model(path, option)
        self.notes += notes
        return place

    def _list_config(self, stack: ExitStack, path: PathLike) -> Listed:
        source, only = self._open_given(stack, path, "--config")
        if only is None and not is_there(source, CONFIG):
            raise NotACheckpointError(
                f"holds no {CONFIG!r}",
                where=f"--config {path}",
                hint="name a folder with one, or the file itself",
            )
        self._lone_config = only or ""
        listed = _list_sizes(source)
        if only is not None:
            listed = {CONFIG: source.stat(only).size_bytes}
        return source.location, listed

    def _list_tokenizer(self, stack: ExitStack, path: PathLike) -> Listed:
        source, only = self._open_given(stack, path, "--tokenizer")
        listed = _list_sizes(source)
        if only is not None:
            listed = {name: size for name, size in listed.items() if name == only}
        if not any(map(is_tokenizer_file, listed)):
            raise NotACheckpointError(
                "is no tokenizer" if only is not None else "holds no tokenizer",
                where=f"--tokenizer {path}",
                hint="name a folder that `tokenizer.save_pretrained` wrote, or its tokenizer.json",
            )
        return source.location, listed

    def _open_given(
        self, stack: ExitStack, path: PathLike, option: str
    ) -> tuple[Source, str | None]:
        """Opens a folder that an option names, or the folder of the file that it names."""
        check_path(path, option)
        place = self._find(path, option)
        try:
            source, only = open_root(stack, place)
        except NotACheckpointError as error:
            hint = error.hint or "name a folder, a file, or a model on the Hub"
            raise NotACheckpointError(error.message, where=f"{option} {path}", hint=hint) from error
        self.sources.setdefault(source.location, source)
        return source, only

    def find_config(self) -> dict[str, Any] | None:
        """Returns the model's configuration, or None; no other side file is looked at."""
        listed = []
        for origin in self._searched:
            with suppress(InputError):
                size = self.sources[origin].stat(CONFIG).size_bytes
                if _read_of_olmo_core(self.sources[origin], size) is None:
                    listed.append((origin, {CONFIG: size}))
        chosen, _ = choose_side_files(listed, allow_code=False, config=self._config)
        path = self._lone_config or CONFIG
        return self.config([replace(file, path=path) for file in chosen if file.name == CONFIG])

    def choose(self, *, allow_code: bool) -> tuple[list[SideFile], tuple[str, ...]]:
        """Chooses side files by their sizes; returns them, and notes on where they are from."""
        listed = [(origin, self._list(origin)) for origin in self._searched]
        chosen, code = choose_side_files(
            listed, allow_code=allow_code, config=self._config, tokenizer=self._tokenizer
        )
        if self._lone_config:
            own = (replace(f, path=self._lone_config) if f.name == CONFIG else f for f in chosen)
            chosen = list(own)
        notes: list[str] = []
        if not self._tokenizer:
            chosen = self._choose_tokenizer(chosen, listed, notes)
        origin = next((file.origin for file in chosen if file.name == CONFIG), "")
        config, names = self.config(chosen), set[str]()
        for folder, own_names in listed:
            names |= own_names.keys()
            if folder == origin:
                break
        self.consumer = find_consumer(config, names, self._writer)
        there = {file.name for file in chosen}
        companions = choose_companions(listed, self.consumer, origin)
        if self._first and self._base_location and self.consumer.leading == MODULES:
            # The first module is written at the root, and the list of modules says so.
            inside = f"{self._first}/"
            companions = [file for file in companions if not file.name.startswith(inside)]
            home, inner = self._base_location, dict(listed)[self._base_location]
            beside = [name for name in inner if "/" not in name and not is_side_file(name)]
            companions += [SideFile(name, home, name, inner[name]) for name in beside]
            self._replaced[MODULES] = to_json(move_first(self._modules, self._first))
        chosen += [file for file in companions if file.name not in there]
        chosen.sort(key=lambda file: file.name)
        for folder, where in self._noted.items():
            taken = [file.name for file in chosen if file.origin == folder]
            if taken:
                notes.append(Aside(f"from {folder}{where}: {', '.join(taken)}"))
        if code:
            text = f"python files were left out: {join_first(code, len(code), _NAMED)}"
            notes.append(f"{text}; pass --allow-code to copy them")
        return chosen, tuple(notes)

    def _choose_tokenizer(
        self, chosen: list[SideFile], listed: Sequence[Listed], notes: list[str]
    ) -> list[SideFile]:
        """Takes the base's files of a tokenizer where the step has the same tokens."""
        step = [file for file in chosen if is_of_tokenizer(file.name)]
        rest = [file for file in chosen if not is_of_tokenizer(file.name)]
        base = [
            SideFile(name, origin, name, size)
            for origin, names in listed
            if origin == self._base_location and any(map(is_tokenizer_file, names))
            for name, size in names.items()
            if is_of_tokenizer(name)
        ]
        if not step or not base or any(file.origin == self._base_location for file in step):
            if self._tokenizer_from == "base" and not base:
                raise NotACheckpointError(
                    "no tokenizer was found there" if self.base else "no --base was named",
                    where="--tokenizer-from base",
                    hint="name a folder with one with --base, or leave --tokenizer-from out",
                )
            return chosen
        before, after = self.texts(base), self.texts(step)
        if before.tokenizer is None:
            limit = TELLING[TOKENIZER]
            old = [f for f in base if f.name in OLD_FILES and f.size_bytes <= limit]
            before = replace(before, tokenizer=read_old_files({f.name: self.read(f) for f in old}))
        change = compare_tokenizers(after, before)
        if self._tokenizer_from == "base":
            if isinstance(change, str):
                notes.append(
                    f"the tokenizer of the base is written; that of the step differs: {change}"
                )
            return [*rest, *base]
        if isinstance(change, str) or self._tokenizer_from == "step":
            forms = list(list_forms_of_5(after.tokenizer_config))
            why = f", as {change}" if isinstance(change, str) else ""
            option = "" if why else "; --tokenizer-from base writes the files of the base"
            if forms:
                notes.append(
                    f"the tokenizer of the step is written{why}, in the form of transformers 5:"
                    " readers with transformers 4, such as older engines, refuse"
                    f" {' and '.join(forms)}{option}"
                )
            return chosen
        return [*rest, *self._change_base(base, step, change, notes)]

    def _change_base(
        self,
        base: list[SideFile],
        step: Sequence[SideFile],
        change: TokenizerChange,
        notes: list[str],
    ) -> list[SideFile]:
        """Returns the files of the base's tokenizer, with what training changed beside tokens."""
        said = "the tokenizer has the tokens of the base: its files are written"
        changed = [f"'{key}'" for key in change.settings]
        for file in base:
            is_setting = file.name in {TOKENIZER_CONFIG, SPECIAL_TOKENS, PROCESSOR_TEMPLATE}
            if is_setting and file.size_bytes <= MAX_JSON_BYTES:
                document = parse_json_object(self.read(file), where=file.path)
                new = change_settings(file.name, document, change)
                if new != document:
                    self._replaced[file.name] = to_json(new)
        if change.template:
            changed.append("the chat template")
            own = [file for file in step if file.name == TEMPLATE]
            base = [file for file in base if file.name != TEMPLATE] + own
            if not own:  # it stands in a configuration
                data = change.template.encode()
                base.append(SideFile(TEMPLATE, step[0].origin, TOKENIZER_CONFIG, len(data)))
                self._replaced[TEMPLATE] = data
        if changed:
            said += f", with {', '.join(changed)} of the step"
        if change.parts:
            said += f"; the step writes {', '.join(map(repr, change.parts))} in another way"
        notes.append(Aside(f"{said}; --tokenizer-from step writes those of the step"))
        # One of both has it; readers without sentencepiece need it.
        is_there = any(file.name == TOKENIZER for file in base)
        return base + [file for file in step if file.name == TOKENIZER and not is_there]

    def _list(self, origin: str) -> dict[str, int]:
        """Returns the sizes of the side files of a folder, without a `config.json` of others."""
        source = self.sources[origin]
        sizes = _list_sizes(source)
        size = sizes.get(CONFIG, MAX_JSON_BYTES + 1)
        with suppress(InputError):
            if _read_of_olmo_core(source, size) is not None:
                del sizes[CONFIG]
        return sizes

    def read(self, file: SideFile) -> bytes:
        """Returns the content, which has the digest that ckptkit wrote for it, if there is one."""
        self.prove(file.origin, file.path)
        return self.sources[file.origin].read(file.path, 0, file.size_bytes)

    def prove(self, origin: str, path: str) -> None:
        """Compares a file of a folder with the digest that ckptkit wrote for it, if it did."""
        source = self.sources[origin]
        if origin not in self._proofs:
            self._proofs[origin] = None
            with suppress(MissingFileError):
                self._proofs[origin] = read_manifest(source), ""
        proof = self._proofs[origin]
        if proof is not None:
            manifest, begin = proof
            check_file(source, path, manifest, f"{begin}{path}")

    def outputs(
        self, files: Sequence[SideFile], changed: Mapping[str, bytes], *, allow_code: bool
    ) -> list[OutputFile]:
        """Plans the files as they are to be written."""
        from ckptkit.plan.plan import Literal, RawCopy, lay_out_file  # late: inspect plans nothing

        outputs, changed = [], {**self._replaced, **changed}
        for file in files:
            data = changed.pop(file.name, None)
            if data is None and not allow_code:
                data = rewrite_side_file(file.name, file.size_bytes, partial(self.read, file))
            if data is None:
                self.prove(file.origin, file.path)
            body = RawCopy(file.origin, file.path) if data is None else Literal(data)
            size = file.size_bytes if data is None else len(data)
            outputs.append(lay_out_file(file.name, [(size, body, None)]))
        new = (literal_file(n, data) for n, data in changed.items())
        return [*outputs, *new]

    def texts(self, files: Sequence[SideFile]) -> FolderTexts:
        """Returns the small files that say what the model is; what cannot be parsed is left out."""
        contents = {
            file.name: self._replaced.get(file.name) or self.read(file)
            for file in files
            if file.size_bytes <= TELLING.get(file.name, -1)
        }
        home = next((file.origin for file in files if file.name == CONFIG), "")
        return parse_texts(contents, home)

    def read_json(self, files: Sequence[SideFile], name: str) -> Any:
        """Returns the content of a JSON file of any kind; None where it is absent or no JSON."""
        file = next((file for file in files if file.name == name), None)
        if file is None or file.size_bytes > MAX_JSON_BYTES:
            return None
        with suppress(ValueError, RecursionError):
            return json.loads(self._replaced.get(name) or self.read(file))
        return None

    def tell_truth(
        self,
        texts: FolderTexts,
        config: Mapping[str, Any] | None,
        names: Iterable[str],
        *,
        keep_generation: bool,
    ) -> Truth:
        """Makes the folder say the truth about itself, where its consumer has us write that."""
        if config is not None and self.consumer is DIFFUSERS:
            return tell_class(config)
        if config is None or not self.consumer.owns_config:
            return Truth()
        of_base = None
        if self._base_location is not None:
            origin, listed = self._base_location, _list_sizes(self.sources[self._base_location])
            own = [SideFile(n, origin, n, listed[n]) for n in (CONFIG, GENERATION) if n in listed]
            of_base = self.texts(own)
        written = replace(texts, config=config)
        return tell_truth(written, of_base, names, keep_generation=keep_generation)

    def code_of(self, files: Sequence[SideFile]) -> dict[str, Any]:
        """Returns the `auto_map` of the configuration, which is not written; empty without one."""
        config = self.config(files) or {}
        return {_AUTO_MAP: config[_AUTO_MAP]} if has_auto_map(config) else {}

    def base_of_config(self, files: Sequence[SideFile]) -> str | None:
        """Returns the folder of `--base` if the configuration is from there, else None."""
        file = next((file for file in files if file.name == CONFIG), None)
        is_of_base = file is not None and file.origin == self._base_location
        return self.base if is_of_base and not self._config else None

    def describe_unusable_config(self) -> str:
        """Returns what is in the place of a configuration, such as a pipe; empty for nothing."""
        for source in self.sources.values():
            try:
                source.stat(CONFIG)
            except MissingFileError:
                continue
            except InputError as error:
                return str(error)
        return ""

    def config(self, files: Sequence[SideFile]) -> dict[str, Any] | None:
        """Returns the model's configuration, or None where there is none."""
        file = next((file for file in files if file.name == CONFIG), None)
        if file is None or file.size_bytes > MAX_JSON_BYTES:
            return None
        where = posixpath.join(self.sources[file.origin].location, file.path)
        return parse_model_config(self.read(file), where=where)


def _read_of_olmo_core(source: Source, size: int) -> bytes | None:
    """Returns OLMo-core's own `config.json` of a folder; None for others."""
    data = source.read(CONFIG, 0, size) if size <= MAX_JSON_BYTES else b""
    return data if olmo_core.MARK in data else None


def _make_config(source: Source) -> dict[str, Any] | None:
    """Returns the configuration of the model that OLMo-core's own in a folder describes."""
    with suppress(InputError):
        data = _read_of_olmo_core(source, source.stat(CONFIG).size_bytes)
        if data is not None:
            return olmo_core.make_config(parse_json_object(data, where=source.location))
    return None


def find_component(place: Place, tensors: Mapping[str, Shape]) -> Place:
    """Returns the folder of the model that was trained, where a pipeline is the base.

    It has tensors of these names and shapes, perhaps behind the prefix of a wrapper, or the weights
    that they change if they are factors.
    """
    from ckptkit.conversion.source.model_folders import read_shapes_if_any  # few bases are one

    found: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    with ExitStack() as stack:
        folder = open_folder(stack, place, "--base")
        paths = set(folder.walk(1))
        if CONFIG in paths or PIPELINE_INDEX not in paths:
            return place
        shapes: dict[str, Shape | None]
        shapes = {name.removeprefix(PEFT_PREFIX): shape for name, shape in tensors.items()}
        factors = [name.partition(".lora_")[0] for name in shapes if ".lora_" in name]
        shapes |= dict.fromkeys((f"{module}.weight" for module in factors), None)
        for path in sorted(paths):
            component, slash, name = path.rpartition("/")
            if slash and name == CONFIG:
                known = read_shapes_if_any(place.beside(posixpath.join(place, component)))
                found[component], sizes[component] = _find_held(shapes, known), len(known)
    best = max(found, key=lambda component: (len(found[component]), sizes[component]), default="")
    named = posixpath.join(place, best or "transformer")
    if not found or not found[best]:
        listed = ", ".join(found) or "none"
        raise AmbiguousSourceError(
            f"is a pipeline of several models, and none has the tensors of the source: {listed}",
            where=f"--base {place}",
            hint=f"name the folder of the model that was trained, such as {named}",
        )
    alike = [component for component in found if found[component] == found[best]]
    alike = [one for one in alike if len(found[one]) == sizes[one]] or alike
    if len(alike) > 1:
        raise AmbiguousSourceError(
            f"is a pipeline of several models, and {len(alike)} of them have the tensors of the"
            f" source: {', '.join(alike)}",
            where=f"--base {place}",
            hint=f"name the folder of the model that was trained, such as {named}",
        )
    return place.beside(posixpath.join(place, alike[0]))


def _find_held(shapes: Mapping[str, Shape | None], known: Mapping[str, Shape]) -> set[str]:
    """Returns the tensors of a model that are among others, all behind one prefix or none."""
    held: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        dots = islice(re.finditer(r"\.", name), MOST_WRAPPERS)
        for end in (0, *(dot.end() for dot in dots)):
            inner = name[end:]
            if inner in known and shape in {None, known[inner]}:
                held.setdefault(name[:end], set()).add(inner)
    return max((held[prefix] for prefix in sorted(held)), key=len, default=set())


def _list_sizes(source: Source) -> dict[str, int]:
    """Returns the sizes in bytes of the side files of a folder, by their paths."""
    sizes = {}
    for path in source.walk(1):
        if not (is_side_file(path) or any(one.has_companion(path) for one in CONSUMERS)):
            continue
        with suppress(InputError):  # what cannot be read is no side file
            sizes[path] = source.stat(path).size_bytes
    return sizes


_EMBEDDED: KeyPath = ("state", "integrations", "huggingface")
_EMBEDDED_CONFIGS = {"config": CONFIG, "peft_config": "adapter_config.json"}
_CONTENT, _ENDING = "content", "file_extension"
_MOST_VALUES = 1_000_000  # of a file; a vocabulary has one for each token
_WINDOW_BYTES = 16 << 20


def _list_embedded(checkpoint: OpenedCheckpoint) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Yields the side files that a state dict holds as values, with where they are.

    Source: composer/models/huggingface.py (`HuggingFaceModel.get_metadata`), composer 0.32:
    `model.config.content` is the configuration, `tokenizer.STEM.content` a file of the tokenizer,
    parsed if it is JSON, and a list of lines if it is a text.
    """
    parts: dict[str, dict[KeyPath, Any]] = {}
    for path, value in checkpoint.index.values.items():
        match path[len(_EMBEDDED) :] if path[: len(_EMBEDDED)] == _EMBEDDED else ():
            case ("model", str(stem), str(part), *rest) if stem in _EMBEDDED_CONFIGS:
                parts.setdefault(_EMBEDDED_CONFIGS[stem], {})[part, *rest] = value
            case ("tokenizer", str(stem), str(part), *rest):
                parts.setdefault(stem, {})[part, *rest] = value
    if parts:
        candidate = checkpoint.units[0].candidate
        is_folder = candidate.format == DcpReader.name
        inside = candidate.folder if is_folder else candidate.files[0]
        where = posixpath.join(checkpoint.location, inside)
        place = f"{where}: {'.'.join(map(str, _EMBEDDED))}"
        yield place, _EmbeddedFiles(checkpoint.source, parts, place)


class _EmbeddedFiles(Mapping[str, bytes]):
    """Files whose contents are values of a checkpoint, which are read when they are asked for."""

    def __init__(
        self, source: Source, parts: Mapping[str, Mapping[KeyPath, Any]], where: str
    ) -> None:
        self._source = source
        self._where = where
        self._read: dict[str, bytes] = {}
        self._parts: dict[str, Mapping[KeyPath, Any]] = {}
        for stem, values in parts.items():
            ending = _read_blobs(source, {(): values.get((_ENDING,), "")})[()]
            is_named = isinstance(ending, str) and not stem.endswith(ending)
            self._parts[f"{stem}{ending}" if is_named else stem] = {
                path[1:]: value for path, value in values.items() if path[0] == _CONTENT
            }

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> bytes:
        if name not in self._read:
            where = f"{self._where}: {name}"
            if len(self._parts[name]) > _MOST_VALUES:
                raise LimitError(f"has more than {_MOST_VALUES:,} values", where=where)
            content = _nest(_read_blobs(self._source, self._parts[name]))
            if name == TOKENIZER:
                _restore_special_tokens(content)
            if name.endswith(".json"):
                try:
                    content = to_json(content)
                except (TypeError, ValueError, RecursionError) as error:
                    raise FormatError(f"holds more than JSON can: {error}", where=where) from error
            elif isinstance(content, list) and all(isinstance(line, str) for line in content):
                content = "\n".join(content)
            data = content.encode() if isinstance(content, str) else content
            if not isinstance(data, bytes):
                raise FormatError("holds no content of a file", where=where)
            self._read[name] = data
        return self._read[name]


def _restore_special_tokens(part: Any) -> None:
    """Adds the empty tables that a tokenizer needs; DCP stores nothing of an empty dictionary."""
    for inner in (
        part if isinstance(part, list) else part.values() if isinstance(part, dict) else ()
    ):
        _restore_special_tokens(inner)
    if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
        part.setdefault("special_tokens", {})


def _read_blobs(source: Source, values: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Returns values, those of a DCP checkpoint read from its files, many with one read."""
    read = {path: value for path, value in values.items() if not isinstance(value, BlobRef)}
    blobs = {path: value for path, value in values.items() if isinstance(value, BlobRef)}
    window, at, first, end = MemorySource({}), "", 0, 0
    for path, blob in sorted(blobs.items(), key=lambda item: (item[1].path, item[1].start)):
        if blob.path != at or blob.stop > end:
            at, first = blob.path, blob.start
            end = max(blob.stop, min(first + _WINDOW_BYTES, source.stat(at).size_bytes))
            window = MemorySource({at: source.read(at, first, end)}, source.location)
        inside = replace(blob, start=blob.start - first, stop=blob.stop - first)
        where = f"{posixpath.join(source.location, blob.path)}: {'.'.join(map(str, path))}"
        archive = open_archive(*open_blob(window, inside, where=where), where=where)
        read[path] = parse_values(archive.pickle(), where=where)
    return read


def _nest(values: Mapping[KeyPath, Any]) -> Any:
    """Returns the value whose parts are at these paths."""
    if set(values) == {()}:
        return values[()]
    inner: dict[str | int, dict[KeyPath, Any]] = {}
    for (first, *rest), value in values.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    nested = {key: _nest(parts) for key, parts in inner.items()}
    # Lists of numbers and texts are kept whole, so that such numbers are keys of a dictionary.
    has_containers = any(isinstance(value, dict | list | tuple) for value in nested.values())
    if has_containers and list(nested) == list(range(len(nested))):
        return list(nested.values())
    return nested


def _open_if_there(
    stack: ExitStack, root: Source, path: str, above: dict[str, RemoteSource | None]
) -> Source | None:
    """Opens a folder in or above an open one.

    Of a store it is a part of a listing. Above the root, only side folders are listed; `above` has
    these listings.
    """
    if not is_url(path):
        return stack.enter_context(LocalSource(Path(path))) if Path(path).is_dir() else None
    from ckptkit.storage.remote.source import RemoteSource  # late: local ones do not need it

    if not isinstance(root, RemoteSource):
        return None
    inside = path_within(path, root.location)
    if inside is None:
        run = next((run for run in above if path_within(path, run) is not None), path)
        if run not in above:
            try:
                above[run] = root.above(run, folders=_SHALLOW)
            except InputError:
                above[run] = None  # a step may be readable while its run is not
        listed = above[run]
        if listed is None:
            return None
        root, inside = listed, path_within(path, run) or ""
    folder = root.below(inside) if inside else root
    return folder if next(iter(folder.walk(1)), None) is not None else None


def _in(folder: str, name: str) -> str:
    if is_url(folder):
        return f"{folder}/{name}" if name else folder
    return str(Path(folder, name))


def _is_model_folder(checkpoint: OpenedCheckpoint, folder: str) -> bool:
    """Says whether a folder is a whole model, which needs nothing of the folders above it."""
    begin = f"{folder}/" if folder else ""
    names: set[str] = set()
    for path in checkpoint.paths:
        if path.startswith(begin):
            name = path.removeprefix(begin)
            names |= {name, name.split("/")[0]}
    manifest = checkpoint.manifest
    is_sealed = manifest is not None and manifest.is_sealed  # what it is does not follow from that
    if MANIFEST_NAME in names and RUN_FACTS not in names and not is_sealed:
        return manifest is None
    return CONFIG in names and names.isdisjoint(_OF_STEPS)


def _is_step(folder: str) -> bool:
    """Says whether a folder is the step of a unit, by its name or by what else is in it."""
    if parse_step(posixpath.basename(folder)) is not None:
        return True
    return not is_url(folder) and any(Path(folder, name).exists() for name in _OF_STEPS)


def _above(folder: str, root: str, is_whole: Callable[[], bool]) -> Iterator[str]:
    """Yields the folders above that of a unit up to its step, and the run above a step."""
    path = make_absolute(folder)
    step = find_step(path)
    while True:
        name = posixpath.basename(path)
        is_step = path == step or name == RELEASE
        if not (is_step or is_unit_folder(name) or parse_step(name) is not None):
            return
        above = _parent(path)
        is_owner = above.startswith(_HUB) and "/" not in above.removeprefix(_HUB).removeprefix(
            _BUCKET
        )
        if above.endswith("/") or is_owner:
            return  # the root of all buckets, repositories or directories
        is_outside = not f"{above}/".startswith(f"{root}/")
        if is_outside and (is_whole() or (name in _ANY_MODEL and not _is_in_step(above))):
            return
        path = above
        yield path
        if is_step:
            return


def _is_in_step(folder: str) -> bool:
    """Says whether a folder is a step, or a part of one."""
    while not _is_step(folder):
        if not is_unit_folder(posixpath.basename(folder)):
            return False
        folder = _parent(folder)
    return True


def _parent(path: str) -> str:
    return posixpath.dirname(path) if is_url(path) else str(Path(path).parent)
