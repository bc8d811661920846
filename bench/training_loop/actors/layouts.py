"""The Megatron actor in each layout over the same batches: does it compute the same, how fast, and what do a publish
and a checkpoint cost there.

Every layout begins with the same weights and takes the same steps. Then it takes back the checkpoint that the first
layout wrote, in its own layout, and takes one more step, which the first layout took without interruption.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_loop.actors.actor import ActorFailed, Row, now
from training_loop.actors.gang import ActorGang
from training_loop.trainer import Shape, inputs, synthetic

LAYOUTS: dict[str, tuple[int, Row]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "one": (1, {}),
}
"""By name: how many ranks, and what `config.megatron` says. The first writes the checkpoint. Those of as many ranks
follow each other, for they take the same processes, and then give their devices back."""

STEPS = 3
FIRST_GROUP = 700_000_000
LEARNING_RATE = 1e-6

TOLERANCES = {"loss": 4e-3, "grad_norm": 0.03, "entropy": 4e-3}
"""In bf16, against one rank: the loss (a mean of ratios times advantages, near 0) absolutely, the others by their
size. Twice the spacing of bf16 just above 1 is 0.016."""

EXACT = {"loss": 1e-5, "grad_norm": 1e-4, "entropy": 1e-5}
"""In float32."""


def measure(
    out: Row,
    until: float,
    *,
    shape: Shape,
    start: Callable[[int], ActorGang],
    place: Path,
    bf16: bool,
    wrote: Callable[[], None],
) -> None:
    """`start(ranks)` begins a gang. `place` has room for a checkpoint and a version. `wrote` is called after each
    layout. A layout that fails is recorded, and the next one begins with new processes."""
    # All at once, for they import while others compute.
    gangs = {ranks: start(ranks) for ranks in {ranks for ranks, _ in LAYOUTS.values()}}
    checkpoint = place / "checkpoint"
    endpoint = place / "endpoint.json"
    endpoint.write_text(
        json.dumps({"url": "http://127.0.0.1:9"})
    )  # nobody fetches: it is only served on loopback
    count = shape.groups // shape.micro
    batches = [synthetic(shape, FIRST_GROUP + number * 1000, count) for number in range(STEPS + 1)]
    tolerances = TOLERANCES if bf16 else EXACT
    try:
        for left, (name, (ranks, layout)) in enumerate(LAYOUTS.items()):
            row: Row = {"ranks": ranks, "layout": layout}
            out[name] = row
            mine = min(until, now() + max(20.0, (until - now()) / (len(LAYOUTS) - left) * 1.4))
            try:
                for others in [other for other in gangs if other > ranks]:
                    gangs.pop(others).close()
                gang = gangs.get(ranks)
                if gang is None:
                    gang = gangs[ranks] = start(ranks)
                if not any("checkpoint_s" in other for other in out.values()):
                    shutil.rmtree(checkpoint, ignore_errors=True)  # half of one, by who failed
                _layout(row, gang, layout, batches, mine, place / name, endpoint, checkpoint)
                row["ok"] = True
            except Exception as error:
                row["ok"], row["failed"] = False, f"{type(error).__name__}: {error}"[-3000:]
                if (broken := gangs.pop(ranks, None)) is not None:
                    broken.close()
            shutil.rmtree(place / name, ignore_errors=True)
            wrote()
        _compare(out, tolerances)
    finally:
        for gang in gangs.values():
            gang.close()
        shutil.rmtree(checkpoint, ignore_errors=True)
    failed = [name for name in LAYOUTS if not out[name]["ok"]]
    if failed:
        raise ActorFailed(f"{', '.join(failed)}: {out[failed[0]]['failed'][-1500:]}")


def _layout(
    row: Row,
    gang: ActorGang,
    layout: Row,
    batches: list[list[list[Any]]],
    until: float,
    folder: Path,
    endpoint: Path,
    checkpoint: Path,
) -> None:
    row["setup"] = gang.call("setup", max(1.0, until - now()), layout=layout)
    row["steps"] = steps = []
    for number in range(STEPS):
        steps.append(_step(gang, batches[number], number + 1, until))
    tokens = sum(inputs(micro) for micro in batches[0])
    seconds = statistics.median(step["seconds"] - step["snapshot_s"] for step in steps[1:])
    row["tokens_s"] = round(tokens / seconds, 1)
    row["gather_s"] = round(statistics.median(step["snapshot_s"] for step in steps[1:]), 4)
    folder.mkdir()
    row["publish"] = rows = []
    for _ in range(2):  # the second has pages that were touched before
        told = gang.call(
            "publish",
            max(1.0, until - now()),
            line="publish",
            version=STEPS,
            way="arena",
            folder=str(folder),
            endpoint=str(endpoint),
        )
        rows.append({key: round(told[key], 4) for key in told if key.endswith("_s")})
        row["checksum"] = told["checksum"]
    row["memory"] = gang.call("memory", 20.0)
    if not checkpoint.exists():
        told = gang.call("checkpoint", max(1.0, until - now()), path=str(checkpoint))
        row["checkpoint_s"] = round(told["seconds"], 2)
        row["checkpoint_of_it_s"] = {key: round(told[key], 2) for key in ("digest_s", "copy_s", "write_s")}
        row["checkpoint_bytes"] = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    else:
        told = gang.call("restore", max(1.0, until - now()), path=str(checkpoint))
        row["restore_s"], row["restored_step"] = round(told["seconds"], 2), told["step"]
    row["after"] = _step(gang, batches[STEPS], STEPS + 1, until)


def _step(gang: ActorGang, micro_batches: list[list[Any]], step: int, until: float) -> Row:
    gang.call("begin", max(1.0, until - now()), step=step)
    seconds = 0.0
    for index, groups in enumerate(micro_batches):
        told = gang.call("accumulate", max(1.0, until - now()), groups=groups, step=step, index=index)
        seconds += told["seconds"]
    ids = [group.id for groups in micro_batches for group in groups]
    told = gang.call("apply", max(1.0, until - now()), step=step, indices=len(micro_batches), group_ids=ids)
    return {
        "seconds": round(seconds + told["seconds"], 4),
        "snapshot_s": round(told["snapshot_s"], 4),
        **{key: told[key] for key in ("loss", "grad_norm", "entropy") if key in told},
    }


def _compare(out: Row, tolerances: dict[str, float]) -> None:
    """Each layout with one rank: the largest difference over the steps, and whether it is within tolerance."""
    one = out["one"]
    for name, row in out.items():
        if name not in LAYOUTS or name == "one" or not row.get("steps") or not one.get("steps"):
            continue
        mine, theirs = [*row["steps"]], [*one["steps"]]
        if "after" in row and "after" in one:
            mine, theirs = [*mine, row["after"]], [*theirs, one["after"]]
        apart: Row = {}
        for key in tolerances:
            pairs = [(a[key], b[key]) for a, b in zip(mine, theirs, strict=False) if key in a and key in b]
            if pairs:
                scale = 1.0 if key == "loss" else max(abs(b) for _, b in pairs)
                apart[key] = max(abs(a - b) for a, b in pairs) / scale
        row["apart_from_one"] = apart
        row["within_tolerance"] = all(apart[key] <= tolerances[key] for key in apart)
        if row.get("tokens_s") and one.get("tokens_s"):
            row["speed_up"] = round(row["tokens_s"] / one["tokens_s"], 3)
