"""A whole GRPO job on two real vLLM engines, of whose rollout plane everything is killed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.job_contract import MARKS, Job, JobContract, JobsEngine, job_on
from tests.vllm_cpu import cpu_arguments, cpu_python

pytestmark = MARKS


@pytest.fixture(scope="module")
def job(vllm_python: str) -> Iterator[Job]:
    engine = JobsEngine("vllm", lambda place: cpu_python(place, vllm_python), cpu_arguments(), "vllm::worker")
    with job_on(engine) as job:
        yield job


class TestVLLM(JobContract):
    pass
