"""What a kind of engine is and can, as a record: asked wherever somebody would compare its name.

An engine is a process that serves the dialect (`gyre.engines.dialect`), by itself or by a server of Gyre's in its own
Python, and `EngineClient` talks to all of them. Its record says how it is started and what it needs, can and lacks.
What a job asks beyond that, `gyre plan` refuses by `refusals`.

Invariant *light*: a record is read wherever jobs are planned, so neither its module nor this one imports numpy, or
anything of an engine.

This module must not know any engine's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.models.architecture import Architecture
from gyre.models.support import takes_all

if TYPE_CHECKING:
    from gyre.engines.process import EngineCommand
    from gyre.models.adapters import AdapterLimits

_PAUSES = ("abort", "retract", "in_place")
"""As `gyre.engines.dialect.PauseMode`."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What an engine is started with: the model in `folder`, as policy version `version`, by the interpreter `python`.

    `max_running` samples at once, and `kv_tokens` of KV memory; None for as many as it can. `context_length`: most
    tokens of prompt and output together; None for the model's. `deterministic`: tokens depend on seed and weights
    alone. `turns`: requests begin with what earlier ones drew, so what is cached of those is kept. `adapters`: it takes
    adapters of that size beside its model. `local`: it shares its device with a trainer.
    `extra` are the user's own arguments, last, so that they win.
    """

    folder: Path
    version: str
    python: str
    max_running: int | None = None
    kv_tokens: int | None = None
    context_length: int | None = None
    deterministic: bool = False
    turns: bool = False
    adapters: AdapterLimits | None = None
    local: bool = False
    extra: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class MemoryWords:
    """The arguments that decide what an engine takes of a device: `parallel`, over how many it cuts the model;
    `fraction`, the share of the device for weights and KV memory; `otherwise`, those that change how wide its numbers
    are."""

    parallel: tuple[str, ...]
    fraction: str
    otherwise: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine. The defaults are those of a user's own, of which Gyre knows that it serves the dialect.

    `label` is its name for people. `command` makes the command of one start; one of Gyre's own is named as
    `module:function`.
    """

    name: str
    label: str
    command: Callable[[EngineStart], EngineCommand] | str
    package: str = ""
    """The package that the engine's Python must have; "" for none."""
    install: str = ""
    """How that is installed where it is missing."""
    requires: str = ""
    """The versions of it that Gyre knows, as pip writes them; "" for any."""
    apart: bool = True
    """It may run under a Python of its own (`rollouts.engine_python`), where Gyre is not installed."""
    on_cores: bool = False
    """It computes on CPUs alone."""
    repeats: bool = False
    """Its samples are equal bit by bit whatever the job says, of models of Gyre's own decoder."""
    deterministic: bool = True
    """It can be told that a sample's tokens depend on its seed and the weights alone."""
    sampling: frozenset[str] = frozenset(("top_p", "top_k", "min_p", "stop_token_ids"))
    """What it takes of a request's sampling beside temperature, length and seed, with log-probs as the dialect has
    them."""
    min_p_by_seed: bool = True
    """It takes `min_p` also where tokens are to depend on seed and weights alone."""
    pauses: frozenset[str] = frozenset(_PAUSES)
    """The ways to pause it."""
    adapters: bool = True
    """It serves adapters beside its model, several at once."""
    shares_device: bool = True
    """It can be a local instance: between windows it gives its KV memory back, or has none on a device."""
    loads_from: str = "disk"
    """How new weights come: `memory`, prepared beside running samples and copied in a short pause, else the files are
    read in the pause (`disk`)."""
    checks_before: bool = True
    """A version that cannot be loaded is refused before a weight changes."""
    spans: bool = True
    """It says which version drew which token."""
    memory: MemoryWords | None = None
    """By what its memory on a device is foretold; None where it is not."""
    by_transformers: bool = False
    """The installed transformers computes what Gyre's own decoder does not."""
    lacks: frozenset[str] = frozenset()
    """The rows of `gyre.models.support` whose models it does not serve."""
    unfit: Callable[[Architecture], str] = field(default=takes_all)
    """Why it does not serve a model whose shape can be read; "" where it does."""

    def start(self, start: EngineStart) -> EngineCommand:
        """The command of one start. Raises ConfigError for arguments that are not the user's to give."""
        if callable(self.command):
            return self.command(start)
        module, _, name = self.command.partition(":")
        found: EngineCommand = getattr(import_module(module), name)(start)
        return found

    def refusals(
        self,
        *,
        deterministic: bool,
        pause: str,
        adapters: bool,
        local: bool,
    ) -> Iterator[tuple[str, str]]:
        """What it cannot of what a job asks: pairs of a key and a sentence about it. `pause` is the way of updates."""
        if deterministic and not self.deterministic:
            yield (
                "rollouts.deterministic",
                f"{self.label} cannot make tokens depend on seed and weights alone",
            )
        if pause not in self.pauses:
            yield "rollouts.update_mode", f"{self.label} cannot pause so"
        if adapters and not self.adapters:
            yield "config.lora", f"{self.label} serves no adapters"
        if local and not self.shares_device:
            yield (
                "rollouts.local",
                f"{self.label} keeps its memory between windows, and shares no device with a trainer",
            )


ROWS: tuple[tuple[str, Callable[[EngineKind], object]], ...] = (
    ("runs under a Python of its own (`engine_python`)", lambda kind: kind.apart),
    ("computes on", lambda kind: "CPUs" if kind.on_cores else "GPUs, or CPUs where its build does"),
    ("a sample's tokens by seed and position alone", lambda kind: _by_seed(kind)),
    *((f"`{key}`", lambda kind, key=key: key in kind.sampling) for key in ("top_p", "top_k")),
    ("`min_p`", lambda kind: "min_p" in kind.sampling if kind.min_p_by_seed else "without `deterministic`"),
    (
        "stop tokens (texts that end an answer: the manager's own, in chats)",
        lambda kind: "stop_token_ids" in kind.sampling,
    ),
    *((f"pauses `{mode}`", lambda kind, mode=mode: mode in kind.pauses) for mode in _PAUSES),
    ("adapters (`config.lora`)", lambda kind: kind.adapters),
    ("local instances (`rollouts.local`) of a job on GPUs", lambda kind: kind.shares_device),
    ("new weights come from", lambda kind: kind.loads_from),
    ("a version that does not fit changes nothing", lambda kind: kind.checks_before),
    ("says which version drew which token", lambda kind: kind.spans),
    ("its memory is foretold by `gyre plan`", lambda kind: kind.memory is not None),
)
"""What the documents' table of engines says, row by row."""


def _by_seed(kind: EngineKind) -> str | bool:
    return (
        "always, of Gyre's own decoder"
        if kind.repeats
        else "with `deterministic`"
        if kind.deterministic
        else False
    )


def markdown_table(kinds: Sequence[EngineKind]) -> str:
    """The table of engines as the documents show it."""
    lines = [f"| | {' | '.join(kind.label for kind in kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    for name, told in ROWS:
        lines.append(f"| {name} | {' | '.join(_shown(told(kind)) for kind in kinds)} |")
    return "\n".join(lines)


def _shown(told: object) -> str:
    return ("yes" if told else "no") if isinstance(told, bool) else str(told)
