"""Has the host of examples run one, and ends as it ends: what ckpt-chaos starts for each rank.

Usage: python -IS example_client.py SOCKET SCRIPT ARGUMENT...
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
        request = {"arguments": sys.argv[2:], "environment": dict(os.environ)}
        data = json.dumps(request).encode()
        connection.sendall(len(data).to_bytes(8, "little"))
        socket.send_fds(connection, [b"x"], [1, 2])
        connection.sendall(data)
        status = int(connection.recv(64) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
