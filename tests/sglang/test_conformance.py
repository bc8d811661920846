"""The real SGLang keeps the dialect that Gyre's client and its embedded engine were written to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gyre.rollouts.engines.client import EngineClient
from gyre.rollouts.engines.dialect import PauseMode
from gyre.rollouts.engines.errors import EngineUnreachable
from gyre.rollouts.engines.supervisor import EngineProcess
from gyre.testing.sglang_cpu import sglang_on_cpu
from tests.rollouts.engines.conformance import EngineConformance, EngineUnderTest
from tests.rollouts.engines.tiny_model import write_tiny_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, sglang_python: str
) -> AsyncIterator[EngineUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    first = write_tiny_model(folder / "first", seed=1)
    second = write_tiny_model(folder / "second", seed=2)
    command = sglang_on_cpu(first, python=sglang_python, weight_version="1")
    async with EngineProcess(command, ready_within_s=240, stop_within_s=1) as engine:
        yield EngineUnderTest(engine.url, first, second)
        if engine.death is not None:
            raise engine.death.error("SGLang ended during the tests")


class TestSGLang(EngineConformance):
    """What it does not promise is overridden here, each with the reason."""

    @pytest.mark.skip(reason="SGLang 0.5.23 does not look: its scheduler dies of it, and the server with it")
    async def test_a_token_that_the_model_does_not_have_is_refused(self, client: EngineClient) -> None:
        raise NotImplementedError

    @pytest.mark.parametrize(
        "mode",
        [
            PauseMode.IN_PLACE,
            pytest.param(
                PauseMode.RETRACT,
                marks=pytest.mark.xfail(
                    raises=EngineUnreachable,
                    strict=False,
                    reason="SGLang 0.5.23 with --skip-tokenizer-init breaks the stream (KeyError: 'text') when it has "
                    "unsent tokens of a retracted request that is aborted. Resume before you abort",
                ),
            ),
        ],
    )
    async def test_abort_during_a_pause_loses_and_repeats_no_token(
        self, client: EngineClient, mode: PauseMode
    ) -> None:
        await super().test_abort_during_a_pause_loses_and_repeats_no_token(client, mode)
