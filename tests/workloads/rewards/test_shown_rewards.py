"""The reward functions that docs show run as they are shown, in the pool and in the role's class."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.config.sections import RewardSettings
from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups, unpack_groups
from gyre.workloads.base import WorkloadContext
from gyre.workloads.protocols import scores_each_sample
from gyre.workloads.rewards import ExactMatchReward, PythonGroupReward, PythonReward, RewardPool
from tests.test_docs import FILES

GOOD, BAD = "It is <answer>72</answer>\n#### 72", "#### 7"
SHOWN = {
    "sample_reward.py:score": ("sample", "72", "7"),
    "batch_reward.py:score": ("batch", "72", "7"),
    "verl_reward.py:compute_score": ("verl", GOOD, BAD),
    "from_verl_reward.py:compute_score": ("verl", "#### 72", BAD),
    "trl_reward.py:format_reward": ("trl", GOOD, BAD),
    "trl_reward.py:right_answer": ("trl", GOOD, BAD),
    "openrlhf_reward.py:reward_func": ("openrlhf", GOOD, BAD),
}


def test_every_reward_that_is_shown_is_tried():
    assert {name.partition(":")[0] for name in SHOWN} == {
        name for name in FILES if name.endswith("_reward.py")
    } - {
        "test_short_reward.py",
        "short_reward.py",
        "review_reward.py",  # the tutorial's own test runs it, on its own rows
    }


@pytest.mark.parametrize("name", SHOWN)
def test_a_reward_that_is_shown_runs(name, tmp_path):
    form, good, bad = SHOWN[name]
    file, _, function = name.partition(":")
    (tmp_path / file).write_text(FILES[file].text)
    pool = RewardPool(RewardSettings(function=f"{tmp_path / file}:{function}", processes=1))
    try:
        right, wrong = pool.score(
            [("How many?", text, {"answer": "72", "finish_reason": "stop"}) for text in (good, bad)]
        )
        assert pool.forms
        assert [one.name for one in pool.forms] == [form]
    finally:
        pool.close()
    assert right > 0.9 > wrong


# -- the role's class --------------------------------------------------------------------------------


class Words:
    """A task whose tokens are characters."""

    def prompt_text(self, group):
        return "prompt"

    def answer_of(self, sample):
        return "".join(map(chr, sample.token_ids))


def group_of(*texts, **meta):
    made = Group(0, np.array([1, 2, 3], dtype=np.int32), meta)
    for text in texts:
        tokens = np.array([ord(one) for one in text], dtype=np.int32)
        made.samples.append(
            Sample(tokens, np.zeros(len(tokens), np.float32), (VersionRun(0, 0, len(tokens)),))
        )
    return made


def scored_by(kind, function, *groups, monkeypatch):
    monkeypatch.setattr("gyre.workloads.rewards.workloads.task_of", lambda config: Words())
    workload = kind()
    config = {"reward": {"function": function, "processes": 1}}
    workload.context = WorkloadContext(job="j", role="reward", rank=0, world_size=1, config=config)
    workload.setup()
    try:
        return workload.score(list(groups)), workload.health()
    finally:
        workload.teardown()


def test_further_numbers_stay_with_the_sample_and_reach_the_ledger(tmp_path, monkeypatch):
    (tmp_path / "r.py").write_text(
        "def f(completions, completion_ids, prompt_ids, level, finish_reason):\n"
        "    assert prompt_ids == [[1, 2, 3]] * len(completions) and set(finish_reason) == {'stop'}\n"
        "    return [{'score': len(i), 'level': l, 'text': c} for c, i, l in zip(completions, completion_ids, level)]\n"
    )
    (group,), _ = scored_by(
        PythonReward, f"{tmp_path}/r.py:f", group_of("ab", "c", level=3), monkeypatch=monkeypatch
    )
    assert [(sample.reward, sample.extras) for sample in group.samples] == [
        (2.0, {"reward.level": 3.0}),
        (1.0, {"reward.level": 3.0}),
    ]
    (again,) = unpack_groups(pack_groups([group]))
    assert again.samples[0].extras == {"reward.level": 3.0}


def test_golds_that_cannot_be_read_are_counted(monkeypatch):
    pytest.importorskip("math_verify")
    groups = [group_of("#### 1", "#### 2", answer=" "), group_of("#### 1", answer="1")]
    scored, health = scored_by(PythonReward, "math_verify", *groups, monkeypatch=monkeypatch)
    assert [sample.reward for group in scored for sample in group.samples] == [0.0, 0.0, 1.0]
    assert health["unreadable_golds"] == 2


@pytest.mark.parametrize("function", ["exact_match", "math_verify"])
def test_a_row_without_an_answer_is_a_configuration_error(function, monkeypatch):
    with pytest.raises(ConfigError, match="a row without an answer"):
        scored_by(PythonReward, function, group_of("a"), monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="a row without an answer"):
        scored_by(ExactMatchReward, function, group_of("a"), monkeypatch=monkeypatch)


def test_what_is_not_there_is_said_before_the_first_sample(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        scored_by(PythonReward, f"{tmp_path}/rew2.py:f", monkeypatch=monkeypatch)


def test_whole_groups_are_a_class_of_their_own():
    assert scores_each_sample(PythonReward)
    assert not scores_each_sample(PythonGroupReward)


def test_of_a_rollout_in_rows_the_last_one_is_compared_and_all_of_them_earn_that(monkeypatch, tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completions, **columns):\n"
        "    return [{'score': float(len(completions)), 'chars': len(one)} for one in completions]\n"
    )
    group = group_of("a", "bcd", "ef")
    for sample, rollout in zip(group.samples, (4, 4, 5), strict=True):
        sample.rollout = rollout
    (scored,), _ = scored_by(PythonGroupReward, f"{tmp_path}/r.py:f", group, monkeypatch=monkeypatch)
    assert [(one.reward, one.extras) for one in scored.samples] == [
        (2.0, {"reward.chars": chars}) for chars in (3.0, 3.0, 2.0)
    ]
