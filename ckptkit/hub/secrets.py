"""Finds keys and tokens in texts, and in files of any kind: binary data, compressed data, archives.

Texts in binary data are found by their eight-byte words: a run of 20 characters or more holds an
aligned word of characters only, and the first half of the next one. Tensors hold few such words,
so that a search of weights takes less time than their SHA-256. No message repeats a secret.
"""

from __future__ import annotations

import base64
import bz2
import functools
import io
import itertools
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.errors import RefusedError

TOKEN_IN_USE = "the token in use"  # noqa: S105  a kind of secret
PRIVATE_KEY = "a private key"
_FEWEST_CHARACTERS = 6  # of different ones: a placeholder of one letter is no secret
_BEFORE, _AFTER = 80, 600  # what of a text a pattern needs around its anchor
_WINDOW = 2 * _AFTER  # anchors in the first half of it need no search of their own


class _Kind(Struct, frozen=True):
    """A kind of secret, as users read it."""

    name: str
    # In lower case; each secret of the kind holds one of them. A search for these is many times
    # faster than one for the pattern.
    anchors: tuple[bytes, ...]
    pattern: re.Pattern[bytes]  # the secret with what distinguishes it from other texts


def _kind(name: str, anchors: str, pattern: bytes) -> _Kind:
    return _Kind(name, tuple(anchors.lower().encode().split()), re.compile(pattern))


_IS = rb"[\"'\\]{0,2}\s*[=:]\s*[\"'\\]{0,2}"  # between a name and its value, in any syntax
_GAP = rb"(?:\s|\\[nrt])+"  # also as escaped in JSON
# In binary data, the length of a text comes before it, which may look like a letter of it.
_ALONE = rb"(?:(?<![A-Za-z0-9])|(?<=[\x00-\x08\x0b\x0c\x0e-\x1f\x8c\xc4\xd9UC][\x00-\xff]))"
_KINDS: tuple[_Kind, ...] = (
    _kind("a Hugging Face token", "hf_ api_org_", _ALONE + rb"(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    _kind("an AWS access key", "akia asia", _ALONE + rb"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    _kind(
        "an AWS secret key",
        "aws_secret awssecret secretaccesskey secret_access_key aws_session_token sessiontoken",
        rb"(?i)(?:aws_?secret_?(?:access_?)?key|secret_?access_?key|(?:aws_)?session_?token)"
        + _IS
        + rb"[a-z0-9/+]{40}",
    ),
    _kind(
        PRIVATE_KEY,
        "-----begin ssh2 putty-user-key-file age-secret-key-1",
        rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        rb"|---- BEGIN SSH2 (?:ENCRYPTED )?PRIVATE KEY ----"
        rb"|-----BEGIN OpenVPN Static key V1-----"
        rb"|PuTTY-User-Key-File-\d: \S+|AGE-SECRET-KEY-1[0-9A-Z]{50,}",
    ),
    _kind(
        "a Weights & Biases key",
        "wandb",
        rb"(?i)wandb[_-]?(?:api)?[_-]?(?:key|token)?" + _IS + rb"[0-9a-f]{40}(?![0-9a-f])"
        rb"|wandb\W+login\W+(?:--\S+\s+)*[0-9a-f]{40}(?![0-9a-f])"
        rb"|wandb[\w.]*"
        + _GAP
        + rb"login\s+[^\s\\]+"
        + _GAP
        + rb"password\s+[0-9a-f]{40}(?![0-9a-f])"
        rb"|wandb_v\d_[A-Za-z0-9_]{40,}",
    ),
    _kind(
        "a GitHub token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        _ALONE + rb"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,})",
    ),
    _kind(
        "a GitLab token",
        "glpat- gldt- glrt- glptt- glcbt- glft- glsoat- glagent-",
        _ALONE + rb"gl(?:pat|dt|rt|ptt|cbt|ft|soat|agent)-[\w-]{20,}",
    ),
    _kind(
        "an OpenAI or Anthropic key",
        "sk-",
        _ALONE + rb"sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}",
    ),
    _kind(
        "a Google API key",
        "aiza gocspx- ya29. 1//0",
        _ALONE + rb"(?:AIza[0-9A-Za-z_-]{35}|GOCSPX-[\w-]{28}|ya29\.[\w-]{50,}|1//0[\w-]{40,})",
    ),
    _kind(
        "a Slack token",
        "xox xapp- hooks.slack.com/",
        _ALONE + rb"(?:xox[abeoprs][.-](?:xox[a-z]-)?[0-9]+-[A-Za-z0-9-]{10,}"
        rb"|xapp-\d-[A-Z0-9]+-\d+-[a-z0-9]{32,}"
        rb"|hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/]{20,})",
    ),
    _kind(
        "a password in a URL",
        "://",
        # Not those of examples.
        rb"://[^/\s:@\"']{1,64}:(?!(?i:pass|secret|your|x{3}|[*]{3}))[^/\s:@\"'{}<>$]{6,64}"
        rb"@[a-z0-9]",
    ),
    _kind(
        "an Azure key",
        "accountkey account_key sharedaccesskey storage_key access_key sig= 8q~",
        rb"(?i:(?:account|shared_?access|storage|access)_?key" + _IS + rb"[a-z0-9+/]{43,88}={1,2})"
        rb"|[?&;\"'\s]sig=[A-Za-z0-9%+/]{40,}(?:%3[Dd]|=)"
        rb"|" + _ALONE + rb"[A-Za-z0-9_~.]{3}8Q~[A-Za-z0-9_~.-]{31,34}",
    ),
    _kind(
        "a JSON web token",
        "eyj",
        _ALONE + rb"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}",
    ),
    _kind(
        "a Neptune token", "eyjhcglf", _ALONE + rb"eyJhcGlf(?:YWRk|dXJs)[A-Za-z0-9+/_-]{20,}={0,2}"
    ),
    _kind("an npm token", "npm_", _ALONE + rb"npm_[A-Za-z0-9]{36}"),
    _kind("a PyPI token", "pypi-", _ALONE + rb"pypi-[A-Za-z0-9_-]{50,}"),
    _kind(
        "a Kaggle key",
        "kaggle kgat_ username",
        rb"(?i)kaggle_?(?:api_?)?(?:key|token)" + _IS + rb"[0-9a-f]{32}(?![0-9a-f])"
        rb"|" + _ALONE + rb"KGAT_[0-9a-f]{32}(?![0-9a-f])"
        rb"|\"username[\"\\]+\s*:\s*[\"\\]+[^\"]+\"\s*,\s*[\"\\]+key" + _IS + rb"[0-9a-f]{32}[\"\\]"
        rb"|\"key" + _IS + rb"[0-9a-f]{32}[\"\\]+\s*,\s*[\"\\]+username[\"\\]",
    ),
    _kind(
        "a key of a model service",
        "gsk_ r8_ xai- pplx- tgp_v1_ nvapi- pcsk_ lsv2_ rpa_ fw_ dapi jina_",
        _ALONE + rb"(?:gsk_[A-Za-z0-9]{48,}|r8_[A-Za-z0-9]{37,}|xai-[A-Za-z0-9]{60,}"
        rb"|pplx-[A-Za-z0-9]{40,}|tgp_v1_[\w-]{40,}|nvapi-[\w-]{50,}|pcsk_[\w-]{50,}"
        rb"|lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}|rpa_[A-Z0-9]{40,}|fw_[A-Za-z0-9]{22,24}(?![A-Za-z0-9])"
        rb"|dapi[0-9a-f]{32}|jina_[0-9a-f]{32}[\w-]{20,})",
    ),
    _kind(
        "a token of a web service",
        "k_live_ k_test_ sg. dop_v1_ dckr_pat_ dp.pt. hvs. .atlasv1. lin_api_ ntn_ shp sbp_ glsa_"
        " glc_ sntrys_ atatt3 key-",
        _ALONE + rb"(?:[sr]k_(?:live|test)_[A-Za-z0-9]{20,}|SG\.[\w-]{22}\.[\w-]{43}"
        rb"|dop_v1_[0-9a-f]{64}|dckr_pat_[\w-]{27}|dp\.pt\.[A-Za-z0-9]{40,}|hvs\.[\w-]{24,}"
        rb"|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}|lin_api_[A-Za-z0-9]{40}|ntn_[A-Za-z0-9]{40,}"
        rb"|shp(?:at|ca|pa|ss)_[0-9a-f]{32}|sbp_[0-9a-f]{40}|glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}"
        rb"|glc_[A-Za-z0-9+/=]{50,}|sntrys_[A-Za-z0-9+/=_]{50,}|ATATT3[\w=-]{100,}"
        rb"|key-[0-9a-f]{32}(?![0-9a-f]))",
    ),
    _kind(
        "a bot's token",
        ":aa discord",
        _ALONE + rb"\d{8,10}:AA[\w-]{33}|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{60,}",
    ),
)
_NAMED: tuple[_Kind, ...] = (  # known by a name only; searched if nothing else matches
    _kind(
        "a password or key",
        "password passwd passphrase pwd apikey api_key api-key api_token api-token auth_token"
        " access_token refresh_token auth-token authtoken client_secret secret_key secretkey"
        " api_secret app_secret access_key private_token secret_token bearer_token",
        rb"(?i)(?:password|passwd|passphrase|(?<![a-z])pwd|api[_-]?key|api[_-]?(?:token|secret)"
        rb"|(?:access|auth|refresh|private|secret|bearer)[_-]?token|(?:client|app)_?secret"
        rb"|(?:secret|access)_?key)(?P<is>[\"'\\]{0,2}\s*[=:]\s*)(?P<quote>[\"'\\]{0,2})"
        rb"(?P<value>[^\s\"'\\,;)}\]]{8,})",
    ),
    _kind(
        "a password or key",
        "machine",
        rb"\bmachine\s+[^\s\\]+" + _GAP + rb"(?:(?:login|account)\s+[^\s\\]+" + _GAP + rb"){0,2}"
        rb"password\s+(?P<value>[^\s\\\"']{6,})",
    ),
    _kind(
        "a password or key",
        "authorization",
        rb"(?i)authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+"
        rb"(?P<value>[\w.~+/=-]{16,})",
    ),
)
_PLACEHOLDER = re.compile(
    rb"(?i)your|example|placeholder|change.?me|dummy|redacted|hidden|secret|password|passwd|insert"
    rb"|xxx|\*\*\*|\.\.\.|123456|abc123|token|none|null|true|false|environ|getenv|getpass|config"
    rb"|args|self|[(){}<>$%\[|]|^[a-z_]+(?:\.[a-z_]+)+$|://|^/|^~"
)
_DIGIT, _LETTER = re.compile(rb"\d"), re.compile(rb"[A-Za-z]")
_MARK = re.compile(rb"[^\w/.:-]")


def find_secrets(text: bytes, known: Sequence[str] = ()) -> Iterator[str]:
    """Yields the kinds of secrets that a text in UTF-8 holds, each once.

    Secrets in use, `known`, are also found as base64 or hexadecimal digits.
    """
    if any(form in text for secret in known for form in _forms(secret)):
        yield TOKEN_IN_USE
    lower = text.lower()
    has_kind = False
    for kind in _KINDS:
        if _is_in(kind, text, lower, _is_real):
            has_kind = True
            yield kind.name
    if not has_kind and any(_is_in(kind, text, lower, _is_credential) for kind in _NAMED):
        yield _NAMED[0].name


def is_worth_searching(secret: str) -> bool:
    """Returns whether a secret is too long to occur in a text by chance."""
    return len(secret) > _FEWEST_CHARACTERS


def redact_secrets(text: str, known: Sequence[str] = ()) -> str:
    """Replaces everything in a message that looks like a secret."""
    for secret in known:
        if secret:
            text = text.replace(secret, "[secret]")
    data = text.encode(errors="surrogatepass")
    for kind in _KINDS:
        data = kind.pattern.sub(b"[secret]", data)
    for kind in _NAMED:
        data = kind.pattern.sub(lambda m: b"[secret]" if _is_credential(m) else m[0], data)
    return data.decode(errors="replace")


def _is_in(
    kind: _Kind, text: bytes, lower: bytes, is_real: Callable[[re.Match[bytes]], bool]
) -> bool:
    for anchor in kind.anchors:
        at = lower.find(anchor)
        while at >= 0:
            start, stop = max(at - _BEFORE, 0), at + _WINDOW
            if any(is_real(match) for match in kind.pattern.finditer(text, start, stop)):
                return True
            at = lower.find(anchor, at + _WINDOW - _AFTER)
    return False


def _is_real(match: re.Match[bytes]) -> bool:
    varied = len(set(match[0][-16:])) >= _FEWEST_CHARACTERS
    return varied or match[0].rstrip(b"-").endswith(b"KEY")


def _is_credential(match: re.Match[bytes]) -> bool:
    """Returns whether the value of a field for a password or key is no placeholder."""
    value = match["value"].rstrip(b".")
    if len(set(value)) < _FEWEST_CHARACTERS or _PLACEHOLDER.search(value):
        return False
    is_mixed = _LETTER.search(value) is not None and _DIGIT.search(value) is not None
    return is_mixed or (_MARK.search(value) is not None and bool(match.groupdict().get("quote")))


def _forms(secret: str) -> Iterator[bytes]:
    """Yields how a secret can be written."""
    if not is_worth_searching(secret):
        return
    plain = secret.encode()
    yield plain
    yield plain.hex().encode()
    yield plain.hex().upper().encode()
    for shift in range(3):  # base64 depends on where in its text the secret begins
        coded = base64.b64encode(b"\0" * shift + plain)
        stop = len(coded.rstrip(b"=")) - (1 if coded.endswith(b"=") else 0)
        inner = coded[-(-shift * 8 // 6) if shift else 0 : stop]
        yield inner
        yield inner.replace(b"+", b"-").replace(b"/", b"_")


MAX_SMALL_BYTES = 64_000_000
"""Larger files are not held in memory as a whole: no text of a model is, tokenizers take 33 MB."""
_SMALL_BYTES = 1 << 20  # data up to this size is searched as if it were text
_CARRIED_BYTES = 4096  # of a block, which are searched again with the next one
_AROUND_WORDS = 16  # what of the surroundings of a text is searched with it
_AROUND_BYTES = 8 * _AROUND_WORDS
_MOST_UNPACKED_BYTES = 1 << 30
_MOST_MEMORY_BYTES = 256 << 20  # of an unpacker
_BLOCK_BYTES = 8 << 20
_DEPTH = 2  # of archives in archives
_ZIP = b"PK\x03\x04"
_DAMAGED = (
    EOFError,
    IndexError,  # of zipfile, for a member without a name
    OSError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
_HIGH = np.uint64(0x8080808080808080)
_HALF, _TWICE = np.uint64(0xFFFFFFFF), np.uint64(0x100000001)
_SPACES = np.uint64(0x2020202020202020)
_WIDE = (  # the bytes that are zero in UTF-16 of either byte order
    (np.uint64(0xFF00FF00FF00FF00), np.uint64(0x2000200020002000)),
    (np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0020002000200020)),
)
_DER_KEY = re.compile(  # PKCS #8, also of elliptic curves, and PKCS #1
    rb"\x30[\x2e-\x83].{0,2}\x02\x01[\x00\x01]\x30[\x05-\x20]\x06[\x03-\x0b](?:\x2a\x86\x48|\x2b\x65)"
    rb"|\x30\x82..\x02\x01\x00\x02\x82[\x01\x02].\x00",
    re.DOTALL,
)


class SecretSearch:
    """Searches data that comes in blocks; `kinds` are those of the secrets found so far."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.kinds: list[str] = []
        self._known = known
        self._plain = [secret.encode() for secret in known if is_worth_searching(secret)]
        self._tail = b""

    def add(self, block: bytes) -> None:
        """Searches the next block, and what crosses its border with the one before."""
        if self._tail:
            self._search(self._tail + block[:_CARRIED_BYTES])
        self._search(block)
        self._tail = (self._tail + block[-_CARRIED_BYTES:])[-_CARRIED_BYTES:]

    def _search(self, data: bytes) -> None:
        for text in find_texts(data):
            for kind in find_secrets(text, self._known):
                if kind not in self.kinds:
                    self.kinds.append(kind)
        # find_texts misses secrets that are short, or next to characters outside ASCII.
        if TOKEN_IN_USE not in self.kinds and any(secret in data for secret in self._plain):
            self.kinds.append(TOKEN_IN_USE)


def secrets_in(
    blocks: Iterable[bytes], known: Sequence[str] = (), *, depth: int = _DEPTH
) -> list[str]:
    """Returns the kinds of secrets that a file holds, also in compressed parts of it.

    The first block shows the kind of the file; the members of a zip archive are unpacked where the
    archive is one block. `depth` says how many archives in archives are.
    """
    search = SecretSearch(known)
    kinds: list[str] = []

    def searched() -> Iterator[bytes]:
        for block in blocks:
            search.add(block)
            yield block

    stream = searched()
    first = next(stream, b"")
    if _DER_KEY.match(first):
        kinds.append(PRIVATE_KEY)
    with suppress(*_DAMAGED):
        if depth and _unpacker(first) is not None:
            whole = _unpacked(itertools.chain([first], stream))
            kinds += secrets_in(_limited(whole), known, depth=depth - 1)
        elif depth and first.startswith(_ZIP):
            with zipfile.ZipFile(io.BytesIO(first)) as archive:
                for member in archive.infolist():
                    with archive.open(member) as file:
                        parts = iter(functools.partial(file.read, _BLOCK_BYTES), b"")
                        kinds += secrets_in(_limited(parts), known, depth=depth - 1)
    for _ in stream:
        pass
    return list(dict.fromkeys([*search.kinds, *kinds]))


def refuse_secrets(secrets: Sequence[str], where: str) -> None:
    """Refuses to publish secrets."""
    if secrets:
        raise RefusedError(
            f"a push would publish {', '.join(secrets)}",
            where=where,
            hint="remove it from the file, and revoke it if it was ever published",
        )


def _unpacker(first: bytes) -> Any:
    """Returns a decompressor for a stream by its first bytes; None if it is not compressed."""
    decompressors: dict[bytes, Callable[[], object]] = {
        b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
        b"BZh": bz2.BZ2Decompressor,
        b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(memlimit=_MOST_MEMORY_BYTES),
    }
    return next((make() for magic, make in decompressors.items() if first.startswith(magic)), None)


def _unpacked(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the content of compressed streams that follow one another."""
    unpacker: Any = None
    for block in blocks:
        rest = block
        while rest:
            if unpacker is None or unpacker.eof:
                unpacker = _unpacker(rest)
            if unpacker is None:
                return
            piece = unpacker.decompress(rest, _BLOCK_BYTES)
            while piece:
                yield piece
                left = getattr(unpacker, "unconsumed_tail", b"")
                piece = b"" if unpacker.eof else unpacker.decompress(left, _BLOCK_BYTES)
            rest = unpacker.unused_data if unpacker.eof else b""


def _limited(blocks: Iterator[bytes]) -> Iterator[bytes]:
    left = _MOST_UNPACKED_BYTES
    for block in blocks:
        yield block
        left -= len(block)
        if left <= 0:
            return


def find_texts(data: bytes) -> Iterator[bytes]:
    """Yields the texts in some data, with their surroundings; those in UTF-16 also as ASCII."""
    parts = data if len(data) <= _SMALL_BYTES else _texts_of_binary(data)
    yield parts
    if b"\0" in parts:
        yield parts.translate(None, b"\0")


def _texts_of_binary(data: bytes) -> bytes:
    words = np.frombuffer(data, "<u8", len(data) // 8)
    plain = np.flatnonzero(((words & _HIGH) == 0) & (words != 0))
    texts = plain[_are_characters(words[plain])]
    texts = texts[texts < len(words) - 1]
    following = (words[texts + 1] & _HALF) * _TWICE  # the half of a word, as a word
    texts = texts[((following & _HIGH) == 0) & _are_characters(following)]
    if not len(texts):
        return data[-_AROUND_BYTES:]
    gaps = np.flatnonzero(np.diff(texts) > 2 * _AROUND_WORDS)
    starts = texts[np.concatenate(([0], gaps + 1))] - _AROUND_WORDS
    stops = texts[np.concatenate((gaps, [len(texts) - 1]))] + 2 + _AROUND_WORDS
    ranges = zip((starts * 8).tolist(), (stops * 8).tolist(), strict=True)
    pieces = [data[max(start, 0) : stop] for start, stop in ranges]
    return b"\n".join([*pieces, data[-_AROUND_BYTES:]])


def _are_characters(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which words of ASCII bytes hold text, also UTF-16, without control characters."""
    are_text = _have_no_control(words)
    for zeros, spaces in _WIDE:
        are_text |= ((words & zeros) == 0) & _have_no_control(words | spaces)
    return are_text


def _have_no_control(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    # Source: "hasless" of https://graphics.stanford.edu/~seander/bithacks.html
    below: NDArray[np.bool_] = ((words - _SPACES) & ~words & _HIGH) == 0
    return below
