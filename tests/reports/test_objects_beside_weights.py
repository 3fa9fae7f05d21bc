"""Objects of other code beside the weights: the weights are read, and a note names the objects."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import io
import pathlib
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    MissingFileError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import TensorIndex
from ckptkit.formats.dcp.reader import DcpReader
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.formats.pickle.torch_values import ALLOWED
from ckptkit.formats.torch_files import TorchFileReader
from ckptkit.storage.local.source import LocalSource
from tests.files_in_memory import read_files, saved, tensor_at
from tests.property.examples import examples
from tests.reports.folders import assert_same, converted

REPORTS = Path(__file__).resolve().parents[2] / "fixtures" / "reports"
LEFT_OUT = "left out, since they are objects of other code: "
HERE = __name__
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:Couldn't retrieve source code",
    "ignore:TypedStorage is deprecated",
    "ignore:Sparse CSR|Sparse invariant",
)
Tensors = dict[str, torch.Tensor]


def objects_in(notes: list[str]) -> str:
    (note,) = (note for note in notes if note.startswith(LEFT_OUT))
    return note.removeprefix(LEFT_OUT)


@pytest.mark.parametrize(
    ("case", "listed"),
    [
        ("03-lightning-callback-enum", "callbacks.Cb.mode (Mode of __main__)"),
        ("03-lightning-dataclass", "hyper_parameters.cfg (RunConfig of __main__)"),
        ("03-lightning-loss-module", "hyper_parameters.loss (MSELoss of torch.nn.modules.loss)"),
    ],
)
def test_lightnings_checkpoints_with_objects_give_the_weights(
    case: str, listed: str, tmp_path: Path
) -> None:
    source = REPORTS / case / "ckpt"
    tensors, notes = converted(source, tmp_path / "out")
    assert_same(tensors, load_file(REPORTS / case / "truth.safetensors"))
    assert objects_in(notes) == listed
    assert f"{LEFT_OUT}{listed}" in ckptkit.inspect(source).notes
    assert ckptkit.verify(source).ok


def test_olmo_cores_classes_have_the_meaning_of_torchs(tmp_path: Path) -> None:
    source = REPORTS / "13-olmo-core" / "ckpt"
    truth = load_file(REPORTS / "13-olmo-core" / "truth.safetensors")
    tensors, _ = converted(source, tmp_path / "out", map="none")
    assert_same(tensors, truth)
    assert not (tmp_path / "out" / "config.json").exists()  # OLMo-core's own is no model's
    tensors, _ = converted(source, tmp_path / "mapped")
    query = truth["blocks.0.attention.w_q.weight"]
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], query)
    assert (tmp_path / "mapped" / "config.json").exists()  # made of it
    assert "OLMo-core" in ckptkit.inspect(source).writer
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "olmo2"}')
    converted(source, tmp_path / "named", base=base, names="live")
    assert "olmo2" in (tmp_path / "named" / "config.json").read_text()


MOE = REPORTS / "22-deepspeed-moe"


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A save with four experts, whose files may be changed."""
    return Path(shutil.copytree(MOE / "ckpt", tmp_path / "moe"))


def test_deepspeeds_experts_have_their_numbers_among_all_ranks(
    experts: Path, tmp_path: Path
) -> None:
    tensors, _ = converted(experts, tmp_path / "out")
    truth = load_file(MOE / "truth.safetensors")
    assert_same(tensors, truth)
    assert len(truth) == 21
    converted(experts, tmp_path / "optimizer", optimizer=True)
    states = torch.load(tmp_path / "optimizer" / "optimizer.bin")["state"]  # noqa: TID251
    assert any("experts" in name for name in states)
    assert states.keys() <= truth.keys()
    for file in experts.glob("*/zero_pp_rank_*"):  # a copy without the optimizer
        file.unlink()
    (experts / "global_step1" / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    tensors, _ = converted(experts, tmp_path / "again")
    assert_same(tensors, truth)


def _expert(number: int, change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(step: Path) -> None:
        path = step / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        tensors = torch.load(path, weights_only=True)  # noqa: TID251 - made right here
        change(tensors)
        torch.save(tensors, path)

    return edit


def _rename(number: int, to: str) -> Callable[[Path], None]:
    def edit(step: Path) -> None:
        path = step / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        path.rename(step / to)

    return edit


NAME = "moe.deepspeed_moe.experts.deepspeed_experts.1"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            _rename(2, "other"),
            *(MissingFileError, "3 of the files of 4 experts are there; missing are expert 2"),
        ),
        (
            lambda step: [file.unlink() for file in step.glob("layer_*")],
            *(MissingFileError, "0 of the files of 4 experts"),
        ),
        (_rename(3, "layer_0_expert_7_mp_rank_00_model_states.pt"), MissingFileError, "expert 3"),
        (_rename(3, "layer_0_expert_3_mp_rank_01_model_states.pt"), UnsupportedError, "slices"),
        (
            _expert(1, lambda held: held.pop(f"{NAME}.a.bias")),
            *(FormatError, "other tensors than the other experts of layer 0"),
        ),
        (
            _expert(1, lambda held: held.update({"i.weight": torch.ones(1)})),
            *(FormatError, "'i.weight', which is no tensor of expert 1"),
        ),
        (
            lambda step: shutil.copy(
                step / "layer_0_expert_0_mp_rank_00_model_states.pt",
                step / "layer_0_expert_1_mp_rank_00_model_states.pt",
            ),
            *(FormatError, "is no tensor of expert 1"),
        ),
        (
            lambda step: shutil.copy(
                step / "layer_0_expert_0_mp_rank_00_model_states.pt",
                step / "layer_1_expert_0_mp_rank_00_model_states.pt",
            ),
            *(FormatError, "of an expert that the model does not have"),
        ),
    ],
)
def test_experts_that_are_missing_or_do_not_fit_are_named(
    edit: Callable[[Path], Any],
    error: type[CkptkitError],
    message: str,
    experts: Path,
    tmp_path: Path,
) -> None:
    edit(experts / "global_step1")
    with pytest.raises(error, match=message):
        converted(experts / "global_step1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Mode(enum.Enum):
    FAST = 1


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class RunConfig:
    path: Any = None
    mode: Mode = Mode.FAST
    inner: Any = None


class Outer:
    @dataclasses.dataclass
    class Inner:
        value: Any = None

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Keywords:
    held: Any

    def __new__(cls, *, held: Any) -> Self:
        made = super().__new__(cls)
        made.held = held
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"held": self.held}


class Listed(list[Any]):
    pass


class Mapped(dict[Any, Any]):
    pass


class Pair(NamedTuple):
    first: Any
    second: Any


class Reduced:
    """Has all parts that `__reduce__` may return."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return Reduced, (self.held,), {"held": self.held}, iter([1]), iter([("key", 2)])

    def extend(self, items: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


MARKER = Path("executed")  # in the folder of the test


def touch(path: str) -> None:
    """What a pickle of `Touches` calls where it is executed."""
    Path(path).touch()


class Touches:
    def __reduce__(self) -> Any:
        return touch, (str(MARKER),)


class Net(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.held = held


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(
        [
            *(Mode.FAST, Level.LOW | Level.HIGH, RunConfig, Outer.Inner, Outer().method, touch),
            *(torch.float16, torch.device("cpu"), torch.Size([2]), torch.__version__, torch.tanh),
            *(nn.functional.relu, nn.functional.gelu, torch.optim.AdamW, nn.MSELoss()),
            *(pathlib.PurePosixPath("a/b"), ValueError("x"), object(), 1j, range(3), slice(1)),
            *(bytearray(b"x"), np.float32(1), np.ones(2), np.random.default_rng(0)),
            *(torch.ones(2), torch.eye(2).to_sparse(), collections.Counter("ab")),
        ]
    ),
    st.builds(Touches),
)


def _holders(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 3) | st.sampled_from([Mode.FAST, (1, (2, 3))])
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.lists(inner, max_size=3).map(Listed),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(Mapped),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.builds(lambda held: collections.defaultdict(list, {"k": held}), inner),
        st.builds(RunConfig, path=st.just(pathlib.PurePosixPath("/data")), inner=inner),
        st.builds(Outer.Inner, inner),
        st.builds(Slotted, inner),
        st.builds(lambda held: Keywords(held=held), inner),
        st.builds(Pair, inner, inner),
        st.builds(Reduced, inner),
        st.builds(Net, inner),
        st.builds(lambda held: argparse.Namespace(held=held), inner),
        st.builds(lambda held: types.SimpleNamespace(held=held), inner),
        st.builds(lambda held: functools.partial(Net, held=held), inner),
    )


OBJECTS = st.recursive(LEAVES, _holders, max_leaves=8)


def read(data: bytes) -> tuple[TensorIndex, dict[str, bytes]]:
    """Returns the index of a file of `torch.save`, and the bytes of each tensor of the model."""
    index = read_files(TorchFileReader, {"last.ckpt": data})
    found = {}
    for entry in index.of_part("model"):
        tensor = tensor_at(index, entry.key, {"last.ckpt": data})
        found[str(entry.name)] = tensor.numpy().tobytes()
    return index, found


@settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=OBJECTS, protocol=st.integers(1, 5), zipped=st.booleans())
@pytest.mark.slow
def test_any_objects_beside_a_state_dict_leave_the_weights_as_they_are(
    value: Any, protocol: int, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if protocol == 1:  # with which python pickles slots and keywords only if the class helps
        value = RunConfig(inner=Outer.Inner(Mode.FAST))
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    document = {
        "state_dict": net.state_dict(),
        "hyper_parameters": {"config": RunConfig(inner=value), "value": value},
        "callbacks": {"EMA": {"state": value}},
        "optimizer_states": [
            {
                "state": {0: {"exp_avg": torch.ones(4, 3), "extra": value}},
                "param_groups": [{"lr": 0.1, "params": [0], "config": value}],
            }
        ],
        "message_hub": {"log": [value, net]},
    }
    options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    index, found = read(saved(document, **options))
    assert found == {name: t.numpy().tobytes() for name, t in net.state_dict().items()}
    assert not any(problem.where.startswith("state_dict") for problem in index.problems)
    (note,) = index.run.warnings
    assert note.startswith(LEFT_OUT)
    assert f"hyper_parameters.config (RunConfig of {HERE}" in note
    assert not list(tmp_path.iterdir())


@settings(max_examples=examples(400), deadline=None)
@given(OBJECTS, st.integers(2, 5))
def test_any_object_that_python_pickles_is_parsed(value: Any, protocol: int) -> None:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol)
    pickler.dispatch_table = {torch.Tensor: lambda _: (Mode, (1,))}  # which torch.save has apart
    pickler.dump([value, "after"])
    found: Any = parse_pickle(buffer.getvalue(), ALLOWED, where="x")
    assert found[1] == "after"


def test_the_marker_is_left_where_such_a_file_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Touches()))  # noqa: S301, TID251 - made right here
    assert MARKER.exists()


def test_objects_in_the_meta_file_of_a_sharded_strategy_are_listed(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    folder = tmp_path / "last.ckpt"
    dcp.save({"state_dict": state}, checkpoint_id=folder)
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    meta = {"pytorch-lightning_version": "2.6.6", "global_step": 3, "epoch": 0}
    for number, more in enumerate(({"hyper_parameters": {"mode": Mode.FAST}}, {"deep": nested})):
        torch.save(meta | more, folder / "meta.pt")
        tensors, notes = converted(folder, tmp_path / f"out{number}")
        assert_same(tensors, state)
        listed = [note for note in notes if note.startswith(LEFT_OUT)]
        expected = f"{LEFT_OUT}hyper_parameters.mode (Mode of {HERE})"
        assert listed == ([expected] if number == 0 else [])
        assert ckptkit.inspect(folder).version == "2.6.6"


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=OBJECTS)
def test_any_objects_in_a_dcp_checkpoint_are_listed(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": RunConfig(inner=value),
        "nested": {"log": [value, {"mode": Mode.FAST}]},
        "value": value,
    }
    folder = tmp_path / "step"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    except dcp.api.CheckpointException as error:
        if "SparseTensorImpl" not in str(error):
            raise
        reject()  # torch stores no sparse tensor
    (candidate,) = DcpReader().find([path.name for path in folder.iterdir()])
    with LocalSource(folder) as source:
        (note,) = DcpReader().read_index(source, candidate).run.warnings
    assert note.startswith(f"{LEFT_OUT}config (RunConfig of {HERE}")
    assert "nested.log" in note
    assert list(tmp_path.iterdir()) == [folder]


def test_objects_beside_the_weights_of_a_dcp_checkpoint_are_named_by_a_conversion(
    tmp_path: Path,
) -> None:
    state = nn.Linear(2, 2).state_dict()
    groups = [{"lr": 0.1, "kind": Mode.FAST, "params": [n]} for n in range(400)]
    objects = {"config": RunConfig(), "parts": [Mode.FAST], "slotted": Slotted(1), "step": 3}
    document = {"model": state, "optimizer": {"param_groups": groups, "state": {}}, **objects}
    dcp.save(document, checkpoint_id=tmp_path / "step", no_dist=True)
    tensors, notes = converted(tmp_path / "step", tmp_path / "out")
    assert_same(tensors, state)
    expected = {"config": "RunConfig", "parts.0": "Mode", "slotted": "Slotted"}
    listed = ", ".join(f"{path} ({name} of {HERE})" for path, name in expected.items())
    assert objects_in(notes) == listed


def test_objects_in_the_files_of_ranks_are_listed_once(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    folder = tmp_path / "step"
    folder.mkdir()
    for rank in range(2):
        torch.save({"model": state, "config": RunConfig()}, folder / f"state_rank{rank}.pt")
    tensors, notes = converted(folder, tmp_path / "out")
    assert_same(tensors, state)
    assert objects_in(notes) == f"config (RunConfig of {HERE})"
    torch.save(Net(), folder / "state_rank1.pt")
    with pytest.raises(UnsafePickleError, match=r"a whole module.*Net"):
        converted(folder, tmp_path / "module")


def test_values_that_are_shared_over_and_over_are_read(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    shared = {f"key{number}": [number, "x"] for number in range(100)}
    torch.save({"model": state, "runs": [shared] * 300}, tmp_path / "model.pt")
    tensors, _ = converted(tmp_path / "model.pt", tmp_path / "out")
    assert_same(tensors, state)


@pytest.mark.parametrize("key", ["args", "cfg", "client_state"])
def test_arguments_are_values_as_before_and_not_listed(key: str, tmp_path: Path) -> None:
    """fairseq, timm and the references of torchvision keep their arguments."""
    net = nn.Linear(2, 2)
    arguments = argparse.Namespace(lr=0.1, device=torch.device("cpu"), out=Path("out"))
    torch.save({"model": net.state_dict(), key: arguments}, tmp_path / "model.pt")
    tensors, notes = converted(tmp_path / "model.pt", tmp_path / "out")
    assert_same(tensors, net.state_dict())
    assert not any(note.startswith(LEFT_OUT) for note in notes)


def test_objects_in_an_optimizer_are_left_out_of_its_states(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["schedule"] = Mode.FAST
    state["state"][0]["projector"] = RunConfig(inner=torch.ones(3))
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "model.pt")
    tensors, notes = converted(tmp_path / "model.pt", tmp_path / "out", optimizer=True)
    assert_same(tensors, net.state_dict())
    written = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    kept = written["state"]["weight"]
    assert torch.equal(kept["exp_avg"], state["state"][0]["exp_avg"])
    assert "projector" not in kept
    assert "schedule" not in written["param_groups"][0]
    assert any("hold more than numbers and texts, and are left out" in note for note in notes)
    assert f"optimizer.param_groups.0.schedule (Mode of {HERE})" in objects_in(notes)
    assert "holds 1 tensor" in objects_in(notes)


def test_a_damaged_setting_of_an_optimizer_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    with open_checkpoint(tmp_path / "run") as opened:
        path = next(path for path in opened.index.values if path[-1] == "weight_decay")
        blob = opened.index.values[path]
    file = tmp_path / "run" / blob.path
    data = bytearray(file.read_bytes())
    data[blob.start : blob.stop] = bytes(blob.stop - blob.start)
    file.write_bytes(data)
    with pytest.raises(FormatError, match="archive"):
        converted(tmp_path / "run", tmp_path / "out", optimizer=True)


def test_deepspeeds_client_state_may_hold_objects(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    folder = tmp_path / "run" / "global_step3"
    folder.mkdir(parents=True)
    document: dict[str, Any] = {
        "module": net.state_dict(),
        "buffer_names": [],
        "param_shapes": None,
        "global_steps": 3,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "sampler": RunConfig(),
        "args": argparse.Namespace(lr=0.1),
    }
    torch.save(document, folder / "mp_rank_00_model_states.pt")
    tensors, notes = converted(tmp_path / "run", tmp_path / "out")
    assert_same(tensors, net.state_dict())
    assert objects_in(notes) == f"sampler (RunConfig of {HERE})"


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("make", "name", "what"),
    [
        (Net, "Net", "a whole module"),
        (lambda: {"model": Net()}, "Net", "a whole module"),
        (lambda: {"model": Net(), "ema": Net(), "optimizer": {"state": {}}}, "Net", "a whole"),
        (lambda: {"thing": Net(), "lr": 1}, "Net", "a whole module"),
        (lambda: RunConfig(inner=Net().state_dict()), "RunConfig", "an object in place of"),
        (lambda: {"state_dict": Mapped(Net().state_dict())}, "Mapped", "an object in place of"),
    ],
)
@pytest.mark.quick("<lambda>-Mapped-an object in place of-False", "Net-Net-a whole module-True")
def test_a_model_inside_of_an_object_is_refused_with_a_way_out_that_works(
    make: Callable[[], Any], name: str, what: str, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save(make(), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafePickleError, match=f"file holds {what}.*'{HERE}.{name}'") as caught:
        converted(path, tmp_path / "out")
    assert "torch.load(path, weights_only=False)" in caught.value.hint
    value = torch.load(path, weights_only=False)  # noqa: TID251 - as the hint says
    held = next(iter(value.values())) if type(value) is dict else value
    state = held.inner if name == "RunConfig" else held
    state = state.state_dict() if isinstance(state, nn.Module) else dict(state)
    torch.save(state, tmp_path / "state.pt")
    tensors, _ = converted(tmp_path / "state.pt", tmp_path / "out")
    assert_same(tensors, state)


def test_a_model_that_is_an_object_is_not_passed_over_for_another_one(tmp_path: Path) -> None:
    average = nn.Linear(2, 2).state_dict()
    torch.save({"model": Net(), "ema": average}, tmp_path / "model.pt")
    with pytest.raises(CkptkitError, match="holds 2 models: 'ema', 'model'"):
        converted(tmp_path / "model.pt", tmp_path / "out")
    tensors, _ = converted(tmp_path / "model.pt", tmp_path / "ema", select="ema")
    assert_same(tensors, average)
    with pytest.raises(UnsafePickleError, match="Net"):
        converted(tmp_path / "model.pt", tmp_path / "out", select="model")


@pytest.mark.parametrize(
    "beside", [{"ema": Net()}, {"hparams": {"model": Net()}}, {"model": Net(), "ema": Net()}]
)
def test_a_module_that_cannot_be_read_is_no_second_model(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    state = nn.Linear(2, 2).state_dict()
    torch.save({"state_dict": state, **beside}, tmp_path / "model.pt")
    tensors, notes = converted(tmp_path / "model.pt", tmp_path / "out")
    assert_same(tensors, state)
    assert f"(Net of {HERE}, holds" in objects_in(notes)


def test_a_number_is_no_model_beside_a_module(tmp_path: Path) -> None:
    torch.save({"model": Net(), "best": torch.tensor(0.5)}, tmp_path / "model.pt")
    with pytest.raises(CkptkitError):
        converted(tmp_path / "model.pt", tmp_path / "out")


def test_arrays_in_place_of_tensors_are_refused_with_a_way_out_that_works(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    arrays = {name: value.numpy() for name, value in state.items()}
    torch.save({"state_dict": arrays, "epoch": 1}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="2 arrays of numpy") as caught:
        converted(tmp_path / "model.pt", tmp_path / "out")
    assert "torch.from_numpy" in caught.value.hint
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(tensors, tmp_path / "again.pt")
    assert_same(converted(tmp_path / "again.pt", tmp_path / "out")[0], state)


@pytest.mark.filterwarnings("ignore")  # of Lightning about itself
def test_lightnings_average_is_taken_as_lightning_loads_it(tmp_path: Path) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="last", every_n_train_steps=3)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        callbacks=[EMAWeightAveraging(decay=0.5), checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.ones(8, 2)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)  # noqa: TID251 - Lightning's
    tensors, notes = converted(tmp_path / "last.ckpt", tmp_path / "out")
    assert_same(tensors, dict(saved["state_dict"]))
    (note,) = [note for note in notes if "average of the weights" in note]
    select = note.partition("--select ")[2].split()[0]
    tensors, _ = converted(tmp_path / "last.ckpt", tmp_path / "trained", select=select)
    assert_same(tensors, dict(saved["current_model_state"]))
    assert not torch.equal(tensors["net.weight"], saved["state_dict"]["net.weight"])


def made_class(patch: pytest.MonkeyPatch, name: str, *bases: type, **attributes: Any) -> Any:
    """Makes a class of a package that is not installed, so that it can be pickled."""
    module, _, cls = name.rpartition(".")
    steps = module.split(".")
    for at in range(1, len(steps) + 1):
        part = ".".join(steps[:at])
        patch.setitem(sys.modules, part, sys.modules.get(part, types.ModuleType(part)))
    made = type(cls, bases, {"__module__": module, **attributes})
    patch.setattr(sys.modules[module], cls, made, raising=False)
    return made


class Packed(torch.Tensor):
    attribute = "codes"

    @staticmethod
    def __new__(cls: Any, local: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=torch.float32)

    def __init__(self, local: torch.Tensor) -> None:
        setattr(self, self.attribute, local)

    @property
    def local(self) -> torch.Tensor:
        held: torch.Tensor = getattr(self, self.attribute)
        return held

    def dequantize(self) -> torch.Tensor:
        return self.local.float() / 2

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ == "is_pinned":
            return False
        return cls(args[0].local.clone())  # detach, clone and copies


@pytest.mark.parametrize("sharded", [True, False])
def test_packed_weights_are_refused_by_class_with_a_way_out_that_works(
    sharded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cls = made_class(monkeypatch, "torchao.quantization.Int8Tensor", Packed)
    codes = torch.randint(-128, 127, (64, 256), dtype=torch.int8)
    state = {"layer.weight": cls(codes), "layer.bias": torch.ones(64)}
    path = tmp_path / "model"
    if sharded:
        dcp.save(state, checkpoint_id=path)
    else:
        path.mkdir()
        torch.save(state, path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"'torchao\.quantization\.Int8Tensor'") as error:
        converted(path, tmp_path / "out")
    assert "damaged" not in str(error.value) + error.value.hint
    expression = error.value.hint.split("`")[1]
    model = types.SimpleNamespace(state_dict=lambda: state)
    plain = eval(expression, {"torch": torch, "model": model})  # noqa: S307 - as the hint says
    torch.save(plain, tmp_path / "plain.bin")
    tensors, _ = converted(tmp_path / "plain.bin", tmp_path / "out")
    assert_same(tensors, {"layer.weight": codes.float() / 2, "layer.bias": torch.ones(64)})


@pytest.mark.filterwarnings("ignore:.*is an Enum subclass", "ignore:.*torchao")
def test_the_way_out_works_for_weights_of_torchao_beside_plain_dtensors(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch.save(model.state_dict(), tmp_path / "model.bin")
    with pytest.raises(UnsupportedError, match="torchao") as error:
        converted(tmp_path / "model.bin", tmp_path / "out")
    rendezvous = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        state = {**model.state_dict(), "sharded": sharded}
        held = types.SimpleNamespace(state_dict=lambda: state)
        expression = error.value.hint.split("`")[1]
        plain = eval(expression, {"torch": torch, "model": held})  # noqa: S307 - as the hint says
        assert plain["sharded"] is sharded
        dcp.save(plain, checkpoint_id=tmp_path / "plain")
    finally:
        distributed.destroy_process_group()
    tensors, _ = converted(tmp_path / "plain", tmp_path / "out")
    weights = {name: t for name, t in model.state_dict().items() if name != "0.weight"}
    dequantized: Any = model[0].weight
    whole = {"0.weight": dequantized.dequantize(), "sharded": torch.ones(4, 2)}
    assert_same(tensors, weights | whole)


def test_packed_states_of_an_optimizer_are_refused_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cls = made_class(monkeypatch, "torchao.optim.subclass_8bit.OptimState8bit", Packed)
    codes = torch.randint(-128, 127, (64, 256), dtype=torch.int8)
    weight = torch.randn(64, 256)
    optimizer = {"state": {"layer.weight": {"exp_avg": cls(codes), "step": torch.tensor(1.0)}}}
    optimizer["param_groups"] = [{"lr": 0.1, "params": ["layer.weight"]}]  # type: ignore[assignment]
    document = {"model": {"layer.weight": weight}, "optimizer": optimizer}
    dcp.save(document, checkpoint_id=tmp_path / "dcp")
    torch.save(document, tmp_path / "model.pt")
    for number, source in enumerate((tmp_path / "dcp", tmp_path / "model.pt")):
        tensors, _ = converted(source, tmp_path / f"out{number}")
        assert_same(tensors, {"layer.weight": weight})
        with pytest.raises(UnsupportedError, match="OptimState8bit") as caught:
            converted(source, tmp_path / "refused", optimizer=True)
        assert "without --optimizer" in caught.value.hint
        assert ckptkit.verify(source).ok


def test_weights_of_float8_training_are_the_float32_tensors_in_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"
    weight = torch.randn(16, 32)
    held = made_class(monkeypatch, name, Packed, attribute="_tensor")(weight)
    dcp.save({"model": {"layer.weight": held}}, checkpoint_id=tmp_path / "dcp")
    torch.save({"layer.weight": held}, tmp_path / "model.pt")
    for number, source in enumerate((tmp_path / "dcp", tmp_path / "model.pt")):
        tensors, _ = converted(source, tmp_path / f"out{number}")
        assert_same(tensors, {"layer.weight": weight})


def test_a_chunk_that_is_short_for_no_reason_is_damage(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(64, 64)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())  # noqa: S301, TID251 - made right here
    for info in (metadata.storage_data or {}).values():
        info.length = 5000
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="fewer bytes than its elements"):
        converted(tmp_path / "dcp", tmp_path / "out")


def test_bytecheckpoints_bare_elements_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes are torch's by name; chunks have no container."""
    folder = tmp_path / "run" / "global_step_5" / "model"
    state = {"0.weight": torch.randn(8, 4), "0.bias": torch.randn(8)}
    dcp.save(state, checkpoint_id=folder)
    path = folder / ".metadata"
    metadata: Any = pickle.loads(path.read_bytes())  # noqa: S301, TID251 - made right here
    package = "bytecheckpoint.checkpointer.meta_type"
    own_metadata = made_class(monkeypatch, f"{package}.Metadata")
    own_info = made_class(monkeypatch, f"{package}._StorageInfo")
    data, described = b"", {}
    for index in metadata.storage_data:
        tensor = state[index.fqn]
        fields = {"relative_path": "__0_0.distcp", "offset": len(data), "length": tensor.nbytes}
        metadata.storage_data[index] = own_info()
        metadata.storage_data[index].__dict__.update(fields)
        data += tensor.numpy().tobytes()
        described[index] = pickled_alone(tensor)
    (folder / "__0_0.distcp").write_bytes(data)
    root = own_metadata()
    root.__dict__.update(metadata.__dict__, all_tensor_metadata=described, storage_meta=None)
    path.write_bytes(pickle.dumps(root))
    tensors, _ = converted(tmp_path / "run", tmp_path / "out")
    assert_same(tensors, state)
    assert ckptkit.inspect(tmp_path / "run").writer == "ByteCheckpoint"
    turned = next(index for index in described if index.fqn == "0.weight")
    described[turned] = pickled_alone(torch.randn(4, 8).t())
    path.write_bytes(pickle.dumps(root))
    with pytest.raises(UnsupportedError, match="not stored row by row"):
        converted(folder, tmp_path / "turned")


def pickled_alone(tensor: torch.Tensor, key: object = "0") -> bytes:
    """Pickles a tensor as `torch.save` does, without its elements."""
    buffer = io.BytesIO()
    pickler = Numbering(buffer, 2)
    pickler.key = key
    pickler.dump(tensor)
    return buffer.getvalue()


class Numbering(pickle.Pickler):
    """Gives storages keys, as programs do that write archives without `torch.save`."""

    key: object = None

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            return None
        untyped = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
        number = len(self.storages)
        self.storages[number] = untyped
        key = number if self.key is None else self.key
        return "storage", torch.FloatStorage, key, "cpu", untyped.nbytes() // 4


def test_storages_may_be_numbered_as_litgpt_numbers_them(tmp_path: Path) -> None:
    state = {"lm_head.weight": torch.randn(4, 3), "transformer.wte.weight": torch.randn(4, 3)}
    buffer = io.BytesIO()
    pickler = Numbering(buffer, 2)
    pickler.dump(state)
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "lit_model.pth"))
    writer.write_record("data.pkl", buffer.getvalue(), len(buffer.getvalue()))
    for number, storage in pickler.storages.items():
        data = bytes(torch.tensor([], dtype=torch.uint8).set_(storage).tolist())
        writer.write_record(f"data/{number}", data, len(data))
    writer.write_end_of_file()
    assert b"K\x00X" in buffer.getvalue()  # a number in place of a text
    tensors, _ = converted(tmp_path / "lit_model.pth", tmp_path / "out")
    assert_same(tensors, state)
