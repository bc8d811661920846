"""A process of the reward pool: it reads samples, calls one of the user's functions and writes what it returned.

    python -c "from gyre.workloads.rewards.worker import main; main(READ_FD, WRITE_FD)"

It runs under a guard (`gyre.engines.process_guard`), in a session of its own.

Invariants:
- *every answer says whose it is*: it has the number of its request and the id of this process. A process that the
  function forked, and that comes back in its stead, ends without a word;
- *the next sample finds what the last one found*: the working folder, and no timer of another sample. The function's
  prints go to stderr, its stdin is empty, and what it does to these three descriptors does not reach the pool.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import sys
import traceback
from dataclasses import asdict
from typing import Any, NoReturn

from gyre.errors import ConfigError
from gyre.logs.output import keep_printing
from gyre.workloads.rewards.frames import packed, read_one, write_all
from gyre.workloads.rewards.results import NoReward, as_utf8

READY = -1
"""The number of the first frame, which answers no request."""

_LONGEST_SENTENCE, _LONGEST_TRACEBACK = 1000, 20_000
"""Characters that are kept of what the user's code raised, which may quote a whole data set."""


def main(requests: int, answers: int) -> None:
    """Answer requests until there are no more."""
    os.setsid()  # a signal to its process group is not for the guard
    os.dup2(2, 1)
    keep_printing()
    for fd in (requests, answers):
        os.set_inheritable(fd, False)
    me = os.getpid()
    functions, folders = read_one(requests)
    sys.path[:] = folders
    home = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    rewards, answer = _load(functions)
    _only(me)
    write_all(answers, packed([me, READY, *answer, 0]))
    if rewards is None:
        return
    while True:
        try:
            number, at, samples = read_one(requests)
        except EOFError:
            return
        answer = _score(rewards[at], samples)
        _only(me)
        _put_back(home)
        write_all(answers, packed([me, number, *answer, _left(me)]))


def _load(functions: list[list[str]]) -> tuple[Any, list[Any]]:
    """The functions and what they are, of each its path and its signature; or None and why not."""
    rewards: list[Any] = []
    for path, signature in functions:
        try:
            from gyre.workloads.rewards.calls import BoundReward
            from gyre.workloads.rewards.functions import load_function

            rewards.append(BoundReward(load_function(path), path, signature))
        except ConfigError as error:
            return None, [
                "refused",
                [
                    error.message,
                    error.hint,
                    traceback.format_exc() if error.__cause__ else "",
                    len(rewards),
                ],
            ]
        except BaseException as error:  # whatever the user's module raises, SystemExit too
            return None, ["raised", [_sentence(error, path), _traceback(), len(rewards)]]
    return rewards, ["ready", [asdict(reward.form) for reward in rewards]]


def _score(reward: Any, samples: list[Any]) -> list[Any]:
    try:
        return ["scored", reward([tuple(sample) for sample in samples])]
    except NoReward as error:
        why = as_utf8(str(error))
        return ["no_reward", [f"{why} ({reward.where})" if reward.where else why, "", error.index]]
    except ConfigError as error:
        return ["refused", [error.message, error.hint, ""]]
    except BaseException as error:  # whatever the user's code raises, SystemExit and KeyboardInterrupt too
        return ["raised", [_sentence(error, reward.name), _traceback(), None]]


def _sentence(error: BaseException, path: str) -> str:
    """`KeyError: 'x' (rew.py, line 3)`: the exception, and the last line of the function's own file that it passed."""
    file = path.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/gyre/workloads/rewards/" not in frame.filename]
    of_file = [
        frame
        for frame in own
        if file.endswith(".py") and os.path.basename(file) == os.path.basename(frame.filename)
    ]
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    told = lines[-1] if isinstance(error, SyntaxError) else " ".join(lines)
    told = as_utf8(told if len(told) <= _LONGEST_SENTENCE else f"{told[:_LONGEST_SENTENCE]}…")
    where = next(iter(reversed(of_file or own)), None)
    return told if where is None else f"{told} ({where.filename}, line {where.lineno})"


def _traceback() -> str:
    """Of the exception that is handled: its end, where it is long."""
    return as_utf8(traceback.format_exc()[-_LONGEST_TRACEBACK:])


def _only(me: int) -> None:
    """End this process if it is not the pool's but one that the function forked."""
    if os.getpid() != me:
        _end()


def _end() -> NoReturn:
    print(
        "a process that the reward function forked came back from it; it is ended, and its result counts for nothing",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _put_back(home: int) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    with contextlib.suppress(OSError):  # the function may have closed it
        os.fchdir(home)


def _left(me: int) -> int:
    """How many processes earlier samples left: children of this process, and of its guard."""
    found = -1  # this process is its guard's child
    for pid in (me, os.getppid()):
        for file in glob.glob(f"/proc/{pid}/task/*/children"):
            with contextlib.suppress(OSError), open(file, "rb") as children:
                found += len(children.read().split())
    return max(found, 0)
