"""A whole GRPO job on two real SGLang engines, of whose rollout plane everything is killed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.job_contract import MARKS, Job, JobContract, JobsEngine, job_on
from tests.sglang_cpu import cpu_arguments, cpu_python

pytestmark = MARKS


@pytest.fixture(scope="module")
def job(sglang_python: str) -> Iterator[Job]:
    engine = JobsEngine(
        "sglang",
        lambda place: cpu_python(place, sglang_python),
        cpu_arguments(max_tokens=16_384),
        "scheduler",
    )
    with job_on(engine) as job:
        yield job


class TestSGLang(JobContract):
    pass
