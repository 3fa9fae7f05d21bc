"""Words for messages."""

from __future__ import annotations

import pytest

from ckptkit.core.text import a_kind, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (3_800, "3.80 KB"),
        (999_499, "999 KB"),
        (999_500, "1.00 MB"),
        (5_000_000_000, "5.00 GB"),
        (123_456_789_012.3, "123 GB"),
        (10**19, "10,000 PB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit_that_suits_it(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_kind_has_the_article_that_suits_it() -> None:
    values: tuple[object, ...] = (1, "x", [], None, object())
    assert [*map(a_kind, values)] == ["an int", "a str", "a list", "None", "an object"]
