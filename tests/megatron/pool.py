"""Processes that stay up over the tests and take the ranks of one layout after another.

They are forked from one that has imported torch and Megatron, so that four of them cost one import.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

START_WITHIN_S = 90.0
ENDS_WITHIN_S = 60.0


class RankPool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.megatron.preload"])
        self._workers = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """`function(rank, ranks, port, *args)` in each of the ranks; what they returned, in their order."""
        return self.run_each(function, [args] * ranks)

    def run_each(self, function: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of each rank's own."""
        port = free_port()
        workers = self._workers[: len(args)]
        assert len(workers) == len(args), "the pool is too small"
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, (rank, len(args), port, *args[rank])))
        answers = []
        for rank, (_, pipe) in enumerate(workers):
            assert pipe.poll(START_WITHIN_S + ENDS_WITHIN_S), f"rank {rank} did not answer"
            answers.append(pipe.recv())
        errors = [text for error, text in answers if error]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
