"""The compiler of jobs: it resolves the roles, builds the graph, checks it and places it.

Invariants:
- *pure*: the same spec gives an equal result, and the spec that was given is not changed;
- *resolved*: in `CompiledJob.spec` every role has its entrypoint and its final gang flag, and compiling it again
  gives the same graph and plan;
- *nothing imported*: the user's classes are known by name only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from math import gcd

from gyre.config import (
    FLEET,
    LOCAL_ROLLOUT,
    ROLLOUT_MANAGER,
    SPARE_ROLLOUT,
    TRAINER,
    DoorSpec,
    EdgeSpec,
    Elastic,
    Entrypoint,
    JobSpec,
    Resources,
    RoleSpec,
)
from gyre.config.sections import WorkloadSettings
from gyre.errors import GraphError, nearest
from gyre.graph.agents import check_agents, with_agents
from gyre.graph.dataflow import Imbalance, repetition_vector
from gyre.graph.elements import Dcg, Dispatch, Edge, EdgeKind, Operator, PlacementPlan
from gyre.graph.execution import ExecutionGraph
from gyre.graph.integrations import check_integrations, default_with, reads_sections
from gyre.graph.placement_plan import plan_placement
from gyre.graph.recipes import DEFAULT_CLASSES, ROLLOUT_INSTANCE, recipe_named
from gyre.graph.rollout_roles import ROLLOUT, check_context, is_instance, local_roles, rollouts_of
from gyre.graph.validate import (
    check_affinity,
    check_dcg,
    check_every_role_used,
    check_recipe,
    check_roles,
    check_weights,
)


@dataclass(frozen=True, slots=True)
class CompiledJob:
    """A job that can run: `spec` is resolved, and `plan` fits the nodes that the spec declares."""

    spec: JobSpec
    dcg: Dcg
    graph: ExecutionGraph
    plan: PlacementPlan

    def _repr_html_(self) -> str:
        """The plan in a notebook: the graph's edges as a table."""
        roles = ", ".join(f"{name} × {role.total}" for name, role in self.spec.roles.items())
        edges = "".join(
            f"<tr><td>{escape(edge.source)}</td><td>{escape(str(edge.kind))}</td>"
            f"<td>{escape(edge.target)}</td><td>{edge.delay or ''}</td></tr>"
            for edge in self.dcg.edges
        )
        return (
            f"<div><b>plan of {escape(self.spec.name)}</b>: {escape(roles)}; nodes: {self.plan.node_num}"
            f"<table><tr><th>from</th><th>flows</th><th>to</th><th>delay</th></tr>{edges}</table></div>"
        )


def compile_job(spec: JobSpec) -> CompiledJob:
    """Compile a job. Raises ConfigError for a mistake below `config`, and GraphError, as one sentence, for a job that
    cannot run."""
    resolved = _with_recipe_defaults(spec)
    dcg, implicit = _build_dcg(resolved)
    _mark_gangs(resolved, dcg)
    check_roles(resolved)
    check_weights(resolved)
    check_affinity(resolved)
    check_dcg(dcg, uncounted=implicit)
    if resolved.recipe is not None:
        check_every_role_used(resolved, dcg)
    gangs = [name for name, role in resolved.roles.items() if role.gang]
    graph = ExecutionGraph(dcg, {name: range(role.total) for name, role in resolved.roles.items()}, gangs)
    return CompiledJob(resolved, dcg, graph, plan_placement(resolved))


def _with_recipe_defaults(spec: JobSpec) -> JobSpec:
    resolved = spec.model_copy(deep=True)
    if reads_sections(resolved):
        WorkloadSettings.read(resolved.config)
    if resolved.weights.encrypt is None:
        resolved.weights.encrypt = bool(resolved.rollouts.tls_cert)
    if resolved.recipe is not None:
        recipe = recipe_named(resolved.recipe, resolved.python_path)
        if TRAINER not in resolved.roles:
            resolved.roles = {TRAINER: RoleSpec(), **resolved.roles}
        with_agents(resolved, recipe)
        check_recipe(resolved, recipe)
        for name, role in resolved.roles.items():
            if role.entrypoint is None and name in recipe.defaults:
                role.entrypoint = default_with(resolved, name, recipe.defaults[name])
        _open_door(resolved)
        _fill_pools(resolved)
        _add_rollout_manager(resolved, recipe.defaults.get(ROLLOUT_MANAGER, DEFAULT_CLASSES[ROLLOUT_MANAGER]))
        _add_local_rollouts(resolved)
        _add_spares(resolved)
        given = resolved.config.get("loss", {})
        if recipe.loss and isinstance(given, dict):  # `check_integrations` refuses anything but a mapping
            resolved.config = {**resolved.config, "loss": {**recipe.loss, **given}}
        check_integrations(resolved)
        check_agents(resolved, recipe)
        settings = WorkloadSettings.read(resolved.config)
        if settings.model is not None and not settings.model_path:
            check_context(resolved, settings.model.max_positions, "config.model.max_positions")
        _fit_answers(resolved, settings)
    trainer = resolved.roles.get(TRAINER)
    if trainer is not None:
        amount = trainer.resources.accelerator
        if amount not in (0.0, RoleSpec().resources.accelerator):
            raise GraphError(
                f"roles.trainer.resources.accelerator: {amount:g} given, but the trainer takes no device.",
                hint="Give the devices to a role that the trainer calls, such as actor.",
            )
        trainer.resources.accelerator = 0.0
    return resolved


def _fit_answers(spec: JobSpec, settings: WorkloadSettings) -> None:
    """A job that does not say how long its answers are has those that fit: what the task's prompts leave of the
    context, or half of it where the prompts are not known here; and its sessions fill it."""
    if spec.recipe == FLEET:
        return
    contexts = [rollouts_of(spec, role).context_length for role in spec.roles if is_instance(spec, role)]
    rooms = [spec.rollouts.context_length, *contexts]
    if settings.model is not None and not settings.model_path:
        rooms.append(settings.model.max_positions)
    room = min((one for one in rooms if one is not None), default=None)
    if room is None:
        return
    agent = settings.agent
    if agent is not None and "max_tokens" not in agent.model_fields_set and room < agent.max_tokens:
        spec.config = {**spec.config, "agent": {**spec.config["agent"], "max_tokens": room}}
    if "max_new_tokens" in settings.sampling.model_fields_set:
        return
    task = settings.task
    known = task is not None and task.name == "arithmetic" and settings.data is None and spec.run.data is None
    fits = room - task.prompt_tokens if task is not None and known else room // 2
    if fits < settings.sampling.max_new_tokens:
        sampling = {**(spec.config.get("sampling") or {}), "max_new_tokens": max(fits, 1)}
        spec.config = {**spec.config, "sampling": sampling}


def _open_door(spec: JobSpec) -> None:
    """A fleet has a door, and nothing else has one."""
    if spec.recipe == FLEET:
        if spec.rollouts.local:
            raise GraphError(
                f"rollouts.local: {spec.rollouts.local} given, but a fleet has no trainer whose devices it could use.",
                hint="Leave it out.",
            )
        spec.rollouts.door = spec.rollouts.door or DoorSpec()
    elif spec.rollouts.door is not None:
        raise GraphError(
            f"rollouts.door: is given, but recipe {spec.recipe!r} has a trainer and no door.",
            hint="Leave it out, or take the recipe fleet.",
        )


def _add_rollout_manager(spec: JobSpec, entrypoint: Entrypoint) -> None:
    """Add the rollout manager to a job with instances of the rollout plane; nobody has to write it down."""
    if bool(spec.rollouts.tls_cert) != bool(spec.rollouts.tls_key):
        given, missing = ("tls_cert", "tls_key") if spec.rollouts.tls_cert else ("tls_key", "tls_cert")
        raise GraphError(
            f"rollouts.{missing}: is missing, and {given} is given.", hint="Give both, or neither."
        )
    rollout = spec.roles.get(ROLLOUT)
    if rollout is not None and rollout.entrypoint == ROLLOUT_INSTANCE and ROLLOUT_MANAGER not in spec.roles:
        spec.roles[ROLLOUT_MANAGER] = RoleSpec(
            entrypoint=entrypoint.model_copy(), resources=Resources(accelerator=0.0)
        )


def _fill_pools(spec: JobSpec) -> None:
    """Give pools of instances their class. The trainer's calls go to the role `rollout`, so it must be of the plane."""
    rollout = spec.roles.get(ROLLOUT)
    for name, role in spec.roles.items():
        if role.pool is None:
            continue
        if rollout is None or rollout.entrypoint != ROLLOUT_INSTANCE:
            raise GraphError(
                f"roles.{name}.pool: is given, but the job's rollouts are not instances of the rollout plane.",
                hint=f"Leave out {name}, or the class of the role {ROLLOUT}.",
            )
        if role.entrypoint is None:
            role.entrypoint = ROLLOUT_INSTANCE.model_copy()
        if role.entrypoint != ROLLOUT_INSTANCE:
            raise GraphError(
                f"roles.{name}.entrypoint: {role.entrypoint} given, but a pool consists of rollout instances.",
                hint="Leave out the class, or pool.",
            )


def _add_local_rollouts(spec: JobSpec) -> None:
    """Add the role of the instances on the actor's devices, collocated with the actor; nobody has to write it down."""
    rollout, actor = spec.roles.get(ROLLOUT), spec.roles.get("actor")
    count = spec.rollouts.local
    if not count or LOCAL_ROLLOUT in spec.roles:
        return
    if rollout is None or rollout.entrypoint != ROLLOUT_INSTANCE or actor is None:
        raise GraphError(
            f"rollouts.local: {count} given, but the job's rollouts are not instances of the rollout plane.",
            hint="Leave rollouts.local out, or the rollout role's class.",
        )
    spec.roles[LOCAL_ROLLOUT] = rollout.model_copy(
        update={"total": count, "per_node": None, "elastic": None, "pool": None}, deep=True
    )
    spec.affinity.collocate.append(["actor", LOCAL_ROLLOUT])


def _add_spares(spec: JobSpec) -> None:
    """Add the role of the spares: instances as those of `rollout`, each on devices of its own, without which a job
    begins where they find no room. Nobody has to write it down."""
    rollout, count = spec.roles.get(ROLLOUT), spec.rollouts.spares
    if not count or SPARE_ROLLOUT in spec.roles:
        return
    if rollout is None or rollout.entrypoint != ROLLOUT_INSTANCE:
        raise GraphError(
            f"rollouts.spares: {count} given, but the job's rollouts are not instances of the rollout plane.",
            hint="Leave rollouts.spares out, or the rollout role's class.",
        )
    if ROLLOUT in local_roles(spec):
        raise GraphError(
            f"rollouts.spares: {count} given, but all instances are on the actor's devices, and a spare would serve "
            "outside of its windows.",
            hint="Leave rollouts.spares out, or give the role rollout devices of its own.",
        )
    elastic = Elastic(min=0, max=count, auto=False)
    spec.roles[SPARE_ROLLOUT] = rollout.model_copy(
        update={"total": count, "per_node": None, "elastic": elastic}, deep=True
    )
    affinity = spec.affinity
    for names in (affinity.spread, affinity.pack):
        names += [SPARE_ROLLOUT] if ROLLOUT in names else []
    affinity.separate += [
        [SPARE_ROLLOUT if name == ROLLOUT else name for name in names]
        for names in affinity.separate
        if ROLLOUT in names
    ]


# -- the graph --------------------------------------------------------------------------------------


def _build_dcg(spec: JobSpec) -> tuple[Dcg, tuple[Edge, ...]]:
    """Returns the DCG, and those of its role edges that are plain calls from the trainer."""
    operators: dict[str, Operator] = {}
    edges: list[Edge] = []
    if spec.recipe is not None:
        built, recipe_edges = recipe_named(spec.recipe, spec.python_path).build(spec)
        operators = {operator.ref: operator for operator in built}
        edges.extend(recipe_edges)
    closed = {operator.role for operator in operators.values()}
    role_edges: list[Edge] = []
    between_operators: list[Edge] = []
    for index, given in enumerate(spec.edges):
        edge = Edge(given.source, given.target, EdgeKind(given.kind), delay=given.delay)
        for side, end in (("source", given.source), ("target", given.target)):
            _check_end(f"edges.{index}.{side}", end, spec, operators, closed)
        if ("." in given.source) != ("." in given.target):
            raise _half_operator(index, given)
        if "." not in given.source:
            role_edges.append(edge)
            continue
        for end in (given.source, given.target):
            operators.setdefault(end, _declared(end, spec))
        between_operators.append(edge)
    edges.extend(_with_rates(operators, edges, between_operators))
    implicit: tuple[Edge, ...] = ()
    if spec.recipe is None:
        told = {
            edge.target for edge in role_edges if edge.source == TRAINER and edge.kind is EdgeKind.CONTROL
        }
        implicit = tuple(
            Edge(TRAINER, role, EdgeKind.CONTROL)
            for role in spec.roles
            if role != TRAINER and role not in told and TRAINER in spec.roles
        )
    dcg = Dcg(
        roles=tuple(spec.roles),
        operators=tuple(operators.values()),
        edges=tuple(edges),
        role_edges=(*implicit, *role_edges),
        recipe=spec.recipe,
    )
    return dcg, implicit


def _declared(ref: str, spec: JobSpec) -> Operator:
    """Returns an operator that only the user's edges name."""
    role, _, method = ref.partition(".")
    if role == TRAINER:
        return Operator(role, method, Dispatch.CONTROLLER)
    return Operator(role, method, Dispatch.GANG if spec.roles[role].gang else Dispatch.ONE)


def _check_end(path: str, end: str, spec: JobSpec, operators: dict[str, Operator], closed: set[str]) -> None:
    """`closed` roles have just the recipe's operators; of other roles any method may be one."""
    role, dot, method = end.partition(".")
    if role not in spec.roles:
        within = f" in {end!r}" if dot else ""
        raise GraphError(f"{path}: {role!r}{within} is not a role of this job; {nearest(role, spec.roles)}")
    if not dot:
        return
    if not method.isidentifier():
        raise GraphError(f'{path}: {end!r} given, expected "role" or "role.method".')
    if role in closed and end not in operators:
        known = [ref for ref in operators if ref.startswith(f"{role}.")]
        raise GraphError(
            f"{path}: {end!r} is not an operator of recipe {spec.recipe!r}; {nearest(end, known)}"
        )


def _half_operator(index: int, given: EdgeSpec) -> GraphError:
    return GraphError(
        f"edges.{index}: {given.source!r} → {given.target!r} joins an operator with a whole role.",
        hint='Write both ends as "role", or both as "role.method".',
    )


def _with_rates(operators: dict[str, Operator], known: list[Edge], added: list[Edge]) -> list[Edge]:
    """The user's edges with rates that balance with the recipe's.

    An edge between operators that the recipe joins takes the ratio of their firings. An operator that only
    the user's edges name fires as often as the first known operator that it is joined with.
    """
    result = list(added)
    repetitions = repetition_vector(operators, known) if known else {}
    if not known or isinstance(repetitions, Imbalance):
        return result
    tokens: dict[str, int] = {}
    firings = {ref: repetitions[ref] for edge in known for ref in (edge.source, edge.target)}
    for edge in known:
        if edge.kind is EdgeKind.SAMPLES:
            tokens.setdefault(edge.source, edge.produce)
            tokens.setdefault(edge.target, edge.consume)
    neighbours: dict[str, list[str]] = defaultdict(list)
    for edge in added:
        neighbours[edge.source].append(edge.target)
        neighbours[edge.target].append(edge.source)
    reached = list(firings)
    for here in reached:
        for other in neighbours[here]:
            if other not in firings:
                firings[other] = firings[here]
                if here in tokens:
                    tokens[other] = tokens[here]
                reached.append(other)
    for index, edge in enumerate(result):
        if edge.source in firings and edge.target in firings:
            produce, consume = _balanced(edge, firings, tokens)
            result[index] = Edge(edge.source, edge.target, edge.kind, produce, consume, edge.delay)
    return result


def _balanced(edge: Edge, firings: dict[str, int], tokens: dict[str, int]) -> tuple[int, int]:
    """The rates of an edge for these firings. On a samples edge, a token is one group of the source's firing."""
    source, target = firings[edge.source], firings[edge.target]
    common = gcd(source, target)
    produce, consume = target // common, source // common
    if edge.kind is EdgeKind.SAMPLES and edge.source in tokens:
        scale = Fraction(tokens[edge.source], produce)
        if scale.denominator == 1:
            return produce * int(scale), consume * int(scale)
    return produce, consume


def _mark_gangs(spec: JobSpec, dcg: Dcg) -> None:
    for operator in dcg.operators:
        if operator.dispatch is Dispatch.GANG:
            spec.roles[operator.role].gang = True
    for edge in (*dcg.edges, *dcg.role_edges):
        if edge.kind is EdgeKind.COLLECTIVE:
            for end in (edge.source, edge.target):
                spec.roles[end.partition(".")[0]].gang = True
