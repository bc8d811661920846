"""The contract checks: Gyre's own classes keep their contracts, and a class that breaks a promise is told which."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.samples import Group
from gyre.testing.contracts import (
    ContractBroken,
    check_actor,
    check_critic,
    check_reference,
    check_reward,
    check_rollout,
)
from gyre.workloads.base import BaseWorkload
from gyre.workloads.rewards import ExactMatchReward, PythonReward
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from gyre.workloads.torch.reference import TorchReference
from gyre.workloads.torch.rollout import TorchRollout
from tests.workloads.torch_workloads import CONFIG, bind
from tests.workloads.toy_policy import ToyActor, ToyReference, ToyReward, ToyRollout, mix, packed


@pytest.fixture(scope="module")
def export() -> Callable[[int], tuple[dict[str, Any], bytes]]:
    """The weights of the first policy, as any version."""
    actor = bind(TorchActor())
    return lambda version: actor.export_weights(version=version)


# -- what is Gyre's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("optim", [{}, {"epochs": 2, "mini_batches": 2}], ids=["one update", "several"])
def test_the_torch_actor_keeps_its_contract(tmp_path: Path, optim: dict[str, Any]) -> None:
    check_actor(
        TorchActor,
        config={**CONFIG, "optim": CONFIG.get("optim", {}) | optim},
        directory=tmp_path,
        publishes=True,
    )


def test_the_torch_critic_keeps_its_contract(export: Any) -> None:
    check_critic(TorchCritic, config={**CONFIG, "loss": {"adv_estimator": "gae"}}, policy=export(0))


def test_the_torch_rollout_keeps_its_contract(export: Any) -> None:
    check_rollout(TorchRollout, config=CONFIG, weights=export)


def test_the_torch_reference_keeps_its_contract(export: Any) -> None:
    check_reference(TorchReference, config=CONFIG, policy=export(0))


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (ExactMatchReward, CONFIG),
        (PythonReward, {**CONFIG, "reward": {"function": "tests.workloads.reward_functions:length"}}),
        (ToyReward, CONFIG),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_rewards_keep_their_contract(cls: type, config: dict[str, Any]) -> None:
    check_reward(cls, config=config)


def test_a_class_that_inherits_nothing_may_keep_it_too() -> None:
    class Lengths:
        def score(self, groups: list[Group]) -> list[Group]:
            for group in groups:
                for sample in group.samples:
                    sample.reward = len(sample.token_ids) / self.config["scale"]  # type: ignore[attr-defined]
            return groups

    check_reward(Lengths, config={**CONFIG, "scale": 4})


# -- what breaks a promise --------------------------------------------------------------------------


class CountsTwice(ToyActor):
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        told = super().accumulate(groups, step=step, index=index)
        if step == self.step + 1:
            self.gradient = [value + 1 + len(groups) for value in self.gradient]
        return told


class ForgetsNothing(ToyActor):
    def begin(self, step: int) -> dict[str, Any]:
        return {"step": step}


class StepsAhead(ToyActor):
    def _is_applied(self, step: int) -> bool:
        return step <= self.step


class AppliesWhatever(ToyActor):
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        if step == self.step + 1:
            indices, group_ids = len(self.records), sorted(self.pending)
        return super().apply(step=step, indices=indices, group_ids=group_ids)


class AppliesAgain(ToyActor):
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        if step == self.step:
            self.weights = [mix(value) for value in self.weights]
            return self.metrics
        return super().apply(step=step, indices=indices, group_ids=group_ids)


class OtherMetrics(ToyActor):
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        known = step <= self.step
        return super().apply(step=step, indices=indices, group_ids=group_ids) | {"again": known}


class TrainsTwice(ToyActor):
    def _refuse_trained(self, ids: list[int]) -> None:
        pass


class SameDigest(ToyActor):
    def state(self) -> dict[str, Any]:
        return super().state() | {"digest": "always"}


class NumbersNoState(ToyActor):
    def state(self) -> dict[str, Any]:
        return {"step": str(self.step), "digest": ""}


class ForgetsTheTrained(ToyActor):
    def restore(self, path: Path) -> None:
        super().restore(path)
        self.trained = set()


class RestoresNothing(ToyActor):
    def restore(self, path: Path) -> None:
        self._forget(self.step + 1)


class RestoresWithoutMetrics(ToyActor):
    def restore(self, path: Path) -> None:
        super().restore(path)
        self.metrics = {}


class RestoresAnything(ToyActor):
    def restore(self, path: Path) -> None:
        if path.exists():
            super().restore(path)


class KeepsTheAccumulated(ToyActor):
    def restore(self, path: Path) -> None:
        kept = self.records, self.pending, self.gradient
        super().restore(path)
        self.records, self.pending, self.gradient = kept

    def begin(self, step: int) -> dict[str, Any]:
        if self.step == 1:
            return {"step": step}
        return super().begin(step)


class WarmsUpTwice(ToyActor):
    def warm_start(self) -> dict[str, Any]:
        self.weights = [mix(value, 1) for value in self.weights]
        return {"steps": 1}


class NamesTheVersion(ToyActor):
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        manifest, buffer = super().export_weights(version=version)
        return manifest | {"checksum": f"{version}-{manifest['checksum']}"}, buffer


class ForgetsTheVersion(ToyActor):
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        return super().export_weights(version=self.step)


class ExportsAnArray(ToyActor):
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        manifest, buffer = super().export_weights(version=version)
        return manifest | {"names": np.zeros(2)}, buffer


class ReturnsAClosure(ToyActor):
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        return super().accumulate(groups, step=step, index=index) | {"later": lambda: index}


class SaysItWrites(ToyActor):
    def checkpoint(self, path: Path) -> bool:
        super().checkpoint(path)
        return True


class NoState(ToyActor):
    state = None  # type: ignore[assignment]


class PublishesNothing(ToyActor):
    def publish_model(self, *, version: int) -> dict[str, Any]:
        told = super().export_weights(version=version)[0]
        return told | {"source": "127.0.0.1:9", "path": "/nowhere", "model": "toy"}


@pytest.mark.parametrize(
    ("cls", "promise"),
    [
        (CountsTwice, "end as one whose calls came once"),
        (ForgetsNothing, "begin(2) must raise"),
        (StepsAhead, "begin(2) must raise"),
        (AppliesWhatever, "apply(indices=2) of three micro-batches must raise"),
        (AppliesAgain, "apply(step=1), repeated, must change nothing"),
        (OtherMetrics, "apply(step=1), repeated, must return"),
        (TrainsTwice, "of a group that was trained must raise"),
        (SameDigest, "have another digest"),
        (NumbersNoState, 'state() must return {"step"'),
        (ForgetsTheTrained, "of a group that was trained before a restore must raise"),
        (RestoresNothing, "restore(path) must bring back"),
        (RestoresWithoutMetrics, "apply(…) of the restored step must return its metrics"),
        (RestoresAnything, "of a folder that is not there must raise"),
        (WarmsUpTwice, "warm_start(), repeated, must change nothing"),
        (NamesTheVersion, "have the checksum of the same weights"),
        (ForgetsTheVersion, "export_weights(version=7) must have that version"),
        (ExportsAnArray, "have plain data in its manifest"),
        (ReturnsAClosure, "return what can be pickled"),
        (SaysItWrites, "be written when it returns"),
        (NoState, "it lacks state"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_an_actor_that_breaks_a_promise_is_told_which(cls: type, promise: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_actor(cls, config=CONFIG)
    assert promise in str(caught.value)


def test_the_double_itself_keeps_its_contract() -> None:
    """Else the broken ones would prove nothing."""
    check_actor(ToyActor, config=CONFIG, publishes=False)


def test_what_an_actor_publishes_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.testing.contracts.actor.FETCH_WITHIN_S", 1.0)
    with pytest.raises(ContractBroken, match="make it fetchable from its source"):
        check_actor(PublishesNothing, config=CONFIG)


def test_an_actor_for_the_rollout_plane_must_publish() -> None:
    with pytest.raises(ContractBroken, match="PublishesModel; it lacks publish_model"):
        check_actor(ToyActor, config=CONFIG, publishes=True)


class Values(TorchCritic):
    """A critic whose values are changed by `answer(sample, step)`."""

    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        groups = super().values(groups, step=step)
        for group in groups:
            for sample in group.samples:
                sample.extras["values"] = self.answer(sample.extras["values"])
        return groups

    def answer(self, values: Any) -> Any:
        return values


class WideValues(Values):
    def answer(self, values: Any) -> Any:
        return values.astype(np.float64)


class ShortValues(Values):
    def answer(self, values: Any) -> Any:
        return values[:-1]


class NaNValues(Values):
    def answer(self, values: Any) -> Any:
        return values * np.float32("nan")


class MoodyValues(Values):
    calls = 0

    def answer(self, values: Any) -> Any:
        self.calls += 1
        return values + np.float32(self.calls)


class AnyStepsValues(TorchCritic):
    def refuse_other_step(self, step: int) -> None:
        pass


class TakesAnyPolicy(TorchCritic):
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        step, self.step = self.step, 0
        version = super().load_weights(manifest, buffer)
        self.step = step
        return version


@pytest.mark.parametrize(
    ("cls", "promise"),
    [
        (WideValues, 'set extras["values"] to float32'),
        (ShortValues, 'set extras["values"] to float32'),
        (NaNValues, "finite numbers"),
        (MoodyValues, "values(groups), repeated, must give the same bits"),
        (AnyStepsValues, "values(…, step=0) must raise"),
        (TakesAnyPolicy, "load_weights(…) after a step must change nothing"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_critic_that_breaks_a_promise_is_told_which(cls: type, promise: str, export: Any) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_critic(cls, config={**CONFIG, "loss": {"adv_estimator": "gae"}}, policy=export(0))
    assert promise in str(caught.value)


class ScoresSome(BaseWorkload):
    def score(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for sample in group.samples[1:]:
                sample.reward = 1.0
        return groups


class ScoresNaN(ExactMatchReward):
    def score(self, groups: list[Group]) -> list[Group]:
        groups = super().score(groups)
        groups[0].samples[0].reward = float("nan")
        return groups


class ScoresByCount(ExactMatchReward):
    calls = 0

    def score(self, groups: list[Group]) -> list[Group]:
        groups = super().score(groups)
        self.calls += 1
        groups[0].samples[0].reward = float(self.calls)
        return groups


class Reorders(ExactMatchReward):
    def score(self, groups: list[Group]) -> list[Group]:
        return super().score(groups)[::-1]


class DropsTheEmpty(ExactMatchReward):
    def score(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            group.samples = [sample for sample in group.samples if len(sample.token_ids)]
        return super().score(groups)


class ReturnsRewards(ExactMatchReward):
    def score(self, groups: list[Group]) -> Any:
        return [1.0 for _ in groups]


class SaysItComparesNothing(ExactMatchReward):
    SCORES_EACH_SAMPLE = True

    def score(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for sample in group.samples:
                sample.reward = float(len(group.samples))
        return groups


class ComparesSamples(SaysItComparesNothing):
    """It has a `score` of its own, and so says nothing of it."""

    def score(self, groups: list[Group]) -> list[Group]:
        return super().score(groups)


class WritesIntoTokens(ExactMatchReward):
    def score(self, groups: list[Group]) -> list[Group]:
        groups[0].samples[0].token_ids[:] = 0
        return super().score(groups)


@pytest.mark.parametrize(
    ("cls", "promise"),
    [
        (ScoresSome, "set a finite reward on every sample"),
        (ScoresNaN, "set a finite reward on every sample"),
        (ScoresByCount, "score(groups), on another vertex, must give"),
        (Reorders, "return the groups [0, 1, -3] in this order"),
        (DropsTheEmpty, "leave the 5 samples of group 1"),
        (ReturnsRewards, "return the list of groups that it was given; list"),
        (SaysItComparesNothing, "score each sample by itself"),
        (BaseWorkload, "it lacks score"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_reward_that_breaks_a_promise_is_told_which(cls: type, promise: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_reward(cls, config=CONFIG)
    assert promise in str(caught.value)


def test_a_reward_may_compare_the_samples_of_a_group_whatever_it_is_a_subclass_of() -> None:
    check_reward(ComparesSamples, config=CONFIG)


def test_arrays_are_read_only_in_a_check_as_they_are_in_a_job() -> None:
    with pytest.raises(ValueError, match="read-only"):
        check_reward(WritesIntoTokens, config=CONFIG)


class Unlikely(TorchReference):
    def logprobs(self, groups: list[Group]) -> list[Group]:
        for group in super().logprobs(groups):
            for sample in group.samples:
                sample.extras["ref_logprobs"] = -sample.extras["ref_logprobs"]
        return groups


class ForgetsExtras(TorchReference):
    def logprobs(self, groups: list[Group]) -> list[Group]:
        return groups


@pytest.mark.parametrize(
    ("cls", "promise"),
    [(Unlikely, "give logarithms of probabilities"), (ForgetsExtras, 'set extras["ref_logprobs"]')],
)
def test_a_reference_that_breaks_a_promise_is_told_which(cls: type, promise: str, export: Any) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_reference(cls, config=CONFIG, policy=export(0))
    assert promise in str(caught.value)


def toy_weights(version: int) -> tuple[dict[str, Any], bytes]:
    weights = [mix(version, at) for at in range(4)]
    return {"version": version, "checksum": f"{mix(*weights):016x}"}, packed(weights)


class TakesOlder(ToyRollout):
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        self.version = None
        return super().load_weights(manifest, buffer)


class TakesDamaged(ToyRollout):
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        if self.version is not None and manifest["version"] < self.version:
            raise RuntimeError("older")
        self.version = manifest["version"]
        self.weights = [int.from_bytes(buffer[at : at + 8], "little") for at in range(0, len(buffer), 8)]
        return self.version


class SaysOldVersion(ToyRollout):
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        loaded = super().load_weights(manifest, buffer)
        self.version = loaded - 1
        return loaded


class DrawsByCall(ToyRollout):
    calls = 0

    def _tokens(self, group_id: int, number: int) -> Any:
        self.calls += 1
        return super()._tokens(group_id, self.calls)


class DrawsByStep(ToyRollout):
    step = 0

    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        self.step = step
        return super().generate(groups, step=step)

    def _tokens(self, group_id: int, number: int) -> Any:
        return super()._tokens(group_id + self.step, number)


class GeneratesNothing(ToyRollout):
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        return groups


class WideTokens(ToyRollout):
    def _tokens(self, group_id: int, number: int) -> Any:
        return super()._tokens(group_id, number).astype(np.int64)


class ShortEvaluation(ToyRollout):
    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        return {"version": self.version, "accuracy": float("nan"), "count": len(groups)}


class Answers(ToyRollout):
    """It leaves the scoring of held-out prompts to the reward role."""

    def evaluate(self, groups: list[Group]) -> Any:
        return self.generate(groups, step=0)


class AnswersNothing(ToyRollout):
    def evaluate(self, groups: list[Group]) -> Any:
        return groups


class AnswersByCall(Answers):
    calls = 0

    def evaluate(self, groups: list[Group]) -> Any:
        self.calls += 1
        return super().evaluate(groups)

    def _tokens(self, group_id: int, number: int) -> Any:
        return super()._tokens(group_id + self.calls if group_id >= 100 else group_id, number)


@pytest.mark.parametrize(
    ("cls", "promise"),
    [
        (AnswersNothing, "evaluate(groups) must give group 100 samples"),
        (AnswersByCall, "evaluate(groups), repeated, must give the same samples"),
        (TakesOlder, "of an older version must raise"),
        (TakesDamaged, "of damaged bytes must raise"),
        (SaysOldVersion, "name the policy version of each token, 2; {1}"),
        (DrawsByCall, "evaluate(groups), repeated, must return"),
        (DrawsByStep, "on another vertex, must give the same samples"),
        (GeneratesNothing, "give group 0 samples"),
        (WideTokens, "give tokens as int32"),
        (ShortEvaluation, "the accuracy a finite number"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_rollout_that_breaks_a_promise_is_told_which(cls: type, promise: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_rollout(cls, config=CONFIG, weights=toy_weights)
    assert promise in str(caught.value)


@pytest.mark.parametrize("cls", [ToyRollout, Answers])
def test_the_rollout_double_itself_keeps_its_contract(cls: type) -> None:
    check_rollout(cls, config=CONFIG, weights=toy_weights)


def test_a_broken_contract_is_an_assertion_with_its_parts_and_pickles() -> None:
    with pytest.raises(AssertionError) as caught:
        check_reward(BaseWorkload, config=CONFIG)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ContractBroken)
    assert again.details == {
        "call": "BaseWorkload",
        "promised": "have the methods of Reward",
        "came": "it lacks score",
    }
    assert again.code == "contract_broken"


def test_the_toy_reference_answers_by_another_key() -> None:
    """It is a double of the trainer's tests, whose actor reads `reference`."""
    with pytest.raises(ContractBroken, match="ref_logprobs"):
        check_reference(ToyReference, config=CONFIG)
