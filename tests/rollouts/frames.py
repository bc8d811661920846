"""Frames that several tests send."""

from __future__ import annotations

from typing import Any

import numpy as np

from gyre.rollouts.protocol import frames
from gyre.rollouts.protocol.frames import (
    Assign,
    Assignment,
    Frame,
    Held,
    Hello,
    Keep,
    Loaded,
    Prompt,
    Request,
    Weights,
    Welcome,
)
from gyre.rollouts.protocol.progress import COLUMNS, End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups


def empty_progress(seq: int) -> GenerationProgress:
    """A report of no sample."""
    return GenerationProgress(seq, *(np.empty(0, dtype) for _, dtype in COLUMNS))


def progress(**changed: Any) -> GenerationProgress:
    """A report of three samples."""
    columns: dict[str, Any] = {
        "seq": 7,
        "rows": np.array([2, 5, 9], np.uint32),
        "leases": np.array([1 << 40, 3, 4], np.uint64),
        "starts": np.array([0, 4, 9], np.uint32),
        "counts": np.array([1, 2, 1], np.uint32),
        "versions": np.array([0, 3, 3], np.int32),
        "tokens": np.array([7, 8, 9, 10], np.int32),
        "logprobs": np.array([-0.5, -1.0, -0.0, -3.25], np.float32),
        "ends": [End(5, 3, "stop", "", ((2, 1), (3, 1))), End(9, 4, "failed", "no", ())],
        "running": 3,
        "waiting": 1,
        "used_tokens": 99,
        "rate_tokens_s": 12.5,
    }
    return GenerationProgress(**(columns | changed))


WEIGHTS = Weights(
    version=3,
    checksum="abc",
    sources=["10.0.0.5:7001"],
)
HELLO = Hello(
    protocol=1,
    instance="r0",
    incarnation="x",
    model="unset",
    engine="fake",
    max_running=8,
    kv_tokens=1024,
    held=[Held(key=1, lease=2, start=0, length=5)],
)
SELDOM: list[Frame] = [
    HELLO,
    Welcome(
        protocol=1,
        epoch=2,
        interval_s=0.25,
        keep=[Keep(key=1, row=0, lease=9, known=4, lineage="a")],
        weights=WEIGHTS,
        weights_key="k",
    ),
    Assign(
        prompts=[
            Prompt(request_id=1, tokens=b"\1\0\0\0", sampling={"max_new_tokens": 9, "stop_token_ids": [3]})
        ],
        work=[Assignment(row=0, lease=1, key=65536, request_id=1, prior=b"", seed=4)],
    ),
    Request(
        purpose="train",
        groups=pack_groups([Group(3, np.arange(4, dtype=np.int32))]),
        n=2,
        sampling={"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True},
        seed=1,
        min_version=0,
    ),
    frames.Cancel(rows=[(1, 2)]),
    frames.Ack(seq=4),
    frames.Drain(deadline_s=1.5, reason="spot"),
    frames.Reject(code="model", message="another"),
    WEIGHTS,
    frames.EngineLimits(max_running=512, kv_tokens=900_000, why="the engine allows no more"),
    Loaded(version=1, checksum="a", fetch_s=0.5, load_s=0.25),
    frames.LoadFailed(version=1, error="damaged"),
    frames.Draining(reason="SIGTERM", deadline_s=30.0),
    frames.EngineDied(message="it died", tail="boom"),
    frames.Attach(protocol=1, term=3, samples_ahead=True),
    frames.Finished(
        purpose="train",
        samples=[frames.FinishedSample(group=-3, index=1, tokens=b"\1\0\0\0", finish="stop")],
    ),
    frames.Attached(protocol=1, epoch=3, version=-1),
    frames.GroupsStored(purpose="train", ids=[1, 2]),
    frames.Publish(version=1, checksum="a", path="/tmp/x"),
    frames.Done(purpose="train", groups=b""),
    frames.Failed(purpose="train", ids=[4], message="no"),
    frames.TrainerStatus(at_s=12.5, waited_s=3.0, wanted={"rollout": 2, "rollout_spot": 0}),
    frames.SampleCounts(generating=3, at_engine=1, for_place=2),
    frames.LendDevices(window=3, begun=False, arrived_tokens=9, train_s_per_token=1e-4, last_share=0.25),
    frames.ReclaimDevices(window=3),
    frames.WindowStatus(window=3, left_s=None, reason="until done"),
    frames.DevicesReturned(window=3, reason="nothing is left"),
    frames.Sleep(),
    frames.Asleep(seconds=0.5, error="no memory saver"),
    frames.Wake(),
    frames.Awake(seconds=0.5),
    frames.FetchFault(version=3, what="source_lost", evidence="{}"),
]
"""One of each kind."""
