"""Every command refuses names that are not those of the model, and says what it can do."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live_truth import refuse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

import ckptkit  # noqa: E402
from ckptkit.conversion import compare_names as comparing  # noqa: E402
from ckptkit.conversion.job import JobResult, run_job  # noqa: E402
from ckptkit.conversion.naming_program import NamingProgram  # noqa: E402
from ckptkit.conversion.prepare import ConversionJob  # noqa: E402
from ckptkit.core.errors import RefusedError  # noqa: E402
from ckptkit.engine.outcome import BytesWritten, Event, ignore  # noqa: E402
from ckptkit.hub import push  # noqa: E402
from ckptkit.hub_names.known_models import is_as_described  # noqa: E402
from ckptkit.options import ConsolidateRequest, Resources  # noqa: E402
from ckptkit.plan.load_report import LoadRequest  # noqa: E402
from ckptkit.plan.plan import Share  # noqa: E402
from ckptkit.storage.places import Place  # noqa: E402
from ckptkit.training import Checkpointer  # noqa: E402
from ckptkit_cli.main import main  # noqa: E402
from tests.compared_models import State, model_of, trained  # noqa: E402
from tests.hub_server import HubServer  # noqa: E402
from tests.object_store import ObjectStore  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*process group.*", "ignore:.*single process.*"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks
]
REPO = "me/model"


def wrapped(state: State) -> State:
    return {f"net.{name}": value for name, value in state.items()}


def beside_another(state: State) -> State:
    """Puts a module of another name beside the wrapped model, so that names have two prefixes."""
    return wrapped(state) | {"critic.weight": torch.ones(1, 32)}


def without_a_layer(state: State) -> State:
    return {name: value for name, value in state.items() if ".layers.1." not in name}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes."""
    folder = tmp_path_factory.mktemp("models") / "saved"
    model.save_pretrained(folder)
    return folder


def changed(saved: Path, out: Path, change: Callable[[State], State], **config: Any) -> Path:
    """Copies a model folder with other tensors, or another configuration."""
    shutil.copytree(saved, out)
    tensors = change(load_file(out / "model.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(document | config))
    return out


# --- the Hub ---


def test_a_push_of_another_models_names_is_refused_before_anything_is_sent(
    own_hub: HubServer, saved: Path, tmp_path: Path
) -> None:
    net = changed(saved, tmp_path / "net", beside_another)
    less = changed(saved, tmp_path / "less", without_a_layer)
    said = {net: "21 of 22 names begin with 'net.'", less: "9 parameters would be missing"}
    for folder, part in said.items():
        with pytest.raises(RefusedError) as caught:
            push(folder, REPO)
        assert part in caught.value.message
        assert "pass --names live to publish" in caught.value.hint
        assert "with --base" not in caught.value.hint  # which push has not
    proposed = "consolidate FOLDER OUT --strip-prefix net. --include 'net.*'"
    assert proposed in refusal_of(net)
    assert main(shlex.split(proposed.replace("FOLDER OUT", f"{net} {tmp_path}/out"))) == 0
    assert not push(tmp_path / "out", "me/other").skipped
    assert "put the config.json" in refusal_of(less)
    assert not own_hub.has(REPO)
    notes = push(net, REPO, names="live").notes
    assert [note for note in notes if "not compared" in note and "--names live" in note]
    assert own_hub.has(REPO)


def refusal_of(folder: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        push(folder, REPO)
    return caught.value.hint


def test_what_was_written_as_it_is_is_pushed_with_a_note(
    own_hub: HubServer, saved: Path, tmp_path: Path
) -> None:
    net = changed(saved, tmp_path / "net", wrapped)
    ckptkit.consolidate(net, tmp_path / "live", names="live")
    assert [note for note in push(tmp_path / "live", REPO).notes if "not compared" in note]
    ckptkit.consolidate(net, tmp_path / "out", strip_prefix="net.")
    assert not [note for note in push(tmp_path / "out", REPO).notes if "not compared" in note]
    assert len(own_hub.repo(REPO).commits) == 2


@pytest.mark.slow
def test_a_watch_pushes_no_step_of_another_models_names_and_ends_with_its_status(
    own_hub: HubServer, model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    both = torch.nn.ModuleDict({"net": model, "critic": torch.nn.Linear(2, 2, bias=False)})
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": both}).result(60)
    model.config.save_pretrained(tmp_path / "base")
    words = ["watch", str(run), "--push", REPO, "--once", "--interval", "0.1"]
    words += ["--base", str(tmp_path / "base")]
    assert main(words) == 4
    said = capfd.readouterr().out
    assert "step 1: cannot be pushed" in said
    assert "21 of 22 names begin with 'net.'" in said
    assert "`ckptkit consolidate STEP OUT --strip-prefix net. --include 'net.*'`" in said
    assert "1 step failed: 1" in said
    assert not own_hub.has(REPO)
    of_training = ["--until-eof" if word == "--once" else word for word in words]
    assert main([*of_training, "--wait-for-lock"]) == 4  # as training starts it, without names
    said = capfd.readouterr().out
    assert "`ckptkit watch RUN --push REPO --names live`" in said
    assert main([*words, "--names", "live"]) == 0
    assert "warning: names and shapes are not compared" in capfd.readouterr().out
    assert load_bytes(own_hub.read(REPO, "model.safetensors")) == both.state_dict().keys()


@pytest.mark.slow
def test_a_watch_pushes_a_wrapped_model_without_what_all_names_begin_with(
    own_hub: HubServer, model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.ModuleDict({"net": model})}).result(60)
    model.config.save_pretrained(tmp_path / "base")
    words = ["watch", str(run), "--push", REPO, "--once", "--interval", "0.1"]
    assert main([*words, "--base", str(tmp_path / "base")]) == 0
    said = capfd.readouterr().out
    assert "all names begin with 'net.'" in said
    assert "warning" not in said
    assert load_bytes(own_hub.read(REPO, "model.safetensors")) == model.state_dict().keys()


def load_bytes(data: bytes) -> set[str]:
    from safetensors.torch import load

    return set(load(data))


# --- adapters ---


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    trained_one = peft.get_peft_model(model_of(), settings)
    with torch.no_grad():
        for name, parameter in trained_one.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1)
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    trained_one.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "config", "said", "hint"),
    [
        (wrapped, {}, "begin with 'net.'", "consolidate BASE OUT --strip-prefix net."),
        (without_a_layer, {}, "9 parameters would be missing", "with --base"),
        (dict, {"num_hidden_layers": 3}, "9 parameters would be missing", "with --base"),
        (dict, {"hidden_size": 16}, "21 parameters have other shapes", "with --base"),
    ],
)
def test_a_merge_into_a_base_that_is_not_the_model_of_its_configuration_is_refused(
    saved: Path,
    adapter: Path,
    tmp_path: Path,
    change: Callable[[State], State],
    config: dict[str, Any],
    said: str,
    hint: str,
) -> None:
    base = changed(saved, tmp_path / "base", change, **config)
    with pytest.raises(RefusedError) as caught:
        ckptkit.merge_adapter(adapter, tmp_path / "out", base=base)
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert "--names live" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    ckptkit.merge_adapter(adapter, tmp_path / "out", base=base, names="live")


# --- exports of live models ---


class Wrapper(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A module of the user's own around a model of transformers, whose configuration it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of()
        self.config = self.net.config


def test_an_export_of_a_wrapped_model_is_refused_and_that_of_the_model_inside_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process answers, though transformers is at hand: training goes on meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "run/cache"))
    questions: list[bytes] = []
    ask = NamingProgram.ask

    def counted(program: NamingProgram, question: bytes) -> Any:
        questions.append(question)
        return ask(program, question)

    monkeypatch.setattr(NamingProgram, "ask", counted)
    wrapper = Wrapper()
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(RefusedError) as caught:
            checkpointer.export(tmp_path / "out", state={"model": wrapper}).result(60)
        assert "21 of 21 names begin with 'net.'" in caught.value.message
        assert 'state={"model": model.net}' in caught.value.hint
        assert 'names="live"' in caught.value.hint
        assert "--" not in caught.value.hint  # Python has no options
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        live = checkpointer.export(tmp_path / "live", state={"model": wrapper}, names="live")
        inner = checkpointer.export(tmp_path / "inner", state={"model": wrapper.net})
        names = load_file(live.result(60) / "model.safetensors").keys()
        assert all(name.startswith("net.") for name in names)
        found = type(wrapper.net).from_pretrained(inner.result(60), output_loading_info=True)
    assert not found[1]["missing_keys"] | found[1]["unexpected_keys"]
    assert len(questions) == 1  # what is as the configuration describes it needs no answer


# --- slices ---


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has nothing be seen before the copying, as with a bias, which counts do not tell."""
    monkeypatch.setattr(comparing, "_looks_wrong", lambda _subject: False)


def slice_of(src: Path, out: Path, number: int, listener: Any = None) -> JobResult:
    one, share = Resources(workers=1), Share(number, 2)
    job = ConversionJob(src, out, ConsolidateRequest(), resources=one, share=share)
    return run_job(job, listener or ignore)


@pytest.mark.usefixtures("late")
def test_two_slices_compare_the_whole_and_whichever_ends_first_refuses_it(
    model: Any, tmp_path: Path
) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    src = trained(tmp_path / "src", model.state_dict() | bias, model.config)
    for number in (0, 1, 0):
        with pytest.raises(RefusedError, match="1 tensor would not be used"):
            slice_of(src, tmp_path / "out", number)
        assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.usefixtures("late")
def test_slices_that_run_at_once_are_refused_both_and_leave_nothing(
    model: Any, tmp_path: Path
) -> None:
    """The first to be refused removes what the other still writes to."""
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    src = trained(tmp_path / "src", model.state_dict() | bias, model.config)
    has_ended, errors = threading.Event(), list[Exception]()

    def wait(event: Event) -> None:
        if isinstance(event, BytesWritten):
            has_ended.wait(30)

    def second() -> None:
        try:
            slice_of(src, tmp_path / "out", 1, wait)
        except Exception as error:  # noqa: BLE001  which one is what is looked at
            errors.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(RefusedError, match="1 tensor would not be used"):
        slice_of(src, tmp_path / "out", 0)
    has_ended.set()
    thread.join()
    assert [isinstance(error, RefusedError) for error in errors] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_two_slices_of_the_right_names_make_a_model_that_was_compared(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def count(request: LoadRequest) -> bool:
        asked.append(is_as_described(request))
        return asked[-1]

    monkeypatch.setattr(comparing, "is_as_described", count)
    src = trained(tmp_path / "src", model.state_dict(), model.config)
    assert slice_of(src, tmp_path / "out", 1).missing == (0,)
    assert slice_of(src, tmp_path / "out", 0).manifest is not None
    assert asked == [True, True]
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]


# --- where the names come from ---


@pytest.mark.parametrize(
    ("missing", "change", "said"),
    [
        ([], beside_another, "begin with 'net.'"),
        (["transformers"], without_a_layer, "9 parameters would be missing"),
    ],
)
def test_a_base_on_a_store_is_compared(
    model: Any,
    saved: Path,
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: list[str],
    change: Callable[[State], State],
    said: str,
) -> None:
    monkeypatch.setattr(comparing, "list_missing_libraries", lambda *_: missing)
    base = Place(object_store.bucket("bases").put_tree(saved, "base"), object_store.options)
    notes: list[str] = []
    ckptkit.consolidate(
        trained(tmp_path / "good", model.state_dict()),
        tmp_path / "out",
        base=base,
        listener=lambda event: notes.extend(getattr(event, "notes", ())),
    )
    assert not [note for note in notes if "not compared" in note]
    assert (tmp_path / "out/config.json").is_file()
    wrong = trained(tmp_path / "wrong", change(model.state_dict()))
    refuse(said, wrong, tmp_path / "no", kind=RefusedError, base=base)


def gptq(state: State) -> State:
    """Packs the projections of a model as GPTQ names its tensors; the values are nothing."""
    packed: State = {}
    for name, value in state.items():
        module, (rows, columns) = name.removesuffix(".weight"), (*value.shape, 1)[:2]
        if not name.endswith("_proj.weight"):
            packed[name] = value.half()
            continue
        packed |= {
            f"{module}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
            f"{module}.qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.ones(1, rows).half(),
            f"{module}.g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    return packed


@pytest.mark.parametrize(("model_type", "loads"), [("mistral", True), ("qwen2", False)])
def test_a_class_of_another_model_type_is_not_what_is_compared(
    saved: Path, tmp_path: Path, model_type: str, loads: bool
) -> None:
    source = changed(saved, tmp_path / "source", dict, model_type=model_type)
    assert json.loads((source / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    if loads:
        ckptkit.consolidate(source, tmp_path / "out")
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        live = load_file(saved / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in live.items())
        return
    with pytest.raises(RefusedError, match=r"would not load as Qwen2ForCausalLM .*q_proj\.bias"):
        ckptkit.consolidate(source, tmp_path / "out")


@pytest.mark.parametrize("missing", [[], ["transformers"]], ids=["asked", "not-installed"])
@pytest.mark.quick("not-installed")
def test_packed_weights_are_compared_with_a_base_or_by_their_layers(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    monkeypatch.setattr(comparing, "list_missing_libraries", lambda *_: missing)
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    base = changed(saved, tmp_path / "base", gptq, **settings)
    lacking = "model.layers.0.self_attn.q_proj.scales"
    changes: dict[str, Callable[[State], State]] = {
        "good": dict,
        "net": wrapped,
        "less": without_a_layer,
        "lacking": lambda state: {name: v for name, v in state.items() if name != lacking},
    }
    for name, change in changes.items():
        own = changed(base, tmp_path / name, change)
        bare = changed(base, tmp_path / f"bare-{name}", change)
        (bare / "config.json").unlink()
        for src, given in ((own, None), (bare, base)):
            # A wrapper is taken off, and only the base knows of scales.
            if name in {"good", "net"} or (name == "lacking" and given is None):
                ckptkit.consolidate(src, tmp_path / "out", base=given, overwrite=True)
                continue
            refuse("would not load as", src, tmp_path / "no", kind=RefusedError, base=given)
    refuse(lacking, tmp_path / "bare-lacking", tmp_path / "no", kind=RefusedError, base=base)
