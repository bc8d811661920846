"""The clauses of `gyre.testing.contracts.engine` as tests, one each.

To test an engine, derive from `EngineConformance` in a `test_*.py`, beside a fixture `engine` that gives an
`EngineUnderTest` over the models of `tests.engines.tiny_model`:

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def engine(tmp_path_factory): ...

    class TestMyEngine(EngineConformance):
        pass

What an engine does not promise stands in its class's `XFAIL`, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gyre.testing.contracts.engine import CLAUSES, EngineUnderTest, check_clause
from gyre.testing.contracts.engine_calls import LONG, listen, listening, prompt_of, request
from tests.engines.tiny_model import VOCAB

__all__ = ["LONG", "EngineConformance", "EngineUnderTest", "listen", "listening", "prompt", "request"]

SGLANG_PLAIN = json.loads((Path(__file__).parent / "recorded" / "stream_plain.json").read_text())


def prompt(seed: int, length: int = 16) -> list[int]:
    return prompt_of(seed, VOCAB, length)


@pytest.mark.asyncio(loop_scope="module")
class EngineConformance:
    XFAIL: ClassVar[Mapping[str, tuple[type[Exception], str]]] = {}
    """By clause, the error that it may end with, and why."""

    @pytest.mark.parametrize("clause", CLAUSES)
    async def test_it_keeps(self, engine: EngineUnderTest, clause: str) -> None:
        error, reason = self.XFAIL.get(clause, (None, ""))
        try:
            await check_clause(clause, engine)
        except Exception as raised:
            if error is None or not isinstance(raised, error):
                raise
            pytest.xfail(reason)

    async def test_greedy_tokens_are_those_that_sglang_gave(self, engine: EngineUnderTest) -> None:
        """For the tiny model of seed 1, recorded from SGLang 0.5.23 by `tests.sglang.record`."""
        events = [json.loads(event.removeprefix("data: ")) for event in SGLANG_PLAIN["events"][:-1]]
        asked = SGLANG_PLAIN["request"]["input_ids"]
        async with engine.client() as client:
            heard = await listen(client, request(asked, 14, temperature=0.0))
        assert heard.tokens == SGLANG_PLAIN["expected"]["tokens"]
        pairs = [pair for event in events for pair in event["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(heard.logprobs, [pair[0] for pair in pairs], atol=1e-3)
