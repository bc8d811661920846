"""A job's view as Prometheus text: the values are the view's, and names and labels stay as they are."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from gyre.failover import JobPhase
from gyre.master.metrics import prometheus_text
from gyre.rollouts.plane.session_lengths import SessionLengths
from gyre.rollouts.plane.session_tree import LedgerSession
from tests.doubles.standing_job import StandingJob


def samples(job: StandingJob) -> dict[tuple[str, tuple[str, ...]], float]:
    found = {}
    for family in text_string_to_metric_families(job.master.metrics().decode()):
        assert family.documentation
        for sample in family.samples:
            labels = {**sample.labels}
            assert labels.pop("job") == "small"
            found[(sample.name, tuple(labels[name] for name in sorted(labels)))] = sample.value
    return found


def test_a_job_that_runs() -> None:
    with StandingJob(step_s=1.0) as job:
        told = {
            "reward": 0.5,
            "accuracy": 0.25,
            "tokens_per_s": 100,
            "waits": {"actor": 0.75},
            "times": {"actor": {"training": 0.25}},
        }
        job.do(job.world.say, "trainer-0", told)
        seq = job.run_until(lambda view: view["job"]["version"] == 3)["seq"]
        found = samples(job)
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
    assert found[("gyre_time_ratio", ("training", "actor"))] == 0.25
    assert found[("gyre_master_epoch", ())] == 1.0
    assert found[("gyre_events_committed", ())] == seq


def test_repairs_are_counted_by_role_cause_and_scope() -> None:
    with StandingJob() as job:
        job.do(job.world.kill, "actor-1")
        job.run_until(lambda view: view["incidents"])
        found = samples(job)
    assert found[("gyre_job_phase", (JobPhase.RECOVERING.value,))] == 1.0
    assert found[("gyre_vertex_restarts_total", ("actor",))] == 2.0
    assert found[("gyre_vertex_restarts_total", ("rollout",))] == 0.0
    assert found[("gyre_incidents", ("process_died", "region"))] == 1.0


def test_what_a_key_has_a_fleet_hold_is_told_by_key() -> None:
    with StandingJob() as job:
        view = job.view()
    health = {"door": {"key_bytes": {"lab": 4096, "other": 17, "strange": "x"}}}
    manager = {**view["vertices"][0], "role": "rollout_manager", "fields": {"health": health}}
    text = prometheus_text({**view, "vertices": [*view["vertices"], manager]}, now=0.0).decode()
    assert 'gyre_door_key_bytes{job="small",key="lab"} 4096.0' in text
    assert 'gyre_door_key_bytes{job="small",key="other"} 17.0' in text
    assert "strange" not in text


def test_the_lengths_of_sessions_that_are_trained_are_told_beside_all_that_were_drawn() -> None:
    """As the rollout manager's status has them; nothing where no group began with more than are trained."""

    def sessions(id: str, drawn: int) -> LedgerSession:
        session = LedgerSession(id, "train", 0, 0, 0, given_at=1.0)
        sample = SimpleNamespace(length=drawn)
        session.turns = [SimpleNamespace(sample=sample)]  # type: ignore[list-item]
        return session

    lengths = SessionLengths()
    with StandingJob() as job:
        view = job.view()

    def text() -> str:
        told = {"waiting": 0, "oversampled": lengths.told()}
        manager = {**view["vertices"][0], "role": "rollout_manager", "fields": {"health": {"sessions": told}}}
        return prometheus_text({**view, "vertices": [*view["vertices"], manager]}, now=0.0).decode()

    assert "gyre_session_tokens" not in text()
    lengths.completed([sessions("a", 10), sessions("b", 20)], [sessions("c", 60)], 5.0)
    found = text()
    for key, of, value in (
        ("gyre_oversampled_sessions_total", "trained", 2.0),
        ("gyre_oversampled_sessions_total", "drawn", 3.0),
        ("gyre_session_tokens", "trained", 15.0),
        ("gyre_session_tokens", "drawn", 30.0),
        ("gyre_session_seconds", "trained", 4.0),
        ("gyre_session_seconds", "drawn", 4.0),
    ):
        assert f'{key}{{job="small",of="{of}"}} {value}' in found


def test_what_is_not_known_is_left_out() -> None:
    with StandingJob() as job:
        found = samples(job)
    assert not any(name.startswith(("gyre_reward", "gyre_heldout", "gyre_wait")) for name, _ in found)
    assert found[("gyre_policy_version", ())] == -1.0


def test_what_the_reward_is_made_of_has_a_label_of_its_own() -> None:
    with StandingJob() as job:
        view = job.view()
    view["training"]["last"] = {
        "step": 3,
        "reward.acc": 0.25,
        "reward.format.x": 2,
        "reward.text": "no number",
    }
    view["evaluations"] = {
        "aime": [{"components": {"reward.acc": 0.1}}, {"components": {"reward.acc": 0.5}}],
        "math": [{"components": {}}],
    }
    text = prometheus_text(view, now=0.0).decode()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    told = {one.labels["component"]: one.value for one in found if one.name == "gyre_reward_component"}
    assert told == {"acc": 0.25, "format.x": 2.0}
    held_out = [one for one in found if one.name == "gyre_heldout_reward_component"]
    assert [(one.labels["set"], one.labels["component"], one.value) for one in held_out] == [
        ("aime", "acc", 0.5)
    ]
