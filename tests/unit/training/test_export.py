"""Exports of a single process, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import ckptkit
from ckptkit.conversion.naming_program import AnswerCache, NamingProgram
from ckptkit.core.checksums import ChecksumShare
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    CkptkitError,
    NoSpaceError,
    OutputExistsError,
    OverflowRefusedError,
    RefusedError,
    SaveError,
    UsageError,
)
from ckptkit.core.index import Fqn
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import TensorSpec
from ckptkit.storage.local.target import SharedTarget, StagedFile
from ckptkit.training import Checkpointer, load_into
from ckptkit.training.export import export as export_attempt
from ckptkit.training.export.output_plan import (
    merge_tables,
    pack_table,
    plan_adapter,
    side_files,
    unpack_table,
)
from ckptkit.training.handle import ExportHandle, ExportReport
from ckptkit.training.state.collect import bind
from tests.files import mounted, tmpfs
from tests.sampled import sampled
from tests.small_models import class_named, small_model_config


class Net(nn.Module):
    turned: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 3)
        self.register_parameter("turned", nn.Parameter(torch.randn(70, 40).t()))
        self.register_parameter("none", nn.Parameter(torch.empty(0, 4)))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))


def names_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_an_export_is_what_a_consolidation_of_a_save_writes(tmp_path: Path) -> None:
    model = Net()
    state = {"model": model}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    config = b'{"model_type": "x", "auto_map": {"AutoModel": "x.Y"}, "torch_dtype": "float32"}'
    sidecar = {"tokenizer": tokenizer, "config.json": config, "notes.txt": b"left out"}
    with Checkpointer(tmp_path / "run", sidecar=sidecar) as checkpointer:
        checkpointer.save(4, state).result(60)
        path = checkpointer.export(tmp_path / "out", dtype="bfloat16").result(60)
    assert path == tmp_path / "out"
    ckptkit.consolidate(tmp_path / "run", tmp_path / "expected", dtype="bfloat16")
    assert names_below(path) == names_below(tmp_path / "expected")
    for name in names_below(path):
        same = (path / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
        assert same or name == "ckptkit.json"
    manifest = json.loads((path / "ckptkit.json").read_bytes())
    assert manifest["source"]["step"] == 4
    assert manifest["options"] == {"dtype": "bfloat16"}
    assert ckptkit.verify(path).ok
    written = load_file(path / "model.safetensors")
    assert torch.equal(written["turned"], model.turned.detach().bfloat16())


def refused(tmp_path: Path, state: Any, **options: Any) -> CkptkitError:
    """Returns the error of an export that leaves nothing."""
    with Checkpointer(tmp_path / "run") as checkpointer, pytest.raises(CkptkitError) as caught:
        checkpointer.export(tmp_path / "a" / "out", state=state, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    return caught.value


def test_a_number_that_does_not_fit_is_refused_with_its_place(tmp_path: Path) -> None:
    model = Net()
    with torch.no_grad():
        model.turned[3, 60] = 1e5
    error = refused(tmp_path, {"model": model}, dtype="float16")
    assert isinstance(error, OverflowRefusedError)
    assert "'turned'" in error.where
    assert "element 270 " in error.message


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "no earlier call of save"),
        ({"model": nn.Linear(1, 1), "other": nn.Linear(1, 1)}, "2 models were found"),
        ({"progress": {"step": 1}}, "0 models were found"),
        ({"model": nn.Linear(2, 2, device="meta")}, "without data"),
    ],
)
def test_a_state_that_is_not_one_model_is_refused(state: Any, words: str, tmp_path: Path) -> None:
    assert words in str(refused(tmp_path, state))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "'int8' is not among"),
        ({"max_shard_size": "5 bananas"}, "'bananas' is not a unit"),
        ({"shard_size": 5}, "unknown option 'shard_size'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    error = refused(tmp_path, {"model": Net()}, **options)
    assert isinstance(error, UsageError)
    assert words in str(error)


@pytest.mark.parametrize("names", ["auto", "live"])
def test_packed_numbers_are_not_cast(names: str, tmp_path: Path) -> None:
    packed = nn.Module()
    packed.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))
    packed.register_buffer("weight_scale", torch.ones(4, 1))
    error = refused(tmp_path, {"model": packed}, dtype="bfloat16", names=names)
    assert isinstance(error, RefusedError)
    assert "'weight' is quantized, or a scale of one that is" in error.message


def test_adapters_that_peft_computes_anew_are_refused() -> None:
    spec = TensorSpec(Fqn("base_model.norm.weight"), BY_NAME["float32"], (2,))
    side = {"adapter_config.json": b'{"peft_type": "PREFIX_TUNING"}'}
    with pytest.raises(RefusedError, match="an adapter of type PREFIX_TUNING"):
        plan_adapter({spec.name: spec}, side, ConsolidateRequest())
    side = {"adapter_config.json": b'{"peft_type": "VBLORA"}'}
    with pytest.raises(RefusedError, match="an adapter of type VBLORA"):
        plan_adapter({}, side, ConsolidateRequest())


def test_an_adapter_that_is_to_be_cast_is_not_saved_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTarget, "why_no_ranges", lambda _: "it takes no ranges")
    monkeypatch.setattr(export_attempt, "is_adapter", lambda _: True)
    error = refused(tmp_path, {"model": Net()}, dtype="bfloat16")
    assert isinstance(error, RefusedError)
    assert "it takes no ranges; from shards" in str(error)
    assert "leave dtype out" in error.hint


class Configuration:
    """Writes itself, as those of Transformers do."""

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "config.json").write_text(self.to_json_string())

    def to_json_string(self) -> str:
        return '{"tie_word_embeddings": true}'


class Tokenizer:
    def save_pretrained(self, save_directory: str) -> None:
        raise AssertionError(f"only rank 0 writes to {save_directory}")


def test_all_ranks_know_a_configuration_that_is_given_as_an_object() -> None:
    sidecar = {"config": Configuration(), "tokenizer": Tokenizer()}
    bound = bind({"model": Net()}, layout="accelerate", rank=1, world_size=2)
    found = side_files(bound, sidecar)
    assert found == {"config.json": b'{"tie_word_embeddings": true}'}


def test_storage_without_ranges_gets_a_save_that_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTarget, "why_no_ranges", lambda _: "it takes no ranges")
    state = {"model": Net()}
    with Checkpointer(tmp_path / "run", in_flight="skip") as checkpointer:
        for step in range(2):
            checkpointer.save(step, state)
            report = checkpointer.export(tmp_path / "out", state=state).report(60)
            assert report.command.startswith(f"ckptkit consolidate {report.path} ")


def test_the_run_itself_is_never_replaced(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "runs" / "a") as checkpointer:
        for out in (tmp_path / "runs", tmp_path / "runs" / "a", Path.cwd(), Path.cwd().parent):
            with pytest.raises(RefusedError, match="would replace"):
                checkpointer.export(out, state={"model": Net()}, overwrite=True)


def test_adapters_and_packed_weights_are_not_exported_as_models(tmp_path: Path) -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2)})
    assert "belongs to an adapter" in str(refused(tmp_path, {"model": model}))
    for packed in (torch.ones(4, 4, dtype=torch.int8), torch.ones(8, 1, dtype=torch.uint8)):
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        told = str(refused(tmp_path, {"model": nn.ModuleDict({"fc1": layer})}))
        assert "'fc1.weight' belongs to a packed 4-bit or 8-bit weight" in told


def test_packed_weights_are_exported_under_the_names_of_training(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    state = {"model": nn.ModuleDict({"fc1": layer})}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.export(tmp_path / "out", state=state, names="live").result(60)
    ckptkit.consolidate(tmp_path / "run", tmp_path / "expected", names="live")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_weights_that_are_declared_tied_but_differ_are_both_written(tmp_path: Path) -> None:
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4)
    inner = nn.ModuleDict({"embed_tokens": embedding})
    model = nn.ModuleDict({"model": inner, "lm_head": head})
    config = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"], '
    config += b'"tie_word_embeddings": true}'
    with Checkpointer(tmp_path / "run", sidecar={"config.json": config}) as checkpointer:
        state = {"model": model}
        one = checkpointer.export(tmp_path / "one", state=state, names="live").result(60)
        with torch.no_grad():
            head.weight.copy_(embedding.weight)
        other = checkpointer.export(tmp_path / "other", names="live").result(60)  # of no Llama
    assert "lm_head.weight" in load_file(one / "model.safetensors")
    assert json.loads((one / "config.json").read_bytes())["tie_word_embeddings"] is False
    assert "lm_head.weight" not in load_file(other / "model.safetensors")
    assert json.loads((other / "ckptkit.json").read_bytes())["tied"]


def test_parts_that_were_not_all_written_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Any = export_attempt.__dict__["write_parts"]

    def forget(*arguments: Any) -> dict[Fqn, ChecksumShare]:
        return {**write(*arguments), Fqn("up.weight"): ChecksumShare()}

    monkeypatch.setattr(export_attempt, "write_parts", forget)
    with Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.export(tmp_path / "out", state={"model": Net()})
        with pytest.raises(SaveError, match=r"'up\.weight'.*not every byte was written once"):
            handle.result(60)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_was_not_asked_for_is_raised_when_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    handle = checkpointer.export(tmp_path / "out", state={"model": Net()})
    assert handle.wait(60)
    (tmp_path / "two").mkdir()
    monkeypatch.setattr("ckptkit.training.export.export.commit", _filled)
    failing = checkpointer.export(tmp_path / "two", state={"model": Net()})
    assert failing.wait(60)
    with pytest.raises(OutputExistsError, match="somebody was faster"):
        checkpointer.close()


def _filled(*_: Any, **__: Any) -> None:
    raise OutputExistsError("somebody was faster")


def test_a_disk_that_fails_ends_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(StagedFile, "write_at", fail)
    assert "input/output error" in str(refused(tmp_path, {"model": Net()}))


def test_tables_are_sent_as_text_and_joined() -> None:
    one = TensorSpec(Fqn("a"), BY_NAME["bfloat16"], (2, 3))
    other = TensorSpec(Fqn("b"), BY_NAME["int64"], ())
    table = {one.name: one, other.name: other}
    assert unpack_table(pack_table(table)) == table
    assert merge_tables([{one.name: one}, table]) == table
    wider = TensorSpec(Fqn("a"), BY_NAME["bfloat16"], (2, 4))
    with pytest.raises(UsageError, match=r"shape \[2, 4\] was found on rank 1"):
        merge_tables([table, {wider.name: wider}])


def test_a_handle_tells_how_it_ends(tmp_path: Path) -> None:
    handle = ExportHandle(tmp_path)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="has not ended after 0"):
        handle.result(0)
    handle.fail(SaveError("too bad"))
    unheard = [handle.unheard_error is not None]
    assert str(handle.exception()) == "too bad"
    assert [*unheard, handle.unheard_error is not None] == [True, False]
    report = ExportReport(tmp_path, 10, 20, 1.0, 2.0, command="ckptkit consolidate a b")
    assert str(report).endswith("to make a folder of them: ckptkit consolidate a b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    with mounted(tmp_path / "disk", *tmpfs("4m")) as place:
        yield place


def test_an_export_fits_where_all_of_it_fits(small_disk: Path, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))  # 3.2 MB of 4.2 MB
    with Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.export(small_disk / "out", state={"model": model})
        assert ckptkit.verify(handle.result(60)).ok


def test_an_export_that_does_not_fit_leaves_the_disk_as_it_was(
    small_disk: Path, tmp_path: Path
) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(17)))
    with (
        Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(NoSpaceError, match=r"free|full|space"),
    ):
        checkpointer.export(small_disk / "out", state={"model": model}).result(60)
    assert list(small_disk.iterdir()) == []


def test_a_configuration_with_an_infinite_number_is_understood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = class_named("GraniteMoeHybridForCausalLM")  # its names on disk are others, too
    model, other = (kind(small_model_config(kind)) for _ in range(2))
    assert b"__float__" in model.config.to_json_string().encode()
    with Checkpointer(tmp_path / "run") as checkpointer:
        out = checkpointer.export(tmp_path / "out", state={"model": model}).result(60)
    assert not [record.message for record in caplog.records if "not compared" in record.message]
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert load_file(out / "model.safetensors").keys() == expected.keys()
    load_into(other, out)
    for name, values in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], values), name


def small_model(name: str) -> Any:
    kind = class_named(name)
    config, _ = small_model_config(kind), torch.manual_seed(0)
    return kind(config)


@pytest.fixture
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of a process that asks transformers fail, and nothing was answered before."""

    def fail(*_: object) -> None:
        raise AssertionError("transformers was asked in another process")

    monkeypatch.setattr(NamingProgram, "ask", fail)
    monkeypatch.setattr(AnswerCache, "read", lambda *_: None)


CLASSES = (
    "LlamaForCausalLM",  # of a family in the shipped data
    "BertForMaskedLM",
    "LlavaForConditionalGeneration",
    "MixtralForCausalLM",  # whose experts are converted
    "HubertForCTC",  # which draws random numbers even without elements
    "T5ForConditionalGeneration",  # with tied embeddings
)


@pytest.mark.parametrize("name", sampled(CLASSES, ["LlamaForCausalLM", "MixtralForCausalLM"]))
@pytest.mark.usefixtures("without_programs")
def test_the_class_of_the_live_model_says_what_it_has(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model(name)
    before = torch.get_rng_state()
    with caplog.at_level("INFO"), Checkpointer(tmp_path / "run") as checkpointer:
        out = checkpointer.export(tmp_path / "out", state={"model": model}).result(60)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert not [row.message for row in caplog.records if "compared" in row.message]
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in loaded.state_dict().items())


@pytest.mark.usefixtures("without_programs")
def test_a_class_that_transformers_does_not_know_is_not_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(PreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.up = nn.Linear(3, 3)
            self.post_init()

    class MyConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = "mine"

    state = {"model": Mine(MyConfig())}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.export(tmp_path / "out", state=state).result(60)
    assert "were not compared with the model of config.json: transformers" in caplog.text
    assert "has no model type 'mine'" in caplog.text


def test_a_layer_that_the_configuration_still_counts_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model("BertForMaskedLM")
    del model.bert.encoder.layer[-1]
    with caplog.at_level("INFO"), Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.export(tmp_path / "out", state={"model": model})
        with pytest.raises(RefusedError, match="would be missing and made at random"):
            handle.result(60)
    assert "a process of transformers has compared the names" in caplog.text
    assert not (tmp_path / "out").exists()
