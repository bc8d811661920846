"""The tool that breaks the product: its table follows the product, and it tells noticed from unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import break_product
from tools.break_product import BEGIN, END, Finding, Outcome, UnbrokenFails, find, finding_of, read_report
from tools.breaks import BREAKS, Break, Stale, broken

ROOT = Path(__file__).parents[1]

PRODUCT = """
LIMIT = 10

def total(numbers):
    return sum(numbers)

def largest(numbers):
    return max(numbers, default=0)
"""
RIGHT = """
import pytest
from product.sums import LIMIT, total

@pytest.fixture
def below_the_limit():
    assert LIMIT == 10
    return 7

def test_the_total_is_of_all(below_the_limit):
    assert total([1, 2, 4]) == below_the_limit
"""


def fault(name: str, old: str, new: str) -> Break:
    return Break(name, "It does something else.", "product/sums.py", old, new, ("tests/test_sums.py",))


NOTICED = fault("noticed", "sum(numbers)", "sum(numbers[:-1])")
UNNOTICED = fault("unnoticed", "max(numbers, default=0)", "min(numbers, default=0)")
FIXTURE = fault("of a fixture", "LIMIT = 10", "LIMIT = 11")
NO_IMPORT = fault("no import", "LIMIT = 10", "LIMIT = TEN")
STALE = fault("stale", "numbers", "numerals")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "product").mkdir()
    (tmp_path / "product" / "__init__.py").touch()
    (tmp_path / "product" / "sums.py").write_text(PRODUCT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(RIGHT)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return tmp_path


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", BREAKS, ids=[one.name for one in BREAKS])
def test_each_break_can_be_made_in_the_product_of_today(one: Break) -> None:
    file = ROOT / one.file
    changed = broken(file.read_text(), one)
    compile(changed, one.file, "exec")
    assert changed != file.read_text()
    assert one.tests
    assert [path for path in one.tests if not (ROOT / path).exists()] == []


def test_a_break_has_a_name_of_its_own_and_says_in_a_sentence_what_it_does() -> None:
    assert len({one.name for one in BREAKS}) == len(BREAKS)
    assert len({(one.file, one.old, one.new) for one in BREAKS}) == len(BREAKS)
    assert [one.name for one in BREAKS if not one.promise.endswith(".") or "|" in one.promise] == []


def test_the_readme_has_each_break_and_somebody_notices_it() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    rows = [line for line in text.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("| ")]
    told = {name.strip(): promise.strip() for _, name, promise, *_ in (row.split("|") for row in rows[2:])}
    assert told == {one.name: one.promise for one in BREAKS}
    assert "**nobody**" not in text


def test_a_text_that_stands_twice_or_not_at_all_is_stale() -> None:
    one = fault("x", "a", "b")
    assert broken("cat", one) == "cbt"
    for text in ("dog", "data"):
        with pytest.raises(Stale, match=r"x: its old text stands [02] times in product/sums.py"):
            broken(text, one)


# -- what is noticed -------------------------------------------------------------------------------


def test_a_break_is_noticed_by_a_test_that_fails_and_by_nothing_else(tree: Path) -> None:
    before = (tree / "product" / "sums.py").read_text()
    found = {one.name: one for one in find([NOTICED, UNNOTICED, FIXTURE, NO_IMPORT, STALE], tree)}
    assert found["noticed"].noticed_by == ["tests/test_sums.py::test_the_total_is_of_all"]
    assert {name for name, one in found.items() if one.is_noticed} == {"noticed"}
    assert found["unnoticed"].problem == ""
    assert found["of a fixture"].problem.endswith("test_the_total_is_of_all could not begin")
    assert found["no import"].problem == (
        "product.sums cannot be imported: NameError: name 'TEN' is not defined"
    )
    assert found["stale"].problem.startswith("stale: stale: its old text stands 4 times")
    assert (tree / "product" / "sums.py").read_text() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RIGHT.replace("[1, 2, 4]", "[1, 2]"), "tests/test_sums.py::test_the_total_is_of_all"),
        ("import product.nothing\n", "test_sums"),
        ("", "no test ran"),
    ],
    ids=["a test fails", "not collected", "no test"],
)
def test_nothing_is_said_where_the_unbroken_tree_does_not_pass(tree: Path, text: str, said: str) -> None:
    (tree / "tests" / "test_sums.py").write_text(text)
    with pytest.raises(UnbrokenFails, match=said):
        list(find([NOTICED], tree))


def test_what_runs_elsewhere_than_in_the_copy_proves_nothing(tree: Path) -> None:
    outside = Break("outside", "It is not there.", "email/utils.py", "x", "y", ("tests/test_sums.py",))
    (tree / "email").mkdir()
    (tree / "email" / "utils.py").write_text("x = 1\n")  # without __init__.py Python's own comes first
    [found] = find([outside], tree)
    assert not found.is_noticed
    assert "and not from the copy" in found.problem


def test_a_test_that_ended_by_its_time_limit_has_not_noticed() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="tests.a.test_b.TestC" name="waits">
            <failure message="Failed: Timeout (&gt;60.0s) from pytest-timeout."/>
        </testcase>
        <testcase classname="tests.a.test_b" name="left_out"><skipped/></testcase>
        <testcase classname="tests.a.test_b" name="works"/>
        </testsuite></testsuites>"""
    tests = read_report(report)
    assert tests == Outcome(hung=("tests/a/test_b.py::TestC::waits",), passed=1)
    assert not tests.are_right
    found = finding_of(NOTICED, tests, 1.0)
    assert (found.is_noticed, found.problem) == (
        False,
        "tests/a/test_b.py::TestC::waits ended by its time limit",
    )


# -- what is told ----------------------------------------------------------------------------------


def test_the_exit_status_says_whether_everything_is_noticed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(break_product, "ROOT", tree)
    monkeypatch.setattr(break_product, "BREAKS", (NOTICED, STALE))
    assert break_product.main(["--list"]) == 0
    page = tree / "README.md"
    page.write_text(f"Before.\n{BEGIN}\n{END}\nAfter.\n")
    assert break_product.main(["--only", "noticed", "--table", str(page)]) == 0
    row = "| noticed | It does something else. | `test_sums.py::test_the_total_is_of_all` |"
    assert row in page.read_text().splitlines()
    assert break_product.main(["--only", "stale"]) == 1
    assert "NOBODY (stale: " in capsys.readouterr().out


def test_the_table_keeps_the_rows_of_breaks_that_did_not_run_and_loses_those_of_none() -> None:
    text = f"Before.\n{BEGIN}\n{END}\nAfter.\n"
    first = break_product.with_table(
        text, [Finding("b", "B.", ["t::b[x|y]"]), Finding("gone", "G.")], ["a", "b", "gone"], "2026-01-01"
    )
    second = break_product.with_table(first, [Finding("a", "A.")], ["a", "b"], "2026-01-02")
    assert second.startswith("Before.\n")
    assert second.endswith("\nAfter.\n")
    assert [line for line in second.splitlines() if line.startswith("| ")][2:] == [
        "| a | A. | **nobody** |",
        "| b | B. | `t::b[x\\|y]` |",
    ]
    assert "Last run on 2026-01-02." in second
    with pytest.raises(ValueError, match="there are no lines"):
        break_product.with_table("nothing", [], [], "")
