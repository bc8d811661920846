"""One function says what a job's machines are worth, and what is not known is not there."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.now import now_of
from gyre.api.terminal.formats import efficiency_words
from gyre.observe.efficiency import EFFICIENCY, efficiency_of
from tests.doubles.standing_job import StandingJob

GIB = float(1 << 30)


def view_of_job(**changes: Any) -> dict[str, Any]:
    with StandingJob() as job:
        view: dict[str, Any] = job.view()
    gpu = {"busy": 0.9, "memory_used_bytes": 60 * GIB, "memory_bytes": 80 * GIB}
    idle = {"busy": 0.1, "memory_used_bytes": 20 * GIB, "memory_bytes": 80 * GIB}
    first, second, *others = view["vertices"]
    view["vertices"] = [
        {**first, "fields": {"gpus": {"GPU-a": gpu}}},
        {**second, "fields": {"gpus": {"GPU-a": gpu, "GPU-b": idle, "GPU-c": {"busy": "x"}}}},
        *others,
    ]
    view["progress"] |= {"tokens_per_s": 1000.0}
    view["training"] |= {"last": {"mfu": 0.125, "tokens_per_s_per_gpu": 500.0}, "tokens": 2_000_000}
    view["job"] |= {"spent": 1.0, "priced_at": 1000.0, "price_per_hour": 4.0, "ended_at": None}
    return {**view, **changes}


def test_all_numbers_are_there_and_a_gpu_that_two_share_counts_once() -> None:
    found = efficiency_of(view_of_job(), 1000.0 + 1800.0)
    assert list(found) == list(EFFICIENCY)
    assert found == {
        "tokens_per_s": 1000.0,
        "tokens_per_s_per_gpu": 500.0,
        "mfu": 0.125,
        "gpu_busy": 0.5,
        "gpu_memory_used_bytes": 80 * GIB,
        "gpu_memory_bytes": 160 * GIB,
        "cost": 3.0,
        "cost_per_hour": 4.0,
        "cost_per_million_tokens": 1.5,
    }
    assert efficiency_words(found) == [
        ("tokens/s by GPU", "500"),
        ("MFU", "12.5 %"),
        ("GPUs", "busy 50 %, 80 of 160 GiB in use"),
        ("cost so far", "3.00, 4.00 an hour"),
        ("cost by million tokens", "1.50"),
    ]


@pytest.mark.parametrize("stands", [{"phase": "paused"}, {"reason": "store_lost"}])
def test_of_a_job_that_makes_no_steps_the_speed_of_before_is_not_told(stands: dict[str, Any]) -> None:
    view = view_of_job()
    view["progress"].pop("tokens_per_s")  # as the view of such a job has it
    view["job"] |= stands
    assert list(efficiency_of(view, 2800.0)) == [
        name for name in EFFICIENCY if name not in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu")
    ]


def test_on_cpus_without_prices_there_are_tokens_alone() -> None:
    view = view_of_job()
    view["vertices"] = [{**vertex, "fields": {}} for vertex in view["vertices"]]
    view["training"]["last"] = {"tokens_per_s": 900.0}
    view["job"] |= {"spent": 0.0, "priced_at": 0.0, "price_per_hour": 0.0}
    found = efficiency_of(view, 5000.0)
    assert found == {"tokens_per_s": 1000.0}
    assert efficiency_words(found) == []


def test_an_ended_job_costs_what_it_cost_and_before_a_token_there_is_no_price_of_one() -> None:
    view = view_of_job()
    view["job"] |= {"spent": 7.0, "price_per_hour": 0.0, "ended_at": 2000.0}
    view["training"]["tokens"] = 0
    found = efficiency_of(view, 1e9)
    assert found["cost"] == 7.0
    assert "cost_per_million_tokens" not in found
    assert ("cost", "7.00") in efficiency_words(found)


def test_the_page_says_the_same() -> None:
    view = view_of_job()
    labels = {fact["label"]: fact["value"] for fact in now_of(view, [], 2800.0)["facts"]}
    assert labels.items() >= dict(efficiency_words(efficiency_of(view, 2800.0))).items()


@pytest.mark.parametrize(
    ("amount", "text"), [(0.0034, "0.0034"), (0.5, "0.5"), (12.345, "12.35"), (1234.5, "1,234.50")]
)
def test_prices_have_the_digits_that_matter(amount: float, text: str) -> None:
    words = dict(efficiency_words({"cost_per_million_tokens": amount}))
    assert words == {"cost by million tokens": text}
