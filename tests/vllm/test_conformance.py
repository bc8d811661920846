"""The real vLLM, behind Gyre's server, keeps the contract of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

import psutil
import pytest
import pytest_asyncio

from gyre.engines.dialect import PauseMode
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineProcess
from tests.engines.conformance import EngineConformance, EngineUnderTest, listen, prompt, request
from tests.engines.tiny_model import write_tiny_model
from tests.vllm_cpu import vllm_on_cpu


@dataclass(frozen=True)
class VLLMUnderTest(EngineUnderTest):
    process: EngineProcess | None = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[VLLMUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    first = write_tiny_model(folder / "first", seed=1)
    second = write_tiny_model(folder / "second", seed=2)
    command = vllm_on_cpu(first, python=vllm_python)
    async with EngineProcess(command, ready_within_s=240, stop_within_s=1) as engine:
        yield VLLMUnderTest(engine.url, first, second, command.limits, command.api_key, engine)


class TestVLLM(EngineConformance):
    XFAIL: ClassVar = {}


@pytest.mark.asyncio(loop_scope="module")
async def test_who_has_not_the_key_is_refused_and_the_key_is_on_no_command_line(
    engine: VLLMUnderTest,
) -> None:
    assert engine.process is not None
    assert engine.process.pid is not None
    for key in (None, "another"):
        async with EngineClient(engine.url, api_key=key) as stranger:
            for asked in (
                stranger.info(),
                stranger.load(),
                stranger.abort_all(),
                stranger.pause(PauseMode.IN_PLACE),
                stranger.update_weights_from_tensor([""], load_format="direct"),
                stranger.update_weights_from_disk(engine.second, "2", flush_cache=True),
                listen(stranger, request(prompt(94), 4)),
            ):
                with pytest.raises(EngineRefused, match="401"):
                    await asked
    processes = psutil.Process(engine.process.pid).children(recursive=True)
    assert processes, "nobody's command line was looked at"
    for process in processes:
        assert not any(str(engine.api_key) in word for word in process.cmdline())
