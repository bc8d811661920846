"""Checks that a job can run; each failure is a sentence.

Each check raises GraphError at the first thing that is wrong, naming the path in the job, what was given, what was
expected, and the nearest known name. This module has the checks that need no placement; whether everything fits
on the nodes is found by `placement_plan`, which says required and available.

This module must not import the user's classes: it knows only what the job says about them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from gyre.config import AGENT_ROLE, LOCAL_ROLLOUT, ROLLOUT_MANAGER, SPARE_ROLLOUT, TRAINER, JobSpec, RoleSpec
from gyre.errors import GraphError, nearest
from gyre.graph.dataflow import Imbalance, StarvedCycle, carries_tokens, repetition_vector, starved_cycle
from gyre.graph.elements import Dcg, Dispatch, Edge, EdgeKind
from gyre.graph.recipes import Recipe


def check_roles(spec: JobSpec) -> None:
    """Check each role by itself. Gang flags must be resolved."""
    for name, role in spec.roles.items():
        path = f"roles.{name}"
        if role.entrypoint is None:
            raise GraphError(
                f"{path}.entrypoint: is missing"
                + (f", and recipe {spec.recipe!r} has no default for it." if spec.recipe else "."),
                hint='Give the class, as "package.module:Class".',
            )
        if role.per_node is not None and role.total % role.per_node:
            divisors = ", ".join(str(n) for n in range(1, role.total + 1) if role.total % n == 0)
            raise GraphError(
                f"{path}.total: {role.total} is not divisible by per_node ({role.per_node}).",
                hint=f"per_node may be one of {divisors}." if role.total <= 64 else "",
            )
        _check_elastic(path, role)
        _check_accelerator(path, name, role)
    _check_trainer(spec)


def _check_elastic(path: str, role: RoleSpec) -> None:
    if role.elastic is None:
        return
    low, high = role.elastic.min, role.elastic.max
    if low > high:
        raise GraphError(f"{path}.elastic: min {low} is above max {high}.")
    if not low <= role.total <= high:
        raise GraphError(
            f"{path}.elastic: total {role.total} is not between min {low} and max {high}.",
            hint="total is how many there are at the start.",
        )
    if role.gang:
        raise GraphError(
            f"{path}.elastic: a gang cannot scale one by one, because its ranks are peers of one collective.",
            hint=f"Remove elastic, or gang and the collective edges of {path.removeprefix('roles.')}.",
        )


def _check_accelerator(path: str, name: str, role: RoleSpec) -> None:
    amount = role.resources.accelerator
    if amount > 1 and amount != int(amount):
        raise GraphError(
            f"{path}.resources.accelerator: {amount:g} is above 1 and not a whole number of devices."
        )
    if 0 < amount < 1e-4:
        raise GraphError(
            f"{path}.resources.accelerator: {amount:g} is below 0.0001, the smallest share that Ray can account for."
        )


def _check_trainer(spec: JobSpec) -> None:
    trainer = spec.roles.get(TRAINER)
    if trainer is None:
        near = nearest(TRAINER, spec.roles)
        raise GraphError(
            "roles.trainer: is missing, and without a recipe nothing else drives the job"
            + (f"; {near}" if near.startswith("did you mean") else "."),
            hint="Add .trainer(module, cls) with a fit(), or choose a recipe.",
        )
    if trainer.total != 1:
        raise GraphError(f"roles.trainer.total: {trainer.total} given, but exactly 1 trainer drives a job.")
    if trainer.elastic is not None:
        raise GraphError("roles.trainer.elastic: exactly 1 trainer drives a job, so it cannot scale.")


def check_recipe(spec: JobSpec, recipe: Recipe) -> None:
    """Check that every role that the recipe needs is in the job."""
    for name in recipe.required:
        if name not in spec.roles:
            others = [role for role in spec.roles if role not in (*recipe.required, *recipe.optional)]
            near = nearest(name, others)
            raise GraphError(
                f"roles.{name}: is missing, and recipe {recipe.name!r} needs it"
                + (f"; {near}" if near.startswith("did you mean") else f" (given: {', '.join(spec.roles)})."),
                hint=f"The recipe's roles are {', '.join(recipe.required)}"
                + (f", and optionally {', '.join(recipe.optional)}." if recipe.optional else "."),
            )


def check_weights(spec: JobSpec) -> None:
    """Check that the settings of the weight plane go together."""
    weights = spec.weights
    if weights.encrypt and not spec.rollouts.tls_cert:
        raise GraphError(
            "weights.encrypt: true given, but the rollout manager has no certificate.",
            hint="Give rollouts.tls_cert and tls_key: the token that the connections rest on goes to it.",
        )
    if weights.encrypt and "mooncake" in weights.transports:
        raise GraphError(
            "weights.transports: mooncake given, but it does not encrypt, and weights.encrypt is true.",
            hint="Leave mooncake out, or set weights.encrypt to false.",
        )
    if weights.codec in ("delta", "planes") and not {"auto", "tcp"} & set(weights.transports):
        raise GraphError(
            f"weights.codec: {weights.codec!r} given, but only tcp carries it, and weights.transports are "
            f"{', '.join(weights.transports)}.",
            hint="Add tcp to weights.transports, or leave the codec out.",
        )


def check_affinity(spec: JobSpec) -> None:
    """Check that the affinities name existing roles and do not contradict each other."""
    affinity = spec.affinity
    for key in ("collocate", "collocate_hosts", "separate"):
        for index, names in enumerate(getattr(affinity, key)):
            path = f"affinity.{key}.{index}"
            _check_known(path, names, spec)
            if len(set(names)) < 2:
                raise GraphError(
                    f"{path}: [{', '.join(names)}] names fewer than two different roles, expected two or more."
                )
    _check_known("affinity.spread", affinity.spread, spec)
    _check_known("affinity.pack", affinity.pack, spec)
    for name in affinity.spread:
        if name in affinity.pack:
            raise GraphError(f"affinity: {name!r} is both in spread and in pack.", hint="Keep one of them.")
    for key in ("spread", "pack"):
        for name in getattr(affinity, key):
            if spec.roles[name].per_node is not None:
                raise GraphError(
                    f"affinity.{key}: {name!r} also has per_node {spec.roles[name].per_node}, "
                    "which already says how many stand on a node.",
                    hint="Keep one of them.",
                )
    groups = collocated(spec)
    for index, names in enumerate(affinity.separate):
        for left, right in combinations(dict.fromkeys(names), 2):
            if any(left in group and right in group for group in (*groups, *collocated_on_hosts(spec))):
                raise GraphError(
                    f"affinity.separate.{index}: {left!r} and {right!r} are collocated too, so they cannot be on "
                    "different nodes.",
                    hint="Keep one of the two.",
                )
    for group in groups:
        _check_collocation(group, spec)
        _check_labels("collocate", group, spec)
    for index, names in enumerate(affinity.collocate_hosts):
        for left, right in combinations(dict.fromkeys(names), 2):
            if any(left in group and right in group for group in groups):
                raise GraphError(
                    f"affinity.collocate_hosts.{index}: {left!r} and {right!r} share their devices by "
                    "affinity.collocate, so neither has devices of its own.",
                    hint="Keep one of the two; collocated roles stand on one machine anyway.",
                )
    for group in collocated_on_hosts(spec):
        _check_host_collocation(group, spec)
        _check_labels("collocate_hosts", group, spec)


def _check_labels(key: str, group: list[str], spec: JobSpec) -> None:
    """Roles that share a machine cannot want it labelled differently."""
    wanted: dict[str, tuple[str, str]] = {}
    for name in group:
        for label, value in spec.roles[name].resources.labels.items():
            other, earlier = wanted.setdefault(label, (name, value))
            if earlier != value:
                raise GraphError(
                    f"affinity.{key}: {other!r} wants a machine with the label {label}={earlier}, "
                    f"and {name!r} one with {label}={value}.",
                    hint="Collocated roles stand on one machine.",
                )


def collocated(spec: JobSpec) -> list[list[str]]:
    """The groups of roles that share devices; lists that share a role are one group. Order as the roles were
    declared."""
    return _joined(spec, spec.affinity.collocate)


def collocated_on_hosts(spec: JobSpec) -> list[list[str]]:
    """The groups of roles that share machines rank by rank by `collocate_hosts`, with the roles that share devices with
    one of them. Lists that share a role are one group. Order as the roles were declared."""
    named = {name for names in spec.affinity.collocate_hosts for name in names}
    groups = _joined(spec, [*spec.affinity.collocate_hosts, *spec.affinity.collocate])
    return [group for group in groups if named & set(group)]


def _joined(spec: JobSpec, lists: Iterable[list[str]]) -> list[list[str]]:
    joined: dict[str, set[str]] = {}
    for names in lists:
        both = set(names).union(*(joined.get(name, set()) for name in names))
        joined.update(dict.fromkeys(both, both))
    groups: list[list[str]] = []
    for role in spec.roles:
        if role in joined and not any(role in group for group in groups):
            groups.append([name for name in spec.roles if name in joined[role]])
    return groups


def _check_collocation(group: list[str], spec: JobSpec) -> None:
    _check_totals("collocate", "devices", group, spec)
    roles = {name: spec.roles[name] for name in group}
    elastic = {role.elastic and (role.elastic.min, role.elastic.max, role.total) for role in roles.values()}
    if len(elastic) > 1:
        scaling = next(name for name, role in roles.items() if role.elastic)
        raise GraphError(
            f"roles.{scaling}.elastic: {scaling!r} shares its devices with "
            f"{', '.join(name for name in group if name != scaling)}, which would have to scale with it.",
            hint="Give all of them the same total and elastic bounds, or none.",
        )


def _check_host_collocation(group: list[str], spec: JobSpec) -> None:
    for name in (TRAINER, ROLLOUT_MANAGER):
        if name in group:
            others = ", ".join(repr(other) for other in group if other != name)
            raise GraphError(
                f"affinity.collocate_hosts: {name!r} is to stand beside {others}, but it stands where its ledger is.",
                hint=f"Leave {name} out.",
            )
    _check_totals("collocate_hosts", "machines", group, spec)
    affinity = spec.affinity
    spreading = [name for name in group if name in affinity.spread]
    packing = [name for name in group if name in affinity.pack]
    if spreading and packing:
        raise GraphError(
            f"affinity.collocate_hosts: {spreading[0]!r} and {packing[0]!r} stand on the same machines, but "
            f"affinity.spread has {spreading[0]!r} and affinity.pack {packing[0]!r}.",
            hint="Keep one of them.",
        )
    counted = [name for name in group if spec.roles[name].per_node is not None]
    for key, names in (("spread", spreading), ("pack", packing)):
        if names and counted:
            raise GraphError(
                f"affinity.{key}: {names[0]!r} stands beside {counted[0]!r} by affinity.collocate_hosts, and per_node "
                f"{spec.roles[counted[0]].per_node} of {counted[0]!r} already says how many stand on a node.",
                hint="Keep one of them.",
            )


def _check_totals(key: str, shared: str, group: list[str], spec: JobSpec) -> None:
    """Check that the roles of a group come out even, rank by rank, and on the nodes that per_node asks for."""
    roles = {name: spec.roles[name] for name in group}
    shown = ", ".join(group)
    base = min(role.total for role in roles.values())
    for name, role in roles.items():
        if role.total % base:
            totals = ", ".join(f"{other} {spec.roles[other].total}" for other in group)
            raise GraphError(
                f"affinity.{key}: {shown} share their {shared} rank by rank, but their totals ({totals}) do not "
                f"divide: roles.{name}.total {role.total} is no multiple of {base}."
            )
    nodes = {name: role.total // role.per_node for name, role in roles.items() if role.per_node is not None}
    if len(set(nodes.values())) > 1:
        given = ", ".join(f"{name} on {count}" for name, count in nodes.items())
        raise GraphError(
            f"affinity.{key}: {shown} share their nodes, but total / per_node puts {given}.",
            hint="Give per_node for one of them only, or in the same proportion as total.",
        )
    for name, count in nodes.items():
        if base % count:
            raise GraphError(
                f"affinity.{key}: roles.{name}.per_node puts {name!r} on {count} nodes, but the smallest total of the "
                f"roles that stand with it is {base}, which {count} does not divide.",
                hint=f"Give a per_node that makes a number of nodes which divides {base}.",
            )


def _check_known(path: str, names: Iterable[str], spec: JobSpec) -> None:
    for name in names:
        if name not in spec.roles:
            raise GraphError(f"{path}: {name!r} is not a role of this job; {nearest(name, spec.roles)}")


def check_dcg(dcg: Dcg, uncounted: Collection[Edge] = ()) -> None:
    """Rates balance and every cycle can fire. `uncounted` role edges are plain calls, which carry no tokens."""
    operators = [operator.ref for operator in dcg.operators]
    for edge in dcg.edges:
        for rate, name in ((edge.produce, "produce"), (edge.consume, "consume")):
            if rate < 1:
                raise GraphError(f"edge {edge}: {name} is {rate}, expected 1 or more.")
        if edge.capacity is not None and edge.capacity < max(edge.produce, edge.consume):
            raise GraphError(
                f"edge {edge}: its capacity of {edge.capacity} is less than one firing needs "
                f"({max(edge.produce, edge.consume)})."
            )
    repetitions = repetition_vector(operators, dcg.edges)
    if isinstance(repetitions, Imbalance):
        edge = repetitions.edge
        raise GraphError(
            f"edge {edge}: its rates do not balance; for every {repetitions.produced} tokens that {edge.source} puts "
            f"on it, {edge.target} takes {repetitions.consumed}.",
            hint="Tokens would pile up or run out. Change the rates of the two operators.",
        )
    starved = starved_cycle(operators, dcg.edges, repetitions)
    if starved is not None:
        raise _deadlock(starved)
    _check_role_cycles(dcg, [edge for edge in dcg.role_edges if edge not in uncounted])
    if dcg.recipe is not None:
        fed = {edge.target for edge in dcg.edges if carries_tokens(edge)}
        for operator in dcg.operators:
            if operator.ref not in fed and operator.dispatch is not Dispatch.CONTROLLER:
                raise GraphError(
                    f"operator {operator.ref}: no edge leads to it, so nothing would ever fire it.",
                    hint=f'Add an edge with the target "{operator.ref}".',
                )


def check_every_role_used(spec: JobSpec, dcg: Dcg) -> None:
    """In a recipe's graph, every role has an operator or an edge."""
    used = {operator.role for operator in dcg.operators}
    used.update(end.partition(".")[0] for edge in dcg.role_edges for end in (edge.source, edge.target))
    if any(operator.dispatch is Dispatch.PLANE for operator in dcg.operators):
        used.update((ROLLOUT_MANAGER, LOCAL_ROLLOUT, SPARE_ROLLOUT, AGENT_ROLE))
        used.update(name for name, role in spec.roles.items() if role.pool is not None)
    for name in spec.roles:
        if name not in used and name != TRAINER:
            raise GraphError(
                f"roles.{name}: nothing feeds or calls it in recipe {spec.recipe!r}.",
                hint=f'Add an edge to or from "{name}.<method>", or leave the role out.',
            )


def _check_role_cycles(dcg: Dcg, role_edges: Sequence[Edge]) -> None:
    """Role edges take and put one token each. An operator edge counts as one between its roles, but a cycle
    of operator edges alone was judged above, operator by operator."""
    if not role_edges:
        return
    lifted: dict[Edge, Edge] = {}
    for edge in dcg.edges:
        source, target = edge.source.partition(".")[0], edge.target.partition(".")[0]
        if source != target:
            lifted[Edge(source, target, edge.kind, delay=edge.delay)] = edge
    for closing in role_edges:
        # Only edges that a zero-delay path can use; the cycle must go through `closing`.
        if closing.delay or not carries_tokens(closing):
            continue
        free = [edge for edge in (*role_edges, *lifted) if not edge.delay and carries_tokens(edge)]
        path = _path(closing.target, closing.source, free)
        if path is not None:
            edges = (closing, *(lifted.get(edge, edge) for edge in path))
            raise _deadlock(StarvedCycle(edges, (0,) * len(edges)))


def _path(start: str, end: str, edges: Sequence[Edge]) -> list[Edge] | None:
    came: dict[str, Edge | None] = {start: None}
    queue = [start]
    for here in queue:
        if here == end:
            break
        for edge in edges:
            if edge.source == here and edge.target not in came:
                came[edge.target] = edge
                queue.append(edge.target)
    if end not in came:
        return None
    path: list[Edge] = []
    at = came[end]
    while at is not None:
        path.append(at)
        at = came[at.source]
    return path[::-1]


def _deadlock(cycle: StarvedCycle) -> GraphError:
    steps = ", ".join(
        f"{edge} with {tokens} of the {edge.consume} token{'s' if edge.consume > 1 else ''} it needs"
        for edge, tokens in zip(cycle.edges, cycle.tokens, strict=True)
    )
    likely = next((edge for edge in cycle.edges if edge.kind is EdgeKind.WEIGHTS), cycle.edges[-1])
    return GraphError(
        f"edges: a cycle without enough delay can never fire: {steps}.",
        hint=f"Give one of them more delay, for instance {likely.source} → {likely.target} "
        f"a delay of {likely.delay + 1}.",
        details={"cycle": [[edge.source, edge.target, str(edge.kind), edge.delay] for edge in cycle.edges]},
    )
