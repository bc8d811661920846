"""The frames that come seldom between the rollout manager and an agent, or a trainer: one typed struct a kind.

`codec` says how they travel, `progress` has the one frame that comes often, `fields` the bounds of what they hold.

Invariants:
- *versioned*: the first frame of a connection says the protocol it speaks; another number is refused;
- *nothing executes*: a frame is numbers, text and bytes. Nothing is unpickled or imported;
- *a sample is addressed by row and lease*: `row` is where the manager keeps it, `lease` grows with every
  assignment, so what an earlier holder still sends about a sample is recognised as such.

This module must not know about sockets or what the frames bring about.
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

PROTOCOL = 4
"""One more whenever a frame gets or loses a field: frames permit no others, and who has an older Gyre is to hear of the
protocol, not of a field."""


class Frame(Struct, kw_only=True, forbid_unknown_fields=True):
    """A frame, or a part of one. What is made here is not checked; what is decoded is (`codec.checked` checks both)."""


class Held(Frame):
    """A sample that an agent still has: `length` tokens of it are known to the agent, the first `start` of them
    came with the assignment."""

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
    """Fingerprint of what the engine serves, weights apart; all instances of a job have the same."""
    engine: Text
    max_running: Annotated[int, Meta(ge=1, le=1 << 20)]
    kv_tokens: Annotated[int, Meta(ge=1, lt=2**40)]
    version: Version = -1
    """The policy version loaded and verified; -1 for none."""
    checksum: Text = ""
    source: AddressOrNone = ""
    """Where others can fetch that version; "" where nobody can."""
    held: Annotated[list[Held], Meta(max_length=MAX_LIST)] = field(default_factory=list)
    local: bool = False
    """On the trainer's own devices: it works within windows."""
    asleep: bool = False
    """Its engine has given its memory back."""
    node: Text = ""
    pid: Count = 0


class Keep(Frame):
    """Of what an agent holds, what it goes on with: `known` tokens are in the ledger, the rest is to be sent.

    `lineage` is of what is in the ledger; an agent that has other tokens there hands the sample back.
    """

    key: Count
    row: Count
    lease: Count
    known: Count
    lineage: Text = ""


class Weights(Frame):
    """A policy version, to be fetched, verified and loaded. `checksum` stands for all its bytes: whoever serves it has
    the manifest that it is the checksum of."""

    version: Version
    checksum: Name
    sources: Addresses = field(default_factory=list)
    """host:port of those who serve it, the publisher first."""
    local_path: Text = ""
    """Its folder, on the machine that published it; the checksums hold there as well."""
    ahead: bool = False
    """To be fetched and verified, and loaded when it is told again without this."""


class Welcome(Frame):
    protocol: int
    epoch: Count
    interval_s: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    """How often to report."""
    keep: Annotated[list[Keep], Meta(max_length=MAX_LIST)]
    """What is held and not listed here is to be dropped: it went on elsewhere."""
    weights: Weights | None = None
    update_mode: Literal["in_place", "retract", "handover"] = "in_place"
    plane: WeightsSpec = field(default_factory=WeightsSpec)
    """By which way, in which form, and from whom to get weights."""


class Work(Frame):
    """One sample to go on with: `prior` are the tokens (int32) that it has already."""

    row: Count
    lease: Count
    key: Count
    ticket: Count
    prior: bytes
    seed: Count


class Prompt(Frame):
    """What the samples of one ticket have in common. `tokens` is int32; `sampling` has the dialect's names."""

    ticket: Count
    tokens: bytes
    sampling: Sampling


class Assign(Frame):
    prompts: Annotated[list[Prompt], Meta(max_length=MAX_LIST)]
    work: Annotated[list[Work], Meta(max_length=MAX_LIST)]


class Cancel(Frame):
    """Stop these; tokens not yet sent are sent with their end (`released`)."""

    rows: Annotated[list[tuple[int, int]], Meta(max_length=MAX_LIST)]
    """(row, lease)."""


class Ack(Frame):
    """Progress up to and including `seq` is in the ledger. Comes when an end was committed, else seldom."""

    seq: Count


class Drain(Frame):
    """Hand over what runs, take nothing more, and leave."""

    deadline_s: Seconds
    reason: Text = ""


class Reject(Frame):
    """The manager will not work with this peer; it closes the connection after it."""

    code: Name
    message: Text


class Loaded(Frame):
    """A version is loaded and its checksums are right.

    The engine stood for `pause_s` of the `load_s`. `how`: the engine was started with it, or read it by Gyre's `loader`
    or from the `disk`; `note` says why not by the loader. "" where nothing was loaded anew.
    """

    version: Version
    checksum: Name
    fetch_s: Seconds
    load_s: Seconds
    pause_s: Seconds = 0.0
    how: Literal["", "start", "loader", "disk"] = ""
    note: Text = ""
    source: AddressOrNone = ""
    """Where others can fetch it; "" where nobody can."""
    fetched: Text = ""
    """By which way it came, from how many sources, in which codec and why."""
    way: Text = ""
    """`linked` or `shared` on one machine, `tcp`, `mooncake`, several as in `mooncake+tcp`; `here` where all of it was
    there already; "" where nothing was fetched."""
    codec: Text = ""
    """Of most of its chunks that did not go as they are."""
    why: Text = ""


class WeightsTrouble(Frame):
    """Something went wrong while a version was fetched, and was mended: a source died, stalled or sent other bytes, a
    fetch was gone on with. `evidence` is JSON."""

    version: Version
    what: Name
    evidence: Text


class LoadFailed(Frame):
    version: Version
    error: Text


class Draining(Frame):
    """The agent was told to leave by somebody else: a signal, a file, a preemption notice."""

    reason: Text
    deadline_s: Seconds


class EngineDied(Frame):
    """`tail` is the end of what the engine printed. What ran there is in the reports, as ended by `died`. The agent
    starts another engine and keeps its connection."""

    message: Text
    tail: Text = ""


class Attach(Frame):
    """A trainer's first frame. `term` is its incarnation: an older one is refused."""

    protocol: int
    term: Count


class Request(Frame):
    """Groups to generate: `groups` as `pack_groups` writes them, without samples. `purpose` and a group's id
    together name the request; a repeated one is not done twice. `sampling` has the dialect's names.

    `min_version`: no token may come from an older policy. `pinned`: no token may come from a newer one.
    """

    purpose: Name
    groups: bytes
    n: Annotated[int, Meta(ge=1, le=4096)]
    sampling: Sampling
    seed: Count
    min_version: Version
    pinned: bool = False


class Taken(Frame):
    """The trainer has these groups in its own ledger: the manager may forget them."""

    purpose: Name
    ids: Ids


class Publish(Frame):
    """A policy version: in the folder `path` of the machine that published it, and at `sources` (host:port). `model` is
    the fingerprint of its shape; it may be left out where the manager can read the folder."""

    version: Version
    checksum: Name
    path: Text
    sources: Addresses = field(default_factory=list)
    model: Text = ""


class Pulse(Frame):
    """How the trainer fares, every so often: at `at_s` of its own clock it had waited `waited_s` in all, with nothing
    else to do, for samples. `wanted` is how many rollout vertices there are to be, as the master announced it."""

    at_s: Seconds
    waited_s: Seconds
    wanted: Annotated[int, Meta(ge=0, le=1 << 20)]


class LendDevices(Frame):
    """The trainer has nothing to train: its devices may generate until they are handed back. `window` is the trainer's
    number for it, and grows.

    `begun`: a part of the present step is trained already. `arrived_tokens` wait at the trainer to be trained; a token
    takes it `train_s_per_token`, 0 before measured; `last_share` of a step's training can begin only when its last
    sample is there.
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
    """The window stays open for `left_s`, None for until all is generated, if nothing changes. Told every half second:
    a trainer that hears nothing for long takes its devices back."""

    window: Count
    left_s: Seconds | None
    reason: Text


class DevicesReturned(Frame):
    """No local engine uses the trainer's devices."""

    window: Count
    reason: Text


class Sleep(Frame):
    """A local instance, which has no samples, lets its engine give memory back."""


class Asleep(Frame):
    """It did, in `seconds`; or its engine could not, for `error`, and does nothing."""

    seconds: Seconds
    error: Text = ""


class Wake(Frame):
    """A local instance's engine takes its memory again."""


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
    """The last group goes on in the next Done frame, which begins with further samples of it: it is too large for one
    frame. Its prompt and what the data set said of it come with its first samples only."""


class Failed(Frame):
    """These groups cannot be generated: a sample of each failed wherever and with whatever seed it was tried."""

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
    "weights_trouble": WeightsTrouble,
    "draining": Draining,
    "engine_died": EngineDied,
    "attach": Attach,
    "attached": Attached,
    "request": Request,
    "taken": Taken,
    "publish": Publish,
    "pulse": Pulse,
    "lend": LendDevices,
    "reclaim": ReclaimDevices,
    "window_news": WindowStatus,
    "handed_back": DevicesReturned,
    "sleep": Sleep,
    "asleep": Asleep,
    "wake": Wake,
    "awake": Awake,
    "done": Done,
    "failed": Failed,
}
