"""The table that `loop_gpu.py` prints of its results."""

from __future__ import annotations

from gpu_plane.follow import Row
from training_loop import tensor_parallel as tensor_parallel_of
from training_loop.actors import critic as critic_of
from training_loop.actors import layouts as layouts_of
from training_loop.actors import memory as memory_of


def table(results: Row) -> list[str]:
    lines = []
    parts = results["parts"]
    for name, part in parts.items():
        state = "ok" if part.get("ok") else f"FAILED {part.get('failed', '')[:160]}"
        lines.append(f"{name:<9}{part.get('part_seconds', 0):7.1f} s  {state}")

    def say(name: str, *keys: str) -> None:
        found = {key: parts.get(name, {}).get(key) for key in keys}
        lines.extend(f"{name}.{key} = {value}" for key, value in found.items() if value is not None)

    say("bare", "setup", "bare_tokens_s", "own_tokens_s", "own_without_snapshot_tokens_s", "own_over_bare")
    say("bare", "bare_failed", "deterministic", "memory")
    if parts.get("bare", {}).get("levels_that_failed"):
        lines.append(f"bare: levels that failed: {[x['level'] for x in parts['bare']['levels_that_failed']]}")
    say("served", "engine_start_s", "first_update", "first_update_failed", "with_loader_failed")
    for name in ("loop", "big"):
        say(name, "bare_tokens_s", "own_tokens_s") if name == "big" else None
        say(name, "rates", "train_over_bare", "loop_over_bare", "train_over_own", "engine_rate_tokens_s")
        for key, value in parts.get(name, {}).get("weights", {}).items():
            lines.append(f"{name}.weights.{key} = {value}")
        say(name, "logprobs", "oldest_age", "checked", "account", "account_exact", "cores")
    for way in ("arena", "folder"):
        for row in parts.get("loading", {}).get("publishing", {}).get(way, []):
            lines.append(f"publishing by {way}: {row}")
    for way in ("device", "pinned", "host", "disk"):
        for row in parts.get("loading", {}).get(way, []):
            told = {key: row[key] for key in ("how", "prepare_s", "load_s", "pause_s", "why_disk")}
            lines.append(f"loading.{way}: {told}")
    say("sync", "rates", "loop_over_sync", "oldest_age")
    say("faults", "joined_s", "engine_killed", "agent_killed", "drained", "longest_step_s", "median_step_s")
    say("faults", "over_undisturbed", "instances")
    for name in layouts_of.LAYOUTS:
        row = parts.get("layouts", {}).get(name, {})
        times = (
            "tokens_s",
            "speed_up",
            "gather_s",
            "publish",
            "checkpoint_s",
            "checkpoint_of_it_s",
            "restore_s",
        )
        for key in (*times, "apart_from_one", "within_tolerance", "failed"):
            lines.extend([f"layouts.{name}.{key} = {row[key]}"] if key in row else [])
    for way in ("windows", "bare"):
        row = parts.get("colocated", {}).get(way, {})
        for key in ("rates", "engine_start_s", "not_released", "account_exact", "checked", "engines"):
            lines.extend([f"colocated.{way}.{key} = {row[key]}"] if key in row else [])
    say("colocated", "loop_over_windows", "loop_over_bare")
    say("faults", "checked", "account", "account_exact", "steps_ended_at", "events")
    for name, module in (("tp2", tensor_parallel_of), ("critic", critic_of), ("memory", memory_of)):
        lines += module.table(parts.get(name, {}))
    say("more", "said")
    return lines
