"""What passes between the rollout manager and an agent, or a trainer: msgpack frames over one WebSocket.

A frame is the array `[kind, body]`. Bodies are checked field by field before anything is done with them; the only
one that comes often, `Progress`, holds columns (one element a sample) as raw little-endian bytes and is checked as
arrays. A frame that is not what this file describes raises FrameError, which has a code and names the field.

Invariants:
- *versioned*: the first frame of a connection says the protocol it speaks; another number is refused;
- *nothing executes*: a frame is numbers, text and bytes. Nothing is unpickled or imported;
- *a sample is addressed by row and lease*: `row` is where the manager keeps it, `lease` grows with every
  assignment, so what an earlier holder still sends about a sample is recognised as such.

This module must not know about sockets or what the frames bring about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gyre.config import WeightsSpec
from gyre.errors import GyreError
from gyre.rollouts.protocol.columns import COLUMNS, ColumnFault, ReportColumns, join_columns

PROTOCOL = 3
"""One more whenever a frame gets or loses a field: frames permit no others, and who has an older Gyre is to hear of the
protocol, not of a field."""

MAX_FRAME_BYTES = 64 << 20
"""Of one frame: 16,384 samples that each bring 250 tokens fit; nobody can make the manager allocate more."""

MAX_LIST = 1 << 18
"""Elements of one list: ends, held samples, ids."""

MAX_TEXT = 64 << 10
"""Of one text in a frame, an engine's last words included."""


class FrameError(GyreError):
    """A frame that is not what the protocol says. `details["reason"]` is a stable code."""

    code = "rollouts.frame"


def refuse(reason: str, message: str) -> FrameError:
    return FrameError(message, details={"reason": reason})


def lineage(prompt: NDArray[np.int32], seed: int, tokens: NDArray[np.int32]) -> str:
    """Names a sample as far as it got: who has the same goes on from the same tokens. xxh3-64 in hexadecimal."""
    digest = xxhash.xxh3_64(seed.to_bytes(8, "little"))
    for ids in (prompt, tokens):
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()


# -- frames that come seldom ------------------------------------------------------------------------

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Version = Annotated[int, Field(ge=-1, lt=2**31)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sampling = dict[
    Annotated[str, Field(max_length=100)],
    bool | int | Annotated[float, Field(allow_inf_nan=False)] | list[int] | tuple[int, ...] | None,
]
"""By the dialect's names."""


class Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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
    max_running: Annotated[int, Field(ge=1, le=1 << 20)]
    kv_tokens: Annotated[int, Field(ge=1, lt=2**40)]
    version: Version = -1
    """The policy version loaded and verified; -1 for none."""
    checksum: Text = ""
    source: Text = ""
    """host:port where others can fetch that version; "" where nobody can."""
    held: list[Held] = Field(default_factory=list)
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
    sources: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)
    """host:port of those who serve it, the publisher first."""
    local_path: Text = ""
    """Its folder, on the machine that published it; the checksums hold there as well."""
    ahead: bool = False
    """To be fetched and verified, and loaded when it is told again without this."""


class Welcome(Frame):
    protocol: int
    epoch: Count
    interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """How often to report."""
    keep: list[Keep]
    """What is held and not listed here is to be dropped: it went on elsewhere."""
    weights: Weights | None = None
    update_mode: Literal["in_place", "retract", "handover"] = "in_place"
    plane: WeightsSpec = Field(default_factory=WeightsSpec)
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
    prompts: list[Prompt]
    work: list[Work]


class Cancel(Frame):
    """Stop these; tokens not yet sent are sent with their end (`released`)."""

    rows: list[tuple[int, int]]


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
    source: Text = ""
    """host:port where others can fetch it; "" where nobody can."""
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
    n: Annotated[int, Field(ge=1, le=4096)]
    sampling: Sampling
    seed: Count
    min_version: Version
    pinned: bool = False


class Taken(Frame):
    """The trainer has these groups in its own ledger: the manager may forget them."""

    purpose: Name
    ids: list[int]


class Publish(Frame):
    """A policy version: in the folder `path` of the machine that published it, and at `sources` (host:port). `model` is
    the fingerprint of its shape; it may be left out where the manager can read the folder."""

    version: Version
    checksum: Name
    path: Text
    sources: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)
    model: Text = ""


class Pulse(Frame):
    """How the trainer fares, every so often: at `at_s` of its own clock it had waited `waited_s` in all, with nothing
    else to do, for samples. `wanted` is how many rollout vertices there are to be, as the master announced it."""

    at_s: Seconds
    waited_s: Seconds
    wanted: Annotated[int, Field(ge=0, le=1 << 20)]


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
    last_share: Annotated[float, Field(ge=0, le=1)]


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
    """Groups that are whole, as `pack_groups` writes them."""

    purpose: Name
    groups: bytes


class Failed(Frame):
    """These groups cannot be generated: a sample of each failed wherever and with whatever seed it was tried."""

    purpose: Name
    ids: list[int]
    message: Text


class Status(Frame):
    """How the plane is, for the trainer's progress view and for people."""

    body: dict[str, Any]


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
    "status": Status,
}
_NAMES = {cls: kind for kind, cls in KINDS.items()}
PROGRESS = "progress"


# -- the frame that comes often ---------------------------------------------------------------------


@dataclass(slots=True)
class End:
    """How a sample's stay on an instance ended. `stop` and `length` end the sample; `released` hands it back
    unharmed; `failed` hands it back with a reason, which counts against it; `died` says that the engine died with it,
    all that ran there in one frame. `runs`, where given, is the truth about
    the versions of all tokens that came under this lease: (version, tokens) one after another."""

    row: int
    lease: int
    kind: str
    message: str = ""
    runs: tuple[tuple[int, int], ...] = ()


END_KINDS = frozenset(("stop", "length", "released", "failed", "died"))


@dataclass(slots=True)
class Progress:
    """What was generated since the last frame: element `i` of each column belongs to one sample.

    `rows` uint32, strictly increasing; `leases` uint64; `starts` uint32, the tokens the sample had before;
    `counts` uint32, none 0; `versions` int32, the policy of these tokens. `tokens` int32 and `logprobs` float32 hold
    the samples' tokens one after another. `ends` are judged after the tokens. `running`, `waiting` and `used_tokens`
    say how full the engine is, `rate_tokens_s` how fast it has been lately.
    """

    seq: int
    rows: NDArray[np.uint32]
    leases: NDArray[np.uint64]
    starts: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    versions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ends: list[End] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    rate_tokens_s: float = 0.0

    @property
    def columns(self) -> ReportColumns:
        return ReportColumns(
            self.rows, self.leases, self.starts, self.counts, self.versions, self.tokens, self.logprobs
        )


@dataclass(slots=True)
class Report:
    """A Progress as it came: its ends and its load are checked, its columns are bytes that nobody has looked at."""

    seq: int
    columns: list[bytes]
    """Rows, leases, starts, counts, versions, tokens, log-probs."""
    ends: list[End]
    load: tuple[int, int, int, float]
    """running, waiting, used_tokens, rate_tokens_s."""

    def unfold(self) -> Progress:
        """Raises FrameError where a column is not what it should be."""
        joined = join_columns([self.columns])
        if isinstance(joined, ColumnFault):
            raise refuse(joined.reason, joined.message)
        return Progress(self.seq, *joined.columns, self.ends, *self.load)


def empty_progress(seq: int) -> Progress:
    return Progress(
        seq,
        np.empty(0, np.uint32),
        np.empty(0, np.uint64),
        np.empty(0, np.uint32),
        np.empty(0, np.uint32),
        np.empty(0, np.int32),
        np.empty(0, np.int32),
        np.empty(0, np.float32),
    )


def encode(frame: Frame | Progress) -> bytes:
    if isinstance(frame, Progress):
        body = [
            frame.seq,
            *(np.ascontiguousarray(getattr(frame, name), dtype=dtype).data for name, dtype in COLUMNS),
            [[end.row, end.lease, end.kind, end.message, end.runs] for end in frame.ends],
            [frame.running, frame.waiting, frame.used_tokens, frame.rate_tokens_s],
        ]
        return bytes(msgpack.packb([PROGRESS, body], use_bin_type=True))
    return bytes(msgpack.packb([_NAMES[type(frame)], frame], default=_fields, use_bin_type=True))


def _fields(frame: Any) -> dict[str, Any]:
    """Of a frame, or of one within it. Faster than `model_dump`, which makes plain copies of what is plain already."""
    if not isinstance(frame, BaseModel):
        raise TypeError(f"{type(frame).__name__} has no wire form")
    return frame.__dict__


def decode(data: bytes) -> Frame | Progress:
    """Raises FrameError for whatever is not a frame of this protocol."""
    frame = unpack(data)
    return frame.unfold() if isinstance(frame, Report) else frame


def unpack(data: bytes) -> Frame | Report:
    """As `decode`, but a Progress comes as a Report, whose columns are yet to be checked."""
    if len(data) > MAX_FRAME_BYTES:
        raise refuse("oversized", f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are taken")
    try:
        kind, body = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_map_len=1 << 16,
            max_array_len=MAX_LIST,  # a header of five bytes may claim any length
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise refuse("malformed", f"{len(data)} bytes that are no frame: {error!r}"[:500]) from None
    if kind == PROGRESS:
        return _report_in(body)
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise refuse("unknown_kind", f"a frame of the unknown kind {kind!r:.60}")
    if not isinstance(body, dict):
        raise refuse("malformed", f"the body of a {kind} frame is {type(body).__name__}, not a map")
    try:
        # msgpack has no tuples; strict pydantic does not make one of a list.
        return cls.model_validate(body, strict=cls is not Cancel)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise refuse("invalid", f"{kind}.{where}: {first['msg']}"[:500]) from None


def _report_in(body: Any) -> Report:
    if not isinstance(body, list) or len(body) != 10:
        raise refuse("malformed", "a progress frame has ten fields")
    seq, *columns, ends, load = body
    if type(seq) is not int or not 0 <= seq < 2**63:
        raise refuse("invalid", f"progress.seq: {seq!r:.60}")
    for raw in columns:
        if type(raw) is not bytes:
            raise refuse("invalid", f"progress: a column that is {type(raw).__name__}, not bytes")
    return Report(seq, columns, _ends_in(ends), _load_in(load))


def _ends_in(ends: Any) -> list[End]:
    if not isinstance(ends, list):
        raise refuse("invalid", "progress.ends: not a list")
    found = []
    for end in ends:
        if not isinstance(end, list) or len(end) != 5:
            raise refuse("invalid", "progress.ends: not [row, lease, kind, message, runs]")
        row, lease, kind, message, runs = end
        if type(row) is not int or type(lease) is not int or not 0 <= row < 2**32 or not 0 <= lease < 2**64:
            raise refuse("invalid", "progress.ends: row or lease is no number in range")
        if type(kind) is not str or kind not in END_KINDS:
            raise refuse("invalid", f"progress.ends: kind {kind!r:.40}")
        if not isinstance(message, str) or len(message) > MAX_TEXT:
            raise refuse("invalid", "progress.ends: message is no text, or too long")
        if not isinstance(runs, list) or not all(_is_run(run) for run in runs):
            raise refuse("invalid", "progress.ends: runs are not pairs of version and tokens")
        found.append(End(row, lease, kind, message, tuple((version, count) for version, count in runs)))
    return found


def _is_run(run: Any) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(value) is int and 0 <= value < 2**31 for value in run)
    )


def _load_in(load: Any) -> tuple[int, int, int, float]:
    if not isinstance(load, list) or len(load) != 4:
        raise refuse("invalid", "progress.load: not [running, waiting, used_tokens, rate_tokens_s]")
    running, waiting, used, rate = load
    if any(type(value) is not int or not 0 <= value < 2**40 for value in (running, waiting, used)):
        raise refuse("invalid", "progress.load: a count out of range")
    if type(rate) not in (int, float) or not 0 <= rate < 1e12:
        raise refuse("invalid", f"progress.load: rate {rate!r:.40}")
    return (
        running,
        waiting,
        used,
        float(rate) if rate > 1e-3 else 0.0,
    )  # slower is none, and divides by nothing
