"""Parts with two instances: one is killed, its engine crashes, one is drained, an agent alone is killed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import psutil
from gpu_plane.bench import Bench
from gpu_plane.children import Instance
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import gone_within, gpu_seen_fresh, gpu_used_mib, left_of, short_name
from gpu_plane.plane import Plane, samples_held
from gpu_plane.trainer import Trainer


class Pair(Bench):
    """Parts `two`, `crash`, `drain` and `ends`."""

    def pair(self) -> tuple[Plane, Trainer]:
        self.living("b", "c")
        plane = self.planes["pair"]
        assert plane.trainer is not None
        return plane, plane.trainer

    def start_pair(self, out: Row, until: float) -> None:
        """Only begun here: they start while the transcript is recorded."""
        plane = self.plane("pair", until)
        half = self.scale.running // 2
        for number, name in enumerate(("b", "c")):
            gpu = number if self.gpus > 1 else 0
            self.instance(plane, name, running=half, gpu=gpu, memory=0.5)
        out["gpus"] = self.gpus

    def two(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            out[f"loaded_{name}"] = self.loaded(plane, self.instances[name], until)
        out["gpu_used_mib"] = gpu_used_mib()
        began = now()
        trainer.feed(scale, 4 * scale.running // scale.n)
        time.sleep(scale.settle_s)
        warm = began + scale.settle_s / 3
        victim = self.instances["c"]
        options = {key: value for key, value in victim.options.items() if key not in ("log", "tail")}
        struck = now()
        out["rate_of_both"] = round(both := plane.rate(warm, struck), 1)
        out["rate_each"] = {name: round(plane.rate(warm, struck, name), 1) for name in ("b", "c")}
        held = samples_held(plane, "c", struck)
        progress = victim.log.rows("progress")[-1]
        killed = victim.kill()
        left = plane.log.wait("InstanceLeft", until, struck, instance="c")
        self.instances["c"] = back = Instance(plane.place, options)  # who joins before takes its place untold
        out["killed"] = {
            "samples_held": held,
            "detected_s": round(left["at"] - struck, 3),
            "reason": left["reason"],
            "samples_moved": left["moved"],
            "tokens_moved": left["tokens"],
            "last_report_before_s": round(struck - progress["at"], 3),
            "tokens_lost_with_it_at_most": round(plane.rate(warm, struck, "c") * (struck - progress["at"])),
            "processes_gone_s": gone_within(killed, 3.0)[0],
            "processes_left": left_of(killed),
        }
        loaded = self.loaded(plane, back, min(until - 25.0, struck + scale.absent_s), struck)
        absent_s = loaded["at"] - struck
        out["killed"]["back_s"] = round(absent_s, 2)
        out["rate_of_one"] = round(alone := plane.rate(struck + max(2.0, absent_s / 2), loaded["at"]), 1)
        out["killed"] |= self._continued(plane, struck, loaded["at"], "c", left["moved"])
        time.sleep(scale.after_s)
        stopped = now()
        out["rate_of_both_after"] = round(plane.rate(loaded["at"] + min(2.0, scale.after_s / 2), stopped), 1)
        rows = [row for row in plane.log.rows("state", began) if row["at"] <= stopped]
        made = rows[-1]["generated"] - rows[0]["generated"]
        ideal = both * (stopped - began - absent_s) + alone * absent_s
        out["tokens"], out["ideal_tokens"] = made, round(ideal)
        out["of_ideal"] = round(made / ideal, 4) if ideal else None
        trainer.no_more()
        trainer.wait_all(until)
        out["seconds"] = round(now() - began, 2)
        out["account"] = account = plane.account()
        out["checked"] = trainer.checked()
        extra = account["generated"] - account["delivered"]
        out["generated_again"] = extra - sum(account["discarded"].values())
        out["events"] = dict(Counter(row["kind"] for row in plane.log.rows() if row["kind"] != "state"))

    def crash(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            self.loaded(plane, self.instances[name], min(until, now() + 40.0))
        trainer.feed(scale, scale.running // 2 // scale.n)  # half full: who loses its instance finds room
        time.sleep(min(4.0, scale.settle_s))
        victim = self.instances["c"]
        processes = [process for process in victim.tree() if process.pid != victim.pid]
        inner = [process for process in processes if short_name(process) == "scheduler"]
        target = inner[0] if inner else processes[-1]
        out["killed"] = {"pid": target.pid, "what": short_name(target)}
        struck = now()
        target.kill()
        try:
            died = plane.log.wait("EngineDied", min(until, struck + 30.0), struck, instance="c")
        except PartFailed:  # its server goes on without it; then that is killed too
            out["scheduler_alone_not_noticed"] = True
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if short_name(process) == "launch_server":
                        process.kill()
            died = plane.log.wait("EngineDied", until, struck, instance="c")
        out["detected_s"] = round(died["at"] - struck, 3)
        out["error"], out["tail"] = died["error"], died["tail"][-1500:]
        out["processes_gone_s"], out["processes_left"] = gone_within(processes, 5.0)
        loaded = self.loaded(plane, victim, until, struck)
        out["working_again_s"] = round(loaded["at"] - struck, 2)
        out |= self._continued(plane, struck, loaded["at"], "c", 10**9)
        out["gpu_used_mib"] = gpu_used_mib()
        time.sleep(1.0)
        out["rate"] = round(plane.rate(now() - 1.0, now()), 1)
        trainer.no_more()
        trainer.wait_all(until)
        out["account"], out["checked"] = plane.account(), trainer.checked()

    def drain(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            self.loaded(plane, self.instances[name], min(until, now() + 40.0))
        trainer.feed(scale, scale.running // 2 // scale.n)
        time.sleep(min(4.0, scale.settle_s))
        leaver = self.instances["c"]
        processes, held = leaver.tree(), samples_held(plane, "c", now())
        notice = now()
        plane.ask("/v1/drain", {"instance": "c", "deadline_s": 30.0})
        over = plane.log.wait("HandedOver", until, notice, instance="c")
        left = plane.log.wait("InstanceLeft", until, notice, instance="c")
        out["samples_held"] = held
        out["handed_over_s"] = round(over["at"] - notice, 3)
        out["connection_closed_s"] = round(left["at"] - notice, 3)
        out["reason"], out["moved_at_the_end"] = left["reason"], left["moved"]
        leaver.process.wait(max(1.0, until - now()))
        out["agent_and_engine_ended_s"] = round(now() - notice, 3)
        out["exit_status"] = leaver.process.returncode
        out["processes_left"] = gone_within(processes, 2.0)[1]
        out |= self._continued(plane, notice, now(), "c", held)
        trainer.no_more()
        trainer.wait_all(until)
        out["account"], out["checked"] = plane.account(), trainer.checked()

    def ends(self, out: Row, until: float) -> None:
        """The agent alone is killed: the guard ends the engine."""
        (instance,) = self.living("b")
        processes = instance.tree()
        instance.process.kill()
        instance.process.wait()
        out["engine_gone_s"], out["processes_left"] = gone_within(processes, 20.0)
        self.planes["pair"].stop()
        out["missing"] = [row["missing"] for row in self.planes["pair"].log.rows("Stopping")]
        until_free = now() + 5.0
        while (used := gpu_used_mib()) is not None and max(used) > 2000 and now() < until_free:
            time.sleep(0.5)
        out["gpu_used_mib"], out["gpu_free_and_total_mib_seen_fresh"] = used, gpu_seen_fresh()
