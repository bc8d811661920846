"""Reward functions that start processes, fork, exit and break what they run in. They run in the pool's processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def starts_and_waits(prompt, completion, meta):
    return float(subprocess.run(SLEEPER, check=False).returncode)


def forks_and_joins(prompt, completion, meta):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.join()
    return 1.0


def in_the_background(prompt, completion, meta):
    subprocess.Popen(SLEEPER)
    return 1.0


def detached(prompt, completion, meta):
    """A daemon: a session of its own, and nobody's child."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(SLEEPER[0], SLEEPER)
        os._exit(0)
    os.wait()
    if completion == "die":
        os._exit(5)
    return 1.0


def forks_and_returns(prompt, completion, meta):
    if os.fork() == 0:
        return 99.0
    time.sleep(0.05)
    return float(completion)


def parent_leaves(prompt, completion, meta):
    """The child comes back, as from a daemon's double fork."""
    if completion == "fork" and os.fork():
        os._exit(0)
    return 1.0


def leaves(prompt, completion, meta):
    if completion == "exit":
        sys.exit(3)
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "hard":
        os._exit(3)
    if completion == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "group":
        os.killpg(0, signal.SIGKILL)
    if completion == "recursion":
        return leaves(prompt, completion, meta)
    return 1.0


def breaks_things(prompt, completion, meta):
    """What it does to the process must not reach the next sample."""
    assert os.getcwd() == meta["folder"]
    assert time.monotonic() > 0
    os.write(1, b"raw bytes on descriptor 1\n")
    print("x" * 200_000)
    with contextlib.suppress(OSError):  # an earlier sample closed it
        os.close(0)
    sys.stdin = sys.stdout = None
    os.chdir("/")
    signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return len(completion)


def writes_for_another(prompt, completion, meta):
    """Bytes in every pipe that it finds."""
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if fd < 3:
            continue
        try:
            os.write(fd, b"\0\0\0\5hello")
        except OSError:
            continue
    return 1.0


def batch(prompts, completions, metas):
    word = completions[0]
    if "hang" in completions:
        time.sleep(600)
    if word == "short":
        return [1.0]
    if "none" in completions:
        return [None if one == "none" else 1.0 for one in completions]
    return [{"score": float(len(completions)), "pid": os.getpid()} for _ in completions]


def raises_half_a_character(prompt, completion, meta):
    raise ValueError("\ud800 in it")


def raises_lines(prompt, completion, meta):
    raise ValueError("first\nand second")


def raises_a_book(prompt, completion, meta):
    raise ValueError("z" * 5_000_000)


def names_half_a_character(prompt, completion, meta):
    return {"score": 0.5, "\ud800": 1.0}
