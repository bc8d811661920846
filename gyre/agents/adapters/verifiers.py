"""What was written for `verifiers`: the model's turns are the session's.

    agent      a task of a task set (0.3, 0.4), played by its harness
    rollout    a rollout of an environment that `load_environment` makes (up to 0.3): ToolEnv, MultiTurnEnv, and others

verifiers asks Gyre's endpoint in its own dialect, as in an evaluation, and the tokens are in Gyre's ledger. It brings
other versions of some packages than Gyre's development has: run the job in an environment that has both.

Invariants:
- *loading holds up no other session*: the package, its task sets and environments take seconds, on a thread, once a
  process.

This module must not import verifiers before a session is run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import orjson

from gyre.agents.outcomes import SCORED, TRUNCATED, InfraFault, Outcome, PolicyFault
from gyre.agents.session import Session


async def agent(
    session: Session,
    *,
    taskset: str,
    harness: str = "",
    taskset_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    index: str = "index",
) -> Outcome:
    """Play task number `task[index]` of the task set with this id; where the row has no number, the group's is taken.
    `harness` is the id of the program that plays it, "" for the task set's own; it runs as a process of this machine.
    `options` are further fields of verifiers' AgentConfig."""
    tasks = await _loaded(session, _tasks, taskset, taskset_options)
    from verifiers.v1.agent import Agent
    from verifiers.v1.configs.agent import AgentConfig

    task = tasks[int(session.task.get(index, abs(session.claimed.group))) % len(tasks)]
    variable = f"GYRE_SESSION_KEY_{session.id}"
    os.environ[variable] = session.api_key
    try:
        config = AgentConfig.model_validate(
            {
                "model": "policy",
                "client": {"type": "eval", "base_url": session.base_url, "api_key_var": variable},
                "runtime": {"type": "subprocess"},
                "max_turns": session.turns_left,
                **({"harness": {"id": harness}} if harness else {}),
                **(options or {}),
            }
        )
        async with Agent(config) as player:
            trace = await player.run(task)
    finally:
        os.environ.pop(variable, None)
    if trace.errors:
        last = trace.errors[-1]
        raise InfraFault(f"verifiers: {last.type}: {last.message}")
    numbers = {name: float(one.score) for name, one in trace.rewards.items() if one is not None}
    kind = TRUNCATED if trace.is_truncated else SCORED
    return Outcome(kind, float(trace.reward), extras=numbers)


async def rollout(
    session: Session, *, env: str, env_options: dict[str, Any] | None = None, index: str = "index"
) -> Outcome:
    """Play row `task[index]` of the environment `env`, a module with `load_environment`, which gets `env_options`.
    Where the data have no number, the group's is taken; below 0, as of held-out prompts, it counts the evaluation's
    rows. Members of a group are scored one by one, so that rewards which compare them are not there. Raises the error
    that ended the rollout, and PolicyFault for an empty answer, which verifiers takes for an error."""
    made = await _loaded(session, _environment, env, env_options)
    from openai import AsyncOpenAI
    from verifiers.legacy.clients import OpenAIChatCompletionsClient
    from verifiers.legacy.errors import EmptyModelResponseError

    number = int(session.task.get(index, session.claimed.group))
    rows = made.get_dataset() if number >= 0 else made.get_eval_dataset()
    row = rows[(number if number >= 0 else -1 - number) % len(rows)]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as sdk:
        state = await made.rollout(row, OpenAIChatCompletionsClient(sdk), "policy", {})
    error = state.get("error")
    if error is None:
        await made.rubric.score_rollout(state)
    await made.rubric.cleanup(state)
    if error is not None:
        raise PolicyFault("empty answer") if isinstance(error, EmptyModelResponseError) else error
    numbers = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
    kind = TRUNCATED if state.get("is_truncated") else SCORED
    return Outcome(kind, float(state["reward"]), extras=numbers)


_LOADING = threading.Lock()
"""All sessions of a process ask for the same at its start: one of them loads it, and the others wait."""


async def _loaded(
    session: Session, load: Callable[[str, bytes], Any], name: str, options: dict[str, Any] | None
) -> Any:
    def wait_and_load() -> Any:
        with _LOADING:
            return load(name, orjson.dumps(options or {}, option=orjson.OPT_SORT_KEYS))

    return await asyncio.get_running_loop().run_in_executor(session.threads, wait_and_load)


_MOST_TASKS = 100_000
"""Of a task set that has no end."""


@cache
def _tasks(taskset: str, options: bytes) -> list[Any]:
    """The tasks of a set. `options` are further fields of its configuration, as JSON."""
    import verifiers.v1.agent  # noqa: F401 - what `agent` imports after this
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    config = taskset_config_type(taskset).model_validate({"id": taskset, **orjson.loads(options)})
    return list(islice(iter(load_taskset(config).load()), _MOST_TASKS))


@cache
def _environment(name: str, options: bytes) -> Any:
    """The environment. `options` are the arguments of its `load_environment`, as JSON."""
    from verifiers.legacy import load_environment
    from verifiers.legacy.envs import environment

    environment.signal = _NoSignals
    return load_environment(name, **orjson.loads(options))


class _NoSignals:
    """In the place of the module `signal` where an environment is made. It would set the process's handlers, which are
    the vertex's own, and which no thread but the first may set. It is torn down at the process's exit all the same."""

    SIGINT, SIGTERM, default_int_handler = signal.SIGINT, signal.SIGTERM, signal.default_int_handler

    @staticmethod
    def signal(*_: Any) -> None:
        """Set no handler."""
