"""The table of `job_gpu.py`: a line for each case, from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

COLUMNS = (
    "case",
    "job tok/s",
    "by slower half",
    "engine alone",
    "job by it",
    "Megatron alone",
    "colocated",
    "job by it",
    "last 10 by 6-15",
    "published s",
    "served s",
    "checkpoint stands s",
    "engine idle",
    "GPUs busy",
    "start s",
    "stop s",
    "killed: of the ideal",
)


def table(results: Row) -> str:
    """Rates are new tokens/s. A field is empty where its part was not measured, `!` where it failed."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    for name, parts in results.items():
        if name != "machine":
            lines.append("| " + " | ".join([name, *cells(parts)]) + " |")
    return "\n".join([*lines, *of_chaos(results)])


CHAOS_COLUMNS = ("case", "killed", "next step s", "three more s", "back s", "restored from", "redone")


def of_chaos(results: Row) -> list[str]:
    """A line for each kill, and one of the account, of the cases that have some."""
    lines: list[str] = []
    for name, parts in results.items():
        row = parts.get("chaos", {}) if name != "machine" else {}
        chaos = row.get("chaos")
        if not chaos:
            continue
        for kill in chaos["kills"]:
            killed = f"engine of {kill['vertex']}" if kill["kind"] == "engine" else kill["vertex"]
            restored = ", ".join(
                f"{one['source']} ({_as(one['seconds'], seconds)} s)" for one in kill["restored"]
            )
            found = [_as(kill[key], seconds) for key in ("next_step_s", "more_steps_s", "back_s")]
            lines.append(_line([name, killed, *found, restored, str(kill["steps_redone"])]))
        ledger = row.get("ledger", {})
        lost, twice = (len(ledger.get(key, [])) for key in ("lost", "trained_twice"))
        lines.append(
            f"{name}: {_as(chaos['undisturbed_tokens_s'], rate)} tokens/s before the first kill; of "
            f"{ledger.get('drawn')} prompts {lost} lost, {twice} trained twice; "
            f"{sum(row.get('false_alarms', {}).values())} false alarms, "
            f"{len(chaos['deaths_of_others'])} deaths of others; "
            f"not killed: {', '.join(chaos['left']) or 'nobody'}"
        )
    if not lines:
        return []
    head = [_line(CHAOS_COLUMNS), _line(["---"] * len(CHAOS_COLUMNS))]
    kills, accounts = [line for line in lines if line[0] == "|"], [line for line in lines if line[0] != "|"]
    return ["", *head, *kills, "", *accounts]


def _line(fields: Sequence[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def cells(parts: Row) -> list[str]:
    def of(part: str, *path: str) -> Any:
        row: Any = parts.get(part, {})
        if "error" in row and path[0] not in row:
            return "!"
        for key in path:
            row = row.get(key) if isinstance(row, dict) else None
        return row

    job = of("job", "tokens_s")
    engine, trainer, colocated = (of(part, "tokens_s") for part in ("engine", "trainer", "colocated"))
    slower = min(engine, trainer) if _number(engine) and _number(trainer) else None
    busy = of("job", "gpu_busy")
    return [
        _as(job, rate),
        _as(_by(job, slower), ratio),
        _as(engine, rate),
        _as(_by(job, engine), ratio),
        _as(trainer, rate),
        _as(colocated, rate),
        _as(_by(job, colocated), ratio),
        _as(of("job", "decay"), ratio),
        _as(of("job", "to_published_s"), seconds),
        _as(of("job", "to_served_s"), seconds),
        _as(of("job", "checkpoint_stands_s"), seconds),
        _as(of("job", "engine_idle"), percent),
        " ".join(f"{value:.0f} %" for value in busy.values()) if isinstance(busy, dict) else "",
        _as(of("job", "first_step_s"), seconds),
        _as(of("job", "end_s"), seconds),
        _as(of("kills", "kills", "of_the_ideal"), ratio),
    ]


def rate(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.3f}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _as(value: Any, form: Callable[[float], str]) -> str:
    return form(value) if _number(value) else value if isinstance(value, str) else ""


def _by(value: Any, other: Any) -> float | None:
    return value / other if _number(value) and _number(other) and other else None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
