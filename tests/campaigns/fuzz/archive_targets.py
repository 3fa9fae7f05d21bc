"""Parsers of archives and pickles: of their bytes alone, without the folder that they are in."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.dcp.compression import ExpectedTensor, check_front, decompress, parse_front
from ckptkit.formats.dcp.metadata import ALLOWED as OF_DCP
from ckptkit.formats.dcp.metadata import parse_metadata
from ckptkit.formats.pickle.pickles import parse_first_pickle, parse_pickle, walk_values
from ckptkit.formats.pickle.torch_values import ALLOWED, storage_ref
from ckptkit.formats.pickle.torch_zip import (
    TensorCache,
    data_start,
    locate_tensor,
    open_archive,
    read_directory,
)
from ckptkit.formats.ranks.dtensor import SHARDED_ALLOWED
from ckptkit.formats.safetensors.reader import parse_header
from ckptkit.formats.trees import TRAINING_VALUES
from tests.campaigns.fuzz.judge import Target
from tests.campaigns.fuzz.mutation import (
    mutate_archive,
    mutate_json,
    mutate_pickle,
    mutate_zstd,
    pack_archive,
)
from tests.campaigns.fuzz.seeds import fixture, prefixed, strict

# Of torch.arange(6.0).reshape(2, 3).
_PICKLE = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n"
    b"FloatStorage\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04K\x06tq\x05QK\x00K\x02K\x03"
    b"\x86q\x06K\x03K\x01\x86q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
)
TENSOR = pack_archive(
    [
        ("archive/data.pkl", _PICKLE),
        ("archive/byteorder", b"little"),
        ("archive/data/0", np.arange(6, dtype="<f4").tobytes()),
        ("archive/version", b"3\n"),
    ]
)
FILE = fixture("universal_small_zero1", "*weight/fp32.pt")


def _run_directory(data: bytes) -> None:
    read = strict(data)
    for entry in read_directory(read, len(data), where="x").values():
        data_start(read, entry, where="x")
    open_archive(read, len(data), where="x").pickle()


def _run_tensor(data: bytes) -> None:
    """An archive that is like the one before it has to be read as it is without that one."""
    cache = TensorCache()
    locate_tensor(strict(TENSOR), len(TENSOR), where="x", cache=cache)
    outcomes: list[object] = []
    for known in (cache, None):
        try:
            outcomes.append(locate_tensor(strict(data), len(data), where="x", cache=known))
        except CkptkitError:
            outcomes.append(None)
    if outcomes[0] != outcomes[1]:
        raise AssertionError(f"the template changes what is found: {outcomes}")


_TABLES: tuple[Callable[[bytes], object], ...] = (
    lambda data: parse_pickle(data, ALLOWED, where="x", persistent=storage_ref),
    lambda data: parse_pickle(data, SHARDED_ALLOWED, where="x", persistent=storage_ref),
    lambda data: parse_pickle(data, TRAINING_VALUES, where="x", persistent=storage_ref),
    lambda data: parse_pickle(data, OF_DCP, where="x"),
    lambda data: parse_pickle(data, {}, where="x"),
    lambda data: parse_first_pickle(data, ALLOWED, where="x", persistent=storage_ref)[0],
)


def _run_pickle(data: bytes) -> None:
    if not data:
        return
    for path, _ in walk_values(_TABLES[data[0] % len(_TABLES)](data[1:]), limit=1_000, where="x"):
        repr(path)


def _pickle_seeds() -> list[bytes]:
    values: list[Any] = [
        {"a": [1, 2.5, None, True], "b": ("x", b"y", 2**70), 3: {"c": []}},
        [{"step": 7, "groups": [{"lr": 0.1, "params": [0, 1]}]}] * 2,
    ]
    plain = [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4, 5)]
    whole = [open_archive(strict(one), len(one), where="").pickle() for one in (TENSOR, FILE)]
    files = [
        fixture("rank_files_placements", "*model*.pt"),
        fixture("verl_fsdp1_sharded", "*model*.pt"),
        fixture("megatron_tensor_parallel", "*common.pt"),
        fixture("lightning_hyperparameters", "*.ckpt"),
    ]
    whole += [open_archive(strict(one), len(one), where="").pickle() for one in files]
    seeds = [bytes([table]) + one for one in plain for table in range(len(_TABLES))]
    return seeds + [bytes([table]) + one for one in whole for table in range(3)]


def _run_metadata(data: bytes) -> None:
    """What the shortcuts for large files accept, the plain parser accepts too."""
    parse_metadata(data, where="x")
    try:
        parse_metadata(data, where="x", shortcuts=False)
    except CkptkitError as error:
        raise AssertionError(f"only the shortcut accepts it: {error}") from None


def _metadata_seeds() -> list[bytes]:
    names = ("dcp_images_grid", "dcp_zstd_grid", "fsdp2_hsdp", "fsdp1_no_shard_flat")
    return [fixture(name, "*.metadata") for name in names]


_EXPECTED = ExpectedTensor(dtype_named("float32"), (2, 3), "x")


def _run_zstd(data: bytes) -> None:
    head = decompress(strict(data), len(data), most_bytes=1 << 20, where="x")
    front = parse_front(head, _EXPECTED)
    check_front(front, head[front.stop :], _EXPECTED)


def _zstd_seeds() -> list[bytes]:
    return [zstandard.ZstdCompressor(level=1).compress(one) for one in (TENSOR, FILE)]


def _run_header(data: bytes) -> None:
    """The first bytes say how many bytes of data follow the header."""
    parse_header(data[4:], len(data) + 4 + int.from_bytes(data[:4], "little"), where="x")


def _header_seeds() -> list[bytes]:
    files = [fixture(name, "*.safetensors") for name in ("hf_tied", "dcp_hf_grid")]
    files.append(fixture("nanotron_0_2_tp2", "*qkv_proj*.safetensors"))
    lengths = [struct.unpack("<Q", one[:8])[0] for one in files]
    return [
        (len(one) - 8 - length).to_bytes(4, "little") + one[8 : 8 + length]
        for one, length in zip(files, lengths, strict=True)
    ]


TARGETS = (
    Target("zip-directory", _run_directory, lambda: [TENSOR, FILE], mutate_archive, share=12),
    Target("archive-of-a-tensor", _run_tensor, lambda: [TENSOR], mutate_archive, share=6),
    Target(
        "pickle-machine",
        _run_pickle,
        _pickle_seeds,
        prefixed(mutate_pickle, 1),
        share=16,
        most_bytes=3000,
    ),
    Target("dcp-metadata", _run_metadata, _metadata_seeds, mutate_pickle, share=6),
    Target("zstd-chunk", _run_zstd, _zstd_seeds, mutate_zstd, share=4, free_bytes=24 << 20),
    Target("safetensors-header", _run_header, _header_seeds, prefixed(mutate_json, 4), share=12),
)
