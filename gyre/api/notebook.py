"""How a job, a plan and a handle look in a notebook: HTML with small curves, which need no script and no style sheet.

Pure: text in, text out. Every text of a user is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 260, 48
CURVES = (
    ("reward", "reward_mean"),
    ("answer, tokens", "completion_tokens_mean"),
    ("entropy", "entropy"),
    ("tokens/s", "tokens_per_s"),
)


def table_html(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A heading and rows of a label and a value."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for label, value in rows
        if value
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table></div>"


def curves_html(steps: Sequence[Mapping[str, Any]]) -> str:
    """A curve for each number of `CURVES` that the steps have."""
    drawn = []
    for label, name in CURVES:
        points = [
            (float(row["step"]), float(row[name])) for row in steps if isinstance(row.get(name), int | float)
        ]
        if len(points) > 1:
            drawn.append(
                f"<figure style='display:inline-block;margin:4px 12px 4px 0'>{_curve(points)}"
                f"<figcaption style='font-size:smaller'>{escape(label)} {points[-1][1]:.4g}</figcaption></figure>"
            )
    return "".join(drawn)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """An SVG of at most one point a pixel."""
    every = max(math.ceil(len(points) / WIDTH), 1)
    points = [*points[::every], points[-1]]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    spread, length = (high - low) or 1.0, (last - first) or 1.0
    path = " ".join(
        f"{(x - first) / length * WIDTH:.1f},{HEIGHT - 2 - (y - low) / spread * (HEIGHT - 4):.1f}"
        for x, y in points
    )
    told = f"from {points[0][1]:.4g} to {points[-1][1]:.4g}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{told}'>"
        f"<polyline points='{path}' fill='none' stroke='currentColor' stroke-width='1.5'/></svg>"
    )
