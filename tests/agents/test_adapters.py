"""Agents and environments that were written for others. Where a package is not installed, its test is skipped: they
have an environment of their own, for their requirements and Gyre's differ."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gyre.agents import Session
from gyre.agents.adapters import messages_of, miles, prompt_of, verifiers, verl
from gyre.agents.adapters.reasoning_gym import ReasoningGym
from gyre.agents.adapters.skyrl_gym import SkyRlGym
from gyre.agents.outcomes import outcome_of, outcome_of_error
from gyre.errors import ConfigError
from tests.agents.manager import Manager
from tests.agents.test_client import guest
from tests.agents.test_runner import end_of

GIVEN = "tests.agents.given_agents"


# -- signatures alone ----------------------------------------------------------------------------------


async def test_an_agent_function_of_miles(tmp_path: Path) -> None:
    manager = Manager()
    manager.add(task={"prompt": "2+2", "answer": "yes"})
    async with guest(tmp_path, manager) as (session, _):
        told = await miles.agent(session, function=f"{GIVEN}:of_miles", deep=True)
        assert told == 1.0
        scored = f"{GIVEN}:scored_as_seen"
        assert await miles.agent(session, function=f"{GIVEN}:of_miles", reward=scored, deep=True) == 0.5


@pytest.mark.parametrize(("reward", "expected"), [("", 0.75), (f"{GIVEN}:scored_by_length", 0.6)])
def test_an_agent_loop_of_verl(reward: str, expected: float) -> None:
    manager = Manager()
    task = {"prompt": "2+2", "ids": [1, 5], "score": 0.75}

    async def agent(session: Session) -> float:
        options = {"config": {"rollout": {"max_turns": 2}}, "reward": reward}
        return await verl.agent(session, loop=f"{GIVEN}:LoopOfVerl", **options)

    ended = end_of(agent, manager, {"task": task})
    assert (ended["outcome"], ended["reward"]) == ("scored", expected)
    (one,) = manager.sessions.values()
    assert [asked["token_ids"] for asked in one.asked] == [[1, 5], [1, 5, 6, 2, 9]]
    assert one.asked[0]["sampling_params"]["temperature"] == 1.0


async def test_a_loop_without_a_score_wants_a_reward(tmp_path: Path) -> None:
    manager = Manager()
    manager.add(task={"prompt": "2+2", "ids": [1], "score": None})
    async with guest(tmp_path, manager) as (session, _):
        with pytest.raises(ConfigError, match=r"options\.reward: is missing"):
            await verl.agent(session, loop=f"{GIVEN}:LoopOfVerl", config={"rollout": {"max_turns": 1}})
        with pytest.raises(ConfigError, match=r"options\.loop"):
            await verl.agent(session, loop=f"{GIVEN}:NoLoop")


def test_prompts_are_texts_or_messages() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]
    assert messages_of(prompt_of({"p": [{"role": "user", "content": "x"}]}, "p"))[0]["content"] == "x"
    with pytest.raises(ConfigError, match="no column 'prompt' with a prompt"):
        prompt_of({"question": "x"}, "prompt")


# -- the packages themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "reward"), [("#### 4", 1.0), ("#### 5", 0.0)])
def test_an_environment_of_skyrl_gym(said: str, reward: float) -> None:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    task = {"prompt": [{"role": "user", "content": "2+2"}], "reward_spec": {"ground_truth": "4"}}
    ended = end_of(SkyRlGym, Manager(lambda messages: said), {"task": task}, options={"env": "gsm8k"})
    assert (ended["outcome"], ended["reward"]) == ("scored", reward)


def test_a_problem_of_reasoning_gym_is_the_group_s() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    questions: list[str] = []

    def policy(messages: list[dict[str, Any]]) -> str:
        question = messages[0]["content"]
        questions.append(question)
        if len(messages) == 1:
            return "<answer>no number</answer>"
        sum_of = question.rpartition(":")[2].replace("=", " ").replace("?", " ")
        return f"<answer>{eval(sum_of)}</answer>"

    options = {"dataset": "chain_sum", "attempts": 2}
    ended = end_of(ReasoningGym, Manager(policy), options=options)
    assert (ended["outcome"], ended["reward"]) == ("scored", 1.0)
    assert len(set(questions)) == 1
    assert end_of(ReasoningGym, Manager(policy), {"group": 7}, options=options)["reward"] == 1.0
    assert len(set(questions)) == 2


async def test_a_task_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    (tmp_path / "gyre_echo.py").write_text(_TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = Manager(lambda messages: "four")
    (one,) = manager.add(task={"index": 1})
    async with guest(tmp_path, manager) as (session, _):
        outcome = outcome_of(await partial(verifiers.agent, taskset="gyre_echo", harness="null")(session))
    assert (outcome.kind, outcome.reward) == ("scored", 1.0)
    assert one.drawn == 1
    assert one.asked[0]["messages"][-1]["content"] == "2+2"


ROLLOUTS = {
    "its row is the group's": ({"group": 4}, ["2+2", "3+3"], ("scored", 1.0)),
    "a held-out one is of the evaluation": ({"group": -1}, ["5+5", "3+3"], ("scored", 1.0)),
    "the data say which row": ({"group": 3, "task": {"index": 0}}, ["1+1", "3+3"], ("scored", 1.0)),
    "its turns are spent": ({"group": 4, "max_turns": 1}, ["2+2"], ("truncated", 0.0)),
    "an empty answer": ({"group": 2}, [""], ("policy_fault", 0.0)),
}


@pytest.mark.parametrize(("limits", "asked", "end"), ROLLOUTS.values(), ids=ROLLOUTS)
async def test_a_rollout_of_an_environment_of_verifiers(
    limits: dict[str, Any],
    asked: list[str],
    end: tuple[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a thread that is not the process's first, as in a vertex; the turns are the session's."""
    pytest.importorskip("verifiers.legacy", reason="verifiers 0.3 is not installed")
    (tmp_path / "gyre_sums.py").write_text(_ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = Manager(lambda messages: messages[-1]["content"].replace("+", "plus"))
    (one,) = manager.add(**limits)
    handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)]
    async with guest(tmp_path, manager) as (session, _):
        try:
            outcome = outcome_of(await partial(verifiers.rollout, env="gyre_sums")(session))
        except Exception as error:
            outcome = outcome_of_error(error)
    assert (outcome.kind, outcome.reward) == end
    assert [turn["messages"][-1]["content"] for turn in one.asked] == asked
    assert [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] == handlers
    if end[0] == "scored":
        assert outcome.extras == {"right": 1.0, "num_turns": 2.0}


_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


class Sums(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "3+3"}]


def right(completion, answer):
    return float([one.content for one in completion] == [answer, "3+3", "3plus3"])


def rows(*questions):
    return Dataset.from_list([{"question": one, "answer": one.replace("+", "plus")} for one in questions])


def load_environment():
    return Sums(
        dataset=rows("1+1", "2+2", ""), eval_dataset=rows("5+5"), rubric=vf.Rubric(funcs=[right]), max_turns=2
    )
"""

_TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Sums(vf.Taskset[Sum]):
    def load(self):
        for prompt, answer in (("1+1", "two"), ("2+2", "four")):
            yield Sum(Data(prompt=prompt, answer=answer), self.config.task)


__all__ = ["Sums"]
"""
