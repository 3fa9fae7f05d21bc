"""Secrets are found in files of every kind, and ordinary files hold none."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.hub.large_files import CheckedReader, LargeFile
from ckptkit.hub.package import choose_step_files
from ckptkit.hub.secrets import SecretSearch, secrets_in
from ckptkit.storage.local.source import LocalSource
from tests.planted_secrets import FILES, SECRETS

ROOT = Path(__file__).parents[3]
ODD_TOKEN = "corp7781tokenÄ"  # noqa: S105  no secret


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_of_secret_is_found_in_each_kind_of_file(kind: str) -> None:
    missed = [path for path, content in FILES.items() if not secrets_in([content(SECRETS[kind])])]
    assert missed == []


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_across_the_border_of_two_blocks_is_found(kind: str) -> None:
    data = b"\n" * 3 + SECRETS[kind].encode() + b"\n"
    for at in range(1, len(data), 7):
        assert secrets_in([data[:at], data[at:]]), at
    assert secrets_in([data[at : at + 5] for at in range(0, len(data), 5)])


def test_the_token_in_use_is_found_by_its_value_in_whatever_form() -> None:
    known = "corp-7781-token"
    forms = [base64.b64encode(b"x" * shift + known.encode() + b"yz") for shift in range(4)]
    forms += [known.encode(code) for code in ("utf-8", "utf-16-le", "utf-16-be", "utf-32")]
    forms += [known.encode().hex().encode(), gzip.compress(gzip.compress(known.encode()))]
    noise = np.random.default_rng(0).bytes(3 << 20)
    for form in forms:
        assert secrets_in([form], [known]) == ["the token in use"], form
        assert secrets_in([b"no"], [known]) == []
    assert secrets_in([noise + known.encode() + noise], [known]) == ["the token in use"]
    assert secrets_in([noise + ODD_TOKEN.encode() + noise], [ODD_TOKEN]) == ["the token in use"]


@pytest.mark.parametrize("offset", range(8))
def test_a_secret_among_tensors_is_found_wherever_it_begins(offset: int) -> None:
    weights = np.random.default_rng(1).standard_normal(1 << 19, np.float32) / 50
    for values in (weights, (weights.view(np.uint32) >> 16).astype(np.uint16), weights * 0):
        data = np.tile(values, 2).tobytes()
        for code in ("utf-8", "utf-16-le", "utf-16-be"):
            text = ("=" + SECRETS["hugging face"] + "=").encode(code)
            search = SecretSearch()
            search.add(data[: 99_000 + offset] + text + data[99_000 + offset + len(text) :])
            assert search.kinds == ["a Hugging Face token"], (values.dtype, code)


def test_a_file_is_searched_while_it_is_sent_and_the_block_with_the_secret_is_not(
    tmp_path: Path,
) -> None:
    data = bytearray(np.random.default_rng(2).bytes(2 * LEAF_BYTES + 9))
    secret = b" " + SECRETS["github classic"].encode() + b" "
    data[LEAF_BYTES - 9 : LEAF_BYTES - 9 + len(secret)] = secret
    (tmp_path / "model.safetensors").write_bytes(data)
    sent: list[bytes] = []
    with LocalSource(tmp_path) as source:
        file = LargeFile("model.safetensors", len(data), ())
        reading = CheckedReader(source, file, lambda _: None)
        with pytest.raises(RefusedError, match=r"a GitHub token in model\.safetensors"):
            reading.read_into(sent.append)
    assert sum(map(len, sent)) <= LEAF_BYTES


@pytest.mark.slow
def test_ordinary_files_hold_no_secret() -> None:
    places = ("fixtures", "docs", "examples", "benchmarks", "ckptkit/hub/watch/watch.py")
    paths = [path for place in places for path in [ROOT / place, *(ROOT / place).rglob("*")]]
    files = [path for path in paths if path.is_file() and path.suffix != ".distcp"]
    assert len(files) > 400
    alarms = {str(path): found for path in files if (found := secrets_in([path.read_bytes()]))}
    assert alarms == {}


def test_vocabularies_hashes_and_examples_are_no_secrets() -> None:
    draw = random.Random(0)  # noqa: S311  no secret is made of it
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/_-"
    words = ["sk-", "hf_", "hf", "password", "api_key", "AKIA", "eyJ", "wandb", "-----BEGIN", "://"]
    words += ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(20_000)]
    vocab = {word: number for number, word in enumerate(words)}
    texts = [
        json.dumps({"model": {"vocab": vocab, "merges": list(itertools.pairwise(words))}}),
        "".join(f"{base64.b64encode(word.encode()).decode()} {n}\n" for word, n in vocab.items()),
        json.dumps(
            {
                "files": {
                    f"f{n}": {"sha256": f"{draw.getrandbits(256):064x}"} for n in vocab.values()
                }
            }
        ),
        'client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")',
        'api_key=os.environ["OPENAI_API_KEY"]; password=getpass.getpass(); token = "<HUB_TOKEN>"',
        'login(token="hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"); api_key = "YOUR_API_KEY_HERE_12"',
        '{"pad_token": "<|endoftext|>", "eos_token": "</s>", "secret_key": 12345678901234}',
        "password: your-password-1, PASSWORD=$DB_PASSWORD1, api_key: ${{ secrets.API_KEY_1 }}",
        "https://user:password@host/ Authorization: Bearer $HF_TOKEN_1234567890 Bearer <token>",
        "WANDB_API_KEY=" + "0" * 40,
        "wandb: Run https://wandb.ai/org/project/runs/3k2j9x8a, commit " + "3f" * 20,
    ]
    assert [text[:60] for text in texts if secrets_in([text.encode()])] == []


def test_what_a_step_is_made_of_goes_and_strangers_stay() -> None:
    strangers = [".env", "train.sh", "train.log", "id.pem", "secrets.json", "a/b/c.txt", "core.1"]
    for folder in sorted((ROOT / "fixtures").glob("*/checkpoint")):
        paths = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        chosen = choose_step_files([*paths, *strangers], ())
        left = {one.path for one in chosen.skipped} - set(strangers)
        assert {path for path in left if not path.startswith(".ckptkit/")} == set(), folder
        assert set(chosen.files).isdisjoint(strangers)


def test_files_of_the_manifest_and_those_asked_for_go_with_a_step() -> None:
    paths = ["notes/a.json", "notes/b.log", ".env", "training_args.bin", "ckptkit.json"]
    assert choose_step_files(paths, ()).files == ("ckptkit.json",)
    assert choose_step_files(paths, paths).files == ("ckptkit.json", "notes/a.json")
    everything = choose_step_files(paths, (), ["*"])
    assert [one.path for one in everything.skipped] == ["training_args.bin"]
