"""What an evaluation is of: a policy version and a held-out set. A firing of an evaluating operator has a part for each
set."""

from __future__ import annotations

from typing import NamedTuple

from gyre.graph.flow import Firing


class Evaluation(NamedTuple):
    version: int
    set: str


class Part(NamedTuple):
    """The part of a firing that is of one held-out set."""

    firing: Firing
    set: str
