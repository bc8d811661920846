"""From data to a job and back, sizes, entrypoints, overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config import Entrypoint, JobSpec, apply_overrides, parse_job, parse_size
from gyre.config.parse import load_yaml
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8 Gi", 8 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("500MB", 500_000_000),
        ("7k", 7000),
        ("12", 12),
    ],
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1GiB", "1,5GiB"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b:C", Entrypoint(module="a.b", name="C")),
        ("a.b.C", Entrypoint(module="a.b", name="C")),
        ("a:C.D", Entrypoint(module="a", name="C.D")),
        ("/x/y.py:C", Entrypoint(module="__main__", name="C", file="/x/y.py")),
    ],
)
def test_entrypoints_from_text(text: str, expected: Entrypoint) -> None:
    assert Entrypoint.parse(text) == expected


@pytest.mark.parametrize("text", ["", "C", "a.b:", ":C", "a b:C", "a..b:C", "y.py:1", "a.b.C()"])
def test_text_that_is_no_entrypoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        Entrypoint.parse(text)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "node_num": st.integers(1, 9),
            "device_type": st.sampled_from(["cpu", "GPU", "Gpu"]),
            "config": st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
            "roles": st.dictionaries(
                st.sampled_from(["actor", "rollout", "env", "mine"]),
                st.fixed_dictionaries(
                    {}, optional={"total": st.integers(1, 9), "entrypoint": st.just("a.b:C")}
                ),
                max_size=3,
            ),
            "affinity": st.fixed_dictionaries({}, optional={"spread": st.just(["actor"])}),
        },
    )
)
@settings(deadline=None)
def test_job_survives_the_way_through_json(data: dict[str, Any]) -> None:
    spec = parse_job(data)
    assert parse_job(spec.model_dump(mode="json")) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_every_mistake_is_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_job({"node_num": 0, "nam": "x", "run": {"steps": "many", "stps": 1}})
    assert len(raised.value.details["mistakes"]) == 4
    assert "nam: unknown key; did you mean 'name'?" in raised.value.details["mistakes"]
    assert "run.stps: unknown key; did you mean 'steps'?" in raised.value.details["mistakes"]


def test_overrides_leave_the_original_alone() -> None:
    data: dict[str, Any] = {"a": {"b": 1}, "none": None}
    assert apply_overrides(data, ["a.b=2", "a.c=[1, 2]", "none.x=y", "t={unclosed"]) == {
        "a": {"b": 2, "c": [1, 2]},
        "none": {"x": "y"},
        "t": "{unclosed",
    }
    assert data == {"a": {"b": 1}, "none": None}


@pytest.mark.parametrize(
    "value",
    [
        "2001-99-99",
        "!!timestamp abc",
        "!!int ''",
        "!!bool perhaps",
        "9" * 5000,
        "[" * 5000,
        "&a [*a]",
        "&a {b: *a}",
        "&x0 [1]" + "".join(f"\nb{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 9)),
    ],
    ids=lambda value: value[:20],
)
def test_a_value_that_cannot_be_is_a_mistake_in_the_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"a: {value}")
    with pytest.raises(ConfigError, match=r"job\.yaml: is not YAML"):
        load_yaml(file)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"optim": {"learning_rate": 1e-3}}, "did you mean 'config.optim.lr'"),
        ({"sampling": {"max_response_length": 8}}, "did you mean 'config.sampling.max_new_tokens'"),
        ({"sampling": {"temperature": float("nan")}}, "config.sampling.temperature is nan"),
        ({"a": [1, {"b": print}]}, r"config.a\[1\].b is a builtin_function_or_method"),
        ({"model_path": None}, "config.model_path: null should be"),
    ],
)
def test_a_key_of_another_trainer_and_what_no_file_holds_are_named(
    config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WorkloadSettings.read(parse_job({"config": config, "recipe": "grpo"}).config)


def test_what_a_job_writes_to_and_whom_it_tells_may_be_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    observe = {
        "sinks": [{"kind": "file", "to": "~/a.jsonl"}],
        "notify": [{"command": ["~/tell", "~/b", "~c"]}],
    }
    told = parse_job({"observe": observe, "roles": {}}).observe
    assert told.sinks[0].to == "/home/me/a.jsonl"
    assert told.notify[0].command == ["/home/me/tell", "/home/me/b", "~c"]
