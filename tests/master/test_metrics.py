"""A job's view as Prometheus text: the values are the view's, and names and labels stay as they are."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gyre.failover import JobPhase
from gyre.failover import events as e
from gyre.master.metrics import prometheus_text
from gyre.testing.fake_master import FakeMaster


def samples(master: FakeMaster) -> dict[tuple[str, tuple[str, ...]], float]:
    found = {}
    for family in text_string_to_metric_families(prometheus_text(master.view()).decode()):
        assert family.documentation
        for sample in family.samples:
            labels = {**sample.labels}
            assert labels.pop("job") == "small"
            found[(sample.name, tuple(labels[name] for name in sorted(labels)))] = sample.value
    return found


def test_a_job_that_runs() -> None:
    master = FakeMaster()
    master.start_all()
    master.record(e.StepCompleted(1, step=3, version=3, report=1))
    master.record(e.WeightsPublished(1, version=3, step=3, checksum="", size_bytes=1, report=2))
    master.progress = {"reward": 0.5, "accuracy": 0.25, "tokens_per_s": 100, "waits": {"actor": 0.75}}
    found = samples(master)
    assert found[("gyre_job_phase", ("running",))] == 1.0
    assert sum(value for (name, _), value in found.items() if name == "gyre_job_phase") == 1.0
    assert found[("gyre_vertices", ("running", "rollout"))] == 2.0
    assert found[("gyre_vertices", ("starting", "rollout"))] == 0.0
    assert found[("gyre_optimizer_step", ())] == 3.0
    assert found[("gyre_policy_version", ())] == 3.0
    assert found[("gyre_reward_mean", ())] == 0.5
    assert found[("gyre_heldout_accuracy_ratio", ())] == 0.25
    assert found[("gyre_generated_tokens_per_second", ())] == 100.0
    assert found[("gyre_wait_ratio", ("actor",))] == 0.75
    assert found[("gyre_master_epoch", ())] == 1.0
    assert found[("gyre_events_committed", ())] == master.view()["seq"]


def test_repairs_are_counted_by_role_cause_and_scope() -> None:
    master = FakeMaster()
    master.start_all()
    master.record(e.VertexLost("actor-1", 1, "stalled"))
    found = samples(master)
    assert found[("gyre_job_phase", (JobPhase.RECOVERING.value,))] == 1.0
    assert found[("gyre_vertex_restarts_total", ("actor",))] == 2.0
    assert found[("gyre_vertex_restarts_total", ("rollout",))] == 0.0
    assert found[("gyre_incidents", ("stalled", "region"))] == 1.0


def test_what_is_not_known_is_left_out() -> None:
    found = samples(FakeMaster())
    assert not any(name.startswith(("gyre_reward", "gyre_heldout", "gyre_wait")) for name, _ in found)
    assert found[("gyre_policy_version", ())] == -1.0
