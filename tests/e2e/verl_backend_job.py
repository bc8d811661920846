"""A job on verl's workers, once undisturbed and once with a rank killed, in verl's environment. Run as a script, it
submits both to a Ray cluster of its own:

    python tests/e2e/verl_backend_job.py FOLDER     FOLDER/model is a model, FOLDER/home gets the jobs
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gyre.workloads import BaseWorkload

STEPS, PROMPTS = 4, 8
ENDS_WITHIN_S = 200.0
LOOK_S = 0.05


class TokenSum(BaseWorkload):
    """A reward that differs between samples of an untrained model. With `config.gated` nothing beyond step 2 is scored
    before there is the file `gate` in the job's directory."""

    def score(self, groups: list[Any], *, step: int) -> list[Any]:
        while self.config.get("gated") and step > 2 and not (self.context.directory / "gate").exists():
            self.report_progress()
            time.sleep(LOOK_S)
        for group in groups:
            for sample in group.samples:
                sample.reward = float(sample.token_ids.sum() % 5) / 4
        return groups


def job(folder: Path, *, gated: bool) -> Any:
    from gyre.api import RLJobBuilder

    builder = RLJobBuilder().node_num(1).device_per_node(8).device_type("CPU").recipe("grpo").backend("verl")
    builder = builder.config(
        {
            "seed": 3,
            "model_path": str(folder / "model"),
            "task": {"digits": 1},
            "sampling": {"n": 4, "max_new_tokens": 4},
            "optim": {"lr": 1e-3},
            "verl": {"pass_tokens": 128},
            "collective_timeout_s": 60.0,
            "gated": gated,
        }
    )
    builder = builder.run(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        groups_per_firing=4,
        groups_per_micro_batch=4,
        checkpoint_every=1,
        evaluate_every=0,
    )
    builder = builder.rollouts(max_running=64, kv_tokens=4096, report_interval_s=0.1).actor().total(2)
    spec = builder.rollout().total(1).reward("verl_backend_job", "TokenSum").end().build().spec
    cpu = {key: value for key, value in os.environ.items() if key.startswith(("VERL_", "HF_HUB_OFFLINE"))}
    return spec.model_copy(update={"env": cpu, "python_path": [str(Path(__file__).parent)]})


def ended(handle: Any) -> dict[str, Any]:
    from gyre.rollouts.trainer.sample_ledger import account_of
    from gyre.store import open_store

    view = handle.wait(ENDS_WITHIN_S)
    with open_store(handle.store_url) as store:
        account = account_of(store.ledger(handle.job_id))
    handle.close()
    return {
        "phase": view["job"]["phase"],
        "result": view["job"]["result"],
        "trained": account.trained,
        "lost": list(account.lost),
        "twice": list(account.trained_twice),
        "incidents": [[one["vertex"], one["scope"]] for one in view["incidents"]],
    }


def main() -> None:
    from gyre.api.home import home
    from gyre.api.ray_session import connect, disconnect
    from gyre.api.submit import submit_job
    from gyre.testing.processes import ProcessFaults

    folder = Path(sys.argv[1])
    place = folder / "home"
    address = connect("local", start_local=True, place=home(place))
    try:
        began = time.monotonic()
        calm = ended(submit_job(job(folder, gated=False), "calm", ray_address=address, home_path=place))
        calm["seconds"] = time.monotonic() - began
        handle = submit_job(job(folder, gated=True), "killed", ray_address=address, home_path=place)
        faults = ProcessFaults(handle)
        faults.reach_step(2)
        (victim,) = faults.kill("actor-1")
        replaced = faults.replaced(victim, timeout_s=ENDS_WITHIN_S)
        (home(place).job_directory(handle.job_id) / "gate").touch()
        killed = ended(handle)
    finally:
        disconnect()
    killed["replaced"] = replaced.pid != victim.pid
    (folder / "job.json").write_text(json.dumps({"calm": calm, "killed": killed}))


if __name__ == "__main__":
    main()
