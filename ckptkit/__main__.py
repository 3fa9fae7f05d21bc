"""`python -m ckptkit`, for where the command is not on the path."""

from __future__ import annotations

from ckptkit_cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
