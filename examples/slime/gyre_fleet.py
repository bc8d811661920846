"""slime over a Gyre fleet: the fleet's door in the place of SGLang's router.

    export GYRE_FLEET_KEY=...                # of a key with the scopes `generate` and `publish`
    export PYTHONPATH=examples/slime:...     # both in the environment of slime's Ray job

    --rollout-num-gpus 0 --sglang-router-ip 10.0.0.5 --sglang-router-port 7171
    --custom-config-path examples/slime/fleet.yaml
    --custom-generate-function-path gyre_fleet.generate
    --update-weight-mode full --update-weight-transport disk
    --update-weight-disk-dir /shared/policies/run-1 --update-weight-disk-keep-files
    --custom-update-weight-post-write-path gyre_fleet.publish

See docs/other-trainers.md for what was run of it.
"""

import asyncio
import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path

import httpx
from slime.rollout.sglang_rollout import GenerateState
from slime.utils import http_utils
from slime.utils.types import Sample

PATIENCE_S = 120
"""How long the fleet's manager may be away when it is asked for its versions, or published at."""
KEPT = 3
"""Versions whose folders stay."""


def _fleet(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def _headers():
    return {"Authorization": f"Bearer {os.environ['GYRE_FLEET_KEY']}"}


async def generate(args, sample, sampling_params):
    """As slime's own, with the key, an id, and the least version. slime asks again where it lost the connection: with
    an id that is the same request, and nothing is generated twice."""
    fleet, headers = _fleet(args), _headers()
    http_utils._http_client.headers.update(headers)  # for what slime asks by itself: /workers, /abort_request
    if not sample.tokens:
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    new = sampling_params["max_new_tokens"] - sample.response_length
    if new <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    sample.session_id = sample.session_id or str(uuid.uuid4())
    rid = f"{sample.session_id}-{len(sample.tokens)}"
    payload = {
        "rid": rid,
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": new},
        "return_logprob": True,
        "policy": {"at_least": await _least(args, fleet)},
    }
    told = await http_utils.post(f"{fleet}/generate", payload, headers=headers)
    drawn = told["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in drawn],
        log_probs=[logprob for logprob, _, _ in drawn],
        trainable=True,
        meta_info=told["meta_info"],
        text=told["text"],
    )
    with contextlib.suppress(httpx.HTTPError):  # else the door keeps the answer for a while
        await http_utils._http_client.delete(f"{fleet}/v1/requests/{rid}", headers=headers)
    return sample


async def _least(args, fleet):
    """The oldest version that may answer: the newest that is published, or so many before it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            policies = await http_utils.get(f"{fleet}/v1/policies")
            return max(0, (policies["newest"] or 0) - getattr(args, "gyre_fleet_lag", 0))
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(1)


def publish(args, version_dir, rollout_engines):
    """After slime's trainer has written a version: publish it as the fleet's next one, which the least version of the
    samples to come is. A step of slime's is no version: those begin anew with each run, and a fleet's only grow."""
    import torch.distributed

    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    url = f"{_fleet(args)}/v1/policies"
    with httpx.Client(headers=_headers(), timeout=600, trust_env=False) as client:
        newest = _until_answered(lambda: client.get(url))["newest"]
        body = {"version": 0 if newest is None else newest + 1, "path": version_dir}
        _until_answered(lambda: client.post(url, json=body))
    written = sorted(Path(version_dir).parent.glob("weight_v*"), key=lambda path: path.stat().st_mtime)
    for old in written[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _until_answered(ask):
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            reply = ask()
            if reply.status_code == 200:
                return reply.json()
            if reply.status_code < 500 or time.monotonic() > until:
                raise RuntimeError(f"the fleet refuses it: {reply.status_code} {reply.text}")
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
        time.sleep(1)
