"""Process that Slurm starts as a rank: lets `rank_server` fork the rank, passes signals on to it, and ends as it ends.

It imports nothing that takes time.

    python -I -S rank_stub.py SOCKET ARGUMENT ...
"""

import contextlib
import marshal
import os
import signal
import socket
import sys

NAMESPACES = ("mnt", "uts", "ipc", "net", "pid")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main() -> int:
    """Return the exit code of the rank. End by the same signal if one has ended the rank."""
    address, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
        spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2, *spaces])
        server.sendall(request)
        for number in SIGNALS:
            signal.signal(number, lambda number, _: _pass_on(server, number))
        code = marshal.loads(server.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _pass_on(server: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the rank has ended
        server.sendall(bytes([number]))


if __name__ == "__main__":
    sys.exit(main())
