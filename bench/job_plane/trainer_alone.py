"""Megatron without Gyre's control plane, on batches of the same shapes: the same groups a step, the same micro-batches,
packed as the job's actor packs them.

`bare` is Megatron's own schedule, cross-entropy and optimizer over packed passes that are on the device beforehand,
with any kernels. `actor` is the job's actor called directly, with the kernels that repeat bit by bit which the job asks
for, its losses and log-probs, and the copy of its weights for the engines.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from job_plane.actor_process import start_rank
from job_plane.case import Case, Row, tokens_of

STEPS, WARM = 6, 2


def trainer_alone(case: Case, gpu: int = 0) -> Row:
    from job_plane.actor import now

    folder = case.model()
    with tempfile.TemporaryDirectory(prefix="job_gpu_") as place:
        actor = start_rank(case, folder, Path(place), gpus=[gpu])
        try:
            batches = [case.batch(number) for number in range(STEPS)]
            began = now()
            found: Row = {"setup": actor.call("setup", 300.0)}
            found["setup_s"] = round(now() - began, 1)
            new, took = tokens_of(batches[0]), []
            whole = [[group for micro in batches[0] for group in micro]]  # packed as densely as it goes
            bare = actor.call("bare", 300.0, groups=whole, steps=STEPS)
            found["bare"] = bare | {"new_tokens": new}
            bare_s = statistics.median(bare["steps_s"][WARM:])
            found |= {"tokens_s": new / bare_s, "input_tokens_s": bare["input_tokens"] / bare_s}
            deterministic = case.spec(folder)["config"]["megatron"].get("deterministic", True)
            actor.call("deterministic", 60.0, on=deterministic)
            for number, batch in enumerate(batches):
                began = now()
                row = own_step(actor, batch, number + 1)
                took.append(row | {"seconds": now() - began, "new_tokens": tokens_of(batch)})
            kept = took[WARM:]
            found["actor"] = took
            found["actor_tokens_s"] = sum(row["new_tokens"] for row in kept) / sum(
                row["seconds"] for row in kept
            )
            found["memory"] = actor.call("memory", 60.0)
        finally:
            actor.close()
    return found


def own_step(actor: object, batch: list[list[object]], step: int) -> Row:
    """One optimizer step of an actor, or of a gang."""
    call = actor.call  # type: ignore[attr-defined]
    call("begin", 60.0, step=step)
    for index, groups in enumerate(batch):
        call("accumulate", 300.0, groups=groups, step=step, index=index)
    ids = [group.id for groups in batch for group in groups]  # type: ignore[attr-defined]
    told = call("apply", 300.0, step=step, indices=len(batch), group_ids=ids)
    return {key: told[key] for key in ("snapshot_s", "loss", "grad_norm") if key in told}
