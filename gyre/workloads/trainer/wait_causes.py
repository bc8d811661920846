"""What each role of a graph does at one moment: works, or waits, and then for whose work.

An idle role waits for what its next firing lacks. The firing that would bring it may itself lack something, and so on
through the operators between, up to those that are at work: the wait is theirs, and not that of the operator next
upstream, which has nothing to do either.

Invariants:
- *whole*: the shares of a role add up to 1;
- *what is busy*: a wait is put down to an operator that works, or to one that could and has nobody to work for it.

Pure. This module must not know what time it is, or how shares are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Flow
from gyre.workloads.protocols import Critic, Learner, Reference, Reward, Rollout

Shares = dict[str, float]
"""By activity, in words; they add up to 1."""

SCORING = "scoring"

_WORDS = {
    Rollout.generate.__name__: "generating",
    Rollout.evaluate.__name__: "evaluating",
    Reward.score.__name__: SCORING,
    Reference.logprobs.__name__: "computing log-probs",
    Critic.values.__name__: "computing values",
    Learner.accumulate.__name__: "training",
    Learner.apply.__name__: "stepping the optimizer",
}
"""What the methods of the recipes do. One's own go by their names."""

PUBLISHING = "publishing"
QUEUED = "queued"
"""The role is at work, for other groups."""
ABSENT = "nobody there"
"""The firing could begin, and the role does not work: its vertices or its gang are missing, or lent."""
DRAWING = "drawing prompts"
DELIVERING = "delivering"
IDLE = "nothing to do"
"""There is nothing that it could wait for: its part of the run is done."""

MISSING_SEEN = 8
"""Missing inputs of a firing that are looked at, spread over all of them: a step may lack hundreds of groups."""


def activities(
    flow: Flow,
    operators: Mapping[str, Operator],
    *,
    generating: Shares | None = None,
    publishing: Collection[str] = (),
    beside: Mapping[str, str] | None = None,
    held: str = "",
) -> dict[str, Shares]:
    """What each role does now: its shares by activity. Waits are activities that begin with `waits for`.

    `generating` are the shares of what the rollout plane does with the samples that it was asked for; None where it
    does not say. `publishing` are the operators whose running firing publishes weights. `beside` has what roles do
    beside the graph's firings. `held` says why the trainer starts nothing, where it does not. The trainer's own
    operators take no time of a role, and have no entry.
    """
    search = _Search(flow, operators, generating, frozenset(publishing), held)
    for role, what in (beside or {}).items():
        search.working.setdefault(role, {what: 1.0})
    roles = dict.fromkeys(
        operator.role for operator in operators.values() if operator.dispatch is not Dispatch.CONTROLLER
    )
    return {role: search.working.get(role) or search.waits_of(role) for role in roles}


def plane_shares(counts: Mapping[str, int]) -> Shares:
    """The numbers of samples by what becomes of them, as shares. Of none, whole groups are on their way."""
    total = sum(counts.values())
    return {what: count / total for what, count in counts.items() if count} if total else {DELIVERING: 1.0}


class _Search:
    """The search for who works, from an idle role against the flow."""

    def __init__(
        self,
        flow: Flow,
        operators: Mapping[str, Operator],
        generating: Shares | None,
        publishing: frozenset[str],
        held: str,
    ) -> None:
        self._flow = flow
        self._operators = operators
        self._generating = generating
        self._publishing = publishing
        self._held = held
        self._known: dict[tuple[str, int], Mapping[tuple[str, str], float]] = {}
        self.working: dict[str, Shares] = {}
        """What roles at work do, by the first of their operators that runs."""
        for ref, operator in operators.items():
            if flow.running(ref):
                self.working.setdefault(operator.role, self._work_of(operator))

    def _work_of(self, operator: Operator) -> Shares:
        if operator.dispatch is Dispatch.PLANE and self._generating:
            return self._generating
        if operator.ref in self._publishing:
            return {PUBLISHING: 1.0}
        return {_WORDS.get(operator.method, operator.method): 1.0}

    def waits_of(self, role: str) -> Shares:
        """What an idle role waits for, by the first of its operators that tells."""
        for ref, operator in self._operators.items():
            index = self._flow.next_index(ref)
            if operator.role != role or index is None:
                continue
            found: dict[str, float] = defaultdict(float)
            for (other, what), share in self._culprits(ref, index).items():
                found[f"waits for {other if other != role else 'itself'} ({what})"] += share
            if found:
                return dict(found)
        return {IDLE: 1.0}

    def _culprits(self, ref: str, index: int) -> Mapping[tuple[str, str], float]:
        """Role and activity of whoever is at work on this firing, or on what it lacks, with their shares of the wait
        for it."""
        known = self._known.get((ref, index))
        if known is not None:
            return known
        # So that the search ends where a firing lacks its own result, which no graph that runs has.
        self._known[ref, index] = {}
        found: dict[tuple[str, str], float] = defaultdict(float)
        operator, running = self._operators[ref], self._flow.running(ref)
        blockers = _spread(self._flow.blockers(ref, index))
        in_turn = bool(running) and operator.dispatch is Dispatch.GANG  # a gang does one after the other
        if index in running or in_turn:
            found.update({(operator.role, what): part for what, part in self._work_of(operator).items()})
        elif not blockers:
            found[operator.role, self._why_not_begun(operator)] = 1.0
        for source, at in blockers if not found else ():
            for culprit, share in self._culprits(source, at).items():
                found[culprit] += share
        total = sum(found.values())
        self._known[ref, index] = {culprit: share / total for culprit, share in found.items()}
        return self._known[ref, index]

    def _why_not_begun(self, operator: Operator) -> str:
        if self._held:
            return self._held
        if operator.dispatch is Dispatch.CONTROLLER:
            return DRAWING
        return QUEUED if operator.role in self.working else ABSENT


def _spread(blockers: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """At most `MISSING_SEEN` of them, at equal distances."""
    count = len(blockers)
    if count <= MISSING_SEEN:
        return blockers
    return [blockers[at * count // MISSING_SEEN] for at in range(MISSING_SEEN)]
