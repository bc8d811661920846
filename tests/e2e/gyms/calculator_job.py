"""The job of `gyre demo --agent`, with rollouts of the `verifiers` environment `calculator_env` as its sessions. Run it
in the environment of `make gyms`:

    gyre run tests/e2e/gyms/calculator_job.py
"""

from pathlib import Path

from gyre.api.definition.rl_job import RLJob
from gyre.api.demo import demo_job

STEPS = 8

_demo = demo_job(steps=STEPS, agent=True).spec
_agent = {
    **{key: value for key, value in _demo.config["agent"].items() if key != "environment"},
    "function": "gyre.agents.adapters.verifiers:rollout",
    "options": {"env": "calculator_env", "env_options": {"form": "tools"}},
}
job = RLJob(
    _demo.model_copy(
        update={
            "name": "verifiers",
            "config": {**_demo.config, "agent": _agent},
            "python_path": [str(Path(__file__).parent)],
        }
    )
)
