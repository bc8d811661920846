"""FSDP2's gang in a job: two ranks over Gloo train a model that only transformers computes, the embedded engine serves
each version, and a rank is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.engines.embedded.tiny_transformers import write_folder
from tests.kill.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 5


def fsdp_job(folder: Path, actor: tuple[str, ...] = (), **changes: Any) -> RLJobBuilder:
    """GRPO with sums of token ids as rewards, which differ between samples even of an untrained model."""
    builder = RLJobBuilder().node_num(1).device_per_node(8).device_type("CPU").recipe("grpo").backend("fsdp")
    builder = builder.config(
        {
            "seed": 3,
            "model_path": str(folder),
            "task": {"digits": 1},
            "sampling": {"n": 4, "max_new_tokens": 4},
            "optim": {"lr": 1e-3},
            "fsdp": {"pass_tokens": 128},
            "collective_timeout_s": 60.0,
            **changes,
        }
    )
    builder = builder.run(
        steps=STEPS,
        prompts_per_step=8,
        groups_per_firing=4,
        groups_per_micro_batch=4,
        checkpoint_every=2,
        evaluate_every=0,
    )
    builder = builder.rollouts(max_running=64, kv_tokens=4096, report_interval_s=0.1).actor(*actor).total(2)
    return builder.rollout().total(1).reward("tests.e2e.workloads", "TokenSum").end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("fsdp") / "model", "gemma3_text")


def ended(handle: JobHandle) -> dict[str, Any]:
    """The job's last view, every prompt accounted for."""
    view = handle.wait(ENDS_WITHIN_S)
    with open_store(handle.store_url) as store:
        account = account_of(store.ledger(handle.job_id))
    handle.close()
    assert view["job"]["phase"] == "succeeded"
    assert view["job"]["result"]["steps"] == STEPS
    assert (account.trained, account.lost, account.trained_twice) == (STEPS * 8, (), ())
    return view


@pytest.fixture(scope="module")
def calm(shared: Shared, folder: Path) -> dict[str, Any]:
    return ended(shared.submit(fsdp_job(folder)))


def test_a_job_on_fsdp_trains_a_folder(calm: dict[str, Any]) -> None:
    assert calm["incidents"] == []


def test_a_killed_rank_changes_no_weight(shared: Shared, folder: Path, calm: dict[str, Any]) -> None:
    """Its gang goes on from a checkpoint on the disk, and what was trained since is trained again from the ledger."""
    handle = shared.submit(fsdp_job(folder, gated=True))
    gate, faults = Gate(home(shared.home).job_directory(handle.job_id)), ProcessFaults(handle)
    gate.open_to(STEPS - 1)
    faults.reach_step(2)  # the next one is on its way
    (victim,) = faults.kill("actor-1")
    assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
    gate.open()
    view = ended(handle)
    assert view["job"]["result"]["digest"] == calm["job"]["result"]["digest"]
    assert [one["scope"] for one in view["incidents"] if one["vertex"] == "actor-1"] == ["region"]


def test_a_pass_without_memory_is_made_again_with_activations_computed_again(
    shared: Shared, folder: Path, calm: dict[str, Any]
) -> None:
    """No pass is halved, no weight differs from those of the job that kept them throughout, and the gang that comes
    after a rank was killed runs out of memory no more."""
    hungry = ("tests.e2e.fsdp_workloads", "HungryFsdpActor")
    handle = shared.submit(fsdp_job(folder, hungry, gated=True))
    gate, faults = Gate(home(shared.home).job_directory(handle.job_id)), ProcessFaults(handle)
    gate.open_to(STEPS - 1)
    faults.reach_step(3)
    (victim,) = faults.kill("actor-0")
    assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
    gate.open()
    handle.wait(ENDS_WITHIN_S)
    events = [(event["kind"], event["body"]) for event in handle.events()]
    view = ended(handle)
    assert view["job"]["result"]["digest"] == calm["job"]["result"]["digest"]
    failed = [body["code"] for kind, body in events if kind == "OperatorFailed" and body["code"]]
    assert failed == ["out_of_memory"]
    (told,) = [body for kind, body in events if kind == "PassesHalved"]
    assert (told["role"], told["pass_tokens"], told["recompute"]) == ("actor", 128, True)
    assert "Tried to allocate" in told["error"]
    assert sum(kind == "GangRestored" for kind, _ in events) == 2
