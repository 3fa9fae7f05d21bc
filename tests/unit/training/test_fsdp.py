"""The file that tells what flat parameters are made of, from the training side to the reader."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

import ckptkit
from ckptkit.core.errors import FormatError, UsageError
from ckptkit.formats.ranks.flat import ModelParameter, compute_vectors, parse_layout
from ckptkit.training import write_flat_layout

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"


@pytest.mark.usefixtures("alone")
def test_the_layout_tells_names_shapes_and_places_and_replaces_an_older_one(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank shards nothing, as torch says
        net[1] = Fsdp(net[1], device_id=torch.device("cpu"))
        model = Fsdp(net, device_id=torch.device("cpu"))
    path = write_flat_layout(model, tmp_path / "step")
    assert path == tmp_path / "step" / "ckptkit" / "flat_parameters.json"
    assert write_flat_layout(model, tmp_path / "step") == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    outer, inner = parse_layout(path.read_bytes(), "here")
    assert (outer.name, inner.name) == ("_flat_param", "1._flat_param")
    assert [(m.names, m.shape, m.start) for m in outer.members] == [
        (("0.weight",), (5, 3), 0),
        (("0.bias",), (5,), 15),
    ]
    assert [(m.names, m.shape, m.start) for m in inner.members] == [(("1.weight",), (3, 5), 0)]


def test_a_model_without_flat_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no module of the model is wrapped by FSDP1"):
        write_flat_layout(nn.Linear(2, 2), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("release", ["2_4", "2_6", "2_9"])
def test_a_local_state_of_an_older_torch_lies_as_the_rules_say(
    release: str, tmp_path: Path
) -> None:
    case = FIXTURES / f"files_torch_{release}"
    truth = load_file(case / "truth_full.safetensors")
    names = ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias")
    parameters = [ModelParameter((name,), tuple(truth[name].shape)) for name in names]
    units = [
        {
            "path": vector.name.removesuffix("_flat_param").removesuffix("."),
            "size": vector.elements,
            "names": [member.names[0] for member in vector.members],
            "shapes": [list(member.shape) for member in vector.members],
            "starts": [member.start for member in vector.members],
        }
        for vector in compute_vectors(parameters, {"_flat_param": 26, "up._flat_param": 44}, 2, {})
    ]
    source = shutil.copytree(case / "checkpoint" / "local", tmp_path / "local")
    (source / "ckptkit").mkdir()
    layout = source / "ckptkit" / "flat_parameters.json"
    layout.write_text(json.dumps({"flat_parameters": units}))
    ckptkit.consolidate(source, tmp_path / "out", names="live")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    layout.write_text("{")
    with pytest.raises(FormatError, match="is not JSON"):
        ckptkit.inspect(source)
