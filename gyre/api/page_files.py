"""Where the built files of the web page lie. Imports nothing of weight."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "page"


def is_built(folder: Path = FOLDER) -> bool:
    """Whether the page is there: a wheel has it, and a checkout after `make ui`."""
    return (folder / "index.html").is_file()
