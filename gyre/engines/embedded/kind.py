"""The embedded engine as a record."""

from __future__ import annotations

from gyre.engines.kind import EngineKind
from gyre.models.support import BEYOND_TRANSFORMERS

EMBEDDED = EngineKind(
    "embedded",
    "the embedded engine",
    "gyre.engines.embedded.command:command",
    package="torch",
    install="pip install 'gyre-rl[torch]'",
    apart=False,
    on_cores=True,
    repeats=True,
    by_transformers=True,
    lacks=BEYOND_TRANSFORMERS,
)
