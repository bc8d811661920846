"""A Megatron actor in a process of its own, as in a job, and the bench's calls to it.

`ActorProcess` is the caller's side. A process has two lines: one for computation, in order, and one for publishing,
which goes on while the next step computes. Messages are pickled, because both ends are this bench's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
now = time.monotonic  # one clock for all processes of this machine

NO_MANAGER = ("http://127.0.0.1:9", "bench")
"""Endpoint and token of a rollout manager, which these weights are never fetched through."""


class ActorFailed(Exception):
    """The actor failed, did not answer in time, or is gone."""


class ActorProcess:
    def __init__(self, script: Path, options: Row, output: Path, *, env: dict[str, str]) -> None:
        self._output = output
        self._lines: dict[str, tuple[Connection, threading.Lock]] = {}
        self._asked = 0
        theirs = []
        for name in ("compute", "publish"):
            mine, other = Pipe()
            self._lines[name] = (mine, threading.Lock())
            theirs.append(other)
        told = {**options, "lines": [line.fileno() for line in theirs]}
        with open(output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "--actor", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                pass_fds=told["lines"],
            )
        for line in theirs:
            line.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, what: str, within_s: float, *, line: str = "compute", **given: Any) -> Any:
        """Call the actor. Raises ActorFailed with the actor's traceback."""
        connection, lock = self._lines[line]
        with lock:
            try:
                self._asked = number = self._asked + 1
                connection.send((number, what, given))
                until, answered = now() + within_s, -1
                while answered != number:  # skip answers to calls that were given up
                    if not connection.poll(max(0.0, until - now())):
                        raise ActorFailed(f"the actor did not answer {what} within {within_s:.0f} s")
                    answered, ok, answer = connection.recv()
            except (EOFError, OSError) as error:
                last = self._output.read_text(errors="replace")[-3000:]
                raise ActorFailed(
                    f"the actor is gone ({self.process.poll()}) in {what}: {error!r}\n{last}"
                ) from None
        if not ok:
            raise ActorFailed(f"{what}: {answer}")
        return answer

    def end_lines(self) -> None:
        """Close the lines, at which the process ends."""
        for line, _ in self._lines.values():
            line.close()

    def close(self) -> None:
        self.end_lines()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def actor_main(options: Row) -> None:
    """Answer calls until the lines are closed."""
    compute, publish = (Connection(number) for number in options["lines"])
    work = Work(options)
    thread = threading.Thread(target=_answer, args=(publish, work), daemon=True)
    thread.start()
    _answer(compute, work)
    os._exit(0)  # nothing here is worth an orderly end of CUDA and NCCL


def _answer(line: Connection, work: Work) -> None:
    while True:
        try:
            number, what, given = line.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (number, True, getattr(work, what)(**given))
        except BaseException as error:
            answer = (number, False, "".join(traceback.format_exception(error))[-6000:])
        line.send(answer)


class Work:
    def __init__(self, options: Row) -> None:
        self.options = options
        self.actor: Any = None
        self.stepped_at = 0.0
        self.snapshot_s = 0.0
        self._source: Any = None
        import torch

        self.torch = torch
        torch.set_num_threads(options["threads"])
        self.cuda = bool(options["cuda"])
        self.imported = self._import()

    def _now(self) -> float:
        if self.cuda:
            self.torch.cuda.synchronize()
        return now()

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        began = self._now()
        found = work()
        return found, self._now() - began

    # -- what a step is made of ------------------------------------------------------------------------

    def _import(self) -> Row:
        """Import at once, while the model is being written."""
        from gyre.workloads.megatron.model.seam import open_seam

        began = now()
        if self.cuda:
            if self.torch.cuda.device_count() > 1:  # each of several ranks has one device, as in a job
                self.torch.cuda.set_device(int(os.environ["GYRE_DEVICES"]))
            self.torch.zeros(1, device="cuda")
        open_seam(self.torch.device("cuda" if self.cuda else "cpu"))
        import gyre.workloads.megatron.actor
        import gyre.workloads.megatron.policy  # noqa: F401

        return {"torch": self.torch.__version__, "seconds": round(now() - began, 2)}

    def ready(self) -> Row:
        """The row about the imports, which are done."""
        return self.imported

    def setup(self, port: int = 0) -> Row:
        """Set up the actor. The ranks of a gang meet at `port`."""
        from gyre.workloads.base import WorkloadContext
        from gyre.workloads.megatron.actor import MegatronActor

        began = now()
        actor = MegatronActor()
        actor.context = WorkloadContext(
            "bench",
            "actor",
            self.options.get("rank", 0),
            self.options.get("ranks", 1),
            config=self.options["config"],
            directory=Path(self.options.get("directory", "")),
            master_addr="127.0.0.1",
            master_port=port or None,
        )
        actor.setup()
        changed = actor.changed

        def timed() -> None:
            self.stepped_at = self._now()
            changed()
            self.snapshot_s = self._now() - self.stepped_at

        actor.changed = timed  # type: ignore[method-assign]
        self.actor = actor
        policy = actor.backend.policy
        return {
            "imported": self.imported,
            "setup_s": round(self._now() - began, 2),
            "parameters": sum(one.numel() for one in policy.module.parameters()),
            "dtype": str(policy.dtype),
            "device": str(policy.device),
            "pass_tokens": policy.settings.pass_tokens,
        }

    def begin(self, step: int) -> Row:
        told: Row = self.actor.begin(step)
        return told

    def accumulate(self, groups: list[Any], step: int, index: int) -> Row:
        told, seconds = self._timed(lambda: self.actor.accumulate(groups, step=step, index=index))
        return {**told, "seconds": seconds}

    def apply(self, step: int, indices: int, group_ids: list[int]) -> Row:
        """Apply a step. `seconds` is the whole time, `snapshot_s` its part after `stepped_at`, when the weights were
        new."""
        told, seconds = self._timed(lambda: self.actor.apply(step=step, indices=indices, group_ids=group_ids))
        return {
            **told,
            "seconds": seconds,
            "snapshot_s": self.snapshot_s,
            "stepped_at": self.stepped_at,
        }

    def memory(self) -> Row:
        if not self.cuda:
            return {}
        cuda = self.torch.cuda
        return {
            "max_allocated_gib": round(cuda.max_memory_allocated() / 2**30, 1),
            "max_reserved_gib": round(cuda.max_memory_reserved() / 2**30, 1),
        }

    # -- publishing, beside the next step --------------------------------------------------------------

    def publish(self, version: int, folder: str) -> Row:
        """Publish the weights after the last step, tensor by tensor, into an arena below `folder` that serves them.
        `path` is the folder that engines load."""
        from gyre.weights.version.manifest import layout_of
        from gyre.weights.version.model_folder import config_bytes
        from gyre.workloads.gang.weight_source import WeightSource

        if self._source is None:
            self._source = WeightSource(Path(folder), lambda: NO_MANAGER, root=Path(folder))
        layout, own = layout_of(self.actor.weights())
        files = {"config.json": config_bytes(self.actor.trained_model.config)}
        publication = self._source.publisher.begin(version, self.actor.step, layout, files=files)
        for name, tensor in own.items():
            publication.put(name, tensor)
        publication.finish().result(60.0)
        return {"path": str(self._source.arena.versions[version].path)}

    # -- what it is compared with ----------------------------------------------------------------------

    def bare(self, groups: list[list[Any]], steps: int) -> Row:
        """Optimizer steps of Megatron's own parts over this very model: its schedule, its cross-entropy, its
        optimizer, and the same passes, packed and on the device beforehand. `groups` are those of each micro-batch.

        The learning rate is 0, so that the weights stay what they are.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from gyre.workloads.learner.losses import policy_rows
        from gyre.workloads.learner.packing import pack
        from gyre.workloads.megatron.model.gpt import SegmentParams

        torch, policy, settings = self.torch, self.actor.backend.policy, self.actor.settings
        device, vocab = policy.device, policy.architecture.vocab
        batches = []
        tokens = 0
        for micro in groups:
            parts = []
            for part in pack(policy_rows(micro, settings), max_tokens=policy.settings.pass_tokens):
                there = part.to(device)
                labels = torch.zeros_like(there.tokens)
                labels[there.columns] = there.targets % vocab
                mask = torch.zeros(len(there.tokens), device=device)
                mask[there.columns] = 1.0
                parts.append((there, SegmentParams.of(part.lengths, device), labels, mask))
                tokens += len(part.tokens)
            batches.append(parts)

        def forward(queue: Any, model: Any) -> tuple[Any, Any]:
            part, segments, labels, mask = next(queue)
            policy.module.rotary_pos_emb.positions = part.positions
            losses = model(
                part.tokens[None], part.positions[None], None, labels=labels[None], packed_seq_params=segments
            )

            def loss(output: Any) -> tuple[Any, Any, Any]:
                return (output[0].float() * mask).sum(), mask.sum().to(torch.int), {}

            return losses, loss

        count = sum(float(one[3].sum()) for parts in batches for one in parts)
        rates = [group["lr"] for group in policy.optimizer.param_groups]
        for group in policy.optimizer.param_groups:
            group["lr"] = 0.0
        took = []
        with policy._seam():
            for _ in range(steps):
                began = self._now()
                for parts in batches:
                    get_forward_backward_func()(
                        forward_step_func=forward,
                        data_iterator=iter(parts),
                        model=[policy.ddp],
                        num_microbatches=len(parts),
                        seq_length=max(len(one[0].tokens) for one in parts),
                        micro_batch_size=1,
                        forward_only=False,
                    )
                finalize_model_grads([policy.ddp])
                policy.ddp.scale_gradients(1.0 / count)
                policy.optimizer.step()
                policy.zero()
                took.append(self._now() - began)
        for group, rate in zip(policy.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return {
            "steps_s": [round(one, 4) for one in took],
            "input_tokens": tokens,
            "passes": sum(len(parts) for parts in batches),
            **self.memory(),
        }

    def deterministic(self, on: bool) -> None:
        from gyre.workloads.learner.devices import make_deterministic

        if on:
            make_deterministic()
        else:
            self.torch.use_deterministic_algorithms(False)
