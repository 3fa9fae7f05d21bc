"""Live models filled by `load_into`, against what `consolidate` makes of the same checkpoint."""

from __future__ import annotations

import copy
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode

import ckptkit
from ckptkit.core.errors import (
    CannotPlanError,
    ChecksumError,
    CkptkitError,
    IncompleteCheckpointError,
    LoadError,
    MissingFileError,
    OverflowRefusedError,
    PartlyFilledError,
    RefusedError,
    SourceChangedError,
    TruncatedFileError,
    UsageError,
)
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer, load_into
from ckptkit.training.save.staging import Stager
from tests.built_modules import build_module, module_like, same_bits
from tests.object_store import ObjectStore
from tests.small_models import class_named, small_model_config
from tests.tensor_images import tensors_in

FRAMEWORKS = (
    "megatron_fsdp_gpt_oss_ep2",
    "megatron_model_qwen2_moe_tp2_ep2",
    "megatron_ranks_qwen2_moe_tp2_ep2",
    "meta_llama_2",
    "nanotron_qwen2_moe",
    "torchtitan_family_gpt_oss",
    *(
        pytest.param(case, marks=pytest.mark.slow)  # of frameworks that are above
        for case in (
            "megatron_model_gemma3",
            "megatron_model_llama_tp2_pp2",
            "nanotron_llama_interleaved",
            "torchtitan_family_llama_tied",
            "torchtitan_family_qwen3_moe",
        )
    ),
)
ZERO = ("zero1_adam_four_ranks", "zero2_adam_float16", "zero3_adam")
SHARDS = "fsdp2_plain"


def like(source: Path, device: str = "cpu") -> nn.Module:
    with ckptkit.open(source) as checkpoint:
        return module_like(checkpoint, device)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Makes sure that nothing is written into a model."""
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    yield
    for name, value in model.state_dict().items():
        assert same_bits(value, before[name]), name


@pytest.mark.parametrize("case", FRAMEWORKS)
@pytest.mark.quick("meta_llama_2", "torchtitan_family_gpt_oss", "megatron_fsdp_gpt_oss_ep2")
def test_a_live_model_gets_the_values_that_a_map_makes(
    case: str, repository: Path, tmp_path: Path
) -> None:
    folder = repository / "fixtures" / case
    base = folder if (folder / "config.json").exists() else None
    ckptkit.consolidate(folder / "checkpoint", tmp_path / "out", base=base)
    auto = transformers.AutoModelForCausalLM
    expected = auto.from_pretrained(tmp_path / "out", dtype="auto")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    with torch.device("meta"):
        model = auto.from_config(config, dtype=expected.dtype)
    load_into(model, folder / "checkpoint")
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert same_bits(found[name], value), name
    buffers = zip(model.named_buffers(), expected.named_buffers(), strict=True)
    assert all(same_bits(own, other) for (_, own), (_, other) in buffers)


@pytest.mark.parametrize("case", ZERO)
def test_masters_of_zero_are_what_a_wider_model_gets(
    case: str, repository: Path, tmp_path: Path
) -> None:
    source = repository / "fixtures" / case / "checkpoint"
    ckptkit.consolidate(source, tmp_path / "out", dtype="float32", names="live")
    truth = tensors_in(tmp_path / "out")
    model = like(source).float()
    load_into(model, source)
    assert truth
    for name, value in model.state_dict().items():
        assert same_bits(value, truth.get(name, value)), name
    with ckptkit.open(source) as checkpoint:
        kept = module_like(checkpoint)
        load_into(kept, source)
        for name, value in kept.state_dict().items():
            assert same_bits(value, checkpoint[name]), name


def test_a_model_is_filled_from_a_bucket(repository: Path, object_store: ObjectStore) -> None:
    source = repository / "fixtures" / SHARDS / "checkpoint"
    object_store.bucket("live").put_tree(source, "step")
    model = like(source, "meta")
    load_into(model, Place("s3://live/step", object_store.options))
    with ckptkit.open(source) as checkpoint:
        for name, value in model.state_dict().items():
            assert same_bits(value, checkpoint[name]), name


ODD = {
    "scalar": torch.tensor(3.5),
    "layers.0.no rows": torch.empty(0, 4),
    "layers.0.truth": torch.tensor([True, False]),
    "layers.0.größe": torch.randn(2, 3).to(torch.float8_e4m3fn),
    "layers.1.float": torch.randn(3).to(torch.complex64),
    "layers.1.count": torch.tensor(7),
    "turned": torch.randn(4, 5).t(),
}


def test_tensors_of_all_kinds_and_names_are_filled(tmp_path: Path) -> None:
    torch.save(ODD, tmp_path / "model.bin")
    for device in ("cpu", "meta"):
        specs = {name: (tuple(value.shape), value.dtype) for name, value in ODD.items()}
        model = build_module(specs, device)
        load_into(model, tmp_path / "model.bin")
        for name, value in model.state_dict().items():
            assert same_bits(value, ODD[name]), name


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(4, 3, **options)


def test_what_is_missing_or_left_over_is_said_as_torch_says_it(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4), other=torch.randn(2))
    model = linear()
    with pytest.raises(RuntimeError) as by_torch:
        model.load_state_dict(load_file(source / "model.safetensors"))
    with unchanged(model), pytest.raises(LoadError) as by_us:
        load_into(model, source)
    assert by_us.value.message == " ".join(str(by_torch.value).split())
    result = load_into(model, source, strict=False)
    assert result.missing_keys == ("bias",)
    assert result.unexpected_keys == ("other",)
    assert same_bits(
        model.state_dict()["weight"], load_file(source / "model.safetensors")["weight"]
    )


def test_what_the_checkpoint_lacks_stays_on_the_meta_device(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4))
    model = linear(device="meta")
    result = load_into(model, source, strict=False)
    assert result.missing_keys == ("bias",)
    state = model.state_dict()
    assert state["bias"].is_meta
    assert not state["weight"].is_meta


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_and_numbers_of_another_kind_are_refused(strict: bool, tmp_path: Path) -> None:
    model = linear()
    shape = save(tmp_path / "a", weight=torch.randn(3, 5), bias=torch.randn(3))
    with unchanged(model), pytest.raises(LoadError, match=r"size mismatch for weight: .*\[3, 5\]"):
        load_into(model, shape, strict=strict)
    kind = save(tmp_path / "b", weight=torch.ones(3, 4, dtype=torch.int32), bias=torch.randn(3))
    with unchanged(model), pytest.raises(LoadError, match="dtype mismatch for weight: int32"):
        load_into(model, kind, strict=strict)
    packed = save(
        tmp_path / "c", weight=torch.ones(3, 4).to(torch.float8_e5m2), bias=torch.randn(3)
    )
    with unchanged(model), pytest.raises(LoadError, match="dtype mismatch for weight: float8_e5m2"):
        load_into(model, packed, strict=strict)


def test_a_dtype_is_for_tensors_on_the_meta_device(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4), bias=torch.randn(3))
    model = linear()
    with unchanged(model), pytest.raises(UsageError, match=r"'weight' is torch.float32 and has"):
        load_into(model, source, dtype="bfloat16")
    with pytest.raises(UsageError, match="float99"):
        load_into(model, source, dtype="float99")
    on_meta = linear(device="meta")
    load_into(on_meta, source, dtype=torch.bfloat16)
    assert same_bits(on_meta.weight.detach(), tensors_in(source)["weight"].bfloat16())
    norm = nn.BatchNorm1d(3, affine=False)  # accelerate's init_empty_weights keeps buffers
    mixed = nn.Sequential(nn.Linear(4, 3, device="meta"), norm)
    tensors = nn.Sequential(linear(), nn.BatchNorm1d(3, affine=False)).state_dict()
    load_into(mixed, save(tmp_path / "mixed", **tensors), dtype="bfloat16")
    assert mixed[0].weight.dtype == torch.bfloat16
    assert norm.running_var is not None
    assert norm.running_var.dtype == torch.float32


def test_a_wrong_map_is_refused_before_anything_is_written(repository: Path) -> None:
    source = repository / "fixtures/megatron_model_llama_tp2_pp2/checkpoint"
    model = linear()
    with unchanged(model), pytest.raises(CkptkitError, match="map"):
        load_into(model, source, map="megatron-no-such-family")
    with unchanged(model), pytest.raises((RefusedError, CannotPlanError)):
        load_into(model, source, map="torchtitan-llama")
    with unchanged(model), pytest.raises(LoadError, match="Unexpected key"):
        load_into(model, source, map="none")


def copied(repository: Path, tmp_path: Path, case: str = SHARDS) -> Path:
    return shutil.copytree(repository / "fixtures" / case / "checkpoint", tmp_path / "copy")


def data_files(source: Path) -> list[Path]:
    return sorted(source.rglob("*.distcp"))


def test_a_missing_or_short_file_is_refused_before_anything_is_written(
    repository: Path, tmp_path: Path
) -> None:
    source = copied(repository, tmp_path)
    model = like(source)
    file = data_files(source)[-1]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with unchanged(model), pytest.raises(TruncatedFileError):
        load_into(model, source)
    file.unlink()
    with unchanged(model), pytest.raises((MissingFileError, IncompleteCheckpointError)):
        load_into(model, source)


def test_a_flipped_bit_is_found_and_the_model_is_known_to_be_partly_filled(
    repository: Path, tmp_path: Path
) -> None:
    source = copied(repository, tmp_path)
    model = like(source)
    file = data_files(source)[0]
    whole = file.read_bytes()
    with ckptkit.open(source) as checkpoint:
        first: Any = checkpoint.read(next(iter(checkpoint)), framework="numpy")
    at = whole.index(first.tobytes()[:8])
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(PartlyFilledError, match=r"the model is (partly )?filled") as error:
        load_into(model, source)
    assert isinstance(error.value.__cause__, ChecksumError)
    file.write_bytes(whole)
    load_into(model, source)  # again, and all is well


def test_a_value_that_does_not_fit_is_refused_and_says_what_is_not_filled(tmp_path: Path) -> None:
    source = save(tmp_path / "a", bias=torch.randn(3), weight=torch.full((3, 4), 1e9))
    model = linear().half()
    with pytest.raises(PartlyFilledError, match=r"2 tensors are not: 'weight'") as error:
        load_into(model, source)
    assert isinstance(error.value.__cause__, OverflowRefusedError)


def load_often(source: Path) -> None:
    for _ in range(100):
        load_into(linear(), source)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4), bias=torch.randn(3))
    stopped = threading.Event()

    def touch() -> None:
        seconds = 1
        while not stopped.is_set():
            os.utime(source / "model.safetensors", (seconds, seconds))
            seconds += 1

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises((PartlyFilledError, SourceChangedError), match="changed"):
            load_often(source)
    finally:
        stopped.set()
        toucher.join()


def test_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(1_000, 1_000), bias=torch.randn(1_000))
    model = nn.Linear(1_000, 1_000)
    result = load_into(model, source)
    assert result.bytes_read == result.bytes_needed == 4 * 1_001_000
    assert set(result.unverified) == {"weight", "bias"}
    assert result.unproven == ()


def test_rows_that_alternate_on_disk_are_read_once(tmp_path: Path) -> None:
    kind = class_named("Inkling2ForCausalLM")  # whose experts are interleaved there
    config = small_model_config(kind)
    model = kind(config)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        other = kind(config)
    result = load_into(other, tmp_path)
    assert result.bytes_read <= 1.05 * result.bytes_needed
    assert result.bytes_needed == sum(value.nbytes for value in model.state_dict().values())
    for name, values in model.state_dict().items():
        assert same_bits(other.state_dict()[name], values), name


@pytest.mark.filterwarnings("ignore")  # torch warns of tensors without elements
@pytest.mark.slow
def test_tensors_without_elements_have_no_counterpart_on_disk_and_are_not_missed(
    tmp_path: Path,
) -> None:
    kind = class_named("LwDetrForObjectDetection")  # renamed on disk; no levels: empty attention
    config = small_model_config(kind)
    other = kind(copy.deepcopy(config))
    model = kind(config)
    assert any(not tensor.numel() for tensor in model.state_dict().values())
    model.save_pretrained(tmp_path)
    load_into(other, tmp_path)
    for name, values in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], values), name


def test_modes_of_torch_change_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4), bias=torch.randn(3))
    model = linear(device="meta")
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
        load_into(model, source)
    assert same_bits(model.weight, tensors_in(source)["weight"])
    model(torch.randn(2, 4)).sum().backward()
    assert model.weight.grad is not None
    with FakeTensorMode(), pytest.raises(UsageError, match="FakeTensorMode is active"):
        load_into(model, source)


def test_a_save_after_it_does_not_link_what_frozen_weights_were_before(tmp_path: Path) -> None:
    """One element differs, which a save that compares a hundredth of the bytes would not find."""
    frozen = nn.Linear(1024, 1024, bias=False).requires_grad_(requires_grad=False)
    model = nn.Sequential(frozen, nn.Linear(1024, 4))
    changed = frozen.weight.detach().clone()
    changed.view(-1)[777_777] += 1
    source, state = save(tmp_path / "a", weight=changed), {"model": model}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
        load_into(frozen, source)  # has no hooks of the save, which are those of the whole model
        step = checkpointer.save(2, state).result(60)
    with ckptkit.open(step) as saved:
        assert same_bits(saved["0.weight"], changed)


def test_a_load_waits_for_the_copies_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, joined = linear(), list[str]()
    source = save(tmp_path / "a", **{f"0.{k}": v + 1 for k, v in model.state_dict().items()})
    stock = Stager.join

    def join(stager: Stager) -> None:
        joined.append("")
        stock(stager)

    monkeypatch.setattr(Stager, "join", join)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)
        joined.clear()
        load_into(nn.Sequential(model), source)
        assert joined


@pytest.mark.parametrize("strides", [(0, 1), (2, 1), (1, 1)])
def test_elements_that_differ_need_memory_of_their_own(
    strides: tuple[int, int], tmp_path: Path
) -> None:
    model, mask = nn.Module(), torch.zeros(12).as_strided((3, 4), strides)
    model.register_buffer("mask", mask)
    alike = torch.full((3, 4), 7.0)
    load_into(model, save(tmp_path / "alike", mask=alike))
    assert torch.equal(mask, alike)
    with pytest.raises(PartlyFilledError, match="mask: elements that differ"):
        load_into(model, save(tmp_path / "other", mask=torch.arange(12.0).reshape(3, 4)))


def test_a_lazy_module_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "a", weight=torch.randn(3, 4), bias=torch.randn(3))
    with pytest.raises(UsageError, match="weight: has no shape yet"):
        load_into(nn.LazyLinear(3), source)


def test_a_module_that_copies_its_state_gets_it(tmp_path: Path) -> None:
    class Copying(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {
                name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()
            }

    source = save(tmp_path / "a", weight=torch.randn(3, 4), bias=torch.randn(3))
    model = Copying(4, 3)
    load_into(model, source)
    assert same_bits(model.weight.detach(), tensors_in(source)["weight"])


def test_tied_weights_that_differ_in_the_checkpoint_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    first, second = torch.randn(5, 3), torch.randn(5, 3)
    tensors = {"embed.weight": first, "head.weight": second}
    model = Tied()
    result = load_into(model, save(tmp_path / "a", **tensors))
    assert same_bits(model.head.weight.detach(), first)
    assert "'head.weight' differs in the checkpoint from 'embed.weight'" in result.notes[-1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'head.weight' differs" in caplog.text
    equal = {"embed.weight": second, "head.weight": second.clone()}
    assert load_into(model, save(tmp_path / "b", **equal)).notes == ()
    one = {"head.weight": first}
    assert not load_into(model, save(tmp_path / "c", **one)).missing_keys
    assert same_bits(model.embed.weight.detach(), first)


def test_the_examples_of_the_page_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    expected = transformers.LlamaForCausalLM(config)
    expected.save_pretrained("base")
    page = (repository / "docs/reference/loading.md").read_text()
    first, _, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        exec(first, names)  # noqa: S102  our own page
        model = names["model"]
        names["optimizer"] = torch.optim.AdamW(model.parameters())
        wanted = {name: value.bfloat16() for name, value in expected.state_dict().items()}
        for name, value in model.state_dict().items():
            assert same_bits(value.full_tensor(), wanted[name]), name
        exec(second, names)  # noqa: S102
    finally:
        dist.destroy_process_group()


def test_tensors_that_are_read_whole_are_compared_with_the_manifest(
    repository: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(repository / "fixtures" / SHARDS / "checkpoint", out)
    model = like(out)
    assert load_into(model, out).unverified == ()
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(PartlyFilledError, match=r"have CRC-32 .* stored; the model is partly"):
        load_into(model, out)
    (out / "ckptkit.json").unlink()
    assert load_into(model, out).unverified


class WithExtras(nn.Module):
    """Has a state beside its weight: tensors and a number, or what a hook adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": torch.full((2,), self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_states_of_modules_that_are_not_loaded_are_listed(tmp_path: Path) -> None:
    model: Any = nn.Sequential(WithExtras(), nn.Linear(2, 2))
    model[1]._register_state_dict_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}note": "text"})
    )
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model[0].seen = 5
    result = load_into(model, tmp_path / "model.pt")
    assert result.left_alone == ("0._extra_state", "1.note")
    assert not (result.missing_keys)
    assert not (result.unexpected_keys)
    assert model[0].seen == 5
