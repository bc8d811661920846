"""Functions are called by the names of their parameters; what has no known form is refused with what is wanted."""

from __future__ import annotations

import dataclasses
import functools
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from gyre.errors import ConfigError
from gyre.workloads.rewards.calls import BoundReward, parameters_of
from gyre.workloads.rewards.forms import form_of, lacking
from gyre.workloads.rewards.results import MOST_MORE, NoReward, combined, read_batch, read_one
from gyre.workloads.rewards.signatures import NoFile, look_at

META = {
    "answer": "4",
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "four"},
    "extra_info": {"index": 7},
    "level": 3,
    "finish_reason": "stop",
}


class Instance:
    def __call__(self, prompt, completion, meta):
        return [prompt, completion, meta["answer"]] == ["P", "C", "4"]


async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return float((data_source, solution_str, ground_truth) == ("openai/gsm8k", "C", "four"))


def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    right = (data_source, solution_str, ground_truth) == ("openai/gsm8k", "C", "four")
    return {
        "score": float(right),
        "acc": extra_info["index"] == 7,
        "num_turns": extra_info["num_turns"],
        "pred": "C",
    }


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert [one["index"] for one in extra_infos] == [7, 7]
    return [
        {"score": float(a == "openai/gsm8k" and b == "C" and c == "four")}
        for a, b, c in zip(data_sources, solution_strs, ground_truths, strict=True)
    ]


def trl(prompts, completions, answer, completion_ids, trainer_state, log_metric, **columns):
    log_metric("seen", 1.0)
    assert trainer_state is None
    assert columns["level"] == [3, 3]
    return [
        float((p, c, a, len(i)) == ("P", "C", "4", 2))
        for p, c, a, i in zip(prompts, completions, answer, completion_ids, strict=True)
    ]


def openrlhf(queries, prompts, labels, **kwargs):
    found = [q == p + "C" and label == "four" for q, p, label in zip(queries, prompts, labels, strict=True)]
    return {
        "rewards": np.array(found, dtype=np.float32),
        "scores": np.array(found),
        "extra_logs": {"len": np.array([1, 2])},
    }


def by_columns(completion, level, ground_truth, missing="default"):
    return float((completion, level, ground_truth, missing) == ("C", 3, "four", "default"))


def in_another_order(meta, response, question):
    return float((question, response, meta["level"]) == ("P", "C", 3))


def with_more(prompt, completion, meta, **more):
    return float(more["level"] == 3 and more["finish_reason"] == "stop")


def batch(prompts, completions, metas):
    return [
        float((p, c, m["answer"]) == ("P", "C", "4"))
        for p, c, m in zip(prompts, completions, metas, strict=True)
    ]


def positional(prompt, completion, meta, /):
    return float((prompt, completion) == ("P", "C"))


FORMS = [
    (lambda p, c, m: float((p, c, m["answer"]) == ("P", "C", "4")), "sample"),
    (lambda _, completion, __: float(completion == "C"), "sample"),
    (lambda prompt_text, completion_text, meta: float(completion_text == "C"), "sample"),
    (Instance(), "sample"),
    (functools.partial(verl, extra_info={"index": 7, "num_turns": 2}), "verl"),
    (functools.partial(by_columns, missing="default"), "sample"),
    (waits, "verl"),
    (verl, "verl"),
    (verl_batch, "verl"),
    (trl, "trl"),
    (openrlhf, "openrlhf"),
    (by_columns, "sample"),
    (in_another_order, "sample"),
    (with_more, "sample"),
    (batch, "batch"),
    (positional, "sample"),
]


@pytest.mark.parametrize(
    ("function", "form"), FORMS, ids=[getattr(one, "__name__", type(one).__name__) for one, _ in FORMS]
)
def test_each_form_is_called_by_its_names(function, form):
    reward = BoundReward(function, "mine.py:f")
    assert reward.form.name == form
    samples = [("P", "C", {**META, "completion_ids": [1, 2]})] * 2
    scored = reward(samples)
    assert [number for number, _ in scored] == [1.0, 1.0]
    if function is verl:
        assert scored[0][1] == {"acc": 1.0}, "None and texts are no numbers"
    if function is openrlhf:
        assert [more for _, more in scored] == [{"scores": 1.0, "len": 1.0}, {"scores": 1.0, "len": 2.0}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(a, b): ...", "f(a, b) is no reward"),
        ("def f(x, y, z): ...", "f(x, y, z) is no reward"),
        ("def f(): ...", "f() is no reward"),
        ("def f(*args): ...", "f(*args) is no reward"),
        ("def f(*args, **kwargs): ...", "f(*args, **kwargs) is no reward"),
        ("def f(data_source, answer, ground_truth): ...", "is no reward"),
        ("def f(prompt, completions, completion_ids, answer, **kwargs): ...", "may be trl or sample"),
        ("def f(queries, completions): ...", "may be openrlhf or trl"),
        ("def f(solution_str, ground_truth, tokenizer): ...", "nothing is known to give for tokenizer"),
        ("def f(queries, prompts, labels, model): ...", "nothing is known to give for model"),
        ("def f(ground_truth, /, solution_str): ...", "ground_truth cannot be given by its name"),
    ],
)
def test_what_has_no_form_is_refused_with_what_was_found_and_what_is_wanted(tmp_path, text, why):
    (tmp_path / "r.py").write_text(f"import nothing_that_is_there\n\n{text}\n")
    seen = look_at(f"{tmp_path}/r.py:f")
    assert seen is not None
    with pytest.raises(ConfigError) as caught:
        form_of(seen.name, seen.parameters, "auto", seen.where)
    assert why in caught.value.message
    assert f"{tmp_path}/r.py:3" in caught.value.message
    assert "solution_str" in caught.value.hint
    assert "config.reward.signature" in caught.value.hint


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lambda x, y, z: float((x, y) == ("P", "C")), "sample"),
        (lambda *args: float(args[:2] == ("P", "C")), "sample"),
        (lambda x, y, z: [1.0 for one in y if one == "C"], "batch"),
        (lambda **given: float(given["solution_str"] == "C" and given["ground_truth"] == "four"), "verl"),
        (lambda **given: [1.0 for _ in given["completions"]], "trl"),
        (lambda **given: [1.0 for _ in given["queries"]], "openrlhf"),
    ],
)
def test_the_job_may_say_the_form(function, signature):
    with pytest.raises(ConfigError, match="no known form"):
        BoundReward(function, "f")
    assert BoundReward(function, "f", signature)([("P", "C", META)] * 2) == [(1.0, {})] * 2
    with pytest.raises(ConfigError, match="is not called as verl"):
        BoundReward(lambda a, b: 1.0, "f", "verl")


def test_an_option_of_another_form_s_function_is_left_alone():
    def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0, text=None):
        return score if method == "strict" and text is None else 0.0

    assert BoundReward(gsm8k, "f")([("P", "C", {"answer": "4", "method": "flexible", "score": 9})]) == [
        (1.0, {})
    ]


def test_what_a_function_needs_and_the_data_lacks_is_named():
    def needs(completion, solution, ground_truth):
        return 1.0

    form = BoundReward(needs, "mine.py:needs").form
    assert lacking(form, {"level"}) == ["solution", "answer"]
    assert lacking(form, {"solution", "answer"}) == []
    with pytest.raises(ConfigError, match=r"mine\.py:needs takes 'solution'.*no column of this name"):
        BoundReward(needs, "mine.py:needs")([("P", "C", {"answer": "4"})])
    with pytest.raises(ConfigError, match=r"reward_model\.ground_truth.*answer"):
        BoundReward(verl, "v")([("P", "C", {"level": 3})])

    def may_lack(solution_str, ground_truth=None):
        return float(ground_truth is None)

    assert BoundReward(may_lack, "f")([("P", "C", {})]) == [(1.0, {})]


def test_a_class_and_what_shows_no_parameters_are_refused():
    with pytest.raises(ConfigError, match="is a class"):
        parameters_of(Instance, "r.py:Instance")
    with pytest.raises(ConfigError, match="cannot be seen"):
        parameters_of(type("C", (), {"__call__": 1})(), "x")


@pytest.mark.parametrize(
    ("returned", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.array([[2.0]]), 2.0),
        ({"score": 1}, 1.0),
        ({"reward": np.int64(3), "score": 2}, 2.0),
    ],
)
def test_numbers_of_any_kind_are_rewards(returned, number):
    assert read_one(returned)[0] == number


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, r"None \(NoneType\), which is no number"),
        ("1.0", r"'1.0' \(str\), which is no number"),
        (float("nan"), "nan, which is no reward"),
        (float("inf"), "inf, which is no reward"),
        (10**400, "which is no number"),
        (1 + 2j, "which is no number"),
        ([1.0, 2.0], "which is no number"),
        (np.array([1.0, 2.0]), "which is no number"),
        (np.array(["1.0"]), "which is no number"),
        ({}, "no keys"),
        ({"acc": 1.0}, "'acc' and without 'score'"),
        ({"score": None}, "'score': None"),
        ({"score": "x" * 500}, r"x… \(str\)"),
    ],
)
def test_what_is_no_reward_is_refused_with_what_it_was(returned, why):
    with pytest.raises(NoReward, match=why):
        read_one(returned)


@pytest.mark.parametrize(
    ("returned", "index", "why"),
    [
        ([1.0], None, "1 rewards for 2 samples"),
        ([1.0] * 3, None, "3 rewards for 2 samples"),
        (1.0, None, "expected a list of 2 rewards"),
        (np.float32(1.0), None, "expected a list of 2 rewards"),
        ("ab", None, "expected a list"),
        ({2.0, 1.0}, None, "expected a list"),
        (None, None, "expected a list"),
        ([1.0, None], 1, "None"),
        ({"rewards": [1.0]}, None, "1 rewards for 2"),
        ({"values": [1.0, 1.0]}, None, "without 'rewards'"),
    ],
)
def test_a_batch_s_fault_is_told_with_the_sample_whose_it_is(returned, index, why):
    with pytest.raises(NoReward, match=why) as caught:
        read_batch(returned, 2)
    assert caught.value.index == index


def test_of_what_else_is_returned_some_numbers_are_kept():
    _, more = read_one({"score": 1.0, **{f"{n}" * 80: n for n in range(99)}, "text": "x"})
    assert len(more) == MOST_MORE
    assert max(map(len, more)) == 64


# -- reading a file that is not run ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "f = lambda p, c, m: 1.0",
        "import functools\ndef g(p, c, m): ...\nf = functools.partial(g)",
        "@wrap\ndef f(p, c, m): ...",
        "from elsewhere import f",
        "from elsewhere import *",
        "if True:\n    def f(p, c, m): ...\nelse:\n    def f(a): ...",
        "try:\n    pass\nexcept ImportError:\n    f = None\ndef f(p, c, m): ...",
        "globals()['f'] = 1",
        "def __getattr__(name): ...",
        "class K:\n    def __call__(self, p, c, m): ...\nf = K()",
    ],
)
def test_what_only_shows_when_the_module_runs_is_not_guessed(tmp_path, text):
    (tmp_path / "r.py").write_text(text)
    assert look_at(f"{tmp_path}/r.py:f") is None


def test_the_last_definition_at_the_top_counts(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(a): ...\nasync def f(prompt, /, completion, *, meta=1, **more): ...\n"
    )
    seen = look_at(f"{tmp_path}/r.py:f")
    assert seen is not None
    assert seen.where.endswith("r.py:2")
    assert [(one.name, one.kind, one.required) for one in seen.parameters] == [
        ("prompt", "position", True),
        ("completion", "name", True),
        ("meta", "name", False),
        ("more", "named_rest", False),
    ]


def test_a_module_is_found_without_importing_its_package(tmp_path):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit(3)")
    (package / "inner" / "r.py").write_text(
        "def f(completions, **columns): ..."
    )  # inner is a namespace package
    seen = look_at("some_package.inner.r:f", [str(tmp_path)])
    assert seen is not None
    assert seen.parameters[0].name == "completions"
    assert look_at("no_such_package.r:f") is None
    assert look_at("math:sqrt") is None


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("def f(:\n", "f", r"r\.py:1 is no Python: invalid syntax"),
        ("\n\nx = '", "f", r"r\.py:3 is no Python: unterminated"),
        ("x = 1\0", "f", "is no Python"),
        ("def reward(p, c, m): ...", "rewrd", "has no 'rewrd'; did you mean 'reward'"),
        ("class f:\n    pass", "f", r"r\.py:1: f is a class"),
        ("", "f", "has no 'f'"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_with_its_line(tmp_path, text, name, why):
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(ConfigError, match=why):
        look_at(f"{tmp_path}/r.py:{name}")


def test_a_file_that_is_not_there_is_named_with_where_it_was_looked_for(tmp_path, monkeypatch):
    (tmp_path / "rew.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoFile, match=f"there is no file {tmp_path}/rew2.py") as caught:
        look_at("rew2.py:f")
    assert f"{tmp_path}/rew.py" in caught.value.hint
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("rew2.py").write_text("def f(p, c, m): ...")
    assert look_at("~/rew2.py:f") is not None
    for wrong in ("rew.py", "rew.py:", ":f", "rew.py:a b", "math_verfy"):
        with pytest.raises(ConfigError, match="is no reward function"):
            look_at(wrong)


@dataclasses.dataclass
class Said:
    score: float
    right: bool
    note: str = "text"


def test_a_dataclass_is_read_as_a_mapping_of_its_fields():
    assert read_one(Said(0.5, True)) == (0.5, {"right": 1.0})
    assert read_batch([Said(0.5, True), 1.0], 2) == [(0.5, {"right": 1.0}), (1.0, {})]
    with pytest.raises(NoReward, match="it returned 'score': nan"):
        read_one(Said(math.nan, True))
    with pytest.raises(NoReward):
        read_one(Said)  # the class itself


def test_of_several_functions_each_score_and_number_is_kept_under_its_name():
    parts = [("right", 1.0), ("format", 0.25), ("shown", 0.0)]
    many = {f"n{at}": 1.0 for at in range(MOST_MORE)}
    reward, more = combined(parts, [(1.0, {"acc": 1.0}), (0.5, {"acc": 0.0}), (9.0, many)])
    assert reward == 1.125
    assert (more["right"], more["format"], more["shown"]) == (1.0, 0.5, 9.0)
    assert (more["right.acc"], more["format.acc"], more["shown.n0"]) == (1.0, 0.0, 1.0)
    assert len(more) == 3 + MOST_MORE
