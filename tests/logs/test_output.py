"""What a process prints: time and level on every line, in parts, and never at the price of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gyre.logs.line_format import Levels, Stamps, level_in, time_of
from gyre.logs.log_file import OLDER_PARTS, LogFile, older_parts, open_log
from gyre.logs.output import LINE_BYTES, LineWriter, LossyFile
from gyre.logs.reading import LogQuery, read_page
from tests.machine import fill
from tests.waits import GENEROUS_S

BEGIN = """
import sys, os, logging, warnings
from pathlib import Path
from gyre.logs.output import redirect_output
redirect_output(Path(sys.argv[1]))
"""
PRINTS = f"""{BEGIN}
try:
    for _ in range(3000):
        print("x" * 4000)
        print("y" * 10, flush=True, file=sys.stderr)
        sys.stdout.buffer.write(b"z"); sys.stdout.flush()
    logging.getLogger().error("said")
    warnings.warn("warned")
except BaseException as error:
    Path(sys.argv[2]).write_text(repr(error))
else:
    Path(sys.argv[2]).write_text("ok")
"""
STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ([DIWE]) (.*)")


def _run(log: Path, told: Path) -> str:
    subprocess.run([sys.executable, "-c", PRINTS, str(log), str(told)], check=False, timeout=60)
    return told.read_text()


def _written_by(code: str, log: Path) -> list[str]:
    """The lines of a process that runs this code, `L text`; a line without a time is `- text`."""
    subprocess.run([sys.executable, "-c", BEGIN + code, str(log)], check=True, timeout=60)
    found = []
    for line in log.read_text(errors="replace").splitlines():
        stamped = STAMPED.fullmatch(line)
        found.append(f"{stamped[1]} {stamped[2]}" if stamped else f"- {line}")
    return found


def _bytes_of(log: Path) -> bytes:
    return re.sub(rb"(?m)^.{24} ", b"", log.read_bytes())


# -- a full disk ------------------------------------------------------------------------------------


def test_a_print_that_finds_no_room_raises_nothing(small_mount: Path, tmp_path: Path) -> None:
    log = small_mount / "logs" / "a.log"
    assert _run(log, tmp_path / "told") == "ok"
    assert log.stat().st_size > 100_000


def test_a_log_that_cannot_be_made_ends_nothing(small_mount: Path, tmp_path: Path) -> None:
    fill(small_mount / "ballast")
    assert _run(small_mount / "logs" / "a.log", tmp_path / "told") == "ok"


def test_when_there_is_room_again_the_log_says_what_is_missing(small_mount: Path) -> None:
    descriptor = os.open(small_mount / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    file = LossyFile(descriptor)
    ballast = small_mount / "ballast"
    fill(ballast)
    assert file.write(b"lost" * 2000) > 0
    assert file.write(b"lost" * 2000) == 8000
    ballast.unlink()
    file.write(b"kept")
    os.close(descriptor)
    written = (small_mount / "log").read_bytes()
    assert written.endswith(b"kept")
    assert b"bytes were not written: the disk had no room]" in written


def test_a_descriptor_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    assert _written_by("os.close(1); print('lost'); sys.stderr.write('kept\\n')", tmp_path / "a.log") == []


# -- lines ------------------------------------------------------------------------------------------


def test_prints_have_time_and_level(tmp_path: Path) -> None:
    before = time.time()
    written = _written_by(
        "print('one', 2)\n"
        "print('to stderr', file=sys.stderr)\n"
        "print('a\\nb')\n"
        "print('ERROR: names its own')\n"
        "sys.stdout.write('by'); sys.stdout.write('parts\\n')\n"
        "sys.stdout.buffer.write(b'\\xff bytes\\n')\n"
        "print('\\udcff surrogate')\n"
        "print('no end', end='')",
        tmp_path / "a.log",
    )
    assert written == [
        "I one 2",
        "W to stderr",
        "I a",
        "I b",
        "E ERROR: names its own",
        "I byparts",
        "I \ufffd bytes",
        "I \\udcff surrogate",
        "I no end",
    ]
    at = time_of((tmp_path / "a.log").read_bytes()[:24])
    assert before - 0.01 <= at <= time.time()


def test_records_of_logging_have_their_level_whatever_handler_they_come_by(tmp_path: Path) -> None:
    code = (
        "logging.getLogger('a').error('without a handler')\n"
        "logging.getLogger('a').info('not wanted')\n"
        "logging.basicConfig(level=logging.DEBUG, format='%(message)s')\n"
        "logging.debug('fine'); logging.info('two\\nlines'); logging.critical('bad')\n"
    )
    assert _written_by(code, tmp_path / "a.log") == [
        "E without a handler",
        "D fine",
        "I two",
        "I lines",
        "E bad",
    ]


def test_a_handler_of_before_writes_into_the_log(tmp_path: Path) -> None:
    code = BEGIN.replace("redirect_output(", "logging.basicConfig(format='%(message)s'); redirect_output(")
    subprocess.run(
        [sys.executable, "-c", f"{code}\nlogging.error('said')", str(tmp_path / "a.log")], check=True
    )
    assert STAMPED.fullmatch((tmp_path / "a.log").read_text().strip())


def test_a_traceback_is_an_error_to_its_exception(tmp_path: Path) -> None:
    code = (
        "import traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "print('after', file=sys.stderr)\n"
    )
    written = _written_by(code, tmp_path / "a.log")
    assert [line[0] for line in written[:-1]] == ["E"] * (len(written) - 1)
    assert written[-2:] == ["E ZeroDivisionError: division by zero", "W after"]


def test_an_exception_that_nobody_took_is_in_the_log(tmp_path: Path) -> None:
    code = (
        "import threading\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "class Odd:\n"
        "    def __del__(self): raise KeyError('ignored')\n"
        "Odd()\n"
        "import atexit; atexit.register(lambda: print('at exit'))\n"
        "raise ValueError('nobody took it')\n"
    )
    with pytest.raises(subprocess.CalledProcessError):
        _written_by(code, tmp_path / "a.log")
    written = (tmp_path / "a.log").read_text().splitlines()
    assert all(STAMPED.fullmatch(line) for line in written), written
    for words in ("ZeroDivisionError: division by zero", "KeyError: 'ignored'", "ValueError: nobody took it"):
        assert any(line[25:27] == "E " and words in line for line in written), written
    assert any("at exit" in line for line in written)


def test_what_writes_to_the_descriptor_is_kept_as_it_is(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "print('one', flush=True)\n"
        "os.write(1, b'from C\\n'); os.write(2, b'from C too\\n')\n"
        "subprocess.run(['echo', 'a child'])\n"
        "print('two')\n"
    )
    assert _written_by(code, tmp_path / "a.log") == [
        "I one",
        "- from C",
        "- from C too",
        "- a child",
        "I two",
    ]


def test_a_line_that_is_begun_is_shown_when_it_is_flushed_and_ends_where_another_begins(
    tmp_path: Path,
) -> None:
    log = tmp_path / "a.log"
    file = LogFile(open_log(log))
    out, err = LineWriter(file, "I"), LineWriter(file, "W")
    out.write(b"dots")
    assert log.read_bytes() == b""
    out.flush()
    out.write(b".")
    out.flush()
    assert _bytes_of(log) == b"I dots."
    out.write(b".\n")
    out.write(b"half")
    out.flush()
    err.write(b"whole\n")
    out.write(b" other\n")
    assert _bytes_of(log) == b"I dots..\nI half\nW whole\nI  other\n"


def test_a_bar_is_a_line_now_and_then_and_its_last_state(tmp_path: Path) -> None:
    log, now = tmp_path / "a.log", [1000.0]
    bar = LineWriter(LogFile(open_log(log)), "W", clock=lambda: now[0])
    for percent in range(101):
        bar.write(b"\r%d%%" % percent)
        bar.flush()
        now[0] += 0.5
    bar.write(b"\n")
    bar.write(b"text\r\n")
    assert _bytes_of(log) == b"I 0%\nI 20%\nI 40%\nI 60%\nI 80%\nI 100%\nW text\n"


def test_a_line_that_is_too_long_goes_on_in_another(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    lines = LineWriter(LogFile(open_log(log)), "I")
    lines.write(b"x" * (3 * LINE_BYTES) + b"\n")
    lines.write(b"y" * (LINE_BYTES + 5))
    lines.write(b"z\n")
    written = _bytes_of(log).splitlines()
    assert max(map(len, written)) <= LINE_BYTES + 2
    assert b"".join(line[2:] for line in written) == b"x" * 3 * LINE_BYTES + b"y" * (LINE_BYTES + 5) + b"z"


def test_what_threads_and_forks_print_stands_in_lines_of_their_own(tmp_path: Path) -> None:
    code = (
        "import threading\n"
        "def work(name):\n"
        "    for n in range(300): print(name * 40, n)\n"
        "threads = [threading.Thread(target=work, args=(name,)) for name in 'abcd']\n"
        "[one.start() for one in threads]; [one.join() for one in threads]\n"
        "print('begun', end='')\n"
        "sys.stdout.flush()\n"
        "if os.fork() == 0:\n"
        "    print('child'); sys.stdout.flush(); os._exit(0)\n"
        "os.wait(); print(' and ended')\n"
    )
    written = _written_by(code, tmp_path / "a.log")
    for name in "abcd":
        assert [line for line in written if name * 40 in line] == [f"I {name * 40} {n}" for n in range(300)]
    assert sum("child" in line for line in written) == 1
    assert sum("begun" in line for line in written) == 1


def test_what_an_engine_prints_is_marked(tmp_path: Path) -> None:
    code = (
        "from gyre.logs.output import engine_lines\n"
        "log = engine_lines()\n"
        "log.write(b'[2026-01-01] WARNING: slow\\nload'); log.flush()\n"
        "print('ours')\n"
        "log.write(b'ed\\n\\rbar 1\\rbar 2'); log.flush(); log.write(b'\\n')\n"
    )
    assert _written_by(code, tmp_path / "a.log") == [
        "W [engine] [2026-01-01] WARNING: slow",
        "I [engine] load",
        "I ours",
        "I [engine] ed",
        "I [engine] bar 2",
    ]


@pytest.mark.parametrize(
    "begin",
    ["", "del os.environ['GYRE_LOG_FILE']\nfrom gyre.logs.output import keep_printing\nkeep_printing()\n"],
)
def test_a_child_may_print_though_another_thread_printed_when_it_was_forked(
    tmp_path: Path, begin: str
) -> None:
    code = (
        f"{begin}"
        "import threading\n"
        "def work():\n"
        "    while not over: print('x' * 500)\n"
        "over = []\n"
        "thread = threading.Thread(target=work); thread.start()\n"
        "for n in range(30):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        sys.stderr.write(f'child {n}\\n'); sys.stderr.flush(); os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "over.append(1); thread.join()\n"
    )
    _written_by(code, tmp_path / "a.log")
    children = re.findall(r"child (\d+)", "".join(path.read_text() for path in tmp_path.iterdir()))
    assert sorted(children, key=int) == [str(number) for number in range(30)]


def test_a_process_that_was_started_with_a_log_prints_lines_into_it(tmp_path: Path) -> None:
    child = "from gyre.logs.output import keep_printing; import os; os.dup2(2, 1); keep_printing(); print('scored')"
    code = f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
    assert _written_by(code, tmp_path / "a.log") == ["I scored"]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (b"[2026-01-01 00:00:00 TP0] INFO loaded", "I"),
        (b"WARNING:  slow", "W"),
        (b"DEBUG x", "D"),
        (b"CRITICAL", "E"),
        (b"INFORMATION is no level, nor is an error", "W"),
        (b"x" * 200 + b" ERROR", "W"),
        (b"  + Exception Group Traceback (most recent call last):", "E"),
    ],
)
def test_a_line_may_name_its_level(text: bytes, level: str) -> None:
    assert level_in(text, "W") == Levels("W").of(text) == level


def test_times_are_those_of_the_clock() -> None:
    stamps = Stamps()
    assert stamps.of(1764101535.1239) == b"2025-11-25T20:12:15.123Z"
    assert stamps.of(1764101535.9999) == b"2025-11-25T20:12:15.999Z"
    assert time_of(stamps.of(1764101536.5)) == 1764101536.5
    assert time_of(b"2026-99-99T00:00:00.000Z") == 0.0


# -- parts ------------------------------------------------------------------------------------------


def _texts(folder: Path, **options: Any) -> list[str]:
    page = read_page(folder, LogQuery(since=0.0), limit_bytes=1 << 24, now=time.time() + 10, **options)
    return [line["text"] for line in page["lines"]]


def test_a_log_goes_on_in_parts_of_which_few_are_kept(tmp_path: Path) -> None:
    code = (
        "redirect_output(Path(sys.argv[1]), part_bytes=300_000)\n"
        "for n in range(90_000): print('line', n)\n"
        "os.write(2, b'by C\\n')\n"
    )
    _written_by(code, tmp_path / "a-0.1.log")
    parts = older_parts(tmp_path / "a-0.1.log")
    assert len(parts) == OLDER_PARTS
    assert parts[0][0] > 1
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < (OLDER_PARTS + 2) * 600_000
    shown = _texts(tmp_path)
    assert shown[-1] == "by C"
    numbers = [int(text.split()[1]) for text in shown[:-1]]
    assert numbers == list(range(numbers[0], 90_000))


def test_a_child_that_holds_the_first_part_writes_to_one_that_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a-0.1.log"
    log = LogFile(open_log(path), path, part_bytes=100)
    child = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in range(20):
        log.write(b"2026-01-01T00:00:00.000Z I " + b"x" * 100 + b"\n")
        log.look()
        os.write(child, b"child %d\n" % number)
        assert f"child {number}" in _texts(tmp_path)
    assert len(list(tmp_path.iterdir())) == OLDER_PARTS + 1
    os.close(child)


def test_a_part_that_a_child_fills_is_emptied_in_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "a-0.1.log"
    log = LogFile(open_log(path), path, part_bytes=1000)
    child = os.open(path, os.O_WRONLY | os.O_APPEND)
    log.write(b"x" * 1000 + b"\n")
    log.look()
    for _ in range(100):
        os.write(child, b"y" * 200 + b"\n")
        log.look()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000
    os.close(child)


def test_a_log_that_somebody_removed_or_that_is_of_another_process_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a-0.1.log"
    log = LogFile(open_log(path), path, part_bytes=10)
    log.write(b"x" * 100)
    path.unlink()
    log.look()
    assert list(tmp_path.iterdir()) == []
    stranger = LogFile(open_log(path), part_bytes=10)
    stranger.write(b"x" * 100)
    stranger.look()
    assert list(tmp_path.iterdir()) == [path]


def test_a_follower_gets_each_line_once_while_parts_begin_under_it(tmp_path: Path) -> None:
    """The writer is never so far ahead that a part which was not read is gone."""
    path = tmp_path / "a-0.1.log"
    log = LogFile(open_log(path), path, part_bytes=4000)
    lines, most, ahead = LineWriter(log, "I"), 5000, threading.Semaphore(60)

    def work() -> None:
        for number in range(most):
            assert ahead.acquire(timeout=GENEROUS_S)
            lines.write(b"line %d\n" % number)
            if number % 7 == 0:
                log.look()

    writer = threading.Thread(target=work)
    writer.start()
    seen: list[str] = []
    after: dict[str, int] = {}
    while len(seen) < most:
        page = read_page(tmp_path, LogQuery(since=0.0), after=after, limit_bytes=300)
        seen += [line["text"] for line in page["lines"]]
        after = page["next"]
        for _ in page["lines"]:
            ahead.release()
    writer.join()
    assert seen == [f"line {number}" for number in range(most)]
    assert older_parts(path)[-1][0] > 20
