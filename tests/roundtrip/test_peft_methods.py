"""Adapters of every method of PEFT: never written as models, and called what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.plan.weight_kinds import LORA, METHODS
from ckptkit_cli.inspect import InspectArguments, next_step
from tests.live_truth import refuse

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", minversion="0.21")
import torch.distributed.checkpoint as dcp  # noqa: E402
from peft import PeftType  # noqa: E402
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from ckptkit.training import Checkpointer  # noqa: E402
from tests.peft_methods import Built, build, tiny_llama  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of PEFT, which warns of small models and of options
]
ALL = sorted(one.value for one in PeftType)
OTHERS = [one for one in ALL if one != LORA]
EVERY_FORM = ("ADALORA", "ADAPTION_PROMPT", "IA3", "PROMPT_TUNING", "VERA", "XLORA")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    home = tmp_path_factory.mktemp("peft")
    return cache(lambda method: build(method, home))


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors without shared storages, which safetensors does not take."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def put_folder(built: Built, home: Path) -> None:
    built.model.save_pretrained(home)


def put_bin(built: Built, home: Path) -> None:
    built.model.save_pretrained(home)
    weights = home / "adapter_model.safetensors"
    torch.save(load_file(weights), home / "adapter_model.bin")
    weights.unlink()


def put_own_dcp(built: Built, home: Path) -> None:
    dcp.save({"model": tensors_of(built.own)}, checkpoint_id=home, no_dist=True)


def put_own_torch(built: Built, home: Path) -> None:
    torch.save({"model": built.own}, home / "adapter.pt")


def put_own_safetensors(built: Built, home: Path) -> None:
    save_file(tensors_of(built.own), home / "model.safetensors")


def put_live_dcp(built: Built, home: Path) -> None:
    dcp.save(tensors_of(built.model.state_dict()), checkpoint_id=home, no_dist=True)


def put_live_torch(built: Built, home: Path) -> None:
    torch.save(built.model.state_dict(), home / "pytorch_model.bin")


def put_live_safetensors(built: Built, home: Path) -> None:
    save_file(tensors_of(built.model.state_dict()), home / "model.safetensors")


def put_trained(built: Built, home: Path) -> None:
    """Saves what was trained, as scripts do that keep only what takes gradients."""
    named = built.model.named_parameters()
    torch.save({n: p.detach().clone() for n, p in named if p.requires_grad}, home / "trained.pt")


def put_step(built: Built, home: Path) -> None:
    with Checkpointer(home) as checkpointer:
        checkpointer.save(1, {"model": built.model}).result(60)


FORMS = [
    *(put_folder, put_bin, put_own_dcp, put_own_torch, put_own_safetensors),
    *(put_live_dcp, put_live_torch, put_live_safetensors, put_trained, put_step),
]


def test_the_table_has_every_method_of_the_installed_peft() -> None:
    assert set(METHODS) - {"BONE"} == set(ALL)  # which PEFT 0.21 has no more


@pytest.mark.parametrize("method", ALL)
@pytest.mark.quick("ADALORA", "IA3", "LORA", "PROMPT_TUNING", "VERA", "XLORA")
def test_the_table_has_the_names_of_every_method(method: str) -> None:
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(method)]
    layer = getattr(tuner, "tuner_layer_cls", None)
    if layer is None or method == "ADALORA":  # prompts; and what has LoRA's names
        return
    missing = set(layer.adapter_layer_names) - set(METHODS[method].segments)
    assert not missing
    assert all(
        segment.startswith(tuner.prefix.split("_")[0]) for segment in layer.adapter_layer_names
    )


OF_LIVE = {put_live_dcp, put_live_torch, put_live_safetensors, put_trained, put_step}
IN_EVERY_FORM = ("IA3", "PROMPT_TUNING")  # of `EVERY_FORM`, in `make test`
CASES = [
    pytest.param(
        method,
        form,
        id=f"{method}-{form.__name__}",
        marks=() if form is put_folder or method in IN_EVERY_FORM else pytest.mark.slow,
    )
    for method in OTHERS
    for form in FORMS
    if method in EVERY_FORM or form in {put_folder, put_own_torch, put_live_dcp}
]


@pytest.mark.parametrize(("method", "form"), CASES)
@pytest.mark.quick(
    "IA3-put_folder",
    "ADALORA-put_folder",
    "PROMPT_TUNING-put_folder",
    "IA3-put_bin",
    "IA3-put_live_dcp",
    "IA3-put_own_torch",
    "IA3-put_trained",
    "IA3-put_step",
    "XLORA-put_folder",
)
def test_an_adapter_is_refused_by_its_name(
    method: str, form: Callable[[Built, Path], None], built: Callable[[str], Built], tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    tiny_llama().config.save_pretrained(source)
    form(built(method), source)
    if not built(method).own and form not in OF_LIVE:
        with pytest.raises(CkptkitError):  # PEFT 0.21 saves nothing of XLoRA
            ckptkit.consolidate(source, out)
        return

    caught = refuse(None, source, out, kind=RefusedError)
    told = f"{caught.value.message} {caught.value.hint}"
    assert "--names live" in told
    assert "of PEFT" in told
    assert "PeftModel" in told or "peft.get_peft_model" in told
    assert "ckptkit adapter merge" not in told
    assert not out.exists()
    assert called(method) in caught.value.message or not tells_method(method, form)

    inspection = ckptkit.inspect(source)
    step = next_step(inspection, InspectArguments(str(source)))
    assert not step.command
    assert "consolidate" not in step.remark
    assert inspection.peft is not None
    assert called(inspection.peft.method) in step.remark

    with pytest.raises(CkptkitError) as refused:
        ckptkit.extract_adapter(source, out)
    assert not tells_method(method, form) or method in str(refused.value)
    with pytest.raises(CkptkitError):
        ckptkit.merge_adapter(source, out, base=source)
    assert not out.exists()


@pytest.mark.parametrize("method", ALL)
@pytest.mark.quick("ADALORA", "IA3", "LORA", "PROMPT_TUNING", "VERA", "XLORA")
def test_an_export_is_what_peft_saves_or_refused_by_name(
    method: str, built: Callable[[str], Built], tmp_path: Path
) -> None:
    model = built(method).model
    model.save_pretrained(tmp_path / "truth")
    told = ""
    try:
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.export(tmp_path / "out", state={"model": model}).result(60)
    except RefusedError as error:
        told = str(error)
    if told:
        assert "of PEFT" in told or f"type {method}" in told
        assert not (tmp_path / "out").exists()
        return
    truth = load_file(tmp_path / "truth" / "adapter_model.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, found[name]) for name, tensor in truth.items())
    assert truth.keys() == found.keys() or method in {"TRAINABLE_TOKENS", "VERA"}  # has more


def called(method: str) -> str:
    known = METHODS.get(method)
    return "an adapter of PEFT" if known is None else f"{known.title} of PEFT"


def tells_method(method: str, form: Callable[[Built, Path], None]) -> bool:
    """Tells whether names, or a configuration, show which of the prompts it is."""
    if form in {put_folder, put_bin, put_step}:
        return True
    alike = {"PROMPT_TUNING", "PREFIX_TUNING"}
    computed = alike | {"P_TUNING", "CPT", "CARTRIDGE"}
    return method not in (computed if form.__name__.startswith("put_own") else alike)
