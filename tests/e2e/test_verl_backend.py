"""verl's workers as a Gyre back end, in verl's environment on CPUs: `verl_backend_cases.py` and `verl_backend_job.py`
have what is run there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gyre.workloads.addresses import free_port
from tests.e2e.verl_job import CPU_ENVIRONMENT, PYTHON, ROOT
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint

HERE = Path(__file__).parent
CASE_S, JOB_S = 240.0, 560.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verl,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-long PART=verl makes verl's environment"),
]

QWEN3 = {**CONFIGS["qwen3"], "architectures": ["Qwen3ForCausalLM"]}


def run(folder: Path, case: str, ranks: int = 1) -> Any:
    """What the case saw, with a process for each rank."""
    port = str(free_port("127.0.0.1"))
    script = str(HERE / "verl_backend_cases.py")
    arguments = [[script, case, str(folder), str(rank), str(ranks), port] for rank in range(ranks)]
    logs = [folder / f"{case}-{rank}.log" for rank in range(ranks)]
    processes = [start(one, log) for one, log in zip(arguments, logs, strict=True)]
    try:
        codes = [process.wait(CASE_S) for process in processes]
    finally:
        for process in processes:
            stop(process)
    assert codes == [0] * ranks, [log.read_text()[-3000:] for log in logs]
    return json.loads((folder / f"{case}.json").read_text())


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GYRE_", "PYTHON"))
    }
    with open(log, "wb") as file:
        return subprocess.Popen(
            [str(PYTHON), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=kept | CPU_ENVIRONMENT,
            cwd=ROOT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_it_keeps_the_contract_of_an_actor(tmp_path: Path) -> None:
    run(tmp_path, "contract")


@pytest.mark.parametrize(("case", "ranks"), [("gradient", 1), ("gradient", 2), ("padded_gradient", 2)])
def test_a_steps_gradient_is_plain_torchs(tmp_path: Path, case: str, ranks: int) -> None:
    """Of two ranks with unequal shares, one of them empty."""
    found = run(tmp_path, case, ranks)
    assert found["tensors"] == 24
    assert max(found["relative"], found["worst"]) < 1e-5


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    written = run(tmp_path, "written", 2)
    run(tmp_path, "of_others")
    for name in ("damaged", "no-record", "lacks-a-file"):
        shutil.copytree(tmp_path / "two-ranks", tmp_path / name)
    flip(tmp_path / "damaged" / "__1_0.distcp")
    (tmp_path / "no-record" / "verl.json").unlink()
    (tmp_path / "lacks-a-file" / "__1_0.distcp").unlink()
    loaded = run(tmp_path, "loaded")
    assert [loaded[key] for key in ("digest", "all", "updates")] == [
        written[key] for key in ("digest", "all", "updates")
    ]
    assert loaded["third"] == pytest.approx(written["third"], rel=1e-4), "its next step is another one"
    problems = loaded["problems"]
    assert "__1_0.distcp is not what was written" in problems["damaged"]
    assert "there is no whole one" in problems["no-record"]
    assert "there is no whole one" in problems["nothing"]
    assert "__1_0.distcp" in problems["lacks-a-file"]
    assert "num_hidden_layers is 1 instead of 2" in problems["of-others"]


def flip(file: Path) -> None:
    """A bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_loss_that_raises_on_one_rank_spoils_the_step_on_all(tmp_path: Path) -> None:
    """verl would forget the gradient in silence, and let the other rank wait."""
    found = run(tmp_path, "loss_fails", 2)
    assert found["told"].startswith("LossFailed: ")
    assert "Call begin(1) on every rank" in found["again"]


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "not_finite", 2)["told"].startswith("NotFinite: ")


def test_what_verl_cannot_train_is_refused_in_a_sentence(tmp_path: Path) -> None:
    unnamed = write_checkpoint(tmp_path / "unnamed", CONFIGS["qwen3"])
    unknown = write_checkpoint(tmp_path / "unknown", QWEN3)
    (unknown / "config.json").write_text(json.dumps({**QWEN3, "model_type": "nosuch"}))
    lacking = write_checkpoint(tmp_path / "lacking", QWEN3)
    (lacking / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 3}))
    task = {"model": None, "task": {"digits": 1}, "warm_start": None}
    (tmp_path / "bad.json").write_text(
        json.dumps(
            {
                "strategy": {"verl": {"strategy": "fsdp"}},
                "key": {"verl": {"atention": "sdpa"}},
                "lora": {"lora": {"rank": 2}},
                "unnamed": {**task, "model_path": str(unnamed)},
                "unknown": {**task, "model_path": str(unknown)},
                "lacking": {**task, "model_path": str(lacking)},
                "absent": {**task, "model_path": str(tmp_path / "absent")},
            }
        )
    )
    told = run(tmp_path, "bad_input")
    assert "config.verl.strategy" in told["strategy"]
    assert "the strategy fsdp2 alone" in told["strategy"]
    assert "config.verl.atention: unknown key" in told["key"]
    assert "config.lora is not taken" in told["lora"]
    assert f"verl cannot load the model of {unnamed}: Expect only one architecture" in told["unnamed"]
    assert "model_type 'nosuch'" in told["unknown"]
    assert "model.layers.2" in told["lacking"]
    assert "is no folder on this machine" in told["absent"]


@pytest.mark.ray
@pytest.mark.kill
def test_a_killed_rank_changes_no_weight_of_a_job(short_home: Path) -> None:
    """Two ranks train a folder's model, the embedded engine serves it, and a rank is killed after the second step."""
    write_checkpoint(short_home / "model", QWEN3)
    process = start([str(HERE / "verl_backend_job.py"), str(short_home)], short_home / "job.log")
    try:
        code = process.wait(JOB_S)
    finally:
        stop(process)
    assert code == 0, (short_home / "job.log").read_text()[-3000:]
    found = json.loads((short_home / "job.json").read_text())
    assert found.keys() == {"calm", "killed"}
    for one in found.values():
        assert (one["phase"], one["result"]["steps"], one["trained"]) == ("succeeded", 4, 32)
        assert (one["lost"], one["twice"]) == ([], [])
    assert found["calm"]["incidents"] == []
    assert ["actor-1", "region"] in found["killed"]["incidents"]
    assert found["killed"]["replaced"], "nobody was killed"
    assert found["killed"]["result"]["digest"] == found["calm"]["result"]["digest"]
