"""Every method of DLRover's builders, by the job of Gyre's that comes out."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.errors import ConfigError, GraphError
from gyre_dlrover.api.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder
from gyre_dlrover.api.builder.base import RoleBuilder
from gyre_dlrover.notes import HasNoMeaning


def spec_of(job: Any, **options: Any) -> JobSpec:
    spec: JobSpec = job.to_gyre("job", **options).spec
    return spec


def full() -> RLJob:
    builder = (
        RLJobBuilder()
        .node_num(2)
        .device_per_node(8)
        .device_type("GPU")
        .config({"k": {"deep": 1}})
        .global_env({"e0": "v0"})
        .as_task_stream()
        .trainer("m.T")
        .env({"e1": "v1"})
        .end()
        .actor("m.A")
        .total(4)
        .per_group(2)
        .resource(cpu=2, memory=1024, gpu=1, user_defined={"rdma": 1})
        .rollout("m.R")
        .total(4)
        .disable_ray_auto_visible_device()
        .reference("m.F")
        .total(4)
        .reward("m::W")
        .critic("m.C")
        .nnodes(2)
        .nproc_per_node(2)
        .with_collocation("Actor", "rollout")
    )
    job: RLJob = builder.build()
    return job


def test_an_rl_job_with_everything() -> None:
    spec = spec_of(full())
    assert (spec.name, spec.node_num, spec.device_per_node, spec.device_type) == ("job", 2, 8, "GPU")
    assert spec.env == {"JOB": "job", "e0": "v0"}
    assert spec.config["dlrover"]["user_config"] == {"k": {"deep": 1}}
    roles = spec.roles
    assert {name: (role.total, role.gang) for name, role in roles.items()} == {
        "trainer": (1, False),
        "actor": (4, True),
        "rollout": (4, False),
        "reference": (4, False),
        "reward": (1, False),
        "critic": (4, True),
    }
    assert str(roles["trainer"].entrypoint) == "gyre_dlrover.conductor:Conductor"
    assert str(roles["actor"].entrypoint) == "gyre_dlrover.worker:Worker"
    assert roles["trainer"].resources.cpu == 4
    assert roles["trainer"].env == {"ROLE": "TRAINER", "e1": "v1"}
    actor = roles["actor"].resources
    assert (actor.cpu, actor.memory_bytes, actor.custom) == (2, 1 << 30, {"rdma": 1.0})
    assert (roles["actor"].per_node, roles["critic"].per_node, roles["rollout"].per_node) == (2, 2, None)
    assert roles["rollout"].env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "true"
    assert spec.affinity.collocate == [["actor", "rollout"]]
    described = spec.config["dlrover"]["roles"]
    assert [role["workload"]["entry_point"] for role in described] == [
        "m.T",
        "m.A",
        "m.R",
        "m.F",
        "m.W",
        "m.C",
    ]
    drivers = [role["name"] for role in described if role["workload"]["is_driver"]]
    assert drivers == ["TRAINER"]


def test_what_was_built_says_it_in_dlrovers_words() -> None:
    job = full()
    assert isinstance(job, RLJob)
    assert isinstance(job, DLJob)
    assert (job.node_num, job.device_per_node, job.device_type) == (2, 8, "GPU")
    assert (job.config, job.env) == ({"k": {"deep": 1}}, {"e0": "v0"})
    assert job.collocations == [{"ACTOR", "ROLLOUT"}]
    assert (
        job.get_workload("ACTOR").resource.accelerator == job.workloads["ROLLOUT"].resource.accelerator == 0.5
    )
    assert job.workloads["ACTOR"].resource.memory == 1024


def test_three_roles_share_a_device() -> None:
    """Their shares are Gyre's, which add up to no more than a device; DLRover's leave one of the three without."""
    job = (
        RLJobBuilder()
        .device_per_node(2)
        .trainer("m.T")
        .actor("m.A")
        .total(2)
        .rollout("m.R")
        .total(2)
        .reward("m.W")
        .total(2)
        .with_collocation_all()
        .build()
    )
    assert job.collocations == [{"ACTOR", "ROLLOUT", "REWARD"}]
    assert job.to_gyre("job").plan().plan.node_num == 1


def test_elastic_training_alone() -> None:
    job = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(2)
        .device_type("CPU")
        .train("m.f")
        .nnodes(2)
        .nproc_per_node(2)
    )
    spec = spec_of(job.build())
    assert list(spec.roles) == ["trainer", "elastic"]
    assert (
        spec.roles["trainer"].resources.accelerator == 1
    )  # as any trainer's, of which the compiler takes it
    elastic = spec.roles["elastic"]
    assert (elastic.total, elastic.per_node, elastic.gang) == (4, 2, True)


@pytest.mark.parametrize(
    ("total", "per_group", "nodes", "per_node"),
    [(4, 1, 1, None), (4, 2, 2, 2), (8, 2, 1, 8), (10, 2, 3, 10), (8, 2, 3, 4), (4, 4, 4, 4)],
)
def test_groups_stay_together_on_as_few_machines_as_there_are(
    total: int, per_group: int, nodes: int, per_node: int | None
) -> None:
    job = DLJobBuilder().node_num(nodes).role("r").run("m.f").total(total).per_group(per_group).build()
    assert spec_of(job).roles["r"].per_node == per_node


@pytest.mark.parametrize(
    ("name", "build", "gyre"),
    [
        ("trainer", lambda b: b.run("m.f").resource(cpu=1), "trainer"),
        ("TRAINER", lambda b: b.run("m.f").resource(cpu=1).not_driver(), "role_trainer"),
        ("Trainer", lambda b: b.run("m.f"), "role_trainer"),
        ("trainer", lambda b: b.train("m.f").total(2), "role_trainer"),
        ("Actor-Rollout", lambda b: b.run("m.f"), "actor_rollout"),
        ("1st", lambda b: b.run("m.f"), "role_1st"),
        ("rollout_manager", lambda b: b.run("m.f"), "role_rollout_manager"),
    ],
)
def test_roles_have_names_in_gyre(name: str, build: Any, gyre: str) -> None:
    spec = spec_of(build(DLJobBuilder().role(name)).build())
    assert set(spec.roles) == {"trainer", gyre}


def test_a_role_of_none_is_left_out() -> None:
    job = DLJobBuilder().workload("a", "m.f").workload("b", "m.g").total(0).build()
    assert list(spec_of(job).roles) == ["trainer", "a"]


@pytest.mark.parametrize("config", [None, {"a": 1}, argparse.Namespace(a=1)])
def test_the_configuration_is_plain(config: Any) -> None:
    job = DLJobBuilder().config(config).workload("r", "m.f").build()
    assert job.config == ({} if config is None else {"a": 1})


def test_a_built_job_may_be_changed_until_it_is_submitted() -> None:
    job = DLJobBuilder().train("m.f").total(2).build()
    for workload in job.workloads.values():
        workload.comm_auto_setup_process_group = False
        workload.envs["X"] = "1"
    spec = spec_of(job)
    assert spec.roles["elastic"].env["X"] == "1"
    assert spec.config["dlrover"]["roles"][0]["workload"]["comm_auto_setup_process_group"] is False


def test_the_job_wide_switches_of_elastic_roles() -> None:
    with pytest.warns(HasNoMeaning, match="skip_node_check changes nothing"):
        builder = DLJobBuilder().no_setup_process_group().skip_node_check()
    workload = builder.train("m.f").build().workloads["ELASTIC"]
    assert (workload.comm_auto_setup_process_group, workload.comm_pre_check) == (False, False)


@pytest.mark.parametrize(
    ("options", "vertex", "job", "user_code"),
    [
        ({}, 0, 10, 0),
        ({"job_max_restart": 3}, 0, 3, 0),
        ({"failover_exec_strategy": 2}, 10, 10, 10),
        ({"failover_exec_strategy": 2, "job_max_restart": 1}, 10, 1, 1),
        ({"failover_exec_strategy": 0}, 0, 0, 0),
        ({"failover_trigger_strategy": 0}, 0, 0, 0),
    ],
)
def test_failover_strategies_are_budgets(
    options: dict[str, int], vertex: int, job: int, user_code: int
) -> None:
    failover = spec_of(full(), **options).failover
    assert (failover.vertex.max, failover.region.max) == (vertex, vertex)
    assert (failover.job.max, failover.user_code.max) == (job, user_code)
    assert failover.machine.max == 3


def test_a_job_that_is_one_gang_restarts_the_gang() -> None:
    job = DLJobBuilder().train("m.f").total(2).build()
    failover = spec_of(job, job_max_restart=4).failover
    assert (failover.region.max, failover.user_code.max) == (4, 4)


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_UNIFIED_JOB_NAME", "of-the-environment")
    monkeypatch.setenv("DLROVER_UNIFIED_JOB_MAX_RESTART", "7")
    monkeypatch.setenv("DLROVER_UNIFIED_WORKER_ISOLATION_SCHEDULE_RESOURCE", "WR")
    job = DLJobBuilder().train("m.f").build()
    spec = job.to_gyre().spec
    assert (spec.name, spec.failover.job.max) == ("of-the-environment", 7)
    assert spec.roles["elastic"].resources.custom == {"WR": 1.0}
    assert job.to_gyre("named").spec.name == "named"
    monkeypatch.delenv("DLROVER_UNIFIED_JOB_NAME")
    assert job.to_gyre().spec.name.startswith("dlrover-")


@pytest.mark.parametrize(
    "options",
    [
        {"master_cpu": 1},
        {"master_memory": 128},
        {"timeout": 5},
        {"master_state_backend_type": "IN_MEMORY"},
        {"node_max_restart": 1},
        {"master_max_restart": 1},
        {"master_isolation_schedule_resource": "MR"},
        {"failover_trigger_strategy": 1},
    ],
)
def test_what_has_no_meaning_is_told_where_it_is_asked_for(options: dict[str, Any]) -> None:
    job = DLJobBuilder().train("m.f").build()
    with pytest.warns(HasNoMeaning, match="changes nothing in Gyre") as told:
        job.to_gyre("job", **options)
    assert [warning.filename for warning in told] == [__file__]


def test_so_is_what_roles_ask_for() -> None:
    role = DLJobBuilder().role("r").run("m.f")
    with pytest.warns(HasNoMeaning, match="disk"):
        role.resource(cpu=1, disk=5)
    with pytest.warns(HasNoMeaning, match="sub_stage"):
        role.sub_stage([1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        role.sub_stage().env().total().per_group()


def of_roles(*names: str) -> DLJobBuilder:
    builder = DLJobBuilder()
    for name in names:
        builder.workload(name, "m.f")
    return builder


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (lambda: DLJobBuilder().build(), "workloads: the job has no role"),
        (lambda: DLJobBuilder().run("m.f"), "run: no role was named"),
        (lambda: of_roles("a", "a"), "workloads.a: is declared twice"),
        (lambda: of_roles("a").node_num(0).build(), "job.node_number: 0 given"),
        (lambda: of_roles("a").device_type("mem").build(), "job.accelerator_type: 'mem' given"),
        (lambda: of_roles("a").device_type("TPU").build(), "device_type: TPU given"),
        (lambda: of_roles("a").as_data_stream().build(), "as_data_stream"),
        (lambda: of_roles("a").config(3), "config: 3 (int) given"),
        (lambda: DLJobBuilder().workload("a", "main").build(), "workloads.a.entry_point: 'main' given"),
        (lambda: DLJobBuilder().workload("a", "m.f").total(-1).build(), "workloads.a.total: -1 given"),
        (
            lambda: DLJobBuilder().workload("a", "m.f").total(3).per_group(2).build(),
            "total 3 is not divisible by per_group 2",
        ),
        (
            lambda: DLJobBuilder().workload("a", "m.f").resource(memmory=3),
            "workloads.a.resource.memmory: unknown; did you mean 'memory'?",
        ),
        (lambda: of_roles("a", "b").with_collocation("a", "c").build(), "'c' is not defined as a role"),
        (lambda: of_roles("a", "b").with_collocation("a").build(), "expected two or more different roles"),
        (
            lambda: of_roles("a", "b", "c").with_collocation("a", "b").with_collocation("b", "c").build(),
            "b has already been assigned to a collocation",
        ),
        (lambda: RLJobBuilder().trainer("m.T").build(), "workloads.ACTOR: is missing"),
        (
            lambda: RLJobBuilder().actor("m.A").workload("other", "m.O").build(),
            "workloads.other: is no role of an RL job",
        ),
        (lambda: of_roles("a-b", "a_b").build().to_gyre("j"), "workloads.a_b: is 'a_b' in Gyre, as a-b is"),
        (
            lambda: DLJobBuilder().workload("a", "__main__.f").build().to_gyre("j"),
            "is of the script that submits",
        ),
        (lambda: of_roles("a").build().to_gyre("j", jobs_max_restart=1), "did you mean 'job_max_restart'?"),
        (lambda: of_roles("a").build().to_gyre("j", job_max_restart=-1), "job_max_restart: -1 given"),
    ],
)
def test_mistakes_are_sentences(described: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        described()
    assert said in str(raised.value)


def test_what_does_not_fit_is_refused_by_the_plan() -> None:
    """DLRover takes 64 devices on one machine of two for granted."""
    job = DLJobBuilder().node_num(1).device_per_node(2).workload("a", "m.f").total(64).build()
    with pytest.raises(GraphError, match="64"):
        job.to_gyre("job").plan()


def test_a_role_builder_of_ones_own() -> None:
    builder = DLJobBuilder()
    role = builder.role("mine").run("m.f")
    assert isinstance(role, RoleBuilder)
    other = DLJobBuilder()
    other.add_role_builder("mine", role)
    assert list(other.build().workloads) == ["mine"]
