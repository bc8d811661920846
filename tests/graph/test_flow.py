"""The firing rule, and what follows from it: bounds, order, and an end, whatever completes when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.graph import compile_job
from gyre.graph.elements import Dcg, Dispatch, Edge, EdgeKind, Operator
from gyre.graph.flow import Firing, Flow
from tests.examples import examples
from tests.graph.jobs import grpo_job

GENERATE, SCORE, ACCUMULATE, APPLY = "rollout.generate", "reward.score", "actor.accumulate", "actor.apply"
PROMPTS, EVALUATE, LOGPROBS = "trainer.prompts", "rollout.evaluate", "reference.logprobs"


def grpo_flow(*, steps=3, batch=4, firing=2, micro=2, staleness=0, evaluate=0, reference=False):
    spec = grpo_job(
        {"reference": {}} if reference else None,
        max_staleness=staleness,
        run={
            "steps": steps,
            "prompts_per_step": batch,
            "groups_per_firing": firing,
            "groups_per_micro_batch": micro,
            "evaluate_every": evaluate,
        },
    )
    return Flow(compile_job(spec).dcg, pace=APPLY, count=steps)


def chain(*, ordered=False, **edge):
    """`a.x → b.y` and nothing else, a firing of `b.y` being the pace."""
    operators = (Operator("a", "x"), Operator("b", "y", Dispatch.ONE, ordered))
    fields = {"kind": EdgeKind.SAMPLES, **edge}
    return Flow(Dcg(("a", "b"), operators, (Edge("a.x", "b.y", **fields),)), pace="b.y", count=4)


def fire(flow, ref, *indices):
    for index in indices:
        firing = flow.firing(ref, index)
        flow.start(firing)
        flow.complete(firing)


def enabled(flow, ref=None):
    return [
        (f.operator, f.index) if ref is None else f.index for f in flow.enabled() if ref in (None, f.operator)
    ]


def done_count(flow, ref):
    """How many firings of an operator are done without a gap from the first."""
    return next(index for index in itertools.count() if not flow.is_done(ref, index))


# -- the rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge", "done", "expected"),
    [
        ({}, [], []),
        ({}, [0], [0]),
        ({}, [1], [1]),
        ({}, [0, 2], [0, 2]),
        ({"produce": 2, "consume": 1}, [1], [2, 3]),
        ({"produce": 1, "consume": 2}, [0], []),
        ({"produce": 1, "consume": 2}, [1, 2], []),
        ({"produce": 1, "consume": 2}, [0, 1, 3], [0]),
        ({"produce": 2, "consume": 3}, [1], []),
        ({"produce": 2, "consume": 3}, [1, 2], [1]),
        ({"kind": EdgeKind.WEIGHTS}, [1], []),
        ({"kind": EdgeKind.WEIGHTS}, [0, 2], [0]),
        ({"kind": EdgeKind.WEIGHTS, "delay": 1}, [], [0]),
        ({"kind": EdgeKind.WEIGHTS, "delay": 1}, [0], [0, 1]),
        ({"kind": EdgeKind.WEIGHTS, "produce": 2, "delay": 1}, [], [0, 1]),
        ({"kind": EdgeKind.WEIGHTS, "produce": 1, "consume": 2, "delay": 2}, [], [0]),
        ({"kind": EdgeKind.WEIGHTS, "produce": 1, "consume": 2, "delay": 2}, [0], [0]),
        ({"kind": EdgeKind.WEIGHTS, "produce": 1, "consume": 2, "delay": 2}, [0, 1], [0, 1]),
    ],
)
def test_a_firing_is_enabled_exactly_when_its_own_tokens_are_there(edge, done, expected):
    flow = chain(**edge)
    flow.mark_done("a.x", done)
    assert enabled(flow, "b.y") == expected


@pytest.mark.parametrize(
    ("done", "running", "expected"),
    [([1, 2], [], []), ([0, 2], [], [0]), ([0, 1], [0], []), ([0, 1, 2], [], [0])],
)
def test_an_ordered_operator_fires_one_after_the_other(done, running, expected):
    flow = chain(ordered=True)
    flow.mark_done("a.x", done)
    for index in running:
        flow.start(flow.firing("b.y", index))
    assert enabled(flow, "b.y") == expected


@pytest.mark.parametrize(
    ("capacity", "produce", "taken", "expected"),
    [
        (1, 1, 0, [0]),
        (2, 1, 0, [0, 1]),
        (2, 1, 1, [0, 1, 2]),
        (4, 2, 0, [0, 1]),
        (5, 2, 0, [0, 1]),
        (None, 1, 0, [0, 1, 2, 3]),
    ],
)
def test_a_source_fires_only_while_its_output_has_room(capacity, produce, taken, expected):
    flow = chain(capacity=capacity, produce=produce, consume=produce)
    flow.mark_done("b.y", range(taken))
    assert enabled(flow, "a.x") == expected


def test_a_go_ahead_belongs_to_one_firing_of_its_target():
    """Micro-batches of the next step wait until this step is applied, though their samples are there."""
    flow = grpo_flow(staleness=2)
    fire(flow, PROMPTS, 0, 1, 2, 3)
    fire(flow, GENERATE, 0, 1, 2, 3)
    fire(flow, SCORE, 0, 1, 2, 3)
    assert enabled(flow, ACCUMULATE) == [0, 1]
    fire(flow, ACCUMULATE, 0, 1)
    assert enabled(flow, ACCUMULATE) == []
    fire(flow, APPLY, 0)
    assert enabled(flow, ACCUMULATE) == [2, 3]


def test_a_firing_names_its_groups():
    flow = grpo_flow(batch=12, firing=3, micro=4)
    assert flow.firing(PROMPTS, 1) == Firing(PROMPTS, 1, (3, 4, 5))
    assert flow.firing(GENERATE, 2).groups == (6, 7, 8)
    assert flow.firing(ACCUMULATE, 1).groups == (4, 5, 6, 7)
    assert flow.firing(APPLY, 1).groups == ()


def test_a_source_of_samples_that_takes_only_weights_names_its_groups_too():
    operators = (Operator("t", "step"), Operator("g", "make"))
    edges = (
        Edge("t.step", "g.make", EdgeKind.WEIGHTS, 1, 1, delay=1),
        Edge("g.make", "t.step", EdgeKind.SAMPLES, 3, 3),
    )
    flow = Flow(Dcg(("t", "g"), operators, edges), pace="t.step", count=2)
    assert flow.firing("g.make", 1).groups == (3, 4, 5)


def test_the_first_firings_of_grpo_are_those_of_the_first_batch_and_an_evaluation():
    flow = grpo_flow(evaluate=2)
    assert enabled(flow) == [(PROMPTS, 0), (PROMPTS, 1), (PROMPTS, 2), (PROMPTS, 3), (EVALUATE, 0)]
    fire(flow, PROMPTS, 0, 1, 2, 3)
    assert enabled(flow, GENERATE) == [0, 1]


def test_both_reward_and_reference_must_have_seen_a_group():
    flow = grpo_flow(reference=True)
    fire(flow, PROMPTS, 0)
    fire(flow, GENERATE, 0)
    assert enabled(flow, SCORE) == enabled(flow, LOGPROBS) == [0]
    fire(flow, SCORE, 0)
    assert enabled(flow, ACCUMULATE) == []
    fire(flow, LOGPROBS, 0)
    assert enabled(flow, ACCUMULATE) == [0]


def test_what_feeds_the_pace_fires_in_proportion_and_what_it_feeds_as_it_is_fed():
    flow = grpo_flow(steps=5, batch=6, firing=2, micro=3, evaluate=2)
    totals = {ref: flow.total(ref) for ref in (PROMPTS, GENERATE, ACCUMULATE, APPLY, EVALUATE)}
    assert totals == {PROMPTS: 15, GENERATE: 15, ACCUMULATE: 10, APPLY: 5, EVALUATE: 3}


@pytest.mark.parametrize(
    ("ref", "blocker"),
    [(PROMPTS, []), (GENERATE, [(PROMPTS, 0)]), (SCORE, [(GENERATE, 0)])],
)
def test_a_firing_names_those_that_have_to_end_before_it(ref, blocker):
    assert grpo_flow().blockers(ref, 0) == blocker


def test_of_what_feeds_a_firing_only_what_is_not_done_is_named():
    flow = grpo_flow(steps=2, batch=4, firing=1, micro=2, reference=True)
    fire(flow, PROMPTS, *range(4))
    fire(flow, GENERATE, *range(4))
    fire(flow, SCORE, 1, 2)
    fire(flow, LOGPROBS, 0)
    assert sorted(flow.blockers(ACCUMULATE, 0)) == sorted([(SCORE, 0), (LOGPROBS, 1)])
    assert flow.blockers(APPLY, 0) == [(ACCUMULATE, 0), (ACCUMULATE, 1)]
    assert flow.blockers(GENERATE, 4) == [(PROMPTS, 4), (APPLY, 0)]
    assert (flow.next_index(SCORE), flow.next_index(APPLY)) == (0, 0)
    flow.start(flow.firing(SCORE, 0))
    assert flow.next_index(SCORE) == 3


def test_a_source_of_a_full_edge_waits_for_its_target():
    flow = chain(capacity=1)
    fire(flow, "a.x", 0)
    assert flow.blockers("a.x", 1) == [("b.y", 0)]
    fire(flow, "b.y", 0)
    assert flow.blockers("a.x", 1) == []


# -- once -------------------------------------------------------------------------------------------


def test_a_firing_starts_once_until_it_is_cancelled():
    flow = chain()
    firing = flow.firing("a.x", 0)
    flow.start(firing)
    assert flow.running("a.x") == {0}
    assert enabled(flow, "a.x") == [1, 2, 3]
    with pytest.raises(ValueError, match=r"firing 0 of a\.x is already running or done"):
        flow.start(firing)
    flow.cancel(firing)
    assert enabled(flow, "a.x") == [0, 1, 2, 3]
    flow.start(firing)
    flow.complete(firing)
    assert flow.is_done("a.x", 0)
    with pytest.raises(ValueError, match="already running or done"):
        flow.start(firing)
    assert enabled(flow, "a.x") == [1, 2, 3]


@pytest.mark.parametrize(
    ("done", "running", "to", "left_done", "left_running"),
    [
        ([0, 1, 3], [2], 0, [], []),
        ([0, 1, 3], [2], 2, [0, 1], []),
        ([0, 1, 3], [2], 3, [0, 1], [2]),
        ([0, 3], [1], 4, [0, 3], [1]),
        ([0, 2], [3], 1, [0], []),
    ],
)
def test_a_rewind_forgets_exactly_what_lies_beyond(done, running, to, left_done, left_running):
    flow = chain()
    flow.mark_done("a.x", done)
    for index in running:
        flow.start(flow.firing("a.x", index))
    flow.rewind("a.x", to)
    assert [index for index in range(4) if flow.is_done("a.x", index)] == left_done
    assert sorted(flow.running("a.x")) == left_running
    assert enabled(flow, "a.x") == [index for index in range(4) if index not in left_done + left_running]


# -- whole runs -------------------------------------------------------------------------------------


@st.composite
def shapes(draw):
    firing = draw(st.integers(1, 3))
    micro = draw(st.integers(1, 3))
    batch = firing * micro * draw(st.integers(1, 2))
    return {
        "steps": draw(st.integers(1, 4)),
        "batch": batch,
        "firing": firing,
        "micro": micro,
        "staleness": draw(st.integers(0, 3)),
        "evaluate": draw(st.integers(0, 3)),
        "reference": draw(st.booleans()),
    }


class Walk:
    """Runs a flow to its end: anything enabled may start, anything running may end or come to nothing."""

    def __init__(self, shape, data):
        self.shape, self.data = shape, data
        self.flow = grpo_flow(**shape)
        self.started: dict[str, list[int]] = {operator.ref: [] for operator in self.flow.dcg.operators}
        self.ended: dict[str, list[int]] = {operator.ref: [] for operator in self.flow.dcg.operators}
        self.running: list[Firing] = []
        self.cancels = 10

    def run(self):
        while not self.flow.finished:
            self.move()
        assert self.flow.enabled() == []
        assert self.running == []

    def move(self):
        ready = self.flow.enabled()
        assert ready or self.running, "deadlock"
        moves = [("start", firing) for firing in ready] + [("end", firing) for firing in self.running]
        kind, firing = self.data.draw(st.sampled_from(moves))
        if kind == "start":
            self.check(firing)
            self.flow.start(firing)
            self.running.append(firing)
            self.started[firing.operator].append(firing.index)
            return
        self.running.remove(firing)
        if self.cancels and self.data.draw(st.integers(0, 9)) == 0:
            self.cancels -= 1
            self.flow.cancel(firing)
            self.started[firing.operator].remove(firing.index)
            return
        self.flow.complete(firing)
        self.ended[firing.operator].append(firing.index)

    def check(self, firing):
        flow, shape = self.flow, self.shape
        assert firing.index not in self.ended[firing.operator]
        if firing.operator == GENERATE:
            step = firing.groups[0] // shape["batch"]
            assert firing.groups[-1] // shape["batch"] == step, "a firing reaches over two batches"
            assert len(self.ended[APPLY]) >= step - shape["staleness"]
        for edge in flow.dcg.edges:
            if edge.source == firing.operator and edge.capacity is not None:
                done = sum(flow.is_done(edge.target, index) for index in range(flow.total(edge.target)))
                counted = done if edge.kind is EdgeKind.SAMPLES else done_count(flow, edge.target)
                assert (firing.index + 1) * edge.produce - counted * edge.consume <= edge.capacity


@settings(deadline=None, max_examples=examples(50))
@given(shapes(), st.data())
def test_any_order_of_completions_ends_with_everything_fired_once_within_bounds(shape, data):
    walk = Walk(shape, data)
    walk.run()
    for operator in walk.flow.dcg.operators:
        total = walk.flow.total(operator.ref)
        assert sorted(walk.ended[operator.ref]) == list(range(total))
        if operator.ordered:
            assert walk.ended[operator.ref] == list(range(total))
    assert len(walk.ended[APPLY]) == shape["steps"]


@settings(deadline=None, max_examples=examples(40))
@given(shapes())
def test_the_staleness_bound_is_reached_as_well_as_kept(shape):
    """With steps enough, batch k may be generated before any step is applied, and batch k + 1 may not."""
    bound = shape["staleness"]
    flow = grpo_flow(**{**shape, "steps": bound + 2})
    fire(flow, PROMPTS, *range(flow.total(PROMPTS) * (bound + 1) // (bound + 2)))
    per_batch = shape["batch"] // shape["firing"]
    assert enabled(flow, GENERATE) == list(range(per_batch * (bound + 1)))


def snapshot(flow):
    return {
        operator.ref: (
            done_count(flow, operator.ref),
            [index for index in range(flow.total(operator.ref)) if flow.is_done(operator.ref, index)],
            flow.running(operator.ref),
        )
        for operator in flow.dcg.operators
    }


@settings(deadline=None, max_examples=examples(40))
@given(shapes(), st.data(), st.integers(0, 60))
def test_a_flow_restored_from_what_is_done_goes_on_as_the_first_would(shape, data, moves):
    walk = Walk(shape, data)
    for _ in range(moves):
        if walk.flow.finished:
            break
        walk.move()
    restored = grpo_flow(**shape)
    for ref, indices in walk.ended.items():
        restored.mark_done(ref, indices)
    for firing in walk.running:
        walk.flow.cancel(firing)
    assert snapshot(restored) == snapshot(walk.flow)
    assert restored.enabled() == walk.flow.enabled()
    again = Walk(shape, data)
    again.flow, again.ended = restored, walk.ended
    again.run()


@settings(deadline=None, max_examples=examples(40))
@given(shapes(), st.data(), st.integers(0, 60))
def test_a_gang_that_is_rewound_to_its_last_step_loses_nothing_and_repeats_no_step(shape, data, moves):
    """As the trainer does when a rank dies: what was accumulated for the current step is sent again."""
    walk = Walk(shape, data)
    for _ in range(moves):
        if walk.flow.finished:
            break
        walk.move()
    per_step = shape["batch"] // shape["micro"]
    steps = done_count(walk.flow, APPLY)
    walk.flow.rewind(ACCUMULATE, steps * per_step)
    walk.flow.rewind(APPLY, steps)
    walk.running = [firing for firing in walk.running if firing.operator not in (ACCUMULATE, APPLY)]
    walk.ended[ACCUMULATE] = [index for index in walk.ended[ACCUMULATE] if index < steps * per_step]
    walk.run()
    assert sorted(walk.ended[ACCUMULATE]) == list(range(walk.flow.total(ACCUMULATE)))
    assert walk.ended[APPLY] == list(range(shape["steps"]))


def test_rates_that_do_not_balance_are_refused():
    operators = (Operator("a", "x"), Operator("b", "y"))
    edges = (Edge("a.x", "b.y", EdgeKind.SAMPLES, 1, 1), Edge("a.x", "b.y", EdgeKind.SAMPLES, 2, 1))
    with pytest.raises(ValueError, match="do not balance"):
        Flow(Dcg(("a", "b"), operators, edges), pace="b.y", count=1)


def test_operators_that_only_feed_each_other_are_refused():
    operators = (Operator("p", "p"), Operator("a", "x"), Operator("b", "y"))
    edges = (
        Edge("a.x", "b.y", EdgeKind.SAMPLES, delay=1),
        Edge("b.y", "a.x", EdgeKind.SAMPLES),
    )
    with pytest.raises(ValueError, match=r"a\.x, b\.y are fed only by each other"):
        Flow(Dcg(("p", "a", "b"), operators, edges), pace="p.p", count=1)
