"""The swarm of one fetch: which peer has which chunks of a version, and which chunk to ask of which peer.

The words are BitTorrent's (Cohen, "Incentives Build Robustness in BitTorrent", 2003). A chunk is a piece. A peer has
some of the version: it is the publisher, which is the first seed, or another receiver. A peer's bitfield says
which chunks it has. Chunks are taken *rarest first*. The publisher *super-seeds*: it sends each chunk once and then
leaves it to the peer that got it, so its link carries about one copy. Peers have few *upload slots*; a peer without a
free slot says so, and another is asked.

Sets of chunks are bits of an integer: bit `i` is chunk `i`.

Invariants:
- *nobody is waited for alone*: a peer that failed rests, and its chunk is asked of another;
- *super-seeding ends*: a chunk that a peer leaves to others is asked of it again if nobody else has it for long.

This module reads no clock and starts no thread: `now` is an argument, in seconds, and the caller holds the lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gyre.weights.transfer.chunk_transports import Source

WORSE_EACH_TIME = 2.0
FIRST_REST_S = 0.2
LONGEST_REST_S = 5.0
"""Longest rest of a peer that failed; the rest doubles each time. A publisher that restarts is back in seconds."""

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
class Peer:
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

    def rest(self, now: float) -> None:
        """Leave the peer alone for a while, and for longer the next time."""
        self.rest_until = now + self.rest_s
        self.rest_s = min(LONGEST_REST_S, self.rest_s * WORSE_EACH_TIME)

    def sent_wrong_bytes(self, now: float) -> None:
        self.damaged += 1
        self.rest_until = now + (FIRST_REST_S if self.damaged < 2 else DAMAGED_REST_S)

    def sent_a_chunk(self) -> None:
        self.rest_s, self.damaged = FIRST_REST_S, 0


class Swarm:
    """The peers of one fetch. `own_address` is this receiver's own, which it does not ask."""

    def __init__(
        self, own_address: str, may_pull: Callable[[Source], bool], randomness: random.Random
    ) -> None:
        """`may_pull(source)` says whether a source on another machine can be reached and may be dialled."""
        self.peers: dict[Source, Peer] = {}
        self._own_address = own_address
        self._may_pull = may_pull
        self._random = randomness
        self._looked_at = float("-inf")

    def add(self, sources: Sequence[Source], is_here: Callable[[Source], bool]) -> list[Source]:
        """Take in the sources that the manager names. Returns those that cannot be asked."""
        refused: list[Source] = []
        for source in sources:
            if source in self.peers or (source.address and source.address == self._own_address):
                continue
            if is_here(source) or self._may_pull(source):
                self.peers[source] = Peer(source)
            elif source.address:
                refused.append(source)
        return refused

    def add_addresses(self, addresses: Sequence[str]) -> None:
        """Take in peers that a peer has named. Their chunks are not known yet, so they are asked for them first."""
        known = {source.address for source in self.peers}
        for address in addresses:
            fresh = address and address != self._own_address and address not in known
            if fresh and self._may_pull(Source(address)):
                self.peers[Source(address)] = Peer(Source(address), bitfield=0)

    def add_holders(self, holders: Mapping[str, str]) -> None:
        """Take in the chunks that each peer was sent, by address, as hexadecimal bits. The peer has them now or soon,
        and says so if not. Raises ValueError for anything but hexadecimal."""
        for peer in self.peers.values():
            bits = holders.get(peer.source.address)
            if bits and peer.bitfield is not None:
                peer.bitfield |= int(bits, 16)

    def pick(self, open_: int, now: float, patience_s: float) -> tuple[Peer, int | None] | None:
        """The next peer to ask, and for which of the chunks `open_`; None for the chunk asks the peer what it has.

        Prefers peers with a free upload slot, then the least busy. None if there is nothing to ask now.
        """
        if not open_:
            return None
        able = self._able(now)
        self._random.shuffle(able)
        stale = self._stalest(able, now)
        if stale is not None:
            stale.asked_at = now
            return stale, None
        for peer in sorted(able, key=lambda peer: (peer.full_until > now, peer.busy, not peer.super_seeded)):
            askable = self._askable(peer, open_, able, now, patience_s)
            if askable:
                return peer, self._rarest_first(askable, peer)
        for peer in sorted(able, key=lambda peer: peer.asked_at):
            told_little = peer.bitfield is not None or peer.super_seeded
            if told_little and peer.source.address and not peer.busy and now - peer.asked_at > peer.again_s:
                peer.asked_at = now
                return peer, None
        return None

    def pick_ahead(self, peer: Peer, open_: int, now: float, patience_s: float) -> int | None:
        """The chunk to ask the same peer for while one is on its way, so that the link does not idle between the two.
        None if another peer has something: by then it may be the better one."""
        if peer.rest_until > now:
            return None
        able = self._able(now)
        if any(other.may_have & open_ for other in able if other is not peer):
            return None
        askable = self._askable(peer, open_, able, now, patience_s)
        return self._rarest_first(askable, peer) if askable else None

    def _able(self, now: float) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.rest_until <= now]

    def _stalest(self, able: Sequence[Peer], now: float) -> Peer | None:
        """The peer with the oldest bitfield, if that is old: a peer gets chunks from others too, without telling us."""
        if now - self._looked_at < LOOK_AROUND_S / LOOKS:
            return None
        partial = [p for p in able if p.bitfield is not None and p.source.address and not p.busy]
        oldest = min(partial, key=lambda peer: peer.asked_at, default=None)
        if oldest is None or now - oldest.asked_at < LOOK_AROUND_S:
            return None
        self._looked_at = now
        return oldest

    def _askable(self, peer: Peer, open_: int, able: Sequence[Peer], now: float, patience_s: float) -> int:
        """The chunks of `open_` to ask of this peer. A chunk that it super-seeded is asked of the peers that got it, as
        long as one of them has it, and for `patience_s` if none does."""
        here = open_ & peer.may_have
        left_to_others = here & peer.super_seeded
        others = [other for other in able if other is not peer]
        if not left_to_others or not others:
            return here
        nobody_has = left_to_others
        for other in others:
            nobody_has &= ~(other.may_have & ~other.super_seeded)
        for index in each_bit(nobody_has):
            if now - peer.super_seeded_since.get(index, now) > patience_s:
                left_to_others &= ~(1 << index)
        return here & ~left_to_others

    def _rarest_first(self, askable: int, peer: Peer) -> int:
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
