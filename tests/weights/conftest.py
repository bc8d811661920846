"""Peers of the weight plane, closed at the end of each test."""

from __future__ import annotations

import pytest
import torch

from tests.machine import memory_folder
from tests.weights.plane import WeightPeer


@pytest.fixture
def folder():
    with memory_folder("weights") as path:
        yield path


@pytest.fixture
def peer(folder):
    made: list[WeightPeer] = []

    def make(name: str = "", **options) -> WeightPeer:
        made.append(WeightPeer(folder / (name or f"peer-{len(made)}"), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
