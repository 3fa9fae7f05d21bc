"""Has a host of forks run an example, and ends as it ends: what ckpt-chaos starts for each rank.

Usage: python -IS example_client.py SOCKET SCRIPT ARGUMENT... What it asks for is `be_rank` of
`example_host.py`; the rank is killed when this process is (see `tests/fork_host.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        request = {
            "function": "tests.campaigns.chaos.example_host:be_rank",
            "arguments": sys.argv[2:],
            "answer": "",
            "environment": dict(os.environ),
        }
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(data)
        with connection.makefile() as answers:
            answers.readline()  # that it has been started
            _, status = json.loads(answers.readline() or "[0, 1]")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
