"""The table of kinds that were tried: whole, and what is said of a folder and in the documents is what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from gyre.api.checks import tiny_trial
from gyre.api.cli.models import models
from gyre.engines.embedded.model_choice import served_model
from gyre.graph.backends import back_ends
from gyre.models import tried
from gyre.models.architecture import FAMILIES
from gyre.models.errors import ModelFolderError
from gyre.models.support import describe
from gyre.models.transformers_models import causal_types
from gyre.rollouts.engines import engines

BACK_ENDS, ENGINES = back_ends(), engines()
BY_TRANSFORMERS = [who.name for who in (*BACK_ENDS, *ENGINES) if who.by_transformers]
ROOT = Path(__file__).parents[2]


def folder_of(path: Path, kind: str, **keys: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": kind} | keys))
    save_file({"lm_head.weight": torch.zeros(1)}, path / "model.safetensors")
    return path


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another transformers than that which the table was made with."""
    monkeypatch.setattr(tried, "is_of_installed", lambda: False)


def test_every_kind_of_the_installed_transformers_was_tried() -> None:
    assert tried.table()["transformers"] == version("transformers"), "make models"
    assert set(tried.table()["kinds"]) == causal_types()


def test_whoever_does_not_take_a_kind_says_why() -> None:
    for kind in tried.table()["kinds"]:
        for who in BY_TRANSFORMERS:
            found = tried.tried(kind, who)
            assert found.how if found.takes else found.reason, kind


def test_what_is_taken_differs_from_transformers_by_what_float32_rounds() -> None:
    for kind in tried.taken("fsdp"):
        row = tried.table()["kinds"][kind]["fsdp"]
        assert max(row[what] for what in ("packed", "alone", "export")) < 2e-3, kind
        assert row["gradient"] < 1e-3, kind
    for kind in tried.taken("embedded"):
        assert tried.table()["kinds"][kind]["embedded"]["log-probs"] < 2e-3, kind


def test_the_page_says_who_computes_a_prompt_once_and_who_packs_without_it() -> None:
    rows = {kind: tried.table()["kinds"][kind]["fsdp"] for kind in tried.taken("fsdp")}
    once = [kind for kind, row in rows.items() if row["once"]]
    assert all(rows[kind]["way"] == "segments" for kind in once)
    *others, last = [
        f"`{kind}`" for kind, row in rows.items() if row["way"] == "segments" and not row["once"]
    ]
    said = " ".join((ROOT / "docs/models.md").read_text().split())
    assert f"Of {len(once)} kinds that are `packed`" in said
    assert f"{', '.join(others)} and {last} do not bear that" in said


def test_plain_torchs_and_megatrons_kinds_were_tried_too() -> None:
    for kind in FAMILIES:
        row = tried.table()["kinds"][kind]
        assert row["torch"]["takes"], kind
        assert row["megatron"]["takes"], kind


def test_the_page_says_how_many_could_not_be_tried() -> None:
    left = sum(not row["made"] for row in tried.table()["kinds"].values())
    assert f"Of {left} kinds transformers' defaults are not" in (ROOT / "docs/models.md").read_text()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("README.md", "{fsdp} of the {kinds} kinds of causal model of transformers {version}"),
        ("README.md", "serves {embedded} kinds of transformers"),
        ("docs/fsdp.md", "trains [{fsdp} kinds of causal model]"),
        ("docs/from-verl.md", "[{fsdp} kinds of causal model of transformers]"),
        ("docs/rollouts.md", "serves {embedded} kinds of causal model of transformers"),
        (
            "docs/models.md",
            "transformers {version}, `fsdp` trains {fsdp} and the embedded engine serves {embedded}",
        ),
        ("CHANGELOG.md", "of the {kinds} causal kinds of transformers {version}, `fsdp` trains {fsdp} and"),
    ],
)
def test_the_documents_say_how_many(page: str, text: str) -> None:
    counts = {who: len(tried.taken(who)) for who in BY_TRANSFORMERS}
    told = text.format(kinds=len(tried.table()["kinds"]), version=tried.table()["transformers"], **counts)
    assert told in (ROOT / page).read_text()


def test_nothing_says_any_model() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("gyre/**/*.py"),
        *ROOT.glob("examples/*.yaml"),
    ]
    assert [page.name for page in pages if re.search(r"\bany causal", page.read_text(), re.IGNORECASE)] == []


def test_the_page_says_which_compute_in_float32_alone() -> None:
    kinds = tried.table()["kinds"]
    page = (ROOT / "docs/models.md").read_text()
    alone = [kind for kind in sorted(kinds, reverse=True) if kinds[kind]["fsdp"].get("bfloat16") is False]
    assert f"{' and '.join(map('`{}`'.format, alone))} compute in float32 alone" in page


def test_the_page_has_the_table() -> None:
    assert tried.markdown_table(BY_TRANSFORMERS) in (ROOT / "docs/models.md").read_text(), (
        "gyre.models.tried.markdown_table()"
    )


@pytest.mark.parametrize("who", BY_TRANSFORMERS)
def test_a_kind_that_was_wrong_is_refused_with_the_reason(who: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "xlnet")
    assert "looks ahead" in describe(folder, BACK_ENDS, ENGINES).refused[who]
    assert (
        tiny_trial.problem_with(folder, {"model_type": "xlnet"}, who)
        == describe(folder, BACK_ENDS, ENGINES).refused[who]
    )


def test_each_is_asked_by_itself(tmp_path: Path) -> None:
    told = describe(folder_of(tmp_path / "m", "rwkv"), BACK_ENDS, ENGINES).as_dict()
    assert told["trains"]["fsdp"]["takes"] is True
    assert "with its cache" in told["serves"]["embedded"]["reason"]


def test_a_kind_that_is_causal_by_a_key_alone_is_refused_without_it(tmp_path: Path) -> None:
    refused = describe(folder_of(tmp_path / "a", "bert"), BACK_ENDS, ENGINES).refused
    assert "is_decoder is true alone" in refused["fsdp"]
    assert (
        "fsdp" not in describe(folder_of(tmp_path / "b", "bert", is_decoder=True), BACK_ENDS, ENGINES).refused
    )


def test_the_engine_refuses_by_the_table(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="looks ahead"):
        served_model(folder_of(tmp_path / "m", "xlnet"))


def test_with_another_transformers_nothing_in_the_table_is_believed(unknown: None, tmp_path: Path) -> None:
    assert not tried.knows("mistral")
    assert tried.problem_with({"model_type": "xlnet"}, "fsdp") == ""


@pytest.mark.landing
@pytest.mark.parametrize("who", BY_TRANSFORMERS)
def test_a_kind_that_the_table_does_not_know_is_tried(unknown: None, who: str, tmp_path: Path) -> None:
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}
    assert (
        tiny_trial.problem_with(folder_of(tmp_path / "a", "mistral", **large), {"model_type": "mistral"}, who)
        == ""
    )
    wrong = {"fsdp": ("xlnet", "looks ahead"), "embedded": ("rwkv", "with its cache")}
    kind, said = wrong[who]
    assert said in tiny_trial.problem_with(folder_of(tmp_path / "b", kind), {"model_type": kind}, who)


@pytest.mark.landing
def test_the_verb_says_what_the_trial_says(unknown: None, tmp_path: Path) -> None:
    shown = CliRunner().invoke(models, [str(folder_of(tmp_path / "m", "xlnet"))]).output
    assert re.search(r"fsdp: no: .*looks ahead", shown)


def test_a_trial_that_dies_is_a_reason(
    unknown: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny_trial.sys, "executable", "/bin/false")
    said = tiny_trial.problem_with(tmp_path, {"model_type": "mistral"}, "fsdp")
    assert said == "a tiny model of its kind could not be tried: exit status 1"


@pytest.mark.slow
def test_a_row_of_the_table_is_what_comes_of_trying_it_again(tmp_path: Path) -> None:
    kinds = ["gpt2", "modernbert-decoder", "phimoe", "rwkv", "xlnet"]
    out = tmp_path / "tried.json"
    command = [sys.executable, "-m", "tools.models_table", "--out", str(out), *kinds]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    for kind, row in json.loads(out.read_text())["kinds"].items():
        for who in BY_TRANSFORMERS:
            found = tried.tried(kind, who)
            assert row[who]["takes"] == found.takes, kind
            assert (row[who].get("way") or row[who].get("how", "")) == found.how, kind
