"""Checkpoints of the Megatron actor in host memory, beside the same on disk: what training stands for, what goes on
beside it, and what a rank that is killed by SIGKILL has back.

`hold` is what training stands for. In memory it is the copy of a rank's tensors, into plain pages and into page-locked
ones; a thread hashes them then, and the state counts (`sealed`). On disk it is the checksum of the weights, unless it
is known, and the copy of everything into memory in Megatron's own order; a thread writes it then (`write`).

What came back is compared by sums over every tensor's bits, optimizer included, and by the step that follows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_loop.actors.actor import ActorFailed, Row, Work, now
from training_loop.actors.gang import ActorGang
from training_loop.trainer import Shape, inputs, synthetic

FIRST_GROUP = 740_000_000
SAVES = 3
SLOW_GB_S = 0.3
"""There is no time to wait for a disk like that."""
NEVER = float("inf")


class MemoryWork(Work):
    """An actor that keeps a state in memory when it is told to, and not by itself."""

    def setup(self, layout: Row | None = None, port: int = 0) -> Row:
        told = super().setup({**(layout or {}), "memory_checkpoint_share": 1.0}, port)
        if self._kept.trouble:
            raise ActorFailed(f"no checkpoints in host memory: {self._kept.trouble}")
        self._kept._next_at = NEVER
        self._kept._has_room = True  # or `begin` would take it, page-locked, in the background
        self._own_pin = self._memory._pin
        return {**told, "state_bytes": self._state_bytes()}

    @property
    def _kept(self) -> Any:
        return self.actor._memory

    @property
    def _memory(self) -> Any:
        return self._kept._memory

    def _state_bytes(self) -> int:
        from gyre.workloads.gang.host_memory import plan

        return int(plan(self._kept.tensors())[1])

    def make_room(self, pin: bool) -> Row:
        """Two slots, page-locked or not. A second time it changes that alone."""
        self._memory._pin = self._own_pin if pin else None
        tensors = self._kept.tensors()
        _, seconds = self._timed(lambda: self._memory.make_room(tensors))
        return {"seconds": seconds, "pinned": len(self._memory._unpin)}

    def save(self) -> Row:
        """`seconds` is the hold, as in `apply`; `sealed_s` until the state counts."""
        self._memory.settle()
        began = self._now()
        self._kept._next_at = 0.0
        self._kept.save_if_due(self.actor.step, self.actor._metadata())
        self._kept._next_at = NEVER
        held = now() - began
        return {"seconds": held, "of_it_copy_s": self._memory.hold_s, "began_at": began}

    def seal(self, began_at: float) -> Row:
        self._memory.settle()
        return {"sealed_s": now() - began_at, "records": [one.step for one in self._memory.records()]}

    def fingerprint(self) -> str:
        """Of every bit of the rank's state."""
        torch, digest = self.torch, hashlib.sha256()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for name, tensor in self._kept.tensors():
            flat = tensor.detach().contiguous().flatten()
            bits = flat.view(whole[flat.element_size()]).to(torch.int64)
            places = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
            digest.update(f"{name} {int(bits.sum())} {int((bits * places).sum())} ".encode())
        return digest.hexdigest()

    def recall(self, at_most: int) -> Row:
        """`seconds` in all, of them `verify_s`."""
        memory, verify = self._memory, 0.0
        is_right = memory.is_right

        def timed(record: Any) -> bool:
            nonlocal verify
            began = now()
            right = bool(is_right(record))
            verify += now() - began
            return right

        memory.is_right = timed
        try:
            step, seconds = self._timed(lambda: self.actor.restore_from_memory(newer_than=0, at_most=at_most))
        finally:
            memory.is_right = is_right
        self._kept._next_at = NEVER
        return {"step": step, "seconds": seconds, "verify_s": verify}

    def forget(self) -> None:
        self.actor.forget_memory()


def measure(
    out: Row,
    until: float,
    *,
    shape: Shape,
    start: Callable[[int, str], ActorGang],
    place: Path,
    instead: Path,
    most_ranks: int,
    cuda: bool,
    wrote: Callable[[], None],
) -> None:
    """`start(ranks, name)` begins a gang of `MemoryWork`; gangs of one name take each other's place. `place` has room
    for a checkpoint on the disk that is to be measured; where that is slower than `SLOW_GB_S`, `instead` is used."""
    gangs: list[ActorGang] = []

    def begin(ranks: int, name: str) -> ActorGang:
        gangs.append(start(ranks, name))
        return gangs[-1]

    try:
        out["disk"] = probed = _probe(place, 512 << 20 if cuda else 8 << 20)
        if cuda and probed["write_gb_s"] < SLOW_GB_S:
            place = instead
            probed["instead"] = str(place)
        one = out["one"] = {}
        try:
            first, standby = begin(1, "one"), begin(1, "one")
            _ranks(one, first, until, shape, place, cuda)
            wrote()
            if most_ranks > 1:
                begin(2, "two")  # it imports meanwhile
            _killed(one, first, standby, until, shape)
        finally:
            wrote()
        for gang in gangs[:2]:
            gang.close()
        if most_ranks < 2:
            return
        if until - now() < (45.0 if cuda else 15.0):
            out["two"] = {"left_out": "no time was left for it"}
            return
        _ranks(out.setdefault("two", {}), gangs[2], until, shape, place, cuda)
        gangs[2].call("forget", 30.0)
    finally:
        for gang in gangs:
            gang.close()


def _ranks(row: Row, gang: ActorGang, until: float, shape: Shape, place: Path, cuda: bool) -> None:
    def left() -> float:
        return max(1.0, until - now())

    row["setup"] = told = gang.call("setup", left())
    size = told["state_bytes"]
    row["state_bytes_of_first_rank"] = size
    row["first_step"] = _step(gang, shape, 1, until)
    row["step"] = _step(gang, shape, 2, until)
    ways = ("plain",) if not cuda else ("plain", "pinned") if gang.ranks == 1 else ("pinned",)
    for way in ways:
        found: Row = {"make_room_s": _round(gang.call("make_room", left(), pin=way == "pinned")["seconds"])}
        row[way] = found
        found["saves"] = saves = []
        for _ in range(SAVES):
            saved = gang.call("save", left())
            sealed = gang.call("seal", left(), began_at=saved["began_at"])
            saves.append(
                {
                    "hold_s": _round(saved["seconds"]),
                    "copy_s": _round(saved["of_it_copy_s"]),
                    "sealed_s": _round(sealed["sealed_s"]),
                }
            )
        for key in ("hold_s", "sealed_s"):
            found[key] = statistics.median(save[key] for save in saves)
        found["hold_gb_s"] = round(size / statistics.median(save["copy_s"] for save in saves) / 1e9, 2)
    began = gang.call("save", left())["began_at"]
    row["step_beside_hash"] = _step(gang, shape, 3, until)
    gang.call("seal", left(), began_at=began)
    _on_disk(row, gang, until, shape, place)


def _on_disk(row: Row, gang: ActorGang, until: float, shape: Shape, place: Path) -> None:
    def left() -> float:
        return max(1.0, until - now())

    path = place / f"checkpoint-{gang.ranks}"
    try:
        began = now()
        told = gang.call("begin_checkpoint", left(), path=str(path))
        found: Row = {
            "hold_s": _round(told["seconds"]),
            "of_it_digest_s": _round(told["digest_s"]),
            "of_it_copy_s": _round(told["copy_s"]),
        }
        row["on_disk"] = found
        found["step_beside_write"] = _step(gang, shape, 4, until)
        wait_s = gang.call("end_checkpoint", left())["seconds"]
        found["whole_s"] = round(now() - began, 2)
        found["waited_for_rest_s"] = round(wait_s, 2)
        found["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        told = gang.call("restore", left(), path=str(path))
        found["restore_s"], found["restored_step"] = round(told["seconds"], 2), told["step"]
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _killed(row: Row, gang: ActorGang, standby: ActorGang, until: float, shape: Shape) -> None:
    """SIGKILL after a step that memory does not have; another process goes on from the one before."""

    def left() -> float:
        return max(1.0, until - now())

    found: Row = {}
    row["killed"] = found
    began = gang.call("save", left())["began_at"]
    gang.call("seal", left(), began_at=began)
    before, at = gang.call("fingerprint", left()), gang.call("state", left())["step"]
    after = _step(gang, shape, at + 1, until)
    standby.call("ready", left())
    struck = now()
    gang.kill()
    told = standby.call("setup", left())
    found["setup_s"] = told["setup_s"]
    told = standby.call("recall", left(), at_most=at)
    found["restore_s"], found["of_it_verify_s"] = _round(told["seconds"]), _round(told["verify_s"])
    found["killed_to_restored_s"] = round(now() - struck, 2)
    found["step"], found["step_before"] = told["step"], at
    found["every_bit_is_back"] = standby.call("fingerprint", left()) == before
    again = _step(standby, shape, at + 1, until)
    keys = ("loss", "grad_norm")
    found["next_step"] = {"before": [after[key] for key in keys], "after": [again[key] for key in keys]}
    found["make_room_again_s"] = _round(standby.call("make_room", left(), pin=True)["seconds"])
    standby.call("forget", left())
    if told["step"] != at or not found["every_bit_is_back"]:
        raise ActorFailed(f"the state did not come back: {found}")


def _step(gang: ActorGang, shape: Shape, step: int, until: float) -> Row:
    def left() -> float:
        return max(1.0, until - now())

    (groups,) = synthetic(shape, FIRST_GROUP + 1000 * step, 1)
    gang.call("begin", left(), step=step)
    part = gang.call("accumulate", left(), groups=groups, step=step, index=0)
    told = gang.call("apply", left(), step=step, indices=1, group_ids=[group.id for group in groups])
    seconds = part["seconds"] + told["seconds"]
    return {
        "step": step,
        "seconds": _round(seconds),
        "tokens_s": round(inputs(groups) / seconds, 1),
        **{key: told[key] for key in ("loss", "grad_norm")},
    }


def _probe(place: Path, size: int) -> Row:
    """What a plain file of that size takes there, on the disk when it ends."""
    path, block = place / "probe", b"\1" * (4 << 20)
    began = now()
    with open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = now() - began
    path.unlink()
    return {"place": str(place), "bytes": size, "write_gb_s": round(size / seconds / 1e9, 3)}


def _round(seconds: float) -> float:
    return round(seconds, 4)


def table(part: Row) -> list[str]:
    lines = [f"memory.disk = {part['disk']}"] if "disk" in part else []
    for ranks in ("one", "two"):
        row = part.get(ranks, {})
        for key in ("left_out", "state_bytes_of_first_rank", "step"):
            lines.extend([f"memory.{ranks}.{key} = {row[key]}"] if key in row else [])
        for way in ("plain", "pinned"):
            if way in row:
                keys = ("hold_s", "hold_gb_s", "sealed_s", "make_room_s")
                told = {key: row[way][key] for key in keys if key in row[way]}
                lines.append(f"memory.{ranks}.{way} = {told}")
        for key in ("step_beside_hash", "on_disk", "killed"):
            lines.extend([f"memory.{ranks}.{key} = {row[key]}"] if key in row else [])
    return lines
