"""Finding keys and tokens in what is about to be published. What is found is never repeated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_KINDS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("a Hugging Face token", re.compile(rb"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")),
    ("an AWS access key", re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    (
        "an AWS secret key",
        re.compile(rb"(?i)aws_?secret_?(?:access_?)?key[\"']?\s*[=:]\s*[\"']?[a-z0-9/+]{40}"),
    ),
    ("a private key", re.compile(rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")),
    (
        "a Weights & Biases key",
        re.compile(
            rb"(?i)wandb[_-]?(?:api)?[_-]?(?:key|token)?[\"']?\s*[=:]\s*[\"']?[0-9a-f]{40}\b"
        ),
    ),
    ("a Weights & Biases key", re.compile(rb"\bwandb_v\d_[A-Za-z0-9_]{40,}")),
    ("a GitHub token", re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,})\b")),
    ("a GitLab token", re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}")),
    (
        "an OpenAI or Anthropic key",
        re.compile(rb"\bsk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}"),
    ),
    ("a Google API key", re.compile(rb"\bAIza[0-9A-Za-z_-]{35}\b")),
    ("a Slack token", re.compile(rb"\bxox[abprs]-[0-9]{6,}-[A-Za-z0-9-]{10,}")),
    (
        "a password in a URL",
        # Not those of examples. It begins with what is rare, as 33 MB of tokenizer are searched.
        re.compile(
            rb"://[^/\s:@\"']{1,64}:(?!(?i:pass|secret|your|x{3}|[*]{3}))[^/\s:@\"'{}<>$]{6,64}"
            rb"@[a-z0-9]"
        ),
    ),
)
_FEWEST_CHARACTERS = 6  # of different ones: a placeholder of one letter is no secret


def find_secrets(data: bytes, known: Sequence[str] = ()) -> Iterator[str]:
    """Yields what kinds of secrets a file's content holds, each once.

    Args:
        data: The content, or a part of it.
        known: Secrets that are in use, which are found in whatever form they have.
    """
    if any(len(secret) > _FEWEST_CHARACTERS and secret.encode() in data for secret in known):
        yield "the token in use"
    seen: set[str] = set()
    for kind, pattern in _KINDS:
        if kind not in seen and any(_is_real(match[0]) for match in pattern.finditer(data)):
            seen.add(kind)
            yield kind


def without_secrets(text: str, known: Sequence[str] = ()) -> str:
    """Returns a message of somebody else's with whatever looks like a secret taken out."""
    for secret in known:
        if secret:
            text = text.replace(secret, "[secret]")
    data = text.encode()
    for _, pattern in _KINDS:
        data = pattern.sub(b"[secret]", data)
    return data.decode(errors="replace")


def _is_real(found: bytes) -> bool:
    tail = found[-16:]
    return len(set(tail)) >= _FEWEST_CHARACTERS or found.endswith(b"-----")
