"""What an engine would die of does not reach it. That SGLang dies of it: `tests/sglang/test_guards.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gyre.engines.dialect import GenerateRequest, SamplingParams
from gyre.engines.errors import EngineRefused, RequestUnsafe
from gyre.engines.http_client import EngineClient
from gyre.engines.limits import RequestLimits
from gyre.engines.sglang.command import sglang_command
from gyre.models.architecture import vocabulary_of
from tests.engines.fake_engine import FakeEngine


def request(*tokens: int, min_p: float = 0.0) -> GenerateRequest:
    return GenerateRequest("r", np.array(tokens, np.int32), SamplingParams(4, min_p=min_p))


@pytest.mark.parametrize(("tokens", "bad"), [((1, 512), 512), ((1, -1, 5), -1), ((2**31 - 1,), 2**31 - 1)])
def test_a_token_that_the_model_does_not_have_is_refused(tokens: tuple[int, ...], bad: int) -> None:
    with pytest.raises(RequestUnsafe, match=f"token {bad}, and the model has tokens 0 to 511") as caught:
        RequestLimits(512).check(request(*tokens))
    assert caught.value.code == "engine.request_unsafe"
    assert caught.value.details["reason"] == "token_out_of_vocabulary"


def test_every_token_of_the_model_is_taken() -> None:
    RequestLimits(512).check(request(*range(512)))
    RequestLimits(None).check(request(10**6))
    RequestLimits(512).check(request())  # an empty prompt is the engine's to refuse


def test_min_p_is_refused_where_seeds_count_and_only_there() -> None:
    with pytest.raises(RequestUnsafe, match=r"min_p 0\.1") as caught:
        RequestLimits(takes_min_p=False).check(request(1, min_p=0.1))
    assert caught.value.details["reason"] == "min_p_with_seeds"
    RequestLimits(takes_min_p=False).check(request(1))
    RequestLimits().check(request(1, min_p=0.1))


def test_sglang_is_started_with_its_limits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    assert sglang_command(tmp_path, deterministic=True).limits == RequestLimits(512, takes_min_p=False)
    assert sglang_command(tmp_path).limits == RequestLimits(512)


@pytest.mark.parametrize(
    ("config", "size"),
    [('{"vocab_size": 7}', 7), ('{"text_config": {"vocab_size": 8}}', 8), ("{}", None), ("no json", None)],
)
def test_the_vocabulary_is_what_the_model_says(tmp_path: Path, config: str, size: int | None) -> None:
    (tmp_path / "config.json").write_text(config)
    assert vocabulary_of(tmp_path) == size
    assert vocabulary_of(tmp_path / "nothing") is None


async def test_the_engine_never_sees_what_is_refused() -> None:
    async with (
        FakeEngine() as fake,
        EngineClient(fake.url, limits=RequestLimits(512, takes_min_p=False)) as client,
    ):
        for bad in (request(512), request(1, min_p=0.5)):
            with pytest.raises(EngineRefused):
                await anext(client.generate(bad))
            with pytest.raises(EngineRefused):
                await anext(client.generate_many([request(1), bad]))
        assert fake.asked == []
