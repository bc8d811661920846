"""Rewards are exact and repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.errors import ConfigError, UserCodeError
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import WorkloadContext
from gyre.workloads.rewards import ExactMatchReward, PythonReward, load_function
from gyre.workloads.tasks.arithmetic import ArithmeticTask
from gyre.workloads.vertex.messages import failure_of


def bound(workload, **config):
    workload.context = WorkloadContext(
        job="j", role="reward", rank=0, world_size=1, config={"task": {}, **config}
    )
    workload.setup()
    return workload


def group_with(answers):
    task = ArithmeticTask({})
    group = task.prompt(0)
    for text, ended in answers:
        tokens = task.tokenizer.encode(text)
        if ended:
            tokens = np.append(tokens, np.int32(task.tokenizer.eos_id))
        group.samples.append(
            Sample(
                tokens,
                np.zeros(len(tokens), dtype=np.float32),
                (VersionRun(0, 0, len(tokens)),),
                finish_reason="stop" if ended else "length",
            )
        )
    return group


def test_only_the_exact_and_finished_answer_is_rewarded():
    right = ArithmeticTask({}).prompt(0).meta["answer"]
    cases = [(right, True), ("0" + right, True), (right[:-1], True), (right, False), ("", True)]
    (scored,) = bound(ExactMatchReward()).score([group_with(cases)])
    assert [sample.reward for sample in scored.samples] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_scoring_twice_gives_the_same():
    reward = bound(ExactMatchReward())
    once = [s.reward for s in reward.score([group_with([("12", True)])])[0].samples]
    again = [s.reward for s in reward.score(reward.score([group_with([("12", True)])]))[0].samples]
    assert once == again


def test_a_python_function_scores_texts():
    reward = bound(PythonReward(), reward={"function": "tests.workloads.reward_functions:length"})
    try:
        (scored,) = reward.score([group_with([("12", True), ("7", True)])])
        width = len(scored.meta["answer"])
        assert [sample.reward for sample in scored.samples] == [width + 2, width + 1]
    finally:
        reward.teardown()


def test_a_failing_function_is_told_as_the_user_s_with_its_traceback():
    reward = bound(PythonReward(), reward={"function": "tests.workloads.reward_functions:by_word"})
    group = group_with([("12", True)])
    reward.task.answer_of = lambda sample: "raise"
    try:
        with pytest.raises(UserCodeError) as caught:
            reward.score([group])
        told = failure_of(caught.value, module="gyre.workloads.rewards.workloads")
        assert told.user_code
        assert "no such thing" in told.traceback
        assert group.samples[0].reward is None
    finally:
        reward.teardown()


@pytest.mark.parametrize(
    "path", ["", "json", "json:", "no_such_module_here:f", "json:no_such", "json:__name__"]
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(path):
    with pytest.raises(ConfigError, match=r"config\.reward\.function"):
        load_function(path)


def test_an_empty_list_of_groups_is_fine():
    assert bound(ExactMatchReward()).score([]) == []
    assert (
        bound(ExactMatchReward()).score([Group(0, np.zeros(1, dtype=np.int32), {"answer": ""})])[0].samples
        == []
    )
