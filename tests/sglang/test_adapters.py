"""The real SGLang takes adapters as Gyre's agents load and name them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("transformers")

from gyre.models.adapters import AdapterLimits
from tests.engines.adapter_contract import AdapterContract, Served, serving
from tests.engines.embedded.drawn_adapters import SETTINGS
from tests.sglang_cpu import sglang_on_cpu


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> AsyncIterator[Served]:
    def start(base):
        return sglang_on_cpu(
            base,
            python=sglang_python,
            weight_version="base",
            adapters=AdapterLimits(SETTINGS.rank),
            extra=["--lora-backend", "torch_native"],
        )

    async with serving(tmp_path_factory.mktemp("adapters"), start) as served:
        yield served


class TestSGLang(AdapterContract):
    pass
