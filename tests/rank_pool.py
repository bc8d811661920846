"""Processes that stay up over the tests and take the ranks of one layout after another.

They are forked from one that has imported what they need, so that four of them cost one import.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.ports import free_port

START_WITHIN_S = 90.0
ENDS_WITHIN_S = 60.0
OTHERS_END_WITHIN_S = 3.0


class RankPool:
    def __init__(self, size: int, *, preload: str | None) -> None:
        """`preload` is a module. Of two pools in one process the first one's counts; ranks import what they lack.
        Without one, each process imports everything itself: on a machine with a GPU some of Megatron's imports touch
        it, after which no forked process may."""
        self._context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload([preload])
        self._workers = [self._start() for _ in range(size)]

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """`function(rank, ranks, port, *args)` in each of the ranks; what they returned, in their order."""
        port = free_port()
        assert ranks <= len(self._workers), "the pool is too small"
        for rank in range(ranks):
            self._workers[rank][1].send((function, (rank, ranks, port, *args)))
        answers: dict[int, Any] = {}
        problem = self._gather(answers, ranks)
        if problem:
            self._renew(ranks)
            raise AssertionError(problem)
        return [answers[rank] for rank in range(ranks)]

    def _gather(self, answers: dict[int, Any], ranks: int) -> str:
        """What went wrong. After a first error the others, who may wait for it, have little time left."""
        problems = []
        deadline = time.monotonic() + START_WITHIN_S + ENDS_WITHIN_S
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                problems.append(f"ranks {sorted(waiting.values())} did not answer")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    failed, answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, answer = True, f"rank {rank} died"
                answers[rank] = answer
                if failed:
                    problems.append(answer)
                    deadline = min(deadline, time.monotonic() + OTHERS_END_WITHIN_S)
        return "\n".join(problems)

    def _renew(self, ranks: int) -> None:
        """Who failed, or still waits for somebody who did, is of no more use."""
        for rank in range(ranks):
            process, pipe = self._workers[rank]
            pipe.close()
            process.kill()
            process.join(10)
            self._workers[rank] = self._start()

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage, and makes every collection long
    while True:
        try:
            received = pipe.recv_bytes()
        except EOFError:  # the pool is closed
            return
        try:
            function, args = pickle.loads(
                received
            )  # raises whatever the import of the function's module raises
            answer = (False, function(*args))
        except BaseException:
            answer = (True, traceback.format_exc())
        # Cycles of Megatron's hold closed groups, and each of a group's loops wakes up a hundred times a second.
        gc.collect()
        pipe.send(answer)
