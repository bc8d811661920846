"""All sections of a job's `config` that Gyre's own workloads read, as one model.

Other top-level keys of `config` belong to the user's own workloads and are left alone, unless one is nearly the name
of a section here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import Field, model_validator

from gyre.config.sections.agent import AgentRoleSettings
from gyre.config.sections.chat import ChatSettings
from gyre.config.sections.data import DataSettings
from gyre.config.sections.fsdp import FsdpSettings
from gyre.config.sections.lora import LoraSettings
from gyre.config.sections.loss import LossSettings
from gyre.config.sections.megatron import MegatronSettings
from gyre.config.sections.model import FirstWeightsSettings, ModelSettings
from gyre.config.sections.optim import CriticSettings, OptimSettings
from gyre.config.sections.reward import RewardModelSettings, RewardSettings
from gyre.config.sections.sampling import EvaluationSettings, SamplingSettings
from gyre.config.sections.section import Section, read_mapping
from gyre.config.sections.task_section import TaskSettings, WarmStartSettings
from gyre.errors import ConfigError, nearest

_PATH = "model_path"

_NEARLY = 0.75
"""How similar a key must be to a section's name to be taken for a typo of it (`difflib`'s ratio)."""


class WorkloadSettings(Section):
    """The settings of the torch and Megatron workloads, the rewards, the tasks and the built-in trainer."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed from which every random number of the job follows."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Torch's intra-op threads in each process."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a rank waits for its peers in a collective."""
    model_path: str = ""
    """The folder of the model that is trained, in Hugging Face's layout, whatever the back end. Without safetensors in
    it the weights are drawn from `seed`; "" takes the small decoder of `model`. `megatron.model_path` is another name
    of it."""
    model: ModelSettings | None = None
    """The small decoder's shape, unless the model is the folder of `model_path`."""
    task: TaskSettings | None = None
    """A task that needs no data set, as the source of prompts instead of `data`."""
    data: DataSettings | None = None
    """A prepared data set."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How held-out prompts are answered, and what is computed of their rewards."""
    optim: OptimSettings = OptimSettings()
    """The actor's optimizer."""
    loss: LossSettings = LossSettings()
    """The loss."""
    critic: CriticSettings = CriticSettings()
    """The critic's optimizer."""
    warm_start: WarmStartSettings | None = None
    """Supervised steps before the first optimizer step; a task without demonstrations has none."""
    first_weights: FirstWeightsSettings = FirstWeightsSettings()
    """Another job's weights, which training begins with."""
    agent: AgentRoleSettings | None = None
    """What the role `agent` runs, where answers are sessions of several turns."""
    chat: ChatSettings | None = None
    """How a conversation with the model of `model_path` is written in tokens. Without it agents of such a model ask
    with token ids."""
    reward: RewardSettings = RewardSettings()
    """The function of `PythonReward`, and its pool of processes."""
    reward_model: RewardModelSettings = RewardModelSettings()
    """The folder of the reward model."""
    megatron: MegatronSettings = MegatronSettings()
    """How Megatron's ranks share the model."""
    fsdp: FsdpSettings = FsdpSettings()
    """How FSDP2's ranks compute."""
    lora: LoraSettings | None = None
    """The adapter that FSDP2's actor trains instead of its model."""

    @model_validator(mode="before")
    @classmethod
    def _one_model_path(cls, values: Any) -> Any:
        """`megatron.model_path` is read as `model_path`, so that code asks for one of them."""
        megatron = values.get("megatron") if isinstance(values, Mapping) else None
        other = megatron.get(_PATH) if isinstance(megatron, Mapping) else getattr(megatron, _PATH, "")
        if not isinstance(other, str) or not other:
            return values
        own = values.get(_PATH) or other
        if isinstance(own, str) and PurePath(own) != PurePath(other):
            raise ValueError(
                f"model_path ({own}) and megatron.model_path ({other}) are two names of one setting, and differ; "
                "keep model_path"
            )
        return {**values, _PATH: own}

    @property
    def first_policy(self) -> str:
        """The folder of the weights that training begins with: another job's, or the model's own; "" for none."""
        return self.first_weights.path or self.model_path

    @property
    def longest_answer(self) -> int:
        """Most tokens after the prompt in a row: of an answer, or of a session with what tools and users say in it."""
        return self.sampling.max_new_tokens if self.agent is None else self.agent.max_tokens

    @property
    def norm_length(self) -> float:
        """The constant of `loss_agg_mode: seq-mean-token-sum-norm`."""
        return self.loss.loss_scale_factor or float(self.sampling.max_new_tokens)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> WorkloadSettings:
        """The settings in a job's `config`, with defaults for the others. Raises ConfigError."""
        refuse_near_names(config, cls.model_fields)
        return read_mapping(cls, {key: config[key] for key in config if key in cls.model_fields}, "config")


def refuse_near_names(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for a top-level key that is none of the `known`, but nearly one."""
    for key in config:
        if key not in known and difflib.get_close_matches(str(key), known, n=1, cutoff=_NEARLY):
            raise ConfigError(f"config.{key}: unknown key; {nearest(str(key), known)}")
