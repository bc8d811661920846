"""Decisions about join tokens: who may join the rollout plane from outside the job.

The rollout manager reads the tokens from the snapshot, so a decision needs no command: the commit is what revokes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from gyre.config import (
    AGENT_ROLE,
    DEFAULT_TOKEN,
    GENERATE_SCOPE,
    JOIN_SCOPE,
    ROLLOUT_MANAGER,
    TOKEN_SCOPES,
)
from gyre.errors import ConfigError, Conflict, NotFound, nearest
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.layout import JobLayout
from gyre.failover.state import JobState, JoinToken

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def join_tokens(layout: JobLayout, state: JobState) -> dict[str, JoinToken]:
    """The job's join tokens by name, the rollout manager's own among them."""
    if ROLLOUT_MANAGER not in layout.spec.roles:
        return {}
    return {DEFAULT_TOKEN: JoinToken(DEFAULT_TOKEN, created_at=state.job.submitted_at), **state.tokens}


def check_create(layout: JobLayout, state: JobState, event: e.JoinTokenCreated, now: float) -> None:
    """Raises ConfigError or Conflict if there cannot be such a token. The same one again can be: it was asked for
    twice."""
    _check_plane(layout, state)
    if not _NAME.fullmatch(event.name):
        raise ConfigError(
            f"{event.name!r} cannot be the name of a token.",
            hint="Give letters, digits, dots, dashes and underscores; at most 63, a letter or digit first.",
        )
    if not _DIGEST.fullmatch(event.digest):
        raise ConfigError("digest: expected the token's SHA-256 in hex, 64 digits in lower case.")
    if not event.scopes or not set(event.scopes) <= set(TOKEN_SCOPES):
        raise ConfigError(
            f"scopes: {', '.join(event.scopes) or 'none'} given, expected some of {', '.join(TOKEN_SCOPES)}."
        )
    meant = _meant(layout)
    if not set(event.scopes) <= meant:
        raise Conflict(
            f"job {state.job.name} has no door: only {' and '.join(sorted(meant))} of the scopes mean anything.",
            hint="A job of the recipe fleet has a door; in one with agents, generate runs sessions.",
        )
    if event.expires_at is not None and not now < event.expires_at < float("inf"):
        raise Conflict(f"token {event.name!r} would have expired before it is there.")
    known = join_tokens(layout, state).get(event.name)
    if known is not None and known.digest != event.digest and known.is_valid(now):
        raise Conflict(
            f"job {state.job.name} has a token {event.name!r}.",
            hint="Give another name, or revoke it first.",
        )
    if any(one.digest == event.digest and one.name != event.name for one in state.tokens.values()):
        raise Conflict("this token exists under another name.", hint="Make a new one.")
    if known is not None and known.digest == event.digest and known.revoked_at is not None:
        raise Conflict(f"this very token {event.name!r} was revoked.", hint="Make a new one.")


def _meant(layout: JobLayout) -> set[str]:
    """The scopes that open something in this job."""
    if layout.spec.rollouts.door is not None:
        return set(TOKEN_SCOPES)
    return {JOIN_SCOPE, GENERATE_SCOPE} if AGENT_ROLE in layout.spec.roles else {JOIN_SCOPE}


def check_revoke(layout: JobLayout, state: JobState, name: str) -> None:
    """Raises NotFound or Conflict if there is no token of this name. One that is revoked can be revoked."""
    _check_plane(layout, state)
    known = join_tokens(layout, state)
    if name not in known:
        raise NotFound(f"job {state.job.name} has no token {name!r}.", hint=nearest(name, known))


def _check_plane(layout: JobLayout, state: JobState) -> None:
    if ROLLOUT_MANAGER not in layout.spec.roles:
        raise Conflict(f"job {state.job.name} has no rollout plane: nobody can join it.")


def join_token_created(
    layout: JobLayout, draft: Draft, event: e.JoinTokenCreated, now: float
) -> Iterable[c.Command]:
    try:
        check_create(layout, draft.done(), event, now)
    except (ConfigError, Conflict):
        return ()  # told before the event was written, unless another one came between
    draft.set_token(
        JoinToken(event.name, event.digest, event.by, now, event.expires_at, scopes=tuple(event.scopes))
    )
    return ()


def join_token_revoked(
    layout: JobLayout, draft: Draft, event: e.JoinTokenRevoked, now: float
) -> Iterable[c.Command]:
    known = join_tokens(layout, draft.done()).get(event.name)
    if known is not None and known.revoked_at is None:
        draft.set_token(replace(known, revoked_at=now))
    return ()
