"""The job as a graph: recipes, compilation, validation, regions, sub-graphs, placement. All of it pure."""

from gyre.graph.backends import Backend
from gyre.graph.cluster_fit import NodeCapacity, fit_to_cluster, fit_what_has_room
from gyre.graph.compile import CompiledJob, compile_job
from gyre.graph.devices import Neighbour, neighbours_of
from gyre.graph.elements import (
    DURABLE,
    Bundle,
    Dcg,
    Dispatch,
    Edge,
    EdgeKind,
    Operator,
    PlacementPlan,
    SubGraph,
    Vertex,
    VertexPlacement,
)
from gyre.graph.execution import ExecutionGraph
from gyre.graph.placement_plan import plan_placement
from gyre.graph.recipes import RECIPES, Recipe, recipe_named
from gyre.graph.render import as_dict, as_dot, as_mermaid, as_tables
from gyre.graph.rollout_roles import is_instance, local_roles, pool_role, pools_of, rollouts_of
from gyre.graph.scaling import can_come_later, sub_graph_id, with_numbers, with_vertices, without_vertices

__all__ = [
    "DURABLE",
    "RECIPES",
    "Backend",
    "Bundle",
    "CompiledJob",
    "Dcg",
    "Dispatch",
    "Edge",
    "EdgeKind",
    "ExecutionGraph",
    "Neighbour",
    "NodeCapacity",
    "Operator",
    "PlacementPlan",
    "Recipe",
    "SubGraph",
    "Vertex",
    "VertexPlacement",
    "as_dict",
    "as_dot",
    "as_mermaid",
    "as_tables",
    "can_come_later",
    "compile_job",
    "fit_to_cluster",
    "fit_what_has_room",
    "is_instance",
    "local_roles",
    "neighbours_of",
    "plan_placement",
    "pool_role",
    "pools_of",
    "recipe_named",
    "rollouts_of",
    "sub_graph_id",
    "with_numbers",
    "with_vertices",
    "without_vertices",
]
