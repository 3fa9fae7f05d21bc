"""Made-up secrets of every known kind, and files of every kind to plant them in."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable

import numpy as np

_LETTERS = "aZ4kQ9xLmP2vR7tYbN8wE3uJ6hG5sD1fC0iVoKqTgXyBzA"
_HEX = "0f3a9c4e7b1d5826af90c3e71b4d8265ea7f3019"
_BASE64 = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzQ8rT1uVx"


def _coded(document: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


_JWT = f"{_coded({'alg': 'HS256', 'typ': 'JWT'})}.{_coded({'sub': 'alice', 'iat': 1})}.{_LETTERS}"
_NEPTUNE = base64.b64encode(
    json.dumps({"api_address": "https://app.neptune.ai", "api_key": "9c4e7b1d-5826"}).encode()
).decode()


def _pem(what: str) -> str:
    return f"-----BEGIN {what}" + f"-----\nMIIEvQ{_BASE64}\n-----END {what}-----"


SECRETS: dict[str, str] = {
    "hugging face": "hf_" + _LETTERS[:34],
    "github classic": "ghp_" + _LETTERS[:36],
    "github fine-grained": "github_pat_" + _LETTERS[:22] + "_" + (_LETTERS * 2)[:59],
    "gitlab": "glpat-" + _LETTERS[:20],
    "aws access": "AKIA" + "Q7ZK4M2XW9PLR5TB",
    "aws secret": f"aws_secret_access_key = {_BASE64}",
    "aws secret json": json.dumps({"SecretAccessKey": _BASE64}),
    "gcp": json.dumps({"type": "service_account", "private_key": _pem("PRIVATE" + " KEY")}),
    "google": "AIza" + "SyD9xLmP2vR7tYaZ4kQ9xLmP2vR7tYaZ4kQ"[:35],
    "azure": f"AccountName=a;AccountKey={(_BASE64 * 3)[:86]}==;EndpointSuffix=core.windows.net",
    "azure sas": f"https://a.blob.core.windows.net/c?sv=2024-11-04&sig={_BASE64[:43]}%3D",
    "openai": "sk-proj-" + _LETTERS,
    "anthropic": "sk-ant-api03-" + _LETTERS * 2,
    "wandb env": f"export WANDB_API_KEY={_HEX}",
    "wandb netrc": f"machine api.wandb.ai\n  login user\n  password {_HEX}",
    "wandb login": f"wandb login {_HEX}",
    "slack": "xoxb-" + "123456789012-1234567890123-" + _LETTERS[:24],
    "slack hook": "https://hooks.slack.com/" + "services/T01ABCDEF/B01ABCDEF/" + _LETTERS[:24],
    "jwt": _JWT,
    "npm": "//registry.npmjs.org/:_authToken=npm_" + _LETTERS[:36],
    "pypi": "pypi-AgEIcHlwaS5vcmc" + (_LETTERS * 2)[:60],
    "kaggle": json.dumps({"username": "alice", "key": _HEX[:32]}),
    "kaggle env": f"KAGGLE_KEY={_HEX[:32]}",
    "comet": f"[comet]\napi_key={_LETTERS[:25]}",
    "neptune": f"NEPTUNE_API_TOKEN={_NEPTUNE}",
    "password": "MLFLOW_TRACKING_PASSWORD=" + "correct7Horse-battery",
    "netrc": "machine git.internal login alice password " + "hunter2hunter",
    "bearer": f"Authorization: Bearer {_LETTERS}",
    "url": "postgres://trainer:" + "hunter2hunter2@db.internal/runs",
    "databricks": "dapi" + _HEX[:32],
    "rsa": _pem("RSA PRIVATE" + " KEY"),
    "ec": _pem("EC PRIVATE" + " KEY"),
    "dsa": _pem("DSA PRIVATE" + " KEY"),
    "encrypted": _pem("ENCRYPTED PRIVATE" + " KEY"),
    "openssh": _pem("OPENSSH PRIVATE" + " KEY"),
    "pgp": _pem("PGP PRIVATE" + " KEY BLOCK"),
}
"""By kind. None of them was ever in use."""


def _zipped(text: str, method: int) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("archive/data.pkl", text)
    return data.getvalue()


def _pickled(text: str) -> bytes:
    """As protocol 2 does it: the length before the text, and an opcode that is a letter after."""
    data = text.encode()
    return b"\x80\x02}q\x00X" + len(data).to_bytes(4, "little") + data + b"q\x01s."


def _among_tensors(text: str) -> bytes:
    values = np.random.default_rng(0).standard_normal(700_001, np.float32).tobytes()
    return values[:-3] + b"\0" + text.encode() + b"\0" + values


def _array(text: str) -> bytes:
    data = io.BytesIO()
    np.save(data, np.array([text]))
    return data.getvalue()


FILES: dict[str, Callable[[str], bytes]] = {
    ".env": str.encode,
    "train": str.encode,
    "train.sh": lambda text: f"#!/bin/sh\n{text}\npython train.py\n".encode(),
    "train.log": lambda text: ("step 1\n" * 999 + text).encode(),
    "id.pem": str.encode,
    "notes.py": lambda text: f"KEY = '''{text}'''\n".encode(),
    "notes.json": lambda text: json.dumps({"note": text}).encode(),
    "notes.yaml": lambda text: f"note: |\n  {text}\n".encode(),
    "notes.ipynb": lambda text: json.dumps({"cells": [{"source": [text]}]}).encode(),
    "bom.txt": lambda text: text.encode("utf-8-sig"),
    "wide.txt": lambda text: text.encode("utf-16"),
    "wide_be.txt": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "notes.bin": _pickled,
    "notes.pt": lambda text: _zipped(text, zipfile.ZIP_STORED),
    "notes.zip": lambda text: _zipped(text, zipfile.ZIP_DEFLATED),
    "notes.npy": _array,
    "notes.dat": _among_tensors,
    "notes.gz": lambda text: gzip.compress(text.encode()),
    "notes.bz2": lambda text: bz2.compress(text.encode()),
    "notes.xz": lambda text: lzma.compress(text.encode()),
    "logs/deep/er/out.txt": str.encode,
}
"""The content of files that hold a text, by path."""
