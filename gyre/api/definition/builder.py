"""The fluent surface: a job, role by role.

    job = (
        RLJobBuilder()
        .node_num(3).device_per_node(2).device_type("GPU")
        .trainer("my.module", "MyTrainer")
        .actor("my.module", "MyActor").total(2).per_node(1)
        .rollout("my.module", "MyRollout").total(2).per_node(1)
        .build()
    )

Invariants:
- *early sentences*: a wrong value raises ConfigError at the call that gave it, naming its path in the job. What only
  the whole job can show (a node over-subscribed, a cycle without delay) is raised by `build`, `plan` and `submit`;
- *names only*: classes are named, not imported, so that a job can be planned where the user's code is not;
- *each build is its own*: what `build` returned does not change when the builder is used further.

This module must not import Ray: building and planning need no cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from gyre.api.definition.entrypoints import entrypoint_of, import_roots
from gyre.api.definition.rl_job import RLJob
from gyre.api.definition.source import PLACE, JobSource, Place, users_line
from gyre.config import (
    AGENT_ROLE,
    TRAINER,
    EdgeSpec,
    Elastic,
    Entrypoint,
    FailoverSpec,
    JobSpec,
    ObserveSpec,
    PoolSpec,
    RoleSpec,
    RolloutsSpec,
    RunSpec,
    StalenessSpec,
    WeightsSpec,
    config_error,
    plain_config,
)
from gyre.config.job_plugins import plugins_of
from gyre.config.parse import with_home
from gyre.errors import ConfigError, nearest
from gyre.graph.compile import CompiledJob
from gyre.graph.recipes import check_recipe_name
from gyre.graph.rollout_roles import ROLLOUT, pool_role

if TYPE_CHECKING:
    from gyre.api.handle import JobHandle

_SMALLEST_MEMORY = 2**20
_THESE = ("gyre.api.definition", "contextlib")


class RLJobBuilder:
    """Collects a `JobSpec`. Every method but `build`, `plan` and `submit` returns a builder to go on with."""

    def __init__(self) -> None:
        self._spec = JobSpec()
        self._collocate_all_but: tuple[str, ...] | None = None
        self._lines: dict[str, Place] = {}
        """By key of the job, where it was given."""

    # -- the job ------------------------------------------------------------------------------------

    def name(self, name: str) -> RLJobBuilder:
        return self._set("name", name)

    def tags(self, *tags: str) -> RLJobBuilder:
        """What to find and group the job by in a list of jobs."""
        return self._set("tags", list(tags))

    def notes(self, text: str) -> RLJobBuilder:
        """What the job is for, in words."""
        return self._set("notes", text)

    def node_num(self, count: int) -> RLJobBuilder:
        return self._set("node_num", count)

    def device_per_node(self, count: int) -> RLJobBuilder:
        return self._set("device_per_node", count)

    def device_memory_gib(self, size: float) -> RLJobBuilder:
        """Memory of each device, by which `plan` judges whether the job fits."""
        return self._set("device_memory_gib", size)

    def device_price_per_hour(self, price: float) -> RLJobBuilder:
        """What one device costs an hour, in a currency of your own."""
        return self._set("device_price_per_hour", price)

    def device_type(self, kind: str) -> RLJobBuilder:
        """`"CPU"` or `"GPU"`, in any case."""
        return self._set("device_type", kind)

    def config(self, config: Any) -> RLJobBuilder:
        """The user's own configuration: a mapping, an OmegaConf object, a namespace, or a path to YAML."""
        return self._set("config", plain_config(config))

    def global_env(self, env: dict[str, str]) -> RLJobBuilder:
        """Environment variables of every vertex."""
        return self._set("env", env)

    def recipe(self, name: str) -> RLJobBuilder:
        """Run a built-in graph, such as `"grpo"`, or one of your own, `"module:RECIPE"`; its roles' classes have
        defaults."""
        if isinstance(name, str):
            check_recipe_name(name)
        return self._set("recipe", name)

    def backend(self, name: str) -> RLJobBuilder:
        """Whose classes fill the roles actor, critic and reference: `"torch"`, `"megatron"`, `"fsdp"`, or one of your
        own, `"module:BACKEND"`."""
        return self._set("backend", name)

    def max_staleness(self, versions: int) -> RLJobBuilder:
        """How many policy versions a trained token may be behind."""
        return self._set("max_staleness", versions)

    def staleness(
        self,
        policy: str | Callable[[Any], Any],
        *,
        ahead: int | None = None,
        dropped: str | None = None,
    ) -> RLJobBuilder:
        """`"in_order"`, or fully asynchronous: `"wait"`, `"drop"`, or a function of one's own, as itself or as
        `"module:function"`; see `StalenessSpec`. What is not given stays."""
        self._mark("staleness")
        with _mistakes_at("staleness.", StalenessSpec):
            self._spec.staleness.policy = policy  # type: ignore[assignment]  # the validator reads functions
            if ahead is not None:
                self._spec.staleness.ahead = ahead
            if dropped is not None:
                self._spec.staleness.dropped = dropped  # type: ignore[assignment]  # checked by the model
        return self

    def run(self, **fields: Any) -> RLJobBuilder:
        """Fields of `RunSpec`: `steps`, `prompts_per_step`, …"""
        return self._set_fields("run", self._spec.run, RunSpec, fields)

    def failover(self, **fields: Any) -> RLJobBuilder:
        """Fields of `FailoverSpec`: `vertex={"max": 3, "window_s": 60}`, `orphan_timeout_s=30`, …"""
        return self._set_fields("failover", self._spec.failover, FailoverSpec, fields)

    def rollouts(self, **fields: Any) -> RLJobBuilder:
        """Fields of `RolloutsSpec`: `engine="sglang"`, `max_running=128`, `update_mode="handover"`, …"""
        return self._set_fields("rollouts", self._spec.rollouts, RolloutsSpec, fields)

    def weights(self, **fields: Any) -> RLJobBuilder:
        """Fields of `WeightsSpec`: `transports=["mooncake", "tcp"]`, `codec="delta"`, `ports="7100-7131"`, …"""
        return self._set_fields("weights", self._spec.weights, WeightsSpec, fields)

    def observe(self, **fields: Any) -> RLJobBuilder:
        """Fields of `ObserveSpec`: `samples={"every": 10, "groups": 4}`, …"""
        return self._set_fields("observe", self._spec.observe, ObserveSpec, fields)

    def store(self, url: str) -> RLJobBuilder:
        """SQLAlchemy URL of the journal."""
        self._mark("store")
        with _mistakes_at("store.", type(self._spec.store)):
            self._spec.store.url = url
        return self

    def python_path(self, *folders: str | PathLike[str]) -> RLJobBuilder:
        """Folders to import the user's modules from, on every node."""
        self._mark("python_path")
        for folder in folders:
            if not isinstance(folder, str | PathLike):
                raise ConfigError(f"python_path: {folder!r} given, expected a folder.")
            path = Path(folder).expanduser()
            if not path.is_dir():
                looked = "" if path.is_absolute() else f" (looked up in {Path.cwd()})"
                raise ConfigError(f"python_path: {fspath(folder)!r} is not a folder{looked}.")
            _append(self._spec.python_path, str(path.resolve()))
        return self

    # -- roles --------------------------------------------------------------------------------------

    def trainer(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        """The role that drives the others. All role methods take `(module, cls)`, one text, or a class."""
        return self.role(TRAINER, module, cls)

    def actor(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        return self.role("actor", module, cls)

    def rollout(
        self, module: Any = None, cls: str | None = None, *, pool: str | None = None, **fields: Any
    ) -> RoleBuilder:
        """The rollout instances; with `pool` further ones, as the role `rollout_POOL`, on machines of another kind or
        price. `fields` are those of `PoolSpec`: `price_per_hour=1.2`, `engine_args=[…]`, `max_running=64`, …"""
        if pool is not None and not isinstance(pool, str):
            raise ConfigError(f"rollout: pool {pool!r} given, expected its name.")
        name = ROLLOUT if pool is None else pool_role(pool)
        made = self.role(name, module, cls)
        if pool is not None or fields:
            role, own = self._spec.roles[name], PoolSpec()
            self._set_fields(f"roles.{name}.pool", own, PoolSpec, fields)
            role.pool = own
        return made

    def reference(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        return self.role("reference", module, cls)

    def reward(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        return self.role("reward", module, cls)

    def critic(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        return self.role("critic", module, cls)

    def agent(self, module: Any = None, cls: str | None = None) -> RoleBuilder:
        """The processes that run the sessions of `config.agent`."""
        return self.role(AGENT_ROLE, module, cls)

    def role(self, name: str, module: Any = None, cls: str | None = None) -> RoleBuilder:
        """A role of any name. Without a class it takes the recipe's default."""
        if not isinstance(name, str):
            raise ConfigError(f"roles: {name!r} given, expected the role's name.")
        if name in self._spec.roles:
            raise ConfigError(
                f"roles.{name}: is declared twice.", hint="Say everything about a role after one call."
            )
        path = f"roles.{name}.entrypoint"
        self._mark(f"roles.{name}")
        given = None if module is None and cls is None else entrypoint_of(path, module, cls)
        role = RoleSpec(entrypoint=given)
        self._set("roles", {**self._spec.roles, name: role})
        return RoleBuilder(self, name, self._spec.roles[name])

    # -- where roles stand --------------------------------------------------------------------------

    def with_collocation(self, *roles: str) -> RLJobBuilder:
        """These roles share nodes and devices, rank by rank."""
        return self._relate("collocate", roles)

    def with_collocation_all(self, *exclude: str) -> RLJobBuilder:
        """All roles of the job, but the trainer and those excluded, share nodes and devices."""
        self._collocate_all_but = exclude
        return self

    def with_host_collocation(self, *roles: str) -> RLJobBuilder:
        """These roles stand on the same machine, rank by rank, each with devices of its own; each is started, replaced
        and scaled without the others."""
        return self._relate("collocate_hosts", roles)

    def separate(self, *roles: str) -> RLJobBuilder:
        """These roles never share a node."""
        return self._relate("separate", roles)

    def spread(self, *roles: str) -> RLJobBuilder:
        """The vertices of each of these roles stand on as many nodes as there are."""
        return self._relate_each("spread", roles)

    def pack(self, *roles: str) -> RLJobBuilder:
        """The vertices of each of these roles stand on as few nodes as hold them."""
        return self._relate_each("pack", roles)

    def connect(self, source: str, target: str, kind: str = "samples", delay: int = 0) -> RLJobBuilder:
        """An edge from one role or operator (`"role.method"`) to another."""
        self._mark(f"edges.{len(self._spec.edges)}")
        with _mistakes_at(f"edges.{len(self._spec.edges)}.", EdgeSpec):
            edge = EdgeSpec.model_validate({"source": source, "target": target, "kind": kind, "delay": delay})
        self._spec.edges.append(edge)
        return self

    # -- and then -----------------------------------------------------------------------------------

    def build(self) -> RLJob:
        """The job, checked as a whole. Raises ConfigError or GraphError."""
        spec = self._spec.model_copy(deep=True)
        if self._collocate_all_but is not None:
            spec.affinity.collocate.append(self._all_but(self._collocate_all_but))
        given = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
        if spec.staleness.function is not None:
            given.append(spec.staleness.function)
        given += [Entrypoint.parse(name) for _, name in plugins_of(spec) if ":" in name]
        for root in import_roots(given):
            _append(spec.python_path, root)
        for key in ("config", "python_path"):
            setattr(spec, key, with_home(getattr(spec, key)))
        job = RLJob(spec, JobSource("", lines=dict(self._lines)))
        try:
            job.plan()
        except ConfigError as error:
            error.details[PLACE] = job.source and job.source.line_of(error)
            raise
        return job

    def plan(self) -> CompiledJob:
        """The graph and the placement, without a cluster."""
        return self.build().plan()

    def submit(self, name: str | None = None, **options: Any) -> JobHandle:
        """Build the job and start it on a Ray cluster."""
        return self.build().submit(name, **options)

    def __getattr__(self, name: str) -> Any:
        # Reached for names that no method has.
        if name.startswith("__") or name in ("_spec", "_collocate_all_but", "_lines"):
            raise AttributeError(name)
        role_only = [own for own in _public(RoleBuilder) if own not in _public(RLJobBuilder)]
        if name in role_only:
            raise AttributeError(
                f"{name} belongs to a role: call it after .actor(…), .rollout(…) or .role(…)."
            )
        raise AttributeError(f"RLJobBuilder has no {name!r}; {nearest(name, _public(RLJobBuilder))}")

    # -- inside -------------------------------------------------------------------------------------

    def _mark(self, key: str) -> None:
        """Keep where the caller gives this key of the job."""
        place = users_line(_THESE)
        if place is not None:
            self._lines[key] = place

    def _set(self, field: str, value: Any) -> RLJobBuilder:
        self._mark(field)
        with _mistakes_at("", JobSpec):
            setattr(self._spec, field, value)
        return self

    def _set_fields(
        self, path: str, model: BaseModel, kind: type[BaseModel], fields: dict[str, Any]
    ) -> RLJobBuilder:
        for key, value in fields.items():
            self._mark(f"{path}.{key}")
            if key not in kind.model_fields:
                raise ConfigError(f"{path}.{key}: unknown key; {nearest(key, kind.model_fields)}")
            with _mistakes_at(f"{path}.", kind):
                setattr(model, key, value)
        return self

    def _relate(self, key: str, roles: tuple[str, ...]) -> RLJobBuilder:
        self._mark(f"affinity.{key}")
        lists = getattr(self._spec.affinity, key)
        path = f"affinity.{key}.{len(lists)}"
        if len(set(roles)) < 2:
            raise ConfigError(f"{path}: {list(roles)} given, expected two or more different roles.")
        with _mistakes_at("affinity.", type(self._spec.affinity)):
            setattr(self._spec.affinity, key, [*lists, list(roles)])
        return self

    def _relate_each(self, key: str, roles: tuple[str, ...]) -> RLJobBuilder:
        self._mark(f"affinity.{key}")
        known = getattr(self._spec.affinity, key)
        with _mistakes_at("affinity.", type(self._spec.affinity)):
            setattr(self._spec.affinity, key, list(dict.fromkeys([*known, *roles])))
        return self

    def _all_but(self, exclude: tuple[str, ...]) -> list[str]:
        for name in exclude:
            if name not in self._spec.roles:
                raise ConfigError(
                    f"affinity.collocate: {name!r} is excluded but is not a role of this job; "
                    f"{nearest(str(name), self._spec.roles)}"
                )
        return [name for name in self._spec.roles if name != TRAINER and name not in exclude]


class RoleBuilder:
    """One role of a job. Whatever it has no method for goes on at the job's builder, so `end` is optional."""

    def __init__(self, job: RLJobBuilder, name: str, role: RoleSpec) -> None:
        self._job = job
        self._name = name
        self._role = role

    def total(self, count: int) -> RoleBuilder:
        """How many vertices."""
        return self._set("total", count)

    def per_node(self, count: int) -> RoleBuilder:
        """How many of them on each node; must divide `total`."""
        return self._set("per_node", count)

    def env(self, env: dict[str, str]) -> RoleBuilder:
        """Environment variables of this role, over the job's."""
        return self._set("env", env)

    def resources(
        self,
        *,
        cpu: float | None = None,
        memory: str | int | None = None,
        accelerator: float | None = None,
        custom: dict[str, float] | None = None,
        labels: dict[str, str] | None = None,
    ) -> RoleBuilder:
        """What one vertex needs. `memory` in bytes, or as text with a unit: "8GiB". `custom` are Ray's resources of
        your own naming, `labels` Ray's node labels that the machine must have. What is not given stays."""
        if isinstance(memory, int) and 0 < memory < _SMALLEST_MEMORY:
            raise ConfigError(
                f"roles.{self._name}.resources.memory: {memory} given, expected bytes.",
                hint=f'For megabytes write "{memory}MiB".',
            )
        self._job._mark(f"roles.{self._name}.resources")
        with _mistakes_at(f"roles.{self._name}.resources.", type(self._role.resources)):
            if cpu is not None:
                self._role.resources.cpu = cpu
            if memory is not None:
                self._role.resources.memory_bytes = memory  # type: ignore[assignment]  # the validator reads text
            if accelerator is not None:
                self._role.resources.accelerator = accelerator
            if custom is not None:
                self._role.resources.custom = custom
            if labels is not None:
                self._role.resources.labels = labels
        return self

    def elastic(self, min: int, max: int, **policy: Any) -> RoleBuilder:
        """How far `scale` may take the role. Instances of the rollout plane scale themselves within it; `policy` has
        further fields of `Elastic`: `auto=False`, `up_cooldown_s=30`, …"""
        with _mistakes_at(f"roles.{self._name}.elastic.", Elastic):
            bounds = Elastic(min=min, max=max, **policy)
        return self._set("elastic", bounds)

    def gang(self, value: bool = True) -> RoleBuilder:
        """The ranks are peers of a collective: they start together and restart together."""
        return self._set("gang", value)

    def stall_timeout(self, seconds: float) -> RoleBuilder:
        return self._set("stall_timeout_s", seconds)

    def setup_timeout(self, seconds: float) -> RoleBuilder:
        return self._set("setup_timeout_s", seconds)

    def end(self) -> RLJobBuilder:
        """Back to the job."""
        return self._job

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _public(RLJobBuilder):
            return getattr(self._job, name)
        known = {*_public(RoleBuilder), *_public(RLJobBuilder)}
        raise AttributeError(f"neither a role nor the job has {name!r}; {nearest(name, known)}")

    def _set(self, field: str, value: Any) -> RoleBuilder:
        self._job._mark(f"roles.{self._name}.{field}")
        with _mistakes_at(f"roles.{self._name}.", RoleSpec):
            setattr(self._role, field, value)
        return self


@contextmanager
def _mistakes_at(prefix: str, model: type[BaseModel]) -> Iterator[None]:
    """A model's complaint as a ConfigError that names the path in the job."""
    try:
        yield
    except ValidationError as error:
        raise config_error(error, model, prefix) from None


def _public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def _append(values: list[str], value: str) -> None:
    if value not in values:
        values.append(value)
