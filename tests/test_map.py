"""The maps of the code in the documentation: every room is in them. `tests/test_docs.py` checks that their paths
exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SPAN = re.compile(r"`(gyre/[^`\s]+)`")


def test_the_table_of_rooms_has_every_room() -> None:
    rooms = {path.name for path in (ROOT / "gyre").iterdir() if (path / "__init__.py").exists()}
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        named = {path.split("/")[1] for path in _SPAN.findall((ROOT / page).read_text())}
        assert rooms <= named, page
