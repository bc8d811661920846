"""The job of bench/dlrover.py: written for DLRover, but for the name in its imports. Every worker writes down when it
begins, and the trainer when it has made a step."""

from __future__ import annotations

import os
import statistics
import time

from gyre_dlrover.api.runtime import RoleGroup, current_worker, rpc

CALLS = 100


def note(*words: object) -> None:
    """A line in the file that all of the job's processes share; one write, so that lines stay whole."""
    line = " ".join([repr(time.time()), *(str(word) for word in words)]) + "\n"
    file = os.open(current_worker().job_info.user_config["notes"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def begins() -> None:
    me = current_worker().actor_info
    note("begins", f"{me.role}-{me.rank}", os.getpid())


class Actor:
    """A rank of a process group."""

    def __init__(self) -> None:
        begins()

    @rpc()
    def update(self, rewards: list[float]) -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor([sum(rewards)])
        dist.all_reduce(total)
        return float(total)


class Rollout:
    def __init__(self) -> None:
        begins()

    @rpc()
    def nothing(self) -> None: ...

    @rpc()
    def generate(self, prompts: list[str]) -> list[float]:
        time.sleep(current_worker().job_info.user_config["generate_s"])
        return [1.0 for _ in prompts]


def call_s() -> float:
    """How long a call takes that does nothing."""
    began = time.perf_counter()
    RoleGroup("ROLLOUT")[0].call("nothing").result()
    return time.perf_counter() - began


class Trainer:
    def __init__(self) -> None:
        begins()

    def run(self) -> None:
        took = [call_s() for _ in range(CALLS)]
        note("call_s", statistics.median(took))
        for step in range(current_worker().job_info.user_config["steps"]):
            prompts = [f"{step}.{at}" for at in range(8)]
            rewards = RoleGroup("ROLLOUT").call_batch("generate", len(prompts), prompts).wait()
            sums = RoleGroup("ACTOR").call("update", rewards).result()
            assert sums == [16.0, 16.0], sums
            note("step", step)
