"""File names inside files that lead out of the folder: nothing outside is read or written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsafePathError
from ckptkit.core.manifest import CHECKSUM, MANIFEST_NAME, _compute_checksum, parse_manifest
from ckptkit.formats.others.torchsnapshot import TorchsnapshotReader
from ckptkit.formats.parsing import read_index_document
from ckptkit.hub import download
from ckptkit.storage.overlay import MemorySource
from ckptkit.writer.record import parse_record
from tests.made_up_runs import save_step

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
Changing = Callable[[Path, Callable[[Metadata], None]], None]
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GENERATIONS = FIXTURES / "peft_generations"
SHARDED = "fsdp2_hsdp"
OUT = ("/etc/passwd", "../secret", "a/../../secret", "..", "x\0y")


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/__0_0.distcp", "a/../../b.distcp", ""])
def test_a_relative_path_that_leads_out_is_refused(
    path: str, copied: Copied, refusal: Refusal, change_metadata: Changing
) -> None:
    checkpoint = copied(SHARDED)

    def redirect(metadata: Metadata) -> None:
        for stored in metadata.storage_data.values():
            if stored.relative_path == "__2_0.distcp":
                stored.relative_path = path

    change_metadata(checkpoint, redirect)
    error = refusal(checkpoint, UnsafePathError)
    assert repr(path) in str(error)


@pytest.mark.parametrize("name", [*OUT, "..\\secret", "C:\\secret"])
def test_an_index_of_shards_names_no_file_outside(name: str) -> None:
    index = json.dumps({"weight_map": {"w": name}}).encode()
    source = MemorySource({"model.safetensors.index.json": index})
    with pytest.raises(UnsafePathError):
        read_index_document(source, "model.safetensors.index.json")


@pytest.mark.parametrize("is_sealed", [True, False], ids=["its checksum made anew", "without one"])
@pytest.mark.parametrize("name", OUT)
def test_a_manifest_names_no_file_outside(name: str, is_sealed: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = save_step(run, 1)
    document = json.loads((step / MANIFEST_NAME).read_bytes())
    document["files"][name] = {"size_bytes": 1}
    del document[CHECKSUM]  # which proves no origin: who changes a manifest can compute it
    if is_sealed:
        document[CHECKSUM] = _compute_checksum(document)
    (step / MANIFEST_NAME).write_text(json.dumps(document))
    (tmp_path / "secret").write_text("x")
    with pytest.raises(UnsafePathError):
        parse_manifest((step / MANIFEST_NAME).read_bytes(), where="x")
    save_step(run, 2)
    save_step(run, 3)
    try:
        ckptkit.prune(run, keep_last=1)
    except CkptkitError:
        assert step.is_dir()
    assert (tmp_path / "secret").exists()


@pytest.mark.parametrize("name", OUT)
def test_a_record_of_a_rank_names_no_file_outside(name: str) -> None:
    file = {"path": name, "size_bytes": 1, "crc32": None}
    record = {"rank": 0, "world_size": 1, "attempt": "a", "units": {}, "files": [file]}
    with pytest.raises(UnsafePathError):
        parse_record(json.dumps(record).encode(), where="x")


@pytest.mark.parametrize("name", OUT)
def test_a_torchsnapshot_names_no_file_outside(name: str) -> None:
    root = FIXTURES / "torchsnapshot_rank_models" / "checkpoint"
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    document = json.loads(files[".snapshot_metadata"])
    entry = next(e for e in document["manifest"].values() if "location" in e)
    entry["location"] = name
    files[".snapshot_metadata"] = json.dumps(document).encode()
    reader = TorchsnapshotReader()
    with pytest.raises(CkptkitError):
        reader.read_index(MemorySource(files), reader.find(sorted(files))[0])


def test_a_base_that_an_adapter_names_is_looked_at_and_never_copied(
    tmp_path: Path, out: Path
) -> None:
    """The name of a base is text of the attacker; a folder of that name may exist here."""
    private = tmp_path / "private"
    shutil.copytree(GENERATIONS / "bases" / "llama", private)
    (private / "id_rsa").write_text("a key")
    (private / "tokenizer_config.json").write_text('{"secret": "of this machine"}')
    adapter = tmp_path / "adapter"
    shutil.copytree(GENERATIONS / "peft_0_21" / "lora" / "adapter_0", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"{adapter}/../private"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    base = GENERATIONS / "bases" / "llama"
    ckptkit.merge_adapter(adapter, out, base=base)
    text = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"a key" not in text
    assert b"of this machine" not in text


def test_a_model_that_names_its_origin_is_not_looked_up(tmp_path: Path, out: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "tokenizer.json").write_text('{"secret": "of this machine"}')
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "hf_tied" / "checkpoint", source)
    config = json.loads((source / "config.json").read_text())
    config |= {"_name_or_path": str(private), "auto_map": {"AutoModel": "../private--x.Y"}}
    (source / "config.json").write_text(json.dumps(config))
    ckptkit.consolidate(source, out)
    assert "tokenizer.json" not in {path.name for path in out.rglob("*")}
    assert "auto_map" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", OUT[:4])
def test_a_hub_that_lists_a_file_outside_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SimpleNamespace(path=name, size=1, blob_id="a" * 40, lfs=None)
    monkeypatch.setattr(download, "commit_of", lambda *_: "c" * 40)
    monkeypatch.setattr(download, "list_files", lambda *_: [file])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnsafePathError):
        download.pull("me/model", tmp_path / "box" / "pulled", endpoint="http://127.0.0.1:9")
    assert [path.name for path in (tmp_path / "box").iterdir()] == []


def test_a_hub_that_lists_no_names_is_refused() -> None:
    from ckptkit.core.errors import HubError
    from ckptkit.hub.client import Hub, list_files

    hub = object.__new__(Hub)
    hub.repo_id, hub._was_reached, hub.token = "me/model", False, "t"
    for odd in ({"path": {"a": 1}}, {"path": "a\ud800"}, {"path": "a\nb"}, {"size": -1}):
        facts: dict[str, Any] = {"path": "a", "size": 1, "blob_id": "b"} | odd
        tree = [SimpleNamespace(**facts)]
        hub.api = SimpleNamespace(list_repo_tree=lambda *_, tree=tree, **__: tree)  # type: ignore[assignment]
        with pytest.raises(HubError, match="without a name"):
            list_files(hub, "main")


def test_side_files_are_taken_from_the_checkpoint_alone(tmp_path: Path, out: Path) -> None:
    """A link in the place of a tokenizer is no file of the checkpoint."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "hf_tied" / "checkpoint", source)
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (source / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    os.link(source / "config.json", source / "special_tokens_map.json")
    ckptkit.consolidate(source, out)
    assert not (out / "tokenizer.json").exists()
