"""What pytest leaves alone here."""

from __future__ import annotations

collect_ignore = ["stock_readers"]  # programs of another environment, with modules of their own
