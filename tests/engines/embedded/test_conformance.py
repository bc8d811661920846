"""The embedded engine does what every engine must do: the conformance suite against its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.engines.conformance import EngineConformance, EngineUnderTest
from tests.engines.tiny_model import write_tiny_model
from tests.ports import free_port


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[str]:
    """The URL of an engine in a process of its own, which ends with the block."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gyre.engines.embedded"),
        *("--model-path", str(model), "--port", str(port), "--weight-version", "1", *flags),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                assert process.returncode is None, "the engine did not start"
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/ready") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield url
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    first = write_tiny_model(folder / "first", seed=1)
    second = write_tiny_model(folder / "second", seed=2)
    async with serving(first) as url:
        yield EngineUnderTest(url, first, second)


class TestEmbeddedEngine(EngineConformance):
    """Nothing that the embedded engine does otherwise."""
