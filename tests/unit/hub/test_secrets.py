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
from ckptkit.hub.contents import check_contents
from ckptkit.hub.secrets import SecretSearch, find_secrets, redact_secrets, secrets_in
from tests.planted_secrets import FILES, SECRETS
from tests.sampled import sampled

ROOT = Path(__file__).parents[3]
ODD_TOKEN = "corp7781tokenÄ"  # noqa: S105  no secret


NAMED_KINDS = {
    "a Hugging Face token": "hf_" + "aZ4kQ9xLmP2vR7tY" * 2 + "ab",
    "an AWS access key": "AKIA" + "Q7ZK4M2XW9PLR5TB",
    "an AWS secret key": 'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzQ8rT1uVx"',
    "a private key": "-----BEGIN OPENSSH PRIVATE" + " KEY-----",
    "a Weights & Biases key": "WANDB_API_KEY=" + "0123456789abcdef0123456789abcdef01234567",
    "a GitHub token": "ghp_" + "x7Kq2mZp9Rt4Lw8Vn3Bc6Yd1Hf5Js0GaTu2E",
    "a GitLab token": "glpat-" + "Zk7Qm2Xp9Rt4Lw8Vn3Bc",
    "an OpenAI or Anthropic key": "sk-proj-" + "9xLmP2vR7tYaZ4kQ9xLmP2vR7tYaZ4kQ",
    "a Google API key": "AIza" + "SyD9xLmP2vR7tYaZ4kQ9xLmP2vR7tYaZ4kQ",
    "a Slack token": "xoxb-" + "123456789012-aBcDeFgHiJkLmN",
    "a password in a URL": "postgres://trainer:" + "hunter2hunter2@db.internal",
}


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_a_secret_is_told_by_its_kind_and_file_and_never_shown(kind: str) -> None:
    secret = NAMED_KINDS[kind]
    data = f'{{"note": "use {secret} for it"}}'.encode()
    assert list(find_secrets(data)) == [kind]
    with pytest.raises(RefusedError) as raised:
        check_contents({"config.json": data}, "out", [])
    assert kind in str(raised.value)
    assert "config.json" in str(raised.value)
    assert secret[-12:] not in f"{raised.value} {raised.value.__notes__} {raised.value!r}"
    assert secret[-12:] not in redact_secrets(data.decode())


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_of_secret_is_found_in_each_kind_of_file(kind: str) -> None:
    missed = [path for path, content in FILES.items() if not secrets_in([content(SECRETS[kind])])]
    assert missed == []


@pytest.mark.parametrize("kind", sampled(SECRETS, [*SECRETS][::4]))
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


@pytest.mark.slow
def test_ordinary_files_hold_no_secret() -> None:
    places = ("fixtures", "docs", "examples", "benchmarks", "ckptkit/hub/watch/watch.py")
    paths = [path for place in places for path in [ROOT / place, *(ROOT / place).rglob("*")]]
    built = ROOT / "benchmarks" / "work"  # what git ignores
    files = [p for p in paths if p.is_file() and p.suffix != ".distcp" and built not in p.parents]
    assert len(files) > 400
    alarms = {str(path): found for path in files if (found := secrets_in([path.read_bytes()]))}
    assert alarms == {}


def test_vocabularies_hashes_and_examples_are_no_secrets() -> None:
    draw = random.Random(0)  # noqa: S311  no secret is made of it
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/_-"
    words = ["sk-", "hf_", "hf", "password", "api_key", "AKIA", "eyJ", "wandb", "-----BEGIN", "://"]
    words += ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(5_000)]
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
        "pass token=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        '"sk-learn": 3, "hf_hub": "task-oriented-language-models-are-few-shot"',
        "see https://huggingface.co/meta-llama/Llama-3.1-8B@main",
        "postgres://{user}:{password}@host, postgres://user:password@localhost",
        "0123456789abcdef0123456789abcdef01234567",
        'api_key=os.environ["OPENAI_API_KEY"]; password=getpass.getpass(); token = "<HUB_TOKEN>"',
        'login(token="hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"); api_key = "YOUR_API_KEY_HERE_12"',
        '{"pad_token": "<|endoftext|>", "eos_token": "</s>", "secret_key": 12345678901234}',
        "password: your-password-1, PASSWORD=$DB_PASSWORD1, api_key: ${{ secrets.API_KEY_1 }}",
        "https://user:password@host/ Authorization: Bearer $HF_TOKEN_1234567890 Bearer <token>",
        "WANDB_API_KEY=" + "0" * 40,
        "wandb: Run https://wandb.ai/org/project/runs/3k2j9x8a, commit " + "3f" * 20,
    ]
    assert [text[:60] for text in texts if secrets_in([text.encode()])] == []
