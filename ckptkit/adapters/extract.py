"""`ckptkit.extract_adapter`: from a checkpoint to a folder of PEFT, or a LoRA file of diffusers.

Source: peft 0.21, `PeftModel.save_pretrained`; diffusers 0.42, `_save_lora_weights` in
`loaders/lora_base.py` and `_create_lora_config` in `utils/peft_utils.py`, which passes the options
in the header to `LoraConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.adapters.base_identity import make_base_record
from ckptkit.adapters.base_model import find_prefixes
from ckptkit.adapters.sources import AdapterRequest, OpenedAdapter, open_adapter
from ckptkit.consumers.table import ADAPTER_CONFIG, CONFIG, DIFFUSERS, DIFFUSERS_LORA, find_consumer
from ckptkit.conversion.source.adapters import (
    is_of_pipeline,
    read_config,
)
from ckptkit.conversion.source.model_folders import read_names
from ckptkit.conversion.source.paths import find_model, read_config_in
from ckptkit.conversion.source.side_folders import find_component
from ckptkit.conversion.write import (
    PlannedOutput,
    SingleProcess,
    check_destination,
    choose_settings,
    estimate_plan,
    write_output,
)
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.core.index import Fqn
from ckptkit.core.manifest import Manifest
from ckptkit.core.model_configs import class_of
from ckptkit.core.text import counted
from ckptkit.engine.outcome import Listener, ignore
from ckptkit.engine.segment_reader import Inputs
from ckptkit.lora.config import PEFT_PREFIX, LoraSettings
from ckptkit.lora.dialects import build_table
from ckptkit.lora.inference import move_config
from ckptkit.lora.pairing import find_lost
from ckptkit.lora.pipeline_names import SETTINGS
from ckptkit.options import Resources
from ckptkit.plan.layouts.hf import layout_adapter
from ckptkit.plan.plan import (
    SOURCE,
    Copy,
    OutputFile,
    Plan,
    Product,
    TensorSpec,
    literal_file,
)
from ckptkit.storage.places import PathLike, open_target

_UNET = "UNet"
# Older versions of PEFT, which get the options as arguments, do not know it.
_NEWER = {"peft_version"}


def name_component(config: Mapping[str, Any] | None) -> str:
    """Returns what pipelines call a model of diffusers; empty for a model of another library."""
    if find_consumer(config) is not DIFFUSERS or config is None:
        return ""
    return "unet" if class_of(config).startswith(_UNET) else "transformer"


def layout_adapter_files(
    products: Sequence[Product], document: Mapping[str, Any], component: str
) -> tuple[OutputFile, ...]:
    """Lays an adapter out: a folder of PEFT, or the LoRA file of a pipeline's component."""
    if not component:
        data = json.dumps(document, indent=2, sort_keys=True).encode()
        config = literal_file(ADAPTER_CONFIG, data)
        return (layout_adapter(products), config)
    named = [
        replace(product, spec=replace(product.spec, name=Fqn(f"{component}.{name}")))
        for product in products
        if (name := product.spec.name.removeprefix(PEFT_PREFIX))
    ]
    options = {
        f"{component}.{key}": value
        for key, value in document.items()
        if value and key not in _NEWER
    }
    metadata = {SETTINGS: json.dumps(options, indent=2, sort_keys=True)}
    return (layout_adapter(named, DIFFUSERS_LORA.stem, metadata),)


_KIND = "adapter"
_SAVED = "modules_to_save"
_OF_MODELS = {CONFIG, "generation_config.json"}  # with these the folder would look like a model


class ExtractionJob(Struct, frozen=True, kw_only=True):
    """An extraction as values, which is planned where a `ConversionJob` is."""

    src: PathLike
    destination: PathLike
    request: AdapterRequest
    overwrite: bool = False
    resources: Resources = field(default_factory=Resources)

    def check_places(self) -> None:
        """Refuses an output that would overwrite its source, before any work is done."""
        also = self.request.also
        check_destination(self.src, self.destination, overwrite=self.overwrite, also=also)

    @contextmanager
    def plan_output(self) -> Iterator[PlannedOutput]:
        prepared = prepare_extraction(self.src, self.destination, self.request, self.resources)
        with prepared as (planned, _):
            yield planned


def run_extraction(
    src: PathLike,
    out: PathLike,
    request: AdapterRequest,
    *,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> tuple[Manifest, OpenedAdapter]:
    """Writes one adapter of a checkpoint into the directory `out`, whole or not at all."""
    prepared = prepare_extraction(src, out, request, Resources())
    return write_adapter(prepared, src, out, request, overwrite=overwrite, listener=listener)


def write_adapter(
    prepared: AbstractContextManager[tuple[PlannedOutput, OpenedAdapter]],
    src: PathLike,
    out: PathLike,
    request: AdapterRequest,
    *,
    overwrite: bool,
    listener: Listener,
) -> tuple[Manifest, OpenedAdapter]:
    """Writes an adapter once it is prepared, which begins when the destination is checked."""
    check_destination(src, out, overwrite=overwrite, also=request.also)
    with (
        SingleProcess(open_target(out, overwrite=overwrite), listener) as strategy,
        prepared as (planned, found),
    ):
        return write_output(planned, strategy, listener), found


@contextmanager
def prepare_extraction(
    src: PathLike, out: PathLike, request: AdapterRequest, resources: Resources
) -> Iterator[tuple[PlannedOutput, OpenedAdapter]]:
    """Opens an adapter, checks it, and plans its folder; writes nothing."""
    with ExitStack() as stack:
        found = open_adapter(stack, src, request)
        if found.converted is not None:
            from ckptkit.conversion.mapped_names import refuse_without_peft_form

            refuse_without_peft_form(found.converted)
        component = _find_component(found, request)
        if request.base is not None and not component:
            found = _name_as_base(found, request.base)
        own = found.adapter.tensors
        tensors = {**own, **{name: own[first] for name, first in found.twice.items()}}
        products = [
            Product(TensorSpec(name, entry.dtype, entry.shape), Copy(SOURCE, entry.key))
            for name, entry in tensors.items()
        ]
        yield plan_adapter(found, products, request, component, out, resources), found


def plan_adapter(
    found: OpenedAdapter,
    products: Sequence[Product],
    request: AdapterRequest,
    component: str,
    out: PathLike,
    resources: Resources,
) -> PlannedOutput:
    """Plans the folder of an adapter whose tensors and settings are known."""
    # As PEFT writes it: sorted, for inference, without what it does not save.
    document = {**found.adapter.settings.document, "inference_mode": True}
    document.pop("runtime_config", None)
    chosen, _ = found.folders.choose(allow_code=False)
    kept = [file for file in chosen if file.name not in _OF_MODELS]
    side = found.folders.outputs(kept, {}, allow_code=False)
    files = (*layout_adapter_files(products, document, component), *side)
    plan = Plan(files, {}, found.notes)
    settings = choose_settings(resources, plan, sources=(found.opened,), out=out)
    read = sum(entry.size_bytes for entry in found.adapter.tensors.values())
    options = {
        "adapter": request.adapter,
        "adapter_config": None if request.config is None else str(request.config),
        "select": request.select,
        "allow_untrained": request.allow_untrained or None,
        **request.overrides,
    }
    return PlannedOutput(
        sources=(found.opened,),
        plan=plan,
        inputs=Inputs({SOURCE: found.origin}, found.folders.sources),
        settings=settings,
        estimate=estimate_plan(plan, settings, out, bytes_read=2 * read),
        kind=_KIND,
        options={key: value for key, value in options.items() if value is not None},
        facts={
            "adapter": found.adapter.name,
            "config": found.config_path,
            **make_base_record(found).facts(),
        },
        versions=found.opened.maps,
    )


def _name_as_base(found: OpenedAdapter, base: PathLike) -> OpenedAdapter:
    """Returns an adapter by the names of its base, which may have been an attribute in training.

    Refuses one some of whose modules PEFT would not find there.
    """
    adapter, place = found.adapter, find_model(base, "--base")[0]
    modules = build_table(adapter.tensors).modules
    try:
        names, config = read_names(place), read_config_in(place, "--base")
    except CkptkitError:  # then they cannot be compared
        return found
    lost = find_lost(modules, names, config)
    if not lost:
        return found
    prefix, _ = find_prefixes(modules, [Fqn(name) for name in names])
    start, origins = f"{PEFT_PREFIX}{prefix}", {m.removeprefix(prefix): m for m in modules}
    is_inside = all(name.startswith(start) for name in adapter.tensors)
    if not (prefix and is_inside) or find_lost(list(origins), names, config):
        raise RefusedError(
            f"{counted(len(lost), 'module')} of {len(modules):,}, such as {lost[0]!r}, are not in"
            " the base, so that PEFT would leave them out",
            where=found.opened.path,
            hint="pass the base that the adapter was trained on with --base, or leave it out"
            " if the files are for another model",
        )
    where, settings = found.config_path or found.opened.path, adapter.settings
    document = dict(move_config(settings.document, origins, where=where))
    if settings.modules_to_save:
        document[_SAVED] = [name.removeprefix(prefix) for name in settings.modules_to_save]

    def name_alone(name: str) -> Fqn:
        return Fqn(PEFT_PREFIX + name.removeprefix(start))

    tensors = {name_alone(name): entry for name, entry in adapter.tensors.items()}
    settings = LoraSettings.parse(document, where=where)
    note = (
        f"the modules of the adapter begin with {prefix!r}, which those of the base do not:"
        " written without it"
    )
    return replace(
        found,
        adapter=replace(adapter, settings=settings, tensors=tensors),
        twice={name_alone(second): name_alone(first) for second, first in found.twice.items()},
        notes=(*found.notes, note),
    )


def _find_component(found: OpenedAdapter, request: AdapterRequest) -> str:
    """Returns the component of a pipeline that an adapter changes; empty where PEFT loads it."""
    if is_of_pipeline(found.opened):
        return found.tree
    if request.base is None:
        return name_component(read_config(found.folders))
    base = find_component(find_model(request.base, "--base")[0], found.adapter.shapes)
    return name_component(read_config_in(base, "--base"))
