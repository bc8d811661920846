"""A trainer that publishes and an instance that fetches, with the settings of a job's weight plane."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gyre.config import WeightsSpec
from gyre.rollouts.agent.owner import Check
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.protocol.frames import Loaded, LoadFailed, Weights
from gyre.weights.version.manifest import WeightMismatch
from gyre.workloads.gang.weight_source import WeightSource
from tests.rollouts.owners import WeightsOwner

TOKEN = "t"
URL = "http://127.0.0.1:1"
CONFIG = {"model_type": "qwen3"}
MATRIX = "model.layers.0.mlp.up_proj.weight"
NETWORK = "127.0.0.0/8"


def policy(version: int, *, size: int = 640, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Versions differ in a hundredth of their values."""
    values = torch.randn(size, size, generator=torch.Generator().manual_seed(7)) * 0.02
    for step in range(1, version + 1):
        changed = torch.rand(size, size, generator=torch.Generator().manual_seed(step)) < 0.01
        values = torch.where(changed, values * 1.1, values)
    return {MATRIX: values.to(dtype), "model.norm.weight": torch.ones(size, dtype=dtype)}


class Far(WeightsOwner):
    """A trainer that publishes, and an instance that fetches, as if on two machines unless `path` is told."""

    def __init__(
        self,
        tmp_path: Path,
        settings: WeightsSpec,
        theirs: WeightsSpec | None,
        *,
        gives_up_s: float,
        imports: str,
        has_engine: bool = False,
    ) -> None:
        """With `has_engine` the instance has an engine whose loader verifies what it loads."""
        self.source = WeightSource(
            tmp_path, lambda: (URL, TOKEN), root=tmp_path / "trainer", settings=settings
        )
        super().__init__()
        self.is_serving = has_engine
        self.folders: list[Path] = []
        self.instance = AgentWeights(tmp_path / "instance", self, fetch_timeout_s=gives_up_s, codec=imports)
        self.instance.settle(theirs or settings)

        self.checks: list[Check] = []
        """What the engine was offered instead of its loader's own comparison, with each folder."""
        self.refuses = ""

    async def serve(self, folder: Path, weights: Weights, check: Check) -> None:
        self.folders.append(folder)
        self.checks.append(check)
        if not self.is_serving:
            await check()  # as is done while an engine starts
        if self.refuses:
            raise WeightMismatch(self.refuses)

    async def load(self, version: int, *, here: bool = False, **options: Any) -> Loaded | LoadFailed:
        told = self.source.publish(policy(version, **options), CONFIG, version=version, step=version)
        weights = Weights(
            version=version,
            checksum=told["checksum"],
            sources=[told["source"]],
            local_path=told["path"] if here else "",
        )
        await self.instance.load(weights, URL, TOKEN)
        await asyncio.sleep(0)  # what threads told
        answer = next(frame for frame in reversed(self.frames) if isinstance(frame, Loaded | LoadFailed))
        if isinstance(answer, Loaded):
            name = "model.safetensors"
            assert (self.folders[-1] / name).read_bytes() == (Path(told["path"]) / name).read_bytes()
        return answer

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folders[-1] / "gyre.json").read_text()))

    def close(self) -> None:
        self.instance.close()
        self.source.close()


Make = Callable[..., Far]


def free_ports(count: int) -> str:
    """A range of ports that nobody has now."""
    for first in range(23_000, 31_000, 50):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return f"{first}-{first + count - 1}"
    raise AssertionError("no free ports")
