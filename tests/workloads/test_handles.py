"""Role handles: order, shapes of calls, deaths in the middle, deadlines and pauses."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from gyre.errors import Fenced, Unreachable, UserCodeError, VertexDied
from tests.waits import GENEROUS_S
from tests.workloads.plain_workloads import Cluster


@pytest.fixture
def make_cluster():
    made = []

    def make(count=3, **options):
        made.append(Cluster(count, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(make_cluster):
    return make_cluster()


def later(function, delay_s=0.05):
    timer = threading.Timer(delay_s, function)
    timer.daemon = True
    timer.start()
    return timer


def test_a_call_reaches_every_vertex_and_results_come_in_rank_order(cluster):
    assert cluster.handle.who() == [(0, 1), (1, 1), (2, 1)]
    assert cluster.handle.add(1, two=2) == [3, 3, 3]
    assert cluster.handle.world_size == 3


def test_rank_order_is_by_number_not_by_text(make_cluster):
    assert [rank for rank, _ in make_cluster(12).handle.who()] == list(range(12))


def test_one_rank_gives_its_result_itself(cluster):
    assert cluster.handle[1].who() == (1, 1)
    assert cluster.handle.rank(2).who() == (2, 1)
    with pytest.raises(IndexError, match="ranks 0 to 2; asked for 3"):
        cluster.handle[3]


def test_a_handle_shows_what_it_stands_for(cluster):
    assert repr(cluster.handle) == "<role echo: 3 vertices>"
    assert repr(cluster.handle[1]) == "<role echo: rank 1>"
    assert not hasattr(cluster.handle, "_nothing")


def test_a_keyword_argument_is_the_method_s_whatever_its_name(cluster):
    words = {"control": True, "bundle": 1, "info": 2, "method": "m", "term": 3, "args": 4}
    assert cluster.handle[0].words(**words) == words
    assert cluster.handle.words(**words) == [words] * 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 10])
def test_scatter_deals_out_all_items_and_gathers_them_in_order(cluster, count):
    items = list(range(count))
    assert cluster.handle.double.scatter(items, times=3) == [item * 3 for item in items]


def test_scatter_is_even_to_one_item(cluster):
    calls = []
    for rank in range(3):
        cluster.moments.add(
            "echo.double", 1, lambda r=rank: calls.append(r), when="before", vertex=f"echo-{rank}"
        )
    cluster.handle.double.scatter([1, 2])
    assert len(calls) == 2


def test_a_submitted_call_is_a_future(cluster):
    call = cluster.handle[0].hold.submit()
    assert not call.done()
    with pytest.raises(TimeoutError):
        call.result(0.02)
    cluster.workload(0).gate.set()
    assert call.result(GENEROUS_S) == "held"
    assert call.done()


async def test_a_submitted_call_can_be_awaited(cluster):
    one, all_of_them = cluster.handle[1].who.submit(), cluster.handle.who.submit()
    assert await asyncio.gather(one, all_of_them) == [(1, 1), [(0, 1), (1, 1), (2, 1)]]
    with pytest.raises(UserCodeError, match="bad luck"):
        await cluster.handle[0].fail.submit("bad luck")


def called_back(call):
    """The call's future, and an event that its callback sets."""
    heard = threading.Event()
    call.future.add_done_callback(lambda done: heard.set())
    return call.future, heard


def test_who_submits_may_be_called_back(cluster):
    future, heard = called_back(cluster.handle.add.submit(1, two=2))
    assert heard.wait(GENEROUS_S)
    assert future.result(0) == [3, 3, 3]


def test_so_is_who_submits_what_fails(cluster):
    future, heard = called_back(cluster.handle[1].fail.submit("bad luck"))
    assert heard.wait(GENEROUS_S)
    assert isinstance(future.exception(0), UserCodeError)
    assert "raise ValueError(text)" in future.exception(0).traceback


def test_a_future_that_is_waited_for_in_vain_goes_on(cluster):
    call = cluster.handle[0].hold.submit()
    future, heard = called_back(call)
    assert cluster.workload(0).entered.wait(GENEROUS_S)
    with pytest.raises(TimeoutError):
        future.result(0.02)
    assert not future.cancel(), "the vertex is at it"
    assert not heard.is_set()
    cluster.workload(0).gate.set()
    assert heard.wait(GENEROUS_S)
    assert (future.result(0), call.done(), future.cancelled()) == ("held", True, False)


def test_a_future_s_call_is_made_again_where_the_vertex_dies_meanwhile(cluster):
    future, heard = called_back(cluster.handle[1].hold.submit())
    assert cluster.workload(1).entered.wait(GENEROUS_S)
    cluster.vertices["echo-1"].kill()
    assert not heard.wait(0.05)
    cluster.start([1])
    assert cluster.workload(1).entered.wait(GENEROUS_S)
    cluster.workload(1).gate.set()
    assert heard.wait(GENEROUS_S)
    assert future.result(0) == "held"


def test_a_future_ends_where_a_dead_vertex_is_not_replaced_in_time(make_cluster):
    cluster = make_cluster(2, timeout_s=1.0)
    future, heard = called_back(cluster.handle[1].hold.submit())
    assert cluster.workload(1).entered.wait(GENEROUS_S)
    cluster.vertices["echo-1"].kill()
    assert heard.wait(GENEROUS_S)
    assert isinstance(future.exception(0), Unreachable)


def test_a_stream_yields_each_item_once_with_its_index_whatever_the_order(cluster):
    found = list(cluster.handle.one.stream(range(20)))
    assert sorted(found) == [(index, index * 10) for index in range(20)]


def test_a_stream_yields_what_is_ready_while_others_still_work(cluster):
    cluster.moments.add(
        "echo.one", 1, lambda: cluster.workload(0).gate.wait(GENEROUS_S), when="before", vertex="echo-0"
    )
    stream = cluster.handle.one.stream(range(8))
    first = [next(stream) for _ in range(7)]
    cluster.workload(0).gate.set()
    assert sorted([*first, next(stream)]) == [(index, index * 10) for index in range(8)]
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_on_one_rank_stays_there(cluster):
    assert sorted(cluster.handle[1].one.stream([4, 5])) == [(0, 40), (1, 50)]
    assert cluster.vertices["echo-0"].host.progress.read()[0] == 2  # its setup alone


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_that_a_death_ends_is_made_again_on_the_replacement(cluster, when):
    def die():
        cluster.vertices["echo-1"].kill()
        later(lambda: cluster.start([1]))

    cluster.moments.add("echo.who", 1, die, when=when, vertex="echo-1")
    assert cluster.handle.who() == [(0, 1), (1, 2), (2, 1)]
    cluster.moments.add("echo.who", 1, die, when=when, vertex="echo-1")
    assert cluster.handle[1].who() == (1, 3)


def test_a_stream_and_a_scatter_survive_a_death(cluster):
    def die():
        cluster.vertices["echo-2"].kill()
        later(lambda: cluster.start([2]))

    cluster.moments.add("echo.one", 2, die, when="before", vertex="echo-2")
    found = list(cluster.handle.one.stream(range(12)))
    assert sorted(found) == [(index, index * 10) for index in range(12)]
    cluster.moments.add("echo.double", 1, die, when="after", vertex="echo-2")
    assert cluster.handle.double.scatter([1, 2, 3]) == [2, 4, 6]


def test_a_stream_goes_on_with_the_others_while_a_dead_vertex_is_not_replaced(cluster):
    cluster.moments.add(
        "echo.one", 1, lambda: cluster.vertices["echo-2"].kill(), when="before", vertex="echo-2"
    )
    stream = cluster.handle.one.stream(range(9))
    before = [next(stream) for _ in range(8)]
    cluster.start([2])
    assert sorted([*before, *stream]) == [(index, index * 10) for index in range(9)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_vertex_that_is_scaled_away_in_a_call_is_not_waited_for(cluster, when):
    """Nobody will replace it."""

    def shrink():
        cluster.vertices["echo-2"].kill()
        cluster.count = 2
        later(cluster.announce)

    cluster.moments.add("echo.who", 1, shrink, when=when, vertex="echo-2")
    assert cluster.handle.who() == [(0, 1), (1, 1)]
    assert cluster.handle.who() == [(0, 1), (1, 1)]


@pytest.mark.parametrize("way", ["scatter", "stream"])
def test_what_a_vertex_that_is_scaled_away_was_to_do_is_done_by_another(cluster, way):
    def shrink():
        cluster.vertices["echo-2"].kill()
        cluster.count = 2
        later(cluster.announce)

    if way == "scatter":
        cluster.moments.add("echo.double", 1, shrink, when="before", vertex="echo-2")
        assert cluster.handle.double.scatter([1, 2, 3]) == [2, 4, 6]
    else:
        cluster.moments.add("echo.one", 1, shrink, when="before", vertex="echo-2")
        assert sorted(cluster.handle.one.stream(range(9))) == [(index, index * 10) for index in range(9)]


def test_a_call_to_one_rank_that_is_scaled_away_says_so(cluster):
    def shrink():
        cluster.vertices["echo-2"].kill()
        cluster.count = 2
        later(cluster.announce)

    cluster.moments.add("echo.who", 1, shrink, when="before", vertex="echo-2")
    with pytest.raises(VertexDied, match="echo-2 was scaled away during who"):
        cluster.handle[2].who()


def test_the_users_exception_is_raised_here_with_the_vertexs_traceback(cluster):
    with pytest.raises(UserCodeError) as caught:
        cluster.handle.fail("bad luck")
    error = caught.value
    assert error.message == "echo-0.fail raised ValueError: bad luck"
    assert "raise ValueError(text)" in error.traceback
    assert error.details["vertex"] == "echo-0"
    assert error.details["operator"] == "fail"


def test_the_users_exception_is_not_repeated(cluster):
    calls = []
    cluster.moments.add("echo.fail", 1, lambda: calls.append(1), when="before", vertex="echo-0")
    cluster.moments.add("echo.fail", 2, lambda: calls.append(2), when="before", vertex="echo-0")
    with pytest.raises(UserCodeError):
        cluster.handle[0].fail("bad luck")
    assert calls == [1]


def test_a_result_that_cannot_be_sent_is_the_users_error_and_the_vertex_goes_on(cluster):
    with pytest.raises(UserCodeError, match="cannot be sent"):
        cluster.handle[0].unsendable()
    assert cluster.handle[0].who() == (0, 1)


def test_a_caller_that_was_replaced_is_fenced(cluster):
    cluster.vertices["echo-0"].host.call(2, "who")
    with pytest.raises(Fenced, match="works for term 2"):
        cluster.handle[0].who()


@pytest.mark.parametrize("which", ["one", "all", "stream"])
def test_a_call_that_does_not_return_ends_at_its_deadline_with_a_sentence(make_cluster, which):
    cluster = make_cluster(2, timeout_s=1.0)  # in which the other one answers
    cluster.vertices["echo-1"].hang()
    calls = {
        "one": cluster.handle[1].who,
        "all": cluster.handle.who,
        "stream": lambda: list(cluster.handle.one.stream(range(4))),
    }
    with pytest.raises(Unreachable, match=r"echo-1\.(who|one) did not return within 1 s\."):
        calls[which]()


@pytest.mark.parametrize("which", ["one", "all"])
def test_a_vertex_that_is_not_replaced_in_time_is_unreachable(make_cluster, which):
    cluster = make_cluster(2, timeout_s=1.0)  # in which the other one answers
    cluster.vertices["echo-1"].kill()
    handle = cluster.handle[1] if which == "one" else cluster.handle
    with pytest.raises(Unreachable, match=r"echo-1 was lost during who and was not replaced within 1 s"):
        handle.who()


def test_a_role_that_does_not_become_whole_is_unreachable(make_cluster):
    cluster = make_cluster(2, timeout_s=0.1)
    cluster.vertices["echo-1"].kill()
    cluster.announce()
    with pytest.raises(Unreachable, match=r"role 'echo' did not become whole within 0\.1 s"):
        cluster.handle.who()


def test_while_paused_no_call_begins_and_a_pause_is_no_delay_of_the_calls(make_cluster):
    cluster = make_cluster(2, timeout_s=3.0)
    cluster.gate.clear()
    calls = [cluster.handle.who.submit(), cluster.handle[1].who.submit()]
    gathered, streamed = [], []
    threads = [
        threading.Thread(target=lambda: gathered.extend(cluster.handle.double.scatter([1, 2]))),
        threading.Thread(target=lambda: streamed.extend(cluster.handle.one.stream([1, 2]))),
    ]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        calls[0].result(3.1)  # longer than a call may take
    assert not calls[1].done()
    assert (gathered, streamed) == ([], [])
    cluster.gate.set()
    assert calls[0].result(GENEROUS_S) == [(0, 1), (1, 1)]
    assert calls[1].result(GENEROUS_S) == (1, 1)
    for thread in threads:
        thread.join(GENEROUS_S)
    assert gathered == [2, 4]
    assert sorted(streamed) == [(0, 10), (1, 20)]


async def test_whoever_awaits_is_known_to_wait(cluster):
    from gyre.workloads.handles import Call

    inside = []

    class Owner:
        @contextmanager
        def waiting(self):
            inside.append("in")
            yield
            inside.append("out")

    call = Call(cluster.handle[0].who.submit()._future, Owner())
    assert await call == (0, 1)
    assert inside == ["in", "out"]
