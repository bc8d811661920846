"""What a user brings by name: losses, advantages, recipes, tasks, engines, trainer back ends, weight
codecs, agents, environments and sinks.

Where a setting takes one of these, it takes a built-in name, an import path `module:Name`, or the name of an entry
point that an installed package declares in the kind's group. No file of Gyre's is edited for it. What each kind may
assume and must promise: docs/bring-your-own.md.

Invariants:
- *names are checked without importing*: a name that cannot be right is refused wherever settings are read, with the
  nearest known name;
- *imported where it is used*: `load` runs the user's module in the process that needs it, and at submit, so that what
  does not import is told before any process starts.

The two tables of import paths below, of engines and of back ends, are the only place that names all of Gyre's own:
whoever would compare such a name asks the record that it stands for (`gyre.rollouts.engines`, `gyre.graph.backends`).

This module must not know what it loads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import AfterValidator

from gyre.config.estimators import ESTIMATORS
from gyre.errors import ConfigError, nearest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class PluginKind:
    """`noun` is what one is called, `setting` where a job names it, `group` that of the entry points. `built_in` are
    the names of Gyre's own; where they are loaded as the user's are, each with its import path."""

    noun: str
    setting: str
    group: str
    built_in: Collection[str] = field(hash=False)

    def check(self, name: str) -> str:
        """`name`, if it may be one. Raises ValueError. Nothing is imported."""
        if name in self.built_in or _PATH.fullmatch(name):
            return name
        installed = _installed(self.group)
        if name in installed:
            return name
        near = nearest(name, [*self.built_in, *installed]).rstrip(".")
        raise ValueError(
            f'is neither a known {self.noun} nor an import path "module:Name"{near and f"; {near}"}'
        )

    def load(self, name: str, python_path: Iterable[str] = ()) -> Any:
        """What `name` stands for: the user's own, or one of Gyre's that has an import path. `python_path` are folders
        to import from besides. Raises ConfigError with the module's own error."""
        own = self.built_in.get(name) if isinstance(self.built_in, Mapping) else None
        module, _, attribute = (own or _installed(self.group).get(name, name)).partition(":")
        with on_path(python_path):
            try:
                found: Any = import_module(module)
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"{self.setting}: {name!r} cannot be loaded: module {module} does not import: "
                    f"{type(error).__name__}: {error}.",
                    hint="Check the name, or add the folder that holds it with python_path.",
                ) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                known = [key for key in vars(found) if not key.startswith("_")]
                near = nearest(part, known)
                hint = near if near.startswith("did you mean") else ""
                raise ConfigError(f"{self.setting}: module {module} has no {part!r}.", hint=hint.capitalize())
            found = getattr(found, part)
        return found


LOSS = PluginKind("loss", "config.loss.loss_mode", "gyre.losses", ("vanilla",))
ADVANTAGE = PluginKind(
    "advantage estimator", "config.loss.adv_estimator", "gyre.advantages", tuple(ESTIMATORS)
)
RECIPE = PluginKind("recipe", "recipe", "gyre.recipes", ("grpo", "dr_grpo", "dapo", "rloo", "ppo", "fleet"))
TASK = PluginKind("task", "config.task.name", "gyre.tasks", ("arithmetic", "rows"))
ENGINE = PluginKind(
    "engine",
    "rollouts.engine",
    "gyre.engines",
    {
        "embedded": "gyre.engines.embedded.kind:EMBEDDED",
        "sglang": "gyre.engines.sglang.kind:SGLANG",
        "vllm": "gyre.engines.vllm.kind:VLLM",
    },
)
JOINS = "sglang"
"""The engine of an instance that joins by hand and names none."""
BACKEND = PluginKind(
    "trainer back end",
    "backend",
    "gyre.backends",
    {
        "torch": "gyre.workloads.torch.kind:TORCH",
        "megatron": "gyre.workloads.megatron.kind:MEGATRON",
        "fsdp": "gyre.workloads.fsdp.kind:FSDP",
    },
)
CODEC = PluginKind("codec", "weights.codec", "gyre.codecs", ("auto", "none", "delta", "planes", "fp8"))
AGENT = PluginKind("agent function", "config.agent.function", "gyre.agents", ())
ENVIRONMENT = PluginKind("environment", "config.agent.environment", "gyre.environments", ())
SINK = PluginKind("sink", "observe.sinks", "gyre.sinks", ("file", "tensorboard", "wandb", "mlflow", "otlp"))

KINDS = (LOSS, ADVANTAGE, RECIPE, TASK, ENGINE, BACKEND, CODEC, AGENT, ENVIRONMENT, SINK)

LossName = Annotated[str, AfterValidator(LOSS.check)]
AdvantageName = Annotated[str, AfterValidator(ADVANTAGE.check)]
TaskName = Annotated[str, AfterValidator(TASK.check)]
EngineName = Annotated[str, AfterValidator(ENGINE.check)]
BackendName = Annotated[str, AfterValidator(BACKEND.check)]
CodecName = Annotated[str, AfterValidator(CODEC.check)]
SinkName = Annotated[str, AfterValidator(SINK.check)]


@cache
def _installed(group: str) -> dict[str, str]:
    """The entry points of the packages that were installed when this process began, as import paths by name."""
    return {one.name: one.value for one in entry_points(group=group)}


@contextmanager
def on_path(folders: Iterable[str]) -> Iterator[None]:
    """With these folders first where Python looks for modules."""
    before = list(sys.path)
    sys.path[:0] = [folder for folder in folders if folder not in before]
    try:
        yield
    finally:
        sys.path[:] = before
