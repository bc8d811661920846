"""The section `config.first_weights`: weights that training begins with instead of the model's own.

`gyre run --from` and `submit(from_=...)` fill it in, so that whoever starts a process of the job again has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config.sections.section import Section

NAME = "first_weights"


class FirstWeightsSettings(Section):
    """Where the policy's first weights are, if they are neither the model folder's own nor drawn from the seed."""

    path: str = ""
    """A folder in Hugging Face's layout, of the shape of the job's model. With it there is no warm start."""
    source: str = ""
    """What the weights were taken from, in words."""


def source_of(config: Mapping[str, Any]) -> str:
    """What the job's first weights were taken from; "" for its model's own. A job without Gyre's classes may have any
    content there."""
    section = config.get(NAME)
    source = section.get("source") if isinstance(section, Mapping) else None
    return source if isinstance(source, str) else ""
