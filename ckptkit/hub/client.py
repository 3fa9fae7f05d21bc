"""Access to the Hub through `huggingface_hub`: retries, errors, files, tags, client settings.

The settings are global to the process; `quiet_client` restores them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import quote

from ckptkit.core.errors import (
    CkptkitError,
    HubError,
    HubUnavailableError,
    NoSpaceError,
    OutputError,
    UsageError,
)
from ckptkit.hub.secrets import redact_secrets
from ckptkit.storage.local.disk import is_out_of_space
from ckptkit.storage.remote.errors import TRANSIENT_STATUSES, RetryPolicy, call_with_retries
from ckptkit.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi


HUB_RETRIES = RetryPolicy(attempts=7, first_wait_seconds=0.5, longest_wait_seconds=30.0, jitter=0.0)
FIRST_ATTEMPTS = 3
"""While the Hub has never been reached: most likely this machine is offline."""
MAIN = "main"
UNAUTHORIZED, NOT_FOUND = 401, 404
_BAD_REQUEST, _FORBIDDEN, _EXISTS, _CONFLICT, _TOO_LARGE = 400, 403, 409, 412, 413
_HTTP_LIBRARIES = frozenset({"httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"})
_LONGEST_ASKED = 900.0  # no retry if the Hub asks for more
_RESET = re.compile(r"\bt=(\d+)")  # of a `RateLimit` header, in seconds
_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/]|~|\.{1,2}(?:[\\/]|$)|[A-Za-z][A-Za-z0-9+.-]*://")
_REPO = re.compile(r"[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
_NO_TAG = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^@$|^[/.-]|/\.|[/.]$|\.lock(/|$)")
_TOKEN = re.compile(r"[!-~]+")  # what a header can have
ODD_TOKEN = "the token has characters that no token has"  # noqa: S105  a message
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that has access"
_NO_TOKEN = "the Hub answered 401, and no token is set"  # noqa: S105  a message
_LFS_ERRORS = "LFS batch API returned errors"  # what the client says of files that are refused
# By the status, or by the name of the client's error, the most specific one first.
_REFUSALS: Mapping[int | str, tuple[str, str]] = {
    "GatedRepoError": (
        "the owners of the repository have not granted access to this token",
        "request access on its page, or pass another token",
    ),
    UNAUTHORIZED: ("the token is wrong or expired", _LOGIN),
    _FORBIDDEN: (
        "the token does not have the permission for this repository",
        "use a repository of your own or of your organisation, or a token with write access",
    ),
    "RevisionNotFoundError": (
        "the repository has no such revision",
        "see its branches and tags on its page",
    ),
    NOT_FOUND: (
        "the repository does not exist, or it is private and the token has no access to it",
        f"check the spelling; {_LOGIN}",
    ),
    _TOO_LARGE: (
        "a file, or all of them together, is larger than the Hub takes",
        "write smaller files with `ckptkit consolidate --max-shard-size 5GB`",
    ),
}
_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHOWN = 300  # characters of what the Hub says
_NO_XET = "HF_HUB_DISABLE_XET"
logger = logging.getLogger("ckptkit.hub")


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


def unwrap_error(error: Exception) -> Exception:
    """Returns the error of a server or of the network that the client wrapped."""
    inner = error.__cause__ or error.__context__
    if status_of(error) is None and not is_network(error) and isinstance(inner, Exception):
        return inner if status_of(inner) is not None or is_network(inner) else error
    return error


def status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_conflict(error: BaseException) -> bool:
    """Returns whether another commit was made meanwhile."""
    return status_of(error) == _CONFLICT


def is_absent(error: HubError) -> bool:
    return error.__cause__ is not None and status_of(error.__cause__) in {UNAUTHORIZED, NOT_FOUND}


def is_network(error: BaseException) -> bool:
    """Returns whether no answer came."""
    library = type(error).__module__.partition(".")[0]
    is_timeout = isinstance(error, ConnectionError | TimeoutError) and not is_offline(error)
    return status_of(error) is None and (library in _HTTP_LIBRARIES or is_timeout)


def is_offline(error: BaseException) -> bool:
    return type(error).__name__ == "OfflineModeIsEnabled"


def is_lost(error: BaseException) -> bool:
    """Returns whether a request may have succeeded anyway: gateways answer 5xx to late ones."""
    status = status_of(error)
    return is_network(error) or (status is not None and status >= 500)  # noqa: PLR2004  HTTP


def pause_before(error: BaseException, attempt: int, *, reached: bool = True) -> float | None:
    """Returns the seconds to wait before another attempt; None if that would not help."""
    attempts = HUB_RETRIES.attempts
    status = status_of(error)
    is_busy = status in TRANSIENT_STATUSES
    may_pass = is_busy or is_network(error) or type(error).__name__ == "JSONDecodeError"
    if not may_pass or attempt >= (attempts if reached else min(attempts, FIRST_ATTEMPTS)):
        return None
    asked = _asked_pause(error) if is_busy else None
    if asked is not None and asked > _LONGEST_ASKED:
        return None
    pause = HUB_RETRIES.wait_seconds(attempt) if asked is None else asked
    what = "was not reached" if status is None else f"answered {status}"
    # The error says it once, if the Hub was never reached.
    level = logging.WARNING if reached else logging.INFO
    logger.log(level, "the Hub %s; retrying in %.1f s", what, pause)
    return pause


def _asked_pause(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", {})
    after = headers.get("Retry-After", "")
    if after.strip().isdecimal():
        return float(after)
    reset = _RESET.search(headers.get("RateLimit", ""))
    return float(reset[1]) if reset else None


class Hub:
    """A repository of models on a Hub, as the holder of a token sees it."""

    def __init__(self, repo_id: str, *, token: str | None, endpoint: str | None) -> None:
        """Prepares the client, with what the environment says where None; sends nothing."""
        if not is_repo_id(repo_id):
            name, _, revision = repo_id.partition("@")
            hint = "write it as OWNER/NAME, with letters, digits, '-', '_' and '.'"
            if revision and is_repo_id(name):
                hint = "a branch, a tag or a commit has an option of its own:"
                hint += f" {name} --revision {revision}"
            text = f"{repo_id!r:.200} is not the id of a repository"
            raise UsageError(text, hint=f"{hint:.300}")
        from huggingface_hub import HfApi, constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise _offline(repo_id)
        self.token = token or get_token()  # not shown anywhere
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise HubError(ODD_TOKEN, where=repo_id, hint=f"{_LOGIN}; copy it as the Hub shows it")
        self._was_reached = False
        self.api: HfApi = HfApi(
            endpoint=endpoint,
            token=self.token or False,
            library_name="ckptkit",
            library_version=__version__,
        )
        self.repo_id = repo_id  # without an owner until `resolve_owner`

    @property
    def url(self) -> str:
        return f"{self.api.endpoint}/{self.repo_id}"

    def resolve_owner(self) -> None:
        """Adds the name of the user to an id without owner."""
        if "/" not in self.repo_id:
            if self.token is None:
                raise UsageError(
                    f"{self.repo_id!r} names no owner, and no user is logged in",
                    hint=f"pass OWNER/{self.repo_id}, or {_LOGIN}",
                )
            self.repo_id = f"{self.call(self.api.whoami)['name']}/{self.repo_id}"

    def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls the client; retries while the Hub is busy or not reached."""

        def wait_before(failure: Exception, attempt: int) -> float | None:
            error = unwrap_error(failure)
            self._was_reached |= not is_network(error)
            return pause_before(error, attempt, reached=self._was_reached)

        try:
            result = call_with_retries(lambda: function(*args, **kwargs), wait_before)
        except Exception as failure:  # noqa: BLE001  raised again as an error of ckptkit
            error = unwrap_error(failure)
            raise self.translate_error(error) from error
        self._was_reached = True
        return result

    def _request(self, method: str, url: str, *accepted: int, **more: Any) -> Any:
        """Returns the answer to a request that the client has no method for."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers: dict[str, str] = build_hf_headers(
            token=self.token or False, library_name="ckptkit", library_version=__version__
        )

        def send() -> Any:
            response = get_session().request(method, url, headers=headers, **more)
            if response.status_code not in accepted:
                hf_raise_for_status(response)
            return response

        return self.call(send)

    def read(self, path: str, revision: str) -> bytes:
        """Returns the content of a small file."""
        url = f"{self.url}/resolve/{quote(revision, safe='')}/{quote(path)}"
        return bytes(self._request("GET", url).content)

    def check_card(self, text: str) -> None:
        """Lets the Hub validate a card's metadata, which the client does after an upload only."""
        url = f"{self.api.endpoint}/api/validate-yaml"
        asked = {"content": text, "repoType": "model"}
        response = self._request("POST", url, _BAD_REQUEST, json=asked)
        if response.status_code != _BAD_REQUEST:
            return
        said = self.call(response.json)
        messages = [str(error.get("message")) for error in said.get("errors", ())] or [str(said)]
        raise HubError(
            "the Hub refuses the metadata of README.md:"
            f" {redact_secrets(messages[0], [self.token or ''])[:_SHOWN]}",
            where=self.repo_id,
            hint="correct the lines between the two '---' at its top",
        )

    def forgo_absent_xet(self, revision: str, *, create_pr: bool) -> None:
        """Lets the client upload without Xet, which it takes for granted, where a mirror has none.

        It does so until `quiet_client` ends.
        """
        from huggingface_hub import constants

        target = "None?create_pr=1" if create_pr else quote(revision, safe="")
        url = f"{self.api.endpoint}/api/models/{self.repo_id}/xet-write-token/{target}"
        if getattr(constants, _NO_XET, True):
            return
        if self._request("GET", url, NOT_FOUND).status_code == NOT_FOUND:
            setattr(constants, _NO_XET, True)

    def translate_error(self, error: Exception) -> CkptkitError:
        """Returns an error of the client as an error of ckptkit, without secrets."""
        if isinstance(error, CkptkitError):
            return error
        status = status_of(error)
        if is_network(error):
            return HubUnavailableError(
                f"{self.api.endpoint} was not reached ({type(error).__name__})",
                where=self.repo_id,
                hint="check the network, and HF_ENDPOINT if it is set; then run it again",
            )
        if isinstance(error, OSError) and error.errno is not None and status is None:
            reason = (error.strerror or str(error)).lower()
            if is_out_of_space(error):
                return NoSpaceError(reason, where=self.repo_id, hint="make room, then run it again")
            return OutputError(f"cannot be written: {reason}", where=self.repo_id)
        if isinstance(error, OSError | RuntimeError) and type(error).__module__ == "builtins":
            # Of hf_xet, whose texts may hold signed URLs.
            return HubError(
                f"the store of large files failed ({type(error).__name__})",
                where=self.repo_id,
                hint="run it again; uploaded files are not sent again",
            )
        if status in TRANSIENT_STATUSES:
            asked = _asked_pause(error) or 0.0
            detail = f", {HUB_RETRIES.attempts} times"
            if asked > _LONGEST_ASKED:
                detail = f" and asks to wait {asked:.0f} s"
            return HubUnavailableError(
                f"the Hub answered {status}{detail}",
                where=self.repo_id,
                hint="run it again later; uploaded files are not sent again",
            )
        return self._explain_refusal(error, status)

    def _explain_refusal(self, error: Exception, status: int | None) -> HubError:
        if is_offline(error):
            return _offline(self.repo_id)
        text = getattr(error, "server_message", None) or ("" if status else str(error))
        text = " ".join(redact_secrets(text, [self.token or ""]).split())
        said = f": {text.rstrip('.')[:_SHOWN]}" if text else ""
        reasons = {status, *(kind.__name__ for kind in type(error).__mro__)}
        if _LFS_ERRORS in str(error):
            reasons.add(_TOO_LARGE)
        for reason, (message, hint) in _REFUSALS.items():
            if reason in reasons:
                text = f"{message}{said}" if self.token or status != UNAUTHORIZED else _NO_TOKEN
                return HubError(text, where=self.repo_id, hint=hint)
        answered = "refused" if status is None else f"answered {status}"
        return HubError(f"the Hub {answered}{said}", where=self.repo_id)


def _offline(repo_id: str) -> HubError:
    return HubError(
        "the Hub cannot be used, because offline mode is on",
        where=repo_id,
        hint="unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE), then run it again",
    )


def list_files(hub: Hub, revision: str) -> list[Any]:
    """Returns the files of a commit as the client has them; their folders are left out."""
    list_tree = hub.api.list_repo_tree
    entries = hub.call(
        lambda: list(list_tree(hub.repo_id, recursive=True, revision=revision))  # asks page by page
    )
    files: list[Any] = [entry for entry in entries if hasattr(entry, "blob_id")]
    for file in files:
        is_size = type(file.size) is int and file.size >= 0
        if not (_is_text(file.path) and is_size and _is_text(file.blob_id)):
            raise HubError(
                f"the Hub lists a file without a name, a size or a hash: {file.path!r:.200}",
                where=hub.repo_id,
                hint="see whether HF_ENDPOINT is the address of a Hub",
            )
    return files


def _is_text(value: object) -> bool:
    """Says whether a value is a text that can be written down: no half of a surrogate pair."""
    return isinstance(value, str) and value.isprintable()


def tree_of(hub: Hub, revision: str) -> dict[str, str]:
    return {
        file.path: file.lfs.sha256 if file.lfs else file.blob_id
        for file in list_files(hub, revision)
    }


def commit_of(hub: Hub, revision: str) -> str:
    return str(hub.call(hub.api.repo_info, hub.repo_id, revision=revision).sha)


def check_tag(tag: str) -> None:
    """Refuses invalid names of tags before anything is uploaded.

    Source: git-check-ref-format(1).
    """
    if not tag or _NO_TAG.search(tag):
        raise UsageError(
            f"{tag!r:.200} is not a valid name of a tag",
            hint="write it with letters, digits, '-', '_' and '.', such as step-500",
        )


def tag_commit(hub: Hub, tag: str, commit: str) -> None:
    """Tags a commit; the tag may exist already if it points to the same commit."""
    try:
        hub.call(hub.api.create_tag, hub.repo_id, tag=tag, revision=commit)
    except HubError as error:
        cause = error.__cause__
        if cause is None or status_of(cause) != _EXISTS:
            raise
        other = commit_of(hub, tag)
        if other != commit:
            raise HubError(
                f"the tag {tag!r} points to commit {other[:10]} and not to {commit[:10]}",
                where=hub.repo_id,
                hint="delete the tag on the Hub, or choose another name",
            ) from error


@contextmanager
def quiet_client() -> Iterator[None]:
    """Hides the client's progress bars, and its warnings, which hold signed URLs."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    client = logging.getLogger("huggingface_hub")
    level, hidden = client.level, are_progress_bars_disabled()
    plain = getattr(constants, _NO_XET, None)
    client.setLevel(logging.ERROR)
    if not hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        client.setLevel(level)
        if plain is not None:  # old clients know no Xet
            setattr(constants, _NO_XET, plain)
        if not hidden:
            enable_progress_bars()
