"""The texts by which the manifest of a torchsnapshot snapshot writes plain values down."""

from __future__ import annotations

import pytest

from ckptkit.core.errors import FormatError
from ckptkit.formats.others.torchsnapshot_manifest import parse_plain


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        *[("int", "-3", -3), ("str", "3", "3"), ("bool", "True", True), ("bool", "False", False)],
        *[("bytes", "AAE=", b"\0\1"), ("float", "exSuR+F6hD8=", 0.01)],
    ],
)
def test_a_text_of_the_manifest_is_the_value_that_it_stands_for(
    kind: str, text: str, value: object
) -> None:
    found = parse_plain(kind, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *[("int", "3.0"), ("int", "9" * 5000), ("bool", "1"), ("bytes", "A"), ("float", "AAE=")],
        *[("float", "\u00e9"), ("str", None), ("int", 3)],
    ],
)
def test_a_text_that_stands_for_no_value_is_refused(kind: str, text: object) -> None:
    with pytest.raises(FormatError):
        parse_plain(kind, text)
