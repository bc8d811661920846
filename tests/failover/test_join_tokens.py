"""Join tokens in the control plane: what can be created and revoked, and what a history of it leaves."""

from __future__ import annotations

import pytest

from gyre.config import ROLLOUT_MANAGER
from gyre.errors import ConfigError, Conflict, GyreError, NotFound
from gyre.failover import FailoverCoordinator, JobState, rows_of, state_from
from gyre.failover import events as e
from tests.doubles.standing_job import small_spec

FIRST, SECOND = "a" * 64, "b" * 64


class Tokens:
    def __init__(self, *, plane: bool = True) -> None:
        spec = small_spec()
        if plane:
            spec.roles[ROLLOUT_MANAGER] = spec.roles["reward"].model_copy()
        self.coordinator = FailoverCoordinator(spec, lambda vertex: frozenset((vertex,)))
        self.state = JobState()
        self.now = 100.0

    def asked(self, event: e.JoinTokenCreated | e.JoinTokenRevoked) -> None:
        self.coordinator.check_token(self.state, event, self.now)
        self.decided(event)

    def decided(self, event: e.Event) -> None:
        decision = self.coordinator.decide(self.state, event, self.now)
        assert not decision.commands
        self.state = decision.state

    def valid(self) -> list[str]:
        known = self.coordinator.join_tokens(self.state)
        return [name for name, token in known.items() if token.is_valid(self.now)]


def test_a_token_is_there_until_it_is_revoked_or_expires() -> None:
    tokens = Tokens()
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    tokens.asked(e.JoinTokenCreated("lent", SECOND, expires_at=200.0))
    assert tokens.valid() == ["default", "spot", "lent"]
    tokens.asked(e.JoinTokenRevoked("spot"))
    tokens.asked(e.JoinTokenRevoked("default"))
    assert tokens.valid() == ["lent"]
    tokens.now = 200.0
    assert tokens.valid() == []
    assert state_from(rows_of(tokens.state)) == tokens.state


def test_asked_for_twice_is_there_once() -> None:
    tokens = Tokens()
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    tokens.now = 150.0
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    tokens.asked(e.JoinTokenRevoked("spot"))
    tokens.now = 160.0
    tokens.asked(e.JoinTokenRevoked("spot"))
    assert tokens.state.tokens["spot"].revoked_at == 150.0


def test_a_name_is_free_again_when_its_token_is_revoked() -> None:
    tokens = Tokens()
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    tokens.asked(e.JoinTokenRevoked("spot"))
    tokens.asked(e.JoinTokenCreated("spot", SECOND))
    assert tokens.state.tokens["spot"].digest == SECOND
    assert "spot" in tokens.valid()


REFUSED: list[tuple[str, e.JoinTokenCreated | e.JoinTokenRevoked, type[GyreError]]] = [
    ("a name with a slash", e.JoinTokenCreated("a/b", SECOND), ConfigError),
    ("a name that is taken", e.JoinTokenCreated("spot", SECOND), Conflict),
    ("the manager's own name", e.JoinTokenCreated("default", SECOND), Conflict),
    ("a token that has another name", e.JoinTokenCreated("other", FIRST), Conflict),
    ("a token instead of its digest", e.JoinTokenCreated("other", "abc"), ConfigError),
    ("one that has expired", e.JoinTokenCreated("other", SECOND, expires_at=99.0), Conflict),
    ("one that never was", e.JoinTokenRevoked("sport"), NotFound),
]


@pytest.mark.parametrize(("what", "event", "kind"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_what_cannot_be_is_refused_and_changes_no_history(
    what: str, event: e.JoinTokenCreated | e.JoinTokenRevoked, kind: type[GyreError]
) -> None:
    tokens = Tokens()
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    before = tokens.state
    with pytest.raises(kind):
        tokens.asked(event)
    tokens.decided(event)
    assert tokens.state == before


def test_a_revoked_token_never_comes_back() -> None:
    tokens = Tokens()
    tokens.asked(e.JoinTokenCreated("spot", FIRST))
    tokens.asked(e.JoinTokenRevoked("spot"))
    with pytest.raises(Conflict, match="was revoked"):
        tokens.asked(e.JoinTokenCreated("spot", FIRST))
    with pytest.raises(Conflict, match="another name"):
        tokens.asked(e.JoinTokenCreated("other", FIRST))


def test_nobody_joins_a_job_without_a_rollout_plane() -> None:
    tokens = Tokens(plane=False)
    assert tokens.valid() == []
    with pytest.raises(Conflict, match="no rollout plane"):
        tokens.asked(e.JoinTokenCreated("spot", FIRST))
