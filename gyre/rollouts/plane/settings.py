"""Settings of the rollout manager: intervals, deadlines, and how instances take new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre.chat.renderer import Renderer
from gyre.config import DoorSpec, WeightsSpec
from gyre.models.adapters import AdapterLimits
from gyre.rollouts.protocol.connection import HEARTBEAT_S
from gyre.rollouts.sample_checks import MOST_TOKENS
from gyre.rollouts.scheduling.pools import Pool


class Tokenizer(Protocol):
    """A tokenizer as the door needs it."""

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The tokens of each text; with `special`, also those that the tokenizer adds."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text, without special tokens, or with them."""
        ...

    def settled(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """What of that text stays, whatever tokens follow."""
        ...

    def written(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to a text, and of a special token its name."""
        ...

    def offsets(self, token_ids: Sequence[int], *, special: bool = False) -> list[int]:
        """Where in their text each token begins, in characters."""
        ...


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """The door of a fleet; the first five and `policy_folders` as in `gyre.config.DoorSpec`."""

    keep_s: float = DoorSpec.model_fields["keep_s"].default
    keep_tokens: int = DoorSpec.model_fields["keep_tokens"].default
    key_bytes: int = DoorSpec.model_fields["key_bytes"].default
    most_open: int = DoorSpec.model_fields["most_open"].default
    answer_within_s: float = DoorSpec.model_fields["answer_within_s"].default
    model: str = "fleet"
    """The name of the model in OpenAI's dialect."""
    urgent_commit_s: float = 0.0
    """In place of the manager's: a client waits for each commit, and those that come while one is written share the
    next."""
    vocabulary: int = MOST_TOKENS
    """Token ids are below this."""
    context_length: int | None = None
    """Most tokens of prompt and answer; None for the model's own limit."""
    tokenizer: Tokenizer | None = None
    """None where prompts are token ids."""
    renderer: Renderer | None = None
    """What puts messages into tokens; None where nobody chats."""
    serves_folders: bool = True
    """Whether the manager serves the chunks of folders that are published; else instances read them from the disk."""
    address: str = ""
    """At which other machines reach this one, an IPv6 address in brackets; "" for the one that the manager listens
    on."""
    cache: Path | None = None
    """Where it links them; None for shared memory."""
    policy_folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The sessions of a job with agents; the first six as in `gyre.config.sections.AgentRoleSettings`."""

    max_turns: int = 16
    max_tokens: int = 4096
    seconds: float = 600.0
    recovery: str = "replayable"
    redraws: int = 3
    breaker: int = 8
    oversample: float = 1.0
    urgent_commit_s: float = 0.0
    """As `DoorSettings.urgent_commit_s`: an agent waits for each turn's commit."""
    worker_silence_s: float = 15.0
    """A worker that said nothing for so long has lost its sessions: it says something every 5 s."""
    model: str = "policy"
    """The name of the model in the clients' dialects."""
    renderer: Renderer | None = None
    """What puts messages into tokens; None where prompts are token ids alone."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_interval_s: float = 0.25
    commit_interval_s: float = 0.1
    """How long progress is collected before it is committed."""
    urgent_commit_s: float = 0.05
    """The same when a whole group waits for it, or a sample to go on elsewhere. A commit costs some two milliseconds
    however little is in it."""
    silence_timeout_s: float = 3.0
    """An agent that reported nothing for this long is lost, though its connection stands."""
    stall_timeout_s: float = 120.0
    """An instance that has samples and sent no token for this long is suspended, though it reports: the largest of its
    kind's `stall_timeout_s`."""
    recall_timeout_s: float = 10.0
    """For a recalled sample to be handed back; after that it is taken back."""
    reconnect_grace_s: float = 0.75
    """After a connection broke, before its samples go on elsewhere: a short cut costs nothing."""
    restart_grace_s: float = 2.0
    """After a start, before samples that somebody may still hold are given out anew."""
    hello_timeout_s: float = 10.0
    heartbeat_s: float = HEARTBEAT_S
    """Silence of a connection after which a ping is sent; half as long again is left for the answer."""
    send_timeout_s: float = 30.0
    """For a peer to read one frame; one that does not is cut off."""
    load_timeout_s: float = 600.0
    """For fetching and loading a version, the start of an engine with it included."""
    update_mode: str = "in_place"
    deterministic: bool = False
    """Whether engines are to be deterministic: instances hear of it when they join."""
    adapters: AdapterLimits | None = None
    """Of what size the job's versions are adapters; None for whole models. Instances hear of it when they join."""
    weights: WeightsSpec = field(default_factory=WeightsSpec)
    pools: Mapping[str, Pool] = field(default_factory=dict)
    """By role, the instances that Gyre places and whose number the elasticity policy advises; they are named by the
    role and their rank. Other roles' numbers are left to people."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """By role, what an instance that Gyre places costs an hour."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """By role, how many instances Gyre places, as of this manager's start; the trainer says so later. Spares serve in
    the place of those that lack."""
    on_cores: bool = False
    """Whether engines compute on cores, which those of one machine share, and not on devices of their own."""
    vocabulary: int = MOST_TOKENS
    """Token ids are below this."""
    rebalance_every_s: float = 1.0
    door: DoorSettings | None = None
    """Where the manager is a fleet's: it has a door, and no trainer."""
    sessions: SessionSettings | None = None
    """Where the members of the trainer's groups are sessions, which agents run."""
    tokens_every_s: float = 1.0
    """How often the join tokens are read: a revoked one is good for so long."""

    @property
    def renderer(self) -> Renderer | None:
        """What puts messages into tokens, and says what tokens are written as."""
        asked_by = self.sessions or self.door
        return asked_by.renderer if asked_by is not None else None
