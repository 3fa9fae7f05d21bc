"""PyTrees that Orbax wrote, beside the live arrays; `fixtures/generators/orbax_pytrees.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import ChecksumError, FormatError, IncompleteCheckpointError, RefusedError
from tests.live_truth import FIXTURES, copied, refuse, truth_of, written
from tests.tensor_images import image_of, images

CASES = (
    "orbax_manager",
    "orbax_zarr3_chunks",
    "orbax_folders",
    "orbax_uncompressed",
    "orbax_without_zeros",
    "orbax_two_hosts",
)


@pytest.mark.parametrize("case", CASES)
def test_the_newest_step_is_bit_equal_to_the_live_arrays(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    assert written(source, tmp_path / "out") == truth_of(case)
    found = ckptkit.inspect(source)
    assert (found.format, found.step, found.problems) == ("orbax", 10, ())
    assert ckptkit.verify(source).ok
    with ckptkit.open(source) as checkpoint:
        assert {name: image_of(checkpoint[name]) for name in truth_of(case)} == truth_of(case)
    ckptkit.convert(source, tmp_path / "dcp", to="dcp", names="live")
    assert ckptkit.diff(source, tmp_path / "dcp").same


def test_an_item_of_a_step_may_be_named_itself(tmp_path: Path) -> None:
    source = FIXTURES / "orbax_zarr3_chunks" / "checkpoint" / "10" / "items"
    assert written(source, tmp_path / "out") == truth_of("orbax_zarr3_chunks")


def test_a_database_without_a_description_of_its_tree_has_the_names_of_its_keys(
    tmp_path: Path,
) -> None:
    """As JAX's own serialization writes it, and Orbax did before it had `_METADATA`."""
    run = copied("orbax_two_hosts", tmp_path / "run")
    (run / "10" / "state" / "_METADATA").unlink()
    assert written(run, tmp_path / "out") == truth_of("orbax_two_hosts")


def test_a_tree_without_containers_is_a_model(tmp_path: Path) -> None:
    run = copied("orbax_folders", tmp_path / "run") / "10" / "default"
    for path in list(run.iterdir()):
        if not path.name.startswith("params.layers_0."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.rename(run / path.name.removeprefix("params.layers_0."))
    (run / "_METADATA").write_text("{}")
    found = written(run, tmp_path / "out")
    truth = truth_of("orbax_folders")
    assert found == {name: truth[f"params.layers_0.{name}"] for name in ("bias", "kernel")}


def test_states_of_the_optimizer_are_known_as_such() -> None:
    found = ckptkit.inspect(FIXTURES / "orbax_manager" / "checkpoint")
    parts = {tree.name: (tree.part, tree.tensors) for tree in found.trees}
    count = len(truth_of("orbax_manager", "truth_optimizer"))
    assert parts["opt_state"] == ("optimizer", count)


def _lose_a_chunk(step: Path) -> None:
    (step / "default" / "params.layers_0.kernel" / "0.1").unlink()


def _lose_an_array(step: Path) -> None:
    shutil.rmtree(step / "default" / "params.layers_0.kernel")


def _lose_the_manifest(step: Path) -> None:
    (step / "state" / "manifest.ocdbt").unlink()


def _rename_as_unfinished(step: Path) -> None:
    step.rename(step.with_name("10.orbax-checkpoint-tmp"))


def _flip_a_bit_of_the_manifest(step: Path) -> None:
    path = step / "state" / "manifest.ocdbt"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def _lose_the_nodes_of_a_host(step: Path) -> None:
    shutil.rmtree(step / "state" / "ocdbt.process_1" / "d")


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        ("orbax_folders", _lose_a_chunk, r"'params.layers_0.kernel'.*the chunk at \[0, 32\]"),
        ("orbax_folders", _lose_an_array, "missing are params.layers_0.kernel"),
        ("orbax_two_hosts", _lose_the_manifest, "has no 'manifest.ocdbt'"),
        ("orbax_two_hosts", _lose_the_nodes_of_a_host, "is not there; it holds rows"),
        ("orbax_two_hosts", _flip_a_bit_of_the_manifest, "length or checksum"),
        ("orbax_manager", _rename_as_unfinished, "a save that did not end"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(
    case: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    run = copied(case, tmp_path / "run")
    shutil.rmtree(run / "3", ignore_errors=True)
    damage(run / "10")
    refuse(message, run, tmp_path / "out")


def test_an_older_step_is_taken_beside_one_that_did_not_end(tmp_path: Path) -> None:
    run = copied("orbax_manager", tmp_path / "run")
    _rename_as_unfinished(run / "10")
    assert ckptkit.inspect(run).path == str(run / "3")


def test_a_chunk_that_is_absent_is_no_zeros_where_orbax_writes_zeros(tmp_path: Path) -> None:
    run = copied("orbax_without_zeros", tmp_path / "run")
    path = run / "10" / "state" / "_METADATA"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": True}))
    refuse("'params.zeros'.*is not there", run, tmp_path / "out", IncompleteCheckpointError)


def test_two_arrays_of_one_name_are_refused_as_orbax_stored_one(tmp_path: Path) -> None:
    run = copied("orbax_folders", tmp_path / "run")
    path = run / "10" / "default" / "_METADATA"
    described = json.loads(path.read_text())
    tree = described["tree_metadata"]
    item = next(item for item in tree.values() if item["key_metadata"][0]["key"] == "params")
    first, second, *others = item["key_metadata"]
    joined = {**first, "key": f"{first['key']}.{second['key']}"}
    tree["joined"] = {**item, "key_metadata": [joined, *others]}
    path.write_text(json.dumps(described))
    refuse("two arrays called 'params", run, tmp_path / "out", FormatError)


def test_every_bit_of_nodes_and_manifests_is_proven(tmp_path: Path) -> None:
    run = copied("orbax_zarr3_chunks", tmp_path / "run")
    (path,) = (run / "10" / "items" / "d").iterdir()
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 61):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        refuse(None, run, tmp_path / "out", ChecksumError if at > 20 else Exception)


def test_what_it_is_not_compressed_with_is_named(tmp_path: Path) -> None:
    """What the hint says to do was run by hand, with what `fixtures/PROVENANCE.md` names."""
    run = copied("orbax_folders", tmp_path / "run")
    path = run / "10" / "default" / "params.layers_0.kernel" / ".zarray"
    path.write_text(path.read_text().replace('"zstd"', '"gzip"'))
    caught = refuse("compressed with 'gzip'", run, tmp_path / "out")
    assert f"c.restore('{run}/10/default'" in str(caught.value.hint)


def test_the_source_stays_while_states_in_its_tree_are_not_in_the_output(tmp_path: Path) -> None:
    run = copied("orbax_manager", tmp_path / "run")
    with pytest.raises(RefusedError, match="hold what is not in the output: optimizer tensor"):
        ckptkit.consolidate(run / "10", tmp_path / "out", delete_source=True)
    assert written(run, tmp_path / "again") == truth_of("orbax_manager")


def test_names_and_values_of_a_plain_save_are_kept(tmp_path: Path) -> None:
    source = FIXTURES / "orbax_manager" / "checkpoint" / "3" / "default"
    found = written(source, tmp_path / "out")
    assert found.keys() == truth_of("orbax_manager").keys()
    assert found != truth_of("orbax_manager")
    assert images(tmp_path / "out" / "model.safetensors") == found
