"""What `gyre plan` says of a job's reward function, and `gyre reward`, which tries one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gyre.api.checks import rewards
from gyre.api.cli import main
from gyre.config import parse_job
from gyre.data.prepare import PromptRecipe, prepare
from gyre.errors import ConfigError
from gyre.graph import compile_job
from tests.data.small import write_lines, write_tokenizer
from tests.test_docs import FILES

FUNCTIONS = """
import functools; functools.no_such_name_of_anything  # so that it shows if it is run
def score(prompt, completion, meta): return 1.0
def wrong(a, b): return 1.0
def needs(completions, solution, **columns): return [1.0]
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"What is ${n}+{n}$?", "answer": str(2 * n)} for n in range(6)]
    prepare(
        write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "data", write_tokenizer(tmp_path / "tokenizer")
    )
    (tmp_path / "rew.py").write_text(FUNCTIONS)
    return str(tmp_path / "data")


def checked(
    data: str, reward: dict[str, Any], *, here: bool = True, entrypoint: str = "PythonReward", **spec: Any
) -> list[str]:
    roles = {"actor": {}, "rollout": {}, "reward": {"entrypoint": f"gyre.workloads.rewards:{entrypoint}"}}
    shape = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16}
    config = {"data": {"path": data}, "model": shape, "optim": {"lr": 1e-3}, "reward": reward}
    job = compile_job(parse_job({"recipe": "grpo", "roles": roles, "config": config, **spec})).spec
    return list(rewards.check(job, here=here))


def with_rows(data: str, metas: list[dict[str, Any]]) -> str:
    """The prepared folder again, with other columns beside the prompt."""
    shutil.rmtree(data)
    rows = [{"prompt": f"Question {n}", **meta} for n, meta in enumerate(metas)]
    recipe = PromptRecipe(keep_unanswered=any("answer" in meta for meta in metas))
    prepare(write_lines(Path("others.jsonl"), rows), Path(data), Path("tokenizer"), recipe)
    return data


def test_a_function_that_can_be_called_is_not_imported(data: str) -> None:
    assert checked(data, {"function": "rew.py:score"}) == []
    assert checked(data, {"function": "rew:score"}, python_path=[str(Path.cwd())]) == []


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("rew2.py:score", r"there is no file .*rew2\.py"),
        ("rew.py:scor", r"rew\.py has no 'scor'; did you mean 'score'\?"),
        ("rew.py:wrong", r"rew\.py:4: wrong\(a, b\) is no reward that can be called"),
        (
            "rew.py:needs",
            r"rew\.py:needs needs 'solution', and the rows in .* have no such column\. They have answer",
        ),
        ("no_such_module:f", r"cannot be loaded: No module named 'no_such_module'"),
        ("math_verfy", r"did you mean 'math_verify'"),
        ("", r"config\.reward\.function: is missing"),
    ],
)
def test_what_cannot_be_called_is_one_sentence(data: str, function: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        checked(data, {"function": function})


def test_a_file_that_may_be_elsewhere_is_a_note(data: str) -> None:
    (note,) = checked(data, {"function": "rew2.py:score"}, here=False)
    assert "there is no file" in note
    assert "The machines that run the job must have it." in note


def test_what_must_be_loaded_is_loaded_elsewhere_and_not_for_ever(data: str) -> None:
    Path("late.py").write_text(
        "import sys\nassert 'torch' not in sys.modules\nf = lambda p, c, m: 1.0\ng = lambda a: 1.0\n"
    )
    assert checked(data, {"function": "late.py:f"}) == []
    with pytest.raises(ConfigError, match=r"late\.py:4: <lambda>\(a\) is no reward"):
        checked(data, {"function": "late.py:g"})
    Path("hangs.py").write_text("import time\ntime.sleep(600)\nf = lambda p, c, m: 1.0\n")
    began = time.monotonic()
    (note,) = checked(data, {"function": "hangs.py:f", "start_timeout_s": 0.5})
    assert "did not load within 0.5 s" in note
    assert time.monotonic() - began < 15
    Path("raises.py").write_text("import sys\nsys.exit(4)\nf = lambda p, c, m: 1.0\n")
    with pytest.raises(ConfigError, match=r"cannot be loaded: SystemExit: 4 .*raises\.py, line 2"):
        checked(data, {"function": "raises.py:f"})


@pytest.mark.parametrize("metas", [[{"level": 1}] * 2, [{"answer": "1"}, {}, {"answer": "2"}, {}]])
def test_rows_without_an_answer_are_refused_where_answers_are_compared(
    data: str, metas: list[dict[str, Any]]
) -> None:
    with_rows(data, metas)
    for entrypoint, function in (
        ("ExactMatchReward", ""),
        ("PythonReward", "exact_match"),
        ("PythonReward", "math_verify"),
    ):
        with pytest.raises(ConfigError, match=rf"2 of the {len(metas)} rows .* have no answer"):
            checked(data, {"function": function}, entrypoint=entrypoint)
    assert checked(data, {"function": "rew.py:score"}) == []


def test_answers_that_cannot_be_read_are_a_note_and_mappings_a_mistake(data: str) -> None:
    pytest.importorskip("math_verify")
    with_rows(data, [{"answer": "1"}, {"answer": "\\boxed{}"}, {"answer": "\\$36"}, {"answer": ["1", "2"]}])
    (note,) = checked(data, {"function": "math_verify"})
    assert "cannot read 1 of 4 answers" in note
    with_rows(data, [{"answer": "1"}, {"answer": {"target": ["1"]}}])
    with pytest.raises(ConfigError, match="is a mapping"):
        checked(data, {"function": "math_verify"})


def test_the_columns_of_the_manifest_count(data: str) -> None:
    with_rows(data, [{"answer": "1", "solution": "1"}] * 3)
    assert checked(data, {"function": "rew.py:needs"}) == []


def test_plan_of_a_reward_imports_no_torch(data: str) -> None:
    Path("uses_torch.py").write_text("import torch\ndef f(solution_str, ground_truth): return 1.0\n")
    code = (
        "import sys; from gyre.workloads.rewards.signatures import look_at; import gyre.api.checks.rewards;"
        "assert look_at('uses_torch.py:f'); assert not {'torch', 'ray', 'uses_torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- gyre reward -------------------------------------------------------------------------------------


def tried(*words: str) -> Result:
    return CliRunner().invoke(main, ["reward", *words], catch_exceptions=False)


def test_each_row_s_own_answer_is_tried_and_an_empty_one(data: str) -> None:
    pytest.importorskip("math_verify")
    found = tried("math_verify", data)
    assert found.exit_code == 0
    assert found.stdout.splitlines()[-1] == (
        "6 rows: mean 1.00 for the answer itself as \\boxed{…}, 0.00 for an empty completion; 0 failed"
    )
    assert found.stderr == ""
    one = tried("math_verify", data, "--answer", r"\boxed{4}", "--rows", "3", "--json")
    told = json.loads(one.stdout)
    assert [row["reward"] for row in told["rows"]] == [0.0, 0.0, 1.0]
    assert told["failed"] == 0


@pytest.mark.parametrize("source", ["data", "rows.jsonl"])
def test_the_form_that_earns_most_is_shown(data: str, source: str) -> None:
    Path("verl_reward.py").write_text(FILES["verl_reward.py"].text)
    found = tried("verl_reward.py:compute_score", source, "--rows", "2")
    assert "#### 2" in found.stdout
    head, *rows, _ = found.stdout.splitlines()
    assert head.split()[-1] == "acc"
    assert [row.split()[-1] for row in rows] == ["1", "1"]
    assert found.stdout.splitlines()[-1].startswith("2 rows: mean 1.00 for the answer itself as #### …, 0.00")


def test_rewards_that_do_not_differ_are_warned_of(data: str) -> None:
    Path("const.py").write_text("def f(p, c, m): return 0.5\ndef g(p, c, m): return float(m['answer'])\n")
    assert "warning: every reward is 0.5" in tried("const.py:f", data).stderr
    assert "own answer earns what an empty completion earns" in tried("const.py:g", data).stderr


def test_rows_on_which_the_function_fails_are_counted(data: str) -> None:
    Path("picky.py").write_text(
        "def f(completions, answer):\n    return [1.0 / float(one) for one in answer]\n"
    )
    found = tried("picky.py:f", data, "--rows", "3")
    assert found.exit_code == 1
    assert found.stdout.splitlines()[-1].endswith("; 1 failed")
    assert "row 0: " in found.stderr
    assert "ZeroDivisionError" in found.stderr
    assert "picky.py, line 2" in found.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("rew2.py:f", "data"), "there is no file"),
        (("rew.py:wrong", "data"), "wrong(a, b) is no reward"),
        (("rew.py:score", "nowhere"), "does not exist"),
        (("rew.py:score", "tokenizer"), "is no prepared data set"),
    ],
)
def test_a_mistake_is_a_sentence_and_no_traceback(data: str, words: tuple[str, ...], sentence: str) -> None:
    found = tried(*words)
    assert found.exit_code == 2
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr


# -- what a function imports -------------------------------------------------------------------------


def test_an_import_that_cannot_be_found_is_refused_with_what_to_do(data: str) -> None:
    Path("tools.py").write_text("WORTH = 1.0\n")
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("")
    Path("pack/beside.py").write_text("WORTH = 1.0\n")
    body = "\ndef score(prompt, completion, meta): return WORTH\n"
    Path("pack/relative.py").write_text(f"from .beside import WORTH{body}")
    Path("pack/neighbour.py").write_text(f"from beside import WORTH{body}")
    Path("missing.py").write_text(f"import no_such_module_of_anybody{body}")
    Path("makes_its_path.py").write_text(
        f"import sys\nsys.path.insert(0, 'pack')\nfrom beside import WORTH{body}"
    )
    here = str(Path.cwd())
    for file, sentence, hint in (
        ("pack/relative.py", "no known parent package", f"pack.relative:score, with python_path: [{here}]"),
        ("pack/neighbour.py", "No module named 'beside'", f"python_path: [{here}/pack]"),
        ("missing.py", "No module named 'no_such_module_of_anybody'", ""),
    ):
        with pytest.raises(ConfigError, match=sentence) as caught:
            checked(data, {"function": f"{file}:score"})
        assert hint in caught.value.hint
    assert checked(data, {"function": "makes_its_path.py:score"}) == []
    assert checked(data, {"function": "pack.relative:score"}, python_path=[here]) == []
    (note,) = checked(data, {"function": "missing.py:score"}, here=False)
    assert note.endswith("The machines that run the job must have it.")


# -- answers that gyre reward tries ------------------------------------------------------------------


def test_search_r1s_answers_are_tried_and_a_failing_form_is_shown(data: str) -> None:
    Path("em.py").write_text(
        "def score(solution_str, ground_truth):\n"
        "    if '<answer>' not in solution_str: return 0.0\n"
        "    return float(any(f'<answer>{one}</answer>' in solution_str for one in ground_truth['target']))\n"
    )
    for answer, exit_code, sentence in (
        ({"target": ["Paris", "Lutetia"]}, 0, "mean 1.00 for the answer itself as <answer>…</answer>"),
        (["Paris", "Lutetia"], 1, "TypeError: list indices must be integers"),
    ):
        write_lines(Path("rows.jsonl"), [{"question": "Where?", "answer": answer}] * 2)
        result = tried("em.py:score", "rows.jsonl")
        assert result.exit_code == exit_code, result.output
        assert sentence in result.output
        assert ("warning" in result.output) is False


def test_rows_without_answers_are_scored_for_an_empty_completion_alone(data: str) -> None:
    with_rows(data, [{"level": 1}, {"level": 2}])
    Path("plain.py").write_text("def score(prompt, completion, meta): return 1.0\n")
    found = tried("plain.py:score", data)
    assert found.stdout.splitlines()[-1] == "2 rows: mean 1.00 for an empty completion; 0 failed"
    assert "No row has an answer to try" in found.stderr
    assert "learns nothing" not in found.stderr


# -- several functions -------------------------------------------------------------------------------


def test_several_functions_are_tried_with_a_column_each(data: str) -> None:
    with_rows(data, [{"answer": "72"}])
    Path("short.py").write_text(
        "def short(completions, **kwargs): return [-float(len(c)) for c in completions]\n"
    )
    result = tried("exact_match", "short.py:short=0.5", data, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    (row,) = told["rows"]
    assert (row["reward"], row["empty"]) == (1 - 0.5 * 2, 0.0)
    assert row["more"] == {"exact_match": 1.0, "short": -2.0}
    assert (told["function"], told["form"]) == ("exact_match, short.py:short", "sample, trl")
    head = tried("exact_match", "short.py:short=0.5", data).stdout.splitlines()[0].split()
    assert head[-2:] == ["exact_match", "short"]


def test_each_of_several_functions_is_checked(data: str) -> None:
    with_rows(data, [{"answer": "72"}])
    Path("good.py").write_text("def good(prompt, completion, meta): return 1.0\n")
    Path("bad.py").write_text("def bad(a, b): return 1.0\n")
    functions = [{"function": "good.py:good"}, {"function": "bad.py:bad", "weight": 0.1}]
    with pytest.raises(ConfigError, match="bad"):
        checked(data, {"functions": functions})
    assert checked(data, {"functions": functions[:1]}) == []


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("bad.py:bad", r"functions\[1\]\.function: .*bad"),
        ("good.py:gud", r"functions\[1\]\.function: good\.py has no 'gud'"),
        ("gone.py:f", r"functions\[1\]\.function: there is no file"),
        ("broken.py:f", r"functions\[1\]\.function: .* is no Python"),
        ("good.py:needs", r"functions\[1\]\.function: .* needs 'solution'"),
        ("raises.py:f", r"functions\[1\]\.function: "),
        ("nothing", r"functions\[1\]\.function: 'nothing' is no reward function"),
    ],
)
def test_a_refusal_names_the_key_that_the_user_wrote(data: str, function: str, sentence: str) -> None:
    with_rows(data, [{"answer": "72"}])
    Path("good.py").write_text(
        "def good(prompt, completion, meta): return 1.0\ndef needs(completions, solution): return [1.0]\n"
    )
    Path("bad.py").write_text("def bad(a, b): return 1.0\n")
    Path("broken.py").write_text("def f(:\n")
    Path("raises.py").write_text("from no_such_module_of_anybody import f\n")
    with pytest.raises(ConfigError, match=rf"^config\.reward\.{sentence}") as several:
        checked(data, {"functions": [{"function": "good.py:good"}, {"function": function}]})
    assert "config.reward.signature" not in several.value.hint
    with pytest.raises(ConfigError, match=r"^config\.reward\.function: ") as alone:
        checked(data, {"function": function})
    wanted = alone.value.hint.replace("config.reward.signature", "config.reward.functions[1].signature")
    assert several.value.hint == wanted
