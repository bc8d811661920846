"""Reward functions that do as they like, for the pool's tests. They run in processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path


def length(prompt, completion, meta):
    print("what a function prints does not disturb")
    return len(completion) + len(meta["answer"])


def by_word(prompt, completion, meta):
    """Does what the completion says."""
    word, _, rest = completion.partition(" ")
    if word == "raise":
        raise KeyError("no such thing")
    if word == "hang":
        time.sleep(600)
    if word == "die":
        os._exit(7)
    if word == "nan":
        return float("nan")
    if word == "once":  # dies the first time that it sees this file's name
        path = Path(rest)
        if not path.exists():
            path.touch()
            os._exit(9)
    return 1.0


def who(prompt, completion, meta):
    return float(os.getpid())


def in_batches(completions, **columns):
    return [10 + at for at, _ in enumerate(completions)]


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.25, "acc": True, "note": "text"}
