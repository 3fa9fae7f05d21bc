"""Regular expressions of adapter configurations, which other people wrote, within a time limit.

Python's `re` can take longer than the age of the universe for an expression of ten characters.
"""

from __future__ import annotations

import re
from typing import Any

from ckptkit.core.errors import LimitError
from ckptkit.core.text import quote

# A brace that begins no repetition is a character to `re`, and an approximate match to `regex`.
_BRACES = re.compile(r"\\N\{[^}]*\}|\\.|\{(?:\d+(?:,\d*)?|,\d*)\}|\{", re.DOTALL)
_MOST_SECONDS = 1.0
# An expression without any of these is compared with a name in one way only.
_REPEATS = frozenset("*+?{|")


def match_expression(expression: str, name: str, form: str = "{}") -> re.Match[str] | None:
    """Matches the beginning of a name.

    Args:
        expression: The expression, valid for `re`.
        name: The name of a module.
        form: What PEFT puts around the expression, without repetitions that nest with it.

    Raises:
        LimitError: If it takes too long.
    """
    whole = form.replace("{}", expression)
    if _REPEATS.isdisjoint(expression):
        return re.match(whole, name)
    import regex  # late: few configurations have more than names

    whole = form.replace("{}", _BRACES.sub(_escape, expression))
    try:
        found: Any = regex.match(whole, name, timeout=_MOST_SECONDS)
    except TimeoutError as error:
        raise LimitError(
            f"the expression {quote(expression)} takes longer than {_MOST_SECONDS:g} s to compare"
            f" with the module {quote(name)}",
            where="adapter_config.json",
            hint="write it without repetitions inside repetitions, or list the modules",
        ) from error
    return found  # type: ignore[no-any-return]  # its objects have the methods of `re`


def _escape(found: re.Match[str]) -> str:
    return rf"\{found[0]}" if found[0] == "{" else found[0]
