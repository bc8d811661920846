"""Parts with one instance: its throughput through the plane, and new weights under running samples."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence

from gpu_plane.bench import Bench
from gpu_plane.children import Child, Instance
from gpu_plane.drive import drive
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import cpu_of, gone_within, gpu_used_mib, py_spy, spent, written_bytes
from gpu_plane.plane import Plane, samples_held, samples_held_within
from gpu_plane.scale import Ask, workload
from gpu_plane.trainer import Trainer


class OneInstance(Bench):
    """Parts `single` and `updates`."""

    def one(self) -> tuple[Plane, Instance, Trainer]:
        (instance,) = self.living("a")
        instance.engine_url()
        plane = self.planes["one"]
        assert plane.trainer is not None
        return plane, instance, plane.trainer

    def through_gyre(
        self,
        plane: Plane,
        asks: Sequence[Ask],
        until: float,
        children: dict[str, Child],
        *,
        take: bool = True,
    ) -> tuple[Row, list[int]]:
        trainer = plane.trainer
        assert trainer is not None
        trainer.taking = take
        before, began = cpu_of(children), now()
        ids = trainer.ask(asks, self.scale.n)
        ended, tokens = trainer.wait(ids, until)
        seconds = ended - began
        row = {
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_s": round(tokens / seconds, 1),
            "cores": spent(before, cpu_of(children), now() - began),
            "held": samples_held_within(plane, "a", began + 0.15 * seconds, began + 0.75 * seconds),
        }
        trainer.taking = True
        return row, ids

    def start_one(self, out: Row, until: float) -> None:
        plane = self.plane("one", until)
        began = now()
        instance = self.instance(plane, "a", running=self.scale.running, gpu=0, memory=0.6)
        out["loaded"] = self.loaded(plane, instance, until)
        out["from_agent_start_to_loaded_s"] = round(now() - began, 2)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["gpu_used_mib"] = gpu_used_mib()

    def single(self, out: Row, until: float) -> None:
        plane, instance, trainer = self.one()
        scale, url = self.scale, instance.engine_url()
        assert plane.manager is not None
        children = {"manager": plane.manager, "agent": instance}

        def bare(seed: int, in_flight: int, *, groups: int = scale.groups, varied: bool = False) -> Row:
            before, began = cpu_of(children), now()
            asks = workload(scale, seed, groups, varied=varied)
            row = asyncio.run(drive(url, asks, scale.n, in_flight, until - now()))
            row["cores"] = spent(before, cpu_of(children), now() - began)
            return row

        out["warm_up"] = [bare(1, scale.running, groups=scale.groups // 2)]
        row, _ = self.through_gyre(plane, workload(scale, 2, scale.groups // 2), until, children)
        out["warm_up"].append(row)

        disk, written = plane.disk_bytes(), written_bytes(plane.manager.pid)
        seed = 10
        over = scale.running * 17 // 16  # as many as the plane gives it
        for turn in range(scale.rounds):
            for kind, varied in (("fixed", False), ("varied", True)):
                ways = ("gyre", "bare", "bare_over")
                for way in (*ways[turn % 3 :], *ways[: turn % 3]):
                    if way != "gyre":
                        in_flight = over if way == "bare_over" else scale.running
                        row = bare(seed, in_flight, varied=varied)
                    else:
                        keep = turn == 0 and not varied
                        asks = workload(scale, seed, scale.groups, varied=varied)
                        row, ids = self.through_gyre(plane, asks, until, children, take=not keep)
                        if keep:
                            row["disk_bytes_per_token"] = round(
                                (plane.disk_bytes() - disk) / row["tokens"], 2
                            )
                            told = written_bytes(plane.manager.pid) - written
                            row["written_bytes_per_token"] = round(told / row["tokens"], 2)
                            trainer.take(ids)
                    out.setdefault(f"{way}_{kind}", []).append(row)
                    seed += 1
        for kind in ("fixed", "varied"):
            for way in ("bare", "bare_over"):
                ratio = _median(out[f"gyre_{kind}"]) / _median(out[f"{way}_{kind}"])
                out[f"gyre_over_{way}_{kind}"] = round(ratio, 4)
        out["bare_few"] = [bare(seed, scale.few, groups=scale.groups // 2)]
        out["account"] = plane.account()
        out["checked"] = trainer.checked()
        if out["gyre_over_bare_fixed"] < 0.97 and (tool := py_spy(self.place)) is not None:
            out["profile"] = self._profile(plane, instance, tool, seed + 3, until)

    def _profile(self, plane: Plane, instance: Instance, tool: str, seed: int, until: float) -> Row:
        """One more run with py-spy at the manager and the agent, by function, into the output folder."""
        assert plane.manager is not None
        assert plane.trainer is not None
        ids = plane.trainer.ask(workload(self.scale, seed, self.scale.groups), self.scale.n)
        time.sleep(0.5)
        runs = []
        for role, pid in (("manager", plane.manager.pid), ("agent", instance.pid)):
            command = [tool, "record", "--pid", str(pid), "--duration", "4", "--rate", "200"]
            command += [
                "--format",
                "raw",
                "--nonblocking",
                "--output",
                str(self.place / f"profile-{role}.txt"),
            ]
            runs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for run in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(20)
            run.kill()
        plane.trainer.wait(ids, until)
        found: Row = {}
        for role in ("manager", "agent"):
            path = self.place / f"profile-{role}.txt"
            if not path.exists():
                continue
            inner: Counter[str] = Counter()
            for line in path.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                inner.update({frame: int(count) for frame in set(stack.split(";"))})
            total = max(inner.values(), default=1)
            found[role] = {frame: round(count / total, 3) for frame, count in inner.most_common(60)}
        return found

    def updates(self, out: Row, until: float) -> None:
        plane, instance, trainer = self.one()
        scale = self.scale

        def run(version: int, row: Row, between: Callable[[Row], None]) -> None:
            mixed, began = trainer.mixed, now()
            before = Counter(trainer.versions)
            ids = trainer.ask(workload(scale, 100 + version, version * scale.groups), scale.n)
            self._until_generating(plane, began, until)
            between(row)
            published = trainer.publish(version, self.models[version % 2])
            loaded = self.loaded(plane, instance, until, published)
            row["publish_to_loaded_s"] = round(loaded["at"] - published, 3)
            row["agent_verified_s"], row["agent_pause_load_resume_s"] = loaded["fetch_s"], loaded["load_s"]
            row["held_then"] = samples_held(plane, "a", published)
            ended, tokens = trainer.wait(ids, until)
            row |= {"tokens": tokens, "seconds": round(ended - began, 3)}
            row["tokens_s"] = round(tokens / (ended - began), 1)
            row["samples_of_two_versions"] = trainer.mixed - mixed
            row["tokens_by_version"] = dict(Counter(trainer.versions) - before)

        def nothing(row: Row) -> None:
            return None

        def kill_the_manager(row: Row) -> None:
            assert plane.manager is not None
            killed = now()
            plane.manager.kill()
            plane.start(until, update_mode="retract")
            back = plane.log.wait("InstanceJoined", until, killed, instance="a")
            row["manager_killed_to_listening_s"] = round(plane.log.rows("Listening")[-1]["at"] - killed, 3)
            row["manager_killed_to_agent_back_s"] = round(back["at"] - killed, 3)
            row["held_by_agent"], row["kept"] = back["held"], back["kept"]
            # Weights are to come under running samples again.
            while samples_held(plane, "a", now()) < scale.running // 2:
                if now() > until:
                    raise PartFailed("nothing is generated after the manager came back")
                time.sleep(0.02)
            time.sleep(0.3)
            row["manager_killed_to_working_s"] = round(now() - 0.3 - killed, 3)

        out["in_place"] = {}
        run(1, out["in_place"], nothing)
        out["account_in_place"] = plane.account()
        out["retract_after_manager_killed"] = {}
        run(2, out["retract_after_manager_killed"], kill_the_manager)
        out["account"] = plane.account()
        out["checked"] = trainer.checked()

    def _until_generating(self, plane: Plane, since: float, until: float) -> None:
        """Some of the run's tokens have come in."""
        part = self.scale.groups * self.scale.n * self.scale.new // 5
        while now() < until:
            rows = plane.log.rows("state", since)
            if rows and rows[-1]["generated"] - rows[0]["generated"] >= part:
                return
            time.sleep(0.02)
        raise PartFailed("nothing is generated")

    def stop_one(self, out: Row, until: float) -> None:
        instance, plane = self.instances.get("a"), self.planes.get("one")
        if instance is not None:
            processes, began = instance.tree(), now()
            instance.stop(15.0)
            out["stopped_s"] = round(now() - began, 2)
            out["left"] = gone_within(processes, 2.0)[1]
            out["ended_by_itself"] = bool(instance.log.rows("ended"))
        if plane is not None:
            plane.stop()
            out["missing"] = [row["missing"] for row in plane.log.rows("Stopping")]
        out["gpu_used_mib"] = gpu_used_mib()


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row["tokens_s"] for row in rows)
