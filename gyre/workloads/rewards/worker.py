"""A process of the reward pool: it reads texts, calls the user's function and writes the result.

A frame on stdin or stdout is a length (4 bytes, big-endian) and msgpack. The user's prints go to stderr.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import traceback
from typing import IO, Any

import msgpack


def send(stream: IO[bytes], content: Any) -> None:
    data = msgpack.packb(content, default=_plain)
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one frame. Raises EOFError if the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    (size,) = struct.unpack(">I", head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return msgpack.unpackb(data, strict_map_key=False)


def _plain(value: Any) -> Any:
    """NumPy's arrays and scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a group's meta holds a {type(value).__name__}, which is not plain data")


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Answer requests until stdin ends."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked = sys.stdin.buffer
    path, folders = receive(asked)
    sys.path[:] = folders
    try:
        from gyre.workloads.rewards.functions import load_function

        function = load_function(path)
    except BaseException:
        send(told, ["broken", traceback.format_exc()])
        return
    send(told, ["ready", None])
    while True:
        try:
            prompt, completion, meta = receive(asked)
        except EOFError:
            return
        try:
            answer = ["ok", float(function(prompt, completion, meta))]
        except Exception:  # whatever the user's code raises; the pool sees crashes itself
            answer = ["error", traceback.format_exc()]
        send(told, answer)
