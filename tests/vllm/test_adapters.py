"""The real vLLM takes adapters as Gyre's agents load and name them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("transformers")

from gyre.models.adapters import AdapterLimits
from tests.engines.adapter_contract import AdapterContract, Served, serving
from tests.engines.embedded.drawn_adapters import SETTINGS
from tests.vllm_cpu import vllm_on_cpu


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[Served]:
    def start(base):
        return vllm_on_cpu(
            base, python=vllm_python, weight_version="base", adapters=AdapterLimits(SETTINGS.rank)
        )

    async with serving(tmp_path_factory.mktemp("adapters"), start) as served:
        yield served


class TestVLLM(AdapterContract):
    pass
