"""The parts of the tests, and of each how it is cut into bundles, what it usually takes, and which rooms it guards. A
table, and what follows from it.

Every test is in `fast` or `landing`, or, if it is slow or wants PostgreSQL or an environment of its own, in one part
of `LONG` that has its folder; `tests/suite/test_parts.py` holds that. The seconds of `fast` and `landing` are of two
cores that have nothing else to do, those of the others are estimates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_APART = "not sglang and not vllm and not verl and not dlrover and not clients and not gyms"
QUICK = f"not slow and not postgres and {_APART}"
FAST = f"{QUICK} and not landing"
SLOW = f"(slow or postgres) and {_APART}"
PROPERTIES = f"hypothesis and {QUICK}"


@dataclass(frozen=True)
class Bundle:
    """Tests that one process collects and runs, in this order: what they share (a Ray cluster, a PostgreSQL server, an
    import of torch) is made once."""

    name: str
    paths: tuple[str, ...] = ()
    """Folders and files below `tests`; what another bundle of the part names within them is the other's."""
    usual_s: float = 30.0
    select: str | None = None
    """What pytest's `-m` takes, if not the part's."""
    keyword: str = ""
    """What pytest's `-k` takes."""
    words: tuple[str, ...] = ()
    """A command that is no pytest, in place of paths: its exit status is the test."""


@dataclass(frozen=True)
class Part:
    name: str
    bundles: tuple[Bundle, ...]
    limit_s: float
    """Beyond which it has failed: some four times what it usually takes."""
    select: str = FAST
    guards: str = ""
    """The rooms after a change of which it is to be run."""
    at_once: int = 2
    """How many of its bundles run beside each other: more than there are cores where tests mostly wait."""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """For pytest."""
    needs: str = ""
    """The virtual environment without which there is nothing to run."""
    may_be_left_out: bool = False
    """Where what it needs is not there; the run says so at its end. Else that is an error."""

    @property
    def usual_s(self) -> float:
        return sum(bundle.usual_s for bundle in self.bundles) / min(self.at_once, 2, len(self.bundles))

    def is_there(self, root: Path) -> bool:
        return not self.needs or (root / self.needs / ".installed").exists()

    def command(self, bundle: Bundle, more: tuple[str, ...] = ()) -> list[str]:
        """What runs the bundle; `more` goes to pytest."""
        if bundle.words:
            return [sys.executable, *bundle.words]
        words = [sys.executable, "-m", "pytest", "-p", "tests.suite.recorder", "-p", "no:cacheprovider"]
        words.append("--continue-on-collection-errors")
        if select := self.select if bundle.select is None else bundle.select:
            words += ["-m", select]
        if bundle.keyword:
            words += ["-k", bundle.keyword]
        others = [path for other in self.bundles if other is not bundle for path in other.paths]
        ignored = [other for other in others if any(other.startswith(f"{path}/") for path in bundle.paths)]
        return [*words, *(f"--ignore={path}" for path in ignored), *self.options, *more, *bundle.paths]

    def bundle_of(self, path: str) -> Bundle | None:
        """The bundle that a test file is in, by its path from the root: that with the longest path that holds it."""
        held = [
            (len(own), bundle)
            for bundle in self.bundles
            for own in bundle.paths
            if path == own or path.startswith(f"{own}/")
        ]
        return max(held, key=lambda one: one[0])[1] if held else None


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names)


fast = Part(
    "fast",
    (
        Bundle("on-ray", _tests("kill", "e2e", "dlrover"), 110),
        Bundle("trainer", _tests("workloads/trainer"), 150),
        Bundle("documents", _tests("test_docs.py", "test_examples.py", "test_exports.py"), 35),
        Bundle("megatron", _tests("megatron"), 60),
        Bundle("fsdp", _tests("fsdp", "machines"), 50),
        Bundle("api", _tests("api"), 140),
        Bundle("rollouts", _tests("rollouts", "fleet"), 130),
        Bundle("master", _tests("master", "failover", "observe", "store", "logs"), 150),
        Bundle("workloads", _tests("workloads", "testing"), 110),
        Bundle("engines", _tests("engines", "models", "weights"), 110),
        Bundle("rest", ("tests",), 90),
    ),
    limit_s=1500,
    at_once=4,
    # Ray's processes run Python's own event loop here, and uvloop, which SGLang brings, in the long suite.
    environment={"RAY_USE_UVLOOP": "0"},
)

landing = Part(
    "landing",
    (
        Bundle("trainer", _tests("workloads"), 80),
        Bundle("layouts", _tests("megatron", "fsdp"), 80),
        Bundle("engines", _tests("engines", "weights", "fuzz", "api"), 70),
        Bundle("on-ray", _tests("e2e/test_fleet.py", "dlrover"), 60),
        Bundle("page", _tests("ui/test_real_server.py"), 15),
    ),
    limit_s=1000,
    select="landing",
    at_once=4,
)
"""What `.ci/run` has beside `fast`: whole jobs, layouts of ranks, processes that are killed."""

LONG_EXAMPLES = {"GYRE_TEST_EXAMPLES": "1"}
"""All examples of properties."""

kill = Part(
    "kill",
    (
        Bundle("on-ray", _tests("kill", "dlrover/test_kills.py"), 900),
        Bundle("own-clusters", _tests("kill/test_nodes.py", "kill/test_killed_driver.py"), 300),
    ),
    limit_s=3000,
    select=SLOW,
    guards="master, failover, store, workloads, rollouts, weights",
    environment=LONG_EXAMPLES,
)

e2e = Part(
    "e2e",
    (Bundle("jobs", _tests("e2e"), 900),),
    limit_s=3000,
    select=SLOW,
    guards="api, config, workloads, data, fleets and the door",
    environment=LONG_EXAMPLES,
)

ui = Part(
    "ui",
    (Bundle("page", _tests("ui"), 240),),
    limit_s=900,
    select=SLOW,
    guards="ui, api/rest, api/page",
)

layouts = Part(
    "layouts",
    (
        Bundle("megatron", _tests("megatron"), 300),
        Bundle("fsdp", _tests("fsdp"), 100),
        Bundle("machines", _tests("machines"), 100),
    ),
    limit_s=1800,
    select=SLOW,
    guards="workloads/megatron, workloads/fsdp, workloads/gang, workloads/learner, models",
)

rooms = Part(
    "rooms",
    (
        Bundle("store", _tests("store"), 200),
        Bundle("api", _tests("api", "test_docs.py", "test_examples.py"), 200),
        Bundle("rest", ("tests",), 300),
    ),
    limit_s=1800,
    select=SLOW,
    guards="every room that has slow tests of its own, and the store on PostgreSQL",
    environment=LONG_EXAMPLES,
)

properties = Part(
    "properties",
    (
        Bundle("rollouts", _tests("rollouts", "fleet", "store"), 300),
        Bundle("rest", ("tests",), 300),
    ),
    limit_s=1800,
    select=PROPERTIES,
    guards="graph, failover, rollouts, weights, observe: what has properties, with all their examples",
    environment=LONG_EXAMPLES,
)

sglang = Part(
    "sglang",
    (
        Bundle("job", _tests("sglang/test_job.py"), 300),
        Bundle("engine", _tests("sglang"), 600),
    ),
    limit_s=1800,
    select="sglang",
    guards="engines, rollouts/agent, weights, and the rows of sessions",
    needs=".venv-sglang",
)

vllm = Part(
    "vllm",
    (Bundle("engine", _tests("vllm"), 300),),
    limit_s=1800,
    select="vllm",
    guards="engines, rollouts/agent, weights",
    needs=".venv-vllm",
)

verl = Part(
    "verl",
    (
        Bundle("fleet", _tests("e2e/test_verl.py"), 240),
        Bundle("backend", _tests("e2e/test_verl_backend.py"), 240),
    ),
    limit_s=1800,
    select="verl",
    guards="integrations/gyre-verl, fleets and the door, workloads/learner, weights",
    needs=".venv-verl",
)

dlrover = Part(
    "dlrover",
    (Bundle("side-by-side", _tests("dlrover/test_side_by_side.py"), 300),),
    limit_s=1500,
    select="dlrover",
    guards="integrations/gyre-dlrover",
    needs=".venv-dlrover",
)

clients = Part(
    "clients",
    (
        Bundle("conversations", _tests("chat"), 240),
        Bundle("job", _tests("e2e/test_openai_agent.py"), 150),
    ),
    limit_s=900,
    select="clients",
    guards="chat, and what a session answers",
    needs=".venv-clients",
)

gyms = Part(
    "gyms",
    (Bundle("environments", _tests("e2e/test_gyms.py"), 400),),
    limit_s=1800,
    select="gyms",
    guards="agents, chat, fleets and the door",
    needs=".venv-gyms",
)

fuzz = Part(
    "fuzz",
    (Bundle("a-million", words=("-m", "tests.fuzz", "--n", "1000000"), usual_s=600),),
    limit_s=2400,
    guards="whatever reads what strangers send: rollouts/protocol, weights, data, ports, the door",
)

soak = Part(
    "soak",
    (Bundle("ten-minutes", words=("-m", "tests.soak", "--out", "build/soak"), usual_s=800),),
    limit_s=2000,
    guards="processes that live long: master, rollouts, workloads/trainer, store",
    environment={"SOAK_S": "600"},
)

search = replace(
    properties,
    name="search",
    limit_s=4 * 3600,
    environment={"GYRE_TEST_EXAMPLES": "10"},
    options=("--hypothesis-profile", "search"),
)
"""Other examples each time, ten times as many."""

LONG = (sglang, vllm, verl, dlrover, clients, gyms, kill, e2e, ui, properties, layouts, rooms, fuzz, soak)

SMOKES = (
    Part(
        "sglang-smoke",
        (Bundle("one", _tests("sglang/test_conformance.py"), 60, keyword="key"),),
        limit_s=300,
        select="sglang",
        needs=".venv-sglang",
        may_be_left_out=True,
    ),
    Part(
        "vllm-smoke",
        (Bundle("one", _tests("vllm/test_conformance.py"), 90, keyword="key"),),
        limit_s=300,
        select="vllm",
        needs=".venv-vllm",
        may_be_left_out=True,
    ),
    Part(
        "verl-smoke",
        (Bundle("one", _tests("e2e/test_verl_backend.py"), 60, keyword="gradient_is_plain_torchs and 1"),),
        limit_s=300,
        select="verl",
        needs=".venv-verl",
        may_be_left_out=True,
    ),
    Part(
        "dlrover-smoke",
        (Bundle("one", _tests("dlrover/test_side_by_side.py"), 20, keyword="builders"),),
        limit_s=300,
        select="dlrover",
        needs=".venv-dlrover",
        may_be_left_out=True,
    ),
)
"""One test each of what has an environment of its own, where that is already there."""

PARTS = {part.name: part for part in (fast, landing, search, *LONG, *SMOKES)}
