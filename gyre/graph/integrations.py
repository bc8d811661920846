"""Gyre's own classes: which of them fill the roles that the job names no class for, and what they require of the job.

The model comes from a folder if the job gives `config.model_path`; otherwise it is the small decoder. Critic and
reference hold the actor's model, so with a folder and Megatron's or FSDP2's actor they are of that back end by default.

This module must not import those classes: their back ends' records name them.
"""

from __future__ import annotations

from gyre.config import Entrypoint, JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError, GraphError
from gyre.graph.backends import Backend, back_ends, backend_named


def default_with(spec: JobSpec, role: str, plain: Entrypoint) -> Entrypoint:
    """Returns the class of a role that the job names none for; `plain` is the recipe's default. Raises ConfigError if
    the job's own back end cannot be loaded."""
    named = backend_named(spec.backend, spec.python_path) if spec.backend is not None else None
    if named is not None and (not named.name or (named.shards and role == "actor")):
        return named.class_of(role) or plain.model_copy()
    if role in ("critic", "reference") and model_path(spec):
        for one in back_ends():
            if one.shards and (one == named or _has(spec, "actor", one)):
                return one.class_of(role) or plain.model_copy()
    return plain.model_copy()


def back_end_for(spec: JobSpec, role: str) -> Backend | None:
    """The one of Gyre's back ends whose class fills the role; None where none has."""
    return next((one for one in back_ends() if _has(spec, role, one)), None)


def _has(spec: JobSpec, role: str, back_end: Backend) -> bool:
    """Whether the role's class is the one that a back end has for it."""
    found = back_end.class_of(role)
    return found is not None and _is(spec, role, back_end.package, found.name)


def _is_of(spec: JobSpec, role: str) -> bool:
    return back_end_for(spec, role) is not None


def model_path(spec: JobSpec) -> str:
    """Returns the folder of the model that is trained; "" for the small decoder."""
    return WorkloadSettings.read(spec.config).model_path


def reads_a_folder(spec: JobSpec, role: str) -> bool:
    """Whether the role reads its model from the folder by itself, so that nobody has to give it the first policy."""
    if not model_path(spec):
        return False
    if spec.backend is not None:
        named = backend_named(spec.backend, spec.python_path)
        if role in named.reads_model and spec.roles[role].entrypoint == named.class_of(role):
            return True
    own = back_end_for(spec, role)
    return own is not None and role in own.reads_model


def reads_sections(spec: JobSpec) -> bool:
    """Whether Gyre's own code reads the job's `config`, whose sections are then checked. A job with neither a recipe
    nor a class of Gyre's may put anything into `config`."""
    given = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
    return spec.recipe is not None or any(one.module.startswith("gyre.workloads.") for one in given)


def check_complete(spec: JobSpec) -> None:
    """Check that `config` has everything without a default: prompts, a model, learning rates. `spec` is a compiled
    job's. Raises ConfigError, one sentence, for what is missing."""
    settings = WorkloadSettings.read(spec.config)
    prompts = spec.run.data or settings.data or settings.task
    if not prompts and _is(spec, "trainer", "gyre.workloads.trainer", "GraphTrainer"):
        raise ConfigError(
            "config.data: is missing, so the job has no prompts.",
            hint="Prepare a data set with `gyre data prepare` and give config.data.path; or give config.task, or a "
            "class of your own as run.data.",
        )
    for role, where, optim in (
        ("actor", "config.optim", settings.optim),
        ("critic", "config.critic.optim", settings.critic.optim),
    ):
        if not _is_of(spec, role):
            continue
        if not (settings.model or settings.model_path):
            raise ConfigError(
                f"config.model_path: is missing, so the {role} has no model.",
                hint="Give a model's folder as config.model_path, or the shape of a small decoder as config.model.",
            )
        if optim.lr is None:
            raise ConfigError(
                f"{where}.lr: is missing, and a learning rate has no default.",
                hint=f"Give {where}.lr: for a pretrained model often {'1e-6' if role == 'actor' else '1e-5'}.",
            )


def check_integrations(spec: JobSpec) -> None:
    """Raises GraphError if Gyre's own classes do not go together, or do not fit the numbers of the job."""
    settings = WorkloadSettings.read(spec.config)
    for role in ("actor", "critic"):
        own = back_end_for(spec, role)
        total = spec.roles[role].total if role in spec.roles else 0
        replica = own.copy_of(settings) if own is not None else 1
        if own is not None and total % replica:
            raise GraphError(
                f"roles.{role}.total: {total} is not a multiple of config.{own.section}'s tensor_parallel x "
                f"pipeline_parallel ({replica}), the ranks that hold one copy of the model.",
                hint=f"Take {-(-total // replica) * replica}.",
            )
    _check_losses(spec, settings)
    _check_groups(spec, settings)
    _check_mini_batches(spec, settings)


def _check_losses(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Check that every term of the loss has the role that it needs."""
    loss = settings.loss
    if loss.estimator is not None and loss.estimator.by_values and "critic" not in spec.roles:
        raise GraphError(
            f"config.loss.adv_estimator: {loss.adv_estimator!r} needs the values of a critic, which recipe "
            f"{spec.recipe!r} has not.",
            hint='Take the recipe "ppo".',
        )
    if "reference" not in spec.roles and settings.lora is None:
        for key in ("kl_loss_coef", "kl_reward_coef"):
            if getattr(loss, key) > 0:
                raise GraphError(
                    f"config.loss.{key}: {getattr(loss, key):g} given, but the job has no reference role, whose "
                    "log-probs the KL divergence is taken to.",
                    hint=f"Add the role reference, or set {key} to 0.",
                )


def trains_by_section(spec: JobSpec) -> bool:
    """Whether the actor is one of Gyre's, which trains as `config.loss` and `config.optim` say."""
    return _is_of(spec, "actor")


def _check_groups(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Check that the samples of a group can differ in their advantage."""
    name, estimator = settings.loss.adv_estimator, settings.loss.estimator
    if estimator is None or not estimator.compares or estimator.alone:
        return
    if settings.sampling.n == 1 and trains_by_section(spec):
        raise GraphError(
            f"config.sampling.n: 1 given, but {name} compares the samples of a group: with one sample every advantage "
            "is 0, and nothing is learnt.",
            hint="Give 2 or more, 8 for example; or take the recipe ppo, whose baseline is a critic.",
        )


def _check_mini_batches(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Check that all updates of a pass train equally many groups."""
    batch = spec.run.prompts_per_step
    for path, optim in (("config.optim", settings.optim), ("config.critic.optim", settings.critic.optim)):
        count = optim.mini_batches
        if batch % count:
            raise GraphError(
                f"{path}.mini_batches: {count} does not divide run.prompts_per_step ({batch}), so the optimizer steps "
                "of a pass would train unequal numbers of groups.",
                hint=f"Take a divisor of {batch}.",
            )


def _is(spec: JobSpec, role: str, package: str, name: str) -> bool:
    """Whether the role's class is this class of Gyre's, by whichever module it was named."""
    given = spec.roles[role].entrypoint if role in spec.roles else None
    if given is None or given.name != name:
        return False
    return given.module == package or given.module.startswith(f"{package}.")
