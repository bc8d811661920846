"""A job of each ending in a real browser: what the page says of it, by the store's own rows, and again in the terminal.

The facts are counted here with SQL and from the job's files; nothing of the product folds them.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import Reader, RecordedHome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ENDINGS = {
    "finished": "Succeeded after",
    "stopped": "Stopped by Ctrl-C after",
    "failed": "Failed after",
    "killed": "Failed after",
    "cluster": "Failed after",
}
"""A recorded job, named after its ending, and how the page's sentence begins."""

WHY = {
    "failed": "reward.py:13: the reward function 'reward.py:has_a_bug' failed on a sample: it raised KeyError",
    "killed": "is gone, and its master with it.",
    "cluster": "is gone.",
}
"""What else the sentence says."""


@dataclass(frozen=True)
class Facts:
    """Of one job, as its store's rows and files have them."""

    asked: int
    steps: int
    rewards: tuple[float, float]
    tokens: int
    drawn: int
    trained: int
    raised: int
    seconds: int


def facts_of(home: Path, name: str) -> Facts:
    with sqlite3.connect(home / "gyre.db") as rows:
        job, spec, ended = rows.execute(
            "SELECT job_id, spec, ended_at FROM gyre_jobs WHERE name = ?", (name,)
        ).fetchone()

        def one(query: str) -> Any:
            return rows.execute(query, (job,)).fetchone()[0]

        (file,) = home.glob(f"jobs/{job}/metrics.jsonl")
        made = [json.loads(line) for line in file.read_text().splitlines()]
        events = rows.execute("SELECT kind, at FROM gyre_events WHERE job_id = ? ORDER BY seq", (job,))
        kinds = list(events)
        last = max(*(at for _, at in kinds), *(step["at"] for step in made))  # of a job that nobody saw die
        return Facts(
            asked=json.loads(spec)["run"]["steps"],
            steps=one("SELECT max(step) FROM gyre_ledger_steps WHERE job_id = ?"),
            rewards=(made[0]["reward_mean"], made[-1]["reward_mean"]),
            tokens=sum(step["tokens"] for step in made),
            drawn=one("SELECT count(*) FROM gyre_ledger_groups WHERE job_id = ?"),
            trained=one("SELECT count(*) FROM gyre_ledger_groups WHERE job_id = ? AND status = 'trained'"),
            raised=sum(kind == "OperatorFailed" for kind, _ in kinds),
            seconds=round((ended or last) - next(at for kind, at in kinds if kind == "JobSubmitted")),
        )


@pytest.fixture
def reader(browser: Any, recorded: RecordedHome) -> Iterator[Reader]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    yield Reader(context.new_page(), recorded.url)
    context.close()


def shown_of(recorded: RecordedHome, name: str) -> str:
    """What `gyre show` prints of it."""
    command = [sys.executable, "-m", "gyre.api.cli", "show", name]
    environment = {"GYRE_HOME": str(recorded.home), "PATH": "", "COLUMNS": "400"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ENDINGS)
def test_an_ended_job_is_told_by_its_rows(reader: Reader, recorded: RecordedHome, name: str) -> None:
    facts = facts_of(recorded.home, name)
    page = reader.open(f"jobs/{name}/now")
    sentence = page.locator("main .sentence").first.inner_text()
    told = page.locator("main").inner_text()
    shown = shown_of(recorded, name)

    assert sentence.startswith(ENDINGS[name])
    assert WHY.get(name, "") in sentence
    assert sentence[-1] in ".…"
    of = "" if facts.steps == facts.asked else f" of {facts.asked}"
    assert f": {facts.steps}{of} steps, " in sentence
    assert f"{facts.steps}{of} steps" in shown
    assert seconds_in(sentence) == pytest.approx(facts.seconds, abs=1)
    first, last = (f"{value:.2g}" for value in facts.rewards)
    assert f"reward {first} → {last}" in sentence
    assert f"reward {first} -> {last}" in shown
    assert f"{tokens_text(facts.tokens)} tokens" in sentence

    assert ("raised" in told) == bool(facts.raised)
    if facts.raised:
        assert f"the job's own code raised {facts.raised} times" in told
    whole = "None: the job failed as a whole" in told
    assert whole == (name in ("killed", "cluster"))
    assert "None so far." in told or whole or facts.raised
    assert ("gyre resume " in sentence) == ("to go on" in shown) == whole
    for never in ("recovered", "ETA", "Trains at", "waits for samples"):
        assert never not in told, never
    assert "waited" in told, "what it was slow by is kept"

    account = f"{facts.drawn} drawn = {facts.trained} trained + {facts.drawn - facts.trained} in flight"
    assert account in shown
    page = reader.open(f"jobs/{name}/account")
    reader.settle()
    assert balanced(shown), shown
    of_page = re.sub(r"[\s,]+", " ", page.locator("main").inner_text().replace(",", ""))
    for number in {facts.drawn, facts.trained}:
        assert f"{number}" in of_page
    assert reader.errors == []


def test_the_list_says_the_same(reader: Reader, recorded: RecordedHome) -> None:
    page = reader.open("jobs?all=1")
    for name in ENDINGS:
        facts = facts_of(recorded.home, name)
        row = page.locator("main tr", has=page.get_by_role("link", name=name, exact=True)).inner_text()
        assert f"{facts.steps} of {facts.asked}" in row
        assert seconds_in(row) == pytest.approx(facts.seconds, abs=1)


def seconds_in(text: str) -> float:
    """The first `9.5 s`, `24 s` or `1 min 24 s` of a text."""
    found = re.search(r"(?:(\d+)\smin\s)?([\d.]+)\ss\b", text)
    assert found, text
    return 60 * int(found[1] or 0) + float(found[2])


def tokens_text(count: int) -> str:
    return f"{count / 1e3:.1f} k" if count >= 9_950 else str(count)


def balanced(shown: str) -> bool:
    """Whether both sums of the account are sums."""
    for found in re.finditer(r"([\d,]+) (?:drawn|generated) = ((?:[\d,]+ [a-z ]+ ?\+? ?)+)", shown):
        whole, parts = found.groups()
        count = sum(int(one.replace(",", "")) for one in re.findall(r"[\d,]*\d", parts))
        if int(whole.replace(",", "")) != count:
            return False
    return shown.count(" drawn = ") == shown.count(" generated = ") == 1
