"""The part in which instances come, die and leave while steps go on."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from gpu_plane.children import Instance
from gpu_plane.follow import Follow, PartFailed, Row, now
from gpu_plane.machine import gone_within, short_name
from gpu_plane.plane import Plane
from gpu_plane.run import tails
from training_loop.bench import LoopBench
from training_loop.rates import exact, rates, versions_served
from training_loop.uptime import ideal_of


class Faults(LoopBench):
    """Part `faults`."""

    def faults(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        over = threading.Event()
        out["events"] = events = []
        began, first = now(), trainer.step + 1

        def tell(what: str, **fields: Any) -> None:
            events.append({"at": round(now() - began, 3), "what": what, **fields})

        def story() -> None:
            try:
                self._story(out, plane, tell, until - 25.0)
            except BaseException as error:
                out["story_failed"] = f"{type(error).__name__}: {error}"[:3000]
                out["story_traceback"] = traceback.format_exc()[-2000:]
                out["tails"] = tails(self)
            finally:
                over.set()

        thread = threading.Thread(target=story, daemon=True)
        thread.start()
        rows = []
        try:
            rows = trainer.run(10_000, until, staleness=1, label="faults", go_on=lambda: not over.is_set())
        finally:
            over.set()
            rows = [row for row in trainer.steps if row["step"] >= first]
            out["steps"] = rows
            out["steps_ended_at"] = [round(row["began_at"] + row["seconds"] - began, 2) for row in rows]
            out["rates"] = rates(rows, since=0)
        thread.join(5.0)
        if rows:
            gaps = [row["seconds"] for row in rows]
            out["longest_step_s"], out["median_step_s"] = (
                round(max(gaps), 2),
                round(statistics.median(gaps), 2),
            )
        if rows:
            undisturbed = self.results["parts"].get("loop", {}).get("rates", {}).get("loop_tokens_s")
            out["over_undisturbed"] = (
                round(out["rates"]["loop_tokens_s"] / undisturbed, 4) if undisturbed else None
            )
            last = rows[-1]["began_at"] + rows[-1]["seconds"]
            out["instances"] = ideal_of(plane.log.rows(), began, last, self.scale.running)
        out["versions"] = versions_served(plane, trainer, first, trainer.step)
        out["checked"], out["account"] = trainer.checked(), plane.account()
        out["account_exact"] = exact(out["account"])
        state = trainer.actor.call("state", 30.0)
        out["trained_by_actor"] = state["trained"]
        if out.get("story_failed"):
            raise PartFailed(out["story_failed"])

    def _story(self, out: Row, plane: Plane, tell: Any, until: float) -> None:
        log = Follow(plane.log.path)

        def loaded(instance: Instance, after: float) -> Row:
            while True:
                with contextlib.suppress(PartFailed):
                    return log.wait("WeightsLoaded", min(until, now() + 0.5), after, instance=instance.name)
                instance.check()
                if now() > until:
                    raise PartFailed(f"{instance.name} did not load its weights in time")

        def holds(name: str, wanted: int) -> int:
            while now() < until:
                rows = log.rows("state")
                held = int(rows[-1]["instances"].get(name, [0, 0])[1]) if rows else 0
                if held >= wanted:
                    return held
                time.sleep(0.02)
            raise PartFailed(f"{name} was given no work")

        began = now()
        b = self.join(plane, "b", self.scale, memory=0.5)
        loaded(b, began)
        out["joined_s"] = round(now() - began, 2)
        tell("b joined")
        some = self.scale.running // 8
        both_s = 4.0 if self.cuda else 1.0  # what both make is measured then
        time.sleep(both_s)

        a = self.instances["a"]
        holds("b", 1)
        held = holds("a", some)
        processes = [process for process in a.tree() if process.pid != a.pid]
        inner = [process for process in processes if short_name(process) == "scheduler"]
        target = inner[0] if inner else processes[-1]
        struck = now()
        target.kill()
        tell("a's engine killed", held=held)
        died = log.wait("EngineDied", min(until, struck + 60.0 * self.patience), struck, instance="a")
        tell("a's engine reported dead")
        gone = gone_within(processes, 5.0)
        back = loaded(a, struck)
        tell("a serves again")
        out["engine_killed"] = {
            "samples_held": held,
            "detected_s": round(died["at"] - struck, 3),
            "processes_gone_s": gone[0],
            "processes_left": gone[1],
            "serves_again_s": round(back["at"] - struck, 2),
            **self._continued(_With(log), struck, back["at"], "a", held),  # type: ignore[arg-type]
        }

        time.sleep(both_s)
        holds("a", 1)
        held = holds("b", some)
        processes = b.tree()
        options = {key: value for key, value in b.options.items() if key not in ("log", "tail")}
        struck = now()
        b.process.kill()
        b.process.wait()
        tell("b's agent killed", held=held)
        left = log.wait("InstanceLeft", min(until, struck + 30.0), struck, instance="b")
        tell("b reported gone", moved=left["moved"])
        gone = gone_within(processes, 20.0)
        out["agent_killed"] = {
            "samples_held": held,
            "detected_s": round(left["at"] - struck, 3),
            "samples_moved": left["moved"],
            "tokens_moved": left["tokens"],
            "processes_gone_s": gone[0],
            "processes_left": gone[1],
            **self._continued(_With(log), struck, now(), "b", left["moved"]),  # type: ignore[arg-type]
        }
        self.instances["b"] = Instance(plane.place, options)
        if "big" in self.wanted:
            try:
                self._begin_big(until)  # it starts beside b
            except Exception as error:
                tell("the bigger model did not begin", error=str(error)[:500])
        back = loaded(self.instances["b"], struck)
        tell("b serves again")
        out["agent_killed"]["serves_again_s"] = round(back["at"] - struck, 2)
        holds("b", 1)
        tell("b has work")

        held = holds("a", some)
        processes = a.tree()
        notice = now()
        plane.ask("/v1/drain", {"instance": "a", "deadline_s": 30.0})
        over = log.wait("HandedOver", min(until, notice + 30.0), notice, instance="a")
        tell("a handed over", held=held)
        left = log.wait("InstanceLeft", min(until, notice + 30.0), notice, instance="a")
        with contextlib.suppress(subprocess.TimeoutExpired):
            a.process.wait(max(1.0, min(until - now(), 30.0)))
        tell("a has left")
        out["drained"] = {
            "samples_held": held,
            "handed_over_s": round(over["at"] - notice, 3),
            "connection_closed_s": round(left["at"] - notice, 3),
            "agent_and_engine_ended_s": round(now() - notice, 3),
            "exit_status": a.process.poll(),
            "processes_left": gone_within(processes, 2.0)[1],
            **self._continued(_With(log), notice, now(), "a", held),  # type: ignore[arg-type]
        }
        steady = len(self.small()[1].steps) + 2
        while len(self.small()[1].steps) < steady and now() < until:
            time.sleep(0.05)
        tell("two steps with b alone")


@dataclass
class _With:
    """What `Bench._continued` reads of a plane."""

    log: Follow
