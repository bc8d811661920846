"""Agents over several turns: what runs their sessions, and what their code gets.

An agent is a function of a session, or an environment whose turns Gyre asks for. Sessions are handed out by the rollout
manager, whose ledger has every turn: an agent's process may die at any moment, and another one goes on.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "AgentWorker": "vertex",
    "BlockingSession": "session",
    "BudgetSpent": "outcomes",
    "InfraFault": "outcomes",
    "Outcome": "outcomes",
    "PolicyFault": "outcomes",
    "Reply": "session",
    "Session": "session",
    "SessionLost": "outcomes",
    "SessionReward": "reward",
    "Turn": "session",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _EXPORTS)
