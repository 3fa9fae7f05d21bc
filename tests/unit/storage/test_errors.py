"""When a store is asked again, and how errors of its clients are told apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import fsspec
import pytest

from ckptkit.core.errors import (
    AccessError,
    MissingFileError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.storage.places import Place
from ckptkit.storage.remote.errors import (
    RetryPolicy,
    as_input_error,
    call_with_retries,
    is_transient,
)
from ckptkit.storage.remote.store import get_store


class AnswerError(Exception):
    """As many clients raise it: with the answer of the server."""

    def __init__(self, status: int, text: str = "no") -> None:
        super().__init__(text)
        self.status_code = status


class ReadTimeoutError(Exception):
    """Called as the one of botocore."""


class NoCredentialsError(Exception):
    """Called as the one of botocore."""


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


def test_passing_trouble_is_asked_away_and_waits_double() -> None:
    waits: list[float] = []
    answers = iter([AnswerError(503), TimeoutError(), ConnectionResetError(), EOFError(), "here"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    policy = RetryPolicy(first_wait_seconds=1.0, longest_wait_seconds=3.0)
    wait_before = partial(policy.wait_before, what="it")
    assert call_with_retries(ask, wait_before, sleep=waits.append) == "here"
    limits = [1.0, 2.0, 3.0, 3.0]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))


@pytest.mark.parametrize("error", [AnswerError(404), AnswerError(412), FileNotFoundError("x")])
def test_what_will_not_change_is_asked_once(error: Exception) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise error

    wait_before = partial(RetryPolicy().wait_before, what="it")
    with pytest.raises(type(error)):
        call_with_retries(ask, wait_before, sleep=lambda _: None)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (AnswerError(500), True),
        (AnswerError(429), True),
        (AnswerError(403), False),
        (caused(OSError(121, "x"), AnswerError(503)), True),
        (caused(PermissionError("x"), AnswerError(503)), False),
        (ReadTimeoutError(), True),
        (caused(OSError("x"), ReadTimeoutError()), True),
        (OSError(5, "input/output error"), False),
        (ValueError("x"), False),
    ],
)
def test_passing_trouble_is_told_from_what_stays(error: Exception, transient: bool) -> None:
    assert is_transient(error) == transient


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AnswerError(401), AccessError),
        (PermissionError("x"), AccessError),
        (NoCredentialsError("x"), AccessError),
        (AnswerError(404), MissingFileError),
        (FileNotFoundError("x"), MissingFileError),
        (AnswerError(412), SourceChangedError),
        (TypeError("x"), UsageError),
        (AnswerError(500), StorageError),
        (OSError("x"), StorageError),
    ],
)
def test_errors_of_clients_become_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(as_input_error(error, where="s3://b/k", options={})) is kind


def test_no_secret_is_in_an_error_that_a_client_wrote() -> None:
    url = "https://cdn.example/x?X-Amz-Signature=deadbeef&token=t"
    error = AnswerError(500, f"no answer for my-secret-key from {url}\nsecond line")
    told = as_input_error(error, where="s3://b/k", options={"a": {"b": "my-secret-key"}})
    assert str(told) == "s3://b/k: cannot be read: no answer for *** from https://cdn.example/x?…"


@pytest.mark.parametrize(
    "url", ["zip://out", "tar://out", "dir://out", "foo://out", "sftp://host/out", "ssh://host/out"]
)
def test_a_client_that_does_not_open_from_a_url_alone_is_an_error_of_usage(url: str) -> None:
    with pytest.raises(UsageError, match=f"^{url}: no storage was opened"):
        get_store(Place(url))


def test_a_client_that_knows_its_own_options_alone_is_opened_without_listings_kept() -> None:
    class Client(fsspec.AbstractFileSystem):  # type: ignore[misc]
        """Hands all options to a library, as webdav4 does."""

        def __init__(self, **options: Any) -> None:
            assert options.keys() == {"base_url"}
            super().__init__()

    fsspec.register_implementation("strict", Client, clobber=True)
    store = get_store(Place("strict://out", {"base_url": "http://127.0.0.1"}))
    assert not store.filesystem.dircache.use_listings_cache
