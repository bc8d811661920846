"""Settings with which a job cannot learn, or with which it is not seen whether it learns."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec
from gyre.config.plugins import ENGINE
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph import is_instance, rollouts_of
from gyre.graph.backends import back_end_of, back_ends
from gyre.graph.integrations import model_path, trains_by_section
from gyre.rollouts.engines import known_engine


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    settings = WorkloadSettings.read(spec.config)
    if settings.lora is not None:
        _check_adapter(spec, settings)
    if spec.recipe is None:
        return
    run, sampling, loss, optim = spec.run, settings.sampling, settings.loss, settings.optim
    _check_lengths(spec, settings)
    _check_held_out(spec, settings)
    if run.evaluate_every == 0:
        yield "no held-out evaluation: run.evaluate_every is 0, so only the training reward shows whether it learns."
    elif run.evaluate_every > run.steps:
        yield (
            f"no held-out evaluation but the first policy's: run.evaluate_every is {run.evaluate_every}, and run.steps "
            f"{run.steps}."
        )
    if not trains_by_section(spec):
        return
    estimator = loss.estimator
    if sampling.n == 1 and estimator is not None and estimator.alone:
        yield (
            f"config.sampling.n: 1 given, so there are no other samples for {loss.adv_estimator}'s baseline, which is "
            "0: it is plain REINFORCE. Give 2 or more."
        )
    if sampling.temperature == 0 and sampling.n > 1 and estimator is not None and estimator.compares:
        problem = (
            f"config.sampling.temperature: 0 given, so the {sampling.n} samples of a group are equal, earn the same, "
            f"and have no advantage by {loss.adv_estimator}: nothing is learnt."
        )
        engine = known_engine(spec.rollouts.engine)
        if engine is not None and engine.repeats:  # others' samples may differ
            raise ConfigError(problem, hint="Give 1.0, or another temperature above 0.")
        yield problem
    if loss.clip_ratio_low == 0 and loss.clip_ratio_high == 0 and optim.updates > 1:
        yield "config.loss.clip_ratio_low, clip_ratio_high: both are 0, so that only the first update of a step learns."
    if "warmup_steps" in optim.model_fields_set and optim.warmup_steps > run.steps:
        yield (
            f"config.optim.warmup_steps: {optim.warmup_steps} given, but the job has {run.steps} steps (run.steps), so "
            "that its learning rate never comes to config.optim.lr."
        )
    for key, at in (("config.optim", optim), ("config.critic.optim", settings.critic.optim)):
        if at.decay_steps and at.final_lr_ratio == 0 and at.decay_steps < run.steps:
            yield (
                f"{key}.decay_steps: from step {at.decay_steps} on of {run.steps} the learning rate is 0 "
                f"({key}.final_lr_ratio), and nothing is learnt."
            )
        if at.lr is not None and at.lr > _LARGEST_USUAL_RATE:
            yield f"{key}.lr: {at.lr:g} is beyond what AdamW bears; usual are 1e-6 to 1e-3."


def _check_adapter(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Raises ConfigError unless the job can train an adapter and serve it."""
    engines = sorted({rollouts_of(spec, name).engine for name in spec.roles if is_instance(spec, name)})
    others = [engine for engine in engines if engine not in ENGINE.built_in]
    able = [one for one in back_ends() if one.trains_adapters]
    judges = settings.loss.kl_reward_coef > 0 and "critic" in spec.roles
    for is_wrong, problem, hint in (
        (
            not _trains_adapters(spec),
            f"only {' or '.join(one.writer for one in able)} train an adapter.",
            f"Give backend: {' or '.join(one.name for one in able)}, or leave config.lora out.",
        ),
        (
            not settings.model_path,
            "there is no model for an adapter to stand beside: config.model_path is missing.",
            "Give a model's folder as config.model_path, or leave config.lora out.",
        ),
        (
            bool(others),
            f"it is not known whether the engine {'' if not others else others[0]} takes adapters.",
            "Take rollouts.engine: embedded or sglang.",
        ),
        (
            "reference" in spec.roles,
            "the role reference would hold the model a second time.",
            "Leave the role out: the actor's model without its adapter is the reference.",
        ),
        (
            judges,
            "config.loss.kl_reward_coef is above 0, and a critic does not hear what the reference says.",
            "Take config.loss.kl_loss_coef.",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"config.lora: given, but {problem}", hint=hint)


def _trains_adapters(spec: JobSpec) -> bool:
    """By the class of its actor, or by the back end that it names."""
    entrypoint = spec.roles["actor"].entrypoint if "actor" in spec.roles else None
    own = back_end_of(entrypoint.module) if entrypoint is not None else None
    return any(one.trains_adapters for one in back_ends() if one == own or one.name == spec.backend)


_LARGEST_USUAL_RATE = 0.1
_CERTAINLY_THERE = 0.5
"""Share of the held-out problems that are expected, below which it is not counted how many there are."""


def _check_held_out(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Raises ConfigError if the arithmetic task has fewer held-out problems than an evaluation asks for."""
    task, run = settings.task, spec.run
    if task is None or task.name != "arithmetic" or settings.data or run.data or not run.evaluate_every:
        return
    about = len(set(task.operators)) * 100**task.digits / task.held_out_every
    wanted = run.held_out or 1
    if wanted < _CERTAINLY_THERE * about:
        return
    from gyre.workloads.tasks.arithmetic import ArithmeticTask

    try:
        ArithmeticTask(spec.config).held_out(wanted)
    except ConfigError as error:
        raise ConfigError(
            f"run.held_out: {wanted} given, but config.task holds out about {about:.0f} problems.",
            hint="Lower run.held_out or config.task.held_out_every, or raise config.task.digits.",
        ) from error


def _check_lengths(spec: JobSpec, settings: WorkloadSettings) -> None:
    """Raises ConfigError if the small decoder has no room for a task's prompt and the longest answer: rollouts refuse
    such a request. Prompts of a data set are looked at in `data`."""
    model, new = settings.model, settings.sampling.max_new_tokens
    if model is None or model_path(spec) or not trains_by_section(spec):
        return
    prompt, of = 1, "a prompt"
    arithmetic = settings.task is not None and settings.task.name == "arithmetic"
    if settings.task is not None and arithmetic and settings.data is None and spec.run.data is None:
        prompt = settings.task.prompt_tokens
        of = f"the task's prompts of {prompt} tokens"
    room, key = model.max_positions, "config.model.max_positions"
    own = spec.rollouts.context_length
    if own is not None and own < room:
        room, key = own, "rollouts.context_length"
    if prompt >= room:
        raise ConfigError(
            f"{key}: {room} given, which leaves no room for an answer beside {of}.",
            hint=f"Raise it to {prompt + 1} or more.",
        )
    if settings.agent is not None:
        check_session_length(settings.agent.max_tokens, prompt, of, room, key)
    elif prompt + new > room:
        raise ConfigError(
            f"config.sampling.max_new_tokens: {new} given, which with {of} is more than {key}, {room}.",
            hint=f"Give at most {room - prompt}, or raise {key} to {prompt + new}.",
        )


def check_session_length(longest: int, prompt: int, of: str, room: int | None, key: str) -> None:
    """Raises ConfigError where sessions of at most `longest` tokens have no room for an answer beside `of`, prompts of
    `prompt` tokens, or are more than the `room` of `key`; None is room for any."""
    if prompt >= longest:
        raise ConfigError(
            f"config.agent.max_tokens: {longest} given, which leaves no room for an answer beside {of}.",
            hint=f"Raise it to {prompt + 1} or more: a session has its prompt, its answers and what its tools say.",
        )
    if room is not None and longest > room:
        raise ConfigError(
            f"config.agent.max_tokens: {longest} given, which is more than {key}, {room}.",
            hint=f"Give at most {room}: a row of a session has as many tokens.",
        )
