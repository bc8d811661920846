"""The built files, without a browser: nothing from elsewhere, nothing inline, names that Gyre has."""

from __future__ import annotations

import gzip
import re
from dataclasses import is_dataclass
from pathlib import Path

from gyre.failover import events
from gyre.workloads.trainer.learning.metric_names import METRICS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "gyre/api/page"
SOURCES = ROOT / "ui/src"
MOST_BYTES = 400_000
MOST_LINES = 300

FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())


def test_the_page_is_there_and_light_enough() -> None:
    assert (PAGE / "index.html").exists()
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in FILES) < MOST_BYTES


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = (PAGE / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!\./)""", html)
    styles = [path for path in FILES if path.suffix == ".css"]
    assert styles
    for path in styles:
        assert not re.findall(r"@import|url\((?![\"']?data:)", path.read_text()), path.name


def test_a_strict_policy_permits_the_page() -> None:
    """No inline script, style element, style attribute or handler; no text that becomes code."""
    html = (PAGE / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    scripts = [path for path in FILES if path.suffix == ".js"]
    assert scripts
    for path in scripts:
        text = path.read_text()
        assert "new Function(" not in text, path.name
        assert not re.search(r"(?<![\w.$])eval\(", text), path.name


def test_the_lock_names_no_registry() -> None:
    assert "resolved" not in (ROOT / "ui/package-lock.json").read_text()


def test_the_page_listens_to_every_kind_of_event() -> None:
    text = (SOURCES / "data/kinds.ts").read_text()
    known = re.findall(r'"(\w+)"', text)
    assert sorted(known) == sorted(
        name
        for name, one in vars(events).items()
        if is_dataclass(one) and isinstance(one, type) and issubclass(one, events.Event)
    )


def test_the_chosen_curves_are_metrics_of_a_step() -> None:
    text = (SOURCES / "views/curves/chosen.ts").read_text()
    names = set(re.findall(r'"([a-z]+(?:_[a-z]+)*)"', text.split("const NAMES = {")[1].split("};")[0]))
    names |= set(re.findall(r'spread: "(\w+)"', text))
    assert len(names) > 12
    assert names <= set(METRICS)


def test_no_source_is_longer_than_one_concept() -> None:
    """The types of REST's answers are one concept, however many."""
    sources = [path for path in SOURCES.rglob("*.*") if path.name != "rest.ts"]
    assert len(sources) > 20
    assert [path.name for path in sources if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_no_type_is_given_up() -> None:
    loose = re.compile(r":\s*any\b|\bas any\b|<any>|@ts-ignore")
    typed = list(SOURCES.rglob("*.ts*"))
    assert typed
    assert [path.name for path in typed if loose.search(path.read_text())] == []
