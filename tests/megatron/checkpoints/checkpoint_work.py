"""What rank processes do in the tests of checkpoints. Nothing here imports Megatron by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.disk import Disk
from tests.megatron.work import Steps, actor_on, named_weights, random_groups, take_step


def train_and_checkpoint(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path, *, background: bool
) -> dict[str, Any]:
    """A checkpoint after the first step; `background`: its writing waits until the others are taken. `after` is what
    those came to."""
    import threading

    from gyre.workloads.learner import checkpoint_writer

    trained = threading.Event()
    write = checkpoint_writer._write_files

    def late(*args: Any) -> None:
        assert trained.wait(60)
        write(*args)

    with actor_on(rank, ranks, port, config) as actor:
        actor.warm_start()
        take_step(actor, steps[0])
        if background:
            checkpoint_writer._write_files = late
            assert actor.checkpoint(folder, background=True)
            assert not actor.checkpoint_written(wait=False)
        else:
            assert not actor.checkpoint(folder)
            assert actor.checkpoint_written(wait=False)
        state = actor.state()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps[1:]]
        assert not (folder / "actor.json").exists() or not background, "it was whole before it was written"
        trained.set()
        assert actor.checkpoint_written(wait=True)
        checkpoint_writer._write_files = write
        after = {"metrics": metrics, "weights": named_weights(actor), "state": actor.state()}
        actor.forget_memory()
        return {"at": state, "after": after}


def what_is_not_on_the_disk(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> list[str]:
    """Which files of a checkpoint that is said to be written are not, after a loss of power."""
    with pytest.MonkeyPatch.context() as patch, actor_on(rank, ranks, port, config) as actor:
        disk = Disk(patch)
        take_step(actor, steps[0])
        actor.checkpoint(folder, background=True)
        assert actor.checkpoint_written(wait=True)
        return disk.missing(folder)


def restore_and_train(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """Another seed and something accumulated, which the checkpoint must replace."""
    with actor_on(rank, ranks, port, {**config, "seed": 99}) as actor:
        actor.accumulate(random_groups(100, 3)[rank::ranks], step=1, index=0)
        actor.restore(folder)
        state = actor.state()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps[1:]]
        after = {"metrics": metrics, "weights": named_weights(actor), "state": actor.state()}
        actor.forget_memory()
        return {"at": state, "after": after, "warm": actor.warm_start()}


def checkpoint_and_die(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, whole: Path, cut: Path
) -> None:
    """A checkpoint after the first step, and one after the second, in the midst of whose writing rank 1 is killed."""
    import os
    import signal

    from gyre.workloads.gang import state_files

    with actor_on(rank, ranks, port, config) as actor:
        actor.warm_start()
        take_step(actor, steps[0])
        actor.checkpoint(whole)
        take_step(actor, steps[1])
        state_files.CHUNK_BYTES = 4 * state_files.PAGE_BYTES
        write_at, count = state_files._write_at, 0

        def write(*args: Any) -> None:
            nonlocal count
            count += 1
            write_at(*args)
            if rank == 1 and count >= 5:  # several threads count
                os.kill(os.getpid(), signal.SIGKILL)

        state_files._write_at = write
        assert actor.checkpoint(cut, background=True)
        actor.checkpoint_written(wait=True)


def restore_in_turn(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folders: list[Path]
) -> dict[str, Any]:
    """The folders one after another, until one is taken: what was said of the others, the state before and after each
    of them, and the steps from there."""
    from gyre.workloads.learner.errors import CheckpointMismatch

    with actor_on(rank, ranks, port, {**config, "seed": 99}) as actor:
        refusals, states = [], [actor.state()]
        for folder in folders:
            try:
                actor.restore(folder)
                states.append(actor.state())
                break
            except CheckpointMismatch as error:
                refusals.append(str(error))
                states.append(actor.state())
        metrics = [take_step(actor, micro_batches) for micro_batches in steps[actor.step :]]
        after = {"metrics": metrics, "state": actor.state()}
        return {"refusals": refusals, "states": states, "after": after}


def checkpoint_first_model(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """A checkpoint before the first step, and what training comes to from there."""
    with actor_on(rank, ranks, port, config) as actor:
        actor.warm_start()
        actor.checkpoint(folder)
        first = actor.state()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps]
        return {"first": first, "metrics": metrics, "state": actor.state()}


def restore_first_model(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """A gang that has trained other groups goes back to the first model."""
    with actor_on(rank, ranks, port, config) as actor:
        actor.warm_start()
        take_step(actor, [random_groups(100, 4)])
        actor.restore(folder)
        first = actor.state()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps]
        return {"first": first, "metrics": metrics, "state": actor.state()}


def checkpoint_without_room(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    with actor_on(rank, ranks, port, config) as actor:
        take_step(actor, steps[0])
        actor.backend.writer._buffer._machine.available = lambda: (0, 1 << 40)
        assert not actor.checkpoint(folder, background=True), "what is written is the state itself"
        state = actor.state()
        take_step(actor, steps[1])
        assert actor.checkpoint_written(wait=True)
        return {"state": state, "health": actor.health()["checkpoint"]}


def refused_restore(rank: int, ranks: int, port: int, config: dict[str, Any], folder: Path) -> str:
    from gyre.workloads.learner.errors import CheckpointMismatch

    with actor_on(rank, ranks, port, config) as actor:
        try:
            actor.restore(folder)
        except CheckpointMismatch as error:
            return str(error)
    return ""


def checkpoint_and_say(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path, rows: Any
) -> Any:
    """A checkpoint after a step, and the log-probs of the rows' tokens by the model that is in it."""
    import numpy as np

    from tests.fsdp.work import passes_of

    with actor_on(rank, ranks, port, config) as actor:
        take_step(actor, steps[0])
        actor.checkpoint(folder)
        said = actor.backend.forward([passes_of([row])[0] for row in rows])
        return np.concatenate([one.numpy() for one in said])


def checkpoint_untrained(rank: int, ranks: int, port: int, config: dict[str, Any], folder: Path) -> None:
    with actor_on(rank, ranks, port, config) as actor:
        actor.checkpoint(folder)


def exported(rank: int, ranks: int, port: int, arguments: list[str]) -> tuple[int, str, str]:
    """The verb, in a process that has imported Megatron already."""
    from click.testing import CliRunner

    from gyre.api.cli import main

    found = CliRunner().invoke(main, ["export", *arguments])
    return found.exit_code, found.stdout, found.stderr


def train_in_memory(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    steps: Steps,
    job: Path,
    *,
    dies: int | None = None,
    actor_on: Any = actor_on,
) -> dict[str, Any]:
    """All steps, each one's state kept in host memory. Rank `dies` is killed after the second."""
    import os
    import signal

    with actor_on(rank, ranks, port, config, job) as actor:
        actor.warm_start()
        metrics = []
        for at, micro_batches in enumerate(steps):
            metrics.append(take_step(actor, micro_batches))
            if at == 1:
                actor.backend.memory._memory.settle()
                states = actor.state()
                if rank == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
        actor.forget_memory()
        return {"metrics": metrics, "at": states, "after": actor.state(), "weights": named_weights(actor)}


def keeps_what_it_copies(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    steps: Steps,
    job: Path,
    *,
    actor_on: Any = actor_on,
) -> bool:
    """Two steps, where a copy takes longer than a step: whether the state of the first is kept as it was."""
    import time

    import torch

    with actor_on(rank, ranks, port, config, job) as actor:
        actor.warm_start()
        kept = actor.backend.memory
        copiers = kept._memory._copiers
        copy = copiers._memory.copy

        def slowly(into: torch.Tensor, of: torch.Tensor) -> None:
            time.sleep(0.02)
            copy(into, of)

        copiers._memory.copy = slowly
        take_step(actor, steps[0])
        was = [part.tensor.detach().clone() for part in kept._state.parts()]
        take_step(actor, steps[1])
        (record,) = [one for one in kept._memory.records() if one.step == 1]
        found = [(part.name, torch.zeros_like(part.tensor)) for part in kept._state.parts()]
        kept._memory.load(record, found)
        return all(torch.equal(mine, wanted) for (_, mine), wanted in zip(found, was, strict=True))


def train_without_host_memory(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    steps: Steps,
    job: Path,
    *,
    actor_on: Any = actor_on,
) -> dict[str, Any]:
    """All steps, where the last rank's machine has no memory to spare."""
    from gyre.workloads.gang import machine_memory

    real = machine_memory.available_memory
    if rank == ranks - 1:
        machine_memory.available_memory = lambda: (1 << 20, 1 << 40)
    try:
        with actor_on(rank, ranks, port, config, job) as actor:
            actor.warm_start()
            metrics = [take_step(actor, micro_batches) for micro_batches in steps]
            return {"metrics": metrics, "state": actor.state(), "said": actor.health()["memory_checkpoint"]}
    finally:
        machine_memory.available_memory = real


def restore_from_memory(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    steps: Steps,
    job: Path,
    *,
    newer_than: int = 0,
    at_most: int = 9,
    forgetful: int | None = None,
    damaged: int = 0,
    folder: Path | None = None,
    actor_on: Any = actor_on,
) -> dict[str, Any]:
    """A new gang, of another seed, one of whose ranks was started again: what it finds in memory, and the steps from
    there. Rank `forgetful` has lost its newest state. So many of the last rank's states, the newest first, have a
    flipped bit: `damaged`. With `folder` a checkpoint is written there at once, and those steps are made from it."""
    incarnation = 2 if rank == ranks - 1 else 1
    with actor_on(rank, ranks, port, {**config, "seed": 99}, job, incarnation=incarnation) as actor:
        lacks = not actor.backend.has_weights
        assert lacks != ("lora" in config), "no weights are read that a restore replaces"
        memory = actor.backend.memory._memory
        if rank == forgetful:
            memory._record_path(memory.records()[0].slot).unlink()
        for record in memory.records()[:damaged] if rank == ranks - 1 else ():
            flip(memory._files(record.slot)[0])
        before = actor.state()
        actor._first_pass = actor.rehearse  # as on a GPU
        at = actor.restore_from_memory(newer_than=newer_than, at_most=at_most)
        if at is None and damaged:
            spoilt = actor.state()["step"]
            actor.begin(1)
            return {"step": None, "spoilt": spoilt, "then": actor.state()["step"]}
        if at is None:
            return {"step": None, "unchanged": actor.state() == before}
        state = actor.state()
        if folder is not None:
            actor.checkpoint(folder)
            take_step(actor, [random_groups(100, 4)])
            actor.restore(folder)
        metrics = [take_step(actor, micro_batches) for micro_batches in steps[at:]]
        actor.forget_memory()
        return {
            "step": at,
            "at": state,
            "metrics": metrics,
            "after": actor.state(),
            "weights": named_weights(actor),
        }


def flip(path: Path) -> None:
    """One bit of the file's first byte."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def refusals(rank: int, ranks: int, port: int, folder: Path, records: list[dict[str, Any]]) -> list[str]:
    """What is said of one rank's state in `folder` with each of these records in turn; "" where nothing is wrong."""
    import json
    from types import SimpleNamespace

    from gyre.workloads.gang.state_files import StateDamaged, record_path
    from gyre.workloads.megatron.checkpoints.stored import StoredState, state_path

    alone: Any = SimpleNamespace(rank=0, world_size=1)
    said = []
    for record in records:
        record_path(state_path(folder, 0)).write_text(json.dumps(record))
        try:
            state = StoredState(folder, rank_count=1, tensor_parallel=1, ranks=alone, architecture=None)  # type: ignore[arg-type]
            said.append(state.problem())
        except StateDamaged as error:
            said.append(str(error))
    return said


def layouts_refused(rank: int, ranks: int, port: int, layouts: list[Any]) -> list[bool]:
    """Whether a checkpoint that says of itself that such a layout wrote it is damaged."""
    from gyre.workloads.gang.state_files import StateDamaged
    from gyre.workloads.megatron.checkpoints.on_disk import _layout_of

    refused = []
    for layout in layouts:
        try:
            _layout_of({"layout": layout})
            refused.append(False)
        except StateDamaged:
            refused.append(True)
    return refused
