"""The settings of the weight plane: what a user may write, and the sentence for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.api.definition.builder import RLJobBuilder
from gyre.api.submit import submit_job
from gyre.config import JobSpec, WeightsSpec, parse_job, port_range
from gyre.errors import ConfigError, GraphError
from gyre.graph import compile_job


def job(**weights: Any) -> dict[str, Any]:
    return {
        "recipe": "grpo",
        "device_per_node": 3,
        "roles": {"actor": {}, "rollout": {}, "reward": {}},
        "weights": weights,
    }


def test_everything_that_may_be_said() -> None:
    spec = parse_job(
        job(
            transports=["mooncake", "tcp"],
            mooncake_protocol="rdma",
            mooncake_device="mlx5_0",
            codec="delta",
            dtype="bfloat16",
            streams=8,
            chunk_bytes="16MiB",
            bind="10.0.0.0/8",
            ports="7100-7131",
            sender_networks=["10.0.0.0/8", "fd00::/8"],
            receiver_networks=["10.1.0.0/16", "10.2.3.4"],
            trusted_network=True,
            encrypt=False,
            stall_timeout_s=2.5,
        )
    ).weights
    assert spec.transports == ["mooncake", "tcp"]
    assert spec.chunk_bytes == 16 << 20
    assert port_range(spec.ports) == (7100, 7131)
    assert WeightsSpec.model_validate_json(spec.model_dump_json()) == spec


def test_one_transport_is_a_list_of_one_and_a_port_is_text() -> None:
    spec = parse_job(job(transports="tcp", ports=7100)).weights
    assert (spec.transports, spec.ports) == (["tcp"], "7100")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("transport", "tcp", "weights.transport: unknown key; did you mean 'transports'?"),
        ("transports", "tpc", "weights.transports.0: 'tpc' .* did you mean 'tcp'?"),
        ("transports", ["tcp", "moncake"], "weights.transports.1: 'moncake' .* did you mean 'mooncake'?"),
        ("transports", [], "weights.transports"),
        ("transports", ["auto", "tcp"], "weights.transports: .* give it alone"),
        ("transports", ["tcp", "tcp"], "weights.transports: .* twice"),
        ("mooncake_protocol", "rmda", "weights.mooncake_protocol: 'rmda' .* did you mean 'rdma'?"),
        ("codec", "deltas", "weights.codec: 'deltas' .* did you mean 'delta'?"),
        ("codec", "zstd", "weights.codec: 'zstd' is neither a known codec nor an import path"),
        ("streams", 0, "weights.streams: 0 "),
        ("chunk_bytes", "64 apples", 'weights.chunk_bytes: .* "8GiB"'),
        ("chunk_bytes", 1000, "weights.chunk_bytes: 1000 "),
        ("bind", "10.0.0.0/99", "weights.bind: '10.0.0.0/99' is neither an address nor a network"),
        ("bind", "myhost", "weights.bind: 'myhost' is neither"),
        ("ports", "7200-7100", "weights.ports: '7200-7100' is no range"),
        ("ports", "0-70000", "weights.ports: '0-70000' is no range"),
        ("ports", "some", "weights.ports: 'some' .*7100-7131"),
        (
            "sender_networks",
            ["10.0.0.0/8", "10.0.0.1/8"],
            "weights.sender_networks: .* '10.0.0.1/8'.* host bits",
        ),
        ("receiver_networks", ["mynet"], "weights.receiver_networks: .* 'mynet', which is no network"),
        ("stall_timeout_s", 0, "weights.stall_timeout_s"),
        ("encrypt", "maybe", "weights.encrypt"),
        ("trusted_network", ["10.0.0.0/8"], "weights.trusted_network"),
    ],
)
def test_a_mistake_names_its_path_and_the_nearest_known_name(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_job(job(**{key: value}))
    if key in WeightsSpec.model_fields:
        with pytest.raises(ConfigError, match=said):
            RLJobBuilder().weights(**{key: value})


def test_the_builder_knows_them() -> None:
    built = RLJobBuilder().weights(transports="mooncake", mooncake_protocol="rdma").weights(streams=4)
    assert built._spec.weights == WeightsSpec(transports=["mooncake"], mooncake_protocol="rdma", streams=4)
    with pytest.raises(ConfigError, match=r"weights.chunk_size: unknown key; did you mean 'chunk_bytes'?"):
        RLJobBuilder().weights(chunk_size=1)


@pytest.mark.parametrize(
    ("weights", "rollouts", "said"),
    [
        ({"encrypt": True}, {}, "weights.encrypt: true given, but the rollout manager has no certificate"),
        (
            {"transports": "mooncake"},
            {"tls_cert": "c", "tls_key": "k"},
            "mooncake given, but it does not encrypt",
        ),
        (
            {"transports": "mooncake", "codec": "delta"},
            {},
            "weights.codec: 'delta' given, but only tcp carries it",
        ),
        ({"transports": ["shm"], "codec": "planes"}, {}, "weights.codec: 'planes'"),
    ],
)
def test_what_does_not_go_together(weights: Any, rollouts: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        compile_job(parse_job({**job(**weights), "rollouts": rollouts}))


@pytest.mark.parametrize(
    ("given", "tls", "resolved"),
    [(None, "c", True), (None, "", False), (False, "c", False), (True, "c", True)],
)
def test_weights_are_encrypted_where_the_manager_is(given: bool | None, tls: str, resolved: bool) -> None:
    data = {**job(encrypt=given), "rollouts": {"tls_cert": tls, "tls_key": tls}}
    assert compile_job(parse_job(data)).spec.weights.encrypt is resolved


def test_a_job_that_wants_mooncake_where_it_is_not_installed_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # this worker may have run tests on a cluster
    model = {"layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1, "mlp": 8}
    complete = {"task": {"digits": 2}, "model": model, "optim": {"lr": 0.001}}
    spec: JobSpec = parse_job({**job(transports=["mooncake", "tcp"]), "config": complete})
    with pytest.raises(ConfigError, match=r"weights.transports: mooncake given, but .* cannot be imported"):
        submit_job(spec, home_path=tmp_path)
    assert list(tmp_path.iterdir()) == []
