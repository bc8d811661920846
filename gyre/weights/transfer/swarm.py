"""The swarm of one fetch: which peer has which chunks of a version, and which chunk to ask of which peer.

The words are BitTorrent's (Cohen, "Incentives Build Robustness in BitTorrent", 2003). A chunk is a piece. A peer has
some of the version: it is the publisher, which is the first seed, or another receiver. A peer's bitfield says
which chunks it has. Chunks are taken *rarest first*. The publisher *super-seeds*: it sends each chunk once and then
leaves it to the peer that got it, so its link carries about one copy. Peers have few *upload slots*; a peer without a
free slot says so, and another is asked.

Sets of chunks are bits of an integer: bit `i` is chunk `i`.

A fetch has *streams*, which pull chunks, and *scouts*, which ask peers what they have. Whoever names a peer may be
wrong: machines lose their power, networks swallow packets. So a peer is dialled by a scout first, and a stream is given
only to a peer that answers.

Invariants:
- *nobody is waited for alone*: a peer that failed rests, and its chunk is asked of another;
- *streams are for who answers*: a chunk is asked only of a peer of which something was heard within `FRESH_S`, so that
  however many peers die at once, each stream waits for one of them at most once;
- *one stream is for who gives*: while a peer that has given chunks has more of them, not all streams are at peers that
  have given none;
- *who is silent rests longer each time*, and costs no stream;
- *super-seeding ends*: a chunk that a peer leaves to others is asked of it again if nobody else has it for long.

This module reads no clock and starts no thread: `now` is an argument, in seconds, and the caller holds the lock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gyre.weights.transfer.chunk_transports import Source

WORSE_EACH_TIME = 2.0
FIRST_REST_S = 0.2
LONGEST_REST_S = 5.0
"""Longest rest of a source of the manager that failed; the rest doubles each time. A publisher that restarts is back in
seconds."""

LONGEST_REST_OF_NAMED_S = 60.0
"""Longest rest of a peer that only a peer has named: for it there is only the word of somebody who does not know."""

FRESH_S = 1.0
"""How long the last word of a peer says that it lives. Scouts ask again after half of it, which is many round trips."""

AWAITED_S = 5 * FRESH_S
"""How long a peer that gave chunks and then was silent keeps the last stream from peers that gave none: scouts ask it
meanwhile."""

DIALS = 8
"""Most peers that scouts dial at one time, of the manager's sources and of those that peers have named: each kind has
its own dials, so that neither keeps the other waiting."""

SCOUTS = 2 * DIALS + 2
"""Most scouts of a fetch. Two are left for peers that answer while all others dial."""

FIRST_DIAL_S = 1.0
"""How long a scout first waits for a peer that has never answered, doubled each time: more than the round trip to any
place, and so short that many dead ones do not hide the one that lives."""

MOST_SILENT = 256
"""Most peers known that have never answered. Who names others without end pushes out what it named itself."""

DAMAGED_REST_S = 60.0
"""How long a peer that sent wrong bytes twice is left alone."""

LOOK_AROUND_S = 0.25
LOOKS = 4
"""A peer is asked for a new bitfield after this time, even if others have something to fetch; but at most `LOOKS` peers
in that time, however many there are."""

FULL_FOR_S = 0.05
"""How long a peer without a free upload slot comes after all others."""

ASK_AGAIN_S = 0.02
"""Pause before a peer is asked again for a chunk that it did not have; doubled up to ten times this."""


@dataclass(slots=True)
class SwarmPeer:
    """One source of a version, as far as it is known."""

    source: Source
    bitfield: int | None = None
    """The chunks that it has; None if it has all of them, or is not known yet."""
    super_seeded: int = 0
    """The chunks that it already sent to others, which should serve them."""
    super_seeded_since: dict[int, float] = field(default_factory=dict)
    asked_at: float = float("-inf")
    again_s: float = ASK_AGAIN_S
    busy: int = 0
    """Number of this fetch's requests to it that are open."""
    full_until: float = 0.0
    """Time until which it counts as having no free upload slot."""
    rest_until: float = 0.0
    rest_s: float = FIRST_REST_S
    damaged: int = 0
    """Wrong chunks that it sent since its last right one."""
    lacks_memory: bool = False
    """Whether Mooncake cannot read its memory."""
    is_here: bool = False
    """Whether its files lie on this machine: nobody is dialled for them."""
    named: bool = False
    """Whether only a peer has named it."""
    answers: bool = False
    """Whether the last question to it was answered."""
    heard_at: float = float("-inf")
    """When something last came from it."""
    asking: bool = False
    """Whether a scout waits for its answer."""
    gave: int = 0
    """Chunks that it gave since it last failed."""
    failures: int = 0
    """How often it failed since it last gave a chunk."""

    @property
    def may_have(self) -> int:
        """The bitfield; all bits if the peer may have all chunks."""
        return -1 if self.bitfield is None else self.bitfield

    def learn(self, have: str, given: str, now: float) -> None:
        """Take in what the peer says of itself, as hexadecimal bits or "all". Raises ValueError for anything else."""
        if have:
            self.bitfield = None if have == "all" else int(have, 16)
        if given:
            fresh = int(given, 16) & ~self.super_seeded
            self.super_seeded = int(given, 16)
            self.super_seeded_since.update(dict.fromkeys(each_bit(fresh), now))

    def heard(self, now: float) -> None:
        """Something came from it."""
        self.answers, self.heard_at = True, now

    def rest(self, now: float) -> None:
        """Leave the peer alone for a while, and for longer the next time. A scout asks it first after that."""
        self.rest_until = now + self.rest_s
        longest = LONGEST_REST_OF_NAMED_S if self.named else LONGEST_REST_S
        self.rest_s = min(longest, self.rest_s * WORSE_EACH_TIME)
        self.answers, self.gave = False, 0
        self.failures += 1

    def sent_wrong_bytes(self, now: float) -> None:
        self.damaged += 1
        self.gave = 0
        self.failures += 1
        self.rest_until = now + (FIRST_REST_S if self.damaged < 2 else DAMAGED_REST_S)

    def sent_a_chunk(self) -> None:
        self.rest_s, self.damaged, self.failures = FIRST_REST_S, 0, 0
        self.gave += 1

    def dial_s(self, longest_s: float) -> float:
        """How long a scout dials it, `longest_s` at most."""
        return min(longest_s, FIRST_DIAL_S * 2.0 ** min(self.failures, 16))

    @property
    def is_hopeful(self) -> bool:
        """Whether others may leave chunks to it."""
        return bool(self.gave or not self.failures)

    def is_fresh(self, now: float) -> bool:
        """Whether a stream may ask it."""
        return self.is_here or (self.answers and now - self.heard_at <= FRESH_S)


class Reaches(Protocol):
    """Who fetches, as the swarm has it."""

    def may_pull(self, source: Source) -> bool:
        """Whether a source on another machine can be reached and may be dialled."""

    def is_here(self, source: Source) -> bool:
        """Whether it is on this machine, and read from there."""


class Swarm:
    """The peers of one fetch. `own_address` is this receiver's own, which it does not ask."""

    def __init__(self, own_address: str, receiver: Reaches, randomness: random.Random) -> None:
        self.peers: dict[Source, SwarmPeer] = {}
        self._own_address = own_address
        self._receiver = receiver
        self._random = randomness
        self._looked_at = float("-inf")
        self._hungry_at = float("-inf")
        """When a stream last found nothing to ask for."""

    def add(self, sources: Sequence[Source]) -> list[Source]:
        """Take in the sources that the manager names. Returns those that cannot be asked."""
        refused: list[Source] = []
        for source in sources:
            if source in self.peers or (source.address and source.address == self._own_address):
                continue
            here = self._receiver.is_here(source)
            if here or self._receiver.may_pull(source):
                self.peers[source] = SwarmPeer(source, is_here=here)
            elif source.address:
                refused.append(source)
        return refused

    def add_addresses(self, addresses: Sequence[str]) -> None:
        """Take in peers that a peer has named. Their chunks are not known yet, so they are asked for them first."""
        known = {source.address for source in self.peers}
        for address in addresses:
            fresh = address and address != self._own_address and address not in known
            if fresh and self._receiver.may_pull(Source(address)) and self._makes_room():
                self.peers[Source(address)] = SwarmPeer(Source(address), bitfield=0, named=True)

    def _makes_room(self) -> bool:
        """Whether there is room for another peer that peers name: one that never answered makes room."""
        silent = [
            peer
            for peer in self.peers.values()
            if peer.named and not peer.answers and peer.heard_at == float("-inf")
        ]
        if len(silent) < MOST_SILENT:
            return True
        worst = max(silent, key=lambda peer: (not peer.asking, peer.failures))
        if worst.asking or not worst.failures:
            return False
        del self.peers[worst.source]
        return True

    def add_holders(self, holders: Mapping[str, str]) -> None:
        """Take in the chunks that each peer was sent, by address, as hexadecimal bits. The peer has them now or soon,
        and says so if not. Raises ValueError for anything but hexadecimal."""
        for peer in self.peers.values():
            bits = holders.get(peer.source.address)
            if bits and peer.bitfield is not None:
                peer.bitfield |= int(bits, 16)

    def pick(
        self, open_: int, now: float, patience_s: float, streams: int = 1
    ) -> tuple[SwarmPeer, int] | None:
        """The next peer for one of `streams` streams to ask, and for which of the chunks `open_`. None if there is
        nothing to ask for now.

        Prefers peers with a free upload slot, then those that do not fail, then the manager's sources or who has given
        a chunk, then the least busy.
        """
        if not open_:
            return None
        able = self._able(now)
        self._random.shuffle(able)
        able.sort(key=lambda peer: self._rank(peer, now))
        on_trial = sum(peer.busy for peer in self.peers.values() if not peer.gave)
        askable = ((peer, self._askable(peer, open_, able, now, patience_s)) for peer in able)
        found = [(peer, chunks) for peer, chunks in askable if chunks]
        givers = [job for job in found if job[0].gave]
        may_try = on_trial + 1 < streams or not (givers or self._is_giver_awaited(open_, now))
        job = next(iter(found if may_try else givers), None)
        if job is None:
            self._hungry_at = now
            return None
        peer, chunks = job
        return peer, self._rarest_first(chunks, peer)

    def _is_giver_awaited(self, open_: int, now: float) -> bool:
        """Whether a peer that has given chunks, and was heard lately, is to say soon whether it lives."""
        return any(
            peer.gave
            and peer.answers
            and now - peer.heard_at <= AWAITED_S
            and peer.may_have & open_ & ~peer.super_seeded
            for peer in self.peers.values()
        )

    @staticmethod
    def _rank(peer: SwarmPeer, now: float) -> tuple[bool, int, bool, int, bool]:
        told_by_a_peer = peer.named and not peer.gave
        return peer.full_until > now, peer.failures, told_by_a_peer, peer.busy, not peer.super_seeded

    def look(self, now: float) -> SwarmPeer | None:
        """The next peer for a scout to ask what it has; None if there is none to ask now. The caller says what
        came of it by `heard` or `rest`, and ends `asking`."""
        peer = self._stalest(now) or self._unheard(now) or self._for_the_hungry(now)
        if peer is not None:
            peer.asking, peer.asked_at = True, now
        return peer

    def _unheard(self, now: float) -> SwarmPeer | None:
        """A peer that has not answered yet, or not the last time."""
        silent = [peer for peer in self.peers.values() if not peer.answers and not peer.is_here]
        for named in (False, True):
            of_kind = [peer for peer in silent if peer.named is named]
            due = [peer for peer in of_kind if not peer.asking and peer.rest_until <= now]
            if due and sum(peer.asking for peer in of_kind) < DIALS:
                return min(due, key=lambda peer: (peer.failures, peer.asked_at))
        return None

    def _for_the_hungry(self, now: float) -> SwarmPeer | None:
        """Where a stream has nothing to do: a peer that may have got more meanwhile."""
        if now - self._hungry_at > LOOK_AROUND_S:
            return None
        waiting = [
            peer
            for peer in self._answering(now)
            if (peer.bitfield is not None or peer.super_seeded) and now - peer.asked_at > peer.again_s
        ]
        return min(waiting, key=lambda peer: peer.asked_at, default=None)

    def pick_ahead(self, peer: SwarmPeer, open_: int, now: float, patience_s: float) -> int | None:
        """The chunk to ask the same peer for while one is on its way, so that the link does not idle between the two.
        None if another peer has something: by then it may be the better one."""
        if peer.rest_until > now:
            return None
        others = [other for other in self.peers.values() if other is not peer and other.rest_until <= now]
        if any(other.may_have & open_ for other in others if other.is_hopeful):
            return None
        askable = self._askable(peer, open_, self._able(now), now, patience_s)
        return self._rarest_first(askable, peer) if askable else None

    def has_other(self, index: int, than: SwarmPeer, now: float) -> bool:
        """Whether another peer than `than` answers, does not fail and may have this chunk."""
        able = (peer for peer in self._able(now) if peer is not than and peer.is_hopeful)
        return any(peer.may_have >> index & 1 for peer in able)

    def _able(self, now: float) -> list[SwarmPeer]:
        return [peer for peer in self.peers.values() if peer.rest_until <= now and peer.is_fresh(now)]

    def _answering(self, now: float) -> list[SwarmPeer]:
        """The peers on other machines that answered the last question, of whom nobody asks anything now."""
        return [
            peer
            for peer in self.peers.values()
            if peer.answers and not peer.asking and not peer.is_here and peer.rest_until <= now
            if not peer.busy or now - peer.heard_at > FRESH_S / 2  # else its replies tell
        ]

    def _stalest(self, now: float) -> SwarmPeer | None:
        """The peer with the oldest bitfield, if that is old: a peer gets chunks from others too, without telling us. Or
        one that was silent for long. Those first that gave chunks, then the manager's sources."""
        if now - self._looked_at < LOOK_AROUND_S / LOOKS:
            return None
        old = [
            peer
            for peer in self._answering(now)
            if now - peer.asked_at >= LOOK_AROUND_S
            and (peer.bitfield is not None or now - peer.heard_at > FRESH_S / 2)
        ]
        oldest = min(old, key=lambda peer: (not peer.gave, peer.named, peer.asked_at), default=None)
        if oldest is not None:
            self._looked_at = now
        return oldest

    def _askable(
        self, peer: SwarmPeer, open_: int, able: Sequence[SwarmPeer], now: float, patience_s: float
    ) -> int:
        """The chunks of `open_` to ask of this peer. A chunk that it super-seeded is asked of the peers that got it, as
        long as one of them answers and has it, and for `patience_s` if none does. A peer that does not give what it
        says that it has is none of them."""
        here = open_ & peer.may_have
        left_to_others = here & peer.super_seeded
        if not left_to_others or not any(
            other is not peer and other.is_hopeful for other in self.peers.values()
        ):
            return here
        nobody_has = left_to_others
        for other in able:
            if other is not peer and other.is_hopeful:
                nobody_has &= ~(other.may_have & ~other.super_seeded)
        for index in each_bit(nobody_has):
            if now - peer.super_seeded_since.get(index, now) > patience_s:
                left_to_others &= ~(1 << index)
        return here & ~left_to_others

    def _rarest_first(self, askable: int, peer: SwarmPeer) -> int:
        """A random chunk of `askable`, preferably one that no other peer is known to have."""
        common = 0
        for other in self.peers.values():
            if other is not peer and other.bitfield is not None:
                common |= other.bitfield
        return self._random.choice(list(each_bit(askable & ~common or askable)))


def bits_of(indices: Iterable[int]) -> int:
    """The integer whose bits are `indices`."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits


def check_bits(texts: Iterable[str], count: int) -> None:
    """Raises ValueError for hexadecimal bits that are not those of `count` chunks: a negative number has no end of
    them."""
    for text in texts:
        if text and int(text, 16) >> count:
            raise ValueError(f"bits of other chunks than {count}: {text!r:.100}")


def each_bit(bits: int) -> Iterator[int]:
    """The indices of the bits of a non-negative integer, highest first."""
    while bits:
        index = bits.bit_length() - 1
        yield index
        bits ^= 1 << index
