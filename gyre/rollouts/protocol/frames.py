"""The rare frames between the rollout manager and an agent or a trainer: one typed struct for each kind.

`codec` encodes them, `progress` has the one frequent frame, `fields` the bounds of their contents.

Invariants:
- *versioned*: the first frame of a connection says the protocol it speaks; another number is refused;
- *nothing executes*: a frame is numbers, text and bytes. Nothing is unpickled or imported;
- *a sample is addressed by row and lease*: `row` is the sample's place with the manager, `lease` grows with every
  assignment, so frames of an earlier holder are recognised.

This module must not know about sockets or the effects of frames.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from gyre.config import WeightsSpec
from gyre.rollouts.protocol.fields import (
    MAX_LIST,
    Addresses,
    AddressOrNone,
    Count,
    Ids,
    Name,
    Sampling,
    Seconds,
    Text,
    Version,
)

PROTOCOL = 14
"""The version of the protocol, raised whenever a frame gets or loses a field. Frames permit no other fields, and an
older Gyre should get an error about the protocol, not about a field."""


class Frame(Struct, kw_only=True, forbid_unknown_fields=True):
    """A frame, or a part of one. Decoding checks the fields, construction does not (`codec.checked` does)."""


class Held(Frame):
    """A sample that an agent still has, with `length` tokens, of which the first `start` came with the assignment."""

    key: Count
    lease: Count
    start: Count
    length: Count


class Hello(Frame):
    """An agent's first frame. `incarnation` is drawn anew by every agent process."""

    protocol: int
    instance: Name
    incarnation: Name
    model: Name
    """Fingerprint of the engine's model without its weights; the same for all instances of a job."""
    engine: Text
    max_running: Annotated[int, Meta(ge=1, le=1 << 20)]
    kv_tokens: Annotated[int, Meta(ge=1, lt=2**40)]
    version: Version = -1
    """The policy version loaded and verified; -1 for none."""
    checksum: Text = ""
    source: AddressOrNone = ""
    """The address at which others can fetch that version; "" if there is none."""
    held: Annotated[list[Held], Meta(max_length=MAX_LIST)] = field(default_factory=list)
    local: bool = False
    """Whether it is on the trainer's own devices and works within windows."""
    asleep: bool = False
    """Whether its engine has given its memory back."""
    node: Text = ""
    pid: Count = 0


class Keep(Frame):
    """A sample that an agent keeps: `known` tokens are in the ledger, and the agent sends the rest.

    `lineage` identifies the ledger's tokens; an agent that has other tokens hands the sample back.
    """

    key: Count
    row: Count
    lease: Count
    known: Count
    lineage: Text = ""


class Weights(Frame):
    """A policy version to fetch, verify and load. `checksum` stands for all its bytes: it is the checksum of the
    manifest that each source has."""

    version: Version
    checksum: Name
    sources: Addresses = field(default_factory=list)
    """host:port of its sources, the publisher first."""
    local_path: Text = ""
    """Its folder on the machine that published it; it is verified there as well."""
    ahead: bool = False
    """Whether to fetch and verify it only; it is loaded when the frame comes again without this."""


class Welcome(Frame):
    protocol: int
    epoch: Count
    interval_s: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    """How often to report."""
    keep: Annotated[list[Keep], Meta(max_length=MAX_LIST)]
    """The samples that the agent keeps. Others went on elsewhere, and the agent drops them."""
    weights_key: Name
    """What the weight plane's peers prove to each other that they have."""
    weights: Weights | None = None
    update_mode: Literal["in_place", "retract", "handover"] = "in_place"
    plane: WeightsSpec = field(default_factory=WeightsSpec)
    """The job's settings of the weight plane."""
    deterministic: bool = False
    """The job's `rollouts.deterministic`: engines are started so."""
    adapter_rank: Count = 0
    """The rank of the adapters that are the job's versions (`config.lora`); 0 where they are whole models."""
    adapter_layers: Annotated[list[Name], Meta(max_length=MAX_LIST)] = field(default_factory=list)
    """The ends of the names of layers that these adapters change; empty for any linear layer."""
    turns: bool = False
    """Samples are turns of agents: the next begins with what an earlier one drew, which engines keep."""


class Assignment(Frame):
    """A sample that an instance is to generate; `prior` are the tokens (int32) that it already has."""

    row: Count
    lease: Count
    key: Count
    request_id: Count
    prior: bytes
    seed: Count


class Prompt(Frame):
    """The prompt and parameters that the samples of one request share. `tokens` is int32; `sampling` has the dialect's
    names."""

    request_id: Count
    tokens: bytes
    sampling: Sampling


class Assign(Frame):
    prompts: Annotated[list[Prompt], Meta(max_length=MAX_LIST)]
    work: Annotated[list[Assignment], Meta(max_length=MAX_LIST)]


class Cancel(Frame):
    """Stop these samples; unsent tokens are sent with the sample's end (`released`)."""

    rows: Annotated[list[tuple[int, int]], Meta(max_length=MAX_LIST)]
    """(row, lease)."""


class Ack(Frame):
    """Progress up to and including `seq` is in the ledger. Sent when an end was committed, otherwise rarely."""

    seq: Count


class Drain(Frame):
    """Hand over the running samples, take no more, and leave."""

    deadline_s: Seconds
    reason: Text = ""


class Reject(Frame):
    """The manager will not work with this peer, and closes the connection after this frame."""

    code: Name
    message: Text


class EngineLimits(Frame):
    """What an engine takes at once, once it runs: it replaces what the Hello said. `why` is for people."""

    max_running: Annotated[int, Meta(ge=1, le=1 << 20)]
    kv_tokens: Annotated[int, Meta(ge=1, lt=2**40)]
    why: Text = ""


class Loaded(Frame):
    """A version is loaded and its checksums are right.

    The engine was paused for `pause_s` of the `load_s`. `how` is `start` if the engine was started with it, `loader`
    for Gyre's loader, `disk`, or `adapter` if it was loaded beside others; `note` says why the loader was not, or will
    not be, used. "" if nothing was loaded anew."""

    version: Version
    checksum: Name
    fetch_s: Seconds
    load_s: Seconds
    pause_s: Seconds = 0.0
    how: Literal["", "start", "loader", "disk", "adapter"] = ""
    note: Text = ""
    source: AddressOrNone = ""
    """The address at which others can fetch it; "" if there is none."""
    fetched: Text = ""
    """The transport, the number of sources, the codec and the reason for it, for people."""
    way: Text = ""
    """`linked` or `shared` on one machine, `tcp`, `mooncake`, several as in `mooncake+tcp`; `here` if all of it was
    there already; "" if nothing was fetched."""
    codec: Text = ""
    """The codec of most of its encoded chunks."""
    why: Text = ""


class FetchFault(Frame):
    """A fault during a fetch that was mended: a source died, stalled or sent other bytes, or a fetch was resumed.
    `evidence` is JSON."""

    version: Version
    what: Name
    evidence: Text


class LoadFailed(Frame):
    """A version could not be loaded. `starting`: because no engine could be started over it, whose last words are
    `said`, one line, and `words`, the lines around it."""

    version: Version
    error: Text
    starting: bool = False
    said: Text = ""
    words: Text = ""


class Draining(Frame):
    """The agent leaves for a reason of its machine: a signal, a file, a preemption notice."""

    reason: Text
    deadline_s: Seconds


class EngineDied(Frame):
    """The agent's engine died; `tail` is the end of its output. Reports have its samples, ended by `died`. The agent
    starts another engine and keeps its connection."""

    message: Text
    tail: Text = ""


class Attach(Frame):
    """A trainer's first frame. `term` is its incarnation: an older one is refused. `samples_ahead`: it wants notice of
    finished samples before their groups are complete."""

    protocol: int
    term: Count
    samples_ahead: bool = False


class Request(Frame):
    """Groups to generate, as `pack_groups` writes them, without samples. `purpose` and a group's id together name the
    request; a repeated one is not done twice. `sampling` has the dialect's names.

    `min_version`: no token may come from an older policy. `pinned`: no token may come from a newer one.
    """

    purpose: Name
    groups: bytes
    n: Annotated[int, Meta(ge=1, le=4096)]
    sampling: Sampling
    seed: Count
    min_version: Version
    pinned: bool = False


class GroupsStored(Frame):
    """The trainer has these groups in its own ledger: the manager may forget them."""

    purpose: Name
    ids: Ids


class Publish(Frame):
    """A published policy version, in the folder `path` of its machine and at `sources` (host:port). `model` is the
    fingerprint of its shape; it may be left out if the manager can read the folder."""

    version: Version
    checksum: Name
    path: Text
    sources: Addresses = field(default_factory=list)
    model: Text = ""


class TrainerStatus(Frame):
    """The trainer's waiting time, sent every so often: at `at_s` of its own clock it had waited `waited_s` in all for
    samples, with nothing else to do. `wanted` is how many vertices each role of instances is to have, as the master
    announced it."""

    at_s: Seconds
    waited_s: Seconds
    wanted: Annotated[dict[Name, Annotated[int, Meta(ge=0, le=1 << 20)]], Meta(max_length=256)]


class SampleCounts(Frame):
    """Numbers of the trainer's samples that have not ended, in answer to a TrainerStatus: those that are generated,
    wait at an engine that has them, wait for a place at one that is full, for weights to be loaded, for an engine to
    start, for devices that are not lent, or for an instance to come. Of a job with agents they are sessions: one has a
    turn that is generated or waits, or is with its agent and its tools (`with_agent`), or waits for an agent's process
    to run it (`for_agent`)."""

    generating: Count = 0
    at_engine: Count = 0
    for_place: Count = 0
    for_weights: Count = 0
    for_engine: Count = 0
    for_devices: Count = 0
    for_instance: Count = 0
    with_agent: Count = 0
    for_agent: Count = 0


class LendDevices(Frame):
    """The trainer has nothing to train, and lends its devices until they are returned. `window` is the trainer's number
    of the loan, and grows.

    `begun` says that a part of the present step is trained already. `arrived_tokens` wait at the trainer; training
    takes `train_s_per_token`, 0 before it is measured; `last_share` of a step's training can begin only after its last
    sample has arrived.
    """

    window: Count
    begun: bool
    arrived_tokens: Count
    train_s_per_token: Seconds
    last_share: Annotated[float, Meta(ge=0, le=1)]


class ReclaimDevices(Frame):
    """The trainer needs its devices now: it brings its ranks up anew, or ends."""

    window: Count


class WindowStatus(Frame):
    """The window stays open for `left_s`, or until all is generated (None), if nothing changes. Sent every half second:
    a trainer that hears nothing for long takes its devices back."""

    window: Count
    left_s: Seconds | None
    reason: Text


class DevicesReturned(Frame):
    """No local engine uses the trainer's devices."""

    window: Count
    reason: Text


class Sleep(Frame):
    """Tells a local instance without samples to let its engine give memory back."""


class Asleep(Frame):
    """The engine gave its memory back in `seconds`; or it could not, because of `error`, and does nothing."""

    seconds: Seconds
    error: Text = ""


class Wake(Frame):
    """Tells a local instance to let its engine take its memory again."""


class Awake(Frame):
    seconds: Seconds


class Attached(Frame):
    protocol: int
    epoch: Count
    version: Version


class Done(Frame):
    """Complete groups, as `pack_groups` writes them."""

    purpose: Name
    groups: bytes
    more: bool = False
    """Whether the last group is too large for this frame and goes on in the next Done frame, which begins with more of
    its samples. Its prompt and meta come with its first samples only."""


class FinishedSample(Frame):
    """Sample `index` of a group has finished, with these tokens (int32), for the reason `finish`."""

    group: int
    index: Count
    tokens: bytes
    finish: Name


class Finished(Frame):
    """Samples that are finished while others of their groups are not, to be scored ahead. They come again with their
    groups, which alone count. Each is announced once at most, and may not be."""

    purpose: Name
    samples: Annotated[list[FinishedSample], Meta(max_length=MAX_LIST)]


class Failed(Frame):
    """These groups cannot be generated: a sample of each failed on every instance and with every seed."""

    purpose: Name
    ids: Ids
    message: Text


KINDS: dict[str, type[Frame]] = {
    "hello": Hello,
    "welcome": Welcome,
    "assign": Assign,
    "cancel": Cancel,
    "ack": Ack,
    "drain": Drain,
    "reject": Reject,
    "weights": Weights,
    "loaded": Loaded,
    "load_failed": LoadFailed,
    "fetch_fault": FetchFault,
    "engine_limits": EngineLimits,
    "draining": Draining,
    "engine_died": EngineDied,
    "attach": Attach,
    "attached": Attached,
    "request": Request,
    "groups_stored": GroupsStored,
    "publish": Publish,
    "trainer_status": TrainerStatus,
    "sample_counts": SampleCounts,
    "lend_devices": LendDevices,
    "reclaim_devices": ReclaimDevices,
    "window_status": WindowStatus,
    "devices_returned": DevicesReturned,
    "sleep": Sleep,
    "asleep": Asleep,
    "wake": Wake,
    "awake": Awake,
    "done": Done,
    "finished": Finished,
    "failed": Failed,
}
