"""How long a test waits for what must come."""

from __future__ import annotations

GENEROUS_S = 60.0
"""A deadline that a busy machine meets, too: a test that passes never waits for it."""
