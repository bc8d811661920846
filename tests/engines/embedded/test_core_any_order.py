"""Whatever comes in whatever order: every request ends once, and draws what it would have drawn alone."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.engines.dialect import FinishKind, PauseMode
from gyre.engines.embedded.core import EngineCore, Swap
from gyre.engines.embedded.errors import BadRequest
from tests.engines.embedded.tiny import Asked, Model, ask, go_on, run, write_checkpoint
from tests.examples import examples

PROMPTS = [[7, 3], [7, 3, 9, 9, 1, 4, 4, 2, 8, 8, 6], [5] * 40, [5] * 36 + [6] * 9, [1]]

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(range(len(PROMPTS))), st.integers(1, 14)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("pause"), st.sampled_from(list(PauseMode))),
        st.tuples(st.just("resume")),
        st.tuples(st.just("swap"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("flush")),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [Model(write_checkpoint(folder / str(seed), seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def lone(models):
    """The bits of a request that is alone with one model; the longest, of which shorter ones are a start."""

    @functools.cache
    def bits(model: int, prompt: int) -> list[tuple[int, str]]:
        asked = ask(PROMPTS[prompt], 14, seed=prompt)
        run(models[model].core(), asked)
        return asked.bits

    return bits


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(events=EVENTS)
def test_every_request_ends_once_and_draws_what_it_would_have_alone(models, lone, events):
    core = models[0].core(max_running=3, prefill_tokens=8)
    core.weight_version = "0-first"
    requests: list[tuple[int, Asked]] = []
    swaps: list[str] = []
    told: list[int] = []
    for kind, *details in events:
        happen(core, models, kind, details, requests, swaps, told)
    core.resume()
    go_on(core)

    assert len(told) == len(swaps)
    assert (core.load().running, core.load().waiting, core.load().used_tokens) == (0, 0, 0)
    for prompt, asked in requests:
        endings = [update.ending for update in asked.updates if update.ending is not None]
        assert len(endings) == 1
        assert asked.updates[-1].ending is endings[0]
        assert asked.tokens == asked.request.output_ids
        if endings[0].kind is not FinishKind.ABORT:
            assert len(asked.tokens) == asked.request.sampling.max_new_tokens
        spans = asked.request.spans()
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
        assert sum(span.end - span.start for span in spans) == len(asked.tokens)
        for span in spans[:1]:
            model = int(span.version.split("-")[0])
            assert asked.bits[: span.end] == lone(model, prompt)[: span.end]


def happen(core: EngineCore, models, kind, details, requests, swaps, told) -> None:
    match kind:
        case "ask":
            prompt, new = details
            asked = ask(PROMPTS[prompt], new, seed=prompt, rid=f"r{len(requests)}")
            requests.append((prompt, asked))
            core.submit(asked.request)
        case "step":
            go_on(core, details[0])
        case "abort":
            core.abort(lambda request: request.rid == f"r{details[0]}")
        case "pause":
            core.pause(details[0])
        case "resume":
            core.resume()
        case "swap":
            version = f"{details[0]}-{len(swaps)}"
            try:
                core.swap(Swap(models[details[0]].weights, version, details[1], told.append))
                swaps.append(version)
            except BadRequest:
                assert details[1]
                assert core.paused
        case "flush":
            try:
                core.flush()
            except BadRequest:
                assert core.load().running or core.load().waiting
