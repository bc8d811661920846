"""Golds as data sets have them: the answer itself is right, the last box counts, and what cannot be read is told."""

from __future__ import annotations

import pytest

from gyre.errors import ConfigError
from gyre.workloads.rewards import exact_match, math_verify, unreadable_gold

pytest.importorskip("math_verify")

GOLDS = [
    r"\$18.90",
    r"\$36",
    r"\$32,\!348",
    r"58,\!500",
    "10{,}000",
    "1,000",
    r"2\,000",
    r"11,\! 111,\! 111,\! 100",
    r"\text{Evelyn}",
    "(C)",
    r"\text{(C)}",
    r"90^\circ",
    r"50\%",
    "x=5",
    r"(-\infty, 3]",
    r"\{1,2\}",
    "1010_2",
    "4210_{5}",
    "9:30",
    "no solution",
    r"3\sqrt{13}",
    "6 - 5i",
    "p - q",
    r"\pm 1",
    r"0.\overline{3}",
    "ABC",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    "5 dollars",
    "-3",
    ".5",
]


@pytest.mark.parametrize("gold", GOLDS)
def test_the_answer_itself_is_right(gold):
    assert not unreadable_gold(gold)
    assert math_verify("", rf"So the answer is $\boxed{{{gold}}}$.", {"answer": gold}) == 1.0


@pytest.mark.parametrize(
    ("gold", "said", "reward"),
    [
        (r"\$36", r"\boxed{36}", 1.0),
        (r"\$18.90", r"\boxed{18.9}", 1.0),
        (r"2\,000", r"\boxed{2000}", 1.0),
        ("1,000,000", r"\boxed{10^6}", 1.0),
        (r"32{,}348", r"\boxed{32}", 0.0),
        (r"58,\!500", r"\boxed{58}", 0.0),
        (r"0.\overline{3}", r"\boxed{\frac13}", 1.0),
        (r"0.\overline{3}", r"\boxed{0}", 0.0),
        (r"0.1\overline{6}", r"\boxed{1/6}", 1.0),
        ("ABC", r"\boxed{CBA}", 0.0),
        ("ABC", r"\boxed{\text{ABC}}", 1.0),
        ("no solution", r"\boxed{\text{No solution}}", 1.0),
        (r"\text{(C)}", r"\boxed{C}", 1.0),
        (r"\text{2 hours}", r"\boxed{2}", 1.0),
        ("9:30", r"\boxed{9/30}", 0.0),
        ("3:4", r"\boxed{\frac34}", 1.0),
        ("1010_2", r"\boxed{1010_3}", 0.0),
        ("1010_2", r"\boxed{1011}", 0.0),
        ("1.5e3", r"\boxed{1500}", 1.0),
        ("42", r"First I thought \boxed{41}. No: \boxed{42}", 1.0),
        ("42", r"\boxed{42} or \boxed{43}", 0.0),
        ("42", r"\boxed{42}, I mean \boxed{4", 1.0),
        ("1", r"\boxed{1,2}", 0.0),
        ("1,2", r"\boxed{2} and \boxed{1}", 1.0),
        ("7", r"\boxed{\boxed{7}}", 1.0),
        ("7", r"\boxed 7", 1.0),
        ("72", "#### 72", 1.0),
        ("72", "#### 71\n#### 72", 1.0),
        ("72", "#### 72\n#### 71", 0.0),
        ("Evelyn", "Evelyn", 1.0),
        ("42", "", 0.0),
    ],
)
def test_answers_of_other_shapes(gold, said, reward):
    assert math_verify("", said, {"answer": gold}) == reward


def test_any_of_several_golds_counts_and_numbers_are_golds():
    for answer, said, reward in [
        (["4", "four"], "four", 1.0),
        ([4, 5], "5", 1.0),
        (4, "4", 1.0),
        (["4"], "5", 0.0),
    ]:
        assert exact_match("", said, {"answer": answer}) == reward
        assert math_verify("", rf"\boxed{{{said}}}", {"answer": answer}) == reward
    assert math_verify("", r"\boxed{4}", {"answer": ["", "4"]}) == 1.0


@pytest.mark.parametrize("answer", ["", "  ", "$", r"\boxed{}", r"\text{}", ["", " "]])
def test_a_gold_that_cannot_be_read_ends_nothing_and_is_told(answer):
    assert unreadable_gold(answer)
    assert math_verify("", r"\boxed{1}", {"answer": answer}) == {"score": 0.0, "unreadable_gold": 1.0}


@pytest.mark.parametrize("function", [exact_match, math_verify])
@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({}, "a row without an answer"),
        ({"answer": None}, "a row without an answer"),
        ({"answer": {"target": ["4"]}}, "is no text, number or list"),
        ({"answer": [["4"]]}, "is no text, number or list"),
        ({"answer": []}, "is no text, number or list"),
    ],
)
def test_without_a_gold_there_is_a_sentence(function, meta, why):
    with pytest.raises(ConfigError, match=why):
        function("", "4", meta)
    assert unreadable_gold(meta.get("answer"))
