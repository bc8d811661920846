"""The job as data, which the builder, a YAML file and the REST API all produce, and which the journal keeps.

Every key is typed, every default is here and nowhere else, and an unknown key is refused with the nearest known one.
`JobSpec` is plain data: `model_dump(mode="json")` and `parse_job` are inverse to each other.

This package must not import Ray, torch, SQLAlchemy or FastAPI: planning a job needs none of them.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gyre.config.labels import checked_note, checked_tags
from gyre.config.plugins import BackendName, CodecName, EngineName, SinkName
from gyre.config.secrets import is_address, is_header_value, is_reference
from gyre.errors import ConfigError

TRAINER = "trainer"
ROLLOUT_MANAGER = "rollout_manager"
JOIN_TOKEN = "join_token"
"""The kind of the snapshot's rows in which the rollout manager finds the join tokens."""
DEFAULT_TOKEN = "default"
"""The name of the join token that the rollout manager makes when it first starts."""
JOIN_SCOPE, GENERATE_SCOPE, PUBLISH_SCOPE = "join", "generate", "publish"
TOKEN_SCOPES = (JOIN_SCOPE, GENERATE_SCOPE, PUBLISH_SCOPE)
"""What the owner of a token may do: join as an instance; ask a fleet's door for samples; publish policies there."""
LOCAL_ROLLOUT = "local_rollout"
"""The role of instances on the actor's devices, added for `rollouts.local`."""
SPARE_ROLLOUT = "spare_rollout"
"""The role of instances that wait for the death of others, added for `rollouts.spares`."""

AGENT_ROLE = "agent"
"""The role that runs the sessions of a recipe's job: `config.agent` says what."""

FLEET = "fleet"
"""The recipe of a job without a trainer, whose role `trainer` is filled by a keeper."""

BUILTIN_ROLES = ("trainer", "actor", "rollout", "reference", "reward", "critic", "agent")
"""The roles with a builder method of their own. Any other name is the user's own role."""

DeviceType = Literal["CPU", "GPU"]
EdgeKindName = Literal["samples", "weights", "collective", "control"]
TransportName = Literal["auto", "shm", "tcp", "mooncake"]

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

_JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_ROLE_NAME = r"^[a-z][a-z0-9_]{0,31}$"
_DOTTED = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
_POLICY = r"^(in_order|wait|drop|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

PATTERNS = {
    _JOB_NAME: (
        'at most 63 letters, digits, ".", "_" and "-", the first a letter or a digit',
        r"[^A-Za-z0-9._-]+",
    ),
    _ROLE_NAME: ('at most 32 lower-case letters, digits and "_", the first a letter', ""),
    _DOTTED: ('names joined by dots, such as "package.module"', ""),
    _POLICY: ('"in_order", "wait", "drop", or a function as "module:function"', ""),
}
"""What a text of each form consists of, in words, and which characters to replace to make one of it."""

RoleName = Annotated[str, Field(pattern=_ROLE_NAME)]

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}


def parse_size(value: Any) -> Any:
    """`"8GiB"`, `"500 MB"` or `"8Gi"` as bytes; numbers pass through. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _SIZES:
        raise ValueError('expected a number of bytes, or text such as "8GiB" or "500MB"')
    return int(float(match[1]) * _SIZES[match[2].lower()])


class Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, frozen=False, use_attribute_docstrings=True
    )


class Entrypoint(Model):
    """Where a class lives: an importable module, or a file for classes of the user's main script."""

    module: Annotated[str, Field(pattern=_DOTTED)]
    """Dotted path of the module; `__main__` for a script, which `file` then names."""
    name: Annotated[str, Field(pattern=_DOTTED)]
    """Qualified name of the class inside the module."""
    file: str | None = None
    """The file that holds the class, where `module` is `__main__`."""

    @classmethod
    def parse(cls, text: str) -> Entrypoint:
        """The class in `pkg.mod:Cls`, `pkg.mod.Cls` or `path/to/script.py:Cls`. Raises ValueError for other text."""
        where, colon, name = text.strip().rpartition(":")
        if not colon:
            where, _, name = text.strip().rpartition(".")
        if colon and where.endswith(".py") and re.match(_DOTTED, name):
            return cls(module="__main__", name=name, file=where)
        if not re.match(_DOTTED, where) or not re.match(_DOTTED, name):
            raise ValueError('expected the class as "package.module:Class" or "package.module.Class"')
        return cls(module=where, name=name)

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"


class Resources(Model):
    """The resources that one vertex needs on its node."""

    cpu: Annotated[float, Field(ge=0)] = 0.0
    """CPU cores reserved with Ray. 0 places a vertex without reserving a core."""
    memory_bytes: Annotated[
        int, BeforeValidator(parse_size, json_schema_input_type=int | str), Field(ge=0)
    ] = 0
    """Bytes, or text with a unit: "8GiB"."""
    accelerator: Annotated[float, Field(ge=0)] = 1.0
    """Devices of the job's device type; collocated roles share theirs."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray's resources of your own naming, such as `{"infiniband": 1}`."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray's node labels that the machine must have, such as `{"market-type": "spot"}`."""

    @field_validator("custom")
    @classmethod
    def _custom_is_not_built_in(cls, value: dict[str, float]) -> dict[str, float]:
        if found := sorted({"CPU", "GPU", "memory", "object_store_memory"} & value.keys()):
            raise ValueError(f"has {found[0]!r}, which has a key of its own: cpu, memory_bytes, accelerator")
        return value


class Elastic(Model):
    """Bounds within which `scale` may take a role. Instances of the rollout plane scale themselves within them."""

    min: Annotated[int, Field(ge=0)]
    """The fewest vertices."""
    max: PositiveInt
    """The most vertices."""
    auto: bool = True
    """False leaves the number to people: `gyre scale` and REST."""
    up_cooldown_s: Seconds = 60.0
    """Shortest time after a change before the number is raised; the policy also observes the job for this long
    first."""
    down_cooldown_s: Seconds = 300.0
    """Shortest time after a change before the number is lowered."""
    machines_timeout_s: Seconds = 900.0
    """How long a number beyond what the present machines hold is shown to Ray's autoscaler. Then it is withdrawn, and
    not shown again for as long."""
    cores_full: Annotated[float, Field(gt=0)] = 0.9
    """Share of the machine's cores in use from which on no instance that computes on them is added; above 1 never."""


class PoolSpec(Model):
    """A pool of rollout instances: what one costs, and what its engine has otherwise than `rollouts` says."""

    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of one instance, in a currency of your own. Of elastic pools the one whose tokens cost least grows first,
    and the one whose tokens cost most shrinks first."""
    engine: EngineName | None = None
    """Instead of `rollouts.engine`; None takes that one. The same holds for the keys below."""
    engine_args: list[str] | None = None
    """Instead of `rollouts.engine_args`."""
    engine_python: str | None = None
    """Instead of `rollouts.engine_python`."""
    max_running: PositiveInt | None = None
    """Instead of `rollouts.max_running`."""
    kv_tokens: PositiveInt | None = None
    """Instead of `rollouts.kv_tokens`."""
    context_length: PositiveInt | None = None
    """Instead of `rollouts.context_length`."""
    ready_timeout_s: Seconds | None = None
    """Instead of `rollouts.ready_timeout_s`."""

    def over(self, rollouts: RolloutsSpec) -> RolloutsSpec:
        """The job's section with what this pool has otherwise."""
        own = self.model_dump(exclude={"price_per_hour"}, exclude_none=True)
        return rollouts.model_copy(update=own)


class RoleSpec(Model):
    """A kind of worker."""

    entrypoint: Entrypoint | None = None
    """The class, as `package.module:Class` or `path/to/file.py:Class`; None takes the recipe's own."""
    total: PositiveInt = 1
    """Vertices of the role."""
    per_node: PositiveInt | None = None
    """Vertices of the role on one node; must divide `total`. None lets the planner choose."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of this role's vertices, over the job's `env`."""
    resources: Resources = Field(default_factory=Resources)
    """What one vertex needs on its machine."""
    elastic: Elastic | None = None
    """How far `gyre scale` and the elasticity policy may take the role; None keeps `total`."""
    pool: PoolSpec | None = None
    """Given, the role is a pool of instances of the rollout plane, beside the role `rollout`."""
    gang: bool = False
    """Whether the ranks are peers of a collective, which start together and restart together."""
    stall_timeout_s: Seconds = 120.0
    """A call without progress of the vertex for this long is an incident."""
    setup_timeout_s: Seconds = 600.0
    """Time from the request for the process until `setup()` has returned: covers loading a large model."""

    @field_validator("entrypoint", mode="before", json_schema_input_type=str | Entrypoint | None)
    @classmethod
    def _entrypoint_from_text(cls, value: Any) -> Any:
        return Entrypoint.parse(value) if isinstance(value, str) else value


class EdgeSpec(Model):
    """A flow from one operator (`role.method`) or role (`role`) to another."""

    source: str
    """The operator, `role.method`, or the role that the edge leaves."""
    target: str
    """The operator, `role.method`, or the role that the edge enters."""
    kind: EdgeKindName = "samples"
    """What flows: `samples` (durable), `weights` (versioned), `collective` (the ranks of one gang) or `control`."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Initial tokens, counted in firings of the source."""


class Affinity(Model):
    """Where roles stand relative to each other."""

    collocate: list[list[RoleName]] = Field(default_factory=list)
    """Roles of one list share nodes and devices, rank by rank."""
    collocate_hosts: list[list[RoleName]] = Field(default_factory=list)
    """Roles of one list share a machine, rank by rank, each with devices of its own."""
    separate: list[list[RoleName]] = Field(default_factory=list)
    """Roles of one list never share a node."""
    spread: list[RoleName] = Field(default_factory=list)
    """Roles whose vertices are spread over as many machines as possible."""
    pack: list[RoleName] = Field(default_factory=list)
    """Roles whose vertices are packed on as few machines as possible."""


class Budget(Model):
    """At most `attempts` uses without progress, and at most `max` within any `window_s`; then the next wider scope is
    tried."""

    max: Annotated[int, Field(ge=0)]
    """Most uses within any `window_s`."""
    window_s: Seconds
    """Seconds over which `max` counts."""
    attempts: Annotated[int, Field(ge=0)] | None = None
    """Most uses since the last progress, however slowly they come: since the job's last step, for `retry` since the
    call last succeeded. None takes `max`."""

    @property
    def most_attempts(self) -> int:
        return self.max if self.attempts is None else self.attempts


class NotFiniteSpec(Model):
    """What becomes of a step whose gradient holds NaN or infinity."""

    skip_batch: Annotated[int, Field(ge=0)] = 3
    """Batches in a row that may be skipped: the step leaves the weights as they are, and its groups are dropped. One
    more, and the job has failed. 0 skips none."""


class OutOfMemorySpec(Model):
    """What becomes of a learner whose passes do not fit into its devices' memory."""

    smaller_passes: Annotated[int, Field(ge=0, le=8)] = 2
    """How often its passes may be halved in a job, each time with a restart of the gang; activations that are kept by
    `recompute: auto` are computed again before that. Only learners whose passes have a size in tokens,
    `megatron.pass_tokens` or `fsdp.pass_tokens`."""


class FailoverSpec(Model):
    """Budgets of each scope of repair, and the deadlines of the control plane."""

    retry: Budget = Budget(max=2, window_s=60)
    """Failed calls of vertices that stay alive: the controller's own repetitions, per role."""
    vertex: Budget = Budget(max=10, window_s=600, attempts=5)
    """Restarts of one vertex whose process died or got stuck."""
    region: Budget = Budget(max=10, window_s=600, attempts=3)
    """Restarts of one gang."""
    job: Budget = Budget(max=2, window_s=3600)
    """Restarts of everything."""
    user_code: Budget = Budget(max=1, window_s=600)
    """Restarts of a role for exceptions in the user's own code, which seldom go away."""
    no_step: Budget = Budget(max=1, window_s=86_400)
    """Restarts of the trainer, and then of everything, if every vertex runs and no step comes. A step resets this
    budget."""
    engine_start: Budget = Budget(max=3, window_s=86_400)
    """Starts in a row of one instance's engine that may fail. A start that succeeds resets this budget. When it is
    spent the job ends if no other instance can do the work; otherwise it goes on with the others."""
    machine: Budget = Budget(max=3, window_s=3600)
    """Deaths on one machine, of whatever vertices, after which it is left alone. Another machine must be there."""
    leave_machine_s: Seconds = 60.0
    """How long a machine is left alone the first time; doubled each time that follows, up to an hour."""
    silent_attempts: Annotated[int, Field(ge=0)] = 20
    """The attempts of `vertex` and `region` where the trainer is a script that reports no step by
    `report_progress(step=…)`: no progress can be seen then, so they are those of the whole job."""
    backoff_s: Annotated[float, Field(ge=0)] = 0.5
    """Wait before the second restart in a window, doubled for each later one; the first is immediate."""
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0
    """The longest wait before a restart."""
    report_interval_s: Seconds = 0.5
    """A vertex answers the master's pending watch call at least this often."""
    wait_for_room_s: Seconds = 4 * 3600.0
    """How long the job may wait for a machine that it cannot do without, or for room on a disk. Waiting takes from no
    budget."""
    disk_low_bytes: Annotated[int, Field(ge=0)] = 32 * 2**20
    """A disk that the job writes to is full when fewer bytes are left, or than an eighth of it, if that is less. While
    one is, nothing is started and nothing is charged. 0: only a write that fails says it."""
    disk_room_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """A full disk has room again when this many bytes are free, or a quarter of it, if that is less."""
    out_of_memory: OutOfMemorySpec = Field(default_factory=OutOfMemorySpec)
    """What becomes of a learner whose passes do not fit into its devices' memory."""
    not_finite: NotFiniteSpec = Field(default_factory=NotFiniteSpec)
    """What becomes of a step whose gradient holds NaN or infinity."""
    silence_timeout_s: Seconds = 10.0
    """A vertex that does not answer its watch call for this long is stuck (SIGSTOP, a dead node)."""
    step_timeout_s: Seconds = 1800.0
    """It is an incident if a job, whose vertices all run, makes no step for this long, or for `step_timeout_factor`
    times its slowest recent step if that is longer."""
    step_timeout_factor: Annotated[float, Field(ge=1)] = 10.0
    """See `step_timeout_s`."""
    master_hung_after_s: Seconds = 20.0
    """A master process that has not watched any vertex for this long is ended by its vertices and restarted."""
    orphan_timeout_s: Seconds = 120.0
    """A vertex without contact to a master for this long ends itself, so that it holds no device."""
    drain_timeout_s: Seconds = 30.0
    """Time that `stop` and `scale` give calls in flight to end before processes are killed."""


USUAL_GROUPS = 16
"""Groups in a call or a micro-batch, where a step's prompts can be cut so."""

USUAL_HELD_OUT = 256
"""Held-out prompts in an evaluation, where there are so many: a share is then known to some six percent."""


def _usual_groups(given: dict[str, Any]) -> int:
    """The divisor of a step's prompts that is nearest to the usual number by ratio, the smaller of two: a default that
    no `prompts_per_step` refuses."""
    prompts = given.get("prompts_per_step", USUAL_GROUPS)  # not there if it is wrong, which is told itself
    nearer_than_one = range(1, USUAL_GROUPS**2 + 1)
    return min(
        (size for size in nearer_than_one if prompts % size == 0),
        key=lambda size: max(size / USUAL_GROUPS, USUAL_GROUPS / size),
    )


class RunSpec(Model):
    """How the built-in trainer walks the graph."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    prompts_per_step: PositiveInt = 64
    """Groups in one optimizer step."""
    groups_per_firing: PositiveInt = Field(default_factory=_usual_groups)
    """Groups in one call of a rollout, reward or reference operator: the unit of repetition. With streamed
    micro-batches this is the maximum, because a call takes the groups that are there. By default the divisor of
    `prompts_per_step` that is nearest to 16."""
    micro_batches: Literal["fixed", "streamed"] = "fixed"
    """`fixed` by the groups' numbers, the same in every run; or `streamed`: made of the groups that are complete first,
    as soon as there are enough of them."""
    groups_per_micro_batch: PositiveInt = Field(default_factory=_usual_groups)
    """Groups in one forward and backward pass of the actor gang, over its ranks. Streamed: the maximum. By default the
    divisor of `prompts_per_step` that is nearest to 16."""
    min_samples_per_micro_batch: PositiveInt = 1
    """Streamed: a micro-batch is sent as soon as it has this many samples, `min_tokens_per_micro_batch` tokens, and a
    group for each rank."""
    min_tokens_per_micro_batch: Annotated[int, Field(ge=0)] = 0
    """Streamed: the fewest tokens of prompts and answers in a micro-batch."""
    max_samples_per_micro_batch: PositiveInt | None = None
    """Streamed: the most samples in a micro-batch; a larger group goes alone."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Streamed: the most tokens of prompts and answers in a micro-batch, over all ranks; a larger group goes alone."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """Streamed: another prompt replaces a group whose samples all earned the same, so that it has no gradient. More
    replacements in a step than this times `prompts_per_step` fail the job. 0 keeps such groups."""
    checkpoint_every: PositiveInt = 10
    """Steps between checkpoints; with fewer, less is trained again after a failure."""
    lost_checkpoint: Literal["stop", "weights"] = "stop"
    """What to do if a gang must be restored and the folder of its last checkpoint is gone: `stop`, because nothing else
    has all of its state; or go on with the `weights` that instances have, and a new optimizer."""
    evaluate_every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations of the held-out set; 0 never evaluates."""
    held_out: PositiveInt | None = None
    """Prompts of each held-out set in an evaluation. None takes 256, or all where fewer are held out."""
    data: str | None = None
    """`module:Class` of the prompts. It is constructed with the job's `config`; its `prompt(index)` and
    `held_out(count)` return groups without samples, and the same index always gives the same prompt. None takes the
    data set of `config.data`, or the task of `config.task`."""
    call_timeout_s: Seconds = 1800.0
    """Deadline of one operator call, retries and waiting for a replacement included."""

    @property
    def most_held_out(self) -> int:
        """Prompts of a held-out set at most."""
        return self.held_out or USUAL_HELD_OUT


class StalenessSpec(Model):
    """Which groups make up a step if generation runs ahead of training."""

    policy: Annotated[str, Field(pattern=_POLICY)] = "in_order"
    """`in_order`: a step takes the groups that were drawn for it, and the trainer waits for all of them. The other
    policies take the groups that are complete first (fully asynchronous): `wait` keeps places for groups that would
    become older than `max_staleness`; `drop` gives up groups that became older; with `module:function` that function
    gets `gyre.rollouts.trainer.staleness.Ages` and returns a `Verdict` about each sample."""
    ahead: Annotated[int, Field(ge=0)] | None = None
    """How many steps generation may run ahead of training; None takes `max_staleness`. With fewer, a sample may last
    over several policies before it is too old."""
    dropped: Literal["again", "replace"] = "again"
    """What happens to the prompt of a dropped group: the newest policy answers it `again`, or another prompt takes its
    place (`replace`)."""

    @property
    def function(self) -> Entrypoint | None:
        """The user's function, if that is the policy."""
        return Entrypoint.parse(self.policy) if ":" in self.policy else None

    @field_validator("policy", mode="before", json_schema_input_type=str)
    @classmethod
    def _policy_from_function(cls, value: Any) -> Any:
        if not callable(value):
            return value
        if value.__module__ == "__main__":
            raise ValueError("expected a function that can be imported: put it into a module of its own")
        return f"{value.__module__}:{value.__qualname__}"


class DoorSpec(Model):
    """The door of a fleet: what it keeps, and how much of it one key may use."""

    keep_s: Seconds = 900.0
    """How long an answer stays in the ledger after it was whole: as long, the same id gets the same tokens. Then it is
    forgotten, and the id is free."""
    keep_tokens: PositiveInt = 64 << 20
    """Most tokens of answers that are kept, 8 bytes each in the manager's memory; while there are more, new requests
    are refused of each key that has as much as the others or more."""
    key_bytes: PositiveInt = 256 << 20
    """Most bytes that the requests of one key take in the manager's memory, open ones and those that are kept: their
    prompts, their tokens, and some 2 KiB for each request and 1 KiB for each sample; while they take more, new ones of
    this key are refused."""
    most_open: PositiveInt = 4096
    """Most requests of one key that are not answered yet."""
    answer_within_s: Seconds = 600.0
    """How long a client may wait for an answer. It is then told to ask again with the same id, and nothing is lost."""
    policy_folders: list[str] = Field(default_factory=list)
    """Absolute paths. Policies are published from below these alone, wherever links lead; empty: from everywhere that
    the manager may read. Set it where those who write on its machine should not read all that it may."""

    @field_validator("policy_folders")
    @classmethod
    def _policy_folders_are_absolute(cls, value: list[str]) -> list[str]:
        if found := [path for path in value if not path.startswith("/")]:
            raise ValueError(f"has {found[0]!r}, which is no absolute path")
        return value


class RolloutsSpec(Model):
    """The rollout plane: its manager and the engines of its instances."""

    engine: EngineName = "embedded"
    """The engine: `embedded`, Gyre's own torch engine; `sglang`; `vllm`; or one of your own, `module:function`."""
    local: Annotated[int, Field(ge=0)] = 0
    """Instances on the actor's devices, which generate while there is nothing to train. A multiple of the actor's
    total, or a divisor."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Instances beyond those of the roles, each on devices of its own, that have the newest weights and get no samples
    until an instance that Gyre placed does not serve."""
    engine_args: list[str] = Field(default_factory=list)
    """Further arguments of the engine's command line."""
    engine_python: str = ""
    """The Python that SGLang or vLLM is installed in; "" takes the instance's own."""
    max_running: PositiveInt | None = None
    """Samples that an engine generates at once; None for as many as it says that it can."""
    kv_tokens: PositiveInt | None = None
    """Tokens of an engine's KV memory to count on; None for all that it says it has."""
    deterministic: bool = False
    """A sample's tokens depend on its seed and the weights alone, so that a run can be repeated bit by bit. SGLang,
    and vLLM on GPUs, are slower then; the embedded engine always works so with models of Gyre's own decoder, and never
    with those of transformers."""
    context_length: PositiveInt | None = None
    """Most tokens of prompt and output together; None takes the model's limit."""
    host: str = "127.0.0.1"
    """Address on which the manager listens. Instances on other machines must be able to reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port, and the same again after a restart."""
    tls_cert: str = ""
    """PEM file with the manager's certificate, for TLS; "" for plain connections."""
    tls_key: str = ""
    """PEM file with its key, without a password."""
    update_mode: Literal["in_place", "retract", "handover"] = "in_place"
    """What happens to running samples when a new policy is loaded: they go on as they are, have their KV cache
    recomputed, or go on elsewhere."""
    report_interval_s: Seconds = 0.25
    """How often an instance reports its new tokens."""
    silence_timeout_s: Seconds = 3.0
    """An instance that reported nothing for this long is lost, and its samples go on elsewhere."""
    reconnect_grace_s: Annotated[float, Field(ge=0)] = 0.75
    """How long an instance may be away after its connection broke, before its samples go on elsewhere."""
    ready_timeout_s: Seconds = 600.0
    """Time from the start of an engine to its first answer."""
    rebalance_every_s: Seconds = 1.0
    """How often queued and running samples are looked at for a better place."""
    door: DoorSpec | None = None
    """The door of a fleet, which the recipe `fleet` opens. Other recipes have none."""


class WeightsSpec(Model):
    """The weight plane: the transports, the codec and the networks by which policies reach the instances."""

    transports: Annotated[
        list[TransportName],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=TransportName | list[TransportName],
        ),
        Field(min_length=1),
    ] = Field(default=["auto"])
    """`auto`: shared memory on one machine, else TCP, or Mooncake if that is safe and measured faster. Or a list, the
    preferred first: no other transport is used, and a later one only if the earlier ones cannot be."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What Mooncake sends over."""
    mooncake_device: str = ""
    """The RDMA device, such as `mlx5_0`; "" leaves it to Mooncake."""
    codec: CodecName = "auto"
    """The codec on the wire: `auto` chooses by measured rate and cost; any other is used wherever it can be. `fp8` also
    rounds the weights that instances get. Or one of your own, `module:object`."""
    dtype: Literal["trained", "bfloat16"] = "trained"
    """The dtype that instances get: the actor's own, or bfloat16. `fp8` takes bfloat16."""
    streams: Annotated[int, Field(ge=1, le=64)] = 2
    """Parallel connections of each instance that fetches."""
    chunk_bytes: Annotated[
        int,
        BeforeValidator(parse_size, json_schema_input_type=int | str),
        Field(ge=1 << 20, le=1 << 31, multiple_of=4096),
    ] = 64 << 20
    """Largest unit of transfer, verification and retry; a small model is cut into 32. Bytes, or text with a unit."""
    bind: str = ""
    """Where the actor and the instances listen: an address, or a network in CIDR notation for the machine's own address
    in it. "" takes its address on the way to the rollout manager."""
    ports: Annotated[
        str,
        BeforeValidator(
            lambda value: str(value) if type(value) is int else value, json_schema_input_type=int | str
        ),
        Field(max_length=11),
    ] = ""
    """One, or a range such as `7100-7131`, of which each takes a free one: as many as there are on a machine. "" takes
    any."""
    sender_networks: list[str] = Field(default_factory=list)
    """Networks in CIDR notation from which instances take weights; empty: from every peer with the token."""
    receiver_networks: list[str] = Field(default_factory=list)
    """Networks in CIDR notation that weights are served to; empty: every peer with the token."""
    trusted_network: bool = False
    """Every machine that can reach these may read and write their weights. `auto` may then open Mooncake's port, which
    needs no token."""
    encrypt: bool | None = None
    """TLS between actor and instances. None uses it if the rollout manager has a certificate."""
    stall_timeout_s: Seconds = 5.0
    """Longest time without data from a source, after which another source is taken."""

    @field_validator("transports")
    @classmethod
    def _auto_stands_alone(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("names one twice")
        if "auto" in value and len(value) > 1:
            raise ValueError("has `auto` beside others: give it alone, or leave it out")
        return value

    @field_validator("bind")
    @classmethod
    def _bind_is_an_address(cls, value: str) -> str:
        try:
            _ = ipaddress.ip_network(value) if "/" in value else value and ipaddress.ip_address(value)
        except ValueError as error:
            raise ValueError(f"is neither an address nor a network: {error}") from None
        return value

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, value: str) -> str:
        if value:
            first, last = port_range(value)
            if not 1 <= first <= last <= 65535:
                raise ValueError("is no range of ports between 1 and 65535")
        return value

    @field_validator("sender_networks", "receiver_networks")
    @classmethod
    def _networks_are_networks(cls, value: list[str]) -> list[str]:
        for network in value:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"has {network!r}, which is no network: {error}") from None
        return value


def port_range(text: str) -> tuple[int, int]:
    """`"7100"` or `"7100-7131"` as first and last. Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    if match is None:
        raise ValueError('expected a port, or a range such as "7100-7131"')
    return int(match[1]), int(match[2] or match[1])


class SamplesSpec(Model):
    """Which samples are kept as Parquet in the job's directory. Those that are quarantined always are."""

    every: Annotated[int, Field(ge=0)] = 1
    """The first step is kept, and each whose number is a multiple of this. 0 keeps none, and no held-out answers."""
    groups: PositiveInt | None = None
    """Groups of a step that are kept; None keeps all."""
    held_out: Annotated[int, Field(ge=0)] | None = 64
    """Prompts of each held-out set whose answers are kept of an evaluation, the first ones; 0 keeps none, None all."""
    held_out_versions: Annotated[int, Field(ge=2)] = 50
    """Versions of each held-out set whose answers are kept: the first, the newest half, and of the others every second,
    then every fourth, and so on."""
    at_most_bytes: Annotated[
        int, BeforeValidator(parse_size, json_schema_input_type=int | str), Field(ge=0)
    ] = 2 << 30
    """When the files take more, old steps are given up: every second, then every fourth, and so on; never the first,
    the newest 50, or what is quarantined. Bytes, or text with a unit."""


def _in_home(path: str) -> str:
    return os.path.expanduser(path) if path.startswith("~/") else path


class SinkSpec(Model):
    """Where the numbers of steps, evaluations and warnings go besides the job's store. A sink has a process of its own
    beside the master; one that fails, hangs or is killed holds nothing up, and catches up."""

    kind: SinkName
    """`file`, `tensorboard`, `wandb`, `mlflow`, `otlp`, or a class of your own, `module:Class`."""
    to: str = ""
    """A file, a folder, MLflow's tracking URI, or a collector of OpenTelemetry; "" takes a place in the job's
    directory, and with `otlp` the address in OTEL_EXPORTER_OTLP_ENDPOINT."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments: of `wandb.init`, of MLflow's `start_run`, of the class of your own."""

    @field_validator("to")
    @classmethod
    def _to_may_be_in_the_home(cls, value: str) -> str:
        return _in_home(value)

    @model_validator(mode="after")
    def _collector_is_an_address(self) -> SinkSpec:
        if self.kind == "otlp" and self.to and not is_address(self.to):
            raise ValueError(f'{self.to!r} is no address of a collector: expected `to` as "http://host:4318"')
        return self


class NotifySpec(Model):
    """Whom the job tells of incidents, warnings and its end: a webhook, or a command of the master's machine. A value
    `$NAME` of the address or of a header is taken from the job's `env`, or from the environment of its master, so that
    no secret need stand in the file."""

    webhook: str = ""
    """An address (`https://…`, or `$NAME`) that gets JSON by POST: Slack, Mattermost, or a service of your own."""
    command: list[str] = Field(default_factory=list)
    """Instead of it a program and its arguments, which gets the same JSON on its standard input."""
    on: Annotated[list[Literal["incident", "recovered", "warning", "end"]], Field(min_length=1)] = Field(
        default=["incident", "warning", "end"]
    )
    """What is told: an `incident`; that one is `recovered`, or a warning no longer holds; a `warning` that the job does
    not learn; the `end` of the job."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of the POST, such as `{Authorization: $TOKEN}`."""

    @field_validator("webhook")
    @classmethod
    def _webhook_is_an_address(cls, value: str) -> str:
        if value and not is_reference(value) and not is_address(value):
            raise ValueError('is no address: expected "https://host/…", or "$NAME" of a variable')
        return value

    @field_validator("command")
    @classmethod
    def _command_can_be_run(cls, value: list[str]) -> list[str]:
        value = [_in_home(part) for part in value]
        if value and not value[0].strip():
            raise ValueError("names no program: expected it first, and then its arguments")
        if value and "/" in value[0] and not value[0].startswith("/"):
            raise ValueError("is a relative path, and the master has another folder: give it from /")
        if any("\0" in part for part in value):
            raise ValueError("holds a character NUL, which no argument can")
        return value

    @field_validator("headers")
    @classmethod
    def _headers_can_be_sent(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise ValueError(f"has {name!r}, which is no name of a header")
            if not is_header_value(text):
                raise ValueError(f"has a value of {name} with characters that a header cannot hold")
        return value

    @model_validator(mode="after")
    def _has_one_target(self) -> NotifySpec:
        if bool(self.webhook) == bool(self.command):
            raise ValueError(
                "has both a webhook and a command: give each an entry of its own"
                if self.webhook
                else "says nobody to tell: give a `webhook` or a `command`"
            )
        if self.command and self.headers:
            raise ValueError("has headers, which only a webhook takes")
        return self


class ObserveSpec(Model):
    """What is kept of the job for people to look at. Nothing of it is in the way of training."""

    samples: SamplesSpec = Field(default_factory=SamplesSpec)
    """Prompts, answers, log-probs and rewards of the steps."""
    sinks: Annotated[
        list[SinkSpec],
        BeforeValidator(
            lambda value: (
                [{"kind": one} if isinstance(one, str) else one for one in value]
                if isinstance(value, list)
                else value
            ),
            json_schema_input_type=list[SinkName | SinkSpec],
        ),
        Field(max_length=16),
    ] = Field(default_factory=list)
    """Where the job's numbers go besides: a list of kinds, such as `[tensorboard, wandb]`, or of mappings with more."""
    notify: Annotated[list[NotifySpec], Field(max_length=16)] = Field(default_factory=list)
    """Whom the job tells of incidents, warnings and its end."""


class StoreSpec(Model):
    url: str | None = None
    """SQLAlchemy URL of the journal; None takes the SQLite file in GYRE_HOME."""
    lost_timeout_s: Seconds = 300.0
    """How long the master waits for a store that is gone or was replaced until it gives the job up."""


class JobSpec(Model):
    """A whole job, before it is placed."""

    name: Annotated[str, Field(pattern=_JOB_NAME)] = "job"
    """The name that `gyre show NAME` and the other verbs take. Only one running job may have it."""
    tags: list[str] = Field(default_factory=list)
    """What to find and group the job by in a list of jobs. `gyre tag` changes them later."""
    notes: str = ""
    """What the job is for, in words. `gyre note` changes it later."""
    node_num: PositiveInt | None = None
    """The most machines that the job uses; None for as many as it takes."""
    device_per_node: PositiveInt | None = None
    """Devices that a machine gives the job; None for those that it has."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of each device in GiB, by which `plan` judges whether the job fits; None asks the driver of this machine
    where the job runs on it alone, and else it is not known."""
    device_price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of one device an hour, in a currency of your own; 0: it is not known. A pool with a `price_per_hour` costs
    that instead."""
    device_type: DeviceType = "CPU"
    """What a device is: `CPU` or `GPU`. With `CPU` a device is a number for placement and reserves nothing."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration of the workloads, which have it as `self.config`: sections for Gyre's own, any other key for
    yours."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every vertex; a role's own `env` goes over it."""
    roles: dict[RoleName, RoleSpec] = Field(default_factory=dict)
    """The kinds of workers, by name: `trainer`, `actor`, `rollout`, `reference`, `reward`, `critic`, or names of your
    own."""
    edges: list[EdgeSpec] = Field(default_factory=list)
    """Flows between roles, for a job without a recipe."""
    affinity: Affinity = Field(default_factory=Affinity)
    """Which roles share machines or devices, and which do not."""
    recipe: str | None = None
    """The name of a built-in graph, or one of your own, `module:RECIPE`; None for a job whose trainer's `fit()` is the
    flow."""
    backend: BackendName | None = None
    """Whose classes fill the roles actor, critic and reference where a job names none: `torch`, `megatron`, `fsdp`, or
    one of your own, `module:BACKEND`. None takes `torch`, and on a folder's model Megatron's or FSDP2's beside such an
    actor."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many policy versions a trained token may be behind."""
    staleness: StalenessSpec = Field(default_factory=StalenessSpec)
    """Which groups make up a step if generation runs ahead of training."""
    run: RunSpec = Field(default_factory=RunSpec)
    """How long the built-in trainer trains, and in which portions."""
    failover: FailoverSpec = Field(default_factory=FailoverSpec)
    """How often failures are repaired, and the deadlines by which they are noticed."""
    rollouts: RolloutsSpec = Field(default_factory=RolloutsSpec)
    """The rollout plane: its manager and the engines of its instances."""
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    """How new weights reach the instances."""
    store: StoreSpec = Field(default_factory=StoreSpec)
    """The journal's database."""
    observe: ObserveSpec = Field(default_factory=ObserveSpec)
    """What is kept of the job for people to look at."""
    python_path: list[str] = Field(default_factory=list)
    """Folders put on `sys.path` of every vertex, so that the user's modules import there."""

    @property
    def counts_own_steps(self) -> bool:
        """Whether the trainer says what a step is: a script's `fit()`, or a fleet's keeper."""
        return self.recipe is None or self.recipe == FLEET

    @field_validator("device_type", mode="before", json_schema_input_type=Literal["CPU", "GPU", "cpu", "gpu"])
    @classmethod
    def _device_type_in_any_case(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @field_validator("tags")
    @classmethod
    def _tags_are_tags(cls, value: list[str]) -> list[str]:
        return list(_said(checked_tags, value))

    @field_validator("notes")
    @classmethod
    def _notes_are_a_note(cls, value: str) -> str:
        return str(_said(checked_note, value))

    @field_validator("config")
    @classmethod
    def _config_is_data(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            circular = isinstance(error, ValueError) and "Circular" in str(error)
            problem = str(error) if circular else _not_plain(value, "config") or str(error)
            raise ValueError(
                f"must be plain data (text, numbers, lists, mappings), for it is saved with the job: {problem}"
            ) from error
        return value


def _said(check: Callable[[Any], Any], value: Any) -> Any:
    """What the check returns; its error as pydantic wants it, with what to do in one sentence."""
    try:
        return check(value)
    except ConfigError as error:
        raise ValueError(f"{error.message.rstrip('.')}. {error.hint}".rstrip(". ")) from error


def _not_plain(value: Any, path: str) -> str:
    """What JSON cannot hold of this value, with the key that leads to it; "" where it holds all."""
    if isinstance(value, dict):
        parts = ((item, f"{path}.{key}") for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((item, f"{path}[{at}]") for at, item in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{path} is {value}"
    elif value is None or isinstance(value, str | int | float):
        return ""
    else:
        return f"{path} is a {type(value).__name__}"
    return next((problem for item, where in parts if (problem := _not_plain(item, where))), "")
