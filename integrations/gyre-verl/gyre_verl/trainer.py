"""verl's trainer over a fleet: no server on its own devices, and its weights published after each step."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer

from gyre_verl.client import GyreClient
from gyre_verl.door import Door


@register_trainer("gyre")
class GyreTrainer(PPOTrainer):
    """Versions of the fleet only grow, and verl's steps begin again with each run: a version is `base` and the step.
    A run that is resumed, from a step that was published already, gets a new base."""

    _enable_hybrid_replicas = False

    def __init__(self, config: Any) -> None:
        self._door = Door.of(config)
        self._base = self._since = 0
        super().__init__(config)

    def on_init_end(self) -> None:
        newest = self._door.policies()["newest"]
        self._base = 0 if newest is None else max(0, newest + 1 - self.global_steps)
        self._since = self._base + self.global_steps
        self._publish()

    def get_llm_client(self) -> GyreClient:
        return GyreClient(self.config, self._door, base=self._base, since=self._since)

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self.config.trainer.v1.gyre.get("num_warmup_batches", 1))

    def on_sample_end(self) -> None:
        """Sampling goes on: the fleet's devices are not the trainer's."""

    def on_step_end(self) -> None:
        self._pending_sync_metrics = self._publish()

    def _publish(self) -> dict[str, float]:
        """The weights as they are become the version of this step. verl adds what is returned to the step's metrics."""
        version = self._base + self.global_steps
        told = ray.get(self.actor_rollout_wg.update_weights(global_steps=version, mode="gyre"))
        first: dict[str, Any] = next(one for one in told if one)
        self._door.publish(version, first.pop("gyre/told"))
        return {**first, "gyre/version": version}
