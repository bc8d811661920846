"""Which request is which: asked again is the same, heard is over, and a new claim begins anew."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.chat.retries import Repeats
from tests.examples import examples

PATH = "/v1/chat/completions"


def test_the_same_bytes_are_the_next_request_once_the_answer_was_heard() -> None:
    repeats = Repeats()
    first = repeats.key(PATH, b"{}")
    assert first.endswith("-0")
    assert repeats.key(PATH, b"{}") == first
    repeats.left(first)
    second = repeats.key(PATH, b"{}")
    assert second == f"{first[:-2]}-1"
    assert repeats.key(PATH, b"{}", 1) == second


def test_a_count_of_retries_means_the_same_request_also_where_the_server_thinks_it_was_heard() -> None:
    repeats = Repeats()
    first = repeats.key(PATH, b"{}")
    repeats.left(first)
    assert repeats.key(PATH, b"{}", 1) == first
    assert repeats.key(PATH, b"{}", 2) == first
    assert repeats.key(PATH, b"{}") != first


def test_a_client_that_counts_by_itself_says_which_it_is() -> None:
    """Whatever this server, or one before it, takes for heard."""
    repeats = Repeats()
    first = repeats.key(PATH, b"{}")
    repeats.left(first)
    assert repeats.key(PATH, b"{}", 1, number=1) == f"{first[:-2]}-1"
    assert Repeats([f"{first[:-2]}-2"]).key(PATH, b"{}", number=0) == first
    repeats.left(f"{first[:-2]}-1")
    assert repeats.key(PATH, b"{}") == f"{first[:-2]}-2"


def test_route_and_every_byte_tell_requests_apart() -> None:
    repeats = Repeats()
    asked = [(PATH, b"{}"), (PATH, b"{ }"), ("/v1/messages", b"{}"), (PATH + "\0", b"{}"), (PATH, b"")]
    assert len({repeats.key(*one) for one in asked}) == len(asked)


def test_a_new_claim_finds_the_turns_of_the_last_one_in_their_order() -> None:
    repeats = Repeats()
    bodies = [b"a", b"b", b"a", b"a", b"b"]

    def run() -> list[str]:
        keys = []
        for body in bodies:
            keys.append(repeats.key(PATH, body))
            repeats.left(keys[-1])
        return keys

    first = run()
    repeats.claimed()
    assert run() == first
    assert len(set(first)) == len(first)


def test_an_answer_of_before_a_claim_hears_nothing_of_the_new_one() -> None:
    repeats = Repeats()
    old = repeats.key(PATH, b"a")
    repeats.left(old)
    newer = repeats.key(PATH, b"a")
    repeats.claimed()
    repeats.left(newer)  # the dead agent's answer, sent late
    assert repeats.key(PATH, b"a") == old


def test_a_manager_that_begins_anew_takes_the_newest_for_unheard() -> None:
    repeats = Repeats()
    keys = []
    for _ in range(3):
        keys.append(repeats.key(PATH, b"a"))
        repeats.left(keys[-1])
    again = Repeats(keys)
    assert again.key(PATH, b"a") == keys[-1]
    again.left(keys[-1])
    assert again.key(PATH, b"a") not in keys


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 2), st.booleans()), max_size=20))
def test_numbers_have_no_gaps(asked: list[tuple[bytes, int, bool]]) -> None:
    repeats = Repeats()
    seen: dict[str, int] = {}
    for body, retry_count, is_heard in asked:
        key = repeats.key(PATH, body, retry_count)
        digest, _, number = key.rpartition("-")
        assert int(number) - seen.get(digest, -1) in (0, 1)
        seen[digest] = int(number)
        if is_heard:
            repeats.left(key)
