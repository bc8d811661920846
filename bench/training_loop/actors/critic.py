"""PPO's critic in Megatron, alone and beside the actor: what its values and its update cost, and whether it learns.

Samples are synthetic, of the loop's shape. Half of a group's are good: their reward is 1, and their tokens are of one
set; the others' reward is 0, and their tokens are of another. So the return can be told from the tokens, from the first
one on: a critic that learns has its value error fall, and what it explains of the returns rise.

    alone     the critic: values, then one update on them, step after step
    apart     critic and actor on a GPU each, the update of both at once
    together  both on one GPU, one after the other, each giving back the memory that it does not need meanwhile
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from training_loop.actors.actor import ActorFailed, ActorProcess, Row, Work, now
from training_loop.trainer import Shape, inputs

FIRST_GROUP = 780_000_000
SET = 48
"""Tokens in each of the two sets."""

LEARNED = 0.6
"""Of the first value error, what is left at most at the end."""


class CriticWork(Work):
    ROLE = "critic"

    def _learner(self) -> Any:
        from gyre.workloads.megatron.critic import MegatronCritic

        return MegatronCritic()

    def values(self, groups: list[Any], step: int) -> Row:
        """`seconds`, and the groups with their values."""
        found, seconds = self._timed(lambda: self.actor.values(groups, step=step))
        return {"groups": found, "seconds": seconds}


def learnable(shape: Shape, first: int) -> list[Any]:
    """A micro-batch of groups; see above."""
    from gyre.rollouts.samples import Group, Sample, VersionRun

    groups = []
    for number in range(first, first + shape.micro):
        draw, length = np.random.default_rng([9, number]), shape.length(number)
        samples = []
        for one in range(shape.n):
            good = one % 2 == 0
            tokens = draw.integers(3, 3 + SET, length).astype(np.int32) + (0 if good else SET)
            logprobs = np.full(length, -math.log(2 * SET), np.float32)
            samples.append(Sample(tokens, logprobs, (VersionRun(0, 0, length),), "length", float(good)))
        groups.append(Group(number, shape.prompt_of(number), samples=samples))
    return groups


def measure(
    out: Row,
    until: float,
    *,
    shape: Shape,
    start: Callable[[str, str, int], ActorProcess],
    gpus: int,
    steps: tuple[int, int, int],
    wrote: Callable[[], None],
) -> None:
    """`start(name, work, gpu)` begins a process of the `actor` or the `critic`. `steps` are those of each phase."""
    processes: dict[str, ActorProcess] = {}
    batches = _Batches(shape)
    try:
        second = 1 if gpus > 1 else 0
        processes["critic"] = start("critic", "critic", second)
        processes["actor"] = start("actor", "actor", 0)
        if gpus > 1:
            processes["beside"] = start("beside", "critic", 0)
        with ThreadPoolExecutor(3) as pool:
            for name, told in zip(
                processes,
                pool.map(lambda one: one.call("setup", max(1.0, until - now())), processes.values()),
                strict=True,
            ):
                out.setdefault("setup", {})[name] = told
            critic, actor = processes["critic"], processes["actor"]
            out["alone"] = {"steps": []}
            for _ in range(steps[0]):
                out["alone"]["steps"].append(_critic_step(critic, batches, until))
            _learning(out["alone"])
            out["alone"]["memory"] = critic.call("memory", 20.0)
            wrote()
            if gpus > 1:
                out["apart"] = {"steps": []}
                for _ in range(steps[1]):
                    out["apart"]["steps"].append(_both(actor, critic, batches, until, pool))
                out["apart"] |= _rates(out["apart"]["steps"])
                out["apart"]["memory"] = {
                    "actor": actor.call("memory", 20.0),
                    "critic": critic.call("memory", 20.0),
                }
                critic.close()
                critic = processes["beside"]
                wrote()
            out["together"] = {"steps": []}
            actor.call("give_back", 20.0)
            for _ in range(steps[2]):
                out["together"]["steps"].append(_both(actor, critic, batches, until, None))
            out["together"] |= _rates(out["together"]["steps"])
            out["together"]["memory"] = {
                "actor": actor.call("memory", 20.0),
                "critic": critic.call("memory", 20.0),
            }
    finally:
        for process in processes.values():
            process.close()
    _require(out)


class _Batches:
    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._next = FIRST_GROUP

    def take(self) -> list[Any]:
        groups = learnable(self._shape, self._next)
        self._next += 1000
        return groups


def _critic_step(critic: ActorProcess, batches: _Batches, until: float) -> Row:
    groups, step = batches.take(), _next(critic)
    valued = critic.call("values", max(1.0, until - now()), groups=groups, step=step)
    updated = _update(critic, valued["groups"], step, until)
    seconds = valued["seconds"] + updated["seconds"]
    tokens = inputs(groups)
    keys = ("loss", "grad_norm", "value", "return", "value_error", "value_clipped", "explained")
    return {
        "values_s": round(valued["seconds"], 4),
        "update_s": round(updated["seconds"], 4),
        "tokens_s": round(tokens / seconds, 1),
        "update_tokens_s": round(tokens / updated["seconds"], 1),
        "values_tokens_s": round(tokens / valued["seconds"], 1),
        "values_finite": _finite(valued["groups"]),
        **{key: updated[key] for key in keys},
    }


def _both(
    actor: ActorProcess,
    critic: ActorProcess,
    batches: _Batches,
    until: float,
    pool: ThreadPoolExecutor | None,
) -> Row:
    """A step of PPO: values, then both updates, at once with a `pool`."""
    groups = batches.take()
    step, actors = _next(critic), _next(actor)
    began = now()
    gave = 0.0
    valued = critic.call("values", max(1.0, until - now()), groups=groups, step=step)
    if pool is not None:
        other = pool.submit(_update, actor, valued["groups"], actors, until)
        mine = _update(critic, valued["groups"], step, until)
        theirs = other.result()
    else:
        gave += critic.call("give_back", 20.0)["seconds"]
        theirs = _update(actor, valued["groups"], actors, until)
        gave += actor.call("give_back", 20.0)["seconds"]
        mine = _update(critic, valued["groups"], step, until)
        gave += critic.call("give_back", 20.0)["seconds"]
    seconds = now() - began
    return {
        "seconds": round(seconds, 4),
        "values_s": round(valued["seconds"], 4),
        "actor_s": round(theirs["seconds"], 4),
        "critic_s": round(mine["seconds"], 4),
        "gave_back_s": round(gave, 4),
        "input_tokens": inputs(groups),
        "values_finite": _finite(valued["groups"]),
        "actor": {key: theirs[key] for key in ("loss", "grad_norm")},
        "critic": {key: mine[key] for key in ("loss", "grad_norm", "value_error", "explained")},
    }


def _update(process: ActorProcess, groups: list[Any], step: int, until: float) -> Row:
    def left() -> float:
        return max(1.0, until - now())

    process.call("begin", left(), step=step)
    part = process.call("accumulate", left(), groups=groups, step=step, index=0)
    ids = [group.id for group in groups]
    told = process.call("apply", left(), step=step, indices=1, group_ids=ids)
    return {**told, "seconds": part["seconds"] + told["seconds"]}


def _next(process: ActorProcess) -> int:
    return int(process.call("state", 60.0)["step"]) + 1


def _finite(groups: Sequence[Any]) -> bool:
    return all(
        bool(np.isfinite(sample.extras["values"]).all()) for group in groups for sample in group.samples
    )


def _learning(row: Row) -> None:
    steps = row["steps"]
    first, last = steps[0], steps[-1]
    for key in ("tokens_s", "update_tokens_s", "values_tokens_s"):
        row[key] = round(statistics.median(step[key] for step in steps[1:]), 1)
    row["value_error"] = [round(step["value_error"], 5) for step in steps]
    row["explained"] = [round(step["explained"], 4) for step in steps]
    row["error_left"] = round(last["value_error"] / first["value_error"], 4)
    row["learned"] = row["error_left"] <= LEARNED


def _rates(steps: Sequence[Row]) -> Row:
    kept = steps[1:]
    seconds = sum(step["seconds"] for step in kept)
    return {
        "tokens_s": round(sum(step["input_tokens"] for step in kept) / seconds, 1),
        **{
            key: round(statistics.median(step[key] for step in kept), 4)
            for key in ("seconds", "values_s", "actor_s", "critic_s", "gave_back_s")
        },
    }


def _require(out: Row) -> None:
    """Raises ActorFailed where a number is none, or nothing was learned."""
    rows = [*out["alone"]["steps"], *out.get("apart", {}).get("steps", []), *out["together"]["steps"]]
    told = list(out["alone"]["steps"])
    told += [row[role] for row in rows if "actor" in row for role in ("actor", "critic")]
    out["finite"] = all(row["values_finite"] for row in rows) and all(
        math.isfinite(value) for row in told for value in row.values()
    )
    if not out["finite"] or not out["alone"]["learned"]:
        raise ActorFailed(f"finite: {out['finite']}; error left: {out['alone']['error_left']}")


def table(part: Row) -> list[str]:
    lines = []
    alone = part.get("alone", {})
    keys = ("tokens_s", "update_tokens_s", "values_tokens_s", "value_error", "explained", "learned", "memory")
    lines += [f"critic.alone.{key} = {alone[key]}" for key in keys if key in alone]
    for way in ("apart", "together"):
        row = part.get(way, {})
        told = {key: row[key] for key in row if key not in ("steps", "memory")}
        if told:
            lines += [f"critic.{way} = {told}", f"critic.{way}.memory = {row.get('memory')}"]
    if "finite" in part:
        lines.append(f"critic.finite = {part['finite']}")
    return lines
