"""Finds keys and tokens in what a push publishes, and removes paths of this machine from it.

No message repeats a secret.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.model_configs import model_config_to_json, to_json
from ckptkit.hub.publish.folder_files import ADAPTER_CONFIG, CARD
from ckptkit.plan.side_files import CONFIG

TOKEN_IN_USE = "the token in use"  # noqa: S105  a kind of secret
PRIVATE_KEY = "a private key"
_FEWEST_CHARACTERS = 6  # of different ones: a placeholder of one letter is no secret
_BEFORE, _AFTER = 80, 600  # what of a text a pattern needs around its anchor
_WINDOW = 2 * _AFTER  # anchors in the first half of it need no search of their own


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of secret.

    Attributes:
        name: As users read it.
        anchors: Texts, in lower case, of which each secret of the kind holds one. A search for
            these is many times faster than one for the pattern.
        pattern: The secret with what distinguishes it from other texts.
    """

    name: str
    anchors: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


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
    """Yields the kinds of secrets that a text holds, each once.

    Args:
        text: The text, in UTF-8; see `ckptkit.hub.publish.searching` for files of any kind.
        known: Secrets that are in use, which are also found as base64 or hexadecimal digits.
    """
    if any(form in text for secret in known for form in _forms(secret)):
        yield TOKEN_IN_USE
    lower = text.lower()
    has_kind = False
    for kind in _KINDS:
        if _is_in(kind, text, lower, lambda match: _is_real(match[0])):
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
    data = text.encode(errors="surrogateescape")
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


def _is_real(secret: bytes) -> bool:
    tail = secret[-16:]
    return len(set(tail)) >= _FEWEST_CHARACTERS or secret.rstrip(b"-").endswith(b"KEY")


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


_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/]|~|\.{1,2}(?:[\\/]|$)|[A-Za-z][A-Za-z0-9+.-]*://")
_REPO = re.compile(r"[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
_PATH_KEYS = frozenset({"also", "base", "config", "like", "path"})  # of a manifest
_BASE_KEY = "base_model_name_or_path"  # of an adapter
_NAME_KEYS = frozenset({"_name_or_path", "name_or_path", "id"})  # the last one is of a base model
_BEST = "best_model_checkpoint"  # a path, also where it looks like none of this machine
_PLACES = ("_file", "_path", "_dir", "_folder")  # endings of other keys that hold paths
_FRONT = re.compile(r"\A(---[ \t]*\r?\n)(.*?)(^---[ \t]*\r?$)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*[\"']?([^\"'\n]*)")  # of the outermost mapping
_ITEM = re.compile(r"\s*-\s+[\"']?([^\"'\n]*)")
_BASE_MODEL = "base_model"
_BASE_TAG = re.compile(r"^base_model:(?:\w+:)?(?!//)")


def is_local(text: str) -> bool:
    """Returns whether a text is a local path, or a URL of a store.

    >>> is_local("/data/llama"), is_local("s3://bucket/run"), is_local("meta-llama/Llama-3.1-8B")
    (True, True, False)
    """
    return _PATH.match(text) is not None


def is_repo_id(text: str) -> bool:
    """Returns whether a text can be the id of a repository."""
    return (
        _REPO.fullmatch(text) is not None
        and not is_local(text)
        and ".." not in text
        and "--" not in text
        and not text.endswith((".git", "-", "."))
    )


def scrub(path: str, document: Any, base_model: str | None) -> Any:
    """Returns a JSON document without paths of this machine."""
    name = posixpath.basename(path)
    if not isinstance(document, Mapping):
        return document
    if name == MANIFEST_NAME:
        return _manifest(document)
    return {
        key: _without_places(key, value, base_model if name == ADAPTER_CONFIG else None)
        for key, value in document.items()
    }


def _without_places(key: str, value: Any, base_model: str | None) -> Any:
    """Empties names that are paths, and removes files and folders of this machine.

    Configurations of models with several parts are nested.
    """
    if isinstance(value, Mapping):
        return {name: _without_places(name, inner, base_model) for name, inner in value.items()}
    if isinstance(value, str) and key == _BEST:
        return None
    if not isinstance(value, str) or not is_local(value):
        return value
    if key == _BASE_KEY:
        return base_model
    return "" if key in _NAME_KEYS else None if key.endswith(_PLACES) else value


def _manifest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the last part of paths, which often names the step, and nothing before it."""
    changed = dict(document)
    for part in ("source", "options"):
        if part in changed:
            changed[part] = _without_folders(changed[part])
    return changed


def _without_folders(value: Any, key: str = "") -> Any:
    if isinstance(value, str) and (key in _PATH_KEYS or is_local(value)):
        return value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lstrip("~")
    if isinstance(value, Mapping):
        return {name: _without_folders(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, key) for inner in value]
    return value


def scrub_card(text: str) -> str:
    """Returns a model card whose metadata names no local base, which the Hub would refuse."""
    front = _FRONT.match(text)
    if front is None:
        return text
    lines = _without_local_bases(front[2].splitlines(keepends=True))
    return f"{front[1]}{''.join(lines)}{front[3]}{text[front.end() :]}"


def _without_local_bases(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a card's metadata without local paths under `base_model`.

    Libraries write these. All other keys are the author's own.
    """
    below = ""
    for line in lines:
        key, item = _KEY.match(line), _ITEM.match(line)
        below = key[1] if key is not None else below
        value = (key[2] if key is not None else item[1] if item is not None else "").strip()
        base = _BASE_TAG.sub("", value)
        is_of_base = below == _BASE_MODEL or base != value
        if not (is_of_base and is_local(base)):
            yield line


def scrub_content(path: str, data: bytes, document: Any, base_model: str | None) -> bytes:
    """Returns a file's content as it is published; the same bytes where nothing is taken out."""
    if path == CARD:
        changed = scrub_card(data.decode(errors="surrogateescape"))
        return changed.encode(errors="surrogateescape")
    new = scrub(path, document, base_model)
    if new == document:
        return data
    return model_config_to_json(new) if posixpath.basename(path) == CONFIG else to_json(new)
