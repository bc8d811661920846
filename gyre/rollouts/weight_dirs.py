"""Whose folders of weights are whose, and the end of those that a job leaves behind on a machine.

The actor, each instance and each rank that fetched a copy has a folder in shared memory for as long as it lives
(`gyre.weights.owned_dirs`). One that was killed leaves it for its successor; when the job ends there will be none.

Invariant *the living keep theirs*: only folders whose owners have died are removed, whoever asks.

This module must not know what is in a folder, or when a job ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gyre.rollouts.protocol.endpoint import read_weights_endpoint
from gyre.weights.owned_dirs import default_root, remove_left


def of_publisher(directory: Path) -> str:
    """The purpose (see `OwnedDir`) of the folder that this job's actor publishes from."""
    return f"trainer of {directory}"


def of_instance(key: str) -> str:
    """Of what an instance fetches; instances know the weights key alone, for they may be anywhere."""
    return f"instance of {key}"


def of_copy(vertex: str, directory: Path) -> str:
    """Of what a rank fetches from instances."""
    return f"copy for {vertex} of {directory}"


def remove_left_by_job(directory: Path, vertices: Iterable[str], *, root: Path | None = None) -> list[Path]:
    """Remove the folders that dead vertices of the job have left on this machine, and return them.

    `root` is an OwnedDir's. The folder of an instance whose cache is elsewhere is not looked for.
    """
    where = read_weights_endpoint(directory)
    purposes = [of_publisher(directory), *(of_copy(vertex, directory) for vertex in vertices)]
    if where is not None:
        purposes.append(of_instance(where[1]))
    return remove_left(root or default_root(), purposes)
