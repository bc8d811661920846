"""What `gyre plan` says of a job's data set: its tokenizer, its lengths, its held-out prompts and its answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gyre.api.checks.data import check
from gyre.api.checks.findings import JobWarning, Note
from gyre.config import parse_job
from gyre.data.prepare import PromptRecipe, prepare
from gyre.errors import ConfigError
from gyre.graph import compile_job
from tests.data.small import write_lines, write_tokenizer

SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 96}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Any:
    """Prepares rows, by default eight short ones."""

    def of(rows: list[dict[str, Any]] | None = None, **how: Any) -> str:
        folder = tmp_path_factory.mktemp("data")
        rows = rows or [{"prompt": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(8)]
        prepare(write_lines(folder / "rows.jsonl", rows), folder / "data", tokenizer, PromptRecipe(**how))
        return str(folder / "data")

    return of


@pytest.fixture(scope="module")
def data(made: Any) -> str:
    return str(made())


def checked(config: dict[str, Any], *, here: bool = True, **keys: Any) -> list[str]:
    job = {
        "recipe": "grpo",
        "roles": {"actor": {}, "rollout": {}, "reward": keys.pop("reward", {})},
        "config": {"model": SHAPE, "optim": {"lr": 1e-3}, "sampling": {"max_new_tokens": 8}} | config,
        "run": {"evaluate_every": 0} | keys.pop("run", {}),
        **keys,
    }
    return list(check(compile_job(parse_job(job)).spec, here=here))


def test_a_data_set_in_order_needs_no_word(data: str) -> None:
    assert checked({"data": {"path": data}}) == []


def test_a_folder_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.data\.path: openai/gsm8k .*.*hf download --repo-type"):
        checked({"data": {"path": "openai/gsm8k"}})
    (note,) = checked({"data": {"path": "/no/data"}}, here=False)
    assert note.endswith("The machines that run the job must have it.")
    with pytest.raises(
        ConfigError, match=r"config\.data: .* is a tokenizer's folder, and no prepared data set"
    ):
        checked({"data": {"path": str(tokenizer)}})


def test_a_prompt_without_room_is_an_error_and_a_shorter_answer_a_note(made: Any) -> None:
    rows = [{"prompt": "word " * 12, "answer": "1"}, {"prompt": "a", "answer": "1"}]
    path = made(rows)
    longest = json.loads((Path(path) / "manifest.json").read_text())["prompt_tokens"]["longest"]

    def with_positions(count: int) -> list[str]:
        return checked({"data": {"path": path}, "model": {**SHAPE, "max_positions": count}})

    assert with_positions(longest + 8) == []
    (note,) = with_positions(longest + 1)
    assert "1 of 2 prompts" in note
    assert "max_new_tokens" in note
    with pytest.raises(
        ConfigError, match=r"row 0 .* no room .* config\.model\.max_positions .*--max-prompt-tokens"
    ):
        with_positions(longest)


def test_engines_that_read_less_than_a_prompt_and_its_answer(data: str) -> None:
    plane = {"rollouts": {"context_length": 30}, "node_num": 2}
    with pytest.raises(ConfigError, match=r"rollouts\.context_length of rollout \(30\)"):
        checked({"data": {"path": data}, "sampling": {"max_new_tokens": 20}}, **plane)


@pytest.mark.parametrize("section", [{}, {"held_out_every": 1000}])
def test_too_few_held_out_prompts(data: str, made: Any, section: dict[str, Any]) -> None:
    config = {"data": {"path": data, **section}}
    with pytest.raises(
        ConfigError, match=r"run\.held_out: 256 prompts .* every 5 steps, .*evaluate_every to 0"
    ):
        checked(config, run={"evaluate_every": 5})
    others = made([{"prompt": f"Add {n} to {n}.", "answer": str(2 * n)} for n in range(8)])
    assert (
        checked({"data": {"path": data, "held_out": others}}, run={"evaluate_every": 5, "held_out": 8}) == []
    )


def test_rows_that_are_never_trained_are_counted(made: Any) -> None:
    """Those that are held out by another folder with a warning, those of a share that was asked for with a note."""
    rows = [{"prompt": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20)]
    everything, some, run = made(rows), made(rows[:6]), {"evaluate_every": 5, "held_out": 2}
    (found,) = checked({"data": {"path": everything, "held_out": some}}, run=run)
    assert isinstance(found, JobWarning)
    assert found == (
        f"config.data: 6 of the 20 rows of {everything} are never trained: their prompts are held out, too, in {some}."
    )
    (found,) = checked({"data": {"path": everything, "held_out_every": 4}}, run=run)
    assert isinstance(found, Note)
    trained, held = map(int, re.findall(r"(\d+) of the 20 rows.* trained; (\d+) are held out", found)[0])
    assert trained + held == 20
    assert found.endswith("by held_out_every, 2 of which are evaluated (run.held_out).")


def test_a_data_set_that_is_its_own_held_out_set_leaves_nothing_to_train(data: str) -> None:
    for held_out in ({"held_out": data}, {"held_out": {"same": data}}):
        with pytest.raises(ConfigError, match=r"config\.data: every prompt of .* is held out") as caught:
            checked({"data": {"path": data, **held_out}})
        assert "held_out_every, 2 or more" in caught.value.hint


def test_a_column_that_no_held_out_prompt_has_is_no_path(made: Any) -> None:
    from gyre.api.checks.settings import check_settings

    rows = [{"prompt": f"What is {n}+{n}?", "answer": str(2 * n), "data_source": "sums"} for n in range(8)]
    data = {"path": made(rows), "held_out_every": 2}
    job = {
        "recipe": "grpo",
        "roles": {"actor": {}, "rollout": {}, "reward": {}},
        "config": {
            "model": SHAPE,
            "optim": {"lr": 1e-3},
            "sampling": {"max_new_tokens": 8},
            "data": data,
            "evaluation": {"by": "data_sorce"},
        },
        "run": {"held_out": 1},
    }
    with pytest.raises(ConfigError) as caught:
        check_settings(compile_job(parse_job(job)).spec, here=True)
    assert caught.value.message.endswith(
        "no held-out prompt has a column 'data_sorce'; did you mean 'data_source'?"
    )
    assert caught.value.hint == ""
