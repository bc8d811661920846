"""The fluent surface: what it makes, and that every wrong value is a sentence with its path."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.api import RLJob, RLJobBuilder
from gyre.api.definition.builder import RoleBuilder
from gyre.api.definition.entrypoints import check_entrypoints, load_class
from gyre.api.demo import demo_job
from gyre.config import Entrypoint, JobSpec, parse_job
from gyre.errors import ConfigError, GraphError


class Worker:
    """A class at module level."""

    class Inner:
        """A class inside a class."""


def builder() -> RLJobBuilder:
    return RLJobBuilder().trainer("my.module", "MyTrainer").end()


def test_the_ancestors_chain() -> None:
    job = (
        RLJobBuilder()
        .node_num(3)
        .device_per_node(2)
        .device_type("CPU")
        .config({"c1": "v1"})
        .global_env({"e0": "v0"})
        .trainer("my.module", "MyTrainer")
        .actor("my.module", "MyActor")
        .total(2)
        .per_node(1)
        .env({"e1": "v1"})
        .rollout("my.module", "MyRollout")
        .total(2)
        .per_node(1)
        .reference("my.module", "MyReference")
        .total(2)
        .per_node(1)
        .build()
    )
    assert isinstance(job, RLJob)
    spec = job.spec
    assert (spec.node_num, spec.device_per_node, spec.device_type) == (3, 2, "CPU")
    assert (spec.config, spec.env) == ({"c1": "v1"}, {"e0": "v0"})
    assert list(spec.roles) == ["trainer", "actor", "rollout", "reference"]
    assert spec.roles["actor"].env == {"e1": "v1"}
    assert [role.total for role in spec.roles.values()] == [1, 2, 2, 2]
    assert repr(job) == "RLJob('job': trainer 1, actor 2, rollout 2, reference 2)"
    assert len(job.plan().graph) == 7


def test_everything_that_a_builder_can_say(tmp_path: Path) -> None:
    job = (
        RLJobBuilder()
        .name("mine")
        .tags("ablation", "lr")
        .notes("why")
        .recipe("grpo")
        .device_type("gpu")
        .node_num(4)
        .max_staleness(2)
        .run(steps=5, prompts_per_step=8, groups_per_firing=4, groups_per_micro_batch=8)
        .failover(vertex={"max": 3, "window_s": 60}, orphan_timeout_s=30)
        .store("sqlite:///x.db")
        .python_path(tmp_path)
        .actor()
        .total(2)
        .resources(cpu=2, memory="8GiB", accelerator=1)
        .setup_timeout(900)
        .rollout()
        .total(2)
        .elastic(1, 4)
        .stall_timeout(60)
        .rollout(pool="spot", price_per_hour=1.2, engine_args=["--tp", "2"])
        .resources(labels={"market-type": "spot"})
        .elastic(0, 8)
        .reward()
        .end()
        .role("verifier", "my.module:Verifier")
        .gang()
        .connect("rollout.generate", "verifier.check")
        .separate("actor", "rollout")
        .spread("verifier")
        .pack("actor")
        .build()
    )
    spec = job.spec
    assert (spec.name, spec.recipe, spec.device_type, spec.max_staleness) == ("mine", "grpo", "GPU", 2)
    assert (spec.tags, spec.notes) == (["ablation", "lr"], "why")
    assert spec.run.steps == 5
    assert (spec.failover.vertex.max, spec.failover.orphan_timeout_s) == (3, 30)
    assert spec.store.url == "sqlite:///x.db"
    spot = spec.roles["rollout_spot"]
    assert spot.pool is not None
    assert (spot.pool.price_per_hour, spot.pool.engine_args) == (1.2, ["--tp", "2"])
    assert spec.roles["rollout"].pool is None
    assert str(tmp_path.resolve()) in spec.python_path
    actor = spec.roles["actor"]
    assert (actor.resources.cpu, actor.resources.memory_bytes) == (2, 8 * 2**30)
    assert (actor.setup_timeout_s, spec.roles["rollout"].stall_timeout_s) == (900, 60)
    assert spec.roles["verifier"].gang
    assert spec.affinity.separate == [["actor", "rollout"]]
    assert (spec.affinity.spread, spec.affinity.pack) == (["verifier"], ["actor"])
    assert parse_job(spec.model_dump(mode="json")) == spec


def test_collocation_on_a_host_keeps_devices_and_sub_graphs_apart() -> None:
    made = builder().actor("m", "A").rollout("m", "R").with_host_collocation("actor", "rollout")
    assert made.build().spec.affinity.collocate_hosts == [["actor", "rollout"]]
    plan = made.plan().plan
    assert plan.placements["actor-0"].node == plan.placements["rollout-0"].node
    assert plan.placements["actor-0"].devices != plan.placements["rollout-0"].devices
    assert [sub.bundles[0].beside for sub in plan.sub_graphs[1:]] == ["actor&rollout-0"] * 2


@pytest.mark.parametrize("order", ["before", "after"])
def test_collocation_of_all_leaves_the_trainer_out_whenever_it_is_said(order: str) -> None:
    made = builder()
    if order == "before":
        made.with_collocation_all("reward")
    made.actor("m", "A").rollout("m", "R").reward("m", "W")
    if order == "after":
        made.with_collocation_all("reward")
    assert made.build().spec.affinity.collocate == [["actor", "rollout"]]
    assert len(made.plan().plan.sub_graphs) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("pkg.mod", "Cls"), "pkg.mod:Cls"),
        (("pkg.mod", "Outer.Inner"), "pkg.mod:Outer.Inner"),
        (("pkg.mod.Cls",), "pkg.mod:Cls"),
        (("pkg.mod:Cls",), "pkg.mod:Cls"),
        (("pkg.mod:Outer.Inner",), "pkg.mod:Outer.Inner"),
        ((Worker,), f"{__name__}:Worker"),
        ((Worker.Inner,), f"{__name__}:Worker.Inner"),
        ((Entrypoint(module="a", name="B"),), "a:B"),
    ],
)
def test_ways_to_name_a_class(given: tuple[Any, ...], expected: str) -> None:
    job = builder().actor(*given).build()
    assert str(job.spec.roles["actor"].entrypoint) == expected


def test_folder_of_a_class_goes_on_the_python_path() -> None:
    assert str(Path(__file__).resolve().parents[2]) in builder().actor(Worker).build().spec.python_path
    assert builder().actor("json.decoder", "JSONDecoder").build().spec.python_path == []
    assert builder().actor("pydantic", "BaseModel").build().spec.python_path == []


def test_what_was_built_stays_as_it_was() -> None:
    made = builder()
    made.actor("m", "A").total(2)
    job = made.build()
    made.node_num(5).rollout("m", "R")
    assert list(job.spec.roles) == ["trainer", "actor"]
    assert job.spec.node_num is None


def test_config_may_be_omegaconf_a_namespace_or_a_file(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    file = tmp_path / "config.yaml"
    file.write_text("lr: 0.1\nmodel: {size: 3}\n")
    expected = {"lr": 0.1, "model": {"size": 3}}
    for given in (
        expected,
        OmegaConf.create({"lr": 0.1, "model": {"size": "${three}"}, "three": 3}),
        types.SimpleNamespace(lr=0.1, model={"size": 3}),
        file,
        str(file),
    ):
        config = builder().actor("m", "A").config(given).build().spec.config
        config.pop("three", None)
        assert config == expected


MISTAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "total": (
        lambda: builder().rollout("m", "R").total(0),
        ["roles.rollout.total: 0", "greater than or equal to 1"],
    ),
    "total is text": (
        lambda: builder().rollout("m", "R").total("x"),
        ["roles.rollout.total: 'x'", "integer"],
    ),  # type: ignore[arg-type]
    "per_node": (lambda: builder().rollout("m", "R").per_node(-1), ["roles.rollout.per_node: -1"]),
    "env": (lambda: builder().rollout("m", "R").env({"A": 1}), ["roles.rollout.env.A: 1", "valid string"]),  # type: ignore[dict-item]
    "cpu": (lambda: builder().rollout("m", "R").resources(cpu=-1), ["roles.rollout.resources.cpu: -1"]),
    "memory": (
        lambda: builder().rollout("m", "R").resources(memory="8 apples"),
        ["roles.rollout.resources.memory_bytes: '8 apples'", '"8GiB"'],
    ),
    "memory in megabytes": (
        lambda: builder().rollout("m", "R").resources(memory=8192),
        ["roles.rollout.resources.memory: 8192 given, expected bytes", '"8192MiB"'],
    ),
    "elastic": (lambda: builder().rollout("m", "R").elastic(-1, 2), ["roles.rollout.elastic.min: -1"]),
    "a pool's key": (
        lambda: builder().rollout(pool="spot", prise_per_hour=1),
        ["roles.rollout_spot.pool.prise_per_hour: unknown key", "price_per_hour"],
    ),
    "a pool's price": (
        lambda: builder().rollout(pool="spot", price_per_hour=-1),
        ["roles.rollout_spot.pool.price_per_hour: -1"],
    ),
    "a pool's name": (
        lambda: builder().rollout(pool="Spot!"),
        ["roles.rollout_Spot!", "at most 32 lower-case"],
    ),
    "stall timeout": (
        lambda: builder().rollout("m", "R").stall_timeout(0),
        ["roles.rollout.stall_timeout_s: 0"],
    ),
    "role twice": (lambda: builder().actor("m", "A").actor("m", "A"), ["roles.actor: is declared twice"]),
    "role's name": (
        lambda: builder().role("Bad-Name", "m", "A"),
        ["roles.Bad-Name: 'Bad-Name'", "at most 32 lower-case"],
    ),
    "role without a name": (lambda: builder().role(3), ["roles: 3 given"]),  # type: ignore[arg-type]
    "module alone": (
        lambda: builder().actor("m"),
        ["roles.actor.entrypoint: 'm' given", '"package.module:Class"'],
    ),
    "not a module": (lambda: builder().actor("a b", "C"), ["roles.actor.entrypoint: 'a b', 'C' given"]),
    "not a class": (lambda: builder().actor(3), ["roles.actor.entrypoint: 3 given"]),
    "class and name": (
        lambda: builder().actor(Worker, "W"),
        ["roles.actor.entrypoint: a class and 'W' given"],
    ),
    "name alone": (lambda: builder().actor(None, "W"), ["roles.actor.entrypoint: None, 'W' given"]),
    "nodes": (lambda: RLJobBuilder().node_num(0), ["node_num: 0"]),
    "devices": (lambda: RLJobBuilder().device_per_node("many"), ["device_per_node: 'many'"]),  # type: ignore[arg-type]
    "device type": (lambda: RLJobBuilder().device_type("tpu"), ["device_type: 'TPU'", "'CPU' or 'GPU'"]),
    "name": (lambda: RLJobBuilder().name("a job"), ["name: 'a job'"]),
    "config": (lambda: RLJobBuilder().config(3), ["config: 3 (int) given, expected a mapping"]),
    "config with objects": (lambda: RLJobBuilder().config({"f": print}), ["config: ", "must be plain data"]),
    "config file": (lambda: RLJobBuilder().config("no/such.yaml"), ["no/such.yaml: cannot be read"]),
    "recipe": (lambda: RLJobBuilder().recipe("grop"), ["recipe: 'grop'", "did you mean 'grpo'?"]),
    "recipe is no text": (lambda: RLJobBuilder().recipe(3), ["recipe: 3"]),  # type: ignore[arg-type]
    "staleness": (lambda: RLJobBuilder().max_staleness(-1), ["max_staleness: -1"]),
    "run key": (lambda: RLJobBuilder().run(stepz=3), ["run.stepz: unknown key; did you mean 'steps'?"]),
    "run value": (lambda: RLJobBuilder().run(steps=0), ["run.steps: 0"]),
    "failover key": (lambda: RLJobBuilder().failover(vertx=3), ["failover.vertx: unknown key", "'vertex'"]),
    "failover value": (
        lambda: RLJobBuilder().failover(vertex={"max": 1}),
        ["failover.vertex.window_s: is missing"],
    ),
    "store": (lambda: RLJobBuilder().store(3), ["store.url: 3"]),  # type: ignore[arg-type]
    "python path": (
        lambda: RLJobBuilder().python_path("/no/such"),
        ["python_path: '/no/such' is not a folder"],
    ),
    "python path's type": (lambda: RLJobBuilder().python_path(3), ["python_path: 3 given"]),  # type: ignore[arg-type]
    "edge kind": (
        lambda: RLJobBuilder().connect("a", "b", "sample"),
        ["edges.0.kind: 'sample'", "'samples'"],
    ),
    "edge delay": (lambda: RLJobBuilder().connect("a", "b", delay=-1), ["edges.0.delay: -1"]),
    "collocation of one": (
        lambda: RLJobBuilder().with_collocation("actor"),
        ["affinity.collocate.0: ['actor'] given"],
    ),
    "host collocation of one": (
        lambda: RLJobBuilder().with_host_collocation("actor"),
        ["affinity.collocate_hosts.0: ['actor'] given"],
    ),
    "host collocation of those that share devices": (
        lambda: (
            builder()
            .actor("m", "A")
            .rollout("m", "R")
            .with_collocation_all()
            .with_host_collocation("actor", "rollout")
            .build()
        ),
        ["affinity.collocate_hosts.0: 'actor' and 'rollout' share their devices"],
    ),
    "separate's name": (lambda: RLJobBuilder().separate("a", "B!"), ["affinity.separate.0.1: 'B!'"]),
    "spread's name": (lambda: RLJobBuilder().spread("B!"), ["affinity.spread.0: 'B!'"]),
    "excluded role": (
        lambda: builder().actor("m", "A").rollout("m", "R").with_collocation_all("actr").build(),
        ["affinity.collocate: 'actr' is excluded but is not a role", "'actor'"],
    ),
    "whole job": (
        lambda: builder().node_num(1).device_per_node(8).actor("m", "A").total(9).build(),
        ["required 9 devices", "available 8"],
    ),
    "collocated unknown": (
        lambda: builder().actor("m", "A").with_collocation("actor", "rollout").build(),
        ["affinity.collocate.0: 'rollout' is not a role"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_value_is_a_sentence(mistake: str) -> None:
    make, parts = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        make()
    for part in parts:
        assert part in str(raised.value)


def test_plan_and_submit_check_the_whole_job_too() -> None:
    made = builder().node_num(1).device_per_node(8).actor("m", "A").total(9)
    for check in (made.plan, made.submit):
        with pytest.raises(GraphError, match="required 9 devices"):
            check()


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'rollout'"):
        RLJobBuilder().rolout  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'total'"):
        builder().actor("m", "A").totl  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'node_num'"):
        builder().actor("m", "A").node_nm  # noqa: B018
    with pytest.raises(AttributeError, match="belongs to a role"):
        RLJobBuilder().total  # noqa: B018


def test_class_inside_a_function_cannot_be_a_workload() -> None:
    class Local:
        pass

    with pytest.raises(ConfigError, match="Move the class to the module's top level"):
        builder().actor(Local)


def run(code: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], input=code, capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SCRIPT = """
from gyre.api import RLJobBuilder
from gyre.errors import ConfigError
class T:
    pass
try:
    spec = RLJobBuilder().trainer(T).build().spec
    print(spec.roles["trainer"].entrypoint.model_dump(), spec.python_path)
except ConfigError as error:
    print(error)
"""


def test_class_of_a_script_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    file = (tmp_path / "train.py").resolve()
    assert run("", "train.py", cwd=tmp_path) == (
        f"{{'module': '__main__', 'name': 'T', 'file': '{file}'}} ['{file.parent}']"
    )


def test_class_of_a_module_run_with_m_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(SCRIPT)
    assert run("", "-m", "pkg.train", cwd=tmp_path) == (
        f"{{'module': 'pkg.train', 'name': 'T', 'file': None}} ['{tmp_path.resolve()}']"
    )


def test_class_of_a_session_is_refused(tmp_path: Path) -> None:
    assert "interactive session" in run(SCRIPT, "-", cwd=tmp_path)


def test_import_of_the_api_is_cheap() -> None:
    code = "import sys, gyre.api; print([m for m in ('pydantic', 'ray', 'torch', 'fastapi') if m in sys.modules])"
    assert run("", "-c", code, cwd=Path.cwd()) == "[]"
    code = (
        "import sys; from gyre.api import RLJobBuilder; "
        "print([m for m in ('ray', 'torch', 'fastapi') if m in sys.modules])"
    )
    assert run("", "-c", code, cwd=Path.cwd()) == "[]"


def test_unknown_export_is_an_attribute_error() -> None:
    import gyre.api

    with pytest.raises(AttributeError, match="no attribute 'RLJobBuildr'"):
        gyre.api.RLJobBuildr  # noqa: B018


def test_every_method_returns_a_builder() -> None:
    made = builder()
    assert isinstance(made.actor("m", "A"), RoleBuilder)
    assert isinstance(made.rollout("m", "A").total(1), RoleBuilder)
    assert made.reward("m", "A").end() is made


# -- entrypoints at submit --------------------------------------------------------------------------

WORKERS = """
class Trainer:
    def fit(self): ...
class Lazy:
    pass
class Actor:
    def accumulate(self): ...
class Reward:
    def score(self): ...
class Rollout:
    def generate(self): ...
    def evaluate(self): ...
function = len
from gyre.workloads.base import BaseTrainer
class Unfinished(BaseTrainer):
    pass
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"workers_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(WORKERS)
    (tmp_path / "broken_workers.py").write_text("import no_such_library\n")
    (tmp_path / "leaving_workers.py").write_text("raise SystemExit(3)\n")
    for module in (name, "broken_workers", "leaving_workers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def spec_with(folder: Path, trainer: str, **roles: str) -> JobSpec:
    given = {"trainer": trainer, **roles}
    return parse_job(
        {"roles": {name: {"entrypoint": text} for name, text in given.items()}, "python_path": [str(folder)]}
    )


def test_classes_are_imported_at_submit(workers: str, tmp_path: Path) -> None:
    path = list(sys.path)
    classes = check_entrypoints(spec_with(tmp_path, f"{workers}:Trainer", actor=f"{workers}:Lazy"))
    assert {role: cls.__name__ for role, cls in classes.items()} == {"trainer": "Trainer", "actor": "Lazy"}
    assert sys.path == path


@pytest.mark.parametrize(
    ("role", "text", "parts"),
    [
        (
            "trainer",
            "no.such.module:X",
            ["roles.trainer.entrypoint: module no.such.module does not import", "python_path"],
        ),
        ("actor", "broken_workers:X", ["roles.actor.entrypoint", "No module named 'no_such_library'"]),
        ("actor", "leaving_workers:X", ["SystemExit: 3"]),
        ("actor", "{workers}:Lzy", ["has no 'Lzy'; did you mean 'Lazy'?"]),
        ("actor", "{workers}:function", ["is a builtin_function_or_method, expected a class"]),
        ("trainer", "{workers}:Lazy", ["roles.trainer.entrypoint", "has no fit(), which its role needs"]),
        ("trainer", "{workers}:Unfinished", ["has no fit()"]),
    ],
)
def test_class_that_is_not_there_is_a_sentence(
    role: str, text: str, parts: list[str], workers: str, tmp_path: Path
) -> None:
    given = {"trainer": f"{workers}:Trainer", "actor": f"{workers}:Lazy", role: text.format(workers=workers)}
    with pytest.raises(ConfigError) as raised:
        check_entrypoints(spec_with(tmp_path, **given))
    for part in parts:
        assert part in str(raised.value)


def test_class_without_the_recipes_operators_is_a_sentence(workers: str, tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path,
        f"{workers}:Trainer",
        actor=f"{workers}:Actor",
        rollout=f"{workers}:Rollout",
        reward=f"{workers}:Reward",
    )
    spec.recipe = "grpo"
    with pytest.raises(
        ConfigError, match=r"roles.actor.entrypoint: .*:Actor has no apply\(\), which recipe 'grpo' calls"
    ):
        check_entrypoints(spec)


def test_a_submission_does_not_import_torch_for_classes_of_gyre_s_own() -> None:
    code = (
        "import sys; from gyre.api.demo import demo_job; from gyre.api.definition.entrypoints import *\n"
        "check_entrypoints(demo_job().spec, own=False); print([m for m in ('ray', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done


@pytest.mark.parametrize(
    ("actor", "said"), [("actor:TorchActr", "did you mean 'TorchActor'"), ("critic:TorchCritic", "has no")]
)
def test_a_class_of_gyre_s_own_that_is_not_there_or_of_another_role_is_a_sentence(
    actor: str, said: str
) -> None:
    job = demo_job().spec.model_dump(mode="json")
    job["roles"]["actor"]["entrypoint"] = f"gyre.workloads.torch.{actor}"
    with pytest.raises(ConfigError, match=said):
        check_entrypoints(parse_job(job), own=False)


@pytest.mark.parametrize(
    ("rollout", "missing"),
    [
        ("tests.workloads.toy_policy:ToyRollout", []),
        ("gyre.workloads.rollout_vertices:RolloutInstance", ["publish_model"]),
    ],
    ids=["own rollouts", "rollout plane"],
)
def test_an_actor_for_the_built_in_trainer_has_all_of_its_protocol(rollout: str, missing: list[str]) -> None:
    """Also what no operator of the graph is: without it the job would fail at its first checkpoint."""
    from tests.workloads.toy_policy import toy_spec

    roles = {"rollout": {"entrypoint": rollout, "total": 2}}
    if missing:
        with pytest.raises(ConfigError, match="ToyActor has no publish_model") as raised:
            check_entrypoints(parse_job(toy_spec(roles=roles)))
        assert raised.value.details["missing"] == missing
        assert "gyre.workloads.protocols" in str(raised.value)
    else:
        check_entrypoints(parse_job(toy_spec(roles=roles)))
    roles["actor"] = {"entrypoint": "gyre.workloads:BaseWorkload"}
    with pytest.raises(ConfigError, match=r"has no accumulate\(\)") as raised:
        check_entrypoints(parse_job(toy_spec(roles=roles)))
    wanted = {
        "warm_start",
        "begin",
        "accumulate",
        "apply",
        "state",
        "export_weights",
        "checkpoint",
        "restore",
    }
    assert set(raised.value.details["missing"]) == wanted | set(missing), (
        "a base's hook that does nothing counts"
    )


def test_class_of_a_file_is_loaded_from_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass W:\n    x: int = 3\n"
    )
    entrypoint = Entrypoint.parse(f"{tmp_path}/script.py:W")
    assert load_class(entrypoint)().x == 3
    again = builder().actor(load_class(entrypoint)).build().spec.roles["actor"].entrypoint
    assert again is not None
    assert again.file == str((tmp_path / "script.py").resolve())


def dropping(age: object) -> object:
    """A staleness function of the user's."""
    return age


def asynchronous(**run: object) -> RLJobBuilder:
    job = RLJobBuilder().recipe("grpo").run(micro_batches="streamed", **run)
    return job.actor().rollout().reward().end()


def test_staleness_is_a_policy_by_name_or_a_function():
    job = asynchronous().max_staleness(4).staleness("drop", ahead=1, dropped="replace").build()
    assert job.spec.staleness.model_dump() == {"policy": "drop", "ahead": 1, "dropped": "replace"}
    weights = next(edge for edge in job.plan().dcg.edges if edge.target == "rollout.generate" and edge.delay)
    assert (weights.produce, weights.consume, weights.delay) == (64, 1, 2)
    assert (
        asynchronous().max_staleness(1).staleness(dropping).build().spec.staleness.policy
        == f"{__name__}:dropping"
    )


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        ("dorp", {}, "staleness.policy"),
        (lambda age: age, {}, "staleness.policy"),
        ("drop", {"dropped": "never"}, "staleness.dropped"),
        ("drop", {"ahead": -1}, "staleness.ahead"),
    ],
)
def test_staleness_that_is_none_is_refused_at_once(policy, more, message):
    with pytest.raises(ConfigError, match=message):
        RLJobBuilder().staleness(policy, **more)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda job: job.staleness("drop", ahead=2), "2 steps ahead, but max_staleness is 1"),
        (
            lambda job: job.staleness("in_order", ahead=0),
            "in order generation runs max_staleness \\(1\\) steps ahead",
        ),
        (
            lambda job: job.staleness("wait").run(micro_batches="fixed"),
            "whole first, but run.micro_batches is 'fixed'",
        ),
        (lambda job: job.run(min_samples_per_micro_batch=9, max_samples_per_micro_batch=8), "8 is less than"),
    ],
)
def test_a_job_whose_steps_contradict_each_other_is_refused(build, message):
    with pytest.raises(GraphError, match=message):
        build(asynchronous().max_staleness(1)).build()
