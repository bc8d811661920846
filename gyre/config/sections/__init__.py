"""The sections of a job's `config`: one pydantic model each, with every default in its field.

They are what the command line and the master check before any process starts, so importing them needs neither Ray nor
torch.
"""

from gyre.config.sections.agent import AgentRoleSettings
from gyre.config.sections.chat import ChatSettings
from gyre.config.sections.data import HELD_OUT, DataSettings
from gyre.config.sections.fsdp import FsdpSettings
from gyre.config.sections.lora import LoraSettings
from gyre.config.sections.loss import ADV_ESTIMATORS, KL_TYPES, LOSS_AGG_MODES, LossSettings
from gyre.config.sections.megatron import MegatronSettings
from gyre.config.sections.model import FirstWeightsSettings, ModelSettings
from gyre.config.sections.optim import CriticSettings, OptimSettings
from gyre.config.sections.reward import RewardModelSettings, RewardPart, RewardSettings
from gyre.config.sections.sampling import EvaluationSettings, SamplingSettings
from gyre.config.sections.section import Section, read_section
from gyre.config.sections.task_section import TaskSettings, WarmStartSettings
from gyre.config.sections.workload import WorkloadSettings

__all__ = [
    "ADV_ESTIMATORS",
    "HELD_OUT",
    "KL_TYPES",
    "LOSS_AGG_MODES",
    "AgentRoleSettings",
    "ChatSettings",
    "CriticSettings",
    "DataSettings",
    "EvaluationSettings",
    "FirstWeightsSettings",
    "FsdpSettings",
    "LoraSettings",
    "LossSettings",
    "MegatronSettings",
    "ModelSettings",
    "OptimSettings",
    "RewardModelSettings",
    "RewardPart",
    "RewardSettings",
    "SamplingSettings",
    "Section",
    "TaskSettings",
    "WarmStartSettings",
    "WorkloadSettings",
    "read_section",
]
