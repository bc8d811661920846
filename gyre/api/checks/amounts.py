"""How much a job will draw, generate and train, foretold from its settings and its data set: prompts, epochs, answers,
tokens.

Invariant *known or said*: what a data set holds that is not on this machine is None, and shown as not known.

This module must not know how prompts are drawn: `gyre.data` and the tasks do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gyre.api.terminal.formats import price
from gyre.config import AGENT_ROLE, JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph.devices import rate_per_hour
from gyre.graph.integrations import reads_sections

SETS_NAMED = 3
"""Held-out sets that are told by name; with more their number is told."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a data set holds. `training` are the rows that are drawn; the other `rows` are held out, or have the prompt
    of one that is. `mean_tokens` is of all rows. `held_out` has the prompts of each set by its name."""

    rows: int
    training: int
    mean_tokens: float
    held_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Of a job of the built-in trainer. Tokens are the most that can be generated: every answer at its limit. With
    agents an answer is a session, whose limit counts what tools say too; one that begins branches may have more.

    `prompts` is None where they are made as they are drawn, or not known here; `why` says which.
    """

    steps: int
    prompts_per_step: int
    answers_per_prompt: int
    longest_answer: int
    longest_held_out: int
    held_out: int
    held_out_answers: int
    evaluate_every: int
    checkpoint_every: int
    prompts: Prompts | None
    why: str = ""
    agents: int = 0
    """Vertices of the role `agent`; 0 where answers are no sessions."""
    sessions_by_agent: int = 0
    sessions_per_step: int = 0
    """Those that are begun, with `config.agent.oversample`."""

    @property
    def epochs(self) -> float | None:
        return None if self.prompts is None else self.steps * self.prompts_per_step / self.prompts.training

    @property
    def answers_per_step(self) -> int:
        return self.prompts_per_step * self.answers_per_prompt

    @property
    def sessions_at_once(self) -> int:
        return self.agents * self.sessions_by_agent

    @property
    def tokens_per_step(self) -> int:
        return (self.sessions_per_step or self.answers_per_step) * self.longest_answer

    @property
    def prompt_tokens_per_step(self) -> int | None:
        """On average, each prompt counted once."""
        return None if self.prompts is None else round(self.prompts_per_step * self.prompts.mean_tokens)

    @property
    def evaluated(self) -> dict[str, int]:
        """Prompts of each held-out set in an evaluation."""
        if not self.evaluate_every:
            return {}
        known = {} if self.prompts is None else self.prompts.held_out
        return {name: min(self.held_out, count) for name, count in known.items()} or {
            "held_out": self.held_out
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "epochs": self.epochs,
            "answers_per_step": self.answers_per_step,
            "sessions_at_once": self.sessions_at_once or None,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.steps * self.tokens_per_step,
            "prompt_tokens_per_step": self.prompt_tokens_per_step,
            "evaluated": self.evaluated,
        }


def amounts_of(spec: JobSpec) -> Amounts | None:
    """Of a compiled job that was checked; None of one whose trainer is not Gyre's, or that trains nothing."""
    if spec.counts_own_steps or not reads_sections(spec):
        return None
    settings, run = WorkloadSettings.read(spec.config), spec.run
    prompts, why = _prompts(spec, settings)
    agent = settings.agent if AGENT_ROLE in spec.roles else None
    longest = settings.sampling.max_new_tokens if agent is None else agent.max_tokens
    return Amounts(
        steps=run.steps,
        prompts_per_step=run.prompts_per_step,
        answers_per_prompt=settings.sampling.n,
        longest_answer=longest,
        longest_held_out=longest if agent is not None else settings.evaluation.max_new_tokens or longest,
        held_out=_held_out(spec, settings),
        held_out_answers=settings.evaluation.n,
        evaluate_every=run.evaluate_every,
        checkpoint_every=run.checkpoint_every,
        prompts=prompts,
        why=why,
        agents=0 if agent is None else spec.roles[AGENT_ROLE].total,
        sessions_by_agent=0 if agent is None else agent.concurrency,
        sessions_per_step=0 if agent is None else begun_per_step(spec, settings.sampling.n, agent.oversample),
    )


def begun_per_step(spec: JobSpec, n: int, oversample: float) -> int:
    """Sessions that are begun for a step."""
    return spec.run.prompts_per_step * math.ceil(n * oversample)


def _held_out(spec: JobSpec, settings: WorkloadSettings) -> int:
    """Prompts of each held-out set at most. Of the arithmetic task they are counted."""
    run, task = spec.run, settings.task
    is_counted = task is not None and task.name == "arithmetic" and settings.data is None and run.data is None
    if run.held_out is not None or not is_counted:
        return run.most_held_out
    from gyre.workloads.tasks.arithmetic import ArithmeticTask

    return ArithmeticTask(spec.config).held_out_at_most(run.most_held_out)


def _prompts(spec: JobSpec, settings: WorkloadSettings) -> tuple[Prompts | None, str]:
    """What the data set holds, or why that is not known."""
    if spec.run.data not in (None, "gyre.data.prepared:PreparedData"):
        return None, f"{spec.run.data} makes the prompts"
    try:
        if settings.data is not None:
            return _prepared(spec, settings), ""
        if settings.task is not None and settings.task.name == "rows":
            return _rows(spec), ""
    except (ConfigError, OSError):  # where it must be on this machine, the checks have refused its absence
        return None, "not known: the data set is not on this machine"
    return None, "made as they are drawn"


def _prepared(spec: JobSpec, settings: WorkloadSettings) -> Prompts:
    from gyre.data.prepared import PreparedData

    data = PreparedData(spec.config)
    first, *others = data.folders
    named = settings.data.held_out_sets if settings.data is not None else {}
    held_out = {name: folder.rows for name, folder in zip(named, others, strict=True)}
    if not named and data.held_out_count:
        held_out = {"held_out": data.held_out_count}
    return Prompts(first.rows, data.training_count, float(first.lengths.mean()), held_out)


def _rows(spec: JobSpec) -> Prompts:
    from gyre.workloads.tasks.rows import RowsTask

    task = RowsTask(spec.config)
    held_out = {"held_out": task.held_out_count} if task.held_out_count else {}
    return Prompts(task.count, task.count - task.held_out_count, task.mean_prompt, held_out)


# -- words ----------------------------------------------------------------------------------------------


def lines_of(found: Amounts) -> Iterator[tuple[str, str]]:
    """The table of `gyre plan`: what, and how much."""
    prompts, drawn = found.prompts, found.steps * found.prompts_per_step
    if prompts is None:
        yield "prompts", found.why
        yield "steps", f"{found.steps:,} of {found.prompts_per_step:,} prompts"
    else:
        left = prompts.rows - prompts.training
        kept = (
            f"; {_count(left, 'is', 'are')} never trained on, held out or equal to one that is"
            if left
            else ""
        )
        yield "prompts", f"{prompts.training:,} of {prompts.rows:,} rows are trained on{kept}"
        yield (
            "steps",
            f"{found.steps:,} of {found.prompts_per_step:,} prompts, {_epochs(drawn, prompts.training)}",
        )
    yield (
        "answers",
        f"{found.answers_per_step:,} a step, {found.answers_per_prompt} to each prompt; "
        f"{found.steps * found.answers_per_step:,} in all",
    )
    if found.agents:
        yield (
            "sessions",
            f"{found.sessions_at_once:,} at once, {found.sessions_by_agent:,} with each of "
            f"{_count(found.agents, 'agent', 'agents')}; a step begins {found.sessions_per_step:,}",
        )
    tokens = (
        f"at most {found.tokens_per_step:,} generated a step, {found.steps * found.tokens_per_step:,} in all"
    )
    if prompts is not None:
        tokens += (
            f"; prompts have {prompts.mean_tokens:.0f} on average, {found.prompt_tokens_per_step:,} a step"
        )
    yield "tokens", tokens + ("; more where a session begins a branch" if found.agents else "")
    yield "evaluations", _evaluations(found)
    yield "checkpoints", f"every {_steps(found.checkpoint_every)}; the newest two are kept"


def price_line(spec: JobSpec) -> str:
    """What an hour of the job costs, and of what that is, as `9.00: 3 devices at 3.00 each`; "" without prices."""
    rate = rate_per_hour(spec, {})
    if rate is None:
        return ""
    pools = {
        name: (role.total, role.pool.price_per_hour)
        for name, role in spec.roles.items()
        if role.pool is not None and role.pool.price_per_hour
    }
    parts = [
        f"{_count(count, 'instance', 'instances')} of {name} at {price(each)} each"
        for name, (count, each) in pools.items()
    ]
    if spec.device_price_per_hour:
        own = (rate - sum(count * each for count, each in pools.values())) / spec.device_price_per_hour
        parts.append(f"{own:g} device{'' if own == 1 else 's'} at {price(spec.device_price_per_hour)} each")
    return f"{price(rate)}: {' and '.join(parts)}"


def _epochs(drawn: int, rows: int) -> str:
    epochs = drawn / rows
    if epochs >= 1:
        return f"{epochs:.1f} epochs" if epochs >= 1.05 else "1 epoch"
    return f"{epochs:.2g} of an epoch, so {_count(rows - drawn, 'row is', 'rows are')} not reached"


def _evaluations(found: Amounts) -> str:
    sets = found.evaluated
    if not sets:
        return "none (run.evaluate_every is 0)"
    named = (
        ", ".join(f"{count:,} prompts of {name}" for name, count in sets.items())
        if len(sets) <= SETS_NAMED
        else f"{sum(sets.values()):,} prompts of {len(sets)} sets"
    )
    most = sum(sets.values()) * found.held_out_answers * found.longest_held_out
    return f"every {_steps(found.evaluate_every)}: {named}, at most {most:,} tokens each time"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _count(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
