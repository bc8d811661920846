"""The arithmetic task: prompts are a function of (seed, index), and held-out problems are never trained on."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.errors import ConfigError
from gyre.rollouts.samples import Sample, VersionRun
from gyre.workloads.tasks.arithmetic import ArithmeticTask, CharTokenizer


def problem_of(task, group):
    return task.prompt_text(group)


def test_a_prompt_depends_on_seed_and_index_only():
    first, second = ArithmeticTask({"seed": 3}), ArithmeticTask({"seed": 3})
    block = first.prompts(0, 200)
    for index in (0, 7, 199):
        alone = second.prompt(index)
        assert alone.id == index
        assert np.array_equal(alone.prompt_ids, block[index].prompt_ids)
        assert alone.meta == block[index].meta
    assert block[0].prompt_ids.dtype == np.int32
    other = ArithmeticTask({"seed": 4}).prompts(0, 200)
    assert [problem_of(first, g) for g in block] != [problem_of(first, g) for g in other]


def test_the_sequence_is_endless():
    task = ArithmeticTask({})
    assert task.prompt(10**12).id == 10**12
    with pytest.raises(ValueError, match="numbered from 0"):
        task.prompt(-1)


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-*"])
def test_answers_are_right(operators):
    task = ArithmeticTask({"task": {"operators": operators, "reversed_answer": False}})
    for group in [*task.prompts(0, 100), *task.held_out(50)]:
        text = task.prompt_text(group).removesuffix("=")
        operator = next(character for character in "+-*" if character in text)
        left, right = (int(operand) for operand in text.split(operator))
        expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert group.meta["answer"] == str(expected)


def test_a_reversed_answer_is_written_units_first():
    plain = ArithmeticTask({"task": {"reversed_answer": False}})
    mirrored = ArithmeticTask({"task": {"reversed_answer": True}})
    for a, b in zip(plain.prompts(0, 20), mirrored.prompts(0, 20), strict=True):
        assert a.meta["answer"] == b.meta["answer"][::-1]


def test_operands_are_padded_only_when_asked():
    assert all(len(g.prompt_ids) == 7 for g in ArithmeticTask({"task": {"digits": 2}}).prompts(0, 200))
    free = ArithmeticTask({"task": {"digits": 2, "zero_padded": False}}).prompts(0, 200)
    assert {len(g.prompt_ids) for g in free} == {5, 6, 7}


def test_held_out_problems_are_distinct_and_never_trained_on_in_either_order():
    task = ArithmeticTask({"seed": 1, "task": {"digits": 2}})
    held = [problem_of(task, group) for group in task.held_out(512)]
    assert len(set(held)) == 512
    mirrored = {"{1}+{0}=".format(*text.removesuffix("=").split("+")) for text in held}
    trained = {problem_of(task, group) for group in task.prompts(0, 20_000)}
    assert not trained & (set(held) | mirrored)
    assert [g.id for g in task.held_out(3)] == [-1, -2, -3]
    assert [problem_of(task, g) for g in task.held_out(10)] == held[:10]


def test_more_held_out_problems_than_there_are_is_a_config_error():
    with pytest.raises(ConfigError, match="holds out about"):
        ArithmeticTask({"task": {"digits": 1}}).held_out(1000)


def test_the_tokenizer_round_trips_and_stops_at_the_end():
    tokenizer = CharTokenizer("01+=")
    ids = tokenizer.encode("1+0=")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "1+0="
    assert tokenizer.decode([tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id, 4]) == "1+0="
    with pytest.raises(ValueError, match="'7'"):
        tokenizer.encode("7")


def test_answer_of_reads_up_to_the_end_token():
    task = ArithmeticTask({})
    tokens = np.array([*task.tokenizer.encode("95"), task.tokenizer.eos_id], dtype=np.int32)
    sample = Sample(tokens, np.zeros(3, dtype=np.float32), (VersionRun(0, 0, 3),))
    assert task.answer_of(sample) == "95"


def test_a_forgetful_pupil_slips_as_often_as_asked_and_only_where_something_is_carried():
    task = ArithmeticTask({"task": {"reversed_answer": False}})

    def written(start: int, count: int, slips: float):
        """Each problem, and the answer that the pupil wrote beside it."""
        shown = task.demonstrations(start, count, slips)
        assert all(one.token_ids[-1] == task.tokenizer.eos_id and one.mask.all() for one in shown)
        return [
            (group, task.tokenizer.decode(one.token_ids))
            for group, one in zip(task.prompts(start, count), shown, strict=True)
            if (group.prompt_ids == one.prompt_ids).all()
        ]

    assert all(answer == group.meta["answer"] for group, answer in written(0, 100, 0.0))
    assert len(written(0, 100, 1.0)) == 100
    for group, answer in written(0, 100, 1.0):
        left, right = task.prompt_text(group).removesuffix("=").split("+")
        columns = [int(a) + int(b) for a, b in zip(left, right, strict=True)]
        assert int(answer) == int("".join(str(column % 10) for column in columns))
        assert (answer == group.meta["answer"]) == all(column < 10 for column in columns)
    some = written(0, 2000, 0.5)
    carried = [
        answer == group.meta["answer"]
        for (group, answer), (_, slip) in zip(some, written(0, 2000, 1.0), strict=True)
        if slip != group.meta["answer"]
    ]
    assert 0.45 < sum(carried) / len(carried) < 0.55
    assert written(50, 1, 0.5)[0][1] == some[50][1]
