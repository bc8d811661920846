"""What clients of a fleet's door send: bodies of both dialects, whole or streamed, with their headers' ids.

Whatever it is, it is refused in the documented form, or it is a request that the ledger takes, whose answer is JSON and
which the same bytes find again.
"""

from __future__ import annotations

import contextlib
import json
from random import Random
from typing import Any

import msgspec

from gyre.request_body import RequestRefused
from gyre.rollouts.manager.door.dialects import DIALECTS, encode
from gyre.rollouts.manager.door.words import ModelWords
from gyre.rollouts.plane.door_ledger import DoorLedger
from gyre.rollouts.plane.groups import OpenGroups
from tests.fuzz.inputs import as_json, damaged, noise, twisted
from tests.fuzz.target import Broken, Target

GENERATE = {
    "input_ids": [1, 2, 3],
    "sampling_params": {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "n": 2,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "repetition_penalty": 1.0,
    },
    "stream": False,
    "return_logprob": True,
    "policy": {"at_least": 1},
}
COMPLETION = {
    "model": "fleet",
    "prompt": [[1, 2, 3]],
    "max_tokens": 8,
    "n": 2,
    "temperature": 1.0,
    "logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "policy": {"exact": 2},
    "user": "lab",
}
WORDS = ModelWords(stops=(2,), positions=4096)
NEWEST = 2


class DoorRequests(Target):
    name = "door requests"

    def start(self) -> None:
        groups = OpenGroups(epoch=1, most_resets=0)
        groups.newest_version = NEWEST
        groups.promote(NEWEST)
        self._ledger = DoorLedger(groups, keep_s=60.0, keep_tokens=1000, most_open=64)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        at = draw.randrange(2)
        dialect, good = DIALECTS[at], (GENERATE, COMPLETION)[at]
        sent.append(_body({**good, "rid": f"id-{draw.getrandbits(32)}"}, draw))
        header = draw.choice((None, None, "one", "two\0", "x" * 300))
        try:
            told = dialect.read(sent[0], header, WORDS, "fleet")
            known, _ = self._ledger.ask("key", told.asked, newest=NEWEST, now=0.0)
        except RequestRefused as error:
            _check_refusal(error)
            return False
        _check_json(dialect.answer(known, told, WORDS))
        count = known.request.n
        for event in dialect.events(known, told, WORDS, [0] * count, [False] * count):
            _check_json(event)
        if self._ledger.ask("key", told.asked, newest=NEWEST, now=0.0) != (known, False):
            raise Broken("the same again is another request")
        with contextlib.suppress(RequestRefused):
            self._ledger.ask("other", told.asked, newest=NEWEST, now=0.0)
            raise Broken("another key has it")
        self._ledger.close([known])
        return True


def _body(good: dict[str, Any], draw: Random) -> bytes:
    match draw.randrange(6):
        case 0:
            return damaged(json.dumps(good).encode(), draw)
        case 1:
            return noise(draw)
        case _:
            return as_json(twisted(good, draw, wide=True))


def _check_refusal(error: RequestRefused) -> None:
    status, reason = error.details["status"], error.details["reason"]
    if not 400 <= status < 500 or not reason or len(str(error)) > 4000:
        raise Broken(f"it is refused as {status} {reason}: {str(error)[:200]}")
    _check_json({"message": str(error), "code": reason})


def _check_json(value: Any) -> None:
    msgspec.json.decode(encode(value))
