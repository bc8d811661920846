"""What the rollout manager reports of the plane, a record for each thing: every key in one place.

From a record follow what `GET /v1/status` and the manager's `health()` say, REST's schema and the page's types, and of
an instance its columns in `gyre show`. A new number is a field here, and what computes it in
`gyre.rollouts.plane.status` or the front that knows it. A field has a default where an older manager may not have
reported it.

Pure, and read where there is no plane. This module must not know how a number is computed, nor what draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(kw_only=True)
class EngineStatus:
    """One instance of the rollout plane, as the rollout manager last said. `not_admitted`: why it is given no samples;
    `limits_why`: where `max_running` and `kv_tokens` come from; `loads`: how weights last came into the engine
    (`loader`, `disk`, or `start` of the engine), and `loads_why` why not by the loader; `transfer_why`: why by this
    transport and codec."""

    instance: str
    engine: str = ""
    node: str = ""
    state: str = ""
    version: int = -1
    not_admitted: str = ""
    samples: int = 0
    running: int = 0
    rate_tokens_s: float = 0.0
    max_running: int = 0
    kv_used_tokens: int = 0
    kv_tokens: int = 0
    limits_why: str = ""
    loads: str = ""
    loads_why: str = ""
    transport: str = ""
    codec: str = ""
    transfer_why: str = ""
    tokens: int | None = None
    """Generated since it came; null where that is not known, as below."""
    silent_s: float | None = None
    """Since it was last heard of."""
    incarnation: str = ""
    pid: int = 0
    checksum: str = ""
    """Of the version that it acknowledged; "" where that is not known any more."""
    source: str = ""
    """The address at which others can fetch its version; "" if there is none."""


class EngineColumn(NamedTuple):
    """A column of `gyre show`: the number `key`, or its part of the number `of`. Of those that are `dispensable` the
    greatest goes first on a narrow terminal, and 0 is never left out."""

    title: str
    key: str
    dispensable: int = 0
    of: str = ""


ENGINE_COLUMNS = (
    EngineColumn("ENGINE", "instance"),
    EngineColumn("STATE", "state", 3),
    EngineColumn("VERSION", "version", 4),
    EngineColumn("RUNNING", "running", 1, of="max_running"),
    EngineColumn("KV TOKENS", "kv_used_tokens", 2, of="kv_tokens"),
    EngineColumn("NOT ADMITTED", "not_admitted", 5),
)


@dataclass(kw_only=True)
class PoolStatus:
    """A role of instances that has its own price. `price_per_hour` is for one instance, in the user's currency.
    `rate_tokens_s` is the rate of one instance, measured on those that generate; it gives `price_per_million_tokens`.
    The last two are null while none generates."""

    instances: int = 0
    price_per_hour: float = 0.0
    rate_tokens_s: float | None = None
    price_per_million_tokens: float | None = None


@dataclass(kw_only=True)
class KeyCounts:
    answered: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(kw_only=True)
class RequestCounts(KeyCounts):
    """What came of requests since the fleet's manager started. Of the recent ones half were answered within `median_s`
    and 95 % within `slow_s`, null before the first."""

    median_s: float | None = None
    slow_s: float | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    """`KeyCounts` by the key's name, of those with the most."""


@dataclass(kw_only=True)
class DoorStatus:
    """The door of a fleet. `open` requests are not answered yet, and `kept` ones can be asked for again."""

    url: str = ""
    open: int = 0
    kept: int = 0
    waiting: int = 0
    kept_tokens: int = 0
    key_bytes: dict[str, int] = field(default_factory=dict)
    """What the requests of a key take, open ones and kept ones, by its name."""
    requests: dict[str, Any] = field(default_factory=dict)
    """`RequestCounts`."""


@dataclass
class SessionFault:
    """An attempt at a rollout that infrastructure ended: which, and what was said."""

    session: str
    reason: str = ""


@dataclass(kw_only=True)
class SessionTotals:
    """What came of sessions since the rollout manager started: how many ended how, turns that were answered, attempts
    that were begun in the place of others, and the newest faults, the newest first."""

    outcomes: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    drawn_again: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    """`SessionFault`s."""


@dataclass(kw_only=True)
class SessionsStatus:
    """The sessions of a job with agents. Of those that are `running` some are `at_engine`, the others `with_agent`;
    those that `ended` are of groups that are not stored yet, and `turns` of all that are there. `branches`: turns that
    began anew, by why, since the manager started. `pause_s` is above 0 while one is handed out at a time. `sentence`
    says all of it."""

    waiting: int = 0
    running: int = 0
    at_engine: int = 0
    with_agent: int = 0
    ended: int = 0
    turns: int = 0
    workers: int = 0
    failed_groups: int = 0
    pause_s: float = 0.0
    branches: dict[str, int] = field(default_factory=dict)
    oversampled: dict[str, object] = field(default_factory=dict)
    """What over-sampling cancelled: `gyre.rollouts.plane.session_lengths`."""
    since_start: dict[str, Any] = field(default_factory=dict)
    """`SessionTotals`."""
