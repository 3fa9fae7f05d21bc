"""How many examples property tests try.

`make test` tries a fifth; CKPTKIT_EXAMPLES=1, as in `make differential`, tries all.
"""

from __future__ import annotations

import os

SHARE = float(os.environ.get("CKPTKIT_EXAMPLES", "0.2"))
FEWEST = 8


def examples(number: int) -> int:
    """Returns how many of so many examples are tried."""
    return max(FEWEST, round(number * SHARE))
