"""`gyre-verl`: verl's `main_ppo` with a fleet. It takes verl's own overrides, and

    fleet.url, fleet.key   the fleet's door, and a key with the scopes generate and publish
    fleet.folder            where policy versions are written: a disk that the fleet's manager has too
    fleet.weights           `folder`, or `plane`: the first rank serves versions itself, and there is no fleet.folder
    fleet.bind, fleet.ports where it serves them, if not as the fleet's `weights` say
    fleet.num_warmup_batches, fleet.patience_s

    gyre-verl fleet.url=http://10.0.0.5:7171 fleet.key=$KEY fleet.folder=/shared/policies \\
        actor_rollout_ref.model.path=/models/Qwen3-0.6B data.train_files=... algorithm.adv_estimator=grpo
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

PREFIX = "fleet."


def overrides_of(given: Sequence[str]) -> list[str]:
    """verl's overrides: those that a fleet needs, and the user's after them, so that they win. Raises SystemExit."""
    own = {}
    theirs = []
    for one in given:
        key, is_set, value = one.partition("=")
        if key.startswith(PREFIX) and is_set:
            own[key.removeprefix(PREFIX)] = value
        else:
            theirs.append(one)
    weights = own.pop("weights", "folder")
    if weights not in ("folder", "plane"):
        raise SystemExit(f"gyre-verl: {PREFIX}weights={weights}: expected folder or plane.")
    needed = ("url", "key", "folder") if weights == "folder" else ("url", "key")
    missing = [key for key in needed if not own.get(key)]
    if missing:
        raise SystemExit(f"gyre-verl: {PREFIX}{missing[0]} is not given. See gyre-verl's README.")
    place = {key: own.pop(key) for key in ("folder", "bind", "ports") if key in own}
    if weights == "plane":
        if "folder" in place:
            raise SystemExit(f"gyre-verl: {PREFIX}folder is of {PREFIX}weights=folder: leave one out.")
        place |= {key: own[key] for key in ("url", "key", "patience_s") if key in own}
    elif strange := [key for key in ("bind", "ports") if key in place]:
        raise SystemExit(f"gyre-verl: {PREFIX}{strange[0]} is of {PREFIX}weights=plane.")
    model = given_last(theirs, "actor_rollout_ref.model.path")
    if not model:
        raise SystemExit("gyre-verl: actor_rollout_ref.model.path is not given.")
    rollout = "actor_rollout_ref.rollout"
    engine = f"+{rollout}.checkpoint_engine.engine_kwargs.gyre"
    return [
        f"{rollout}.name=gyre",
        "actor_rollout_ref.hybrid_engine=False",
        f"{rollout}.nnodes=1",
        f"{rollout}.checkpoint_engine.backend=gyre",
        f"{rollout}.checkpoint_engine.custom_backend_module=gyre_verl.weights",
        f"{engine}.weights={weights}",
        f"{engine}.model_path={model}",
        f"{engine}.dtype={given_last(theirs, f'{rollout}.dtype') or 'bfloat16'}",  # verl's own default
        *(f"{engine}.{key}={value}" for key, value in place.items()),
        "trainer.v1.trainer_mode=gyre",
        *(f"+trainer.v1.gyre.{key}={value}" for key, value in own.items()),
        *theirs,
    ]


def given_last(overrides: Sequence[str], key: str) -> str:
    """The value of the last override of this key, which wins; "" without one."""
    return next((one.partition("=")[2] for one in reversed(overrides) if one.startswith(f"{key}=")), "")


def task_runner() -> Any:
    """verl's task runner, which knows the trainer of a fleet. It runs in a process of its own."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    base = TaskRunnerV1.__ray_metadata__.modified_class

    class GyreTaskRunner(base):  # type: ignore[misc, valid-type]
        def run(self, config: Any) -> None:
            import gyre_verl.trainer  # noqa: F401 - registers it

            super().run(config)

    return ray.remote(GyreTaskRunner)


def main(arguments: Sequence[str] | None = None) -> None:
    import hydra
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    given = overrides_of(sys.argv[1:] if arguments is None else arguments)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", given)
    auto_set_device(config)
    validate_config(
        config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    run_ppo(config, task_runner_class=task_runner())


if __name__ == "__main__":
    main()
