"""What goes with a prompt to the reward: every column that is not the prompt, by its name, with its structure."""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from gyre.data.columns import Columns
from gyre.data.folder import PreparedFolder
from gyre.data.prepare import PromptRecipe, prepare
from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from tests.data.small import write_lines, write_tokenizer

ASKED = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prepared(tmp_path, model):
    """Prepares rows, and returns the manifest and what the reward is given of each."""

    def of(rows, **how):
        source, out = tmp_path / "rows.jsonl", tmp_path / "out"
        if isinstance(rows, list):
            write_lines(source, rows)
        else:
            source = tmp_path / "rows.parquet"
            pyarrow.parquet.write_table(rows, source)
        manifest = prepare(source, out, model, PromptRecipe(**how))
        folder = PreparedFolder(out)
        metas = [folder.meta(row) for row in range(folder.rows)]
        for meta in metas:  # it travels with its group
            group = Group(0, folder.prompt_ids(0), meta)
            assert unpack_groups(pack_groups([group]))[0].meta == meta
        return manifest, metas

    return of


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASKED,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 7, "tags": ["a", None], "score": 0.5},
    "ok": True,
}


def test_agents_are_given_the_prompt_where_it_is_kept(prepared):
    manifest, (meta,) = prepared([{"prompt": ASKED, "answer": "1"}], keep_prompt=True)
    assert meta == {"prompt": ASKED, "answer": "1"}
    assert "prompt" in manifest["columns"]


def test_every_column_but_the_prompt_reaches_the_reward(prepared):
    manifest, (meta,) = prepared([VERL])
    assert meta == {key: value for key, value in VERL.items() if key != "prompt"} | {"answer": "72"}
    assert manifest["columns"] == sorted(meta)
    assert manifest["layout"] == {"name": "verl", "prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert (manifest["without_answer"], manifest["answers_by_type"]) == (0, {"text": 1})


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"keep": ("ability",)}, {"ability", "answer"}),
        ({"drop": ("extra_info", "ok")}, {"data_source", "ability", "reward_model", "answer"}),
        ({"keep": ("ability",), "rename": {"ability": "kind"}}, {"kind", "answer"}),
    ],
)
def test_columns_are_kept_dropped_and_renamed(prepared, how, names):
    assert prepared([VERL], **how)[1][0].keys() == names


def test_what_parquet_has_beyond_json_becomes_what_json_can_hold(prepared):
    table = pyarrow.table(
        {
            "prompt": ["a", "b", "c"],
            "answer": pyarrow.array([72.0, float("nan"), 5.0]),
            "max_new_tokens": pyarrow.array([16.0, 8.0, float("nan")]),
            "day": pyarrow.array([datetime.date(2026, 1, 31)] * 3),
            "price": pyarrow.array([Decimal("18.90")] * 3),
            "took": pyarrow.array([datetime.timedelta(seconds=90)] * 3, type=pyarrow.duration("ms")),
            "level": pyarrow.array([1.0, 2.0, float("nan")]),
        }
    )
    manifest, metas = prepared(table)
    common = {"day": "2026-01-31", "price": "18.90", "took": 90.0}
    assert metas == [
        {"answer": "72", "max_new_tokens": 16, "level": 1.0, **common},
        {"answer": "5", "level": None, **common},
    ]
    assert manifest["left_out"] == {"without an answer": 1}


def test_values_without_a_place_in_json():
    columns = Columns(["u", "n", "m"], prompt=(), answer="")
    told = uuid.UUID(int=1)
    assert columns.meta({"u": told, "n": 2**70, "m": {1: (2,)}}, None, None) == {
        "u": str(told),
        "n": str(2**70),
        "m": {"1": [2]},
    }
    with pytest.raises(ConfigError, match=r"column 'u' holds bytes, which .*--drop 'u'"):
        columns.meta({"u": b"x"}, None, None)


@pytest.mark.parametrize("answer", [None, "", float("nan")])
def test_rows_without_an_answer_are_counted(prepared, answer):
    rows = [{"prompt": "a", "answer": answer}, {"prompt": "b"}, {"prompt": "c", "answer": "1"}]
    manifest, metas = prepared(rows)
    assert (metas, manifest["left_out"]) == ([{"answer": "1"}], {"without an answer": 2})


def test_rows_without_an_answer_are_kept_where_that_is_asked(prepared):
    manifest, metas = prepared(
        [{"prompt": "a", "answer": None}, {"prompt": "c", "answer": "1"}], keep_unanswered=True
    )
    assert (metas, manifest["without_answer"], manifest["left_out"]) == ([{}, {"answer": "1"}], 1, {})


def test_a_data_set_without_answers_is_kept(prepared):
    rows = [{"prompt": "a", "chosen": [{"role": "assistant", "content": "x"}], "score_chosen": 8.0}]
    manifest, metas = prepared(rows)
    assert metas == [{"chosen": rows[0]["chosen"], "score_chosen": 8.0}]
    assert manifest["without_answer"] == 1
    assert manifest["layout"]["answer"] == ""


def test_a_last_turn_of_the_assistant_is_the_reference(prepared):
    rows = [{"messages": [*ASKED, {"role": "assistant", "content": "a"}], "source": "s"}]
    manifest, metas = prepared(rows)
    assert metas == [{"source": "s", "reference": "a"}]
    assert manifest["ended_with_an_answer"] == 1


@pytest.mark.parametrize(
    ("columns", "how", "sentence"),
    [
        (
            ["epoch"],
            {},
            "column 'epoch': a reward is given the epoch's number as 'epoch'.*--rename epoch=NAME",
        ),
        (["row"], {}, "column 'row': a reward is given"),
        (["finish_reason"], {}, "column 'finish_reason': a reward is given how a sample ended"),
        (["final"], {"answer": "final"}, "column 'answer': a reward is given the answer as 'answer'"),
        (["a"], {"rename": {"a": "row"}}, "column 'a': a reward is given the row's number as 'row'"),
        (["a", "b"], {"rename": {"a": "b"}}, "--rename: (a and b|b and a) would both be 'b'"),
        (["a"], {"drop": ("aa",)}, "--drop: there is no column 'aa'; (did you mean 'a'|known)"),
        (["index"], {"keep": ("indx",)}, "--keep: there is no column 'indx'; did you mean 'index'"),
        (["a"], {"keep": ("a",), "drop": ("a",)}, "--keep and --drop are both given"),
        (["a"], {"drop": ("prompt",)}, "--drop: prompt is the prompt"),
        (["a"], {"drop": ("answer",)}, "--drop: answer is the answer's column"),
        (["a", "b"], {"keep": ("a",), "rename": {"b": "c"}}, "--rename: the column b is not kept"),
        (["reference"], {}, "column reference: the conversation ends with the assistant's turn.*--rename"),
    ],
)
def test_names_that_will_not_do(prepared, columns, how, sentence):
    row = {
        "prompt": [*ASKED, {"role": "assistant", "content": "x"}],
        "answer": "1",
        **dict.fromkeys(columns, "x"),
    }
    with pytest.raises(ConfigError, match=sentence):
        prepared([row], **how)


def test_a_name_that_only_a_later_row_has_is_refused_there(prepared):
    with pytest.raises(ConfigError, match="row 1100, column 'row': a reward is given"):
        prepared([{"prompt": "a"}] * 1099 + [{"prompt": "a", "row": 1}])


def test_a_row_that_is_too_large_says_which_columns_to_drop(prepared):
    row = {"prompt": "q", "generations": ["x" * 900], "messages": "y" * 400, "id": 1}
    with pytest.raises(
        ConfigError, match=r"row 1: its columns have 13\d\d bytes, .* the largest is generations"
    ) as raised:
        prepared([row], max_meta_bytes=200)
    assert raised.value.hint.endswith("--drop generations --drop messages.")
    _, (meta,) = prepared([row], max_meta_bytes=200, drop=("generations", "messages"))
    assert meta == {"id": 1}


def test_unsupported_rows_are_refused_or_counted(prepared):
    image = {"prompt": "<image>Find x.", "images": [{"path": "a.png"}]}
    rows = [{"prompt": "a"}, image, {"prompt": []}, {"prompt": None}]
    with pytest.raises(
        ConfigError, match=r"row 2, column images: the row has an image\. .*--skip-unsupported"
    ):
        prepared(rows)
    manifest, metas = prepared(rows, skip_unsupported=True)
    assert len(metas) == 1
    assert manifest["left_out"] == {"an image": 1, "no messages": 1, "no prompt": 1}
