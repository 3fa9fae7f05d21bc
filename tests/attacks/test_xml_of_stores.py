"""Answers of an S3 store that expand, never end, or name keys outside the prefix that was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.places import Place
from ckptkit.storage.remote.source import RemoteSource
from tests.campaigns.fuzz.network_targets import _AnsweringClient, _folder, _store
from tests.sampled import sampled

LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a0 "ha">'
    + "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(12))
    + "]><ListBucketResult><Contents><Key>&a12;</Key></Contents></ListBucketResult>"
)
EXTERNAL = (
    '<?xml version="1.0"?><!DOCTYPE l [<!ENTITY f SYSTEM "file:///etc/passwd">]>'
    "<ListBucketResult><Contents><Key>p/&f;</Key><Size>1</Size></Contents></ListBucketResult>"
)
QUADRATIC = (
    f'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "{"x" * 50_000}">]>'
    f"<ListBucketResult><Contents><Key>{'&a;' * 50_000}</Key></Contents></ListBucketResult>"
)


ENTITIES = {"laughs": LAUGHS, "external": EXTERNAL, "quadratic": QUADRATIC}


def source_of(body: str, status: int = 200) -> RemoteSource:
    store = _store(_AnsweringClient(status, {}, body.encode()))
    return RemoteSource(Place("s3://b/p"), folder=_folder(store))


def outcome(source: RemoteSource) -> str:
    """Returns the files that are found, or the error."""
    try:
        return "\n".join(source.walk(4))
    except CkptkitError as error:
        return error.message


@pytest.mark.parametrize("kind", ENTITIES)
@pytest.mark.parametrize("status", sampled([200, 403], [200]))
def test_entities_are_not_expanded(kind: str, status: int, bounded: Callable[..., Any]) -> None:
    with bounded(seconds=20, most_bytes=96 << 20):
        found = outcome(source_of(ENTITIES[kind], status))
    assert "root:" not in found
    assert len(found) < 1 << 20


def listing(*keys: str, more: str = "") -> str:
    contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    return f"<ListBucketResult>{contents}{more}</ListBucketResult>"


def test_keys_that_lead_out_are_left_out() -> None:
    body = listing("p/good", "p/../secret", "p//etc/passwd", "p/a/./b", "p/..", "p/")
    assert list(source_of(body).walk(4)) == ["good"]


def test_a_listing_without_an_end_is_given_up() -> None:
    """A store that says "there is more" for ever; the client of the test ends after some pages."""
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    with pytest.raises(CkptkitError):
        list(source_of(listing("p/a", more=more)).walk(4))


@pytest.mark.parametrize(
    "body",
    [
        listing(more="<Contents/>"),
        listing(more="<Contents><Key>p/x</Key></Contents>"),
        listing(more="<IsTruncated>true</IsTruncated>"),
        "<ListBucketResult>" * 20_000,
        "",
        "\x00",
        "<a/>",
        listing("p/a").replace("<Size>1<", "<Size>-1<"),
        listing("p/a").replace("<Size>1<", f"<Size>{'9' * 5000}<"),
    ],
    ids=range(9),
)
def test_answers_that_are_not_those_of_s3_are_refused_or_empty(
    body: str, bounded: Callable[..., Any]
) -> None:
    with bounded(seconds=10, most_bytes=96 << 20):
        assert outcome(source_of(body)).count("\n") <= 1
