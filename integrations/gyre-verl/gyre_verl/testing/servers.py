"""Servers of verl's own on CPUs, for tests: `rollout.name=cpu`, `checkpoint_engine.backend=cpu`, and this module beside
`gyre_verl.testing.cpu` in `VERL_USE_EXTERNAL_MODULES`.

The rest is verl's own: its server manager, router, client, agent loops, replay buffer, trainer and sync of weights. A
server here draws random tokens at `TOKEN_S` each, and is as verl's servers are to whoever calls it: an abort answers
what is open with the tokens so far, and what comes until it resumes waits. Weights go by a file in place of NCCL.

Each server writes what it does into `GYRE_VERL_SERVERS`, a folder: one object of JSON a line, and its process id first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

TOKEN_S = 0.005
"""For a token of each sample, however many there are."""

TOLD_EACH = 10
"""Tokens after which a sample's length is written down."""

FOLDER_VARIABLE = "GYRE_VERL_SERVERS"

VOCABULARY = range(3, 300)
"""Of the tests' model, without its special tokens."""

FILE_WITHIN_S = 60.0
"""For the trainer to write its weights: a trainer that has died writes none."""


class CpuServer:
    def __init__(self, replica_rank: int, response_length: int) -> None:
        self._rank, self._response_length = replica_rank, response_length
        self._step = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._aborted = asyncio.Event()
        self._log = (Path(os.environ[FOLDER_VARIABLE]) / f"server-{replica_rank}.jsonl").open(
            "a", buffering=1
        )
        self._write(pid=os.getpid())

    def _write(self, **fields: Any) -> None:
        self._log.write(json.dumps({"at": time.time(), "server": self._rank, **fields}) + "\n")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        await self._opened.wait()
        aborted = self._aborted
        most = int(sampling_params.get("max_tokens", self._response_length))
        asked = list(prompt_ids)[
            : len(prompt_ids) - (self._response_length - most)
        ]  # an aborted one goes on behind it
        prompt = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]
        told = {"request": request_id, "prompt": prompt}
        self._write(**told, tokens=0)
        tokens: list[int] = []
        while len(tokens) < most and not aborted.is_set():
            await asyncio.sleep(TOKEN_S)
            tokens.append(random.choice(VOCABULARY))
            if len(tokens) % TOLD_EACH == 0:
                self._write(**told, tokens=len(tokens))
        self._write(**told, tokens=len(tokens), end="length" if len(tokens) == most else "abort")
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-math.log(len(VOCABULARY))] * len(tokens),
            stop_reason="completed" if len(tokens) == most else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": self._step},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._opened.clear()
        self._aborted.set()

    async def resume_generation(self) -> None:
        self._aborted = asyncio.Event()
        self._opened.set()

    async def set_step(self, step: int) -> None:
        self._step = step
        self._write(step=step)

    async def release_kv_cache(self) -> None:
        """There is none."""

    async def resume_kv_cache(self) -> None:
        """There is none."""

    async def clear_kv_cache(self) -> None:
        """There is none."""

    async def sleep(self) -> None:
        """It has no memory of a device."""

    async def wake_up(self) -> None:
        """It has no memory of a device."""


class CpuReplica(RolloutReplica):
    """One server, as verl launches its own: an actor that Ray does not restart, with a name."""

    async def launch_servers(self) -> None:
        server = (
            ray.remote(CpuServer)
            .options(name=_name_of(self.replica_rank), max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(self.replica_rank, self.config.response_length)
        )
        self.servers = [server]
        await server.__ray_ready__.remote()
        self._server_handle = server
        self._server_address = f"cpu:{self.replica_rank}"


class CpuAdapter(BaseRollout):
    """Beside each server, for its weights."""

    def __init__(self, *given: Any, replica_rank: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.replica_rank = replica_rank

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        async for _name, _tensor in weights:
            pass
        await ray.get_actor(_name_of(self.replica_rank)).set_step.remote(int(global_steps or 0))

    async def resume(self, tags: list[str]) -> None:
        """There is no memory of a device."""

    async def release(self) -> None:
        """There is no memory of a device."""


@CheckpointEngineRegistry.register("cpu")
class FileEngine(CheckpointEngine):
    """The first rank writes a file, and each server's worker reads it, where verl's engines send by NCCL."""

    def __init__(self, bucket_size: int, *, is_master: bool = False, **_: Any) -> None:
        self._is_master = is_master

    def _path(self, step: int | None) -> Path:
        return Path(os.environ[FOLDER_VARIABLE]) / f"step-{step}.pt"

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        named = {name: tensor.detach().clone() for name, tensor in weights}
        if self._is_master:
            partial = self._path(global_steps).with_suffix(".part")
            torch.save(named, partial)
            partial.rename(self._path(global_steps))
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        until = time.monotonic() + FILE_WITHIN_S
        while not self._path(global_steps).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no weights of step {global_steps} within {FILE_WITHIN_S:g} s")
            await asyncio.sleep(0.02)
        for name, tensor in torch.load(self._path(global_steps)).items():
            yield name, tensor

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """There is no group."""

    def finalize(self) -> None:
        """There is no group."""


def _name_of(replica_rank: int) -> str:
    return f"cpu_server_{replica_rank}"


RolloutReplicaRegistry.register("cpu", lambda: CpuReplica)
_ROLLOUT_REGISTRY[("cpu", "async")] = "gyre_verl.testing.servers.CpuAdapter"
