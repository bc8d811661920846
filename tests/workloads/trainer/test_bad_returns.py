"""Jobs whose users' classes return what cannot be used, and ledgers that hold it: the class is named, and nobody else
is blamed or restarted."""

from __future__ import annotations

import builtins
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gyre.errors import ConfigError, JobFailed, UserCodeError
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.store import GroupRow
from gyre.testing.in_process import InProcessJob
from gyre.workloads.base import operator
from tests.waits import GENEROUS_S
from tests.workloads import toy_policy
from tests.workloads.toy_policy import ToyActor, ToyReference, ToyReward, ToyRollout

HERE = "tests.workloads.trainer.test_bad_returns"
AT_ONCE = {"retry": {"max": 0, "window_s": 600}, "user_code": {"max": 0, "window_s": 600}}


class TextReward(ToyReward):
    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in super().score(groups):
            for sample in group.samples:
                sample.reward = str(sample.reward)  # type: ignore[assignment]
        return groups


class TextRewardOfSamples(TextReward):
    SCORES_EACH_SAMPLE = True

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        return super().score(groups)


class ShortRollout(ToyRollout):
    """Its log-probs are fewer than its tokens."""

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        made = super().generate(groups, step=step)
        made[-1].samples[0].logprobs = made[-1].samples[0].logprobs[:1]
        return made


class FutureRollout(ToyRollout):
    """Says that a policy made its tokens which there is not."""

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        made = super().generate(groups, step=step)
        made[0].samples = [
            replace(one, versions=tuple(replace(run, version=99) for run in one.versions))
            for one in made[0].samples
        ]
        return made


def _unreadable() -> None:
    raise ValueError("no such sample")


class Unreadable:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


class UnreadableEvaluation(ToyRollout):
    @operator
    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        return {**super().evaluate(groups), "more": Unreadable()}


class TextEvaluation(ToyRollout):
    @operator
    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        return {**super().evaluate(groups), "accuracy": "fine"}


class SortedReward(ToyReward):
    """Its samples are in another order, each with its own reward."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in super().score(groups):
            group.samples.reverse()
        return groups


class OddName(ToyRollout):
    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        made = super().generate(groups, step=step)
        made[0].samples[0].extras["\ud800"] = 1.0
        return made


class Own(BaseException):
    """Which `except Exception` does not catch."""


class OwnException(ToyRollout):
    RAISED: type[BaseException] = Own

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        raise self.RAISED("of the user's")


class OddReference(ToyReference):
    """What it adds has no form in the ledger."""

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        for group in super().logprobs(groups):
            for sample in group.samples:
                sample.extras["seen"] = {1, 2}
        return groups


class ListActor(ToyActor):
    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        return list(super().apply(step=step, indices=indices, group_ids=group_ids).items())  # type: ignore[return-value]


class VaguePolicy(ToyActor):
    """Its manifest lacks the checksum."""

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        manifest, buffer = super().export_weights(version=version)
        return {"version": manifest["version"]}, buffer


class OddStart(ToyActor):
    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        super().warm_start()
        return "warm"  # type: ignore[return-value]


CASES = [
    ("reward", TextReward, "score", "'1.0'|'0.0'"),
    ("reward", TextRewardOfSamples, "score", "'1.0'|'0.0'"),
    ("rollout", ShortRollout, "generate", "1 log-probs for 3 tokens"),
    ("rollout", FutureRollout, "generate", "policy version 99"),
    ("rollout", OddName, "generate", "half characters"),
    ("reward", SortedReward, "score", "in their order"),
    ("rollout", TextEvaluation, "evaluate", "a number"),
    ("reference", OddReference, "logprobs", "extras\\['seen'\\]"),
    ("actor", ListActor, "apply", "expected a dict"),
    ("actor", VaguePolicy, "export_weights", "checksum"),
    ("actor", OddStart, "warm_start", "expected a dict"),
]


@pytest.mark.parametrize(
    ("role", "cls", "method", "said"), CASES, ids=[f"{one[1].__name__}" for one in CASES]
)
def test_a_class_that_returns_what_cannot_be_used_ends_the_job_by_its_name(
    make_job: Any, role: str, cls: type, method: str, said: str
) -> None:
    job: InProcessJob = make_job(
        roles={role: {"entrypoint": f"{HERE}:{cls.__name__}"}}, run={"groups_per_firing": 8}, failover=AT_ONCE
    )
    with pytest.raises(UserCodeError, match=said) as ended, job:
        job.result(timeout_s=GENEROUS_S)
    assert f"{HERE}:{cls.__name__}.{method}" in ended.value.message
    assert "test_bad_returns.py:" in ended.value.message
    assert "Traceback" not in ended.value.details["traceback"]  # which would be ours
    assert job.reports_of("TrainerFailed") == []
    assert job.reports_of("VertexLost") == []
    assert {told.body["vertex"] for told in job.reports_of("OperatorFailed")} == {f"{role}-0"}


def test_an_answer_that_cannot_be_read_is_its_classs_failure_and_the_vertex_is_not_lost(
    make_job: Any,
) -> None:
    job: InProcessJob = make_job(
        roles={"rollout": {"entrypoint": f"{HERE}:UnreadableEvaluation"}}, failover=AT_ONCE
    )
    with pytest.raises(UserCodeError, match="cannot be read: ValueError: no such sample"), job:
        job.result(timeout_s=GENEROUS_S)
    assert job.reports_of("VertexLost") == []


@pytest.mark.parametrize("raised", ["Own", "KeyboardInterrupt", "GeneratorExit"])
def test_what_is_no_exception_is_its_classs_failure_too(
    make_job: Any, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    monkeypatch.setattr(OwnException, "RAISED", {**vars(builtins), "Own": Own}[raised])
    job: InProcessJob = make_job(roles={"rollout": {"entrypoint": f"{HERE}:OwnException"}}, failover=AT_ONCE)
    with pytest.raises(UserCodeError, match=f"{raised}: of the user's") as ended, job:
        job.result(timeout_s=GENEROUS_S)
    assert f"{HERE}:OwnException.generate" in ended.value.message
    assert job.reports_of("VertexLost") == []


# -- ledgers that hold it ---------------------------------------------------------------------------


def of_nan(group: Group) -> bytes:
    group.samples[0].reward = math.nan
    return pack_groups([group])


def beyond(group: Group) -> bytes:
    group.samples[0].token_ids = np.array([1, -5, 1], np.int32)
    return pack_groups([group])


def unequal(group: Group) -> bytes:
    group.samples[0].logprobs = np.zeros(1, np.float32)
    return pack_groups([group])


def spoil(job: InProcessJob, damage: Any, *, of_step: int) -> int:
    """Damage the first of a step's groups, which is scored and not trained. Returns its id."""
    with job.ledger() as ledger:
        group_id = 8 * (of_step - 1)
        (row,) = (one for one in ledger.load().groups if one.group_id == group_id)
        assert row.payload is not None
        (group,) = unpack_groups(row.payload)
        ledger.write(1, groups=[GroupRow(group_id, "done", payload=damage(group))])
    return group_id


@pytest.mark.parametrize(
    ("damage", "when"),
    [(of_nan, "before"), (beyond, "after"), (unequal, "before")],
    ids=["nan", "token-of-an-applied-step", "lengths"],
)
def test_a_trainer_that_finds_what_cannot_be_trained_has_it_made_again(
    make_job: Any, undisturbed: Any, damage: Any, when: Any
) -> None:
    """Though it is in a micro-batch, and whether or not the ranks have made the step of it."""
    job: InProcessJob = make_job()
    spoilt: list[int] = []

    def strike() -> None:
        # First: the next trainer may read the ledger at once. This one waits for the call's answer.
        spoilt.append(spoil(job, damage, of_step=3))
        job.kill_trainer()

    job.on("actor.apply", 3, strike, when=when, vertex="actor-0")
    with job:
        job.result(timeout_s=GENEROUS_S)
    (told,) = job.reports_of("GroupRedrawn")
    assert told.body["group"] == spoilt[0]
    assert told.body["evidence"]
    account = job.account()
    assert (account.lost, account.trained_twice) == ((), ())
    assert account.trained == 40
    with job.ledger() as ledger:
        digests = {row.step: row.digest for row in ledger.load().steps}
    assert digests == undisturbed.digests


# -- whose it is ------------------------------------------------------------------------------------


class NoGroups(toy_policy.ToyData):
    def prompt(self, index: int) -> Group:
        return {"prompt": index}  # type: ignore[return-value]


class NegativePrompt(toy_policy.ToyData):
    def held_out(self, count: int) -> list[Group]:
        return [Group(-1, np.array([-7], np.int32))]


@pytest.mark.parametrize(
    ("data", "said"), [("NoGroups", "expected a Group"), ("NegativePrompt", "a prompt with token id -7")]
)
def test_what_brings_the_prompts_is_the_users(make_job: Any, data: str, said: str) -> None:
    job: InProcessJob = make_job(run={"data": f"{HERE}:{data}"}, failover=AT_ONCE)
    with pytest.raises(UserCodeError, match=said), job:
        job.result(timeout_s=GENEROUS_S)


class NoPrompts(toy_policy.ToyData):
    def held_out(self, count: int) -> list[Group]:
        raise ConfigError("the data has no held-out prompts.", hint="Set run.evaluate_every to 0.")


def test_a_configuration_that_shows_to_be_wrong_ends_the_job_at_once(make_job: Any) -> None:
    job: InProcessJob = make_job(run={"data": f"{HERE}:NoPrompts"})
    with pytest.raises(JobFailed) as ended, job:
        job.result(timeout_s=GENEROUS_S)
    assert ended.value.message.startswith("the data has no held-out prompts. Set run.evaluate_every to 0.")
    assert len(job.reports_of("TrainerFailed")) == 1
    assert not isinstance(ended.value, UserCodeError)
