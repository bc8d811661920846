"""The prepared form: the same for the same input, whole or not there, drawn by number, held out for good."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gyre.api.cli import main
from gyre.data.order import EpochOrder
from gyre.data.prepare import PromptRecipe, prepare
from gyre.data.prepared import PreparedData
from gyre.data.templates import ChatTemplate
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from gyre.rollouts.samples import Sample, VersionRun
from tests.data.small import TEMPLATE, gsm8k_rows, write_lines, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(40)]
    return write_lines(tmp_path_factory.mktemp("source") / "train.jsonl", rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, source):
    path = tmp_path_factory.mktemp("prepared") / "train"
    prepare(source, path, model, PromptRecipe(suffix=" Think."))
    return path


def data_of(folder, seed=0, **section):
    return PreparedData({"seed": seed, "data": {"path": str(folder), **section}})


# -- templates --------------------------------------------------------------------------------------

CONVERSATIONS = [
    [{"role": "user", "content": "Hi {{ 7 * 7 }} ünïcode"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "?"},
    ],
]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_a_chat_template_gives_what_transformers_gives(model, options):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(TEMPLATE, {"eos_token": "<|im_end|>"})
    for conversation in CONVERSATIONS:
        for generate in (True, False):
            (expected,), _ = render_jinja_template(
                [conversation],
                chat_template=TEMPLATE,
                add_generation_prompt=generate,
                eos_token="<|im_end|>",
                **options,
            )
            assert template.render(conversation, generate=generate, **options) == expected


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses"),
        ("{% set _ = messages.append(1) %}", "refuses"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% if %}", "not valid Jinja"),
    ],
)
def test_a_template_reaches_nothing_of_python(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        print(ChatTemplate(template).render(CONVERSATIONS[0]))


# -- preparing --------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_template_and_answers_go_with_them(folder, model, source):
    tokenizer = TextTokenizer(model)
    data = data_of(folder, shuffle=False)
    group = data.prompt(3)
    text = "<|im_start|>user\nWhat is 3 plus 3? Think.<|im_end|>\n<|im_start|>assistant\n"
    assert group.prompt_ids.tolist() == tokenizer.encode([text], special=False)[0]
    assert group.prompt_ids.dtype == np.int32
    assert (group.id, group.meta) == (3, {"answer": "6", "row": 3, "epoch": 0})
    assert "What is 3 plus 3? Think." in data.prompt_text(group)
    assert data.stop_token_ids == (2, 0)
    assert (data.tokenizer.eos_id, data.tokenizer.vocab_size) == (2, 300)
    tokens = np.array([*tokenizer.encode(["The answer is 6."], special=False)[0], 2], dtype=np.int32)
    said = Sample(tokens, np.zeros(len(tokens), dtype=np.float32), (VersionRun(0, 0, len(tokens)),))
    assert data.answer_of(said) == "The answer is 6."


def test_an_answer_ends_before_its_end_token_whatever_the_tokenizer_calls_it(tmp_path, source):
    model = write_tokenizer(tmp_path / "plain-end")
    told = json.loads((model / "tokenizer.json").read_text())
    for token in told["added_tokens"]:
        token["special"] = False
    (model / "tokenizer.json").write_text(json.dumps(told))
    prepare(source, tmp_path / "out", model)
    data = data_of(tmp_path / "out", shuffle=False)
    (twelve,) = data.tokenizer.encode(["12"], special=False)

    def answer(ids: list[int], finish: str) -> str:
        tokens = np.array(ids, dtype=np.int32)
        runs = (VersionRun(0, 0, len(ids)),)
        return data.answer_of(Sample(tokens, np.zeros(len(ids), np.float32), runs, finish))

    assert answer([*twelve, 2], "stop") == "12"
    assert answer([*twelve, 0], "stop") == "12"
    assert answer([*twelve, 2, 2], "stop") == "12<|im_end|>"
    assert answer(twelve, "stop") == "12"
    assert answer([*twelve, 2], "length") == "12<|im_end|>"
    assert answer([], "stop") == ""


def test_a_prompt_brings_its_own_limit(tmp_path, model):
    asked = gsm8k_rows()[:2]
    rows = write_lines(tmp_path / "rows.jsonl", [{**asked[0], "max_new_tokens": 9}, asked[1]])
    prepare(rows, tmp_path / "out", model)
    data = data_of(tmp_path / "out", shuffle=False)
    assert [data.prompt(index).token_limit(20) for index in range(2)] == [9, 20]


def test_the_same_input_has_the_same_digest_and_another_has_another(tmp_path, model, source, folder):
    again = prepare(source, tmp_path / "again", model, PromptRecipe(suffix=" Think."))
    other = prepare(source, tmp_path / "other", model, PromptRecipe())
    assert again["digest"] == json.loads((folder / "manifest.json").read_text())["digest"]
    assert other["digest"] != again["digest"]


def test_what_is_left_out_is_counted(tmp_path, model):
    rows = write_lines(tmp_path / "rows.jsonl", gsm8k_rows())
    told = prepare(rows, tmp_path / "out", model, PromptRecipe(max_prompt_tokens=40, chat=False))
    assert (told["read"], told["rows"]) == (4, 3 - told["left_out"].get("too long", 0))
    assert told["left_out"]["without an answer"] == 1
    with pytest.raises(
        ConfigError, match=r"no row is left of the 4 .*: 3 too long, 1 without an answer"
    ) as raised:
        prepare(rows, tmp_path / "none", model, PromptRecipe(max_prompt_tokens=1))
    assert "--keep-unanswered" in raised.value.hint
    assert "--max-prompt-tokens, which is 1" in raised.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "#### 1"}, "row 3: it has no column 'question', which others have"),
        ({"question": None, "answer": "#### 1"}, "row 3, column question: the prompt is None"),
        ({"question": " ", "answer": "#### 1"}, "row 3, column question: the prompt is empty"),
        ({"question": "\ud83d", "answer": "#### 1"}, r"row 3, column question: .* half a character, \\ud83d"),
        ({"question": "why", "answer": "#### \ud83d"}, "row 3, column answer: .* half a character"),
        (
            {"question": "why", "answer": "#### 1", "x": [{"\ud83d": 1}]},
            "row 3, column 'x' holds half a char",
        ),
        ({"question": "why", "answer": "#### 1", "\ud83d": 1}, r"row 3, column '\\ud83d' holds half a char"),
        ({"question": "why", "answer": "#### 1", "x": 1e999}, "row 3, column 'x' holds an infinite number"),
        ({"question": "why", "answer": "#### 1", "x": "y" * 70000}, "row 3: .* the largest is x .*--drop x"),
        ({"question": "why", "answer": "#### 1", "max_new_tokens": -1}, "row 3: max_new_tokens is -1"),
    ],
)
def test_a_row_that_will_not_do_is_named_and_nothing_is_left(tmp_path, model, row, sentence):
    rows = write_lines(tmp_path / "rows.jsonl", [*gsm8k_rows()[:2], row])
    with pytest.raises(ConfigError, match=sentence):
        prepare(rows, tmp_path / "out", model)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_existing_folder_is_not_written_over(folder, model, source):
    with pytest.raises(ConfigError, match="exists already"):
        prepare(source, folder, model)


@pytest.mark.parametrize("false", ["false", "False"])
def test_the_verb_writes_and_shows_and_finds_damage(tmp_path, model, source, false):
    out = tmp_path / "out"
    command = ["data", "prepare", str(source), str(out), "--tokenizer", str(model), "--json"]
    run = CliRunner().invoke(main, [*command, "--template", "enable_thinking"])
    assert (run.exit_code, "is not KEY=VALUE" in run.stderr) == (2, True)
    options = ["--template", f"enable_thinking={false}", "--template", "eos_token=2026-01-31"]
    run = CliRunner().invoke(main, [*command, *options])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"] == 40
    assert json.loads(run.stdout)["recipe"]["template"] == {
        "enable_thinking": False,
        "eos_token": "2026-01-31",
    }
    shown = CliRunner().invoke(main, ["data", "show", str(out), "--rows", "1", "--verify"])
    assert shown.exit_code == 0, shown.output
    assert "40 prompts of 40 rows, 40 distinct" in shown.stdout
    assert "What is 0 plus 0?" in shown.stdout
    data = data_of(out, shuffle=False)
    assert data.prompt_text(data.prompt(0)).endswith("<think>\n\n</think>\n\n")
    tokens = out / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x01")
    broken = CliRunner().invoke(main, ["data", "show", str(out), "--verify"])
    assert broken.exit_code != 0
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="has changed since it was written"):
        data_of(out)


# -- drawing ----------------------------------------------------------------------------------------


@given(rows=st.integers(1, 60), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_epoch_draws_every_row_once(rows, seed, epoch):
    order = EpochOrder(rows, seed=seed)
    drawn = [order.row_at(index) for index in range(epoch * rows, (epoch + 1) * rows)]
    assert sorted(drawn) == list(range(rows))
    assert drawn == [
        EpochOrder(rows, seed=seed).row_at(index) for index in range(epoch * rows, (epoch + 1) * rows)
    ]


def test_epochs_and_seeds_differ():
    def drawn(seed, start):
        order = EpochOrder(40, seed=seed)
        return [order.row_at(index) for index in range(start, start + 40)]

    assert len({tuple(drawn(seed, start)) for seed in (0, 1) for start in (0, 40)}) == 4


def test_a_prompt_depends_on_its_index_alone(folder):
    one, other = data_of(folder, seed=3), data_of(folder, seed=3)
    first = [one.prompt(index) for index in range(100)]
    for index in (99, 40, 0, 73):
        assert other.prompt(index).meta == first[index].meta
        assert np.array_equal(other.prompt(index).prompt_ids, first[index].prompt_ids)
    assert {group.meta["row"] for group in first[:40]} == set(range(40))


def test_what_is_held_out_is_never_drawn(folder, tmp_path, model, source):
    data = data_of(folder, held_out_every=4)
    held = {group.meta["row"] for group in data.held_out(6)}
    assert not held & {data.prompt(index).meta["row"] for index in range(120)}
    assert [group.id for group in data.held_out(3)] == [-1, -2, -3]
    aside = tmp_path / "aside"
    prepare(source, aside, model, PromptRecipe(suffix=" Think.", limit=10))
    data = data_of(folder, held_out=str(aside))
    assert [group.meta["row"] for group in data.held_out(10)] == list(range(10))
    assert {data.prompt(index).meta["row"] for index in range(90)} == set(range(10, 40))
    assert data.never_trained == (
        f"10 of the 40 rows of {folder} are never trained: their prompts are held out, too, in {aside}"
    )
    for asked_for in ({}, {"held_out_every": 4}):
        assert data_of(folder, **asked_for).never_trained == "", "what is asked for is no surprise"
    assert (data.held_out_at_most(256), data.held_out_at_most(4)) == (10, 4)
    with pytest.raises(ConfigError, match="10 prompts are held out, fewer than the 11"):
        data.held_out(11)


def test_several_sets_are_held_out_by_name_and_a_short_one_is_taken_whole(folder, tmp_path, model, source):
    for name, limit in (("few", 3), ("many", 10)):
        prepare(source, tmp_path / name, model, PromptRecipe(suffix=" Think.", limit=limit))
    data = data_of(folder, held_out={"many": str(tmp_path / "many"), "few": str(tmp_path / "few")})
    sets = data.held_out_sets(5)
    assert {name: [group.meta["row"] for group in groups] for name, groups in sets.items()} == {
        "many": [0, 1, 2, 3, 4],
        "few": [0, 1, 2],
    }
    assert {data.prompt(index).meta["row"] for index in range(90)} == set(range(10, 40))
    assert data.held_out_at_most(256) == 256, "each set is cut by itself"
    assert data.identity.count(" and ") == 1
    plain = data_of(folder, held_out=str(tmp_path / "few"))
    assert list(plain.held_out_sets(3)) == ["held_out"]
    with pytest.raises(ConfigError, match="3 prompts are held out, fewer than the 4"):
        plain.held_out_sets(4)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"pathh": "x"}, "did you mean 'path'"),
        ({"path": 3}, "path: 3 should be a valid string"),
        ({}, "path: is missing"),
        ({"path": "/nowhere/at/all"}, "no prepared data set"),
        ({"path": "x", "held_out_every": 1}, "at least 2"),
        ({"path": "x", "held_out": "y", "held_out_every": 2}, "both given"),
    ],
)
def test_a_wrong_section_is_named(section, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PreparedData({"data": section})


def test_the_largest_token_is_that_of_all_prompts(folder, tmp_path, model):
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "<|im_end|>\xff", "answer": "#### 1"}])
    aside = tmp_path / "aside"
    prepare(rows, aside, model, PromptRecipe(chat=False))
    drawn = max(int(data_of(folder).prompt(index).prompt_ids.max()) for index in range(40))
    assert data_of(folder).largest_token == drawn
    both = data_of(folder, held_out=str(aside))
    assert both.largest_token == max(drawn, int(both.held_out(1)[0].prompt_ids.max()))


def test_another_data_set_than_the_job_s_is_refused(folder):
    with pytest.raises(ConfigError, match="another data set"):
        data_of(folder, digest="0" * 32)


def test_help_and_prompts_import_neither_torch_nor_a_tokenizer():
    heavy = "{'torch', 'tokenizers', 'jinja2', 'pyarrow', 'transformers'}"
    code = f"import sys, gyre.api.cli, gyre.data.prepared; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_shown_prompt_has_its_special_tokens(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [{"question": "How many?", "answer": "#### 3"}])
    prepare(source, tmp_path / "data", tokenizer, PromptRecipe())
    shown = CliRunner().invoke(main, ["data", "show", str(tmp_path / "data"), "--rows", "1"])
    assert "<|im_start|>user" in shown.output
    assert "<|im_end|>" in shown.output


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [{"prompt": "How many?", "answer": "3"}])
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "data"
    command = ["data", "prepare", str(source), str(out), "--tokenizer", str(tokenizer)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-2:] == [
        f"error: {out} cannot be written: Not a directory.",
        "       Give another folder.",
    ]
