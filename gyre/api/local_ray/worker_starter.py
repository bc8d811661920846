"""The program that Ray starts as a worker: it has the fork server make one, or becomes one itself.

Invariants:
- *one worker a start*: the worker is forked or run here, never both: a child that cannot say so to its starter ends;
- *never worse*: where the fork server is gone, refuses or does not answer, Ray's own program takes this process over.

It imports nothing but built-in modules: each worker waits for this program.
"""

import _socket
import os
import sys

SERVER = "GYRE_FORK_SERVER"
"""Path of the fork server's socket."""

WORKER = "GYRE_RAY_WORKER"
"""Path of Ray's own worker program."""

ANSWER_S = 60.0
"""Deadline of the answer: what the server loads first takes seconds, and tens of them from a cold disk."""

FORKED = b"\1"


def forked(path: str) -> bool:
    """Whether the fork server at `path` has made the worker."""
    request = [str(os.getpid()), os.getcwd(), str(len(sys.argv)), *sys.argv]
    fields = [os.fsencode(field) for field in request] + [
        key + b"=" + value for key, value in os.environb.items()
    ]
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        server.settimeout(ANSWER_S)
        server.connect(path)
        server.sendmsg([b"\0"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        server.sendall(b"\0".join(fields))
        server.shutdown(_socket.SHUT_WR)
        return bool(server.recv(1) == FORKED)
    except OSError:  # also a deadline: the server is not there, or hangs
        return False
    finally:
        server.close()


if __name__ == "__main__":
    socket_path = os.environ.get(SERVER)
    if not (socket_path and forked(socket_path)):
        os.execv(sys.executable, [sys.executable, os.environ[WORKER], *sys.argv[1:]])
