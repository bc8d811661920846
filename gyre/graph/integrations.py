"""Which of Gyre's own classes fill a recipe's roles where the job names none, and what they ask of the job together.

A model is a folder's where the job says `config.megatron.model_path` and its actor is Megatron's; it is the small
decoder elsewhere. Critic and reference hold the actor's model, so by default they are Megatron's with a folder's.

This module knows its classes by name: it must not import them. What else is wrong with their sections of `config` they
say themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config import Entrypoint, JobSpec
from gyre.errors import GraphError

_TORCH, _MEGATRON = "gyre.workloads.torch", "gyre.workloads.megatron"
_OF_A_FOLDER = {
    "critic": Entrypoint(module=f"{_MEGATRON}.critic", name="MegatronCritic"),
    "reference": Entrypoint(module=f"{_MEGATRON}.reference", name="MegatronReference"),
}


def default_with(spec: JobSpec, role: str, plain: Entrypoint) -> Entrypoint:
    """The class of a role that the job names none for; `plain` is the recipe's."""
    if role in _OF_A_FOLDER and model_path(spec) and _is(spec, "actor", _MEGATRON, "MegatronActor"):
        return _OF_A_FOLDER[role].model_copy()
    return plain.model_copy()


def model_path(spec: JobSpec) -> str:
    """The folder of the model that is trained; "" where it is the small decoder."""
    return str(_section(spec.config, "megatron").get("model_path") or "")


def reads_a_folder(spec: JobSpec, role: str) -> bool:
    """Whether the role's model is the folder's, which it reads by itself: nobody has to give it the first policy."""
    return bool(model_path(spec)) and (
        _is(spec, role, _MEGATRON, "MegatronReference")
        or any(_is(spec, role, *known) for known in ((_TORCH, "TorchCritic"), (_MEGATRON, "MegatronCritic")))
    )


def check_integrations(spec: JobSpec) -> None:
    """Raises GraphError where Gyre's own classes do not go together, or not with the numbers of the job."""
    path, section = model_path(spec), _section(spec.config, "megatron")
    replica = _count(section, "tensor_parallel") * _count(section, "pipeline_parallel")
    for role, name in (("actor", "MegatronActor"), ("critic", "MegatronCritic")):
        total = spec.roles[role].total if role in spec.roles else 0
        if _is(spec, role, _MEGATRON, name) and total % replica:
            raise GraphError(
                f"roles.{role}.total: {total} is not a multiple of config.megatron's tensor_parallel x "
                f"pipeline_parallel ({replica}), the ranks that hold one copy of the model.",
                hint=f"Take {-(-total // replica) * replica}.",
            )
    if path and _is(spec, "actor", _TORCH, "TorchActor") and reads_a_folder(spec, "critic"):
        raise GraphError(
            f"roles.critic: its model is that of config.megatron.model_path ({path}), but the actor is TorchActor, "
            "which trains the small decoder.",
            hint='Give the actor the class "gyre.workloads.megatron:MegatronActor", or leave model_path out.',
        )
    of_a_folder = path and _is(spec, "actor", _MEGATRON, "MegatronActor")
    if of_a_folder and _is(spec, "reference", _TORCH, "TorchReference"):
        raise GraphError(
            f"roles.reference: TorchReference holds the small decoder, but the actor's model is that of {path}.",
            hint="Leave the reference's class out: it is then MegatronReference.",
        )
    _check_losses(spec)
    _check_mini_batches(spec)


def _check_losses(spec: JobSpec) -> None:
    estimator = _section(spec.config, "loss").get("adv_estimator")
    if estimator == "gae" and spec.recipe is not None and "critic" not in spec.roles:
        raise GraphError(
            f"config.loss.adv_estimator: 'gae' needs the values of a critic, which recipe {spec.recipe!r} has not.",
            hint='Take the recipe "ppo".',
        )


def _check_mini_batches(spec: JobSpec) -> None:
    """All updates of a pass train equally many groups."""
    batch = spec.run.prompts_per_step
    for path, config in (
        ("config.optim", _section(spec.config, "optim")),
        ("config.critic.optim", _section(_section(spec.config, "critic"), "optim")),
    ):
        count = _count(config, "mini_batches")
        if batch % count:
            raise GraphError(
                f"{path}.mini_batches: {count} does not divide run.prompts_per_step ({batch}), so the optimizer steps "
                "of a pass would train unequal numbers of groups.",
                hint=f"Take a divisor of {batch}.",
            )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What is no mapping is refused by whoever reads it."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _count(section: Mapping[str, Any], key: str) -> int:
    """A count of at least 1; what is none is refused by whoever reads it."""
    found = section.get(key)
    return found if isinstance(found, int) and found > 0 else 1


def _is(spec: JobSpec, role: str, package: str, name: str) -> bool:
    """Whether the role's class is that one of ours, by whichever module it was named."""
    given = spec.roles[role].entrypoint if role in spec.roles else None
    if given is None or given.name != name:
        return False
    return given.module == package or given.module.startswith(f"{package}.")
