"""The trainer's ledger waits for a lost store as long as its binding says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gyre.workloads.trainer import loop


class Opened(Exception):
    pass


def test_the_trainers_ledger_waits_as_its_binding_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def at(*args: Any, **options: Any) -> Any:
        given.append((args, options))
        raise Opened

    monkeypatch.setattr(loop.SampleLedger, "at", at)
    trainer = loop.GraphTrainer.__new__(loop.GraphTrainer)
    binding = SimpleNamespace(store_url="sqlite:////s/gyre.db", job_id="j1", store_hold_s=7.0)
    runtime: Any = SimpleNamespace(binding=binding, term=3)
    trainer.runtime = runtime
    with pytest.raises(Opened):
        trainer.fit()
    assert given == [(("sqlite:////s/gyre.db", "j1", 3), {"hold_s": 7.0})]
