"""Layouts: one rule finds the prompt and the answer, by columns that people have."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.data.layouts import last_box, layout_for
from gyre.data.values import Unholdable, answer_of, plain
from gyre.errors import ConfigError
from tests.data.small import gsm8k_rows, openr1_rows

ASKED = [{"role": "user", "content": "q"}]
NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "name", "prompt", "answers"),
    [
        (gsm8k_rows(), "gsm8k", "question", ["48", "3", "1000", None]),
        (openr1_rows(), "openr1-math", "problem", ["-0", "-1", None, "-3"]),
        (
            [{"question": "q", "answer": "72"}, {"question": "q", "answer": "a\n\n#### b\nc"}],
            "qa",
            "question",
            None,
        ),
        (
            [{"question": "q", "golden_answers": ["Paris", "paris"]}],
            "search-r1",
            "question",
            [["Paris", "paris"]],
        ),
        ([{"problem": "q", "solution": "so \\boxed{1}", "level": "Level 5"}], "math", "problem", ["1"]),
        (
            [{"problem": "q", "solution": "so \\boxed{1}", "answer": "2", "subject": "Algebra"}],
            "openr1-math",
            "problem",
            ["2"],
        ),
        (
            [{"prompt": ASKED, "reward_model": {"ground_truth": "34"}, "data_source": "dapo"}],
            "verl",
            "prompt",
            ["34"],
        ),
        (
            [
                {
                    "prompt": ASKED,
                    "reward_model": {"ground_truth": {"target": ["a"]}},
                    "question": "x",
                    "golden_answers": [],
                }
            ],
            "verl",
            "prompt",
            [{"target": ["a"]}],
        ),
        (
            [{"prompt": "q", "chosen": [], "rejected": [], "messages": ASKED, "score_chosen": 8.0}],
            "plain",
            "prompt",
            [None],
        ),
        ([{"prompt": "q", "response": "r", "helpfulness": 3}], "plain", "prompt", [None]),
        (
            [{"source": "s", "instruction": "q", "models": [], "completions": []}],
            "instruction",
            "instruction",
            [None],
        ),
        ([{"messages": ASKED, "ground_truth": "3", "dataset": "gsm"}], "messages", "messages", ["3"]),
        ([{"conversations": [{"from": "human", "value": "q"}]}], "plain", "conversations", [None]),
        ([{"prompt": "q"}, {"prompt": "q", "answer": 1}], "plain", "prompt", [None, "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_layout_goes_by_the_columns(rows, name, prompt, answers):
    layout = layout_for("auto", rows)
    assert (layout.name, layout.prompt) == (name, prompt)
    expected = answers or [row["answer"] for row in rows]
    assert [layout.answer_of(row) for row in rows] == expected
    if name != "plain":
        assert layout_for(name, rows).described() == layout.described()


def test_named_columns_replace_the_rule_and_dots_lead_into_mappings():
    rows = [
        {"prompt": "p", "extra_info": {"question": "q", "answer": 3}, "a.b": "c", "answer": "so\n#### 1"},
        {},
    ]
    layout = layout_for("auto", rows, prompt="extra_info.question", answer="extra_info.answer")
    assert (layout.prompt_of(rows[0]), layout.answer_of(rows[0])) == ("q", "3")
    assert layout.answer_of({"extra_info": None}) is None
    assert layout_for("auto", rows, answer="a.b").answer_of(rows[0]) == "c"
    assert layout_for("auto", rows, prompt="prompt").answer_of(rows[0]) == "1"
    assert layout_for("plain", rows).answer_of(rows[0]) == "so\n#### 1"
    with pytest.raises(KeyError):
        layout.prompt_of({"extra_info": {}})


def test_the_input_of_an_instruction_stands_below_it():
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Hi.", "input": "", "output": "."},
    ]
    layout = layout_for("auto", rows)
    assert [layout.prompt_of(row) for row in rows] == ["Add.\n\n1 2", "Hi."]
    assert layout.prompt_columns == {"instruction", "input"}


@pytest.mark.parametrize(
    ("name", "columns", "named", "sentence"),
    [
        ("auto", ["a", "b"], {}, "no column is known to be the prompt; there are a, b.*--prompt"),
        ("gsm8k", ["problem", "answer"], {}, "needs the columns question, answer; there are problem, answer"),
        ("gsm", ["question"], {}, "'gsm' is not a layout; did you mean 'gsm8k'"),
        ("auto", ["question"], {"prompt": "questoin"}, "--prompt: .* did you mean 'question'"),
        ("auto", ["question", "final"], {"answer": "finale"}, "--answer: .* did you mean 'final'"),
        (
            "gsm8k",
            ["question", "answer"],
            {"prompt": "question"},
            "--layout gsm8k and --prompt are both given",
        ),
        (
            "verl",
            ["q", "a"],
            {"prompt": "q", "answer": "a"},
            "--layout verl and --prompt and --answer are both",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_named(name, columns, named, sentence):
    with pytest.raises(ConfigError, match=sentence):
        layout_for(name, [dict.fromkeys(columns, "x")], **named)


@pytest.mark.parametrize(
    ("solution", "box"),
    [
        (r"so \boxed{5} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"$\boxed 9$", "9"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{}", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_box_of_a_solution(solution, box):
    assert last_box(solution) == box


@given(st.text(alphabet="\\{}boxedf 1$", max_size=60))
def test_any_text_has_a_last_box_or_none(text):
    found = last_box(text)
    assert found is None or (found and found in text)


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        (None, None),
        ("", None),
        (" \n", None),
        (NAN, None),
        (Decimal("NaN"), None),
        ([], None),
        ([None, ""], None),
        ({"target": []}, None),
        (0, "0"),
        (0.0, "0"),
        (72.0, "72"),
        (-3.0, "-3"),
        (2.5, "2.5"),
        (1e300, "1e+300"),
        (10**30, "1" + "0" * 30),
        (Decimal("18.90"), "18.90"),
        (Decimal("72.00"), "72"),
        (False, False),
        (" 72 ", " 72 "),
        (["12"], ["12"]),
        ([12, 0.5, None], [12, 0.5, None]),
        ({"target": ["Paris"], "n": None}, {"target": ["Paris"], "n": None}),
        (date(2026, 1, 31), "2026-01-31"),
    ],
)
def test_what_a_cell_says_as_an_answer(cell, answer):
    found = answer_of(cell)
    assert (type(found), found) == (type(answer), answer)


@pytest.mark.parametrize("cell", [b"bytes", float("inf"), "\ud83d", ["\ud83d"], {"a": object()}])
def test_what_cannot_be_held_is_refused(cell):
    for read in (answer_of, plain):
        with pytest.raises(Unholdable):
            read(cell)


def test_a_wrong_key_of_a_mapping_is_named_with_the_nearest_one():
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}}]
    with pytest.raises(
        ConfigError, match="reward_model has no key 'groundtruth'; did you mean 'ground_truth'"
    ):
        layout_for("auto", rows, answer="reward_model.groundtruth")
    with pytest.raises(ConfigError, match="no column 'reward_modl'; did you mean 'reward_model'"):
        layout_for("auto", rows, answer="reward_modl")


def test_a_nest_too_deep_is_refused():
    nest: list[object] = []
    for _ in range(200):
        nest = [nest]
    with pytest.raises(Unholdable, match="deep"):
        plain(nest)
