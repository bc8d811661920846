"""Tags and notes: what is one, and the sentence for what is none."""

from __future__ import annotations

import pytest

from gyre.config import parse_job
from gyre.config.changes import changes_between, check_changes
from gyre.config.labels import MOST_TAGS, NOTE_CHARS, checked_note, checked_tags
from gyre.errors import ConfigError


@pytest.mark.parametrize(
    "tag", ["ablation", "lr sweep", "team/rl", "v1.2", "größe", "a", "1e-5", "seed:3", "x@y", "C++", "日本"]
)
def test_what_is_a_tag(tag: str) -> None:
    assert checked_tags([tag, tag]) == (tag,)


@pytest.mark.parametrize(
    "tag", ["", " a", "a ", "a,b", "a=b", "a>b", '"a"', "-a", "a" * 65, "a\nb", "a\0", "\ud800", "!", "~x"]
)
def test_what_is_none(tag: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a tag") as caught:
        checked_tags([tag])
    assert "at most 64" in caught.value.hint


def test_of_how_many_and_how_long() -> None:
    with pytest.raises(ConfigError, match="at most 32"):
        checked_tags([f"t{number}" for number in range(MOST_TAGS + 1)])
    assert checked_note("  two\nlines ") == "two\nlines"
    with pytest.raises(ConfigError, match="may have 4,000"):
        checked_note("x" * (NOTE_CHARS + 1))
    for bad in ("a\0b", "half \ud83d"):
        with pytest.raises(ConfigError, match="no database keeps"):
            checked_note(bad)


def test_a_job_file_has_them_and_a_bad_one_is_a_sentence() -> None:
    spec = parse_job({"tags": ["ablation", "lr"], "notes": " why \n"})
    assert (spec.tags, spec.notes) == (["ablation", "lr"], "why")
    with pytest.raises(ConfigError) as caught:
        parse_job({"tags": ["a=b"]})
    assert "tags" in str(caught.value)
    assert "'a=b' cannot be a tag" in str(caught.value)


def test_a_job_that_goes_on_may_be_called_otherwise() -> None:
    before, after = ({"tags": tags, "notes": ""} for tags in (["a"], ["a", "b"]))
    changes = changes_between(before, after)
    assert changes == {"tags": [["a"], ["a", "b"]]}
    check_changes(changes)
