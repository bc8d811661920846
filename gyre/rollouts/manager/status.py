"""How the rollout plane is, as plain data: what `GET /v1/status`, the job's status and the dashboard show.

This module must not know how any of it came about, and changes nothing.
"""

from __future__ import annotations

from typing import Any

from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.manager.sessions import AgentSession
from gyre.rollouts.scheduling.fleet import Instance


def groups_status(groups: OpenGroups) -> dict[str, Any]:
    """Samples, and the account in tokens."""
    account = groups.account
    return {
        "queued": groups.queued,
        "open_groups": len(groups.requests),
        "account": {
            "generated": account.generated,
            "delivered": account.delivered,
            "in_flight": groups.in_flight_tokens,
            "discarded": dict(account.discarded),
            "missing": groups.missing_tokens(),
        },
        "samples_set_aside": account.samples_quarantined,
        "samples_given_up": len(groups.given_up),
    }


def instance_status(
    session: AgentSession, instance: Instance, now: float, *, checksum: str
) -> dict[str, Any]:
    """`checksum` is of the version that it acknowledged; "" where that is not known any more. `not_admitted` says why
    it is given nothing; "" where it is admitted."""
    return {
        "instance": session.name,
        "incarnation": session.hello.incarnation,
        "engine": session.hello.engine,
        "node": session.hello.node,
        "pid": session.hello.pid,
        "version": instance.version,
        "checksum": checksum,
        "source": session.source,
        "state": _state(session, instance),
        "not_admitted": str(session.not_admitted or ""),
        "samples": len(instance.held),
        "running": session.running,
        "tokens": instance.generated_tokens,
        "rate_tokens_s": round(session.rate_tokens_s, 1),
        "max_running": instance.max_running,
        "kv_used_tokens": session.used_tokens,
        "kv_tokens": instance.kv_tokens,
        "limits_why": session.limits.why if session.limits is not None else "",
        "silent_s": round(now - session.heard_at, 2),
    }


def _state(session: AgentSession, instance: Instance) -> str:
    if session.connection is None:
        return "cut"
    if session.draining:
        return "draining"
    if session.resting:
        return {"falling": "asleep", "asleep": "asleep", "waking": "waking"}[session.resting]
    if session.loading is not None:
        return "loading"
    return "working" if instance.held else "idle"
