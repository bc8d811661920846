"""A fake master, and an app over it, for every test of the surfaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import httpx
import pytest
from fastapi import FastAPI

from gyre.api.rest import create_app
from gyre.testing.fake_master import FakeMaster

with warnings.catch_warnings():
    # Starlette's test client has begun to ask for a fork of httpx; it works with either.
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

Connect = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def master() -> FakeMaster:
    fake = FakeMaster()
    fake.start_all()
    return fake


@pytest.fixture
def connect() -> Connect:
    """Makes a client of an app in this process, without a socket."""

    def to(app: FastAPI, base_url: str = "http://127.0.0.1") -> AbstractContextManager[httpx.Client]:
        return TestClient(app, base_url=base_url, raise_server_exceptions=False)

    return to


@pytest.fixture
def http(master: FakeMaster, connect: Connect) -> Iterator[httpx.Client]:
    with connect(create_app(master, token=None)) as client:
        yield client
