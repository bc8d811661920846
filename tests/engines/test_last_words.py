"""An engine's last words: the exception and its frames, whatever was printed around them, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engines.last_words import CHARS, LINES, LastWords, last_words

MISSING = """Traceback (most recent call last):
  File "/opt/engine/launch.py", line 3, in <module>
    import flashinfer
ModuleNotFoundError: No module named 'flashinfer'"""

CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
RuntimeError: no x"""


@pytest.mark.parametrize(
    ("output", "sentence", "first", "last"),
    [
        (f"loading\n{MISSING}\n", "ModuleNotFoundError: No module named 'flashinfer'", "Traceback", "Module"),
        (
            f"{MISSING}\nReceived sigquit.\nKilled",
            "ModuleNotFoundError: No module named 'flashinfer'",
            "T",
            "K",
        ),
        (f"ValueError: old\n{CHAINED}", "RuntimeError: no x", "Traceback", "RuntimeError"),
        ("one\ntwo\n\n", "two", "one", "two"),
        ("\x1b[31mCUDA error\x1b[0m\n", "CUDA error", "CUDA", "CUDA"),
        ("0%\r50%\r99%\nno room", "no room", "99%", "no room"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):", "T", "T"),
    ],
)
def test_what_is_said_last(output: str, sentence: str, first: str, last: str) -> None:
    words = last_words(output)
    lines = words.text.splitlines()
    assert words.sentence == sentence
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last)
    if "direct cause" in output:
        assert "KeyError: 'x'" in words.text


def test_nothing_said_is_nothing() -> None:
    assert last_words(" \n\n") == LastWords("", "")


def test_a_deep_traceback_keeps_its_exception_and_the_frames_next_to_it() -> None:
    frames = "".join(f'  File "f{n}.py", line 1, in f\n' for n in range(500))
    words = last_words(
        f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n" + "bye\n" * 99
    )
    assert words.sentence == "RecursionError: too deep"
    assert 'File "f499.py"' in words.text
    assert words.text.startswith("Traceback")


def test_secrets_are_not_shown() -> None:
    assert (
        last_words("args: api_key='s3cretkey-s3cret'", ["s3cretkey-s3cret", ""]).text == "args: api_key='***'"
    )


@given(
    st.lists(st.sampled_from([*MISSING.split("\n"), *CHAINED.split("\n"), "x" * 9000, "\x1b[2J", "  \x00"]))
)
def test_whatever_is_printed_they_are_bounded_and_printable(lines: list[str]) -> None:
    words = last_words("\n".join(lines))
    assert len(words.text) <= CHARS
    assert words.text.count("\n") < LINES
    assert words.text.replace("\n", "").isprintable()
    assert "\n" not in words.sentence
