"""What an extracted adapter records of its base, and what a merge from the folder makes of it."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.adapters.base_identity import collect_digests
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import FormatError, RefusedError
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import event_of_note
from ckptkit.engine.outcome import Event, Planned
from ckptkit.engine.reader import Origin

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PLAIN = FIXTURES / "peft_fsdp2"
QLORA = FIXTURES / "peft_qlora_fsdp2"
OURS = FIXTURES / "peft_checkpointer"
SAME = "the base is the one that the adapter was trained on, proven by"


def extracted(case: Path, out: Path) -> Manifest:
    config = None if case == OURS else case / "adapter_config.json"
    adapter = "default" if case == OURS else None
    source = case / "checkpoint"
    return ckptkit.extract_adapter(source, out, adapter=adapter, adapter_config=config)


def notes_of_merging(source: Path, out: Path, base: Path, **options: Any) -> list[str]:
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Planned):
            notes.extend(event.notes)

    ckptkit.merge_adapter(source, out, base=base, listener=listen, **options)
    return notes


def changed_base(folder: Path, case: Path, change: Mapping[str, NDArray[Any]]) -> Path:
    shutil.copytree(case / "base", folder)
    held = load_file(folder / "model.safetensors") | dict(change)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def spoilt_weight(case: Path, name: str) -> dict[str, NDArray[Any]]:
    weight = load_file(case / "base" / "model.safetensors")[name].copy()
    weight[-1, -1] += 1
    return {name: weight}


@pytest.mark.parametrize("case", [PLAIN, OURS], ids=lambda case: case.name)
def test_the_digests_of_a_base_in_shards_are_those_of_its_whole_tensors(
    case: Path, tmp_path: Path
) -> None:
    digests = extracted(case, tmp_path / "adapter").source["base_digests"]
    base = load_file(case / "base" / "model.safetensors")
    assert 1 <= len(digests) <= 8
    for name, told in digests.items():
        weight = base[name]
        assert told == {
            "dtype": str(weight.dtype),
            "shape": list(weight.shape),
            "crc32": zlib.crc32(weight.tobytes()),
        }


def test_digests_are_spread_over_all_weights_and_left_out_without_checksums() -> None:
    with open_checkpoint(PLAIN / "checkpoint") as found:
        origin = Origin("source", found.source, found.index)
        entry = next(e for e in found.index.of_part("model") if len(e.shape) > 1)
        many = collect_digests(origin, {str(number): entry for number in range(80)})
    assert list(many) == [str(10 * number) for number in range(8)]
    with open_checkpoint(PLAIN / "base") as found:
        origin = Origin("source", found.source, found.index)
        weights = {str(e.name): e for e in found.index.of_part("model")}
        assert collect_digests(origin, weights) == {}


def test_the_base_that_was_trained_on_is_proven_and_another_is_refused(tmp_path: Path) -> None:
    manifest = extracted(PLAIN, tmp_path / "adapter")
    notes = notes_of_merging(tmp_path / "adapter", tmp_path / "merged", PLAIN / "base")
    count = len(manifest.source["base_digests"])
    (same,) = (note for note in notes if note == f"{SAME} {count} of its weights")
    assert event_of_note(same) == "note"
    assert not any("nothing proves" in note for note in notes)

    name = list(manifest.source["base_digests"])[-1]
    other = changed_base(tmp_path / "other", PLAIN, spoilt_weight(PLAIN, name))
    with pytest.raises(RefusedError, match=f"1 of {count} weights have other checksums.*{name}"):
        notes_of_merging(tmp_path / "adapter", tmp_path / "no", other)
    assert not (tmp_path / "no").exists()
    notes = notes_of_merging(
        tmp_path / "adapter", tmp_path / "allowed", other, allow_other_base=True
    )
    assert any(note.startswith("merged onto another base") for note in notes)
    assert not any(note.startswith(SAME) for note in notes)


def test_a_base_of_another_element_type_stays_unproven(tmp_path: Path) -> None:
    extracted(PLAIN, tmp_path / "adapter")
    held = load_file(PLAIN / "base" / "model.safetensors")
    rounded = {name: weight.astype(bfloat16) for name, weight in held.items()}
    base = changed_base(tmp_path / "rounded", PLAIN, rounded)
    notes = notes_of_merging(tmp_path / "adapter", tmp_path / "merged", base)
    assert any("prove nothing about a base of other element types" in note for note in notes)
    assert not any(note.startswith(SAME) for note in notes)


def test_an_adapter_of_a_difference_knows_its_base_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tuned = changed_base(tmp_path / "tuned", PLAIN, spoilt_weight(PLAIN, name))
    shutil.copytree(PLAIN / "base", tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    manifest = ckptkit.adapter_from_diff(tuned, tmp_path / "adapter", base="start", rank=2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "start")
    weight = load_file(PLAIN / "base" / "model.safetensors")[name]
    assert manifest.source["base_digests"][name]["crc32"] == zlib.crc32(weight.tobytes())
    shutil.rmtree(tmp_path / "start")
    notes = notes_of_merging(tmp_path / "adapter", tmp_path / "merged", PLAIN / "base")
    assert f"{SAME} 1 of its weights" in notes
    with pytest.raises(RefusedError, match="other checksums"):
        notes_of_merging(tmp_path / "adapter", tmp_path / "no", tuned)


def test_an_adapter_of_packed_weights_is_merged_onto_what_they_stood_for(tmp_path: Path) -> None:
    told = extracted(QLORA, tmp_path / "adapter").source["base_quantization"]
    assert told["weights"] == 7
    assert [len(one["weights"]) for one in told["packings"]] == [7]
    notes = notes_of_merging(
        tmp_path / "adapter", tmp_path / "merged", QLORA / "base", double_quant=True
    )
    assert any("proven by the packed bytes of 7" in note for note in notes)
    notes = notes_of_merging(
        tmp_path / "adapter", tmp_path / "original", QLORA / "base", qlora_base="original"
    )
    assert any("merged onto their originals" in note for note in notes)
    assert not any("changes nothing" in note for note in notes)
    advised = ckptkit.inspect(tmp_path / "adapter").adapter
    assert advised is not None
    assert advised.merge("x").endswith("--base ORG/NAME --double-quant")
    assert "--no-double-quant" in advised.remark
    again = ckptkit.extract_adapter(tmp_path / "adapter", tmp_path / "again")
    assert again.source["base_quantization"] == told


def test_without_a_record_of_the_packing_plain_weights_are_refused_unasked(tmp_path: Path) -> None:
    extracted(QLORA, tmp_path / "adapter")
    manifest = tmp_path / "adapter" / "ckptkit.json"
    document = json.loads(manifest.read_bytes())
    del document["source"]["base_quantization"]["packings"]  # as earlier versions wrote it
    del document["checksum"]
    manifest.write_text(json.dumps(document))
    with pytest.raises(RefusedError, match="7 packed weights") as caught:
        notes_of_merging(tmp_path / "adapter", tmp_path / "no", QLORA / "base")
    assert str(QLORA / "checkpoint") in caught.value.hint
    assert "--qlora-base original" in caught.value.hint
    advised = ckptkit.inspect(tmp_path / "adapter").adapter
    assert advised is not None
    assert advised.merge("x").endswith("--base ORG/NAME --qlora-base original")
    assert str(QLORA / "checkpoint") in advised.remark


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_an_adapter_alone_is_of_a_packed_base_where_the_configuration_says_so(
    settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    source = tmp_path / "run"
    source.mkdir()
    shutil.copy(PLAIN / "adapter_config.json", source)
    shutil.copy(PLAIN / "adapter_truth.safetensors", source / "adapter_model.safetensors")
    config = json.loads((PLAIN / "base" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    told = ckptkit.extract_adapter(source, tmp_path / "adapter").source["base_quantization"]
    assert told == {"kinds": [kind], "weights": 0, "checkpoint": str(source)}
    with pytest.raises(RefusedError, match=kind):
        notes_of_merging(tmp_path / "adapter", tmp_path / "no", PLAIN / "base")


@pytest.mark.parametrize(
    "damage",
    [
        {"base_digests": [1]},
        {"base_digests": {"x": {"dtype": "float32"}}},
        {"base_quantization": {"kinds": 4}},
        {"base_quantization": "nf4"},
    ],
)
def test_a_damaged_record_is_an_error(damage: dict[str, Any], tmp_path: Path) -> None:
    extracted(PLAIN, tmp_path / "adapter")
    path = tmp_path / "adapter" / "ckptkit.json"
    document = json.loads(path.read_text())
    document["source"] |= damage
    del document["checksum"]  # ckptkit 0.1 wrote none
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="damaged"):
        notes_of_merging(tmp_path / "adapter", tmp_path / "no", PLAIN / "base")


def test_a_weight_that_is_no_run_of_its_record_has_no_digest(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(32.0).reshape(4, 8)
    views = {"columns": whole[:, 2:5], "rows": whole[1:3]}
    held = {"plain": whole.clone(), "turned": whole.T.contiguous().T, **views}
    torch.save(held, tmp_path / "x.bin")
    with open_checkpoint(tmp_path / "x.bin") as found:
        origin = Origin("source", found.source, found.index)
        weights = {str(entry.name): entry for entry in found.index.tensors.values()}
        digests = collect_digests(origin, weights)
    assert weights.keys() == held.keys()
    assert list(digests) == ["plain"]
    assert digests["plain"].crc32 == zlib.crc32(np.arange(32, dtype=np.float32).tobytes())
