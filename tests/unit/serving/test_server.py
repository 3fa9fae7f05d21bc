"""How many connections a server may have, by the limits of its process."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from ckptkit.serving.server import choose_most_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(choose_most_connections(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (64, 64, 32, 64),
        (64, 200, 100, 200),
        (64, 4096, 1024, 4096),
        (64, 10_000, 1024, 4096),
        (9000, 10_000, 1024, 9000),
    ],
)
def test_half_of_the_open_files_may_be_connections(
    soft: int, hard: int, most: int, raised: int
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < hard:
        pytest.skip(f"no process may have {hard} open files here")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(soft), str(hard)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(most), str(raised), str(hard)]
