"""Names on the Hugging Face Hub that were given where a folder is expected.

Gyre downloads nothing: a job reads what is on its machines' disks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from gyre.data.readers import kind_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"(?:https?:/+huggingface\.co/|hf:/+)(?:datasets/)?")


def download_hint(path: Path | str, kind: Literal["dataset", "model"]) -> str:
    """The command that downloads what looks like a name on the Hugging Face Hub; "" for any other path."""
    name = _ADDRESS.sub("", str(path))
    if not _NAME.fullmatch(name) or kind_of(Path(name)) or Path(name).parent.exists():
        return ""
    folder = name.partition("/")[2]
    repo_type = "--repo-type dataset " if kind == "dataset" else ""
    return f"If it is a name on the Hub, download it: hf download {repo_type}{name} --local-dir {folder}"
