"""A Ray cluster of several machines: the head here, each other one in namespaces of its own.

Such a machine has its own address, its own shared memory, which goes with it, and its own clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kill.several_nodes import HEALTH
from tests.soak.network import HEAD, Link

JOIN_S = 180.0
"""A machine that is busy otherwise takes long to start Ray."""

DIES_S = 20.0
PREEMPTION = 2
"""`DrainNodeReason` of Ray's GCS: the machine goes whatever runs there."""

CLOCK = '''"""A clock that is wrong, for every Python of a machine."""
import os, time
_right, _off = time.time, float(os.environ.get("GYRE_SOAK_CLOCK_OFF_S", "0"))
time.time = lambda: _right() + _off
'''


class Machine:
    """A Ray node in a namespace. `off_s` is how wrong its clock is."""

    def __init__(self, number: int, address: str, folder: Path, *, cpus: int, off_s: float) -> None:
        self.link = Link(number)
        self.off_s = off_s
        self.node_id = ""
        environment = {
            **os.environ,
            **HEALTH,
            "GYRE_SOAK_CLOCK_OFF_S": str(off_s),
            "PYTHONPATH": os.pathsep.join([str(folder / "clock"), os.environ.get("PYTHONPATH", os.getcwd())]),
        }
        ray = Path(sys.executable).with_name("ray")
        words = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"']
        words += [str(ray), "start", f"--address={address}", f"--node-ip-address={self.link.address}"]
        words += [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--block"]
        with open(folder / f"machine{number}.log", "wb") as log:
            self._process = subprocess.Popen(
                self.link.command(*words), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def is_up(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """The machine loses its power."""
        self.link.signal_all(signal.SIGKILL)
        self._process.kill()
        self._process.wait(DIES_S)

    def close(self) -> None:
        self.kill()
        self.link.close()


class SoakCluster:
    """The head and its machines. `with` starts it, connects this process, and ends it."""

    def __init__(self, folder: Path, *, head_cpus: int, cpus: int) -> None:
        self._folder = folder
        self._head_cpus, self._cpus = head_cpus, cpus
        self._number = 10
        self.machines: list[Machine] = []
        self.address = ""

    def __enter__(self) -> Self:
        os.environ.update(HEALTH)  # Ray reads them when its processes start
        import ray
        from ray.cluster_utils import Cluster

        clock = self._folder / "clock"
        clock.mkdir()
        (clock / "sitecustomize.py").write_text(CLOCK)
        head = {"num_cpus": self._head_cpus, "node_ip_address": HEAD, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        ray.init(address=self.address, namespace="gyre", log_to_driver=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for machine in self.machines:
            machine.close()
        ray.shutdown()
        self._cluster.shutdown()

    def add(self, *, off_s: float = 0.0) -> Machine:
        """A machine comes, under an address that none had. Raises TimeoutError if it does not join."""
        import ray

        known = {node["NodeID"] for node in ray.nodes()}
        self._number += 1
        machine = Machine(self._number, self.address, self._folder, cpus=self._cpus, off_s=off_s)
        self.machines.append(machine)
        deadline = time.monotonic() + JOIN_S
        while not machine.node_id:
            for node in ray.nodes():
                if node["NodeID"] not in known and node["NodeManagerAddress"] == machine.link.address:
                    machine.node_id = node["NodeID"]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{machine.link.name} did not join in {JOIN_S:g} s")
            time.sleep(0.1)
        return machine

    def remove(self, machine: Machine) -> None:
        self.machines.remove(machine)
        machine.close()

    def notify(self, machine: Machine, within_s: float) -> None:
        """What a cloud's agent does when it hears that a machine will be taken back."""
        from ray._raylet import GcsClient

        deadline_ms = int((time.time() + within_s) * 1000)
        GcsClient(address=self.address).drain_node(machine.node_id, PREEMPTION, "spot", deadline_ms)
