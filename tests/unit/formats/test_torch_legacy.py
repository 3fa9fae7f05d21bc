"""Files with the layout from before torch 1.6, and those that are older or no files of torch."""

from __future__ import annotations

import functools
import io
import pickle
import shutil
import struct
import tarfile
from typing import Any

import pytest
import torch

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    LimitError,
    TruncatedFileError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import TensorIndex
from ckptkit.formats.pickle import torch_archives as torch_legacy
from ckptkit.formats.pickle.torch_archives import ArchiveTable
from ckptkit.formats.torch_files import TorchFileReader
from ckptkit.storage.overlay import MemorySource
from tests import files_in_memory as in_memory

MAGIC = 0x1950A86A20F9469CFC6C
FACTS = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"long": 4}}


saved = functools.partial(in_memory.saved, _use_new_zipfile_serialization=False)


def read(data: bytes) -> TensorIndex:
    return in_memory.read_files(TorchFileReader, {"m.pt": data})


def refused(data: bytes, error: type[CkptkitError], message: str) -> CkptkitError:
    with pytest.raises(error, match=message) as caught:
        read(data)
    assert caught.value.where.startswith("memory/m.pt")
    return caught.value


def made(*parts: object) -> bytes:
    return b"".join(part if isinstance(part, bytes) else pickle.dumps(part, 2) for part in parts)


def values_in(index: TensorIndex, key: str, data: bytes) -> list[float]:
    found: list[float] = in_memory.tensor_at(index, key, {"m.pt": data}).flatten().tolist()
    assert {record.crc32 for record in index.records} == {None}
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_found_whatever_the_protocol_of_the_pickles(protocol: int) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"base": base, "turned": base.t(), "row": base[1], "half": torch.ones(3).half()}
    data = saved({"model": state, "epoch": 3, "empty": torch.zeros(0)}, pickle_protocol=protocol)
    index = read(data)
    for name, tensor in state.items():
        assert values_in(index, f"model.{name}", data) == tensor.flatten().tolist()
    assert index.values["epoch",] == 3
    assert len(index.records) == 3


def test_a_pickle_longer_than_the_first_window_is_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_legacy, "_FIRST_WINDOW", 64)
    data = saved({f"layer.{number}.weight": torch.full((2,), number) for number in range(50)})
    index = read(data)
    assert values_in(index, "layer.49.weight", data) == [49, 49]
    monkeypatch.setattr(torch_legacy, "MAX_PICKLE_BYTES", 1024)
    refused(data, LimitError, "pickle has more than 1,024 bytes")


def test_only_headers_and_counts_are_read() -> None:
    data = saved({"a": torch.zeros(1_000_000), "b": torch.zeros(1_000_000)})
    reads: list[int] = []

    class Counting(MemorySource):
        def read(self, path: str, start: int, stop: int) -> bytes:
            reads.append(stop - start)
            return super().read(path, start, stop)

    table = ArchiveTable()
    file = table.open(Counting({"m.pt": data}), "m.pt")
    for name in ("a", "b"):
        table.record(file, file.dictionary().tensor(name))
    assert sum(reads) < 500_000


def test_a_file_cut_short_anywhere_is_refused() -> None:
    data = saved({"a": torch.arange(4.0), "b": torch.arange(3)})
    for length in range(len(data)):
        with pytest.raises(FormatError):
            read(data[:length])
    refused(data + b"\0", FormatError, "1 bytes follow the last storage")


def test_hostile_pickles_are_refused_in_every_place() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (shutil.rmtree, ("/nowhere",))

    before: list[object] = [MAGIC, 1001, FACTS, {}]
    for count in range(1, len(before) + 1):
        refused(made(*before[:count], Evil()), UnsafePickleError, "rmtree")
    bomb = b"\x80\x02Nr\xff\xff\xff\x7f."
    refused(made(MAGIC, 1001, FACTS, bomb), FormatError, "memo slot")


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((MAGIC, 1002), UnsupportedError, "layout has version 1002, only 1,001"),
        ((MAGIC, [1001]), UnsupportedError, "layout has no number for a version, only 1,001"),
        ((MAGIC, 1001, {**FACTS, "little_endian": False}), UnsupportedError, "big-endian"),
        ((MAGIC, 1001, []), FormatError, "does not state the byte order"),
        ((MAGIC, 1001, FACTS, {}, "keys"), FormatError, "is not one of keys"),
        ((MAGIC, 1001, FACTS, {}, ["1"]), FormatError, "1 storages are listed"),
        ((MAGIC, 1001, FACTS, {}), TruncatedFileError, "in the middle of a value"),
    ],
)
def test_layouts_that_are_not_modelled_are_refused(
    parts: tuple[object, ...], error: type[CkptkitError], message: str
) -> None:
    facts = list(parts)
    if len(facts) == 2:
        facts.append(FACTS)
    refused(made(*facts), error, message)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    data = saved({"a": torch.arange(4.0)})
    count = struct.pack("<q", 4)
    at = data.rindex(count)
    refused(
        data[:at] + struct.pack("<q", 5) + data[at + 8 :],
        FormatError,
        r"has 5 elements, its tensors need 4",
    )
    refused(data[:-4], TruncatedFileError, "storages end at byte")


def test_a_storage_that_is_a_view_is_refused_by_name() -> None:
    data = saved({"a": torch.arange(4.0)})
    identity = data[data.index(b"storage") :]
    end = identity.index(b"Q")
    assert identity[:end].count(b"N") >= 1
    at = data.index(identity[:end]) + identity[:end].rindex(b"N")
    view = b"(X\x01\x00\x00\x001K\x00K\x04t"
    refused(data[:at] + view + data[at + 1 :], UnsupportedError, "view of another")


def test_older_archives_and_plain_pickles_are_refused_by_name() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    error = refused(buffer.getvalue(), UnsupportedError, r"tar archive that torch wrote before 0\.")
    assert "weights_only=False" in error.hint
    refused(
        made({"a": 1, "b": "more than a few bytes"}),
        UnsupportedError,
        "a plain pickle, not what `torch.save` writes",
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_module_is_refused_with_the_way_out(zipped: bool) -> None:
    buffer = io.BytesIO()
    torch.save(Net(), buffer, _use_new_zipfile_serialization=zipped)
    error = refused(buffer.getvalue(), UnsafePickleError, "file holds a whole module, which needs")
    assert "Net" in error.message
    assert "`state_dict()`" in error.hint


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive_is_refused_by_name() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    error = refused(buffer.getvalue(), UnsupportedError, "TorchScript program")
    assert "torch.jit.load" in error.hint
