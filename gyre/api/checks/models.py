"""The model folders that a job names, and which back ends can train them and engines serve them.

Each folder is read as far as `config.json` and the headers of its safetensors go; who takes it is said by
`gyre.models.support`. A class of the user's own may take any model, so only Gyre's are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gyre.api.checks.findings import WeightsDrawn, elsewhere
from gyre.api.checks.tiny_trial import problem_with
from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError, GraphError
from gyre.graph.backends import Backend, back_end_of
from gyre.graph.rollout_roles import check_context, is_instance, rollouts_of
from gyre.models.architecture import Architecture, read_architecture, read_config, vocabulary_of
from gyre.models.errors import ModelFolderError, NotComputed
from gyre.models.support import (
    OTHERS,
    Taker,
    differences,
    refuse_another,
    refuse_no_folder,
    weights_of,
    weights_of_another,
)
from gyre.models.tensor_names import HEAD, SCORE
from gyre.rollouts.engines import known_engine

_REWARD_MODELS = ("TorchRewardModel", "MegatronRewardModel", "FsdpRewardModel")
_OF_THE_POLICY = ("actor", "critic", "reference", "rollout")

PREPARED = "gyre.data.prepared:PreparedData"
MODEL, FIRST, REWARD = "config.model_path", "config.first_weights.path", "config.reward_model.path"


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    settings = WorkloadSettings.read(spec.config)
    if settings.model_path:
        yield from _check_policy(spec, settings, here=here)
    if settings.first_weights.path:
        yield from _check_first_weights(settings, here=here)
    reward = spec.roles.get("reward")
    if reward is not None and reward.entrypoint is not None and reward.entrypoint.name in _REWARD_MODELS:
        yield from _check_reward_model(spec, settings, here=here)


def _check_policy(spec: JobSpec, settings: WorkloadSettings, *, here: bool) -> Iterator[str]:
    folder, users = Path(settings.model_path), _users(spec)
    if note := _absent(folder, MODEL, here=here):
        yield note
        return
    if not users:  # of a class of the user's own, which takes what it takes
        _check_positions(spec, folder)
        return
    try:
        architecture = _read(folder, MODEL)
    except NotComputed as error:
        _check_another(spec, settings, folder, users, error)
        return
    for role, who in users:
        if problem := who.unfit(architecture):
            raise _unfit(folder, role, who, problem)
    for role, who in users:
        if isinstance(who, Backend) and role in ("actor", "critic"):
            for problem in who.unfit_layout(architecture, settings):
                raise GraphError(problem, hint=f"The model is that of {folder}.")
    held = _weights(folder, architecture, MODEL)
    _check_positions(spec, folder)
    _check_tokenizer(spec, folder, MODEL, architecture.vocab)
    if not held and not settings.first_weights.path:
        yield WeightsDrawn(
            f"{MODEL}: {folder} holds no weights, so they are drawn from config.seed: it is a model that has "
            "learnt nothing yet."
        )


def _check_another(
    spec: JobSpec,
    settings: WorkloadSettings,
    folder: Path,
    users: list[tuple[str, Taker]],
    error: NotComputed,
) -> None:
    """Check a model that Gyre's own decoder does not compute, for this reason. Raises ConfigError, which names the
    first role that does not take it."""
    if not any(who.by_transformers for _, who in users):
        raise error
    for role, who in users:
        if not who.by_transformers and OTHERS in who.lacks:
            raise _unfit(folder, role, who, error.message.partition("config.json: ")[2].rstrip("."))
    config = read_config(folder)
    try:
        refuse_another(folder, config)
        weights_of_another(Path(settings.first_policy), config)
    except ModelFolderError as other:
        raise ModelFolderError(f"{MODEL}: {other.message}", hint=other.hint) from None
    for role, who in users:
        if who.by_transformers and (problem := problem_with(folder, config, who.name)):
            raise _unfit(folder, role, who, problem.rstrip("."))
    _check_positions(spec, folder)
    vocab = vocabulary_of(folder)
    if vocab is not None:
        _check_tokenizer(spec, folder, MODEL, vocab)


def _unfit(folder: Path, role: str, who: Taker, problem: str) -> ConfigError:
    kind = "back end" if isinstance(who, Backend) else "engine"
    return ConfigError(
        f"{MODEL}: {folder / 'config.json'} does not fit the {kind} {who.name} of role {role}: {problem}.",
        hint="`gyre models` shows who takes which.",
    )


def _check_first_weights(settings: WorkloadSettings, *, here: bool) -> Iterator[str]:
    folder, model = Path(settings.first_weights.path), Path(settings.model_path)
    if note := _absent(folder, FIRST, here=here):
        yield note
        return
    try:
        architecture = _read(folder, FIRST)
    except NotComputed:
        if settings.model_path:  # it is compared with that model where its tensors are read
            return
        raise
    if not _weights(folder, architecture, FIRST):
        raise ModelFolderError(f"{FIRST}: {folder} holds no weights as safetensors.")
    if settings.model_path and (model / "config.json").is_file():
        found = differences(architecture, read_architecture(model), of_folder=True)
        if found:
            raise ConfigError(
                f"{FIRST}: {folder} is not the model of {MODEL} ({model}): {', '.join(found[:4])}.",
                hint="Give the job the model of its weights.",
            )


def _check_reward_model(spec: JobSpec, settings: WorkloadSettings, *, here: bool) -> Iterator[str]:
    if not settings.reward_model.path:
        raise ConfigError(
            f"{REWARD}: is missing.",
            hint="Name the folder of a model for sequence classification with one label.",
        )
    folder = Path(settings.reward_model.path)
    if note := _absent(folder, REWARD, here=here):
        yield note
        return
    entrypoint = spec.roles["reward"].entrypoint
    who = back_end_of(entrypoint.module if entrypoint is not None else "")
    try:
        architecture = _read(folder, REWARD)
    except NotComputed:
        if who is None or not who.by_transformers:
            raise
        _check_another_reward_model(spec, folder, who)
        return
    if who is not None and (problem := who.unfit(architecture)):
        raise ConfigError(
            f"{REWARD}: {folder / 'config.json'} does not fit the back end {who.name}: {problem}."
        )
    if not _weights(folder, architecture, REWARD, head=SCORE):
        raise ModelFolderError(
            f"{REWARD}: {folder} holds no weights as safetensors.",
            hint="A reward model is not drawn from a seed.",
        )
    _check_tokenizer(spec, folder, REWARD, architecture.vocab)


def _check_another_reward_model(spec: JobSpec, folder: Path, who: Taker) -> None:
    config = read_config(folder)
    try:
        refuse_another(folder, config)
        weights_of_another(folder, config, head=SCORE)
    except ModelFolderError as error:
        raise ModelFolderError(f"{REWARD}: {error.message}", hint=error.hint) from None
    if problem := problem_with(folder, config, who.name):
        raise ConfigError(
            f"{REWARD}: {folder / 'config.json'} does not fit the back end {who.name}: {problem.rstrip('.')}."
        )
    vocab = vocabulary_of(folder)
    if vocab is not None:
        _check_tokenizer(spec, folder, REWARD, vocab)


def _read(folder: Path, key: str) -> Architecture:
    """The folder's shape. Raises ModelFolderError, which begins with the key."""
    try:
        return read_architecture(folder)
    except ModelFolderError as error:
        raise type(error)(f"{key}: {error.message}", hint=error.hint) from None


def _weights(folder: Path, architecture: Architecture, key: str, *, head: str = HEAD) -> bool:
    """Whether the folder holds weights. Raises ModelFolderError, which begins with the key, where they are not its
    model's."""
    try:
        return bool(weights_of(folder, architecture, head=head))
    except ModelFolderError as error:
        raise ModelFolderError(f"{key}: {error.message}", hint=error.hint) from None


def _users(spec: JobSpec) -> list[tuple[str, Taker]]:
    """Those of the policy's roles, and of the instances, that Gyre's own code reads a folder for, each with the back
    end or engine that does."""
    found: list[tuple[str, Taker]] = []
    for name in _OF_THE_POLICY:
        entrypoint = spec.roles[name].entrypoint if name in spec.roles else None
        who = back_end_of(entrypoint.module) if entrypoint is not None else None
        if who is not None:
            found.append((name, who))
    if any(name == "actor" for name, _ in found):  # engines serve what it publishes
        found += [
            (role, engine)
            for role in spec.roles
            if is_instance(spec, role)
            and (engine := known_engine(rollouts_of(spec, role).engine)) is not None
        ]
    return found


def _absent(folder: Path, key: str, *, here: bool) -> str:
    """A note of a folder that is not on this machine, for a job that runs elsewhere; "" for one that is. Raises
    ModelFolderError where the job runs here."""
    try:
        refuse_no_folder(folder, key)
    except ModelFolderError as error:
        if here:
            raise
        return elsewhere(error.message)
    return ""


def _check_tokenizer(spec: JobSpec, folder: Path, key: str, vocab: int) -> None:
    from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer, refuse_other_tokens

    if spec.run.data in (None, PREPARED):  # of another class `config.data` may be anything
        refuse_other_tokenizer(spec.config, folder, key)
        refuse_other_tokens(spec.config, vocab, folder)


def _check_positions(spec: JobSpec, folder: Path) -> None:
    """Raises GraphError if engines are to read more tokens than the model of this folder has positions."""
    told = read_config(folder)
    positions = None if told.get("rope_scaling") else told.get("max_position_embeddings")
    if isinstance(positions, int):  # with scaled positions engines have a limit of their own
        check_context(spec, positions, f"max_position_embeddings of {folder / 'config.json'}")
