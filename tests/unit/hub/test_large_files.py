"""A large file is searched and checked while it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.hub.large_files import LargeFile, read_checked
from ckptkit.storage.local.source import LocalSource
from tests.planted_secrets import SECRETS


def test_a_file_is_searched_while_it_is_read_and_the_block_with_the_secret_goes_nowhere(
    tmp_path: Path,
) -> None:
    data = bytearray(np.random.default_rng(2).bytes(2 * LEAF_BYTES + 9))
    secret = b" " + SECRETS["github classic"].encode() + b" "
    data[LEAF_BYTES - 9 : LEAF_BYTES - 9 + len(secret)] = secret
    (tmp_path / "model.safetensors").write_bytes(data)
    sent: list[bytes] = []
    with LocalSource(tmp_path) as source:
        file = LargeFile("model.safetensors", len(data), ())
        with pytest.raises(RefusedError, match=r"a GitHub token in model\.safetensors"):
            read_checked(source, file, lambda _: None, sent.append)
    assert sum(map(len, sent)) <= LEAF_BYTES
