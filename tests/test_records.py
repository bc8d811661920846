"""Engines and back ends are records: nobody compares their names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.api.checks.engines import check as check_engines
from gyre.config import parse_job
from gyre.config.estimators import ESTIMATORS
from gyre.config.plugins import BACKEND, ENGINE
from gyre.engines.kind import EngineKind, markdown_table
from gyre.errors import ConfigError
from gyre.graph import compile_job
from gyre.graph.backends import back_ends
from gyre.rollouts.engines import engines
from gyre.workloads.algorithms.advantages import GROUP_ESTIMATORS

ROOT = Path(__file__).parents[1]
GYRE = ROOT / "gyre"

NAMES = frozenset((*ENGINE.built_in, *BACKEND.built_in)) - {"torch", "embedded"}
"""Two of the names are words of their own, too: torch is a package, and weights are embedded."""

MAY = {
    "config/plugins.py": "the registry",
    "config/sections": "the sections that back ends read, whose keys are their names",
    "extras.py": "the packages of each extra, which bears their names",
    "engines/sglang": "its own",
    "engines/vllm": "its own",
    "engines/path": "in the engines' own processes",
    "workloads/fsdp": "its own",
    "workloads/megatron": "its own",
}
"""Where a name may stand in the code, and as what."""


def named_in(file: Path) -> Iterator[str]:
    """The lines in whose code a name stands as a text: prose in docstrings compares nothing."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)) if any(name in text for name in NAMES) else ():
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield f"{file.relative_to(GYRE)}:{node.lineno}: {node.value!r}"


def test_no_engine_and_no_back_end_is_compared_by_name() -> None:
    found = [
        line
        for file in sorted(GYRE.rglob("*.py"))
        if not any(str(file.relative_to(GYRE)).startswith(place) for place in MAY)
        for line in named_in(file)
    ]
    assert not found, "ask its record: gyre.rollouts.engines.known_engine, gyre.graph.backends.back_end_of"


def test_the_rule_finds_a_name() -> None:
    file = GYRE / "engines/sglang/kind.py"
    assert any("'sglang'" in line for line in named_in(file))


def compared_in(text: str) -> list[str]:
    """The estimators whose names a module compares."""
    return [
        str(one.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and one.value in ESTIMATORS
    ]


def test_no_estimator_is_compared_by_name() -> None:
    found = {str(file.relative_to(GYRE)): compared_in(file.read_text()) for file in GYRE.rglob("*.py")}
    assert not {file: names for file, names in found.items() if names}, "ask LossSettings.estimator"
    assert compared_in('if loss.adv_estimator in ("grpo", "rloo"): pass') == ["grpo", "rloo"]


def test_each_estimator_has_a_formula() -> None:
    assert {name for name, one in ESTIMATORS.items() if one.compares} == {*GROUP_ESTIMATORS}
    assert all(one.compares != one.by_values for one in ESTIMATORS.values())


@pytest.mark.parametrize("place", MAY)
def test_every_place_that_may_is_there(place: str) -> None:
    assert (GYRE / place).exists()


def test_a_record_has_the_name_that_it_is_registered_by() -> None:
    assert [kind.name for kind in engines()] == list(ENGINE.built_in)
    assert [one.name for one in back_ends()] == list(BACKEND.built_in)
    for one in back_ends():
        assert {*one.classes} == {"actor", "critic", "reference"}
        assert all(path.startswith(f"{one.package}.") for path in one.classes.values())


def test_records_are_read_without_numpy_or_an_engine() -> None:
    code = (
        "import sys\n"
        "from gyre.graph.backends import back_ends\n"
        "from gyre.rollouts.engines import engines\n"
        "back_ends(), engines()\n"
        "sys.exit(bool({'numpy', 'torch', 'ray', 'transformers', 'sglang', 'vllm'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_documents_table_of_engines_is_what_the_records_say() -> None:
    table = markdown_table(engines())
    assert table in (ROOT / "docs/rollouts.md").read_text(), f"put it into docs/rollouts.md:\n{table}"


def test_what_an_engine_cannot_is_a_sentence_about_the_key() -> None:
    least = EngineKind(
        "least",
        "the least engine",
        lambda start: pytest.fail("it is not started"),
        deterministic=False,
        pauses=frozenset(("abort",)),
        adapters=False,
        shares_device=False,
    )
    asked = {"deterministic": True, "pause": "in_place", "adapters": True, "local": True}
    assert [key for key, _ in least.refusals(**asked)] == [
        "rollouts.deterministic",
        "rollouts.update_mode",
        "config.lora",
        "rollouts.local",
    ]
    none = {"deterministic": False, "pause": "abort", "adapters": False, "local": False}
    assert list(least.refusals(**none)) == []


def test_a_local_instance_of_an_engine_that_keeps_its_memory_is_refused() -> None:
    def checked(engine: str, device: str) -> None:
        spec = parse_job(
            {
                "name": "local",
                "recipe": "grpo",
                "node_num": 1,
                "device_per_node": 4,
                "device_type": device,
                "roles": {
                    "actor": {},
                    "rollout": {},
                    "reward": {"entrypoint": "gyre.workloads.rewards:ExactMatchReward"},
                },
                "config": {"task": {"digits": 1}, "model_path": "m", "optim": {"lr": 1e-6}},
                "rollouts": {"engine": engine, "local": 1},
            }
        )
        list(check_engines(compile_job(spec).spec, here=False))

    with pytest.raises(
        ConfigError, match=r"rollouts\.local: vLLM keeps its memory between windows"
    ) as caught:
        checked("vllm", "GPU")
    assert "docs/rollouts.md" in caught.value.hint
    checked("sglang", "GPU")
    checked("vllm", "CPU")
