"""The requests of a fleet's door over the open groups: who asked for what under which id, what of it is in the ledger,
and when it is forgotten. Pure.

A request is a group of one prompt, and its group's `meta` says whose it is. So the rows of groups and deltas are all
that is stored: the fold of these rows is this state, and samples go on as those of a trainer do.

Invariants:
- *written before answered*: `told` has the lengths, versions and ends that are in the ledger, and nothing else is told;
- *same id same tokens*: while an id is kept, whoever asks again joins the request that is there. The same id with
  something else asked is refused, and tokens that were told are never replaced by others: where a sample cannot be
  generated its request has failed for good;
- *a key sees its own*: an id belongs to the key that first asked with it;
- *a pin ends*: an exact version is the newest or refused, so that a publish waits for those that were pinned before it,
  and for none that come later;
- *bounded*: a key has so many open requests, and its requests, open or kept, take so many bytes; all answers that are
  kept have so many tokens, and whoever has the least of them is refused last.

This module must not know about HTTP or what a client's request looks like, and reads no clock: `now` is an argument.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.request_body import refused
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import INDEX_BITS, InFlightRequest
from gyre.rollouts.plane.text_stops import STOP
from gyre.rollouts.protocol.codec import checked
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.samples import Group, VersionRun, pack_groups
from gyre.rollouts.token_log.write_buffer import WriteBatch

PURPOSE = "door"

_ID, _KEY, _ASKED, _AT = "door.id", "door.key", "door.asked", "door.at"
"""Keys of a group's `meta`: the request's id, whose it is, the digest of what was asked, and when, in seconds since
1970."""

_SESSION, _PARENT, _NOTE = "door.session", "door.parent", "door.note"
"""Of a turn of a conversation: the client's name for that, the number of the request that it goes on from, and what its
front wants to find again."""


REQUEST_BYTES, SAMPLE_BYTES, TOKEN_BYTES = 2048, 1024, 8
"""What a request takes in the manager beside its prompt, a sample beside its tokens, and a token: its id, its
log-prob."""


class Wish(NamedTuple):
    """Which policies may answer: none older than `at_least`; with `exact`, none newer either."""

    at_least: int = 0
    exact: bool = False


ANY = Wish()


class AskedTurn(NamedTuple):
    """Which turn of the client's conversation `session` a request is: the number of the request that it goes on from,
    below 0 for none, and a note of its front's."""

    session: str
    parent: int
    note: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for under `id`: `n` samples of the prompt, int32 `[p]`. `sampling` has the dialect's names.
    `stops` are the model's end tokens, which end a sample too."""

    id: str
    prompt_ids: NDArray[np.int32]
    n: int
    sampling: dict[str, Any]
    wish: Wish = ANY
    stops: tuple[int, ...] = ()
    turn: AskedTurn | None = None

    @property
    def digest(self) -> str:
        """Of all that the client says of the tokens: requests with the same one ask for the same, whatever the model's
        end tokens are by then."""
        told = [
            self.prompt_ids.astype("<i4").tobytes(),
            self.n,
            sorted(self.sampling.items()),
            list(self.wish),
        ]
        return hashlib.sha256(bytes(msgpack.packb(told))).hexdigest()

    def drawing(self) -> dict[str, Any]:
        """How its samples are drawn."""
        if not self.stops or self.sampling.get("ignore_eos"):
            return self.sampling
        own = self.sampling.get("stop_token_ids") or ()
        return {**self.sampling, "stop_token_ids": sorted({*own, *self.stops})}


class ToldSample(NamedTuple):
    """How much of a sample is in the ledger: its length in tokens, its end, and the versions of its tokens, which its
    engine may have corrected at the end."""

    length: int = 0
    finish: str = ""
    versions: tuple[VersionRun, ...] = ()


class SampleView(NamedTuple):
    """What may be told of a sample: `token_ids` int32 `[t]`, `logprobs` float32 `[t]`, `versions` covers the tokens,
    `finish` is `stop`, `length`, `abort`, or "" while it goes on."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish: str


@dataclass(eq=False, slots=True)
class DoorRequest:
    """A request that is kept."""

    id: str
    owner: str
    digest: str
    at: float
    """When it was first asked for, in seconds since 1970."""
    request: InFlightRequest
    told: list[ToldSample] = field(default_factory=list)
    """Of each sample."""
    failed: str = ""
    """Why it cannot be generated; that is in the ledger too."""
    ended_at: float | None = None
    """When its end came into the ledger."""
    size: int = 0
    """What it counts for in its key's bound."""
    aborted: list[SampleView] | None = None
    """What could be told of each sample when its client ended it; it is forgotten since."""

    @property
    def session(self) -> str:
        """The conversation that it is a turn of; "" for none."""
        return str(self.request.group.meta.get(_SESSION, ""))

    @property
    def parent(self) -> int:
        """The number of the request that it goes on from; below 0 for none."""
        return int(self.request.group.meta.get(_PARENT, -1))

    @property
    def note(self) -> bytes:
        return bytes(self.request.group.meta.get(_NOTE, b""))

    @property
    def is_over(self) -> bool:
        """Nothing more can be told of it."""
        return self.ended_at is not None or self.aborted is not None

    @property
    def tokens(self) -> int:
        return sum(one.length for one in self.told)

    def view(self) -> list[SampleView]:
        """What may be told of each sample."""
        if self.aborted is not None:
            return self.aborted
        views = []
        for sample, told in zip(self.request.samples, self.told, strict=True):
            if sample.length < told.length:  # it was begun anew, and the request fails with the next commit
                views.append(SampleView(np.empty(0, np.int32), np.empty(0, np.float32), (), ""))
                continue
            ids, logprobs = sample.tokens()
            views.append(SampleView(ids[: told.length], logprobs[: told.length], told.versions, told.finish))
        return views


class DoorLedger:
    """`keep_s`, `keep_tokens` and `most_open` as in `gyre.config.DoorSpec`. `groups` gives a sample up when it was
    quarantined once."""

    def __init__(
        self, groups: OpenGroups, *, keep_s: float, keep_tokens: int, most_open: int, key_bytes: int = 1 << 40
    ) -> None:
        self._groups = groups
        self._keep_s, self._keep_tokens, self._most_open = keep_s, keep_tokens, most_open
        self._key_bytes = key_bytes
        self.bytes_of: Counter[str] = Counter()
        """What the requests of each key take, open ones and those that are kept."""
        self._by_id: dict[str, DoorRequest] = {}
        self._by_number: dict[int, DoorRequest] = {}
        self._turns: dict[tuple[str, str], dict[int, DoorRequest]] = defaultdict(dict)
        """By key and conversation, the requests that are its turns, by number."""
        self._open: Counter[str] = Counter()
        """Requests of each key that have not ended."""
        self._ended: dict[int, DoorRequest] = {}
        """In the order of their ends, by number."""
        self.kept_tokens = 0
        """Of those that have ended."""
        self._collected: list[tuple[DoorRequest, list[ToldSample], str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def open_count(self) -> int:
        return len(self._by_id) - len(self._ended)

    # -- what clients ask ---------------------------------------------------------------------------

    def ask(self, owner: str, asked: Asked, *, newest: int, now: float) -> tuple[DoorRequest, bool]:
        """The request of this id, and whether it is new. `newest` is the newest published version. Raises
        RequestRefused."""
        known = self._by_id.get(asked.id)
        if known is not None:
            return self._again(known, owner, asked), False
        wish = asked.wish
        if wish.at_least > newest:
            raise refused(
                409,
                "policy_unknown",
                f"Version {wish.at_least} is not published; the newest is {newest}."
                if newest >= 0
                else "No policy is published yet.",
                "Publish it first, by POST /v1/policies.",
            )
        if wish.exact and wish.at_least < newest:
            raise refused(
                409,
                "policy_gone",
                f"Version {wish.at_least} is asked for exactly, and {newest} is published.",
                "Ask for the newest, or for at_least.",
            )
        if self._open[owner] >= self._most_open:
            raise refused(
                429,
                "too_many_open",
                f"{self._most_open} requests of this key are not answered yet.",
                "Wait for some of them; rollouts.door.most_open is the bound.",
            )
        self._check_bytes(owner, asked)
        if self.kept_tokens >= self._keep_tokens and not self._has_less_than_others(owner):
            raise refused(
                429,
                "ledger_full",
                f"{self.kept_tokens} tokens of answers are kept, and no more than {self._keep_tokens} may be.",
                "Delete requests that you have the answers of, or change rollouts.door.keep_s or keep_tokens.",
            )
        return self._begin(owner, asked, now), True

    def _check_bytes(self, owner: str, asked: Asked) -> None:
        """Raises RequestRefused where the key's requests would take too many bytes."""
        taken, more = self.bytes_of[owner], _bytes_of(asked.prompt_ids, asked.n, 0, asked.sampling)
        if taken + more <= self._key_bytes:
            return
        if not self.bytes_of[owner]:
            del self.bytes_of[owner]
        raise refused(
            429,
            "key_full",
            f"The requests of this key take {taken} bytes, this one {more}, and no more than {self._key_bytes} may be.",
            "Delete requests that you have the answers of, or change rollouts.door.key_bytes or keep_s.",
        )

    def _has_less_than_others(self, owner: str) -> bool:
        """Whether the key has less than its equal share of what all keys have."""
        others = sum(1 for other in self.bytes_of if other != owner)
        return self.bytes_of.get(owner, 0) * (others + 1) < self.bytes_of.total()

    def _count_bytes(self, known: DoorRequest) -> None:
        """The request takes as many bytes as it has tokens for now."""
        request = known.request
        now = _bytes_of(request.group.prompt_ids, request.n, known.tokens, request.sampling)
        self.bytes_of[known.owner] += now - known.size
        known.size = now

    def _again(self, known: DoorRequest, owner: str, asked: Asked) -> DoorRequest:
        if known.owner != owner:
            raise refused(403, "not_yours", f"The id {asked.id!r} is another key's.", "Take another id.")
        if known.digest != asked.digest:
            raise refused(
                422,
                "other_request",
                f"Something else was asked with the id {asked.id!r}.",
                "Take another id.",
            )
        return known

    def _begin(self, owner: str, asked: Asked, now: float) -> DoorRequest:
        meta: dict[str, Any] = {_ID: asked.id, _KEY: owner, _ASKED: asked.digest, _AT: now}
        if asked.turn is not None:
            meta |= {_SESSION: asked.turn.session, _PARENT: asked.turn.parent, _NOTE: asked.turn.note}
        group_id, drawing = _group_id(owner, asked.id), dict(asked.drawing())
        texts = drawing.pop(STOP, ())
        try:
            frame = checked(
                Request,
                purpose=PURPOSE,
                groups=pack_groups([Group(group_id, asked.prompt_ids, meta)]),
                n=asked.n,
                sampling=drawing,
                seed=0,
                min_version=asked.wish.at_least,
                pinned=asked.wish.exact,
            )
            opened = self._groups.open(frame, texts)
        except FrameError as error:
            raise refused(422, "invalid", str(error.message)) from None
        if not opened:  # two ids with the same 63 bits of SHA-256
            raise refused(
                409, "other_request", f"The id {asked.id!r} cannot be taken now.", "Take another id."
            )
        return self._take(opened[0])

    def find(self, owner: str, request_id: str) -> DoorRequest:
        """Raises RequestRefused where this key has no such request."""
        known = self._by_id.get(request_id)
        if known is None:
            raise refused(404, "not_found", f"There is no request {request_id!r}.")
        if known.owner != owner:
            raise refused(403, "not_yours", f"The id {request_id!r} is another key's.")
        return known

    # -- the ledger ---------------------------------------------------------------------------------

    def collect(self, batch: WriteBatch) -> None:
        """Note how far the requests are that the batch has something of. To be called when the batch is taken."""
        touched: set[int] = set(batch.opened)
        for delta in batch.deltas:
            for keys in delta.keys:
                touched.update((keys >> INDEX_BITS).tolist())
            touched.update(int(end[0]) >> INDEX_BITS for end in delta.ends)
        self._collected = [
            (known, _told(known.request), self._why_failed(known.request))
            for number in touched
            if (known := self._by_number.get(number)) is not None
        ]

    def committed(self, now: float) -> list[DoorRequest]:
        """The batch that was collected last is in the ledger. Returns the requests of which more can be told."""
        collected, self._collected = self._collected, []
        changed = []
        for known, told, failed in collected:
            if self._by_number.get(known.request.number) is known:
                self._tell(known, told, failed, now)
                changed.append(known)
        return changed

    def restore(self, now: float) -> None:
        """Fold what the groups were restored from: all of it is in the ledger."""
        for request in self._groups.requests.values():
            known = self._take(request)
            self._tell(known, _told(request), self._why_failed(request), now)

    def _take(self, request: InFlightRequest) -> DoorRequest:
        meta = request.group.meta
        known = DoorRequest(
            meta[_ID], meta[_KEY], meta[_ASKED], meta[_AT], request, [ToldSample()] * request.n
        )
        self._by_id[known.id] = self._by_number[request.number] = known
        if known.session:
            self._turns[known.owner, known.session][request.number] = known
        self._open[known.owner] += 1
        self._count_bytes(known)
        return known

    def _tell(self, known: DoorRequest, told: list[ToldSample], failed: str, now: float) -> None:
        if known.ended_at is not None:  # of a request that failed, other samples may go on
            self.kept_tokens += sum(one.length for one in told) - known.tokens
        known.told, known.failed = told, failed
        self._count_bytes(known)
        if known.ended_at is None and (failed or all(one.finish for one in told)):
            known.ended_at = now
            self._ended[known.request.number] = known
            self.kept_tokens += known.tokens
            self._count_down(known.owner)

    def _why_failed(self, request: InFlightRequest) -> str:
        for sample in request.samples:
            if sample.key in self._groups.given_up:
                return "; ".join(sample.evidence)[:2000] or "its engines died with it"
        return ""

    def _count_down(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]

    # -- the end ------------------------------------------------------------------------------------

    def forget(self, now: float) -> list[DoorRequest]:
        """Close the requests that ended `keep_s` ago. Returns them."""
        over = []
        for known in self._ended.values():
            if known.ended_at is None or now - known.ended_at < self._keep_s:
                break
            over.append(known)
        self.close(over)
        return over

    def abort(self, owner: str, request_id: str | None) -> list[DoorRequest]:
        """Forget the key's requests that run, or the one of this id, and keep what may be told of them for those who
        wait. Returns them."""
        some = (
            self.running(owner)
            if request_id is None
            else [known for known in self.running(owner) if known.id == request_id]
        )
        for known in some:
            known.aborted = [view._replace(finish=view.finish or "abort") for view in known.view()]
        self.close(some)
        return some

    def running(self, owner: str) -> list[DoorRequest]:
        """The key's requests that have not ended."""
        if owner not in self._open:
            return []
        return [known for known in self._by_id.values() if known.owner == owner and known.ended_at is None]

    def close(self, some: Iterable[DoorRequest]) -> None:
        """Forget these requests; what of them still runs is in the groups' `cancelled`."""
        for known in list(some):
            number = known.request.number
            del self._by_id[known.id], self._by_number[number]
            if known.session:
                self._forget_turn(known)
            self.bytes_of[known.owner] -= known.size
            if not self.bytes_of[known.owner]:
                del self.bytes_of[known.owner]
            if self._ended.pop(number, None) is not None:
                self.kept_tokens -= known.tokens
            else:
                self._count_down(known.owner)
            self._groups.cancelled += self._groups.close(PURPOSE, [known.request.group.id])

    def _forget_turn(self, known: DoorRequest) -> None:
        named = known.owner, known.session
        del self._turns[named][known.request.number]
        if not self._turns[named]:
            del self._turns[named]

    def turns(self, owner: str, session: str) -> Mapping[int, DoorRequest]:
        """The requests of the key that are turns of this conversation, by number, the oldest first."""
        return self._turns.get((owner, session), {})

    def requests(self) -> Mapping[str, DoorRequest]:
        """Those that are kept, by id."""
        return self._by_id


def _bytes_of(prompt_ids: NDArray[Any], n: int, tokens: int, sampling: Mapping[str, Any]) -> int:
    """What a request takes in the manager. Of its sampling only lists can be large."""
    lists = sum(len(value) for value in sampling.values() if isinstance(value, list | tuple))
    return REQUEST_BYTES + TOKEN_BYTES * (len(prompt_ids) + lists + tokens) + SAMPLE_BYTES * n


def _told(request: InFlightRequest) -> list[ToldSample]:
    return [
        ToldSample(sample.length, sample.finish, tuple(VersionRun(*run) for run in sample.runs))
        for sample in request.samples
    ]


def _group_id(owner: str, request_id: str) -> int:
    """63 bits, from which the seeds follow: whoever asks again after the request was forgotten draws the same."""
    digest = hashlib.sha256(f"{owner}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
