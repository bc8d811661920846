"""Which codec and which transport, from what was measured. Pure, and each choice says why.

A chunk takes as long as the slowest of what happens side by side: encoding, the link, decoding. The codec with the
least time wins if it saves a tenth against sending the bytes as they are; else nothing is the better codec, for it
costs no CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gyre.weights.codecs.encoding import Codec

GAIN = 0.9
"""Of the time of sending bytes as they are, that a codec must come below."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a codec: wire bytes by raw byte, and seconds by raw byte on either side."""

    ratio: float
    encode_s: float
    decode_s: float


PRIOR: dict[Codec, Cost] = {
    "none": Cost(1.0, 0.0, 0.0),
    "delta": Cost(0.05, 1 / 0.8e9, 1 / 2.0e9),
    "planes": Cost(0.69, 1 / 0.35e9, 1 / 0.7e9),
    "fp8": Cost(0.45, 1 / 0.3e9, 1 / 0.5e9),
}
"""Before anything was measured: from a 12.8 M parameter model in training, on one core of a 2023 server."""

UNKNOWN = PRIOR["planes"]
"""The same of a codec that a job brings."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    codec: Codec
    reason: str


def blend(before: Cost, measured: Cost, weight: float = 0.3) -> Cost:
    def mix(old: float, new: float) -> float:
        return (1 - weight) * old + weight * new

    return Cost(
        mix(before.ratio, measured.ratio),
        mix(before.encode_s, measured.encode_s),
        mix(before.decode_s, measured.decode_s),
    )


def faded(costs: Mapping[Codec, Cost]) -> dict[Codec, Cost]:
    """A tenth back to what was expected before anything was measured: what was once too dear is tried again."""
    return {codec: blend(cost, PRIOR.get(codec, UNKNOWN), 0.1) for codec, cost in costs.items()}


def choose_codec(
    able: Iterable[Codec], link_bytes_s: float | None, costs: Mapping[Codec, Cost]
) -> CodecChoice:
    """`able` are those that could be used, `link_bytes_s` what the link carried (None: not measured yet, and nothing
    is encoded). One core is counted on at either side, though there may be more."""
    if link_bytes_s is None:
        return CodecChoice("none", "the link's rate is not known yet")
    times = {codec: _seconds(costs[codec], link_bytes_s) for codec in {"none", *able}}
    best = min(sorted(times), key=lambda codec: times[codec])
    plain = times["none"]
    link = f"{link_bytes_s / 1e6:.0f} MB/s"
    if best == "none" or times[best] > GAIN * plain:
        others = ", ".join(f"{codec} {1e9 * times[codec]:.2f}" for codec in sorted(times) if codec != "none")
        return CodecChoice(
            "none", f"at {link} the bytes take {1e9 * plain:.2f} s/GB" + (f"; {others}" if others else "")
        )
    return CodecChoice(
        best,
        f"at {link} {best} takes {1e9 * times[best]:.2f} s/GB at {100 * costs[best].ratio:.1f} % of the bytes; "
        f"as they are {1e9 * plain:.2f}",
    )


def _seconds(cost: Cost, link_bytes_s: float) -> float:
    return max(cost.ratio / link_bytes_s, cost.encode_s, cost.decode_s)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    name: str
    reason: str


def choose_transport(
    rates: Mapping[str, float | None],
    broken: Mapping[str, str],
    *,
    order: Sequence[str] = (),
    preferred: str = "tcp",
) -> TransportChoice:
    """`rates` are bytes a second by transport (None: not tried, and then it is tried now); `broken` says of the others
    why they cannot be used. Another than `preferred` must be a tenth faster. With an `order` its first that can be used
    is taken, and nothing is measured."""
    aside = "".join(f"; {name} not: {why}" for name, why in sorted(broken.items()))
    if order:
        name = next((name for name in order if name in rates), order[0])
        before = order[: order.index(name)]
        return TransportChoice(
            name, f"{name} {'comes after ' + ', '.join(before) if before else 'was asked for'}" + aside
        )
    if list(rates) == [preferred]:
        return TransportChoice(preferred, aside.removeprefix("; "))
    for name in sorted(rates, key=lambda name: name != preferred):
        if rates[name] is None:
            return TransportChoice(name, "it is measured now" + aside)
    known = {name: rate for name, rate in rates.items() if rate is not None}
    best = max(sorted(known), key=lambda name: known[name])
    if preferred in known and known[best] * GAIN <= known[preferred]:
        best = preferred
    told = ", ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in sorted(known.items()))
    return TransportChoice(best, told + aside)
