"""What `gyre plan` says of memory: a table, "not known", a refusal in a sentence, and what `auto` comes to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import gyre.api.checks.memory as memory
from gyre.api.checks.memory import foresee
from gyre.api.cli import main
from gyre.config import parse_job
from gyre.errors import ConfigError
from gyre.graph import compile_job
from gyre.models.architecture import Architecture, config_of
from gyre.workloads.memory.passes import GIB

SHAPE = replace(
    Architecture.qwen3(
        vocab=151936, layers=36, hidden=2560, heads=32, kv_heads=8, mlp=9728, max_positions=32768
    ),
    head_dim=128,
)
JOB: dict[str, Any] = {
    "name": "four",
    "recipe": "grpo",
    "backend": "fsdp",
    "device_type": "GPU",
    "node_num": 2,
    "config": {
        "task": {"digits": 1},
        "sampling": {"n": 8, "max_new_tokens": 1024},
        "optim": {"lr": 1e-6},
        "fsdp": {"pass_tokens": 4096, "recompute": False, "fused_kernels": False},
    },
    "rollouts": {"engine": "sglang", "engine_args": ["--mem-fraction-static", "0.8"]},
    "run": {"steps": 2, "prompts_per_step": 64, "evaluate_every": 0},
    "roles": {"actor": {"total": 2}, "rollout": {"total": 2}, "reward": {}},
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config_of(SHAPE, eos_id=1)))
    return made


def job(folder: Path, *, device: float | None = 79, **fsdp: Any) -> dict[str, Any]:
    config = {**JOB["config"], "model_path": str(folder), "fsdp": {**JOB["config"]["fsdp"], **fsdp}}
    return {**JOB, "config": config, "device_memory_gib": device}


def planned(tmp_path: Path, spec: dict[str, Any], *more: str) -> Result:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    return CliRunner().invoke(main, ["plan", str(file), "--ray-address", "192.0.2.1:6379", *more])


def foreseen(spec: dict[str, Any], *, here: bool = False) -> memory.Foreseen:
    return foresee(compile_job(parse_job(spec)).spec, here=here)


def test_plan_prints_what_each_role_takes(tmp_path: Path, folder: Path) -> None:
    found = planned(tmp_path, job(folder))
    assert found.exit_code == 0, found.output
    lines = found.stdout[found.stdout.index("Memory") :].splitlines()
    assert any("actor" in line and "each device" in line and line.endswith("fits") for line in lines)
    assert any("rollout" in line and "KV memory a token" in line for line in lines)
    assert any("disk" in line and "two checkpoints and one being written" in line for line in lines)
    told = json.loads(planned(tmp_path, job(folder), "--json").stdout)["memory"]
    assert told["device_bytes"] == 79 * GIB
    actor = next(line for line in told["lines"] if line["role"] == "actor" and line["where"] == "each device")
    assert 55 * GIB < actor["needs"] < 65 * GIB


def test_a_pass_that_cannot_fit_is_refused_with_the_largest_that_does(tmp_path: Path, folder: Path) -> None:
    found = planned(tmp_path, job(folder, pass_tokens=16384))
    assert found.exit_code == 2
    assert "config.fsdp.pass_tokens: 16384 given" in found.stderr
    assert "for activations; a device has 79.0 GiB" in found.stderr
    assert "At most 7168 fits" in found.stderr
    assert "recompute" in found.stderr
    assert planned(tmp_path, job(folder, pass_tokens=7168)).exit_code == 0
    assert planned(tmp_path, job(folder, pass_tokens=8192)).exit_code == 2
    assert planned(tmp_path, job(folder, pass_tokens=16384, recompute=True)).exit_code == 0
    assert planned(tmp_path, job(folder, pass_tokens=8192, fused_kernels=True)).exit_code == 0


def test_states_that_cannot_fit_are_refused_with_the_smallest_device(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        foreseen(job(folder, device=24))
    assert "roles.actor.total: 2 given" in refused.value.message
    assert "for optimizer; a device has 24.0 GiB" in refused.value.message
    size = int(refused.value.hint.partition("devices of ")[2].partition(" ")[0])
    assert foreseen(job(folder, device=size, pass_tokens=1024)).lines
    with pytest.raises(ConfigError):
        foreseen(job(folder, device=size - 1, pass_tokens=1024))


def test_little_room_is_a_warning(folder: Path) -> None:
    (said,) = foreseen(job(folder, pass_tokens=7168)).findings
    assert "passes of 7168 tokens leave " in said
    assert "Give 5120 or less" in said
    assert not foreseen(job(folder)).findings


def test_auto_takes_what_fits(folder: Path) -> None:
    found = foreseen(job(folder, pass_tokens="auto")).lines[0]
    assert "passes of 5120 tokens (the largest that fits" in found.of
    assert found.verdict == "fits"
    larger = foreseen(job(folder, pass_tokens="auto", device=139)).lines[0]
    assert "passes of 15360 tokens" in larger.of


def test_what_is_not_known_is_said_and_not_refused(tmp_path: Path, folder: Path) -> None:
    found = foreseen(job(folder, device=None, pass_tokens=65536))
    assert found.lines[0].needs is not None
    assert not any(line.verdict for line in found.lines)
    assert foreseen(job(folder, device=None, pass_tokens="auto")).lines[0].needs is None
    elsewhere = foreseen(job(tmp_path / "elsewhere"))
    assert {line.of.partition(":")[0] for line in elsewhere.lines} == {"not known"}
    (folder / "config.json").write_text(
        json.dumps({**config_of(SHAPE, eos_id=1), "model_type": "gemma3_text"})
    )
    assert {line.of.partition(":")[0] for line in foreseen(job(folder)).lines} == {"not known"}


def test_this_machine_is_asked_where_the_job_runs_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 79 * GIB)
    assert foreseen(job(folder, device=None)).device_bytes is None
    assert foreseen(job(folder, device=None), here=True).device_bytes == 79 * GIB
    with pytest.raises(ConfigError, match="At most 7168 fits"):
        foreseen(job(folder, device=None, pass_tokens=16384), here=True)


def test_engines_on_the_actors_devices_are_counted(folder: Path) -> None:
    spec = job(folder)
    spec["rollouts"] = {**spec["rollouts"], "local": 2}
    alone, shared = (foreseen(one).lines[0] for one in (job(folder), spec))
    assert alone.needs is not None
    assert shared.needs is not None
    assert shared.needs - alone.needs == pytest.approx(8 * GIB, rel=0.05)
    spec["config"]["fsdp"]["pass_tokens"] = "auto"
    assert "passes of 4096 tokens (the largest that fits" in foreseen(spec).lines[0].of


def test_passes_by_auto_beside_those_of_another_role_are_refused(folder: Path) -> None:
    """Each would be as large as the other leaves room for."""
    spec = beside_a_reference(folder, pass_tokens="auto")
    with pytest.raises(ConfigError, match=r"reference shares the devices of actor") as refused:
        foreseen(spec)
    spec["config"]["fsdp"]["pass_tokens"] = int(refused.value.hint.split()[1].rstrip("."))
    assert foreseen(spec).lines[0].verdict == "fits"


def beside_a_reference(folder: Path, **fsdp: Any) -> dict[str, Any]:
    spec = job(folder, **fsdp)
    spec["config"]["loss"] = {"kl_loss_coef": 0.001}
    spec["roles"] = {**JOB["roles"], "reference": {"total": 2}}
    return {**spec, "affinity": {"collocate": [["actor", "reference"]]}}


@pytest.mark.parametrize(
    ("device", "tokens", "does", "again"),
    [
        (139, 16384, "kept (", False),
        (139, 32768, "computed again (", True),
        (79, 8192, "kept (", False),
        (79, 16384, "computed again (", True),
    ],
)
def test_plan_says_whether_activations_are_kept_and_both_sums(
    folder: Path, device: int, tokens: int, does: str, again: bool
) -> None:
    own = {"recompute": "auto", "fused_kernels": True}
    line = foreseen(job(folder, device=device, pass_tokens=tokens, **own)).lines[0]
    assert f"passes of {tokens} tokens; activations {does}" in line.of
    assert line.verdict == "fits"
    sums = [
        foreseen(job(folder, device=999, pass_tokens=tokens, fused_kernels=True, recompute=on)).lines[0].needs
        for on in (False, True)
    ]
    assert line.needs == sums[again]
    other = sums[not again]
    assert other is not None
    assert f"{other / GIB:.1f} GiB if {'kept' if again else 'computed again'}" in line.of
    if again:
        most = int(line.of.partition("fits up to ")[2].split()[0])
        kept = foreseen(job(folder, device=device, pass_tokens=most, **own)).lines[0]
        assert "activations kept" in kept.of
        assert (
            "computed again ("
            in foreseen(job(folder, device=device, pass_tokens=most + 1024, **own)).lines[0].of
        )


def test_what_shares_the_device_is_counted_before_activations_are_kept(folder: Path) -> None:
    own = {"recompute": "auto", "fused_kernels": True, "pass_tokens": 8192}
    assert "activations kept" in foreseen(job(folder, **own)).lines[0].of
    shared = foreseen(beside_a_reference(folder, **own)).lines
    assert "activations computed again" in shared[0].of
    assert "reference" in shared[0].of
    for device, does in ((79, "computed again"), (84, "kept")):
        spec = job(folder, device=device, **own)
        local = foreseen({**spec, "rollouts": {**spec["rollouts"], "local": 2}}).lines[0]
        assert f"activations {does} (" in local.of


def test_without_a_devices_size_both_sums_are_said(folder: Path) -> None:
    line = foreseen(job(folder, device=None, recompute="auto")).lines[0]
    assert line.needs is None
    kept, again = (foreseen(job(folder, device=None, recompute=on)).lines[0].needs for on in (False, True))
    assert kept is not None
    assert again is not None
    assert f"{kept / GIB:.1f} GiB with activations kept, {again / GIB:.1f} GiB computed again" in line.of


def test_an_engine_without_room_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--mem-fraction-static 0\.05"):
        foreseen(
            {**job(folder), "rollouts": {"engine": "sglang", "engine_args": ["--mem-fraction-static=0.05"]}}
        )


def test_a_small_decoder_has_no_table() -> None:
    spec = {
        **JOB,
        "config": {
            **JOB["config"],
            "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16},
        },
    }
    assert foreseen({**spec, "rollouts": {}}) == memory.Foreseen()


def test_a_machine_with_too_little_memory_or_disk_for_checkpoints_is_warned_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(memory: int, free: int) -> list[str]:
        monkeypatch.setattr(memory_module.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.get)
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(memory_module.shutil, "disk_usage", lambda place: usage)
        return [one.partition(":")[0] for one in foreseen(job(folder), here=True).findings]

    memory_module = memory
    told = {line.where: line.needs or 0 for line in foreseen(job(folder)).lines if line.role == "actor"}
    host = 2 * told["host, each rank"] + told["host, first rank besides"]
    disk = told["disk"]
    assert found(host, disk) == []
    assert found(host - 1, disk) == ["roles.actor"]
    assert found(host, disk - 1) == ["run.checkpoint_every"]
    assert not foreseen(job(folder), here=False).findings


def agents_job(folder: Path, max_tokens: int) -> dict[str, Any]:
    """Its turns are of at most 1024 tokens, its sessions of more."""
    given = job(folder)
    agent = {"function": "my.agents:solve", "max_tokens": max_tokens}
    roles = {"actor": {"total": 2}, "rollout": {"total": 2}, "agent": {"total": 2}}
    return {**given, "config": {**given["config"], "agent": agent}, "roles": roles}


def test_a_row_of_a_session_is_as_long_as_the_session(folder: Path) -> None:
    """And not as one of its turns: a pass has to take the longest row."""
    assert foreseen(agents_job(folder, 4096)).lines == foreseen(job(folder)).lines
    with pytest.raises(ConfigError, match=r"for activations; a device has 79\.0 GiB"):
        foreseen(agents_job(folder, 16384))
