"""What is measured of a loop: its rates, and each version from the optimizer's step to the engines that serve it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpu_plane.follow import Row
from gpu_plane.plane import Plane
from training_loop.trainer import LoopTrainer

WARM = 2
"""Steps at the start of a loop that are not counted: the first waits for the first groups."""


def rates(rows: Sequence[Row], since: int = WARM) -> Row:
    """Of a loop's steps. "train": while the actor worked; "loop": of the wall clock, all waits included."""
    kept = list(rows)[since:] or list(rows)
    if not kept:
        return {}
    tokens = sum(row["input_tokens"] for row in kept)
    responses = sum(row["response_tokens"] for row in kept)
    wall = kept[-1]["began_at"] + kept[-1]["seconds"] - kept[0]["began_at"]
    train = sum(row["train_s"] for row in kept)
    return {
        "steps": len(kept),
        "step_s": round(wall / len(kept), 4),
        "train_s_a_step": round(train / len(kept), 4),
        "snapshot_s_a_step": round(sum(row["snapshot_s"] for row in kept) / len(kept), 4),
        "waited_s_a_step": round(sum(row["waited_s"] for row in kept) / len(kept), 4),
        "waited_for_publish_s_a_step": round(sum(row["waited_for_publish_s"] for row in kept) / len(kept), 4),
        "input_tokens_a_step": tokens // len(kept),
        "train_tokens_s": round(tokens / train, 1),
        "train_without_snapshot_tokens_s": round(
            tokens / (train - sum(row["snapshot_s"] for row in kept)), 1
        ),
        "loop_tokens_s": round(tokens / wall, 1),
        "response_tokens_s": round(responses / wall, 1),
    }


_TOLD = ("fetch_s", "load_s", "pause_s", "how", "note", "fetched")


def versions_served(plane: Plane, trainer: LoopTrainer, first: int, last: int) -> list[Row]:
    """Of each version from the optimizer's step to the instances that serve it. Seconds."""
    found = []
    for version in range(first, last + 1):
        told = trainer.publications.get(version)
        if told is None:
            continue
        row = {
            "version": version,
            "size_bytes": told["size_bytes"],
            "step_to_publish_began_s": round(told["began_at"] - told["stepped_at"], 4),
            "export_s": round(told["export_s"], 4),
            "write_s": round(told["write_s"], 4),
            "step_to_published_s": round(told["published_at"] - told["stepped_at"], 4),
        }
        loaded = plane.log.rows("WeightsLoaded", told["stepped_at"], version=version)
        row["instances"] = {
            one["instance"]: {
                "step_to_served_s": round(one["at"] - told["stepped_at"], 4),
                **{key: one[key] for key in _TOLD if key in one},
            }
            for one in loaded
        }
        found.append(row)
    return found


def spread(values: Sequence[float]) -> Row:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "least": round(ordered[0], 4),
        "most": round(ordered[-1], 4),
        "of": len(ordered),
    }


def weights_summary(versions: Sequence[Row], instance: str) -> Row:
    """Medians over versions that came by an update, not by a start."""
    served = [row["instances"][instance] for row in versions if instance in row["instances"]]
    served = [row for row in served if row.get("how") != "start"]
    whole: Row = {}
    for key in ("export_s", "write_s", "step_to_published_s"):
        whole[key] = spread([row[key] for row in versions])
    for key in ("fetch_s", "load_s", "pause_s", "step_to_served_s"):
        whole[key] = spread([row[key] for row in served if key in row])
    whole["how"] = sorted({row.get("how", "") for row in served})
    whole["fetched"] = served[-1].get("fetched", "") if served else ""
    whole["notes"] = sorted({row.get("note", "") for row in served} - {""})
    whole["bytes"] = versions[-1]["size_bytes"] if versions else 0
    return whole


def exact(account: Row) -> bool:
    return bool(
        account["generated"]
        == account["delivered"] + account["in_flight"] + sum(account["discarded"].values())
    )
